"""Numbers by the group that each belongs to: sums, extremes and counts of every group, exact in 64 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class Groups:
    """The group of each of some numbers: from 0 to below `count`, and none of a group below 0."""

    def __init__(self, groups: NDArray[Any], count: int) -> None:
        order = stable_order(groups, count)
        its = groups[order]
        first = int(np.searchsorted(its, 0))
        order, its = order[first:], its[first:]
        self._order, self._count = order, count
        self._firsts = np.flatnonzero(np.diff(its, prepend=-1)) if len(its) else np.zeros(0, dtype=np.int64)
        self._known = its[self._firsts]

    def members(self) -> list[Int64s]:
        """The places of the numbers of each group that has any, in order."""
        return np.split(self._order, self._firsts[1:]) if len(self._firsts) else []

    def sizes(self) -> Int64s:
        """Return the number of members of each group."""
        return self._spread(np.diff(self._firsts, append=len(self._order)), 0)

    def sums(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Return the sum of each group, 0 for one without any; as Python's numbers where one may exceed 64 bits."""
        if np.abs(numbers, dtype=np.float64).sum() < 1 << 62:
            return self._reduced(np.add, numbers, 0)
        found = np.zeros(self._count, dtype=object)
        if len(self._firsts):
            found[self._known] = np.add.reduceat(numbers[self._order].astype(object), self._firsts)
        return found

    def least(self, numbers: NDArray[Any], otherwise: int) -> Int64s:
        return self._reduced(np.minimum, numbers, otherwise)

    def most(self, numbers: NDArray[Any], otherwise: int) -> Int64s:
        return self._reduced(np.maximum, numbers, otherwise)

    def _reduced(self, reduce: np.ufunc, numbers: NDArray[Any], otherwise: int) -> Int64s:
        if not len(self._firsts):
            return np.full(self._count, otherwise, dtype=np.int64)
        return self._spread(reduce.reduceat(numbers[self._order].astype(np.int64), self._firsts), otherwise)

    def _spread(self, found: NDArray[Any], otherwise: int) -> Int64s:
        spread = np.full(self._count, otherwise, dtype=np.int64)
        spread[self._known] = found
        return spread


class Members:
    """The members of each of some groups, in order: numbers, or their places where none are given."""

    def __init__(self, groups: NDArray[Any], count: int, numbers: Int64s | None = None) -> None:
        order = np.argsort(groups, kind="stable")
        self._numbers = order if numbers is None else numbers[order]
        self._starts = np.searchsorted(groups[order], np.arange(count + 1)).tolist()

    def __getitem__(self, group: int) -> Int64s:
        return self._numbers[self._starts[group] : self._starts[group + 1]]


def places_of(rows: NDArray[Any], count: int) -> Int64s:
    """Return the place of each row among some, -1 for one that is not among them; behind all of them -1, too."""
    found = np.full(count + 1, -1, dtype=np.int64)
    found[rows] = np.arange(len(rows))
    return found


def stable_order(numbers: NDArray[Any], end: int) -> Int64s:
    """The places of numbers below an end in their order; numbers of 16 bits are sorted in a sixth of the time."""
    if end < 1 << 16 and len(numbers) and int(numbers.min()) >= -1:
        return np.argsort((numbers + 1).astype(np.uint16), kind="stable")
    return np.argsort(numbers, kind="stable")


def distinct(numbers: NDArray[Any]) -> NDArray[Any]:
    """Each number once, in order: as `np.unique`, whose table takes ten times as long."""
    its = np.sort(numbers)
    return np.asarray(its[np.flatnonzero(np.concatenate([[True], its[1:] != its[:-1]]))] if len(its) else its)


def ranked(numbers: NDArray[Any]) -> tuple[NDArray[Any], Int64s]:
    """The distinct numbers in order, and of each number its place among them; fast where they are few."""
    values = distinct(numbers[::997])
    while True:
        places = np.searchsorted(values, numbers).clip(max=max(len(values) - 1, 0))
        missed = numbers[values[places] != numbers] if len(values) else numbers
        if not len(missed):
            return values, places
        values = distinct(np.concatenate([values, missed]))


def numbered(*columns: NDArray[Any]) -> tuple[Int64s, Int64s]:
    """Return the number of each row's combination of columns, from 0 on, and of each number a row that has it."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        width = int(column.max()) + 1 if len(column) else 1
        if int(key.max(initial=0)) >= (1 << 62) // max(width, 1) or (len(column) and int(column.min()) < 0):
            key = np.unique(key, return_inverse=True)[1].astype(np.int64)
            values, column = np.unique(column, return_inverse=True)
            width = len(values)
        key = key * width + column.astype(np.int64)  # of nothing it may have any type
    most = int(key.max(initial=-1)) + 1
    if most <= 8 * len(key) + 1_000:  # a table of all that there can be takes a fifth of a sort's time
        row_of = np.full(most, -1, dtype=np.int64)
        row_of[key[::-1]] = np.arange(len(key))[::-1]
        known = np.flatnonzero(row_of >= 0)
        number_of = np.empty(most, dtype=np.int64)
        number_of[known] = np.arange(len(known))
        return number_of[key], row_of[known]
    _, rows, numbers = np.unique(key, return_index=True, return_inverse=True)
    return numbers.astype(np.int64), rows.astype(np.int64)


def by_first_sight(*columns: NDArray[Any]) -> tuple[Int64s, Int64s]:
    """Return the result of `numbered`, by the first row of each combination."""
    numbers, rows = numbered(*columns)
    order = np.argsort(rows)
    return places_of(order, len(rows))[numbers], rows[order]


def firsts_of(groups: NDArray[Any]) -> Int64s:
    """The places at which a group begins, of numbers that lie together by their group."""
    return np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]])[: len(groups)])


def running_most(numbers: Int64s, groups: Int64s) -> Int64s:
    """Return the most up to each number within its group, whose numbers lie together, in the order of the groups."""
    if not len(numbers):
        return numbers
    if int(numbers.min()) < 0 or int(numbers.max()) >= (1 << 62) // (int(groups[-1]) + 1):
        values, places = np.unique(numbers, return_inverse=True)
        return values[running_most(places.astype(np.int64), groups)]
    base = groups * (int(numbers.max()) + 1)
    return np.asarray(np.maximum.accumulate(numbers + base) - base)


def counts_up_to(groups: NDArray[Any], numbers: Int64s, of: NDArray[Any], upto: Int64s) -> Int64s:
    """Count the numbers of a group that are no more than a limit, for groups and their limits."""
    both = np.concatenate([groups, of])
    order = np.lexsort((np.arange(len(both)), np.concatenate([numbers, upto]), both))
    is_asked = order >= len(groups)
    counted = np.cumsum(~is_asked)
    found = np.empty(len(both), dtype=np.int64)
    found[order] = counted
    return np.asarray(found[len(groups) :] - np.searchsorted(np.sort(groups), of))
