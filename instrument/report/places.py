"""Where something happened: the innermost span that was open on the same thread at the time.

Time alone would not do: another thread's spans are open at the same time. Nor do a thread and a time where several
tasks of an event loop take turns on it, so that nobody can tell which was at work; and a generator's span is passed
over, because its consumer may have been at work instead.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import inf
from operator import gt

from instrument.spans import Site, Span, Trace, by_start

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
    and points, and 16 bytes a point.
    """
    wanted: dict[int, tuple[list[int], array[int]]] = {}
    for thread_id, at_ns, number in points:
        if thread_id not in wanted:
            wanted[thread_id] = [], array("q")
        times, numbers = wanted[thread_id]
        times.append(at_ns)
        numbers.append(number)
    found: dict[int, list[Span]] = {thread_id: [] for thread_id in wanted}
    launches = trace.origin.recorder == "other"
    for span in trace.spans if wanted else ():
        of_thread = found.get(span.thread_id)
        if of_thread is not None and not (launches and "correlation" in span.attributes):
            of_thread.append(span)
    for thread_id, (times, numbers) in wanted.items():
        of_thread = found[thread_id]
        by_start(of_thread)
        if any(map(gt, times, islice(times, 1, None))):
            order = sorted(range(len(times)), key=times.__getitem__)
            times, numbers = [times[at] for at in order], array("q", [numbers[at] for at in order])
        yield from _of_thread(of_thread, times, numbers)


def _of_thread(spans: Sequence[Span], times: Iterable[int], numbers: Iterable[int]) -> Iterator[tuple[int, Span | str]]:
    opened: list[Span] = []
    place: Span | str = NOWHERE
    coming = iter(spans)
    span = next(coming, None)
    # Until the first of these times the place stays what it is.
    nearest_end_ns = inf
    next_start_ns: float = span.start_ns if span is not None else inf
    for at_ns, number in zip(times, numbers, strict=True):
        if at_ns >= nearest_end_ns or at_ns >= next_start_ns:
            opened = [one for one in opened if one.end_ns > at_ns]
            while span is not None and span.start_ns <= at_ns:
                if span.end_ns > at_ns and span.active_ns >= span.total_ns:
                    opened.append(span)
                span = next(coming, None)
            next_start_ns = span.start_ns if span is not None else inf
            nearest_end_ns = min([one.end_ns for one in opened], default=inf)
            place = _innermost(opened) if opened else NOWHERE
        yield number, place


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
