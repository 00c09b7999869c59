"""Reads the new spans of a recording as columns, with device times, and the recording's running totals."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from instrument.otlp.export_facts import ExportFacts
from instrument.recording.export_checkpoint import Progress
from instrument.recording.mapped import Mapped
from instrument.recording.mapped_facts import Records, RingRows, parse_detail, parse_facts
from instrument.recording.memory_layout import REQUEST_BIT, SPAN_ID, Row, unpack_rows
from instrument.recording.paths import CallTree
from instrument.recording.spans import BATCH_KEYS, FIRST_ITEM, Site, is_request
from instrument.recording.tally import Tally
from instrument.trace.columns import Columns, DeviceIntervals, Int64s, device_intervals
from instrument.trace.of_recording import find_first_request_ns, read_origin
from instrument.trace.tail_sampler import TailSampler
from instrument.trace.unsettled import Details, UnsettledRows

ROWS_AT_ONCE = 16_000
"""The maximum number of rows of one read, to bound the reader's memory."""

AHEAD_ROWS = 8_000
"""The number of rows after which reading pauses until the next decision about due requests."""

DEVICE_WAIT_NS = 2 * 10**9
"""The maximum time in ns for which spans wait for their device times before they are sent."""

INTERVALS_KNOWN = 4_096
"""The maximum number of stored pairs of a time and the number of device intervals at that time."""

_WATCHED = (FIRST_ITEM.encode(), BATCH_KEYS.encode())


