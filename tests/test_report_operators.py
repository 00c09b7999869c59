"""The `operators` and `user` views: Paddle's tables where they are right, and every number from spans at random."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from golden_views import is_golden, text_of
from hypothesis import given
from hypothesis import strategies as st
from paddle_golden import GOLDEN, golden_trace
from raw_spans import above, changed, lies_in, points, timed, traces

from instrument.recording.spans import DeviceInterval, Origin, Site, Span
from instrument.report.operator_rows import REMAINING, CallRow, CallTimes
from instrument.report.operators_view import IN_ORDER, OPERATORS, Operators, User, operators, user
from instrument.report.overview_view import overview
from instrument.report.table import LINE, measure_width
from instrument.report.view import Options, Recording, make_json_values
from instrument.trace.trace import Trace

MS = 1_000_000


def view(trace: Trace, **options: object) -> Operators:
    return operators(Recording.from_trace(changed(trace)), Options(**options))  # type: ignore[arg-type]


def user_view(trace: Trace, **options: object) -> User:
    return user(Recording.from_trace(changed(trace)), Options(**options))  # type: ignore[arg-type]


# -------------------------------------------------------------------- Paddle's tables


def paddle_rows(file: str, table: str) -> dict[str, list[tuple[int, str, str, list[str], list[str]]]]:
    """Rows of a table in a golden summary by block: indent, name, calls, CPU cells and GPU cells."""
    text = (GOLDEN / file).read_text().split(f"{table} Summary-")[1].split("\n\n\n")[0]
    blocks: dict[str, list[tuple[int, str, str, list[str], list[str]]]] = {}
    name = ""
    for line in text.splitlines():
        if "Thread: " in line:
            name = line.strip("-").removeprefix("Thread: ")
            blocks[name] = []
        elif name and not line.startswith("-"):
            indent = len(line) - len(line.lstrip())
            cells = [cell for cell in line.strip().split("  ") if cell]
            parts = [[part.strip() for part in cell.split("/")] for cell in cells[2:4]]
            blocks[name].append((indent, cells[0], cells[1].strip(), *parts))
    return blocks


def as_paddle(times: CallTimes | None, ratio: float | None) -> list[str]:
    """Times and ratio as Paddle prints them; what has no device time is a zero there."""
    if times is None:
        return ["0.00"] * 5
    parts = (times.total_ns, times.ave_ns, times.max_ns, times.min_ns)
    return [f"{(part or 0) / MS:.2f}" for part in parts] + [f"{100 * (ratio or 0):.2f}"]


def test_every_operator_of_paddles_summary_has_its_numbers() -> None:
    """Its rows of kernels are our rows of streams, for a pair of events does not know the kernels' names."""
    (theirs,) = paddle_rows("paddle_synthetic_summary.txt", "Operator").values()
    (block,) = view(golden_trace(), tracer_option="OpDetail", threads="merged").blocks
    ours = [row for row in block.rows if row.cpu]
    expected = [row for row in theirs if row[3][0] != "-"]
    # Rows of the same time keep no order there.
    assert sorted(
        (2 * row.depth, row.name, str(row.calls), as_paddle(row.cpu, row.cpu_ratio), as_paddle(row.gpu, row.gpu_ratio))
        for row in ours
    ) == sorted(expected)
    assert [row.name for row in ours if row.depth == 0][::3] == ["conv2d dygraph", "matmul dygraph"]
    kernels = [row for row in theirs if row[3][0] == "-"]
    streams = [row for row in block.rows if not row.cpu]
    assert sum(float(row[4][0]) for row in kernels) == sum(row.gpu.total_ns for row in streams if row.gpu) / MS == 121
    assert (block.cpu_base_ns, block.gpu_base_ns) == (74 * MS, 121 * MS)


def test_threads_apart_sorted_by_gpu_time_are_paddles_blocks() -> None:
    theirs = paddle_rows("paddle_synthetic_summary_gputotal_nodetail_threadsep.txt", "Operator")
    ours = view(golden_trace(), threads="apart", sorted_by="gpu_total").blocks
    assert {
        str(block.thread): [
            (0, row.name, str(row.calls), as_paddle(row.cpu, row.cpu_ratio), as_paddle(row.gpu, row.gpu_ratio))
            for row in block.rows
        ]
        for block in ours
    } == theirs


