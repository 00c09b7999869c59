"""Computes unions, intersections and differences of intervals of time. Intervals are columns of start and end times.

An interval is half-open. A `Union` is sorted and disjoint, without empty or adjacent intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.trace.indices import NONE, Groups, find_distinct

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

FARTHEST = 1 << 62


class Union(NamedTuple):
    """Intervals that are sorted, disjoint and not adjacent."""

    starts: Int64s
    ends: Int64s

    def length_ns(self) -> int:
        return int((self.ends - self.starts).sum())

    def length_until(self, times: NDArray[Any]) -> Int64s:
        before = np.concatenate([[0], np.cumsum(self.ends - self.starts)])
        index = np.searchsorted(self.starts, times, side="right")
        last_ends = np.concatenate([[-FARTHEST], self.ends])[index]
        return np.asarray(before[index] - np.maximum(last_ends - times, 0))

    def length_within(self, starts: NDArray[Any], ends: NDArray[Any]) -> Int64s:
        return self.length_until(ends) - self.length_until(starts)


NOTHING = Union(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def unite(unions: Sequence[Union]) -> Union:
    return make_union(*(np.concatenate(edges) for edges in zip(*unions, strict=True)))


def make_union(starts: NDArray[Any], ends: NDArray[Any]) -> Union:
    _, starts, ends = union_by_group(np.zeros(len(starts), dtype=np.int64), starts, ends)
    return Union(starts, ends)


class Unions(NamedTuple):
    """Intervals of several groups, ordered by group. The intervals of a group are sorted and disjoint."""

    groups: Int64s
    starts: Int64s
    ends: Int64s

    def find_last_begun(self, groups: NDArray[Any], times: NDArray[Any]) -> Int64s:
        starts, times_on_axis = shift_to_one_axis((self.groups, self.starts), (groups, times))
        places = np.searchsorted(starts, times_on_axis, side="right") - 1
        places[np.append(self.groups, NONE)[places] != groups] = NONE
        return np.asarray(places)

    def interval_at(self, groups: NDArray[Any], times: NDArray[Any]) -> Int64s:
        places = self.find_last_begun(groups, times)
        return np.where(times < np.append(self.ends, -FARTHEST)[places], places, NONE)

    def length_within(self, groups: NDArray[Any], starts: NDArray[Any], ends: NDArray[Any]) -> Int64s:
        return self._lengths_until(groups, ends) - self._lengths_until(groups, starts)

    def _lengths_until(self, groups: NDArray[Any], times: NDArray[Any]) -> Int64s:
        """Return the total length of intervals before each time, in its group and in all lower groups."""
        before = np.concatenate([[0], np.cumsum(self.ends - self.starts)])
        starts, times_on_axis = shift_to_one_axis((self.groups, self.starts), (groups, times))
        index = np.searchsorted(starts, times_on_axis, side="right")
        is_own = np.concatenate([[NONE], self.groups])[index] == groups
        last_ends = np.concatenate([[-FARTHEST], self.ends])[index]
        return np.asarray(before[index] - is_own * np.maximum(last_ends - times, 0))

    def overlapping_ranges(
        self, groups: NDArray[Any], starts: NDArray[Any], ends: NDArray[Any]
    ) -> tuple[Int64s, Int64s]:  # fmt: skip
        """Return two indices per given interval: the first overlapping interval, and the one after the last."""
        own_starts, own_ends, starts, ends = shift_to_one_axis(
            (self.groups, self.starts), (self.groups, self.ends), (groups, starts), (groups, ends)
        )
        firsts = np.searchsorted(own_ends, starts, side="right")
        return firsts, np.searchsorted(own_starts, np.where(starts < ends, ends, ends + 1))

    def overlapping_pairs(
        self, groups: NDArray[Any], starts: NDArray[Any], ends: NDArray[Any]
    ) -> tuple[Int64s, Int64s]:  # fmt: skip
        firsts, stops = self.overlapping_ranges(groups, starts, ends)
        counts = np.maximum(stops - firsts, 0)
        interval = np.repeat(np.arange(len(groups)), counts)
        return interval, np.arange(len(interval)) + (firsts - np.cumsum(counts) + counts)[interval]


def union_by_group(groups: NDArray[Any], starts: NDArray[Any], ends: NDArray[Any]) -> Unions:
    """Return the union of the intervals of each group. The intervals of the result are neither empty nor adjacent."""
    filled = starts < ends
    if not filled.all():
        groups, starts, ends = groups[filled], starts[filled], ends[filled]
    groups, starts, ends = (np.asarray(column, dtype=np.int64) for column in (groups, starts, ends))
    if not len(starts):
        return Unions(groups, starts, ends)
    shifted_starts, shifted_ends = shift_to_one_axis((groups, starts), (groups, ends))
    order = np.argsort(shifted_starts, kind="stable")
    shifted_starts, reached = shifted_starts[order], np.maximum.accumulate(shifted_ends[order])
    firsts = np.flatnonzero(np.concatenate([[True], shifted_starts[1:] > reached[:-1]]))
    groups, starts = groups[order][firsts], starts[order][firsts]
    return Unions(groups, starts, np.maximum.reduceat(ends[order], firsts))


def shift_to_one_axis(*columns: tuple[NDArray[Any], NDArray[Any]]) -> list[Int64s]:
    """Shift times so that the groups follow one another on one axis, with gaps. Ranks replace the times if the axis
    would exceed 64 bits."""
    groups, times = ([np.asarray(column, dtype=np.int64) for column in side] for side in zip(*columns, strict=True))
    full = [row for row in times if len(row)]
    least, most = min((int(row.min()) for row in full), default=0), max((int(row.max()) for row in full), default=0)
    count, width = max((int(column.max()) for column in groups if len(column)), default=0) + 1, most - least + 2
    if min((int(column.min()) for column in groups if len(column)), default=0) < 0 or count * width >= FARTHEST:
        known_groups = find_distinct(np.concatenate(groups))
        groups = [np.searchsorted(known_groups, column) for column in groups]
        if len(known_groups) * width >= FARTHEST:
            ranks = find_distinct(np.concatenate(times))
            times = [np.searchsorted(ranks, column) for column in times]
            least, width = 0, len(ranks) + 1
    return [group * width - least + time for group, time in zip(groups, times, strict=True)]


def select_successive(groups: NDArray[Any], starts: NDArray[Any], ends: NDArray[Any]) -> Int64s:
    """Return the indices of successive intervals per group. Each interval is the first that begins after the previous
    one ended."""
    order = np.lexsort((-ends, starts, groups))
    starts, ends = shift_to_one_axis((groups[order], starts[order]), (groups[order], ends[order]))
    count = len(order)
    # The first interval to begin after each one's end. The path from the first interval passes through all groups.
    after = np.append(np.maximum(np.searchsorted(starts, ends), np.arange(1, count + 1)), count)
    is_taken = np.zeros(count + 1, dtype=np.bool_)
    is_taken[0] = True
    while after[0] < count:
        is_taken[after[np.flatnonzero(is_taken)]] = True
        after = after[after]
    return np.asarray(order[np.flatnonzero(is_taken[:count])])


def lengths_by_group(groups: NDArray[Any], starts: NDArray[Any], ends: NDArray[Any], count: int) -> Int64s:
    grouped, starts, ends = union_by_group(groups, starts, ends)
    return Groups(grouped, count).sum_by_group(ends - starts)


def are_in_window(starts: NDArray[Any], ends: NDArray[Any], window: tuple[int, int]) -> Bools:
    """Return True for each interval that overlaps the window. An empty interval on an edge overlaps it."""
    first, last = window
    outside = ((ends <= first) & (starts < first)) | ((starts >= last) & (ends > last))
    return np.asarray(~outside)


def clip_intervals(starts: NDArray[Any], ends: NDArray[Any], window: tuple[int, int]) -> tuple[Int64s, Int64s]:
    return np.maximum(starts, window[0]), np.minimum(ends, window[1])


def are_innermost(groups: Int64s, starts: Int64s, ends: Int64s) -> Bools:
    """Return True for intervals that enclose no other non-empty interval of their group. If several are equal, only the
    last one is innermost."""
    order = np.lexsort((-ends, starts, groups))
    filled = starts[order] < ends[order]
    distinct_ends = find_distinct(ends)
    ranks = groups[order] * (len(distinct_ends) + 1) + np.searchsorted(distinct_ends, ends[order])
    # From the last begin back: an interval encloses a later one if it ends no sooner.
    least = np.minimum.accumulate(np.where(filled, ranks, FARTHEST)[::-1])[::-1]
    encloses_none = np.empty(len(order), dtype=np.bool_)
    encloses_none[order] = ~filled | (ranks < np.append(least[1:], FARTHEST))
    return encloses_none


def measure_intersection(first: Union, second: Union) -> int:
    return int(first.length_within(second.starts, second.ends).sum())


def intersect(first: Union, second: Union) -> Union:
    return _combine(first, second, is_in_second=True)


def subtract(first: Union, second: Union) -> Union:
    return _combine(first, second, is_in_second=False)


def _combine(first: Union, second: Union, *, is_in_second: bool) -> Union:
    edges = find_distinct(np.concatenate([*first, *second]))
    starts, ends = edges[:-1], edges[1:]
    is_kept = _are_covered(first, starts) & (_are_covered(second, starts) == is_in_second)
    return make_union(starts[is_kept], ends[is_kept])


def _are_covered(span: Union, times: Int64s) -> Bools:
    return np.asarray(
        np.searchsorted(span.starts, times, side="right") > np.searchsorted(span.ends, times, side="right")
    )


def measure_overlap(unions: Sequence[Union]) -> tuple[int, int]:
    """Return the time in which two or more unions overlap, and the largest number of overlapping unions."""
    starts = np.concatenate([np.zeros(0, dtype=np.int64), *(intervals.starts for intervals in unions)])
    ends = np.concatenate([np.zeros(0, dtype=np.int64), *(intervals.ends for intervals in unions)])
    if not len(starts):
        return 0, 0
    times, change = np.concatenate([ends, starts]), np.repeat(np.array([-1, 1]), len(starts))
    order = np.argsort(times, kind="stable")  # an end comes before a begin at the same time
    busy, times = np.cumsum(change[order]), times[order]
    overlap_ns = np.diff(times)[busy[:-1] >= 2].sum()
    return int(overlap_ns), int(busy.max())
