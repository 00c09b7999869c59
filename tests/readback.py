"""The rows of a recorder, read from its memory by the mapped reader. All tests read them by it."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from kept_gauges import make_room

from instrument.recorder.recorder import RECORDER
from instrument.recording import memory_layout
from instrument.recording.mapped import _CHUNK, _HIGH, _TOTALS, INTERVALS, parse_details
from instrument.recording.mapped_facts import parse_detail, parse_facts
from instrument.recording.memory import IntervalRing
from instrument.recording.memory_layout import Row, unpack_rows
from instrument.recording.spans import DeviceInterval, Span
from instrument.runtime.faults import FAULTS
from instrument.trace.columns import Columns, DeviceIntervals, device_intervals
from instrument.trace.of_recording import RowSnapshot
from instrument.trace.trace import make_spans

TYPES = {"totals": _TOTALS, "chunks": _CHUNK, "highs": _HIGH}


def snapshot_of(recorder: Any = RECORDER, since_ns: int = 0) -> RowSnapshot:
    return RowSnapshot.copy_from(recorder.make_reader(), since_ns)


def columns_in(recorder: Any = RECORDER, start_ns: int = 0, end_ns: int | None = None) -> Columns:
    """The spans that lie in a stretch of time or reach into it, by default all, clipped to it."""
    taken = snapshot_of(recorder, start_ns)
    found, _ = taken.make_columns(
        end_ns or time.monotonic_ns(), lambda _: DeviceIntervals.make_empty(), start_ns=start_ns
    )
    return found


def make_intervals(memory_bytes: int) -> IntervalRing:
    """Make a ring of device intervals in memory of its own."""
    room = make_room("intervals", memory_bytes // INTERVALS.itemsize)
    return IntervalRing(memory_bytes, lambda: room)


def intervals_in(ring: IntervalRing, span_ids: Iterable[int]) -> dict[int, tuple[DeviceInterval, ...]]:
    """Return the intervals of spans by the spans' ids, each span's in order of time."""
    ids = sorted(span_ids)
    room = ring._find_room()
    assert room is not None
    cells = np.frombuffer(room.part, INTERVALS)[: min(room.count_used_slots(), room.slots)]
    work = device_intervals(cells, np.array(ids, np.int64))
    found: dict[int, tuple[DeviceInterval, ...]] = {}
    names = ("device", "stream", "start_ns", "end_ns", "label", "uncertainty_ns")
    for row, *place, label, uncertainty_ns in zip(
        work.row.tolist(), *(getattr(work, name).tolist() for name in names), strict=True
    ):
        interval = DeviceInterval(*place, work.labels[label], uncertainty_ns)
        found[ids[row]] = (*found.get(ids[row], ()), interval)
    return found


def spans_in(recorder: Any = RECORDER) -> list[Span]:
    """All spans that the rings have, and the open ones as far as they have come."""
    return make_spans(columns_in(recorder))


def rows_by_thread(recorder: Any = RECORDER) -> list[tuple[int, list[Row]]]:
    """The rows of each ring with the id of its thread, in the order of their ends."""
    mapped = recorder.make_reader()
    rings = mapped.read_rows()
    details = parse_details(mapped.copy_details()[0])

    def with_details(data: bytes) -> Iterator[Row]:
        for row in unpack_rows(data):
            active_ns, text = details.get(row[1], (-1, b""))
            active_ns, error, attributes = parse_detail(active_ns, parse_facts(text))
            yield row if not text else (*row[:8], active_ns, error, dict(attributes) or None)

    return [(ring.thread_id, [*with_details(ring.rows.tobytes())]) for ring in rings]


def rows_in(recorder: Any = RECORDER) -> list[Row]:
    return [row for _, own in rows_by_thread(recorder) for row in own]


def read_rows(cursor: Any) -> list[np.void]:
    """Return the rows since the cursor's last read, as rows of the recording."""
    return [row for ring in cursor.read_new_rows() for row in ring.rows]


def part_of(recorder: Any, name: str) -> tuple[np.ndarray[Any, Any], int]:
    """A part of a recorder's memory, to be changed, and the address of it in the process."""
    table = memory_layout.HEADER.fields["parts"][0] + memory_layout.PARTS.index(name) * memory_layout.PART.size
    part = memory_layout.Part(*memory_layout.PART.make_struct().unpack_from(recorder.memory, table))
    slots = np.frombuffer(recorder.memory, TYPES[name], part.slots, part.offset)
    base = struct.unpack_from("<Q", recorder.memory, memory_layout.HEADER.fields["address"][0])[0]
    return slots, base + part.offset


def take_slot(recorder: Any, name: str) -> int:
    """Take the next slot of a part, as the recorder does."""
    used_at = memory_layout.HEADER.fields["parts"][0] + memory_layout.PARTS.index(name) * memory_layout.PART.size + 24
    (used,) = struct.unpack_from("<Q", recorder.memory, used_at)
    struct.pack_into("<Q", recorder.memory, used_at, used + 1)
    return int(used)


def preset_head(recorder: Any, head: int) -> None:
    """Set the number of rows that the only thread has had."""
    ring_type = np.dtype({"names": ["head"], "formats": ["<u8"], "offsets": [16 + 16], "itemsize": 256})
    table = memory_layout.HEADER.fields["parts"][0] + memory_layout.PARTS.index("rings") * memory_layout.PART.size
    part = memory_layout.Part(*memory_layout.PART.make_struct().unpack_from(recorder.memory, table))
    (one,) = (ring for ring in recorder.make_reader()._read_rings() if ring.thread_id)
    np.frombuffer(recorder.memory, ring_type, part.slots, part.offset)["head"][one.slot] = head


def preset_totals(recorder: Any, thread_id: int, node: int, calls: int, summed_ns: int, times: int) -> None:
    """Have a thread's totals of a call path begin at these: calls, total and own time, and times in its only bucket."""
    numbers = [ring.number for ring in recorder.make_reader()._read_rings() if ring.thread_id == thread_id]
    totals, _ = part_of(recorder, "totals")
    ((at,),) = np.nonzero(np.isin(totals["ring_number"], numbers) & (totals["node"] == node) & (totals["calls"] > 0))
    totals["calls"][at], totals["total_ns"][at], totals["self_ns"][at] = calls, summed_ns, summed_ns
    (chunks, first_chunk), (highs, first_high) = part_of(recorder, "chunks"), part_of(recorder, "highs")
    slots = totals["waiting"].shape[1]
    if totals["waiting_room"][at] < slots:
        bucket = int(totals["waiting"][at][-1])
        totals["waiting_room"][at], chunk = slots, take_slot(recorder, "chunks")
        totals["chunks"][at][bucket >> 6] = first_chunk + chunk * chunks.itemsize
        chunks["low"][chunk][bucket & 63] = 1
    (place,) = np.flatnonzero(totals["chunks"][at]).tolist()
    chunk = (int(totals["chunks"][at][place]) - first_chunk) // chunks.itemsize
    (bucket,) = np.flatnonzero(chunks["low"][chunk]).tolist()
    chunks["low"][chunk][bucket] = times & 0xFFFF
    if times >> 16:
        if not chunks["high"][chunk]:
            chunks["high"][chunk] = first_high + take_slot(recorder, "highs") * highs.itemsize
        highs["high"][(int(chunks["high"][chunk]) - first_high) // highs.itemsize][bucket] = times >> 16


def unreadable_counts() -> dict[str, int]:
    """The number of values that could not be read, by the place of their rule in the profile."""
    return {place: sum(kinds.values()) for place, (_, kinds) in FAULTS._of_rules.items()}
