"""Rings of slots that Python writes: the newest records of one size, in a part of the recording or in own memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import Any, NamedTuple

from instrument.recording import memory_layout as layout
from instrument.runtime.unpatched import Lock

_U64 = Struct("<Q")


class SlotRoom(NamedTuple):
    """Where a part of a recording lies, to be written: the recording's header, the part's name, and the part."""

    head: memoryview
    name: str
    part: memoryview

    def used(self) -> int:
        """How many slots were ever written, whoever did so."""
        return int(_U64.unpack_from(self.head, self.used_at())[0])

    def used_at(self) -> int:
        """Where the header says so."""
        part_at = layout.HEADER.fields["parts"][0] + layout.PARTS.index(self.name) * layout.PART.size
        return int(part_at + layout.PART.fields["used"][0])

    def put(self, field: str, value: int) -> None:
        """Set a number of the header."""
        _U64.pack_into(self.head, layout.HEADER.fields[field][0], value)


FindRoom = Callable[[], "SlotRoom | None"]
"""Finds where slots are to lie; None where nobody else can read what is recorded."""


class SlotRing:
    """The newest slots; written by one thread at a time, read by any thread of the process.

    Where they lie is asked when the first one comes: in a forked child that is the child's own recording. Another
    process reads them up to `used`, which is set when a slot is whole.
    """

    def __init__(self, cells: Struct, slots: int, find_room: FindRoom | None = None, told_by: str = "") -> None:
        self._cells = cells
        self.capacity = slots
        self._find_room = find_room
        self._told_by = told_by
        self._room: SlotRoom | None = None
        self._used_at = 0
        self._memory: memoryview | bytearray | None = None
        self._lock = Lock()
        self.count = 0

    def add(self, *values: Any) -> None:
        """Keep one, in place of the oldest if need be."""
        self.add_all((values,))

    def add_all(self, slots: Iterable[Sequence[Any]]) -> None:
        """Keep some at once, which takes less than one by one."""
        with self._lock:
            memory = self._memory
            if memory is None:
                memory = self._found()
            pack_into, size, capacity = self._cells.pack_into, self._cells.size, self.capacity
            head, used_at = (None, 0) if self._room is None else (self._room.head, self._used_at)
            for values in slots:
                pack_into(memory, self.count % capacity * size, *values)
                self.count += 1
                if head is not None:  # after each, for a reader takes no more than one for half written
                    _U64.pack_into(head, used_at, self.count)

    def put(self, field: str, value: int) -> None:
        """Set a number of the recording's header, where the slots lie in one."""
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
        if self._told_by:
            self._room.put(self._told_by, self.capacity)
        self._memory = part = self._room.part
        return part

    def follow(self) -> None:
        """Go on behind what another process has written meanwhile."""
        with self._lock:
            if self._memory is None and self._find_room is not None and self._find_room() is not None:
                self._found()
            if self._room is not None:
                self.count = self._room.used()

    @property
    def overwritten(self) -> int:
        """How many newer ones have taken the place of."""
        return max(self.count - self.capacity, 0)

    def since(self, number: int) -> bytes:
        """Those that are still here and came after the first so many, the oldest first."""
        with self._lock:
            size, memory = self._cells.size, self._memory
            first, last = max(number, self.count - self.capacity), self.count
            if first >= last or memory is None:
                return b""
            begin, end = (number % self.capacity * size for number in (first, last))
            if begin < end:
                return bytes(memory[begin:end])
            return bytes(memory[begin : self.capacity * size]) + bytes(memory[:end])