def test_user_spans_are_paddles_but_their_share_is_of_the_window() -> None:
    """Paddle divides by the 180 ms in steps, although one of the three calls is between them: 3.33 %."""
    ((_, name, calls, cpu, _),) = next(iter(paddle_rows("paddle_synthetic_summary.txt", "UserDefined").values()))
    (block,) = user_view(golden_trace(), threads="merged").blocks
    (row,) = block.rows
    assert (row.name, str(row.calls), as_paddle(row.cpu, None)[:4], row.gpu) == (name, calls, cpu[:4], None)
    assert cpu[4] == "3.33"
    assert row.cpu_ratio == 6 / 190
    apart = user_view(golden_trace(), threads="apart").blocks
    assert [(block.thread, block.rows[0].calls) for block in apart] == [(100, 2), (200, 1)]


def test_an_operator_in_another_one_is_in_the_base_once() -> None:
    """Paddle's base would be 10 + 6 ms of host time, of which the outer operator is 62.5 %."""
    outer, inner = Site("outer", "op", device=True), Site("inner", "op", device=True)
    spans = [
        Span(outer, 1, 0, 1, 1, 0, 0, 10 * MS, 0, 0, device=(DeviceInterval(0, 7, 0, 8 * MS),)),
        Span(inner, 2, 1, 1, 1, 0, 0, 6 * MS, 0, 0, device=(DeviceInterval(0, 7, 1 * MS, 5 * MS),)),
    ]
    (block,) = view(Trace(Origin(1, "", 0, 0), 0, 10 * MS, spans)).blocks
    assert [(row.name, row.cpu_ratio, row.gpu_ratio) for row in block.rows] == [("outer", 1, 1), ("inner", 0.6, 0.5)]


# -------------------------------------------------------------------- every number, by brute force


def times_of(values: Sequence[int]) -> CallTimes | None:
    return CallTimes(sum(values), sum(values) / len(values), max(values), min(values)) if values else None


class Expected:
    """The expected rows of a trace, from sets of nanoseconds. Calls are cut to the window if there is one."""

    def __init__(self, trace: Trace, kinds: tuple[str, ...], window: tuple[int, int] | None = None) -> None:
        first, last = window or (-1000, 1000)
        self.spans = [span for span in trace.spans if lies_in(span, (first, last))]
        self.kinds, self.window = kinds, (first, last)
        self.by_id = {span.span_id: span for span in trace.spans}

    def host(self, span: Span) -> int:
        return min(span.end_ns, self.window[1]) - max(span.start_ns, self.window[0])

    def device(self, span: Span) -> list[tuple[int, int]]:
        return [
            interval
            for other in self.spans
            if span == other or span in above(other, self.by_id)
            for interval in timed(other, self.window)
        ]

    def row(self, calls: Iterable[Span], cpu_base: int, gpu_base: int, *, depth: int = 0) -> tuple[object, ...]:
        found = list(calls)
        host = [self.host(span) for span in found]
        gpu = [len(points(self.device(span))) for span in found]
        again = [depth == 0 and any(self.same(up, span) for up in above(span, self.by_id)) for span in found]
        has_device = any(self.device(span) for span in found)
        once = [sum(t for t, twice in zip(part, again, strict=True) if not twice) for part in (host, gpu)]
        return (
            len(found),
            times_of(host),
            times_of(gpu) if has_device else None,
            once[0] / cpu_base if cpu_base else None,
            once[1] / gpu_base if gpu_base and has_device else None,
        )

    @staticmethod
    def same(one: Span, other: Span) -> bool:
        return (one.site.name, one.site.kind) == (other.site.name, other.site.kind)

    def bases(self, thread: int | None) -> tuple[int, int]:
        outermost = [
            span
            for span in self.of(thread)
            if not any(up.site.kind in self.kinds for up in above(span, self.by_id))
        ]  # fmt: skip
        return sum(map(self.host, outermost)), sum(len(points(self.device(span))) for span in outermost)

    def of(self, thread: int | None) -> list[Span]:
        return [span for span in self.spans if span.site.kind in self.kinds and thread in (None, span.thread_id)]


def keyed(spans: Iterable[Span]) -> dict[tuple[str, str], list[Span]]:
    found: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        found.setdefault((span.site.name, span.site.kind), []).append(span)
    return found


def numbers(row: CallRow) -> tuple[object, ...]:
    return (row.calls, row.cpu, row.gpu, row.cpu_ratio, row.gpu_ratio)


