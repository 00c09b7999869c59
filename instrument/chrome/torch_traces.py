"""Interprets the slices of torch.profiler and of other profilers: names, arguments, device work, allocations and
floating-point operations."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import numpy as np

from instrument.chrome import paddle_traces
from instrument.chrome.event_reading import Block, LeftOut, TraceEvent, convert_to_text, parse_lane_id
from instrument.chrome.lanes import SPARE_TIDS
from instrument.chrome.slice_arguments import UNTOLD, Int64
from instrument.profile.model import KINDS
from instrument.recording.spans import FLOPS, HOST, Origin, Site, read_flops
from instrument.trace.columns import Bools, Columns, DeviceIntervals, Int32s, Int64s
from instrument.trace.indices import (
    NONE,
    append_numbers,
    find_nearest_row,
    number_by_first_occurrence,
    topmost_rows,
    view_as_int64s,
)
from instrument.trace.intervals import lengths_by_group
from instrument.trace.layout import KernelColumns
from instrument.trace.text import (
    INT64,
    LIMIT_SPANS,
    LIMIT_US,
    LONGEST_PLAIN,
    GatheredAttributes,
    attributes_to_json,
    check_type,
    convert_to_ns,
)
from instrument.trace.trace import ALLOCATION, Allocation, Allocations, SpanViews, Trace

# Operations of torch's operators

# Operations are counted for matrix products, convolutions and attention, forward and backward, as in
# `torch.utils.flop_counter`, and for products with vectors. A multiplication and an addition count as two. Element-wise
# work does not count. Attention counts every pair of a query and a key, masked or not. The backward pass of a grouped
# convolution counts the channels within groups; `flop_counter` (2.13) counts every pair of channels there.


Key = TypeVar("Key")
Value = TypeVar("Value")
Shape = Sequence[int]
_Formula = Callable[[Sequence[Shape], Sequence[str]], int]

MOST_DIMENSIONS = 64
"""The maximum number of dimensions of a tensor in torch. It bounds the time that a damaged file can take."""

_NUMBERS = re.compile(r"\[([0-9]{1,9}(?:, [0-9]{1,9})*)?\]")
_TRUTHS = re.compile(r"\[((?:True|False)(?:, (?:True|False))*)\]")


def has_flop_formula(name: str) -> bool:
    return name in _FORMULAS


def count_flops(name: str, args: Mapping[str, Any]) -> int | None:
    """Return the floating-point operations of a torch operator, or None if the event's arguments are not sufficient."""
    formula = _FORMULAS.get(name)
    shapes, values = args.get("Input Dims"), args.get("Concrete Inputs")
    if formula is None or not isinstance(shapes, list):
        return None
    texts = [value if isinstance(value, str) else "" for value in values] if isinstance(values, list) else []
    try:
        count = formula([_read_shape(sizes) for sizes in shapes], texts)
    except (ArithmeticError, ValueError, IndexError):
        return None
    return count if 0 < count < INT64 else None


def _read_shape(sizes: object) -> Shape:
    if not isinstance(sizes, list) or len(sizes) > MOST_DIMENSIONS:
        return ()
    if not all(type(size) is int and 0 <= size < INT64 for size in sizes):
        return ()
    return sizes


def _count_product_flops(first: Shape, second: Shape) -> int:
    *batch, rows, inner = first
    *other_batch, inner_too, columns = second if len(second) > 1 else (*second, 1)
    if inner != inner_too or batch != other_batch:
        raise ValueError("the shapes do not fit")
    return 2 * prod(batch) * rows * inner * columns


def _make_product_formula(first: int) -> _Formula:
    return lambda shapes, _: _count_product_flops(shapes[first], shapes[first + 1])


def _count_forward_flops(shapes: Sequence[Shape], values: Sequence[str]) -> int:
    source, weight = shapes[:2]
    size = source[2:]
    stride, padding, dilation = (_read_numbers(value, len(size)) for value in values[3:6])
    if values[6] != "True":
        size = [
            (length + 2 * more - gap * (width - 1) - 1) // step + 1
            for length, width, step, more, gap in zip(size, weight[2:], stride, padding, dilation, strict=True)
        ]
    return _count_kernel_flops(source, weight, size)


