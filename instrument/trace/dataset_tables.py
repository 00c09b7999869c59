"""Converts joined traces to the tables of the dataset that `dataset.json` defines.

All tables of the same name have the same Arrow schema, even empty ones. Missing values are NULL. Ids are bytes, the
most significant first. Times are int64 nanoseconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from instrument.errors import InstrumentError
from instrument.recording.spans import AttributeValue, Origin
from instrument.recording.trace_context import LINK, RemoteParent
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.indices import NONE, Groups, find_group_starts, find_rows, number_combinations, rank_distinct
from instrument.trace.joined import THOUSANDTHS, Joined
from instrument.trace.ledger import SUB_REQUESTS, compute_device_ledger, compute_ledger
from instrument.trace.metadata import Sites
from instrument.trace.request_trees import INPUT_TOKENS, OUTPUT_TOKENS
from instrument.trace.stages import find_stages
from instrument.trace.tables import PARTS
from instrument.trace.text import encode_numbers, make_json_value, remove_surrogates
from instrument.trace.trace import Trace

if TYPE_CHECKING:
    from instrument.trace.trace import MergedProcess


EXTRA = "instrument-sdk[parquet]"

ROWS_AT_ONCE = 100_000
"""The maximum number of table rows converted at once, to bound the memory."""

UInt64s = NDArray[np.uint64]
Values = Mapping[str, Any]


def import_pyarrow() -> ModuleType:
    """Import pyarrow. Raises `InstrumentError` with the install command if it is missing."""
    try:
        return import_module("pyarrow")
    except ImportError as problem:
        raise InstrumentError(f"pyarrow is not installed; install it with: pip install '{EXTRA}'") from problem


@cache
def read_definition() -> Mapping[str, Any]:
    document: Mapping[str, Any] = json.loads(Path(__file__).with_name("dataset.json").read_text("utf-8"))
    return document


@cache
def arrow_schema(table: str) -> Any:
    columns = read_definition()["process"] | read_definition()["tables"][table]["columns"]
    return import_pyarrow().schema([(name, arrow_type(kind)) for name, (kind, _) in columns.items()])


def arrow_type(kind: str) -> Any:
    arrow = import_pyarrow()
    if kind.startswith("map<"):
        return arrow.map_(*map(arrow_type, kind[4:-1].split(",")))
    if kind.startswith("binary("):
        return arrow.binary(int(kind[7:-1]))
    types = {"text": arrow.string, "int64": arrow.int64, "double": arrow.float64, "bool": arrow.bool_}
    return arrow.list_(arrow.string()) if kind == "list<text>" else types[kind]()


# Columns of values


def make_texts(numbers: NDArray[Any], names: Sequence[str | None]) -> Any:
    """Return an Arrow array of names. `numbers` are indices of `names`, and `NONE` becomes NULL."""
    arrow = import_pyarrow()
    indices = arrow.array(numbers.astype(np.int64), mask=numbers == NONE)
    cleaned = arrow.array([name if name is None else remove_surrogates(name) for name in names], arrow.string())
    return cleaned.take(indices)


def make_ids(*halves: UInt64s) -> Any:
    """Return ids of one or two 64-bit numbers as big-endian bytes. An id of 0 is NULL."""
    arrow, parts = import_pyarrow(), np.stack(halves, axis=1)
    is_given = np.packbits(parts.any(axis=1), bitorder="little").tobytes()
    data = parts.astype(">u8").tobytes()
    buffers = [arrow.py_buffer(is_given), arrow.py_buffer(data)]
    return arrow.FixedSizeBinaryArray.from_buffers(arrow.binary(8 * len(halves)), len(parts), buffers)


def make_maps(items: Sequence[Mapping[str, Any] | None], kind: Any) -> Any:
    """Return mappings as an Arrow array, sorted by name. An empty mapping is NULL."""
    return import_pyarrow().array([sorted(item.items()) if item else None for item in items], kind)


ATTRIBUTES = ("attributes_text", "attributes_int", "attributes_real", "attributes_bool", "attributes_json")


def make_attribute_columns(trace: Columns, rows: Int64s) -> Values:
    numbers, sets = trace.attributes.distinct_sets(rows)
    pairs, places = np.unique(np.stack([trace.site[rows], numbers]), axis=1, return_inverse=True)
    typed: dict[str, list[dict[str, Any]]] = {name: [] for name in ATTRIBUTES}
    for site, number in pairs.T.tolist():
        items = dict(trace.sites[site].attributes) | (dict(sets[number]) if number != NONE else {})
        by_type: dict[str, dict[str, Any]] = {name: {} for name in ATTRIBUTES}
        for name, value in items.items():
            if name != LINK:
                kind, stored = choose_column(value)
                by_type[kind][remove_surrogates(str(name))] = stored
        for name, values in by_type.items():
            typed[name].append(values)
    types = arrow_schema("spans")
    return {name: make_maps(values, types.field(name).type).take(places.reshape(-1)) for name, values in typed.items()}


def _is_int64(value: object) -> bool:
    return type(value) is int and -1 << 63 <= value < 1 << 63


def choose_column(value: AttributeValue) -> tuple[str, Any]:
    if isinstance(value, str):
        return "attributes_text", remove_surrogates(value)
    if isinstance(value, bool):
        return "attributes_bool", value
    if _is_int64(value):
        return "attributes_int", value
    if isinstance(value, float):
        return "attributes_real", None if value != value else value
    return "attributes_json", encode_numbers(make_json_value(value, finite=False))


class SpanKeys(NamedTuple):
    """The ids of rows, as columns of 64-bit numbers. A trace id has a high and a low half. The number 0 means no id."""

    high: UInt64s
    low: UInt64s
    span: UInt64s
    parent: UInt64s
    root: UInt64s


class DatasetProcess(NamedTuple):
    """A process of a dataset. `numbers` converts thread and device numbers of a merged trace to those of the process.
    `ids` makes the ids of the process's spans, by default `ConsecutiveIds`."""

    facts: Trace
    offset_ns: int
    numbers: MergedProcess | None = None
    ids: NumberedIds | None = None

    @property
    def id_converter(self) -> NumberedIds:
        return self.ids or ConsecutiveIds(self.facts.origin)

    @property
    def identity(self) -> Mapping[str, Any]:
        """The values of the columns that all tables have."""
        origin = self.facts.origin
        return {
            "service_name": remove_surrogates(origin.service),
            "service_version": remove_surrogates(origin.version) or None,
            "run": remove_surrogates(origin.run),
            "host": remove_surrogates(origin.host),
            "process": process_name(origin),
            "profile_digest": remove_surrogates(origin.digest),
            "clock_bound_ns": origin.wall_error_ns or None,
            "clock_offset_ns": self.offset_ns,
        }


