"""The call tree says the same in C as in Python, of any spans; the numbers themselves are tested by its views."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_spans import traces

from instrument.recording.spans import DeviceInterval, Interval, PureDeviceInterval, Site, Span, Trace
from instrument.report import calls
from instrument.report.calls import NEVER, Place, call_tree, device_ns, every_place, lines
from instrument.report.operators_view import OPERATORS
from instrument.report.stretches import UNTIMED

native = pytest.mark.skipif(calls._native is None, reason="the call tree in C is not in use")
OUTER, INNER = Site("outer", "op"), Site("inner", "layer")


def facts(place: Place) -> dict[str, Any]:
    """All that is known of a place, and of those below it in no order."""
    known = {name: getattr(place, name) for name in Place.__slots__ if name not in ("children", "elsewhere", "parent")}
    return {
        **known,
        "children": {id(site): facts(child) for site, child in place.children.items()},
        "elsewhere": {(id(site), thread): facts(child) for (site, thread), child in place.elsewhere.items()},
        "parents": all(child.parent in (None, place) for child in place.children.values()),
    }


def both(spans: list[Span], window: Interval | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    known = {key: fact for key, fact in facts(call_tree(spans, OPERATORS, window)).items() if key != "site"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "_native", None)
        return known, {key: fact for key, fact in facts(call_tree(spans, OPERATORS, window)).items() if key != "site"}


@native
@given(traces(), st.booleans())
def test_both_make_the_same_tree_of_a_trace(trace: Trace, is_bounded: bool) -> None:
    ours, theirs = both(trace.spans, trace.held if is_bounded else None)
    assert ours == theirs


@st.composite
def damaged(draw: st.DrawFn) -> list[Span]:
    """Parents that are missing, come later, are of another line or run in a circle, and ids that come twice."""
    spans, has_tasks = [], draw(st.booleans())
    one = st.tuples(*[st.integers(0, 7)] * 2, *[st.integers(1, 2)] * 2, st.booleans())
    for place, (span_id, parent_id, thread_id, task_id, is_inner) in enumerate(draw(st.lists(one, max_size=9))):
        span = Span(
            INNER if is_inner else OUTER, span_id, parent_id, 1, thread_id, task_id * has_tasks, place, 20, 0, 0
        )
        span.device = (DeviceInterval(0, thread_id, 2 * place, 3 * place),) * is_inner
        spans.append(span)
    return spans


@native
@given(damaged())
def test_both_make_the_same_tree_whatever_the_parents_are(spans: list[Span]) -> None:
    ours, theirs = both(spans)
    assert ours == theirs


@given(st.one_of(damaged(), traces().map(lambda trace: trace.spans)), st.data())
def test_what_is_around_and_what_devices_did_below_is_what_brute_force_finds(
    spans: list[Span], data: st.DataObject
) -> None:
    some = data.draw(st.lists(st.sampled_from(spans), max_size=5)) if spans else []
    (nodes, arounds), worked_ns = lines(spans, some), device_ns(spans, some)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "_native", None)
        theirs, their_arounds = lines(spans, some)
        assert ([*map(id, theirs)], [*their_arounds]) == ([*map(id, nodes)], [*arounds])
        assert device_ns(spans, some) == worked_ns
    assert len({*map(id, nodes)}) == len(nodes)
    assert {*map(id, some)} <= {*map(id, nodes)}
    assert all(around < number for number, around in enumerate(arounds))
    if len({span.span_id for span in spans}) < len(spans):
        return

    def line_of(span: Span) -> list[int]:
        """The ids of those around a span on its line."""
        found: list[int] = []
        while True:
            up = [one for one in spans if one.span_id == span.parent_id and one.span_id not in found]
            if not up or (up[0].thread_id, up[0].task_id) != (span.thread_id, span.task_id):
                return found
            span = up[0]
            found.append(span.span_id)

    for span, around in zip(nodes, arounds, strict=True):
        first = [] if around < 0 else [nodes[around].span_id]
        # Where the line runs in a circle, one of it is in no other.
        assert first == line_of(span)[:1] or (not first and span.span_id in line_of(span))
    for span in some:
        instants = {
            at
            for one in spans
            if span.span_id in (one.span_id, *line_of(one))
            for part in one.device
            if part.label not in UNTIMED
            for at in range(part.start_ns, part.end_ns)
        }
        assert worked_ns.get(span.span_id, 0) == len(instants)


@native
@pytest.mark.parametrize("seed", range(12))
def test_both_find_the_same_where_much_lies_below(seed: int) -> None:
    """Lists of stretches go up whole, behind others, between them and over them, few and many at a time."""
    chance = random.Random(seed)
    spans: list[Span] = []
    near = chance.choice([40, 3_000, 200_000])
    for number in range(1, 700):
        parent_id = max(number - chance.choice([1, 1, 3, 40, 200]), 0)
        device = tuple(
            DeviceInterval(0, chance.randrange(2), at, at + chance.choice([0, 1, 5, 900]))
            for at in (chance.randrange(near) for _ in range(chance.choice([0, 0, 1, 2, 60])))
        )
        kind = chance.choice([OUTER, OUTER, INNER, Site("mine", "user")])
        spans.append(Span(kind, number, parent_id, 1, 7, 0, number, 10**6, 0, 0, device=device))
    if seed % 3 == 0:
        spans[0].parent_id = 600
    ours, theirs = both(spans, (0, 10**6))
    assert ours == theirs
    worked_ns = device_ns(spans, spans[::3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "_native", None)
        assert device_ns(spans, spans[::3]) == worked_ns
    assert len(worked_ns) > 20


@pytest.mark.slow
@pytest.mark.parametrize("pure", [False, True])
def test_what_lies_deep_is_held_once(monkeypatch: pytest.MonkeyPatch, pure: bool) -> None:
    """For each call around it, it would be gigabytes of a file of some MB."""
    if pure:
        monkeypatch.setattr(calls, "_native", None)
    depth, leaves = 1000, 4000
    sites = [Site(f"outer {at % 50}", "op") for at in range(depth)]
    spans = [Span(site, at, at - 1, 1, 7, 0, at, 10**6, 10**6, 0) for at, site in enumerate(sites, start=1)]
    for at in range(depth + 1, depth + 1 + leaves):
        device = (DeviceInterval(0, 7, 10 * at, 10 * at + 4),)
        spans.append(Span(INNER, at, depth, 1, 7, 0, at, at + 1, 1, 0, device=device))
    tracemalloc.start()
    try:
        worked_ns = device_ns(spans, spans[:depth])
        root = call_tree(spans, OPERATORS)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert worked_ns == dict.fromkeys(range(1, depth + 1), 4 * leaves)
    outer = [place for place in every_place(root) if place.site is not INNER]
    assert [(place.calls, place.device_ns, place.device_calls) for place in outer] == [(1, 4 * leaves, 1)] * depth


@native
def test_what_c_does_not_take_is_left_to_python() -> None:
    """Intervals of another class, or that end before they begin, and times beyond 64 bits."""
    plain = Span(OUTER, 1, 0, 1, 1, 0, 0, 10, 10, 10)
    for one in (PureDeviceInterval(0, 0, 2, 4), DeviceInterval(0, 0, 4, 2)):
        span = replace(plain, device=(one,))
        assert calls._native.places([span], OPERATORS, -NEVER, NEVER - 1, frozenset()) is None
        ours, theirs = both([span])
        assert ours == theirs
    long = replace(plain, start_ns=1 - NEVER, end_ns=NEVER - 1)
    (place,) = every_place(call_tree([long], OPERATORS))
    assert place.host_ns == 2 * NEVER - 2


@native
def test_ids_that_change_while_the_tree_is_made_harm_nothing() -> None:
    """As another thread may change them, or a site that runs code: one to an id that only a parent was to have."""
    spans = [Span(OUTER, 1, 99, 1, 1, 0, 0, 10, 10, 10, device=(DeviceInterval(0, 7, 2, 4),))]

    class Changing:
        device = False

        @property
        def kind(self) -> str:
            spans[0].span_id = 99
            return "op"

    spans[0].site = Changing()  # type: ignore[assignment]
    rows, uses = calls._native.places(spans, OPERATORS, -NEVER, NEVER - 1, frozenset())
    assert (len(rows), uses) == (1, [(0, 0, 7, 1, 2, 2, 2)])