@given(traces())
def test_every_number_is_that_of_the_raw_spans(trace: Trace) -> None:
    expected = Expected(trace, OPERATORS, trace.coverage)
    for block in view(trace, threads="both").blocks:
        assert (block.cpu_base_ns, block.gpu_base_ns) == expected.bases(block.thread)
        calls = keyed(expected.of(block.thread))
        bases = block.cpu_base_ns, block.gpu_base_ns
        assert {(row.name, row.kind): numbers(row) for row in block.rows} == {
            key: expected.row(spans, *bases) for key, spans in calls.items()
        }


@given(traces())
def test_rows_below_an_operator_are_those_of_the_raw_spans(trace: Trace) -> None:
    by_id = {span.span_id: span for span in trace.spans}
    # No call outlives the one around it until the window begins.
    kept = [
        span
        for span in trace.spans
        if not lies_in(span, trace.coverage) or all(lies_in(up, trace.coverage) for up in above(span, by_id)[:1])
    ]
    trace = replace(trace, spans=kept)
    expected = Expected(trace, OPERATORS, trace.coverage)
    for block in view(trace, threads="merged", tracer_option="OpDetail").blocks:
        below: dict[tuple[str, str], list[CallRow]] = {}
        for row in block.rows:
            if row.depth == 0:
                below[row.name, row.kind] = its = []
                whole = row
            else:
                its.append(row)
                assert not row.gpu or row.kind or row.depth == 2 or whole.gpu
        for key, spans in keyed(expected.of(None)).items():
            children = keyed(
                span
                for span in expected.spans
                if any(above(span, expected.by_id)[:1] == [one] for one in spans)
            )  # fmt: skip
            cpu_base = sum(map(expected.host, spans))
            gpu_base = sum(len(points(expected.device(span))) for span in spans)
            rows = [row for row in below[key] if row.depth == 1 and row.kind]
            assert {(row.name, row.kind): numbers(row) for row in rows} == {
                child: expected.row(its, cpu_base, gpu_base, depth=1) for child, its in children.items()
            }
            streams = [row for row in below[key] if row.depth == 1 and not row.kind]
            own = [
                (f"device {one.device}, stream {one.stream}", at)
                for span in spans
                for one in span.device
                for at in timed(replace(span, device=(one,)), trace.coverage)
            ]
            assert {(row.name, row.calls, row.gpu.total_ns) for row in streams if row.gpu} == {
                (
                    name,
                    sum(other == name for other, _ in own),
                    sum(end - start for other, (start, end) in own if other == name),
                )
                for name, _ in own
            }


@given(traces())
def test_user_spans_count_as_they_lie_in_the_window(trace: Trace) -> None:
    expected = Expected(trace, ("user",), trace.coverage)
    window_ns = trace.coverage[1] - trace.coverage[0]
    for block in user_view(trace).blocks:
        assert {row.name: numbers(row) for row in block.rows} == {
            name: expected.row(spans, window_ns, window_ns)
            for (name, _), spans in keyed(expected.of(block.thread)).items()
        }


@given(traces(), st.integers(1, 4), st.integers(0, 40))
def test_a_limit_leaves_nothing_out_of_the_sums(trace: Trace, rows: int, least_ns: int) -> None:
    whole, limited = (view(trace, threads="merged", **given) for given in ({}, {"rows": rows, "least_ns": least_ns}))
    for full, block in zip(whole.blocks, limited.blocks, strict=True):
        shown = [row for row in block.rows if not row.remaining]
        assert shown == [row for row in full.rows if max(total(row.cpu), total(row.gpu)) >= least_ns][:rows]
        for part in (lambda row: row.calls, lambda row: total(row.cpu), lambda row: total(row.gpu)):
            assert sum(map(part, full.rows)) == sum(map(part, block.rows))
        assert sum(row.remaining or 1 for row in block.rows) == len(full.rows)