def _count_backward_flops(shapes: Sequence[Shape], values: Sequence[str]) -> int:
    gradient, source, weight = shapes[:3]
    gradients = _TRUTHS.fullmatch(values[10])
    if gradients is None:
        raise ValueError("the wanted gradients are unknown")
    # The gradients of the input and of the weight each take as many operations as the forward pass.
    size = source[2:] if values[7] == "True" else gradient[2:]
    return gradients[1].split(", ")[:2].count("True") * _count_kernel_flops(source, weight, size)


def _count_kernel_flops(source: Shape, weight: Shape, size: Shape) -> int:
    """Return the operations of a convolution. `size` is the number of positions of the kernel in each dimension."""
    if len(source) != len(weight) or len(source) < 3 or min(size) < 0:
        raise ValueError("the shapes do not fit")
    return 2 * source[0] * prod(size) * prod(weight)


def _read_numbers(value: str, dimensions: int) -> list[int]:
    match = _NUMBERS.fullmatch(value)
    if match is None or not match[1]:
        raise ValueError("there are no numbers")
    numbers = list(map(int, match[1].split(", ")))
    return numbers * dimensions if len(numbers) == 1 else numbers


def _make_attention_formula(backward: bool) -> _Formula:
    def count_attention_flops(shapes: Sequence[Shape], _: Sequence[str]) -> int:
        query, key, value = shapes[backward : 3 + backward]
        batch, heads, queries, inner = query
        if not len(key) == len(value) == 4 or key[3] != inner or key[2] != value[2] or key[0] != batch:
            raise ValueError("the shapes do not fit")
        # Forward: scores and weighted values. Backward: scores, their gradient, and the gradients of all three inputs.
        widths = 3 * inner + 2 * value[3] if backward else inner + value[3]
        return 2 * batch * heads * queries * key[2] * widths

    return count_attention_flops


_ADDED_PRODUCTS = [name + end for name in ("addmm", "baddbmm", "addbmm", "addmv") for end in ("", "_")]
_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")

_FORMULAS: Mapping[str, _Formula] = {
    **dict.fromkeys(
        ("aten::mm", "aten::bmm", "aten::mv", "aten::_scaled_mm", "aten::_int_mm"), _make_product_formula(0)
    ),
    **dict.fromkeys([f"aten::{name}" for name in _ADDED_PRODUCTS], _make_product_formula(1)),
    "aten::dot": lambda shapes, _: _count_product_flops((1, *shapes[0]), shapes[1]),
    "aten::convolution": _count_forward_flops,
    "aten::convolution_backward": _count_backward_flops,
    **{f"aten::_scaled_dot_product_{name}": _make_attention_formula(backward=False) for name in _ATTENTION},
    **{f"aten::_scaled_dot_product_{name}_backward": _make_attention_formula(backward=True) for name in _ATTENTION},
}
"""The formula for the number of floating-point operations of each torch operator."""


OPERATOR = "cpu_op"

KIND_OF_CATEGORY = {**{kind: kind for kind in KINDS}, OPERATOR: "op", "kernel": "op", "gpu_memcpy": "copy"}

# torch.profiler's categories of device work, the categories of the calls that launch it, also Paddle's, and the host's
# device type.
WORK_OF_CATEGORY = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "fill"}
LAUNCHES = re.compile(r"\w+_(?:runtime|driver)|CudaRuntime")
HOST_MEMORY = 0

STEPS = re.compile(r"(ProfilerStep|ProfileStep)#([0-9]{1,18})(?:\[[0-9.]+ \w+\])?")
"""A pattern of the names of step slices, with the number of the step."""

ON_DEVICE = "gpu_user_annotation"
"""The category of slices in which torch.profiler repeats the host's annotations on the device's lanes."""

