"""What the recorder in Python records, written to memory that others can read: as the native one has it there.

A row, its totals, the call path and the open span are written where the native recorder would have them, beside what
the recorder in Python keeps for itself. That costs some microseconds a span. Pointers are offsets: the recording says
that it lies at the address 0.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from instrument.recorder.chains import Frame
from instrument.recording import memory_layout as layout
from instrument.recording.histogram import bucket
from instrument.recording.memory_layout import DETAIL_BLOCK_BYTES
from instrument.recording.ring import SMALLEST_RING, Ring
from instrument.recording.rows import (
    ACTIVE_NS,
    ATTRIBUTES,
    END_NS,
    ERROR,
    NODE,
    SPAN_ID,
    START_NS,
    Row,
    is_cancelled_request,
    is_too_short,
    packed_row,
    self_ns,
)
from instrument.recording.spans import BATCH_LIMIT, Site
from instrument.recording.tally import Node, Totals
from instrument.runtime.unpatched import RLock

_U16, _U32, _U64, _I64 = (struct.Struct(f"<{code}") for code in "HIQq")
_PARTS = struct.Struct(f"<{5 * len(layout.PARTS)}Q")
_RING = struct.Struct("<QQQQ")
_SUMS = struct.Struct("<Qqqqqq")
_FRAME, _FRAME_END = struct.Struct("<QQQQQq"), struct.Struct("<qQ")
_NODE, _START, _CHILDREN, _STATE = (
    layout.FRAME.fields[name][0] for name in ("node", "start_ns", "children_ns", "state")
)
_HEAD = layout.RING.fields["head"][0]
_DETAIL = struct.Struct("<QqII")
_ATTRIBUTES = struct.Struct("<QQ")
_LABEL = struct.Struct(f"{layout.LABEL_BYTES}s")
_FACT = struct.Struct("<QII")
_FARTHEST = (1 << 63) - 1
_LEAST_BYTES = 128
"""Of a block, for a record to begin there."""
_getpid = os.getpid


class _RingPlace:
    """Where a ring and what it has lie."""

    __slots__ = ("at", "capacity", "head", "number", "rows", "totals")

    def __init__(self, at: int, number: int, rows: int, capacity: int) -> None:
        self.at, self.number, self.rows, self.capacity = at, number, rows, capacity
        self.head = 0
        self.totals: dict[int, tuple[int, dict[int, int]]] = {}  # by node: where, and where its chunks are


class MemoryWriter:
    """Writes to one recording, in the process that has made it: in a forked child it does nothing."""

    def __init__(self, fd: int, *, is_file: bool = False) -> None:
        self.map = mmap.mmap(fd, os.fstat(fd).st_size)
        if not is_file and os.fstat(fd).st_blocks * 512 > len(self.map) // 2:
            self._give_back_what_is_locked()
        self.fd = fd
        self._identity = os.fstat(fd).st_dev, os.fstat(fd).st_ino
        self._pid = _getpid()
        self._lock = RLock()
        table = _PARTS.unpack_from(self.map, layout.HEADER.fields["parts"][0])
        of_parts = [layout.Part(*table[at : at + 5]) for at in range(0, len(table), 5)]
        self._parts = dict(zip(layout.PARTS, of_parts, strict=True))
        self._number = 0
        self._put_header("is_python", 1)
        self._clear()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the interpreter there may be nothing left to ask
            if self.own_fd() >= 0:
                os.close(self.fd)

    def _give_back_what_is_locked(self) -> None:
        """A service has locked all that it will ever map (mlockall): it was filled, and is to be as it is used."""
        import ctypes

        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        ctypes.CDLL(None).munlock(ctypes.c_void_p(address), ctypes.c_size_t(len(self.map)))
        with contextlib.suppress(OSError, AttributeError):
            self.map.madvise(mmap.MADV_REMOVE, layout.ALIGNED_BYTES, len(self.map) - layout.ALIGNED_BYTES)

    def own_fd(self) -> int:
        """The descriptor, -1 where a service has closed it."""
        try:
            found = os.fstat(self.fd)
        except OSError:
            return -1
        return self.fd if (found.st_dev, found.st_ino) == self._identity else -1

    # ---------------------------------------------------------------- parts

    def part(self, name: str) -> memoryview:
        """A part, to be written by who knows how."""
        part = self._parts[name]
        return memoryview(self.map)[part.offset : part.offset + part.slots * part.stride]

    def _header(self, name: str) -> int:
        return int(_U64.unpack_from(self.map, layout.HEADER.fields[name][0])[0])

    def _put_header(self, name: str, value: int) -> None:
        _U64.pack_into(self.map, layout.HEADER.fields[name][0], value)

    def _count(self, name: str, field: str, value: int) -> None:
        at = layout.HEADER.fields["parts"][0] + layout.PARTS.index(name) * layout.PART.size
        _U64.pack_into(self.map, at + layout.PART.fields[field][0], value)

    def _clear(self) -> None:
        self._used = dict.fromkeys(layout.PARTS, 0)
        self._unseen = dict.fromkeys(layout.PARTS, 0)
        self._free: dict[str, list[int]] = {"frames": []}
        self._free_rows: dict[int, list[int]] = {}  # by how many
        self._nodes: dict[Node, int] = {}
        self._sites: set[int] = set()
        self._rings: dict[Ring | None, _RingPlace] = {}
        self._frames: dict[int, int] = {}

    def _take(self, name: str) -> int:
        """Where a slot of a part lies, 0 where there is none left."""
        with self._lock:
            free = self._free.get(name)
            if free:
                return free.pop()
            part, used = self._parts[name], self._used[name]
            if used >= part.slots:
                self._unseen[name] += 1
                self._count(name, "unseen", self._unseen[name])
                return 0
            self._used[name] = used + 1
            self._count(name, "used", used + 1)
            return part.offset + used * part.stride

    def _give(self, name: str, at: int) -> None:
        """Give a slot back."""
        stride = layout.STRIDES[name]
        self.map[at : at + stride] = bytes(stride)
        self._free.setdefault(name, []).append(at)

    # ---------------------------------------------------------------- generations and call paths

    def begin_generation(self) -> None:
        """What is recorded from now on is another generation; what was there is gone."""
        if self._pid != _getpid():
            return
        with self._lock:
            self._put_header("moving", self._header("moving") + 1)
            for name, used in self._used.items():
                part = self._parts[name]
                if name not in ("text", "facts", "details") and used:
                    self.map[part.offset : part.offset + used * part.stride] = bytes(used * part.stride)
                if name != "text":
                    self._count(name, "used", 0)
                    self._count(name, "unseen", 0)
            self._clear()
            self._put_header("generation", self._header("generation") + 1)
            self._put_header("ended_rows", 0)
            self._put_header("ended_too_short", 0)
            self._put_header("settled_ns", 0)
            reasons = layout.HEADER.fields["reasons"][0]
            self.map[reasons : reasons + 8 * len(layout.REASONS)] = bytes(8 * len(layout.REASONS))
            self._put_header("moving", self._header("moving") + 1)

    def add_node(self, node: Node) -> None:
        """A call path has been met first."""
        if self._pid != _getpid():
            return
        at = self._take("nodes")
        if not at:
            return
        self._nodes[node] = at
        self._tell_site(node.site)
        parent = self._nodes.get(node.parent, 0) if node.parent is not None else 0
        struct.pack_into("<QQI", self.map, at, id(node.site), parent, node.index)
        self.map[at + layout.NODE.fields["is_known"][0]] = 1

    def _tell_site(self, site: Site) -> None:
        with self._lock:
            if id(site) in self._sites:
                return
            self._sites.add(id(site))
            facts = {name: getattr(site, name, None) for name in site.told}
            text = _text({**facts, "attributes": _told(site.attributes)})
            part, used = self._parts["facts"], self._used["facts"]
            size = _padded(_FACT.size + len(text))
            if used + size > part.slots:
                self._count("facts", "unseen", 1)
                return
            at = part.offset + used
            _FACT.pack_into(self.map, at, id(site), size, len(text))
            self.map[at + _FACT.size : at + _FACT.size + len(text)] = text
            self._used["facts"] = used + size
            self._count("facts", "used", used + size)

    # ---------------------------------------------------------------- rings

    def _ring(self, ring: Ring | None) -> _RingPlace | None:
        """The place of a ring, or of the threads that were given up."""
        place = self._rings.get(ring)
        if place is not None:
            return place
        with self._lock:
            at = self._take("rings")
            if not at:
                return None
            rows, capacity = (0, 0) if ring is None else self._take_rows(ring.capacity)
            self._number += 1
            place = _RingPlace(at, self._number, rows, capacity)
            fields, name = layout.RING.fields, b'"(ended threads)"' if ring is None else json.dumps(ring.name).encode()
            _RING.pack_into(self.map, at, rows, max(capacity - 1, 0), 0, place.number)
            _U64.pack_into(self.map, at + fields["capacity"][0], capacity)
            _I64.pack_into(self.map, at + fields["thread_id"][0], 0 if ring is None else ring.thread_id)
            _LABEL.pack_into(self.map, at + fields["label"][0], name[: layout.LABEL_BYTES - 1])
            _U64.pack_into(self.map, at + fields["generation"][0], self._header("generation"))
            self._rings[ring] = place
            return place

    def _take_rows(self, capacity: int) -> tuple[int, int]:
        """Where rows lie, and how many: fewer where there is no room for as many, or none."""
        part, used = self._parts["rows"], self._used["rows"]
        if used + capacity <= part.slots and not self._free_rows.get(capacity):
            self._used["rows"] = used + capacity
            self._count("rows", "used", used + capacity)
            return part.offset + used * part.stride, capacity
        larger = min((size for size, free in self._free_rows.items() if free and size >= capacity), default=0)
        if not larger and capacity > SMALLEST_RING:
            return self._take_rows(capacity // 2)
        if not larger:
            self._unseen["rows"] += capacity
            self._count("rows", "unseen", self._unseen["rows"])
            return 0, 0
        at = self._free_rows[larger].pop()
        self._give_rows(at, larger, capacity)
        return at, capacity

    def _give_rows(self, at: int, had: int, kept: int) -> None:
        """Give back what lies behind the rows that are kept, in pieces of sizes of powers of two."""
        while had > kept:
            had //= 2
            self._free_rows.setdefault(had, []).append(at + had * layout.ROW.size)

    def shrink(self, ring: Ring) -> None:
        """A ring has no more rows than this."""
        place = self._rings.get(ring)
        if place is None or place.capacity <= ring.capacity or self._pid != _getpid():
            return
        with self._lock:
            self._give_rows(place.rows, place.capacity, ring.capacity)
            place.capacity = ring.capacity
            _U64.pack_into(self.map, place.at + layout.RING.fields["mask"][0], ring.capacity - 1)
            _U64.pack_into(self.map, place.at + layout.RING.fields["capacity"][0], ring.capacity)

    def give_up(self, ring: Ring, ended: Mapping[int, Totals], ended_rows: int, ended_too_short: int) -> None:
        """A thread's ring has gone, and its totals are among those of the threads that have ended."""
        place, into = self._rings.pop(ring, None), self._ring(None)
        if place is None or into is None or self._pid != _getpid():
            return
        with self._lock:
            self._put_header("moving", self._header("moving") + 1)
            for index, totals in ended.items():
                self._put_totals(into, index, totals)
            for at, chunks in place.totals.values():
                for chunk in chunks.values():
                    high = _U64.unpack_from(self.map, chunk + layout.CHUNK.fields["high"][0])[0]
                    if high:
                        self._give("highs", high)
                    self._give("chunks", chunk)
                self._give("totals", at)
            self._give("rings", place.at)
            if place.capacity:
                self._free_rows.setdefault(place.capacity, []).append(place.rows)
            self._put_header("ended_rows", ended_rows)
            self._put_header("ended_too_short", ended_too_short)
            self._put_header("moving", self._header("moving") + 1)

    # ---------------------------------------------------------------- spans

    def begin(self, frame: Frame) -> None:
        """A span is open, or goes on elsewhere."""
        if self._pid != _getpid():
            return
        node, place = self._nodes.get(frame[0]), self._rings.get(frame[5]) or self._ring(frame[5])
        if node is None or place is None:
            return
        at = self._frames.get(frame[1])
        if at is None:
            at = self._take("frames")
            if not at:
                return
            self._frames[frame[1]] = at
            self.map[at + _STATE] = 1
        _FRAME_END.pack_into(self.map, at + _CHILDREN, min(_FARTHEST, frame[4]), place.at)
        address = frame[8] << 4  # of the task, as the native recorder has it there
        _FRAME.pack_into(self.map, at + _NODE, node, frame[1], frame[2], frame[3], address, frame[7])

    def tell_attributes(self, frame: Frame) -> None:
        """Tell the attributes of an open span, as many as there is room for: who it is, should it never end.

        Of a request that has more all are among the details of rows as well.
        """
        at = self._frames.get(frame[1])
        if not frame[10] or self._pid != _getpid():
            return
        is_whole = False
        if at:
            part, stride = self._parts["attributes"], layout.STRIDES["attributes"]
            place = part.offset + (at - self._parts["frames"].offset) // layout.FRAME.size * stride
            pieces, room = list[str](), stride - layout.ATTRIBUTES.size - 3
            told = _told(frame[10].items())
            for name, value in told.items():
                piece = f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}"
                if len(piece) < room:
                    pieces.append(piece)
                    room -= len(piece) + 1
            is_whole = len(pieces) == len(told)
            text = f"{{{','.join(pieces)}}}".encode()
            _U64.pack_into(self.map, place, 0)
            self.map[place + layout.ATTRIBUTES.size : place + layout.ATTRIBUTES.size + len(text)] = text
            _ATTRIBUTES.pack_into(self.map, place, frame[1], len(text))
        if not is_whole and frame[0].site.kind == "request":
            self.put_detail(frame[1], -1, None, frame[10])

    def add_children(self, frame: Frame) -> None:
        """An open span has more time of children."""
        at = self._frames.get(frame[1])
        if at and self._pid == _getpid():
            _I64.pack_into(self.map, at + _CHILDREN, min(_FARTHEST, frame[4]))

    def end(self, frame: Frame) -> None:
        """A span is open no more."""
        at = self._frames.pop(frame[1], 0)
        if at and self._pid == _getpid():
            _I64.pack_into(self.map, at + _START, 0)
            self._free["frames"].append(at)

    def end_all(self) -> None:
        """No span is open any more."""
        for at in self._frames.values():
            _I64.pack_into(self.map, at + layout.FRAME.fields["start_ns"][0], 0)
        self._free["frames"] += self._frames.values()
        self._frames.clear()

    def store(self, ring: Ring, row: Row, node: Node, own_waited_ns: int) -> None:
        """A span has ended, which has waited so much of its own time."""
        place = self._rings.get(ring) or self._ring(ring)
        if place is None or self._pid != _getpid():
            return
        if node.site.min_ns and is_too_short(row, node.site.min_ns):
            at = place.at + layout.RING.fields["too_short"][0]
            _U64.pack_into(self.map, at, _U64.unpack_from(self.map, at)[0] + 1)
        else:
            if row[ERROR] is not None or row[ATTRIBUTES] is not None:
                self.put_detail(row[SPAN_ID], row[ACTIVE_NS], row[ERROR], row[ATTRIBUTES])
            if place.capacity:
                at = place.rows + (place.head & place.capacity - 1) * layout.ROW.size
                self.map[at : at + layout.ROW.size] = packed_row(row)
            place.head += 1
            _U64.pack_into(self.map, place.at + _HEAD, place.head)
        self._add(place, row, node, own_waited_ns)

    def put_detail(self, span_id: int, active_ns: int, error: str | None, attributes: Mapping[Any, Any] | None) -> None:
        """What few spans have beside their numbers."""
        if self._pid != _getpid():
            return
        facts: dict[str, Any] = {} if error is None else {"error": error}
        text = _text({**facts, "attributes": _told(attributes.items())}) if attributes is not None else _text(facts)
        part = self._parts["details"]
        with self._lock:
            if len(text) > DETAIL_BLOCK_BYTES - _DETAIL.size:
                text = _text(facts)
                self._unseen["details"] += 1
                self._count("details", "unseen", self._unseen["details"])
            used, size = self._used["details"], _padded(_DETAIL.size + len(text))
            room = DETAIL_BLOCK_BYTES - used % DETAIL_BLOCK_BYTES
            if room < max(size, _LEAST_BYTES):
                if room >= _DETAIL.size:
                    _DETAIL.pack_into(self.map, part.offset + used % part.slots, 0, 0, 0, 0)
                used += room
            at = part.offset + used % part.slots
            _DETAIL.pack_into(self.map, at, span_id, active_ns, size, len(text))
            self.map[at + _DETAIL.size : at + _DETAIL.size + len(text)] = text
            self._used["details"] = used + size
            self._count("details", "used", used + size)

    # ---------------------------------------------------------------- totals

    def _totals(self, place: _RingPlace, index: int) -> tuple[int, dict[int, int]] | None:
        found = place.totals.get(index)
        if found is None:
            at = self._take("totals")
            if not at:
                return None
            fields = layout.TOTALS.fields
            _U32.pack_into(self.map, at + fields["node"][0], index)
            _U64.pack_into(self.map, at + fields["ring_number"][0], place.number)
            found = place.totals[index] = at, {}
        return found

    def _add(self, place: _RingPlace, row: Row, node: Node, own_waited_ns: int) -> None:
        found = self._totals(place, row[NODE])
        if found is None:
            return
        at, chunks = found
        duration = row[END_NS] - row[START_NS]
        calls, total_ns, of_self_ns, min_ns, max_ns, first_ns = _SUMS.unpack_from(self.map, at)
        if not calls:
            min_ns, max_ns, first_ns = duration, duration, row[START_NS]
        self._add_times(chunks, at, bucket(duration), 1)
        if row[ERROR] is not None:
            self._add_to(at, "errors", 1)
        elif is_cancelled_request(row, node.site):
            self._add_to(at, "cancelled", 1)
        if own_waited_ns:
            self._add_to(at, "waiting_ns", own_waited_ns)
        size = row[ATTRIBUTES].get("bytes") if row[ATTRIBUTES] and node.site.kind == "copy" else None
        if isinstance(size, int) and 0 <= size < 1 << 64:
            self._add_to(at, "moved_bytes", size)
        if node.inner is not node:
            total_ns += duration
        of_self_ns += self_ns(row)
        _SUMS.pack_into(
            self.map, at, calls + 1, min(_FARTHEST, total_ns),
            min(_FARTHEST, of_self_ns), min(min_ns, duration),
            max(max_ns, duration), min(first_ns, row[START_NS]),
        )  # fmt: skip

    def _add_to(self, at: int, name: str, more: int) -> None:
        at += layout.TOTALS.fields[name][0]
        _U64.pack_into(self.map, at, _U64.unpack_from(self.map, at)[0] + more & (1 << 64) - 1)

    def _add_times(self, chunks: dict[int, int], at: int, index: int, times: int) -> None:
        """Count calls in a bucket of a histogram: 16 bits, and what is above them apart."""
        chunk = chunks.get(index >> 6) or self._take("chunks")
        if not chunk:
            return
        if index >> 6 not in chunks:
            chunks[index >> 6] = chunk
            _U64.pack_into(self.map, at + layout.TOTALS.fields["chunks"][0] + (index >> 6) * 8, chunk)
        low = chunk + (index & 63) * 2
        counted = _U16.unpack_from(self.map, low)[0] + times
        if counted >> 16:
            pointer = chunk + layout.CHUNK.fields["high"][0]
            high = _U64.unpack_from(self.map, pointer)[0] or self._take("highs")
            if high:
                _U64.pack_into(self.map, pointer, high)
                above = high + (index & 63) * 8
                _U64.pack_into(self.map, above, max(_U64.unpack_from(self.map, above)[0] + (counted >> 16), 0))
        _U16.pack_into(self.map, low, counted & 0xFFFF)

    def count_device(self, ring: Ring, index: int, host_ns: int, device_ns: int, elapsed_ns: int) -> None:
        """The device time of a call that was counted as long as its host time."""
        place = self._rings.get(ring)
        found = None if place is None else place.totals.get(index)
        if found is None or self._pid != _getpid():
            return
        at, chunks = found
        self._add_to(at, "device_ns", device_ns)
        if elapsed_ns > host_ns:
            self._add_to(at, "beyond_ns", elapsed_ns - host_ns)
            self._add_times(chunks, at, bucket(elapsed_ns), 1)
            self._add_times(chunks, at, bucket(host_ns), -1)
            for name, best in (("max_ns", max), ("min_ns", min)):
                place_at = at + layout.TOTALS.fields[name][0]
                known = _I64.unpack_from(self.map, place_at)[0]
                if name == "max_ns" or bucket(known) != bucket(host_ns):
                    _I64.pack_into(self.map, place_at, best(known, elapsed_ns))

    def _put_totals(self, place: _RingPlace, index: int, totals: Totals) -> None:
        """Totals as a whole, in place of what is there."""
        found = self._totals(place, index)
        if found is None:
            return
        at, chunks = found
        _SUMS.pack_into(
            self.map, at, totals.calls, min(totals.total_ns, _FARTHEST), min(totals.self_ns, _FARTHEST), totals.min_ns,
            totals.max_ns, totals.first_ns,
        )  # fmt: skip
        for name in ("errors", "cancelled", "moved_bytes", "device_ns", "waiting_ns"):
            _U64.pack_into(self.map, at + layout.TOTALS.fields[name][0], getattr(totals, name) & (1 << 64) - 1)
        _I64.pack_into(self.map, at + layout.TOTALS.fields["beyond_ns"][0], totals.elapsed_ns - totals.total_ns)
        for chunk in chunks.values():
            self.map[chunk : chunk + layout.CHUNK.fields["high"][0]] = bytes(layout.CHUNK.fields["high"][0])
            high = _U64.unpack_from(self.map, chunk + layout.CHUNK.fields["high"][0])[0]
            if high:
                self.map[high : high + layout.HIGH.size] = bytes(layout.HIGH.size)
        for number, times in totals.histogram.items():
            self._add_times(chunks, at, number, times)

    def counter(self) -> Counter[str]:
        """Counts irregular events from now on."""
        return _Irregular(self)

    def put_reason(self, reason: str, times: int) -> None:
        """How often something irregular has happened."""
        if reason in layout.REASONS and self._pid == _getpid():
            _U64.pack_into(self.map, layout.HEADER.fields["reasons"][0] + layout.REASONS.index(reason) * 8, times)


class _Irregular(Counter[str]):
    """Counts irregular events, for others as well."""

    def __init__(self, writer: MemoryWriter) -> None:
        self._writer = writer
        super().__init__()

    def __setitem__(self, reason: str, times: int) -> None:
        super().__setitem__(reason, times)
        self._writer.put_reason(reason, times)


def _padded(size: int) -> int:
    return size + 7 & ~7


def _told(attributes: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    """The attributes whose names are text, and whose values are Python's own."""
    return {name: _plain(value) for name, value in attributes if type(name) is str}


def _plain(value: Any, depth: int = 0) -> Any:
    kind = type(value)
    if kind is bytes:
        return value.decode("latin-1")
    if kind in (tuple, list) and not depth:
        return [_plain(one, 1) for one in value[:BATCH_LIMIT]]
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 63 else None
    return value if kind in (str, bool, float) else None


def _text(facts: Mapping[str, Any]) -> bytes:
    return json.dumps(facts, separators=(",", ":")).encode() if facts else b""
