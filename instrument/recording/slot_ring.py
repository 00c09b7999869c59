"""The rings that Python code writes into a recording. They keep the newest device intervals and readings of gauges."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import Any

from instrument.recording import memory_layout as layout
from instrument.recording.memory_layout import GAUGES as CLAIMED
from instrument.recording.memory_layout import MOST_SAMPLES, Claim, RecordingHead, generation_of
from instrument.recording.metric_definitions import GAUGES
from instrument.recording.spans import Sample
from instrument.runtime.cheap_start import NamedTuple
from instrument.runtime.unpatched import Lock

_U64 = Struct("<Q")


class SlotRoom(NamedTuple):
    """The memory of one part of a recording, with the recording's header."""

    head: memoryview
    name: str
    part: memoryview

    @classmethod
    def from_part(cls, memory: memoryview, name: str) -> SlotRoom:
        part = layout.Part(*layout.PART.packer().unpack_from(memory, layout.part_header_offset(name)))
        return cls(memory, name, memory[part.offset : part.offset + part.slots * part.stride])

    def count_used(self) -> int:
        """Return how many slots have been written, by any process."""
        return int(_U64.unpack_from(self.head, self.offset_of_used())[0])

    def offset_of_used(self) -> int:
        """Return the offset of the field in the header that counts the part's written slots."""
        return layout.part_header_offset(self.name) + layout.PART.fields["used"][0]

    def set_field(self, field: str, value: int) -> None:
        _U64.pack_into(self.head, layout.HEADER.fields[field][0], value)


FindRoom = Callable[[], "SlotRoom | None"]
"""A function that returns the ring's memory in the recording, or None if other processes cannot read the recording."""


