"""The `events` view: its numbers against Paddle's own report, its layout, and that no tally or name breaks it."""

from __future__ import annotations

import dataclasses
import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from golden_views import is_golden, of_tally, text_of
from hypothesis import given
from hypothesis import strategies as st
from interval_lists import elapsed_ns
from raw_spans import counted, counted_paths, traces
from tallies import Tally, Totals, made
from tallies import rows_of as lines_of

from instrument.profile.model import SORT_KEYS, STATES, TRACER_OPTIONS
from instrument.recording.distributions import bucket_of
from instrument.recording.spans import Cost, DeviceInterval, Site, Span
from instrument.report.event_rows import EventRow
from instrument.report.events_view import Events, events
from instrument.report.section import format_summary
from instrument.report.table import (
    LINE,
    compact_number,
    make_table_lines,
    measure_width,
    printable,
    shorten,
    shorten_distinctly,
)
from instrument.report.view import THREADS, Options, Recording, make_json_values
from instrument.trace.trace import Trace

GOLDEN = Path(__file__).parent / "golden" / "fluid185_All_OpDetail_total_compiled.txt"
CELLS = ["Calls", "Total", "Min.", "Max.", "Ave.", "Ratio.", "p50", "p99"]
FLUID_CELLS = ["Calls", "Total", "CPU Time (Ratio)", "GPU Time (Ratio)", "Min.", "Max.", "Ave.", "Ratio."]

CallPath = tuple[Site, ...]


def count(
    tally: Tally,
    path: CallPath,
    total_ms: float,
    *,
    calls: int = 1,
    device_ms: float = 0.0,
    elapsed_ms: float | None = None,
    min_ms: float | None = None,
    max_ms: float | None = None,
    first_ns: int | None = None,
    thread: int = 1,
) -> None:
    """Count `calls` spans of one path; each is as long as their mean unless extremes are given."""
    elapsed = ns(total_ms if elapsed_ms is None else elapsed_ms)
    mean = elapsed // calls if calls else 0
    tally.totals(path, thread).merge(
        Totals(
            calls=calls,
            total_ns=ns(total_ms),
            self_ns=ns(total_ms),
            device_ns=ns(device_ms),
            elapsed_ns=elapsed,
            min_ns=mean if min_ms is None else ns(min_ms),
            max_ns=mean if max_ms is None else ns(max_ms),
            first_ns=len(tally) if first_ns is None else first_ns,
            histogram={bucket_of(mean): calls},
        )
    )


def ns(value_ms: float) -> int:
    return round(value_ms * 1e6)


def op(name: str, instance: str = "") -> Site:
    return Site(name, kind="op", instance=instance)


def layer(name: str, path: str) -> Site:
    return Site(name, kind="layer", instance=path)


def phase(name: str) -> Site:
    return Site(name, kind="phase")


def declared(name: str, as_phase: str) -> Site:
    return Site(name, kind="phase", attributes=(("phase", as_phase),))


def copy(direction: str, *, sync: bool) -> Site:
    return Site("copy", kind="copy", attributes=(("direction", direction), ("sync", sync)))


def view_of(tally: Tally, **options: object) -> Events:
    return events(of_tally(tally), Options(**options))


def report_of(tally: Tally, **options: object) -> str:
    return text_of(view_of(tally, **options))


def rows_of(tally: Tally, **options: object) -> list[EventRow]:
    return [row for block in view_of(tally, **options).blocks for row in block.rows]


def screen(text: str) -> str:
    """A line as a terminal lays it out: a wide character fills two cells."""
    return "".join(char + "\0" * (measure_width(char) - 1) for char in text)


def table_lines(report: str, section: str = "Event Summary") -> list[str]:
    """Header and rows of a table of events."""
    after = report.split(section, 1)[1].split("\n", 2)[2]
    return after.split("\n\n", 1)[0].splitlines()


def table_rows(report: str, section: str = "Event Summary") -> list[dict[str, str]]:
    """The cells of a table of events by column; `Event` keeps its indent."""
    header, *lines = (screen(line) for line in table_lines(report, section))
    found = [(m[0], m.start()) for m in re.finditer(r"(?:CPU|GPU) Time \(Ratio\)|\S+", header)]
    ends = [start for _, start in found[1:]] + [None]
    return [{name: line[start:end].rstrip() for (name, start), end in zip(found, ends, strict=True)} for line in lines]


def part_rows(report: str) -> list[dict[str, str]]:
    return table_rows(report, "Host and Device Time")


def reports(text: str) -> list[str]:
    """The reports of a text, each from its title on."""
    return re.split(r"-+>     Profiling Report     <-+\n", text)[1:]


def depth_of(cell: str) -> int:
    return (len(cell) - len(cell.lstrip())) // 2


# The report that Paddle 1.8.5 printed for three threads of a compiled program.


def without_tag(cell: str) -> str:
    return re.sub(r"^( *)thread\d+::", r"\1", cell)


def tally_of_paddle() -> Tally:
    """The per-thread half of the golden report as a tally; its threads are listed newest first."""
    tally = Tally({thread: f"worker {thread}" for thread in range(3)})
    path: CallPath = ()
    thread = -1
    for row in table_rows(reports(GOLDEN.read_text())[1]):
        name, depth = without_tag(row["Event"]).strip(), depth_of(row["Event"])
        if depth == 0:
            thread = int(re.match(r"thread(\d+)::", row["Event"])[1])
        parent = path[:depth]
        is_phase = depth > 0 and name.startswith(parent[-1].name + "/")
        path = (*parent, phase(name.split("/")[1]) if is_phase else op(name))
        count(
            tally,
            path,
            float(row["Total"]),
            calls=int(row["Calls"]),
            min_ms=float(row["Min."]),
            max_ms=float(row["Max."]),
            thread=thread,
        )
    return tally


def in_fluids_digits(row: EventRow) -> dict[str, str]:
    """A row's numbers as fluid prints them."""
    times = {"Total": row.total_ns, "Min.": row.min_ns, "Max.": row.max_ns, "Ave.": row.ave_ns}
    parts = {"CPU Time (Ratio)": (row.host_ns, row.host_ratio), "GPU Time (Ratio)": (row.device_ns, row.device_ratio)}
    return {
        "Calls": str(row.calls),
        **{name: f"{time_ns / 1e6:g}" for name, time_ns in times.items()},
        **{name: f"{part_ns / 1e6:f} ({ratio:f})" for name, (part_ns, ratio) in parts.items()},
        "Ratio.": f"{row.ratio:g}",
    }


