"""The `kernels` view: whose kernels, how long, side by side or not, and from which span they were asked for."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from golden_views import is_golden, text_of
from hypothesis import given
from hypothesis import strategies as st
from kineto import BASE_NS, Kineto
from paddle_golden import GOLDEN, golden_trace

from instrument import chrome, cli
from instrument.errors import TraceError
from instrument.recording.spans import DeviceInterval, Kernel, Origin, Site, Span
from instrument.report.kernels_view import KERNELS, NOWHERE, SHARED, STRETCHES, UNKNOWN, Kernels, kernels
from instrument.report.table import LINE, measure_width
from instrument.report.view import Options, Recording, make_json_values
from instrument.trace.trace import Trace

US = 1_000
MS = 1_000_000
KIND = {"Kernel": "kernel", "Memcpy": "copy", "Memset": "fill"}


def view_of(trace: Trace, **options: Any) -> Kernels:
    return kernels(Recording.from_trace(trace), Options(**options))


def span(name: str, span_id: int, start_ns: int, end_ns: int, **facts: Any) -> Span:
    parent, root = facts.pop("parent", 0), facts.pop("root", span_id)
    thread, task, site = facts.pop("thread", 4321), facts.pop("task", 0), facts.pop("site", Site(name, "op"))
    active_ns = facts.pop("active_ns", end_ns - start_ns)
    return Span(site, span_id, parent, root, thread, task, start_ns, end_ns, active_ns, 0, **facts)


def trace_of(*spans: Span, end_ns: int = 100 * MS, **facts: Any) -> Trace:
    return Trace(Origin(4321, "shop", 0, BASE_NS), 0, end_ns, list(spans), {4321: "MainThread"}, **facts)


# ---------------------------------------------------------------- against Paddle's own tables


def paddle_kernels() -> list[Kernel]:
    found: list[Kernel] = []

    def walk(event: dict[str, Any], thread: int) -> None:
        for call in event["runtime"]:
            for work in call["device"]:
                times = (round(work[key] * MS) for key in ("start_ms", "end_ms"))
                launched_ns = round(call["start_ms"] * MS)
                found.append(
                    Kernel(
                        work["name"], KIND[work["type"]], work["device"], work["stream"], *times, thread, launched_ns
                    )
                )
        for child in event["children"]:
            walk(child, thread)

    for events in json.loads((GOLDEN / "paddle_synthetic_input.json").read_text()).values():
        for event in events:
            walk(event, event["tid"])
    return found


def paddle_trace() -> Trace:
    trace = golden_trace()
    trace.kernels, trace.watched = paddle_kernels(), (0, trace.end_ns)
    return trace


def paddle_rows() -> dict[str, list[str]]:
    """Name, calls and the figures of the Kernel Summary as Paddle printed it."""
    text = (GOLDEN / "paddle_synthetic_summary.txt").read_text().partition("Kernel Summary")[2].split("\n\n")[0]
    rows = {}
    for line in text.splitlines()[5:]:
        if line.startswith("-"):
            break
        name, calls, *figures = line[:90].strip(), line[90:].split()[0], *line[90:].split()[1::2]
        rows[name] = [calls, *figures]
    return rows


def test_totals_and_ratios_are_those_that_paddle_prints() -> None:
    view, printed = view_of(paddle_trace()), paddle_rows()
    assert len(printed) == 4
    ours = {}
    for use in view.kernels:
        times = [use.total_ns, use.mean_ns, use.max_ns, use.min_ns]
        ours[use.name] = [
            str(use.calls),
            *(f"{(time or 0) / MS:.2f}" for time in times),
            f"{100 * (use.ratio or 0):.2f}",
        ]
    # Paddle cuts the parameters off after template arguments.
    assert {name.replace("(float*, int)", ""): row for name, row in ours.items()} == printed


def test_the_sum_of_kernels_is_not_the_time_in_which_one_ran() -> None:
    view = view_of(paddle_trace())
    (gpu,) = view.devices
    assert (view.total_ns, gpu.busy_ns) == (120 * MS, 104 * MS)
    # Paddle's utilisation is of the time in steps, which is 180 of the 190 ms: 57.78 there.
    assert round(100 * gpu.busy_ns / (180 * MS), 2) == 57.78
    assert gpu.busy_ratio == 104 / 190
    assert [(one.kind, one.calls, one.total_ns) for one in view.others] == [("copy", 2, 6 * MS), ("fill", 2, MS)]


def test_each_kernel_belongs_to_the_operator_that_launched_it() -> None:
    """In Paddle's Operator Summary: the kernels below `conv2d compute`, `c_allreduce_sum compute` and the matmuls."""
    shown = {use.name: (use.kernels, use.total_ns // MS, use.heaviest) for use in view_of(paddle_trace()).places}
    assert shown == {
        "conv2d compute": (2, 20, "void conv_kernel<float, 3>(float*, int)"),
        "c_allreduce_sum compute": (2, 24, "ncclAllReduceRingLLKernel_sum_f32(ncclColl)"),
        "matmul_grad": (2, 56, "sgemm_128x64_nt"),
        "matmul dygraph": (2, 20, "sgemm_128x64"),
    }


def test_without_torch_the_stretches_of_our_spans_stand_in_and_say_so() -> None:
    view = view_of(golden_trace(launches=True))
    assert view.source == STRETCHES
    assert {use.name: use.total_ns // MS for use in view.kernels if "MEMSET" not in use.name} == {
        "sgemm_128x64_nt": 56, "ncclAllReduceRingLLKernel_sum_f32(ncclColl)": 24, "sgemm_128x64": 20,
        "void conv_kernel<float, 3>(float*, int)": 20,
    }  # fmt: skip
    assert "a row is a call's stretch of its stream, not a kernel" in text_of(view)


def test_torch_next_to_for_its_memory_alone_leaves_kernels_to_our_spans() -> None:
    trace = golden_trace(launches=True)
    trace.watched = (0, trace.end_ns)
    assert view_of(trace).source == STRETCHES


def test_the_place_of_a_launch_before_the_spans_that_are_kept_is_not_known() -> None:
    found = [Kernel("gemm", "kernel", 0, 7, at * MS, (at + 1) * MS, 4321, at * MS) for at in (5, 20)]
    trace = trace_of(span("step", 1, 0, 90 * MS), kernels=found, watched=(0, 90 * MS), held_from_ns=10 * MS)
    assert {use.name: use.kernels for use in view_of(trace).places} == {"step": 1, UNKNOWN: 1}


# ---------------------------------------------------------------- the text

GEMM = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(cutlass_80_simt_sgemm_256x128_8x4::Params)"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3>)"
)
MUL = ADD.replace("CUDAFunctor_add", "BinaryFunctor_mul")


def a_service_beside_torch(tmp_path: Path) -> Trace:
    """Two layers on one thread, two tasks that take turns on another, a kernel of a graph, and a copy."""
    ours = trace_of(
        span("handle", 1, 0, 90 * MS, site=Site("handle", "request")),
        span("", 2, 1 * MS, 30 * MS, parent=1, root=1, site=Site("Linear", "layer", instance="model.up")),
        span("", 3, 30 * MS, 60 * MS, parent=1, root=1, site=Site("Linear", "layer", instance="model.down")),
        span("serve", 4, 0, 50 * MS, thread=77, task=1),
        span("serve", 5, 10 * MS, 60 * MS, thread=77, task=2),
        span("tokens", 6, 60 * MS, 90 * MS, active_ns=20 * MS, thread=77),
    )
    file = Kineto()
    file.op("aten::linear", 2 * MS, 9 * MS)
    file.launch(GEMM, 2 * MS, 10 * MS, 30 * MS)
    file.launch(GEMM, 31 * MS, 40 * MS, 70 * MS)
    file.launch(ADD, 32 * MS, 40 * MS, 41 * MS, stream=9)
    file.launch(MUL, 33 * MS, 41 * MS, 42 * MS, stream=9)
    file.launch(ADD, 5 * MS, 42 * MS, 43 * MS, stream=9, thread=77)
    file.launch(ADD, 20 * MS, 43 * MS, 44 * MS, stream=9, thread=77)
    file.launch(MUL, 70 * MS, 71 * MS, 72 * MS, stream=9, thread=77)
    file.launch("in a graph", 0, 80 * MS, 82 * MS, thread=None)
    file.launch("Memcpy HtoD (Pageable -> Device)", MS, 5 * MS, 6 * MS, category="gpu_memcpy")
    file.launch("Memset (Device)", MS, 6 * MS, 7 * MS, category="gpu_memset")
    theirs, _ = chrome.load(file.save(tmp_path / "torch.json"))
    return chrome.join_torch_trace(ours, theirs)


def test_the_layout_of_a_service_with_torch(tmp_path: Path) -> None:
    assert is_golden("kernels", text_of(view_of(a_service_beside_torch(tmp_path))))


def test_the_layout_of_stretches() -> None:
    spans = [
        span("", 1, 0, 9 * MS, device=(DeviceInterval(0, 7, 1 * MS, 9 * MS),), site=Site("Model", "layer")),
        span("", 2, 0, 4 * MS, parent=1, root=1, device=(DeviceInterval(0, 7, 1 * MS, 4 * MS),),
             site=Site("Linear", "layer", instance="up")),
        span("", 3, 4 * MS, 9 * MS, parent=1, root=1, device=(DeviceInterval(0, 7, 4 * MS, 9 * MS),),
             site=Site("Linear", "layer", instance="down")),
        span("h2d", 4, 0, MS, device=(DeviceInterval(0, 7, 0, MS),), site=Site("memcpy h2d", "copy")),
    ]  # fmt: skip
    assert is_golden("kernels_of_events", text_of(view_of(trace_of(*spans, end_ns=10 * MS))))


def test_an_empty_view_says_why_and_what_to_do() -> None:
    assert "--with theirs.json" in text_of(view_of(trace_of()))
    assert "ProfilerActivity.CUDA" in text_of(view_of(trace_of(watched=(0, 5))))


def test_places_are_reported_by_thread_and_not_by_time_alone(tmp_path: Path) -> None:
    shown = {use.name: use.kernels for use in view_of(a_service_beside_torch(tmp_path)).places}
    # At 5 ms one task was open on thread 77, at 20 ms two were; at 70 ms only a generator, whose consumer may have
    # been at work. What ran then on the main thread has nothing to do with it.
    assert shown == {
        "Linear (model.up)": 1, "Linear (model.down)": 3, "serve": 1, SHARED: 1, NOWHERE: 1, UNKNOWN: 1,
    }  # fmt: skip


def test_options_bound_sort_and_scale_the_tables(tmp_path: Path) -> None:
    trace = a_service_beside_torch(tmp_path)
    lines = view_of(trace, rows=1, unit="us").lines()
    row = next(line.split() for line in lines if line.startswith("(remaining 3)"))
    assert row == ["(remaining", "3)", "6", "7000", "1167", "2000", "1000", "-", "12.3%"]
    assert "(remaining 2)" in "\n".join(view_of(trace, least_ns=3 * MS).lines())


@pytest.mark.parametrize(
    ("sorted_by", "order", "heading"),
    [
        ("default", "bca", "total time"),
        ("total", "bca", "total time"),
        ("calls", "bca", "number of calls"),
        ("max", "acb", "maximum time"),
        ("min", "acb", "minimum time"),
        ("ave", "acb", "average time"),
        ("gpu_total", "bca", "total time"),
        ("gpu_max", "acb", "maximum time"),
        ("gpu_ave", "acb", "average time"),
        ("gpu_min", "bca", "minimum time, least first"),
        ("cpu_total", "bca", "total time, for a kernel has no host time"),
        ("cpu_min", "bca", "total time, for a kernel has no host time"),
    ],
)
def test_kernels_are_sorted_as_asked_and_as_the_heading_says(sorted_by: str, order: str, heading: str) -> None:
    times = {"a": [9], "b": [3, 4, 5], "c": [6, 5]}
    ran = [
        Kernel(name, "kernel", 0, 7, at * 10 * MS, (at * 10 + took) * MS)
        for at, (name, took) in enumerate((name, took) for name in times for took in times[name])
    ]
    view = view_of(trace_of(kernels=ran, watched=(0, 100 * MS), end_ns=100 * MS), sorted_by=sorted_by)
    assert "".join(use.name for use in view.kernels) == order
    assert f"; sorted by {heading}\n" in text_of(view)


@pytest.mark.parametrize(
    "name",
    [
        ADD * 3,
        "x" * 300,
        "名前" * 80,
        "a\nb\x1b[31m",
        "f<g",
        "f>g(h)",
        ")",
        "",
        "(anonymous namespace)::f(int)",
        "k()" * 40,
    ],
)
def test_names_of_any_kind_keep_the_lines_whole(name: str) -> None:
    trace = trace_of(
        span(name, 1, 0, 9 * MS), watched=(0, 100 * MS),
        kernels=[Kernel(name, "kernel", 0, 7, MS, 2 * MS, 4321, MS), Kernel(name + "2", "kernel", 1, 7, MS, 3 * MS)],
    )  # fmt: skip
    lines = view_of(trace).lines()
    assert all(line.isprintable() and measure_width(line) <= LINE + 8 for line in lines), lines


def test_kernels_that_differ_in_their_template_arguments_are_distinguished() -> None:
    both = [Kernel(name, "kernel", 0, 7, at * MS, (at + 1) * MS) for at, name in enumerate((ADD, MUL))]
    lines = view_of(trace_of(kernels=both, watched=(0, 9 * MS))).lines()
    shown = [line.split("  ")[0] for line in lines if line.startswith("vectorized")]
    assert shown == [
        "vectorized_elementwise_kernel<4, Binar...har*, 3>>",
        "vectorized_elementwise_kernel<4, CUDAF...har*, 3>>",
    ]
    same = [Kernel(f"k<{'x' * 90}{at}{'y' * 90}>", "kernel", 0, 7, at, at + 1) for at in range(2)]
    lines = view_of(trace_of(kernels=same, watched=(0, 9 * MS))).lines()
    assert len({line.split("  ")[0] for line in lines if line.startswith("k<")}) == 2


# ---------------------------------------------------------------- every number, counted by hand


@st.composite
def recordings(draw: st.DrawFn) -> Trace:
    """Nested spans on two threads, and kernels of two devices that overlap, stick out and come from anywhere."""
    spans: list[Span] = []
    for thread in (1, 2):
        stack = [(0, 60, 0, 0)]
        for _ in range(draw(st.integers(0, 6))):
            first, last, parent, root = draw(st.sampled_from(stack))
            if last - first < 2:
                continue
            start = draw(st.integers(first, last - 1))
            end = draw(st.integers(start, last))
            if any(
                one.thread_id == thread
                and one.start_ns < end
                and start < one.end_ns
                and not (one.start_ns <= start and end <= one.end_ns)
                for one in spans
            ):
                continue  # fmt: skip
            spans.append(
                span(f"op {len(spans)}", len(spans) + 1, start, end, parent=parent, root=root or len(spans) + 1,
                     thread=thread)
            )  # fmt: skip
            stack.append((start, end, len(spans), root or len(spans)))
    found = []
    for _ in range(draw(st.integers(0, 12))):
        start = draw(st.integers(-5, 65))
        end = start + draw(st.integers(0, 20))
        found.append(
            Kernel(
                draw(st.sampled_from("abc")), draw(st.sampled_from(["kernel", "kernel", "copy", "fill"])),
                draw(st.integers(0, 1)), draw(st.integers(7, 8)), start, end, draw(st.sampled_from([0, 1, 2])),
                draw(st.integers(0, 60)),
            )
        )  # fmt: skip
    return trace_of(*spans, end_ns=60, kernels=sorted(found, key=lambda one: one.start_ns), watched=(0, 60))


def moments(parts: list[tuple[int, int]]) -> int:
    return len({moment for start, end in parts for moment in range(start, end)})


@given(recordings())
def test_every_number_is_that_of_a_count_by_hand(trace: Trace) -> None:
    view = view_of(trace)
    inside = [
        (one, (max(one.start_ns, 0), min(one.end_ns, 60)))
        for one in trace.kernels
        if (one.start_ns >= 0 and one.end_ns <= 60) or (one.start_ns < 60 and one.end_ns > 0)
    ]
    counted = [(one, part) for one, part in inside if one.kind == "kernel"]
    total = sum(end - start for _, (start, end) in counted)
    assert (view.source, view.calls, view.total_ns) == (KERNELS, len(counted), total)
    assert view.outside == len(trace.kernels) - len(inside)
    for use in view.kernels:
        own = [(one, part) for one, part in counted if one.name == use.name]
        lengths = [end - start for _, (start, end) in own]
        assert (use.calls, use.total_ns, use.max_ns, use.min_ns) == (len(own), sum(lengths), max(lengths), min(lengths))
        assert use.busy_ns == sum(moments([part for one, part in own if one.device == device]) for device in (0, 1))
        assert use.ratio == (use.total_ns / total if total else None)
    for gpu in view.devices:
        parts = [part for one, part in counted if one.device == gpu.device]
        assert (gpu.calls, gpu.total_ns) == (len(parts), sum(end - start for start, end in parts))
        assert gpu.busy_ns == moments(parts)
        assert gpu.busy_ratio == moments(parts) / 60
    for other in view.others:
        lengths = [end - start for one, (start, end) in inside if one.kind == other.kind]
        assert (other.calls, other.total_ns) == (len(lengths), sum(lengths))
        own = [(one, part) for one, part in inside if one.kind == other.kind]
        assert other.busy_ns == sum(moments([part for one, part in own if one.device == device]) for device in (0, 1))

    def place_of(one: Kernel) -> str:
        around = [each for each in trace.spans if each.thread_id == one.thread_id
                  and each.start_ns <= one.launched_ns < each.end_ns]  # fmt: skip
        innermost = max(around, key=lambda each: (each.start_ns, -each.end_ns, each.span_id), default=None)
        return UNKNOWN if not one.thread_id else NOWHERE if innermost is None else innermost.site.name

    by_place = Counter(place_of(one) for one, _ in counted)
    if any(one.thread_id for one, _ in counted):
        assert {use.name: use.kernels for use in view.places} == by_place
        assert sum(use.total_ns for use in view.places) == total
        for use in view.places:
            own = [(one, part) for one, part in counted if place_of(one) == use.name]
            assert use.total_ns == sum(end - start for _, (start, end) in own)
            assert use.busy_ns == sum(moments([part for one, part in own if one.device == device]) for device in (0, 1))
            assert use.ratio == (use.total_ns / total if total else None)
            heaviest = sum(end - start for one, (start, end) in own if one.name == use.heaviest)
            assert all(
                heaviest >= sum(end - start for one, (start, end) in own if one.name == name) for name in "abc"
            )  # fmt: skip
    assert json.dumps(make_json_values(view))


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 12), st.integers(0, 12)), max_size=9))
def test_only_the_innermost_device_intervals_count(drawn: list[tuple[int, int, int]]) -> None:
    parts = [(stream, min(a, b), max(a, b)) for stream, a, b in drawn]
    spans = [
        span(f"op {at}", at + 1, 0, 12, device=(DeviceInterval(0, stream, start, end),))
        for at, (stream, start, end) in enumerate(parts)
    ]
    view = view_of(trace_of(*spans, end_ns=12))
    for at, (stream, start, end) in enumerate(parts):
        encloses = any(
            other != at and on == stream and start <= first and last <= end and first < last
            and ((first, last) != (start, end) or other > at)
            for other, (on, first, last) in enumerate(parts)
        )  # fmt: skip
        # Empty ones enclose nothing and take no time.
        assert (f"op {at}" in {use.name for use in view.kernels}) == (not encloses or start == end)
    counted = {use.name: parts[int(use.name.split()[1])] for use in view.kernels}
    for use in view.kernels:
        _, start, end = counted[use.name]
        assert [use.calls, use.total_ns, use.max_ns, use.min_ns, use.busy_ns] == [1, *[end - start] * 4]
        assert use.ratio == (use.total_ns / view.total_ns if view.total_ns else None)
    assert view.total_ns == sum(end - start for _, start, end in counted.values())
    for gpu in view.devices:
        assert gpu.busy_ns == moments([(start, end) for _, start, end in counted.values()])


