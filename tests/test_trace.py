"""Columns say of any spans what the loops over span objects said of them, and what can be counted one by one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import call_trees_by_hand
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from interval_lists import assign_self_times, union
from oracle.recordings import any_parents, deep, program, wide
from raw_spans import points, traces

from instrument.recording.spans import DeviceInterval, Site, Span
from instrument.report.operator_rows import CallTable
from instrument.report.operators_view import OPERATORS
from instrument.trace import intervals
from instrument.trace.call_tree import build_call_tree
from instrument.trace.columns import Columns
from instrument.trace.indices import (
    NONE,
    Groups,
    count_ancestors,
    find_nearest_row,
    find_rows,
    number_combinations,
    topmost_rows,
)
from instrument.trace.self_times import remove_overlaps, self_times_of
from instrument.trace.trace import SpanViews, Trace, columns_of_spans, make_spans

DRAWN = [program(11, 300), program(12, 500), any_parents(7, 60), any_parents(8, 400), deep(120), wide(150)]
SOME = st.one_of(traces(), st.sampled_from(DRAWN))
PARTS = st.lists(st.tuples(st.integers(-20, 60), st.integers(0, 15)), max_size=12)


def columns_of(parts: list[tuple[int, int]]) -> tuple[Any, Any]:
    starts = np.array([start for start, _ in parts], dtype=np.int64)
    return starts, starts + np.array([length for _, length in parts], dtype=np.int64)


def union_of(parts: list[tuple[int, int]]) -> intervals.Union:
    return intervals.make_union(*columns_of(parts))


def instants(its: intervals.Union) -> set[int]:
    return points(zip(its.starts.tolist(), its.ends.tolist(), strict=True))


# Intervals


@given(PARTS, PARTS)
def test_the_algebra_of_intervals_is_that_of_instants(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    ours, theirs = union_of(left), union_of(right)
    a, b = points((start, start + n) for start, n in left), points((start, start + n) for start, n in right)
    assert instants(ours) == a
    assert (ours.starts[1:] > ours.ends[:-1]).all()
    assert ours.length_ns() == len(a)
    assert intervals.measure_intersection(ours, theirs) == len(a & b)
    assert instants(intervals.intersect(ours, theirs)) == a & b
    assert instants(intervals.subtract(ours, theirs)) == a - b
    assert ours.length_until(np.array([0, 33])).tolist() == [len([at for at in a if at < end]) for end in (0, 33)]


@given(st.lists(PARTS, max_size=4))
def test_simultaneous_spans_are_counted_by_instants(each: list[list[tuple[int, int]]]) -> None:
    unions = [union_of(parts) for parts in each]
    counts = [sum(at in instants(one) for one in unions) for at in range(-20, 80)]
    assert intervals.measure_overlap(unions) == (sum(count >= 2 for count in counts), max(counts, default=0))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-20, 60), st.integers(0, 15)), max_size=20), st.booleans())
def test_unions_of_groups_keep_these_apart(parts: list[tuple[int, int, int]], is_far: bool) -> None:
    """Also where groups times the length of time would not fit into 64 bits."""
    far = 1 << 61 if is_far else 0
    groups = np.array([group for group, *_ in parts], dtype=np.int64)
    starts, ends = columns_of([(start + far * (n % 2), length) for n, (_, start, length) in enumerate(parts)])
    found = intervals.union_by_group(groups, starts, ends)
    expected = []
    for group in range(5):
        its = [(start, end) for one, start, end in zip(groups, starts, ends, strict=True) if one == group]
        expected += [(group, *one) for one in union(one for one in its if one[0] < one[1])]
    assert list(zip(*(one.tolist() for one in found), strict=True)) == expected
    lengths = [sum(end - start for one, start, end in expected if one == group) for group in range(5)]
    assert intervals.lengths_by_group(groups, starts, ends, 5).tolist() == lengths


OF_GROUPS = st.lists(st.tuples(st.integers(0, 4), st.integers(-20, 60), st.integers(0, 15)), max_size=20)


def far_apart(parts: list[tuple[int, int, int]], is_far: bool) -> tuple[Any, Any, Any]:
    """Return the columns of parts. With `is_far` the groups are so far apart that 64 bits overflow."""
    starts, ends = columns_of([(start, length) for _, start, length in parts])
    groups = np.array([group for group, *_ in parts], dtype=np.int64)
    shift = groups * (1 << 59) * is_far
    return groups, starts + shift, ends + shift


@given(OF_GROUPS, OF_GROUPS, st.booleans())
def test_a_union_is_searched_within_its_group_only(
    parts: list[tuple[int, int, int]], asked: list[tuple[int, int, int]], is_far: bool
) -> None:
    its = intervals.union_by_group(*far_apart(parts, is_far))
    groups, starts, ends = far_apart(asked, is_far)
    known = list(zip(*(one.tolist() for one in its), strict=True))
    queries = list(zip(groups.tolist(), starts.tolist(), ends.tolist(), strict=True))
    begun = [[n for n, (one, start, _) in enumerate(known) if one == group and start <= at] for group, at, _ in queries]
    assert its.find_last_begun(groups, starts).tolist() == [max(places, default=NONE) for places in begun]
    lies = [[n for n, (one, start, end) in enumerate(known) if one == group and start <= at < end]
            for group, at, _ in queries]  # fmt: skip
    assert its.interval_at(groups, starts).tolist() == [max(places, default=NONE) for places in lies]
    shared = [
        [max(min(end, until) - max(start, since), 0) for one, start, end in known if one == group]
        for group, since, until in queries
    ]
    assert its.length_within(groups, starts, ends).tolist() == list(map(sum, shared))
    expected = [
        (which, place)
        for which, (group, since, until) in enumerate(queries)
        for place, (one, start, end) in enumerate(known)
        if one == group and ((start < until and since < end) or start <= since == until < end)
    ]
    found = its.overlapping_pairs(groups, starts, ends)
    assert list(zip(*(one.tolist() for one in found), strict=True)) == expected


@given(OF_GROUPS, st.booleans())
def test_intervals_that_follow_one_another_are_those_taken_one_by_one(
    parts: list[tuple[int, int, int]], is_far: bool
) -> None:
    groups, starts, ends = far_apart(parts, is_far)
    expected = []
    for group in range(5):
        until = None
        for place in sorted(np.flatnonzero(groups == group).tolist(), key=lambda n: (starts[n], -ends[n])):
            if until is None or starts[place] >= until:
                expected.append(place)
                until = ends[place]
    assert intervals.select_successive(groups, starts, ends).tolist() == expected


# Groups and forests


@given(st.lists(st.tuples(st.integers(-1, 5), st.integers(-(1 << 61), 1 << 61)), max_size=20))
def test_sums_and_extremes_of_groups_are_exact(pairs: list[tuple[int, int]]) -> None:
    groups = Groups(np.array([group for group, _ in pairs], dtype=np.int64), 6)
    numbers = np.array([number for _, number in pairs], dtype=np.int64)
    its = [[number for one, number in pairs if one == group] for group in range(6)]
    assert groups.count_members().tolist() == [len(one) for one in its]
    assert groups.min_by_group(numbers, 5).tolist() == [min(one, default=5) for one in its]
    assert groups.max_by_group(numbers, 5).tolist() == [max(one, default=5) for one in its]
    assert groups.sum_by_group(numbers).tolist() == [sum(one) for one in its]


@given(st.lists(st.tuples(*[st.sampled_from([0, 1, 7, 1 << 61, -5])] * 3), min_size=1, max_size=20))
def test_combinations_of_any_numbers_are_distinguished(rows: list[tuple[int, int, int]]) -> None:
    numbers, firsts = number_combinations(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)))
    assert sorted(set(numbers.tolist())) == list(range(len(set(rows))))
    assert [rows[int(firsts[number])] for number in numbers] == rows


@given(st.lists(st.integers(-(1 << 62), 1 << 62), unique=True, max_size=12), st.data())
def test_rows_are_found_by_any_ids(ids: list[int], data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.sampled_from([*ids, 5]), max_size=9))
    found = find_rows(np.array(ids, dtype=np.int64), np.array(wanted, dtype=np.int64))
    assert found.tolist() == [ids.index(one) if one in ids else NONE for one in wanted]


@given(st.data())
def test_levels_tops_and_the_nearest_are_those_of_a_walk_up(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 14))
    order = data.draw(st.permutations(range(count)))
    parents = np.full(count, NONE, dtype=np.int32)
    for place, row in enumerate(order):
        parents[row] = data.draw(st.sampled_from([NONE, *order[:place]]))
    wanted = np.array([data.draw(st.booleans()) for _ in range(count)], dtype=np.bool_)
    for row in range(count):
        way = [row]
        while parents[way[-1]] != NONE:
            way.append(int(parents[way[-1]]))
        assert count_ancestors(parents)[row] == len(way) - 1
        assert topmost_rows(parents)[row] == way[-1]
        assert find_nearest_row(parents, wanted)[row] == next((one for one in way if wanted[one]), NONE)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 100])
@pytest.mark.parametrize("more", [0, 1, 50])
def test_a_circle_is_found_at_any_length_with_any_rows_below_it(length: int, more: int) -> None:
    circle = [(place + 1) % length for place in range(length)]
    parents = np.array([*circle, *range(length - 1, length - 1 + more), NONE], dtype=np.int32)
    for find in (count_ancestors, topmost_rows):
        with pytest.raises(ValueError, match="its own ancestor"):
            find(parents)


# Trees


@given(SOME)
def test_columns_are_the_spans_and_spans_the_columns(trace: Trace) -> None:
    assert make_spans(trace.columns) == trace.spans
    later = SpanViews(trace.columns)
    assert [later[row - len(later)] for row in range(len(later))] == trace.spans
    assert (later, later[1:3], len(later)) == (trace.spans, trace.spans[1:3], len(trace.spans))
    with pytest.raises(IndexError):
        SpanViews(trace.columns)[len(later)]


def test_spans_made_of_columns_share_nothing_that_can_be_changed() -> None:
    spans = make_spans(columns_of_spans(deep(30).spans))
    spans[0].attributes["own"] = 1  # type: ignore[index]
    assert dict(spans[1].attributes) == {}


@given(SOME)
def test_self_times_are_those_of_the_spans(trace: Trace) -> None:
    assign_self_times(trace.spans)
    rows = np.arange(len(trace.spans))
    assert self_times_of(trace.columns, rows).tolist() == [span.self_ns for span in trace.spans]


@given(SOME, st.sampled_from(["request", "step", "comm"]))
def test_owners_are_those_of_the_spans(trace: Trace, kind: str) -> None:
    by_id = {span.span_id: span for span in trace.spans}

    def owner(span: Span) -> int:
        """The root that a span names, if it is of the kind, else the topmost such span on the way up."""
        if span.root_id in by_id and by_id[span.root_id].site.kind == kind:
            return span.root_id
        found, at = 0, by_id.get(span.span_id)
        while at is not None:
            found = at.span_id if at.site.kind == kind else found
            at = by_id.get(at.parent_id)
        return found

    columns = trace.columns
    rows = columns.find_topmost_wanted_rows(columns.are_of_kind(kind)).tolist()
    assert [trace.spans[row].span_id if row != NONE else 0 for row in rows] == list(map(owner, trace.spans))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-9, 30), st.integers(0, 15)), max_size=20), st.randoms())
def test_each_instant_is_the_turn_of_the_highest_that_goes_on(parts: list[tuple[int, int, int]], chance: Any) -> None:
    groups = np.array([group for group, *_ in parts], dtype=np.int64)
    starts, ends = columns_of([(start, length) for _, start, length in parts])
    ranks = list(range(len(parts)))
    chance.shuffle(ranks)
    expected: Counter[int] = Counter()
    for group, at in itertools.product(range(4), range(-9, 46)):
        those = [n for n, (one, start, length) in enumerate(parts) if one == group and start <= at < start + length]
        expected.update([max(those, key=ranks.__getitem__)] if those else [])
    found: Counter[int] = Counter()
    for place, start, end in zip(*remove_overlaps(groups, starts, ends, np.array(ranks, dtype=np.int64)), strict=True):
        found[int(place)] += int(end - start)
    assert found == expected


TIMES = (
    "calls", "host_ns", "host_max_ns", "host_min_ns", "device_calls", "device_ns", "device_max_ns", "device_min_ns",
)  # fmt: skip


def facts_of_nodes(trace: Columns, calls: CallTable) -> list[str]:
    """All that is known of the nodes with calls, in any order, and the caller of each on its track."""
    paths, sites = calls.paths, trace.sites
    parts = [getattr(times, name) for times in (paths.host, paths.device) for name in times.__slots__]
    columns = (paths.site, paths.thread_id, paths.first_ns, calls.inside, calls.again, calls.around, *parts)
    found = []
    for node, (site, thread_id, first_ns, inside, again, around, *times) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        streams = {(row.device, row.stream): tuple(row[3:]) for row in calls.stream_times_by_node.get(node, ())}
        above = None if around == NONE else sites[paths.site[around]].key
        found.append([sites[site].key, above, sorted(streams.items()), thread_id, first_ns, inside, again, *times])
    return sorted(repr(facts) for facts in found if facts[7])


def facts_of_places(places: Iterable[Any]) -> list[str]:
    found = [
        [
            place.site.key, place.parent and place.parent.site.key,
            sorted((key, tuple(sums)) for key, sums in place.streams.items()), place.thread_id, place.first_ns,
            place.inside, place.again, *(getattr(place, name) for name in TIMES),
        ]
        for place in places
    ]  # fmt: skip
    return sorted(map(repr, found))


@given(SOME, st.booleans(), st.sampled_from([OPERATORS, ("user",), ("phase", "request")]))
def test_the_call_tree_is_that_of_the_spans(trace: Trace, is_bounded: bool, kinds: tuple[str, ...]) -> None:
    window = trace.coverage if is_bounded else None
    ours = CallTable.from_spans(trace.columns, kinds, window)
    theirs = call_trees_by_hand.every_place(call_trees_by_hand.call_tree(trace.spans, kinds, window))
    assert facts_of_nodes(trace.columns, ours) == facts_of_places(theirs)


@given(SOME, st.randoms())
def test_the_call_tree_of_selected_spans_equals_that_of_a_trace_with_only_the_selected_spans(
    trace: Trace, chance: Any
) -> None:
    columns = trace.columns
    some = np.array([chance.random() < 0.7 for _ in trace.spans], dtype=np.bool_)
    alone = columns.select(some)
    ours, theirs = CallTable.from_spans(columns, OPERATORS, among=some), CallTable.from_spans(alone, OPERATORS)
    assert facts_of_nodes(columns, ours) == facts_of_nodes(alone, theirs)


@pytest.mark.parametrize("levels_of_it", [2_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_deep_chain_is_a_call_tree_of_as_many_levels(levels_of_it: int) -> None:
    trace = deep(levels_of_it)
    tree = build_call_tree(trace.columns, OPERATORS)
    assert len(tree) == levels_of_it
    assert tree.parent.tolist() == list(range(-1, levels_of_it - 1))


@pytest.mark.slow
def test_deep_and_wide_unions_are_kept_once() -> None:
    site, depth, leaves = Site("outer", "op"), 1_000, 4_000
    spans = [Span(site, at, at - 1, 1, 7, 0, at, 10**6, 10**6, 0) for at in range(1, depth + 1)]
    for at in range(depth + 1, depth + 1 + leaves):
        device = (DeviceInterval(0, 7, 10 * at, 10 * at + 4),)
        spans.append(Span(site, at, depth, 1, 7, 0, at, 10**6, 10**6, 0, device=device))
    tree = build_call_tree(columns_of_spans(spans), OPERATORS)
    assert tree.device.total_ns.tolist() == [4 * leaves] * (depth + 1)
