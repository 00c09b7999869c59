"""Provides a trace as tables of an in-memory database, for `query` and data frames.

DuckDB reads the columns without a copy. Names and attributes are values in the tables and never part of an SQL
statement. A statement can use only these tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from instrument.errors import InstrumentError
from instrument.trace.joined import THOUSANDTHS
from instrument.trace.ledger import QUEUE, SHARE, STALL, TRANSPORT, UNKNOWN, WAITING, Ledger
from instrument.trace.text import encode, encode_numbers, make_json_value, remove_surrogates

if TYPE_CHECKING:
    from instrument.trace.columns import Columns
    from instrument.trace.joined import Joined
    from instrument.trace.trace import Trace

EXTRA = "instrument-sdk[query]"

ROWS_AT_ONCE = 50_000
"""The maximum number of spans whose attributes are read at once, to bound the memory."""

# Views cast the texts, because DuckDB infers the type of Python's objects from their values.
_SPANS = """
create view spans as select s.span_id, s.parent_id, s.root_id, t.name, t.kind, s.thread_id, n.name as thread,
  s.task_id, s.start_ns, s.end_ns, s.end_ns - s.start_ns as total_ns, s.active_ns, s.self_ns, s.unix_ns,
  e.name as error, s.clipped, s.level::bigint as level, s.site::bigint as site
from given_spans s join sites t using (site) left join errors e on e.number = s.error
  left join threads n using (thread_id)
"""

_INTERVALS = """
create view intervals as select i.span_id, i.device, i.stream, i.start_ns, i.end_ns, l.name as label, i.uncertainty_ns
from given_intervals i join labels l on l.number = i.label
"""

_WITH_INTERVALS = """
select s.*, t.module, t.qualname, t.file, t.line, t.instance, i.device_intervals, a.attributes from spans s
join sites t using (site)
left join (select span_id, list(struct_pack(device, stream, start_ns, end_ns, label, uncertainty_ns) order by start_ns)
  as device_intervals from intervals group by span_id) i using (span_id)
left join (select span_id, map(list(name), list(value)) as attributes from attributes group by span_id) a
  using (span_id)
order by s.start_ns, s.span_id
"""

Arrays = Mapping[str, NDArray[Any]]


def import_duckdb() -> ModuleType:
    """Import DuckDB. Raises `InstrumentError` with the install command if it is missing."""
    try:
        import duckdb
    except ImportError as problem:
        raise InstrumentError(f"DuckDB is not installed; install it with: pip install '{EXTRA}'") from problem
    return duckdb


def open_database(facts: Trace, *, attributes: bool = True) -> Any:
    """Return a connection to a database of a trace's tables. Without `attributes`, the table `attributes` is empty."""
    connection = import_duckdb().connect(":memory:")
    try:
        if connection.execute("select current_setting('enable_progress_bar')").fetchall()[0][0]:
            connection.execute("set enable_progress_bar = false")  # it fails in notebooks without a bar
        for name, columns in _make_arrays(facts).items():
            connection.register(f"given_{name}", dict(columns))
            if name not in ("intervals", "spans"):
                kinds = ", ".join(
                    f"cast({column} as {_KINDS[values.dtype.kind]}) as {column}" for column, values in columns.items()
                )
                connection.execute(f"create view {name} as select {kinds} from given_{name}")  # noqa: S608 - our names
        connection.execute(_INTERVALS)
        connection.execute(_SPANS)
        connection.execute("create table attributes (span_id bigint, name varchar, value varchar, number double)")
        for columns in _read_attributes(facts.columns) if attributes else ():
            connection.register("given_attributes", dict(columns))
            connection.execute("insert into attributes from given_attributes")
            connection.unregister("given_attributes")
    except BaseException:
        connection.close()
        raise
    return connection


def restrict_access(connection: Any) -> Any:
    """Restrict a connection to its own tables, without access to files and extensions. Return the connection."""
    for setting in ("autoinstall_known_extensions", "autoload_known_extensions", "enable_external_access"):
        connection.execute(f"set {setting} = false")
    connection.execute("set lock_configuration = true")
    return connection


def make_span_frame(trace: Trace) -> Any:
    """Return the spans as a DuckDB relation."""
    return open_database(trace).sql(_WITH_INTERVALS)


_REQUESTS = """
select s.span_id, s.name, nullif(r.key, '') as key, s.thread, s.start_ns, s.end_ns, s.total_ns, s.unix_ns, s.error,
  s.attributes, r.queue_ns, r.share_ns, r.waiting_ns, r.stall_ns, r.transport_ns, r.unknown_ns, p.phases_ns
from ({spans}) s join (select span_id, cast(key as varchar) as key, * exclude (span_id, key) from given_requests) r
  using (span_id)
left join (select span_id, map(list(cast(name as varchar)), list(time_ns)) as phases_ns from given_phases
  group by span_id) p using (span_id)
order by s.start_ns, s.span_id
"""
_BATCHES = """
select s.span_id, s.name, s.thread, s.start_ns, s.end_ns, s.total_ns, s.unix_ns, count(*) as members,
  sum(m.weight) as weight, list(cast(m.key as varchar) order by m.number) as keys,
  list(m.weight order by m.number) as weights, list(m.share_ns order by m.number) as shares_ns
from spans s join given_members m using (span_id) group by all order by s.start_ns, s.span_id
"""


