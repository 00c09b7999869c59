"""The outbox: kept trees on their way to the collector, which wait here until their device times have come."""

from __future__ import annotations

import time
from collections import deque

from instrument import otlp
from instrument.device.timing import Timing
from instrument.otlp.interval_join import SETTLE_NS, DeviceTimes
from instrument.recording.spans import Span

WAITING_SPANS = 20_000
"""How many spans wait for their device times before they are sent without."""


class Outbox:
    """Hands trees over to the exporter: at once, or, where a site of theirs is timed on the device, once it has been.

    `timing` is None where no device is timed. Used by one thread at a time.
    """

    def __init__(self, exporter: otlp.Exporter, timing: Timing | None) -> None:
        self._exporter = exporter
        self._timing = timing
        self._begin()

    def _begin(self) -> None:
        self._waiting: deque[tuple[int, list[Span]]] = deque()
        timing = self._timing
        self._times = None if timing is None else DeviceTimes(lambda: timing.intervals)

    def after_fork_in_child(self) -> None:
        """Begin anew: what waited is the parent's."""
        self._begin()

    @property
    def waits(self) -> bool:
        """Whether anything waits for its device times."""
        return bool(self._waiting)

    @property
    def untimed(self) -> int:
        """Spans that were sent before their device times were known."""
        return 0 if self._times is None else self._times.untimed

    def put(self, spans: list[Span]) -> None:
        """Take in one tree, or a part of it."""
        if self._timing is not None and self._timing.timer is not None and any(span.site.device for span in spans):
            self._waiting.append((max(span.end_ns for span in spans), spans))
        else:
            self._exporter.offer(spans)

    def send_settled(self, *, is_last: bool) -> None:
        """Send the trees that have their device times, or have waited for them long enough; the last time, all."""
        timing, times = self._timing, self._times
        if timing is None or times is None:
            return
        times.look()
        now = time.monotonic_ns()
        size = sum(len(spans) for _, spans in self._waiting)
        settled_ns = timing.settled_ns() if self._waiting else 0
        ready: list[list[Span]] = []
        while self._waiting:
            end_ns, spans = self._waiting[0]
            if not (settled_ns >= end_ns or size > WAITING_SPANS or now - end_ns > SETTLE_NS or is_last):
                break
            self._waiting.popleft()
            size -= len(spans)
            ready.append(spans)
        times.join([span for spans in ready for span in spans], settled_ns)
        for spans in ready:
            self._exporter.offer(spans)
