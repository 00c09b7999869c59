"""Reading other profilers' traces: slices of any kind into spans, the work of devices and torch's allocations beside.

Lanes become threads, containment makes the trees, and self times follow from these.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import count
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET

from instrument.chrome import paddle_traces
from instrument.chrome.events import TraceEvent, times_ns
from instrument.chrome.lanes import SPARE_TIDS
from instrument.chrome.mending import are_sound, lane_of, sound_slices, text_of
from instrument.chrome.operator_flops import flops_of, is_counted
from instrument.profile.kinds import KINDS
from instrument.recording import spans
from instrument.recording.allocations import Allocation, Allocations
from instrument.recording.spans import FLOPS, HOST, Origin, Site, flops_told
from instrument.trace import columns
from instrument.trace.columns import DeviceIntervals, Int32s, Int64s
from instrument.trace.forest import NONE, nearest, tops
from instrument.trace.gathering import GatheredAttributes, column, rank_of, written
from instrument.trace.intervals import lengths_by_group
from instrument.trace.json_blocks import LeftOut
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
"""What torch.profiler and paddle.profiler call the slice of a step, with its number; paddle adds how long it took."""

ON_DEVICE = "gpu_user_annotation"
"""Category of the slices by which torch.profiler draws what the host named above the device's work for it."""

NAMELESS = "(no name)"
"""How a slice without a name is called."""


FARTHEST_NS = LIMIT_US * 1000
_LONGEST_EPOCH = 20
_PARTS_NS = 1e-3

ABSOLUTE_US, MOST_AT_ZERO = 365 * 86_400 * 10**6, 10_000
"""Microseconds from which on a clock counts from 1970, so that 0 is no time of it; and slices that wait for it."""

AT_ONCE = 10_000
"""Rows of which the numbers are objects at a time."""


class _Facts(NamedTuple):
    """What slices of one category and name have in common: the place of their site and its name, the number of a step,
    what kind of work of a device they are, whether they may ask for some, and whether their operations are counted."""

    place: int
    name: str
    step: int | None
    work: str | None
    launches: bool
    counts: bool
    asks: bool
    """Whether their arguments tell the work of a device."""
    says_more: bool
    """Whether their arguments, or their name, tell what becomes an attribute."""


class _Lane(NamedTuple):
    """Process and thread of events, the id that the thread has here, and the number of the line on which they nest."""

    row: tuple[Any, Any]
    thread_id: int
    line: int
    is_paddles: bool


class _Asked(msgspec.Struct, gc=False):
    """The arguments that describe the work of a device."""

    correlation: Any = UNSET
    paddles_correlation: Any = msgspec.field(default=None, name="correlation id")
    device: Any = UNSET
    stream: Any = UNSET


_decode_asked = msgspec.json.Decoder(list[_Asked]).decode


