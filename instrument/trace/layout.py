"""Packs the columns of a trace for a file, in the smallest types that fit.

Rare values are stored only for the rows that have them. Ascending columns are stored as differences (`differences`),
and end times as lengths. The array `firsts` has the first span id and the first start time.

The kernels and allocations of torch.profiler are ordered by time, so times are stored as differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.recording.spans import WORK, Kernel, Site
from instrument.recording.trace_context import RemoteParent
from instrument.trace.columns import FARTHEST_NS, Attributes, Columns, DeviceIntervals, Int32s, Int64s, are_in_range
from instrument.trace.indices import NONE, index_rows, make_mask, rank_distinct, sort_by_start, topmost_rows
from instrument.trace.text import TextSets, encode_rows, remove_surrogates
from instrument.trace.trace import ALLOCATION, Allocation, Allocations, Trace, Views

Column = NDArray[Any]
Arrays = Mapping[str, Column]

WIDTHS = (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32)


def narrow_type(column: Column) -> Column:
    if not len(column):
        return column.astype(np.uint8)
    least, most = int(column.min()), int(column.max())
    for width in WIDTHS:
        limits = np.iinfo(width)
        if limits.min <= least and most <= limits.max:
            return column.astype(width)
    return column.astype(np.int64)


def compute_differences(column: Column) -> Column:
    """Return the first number, followed by the difference of each number to the one before."""
    return narrow_type(np.diff(column.astype(np.int64), prepend=np.int64(0)))


def sum_differences(column: Column) -> Int64s:
    return np.asarray(np.cumsum(column, dtype=np.int64))


def order_by_start(trace: Columns) -> Int64s:
    """Return the rows ordered by start time, so that parents come before their children. If spans begin together, the
    longest one comes first."""
    return sort_by_start(trace.start_ns, trace.end_ns, trace.span_id)


def pack_columns(trace: Columns) -> tuple[dict[str, Column], dict[str, Any]]:
    order = order_by_start(trace)
    rank = index_rows(order, len(trace))
    parent = trace.parent[order]
    above = np.where(parent == NONE, np.arange(len(trace)), rank[parent])
    span_id, start_ns = trace.span_id[order], trace.start_ns[order]
    total_ns = trace.end_ns[order] - start_ns
    self_ns, parent_id = trace.self_ns[order], trace.parent_id[order]
    threads, thread = rank_distinct(trace.thread_id[order])
    tasks, of_rows = _rank_inherited_values(trace, trace.task_id)
    task = of_rows[order]
    columns: dict[str, Column] = {
        "firsts": np.concatenate([span_id[:1], start_ns[:1]]),
        "span_id_steps": compute_differences(span_id - span_id[:1].sum()),
        "rows_to_parent": narrow_type(np.arange(len(trace)) - above),
        "thread": narrow_type(thread),
        "thread_ids": threads,
        "task": narrow_type(task),
        "task_ids": tasks,
        "start_ns_steps": compute_differences(start_ns - start_ns[:1].sum()),
        "total_ns": narrow_type(total_ns),
        "children_ns": narrow_type(total_ns - self_ns),
        "site": narrow_type(trace.site[order]),
    }
    own_parent = np.where(parent == NONE, 0, trace.span_id[parent])
    of_top = trace.span_id[topmost_rows(trace.parent)[order]]
    rare: tuple[tuple[str, Column, Column], ...] = (
        ("parent_id", parent_id, own_parent),
        ("root_id", trace.root_id[order], of_top),
        ("active_ns", trace.active_ns[order], total_ns),
        ("error", trace.error[order], np.full(len(trace), NONE)),
        ("clipped", trace.clipped[order], np.zeros(len(trace), dtype=np.bool_)),
        ("own_id", trace.own_id[order], span_id),
    )
    for name, column, usual in rare:
        rows = np.flatnonzero(column != usual)
        columns[f"{name}_row_steps"], columns[name] = (
            compute_differences(rows),
            narrow_type(column[rows].astype(np.int64)),
        )
    columns |= _pack_intervals(trace.device, rank, start_ns)
    columns |= _pack_attributes(trace, order)
    facts = {
        "errors": list(trace.errors),
        "labels": list(trace.device.labels),
        "remote": [
            [int(rank[row]), f"{it.trace_id:x}", f"{it.span_id:x}", it.flags, it.is_local, it.in_server_span]
            for row, it in trace.remote.items()
        ],
    }
    return columns, facts


def _rank_inherited_values(trace: Columns, column: Int64s) -> tuple[Column, Int64s]:
    """Return the result of `rank_distinct`, faster if most rows have the same value as their parents."""
    shares = (trace.parent != NONE) & (column == column[trace.parent])
    firsts = np.flatnonzero(~shares)
    values, places = rank_distinct(column[firsts])
    place_of = np.zeros(len(trace), dtype=np.int64)
    place_of[firsts] = places
    return values, place_of[topmost_rows(np.where(shares, trace.parent, np.int32(NONE)).astype(np.int32))]


def _pack_intervals(device: DeviceIntervals, rank: Int64s, start_ns: Int64s) -> dict[str, Column]:
    order = np.argsort(rank[device.row], kind="stable")
    row, begin_ns = rank[device.row][order], device.start_ns[order]
    return {
        "device_row_steps": compute_differences(row),
        "device": narrow_type(device.device[order]),
        "device_stream": narrow_type(device.stream[order]),
        "device_after_ns": narrow_type(begin_ns - start_ns[row]),
        "device_total_ns": narrow_type(device.end_ns[order] - begin_ns),
        "device_label": narrow_type(device.label[order]),
        "device_uncertainty_ns": narrow_type(device.uncertainty_ns[order]),
    }


def _pack_attributes(trace: Columns, order: Int64s) -> dict[str, Column]:
    has = make_mask(trace.attributes.rows(), len(trace))
    rows = np.flatnonzero(has[order])
    table: dict[str, int] = {}
    encoded = encode_rows(trace.attributes, order[rows].tolist(), finite=False)
    numbers = [table.setdefault(text, len(table)) for text in encoded]
    texts = [text.encode() for text in table]
    return {
        "attributes_row_steps": compute_differences(rows),
        "attributes": narrow_type(np.array(numbers, dtype=np.int64)),
        "attributes_lengths": narrow_type(np.fromiter(map(len, texts), np.int64, len(texts))),
        "attributes_bytes": np.frombuffer(b"".join(texts), dtype=np.uint8),
    }


def unpack_columns(arrays: Arrays, facts: Mapping[str, Any], sites: Sequence[Site]) -> Columns:
    """Return the trace of a file's arrays. Raises `ValueError` or `LookupError` for damaged arrays."""
    span_id, start_ns = sum_differences(arrays["span_id_steps"]), sum_differences(arrays["start_ns_steps"])
    total_ns = arrays["total_ns"].astype(np.int64)
    if len(span_id):
        span_id, start_ns = span_id + arrays["firsts"][0], start_ns + arrays["firsts"][1]
    count = len(span_id)
    dense = ("rows_to_parent", "thread", "task", "start_ns_steps", "total_ns", "children_ns", "site")
    if {len(arrays[name]) for name in dense} != {count}:
        raise ValueError("its arrays are of different lengths; it is damaged")
    above = np.arange(count) - arrays["rows_to_parent"]
    _check_rows(above, count)
    is_top = arrays["rows_to_parent"] == 0
    errors, labels = _check_texts(facts["errors"]), _check_texts(facts["labels"])
    rows, ends = sum_differences(arrays["attributes_row_steps"]), sum_differences(arrays["attributes_lengths"])
    numbers, texts = arrays["attributes"], arrays["attributes_bytes"].tobytes()
    _check_rows(rows, count)
    _check_rows(numbers, len(ends))
    if len(rows) != len(numbers) or (len(ends) and (ends[-1] != len(texts) or (np.diff(ends) < 0).any())):
        raise ValueError("its attributes are cut off; it is damaged")
    number = np.full(count, NONE, dtype=np.int32)
    number[rows] = numbers
    return Columns(
        sites=tuple(sites),
        errors=errors,
        span_id=span_id,
        parent_id=_unpack_sparse(arrays, "parent_id", np.where(is_top, 0, span_id[above])),
        root_id=_unpack_sparse(
            arrays, "root_id", span_id[topmost_rows(np.where(is_top, NONE, above).astype(np.int32))]
        ),
        thread_id=_read_numbered_column(arrays, "thread"),
        task_id=_read_numbered_column(arrays, "task"),
        start_ns=start_ns,
        end_ns=start_ns + total_ns,
        active_ns=_unpack_sparse(arrays, "active_ns", total_ns.copy()),
        self_ns=total_ns - arrays["children_ns"],
        site=arrays["site"].astype(np.int32),
        error=_unpack_sparse(arrays, "error", np.full(count, NONE, dtype=np.int64)).astype(np.int32),
        clipped=_unpack_sparse(arrays, "clipped", np.zeros(count, dtype=np.int64)).astype(np.bool_),
        device=_unpack_intervals(arrays, start_ns, labels),
        attributes=Attributes(number, [TextSets(ends, texts)]),
        remote={
            int(row): RemoteParent(
                int(trace_id, 16), int(span_id, 16), int(flags), bool(is_local), bool(in_server_span)
            )
            for row, trace_id, span_id, flags, is_local, in_server_span in facts["remote"]
        },
        own_id=_unpack_sparse(arrays, "own_id", span_id.copy()) if "own_id" in arrays else span_id,
    )


