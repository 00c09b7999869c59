"""Groups rows, finds rows by id, and walks trees that are stored as a column of parent rows."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import pack
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]


class Groups:
    """Rows in groups. `groups` has the number of each row's group, from 0 to below `count`. A row with a negative
    number is in no group."""

    def __init__(self, groups: NDArray[Any], count: int) -> None:
        order = sort_stably(groups, count)
        ascending = groups[order]
        first = int(np.searchsorted(ascending, 0))
        order, ascending = order[first:], ascending[first:]
        self._order, self._count = order, count
        self._firsts = np.flatnonzero(np.diff(ascending, prepend=-1))
        self._known = ascending[self._firsts]

    def list_rows(self) -> list[Int64s]:
        """Return the rows of each group, in order. Empty groups are left out."""
        return np.split(self._order, self._firsts[1:]) if len(self._firsts) else []

    def count_members(self) -> Int64s:
        return self._spread_values(np.diff(self._firsts, append=len(self._order)), 0)

    def sum_by_group(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Return the sum of each group. Sums that may exceed 64 bits are Python ints."""
        if not numbers.any():
            return np.zeros(self._count, dtype=np.int64)
        largest = max(int(numbers.max()), -int(numbers.min()))
        if largest * len(numbers) < 1 << 62 or np.abs(numbers, dtype=np.float64).sum() < 1 << 62:
            return self._reduce_groups(np.add, numbers, 0)
        totals = np.zeros(self._count, dtype=object)
        totals[self._known] = np.add.reduceat(numbers[self._order].astype(object), self._firsts)
        return totals

    def min_by_group(self, numbers: NDArray[Any], otherwise: int) -> Int64s:
        return self._reduce_groups(np.minimum, numbers, otherwise)

    def max_by_group(self, numbers: NDArray[Any], otherwise: int) -> Int64s:
        return self._reduce_groups(np.maximum, numbers, otherwise)

    def _reduce_groups(self, reduce: np.ufunc, numbers: NDArray[Any], otherwise: int) -> Int64s:
        return self._spread_values(reduce.reduceat(numbers[self._order].astype(np.int64), self._firsts), otherwise)

    def _spread_values(self, values: NDArray[Any], otherwise: int) -> Int64s:
        spread = np.full(self._count, otherwise, dtype=np.int64)
        spread[self._known] = values
        return spread


class Members:
    """The members of each group, in order. The members are indices, or `numbers` if given."""

    def __init__(self, groups: NDArray[Any], count: int, numbers: Int64s | None = None) -> None:
        order = sort_stably(groups, count)
        self._numbers = order if numbers is None else numbers[order]
        self._starts = np.searchsorted(groups[order], np.arange(count + 1)).tolist()

    def __getitem__(self, group: int) -> Int64s:
        return self._numbers[self._starts[group] : self._starts[group + 1]]


def make_mask(rows: Any, count: int) -> Bools:
    is_given = np.zeros(count, dtype=np.bool_)
    is_given[rows] = True
    return is_given


def index_rows(rows: NDArray[Any], count: int) -> Int64s:
    """Return an array with the index in `rows` of each number below `count`, -1 for a missing number. The array ends
    with a further -1, so that the number -1 also gives -1."""
    places = np.full(count + 1, -1, dtype=np.int64)
    places[rows] = np.arange(len(rows))
    return places


def sort_stably(numbers: NDArray[Any], end: int) -> Int64s:
    """Return the indices that sort the numbers. Equal numbers remain in their order. The numbers must be from -1 to
    below `end`."""
    if end < 1 << 16 and len(numbers) and int(numbers.min()) >= -1:
        return np.argsort((numbers + 1).astype(np.uint16), kind="stable")
    return np.argsort(numbers, kind="stable")


def sort_by_start(starts: Int64s, ends: Int64s, ids: Int64s) -> Int64s:
    """Return the indices that sort intervals by start time, then by length with the longest first, then by id."""
    order = np.argsort(starts, kind="stable")
    is_tied = np.diff(starts[order]) == 0
    tied = np.flatnonzero(np.append(is_tied, [False]) | np.append([False], is_tied)) if len(order) else order
    rows = order[tied]  # a sort of all intervals by three keys would take five times as long
    order[tied] = rows[np.lexsort((ids[rows], -ends[rows], starts[rows]))]
    return order


