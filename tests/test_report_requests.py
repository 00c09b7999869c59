"""The `requests` view: every instant counted once, against a sweep by brute force; its layout; what can be found."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from golden_views import is_golden, text_of
from hypothesis import example, given
from hypothesis import strategies as st
from trees import outline

from instrument.recorder.wrapping import STATUS
from instrument.recording.spans import DeviceInterval, Origin, Site, Span
from instrument.recording.trace_context import RemoteParent
from instrument.report.endpoint_statistics import EndpointTimes
from instrument.report.requests_view import RequestTimes, requests
from instrument.report.view import Options, Recording
from instrument.trace.trace import Trace

MS = 1_000_000
CHAT, EMBED = Site("POST /chat", "request"), Site("POST /embed", "request")
QUEUE = Site("queue")
PREPARE = Site("tokenise", "phase", attributes=(("phase", "prepare"),))
STEP = Site("engine.step", "op", device=True)
LAYER = Site("Linear", "layer", instance="model.head", device=True)
COPY_IN = Site("memcpy h2d", "copy", attributes=(("direction", "h2d"),))
COPY_OUT = Site("memcpy d2h", "copy", attributes=(("direction", "d2h"),))
COPY = Site("memcpy d2d", "copy", attributes=(("direction", "d2d"),))
LOAD, COMM = Site("next", "loader"), Site("all_reduce", "comm")
DETOKENISE = Site("detokenise", "phase")
OTHER = Site("log", "user")
PHASE_OF = {
    QUEUE: "queue", PREPARE: "prepare", LAYER: "compute", COPY_IN: "copy in", COPY_OUT: "copy out", COPY: "copy",
    LOAD: "load", COMM: "comm", DETOKENISE: "detokenise",
}  # fmt: skip
SITES = [CHAT, EMBED, STEP, OTHER, *PHASE_OF]


def made(
    span_id: int, site: Site, start: float, end: float, parent: int = 0, root: int = 0, thread: int = 1, unit: int = MS
) -> Span:
    begin, finish = round(start * unit), round(end * unit)
    return Span(site, span_id, parent, root or parent or span_id, thread, 0, begin, finish, finish - begin, 0)


def trace_of(spans: list[Span], end_ns: int = 100 * MS, **facts: int) -> Trace:
    return Trace(Origin(1, "shop", 0, 1_700_000_000 * 10**9), 0, end_ns, spans, **facts)


def view_of(trace: Trace, **options: object) -> RequestTimes:
    return requests(Recording.from_trace(trace), Options(**options))


def parts(endpoint: EndpointTimes) -> dict[str, int]:
    return {phase.name: phase.summed_ns for phase in endpoint.phases} | {"unknown": endpoint.unknown_ns}


def service() -> Trace:
    """A chat request with everything, one with an error, and embeds, one of which is cut."""
    spans = [
        made(1, CHAT, 0, 40),
        made(2, QUEUE, 0, 4, 1),
        made(3, PREPARE, 5, 9, 1),
        made(4, COPY_IN, 9, 11, 1),
        made(5, STEP, 11, 30, 1),
        made(6, LAYER, 12, 20, 5, 1, thread=2),
        made(7, COMM, 18, 22, 5, 1, thread=3),
        made(8, COPY_OUT, 30, 31, 1),
        made(9, DETOKENISE, 31, 39, 1),
        made(10, CHAT, 40, 60),
        made(11, LAYER, 45, 60, 10),
        made(12, EMBED, 10, 30),
        made(13, LAYER, 10, 30, 12),
        made(14, EMBED, 95, 130),
        made(15, LAYER, 96, 97, 14),
    ]
    spans[5].device = (DeviceInterval(0, 7, 13 * MS, 21 * MS),)
    spans[12].device = (DeviceInterval(0, 7, 21 * MS, 29 * MS),)
    spans[9].error = "TimeoutError"
    spans[9].remote = RemoteParent(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0xF067AA0BA902B7)
    return trace_of(spans)


def test_the_layout_of_a_service_with_two_endpoints() -> None:
    assert is_golden("requests", text_of(view_of(service())))


def test_the_parts_of_an_endpoint() -> None:
    chat, embed = view_of(service()).endpoints
    ns = {name: time_ns // MS for name, time_ns in parts(chat).items()}
    assert ns == {
        "queue": 4, "prepare": 4, "copy in": 2, "compute": 6 + 15, "comm": 4, "copy out": 1, "detokenise": 8,
        "unknown": 1 + 1 + 8 + 1 + 5,
    }  # fmt: skip
    assert (chat.requests, chat.errors, chat.wall_ns, chat.max_ns) == (2, 1, 60 * MS, 40 * MS)
    assert [phase.requests for phase in chat.phases if phase.name == "compute"] == [2]
    assert parts(embed) == {"compute": 20 * MS, "unknown": 0}


# Every instant counted once.


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw trees of any shape on any thread, overlapping children, children beyond parents, nested requests."""
    spans: list[Span] = []
    for span_id in range(1, draw(st.integers(2, 12))):
        parent = draw(st.integers(0, span_id - 1))
        root = spans[parent - 1].root_id if parent else span_id
        start, size = draw(st.integers(0, 50)), draw(st.integers(0, 25))
        site = draw(st.sampled_from(SITES)) if parent else draw(st.sampled_from([CHAT, EMBED, LAYER]))
        span = made(span_id, site, start, start + size, parent, root, draw(st.integers(1, 3)), unit=1)
        span.error = draw(st.sampled_from([None, None, "ValueError"]))
        spans.append(span)
    return trace_of(draw(st.permutations(spans)), end_ns=60, held_from_ns=draw(st.sampled_from([0, 5])))


