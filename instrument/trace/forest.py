"""Walks trees that are stored as one column, the index of each row's parent row. Rows may be in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.trace.groups import distinct, sort_stably

NONE = -1
"""The index that means no row."""


def rows_of(ids: NDArray[np.int64], wanted_ids: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the row of each wanted id, -1 for a missing id. `ids` are distinct."""
    if not len(ids):
        return np.full(len(wanted_ids), NONE, dtype=np.int32)
    # Most ids are consecutive, so a table is faster than a sort. A few may be far from the others.
    first = int(ids.min())
    end = min(first + 4 * len(ids) + 1_000, int(ids.max()) + 1)
    is_near = ids < end
    near = np.flatnonzero(is_near)
    if 2 * len(near) > len(ids):
        table = np.full(end - first, NONE, dtype=np.int32)
        table[ids[near] - first] = near
        inside = (wanted_ids >= first) & (wanted_ids < end)
        found_rows = table[np.where(inside, wanted_ids, first) - first]
        found_rows[~inside] = NONE
        if len(near) < len(ids):
            far, far_rows = np.flatnonzero(~inside), np.flatnonzero(~is_near)
            rows = rows_of(ids[far_rows], wanted_ids[far])
            found_rows[far] = np.where(rows == NONE, NONE, far_rows[rows])
        return np.asarray(found_rows)
    order = np.argsort(ids)
    places = np.searchsorted(ids, wanted_ids, sorter=order).clip(max=len(ids) - 1)
    rows = order[places].astype(np.int32)
    rows[ids[rows] != wanted_ids] = NONE
    return np.asarray(rows)


def count_ancestors(parents: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the number of ancestors of each row, in log2(depth) rounds. Raises `ValueError` for cyclic parents."""
    depth = (parents != NONE).astype(np.int32)
    open_rows = np.flatnonzero(depth)
    # The row `depth` levels above each row: 1 level in the first round, then 2, 4 and so on.
    above = parents.copy()
    for _ in range(len(parents).bit_length() + 1):
        if not len(open_rows):
            return np.asarray(depth)
        up = above[open_rows]
        farther = above[up]
        depth[open_rows] += depth[up]
        above[open_rows] = farther
        open_rows = open_rows[farther != NONE]
    raise ValueError("a span in it is its own ancestor; it is damaged")


def topmost_rows(parents: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the topmost row at or above each row. Raises `ValueError` for cyclic parents."""
    top = np.where(parents == NONE, np.arange(len(parents), dtype=np.int32), parents)
    for _ in range(len(parents).bit_length() + 1):
        farther = top[top]
        if (farther == top).all():
            # A row of a cycle may have come back to itself, but it has a parent.
            if (parents[top] != NONE).any():
                break
            return np.asarray(top)
        top = farther
    raise ValueError("a span in it is its own ancestor; it is damaged")


def nearest(above: NDArray[np.int32], is_wanted: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the nearest wanted row at or above each row, -1 without one."""
    nearest_row = np.where(is_wanted, np.arange(len(above), dtype=np.int32), np.int32(NONE)).astype(np.int32)
    up = np.where(is_wanted, np.int32(NONE), above).astype(np.int32)
    open_rows = np.flatnonzero(up != NONE)
    while len(open_rows):
        next_rows = up[open_rows]
        nearer, farther = nearest_row[next_rows], up[next_rows]
        nearest_row[open_rows] = nearer
        up[open_rows] = farther
        open_rows = open_rows[farther != NONE]
    return nearest_row


def nearest_above(parents: NDArray[np.int32], is_wanted: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the nearest wanted row above each row, -1 without one."""
    return np.append(nearest(parents, is_wanted), np.int32(NONE))[parents]


def are_at_or_above(parents: NDArray[np.int32], rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Return an array over all rows, True for the given rows and their ancestors."""
    is_included = np.zeros(len(parents), dtype=np.bool_)
    while len(rows):
        is_included[rows] = True
        rows = distinct(parents[rows])
        rows = rows[(rows != NONE) & ~is_included[rows]]
    return is_included


def least_below(parents: list[int], numbers: list[int]) -> list[int]:
    """Return the least number at or below each row. Parents must come before their children."""
    least = [*numbers]
    for row in range(len(parents) - 1, -1, -1):
        above = parents[row]
        if above != NONE and least[row] < least[above]:
            least[above] = least[row]
    return least


def by_level(level: NDArray[np.int32]) -> list[NDArray[np.int64]]:
    """Return the rows of each level, the topmost level first, in ascending order within a level."""
    order = sort_stably(level, int(level.max(initial=0)) + 1)
    return np.split(order, np.flatnonzero(np.diff(level[order])) + 1) if len(order) else []
