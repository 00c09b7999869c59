"""The `distribution` view: Paddle's figures, no kernel counted twice, and every union from spans at random."""

from __future__ import annotations

from dataclasses import replace

import pytest
from golden_views import is_golden, text_of
from hypothesis import given
from hypothesis import strategies as st
from paddle_golden import golden_trace
from raw_spans import changed, points, traces

from instrument.recording.spans import UNTIMED, DeviceInterval, Origin, Site, Span
from instrument.report.overview_view import (
    COMPUTES,
    PAUSES,
    DistributionUse,
    DistributionView,
    OperationUse,
    distribution,
)
from instrument.report.table import measure_width
from instrument.report.view import Options, Recording
from instrument.trace.trace import Trace

MS = 1_000_000
STEP, F, COMM = Site("step", "step"), Site("f", "op", device=True), Site("all_reduce", "comm")


def view(trace: Trace, **options: object) -> DistributionView:
    return distribution(Recording.from_trace(changed(trace)), Options(**options))  # type: ignore[arg-type]


def made(*spans: tuple[Site, int, int, int]) -> Trace:
    """A trace of spans by thread, start and end in ms, in a window of 100 ms."""
    listed = [
        Span(one, index + 1, 0, index + 1, thread, 0, start * MS, end * MS, 0, 0)
        for index, (one, thread, start, end) in enumerate(spans)
    ]
    return Trace(Origin(1, "train", 0, 0), 0, 100 * MS, listed, {1: "main"})


def numbers(use: DistributionView) -> dict[str, tuple[float, float, float]]:
    return {one.name: (one.communication_ns / MS, one.computation_ns / MS, one.overlap_ns / MS) for one in use.places}


def test_the_figures_together_are_those_of_paddles_distribution_summary() -> None:
    use = view(golden_trace())
    assert (use.of, use.base_ns) == ("step", 180 * MS)
    found = numbers(use)
    assert found["together"] == (30.0, 90.0, 16.0)
    assert [f"{100 * part / 180:.2f}" for part in found["together"]] == ["16.67", "50.00", "8.89"]
    assert found["device 0"] == (24.0, 90.0, 10.0)
    assert found["host"][0] == 20.0
    launches = view(golden_trace({}, launches=True))
    assert numbers(launches)["device 0"] == (24.0, 90.0, 10.0), "NCCL is known by the names of its kernels"


def test_the_layout_is_that_of_the_file() -> None:
    assert is_golden("distribution", text_of(view(golden_trace())))


def test_device_work_of_a_communication_is_no_computation() -> None:
    """Paddle counts a kernel whose name is not NCCL's, launched below a communication, for both."""
    trace = made((COMM, 1, 0, 10), (F, 1, 2, 4), (F, 1, 20, 22))
    spans = [*trace.spans]
    spans[1].parent_id = spans[1].root_id = 1
    spans[1].device = (DeviceInterval(0, 7, 3 * MS, 9 * MS),)
    spans[2].device = (DeviceInterval(0, 7, 20 * MS, 30 * MS),)
    assert numbers(view(trace))["device 0"] == (6.0, 10.0, 0.0)


def test_communication_of_one_device_does_not_overlap_computation_of_another() -> None:
    trace = made((COMM, 1, 0, 1), (F, 1, 5, 6))
    spans = [*trace.spans]
    spans[0].device = (DeviceInterval(0, 7, 10 * MS, 30 * MS),)
    spans[1].device = (DeviceInterval(1, 7, 20 * MS, 40 * MS),)
    assert numbers(view(trace)) == {
        "host": (1.0, 1.0, 0.0), "device 0": (20.0, 0.0, 0.0), "device 1": (0.0, 20.0, 0.0),
        "together": (21.0, 20.0, 0.0),
    }  # fmt: skip


