"""Converts the slices of a trace file into columns, for files of any profiler.

The parent of a slice is the innermost slice around it on the same thread. The parent of an async slice has the same
key. The arguments of a slice may name another parent. `torch_traces` reads the arguments of foreign slices.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from instrument.chrome.event_reading import (
    Block,
    EventBatch,
    LeftOut,
    OwnEvent,
    has_valid_times,
    make_block,
    make_valid_block,
    read_phases,
)
from instrument.chrome.lanes import DEVICE_PIDS, iterate_rows
from instrument.chrome.slice_arguments import UNTOLD, Arguments
from instrument.chrome.torch_traces import ForeignSlices, NumberByKey, NumberedLanes, Rows
from instrument.recording.spans import HOST, Sample
from instrument.recording.trace_context import RemoteParent
from instrument.trace.columns import FARTHEST_NS, Bools, Columns, DeviceIntervals, Int32s, Int64s, are_in_range
from instrument.trace.indices import (
    NONE,
    find_rows,
    invert_order,
    make_mask,
    sort_stably,
    topmost_rows,
    view_as_int64s,
)
from instrument.trace.metadata import Metadata
from instrument.trace.text import (
    LIMIT_SPANS,
    LIMIT_US,
    LONGEST_PLAIN,
    GatheredAttributes,
    attributes_to_json,
    check_type,
    convert_to_ns,
    convert_to_tuples,
)
from instrument.trace.trace import SpanViews, Trace

_LIMIT_NS = LIMIT_US * 1000

LIMIT_EVENTS = 5 * LIMIT_SPANS
"""The maximum number of events in a file, including those that are no slices."""

_IS_SLICE = make_mask(np.frombuffer(b"XBEbe", np.uint8), 1 << 8)
_IS_BEGIN = make_mask(np.frombuffer(b"XBb", np.uint8), 1 << 8)

# Comprehensions with a fixed attribute take half the time of `attrgetter`.
_READ_FIELD: dict[str, Callable[[Sequence[Any]], list[Any]]] = {
    "id": lambda arguments: [some.id for some in arguments],
    "site": lambda arguments: [some.site for some in arguments],
    "parent": lambda arguments: [some.parent for some in arguments],
    "root": lambda arguments: [some.root for some in arguments],
    "own_id": lambda arguments: [some.own_id for some in arguments],
    "task": lambda arguments: [some.task for some in arguments],
    "self_ns": lambda arguments: [some.self_ns for some in arguments],
    "active_ns": lambda arguments: [some.active_ns for some in arguments],
    "total_ns": lambda arguments: [some.total_ns for some in arguments],
    "thread": lambda arguments: [some.thread for some in arguments],
    "owner": lambda arguments: [some.owner for some in arguments],
    "place": lambda arguments: [some.place for some in arguments],
    "uncertainty_ns": lambda arguments: [some.uncertainty_ns for some in arguments],
    "device": lambda arguments: [some.device for some in arguments],
    "stream": lambda arguments: [some.stream for some in arguments],
    "enclosing_stream": lambda arguments: [some.enclosing_stream for some in arguments],
    "error": lambda arguments: [some.error for some in arguments],
    "clipped": lambda arguments: [some.clipped for some in arguments],
    "attributes": lambda arguments: [some.attributes for some in arguments],
    "remote": lambda arguments: [some.remote for some in arguments],
    "label": lambda arguments: [some.label for some in arguments],
}
_NUMBERS = ("id", "site", "parent", "root", "own_id", "task", "self_ns", "active_ns", "thread")
_NUMBERS_OF_INTERVALS = ("owner", "place", "uncertainty_ns", "device", "stream", "enclosing_stream")
_OF_INTERVALS = ("owner", "place", "device", "stream", "start_ns", "end_ns", "label", "uncertainty_ns")


_NO_NUMBERS: Int64s = np.zeros(0, np.int64)
_NOTHING = _NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS


class Slices:
    """Reads the slices of a file: complete slices, begin and end events, and async slices."""

    def __init__(self, left_out: LeftOut, ours: Metadata | None = None) -> None:
        self._left_out = left_out
        self._ours = None if ours is None else OwnSlices(ours)
        self.others = ForeignSlices(left_out)
        self._lanes = self.others.lanes if self._ours is None else NumberedLanes(are_ours=True)
        self._seen = self.count = self._row_count = self._rounding_ns = 0
        # Parts of the columns of rows: start, end and lane. Marks are begins with their rows, and ends without one: the
        # time, the row, and the line of a thread or of an async key.
        self._row_parts, self._mark_parts = [_NOTHING], [_NOTHING]
        self._tasks: dict[int, None] = {}

    def add_events(self, batch: EventBatch) -> None:
        events = batch.events
        first, self._seen = self._seen + 1, self._seen + len(events)
        if self._seen > LIMIT_EVENTS:
            raise ValueError(f"it has more than {LIMIT_EVENTS} events; record less into one file")
        phases = read_phases(events)
        are_slices = (_IS_BEGIN if self._ours is not None and self._ours.has_lengths else _IS_SLICE)[phases]
        if self._ours is None:
            # The slice of "Trace" is the time of torch.profiler itself, no call.
            are_slices &= [event.cat != "Trace" or event.pid != "Spans" for event in events]
        slices = events if are_slices.all() else [*compress(events, are_slices.tolist())]
        block = make_valid_block(batch, slices, phases, are_slices)
        if block is None:
            numbered = zip(slices, (first + np.flatnonzero(are_slices)).tolist(), strict=True)
            slices = [event for event, number in numbered if has_valid_times(event, self._left_out, number)]
            block = make_block(slices, _LIMIT_NS)
        self.count += len(slices)
        if self.count > LIMIT_SPANS:
            raise ValueError(f"it has more than {LIMIT_SPANS} slices; record less into one file")
        if self._ours is None:
            remaining = self.others.hold_back_slices_at_zero(block, events, first)
            self._add_block(block if remaining is block.slices else make_block(remaining, _LIMIT_NS))
            self.others.read_other_events(events, first)
        else:
            self._add_block(self._ours.add_events(events, block))

    def _add_block(self, block: Block) -> None:
        if block.are_begins.any():
            self._add_slice_begins(block.select(block.are_begins))
        are_marks = block.phases != ord("X")
        if are_marks.any():
            self._add_begin_and_end_events(block, are_marks)

    def _add_slice_begins(self, block: Block) -> None:
        self._rounding_ns = max(self._rounding_ns, int(block.has_parts))
        start_ns, end_ns = block.start_ns.copy(), block.start_ns + block.length_ns
        lanes = self._lanes.number_lanes_of_events(block.slices)
        if self._ours is None:
            self.others.add_slices(block, lanes, start_ns, end_ns)
        else:
            self._ours.add_arguments()
        self._row_parts.append((start_ns, end_ns, lanes))
        self._row_count += len(lanes)

    def _add_begin_and_end_events(self, block: Block, are_marks: Bools) -> None:
        rows: Int64s = np.cumsum(block.are_begins)
        rows += self._row_count - 1 - rows[-1]
        phases = block.phases[are_marks]
        marks = [*compress(block.slices, are_marks.tolist())]
        if self._ours is None:
            keys = [
                (event.pid, event.cat, event.id, event.id2) if event.ph.islower() else (event.pid, event.tid)
                for event in marks
            ]
        else:  # the local ids of `dump` are unique in the file
            keys = [event.id2.local for event in marks]
        lines = self._lanes.number_lines_of_keys(keys)
        rows = np.where(block.are_begins, rows, NONE)
        self._mark_parts.append((block.start_ns[are_marks], rows[are_marks], lines))
        self._tasks |= dict.fromkeys(lines[phases == ord("b")].tolist())

    # Results

    def build_trace(self) -> Trace:
        if self._ours is None:
            self._add_block(make_block(self.others.slices_waiting_at_zero(), _LIMIT_NS))
        rows = self._order_slices()
        return self.others.make_trace(rows) if self._ours is None else self._ours.assemble_trace(rows)

    def _order_slices(self) -> Rows:
        start_ns, end_ns, lane = map(np.concatenate, zip(*self._row_parts, strict=True))
        self._row_parts.clear()
        line, thread_id = view_as_int64s(self._lanes.line)[lane], view_as_int64s(self._lanes.thread_id)[lane]
        clipped = np.zeros(len(start_ns), dtype=np.bool_)
        order_in_file, strays = self._match_slice_ends(end_ns, line, clipped)
        order = _sort_rows(start_ns, end_ns, order_in_file)
        start_ns, end_ns, line, thread_id = start_ns[order], end_ns[order], line[order], thread_id[order]
        around = _find_parents(start_ns, end_ns, line, self._rounding_ns)
        task_of_line = np.zeros(len(self._lanes.lines), dtype=np.int64)
        task_of_line[list(self._tasks)] = np.arange(1, 1 + len(self._tasks))
        further = thread_id, task_of_line[line], around, clipped[order], strays
        return Rows(order, invert_order(order), start_ns, end_ns, line, *further)

    def _match_slice_ends(self, end_ns: Int64s, line_of_row: Int64s, clipped: Bools) -> tuple[Int64s, int]:
        """Match begin events with end events. Set the line of each slice, and the end if the file has no lengths.

        Return the order of all slices in the file, and the number of end events without a begin event.
        """
        place = np.arange(len(end_ns), dtype=np.int64)
        at_ns, rows, of = map(np.concatenate, zip(*self._mark_parts, strict=True))
        if not len(of) or (self._ours is not None and self._ours.has_lengths):
            is_begin = rows != NONE
            line_of_row[rows[is_begin]] = of[is_begin]
            place[rows[is_begin]] += len(place)
            return place, int(np.count_nonzero(~is_begin))
        last_ns = max(int(at_ns.max()), int(end_ns.max(initial=int(at_ns[0]))))
        if (at_ns[1:] < at_ns[:-1]).any():
            order = np.argsort(at_ns, kind="stable")
            at_ns, of, rows = at_ns[order], of[order], rows[order]
        order = sort_stably(of, len(self._lanes.lines))
        at_ns, of, rows = at_ns[order], of[order], rows[order]
        are_begins = rows != NONE
        line_of_row[rows[are_begins]] = of[are_begins]
        place[rows[are_begins]] = len(place) + np.arange(np.count_nonzero(are_begins))
        firsts = np.flatnonzero(np.diff(of, prepend=-1))
        line = np.repeat(np.arange(len(firsts)), np.diff(firsts, append=len(of)))
        steps = np.where(are_begins, 1, -1)
        depth = np.cumsum(steps)
        depth -= (depth - steps)[firsts][line]
        # An end below the least depth of its line before has no begin.
        offset = line * (len(of) + 1)
        least = np.minimum.accumulate(np.minimum(depth, 0) - offset) + offset
        before = np.roll(least, 1)
        before[firsts] = 0
        matched = np.flatnonzero(least == before)
        # Begins and ends of a depth take turns.
        matched = matched[np.lexsort(((depth - least + ~are_begins)[matched], of[matched]))]
        begins = are_begins[matched]
        closed = np.append(begins[:-1] & ~begins[1:], [False] * len(begins[:1]))
        end_ns[rows[matched[closed]]] = at_ns[matched[np.roll(closed, 1)]]
        opened = rows[matched[begins & ~closed]]
        end_ns[opened], clipped[opened] = last_ns, True
        return place, len(of) - len(matched)


def _sort_rows(start_ns: Int64s, end_ns: Int64s, order_in_file: Int64s) -> Int64s:
    """Return the order of rows by start. Of equal starts, the longest row is first. Equal rows keep their order."""
    before, after = slice(None, -1), slice(1, None)
    ties = (end_ns[after] < end_ns[before]) | (
        (end_ns[after] == end_ns[before]) & (order_in_file[after] > order_in_file[before])
    )
    if ((start_ns[after] > start_ns[before]) | ((start_ns[after] == start_ns[before]) & ties)).all():
        return np.arange(len(start_ns))  # far faster, and most files are in order
    return np.lexsort((order_in_file, -end_ns, start_ns))


def _find_parents(start_ns: Int64s, end_ns: Int64s, line: Int64s, rounding_ns: int) -> Int32s:
    """Return the parent of each row, or `NONE`. The parent is the innermost enclosing row on the same line.

    A parent may end up to `rounding_ns` before the child. A row that overlaps only in part is no parent.
    """
    parent_of_nested = _find_parents_if_nested(start_ns, end_ns, line)
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


def _find_parents_if_nested(start_ns: Int64s, end_ns: Int64s, line: Int64s) -> Int32s | None:
    count, length = len(line), int(end_ns.max(initial=0) - start_ns.min(initial=0)) + 1
    if not count or (int(line.max()) + 1) * length >= 1 << 62:
        return None
    order = sort_stably(line, int(line.max()) + 1)
    moved = line[order] * length - int(start_ns.min())  # the lines one after another
    starts, ends, numbers = start_ns[order] + moved, end_ns[order] + moved, np.arange(count)
    # A row without a length ends as it begins, and so do those of the same time behind it.
    empty = np.append(0, np.cumsum(starts == ends))
    not_begun = empty[np.searchsorted(starts, starts, "right")] - empty[:-1]
    level = numbers - np.searchsorted(np.sort(ends), starts, "right") + not_begun
    by_level = sort_stably(level, int(level.max()) + 1)
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
    """Reads the spans, device intervals and samples of a file that `dump` has written."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        if not -FARTHEST_NS < metadata.base_ns < FARTHEST_NS:
            raise ValueError("it has a time out of range; it is damaged")
        self._numbers: dict[str, list[Int64s]] = {name: [_NO_NUMBERS] for name in (*_NUMBERS, "error")}
        self._errors: dict[Any, int] = {UNSET: NONE, None: NONE}
        self._clipped: list[int] = []
        self._remote: dict[int, RemoteParent] = {}
        self._attributes = GatheredAttributes(_check_attributes)
        self._samples: list[Sample] = []
        self._intervals: dict[str, list[Int64s]] = {name: [_NO_NUMBERS] for name in _OF_INTERVALS}
        self._row_count = 0
        self.has_lengths: bool | None = None
        """True if async begins have lengths, so that ends are not read. Earlier versions wrote files without them."""
        self._labels = NumberByKey()
        self._waiting: list[Arguments] = []

    def add_events(self, events: Sequence[Any], block: Block) -> Block:
        """Read samples and device intervals. Return the remaining slices, which are spans."""
        for event in events if type(events[0]) is not OwnEvent else ():
            if event.ph == "C":
                self._add_sample(event)
        if len(self._samples) > LIMIT_SPANS:
            raise ValueError(f"it has more than {LIMIT_SPANS} samples; record less into one file")
        begins = block.select(block.are_begins)
        self._waiting = begins.arguments()
        are_async = begins.phases == ord("b")
        if are_async.any():
            lengths_ns = _read_numbers(self._waiting, "total_ns")[are_async]
            if self.has_lengths is None:
                self.has_lengths = bool(lengths_ns[0] >= 0)
            if self.has_lengths and (lengths_ns < 0).any():
                raise ValueError("an async slice in it has no length; write or copy it again")
            if self.has_lengths:
                begins.length_ns[are_async] = lengths_ns
        if self.has_lengths:
            block = begins
        of_device = _read_numbers(self._waiting, "owner") != UNTOLD
        if not of_device.any():
            return block
        self._add_intervals([*compress(self._waiting, of_device.tolist())], begins.select(of_device))
        self._waiting = [*compress(self._waiting, (~of_device).tolist())]
        of_spans = ~block.are_begins
        of_spans[block.are_begins] = ~of_device
        return block.select(of_spans)

    def _add_sample(self, event: Any) -> None:
        pid = check_type(event.pid, int)
        (value,) = json.loads(bytes(event.args)).values()
        device = pid - DEVICE_PIDS if pid >= DEVICE_PIDS else HOST
        at_ns = self._metadata.base_ns + convert_to_ns(event.ts)
        self._samples.append(Sample(check_type(event.name, str), device, at_ns, check_type(value, float, int)))

    def add_arguments(self) -> None:
        arguments, self._waiting = self._waiting, []
        first, self._row_count = self._row_count, self._row_count + len(arguments)
        for name in _NUMBERS:
            self._numbers[name].append(_read_numbers(arguments, name))
        errors = np.full(len(arguments), NONE)
        for place, error in _read_values(arguments, "error"):
            errors[place] = self._errors.setdefault(error, len(self._errors) - 2)
        self._numbers["error"].append(errors)
        self._clipped += [first + place for place, is_clipped in _read_values(arguments, "clipped") if is_clipped]
        for place, attributes in _read_values(arguments, "attributes"):
            text = bytes(attributes)
            self._attributes.add(first + place, attributes_to_json(json.loads(text)) if b"\\" in text else text)
        remotes = _read_values(arguments, "remote")
        self._remote |= {first + place: remote.make_parent() for place, remote in remotes if remote}

    def _add_intervals(self, arguments: Sequence[Arguments], block: Block) -> None:
        labels = ["exclusive" if label is UNSET else label for label in _read_field(arguments, "label", UNSET)]
        columns = {name: _read_numbers(arguments, name) for name in _NUMBERS_OF_INTERVALS}
        columns |= {
            "stream": _fill_missing(columns["stream"], columns.pop("enclosing_stream")),
            "label": self._labels.look_up_numbers(labels),
            "start_ns": block.start_ns,
            "end_ns": block.start_ns + block.length_ns,
        }
        for name in ("place", "uncertainty_ns"):
            columns[name][columns[name] == UNTOLD] = 0
        for name, numbers in columns.items():
            self._intervals[name].append(numbers)

    def assemble_trace(self, rows: Rows) -> Trace:
        if rows.clipped.any() or rows.strays:
            raise ValueError("an async slice in it never begins or never ends; write or copy it again")
        base_ns, sites = self._metadata.base_ns, tuple(self._metadata.sites)
        total_ns = rows.end_ns - rows.start_ns
        span_id, site, task_id = (self._order_column(name, rows) for name in ("id", "site", "task"))
        if (span_id == UNTOLD).any() or not are_in_range(site, 0, len(sites)):
            raise ValueError("a slice in it belongs to no span or site; it is damaged")
        parent_id = _fill_missing(self._order_column("parent", rows), np.append(span_id, 0)[rows.around])
        clipped = make_mask(rows.rank[self._clipped], len(span_id))
        # The task is that of the first slice on the line.
        first_of_line = np.zeros(int(rows.line.max(initial=-1)) + 1, dtype=np.int64)
        first_of_line[rows.line[::-1]] = np.arange(len(span_id))[::-1]
        task_id = _fill_missing(_fill_missing(task_id, task_id[first_of_line[rows.line]]), np.int64(0))
        columns = Columns(
            sites=sites,
            errors=tuple(self._errors)[2:],
            span_id=span_id,
            parent_id=parent_id,
            root_id=_find_roots(span_id, parent_id, self._order_column("root", rows)),
            thread_id=_fill_missing(self._order_column("thread", rows), rows.thread_id),
            task_id=task_id,
            start_ns=rows.start_ns + base_ns,
            end_ns=rows.end_ns + base_ns,
            active_ns=_fill_missing(self._order_column("active_ns", rows), total_ns),
            self_ns=_fill_missing(self._order_column("self_ns", rows), total_ns),
            site=site.astype(np.int32),
            error=self._order_column("error", rows).astype(np.int32),
            clipped=clipped,
            device=self._make_device_intervals(span_id, base_ns),
            attributes=self._attributes.pack_attributes(rows.rank),
            remote={int(rows.rank[row]): remote for row, remote in self._remote.items()},
            own_id=_fill_missing(self._order_column("own_id", rows), span_id),
        )
        return self._metadata.make_trace(SpanViews(columns), self._samples)

    def _order_column(self, name: str, rows: Rows) -> Int64s:
        return np.asarray(np.concatenate(self._numbers.pop(name))[rows.order])

    def _make_device_intervals(self, span_id: Int64s, base_ns: int) -> DeviceIntervals:
        columns = {name: np.concatenate(self._intervals.pop(name)) for name in _OF_INTERVALS}
        if any((columns[name] == UNTOLD).any() for name in ("device", "stream")) or (columns["place"] < 0).any():
            raise ValueError("an interval in it belongs to no device, stream or site; it is damaged")
        rows: Int32s = find_rows(span_id, columns.pop("owner"))
        order = np.lexsort((columns.pop("place"), rows))
        order = order[rows[order] != NONE]
        ordered = {name: numbers[order] for name, numbers in columns.items()}
        ordered |= {name: ordered[name] + base_ns for name in ("start_ns", "end_ns")}
        label = ordered.pop("label").astype(np.int32)
        return DeviceIntervals(row=rows[order], **ordered, label=label, labels=tuple(self._labels))


