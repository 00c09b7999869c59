"""What has been counted and told of a recording's metrics: written into it by who exports it, for the next one.

It lies before what `instrument.recording.export_place` has, twice by turns as that does, as JSON that is compressed:
totals of requests by status, which the tally does not know, what a collector was told, and up to which rows that is.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from instrument.recording import memory_layout as layout
from instrument.recording.export_place import ExportPlace
from instrument.runtime.cheap_start import dataclass

LARGEST_BYTES = 16 << 20
"""No state is longer before it is compressed."""

DAMAGED = (TypeError, ValueError, KeyError, AttributeError, OverflowError)
"""What who goes on with a state raises where it is none."""

_HEAD = struct.Struct("<QQQQQ")
_SLOT_BYTES = layout.METER_BYTES // 2


@dataclass(frozen=True, slots=True)
class MeterState:
    """How far the metrics of a generation of a recording have come.

    `meter` is what was counted, of the rows up to `places`, and `told` what a collector knows of it. What was counted
    before `settled_ns`, on the monotonic clock, has been told or given up.
    """

    generation: int
    settled_ns: int
    meter: Mapping[str, Any]
    told: Mapping[str, Any]
    places: Mapping[int, int]


def read_meter(place: ExportPlace) -> MeterState | None:
    """What was written last; None where nobody has written any, or what stands there is damaged."""
    newest, found = 0, None
    at = _begin_of(place)
    for turn in (0, 1) if at else ():
        number, state = _read(place, at + turn * _SLOT_BYTES)
        if number > newest:
            newest, found = number, state
    return found


class MeterPlace:
    """Where who exports a recording writes what has become of its metrics."""

    def __init__(self, place: ExportPlace) -> None:
        self._place = place
        self._at = _begin_of(place)
        turns = [os.pread(place.fileno(), 8, self._at + turn * _SLOT_BYTES) for turn in (0, 1)] if self._at else []
        self._turn = max((int.from_bytes(turn, "little") for turn in turns), default=0) % (1 << 62)

    def write(self, state: MeterState) -> bool:
        """Write how far they have come, in place of what was written before the last time; whether there is room."""
        body = zlib.compress(_text(state), 1)
        if not self._at or _HEAD.size + len(body) > _SLOT_BYTES:
            return False
        self._turn += 1
        head = _HEAD.pack(self._turn, 0, state.generation, max(state.settled_ns, 0), len(body))
        data = head[:8] + zlib.crc32(head + body).to_bytes(8, "little") + head[16:] + body
        with suppress(OSError):
            os.pwrite(self._place.fileno(), data, self._at + self._turn % 2 * _SLOT_BYTES)
        return True


def _begin_of(place: ExportPlace) -> int:
    """Where it lies, 0 in a recording without room for it."""
    head = os.pread(place.fileno(), layout.HEADER.size, 0)
    if len(head) < layout.HEADER.size:
        return 0
    offset, stride, slots, *_ = struct.unpack_from(
        "<5Q", head, layout.HEADER.fields["parts"][0] + 40 * (len(layout.PARTS) - 1)
    )
    at = os.fstat(place.fileno()).st_size - layout.EXPORT_BYTES - layout.METER_BYTES
    return at if at >= offset + stride * slots else 0


def _text(state: MeterState) -> bytes:
    facts = {
        "meter": state.meter,
        "told": state.told,
        "places": [*state.places.items()],
    }
    return json.dumps(facts, separators=(",", ":")).encode()


def _read(place: ExportPlace, at: int) -> tuple[int, MeterState | None]:
    """What one of the two slots has, and of which turn it is; 0 for what is none."""
    head = os.pread(place.fileno(), _HEAD.size, at)
    if len(head) < _HEAD.size:
        return 0, None
    turn, crc, generation, settled_ns, length = _HEAD.unpack(head)
    if not turn or length > _SLOT_BYTES - _HEAD.size:
        return 0, None
    body = os.pread(place.fileno(), length, at + _HEAD.size)
    if zlib.crc32(head[:8] + bytes(8) + head[16:] + body) != crc:
        return 0, None
    try:
        facts = json.loads(zlib.decompressobj().decompress(body, LARGEST_BYTES))
        places = {int(ring): int(row) for ring, row in facts["places"]}
        meter, told = dict(facts["meter"]), dict(facts["told"])
        return turn, MeterState(generation, settled_ns, meter, told, places)
    except (zlib.error, RecursionError, *DAMAGED):
        return 0, None
