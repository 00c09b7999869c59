"""Every view that a profile may name: no name breaks it, it fits a terminal, and its document has every number."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interval_lists import assign_self_times
from raw_spans import counted

import instrument
from instrument import scope
from instrument.profile.keys import loads
from instrument.profile.model import KINDS, SORT_KEYS, STATES, TRACER_OPTIONS, VIEWS
from instrument.recording.metric_definitions import GAUGES
from instrument.recording.spans import (
    HOST,
    Cost,
    DeviceInterval,
    FirstCall,
    Gpu,
    ImportTime,
    Kernel,
    Origin,
    Sample,
    Site,
    Span,
    Startup,
)
from instrument.recording.trace_context import RemoteParent
from instrument.report.section import VIEW_OF, format_summary, make_views, summary_document
from instrument.report.table import (
    LINE,
    format_time,
    make_named_table_lines,
    make_section_title_lines,
    measure_width,
    printable,
)
from instrument.report.view import UNITS, InstrumentationStats, Options, Recording
from instrument.trace.trace import Allocation, Trace

MS = 1_000_000
HOSTILE = [
    "", "a/b", "50%", "x::y", "two\nlines", 'a "quoted" name', "\x1b[2J", "\u202eturned", "漢字" * 60, "n" * 500,
    "{}%s", "-", "\ud800", "queue", "unknown", "p50", "thread0", "(remaining 2)", "1e5", "a\tb\r", "é" * 99,
]  # fmt: skip
ATTRIBUTES: list[tuple[tuple[str, Any], ...]] = [
    (), (("direction", "h2d"), ("sync", True), ("pinned", False)), (("direction", "p2p"),), (("phase", "prepare"),),
    (("phase", "compute"),), (("phase", 7),), (("direction", 7), ("sync", "yes")),
]  # fmt: skip


def span(span_id: int, site: Site, start_ms: float, end_ms: float, parent: int = 0, root: int = 0) -> Span:
    start, end = round(start_ms * MS), round(end_ms * MS)
    return Span(site, span_id, parent, root or parent or span_id, 1, 0, start, end, end - start, 0)


def service() -> Trace:
    """A bit of everything, so that every part of every view has something to say."""
    copy_in = Site("memcpy h2d", "copy", "torch", "Tensor.to", device=True, attributes=ATTRIBUTES[1])
    layer = Site("Linear", "layer", instance="model.layers.0.mlp.up", device=True)
    spans = []
    for number in range(6):
        first, at = number * 20 + 1, number * 40
        of_request = [
            span(first, Site("POST /chat" if number % 2 else "POST /embed", "request"), at, at + 33 + number),
            span(first + 1, Site("queue", "phase"), at, at + 4.5, first),
            span(first + 2, Site("train", "step"), at + 5, at + 31.25, first),
            span(first + 3, Site("next", "loader"), at + 5, at + 7 + number, first + 2, first),
            span(first + 4, copy_in, at + 13, at + 14.125, first + 2, first),
            span(first + 5, layer, at + 14.5, at + 21 + number, first + 2, first),
            span(first + 6, Site("all_reduce", "comm"), at + 28, at + 31, first + 2, first),
            span(first + 7, Site("detokenise", "phase", attributes=ATTRIBUTES[3]), at + 31.5, at + 33, first),
            span(first + 8, Site("log", "user", device=True), at + 33, at + 33 + 1e-6 * number, first),
        ]
        of_request[2].attributes = {"samples": 16 + number}
        of_request[4].attributes = {"bytes": 3_000_000 + number}
        of_request[4].device = (DeviceInterval(0, 13, (at + 14) * MS, (at + 16) * MS, "exclusive", 3000),)
        of_request[5].device = (DeviceInterval(0, 7, (at + 15) * MS, (at + 29 + number) * MS, "overlapped", 5000),)
        of_request[0].error = "TimeoutError" if number == 3 else None
        of_request[0].remote = RemoteParent(0x4BF92F3577B34DA6A3CE929D0E0E4736, 7) if number == 4 else None
        spans += of_request
    assign_self_times(spans)
    return Trace(
        Origin(7, "shop", 0, 1_700_000_000 * 10**9, "native"), 0, 250 * MS, spans, {1: "MainThread"},
        losses={"spans overwritten by newer ones": 12}, notes=["rule 3 matched nothing"],
        cost=Cost(54, 61.25, 250 * MS, 1_500_000, 707.5), samples=[
            Sample("process_cpu", HOST, 100, 31.5), Sample("utilization", 0, 100, 75), Sample("power", 0, 100, None),
            Sample("process_memory", HOST, 100, 7.25e9), Sample("process_memory_peak", HOST, 100, 9.5e9),
            Sample("torch_reserved", 0, 100, 3 << 30), Sample("torch_reserved_peak", 0, 100, 4 << 30),
            Sample("process_cpu", HOST, 100 + 50 * MS, 44.25), Sample("a\nb" * 40, 0, 100, 1.0),
            Sample("process_memory", HOST, 100 + 50 * MS, 7.125e9), Sample("torch_reserved", 0, 100 + 50 * MS, 5 << 29),
        ], gpus=[Gpu(0, "NVIDIA H200 漢字" * 20, "GPU-aaaa\x1b")], held_from_ns=3 * MS,
        allocations=[
            Allocation(HOST if n % 3 else 0, n * 9 * MS, 1 + n % 2, (2 - n % 4) * 123_457, n % 7, 10**8 + n, n << 21)
            for n in range(25)
        ], watched=(1, 240 * MS),
        startup=Startup(
            -40 * MS, -1250 * MS, (ImportTime("torch", 20, 31 * MS, 22 * MS, 3 * MS), ImportTime("漢字", 1, 9, 8)),
            tuple(FirstCall(one.site, one.start_ns, one.total_ns) for one in spans[:9]),
        ),
    )  # fmt: skip


def beside_torch() -> Trace:
    """The same with rows enough in every table that any bound leaves several of them out."""
    trace = service()
    trace.kernels = [
        Kernel(f"gemm_{n % 7}<float>(int)", "kernel", 0, 7, at := n * 6 * MS + 11_003, at + (n % 7 * 711_037 + n * 137),
               1, n * 5 * MS + 3)
        for n in range(35)
    ]  # fmt: skip
    attributes, more = {word: (("phase", word),) for word in ("load", "compile")}, [*trace.spans]
    for n in range(6):
        site = Site(f"prepare {n}", "user", attributes=attributes["compile" if n % 2 else "load"])
        more += [
            span(1000 + 2 * n, site, 9 * n, 9 * n + 3.0371 + n * 1.0193),
            span(1001 + 2 * n, site, 9 * n + 4, 9 * n + 5.0017 + n / 7),
        ]
    assign_self_times(more)
    trace = replace(trace, spans=more)
    assert trace.startup is not None
    packages = [
        ImportTime(f"package{n}", 3 + n * n, (9 + n) * 1_234_567, (3 + n) * 1_357_911, n * 31_013, n * 17_123)
        for n in range(8)
    ]
    firsts = [
        replace(first, total_ns=first.total_ns + (1 + n) * 10_007_003) for n, first in enumerate(trace.startup.firsts)
    ]
    trace.startup = replace(trace.startup, imports=(*(trace.startup.imports or ()), *packages), firsts=tuple(firsts))
    return trace


def foreign() -> Trace:
    """Return a trace as another profiler's file reads: no cost, no clock, kernels as spans of their own."""
    spans = [span(1, Site("aten::mul", "op"), 0, 1), span(2, Site("Memcpy HtoD", "copy"), 0, 1)]
    return Trace(Origin(0, "", 0, 0, "other"), 0, 2 * MS, spans)


