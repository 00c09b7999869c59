"""A glance at a recording in memory: whether anything was recorded, for a process that does without numpy."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

from instrument.recording import memory_layout as layout

MOST_SLOTS = 1 << 15
"""So many of a part are looked at."""


def holds_anything(fd: int) -> bool:
    """Whether any span has begun in the generation of now. False for what is no recording."""
    try:
        head = os.pread(fd, layout.HEADER.size, 0)
        if head[:8] != layout.MAGIC or _number(head, layout.HEADER, "version") != layout.VERSION:
            return False
        generation, inner = (_number(head, layout.HEADER, name) for name in ("generation", "object_bytes"))
        if inner > layout.STRIDES["rings"] - layout.RING.size:
            return False
        part, rings = _slots(fd, head, "rings")
        own = set()
        for slot, ring in enumerate(rings):
            number, of = (_number(ring, layout.RING, name, inner) for name in ("number", "generation"))
            if number and of == generation:
                if _number(ring, layout.RING, "head", inner) or _number(ring, layout.RING, "folded", inner):
                    return True
                own.add(_number(head, layout.HEADER, "address") + part.offset + slot * part.stride)
        return any(
            _number(frame, layout.FRAME, "state") and _number(frame, layout.FRAME, "ring") in own
            for frame in _slots(fd, head, "frames")[1]
        )
    except (OSError, struct.error, OverflowError):
        return False


def rows_held(fd: int) -> int:
    """How many spans the rings of a recording hold, about; 0 for what is no recording."""
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
