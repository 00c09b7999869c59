"""Computes self times of spans, and finds the innermost open span of a thread at given times.

A self time is the part of a span's time in which no child ran on the same thread and task. The wait of suspended nested
coroutines counts for the innermost coroutine only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.indices import (
    NONE,
    find_distinct,
    find_nearest_row,
    index_rows,
    make_mask,
    number_combinations,
    rows_by_level,
)
from instrument.trace.intervals import lengths_by_group, shift_to_one_axis
from instrument.trace.layout import order_by_start


def self_times_of(trace: Columns, rows: Int64s) -> Int64s:
    """Return the self time of the given rows. It is the total time without the time of the children on the same
    track."""
    is_wanted = make_mask(rows, len(trace))
    children = np.flatnonzero(trace.is_on_track_of_parent & is_wanted[trace.parent])
    parents = trace.parent[children]
    starts = np.maximum(trace.start_ns[children], trace.start_ns[parents])
    ends = np.minimum(trace.end_ns[children], trace.end_ns[parents])
    return trace.total_ns[rows] - lengths_by_group(parents, starts, ends, len(trace))[rows]


def waiting_times(trace: Columns) -> Int64s:
    """Return the part of each span's self time in which the span was not active."""
    if not (trace.active_ns < trace.total_ns).any():
        return np.zeros(len(trace), dtype=np.int64)
    in_children_ns = np.zeros(len(trace), dtype=np.int64)
    children = np.flatnonzero(trace.is_on_track_of_parent)
    np.add.at(in_children_ns, trace.parent[children], trace.active_ns[children])
    ran_ns = np.maximum(trace.active_ns - in_children_ns, 0)
    return np.asarray(np.clip(trace.self_ns - ran_ns, 0, np.maximum(trace.total_ns - trace.active_ns, 0)))


def were_suspended(trace: Columns) -> Bools:
    """Return True for generator spans that were suspended mostly while the consumer ran."""
    stood_ns = trace.total_ns - trace.active_ns
    if not (stood_ns > 0).any():
        return np.zeros(len(trace), dtype=np.bool_)
    # The self times at and below each span on its line. They count for its consumer.
    counted_ns = trace.self_ns.copy()
    is_on_line = trace.is_on_track_of_parent
    for rows in reversed(rows_by_level(trace.level)):
        below = rows[is_on_line[rows]]
        np.add.at(counted_ns, trace.parent[below], counted_ns[below])
    return np.asarray((stood_ns > 0) & (2 * (trace.total_ns - counted_ns) > stood_ns))


# The innermost span at a time, and turns