class Foreign:
    """Reads other profilers' traces: slices, whether complete, of begins and ends, or async, and names.

    A row is a slice, in the order of the file. Those nest that lie on one line: a lane, or the lane of an async key.
    """

    def __init__(self, left_out: LeftOut | None = None) -> None:
        self._left_out = left_out or LeftOut()
        self._epoch_ns = 0
        self._host = ""
        self._seen = 0
        # Slices at time 0, with their numbers, of which later ones say what they are; and the latest time.
        self._at_zero: list[tuple[int, TraceEvent]] | None = []
        self._latest_us = 0.0
        self._rounding_ns = 0
        self._start_ns, self._end_ns, self._thread_id = array("q"), array("q"), array("q")
        self._task_id, self._line, self._site = array("q"), array("q"), array("q")
        # Begins, each with its row, and ends, with none: all of a lane or of an async key have one number.
        self._mark_ns, self._mark_row, self._mark_of = array("q"), array("q"), array("q")
        self._stacks: dict[tuple[Any, ...], int] = {}
        self._tasks: dict[tuple[Any, ...], int] = {}
        self._lines: dict[tuple[int, int], int] = {}
        self._sites: dict[tuple[str, str, paddle_traces.Attributes], int] = {}
        self._facts: dict[tuple[Any, Any], _Facts] = {}
        self._attributes = GatheredAttributes()
        self._telling: dict[int, bytes] = {}
        self._counts_flops = False
        self._clock_of_paddle = paddle_traces.EventClock()
        self._names: dict[tuple[Any, ...], str] = {}
        self._lanes: dict[tuple[Any, Any], _Lane] = {}
        self._thread_ids: dict[tuple[Any, Any], int] = {}
        self._taken: set[Any] = set()
        self._spare_ids = count(SPARE_TIDS)
        self._count = self._unsized = 0
        # The work of devices: its names and kinds, and six numbers for each: which of these, device, stream, begin, end
        # and correlation.
        self._work: dict[tuple[str, str], int] = {}
        self._work_numbers = array("q")
        self._launches: dict[int, int] = {}
        self._device_rows: set[tuple[Any, ...]] = set()
        self._allocations = bytearray()

    @property
    def slices(self) -> int:
        """How many events have been of slices."""
        return self._count

    @property
    def taken(self) -> int:
        """How many events have said something."""
        return self._count + len(self._allocations) // Allocations.ROW.size

    def add_fact(self, key: str, value: Any) -> None:
        """Take a member of the file that is not an event, such as the host's name."""
        if key == "host_name" and isinstance(value, str):
            self._host = value
        elif key == "baseTimeNanoseconds":
            text = str(value)[:_LONGEST_EPOCH]
            is_time = text.isdecimal() and int(text) < FARTHEST_NS
            if is_time:
                self._epoch_ns = int(text)
            else:
                self._left_out.add("times of day that are no number", "the key 'baseTimeNanoseconds'")

    def add(self, events: list[TraceEvent]) -> None:
        """Read events, which come after those that have been read."""
        # The slice of "Trace" is how long torch.profiler watched, which is no call.
        first, self._seen = self._seen + 1, self._seen + len(events)
        slices = [one for one in events if one.ph in _SLICES and not (one.cat == "Trace" and one.pid == "Spans")]
        self._count += len(slices)
        if self._count > LIMIT_SPANS:
            raise ValueError(f"it has more than {LIMIT_SPANS} events; record less into one file")
        if slices and not are_sound(slices):
            wanted = {id(one) for one in slices}
            numbered = [one for one in enumerate(events, first) if id(one[1]) in wanted]
            slices = [event for _, event in sound_slices(numbered, self._left_out)]
        self._add_sound(self._without_zeros(slices, events, first))
        for number, event in enumerate(events, first):
            if event.ph == "M" and event.name in ("process_name", "thread_name"):
                self._add_name(event, number)
            elif event.ph == "i" and event.name == "[memory]":
                self._add_allocation(event, number)

    def _without_zeros(self, slices: list[TraceEvent], events: list[TraceEvent], first: int) -> list[TraceEvent]:
        """The slices without those at time 0, which wait until it is known whether others have absolute times."""
        if not slices or self._at_zero is None:
            return slices
        starts_us = [one.ts for one in slices]
        self._latest_us = max(self._latest_us, float(max(starts_us)))
        if 0 in starts_us:
            numbers = {id(one): number for number, one in enumerate(events, first)}
            self._at_zero += [(numbers[id(one)], one) for one in slices if not one.ts]
            slices = [one for one in slices if one.ts]
        if self._latest_us >= ABSOLUTE_US:
            for number, _ in self._at_zero:
                self._left_out.add("slices at time 0 among absolute times", f"event {number}")
            self._at_zero = []
        elif len(self._at_zero) > MOST_AT_ZERO:
            self._add_sound([one for _, one in self._at_zero])
            self._at_zero = None
        return slices

    def _add_sound(self, slices: list[TraceEvent]) -> None:
        self._add_slices([one for one in slices if one.ph != "E" and one.ph != "e"])
        if any(one.ph != "X" for one in slices):
            self._add_marks(slices)

    def _add_name(self, event: TraceEvent, number: int) -> None:
        """The name of a process or of a thread."""
        args = json.loads(bytes(event.args)) if bytes(event.args).startswith(b"{") else {}
        name = args.get("name") if isinstance(args, dict) else None
        if not isinstance(name, str):
            self._left_out.add("names of threads and processes that are no text", f"event {number}")
            return
        thread = paddle_traces.thread_of(lane_of(event.tid)) if event.name == "thread_name" else None
        self._names[lane_of(event.pid), thread] = paddle_traces.thread_name(name)

    def _add_slices(self, slices: list[TraceEvent]) -> None:
        """Slices that are complete, or begin, as columns."""
        if not slices:
            return
        lanes = [self._lanes.get((one.pid, one.tid)) or self._lane(one) for one in slices]
        known = [self._facts.get((one.cat, one.name)) or self._facts_of(one.cat, one.name) for one in slices]
        starts_us: list[Any] = [one.ts for one in slices]
        lengths_us: list[Any] = [one.dur if one.ph == "X" else 0 for one in slices]
        start_ns, length_ns = times_ns(starts_us, FARTHEST_NS), times_ns(lengths_us, FARTHEST_NS)
        end_ns = start_ns + length_ns
        if not self._rounding_ns and any(map(_has_parts, (starts_us, lengths_us), (start_ns, length_ns))):
            self._rounding_ns = 1
        texts = [bytes(one.args) for one in slices]
        everything = b"".join(texts)
        are_simple = len(max(texts, key=len)) < LONGEST_PLAIN and everything.count(b"{") == len(texts)
        are_simple = are_simple and not any(mark in everything for mark in _NOT_PLAIN)
        are_simple = are_simple and all(text[:1] == b"{" for text in texts)
        asking: list[int] = []
        rest: list[int] = []
        rows: list[int] = []
        first = len(self._start_ns)
        for at, (facts, lane, text) in enumerate(zip(known, lanes, texts, strict=True)):
            if facts.says_more or lane.is_paddles or not (are_simple or are_attributes(text)):
                rest.append(at)
                continue
            if len(text) > 2:
                rows.append(at)
            if facts.asks:
                asking.append(at)
        self._attributes.add_all([first + at for at in rows], [texts[at] for at in rows])
        asked = _asked([texts[at] for at in asking])
        for at, args in zip(asking, asked, strict=True):
            if slices[at].ph == "X":
                self._add_work(first + at, known[at], args, lanes[at], int(start_ns[at]), int(end_ns[at]))
        for at in rest:
            event, times = slices[at], (int(start_ns[at]), int(end_ns[at]))
            start_ns[at], end_ns[at] = self._add_attributes(first + at, lanes[at], known[at], event, *times)
        self._start_ns.extend(start_ns.tolist())
        self._end_ns.extend(end_ns.tolist())
        self._thread_id.extend([lane.thread_id for lane in lanes])
        self._task_id.extend([0] * len(slices))
        self._line.extend([lane.line for lane in lanes])
        self._site.extend([facts.place for facts in known])

    def _add_marks(self, slices: list[TraceEvent]) -> None:
        """The begins and ends among slices, of which the begins are rows already, the last that there are."""
        row = len(self._start_ns) - sum(one.ph != "E" and one.ph != "e" for one in slices)
        for event, at_ns in zip(slices, times_ns([one.ts for one in slices], FARTHEST_NS).tolist(), strict=True):
            phase = event.ph
            if phase == "X":
                row += 1
                continue
            if phase == "b" or phase == "e":
                stack: tuple[Any, ...] = event.pid, f"{event.cat}", f"{event.id}", f"{event.id2}"
            else:
                stack = event.pid, paddle_traces.thread_of(event.tid)
            self._mark_ns.append(at_ns)
            self._mark_of.append(self._stacks.setdefault(stack, len(self._stacks)))
            self._mark_row.append(row if phase == "B" or phase == "b" else NONE)
            if phase == "b":
                task_id = self._task_id[row] = self._tasks.setdefault(stack, 1 + len(self._tasks))
                line = self._thread_id[row], task_id
                self._line[row] = self._lines.setdefault(line, len(self._lines))
            row += phase == "B" or phase == "b"

    def _add_attributes(
        self, at: int, lane: _Lane, facts: _Facts, event: TraceEvent, start_ns: int, end_ns: int
    ) -> tuple[int, int]:
        """The attributes of a slice of whose arguments there is more to know; returns its times."""
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
            self._telling[at] = written(attributes)
        elif attributes:
            self._attributes.add(at, written(attributes))
        if event.ph == "X" and facts.asks:
            self._add_work(at, facts, msgspec.convert(_asking(args), _Asked), lane, start_ns, end_ns)
        return start_ns, end_ns

    def _facts_of(self, of: object, named: object) -> _Facts:
        """What is known of a slice by its category and its name."""
        kind, text = text_of(of) or "", NAMELESS if named is None else f"{text_of(named)}"
        step = None if kind == ON_DEVICE else STEPS.fullmatch(text)
        name, attributes, work = text, paddle_traces.Attributes(), WORK_OF_CATEGORY.get(kind)
        known = None if step is not None else paddle_traces.meaning(kind, text)
        ours = "step" if step is not None else KIND_OF_CATEGORY.get(kind, "user")
        if step is not None:
            name = step[1]
        elif known is not None:
            name, (ours, attributes, work) = known
        launches = LAUNCHES.fullmatch(kind) is not None
        counts = kind == OPERATOR and is_counted(name)
        facts = self._facts[of, named] = _Facts(
            place=self._sites.setdefault((name, ours, attributes), len(self._sites)),
            name=name,
            step=None if step is None else int(step[2]),
            work=work,
            launches=launches,
            counts=counts,
            asks=launches or work is not None,
            says_more=step is not None or counts,
        )
        return facts

    def _add_work(self, row: int, facts: _Facts, args: _Asked, lane: _Lane, start_ns: int, end_ns: int) -> None:
        """Work of a device, or a call of the host that asks for some; both name it by a number."""
        known = args.paddles_correlation if args.correlation is UNSET else args.correlation
        correlation = known if _is_number(known) else None
        if facts.work is not None:
            self._device_rows.add(lane.row)
            device = lane.row[0] if args.device is UNSET else args.device
            stream = lane.row[1] if args.stream is UNSET else args.stream
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
        line = self._lines.setdefault((thread_id, 0), len(self._lines))
        lane = self._lanes[event.pid, event.tid] = _Lane(row, thread_id, line, row[1] is not event.tid)
        return lane

    # What has been read

    def trace(self) -> tuple[columns.Trace, spans.Trace]:
        """The slices as columns, and all else as a trace without spans."""
        at_zero, self._at_zero = self._at_zero or [], None
        self._add_sound([one for _, one in at_zero])
        start_ns, end_ns = column(self._start_ns), column(self._end_ns)
        clipped = np.zeros(len(start_ns), dtype=np.bool_)
        order_in_file, strays = self._close_marks(end_ns, clipped)
        first_ns, last_ns = self._bounds(start_ns, end_ns)
        # Those that begin and end at once stay as they stand in the file.
        order = np.lexsort((order_in_file, -end_ns, start_ns))
        start_ns, end_ns = start_ns[order], end_ns[order]
        parent = _parents(start_ns, end_ns, column(self._line)[order], self._rounding_ns)
        rank = rank_of(order)
        task_id, site = column(self._task_id)[order], column(self._site)[order].astype(np.int32)
        self._task_id, self._site, self._line = array("q"), array("q"), array("q")  # which are as large as columns
        self._tell_flops(parent, rank)
        span_id = np.arange(1, 1 + len(order))
        inner = np.flatnonzero(parent != NONE)
        total_ns = end_ns - start_ns
        children_ns = lengths_by_group(parent[inner], start_ns[inner], end_ns[inner], len(order))
        found = columns.Trace(
            sites=tuple(Site(name, kind, attributes=attributes) for name, kind, attributes in self._sites),
            errors=(),
            span_id=span_id,
            parent_id=np.where(parent == NONE, 0, parent + np.int64(1)),
            root_id=tops(parent) + np.int64(1),
            thread_id=column(self._thread_id)[order],
            task_id=task_id,
            start_ns=start_ns,
            end_ns=end_ns,
            active_ns=total_ns,
            self_ns=total_ns - children_ns,
            site=site,
            error=np.full(len(order), NONE, dtype=np.int32),
            clipped=clipped[order],
            device=DeviceIntervals.none(),
            attributes=self._attributes.packed(rank),
            remote={},
        )
        return found, self._beside(first_ns, last_ns, strays)

    def _bounds(self, start_ns: Int64s, end_ns: Int64s) -> tuple[int, int]:
        """The first and the last that happened, 0 where nothing has."""
        at_ns = np.frombuffer(self._allocations, dtype=np.int64)[1::7]
        starts, ends = (np.concatenate((times, at_ns)) for times in (start_ns, end_ns))
        return (int(starts.min()), int(ends.max())) if len(starts) else (0, 0)

    def _beside(self, first_ns: int, last_ns: int, strays: int) -> spans.Trace:
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
        counted = {"slice ends without a begin": strays, "[memory] events without a size": self._unsized}
        losses = {**{what: count for what, count in counted.items() if count}, **self._left_out.losses()}
        trace = spans.Trace(origin, first_ns, last_ns, [], threads, losses)
        found = Allocations(self._allocations).in_order()
        if self._work or found:
            trace.kernels, trace.allocations = self._kernels(), found
            trace.watched = first_ns, last_ns
        return trace

    def _kernels(self) -> KernelColumns:
        """The work of devices by start, each with the call that asked for it, wherever in the file that stood."""
        numbers = column(self._work_numbers).reshape(-1, 6)
        numbers = numbers[np.argsort(numbers[:, 3], kind="stable")]
        work, device, stream, start_ns, end_ns, asked = numbers.T
        launch = np.fromiter((self._launches.get(one, NONE) for one in asked.tolist()), np.int64, len(asked))
        is_known = launch != NONE
        thread_id, launched_ns = (
            np.where(is_known, np.append(column(one), 0)[launch], 0) for one in (self._thread_id, self._start_ns)
        )
        names, kinds = dict[str, int](), dict[str, int]()
        tables = [(names.setdefault(name, len(names)), kinds.setdefault(kind, len(kinds))) for name, kind in self._work]
        name, kind = np.array(tables, dtype=np.int32).reshape(-1, 2)[work].T
        numbers_of = (np.ascontiguousarray(one) for one in (device, stream, start_ns, end_ns, thread_id, launched_ns))
        return KernelColumns(tuple(names), tuple(kinds), name, kind, *numbers_of)

    def _close_marks(self, end_ns: Int64s, clipped: columns.Bools) -> tuple[Int64s, int]:
        """End what begins and ends make, by time like a stack; returns where each row stands in the file, those that
        are not complete behind all others, and how many ends had no begin."""
        place = np.arange(len(end_ns), dtype=np.int64)
        if not len(self._mark_ns):
            return place, 0
        at_ns, of, rows = column(self._mark_ns), column(self._mark_of), column(self._mark_row)
        last_ns = max(int(at_ns.max()), int(end_ns.max(initial=int(at_ns[0]))))
        order = np.lexsort((at_ns, of))
        opened: list[int] = []
        strays, known, before = 0, len(place), NONE
        for mark_ns, stack, row in zip(at_ns[order].tolist(), of[order].tolist(), rows[order].tolist(), strict=True):
            if stack != before:
                end_ns[opened], clipped[opened] = last_ns, True
                opened, before = [], stack
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

    def _tell_flops(self, parent: Int32s, rank: Int32s) -> None:
        """Add the attributes of those that tell operations. Where shapes tell some, those of a product or convolution
        are left to the outermost of the operators that tell them."""
        told = np.zeros(len(rank), dtype=np.bool_)
        for at, text in self._telling.items():
            told[rank[at]] = self._counts_flops and flops_told(json.loads(text)) > 0
        outer = nearest(parent, told)
        for at, text in self._telling.items():
            above = parent[rank[at]]
            if above != NONE and outer[above] != NONE:
                text = written({key: value for key, value in json.loads(text).items() if key != FLOPS})
            if len(text) > 2:
                self._attributes.add(at, text)


