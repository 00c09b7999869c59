"""The `device` view: its layout, what it says where there is nothing to say, and that no name breaks it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden_views import is_golden, text_of
from hypothesis import example, given
from hypothesis import strategies as st
from trees import outline

from instrument import chrome
from instrument.recording.spans import DeviceInterval, Origin, Site, Span
from instrument.report import device_view as view
from instrument.report.device_use import measure_utilisation
from instrument.report.table import LINE, measure_width
from instrument.report.view import Options, Recording
from instrument.trace.trace import Trace

MS = 1_000_000
CHAT = Site("POST /chat", "request")
EMBED = Site("POST /embed", "request")
DECODE = Site("decode", "op", device=True)
LINEAR = Site("Linear", "layer", instance="model.head", device=True)
H2D = Site(
    "memcpy h2d", "copy", "torch", "Tensor.to", device=True,
    attributes=(("direction", "h2d"), ("sync", False), ("pinned", True)),
)  # fmt: skip


def device(trace: Trace, **options: Any) -> str:
    return text_of(view.device(Recording.from_trace(trace), Options(**options)))


def made(span_id: int, site: Site, start_ms: float, end_ms: float, *on: DeviceInterval, parent: int = 0) -> Span:
    start, end = round(start_ms * MS), round(end_ms * MS)
    return Span(site, span_id, parent, parent or span_id, 1, 0, start, end, end - start, end - start, device=on)


def ran(
    start_ms: float, end_ms: float, label: str = "exclusive", *, on: int = 0, stream: int = 7, us: int = 3
) -> DeviceInterval:
    return DeviceInterval(on, stream, round(start_ms * MS), round(end_ms * MS), label, us * 1000)


def trace_of(*spans: Span, end_ms: int = 100, **facts: int) -> Trace:
    return Trace(Origin(1, "shop", 0, 0), 0, end_ms * MS, list(spans), **facts)


def service() -> Trace:
    """Return two endpoints on one device: a copy during compute, one interval inside of another, and untimed work."""
    return trace_of(
        made(1, CHAT, 0, 40),
        made(2, DECODE, 1, 10, ran(2, 18), parent=1),
        made(3, LINEAR, 3, 4, ran(4, 8, "overlapped", us=15), parent=1),
        made(4, H2D, 11, 12, ran(15, 21, stream=13), parent=1),
        made(5, EMBED, 30, 60),
        made(6, LINEAR, 31, 32, ran(31, 50, "stale"), parent=5),
        made(7, LINEAR, 33, 34, ran(33, 33, "captured"), parent=5),
        made(8, EMBED, 95, 130),
        made(9, EMBED, 70, 72),
        made(10, DECODE, 73, 74),
        made(11, DECODE, 99, 100, ran(101, 105)),
    )


def section(text: str, title: str) -> str:
    """Return the text below a section's title."""
    return outline(text.split(f"  {title}  ", 1)[1].split("\n", 2)[2].split("-----", 1)[0])


def test_the_layout_to_the_column() -> None:
    assert is_golden("device", device(service()))


def test_each_device_has_a_section_of_its_own() -> None:
    text = device(trace_of(made(1, DECODE, 0, 9, ran(0, 50, on=1), ran(0, 25, on=0))))
    assert text.index("Device 0") < text.index("Device 1")
    busy = [line.split()[3:] for line in text.splitlines() if line.startswith("Busy with compute")]
    assert busy == [["25", "25.0%", "window"], ["50", "50.0%", "window"]]


def test_rows_bound_the_tables_and_the_rest_is_one_row() -> None:
    sites = [Site(f"op{number}", "op", device=True) for number in range(5)]
    requests = [Site(f"GET /{number}", "request") for number in range(3)]
    spans = [made(9, requests[0], 0, 90), made(10, requests[1], 0, 80), made(11, requests[2], 0, 70)]
    spans += [
        made(20 + n, site, n, n + 1, ran(n * 10, n * 10 + 9 - n), parent=9 + n % 3) for n, site in enumerate(sites)
    ]
    spans += [made(30 + n, site, n, n + 1) for n, site in enumerate(sites)]
    lines = device(trace_of(*spans), rows=2).splitlines()
    assert [line.split() for line in lines if line.startswith(("op", "(rem", "GET"))] == [
        ["op0", "1", "9", "9", "9", "9", "9", "25.7%"],
        ["op1", "1", "8", "8", "8", "8", "8", "22.9%"],
        ["(remaining", "3)", "3", "18", "6", "-", "-", "-", "-"],
        ["GET", "/0", "1", "90", "15", "16.7%", "20", "22.2%", "55", "61.1%"],
        ["GET", "/1", "1", "80", "13", "16.2%", "22", "27.5%", "45", "56.2%"],
        ["(remaining", "1)", "1", "70", "7", "10.0%", "28", "40.0%", "35", "50.0%"],
        ["op0", "op", "1", "no", "pair", "of", "events", "came", "back"],
        ["op1", "op", "1", "no", "pair", "of", "events", "came", "back"],
        ["(remaining", "3)", "-", "3", "-"],
    ]


