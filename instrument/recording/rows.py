"""Rows that were taken from the rings, and the spans that they stand for."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from instrument import native
from instrument.recording.paths import CallTree
from instrument.recording.ring import Row, self_ns
from instrument.recording.spans import REMOTE, Interval, RemoteParent, Site, Span, covered_ns, remote_of

_native = native.find("_spans")

STREAM = object()
"""The key under which a span's attributes hold what its device time is taken on, where that is known: the handle of a
stream, or `Work`. It is nothing that a reader sees."""


class Taken(NamedTuple):
    """Rows as they were at one moment: the finished ones by thread id, in the order of ends, and the open ones.

    `tree` has their call paths, also when the recorder has been reset since.
    """

    rings: list[tuple[int, list[Row]]]
    open_rows: list[tuple[int, Row]]
    tree: CallTree

    def oldest_ns(self, start_ns: int, end_ns: int) -> dict[int, int]:
        """The first end on each thread of a span that lies in or reaches into the window, at most the window's end."""
        found: dict[int, int] = {}
        for thread_id, rows in self.rings:  # each in the order of ends
            first_ns = next((row[6] for row in rows if row[6] > start_ns and row[5] < end_ns), None)
            if first_ns is not None:
                found[thread_id] = min(first_ns, end_ns, found.get(thread_id, end_ns))
        for thread_id, row in self.open_rows:
            if row[5] < end_ns:
                found.setdefault(thread_id, end_ns)
        return found

    @property
    def size(self) -> int:
        """How many rows there are."""
        return sum(len(rows) for _, rows in self.rings) + len(self.open_rows)

    def spans(self, sites: Sequence[Site], start_ns: int, end_ns: int) -> list[Span]:
        """The spans that lie in or reach into the window, clipped to it; open ones end with it. Unordered.

        `sites` has that of each call path, by its number.
        """
        found: list[Span] = []
        for thread_id, rows in self.rings:
            found += _spans_within(rows, thread_id, sites, start_ns, end_ns)
        # One that has ended since is there already.
        still_open = {row[1]: (row, thread_id) for thread_id, row in self.open_rows if row[5] < end_ns}
        for span in found if still_open else ():
            still_open.pop(span.span_id, None)
        for row, thread_id in still_open.values():
            span = span_of(row, sites[row[0]], thread_id)
            span.end_ns = end_ns
            _clip(span, start_ns, end_ns)
            found.append(span)
        _less_children(found)
        return found


class Held(NamedTuple):
    """Spans that are held: how many, the first end on each thread, and the ids of those that ask for device time."""

    spans: int
    oldest_ns: dict[int, int]
    asking: array[int]


def span_of(row: Row, site: Site, thread_id: int) -> Span:
    """The span that a row of a site and a thread stands for."""
    total_ns = row[6] - row[5]
    attributes = row[10]
    remote: RemoteParent | None = None
    if attributes and (REMOTE in attributes or STREAM in attributes):
        attributes = dict(attributes)
        remote = remote_of(attributes.pop(REMOTE, None))
        attributes.pop(STREAM, None)
    return Span(
        site=site,
        span_id=row[1],
        parent_id=row[2],
        root_id=row[3],
        thread_id=thread_id,
        task_id=row[4],
        start_ns=row[5],
        end_ns=row[6],
        active_ns=row[8] if row[8] >= 0 else total_ns,
        self_ns=self_ns(row),
        error=row[9],
        attributes=attributes or {},
        remote=remote,
    )


def _spans_within(rows: list[Row], thread_id: int, sites: Sequence[Site], start_ns: int, end_ns: int) -> list[Span]:
    if _native is not None:
        spans: list[Span] = _native.of_rows(rows, thread_id, sites, start_ns, end_ns, REMOTE, STREAM)
        for span in spans:
            if span.remote is not None:
                span.remote = remote_of(span.remote)
        return spans
    found = []
    for row in rows:
        if row[6] > start_ns and row[5] < end_ns:
            span = span_of(row, sites[row[0]], thread_id)
            if row[5] < start_ns or row[6] > end_ns:
                _clip(span, start_ns, end_ns)
            found.append(span)
    return found


def _clip(span: Span, start_ns: int, end_ns: int) -> None:
    """Cut a span to the window and mark it; what it was active and by itself can be no more than what remains."""
    span.start_ns = max(span.start_ns, start_ns)
    span.end_ns = max(min(span.end_ns, end_ns), span.start_ns)
    span.active_ns = min(span.active_ns, span.total_ns)
    span.self_ns = min(span.self_ns, span.total_ns)
    span.clipped = True


def _less_children(spans: Sequence[Span]) -> None:
    """Take from what clipped spans were by themselves what their children were within the window.

    What they were by themselves as a whole, which is all that their rows tell, may have lain outside of it.
    """
    clipped = {span.span_id: span for span in spans if span.clipped}
    if not clipped:
        return
    inside: dict[int, list[Interval]] = {span_id: [] for span_id in clipped}
    for span in spans:
        parent = clipped.get(span.parent_id)
        if parent is not None and (parent.thread_id, parent.task_id) == (span.thread_id, span.task_id):
            inside[span.parent_id].append((span.start_ns, span.end_ns))
    for span_id, parts in inside.items():
        span = clipped[span_id]
        span.self_ns = min(span.self_ns, span.total_ns - covered_ns(parts))
