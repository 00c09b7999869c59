"""Traces that `paddle.profiler` exports: from Paddle's own file come the numbers of Paddle's own tables.

`golden/paddle_export.json.gz` is what Paddle 3.3.1 exported of three steps on the host, less the arguments that nobody
reads. `paddle_export_summary.txt` is what its `summary()` printed of the same steps.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from instrument import chrome
from instrument.recording.spans import HOST
from instrument.report.memory_view import memory
from instrument.report.operator_rows import CallTimes
from instrument.report.operators_view import operators, user
from instrument.report.phases_view import phases
from instrument.report.view import Options, Recording
from instrument.trace.trace import Allocation, Trace

GOLDEN = Path(__file__).parent / "golden"
OUR_PHASE = {
    "ProfileStep": "step",
    "Dataloader": "loader",
    "Forward": "forward",
    "Backward": "backward",
    "Optimization": "optimizer",
    "Others": "others",
}


@pytest.fixture
def exported() -> Trace:
    return chrome.load(GOLDEN / "paddle_export.json.gz")[0]


def printed(table: str) -> dict[str, list[str]]:
    """The rows of a table by name, those below another one by both names; the cells of times apart."""
    text = (GOLDEN / "paddle_export_summary.txt").read_text()
    (section,) = re.findall(
        rf"^-+{re.escape(table)}-+\n(.*?)(?:^-+\w[\w ()-]*Summary|\Z)", text, re.DOTALL | re.MULTILINE
    )
    rows: dict[str, list[str]] = {}
    above = ""
    for line in section.splitlines():
        found = re.match(r"( *)(\S.*?)  +(\S.*)", line)
        if found is None or "---" in line or found[2] in ("Name", "Note"):
            continue
        name = f"{above} > {found[2]}" if found[1] and table == "Operator Summary" else found[2]
        above = above if found[1] else found[2]
        rows[name] = re.split(r"\s+/?\s*", found[3])
    return rows


def cells(calls: int | None, times: CallTimes) -> list[str]:
    found = [times.total_ns, times.ave_ns, times.max_ns, times.min_ns]
    return [str(calls), *(f"{(one or 0) / 1e6:.2f}" for one in found)]


def test_its_phases_are_its_model_summary(exported: Trace) -> None:
    view = phases(Recording.from_trace(exported), Options())
    told = printed("Model Summary")
    assert [row.name for row in view.rows] == [OUR_PHASE[name] for name in told]
    for row, theirs in zip(view.rows, told.values(), strict=True):
        assert row.host.ratio is not None
        assert f"{row.host.total_ns / 1e6:.2f}" == theirs[1]
        assert f"{100 * row.host.ratio:.2f}" == theirs[5]
        if row.name != "others":
            times = row.host.mean_ns, row.host.max_ns, row.host.min_ns
            assert [str(row.calls), *(f"{(time or 0) / 1e6:.2f}" for time in times)] == [theirs[0], *theirs[2:5]]


def test_its_operators_and_their_parts_are_its_operator_summary(exported: Trace) -> None:
    (block,) = operators(Recording.from_trace(exported), Options(tracer_option="OpDetail", threads="merged")).blocks
    told = printed("Operator Summary")
    assert len(told) > 60
    ours: dict[str, list[str]] = {}
    above = ""
    for row in block.rows:
        assert row.cpu is not None
        above = above if row.depth else row.name
        assert row.cpu_ratio is not None
        ratio = f"{100 * row.cpu_ratio:.2f}"
        ours[f"{above} > {row.name}" if row.depth else row.name] = [*cells(row.calls, row.cpu), ratio]
    assert ours.items() >= {name: theirs[:6] for name, theirs in told.items() if "..." not in name}.items()


def test_the_user_summary_has_the_names_of_users(exported: Trace) -> None:
    (block,) = user(Recording.from_trace(exported), Options(threads="merged")).blocks
    ours = {row.name: cells(row.calls, row.cpu) for row in block.rows if row.cpu is not None}
    assert printed("UserDefined Summary")["DataPrepare"][:5] == ours["DataPrepare"]
    assert "memcpy_like" not in ours  # which is of its Memory Manipulation Summary
    copies = [span for span in exported.spans if span.site.kind == "copy"]
    told = printed("Memory Manipulation Summary")
    assert list(told) == [copies[0].site.name]
    assert [str(len(copies)), f"{sum(span.total_ns for span in copies) / 1e6:.2f}"] == told["memcpy_like"][:2]


def test_its_allocations_are_its_memory_summary(exported: Trace) -> None:
    view = memory(Recording.from_trace(exported), Options())
    told = printed("Memory Summary - Place(cpu)")
    peak = next(peak for peak in view.peaks if peak.what == "allocated")
    assert (peak.device, peak.peak_bytes) == (HOST, 634_624)  # as it prints above the table
    ours = {use.name: use for use in view.places}
    parts = {name: row for name, row in told.items() if name.endswith("kernel launch")}
    assert len(parts) > 10
    for name, (_, allocations, frees, allocated, freed, increase) in parts.items():
        use = ours[name]
        assert [use.allocations, use.frees] == [int(allocations), int(frees)]
        assert [use.allocated_bytes, use.freed_bytes, use.increase_bytes] == [int(allocated), int(freed), int(increase)]
    assert "all that its profiler saw" in "\n".join(view.lines())


def test_a_thread_has_one_lane_and_times_to_the_nanosecond(exported: Trace) -> None:
    assert sorted(exported.threads.values()) == ["thread 2703:MainThread", "thread 2782:Dataloader_140484181648208"]
    assert {span.total_ns for span in exported.spans if span.site.kind == "step"} >= {7_087_029}
    assert exported.losses == {}
    assert not any("[" in span.site.name for span in exported.spans)
    by_id = {span.span_id: span for span in exported.spans}
    for span in exported.spans:
        assert "start_time" not in span.attributes
        if span.site.kind == "op":  # of C++, within what Python called
            assert span.parent_id or exported.threads[span.thread_id] != "thread 2703:MainThread"
        if span.parent_id:
            assert by_id[span.parent_id].start_ns <= span.start_ns <= span.end_ns <= by_id[span.parent_id].end_ns


def load(tmp_path: Path, *events: dict[str, Any]) -> Trace:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": "1.0.2", "traceEvents": [*events, {}]}))
    return chrome.load(path)[0]


def slice_of(cat: str, name: str, tid: Any = "7(C++)", **more: Any) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": tid, "ts": 5, "dur": 2.5, "cat": cat, "name": name, **more}


@pytest.mark.parametrize(
    ("cat", "kind", "phase"),
    [
        ("Operator", "op", None),
        ("PythonOp", "op", None),
        ("OperatorInner", "phase", False),
        ("DygraphKernelLaunch", "phase", False),
        ("Forward", "phase", "forward"),
        ("Backward", "phase", "backward"),
        ("Optimization", "phase", "optimizer"),
        ("Dataloader", "loader", None),
        ("Communication", "comm", None),
        ("UserDefined", "user", None),
        ("PythonUserDefined", "user", None),
    ],
)
@pytest.mark.parametrize("took", ["[1.952 ms]", "[13.049 us]", ""])
@pytest.mark.parametrize("tid", ["7(Python)", 7])
def test_categories_are_our_kinds_and_names_are_without_times(
    tmp_path: Path, cat: str, kind: str, phase: object, took: str, tid: object
) -> None:
    (span,) = load(tmp_path, slice_of(cat, f"a [x]{took}", tid)).spans
    assert (span.site.name, span.site.kind, dict(span.site.attributes).get("phase")) == ("a [x]", kind, phase)
    assert (span.thread_id, span.total_ns) == (7, 2_500)


def test_each_call_is_one_of_the_same_row(tmp_path: Path) -> None:
    calls = [slice_of("Operator", f"conv2d dygraph[{took}]") for took in ("1.952 ms", "13.049 us")]
    assert len({span.site for span in load(tmp_path, *calls).spans}) == 1


def test_a_copy_is_one_with_its_direction(tmp_path: Path) -> None:
    names = ("GpuMemcpySync:GPU->CPU[1.2 us]", "GpuMemcpyAsync:CPU->GPU[1.2 us]", "GpuMemcpyAsync(same_gpu):GPU->GPU")
    spans = load(tmp_path, *(slice_of("UserDefined", name) for name in names)).spans
    assert [(span.site.kind, dict(span.site.attributes)) for span in spans] == [
        ("copy", {"direction": "d2h", "sync": True}),
        ("copy", {"direction": "h2d", "sync": False}),
        ("copy", {"direction": "d2d", "sync": False}),
    ]


def test_kernels_are_joined_to_the_calls_that_asked_for_them(tmp_path: Path) -> None:
    on_device = {"pid": 0, "tid": 13, "ts": 9, "dur": 4}
    trace = load(
        tmp_path,
        slice_of("CudaRuntime", "cudaLaunchKernel[2.500 us]", args={"correlation id": 11}),
        {
            **slice_of("Kernel", "gemm<float>[4.000 us]", args={"device": 0, "stream": 13, "correlation id": 11}),
            **on_device,
        },
        {**slice_of("Memset", "Memset[4.000 us]", args={"correlation id": 12}), **on_device},
        {**slice_of("Kernel", "no time: not Paddle's", args={"stream": 13, "correlation": 9}), **on_device},
    )
    assert [(one.name, one.kind, one.device, one.stream, one.thread_id, one.launched_ns) for one in trace.kernels] == [
        ("gemm<float>", "kernel", 0, 13, 7, 5_000),
        ("Memset", "fill", 0, 13, 0, 0),
    ]


def memory_event(**more: Any) -> dict[str, Any]:
    return {"ph": "i", "name": "[memory]", "pid": 1, "tid": "7(C++)", "ts": 5, "cat": "Allocate", **more}


@pytest.mark.parametrize(("place", "device"), [("Place(cpu)", HOST), ("Place(gpu_pinned)", HOST), ("Place(gpu:3)", 3)])
def test_memory_is_that_of_the_place_it_was_taken_at(tmp_path: Path, place: str, device: int) -> None:
    facts = {
        "place": place,
        "addr": "94300943572992",
        "increase_bytes": -64,
        "current_allocated": 10,
        "current_reserved": 20,
    }
    trace = load(tmp_path, slice_of("Operator", "a"), memory_event(args=facts, cat="Free"))
    assert list(trace.allocations) == [Allocation(device, 5_000, 7, -64, 94300943572992, 10, 20)]


@pytest.mark.parametrize("args", [{}, {"place": "Place(cpu)"}, {"place": 5, "increase_bytes": 1}, None, []])
def test_memory_without_a_size_is_counted_and_the_rest_is_read(tmp_path: Path, args: object) -> None:
    trace = load(tmp_path, slice_of("Operator", "a"), memory_event(args=args), memory_event(cat="ReservedFree"))
    assert len(trace.spans) == 1
    assert trace.losses == {"[memory] events without a size": 1}


def test_times_that_do_not_fit_the_slice_are_not_believed(tmp_path: Path) -> None:
    told = [{"start_time": "0.000 us", "end_time": "2.499 us"}, {"start_time": "900.000 us", "end_time": "901.000 us"}]
    told += [{"start_time": "x", "end_time": 7}, {"start_time": "3.000 us", "end_time": "1.000 us"}]
    spans = load(tmp_path, *(slice_of("Operator", "a", args=args) for args in told)).spans
    assert sorted((span.start_ns, span.end_ns) for span in spans) == [(5_000, 7_499), *[(5_000, 7_500)] * 3]
