"""Interval algebra against brute force, and self times of foreign trees."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interval_lists import elapsed_ns

from instrument.recording.spans import DeviceInterval, Interval, Site, Span, covered_ns
from instrument.recording.trace_context import RemoteParent

intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))))


def points(some: list[Interval]) -> set[int]:
    return {point for start, end in some for point in range(start, end)}


@given(intervals)
def test_intervals_cover_the_same_time_as_their_points(some: list[Interval]) -> None:
    assert covered_ns(some) == len(points(some))


def test_an_interval_that_ends_before_it_starts_covers_nothing() -> None:
    assert covered_ns([(5, 3), (4, 6), (9, 1)]) == 2


def made(span_id: int, parent_id: int, start: int, end: int, task: int = 0) -> Span:
    return Span(Site("x"), span_id, parent_id, 1, 1, task, start, end, end - start, 0)


def test_elapsed_counts_time_that_host_and_device_share_once() -> None:
    span = made(1, 0, 0, 100)
    span.device = (DeviceInterval(0, 7, 80, 150), DeviceInterval(0, 9, 140, 160), DeviceInterval(0, 9, 300, 310))
    assert (span.total_ns, span.device_ns, elapsed_ns(span)) == (100, 90, 170)


SITE = Site("x")
NUMBERS = (5, 0, 5, 7, 0, 100, 130, 30, 20)


def test_a_span_is_a_dataclass_whose_fields_can_be_set() -> None:
    span = Span(SITE, *NUMBERS)
    assert [field.name for field in dataclasses.fields(Span)] == list(Span.__slots__) == list(Span.__match_args__)
    assert (span.error, span.attributes, span.device, span.clipped, span.remote, span.links) == (
        None, {}, (), False, None, (),
    )  # fmt: skip
    assert Span(SITE, *NUMBERS[:-1], self_ns=20) == Span(**dict(zip(Span.__slots__, (SITE, *NUMBERS), strict=False)))
    span.attributes["key"] = "kept"
    span.error, span.clipped, span.remote, span.span_id = "OSError", True, RemoteParent(1, 2), -(2**63)
    assert dataclasses.astuple(dataclasses.replace(span, site=7, remote=None)) == (
        7, -(2**63), *NUMBERS[1:], "OSError", {"key": "kept"}, (), True, None, (),
    )  # fmt: skip
    span.error = None
    assert span.error is None
    assert Span(SITE, *NUMBERS).attributes == {}
    attributes: dict[str, Any] = {}
    assert Span(SITE, *NUMBERS, attributes=attributes).attributes is attributes


def test_spans_are_equal_by_value_and_have_no_hash() -> None:
    span = Span(SITE, *NUMBERS)
    for name in Span.__slots__:
        other = copy.copy(span)
        assert other == span
        setattr(other, name, 2**62 if isinstance(getattr(span, name), int) and name != "clipped" else not name)
        assert (other != span) is (name != "clipped"), name
    assert span != (SITE, *NUMBERS)
    with pytest.raises(TypeError, match="unhashable"):
        hash(span)
    assert repr(span).startswith("Span(site=Site(name='x', ")
    assert repr(span).endswith(
        "self_ns=20, error=None, attributes={}, device=(), clipped=False, remote=None, links=())"
    )


def test_a_span_misses_and_refuses_arguments_as_any_function_does() -> None:
    for arguments, named in [
        ((), {}),
        ((SITE, 1), {}),
        ((SITE, *NUMBERS), {"span_id": 1}),
        ((SITE, *NUMBERS), {"x": 1}),
    ]:
        with pytest.raises(TypeError, match="argument"):
            Span(*arguments, **named)
    with pytest.raises(TypeError, match="argument"):
        Span(SITE, *NUMBERS, None, {}, (), False, None, (), (), None)
    with pytest.raises(AttributeError):
        Span(SITE, *NUMBERS).other = 1


def test_attributes_of_an_open_span_survive_pickling_and_copies() -> None:
    span = Span(SITE, *NUMBERS, "E", {"a": 1}, (DeviceInterval(0, 7, 1, 2, "stale", 3),), True, RemoteParent(1, 2))
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        loaded = pickle.loads(pickle.dumps(span, protocol))
        assert loaded.site.key == SITE.key
        loaded.site = SITE
        assert loaded == span
    deep = copy.deepcopy(span)
    assert deep.attributes == span.attributes
    assert deep.attributes is not span.attributes
    assert copy.copy(span).device is span.device


class Timed(Span):
    """A span with more to say."""

    def __init__(self, *facts: Any, more: str) -> None:
        super().__init__(*facts)
        self.more = more


def test_a_class_of_ones_own_may_be_made_of_a_span() -> None:
    one = Timed(SITE, *NUMBERS, more="x")
    assert (one.more, one.total_ns, one.attributes) == ("x", 30, {})


def test_an_interval_is_frozen_and_compared_by_value() -> None:
    one = DeviceInterval(0, 7, 10, 20)
    assert one == DeviceInterval(device=0, stream=7, start_ns=10, end_ns=20, label="exclusive", uncertainty_ns=0)
    assert len({one, DeviceInterval(0, 7, 10, 20), dataclasses.replace(one, label="stale")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'stream'"):
        one.stream = 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        del one.stream
    assert repr(one) == (
        "DeviceInterval(device=0, stream=7, start_ns=10, end_ns=20, label='exclusive', uncertainty_ns=0)"
    )
