"""The slices of other profilers: the meaning of their names and arguments, the work of devices, and allocations."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping
from itertools import count
from typing import Any, NamedTuple

import msgspec
import numpy as np

from instrument.chrome import paddle_traces
from instrument.chrome.events import LeftOut, TraceEvent, lane_of, text_of
from instrument.chrome.lanes import SPARE_TIDS
from instrument.chrome.operator_flops import flops_of, is_counted
from instrument.profile.model import KINDS
from instrument.recording import spans
from instrument.recording.allocations import Allocation, Allocations
from instrument.recording.spans import FLOPS, HOST, Origin, Site, flops_told
from instrument.trace import columns
from instrument.trace.columns import Bools, DeviceIntervals, Int32s, Int64s
from instrument.trace.forest import NONE, nearest, tops
from instrument.trace.gathering import GatheredAttributes, column, written
from instrument.trace.intervals import lengths_by_group
from instrument.trace.kernel_columns import KernelColumns
from instrument.trace.text import INT64, LIMIT_SPANS, LIMIT_US, LONGEST_PLAIN, checked, nanoseconds

OPERATOR = "cpu_op"
"""Category of torch's operators."""

KIND_OF_CATEGORY = {**{kind: kind for kind in KINDS}, OPERATOR: "op", "kernel": "op", "gpu_memcpy": "copy"}

# What torch.profiler calls the work of a device, the calls that ask for it (also as Paddle does), and the type of the
# host as a device.
WORK_OF_CATEGORY = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "fill"}
LAUNCHES = re.compile(r"\w+_(?:runtime|driver)|CudaRuntime")
HOST_MEMORY = 0

STEPS = re.compile(r"(ProfilerStep|ProfileStep)#([0-9]{1,18})(?:\[[0-9.]+ \w+\])?")
"""The name of a step's slice in torch.profiler and paddle.profiler, with its number; paddle adds its length."""

ON_DEVICE = "gpu_user_annotation"
"""Category of the slices by which torch.profiler draws what the host named above the device's work for it."""

NAMELESS = "(no name)"
"""The name of a slice without one."""


_LONGEST_EPOCH = 20

ABSOLUTE_US, MOST_AT_ZERO = 365 * 86_400 * 10**6, 10_000
"""Microseconds from which on a clock counts from 1970, so that 0 is no time of it; and slices that wait for it."""


class _Facts(NamedTuple):
    """The facts of all slices of one category and name.

    These are the place of their site and its name, the number of a step, and the kind of work of a device. Booleans:
    they may ask for such work, their operations are counted, their arguments become attributes as they are.
    """

    place: int
    name: str
    step: int | None
    work: str | None
    launches: bool
    counts: bool
    is_plain: bool


class _Lane(NamedTuple):
    """Process and thread of events, and the id that the thread has here."""

    row: tuple[Any, Any]
    thread_id: int
    is_paddles: bool


class Rows(NamedTuple):
    """The slices of a file by begin, the longer ones first: `rank` is the row of each by its place in the file."""

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