def test_an_asynchronous_one_lasts_from_its_call_to_the_end_of_its_wait_next_to_what_computes() -> None:
    wait = Site("all_reduce.wait", "comm", instance="gloo default_pg", attributes=(("op", "all_reduce"),))
    call = replace(wait, name="all_reduce")
    trace = made((STEP, 1, 0, 50), (call, 1, 10, 11), (F, 1, 11, 30), (wait, 1, 30, 35))
    spans = [*trace.spans]
    spans[1].attributes = {"bytes": 4_000_000}
    spans[3].attributes = {"in_flight_ns": 25 * MS}
    use = view(trace)
    assert numbers(use) == {"host": (25.0, 19.0, 19.0)}
    assert use.places[0].exposed_ns == 6 * MS
    (one,) = use.operations
    assert (one.name, one.calls, one.moved_bytes) == ("all_reduce (gloo default_pg)", 1, 4_000_000)
    assert (one.host_ns, one.waited_ns, one.device_ns) == (MS, 5 * MS, None)
    assert view(trace, state="GPU").places == ()


@pytest.mark.parametrize("value", [10**400, -(10**400), (1 << 63) - 1, -(1 << 63), True, "1"])
def test_damaged_facts_of_a_communication_break_no_view(value: object) -> None:
    trace = made((COMM, 1, 0, 1), (F, 1, 5, 6))
    spans = [*trace.spans]
    spans[0].attributes = {"in_flight_ns": value, "bytes": value}  # type: ignore[dict-item]
    assert "MB" in text_of(view(trace))
    assert numbers(view(trace))["host"] == (1.0, 1.0, 0.0)


def test_sizes_whose_sum_would_be_none_in_64_bits_count_for_nothing() -> None:
    trace = made((COMM, 1, 0, 1), (COMM, 1, 2, 3), (COMM, 1, 4, 5))
    for span, moved_bytes in zip(trace.spans, (1 << 62, 1 << 62, 8), strict=True):
        span.attributes = {"bytes": moved_bytes}
    assert [one.moved_bytes for one in view(trace).operations] == [8]


def test_the_host_does_not_compute_while_the_same_thread_copies_loads_or_communicates() -> None:
    inside = [(Site("h2d", "copy"), 1, 2, 4), (Site("read", "loader"), 1, 5, 6), (COMM, 1, 8, 10)]
    trace = made((F, 1, 0, 20), *inside)
    assert numbers(view(trace)) == {"host": (2.0, 15.0, 0.0)}
    trace = replace(trace, spans=[*trace.spans, replace(trace.spans[0], span_id=9, root_id=9, thread_id=2)])
    assert numbers(view(trace)) == {"host": (2.0, 20.0, 2.0)}


def test_rows_sum_the_rest_nothing_says_what_to_do_and_hostile_names_fit_the_line() -> None:
    text = text_of(view(made((F, 1, 0, 1))))
    assert "No communication was recorded: `comm: auto` in the profile records" in text
    names = ["x" * 300, "\n\x1b[31m" + "層" * 200, "small"]
    trace = made(*((Site(name, "comm"), 1, 10 * at, 10 * at + 9 - at) for at, name in enumerate(names)))
    lines = text_of(view(trace)).splitlines()
    assert max(map(measure_width, lines)) <= 100
    assert "\x1b" not in "".join(lines)
    use = view(trace, rows=1)
    assert [(one.calls, one.host_ns / MS) for one in use.operations] == [(1, 9.0), (2, 15.0)]
    assert use.operations[1].name == "(remaining 2)"
    assert view(trace, least_ns=8 * MS).operations[-1].name == "(remaining 1)"


