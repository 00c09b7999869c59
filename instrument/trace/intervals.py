"""Intervals of time as two columns, begins and ends, and their algebra: unions, what two have in common, what is left.

An interval is half-open. A `Union` is sorted and disjoint, and none of it is empty or touches another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.trace.forest import NONE
from instrument.trace.groups import Groups, distinct

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

FARTHEST = 1 << 62


class Union(NamedTuple):
    """Intervals: sorted, disjoint, not touching."""

    starts: Int64s
    ends: Int64s

    def length_ns(self) -> int:
        """Return the whole length."""
        return int((self.ends - self.starts).sum())

    def until(self, times: NDArray[Any]) -> Int64s:
        """Return the length before each of some times."""
        before = np.concatenate([[0], np.cumsum(self.ends - self.starts)])
        index = np.searchsorted(self.starts, times, side="right")
        last_ends = np.concatenate([[-FARTHEST], self.ends])[index]
        return np.asarray(before[index] - np.maximum(last_ends - times, 0))

    def within(self, starts: NDArray[Any], ends: NDArray[Any]) -> Int64s:
        """Return the length within each of some intervals."""
        return self.until(ends) - self.until(starts)


NOTHING = Union(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def together(unions: Sequence[Union]) -> Union:
    """The union of at least one."""
    return union(*(np.concatenate(edges) for edges in zip(*unions, strict=True)))


def union(starts: NDArray[Any], ends: NDArray[Any]) -> Union:
    """The union of intervals in any order."""
    _, starts, ends = union_by_group(np.zeros(len(starts), dtype=np.int64), starts, ends)
    return Union(starts, ends)


class Unions(NamedTuple):
    """Intervals by group: the groups one after another, what is of each sorted and disjoint.

    Of `union_by_group` none is empty or touches another of its group.
    """

    groups: Int64s
    starts: Int64s
    ends: Int64s

    def begun(self, groups: NDArray[Any], times: NDArray[Any]) -> Int64s:
        """The place of the last of each of some groups that has begun at a time, `NONE` where none has."""
        starts, asked = _on_one_axis((self.groups, self.starts), (groups, times))
        places = np.searchsorted(starts, asked, side="right") - 1
        places[np.append(self.groups, NONE)[places] != groups] = NONE
        return np.asarray(places)

    def at(self, groups: NDArray[Any], times: NDArray[Any]) -> Int64s:
        """The place of the one of each of some groups in which a time is, `NONE` where it is in none."""
        places = self.begun(groups, times)
        return np.where(times < np.append(self.ends, -FARTHEST)[places], places, NONE)

    def within(self, groups: NDArray[Any], starts: NDArray[Any], ends: NDArray[Any]) -> Int64s:
        """Return the length of a group within each of some intervals."""
        return self._until(groups, ends) - self._until(groups, starts)

    def _until(self, groups: NDArray[Any], times: NDArray[Any]) -> Int64s:
        """Return the length before each of some times of a group, and in the groups before it."""
        before = np.concatenate([[0], np.cumsum(self.ends - self.starts)])
        starts, asked = _on_one_axis((self.groups, self.starts), (groups, times))
        index = np.searchsorted(starts, asked, side="right")
        is_own = np.concatenate([[NONE], self.groups])[index] == groups
        last_ends = np.concatenate([[-FARTHEST], self.ends])[index]
        return np.asarray(before[index] - is_own * np.maximum(last_ends - times, 0))

    def overlapping(
        self, groups: NDArray[Any], starts: NDArray[Any], ends: NDArray[Any]
    ) -> tuple[Int64s, Int64s]:  # fmt: skip
        """Return the pairs of intervals and places of their group that overlap, in their order.

        One without length has it with that in which it is.
        """
        own_starts, own_ends, starts, ends = _on_one_axis(
            (self.groups, self.starts), (self.groups, self.ends), (groups, starts), (groups, ends)
        )
        firsts = np.searchsorted(own_ends, starts, side="right")
        stops = np.searchsorted(own_starts, np.where(starts < ends, ends, ends + 1))
        counts = np.maximum(stops - firsts, 0)
        which = np.repeat(np.arange(len(groups)), counts)
        return which, np.arange(len(which)) + (firsts - np.cumsum(counts) + counts)[which]


def union_by_group(groups: NDArray[Any], starts: NDArray[Any], ends: NDArray[Any]) -> Unions:
    """The union of the intervals of each group."""
    filled = starts < ends
    if not filled.all():
        groups, starts, ends = groups[filled], starts[filled], ends[filled]
    groups, starts, ends = (np.asarray(one, dtype=np.int64) for one in (groups, starts, ends))
    if not len(starts):
        return Unions(groups, starts, ends)
    shifted_starts, shifted_ends = _on_one_axis((groups, starts), (groups, ends))
    order = np.argsort(shifted_starts, kind="stable")
    shifted_starts, reached = shifted_starts[order], np.maximum.accumulate(shifted_ends[order])
    firsts = np.flatnonzero(np.concatenate([[True], shifted_starts[1:] > reached[:-1]]))
    groups, starts = groups[order][firsts], starts[order][firsts]
    return Unions(groups, starts, np.maximum.reduceat(ends[order], firsts))


def _on_one_axis(*columns: tuple[NDArray[Any], NDArray[Any]]) -> list[Int64s]:
    """Times of groups, moved so that groups follow one another, none touching the next.

    A million groups times hours would not fit into 64 bits: there times are taken by their rank.
    """
    groups, times = ([np.asarray(one, dtype=np.int64) for one in its] for its in zip(*columns, strict=True))
    filled = [one for one in times if len(one)]
    least, most = min((int(one.min()) for one in filled), default=0), max((int(one.max()) for one in filled), default=0)
    count, width = max((int(one.max()) for one in groups if len(one)), default=0) + 1, most - least + 2
    if min((int(one.min()) for one in groups if len(one)), default=0) < 0 or count * width >= FARTHEST:
        known, ranks = distinct(np.concatenate(groups)), distinct(np.concatenate(times))
        groups = [np.searchsorted(known, one) for one in groups]
        times = [np.searchsorted(ranks, one) for one in times]
        least, width = 0, len(ranks) + 1
    return [its * width - least + one for its, one in zip(groups, times, strict=True)]


def successive(groups: NDArray[Any], starts: NDArray[Any], ends: NDArray[Any]) -> Int64s:
    """The places of those of each group that begin in none before it of them, by group and begin.

    Of several that begin at once it is the longest.
    """
    order = np.lexsort((-ends, starts, groups))
    starts, ends = _on_one_axis((groups[order], starts[order]), (groups[order], ends[order]))
    count = len(order)
    # Of each the first that begins when it is over: the way from the first of all leads through those of all groups.
    after = np.append(np.maximum(np.searchsorted(starts, ends), np.arange(1, count + 1)), count)
    taken = np.zeros(count + 1, dtype=np.bool_)
    taken[0] = True
    while after[0] < count:
        taken[after[np.flatnonzero(taken)]] = True
        after = after[after]
    return np.asarray(order[np.flatnonzero(taken[:count])])


def lengths_by_group(groups: NDArray[Any], starts: NDArray[Any], ends: NDArray[Any], count: int) -> Int64s:
    """Return the length of the union of each group's intervals, of groups from 0 to below `count`."""
    its, starts, ends = union_by_group(groups, starts, ends)
    return Groups(its, count).sums(ends - starts)


