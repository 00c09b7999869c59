"""The newest readings of gauges of a process, for those who read its recording once it has gone."""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct

from instrument.recording.memory_layout import SAMPLES
from instrument.recording.slot_ring import FindRoom, SlotRing
from instrument.recording.spans import Sample

_CELLS = Struct("<qiId40s")


class Readings:
    """A ring of readings; written by the thread that reads the gauges."""

    def __init__(self, find_room: FindRoom) -> None:
        self._slots = SlotRing(_CELLS, SAMPLES, find_room)

    def add(self, samples: Iterable[Sample]) -> None:
        """Keep some, in place of the oldest if need be."""
        for sample in samples:
            value = sample.value
            self._slots.add(sample.at_ns, sample.device, value is not None, value or 0.0, sample.name.encode())
