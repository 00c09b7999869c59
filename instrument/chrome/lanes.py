"""Lanes: where in a viewer each slice lies, and the arrows that lead from one to another.

* A span that no task ran is a complete event (`X`) on the lane of its thread.
* Requests, and all that tasks ran, are async slices (`b`, `e`), one lane for each task of a tree: tasks interleave on
  their thread, so they do not nest by time. The lane of a request has category `request`, others have `task`, and
  `args.kind` says what a slice is, because Perfetto nests async slices of one category only.
* A device interval is a complete event of the process `GPU n`, on the lane of its stream.
* A sample of a gauge is a counter (`C`) of the process that it is of, one track for each gauge. What a device does not
  tell is no event, because counters have numbers only; it stands in the metadata.
* Slices of a lane must nest, or viewers drop them in silence. One that crosses another, or lies deeper than viewers
  show, goes to a further lane such as `MainThread (2)` and has the lane's number in `args.lane`; nothing is cut.
* Arrows lead from a span to what it started on another thread or task and on the device. One that would point into
  the past, or that the format has no room for, is left out and counted in `instrument.arrows_left_out`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from instrument.recording.spans import DeviceInterval, Span
from instrument.trace.text import microseconds

DEVICE_PIDS = SPARE_TIDS = 1 << 31
"""No process or thread of a host has an id from here on: devices are processes, further lanes are threads there."""

SPARE_BINDS = 1 << 63
"""Set in every bind id, because Perfetto numbers the `s` and `f` arrows from 0 in the same space."""

DEEPEST = 511
"""Most slices in one another on a lane. Perfetto draws the 513th at the top, and the 512th looks the same."""


Row = tuple[int, int, list[tuple[int, int]]]
"""The process of a row of lanes, the id of its thread or stream there, and number and tid of each lane."""


def is_async(span: Span) -> bool:
    """Whether the slice of a span is an async one."""
    return span.task_id != 0 or span.site.kind == "request"


class Lane:
    """One row of the viewer, in which slices nest: `ends` are the ends of those now open, outermost first, and `open`
    those spans, of which the last may be over.

    `address` is the text that puts an event there, `mark` the arguments that its place needs. `number` counts the
    lanes of one thread, stream or task. `category` is that of an async lane, `opener` the id of its first span, and
    `closings` are the events that will end its open slices.
    """

    __slots__ = ("address", "category", "closings", "ends", "mark", "number", "open", "opener", "tid")

    def __init__(self, address: str, number: int, mark: str = "", tid: int = 0, opener: int = 0) -> None:
        self.address = address
        self.category = ""
        self.opener = opener
        self.number = number
        self.mark = mark if number == 1 else f'{mark}"lane":{number},'
        self.tid = tid
        self.ends: list[int] = []
        self.open: list[Span] = []
        self.closings: list[str] = []

    def takes(self, start_ns: int, end_ns: int) -> bool:
        """Whether a slice nests here, after those over by its start are closed. Starts must not fall."""
        ends = self.ends
        while ends and ends[-1] <= start_ns:
            ends.pop()
        return len(ends) < DEEPEST and (not ends or ends[-1] >= end_ns)

    def innermost(self) -> Span | None:
        """The span of the innermost open slice."""
        del self.open[len(self.ends) :]
        return self.open[-1] if self.open else None

    def close(self, until_ns: int) -> Iterator[str]:
        """The events that end the async slices which are over by then, innermost first."""
        while self.ends and self.ends[-1] <= until_ns:
            self.ends.pop()
            yield self.closings.pop()


class Board:
    """The lanes of a file, made as slices need them.

    `moved` are the lanes of spans that the first lane of their thread or task did not take. `base_ns` is the time
    from which the file counts.
    """

    def __init__(self, pid: int, base_ns: int) -> None:
        self.base_ns = base_ns
        self.pid = pid
        self.moved: dict[int, Lane] = {}
        self._rows: dict[tuple[int, int], list[Lane]] = {}  # by process and thread or stream
        self._tasks: dict[tuple[int, int], list[Lane]] = {}  # by tree and task
        self._spare_tids = count(SPARE_TIDS)
        self._locals = count(1)

    def time(self, time_ns: int) -> str:
        """The text of the time of an event."""
        return f'"ts":{microseconds(time_ns - self.base_ns)}'

    def first_lane(self, thread_id: int) -> Lane:
        """The first lane of a thread."""
        lanes = self._rows.get((self.pid, thread_id))
        return lanes[0] if lanes else self.thread_lane(thread_id, 0, 0)

    def thread_lane(self, thread_id: int, start_ns: int, end_ns: int, parent_id: int = 0) -> Lane:
        """The lane of a thread that takes a slice."""
        return self._row_lane(self.pid, thread_id, start_ns, end_ns, parent_id)

    def stream_lane(self, interval: DeviceInterval) -> Lane:
        """The lane of a stream that takes a device interval."""
        pid = DEVICE_PIDS + interval.device % DEVICE_PIDS
        return self._row_lane(pid, interval.stream, interval.start_ns, interval.end_ns)

    def task_lane(self, span: Span, events: list[str]) -> Lane:
        """The lane of a span's task that takes it; what ended there by now is added to the events."""
        lanes = self._tasks.setdefault((span.root_id, span.task_id), [])
        for lane in lanes:
            events += lane.close(span.start_ns)
        fitting = self._fitting(lanes, span.start_ns, span.end_ns, span.parent_id)
        if fitting is not None:
            return fitting
        lane = Lane(f',"id2":{{"local":"{next(self._locals):#x}"}}', len(lanes) + 1, opener=span.span_id)
        lane.category = f',"cat":"{"request" if span.site.kind == "request" else "task"}"'
        lanes.append(lane)
        return lane

    def closings(self, until_ns: int) -> Iterator[str]:
        """The ends of the async slices that are over by then. Lanes left empty are forgotten, to save memory."""
        for key, lanes in list(self._tasks.items()):
            for lane in lanes:
                yield from lane.close(until_ns)
            if not any(lane.ends for lane in lanes):
                del self._tasks[key]

    def address(self, span: Span) -> str:
        """Where the complete event of a span lies."""
        return (self.moved.get(span.span_id) or self.first_lane(span.thread_id)).address

    def rows(self) -> list[Row]:
        """The lanes of threads and streams."""
        return [(*row, [(lane.number, lane.tid) for lane in lanes]) for row, lanes in self._rows.items()]

    def _row_lane(self, pid: int, own_id: int, start_ns: int, end_ns: int, parent_id: int = 0) -> Lane:
        lanes = self._rows.setdefault((pid, own_id), [])
        fitting = self._fitting(lanes, start_ns, end_ns, parent_id)
        if fitting is not None:
            return fitting
        # Perfetto folds tid 0 into the main thread, and takes none beyond 32 bits.
        own = not lanes and 0 < own_id < SPARE_TIDS
        tid = own_id if own else next(self._spare_tids)
        mark = "" if own or pid != self.pid else f'"thread":{own_id},'
        lanes.append(Lane(f',"pid":{pid},"tid":{tid}', len(lanes) + 1, mark, tid))
        return lanes[-1]

    def _fitting(self, lanes: list[Lane], start_ns: int, end_ns: int, parent_id: int) -> Lane | None:
        """The one of these lanes that takes a slice: where its parent was moved to if it can be, else the first."""
        beside = self.moved.get(parent_id)
        wanted = lanes if beside is None or beside not in lanes else [beside, *lanes]
        return next((lane for lane in wanted if lane.takes(start_ns, end_ns)), None)