def lie_in(starts: NDArray[Any], ends: NDArray[Any], window: tuple[int, int]) -> Bools:
    """Return True for intervals with a part in the window. One without length on an edge is in it."""
    first, last = window
    outside = ((ends <= first) & (starts < first)) | ((starts >= last) & (ends > last))
    return np.asarray(~outside)


def clipped(starts: NDArray[Any], ends: NDArray[Any], window: tuple[int, int]) -> tuple[Int64s, Int64s]:
    """Return the parts of intervals that are in the window."""
    return np.maximum(starts, window[0]), np.minimum(ends, window[1])


def enclosing_none(groups: Int64s, starts: Int64s, ends: Int64s) -> Bools:
    """Return True for intervals that enclose no filled one of their group: the last of equal ones, each empty one."""
    order = np.lexsort((-ends, starts, groups))
    filled = starts[order] < ends[order]
    known = distinct(ends)
    ranks = groups[order] * (len(known) + 1) + np.searchsorted(known, ends[order])
    # From the last to begin back: one encloses another if it ends no sooner than any that begins later.
    least = np.minimum.accumulate(np.where(filled, ranks, FARTHEST)[::-1])[::-1]
    found = np.empty(len(order), dtype=np.bool_)
    found[order] = ~filled | (ranks < np.append(least[1:], FARTHEST))
    return found


def shared_ns(left: Union, right: Union) -> int:
    """Return the length of the intersection of two."""
    return int(left.within(right.starts, right.ends).sum())


def common(left: Union, right: Union) -> Union:
    """Return the intersection of two."""
    return _where(left, right, is_in_right=True)


def without(left: Union, right: Union) -> Union:
    """Return the parts of one outside of the other."""
    return _where(left, right, is_in_right=False)


def _where(left: Union, right: Union, *, is_in_right: bool) -> Union:
    edges = distinct(np.concatenate([*left, *right]))
    starts, ends = edges[:-1], edges[1:]
    kept = _covers(left, starts) & (_covers(right, starts) == is_in_right)
    return union(starts[kept], ends[kept])


def _covers(its: Union, times: Int64s) -> Bools:
    return np.asarray(np.searchsorted(its.starts, times, side="right") > np.searchsorted(its.ends, times, side="right"))


def at_once(unions: Sequence[Union]) -> tuple[int, int]:
    """Return the time for which at least two of several went on, and the most at once."""
    starts = np.concatenate([np.zeros(0, dtype=np.int64), *(one.starts for one in unions)])
    ends = np.concatenate([np.zeros(0, dtype=np.int64), *(one.ends for one in unions)])
    if not len(starts):
        return 0, 0
    times, change = np.concatenate([ends, starts]), np.repeat(np.array([-1, 1]), len(starts))
    order = np.argsort(times, kind="stable")  # what ends at a time has ended when another begins
    busy, times = np.cumsum(change[order]), times[order]
    overlap_ns = np.diff(times)[busy[:-1] >= 2].sum()
    return int(overlap_ns), int(busy.max())
