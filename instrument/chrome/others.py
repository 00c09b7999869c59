"""Interprets the slices of other profilers: names, arguments, device work, allocations and counts of operations."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import count, filterfalse
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import numpy as np
from msgspec import UNSET

from instrument.chrome import paddle_traces
from instrument.chrome.events import Block, LeftOut, TraceEvent, lane_of, text_of
from instrument.chrome.lanes import SPARE_TIDS
from instrument.profile.model import KINDS
from instrument.recording.spans import FLOPS, HOST, Origin, Site, flops_in
from instrument.trace.columns import Bools, Columns, DeviceIntervals, Int32s, Int64s
from instrument.trace.forest import NONE, nearest, topmost_rows
from instrument.trace.intervals import lengths_by_group
from instrument.trace.layout import GatheredAttributes, column, extend, to_json
from instrument.trace.text import INT64, LIMIT_SPANS, LIMIT_US, LONGEST_PLAIN, checked, nanoseconds
from instrument.trace.trace import Allocation, Allocations, SpanViews, Trace
from instrument.trace.watched import KernelColumns

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


def is_counted(name: str) -> bool:
    """Return True if operations are counted for torch's operators of this name."""
    return name in _FORMULAS


def count_flops(name: str, args: Mapping[str, Any]) -> int | None:
    """Return the number of operations of a call of torch's operator, from the name and the arguments of its event.

    Return None for an operator that is not counted, and for missing or invalid shapes.
    """
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
    """Return a tensor's shape, () for another argument."""
    if not isinstance(sizes, list) or len(sizes) > MOST_DIMENSIONS:
        return ()
    if not all(type(size) is int and 0 <= size < INT64 for size in sizes):
        return ()
    return sizes


def _count_product(first: Shape, second: Shape) -> int:
    """Return the operations of a batch of matrix products, or of products with a vector."""
    *batch, rows, inner = first
    *other_batch, inner_too, columns = second if len(second) > 1 else (*second, 1)
    if inner != inner_too or batch != other_batch:
        raise ValueError("the shapes do not fit")
    return 2 * prod(batch) * rows * inner * columns


def _product_formula(first: int) -> _Formula:
    """Return the formula for a product of two tensor arguments, at index `first` and after it."""
    return lambda shapes, _: _count_product(shapes[first], shapes[first + 1])


def _count_dot(shapes: Sequence[Shape], _: Sequence[str]) -> int:
    return _count_product((1, *shapes[0]), shapes[1])


def _count_convolution(shapes: Sequence[Shape], values: Sequence[str]) -> int:
    source, weight = shapes[:2]
    size = source[2:]
    stride, padding, dilation = (_read_numbers(value, len(size)) for value in values[3:6])
    if values[6] != "True":
        size = [
            (length + 2 * more - gap * (width - 1) - 1) // step + 1
            for length, width, step, more, gap in zip(size, weight[2:], stride, padding, dilation, strict=True)
        ]
    return _count_convolved(source, weight, size)


def _count_convolution_backward(shapes: Sequence[Shape], values: Sequence[str]) -> int:
    gradient, source, weight = shapes[:3]
    gradients = _TRUTHS.fullmatch(values[10])
    if gradients is None:
        raise ValueError("the wanted gradients are unknown")
    # The gradients of the input and of the weight each take as many operations as the forward pass.
    size = source[2:] if values[7] == "True" else gradient[2:]
    return gradients[1].split(", ")[:2].count("True") * _count_convolved(source, weight, size)


def _count_convolved(source: Shape, weight: Shape, size: Shape) -> int:
    """Return the operations of a convolution with a result of shape `size`. `weight` has inputs per output."""
    if len(source) != len(weight) or len(source) < 3 or min(size) < 0:
        raise ValueError("the shapes do not fit")
    return 2 * source[0] * prod(size) * prod(weight)


def _read_numbers(value: str, dimensions: int) -> list[int]:
    """Return a number per dimension. A single number applies to all of them. Raises `ValueError` for other text."""
    match = _NUMBERS.fullmatch(value)
    if match is None or not match[1]:
        raise ValueError("there are no numbers")
    numbers = list(map(int, match[1].split(", ")))
    return numbers * dimensions if len(numbers) == 1 else numbers


