"""What was taken and given back of memory, summed up by place: one pass over all allocations, with its twin in C
(`_allocations.c`), which takes a tenth of the time.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from instrument import native
from instrument.recording.spans import HOST, Allocation, Allocations, Interval, Site, Trace
from instrument.report.places import NAMES, NOWHERE, SHARED, UNKNOWN, innermost

_native = native.find("_allocations")

STATES = ("All", "CPU", "GPU")
"""Which allocations count: all, those of the host, or those of devices."""

_INT64 = 1 << 63


class Use(NamedTuple):
    """What was taken and given back at one place, a site or one of the names in `places`.

    `held_bytes` is what of `allocated_bytes` nobody had given back by the end. `thread_id` is 0 where those of all
    threads are together.
    """

    device: int
    place: Site | str
    thread_id: int
    allocations: int
    frees: int
    allocated_bytes: int
    freed_bytes: int
    held_bytes: int


class Level(NamedTuple):
    """How much an allocator had: at first, at most, and at the end. `at` is the allocation that reached the peak and
    `place` where, -1 and None where none rose above what there was at first."""

    begin_bytes: int
    peak_bytes: int
    end_bytes: int
    at: int
    place: Site | str | None


class Allocator(NamedTuple):
    """The allocator of a device; `earlier_bytes` were given back and taken before the first allocation."""

    device: int
    allocated: Level
    reserved: Level
    earlier_bytes: int


class Counted(NamedTuple):
    """All of it: uses and threads in the order of first sight, allocators in that of devices.

    `outside` counts allocations outside of the time that was watched.
    """

    uses: list[Use]
    allocators: list[Allocator]
    thread_ids: list[int]
    outside: int


def counted(trace: Trace, state: str, apart: bool) -> Counted:
    """The allocations of a trace in the time that was watched, by device and place, and `apart` by thread."""
    window = trace.watched or trace.held
    found = None
    try:
        packed = Allocations.of(trace.allocations)
    except OverflowError:
        told = trace.allocations
        numbers = innermost(trace, [one.thread_id for one in told], [one.at_ns for one in told])
    else:
        cells = memoryview(packed.rows).cast("q")
        thread_ids, times_ns = (array("q", cells[field::7].tobytes()) for field in (2, 1))
        numbers = innermost(trace, thread_ids, times_ns, packed.base_ns)
        found = _in_c(trace, packed, numbers, window, state, apart)
    return _counted(trace, numbers, window, state, apart) if found is None else found


def _in_c(
    trace: Trace, packed: Allocations, numbers: array[int], window: Interval, state: str, apart: bool
) -> Counted | None:
    times = packed.base_ns, *window, trace.held[0]
    if _native is None or not all(-_INT64 <= at_ns < _INT64 for at_ns in times):
        return None
    names = UNKNOWN, NOWHERE, SHARED
    found = _native.memory(trace.spans, numbers, packed.rows, *times, STATES.index(state), apart, names)
    if found is None:
        return None
    uses, allocators, thread_ids, outside = found
    return Counted(
        [Use(*use) for use in uses],
        [Allocator(device, Level(*one), Level(*other), earlier) for device, one, other, earlier in sorted(allocators)],
        thread_ids,
        outside,
    )


class _Used:
    """A `Use` in the making."""

    __slots__ = ("allocated_bytes", "allocations", "freed_bytes", "frees", "held_bytes")

    def __init__(self) -> None:
        self.allocations = self.frees = self.allocated_bytes = self.freed_bytes = self.held_bytes = 0


class _Level:
    """A `Level` in the making."""

    __slots__ = ("at", "begin", "end", "peak", "place")

    def __init__(self, begin: int) -> None:
        self.begin = self.peak = self.end = begin
        self.at = -1
        self.place: Site | str | None = None

    def reach(self, level_bytes: int, at: int, place: Site | str) -> None:
        if level_bytes > self.peak:
            self.peak, self.at, self.place = level_bytes, at, place
        self.end = level_bytes

    def told(self) -> Level:
        return Level(self.begin, self.peak, self.end, self.at, self.place)


class _Allocator:
    """An `Allocator` in the making, and who holds an address, with how much."""

    __slots__ = ("allocated", "earlier_bytes", "held", "reserved")

    def __init__(self, first: Allocation) -> None:
        self.allocated = _Level(first.allocated_bytes - first.size_bytes)
        self.reserved = _Level(first.reserved_bytes)
        self.held: dict[int, tuple[_Used, int]] = {}
        self.earlier_bytes = 0


def _counted(trace: Trace, numbers: array[int], window: Interval, state: str, apart: bool) -> Counted:
    first, last = window
    known_since_ns = trace.held[0]
    uses: dict[tuple[int, Site | str, int], _Used] = {}
    allocators: dict[int, _Allocator] = {}
    thread_ids: dict[int, None] = {}
    outside = 0
    for at, (one, number) in enumerate(zip(trace.allocations, numbers, strict=True)):
        if not first <= one.at_ns <= last:
            outside += 1
            continue
        if state != "All" and (one.device == HOST) != (state == "CPU"):
            continue
        place = UNKNOWN if one.at_ns < known_since_ns else NAMES.get(number) or trace.spans[number].site
        thread_ids[one.thread_id] = None
        use = uses.setdefault((one.device, place, one.thread_id if apart else 0), _Used())
        of = allocators.get(one.device)
        if of is None:
            of = allocators[one.device] = _Allocator(one)
        size_bytes = one.size_bytes
        before = of.held.pop(one.address, None)
        if before is not None:
            # Given back, or taken again where nobody told that it was given back.
            holder, held_bytes = before
            holder.held_bytes -= held_bytes
        if size_bytes >= 0:
            use.allocations += 1
            use.allocated_bytes += size_bytes
            use.held_bytes += size_bytes
            of.held[one.address] = use, size_bytes
        else:
            use.frees += 1
            use.freed_bytes -= size_bytes
            if before is None:
                of.earlier_bytes -= size_bytes
        of.allocated.reach(one.allocated_bytes, at, place)
        of.reserved.reach(one.reserved_bytes, at, place)
    return Counted(
        [
            Use(*key, use.allocations, use.frees, use.allocated_bytes, use.freed_bytes, use.held_bytes)
            for key, use in uses.items()
        ],
        [
            Allocator(device, of.allocated.told(), of.reserved.told(), of.earlier_bytes)
            for device, of in sorted(allocators.items())
        ],
        list(thread_ids),
        outside,
    )
