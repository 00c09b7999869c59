"""Assigns each slice to a lane (a row of the viewer), and selects the arrows between slices.

- A span outside of tasks is a complete event (`X`) on the lane of its thread.
- Requests and the spans of tasks are async slices (`b`, `e`). Each request and each task has a lane.
- A device interval is a complete event of the process `GPU n`, on the lane of its stream.
- A sample of a gauge is a counter (`C`).
- Viewers drop slices that overlap without nesting. Such a slice goes to a further lane, such as `MainThread (2)`.
- An arrow that would point into the past is left out, and counted in `instrument.arrows_left_out`.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.recording.spans import BATCH_KEYS
from instrument.trace.columns import Bools, Columns, DeviceIntervals, Int32s, Int64s
from instrument.trace.indices import (
    NONE,
    invert_order,
    make_mask,
    number_by_first_occurrence,
    number_combinations,
    rank_distinct,
    sort_stably,
)
from instrument.trace.joined import join_requests
from instrument.trace.layout import order_by_start
from instrument.trace.trace import MergedProcess, Trace

BATCH = 4096
"""The maximum number of events in memory at a time."""

SPARE_PIDS = 1 << 22
"""The first number beyond all pids of Linux (man 5 proc, pid_max)."""

DEVICE_PIDS = SPARE_TIDS = 1 << 31
"""The first number above a host's process and thread ids, used for devices and additional lanes."""

DEEPEST = 511
"""The maximum depth of slices in a lane. Perfetto draws deeper slices at the top of the lane."""


# Processes


class ShownProcess(NamedTuple):
    """A process as the viewer shows it.

    - `pid`: the number in the viewer, unique in the file
    - `label`: the real process id and the host, if the viewer must show them
    - `facts`: a trace with the names of the threads
    """

    pid: int
    name: str
    label: str
    facts: Trace


class ShownProcesses:
    """The processes of a trace, as the viewer shows them. A thread without a process belongs to the first process."""

    def __init__(self, facts: Trace) -> None:
        self._merged = list[MergedProcess](facts.processes)
        processes = [process.facts for process in self._merged] or [facts]
        are_of_hosts = len({process.origin.host for process in processes}) > 1
        spare, used = count(SPARE_PIDS), set[int]()
        self.all: list[ShownProcess] = []
        for process in processes:
            own_pid, host = process.origin.pid, process.origin.host
            pid = own_pid if 0 <= own_pid < DEVICE_PIDS else 0
            if pid in used or (not pid and self._merged):
                pid = next(number for number in spare if number not in used)
            used.add(pid)
            is_made_up = pid != own_pid and own_pid > 0
            label = " ".join([f"pid {own_pid}"] * is_made_up + [f"host {host}"] * (are_of_hosts and bool(host)))
            self.all.append(ShownProcess(pid, process.origin.service or f"process {own_pid}", label, process))
        self._number = {thread: number for number, process in enumerate(self._merged) for thread in process.threads}

    def find_process_number(self, thread_id: int) -> int:
        return self._number.get(thread_id, 0)

    def process_of_thread(self, thread_id: int) -> ShownProcess:
        return self.all[self.find_process_number(thread_id)]

    def original_thread_id_of(self, thread_id: int) -> int:
        return (
            self._merged[self.find_process_number(thread_id)].threads.get(thread_id, thread_id)
            if self._merged
            else thread_id
        )

    def thread_name(self, thread_id: int) -> str:
        own_id = self.original_thread_id_of(thread_id)
        return self.process_of_thread(thread_id).facts.threads.get(own_id) or f"thread {own_id}"

    def find_process_numbers(self, thread_ids: Int64s) -> Int64s:
        distinct_ids, places = rank_distinct(thread_ids)
        return np.array(list(map(self.find_process_number, distinct_ids.tolist())), dtype=np.int64)[places]


