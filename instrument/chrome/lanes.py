"""Lanes: the place of each slice in a viewer, and the arrows between them.

* Each process of a merged trace is a process, under a number that no other one has. A task's lane is of one process.
* A span that no task ran is a complete event (`X`) on the lane of its thread.
* Requests, and all that tasks ran, are async slices (`b`, `e`), one lane for each task of a tree: tasks interleave on
  their thread, so they do not nest by time. The lane of a request has category `request`, others have `task`, and
  `args.kind` says what a slice is, because Perfetto nests async slices of one category only.
* The lane of a request has an id among those of all processes, too. A track that has one comes before the processes in
  Perfetto, which shows the threads of a process, its main one first, before what else it has, whatever a file says.
* Where a batch begins that serves a request there is a mark (`n`) on the request's lane.
* A device interval is a complete event of the process `GPU n`, on the lane of its stream. The places that a file names
  put devices last, and threads of steps and batches before others. Perfetto 52 goes by the numbers of slices instead,
  later ones obey for processes alone; chrome://tracing obeys.
* A sample of a gauge is a counter (`C`) of the process that it is of, one track for each gauge. What a device does not
  know is no event, because counters have numbers only; it is in the metadata.
* An arrow that would point into the past, or that the format has no room for, is left out and counted in
  `instrument.arrows_left_out`.
* Slices of a lane must nest, or viewers drop them in silence. One that crosses another, or is deeper than viewers
  show, goes to a further lane such as `MainThread (2)` and has the lane's number in `args.lane`; nothing is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.recording.spans import BATCH_KEYS
from instrument.trace.columns import Bools, Columns, DeviceIntervals, Int32s, Int64s
from instrument.trace.forest import NONE
from instrument.trace.groups import by_first_sight, numbered, ranked, stable_order
from instrument.trace.joined import join
from instrument.trace.layout import in_order, rank_of
from instrument.trace.trace import MergedProcess, Trace

BATCH = 4096
"""Events that are in memory at a time."""

SPARE_PIDS = 1 << 22
"""The first number that no process of Linux has (man 5 proc, pid_max)."""

DEVICE_PIDS = SPARE_TIDS = 1 << 31
"""No process or thread of a host has an id from here on: devices are processes, further lanes are threads there."""

DEEPEST = 511
"""Most slices in one another on a lane. Perfetto draws the 513th at the top, and the 512th looks the same."""


# Processes


class ShownProcess(NamedTuple):
    """A process with the number under which it is shown, which no other one has; `label` is where it ran, if needed."""

    pid: int
    name: str
    label: str
    facts: Trace


class ShownProcesses:
    """The processes of a trace, the first of them also for threads that are of none."""

    def __init__(self, facts: Trace) -> None:
        self._merged = list[MergedProcess](facts.processes)
        its = [one.facts for one in self._merged] or [facts]
        are_of_hosts = len({one.origin.host for one in its}) > 1
        spare, taken = count(SPARE_PIDS), set[int]()
        self.all: list[ShownProcess] = []
        for one in its:
            own, host = one.origin.pid, one.origin.host
            pid = own if 0 <= own < DEVICE_PIDS else 0
            if pid in taken or (not pid and self._merged):
                pid = next(number for number in spare if number not in taken)
            taken.add(pid)
            is_made_up = pid != own and own > 0
            label = " ".join([f"pid {own}"] * is_made_up + [f"host {host}"] * (are_of_hosts and bool(host)))
            self.all.append(ShownProcess(pid, one.origin.service or f"process {own}", label, one))
        self._number = {thread: number for number, one in enumerate(self._merged) for thread in one.threads}

    @property
    def first(self) -> ShownProcess:
        """The process of all that has no thread."""
        return self.all[0]

    def number_of(self, thread_id: int) -> int:
        """The place of the process of a thread."""
        return self._number.get(thread_id, 0)

    def of_thread(self, thread_id: int) -> ShownProcess:
        """The process of a thread."""
        return self.all[self.number_of(thread_id)]

    def own_thread(self, thread_id: int) -> int:
        """The number that its process gave a thread."""
        return self._merged[self.number_of(thread_id)].threads.get(thread_id, thread_id) if self._merged else thread_id

    def thread_name(self, thread_id: int) -> str:
        """The name of a thread in its process."""
        own = self.own_thread(thread_id)
        return self.of_thread(thread_id).facts.threads.get(own) or f"thread {own}"

    def numbers_of(self, thread_ids: Int64s) -> Int64s:
        """The places of the processes of threads."""
        known, places = ranked(thread_ids)
        return np.array(list(map(self.number_of, known.tolist())), dtype=np.int64)[places]


class Board:
    """The lanes of threads and streams in a file, made as slices need them: each has a process and a thread id."""

    def __init__(self, processes: ShownProcesses) -> None:
        self.processes = processes
        self._tids: dict[tuple[int, int], list[int]] = {}
        self._spare_tids = count(SPARE_TIDS)

    def of_thread(self, thread_id: int, number: int = 1) -> tuple[int, int]:
        """Return process and thread id of a thread's lane, by its number from 1."""
        its = self.processes
        return self._lane(its.of_thread(thread_id).pid, thread_id, its.own_thread(thread_id), number)

    def of_stream(self, device: int, stream: int, number: int) -> tuple[int, int]:
        """Return process and thread id of a stream's lane, by its number from 1."""
        return self._lane(DEVICE_PIDS + device % DEVICE_PIDS, stream, stream, number)

    def _lane(self, pid: int, known_id: int, own_id: int, number: int) -> tuple[int, int]:
        tids = self._tids.setdefault((pid, known_id), [])
        while len(tids) < number:
            # Perfetto folds tid 0 into the main thread, and takes none beyond 32 bits.
            tids.append(own_id if not tids and 0 < own_id < SPARE_TIDS else next(self._spare_tids))
        return pid, tids[number - 1]

    def rows(self) -> list[tuple[int, int, list[int]]]:
        """Return process, id in the trace, and ids of the lanes, of each thread and stream."""
        return [(*row, tids) for row, tids in self._tids.items()]