def _attention_formula(backward: bool) -> _Formula:
    def formula(shapes: Sequence[Shape], _: Sequence[str]) -> int:
        query, key, value = shapes[backward : 3 + backward]
        batch, heads, queries, inner = query
        if not len(key) == len(value) == 4 or key[3] != inner or key[2] != value[2] or key[0] != batch:
            raise ValueError("the shapes do not fit")
        # Forward: scores and weighted values. Backward: scores, their gradient, and the gradients of all three inputs.
        widths = 3 * inner + 2 * value[3] if backward else inner + value[3]
        return 2 * batch * heads * queries * key[2] * widths

    return formula


_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")

_FORMULAS: Mapping[str, _Formula] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::mv", "aten::_scaled_mm", "aten::_int_mm"), _product_formula(0)),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::addbmm", "aten::addmv"), _product_formula(1)),
    **dict.fromkeys(("aten::addmm_", "aten::baddbmm_", "aten::addbmm_", "aten::addmv_"), _product_formula(1)),
    "aten::dot": _count_dot,
    "aten::convolution": _count_convolution,
    "aten::convolution_backward": _count_convolution_backward,
    **{f"aten::_scaled_dot_product_{name}": _attention_formula(backward=False) for name in _ATTENTION},
    **{f"aten::_scaled_dot_product_{name}_backward": _attention_formula(backward=True) for name in _ATTENTION},
}
"""The functions that count the operations of a call from its shapes and values, by the name of torch's operator."""


OPERATOR = "cpu_op"
"""The category of torch's operators."""

KIND_OF_CATEGORY = {**{kind: kind for kind in KINDS}, OPERATOR: "op", "kernel": "op", "gpu_memcpy": "copy"}

# torch.profiler's categories of device work, the categories of the calls that launch it, also Paddle's, and the host's
# device type.
WORK_OF_CATEGORY = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "fill"}
LAUNCHES = re.compile(r"\w+_(?:runtime|driver)|CudaRuntime")
HOST_MEMORY = 0

STEPS = re.compile(r"(ProfilerStep|ProfileStep)#([0-9]{1,18})(?:\[[0-9.]+ \w+\])?")
"""The name of a step's slice in torch.profiler and paddle.profiler, with the step's number. Paddle adds the length."""

ON_DEVICE = "gpu_user_annotation"
"""The category of slices in which torch.profiler repeats the host's annotations on the device's lanes."""

NAMELESS = "(no name)"
"""The name given to a slice without a name."""


_LONGEST_EPOCH = 20

ABSOLUTE_US, MOST_AT_ZERO = 365 * 86_400 * 10**6, 10_000
"""`ABSOLUTE_US` is the lowest time in microseconds that shows that a file's times count from 1970. Then slices at time
0 are invalid. Up to `MOST_AT_ZERO` slices at time 0 wait for such a time."""


class _Facts(NamedTuple):
    """The properties that all slices of one category and name share.

    `place` and `name` are those of the site. `step` is the number of a step, `work` the kind of device work. `has_work`
    is True for such work and calls that may launch it, `counts` for operators whose operations are counted, `is_plain`
    if the arguments become attributes as text.
    """

    place: int
    name: str
    step: int | None
    work: str | None
    has_work: bool
    counts: bool
    is_plain: bool


class _Lane(NamedTuple):
    """The process and thread of events, and the thread's id in the trace."""

    row: tuple[Any, Any]
    thread_id: int
    is_paddles: bool


_KIND, _PLACE, _THREAD_ID = attrgetter("cat", "name"), attrgetter("place"), attrgetter("thread_id")


def look_up(table: dict[Key, Value], keys: Sequence[Key], make: Callable[[Key], Value]) -> list[Value]:
    """Return the values of keys. Missing values are made and added."""
    values = list(map(table.get, keys))
    if None in values:
        for key in filterfalse(table.__contains__, keys):
            table[key] = make(key)
        values = list(map(table.get, keys))
    return cast("list[Value]", values)