@given(traces(), st.integers(1, 3))
def test_the_share_of_the_remaining_operators_counts_only_the_outermost_operators(trace: Trace, rows: int) -> None:
    expected = Expected(trace, OPERATORS, trace.coverage)
    for block in view(trace, threads="merged", rows=rows).blocks:
        shown = {(row.name, row.kind) for row in block.rows if not row.remaining}
        left_out = [span for span in expected.of(None) if (span.site.name, span.site.kind) not in shown]
        names = keyed(left_out)
        once = [
            span
            for span in left_out
            if not any((up.site.name, up.site.kind) in names for up in above(span, expected.by_id))
        ]
        cpu_ns, gpu_ns = sum(map(expected.host, once)), sum(len(points(expected.device(span))) for span in once)
        for row in block.rows:
            if row.remaining:
                assert row.cpu_ratio == (cpu_ns / block.cpu_base_ns if block.cpu_base_ns else None)
                has_device = any(expected.device(span) for span in left_out)
                assert row.gpu_ratio == (gpu_ns / block.gpu_base_ns if block.gpu_base_ns and has_device else None)


def test_operators_in_each_other_are_not_more_than_all_when_they_remain() -> None:
    first, outer, inner = (Site(name, "op") for name in ("first", "outer", "inner"))
    spans = [
        Span(first, 1, 0, 1, 1, 0, 0, 20 * MS, 0, 0),
        Span(outer, 2, 0, 2, 1, 0, 20 * MS, 30 * MS, 0, 0),
        Span(inner, 3, 2, 2, 1, 0, 20 * MS, 29 * MS, 0, 0),
    ]
    its = view(Trace(Origin(1, "", 0, 0), 0, 30 * MS, spans), rows=1)
    assert [(row.name, row.cpu_ratio) for row in its.blocks[0].rows] == [("first", 20 / 30), ("(remaining 2)", 10 / 30)]
    assert REMAINING in its.lines()


def total(times: CallTimes | None) -> int:
    return times.total_ns if times else 0


# -------------------------------------------------------------------- order


KEYS = {
    "default": "abc", "total": "abc", "calls": "cab", "max": "bac", "min": "bac", "ave": "bac",
    "cpu_total": "abc", "cpu_max": "bac", "cpu_min": "cab", "cpu_ave": "bac",
    "gpu_total": "cba", "gpu_max": "cba", "gpu_min": "acb", "gpu_ave": "bca",
}  # fmt: skip


@pytest.mark.parametrize("sorted_by", KEYS)
def test_rows_are_sorted_by_the_column_asked_least_first_for_the_least_of_each_part(sorted_by: str) -> None:
    host = {"a": [12, 18], "b": [25], "c": [2, 3, 4, 5]}
    device = {"a": [0, 2], "b": [4], "c": [5, 2, 2, 2]}
    spans: list[Span] = []
    for name, lengths in host.items():
        where = Site(name, "op")
        for length, took in zip(lengths, device[name], strict=True):
            on = (DeviceInterval(0, 7, 0, took),) if took else ()
            spans.append(Span(where, len(spans) + 1, 0, 0, 1, 0, 0, length, 0, 0, device=on))
    trace = Trace(Origin(1, "", 0, 0), 0, 100, spans)
    (block,) = view(trace, sorted_by=sorted_by).blocks
    assert "".join(row.name for row in block.rows) == KEYS[sorted_by]


def test_a_state_shows_its_own_columns_and_sorts_by_them() -> None:
    said = {}
    for state in ("CPU", "GPU", "All"):
        (block,) = view(golden_trace(), state=state, threads="merged").blocks
        text = text_of(view(golden_trace(), state=state, threads="merged"))
        said[state] = (block.rows[0].name, " CPU  " in text, " GPU  " in text)
    assert said == {
        "CPU": ("conv2d dygraph", True, False),
        "GPU": ("matmul_grad", False, True),
        "All": ("conv2d dygraph", True, True),
    }


# -------------------------------------------------------------------- the order of execution


def test_operators_are_numbered_in_the_order_of_execution_with_their_mean_over_timed_iterations() -> None:
    """SINGA divides by all iterations instead of the timed ones, and times nothing that is in something else."""
    order = view(golden_trace(), tracer_option="AllOpDetail").in_order
    assert order is not None
    assert (order.iteration, order.timed, order.skipped, order.cut) == ("step", 2, 0, 0)
    assert [(one.number, one.name, one.calls, one.on_device, one.mean_ns / MS) for one in order.operators] == [
        (0, "conv2d dygraph", 2, True, 10.5),
        (1, "matmul dygraph", 2, True, 10),
        (2, "matmul_grad", 2, True, 28),
        (3, "c_allreduce_sum", 2, True, 12),
        (4, "GpuMemcpySync:GPU->CPU", 2, True, 3),
    ]
    lines = view(golden_trace(), tracer_option="AllOpDetail").lines()
    assert "OP_ID2. matmul_grad : 0.028 sec" in lines
    assert "Iterations (step): 2 timed, 0 skipped as the first, 0 cut at the edge of the kept spans" in lines