class _Lanes:
    """The lanes of one thread, task or stream, each with the slices that are open there: end and row."""

    __slots__ = ("lanes", "moved", "until")

    def __init__(self) -> None:
        self.lanes: list[list[tuple[int, int]]] = [[]]
        self.until: list[tuple[int, int]] = []
        """Times at which further lanes will be empty."""
        self.moved: dict[int, int] = {}

    def take(self, row: int, caller: int, start_ns: int, end_ns: int) -> tuple[int, int]:
        """Return the number of a slice's lane from 1, and the slice that is innermost around it there.

        A slice goes where its caller was moved to if it can, else to the first lane, else to one that is empty.
        """
        lanes, until = self.lanes, self.until
        for lane in {self.moved.get(caller, 0): None, 0: None}:
            stack = lanes[lane]
            while stack and stack[-1][0] <= start_ns:
                stack.pop()
            if not stack or (stack[-1][0] >= end_ns and len(stack) < DEEPEST):
                break
        else:
            lane = len(lanes)
            while until and until[0][0] <= start_ns and lane == len(lanes):
                _, free = heappop(until)
                if not lanes[free] or lanes[free][0][0] <= start_ns:  # none has come meanwhile
                    lane = free
            if lane == len(lanes):
                lanes.append([])
            stack = lanes[lane]
            stack.clear()
        if lane:
            self.moved[row] = lane
            if not stack:
                heappush(until, (end_ns, lane))
        innermost = stack[-1][1] if stack else NONE
        stack.append((end_ns, row))
        return lane + 1, innermost


def lanes_of(groups: Int64s, above: Int32s, starts: Int64s, ends: Int64s, deep: Bools) -> tuple[Int64s, Int32s]:
    """Return the number of each slice's lane within its group, from 1 on, and the slice around it there, NONE for none.

    Each thread, task or stream is a group. Slices come by begin, the longer ones first. `above` is the slice that
    called each, NONE for none. One that is not `deep` has fewer than `DEEPEST` above it.
    """
    number = np.ones(len(groups), dtype=np.int64)
    if not len(groups):
        return number, above
    is_below = (above != NONE) & (groups[above] == groups)
    around = np.where(is_below, above, np.int32(NONE)).astype(np.int32)
    # A group nests as its slices called one another where each is within its caller, and those of one do not overlap.
    fits = ~is_below | ((above < np.arange(len(groups))) & (ends <= ends[above]) & (starts < ends[above]))
    crowded = np.zeros(int(groups.max()) + 1, dtype=np.bool_)
    crowded[groups[~fits | deep]] = True
    beside = np.where(is_below, above, len(groups) + groups)
    order = stable_order(beside, len(groups) + len(crowded))
    follows = (beside[order][1:] == beside[order][:-1]) & (ends[order][:-1] > starts[order][1:])
    crowded[groups[order[1:][follows]]] = True
    rows = np.flatnonzero(crowded[groups])
    known: dict[int, _Lanes] = {}
    for row, group, *its in one_by_one(rows, *(one[rows] for one in (groups, above, starts, ends))):
        lanes = known.get(group) or known.setdefault(group, _Lanes())
        number[row], around[row] = lanes.take(row, *its)
    return number, around


