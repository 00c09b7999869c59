"""Slices of a trace into columns, of any writer.

Slices nest that are on one line: that of a thread, or of an async key. The innermost slice around another is its parent
unless its arguments name one. The arguments of ours have ids, and the numbers that do not follow from other slices;
those of other profilers are read by `others`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from decimal import Decimal
from operator import attrgetter
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from instrument.chrome.events import Arguments, LeftOut, TraceEvent, decoded_arguments, fault_of, times_ns
from instrument.chrome.lanes import DEVICE_PIDS, one_by_one
from instrument.chrome.others import Others, Rows
from instrument.chrome.paddle_traces import thread_of
from instrument.recording.remote_parents import RemoteParent
from instrument.recording.spans import HOST, Sample
from instrument.trace.columns import FARTHEST_NS, Bools, Columns, DeviceIntervals, Int32s, Int64s, lie_within
from instrument.trace.forest import NONE, rows_of, tops
from instrument.trace.layout import GatheredAttributes, as_tuples, column, rank_of, written
from instrument.trace.metadata import Metadata
from instrument.trace.text import INT64, LIMIT_SPANS, LIMIT_US, LONGEST_PLAIN, checked, nanoseconds
from instrument.trace.trace import SpanViews, Trace

_LIMIT_NS = LIMIT_US * 1000
_PARTS_NS = 1e-3

LIMIT_EVENTS = 5 * LIMIT_SPANS
"""More events, slices or not, are in no file that may be read."""

UNTOLD = -INT64
"""In place of a number that a slice of ours does not name."""

_SLICES = frozenset("XBEbe")
_NUMBERS = ("id", "site", "parent", "root", "own_id", "task", "self_ns", "active_ns")
_OF_INTERVALS = ("owner", "place", "device", "stream", "start_ns", "end_ns", "label", "uncertainty_ns")


class Slices:
    """Reads slices, whether complete, of begins and ends, or async, in the order of the file."""

    def __init__(self, left_out: LeftOut, ours: Metadata | None = None) -> None:
        self._left_out = left_out
        self._ours = None if ours is None else Ours(ours)
        self.others = Others(left_out)
        self._seen = self.count = self._rounding_ns = 0
        self._start_ns, self._end_ns, self._thread_id, self._line = array("q"), array("q"), array("q"), array("q")
        # Begins, each with its row, and ends, with none: all of a thread or of an async key have one number.
        self._mark_ns, self._mark_row, self._mark_of = array("q"), array("q"), array("q")
        self._lines: dict[tuple[Any, ...], int] = {}
        self._lanes: dict[tuple[Any, Any], int] = {}
        self._tasks: dict[int, int] = {}

    def add(self, events: list[TraceEvent]) -> None:
        """Read events, which come after those that have been read."""
        first, self._seen = self._seen + 1, self._seen + len(events)
        if self._seen > LIMIT_EVENTS:
            raise ValueError(f"it has more than {LIMIT_EVENTS} events; record less into one file")
        slices: list[TraceEvent] = []
        numbers: list[int] = []
        for number, event in enumerate(events, first):
            # The slice of "Trace" is how long torch.profiler watched, which is no call.
            if event.ph in _SLICES and not (event.cat == "Trace" and event.pid == "Spans"):
                fault = fault_of(event, self._left_out, number)
                if fault:
                    self._left_out.add(fault, f"event {number}")
                else:
                    slices.append(event)
                    numbers.append(number)
        self.count += len(slices)
        if self.count > LIMIT_SPANS:
            raise ValueError(f"it has more than {LIMIT_SPANS} events; record less into one file")
        if self._ours is None:
            self._add(self.others.without_zeros(slices, numbers))
            self.others.add(events, first)
        else:
            self._add(self._ours.add(events, slices))

    def _add(self, slices: list[TraceEvent]) -> None:
        begun = [one for one in slices if one.ph != "E" and one.ph != "e"]
        if begun:
            self._add_rows(begun)
        if any(one.ph != "X" for one in slices):
            self._add_marks(slices)

    def _add_rows(self, slices: list[TraceEvent]) -> None:
        """Add slices that are complete, or begin."""
        starts_us: list[Any] = [one.ts for one in slices]
        lengths_us: list[Any] = [one.dur if one.ph == "X" else 0 for one in slices]
        start_ns, length_ns = times_ns(starts_us, _LIMIT_NS), times_ns(lengths_us, _LIMIT_NS)
        if not self._rounding_ns and any(map(_has_parts, (starts_us, lengths_us), (start_ns, length_ns))):
            self._rounding_ns = 1
        end_ns = start_ns + length_ns
        if self._ours is None:
            self._thread_id.extend(self.others.add_rows(slices, start_ns, end_ns))
        else:
            self._thread_id.extend(self._ours.add_rows(slices))
        keys, lanes = [(one.pid, one.tid) for one in slices], self._lanes
        self._line.extend([lanes[key] if key in lanes else self._line_of(key) for key in keys])
        self._start_ns.extend(start_ns.tolist())
        self._end_ns.extend(end_ns.tolist())

    def _line_of(self, key: tuple[Any, Any]) -> int:
        pid, tid = key
        line = self._lanes[key] = self._lines.setdefault((pid, thread_of(tid)), len(self._lines))
        return line

    def _add_marks(self, slices: list[TraceEvent]) -> None:
        """Add the begins and ends among slices; the begins are rows already, the last that there are."""
        row = len(self._start_ns) - sum(one.ph != "E" and one.ph != "e" for one in slices)
        for event, at_ns in zip(slices, times_ns([one.ts for one in slices], _LIMIT_NS).tolist(), strict=True):
            phase = event.ph
            if phase == "X":
                row += 1
                continue
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
                row += 1
            else:
                self._mark_row.append(NONE)

    # What has been read

    def trace(self) -> Trace:
        """Return the slices as spans, with all else."""
        if self._ours is None:
            self._add(self.others.zeros())
        rows = self._rows()
        return self.others.trace(rows) if self._ours is None else self._ours.trace(rows)

    def _rows(self) -> Rows:
        start_ns, end_ns, line, thread_id = map(self._column, ("_start_ns", "_end_ns", "_line", "_thread_id"))
        clipped = np.zeros(len(start_ns), dtype=np.bool_)
        order_in_file, strays = self._close_marks(end_ns, clipped)
        # Those that begin and end at once stay as they are in the file.
        order = np.lexsort((order_in_file, -end_ns, start_ns))
        start_ns, end_ns, line, thread_id = start_ns[order], end_ns[order], line[order], thread_id[order]
        around = _parents(start_ns, end_ns, line, self._rounding_ns)
        task_of_line = np.zeros(len(self._lines), dtype=np.int64)
        task_of_line[list(self._tasks)] = list(self._tasks.values())
        its = thread_id, task_of_line[line], around, clipped[order], strays
        return Rows(order, rank_of(order), start_ns, end_ns, line, *its)

    def _column(self, name: str) -> Int64s:
        """Return numbers that are as large as what becomes of them, and keep them no longer."""
        return column(vars(self).pop(name))

    def _close_marks(self, end_ns: Int64s, clipped: Bools) -> tuple[Int64s, int]:
        """End what begins and ends make, by time like a stack. Return where each row is in the file, those that are not
        complete behind all others, and how many ends had no begin."""
        place = np.arange(len(end_ns), dtype=np.int64)
        if not len(self._mark_ns):
            return place, 0
        at_ns, of, rows = map(self._column, ("_mark_ns", "_mark_of", "_mark_row"))
        last_ns = max(int(at_ns.max()), int(end_ns.max(initial=int(at_ns[0]))))
        order = np.lexsort((at_ns, of))
        opened: list[int] = []
        strays, known, before = 0, len(place), NONE
        for mark_ns, line, row in one_by_one(at_ns[order], of[order], rows[order]):
            if line != before:
                end_ns[opened], clipped[opened] = last_ns, True
                opened, before = [], line
            if row != NONE:
                opened.append(row)
                place[row] = known
                known += 1
            elif opened:
                end_ns[opened.pop()] = mark_ns
            else:
                strays += 1
        end_ns[opened], clipped[opened] = last_ns, True
        return place, strays


def _has_parts(times_us: Sequence[Any], found_ns: Int64s) -> bool:
    """Return True where a time has a fraction of a nanosecond, within the precision of floats."""
    if not times_us or type(times_us[0]) is Decimal:
        return any(type(time) is Decimal and time * 1000 % 1 for time in times_us)
    exact_ns = np.array(times_us, dtype=np.float64) * 1000
    return bool((np.abs(exact_ns - found_ns) > _PARTS_NS + np.abs(exact_ns) * np.finfo(np.float64).eps).any())


def _parents(start_ns: Int64s, end_ns: Int64s, line: Int64s, rounding_ns: int) -> Int32s:
    """Return the parent of each row, NONE for a row without one. The rows are in the order of their begins.

    A parent is the last row on the same line that began before and ends after, up to `rounding_ns` earlier. A row
    that crosses another is no child of it. A range of torch.profiler with stacks crosses calls: it begins within one
    call of Python (`__enter__`) and ends within another.
    """
    parents = array("i")
    opened: list[list[tuple[int, int]]] = [[] for _ in range(int(line.max(initial=-1)) + 1)]
    for row, (start, end, its) in enumerate(one_by_one(start_ns, end_ns, line)):
        stack = opened[its]
        # A row that it crosses holds nothing from here on that it does not hold itself.
        while stack and (stack[-1][0] <= start or stack[-1][0] < end - rounding_ns):
            stack.pop()
        parents.append(stack[-1][1] if stack else NONE)
        stack.append((end, row))
    return np.array(parents, dtype=np.int32)


# Ours


class Ours:
    """Reads the arguments of slices in a file that `dump` wrote, its device intervals and its gauges."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        if not -FARTHEST_NS < metadata.base_ns < FARTHEST_NS:
            raise ValueError("it has a time that no clock reads; it is damaged")
        self._numbers = {name: array("q") for name in (*_NUMBERS, "error")}
        self._errors: dict[str | None, int] = {None: NONE}
        self._clipped: list[int] = []
        self._remote: dict[int, RemoteParent] = {}
        self._attributes = GatheredAttributes(_refuse_attributes)
        self._samples: list[Sample] = []
        self._intervals = {name: array("q") for name in _OF_INTERVALS}
        self._labels: dict[str, int] = {}
        self._waiting: list[Arguments] = []

    def add(self, events: list[TraceEvent], slices: list[TraceEvent]) -> list[TraceEvent]:
        """Read events and the arguments of slices. Return the slices of spans, for which `add_rows` is called next."""
        for event in events:
            if event.ph == "C":
                self._add_sample(event)
        if len(self._samples) > LIMIT_SPANS:
            raise ValueError(f"it has more than {LIMIT_SPANS} samples; record less into one file")
        begun = [one for one in slices if one.ph != "E" and one.ph != "e"]
        found = decoded_arguments([one.args for one in begun])
        self._waiting = [one for one in found if one.owner is UNSET]
        if len(self._waiting) == len(found):
            return slices
        of_device = [(event, one) for event, one in zip(begun, found, strict=True) if one.owner is not UNSET]
        self._add_intervals([event for event, _ in of_device], [one for _, one in of_device])
        wanted = {id(event) for event, _ in of_device}
        return [one for one in slices if id(one) not in wanted]

    def _add_sample(self, event: TraceEvent) -> None:
        pid = checked(event.pid, int)
        (value,) = json.loads(bytes(event.args)).values()
        device = pid - DEVICE_PIDS if pid >= DEVICE_PIDS else HOST
        at_ns = self._metadata.base_ns + nanoseconds(event.ts)
        self._samples.append(Sample(checked(event.name, str), device, at_ns, checked(value, float, int)))

    def add_rows(self, slices: list[TraceEvent]) -> list[int]:
        """Add the arguments of the slices of spans that complete or begin. Return the thread of each."""
        found, self._waiting = self._waiting, []
        first = len(self._numbers["error"])
        for name in _NUMBERS:
            self._numbers[name].extend(_numbers(found, name))
        errors = self._errors
        self._numbers["error"].extend([
            NONE if one.error is UNSET or one.error is None else errors.setdefault(one.error, len(errors) - 1)
            for one in found
        ])  # fmt: skip
        for row, one in enumerate(found, first):
            if one.clipped is True:
                self._clipped.append(row)
            if one.attributes is not UNSET:
                text = bytes(one.attributes)
                self._attributes.add(row, written(json.loads(text)) if b"\\" in text else text)
            if one.remote:
                self._remote[row] = one.remote.parent()
        tids: list[Any] = [one.tid for one in slices]
        return [tid if one.thread is UNSET else one.thread for tid, one in zip(tids, found, strict=True)]

    def _add_intervals(self, slices: list[TraceEvent], found: list[Arguments]) -> None:
        start_ns = times_ns([one.ts for one in slices], _LIMIT_NS)
        end_ns = start_ns + times_ns([one.dur for one in slices], _LIMIT_NS)
        labels, its = self._labels, self._intervals
        for name in ("owner", "place", "uncertainty_ns"):
            its[name].extend(_numbers(found, name, 0))
        its["device"].extend(_numbers(found, "device"))
        streams = zip(_numbers(found, "stream"), _numbers(found, "enclosing_stream"), strict=True)
        its["stream"].extend([other if stream == UNTOLD else stream for stream, other in streams])
        its["label"].extend([
            labels.setdefault("exclusive" if one.label is UNSET else one.label, len(labels)) for one in found
        ])  # fmt: skip
        its["start_ns"].extend(start_ns.tolist())
        its["end_ns"].extend(end_ns.tolist())

    def trace(self, rows: Rows) -> Trace:
        """Return the spans, with all else."""
        if rows.clipped.any() or rows.strays:
            raise ValueError("an async slice in it never begins or never ends; write or copy it again")
        base_ns, sites = self._metadata.base_ns, tuple(self._metadata.sites)
        total_ns = rows.end_ns - rows.start_ns
        span_id, site, task_id = (self._taken(name, rows) for name in ("id", "site", "task"))
        if (span_id == UNTOLD).any() or not lie_within(site, 0, len(sites)):
            raise ValueError("a slice in it is of no span or no place; it is damaged")
        parent_id = _or(self._taken("parent", rows), np.append(span_id, 0)[rows.around])
        clipped = np.zeros(len(span_id), dtype=np.bool_)
        clipped[rows.rank[self._clipped]] = True
        # The task is that of the first slice on the line.
        first_of_line = np.zeros(int(rows.line.max(initial=-1)) + 1, dtype=np.int64)
        first_of_line[rows.line[::-1]] = np.arange(len(span_id))[::-1]
        task_id = _or(_or(task_id, task_id[first_of_line[rows.line]]), np.int64(0))
        found = Columns(
            sites=sites,
            errors=tuple(error for error in self._errors if error is not None),
            span_id=span_id,
            parent_id=parent_id,
            root_id=_roots(span_id, parent_id, self._taken("root", rows)),
            thread_id=rows.thread_id,
            task_id=task_id,
            start_ns=rows.start_ns + base_ns,
            end_ns=rows.end_ns + base_ns,
            active_ns=_or(self._taken("active_ns", rows), total_ns),
            self_ns=_or(self._taken("self_ns", rows), total_ns),
            site=site.astype(np.int32),
            error=self._taken("error", rows).astype(np.int32),
            clipped=clipped,
            device=self._device(span_id, base_ns),
            attributes=self._attributes.packed(rows.rank),
            remote={int(rows.rank[row]): remote for row, remote in self._remote.items()},
            own_id=_or(self._taken("own_id", rows), span_id),
        )
        return self._metadata.trace(SpanViews(found), self._samples)

    def _taken(self, name: str, rows: Rows) -> Int64s:
        return column(self._numbers.pop(name))[rows.order]

    def _device(self, span_id: Int64s, base_ns: int) -> DeviceIntervals:
        """Return the intervals of each span by their places; those of spans that are not there are left out."""
        its = {name: column(self._intervals.pop(name)) for name in _OF_INTERVALS}
        if any((its[name] == UNTOLD).any() for name in ("device", "stream")) or (its["place"] < 0).any():
            raise ValueError("an interval in it is of no device, stream or place; it is damaged")
        rows: Int32s = rows_of(span_id, its.pop("owner"))
        order = np.lexsort((its.pop("place"), rows))
        order = order[rows[order] != NONE]
        kept = {name: numbers[order] for name, numbers in its.items()}
        kept |= {name: kept[name] + base_ns for name in ("start_ns", "end_ns")}
        label = kept.pop("label").astype(np.int32)
        return DeviceIntervals(row=rows[order], **kept, label=label, labels=tuple(self._labels))


