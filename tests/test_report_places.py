"""The innermost span that was open on a thread at a time: what a look at all spans finds."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from test_report_kernels import span, trace_of

from instrument.recording.spans import Origin, Site, Span
from instrument.report.kernels_view import find_open_spans, find_places_of_events
from instrument.report.view import Recording
from instrument.trace.indices import NONE
from instrument.trace.self_times import SEVERAL
from instrument.trace.trace import Trace

NEAR, FAR = st.integers(-3, 65), st.sampled_from([-(1 << 63), (1 << 63) - 1, 1 << 62, -(1 << 62), 512, 1 << 40])
SITES = [Site("f"), Site("f"), Site("g", "op"), Site("Linear", "layer", instance="up")]


@st.composite
def any_spans(draw: st.DrawFn) -> list[Span]:
    """Spans in any order that cross, have parents and tasks of any kind, and generators' gaps."""
    count = draw(st.integers(0, 14))
    ids = draw(st.permutations(range(1, count + 1)))
    found: list[Span] = []
    for number in range(count):
        start, length = draw(NEAR), draw(st.integers(0, 40))
        task, thread, more = draw(st.integers(0, 2)), draw(st.integers(0, 2)), draw(st.booleans())
        parent = draw(st.sampled_from([0, 99, *ids[:number]]))  # 99 was not kept
        found.append(
            span("", ids[number], start, start + length, parent=parent, thread=thread, task=task,
                 site=draw(st.sampled_from(SITES)), active_ns=length - draw(st.sampled_from([0, 0, 0, 1])),
                 attributes={"correlation": 5} if more and thread else {})
        )  # fmt: skip
    return draw(st.permutations(found))


any_points = st.lists(st.tuples(st.integers(0, 3), st.one_of(NEAR, NEAR, NEAR, FAR)), max_size=60)


def found_in(trace: Trace, points: list[tuple[int, int]]) -> list[int]:
    threads, times = (np.array([point[at] for point in points], dtype=np.int64) for at in (0, 1))
    rows: list[int] = find_open_spans(Recording.from_trace(trace), threads, times).tolist()
    return rows


def by_force(trace: Trace, thread_id: int, at_ns: int) -> int:
    """The same of one point by a look at all spans."""
    opened = [
        (one.start_ns, -one.end_ns, one.span_id, number)
        for number, one in enumerate(trace.spans)
        if one.thread_id == thread_id and one.start_ns <= at_ns < one.end_ns and one.active_ns >= one.total_ns
        if trace.origin.recorder != "other" or "correlation" not in one.attributes
    ]
    if not opened:
        return NONE
    number = max(opened)[-1]
    last = trace.spans[number]
    around: list[int] = []
    known = {trace.spans[one].span_id: trace.spans[one] for *_, one in opened}
    up: Span | None = last
    while up is not None:
        around.append(up.span_id)
        up = known.get(up.parent_id)
    others = {span_id for span_id, one in known.items() if one.task_id != last.task_id}
    return number if others <= set(around) else SEVERAL


@given(any_spans(), any_points, st.sampled_from(["native", "other"]))
def test_it_is_the_one_that_a_look_at_all_spans_finds(
    spans: list[Span], points: list[tuple[int, int]], recorder: str
) -> None:
    trace = Trace(Origin(1, "shop", 0, 0, recorder), 0, 60, spans)
    assert found_in(trace, points) == [by_force(trace, *point) for point in points]


def spans_of_tasks(chance: random.Random) -> list[Span]:
    """Return spans of forty tasks that take turns on five threads, over 13,500 ns."""
    spans: list[Span] = []
    for number in range(1, 1500):
        above = chance.choice(spans[-9:]) if spans and chance.random() < 0.7 else None
        task = chance.randrange(40) if above is None or chance.random() < 0.2 else above.task_id
        start = 9 * number if above is None else above.start_ns + chance.randrange(9)
        thread = chance.randrange(5) if above is None else above.thread_id
        spans.append(
            span("", number, start, start + chance.randrange(60), task=task, thread=thread,
                 parent=above.span_id if above else 0, site=chance.choice(SITES))
        )  # fmt: skip
    return spans


def test_nesting_is_known_for_many_tasks_that_take_turns_on_threads() -> None:
    chance = random.Random(7)
    trace = trace_of(*spans_of_tasks(chance))
    points = [(chance.randrange(6), chance.randrange(14_000)) for _ in range(2000)]
    found = found_in(trace, points)
    assert found == [by_force(trace, *point) for point in points]
    assert {NONE, SEVERAL} < set(found)


def test_spans_of_two_tasks_that_lie_twenty_thousand_deep_are_reported_in_time() -> None:
    depth = 20_000
    spans = [
        span("f", at + 1, at, 3 * depth - at, parent=at, root=1, task=at // (depth // 2), thread=7)
        for at in range(depth)
    ]
    points = [(7, at) for at in range(3 * depth + 2)]
    found = found_in(trace_of(*spans), points)
    ends = [min(at, 3 * depth - at - 1, depth - 1) for _, at in points]
    assert found == [max(end, NONE) for end in ends]


def test_events_in_no_span_or_in_several_have_names_of_their_own() -> None:
    trace = trace_of(span("f", 1, 0, 9, task=1), span("g", 2, 3, 5, task=2), span("Linear", 3, 10, 12, site=SITES[-1]))
    threads, times = np.array([4321] * 5 + [7]), np.array([1, 4, 6, 9, 11, 1])
    found = find_places_of_events(Recording.from_trace(trace), threads, times)
    assert [found.names[number][0] for number in found.number] == [
        "f", "(several tasks were open)", "f", "(no span was open)", "Linear (up)", "(no span was open)",
    ]  # fmt: skip
