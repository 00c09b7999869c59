"""Converts traces to the tables of the dataset that `dataset.json` defines.

All tables of the same name have the same Arrow schema, even empty ones. Missing values are NULL. Ids are bytes, the
most significant first. Times are int64 nanoseconds.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from hashlib import blake2b
from importlib import import_module
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from instrument.errors import InstrumentError
from instrument.recording.metric_definitions import GAUGES
from instrument.recording.remote_parents import LINK, RemoteParent
from instrument.recording.spans import AttributeValue, Origin
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.forest import NONE, rows_of
from instrument.trace.groups import Groups, ranked
from instrument.trace.joined import THOUSANDTHS, Joined, grafted, join
from instrument.trace.ledger import SUB_REQUESTS, DeviceLedger, Ledger, device_ledger, ledger
from instrument.trace.merge import Merged
from instrument.trace.metadata import Sites
from instrument.trace.request_facts import INPUT_TOKENS, OUTPUT_TOKENS
from instrument.trace.stages import stages
from instrument.trace.tables import PARTS
from instrument.trace.text import clean, encode_numbers, safe
from instrument.trace.trace import Trace

if TYPE_CHECKING:
    from instrument.trace.trace import MergedProcess

EXTRA = "instrument-sdk[parquet]"

ROWS_AT_ONCE = 100_000
"""The maximum number of table rows converted at once, to bound the memory. They become one row group of a file."""

UInt64s = NDArray[np.uint64]
Values = Mapping[str, Any]


def pyarrow() -> ModuleType:
    """Import pyarrow. Raises `InstrumentError`, which names the package extra, if it is not installed."""
    try:
        return import_module("pyarrow")
    except ImportError as problem:
        raise InstrumentError(f"pyarrow is not installed; install it with: pip install '{EXTRA}'") from problem


@cache
def definition() -> Mapping[str, Any]:
    """Return the definition of the dataset: its version, the columns of each table, and the columns of all tables."""
    document: Mapping[str, Any] = json.loads(Path(__file__).with_name("dataset.json").read_text("utf-8"))
    return document


@cache
def schema(table: str) -> Any:
    """Return the Arrow schema of a table."""
    columns = definition()["process"] | definition()["tables"][table]["columns"]
    return pyarrow().schema([(name, arrow_type(kind)) for name, (kind, _) in columns.items()])


def arrow_type(kind: str) -> Any:
    """Return the Arrow type for a type that the definition names."""
    arrow = pyarrow()
    if kind.startswith("map<"):
        return arrow.map_(*map(arrow_type, kind[4:-1].split(",")))
    if kind.startswith("binary("):
        return arrow.binary(int(kind[7:-1]))
    types = {"text": arrow.string, "int64": arrow.int64, "double": arrow.float64, "bool": arrow.bool_}
    return arrow.list_(arrow.string()) if kind == "list<text>" else types[kind]()


# Columns of values


def make_nullable(values: Any, is_null: Any) -> Any:
    """Return numbers as an Arrow array, NULL where `is_null` is True."""
    return pyarrow().array(values, mask=np.asarray(is_null, dtype=np.bool_))


def make_texts(numbers: NDArray[Any], names: Sequence[str | None]) -> Any:
    """Return an Arrow array of the name with each number as index, NULL for `NONE`."""
    arrow = pyarrow()
    indices = arrow.array(numbers.astype(np.int64), mask=numbers == NONE)
    cleaned = arrow.array([name if name is None else clean(name) for name in names], arrow.string())
    return cleaned.take(indices)


def ids_of(*halves: UInt64s) -> Any:
    """Return ids of 64 or 128 bits as fixed-size bytes, the most significant first. An id of 0 is NULL."""
    arrow, parts = pyarrow(), np.stack(halves, axis=1)
    is_given = np.packbits(parts.any(axis=1), bitorder="little").tobytes()
    data = parts.astype(">u8").tobytes()
    buffers = [arrow.py_buffer(is_given), arrow.py_buffer(data)]
    return arrow.FixedSizeBinaryArray.from_buffers(arrow.binary(8 * len(halves)), len(parts), buffers)


def make_maps(items: Sequence[Mapping[str, Any] | None], kind: Any) -> Any:
    """Return mappings as an Arrow array, sorted by name. An empty mapping is NULL."""
    return pyarrow().array([sorted(item.items()) if item else None for item in items], kind)


ATTRIBUTES = ("attributes_text", "attributes_int", "attributes_real", "attributes_bool", "attributes_json")
"""The columns of attributes, by the type of the value."""


def make_attribute_columns(trace: Columns, rows: Int64s) -> Values:
    """Return the attributes of rows and of their sites, as a column for each type of value."""
    numbers, sets = trace.attributes.distinct(rows)
    pairs, places = np.unique(np.stack([trace.site[rows], numbers]), axis=1, return_inverse=True)
    typed: dict[str, list[dict[str, Any]]] = {name: [] for name in ATTRIBUTES}
    for site, number in pairs.T.tolist():
        items = dict(trace.sites[site].attributes) | (dict(sets[number]) if number != NONE else {})
        by_type: dict[str, dict[str, Any]] = {name: {} for name in ATTRIBUTES}
        for name, value in items.items():
            if name != LINK:
                kind, stored = choose_column(value)
                by_type[kind][clean(str(name))] = stored
        for name, values in by_type.items():
            typed[name].append(values)
    types = schema("spans")
    return {name: make_maps(values, types.field(name).type).take(places.reshape(-1)) for name, values in typed.items()}


def _is_int64(value: object) -> bool:
    return type(value) is int and -1 << 63 <= value < 1 << 63


def choose_column(value: AttributeValue) -> tuple[str, Any]:
    """Return the name of the column for an attribute's value, and the value to store in it."""
    if isinstance(value, str):
        return "attributes_text", clean(value)
    if isinstance(value, bool):
        return "attributes_bool", value
    if _is_int64(value):
        return "attributes_int", value
    if isinstance(value, float):
        return "attributes_real", None if value != value else value
    return "attributes_json", encode_numbers(safe(value, finite=False))


