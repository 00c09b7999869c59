"""The layout of a recording in memory, and a reader of its header and rings that needs no numpy.

A recording has a header of one page, and several parts. Each part is an array of slots of one size. For C code,
`native/_recording_layout.h` repeats the layout. A released slot is zeroed. Pointers are addresses in the recorded
process. A pointer minus the header's `address` is an offset in the recording. Numbers are little-endian. A row is a
finished span, and takes 64 bytes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from instrument.runtime.lazy_imports import NamedTuple

EXPORT, GAUGES = 0, 1
"""The numbers of the two claims on a recording: to export it, and to write gauges into it."""

FIRST_FD = 256
"""The lowest number of our own file descriptors. Lower numbers remain free for the service."""

_OFD_SETLK, _OFD_GETLK = getattr(fcntl, "F_OFD_SETLK", 37), getattr(fcntl, "F_OFD_GETLK", 36)
_LOCK = struct.Struct("hhqqi4x")
_LOCK_AT = 1 << 50
"""The file offset of the locks, which is beyond the data of any recording."""


def duplicate_descriptor(fd: int) -> int:
    """Duplicate a descriptor. The copy has a number from `FIRST_FD` on, if the process's limit allows this."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD)
    except OSError:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def identify_file(fd: int) -> tuple[int, int]:
    try:
        status = os.fstat(fd)
    except OSError:
        return -1, -1
    return status.st_dev, status.st_ino


class OwnDescriptor:
    """A file descriptor of this package, -1 for none. A service that becomes a daemon may close it, and reuse its
    number for another file."""

    def __init__(self, fd: int = -1) -> None:
        self._fd, self._identity = fd, identify_file(fd)

    def fileno(self) -> int:
        """Return the descriptor. Return -1 if the service has closed it."""
        if self._fd >= 0 and identify_file(self._fd) != self._identity:
            self._fd = -1
        return self._fd

    def close(self) -> None:
        if self.fileno() >= 0:
            with suppress(OSError):
                os.close(self._fd)
        self._fd = -1


class Claim(OwnDescriptor):
    """The right of one process to export a recording, or to write gauges into it. It is a lock on the recording's file.
    The system releases the lock when the process ends. Raises `OSError`."""

    def __init__(self, fd: int, kind: int) -> None:
        # Open the file anew: a lock belongs to an open file, which a passed descriptor shares with its sender.
        opened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            super().__init__(duplicate_descriptor(opened))
        finally:
            os.close(opened)
        self._lock_at = _LOCK_AT + kind

    def acquire(self) -> bool:
        try:
            fcntl.fcntl(self.fileno(), _OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._lock_at, 1, 0))
        except OSError:
            return False
        return True

    def is_taken(self) -> bool:
        lock = fcntl.fcntl(self.fileno(), _OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._lock_at, 1, 0))
        return bool(_LOCK.unpack(lock)[0] != fcntl.F_UNLCK)


MOST_SLOTS = 1 << 15
"""The maximum number of slots to read from one part."""


class RingHead(NamedTuple):
    """A ring of the current session. `head` counts all rows that were ever written to it. `address` and `rows` are the
    addresses of the ring and of its rows in the recorded process."""

    number: int
    thread_id: int
    address: int
    rows: int
    mask: int
    capacity: int
    head: int