def test_least_leaves_short_names_to_the_rest_and_the_unit_is_that_of_every_time() -> None:
    lines = [line.split() for line in device(service(), least_ns=10 * MS, unit="us").splitlines()]
    assert ["Time", "unit:", "us"] in lines
    assert ["Window", "100000", "100.0%", "window"] in lines
    assert ["decode", "1", "16000", "16000", "16000", "16000", "16000", "42.1%"] in lines
    assert ["(remaining", "1)", "1", "6000", "6000", "-", "-", "-", "-"] in lines


def test_one_name_of_two_kinds_says_which_is_which() -> None:
    op, layer = Site("matmul", "op", device=True), Site("matmul", "layer", device=True)
    text = device(trace_of(made(1, op, 0, 1, ran(0, 2)), made(2, layer, 0, 1, ran(0, 3))))
    assert [line.split("  ")[0] for line in text.splitlines() if line.startswith("matmul")] == [
        "matmul (layer)",
        "matmul (op)",
    ]


NOTHING = "No device time was recorded: no span asked for it; give its rule `device: true` in the profile."


@pytest.mark.parametrize(
    ("trace", "says"),
    [
        (
            trace_of(made(1, CHAT, 0, 1)),
            NOTHING,
        ),
        (trace_of(), NOTHING),
        (
            trace_of(made(1, DECODE, 0, 1), made(2, DECODE, 1, 2)),
            "No device time was recorded: 2 spans asked for it and got none (2 no events).",
        ),
        (
            trace_of(made(1, DECODE, 0, 1, ran(0, 0, "dropped"))),
            "No device time was recorded: 1 span asked for it and got none (1 dropped).",
        ),
        (
            replace(trace_of(made(1, CHAT, 0, 1)), origin=Origin(1, "", 0, 0, "other")),
            "No device time was recorded: kernels in a trace of another profiler are spans of their own, as in",
        ),
    ],
)
def test_without_device_time_one_line_says_so(trace: Trace, says: str) -> None:
    text = device(trace)
    assert says in text
    assert "Device 0" not in text
    assert "%" not in text


def test_targets_dropped_everywhere_are_still_named() -> None:
    text = device(trace_of(made(1, DECODE, 0, 1, ran(0, 0, "dropped"))))
    assert section(text, "Device time asked for") == outline(
        """
        Spans that asked for device time: 1; that got none: 1
        Without device time  Kind      Spans     Why
        decode               op        1         no event was free
        """
    )


def test_short_stretches_come_with_a_warning() -> None:
    assert "measured several times too long" in device(trace_of(made(1, DECODE, 0, 1, ran(0, 0.009))))
    assert "measured several times too long" not in device(trace_of(made(1, DECODE, 0, 1, ran(0, 0.010))))


def test_a_window_that_the_rings_no_longer_hold_is_cut_and_said() -> None:
    trace = trace_of(made(1, DECODE, 60, 61, ran(50, 70)), held_from_ns=60 * MS)
    text = device(trace)
    assert "Spans: the newest 1 are kept, none is missing from 0.06 s to 0.1 s; of all that" in text
    assert ["Busy", "with", "compute", "10", "25.0%", "window"] in [line.split() for line in text.splitlines()]


names = st.text(max_size=200) | st.sampled_from(["", "a\nb", "\x1b[2J", "漢字" * 60, "\u202eabc", "x" * 500, "%s{}"])


@given(st.lists(names, min_size=1, max_size=5), st.text(max_size=40), st.integers(1, 10**15), st.none() | st.just(1))
@example(["x" * 80], "exclusive", 1_000_005_000_000, None)
def test_no_name_breaks_a_line_or_its_width(given: list[str], label: str, unit: int, rows: int | None) -> None:
    spans = []
    for number, name in enumerate(given):
        on = DeviceInterval(0, number, unit, unit * (number + 2) + 1, label, unit)
        root = Span(Site(name, "request"), 10 + number, 0, 10 + number, 1, 0, 0, unit * 9, unit * 9, 0, device=(on,))
        lost = replace(on, label="captured", end_ns=unit)
        child = Site(name, "op", device=True)
        spans += [root, Span(child, 20 + number, 10 + number, 10 + number, 1, 0, 0, 1, 1, 1, device=(lost,))]
    text = device(Trace(Origin(1, "s", 0, 0), 0, unit * 10, spans), rows=rows)
    assert all(measure_width(line) <= LINE for line in text.splitlines())
    assert text.replace("\n", "").isprintable()
    assert len(text.split("\n")) == len(text.splitlines()) + 1


def test_a_saved_file_says_the_same_as_the_trace_it_was_made_from(tmp_path: Path) -> None:
    trace = replace(service(), held_from_ns=10 * MS)
    loaded, _ = chrome.load(chrome.dump(tmp_path / "trace.json.gz", trace))
    assert measure_utilisation(Recording.from_trace(loaded)) == measure_utilisation(Recording.from_trace(trace))
    assert device(loaded) == device(trace)


def test_a_file_from_before_there_was_device_time_reads_as_one_without(tmp_path: Path) -> None:
    path = chrome.dump(tmp_path / "trace.json", trace_of(made(1, CHAT, 0, 10), made(2, DECODE, 1, 2, parent=1)))
    content = json.loads(path.read_text())
    del content["instrument"]["held_from_ns"]
    path.write_text(json.dumps(content))
    loaded, _ = chrome.load(path)
    assert loaded.coverage == (0, 100 * MS)
    assert "1 span asked for it and got none" in device(loaded)