class SpanKeys(NamedTuple):
    """The ids of rows as columns of 64 bits, 0 for no id. A trace id has a high and a low half."""

    high: UInt64s
    low: UInt64s
    span: UInt64s
    parent: UInt64s
    root: UInt64s

    def of(self, rows: Int64s) -> Values:
        """Return the id columns of some rows."""
        return {"trace_id": ids_of(self.high[rows], self.low[rows]), "span_id": ids_of(self.span[rows])}


class DatasetProcess(NamedTuple):
    """A process of a dataset: the facts, the offset of the clock, and in a merged trace the process's own numbers.
    `ids` makes the ids of the process's spans, None for the same ids as in files."""

    facts: Trace
    offset_ns: int
    numbers: MergedProcess | None = None
    ids: NumberedIds | None = None

    @property
    def numbered(self) -> NumberedIds:
        """The ids of the process's spans, by their numbers."""
        return self.ids or ConsecutiveIds(self.facts.origin)

    @property
    def identity(self) -> Mapping[str, Any]:
        """The values of the columns that all tables have."""
        origin = self.facts.origin
        return {
            "service_name": clean(origin.service),
            "service_version": clean(origin.version) or None,
            "run": clean(origin.run),
            "host": clean(origin.host),
            "process": process_name(origin),
            "profile_digest": clean(origin.digest),
            "clock_bound_ns": origin.wall_error_ns or None,
            "clock_offset_ns": self.offset_ns,
        }


def process_name(origin: Origin) -> str:
    """Return a name of boot or host, pid and start, which no other process of any host or run has."""
    return clean(f"{origin.boot or origin.host}/{origin.pid}/{origin.start_ticks}")


def table(name: str, columns: Values, process: Int64s, members: Sequence[DatasetProcess]) -> Any:
    """Return columns as a table. `process` has the index of each row's process among `members`."""
    arrow, types = pyarrow(), schema(name)
    identities = [member.identity for member in members]
    arrays = []
    for field in types:
        if field.name in columns:
            values = columns[field.name]
            arrays.append(values if isinstance(values, arrow.Array) else arrow.array(values, field.type))
        else:
            arrays.append(
                arrow.array([identity[field.name] for identity in identities], field.type).take(arrow.array(process))
            )
    return arrow.Table.from_arrays(arrays, schema=types)


# Rows of a trace


