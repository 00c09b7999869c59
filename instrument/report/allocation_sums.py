"""What was taken and given back of memory, summed up by place and by device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.recording.spans import HOST
from instrument.report.places import places
from instrument.report.view import Recording
from instrument.trace.allocation_rows import rows_and_times
from instrument.trace.columns import Bools, Int64s
from instrument.trace.groups import Groups, numbered


class Sums(NamedTuple):
    """What was taken and given back. `held_bytes` is what of `allocated_bytes` nobody had given back by the end."""

    allocations: int
    frees: int
    allocated_bytes: int
    freed_bytes: int
    held_bytes: int


class Use(NamedTuple):
    """What was taken and given back at one place. `thread` is empty where those of all threads are together."""

    device: int
    name: str
    kind: str
    thread: str
    sums: Sums


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


class Counted(NamedTuple):
    """All of it: uses and threads in the order of first sight, allocators in that of devices.

    `outside` counts allocations outside of the time that was watched.
    """

    uses: list[Use]
    allocators: list[Allocator]
    threads: list[str]
    outside: int


def counted(recording: Recording, state: str, apart: bool, wanted: Bools) -> Counted:
    """The allocations of a trace in the time that was watched, by device and place among the wanted spans, and `apart`
    by thread. `state` says which of them count: All, those of the host (CPU), or those of devices (GPU)."""
    facts = recording.facts
    first, last = facts.watched or facts.held
    rows, times_ns = rows_and_times(facts.allocations)
    is_inside = (first <= times_ns) & (times_ns <= last)
    kept = is_inside if state == "All" else is_inside & ((rows["device"] == HOST) == (state == "CPU"))
    rows, times_ns = rows[kept], times_ns[kept]
    where = places(recording, rows["thread_id"], times_ns, wanted)
    known: dict[str, int] = {}
    thread, firsts = numbered(rows["thread_id"])
    names = [facts.threads.get(one) or f"thread {one}" for one in rows["thread_id"][firsts].tolist()]
    of_name = np.array([known.setdefault(name, len(known)) for name in names], dtype=np.int64)[thread]
    device, of_device = numbered(rows["device"])
    follows, is_followed = _at_one_address(rows)
    held_bytes = np.where(is_followed, 0, np.maximum(rows["size_bytes"], 0))

    use, of_use = numbered(device, where.number, of_name if apart else np.zeros(len(rows), dtype=np.int64))
    texts = list(known)
    sums = list(_sums(rows["size_bytes"], held_bytes, Groups(use, len(of_use))))
    uses = []
    for row in np.sort(of_use).tolist():
        (name, kind), of_thread = where.names[where.number[row]], texts[of_name[row]] if apart else ""
        uses.append(Use(int(rows["device"][row]), name, kind, of_thread, sums[use[row]]))
    earlier = np.where(follows, 0, np.minimum(rows["size_bytes"], 0))
    groups = Groups(device, len(of_device))
    earlier_bytes = (-one for one in groups.sums(earlier).tolist())

    def level(its: Int64s, levels: NDArray[Any], begin_bytes: int) -> Level:
        at = int(levels.argmax())
        peak_bytes, end_bytes = int(levels[at]), int(levels[-1])
        if peak_bytes <= begin_bytes:
            return Level(begin_bytes, begin_bytes, end_bytes, None, "", "")
        row = its[at]
        place = where.names[where.number[row]][0]
        return Level(begin_bytes, peak_bytes, end_bytes, int(times_ns[row]), place, texts[of_name[row]])

    allocators = []
    for its, earlier_of, sums_of in zip(
        groups.members(), earlier_bytes, _sums(rows["size_bytes"], held_bytes, groups), strict=True
    ):
        begin = rows[its[0]]
        allocated = level(its, rows["allocated_bytes"][its], int(begin["allocated_bytes"]) - int(begin["size_bytes"]))
        reserved = level(its, rows["reserved_bytes"][its], int(begin["reserved_bytes"]))
        allocators.append(Allocator(int(begin["device"]), allocated, reserved, earlier_of, sums_of))
    threads = [names[one] for one in np.argsort(firsts).tolist()]
    return Counted(uses, sorted(allocators), threads, int((~is_inside).sum()))


def _sums(sizes: Int64s, held_bytes: Int64s, groups: Groups) -> Iterator[Sums]:
    """Those of each group."""
    is_taken = sizes >= 0
    columns: Sequence[list[int]] = [
        groups.sums(one).tolist()
        for one in (is_taken, ~is_taken, np.maximum(sizes, 0), np.minimum(sizes, 0), held_bytes)
    ]
    for allocations, frees, allocated_bytes, freed_bytes, held in zip(*columns, strict=True):
        yield Sums(allocations, frees, allocated_bytes, -freed_bytes, held)


def _at_one_address(rows: NDArray[Any]) -> tuple[Bools, Bools]:
    """Which rows come next at their address after it was taken, and which have one that comes next there.

    What comes next gives back what was taken; or takes it again where nobody told that it was given back.
    """
    order = np.lexsort((rows["address"], rows["device"]))
    address, device = rows["address"][order], rows["device"][order]
    is_next = np.zeros(len(order) + 1, dtype=np.bool_)
    is_next[1:-1] = (address[1:] == address[:-1]) & (device[1:] == device[:-1])
    follows, is_followed = np.empty(len(order), dtype=np.bool_), np.empty(len(order), dtype=np.bool_)
    was_taken = np.concatenate([[False], rows["size_bytes"][order[:-1]] >= 0])[: len(order)]
    follows[order] = is_next[:-1] & was_taken
    is_followed[order] = is_next[1:]
    return follows, is_followed
