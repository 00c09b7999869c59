"""Rings of slots that Python writes: the newest records of one kind, in a recording or in local memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import Any

from instrument.recording import memory_layout as layout
from instrument.recording.memory_layout import GAUGES as CLAIMED
from instrument.recording.memory_layout import SAMPLES, Claim, RecordingHead, generation_of
from instrument.recording.spans import GAUGES, Sample
from instrument.runtime.cheap_start import NamedTuple
from instrument.runtime.unpatched import Lock

_U64 = Struct("<Q")


class SlotRoom(NamedTuple):
    """The memory of a part that Python writes: the recording's header, the part's name, and the part."""

    head: memoryview
    name: str
    part: memoryview

    @classmethod
    def of(cls, memory: memoryview, name: str) -> SlotRoom:
        """Return the memory of a part in a recording's memory."""
        part = layout.Part(*layout.PART.packer().unpack_from(memory, layout.part_at(name)))
        return cls(memory, name, memory[part.offset : part.offset + part.slots * part.stride])

    def used(self) -> int:
        """Return the number of slots ever written, by any writer."""
        return int(_U64.unpack_from(self.head, self.used_at())[0])

    def used_at(self) -> int:
        """Return the offset of the part's `used` in the header."""
        return layout.part_at(self.name) + layout.PART.fields["used"][0]

    def put(self, field: str, value: int) -> None:
        """Set a number of the header."""
        _U64.pack_into(self.head, layout.HEADER.fields[field][0], value)


FindRoom = Callable[[], "SlotRoom | None"]
"""A function that returns the memory for a ring's slots, None if no other process can read the recording."""


