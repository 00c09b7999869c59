"""The spans of a trace and their device intervals as they stand in a file: by begin, the longer ones first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from instrument.chrome.lanes import DEEPEST, lanes_of
from instrument.chrome.shown_processes import ShownProcesses
from instrument.recording.spans import BATCH_KEYS, Site
from instrument.trace.columns import Bools, DeviceIntervals, Int32s, Int64s, Trace
from instrument.trace.forest import NONE, tops
from instrument.trace.gathering import rank_of
from instrument.trace.groups import by_first_sight, numbered, ranked
from instrument.trace.layout import in_order

BATCH = 4096
"""How many events are in memory as text."""


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
