"""A trace as tables of a database in memory: what `query`, Parquet files and data frames are made of.

DuckDB takes the columns as they are; names and attributes are values in its tables, never part of a statement. A
statement reaches these tables and nothing else: no file, no network, no extension.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from instrument.errors import InstrumentError
from instrument.runtime import atomic
from instrument.trace.text import clean, encode, safe

if TYPE_CHECKING:
    from instrument.recording.spans import Trace as Facts
    from instrument.trace.columns import Trace

EXTRA = "instrument-sdk[query]"

_SPANS = """
create table spans as select s.span_id, s.parent_id, s.root_id, t.name, t.kind, s.thread_id, n.name as thread,
  s.task_id, s.start_ns, s.end_ns, s.end_ns - s.start_ns as total_ns, s.active_ns, s.self_ns, s.unix_ns,
  e.name as error, s.clipped, s.level, s.site
from raw_spans s join sites t using (site) left join raw_errors e on e.number = s.error
  left join threads n using (thread_id) order by s.number
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

Columns = Mapping[str, NDArray[Any]]


def duckdb() -> ModuleType:
    """The database. Raises `InstrumentError` that names the extra where it is missing."""
    try:
        import duckdb
    except ImportError as problem:
        raise InstrumentError(f"DuckDB is not installed; install it with: pip install '{EXTRA}'") from problem
    return duckdb


def opened(trace: Trace, facts: Facts, *, attributes: bool = True) -> Any:
    """A connection to a database with the tables that the help of `query` lists; that of `attributes` where asked."""
    connection = duckdb().connect(":memory:")
    try:
        connection.execute("set enable_progress_bar = false")
        for name, columns in _raw(trace, facts, attributes).items():
            connection.register("given", dict(columns))
            kinds = ", ".join(
                f"cast({column} as {_KINDS[its.dtype.kind]}) as {column}" for column, its in columns.items()
            )
            connection.execute(f"create table {name} as select {kinds} from given")  # noqa: S608 - names of ours
            connection.unregister("given")
        connection.execute(_SPANS)
        connection.execute("drop table raw_spans; drop table raw_errors")
    except BaseException:
        connection.close()
        raise
    return connection


def closed_off(connection: Any) -> Any:
    """The connection, from which no statement reaches anything but its tables."""
    for setting in ("autoinstall_known_extensions", "autoload_known_extensions", "enable_external_access"):
        connection.execute(f"set {setting} = false")
    connection.execute("set lock_configuration = true")
    return connection


def frame(trace: Trace, facts: Facts) -> Any:
    """The spans as what DuckDB makes data frames of."""
    return opened(trace, facts).sql(_WITH_INTERVALS)


def write_parquet(path: str | os.PathLike[str], trace: Trace, facts: Facts) -> Path:
    """Write the spans as a Parquet file, each with its device intervals and attributes; whole, or not at all."""
    target, connection = Path(path), opened(trace, facts)
    with atomic.replacing(target) as file:
        # By its descriptor: the name of what is being written is known to `atomic` alone.
        into = f"/proc/self/fd/{file.fileno()}"
        connection.execute(
            f"copy ({_WITH_INTERVALS}) to '{into}' (format parquet, compression zstd, use_tmp_file false)"
        )
    connection.close()
    return target


_KINDS = {"i": "bigint", "u": "bigint", "b": "boolean", "f": "double", "O": "varchar"}


def _raw(trace: Trace, facts: Facts, attributes: bool) -> dict[str, Columns]:
    its = trace.device
    since_1970_ns = facts.origin.realtime_of(0)
    threads = dict.fromkeys(np.unique(trace.thread_id).tolist(), "") | dict(facts.threads)
    samples = [one for one in facts.samples if one.value is not None]
    by_row = ("span_id", "parent_id", "root_id", "thread_id", "task_id", "start_ns", "end_ns", "active_ns", "self_ns")
    return {
        "raw_spans": {
            "number": np.arange(len(trace)),
            **{name: getattr(trace, name) for name in (*by_row, "site", "error", "clipped", "level")},
            "unix_ns": trace.start_ns + since_1970_ns,
        },
        "raw_errors": {"number": np.arange(len(trace.errors)), "name": _texts(trace.errors)},
        "sites": {
            "site": np.arange(len(trace.sites)),
            **{
                name: _texts(getattr(site, name) for site in trace.sites)
                for name in ("name", "kind", "module", "qualname", "file", "instance")
            },
            "line": np.array([site.line for site in trace.sites], dtype=np.int64),
            "device": np.array([site.device for site in trace.sites], dtype=np.bool_),
            "attributes": _texts(encode(safe(dict(site.attributes))) for site in trace.sites),
        },
        "threads": {"thread_id": np.array(list(threads), dtype=np.int64), "name": _texts(threads.values())},
        "intervals": {
            "span_id": trace.span_id[its.row],
            **{name: getattr(its, name) for name in ("device", "stream", "start_ns", "end_ns", "uncertainty_ns")},
            "label": _texts(its.labels)[its.label],
        },
        "attributes": _attributes(trace) if attributes else _table_of([]),
        "samples": {
            "name": _texts(one.name for one in samples),
            "device": np.array([one.device for one in samples], dtype=np.int64),
            "at_ns": np.array([one.at_ns for one in samples], dtype=np.int64),
            "value": np.array([one.value for one in samples], dtype=np.float64),
        },
    }


def _texts(found: Any) -> NDArray[np.object_]:
    """Texts as DuckDB takes them, which has neither lone surrogates nor, in a C string, a NUL."""
    texts = list(map(clean, found))
    column = np.empty(len(texts), dtype=np.object_)
    column[:] = texts
    return column


def _attributes(trace: Trace) -> Columns:
    return _table_of(
        [
            (int(trace.span_id[row]), name, value)
            for row in trace.attributes.rows().tolist()
            for name, value in trace.attributes[row].items()
        ]
    )


def _table_of(rows: list[tuple[int, str, Any]]) -> Columns:
    def text(value: Any) -> str:
        return value if isinstance(value, str) else encode(safe(value))

    numbers = [float(one[2]) if type(one[2]) in (int, float) else np.nan for one in rows]
    return {
        "span_id": np.array([one[0] for one in rows], dtype=np.int64),
        "name": _texts(one[1] for one in rows),
        "value": _texts(text(one[2]) for one in rows),
        "number": np.array(numbers, dtype=np.float64),
    }