def _read_field(arguments: Sequence[Any], name: str, missing: Any) -> list[Any]:
    if not arguments or name not in arguments[0].__struct_fields__:
        return [missing] * len(arguments)
    return _READ_FIELD[name](arguments)


def _read_numbers(arguments: Sequence[Any], name: str) -> Int64s:
    numbers = _read_field(arguments, name, UNTOLD)
    if numbers.count(UNTOLD) == len(numbers):  # far faster than to convert them
        return np.full(len(numbers), UNTOLD, dtype=np.int64)
    return np.fromiter(numbers, np.int64, len(numbers))


def _read_values(arguments: Sequence[Any], name: str) -> list[tuple[int, Any]]:
    """Find the items of `arguments` that have the field `name`. Return each item's index and the field's value."""
    values = _read_field(arguments, name, UNSET)
    if values.count(UNSET) == len(values):
        return []
    return [(place, value) for place, value in enumerate(values) if value is not UNSET]


def _fill_missing(numbers: Int64s, otherwise: Int64s | np.int64) -> Int64s:
    return np.where(numbers == UNTOLD, otherwise, numbers)


def _find_roots(span_id: Int64s, parent_id: Int64s, root_id: Int64s) -> Int64s:
    """Return the root id of each row. A missing root id is taken from the parent. A span without a parent is its own
    root."""
    parent: NDArray[np.int32] = find_rows(span_id, parent_id)
    parent[(parent_id == 0) | (root_id != UNTOLD)] = NONE
    top = topmost_rows(parent)
    return _fill_missing(root_id[top], np.where(parent_id[top] == 0, span_id[top], parent_id[top]))


_PLAIN = bytes(set(range(0x20, 0x7F)) - {*b"[{"})
"""Printable ASCII characters without opening brackets. A JSON object with only one `{` and these characters is flat."""


def _check_attributes(text: bytes) -> None:
    # The text is valid JSON already. A flat object without numbers that are too long for Python needs no check.
    if text.startswith(b"{") and len(text) < LONGEST_PLAIN and text.translate(None, _PLAIN) == b"{":
        return
    for value in check_type(json.loads(text), dict).values():
        convert_to_tuples(value)