# ---------------------------------------------------------------- files


def test_a_trace_of_torch_alone_is_read_by_its_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = Kineto()
    file.op("aten::linear", 0, 40 * US)
    file.op("aten::addmm", 10 * US, 40 * US)
    file.launch(GEMM, 10 * US, 50 * US, 90 * US)
    assert cli.main(["report", str(file.save(tmp_path / "torch.json")), "--view", "kernels", "--unit", "us"]) == 0
    text = capsys.readouterr().out
    assert "From: a profiler that saw every kernel" in text
    assert "aten::addmm  1        40     40    100.0%" in text


def test_two_files_are_joined_by_the_wall_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = trace_of(span("engine.step", 1, 10**9 + 5 * MS, 10**9 + 9 * MS))
    # Our clock began 1 s before the base of the other file.
    ours.origin = Origin(4321, "shop", 0, BASE_NS - 10**9)
    ours.end_ns += 10**9
    saved = chrome.dump(tmp_path / "ours.json.gz", ours)
    file = Kineto()
    file.launch("gemm", 6 * MS, 7 * MS, 8 * MS)
    theirs = file.save(tmp_path / "torch.json")
    assert cli.main(["report", str(saved), "--with", str(theirs), "--view", "kernels", "--json"]) == 0
    view = json.loads(capsys.readouterr().out)["views"]["kernels"]
    assert [(use["name"], use["total_ns"]) for use in view["places"]] == [("engine.step", MS)]
    assert view["window"] == [10**9 + 6 * MS, 10**9 + 8 * MS]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("pid", "one process; they are of 4321 and 9"),
        ("time", "one time; ours is from 2026-10-01 .* torch.profiler from 2026-10-01"),
        ("order", "these are a trace of torch.profiler and a trace of instrument; give ours first"),
        ("nothing", "no kernels, no allocations.*profile_memory=True"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, change: str, told: str) -> None:
    file = Kineto(9 if change == "pid" else 4321)
    file.op("aten::mm", 0, 5)
    if change != "nothing":
        file.launch("gemm", MS, 2 * MS, (3 * 10**11 + 2 * MS) if change == "time" else 3 * MS)
    theirs, _ = chrome.load(file.save(tmp_path / "torch.json"))
    ours = trace_of(span("step", 1, 0, MS))
    if change == "time":
        ours.start_ns, ours.end_ns = 4 * 10**11, 5 * 10**11
    pair = (theirs, ours) if change == "order" else (ours, theirs)
    with pytest.raises(TraceError, match=told):
        chrome.join_torch_trace(*pair)


def test_the_record_of_torch_profiler_is_saved_and_read_back(tmp_path: Path) -> None:
    trace = a_service_beside_torch(tmp_path)
    again, _ = chrome.load(chrome.dump(tmp_path / "both.json.gz", trace))
    assert (again.watched, again.kernels, list(again.allocations)) == (trace.watched, trace.kernels, [])
