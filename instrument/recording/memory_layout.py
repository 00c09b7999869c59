"""The layout of a recording in shared memory, for Python.

`native/_recording_layout.h` is the same layout for the native recorder, whose own structures are in the memory. A
recording has a header of one page and parts of equal slots. A released slot is zeroed. Pointers are addresses in the
process: an address less the header's `address` is the offset in the recording. Numbers are little-endian, as on all
machines of the native recorder.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from instrument.runtime.cheap_start import NamedTuple

MAGIC, VERSION = b"instrrec", 9
HEADER_BYTES = 4096
LABEL_BYTES = 64
ALIGNED_BYTES = 64 << 10
"""The alignment of parts: the largest page size of any machine."""
DETAIL_BLOCK_BYTES = 64 << 10
"""The size of a block of details. A record never crosses into the next block."""
CHUNKS = 60
"""The blocks of a histogram, of 64 buckets each."""

NEW, RUNNING, GOODBYE, FORKED, OFF = range(5)
"""The states of a recording: no session has begun, a session records, or the session has ended in order. A forked child
has not begun its own recording, or a session runs with its recording switched off."""

PARTS = (
    "text", "rings", "nodes", "totals", "chunks", "highs", "frames", "attributes", "facts", "details", "intervals",
    "samples", "numbers", "rows",
)  # fmt: skip
"""The parts in order. Each slot of `frames` has a slot of `attributes`. Slots of `text`, `facts` and `details` are
bytes. `details`, `intervals`, `samples` and `numbers` are rings, whose `used` counts all slots ever written."""

OVERWRITTEN = "spans overwritten by newer ones"

REASONS = (
    "scope closed before a scope inside it",
    "span ended outside the context that began it",
    "scope ended twice",
    "time stamp counter no longer used: it differed from the monotonic clock",
    "calls not recorded for lack of memory",
    "calls not counted for lack of memory",
    "errors, attributes or percentiles not kept for lack of memory",
    "calls not recorded for a fault of instrument",
    "calls not recorded because their thread was ending",
    "additions to totals that had reached their largest value",
    "span renamed that is not open",
    "span not renamed to a site of another kind",
    "span annotated that is not open",
    "attributes beyond the limit of a span",
)
"""The losses that the header's `reasons` count, in the same order."""


class Record(NamedTuple):
    """A structure: its size, and the offset and type of each field, in the codes of `struct`."""

    size: int
    fields: Mapping[str, tuple[int, str]]

    def packer(self) -> struct.Struct:
        """Return the packer of a record without gaps between its fields."""
        return struct.Struct("<" + "".join(code for _, code in self.fields.values()))


def _in_order(**types: str) -> Record:
    """Return a record without gaps between its fields."""
    fields, at = {}, 0
    for name, code in types.items():
        fields[name] = at, code
        at += struct.calcsize(f"<{code}")
    return Record(at, fields)


HEADER = _in_order(
    magic="8s", version="I", object_bytes="I", size_bytes="Q", address="Q", pid="I", state="I", start_ticks="Q",
    boot_id="40s", monotonic_ns="q", realtime_ns="q", generation="Q", moving="Q", ended_rows="Q",
    ended_too_short="Q", reasons="32Q", interval_slots="Q", settled_ns="Q",
    parts=f"{5 * len(PARTS)}Q",
)  # fmt: skip
PART = _in_order(offset="Q", stride="Q", slots="Q", used="Q", unseen="Q")
RING = Record(
    224,
    {
        "rows": (0, "Q"), "mask": (8, "Q"), "head": (16, "Q"), "number": (24, "Q"), "capacity": (72, "Q"),
        "too_short": (80, "Q"), "thread_id": (88, "q"), "ended": (104, "B"), "generation": (128, "Q"),
        "label": (136, f"{LABEL_BYTES}s"),
    },
)  # fmt: skip
"""The fields of a ring, after the `object_bytes` of the recorder's object."""
NODE = Record(64, {"site": (0, "Q"), "parent": (8, "Q"), "index": (16, "I"), "is_known": (31, "B")})
TOTALS = Record(
    640,
    {
        "calls": (0, "Q"), "total_ns": (8, "q"), "self_ns": (16, "q"), "min_ns": (24, "q"), "max_ns": (32, "q"),
        "first_ns": (40, "q"), "waiting": (48, "7H"), "waiting_room": (62, "H"), "errors": (64, "Q"),
        "moved_bytes": (72, "Q"), "device_ns": (80, "q"), "beyond_ns": (88, "q"), "first_total_ns": (96, "q"),
        "steps": (104, "Q"), "waiting_ns": (112, "q"), "chunks": (120, f"{CHUNKS}Q"), "ring_number": (600, "Q"),
        "node": (608, "I"), "cancelled": (616, "Q"),
    },
)  # fmt: skip
CHUNK = _in_order(low="64H", high="Q")
HIGH = _in_order(high="64Q")
FRAME = Record(
    128,
    {
        "node": (8, "Q"), "span_id": (16, "Q"), "parent_id": (24, "Q"), "root_id": (32, "Q"), "start_ns": (40, "q"),
        "task": (48, "Q"), "children_ns": (64, "q"), "ring": (72, "Q"), "state": (122, "B"),
    },
)  # fmt: skip
ROW = _in_order(
    span_id="Q", parent_id="Q", root_id="Q", start_ns="q", end_ns="q", children_ns="q", rare="Q", node="I", task="I"
)
FACT = _in_order(site="Q", size_bytes="I", text_bytes="I")
DETAIL = _in_order(span_id="Q", active_ns="q", size_bytes="I", text_bytes="I")
ATTRIBUTES = _in_order(span_id="Q", text_bytes="Q")
"""An open span's attributes, followed by their JSON. While they are written, `span_id` is another span's or 0."""
INTERVAL = _in_order(span_id="Q", device="q", stream="Q", start_ns="q", end_ns="q", label="q", uncertainty_ns="q")
"""A device interval of a span. A stream is an address, or a small number."""
SAMPLE = _in_order(at_ns="q", device="i", is_reported="I", value="d", name="40s")
"""A reading of a gauge. `is_reported` is 0 if the device does not report the gauge."""
NUMBER = _in_order(at_ns="q", value="d", name="112s")
"""A value of one of the service's own numbers. `name` has a name, a unit and a kind, each on a line."""

