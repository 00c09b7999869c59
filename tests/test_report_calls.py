"""The call tree says the same in C as in Python, of any spans; the numbers themselves are tested by its views."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_spans import traces

from instrument.report import calls
from instrument.report.calls import NEVER, Place, call_tree, every_place
from instrument.report.operators import OPERATORS
from instrument.spans import DeviceInterval, Interval, PureDeviceInterval, Site, Span, Trace

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


@native
@given(
    st.lists(st.tuples(*[st.integers(0, 7)] * 2, *[st.integers(1, 2)] * 2, st.booleans()), max_size=9),
    st.booleans(),
)
def test_both_make_the_same_tree_whatever_the_parents_are(
    given_spans: list[tuple[int, int, int, int, bool]], has_tasks: bool
) -> None:
    """Parents that are missing, come later, are of another line or run in a circle, and ids that come twice."""
    spans = []
    for place, (span_id, parent_id, thread_id, task_id, is_inner) in enumerate(given_spans):
        span = Span(
            INNER if is_inner else OUTER, span_id, parent_id, 1, thread_id, task_id * has_tasks, place, 20, 0, 0
        )
        span.device = (DeviceInterval(0, thread_id, 2 * place, 3 * place),) * is_inner
        spans.append(span)
    ours, theirs = both(spans)
    assert ours == theirs


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
