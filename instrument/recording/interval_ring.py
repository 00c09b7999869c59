"""Intervals: the newest stretches of device time, in one block of memory that never grows."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from struct import Struct

from instrument.recording.slot_ring import FindRoom, SlotRing
from instrument.recording.spans import DeviceInterval

LABELS = ("exclusive", "overlapped", "launch-bound", "captured", "stale", "dropped")
"""What is known of an interval.

`exclusive`: no other timed stretch ran on the device meanwhile. `overlapped`: one did, on another stream, so each may
have slowed the other. `launch-bound`: the stream had run dry when the span ended, or the stretch is so short that the
events themselves count: what it says is how long launching took. `stale`: its length is right, its place is not known
well. `captured` and `dropped` were not timed and have no length: the stream was being captured into a graph, or no
event was to be had.
"""

_NUMBERS = {label: number for number, label in enumerate(LABELS)}

_CELLS = Struct("<QqQqqqq")

INTERVAL_BYTES = _CELLS.size

NOTHING_TO_COME = 1 << 62
"""Up to when everything is settled where no interval will come any more."""


class IntervalRing:
    """A ring of intervals by span; written by one thread, read by any.

    It lies where `find_room` says, for others to read, and in memory of its own without one.
    """

    def __init__(self, memory_bytes: int, find_room: FindRoom | None = None) -> None:
        self._slots = SlotRing(_CELLS, max(memory_bytes // INTERVAL_BYTES, 64), find_room, "interval_slots")

    @property
    def count(self) -> int:
        """How many there ever were."""
        return self._slots.count

    @property
    def overwritten(self) -> int:
        """How many newer ones have taken the place of."""
        return self._slots.overwritten

    def add(
        self, span_id: int, device: int, stream: int, start_ns: int, end_ns: int, label: str, uncertainty_ns: int = 0
    ) -> None:
        """Keep one, in place of the oldest if need be."""
        self._slots.add(span_id, device, stream, start_ns, end_ns, _NUMBERS[label], uncertainty_ns)

    def add_all(self, intervals: Sequence[tuple[int, int, int, int, int, str, int]]) -> None:
        """Keep some at once, each as `add` takes it."""
        self._slots.add_all([(*place, _NUMBERS[label], uncertainty_ns) for *place, label, uncertainty_ns in intervals])

    def tell_settled(self, until_ns: int) -> None:
        """Say to others that of every span that had ended by then all intervals are here that will ever be."""
        self._slots.put("settled_ns", until_ns)

    def packed(self) -> bytes:
        """All of them as they lie in memory, the oldest first; `LABELS` says what the numbers of labels mean."""
        return self._slots.since(0)

    def of(self, span_ids: Container[int], since: int = 0) -> dict[int, tuple[DeviceInterval, ...]]:
        """Those that are still here and came after the first `since`, by the id of their span, each span's by time."""
        return intervals_by_span(_CELLS.iter_unpack(self._slots.since(since)), span_ids)


def intervals_by_span(
    cells: Iterable[tuple[int, ...]], span_ids: Container[int]
) -> dict[int, tuple[DeviceInterval, ...]]:
    """Of intervals, as numbers in the order of their fields, those of some spans."""
    found: dict[int, list[DeviceInterval]] = {}
    for span_id, device, stream, start_ns, end_ns, label, uncertainty_ns in cells:
        if span_id in span_ids:
            interval = DeviceInterval(device, stream, start_ns, end_ns, LABELS[label], uncertainty_ns)
            found.setdefault(span_id, []).append(interval)
    return {
        span_id: tuple(sorted(intervals, key=lambda interval: interval.start_ns))
        for span_id, intervals in found.items()
    }
