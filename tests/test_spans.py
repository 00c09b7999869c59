"""Interval algebra against brute force, and self times of foreign trees."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument import native
from instrument.recording.spans import (
    DeviceInterval,
    Interval,
    Origin,
    PureDeviceInterval,
    PureSpan,
    RemoteParent,
    Site,
    Span,
    Trace,
    assign_self_times,
    by_start,
    covered_ns,
)

table = native.find("_spans")

intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))))


def points(some: list[Interval]) -> set[int]:
    return {point for start, end in some for point in range(start, end)}


@given(intervals, intervals)
def test_what_intervals_cover_is_counted_by_points(some: list[Interval], windows: list[Interval]) -> None:
    assert covered_ns(some) == len(points(some))
    for window in windows:
        assert covered_ns(some, window) == len(points(some) & points([window]))


def test_an_interval_that_ends_before_it_starts_covers_nothing() -> None:
    assert covered_ns([(5, 3), (4, 6), (9, 1)]) == 2


def made(span_id: int, parent_id: int, start: int, end: int, task: int = 0) -> Span:
    return Span(Site("x"), span_id, parent_id, 1, 1, task, start, end, end - start, 0)


def test_self_time_is_total_minus_the_union_of_own_children_clipped() -> None:
    spans = [made(1, 0, 0, 100), made(2, 1, 10, 40), made(3, 1, 30, 50), made(4, 1, 90, 130), made(5, 1, 0, 90, task=7)]
    assign_self_times(spans)
    assert [span.self_ns for span in spans] == [50, 30, 20, 40, 90]


def test_elapsed_counts_time_that_host_and_device_share_once() -> None:
    span = made(1, 0, 0, 100)
    span.device = (DeviceInterval(0, 7, 80, 150), DeviceInterval(0, 9, 140, 160), DeviceInterval(0, 9, 300, 310))
    assert (span.total_ns, span.device_ns, span.elapsed_ns) == (100, 90, 170)


def test_trees_come_root_first_and_in_the_order_of_their_starts() -> None:
    origin = Origin(1, "s", 0, 0)
    spans = [made(3, 2, 6, 7), made(2, 0, 5, 9), made(1, 0, 0, 4)]
    spans[0].root_id = spans[1].root_id = 2
    trees = Trace(origin, 0, 10, spans).trees()
    assert [[span.span_id for span in tree] for tree in trees] == [[1], [2, 3]]
    assert origin.realtime_of(5) == 5


SITE = Site("x")
TWINS = pytest.mark.parametrize("kind", [Span, PureSpan], ids=["in use", "twin in Python"])
INTERVALS = pytest.mark.parametrize("kind", [DeviceInterval, PureDeviceInterval], ids=["in use", "twin in Python"])
NUMBERS = (5, 0, 5, 7, 0, 100, 130, 30, 20)


@TWINS
def test_a_span_is_a_dataclass_whose_fields_can_be_set(kind: Any) -> None:
    span = kind(SITE, *NUMBERS)
    assert [field.name for field in dataclasses.fields(kind)] == list(kind.__slots__) == list(kind.__match_args__)
    assert (span.error, span.attributes, span.device, span.clipped, span.remote) == (None, {}, (), False, None)
    assert kind(SITE, *NUMBERS[:-1], self_ns=20) == kind(**dict(zip(kind.__slots__, (SITE, *NUMBERS), strict=False)))
    span.attributes["key"] = "kept"
    span.error, span.clipped, span.remote, span.span_id = "OSError", True, RemoteParent(1, 2), -(2**63)
    assert dataclasses.astuple(dataclasses.replace(span, site=7, remote=None)) == (
        7, -(2**63), *NUMBERS[1:], "OSError", {"key": "kept"}, (), True, None,
    )  # fmt: skip
    span.error = None
    assert span.error is None
    assert kind(SITE, *NUMBERS).attributes == {}
    attributes: dict[str, Any] = {}
    assert kind(SITE, *NUMBERS, attributes=attributes).attributes is attributes


@TWINS
def test_spans_are_equal_by_value_and_have_no_hash(kind: Any) -> None:
    span = kind(SITE, *NUMBERS)
    for name in kind.__slots__:
        other = copy.copy(span)
        assert other == span
        setattr(other, name, 2**62 if isinstance(getattr(span, name), int) and name != "clipped" else not name)
        assert (other != span) is (name != "clipped"), name
    assert span != (SITE, *NUMBERS)
    with pytest.raises(TypeError, match="unhashable"):
        hash(span)
    assert repr(span).startswith("Span(site=Site(name='x', ")
    assert repr(span).endswith("self_ns=20, error=None, attributes={}, device=(), clipped=False, remote=None)")


@TWINS
def test_a_span_misses_and_refuses_arguments_as_any_function_does(kind: Any) -> None:
    for arguments, named in [
        ((), {}),
        ((SITE, 1), {}),
        ((SITE, *NUMBERS), {"span_id": 1}),
        ((SITE, *NUMBERS), {"x": 1}),
    ]:
        with pytest.raises(TypeError, match="argument"):
            kind(*arguments, **named)
    with pytest.raises(TypeError, match="argument"):
        kind(SITE, *NUMBERS, None, {}, (), False, None, None)
    with pytest.raises(AttributeError):
        kind(SITE, *NUMBERS).other = 1


def test_what_a_span_in_use_holds_survives_a_pickle_and_copies() -> None:
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
    spans = [one, made(2, 5, 110, 120)]
    by_start(spans)
    assert spans[0] is one


@INTERVALS
def test_an_interval_is_frozen_and_compared_by_value(kind: Any) -> None:
    one = kind(0, 7, 10, 20)
    assert one == kind(device=0, stream=7, start_ns=10, end_ns=20, label="exclusive", uncertainty_ns=0)
    assert len({one, kind(0, 7, 10, 20), dataclasses.replace(one, label="stale")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'stream'"):
        one.stream = 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        del one.stream
    assert repr(one) == (
        "DeviceInterval(device=0, stream=7, start_ns=10, end_ns=20, label='exclusive', uncertainty_ns=0)"
    )


@pytest.mark.skipif(Span is PureSpan, reason="no native spans in use")
def test_a_native_span_holds_numbers_of_64_bits_and_says_so() -> None:
    span = made(1, 0, 5, 7)
    with pytest.raises(OverflowError, match="start_ns of a Span is a number of 64 bits"):
        span.start_ns = 2**63
    with pytest.raises(TypeError, match="end_ns of a Span is a whole number; found float"):
        Span(SITE, 1, 0, 1, 1, 0, 0, 1.5, 0, 0)  # type: ignore[arg-type]
    span.start_ns, span.end_ns = -(2**63), 2**63 - 1
    assert span.total_ns == span.elapsed_ns == 2**64 - 1
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del span.site


parents = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(0, 30), st.integers(0, 1)), max_size=9)


@given(parents)
def test_self_times_are_those_of_the_twin(rows: list[tuple[int, int, int, int]]) -> None:
    spans = [made(i, parent, start, start + long, task) for i, (parent, start, long, task) in enumerate(rows, start=1)]
    twins = [PureSpan(*dataclasses.astuple(dataclasses.replace(span, site=None))) for span in spans]  # type: ignore[arg-type]
    assign_self_times(spans)
    assign_self_times(twins)
    assert [span.self_ns for span in spans] == [span.self_ns for span in twins]
    by_start(spans)
    by_start(twins)
    assert [span.span_id for span in spans] == [span.span_id for span in twins]


@pytest.mark.skipif(table is None, reason="without the native part there is no table")
class TestTable:
    """Looks into cells, not seconds: each span is looked up some times in each view."""

    CELLS = 4
    """That a look may go through on the average. Half of the cells are free."""

    @given(st.integers(0, (1 << 64) - 1), st.sampled_from([1, 8, 512, 4096, 1 << 20, 1 << 32]))
    def test_ids_are_found_at_once_whatever_the_seed_and_their_distance(self, seed: int, distance: int) -> None:
        most, total = table.looks(range(1, 1 + 20_000 * distance, distance), seed)
        assert total < self.CELLS * 20_000
        assert most < 1_000

    @pytest.mark.parametrize("bits", range(10, 22))
    @pytest.mark.parametrize("step", [1, -1, 3, (1 << 8) + 1])
    def test_a_seed_by_which_ids_in_a_row_might_lie_in_a_row_is_as_good(self, bits: int, step: int) -> None:
        """Nothing lay between them once: what was not there was looked for in all cells, a million times over."""
        seed = (0x9E3779B97F4A7C15 << bits | step % (1 << bits)) % (1 << 64)
        most, total = table.looks(range(1, 200_001), seed)
        assert total < self.CELLS * 200_000
        assert most < 1_000

    def test_ids_that_were_chosen_to_lie_in_one_place_do_not(self) -> None:
        """Where an id lay once followed from the id alone: a file of some MB took a minute."""
        multiplier = pow(0x9E3779B97F4A7C15, -1, 1 << 64)
        halves = ((number << 32 | number) * multiplier % (1 << 64) for number in range(1, 1 << 20))
        ids = [half << 3 for half in halves if half < 1 << 60]
        assert len(ids) > 60_000
        for seed in (1, 7, 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93):
            most, total = table.looks(ids, seed)
            assert total < self.CELLS * len(ids)
            assert most < 1_000
