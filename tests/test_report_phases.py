"""The `phases` view: Paddle's Model Summary where it is right, SINGA's lines, and each instant from spans at random."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from golden_views import is_golden, text_of
from hypothesis import given
from interval_lists import union
from paddle_golden import GOLDEN, golden_trace
from raw_spans import changed, points, traces
from readback import spans_in

from instrument.recorder.wrapping import wrap
from instrument.recording.spans import UNTIMED, DeviceInterval, Origin, Site, Span
from instrument.report.benchmark_view import find_phase
from instrument.report.phases_view import OTHERS, PhaseRow, PhasesView, phases
from instrument.report.table import measure_width
from instrument.report.view import Options, Recording, make_json_values
from instrument.trace.trace import Trace

MS = 1_000_000
DECLARED = {"Net": "forward", "Linear": "forward", "Gradient Backward": "backward", "Optimization Step": "optimizer"}


def view(trace: Trace, **options: object) -> PhasesView:
    return phases(Recording.from_trace(changed(trace)), Options(**options))  # type: ignore[arg-type]


def site(phase: str, kind: str = "phase", name: str = "") -> Site:
    return Site(name or phase, kind, attributes=(("phase", phase),))


def paddles_trace() -> Trace:
    """Paddle's tree, its phases declared as its types of event declare them."""
    trace, made = golden_trace(), dict[str, Site]()
    for span in trace.spans:
        if span.site.name in DECLARED:
            own = replace(span.site, attributes=(("phase", DECLARED[span.site.name]),))
            span.site = made.setdefault(span.site.name, own)
    return trace


def paddle_cells() -> dict[str, list[list[str]]]:
    """Return the calls of each row of Paddle's Model Summary, with the numbers of its CPU and GPU columns."""
    text = (GOLDEN / "paddle_synthetic_summary.txt").read_text().split("Model Summary-")[1].split("Note:")[0]
    rows = {}
    for line in text.splitlines()[4:]:
        if "/" in line:
            name, calls, *numbers = [cell.strip() for cell in line.split("  ") if cell.strip()]
            rows[name] = [[calls], *(cell.split(" / ") for cell in numbers)]
    return rows


def as_paddle(row: PhaseRow) -> list[list[str]]:
    def cells(times: object) -> list[str]:
        facts = make_json_values(times)
        parts = [facts[name] for name in ("total_ns", "mean_ns", "max_ns", "min_ns")]
        return [
            *("-" if part is None else f"{part / MS:.2f}" for part in parts),
            f"{100 * facts['ratio']:.2f}",
        ]

    return [["-" if row.calls is None else str(row.calls)], cells(row.host), cells(row.device)]


THEIRS = {
    "step": "ProfileStep", "loader": "Dataloader", "forward": "Forward", "backward": "Backward",
    "optimizer": "Optimization", "others": "Others",
}  # fmt: skip


def test_host_times_are_those_of_paddles_model_summary_to_the_digit() -> None:
    theirs, ours = paddle_cells(), view(paddles_trace())
    assert [row.name for row in ours.rows] == list(THEIRS)
    for row in ours.rows:
        assert as_paddle(row)[:2] == theirs[THEIRS[row.name]][:2]


def test_device_times_are_paddles_and_the_memsets_and_copies_that_it_leaves_out() -> None:
    """The tree has 120 ms of kernels; the phases put 1 ms of memsets and 6 ms of copies on the streams as well."""
    theirs, ours = paddle_cells(), {row.name: as_paddle(row)[2] for row in view(paddles_trace()).rows}
    assert theirs["ProfileStep"][2][0] == "120.00"
    assert ours["step"] == ["127.00", "63.50", "63.50", "63.50", "100.00"]
    assert theirs["Backward"][2][:4] == ours["backward"][:4] == ["56.00", "28.00", "28.00", "28.00"]
    assert theirs["Forward"][2][0] == "40.00"
    assert ours["forward"] == ["41.00", "20.50", "20.50", "20.50", "32.28"]
    assert theirs["Others"][2][0] == "24.00"
    assert ours["others"] == ["30.00", "-", "-", "-", "23.62"]


def test_the_layout_is_that_of_the_file() -> None:
    assert is_golden("phases", text_of(view(paddles_trace())))