class Board:
    """The lanes of a file. A lane is a pair of process id and thread id, and is added at its first use."""

    def __init__(self, processes: ShownProcesses) -> None:
        self.processes = processes
        self.tids: dict[tuple[int, int], list[int]] = {}
        """The ids of the lanes of each thread and stream, by its process and its id in the trace."""
        self._spare_tids = count(SPARE_TIDS)

    def find_thread_lane(self, thread_id: int, number: int = 1) -> tuple[int, int]:
        """Return the process id and the thread id of a thread's lane. `number` counts the lanes of a thread from 1."""
        processes = self.processes
        return self._assign_lane(
            processes.process_of_thread(thread_id).pid, thread_id, processes.original_thread_id_of(thread_id), number
        )

    def find_stream_lane(self, device: int, stream: int, number: int) -> tuple[int, int]:
        """Return the process id and the thread id of a stream's lane. `number` counts the lanes of a stream from 1."""
        return self._assign_lane(DEVICE_PIDS + device % DEVICE_PIDS, stream, stream, number)

    def _assign_lane(self, pid: int, known_id: int, own_id: int, number: int) -> tuple[int, int]:
        tids = self.tids.setdefault((pid, known_id), [])
        while len(tids) < number:
            # Perfetto folds tid 0 into the main thread, and rejects tids beyond 32 bits.
            tids.append(own_id if not tids and 0 < own_id < SPARE_TIDS else next(self._spare_tids))
        return pid, tids[number - 1]


class _Lanes:
    """The lanes of a thread, task or stream. Each lane is a stack of open slices, which are pairs of end time and
    row."""

    __slots__ = ("lanes", "moved", "until")

    def __init__(self) -> None:
        self.lanes: list[list[tuple[int, int]]] = [[]]
        self.until: list[tuple[int, int]] = []
        """The times at which further lanes become empty, as a heap."""
        self.moved: dict[int, int] = {}

    def place_slice(self, row: int, caller: int, start_ns: int, end_ns: int) -> tuple[int, int]:
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
                if not lanes[free] or lanes[free][0][0] <= start_ns:  # the lane has no new slice
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


def assign_lanes(groups: Int64s, above: Int32s, starts: Int64s, ends: Int64s, deep: Bools) -> tuple[Int64s, Int32s]:
    """Return the number of the lane of each slice, and the index of the innermost enclosing slice, or `NONE`.

    The slices must be sorted by start time. Of equal starts, the longest slice is first. A slice joins the lane of a
    caller in the same group, if there is room.

    - `groups`: the thread, task or stream of each slice
    - `above`: the index of the caller of each slice, or `NONE`
    - `deep`: True for slices with `DEEPEST` or more ancestors
    """
    number = np.ones(len(groups), dtype=np.int64)
    if not len(groups):
        return number, above
    is_below = (above != NONE) & (groups[above] == groups)
    around = np.where(is_below, above, np.int32(NONE)).astype(np.int32)
    # A group needs one lane if each slice is within its caller, and slices of one caller do not overlap.
    fits = ~is_below | ((above < np.arange(len(groups))) & (ends <= ends[above]) & (starts < ends[above]))
    crowded = make_mask(groups[~fits | deep], int(groups.max()) + 1)
    siblings = np.where(is_below, above, len(groups) + groups)
    order = sort_stably(siblings, len(groups) + len(crowded))
    follows = (siblings[order][1:] == siblings[order][:-1]) & (ends[order][:-1] > starts[order][1:])
    crowded[groups[order[1:][follows]]] = True
    rows = np.flatnonzero(crowded[groups])
    lanes_by_group: dict[int, _Lanes] = {}
    for row, group, *interval in iterate_rows(rows, *(column[rows] for column in (groups, above, starts, ends))):
        lanes = lanes_by_group.get(group) or lanes_by_group.setdefault(group, _Lanes())
        number[row], around[row] = lanes.place_slice(row, *interval)
    return number, around


def iterate_rows(*numbers: NDArray[Any]) -> Iterator[tuple[int, ...]]:
    """Yield the rows of columns as tuples. Only `BATCH` rows are in memory at a time."""
    for first in range(0, len(numbers[0]), BATCH):
        yield from zip(*(column[first : first + BATCH].tolist() for column in numbers), strict=True)