def _check_texts(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError("a table of names in it is not valid")
    return tuple(names)


def _check_rows(rows: Column, count: int) -> None:
    if len(rows) and not 0 <= rows.min() <= rows.max() < count:
        raise ValueError("it refers to a row that does not exist; it is damaged")


def _unpack_sparse(arrays: Arrays, name: str, usual: Int64s) -> Int64s:
    rows = sum_differences(arrays[f"{name}_row_steps"])
    _check_rows(rows, len(usual))
    usual[rows] = arrays[name]
    return usual


def _unpack_intervals(arrays: Arrays, start_ns: Int64s, labels: tuple[str, ...]) -> DeviceIntervals:
    row = sum_differences(arrays["device_row_steps"])
    _check_rows(row, len(start_ns))
    begin_ns = start_ns[row] + arrays["device_after_ns"]
    return DeviceIntervals(
        row=row.astype(np.int32),
        device=arrays["device"].astype(np.int64),
        stream=arrays["device_stream"].astype(np.int64),
        start_ns=begin_ns,
        end_ns=begin_ns + arrays["device_total_ns"],
        label=arrays["device_label"].astype(np.int32),
        uncertainty_ns=arrays["device_uncertainty_ns"].astype(np.int64),
        labels=labels,
    )


# Kernels as columns


@dataclass(frozen=True, eq=False)
class KernelColumns(Views[Kernel]):
    """The kernels as columns with the fields of `Kernel`. `name` is an index into `names`, `kind` into `kinds`."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    name: Int32s
    kind: Int32s
    device: Int64s
    stream: Int64s
    start_ns: Int64s
    end_ns: Int64s
    thread_id: Int64s
    launched_ns: Int64s

    @classmethod
    def from_objects(cls, kernels: Sequence[Kernel]) -> KernelColumns:
        if isinstance(kernels, KernelColumns):
            return kernels
        names, kinds = dict[str, int](), dict[str, int]()
        count = len(kernels)
        name = np.fromiter((names.setdefault(kernel.name, len(names)) for kernel in kernels), np.int32, count)
        kind = np.fromiter((kinds.setdefault(kernel.kind, len(kinds)) for kernel in kernels), np.int32, count)
        numbers = [np.fromiter(map(itemgetter(place), kernels), np.int64, count) for place in range(2, 8)]
        return cls(tuple(names), tuple(kinds), name, kind, *numbers)

    def shift_times(self, by_ns: int) -> KernelColumns:
        times_ns = [self.start_ns, self.end_ns, self.launched_ns[self.thread_id != 0]]
        edges_ns = [int(edge) for column in times_ns if len(column) for edge in (column.min(), column.max())]
        if not all(-FARTHEST_NS < edge_ns + by_ns < FARTHEST_NS for edge_ns in edges_ns):
            raise ValueError("it has a time out of range; it is damaged")
        by_ns = by_ns if edges_ns else 0
        return replace(
            self,
            start_ns=self.start_ns + by_ns,
            end_ns=self.end_ns + by_ns,
            launched_ns=np.where(self.thread_id == 0, 0, self.launched_ns + by_ns),
        )

    def find_kind_index(self, kind: str) -> int:
        return self.kinds.index(kind) if kind in self.kinds else NONE

    def __len__(self) -> int:
        return len(self.name)

    def _make_items(self, some: slice) -> Iterable[Kernel]:
        numbers = (self.device, self.stream, self.start_ns, self.end_ns, self.thread_id, self.launched_ns)
        names = map(self.names.__getitem__, self.name[some].tolist())
        kinds = map(self.kinds.__getitem__, self.kind[some].tolist())
        return map(Kernel, names, kinds, *(column[some].tolist() for column in numbers))


PLAIN = ("size_bytes", "address")
LEVELS = ("allocated_bytes", "reserved_bytes")
"""The fields of an allocation that are stored as differences between rows."""


def shift_torch_data(
    facts: Trace, devices: Callable[[Column], Int64s], threads: Callable[[Column], Int64s], moved_ns: int
) -> dict[str, Any]:
    kernels, allocations = (
        KernelColumns.from_objects(facts.kernels).shift_times(moved_ns),
        Allocations.from_objects(facts.allocations),
    )
    rows = allocations.rows.copy()
    rows["device"], rows["thread_id"] = devices(rows["device"]), threads(rows["thread_id"])
    flop_threads = threads(np.array([flops.thread_id for flops in facts.flops], dtype=np.int64)).tolist()
    return {
        "kernels": replace(kernels, device=devices(kernels.device), thread_id=threads(kernels.thread_id)),
        "allocations": Allocations(rows, allocations.base_ns).shift_times(moved_ns),
        "watched": facts.watched and (facts.watched[0] + moved_ns, facts.watched[1] + moved_ns),
        "flops": [
            flops._replace(thread_id=thread_id, at_ns=flops.at_ns + moved_ns)
            for flops, thread_id in zip(facts.flops, flop_threads, strict=True)
        ],
    }


def pack_kernels(kernels: Sequence[Kernel], base_ns: int) -> tuple[dict[str, Column], list[str]]:
    work = KernelColumns.from_objects(kernels)
    names: dict[str, int] = {}
    of_name = np.array([names.setdefault(remove_surrogates(name), len(names)) for name in work.names], dtype=np.int64)
    kinds = np.array([WORK.index(kind) for kind in work.kinds], dtype=np.int64)
    threads, thread = rank_distinct(work.thread_id)
    return {
        "kernel_name": narrow_type(of_name[work.name]),
        "kernel_kind": narrow_type(kinds[work.kind]),
        "kernel_device": narrow_type(work.device),
        "kernel_stream": narrow_type(work.stream),
        "kernel_start_ns_steps": compute_differences(work.start_ns - base_ns),
        "kernel_total_ns": narrow_type(work.end_ns - work.start_ns),
        "kernel_thread": narrow_type(thread),
        "kernel_thread_ids": threads,
        "kernel_waited_ns": narrow_type(np.where(work.thread_id == 0, 0, work.start_ns - work.launched_ns)),
    }, list(names)


def unpack_kernels(columns: Arrays, names: Sequence[str], base_ns: int) -> KernelColumns:
    """Return the kernels of packed columns. Raises `ValueError` or `LookupError` for damaged columns."""
    start_ns = sum_differences(columns["kernel_start_ns_steps"]) + base_ns
    thread_id = _read_numbered_column(columns, "kernel_thread")
    end_ns = start_ns + columns["kernel_total_ns"]
    launched_ns = np.where(thread_id == 0, 0, start_ns - columns["kernel_waited_ns"])
    name, kind = columns["kernel_name"], columns["kernel_kind"]
    numbers = [columns[f"kernel_{column}"].astype(np.int64) for column in ("device", "stream")]
    numbers += [start_ns, end_ns, thread_id, launched_ns]
    is_sound = {len(name), len(kind), *map(len, numbers)} == {len(start_ns)}
    is_sound = is_sound and are_in_range(name, 0, len(names)) and are_in_range(kind, 0, len(WORK))
    is_sound = is_sound and all(
        are_in_range(times, -FARTHEST_NS, FARTHEST_NS) for times in (start_ns, end_ns, launched_ns)
    )
    if not is_sound or (end_ns < start_ns).any() or len(set(names)) != len(names):
        raise ValueError("a kernel in it is not valid; it is damaged")
    return KernelColumns(tuple(names), WORK, name.astype(np.int32), kind.astype(np.int32), *numbers)


def pack_allocations(allocations: Sequence[Allocation], base_ns: int) -> dict[str, Column]:
    packed = Allocations.from_objects(allocations)
    rows = packed.rows
    threads, thread = rank_distinct(rows["thread_id"])
    return {
        "allocation_device": narrow_type(rows["device"]),
        "allocation_at_ns_steps": compute_differences(rows["at_ns"] + (packed.base_ns - base_ns)),
        "allocation_thread": narrow_type(thread),
        "allocation_thread_ids": threads,
        **{f"allocation_{name}": narrow_type(rows[name]) for name in PLAIN},
        **{f"allocation_{name}_steps": compute_differences(rows[name]) for name in LEVELS},
    }


def unpack_allocations(columns: Arrays, base_ns: int) -> Allocations:
    thread_id = _read_numbered_column(columns, "allocation_thread")
    column_by_name: dict[str, NDArray[Any]] = {"device": columns["allocation_device"], "thread_id": thread_id}
    column_by_name |= {name: columns[f"allocation_{name}"] for name in PLAIN}
    column_by_name |= {name: sum_differences(columns[f"allocation_{name}_steps"]) for name in ("at_ns", *LEVELS)}
    if {len(column) for column in column_by_name.values()} != {len(thread_id)}:
        raise ValueError("an allocation in it is not valid; it is damaged")
    rows = np.empty(len(thread_id), dtype=ALLOCATION)
    for name, column in column_by_name.items():
        rows[name] = column
    return Allocations(rows, base_ns)


def _read_numbered_column(columns: Arrays, name: str) -> Int64s:
    table, places = columns[f"{name}_ids"], columns[name]
    _check_rows(places, len(table))
    return np.asarray(table.astype(np.int64)[places])