@given(traces())
def test_every_union_is_that_of_its_instants(trace: Trace) -> None:
    use = view(trace)
    base = points([(s.start_ns, s.end_ns) for s in trace.spans if s.site.kind == "step"]) & points([trace.coverage])
    base = base or points([trace.coverage])
    assert use.base_ns == len(base)
    if not use.places:
        return
    comm = [span for span in trace.spans if span.site.kind == "comm"]
    on_host = points((s.start_ns, s.end_ns) for s in comm) & base
    computing: set[int] = set()
    for thread in {span.thread_id for span in trace.spans}:
        own = [span for span in trace.spans if span.thread_id == thread]
        busy = points((s.start_ns, s.end_ns) for s in own if s.site.kind in COMPUTES)
        computing |= busy - points((s.start_ns, s.end_ns) for s in own if s.site.kind in PAUSES)
    computing &= base
    by_device: dict[str, tuple[set[int], set[int]]] = {}
    by_id = {span.span_id: span for span in trace.spans}
    first, last = trace.coverage

    def holds(one: DeviceInterval) -> bool:
        return (one.start_ns < last and one.end_ns > first) or (first <= one.start_ns and one.end_ns <= last)

    for span in trace.spans:
        up: Span | None = span
        while up is not None and up.site.kind != "comm":
            up = by_id.get(up.parent_id)
        is_comm = up is not None
        if span.site.kind == "copy" and not is_comm:
            continue
        for one in span.device:
            if one.label not in UNTIMED and holds(one):
                parts = by_device.setdefault(f"device {one.device}", (set(), set()))
                parts[not is_comm].update(points([(one.start_ns, one.end_ns)]) & base)

    def place(name: str, communicates: set[int], computes: set[int]) -> DistributionUse:
        return DistributionUse(name, len(base), len(communicates), len(computes), len(communicates & computes))

    wanted = [place("host", on_host, computing)]
    wanted += [place(name, *by_device[name]) for name in sorted(by_device)]
    if by_device:
        everywhere = on_host.union(*(communicates for communicates, _ in by_device.values()))
        computes = set[int]().union(*(own for _, own in by_device.values()))
        overlap = set[int]().union(*((on_host | one) & own for one, own in by_device.values()))
        if not computes:
            computes, overlap = computing, everywhere & computing
        wanted.append(DistributionUse("together", len(base), len(everywhere), len(computes), len(overlap)))
    assert list(use.places) == wanted
    assert all(one.exposed_ns >= 0 for one in use.places)
    operations = view(trace).operations
    assert sum(one.calls for one in operations) == len(comm)
    assert sum(one.host_ns + one.waited_ns for one in operations) == sum(span.total_ns for span in comm)


GROUPS = [
    Site(name, "comm", instance=group, attributes=(("op", name.partition(".")[0]),))
    for name in ("all_reduce", "all_reduce.wait", "send") for group in ("", "nccl a")
] + [Site("by hand", "comm"), F]  # fmt: skip


@given(traces(GROUPS), st.lists(st.sampled_from([None, 8, 1 << 40, -8, True, "8"]), min_size=14, max_size=14))
def test_every_sum_of_an_operation_is_that_of_its_calls_and_waits(trace: Trace, sizes: list[object]) -> None:
    for span, size in zip(trace.spans, sizes, strict=False):
        span.attributes = {} if size is None else {"bytes": size}  # type: ignore[dict-item]
    expected: dict[str, OperationUse] = {}
    for site in {span.site for span in trace.spans if span.site.kind == "comm"}:
        name = site.name.removesuffix(".wait") + (f" ({site.instance})" if site.instance else "")
        its = [
            span
            for span in trace.spans
            if (span.site.name.removesuffix(".wait"), span.site.instance)
            == (site.name.removesuffix(".wait"), site.instance)
        ]
        calls = [span for span in its if not span.site.name.endswith(".wait")]
        timed = [span for span in its if any(one.label not in UNTIMED for one in span.device)]
        expected[name] = OperationUse(
            name=name,
            calls=len(calls),
            moved_bytes=sum(size for span in its if (size := span.attributes.get("bytes")) in (8, 1 << 40)),
            host_ns=sum(span.end_ns - span.start_ns for span in calls),
            waited_ns=sum(span.end_ns - span.start_ns for span in its if span not in calls),
            device_ns=sum(len(points((d.start_ns, d.end_ns) for d in span.device)) for span in its) if timed else None,
        )
    assert {use.name: use for use in view(trace).operations} == expected
    for place in view(trace).places:
        base = place.base_ns
        for part_ns, ratio in (
            (place.communication_ns, place.communication_ratio), (place.computation_ns, place.computation_ratio),
            (place.overlap_ns, place.overlap_ratio), (place.exposed_ns, place.exposed_ratio),
        ):  # fmt: skip
            assert ratio == (part_ns / base if base else None)
        assert place.exposed_ns == place.communication_ns - place.overlap_ns