# Slices in their order


class Spans:
    """The spans of a file, sorted by start time. Spans with the same start are sorted by length, the longest first.

    - `row`: the row of each span in the trace
    - `place_of`: the index among these spans for each row of the trace
    - `start_ns`, `end_ns`: times since the base time of the file
    """

    def __init__(self, trace: Columns, base_ns: int, processes: ShownProcesses) -> None:
        self.trace, self.row = trace, order_by_start(trace)
        row, parent = self.row, trace.parent[self.row]
        self.place_of = invert_order(row)
        self.parent = np.where(parent == NONE, np.int32(NONE), self.place_of[parent]) if len(row) else parent
        self.span_id, self.thread_id, self.task_id = trace.span_id[row], trace.thread_id[row], trace.task_id[row]
        self.start_ns, self.end_ns = trace.start_ns[row] - base_ns, trace.end_ns[row] - base_ns
        self.site, firsts = number_by_first_occurrence(trace.site[row])
        self.sites = [trace.sites[number] for number in trace.site[row[firsts]].tolist()]
        self.is_request = np.array([site.kind == "request" for site in self.sites], dtype=np.bool_)[self.site]
        self.is_async = (self.task_id != 0) | self.is_request
        self.process = processes.find_process_numbers(self.thread_id)

    def number_threads_and_tasks(self) -> Int64s:
        threads, groups = rank_distinct(self.thread_id)
        slices = np.flatnonzero(self.is_async)
        trees, tasks = (rank_distinct(column[slices])[1] for column in (self.trace.root_id[self.row], self.task_id))
        groups[slices] = len(threads) + number_combinations(trees, self.process[slices], tasks)[0]
        return groups

    def assign_lanes(self) -> tuple[Int64s, Int64s, Int32s]:
        groups, deep = self.number_threads_and_tasks(), self.trace.level[self.row] >= DEEPEST
        return groups, *assign_lanes(groups, self.parent, self.start_ns, self.end_ns, deep)

    def find_batch_threads(self) -> set[int]:
        """Return the ids of threads that run steps or batches. Viewers show these threads first."""
        kinds = np.array([site.kind in ("step", "batch") for site in self.sites], dtype=np.bool_)
        is_batch = kinds[self.site]
        is_batch[self.place_of[self.trace.attributes.rows_with_attribute(BATCH_KEYS)]] = True
        return set(np.unique(self.thread_id[is_batch & ~self.is_async]).tolist())

    def find_cross_thread_calls(self) -> tuple[Int64s, Int32s]:
        """Return the spans whose caller ran on another thread or task, and the callers."""
        called = np.flatnonzero(self.parent != NONE)
        callers = self.parent[called]
        away = self.thread_id[callers] != self.thread_id[called]
        away |= self.task_id[callers] != self.task_id[called]
        return called[away], callers[away]


class OrderedIntervals:
    """The device intervals of a file, sorted by start time. Intervals that begin at the same time are sorted by length,
    the longest first.

    - `owner`: the index of each interval's span
    - `number`: the number of each interval within its span
    """

    def __init__(self, spans: Spans, base_ns: int) -> None:
        device = spans.trace.device
        row = self.row = np.lexsort((-device.end_ns, device.start_ns))
        self.owner = spans.place_of[device.row[row]].astype(np.int64)
        self.number = row - np.searchsorted(device.row, device.row[row])
        self.start_ns, self.end_ns = device.start_ns[row] - base_ns, device.end_ns[row] - base_ns

    def assign_lanes(self, device: DeviceIntervals) -> tuple[Int64s, Int64s, Int32s]:
        streams = number_combinations(device.device[self.row], device.stream[self.row])[0]
        nothing = np.full(len(self.row), NONE, dtype=np.int32)
        return streams, *assign_lanes(streams, nothing, self.start_ns, self.end_ns, nothing != NONE)


