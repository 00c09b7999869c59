"""Device times of spans on their way to a collector: whoever sends them has waited for these, but not for ever."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from instrument.recording.spans import DeviceInterval, Span

SETTLE_NS = 2 * 10**9
"""How long spans wait for their device times before they are sent without."""

INTERVALS_KNOWN = 4_096
"""How many past looks tell which device intervals came after the begin of a span."""


class Intervals(Protocol):
    """The newest device intervals of a process."""

    @property
    def count(self) -> int:
        """How many there ever were."""

    def of(self, span_ids: Collection[int], since: int = 0) -> Mapping[int, tuple[DeviceInterval, ...]]:
        """Those that came after the first `since`, by the id of their span."""


class DeviceTimes:
    """Joins spans with their device times. Used by one thread.

    `untimed` counts the spans that were sent before it was known whether they have any.
    """

    def __init__(self, intervals: Callable[[], Intervals]) -> None:
        self._intervals = intervals
        self._known: deque[tuple[int, int]] = deque(maxlen=INTERVALS_KNOWN)
        self.untimed = 0

    def look(self) -> None:
        """Note how many intervals there are by now. At each look, before what is settled is asked for."""
        known = self._intervals().count
        if not self._known or self._known[-1][1] != known:
            self._known.append((time.monotonic_ns(), known))

    def join(self, spans: Sequence[Span], settled_ns: int) -> None:
        """Give spans their intervals, which are all there of those that had ended by `settled_ns`.

        Of many at once: each time goes through all intervals since the first of these spans began.
        """
        asking = {span.span_id: span for span in spans if span.site.device}
        if not asking:
            return
        first_ns = min(span.start_ns for span in asking.values())
        since = next((count for at_ns, count in reversed(self._known) if at_ns <= first_ns), 0)
        for span_id, intervals in self._intervals().of(asking, since).items():
            asking[span_id].device = intervals
        self.untimed += sum(not span.device and span.end_ns > settled_ns for span in asking.values())