def made(*spans: tuple[Site, int, int], **facts: object) -> Trace:
    """A trace of spans of one thread in ms, which end a window of 100 ms."""
    listed = [
        Span(one, index + 1, 0, index + 1, 1, 0, start * MS, end * MS, (end - start) * MS, 0)
        for index, (one, start, end) in enumerate(spans)
    ]
    return replace(Trace(Origin(1, "train", 0, 0), 0, 100 * MS, listed, {1: "main"}), **facts)  # type: ignore[arg-type]


def totals(trace: Trace, **options: object) -> dict[str, tuple[int | None, float]]:
    return {row.name: (row.calls, row.host.total_ns / MS) for row in view(trace, **options).rows}


STEP = Site("step", "step")


def test_the_closure_of_an_optimizer_gives_its_time_to_forward_and_backward() -> None:
    trace = made(
        (STEP, 0, 40), (site("optimizer"), 10, 40), (site("forward"), 12, 20), (site("backward"), 20, 30),
        (site("forward"), 22, 25),
    )  # fmt: skip
    assert totals(trace) == {
        "step": (1, 40.0), "forward": (1, 8.0), "backward": (1, 10.0), "optimizer": (1, 12.0), "others": (None, 10.0),
    }  # fmt: skip


def test_phases_that_cross_count_each_instant_once_and_others_is_never_negative() -> None:
    trace = made((STEP, 0, 20), (site("forward"), 0, 15), (site("backward"), 5, 20), (site("forward"), 14, 18))
    assert totals(trace) == {"step": (1, 20.0), "forward": (1, 15.0), "backward": (1, 5.0), "others": (None, 0.0)}


def test_steps_to_be_skipped_are_in_no_row_by_the_number_that_they_bear_or_else_by_their_begin() -> None:
    trace = made(
        (STEP, 0, 10), (site("forward"), 0, 9), (STEP, 10, 30), (site("forward"), 10, 18), (STEP, 30, 40),
        (site("forward"), 30, 34),
    )  # fmt: skip
    use = view(trace, skip_first=1)
    assert (use.timed, use.skipped) == (2, 1)
    assert totals(trace, skip_first=1) == {"step": (2, 30.0), "forward": (2, 12.0), "others": (None, 18.0)}
    assert view(trace, skip_first=3).rows == ()
    assert "No step was left: 3 were recorded" in text_of(view(trace, skip_first=3))
    for number, span in enumerate([span for span in trace.spans if span.site is STEP], 7):
        span.attributes = {"step": number}
    assert (view(trace, skip_first=8).timed, view(trace, skip_first=8).skipped) == (2, 8)
    assert (view(trace, skip_first=5).timed, view(trace, skip_first=5).skipped) == (3, 7)


def test_averages_are_of_whole_steps_and_say_how_many_came_before() -> None:
    trace = made(
        (STEP, 0, 10), (site("forward"), 0, 4), (STEP, 10, 30), (site("forward"), 10, 18), (STEP, 30, 40),
        (site("forward"), 30, 39),
    )  # fmt: skip
    steps = [span for span in trace.spans if span.site is STEP]
    for number, span in enumerate(steps, 5):
        span.attributes = {"step": number}
    steps[-1].clipped = True
    use = view(trace)
    assert (use.timed, use.skipped, use.cut) == (2, 5, 1)
    assert use.mean_ns == {"forward": 6 * MS, OTHERS: 9 * MS}
    text = text_of(use)
    assert "Steps: 2 whole, 5 skipped before, 1 cut at an edge" in text
    assert "Time Profiling: host time, averages of 2 iterations timed, 5 skipped" in text
    assert "Forward Propagation Time : 0.006 sec\nBackward Propagation Time : - sec\nOthers Time : 0.009 sec" in text


def test_a_step_of_which_spans_were_overwritten_is_cut_where_they_begin_to_be_kept() -> None:
    trace = made(
        (STEP, 0, 20), (site("forward"), 0, 20), (STEP, 20, 40), (site("forward"), 20, 30), held_from_ns=10 * MS
    )
    use = view(trace)
    assert (use.timed, use.cut) == (1, 1)
    assert totals(trace) == {"step": (2, 30.0), "forward": (2, 20.0), "others": (None, 10.0)}