def owner(span: Span, by_id: dict[int, Span]) -> int:
    found, at = 0, span
    while True:
        found = at.span_id if at.site.kind == "request" else found
        if at.parent_id not in by_id:
            return found
        at = by_id[at.parent_id]


def by_instant(request: Span, spans: list[Span]) -> Counter[str]:
    """Return the ns of a request by phase. Each ns belongs to the running phase that began last."""
    times: Counter[str] = Counter()
    for at in range(request.start_ns, request.end_ns):
        running = [span for span in spans if span.site in PHASE_OF and span.start_ns <= at < span.end_ns]
        last = max(running, key=lambda span: (span.start_ns, -span.end_ns, span.span_id), default=None)
        times["unknown" if last is None else PHASE_OF[last.site]] += 1
    return times


@given(traces())
@example(trace_of([made(1, CHAT, 0, 9, unit=1), made(2, LAYER, 2, 9, 1, unit=1), made(3, COMM, 2, 5, 1, unit=1)], 60))
def test_every_part_is_that_of_a_sweep_over_each_nanosecond_and_they_add_up_to_the_wall(trace: Trace) -> None:
    by_id = {span.span_id: span for span in trace.spans}
    first, last = trace.coverage
    family: dict[int, list[Span]] = {}
    for span in trace.spans:
        family.setdefault(owner(span, by_id), []).append(span)
    topmost = [by_id[span_id] for span_id in family if span_id]
    whole = [span for span in topmost if first <= span.start_ns and span.end_ns <= last]
    expected: dict[str, Counter[str]] = {}
    for span in whole:
        others = [one for one in family[span.span_id] if one is not span]
        expected.setdefault(span.site.name, Counter()).update(by_instant(span, others))
    view = view_of(trace)
    assert view.requests == len(whole)
    assert view.requests_cut == sum(
        span not in whole and span.start_ns < last and span.end_ns > first for span in topmost
    )
    assert {one.name: +Counter(parts(one)) for one in view.endpoints} == {
        name: +times for name, times in expected.items()
    }
    for one in view.endpoints:
        its = [span for span in whole if span.site.name == one.name]
        walls = sorted(span.total_ns for span in its)
        assert sum(parts(one).values()) == one.wall_ns == sum(walls)
        assert (one.requests, one.errors) == (len(its), sum(span.error is not None for span in its))
        assert (one.p50_ns, one.max_ns) == (walls[(len(walls) - 1) // 2], walls[-1])
        assert [one.p50_ns, one.p90_ns, one.p99_ns] == [
            min(wall for wall in walls if 100 * sum(other <= wall for other in walls) >= percent * len(walls))
            for percent in (50, 90, 99)
        ]
        assert one.mean_ns == sum(walls) / len(walls)
        assert one.ratio == (one.wall_ns / view.wall_ns if view.wall_ns else None)
        of_each = {
            span.span_id: by_instant(span, [other for other in family[span.span_id] if other is not span])
            for span in its
        }
        for phase in one.phases:
            had = [times[phase.name] for times in of_each.values() if phase.name in times]
            assert (phase.requests, phase.summed_ns, phase.mean_ns) == (len(had), sum(had), sum(had) / len(had))
            assert [phase.p50_ns, phase.p99_ns] == [
                min(one_ns for one_ns in had if 100 * sum(other <= one_ns for other in had) >= percent * len(had))
                for percent in (50, 99)
            ]
            assert phase.ratio == (sum(had) / one.wall_ns if one.wall_ns else None)
        assert one.unknown_mean_ns == one.unknown_ns / len(its)
        assert one.unknown_ratio == (one.unknown_ns / one.wall_ns if one.wall_ns else None)
        ratios = [phase.ratio for phase in one.phases] + [one.unknown_ratio]
        assert sum(map(float, ratios)) == pytest.approx(1) if one.wall_ns else set(ratios) == {None}
    assert view.wall_ns == sum(span.total_ns for span in whole)
    slowest = sorted(whole, key=lambda span: (-span.total_ns, span.start_ns))[:5]
    assert [(slow.wall_ns, slow.begin_ns) for slow in view.slowest] == [
        (span.total_ns, span.start_ns - trace.start_ns) for span in slowest
    ]
    for slow in view.slowest:
        span = by_id[slow.span_id]
        times = by_instant(span, [other for other in family[span.span_id] if other is not span])
        assert {phase.name: phase.summed_ns for phase in slow.phases} | {"unknown": slow.unknown_ns} == {
            "unknown": 0,
            **times,
        }
        assert slow.unknown_ratio == (slow.unknown_ns / slow.wall_ns if slow.wall_ns else None)
    for slow in view.slowest:
        assert sum(phase.summed_ns for phase in slow.phases) + slow.unknown_ns == slow.wall_ns
    assert [one.wall_ns for one in view.slowest] == sorted((span.total_ns for span in whole), reverse=True)[:5]


@given(traces(), st.integers(1, 3), st.sampled_from([0, 3, 1000]))
def test_a_limit_changes_no_sum(trace: Trace, rows: int, least_ns: int) -> None:
    whole, bounded = view_of(trace), view_of(trace, rows=rows, least_ns=least_ns)
    assert bounded.requests == whole.requests
    for name in ("requests", "errors", "wall_ns", "unknown_ns"):
        assert sum(getattr(one, name) for one in bounded.endpoints) == sum(
            getattr(one, name) for one in whole.endpoints
        )
    for one in bounded.endpoints:
        assert sum(parts(one).values()) == one.wall_ns
        assert sum(not phase.remaining for phase in one.phases) <= rows
    assert sum(not one.remaining for one in bounded.endpoints) <= rows
    assert len(bounded.slowest) == min(rows, whole.requests)


def test_a_request_within_another_is_part_of_it() -> None:
    (one,) = view_of(trace_of([made(1, CHAT, 0, 10), made(2, EMBED, 2, 8, 1), made(3, LAYER, 3, 5, 2, 1)])).endpoints
    assert (one.name, parts(one)) == ("POST /chat", {"compute": 2 * MS, "unknown": 8 * MS})


def test_phases_under_a_request_that_is_no_root_are_its() -> None:
    spans = [made(1, OTHER, 0, 50), made(2, CHAT, 10, 20, 1), made(3, LAYER, 12, 15, 2, 1), made(4, LAYER, 30, 40, 1)]
    (one,) = view_of(trace_of(spans)).endpoints
    assert parts(one) == {"compute": 3 * MS, "unknown": 7 * MS}


def test_device_time_within_requests_is_that_of_the_device_view() -> None:
    (one,) = view_of(service()).devices
    assert [(use.name, use.own_ns // MS, use.others_ns // MS, use.starved_ns // MS) for use in one.endpoints] == [
        ("POST /chat", 8, 8, 24),
        ("POST /embed", 8, 8, 4),
    ]


@pytest.mark.parametrize(
    ("sorted_by", "order"),
    [
        ("default", "cba"), ("total", "cba"), ("calls", "bca"), ("max", "acb"), ("ave", "acb"), ("min", "acb"),
        ("cpu_total", "cba"), ("cpu_max", "acb"), ("cpu_ave", "acb"), ("cpu_min", "bca"), ("gpu_max", "acb"),
    ],
)  # fmt: skip
def test_endpoints_are_sorted_as_asked(sorted_by: str, order: str) -> None:
    walls = {"a": [9], "b": [3, 3, 4], "c": [6, 5]}
    spans = [Site(name, "request") for name in walls for _ in walls[name]]
    times = [wall for name in walls for wall in walls[name]]
    made_of = [made(n, site, 10, 10 + wall) for n, (site, wall) in enumerate(zip(spans, times, strict=True), start=1)]
    assert "".join(one.name for one in view_of(trace_of(made_of), sorted_by=sorted_by).endpoints) == order


# How a request is found.


def test_a_slow_request_of_a_long_name_has_a_line_and_not_a_page() -> None:
    long = "GET /" + "日本" * 80 + "/end"
    spans = [made(1, Site(long, "request"), 0, 10), made(2, Site("p" * 300, "phase"), 1, 9, parent=1, root=1)]
    text = text_of(view_of(trace_of(spans))).partition("Slowest requests")[2].strip("- \n").splitlines()
    assert text[0].startswith("1. GET /日本")
    assert text[0].endswith("本/end: 10 ms")
    assert "..." in text[0]
    assert text[2] == f"   {'p' * 24}...{'p' * 23} 80.0%, unknown 20.0%"


def test_the_slowest_requests_say_when_they_were_and_where_the_collector_has_them() -> None:
    recording = Recording.from_trace(service())
    first, _, third = requests(recording, Options()).slowest
    assert (first.name, first.begin_ns, first.began, first.wall_ns) == (
        "POST /chat", 0, "2023-11-14T22:13:20.000000Z", 40 * MS,
    )  # fmt: skip
    assert (first.trace_id, first.span_id) == ("", 1)
    assert (third.trace_id, third.error) == ("4bf92f3577b34da6a3ce929d0e0e4736", "TimeoutError")
    recording.collector_ids = lambda span, _: (span.root_id, span.span_id + 255)
    first, *_ = requests(recording, Options()).slowest
    assert (first.trace_id, first.collector_span_id) == ("0" * 31 + "1", "0000000000000100")


@pytest.mark.parametrize("realtime_ns", [0, -(10**30), 10**30])
def test_a_wall_time_that_is_none_is_left_out(realtime_ns: int) -> None:
    trace = replace(service(), origin=Origin(1, "", 0, realtime_ns))
    assert [one.began for one in view_of(trace).slowest] == [""] * 3


def test_without_requests_it_says_how_to_get_some() -> None:
    assert outline("\n".join(view_of(trace_of([made(1, LAYER, 0, 1)])).lines())) == outline(
        """
        ------------------------->     Requests Report      <-------------------------
        Spans: all 1 that were kept, from 0 s to 0.1 s
        Time unit: ms
        Requests: 0
        No request was recorded. A request is what a server takes, with `requests: auto` in the profile,
          what a rule with `kind: request` names there, or a scope around the handling of one: with
          scope(name, kind="request").
        """
    )
    text = text_of(view_of(trace_of([made(1, CHAT, 50, 150)])))
    assert "Requests: 0; 1 at an edge of the window, not counted below\n" in text
    assert "No request ended within the window." in text


def test_answers_have_no_count_of_statuses_where_the_protocol_has_none() -> None:
    (http, call) = (
        replace(made(1, CHAT, 0, 10), attributes={STATUS: 200}),
        made(2, Site("shop/Buy", "request"), 0, 10),
    )
    lines = [line.split() for line in view_of(trace_of([http, call])).lines()]
    assert ["POST", "/chat", "100", "1"] in lines
    assert ["shop/Buy", "100", "-"] in lines


def test_a_phase_that_few_requests_have_is_reported_as_long_as_it_is_for_these() -> None:
    """One of ten requests waited in a queue, for 9 ms: that is its mean, not 0.9 ms."""
    spans = [made(number + 1, CHAT, 10 * number, 10 * number + 10) for number in range(10)]
    spans.append(made(20, QUEUE, 0, 9, 1))
    (chat,) = view_of(trace_of(spans)).endpoints
    (queue,) = chat.phases
    assert (queue.requests, queue.mean_ns, queue.p50_ns, queue.p99_ns) == (1, 9 * MS, 9 * MS, 9 * MS)
    assert (chat.unknown_p50_ns, chat.unknown_mean_ns) == (10 * MS, 9.1 * MS)
    assert queue.ratio == 0.09
    text = "\n".join(view_of(trace_of(spans)).lines())
    assert ["queue", "1", "9", "9", "9", "9.0%"] in [line.split() for line in text.splitlines()]
    assert "over the requests that had it" in text


def test_a_rate_is_of_the_time_in_which_requests_were_served() -> None:
    spans = [made(number, CHAT, start, start + 100) for number, start in enumerate(range(2000, 4000, 200), 1)]
    for span in spans:
        span.attributes = {"http.response.status_code": 200}
    lines = text_of(view_of(trace_of(spans, end_ns=10_000 * MS))).splitlines()
    (row,) = [line.split() for line in lines if line.startswith("POST /chat") and len(line.split()) == 4]
    assert row[2:] == ["5.263", "10"], "10 requests in 1.9 s"
