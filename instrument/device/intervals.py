"""Intervals: the newest stretches of device time, in one block of memory that never grows."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable

from instrument.spans import DeviceInterval, Span

LABELS = ("exclusive", "overlapped", "launch-bound", "captured", "stale", "dropped")
"""What is known of an interval.

`exclusive`: no other timed stretch ran on the device meanwhile. `overlapped`: one did, on another stream, so each may
have slowed the other. `launch-bound`: the stream had run dry when the span ended, or the stretch is so short that the
events themselves count: what it says is how long launching took. `stale`: its length is right, its place is not known
well. `captured` and `dropped` were not timed and have no length: the stream was being captured into a graph, or no
event was to be had.
"""

FIELDS = 7
INTERVAL_BYTES = FIELDS * 8


class Intervals:
    """A ring of intervals by span; written by one thread, read by any."""

    def __init__(self, memory_bytes: int) -> None:
        self._capacity = max(memory_bytes // INTERVAL_BYTES, 64)
        self._cells = array("q", bytes(self._capacity * INTERVAL_BYTES))
        self._lock = threading.Lock()
        self.count = 0

    @property
    def overwritten(self) -> int:
        """How many newer ones have taken the place of."""
        return max(self.count - self._capacity, 0)

    def add(
        self, span_id: int, device: int, stream: int, start_ns: int, end_ns: int, label: str, uncertainty_ns: int = 0
    ) -> None:
        """Keep one, in place of the oldest if need be."""
        at = self.count % self._capacity * FIELDS
        cells = (span_id, device, _signed(stream), start_ns, end_ns, LABELS.index(label), uncertainty_ns)
        with self._lock:
            self._cells[at : at + FIELDS] = array("q", cells)
            self.count += 1

    def join(self, spans: Iterable[Span], since: int = 0) -> None:
        """Give each span its intervals, those that are still here and came after the first `since`, by time."""
        with self._lock:
            first, last = max(since, self.count - self._capacity), self.count
            begin, end = first % self._capacity * FIELDS, last % self._capacity * FIELDS
            if last - first == 0:
                return
            cells = self._cells[begin:end] if begin < end else self._cells[begin:] + self._cells[:end]
        wanted = {span.span_id: span for span in spans if span.site.device}
        found: dict[int, list[DeviceInterval]] = {}
        ids = cells[::FIELDS]
        for index, span_id in enumerate(ids):
            if span_id in wanted:
                _, device, stream, start_ns, end_ns, label, uncertainty_ns = cells[
                    index * FIELDS : (index + 1) * FIELDS
                ]
                found.setdefault(span_id, []).append(
                    DeviceInterval(device, stream % (1 << 64), start_ns, end_ns, LABELS[label], uncertainty_ns)
                )
        for span_id, intervals in found.items():
            wanted[span_id].device = tuple(sorted(intervals, key=lambda interval: interval.start_ns))


def _signed(number: int) -> int:
    """The 64 bits of an address as a signed number."""
    return number - (1 << 64) if number >= 1 << 63 else number