STRIDES: Mapping[str, int] = {
    "text": 1, "rings": 256, "nodes": NODE.size, "totals": TOTALS.size, "chunks": CHUNK.size, "highs": HIGH.size,
    "frames": FRAME.size, "attributes": 512, "facts": 1, "details": 1, "intervals": INTERVAL.size,
    "samples": SAMPLE.size, "numbers": NUMBER.size, "rows": ROW.size,
}  # fmt: skip


class Part(NamedTuple):
    """The offset of a part, the number of its slots and their size in bytes."""

    offset: int
    stride: int
    slots: int
    used: int = 0
    unseen: int = 0


def part_at(name: str) -> int:
    """Return the offset of a part's record in the header."""
    return HEADER.fields["parts"][0] + PARTS.index(name) * PART.size


TEXT_BYTES = ALIGNED_BYTES - HEADER_BYTES
INTERVAL_SHARE = 8
"""The size of the rings as a multiple of the size of the device intervals."""
SAMPLES = 131_072
"""The most readings of gauges: an hour with one GPU. They take 8 MiB."""
NUMBERS, NEWEST_NUMBERS = 15_360, 1_024
"""The slots of the ring with former values of the service's numbers, and those after it with the newest values."""
EXPORT_BYTES = 3 * ALIGNED_BYTES
"""The bytes of the export state, at the end of a recording. Only its exporter writes them, see
`instrument.recording.export_checkpoint`."""
METER_BYTES = 16 * ALIGNED_BYTES
"""The bytes of the metrics' state, before the export state."""
SMALL_RINGS = 4096
"""The most threads with a ring of the smallest size, after larger rings have used up the memory."""


def interval_slots(ring_bytes: int) -> int:
    """Return the number of device intervals in a recording with rings of `ring_bytes`."""
    return max(ring_bytes // INTERVAL_SHARE // INTERVAL.size, 64)


def detail_bytes(ring_bytes: int) -> int:
    """Return the bytes for details of rows: a fourth of the rings' bytes, at least 8 MiB, in whole blocks."""
    return max(8 << 20, ring_bytes // 4 // (4 * DETAIL_BLOCK_BYTES) * 4 * DETAIL_BLOCK_BYTES)


def planned(ring_bytes: int, *, is_sparse: bool) -> tuple[dict[str, Part], int]:
    """Return a recording's parts by name, and its size in bytes. A sparse file takes only the pages in use."""
    share = 1 if is_sparse else 4
    slots = {
        "text": TEXT_BYTES,
        "rings": SMALL_RINGS,
        "nodes": 20_992,  # all call paths that a tally keeps, and one for each site beyond
        "totals": 131_072 // share,
        "chunks": 262_144 // share,
        "highs": 8192 // share,
        "frames": 32_768 // share,
        "attributes": 32_768 // share,
        "facts": (16 << 20) // share,
        "details": detail_bytes(ring_bytes) // share,
        "intervals": interval_slots(ring_bytes),
        "samples": SAMPLES // share,
        "numbers": NUMBERS + NEWEST_NUMBERS,
        # Rings have sizes of powers of two, which leave holes.
        "rows": (ring_bytes + ring_bytes // 4) // ROW.size + 64 * SMALL_RINGS // share,
    }
    parts, at = {}, HEADER_BYTES
    for name in PARTS:
        if name != "text":
            at = -(-at // ALIGNED_BYTES) * ALIGNED_BYTES
        parts[name] = Part(at, STRIDES[name], slots[name])
        at += slots[name] * STRIDES[name]
    return parts, -(-at // ALIGNED_BYTES) * ALIGNED_BYTES + METER_BYTES + EXPORT_BYTES
