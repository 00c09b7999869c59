"""The layout of a recording in memory that others can read, and the header as it is now, for readers without numpy.

`native/_recording_layout.h` is the same layout for the native recorder, whose own structures are in the memory. A
recording has a header of one page and parts of equal slots. A released slot is zeroed. Pointers are addresses in the
process: an address less the header's `address` is the offset in the recording. Numbers are little-endian, as on all
machines of the native recorder.

The operating system releases a lock when its process ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Mapping
from contextlib import suppress

from instrument.runtime.cheap_start import NamedTuple

EXPORT, GAUGES = 0, 1
"""The claims on a recording: to export its rows, and to write its process's gauges into it."""

FIRST_FD = 256
"""The lowest descriptor that we use. So the service's own files have the same numbers as without us."""

_OFD_SETLK, _OFD_GETLK = getattr(fcntl, "F_OFD_SETLK", 37), getattr(fcntl, "F_OFD_GETLK", 36)
_LOCK = struct.Struct("hhqqi4x")
_LOCK_AT = 1 << 50
"""The offset of the lock's byte. It is beyond the data of any recording, so it collides with no other lock."""


def duplicate(fd: int) -> int:
    """Return a copy of a descriptor with a number from `FIRST_FD` on, or with any number if the limit is lower."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD)
    except OSError:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def identity_of(fd: int) -> tuple[int, int]:
    """Return the identity of a descriptor's file, (-1, -1) for none."""
    try:
        status = os.fstat(fd)
    except OSError:
        return -1, -1
    return status.st_dev, status.st_ino


class OwnDescriptor:
    """A descriptor that a service may close and reuse for its own file, as daemons do. -1 is none."""

    def __init__(self, fd: int = -1) -> None:
        self._fd, self._identity = fd, identity_of(fd)

    def fileno(self) -> int:
        """Return the descriptor, or -1 if the service has closed or reused it."""
        if self._fd >= 0 and identity_of(self._fd) != self._identity:
            self._fd = -1
        return self._fd

    def close(self) -> None:
        """Close the descriptor if it is still ours."""
        if self.fileno() >= 0:
            with suppress(OSError):
                os.close(self._fd)
        self._fd = -1


class Claim(OwnDescriptor):
    """A claim on a recording: a lock that `take` acquires. `fileno` is the recording's descriptor. Raises `OSError`."""

    def __init__(self, fd: int, kind: int) -> None:
        # Open the file anew: a lock belongs to an open file, which a passed descriptor shares with its sender.
        opened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            super().__init__(duplicate(opened))
        finally:
            os.close(opened)
        self._lock_at = _LOCK_AT + kind

    def take(self) -> bool:
        """Acquire the claim. Return False while another process has it."""
        try:
            fcntl.fcntl(self.fileno(), _OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._lock_at, 1, 0))
        except OSError:
            return False
        return True

    def is_taken(self) -> bool:
        """Return True if another process has the claim now."""
        lock = fcntl.fcntl(self.fileno(), _OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._lock_at, 1, 0))
        return bool(_LOCK.unpack(lock)[0] != fcntl.F_UNLCK)


MOST_SLOTS = 1 << 15
"""The maximum number of slots that are read of a part."""


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
        self._fd, self._data = fd, os.pread(fd, HEADER.size, 0)
        if len(self._data) < HEADER.size or self._data[:8] != MAGIC:
            raise OSError(errno.EINVAL, "no recording")
        if self.number("version") != VERSION:
            raise OSError(errno.EINVAL, "a recording of another layout")

    def number(self, name: str) -> int:
        """Return a number of the header."""
        return _number(self._data, HEADER, name)

    @property
    def generation(self) -> int:
        """The generation of the recording: a new one begins with each session."""
        return self.number("generation")

    def part(self, name: str) -> Part:
        """Return a part. Raises `OSError` if it is invalid."""
        part = Part(*struct.unpack_from("<5Q", self._data, part_at(name)))
        if part.stride != STRIDES[name] or part.offset + part.slots * part.stride > 1 << 62:
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
            if len(ring) < RING.size:
                raise OSError(errno.EINVAL, "the rings are damaged")
            if _number(ring, RING, "number") and _number(ring, RING, "generation") == self.generation:
                number, thread_id, *more = (
                    _number(ring, RING, name) for name in ("number", "thread_id", "rows", "mask", "capacity", "head")
                )
                rings.append(RingHead(number, thread_id, first + slot * STRIDES["rings"], *more))
        return rings

    def rows_kept(self) -> int:
        """Return the approximate number of spans in the rings."""
        return sum(min(ring.head, ring.capacity) for ring in self.rings())

    def has_open_span(self) -> bool:
        """Return True if a span is open."""
        rings = {ring.address: ring for ring in self.rings()}
        open_ids = {
            _number(frame, FRAME, "span_id")
            for frame in self.slots("frames")
            if _number(frame, FRAME, "state") and _number(frame, FRAME, "ring") in rings
        }
        ended_ids = {self._newest_id(ring) for ring in rings.values()}  # it may not have forgotten its frame
        return any(0 < span_id < 1 << 63 for span_id in open_ids - ended_ids)

    def _newest_id(self, ring: RingHead) -> int:
        """Return the span id of the newest row of a ring, 0 for none."""
        at = ring.rows - self.number("address") + ((ring.head - 1) & ring.mask) * STRIDES["rows"]
        return int.from_bytes(os.pread(self._fd, 8, at), "little") if ring.head and 0 < at < 1 << 62 else 0


def _number(data: bytes, record: Record, name: str) -> int:
    offset, code = record.fields[name]
    return int(struct.unpack_from(f"<{code}", data, offset)[0])


def generation_of(fd: int) -> int:
    """Return the current generation of a recording, 0 if it cannot be read."""
    try:
        return RecordingHead(fd).generation
    except OSError:
        return 0


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
"""The states of a recording. NEW: no session has begun. RUNNING: a session records. GOODBYE: the session has ended as
planned. FORKED: a forked child has no session yet. OFF: a session runs and records nothing."""

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
"""The maximum number of readings of gauges: an hour with one GPU. They take 8 MiB."""
NUMBERS, NEWEST_NUMBERS = 15_360, 1_024
"""The slots for values that the service sets: a ring of former values, then one slot for each newest value."""
EXPORT_BYTES = 3 * ALIGNED_BYTES
"""The bytes of the export state, at the end of a recording. Only its exporter writes them, see
`instrument.recording.export_checkpoint`."""
METER_BYTES = 16 * ALIGNED_BYTES
"""The bytes of the metrics' state, before the export state."""
SMALL_RINGS = 4096
"""The maximum number of threads with a ring of the smallest size, after larger rings have used up the memory."""


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
