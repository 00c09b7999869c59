"""Lanes: where in a viewer each slice lies.

* Each process of a merged trace is a process, under a number that no other one has. A task's lane is of one process.
* A span that no task ran is a complete event (`X`) on the lane of its thread.
* Requests, and all that tasks ran, are async slices (`b`, `e`), one lane for each task of a tree: tasks interleave on
  their thread, so they do not nest by time. The lane of a request has category `request`, others have `task`, and
  `args.kind` says what a slice is, because Perfetto nests async slices of one category only.
* The lane of a request has an id among those of all processes, too. What has one stands before the processes in
  Perfetto, which shows the threads of a process, its main one first, before what else it has, whatever a file says.
* Where a batch begins that serves a request there is a mark (`n`) on the request's lane.
* A device interval is a complete event of the process `GPU n`, on the lane of its stream. The places that a file names
  put devices last, and threads of steps and batches before others. Perfetto 52 goes by the numbers of slices instead,
  later ones obey for processes alone; chrome://tracing obeys.
* A sample of a gauge is a counter (`C`) of the process that it is of, one track for each gauge. What a device does not
  tell is no event, because counters have numbers only; it stands in the metadata.
* Slices of a lane must nest, or viewers drop them in silence. One that crosses another, or lies deeper than viewers
  show, goes to a further lane such as `MainThread (2)` and has the lane's number in `args.lane`; nothing is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import numpy as np

from instrument.recording.spans import BATCH_KEYS, MergedProcess, Site
from instrument.recording.spans import Trace as Facts
from instrument.trace.columns import Bools, DeviceIntervals, Int32s, Int64s, Trace
from instrument.trace.forest import NONE, tops
from instrument.trace.gathering import rank_of
from instrument.trace.groups import by_first_sight, numbered, ranked, stable_order
from instrument.trace.layout import in_order

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
    facts: Facts


class ShownProcesses:
    """The processes of a trace, the first of them also for threads that are of none."""

    def __init__(self, facts: Facts) -> None:
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


def lanes_of(groups: Int64s, above: Int32s, starts: Int64s, ends: Int64s, deep: Bools) -> tuple[Int64s, Int32s]:
    """The lanes of slices, of which each thread, task or stream is a group: of each slice the number of its lane among
    those of its group, from 1 on, and the slice that is innermost around it there, `NONE` for none.

    Slices come by begin, the longer ones first. `above` is the slice that called each, `NONE` for none. One that is not
    `deep` has fewer than `DEEPEST` above it.
    """
    number = np.ones(len(groups), dtype=np.int64)
    is_below = above != NONE
    if len(groups):
        is_below &= groups[above] == groups
    around = np.where(is_below, above, np.int32(NONE)).astype(np.int32)
    if not len(groups):
        return number, around
    # Where each slice lies in its caller, and those of one caller do not overlap, all nest as they called one another.
    fits = ~is_below | ((above < np.arange(len(groups))) & (ends <= ends[above]) & (starts < ends[above]))
    crowded = np.zeros(int(groups.max()) + 1, dtype=np.bool_)
    crowded[groups[~fits | deep]] = True
    beside = np.where(is_below, above, len(groups) + groups)
    order = stable_order(beside, len(groups) + len(crowded))
    follows = (beside[order][1:] == beside[order][:-1]) & (ends[order][:-1] > starts[order][1:])
    crowded[groups[order[1:][follows]]] = True
    rows = np.flatnonzero(crowded[groups])
    if len(rows):
        rows = rows[np.argsort(groups[rows], kind="stable")]
        for of_group in np.split(rows, np.flatnonzero(np.diff(groups[rows])) + 1):
            its = (one[of_group].tolist() for one in (above, starts, ends))
            number[of_group], around[of_group] = _in_turn(of_group.tolist(), *its)
    return number, around


def _in_turn(
    rows: Sequence[int], above: Sequence[int], starts: Sequence[int], ends: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The same of the slices of one group, which need not nest: one goes where its caller was moved to if it can, else
    to the first lane, else to one that is empty."""
    lanes: list[list[tuple[int, int]]] = [[]]  # of each the slices that are open there: end and row
    until: list[tuple[int, int]] = []  # when further lanes will be empty
    empty: list[int] = []
    moved: dict[int, int] = {}
    numbers, around = [], []
    for row, caller, start_ns, end_ns in zip(rows, above, starts, ends, strict=True):
        for lane in {moved.get(caller, 0): None, 0: None}:
            stack = lanes[lane]
            while stack and stack[-1][0] <= start_ns:
                stack.pop()
            if not stack or (stack[-1][0] >= end_ns and len(stack) < DEEPEST):
                break
        else:
            while until and until[0][0] <= start_ns:
                _, free = heappop(until)
                if not lanes[free] or lanes[free][0][0] <= start_ns:
                    heappush(empty, free)
            lane = _taken_from(empty, lanes, start_ns)
            stack = lanes[lane]
        if lane:
            moved[row] = lane
            if not stack:
                heappush(until, (end_ns, lane))
        numbers.append(lane + 1)
        around.append(stack[-1][1] if stack else NONE)
        stack.append((end_ns, row))
    return numbers, around