def one_by_one(*numbers: NDArray[Any]) -> Iterator[tuple[int, ...]]:
    """Yield the rows of columns, some thousand at a time as objects."""
    for first in range(0, len(numbers[0]), BATCH):
        yield from zip(*(column[first : first + BATCH].tolist() for column in numbers), strict=True)


# Slices in their order


class Spans:
    """The spans by begin, the longer ones first: `row` is the row of each in the trace, `place_of` the place of a row.

    Times count from the base of the file, `parent` is the place of the parent, `site` the number of the site among
    `sites`, which are by first sight. `process` is the place of the process among those that are shown.
    """

    def __init__(self, trace: Columns, base_ns: int, processes: ShownProcesses) -> None:
        self.trace, self.row = trace, in_order(trace)
        row, parent = self.row, trace.parent[self.row]
        self.place_of = rank_of(row)
        self.parent = np.where(parent == NONE, np.int32(NONE), self.place_of[parent]) if len(row) else parent
        self.span_id, self.thread_id, self.task_id = trace.span_id[row], trace.thread_id[row], trace.task_id[row]
        self.start_ns, self.end_ns = trace.start_ns[row] - base_ns, trace.end_ns[row] - base_ns
        self.site, firsts = by_first_sight(trace.site[row])
        self.sites = [trace.sites[number] for number in trace.site[row[firsts]].tolist()]
        self.is_request = np.array([one.kind == "request" for one in self.sites], dtype=np.bool_)[self.site]
        self.is_async = (self.task_id != 0) | self.is_request
        self.process = processes.numbers_of(self.thread_id)

    def groups(self) -> Int64s:
        """The thread, or the task of a tree in a process, that each span is on: numbers from 0."""
        threads, groups = ranked(self.thread_id)
        slices = np.flatnonzero(self.is_async)
        if not len(slices):
            return groups
        trees, tasks = (ranked(one[slices])[1] for one in (self.trace.root_id[self.row], self.task_id))
        groups[slices] = len(threads) + numbered(numbered(trees, self.process[slices])[0], tasks)[0]
        return groups

    def lanes(self) -> tuple[Int64s, Int64s, Int32s]:
        """The group of each span, the number of its lane there, and the span that is innermost around it."""
        groups, deep = self.groups(), self.trace.level[self.row] >= DEEPEST
        return groups, *lanes_of(groups, self.parent, self.start_ns, self.end_ns, deep)

    def threads_of_batches(self) -> set[int]:
        """The threads on which steps and batches are slices, which viewers are to show before other threads."""
        kinds = np.array([one.kind in ("step", "batch") for one in self.sites], dtype=np.bool_)
        is_batch = kinds[self.site]
        is_batch[self.place_of[self.trace.attributes.having(BATCH_KEYS)]] = True
        return set(np.unique(self.thread_id[is_batch & ~self.is_async]).tolist())

    def called_away(self) -> tuple[Int64s, Int32s]:
        """The spans that ran on another thread or task than what called them, and these."""
        called = np.flatnonzero(self.parent != NONE)
        callers = self.parent[called]
        away = self.thread_id[callers] != self.thread_id[called]
        away |= self.task_id[callers] != self.task_id[called]
        return called[away], callers[away]


class OrderedIntervals:
    """The device intervals in that order: `owner` is the place of the span that each is of, `number` its number among
    those of that span."""

    def __init__(self, spans: Spans, base_ns: int) -> None:
        its = spans.trace.device
        row = self.row = np.lexsort((-its.end_ns, its.start_ns))
        self.owner = spans.place_of[its.row[row]].astype(np.int64)
        self.number = row - np.searchsorted(its.row, its.row[row])
        self.start_ns, self.end_ns = its.start_ns[row] - base_ns, its.end_ns[row] - base_ns

    def lanes(self, its: DeviceIntervals) -> tuple[Int64s, Int64s, Int32s]:
        """The stream of each, the number of its lane there, and the one that is innermost around it."""
        streams = numbered(ranked(its.device[self.row])[1], ranked(its.stream[self.row])[1])[0]
        nothing = np.full(len(self.row), NONE, dtype=np.int32)
        return streams, *lanes_of(streams, nothing, self.start_ns, self.end_ns, nothing != NONE)


