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

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import numpy as np

from instrument.chrome.shown_processes import ShownProcesses
from instrument.trace.columns import Bools, Int32s, Int64s
from instrument.trace.forest import NONE
from instrument.trace.groups import stable_order

DEVICE_PIDS = SPARE_TIDS = 1 << 31
"""No process or thread of a host has an id from here on: devices are processes, further lanes are threads there."""

DEEPEST = 511
"""Most slices in one another on a lane. Perfetto draws the 513th at the top, and the 512th looks the same."""


Row = tuple[int, int, list[tuple[int, int]]]
"""The process of a row of lanes, the id of its thread or stream in the trace, and number and tid of each lane."""


class Lane(NamedTuple):
    """One row of the viewer, in which slices nest.

    `address` is the text that puts an event there, `mark` the arguments that its place needs.
    """

    address: str
    mark: str


class Board:
    """The lanes of threads and streams of a file, made as slices need them."""

    def __init__(self, processes: ShownProcesses) -> None:
        self.processes = processes
        self._lanes: dict[tuple[int, int], list[Lane]] = {}
        self._tids: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._spare_tids = count(SPARE_TIDS)

    def of_thread(self, thread_id: int, number: int = 1) -> Lane:
        """A lane of a thread, by its number from 1."""
        processes = self.processes
        lanes, lane = self._lanes_of(processes.of_thread(thread_id).pid, thread_id)
        while len(lanes) < number:
            tid = self._tid(processes.own_thread(thread_id), is_further=bool(lanes))
            lane(tid, "" if tid == thread_id else f'"thread":{thread_id},')
        return lanes[number - 1]

    def of_stream(self, device: int, stream: int, number: int) -> Lane:
        """A lane of a stream, by its number from 1."""
        lanes, lane = self._lanes_of(DEVICE_PIDS + device % DEVICE_PIDS, stream)
        while len(lanes) < number:
            lane(self._tid(stream, is_further=bool(lanes)), "")
        return lanes[number - 1]

    def _tid(self, own: int, *, is_further: bool) -> int:
        # Perfetto folds tid 0 into the main thread, and takes none beyond 32 bits.
        return own if not is_further and 0 < own < SPARE_TIDS else next(self._spare_tids)

    def _lanes_of(self, pid: int, known_id: int) -> tuple[list[Lane], Callable[[int, str], None]]:
        """The lanes of a thread or stream, and what adds one."""
        lanes, tids = self._lanes.setdefault((pid, known_id), []), self._tids.setdefault((pid, known_id), [])

        def add(tid: int, mark: str) -> None:
            lanes.append(Lane(f',"pid":{pid},"tid":{tid}', mark + lane_mark(len(lanes) + 1)))
            tids.append((len(lanes), tid))

        return lanes, add

    def rows(self) -> list[Row]:
        """The lanes of threads and streams."""
        return [(*row, tids) for row, tids in self._tids.items()]


def lane_mark(number: int) -> str:
    """The argument of what lies on a further lane."""
    return "" if number == 1 else f'"lane":{number},'


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
