"""Floating-point operations: torch's own count from its traces, of every shape, and rows that count nothing twice."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from golden_views import is_golden, text_of
from hypothesis import given
from hypothesis import strategies as st
from kineto import BASE_NS, Kineto
from raw_spans import changed, traces

import instrument
from instrument import chrome, cli
from instrument.chrome.torch_traces import count_flops
from instrument.recording.spans import FLOPS, DeviceInterval, Flops, Origin, Site, Span
from instrument.report.operators_view import OPERATORS, FlopRow, Operators, make_flop_table, operators
from instrument.report.view import Options, Recording
from instrument.trace.trace import Trace

US, MS = 1_000, 1_000_000


@pytest.fixture(scope="module", autouse=True)
def late_imports() -> None:
    """Imported by the first test: this file is collected by every process of the tests and run by one."""
    global torch, flop_counter
    torch = pytest.importorskip("torch")
    flop_counter = pytest.importorskip("torch.utils.flop_counter")


def view(trace: Trace, **options: object) -> Operators:
    return operators(Recording.from_trace(changed(trace)), Options(**options))  # type: ignore[arg-type]


def rows(trace: Trace, **options: object) -> dict[str, FlopRow]:
    table = view(trace, **options).operations
    return {} if table is None else {row.name: row for row in table.rows}


# ---------------------------------------------------------------- torch's operators


def linear_and_convolutions() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(4, 8, 3, stride=2, padding=1),
        torch.nn.ConvTranspose2d(8, 4, 3, stride=2, dilation=2),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(10),
    )
    model(torch.randn(4, 4, 32, 32)).sum().backward()
    torch.nn.Conv1d(6, 4, 5, groups=2)(torch.randn(3, 6, 40))
    torch.nn.Conv3d(1, 2, 3)(torch.randn(1, 1, 8, 8, 8)).sum().backward()


def products() -> None:
    torch.randn(3, 4) @ torch.randn(4, 5)
    torch.einsum("bij,bjk->bik", torch.randn(2, 3, 4), torch.randn(2, 4, 5))
    torch.baddbmm(torch.randn(2, 3, 5), torch.randn(2, 3, 4), torch.randn(2, 4, 5))
    torch.nn.functional.linear(torch.randn(7, 3, 4), torch.randn(5, 4), torch.randn(5))


@pytest.mark.parametrize("work", [linear_and_convolutions, products])
def test_a_trace_of_torch_with_shapes_has_as_many_operations_as_torch_counts(
    work: Callable[[], None], tmp_path: Path
) -> None:
    with flop_counter.FlopCounterMode(display=False) as counter:
        work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        work()
    profile.export_chrome_trace(str(tmp_path / "torch.json"))
    trace, _ = chrome.load(tmp_path / "torch.json")
    table = view(trace).operations
    assert table is not None
    assert (table.flops, table.elsewhere) == (counter.get_total_flops(), 0)


Q, K = [2, 8, 16, 32], [2, 8, 48, 32]
CONVOLUTION = ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "2"]
BACKWARD = ["", "", "", "[8]", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "2", "[False, True, True]"]


@pytest.mark.parametrize(
    ("name", "shapes", "values", "expected"),
    [
        ("aten::mm", [[3, 4], [4, 5]], [], 120),
        ("aten::mv", [[3, 4], [4]], [], 24),
        ("aten::dot", [[5], [5]], [], 10),
        ("aten::addmm", [[5], [3, 4], [4, 5], [], []], [], 120),
        ("aten::bmm", [[2, 3, 4], [2, 4, 5]], [], 240),
        # A group of two channels for each of eight outputs, at 16 x 16 places, of a batch of four.
        ("aten::convolution", [[4, 4, 32, 32], [8, 2, 3, 3], [8]], CONVOLUTION, 2 * 4 * 256 * 8 * 2 * 9),
        # As many for the weight alone: torch 2.13 takes each of the four channels for each output, twice as many.
        (
            "aten::convolution_backward", [[4, 8, 16, 16], [4, 4, 32, 32], [8, 2, 3, 3]], BACKWARD,
            2 * 4 * 256 * 8 * 2 * 9,
        ),
        ("aten::_scaled_dot_product_flash_attention", [Q, K, K], [], 2 * 16 * 16 * 48 * 64),
        # Five products: the scores again, and the gradients of scores, values, queries and keys.
        ("aten::_scaled_dot_product_efficient_attention_backward", [Q, Q, K, K], [], 2 * 16 * 16 * 48 * 160),
        ("aten::mul", [[64, 32], [64, 32]], [], None),
        ("aten::mm", [[3, 4], [5, 6]], [], None),
        ("aten::mm", [[3, 4]], [], None),
        ("aten::mm", [[3, "4"], [4, 5]], [], None),
        ("aten::mm", [[3, -4], [-4, 5]], [], None),
        ("aten::mm", [[3, True], [True, 5]], [], None),
        ("aten::mm", [[1 << 40, 1 << 40], [1 << 40, 1]], [], None),
        ("aten::mm", "no shapes", [], None),
        ("aten::convolution", [[4, 4, 32, 32], [8, 2, 3, 3]], CONVOLUTION[:5], None),
        ("aten::convolution", [[4, 4, 32, 32], [8, 2, 3, 3]], [7] * 9, None),
        ("aten::convolution", [[4, 4, 1, 1], [8, 2, 9, 9]], CONVOLUTION, None),
        ("aten::convolution", [[4, 4], [8, 2]], CONVOLUTION, None),
        ("aten::convolution", [[4, 4, 32, 32], [8, 2, 3, 3]], [*CONVOLUTION[:3], "[0]", *CONVOLUTION[4:]], None),
        ("aten::bmm", [[1] * 62 + [3, 4], [1] * 62 + [4, 5]], [], 120),
        ("aten::bmm", [[1] * 63 + [3, 4], [1] * 63 + [4, 5]], [], None),
        ("aten::convolution_backward", [[4, 8, 16, 16], [4, 4, 32, 32], [8, 2, 3, 3]], BACKWARD[:-1], None),
        ("aten::_scaled_dot_product_flash_attention", [Q, K, Q], [], None),
    ],
)  # fmt: skip
def test_operations_follow_from_shapes_or_are_not_reported(
    name: str, shapes: Any, values: Any, expected: int | None
) -> None:
    assert count_flops(name, {"Input Dims": shapes, "Concrete Inputs": values}) == expected


WILD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.floats(),
    lambda one: st.lists(one),
    max_leaves=9,
)


@given(st.sampled_from(["aten::convolution", "aten::convolution_backward", "aten::addmm", "aten::dot"]), WILD, WILD)
def test_no_arguments_break_the_reader(name: str, shapes: Any, values: Any) -> None:
    found = count_flops(name, {"Input Dims": shapes, "Concrete Inputs": values})
    assert found is None or found > 0


# ---------------------------------------------------------------- rows


def nested() -> Kineto:
    """A product in a product's name, as operators lie in one another in torch's traces, and the kernel of one."""
    file = Kineto()
    shapes = {"Input Dims": [[8, 100, 100], [8, 100, 100]]}
    file.op("aten::linear", 0, 90 * US)
    file.op("aten::bmm", 10 * US, 60 * US, **shapes)
    file.op("aten::baddbmm", 20 * US, 30 * US, **{"Input Dims": [[], *shapes["Input Dims"]]})
    file.op("aten::mm", 100 * US, 140 * US, **{"Input Dims": [[100, 100], [100, 100]]})
    file.launch("gemm", 15 * US, 70 * US, 150 * US)
    file.op("aten::relu", 150 * US, 160 * US)
    return file


def test_the_outer_of_nested_operators_counts_with_its_kernels_time(tmp_path: Path) -> None:
    trace, _ = chrome.load(nested().save(tmp_path / "torch.json"))
    assert rows(trace) == {
        "aten::bmm": FlopRow("aten::bmm", "op", 1, 16_000_000, "GPU", 80 * US, 8 / 9),
        "aten::linear": FlopRow("aten::linear", "op", 1, 16_000_000, "GPU", 80 * US, 8 / 9),
        "aten::mm": FlopRow("aten::mm", "op", 1, 2_000_000, "CPU", 40 * US, 1 / 9),
    }
    found = rows(trace)
    assert [found[name].rate_gflop_s for name in ("aten::linear", "aten::mm")] == [200, 50]
    left = rows(trace, rows=1)[""]
    assert (left.remaining, left.calls, left.flops, left.ratio, left.rate_gflop_s) == (2, 2, 18_000_000, 1.0, None)


def test_the_layout_is_that_of_the_file(tmp_path: Path) -> None:
    trace, _ = chrome.load(nested().save(tmp_path / "torch.json"))
    assert is_golden("operators_flops", text_of(view(trace, unit="us")))


def test_the_document_has_the_numbers_of_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(nested().save(tmp_path / "torch.json"))
    assert cli.main(["report", file, "--view", "operators", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)["views"]["operators"]["operations"]
    assert (table["flops"], [row["rate_gflop_s"] for row in table["rows"]]) == (18_000_000, [200, 200, 50])


def ours() -> Trace:
    """Return a step with two layers on a thread. The second reports its operations itself."""
    sites = Site("step", "step"), Site("Linear", "layer", instance="a"), Site("Attention", "layer", instance="b")
    times = (0, 9), (1, 4), (5, 8)
    spans = [
        Span(site, number, number > 1, 1, 4321, 0, start * MS, end * MS, (end - start) * MS, 0)
        for number, (site, (start, end)) in enumerate(zip(sites, times, strict=True), 1)
    ]
    spans[2].attributes = {FLOPS: 3_000_000}
    spans[2].device = (DeviceInterval(0, 7, 5 * MS, 6 * MS),)
    return Trace(Origin(4321, "shop", 0, BASE_NS), 0, 10 * MS, spans, {4321: "main"})


def beside() -> Kineto:
    file = Kineto()
    file.op("aten::mm", 2 * MS, 3 * MS, **{"Input Dims": [[100, 100], [100, 100]]})
    file.op("aten::mm", 9 * MS + 1, 9 * MS + 2, **{"Input Dims": [[10, 10], [10, 100]]})
    return file


def test_a_trace_of_torch_reports_the_operations_of_our_spans(tmp_path: Path) -> None:
    """Operations outside of all spans are reported, and in no row."""
    theirs, _ = chrome.load(beside().save(tmp_path / "torch.json"))
    trace = chrome.join_torch_trace(ours(), theirs)
    table = view(trace).operations
    assert table is not None
    assert (table.flops, table.elsewhere) == (5_020_000, 20_000)
    assert [(row.name, row.flops, row.on, row.rate_gflop_s) for row in table.rows] == [
        ("Attention", 3_000_000, "GPU", 3.0), ("Linear", 2_000_000, "CPU", 2 / 3),
    ]  # fmt: skip
    assert "0.4% ran where no span was open, or those of several tasks: they are in no row." in text_of(view(trace))
    again, _ = chrome.load(chrome.dump(tmp_path / "both.json.gz", trace))
    assert list(again.flops) == trace.flops == [Flops(4321, 2 * MS, 2_000_000), Flops(4321, 9 * MS + 1, 20_000)]
    assert view(again).operations == table


def inside(*spans: tuple[Site, int | None, tuple[DeviceInterval, ...]]) -> Trace:
    """Return nested spans, each 10 ms shorter than the one around it, with their operations and device intervals."""
    found = [
        Span(site, number, number - 1, 1, 1, 0, 0, (100 - 10 * number) * MS, 0, 0, device=device)
        for number, (site, _, device) in enumerate(spans, 1)
    ]
    for span, (_, flops, _) in zip(found, spans, strict=True):
        span.attributes = {} if flops is None else {FLOPS: flops}
    return Trace(Origin(1, "shop", 0, 0), 0, 100 * MS, found, {1: "main"})


def test_the_outer_of_nested_scopes_of_one_name_counts_for_any_kind() -> None:
    mine = Site("mine", "user")
    found = rows(inside((Site("op", "op"), None, ()), (mine, 10, ()), (Site("other"), None, ()), (mine, 5, ())))
    assert found["mine"] == FlopRow("mine", "user", 1, 15, "CPU", 80 * MS, 1.0)


def test_a_scope_reports_its_own_operations_without_any_operator() -> None:
    """The documentation has such a scope of kind user."""
    text = text_of(view(inside((Site("attention", "user"), 3_000_000, ())), unit="us"))
    assert "No operator was recorded" in text
    assert "Time unit: us" in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("attention")]
    assert row == ["attention", "1", "3000000", "3000000", "100.0%", "CPU", "90000", "0.03333"]
    assert "Operations" not in text_of(view(inside((Site("attention", "user"), None, ()))))


def test_the_time_of_a_call_is_that_of_what_it_and_all_below_it_put_on_devices() -> None:
    """Each instant once; what was not timed is no time."""
    outer, inner = Site("outer", "layer"), Site("inner", "op")
    parts = DeviceInterval(0, 7, 5 * MS, 9 * MS), DeviceInterval(0, 8, 8 * MS, 12 * MS)
    untimed = DeviceInterval(0, 7, 0, 50 * MS, "captured")
    found = rows(inside((outer, None, (untimed,)), (inner, 7_000_000, parts[:1]), (Site("copy", "copy"), None, parts)))
    assert [(row.on, row.time_ns) for row in found.values()] == [("GPU", 7 * MS)] * 2
    assert found["outer"].rate_gflop_s == 1.0
    assert rows(inside((outer, 1, (untimed,))))["outer"].on == "CPU"


@pytest.mark.slow
def test_many_operators_deep_in_one_another_take_no_longer_for_it() -> None:
    """A list of the operators around each one would take gigabytes and minutes for a file of some MB."""
    depth, count = 4000, 20_000
    spans = [
        Span(Site(f"outer {at}", "op"), at, at - 1, 1, 7, 0, at, 10**9 - at, 10**9, 0) for at in range(1, depth + 1)
    ]
    site = Site("mm", "op")
    for at in range(depth + 1, depth + 1 + 2 * count, 2):
        spans.append(Span(Site("linear", "op"), at, depth, 1, 7, 0, at, at + 2, 2, 0))
        spans.append(Span(site, at + 1, at, 1, 7, 0, at, at + 1, 1, 0, attributes={FLOPS: 5}))
    trace = Trace(Origin(1, "shop", 0, 0), 0, 10**9, spans)
    tracemalloc.start()
    try:
        table = make_flop_table(Recording.from_trace(changed(trace)), Options(rows=1))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert table is not None
    assert [(row.flops, row.remaining) for row in table.rows] == [(5 * count, 0), (5 * count, depth + 1)]


def test_a_scope_reports_its_own_operations() -> None:
    session = instrument.start()
    try:
        assert session is not None
        with instrument.scope("attention", kind="op", attributes={"flops": 4_000}):
            pass
        with instrument.scope("gelu", kind="op", attributes={"flops": "many"}):
            pass
        assert {name: row.flops for name, row in rows(session.trace()).items()} == {"attention": 4_000}
    finally:
        instrument.stop()


@pytest.mark.parametrize("value", [True, "5", 5.0, 0, -5, 1 << 63, 10**400])
def test_operations_without_a_number_make_no_table(value: Any) -> None:
    trace = ours()
    spans = [*trace.spans]
    spans[2].attributes = {FLOPS: value}
    assert view(trace).operations is None
    assert "FLOPs" not in text_of(view(trace))


@pytest.mark.parametrize("value", ["many", -1, 10**400])
def test_an_argument_that_reports_nothing_hides_no_operators_below_it(value: Any, tmp_path: Path) -> None:
    file = nested()
    file.op("mine", -10 * US, 95 * US, flops=value)
    trace, _ = chrome.load(file.save(tmp_path / "torch.json"))
    table = view(trace).operations
    assert table is not None
    assert table.flops == 18_000_000
    chrome.load(chrome.dump(tmp_path / "both.json", chrome.join_torch_trace(ours(), trace)))


@given(traces(), st.lists(st.none() | st.integers(-1, 99), min_size=14, max_size=14), st.integers(1, 4))
def test_every_row_adds_up_what_is_in_its_calls(trace: Trace, told: list[int | None], limit: int) -> None:
    for span, flops in zip(trace.spans, told, strict=False):
        span.attributes = {} if flops is None else {FLOPS: flops}
    by_id = {span.span_id: span for span in trace.spans}
    first, last = trace.coverage
    expected: dict[tuple[str, str], list[tuple[Span, Span]]] = {}
    counted: list[Span] = []
    for span in trace.spans:
        flops = span.attributes.get(FLOPS)
        if not isinstance(flops, int) or flops <= 0 or not first <= span.start_ns < last:
            continue
        counted.append(span)
        up: Span | None = span
        outermost: dict[tuple[str, str], Span] = {}
        while up is not None and (up.thread_id, up.task_id) == (span.thread_id, span.task_id):
            key = up.site.name, up.site.kind
            if key == (span.site.name, span.site.kind) or up.site.kind in OPERATORS:
                outermost[key] = up
            up = by_id.get(up.parent_id)
        for key, call in outermost.items():
            expected.setdefault(key, []).append((span, call))
    table = view(trace).operations
    assert (table is None) == (not counted)
    if table is None:
        return
    whole = sum(int(str(span.attributes[FLOPS])) for span in counted)
    assert table.flops == whole
    assert {(row.name, row.kind): (row.flops, row.calls, row.ratio) for row in table.rows} == {
        key: (
            sum(int(str(span.attributes[FLOPS])) for span, _ in its), len({id(call) for _, call in its}),
            sum(int(str(span.attributes[FLOPS])) for span, _ in its) / whole,
        )
        for key, its in expected.items()
    }  # fmt: skip
    bounded = view(trace, rows=limit).operations
    assert bounded is not None
    assert sum(row.remaining or 1 for row in bounded.rows) == len(expected)
    if bounded.rows[-1].remaining:
        shown = {(row.name, row.kind) for row in bounded.rows}
        left = {id(span): span for key, its in expected.items() if key not in shown for span, _ in its}
        assert bounded.rows[-1].flops == sum(int(str(span.attributes[FLOPS])) for span in left.values())