def find_distinct(numbers: NDArray[Any]) -> NDArray[Any]:
    """Return the distinct numbers in order. `np.unique` takes ten times as long."""
    if len(numbers) and numbers.dtype.kind == "i":
        first, last = int(numbers.min()), int(numbers.max())
        if last - first < len(numbers):  # a table of them is faster than a sort
            is_there = np.zeros(last - first + 1, dtype=np.bool_)
            is_there[np.subtract(numbers, first, dtype=np.int64)] = True
            return np.asarray((np.flatnonzero(is_there) + first).astype(numbers.dtype))
    run = np.sort(numbers)
    return np.asarray(run[np.flatnonzero(np.concatenate([[True], run[1:] != run[:-1]]))] if len(run) else run)


def count_distinct(numbers: Int64s, end: int) -> tuple[Int64s, Int64s]:
    """Return the distinct numbers in order, and the count of each. Numbers are from 0 to below `end`."""
    if end > 4 * len(numbers):
        return np.unique(numbers, return_counts=True)
    counts = np.bincount(numbers)
    values = np.flatnonzero(counts)
    return values, counts[values]


def rank_distinct(numbers: NDArray[Any]) -> tuple[NDArray[Any], Int64s]:
    """Return the distinct numbers in order, and each number's index among them. Fast for few distinct numbers."""
    values = find_distinct(numbers[::997])
    while True:
        places = np.searchsorted(values, numbers).clip(max=max(len(values) - 1, 0))
        missed = numbers[values[places] != numbers] if len(values) else numbers
        if not len(missed):
            return values, places
        values = find_distinct(np.concatenate([values, missed]))