class Arrows:
    """The arrows that a file of these spans can have; `left_out` counts the others.

    Async slices can only be tied by a bind id, of which a slice has room for one: `binds` are those texts by span
    id. Where a span would need two, its own targets win. Complete events have arrows of their own.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.left_out = 0
        self._flows: list[tuple[str, Span, Span | str, int]] = []  # name, source, target or its address, target's time
        bound: dict[int, int] = {}
        for owner in spans:
            if owner.device:
                legal = [_may_lead(owner, interval.start_ns) for interval in owner.device]
                self.left_out += legal.count(False)
                if is_async(owner) and any(legal):
                    bound[owner.span_id] = owner.span_id
        for parent, span in reversed(self._calls(spans)):
            room = span.span_id not in bound and bound.get(parent.span_id, parent.span_id) == parent.span_id
            if room and _may_lead(parent, span.start_ns, bound=True):
                bound[span.span_id] = bound[parent.span_id] = parent.span_id
            else:
                self.left_out += 1
        self.binds = {i: _bind(source_id, "out" if i == source_id else "in") for i, source_id in bound.items()}

    def _calls(self, spans: Sequence[Span]) -> list[tuple[Span, Span]]:
        """Plan the arrows to other threads that need no bind; returns parent and child of those that need one."""
        ties: list[tuple[Span, Span]] = []
        by_id = {span.span_id: span for span in spans}
        for span in spans:
            parent = by_id.get(span.parent_id)
            if parent is None or (parent.thread_id == span.thread_id and parent.task_id == span.task_id):
                continue
            if is_async(parent) or is_async(span):
                ties.append((parent, span))
            elif _may_lead(parent, span.start_ns):
                self._flows.append(("call", parent, span, span.start_ns))
            else:
                self.left_out += 1
        return ties

    def launch(self, owner: Span, interval: DeviceInterval, address: str) -> str:
        """Add the arrow to a device interval; returns the text that ties the interval, if a bind does it."""
        if not _may_lead(owner, interval.start_ns):
            return ""
        if is_async(owner):
            return _bind(owner.span_id, "in")
        self._flows.append(("ac2g", owner, address, interval.start_ns))
        return ""

    def events(self, board: Board) -> Iterator[str]:
        """The arrows between complete events. Both ends attach to the innermost slice at their time."""
        started: set[tuple[str, int]] = set()
        for name, source, target, target_ns in self._flows:
            arrow = f',"name":"{name}","cat":"{name}","id":{source.span_id}'
            if (name, source.span_id) not in started:
                started.add((name, source.span_id))
                yield f'{{"ph":"s"{board.address(source)}{arrow},{board.time(source.start_ns)}}}'
            address = target if isinstance(target, str) else board.address(target)
            yield f'{{"ph":"f","bp":"e"{address}{arrow},{board.time(target_ns)}}}'


def _may_lead(source: Span, target_ns: int, bound: bool = False) -> bool:
    """Whether an arrow can lead to what starts then. The end of a bind must start later than its source: at the
    same time Perfetto sees complete events before async ones, and what it sees first cannot be an end."""
    return source.start_ns < target_ns or (source.start_ns == target_ns and not (bound or is_async(source)))


def _bind(source_id: int, direction: str) -> str:
    return f',"bind_id":"{SPARE_BINDS | source_id:#x}","flow_{direction}":true'
