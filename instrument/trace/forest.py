"""Trees as a column of parents: which row is the parent of each, and how deep each is, in whatever order rows are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.trace.groups import distinct, stable_order

NONE = -1
"""In place of a row: there is none."""


def rows_of(ids: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int32]:
    """The rows of the wanted ids, of which each is there once, -1 for those that are not there."""
    if not len(ids):
        return np.full(len(wanted), NONE, dtype=np.int32)
    # Most are numbered one after another, and then a table of all is faster than a sort; a few may be far from these.
    first = int(ids.min())
    end = min(first + 4 * len(ids) + 1_000, int(ids.max()) + 1)
    is_near = ids < end
    near = np.flatnonzero(is_near)
    if 2 * len(near) > len(ids):
        table = np.full(end - first, NONE, dtype=np.int32)
        table[ids[near] - first] = near
        inside = (wanted >= first) & (wanted < end)
        found = table[np.where(inside, wanted, first) - first]
        found[~inside] = NONE
        if len(near) < len(ids):
            far, rest = np.flatnonzero(~inside), np.flatnonzero(~is_near)
            rows = rows_of(ids[rest], wanted[far])
            found[far] = np.where(rows == NONE, NONE, rest[rows])
        return np.asarray(found)
    order = np.argsort(ids)
    places = np.searchsorted(ids, wanted, sorter=order).clip(max=len(ids) - 1)
    rows = order[places].astype(np.int32)
    rows[ids[rows] != wanted] = NONE
    return np.asarray(rows)


def levels(parents: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the number of rows above each. Pointers are doubled: as many rounds as the depth has binary digits.

    Raises `ValueError` where parents run in a circle.
    """
    depth = (parents != NONE).astype(np.int32)
    open_rows = np.flatnonzero(depth)
    # Of each row one that is `depth` levels above it: its parent, then that one's, then one two above that, and so on.
    above = parents.copy()
    for _ in range(len(parents).bit_length() + 1):
        if not len(open_rows):
            return np.asarray(depth)
        up = above[open_rows]
        farther = above[up]
        depth[open_rows] += depth[up]
        above[open_rows] = farther
        open_rows = open_rows[farther != NONE]
    raise ValueError("parents in it run in a circle; it is damaged")


def tops(parents: NDArray[np.int32]) -> NDArray[np.int32]:
    """The topmost row at or above each. Raises `ValueError` where parents run in a circle."""
    found = np.where(parents == NONE, np.arange(len(parents), dtype=np.int32), parents)
    for _ in range(len(parents).bit_length() + 1):
        farther = found[found]
        if (farther == found).all():
            # What has come round a circle may stand still, but on no topmost row.
            if (parents[found] != NONE).any():
                break
            return np.asarray(found)
        found = farther
    raise ValueError("parents in it run in a circle; it is damaged")


def nearest(above: NDArray[np.int32], wanted: NDArray[np.bool_]) -> NDArray[np.int32]:
    """The nearest wanted row at or above each, -1 where there is none."""
    found = np.where(wanted, np.arange(len(above), dtype=np.int32), np.int32(NONE)).astype(np.int32)
    up = np.where(wanted, np.int32(NONE), above).astype(np.int32)
    open_rows = np.flatnonzero(up != NONE)
    while len(open_rows):
        its = up[open_rows]
        nearer, farther = found[its], up[its]
        found[open_rows] = nearer
        up[open_rows] = farther
        open_rows = open_rows[farther != NONE]
    return found


def nearest_above(parents: NDArray[np.int32], wanted: NDArray[np.bool_]) -> NDArray[np.int32]:
    """The nearest wanted row above each, -1 where there is none."""
    return np.append(nearest(parents, wanted), np.int32(NONE))[parents]


def and_above(parents: NDArray[np.int32], rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Return True for some rows, and for those above one of them."""
    found = np.zeros(len(parents), dtype=np.bool_)
    while len(rows):
        found[rows] = True
        rows = distinct(parents[rows])
        rows = rows[(rows != NONE) & ~found[rows]]
    return found


def least_below(parents: list[int], numbers: list[int]) -> list[int]:
    """Return the least number of those at and below each row; parents come before their children."""
    found = [*numbers]
    for row in range(len(parents) - 1, -1, -1):
        above = parents[row]
        if above != NONE and found[row] < found[above]:
            found[above] = found[row]
    return found


def by_level(level: NDArray[np.int32]) -> list[NDArray[np.int64]]:
    """The rows of each level, topmost first, each level's in their order."""
    order = stable_order(level, int(level.max(initial=0)) + 1)
    return np.split(order, np.flatnonzero(np.diff(level[order])) + 1) if len(order) else []