def test_without_steps_the_phases_are_of_requests_and_add_up_to_their_wall() -> None:
    handle = Site("handle", "request")
    trace = made((handle, 0, 30), (handle, 10, 50), (site("prepare"), 1, 5), (site("compute"), 12, 40))
    first, second, prepare, compute = trace.spans
    prepare.root_id, compute.root_id = first.span_id, second.span_id
    beside = replace(prepare, span_id=9, root_id=9)
    trace = replace(trace, spans=[*trace.spans, beside])
    assert totals(trace) == {
        "request": (2, 70.0), "prepare": (1, 4.0), "compute": (1, 28.0), "others": (None, 38.0),
    }  # fmt: skip
    text = text_of(view(trace))
    assert "Requests: 2 whole" in text
    assert "Not counted: 1 call of phases in no request, 4 ms" in text
    assert "Propagation" not in text


def test_without_either_they_are_of_the_window() -> None:
    trace = made((site("forward"), 0, 30), (Site("read", "loader"), 30, 40))
    assert totals(trace) == {
        "window": (1, 100.0), "loader": (1, 10.0), "forward": (1, 30.0), "others": (None, 60.0),
    }  # fmt: skip
    assert "Phases of the window: there is no step" in text_of(view(trace))


def test_a_step_begins_with_the_wait_for_what_it_works_on_and_other_phases_between_steps_are_reported() -> None:
    read = Site("DataLoader", "loader")
    trace = made(
        (read, 0, 10), (STEP, 12, 30), (site("forward"), 14, 24),
        (read, 30, 31), (site("post"), 32, 36), (read, 36, 40), (STEP, 40, 60), (site("forward"), 40, 50),
        (read, 60, 65),
    )  # fmt: skip
    use = view(trace)
    assert totals(trace) == {
        "step": (2, 54.0), "loader": (2, 14.0), "forward": (2, 20.0), "others": (None, 20.0),
    }  # fmt: skip
    assert (use.outside, use.outside_ns) == (3, 10 * MS), "two waits and what went on between"
    assert "Not counted: 3 calls of phases in no step, 10 ms" in text_of(use)
    # Between the steps of a Profiler there is nothing but its handlers.
    own = Site("step", "step", "instrument", "Profiler.step")
    for span in trace.spans:
        span.site = own if span.site is STEP else span.site
    assert totals(trace)["step"] == (2, 38.0)


def test_steps_of_tasks_that_run_side_by_side_are_all_there() -> None:
    trace = made(*[(STEP, at, at + 40) for at in range(10)], *[(site("forward"), at, at + 30) for at in range(10)])
    for task, (step, forward) in enumerate(zip(trace.spans[:10], trace.spans[10:], strict=True), start=1):
        step.task_id = task
        forward.task_id, forward.parent_id = task + 50 * (task > 5), step.span_id  # half of them in a task within
    assert totals(trace) == {"step": (10, 400.0), "forward": (10, 300.0), "others": (None, 100.0)}
    assert view(trace).timed == 10
    use = view(trace, skip_first=3)
    assert (use.timed, use.skipped) == (7, 3), "of the thread, not of each task"


def test_steps_of_tasks_within_those_that_a_profiler_counts_are_no_others() -> None:
    own = Site("step", "step", "instrument", "Profiler.step")
    trace = made((own, 0, 20), (own, 20, 40), (STEP, 2, 18), (STEP, 22, 38), (site("forward"), 4, 14))
    for span in trace.spans[2:]:
        span.task_id = 5
    assert totals(trace) == {"step": (2, 40.0), "forward": (1, 10.0), "others": (None, 30.0)}


def test_a_step_of_a_task_stays_where_the_step_of_its_thread_is_below_it() -> None:
    trace = made((STEP, 0, 20), (STEP, 0, 20), (Site("read", "loader"), 0, 20))
    spans = [*trace.spans]
    spans[0].task_id = spans[2].task_id = 5
    spans[1].parent_id = spans[0].span_id
    assert totals(trace) == {"step": (1, 20.0), "loader": (1, 20.0), "others": (None, 0.0)}