def remove_overlaps(groups: Int64s, starts: Int64s, ends: Int64s, ranks: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Return intervals without overlaps, ordered by group and time.

    The result has three arrays: the index of the given interval, the begin, and the end. Each instant of a group
    belongs to the open interval with the highest rank. The ranks must be distinct.
    """
    filled = np.flatnonzero(starts < ends)
    if not len(filled):
        return filled, filled, filled
    edges, place_of = _find_edges(groups[filled], starts[filled], ends[filled])
    ranked = find_highest_ranks(place_of[: len(filled)], place_of[len(filled) :], ranks[filled], len(edges))
    covered = np.flatnonzero(ranked != NONE)  # no interval covers the step to the next group
    with_rank = np.empty(int(ranks.max()) + 1, dtype=np.int64)
    with_rank[ranks[filled]] = filled
    return with_rank[ranked[covered]], edges[covered], edges[covered + 1]


def _find_edges(groups: Int64s, starts: Int64s, ends: Int64s) -> tuple[Int64s, Int64s]:
    shifted = np.concatenate(shift_to_one_axis((groups, starts), (groups, ends)))
    order = np.argsort(shifted, kind="stable")
    shifted = shifted[order]
    is_new = np.concatenate([[True], shifted[1:] != shifted[:-1]])
    place_of = np.empty(len(order), dtype=np.int64)
    place_of[order] = np.cumsum(is_new) - 1
    return np.concatenate([starts, ends])[order[is_new]], place_of


def find_highest_ranks(firsts: Int64s, ends: Int64s, ranks: Int64s, count: int) -> NDArray[np.int64]:
    """Return the highest rank among the intervals that cover each index, or `NONE`."""
    exponents = np.frexp((ends - firsts).astype(np.float64))[1] - 1
    by_exponent = np.argsort(exponents, kind="stable")
    of_each = np.searchsorted(exponents[by_exponent], np.arange(int(exponents.max()) + 2))
    best = np.full(count, NONE, dtype=np.int64)
    for exponent in range(int(exponents.max()), -1, -1):
        intervals = by_exponent[of_each[exponent] : of_each[exponent + 1]]
        block = 1 << exponent
        np.maximum.at(best, firsts[intervals], ranks[intervals])
        np.maximum.at(best, ends[intervals] - block, ranks[intervals])
        half = block >> 1
        if half:
            best[half:] = np.maximum(best[half:], best[:-half])
    return best


SEVERAL = -2
"""The row number that `find_innermost_spans` returns if several tasks had open spans at that time."""


class _Open(NamedTuple):
    """The spans that were open at some moments, the innermost last. Each span was open from moment `first` to before
    `end`.

    A moment is a time on a thread. Moments are numbered by thread, then by time.
    """

    row: Int64s
    first: Int64s
    end: Int64s


def find_innermost_spans(trace: Columns, is_wanted: Bools, thread_ids: Int64s, times_ns: Int64s) -> Int64s:
    """Return the row of the innermost wanted span that was open on each thread at the given time, or `NONE`.

    The result is `SEVERAL` if a span of another task was also open and does not enclose the innermost span. A span does
    not contain its end. If two spans begin together, the shorter one is the inner one.
    """
    if not len(times_ns):
        return np.zeros(0, dtype=np.int64)
    rows = order_by_start(trace)
    is_wanted = is_wanted & ~were_suspended(trace) & np.isin(trace.thread_id, find_distinct(thread_ids))
    rows = rows[is_wanted[rows]]
    threads = trace.thread_id[rows]
    query_moments, starts, ends = shift_to_one_axis(
        (thread_ids, times_ns), (threads, trace.start_ns[rows]), (threads, trace.end_ns[rows])
    )
    moments = find_distinct(query_moments)
    first, end = np.searchsorted(moments, starts), np.searchsorted(moments, ends)
    is_open = first < end
    opened = _Open(rows[is_open], first[is_open], end[is_open])
    if not len(opened.row):
        return np.full(len(query_moments), NONE, dtype=np.int64)
    last = find_highest_ranks(opened.first, opened.end, np.arange(len(opened.row)), len(moments))
    rows = np.where(last == NONE, NONE, opened.row[last])
    rows[_find_moments_of_several_tasks(trace, opened, last)] = SEVERAL
    return np.asarray(rows[np.searchsorted(moments, query_moments)])


def _find_moments_of_several_tasks(trace: Columns, opened: _Open, last: Int64s) -> Int64s:
    line, firsts = number_combinations(trace.thread_id[opened.row], trace.task_id[opened.row])
    if len(firsts) == len(find_distinct(trace.thread_id[opened.row[firsts]])):
        return np.zeros(0, dtype=np.int64)  # no thread has several tasks
    moments = np.flatnonzero(last != NONE)
    count = len(last)
    changes = np.bincount(opened.first, minlength=count + 1) - np.bincount(opened.end, minlength=count + 1)
    by_line = [np.sort(line * (count + 1) + edges) for edges in (opened.first, opened.end)]
    # Spans of earlier lines count in both and cancel out.
    line_moments = line[last[moments]] * (count + 1) + moments
    begun_counts, ended_counts = (np.searchsorted(edges, line_moments, side="right") for edges in by_line)
    other_counts = np.cumsum(changes)[moments] - (begun_counts - ended_counts)
    moments, other_counts = moments[other_counts > 0], other_counts[other_counts > 0]
    around = _count_spans_around_on_other_tracks(trace, opened, line, last[moments], moments)
    return np.asarray(moments[around != other_counts])


def _count_spans_around_on_other_tracks(
    trace: Columns, opened: _Open, line: Int64s, spans: Int64s, moments: Int64s
) -> Int64s:
    # The index of each open span's parent, `NONE` if the parent was not open or is on another thread.
    above, level = index_rows(opened.row, len(trace))[trace.parent[opened.row]], trace.level[opened.row]
    threads = trace.thread_id[opened.row]
    up = np.where(threads[above] == threads, above, NONE).astype(np.int32)
    is_run = (up != NONE) & (line[up] == line) & (opened.first[up] <= opened.first) & (opened.end <= opened.end[up])
    top = find_nearest_row(up, ~is_run)
    counts, own_line = np.zeros(len(spans), dtype=np.int64), line[spans]
    walking = np.arange(len(spans))
    while len(walking):
        tops = top[spans]
        is_other = line[spans] != own_line[walking]
        counts[walking] += np.where(is_other, level[spans] - level[tops] + 1, 0)
        spans = up[tops].astype(np.int64)
        times = moments[walking]
        goes_on = (spans != NONE) & (opened.first[spans] <= times) & (times < opened.end[spans])
        walking, spans = walking[goes_on], spans[goes_on]
    return counts