@pytest.mark.parametrize(("index", "rows"), [(0, 43), (1, 83)], ids=["merged", "per thread"])
def test_every_number_of_paddles_own_report_is_reproduced_in_its_order(index: int, rows: int) -> None:
    """The objects agree to Paddle's six digits and the text to four, in a line of 100 columns instead of 160.

    The report of `instrument` differs on purpose. It has two columns more, p50 and p99. A phase row does not repeat the
    thread's tag. The times of host and device are a table of the rows that have both. One average, 0.071905 / 4, is
    halfway between two numbers of six digits: the sum of doubles rounds up.
    """
    view = view_of(tally_of_paddle(), tracer_option="OpDetail", sorted_by="total")
    ours = table_rows(reports(text_of(view))[index])
    objects = [row for block in view.blocks if (block.thread is None) is (index == 0) for row in block.rows]
    theirs = table_rows(reports(GOLDEN.read_text())[index])
    assert list(ours[0]) == ["Event", *CELLS]
    assert len(theirs) == rows
    for our, row, their in zip(ours, objects, theirs, strict=True):
        name = their["Event"] if depth_of(their["Event"]) == 0 else without_tag(their["Event"])
        before = re.match(r" *(thread\d+::)?", name)[0]
        room = measure_width(our["Event"]) - len(before)
        assert our["Event"] == before + shorten(name[len(before) :], room)
        expected = {key: their[key].replace("0.0179763", "0.0179762") for key in FLUID_CELLS}
        assert in_fluids_digits(row) == expected
        shown = {key: compact_number(float(expected[key])) for key in ("Total", "Min.", "Max.", "Ave.")}
        shown |= {"Calls": expected["Calls"], "Ratio.": compact_number(float(expected["Ratio."]), 6)}
        assert {key: our[key] for key in shown} == shown
    assert max(map(measure_width, text_of(view).splitlines())) <= LINE


def test_the_sections_of_paddles_own_report_are_reproduced_to_the_letter() -> None:
    merged, apart = reports(report_of(tally_of_paddle(), tracer_option="OpDetail", sorted_by="total"))
    for line in [
        "Note! This Report merge all thread info into one.",
        "Place: All",
        "Time unit: ms",
        "Total time: 1.95067",
        "  Computation time       Total: 0.385394    Ratio: 19.757%",
        "  Framework overhead     Total: 1.56528     Ratio: 80.243%",
        "-------------------------     GpuMemCpy Summary     -------------------------",
        "GpuMemcpy                Calls: 0           Total: 0           Ratio: 0%",
        "-------------------------       Event Summary       -------------------------",
    ]:
        assert line in GOLDEN.read_text().splitlines()
        assert line in merged.splitlines()
    assert "Sorted by total time in descending order in the same thread" in apart.splitlines()
    assert "Overhead Summary" not in apart
    assert "Note!" not in apart


# The report that the fluid documentation prints for two threads, with device time.


def tally_of_the_fluid_document() -> Tally:
    """CPU and GPU time as printed, one after the other; the phases it hides carry the computation time it prints."""
    tally = Tally({10: "main", 11: "worker"})
    fetch = op("Fetch")
    for thread, path, cpu, gpu in [
        (10, (op("FastThreadedSSAGraphExecutorPrepare"),), 6.076904, 0.012608),
        (10, (copy("h2d", sync=False),), 0.700705, 0.002304),
        (11, (op("mul"),), 0.211977, 0.007520),
        (11, (op("mul"), phase("compute")), 0.142480, 0.007520),
        (11, (op("elementwise_add"),), 0.105905, 0.002112),
        (11, (op("elementwise_add"), phase("compute")), 0.073046, 0.002112),
        (11, (fetch,), 0.100142, 0.002495),
        (11, (fetch, copy("d2h", sync=False)), 0.042086, 0.002495),
        (11, (op("mean"),), 0.061234, 0.003488),
        (10, (op("InitLocalVars"),), 0.006395, 0),
        (11, (op("eager_deletion"),), 0.006166, 0),
        (10, (op("ScopeBufferedMonitor::post_local_exec_scopes_process"),), 0.005985, 0),
        (10, (op("ScopeBufferedMonitor::pre_local_exec_scopes_process"),), 0.003467, 0),
    ]:
        count(tally, path, cpu, device_ms=gpu, elapsed_ms=cpu + gpu, thread=thread)
    return tally


def test_the_fluid_documents_example_has_its_totals_ratios_and_copies() -> None:
    merged, apart = reports(report_of(tally_of_the_fluid_document(), sorted_by="total"))
    for line in [
        "Total time: 7.30941",
        "  Computation time       Total: 0.225158    Ratio: 3.08039%",
        "  Framework overhead     Total: 7.08425     Ratio: 96.9196%",
        "GpuMemcpy                Calls: 2           Total: 0.74759     Ratio: 10.2278%",
        "  GpuMemcpyAsync         Calls: 2           Total: 0.74759     Ratio: 10.2278%",
    ]:
        assert line in merged.splitlines()
    assert "GpuMemcpySync" not in merged
    printed = [(row["Event"], row["CPU Time (Ratio)"], row["GPU Time (Ratio)"]) for row in part_rows(merged)]
    assert printed[:7] == [
        ("FastThreadedSSAGraphExecutorPrepare", "6.076904 (0.997930)", "0.012608 (0.002070)"),
        ("GpuMemcpyAsync:CPU->GPU", "0.700705 (0.996723)", "0.002304 (0.003277)"),
        ("mul", "0.211977 (0.965740)", "0.007520 (0.034260)"),
        ("elementwise_add", "0.105905 (0.980448)", "0.002112 (0.019552)"),
        ("Fetch", "0.100142 (0.975691)", "0.002495 (0.024309)"),
        ("  GpuMemcpyAsync:GPU->CPU", "0.042086 (0.944034)", "0.002495 (0.055966)"),
        ("mean", "0.061234 (0.946108)", "0.003488 (0.053892)"),
    ]
    expected = [0.833106, 0.0961787, 0.0300294, 0.0147778, 0.0140418, 0.00609913, 0.00885462]
    objects = view_of(tally_of_the_fluid_document(), sorted_by="total").blocks
    assert [float(f"{row.ratio:g}") for row in objects[0].rows[:7]] == expected
    assert [row["Ratio."] for row in table_rows(merged)[:7]] == [compact_number(ratio, 6) for ratio in expected]
    assert [(row["Event"], row["Ratio."]) for row in table_rows(apart)][:4] == [
        ("thread1::mul", "0.4381"),
        ("thread1::elementwise_add", "0.2156"),
        ("thread1::Fetch", "0.2048"),
        ("  GpuMemcpyAsync:GPU->CPU", "0.089"),
    ]
    ours = [f"{row.ratio:g}" for row in objects[1].rows[:4]]
    assert ours == ["0.438084", "0.215586", "0.204848", "0.0889771"]
    assert "thread1: worker (id 11), Total time: 0.501039" in apart.splitlines()


# The shapes that the options give one tree.


def tally_of_two_slices() -> Tally:
    """A request with two instances of slice, each copying in two of its phases, and a block with a nested operator."""
    tally = Tally({1: "main"})
    request = Site("request", kind="request")
    block = op("block", "b")
    count(tally, (request,), 20)
    for instance, scale in (("x", 2), ("y", 1)):
        path = (request, op("slice", instance))
        count(tally, path, 4 * scale, calls=2)
        count(tally, (*path, phase("prepare_data")), scale, calls=2)
        count(tally, (*path, phase("prepare_data"), copy("h2d", sync=True)), scale / 2, calls=2)
        count(tally, (*path, phase("compute")), 2 * scale, calls=2)
        count(tally, (*path, phase("compute"), copy("h2d", sync=True)), scale / 4, calls=2)
    count(tally, (request, block), 3)
    count(tally, (request, block, op("assign", "a")), 1)
    return tally


