"""Intervals as lists and self times in a loop, for tests that say what is expected of a few."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from instrument.recording.spans import Interval, Span, covered_ns


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Intervals that overlap or touch as one; sorted and disjoint. An empty one that touches nothing stays."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(disjoint: Iterable[Interval]) -> int:
    """Return the length of disjoint intervals together."""
    return sum(end - start for start, end in disjoint)


def assign_self_times(spans: Sequence[Span]) -> None:
    """Set every span's self time: total less the union of the children on its thread and task, clipped to it."""
    by_id = {span.span_id: span for span in spans}
    children: dict[int, list[Interval]] = {}
    for span in spans:
        parent = by_id.get(span.parent_id)
        if parent is not None and (parent.thread_id, parent.task_id) == (span.thread_id, span.task_id):
            children.setdefault(parent.span_id, []).append((span.start_ns, span.end_ns))
    for span in spans:
        inside = children.get(span.span_id, ())
        clipped = [(max(start, span.start_ns), min(end, span.end_ns)) for start, end in inside]
        span.self_ns = span.total_ns - covered_ns(clipped)


def elapsed_ns(span: Span) -> int:
    """Return the length of the union of a span's host interval and device intervals."""
    return covered_ns([(span.start_ns, span.end_ns), *((work.start_ns, work.end_ns) for work in span.device)])
