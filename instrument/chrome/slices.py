"""Converts the slices of a trace file into columns, for files of any profiler.

Slices nest within a line: that of a thread, or that of an async key. A slice's parent is the innermost slice around it,
unless its arguments name a parent. Our slices have ids as arguments, and numbers that cannot be derived from other
slices. `others` reads the arguments of other profilers.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from itertools import compress
from operator import attrgetter
from struct import pack
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from instrument.chrome.events import (
    Arguments,
    LeftOut,
    SliceTimes,
    TraceEvent,
    decode_arguments,
    find_fault,
    read_sound_times,
    times_of,
)
from instrument.chrome.lanes import DEVICE_PIDS, iterate_rows
from instrument.chrome.others import ForeignSlices, Rows
from instrument.chrome.paddle_traces import thread_of
from instrument.recording.remote_parents import RemoteParent
from instrument.recording.spans import HOST, Sample
from instrument.trace.columns import FARTHEST_NS, Bools, Columns, DeviceIntervals, Int32s, Int64s, lie_within
from instrument.trace.forest import NONE, rows_of, topmost_rows
from instrument.trace.layout import GatheredAttributes, column, convert_lists, rank_of, to_json
from instrument.trace.metadata import Metadata
from instrument.trace.text import INT64, LIMIT_SPANS, LIMIT_US, LONGEST_PLAIN, checked, nanoseconds
from instrument.trace.trace import SpanViews, Trace

_LIMIT_NS = LIMIT_US * 1000

LIMIT_EVENTS = 5 * LIMIT_SPANS
"""The maximum number of events in a file, slices or not."""

UNTOLD = -INT64
"""The placeholder for a number that a slice's arguments omit."""

_SLICES = frozenset("XBEbe")
_NUMBERS = ("id", "site", "parent", "root", "own_id", "task", "self_ns", "active_ns")
_OF_INTERVALS = ("owner", "place", "device", "stream", "start_ns", "end_ns", "label", "uncertainty_ns")


