"""Loops over all spans say the same in C as in Python, and unions what sets of nanoseconds say."""

from __future__ import annotations

import itertools
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_report_utilisation import WINDOW, made, traces

from instrument.report import stretches
from instrument.report.stretches import DeviceTime, at_once, length_ns, packed, shared_ns, united, unpacked
from instrument.spans import DeviceInterval, Interval, PureDeviceInterval, Site, Span, Trace

PARTS = st.lists(st.tuples(st.integers(-30, 30), st.integers(0, 9)).map(lambda one: (one[0], one[0] + one[1])))


@pytest.fixture(params=["native", "twin"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs against both."""
    if request.param == "twin":
        monkeypatch.setattr(stretches, "_native", None)
    elif stretches._native is None:
        pytest.skip("the spans in C are not in use")


def points(parts: list[Interval]) -> set[int]:
    return {at for start, end in parts for at in range(start, end)}


@given(st.lists(PARTS, max_size=5))
def test_unions_say_what_sets_of_nanoseconds_say(several: list[list[Interval]]) -> None:
    unions = [united([packed(parts)]) for parts in several]
    of_all = [points(parts) for parts in several]
    everything = set[int]().union(*of_all)
    assert unpacked(united(map(packed, several))) == unpacked(united(unions))
    parts = unpacked(united(unions))
    assert points(parts) == everything
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(parts))
    assert all(start < end for start, end in parts)
    assert [length_ns(own) for own in unions] == [len(own) for own in of_all]
    for own, own_points in zip(unions, of_all, strict=True):
        assert shared_ns(own, united(unions)) == len(own_points)
        assert shared_ns(own, unions[0]) == len(own_points & of_all[0])
    depths = {at: sum(at in own for own in of_all) for at in everything}
    assert at_once(unions) == (sum(depth > 1 for depth in depths.values()), max(depths.values(), default=0))


def test_stretches_of_any_length_of_time_are_added_up_in_full() -> None:
    ends = -(1 << 62), (1 << 62)
    assert length_ns(united([packed([ends])])) == 1 << 63
    assert at_once([packed([ends]), packed([ends])]) == (1 << 63, 2)


def plain(found: DeviceTime) -> dict[str, object]:
    """What was found, in no order."""
    return {
        "asked": found.asked,
        "groups": {(id(one.site), *one[1:8]): sorted(unpacked(one.stretches)) for one in found.groups},
        "calls": {(id(site), device): sorted(array("q", lengths)) for site, device, lengths in found.calls},
        "devices": {
            device: (outside, sorted(zip(*[iter(array("q", owned))] * 3, strict=True)))
            for device, outside, owned in found.devices
        },
        "unanswered": {(id(site), label): count for site, label, count in found.unanswered},
    }


def answers(trace: Trace) -> list[object]:
    """What is found in a trace: to whom spans belong, device time, that within requests, and phases."""
    known = stretches.owners(trace.spans)
    found = stretches.device_time(trace.spans, known.ids, WINDOW)
    busy = {
        device: united([group.stretches for group in found.groups if group.device == device])
        for device, *_ in found.devices
    }
    inside = {
        device: sorted(stretches.within(owned, known.topmost, busy[device])) for device, _, owned in found.devices
    }
    labels = {site: place % 3 for place, site in enumerate(dict.fromkeys(span.site for span in trace.spans))}
    shared = stretches.phases(trace.spans, known.ids, known.topmost, labels)
    for span, times in zip(known.topmost, shared, strict=True):
        assert sum(times.values()) == span.total_ns
        assert all(times.values())
    hosts = {
        id(site): (count, sorted(unpacked(parts))) for site, count, parts in stretches.host_time(trace.spans, WINDOW)
    }
    outside, kept = stretches.innermost(trace.spans, WINDOW)
    inner = {(id(span.site), device): sorted(unpacked(parts)) for span, device, parts in kept}
    return [
        list(array("q", known.ids)),
        known.requests,
        known.topmost,
        plain(found),
        inside,
        shared,
        hosts,
        outside,
        inner,
    ]


@given(traces())
def test_both_find_the_same_in_a_trace(trace: Trace) -> None:
    found = answers(trace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stretches, "_native", None)
        assert found == answers(trace)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.sets(st.integers(1, 9)))
def test_both_find_the_same_owners_whatever_the_parents_are(parents: list[int], requests: set[int]) -> None:
    """Parents that are missing, come later or run in a circle."""
    sites = {True: Site("handle", "request"), False: Site("work", "op")}
    spans = [
        made(number, sites[number in requests], 10, 20, parent=parent, root=99)
        for number, parent in enumerate(parents, start=1)
    ]
    found = stretches.owners(spans)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stretches, "_native", None)
        assert found == stretches.owners(spans)


def test_what_c_does_not_take_is_left_to_python() -> None:
    """An interval of another class, ids that come twice, a window beyond 64 bits."""
    request = Site("handle", "request")
    spans = [made(1, request, 0, 10, PureDeviceInterval(0, 0, 2, 4)), made(1, request, 5, 20)]
    known = stretches.owners(spans)
    found = stretches.device_time(spans, known.ids, (-(1 << 70), 1 << 70))
    assert [unpacked(group.stretches) for group in found.groups] == [[(2, 4)]]
    ((_, _, owned),) = found.devices
    assert stretches.within(owned, spans, packed([(3, 30)])) == [(0, 2, 7), (1, 0, 15)]
    assert stretches.phases(spans, known.ids, spans, {request: 1}) == [{0: 10}, {0: 15}]


def test_an_interval_that_ends_before_it_begins_is_refused() -> None:
    spans: list[Span] = [made(1, Site("f"), 0, 10, DeviceInterval(0, 0, 4, 2))]
    with pytest.raises(ValueError, match="before its start"):
        stretches.device_time(spans, stretches.owners(spans).ids, (0, 10))