def process_name(origin: Origin) -> str:
    """Return a name that is unique among the processes of all hosts. It consists of the boot or host, the process id
    and the start time."""
    return remove_surrogates(f"{origin.boot or origin.host}/{origin.pid}/{origin.start_ticks}")


def make_table(name: str, columns: Values, process: Int64s, members: Sequence[DatasetProcess]) -> Any:
    arrow, types = import_pyarrow(), arrow_schema(name)
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


# Rows of traces


_PARTS = {**PARTS, SUB_REQUESTS: "sub_requests_ns"}
_TOKENS = {"input_tokens": INPUT_TOKENS, "output_tokens": OUTPUT_TOKENS}


class TraceRows:
    """Makes the tables of a dataset from the rows of a trace. `process` is the index of each row's process in
    `members`.

    `base_ns` converts the times of each process to ns since 1970. `thread_id` has the process's own thread number for
    each row. `device` has the process's own device number for each device interval.
    """

    def __init__(
        self,
        trace: Columns,
        joined: Joined,
        process: Int64s,
        members: Sequence[DatasetProcess],
        keys: SpanKeys,
        base_ns: Int64s,
        thread_id: Int64s,
        device: Int64s,
    ) -> None:
        self.trace, self.process, self.members, self.keys = trace, process, members, keys
        self._joined, self._base_ns, self._thread_id, self._device = joined, base_ns, thread_id, device
        self._ledger, self._device_ledger = compute_ledger(trace, joined), compute_device_ledger(trace, joined)

    def _make_table(self, name: str, rows: Int64s, start_ns: Int64s, columns: Values) -> Any:
        process, keys = self.process[rows], self.keys
        all_columns = {
            "trace_id": make_ids(keys.high[rows], keys.low[rows]),
            "span_id": make_ids(keys.span[rows]),
            "start_unix_ns": start_ns + self._base_ns[process],
            **columns,
        }
        return make_table(name, all_columns, process, self.members)

    def _name_sites(self, rows: Int64s) -> Any:
        return make_texts(self.trace.site[rows], [site.name for site in self.trace.sites])

    def make_spans(self, rows: Int64s) -> Any:
        trace, sites, site = self.trace, self.trace.sites, self.trace.site[rows]
        codes = [f"{place.module}:{place.qualname}" if place.qualname else None for place in sites]
        links = np.zeros((len(rows), 3), dtype=np.uint64)
        for place in np.flatnonzero(np.isin(rows, trace.attributes.rows_with_attribute(LINK))).tolist():
            link = trace.attributes[int(rows[place])][LINK]
            if isinstance(link, (list, tuple)) and len(link) == 2 and all(map(_is_int64, link)):
                links[place] = self._find_linked_span(int(rows[place]), tuple(link))
        threads, process = self._thread_id[rows], self.process[rows]
        places, firsts = number_combinations(process, rank_distinct(threads)[1])
        pairs = zip(process[firsts].tolist(), threads[firsts].tolist(), strict=True)
        names = [self.members[member].facts.threads.get(thread) or None for member, thread in pairs]
        columns = {
            "parent_span_id": make_ids(self.keys.parent[rows]),
            "root_span_id": make_ids(self.keys.root[rows]),
            "duration_ns": trace.total_ns[rows],
            "children_ns": trace.total_ns[rows] - trace.self_ns[rows],
            "waiting_ns": trace.total_ns[rows] - trace.active_ns[rows],
            "name": self._name_sites(rows),
            "kind": make_texts(site, [place.kind for place in sites]),
            "code": make_texts(site, codes),
            "site": make_texts(site, [text for place in sites for text in Sites([place]).entries]),
            "task_id": trace.task_id[rows],
            "error": make_texts(trace.error[rows], trace.errors),
            "clipped": trace.clipped[rows],
            **make_attribute_columns(trace, rows),
            "link_trace_id": make_ids(links[:, 0], links[:, 1]),
            "link_span_id": make_ids(links[:, 2]),
            "thread_id": threads,
            "thread": make_texts(places, names),
        }
        return self._make_table("spans", rows, trace.start_ns[rows], columns)

    def _find_linked_span(self, row: int, link: tuple[int, int]) -> tuple[int, int, int]:
        """Return both halves of a linked span's trace id, and its span id. Returns zeros for an unknown span."""
        (cause,) = find_rows(self.trace.span_id, np.array(link[:1], dtype=np.int64)).tolist()
        return (0, 0, 0) if cause == NONE else tuple(int(ids[cause]) for ids in self.keys[:3])  # type: ignore[return-value]

    def make_requests(self, places: Int64s, is_complete: Bools) -> Any:
        trace, parts, keys = self.trace, self._ledger, self._joined.keys
        rows, device, types = self._joined.rows[places], self._device_ledger, arrow_schema("requests")
        times = parts.times_by_part(_PARTS, len(self._joined.rows))
        phases: dict[int, dict[str, int]] = {}
        numbers = zip(parts.request.tolist(), parts.part.tolist(), parts.time_ns.tolist(), strict=True)
        for place, part, time_ns in numbers:
            if (name := parts.names[part]) not in _PARTS:
                phases.setdefault(place, {})[remove_surrogates(name)] = time_ns
        lengths: dict[tuple[str, int], int] = {
            (name, item.place): interval[1] - interval[0]
            for item in find_stages(trace, self._joined)
            for name, interval in (("prefill", item.prefill), ("decode", item.decode))
            if interval is not None
        }
        columns = {
            **{name: column[places] for name, column in times.items()},
            **{
                name: [value if _is_int64(value) else None for value in trace.attributes.values(attribute, rows)]
                for name, attribute in _TOKENS.items()
            },
            "name": self._name_sites(rows),
            "key": [remove_surrogates(keys[at][0]) if at in keys else None for at in places.tolist()],
            "duration_ns": trace.total_ns[rows],
            "error": make_texts(trace.error[rows], trace.errors),
            "phases_ns": make_maps([phases.get(place) for place in places.tolist()], types.field("phases_ns").type),
            "device_ns": (device.own_ns + device.shared_ns)[places],
            **{f"{name}_ns": [lengths.get((name, at)) for at in places.tolist()] for name in ("prefill", "decode")},
            "is_complete": is_complete[rows],
            **make_attribute_columns(trace, rows),
        }
        return self._make_table("requests", rows, trace.start_ns[rows], columns)

    def make_batches(self, rows: Int64s) -> Any:
        served, count = self._joined.served, len(self.trace)
        groups = Groups(served.batch, count)
        columns = {
            "name": self._name_sites(rows),
            "duration_ns": self.trace.total_ns[rows],
            "own_ns": groups.sum_by_group(self._ledger.given_ns)[rows].astype(np.int64),
            "device_ns": self._device_ledger.batch_ns[rows],
            "members": np.bincount(served.batch, minlength=count)[rows],
            "weight": groups.sum_by_group(served.weight)[rows].astype(np.float64) / THOUSANDTHS,
        }
        return self._make_table("batches", rows, self.trace.start_ns[rows], columns)

    def make_batch_members(self, pairs: Int64s) -> Any:
        """Return a table with a row per pair of a batch and a request. The pairs of a batch must be consecutive."""
        served = self._joined.served
        rows, places = served.batch[pairs], served.request[pairs]
        requests = np.append(self._joined.rows, 0)[places]
        high, low, span = (np.where(places == NONE, np.uint64(0), ids[requests]) for ids in self.keys[:3])
        firsts = find_group_starts(served.batch)
        columns = {
            "name": self._name_sites(rows),
            "position": pairs - firsts[np.searchsorted(firsts, pairs, side="right") - 1] if len(firsts) else pairs,
            "key": [remove_surrogates(served.key[pair]) for pair in pairs.tolist()],
            "weight": served.weight[pairs] / THOUSANDTHS,
            "share_ns": self._ledger.given_ns[pairs],
            "device_share_ns": self._device_ledger.given_ns[pairs],
            "request_trace_id": make_ids(high, low),
            "request_span_id": make_ids(span),
        }
        return self._make_table("members", rows, self.trace.start_ns[rows], columns)

    def make_intervals(self, places: Int64s) -> Any:
        device, numbers = self.trace.device, self._device[places]
        rows = device.row[places].astype(np.int64)
        uuids = [{gpu.device: gpu.uuid or None for gpu in member.facts.gpus} for member in self.members]
        pairs = zip(self.process[rows].tolist(), numbers.tolist(), strict=True)
        columns = {
            "duration_ns": device.total_ns[places],
            "device": numbers,
            "device_uuid": [uuids[process].get(number) for process, number in pairs],
            "stream": device.stream[places],
            "label": make_texts(device.label[places], device.labels),
            "uncertainty_ns": device.uncertainty_ns[places],
        }
        return self._make_table("intervals", rows, device.start_ns[places], columns)

    def _make_row_tables(self, numbers_by_table: Mapping[str, Int64s], is_complete: Bools) -> Iterator[tuple[str, Any]]:
        makers: dict[str, Callable[[Int64s], Any]] = {
            "spans": self.make_spans,
            "requests": lambda places: self.make_requests(places, is_complete),
            "batches": self.make_batches,
            "members": self.make_batch_members,
            "intervals": self.make_intervals,
        }
        for name, numbers in numbers_by_table.items():
            for first in range(0, max(len(numbers), 1), ROWS_AT_ONCE):
                yield name, makers[name](numbers[first : first + ROWS_AT_ONCE])