class RecordingHead:
    """A reader of a recording that does not import numpy. It reads the header once. Raises `OSError` if the file is no
    recording."""

    def __init__(self, fd: int) -> None:
        self._fd, self._data = fd, os.pread(fd, HEADER.size, 0)
        if len(self._data) < HEADER.size or self._data[:8] != MAGIC:
            raise OSError(errno.EINVAL, "no recording")
        if self.header_number("version") != VERSION:
            raise OSError(errno.EINVAL, "a recording of another layout")

    def header_number(self, name: str) -> int:
        return int(HEADER.read(self._data, name)[0])

    @property
    def generation(self) -> int:
        """The number of the session. Each session of a process has a new number."""
        return self.header_number("generation")

    def find_part(self, name: str) -> Part:
        part = Part(*struct.unpack_from("<5Q", self._data, part_header_offset(name)))
        if part.stride != STRIDES[name] or part.offset + part.slots * part.stride > 1 << 62:
            raise OSError(errno.EINVAL, f"the part {name} is damaged")
        return part

    def read_slots(self, name: str) -> list[bytes]:
        part = self.find_part(name)
        data = os.pread(self._fd, min(part.used, part.slots, MOST_SLOTS) * part.stride, part.offset)
        return [data[at : at + part.stride] for at in range(0, len(data) - part.stride + 1, part.stride)]

    def read_rings(self) -> list[RingHead]:
        before, rings = self.header_number("object_bytes"), []
        first = self.header_number("address") + self.find_part("rings").offset
        for slot, data in enumerate(self.read_slots("rings")):
            ring = data[before:]
            if len(ring) < RING.size:
                raise OSError(errno.EINVAL, "the rings are damaged")
            number, generation, thread_id, *more = (
                RING.read(ring, name)[0]
                for name in ("number", "generation", "thread_id", "rows", "mask", "capacity", "head")
            )
            if number and generation == self.generation:
                rings.append(RingHead(number, thread_id, first + slot * STRIDES["rings"], *more))
        return rings

    def count_rows(self) -> int:
        return sum(min(ring.head, ring.capacity) for ring in self.read_rings())

    def has_open_span(self) -> bool:
        rings = {ring.address: ring for ring in self.read_rings()}
        open_ids = {
            FRAME.read(frame, "span_id")[0]
            for frame in self.read_slots("frames")
            if FRAME.read(frame, "state")[0] and FRAME.read(frame, "ring")[0] in rings
        }
        ended_ids = {self._read_newest_span_id(ring) for ring in rings.values()}  # it may not have forgotten its frame
        return any(0 < span_id < 1 << 63 for span_id in open_ids - ended_ids)

    def _read_newest_span_id(self, ring: RingHead) -> int:
        at = ring.rows - self.header_number("address") + ((ring.head - 1) & ring.mask) * STRIDES["rows"]
        return int.from_bytes(os.pread(self._fd, 8, at), "little") if ring.head and 0 < at < 1 << 62 else 0


def read_generation(fd: int) -> int:
    try:
        return RecordingHead(fd).generation
    except OSError:
        return 0


MAGIC, VERSION = b"instrrec", 10
HEADER_BYTES = 4096
LABEL_BYTES = 64
ALIGNED_BYTES = 64 << 10
"""The alignment of parts in bytes: the largest size of a memory page on any machine."""
DETAIL_BLOCK_BYTES = 64 << 10
"""Bytes of a block of details. No record of details crosses the end of a block."""
CHUNKS = 60
"""The number of blocks of a histogram. A block has 64 buckets, and is allocated at its first use."""

NEW, RUNNING, GOODBYE, OFF = 0, 1, 2, 4
"""The states of a recording. NEW: no session has begun. RUNNING: a session records. GOODBYE: the session was stopped.
OFF: a session runs, but is switched off."""

PARTS = (
    "text", "rings", "nodes", "totals", "chunks", "highs", "frames", "attributes", "facts", "details", "intervals",
    "samples", "numbers", "rows",
)  # fmt: skip
"""The names of a recording's parts, in order.

- `text`, `facts`, `details`: a slot is a byte.
- `frames`: a slot is an open span, with a slot in `attributes`.
- `details`, `intervals`, `samples`, `numbers`: the part is a ring, and `used` counts all slots ever written.
"""

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
"""The names of the losses that the field `reasons` of the header counts, in the same order."""


class Record(NamedTuple):
    """The layout of a C structure. `fields` has the offset of each field, and its type as a code of `struct`."""

    size: int
    fields: Mapping[str, tuple[int, str]]

    def read(self, memory: bytes | memoryview, name: str) -> tuple[Any, ...]:
        offset, code = self.fields[name]
        return struct.unpack_from(f"<{code}", memory, offset)

    def write(self, memory: bytearray | memoryview, **values: Any) -> None:
        """Write fields of a structure in memory. The value of an array is a list."""
        for name, value in values.items():
            offset, code = self.fields[name]
            struct.pack_into(f"<{code}", memory, offset, *(value if isinstance(value, list) else (value,)))

    def make_struct(self) -> struct.Struct:
        """Return a `struct.Struct` for the record. Its fields must have no gaps between them."""
        return struct.Struct("<" + "".join(code for _, code in self.fields.values()))