_SLICES = frozenset("XBEbe")


_VALUES = frozenset((str, int, float, bool))
_NOT_PLAIN = (b"[", b"\\", b"null", b'"flops"')
"""What is in no text of arguments that may stay as it is."""


def are_attributes(args: bytes) -> bool:
    """Whether the text of arguments may stay as it is: it is of numbers, texts and truths, none of which is looked for
    later under a name with escapes."""
    is_flat = args.startswith(b"{") and args.find(b"{", 1) < 0 and len(args) < LONGEST_PLAIN
    return is_flat and not any(mark in args for mark in _NOT_PLAIN)


def _asked(texts: list[bytes]) -> list[_Asked]:
    """Read the arguments that describe the work of a device."""
    try:
        return _decode_asked(b"[%b]" % b",".join(texts))
    except msgspec.MsgspecError:  # for a number that JSON has not, such as NaN
        return [msgspec.convert(_asking(json.loads(text)), _Asked) for text in texts]


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and -INT64 <= value < INT64


def _asking(args: Mapping[str, Any]) -> dict[str, Any]:
    return {key: args[key] for key in ("correlation", "correlation id", "device", "stream") if key in args}


def _arguments(event: TraceEvent) -> dict[str, Any]:
    """The arguments of an event, numbers of any length among them."""
    found = event.args
    try:
        args = msgspec.json.decode(found)
    except msgspec.MsgspecError:
        args = json.loads(bytes(found))
    return args if isinstance(args, dict) else {}


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
    for first in range(0, len(line), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        columns_of_some = (start_ns[some].tolist(), end_ns[some].tolist(), line[some].tolist())
        for row, (start, end, its) in enumerate(zip(*columns_of_some, strict=True), first):
            stack = opened[its]
            # What it crosses holds nothing from here on that it does not hold itself.
            while stack and (stack[-1][0] <= start or stack[-1][0] < end - rounding_ns):
                stack.pop()
            parents.append(stack[-1][1] if stack else NONE)
            stack.append((end, row))
    return np.array(parents, dtype=np.int32)


def _allocation(event: TraceEvent, args: Mapping[str, Any], thread_id: int) -> Allocation:
    """What an event of torch.profiler says that was taken or given back."""
    in_host = args.get("Device Type") == HOST_MEMORY
    return Allocation(
        HOST if in_host else max(checked(args.get("Device Id"), int), 0),
        nanoseconds(event.ts),
        thread_id,
        checked(args.get("Bytes"), int),
        *(checked(args.get(key, 0), int) for key in ("Addr", "Total Allocated", "Total Reserved")),
    )