def test_steps_without_a_phase_are_counted_and_no_other_reason_is_given() -> None:
    trace = made(*((STEP, 10 * number, 10 * number + 8) for number in range(5)))
    use = view(trace, skip_first=2)
    assert (use.timed, use.skipped, use.cut, use.rows) == (3, 2, 0, ())
    assert "No phase was recorded" in text_of(use)
    assert "No step was left: 5 were recorded" in text_of(view(trace, skip_first=5))


def test_steps_that_were_overwritten_are_not_reported_as_skipped() -> None:
    trace = made((STEP, 40, 60), (site("forward"), 40, 50), (STEP, 60, 90))
    spans = [*trace.spans]
    for span, number in ((spans[0], 7), (spans[2], 8)):
        span.attributes = {"step": number}
    assert "Steps: 2 whole, 7 skipped before" in text_of(view(trace))
    trace.held_from_ns = trace.start_ns + 40 * MS
    use = view(trace)
    assert (use.timed, use.skipped, use.overwritten) == (2, 0, 7)
    assert "Steps: 2 whole, 7 overwritten before" in text_of(use)
    assert "averages of 2 iterations timed, 0 skipped" in text_of(use)


def test_phases_on_other_threads_are_named_and_not_counted() -> None:
    trace = made((STEP, 0, 30), (site("forward"), 0, 10), (site("forward"), 0, 20))
    spans = [*trace.spans]
    spans[2].thread_id = 2
    use = view(trace)
    assert (use.outside, use.outside_ns) == (1, 20 * MS)
    assert "Not counted: 1 call of phases in no step, 20 ms" in text_of(use)
    spans[2].parent_id = 1
    assert totals(trace) == {"step": (1, 30.0), "forward": (2, 20.0), "others": (None, 10.0)}, "where a step began it"