class Slices:
    """Reads slices in the order of the file: complete ones, begins and ends, and async ones."""

    def __init__(self, left_out: LeftOut, ours: Metadata | None = None) -> None:
        self._left_out = left_out
        self._ours = None if ours is None else OwnSlices(ours)
        self.others = ForeignSlices(left_out)
        self._seen = self.count = self._rounding_ns = 0
        self._start_ns, self._end_ns, self._thread_id, self._line = array("q"), array("q"), array("q"), array("q")
        # Begins with their rows, and ends without one. `_mark_of` has the line, a thread or an async key.
        self._mark_ns, self._mark_row, self._mark_of = array("q"), array("q"), array("q")
        self._lines: dict[tuple[Any, ...], int] = {}
        self._lanes: dict[tuple[Any, Any], int] = {}
        self._tasks: dict[int, int] = {}

    def add(self, events: list[TraceEvent]) -> None:
        """Read the next events of the file."""
        first, self._seen = self._seen + 1, self._seen + len(events)
        if self._seen > LIMIT_EVENTS:
            raise ValueError(f"it has more than {LIMIT_EVENTS} events; record less into one file")
        # The slice of "Trace" is the time of torch.profiler itself, no call.
        numbered = [
            (number, event)
            for number, event in enumerate(events, first)
            if event.ph in _SLICES and not (event.cat == "Trace" and event.pid == "Spans")
        ]
        slices = [event for _, event in numbered]
        times = read_sound_times(slices)
        if times is None:
            numbered = [pair for pair in numbered if not self._is_left_out(*pair)]
            slices = [event for _, event in numbered]
            times = times_of(slices, _LIMIT_NS)
        self.count += len(slices)
        if self.count > LIMIT_SPANS:
            raise ValueError(f"it has more than {LIMIT_SPANS} events; record less into one file")
        if self._ours is None:
            whole = slices
            slices = self.others.hold_back_zeros(slices, [number for number, _ in numbered])
            self._add(slices, times if slices is whole else times_of(slices, _LIMIT_NS))
            self.others.add(events, first)
        else:
            self._add(*self._ours.add(events, slices, times))

    def _is_left_out(self, number: int, event: TraceEvent) -> bool:
        if fault := find_fault(event, self._left_out, number):
            self._left_out.add(fault, f"event {number}")
        return bool(fault)

    def _add(self, slices: list[TraceEvent], times: SliceTimes) -> None:
        are_begins = [event.ph != "E" and event.ph != "e" for event in slices]
        begins = slices if all(are_begins) else [*compress(slices, are_begins)]
        if begins:
            self._add_rows(begins, _select_times(times, are_begins))
        if any(event.ph != "X" for event in slices):
            self._add_marks(slices, np.array(are_begins), times.start_ns)

    def _add_rows(self, slices: list[TraceEvent], times: SliceTimes) -> None:
        """Add complete slices, and slices whose end comes later."""
        self._rounding_ns = max(self._rounding_ns, int(times.has_parts))
        start_ns, end_ns = times.start_ns.copy(), times.start_ns + times.length_ns
        if self._ours is None:
            self._thread_id.extend(self.others.add_rows(slices, start_ns, end_ns))
        else:
            self._thread_id.extend(self._ours.add_rows(slices))
        keys, lanes = [(event.pid, event.tid) for event in slices], self._lanes
        _extend(self._line, [lanes[key] if key in lanes else self._line_of(key) for key in keys])
        self._start_ns.frombytes(start_ns.tobytes())
        self._end_ns.frombytes(end_ns.tobytes())

    def _line_of(self, key: tuple[Any, Any]) -> int:
        pid, tid = key
        line = self._lanes[key] = self._lines.setdefault((pid, thread_of(tid)), len(self._lines))
        return line

    def _add_marks(self, slices: list[TraceEvent], are_begins: Bools, start_ns: Int64s) -> None:
        """Add the begins and ends of slices. The begins are the last rows of the columns."""
        rows = np.cumsum(are_begins)
        rows += len(self._start_ns) - 1 - rows[-1]
        for event, row, at_ns in zip(slices, rows.tolist(), start_ns.tolist(), strict=True):
            if event.ph == "X":
                continue
            phase = event.ph
            if phase == "b" or phase == "e":
                key: tuple[Any, ...] = event.pid, f"{event.cat}", f"{event.id}", f"{event.id2}"
            else:
                key = event.pid, thread_of(event.tid)
            line = self._lines.setdefault(key, len(self._lines))
            self._mark_ns.append(at_ns)
            self._mark_of.append(line)
            if phase == "b":
                self._tasks.setdefault(line, 1 + len(self._tasks))
            if phase == "B" or phase == "b":
                self._mark_row.append(row)
                self._line[row] = line
            else:
                self._mark_row.append(NONE)

    # Results

    def trace(self) -> Trace:
        """Return the trace of the slices, with all other facts."""
        if self._ours is None:
            zeros = self.others.waiting_zeros()
            self._add(zeros, times_of(zeros, _LIMIT_NS))
        rows = self._rows()
        return self.others.trace(rows) if self._ours is None else self._ours.trace(rows)

    def _rows(self) -> Rows:
        start_ns, end_ns, line, thread_id = map(self._column, ("_start_ns", "_end_ns", "_line", "_thread_id"))
        clipped = np.zeros(len(start_ns), dtype=np.bool_)
        order_in_file, strays = self._close_marks(end_ns, clipped)
        # Slices with equal begins and ends keep the order of the file.
        order = np.lexsort((order_in_file, -end_ns, start_ns))
        start_ns, end_ns, line, thread_id = start_ns[order], end_ns[order], line[order], thread_id[order]
        around = _parents(start_ns, end_ns, line, self._rounding_ns)
        task_of_line = np.zeros(len(self._lines), dtype=np.int64)
        task_of_line[list(self._tasks)] = list(self._tasks.values())
        further = thread_id, task_of_line[line], around, clipped[order], strays
        return Rows(order, rank_of(order), start_ns, end_ns, line, *further)

    def _column(self, name: str) -> Int64s:
        """Return a column as an array, and free the original, which is as large."""
        return column(vars(self).pop(name))

    def _close_marks(self, end_ns: Int64s, clipped: Bools) -> tuple[Int64s, int]:
        """Match begins with ends by a stack per line, in the order of time. Return the order of rows in the file, with
        incomplete slices last, and the number of ends without a begin."""
        place = np.arange(len(end_ns), dtype=np.int64)
        if not len(self._mark_ns):
            return place, 0
        at_ns, of, rows = map(self._column, ("_mark_ns", "_mark_of", "_mark_row"))
        last_ns = max(int(at_ns.max()), int(end_ns.max(initial=int(at_ns[0]))))
        order = np.lexsort((at_ns, of))
        opened: list[int] = []
        strays, next_place, before = 0, len(place), NONE
        for mark_ns, line, row in iterate_rows(at_ns[order], of[order], rows[order]):
            if line != before:
                end_ns[opened], clipped[opened] = last_ns, True
                opened, before = [], line
            if row != NONE:
                opened.append(row)
                place[row] = next_place
                next_place += 1
            elif opened:
                end_ns[opened.pop()] = mark_ns
            else:
                strays += 1
        end_ns[opened], clipped[opened] = last_ns, True
        return place, strays


