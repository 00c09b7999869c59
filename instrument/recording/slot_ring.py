"""The rings that Python code writes into a recording. They keep the newest device intervals and readings of gauges."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import Any

from instrument.recording import memory_layout as layout
from instrument.recording.memory_layout import GAUGES as CLAIMED
from instrument.recording.memory_layout import MOST_SAMPLES, Claim, RecordingHead, generation_of
from instrument.recording.spans import Sample
from instrument.runtime.cheap_start import NamedTuple

_U64 = Struct("<Q")


class SlotRoom(NamedTuple):
    """The memory of one part of a recording, with the recording's header and the number of the part's slots."""

    head: memoryview
    name: str
    part: memoryview
    slots: int

    @classmethod
    def from_part(cls, memory: memoryview, name: str) -> SlotRoom:
        part = layout.Part(*layout.PART.packer().unpack_from(memory, layout.part_header_offset(name)))
        return cls(memory, name, memory[part.offset : part.offset + part.slots * part.stride], part.slots)

    def count_used(self) -> int:
        """Return how many slots have been written, by any process."""
        return int(_U64.unpack_from(self.head, self.offset_of_used())[0])

    def offset_of_used(self) -> int:
        """Return the offset of the field in the header that counts the part's written slots."""
        return layout.part_header_offset(self.name) + layout.PART.fields["used"][0]

    def add_all(self, cells: Struct, records: Iterable[Sequence[Any]], slots: int) -> None:
        """Add records to a ring of `slots`, which loses its oldest records."""
        used, used_at = self.count_used(), self.offset_of_used()
        for values in records:
            cells.pack_into(self.part, used % slots * cells.size, *values)
            used += 1
            _U64.pack_into(self.head, used_at, used)  # after each, for a reader expects at most one half-written slot


FindRoom = Callable[[], "SlotRoom | None"]
"""A function that returns the memory of a part in the current recording, None before the first recording."""


# Device intervals


LABELS = ("exclusive", "overlapped", "launch-bound", "captured", "stale", "dropped")
"""The labels of a device interval, which say how far its time can be trusted.

- `exclusive`: no other timed interval ran on the device meanwhile.
- `overlapped`: another stream had one, and each may have slowed the other.
- `launch-bound`: the stream was idle when the span ended, or the events took much of the interval. Its length is the
  time of the launch.
- `stale`: its length is exact, its position is not.
- `captured`: without a length, because the stream was being captured into a graph.
- `dropped`: without a length, because no event was available.
"""

_NUMBERS = {label: number for number, label in enumerate(LABELS)}

_CELLS = layout.INTERVAL.packer()

NOTHING_TO_COME = 1 << 62
"""The value of `settled_ns` in a recording's header once the recording gets no more device intervals."""


class IntervalRing:
    """A ring of the device intervals of spans, in a recording. One thread at a time writes it. `find_room` returns its
    memory."""

    def __init__(self, memory_bytes: int, find_room: FindRoom) -> None:
        self._most_slots = max(memory_bytes // _CELLS.size, 64)
        self._find_room = find_room

    def add_all(self, intervals: Iterable[tuple[int, int, int, int, int, str, int]]) -> None:
        """Add intervals, each with the id of its span, device, stream, begin, end, label and uncertainty."""
        if (room := self._find_room()) is not None:
            slots = min(self._most_slots, room.slots)
            layout.HEADER.write(room.head, interval_slots=slots)
            cells = [(*place, _NUMBERS[label], uncertainty_ns) for *place, label, uncertainty_ns in intervals]
            room.add_all(_CELLS, cells, slots)

    def publish_settled(self, until_ns: int) -> None:
        """Publish the time up to which ended spans have all their intervals."""
        if (room := self._find_room()) is not None:
            layout.HEADER.write(room.head, settled_ns=until_ns)

    @property
    def overwritten(self) -> int:
        room = self._find_room()
        return 0 if room is None else max(room.count_used() - min(self._most_slots, room.slots), 0)


# Readings of gauges


_SAMPLE = layout.SAMPLE.packer()


def _cells_of(sample: Sample) -> tuple[int, int, bool, float, bytes]:
    return sample.at_ns, sample.device, sample.value is not None, sample.value or 0.0, sample.name.encode()


def add_samples(room: SlotRoom | None, samples: Iterable[Sample]) -> None:
    """Add readings of gauges to a recording. One thread at a time may add."""
    if room is not None:
        room.add_all(_SAMPLE, map(_cells_of, samples), room.slots)


class GaugePlace(Claim):
    """The ring of gauge readings in another process's recording, for its current session.

    Only the process that has the claim may read the gauges. Raises `OSError`.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd, CLAIMED)
        self._generation = generation_of(fd)

    def add(self, samples: Iterable[Sample]) -> bool:
        """Add readings. Return False if the other process has begun another session."""
        fd = self.fileno()
        try:
            head = RecordingHead(fd)
            part = head.find_part("samples")
        except OSError:
            return False
        end = part.offset + part.slots * part.stride
        if head.generation != self._generation or not 0 < part.slots <= MOST_SAMPLES or end > os.fstat(fd).st_size:
            return False
        used = part.used
        for sample in samples:
            os.pwrite(fd, _SAMPLE.pack(*_cells_of(sample)), part.offset + used % part.slots * part.stride)
            used += 1
        os.pwrite(fd, _U64.pack(used), layout.part_header_offset("samples") + layout.PART.fields["used"][0])
        return True
