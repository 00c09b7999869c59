"""A glance at a recording in memory: whether anything was recorded, for a process that does without numpy."""

from __future__ import annotations

import os
import struct

from instrument.recording import memory_layout as layout


def holds_anything(fd: int) -> bool:
    """Whether any thread has begun a span in the generation of now. False for what is no recording."""
    try:
        head = os.pread(fd, layout.HEADER.size, 0)
        if head[:8] != layout.MAGIC or _number(head, layout.HEADER, "version") != layout.VERSION:
            return False
        generation = _number(head, layout.HEADER, "generation")
        at = layout.HEADER.fields["parts"][0] + layout.PARTS.index("rings") * layout.PART.size
        part = layout.Part(*struct.unpack_from("<5Q", head, at))
        object_bytes = _number(head, layout.HEADER, "object_bytes")
        stride = layout.STRIDES["rings"]
        rings = os.pread(fd, min(part.used, layout.SMALL_RINGS) * stride, part.offset)
    except (OSError, struct.error, OverflowError):
        return False
    if object_bytes > stride - layout.RING.size:
        return False
    return any(
        _number(rings, layout.RING, "generation", at) == generation and _number(rings, layout.RING, "number", at)
        for at in range(object_bytes, len(rings) - stride + object_bytes + 1, stride)
    )


def _number(data: bytes, record: layout.Record, name: str, at: int = 0) -> int:
    offset, code = record.fields[name]
    (found,) = struct.unpack_from(f"<{code}", data, at + offset)
    return int(found)