def make_batch_frame(facts: Trace, joined: Joined, ledger: Ledger) -> Any:
    served, connection = joined.served, open_database(facts, attributes=False)
    members = {
        "span_id": facts.columns.span_id[served.batch],
        "number": np.arange(len(served.batch)),
        "key": _clean_texts(served.key),
        "weight": served.weight / THOUSANDTHS,
        "share_ns": ledger.given_ns,
    }
    connection.register("given_members", members)
    return connection.sql(_BATCHES)


PARTS = {name: f"{name.partition(' ')[0]}_ns" for name in (QUEUE, SHARE, WAITING, STALL, TRANSPORT, UNKNOWN)}


def make_request_frame(facts: Trace, joined: Joined, ledger: Ledger) -> Any:
    span_id, names = facts.columns.span_id[joined.rows], ledger.names
    columns = ledger.times_by_part(PARTS, len(span_id))
    is_phase = np.array([name not in PARTS for name in names] or [False], dtype=np.bool_)[ledger.part]
    keys = _clean_texts((joined.keys.get(place) or ("",))[0] for place in range(len(span_id)))
    connection = open_database(facts)
    connection.register("given_requests", {"span_id": span_id, "key": keys, **columns})
    phases = {
        "span_id": span_id[ledger.request[is_phase]],
        "name": _clean_texts(names[part] for part in ledger.part[is_phase].tolist()),
        "time_ns": ledger.time_ns[is_phase],
    }
    connection.register("given_phases", phases)
    return connection.sql(_REQUESTS.format(spans=_WITH_INTERVALS))


def as_pandas(result: Any) -> Any:
    """Return a DuckDB result as a `pandas.DataFrame`. Empty columns of texts keep their type."""
    frame = result.df()
    of_texts = type(frame["name"])(["text"]).dtype
    kinds = zip(result.columns, map(str, result.types), strict=True)
    return frame.astype({name: of_texts for name, kind in kinds if kind == "VARCHAR"})


_KINDS = {"i": "bigint", "u": "bigint", "b": "boolean", "f": "double", "O": "varchar"}


def _make_arrays(facts: Trace) -> dict[str, Arrays]:
    trace, device = facts.columns, facts.columns.device
    since_1970_ns = facts.origin.realtime_of(0)
    threads = dict.fromkeys(np.unique(trace.thread_id).tolist(), "") | dict(facts.threads)
    readings = [(pid, sample) for pid, sample in facts.iterate_samples() if sample.value is not None]
    by_row = ("span_id", "parent_id", "root_id", "thread_id", "task_id", "start_ns", "end_ns", "active_ns", "self_ns")
    spans = {name: getattr(trace, name) for name in (*by_row, "site", "error", "clipped", "level")}
    intervals = {
        name: getattr(device, name) for name in ("device", "stream", "start_ns", "end_ns", "uncertainty_ns", "label")
    }
    return {
        "spans": {**spans, "unix_ns": spans["start_ns"] + since_1970_ns},
        "errors": {"number": np.arange(len(trace.errors)), "name": _clean_texts(trace.errors)},
        "labels": {"number": np.arange(len(device.labels)), "name": _clean_texts(device.labels)},
        "intervals": {"span_id": trace.span_id[device.row], **intervals},
        "sites": {
            "site": np.arange(len(trace.sites)),
            **{
                name: _clean_texts(getattr(site, name) for site in trace.sites)
                for name in ("name", "kind", "module", "qualname", "file", "instance")
            },
            "line": np.array([site.line for site in trace.sites], dtype=np.int64),
            "device": np.array([site.device for site in trace.sites], dtype=np.bool_),
            "attributes": _clean_texts(encode(make_json_value(dict(site.attributes))) for site in trace.sites),
        },
        "threads": {"thread_id": np.array(list(threads), dtype=np.int64), "name": _clean_texts(threads.values())},
        "samples": {
            "process": np.array([pid for pid, _ in readings], dtype=np.int64),
            "name": _clean_texts(sample.name for _, sample in readings),
            "device": np.array([sample.device for _, sample in readings], dtype=np.int64),
            "at_ns": np.array([sample.at_ns for _, sample in readings], dtype=np.int64),
            "value": np.array([sample.value for _, sample in readings], dtype=np.float64),
        },
    }


def _clean_texts(names: Any) -> NDArray[np.object_]:
    """Return texts as an array of objects for DuckDB, without lone surrogates."""
    texts = list(map(remove_surrogates, names))
    column = np.empty(len(texts), dtype=np.object_)
    column[:] = texts
    return column


def _read_attributes(trace: Columns) -> Iterator[Arrays]:

    def make_text(value: Any) -> str:
        return value if isinstance(value, str) else encode_numbers(make_json_value(value, finite=False))

    with_attributes = trace.attributes.rows()
    for first in range(0, len(with_attributes), ROWS_AT_ONCE):
        some = with_attributes[first : first + ROWS_AT_ONCE]
        items: list[tuple[int, str, Any]] = [
            (row, *item) for row in some.tolist() for item in trace.attributes[row].items()
        ]
        numbers = [float(value) if type(value) in (int, float) else np.nan for _, _, value in items]
        yield {
            "span_id": trace.span_id[np.array([row for row, _, _ in items], dtype=np.int64)],
            "name": _clean_texts(name for _, name, _ in items),
            "value": _clean_texts(make_text(value) for _, _, value in items),
            "number": np.array(numbers, dtype=np.float64),
        }