class SlotRing:
    """A ring of slots for records of one kind, which loses its oldest slots.

    One thread at a time writes, any thread of the process reads. The memory is looked up when the first slot is
    written, so that a forked child writes into its own recording. Another process reads the slots up to the header's
    `used`, which is set once a slot is complete.
    """

    def __init__(self, cells: Struct, slots: int, find_room: FindRoom | None = None, capacity_name: str = "") -> None:
        self._cells = cells
        self.capacity = slots
        self._find_room = find_room
        self._capacity_name = capacity_name
        self._room: SlotRoom | None = None
        self._used_at = 0
        self._memory: memoryview | bytearray | None = None
        self._lock = Lock()
        self.count = 0

    def add(self, *values: Any) -> None:
        """Add one record. A full ring loses its oldest one."""
        self.add_all((values,))

    def add_all(self, slots: Iterable[Sequence[Any]]) -> None:
        with self._lock:
            memory = self._memory
            if memory is None:
                memory = self._find_memory()
            pack_into, size, capacity = self._cells.pack_into, self._cells.size, self.capacity
            head, used_at = (None, 0) if self._room is None else (self._room.head, self._used_at)
            for values in slots:
                pack_into(memory, self.count % capacity * size, *values)
                self.count += 1
                if head is not None:  # after each, for a reader expects at most one half-written slot
                    _U64.pack_into(head, used_at, self.count)

    def set_field(self, field: str, value: int) -> None:
        """Set a field of the recording's header, if the ring is in a recording."""
        with self._lock:
            if self._memory is None:
                self._find_memory()
            if self._room is not None:
                self._room.set_field(field, value)

    def _find_memory(self) -> memoryview | bytearray:
        self._room = self._find_room() if self._find_room is not None else None
        if self._room is None:
            self._memory = memory = bytearray(self.capacity * self._cells.size)
            return memory
        self._used_at = self._room.offset_of_used()
        self.capacity = min(self.capacity, len(self._room.part) // self._cells.size)
        if self._capacity_name:
            self._room.set_field(self._capacity_name, self.capacity)
        self._memory = part = self._room.part
        return part

    def skip_foreign_slots(self) -> None:
        """Continue after slots that another process has written into the ring."""
        with self._lock:
            if self._memory is None and self._find_room is not None and self._find_room() is not None:
                self._find_memory()
            if self._room is not None:
                self.count = self._room.count_used()

    @property
    def overwritten(self) -> int:
        return max(self.count - self.capacity, 0)

    def slots_since(self, number: int) -> bytes:
        """Return the slots in the ring as bytes, the oldest first, without the first `number` ever written."""
        with self._lock:
            size, memory = self._cells.size, self._memory
            first, last = max(number, self.count - self.capacity), self.count
            if first >= last or memory is None:
                return b""
            begin, end = (number % self.capacity * size for number in (first, last))
            if begin < end:
                return bytes(memory[begin:end])
            return bytes(memory[begin : self.capacity * size]) + bytes(memory[:end])


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

INTERVAL_BYTES = _CELLS.size

NOTHING_TO_COME = 1 << 62
"""The value of `settled_ns` in a recording's header once the recording gets no more device intervals."""


class IntervalRing(SlotRing):
    """A ring of the device intervals of spans. One thread writes it, any thread may read it. `find_room` returns its
    memory in the recording, None for private memory."""

    def __init__(self, memory_bytes: int, find_room: FindRoom | None = None) -> None:
        super().__init__(_CELLS, max(memory_bytes // INTERVAL_BYTES, 64), find_room, "interval_slots")

    def add_all(self, slots: Iterable[Sequence[Any]]) -> None:
        """Add intervals, each with the id of its span, device, stream, begin, end, label and uncertainty."""
        super().add_all([(*place, _NUMBERS[label], uncertainty_ns) for *place, label, uncertainty_ns in slots])

    def publish_settled(self, until_ns: int) -> None:
        """Publish the time up to which ended spans have all their intervals."""
        self.set_field("settled_ns", until_ns)

    def copy_intervals(self) -> bytes:
        """Return all intervals in the ring as bytes, the oldest first. A label is an index in `LABELS`."""
        return self.slots_since(0)


# Readings of gauges


_SAMPLE = layout.SAMPLE.packer()

FEW_SAMPLES = 4096
"""The number of newest readings that are copied first. With one GPU, they cover three minutes, which mostly
suffices."""


def typed_reading(name: str, value: float, is_reported: Any) -> float | None:
    """Return a stored reading as the type of its gauge: an int for bytes, None if the device does not report it."""
    if not is_reported:
        return None
    return int(value) if GAUGES[name].unit == "bytes" else float(value)


def _cells_of(sample: Sample) -> tuple[int, int, bool, float, bytes]:
    return sample.at_ns, sample.device, sample.value is not None, sample.value or 0.0, sample.name.encode()


class Readings:
    """A ring of gauge readings that this process writes. Any thread may read, and one thread at a time may add."""

    def __init__(self, find_room: FindRoom | None = None) -> None:
        self._slots = SlotRing(_SAMPLE, MOST_SAMPLES, find_room)

    def add(self, samples: Iterable[Sample]) -> None:
        self._slots.skip_foreign_slots()
        self._slots.add_all(map(_cells_of, samples))

    def samples(self, first_ns: int, last_ns: int) -> list[Sample]:
        """Return the readings from `first_ns` to before `last_ns`, ordered by time, device and name."""
        self._slots.skip_foreign_slots()
        cells = self._samples_since(max(self._slots.count - FEW_SAMPLES, 0))
        if not cells or min(cells)[0] >= first_ns:
            cells = self._samples_since(0)
        samples = [
            Sample(text, device, at_ns, typed_reading(text, value, is_reported))
            for at_ns, device, is_reported, value, name in cells
            if first_ns <= at_ns < last_ns
            and (text := name.rstrip(b"\0").decode("ascii", "replace")) in GAUGES
            and math.isfinite(value)
        ]
        return sorted(samples, key=lambda sample: (sample.at_ns, sample.device, sample.name))

    def _samples_since(self, number: int) -> list[tuple[int, int, int, float, bytes]]:
        """Return the readings without the first `number` ever written, and without those that were overwritten
        meanwhile."""
        first = max(number, self._slots.overwritten)
        data = self._slots.slots_since(number)
        self._slots.skip_foreign_slots()
        cells: list[tuple[int, int, int, float, bytes]] = list(_SAMPLE.iter_unpack(data))
        return cells[max(self._slots.overwritten - first, 0) :]

    @property
    def overwritten(self) -> int:
        self._slots.skip_foreign_slots()
        return self._slots.overwritten


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