SHAPES = {
    "Default": """
        thread0::request                 1    20
          slice                          4    12
            GpuMemcpySync:CPU->GPU       8    2.25
          block                          1    3
            assign                       1    1
        """,
    "OpDetail": """
        thread0::request                 1    20
          slice                          4    12
            slice/prepare_data           4    3
              GpuMemcpySync:CPU->GPU     4    1.5
            slice/compute                4    6
              GpuMemcpySync:CPU->GPU     4    0.75
          block                          1    3
            assign                       1    1
        """,
    "AllOpDetail": """
        thread0::request                 1    20
          slice                          4    12
            slice0 [x]                   2    8
              slice0/prepare_data        2    2
                GpuMemcpySync:CPU->GPU   2    1
              slice0/compute             2    4
                GpuMemcpySync:CPU->GPU   2    0.5
            slice1 [y]                   2    4
              slice1/prepare_data        2    1
                GpuMemcpySync:CPU->GPU   2    0.5
              slice1/compute             2    2
                GpuMemcpySync:CPU->GPU   2    0.25
          block                          1    3
            block0 [b]                   1    3
              assign                     1    1
                assign0 [a]              1    1
        """,
}


def outline(report: str) -> str:
    return "".join(f"{row['Event']:<33}{row['Calls']:<5}{row['Total']}\n" for row in table_rows(report))


@pytest.mark.parametrize("tracer_option", SHAPES)
def test_each_tracer_option_shows_its_levels_of_the_same_tree(tracer_option: str) -> None:
    report = report_of(tally_of_two_slices(), tracer_option=tracer_option)
    assert outline(report) == textwrap.dedent(SHAPES[tracer_option]).lstrip("\n")
    assert "Total time: 20\n" in report
    assert "  Computation time       Total: 6           Ratio: 30%\n" in report
    assert "  GpuMemcpySync          Calls: 8           Total: 2.25        Ratio: 11.25%\n" in report


def test_the_layout_of_a_whole_report() -> None:
    tally = Tally({7: "MainThread", 8: "worker"})
    count(tally, (layer("Linear", "mlp.up"),), 1.5, calls=3, device_ms=2, elapsed_ms=3, min_ms=0.5, max_ms=2, thread=7)
    count(tally, (op("tokenize"),), 1, thread=7)
    count(tally, (op("tokenize"), phase("split")), 0.25, thread=7)
    count(tally, (op("tokenize"), phase("split"), copy("h2d", sync=True)), 0.0001234, calls=2, thread=7)
    count(tally, (op("tokenize"),), 4, calls=2, thread=8)
    recording = Recording(
        lambda: made(tally),
        lambda: of_tally(tally).trace,
        make_cost=lambda: Cost(calls=4, per_call_ns=50, window_ns=1_000_000),
        losses={"ring overwritten": 2, "queue full": 0},
        notes=["rule 3 matched nothing"],
        window_ns=1_000_000,
        recorder="native",
    )
    assert is_golden("events", format_summary(["events"], recording, Options(tracer_option="AllOpDetail")))
    (one,) = reports(report_of(tally_of_two_slices(), tracer_option="OpDetail"))
    assert is_golden("events_one_thread", one)


@pytest.mark.parametrize(("unit", "total", "part"), [
    ("s", "0.002028", "0.002028000 (1.000000)"), ("ms", "2.028", "2.028000 (1.000000)"),
    ("us", "2028", "2028.000 (1.000000)"), ("ns", "2028000", "2028000 (1.000000)"),
])  # fmt: skip
def test_times_are_in_the_unit_that_is_asked_for(unit: str, total: str, part: str) -> None:
    tally = Tally()
    count(tally, (op("a"),), 2.028, device_ms=1)
    report = report_of(tally, unit=unit)
    assert f"Time unit: {unit}\n" in report
    assert table_rows(report)[0]["Total"] == part_rows(report)[0]["Total"] == total
    assert part_rows(report)[0]["CPU Time (Ratio)"] == part


def test_times_have_six_digits_where_every_name_is_whole_next_to_them() -> None:
    tally = Tally()
    count(tally, (op("a"),), 28_021.6219, calls=60, device_ms=1, min_ms=123.4567, max_ms=7654.3219)
    report = report_of(tally, unit="us")
    (row,) = table_rows(report)
    assert (row["Total"], row["Min."], row["Max."], row["Ave."]) == ("28021622", "123457", "7654322", "467027")
    assert part_rows(report)[0]["Total"] == "28021622"
    assert table_rows(report_of(tally))[0]["Total"] == "28021.6"


@pytest.mark.parametrize(
    ("name", "total", "ave"),
    [(29, "28021.6", "467.027"), (31, "28021.6", "467.03"), (35, "28021.6", "467"), (36, "28022", "467")],
)
def test_a_longer_name_takes_digits_from_the_other_times_first(name: int, total: str, ave: str) -> None:
    tally = Tally()
    count(tally, (op("n" * name),), 28_021.6219, calls=60, min_ms=0.001234567, max_ms=0.7654321)
    (row,) = table_rows(report_of(tally, threads="merged"))
    assert (row["Event"], row["Total"], row["Ave."]) == ("n" * name, total, ave)


@given(st.floats(1e-99, 1e99) | st.integers(0, 10**20), st.integers(4, 6))
def test_a_number_is_as_near_as_its_digits_and_columns_allow(value: float, digits: int) -> None:
    shown = compact_number(value, digits + 3, digits)
    assert len(shown) <= digits + 3
    # An exponent of two digits and its sign leave the mantissa two digits less.
    assert float(shown) == pytest.approx(value, rel=0.51 * 10.0 ** (3 - digits), abs=0)


# States, copies, computation.


@pytest.mark.parametrize(
    ("state", "place", "total", "ave", "ratio", "parts"),
    [
        ("All", "All", "3", "0.75", "0.75", True),
        ("CPU", "CPU", "1.5", "0.375", "0.6", False),
        ("GPU", "CUDA", "2", "0.5", "1", False),
    ],
)
def test_the_state_chooses_which_time_is_the_total_and_the_average(
    state: str, place: str, total: str, ave: str, ratio: str, parts: bool
) -> None:
    tally = Tally()
    count(tally, (op("matmul"),), 1.5, calls=4, device_ms=2, elapsed_ms=3)
    count(tally, (op("tokenize"),), 1)
    report = report_of(tally, state=state)
    first, second = table_rows(report)
    assert f"Place: {place}\n" in report
    assert (first["Total"], first["Ratio."], first["Ave."]) == (total, ratio, ave)
    assert ("Host and Device Time" in report) is parts
    assert second["Total"] == ("0" if state == "GPU" else "1")


def test_device_time_is_that_of_every_row_above_it_too_and_counts_once() -> None:
    tally = Tally()
    request, step, forward = Site("http", "request"), op("step"), op("forward")
    copied = copy("h2d", sync=True)
    count(tally, (request,), 9, calls=2)
    count(tally, (request, step), 8, calls=2)
    count(tally, (request, step, forward), 1, calls=2, device_ms=6, elapsed_ms=7)
    count(tally, (request, step, forward, op("matmul")), 1, calls=2, device_ms=5, elapsed_ms=5)
    count(tally, (request, step, copied), 1, calls=2, device_ms=2, elapsed_ms=2)
    for which in range(5):
        count(tally, (Site(f"health {which}", "request"),), 1)
    report = report_of(tally, state="GPU", rows=5)
    shown = {
        row["Event"].strip().removeprefix("thread0::"): (row["Total"], row["Ratio."], row["Min."])
        for row in table_rows(report)
    }
    assert "Total time: 8" in report
    assert shown == {
        "http": ("8", "1", "-"), "step": ("8", "1", "-"), "forward": ("6", "0.75", "-"),
        "matmul": ("5", "0.625", "2.5"), "GpuMemcpySync:CPU->GPU": ("2", "0.25", "1"), "(remaining 5)": ("0", "0", "-"),
    }  # fmt: skip