class RecordingReader:
    """Reads the new rows of one recording.

    One thread uses an instance. `rows` has the waiting rows. `seen` counts the rows that were read, `missed` the rows
    that were overwritten unread. `places` has the next row of each ring, by the ring's number.
    """

    def __init__(self, mapped: Mapped, progress: Progress, facts: ExportFacts) -> None:
        self._mapped = mapped
        self.places = dict(progress.places)
        self.seen, self.missed = progress.fates["seen"], progress.fates["missed"]
        self.untimed = progress.fates["untimed"]
        """The number of spans that were sent before their device times could be known."""
        self._interval_counts: deque[tuple[int, int]] = deque(maxlen=INTERVALS_KNOWN)
        self.has_more = False
        self.ahead = 0
        """The number of rows read since the last round of settling."""
        sampler = TailSampler(facts.capture, lambda: self.read_totals(merged=True))
        self.rows = UnsettledRows(facts.ids, self._find_site, sampler, facts.spans_per_request)
        self.rows.caller = read_origin(mapped.header).remote
        if self.rows.caller is not None:
            self.rows.served_from_ns = find_first_request_ns(mapped)
        self._details_at = 0
        self._marks: set[int] = set()
        self._watched: list[Row] | None = None
        if progress.places:
            self._adopt_unsettled_rows(progress.settled_ns)

    # ---------------------------------------------------------------- what the meter asks

    def take_watched_rows(self, *, goes_on: bool) -> list[Row]:
        """Return the new rows of generators and batches. With `goes_on`, collect further rows for the next call."""
        rows, self._watched = self._watched or [], [] if goes_on else None
        return rows

    def open_rows(self) -> list[tuple[int, Row]]:
        """Return the open spans as rows without attributes, each with its thread."""
        rows: list[tuple[int, Row]] = []
        for span in self._mapped.open_spans():
            ids = span.node, span.span_id, span.parent_id, span.root_id, span.task_id
            rows.append((span.thread_id, (*ids, span.start_ns, 0, 0, -1, None, None)))
        return rows

    def find_site(self, row: Row) -> Site:
        return self._find_site(row[0])

    def _find_site(self, node: int) -> Site:
        return self._mapped.last_tree.site(node)

    def read_totals(
        self, *, merged: bool = False, is_counted: Callable[[CallTree], Sequence[bool]] | None = None
    ) -> Tally:
        """Return the current totals of requests, or of the sites that `is_counted` selects in a call tree."""
        tally = self._mapped.tally(is_counted or (lambda tree: tree.map_sites(is_request)))
        return tally.merge_threads() if merged else tally

    def reread_rows(self, places: Mapping[int, int]) -> Iterator[list[Row]]:
        if all(places.get(ring, 0) >= place for ring, place in self.places.items()):
            return
        details, _ = self._mapped.read_details_since(0)
        marks = {span_id for span_id, (_, text) in details.items() if any(name in text for name in _WATCHED)}
        for rings in self._read_rows_in_pieces(places):
            for ring in rings:
                rows = ring.rows[: max(self.places.get(ring.ring, 0) - ring.first, 0)]
                is_read = _are_request_roots(rows) | np.isin(rows["span_id"], np.fromiter(marks, np.uint64, len(marks)))
                yield _unpack_rows(rows[is_read], details)

    # ---------------------------------------------------------------- reading

    @property
    def is_ahead(self) -> bool:
        return self.ahead >= AHEAD_ROWS

    def read_new_rows(self) -> list[Row]:
        if self.is_ahead:
            self.has_more = True
            return []
        now_ns, ended_rows = time.monotonic_ns(), self._mapped.ended_rows
        opened = {span.span_id: span for span in self._mapped.open_spans()}
        rings = self._mapped.read_rows(self.places, ROWS_AT_ONCE)
        details, self._details_at = self._mapped.read_details_since(self._details_at)
        self._marks.update(
            span_id for span_id, (_, text) in details.items() if any(name in text for name in _WATCHED)
        )  # fmt: skip
        early = self.rows.unmatched
        ended, written = [], ended_rows
        for ring in rings:
            self.seen += len(ring.rows)
            self.ahead += len(ring.rows)
            written += ring.head
            roots = ring.rows[_are_request_roots(ring.rows)]
            ended += _unpack_rows(roots, {**early, **details} if early else details)
            if self._marks:
                self._collect_watched_rows(ring.rows, {**early, **details} if early else details)
        self.rows.add(rings, opened, details, self._mapped.details_bytes)
        self.places = {ring.ring: ring.head for ring in rings}
        self.missed = max(self.missed, written - self.seen)
        self.has_more = sum(len(ring.rows) for ring in rings) >= ROWS_AT_ONCE
        if not self.has_more:
            settled_ns = self._mapped.settled_ns()
            self.rows.read_ns = max(settled_ns, now_ns - DEVICE_WAIT_NS) if 0 < settled_ns < now_ns else now_ns
        return ended

    def _collect_watched_rows(self, rows: Records, details: Details) -> None:
        marked = rows[np.isin(rows["span_id"], np.fromiter(self._marks, np.uint64, len(self._marks)))]
        self._marks.difference_update(marked["span_id"].tolist())
        if self._watched is not None:
            self._watched += _unpack_rows(marked, details)

    def _adopt_unsettled_rows(self, settled_ns: int) -> None:
        """Add rows that an earlier reader has read but not settled.

        They belong to open requests, to requests that ended after `settled_ns`, or to spans that may serve such
        requests.
        """
        self._mapped.read_tree()
        opened = {span.span_id: span for span in self._mapped.open_spans()}
        roots = [np.array([row for row in opened if row & REQUEST_BIT], np.uint64)]
        for rings in self._read_rows_in_pieces({}):
            for ring in rings:
                unsettled_roots = ring.rows[_are_request_roots(ring.rows) & (ring.rows["end_ns"] > settled_ns)]
                roots.append(unsettled_roots["span_id"])
        undecided = np.concatenate(roots)
        details, _ = self._mapped.read_details_since(0)
        for rings in self._read_rows_in_pieces({}):
            old = [
                ring._replace(rows=ring.rows[: max(self.places.get(ring.ring, 0) - ring.first, 0)]) for ring in rings
            ]
            self.rows.adopt_rows(old, opened, details, undecided, settled_ns)

    def _read_rows_in_pieces(self, places: Mapping[int, int]) -> Iterator[list[RingRows]]:
        until = self._mapped.count_written_rows()
        while any(places.get(ring, 0) < head for ring, head in until.items()):
            rings = self._mapped.read_rows(places, ROWS_AT_ONCE)
            yield rings
            places = {ring.ring: ring.head for ring in rings}
            until = {ring: head for ring, head in until.items() if ring in places}

    # ---------------------------------------------------------------- device times

    def note_interval_count(self) -> None:
        """Store the current number of device intervals, with the time."""
        count = self._mapped.interval_count()
        if not self._interval_counts or self._interval_counts[-1][1] != count:
            self._interval_counts.append((time.monotonic_ns(), count))

    def join_intervals(self, trace: Columns, settled_ns: int) -> Columns:
        """Return the rows with their device intervals.

        Rows that ended by `settled_ns` get all their intervals. Call this for many rows at once, because it reads all
        intervals since the first row began.
        """
        asking = np.flatnonzero(trace.are_of_sites([bool(site.device) for site in trace.sites]))
        if not len(asking):
            return trace
        device = self.find_intervals(trace.span_id, asking, trace.start_ns)
        self.untimed += int(np.count_nonzero(trace.end_ns[np.setdiff1d(asking, device.row)] > settled_ns))
        return replace(trace, device=device) if len(device) else trace

    def find_intervals(self, span_id: Int64s, asking: Int64s, start_ns: Int64s) -> DeviceIntervals:
        """Return the device intervals of some rows. `asking` has the numbers of the rows. `span_id` and `start_ns`
        describe all rows."""
        first_ns = int(start_ns[asking].min())
        since = next((count for at_ns, count in reversed(self._interval_counts) if at_ns <= first_ns), 0)
        cells = self._mapped.read_intervals(since)
        return device_intervals(cells[np.isin(cells["span_id"].astype(np.int64), span_id[asking])], span_id)


def _unpack_rows(rows: Records, details: Details) -> list[Row]:
    unpacked = []
    for row in unpack_rows(rows.tobytes()):
        if (detail := details.get(row[SPAN_ID])) is not None:
            active_ns, error, attributes = parse_detail(detail[0], parse_facts(detail[1]))
            row = (*row[:8], active_ns, error, attributes or None)
        unpacked.append(row)
    return unpacked


def _are_request_roots(rows: Records) -> NDArray[np.bool_]:
    roots = rows["root_id"]
    return np.asarray((roots == rows["span_id"]) & (roots & np.uint64(REQUEST_BIT) != 0))
