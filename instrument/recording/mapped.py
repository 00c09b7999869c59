"""The reader of another process's recording in memory. That process may have ended.

The bytes may be half-written, stale or invalid. So the reader copies bytes before it checks them, and leaves out
invalid values. The writer never waits for readers.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.errors import TraceError
from instrument.recording import memory_layout as layout
from instrument.recording.distributions import LAST_BUCKET
from instrument.recording.mapped_facts import (
    FARTHEST_NS,
    MOST_DEVICES,
    UNKNOWN,
    Header,
    OpenSpan,
    Records,
    RingRows,
    drop_invalid_attributes,
    iterate_records,
    parse_facts,
    parse_site,
    parse_thread_name,
)
from instrument.recording.memory import LABELS
from instrument.recording.memory_layout import duplicate_descriptor
from instrument.recording.metric_definitions import GAUGES, Cell, make_samples, parse_cell
from instrument.recording.paths import CallTree
from instrument.recording.spans import HOST, Sample, Site
from instrument.recording.tally import LARGEST, SUMS, TOTALS, Tally, Totals, make_buckets
from instrument.runtime.lazy_imports import NamedTuple

LARGEST_BYTES = 1 << 40
"""The maximum size of a recording in bytes. A larger one counts as damaged."""
MOST_SLOTS = {
    **{name: part.slots for name, part in layout.plan_parts(0, is_sparse=True)[0].items()},
    "details": 1 << 32,
    "intervals": 1 << 26,
    "rows": 1 << 31,
}
"""The maximum number of slots in each part of a recording. A part with more slots counts as damaged."""
FEW_SAMPLES = 4096
"""The number of newest samples that are copied first, because they mostly suffice."""
MOST_OPEN_SPAN_READS = 3
"""The maximum number of reads of the open spans. Two equal reads in a row suffice."""
MOST_TOTALS_READS = 10
"""The maximum number of reads of the totals. One read during which nothing changes suffices."""

STATES = ("new", "running", "goodbye", "forked", "off")


def _numpy_type(record: layout.Record, size: int | None = None, before: int = 0) -> np.dtype[np.void]:
    """Return the numpy type of a record. The type has `before` unused bytes in front, and `size` bytes in all."""

    def numpy_format(code: str) -> Any:
        count, kind = code[:-1], code[-1]
        if kind == "s":
            return f"S{count}"
        if kind == "d":
            return "<f8"
        code_of_numpy = f"<{'ui'[kind.islower()]}{ {'b': 1, 'h': 2, 'i': 4, 'q': 8}[kind.lower()] }"
        return (code_of_numpy, int(count)) if count else code_of_numpy

    names = list(record.fields)
    return np.dtype({
        "names": names,
        "formats": [numpy_format(code) for _, code in record.fields.values()],
        "offsets": [offset + before for offset, _ in record.fields.values()],
        "itemsize": size or record.size,
    })  # fmt: skip


_HEADER, _PART = _numpy_type(layout.HEADER), _numpy_type(layout.PART)
ROWS = _numpy_type(layout.ROW)
"""The numpy type of a row (a finished span), with the layout of `memory_layout.PACKED_ROW`."""
_NODE, _FRAME, _TOTALS = _numpy_type(layout.NODE), _numpy_type(layout.FRAME), _numpy_type(layout.TOTALS)
INTERVALS = _numpy_type(layout.INTERVAL)
_SAMPLE, _NUMBER = _numpy_type(layout.SAMPLE), _numpy_type(layout.NUMBER)
_CHUNK, _HIGH = _numpy_type(layout.CHUNK), _numpy_type(layout.HIGH)
_FACT, _DETAIL = layout.FACT.make_struct(), layout.DETAIL.make_struct()


@cache
def _ring_type(object_bytes: int) -> np.dtype[np.void]:
    """Return the numpy type of a slot with a ring. The ring follows `object_bytes` private bytes of the recorder."""
    return _numpy_type(layout.RING, layout.STRIDES["rings"], object_bytes)


def _parse_cells(records: Records) -> list[Cell]:
    rows = records[(records["at_ns"] > 0) & (records["at_ns"] < FARTHEST_NS) & np.isfinite(records["value"])]
    cells = map(parse_cell, rows["name"].tolist(), rows["at_ns"].tolist(), rows["value"].tolist())
    return [cell for cell in cells if cell is not None]


class _Ring(NamedTuple):
    slot: int
    number: int
    rows: int  # of the part, -1 where they are private
    capacity: int
    head: int
    too_short: int
    thread_id: int
    name: str
    has_ended: bool


class Mapped:
    """A reader of a recording, from a file descriptor or from memory of this process. Each call reads the current
    state. Raises `TraceError` for a file that is no recording."""

    in_doubt = 1
    """The number of rows per ring that are not read, because they may be half-written."""

    def __init__(self, source: int | memoryview) -> None:
        self._memory = source if isinstance(source, memoryview) else None
        self._fd = duplicate_descriptor(source) if isinstance(source, int) else -1
        self._site_by_number: dict[int, Site] = {}
        self._sites_until = 0, 0  # of which generation, and how many bytes of its facts
        self._known = -1, b""  # of which generation, and the nodes of the tree that is known
        self._tree = CallTree()
        self._last_head: tuple[bytes | None, Any] = None, None
        try:
            self._read_head()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    # ---------------------------------------------------------------- bytes

    def _read_bytes(self, offset: int, count: int) -> bytes:
        if self._memory is not None:
            return bytes(self._memory[offset : offset + count])
        pieces = []
        while count > 0:
            try:
                piece = os.pread(self._fd, min(count, 1 << 26), offset)
            except OSError as problem:
                raise TraceError(f"cannot read a recording: {problem.strerror or problem}") from problem
            if not piece:
                break
            pieces.append(piece)
            offset, count = offset + len(piece), count - len(piece)
        return b"".join(pieces)

    def _read_head(self) -> Any:
        data = self._read_bytes(0, layout.HEADER.size)
        last_data, last_head = self._last_head
        if data == last_data:
            return last_head
        if len(data) < layout.HEADER.size or data[:8] != layout.MAGIC:
            raise TraceError(f"the memory begins with {data[:8]!r}; it is not a recording, or it was cut off")
        head = np.frombuffer(data, _HEADER)[0]
        if head["version"] != layout.VERSION:
            raise TraceError(
                f"the recording has the layout {head['version']}, and this version reads {layout.VERSION}; read it "
                "with the version of instrument that wrote it"
            )
        parts, end = {}, layout.HEADER.size
        table = np.frombuffer(data, _PART, len(layout.PARTS), layout.HEADER.fields["parts"][0])
        for name, part in zip(layout.PARTS, table.tolist(), strict=True):
            parts[name] = layout.Part(*part)
            offset, stride, slots, *_ = part
            if stride != layout.STRIDES[name] or slots > MOST_SLOTS[name] or not end <= offset <= LARGEST_BYTES:
                raise TraceError(f"the part {name!r} of the recording is out of place; it is damaged")
            end = offset + stride * slots
        object_bytes = int(head["object_bytes"])
        if object_bytes > layout.STRIDES["rings"] - layout.RING.size:
            raise TraceError("the rings of the recording are out of place; it is damaged")
        self._parts: Mapping[str, layout.Part] = parts
        self._base = int(head["address"])
        self.generation = int(head["generation"])
        """The generation at the last read: a new one begins with each session."""
        self.published_ns = int(head["monotonic_ns"])
        """The time at which the process last wrote its facts, at the last read."""
        self.ended_rows = int(head["ended_rows"])
        """The number of rows lost with the rings of ended threads."""
        self._object_bytes = object_bytes
        self._ring_type = _ring_type(self._object_bytes)
        self._last_head = data, head
        return head

    def read_generation(self) -> int:
        self._read_head()
        return self.generation

    def _read_slots(self, name: str, kind: np.dtype[np.void]) -> Records:
        self._read_head()
        part = self._parts[name]
        data = self._read_bytes(part.offset, min(part.used, part.slots) * part.stride)
        return np.frombuffer(data, kind, len(data) // part.stride)

    def _slots_at_addresses(self, addresses: NDArray[np.uint64], name: str) -> NDArray[np.int64]:
        """Return the slot number in the part `name` for each address in the recorded process. An address outside of the
        part gets -1."""
        part = self._parts[name]
        with np.errstate(over="ignore"):
            off = addresses.astype(np.uint64) - np.uint64((self._base + part.offset) % (1 << 64))
        slots = off // np.uint64(part.stride)
        sound = (off % np.uint64(part.stride) == 0) & (slots < np.uint64(min(part.used, part.slots)))
        valid_slots: NDArray[np.int64] = np.where(sound, slots, np.uint64(0)).astype(np.int64) - ~sound
        return valid_slots

    # ---------------------------------------------------------------- facts

    @property
    def header(self) -> Header:
        head = self._read_head()
        return Header(
            pid=int(head["pid"]),
            started=int(head["start_ticks"]),
            boot_id=head["boot_id"].decode("ascii", "replace"),
            state=STATES[head["state"]] if head["state"] < len(STATES) else UNKNOWN,
            generation=int(head["generation"]),
            monotonic_ns=int(head["monotonic_ns"]),
            realtime_ns=int(head["realtime_ns"]),
            memory_bytes=int(head["size_bytes"]) if self._fd < 0 else os.fstat(self._fd).st_blocks * 512,
            facts=self._read_facts(),
        )

    def _read_facts(self) -> Mapping[str, Any]:
        part = self._parts["text"]
        data = self._read_bytes(part.offset, min(part.slots, part.used))
        return parse_facts(data[4 : 4 + int.from_bytes(data[:4], "little")])

    def _read_sites(self) -> dict[int, Site]:
        """Return the sites by their addresses in the recorded process. Only new sites are read."""
        part = self._parts["facts"]
        generation, until = self._sites_until
        if generation != self.generation or part.used < until:
            self._site_by_number, until = {}, 0
        data = self._read_bytes(part.offset + until, min(part.used, part.slots) - until)
        for (site, size_bytes, _), text in iterate_records(data, _FACT):
            self._site_by_number[site] = parse_site(parse_facts(text))
            until += size_bytes
        self._sites_until = self.generation, until
        return self._site_by_number

    @property
    def last_tree(self) -> CallTree:
        return self._tree

    def read_tree(self) -> CallTree:
        """Return the current call tree. It is the same object until a call path is added."""
        nodes = self._read_slots("nodes", _NODE)
        self._read_head()  # a site is written before its first node is known, but maybe after the head was read
        columns = b"".join(nodes[name].tobytes() for name in _NODE.fields or ())
        if self._known == (self.generation, columns):
            return self._tree
        slots = np.flatnonzero(nodes["is_known"] != 0)
        # The nodes of a tree are numbered one after another; of two of one number, as a damaged file has, the first.
        index, firsts = np.unique(nodes["index"][slots].astype(np.int64), return_index=True)
        count = int(np.argmin(np.append(index, -1) == np.arange(len(index) + 1)))
        slots = slots[firsts[:count]]
        part = self._parts["nodes"]
        number_of = np.full(min(part.used, part.slots) + 1, -1, np.int64)
        number_of[slots] = np.arange(count)
        parents = number_of[self._slots_at_addresses(nodes["parent"][slots], "nodes")]
        parents[parents >= np.arange(count)] = -1  # a parent is known before its children
        tree = CallTree()
        site_by_address = self._read_sites()
        addresses, numbers = np.unique(nodes["site"][slots], return_inverse=True)
        tree.sites.extend(site_by_address.get(int(address)) or Site(UNKNOWN) for address in addresses)
        tree.add_nodes(0, array("i", numbers.tolist()).tobytes(), array("i", parents.tolist()).tobytes())
        self._node_numbers, self._tree, self._known = number_of, tree, (self.generation, columns)
        return tree

    def sites(self) -> list[Site]:
        return self.read_tree().sites

    def _read_rings(self) -> list[_Ring]:
        ring_by_number: dict[int, _Ring] = {}
        rings = self._read_slots("rings", self._ring_type)
        head = self._read_head()  # a ring has room for its rows before the first one, but maybe since the head was read
        rows = self._slots_at_addresses(rings["rows"], "rows").tolist()
        part = self._parts["rows"]
        free_rows = part.slots
        for slot in np.flatnonzero((rings["generation"] == head["generation"]) & (rings["number"] != 0)).tolist():
            ring = rings[slot]
            capacity = int(ring["capacity"])
            has_rows = (
                0 < capacity <= free_rows and 0 <= rows[slot] <= part.slots - capacity and not capacity & (capacity - 1)
            )
            free_rows -= capacity if has_rows else 0
            ring_by_number[int(ring["number"])] = _Ring(
                slot, int(ring["number"]), rows[slot] if has_rows else -1, capacity if has_rows else 0,
                min(int(ring["head"]), 1 << 62), int(ring["too_short"]), int(ring["thread_id"]),
                parse_thread_name(ring["label"]) if ring["thread_id"] else "(ended threads)", bool(ring["ended"]),
            )  # fmt: skip
        return [ring_by_number[number] for number in sorted(ring_by_number)]

    def read_thread_names(self) -> dict[int, str]:
        return {ring.thread_id: ring.name for ring in self._read_rings() if ring.thread_id}

    # ---------------------------------------------------------------- spans

    def count_written_rows(self) -> dict[int, int]:
        """Return the number of rows that were ever written to each ring, by the ring's number."""
        return {ring.number: ring.head for ring in self._read_rings() if ring.thread_id}

    def find_first_rows_after(self, after_ns: int) -> dict[int, int]:
        return {
            ring.number: self._find_first_row_after(ring, after_ns) for ring in self._read_rings() if ring.thread_id
        }

    def _find_first_row_after(self, ring: _Ring, after_ns: int) -> int:
        """Return the number of a ring's first row that ended after `after_ns`. A ring's rows are in the order of their
        ends."""
        part, mask, at = self._parts["rows"], ring.capacity - 1, layout.ROW.fields["end_ns"][0]

        def has_ended_after(number: int) -> bool:
            data = self._read_bytes(part.offset + (ring.rows + (number & mask)) * part.stride + at, 8)
            return int.from_bytes(data, "little", signed=True) > after_ns

        rows = range(max(ring.head - ring.capacity, 0), ring.head)
        return rows.start + bisect_left(rows, 1, key=has_ended_after) if ring.rows >= 0 else ring.head

    def find_threads_with_losses(self, since_ns: int) -> tuple[set[int], set[int]]:
        """Return the threads that may have lost rows since `since_ns`. The first set has threads with overwritten rows,
        the second set has ended threads."""
        rings = [ring for ring in self._read_rings() if ring.thread_id]

        def ring_reaches_back(ring: _Ring) -> bool:
            return self._find_first_row_after(ring, since_ns) > max(ring.head - ring.capacity, 0)

        full = [ring for ring in rings if ring.head + self.in_doubt > ring.capacity]
        wrapped = {ring.thread_id for ring in full if not ring_reaches_back(ring)}
        ended = ([ring for ring in rings if ring.has_ended] or rings[-1:]) if self.ended_rows else []
        return wrapped, set() if any(map(ring_reaches_back, ended)) else {ring.thread_id for ring in ended}

    def read_rows(self, since: Mapping[int, int] | None = None, most: int = 1 << 62) -> list[RingRows]:
        """Return up to `most` rows of all rings. `since` maps the number of a ring to the first row to read. The next
        call continues at the `head` of each result.

        The oldest row of a full ring is left out, because it may be half-written.
        """
        copied, requests = [], []
        for place, ring in enumerate(ring for ring in self._read_rings() if ring.thread_id):
            begin = max((since or {}).get(ring.number, 0), 0)
            oldest = max(ring.head - ring.capacity + self.in_doubt, 0)
            requests.append((ring.head - min(max(begin, oldest), ring.head), place, begin, ring))
        # Each ring gets the same share; rings with fewer rows leave theirs to the others.
        for served, (count, place, begin, ring) in enumerate(sorted(requests, key=lambda request: request[:2])):
            first = ring.head - count
            end = min(ring.head, first + most // (len(requests) - served))
            rows = self._copy_rows(ring, first, end)
            now = self._read_current_head(ring)
            overwritten = max(now - ring.capacity + self.in_doubt - first, 0)
            late = min(overwritten, len(rows)) if now >= ring.head else len(rows)
            rows, first = rows[late:], first + late
            copied.append((place, ring, begin, first, end, rows))
            most -= len(rows)
        node_count = len(self.read_tree())  # every row's node is known, for a call path is written before its rows
        return [
            RingRows(ring.number, ring.thread_id, rows[_are_valid_rows(rows, node_count)], first, end, first - begin)
            for _, ring, begin, first, end, rows in sorted(copied, key=lambda copy: copy[0])
        ]

    def _copy_rows(self, ring: _Ring, first: int, end: int) -> Records:
        if ring.rows < 0 or end <= first:
            return np.zeros(0, ROWS)
        part = self._parts["rows"]
        data = self._read_ring_slots(part, ring.rows, ring.capacity, first, end)
        return np.frombuffer(data.ljust((end - first) * part.stride, b"\0"), ROWS)

    def _read_ring_slots(self, part: layout.Part, offset: int, capacity: int, first: int, end: int) -> bytes:
        """Return the bytes of a ring's slots from `first` to before `end`. These numbers count all slots ever
        written."""
        at, count = first % capacity, end - first
        before = min(count, capacity - at)
        pieces = ((at, before), (0, count - before))
        return b"".join(
            self._read_bytes(part.offset + (offset + begin) * part.stride, length * part.stride)
            for begin, length in pieces
        )

    def _read_current_head(self, ring: _Ring) -> int:
        """Return the number of rows that were ever written to a ring. Return -1 if the ring is now another thread's."""
        part = self._parts["rings"]
        data = self._read_bytes(part.offset + ring.slot * part.stride, part.stride)
        if len(data) < part.stride:
            return -1
        now = np.frombuffer(data, self._ring_type)[0]
        return int(now["head"]) if now["number"] == ring.number else -1

    def open_spans(self) -> list[OpenSpan]:
        rings = {ring.slot: ring for ring in self._read_rings()}
        # A process that was killed may not have closed the frame of a ring's newest row.
        newest = [(ring, self._read_current_head(ring)) for ring in rings.values()]
        last_rows = [self._copy_rows(ring, now - 1, now) for ring, now in newest if now > 0]
        ended = {int(rows["span_id"][0]) for rows in last_rows if len(rows)}
        span_by_id: dict[int, OpenSpan] = {}
        for _ in range(MOST_OPEN_SPAN_READS):
            before, frames = self._read_slots("frames", _FRAME), self._read_slots("frames", _FRAME)
            before, frames = before[: len(frames)], frames[: len(before)]
            tree = self.read_tree()  # it has the node of every frame: read after them, for the process continues
            number_of = self._node_numbers
            sound = (frames["state"] != 0) & (frames["start_ns"] > 0) & (frames["start_ns"] < FARTHEST_NS)
            sound &= (frames["span_id"] != 0) & (frames["span_id"] >> np.uint64(63) == 0)
            open_slots = np.flatnonzero(sound)
            is_same = before[open_slots] == frames[open_slots]
            nodes = number_of[self._slots_at_addresses(frames["node"][open_slots], "nodes")]
            of_rings = self._slots_at_addresses(frames["ring"][open_slots], "rings")
            for place, frame, same, node, slot in zip(
                open_slots.tolist(), frames[open_slots], np.atleast_1d(is_same).tolist(), nodes.tolist(),
                of_rings.tolist(), strict=True,
            ):  # fmt: skip
                span_id, ring = int(frame["span_id"]), rings.get(slot)
                if same and 0 <= node < len(tree) and ring is not None and span_id not in ended:
                    span_by_id[span_id] = OpenSpan(
                        tree.site(node), node, span_id, int(frame["parent_id"] & np.uint64((1 << 63) - 1)),
                        int(frame["root_id"] & np.uint64((1 << 63) - 1)), int(frame["task"]) & 0xFFFFFFFF,
                        ring.thread_id, int(frame["start_ns"]), min(max(int(frame["children_ns"]), 0), FARTHEST_NS),
                        self._read_attributes(place, span_id),
                    )  # fmt: skip
            if np.all(is_same):
                break
        return sorted(span_by_id.values(), key=lambda span: (span.start_ns, span.span_id))

    def _read_attributes(self, slot: int, span_id: int) -> Mapping[str, Any]:
        """Return the current attributes of an open span. They are empty while the span's thread writes them."""
        part = self._parts["attributes"]
        if slot >= part.slots:
            return {}
        data = self._read_bytes(part.offset + slot * part.stride, part.stride)
        owner_id, length = (int.from_bytes(data[at : at + 8], "little") for at in (0, 8))
        return (
            drop_invalid_attributes(parse_facts(data[layout.ATTRIBUTES.size :][:length])) if owner_id == span_id else {}
        )

    @property
    def details_bytes(self) -> int:
        return self._parts["details"].slots

    def read_details_since(self, begin: int) -> tuple[dict[int, tuple[int, bytes]], int]:
        """Read the details from the offset `begin` on. Return the details by span id, and the end offset. A detail is a
        row's active time in ns, and a JSON text."""
        pieces, used = self.copy_details(begin)
        return parse_details(pieces), used

    def copy_details(self, begin: int = 0) -> tuple[list[bytes], int]:
        """Return the bytes of the details from the offset `begin` on, and the end offset."""
        self._read_head()
        part, block = self._parts["details"], layout.DETAIL_BLOCK_BYTES
        used = part.used
        if not part.slots or part.slots % block:
            return [], used
        first = max((used // block + 1) * block - part.slots, begin if begin <= used else 0, 0)
        pieces = []
        while first < used:
            end = min((first // block + 1) * block, used)
            pieces.append((first, self._read_bytes(part.offset + first % part.slots, end - first)))
            first = end
        self._read_head()  # what was overwritten meanwhile
        oldest = (self._parts["details"].used // block + 1) * block - part.slots
        return [data for at, data in pieces if at >= oldest], used

    def read_intervals(self, since: int = 0) -> Records:
        """Return the valid device intervals, the oldest first. The first `since` intervals of the recording are left
        out."""
        table = self._read_newest_slots("intervals", INTERVALS, int(self._read_head()["interval_slots"]), since)
        sound = (table["span_id"] != 0) & (table["span_id"] >> np.uint64(63) == 0) & (table["device"] >= 0)
        sound &= (table["device"] < MOST_DEVICES) & (table["stream"] >> np.uint64(63) == 0)
        sound &= (table["start_ns"] >= 0) & (table["start_ns"] < FARTHEST_NS) & (table["end_ns"] < FARTHEST_NS)
        sound &= (table["label"] >= 0) & (table["label"] < len(LABELS))
        sound &= (table["uncertainty_ns"] >= 0) & (table["uncertainty_ns"] < FARTHEST_NS)
        return np.asarray(table[sound])

    def interval_count(self) -> int:
        self._read_head()
        return self._parts["intervals"].used

    def settled_ns(self) -> int:
        """Return the time up to which all ended spans have their device times, 0 if no device is timed."""
        return int(self._read_head()["settled_ns"])

    def read_samples(self, since_ns: int = 0) -> list[Sample]:
        """Return the readings of gauges and of the service's own metrics since `since_ns`, ordered by time, device and
        name."""
        self._read_head()
        slots, used = min(self._parts["samples"].slots, layout.MOST_SAMPLES), self._parts["samples"].used
        table = self._read_newest_slots("samples", _SAMPLE, slots, max(used - FEW_SAMPLES, 0))
        if len(table) and table["at_ns"].min() >= since_ns:
            table = self._read_newest_slots("samples", _SAMPLE, slots)
        sound = (table["at_ns"] >= max(since_ns, 1)) & (table["at_ns"] < FARTHEST_NS) & (table["device"] >= HOST)
        sound &= (table["device"] < MOST_DEVICES) & np.isfinite(table["value"])
        samples = [
            Sample(
                name, int(row["device"]), int(row["at_ns"]), _convert_reading(name, row["value"], row["is_reported"])
            )
            for row in table[sound]
            if (name := row["name"].decode("ascii", "replace")) in GAUGES
        ]
        values = make_samples(*read_service_metrics(self), since_ns=since_ns)
        return sorted([*samples, *values], key=attrgetter("at_ns", "device", "name"))

    def _read_newest_slots(self, name: str, kind: np.dtype[np.void], slots: int, since: int = 0) -> Records:
        """Return the slots of a ring, the oldest first. The slot that is overwritten next is left out, because it may
        be half-written."""
        self._read_head()
        part = self._parts[name]
        slots, used = min(slots, part.slots), part.used
        first = max(used - slots + 1, since, 0)
        if not slots or first >= used:
            return np.zeros(0, kind)
        data = self._read_ring_slots(part, 0, slots, first, used)
        records_read = np.frombuffer(data, kind, len(data) // part.stride)
        self._read_head()  # what was overwritten meanwhile
        return records_read[max(self._parts[name].used - slots + 1 - first, 0) :]

    # ---------------------------------------------------------------- totals

    def tally(self, choose_sites: Callable[[CallTree], Sequence[bool]] | None = None) -> Tally:
        """Return the totals of all calls so far, by call path and thread. `choose_sites` returns True for each site to
        include."""
        tree, threads, totals, *histograms = self._read_totals(choose_sites)
        return Tally.from_nodes(tree, *_convert_totals(threads, totals, self._read_histograms(totals, *histograms)))

    def read_totals(self) -> Tally:
        """Return the totals of all calls so far. Histograms are added up only on demand."""
        tree, threads, totals, *histograms = self._read_totals(None)
        place_of = np.array(tree.merge_equal_paths().places, np.int64)[totals["node"]]

        def histogram(places: Iterable[int], thread_id: int | None) -> dict[int, int]:
            rings = [number for number, ring in threads.items() if thread_id in (None, ring.thread_id)]
            is_wanted = np.isin(place_of, np.fromiter(places, np.int64))
            chosen = totals[is_wanted & np.isin(totals["ring_number"], np.array(rings, np.uint64))]
            buckets = self._read_histograms(chosen, *histograms)
            times = np.zeros(LAST_BUCKET + 1, np.int64)
            np.add.at(times, buckets["bucket"], buckets["times"])
            return {bucket: int(times[bucket]) for bucket in np.flatnonzero(times).tolist()}

        return Tally.from_nodes(
            tree, *_convert_totals(threads, totals, make_buckets(*[np.zeros(0, np.int64)] * 3)), histogram
        )

    def first_calls(self) -> dict[int, tuple[int, int]]:
        """Return the start time and the duration in ns of the first completed call of each node."""
        firsts: dict[int, tuple[int, int]] = {}
        _, _, totals, *_ = self._read_totals(None)
        for node, begin_ns, length_ns in totals[["node", "first_ns", "first_total_ns"]].tolist():
            firsts[node] = min((begin_ns, length_ns), firsts.get(node, (begin_ns, length_ns)))
        return firsts

    def _read_totals(
        self, choose_sites: Callable[[CallTree], Sequence[bool]] | None
    ) -> tuple[CallTree, dict[int, _Ring], Records, Records, Records]:
        for _ in range(MOST_TOTALS_READS):
            moving = int(self._read_head()["moving"])
            tree, rings = self.read_tree(), self._read_rings()
            totals, chunks, highs = self._copy_slots_at_once(("totals", _TOTALS), ("chunks", _CHUNK), ("highs", _HIGH))
            if moving % 2 == 0 and int(self._read_head()["moving"]) == moving:
                break
        threads = {ring.number: ring for ring in sorted(rings, key=lambda ring: (ring.thread_id == 0, ring.number))}
        is_counted = np.isin(totals["ring_number"], np.array(list(threads), np.uint64)) & (totals["calls"] > 0)
        is_counted &= (totals["node"] < len(tree)) & (totals["waiting_room"] <= totals["waiting"].shape[1])
        if choose_sites is not None:
            of_node = np.array(choose_sites(tree), np.bool_)[np.array(tree.site_of, np.int64)]
            is_counted[is_counted] = of_node[totals["node"][is_counted]]
        return tree, threads, totals[is_counted], chunks, highs

    def _copy_slots_at_once(self, *parts: tuple[str, np.dtype[np.void]]) -> list[Records]:
        """Return the slots of several parts, read as close in time as possible. The recorded process may change them
        between two reads."""
        return [self._read_slots(name, kind) for name, kind in parts]

    def _read_histograms(self, totals: Records, chunks: Records, highs: Records) -> Records:
        """Return the buckets of the totals' histograms. A bucket may occur more than once."""
        row, place = np.nonzero(totals["chunks"])
        slots = self._slots_at_addresses(totals["chunks"][row, place], "chunks")
        sound = (slots >= 0) & (slots < len(chunks))
        row, place, slots = row[sound], place[sound], slots[sound]
        times = chunks["low"][slots].astype(np.uint64)
        above = self._slots_at_addresses(chunks["high"][slots], "highs")
        has_more = np.flatnonzero((chunks["high"][slots] != 0) & (above >= 0) & (above < len(highs)))
        times[has_more] += highs["high"][above[has_more]] << np.uint64(16)
        at, bucket = np.nonzero(times)
        counted = make_buckets(row[at], place[at] * 64 + bucket, times[at, bucket])
        # Buckets of calls that are not added yet, one entry per call.
        waits = np.arange(totals["waiting"].shape[1]) >= totals["waiting_room"][:, None]
        of, slot = np.nonzero(waits)
        every = np.concatenate([counted, make_buckets(of, totals["waiting"][of, slot], np.ones(len(of), np.int64))])
        return np.asarray(every[every["bucket"] <= LAST_BUCKET])

    def losses(self) -> dict[str, int]:
        head = self._read_head()
        rings = self._read_rings()
        count_by_reason = {
            layout.OVERWRITTEN: sum(max(ring.head - ring.capacity, 0) for ring in rings if ring.capacity)
            + int(head["ended_rows"]),
            "spans shorter than their rule asks": sum(ring.too_short for ring in rings) + int(head["ended_too_short"]),
            **dict(zip(layout.REASONS, head["reasons"].tolist(), strict=False)),
            **{f"{name} that only the process itself could read": part.unseen for name, part in self._parts.items()},
        }
        return {reason: count for reason, count in count_by_reason.items() if count}


def parse_details(pieces: Iterable[bytes]) -> dict[int, tuple[int, bytes]]:
    return {
        span_id: (active_ns, text)
        for data in pieces
        for (span_id, active_ns, *_), text in iterate_records(data, _DETAIL)
        if span_id
    }


def _convert_reading(name: str, value: float, is_reported: int) -> float | None:
    """Convert a number of bytes to an int, and any other reading to a float. Return None if the device does not report
    the gauge."""
    if not is_reported:
        return None
    return int(value) if GAUGES[name].unit == "bytes" else float(value)


def _are_valid_rows(rows: Records, nodes: int) -> NDArray[np.bool_]:
    sound = (rows["span_id"] != 0) & (rows["node"] < nodes) & (rows["start_ns"] >= -FARTHEST_NS)
    for name in ("span_id", "parent_id", "root_id"):
        sound &= rows[name] >> np.uint64(63) == 0
    sound &= (rows["end_ns"] >= rows["start_ns"]) & (rows["end_ns"] < FARTHEST_NS)
    return np.asarray(sound & (rows["children_ns"] > -FARTHEST_NS) & (rows["children_ns"] < FARTHEST_NS))


def _convert_totals(
    threads: Mapping[int, _Ring], totals: Records, buckets: Records
) -> tuple[Records, Records, dict[int, str]]:
    lines = np.zeros(len(totals), TOTALS)
    for name in set(Totals._fields).intersection(totals.dtype.names or ()):
        lines[name] = np.minimum(totals[name], LARGEST) if name in SUMS else totals[name]
    lines["elapsed_ns"] = lines["total_ns"] + np.minimum(totals["beyond_ns"], LARGEST)
    lines["thread_id"] = [threads[number].thread_id for number in totals["ring_number"].tolist()]
    names = dict[int, str]()
    for ring in threads.values():
        if (lines["thread_id"] == ring.thread_id).any():
            names.setdefault(ring.thread_id, ring.name)
    return lines, buckets, names


def read_service_metrics(mapped: Mapped) -> tuple[list[Cell], list[Cell]]:
    mapped._read_head()
    part, first = mapped._parts["numbers"], layout.NUMBERS
    if not part.used or part.slots < first + layout.NEWEST_NUMBERS:
        return [], []
    data = mapped._read_bytes(part.offset + first * part.stride, layout.NEWEST_NUMBERS * part.stride)
    return _parse_cells(mapped._read_newest_slots("numbers", _NUMBER, first)), _parse_cells(
        np.frombuffer(data, _NUMBER)
    )