NAMELESS = "(no name)"


_LONGEST_EPOCH = 20

ABSOLUTE_US, MOST_AT_ZERO = 365 * 86_400 * 10**6, 10_000
"""The smallest time in microseconds that counts as absolute (since 1970), and the maximum number of slices at time 0 in
memory."""


class _Facts(NamedTuple):
    """The properties of all slices with the same category and name.

    - `step`: the number of the step, or None if the slices are no steps
    - `counts`: True if there is a formula for the floating-point operations
    """

    name: str
    step: int | None
    counts: bool


def look_up_or_make(table: dict[Key, Value], keys: Sequence[Key], make: Callable[[Key], Value]) -> list[Value]:
    values = list(map(table.get, keys))
    if None in values:
        for place in [place for place, value in enumerate(values) if value is None]:
            key = keys[place]
            if key not in table:
                table[key] = make(key)
            values[place] = table[key]
    return cast("list[Value]", values)


class NumberByKey(dict[Any, int]):
    """A dictionary that numbers keys. A key gets the next number at its first lookup."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number

    def look_up_numbers(self, keys: Sequence[Any]) -> Int64s:
        return np.fromiter(map(self.__getitem__, keys), np.int64, len(keys))


class NumberedLanes:
    """Numbers the lanes of a file. A lane is a pair of process id and thread id.

    A line is a thread or an async id, whose slices are nested. Paddle has two lanes per thread, for Python and for C++.
    `thread_id` and `line` have the thread id and the number of the line for each lane.
    """

    def __init__(self, *, are_ours: bool = False) -> None:
        self._are_ours = are_ours
        self.thread_ids: dict[tuple[Any, Any], int] = {}
        self._taken: set[Any] = set()
        self._spare_ids = count(SPARE_TIDS)
        self._numbers: dict[tuple[Any, Any], int] = {}
        self.lines = NumberByKey()
        self.rows: list[tuple[Any, Any]] = []
        self.line, self.thread_id, self.are_paddles = array("q"), array("q"), bytearray()

    def number_lanes_of_events(self, events: Sequence[Any]) -> Int64s:
        return np.array(
            look_up_or_make(self._numbers, [(event.pid, event.tid) for event in events], self._add_lane), dtype=np.int64
        )

    def number_lines_of_keys(self, keys: Sequence[Any]) -> Int64s:
        """Return the line number of each key. A key is a lane or the key of an async slice."""
        if self._are_ours:
            return self.lines.look_up_numbers(keys)
        return np.array(look_up_or_make(self.lines, keys, self._number_line), dtype=np.int64)

    def _number_line(self, key: Any) -> int:
        key = _parse_process_and_thread_id(key) if isinstance(key, tuple) and len(key) == 2 else key
        return self.lines.setdefault(key, len(self.lines))

    def _add_lane(self, key: tuple[Any, Any]) -> int:
        row = _parse_process_and_thread_id(key)
        self.rows.append(row)
        self.line.append(self._number_line(key))
        self.thread_id.append(self._assign_thread_id(row))
        self.are_paddles.append(isinstance(row[1], int) and isinstance(key[1], str))
        return len(self.rows) - 1

    def _assign_thread_id(self, row: tuple[Any, Any]) -> int:
        if self._are_ours:
            return int(check_type(row[1], int))
        if row not in self.thread_ids:
            usable = type(row[1]) is int and 0 <= row[1] < SPARE_TIDS and row[1] not in self._taken
            self.thread_ids[row] = row[1] if usable else next(self._spare_ids)
            self._taken.add(row[1])
        return self.thread_ids[row]


def _parse_process_and_thread_id(lane: tuple[Any, ...]) -> tuple[Any, Any]:
    pid, tid = map(parse_lane_id, lane)
    return pid, paddle_traces.parse_thread_id(tid)


class Rows(NamedTuple):
    """The slices of a file, sorted by start time. Slices with the same start are sorted by length, the longest first.

    - `order`: the position of each row in the file
    - `rank`: the row of each slice, in the order of the file
    """

    order: Int64s
    rank: Int32s
    start_ns: Int64s
    end_ns: Int64s
    line: Int64s
    thread_id: Int64s
    task_id: Int64s
    around: Int32s
    clipped: Bools
    strays: int
    """The number of end events without a begin event."""


class ForeignSlices:
    """Reads the arguments of slices in files of other profilers, and the events that are no slices."""

    def __init__(self, left_out: LeftOut) -> None:
        self._left_out = left_out
        self._epoch_ns = 0
        self._host = ""
        # Slices at time 0 with their numbers, valid unless later times are absolute; and the latest time.
        self._at_zero: list[tuple[int, TraceEvent]] | None = []
        self._latest_ns = 0
        # The facts of slices: `_place` is that of the site, `_work_of` the number of the kind of device work.
        self._kind = array("q")
        self._kinds: dict[tuple[Any, Any], int] = {}
        self._facts: list[_Facts] = []
        self._place, self._work_of, self._are_plain, self._have_work = array("q"), array("q"), bytearray(), bytearray()
        self._sites: dict[tuple[str, str, paddle_traces.Attributes], int] = {}
        self._attributes = GatheredAttributes()
        self._with_flops: dict[int, bytes] = {}
        self._counts_flops = False
        self._clock_of_paddle = paddle_traces.EventClock()
        self._names: dict[tuple[Any, ...], str] = {}
        self.lanes = NumberedLanes()
        self._unsized = 0
        # The work of devices: its names and kinds, and six numbers for each work: the place in these, device, stream,
        # begin, end and correlation.
        self._work: dict[tuple[str, str], int] = {}
        self._work_numbers = array("q")
        self._launches: dict[int, int] = {}
        self._device_lanes: set[int] = set()
        self._allocations = array("q")

    def read_metadata(self, key: str, value: Any) -> None:
        if key == "host_name" and isinstance(value, str):
            self._host = value
        elif key == "baseTimeNanoseconds":
            text = str(value)[:_LONGEST_EPOCH]
            if text.isdecimal() and int(text) < LIMIT_US * 1000:
                self._epoch_ns = int(text)
            else:
                self._left_out.count_omission("times of day that are no number", "the key 'baseTimeNanoseconds'")

    def read_other_events(self, events: Sequence[TraceEvent], first: int) -> None:
        if {"M", "i"}.isdisjoint([event.ph for event in events]):
            return
        for number, event in enumerate(events, first):
            if event.ph == "M" and event.name in ("process_name", "thread_name"):
                self._add_name(event, number)
            elif event.ph == "i" and event.name == "[memory]":
                self._add_allocation(event, number)

    def hold_back_slices_at_zero(self, block: Block, events: Sequence[TraceEvent], first: int) -> Sequence[TraceEvent]:
        """Return the slices that do not begin at time 0. Slices at time 0 are kept back, and dropped if later times are
        absolute (since 1970)."""
        slices = block.slices
        if not slices or self._at_zero is None:
            return slices
        self._latest_ns = max(self._latest_ns, int(block.start_ns.max()))
        if not block.start_ns.all():
            numbers = {id(event): number for number, event in enumerate(events, first)}
            self._at_zero += [(numbers[id(event)], event) for event in slices if not event.ts]
            slices = [event for event in slices if event.ts]
        if self._latest_ns >= ABSOLUTE_US * 1000:
            for number, _ in self._at_zero:
                self._left_out.count_omission("slices at time 0 among absolute times", f"event {number}")
            self._at_zero = []
        elif len(self._at_zero) > MOST_AT_ZERO:
            slices, self._at_zero = [*self.slices_waiting_at_zero(), *slices], None
        return slices

    def slices_waiting_at_zero(self) -> list[TraceEvent]:
        return [event for _, event in self._at_zero or ()]

    def _add_name(self, event: TraceEvent, number: int) -> None:
        (args,) = _decode_arguments([event.args])
        name = args.get("name") if isinstance(args, dict) else None
        if not isinstance(name, str):
            self._left_out.count_omission("names of threads and processes that are no text", f"event {number}")
            return
        thread = paddle_traces.parse_thread_id(parse_lane_id(event.tid)) if event.name == "thread_name" else None
        self._names[parse_lane_id(event.pid), thread] = paddle_traces.strip_thread_language(name)

    def add_slices(self, block: Block, lanes: Int64s, start_ns: Int64s, end_ns: Int64s) -> None:
        """Add complete slices and begin events. The exact times in the arguments of Paddle's slices replace `start_ns`
        and `end_ns`."""
        slices, first = block.slices, len(self._kind)
        kinds = np.array(
            look_up_or_make(self._kinds, [(event.cat, event.name) for event in slices], self._add_slice_facts),
            dtype=np.int64,
        )
        self._kind.frombytes(kinds.tobytes())
        texts = block.joined_arguments.split(b"\0")
        all_flat = _remove_lists(block.joined_arguments)
        flat = all_flat.split(b"\0")
        lengths = np.fromiter(map(len, flat), np.int64, len(flat))
        are_flat = (np.frombuffer(self._are_plain, bool)[kinds]) & ~np.frombuffer(self.lanes.are_paddles, bool)[lanes]
        if all_flat.count(b"{") != len(flat) or _has_escapes_or_flops(all_flat) or lengths.max() >= LONGEST_PLAIN:
            are_flat &= np.fromiter(map(are_plain_attributes, flat), np.bool_, len(flat))
        rows = np.flatnonzero(are_flat & (lengths > 2)).tolist()
        self._attributes.add_all([first + row for row in rows], [flat[row] for row in rows])
        rows = np.flatnonzero(~are_flat).tolist()
        for row, args in zip(rows, _decode_arguments([texts[row] for row in rows]), strict=True):
            times = int(start_ns[row]), int(end_ns[row])
            is_paddles = bool(self.lanes.are_paddles[lanes[row]])
            facts = self._facts[kinds[row]]
            times = self._add_arguments(first + row, is_paddles, facts, slices[row].ph, args, *times)
            start_ns[row], end_ns[row] = times
        work = np.flatnonzero(np.frombuffer(self._have_work, bool)[kinds] & (block.phases == ord("X")))
        if len(work):
            args = _decode_work_arguments([texts[row] for row in work.tolist()])
            self._add_device_work(
                first + work,
                view_as_int64s(self._work_of)[kinds[work]],
                args,
                lanes[work],
                start_ns[work],
                end_ns[work],
            )

    def _add_arguments(
        self, at: int, is_paddles: bool, facts: _Facts, phase: str, args: dict[str, Any], start_ns: int, end_ns: int
    ) -> tuple[int, int]:
        attributes = {key: value for key, value in args.items() if type(value) in _VALUES}
        if is_paddles:
            exact = self._clock_of_paddle.pop_times(start_ns, attributes)
            start_ns, end_ns = (start_ns, end_ns) if exact is None or phase != "X" else exact
        if facts.step is not None:
            attributes["step"] = facts.step
        flops = count_flops(facts.name, args) if facts.counts else None
        if flops is not None:
            attributes[FLOPS] = flops
            self._counts_flops = True
        if FLOPS in attributes:
            self._with_flops[at] = attributes_to_json(attributes)
        elif attributes:
            self._attributes.add(at, attributes_to_json(attributes))
        return start_ns, end_ns

    def _add_slice_facts(self, key: tuple[object, object]) -> int:
        category, label = key
        kind, text = convert_to_text(category) or "", NAMELESS if label is None else f"{convert_to_text(label)}"
        step = None if kind == ON_DEVICE else STEPS.fullmatch(text)
        name, attributes, work = text, paddle_traces.Attributes(), WORK_OF_CATEGORY.get(kind)
        paddles = None if step is not None else paddle_traces.interpret_event(kind, text)
        span_kind = "step" if step is not None else KIND_OF_CATEGORY.get(kind, "user")
        if step is not None:
            name = step[1]
        elif paddles is not None:
            name, (span_kind, attributes, work) = paddles
        launches, counts = LAUNCHES.fullmatch(kind) is not None, kind == OPERATOR and has_flop_formula(name)
        self._facts.append(_Facts(name, None if step is None else int(step[2]), counts))
        self._place.append(self._sites.setdefault((name, span_kind, attributes), len(self._sites)))
        self._work_of.append(NONE if work is None else self._work.setdefault((name, work), len(self._work)))
        self._are_plain.append(step is None and not counts)
        self._have_work.append(work is not None or launches)
        return len(self._facts) - 1

    def _add_device_work(
        self,
        rows: Int64s,
        work: Int64s,
        args: Sequence[_WorkArguments],
        lanes: Int64s,
        start_ns: Int64s,
        end_ns: Int64s,
    ) -> None:
        """Add device work, and the host calls that have launched it. Both have the same correlation number."""
        correlation, paddles, device, stream = (
            np.fromiter(map(attrgetter(name), args), np.int64, len(args)) for name in _WorkArguments.__struct_fields__
        )
        correlation = np.where(correlation == UNTOLD, paddles, correlation)
        launches = (work == NONE) & (correlation > _NO_NUMBER)
        self._launches.update(zip(correlation[launches].tolist(), rows[launches].tolist(), strict=True))
        self._device_lanes.update(lanes[work != NONE].tolist())
        of_lanes = np.array(
            [[number if _is_int64(number) else _NO_NUMBER for number in row] for row in self.lanes.rows],
            dtype=np.int64,
        )
        pids, tids = of_lanes[lanes].T
        device, stream = np.where(device == UNTOLD, pids, device), np.where(stream == UNTOLD, tids, stream)
        correlation = np.where(correlation > _NO_NUMBER, correlation, 0)
        columns = np.stack((work, device, stream, start_ns, end_ns, correlation), axis=1)
        are_sound = (work != NONE) & (device != _NO_NUMBER) & (stream != _NO_NUMBER)
        self._work_numbers.frombytes(columns[are_sound].tobytes())

    def _add_allocation(self, event: TraceEvent, number: int) -> None:
        try:
            allocation = self._read_allocation(event)
        except (ValueError, TypeError, ArithmeticError, RecursionError):
            self._left_out.count_omission("allocations that say no time or size", f"event {number}")
            return
        if allocation is not None:
            append_numbers(self._allocations, Allocations.FACTS(allocation))
        elif event.cat not in paddle_traces.RESERVING:
            self._unsized += 1
        if len(self._allocations) > LIMIT_SPANS * len(ALLOCATION.names or ()):
            raise ValueError(f"it has more than {LIMIT_SPANS} allocations; record less into one file")

    def _read_allocation(self, event: TraceEvent) -> Allocation | None:
        thread_id = self.lanes.thread_id[self.lanes.number_lanes_of_events([event])[0]]
        (args,) = _decode_arguments([event.args]) if bytes(event.args).startswith(b"{") else [{}]
        if "Bytes" in args:
            return _torch_allocation(event, args, thread_id)
        return paddle_traces.read_allocation({"cat": event.cat, "args": args, "ts": event.ts}, thread_id)

    # Results

    def make_trace(self, rows: Rows) -> Trace:
        parent, total_ns = rows.around, rows.end_ns - rows.start_ns
        self._add_flops(parent, rows.rank)
        inner = np.flatnonzero(parent != NONE)
        children_ns = lengths_by_group(parent[inner], rows.start_ns[inner], rows.end_ns[inner], len(parent))
        columns = Columns(
            sites=tuple(Site(name, kind, attributes=attributes) for name, kind, attributes in self._sites),
            errors=(),
            span_id=np.arange(1, 1 + len(parent)),
            parent_id=parent + np.int64(1),
            root_id=topmost_rows(parent) + np.int64(1),
            thread_id=rows.thread_id,
            task_id=rows.task_id,
            start_ns=rows.start_ns,
            end_ns=rows.end_ns,
            active_ns=total_ns,
            self_ns=total_ns - children_ns,
            site=view_as_int64s(self._place)[view_as_int64s(self._kind)[rows.order]].astype(np.int32),
            error=np.full(len(parent), NONE, dtype=np.int32),
            clipped=rows.clipped,
            device=DeviceIntervals.make_empty(),
            attributes=self._attributes.pack_attributes(rows.rank),
            remote={},
        )
        return self._assemble_trace(rows, columns)

    def _assemble_trace(self, rows: Rows, columns: Columns) -> Trace:
        allocations = Allocations(view_as_int64s(self._allocations).view(ALLOCATION)).sort_by_time()
        starts, ends = (np.append(times, allocations.times_ns) for times in (rows.start_ns, rows.end_ns))
        window_ns = (int(starts.min()), int(ends.max())) if len(starts) else (0, 0)
        pids = [pid for pid, _ in self.lanes.thread_ids]
        device_rows = {self.lanes.rows[lane] for lane in self._device_lanes}
        host_pids = [row[0] for row in self.lanes.thread_ids if row not in device_rows]
        one_process = len(set(pids)) == 1
        threads = {}
        for row, thread_id in self.lanes.thread_ids.items():
            name = self._names.get(row) or (row[1] if isinstance(row[1], str) else f"thread {row[1]}")
            process = self._names.get((row[0], None), f"process {row[0]}")
            threads[thread_id] = name if one_process else f"{process}: {name}"
        origin = Origin(
            pid=next((pid for pid in host_pids if isinstance(pid, int)), 0),
            service=self._names.get((pids[0], None), "") if pids else "",
            monotonic_ns=0,
            realtime_ns=self._epoch_ns,
            recorder="other",
            host=self._host,
        )
        counted = {"slice ends without a begin": rows.strays, "[memory] events without a size": self._unsized}
        losses = {**{reason: count for reason, count in counted.items() if count}, **self._left_out.losses()}
        trace = Trace(origin, *window_ns, SpanViews(columns), threads, losses)
        if self._work_numbers or allocations:
            trace.kernels, trace.allocations = self._collect_kernels(rows), allocations
            trace.watched = window_ns
        return trace

    def _collect_kernels(self, rows: Rows) -> KernelColumns:
        numbers = view_as_int64s(self._work_numbers).reshape(-1, 6)
        works, firsts = number_by_first_occurrence(numbers[:, 0])
        used = [list(self._work)[number] for number in numbers[firsts, 0].tolist()]
        order = np.argsort(numbers[:, 3], kind="stable")
        (_, device, stream, start_ns, end_ns, ids), work = numbers[order].T, works[order]
        launch = np.fromiter((self._launches.get(number, NONE) for number in ids.tolist()), np.int64, len(ids))
        row = np.append(rows.rank, NONE)[launch]
        thread_id, launched_ns = (np.append(item, 0)[row] for item in (rows.thread_id, rows.start_ns))
        names, kinds = dict[str, int](), dict[str, int]()
        tables = [(names.setdefault(name, len(names)), kinds.setdefault(kind, len(kinds))) for name, kind in used]
        name, kind = np.array(tables, dtype=np.int32).reshape(-1, 2)[work].T
        numbers_of = (np.ascontiguousarray(part) for part in (device, stream, start_ns, end_ns, thread_id, launched_ns))
        return KernelColumns(tuple(names), tuple(kinds), name, kind, *numbers_of)

    def _add_flops(self, parent: Int32s, rank: Int32s) -> None:
        """Add floating-point operations as an attribute of slices. Only the outermost of nested operators counts."""
        has_flops = np.zeros(len(rank), dtype=np.bool_)
        for at, text in self._with_flops.items():
            has_flops[rank[at]] = self._counts_flops and read_flops(json.loads(text)) > 0
        outer = find_nearest_row(parent, has_flops)
        for at, text in self._with_flops.items():
            above = parent[rank[at]]
            if above != NONE and outer[above] != NONE:
                text = attributes_to_json({key: value for key, value in json.loads(text).items() if key != FLOPS})
            if len(text) > 2:
                self._attributes.add(at, text)


MOST_LIST_KEYS = 32
"""The maximum number of keys with lists in a block whose lists are removed at once. Torch has some eight."""

_VALUES = frozenset((str, int, float, bool))
_LISTS = re.compile(rb',\s*("[^]["\\{},:]*")\s*:\s*\[[^]["\\{}]*(?:(?:"[^"\\]*"|\[[^]["\\{}]*\])[^]["\\{}]*)*\]')
"""A pattern of a key with a list as its value, in JSON without escapes."""


def _remove_lists(texts: bytes) -> bytes:
    """Remove the lists from arguments. Return the arguments unchanged if they have escapes or many keys, or if a
    removed key also occurs outside the lists, because the last value of a repeated key counts."""
    if b"\\" in texts:
        return texts
    parts = _LISTS.split(texts)
    flat, keys = b"".join(parts[::2]), set(parts[1::2])
    return texts if len(keys) > MOST_LIST_KEYS or any(key in flat for key in keys) else flat


def are_plain_attributes(args: bytes) -> bool:
    """Return True for short arguments without lists, escapes, nulls or counts of FLOPs. Such arguments are stored
    undecoded."""
    return not args.rfind(b"{") and len(args) < LONGEST_PLAIN and not _has_escapes_or_flops(args)


def _has_escapes_or_flops(text: bytes) -> bool:
    return b"[" in text or b"\\" in text or b"null" in text or b'"flops"' in text


def _is_int64(value: Any) -> bool:
    return isinstance(value, int) and -INT64 <= value < INT64


_NO_NUMBER = UNTOLD + 1
"""The placeholder for an invalid number in the arguments of device work."""


class _WorkArguments(msgspec.Struct, gc=False):
    """The arguments of device work and of host calls that launch it. Paddle has another key for the correlation
    number."""

    correlation: Int64 = UNTOLD
    paddles: Int64 = msgspec.field(default=UNTOLD, name="correlation id")
    device: Int64 = UNTOLD
    stream: Int64 = UNTOLD


def _decode_work_arguments(texts: Sequence[bytes]) -> list[_WorkArguments]:
    """Return the arguments of device work. An invalid number becomes `_NO_NUMBER`."""
    try:
        return _decode_all_work(b"[%b]" % b",".join(texts))
    except msgspec.MsgspecError:
        keys = [field.encode_name for field in msgspec.structs.fields(_WorkArguments)]
        return [
            _WorkArguments(*(
                UNTOLD if key not in args else int(args[key]) if _is_int64(args[key]) else _NO_NUMBER for key in keys
            ))
            for args in _decode_arguments(texts)
        ]  # fmt: skip


_decode_all_work = msgspec.json.Decoder(list[_WorkArguments]).decode


def _decode_arguments(texts: Sequence[bytes | msgspec.Raw]) -> list[Any]:
    try:
        decoded: list[Any] = msgspec.json.decode(b"[%b]" % b",".join(texts))
    except msgspec.MsgspecError:
        decoded = [json.loads(bytes(text)) for text in texts]
    return decoded


def _torch_allocation(event: TraceEvent, args: Mapping[str, Any], thread_id: int) -> Allocation:
    in_host = args.get("Device Type") == HOST_MEMORY
    return Allocation(
        HOST if in_host else max(check_type(args.get("Device Id"), int), 0),
        convert_to_ns(event.ts),
        thread_id,
        check_type(args.get("Bytes"), int),
        *(check_type(args.get(key, 0), int) for key in ("Addr", "Total Allocated", "Total Reserved")),
    )
