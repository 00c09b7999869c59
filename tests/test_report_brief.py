"""The view `brief`: one screen for any recording, made of the numbers that the other views have."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from interval_lists import assign_self_times
from test_report_views import CHOICES, hostile, running, service, span, traces

import instrument
from instrument import chrome, scope
from instrument.profile.keys import loads
from instrument.profile.model import VIEWS
from instrument.recording.spans import Cost, DeviceInterval, Gpu, Origin, Sample, Site, Span
from instrument.report.benchmark_view import benchmark
from instrument.report.brief_view import MOST_LINES, Brief, brief
from instrument.report.device_view import device
from instrument.report.phases_view import phases
from instrument.report.requests_view import requests
from instrument.report.section import format_summary
from instrument.report.self_times_view import ops
from instrument.report.table import LINE, measure_width
from instrument.report.view import Options, Recording
from instrument.trace.trace import Trace

MS = 1_000_000
SCREEN = 60


def trace_of(spans: list[Span], **facts: Any) -> Trace:
    assign_self_times(spans)
    return Trace(Origin(7, "shop", 0, 0, "native"), 0, max(one.end_ns for one in spans) + MS, spans, **facts)


def made(trace: Trace, **options: Any) -> Brief:
    return brief(Recording.from_trace(trace), Options(**options))


def text_of(trace: Trace, **options: Any) -> str:
    return "\n".join(made(trace, **options).lines())


def row(text: str, name: str) -> list[str]:
    """The cells of the first row of that name."""
    found = next(line for line in text.splitlines() if line.strip().startswith(f"{name} "))
    return found.strip().removeprefix(name).split()


def job() -> Trace:
    """A loop of 20 steps with two phases, and no request."""
    spans = []
    for number in range(20):
        first, at = 4 * number + 1, 10 * number
        spans += [
            span(first, Site("train", "step"), at, at + 9),
            span(first + 1, Site("forward", "phase"), at, at + 4, first),
            span(first + 2, Site("backward", "phase"), at + 4, at + 8, first),
            span(first + 3, Site("Linear", "layer", instance="head"), at + 1, at + 2, first + 1, first),
        ]
    return trace_of(spans)


def crowded() -> Trace:
    """Two thousand endpoints of long names with as many parts, many devices, losses and notes."""
    spans, parts = list[Span](), [Site(f"part {n} " + "漢字" * 90, "phase") for n in range(40)]
    for number in range(2_000):
        first = 100 * number + 1
        spans.append(span(first, Site(f"POST /tenants/{number}/" + "a/" * 120, "request"), 1, 50 + number))
        for place in range(40 if number % 100 == 0 else 1):
            part = span(first + 1 + place, parts[place], place + 1, place + 2, first)
            part.device = (DeviceInterval(place, 7, place * MS, (place + 1) * MS),)
            spans.append(part)
    return trace_of(
        spans,
        losses={f"rows lost by cause {n} " + "x" * 200: n + 1 for n in range(30)},
        notes=[f"rule {n}: " + "never imported " * 40 for n in range(300)],
        cost=Cost(10**15, 123456.789, 3 * 10**9, 10**15, 10**9),
        held_from_ns=3,
    )


def test_a_screen_has_what_was_served_its_parts_the_time_the_device_the_cost_and_what_is_missing() -> None:
    text = text_of(service())
    assert "requests: 6; 1 of them ended with an error; shown below: the newest 5" in text
    assert row(text, "POST /chat")[:2] == ["3", "1"]
    assert row(text, "queue")[0] == "3"
    assert row(text, "Linear [model.layers.0.mlp.up]")[1].endswith("%")
    assert "Device 0: busy " in text
    assert "Cost: " in text
    assert "Not kept: 12 (spans overwritten by newer ones)" in text
    assert "Not observed: rule 3 matched nothing" in text
    assert text.splitlines()[1].strip("->< ") == "Summary of shop"


def test_the_busy_time_of_a_device_that_may_be_waiting_for_the_host_is_a_line_below_it() -> None:
    def text(*labels: str) -> str:
        one = span(1, Site("step", "step", device=True), 0, 10)
        one.device = tuple(
            DeviceInterval(0, 7, at * MS, (at + 1) * MS, label) for at, label in enumerate(labels, start=1)
        )
        return text_of(trace_of([one]))

    assert "  Of its busy time 25.0% is launch-bound: " in text("exclusive", "exclusive", "exclusive", "launch-bound")
    assert "launch-bound" not in text(*["exclusive"] * 11, "launch-bound")


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["ms", "ns"])
@pytest.mark.parametrize("make", [service, hostile, crowded, job])
def test_a_brief_summary_fits_one_screen_with_any_recording(make: Callable[[], Trace], unit: str) -> None:
    for recording in (Recording.from_trace(make()), running(make())):
        lines = format_summary(["brief"], recording, Options(unit=unit)).splitlines()
        assert len(lines) <= MOST_LINES
        assert max(map(measure_width, lines)) <= LINE


@given(traces(), CHOICES)
def test_any_spans_and_options_make_one_screen(trace: Trace, options: Options) -> None:
    assert len(format_summary(["brief"], Recording.from_trace(trace), options).splitlines()) <= MOST_LINES


def test_rows_without_room_on_the_screen_are_counted() -> None:
    text = text_of(crowded())
    assert "(remaining 1994)" in text
    assert "(37 more devices: --view device)" in text
    assert "Not kept: ... (28 more: --view cost)" in text
    assert "Not observed: ... (297 more: --view cost)" in text
    assert "of all that\nended before there are totals" in text


def test_no_number_is_made_a_second_time() -> None:
    trace = service()
    recording, few, seven = Recording.from_trace(trace), Options(rows=6, at_most=6), Options(rows=7)
    found = brief(recording, Options())
    assert found.requests == requests(recording, few)
    assert found.device == device(recording, few)
    assert found.places == ops(recording, seven).functions[0]
    of_job = Recording.from_trace(job())
    found = brief(of_job, Options())
    assert found.steps == benchmark(of_job, few)
    assert found.phases == phases(of_job, few)


def test_a_batch_job_has_steps_and_their_phases_in_place_of_requests() -> None:
    text = text_of(job())
    assert re.search(r"^Window: .* s; steps: 20$", text, re.MULTILINE)
    assert "request" not in text.partition("More:")[0]
    assert "--view benchmark,phases" in text
    assert row(text, "train")[:5] == ["20", "9", "9", "9", "9"]
    assert row(text, "forward") == ["20", "4", "44.4%"]
    assert row(text, "others")[0] == "-"
    assert row(text, "Linear [head]")[:3] == ["20", "11.1%", "20"]


def test_without_requests_and_steps_there_are_the_functions_alone() -> None:
    text = text_of(trace_of([span(1, Site("load", "op"), 0, 5), span(2, Site("parse", "user"), 1, 4, 1)]))
    assert row(text, "parse") == ["3", "60.0%", "1", "3", "3", "3", "host"]
    assert row(text, "load") == ["2", "40.0%", "1", "5", "5", "5", "host"]
    assert re.search("[Rr]equest|[Dd]evice|[Cc]op(y|ies)", text.partition("More:")[0]) is None


def test_a_hint_at_device_time_is_for_machines_with_a_gpu() -> None:
    trace = replace(job(), gpus=[Gpu(0, "H100", "GPU-1")], samples=[Sample("utilization", 0, 1, 5.0)])
    assert "Device: No device time was recorded: no span asked for it" in text_of(trace)


def test_nothing_at_all_is_said_to_be_nothing() -> None:
    text = text_of(Trace(Origin(1, "shop", 0, 0), 0, 0, []))
    assert "No call was counted" in text
    assert "Not kept: nothing was lost." in text


def test_the_reason_for_missing_device_time_is_next_to_the_device() -> None:
    why = "no device time: no CUDA driver: libcuda.so.1: cannot open shared object file"
    lines = text_of(replace(job(), notes=["rule 3 matched nothing", why])).splitlines()
    assert f"Device: {why}" in lines
    assert [line for line in lines if line.startswith("Not observed")] == ["Not observed: rule 3 matched nothing"]


@pytest.mark.slow
def test_rows_makes_it_shorter_and_never_longer() -> None:
    def places(**options: Any) -> int:
        found = made(crowded(), **options).places
        assert found is not None
        return len(found.rows)

    assert (places(rows=2), places(), places(rows=500)) == (2, 7, 7)


def test_every_note_is_in_full_where_there_is_room_and_the_beginning_of_each_where_there_is_not() -> None:
    notes = ["module shop.late was never imported by this process", "word " * 30]
    assert " ".join(("Not observed: " + notes[1]).split()) in " ".join(text_of(replace(job(), notes=notes)).split())
    cut = text_of(replace(job(), notes=[*notes * 2, "no CUDA driver"]))
    assert cut.count("Not observed: ") == 4
    assert sum(line.endswith(" word ...") for line in cut.splitlines()) == 1


def test_it_is_what_a_process_prints_while_it_runs_at_its_end_and_later_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    profile = "service: shop\nexport: {chrome: {path: t.json}, summary: {to: said.txt}}"
    instrument.start(loads(profile, environ={}))
    with scope("POST /chat", kind="request"), scope("compute", kind="phase"):
        pass
    live = instrument.summary()
    deep = instrument.summary(tracer_option="OpDetail")
    instrument.stop()
    at_exit = Path("said.txt").read_text("utf-8")
    command = [sys.executable, "-m", "instrument", "report", "t.json"]
    later = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for text in (live, at_exit, later):
        assert "Summary of shop" in text
        assert row(text, "POST /chat")[:2] == ["1", "0"]
        assert row(text, "compute")[0] == "1"
        assert len(text.splitlines()) <= SCREEN
    assert "Chrome trace: t.json" in at_exit.replace(f"{Path.cwd()}/", "")
    assert "Profiling Report" in deep
    assert "Summary of shop" not in deep
    saved = chrome.load("t.json")[0]
    assert format_summary(["brief"], Recording.from_trace(saved), Options()) == later


def test_the_help_of_report_says_what_each_view_shows() -> None:
    command = [sys.executable, "-m", "instrument", "report", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for view, shows in VIEWS.items():
        assert f"\n  {view:<12}  {shows}\n" in told