def _select_times(times: SliceTimes, are_chosen: Sequence[bool]) -> SliceTimes:
    if all(are_chosen):
        return times
    places = np.flatnonzero(are_chosen)
    return SliceTimes(times.start_ns[places], times.length_ns[places], times.has_parts)


def _parents(start_ns: Int64s, end_ns: Int64s, line: Int64s, rounding_ns: int) -> Int32s:
    """Return the parent of each row, `NONE` without one.

    Rows are in the order of begins. A parent is the last row on the same line that began earlier and ends later, or up
    to `rounding_ns` earlier. A row that crosses another is no child of it. A range of torch.profiler with stacks
    crosses calls: it begins within one call of Python (`__enter__`) and ends within another.
    """
    parent_of_nested = _parents_of_nested(start_ns, end_ns, line)
    if parent_of_nested is not None:
        return parent_of_nested
    parents = array("i")
    opened: list[list[tuple[int, int]]] = [[] for _ in range(int(line.max(initial=-1)) + 1)]
    for row, (start, end, number) in enumerate(iterate_rows(start_ns, end_ns, line)):
        stack = opened[number]
        # A crossed row can contain no later row that this one does not contain.
        while stack and (stack[-1][0] <= start or stack[-1][0] < end - rounding_ns):
            stack.pop()
        parents.append(stack[-1][1] if stack else NONE)
        stack.append((end, row))
    return np.array(parents, dtype=np.int32)


def _parents_of_nested(start_ns: Int64s, end_ns: Int64s, line: Int64s) -> Int32s | None:
    """Return the parents if no rows of a line cross, else None. It takes a third of the time of a loop.

    The level of a row is the number of earlier rows of its line that have not ended at its begin. Its parent is the
    last earlier row of the level above.
    """
    count, length = len(line), int(end_ns.max(initial=0) - start_ns.min(initial=0)) + 1
    if not count or (int(line.max()) + 1) * length >= 1 << 62:
        return None
    order = np.argsort(line, kind="stable")
    moved = line[order] * length - int(start_ns.min())  # the lines one after another
    starts, ends, numbers = start_ns[order] + moved, end_ns[order] + moved, np.arange(count)
    # A row without a length ends as it begins, and so do those of the same time behind it.
    empty = np.append(0, np.cumsum(starts == ends))
    not_begun = empty[np.searchsorted(starts, starts, "right")] - empty[:-1]
    level = numbers - np.searchsorted(np.sort(ends), starts, "right") + not_begun
    by_level = np.argsort(level, kind="stable")
    keys = level[by_level] * count + by_level
    above = by_level[np.searchsorted(keys, (level - 1) * count + numbers) - 1]
    is_inner = level > 0
    if (is_inner & ((level[above] != level - 1) | (ends[above] < ends) | (ends[above] <= starts))).any():
        return None
    parents = np.full(count, NONE, dtype=np.int32)
    parents[order] = np.where(is_inner, order[above], NONE)
    return parents


# OwnSlices


