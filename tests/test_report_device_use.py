"""Utilisation against a sweep over every nanosecond, and that its parts add up."""

from __future__ import annotations

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from instrument.recording.spans import UNTIMED, DeviceInterval, Interval, Origin, Site, Span
from instrument.report.device_use import DeviceUse, Unanswered, Utilisation, measure_utilisation
from instrument.report.section import NO_EVENTS
from instrument.report.view import Recording
from instrument.trace.trace import Trace

WINDOW = (10, 50)
SITES = [
    Site("handle", "request"),
    Site("embed", "request", device=True),
    Site("step", "step", device=True),
    Site("matmul", "op", device=True),
    Site("matmul", "layer", device=True),
    Site("memcpy h2d", "copy", device=True),
    Site("tokenise", "phase"),
]
LABELS = ("exclusive", "overlapped", "launch-bound", "stale", "captured", "dropped")


def trace_of(spans: list[Span], window: Interval = WINDOW, **facts: int) -> Trace:
    return Trace(Origin(1, "shop", 0, 0), *window, spans, **facts)


def utilisation_of(trace: Trace) -> Utilisation:
    return measure_utilisation(Recording.from_trace(trace))


def made(
    span_id: int, site: Site, start: int, end: int, *device: DeviceInterval, parent: int = 0, root: int = 0
) -> Span:
    return Span(site, span_id, parent, root or span_id, 1, 0, start, end, end - start, 0, device=device)


