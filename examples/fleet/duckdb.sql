-- Questions to a dataset of `instrument convert --to parquet dataset`, for DuckDB: `duckdb < duckdb.sql`.

create or replace view spans as from read_parquet('dataset/spans/*/*/*/*.parquet', hive_partitioning = true);
create or replace view requests as from read_parquet('dataset/requests/*/*/*/*.parquet', hive_partitioning = true);

-- p99 by version
select service_version, name, count(*) as requests, quantile_disc(duration_ns, 0.99) as p99_ns
from requests where is_complete
group by service_version, name order by service_version, name;

-- device time and tokens by tenant
select attributes_text['tenant'] as tenant, count(*) as requests, sum(device_ns)::bigint as device_ns,
  sum(input_tokens)::bigint as input_tokens, sum(output_tokens)::bigint as output_tokens
from requests
group by tenant order by tenant;

-- loop blockers of the fleet
select coalesce(attributes_text['instrument.blocked_by'], '') as blocked_by, count(*) as times,
  sum(duration_ns)::bigint as blocked_ns, count(distinct host) as hosts
from spans where name = 'loop blocked'
group by blocked_by order by blocked_ns desc, blocked_by;

-- slowest requests with the longest part of their time
with parts as (
  select *, list_concat(map_entries(coalesce(phases_ns, map {})), map_entries(map {
    'queue': queue_ns, 'share': share_ns, 'waiting': waiting_ns, 'stall': stall_ns, 'transport': transport_ns,
    'sub_requests': sub_requests_ns, 'unknown': unknown_ns})) as parts
  from requests where is_complete)
select lower(hex(trace_id)) as trace, name, duration_ns, longest.ns as part_ns, longest.part as part
from (select *, list_max([{'ns': part.value, 'part': part.key} for part in parts]) as longest from parts)
order by duration_ns desc, trace limit 10;

-- regressions by version: self time of a call, against the version that began before
with per_version as (
  select code, service_version, min(start_unix_ns) as first_ns, count(*) as calls,
    sum(duration_ns - children_ns) / count(*) as mean_ns
  from spans where code is not null group by code, service_version)
select code, service_version, calls, mean_ns,
  mean_ns / lag(mean_ns) over (partition by code order by first_ns, service_version) as ratio
from per_version order by code, first_ns;