def make_span_columns(trace: Columns, rows: Int64s, keys: SpanKeys, base_ns: Int64s) -> Values:
    """Return the columns of spans, except those of threads and links. Times plus `base_ns` count from 1970."""
    sites, site, error = trace.sites, trace.site[rows], trace.error[rows]
    return {
        **keys.of(rows),
        "parent_span_id": ids_of(keys.parent[rows]),
        "root_span_id": ids_of(keys.root[rows]),
        "start_unix_ns": trace.start_ns[rows] + base_ns,
        "duration_ns": trace.total_ns[rows],
        "children_ns": trace.total_ns[rows] - trace.self_ns[rows],
        "waiting_ns": trace.total_ns[rows] - trace.active_ns[rows],
        "name": make_texts(site, [place.name for place in sites]),
        "kind": make_texts(site, [place.kind for place in sites]),
        "code": make_texts(site, [f"{place.module}:{place.qualname}" if place.qualname else None for place in sites]),
        "site": make_texts(site, [text for place in sites for text in Sites([place]).entries]),
        "task_id": trace.task_id[rows],
        "error": make_texts(error, trace.errors),
        "clipped": trace.clipped[rows],
        **make_attribute_columns(trace, rows),
    }


_PARTS = {**PARTS, SUB_REQUESTS: "sub_requests"}
_TOKENS = {"input_tokens": INPUT_TOKENS, "output_tokens": OUTPUT_TOKENS}


def make_request_columns(
    trace: Columns, joined: Joined, places: Int64s, parts: Ledger, device: DeviceLedger, base_ns: Int64s
) -> Values:
    """Return the columns of the requests with the indices `places`, except their ids."""
    rows, keys, names, count = joined.rows[places], joined.keys, parts.names, len(joined.rows)
    columns: dict[str, Any] = {}
    for part, column in _PARTS.items():
        is_part = parts.part == names.index(part) if part in names else np.zeros(len(parts.part), dtype=np.bool_)
        columns[f"{column}_ns"] = Groups(parts.request[is_part], count).sums(parts.time_ns[is_part])[places]
    phases: dict[int, dict[str, int]] = {}
    for place, part_number, time_ns in zip(
        parts.request.tolist(), parts.part.tolist(), parts.time_ns.tolist(), strict=True
    ):
        if (name := names[part_number]) not in _PARTS:
            phases.setdefault(place, {})[clean(name)] = time_ns
    lengths = {
        item.place: (_measure_length(item.prefill), _measure_length(item.decode)) for item in stages(trace, joined)
    }
    of_places = [lengths.get(place, (None, None)) for place in places.tolist()]
    arrow = pyarrow()
    for name, attribute in _TOKENS.items():
        counts = trace.attributes.values(attribute, rows)
        columns[name] = arrow.array([value if _is_int64(value) else None for value in counts], arrow.int64())
    types = schema("requests")
    return {
        **columns,
        "name": make_texts(trace.site[rows], [site.name for site in trace.sites]),
        "key": arrow.array([clean(keys[at][0]) if at in keys else None for at in places.tolist()], arrow.string()),
        "start_unix_ns": trace.start_ns[rows] + base_ns,
        "duration_ns": trace.total_ns[rows],
        "error": make_texts(trace.error[rows], trace.errors),
        "phases_ns": make_maps([phases.get(place) for place in places.tolist()], types.field("phases_ns").type),
        "device_ns": (device.own_ns + device.shared_ns)[places],
        "prefill_ns": arrow.array([prefill for prefill, _ in of_places], arrow.int64()),
        "decode_ns": arrow.array([decode for _, decode in of_places], arrow.int64()),
        **make_attribute_columns(trace, rows),
    }  # fmt: skip


def _measure_length(interval: tuple[int, int] | None) -> int | None:
    return None if interval is None else interval[1] - interval[0]


def make_member_columns(
    trace: Columns, joined: Joined, pairs: Int64s, parts: Ledger, device: DeviceLedger, base_ns: Int64s
) -> Values:
    """Return the columns of some pairs of a batch and a request, except their ids."""
    served = joined.served
    rows, arrow = served.batch[pairs], pyarrow()
    firsts = np.searchsorted(served.batch, rows) if len(served.batch) and (np.diff(served.batch) >= 0).all() else None
    if firsts is None:  # batches are consecutive, in any order
        change = np.flatnonzero(np.diff(served.batch, prepend=NONE))
        firsts = change[np.searchsorted(change, pairs, side="right") - 1] if len(change) else pairs
    return {
        "name": make_texts(trace.site[rows], [site.name for site in trace.sites]),
        "start_unix_ns": trace.start_ns[rows] + base_ns,
        "position": pairs - firsts,
        "key": arrow.array([clean(served.key[pair]) for pair in pairs.tolist()], arrow.string()),
        "weight": served.weight[pairs] / THOUSANDTHS,
        "share_ns": parts.given_ns[pairs],
        "device_share_ns": device.given_ns[pairs],
    }


