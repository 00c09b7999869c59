"""What was taken and given back of memory, summed up by place: one pass over all allocations, with its twin in C
(`_allocations.c`), which takes a tenth of the time.
"""

from __future__ import annotations

from typing import NamedTuple

from instrument import native
from instrument.report.places import NOWHERE, SHARED, UNKNOWN, places
from instrument.spans import HOST, Allocation, Allocations, Interval, Site, Trace

_native = native.find("report._allocations")

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
    found = _in_c(trace, window, state, apart)
    return _counted(trace, window, state, apart) if found is None else found


def _in_c(trace: Trace, window: Interval, state: str, apart: bool) -> Counted | None:
    known_since_ns = trace.held[0]
    if _native is None:
        return None
    try:
        packed = Allocations.of(trace.allocations)
    except OverflowError:
        return None
    times = packed.base_ns, *window, known_since_ns
    if not all(-_INT64 <= at_ns < _INT64 for at_ns in times):
        return None
    launches, names = trace.origin.recorder == "other", (UNKNOWN, NOWHERE, SHARED)
    found = _native.memory(trace.spans, packed.rows, *times, STATES.index(state), apart, launches, names)
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


def _counted(trace: Trace, window: Interval, state: str, apart: bool) -> Counted:
    first, last = window
    known_since_ns = trace.held[0]
    uses: dict[tuple[int, Site | str, int], _Used] = {}
    allocators: dict[int, _Allocator] = {}
    thread_ids: dict[int, None] = {}
    outside = 0
    for at, (one, place) in enumerate(zip(trace.allocations, _places(trace, window, state), strict=True)):
        if place is None:
            outside += not first <= one.at_ns <= last
            continue
        place = UNKNOWN if one.at_ns < known_since_ns else place
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


def _places(trace: Trace, window: Interval, state: str) -> list[Site | str | None]:
    """The place of each allocation, None of one that does not count."""
    first, last = window
    points = (
        (one.thread_id, one.at_ns, at)
        for at, one in enumerate(trace.allocations)
        if first <= one.at_ns <= last and (state == "All" or (one.device == HOST) == (state == "CPU"))
    )
    found: list[Site | str | None] = [None] * len(trace.allocations)
    for at, place in places(trace, points):
        found[at] = place if isinstance(place, str) else place.site
    return found
