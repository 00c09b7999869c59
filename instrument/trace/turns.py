"""Turns: of intervals that overlap, which one each instant belongs to, so that every instant counts once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from instrument.trace.columns import Int64s
from instrument.trace.forest import NONE


def turns(groups: Int64s, starts: Int64s, ends: Int64s, ranks: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """The turns that intervals have within their group, by group and time: the interval's place, begin and end of each.

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
    """The times at which any interval of a group begins or ends, each once for its group and by group, and the place
    among them of each begin and then of each end."""
    times, of_edges = np.concatenate([starts, ends]), np.concatenate([groups, groups])
    order = np.lexsort((times, of_edges))
    times, of_edges = times[order], of_edges[order]
    is_new = np.concatenate([[True], (times[1:] != times[:-1]) | (of_edges[1:] != of_edges[:-1])])
    place_of = np.empty(len(order), dtype=np.int64)
    place_of[order] = np.cumsum(is_new) - 1
    return times[is_new], place_of


def highest(firsts: Int64s, ends: Int64s, ranks: Int64s, count: int) -> NDArray[np.int64]:
    """Of each of some places the highest rank of those that reach over it, `NONE` without any.

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
