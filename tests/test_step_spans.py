"""Steps of a loop in the trace of a window: contiguous, numbered, and in nobody's way."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interval_lists import assign_self_times
from trees import outline

import instrument
from instrument import Profiler, chrome, schedule, scope
from instrument.profile.keys import loads
from instrument.recording.spans import Origin, Site, Span, covered_ns
from instrument.sessions.profiler import Window
from instrument.sessions.step_columns import derive_training_steps, insert_step_spans
from instrument.sessions.window import Step
from instrument.trace.trace import Trace, columns_of_spans


@pytest.fixture(autouse=True)
def stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INSTRUMENT_PROFILE", raising=False)
    yield
    instrument.stop()


def find_steps(window: Window) -> list[Span]:
    return sorted((span for span in window.trace.spans if span.site.kind == "step"), key=lambda span: span.start_ns)


def shown(spans: list[Span]) -> str:
    """The tree, children by their begin, steps with their number."""
    children: dict[int, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        children.setdefault(span.parent_id, []).append(span)
    lines: list[str] = []

    def add(parent_id: int, depth: int) -> None:
        for span in children.get(parent_id, ()):
            number = span.attributes.get("step")
            lines.append("  " * depth + span.site.name + ("" if number is None else f" {number}"))
            add(span.span_id, depth + 1)

    add(0, 0)
    return "\n".join(lines)


def windows_of(make_steps: Any, **arguments: Any) -> list[Window]:
    found: list[Window] = []
    with Profiler(loads("", environ={}), on_trace_ready=found.append, **arguments) as profiler:
        make_steps(profiler)
    return found


def test_steps_are_contiguous_numbered_spans_and_what_ran_in_one_is_below_it() -> None:
    def loop(profiler: Profiler) -> None:
        for _ in range(4):
            with scope("forward"), scope("layer"):
                pass
            with scope("backward"):
                pass
            profiler.step()

    (window,) = windows_of(loop, schedule=(1, 3))
    assert shown(window.trace.spans) == outline(
        """
        step 1
          forward
            layer
          backward
        step 2
          forward
            layer
          backward
        """
    )
    steps = find_steps(window)
    assert all(one.end_ns == after.start_ns for one, after in itertools.pairwise(steps))
    assert {span.root_id for span in window.trace.spans} == {step.span_id for step in steps}
    assert {step.thread_id for step in steps} == {threading.get_native_id()}
    assert (steps[0].start_ns, steps[-1].end_ns) == (window.trace.start_ns, window.trace.end_ns)
    assert [row.totals.calls for row in window.tally().iterate_totals() if row.path[-1].name == "step"] == [2]


def test_a_scope_around_the_loop_holds_the_steps_and_one_across_a_step_is_a_sibling() -> None:
    def loop(profiler: Profiler) -> None:
        with scope("epoch"):
            profiler.step()
            opened = instrument.scope_start("across")
            with scope("inside"):
                pass
            profiler.step()
            instrument.scope_end(opened)
            with scope("after"):
                pass
            profiler.step()

    (window,) = windows_of(loop, schedule=(1, 3))
    assert shown(window.trace.spans) == outline(
        """
        epoch
          step 1
          across
            inside
          step 2
            after
        """
    )
    assert [note for note in window.trace.notes if "CUDA" not in note] == []  # of windows, whatever torch found
    loaded, _ = chrome.load(window.export("steps.json"))
    assert shown(loaded.spans) == shown(window.trace.spans)


def test_the_step_under_way_at_stop_is_clipped_and_none_is_made_where_nothing_began_in_it() -> None:
    def loop(profiler: Profiler) -> None:
        profiler.step()
        with scope("work"):
            pass

    (window,) = windows_of(loop)
    assert [(step.attributes["step"], step.clipped) for step in find_steps(window)] == [(0, False), (1, True)]
    (window,) = windows_of(lambda profiler: profiler.step())
    assert [(step.attributes["step"], step.clipped) for step in find_steps(window)] == [(0, False)]


def test_the_work_of_a_handler_is_between_two_windows_and_in_no_step() -> None:
    found: list[Window] = []

    def handle(window: Window) -> None:
        found.append(window)
        with scope("handler"):
            pass

    with Profiler(loads("", environ={}), schedule=schedule(record=1), on_trace_ready=handle) as profiler:
        for _ in range(3):
            profiler.step()
    assert [[span.site.name for span in window.trace.spans] for window in found] == [["step"]] * 3
    assert all(one.trace.end_ns < after.trace.start_ns for one, after in itertools.pairwise(found))


def test_a_request_within_a_step_stays_the_root_of_its_tree() -> None:
    def loop(profiler: Profiler) -> None:
        with scope("request", kind="request"), scope("inner"):
            pass
        profiler.step()

    (window,) = windows_of(loop)
    (request,) = (span for span in window.trace.spans if span.site.kind == "request")
    (inner,) = (span for span in window.trace.spans if span.site.name == "inner")
    assert request.parent_id == find_steps(window)[0].span_id
    assert request.root_id == inner.root_id == request.span_id


@st.composite
def nested_spans(draw: Any) -> list[Span]:
    """Spans of one thread as a recorder makes them, also ranges that cross."""
    spans: list[Span] = []
    for span_id in range(1, draw(st.integers(0, 8)) + 1):
        start = draw(st.integers(0, 60))
        end = draw(st.integers(start, 60))
        around = [one for one in spans if one.start_ns <= start and end <= one.end_ns]
        parent = around[-1] if around else None
        above, root = (parent.span_id, parent.root_id) if parent else (0, span_id)
        spans.append(Span(Site(f"s{span_id}"), span_id, above, root, 1, 0, start, end, end - start, 0))
    assign_self_times(spans)
    return spans


@given(nested_spans(), st.lists(st.integers(0, 60), min_size=2, max_size=6, unique=True))
def test_no_span_is_lost_moved_or_counted_twice(spans: list[Span], edges: list[int]) -> None:
    before = {span.span_id: (span.start_ns, span.end_ns) for span in spans}
    steps = [Step(number, *edge, 1) for number, edge in enumerate(itertools.pairwise(sorted(edges)))]
    trace = insert_step_spans(Trace(Origin(1, "loop", 0, 0), 0, 60, spans), steps)
    by_id = {span.span_id: span for span in trace.spans}
    made = [span for span in trace.spans if span.site.kind == "step"]
    assert [(span.attributes["step"], span.start_ns, span.end_ns) for span in made] == [
        (step.number, step.start_ns, step.end_ns) for step in steps
    ]
    assert {span.span_id: (span.start_ns, span.end_ns) for span in trace.spans if span not in made} == before
    for span in trace.spans:
        parent, top, passed = by_id.get(span.parent_id), span, 0
        assert span.self_ns >= 0
        if parent is not None:
            assert parent.start_ns <= span.start_ns <= span.end_ns <= parent.end_ns
        while top.parent_id:
            top, passed = by_id[top.parent_id], passed + 1
            assert passed < 20, "the tree runs in a circle"
        assert span.root_id == top.span_id
    for step in made:
        below = [(s.start_ns, s.end_ns) for s in trace.spans if s.parent_id == step.span_id]
        assert step.self_ns <= step.total_ns - covered_ns(below)


def test_self_time_of_a_span_over_several_windows_is_in_the_window_where_it_was_spent() -> None:
    found: list[Window] = []
    profiler = Profiler(loads("", environ={}), schedule=schedule(record=2), on_trace_ready=found.append)
    with profiler, scope("epoch"):
        time.sleep(0.02)
        with scope("prepare"):
            for _ in range(4):
                with scope("train"):
                    time.sleep(0.002)
                profiler.step()
    assert len(found) == 2
    for window in found:
        spans = {span.site.name: span for span in window.trace.spans}
        assert spans["epoch"].clipped
        # Every instant is somebody's own, and once.
        lasted_ns = window.trace.end_ns - min(span.start_ns for span in window.trace.spans)
        assert sum(span.self_ns for span in window.trace.spans) == lasted_ns
        assert spans["prepare"].self_ns + spans["train"].self_ns < spans["prepare"].total_ns
    first, second = ({span.site.name: span for span in window.trace.spans} for window in found)
    assert first["epoch"].self_ns >= 18e6
    assert second["epoch"].self_ns == 0


# ---------------------------------------------------------------- the steps of a loop that says nothing of steps

FETCH = Site("DataLoader", "loader")
FORWARD, BACKWARD, OPTIMIZER = (
    Site(name, "phase", attributes=(("phase", name),)) for name in ("forward", "backward", "optimizer")
)


def calls(*sites: Site, thread_id: int = 1) -> list[Span]:
    """Spans of 8 ns each that begin every 10 ns."""
    ids = itertools.count(100 * thread_id)
    return [Span(site, i := next(ids), 0, i, thread_id, 0, 10 * at, 10 * at + 8, 8, 8) for at, site in enumerate(sites)]


def test_the_steps_of_a_training_loop_are_its_batches() -> None:
    batch = (FETCH, FORWARD, BACKWARD, OPTIMIZER)
    assert derive_training_steps(columns_of_spans(calls(*batch, *batch, FETCH))) == [
        Step(0, 0, 40, 1),
        Step(1, 40, 80, 1),
    ]


def test_the_last_step_ends_with_its_optimizer_where_no_batch_follows() -> None:
    assert derive_training_steps(columns_of_spans(calls(FETCH, FORWARD, BACKWARD, OPTIMIZER))) == [Step(0, 0, 38, 1)]


def test_batches_whose_gradients_are_added_up_are_one_step() -> None:
    batch = (FETCH, FORWARD, BACKWARD)
    assert derive_training_steps(columns_of_spans(calls(*batch, *batch, OPTIMIZER, FETCH))) == [Step(0, 0, 70, 1)]


def test_an_evaluation_is_no_step_and_in_none() -> None:
    train, test = (FETCH, FORWARD, BACKWARD, OPTIMIZER), (FETCH, FORWARD)
    found = derive_training_steps(columns_of_spans(calls(*train, FETCH, *test, *test, FETCH, *train)))
    assert found == [Step(0, 0, 40, 1), Step(1, 100, 138, 1)]


def test_a_loader_within_a_loader_begins_no_step_of_its_own() -> None:
    spans = calls(FETCH, FORWARD, BACKWARD, OPTIMIZER)
    inner = Span(FETCH, 9, 1, 1, 1, 0, 2, 6, 4, 4)
    assert derive_training_steps(columns_of_spans([*spans, inner])) == [Step(0, 0, 38, 1)]


@pytest.mark.parametrize("kind", ["step", "request"])
def test_steps_are_not_inferred_if_spans_of_steps_or_requests_exist(kind: str) -> None:
    spans = calls(FETCH, FORWARD, BACKWARD, OPTIMIZER, Site("serve", kind))
    assert derive_training_steps(columns_of_spans(spans)) == []


def test_a_loop_that_only_computes_has_no_steps() -> None:
    assert derive_training_steps(columns_of_spans(calls(FETCH, FORWARD, FETCH, FORWARD))) == []
    assert derive_training_steps(columns_of_spans(calls(FORWARD, BACKWARD, OPTIMIZER))) == []
    assert (
        derive_training_steps(columns_of_spans(calls(FETCH) + calls(FORWARD, BACKWARD, OPTIMIZER, thread_id=2))) == []
    )
