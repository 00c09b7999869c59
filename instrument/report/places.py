"""Where something happened: the innermost span that was open on the same thread at the time.

Time alone would not do: another thread's spans are open at the same time. Nor do a thread and a time where several
tasks of an event loop take turns on it, so that nobody can tell which was at work; and a generator's span is passed
over, because its consumer may have been at work instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from instrument.spans import Site, Span, Trace

SHARED = "(several tasks were open)"
"""The place of what happened while several tasks had spans open on the thread."""

NOWHERE = "(no span was open)"
"""The place of what happened on a thread without an open span."""

UNKNOWN = "(not known)"
"""The place of what cannot be told from the file: no call of the host is known."""

Point = tuple[int, int, int]
"""Thread, time, and the number of what happened."""


def places(trace: Trace, points: Iterable[Point]) -> Iterator[tuple[int, Span | str]]:
    """Number and place of each point, in any order. Spans are half-open: what happens at a span's end is not in it.

    Of another profiler's trace the calls that ask a device for work are no places. Takes time in proportion to spans
    and points.
    """
    wanted: dict[int, list[tuple[int, int]]] = {}
    for thread_id, at_ns, number in points:
        wanted.setdefault(thread_id, []).append((at_ns, number))
    found: dict[int, list[Span]] = {thread_id: [] for thread_id in wanted}
    launches = trace.origin.recorder == "other"
    for span in trace.spans if wanted else ():
        of_thread = found.get(span.thread_id)
        if of_thread is not None and not (launches and "correlation" in span.attributes):
            of_thread.append(span)
    for thread_id, at in wanted.items():
        of_thread = found[thread_id]
        of_thread.sort(key=lambda span: (span.start_ns, -span.end_ns, span.span_id))
        at.sort()
        yield from _of_thread(of_thread, at)


def _of_thread(spans: Sequence[Span], at: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Span | str]]:
    opened: list[Span] = []
    nearest_end_ns = next_span = 0
    for at_ns, number in at:
        if opened and nearest_end_ns <= at_ns:
            opened = [span for span in opened if span.end_ns > at_ns]
        while next_span < len(spans) and spans[next_span].start_ns <= at_ns:
            span = spans[next_span]
            next_span += 1
            if span.end_ns > at_ns and span.active_ns >= span.total_ns:
                opened.append(span)
        if not opened:
            yield number, NOWHERE
            continue
        nearest_end_ns = min([span.end_ns for span in opened])
        yield number, _innermost(opened)


def _innermost(opened: Sequence[Span]) -> Span | str:
    last = opened[-1]
    if all(span.task_id == last.task_id for span in opened):
        return last
    # Spans of other tasks must be those around it, or nobody knows whose turn it was.
    above = {span.span_id: span for span in opened}
    around = {last.span_id}
    span: Span | None = above.get(last.parent_id)
    while span is not None and span.span_id not in around:
        around.add(span.span_id)
        span = above.get(span.parent_id)
    if all(span.span_id in around or span.task_id == last.task_id for span in opened):
        return last
    return SHARED


def name_of(place: Span | str) -> str:
    """How a table calls a place."""
    return place if isinstance(place, str) else name_of_site(place.site)


def name_of_site(site: Site) -> str:
    """The layer with its path, else the name."""
    return f"{site.name} ({site.instance})" if site.instance else site.name
