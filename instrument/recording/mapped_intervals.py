"""The device intervals of another process's recording, as those of the process itself are found."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from instrument.recording.interval_ring import intervals_by_span
from instrument.recording.mapped import Mapped
from instrument.recording.spans import DeviceInterval


class MappedIntervals:
    """Those that a recording holds now."""

    def __init__(self, mapped: Mapped) -> None:
        self._mapped = mapped

    @property
    def count(self) -> int:
        """How many there ever were."""
        return self._mapped.interval_count()

    def of(self, span_ids: Collection[int], since: int = 0) -> dict[int, tuple[DeviceInterval, ...]]:
        """Those that are still here and came after the first `since`, by the id of their span, each span's by time."""
        found = self._mapped.intervals(since)
        wanted = found[np.isin(found["span_id"], np.fromiter(span_ids, np.uint64, len(span_ids)))]
        return intervals_by_span(wanted.tolist(), span_ids)
