"""The shelf of rows that another process has recorded: as `instrument.recorder.shelf` sorts them, by arrays.

Most rows are put aside or left, and of those no Python object is made.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.otlp.processor.key_facts import Details
from instrument.recorder.shelf import BEYOND, DECIDED_ROOTS, HELD_ROWS, TOO_LONG, Held
from instrument.recording.mapped import ROWS
from instrument.recording.mapped_facts import Records, RingRows, detail_of, facts_in
from instrument.recording.remote_parents import REMOTE
from instrument.recording.rows import REQUEST_BIT, SPAN_ID, Row, unpacked_rows, with_more
from instrument.recording.spans import BATCH_KEYS, KEY

_KEY, _BATCH_KEYS = KEY.encode(), BATCH_KEYS.encode()
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class ColumnShelf:
    """Used by one thread at a time. What belongs to a request is told by the id of its root.

    `details` are those of the rows that are sorted next, `open_below_keys` the spans outside of open requests that are
    open and bear a key, or lie below what does.
    """

    def __init__(self, sample: float, spans_per_request: int) -> None:
        self.change(sample, spans_per_request)
        self.details: Details = {}
        self.open_below_keys: set[int] = set()
        self._open: OrderedDict[int, list[tuple[int, bytes, Details]]] = OrderedDict()
        self._sizes: dict[int, int] = {}
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._passed: OrderedDict[int, None] = OrderedDict()
        self.held = 0
        self.counts: Counter[str] = Counter()

    def change(self, sample: float, spans_per_request: int) -> None:
        """Sort by other settings from now on."""
        self._sample, self._spans_per_request = sample, spans_per_request

    def sort(self, ring: RingRows, since: int) -> tuple[list[Row], int, int]:
        """Go through rows of a ring; returns those that somebody has to look at now, as `Shelf.sort` does."""
        rows, has_details = ring.rows, self._have_details(ring.rows)
        roots = rows["root_id"]
        is_request = roots & np.uint64(REQUEST_BIT) != 0
        is_found = (rows["span_id"] == roots) & is_request
        below = np.flatnonzero(is_request & ~is_found)
        if len(below):
            is_found[self._sorted(ring.thread_id, rows, below, has_details)] = True
        if self._sample > 0:
            with np.errstate(over="ignore"):
                scrambled = roots * _MULTIPLIER
            is_found |= ~is_request & (scrambled <= np.uint64(min(int(self._sample * 2.0**64), (1 << 64) - 1)))
        may_be_kept = ~is_request if self._sample < 1 else np.zeros(len(rows), np.bool_)
        if len(below) and (self.details or self.open_below_keys):  # for others, in the tree of one that was let go
            passed = [root for root in np.unique(roots[below]).tolist() if root in self._passed]
            may_be_kept[below] |= np.isin(roots[below], np.array(passed, np.uint64))
        if may_be_kept.any():
            is_found |= self._below_keys(rows, may_be_kept & ~is_found)
            is_found |= may_be_kept & ~is_request & np.isin(rows["span_id"], self._bearing(_BATCH_KEYS))
        return rows_of(rows[is_found], self.details), ring.head, ring.first - since

    def _below_keys(self, rows: Records, is_asked: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which of these rows bear a key, or lie below what does: their requests decide about them."""
        bears = self._bearing(_KEY)
        found = is_asked & np.isin(rows["span_id"], bears)
        above = np.append(bears, np.fromiter(self.open_below_keys, np.uint64, len(self.open_below_keys)))
        while len(above):
            is_new = is_asked & ~found & np.isin(rows["parent_id"], above)
            found |= is_new
            above = rows["span_id"][is_new]
        return found

    def _bearing(self, name: bytes) -> NDArray[np.uint64]:
        """What bears an attribute of that name."""
        found = [span_id for span_id, (_, text) in self.details.items() if name in text]
        return np.array(found, np.uint64)

    def _have_details(self, rows: Records) -> NDArray[np.bool_]:
        if not self.details:
            return np.zeros(len(rows), np.bool_)
        return np.isin(rows["span_id"], np.fromiter(self.details, np.uint64, len(self.details)))

    def _sorted(
        self, thread_id: int, rows: Records, below: NDArray[np.int64], has_details: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Put rows below requests aside; returns the places of those whose requests are kept already."""
        places = below[np.argsort(rows["root_id"][below], kind="stable")]
        ordered, has_details = rows[places], has_details[places]
        roots, first = np.unique(ordered["root_id"], return_index=True)
        ends = [*first[1:].tolist(), len(ordered)]
        found = [np.zeros(0, np.int64)]
        for root_id, begin, end in zip(roots.tolist(), first.tolist(), ends, strict=True):
            if root_id in self._kept:
                room = max(self._spans_per_request - self._kept[root_id], 0)
                self._kept[root_id] += end - begin
                self.counts[BEYOND] += max(end - begin - room, 0)
                found.append(places[begin : min(begin + room, end)])
            elif root_id not in self._passed:
                self._hold(root_id, thread_id, ordered[begin:end], has_details[begin:end])
        return np.concatenate(found)

    def _hold(self, root_id: int, thread_id: int, rows: Records, has_details: NDArray[np.bool_]) -> None:
        room = max(self._spans_per_request - self._sizes.get(root_id, 0), 0)
        self.counts[BEYOND] += max(len(rows) - room, 0)
        rows = rows[:room]
        details = {span_id: self.details[span_id] for span_id in rows["span_id"][has_details[:room]].tolist()}
        self._open.setdefault(root_id, []).append((thread_id, rows.tobytes(), details))
        self._sizes[root_id] = self._sizes.get(root_id, 0) + len(rows)
        self.held += len(rows)
        while self.held > HELD_ROWS:
            oldest, _ = self._open.popitem(last=False)
            size = self._sizes.pop(oldest)
            self.held -= size
            self.counts[TOO_LONG] += size

    def adopt(self, ring: RingRows, roots: NDArray[np.uint64]) -> int:
        """Put aside the rows that are of some requests, of which nobody has decided; returns how many these are."""
        rows, before = ring.rows, self.held
        below = np.flatnonzero(np.isin(rows["root_id"], roots) & (rows["root_id"] != rows["span_id"]))
        if len(below):
            self._sorted(ring.thread_id, rows, below, self._have_details(rows))
        return self.held - before

    def decide(self, root_id: int, keep: bool, wanted: bool) -> list[Held]:
        """The root has ended: take its rows off the shelf; see `Shelf.decide`."""
        parts = self._open.pop(root_id, [])
        size = self._sizes.pop(root_id, 0)
        self.held -= size
        decided: OrderedDict[int, Any] = self._kept if keep else self._passed
        if keep:
            self._passed.pop(root_id, None)
        decided[root_id] = size
        if len(decided) > DECIDED_ROOTS:
            decided.popitem(last=False)
        if not wanted:
            return []
        return [
            (row, thread_id)
            for thread_id, data, details in parts
            for row in rows_of(np.frombuffer(data, ROWS), details)
        ]


def rows_of(rows: Records, details: Details) -> list[Row]:
    """Rows as recorders have them."""
    return [
        row if (detail := details.get(row[SPAN_ID])) is None else with_more(row, _detail_of(*detail))
        for row in unpacked_rows(rows.tobytes())
    ]


def _detail_of(active_ns: int, text: bytes) -> tuple[int, str | None, dict[Any, Any] | None]:
    active_ns, error, attributes = detail_of(active_ns, facts_in(text))
    told = dict(attributes)
    if isinstance(told.get(REMOTE), list):
        told[REMOTE] = tuple(told[REMOTE])
    return active_ns, error, told or None


def roots_ended(ring: RingRows) -> NDArray[np.uint64]:
    """The requests that have ended in these rows, by the ids of their roots."""
    roots: NDArray[np.uint64] = ring.rows["root_id"]
    found: NDArray[np.uint64] = roots[(roots == ring.rows["span_id"]) & (roots & np.uint64(REQUEST_BIT) != 0)]
    return found
