"""Traces of spans that were drawn at random: any parents, threads, tasks and times, in any order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from hypothesis import strategies as st

from instrument.recording.spans import UNTIMED, DeviceInterval, Origin, Site, Span
from instrument.recording.tally import Tally
from instrument.trace.call_tree import tally_spans
from instrument.trace.trace import Trace, columns_of_spans

WINDOW = (20, 120)

CallPath = tuple[Site, ...]

SITES = [
    Site("handle", "request"),
    Site("turn", "step"),
    Site("f", "op", device=True),
    Site("f", "layer", instance="a"),
    Site("f", "layer", instance="b"),
    Site("g", "op"),
    Site("all_reduce", "comm"),
    Site("compute", "phase"),
    Site("h2d", "copy"),
    Site("mine", "user"),
    Site("mine", "user", instance="other"),
    Site("yours", "user"),
]

_times = st.integers(0, 140)
_intervals = st.builds(
    lambda device, stream, start, length, label: DeviceInterval(device, stream, start, start + length, label),
    st.integers(0, 1),
    st.integers(7, 8),
    _times,
    st.integers(0, 30),
    st.sampled_from(["exclusive", "exclusive", "stale", "dropped"]),
)


@st.composite
def traces(draw: st.DrawFn, sites: list[Site] | None = None) -> Trace:
    """A trace of the window `WINDOW` with up to 14 spans. Parents come before their children or after."""
    spans: list[Span] = []
    for index in range(draw(st.integers(0, 14))):
        parent_id = draw(st.integers(0, index))
        start, length = draw(_times), draw(st.integers(0, 60))
        spans.append(
            Span(
                site=draw(st.sampled_from(sites or SITES)),
                span_id=index + 1,
                parent_id=parent_id if parent_id != index + 1 else 0,
                root_id=spans[parent_id - 1].root_id if parent_id else index + 1,
                thread_id=draw(st.sampled_from([1, 1, 1, 2])),
                task_id=draw(st.sampled_from([0, 0, 0, 5])),
                start_ns=start,
                end_ns=start + length,
                active_ns=max(length - draw(st.sampled_from([0, 0, 0, 1])), 0),
                self_ns=0,
                device=tuple(draw(st.lists(_intervals, max_size=2))),
            )
        )
    order = draw(st.permutations(spans))
    held_from = draw(st.sampled_from([0, 0, 40]))
    return Trace(Origin(1, "shop", 0, 0), *WINDOW, order, {1: "main"}, held_from_ns=held_from)


def above(span: Span, by_id: dict[int, Span]) -> list[Span]:
    """The spans around a span on its line, the innermost first."""
    found: list[Span] = []
    up = by_id.get(span.parent_id)
    while up is not None and (up.thread_id, up.task_id) == (span.thread_id, span.task_id):
        found.append(up)
        up = by_id.get(up.parent_id)
    return found


def counted(spans: Iterable[Span], threads: Mapping[int, str] | None = None) -> Tally:
    """The tally of spans."""
    return tally_spans(columns_of_spans(list(spans)), threads)


def counted_paths(spans: Iterable[Span]) -> tuple[dict[int, CallPath], set[int]]:
    """Return the path at which each span counts, by id, and the ids of spans whose time an outer call counts.

    A site that is on the path already counts at its first position, at any depth.
    """
    by_id = {span.span_id: span for span in spans}

    def around(span: Span) -> list[Span]:
        up = by_id.get(span.parent_id)
        return [] if up is None else [up, *around(up)]

    def path_of(span: Span) -> CallPath:
        up = by_id.get(span.parent_id)
        path = path_of(up) if up is not None else ()
        return path[: path.index(span.site) + 1] if span.site in path else (*path, span.site)

    paths = {span.span_id: path_of(span) for span in by_id.values()}
    inner = {
        span.span_id
        for span in by_id.values()
        for up in around(span)
        if paths[up.span_id] == paths[span.span_id] and up.thread_id == span.thread_id and up.end_ns >= span.start_ns
    }
    return paths, inner


def points(intervals: Iterable[tuple[int, int]]) -> set[int]:
    """The nanoseconds that intervals cover."""
    return {at for start, end in intervals for at in range(start, end)}


def timed(span: Span, window: tuple[int, int] | None = None) -> list[tuple[int, int]]:
    """The timed device intervals of a span, as they lie in the window."""
    first, last = window or (-1000, 1000)
    return [
        (max(one.start_ns, first), min(one.end_ns, last))
        for one in span.device
        if one.label not in UNTIMED and lies_in(one, (first, last))
    ]


def lies_in(one: Span | DeviceInterval, window: tuple[int, int]) -> bool:
    """Return True if a part overlaps the window, or if a part without length is in the window or on its edge."""
    first, last = window
    inside = first <= one.start_ns and one.end_ns <= last
    return inside or (one.end_ns > first and one.start_ns < last)


def changed(trace: Trace) -> Trace:
    """The trace with columns of its spans as a test has changed them."""
    return replace(trace, spans=[*trace.spans])