def hostile() -> Trace:
    spans = []
    for number, name in enumerate(HOSTILE):
        kind = KINDS[number % len(KINDS)]
        site = Site(name, kind, name, name, name, number, name, True, ATTRIBUTES[number % len(ATTRIBUTES)])
        first = 3 * number + 1
        root = span(first, Site(name, "request"), number, number + 3)
        root.error = name
        child = span(first + 1, site, number, number + 2, first)
        child.device = (DeviceInterval(number % 3, number, number * MS, (number + 2) * MS, name or "stale"),)
        child.attributes = {"bytes": 10**15, "samples": 10**400, "step": "first"}
        spans += [root, child, span(first + 2, site, number, number + 1)]
    return Trace(
        Origin(1, "s\n", 0, 10**30, "\x1b"), 0, 20 * MS, spans, {1: "漢字" * 60}, losses=dict.fromkeys(HOSTILE, 10**9),
        notes=HOSTILE, cost=Cost(10**12, 1e9, 1, 10**15),
        samples=[Sample(name, number, 5, 1e300) for number, name in enumerate((*HOSTILE, *GAUGES))],
        allocations=[
            Allocation(-(10 ** (number % 2)), number * MS, number % 3, 10**18 * (-1) ** number, number % 5, 10**18, 7)
            for number in range(40)
        ], watched=(3 * MS, 19 * MS),
        gpus=[Gpu(number, name, name) for number, name in enumerate(HOSTILE)],
        startup=Startup(
            5, 10**30, tuple(ImportTime(name, 10**9, 10**18, -1, 3) for name in HOSTILE),
            tuple(FirstCall(one.site, -5, 10**18) for one in spans),
        ),
    )  # fmt: skip


