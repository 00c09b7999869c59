"""The shelf: rows of requests that have not ended yet, put aside by their root until it is decided what they become.

What reads the rings while the service runs meets every row there is, and almost none of them matters in the end. So
this is done in C as well (`_recorder.c`), at some tens of nanoseconds a row; here is its twin.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from instrument.recording.rows import REQUEST_BIT, ROOT_ID, Row, is_request_root

if TYPE_CHECKING:
    from instrument.recording.ring import Ring

Held = tuple[Row, int]
"""A row and the native id of its thread."""

HELD_ROWS = 200_000
DECIDED_ROOTS = 10_000
"""Rows of open requests, and roots that were kept or passed, that are remembered; the oldest go first."""

BEYOND = "spans beyond spans_per_request"
TOO_LONG = "spans of requests that stayed open too long"


class Shelf:
    """Used by one thread at a time. What belongs to a request is told by the id of its root.

    `sample` is the share of trees without a request that somebody wants to see, `spans_per_request` bounds what one
    request may hold, the root not counted. `held` is how many rows are put aside now, `counts` what was not kept, by
    reason.
    """

    def __init__(
        self,
        sample: float,
        spans_per_request: int,
        held_rows: int,
        decided_roots: int,
    ) -> None:
        self._sample = sample
        self._spans_per_request = spans_per_request
        self._held_rows = held_rows
        self._decided_roots = decided_roots
        self._open: OrderedDict[int, list[Held]] = OrderedDict()
        self.held = 0
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._passed: OrderedDict[int, None] = OrderedDict()
        self.counts: Counter[str] = Counter()

    def change(self, sample: float, spans_per_request: int) -> None:
        """Sort by other settings from now on."""
        self._sample, self._spans_per_request = sample, spans_per_request

    def sort(self, ring: Ring, since: int) -> tuple[list[Row], int, int]:
        """Go through a ring from row number `since` on; returns the rows that somebody has to look at now.

        These are the roots of requests, what ended after its root was kept, and sampled trees without a request; then
        the number after the last row, and how many rows were overwritten before. The rest is put aside or left.
        """
        rows, head, missed = ring.newest(since)
        found = []
        for row in rows:
            root_id = row[ROOT_ID]
            if is_request_root(row):
                found.append(row)
            elif root_id in self._kept:
                self._kept[root_id] += 1
                if self._kept[root_id] <= self._spans_per_request:
                    found.append(row)
                else:
                    self.counts[BEYOND] += 1
            elif root_id & REQUEST_BIT:
                self._hold(row, ring.thread_id)
            elif is_sampled(root_id, self._sample):
                found.append(row)
        return found, head, missed

    def _hold(self, row: Row, thread_id: int) -> None:
        if row[ROOT_ID] in self._passed:
            return
        held = self._open.setdefault(row[ROOT_ID], [])
        if len(held) >= self._spans_per_request:
            self.counts[BEYOND] += 1
            return
        held.append((row, thread_id))
        self.held += 1
        while self.held > self._held_rows:
            _, oldest = self._open.popitem(last=False)
            self.held -= len(oldest)
            self.counts[TOO_LONG] += len(oldest)

    def decide(self, root_id: int, keep: bool, wanted: bool) -> list[Held]:
        """The root has ended: take its rows off the shelf, in the order in which they were put there.

        What else comes of it is `keep`: found by `sort`, or left. The rows are returned where they are `wanted`.
        """
        held = self._open.pop(root_id, [])
        self.held -= len(held)
        if keep:
            self._passed.pop(root_id, None)
            self._kept[root_id] = len(held)
            if len(self._kept) > self._decided_roots:
                self._kept.popitem(last=False)
        else:
            self._passed[root_id] = None
            if len(self._passed) > self._decided_roots:
                self._passed.popitem(last=False)
        return held if wanted else []


def is_sampled(root_id: int, sample: float) -> bool:
    """The same answer for every span of a tree: the id, scrambled by Knuth's multiplicative hash."""
    return (root_id * 0x9E3779B97F4A7C15 & (1 << 64) - 1) < sample * (1 << 64)
