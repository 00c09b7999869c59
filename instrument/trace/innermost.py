"""The innermost span that was open on a thread at a time, of many threads and times at once.

Time alone would not do: another thread's spans are open at the same time. Nor do a thread and a time where several
tasks of an event loop take turns on it, so that nobody can tell which was at work; and a generator's span is passed
over, because its consumer may have been at work instead.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from instrument.trace.columns import FARTHEST_NS, Bools, Int32s, Int64s, Trace
from instrument.trace.forest import NONE, nearest
from instrument.trace.groups import distinct, numbered
from instrument.trace.layout import in_order
from instrument.trace.self_times import stood_aside
from instrument.trace.turns import highest

SEVERAL = -2
"""What stands for a row where several tasks had spans open."""


class _Open(NamedTuple):
    """Spans that were open at some of the moments asked for, the innermost last: each from `first` to before `end`.

    A moment is a time on a thread; moments are numbered by thread, and those of a thread by time.
    """

    row: Int64s
    first: Int64s
    end: Int64s


class Clock(NamedTuple):
    """Times on threads as one number each: by thread, and those of a thread by time."""

    threads: Int64s
    least_ns: int
    width: int
    known: Int64s | None
    """The times of which the places stand for them, where not so many threads have room for all between them."""

    @classmethod
    def of(cls, thread_ids: Int64s, times_ns: Int64s) -> Clock:
        """For at least one time."""
        threads, least_ns, most_ns = distinct(thread_ids), int(times_ns.min()), int(times_ns.max())
        width = most_ns - least_ns + 2
        if least_ns > -FARTHEST_NS and most_ns < FARTHEST_NS and len(threads) * width < FARTHEST_NS:
            return cls(threads, least_ns, width, None)
        known = distinct(times_ns)
        return cls(threads, 0, len(known) + 1, known)

    def knows(self, thread_ids: Int64s) -> Bools:
        """Which of some threads it has."""
        places = np.searchsorted(self.threads, thread_ids).clip(max=len(self.threads) - 1)
        return np.asarray(self.threads[places] == thread_ids)

    def told(self, thread_ids: Int64s, times_ns: Int64s) -> Int64s:
        """The numbers of times on threads that it knows. Those before the first of all and after the last are as one
        of their own each."""
        thread = np.searchsorted(self.threads, thread_ids)
        if self.known is not None:
            return np.asarray(thread * self.width + np.searchsorted(self.known, times_ns))
        within = np.clip(times_ns, self.least_ns, self.least_ns + self.width - 1)
        return np.asarray(thread * self.width + (within - self.least_ns))


def innermost(trace: Trace, wanted: Bools, thread_ids: Int64s, times_ns: Int64s) -> Int64s:
    """Of each thread and time the row of the innermost wanted span that was open, `NONE` where none was, and `SEVERAL`
    where those of other tasks were open that are not all around it.

    Spans are half-open: what happens at a span's end is not in it. Of those that began at once the shorter one is the
    inner one. Takes n log n, however deep spans lie.
    """
    if not len(times_ns):
        return np.zeros(0, dtype=np.int64)
    clock = Clock.of(thread_ids, times_ns)
    asked = clock.told(thread_ids, times_ns)
    moments = distinct(asked)
    some = _opened(trace, wanted, clock, moments)
    if not len(some.row):
        return np.full(len(asked), NONE, dtype=np.int64)
    last = highest(some.first, some.end, np.arange(len(some.row)), len(moments))
    found = np.where(last == NONE, NONE, some.row[last])
    found[_of_several(trace, some, last)] = SEVERAL
    return np.asarray(found[np.searchsorted(moments, asked)])


def _opened(trace: Trace, wanted: Bools, clock: Clock, moments: Int64s) -> _Open:
    rows = in_order(trace)
    wanted = wanted & ~stood_aside(trace) & clock.knows(trace.thread_id)
    rows = rows[wanted[rows]]
    edges = (clock.told(trace.thread_id[rows], times[rows]) for times in (trace.start_ns, trace.end_ns))
    first, end = (np.searchsorted(moments, edge) for edge in edges)
    kept = np.flatnonzero(first < end)
    return _Open(rows[kept], first[kept], end[kept])


def _of_several(trace: Trace, some: _Open, last: Int64s) -> Int64s:
    """The moments at which spans of other tasks than the last one's were open that are not all around it."""
    line, firsts = numbered(trace.thread_id[some.row], trace.task_id[some.row])
    if len(firsts) == len(distinct(trace.thread_id[some.row[firsts]])):
        return np.zeros(0, dtype=np.int64)  # no thread has several tasks
    moments = np.flatnonzero(last != NONE)
    others = _open_of_other_lines(some, line, last, moments)
    moments, others = moments[others > 0], others[others > 0]
    around = _around_of_other_lines(trace, some, line, last[moments], moments)
    return np.asarray(moments[around != others])


def _open_of_other_lines(some: _Open, line: Int64s, last: Int64s, moments: Int64s) -> Int64s:
    """How many spans that are not of the last one's line were open at each moment."""
    count = len(last)
    changes = np.bincount(some.first, minlength=count + 1) - np.bincount(some.end, minlength=count + 1)
    by_line = [np.sort(line * (count + 1) + edges) for edges in (some.first, some.end)]
    # Of the lines before it as many have begun as have ended.
    at = line[last[moments]] * (count + 1) + moments
    begun, ended = (np.searchsorted(edges, at, side="right") for edges in by_line)
    return np.asarray(np.cumsum(changes)[moments] - (begun - ended))


def _around_of_other_lines(trace: Trace, some: _Open, line: Int64s, spans: Int64s, moments: Int64s) -> Int64s:
    """How many of the spans around each, one in another as far as they were open at its moment, are of other lines.

    Goes up by whole runs of spans of one line of which each was open whenever the one below it was.
    """
    up, level = _parents(trace, some), trace.level[some.row]
    is_run = (up != NONE) & (line[up] == line) & (some.first[up] <= some.first) & (some.end <= some.end[up])
    top = nearest(up, ~is_run)
    found, own = np.zeros(len(spans), dtype=np.int64), line[spans]
    walking = np.arange(len(spans))
    while len(walking):
        tops = top[spans]
        is_other = line[spans] != own[walking]
        found[walking] += np.where(is_other, level[spans] - level[tops] + 1, 0)
        spans = up[tops].astype(np.int64)
        at = moments[walking]
        goes_on = (spans != NONE) & (some.first[spans] <= at) & (at < some.end[spans])
        walking, spans = walking[goes_on], spans[goes_on]
    return found


def _parents(trace: Trace, some: _Open) -> Int32s:
    """The place of the parent of each, `NONE` for one that is not among them on its thread."""
    place_of = np.full(len(trace) + 1, NONE, dtype=np.int32)
    place_of[some.row] = np.arange(len(some.row))
    up = place_of[trace.parent[some.row]]
    thread_id = trace.thread_id[some.row]
    return np.where(thread_id[up] == thread_id, up, np.int32(NONE)).astype(np.int32)
