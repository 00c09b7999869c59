"""Self times, and the innermost span that was open on a thread at a time: who was at work.

A self time is the part of a span's time that no child took on its thread and task. A span runs while its body does. A
coroutine that is suspended waits, and so does what it awaits and what awaits it; the time is the innermost one's own
waiting. A generator stands still between two items while others run, which is no part of its self time.

A time alone does not name the innermost span, because other threads' spans are open at the same time. Nor do a thread
and a time where several tasks of an event loop take turns on it. A generator's span is passed over, because its
consumer may have been at work instead. Turns give each instant to one of the intervals that overlap, so that it counts
once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.trace.columns import FARTHEST_NS, Bools, Columns, Int32s, Int64s
from instrument.trace.forest import NONE, by_level, nearest
from instrument.trace.groups import distinct, numbered
from instrument.trace.intervals import lengths_by_group
from instrument.trace.layout import in_order


def self_times_of(trace: Columns, rows: Int64s) -> Int64s:
    """Return the total of some rows, each less the union of the children on its line, clipped to it."""
    wanted = np.zeros(len(trace), dtype=np.bool_)
    wanted[rows] = True
    return trace.total_ns[rows] - _within_children(trace, trace.on_line_of_parent & wanted[trace.parent])[rows]


def waiting_times(trace: Columns) -> Int64s:
    """Return the waiting part of each span's self time: the rest, once it has run while no child on its line ran.

    One that was active all the time has not waited.
    """
    if not (trace.active_ns < trace.total_ns).any():
        return np.zeros(len(trace), dtype=np.int64)
    ran_ns = np.maximum(trace.active_ns - _of_children(trace, trace.active_ns), 0)
    return np.asarray(np.clip(trace.self_ns - ran_ns, 0, np.maximum(trace.total_ns - trace.active_ns, 0)))


def stood_aside(trace: Columns) -> Bools:
    """Return True for generators that stood still for longer than they waited: others ran meanwhile."""
    stood_ns = trace.total_ns - trace.active_ns
    if not (stood_ns > 0).any():
        return np.zeros(len(trace), dtype=np.bool_)
    # The time that counts against whoever resumed it, self times at and below it on its line.
    counted_ns = trace.self_ns.copy()
    is_on_line = trace.on_line_of_parent
    for rows in reversed(by_level(trace.level)):
        below = rows[is_on_line[rows]]
        np.add.at(counted_ns, trace.parent[below], counted_ns[below])
    return np.asarray((stood_ns > 0) & (2 * (trace.total_ns - counted_ns) > stood_ns))


def _of_children(trace: Columns, times_ns: Int64s) -> Int64s:
    """The sums of the times of each span's children on its line."""
    found = np.zeros(len(trace), dtype=np.int64)
    children = np.flatnonzero(trace.on_line_of_parent)
    np.add.at(found, trace.parent[children], times_ns[children])
    return found


def _within_children(trace: Columns, which: Bools) -> Int64s:
    """Return the time of each span that is within some of its children."""
    children = np.flatnonzero(which)
    parents = trace.parent[children]
    starts = np.maximum(trace.start_ns[children], trace.start_ns[parents])
    ends = np.minimum(trace.end_ns[children], trace.end_ns[parents])
    return lengths_by_group(parents, starts, ends, len(trace))


# The innermost span at a time, and turns


