-- Questions to a dataset of `instrument convert --to parquet dataset`, for Spark: `spark-sql -f spark.sql`.

create or replace temporary view spans using parquet options (path 'dataset/spans');
create or replace temporary view requests using parquet options (path 'dataset/requests');

-- p99 by version
select service_version, name, count(*) as requests, percentile_disc(0.99) within group (order by duration_ns) as p99_ns
from requests where is_complete
group by service_version, name order by service_version, name;

-- device time and tokens by tenant
select attributes_text['tenant'] as tenant, count(*) as requests, sum(device_ns) as device_ns,
  sum(input_tokens) as input_tokens, sum(output_tokens) as output_tokens
from requests
group by tenant order by tenant;

-- loop blockers of the fleet
select coalesce(attributes_text['instrument.blocked_by'], '') as blocked_by, count(*) as times,
  sum(duration_ns) as blocked_ns, count(distinct host) as hosts
from spans where name = 'loop blocked'
group by blocked_by order by blocked_ns desc, blocked_by;

-- slowest requests with the longest part of their time
with parts as (
  select *, map_entries(phases_ns) as phases, map_entries(map(
    'queue', queue_ns, 'share', share_ns, 'waiting', waiting_ns, 'stall', stall_ns, 'transport', transport_ns,
    'sub_requests', sub_requests_ns, 'unknown', unknown_ns)) as others
  from requests where is_complete),
longest as (
  select *, array_max(transform(coalesce(concat(phases, others), others),
    part -> struct(part.value as ns, part.key as part))) as longest
  from parts)
select lower(hex(trace_id)) as trace, name, duration_ns, longest.ns as part_ns, longest.part as part
from longest
order by duration_ns desc, trace limit 10;

-- regressions by version: self time of a call, against the version that began before
with per_version as (
  select code, service_version, min(start_unix_ns) as first_ns, count(*) as calls,
    sum(duration_ns - children_ns) / count(*) as mean_ns
  from spans where code is not null group by code, service_version)
select code, service_version, calls, mean_ns,
  mean_ns / lag(mean_ns) over (partition by code order by first_ns, service_version) as ratio
from per_version order by code, first_ns;