KEPT = ("Min.", "Max.", "p50", "p99")


def test_extremes_of_elapsed_time_are_not_shown_for_other_times() -> None:
    tally = Tally()
    count(tally, (op("matmul"),), 1.5, device_ms=2, elapsed_ms=3)
    count(tally, (op("tokenize"),), 1)
    unknown, known = dict.fromkeys(KEPT, "-"), dict.fromkeys(KEPT, "1")
    for state, expected in {"CPU": (unknown, known), "GPU": (unknown, unknown)}.items():
        report = report_of(tally, state=state)
        assert tuple({key: row[key] for key in KEPT} for row in table_rows(report)) == expected
        assert "Min., Max., p50, p99 -: they are kept of host and device time together" in report
        assert f"  row's {state} time.\n" in report
    assert "they are kept of" not in report_of(tally)
    with_device_alone = Tally()
    count(with_device_alone, (op("matmul"),), 1.5, device_ms=2, elapsed_ms=2)
    (row,) = table_rows(report_of(with_device_alone, state="GPU"))
    assert [row[key] for key in KEPT] == ["2"] * 4


def test_averages_are_sorted_as_they_are_shown() -> None:
    tally = Tally()
    count(tally, (op("kernel"),), 1, device_ms=9, elapsed_ms=9)
    count(tally, (op("host"),), 2)
    for state, order in {"All": "kernel host", "CPU": "host kernel", "GPU": "kernel host"}.items():
        assert " ".join(row.name for row in rows_of(tally, state=state, sorted_by="ave")) == order


@pytest.mark.parametrize(
    ("direction", "sync", "name"),
    [
        ("h2d", True, "GpuMemcpySync:CPU->GPU"),
        ("h2d", False, "GpuMemcpyAsync:CPU->GPU"),
        ("d2h", True, "GpuMemcpySync:GPU->CPU"),
        ("d2h", False, "GpuMemcpyAsync:GPU->CPU"),
        ("d2d", True, "GpuMemcpySync(same_gpu):GPU->GPU"),
        ("d2d", False, "GpuMemcpyAsync(same_gpu):GPU->GPU"),
        ("p2p", True, "GpuMemcpyPeerSync:GPU->GPU"),
        ("p2p", False, "GpuMemcpyPeerAsync:GPU->GPU"),
        ("sideways", False, "copy"),
    ],
)
def test_a_copy_is_named_and_counted_by_direction_and_synchronicity(direction: str, sync: bool, name: str) -> None:
    tally = Tally()
    count(tally, (op("fetch"),), 4)
    count(tally, (op("fetch"), copy(direction, sync=sync)), 1, calls=2)
    report = report_of(tally)
    assert [row["Event"] for row in table_rows(report)] == ["thread0::fetch", f"  {name}"]
    assert "GpuMemcpy                Calls: 2           Total: 1           Ratio: 25%\n" in report
    label = "Sync " if sync else "Async"
    assert f"  GpuMemcpy{label}         Calls: 2           Total: 1           Ratio: 25%\n" in report


def test_a_copy_from_host_to_host_is_a_row_and_no_copy_of_the_gpu() -> None:
    tally = Tally()
    count(tally, (op("fetch"),), 4)
    count(tally, (op("fetch"), copy("h2h", sync=True)), 1)
    report = report_of(tally)
    assert [row["Event"] for row in table_rows(report)] == ["thread0::fetch", "  copy"]
    assert "GpuMemcpy                Calls: 0           Total: 0           Ratio: 0%\n" in report


COMPUTATIONS: dict[str, tuple[list[tuple[CallPath, float]], str, str]] = {
    "a phase named compute counts whole, and nothing under it again": (
        [
            ((op("a"),), 10),
            ((op("a"), phase("compute")), 4),
            ((op("a"), phase("compute"), op("b")), 3),
            ((op("a"), phase("compute"), op("b"), phase("compute")), 2),
        ],
        "Total: 4           Ratio: 40%",
        "Total: 6           Ratio: 60%",
    ),
    "of layers the topmost counts": (
        [
            ((op("a"),), 10),
            ((op("a"), layer("Block", "0")), 8),
            ((op("a"), layer("Block", "0"), layer("Linear", "0.up")), 5),
        ],
        "Total: 8           Ratio: 80%",
        "Total: 2           Ratio: 20%",
    ),
    "a declared phase counts whatever its name and kind, and one declared otherwise does not": (
        [
            ((op("a"),), 10),
            ((op("a"), declared("run", "compute")), 4),
            ((op("a"), declared("run", "compute"), layer("Block", "0")), 3),
            ((op("a"), declared("compute", "post")), 2),
        ],
        "Total: 4           Ratio: 40%",
        "Total: 6           Ratio: 60%",
    ),
    "a scope of the user that is called compute is data": (
        [((op("a"),), 10), ((op("a"), op("compute")), 4), ((op("a"), phase("compute/x")), 4)],
        "Total: -           Ratio: -",
        "Total: -           Ratio: -",
    ),
    "what is declared and took no time is none of the total": (
        [((op("a"),), 10), ((op("a"), layer("Block", "0")), 0)],
        "Total: 0           Ratio: 0%",
        "Total: 10          Ratio: 100%",
    ),
    "work that outran the calls around it leaves the rest unknown": (
        [((op("a"),), 10), ((op("a"), layer("Block", "0")), 16)],
        "Total: 16          Ratio: 160%",
        "Total: -           Ratio: -",
    ),
}


@pytest.mark.parametrize("case", COMPUTATIONS)
def test_computation_and_overhead_split_the_total_time(case: str) -> None:
    rows, computation, overhead = COMPUTATIONS[case]
    tally = Tally()
    for path, total in rows:
        count(tally, path, total)
    report = report_of(tally, tracer_option="OpDetail")
    assert f"  Computation time       {computation}\n" in report
    assert f"  Framework overhead     {overhead}\n" in report


def test_a_total_without_declared_computation_has_no_overhead() -> None:
    tally = Tally()
    count(tally, (op("a"),), 10)
    assert "  (nothing is declared as computation: layers are, and rules with `phase: compute`)\n" in report_of(tally)
    overhead = make_json_values(events(of_tally(tally), Options()))["overhead"]
    assert overhead.pop("total_ns") > 0
    parts = ("computation", "waiting", "framework")
    assert set(overhead) == {f"{part}_{what}" for part in parts for what in ("ns", "ratio")}
    assert set(overhead.values()) == {None}
    count(tally, (op("a"), layer("Block", "0")), 4)
    assert "nothing is declared as computation" not in report_of(tally)


# Order and limits.

FIVE = {"a": (1, 5.0, 5.0, 5.0), "b": (4, 8.0, 1.0, 4.0), "c": (2, 6.0, 2.0, 4.5), "d": (8, 4.0, 0.1, 4.0)}


