"""A glance at a recording in memory: whether anything was recorded, for a process that does without numpy."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

from instrument.recording import memory_layout as layout

MOST_SLOTS = 1 << 15
"""Slots of a part that are looked at."""


def holds_anything(fd: int) -> bool:
    """Return True if any span has begun in this generation. False for what is no recording."""
    try:
        head = os.pread(fd, layout.HEADER.size, 0)
        if head[:8] != layout.MAGIC or _number(head, layout.HEADER, "version") != layout.VERSION:
            return False
        inner = _number(head, layout.HEADER, "object_bytes")
        if inner > layout.STRIDES["rings"] - layout.RING.size:
            return False
        has_rows = any(_number(ring, layout.RING, "head", inner) for _, ring in _rings_of_now(fd, head, inner))
        return has_rows or _has_open_frame(fd, head, inner)
    except (OSError, struct.error, OverflowError):
        return False


def has_open_span(fd: int) -> bool:
    """Return True where a span is open, or where the recording cannot be read."""
    try:
        head = os.pread(fd, layout.HEADER.size, 0)
        return _has_open_frame(fd, head, _number(head, layout.HEADER, "object_bytes"))
    except (OSError, struct.error, OverflowError):
        return True


def _rings_of_now(fd: int, head: bytes, inner: int) -> Iterator[tuple[int, bytes]]:
    """The rings of the generation of now, each with its address in the process."""
    generation, address = (_number(head, layout.HEADER, name) for name in ("generation", "address"))
    part, rings = _slots(fd, head, "rings")
    for slot, ring in enumerate(rings):
        number, of = (_number(ring, layout.RING, name, inner) for name in ("number", "generation"))
        if number and of == generation:
            yield address + part.offset + slot * part.stride, ring


def _has_open_frame(fd: int, head: bytes, inner: int) -> bool:
    own = dict(_rings_of_now(fd, head, inner))
    open_ids = {
        _number(frame, layout.FRAME, "span_id")
        for frame in _slots(fd, head, "frames")[1]
        if _number(frame, layout.FRAME, "state") and _number(frame, layout.FRAME, "ring") in own
    }
    ended_ids = {_newest_id(fd, head, ring, inner) for ring in own.values()}  # it may not have forgotten its frame
    return any(0 < span_id < 1 << 63 for span_id in open_ids - ended_ids)


def _newest_id(fd: int, head: bytes, ring: bytes, inner: int) -> int:
    """The span of the newest row of a ring, 0 for none."""
    rows, mask, count = (_number(ring, layout.RING, name, inner) for name in ("rows", "mask", "head"))
    at = rows - _number(head, layout.HEADER, "address") + ((count - 1) & mask) * layout.STRIDES["rows"]
    return int.from_bytes(os.pread(fd, 8, at), "little") if count else 0


def rows_held(fd: int) -> int:
    """Return about the number of spans in the rings of a recording; 0 for what is no recording."""
    try:
        head = os.pread(fd, layout.HEADER.size, 0)
        generation, inner = (_number(head, layout.HEADER, name) for name in ("generation", "object_bytes"))
        return sum(
            min(_number(ring, layout.RING, "head", inner), _number(ring, layout.RING, "capacity", inner))
            for ring in _slots(fd, head, "rings")[1]
            if _number(ring, layout.RING, "generation", inner) == generation
        )
    except (OSError, struct.error, OverflowError):
        return 0


def _slots(fd: int, head: bytes, name: str) -> tuple[layout.Part, Iterator[bytes]]:
    """A part, and its slots that were ever taken."""
    at = layout.HEADER.fields["parts"][0] + layout.PARTS.index(name) * layout.PART.size
    part = layout.Part(*struct.unpack_from("<5Q", head, at))._replace(stride=layout.STRIDES[name])
    data = os.pread(fd, min(part.used, MOST_SLOTS) * part.stride, part.offset)
    return part, (data[at : at + part.stride] for at in range(0, len(data) - part.stride + 1, part.stride))


def _number(data: bytes, record: layout.Record, name: str, at: int = 0) -> int:
    offset, code = record.fields[name]
    (found,) = struct.unpack_from(f"<{code}", data, at + offset)
    return int(found)