def split_into_batches(count: int) -> Iterator[tuple[int, int]]:
    for first in range(0, count, BATCH):
        yield first, min(first + BATCH, count)


# Arrows


class BatchMarks(NamedTuple):
    """Marks on the lanes of requests. Each mark shows the begin of a batch that serves the request.

    - `batch`, `request`: the indexes of each mark's batch and request among the spans
    - `left_out`: the number of pairs of batch and request that get no mark
    """

    batch: Int64s
    request: Int64s
    left_out: int

    @classmethod
    def make_batch_marks(cls, spans: Spans) -> BatchMarks:
        if not len(spans.trace.attributes.rows_with_attribute(BATCH_KEYS)):
            return cls(np.zeros(0, np.int64), np.zeros(0, np.int64), 0)
        joined = join_requests(spans.trace)
        pairs = np.flatnonzero(joined.served.request != NONE)
        rows = np.stack([joined.served.batch[pairs], joined.rows[joined.served.request[pairs]]])
        batch, request = spans.place_of[np.unique(rows, axis=1)].astype(np.int64)
        at_ns = spans.start_ns[batch]
        is_within = (spans.start_ns[request] <= at_ns) & (at_ns < spans.end_ns[request]) & (batch != request)
        order = np.flatnonzero(is_within)
        order = order[np.argsort(batch[order], kind="stable")]
        return cls(batch[order], request[order], len(batch) - len(order))


class Arrows:
    """The arrows of a file, from spans to called spans, launched device intervals and marks of requests.

    - `binds`: the bind id of each span, or `NONE`. A bind id is the index of the span where the arrow begins
    - `ties`: the bind id of each device interval, or `NONE`
    - `called`, `launched`: the spans and intervals to which arrows are drawn as pairs of events
    - `left_out`: the number of arrows that are not drawn
    """

    def __init__(self, spans: Spans, intervals: OrderedIntervals) -> None:
        self._spans, owners = spans, intervals.owner
        of_async = spans.is_async[owners]
        is_drawn = self._mask_drawable_arrows(owners, intervals.start_ns, of_async)
        self.left_out = int((~is_drawn).sum())
        binds = {owner: owner for owner in owners[is_drawn & of_async].tolist()}
        called, callers = spans.find_cross_thread_calls()
        by_bind = spans.is_async[callers] | spans.is_async[called]
        can_call = self._mask_drawable_arrows(callers, spans.start_ns[called], by_bind)
        self.called = called[can_call & ~by_bind]
        self.left_out += int((~can_call).sum())
        by_bind &= can_call
        for caller, target in zip(callers[by_bind][::-1].tolist(), called[by_bind][::-1].tolist(), strict=True):
            if target not in binds and binds.get(caller, caller) == caller:
                binds[target] = binds[caller] = caller
            else:
                self.left_out += 1
        self.binds = np.full(len(spans.row), NONE, dtype=np.int64)
        self.binds[list(binds)] = list(binds.values())
        is_free = (self.binds[owners] == NONE) | (self.binds[owners] == owners)
        is_tied = is_drawn & is_free & self._mask_drawable_arrows(owners, intervals.start_ns, is_free)
        self.launched = np.flatnonzero(is_drawn & ~is_tied)
        self.binds[owners[is_tied]] = owners[is_tied]
        self.ties = np.where(is_tied, owners, NONE)
        marks = BatchMarks.make_batch_marks(spans)
        source = self.binds[marks.batch]
        is_free = (source == NONE) | (source == marks.batch)
        self.batch, self.request = marks.batch[is_free], marks.request[is_free]
        self.binds[self.batch] = self.batch
        self.left_out += marks.left_out + int((~is_free).sum())

    def _mask_drawable_arrows(self, sources: Int64s | Int32s, targets_ns: Int64s, by_bind: Bools) -> Bools:
        starts_ns = self._spans.start_ns[sources]
        return np.asarray((starts_ns < targets_ns) | ((starts_ns == targets_ns) & ~by_bind))