class Others:
    """Reads the arguments of slices and the other events of other profilers, by rows in the order of the file."""

    def __init__(self, left_out: LeftOut) -> None:
        self._left_out = left_out
        self._epoch_ns = 0
        self._host = ""
        # Slices at time 0, with their numbers, of which later ones say what they are; and the latest time.
        self._at_zero: list[tuple[int, TraceEvent]] | None = []
        self._latest_us = 0.0
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
        # The work of devices: its names and kinds, and six numbers for each: the place in these, device, stream, begin,
        # end and correlation.
        self._work: dict[tuple[str, str], int] = {}
        self._work_numbers = array("q")
        self._launches: dict[int, int] = {}
        self._device_rows: set[tuple[Any, ...]] = set()
        self._allocations = bytearray()

    def add_fact(self, key: str, value: Any) -> None:
        """Take a member of the file that is not an event, such as the host's name."""
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
        """Read events that are no slices; `first` is the number of the first."""
        for number, event in enumerate(events, first):
            if event.ph == "M" and event.name in ("process_name", "thread_name"):
                self._add_name(event, number)
            elif event.ph == "i" and event.name == "[memory]":
                self._add_allocation(event, number)

    def without_zeros(self, slices: list[TraceEvent], numbers: list[int]) -> list[TraceEvent]:
        """Return the slices without those at time 0, which wait until it is known whether times are absolute."""
        if not slices or self._at_zero is None:
            return slices
        starts_us = [one.ts for one in slices]
        self._latest_us = max(self._latest_us, float(max(starts_us)))
        zeros: list[TraceEvent] = []
        if 0 in starts_us:
            self._at_zero += [(number, one) for number, one in zip(numbers, slices, strict=True) if not one.ts]
            slices = [one for one in slices if one.ts]
        if self._latest_us >= ABSOLUTE_US:
            for number, _ in self._at_zero:
                self._left_out.add("slices at time 0 among absolute times", f"event {number}")
            self._at_zero = []
        elif len(self._at_zero) > MOST_AT_ZERO:
            zeros, self._at_zero = self.zeros(), None
        return zeros + slices

    def zeros(self) -> list[TraceEvent]:
        """Return the slices at time 0 that wait."""
        return [one for _, one in self._at_zero or ()]

    def _add_name(self, event: TraceEvent, number: int) -> None:
        """Add the name of a process or of a thread."""
        args = json.loads(bytes(event.args)) if bytes(event.args).startswith(b"{") else {}
        name = args.get("name") if isinstance(args, dict) else None
        if not isinstance(name, str):
            self._left_out.add("names of threads and processes that are no text", f"event {number}")
            return
        thread = paddle_traces.thread_of(lane_of(event.tid)) if event.name == "thread_name" else None
        self._names[lane_of(event.pid), thread] = paddle_traces.thread_name(name)

    def add_rows(self, slices: list[TraceEvent], start_ns: Int64s, end_ns: Int64s) -> list[int]:
        """Add what slices that complete or begin say. Return the thread of each; their times become exact in place."""
        lanes = [self._lanes.get((one.pid, one.tid)) or self._lane(one) for one in slices]
        known = [self._facts.get((one.cat, one.name)) or self._facts_of(one.cat, one.name) for one in slices]
        texts = [bytes(one.args) for one in slices]
        first = len(self._site)
        rows: list[int] = []
        for at, (event, facts, lane, text) in enumerate(zip(slices, known, lanes, texts, strict=True)):
            if facts.is_plain and not lane.is_paddles and are_attributes(text):
                if len(text) > 2:
                    rows.append(at)
                continue
            times = int(start_ns[at]), int(end_ns[at])
            start_ns[at], end_ns[at] = self._add_arguments(first + at, lane, facts, event, *times)
        self._attributes.add_all([first + at for at in rows], [texts[at] for at in rows])
        self._site.extend([facts.place for facts in known])
        return [lane.thread_id for lane in lanes]

    def _add_arguments(
        self, at: int, lane: _Lane, facts: _Facts, event: TraceEvent, start_ns: int, end_ns: int
    ) -> tuple[int, int]:
        """Add the arguments of a slice of which there is more to know; return its times."""
        args = _arguments(event)
        attributes = {key: value for key, value in args.items() if type(value) in _VALUES}
        if lane.is_paddles:
            exact = self._clock_of_paddle.times(start_ns, attributes)
            start_ns, end_ns = (start_ns, end_ns) if exact is None or event.ph != "X" else exact
        if facts.step is not None:
            attributes["step"] = facts.step
        flops = flops_of(facts.name, args) if facts.counts else None
        if flops is not None:
            attributes[FLOPS] = flops
            self._counts_flops = True
        if FLOPS in attributes:
            self._with_flops[at] = written(attributes)
        elif attributes:
            self._attributes.add(at, written(attributes))
        if event.ph == "X":
            self._add_work(at, facts, args, lane, start_ns, end_ns)
        return start_ns, end_ns

    def _facts_of(self, of: object, named: object) -> _Facts:
        """Return the facts of slices of this category and name."""
        kind, text = text_of(of) or "", NAMELESS if named is None else f"{text_of(named)}"
        step = None if kind == ON_DEVICE else STEPS.fullmatch(text)
        name, attributes, work = text, paddle_traces.Attributes(), WORK_OF_CATEGORY.get(kind)
        known = None if step is not None else paddle_traces.meaning(kind, text)
        ours = "step" if step is not None else KIND_OF_CATEGORY.get(kind, "user")
        if step is not None:
            name = step[1]
        elif known is not None:
            name, (ours, attributes, work) = known
        launches, counts = LAUNCHES.fullmatch(kind) is not None, kind == OPERATOR and is_counted(name)
        facts = self._facts[of, named] = _Facts(
            place=self._sites.setdefault((name, ours, attributes), len(self._sites)),
            name=name,
            step=None if step is None else int(step[2]),
            work=work,
            launches=launches,
            counts=counts,
            is_plain=step is None and work is None and not counts and not launches,
        )
        return facts

    def _add_work(
        self, row: int, facts: _Facts, args: Mapping[str, Any], lane: _Lane, start_ns: int, end_ns: int
    ) -> None:
        """Add work of a device, or a call of the host that asks for some; both name it by a number."""
        known = args.get("correlation", args.get("correlation id"))
        correlation = known if _is_number(known) else None
        if facts.work is not None:
            self._device_rows.add(lane.row)
            device, stream = args.get("device", lane.row[0]), args.get("stream", lane.row[1])
            if _is_number(device) and _is_number(stream):
                work = self._work.setdefault((facts.name, facts.work), len(self._work))
                self._work_numbers.extend((work, device, stream, start_ns, end_ns, correlation or 0))
        elif correlation is not None and facts.launches:
            self._launches[correlation] = row

    def _add_allocation(self, event: TraceEvent, number: int) -> None:
        try:
            found = self._allocation_of(event)
        except (ValueError, TypeError, ArithmeticError, RecursionError):
            self._left_out.add("allocations that say no time or size", f"event {number}")
            return
        if found is not None:
            self._allocations += Allocations.of([found]).rows
        elif event.cat not in paddle_traces.RESERVING:
            self._unsized += 1
        if len(self._allocations) > LIMIT_SPANS * Allocations.ROW.size:
            raise ValueError(f"it has more than {LIMIT_SPANS} allocations; record less into one file")

    def _allocation_of(self, event: TraceEvent) -> Allocation | None:
        event.pid, event.tid = lane_of(event.pid), lane_of(event.tid)
        lane = self._lanes.get((event.pid, event.tid)) or self._lane(event)
        args = _arguments(event) if bytes(event.args).startswith(b"{") else {}
        if "Bytes" in args:
            return _allocation(event, args, lane.thread_id)
        return paddle_traces.allocation({"cat": event.cat, "args": args, "ts": event.ts}, lane.thread_id)

    def _lane(self, event: TraceEvent) -> _Lane:
        event.pid, event.tid = lane_of(event.pid), lane_of(event.tid)
        row: tuple[Any, Any] = event.pid, paddle_traces.thread_of(event.tid)
        if row not in self._thread_ids:
            usable = type(row[1]) is int and 0 <= row[1] < SPARE_TIDS and row[1] not in self._taken
            self._thread_ids[row] = row[1] if usable else next(self._spare_ids)
            self._taken.add(row[1])
        thread_id = self._thread_ids[row]
        lane = self._lanes[event.pid, event.tid] = _Lane(row, thread_id, row[1] is not event.tid)
        return lane

    # What has been read

    def trace(self, rows: Rows) -> tuple[columns.Trace, spans.Trace]:
        """Return the slices as columns, and all else as a trace without spans."""
        first_ns, last_ns = self._bounds(rows.start_ns, rows.end_ns)
        parent, total_ns = rows.around, rows.end_ns - rows.start_ns
        self._add_flops(parent, rows.rank)
        inner = np.flatnonzero(parent != NONE)
        children_ns = lengths_by_group(parent[inner], rows.start_ns[inner], rows.end_ns[inner], len(parent))
        found = columns.Trace(
            sites=tuple(Site(name, kind, attributes=attributes) for name, kind, attributes in self._sites),
            errors=(),
            span_id=np.arange(1, 1 + len(parent)),
            parent_id=parent + np.int64(1),
            root_id=tops(parent) + np.int64(1),
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
        return found, self._beside(first_ns, last_ns, rows)

    def _bounds(self, start_ns: Int64s, end_ns: Int64s) -> tuple[int, int]:
        """Return the first and the last time, 0 where there is none."""
        at_ns = np.frombuffer(self._allocations, dtype=np.int64)[1::7]
        starts, ends = (np.concatenate((times, at_ns)) for times in (start_ns, end_ns))
        return (int(starts.min()), int(ends.max())) if len(starts) else (0, 0)

    def _beside(self, first_ns: int, last_ns: int, rows: Rows) -> spans.Trace:
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
        losses = {**{what: count for what, count in counted.items() if count}, **self._left_out.losses()}
        trace = spans.Trace(origin, first_ns, last_ns, [], threads, losses)
        found = Allocations(self._allocations).in_order()
        if self._work or found:
            trace.kernels, trace.allocations = self._kernels(rows), found
            trace.watched = first_ns, last_ns
        return trace

    def _kernels(self, rows: Rows) -> KernelColumns:
        """Return the work of devices by start, each with the call that asked for it, wherever in the file that is."""
        numbers = column(self._work_numbers).reshape(-1, 6)
        numbers = numbers[np.argsort(numbers[:, 3], kind="stable")]
        work, device, stream, start_ns, end_ns, asked = numbers.T
        launch = np.fromiter((self._launches.get(one, NONE) for one in asked.tolist()), np.int64, len(asked))
        row = np.append(rows.rank, NONE)[launch]
        thread_id, launched_ns = (np.append(one, 0)[row] for one in (rows.thread_id, rows.start_ns))
        names, kinds = dict[str, int](), dict[str, int]()
        tables = [(names.setdefault(name, len(names)), kinds.setdefault(kind, len(kinds))) for name, kind in self._work]
        name, kind = np.array(tables, dtype=np.int32).reshape(-1, 2)[work].T
        numbers_of = (np.ascontiguousarray(one) for one in (device, stream, start_ns, end_ns, thread_id, launched_ns))
        return KernelColumns(tuple(names), tuple(kinds), name, kind, *numbers_of)

    def _add_flops(self, parent: Int32s, rank: Int32s) -> None:
        """Add the attributes of slices with operations. Where shapes have some, those of a product or convolution are
        left to the outermost of the operators that have them."""
        has_flops = np.zeros(len(rank), dtype=np.bool_)
        for at, text in self._with_flops.items():
            has_flops[rank[at]] = self._counts_flops and flops_told(json.loads(text)) > 0
        outer = nearest(parent, has_flops)
        for at, text in self._with_flops.items():
            above = parent[rank[at]]
            if above != NONE and outer[above] != NONE:
                text = written({key: value for key, value in json.loads(text).items() if key != FLOPS})
            if len(text) > 2:
                self._attributes.add(at, text)


_VALUES = frozenset((str, int, float, bool))
_NOT_PLAIN = (b"[", b"\\", b"null", b'"flops"')
"""Texts that are in no arguments that may stay as they are."""


def are_attributes(args: bytes) -> bool:
    """Return True where the text of arguments may stay as it is: it is of numbers, texts and truths, none of which is
    looked for later under a name with escapes."""
    is_flat = args.startswith(b"{") and args.find(b"{", 1) < 0 and len(args) < LONGEST_PLAIN
    return is_flat and not any(mark in args for mark in _NOT_PLAIN)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and -INT64 <= value < INT64


def _arguments(event: TraceEvent) -> dict[str, Any]:
    """Return the arguments of an event, numbers of any length among them."""
    found = event.args
    try:
        args = msgspec.json.decode(found)
    except msgspec.MsgspecError:
        args = json.loads(bytes(found))
    return args if isinstance(args, dict) else {}


def _allocation(event: TraceEvent, args: Mapping[str, Any], thread_id: int) -> Allocation:
    """Return the allocation that an event of torch.profiler is."""
    in_host = args.get("Device Type") == HOST_MEMORY
    return Allocation(
        HOST if in_host else max(checked(args.get("Device Id"), int), 0),
        nanoseconds(event.ts),
        thread_id,
        checked(args.get("Bytes"), int),
        *(checked(args.get(key, 0), int) for key in ("Addr", "Total Allocated", "Total Reserved")),
    )