class OwnSlices:
    """Reads the arguments of slices, the device intervals and the samples in a file of `dump`."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        if not -FARTHEST_NS < metadata.base_ns < FARTHEST_NS:
            raise ValueError("it has a time out of range; it is damaged")
        self._numbers = {name: array("q") for name in (*_NUMBERS, "error")}
        self._errors: dict[str | None, int] = {None: NONE}
        self._clipped: list[int] = []
        self._remote: dict[int, RemoteParent] = {}
        self._attributes = GatheredAttributes(_refuse_attributes)
        self._samples: list[Sample] = []
        self._intervals = {name: array("q") for name in _OF_INTERVALS}
        self._labels: dict[str, int] = {}
        self._waiting: list[Arguments] = []

    def add(
        self, events: list[TraceEvent], slices: list[TraceEvent], times: SliceTimes
    ) -> tuple[list[TraceEvent], SliceTimes]:
        """Read events and slices' arguments. Return the slices of spans, and their times, for `add_rows`."""
        for event in events:
            if event.ph == "C":
                self._add_sample(event)
        if len(self._samples) > LIMIT_SPANS:
            raise ValueError(f"it has more than {LIMIT_SPANS} samples; record less into one file")
        are_ends = [event.ph == "E" or event.ph == "e" for event in slices]
        arguments = decode_arguments([event.args for event, is_end in zip(slices, are_ends, strict=True) if not is_end])
        self._waiting = [entry for entry in arguments if entry.owner is UNSET]
        if len(self._waiting) == len(arguments):
            return slices, times
        of_begin = iter(arguments)
        of_spans = [is_end or next(of_begin).owner is UNSET for is_end in are_ends]
        of_device = [not is_of_span for is_of_span in of_spans]
        self._add_intervals([entry for entry in arguments if entry.owner is not UNSET], _select_times(times, of_device))
        return [*compress(slices, of_spans)], _select_times(times, of_spans)

    def _add_sample(self, event: TraceEvent) -> None:
        pid = checked(event.pid, int)
        (value,) = json.loads(bytes(event.args)).values()
        device = pid - DEVICE_PIDS if pid >= DEVICE_PIDS else HOST
        at_ns = self._metadata.base_ns + nanoseconds(event.ts)
        self._samples.append(Sample(checked(event.name, str), device, at_ns, checked(value, float, int)))

    def add_rows(self, slices: list[TraceEvent]) -> list[int]:
        """Add the arguments of complete slices and begins of spans. Return the thread of each."""
        arguments, self._waiting = self._waiting, []
        first = len(self._numbers["error"])
        for name in _NUMBERS:
            _extend(self._numbers[name], _numbers(arguments, name))
        errors, names = self._errors, map(attrgetter("error"), arguments)
        _extend(self._numbers["error"], [
            NONE if name is UNSET or name is None else errors.setdefault(name, len(errors) - 1) for name in names
        ])  # fmt: skip
        for row, entry in enumerate(arguments, first):
            if entry.clipped is True:
                self._clipped.append(row)
            if entry.attributes is not UNSET:
                text = bytes(entry.attributes)
                self._attributes.add(row, to_json(json.loads(text)) if b"\\" in text else text)
            if entry.remote:
                self._remote[row] = entry.remote.parent()
        tids: list[Any] = [event.tid for event in slices]
        return [tid if entry.thread is UNSET else entry.thread for tid, entry in zip(tids, arguments, strict=True)]

    def _add_intervals(self, arguments: list[Arguments], times: SliceTimes) -> None:
        columns, labels = self._intervals, list(map(attrgetter("label"), arguments))
        number_by_label = {
            label: self._labels.setdefault("exclusive" if label is UNSET else label, len(self._labels))
            for label in dict.fromkeys(labels)
        }
        for name in ("owner", "place", "uncertainty_ns"):
            _extend(columns[name], _numbers(arguments, name, 0))
        _extend(columns["device"], _numbers(arguments, "device"))
        streams = zip(_numbers(arguments, "stream"), _numbers(arguments, "enclosing_stream"), strict=True)
        _extend(columns["stream"], [enclosing if stream == UNTOLD else stream for stream, enclosing in streams])
        _extend(columns["label"], list(map(number_by_label.__getitem__, labels)))
        columns["start_ns"].frombytes(times.start_ns.tobytes())
        columns["end_ns"].frombytes((times.start_ns + times.length_ns).tobytes())

    def trace(self, rows: Rows) -> Trace:
        """Return the trace of the spans, with all other facts."""
        if rows.clipped.any() or rows.strays:
            raise ValueError("an async slice in it never begins or never ends; write or copy it again")
        base_ns, sites = self._metadata.base_ns, tuple(self._metadata.sites)
        total_ns = rows.end_ns - rows.start_ns
        span_id, site, task_id = (self._ordered(name, rows) for name in ("id", "site", "task"))
        if (span_id == UNTOLD).any() or not lie_within(site, 0, len(sites)):
            raise ValueError("a slice in it belongs to no span or site; it is damaged")
        parent_id = _with_default(self._ordered("parent", rows), np.append(span_id, 0)[rows.around])
        clipped = np.zeros(len(span_id), dtype=np.bool_)
        clipped[rows.rank[self._clipped]] = True
        # The task is that of the first slice on the line.
        first_of_line = np.zeros(int(rows.line.max(initial=-1)) + 1, dtype=np.int64)
        first_of_line[rows.line[::-1]] = np.arange(len(span_id))[::-1]
        task_id = _with_default(_with_default(task_id, task_id[first_of_line[rows.line]]), np.int64(0))
        columns = Columns(
            sites=sites,
            errors=tuple(error for error in self._errors if error is not None),
            span_id=span_id,
            parent_id=parent_id,
            root_id=_roots(span_id, parent_id, self._ordered("root", rows)),
            thread_id=rows.thread_id,
            task_id=task_id,
            start_ns=rows.start_ns + base_ns,
            end_ns=rows.end_ns + base_ns,
            active_ns=_with_default(self._ordered("active_ns", rows), total_ns),
            self_ns=_with_default(self._ordered("self_ns", rows), total_ns),
            site=site.astype(np.int32),
            error=self._ordered("error", rows).astype(np.int32),
            clipped=clipped,
            device=self._device(span_id, base_ns),
            attributes=self._attributes.packed(rows.rank),
            remote={int(rows.rank[row]): remote for row, remote in self._remote.items()},
            own_id=_with_default(self._ordered("own_id", rows), span_id),
        )
        return self._metadata.trace(SpanViews(columns), self._samples)

    def _ordered(self, name: str, rows: Rows) -> Int64s:
        return column(self._numbers.pop(name))[rows.order]

    def _device(self, span_id: Int64s, base_ns: int) -> DeviceIntervals:
        """Return the device intervals of spans in the order of rows, without those of missing spans."""
        columns = {name: column(self._intervals.pop(name)) for name in _OF_INTERVALS}
        if any((columns[name] == UNTOLD).any() for name in ("device", "stream")) or (columns["place"] < 0).any():
            raise ValueError("an interval in it belongs to no device, stream or site; it is damaged")
        rows: Int32s = rows_of(span_id, columns.pop("owner"))
        order = np.lexsort((columns.pop("place"), rows))
        order = order[rows[order] != NONE]
        ordered = {name: numbers[order] for name, numbers in columns.items()}
        ordered |= {name: ordered[name] + base_ns for name in ("start_ns", "end_ns")}
        label = ordered.pop("label").astype(np.int32)
        return DeviceIntervals(row=rows[order], **ordered, label=label, labels=tuple(self._labels))


