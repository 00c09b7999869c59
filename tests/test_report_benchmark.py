"""The `benchmark` view: right where Paddle's timer is wrong, the same live and from spans, and what it disbelieves."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from golden_views import is_golden, text_of
from hypothesis import given
from hypothesis import strategies as st
from interval_lists import length, union

import instrument
from instrument import Profiler, chrome, loader, profiled, scope
from instrument.recording.spans import Origin, Site, Span
from instrument.report.benchmark_view import (
    Benchmark,
    Loops,
    LoopTimes,
    Spread,
    benchmark,
    format_benchmark_line,
    make_view,
)
from instrument.report.section import summary_document
from instrument.report.view import Options, Recording
from instrument.trace.trace import Trace

GOLDEN = Path(__file__).parent / "golden" / "paddle_timer_synthetic.txt"
MS = 1_000_000
TRAIN, EVAL = Site("train", "step"), Site("eval", "step")
NEXT = Site("DataLoader", "loader")
WORK = Site("forward", "phase")


def of(steps: list[tuple[float, float, int | None]], skip: int = 10) -> LoopTimes:
    """The loop of steps that are given as batch cost and reader cost in ms, and samples."""
    found = Benchmark(skip)
    for batch_ms, reader_ms, samples in steps:
        found.add_step(round(batch_ms * MS), round(reader_ms * MS), samples)
    return found.measure_loop_times()


CASES = {
    "12 iters, all batch 0.010 reader 0.001, steps/s": [(10, 1, None)] * 12,
    "20 iters, batch i ms (1..20), reader 0.1*i ms, 4 samples": [(n, n / 10, 4) for n in range(1, 21)],
    "10 iters": [(10, 1, None)] * 10,
    "11 iters no reader": [(10, 0, None)] * 11,
}
RIGHT: dict[str, dict[str, dict[str, float]]] = {
    # Paddle: batch_cost avg 15 ms, ips avg 66.7, for it divides by one step less than it times.
    "12 iters, all batch 0.010 reader 0.001, steps/s": {
        "reader_summary": {"max": 0.001, "min": 0.001, "avg": 0.001},
        "batch_summary": {"max": 0.01, "min": 0.01, "avg": 0.01},
        "ips_summary": {"max": 100, "min": 100, "avg": 100},
    },
    # Paddle: batch_cost avg 16.5 ms, min inf, ips avg 266.7 and its extremes those of ten steps and one before them.
    "20 iters, batch i ms (1..20), reader 0.1*i ms, 4 samples": {
        "reader_summary": {"max": 0.002, "min": 0.0011, "avg": 0.00155},
        "batch_summary": {"max": 0.02, "min": 0.011, "avg": 0.0155},
        "ips_summary": {"max": 4 / 0.011, "min": 200, "avg": 40 / 0.155},
    },
    "10 iters": {},
    # Paddle: batch_cost avg 20 ms, ips avg 50, reader min inf.
    "11 iters no reader": {
        "batch_summary": {"max": 0.01, "min": 0.01, "avg": 0.01},
        "ips_summary": {"max": 100, "min": 100, "avg": 100},
    },
}


def summary_of(loop: LoopTimes) -> dict[str, dict[str, float]]:
    """A loop in the words of Paddle's timer, in seconds."""

    def spread(found: Spread, scale: float) -> dict[str, float]:
        return {"max": found.most / scale, "min": found.least / scale, "avg": found.mean / scale}

    parts = {"reader_summary": (loop.reader, 1e9), "batch_summary": (loop.batch, 1e9), "ips_summary": (loop.rate, 1)}
    return {name: spread(found, scale) for name, (found, scale) in parts.items() if found is not None}


@pytest.mark.parametrize("case", CASES)
def test_averages_divide_by_what_was_timed_where_paddles_timer_is_off_by_one(case: str) -> None:
    ours = summary_of(of(CASES[case]))
    assert set(ours) == set(RIGHT[case])
    for name, spread in RIGHT[case].items():
        assert ours[name] == pytest.approx(spread), name


def test_our_timer_equals_paddles_own_where_that_is_right() -> None:
    lines = GOLDEN.read_text().splitlines()
    theirs = {
        name: ast.literal_eval(text.strip().replace("inf", "None"))
        for name, text in zip(lines[::2], lines[1::2], strict=True)
    }
    assert list(theirs) == list(CASES)
    for name in CASES:
        ours = summary_of(of(CASES[name]))
        for part in set(ours) & set(theirs[name]):
            assert ours[part]["max"] == pytest.approx(theirs[name][part]["max"]) or part == "ips_summary"
        if "reader_summary" in ours:
            assert ours["reader_summary"]["avg"] == pytest.approx(theirs[name]["reader_summary"]["avg"])