TRACES = {
    "a service": service(),
    "a service beside torch": beside_torch(),
    "hostile names": hostile(),
    "an empty recording": Trace(Origin(1, "shop", 5, 5), 0, 0, []),
    "one span": Trace(Origin(1, "shop", 5, 5), 0, 2 * MS, [span(1, Site("work"), 0, 1)]),
    "one span of no length": Trace(Origin(1, "shop", 5, 5), 0, 0, [span(1, Site("work", "request"), 0, 0)]),
    "another profiler's trace": foreign(),
    **{f"nothing but {what}": Trace(Origin(1, "shop", 5, 5), 0, 2 * MS, [], **facts) for what, facts in {
        "a startup without times": {"startup": Startup(0)},
        "a startup in which nothing was imported": {"startup": Startup(0, -5, ())},
        "a first request": {"startup": Startup(0, firsts=(FirstCall(Site("n" * 200, "request"), 5, 9),))},
        "torch.profiler": {"watched": (0, MS)},
        "gauges": {"samples": [Sample("utilization", 0, 100, 75)]},
        "losses": {"losses": {"spans overwritten by newer ones": 12}, "held_from_ns": MS},
    }.items()},
    "spans that are cut": Trace(
        Origin(1, "shop", 5, 5), 0, 9 * MS, held_from_ns=5 * MS,
        spans=[span(n, Site("n" * 200, kind, device=True), n, 9.5) for n, kind in enumerate(KINDS, 1)],
    ),
}  # fmt: skip
OPTIONS = {
    "as it is": Options(),
    "bounded": Options(rows=1, threads="merged", sorted_by="total", unit="us", tracer_option="AllOpDetail"),
    "apart": Options(threads="apart", corrected=True, unit="s", state="GPU", tracer_option="OpDetail", skip_first=2),
    "at least": Options(least_ns=6 * MS, unit="ns", state="CPU", sorted_by="max"),
}


def running(trace: Trace) -> Recording:
    """The recording of a process that has these spans and still runs."""
    return Recording(
        lambda: counted(trace.spans, trace.threads), lambda: trace, make_cost=lambda: trace.cost, losses=trace.losses,
        notes=trace.notes, window_ns=trace.end_ns, recorder="native", make_startup=lambda: trace.startup,
        collector_ids=lambda span, _: (span.root_id, 2**64 - 1),
        make_stats=lambda: InstrumentationStats(
            "time stamp counter", lambda sites: [48.5] * len(sites), 300.0, {"\n" + "x" * 200: 7_000, "": 11},
            {span.site: 900 for span in trace.spans}, {span.site for span in trace.spans[::2]}, 54, 4096, 64 << 20,
            trace.notes,
        ),
    )  # fmt: skip


def check(text: str) -> None:
    for line in text.split("\n"):
        assert measure_width(line) <= LINE, line
        assert line.isprintable(), line


@pytest.mark.parametrize(
    "options", [pytest.param(name, marks=[pytest.mark.slow] * (name == "at least")) for name in OPTIONS]
)
@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("view", VIEWS)
def test_no_trace_breaks_a_view_its_lines_or_its_document(view: str, trace: str, options: str) -> None:
    for recording in (Recording.from_trace(TRACES[trace]), running(TRACES[trace])):
        text = format_summary([view], recording, OPTIONS[options])
        check(text)
        assert len([line for line in text.split("\n") if line]) >= 2
        assert json.dumps(summary_document([view], recording, OPTIONS[options]), allow_nan=False)


@pytest.mark.parametrize("text", ["", "a", "steps", "日本日本", "e\u0301" * 25, "x" * 25])
def test_titles_of_sections_have_one_width_with_any_name(text: str) -> None:
    line = make_section_title_lines(text)[0]
    assert measure_width(line) == 77
    assert len(line) - len(line.lstrip("-")) == len(line) - len(line.rstrip("-")) == 25


def test_a_long_text_next_to_a_name_is_shortened_before_the_name() -> None:
    name, place = "a_function_of_the_service", "selector_events.py:1057 _SelectorSocketTransport.write"
    lines = make_named_table_lines(
        ["Name", "Count", "At"], [[name, "1", place], [name + "_too", "23", place + "_soon"]], 0
    )
    assert all(measure_width(line) <= LINE for line in lines)
    assert [line.split() for line in lines[1:]] == [
        [name, "1", "selector_events.py:1057", "_SelectorSocketTransport.write"],
        [name + "_too", "23", "selector_events.py:1057", "_SelectorSocketTransport.write_soon"],
    ]
    long = 3 * name
    (_, line) = make_named_table_lines(["Name", "Count", "At"], [[long, "1", place]], 0)
    assert (measure_width(line), line.split()[-1][-6:], len(line.split()[0])) == (LINE - 2, ".write", 59)