@given(traces(), st.integers(0, 2))
def test_the_order_of_execution_is_that_of_the_raw_spans(trace: Trace, skip_first: int) -> None:
    order = view(trace, tracer_option="AllOpDetail", skip_first=skip_first).in_order
    if order is None:
        assert not any(span.site.kind in OPERATORS and lies_in(span, trace.coverage) for span in trace.spans)
        return
    by_id = {span.span_id: span for span in trace.spans}

    def upwards(span: Span) -> list[Span]:
        up = by_id.get(span.parent_id)
        return [] if up is None else [up, *upwards(up)]

    kinds = {span.site.kind for span in trace.spans}
    kind = next((one for one in ("step", "request") if one in kinds), "")
    topmost = [s for s in trace.spans if s.site.kind == kind and all(up.site.kind != kind for up in upwards(s))]
    topmost.sort(key=lambda span: (span.start_ns, span.span_id))
    first, last = trace.coverage
    whole = [span for span in topmost if first <= span.start_ns and span.end_ns <= last]
    timed_now = whole[skip_first:]
    assert (order.iteration, order.timed, order.skipped, order.cut) == (
        kind, len(timed_now), len(whole) - len(timed_now), len(topmost) - len(whole),
    )  # fmt: skip
    inside = [s for s in trace.spans if any(one in timed_now for one in (s, *upwards(s)))]
    expected = Expected(replace(trace, spans=inside), IN_ORDER)
    listed: dict[tuple[object, ...], list[Span]] = {}
    for span in inside:
        if span.site.kind in IN_ORDER:
            around = [up for up in upwards(span) if up in inside]
            listed.setdefault(tuple(one.site.key for one in (span, *around)), []).append(span)
    wanted = []
    for spans in listed.values():
        on_device = any(expected.device(span) for span in spans)
        took = [len(points(expected.device(span))) if on_device else span.total_ns for span in spans]
        site = spans[0].site
        depth = sum(up.site.kind in IN_ORDER for up in upwards(spans[0]) if up in inside)
        facts = (site.name, site.instance, site.kind, depth, len(spans), on_device)
        wanted.append((*facts, sum(took), sum(took) / len(timed_now)))
    ours = [
        (one.name, one.instance, one.kind, one.depth, one.calls, one.on_device, one.total_ns, one.mean_ns)
        for one in order.operators
    ]  # fmt: skip
    assert sorted(ours) == sorted(wanted)
    assert [one.number for one in order.operators] == list(range(len(ours)))