def make_batch_columns(
    trace: Columns, joined: Joined, rows: Int64s, parts: Ledger, device: DeviceLedger, base_ns: Int64s
) -> Values:
    """Return the columns of the batches in some rows, except their ids."""
    groups, count = Groups(joined.served.batch, len(trace)), len(trace)
    return {
        "name": make_texts(trace.site[rows], [site.name for site in trace.sites]),
        "start_unix_ns": trace.start_ns[rows] + base_ns,
        "duration_ns": trace.total_ns[rows],
        "own_ns": groups.sums(parts.given_ns)[rows].astype(np.int64),
        "device_ns": device.batch_ns[rows],
        "members": np.bincount(joined.served.batch, minlength=count)[rows],
        "weight": groups.sums(joined.served.weight)[rows].astype(np.float64) / THOUSANDTHS,
    }


def make_interval_columns(trace: Columns, places: Int64s, base_ns: Int64s) -> Values:
    """Return the columns of some device intervals, except the ids of their spans and devices."""
    device = trace.device
    return {
        "start_unix_ns": device.start_ns[places] + base_ns,
        "duration_ns": device.total_ns[places],
        "stream": device.stream[places],
        "label": make_texts(device.label[places], device.labels),
        "uncertainty_ns": device.uncertainty_ns[places],
    }


# Rows of traces


class TraceRows(ABC):
    """Makes tables of the rows of a joined trace. `process` has the index of each row's process among `members`. Times
    plus `base_ns` of the process count from 1970."""

    def __init__(
        self,
        trace: Columns,
        joined: Joined,
        process: Int64s,
        members: Sequence[DatasetProcess],
        keys: SpanKeys,
        base_ns: Int64s,
    ) -> None:
        self.trace, self.process, self.members, self.keys = trace, process, members, keys
        self._joined, self._base_ns = joined, base_ns
        self._ledgers = ledger(trace, joined), device_ledger(trace, joined)

    @abstractmethod
    def _threads(self, rows: Int64s) -> Values:
        """Return the columns of thread numbers, as their processes gave them, and of thread names."""

    @abstractmethod
    def _devices(self, devices: Int64s, process: Int64s) -> tuple[Int64s, Any]:
        """Return the numbers of devices, as their processes gave them, and their UUIDs."""

    def _link_of(self, row: int, link: tuple[int, int]) -> tuple[int, int, int]:
        """Return the two halves of the trace id and the span id of a linked span, 0 if it is unknown. `link` has the
        numbers of that span and of its root."""
        (cause,) = rows_of(self.trace.span_id, np.array(link[:1], dtype=np.int64)).tolist()
        return (0, 0, 0) if cause == NONE else tuple(int(ids[cause]) for ids in self.keys[:3])  # type: ignore[return-value]

    def _make_links(self, rows: Int64s) -> Values:
        links = np.zeros((len(rows), 3), dtype=np.uint64)
        for place in np.flatnonzero(np.isin(rows, self.trace.attributes.having(LINK))).tolist():
            link = self.trace.attributes[int(rows[place])][LINK]
            if isinstance(link, (list, tuple)) and len(link) == 2 and all(map(_is_int64, link)):
                links[place] = self._link_of(int(rows[place]), tuple(link))
        return {"link_trace_id": ids_of(links[:, 0], links[:, 1]), "link_span_id": ids_of(links[:, 2])}

    def _make_table(self, name: str, rows: Int64s, columns: Values) -> Any:
        return table(name, {**self.keys.of(rows), **columns}, self.process[rows], self.members)

    def _make_bases(self, rows: Int64s) -> Int64s:
        """Return the ns to add to the times of rows, so that they count from 1970."""
        return self._base_ns[self.process[rows]]

    def spans(self, rows: Int64s) -> Any:
        """Return the table of some spans, given by row."""
        columns = make_span_columns(self.trace, rows, self.keys, self._make_bases(rows))
        return self._make_table("spans", rows, {**columns, **self._make_links(rows), **self._threads(rows)})

    def requests(self, places: Int64s, is_complete: Bools) -> Any:
        """Return the table of some requests, given by index. `is_complete` is by row of the trace."""
        rows = self._joined.rows[places]
        columns = make_request_columns(self.trace, self._joined, places, *self._ledgers, self._make_bases(rows))
        return self._make_table("requests", rows, {**columns, "is_complete": is_complete[rows]})

    def batches(self, rows: Int64s) -> Any:
        """Return the table of some batches, given by row."""
        columns = make_batch_columns(self.trace, self._joined, rows, *self._ledgers, self._make_bases(rows))
        return self._make_table("batches", rows, columns)

    def batch_members(self, pairs: Int64s) -> Any:
        """Return the table of some pairs of a batch and a request."""
        served = self._joined.served
        rows, places = served.batch[pairs], served.request[pairs]
        requests = np.append(self._joined.rows, 0)[places]
        high, low, span = (np.where(places == NONE, np.uint64(0), ids[requests]) for ids in self.keys[:3])
        columns = make_member_columns(self.trace, self._joined, pairs, *self._ledgers, self._make_bases(rows))
        of_requests = {"request_trace_id": ids_of(high, low), "request_span_id": ids_of(span)}
        return self._make_table("members", rows, {**columns, **of_requests})

    def intervals(self, places: Int64s) -> Any:
        """Return the table of some device intervals, given by index."""
        device = self.trace.device
        rows = device.row[places].astype(np.int64)
        devices, uuids = self._devices(device.device[places], self.process[rows])
        columns = make_interval_columns(self.trace, places, self._make_bases(rows))
        return self._make_table("intervals", rows, {**columns, "device": devices, "device_uuid": uuids})

    def _make_parts(self, name: str, numbers: Int64s, part: Callable[[Int64s], Any]) -> Iterator[tuple[str, Any]]:
        for first in range(0, max(len(numbers), 1), ROWS_AT_ONCE):
            yield name, part(numbers[first : first + ROWS_AT_ONCE])