def number_combinations(*columns: NDArray[Any]) -> tuple[Int64s, Int64s]:
    """Number the distinct combinations of columns from 0. Return each row's number, and one row for each number."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        width = int(column.max()) + 1 if len(column) else 1
        if int(key.max(initial=0)) >= (1 << 62) // max(width, 1) or (len(column) and int(column.min()) < 0):
            key = np.unique(key, return_inverse=True)[1].astype(np.int64)
            values, column = np.unique(column, return_inverse=True)
            width = len(values)
        key = key * width + column.astype(np.int64)  # an empty column may have any type
    most = int(key.max(initial=-1)) + 1
    if most <= 8 * len(key) + 1_000:  # a table takes a fifth of a sort's time
        row_of = np.full(most, -1, dtype=np.int64)
        row_of[key[::-1]] = np.arange(len(key))[::-1]
        used_keys = np.flatnonzero(row_of >= 0)
        number_of = np.empty(most, dtype=np.int64)
        number_of[used_keys] = np.arange(len(used_keys))
        return number_of[key], row_of[used_keys]
    _, rows, numbers = np.unique(key, return_index=True, return_inverse=True)
    return numbers.astype(np.int64), rows.astype(np.int64)


def number_by_first_occurrence(*columns: NDArray[Any]) -> tuple[Int64s, Int64s]:
    numbers, rows = number_combinations(*columns)
    order = np.argsort(rows)
    return index_rows(order, len(rows))[numbers], rows[order]


def find_group_starts(groups: NDArray[Any]) -> Int64s:
    return np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]])[: len(groups)])


def compute_running_max(numbers: Int64s, groups: Int64s) -> Int64s:
    """Return the running maximum of the numbers of each group. Numbers must be ordered by group."""
    if not len(numbers):
        return numbers
    if int(numbers.min()) < 0 or int(numbers.max()) >= (1 << 62) // (int(groups[-1]) + 1):
        values, places = np.unique(numbers, return_inverse=True)
        return values[compute_running_max(places.astype(np.int64), groups)]
    base = groups * (int(numbers.max()) + 1)
    return np.asarray(np.maximum.accumulate(numbers + base) - base)


def count_numbers_up_to(groups: NDArray[Any], numbers: Int64s, of: NDArray[Any], upto: Int64s) -> Int64s:
    """Return, for each `i`, the count of numbers in group `of[i]` that are at most `upto[i]`."""
    all_groups = np.concatenate([groups, of])
    order = np.lexsort((np.concatenate([numbers, upto]), all_groups))  # of equal numbers, those of the group come first
    is_limit = order >= len(groups)
    counted = np.cumsum(~is_limit)
    counts = np.empty(len(all_groups), dtype=np.int64)
    counts[order] = counted
    return np.asarray(counts[len(groups) :] - np.searchsorted(np.sort(groups), of))


def find_last_number(groups: NDArray[Any], numbers: Int64s, of: NDArray[Any], upto: Int64s) -> Int64s:
    """Return the index of the last number of group `of[i]` that is at most `upto[i]`, or `NONE`. Numbers must be
    ordered by group and size."""
    counts = count_numbers_up_to(groups, numbers, of, upto)
    return np.where(counts > 0, np.searchsorted(groups, of) + counts - 1, NONE)


NONE = -1
"""The index that means no row."""


def find_rows(ids: Int64s, wanted_ids: Int64s) -> Int32s:
    """Return the row of each wanted id, -1 for a missing id. `ids` are distinct."""
    if not len(ids):
        return np.full(len(wanted_ids), NONE, dtype=np.int32)
    first = int(ids[0])
    if int(ids[-1]) - first + 1 == len(ids) and (ids[1:] > ids[:-1]).all():  # consecutive
        is_missing = (wanted_ids < first) | (wanted_ids > ids[-1])
        return np.where(is_missing, NONE, wanted_ids - first).astype(np.int32)
    # Most ids are consecutive, so a table is faster than a sort. A few may be far from the others.
    middle, reach = int(ids[len(ids) // 2]), 2 * len(ids) + 500
    first, end = max(int(ids.min()), middle - reach), min(int(ids.max()) + 1, middle + reach)
    is_near = (ids >= first) & (ids < end)
    near = np.flatnonzero(is_near)
    if 2 * len(near) > len(ids):
        table = np.full(end - first, NONE, dtype=np.int32)
        table[ids[near] - first] = near
        inside = (wanted_ids >= first) & (wanted_ids < end)
        found_rows = table[np.where(inside, wanted_ids, first) - first]
        found_rows[~inside] = NONE
        if len(near) < len(ids):
            far, far_rows = np.flatnonzero(~inside), np.flatnonzero(~is_near)
            rows = find_rows(ids[far_rows], wanted_ids[far])
            found_rows[far] = np.where(rows == NONE, NONE, far_rows[rows])
        return np.asarray(found_rows)
    order = np.argsort(ids)
    places = np.searchsorted(ids, wanted_ids, sorter=order).clip(max=len(ids) - 1)
    rows = order[places].astype(np.int32)
    rows[ids[rows] != wanted_ids] = NONE
    return np.asarray(rows)


def count_ancestors(parents: Int32s) -> Int32s:
    """Return the number of ancestors of each row. Raises `ValueError` for cyclic parents."""
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


def topmost_rows(parents: Int32s) -> Int32s:
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


def find_nearest_row(above: Int32s, is_wanted: Bools) -> Int32s:
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


def find_ancestor(parents: Int32s, is_wanted: Bools) -> Int32s:
    return np.append(find_nearest_row(parents, is_wanted), np.int32(NONE))[parents]


def are_at_or_above(parents: Int32s, rows: NDArray[Any]) -> Bools:
    is_included = np.zeros(len(parents), dtype=np.bool_)
    while len(rows):
        is_included[rows] = True
        rows = find_distinct(parents[rows])
        rows = rows[(rows != NONE) & ~is_included[rows]]
    return is_included


def find_least_at_or_below(parents: list[int], numbers: list[int]) -> list[int]:
    """Return, per row, the minimum of the numbers of the row and its descendants. Parents must come before their
    children."""
    least = [*numbers]
    for row in range(len(parents) - 1, -1, -1):
        above = parents[row]
        if above != NONE and least[row] < least[above]:
            least[above] = least[row]
    return least


def rows_by_level(level: Int32s) -> list[Int64s]:
    order = sort_stably(level, int(level.max(initial=0)) + 1)
    return np.split(order, np.flatnonzero(np.diff(level[order])) + 1) if len(order) else []


def view_as_int64s(numbers: array[int]) -> Int64s:
    """Return a view of an array's 64-bit numbers. The array must not grow while the view exists."""
    return np.frombuffer(numbers, dtype=np.int64)


def append_numbers(column: array[int], numbers: Sequence[int]) -> None:
    """Append 64-bit numbers to a column. `array.extend` takes four times as long."""
    column.frombytes(pack(f"{len(numbers)}q", *numbers))


def invert_order(order: Int64s) -> Int32s:
    rank = np.empty(len(order), dtype=np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return rank
