"""What was taken and given back of memory, summed up by place and by device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from instrument.recording.spans import HOST
from instrument.report.places import places
from instrument.report.view import Recording
from instrument.trace.columns import Bools, Int64s
from instrument.trace.groups import Groups, numbered
from instrument.trace.watched import rows_and_times


class Sums(NamedTuple):
    """What was taken and given back. `held_bytes` is what of `allocated_bytes` nobody had given back by the end."""

    allocations: int
    frees: int
    allocated_bytes: int
    freed_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class PlaceMemory:
    """What was taken and given back directly within the spans of one place, outside of their children.

    `held_bytes` is what of `allocated_bytes` nobody had given back by the end. `thread` is empty where those of all
    threads are together, `device` None for several. One with `remaining` stands for so many that were left out.
    """

    device: int | None
    name: str
    kind: str
    thread: str
    allocations: int
    frees: int
    allocated_bytes: int
    freed_bytes: int
    held_bytes: int
    remaining: int = 0

    @property
    def increase_bytes(self) -> int:
        """What was taken less what was given back, below 0 where that is more."""
        return self.allocated_bytes - self.freed_bytes


class Level(NamedTuple):
    """How much an allocator had: at first, at most, and at the end; when and where the peak was reached. `at_ns` is
    None where none rose above what there was at first."""

    begin_bytes: int
    peak_bytes: int
    end_bytes: int
    at_ns: int | None
    place: str
    thread: str


class Allocator(NamedTuple):
    """The allocator of a device; `earlier_bytes` were given back and taken before the first allocation."""

    device: int
    allocated: Level
    reserved: Level
    earlier_bytes: int
    sums: Sums


class CountedAllocations(NamedTuple):
    """All of it: uses and threads in the order of first sight, allocators in that of devices.

    `outside` counts allocations outside of the time that was watched.
    """

    uses: list[PlaceMemory]
    allocators: list[Allocator]
    threads: list[str]
    outside: int


def counted(recording: Recording, state: str, apart: bool, wanted: Bools) -> CountedAllocations:
    """The allocations of a trace in the time that was watched, by device and place among the wanted spans, and `apart`
    by thread. `state` says which of them count: All, those of the host (CPU), or those of devices (GPU)."""
    facts = recording.facts
    first, last = facts.watched or facts.held
    rows, times_ns = rows_and_times(facts.allocations)
    is_inside = (first <= times_ns) & (times_ns <= last)
    kept = is_inside if state == "All" else is_inside & ((rows["device"] == HOST) == (state == "CPU"))
    thread_id, at_ns = rows["thread_id"][kept], times_ns[kept]
    where = places(recording, thread_id, at_ns, wanted)
    device, size_bytes, address = (rows[name][kept] for name in ("device", "size_bytes", "address"))
    thread, of_thread = numbered(thread_id)
    threads = [facts.threads.get(one) or f"thread {one}" for one in thread_id[of_thread].tolist()]
    names = {name: number for number, name in enumerate(dict.fromkeys(threads))}
    called = np.array([names[name] for name in threads], dtype=np.int64)[thread] if apart else np.zeros_like(thread)
    follows, is_followed = _at_one_address(device, address, size_bytes)
    held_bytes = np.where(is_followed, 0, np.maximum(size_bytes, 0))

    number, of_device = numbered(device)
    use, of_use = numbered(number, where.number, called)
    sums = list(_sums(size_bytes, held_bytes, Groups(use, len(of_use))))
    uses = []
    for row in np.sort(of_use).tolist():
        name, kind = where.names[where.number[row]]
        on_thread = threads[thread[row]] if apart else ""
        uses.append(PlaceMemory(int(device[row]), name, kind, on_thread, *sums[use[row]]))
    groups = Groups(number, len(of_device))
    earlier_bytes = (-one for one in groups.sums(np.where(follows, 0, np.minimum(size_bytes, 0))).tolist())

    def level(its: Int64s, levels: Int64s, begin_bytes: int) -> Level:
        at = int(levels.argmax())
        peak_bytes, end_bytes = int(levels[at]), int(levels[-1])
        if peak_bytes <= begin_bytes:
            return Level(begin_bytes, begin_bytes, end_bytes, None, "", "")
        row = int(its[at])
        place = where.names[where.number[row]][0]
        return Level(begin_bytes, peak_bytes, end_bytes, int(at_ns[row]), place, threads[thread[row]])

    allocators = []
    levels = [rows[name][kept] for name in ("allocated_bytes", "reserved_bytes")]
    for its, earlier_of, of_it in zip(
        groups.members(), earlier_bytes, _sums(size_bytes, held_bytes, groups), strict=True
    ):
        allocated, reserved = (one[its] for one in levels)
        before_bytes = int(allocated[0]) - int(size_bytes[its[0]])
        both = level(its, allocated, before_bytes), level(its, reserved, int(reserved[0]))
        allocators.append(Allocator(int(device[its[0]]), *both, earlier_of, of_it))
    seen = [threads[one] for one in np.argsort(of_thread).tolist()]
    return CountedAllocations(uses, sorted(allocators), seen, int((~is_inside).sum()))


def _sums(sizes: Int64s, held_bytes: Int64s, groups: Groups) -> Iterator[Sums]:
    """Those of each group."""
    is_taken = sizes >= 0
    columns: Sequence[list[int]] = [
        groups.sums(one).tolist()
        for one in (is_taken, ~is_taken, np.maximum(sizes, 0), np.minimum(sizes, 0), held_bytes)
    ]
    for allocations, frees, allocated_bytes, freed_bytes, held in zip(*columns, strict=True):
        yield Sums(allocations, frees, allocated_bytes, -freed_bytes, held)


def _at_one_address(device: Int64s, address: Int64s, size_bytes: Int64s) -> tuple[Bools, Bools]:
    """Which allocations come next at their address after it was taken, and which have one that comes next there.

    What comes next gives back what was taken; or takes it again where nobody told that it was given back.
    """
    order = np.lexsort((address, device))
    address, device = address[order], device[order]
    is_next = np.zeros(len(order) + 1, dtype=np.bool_)
    is_next[1:-1] = (address[1:] == address[:-1]) & (device[1:] == device[:-1])
    was_taken = np.concatenate([[False], size_bytes[order[:-1]] >= 0])[: len(order)]
    follows, is_followed = np.empty(len(order), dtype=np.bool_), np.empty(len(order), dtype=np.bool_)
    follows[order], is_followed[order] = is_next[:-1] & was_taken, is_next[1:]
    return follows, is_followed
