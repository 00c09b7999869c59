"""Reading other profilers' traces: slices of any kind into spans, the work of devices and torch's allocations beside.

Lanes become threads, containment makes the trees, and self times follow from these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain, count
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from instrument import native
from instrument.chrome import paddle_traces
from instrument.chrome.lanes import SPARE_TIDS
from instrument.chrome.operator_flops import flops_of, is_counted
from instrument.profile.kinds import KINDS
from instrument.recording.spans import (
    FLOPS,
    HOST,
    Allocation,
    Allocations,
    Kernel,
    Origin,
    Site,
    Span,
    Trace,
    assign_self_times,
    by_start,
    flops_told,
)
from instrument.trace.text import LIMIT_SPANS, Json, checked, end_of, nanoseconds

if TYPE_CHECKING:
    from instrument.native._foreign import Scanner

_native = native.find("_foreign")

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

WINDOW_OF_TORCH = ("Trace", "Spans")
"""Category and process of the slice by which torch.profiler says how long it watched, which is no call."""


NAMELESS = "(no name)"
"""How a slice without a name is called."""


class _Facts(NamedTuple):
    """What slices of one category and name have in common: where they belong, the number of a step, what kind of work
    of a device they are, whether they may ask for some, and whether their operations are counted."""

    site: Site
    step: int | None
    work: str | None
    launches: bool
    counts: bool


class Foreign:
    """Reads other profilers' traces: slices, whether complete, of begins and ends, or async, and names.

    `marks` are the begins by lane or async key, each a time and a span, and the ends, each a time and None.
    """

    def __init__(self) -> None:
        self.epoch_ns = 0
        self.host = ""
        self.spans: list[Span] = []
        self.marks: dict[tuple[Any, ...], list[tuple[int, Span | None]]] = {}
        self._tasks: dict[tuple[Any, ...], int] = {}
        self._sites: dict[tuple[str, str, paddle_traces.Attributes], Site] = {}
        self._clock_of_paddle = paddle_traces.Clock()
        self._unsized = 0
        self._names: dict[tuple[Any, ...], str] = {}
        self._thread_ids: dict[tuple[Any, ...], int] = {}
        self._taken: set[Any] = set()
        self._spare_ids = count(SPARE_TIDS)
        self._count = 0
        self._work: list[tuple[str, str, int, int, int, int, int | None]] = []
        self._launches: dict[int, Span] = {}
        self._allocations = bytearray()
        self._device_rows: set[tuple[Any, ...]] = set()
        self._telling: list[Span] = []
        self._counts_flops = False

    def scanner(self) -> Scanner | None:
        """What takes plain slices in C. It holds this reader, which therefore does not hold it."""
        if _native is None:
            return None
        asked = self._facts, self._thread_id, self._flops_in
        into = self.spans, self._telling, self._work, self._launches, self._device_rows
        found: Scanner = _native.Scanner(*asked, *into)
        return found

    def scan(self, text: Json, scanner: Scanner) -> bool:
        """Let the scanner take the plain slices that come next; whether there was anything that it took."""
        before = len(self.spans)
        taken = text.advance(scanner.scan)
        self._count_more(len(self.spans) - before)
        return taken

    @property
    def taken(self) -> int:
        """How many events have said something, those of allocations in bytes."""
        return self._count + len(self._allocations)

    def _count_more(self, slices: int) -> None:
        self._count += slices
        if self._count > LIMIT_SPANS:
            raise ValueError(f"it has more than {LIMIT_SPANS} events; record less into one file")

    def add(self, event: dict[str, Any]) -> None:
        phase = checked(event.get("ph", ""), str)
        pid, tid = (checked(event.get(key), int, str, type(None)) for key in ("pid", "tid"))
        row = pid, paddle_traces.thread_of(tid)
        if phase == "M" and event.get("name") in ("process_name", "thread_name"):
            name = paddle_traces.thread_name(checked(event["args"]["name"], str))
            self._names[row if event["name"] == "thread_name" else (pid, None)] = name
        if phase == "i" and event.get("name") == "[memory]":
            self._add_allocation(event, row)
        if phase not in ("X", "B", "E", "b", "e") or (event.get("cat"), row[0]) == WINDOW_OF_TORCH:
            return
        self._count_more(1)
        start_ns = nanoseconds(event.get("ts"))
        key = (row[0], *(f"{event.get(part)}" for part in ("cat", "id", "id2"))) if phase in "be" else row
        if phase in "Ee":
            self.marks.setdefault(key, []).append((start_ns, None))
            return
        category = event.get("cat") or ""
        facts = self._facts(category, event.get("name", NAMELESS))
        span = Span(facts.site, 0, 0, 0, self._thread_id(row), 0, start_ns, start_ns, 0, 0)
        attributes = {k: v for k, v in event.get("args", {}).items() if isinstance(v, (str, int, float))}
        exact = self._clock_of_paddle.times(start_ns, attributes) if row[1] is not tid else None
        span.attributes = attributes
        if facts.step is not None:
            span.attributes["step"] = facts.step
        flops = flops_of(facts.site.name, event.get("args") or {}) if facts.counts else None
        if flops is not None:
            span.attributes[FLOPS] = flops
            self._counts_flops = True
        if FLOPS in span.attributes:
            self._telling.append(span)
        if phase == "X":
            span.end_ns = end_of(start_ns, nanoseconds(event["ts"] + checked(event.get("dur"), float, int)))
            if exact is not None:
                span.start_ns, span.end_ns = exact
            self.spans.append(span)
            self._add_work(facts, event.get("args") or {}, row, span)
            return
        if phase == "b":
            span.task_id = self._tasks.setdefault(key, 1 + len(self._tasks))
        self.marks.setdefault(key, []).append((start_ns, span))

    def _facts(self, category: object, name: object) -> _Facts:
        """What is known of a slice by its category, "" for none, and its name."""
        kind, text = checked(category, str), NAMELESS if name is None else checked(name, str)
        step = None if kind == ON_DEVICE else STEPS.fullmatch(text)
        name, attributes, work = text, paddle_traces.Attributes(), WORK_OF_CATEGORY.get(kind)
        known = None if step is not None else paddle_traces.meaning(kind, text)
        ours = "step" if step is not None else KIND_OF_CATEGORY.get(kind, "user")
        if step is not None:
            name = step[1]
        elif known is not None:
            name, (ours, attributes, work) = known
        key = name, ours, attributes
        return _Facts(
            site=self._sites.setdefault(key, Site(name, ours, attributes=attributes)),
            step=None if step is None else int(step[2]),
            work=work,
            launches=LAUNCHES.fullmatch(kind) is not None,
            counts=kind == OPERATOR and is_counted(key[0]),
        )

    def _flops_in(self, site: Site, args: str) -> int | None:
        """The operations that an event's arguments tell, as the text of JSON."""
        flops = flops_of(site.name, json.loads(args))
        self._counts_flops |= flops is not None
        return flops

    def _add_work(self, facts: _Facts, args: dict[str, Any], row: tuple[Any, ...], span: Span) -> None:
        """Work of a device, or a call of the host that asks for some; both name it by a number."""
        known = args.get("correlation", args.get("correlation id"))
        correlation = known if isinstance(known, int) else None
        if facts.work is not None:
            self._device_rows.add(row)
            device, stream = args.get("device", row[0]), args.get("stream", row[1])
            if isinstance(device, int) and isinstance(stream, int):
                work = span.site.name, facts.work, device, stream, span.start_ns, span.end_ns, correlation
                self._work.append(work)
        elif correlation is not None and facts.launches:
            self._launches[correlation] = span

    def _add_allocation(self, event: dict[str, Any], row: tuple[Any, ...]) -> None:
        args = event.get("args")
        is_torchs = isinstance(args, dict) and "Bytes" in args
        found = (
            _allocation(event, self._thread_id(row))
            if is_torchs
            else paddle_traces.allocation(event, self._thread_id(row))
        )
        if found is not None:
            self._allocations += Allocations.of([found]).rows
        elif event.get("cat") not in paddle_traces.RESERVING:
            self._unsized += 1
        if len(self._allocations) > LIMIT_SPANS * Allocations.ROW.size:
            raise ValueError(f"it has more than {LIMIT_SPANS} allocations; record less into one file")

    def _kernels(self) -> list[Kernel]:
        """The work of devices by start, each with the call that asked for it, wherever in the file that stood."""
        found, work = list[Kernel](), self._work
        work.sort(key=itemgetter(4))
        work.reverse()
        while work:  # which goes as they come: each is 200 bytes
            name, kind, device, stream, start_ns, end_ns, known = work.pop()
            launch = self._launches.get(known or 0)
            asked = (0, 0) if launch is None else (launch.thread_id, launch.start_ns)
            found.append(Kernel(name, kind, device, stream, start_ns, end_ns, *asked))
        return found

    def _thread_id(self, row: tuple[Any, ...]) -> int:
        if row not in self._thread_ids:
            usable = type(row[1]) is int and 0 <= row[1] < SPARE_TIDS and row[1] not in self._taken
            self._thread_ids[row] = row[1] if usable else next(self._spare_ids)
            self._taken.add(row[1])
        return self._thread_ids[row]

    def trace(self) -> Trace:
        strays = self._close_marks()
        self._nest()
        if self._counts_flops:
            _count_outermost(self.spans, {span.span_id: flops_told(span.attributes) for span in self._telling})
        assign_self_times(self.spans)
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
            realtime_ns=self.epoch_ns,
            recorder="other",
            host=self.host,
        )
        found = Allocations(self._allocations).in_order()
        ends = [one.at_ns for one in (*found[:1], *found[-1:])]
        first_ns = min(chain(ends, (span.start_ns for span in self.spans)), default=0)
        last_ns = max(chain(ends, (span.end_ns for span in self.spans)), default=0)
        counted = {"slice ends without a begin": strays, "[memory] events without a size": self._unsized}
        losses = {what: count for what, count in counted.items() if count}
        trace = Trace(origin, first_ns, last_ns, self.spans, threads, losses)
        if self._work or found:
            trace.kernels, trace.allocations = self._kernels(), found
            trace.watched = first_ns, last_ns
        return trace

    def _close_marks(self) -> int:
        """Make spans of begins and ends, by time like a stack; returns how many ends had no begin."""
        if not self.marks:
            return 0
        times = [span.end_ns for span in self.spans] + [at_ns for marks in self.marks.values() for at_ns, _ in marks]
        last_ns = max(times, default=0)
        strays = 0
        for marks in self.marks.values():
            opened: list[Span] = []
            for at_ns, span in sorted(marks, key=itemgetter(0)):
                if span is not None:
                    opened.append(span)
                    self.spans.append(span)
                elif opened:
                    opened.pop().end_ns = at_ns
                else:
                    strays += 1
            for span in opened:
                span.end_ns, span.clipped = last_ns, True
        return strays

    def _nest(self) -> None:
        """Make each span a child of that which began last of those in its lane that hold it.

        One that crosses another lies beside it: a range of torch.profiler with stacks begins within a call of Python
        (`__enter__`) and ends within another.
        """
        by_start(self.spans)  # they have no ids yet: those that begin and end at once stay as they stand in the file
        if _native is not None and _native.nest(self.spans):
            return
        opened: dict[tuple[int, int], list[Span]] = {}
        for span_id, span in enumerate(self.spans, start=1):
            stack = opened.setdefault((span.thread_id, span.task_id), [])
            # What it crosses holds nothing from here on that it does not hold itself.
            while stack and (stack[-1].end_ns <= span.start_ns or stack[-1].end_ns < span.end_ns):
                stack.pop()
            span.span_id = span.root_id = span_id
            span.active_ns = span.total_ns
            if stack:
                span.parent_id, span.root_id = stack[-1].span_id, stack[-1].root_id
            stack.append(span)


def _allocation(event: dict[str, Any], thread_id: int) -> Allocation:
    """What an event of torch.profiler says that was taken or given back."""
    args = event["args"]
    in_host = args.get("Device Type") == HOST_MEMORY
    return Allocation(
        HOST if in_host else max(checked(args.get("Device Id"), int), 0),
        nanoseconds(event.get("ts")),
        thread_id,
        checked(args.get("Bytes"), int),
        *(checked(args.get(key, 0), int) for key in ("Addr", "Total Allocated", "Total Reserved")),
    )


def _count_outermost(spans: Sequence[Span], told: Mapping[int, int]) -> None:
    """Leave the operations of a product or convolution to the outermost of the operators that tell them: so many are
    told by id, 0 where what is told is no number of them.

    Spans come after those that they lie in.
    """
    counted: set[int] = set()
    for span in spans:
        if span.parent_id in counted:
            counted.add(span.span_id)
            if span.span_id in told:
                span.attributes = {key: value for key, value in span.attributes.items() if key != FLOPS}
        elif told.get(span.span_id):
            counted.add(span.span_id)
