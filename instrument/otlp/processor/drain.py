"""The drain of one recording: what another process has recorded since the last look, as the tail sampler reads it.

It stands where the process's own recorder does when a session reads its rings itself, so both decide by the same code.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.otlp.processor.column_shelf import ColumnShelf, roots_ended, rows_of
from instrument.otlp.processor.key_facts import Details, KeyFactsReader
from instrument.recording.export_place import Progress
from instrument.recording.lines import Lines
from instrument.recording.mapped import Mapped
from instrument.recording.mapped_facts import OpenSpan, Records, RingRows
from instrument.recording.paths import CallTree
from instrument.recording.rows import NODE, REQUEST_BIT, Row, row_of, span_of
from instrument.recording.spans import BATCH_KEYS, FIRST_ITEM, KEY, Site, Span

ROWS_AT_ONCE = 10_000
"""The most rows that are looked at in one go: what is held at a time is bounded by it."""

DETAILS_HELD = 2
"""So many times what a recording has room for is held of what rows have that are still to be read."""

_FIRST_ITEM, _BATCH_KEYS = FIRST_ITEM.encode(), BATCH_KEYS.encode()


class Drain:
    """Reads the recording on from where it had been read. Used by one thread.

    `seen` counts the rows that were read, `missed` those that were overwritten before; `places` says where it stands.
    """

    def __init__(self, mapped: Mapped, progress: Progress) -> None:
        self._mapped = mapped
        self.places = dict(progress.places)
        self.details_at = progress.details
        self.seen, self.missed = progress.fates["seen"], progress.fates["missed"]
        self.has_more = False
        self.left: tuple[int, int] = (0, 0)
        """Rows that ended after the first of two times are left where they are: none that is sound ended after the
        second one."""
        self.lag_ns = 0
        """How long ago what was left may have ended; 0 where nothing was."""
        self.opened: Mapping[int, OpenSpan] = {}
        """The spans that were open as rows were read the last time, by their ids."""
        self.keys = KeyFactsReader(self._site_of_node)
        """What rows tell of keys."""
        self._recent: deque[tuple[int, int, Mapping[int, tuple[int, bytes]]]] = deque()
        self._details_read = progress.details
        self._shelves: list[ColumnShelf] = []
        self._watched: WatchedRows | None = None

    # ---------------------------------------------------------------- what the tail sampler asks a recorder

    def shelf(self, sample: float, spans_per_request: int) -> ColumnShelf:
        """Where rows of open requests are put aside."""
        self._shelves.append(ColumnShelf(sample, spans_per_request))
        return self._shelves[-1]

    def cursor(self, read_on: Callable[[Any, int], tuple[list[Row], int, int]]) -> _Cursor:
        """What reads on, by `read_on` of a shelf."""
        return _Cursor(self, read_on)

    def open_rows(self) -> list[tuple[int, Row]]:
        """The spans that are open now, as rows that have not ended."""
        return [(span.thread_id, row_of_open(span)) for span in self._mapped.open_spans()]

    def span(self, row: Row, thread_id: int) -> Span:
        """The span that a row stands for."""
        return span_of(row, self.site_of(row), thread_id)

    def site_of(self, row: Row) -> Site:
        """The site of a row that was read."""
        return self._site_of_node(row[NODE])

    def _site_of_node(self, node: int) -> Site:
        return self._mapped.known_tree.site(node)

    def lines(self, *, merged: bool = False, wanted: Callable[[CallTree], Sequence[bool]] | None = None) -> Lines:
        """The totals up to now of the sites that are wanted of a tree: of requests, where nobody says of which."""
        return Lines.of_tally(self._mapped.tally(wanted or _are_requests), merged=merged)

    # ---------------------------------------------------------------- what the meter asks

    def watch(self) -> WatchedRows:
        """From now on, the rows of generators and of batches as they are read."""
        self._watched = WatchedRows(self)
        return self._watched

    def between(self, places: Mapping[int, int]) -> Iterator[list[Row]]:
        """The rows of requests, generators and batches from some places on, up to where it stands."""
        if all(places.get(ring, 0) >= place for ring, place in self.places.items()):
            return
        details, _ = self._mapped.details_since(0)
        for rings in self._pieces(places):
            for ring in rings:
                rows = ring.rows[: max(self.places.get(ring.ring, 0) - ring.first, 0)]
                is_root = (rows["span_id"] == rows["root_id"]) & (rows["root_id"] & np.uint64(REQUEST_BIT) != 0)
                yield rows_of(rows[is_root | _are_watched(rows, details)], details)

    # ---------------------------------------------------------------- reading

    def read(self, read_on: Callable[[Any, int], tuple[list[Row], int, int]]) -> list[tuple[int, list[Row]]]:
        """The rows since the last time that `read_on` finds, with the native id of their thread."""
        ended = self._mapped.ended_rows
        self.opened = {span.span_id: span for span in self._mapped.open_spans()}
        below_keys = self._below_keys()
        for shelf in self._shelves:
            shelf.open_below_keys = below_keys
        rings = self._mapped.rows(self.places, ROWS_AT_ONCE, before=self.left)
        details = self._take_details()
        self.has_more = sum(len(ring.rows) for ring in rings) >= ROWS_AT_ONCE
        self.keys.read(self.opened, rings, details, has_more=self.has_more)
        found, written = [], ended
        if self._watched is not None:
            self._watched.take(rings)
        for ring in rings:
            since = self.places.get(ring.ring, 0)
            rows, head, _ = read_on(ring, since)
            self.seen += len(ring.rows)
            written += head
            if rows:
                found.append((ring.thread_id, rows))
        self.places = {ring.ring: ring.head for ring in rings}
        self.missed = max(self.missed, written - self.seen)
        until_ns, now_ns = self.left
        is_left = now_ns > 0 and any(self.places.get(ring, 0) < head for ring, head in self._mapped.heads().items())
        self.lag_ns = now_ns - until_ns if is_left else 0
        self._forget_details()
        return found

    def _below_keys(self) -> set[int]:
        found: set[int] = set()
        for span in self.opened.values():  # in the order in which they began
            is_open = span.root_id & REQUEST_BIT and span.root_id in self.opened
            if not is_open and (KEY in span.attributes or span.parent_id in found):
                found.add(span.span_id)
        return found

    def look_at_open(self) -> None:
        """Note the keys of what is open, where no rows have come."""
        details, _ = self._mapped.details_since(self.details_at)
        self.keys.read({span.span_id: span for span in self._mapped.open_spans()}, (), details, has_more=True)

    def _take_details(self) -> Details:
        """What rows have is written before them, perhaps since a time before, when they were not there yet."""
        found, self._details_read = self._mapped.details_since(self._details_read)
        self._recent.append((time.monotonic_ns(), self._details_read, found))
        first = self._details_read - DETAILS_HELD * self._mapped.details_bytes
        while self._recent[0][1] < first:  # where there is always more to read it would be all there ever was
            self._recent.popleft()
        every = {span_id: detail for *_, details in self._recent for span_id, detail in details.items()}
        for shelf in self._shelves:
            shelf.details = every
        if self._watched is not None:
            self._watched.details = every
        return every

    def _forget_details(self) -> None:
        """Keep those of rows that are still to be read, and the newest, whose rows may be about to be written."""
        if self.has_more:
            return
        while len(self._recent) > 1 and (not self.lag_ns or self._recent[1][0] < self.left[0]):
            self._recent.popleft()
        if not self.lag_ns:
            self.details_at = self._details_read

    def adopt(self) -> int:
        """Put aside again what lies before the place where it goes on, of requests that nobody has decided about.

        Those are open now, or end later than that. Returns how many rows there were.
        """
        opened = [span.root_id for span in self._mapped.open_spans() if span.root_id & REQUEST_BIT]
        ended = [roots_ended(ring) for rings in self._pieces(self.places) for ring in rings]
        roots = np.unique(np.concatenate([np.array(opened, np.uint64), *ended]))
        if not len(roots):
            return 0
        details, _ = self._mapped.details_since(0)
        adopted = 0
        for shelf in self._shelves:
            shelf.details = details
            for rings in self._pieces({}):
                for ring in rings:
                    before = max(self.places.get(ring.ring, 0) - ring.first, 0)
                    adopted += shelf.adopt(ring._replace(rows=ring.rows[:before]), roots)
                    self.keys.read_rows([(ring.rows[:before], ring.thread_id)], details)
        return adopted

    def _pieces(self, places: Mapping[int, int]) -> Iterator[list[RingRows]]:
        """All rows from some places on that are there now, a bounded number at a time."""
        until = self._mapped.heads()
        while any(places.get(ring, 0) < head for ring, head in until.items()):
            rings = self._mapped.rows(places, ROWS_AT_ONCE)
            yield rings
            places = {ring.ring: ring.head for ring in rings}
            until = {ring: head for ring, head in until.items() if ring in places}

    @property
    def held(self) -> int:
        """Rows that are put aside."""
        return sum(shelf.held for shelf in self._shelves)

    @property
    def beyond(self) -> int:
        """Rows that were left out for the limits of the shelves."""
        return sum(shelf.counts.total() for shelf in self._shelves)


class _Cursor:
    def __init__(self, drain: Drain, read_on: Callable[[Any, int], tuple[list[Row], int, int]]) -> None:
        self._drain = drain
        self._read_on = read_on

    @property
    def lost(self) -> int:
        return self._drain.missed

    def read(self) -> list[tuple[int, list[Row]]]:
        return self._drain.read(self._read_on)


class WatchedRows:
    """The rows of generators and of batches, as a drain reads them; `details` are those of the rows that come next."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._rows: list[Row] = []
        self.details: Details = {}

    def take(self, rings: Sequence[RingRows]) -> None:
        """Look through rows that were read."""
        for ring in rings:
            self._rows += rows_of(ring.rows[_are_watched(ring.rows, self.details)], self.details)

    @property
    def lost(self) -> int:
        """Rows that were overwritten before."""
        return self._drain.missed

    def read(self) -> list[tuple[int, list[Row]]]:
        """What has come since the last time."""
        rows, self._rows = self._rows, []
        return [(0, rows)]


def row_of_open(span: OpenSpan) -> Row:
    """The row that an open span would be, without what it bears."""
    its = (span.node, span.span_id, span.parent_id, span.root_id, span.task_id, span.start_ns)
    return row_of(*its, end_ns=0)


def _are_requests(tree: CallTree) -> Sequence[bool]:
    return tree.by_site(_is_request)


def _is_request(site: Site) -> bool:
    return site.kind == "request"


def _are_watched(rows: Records, details: Details) -> NDArray[np.bool_]:
    """Which rows are of generators or of batches, by what they have beside their numbers."""
    found = [span_id for span_id, (_, text) in details.items() if _FIRST_ITEM in text or _BATCH_KEYS in text]
    return np.isin(rows["span_id"], np.array(found, np.uint64)) if found else np.zeros(len(rows), np.bool_)
