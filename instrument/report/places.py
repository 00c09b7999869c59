"""Where something happened: the innermost span that was open on the same thread at the time.

Time alone would not do: another thread's spans are open at the same time. Nor do a thread and a time where several
tasks of an event loop take turns on it, so that nobody can tell which was at work; and a generator's span is passed
over, because its consumer may have been at work instead.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from math import inf

from instrument import native
from instrument.recording.spans import Site, Span, Trace

_native = native.find("_places")

SHARED = "(several tasks were open)"
"""The place of what happened while several tasks had spans open on the thread."""

NOWHERE = "(no span was open)"
"""The place of what happened on a thread without an open span."""

UNKNOWN = "(not known)"
"""The place of what cannot be told from the file: no call of the host is known."""

NO_SPAN = -1
"""What stands for the number of a span where none was open."""

SEVERAL = -2
"""What stands for it where several tasks had some."""

NAMES = {NO_SPAN: NOWHERE, SEVERAL: SHARED}
"""How the places are called where no number of a span stands."""


def places(trace: Trace, thread_ids: Sequence[int], times_ns: Sequence[int]) -> list[Span | str]:
    """The place of what happened on each thread at each time, in any order, as `innermost` finds it."""
    spans = trace.spans
    return [NAMES[number] if number < 0 else spans[number] for number in innermost(trace, thread_ids, times_ns)]


def innermost(trace: Trace, thread_ids: Sequence[int], times_ns: Sequence[int], base_ns: int = 0) -> array[int]:
    """Of each thread and time the number of the innermost span that was open, or what stands for it.

    Times are counted from `base_ns`. Spans are half-open: what happens at a span's end is not in it. Of another
    profiler's trace the calls that ask a device for work are no places. Takes some 0.1 us for each span and time in C.
    """
    launches = trace.origin.recorder == "other"
    found = None
    if _native is not None:
        with suppress(OverflowError):
            found = _native.innermost(trace.spans, array("q", thread_ids), array("q", times_ns), base_ns, launches)
    if found is not None:
        return array("i", found)
    return _innermost(trace.spans, thread_ids, [base_ns + at_ns for at_ns in times_ns], launches)


def _innermost(spans: Sequence[Span], thread_ids: Sequence[int], times_ns: Sequence[int], launches: bool) -> array[int]:
    points: dict[int, list[int]] = {}
    for at, thread_id in enumerate(thread_ids):
        points.setdefault(thread_id, []).append(at)
    numbers: dict[int, list[int]] = {thread_id: [] for thread_id in points}
    for number, span in enumerate(spans):
        if span.thread_id in numbers and not (launches and "correlation" in span.attributes):
            numbers[span.thread_id].append(number)
    found = array("i", [NO_SPAN]) * len(times_ns)
    for thread_id, its in points.items():
        its.sort(key=times_ns.__getitem__)
        of_thread = numbers[thread_id]
        of_thread.sort(key=lambda number: (spans[number].start_ns, -spans[number].end_ns, spans[number].span_id))
        for at, number in zip(its, _sweep(spans, of_thread, [times_ns[at] for at in its]), strict=True):
            found[at] = number
    return found


def _sweep(spans: Sequence[Span], numbers: Iterable[int], times_ns: Iterable[int]) -> Iterator[int]:
    """The innermost of some spans, by their begin, at each time, earliest first."""
    opened: list[int] = []
    place = NO_SPAN
    coming = iter(numbers)
    number = next(coming, None)
    # Until the first of these times the place stays what it is.
    nearest_end_ns = inf
    next_start_ns: float = spans[number].start_ns if number is not None else inf
    for at_ns in times_ns:
        if at_ns >= nearest_end_ns or at_ns >= next_start_ns:
            opened = [one for one in opened if spans[one].end_ns > at_ns]
            while number is not None and spans[number].start_ns <= at_ns:
                span = spans[number]
                if span.end_ns > at_ns and span.active_ns >= span.total_ns:
                    opened.append(number)
                number = next(coming, None)
            next_start_ns = spans[number].start_ns if number is not None else inf
            nearest_end_ns = min([spans[one].end_ns for one in opened], default=inf)
            place = _last(spans, opened) if opened else NO_SPAN
        yield place


def _last(spans: Sequence[Span], opened: Sequence[int]) -> int:
    """The last of the spans that are open, unless those of other tasks are not all around it."""
    last = spans[opened[-1]]
    open_spans = [spans[one] for one in opened]
    if all(span.task_id == last.task_id for span in open_spans):
        return opened[-1]
    above = {span.span_id: span for span in open_spans}
    around = {last.span_id}
    span: Span | None = above.get(last.parent_id)
    while span is not None and span.span_id not in around:
        around.add(span.span_id)
        span = above.get(span.parent_id)
    is_one = all(span.span_id in around or span.task_id == last.task_id for span in open_spans)
    return opened[-1] if is_one else SEVERAL


def name_of(place: Span | str) -> str:
    """How a table calls a place."""
    return place if isinstance(place, str) else name_of_site(place.site)


def name_of_site(site: Site) -> str:
    """The layer with its path, else the name."""
    return f"{site.name} ({site.instance})" if site.instance else site.name
