"""Spans as indented text, the form in which tests state what they expect."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from readback import spans_in

from instrument.recorder.recorder import Recorder
from instrument.recording.spans import Span
from instrument.trace.columns import Columns
from instrument.trace.joined import Joined
from instrument.trace.stages import find_stages


def _name(span: Span) -> str:
    return span.site.name + (f" !{span.error}" if span.error else "")


def tree(recorder: Recorder, text: Callable[[Span], str] = _name) -> str:
    """Every span of the recorder under its parent, two spaces a level, in the order in which they began."""
    return tree_of(spans_in(recorder), text)


def tree_of(spans: Iterable[Span], text: Callable[[Span], str] = _name) -> str:
    ordered = sorted(spans, key=lambda span: span.span_id)
    known = {span.span_id for span in ordered}
    children: dict[int, list[Span]] = {}
    for span in ordered:
        children.setdefault(span.parent_id if span.parent_id in known else 0, []).append(span)
    lines: list[str] = []

    def add(parent_id: int, depth: int) -> None:
        for span in children.get(parent_id, ()):
            lines.append("  " * depth + text(span))
            add(span.span_id, depth + 1)

    add(0, 0)
    return "\n".join(lines)


def outline(text: str) -> str:
    """An indented block of a test body, without the indent of the body."""
    lines = [line for line in text.splitlines() if line.strip()]
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    return "\n".join(line[margin:].rstrip() for line in lines)


def queue_times(trace: Columns, joined: Joined) -> dict[int, int]:
    """Return the time of each request in the queue, by its place: 0 for a served request that did not wait."""
    queues = ((one.place, one.queue or (0, 0)) for one in find_stages(trace, joined))
    return {place: end_ns - start_ns for place, (start_ns, end_ns) in queues}
