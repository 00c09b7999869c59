"""Packs torch.profiler's kernels and allocations into columns of a file, and unpacks them.

Kernels and allocations are ordered by time, so times are stored as differences. A table has each thread id once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from operator import itemgetter
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from instrument.recording.spans import WORK, Kernel
from instrument.trace.columns import FARTHEST_NS, Int32s, Int64s, lie_within
from instrument.trace.forest import NONE
from instrument.trace.groups import ranked
from instrument.trace.layout import Arrays, Column, narrow, steps, summed
from instrument.trace.text import clean
from instrument.trace.trace import Allocation, Allocations, Trace

# Kernels as columns


AT_ONCE = 20_000
"""The maximum number of kernels that become objects at once, to bound the memory."""


@dataclass(frozen=True, eq=False)
class KernelColumns(Sequence[Kernel]):
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
    def of(cls, kernels: Sequence[Kernel]) -> KernelColumns:
        """Return kernels as columns. Raises `OverflowError` for numbers beyond 64 bits."""
        if isinstance(kernels, KernelColumns):
            return kernels
        names, kinds = dict[str, int](), dict[str, int]()
        count = len(kernels)
        name = np.fromiter((names.setdefault(kernel.name, len(names)) for kernel in kernels), np.int32, count)
        kind = np.fromiter((kinds.setdefault(kernel.kind, len(kinds)) for kernel in kernels), np.int32, count)
        numbers = [np.fromiter(map(itemgetter(place), kernels), np.int64, count) for place in range(2, 8)]
        return cls(tuple(names), tuple(kinds), name, kind, *numbers)

    def moved(self, by_ns: int) -> KernelColumns:
        """Return the kernels with all times moved by `by_ns`. Raises `ValueError` for times that no clock reads."""
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

    def place_of_kind(self, kind: str) -> int:
        """Return the index of a kind, `NONE` without work of that kind."""
        return self.kinds.index(kind) if kind in self.kinds else NONE

    def __len__(self) -> int:
        return len(self.name)

    @overload
    def __getitem__(self, place: int) -> Kernel: ...
    @overload
    def __getitem__(self, place: slice) -> list[Kernel]: ...
    def __getitem__(self, place: int | slice) -> Kernel | list[Kernel]:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        return next(self._make_objects(slice(index := range(len(self))[place], index + 1)))

    def __iter__(self) -> Iterator[Kernel]:
        for first in range(0, len(self), AT_ONCE):
            yield from self._make_objects(slice(first, first + AT_ONCE))

    def _make_objects(self, some: slice) -> Iterator[Kernel]:
        numbers = (self.device, self.stream, self.start_ns, self.end_ns, self.thread_id, self.launched_ns)
        names = map(self.names.__getitem__, self.name[some].tolist())
        kinds = map(self.kinds.__getitem__, self.kind[some].tolist())
        return map(Kernel, names, kinds, *(column[some].tolist() for column in numbers))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, (str, bytes)):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"KernelColumns({list(self)!r})"


ROW = np.dtype([(item.name, np.int64) for item in fields(Allocation)])
"""The numpy type of a packed allocation, with the fields of `Allocation`."""

INT64 = np.iinfo(np.int64)

PLAIN = ("size_bytes", "address")
LEVELS = ("allocated_bytes", "reserved_bytes")
"""The fields of an allocation that are stored as differences, because they change in almost every row."""


def move_watched(
    facts: Trace, devices: Callable[[Column], Int64s], threads: Callable[[Column], Int64s], moved_ns: int
) -> dict[str, Any]:
    """Return torch.profiler's data with all times moved by `moved_ns`, and with other numbers of devices and
    threads."""
    kernels, allocations = KernelColumns.of(facts.kernels).moved(moved_ns), Allocations.of(facts.allocations)
    rows = np.frombuffer(allocations.rows, dtype=ROW).copy()
    rows["device"], rows["thread_id"] = devices(rows["device"]), threads(rows["thread_id"])
    flop_threads = threads(np.array([flops.thread_id for flops in facts.flops], dtype=np.int64)).tolist()
    return {
        "kernels": replace(kernels, device=devices(kernels.device), thread_id=threads(kernels.thread_id)),
        "allocations": Allocations(rows.tobytes(), allocations.base_ns).moved(moved_ns),
        "watched": facts.watched and (facts.watched[0] + moved_ns, facts.watched[1] + moved_ns),
        "flops": [
            flops._replace(thread_id=thread_id, at_ns=flops.at_ns + moved_ns)
            for flops, thread_id in zip(facts.flops, flop_threads, strict=True)
        ],
    }


def rows_and_times(allocations: Sequence[Allocation]) -> tuple[NDArray[Any], Int64s]:
    """Return the packed allocations, and their times on the clock. Times in the packed allocations count from a base.

    A time that no clock reads is clipped. Raises `OverflowError` for numbers beyond 64 bits.
    """
    packed = Allocations.of(allocations)
    rows, base_ns = np.frombuffer(packed.rows, dtype=ROW), packed.base_ns
    first, last = max(-FARTHEST_NS - base_ns, int(INT64.min)), min(FARTHEST_NS - base_ns, int(INT64.max))
    return rows, rows["at_ns"].clip(first, last) + base_ns


def pack_kernels(kernels: Sequence[Kernel], base_ns: int) -> tuple[dict[str, Column], list[str]]:
    """Return the packed columns of kernels, with times from `base_ns`, and the table of their names."""
    work = KernelColumns.of(kernels)
    names: dict[str, int] = {}
    of_name = np.array([names.setdefault(clean(name), len(names)) for name in work.names], dtype=np.int64)
    kinds = np.array([WORK.index(kind) for kind in work.kinds], dtype=np.int64)
    threads, thread = ranked(work.thread_id)
    return {
        "kernel_name": narrow(of_name[work.name]),
        "kernel_kind": narrow(kinds[work.kind]),
        "kernel_device": narrow(work.device),
        "kernel_stream": narrow(work.stream),
        "kernel_start_ns_steps": steps(work.start_ns - base_ns),
        "kernel_total_ns": narrow(work.end_ns - work.start_ns),
        "kernel_thread": narrow(thread),
        "kernel_thread_ids": threads,
        "kernel_waited_ns": narrow(np.where(work.thread_id == 0, 0, work.start_ns - work.launched_ns)),
    }, list(names)


def unpack_kernels(columns: Arrays, names: Sequence[str], base_ns: int) -> KernelColumns:
    """Return the kernels in packed columns. Raises `ValueError` and `LookupError` for damaged columns."""
    start_ns = summed(columns["kernel_start_ns_steps"]) + base_ns
    thread_id = _read_table(columns, "kernel_thread")
    end_ns = start_ns + columns["kernel_total_ns"]
    launched_ns = np.where(thread_id == 0, 0, start_ns - columns["kernel_waited_ns"])
    name, kind = columns["kernel_name"], columns["kernel_kind"]
    numbers = [columns[f"kernel_{column}"].astype(np.int64) for column in ("device", "stream")]
    numbers += [start_ns, end_ns, thread_id, launched_ns]
    is_sound = {len(name), len(kind), *map(len, numbers)} == {len(start_ns)}
    is_sound = is_sound and lie_within(name, 0, len(names)) and lie_within(kind, 0, len(WORK))
    is_sound = is_sound and all(
        lie_within(times, -FARTHEST_NS, FARTHEST_NS) for times in (start_ns, end_ns, launched_ns)
    )
    if not is_sound or (end_ns < start_ns).any() or len(set(names)) != len(names):
        raise ValueError("a kernel in it is not valid; it is damaged")
    return KernelColumns(tuple(names), WORK, name.astype(np.int32), kind.astype(np.int32), *numbers)


def pack_allocations(allocations: Sequence[Allocation], base_ns: int) -> dict[str, Column]:
    """Return the packed columns of allocations, with times from `base_ns`."""
    packed = Allocations.of(allocations)
    rows = np.frombuffer(packed.rows, dtype=ROW)
    threads, thread = ranked(rows["thread_id"])
    return {
        "allocation_device": narrow(rows["device"]),
        "allocation_at_ns_steps": steps(rows["at_ns"] + (packed.base_ns - base_ns)),
        "allocation_thread": narrow(thread),
        "allocation_thread_ids": threads,
        **{f"allocation_{name}": narrow(rows[name]) for name in PLAIN},
        **{f"allocation_{name}_steps": steps(rows[name]) for name in LEVELS},
    }


def unpack_allocations(columns: Arrays, base_ns: int) -> Allocations:
    thread_id = _read_table(columns, "allocation_thread")
    column_by_name: dict[str, NDArray[Any]] = {"device": columns["allocation_device"], "thread_id": thread_id}
    column_by_name |= {name: columns[f"allocation_{name}"] for name in PLAIN}
    column_by_name |= {name: summed(columns[f"allocation_{name}_steps"]) for name in ("at_ns", *LEVELS)}
    if {len(column) for column in column_by_name.values()} != {len(thread_id)}:
        raise ValueError("an allocation in it is not valid; it is damaged")
    rows = np.empty(len(thread_id), dtype=ROW)
    for name, column in column_by_name.items():
        rows[name] = column
    return Allocations(rows.tobytes(), base_ns)


def _read_table(columns: Arrays, name: str) -> Int64s:
    table, places = columns[f"{name}_ids"], columns[name]
    if not lie_within(places, 0, len(table)):
        raise ValueError("it refers to a row that does not exist; it is damaged")
    return np.asarray(table.astype(np.int64)[places])
