"""Stretches: what the rings held of a stretch of time, taken at once, of which spans are made later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from instrument.device.timing import Timing
from instrument.recorder.recorder import Recorder
from instrument.recording.rows import Held, Taken
from instrument.recording.spans import Origin
from instrument.runtime.cheap_start import dataclass

if TYPE_CHECKING:
    from instrument.trace import columns

# What is made of rows takes numpy, which a service does without whose profile asks for no files and no report.

WINDOWS_THREAD = "instrument-windows"
"""The name of the threads on which the windows of loops are written and sent; what they record is in no stretch."""


@dataclass(frozen=True, slots=True)
class TakenStretch:
    """What a recorder's rings held of the time from `start_ns` to `end_ns` when it was taken: 64 bytes and 10 ns a row.

    `threads` names the threads of the time. `wrapped` and `given_up` are those of which rows are missing that had ended
    after the start: of rings that have wrapped, and of threads that have ended. `window` and `origin` are for the trace
    that is made of it.
    """

    taken: Taken
    threads: Mapping[int, str]
    wrapped: frozenset[int]
    given_up: frozenset[int]
    start_ns: int
    end_ns: int
    window: int
    origin: Origin

    @classmethod
    def of(cls, recorder: Recorder, start_ns: int, end_ns: int, window: int, origin: Origin) -> TakenStretch:
        """Take it now. What the threads that write windows have recorded is left out."""
        taken = recorder.take(start_ns)
        rings = recorder.rings()
        threads = {ring.thread_id: ring.name for ring in rings}
        if WINDOWS_THREAD in threads.values():
            of_service = [block for block in taken.blocks if threads.get(block.thread_id) != WINDOWS_THREAD]
            taken = taken._replace(blocks=of_service)
        wrapped, given_up = _overwritten(rings, start_ns, bool(recorder.ended_rows))
        return cls(taken, threads, wrapped, given_up, start_ns, end_ns, window, origin)

    def columns(self, timing: Timing | None = None) -> columns.Columns:
        """Its spans, clipped to it, with the device times that are known by now, at 0.2 us each; on any thread, at any
        later time."""
        from instrument.trace.of_recording import columns_of

        device_of = None if timing is None else timing.columns_of
        return columns_of(self.taken, self.start_ns, self.end_ns, device_of)

    def held_from_ns(self) -> int:
        """From when on none of its spans is missing; 0 where none is."""
        if not (self.wrapped or self.given_up):
            return 0
        from instrument.trace.of_recording import oldest_ns

        return _held_from_ns(oldest_ns(self.taken, self.start_ns, self.end_ns), self.wrapped, self.given_up)

    def begun_since(self, at_ns: int) -> bool:
        """Whether a span has begun in it after that time."""
        from instrument.trace.of_recording import has_begun

        return has_begun(self.taken, at_ns, self.end_ns)


def held_now(recorder: Recorder, start_ns: int) -> tuple[Held, int]:
    """What the rings hold from a time on, not taken, and from when on none of it is missing; 0 where none is."""
    rings = recorder.rings()
    names = {ring.thread_id: ring.name for ring in rings}
    held = recorder.held(start_ns, {thread_id for thread_id, name in names.items() if name == WINDOWS_THREAD})
    return held, _held_from_ns(held.oldest_ns, *_overwritten(rings, start_ns, bool(recorder.ended_rows)))


def _held_from_ns(oldest_ns: Mapping[int, int], wrapped: frozenset[int], given_up: frozenset[int]) -> int:
    """The same by the first end on each thread."""
    known = [end_ns for thread_id, end_ns in oldest_ns.items() if thread_id in wrapped]
    known += sorted(end_ns for thread_id, end_ns in oldest_ns.items() if thread_id in given_up)[:1]
    return max(known, default=0)


def _overwritten(rings: Sequence[Any], start_ns: int, has_given_up: bool) -> tuple[frozenset[int], frozenset[int]]:
    """The threads of which rows are missing that ended after a time: of rings that have wrapped, and of ended threads.

    A ring lies in the order of ends: what ended after its oldest row is there. Rings that were given up are those of
    the threads that had ended first, so they are older than the rows of such threads that are left.
    """

    def reaches_back(ring: Any) -> bool:
        return bool(ring.first_after(start_ns) > max(ring.head - ring.capacity, 0))

    wrapped = frozenset(ring.thread_id for ring in rings if ring.head > ring.capacity and not reaches_back(ring))
    ended = ([ring for ring in rings if ring.ended] or rings[-1:]) if has_given_up else []
    return wrapped, frozenset() if any(map(reaches_back, ended)) else frozenset(ring.thread_id for ring in ended)