def _taken_from(empty: list[int], lanes: list[list[tuple[int, int]]], start_ns: int) -> int:
    """An empty lane, a new one where there is none. One may have been taken since it was put among the empty ones."""
    while empty:
        lane = heappop(empty)
        if not lanes[lane] or lanes[lane][0][0] <= start_ns:
            lanes[lane].clear()
            return lane
    lanes.append([])
    return len(lanes) - 1


# Slices in their order


class Spans(NamedTuple):
    """The spans in that order: `row` is the row of each in the trace, `place_of` the place of each row.

    Times count from the base of the file, `parent` is the place of the parent, `site` the number of the site among
    `sites`, which are by first sight. `process` is the place of the process among those that are shown.
    """

    trace: Trace
    sites: Sequence[Site]
    row: Int64s
    place_of: Int32s
    span_id: Int64s
    parent: Int32s
    thread_id: Int64s
    task_id: Int64s
    start_ns: Int64s
    end_ns: Int64s
    site: Int64s
    is_request: Bools
    is_async: Bools
    process: Int64s

    @classmethod
    def of(cls, trace: Trace, base_ns: int, processes: ShownProcesses) -> Spans:
        row = in_order(trace)
        place_of, parent, task_id = rank_of(row), trace.parent[row], trace.task_id[row]
        site, firsts = by_first_sight(trace.site[row])
        sites = [trace.sites[number] for number in trace.site[row[firsts]].tolist()]
        is_request = np.array([one.kind == "request" for one in sites], dtype=np.bool_)[site]
        return cls(
            trace=trace,
            sites=sites,
            row=row,
            place_of=place_of,
            span_id=trace.span_id[row],
            parent=np.where(parent == NONE, np.int32(NONE), place_of[parent]) if len(row) else parent,
            thread_id=trace.thread_id[row],
            task_id=task_id,
            start_ns=trace.start_ns[row] - base_ns,
            end_ns=trace.end_ns[row] - base_ns,
            site=site,
            is_request=is_request,
            is_async=(task_id != 0) | is_request,
            process=processes.numbers_of(trace.thread_id[row]),
        )

    def groups(self) -> Int64s:
        """The thread, or the task of a tree in a process, that each span is on: numbers from 0."""
        threads, groups = ranked(self.thread_id)
        slices = np.flatnonzero(self.is_async)
        if not len(slices):
            return groups
        # Most spans are on the task of their parent: so few are looked at one by one.
        root_id, task_id, above = self.trace.root_id[self.row], self.task_id, self.parent
        goes_on = (above != NONE) & self.is_async & self.is_async[above]
        goes_on &= (root_id == root_id[above]) & (task_id == task_id[above])
        goes_on &= self.process == self.process[above]
        first_of = tops(np.where(goes_on, above, np.int32(NONE)).astype(np.int32))
        firsts = np.flatnonzero(self.is_async & ~goes_on)
        number_of = np.zeros(len(groups), dtype=np.int64)
        trees, tasks = ranked(root_id[firsts])[1], ranked(task_id[firsts])[1]
        number_of[firsts] = numbered(numbered(trees, self.process[firsts])[0], tasks)[0]
        groups[slices] = len(threads) + number_of[first_of[slices]]
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


class OrderedIntervals(NamedTuple):
    """The device intervals in that order: `owner` is the place of the span that each is of, `number` its number among
    those of that span."""

    row: Int64s
    owner: Int64s
    number: Int64s
    start_ns: Int64s
    end_ns: Int64s

    @classmethod
    def of(cls, spans: Spans, base_ns: int) -> OrderedIntervals:
        its = spans.trace.device
        row = np.lexsort((-its.end_ns, its.start_ns))
        return cls(
            row=row,
            owner=spans.place_of[its.row[row]].astype(np.int64),
            number=row - np.searchsorted(its.row, its.row[row]),
            start_ns=its.start_ns[row] - base_ns,
            end_ns=its.end_ns[row] - base_ns,
        )

    def lanes(self, its: DeviceIntervals) -> tuple[Int64s, Int64s, Int32s]:
        """The stream of each, the number of its lane there, and the one that is innermost around it."""
        streams = numbered(ranked(its.device[self.row])[1], ranked(its.stream[self.row])[1])[0]
        nothing = np.full(len(self.row), NONE, dtype=np.int32)
        return streams, *lanes_of(streams, nothing, self.start_ns, self.end_ns, nothing != NONE)


def batches(count: int) -> Iterator[tuple[int, int]]:
    """The begins and ends of batches of so many events."""
    for first in range(0, count, BATCH):
        yield first, min(first + BATCH, count)