class Rows(NamedTuple):
    """The slices of a file, sorted by begin, longer ones first. `rank` has the row of each slice in the file's
    order."""

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
    """The number of ends without a begin."""


class ForeignSlices:
    """Reads the arguments of other profilers' slices, and their further events. Rows are in the order of the file."""

    def __init__(self, left_out: LeftOut) -> None:
        self._left_out = left_out
        self._epoch_ns = 0
        self._host = ""
        # Slices at time 0 with their numbers, valid unless later times are absolute; and the latest time.
        self._at_zero: list[tuple[int, TraceEvent]] | None = []
        self._latest_ns = 0
        self._site = array("q")
        self._sites: dict[tuple[str, str, paddle_traces.Attributes], int] = {}
        self._facts: dict[tuple[Any, Any], _Facts] = {}
        self._attributes = GatheredAttributes()
        self._with_flops: dict[int, bytes] = {}
        self._counts_flops = False
        self._clock_of_paddle = paddle_traces.EventClock()
        self._names: dict[tuple[Any, ...], str] = {}
        self._lanes: dict[tuple[Any, Any], _Lane] = {}
        self._thread_ids: dict[tuple[Any, Any], int] = {}
        self._taken: set[Any] = set()
        self._spare_ids = count(SPARE_TIDS)
        self._unsized = 0
        # The work of devices: its names and kinds, and six numbers for each work: the place in these, device, stream,
        # begin, end and correlation.
        self._work: dict[tuple[str, str], int] = {}
        self._work_numbers = array("q")
        self._launches: dict[int, int] = {}
        self._device_rows: set[tuple[Any, ...]] = set()
        self._allocations = bytearray()

    def add_fact(self, key: str, value: Any) -> None:
        """Read a top-level key of the file other than the events, such as the host's name."""
        if key == "host_name" and isinstance(value, str):
            self._host = value
        elif key == "baseTimeNanoseconds":
            text = str(value)[:_LONGEST_EPOCH]
            is_time = text.isdecimal() and int(text) < LIMIT_US * 1000
            if is_time:
                self._epoch_ns = int(text)
            else:
                self._left_out.add("times of day that are no number", "the key 'baseTimeNanoseconds'")

    def add(self, events: list[TraceEvent], first: int) -> None:
        """Read events other than slices. `first` is the number of the first event."""
        if {"M", "i"}.isdisjoint(map(attrgetter("ph"), events)):
            return
        for number, event in enumerate(events, first):
            if event.ph == "M" and event.name in ("process_name", "thread_name"):
                self._add_name(event, number)
            elif event.ph == "i" and event.name == "[memory]":
                self._add_allocation(event, number)

    def hold_back_zeros(self, block: Block, events: Sequence[TraceEvent], first: int) -> Sequence[TraceEvent]:
        """Return the slices except those at time 0, which wait until a later time shows whether times are absolute."""
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
                self._left_out.add("slices at time 0 among absolute times", f"event {number}")
            self._at_zero = []
        elif len(self._at_zero) > MOST_AT_ZERO:
            slices, self._at_zero = [*self.waiting_zeros(), *slices], None
        return slices

    def waiting_zeros(self) -> list[TraceEvent]:
        """Return the waiting slices at time 0."""
        return [event for _, event in self._at_zero or ()]

    def _add_name(self, event: TraceEvent, number: int) -> None:
        """Add the name of a process or of a thread."""
        (args,) = _decode_arguments([event.args])
        name = args.get("name") if isinstance(args, dict) else None
        if not isinstance(name, str):
            self._left_out.add("names of threads and processes that are no text", f"event {number}")
            return
        thread = paddle_traces.thread_of(lane_of(event.tid)) if event.name == "thread_name" else None
        self._names[lane_of(event.pid), thread] = paddle_traces.thread_name(name)

    def add_rows(self, block: Block, keys: Sequence[tuple[Any, Any]], start_ns: Int64s, end_ns: Int64s) -> list[int]:
        """Add complete slices and begins, with their processes and threads. Return the thread of each. Times are
        corrected in place."""
        slices, first = block.slices, len(self._site)
        lanes = look_up(self._lanes, keys, self._assign_lane)
        facts_by_row = look_up(self._facts, list(map(_KIND, slices)), self._facts_of)
        texts = block.texts.split(b"\0")
        all_flat = block.texts if b"\\" in block.texts else _LISTS.sub(b"", block.texts)
        flat = all_flat.split(b"\0")
        are_all = all_flat.count(b"{") == len(flat) and not _has_marks(all_flat) and max(map(len, flat)) < LONGEST_PLAIN
        are_flat = [
            facts.is_plain and not lane.is_paddles and (are_all or are_attributes(text))
            for facts, lane, text in zip(facts_by_row, lanes, flat, strict=True)
        ]
        rows = [row for row, is_flat in enumerate(are_flat) if is_flat and len(flat[row]) > 2]
        self._attributes.add_all([first + row for row in rows], [flat[row] for row in rows])
        rows = [row for row, is_flat in enumerate(are_flat) if not is_flat]
        for row, args in zip(rows, _decode_arguments([texts[row] for row in rows]), strict=True):
            times = int(start_ns[row]), int(end_ns[row])
            times = self._add_arguments(first + row, lanes[row], facts_by_row[row], slices[row].ph, args, *times)
            start_ns[row], end_ns[row] = times
        rows = [row for row, facts in enumerate(facts_by_row) if facts.has_work and slices[row].ph == "X"]
        for row, args in zip(rows, _decode_arguments([texts[row] for row in rows], list[_WorkArguments]), strict=True):
            self._add_work(first + row, facts_by_row[row], args, lanes[row], int(start_ns[row]), int(end_ns[row]))
        extend(self._site, list(map(_PLACE, facts_by_row)))
        return list(map(_THREAD_ID, lanes))

    def _add_arguments(
        self, at: int, lane: _Lane, facts: _Facts, phase: str, args: dict[str, Any], start_ns: int, end_ns: int
    ) -> tuple[int, int]:
        """Add the arguments of a slice that is not plain. Return its times in ns."""
        attributes = {key: value for key, value in args.items() if type(value) in _VALUES}
        if lane.is_paddles:
            exact = self._clock_of_paddle.times(start_ns, attributes)
            start_ns, end_ns = (start_ns, end_ns) if exact is None or phase != "X" else exact
        if facts.step is not None:
            attributes["step"] = facts.step
        flops = count_flops(facts.name, args) if facts.counts else None
        if flops is not None:
            attributes[FLOPS] = flops
            self._counts_flops = True
        if FLOPS in attributes:
            self._with_flops[at] = to_json(attributes)
        elif attributes:
            self._attributes.add(at, to_json(attributes))
        return start_ns, end_ns

    def _facts_of(self, key: tuple[object, object]) -> _Facts:
        """Return the properties that all slices of a category and name share."""
        category, label = key
        kind, text = text_of(category) or "", NAMELESS if label is None else f"{text_of(label)}"
        step = None if kind == ON_DEVICE else STEPS.fullmatch(text)
        name, attributes, work = text, paddle_traces.Attributes(), WORK_OF_CATEGORY.get(kind)
        paddles = None if step is not None else paddle_traces.meaning(kind, text)
        span_kind = "step" if step is not None else KIND_OF_CATEGORY.get(kind, "user")
        if step is not None:
            name = step[1]
        elif paddles is not None:
            name, (span_kind, attributes, work) = paddles
        launches, counts = LAUNCHES.fullmatch(kind) is not None, kind == OPERATOR and is_counted(name)
        return _Facts(
            place=self._sites.setdefault((name, span_kind, attributes), len(self._sites)),
            name=name,
            step=None if step is None else int(step[2]),
            work=work,
            has_work=work is not None or launches,
            counts=counts,
            is_plain=step is None and not counts,
        )

    def _add_work(self, row: int, facts: _Facts, args: _WorkArguments, lane: _Lane, start_ns: int, end_ns: int) -> None:
        """Add device work, or a host call that launches device work. A correlation number joins the two."""
        correlation = args.paddles if args.correlation is UNSET else args.correlation
        correlation = correlation if _is_number(correlation) else None
        if facts.work is not None:
            self._device_rows.add(lane.row)
            device = lane.row[0] if args.device is UNSET else args.device
            stream = lane.row[1] if args.stream is UNSET else args.stream
            if _is_number(device) and _is_number(stream):
                work = self._work.setdefault((facts.name, facts.work), len(self._work))
                self._work_numbers.extend((work, device, stream, start_ns, end_ns, correlation or 0))
        elif correlation is not None:
            self._launches[correlation] = row

    def _add_allocation(self, event: TraceEvent, number: int) -> None:
        try:
            allocation = self._read_allocation(event)
        except (ValueError, TypeError, ArithmeticError, RecursionError):
            self._left_out.add("allocations that say no time or size", f"event {number}")
            return
        if allocation is not None:
            self._allocations += Allocations.of([allocation]).rows
        elif event.cat not in paddle_traces.RESERVING:
            self._unsized += 1
        if len(self._allocations) > LIMIT_SPANS * Allocations.ROW.size:
            raise ValueError(f"it has more than {LIMIT_SPANS} allocations; record less into one file")

    def _read_allocation(self, event: TraceEvent) -> Allocation | None:
        (lane,) = look_up(self._lanes, [(event.pid, event.tid)], self._assign_lane)
        (args,) = _decode_arguments([event.args]) if bytes(event.args).startswith(b"{") else [{}]
        if "Bytes" in args:
            return _torch_allocation(event, args, lane.thread_id)
        return paddle_traces.allocation({"cat": event.cat, "args": args, "ts": event.ts}, lane.thread_id)

    def _assign_lane(self, key: tuple[Any, Any]) -> _Lane:
        pid, tid = map(lane_of, key)
        row: tuple[Any, Any] = pid, paddle_traces.thread_of(tid)
        if row not in self._thread_ids:
            usable = type(row[1]) is int and 0 <= row[1] < SPARE_TIDS and row[1] not in self._taken
            self._thread_ids[row] = row[1] if usable else next(self._spare_ids)
            self._taken.add(row[1])
        thread_id = self._thread_ids[row]
        return _Lane(row, thread_id, row[1] is not tid)

    # Results

    def trace(self, rows: Rows) -> Trace:
        """Return the trace of the slices, with all other facts."""
        first_ns, last_ns = self._find_bounds(rows.start_ns, rows.end_ns)
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
            site=column(self._site)[rows.order].astype(np.int32),
            error=np.full(len(parent), NONE, dtype=np.int32),
            clipped=rows.clipped,
            device=DeviceIntervals.none(),
            attributes=self._attributes.packed(rows.rank),
            remote={},
        )
        return self._assemble_trace(first_ns, last_ns, rows, columns)

    def _find_bounds(self, start_ns: Int64s, end_ns: Int64s) -> tuple[int, int]:
        """Return the first and the last time in ns, 0 without times."""
        at_ns = np.frombuffer(self._allocations, dtype=np.int64)[1::7]
        starts, ends = (np.concatenate((times, at_ns)) for times in (start_ns, end_ns))
        return (int(starts.min()), int(ends.max())) if len(starts) else (0, 0)

    def _assemble_trace(self, first_ns: int, last_ns: int, rows: Rows, columns: Columns) -> Trace:
        pids = [pid for pid, _ in self._thread_ids]
        host_pids = [row[0] for row in self._thread_ids if row not in self._device_rows]
        one_process = len(set(pids)) == 1
        threads = {}
        for row, thread_id in self._thread_ids.items():
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
        trace = Trace(origin, first_ns, last_ns, SpanViews(columns), threads, losses)
        allocations = Allocations(self._allocations).in_order()
        if self._work or allocations:
            trace.kernels, trace.allocations = self._collect_kernels(rows), allocations
            trace.watched = first_ns, last_ns
        return trace

    def _collect_kernels(self, rows: Rows) -> KernelColumns:
        """Return the device work by start, each with the call that launched it."""
        numbers = column(self._work_numbers).reshape(-1, 6)
        numbers = numbers[np.argsort(numbers[:, 3], kind="stable")]
        work, device, stream, start_ns, end_ns, ids = numbers.T
        launch = np.fromiter((self._launches.get(number, NONE) for number in ids.tolist()), np.int64, len(ids))
        row = np.append(rows.rank, NONE)[launch]
        thread_id, launched_ns = (np.append(item, 0)[row] for item in (rows.thread_id, rows.start_ns))
        names, kinds = dict[str, int](), dict[str, int]()
        tables = [(names.setdefault(name, len(names)), kinds.setdefault(kind, len(kinds))) for name, kind in self._work]
        name, kind = np.array(tables, dtype=np.int32).reshape(-1, 2)[work].T
        numbers_of = (np.ascontiguousarray(part) for part in (device, stream, start_ns, end_ns, thread_id, launched_ns))
        return KernelColumns(tuple(names), tuple(kinds), name, kind, *numbers_of)

    def _add_flops(self, parent: Int32s, rank: Int32s) -> None:
        """Add the number of operations to slices as an attribute. Of nested operators only the outermost gets it."""
        has_flops = np.zeros(len(rank), dtype=np.bool_)
        for at, text in self._with_flops.items():
            has_flops[rank[at]] = self._counts_flops and flops_in(json.loads(text)) > 0
        outer = nearest(parent, has_flops)
        for at, text in self._with_flops.items():
            above = parent[rank[at]]
            if above != NONE and outer[above] != NONE:
                text = to_json({key: value for key, value in json.loads(text).items() if key != FLOPS})
            if len(text) > 2:
                self._attributes.add(at, text)