# Ids


class NumberedIds(Protocol):
    """Converts the numbers of a process's spans to ids."""

    def make_ids(self, numbers: UInt64s, part: int, /) -> UInt64s:
        """Return 64-bit ids. `part` 0 means span ids. `part` 1 and 2 mean the upper and lower halves of the roots'
        trace ids."""


class ConsecutiveIds:
    """Makes ids by adding the span's number to a constant of its process, so that each conversion makes the same
    ids."""

    def __init__(self, origin: Origin) -> None:
        text = f"{process_name(origin)}\0{origin.run}\0{origin.service}".encode(errors="surrogatepass")
        digest = blake2b(text, digest_size=24).digest()
        self._seeds = [np.uint64(int.from_bytes(digest[at : at + 8], "big") | 1 << 40) for at in (0, 8, 16)]

    def make_ids(self, numbers: UInt64s, part: int) -> UInt64s:
        ids: UInt64s = numbers * np.uint64(part != 1) + self._seeds[part]
        return ids


def make_span_keys(
    trace: Columns,
    process: Int64s,
    members: Sequence[DatasetProcess],
    absent_roots: Mapping[int, RemoteParent] | None = None,
) -> SpanKeys:
    absent_of = [{} if member.numbers is None else member.numbers.absent for member in members]

    def convert_to_ids(processes: Int64s, numbers: Int64s, part: int) -> UInt64s:
        order = np.argsort(processes, kind="stable")
        bounds = np.searchsorted(processes[order], np.arange(len(members) + 1)).tolist()
        ids = np.zeros(len(numbers), dtype=np.uint64)
        for member, (first, end) in zip(members, pairwise(bounds), strict=True):
            if len(rows := order[first:end]):
                ids[rows] = member.id_converter.make_ids(numbers[rows].astype(np.uint64), part)
        return ids

    def convert_ancestors_to_ids(ids: Int64s, part: int) -> UInt64s:
        rows = find_rows(trace.span_id, ids)
        processes = np.append(process, 0)[rows]
        numbers = np.append(trace.own_id, 0)[rows]
        for row in np.flatnonzero(rows == NONE).tolist():
            processes[row] = process[row]
            numbers[row] = absent_of[process[row]].get(int(ids[row]), int(ids[row]))
        return convert_to_ids(processes, numbers, part)

    parent = np.where(trace.parent_id == 0, np.uint64(0), convert_ancestors_to_ids(trace.parent_id, 0))
    high, low = convert_ancestors_to_ids(trace.root_id, 1), convert_ancestors_to_ids(trace.root_id, 2)
    remotes = {int(trace.root_id[row]): remote for row, remote in trace.remote.items()} | dict(absent_roots or {})
    if remotes:
        roots = np.array(sorted(remotes), dtype=np.int64)
        ids = np.array([(remote.trace_id >> 64, remote.trace_id & (1 << 64) - 1, remote.span_id)
                        for remote in map(remotes.__getitem__, roots.tolist())], dtype=np.uint64)  # fmt: skip
        places = np.searchsorted(roots, trace.root_id).clip(max=len(roots) - 1)
        has = roots[places] == trace.root_id
        high, low = np.where(has, ids[places, 0], high), np.where(has, ids[places, 1], low)
        parent = np.where(has & (trace.parent_id == 0), ids[places, 2], parent)
    return SpanKeys(
        high, low, convert_to_ids(process, trace.own_id, 0), parent, convert_ancestors_to_ids(trace.root_id, 0)
    )
