-- Questions to a dataset of `instrument convert --to parquet dataset`, for ClickHouse: `clickhouse local --queries-file clickhouse.sql`.

create or replace view spans as select * from file('dataset/spans/*/*/*/*.parquet', Parquet);
create or replace view requests as select * from file('dataset/requests/*/*/*/*.parquet', Parquet);

-- p99 by version
select service_version, name, count(*) as requests, arraySort(groupArray(duration_ns))[toUInt64(ceil(0.99 * count()))] as p99_ns
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
with arrayReverseSort(arrayConcat(arrayZip(mapValues(phases_ns), mapKeys(phases_ns)),
  [(queue_ns, 'queue'), (share_ns, 'share'), (waiting_ns, 'waiting'), (stall_ns, 'stall'), (transport_ns, 'transport'),
    (sub_requests_ns, 'sub_requests'), (unknown_ns, 'unknown')]))[1] as longest
select lower(hex(trace_id)) as trace, name, duration_ns, longest.1 as part_ns, longest.2 as part
from requests where is_complete
order by duration_ns desc, trace limit 10;

-- regressions by version: self time of a call, against the version that began before
with per_version as (
  select code, service_version, min(start_unix_ns) as first_ns, count(*) as calls,
    sum(duration_ns - children_ns) / count(*) as mean_ns
  from spans where code is not null group by code, service_version)
select code, service_version, calls, mean_ns,
  mean_ns / lagInFrame(toNullable(mean_ns)) over (partition by code order by first_ns, service_version) as ratio
from per_version order by code, first_ns;