def test_every_name_of_a_view_makes_one() -> None:
    assert set(VIEW_OF) == set(VIEWS)


def test_no_view_of_spans_says_that_nothing_was_recorded_where_newer_ones_have_overwritten_it() -> None:
    wanted = {
        "requests": "request", "user": "span of kind user", "operators": "operator", "copies": "copy",
        "benchmark": "step", "distribution": "communication",
    }  # fmt: skip
    session = instrument.start(loads("limits: {ring: 64KiB}", environ={}))
    assert session is not None
    try:
        for kind in ("request", "user", "op", "copy", "step", "comm"):
            with scope("early", kind=kind):
                pass
        early = {view: session.summary(views=[view]) for view in wanted}
        for _ in range(20_000):
            with scope("late", kind="phase"):
                pass
        late = {view: session.summary(views=[view]) for view in [*wanted, "events", "device"]}
    finally:
        instrument.stop()
    for view, what in wanted.items():
        assert "early" in early[view]
        said = " ".join(late[view].split())
        assert f"No {what} is among the kept spans; older ones were overwritten." in said
        assert "was recorded" not in said
        check(late[view])
    assert "No span with device time is among the kept spans" in late["device"]
    assert "early" in late["events"]


# Every number of the text is in the document.


def numbers_of(document: Any) -> Iterator[float]:
    if isinstance(document, dict):
        for value in document.values():
            yield from numbers_of(value)
    elif isinstance(document, list):
        for value in document:
            yield from numbers_of(value)
    elif isinstance(document, (int, float)) and not isinstance(document, bool):
        yield document


def strings_of(document: Any) -> Iterator[str]:
    if isinstance(document, dict):
        yield from document
        for value in document.values():
            yield from strings_of(value)
    elif isinstance(document, list):
        for value in document:
            yield from strings_of(value)
    elif isinstance(document, str):
        yield document


NUMBER = re.compile(r"(?<![\w.^-])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w^])")
SENTENCES = re.compile(
    r"10\^\d+|(?<=\s)100\.0%|^\d+\. |within 0\.8 %|below 0\.01 ms|exceed 100?%|exceed 1\.|Calls 0:|GPU Time is 0"
    r"|period \(.*?\)"
)
"""Numbers that are part of a sentence, or number the lines."""

SCALES = (1, 1e-3, 1e-6, 1e-9, 100, 1 / 2**20, 1e3)
"""Units of time, of which the document has ns, fractions as percentages, 10^6 bytes, MiB, and GB/s of bytes in ns."""


def shown_numbers(text: str, document: Any) -> list[str]:
    """The numbers of a text that are no part of a name."""
    for word in sorted({printable(word) for word in strings_of(document) if len(word) > 1}, key=len, reverse=True):
        text = text.replace(word, " ")
    return [found for line in text.split("\n") for found in NUMBER.findall(SENTENCES.sub(" ", line))]


def is_there(shown: str, known: list[float]) -> bool:
    """Return True if a number is one of the known ones, in some unit, to the digits that are shown."""
    mantissa, _, exponent = shown.partition("e")
    digits = len(mantissa.partition(".")[2])
    value, half = float(shown), 0.5 * 10.0 ** (int(exponent or 0) - digits)
    return any(abs(number * scale - value) <= half * (1 + 1e-9) for number in known for scale in SCALES)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("trace", ["a service", "a service beside torch"])
@pytest.mark.parametrize("view", VIEWS)
def test_every_number_of_the_text_is_in_the_document(view: str, trace: str, options: str) -> None:
    for recording in (Recording.from_trace(TRACES[trace]), running(TRACES[trace])):
        document = json.loads(json.dumps(summary_document([view], recording, OPTIONS[options])))
        text = "\n".join(make_views([view], recording, OPTIONS[options])[view].lines())
        known = list(numbers_of(document))
        shown = shown_numbers(text, document)
        assert len(shown) >= 2
        assert [number for number in shown if not is_there(number, known)] == []


@pytest.mark.parametrize("view", [view for view in VIEWS if view != "events"])
def test_nanoseconds_are_whole_numbers(view: str) -> None:
    """In a line of 100 columns the seven numbers of an event leave a name no room for all digits of each."""
    text = "\n".join(make_views([view], running(service()), Options(unit="ns"))[view].lines())
    assert re.findall(r"(?m)(?<!\w)\d[\d.]*e\+?\d+(?!\w)", text) == []