@pytest.mark.parametrize("level", ["top", "nested"])
@pytest.mark.parametrize(
    ("sorted_by", "order", "heading"),
    [
        ("default", "abcd", "first call in ascending order"),
        ("calls", "dbca", "number of calls in descending order"),
        ("total", "bcad", "total time in descending order"),
        ("max", "acbd", "maximum time in descending order"),
        ("min", "acbd", "minimum time in descending order"),
        ("ave", "acbd", "average time in descending order"),
        ("cpu_total", "bcad", "host time in descending order"),
        ("cpu_min", "dbca", "minimum time in ascending order"),
        ("cpu_ave", "acbd", "average host time in descending order"),
        ("gpu_total", "abcd", "device time in descending order"),
    ],
)
def test_the_sort_key_orders_every_level(sorted_by: str, order: str, heading: str, level: str) -> None:
    tally = Tally()
    above: CallPath = () if level == "top" else (op("outer"),)
    if above:
        count(tally, above, 30)
    for name, (calls, total, least, most) in FIVE.items():
        count(tally, (*above, op(name)), total, calls=calls, min_ms=least, max_ms=most)
    report = report_of(tally, sorted_by=sorted_by, threads="merged")
    assert "".join(row["Event"].strip() for row in table_rows(report)[len(above) :]) == order
    assert f"Sorted by {heading}\n" in report


def test_a_limit_keeps_the_heaviest_rows_with_their_parents_and_sums_up_the_rest_of_each_level() -> None:
    tally = Tally()
    count(tally, (op("small"),), 1)
    count(tally, (op("big"),), 9)
    for name, total in (("x", 1), ("y", 5), ("z", 2)):
        count(tally, (op("big"), op(name)), total)
    rows = table_rows(report_of(tally, rows=2, threads="merged"))
    assert [(row["Event"], row["Calls"], row["Total"], row["Ratio."], row["Max."]) for row in rows] == [
        ("big", "1", "9", "0.9", "9"),
        ("  y", "1", "5", "0.5", "5"),
        ("  (remaining 2)", "2", "3", "0.3", "2"),
        ("(remaining 1)", "1", "1", "0.1", "1"),
    ]


def test_an_open_span_is_ranked_and_counted_by_what_has_ended_under_it() -> None:
    tally = Tally()
    count(tally, (op("setup"),), 1, first_ns=5)
    count(tally, (op("serve"), op("step")), 9, first_ns=9)
    count(tally, (op("idle"),), 0, calls=0)
    report = report_of(tally, rows=2, sorted_by="total", threads="merged")
    assert [(row["Event"], row["Calls"], row["Total"], row["Ratio."]) for row in table_rows(report)] == [
        ("serve", "0", "-", "-"),
        ("  step", "1", "9", "0.9"),
        ("(remaining 1)", "1", "1", "0.1"),
    ]
    assert "Calls 0: the span had not ended" in report


def test_an_open_span_with_only_hidden_phases_is_still_a_row() -> None:
    tally = Tally()
    count(tally, (op("serve"), phase("prepare")), 2)
    report = report_of(tally)
    assert [(row["Event"], row["Total"]) for row in table_rows(report)] == [("thread0::serve", "-")]
    assert "Total time: 2\n" in report


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ({"tracer_option": "AllDetail"}, "Default, OpDetail, AllOpDetail"),
        ({"state": "CUDA"}, "CPU, GPU, All"),
        ({"sorted_by": "avg"}, ", ".join(SORT_KEYS)),
        ({"threads": "one"}, "both, merged, apart"),
        ({"unit": "min"}, "s, ms, us, ns"),
        ({"least_ns": -1}, "0 or more"),
        ({"rows": 0}, "1 or more, or None for every row"),
    ],
    ids=lambda option: next(iter(option)) if isinstance(option, dict) else "",
)
def test_an_unknown_option_is_refused_with_what_is_allowed(option: dict[str, object], allowed: str) -> None:
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=rf"^{name} is {re.escape(repr(value))}; allowed: {allowed}$"):
        Options(**option)


# Instances.


def names(tally: Tally, **options: object) -> list[str]:
    return ["  " * row.depth + row.name for row in rows_of(tally, tracer_option="AllOpDetail", **options)]


def test_instances_are_numbered_by_first_call_under_their_own_parent_at_every_depth() -> None:
    """Fluid numbered nested operators by the order of their types: `fill0` and `assign1` under `block0`."""
    tally = Tally()
    first, second = op("block", "first"), op("block", "second")
    count(tally, (second,), 1, first_ns=20)
    count(tally, (first,), 1, first_ns=10)
    for block, start in ((second, 21), (first, 11)):
        for offset, (name, instance) in enumerate([("fill", "u"), ("assign", "v"), ("fill", "w"), ("assign", "t")]):
            count(tally, (block, op(name, instance)), 1, first_ns=start + offset)
    below = ["    fill", "      fill0", "      fill1", "    assign", "      assign0", "      assign1"]
    assert names(tally, threads="merged") == ["block", "  block0", *below, "  block1", *below]


@pytest.mark.parametrize("sorted_by", SORT_KEYS)
def test_an_instance_keeps_its_number_in_every_order_and_on_every_thread(sorted_by: str) -> None:
    tally = Tally({1: "one", 2: "two"})
    count(tally, (layer("Linear", "up"),), 1, calls=2, first_ns=100, thread=1)
    count(tally, (layer("Linear", "down"),), 3, first_ns=50, thread=2)
    count(tally, (layer("Linear", "up"),), 9, first_ns=40, thread=2)
    numbered = {
        (row.name, row.instance)
        for row in rows_of(tally, tracer_option="AllOpDetail", sorted_by=sorted_by)
        if row.depth == 1
    }
    assert numbered == {("Linear0", "up"), ("Linear1", "down")}


def test_sites_of_one_place_in_two_processes_are_one_instance() -> None:
    tally = Tally()
    other = Tally()
    count(tally, (op("mul", "w"),), 1)
    count(other, (op("mul", "w"),), 1)
    tally.merge(other)
    assert names(tally, threads="merged") == ["mul", "  mul0"]


@pytest.mark.parametrize(
    ("site", "shown"),
    [
        (layer("Linear", "model.layers.0.mlp.up"), "  Linear0 [model.layers.0.mlp.up]"),
        (Site("conv", kind="op", module="chat.model", qualname="Net.conv"), "  conv0 [chat.model.Net.conv]"),
        (Site("conv", kind="op", file="model.py", line=3), "  conv0 [model.py:3]"),
        (op("conv"), "  conv0"),
        (layer("Linear", "a" * 40 + "b" * 40), "  Linear0 [" + "a" * 17 + "..." + "b" * 16 + "]"),
        (layer("L" * 40, "too.long.to.fit"), "  " + "L" * 40 + "0"),
        (layer("L" * 80, "x"), "  " + "L" * 22 + "..." + "L" * 20 + "0"),
    ],
)
def test_an_instance_says_which_one_it_is_where_there_is_room(site: Site, shown: str) -> None:
    tally = Tally()
    count(tally, (site,), 1)
    assert table_rows(report_of(tally, tracer_option="AllOpDetail", threads="merged"))[1]["Event"] == shown


# Threads.