def _make_packed_record(**types: str) -> Record:
    fields, at = {}, 0
    for name, code in types.items():
        fields[name] = at, code
        at += struct.calcsize(f"<{code}")
    return Record(at, fields)


HEADER = _make_packed_record(
    magic="8s", version="I", object_bytes="I", size_bytes="Q", address="Q", pid="I", state="I", start_ticks="Q",
    boot_id="40s", monotonic_ns="q", realtime_ns="q", generation="Q", moving="Q", ended_rows="Q",
    ended_too_short="Q", reasons="32Q", interval_slots="Q", settled_ns="Q",
    parts=f"{5 * len(PARTS)}Q",
)  # fmt: skip
PART = _make_packed_record(offset="Q", stride="Q", slots="Q", used="Q", unseen="Q")
RING = Record(
    184,
    {
        "rows": (0, "Q"), "mask": (8, "I"), "head": (16, "Q"), "number": (48, "Q"), "capacity": (56, "Q"),
        "too_short": (64, "Q"), "thread_id": (72, "q"), "ended": (88, "B"), "generation": (112, "Q"),
        "label": (120, f"{LABEL_BYTES}s"),
    },
)  # fmt: skip
"""The layout of a ring in a slot. The ring follows `object_bytes` private bytes of the recorder."""
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
CHUNK = _make_packed_record(low="64H", high="Q")
HIGH = _make_packed_record(high="64Q")
FRAME = Record(
    128,
    {
        "node": (8, "Q"), "span_id": (16, "Q"), "parent_id": (24, "Q"), "root_id": (32, "Q"), "start_ns": (40, "q"),
        "task": (48, "Q"), "children_ns": (64, "q"), "ring": (72, "Q"), "state": (122, "B"),
    },
)  # fmt: skip
ROW = _make_packed_record(
    span_id="Q", parent_id="Q", root_id="Q", start_ns="q", end_ns="q", children_ns="q", rare="Q", node="I", task="I"
)
FACT = _make_packed_record(site="Q", size_bytes="I", text_bytes="I")
DETAIL = _make_packed_record(span_id="Q", active_ns="q", size_bytes="I", text_bytes="I")
ATTRIBUTES = _make_packed_record(span_id="Q", text_bytes="Q")
"""The layout of the fields before the JSON of an open span's attributes. `span_id` is valid once the JSON is
written."""
INTERVAL = _make_packed_record(
    span_id="Q", device="q", stream="Q", start_ns="q", end_ns="q", label="q", uncertainty_ns="q"
)
"""The layout of a device interval of a span. `stream` is an address or a small number."""
SAMPLE = _make_packed_record(at_ns="q", device="i", is_reported="I", value="d", name="40s")
"""The layout of a reading of a gauge. `is_reported` is 0 if the device does not report the gauge."""
NUMBER = _make_packed_record(at_ns="q", value="d", name="112s")
"""The layout of a value of one of the service's own metrics. `name` consists of three lines: name, unit and kind."""

STRIDES: Mapping[str, int] = {
    "text": 1, "rings": 256, "nodes": NODE.size, "totals": TOTALS.size, "chunks": CHUNK.size, "highs": HIGH.size,
    "frames": FRAME.size, "attributes": 512, "facts": 1, "details": 1, "intervals": INTERVAL.size,
    "samples": SAMPLE.size, "numbers": NUMBER.size, "rows": ROW.size,
}  # fmt: skip


class Part(NamedTuple):
    """The place of a part in a recording: `slots` slots of `stride` bytes, which begin at `offset`."""

    offset: int
    stride: int
    slots: int
    used: int = 0
    unseen: int = 0


def part_header_offset(name: str) -> int:
    return HEADER.fields["parts"][0] + PARTS.index(name) * PART.size