class DatasetRows(TraceRows):
    """Makes tables of merged files. The requests of all files are joined. `ids` has the span ids of each process by
    number from 1, if the rows were read from a dataset."""

    def __init__(self, merged: Merged, ids: Sequence[SpanKeys] | None = None) -> None:
        self.merged = merged
        self._facts = facts = merged.saved.trace
        joined = join(facts.columns, facts.apart_ns)
        trace = grafted(facts.columns, joined, facts.origin.run)
        base_ns = facts.origin.realtime_of(0)
        process = np.zeros(len(trace), dtype=np.int64)
        members: list[DatasetProcess] = []
        self._parts = [list(parts) for _, parts in groupby(merged.parts, attrgetter("process"))]
        for number, parts in enumerate(self._parts):
            for part in parts:
                process[part.row[part.is_kept]] = number
            newest = max((part.saved.trace for part in parts), key=attrgetter("end_ns"))
            numbers = facts.processes[number] if facts.processes else None
            members.append(DatasetProcess(newest, base_ns + parts[0].moved_ns, numbers))
        keys = make_keys(trace, process, members) if ids is None else _keep_ids(trace, process, ids)
        super().__init__(trace, joined, process, members, keys, np.full(len(members), base_ns, dtype=np.int64))

    def tables(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the rows of each table in parts. Every table is yielded at least once."""
        trace, joined = self.trace, self._joined
        first, last = self._facts.coverage
        is_complete = (trace.start_ns >= first) & (trace.end_ns <= last) & ~trace.clipped
        order = np.lexsort((np.arange(len(trace)), trace.start_ns, trace.root_id))
        yield from self._make_parts("spans", order, self.spans)
        yield from self._make_parts(
            "requests", np.arange(len(joined.rows)), partial(self.requests, is_complete=is_complete)
        )
        yield from self._make_parts("batches", np.unique(joined.served.batch), self.batches)
        yield from self._make_parts("members", np.arange(len(joined.served.batch)), self.batch_members)
        yield from self._make_parts("intervals", np.arange(len(trace.device)), self.intervals)
        windows = [
            ProcessWindow(number, part.saved.trace, self.members[number].offset_ns, self._facts.apart_ns)
            for number, parts in enumerate(self._parts)
            for part in parts
        ]
        yield from make_window_tables(windows, self.members)

    def _threads(self, rows: Int64s) -> Values:
        distinct, places = ranked(self.trace.thread_id[rows])
        numbers_of = {thread: (number, member.facts.threads.get(number))
                      for member in self.members if member.numbers is not None
                      for thread, number in member.numbers.threads.items()}  # fmt: skip
        threads = [numbers_of.get(thread, (thread, self._facts.threads.get(thread))) for thread in distinct.tolist()]
        numbers = np.array([number for number, _ in threads], dtype=np.int64)
        return {"thread_id": numbers[places], "thread": make_texts(places, [name or None for _, name in threads])}

    def _devices(self, devices: Int64s, process: Int64s) -> tuple[Int64s, Any]:
        uuid_of = {gpu.device: gpu.uuid for gpu in self._facts.gpus}
        numbers_of = [{} if member.numbers is None else member.numbers.devices for member in self.members]
        numbers = [
            numbers_of[at].get(device, device) for device, at in zip(devices.tolist(), process.tolist(), strict=True)
        ]
        uuids = pyarrow().array([uuid_of.get(device) or None for device in devices.tolist()], pyarrow().string())
        return np.array(numbers, dtype=np.int64), uuids


class ProcessWindow(NamedTuple):
    """The facts of a process in one recording window, without spans. `offset_ns` is the offset of the process's
    clock."""

    process: int
    facts: Trace
    offset_ns: int
    apart_ns: int = 0


def make_window_tables(
    windows: Sequence[ProcessWindow], members: Sequence[DatasetProcess]
) -> Iterator[tuple[str, Any]]:
    """Yield the tables of gauges, losses and processes of some windows."""
    gauges: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    losses: list[tuple[Any, ...]] = []
    processes: list[tuple[Any, ...]] = []
    for number, facts, offset_ns, apart_ns in windows:
        uuid_of = {gpu.device: gpu.uuid or None for gpu in facts.gpus}
        for sample in facts.samples:
            if sample.value is not None and sample.value == sample.value:
                key = number, sample.at_ns + offset_ns, clean(sample.name), sample.device
                unit = GAUGES[sample.name].unit if sample.name in GAUGES else None
                gauges[key] = uuid_of.get(sample.device), float(sample.value), unit
        begin_ns = facts.start_ns + offset_ns
        losses += [(number, begin_ns, clean(reason), count) for reason, count in facts.losses.items()]
        processes.append((number, *list_window_values(facts, begin_ns, offset_ns, apart_ns)))
    columns: dict[str, tuple[Sequence[str], Sequence[Sequence[Any]]]] = {
        "gauges": (("start_unix_ns", "name", "device", "device_uuid", "value", "unit"),
                   [(*key, *values) for key, values in gauges.items()]),
        "losses": (("start_unix_ns", "reason", "count"), losses),
        "processes": (WINDOW_COLUMNS, processes),
    }  # fmt: skip
    for name, (names, rows) in columns.items():
        yield name, make_table_of_rows(name, names, rows, members)


WINDOW_COLUMNS = (
    "start_unix_ns", "duration_ns", "held_from_unix_ns", "pid", "boot", "profile", "generation", "recorder", "died",
    "apart_ns", "notes",
)  # fmt: skip


def list_window_values(facts: Trace, begin_ns: int, offset_ns: int, apart_ns: int) -> tuple[Any, ...]:
    """Return one row of the table `processes`, in the order of `WINDOW_COLUMNS`."""
    origin = facts.origin
    held_ns = facts.held_from_ns + offset_ns if facts.held_from_ns else None
    return (
        begin_ns, facts.end_ns - facts.start_ns, held_ns, origin.pid, origin.boot, clean(origin.profile),
        origin.generation, origin.recorder, clean(facts.died) or None, apart_ns, list(map(clean, facts.notes)),
    )  # fmt: skip


def make_table_of_rows(
    name: str, names: Sequence[str], rows: Sequence[Sequence[Any]], members: Sequence[DatasetProcess]
) -> Any:
    """Return a table of rows. The first value of each row is the index of its process among `members`."""
    columns = list(zip(*rows, strict=True)) or [()] * (len(names) + 1)
    types, arrow = schema(name), pyarrow()
    arrays = {
        column: arrow.array(values, types.field(column).type) for column, values in zip(names, columns[1:], strict=True)
    }
    return table(name, arrays, np.array(columns[0], dtype=np.int64), members)


# Ids


class NumberedIds(Protocol):
    """Converts the numbers of a process's spans to ids."""

    def many(self, numbers: UInt64s, part: int, /) -> UInt64s:
        """Return the span ids for `part` 0. For 1 and 2, return the upper and lower halves of the roots' trace ids."""


class ConsecutiveIds:
    """Makes ids of a constant of the process plus the span's number, so that each conversion makes the same ids."""

    def __init__(self, origin: Origin) -> None:
        text = f"{process_name(origin)}\0{origin.run}\0{origin.service}".encode(errors="surrogatepass")
        digest = blake2b(text, digest_size=24).digest()
        self._seeds = [np.uint64(int.from_bytes(digest[at : at + 8], "big") | 1 << 40) for at in (0, 8, 16)]

    def many(self, numbers: UInt64s, part: int) -> UInt64s:
        """Return ids as `NumberedIds` describes."""
        ids: UInt64s = numbers * np.uint64(part != 1) + self._seeds[part]
        return ids


def make_keys(
    trace: Columns,
    process: Int64s,
    members: Sequence[DatasetProcess],
    absent_roots: Mapping[int, RemoteParent] | None = None,
) -> SpanKeys:
    """Return the ids of all rows. A parent or root without a row gets the id that its process would give.
    `absent_roots` has the callers of trees without a row for the root."""
    absent_of = [{} if member.numbers is None else member.numbers.absent for member in members]

    def ids_by(processes: Int64s, numbers: Int64s, part: int) -> UInt64s:
        """Return ids for numbers of spans: span ids for `part` 0, halves of trace ids for 1 and 2."""
        order = np.argsort(processes, kind="stable")
        bounds = np.searchsorted(processes[order], np.arange(len(members) + 1)).tolist()
        ids = np.zeros(len(numbers), dtype=np.uint64)
        for member, (first, end) in zip(members, pairwise(bounds), strict=True):
            if len(rows := order[first:end]):
                ids[rows] = member.numbered.many(numbers[rows].astype(np.uint64), part)
        return ids

    def outer_ids(ids: Int64s, part: int) -> UInt64s:
        """Return the ids of parents or roots: span ids for `part` 0, halves of trace ids for 1 and 2."""
        rows = rows_of(trace.span_id, ids)
        processes = np.append(process, 0)[rows]
        numbers = np.append(trace.own_id, 0)[rows]
        for row in np.flatnonzero(rows == NONE).tolist():
            processes[row] = process[row]
            numbers[row] = absent_of[process[row]].get(int(ids[row]), int(ids[row]))
        return ids_by(processes, numbers, part)

    parent = np.where(trace.parent_id == 0, np.uint64(0), outer_ids(trace.parent_id, 0))
    high, low = outer_ids(trace.root_id, 1), outer_ids(trace.root_id, 2)
    remotes = {int(trace.root_id[row]): remote for row, remote in trace.remote.items()} | dict(absent_roots or {})
    if remotes:
        roots = np.array(sorted(remotes), dtype=np.int64)
        ids = np.array([(remote.trace_id >> 64, remote.trace_id & (1 << 64) - 1, remote.span_id)
                        for remote in map(remotes.__getitem__, roots.tolist())], dtype=np.uint64)  # fmt: skip
        places = np.searchsorted(roots, trace.root_id).clip(max=len(roots) - 1)
        has = roots[places] == trace.root_id
        high, low = np.where(has, ids[places, 0], high), np.where(has, ids[places, 1], low)
        parent = np.where(has & (trace.parent_id == 0), ids[places, 2], parent)
    return SpanKeys(high, low, ids_by(process, trace.own_id, 0), parent, outer_ids(trace.root_id, 0))


def _keep_ids(trace: Columns, process: Int64s, ids: Sequence[SpanKeys]) -> SpanKeys:
    """Return the ids that rows were read with from a dataset. Moved rows get the ids of their new parents and roots."""
    firsts = np.cumsum([0, *(len(keys.span) for keys in ids)])[:-1]
    places = firsts[process] + trace.own_id - 1 if len(trace) else trace.own_id
    high, low, span, parent, root = (np.concatenate(columns)[places] for columns in zip(*ids, strict=True))
    roots, parents = rows_of(trace.span_id, trace.root_id), trace.parent
    has_root, has_parent = roots != NONE, parents != NONE
    return SpanKeys(
        np.where(has_root, high[roots], high) if len(trace) else high,
        np.where(has_root, low[roots], low) if len(trace) else low,
        span,
        np.where(has_parent, span[parents], parent) if len(trace) else parent,
        np.where(has_root, span[roots], root) if len(trace) else root,
    )
