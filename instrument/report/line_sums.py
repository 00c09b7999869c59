"""The lines of a tally as arrays, and what they add up to: by node, by site, by whatever group of nodes a table shows.

Numbers have 64 bits. Where a sum may need more, as of a damaged file, they are Python's own: slower, and exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.recording.lines import CALLS, DEVICE, ERRORS, FIRST, MAX, MIN, WIDTH, Lines, Numbers, Sum
from instrument.recording.spans import Site
from instrument.report.view import Recording
from instrument.trace.forest import NONE, nearest
from instrument.trace.groups import stable_order

Rows = NDArray[Any]
"""Sums, one in a row, with the columns of `Sum`: whole numbers of 64 bits, or objects."""

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

LINES = 0
_LIMIT = float(1 << 60)


class LineSums:
    """The lines of a tally, and their sums. `parents` and `site_of` are by node; parents come before their children."""

    def __init__(self, lines: Lines) -> None:
        self.tree, self.threads, self.histogram = lines.tree, lines.threads, lines.histogram
        self.parents, self.site_of = (np.asarray(column, dtype=np.int32) for column in (lines.parents, lines.site_of))
        self._lines = lines
        self._of: dict[int | None, tuple[Int64s, Rows]] = {}
        self._device_below: dict[int | None, Mapping[int, int]] = {}

    @classmethod
    def merged(cls, recording: Recording) -> LineSums:
        """Return the sums of all threads together; for `Recording.once`."""
        return cls(recording.lines(merged=True))

    @classmethod
    def apart(cls, recording: Recording) -> LineSums:
        """Return the sums by thread; for `Recording.once`."""
        return cls(recording.lines())

    @cached_property
    def _type(self) -> type[Any]:
        """The type that holds every sum of the lines."""
        books = [_array(lines) for lines in self._lines.book(None)]
        if any(rows.dtype == object for rows in books):
            return object
        sums = [np.abs(rows, dtype=np.float64).sum(axis=0)[:FIRST] for rows in books]
        return np.int64 if np.sum(sums, axis=0).max(initial=0) < _LIMIT else object

    def of(self, thread: int | None) -> tuple[Int64s, Rows]:
        """The node of each line of a thread, or of all (None), and the line as the sum that it is alone."""
        if thread not in self._of:
            parts = [_array(lines) for lines in self._lines.book(thread)]
            rows = np.concatenate([np.zeros((0, WIDTH), dtype=np.int64), *parts]).astype(self._type, copy=False)
            nodes = rows[:, LINES].astype(np.int64)
            rows[:, LINES] = 1
            self._of[thread] = nodes, rows
        return self._of[thread]

    def forget(self, thread: int | None) -> None:
        """Give up the arrays of a thread."""
        self._of.pop(thread, None)

    def has(self, field: int) -> bool:
        """Return True if a number of any line is not 0."""
        return any(bool((_array(lines)[:, field] != 0).any()) for lines in self._lines.book(None))

    def recorded(self, thread: int) -> bool:
        """Return True if a call was counted on the thread."""
        return any(bool((_array(lines)[:, CALLS] != 0).any()) for lines in self._lines.book(thread))

    def by(self, groups: NDArray[Any], count: int, thread: int | None = None) -> Rows:
        """The lines of a thread, or of all (None), added up by the group of their node, of none where it is below 0."""
        nodes, rows = self.of(thread)
        return added(rows, np.asarray(groups)[nodes], count)

    def by_site(self) -> Rows:
        """All lines added up by the number of their site."""
        return self.by(self.site_of, int(self.site_of.max(initial=NONE)) + 1)

    def _topmost(self, say: Callable[[Site], bool]) -> Bools:
        """The nodes of whose site a function says so, and of none above them."""
        marked = np.array([*self.tree.by_site(say), False], dtype=np.bool_)[self.site_of]
        return np.asarray(marked & (around(self.parents, marked) == NONE))

    def topmost_by_name(self, say: Callable[[Site], bool]) -> dict[str, tuple[int, int]]:
        """The calls of the topmost lines of whose site a function says so, and those of them that failed, by name."""
        numbers: dict[str, int] = {}
        of_site = [numbers.setdefault(site.name, len(numbers)) for site in self.tree.sites]
        groups = np.where(self._topmost(say), np.array([*of_site, NONE], dtype=np.int32)[self.site_of], NONE)
        sums = self.by(groups, len(numbers))[:, [CALLS, ERRORS]].tolist()
        return {name: (calls, errors) for name, (calls, errors) in zip(numbers, sums, strict=True) if calls}

    def total(self, say: Callable[[Site], bool]) -> Sum:
        """The sum of the topmost lines of whose site a function says so."""
        groups = np.where(self._topmost(say), 0, NONE)
        found = Sum(*self.by(groups, 1)[0].tolist())
        below_ns = sum(more_ns for node, more_ns in self.device_below(None).items() if groups[node] == 0)
        return found._replace(device_ns=found.device_ns + below_ns)

    def device_below(self, thread: int | None) -> Mapping[int, int]:
        """By how much the device time of what ran below a called node exceeds its own, on a thread or on all.

        Of the nodes where it does. What a node asked for with its own events holds what was asked for below it, on the
        same stream: it does not count once more.
        """
        if thread not in self._device_below:
            self._device_below[thread] = self._find_device_below(thread) if self.has(DEVICE) else {}
        return self._device_below[thread]

    def _find_device_below(self, thread: int | None) -> Mapping[int, int]:
        nodes, rows = self.of(thread)
        own, called = [0] * len(self.parents), np.zeros(len(self.parents), dtype=np.bool_)
        called[nodes[rows[:, CALLS] != 0]] = True
        for node, own_ns in zip(nodes.tolist(), rows[:, DEVICE].tolist(), strict=True):
            own[node] += own_ns
        is_called, parents = called.tolist(), self.parents.tolist()
        below, more = [0] * len(own), dict[int, int]()
        for node in range(len(own) - 1, -1, -1):  # a parent comes before its children
            own_ns, below_ns = own[node], below[node]
            if below_ns > own_ns and is_called[node]:
                more[node] = below_ns - own_ns
            if parents[node] >= 0:
                below[parents[node]] += max(own_ns, below_ns)
        return more


def around(parents: Int32s, wanted: Bools) -> Int32s:
    """The nearest wanted row above each, `NONE` where there is none."""
    found = nearest(parents, wanted)
    return np.asarray(np.where(parents == NONE, NONE, found[parents]), dtype=np.int32)


def added(rows: Rows, groups: NDArray[Any], count: int) -> Rows:
    """Sums added up by group, of none where it is below 0. Those without calls add nothing."""
    sums: Rows = np.zeros((count, WIDTH), dtype=rows.dtype)
    kept = (groups >= 0) & (rows[:, CALLS] != 0)
    if not kept.all():
        rows, groups = rows[kept], groups[kept]
    if not len(rows):
        return sums
    order = stable_order(groups, count)
    rows, groups = rows[order], groups[order]
    firsts = np.flatnonzero(np.diff(groups, prepend=NONE))
    found = np.add.reduceat(rows, firsts)
    for field, choose in ((MIN, np.minimum), (MAX, np.maximum), (FIRST, np.minimum)):
        found[:, field] = choose.reduceat(rows[:, field], firsts)
    sums[groups[firsts]] = found
    return sums


def together(rows: Rows) -> Sum:
    """Several sums as one."""
    rows = rows[rows[:, CALLS] != 0]
    if not len(rows):
        return Sum(*[0] * WIDTH)
    found = rows.sum(axis=0)
    found[MIN], found[MAX], found[FIRST] = rows[:, MIN].min(), rows[:, MAX].max(), rows[:, FIRST].min()
    return Sum(*found.tolist())


def _array(lines: Numbers) -> Rows:
    return np.asarray(lines, dtype=object if isinstance(lines, list) else np.int64).reshape(-1, WIDTH)
