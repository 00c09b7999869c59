"""Computes sums, extremes and counts of numbers by group, exact in 64 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class Groups:
    """The group of each number in a column: from 0 to below `count`, negative for a number that does not count."""

    def __init__(self, groups: NDArray[Any], count: int) -> None:
        order = sort_stably(groups, count)
        ascending = groups[order]
        first = int(np.searchsorted(ascending, 0))
        order, ascending = order[first:], ascending[first:]
        self._order, self._count = order, count
        self._firsts = np.flatnonzero(np.diff(ascending, prepend=-1)) if len(ascending) else np.zeros(0, dtype=np.int64)
        self._known = ascending[self._firsts]

    def members(self) -> list[Int64s]:
        """Return the indices of each group's numbers, in order. Empty groups are left out."""
        return np.split(self._order, self._firsts[1:]) if len(self._firsts) else []

    def sizes(self) -> Int64s:
        """Return the number of members of each group."""
        return self._spread_values(np.diff(self._firsts, append=len(self._order)), 0)

    def sums(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Return the sum of each group, 0 for an empty one. Sums that may exceed 64 bits are Python ints."""
        if np.abs(numbers, dtype=np.float64).sum() < 1 << 62:
            return self._reduce_groups(np.add, numbers, 0)
        totals = np.zeros(self._count, dtype=object)
        if len(self._firsts):
            totals[self._known] = np.add.reduceat(numbers[self._order].astype(object), self._firsts)
        return totals

    def least(self, numbers: NDArray[Any], otherwise: int) -> Int64s:
        return self._reduce_groups(np.minimum, numbers, otherwise)

    def most(self, numbers: NDArray[Any], otherwise: int) -> Int64s:
        return self._reduce_groups(np.maximum, numbers, otherwise)

    def _reduce_groups(self, reduce: np.ufunc, numbers: NDArray[Any], otherwise: int) -> Int64s:
        if not len(self._firsts):
            return np.full(self._count, otherwise, dtype=np.int64)
        return self._spread_values(reduce.reduceat(numbers[self._order].astype(np.int64), self._firsts), otherwise)

    def _spread_values(self, values: NDArray[Any], otherwise: int) -> Int64s:
        spread = np.full(self._count, otherwise, dtype=np.int64)
        spread[self._known] = values
        return spread


class Members:
    """The members of each group, in order: indices, or the given numbers."""

    def __init__(self, groups: NDArray[Any], count: int, numbers: Int64s | None = None) -> None:
        order = sort_stably(groups, count)
        self._numbers = order if numbers is None else numbers[order]
        self._starts = np.searchsorted(groups[order], np.arange(count + 1)).tolist()

    def __getitem__(self, group: int) -> Int64s:
        return self._numbers[self._starts[group] : self._starts[group + 1]]


def places_of(rows: NDArray[Any], count: int) -> Int64s:
    """Return the index in `rows` of each of `count` rows, -1 for a missing row. A last -1 follows."""
    places = np.full(count + 1, -1, dtype=np.int64)
    places[rows] = np.arange(len(rows))
    return places


def sort_stably(numbers: NDArray[Any], end: int) -> Int64s:
    """Return the indices that sort numbers below `end`. Equal numbers keep their order. Numbers of 16 bits sort
    fastest."""
    if end < 1 << 16 and len(numbers) and int(numbers.min()) >= -1:
        return np.argsort((numbers + 1).astype(np.uint16), kind="stable")
    return np.argsort(numbers, kind="stable")


def distinct(numbers: NDArray[Any]) -> NDArray[Any]:
    """Return the distinct numbers in order. `np.unique` takes ten times as long."""
    if len(numbers) and numbers.dtype.kind == "i":
        first, last = int(numbers.min()), int(numbers.max())
        if last - first < len(numbers):  # a table of them is faster than a sort
            is_there = np.zeros(last - first + 1, dtype=np.bool_)
            is_there[np.subtract(numbers, first, dtype=np.int64)] = True
            return np.asarray((np.flatnonzero(is_there) + first).astype(numbers.dtype))
    run = np.sort(numbers)
    return np.asarray(run[np.flatnonzero(np.concatenate([[True], run[1:] != run[:-1]]))] if len(run) else run)


def counted(numbers: Int64s, end: int) -> tuple[Int64s, Int64s]:
    """Return the distinct numbers in order, and the count of each. The numbers are from 0 to below `end`."""
    if end > 4 * len(numbers):
        return np.unique(numbers, return_counts=True)
    counts = np.bincount(numbers)
    values = np.flatnonzero(counts)
    return values, counts[values]


def ranked(numbers: NDArray[Any]) -> tuple[NDArray[Any], Int64s]:
    """Return the distinct numbers in order, and each number's index among them, fast for few distinct numbers."""
    values = distinct(numbers[::997])
    while True:
        places = np.searchsorted(values, numbers).clip(max=max(len(values) - 1, 0))
        missed = numbers[values[places] != numbers] if len(values) else numbers
        if not len(missed):
            return values, places
        values = distinct(np.concatenate([values, missed]))


def numbered(*columns: NDArray[Any]) -> tuple[Int64s, Int64s]:
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


def by_first_sight(*columns: NDArray[Any]) -> tuple[Int64s, Int64s]:
    """Number the distinct combinations of columns as `numbered` does, but in the order in which they first occur."""
    numbers, rows = numbered(*columns)
    order = np.argsort(rows)
    return places_of(order, len(rows))[numbers], rows[order]


def firsts_of(groups: NDArray[Any]) -> Int64s:
    """Return the index at which each group begins, for numbers ordered by group."""
    return np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]])[: len(groups)])


def compute_running_most(numbers: Int64s, groups: Int64s) -> Int64s:
    """Return the running maximum of numbers within each group. Numbers must be ordered by group."""
    if not len(numbers):
        return numbers
    if int(numbers.min()) < 0 or int(numbers.max()) >= (1 << 62) // (int(groups[-1]) + 1):
        values, places = np.unique(numbers, return_inverse=True)
        return values[compute_running_most(places.astype(np.int64), groups)]
    base = groups * (int(numbers.max()) + 1)
    return np.asarray(np.maximum.accumulate(numbers + base) - base)


def count_up_to(groups: NDArray[Any], numbers: Int64s, of: NDArray[Any], upto: Int64s) -> Int64s:
    """Count the numbers of a group up to a limit, for each pair of a group in `of` and a limit in `upto`."""
    all_groups = np.concatenate([groups, of])
    order = np.lexsort((np.arange(len(all_groups)), np.concatenate([numbers, upto]), all_groups))
    is_limit = order >= len(groups)
    counted = np.cumsum(~is_limit)
    counts = np.empty(len(all_groups), dtype=np.int64)
    counts[order] = counted
    return np.asarray(counts[len(groups) :] - np.searchsorted(np.sort(groups), of))