def _numbers(arguments: list[Arguments], name: str, otherwise: int = UNTOLD) -> list[int]:
    numbers = list(map(attrgetter(name), arguments))
    unset = numbers.count(UNSET)
    if unset == len(numbers):
        return [otherwise] * unset
    return [otherwise if number is UNSET else number for number in numbers] if unset else numbers


def _extend(column: array[int], numbers: Sequence[int]) -> None:
    """Append 64-bit numbers to a column. `array.extend` takes four times as long."""
    column.frombytes(pack(f"{len(numbers)}q", *numbers))


def _with_default(numbers: Int64s, otherwise: Int64s | np.int64) -> Int64s:
    """Return the numbers, with `otherwise` in place of omitted ones."""
    return np.where(numbers == UNTOLD, otherwise, numbers)


def _roots(span_id: Int64s, parent_id: Int64s, root_id: Int64s) -> Int64s:
    """Return the root id of each row: the given one, else the parent's, else its own."""
    parent: NDArray[np.int32] = rows_of(span_id, parent_id)
    parent[(parent_id == 0) | (root_id != UNTOLD)] = NONE
    top = topmost_rows(parent)
    return _with_default(root_id[top], np.where(parent_id[top] == 0, span_id[top], parent_id[top]))


_PLAIN = bytes(set(range(0x20, 0x7F)) - {*b"[{"})
"""The bytes of a flat JSON object of texts and numbers, except its first `{`."""


def _refuse_attributes(text: bytes) -> None:
    # The text is valid JSON already. A flat object without numbers that are too long for Python needs no check.
    if text.startswith(b"{") and len(text) < LONGEST_PLAIN and text.translate(None, _PLAIN) == b"{":
        return
    for value in checked(json.loads(text), dict).values():
        convert_lists(value)