@pytest.mark.parametrize(
    ("threads", "recorded", "first_rows"),
    [
        ("both", 1, ["thread0::op"]),
        ("both", 2, ["op", "thread1::op"]),
        ("merged", 1, ["op"]),
        ("merged", 2, ["op"]),
        ("apart", 1, ["thread0::op"]),
        ("apart", 2, ["thread1::op"]),
    ],
)
def test_the_merged_report_comes_first_when_two_threads_recorded(
    threads: str, recorded: int, first_rows: list[str]
) -> None:
    tally = Tally()
    for thread in range(recorded):
        count(tally, (op("op"),), 1, thread=40 + thread)
    found = reports(report_of(tally, threads=threads))
    assert [table_rows(report)[0]["Event"] for report in found] == first_rows
    assert ["Overhead Summary" in report for report in found] == [len(table_rows(report)) == 1 for report in found]


def test_a_part_that_ran_on_another_thread_is_counted_there_under_its_path() -> None:
    tally = Tally({1: "loop", 2: "worker"})
    request = Site("request", kind="request")
    count(tally, (request,), 10, thread=1)
    count(tally, (request, op("decode")), 6, thread=2)
    _, apart = reports(report_of(tally))
    assert [(row["Event"], row["Total"], row["Ratio."]) for row in table_rows(apart)] == [
        ("thread1::request", "-", "-"),
        ("  decode", "6", "1"),
        ("thread0::request", "10", "1"),
    ]


# Nothing to say.


def test_a_report_of_nothing_says_so_and_still_reports_what_was_missed() -> None:
    recording = Recording(Tally().made, lambda: of_tally(Tally()).trace, losses={"old": 3}, notes=["no module `chat`"])
    report = format_summary(["events"], recording, Options())
    assert "No calls were recorded.\n" in report
    assert "Not kept: 3 (old)\n" in report
    assert "Not observed: no module `chat`\n" in report
    assert "Event Summary" not in report
    assert events(recording, Options()).blocks == ()


def test_paths_without_calls_alone_are_a_report_of_nothing() -> None:
    tally = Tally()
    count(tally, (op("a"),), 0, calls=0)
    assert "No calls were recorded." in report_of(tally)


@pytest.mark.parametrize(
    ("state", "device_ms", "line"),
    [
        ("All", 0, "No device time was recorded."),
        ("GPU", 0, "No device time was recorded."),
        ("CPU", 0, ""),
        ("All", 1, "GPU times are stretches of a stream between two events, not kernels."),
    ],
)
def test_the_last_line_says_what_device_times_are_or_that_there_are_none(
    state: str, device_ms: float, line: str
) -> None:
    tally = Tally()
    count(tally, (op("a"),), 1, device_ms=device_ms)
    last = report_of(tally, state=state).splitlines()[-1]
    assert (last == line) if line else ("device" not in last)


def test_a_base_of_zero_prints_a_dash_in_place_of_each_ratio() -> None:
    tally = Tally()
    count(tally, (layer("a", ""),), 0)
    recording = Recording(lambda: made(tally), lambda: of_tally(tally).trace, make_cost=lambda: Cost(1, 50, 0))
    report = format_summary(["events"], recording, Options())
    (row,) = table_rows(report)
    assert (row["Ratio."], row["Total"]) == ("-", "0")
    assert "  Computation time       Total: 0           Ratio: -\n" in report
    assert ", - of the window of 0 s" in report


def test_a_row_that_took_no_time_has_no_parts_to_report() -> None:
    tally = Tally()
    count(tally, (op("a"),), 0)
    count(tally, (op("a"), op("b")), 0, device_ms=1)
    assert [row["CPU Time (Ratio)"] for row in part_rows(report_of(tally))] == ["0.000000 (-)"] * 2


# Any tally, any name.

HOSTILE = [
    "",
    "a/b",
    "50%",
    "x::y",
    "two\nlines",
    'a "quoted" name',
    "\x1b[31mred",
    "\u202eturned",
    "漢字" * 30,
    "n" * 500,
]
NAMES = st.one_of(st.sampled_from([*HOSTILE, "a", "b", "compute"]), st.text(max_size=8))
KINDS = ("request", "op", "layer", "phase", "copy", "user")
SITES = st.builds(
    Site,
    name=NAMES,
    kind=st.sampled_from(KINDS),
    instance=st.sampled_from(["", "x", "y", "m\n" * 60]),
    attributes=st.sampled_from([(), (("direction", "h2d"), ("sync", True)), (("direction", "p2p"), ("sync", False))]),
)
TIMES = st.integers(0, 10**16)


@st.composite
def any_totals(draw: st.DrawFn) -> Totals:
    host, device, calls = draw(TIMES), draw(st.one_of(st.just(0), TIMES)), draw(st.integers(1, 10**6))
    elapsed = draw(st.integers(max(host, device), host + device))
    low = elapsed // calls
    return Totals(calls, draw(st.integers(0, calls)), host, draw(st.integers(0, host)), 0, device, elapsed, low,
                  low, 0, draw(st.integers(1, 9)), {bucket_of(low): calls})  # fmt: skip


@st.composite
def tallies(draw: st.DrawFn, *, complete: bool = False) -> Tally:
    """Any tally; a complete one has calls for every path that leads to another."""
    sites = draw(st.lists(SITES, min_size=1, max_size=5))
    tally = Tally()
    for _ in range(draw(st.integers(0, 8))):
        path = tuple(draw(st.lists(st.sampled_from(sites), min_size=1, max_size=5)))
        thread = draw(st.integers(0, 2))
        for length in range(1 if complete else len(path), len(path) + 1):
            if complete or draw(st.integers(0, 9)):
                tally.totals(path[:length], thread).merge(draw(any_totals()))
            else:
                tally.totals(path[:length], thread)
    return tally


OPTIONS = st.fixed_dictionaries(
    {
        "tracer_option": st.sampled_from(TRACER_OPTIONS),
        "state": st.sampled_from(STATES),
        "sorted_by": st.sampled_from(SORT_KEYS),
        "rows": st.one_of(st.none(), st.integers(1, 5)),
        "threads": st.sampled_from(THREADS),
        "unit": st.sampled_from(["s", "ms", "us", "ns"]),
        "least_ns": st.sampled_from([0, 0, 10**6, 10**15]),
        "corrected": st.booleans(),
    }
)


@given(tallies(), OPTIONS, st.lists(NAMES, max_size=2))
def test_no_tally_and_no_name_breaks_a_line_or_runs_into_the_next_column(
    tally: Tally, options: dict[str, object], words: list[str]
) -> None:
    tally.threads.update(dict(zip(tally.threads, words, strict=False)))
    trace = of_tally(tally).trace
    recording = Recording(
        lambda: made(tally), lambda: trace, losses=dict.fromkeys(words, 1), notes=words, recorder="native"
    )
    text = format_summary(["events"], recording, Options(**options))
    assert all(line.isprintable() and measure_width(line) <= LINE for line in text.split("\n"))
    for report in reports(text) if made(tally).calls else []:
        header, *lines = (screen(line) for line in table_lines(report))
        starts = [m.start() for m in re.finditer(r"(?:CPU|GPU) Time \(Ratio\)|\S+", header)]
        assert starts[1] <= 66
        for line in lines:
            for start in starts[1:]:
                assert line[start - 2 : start] == "  "
                assert line[start] not in " \0"


def blocks(rows: Sequence[EventRow]) -> Iterable[list[EventRow]]:
    """The rows of each thread."""
    for thread in dict.fromkeys(row.thread for row in rows):
        yield [row for row in rows if row.thread == thread]