def test_the_outer_of_phases_with_equal_times_is_under_way() -> None:
    """Also where the inner one was known before, from within a communication, where it is no phase of the step."""
    outer, inner, reduce = site("outer"), site("inner"), Site("all_reduce", "comm")
    trace = made((STEP, 0, 100), (reduce, 0, 5), (inner, 1, 4), (outer, 10, 50), (inner, 10, 50))
    for span, parent_id in zip(trace.spans, (0, 1, 2, 1, 4), strict=True):
        span.parent_id = parent_id
    assert [(row.name, row.host.total_ns // MS) for row in view(trace).rows] == [
        ("step", 100), ("outer", 40), ("others", 60),
    ]  # fmt: skip


def test_rows_and_least_leave_the_largest_in_their_order_and_sum_the_rest() -> None:
    parts = [(site("prepare"), 0, 1), (site("forward"), 1, 9), (site("backward"), 10, 30), (site("post"), 30, 33)]
    trace = made((STEP, 0, 40), *parts)
    wanted = {"step": (1, 40.0), "forward": (1, 8.0), "backward": (1, 20.0), "(remaining 2)": (2, 4.0)}
    assert totals(trace, rows=2) == totals(trace, least_ns=4 * MS) == {**wanted, "others": (None, 8.0)}


def test_state_and_unit_say_which_tables_and_what_they_are_in() -> None:
    trace = paddles_trace()
    assert "Device time" not in text_of(view(trace, state="CPU"))
    assert "ost time" not in text_of(view(trace, state="GPU"))
    assert "forward    2         38000 " in text_of(view(trace, unit="us"))
    assert "No device time was recorded in it." in text_of(view(made((STEP, 0, 9), (site("post"), 0, 1)), state="GPU"))


def test_nothing_says_what_to_do_and_hostile_names_fit_the_line() -> None:
    text = text_of(view(made((STEP, 0, 9))))
    assert "No phase was recorded: `phases: auto` and `loaders: auto` in the profile" in text
    names = ["x" * 300, "\n\x1b[31m" + "層" * 200, "a/b%c:d"]
    trace = made((STEP, 0, 90), *((Site(name, "phase"), 10 * at, 10 * at + 5) for at, name in enumerate(names)))
    lines = text_of(view(trace)).splitlines()
    assert max(map(measure_width, lines)) <= 100
    assert "\x1b" not in "".join(lines)
    assert any(line.startswith("  a/b%c:d  ") for line in lines)


def test_a_site_is_the_phase_that_it_declares_or_its_own_name() -> None:
    assert find_phase(Site("read", "loader")) == "loader"
    assert find_phase(site("post", "user", "wrap up")) == "post"
    assert find_phase(Site("wrap up", "phase")) == "wrap up"
    assert find_phase(Site("wrap up", "user")) is None


RANDOM = [
    Site("turn", "step"), Site("handle", "request"), Site("read", "loader"), site("forward"), site("backward"),
    site("optimizer"), Site("f", "op", device=True), Site("all_reduce", "comm"),
]  # fmt: skip


@given(traces(RANDOM))
def test_each_instant_counts_once_for_the_phase_of_its_track_that_began_first(trace: Trace) -> None:
    first, last = trace.coverage
    use = view(trace)

    def reaches(span: Span) -> bool:
        return span.start_ns < last and span.end_ns > first

    def key_of(span: Span) -> tuple[int, int]:
        return span.thread_id, span.task_id

    steps = dict[tuple[int, int], list[Span]]()
    for span in sorted(trace.spans, key=lambda span: (span.start_ns, -span.end_ns)):
        own = steps.setdefault(key_of(span), []) if span.site.kind == "step" and reaches(span) else None
        if own is not None and (not own or span.start_ns >= own[-1].end_ns):
            own.append(span)
    by_id = {span.span_id: span for span in trace.spans}
    has_tasks = len({thread for thread, _ in steps}) < len(steps)
    key_of_step = {step.span_id: key for key, own in steps.items() for step in own}

    def above(span: Span) -> int:
        up = by_id.get(span.parent_id)
        while up is not None and up.span_id not in key_of_step:
            up = by_id.get(up.parent_id)
        return up.span_id if up is not None else 0

    def stood_still(span: Span) -> bool:
        return bool(find_phase(span.site)) and span.active_ns < span.total_ns

    def lies_in_one_that_stood_still(span: Span) -> bool:
        up = by_id.get(span.parent_id)
        while up is not None and not stood_still(up):
            up = by_id.get(up.parent_id)
        return up is not None

    def lies_in(step: Span) -> bool:
        around = steps.get((step.thread_id, 0), []) if step.task_id else []
        return any(one.start_ns <= step.start_ns < one.end_ns and not above(one) for one in around)

    if has_tasks:
        steps = {key: [step for step in own if not above(step) and not lies_in(step)] for key, own in steps.items()}
        steps = {key: own for key, own in steps.items() if own}
    key_of_step = {step.span_id: key for key, own in steps.items() for step in own}

    def begin(step: Span, key: tuple[int, int]) -> int:
        own = union((s.start_ns, s.end_ns) for s in trace.spans if s.site.kind == "loader" and key_of(s) == key)
        since = max((one.end_ns for one in steps[key] if one.end_ns <= step.start_ns and one is not step), default=0)
        return max((a for a, b in own if since <= a and b <= step.start_ns), default=step.start_ns)

    requests = [s for s in trace.spans if s.site.kind == "request" and s.root_id == s.span_id and reaches(s)]
    units: dict[tuple[int, int], list[tuple[int, int]]]
    if steps:
        units = {key: [(begin(s, key), s.end_ns) for s in own] for key, own in steps.items()}
    elif requests:
        units = {(span.span_id, 0): [(span.start_ns, span.end_ns)] for span in requests}
    else:
        units = {(0, 0): [trace.coverage]}

    def line_of(span: Span) -> tuple[int, int]:
        if not steps:
            return (span.root_id if requests else 0), 0
        found = [key for key in (key_of(span), (span.thread_id, 0)) if key in units]
        found += [key_of_step[above(span)]] if above(span) else []
        return [*found, (-1, -1)][0]

    def end_of(span: Span) -> int:
        """Return the end of a span as known: a generator that stood still ends in the step in which it began."""
        if not steps or not stood_still(span):
            return span.end_ns
        return next((end for start, end in units[line_of(span)] if start <= span.start_ns < end), -1)

    def rank(span: Span) -> tuple[int, int, int]:
        is_aside = bool(steps) and line_of(span) != key_of(span)
        if is_aside or stood_still(span) or lies_in_one_that_stood_still(span):
            return 2, span.start_ns, -span.end_ns
        return find_phase(span.site) == "optimizer", span.start_ns, -span.end_ns

    inside = {span.span_id for span in trace.spans if span.site.kind in ("comm", "copy")}
    found = {key: points(parts) & points([trace.coverage]) for key, parts in units.items()}
    calls = [s for s in trace.spans if find_phase(s.site) and s.parent_id not in inside and line_of(s) in units]
    owner: dict[tuple[tuple[int, int], int], Span] = {}
    for key, instants in found.items():
        for at in instants:
            open_now = [s for s in calls if line_of(s) == key and s.start_ns <= at < min(s.end_ns, end_of(s))]
            if open_now:
                owner[key, at] = min(open_now, key=rank)
    base = sum(map(len, found.values()))
    if not use.rows:
        assert not owner
        return
    host = {row.name: row.host.total_ns for row in use.rows}
    assert host[use.of] == base
    assert host[OTHERS] == base - len(owner) >= 0
    assert sum(host.values()) == 2 * base
    starts = [(line_of(span), span.start_ns, span.end_ns) for span in calls]
    if len(set(starts)) == len(starts):  # of two that are the same but for their phase, either may be the first
        for name in host.keys() - {use.of, OTHERS}:
            assert host[name] == sum(find_phase(span.site) == name for span in owner.values())
    for row in use.rows:
        if row.name not in (use.of, OTHERS) and row.host.ratio is not None:
            assert row.host.ratio == row.host.total_ns / base
            assert row.host.mean_ns == row.host.total_ns / (row.calls or 0)
            assert (row.host.min_ns or 0) * (row.calls or 0) <= row.host.total_ns
            if len(set(starts)) == len(starts):
                shares = Counter(id(span) for span in owner.values() if find_phase(span.site) == row.name)
                assert row.host.max_ns == max(shares.values(), default=0)
                assert row.host.total_ns == sum(shares.values())
    streams: dict[tuple[int, int], set[int]] = {}
    for span in trace.spans:
        if line_of(span) in units and (span.start_ns in found[line_of(span)]):
            for one in span.device:
                if one.label not in UNTIMED:
                    streams.setdefault((one.device, one.stream), set()).update(points([(one.start_ns, one.end_ns)]))
    whole = use.rows[0].host
    each = [len(points([part]) & points([trace.coverage])) for parts in units.values() for part in parts]
    assert (use.rows[0].calls, whole.max_ns, whole.min_ns) == (len(each), max(each), min(each))
    assert whole.mean_ns == base / len(each)
    device = [row.device for row in use.rows if row.device is not None]
    for one in device:
        assert one.ratio == (one.total_ns / device[0].total_ns if device[0].total_ns else None)
    assert sum(map(len, streams.values())) == (device[0].total_ns if device else 0)
    assert all(0 <= one.total_ns <= device[0].total_ns for one in device)


def test_a_stream_that_several_calls_fill_at_once_counts_once() -> None:
    trace = made((STEP, 0, 40), (site("forward"), 0, 10), (site("forward"), 10, 20))
    for span in trace.spans[1:]:
        span.device = (DeviceInterval(0, 7, 0, 30 * MS), DeviceInterval(0, 8, 0, MS))
    device = {row.name: row.device for row in view(trace).rows}
    assert [device[name].total_ns / MS for name in ("step", "forward", "others")] == [31, 31, 0]  # type: ignore[union-attr]
    assert device["forward"].max_ns == 31 * MS  # type: ignore[union-attr]


# -------------------------------------------------------------------- beside other tasks

GENERATE, FORWARD, POST, ENGINE_STEP = (
    Site("generate", "phase"),
    Site("run", "op", attributes=(("phase", "forward"),)),
    Site("sample", "op", attributes=(("phase", "post"),)),
    Site("engine.step", "step"),
)


def served(recorder: Any, *, in_own_task: bool) -> PhasesView:
    """An engine's steps, and a handler that streams what they make: a generator that is open all the while."""

    def busy(us: int) -> None:
        until_ns = time.perf_counter_ns() + us * 1_000
        while time.perf_counter_ns() < until_ns:
            pass

    forward, post = (wrap(recorder, lambda: busy(300), site) for site in (FORWARD, POST))

    async def main() -> None:
        tokens: asyncio.Queue[int] = asyncio.Queue()

        async def generate() -> AsyncIterator[int]:
            while (token := await tokens.get()) < 20:
                yield token

        async def stream() -> None:
            async for _ in wrap(recorder, generate, GENERATE)():
                await asyncio.sleep(0)

        async def steps() -> None:
            for number in range(21):
                with recorder.make_span_factory(ENGINE_STEP)():
                    forward()
                    await asyncio.sleep(0)
                    post()
                await tokens.put(number)
                await asyncio.sleep(0)

        if in_own_task:
            await asyncio.gather(stream(), steps())
        else:
            engine = asyncio.create_task(steps())
            await stream()
            await engine

    asyncio.run(main())
    spans = spans_in(recorder)
    first_ns, last_ns = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    return phases(Recording.from_trace(Trace(Origin(1, "chat", 0, 0), first_ns, last_ns, spans)), Options())


@pytest.mark.parametrize("in_own_task", [True, False])
def test_an_idle_stream_at_the_same_time_takes_no_time_of_the_steps(recorder: Any, in_own_task: bool) -> None:
    use = served(recorder, in_own_task=in_own_task)
    assert (use.of, use.timed) == ("step", 21)
    rows = {row.name: row for row in use.rows}
    assert rows.keys() == {"step", "forward", "post", "others"}
    assert (rows["forward"].calls, rows["post"].calls) == (21, 21)
    assert rows["forward"].host.total_ns + rows["post"].host.total_ns >= 21 * 600_000
    assert use.outside == 1
    assert use.outside_ns > rows["step"].host.total_ns / 2


def test_a_coroutine_of_another_task_takes_nothing_of_the_steps(recorder: Any) -> None:
    async def main() -> None:
        done = asyncio.Event()

        async def waiting() -> None:
            await done.wait()

        async def steps() -> None:
            for _ in range(3):
                with recorder.make_span_factory(ENGINE_STEP)():
                    wrap(recorder, lambda: None, POST)()
                    await asyncio.sleep(0)
            done.set()

        await asyncio.gather(wrap(recorder, waiting, GENERATE)(), steps())

    asyncio.run(main())
    spans = spans_in(recorder)
    ends = [at for span in spans for at in (span.start_ns, span.end_ns)]
    trace = Trace(Origin(1, "chat", 0, 0), min(ends), max(ends), spans)
    assert {row.name: row.calls for row in view(trace).rows} == {"step": 3, "post": 3, "others": None}


def test_a_generator_in_a_step_has_what_its_body_calls_and_what_nothing_else_has() -> None:
    """A loop over a generator within a step: what the loop's body does is not the generator's."""
    spans = [
        Span(STEP, 1, 0, 1, 1, 0, 0, 50 * MS, 50 * MS, 0),
        Span(GENERATE, 2, 1, 1, 1, 0, 10 * MS, 80 * MS, 8 * MS, 0),  # it goes on behind the step
        Span(FORWARD, 3, 2, 1, 1, 0, 12 * MS, 16 * MS, 4 * MS, 0),  # in its body
        Span(POST, 4, 1, 1, 1, 0, 20 * MS, 40 * MS, 20 * MS, 0),  # in the loop's
        Span(STEP, 5, 0, 5, 1, 0, 50 * MS, 80 * MS, 30 * MS, 0),
    ]
    trace = Trace(Origin(1, "train", 0, 0), 0, 100 * MS, spans)
    assert totals(trace) == {"step": (2, 80), "generate": (1, 20), "post": (1, 20), "others": (None, 40)}


def test_tasks_that_a_step_begins_have_what_its_own_track_leaves() -> None:
    spans = [
        Span(STEP, 1, 0, 1, 1, 7, 0, 50 * MS, 50 * MS, 0),
        Span(FORWARD, 2, 1, 1, 1, 8, 5 * MS, 30 * MS, 25 * MS, 0),
        Span(POST, 3, 1, 1, 1, 7, 20 * MS, 40 * MS, 20 * MS, 0),
    ]
    trace = Trace(Origin(1, "train", 0, 0), 0, 100 * MS, spans)
    assert totals(trace) == {"step": (1, 50), "forward": (1, 15), "post": (1, 20), "others": (None, 15)}
