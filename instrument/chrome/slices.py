"""The slices and arrows of a trace as text, in the order in which they stand in a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from instrument.chrome.arrows import Arrows
from instrument.chrome.batch_marks import BatchMarks
from instrument.chrome.interval_events import IntervalEvents
from instrument.chrome.lanes import Board, Row
from instrument.chrome.ordered import OrderedIntervals, Spans, batches
from instrument.chrome.span_events import SpanEvents
from instrument.recording.spans import Site
from instrument.trace.columns import Trace
from instrument.trace.metadata import SiteText


class Slices:
    """The slices of spans and their device intervals, and the arrows between them.

    `sites` are theirs, by first sight, `base_ns` the time from which the file counts: `since_ns`, or the first event
    where that is earlier. `left_out` counts the arrows that are not drawn. `pid` is the process of the spans.
    """

    def __init__(self, trace: Trace, since_ns: int, pid: int) -> None:
        starts = (trace.start_ns, trace.device.start_ns)
        self.base_ns = min(int(its.min(initial=since_ns)) for its in starts)
        self._spans = Spans.of(trace, self.base_ns)
        self._intervals = OrderedIntervals.of(self._spans, self.base_ns)
        self._marks = BatchMarks(self._spans)
        self._arrows = Arrows(self._spans, self._intervals, self._marks)
        self._board = Board(pid)
        self.sites: Sequence[Site] = self._spans.sites
        self.left_out = self._arrows.left_out

    def texts(self, of_sites: Sequence[SiteText]) -> Iterator[str]:
        """The text of some thousand events at a time, each behind a comma; `of_sites` is by the order of `sites`."""
        arrows = self._arrows
        spans = SpanEvents(self._spans, self._board, arrows.binds, of_sites)
        for first, end in batches(len(self._spans.row)):
            yield spans.text(first, end)
        intervals = IntervalEvents(self._spans, self._intervals, self._board, of_sites)
        for first, end in batches(len(self._intervals.row)):
            yield intervals.text(first, end, arrows.ties)
        yield from arrows.texts(spans, intervals)
        yield from self._marks.texts(spans, of_sites, arrows.marked)

    def rows(self) -> list[Row]:
        """The lanes of threads and streams, once all is written."""
        return self._board.rows()
