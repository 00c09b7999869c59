"""The current header and rings of a recording, for readers without numpy."""

from __future__ import annotations

import errno
import os
import struct

from instrument.recording import memory_layout as layout
from instrument.runtime.cheap_start import NamedTuple

MOST_SLOTS = 1 << 15
"""The most slots that are read of a part."""


class RingHead(NamedTuple):
    """A ring of the current generation: its number, its thread, and the address of its object in the process.

    `head` counts all rows ever written, `rows` is the address of its rows in the process.
    """

    number: int
    thread_id: int
    address: int
    rows: int
    mask: int
    capacity: int
    head: int


class RecordingHead:
    """The header of a recording in a file, read once. Raises `OSError` for a file that is no recording."""

    def __init__(self, fd: int) -> None:
        self._fd, self._data = fd, os.pread(fd, layout.HEADER.size, 0)
        if len(self._data) < layout.HEADER.size or self._data[:8] != layout.MAGIC:
            raise OSError(errno.EINVAL, "no recording")
        if self.number("version") != layout.VERSION:
            raise OSError(errno.EINVAL, "a recording of another layout")

    def number(self, name: str) -> int:
        """Return a number of the header."""
        return _number(self._data, layout.HEADER, name)

    @property
    def generation(self) -> int:
        """The generation of the recording: a new one begins with each session."""
        return self.number("generation")

    def part(self, name: str) -> layout.Part:
        """Return a part. Raises `OSError` if it is invalid."""
        part = layout.Part(*struct.unpack_from("<5Q", self._data, layout.part_at(name)))
        if part.stride != layout.STRIDES[name] or part.offset + part.slots * part.stride > 1 << 62:
            raise OSError(errno.EINVAL, f"the part {name} is damaged")
        return part

    def slots(self, name: str) -> list[bytes]:
        """Return the slots of a part that were ever in use."""
        part = self.part(name)
        data = os.pread(self._fd, min(part.used, part.slots, MOST_SLOTS) * part.stride, part.offset)
        return [data[at : at + part.stride] for at in range(0, len(data) - part.stride + 1, part.stride)]

    def rings(self) -> list[RingHead]:
        """Return the rings of the current generation."""
        before, rings = self.number("object_bytes"), []
        first = self.number("address") + self.part("rings").offset
        for slot, data in enumerate(self.slots("rings")):
            ring = data[before:]
            if len(ring) < layout.RING.size:
                raise OSError(errno.EINVAL, "the rings are damaged")
            if _number(ring, layout.RING, "number") and _number(ring, layout.RING, "generation") == self.generation:
                number, thread_id, *more = (
                    _number(ring, layout.RING, name)
                    for name in ("number", "thread_id", "rows", "mask", "capacity", "head")
                )
                rings.append(RingHead(number, thread_id, first + slot * layout.STRIDES["rings"], *more))
        return rings

    def rows_kept(self) -> int:
        """Return the approximate number of spans in the rings."""
        return sum(min(ring.head, ring.capacity) for ring in self.rings())

    def has_open_span(self) -> bool:
        """Return True if a span is open."""
        rings = {ring.address: ring for ring in self.rings()}
        open_ids = {
            _number(frame, layout.FRAME, "span_id")
            for frame in self.slots("frames")
            if _number(frame, layout.FRAME, "state") and _number(frame, layout.FRAME, "ring") in rings
        }
        ended_ids = {self._newest_id(ring) for ring in rings.values()}  # it may not have forgotten its frame
        return any(0 < span_id < 1 << 63 for span_id in open_ids - ended_ids)

    def _newest_id(self, ring: RingHead) -> int:
        """Return the span id of the newest row of a ring, 0 for none."""
        at = ring.rows - self.number("address") + ((ring.head - 1) & ring.mask) * layout.STRIDES["rows"]
        return int.from_bytes(os.pread(self._fd, 8, at), "little") if ring.head and 0 < at < 1 << 62 else 0


def _number(data: bytes, record: layout.Record, name: str) -> int:
    offset, code = record.fields[name]
    return int(struct.unpack_from(f"<{code}", data, offset)[0])


def generation_of(fd: int) -> int:
    """Return the current generation of a recording, 0 if it cannot be read."""
    try:
        return RecordingHead(fd).generation
    except OSError:
        return 0