@given(tallies(), OPTIONS)
def test_every_row_follows_its_parent(tally: Tally, options: dict[str, object]) -> None:
    for rows in blocks(rows_of(tally, **options)):
        assert rows[0].depth == 0
        assert all(after.depth <= before.depth + 1 for before, after in itertools.pairwise(rows))
        assert all(row.name.startswith("(remaining") for row in rows if row.remaining)
        assert options["rows"] is None or sum(not row.remaining for row in rows) <= options["rows"]


@given(tallies(complete=True), OPTIONS)
def test_the_ratios_of_the_top_rows_of_a_block_add_up_to_one(tally: Tally, options: dict[str, object]) -> None:
    for rows in blocks(rows_of(tally, **options)):
        ratios = [row.ratio for row in rows if row.depth == 0]
        if any(row.total_ns for row in rows if row.depth == 0):
            assert sum(ratios) == pytest.approx(1)
        else:
            assert set(ratios) == {None}


@given(tallies(complete=True), OPTIONS)
def test_a_limit_changes_no_sum_of_a_level(tally: Tally, options: dict[str, object]) -> None:
    def top_sums(rows: Sequence[EventRow]) -> list[tuple[int, int]]:
        tops = [[row for row in block if row.depth == 0] for block in blocks(rows)]
        return [(sum(row.total_ns for row in block), sum(row.calls for row in block)) for block in tops]

    assert top_sums(rows_of(tally, **options)) == top_sums(rows_of(tally, **{**options, "rows": None, "least_ns": 0}))


@given(tallies(complete=True))
def test_hiding_phases_moves_self_time_and_loses_none(tally: Tally) -> None:
    sums = {
        option: sum(row.self_ns for row in rows_of(tally, tracer_option=option, threads="merged"))
        for option in ("Default", "OpDetail")
    }
    assert sums["Default"] == sums["OpDetail"] == sum(totals.self_ns for _, _, totals in lines_of(tally))


def test_a_call_path_may_be_deeper_than_pythons_stack() -> None:
    tally = Tally()
    path = tuple(op("f", str(level)) for level in range(1500))
    count(tally, path, 1)
    last = table_rows(report_of(tally, threads="merged"))[-1]
    assert last["Event"] == "  " * 12 + "(1499) f"


def test_spans_with_device_work_count_shared_time_once() -> None:
    span = Span(op("matmul"), 1, 0, 1, 9, 0, 1_000_000, 3_000_000, 2_000_000, 2_000_000)
    span.device = (DeviceInterval(0, 7, 2_000_000, 5_000_000),)
    (row,) = rows_of(counted([span]))
    assert (row.total_ns, row.host_ns, row.device_ns) == (4_000_000, 2_000_000, 3_000_000)
    assert (row.ratio, row.ave_ns, row.p50_ns, row.min_ns) == (1.0, 4_000_000, 4_000_000, 4_000_000)


def test_a_row_is_a_frozen_value_that_becomes_plain_data() -> None:
    tally = Tally()
    count(tally, (op("a\n"),), 1)
    (row,) = rows_of(tally)
    assert dataclasses.asdict(row)["name"] == "a\n"
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.calls = 2  # type: ignore[misc]


# The text table.


@pytest.mark.parametrize(
    ("text", "limit", "short"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdefgh", 7, "ab...gh"),
        ("abcdefgh", 6, "ab...h"),
        ("abcdefgh", 4, "a..."),
        ("abcdefgh", 3, "..."),
        ("abcdefgh", 0, ""),
        ("漢字漢字", 8, "漢字漢字"),
        ("漢字漢字", 7, "漢...字"),
        ("e\u0301" * 6, 6, "e\u0301" * 6),
        ("e\u0301" * 8, 6, "e\u0301" * 2 + "..." + "e\u0301"),
        ("か\u3099" * 4, 7, "か\u3099...か\u3099"),
        ("漢\u0301" * 4, 6, "漢\u0301..."),
        ("ab\u20dd\u0301" + "c" * 8, 5, "a...c"),
    ],
)
def test_a_long_text_loses_its_middle(text: str, limit: int, short: str) -> None:
    assert shorten(text, limit) == short
    assert measure_width(short) <= limit


MARKED = st.one_of(st.sampled_from("ae漢か\u0301\u3099\u20dd"), st.characters(exclude_characters="."))


@given(st.text(MARKED, max_size=40), st.integers(3, 40))
def test_a_shortened_text_keeps_its_room_and_each_mark_its_character(text: str, limit: int) -> None:
    shown = printable(text)
    short = shorten(shown, limit)
    assert measure_width(short) <= limit
    if short != shown:
        head, _, tail = short.partition("...")
        assert not tail or measure_width(tail[0]), "the tail begins with a mark"
        assert not head or measure_width(shown[len(head)]), "the head has lost a mark"


def test_names_that_differ_in_a_mark_alone_are_parted_before_its_character() -> None:
    names = [f"{'a' * 30}e{mark}{'b' * 30}" for mark in "\u0300\u0301"]
    assert shorten_distinctly(names, 20) == [f"aaaaa...e{mark}bbbb...bbbb" for mark in "\u0300\u0301"]


def test_texts_that_would_look_alike_when_shortened_are_shown_from_where_they_part() -> None:
    layers = [f"request > generate > model.layers.{number}.self_attn.projection > Linear" for number in (3, 12, 13)]
    assert len({shorten(text, 40) for text in layers}) == 1
    assert shorten_distinctly([*layers, "short", layers[0]], 40) == [
        "request > ...3.self_attn....ion > Linear", "request > ...12.self_attn...ion > Linear",
        "request > ...13.self_attn...ion > Linear", "short", "request > ...3.self_attn....ion > Linear",
    ]  # fmt: skip


def test_a_text_that_others_begin_with_keeps_its_own_end() -> None:
    path = "request > generate > model.layers.self_attn.projection > Linear"
    longer = f"{path} > generate > model.layers.self_attn.projection > Linear"
    assert shorten(path, 30) == shorten(longer, 30)
    assert shorten_distinctly([path, longer], 30) == [
        "request > gene...tion > Linear",
        "request... > genera...> Linear",
    ]


def test_a_thousand_texts_that_each_begin_with_the_one_before_differ() -> None:
    for end in ("", " > the_same_end_of_all_of_them_which_is_longer_than_a_column"):
        texts = [" > ".join(["calls_itself"] * depth) + end for depth in range(1, 1000)]
        short = shorten_distinctly(texts, 40)
        assert len(set(short)) == len(texts)
        assert all(measure_width(one) <= 40 for one in short)