def batches(count: int) -> Iterator[tuple[int, int]]:
    """Yield the begins and ends of batches."""
    for first in range(0, count, BATCH):
        yield first, min(first + BATCH, count)


# Arrows


class BatchMarks:
    """Marks on the lanes of requests, at the begin of each batch that serves one; each is the end of an arrow from it.

    An arrow from a request to a batch of several would be the natural one, but a slice has room for one bind id: so all
    arrows of a batch begin at it. `batch` and `request` are places, a row for each request that goes on as the batch
    begins; `left_out` counts the others.
    """

    def __init__(self, spans: Spans) -> None:
        self.batch = self.request = np.zeros(0, dtype=np.int64)
        self.left_out = 0
        if not len(spans.trace.attributes.having(BATCH_KEYS)):
            return
        joined = join(spans.trace)
        known = np.flatnonzero(joined.served.request != NONE)
        rows = np.stack([joined.served.batch[known], joined.rows[joined.served.request[known]]])
        batch, request = spans.place_of[np.unique(rows, axis=1)].astype(np.int64)
        at_ns = spans.start_ns[batch]
        is_within = (spans.start_ns[request] <= at_ns) & (at_ns < spans.end_ns[request]) & (batch != request)
        self.left_out = int((~is_within).sum())
        self._keep(batch, request, is_within)

    def _keep(self, batch: Int64s, request: Int64s, wanted: Bools) -> None:
        order = np.flatnonzero(wanted)
        order = order[np.argsort(batch[order], kind="stable")]
        self.batch, self.request = batch[order], request[order]

    def leave_out(self, others: Sequence[int]) -> None:
        """Draw none from these batches, whose only bind id is another one's."""
        is_other = np.isin(self.batch, others)
        self.left_out += int(is_other.sum())
        self._keep(self.batch, self.request, ~is_other)


class Arrows:
    """The arrows that a file with these spans and intervals can have.

    Complete events have arrows of their own: from `callers` to `called` spans, and to `launched` intervals. Async
    slices can only be tied by a bind id, and a slice has room for one. Where a span would need two, its own intervals
    win, then the spans that it called. `binds` has the source by place of each tied span, `ties` by place of each tied
    interval. `left_out` counts what is not drawn.
    """

    def __init__(self, spans: Spans, intervals: OrderedIntervals, marks: BatchMarks) -> None:
        self._spans, owners = spans, intervals.owner
        of_async = spans.is_async[owners]
        is_drawn = self._may_lead(owners, intervals.start_ns, of_async)
        self.launched = np.flatnonzero(is_drawn & ~of_async)
        tied = np.flatnonzero(is_drawn & of_async)
        self.ties = dict(zip(tied.tolist(), owners[tied].tolist(), strict=True))
        self.binds = {owner: owner for owner in self.ties.values()}
        self.left_out = int((~is_drawn).sum())
        called, callers = spans.called_away()
        by_bind = spans.is_async[callers] | spans.is_async[called]
        is_drawn = self._may_lead(callers, spans.start_ns[called], by_bind)
        self.called = called[is_drawn & ~by_bind]
        self.left_out += int((~is_drawn).sum())
        by_bind &= is_drawn
        binds = self.binds
        for caller, one in zip(callers[by_bind][::-1].tolist(), called[by_bind][::-1].tolist(), strict=True):
            if one not in binds and binds.get(caller, caller) == caller:
                binds[one] = binds[caller] = caller
            else:
                self.left_out += 1
        marks.leave_out([one for one in np.unique(marks.batch).tolist() if binds.setdefault(one, one) != one])
        self.left_out += marks.left_out

    def _may_lead(self, sources: Int64s | Int32s, targets_ns: Int64s, by_bind: Bools) -> Bools:
        """Return True for arrows that can lead to what starts then. What a bind ties must start later than its source:
        at the same time Perfetto sees complete events before async ones, and what it sees first cannot be an end."""
        starts_ns = self._spans.start_ns[sources]
        return np.asarray((starts_ns < targets_ns) | ((starts_ns == targets_ns) & ~by_bind))
