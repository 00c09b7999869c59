"""The `cost` view: its parts add up, in a saved trace and in a running session."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden_views import is_golden, text_of
from hypothesis import given
from hypothesis import strategies as st
from raw_spans import counted, counted_paths, traces

import instrument
from instrument import chrome, profiled, scope
from instrument.instrumentors.requests import asgi_wsgi_apps
from instrument.instrumentors.requests.exchange import Exchanges
from instrument.profile.keys import loads
from instrument.recorder.core import calls_by_site
from instrument.recorder.recorder import RECORDER
from instrument.recording.spans import UNTIMED, Cost, DeviceInterval, Origin, Site, Span
from instrument.report.cost_view import InstrumentationCost, SiteCost, cost
from instrument.report.device_use import NO_EVENTS
from instrument.report.section import format_summary
from instrument.report.view import InstrumentationStats, Options, Recording
from instrument.trace.trace import Trace

MS = 1_000_000
CHAT = Site("POST /chat", "request", "chat.server", "handle")
LINEAR = Site("Linear", "layer", instance="model.head", device=True)
TOKENISE = Site("tokenise", "phase", "chat.text", "tokenise")
HOT = Site("hash", "op", "chat.cache", "key")
EACH_NS = {CHAT: 170.0, LINEAR: 95.5, TOKENISE: 48.25, HOT: 48.25}


def span(span_id: int, site: Site, start_ms: float, end_ms: float, *device: DeviceInterval) -> Span:
    start, end = round(start_ms * MS), round(end_ms * MS)
    return Span(site, span_id, 0, span_id, 1, 0, start, end, end - start, end - start, device=device)


def trace_of_a_service() -> Trace:
    work = DeviceInterval(0, 7, 3 * MS, 5 * MS)
    spans = [
        span(1, CHAT, 0, 40),
        span(2, LINEAR, 2, 4, work),
        span(3, LINEAR, 5, 6),
        span(4, LINEAR, 7, 8, DeviceInterval(0, 7, 7 * MS, 7 * MS, "dropped")),
        *(span(5 + n, TOKENISE, 10 + n, 10.001 + n) for n in range(20)),
    ]
    return Trace(
        Origin(1, "shop", 0, 0, "native"), 0, 100 * MS, spans,
        cost=Cost(24, 60.0, 100 * MS, 500_000), held_from_ns=1 * MS,
        losses={"spans overwritten by newer ones": 31, "device times dropped": 1, "queue full": 0},
        notes=["layers rule 2 (profile.yaml:14): the model is compiled, so its layers run as one"],
    )  # fmt: skip


def stats() -> InstrumentationStats:
    return InstrumentationStats(
        clock="CLOCK_MONOTONIC",
        added_ns=lambda sites: [EACH_NS[site] for site in sites],
        pairs_ns=300.0,
        threads_ns={"looking through spans": 400_000, "reading gauges": 100_000},
        passed={HOT: 9000, TOKENISE: 30},
        muted={HOT},
        held_rows=24,
        ring_rows=4096,
        ring_bytes=64 << 20,
        notes=trace_of_a_service().notes,
    )


def running(trace: Trace) -> Recording:
    return Recording(
        lambda: counted(trace.spans, trace.threads),
        lambda: trace,
        make_cost=lambda: trace.cost,
        losses=trace.losses,
        notes=trace.notes,
        window_ns=trace.end_ns,
        recorder="native",
        make_stats=stats,
    )


def test_the_layout_of_a_running_service() -> None:
    assert is_golden("cost", text_of(cost(running(trace_of_a_service()), Options(unit="us"))))


def test_the_layout_of_a_saved_trace_that_knows_less(tmp_path: Path) -> None:
    trace, tally = chrome.load(chrome.dump(tmp_path / "t.json", trace_of_a_service()))
    assert is_golden("cost_saved", text_of(cost(Recording.from_trace(trace, lambda: tally), Options(rows=1))))


def check_sums(view: InstrumentationCost) -> None:
    assert view.cost is not None
    assert sum(part.time_ns for part in view.parts) == view.cost.total_ns
    assert min((part.time_ns for part in view.parts), default=0) >= 0
    if view.sites:
        assert sum(one.ratio or 0 for one in view.sites) == pytest.approx(1 if view.sites[0].cost_ns else 0)
    assert sum(one.calls for one in view.sites) == 24


@given(
    st.integers(0, 24),
    st.floats(0, 1e6),
    st.integers(0, 10**9),
    st.one_of(st.none(), st.integers(1, 4)),
    st.sampled_from([0, 1000, 10**12]),
)
def test_the_parts_and_the_sites_add_up(
    calls: int, each_ns: float, thread_ns: int, rows: int | None, least_ns: int
) -> None:
    trace = trace_of_a_service()
    trace.cost = Cost(calls, each_ns, 100 * MS, thread_ns)
    check_sums(cost(Recording.from_trace(trace), Options(rows=rows, least_ns=least_ns)))


def test_the_sites_cost_their_calls_at_what_one_of_their_probes_costs() -> None:
    view = cost(running(trace_of_a_service()), Options())
    check_sums(view)
    assert [(one.name, one.calls, one.each_ns, one.cost_ns) for one in view.sites] == [
        ("tokenise", 20, 48.25, 965),
        ("Linear", 3, 95.5, round(286.5)),
        ("POST /chat", 1, 170.0, 170),
    ]
    assert (view.device_asked, view.device_missing) == (3, {"no events": 1, "dropped": 1})
    assert view.muted is not None
    assert [(one.name, one.calls, one.now) for one in view.muted] == [("hash", 9000, True), ("tokenise", 30, False)]


def test_a_muted_site_is_named_once() -> None:
    session = instrument.start(loads("budget: 1%"))
    assert session is not None
    try:

        @profiled("busy")
        def busy() -> None: ...

        busy()
        (site,) = calls_by_site(RECORDER)
        assert RECORDER.mute(site)
        for _ in range(3):
            busy()
        (note,) = (note for note in session.notes() if "busy" in note)
        assert "3 calls were not recorded" in note
        text = session.summary(views=["cost"])
        (line,) = (line for line in text.split("Not observed")[1].splitlines() if "busy" in line)
        assert line.split()[-2:] == ["3", "yes"]
        assert "3 calls were not recorded" in " ".join(session.summary(views=["events"]).split())
    finally:
        instrument.stop()


def test_a_summary_says_the_cost_once() -> None:
    recording = running(trace_of_a_service())
    with_view = format_summary(["events", "cost"], recording, Options())
    assert "Cost of the instrumentation" not in with_view
    assert with_view.count("Instrumentation Report") == 1
    assert format_summary(["events"], recording, Options()).count("Cost of the instrumentation") == 1


def test_a_trace_of_another_profiler_does_not_say_what_it_cost() -> None:
    trace = Trace(Origin(1, "", 0, 0, "other"), 0, 9, [span(1, CHAT, 0, 1)])
    assert "What it cost is not known: the trace does not say it.\n" in text_of(
        cost(Recording.from_trace(trace), Options())
    )


def test_a_running_session_reports_its_probes_threads_rings_and_clock() -> None:
    session = instrument.start(loads("schedule: {record: 1, repeat: 1}"))
    try:

        @profiled("work", kind="phase")
        def work() -> None:
            pass

        with scope("request", kind="request"):
            for _ in range(100):
                work()
        deadline = time.monotonic() + 60
        while not session.cost().thread_ns and time.monotonic() < deadline:
            time.sleep(0.05)
        view = session.views(["cost"])["cost"]
        assert isinstance(view, InstrumentationCost)
        first = view.sites[0]
        costs = session.account.costs.by_shape
        assert (first.name, first.calls, first.each_ns) == ("work", 100, costs["call"].added_ns)
        assert view.sites[1].each_ns == costs["scope"].added_ns
        assert view.parts[0].name == "probes"
        assert "thread looking through spans" in [part.name for part in view.parts]
        assert (view.clock, view.muted) == ("CLOCK_MONOTONIC", ())
        assert view.rings is not None
        assert (view.rings.held_rows, view.rings.memory_bytes) == (101, 64 << 20)
    finally:
        instrument.stop()


def test_a_request_of_an_adapter_costs_what_its_adapter_adds() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def nothing(_: Any = None) -> None: ...

    session = instrument.start(loads("requests: auto\nlimits: {blocked: off}"))
    assert session is not None
    try:
        served = asgi_wsgi_apps.AsgiApp(app, Exchanges(session.profile.requests[0]))
        asked = {"type": "http", "method": "GET", "path": "/", "headers": []}
        for _ in range(3):
            asyncio.run(served(asked, nothing, nothing))
        costs = session.account.costs.by_shape
        assert costs["request"].added_ns > costs["scope"].added_ns
        view = session.views(["cost"])["cost"]
        assert isinstance(view, InstrumentationCost)
        assert [(one.name, one.calls, one.each_ns) for one in view.sites] == [("GET", 3, costs["request"].added_ns)]
        assert session.cost().per_call_ns == pytest.approx(costs["request"].added_ns)
    finally:
        instrument.stop()


def test_the_probes_are_measured_when_a_session_starts_and_by_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    session = instrument.start(loads(""))
    try:
        assert all(cost.added_ns > 1 for cost in session.account.costs.by_shape.values())
        monkeypatch.setattr("instrument.instrumentors.probe_cost.Recorder", None)
        with scope("request", kind="request"):
            pass
        assert session.cost().per_call_ns == session.account.costs.by_shape["scope"].added_ns
        assert session.views(["cost"])
    finally:
        instrument.stop()


@given(traces(), st.integers(0, 500), st.integers(0, 10**6), st.booleans())
def test_every_number_is_that_of_the_raw_spans(trace: Trace, each_ns: int, thread_ns: int, is_live: bool) -> None:
    trace.cost = Cost(len(trace.spans), each_ns, 100, thread_ns)
    cost_of = {span.site: 10.0 + len(span.site.name) * is_live for span in trace.spans}
    muted = {span.site: number for number, span in enumerate(trace.spans[:3])}

    def kept() -> InstrumentationStats:
        return replace(
            stats(), added_ns=lambda sites: [cost_of[site] for site in sites], passed=muted, muted=set(list(muted)[:1])
        )

    recording = running(trace) if is_live else Recording.from_trace(trace)
    if is_live:
        recording.make_stats = kept
    view = cost(recording, Options())
    calls: dict[Site, list[Span]] = {}
    for span in trace.spans:
        calls.setdefault(span.site, []).append(span)
    _, inner = counted_paths(trace.spans)
    host_ns = {site: sum(span.total_ns for span in spans if span.span_id not in inner) for site, spans in calls.items()}
    one_ns = {site: cost_of[site] if is_live else each_ns for site in calls}
    costs = {site: round(len(spans) * one_ns[site]) for site, spans in calls.items()}
    whole_ns = sum(costs.values())
    assert sorted(repr(one) for one in view.sites) == sorted(
        repr(
            SiteCost(
                site.name, site.kind, site.instance, len(spans), one_ns[site], costs[site],
                host_ns[site], costs[site] / whole_ns if whole_ns else None,
            )
        )
        for site, spans in calls.items()
    )  # fmt: skip
    for one in view.sites:
        assert one.burden == (one.cost_ns / one.host_ns if one.host_ns else None)
    assert sum(part.time_ns for part in view.parts) == trace.cost.total_ns
    assert all(part.ratio == part.time_ns / 100 for part in view.parts)
    assert view.ratio == trace.cost.total_ns / 100
    assert (view.muted is None, view.rings is None) == (not is_live, not is_live)
    if view.muted is not None and view.rings is not None:
        now = next(iter(muted), None)
        assert {(one.name, one.kind, one.place, one.calls, one.now) for one in view.muted} == {
            (site.name, site.kind, site.instance, passed, site is now)
            for site, passed in muted.items()
            if passed or site is now
        }
        assert view.rings.ratio == 24 / 4096
    asked = [span for span in trace.spans if span.device or span.site.device]
    empty = [span for span in asked if all(one.label in UNTIMED for one in span.device)]
    reasons = Counter(span.device[0].label if span.device else NO_EVENTS for span in empty)
    assert (view.device_asked, dict(view.device_missing)) == (len(asked), dict(reasons))