_VALUES = frozenset((str, int, float, bool))
_LISTS = re.compile(rb',\s*"[^]["\\{},:]*"\s*:\s*\[[^]["\\{}]*(?:(?:"[^"\\]*"|\[[^]["\\{}]*\])[^]["\\{}]*)*\]')
"""A regular expression for a list and its key, after another key of arguments without escapes. No match begins within a
text, because a comma, a colon or a bracket follows the end of each text."""


def are_attributes(args: bytes) -> bool:
    """Return True if arguments can stay text: numbers, texts and booleans, without escapes or `flops`."""
    return not args.rfind(b"{") and len(args) < LONGEST_PLAIN and not _has_marks(args)


def _has_marks(text: bytes) -> bool:
    return b"[" in text or b"\\" in text or b"null" in text or b'"flops"' in text


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and -INT64 <= value < INT64


class _WorkArguments(msgspec.Struct, gc=False):
    """The arguments of device work and of its launches. Paddle has a key of its own for correlation numbers."""

    correlation: Any = UNSET
    paddles: Any = msgspec.field(default=None, name="correlation id")
    device: Any = UNSET
    stream: Any = UNSET


def _decode_arguments(texts: Sequence[bytes | msgspec.Raw], kind: Any = list[Any]) -> list[Any]:
    """Return the arguments of events, also with numbers beyond 64 bits."""
    try:
        decoded: list[Any] = msgspec.json.decode(b"[%b]" % b",".join(texts), type=kind)
    except msgspec.MsgspecError:
        decoded = msgspec.convert([json.loads(bytes(text)) for text in texts], kind)
    return decoded


def _torch_allocation(event: TraceEvent, args: Mapping[str, Any], thread_id: int) -> Allocation:
    """Return the allocation of an event of torch.profiler."""
    in_host = args.get("Device Type") == HOST_MEMORY
    return Allocation(
        HOST if in_host else max(checked(args.get("Device Id"), int), 0),
        nanoseconds(event.ts),
        thread_id,
        checked(args.get("Bytes"), int),
        *(checked(args.get(key, 0), int) for key in ("Addr", "Total Allocated", "Total Reserved")),
    )