def test_one_line_says_the_averages_in_seconds() -> None:
    found = Benchmark()
    assert format_benchmark_line(found) == "batch_cost: - s ips: - steps/s"
    for batch_ms, reader_ms, samples in CASES["20 iters, batch i ms (1..20), reader 0.1*i ms, 4 samples"]:
        found.add_step(round(batch_ms * MS), round(reader_ms * MS), samples)
    assert format_benchmark_line(found) == "reader_cost: 0.00155 s batch_cost: 0.01550 s ips: 258.065 samples/s"
    assert format_benchmark_line(found, "images").endswith(" images/s")


def test_one_step_without_samples_makes_it_steps_a_second() -> None:
    loop = of([(10, 0, 4), (10, 0, None)], skip=0)
    assert (loop.samples, loop.rate_of, loop.rate and loop.rate.mean) == (None, "steps", 100)


# From spans.


def made(
    site: Site, start_ms: float, end_ms: float, thread: int = 1, task: int = 0, clipped: bool = False, **facts: Any
) -> Span:
    start, end = round(start_ms * MS), round(end_ms * MS)
    return Span(site, 1, 0, 1, thread, task, start, end, end - start, 0, attributes=facts, clipped=clipped)


def trace_of(*spans: Span, end_ms: int = 1000) -> Trace:
    for span_id, span in enumerate(spans, start=1):
        span.span_id = span.root_id = span_id
    return Trace(Origin(1, "shop", 0, 0), 0, end_ms * MS, list(spans))


def training() -> Trace:
    """Ten steps of two epochs, each waiting for its batch, with an evaluation in between and one step cut."""
    spans = []
    for number in range(10):
        at = number * 20 + (100 if number > 4 else 0)
        spans += [
            made(TRAIN, at, at + 12 + number, step=number, samples=32),
            made(NEXT, at, at + 2 + number / 2),
            made(NEXT, at + 1, at + 2),
            made(WORK, at + 4, at + 12),
            made(NEXT, at, at + 12, thread=2),
        ]
    spans += [made(EVAL, 100 + n * 25, 125 + n * 25) for n in range(4)]
    spans.append(made(TRAIN, 400, 500, clipped=True))
    return trace_of(*spans)


def loops_of(trace: Trace, **options: Any) -> tuple[LoopTimes, ...]:
    return benchmark(Recording.from_trace(trace), Options(**options)).loops


def test_the_layout_of_a_training_loop() -> None:
    assert is_golden("benchmark", text_of(benchmark(Recording.from_trace(training()), Options(skip_first=2))))


def test_steps_and_their_loaders_are_read_from_spans() -> None:
    train, evaluation = loops_of(training(), skip_first=2)
    assert (train.steps, train.skipped, train.cut, train.samples) == (8, 2, 1, 256)
    assert train.batch is not None
    assert train.reader is not None
    assert train.batch.mean == sum(12 + n for n in range(2, 10)) / 8 * MS
    assert (train.reader.mean, train.reader.least) == (sum(2 + n / 2 for n in range(2, 10)) / 8 * MS, 3 * MS)
    assert train.rate is not None
    assert train.rate.mean == pytest.approx(256 / 0.140)
    assert (evaluation.name, evaluation.steps, evaluation.skipped, evaluation.reader) == ("eval", 2, 2, None)


@pytest.mark.parametrize("samples", [True, -1, "many", float("inf"), float("nan"), 10**400, None])
def test_a_value_that_is_no_number_of_samples_counts_as_none(samples: Any) -> None:
    (loop,) = loops_of(trace_of(made(TRAIN, 0, 10, samples=samples)))
    assert (loop.samples, loop.rate_of) == (None, "steps")


STEPS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 2), st.booleans()), max_size=8)
LOADS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 30), st.integers(0, 2)), max_size=12)


