"""The state of a recording's metrics, which its exporter writes into it so that the next exporter can continue.

Its place is before that of `instrument.recording.export_place`. It has two copies, written in turns, of compressed
JSON: totals of requests by status, which the tally does not have, the points sent, and the next row of each ring.
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
from instrument.recording.export_place import ExportCheckpoint
from instrument.runtime.cheap_start import dataclass

LARGEST_BYTES = 16 << 20
"""The largest size of a state before compression."""

DAMAGED = (TypeError, ValueError, KeyError, AttributeError, OverflowError)
"""The errors of reading a damaged state."""

_HEAD = struct.Struct("<QQQQQ")
_SLOT_BYTES = layout.METER_BYTES // 2


@dataclass(frozen=True, slots=True)
class MeterState:
    """The state of the metrics of one generation of a recording.

    `meter` has the counts of the rows before `places`, and `told` those that a collector has. All that was counted
    before `settled_ns`, on the monotonic clock, has been sent or given up.
    """

    generation: int
    settled_ns: int
    meter: Mapping[str, Any]
    told: Mapping[str, Any]
    places: Mapping[int, int]


def read_meter(place: ExportCheckpoint) -> MeterState | None:
    """Return the last written state; None if there is none, or both copies are damaged."""
    newest, newest_state = 0, None
    at = _begin_of(place)
    for turn in (0, 1) if at else ():
        number, state = _read(place, at + turn * _SLOT_BYTES)
        if number > newest:
            newest, newest_state = number, state
    return newest_state


class MeterPlace:
    """The writer of the metrics' state of a recording."""

    def __init__(self, place: ExportCheckpoint) -> None:
        self._place = place
        self._at = _begin_of(place)
        turns = [os.pread(place.fileno(), 8, self._at + turn * _SLOT_BYTES) for turn in (0, 1)] if self._at else []
        self._turn = max((int.from_bytes(turn, "little") for turn in turns), default=0) % (1 << 62)

    def write(self, state: MeterState) -> bool:
        """Write the state over the older of the two copies. Return False if it does not fit."""
        body = zlib.compress(_text(state), 1)
        if not self._at or _HEAD.size + len(body) > _SLOT_BYTES:
            return False
        self._turn += 1
        head = _HEAD.pack(self._turn, 0, state.generation, max(state.settled_ns, 0), len(body))
        data = head[:8] + zlib.crc32(head + body).to_bytes(8, "little") + head[16:] + body
        with suppress(OSError):
            os.pwrite(self._place.fileno(), data, self._at + self._turn % 2 * _SLOT_BYTES)
        return True


def _begin_of(place: ExportCheckpoint) -> int:
    """Return the offset of the state, 0 in a recording without room for it."""
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


def _read(place: ExportCheckpoint, at: int) -> tuple[int, MeterState | None]:
    """Return the turn and the state of one of the two copies; turn 0 for a damaged or missing one."""
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
        meter, sent = dict(facts["meter"]), dict(facts["told"])
        return turn, MeterState(generation, settled_ns, meter, sent, places)
    except (zlib.error, RecursionError, *DAMAGED):
        return 0, None