def test_a_time_has_four_digits_and_is_in_full_before_an_exponent_would_take_more() -> None:
    shown = [format_time(time_ns, unit) for time_ns, unit in (
        (170_000_000, "ns"), (1234.6, "ns"), (0, "ns"), (1e14, "ns"), (None, "ns"), (12_345_678_900, "us"),
        (999_999_400, "us"), (1_500, "us"), (3.25e18, "ms"), (0.5, "ms"),
    )]  # fmt: skip
    assert shown == [
        "170000000", "1235", "0", "1e14", "-", "12345679", "999999", "1.5", "3250000000000", "5e-7",
    ]  # fmt: skip


def test_a_number_that_is_not_in_the_document_is_found() -> None:
    assert is_there("1.235e-4", [123.46])
    assert not is_there("1.235e-4", [123.4])
    assert not is_there("17", [16.4, 17.6])


# Any spans.


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    spans: list[Span] = []
    sites = [
        Site(draw(st.sampled_from(HOSTILE)), kind, instance=draw(st.sampled_from(HOSTILE)), device=draw(st.booleans()),
             attributes=draw(st.sampled_from(ATTRIBUTES)))
        for kind in KINDS
    ]  # fmt: skip
    is_damaged = draw(st.booleans())  # parents come later or are missing
    tasks = draw(st.sampled_from([[0], [0, 1, 2]]))
    for span_id in range(1, draw(st.integers(1, 15))):
        parent = draw(st.integers(0, 15 if is_damaged else span_id - 1))
        root = spans[parent - 1].root_id if 0 < parent < span_id else span_id
        start = draw(st.integers(0, 10**9))
        end = start + draw(st.integers(0, 10**9))
        made_of = Span(
            draw(st.sampled_from(sites)), span_id, parent, root, draw(st.integers(1, 2)), draw(st.sampled_from(tasks)),
            start, end, 0, 0,
        )  # fmt: skip
        for _ in range(draw(st.integers(0, 2))):
            begin = draw(st.integers(0, 10**9))
            label = draw(st.sampled_from(["exclusive", "stale", "captured", "dropped", "x\n"]))
            finish = begin + (0 if label in ("captured", "dropped") else draw(st.integers(0, 10**9)))
            made_of.device += (DeviceInterval(draw(st.integers(0, 1)), 7, begin, finish, label),)
        made_of.attributes = draw(st.sampled_from([{}, {"bytes": 5}, {"bytes": "x"}, {"samples": 3}, {"step": True}]))
        made_of.clipped = draw(st.integers(0, 9)) == 0
        spans.append(made_of)
    above = {one.span_id: one for one in spans}
    for one in spans:  # of a circle there is no trace
        way, up = {0}, one.parent_id
        while up in above and up not in way:
            way.add(up)
            up = above[up].parent_id
        one.parent_id = 0 if one.span_id in way else one.parent_id
    assign_self_times(spans)
    return Trace(
        Origin(1, "", 0, 1), 0, draw(st.integers(0, 3 * 10**9)), spans, held_from_ns=draw(st.integers(0, 10**9)),
        startup=draw(st.sampled_from([None, Startup(0), Startup(5, 0, (), firsts_of(spans))])),
        watched=draw(st.sampled_from([None, (0, 10**9)])),
    )  # fmt: skip


def firsts_of(spans: list[Span]) -> tuple[FirstCall, ...]:
    return tuple(FirstCall(one.site, one.start_ns, one.total_ns) for one in spans)


CHOICES = st.builds(
    Options,
    tracer_option=st.sampled_from(TRACER_OPTIONS),
    state=st.sampled_from(STATES),
    sorted_by=st.sampled_from(SORT_KEYS),
    rows=st.none() | st.integers(1, 4),
    threads=st.sampled_from(["both", "merged", "apart"]),
    corrected=st.booleans(),
    least_ns=st.sampled_from([0, 10**6, 10**12]),
    skip_first=st.integers(0, 3),
    unit=st.sampled_from(list(UNITS)),
)


@given(traces(), CHOICES)
def test_any_spans_and_options_make_every_view(trace: Trace, options: Options) -> None:
    recording = Recording.from_trace(trace)
    check(format_summary(VIEWS, recording, options))
    document = summary_document(VIEWS, recording, options)
    json.dumps(document, allow_nan=False)
    assert all(math.isfinite(number) for number in numbers_of(document))