@given(STEPS, LOADS, st.integers(0, 4))
def test_every_figure_is_that_of_a_sweep_over_each_nanosecond(
    steps: list[tuple[int, int, int, bool]], loads: list[tuple[int, int, int]], skip: int
) -> None:
    at, spans = 0, []
    for gap, size, thread, clipped in steps:
        spans.append(Span(TRAIN, 0, 0, 0, thread, 0, at + gap, at + gap + size, size, 0, clipped=clipped))
        at += gap + size
    spans += [Span(NEXT, 0, 0, 0, thread, 0, start, start + size, size, 0) for start, size, thread in loads]
    timed = [span for span in spans[: len(steps)][skip:] if not span.clipped]
    waits, took = [], []
    for span in timed:
        own = union((one.start_ns, one.end_ns) for one in spans[len(steps) :] if one.thread_id == span.thread_id)
        earlier = [one for one in spans[: spans.index(span)] if one.thread_id == span.thread_id]
        since = max((one.end_ns for one in earlier), default=0)
        before = [a for a, b in own if since <= a and b <= span.start_ns]
        start = max(before, default=span.start_ns)
        inside = [(max(a, start), min(b, span.end_ns)) for a, b in own if a < span.end_ns and b > start]
        waits.append(length(union(inside)))
        took.append((start, span.end_ns))
    trace = trace_of(*spans)
    found = loops_of(trace, skip_first=skip)
    if not steps:
        assert found == ()
        return
    (loop,) = found
    assert (loop.steps, loop.skipped) == (len(timed), min(skip, len(steps)))
    assert loop.cut == len(steps) - loop.steps - loop.skipped
    batches = [max(end - start, 1) for start, end in took]
    for spread, values in ((loop.batch, batches), (loop.reader, waits if sum(waits) else [])):
        expected = (sum(values) / len(values), min(values), max(values)) if values else None
        assert (spread and (spread.mean, spread.least, spread.most)) == expected
    if batches:
        assert loop.rate is not None
        assert loop.rate.mean == pytest.approx(len(batches) * 1e9 / (length(union(took)) or sum(batches)))
        assert (loop.rate.least, loop.rate.most) == (1e9 / max(batches), 1e9 / min(batches))
        assert (loop.rate_of, loop.samples) == ("steps", None)
        for spread, values in ((loop.batch, batches), (loop.reader, waits)):
            if spread is not None:
                ranked = sorted(values)
                nearest = [ranked[-(-percent * len(ranked) // 100) - 1] for percent in (50, 99)]
                assert [spread.p50, spread.p99] == pytest.approx(nearest, rel=0.008)
        assert loop.reader_ratio == (sum(waits) / len(waits) / (sum(batches) / len(batches)) if sum(waits) else None)


def test_a_step_begins_with_the_wait_for_its_input_and_side_by_side_steps_share_the_clock() -> None:
    spans = []
    for thread in (1, 2):
        for step in range(4):
            at = 100 * step
            spans += [made(NEXT, at, at + 40, thread=thread), made(TRAIN, at + 50, at + 100, thread=thread)]
        spans.append(made(NEXT, 400, 900, thread=thread))  # finds nothing more
    (loop,) = loops_of(trace_of(*spans))
    assert loop.reader is not None
    assert loop.batch is not None
    assert loop.rate is not None
    assert (loop.steps, loop.reader.mean, loop.batch.mean) == (8, 40 * MS, 100 * MS)
    assert loop.rate.mean == pytest.approx(8 / 0.4)


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 9)), min_size=1, max_size=9))
def test_samples_a_second_are_those_of_the_sum_and_of_each_step(steps: list[tuple[int, int]]) -> None:
    at_ns, spans = 0, []
    for size, samples in steps:
        spans.append(Span(TRAIN, 0, 0, 0, 1, 0, at_ns, at_ns + size, size, 0, attributes={"samples": samples}))
        at_ns += size
    (loop,) = loops_of(trace_of(*spans))
    each = [samples * 1e9 / size for size, samples in steps]
    assert loop.rate is not None
    assert (loop.samples, loop.rate_of) == (sum(samples for _, samples in steps), "samples")
    assert loop.rate.mean == pytest.approx(loop.samples * 1e9 / at_ns)
    assert [loop.rate.least, loop.rate.most] == pytest.approx([min(each), max(each)])


def test_steps_of_a_session_are_those_that_its_spans_say(tmp_path: Path) -> None:
    session = instrument.start()
    try:
        for batch in loader([1, 2, 3], "read"):
            with scope("train", kind="step"):
                list(loader([batch], "unpack"))
        (loop,) = session.views(["benchmark"])["benchmark"].loops  # type: ignore[attr-defined]
        trace, _ = chrome.load(session.dump(tmp_path / "t.json"))
    finally:
        instrument.stop()
    assert (loop.name, loop.steps, loop.rate_of) == ("train", 3, "steps")
    assert loop.reader is not None
    assert loops_of(trace) == (loop,)


@pytest.mark.slow
def test_a_profiler_counts_all_its_steps_and_a_window_those_in_it() -> None:
    @profiled("work")
    def work() -> None:
        pass

    with Profiler(schedule=(1, 3)) as profiler:
        for _ in range(14):
            work()
            profiler.step(num_samples=2)
    loop = profiler.benchmark()
    assert (loop.steps, loop.skipped, loop.samples) == (4, 10, 8)
    assert "4 steps timed, the first 10 skipped" in profiler.summary(views=["benchmark"])


def test_without_steps_it_says_how_to_get_some() -> None:
    views = (
        benchmark(Recording.from_trace(trace_of(made(WORK, 0, 1))), Options()),
        make_view(Benchmark(), Options()),
    )
    for view in views:
        assert isinstance(view, Loops)
        assert "No step was recorded. A step is the time between two calls of `Profiler.step()`" in text_of(view)
    document = summary_document(["benchmark"], Recording.from_trace(training()), Options())
    assert document["views"]["benchmark"]["loops"][0]["rate_of"] == "samples"