def requests(count: int) -> Trace:
    """Requests of 10 ms on two threads by turns, each with an operator of its number in ms, the first one cut."""
    request, first, second = Site("handle", "request"), Site("first", "op"), Site("second", "layer", instance="m.0")
    spans: list[Span] = []
    for index in range(count):
        start, thread, root = index * 10 * MS, 1 + index % 2, len(spans) + 1
        spans += [
            Span(request, root, 0, root, thread, 0, start, start + 10 * MS, 0, 0, clipped=index == 0),
            Span(second, root + 1, root, root, thread, 0, start + 5 * MS, start + 6 * MS, 0, 0),
            Span(first, root + 2, root, root, thread, 0, start, start + index * MS // 2, 0, 0),
        ]
    return Trace(Origin(1, "", 0, 0), 0, count * 10 * MS, spans)


def test_the_first_iterations_can_be_skipped_and_what_is_cut_is_never_timed() -> None:
    order = view(requests(8), tracer_option="AllOpDetail", skip_first=2).in_order
    assert order is not None
    assert (order.iteration, order.timed, order.skipped, order.cut) == ("request", 5, 2, 1)
    assert [(one.name, one.calls, one.total_ns, one.mean_ns) for one in order.operators] == [
        ("first", 5, (3 + 4 + 5 + 6 + 7) * MS // 2, 2.5 * MS),
        ("second", 5, 5 * MS, MS),
    ]


def test_skipping_all_iterations_divides_by_none() -> None:
    lines = view(requests(3), tracer_option="AllOpDetail", skip_first=5).lines()
    assert "Iterations (request): 0 timed, 2 skipped as the first, 1 cut at the edge of the kept spans" in lines
    assert "None is left to be timed." in lines


def test_without_a_request_or_step_it_says_what_to_do() -> None:
    trace = requests(2)
    for span in trace.spans:
        span.site = replace(span.site, kind="op") if span.site.kind == "request" else span.site
    lines = view(trace, tracer_option="AllOpDetail").lines()
    assert "No iteration was recorded: open one with scope(..., kind='step'), or name the requests." in lines


# -------------------------------------------------------------------- the text


def test_layout() -> None:
    is_golden("operators", text_of(view(golden_trace(), tracer_option="AllOpDetail", rows=3)))
    is_golden("user", text_of(user_view(golden_trace(), unit="us")))


HOSTILE = [
    "x" * 300, "a\nb", "", " ", "\x1b[2J", "測" * 80, "conv/compute", "50%", '"quoted"', "e\u202egnp", "(remaining 2)",
]  # fmt: skip


def test_hostile_names_keep_to_the_line() -> None:
    spans = []
    for index, name in enumerate(HOSTILE):
        device = (DeviceInterval(index, 10**6, 0, 10**15),)
        on = Site(name, "op", instance=name)
        spans.append(Span(on, 3 * index + 2, 1, 1, 1, 0, index, 10**15, 0, 0, device=device))
        below, mine = Site(name, "phase"), Site(name, "user")
        spans.append(Span(below, 3 * index + 3, 3 * index + 2, 1, 1, 0, index, index + 10**14 // 7, 0, 0))
        spans.append(Span(mine, 3 * index + 4, 3 * index + 2, 1, 1, 0, index, index + 10**14 // 7, 0, 0))
    spans.append(Span(Site("s", "step"), 1, 0, 1, 1, 0, 0, 10**15, 0, 0))
    trace = Trace(Origin(1, "", 0, 0), 0, 10**15, spans, {1: "line\nbreak" * 20})
    for lines in (view(trace, tracer_option="AllOpDetail", unit="ns").lines(), user_view(trace, unit="ns").lines()):
        assert all(line.isprintable() and measure_width(line) <= LINE for line in lines), max(lines, key=measure_width)


def test_without_spans_both_say_what_to_do() -> None:
    trace = Trace(Origin(1, "", 0, 0), 0, 5, [])
    assert text_of(view(trace)).splitlines()[-1] == (
        "No operator was recorded: give functions and layers in the profile (functions:, layers:)."
    )
    assert text_of(user_view(trace)).splitlines()[-1] == (
        "No span of kind user was recorded: open one with scope(name), or give a rule that kind."
    )


def test_operators_are_counted_in_the_time_that_the_overview_is_of() -> None:
    spans = [Span(Site("f", "layer"), n, 0, n, 1 + n % 2, 0, n * 10, n * 10 + 6, 6, 6) for n in range(1, 11)]
    trace = Trace(Origin(1, "", 0, 0), 0, 120, spans, held_from_ns=73)
    (block,) = view(trace, threads="merged").blocks
    (row,) = block.rows
    assert row.calls == overview(Recording.from_trace(changed(trace)), Options()).kinds[0].calls == 4
    assert row.cpu is not None
    assert (row.cpu.total_ns, row.cpu.min_ns) == (3 + 3 * 6, 3)


def test_the_document_holds_the_numbers_of_the_text() -> None:
    said = json.loads(json.dumps(make_json_values(view(golden_trace(), tracer_option="AllOpDetail", threads="merged"))))
    assert said["blocks"][0]["rows"][0]["cpu"] == {
        "total_ns": 26 * MS, "ave_ns": 26 * MS / 3, "max_ns": 10 * MS, "min_ns": 8 * MS,
    }  # fmt: skip
    assert said["in_order"]["timed"] == 2


def test_a_damaged_files_circle_of_parents_is_refused() -> None:
    spans = [
        Span(Site("f", "op"), 1, 2, 1, 1, 0, 0, 10, 0, 0, device=(DeviceInterval(0, 7, 0, 5),)),
        Span(Site("g", "op"), 2, 1, 1, 1, 0, 0, 10, 0, 0, device=(DeviceInterval(0, 7, 2, 6),)),
        Span(Site("h", "op"), 3, 3, 1, 1, 0, 0, 10, 0, 0),
    ]
    with pytest.raises(ValueError, match="a span in it is its own ancestor"):
        Trace(Origin(1, "", 0, 0), 0, 10, spans)
