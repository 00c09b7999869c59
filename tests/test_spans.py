"""Interval algebra against brute force, and self times of foreign trees."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument.spans import (
    DeviceInterval,
    Interval,
    Origin,
    Site,
    Span,
    Trace,
    assign_self_times,
    clip,
    intersect,
    length,
    subtract,
    union,
)

intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))))


def points(some: list[Interval]) -> set[int]:
    return {point for start, end in some for point in range(start, end)}


@given(intervals, intervals)
def test_union_intersection_and_difference_equal_those_of_point_sets(a: list[Interval], b: list[Interval]) -> None:
    left, right = union(a), union(b)
    assert points(left) == points(a)
    assert length(left) == len(points(a))
    assert left == sorted(left)
    assert all(first[1] < second[0] for first, second in pairwise(left))
    assert points(intersect(left, right)) == points(a) & points(b)
    assert points(subtract(left, right)) == points(a) - points(b)
    assert length(left) == length(intersect(left, right)) + length(subtract(left, right))


@given(intervals, st.integers(0, 40), st.integers(0, 12))
def test_clipping_keeps_the_points_inside(some: list[Interval], start: int, size: int) -> None:
    assert points(clip(some, (start, start + size))) == points(some) & set(range(start, start + size))


def test_the_interval_lists_of_paddle_come_out_the_same() -> None:
    assert union([(0, 5), (5, 8), (1, 2), (9, 9), (10, 12), (11, 11)]) == [(0, 8), (9, 9), (10, 12)]
    assert union([(0, 5), (10, 15), (3, 7), (20, 21)]) == [(0, 7), (10, 15), (20, 21)]
    assert intersect([(0, 10), (20, 30)], [(5, 25)]) == [(5, 10), (20, 25)]
    assert subtract([(0, 10)], [(2, 3), (5, 7)]) == [(0, 2), (3, 5), (7, 10)]


def test_an_interval_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ValueError, match="before its start"):
        union([(5, 3)])


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