TEXT_BYTES = ALIGNED_BYTES - HEADER_BYTES
INTERVAL_SHARE = 8
"""The ratio of the memory for rows to the memory for device intervals."""
MOST_SAMPLES = 131_072
"""The maximum number of gauge readings in a recording. With one GPU, they cover an hour in 8 MiB."""
NUMBERS, NEWEST_NUMBERS = 15_360, 1_024
"""The numbers of slots for former values and for the newest values of the service's own metrics."""
EXPORT_BYTES = 3 * ALIGNED_BYTES
"""Bytes of the checkpoint of spans, at the end of a recording. Only its exporter writes it, see
`instrument.recording.export_checkpoint`."""
METER_BYTES = 16 * ALIGNED_BYTES
"""Bytes of the checkpoint of metrics, which is in front of the checkpoint of spans."""
MOST_SMALL_RINGS = 4096
"""The maximum number of rings of the smallest size. Threads get such rings once the larger rings are used up."""


def count_interval_slots(ring_bytes: int) -> int:
    return max(ring_bytes // INTERVAL_SHARE // INTERVAL.size, 64)


def compute_detail_bytes(ring_bytes: int) -> int:
    return max(8 << 20, ring_bytes // 4 // (4 * DETAIL_BLOCK_BYTES) * 4 * DETAIL_BLOCK_BYTES)


def plan_parts(ring_bytes: int, *, is_sparse: bool) -> tuple[dict[str, Part], int]:
    """Return the parts of a recording by name, and its size in bytes. A sparse file takes only the pages that are
    used."""
    share = 1 if is_sparse else 4
    slots = {
        "text": TEXT_BYTES,
        "rings": MOST_SMALL_RINGS,
        "nodes": 20_992,  # all call paths that a tally keeps, and one for each site beyond
        "totals": 131_072 // share,
        "chunks": 262_144 // share,
        "highs": 8192 // share,
        "frames": 32_768 // share,
        "attributes": 32_768 // share,
        "facts": (16 << 20) // share,
        "details": compute_detail_bytes(ring_bytes) // share,
        "intervals": count_interval_slots(ring_bytes),
        "samples": MOST_SAMPLES // share,
        "numbers": NUMBERS + NEWEST_NUMBERS,
        # Rings have sizes of powers of two, which leave holes.
        "rows": (ring_bytes + ring_bytes // 4) // ROW.size + 64 * MOST_SMALL_RINGS // share,
    }
    parts, at = {}, HEADER_BYTES
    for name in PARTS:
        if name != "text":
            at = -(-at // ALIGNED_BYTES) * ALIGNED_BYTES
        parts[name] = Part(at, STRIDES[name], slots[name])
        at += slots[name] * STRIDES[name]
    return parts, -(-at // ALIGNED_BYTES) * ALIGNED_BYTES + METER_BYTES + EXPORT_BYTES


Row = tuple[int, int, int, int, int, int, int, int, int, "str | None", "dict[Any, Any] | None"]
"""A row (a finished span) as a tuple: node, span id, parent id, root id, task, begin, end, time of the children, active
time, error and attributes.

The self time is the active time minus the time of the children. An active time of -1 means the total time. The recorder
has subtracted the span's own waits from the children's time. The self time therefore includes the waits.
"""

ROW_NODE: Final = 0
"""The index of the node (call path) in a row."""
SPAN_ID: Final = 1
ROOT_ID: Final = 3
START_NS: Final = 5
END_NS: Final = 6
ERROR: Final = 9
"""The index of the exception's name in a row."""
ROW_ATTRIBUTES: Final = 10
"""The index of the attributes in a row."""

REQUEST_BIT = 1
"""The bit that is set in the span id of a request's root."""

PACKED_ROW = ROW.make_struct()
"""The 64-byte form of a row. If the field `rare` is odd, it is 1 plus twice the active time. If it is 8, the row has
details."""

STREAM = object()
"""The key of a private attribute of the recorder. Its value is the device stream to time, or a `Work`."""


def unpack_rows(data: bytes) -> Iterator[Row]:
    """Unpack rows from the bytes of a recording. Their errors and attributes are left out."""
    for span_id, parent_id, root_id, start_ns, end_ns, children_ns, rare, node, task in PACKED_ROW.iter_unpack(data):
        active_ns = rare >> 1 if rare & 1 else -1
        yield node, span_id, parent_id, root_id, task, start_ns, end_ns, children_ns, active_ns, None, None


def is_request_root(row: Row) -> bool:
    return row[SPAN_ID] == row[ROOT_ID] and bool(row[ROOT_ID] & REQUEST_BIT)