class SlotRing:
    """A ring of slots.

    One thread at a time writes, any thread of the process reads. Its memory is found at the first slot, so a forked
    child writes into its own recording. Another process reads the slots up to `used`, which is set after a slot is
    complete.
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
        """Add several slots, in less time than one by one."""
        with self._lock:
            memory = self._memory
            if memory is None:
                memory = self._found()
            pack_into, size, capacity = self._cells.pack_into, self._cells.size, self.capacity
            head, used_at = (None, 0) if self._room is None else (self._room.head, self._used_at)
            for values in slots:
                pack_into(memory, self.count % capacity * size, *values)
                self.count += 1
                if head is not None:  # after each, for a reader expects at most one half-written slot
                    _U64.pack_into(head, used_at, self.count)

    def put(self, field: str, value: int) -> None:
        """Set a field of the recording's header, if the slots are in a recording."""
        with self._lock:
            if self._memory is None:
                self._found()
            if self._room is not None:
                self._room.put(field, value)

    def _found(self) -> memoryview | bytearray:
        self._room = self._find_room() if self._find_room is not None else None
        if self._room is None:
            self._memory = memory = bytearray(self.capacity * self._cells.size)
            return memory
        self._used_at = self._room.used_at()
        self.capacity = min(self.capacity, len(self._room.part) // self._cells.size)
        if self._capacity_name:
            self._room.put(self._capacity_name, self.capacity)
        self._memory = part = self._room.part
        return part

    def follow(self) -> None:
        """Continue after the slots that another process has written meanwhile."""
        with self._lock:
            if self._memory is None and self._find_room is not None and self._find_room() is not None:
                self._found()
            if self._room is not None:
                self.count = self._room.used()

    @property
    def overwritten(self) -> int:
        """Return the number of slots that newer ones have overwritten."""
        return max(self.count - self.capacity, 0)

    def since(self, number: int) -> bytes:
        """Return the remaining slots after the first `number` ones, the oldest first."""
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
"""The labels of an interval.

`exclusive`: no other timed interval ran on the device meanwhile. `overlapped`: another one ran on another stream, and
each may have slowed the other. `launch-bound`: the stream was idle when the span ended, or the events took much of the
interval, so its length is the time of the launch. `stale`: its length is exact, its position is not. `captured` and
`dropped` were not timed and have no length: the stream was being captured into a graph, or no event was available.
"""

_NUMBERS = {label: number for number, label in enumerate(LABELS)}

_CELLS = Struct("<QqQqqqq")

INTERVAL_BYTES = _CELLS.size

NOTHING_TO_COME = 1 << 62
"""The settled time of a recording that will get no more intervals."""


class IntervalRing:
    """A ring of intervals by span. One thread writes it, any thread reads it.

    `find_room` returns its memory, which other processes can read. Without `find_room`, its memory is private.
    """

    def __init__(self, memory_bytes: int, find_room: FindRoom | None = None) -> None:
        self._slots = SlotRing(_CELLS, max(memory_bytes // INTERVAL_BYTES, 64), find_room, "interval_slots")

    @property
    def count(self) -> int:
        """Return the number of all intervals ever written."""
        return self._slots.count

    @property
    def overwritten(self) -> int:
        """Return the number of slots that newer ones have overwritten."""
        return self._slots.overwritten

    def add(
        self, span_id: int, device: int, stream: int, start_ns: int, end_ns: int, label: str, uncertainty_ns: int = 0
    ) -> None:
        """Add one interval. A full ring loses its oldest one."""
        self._slots.add(span_id, device, stream, start_ns, end_ns, _NUMBERS[label], uncertainty_ns)

    def add_all(self, intervals: Sequence[tuple[int, int, int, int, int, str, int]]) -> None:
        """Add several intervals, each with the arguments of `add`."""
        self._slots.add_all([(*place, _NUMBERS[label], uncertainty_ns) for *place, label, uncertainty_ns in intervals])

    def publish_settled(self, until_ns: int) -> None:
        """Publish the time up to which the intervals of ended spans are complete."""
        self._slots.put("settled_ns", until_ns)

    def packed(self) -> bytes:
        """Return all intervals as bytes, the oldest first. A label is its index in `LABELS`."""
        return self._slots.since(0)


# Readings of gauges


_SAMPLE = Struct("<qiId40s")

FEW_SAMPLES = 4096
"""The number of newest readings that a search copies first: three minutes with one GPU."""


def value_of(name: str, value: float, is_reported: Any) -> float | None:
    """Return a value in its gauge's type: an int for bytes, and None for a value that the device does not report."""
    if not is_reported:
        return None
    return int(value) if GAUGES[name].unit == "bytes" else float(value)


def _cells_of(sample: Sample) -> tuple[int, int, bool, float, bytes]:
    return sample.at_ns, sample.device, sample.value is not None, sample.value or 0.0, sample.name.encode()


class Readings:
    """A ring of a process's readings, written by the process itself. Any thread may read; one thread at a time adds."""

    def __init__(self, find_room: FindRoom | None = None) -> None:
        self._slots = SlotRing(_SAMPLE, SAMPLES, find_room)

    def add(self, samples: Iterable[Sample]) -> None:
        """Add readings. A full ring loses its oldest ones."""
        self._slots.follow()
        for sample in samples:
            self._slots.add(*_cells_of(sample))

    def samples(self, first_ns: int, last_ns: int) -> list[Sample]:
        """Return the newest readings from `first_ns` to before `last_ns`, by time, device and name."""
        self._slots.follow()
        cells = self._samples_since(max(self._slots.count - FEW_SAMPLES, 0))
        if not cells or min(cells)[0] >= first_ns:
            cells = self._samples_since(0)
        samples = [
            Sample(text, device, at_ns, value_of(text, value, is_reported))
            for at_ns, device, is_reported, value, name in cells
            if first_ns <= at_ns < last_ns
            and (text := name.rstrip(b"\0").decode("ascii", "replace")) in GAUGES
            and math.isfinite(value)
        ]
        return sorted(samples, key=lambda sample: (sample.at_ns, sample.device, sample.name))

    def _samples_since(self, number: int) -> list[tuple[int, int, int, float, bytes]]:
        """Return the readings after the first `number`, without those that were overwritten meanwhile."""
        first = max(number, self._slots.overwritten)
        data = self._slots.since(number)
        self._slots.follow()
        cells: list[tuple[int, int, int, float, bytes]] = list(_SAMPLE.iter_unpack(data))
        return cells[max(self._slots.overwritten - first, 0) :]

    @property
    def overwritten(self) -> int:
        """Return the number of slots that newer ones have overwritten."""
        self._slots.follow()
        return self._slots.overwritten


class GaugePlace(Claim):
    """The ring of another process's readings, in its current session.

    Raises `OSError`. Only the process with the claim reads the gauges.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd, CLAIMED)
        self._generation = generation_of(fd)

    def add(self, samples: Iterable[Sample]) -> bool:
        """Add readings. A full ring loses its oldest ones. Return False if another session has begun there."""
        fd = self.fileno()
        try:
            head = RecordingHead(fd)
            part = head.part("samples")
        except OSError:
            return False
        end = part.offset + part.slots * part.stride
        if head.generation != self._generation or not 0 < part.slots <= SAMPLES or end > os.fstat(fd).st_size:
            return False
        used = part.used
        for sample in samples:
            os.pwrite(fd, _SAMPLE.pack(*_cells_of(sample)), part.offset + used % part.slots * part.stride)
            used += 1
        os.pwrite(fd, _U64.pack(used), layout.part_at("samples") + layout.PART.fields["used"][0])
        return True
