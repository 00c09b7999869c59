"""Device times of spans on their way to a collector: whoever sends them has waited for these, but not for ever."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from instrument.recording.spans import DeviceInterval
from instrument.trace.columns import Columns
from instrument.trace.trace import device_columns

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
    """Joins rows with their device times. Used by one thread.

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

    def join(self, trace: Columns, settled_ns: int) -> Columns:
        """Return the rows with their intervals, which are all there of those that had ended by `settled_ns`.

        Of many at once: each time goes through all intervals since the first of these rows began.
        """
        asking = np.flatnonzero(trace.of_sites([bool(site.device) for site in trace.sites]))
        if not len(asking):
            return trace
        first_ns = int(trace.start_ns[asking].min())
        since = next((count for at_ns, count in reversed(self._known) if at_ns <= first_ns), 0)
        row_of = dict(zip(trace.span_id[asking].tolist(), asking.tolist(), strict=True))
        found = sorted((row_of[span_id], its) for span_id, its in self._intervals().of(row_of.keys(), since).items())
        timed = np.array([row for row, its in found if its], np.int64)
        self.untimed += int(np.count_nonzero(trace.end_ns[np.setdiff1d(asking, timed)] > settled_ns))
        return replace(trace, device=device_columns(found)) if len(timed) else trace