def _numbers(found: list[Arguments], name: str, otherwise: int = UNTOLD) -> list[int]:
    numbers = list(map(attrgetter(name), found))
    return [otherwise if number is UNSET else number for number in numbers] if UNSET in numbers else numbers


def _or(numbers: Int64s, otherwise: Int64s | np.int64) -> Int64s:
    """Return the numbers, and others in place of those that are not named."""
    return np.where(numbers == UNTOLD, otherwise, numbers)


def _roots(span_id: Int64s, parent_id: Int64s, root_id: Int64s) -> Int64s:
    """Return the tree of each row: the one that it names, else that of its parent, else it begins one."""
    parent: NDArray[np.int32] = rows_of(span_id, parent_id)
    parent[(parent_id == 0) | (root_id != UNTOLD)] = NONE
    top = tops(parent)
    return _or(root_id[top], np.where(parent_id[top] == 0, span_id[top], parent_id[top]))


_PLAIN = bytes(set(range(0x20, 0x7F)) - {*b"[{"})
"""Characters of JSON that is an object of texts and numbers alone, but for the brace that it begins with."""


def _refuse_attributes(text: bytes) -> None:
    # It has been read as JSON once: of what is plain and has no number too long for Python nothing is to be refused.
    if text.startswith(b"{") and len(text) < LONGEST_PLAIN and text.translate(None, _PLAIN) == b"{":
        return
    for value in checked(json.loads(text), dict).values():
        as_tuples(value)