@given(st.lists(st.text("ab測.", max_size=60), max_size=6), st.integers(16, 40))
def test_shortened_texts_keep_their_room_and_are_the_same_where_the_texts_are(texts: list[str], limit: int) -> None:
    short = shorten_distinctly(texts, limit)
    assert all(measure_width(one) <= limit for one in short)
    assert len(set(short)) == len(set(texts))
    assert all(one == text for one, text in zip(short, texts, strict=True) if measure_width(text) <= limit)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a b", "a b"), ("a\tb\n", "a\\tb\\n"), ("\x1b[0m", "\\x1b[0m"), ("\ud800", "\\ud800"), ("é漢", "é漢")],
)
def test_unprintable_characters_are_shown_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_columns_are_as_wide_as_their_longest_cell_and_a_gap_or_wider() -> None:
    lines = make_table_lines(["Name", "Calls", "x"], [["漢字", "123456", "1"], ["longer name", "1", "2"]], [4, 8, 4])
    assert lines == ["Name         Calls   x", "漢字         123456  1", "longer name  1       2"]


# Every number of the rows and sections, from the raw spans.


RAW_SITES = [
    Site("/chat", "request"), op("f"), op("f", "other"), op("g"), layer("L", "a"), layer("L", "b"), phase("compute"),
    phase("prepare"), declared("infer", "compute"), Site("mine", "user"), Site("turn", "step"),
    *(Site(f"memcpy {way}", "copy", instance=str(sync), attributes=(("direction", way), ("sync", sync)))
      for way, sync in (("h2d", True), ("h2d", False), ("d2h", False), ("h2h", True))),
]  # fmt: skip
Level = tuple[str, object]


def levels_of(path: CallPath, tracer_option: str) -> list[tuple[Level, ...]]:
    """The rows that a call of a path counts in, each by the levels from the top; none for a phase that is not shown."""
    here: tuple[Level, ...] = ()
    own: list[tuple[Level, ...]] = []
    for index, site in enumerate(path):
        if site.kind == "phase" and index and tracer_option == "Default":
            own = []
            continue
        shown: list[Level] = [(("phase" if site.kind == "phase" and index else "row"), site.name)]
        if site.kind == "copy":
            shown = [("copy", (dict(site.attributes)["direction"], dict(site.attributes)["sync"]))]
        elif tracer_option == "AllOpDetail" and site.kind in ("op", "layer"):
            shown.append(("instance", site.instance))
        own = [(*here, *shown[: length + 1]) for length in range(len(shown))]
        here = (*here, *shown)
    return own


def nested(rows: Sequence[tuple[int, tuple[object, ...]]]) -> list[object]:
    """Rows by depth as a tree whose branches are in no order."""
    found: list[object] = []
    index = 0
    while index < len(rows):
        depth, numbers = rows[index]
        end = next((at for at in range(index + 1, len(rows)) if rows[at][0] <= depth), len(rows))
        found.append((numbers, nested(rows[index + 1 : end])))
        index = end
    return sorted(found, key=repr)


@given(traces(RAW_SITES), st.sampled_from(TRACER_OPTIONS), st.sampled_from(STATES))
def test_every_row_and_every_sum_is_that_of_the_raw_spans(trace: Trace, tracer_option: str, state: str) -> None:
    path_of, inner = counted_paths(trace.spans)

    def whole_of(span: Span) -> int:
        return span.total_ns if span.span_id in inner else elapsed_ns(span)

    def time_of(span: Span) -> int:
        of_call = {"All": elapsed_ns(span), "CPU": span.total_ns, "GPU": span.device_ns}[state]
        return 0 if span.span_id in inner else of_call

    calls: dict[tuple[Level, ...], list[Span]] = {}
    paths: dict[tuple[Level, ...], set[CallPath]] = {}
    own_ns: Counter[CallPath] = Counter()
    for span in trace.spans:
        path = path_of[span.span_id]
        own_ns[path] += 0 if span.span_id in inner else span.device_ns
        for key in levels_of(path, tracer_option):
            calls.setdefault(key, []).append(span)
            paths.setdefault(key, set()).add(path)

    def device_of(path: CallPath) -> int:
        """Return the device time of the path's own events, or of all that ran below if that is more."""
        return max(own_ns[path], sum(device_of(one) for one in own_ns if one[:-1] == path))

    def total_of(key: tuple[Level, ...], spans: list[Span]) -> int:
        return sum(map(device_of, paths[key])) if state == "GPU" else sum(map(time_of, spans))

    base = sum(total_of(key, spans) for key, spans in calls.items() if len(key) == 1)

    def numbers(key: tuple[Level, ...], spans: list[Span]) -> tuple[object, ...]:
        outer, longest = [span for span in spans if span.span_id not in inner], [whole_of(span) for span in spans]
        total, device = total_of(key, spans), sum(map(device_of, paths[key]))
        host, whole = sum(span.total_ns for span in outer), sum(map(whole_of, outer))
        # The tally keeps no least or greatest but of elapsed time.
        known = all(time_of(span) == elapsed_ns(span) for span in outer)
        known = known and (state != "GPU" or device == sum(own_ns[path] for path in paths[key]))
        return (
            len(spans), sum(span.error is not None for span in spans), total, host, device, whole,
            (min(longest), max(longest)) if known else (None, None), known, known, total / len(spans),
            total / base if base else None,
            (host / whole, device / whole) if whole else (None, None),
        )  # fmt: skip

    in_order = sorted(calls.items(), key=lambda item: list(map(repr, item[0])))
    expected = [(len(key) - 1, numbers(key, spans)) for key, spans in in_order]
    options = Options(tracer_option=tracer_option, state=state, threads="merged")
    view = events(Recording.from_trace(trace), options)
    ours = [
        (row.depth, (row.calls, row.errors, row.total_ns, row.host_ns, row.device_ns, row.elapsed_ns,
                     (row.min_ns, row.max_ns), row.p50_ns is not None, row.p99_ns is not None, row.ave_ns, row.ratio,
                     (row.host_ratio, row.device_ratio)))
        for block in view.blocks for row in block.rows
    ]  # fmt: skip
    assert nested(ours) == nested(expected)
    if not trace.spans:
        return
    assert [block.total_ns for block in view.blocks] == [base]

    def computes(site: Site) -> bool:
        return site.kind == "layer" or site.name == "compute" or dict(site.attributes).get("phase") == "compute"

    outermost = [s for s in trace.spans if computes(s.site) and not any(map(computes, path_of[s.span_id][:-1]))]
    assert view.overhead is not None
    computed_ns = (
        sum(map(device_of, {path_of[s.span_id] for s in outermost})) if state == "GPU" else sum(map(time_of, outermost))
    )
    computation_ns = computed_ns if outermost else None
    is_service = state != "GPU" and any(span.site.kind == "request" for span in trace.spans)
    split = view.overhead
    assert (split.total_ns, split.waiting_ns is not None) == (base, is_service)
    if is_service and computation_ns is not None:
        assert (split.computation_ns or 0) + (split.waiting_ns or 0) + (split.framework_ns or 0) == base
        assert min(split.computation_ns or 0, split.waiting_ns or 0, split.framework_ns or 0) >= 0
        assert (split.computation_ns or 0) <= computation_ns
    else:
        assert split.computation_ns == computation_ns
        assert split.computation_ratio == (None if computation_ns is None or not base else computation_ns / base)
    copied = [s for s in trace.spans if s.site.kind == "copy" and dict(s.site.attributes)["direction"] != "h2h"]
    for one in view.copies:
        way = one.label.removeprefix("GpuMemcpy")
        its = [s for s in copied if not way or dict(s.site.attributes)["sync"] == (way == "Sync")]
        assert (one.calls, one.total_ns) == (len(its), sum(map(time_of, its)))
        assert one.ratio == (one.total_ns / base if base else None)
    assert {one.label for one in view.copies} == {"GpuMemcpy"} | {
        f"GpuMemcpy{'Sync' if dict(s.site.attributes)['sync'] else 'Async'}" for s in copied
    }