@st.composite
def intervals(draw: st.DrawFn) -> DeviceInterval:
    start, label = draw(st.integers(0, 60)), draw(st.sampled_from(LABELS))
    end = start if label in UNTIMED else start + draw(st.integers(0, 15))
    return DeviceInterval(
        draw(st.integers(0, 1)), draw(st.sampled_from([0, 7, 9])), start, end, label, draw(st.integers(0, 5))
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw trees of any shape, work that outlives its span, copies during compute, requests below requests."""
    spans: list[Span] = []
    for span_id in range(1, draw(st.integers(1, 9))):
        parent_id = draw(st.integers(0, span_id - 1))
        root_id = spans[parent_id - 1].root_id if parent_id else span_id
        start, size = draw(st.integers(0, 60)), draw(st.integers(0, 30))
        device = draw(st.lists(intervals(), max_size=3))
        site = draw(st.sampled_from(SITES))
        spans.append(made(span_id, site, start, start + size, *device, parent=parent_id, root=root_id))
    return trace_of(draw(st.permutations(spans)))


# The sweep.


def timed(span: Span, device: int) -> list[DeviceInterval]:
    return [one for one in span.device if one.device == device and one.label not in UNTIMED]


def points(some: list[DeviceInterval]) -> set[int]:
    """Every nanosecond in which one of the intervals runs, inside of the window."""
    return {at for one in some for at in range(one.start_ns, one.end_ns) if WINDOW[0] <= at < WINDOW[1]}


def hull(span: Span) -> set[int]:
    return {at for at in range(span.start_ns, span.end_ns) if WINDOW[0] <= at < WINDOW[1]}


def inside(one: DeviceInterval) -> bool:
    return (one.start_ns < WINDOW[1] and one.end_ns > WINDOW[0]) or (
        WINDOW[0] <= one.start_ns and one.end_ns <= WINDOW[1]
    )


def part_of(one: DeviceInterval) -> int:
    return len(points([one]))


def topmost_request(span: Span, by_id: dict[int, Span]) -> int:
    found, at = 0, span
    while True:
        found = at.span_id if at.site.kind == "request" else found
        if at.parent_id not in by_id:
            return found
        at = by_id[at.parent_id]


def expected(trace: Trace, device: int) -> dict[str, object]:
    """Return the expected fields of `DeviceUse`, from sets of nanoseconds."""
    spans, by_id = trace.spans, {span.span_id: span for span in trace.spans}
    whole = set(range(*WINDOW))
    all_timed = [one for span in spans for one in timed(span, device)]
    compute = points([one for span in spans if span.site.kind != "copy" for one in timed(span, device)])
    copied = points([one for span in spans if span.site.kind == "copy" for one in timed(span, device)])
    in_flight = {at for span in spans if span.site.kind == "request" for at in hull(span)}
    idle = whole - compute - copied
    stream_points = {
        stream: points([one for one in all_timed if one.stream == stream])
        for stream in {one.stream for one in all_timed if inside(one)}
    }
    depth = Counter(at for of_stream in stream_points.values() for at in of_stream)
    kept = [one for one in all_timed if inside(one)]
    requests = {}
    for span in spans:
        if topmost_request(span, by_id) != span.span_id or not (WINDOW[0] <= span.start_ns <= span.end_ns <= WINDOW[1]):
            continue
        family = [other for other in spans if topmost_request(other, by_id) == span.span_id]
        its = [one for other in family for one in timed(other, device) if inside(one)]
        own, busy = points(its) & hull(span), (compute | copied) & hull(span)
        if its:
            requests[span.span_id] = (span.total_ns, len(own), len(busy - own), len(hull(span) - busy))
    return {
        "compute_ns": len(compute),
        "copy_ns": len(copied - compute),
        "hidden_copy_ns": len(copied & compute),
        "starved_ns": len(idle & in_flight),
        "unasked_ns": len(idle - in_flight),
        "overlap_ns": sum(count > 1 for count in depth.values()),
        "most_streams": max(depth.values(), default=0),
        "launch_bound_ns": len((compute | copied) - points([one for one in all_timed if one.label != "launch-bound"])),
        "streams": {
            stream: (
                sum(one.stream == stream for one in kept),
                sum(part_of(one) for one in kept if one.stream == stream),
                len(of_stream),
            )
            for stream, of_stream in stream_points.items()
        },
        "labels": {
            label: (count, sum(part_of(one) for one in kept if one.label == label) if label not in UNTIMED else None)
            for label, count in Counter(
                one.label for span in spans for one in span.device if one.device == device and inside(one)
            ).items()
        },
        "uncertainty_ns": (min(o.uncertainty_ns for o in kept), max(o.uncertainty_ns for o in kept)) if kept else None,
        "outside": sum(not inside(one) for one in all_timed),
        "requests": by_name(trace, requests),
    }


def by_name(trace: Trace, requests: dict[int, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the number of requests of each name, and the sums of their parts."""
    named: dict[str, list[tuple[int, ...]]] = {}
    for span in trace.spans:
        if span.span_id in requests:
            named.setdefault(span.site.name, []).append(requests[span.span_id])
    return {name: (len(its), *map(sum, zip(*its, strict=True))) for name, its in named.items()}


def said(use: DeviceUse) -> dict[str, object]:
    return {
        **{
            name: getattr(use, name)
            for name in (
                "compute_ns", "copy_ns", "hidden_copy_ns", "starved_ns", "unasked_ns", "overlap_ns", "most_streams",
                "launch_bound_ns", "uncertainty_ns", "outside",
            )
        },
        "streams": {one.stream: (one.intervals, one.summed_ns, one.busy_ns) for one in use.streams},
        "labels": {one.label: (one.intervals, one.summed_ns) for one in use.labels},
        "requests": {
            one.name: (one.requests, one.wall_ns, one.own_ns, one.others_ns, one.starved_ns) for one in use.endpoints
        },
    }  # fmt: skip


@given(traces())
@example(trace_of([made(1, SITES[3], 10, 20, DeviceInterval(0, 0, 12, 20), DeviceInterval(0, 7, 20, 25))]))
@example(trace_of([made(1, SITES[3], 10, 20, DeviceInterval(0, 0, 20, 20), DeviceInterval(0, 7, 5, 25))]))
def test_every_figure_is_that_of_a_sweep_over_each_nanosecond(trace: Trace) -> None:
    found = utilisation_of(trace)
    there = {one.device for span in trace.spans for one in span.device if one.label not in UNTIMED}
    assert [use.device for use in found.devices] == sorted(there)
    for use in found.devices:
        assert said(use) == expected(trace, use.device)


@given(traces())
def test_the_parts_add_up_to_the_window_and_to_each_request(trace: Trace) -> None:
    found = utilisation_of(trace)
    for use in found.devices:
        assert use.compute_ns + use.copy_ns + use.starved_ns + use.unasked_ns == use.window_ns == 40
        for one in use.endpoints:
            assert one.own_ns + one.others_ns + one.starved_ns == one.wall_ns
            assert min(one.wall_ns, one.own_ns, one.others_ns, one.starved_ns) >= 0
        assert use.mean_streams is None or 1 <= use.mean_streams <= use.most_streams


@given(traces())
def test_every_share_and_mean_of_a_device_is_of_the_base_that_it_names(trace: Trace) -> None:
    found = utilisation_of(trace)

    def of(part_ns: int, base_ns: int) -> float | None:
        return part_ns / base_ns if base_ns else None

    in_flight = {at for span in trace.spans if span.site.kind == "request" for at in hull(span)}
    assert found.in_flight_ns == len(in_flight)
    for use in found.devices:
        timed_now = [one for span in trace.spans for one in timed(span, use.device)]
        busy = points(timed_now)
        assert use.busy_ns == len(busy)
        for name, part_ns in (
            ("busy", len(busy)), ("compute", use.compute_ns), ("copy", use.copy_ns), ("starved", use.starved_ns),
            ("unasked", use.unasked_ns),
        ):  # fmt: skip
            assert getattr(use, f"{name}_ratio") == of(part_ns, 40)
        assert use.starved_in_flight_ratio == of(use.starved_ns, len(in_flight))
        assert use.overlap_ratio == of(use.overlap_ns, len(busy))
        copied = points([one for s in trace.spans if s.site.kind == "copy" for one in timed(s, use.device)])
        assert use.hidden_copy_ratio == of(use.hidden_copy_ns, len(copied))
        streams = {one.stream for one in timed_now}
        depth = sum(len(points([one for one in timed_now if one.stream == stream])) for stream in streams)
        assert use.mean_streams == of(depth, len(busy))
        for name in {one.name for one in use.endpoints}:
            (endpoint,) = (one for one in use.endpoints if one.name == name)
            for part in ("wall", "own", "others", "starved"):
                part_ns = getattr(endpoint, f"{part}_ns")
                assert getattr(endpoint, f"{part}_mean_ns") == part_ns / endpoint.requests
                if part != "wall":
                    assert getattr(endpoint, f"{part}_ratio") == of(part_ns, endpoint.wall_ns)


@given(traces())
def test_work_by_name_is_a_sum_over_calls_and_a_union_next_to_it(trace: Trace) -> None:
    for use in utilisation_of(trace).devices:
        for one in use.names:
            spans = [span for span in trace.spans if (span.site.name, span.site.kind) == (one.name, one.kind)]
            its = [[each for each in timed(span, use.device) if inside(each)] for span in spans]
            calls = sorted(len(points(each)) for each in its if each)
            assert (one.calls, one.summed_ns) == (len(calls), sum(calls))
            assert one.busy_ns == len(points([each for of_span in its for each in of_span]))
            assert one.p50_ns == calls[(len(calls) - 1) // 2]
            assert one.p99_ns == calls[-(-99 * len(calls) // 100) - 1]
        assert sum(one.calls for one in use.names) == sum(
            any(inside(each) for each in timed(span, use.device)) for span in trace.spans
        )


@given(traces())
def test_every_span_that_asked_for_device_time_got_it_or_is_named_with_a_reason(trace: Trace) -> None:
    found = utilisation_of(trace)
    asking = [span for span in trace.spans if span.site.device or span.device]
    empty = [span for span in asking if all(one.label in UNTIMED for one in span.device)]
    assert found.asking == len(asking)
    assert Counter({(one.reason, one.name, one.kind): one.spans for one in found.unanswered}) == Counter(
        (span.device[0].label if span.device else NO_EVENTS, span.site.name, span.site.kind) for span in empty
    )


def test_requests_at_an_edge_and_requests_without_device_time_are_counted_apart() -> None:
    work = DeviceInterval(0, 7, 20, 30)
    spans = [
        made(1, SITES[0], 5, 20),
        made(2, SITES[0], 45, 60),
        made(3, SITES[0], 12, 40, work),
        made(4, SITES[0], 15, 25),
        made(5, SITES[0], 0, 9),
        made(6, SITES[0], 20, 50),
    ]
    spans[5].clipped = True  # open at the end of the window
    found = utilisation_of(trace_of(spans))
    assert (found.requests_cut, found.requests_without, found.in_flight_ns) == (3, 1, 40)
    assert [(use.device, one.requests, one.wall_ns) for use in found.devices for one in use.endpoints] == [(0, 1, 28)]


def test_captured_and_dropped_device_times_are_named_and_are_no_calls_of_zero_length() -> None:
    op = SITES[3]
    spans = [
        made(1, op, 10, 12, DeviceInterval(0, 7, 11, 11, "captured")),
        made(2, op, 12, 14, DeviceInterval(0, 7, 13, 13, "captured")),
        made(3, op, 14, 16, DeviceInterval(0, 7, 15, 15, "dropped")),
        made(4, op, 16, 18),
        made(5, op, 18, 20, DeviceInterval(0, 7, 19, 29)),
        made(6, op, 20, 22, DeviceInterval(0, 7, 21, 21)),
    ]
    found = utilisation_of(trace_of(spans))
    assert found.asking == 6
    assert found.unanswered == (
        Unanswered("captured", "matmul", "op", 2),
        Unanswered("dropped", "matmul", "op", 1),
        Unanswered(NO_EVENTS, "matmul", "op", 1),
    )
    (use,) = found.devices
    assert [(one.calls, one.summed_ns) for one in use.names] == [(2, 10)]


def test_a_window_of_no_length_has_no_shares_and_no_error() -> None:
    found = utilisation_of(trace_of([made(1, SITES[3], 0, 9, DeviceInterval(0, 7, 3, 6))], (9, 9)))
    (use,) = found.devices
    assert (use.window_ns, use.busy_ns, use.outside, use.mean_streams) == (0, 0, 1, None)


def test_the_window_begins_where_every_span_is_still_kept() -> None:
    spans = [made(1, SITES[3], 30, 31, DeviceInterval(0, 7, 30, 40))]
    (use,) = utilisation_of(trace_of(spans, (0, 50), held_from_ns=30)).devices
    assert (use.window_ns, use.compute_ns, use.unasked_ns) == (20, 10, 10)


def test_parents_that_are_missing_end_the_search() -> None:
    spans = [
        made(span_id, SITES[3], 10, 20, DeviceInterval(0, 7, 10, 20), parent=parent, root=7)
        for span_id, parent in ((1, 7), (2, 1))
    ]
    found = utilisation_of(trace_of([*spans, made(3, SITES[0], 10, 20)]))
    assert [use.busy_ns for use in found.devices] == [10]
    assert [use.endpoints for use in found.devices] == [()]
