"""The innermost span that was open on a thread at a time: what brute force finds, in C and in Python."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_report_kernels import span, trace_of

from instrument.recording.spans import Origin, Site, Span, Trace
from instrument.report import places
from instrument.report.places import NO_SPAN, SEVERAL, innermost, name_of

native = pytest.mark.skipif(places._native is None, reason="places in C are not in use")

NEAR, FAR = st.integers(-3, 65), st.sampled_from([-(1 << 63), (1 << 63) - 1, 1 << 62, -(1 << 62), 512, 1 << 40])
SITES = [Site("f"), Site("f"), Site("g", "op"), Site("Linear", "layer", instance="up")]


@st.composite
def any_spans(draw: st.DrawFn) -> list[Span]:
    """Spans in any order that cross, have parents and tasks of any kind, ids that come twice, and generators' gaps."""
    found: list[Span] = []
    in_a_row = draw(st.booleans())
    for number in range(1, 1 + draw(st.integers(0, 14))):
        start, length = draw(NEAR), draw(st.integers(0, 40))
        task, thread, more = draw(st.integers(0, 2)), draw(st.integers(0, 2)), draw(st.booleans())
        span_id, parent = number if in_a_row else draw(st.integers(1, 9)), draw(st.integers(0, 9))
        found.append(
            span("", span_id, start, start + length, parent=parent, thread=thread, task=task,
                 site=draw(st.sampled_from(SITES)), active_ns=length - draw(st.sampled_from([0, 0, 0, 1])),
                 attributes={"correlation": 5} if more and thread else {})
        )  # fmt: skip
    return found


any_points = st.lists(st.tuples(st.integers(0, 3), st.one_of(NEAR, NEAR, NEAR, FAR)), max_size=60)


def trace_with(spans: list[Span], recorder: str = "native") -> Trace:
    return Trace(Origin(1, "shop", 0, 0, recorder), 0, 60, spans)


def both(trace: Trace, points: list[tuple[int, int]], base_ns: int = 0) -> tuple[list[int], list[int]]:
    """What C finds, and what Python does."""
    threads, times = [thread_id for thread_id, _ in points], [at_ns for _, at_ns in points]
    ours = innermost(trace, threads, times, base_ns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "_native", None)
        return list(ours), list(innermost(trace, threads, times, base_ns))


def by_force(trace: Trace, thread_id: int, at_ns: int) -> int:
    """The same of one point by a look at all spans: of those with ids of their own."""
    opened = [
        (one.start_ns, -one.end_ns, one.span_id, number)
        for number, one in enumerate(trace.spans)
        if one.thread_id == thread_id and one.start_ns <= at_ns < one.end_ns and one.active_ns >= one.total_ns
        if trace.origin.recorder != "other" or "correlation" not in one.attributes
    ]
    if not opened:
        return NO_SPAN
    number = max(opened)[-1]
    last = trace.spans[number]
    around: list[int] = []
    known = {trace.spans[one].span_id: trace.spans[one] for *_, one in opened}
    up: Span | None = last
    while up is not None and up.span_id not in around:
        around.append(up.span_id)
        up = known.get(up.parent_id)
    others = {span_id for span_id, one in known.items() if one.task_id != last.task_id}
    return number if others <= set(around) else SEVERAL


@given(any_spans(), any_points, st.sampled_from(["native", "other"]), st.sampled_from([0, 5, 1 << 62, -(1 << 63)]))
def test_both_find_the_same_whatever_there_is(
    spans: list[Span], points: list[tuple[int, int]], recorder: str, base_ns: int
) -> None:
    """Times that with their base go beyond 64 bits are left to Python."""
    trace = trace_with(spans, recorder)
    ours, theirs = both(trace, [(thread_id, at_ns - base_ns) for thread_id, at_ns in points], base_ns)
    assert ours == theirs
    if len({one.span_id for one in spans}) == len(spans):
        assert ours == [by_force(trace, *point) for point in points]


def spans_of_tasks(chance: random.Random) -> list[Span]:
    """Of forty tasks that take turns on five threads, over 13,500 ns."""
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


def test_both_find_the_same_of_many_tasks_that_take_turns_on_threads() -> None:
    chance = random.Random(7)
    trace = trace_of(*spans_of_tasks(chance))
    points = [(chance.randrange(6), chance.randrange(14_000)) for _ in range(2000)]
    ours, theirs = both(trace, points)
    assert ours == theirs == [by_force(trace, *point) for point in points]
    assert {NO_SPAN, SEVERAL} < set(ours)


@native
def test_c_takes_what_fits_and_leaves_the_rest() -> None:
    spans = [span("f", 1, 0, 9), span("g", 2, 3, 5, parent=1)]
    found = places._native.innermost(spans, *(array("q", its) for its in ([4321] * 3, [1, 4, 9])), 0, False)
    assert array("i", found).tolist() == [0, 1, NO_SPAN]
    assert places._native.innermost([object()], b"", b"", 0, False) is None
    assert places._native.innermost(spans, bytes(8), array("q", [1 << 62]), 1 << 62, False) is None
    with pytest.raises(ValueError, match="as many threads as times"):
        places._native.innermost(spans, bytes(8), b"", 0, False)


def test_what_happened_in_no_span_or_in_several_has_a_name_of_its_own() -> None:
    trace = trace_of(span("f", 1, 0, 9, task=1), span("g", 2, 3, 5, task=2), span("Linear", 3, 10, 12, site=SITES[-1]))
    found = places.places(trace, [4321] * 5 + [7], [1, 4, 6, 9, 11, 1])
    assert [name_of(place) for place in found] == [
        "f", "(several tasks were open)", "f", "(no span was open)", "Linear (up)", "(no span was open)",
    ]  # fmt: skip


def test_threads_and_times_beyond_64_bits_are_left_to_python() -> None:
    trace = trace_of(span("f", 1, 0, 9))
    assert list(innermost(trace, [4321, 1 << 70], [3, 1 << 70])) == [0, NO_SPAN]