def turns(groups: Int64s, starts: Int64s, ends: Int64s, ranks: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Return the turns of intervals in their group, by group and time: the interval's place, begin and end of each.

    An instant belongs to the interval of the highest rank, of which there are no two alike, among those of the group
    that go on then. Takes n log n however many are open at once.
    """
    filled = np.flatnonzero(starts < ends)
    if not len(filled):
        return filled, filled, filled
    edges, place_of = _edges(groups[filled], starts[filled], ends[filled])
    ranked = highest(place_of[: len(filled)], place_of[len(filled) :], ranks[filled], len(edges))
    taken = np.flatnonzero(ranked != NONE)  # nothing goes on from a group's last edge to the next group's first
    with_rank = np.empty(int(ranks.max()) + 1, dtype=np.int64)
    with_rank[ranks[filled]] = filled
    return with_rank[ranked[taken]], edges[taken], edges[taken + 1]


def _edges(groups: Int64s, starts: Int64s, ends: Int64s) -> tuple[Int64s, Int64s]:
    """Return the distinct times at which intervals of each group begin or end, by group.

    The second result has the places of all begins among them, and then of all ends.
    """
    times, of_edges = np.concatenate([starts, ends]), np.concatenate([groups, groups])
    order = np.lexsort((times, of_edges))
    times, of_edges = times[order], of_edges[order]
    is_new = np.concatenate([[True], (times[1:] != times[:-1]) | (of_edges[1:] != of_edges[:-1])])
    place_of = np.empty(len(order), dtype=np.int64)
    place_of[order] = np.cumsum(is_new) - 1
    return times[is_new], place_of


def highest(firsts: Int64s, ends: Int64s, ranks: Int64s, count: int) -> NDArray[np.int64]:
    """Return the highest rank of the intervals that reach over each place, `NONE` without any.

    Two blocks of a power of two places, which may lie over one another, are as much as one reaches over. Blocks are
    handed down from the largest to those of one place: each to its two halves.
    """
    exponents = np.frexp((ends - firsts).astype(np.float64))[1] - 1
    by_exponent = np.argsort(exponents, kind="stable")
    of_each = np.searchsorted(exponents[by_exponent], np.arange(int(exponents.max()) + 2))
    found = np.full(count, NONE, dtype=np.int64)
    for exponent in range(int(exponents.max()), -1, -1):
        its = by_exponent[of_each[exponent] : of_each[exponent + 1]]
        block = 1 << exponent
        np.maximum.at(found, firsts[its], ranks[its])
        np.maximum.at(found, ends[its] - block, ranks[its])
        half = block >> 1
        if half:
            found[half:] = np.maximum(found[half:], found[:-half])
    return found


SEVERAL = -2
"""The row where several tasks had spans open."""


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
        """Return the clock of at least one time."""
        threads, least_ns, most_ns = distinct(thread_ids), int(times_ns.min()), int(times_ns.max())
        width = most_ns - least_ns + 2
        if least_ns > -FARTHEST_NS and most_ns < FARTHEST_NS and len(threads) * width < FARTHEST_NS:
            return cls(threads, least_ns, width, None)
        known = distinct(times_ns)
        return cls(threads, 0, len(known) + 1, known)

    def knows(self, thread_ids: Int64s) -> Bools:
        """Return True for the threads that it has."""
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


def innermost(trace: Columns, wanted: Bools, thread_ids: Int64s, times_ns: Int64s) -> Int64s:
    """Return the row of the innermost wanted span that was open per thread and time, `NONE` where none was.

    It is `SEVERAL` where spans of other tasks were open that are not all around it.

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


def _opened(trace: Columns, wanted: Bools, clock: Clock, moments: Int64s) -> _Open:
    rows = in_order(trace)
    wanted = wanted & ~stood_aside(trace) & clock.knows(trace.thread_id)
    rows = rows[wanted[rows]]
    edges = (clock.told(trace.thread_id[rows], times[rows]) for times in (trace.start_ns, trace.end_ns))
    first, end = (np.searchsorted(moments, edge) for edge in edges)
    kept = np.flatnonzero(first < end)
    return _Open(rows[kept], first[kept], end[kept])


def _of_several(trace: Columns, some: _Open, last: Int64s) -> Int64s:
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
    """Count the open spans at each moment that are not of the last one's line."""
    count = len(last)
    changes = np.bincount(some.first, minlength=count + 1) - np.bincount(some.end, minlength=count + 1)
    by_line = [np.sort(line * (count + 1) + edges) for edges in (some.first, some.end)]
    # Of the lines before it as many have begun as have ended.
    at = line[last[moments]] * (count + 1) + moments
    begun, ended = (np.searchsorted(edges, at, side="right") for edges in by_line)
    return np.asarray(np.cumsum(changes)[moments] - (begun - ended))


def _around_of_other_lines(trace: Columns, some: _Open, line: Int64s, spans: Int64s, moments: Int64s) -> Int64s:
    """Count the spans around each, one in another as far as they were open at its moment, are of other lines.

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


def _parents(trace: Columns, some: _Open) -> Int32s:
    """The place of the parent of each, `NONE` for one that is not among them on its thread."""
    place_of = np.full(len(trace) + 1, NONE, dtype=np.int32)
    place_of[some.row] = np.arange(len(some.row))
    up = place_of[trace.parent[some.row]]
    thread_id = trace.thread_id[some.row]
    return np.where(thread_id[up] == thread_id, up, np.int32(NONE)).astype(np.int32)
