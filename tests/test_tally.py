"""The tally: percentiles within their stated error, merging that is exact in any order."""

from __future__ import annotations

import math
import random
from collections import Counter
from fractions import Fraction
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from interval_lists import elapsed_ns
from raw_spans import counted, counted_paths
from readback import spans_in
from tallies import Tally, Totals, by_keys

from instrument.recording import tally as product
from instrument.recording.distributions import Distribution, bucket_middle, bucket_of, percentiles, percentiles_of_times
from instrument.recording.spans import Site, Span
from instrument.recording.tally import SUMS

SITES = [Site("a"), Site("b", instance="0"), Site("b", instance="1"), Site("copy", "copy")]

durations = st.integers(0, 10**13)


@st.composite
def span_lists(draw: st.DrawFn) -> list[Span]:
    """Spans of one process under random parents, on random threads."""
    spans: list[Span] = []
    for span_id in range(1, draw(st.integers(0, 20)) + 1):
        parent_id = draw(st.integers(0, span_id - 1))
        total = draw(durations)
        spans.append(
            Span(
                site=draw(st.sampled_from(SITES)),
                span_id=span_id,
                parent_id=parent_id,
                root_id=1,
                thread_id=draw(st.integers(1, 3)),
                task_id=0,
                start_ns=span_id,
                end_ns=span_id + total,
                active_ns=total,
                self_ns=total // 2,
                error=draw(st.sampled_from([None, None, "ValueError"])),
                attributes={"bytes": 10},
            )
        )
    return spans


def alone(span: Span, *, is_inner: bool) -> Totals:
    """The totals of one call; of one inside another, its total and its device time are in that of the outer one."""
    took_ns = span.total_ns if is_inner else elapsed_ns(span)
    sums = (0, span.self_ns, 0, 0, 0) if is_inner else (span.total_ns, span.self_ns, 0, span.device_ns, took_ns)
    moved_bytes = span.attributes.get("bytes", 0) if span.site.kind == "copy" else 0
    assert isinstance(moved_bytes, int)
    return Totals(
        1, int(span.error is not None), *sums, took_ns, took_ns, moved_bytes, span.start_ns, {bucket_of(took_ns): 1}
    )


@given(durations)
def test_a_bucket_represents_its_values_within_one_percent(value: int) -> None:
    assert abs(bucket_middle(bucket_of(value)) - value) <= value / 128
    assert bucket_of(value) <= bucket_of(value + 1) <= bucket_of(value) + 1


def test_buckets_of_the_longest_times_still_have_an_index() -> None:
    assert bucket_of(2**63 - 1) < 4_000


@given(st.lists(durations, min_size=1), st.floats(0.001, 1.0))
def test_percentiles_are_within_one_percent_of_the_exact_ones(values: list[int], fraction: float) -> None:
    times = Distribution()
    for value in values:
        times.add(value)
    exact = sorted(values)[max(1, math.ceil(round(fraction * len(values), 6))) - 1]
    (found,) = percentiles(times.buckets, (fraction,), times.count, times.least_ns, times.most_ns)
    assert found is not None
    assert abs(found - exact) <= exact * 0.01
    assert min(values) <= found <= max(values)


def test_a_percentile_of_nothing_is_none() -> None:
    assert percentiles({}, (0.5,), 0, 0, 0) == [None]


@given(span_lists(), st.randoms(use_true_random=False))
def test_merging_is_exact_and_its_order_does_not_matter(spans: list[Span], chance: random.Random) -> None:
    whole = by_keys(counted(spans))
    parts = []
    paths, inner = counted_paths(spans)
    for span in spans:
        part = Tally()
        part.totals(paths[span.span_id], span.thread_id).merge(alone(span, is_inner=span.span_id in inner))
        parts.append(part.made())
    chance.shuffle(parts)
    merged = product.Tally.sum_tallies(parts)
    assert by_keys(merged) == whole
    assert merged.calls == len(spans)


def test_a_span_with_the_id_of_no_span_is_around_none() -> None:
    """All views of spans agree on it. Only a damaged file has one."""
    spans = [Span(Site("nobody"), 0, 0, 0, 1, 0, 0, 9, 9, 9), Span(Site("top"), 5, 0, 5, 1, 0, 3, 4, 1, 1)]
    assert [tuple(site.name for site in row.path) for row in counted(spans).iterate_totals()] == [("nobody",), ("top",)]


def test_calls_of_a_tally_come_as_one_meets_them_from_the_roots_down() -> None:
    a, b, c = Site("a"), Site("b"), Site("c")
    facts = [(a, 1, 0, 0, 9), (b, 2, 1, 2, 8), (c, 3, 2, 3, 4), (c, 4, 0, 1, 2), (b, 5, 1, 1, 2)]
    spans = [Span(site, own, up, 1, 1, 0, start, end, 1, 1) for site, own, up, start, end in facts]
    rows = counted(reversed(spans)).iterate_totals()
    assert [tuple(site.name for site in row.path) for row in rows] == [("a",), ("a", "b"), ("a", "b", "c"), ("c",)]


def test_bytes_are_summed_for_copies_only() -> None:
    copied = Span(SITES[3], 1, 0, 1, 1, 0, 0, 5, 5, 5, attributes={"bytes": 64})
    other = Span(SITES[0], 2, 0, 2, 1, 0, 0, 5, 5, 5, attributes={"bytes": 64})
    moved = {row.path[0].name: row.totals.moved_bytes for row in counted([copied, other]).iterate_totals()}
    assert moved == {"copy": 64, "a": 0}


def test_a_corrected_tally_takes_the_cost_of_the_probes_out_of_the_self_time_around_them() -> None:
    parent, child, other = Site("parent"), Site("child"), Site("other")
    tally = Tally()
    tally.totals((parent,), 1).merge(Totals(calls=1, total_ns=1_000, self_ns=700))
    tally.totals((parent, child), 1).merge(Totals(calls=10, total_ns=300, self_ns=300))
    tally.totals((parent, child), 2).merge(Totals(calls=10, total_ns=300, self_ns=300))
    tally.totals((parent, child, other), 1).merge(Totals(calls=100, total_ns=200, self_ns=200))
    charged = tally.made()
    charged.set_probe_costs(lambda site: 20.0 if site is child else 5.0)
    assert {path[-1][0]: totals.probe_ns for (path, thread), totals in by_keys(charged).items() if thread == 1} == {
        "parent": 5,
        "child": 200,
        "other": 500,
    }
    corrected = {
        (path[-1][0], thread): totals.self_ns
        for (path, thread), totals in by_keys(charged.correct_self_times()).items()
    }
    assert corrected == {
        ("parent", 1): 500,  # a child on another thread was never in it
        ("child", 1): 0,  # never below nothing
        ("child", 2): 300,
        ("other", 1): 200,
    }
    assert by_keys(charged)[(parent.key,), 1].self_ns == 700


@given(span_lists(), span_lists())
def test_correction_does_not_depend_on_when_tallies_are_merged(left: list[Span], right: list[Span]) -> None:
    def charged(spans: list[Span]) -> product.Tally:
        tally = counted(spans)
        tally.set_probe_costs(lambda site: len(site.name) * 7.0)
        return tally

    merged = product.Tally.sum_tallies([charged(left), charged(right)])
    both = product.Tally.sum_tallies([charged(right), charged(left)])
    assert by_keys(merged.correct_self_times()) == by_keys(both.correct_self_times())


@given(span_lists(), span_lists())
def test_the_difference_of_two_states_is_the_tally_of_what_came_in_between(early: list[Span], late: list[Span]) -> None:
    before = product.Tally.sum_tallies([counted(early)])
    after = product.Tally.sum_tallies([before, counted(late)])
    grown, expected = after.subtract_earlier(before), counted(late).merge_threads()
    sums = [*SUMS, "histogram"]

    def told(tally: product.Tally) -> dict[object, list[object]]:
        return {key: [getattr(its, name) for name in sums] for (key, _), its in by_keys(tally).items() if its.calls}

    assert told(grown) == told(expected)
    assert by_keys(after.subtract_earlier(product.Tally())) == by_keys(after.merge_threads())


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=300))
def test_there_is_one_definition_of_percentiles_whether_times_or_a_histogram_are_at_hand(times: list[int]) -> None:
    times.sort()
    fractions = (0.5, 0.9, 0.99)
    of_histogram = percentiles(Counter(map(bucket_of, times)), fractions, len(times), times[0], times[-1])
    assert of_histogram == percentiles_of_times(times, fractions)
    for fraction, found in zip(fractions, percentiles_of_times(times, fractions), strict=True):
        exact = times[math.ceil(Fraction(str(fraction)) * len(times)) - 1]
        assert abs(found - exact) <= exact / 128


def test_sites_of_one_name_and_line_that_differ_in_their_phase_have_lines_of_their_own(recorder: Any) -> None:
    for name, phases in (("same", ("compute", "post")), ("own", ("compute",))):
        for phase in phases:
            with recorder.scope(name, phase=phase):
                pass
    with recorder.scope("own", phase="compute"):
        pass
    expected = [("same", "compute", 1), ("same", "post", 1), ("own", "compute", 2)]
    tally = recorder.tally()
    for found in (tally, product.Tally.sum_tallies([tally]), counted(spans_in(recorder))):
        rows = sorted(found.iterate_totals(), key=lambda row: row.totals.first_ns)
        assert [(row.path[0].name, dict(row.path[0].attributes)["phase"], row.totals.calls) for row in rows] == expected
    tree = recorder.tally().tree
    assert [*tree.merge_equal_paths().places] == [*range(len(tree))]


def test_processes_that_differ_in_a_fact_of_their_own_alone_count_as_one_place() -> None:
    tally = Tally()
    for rank in (0, 1):
        tally.totals((Site("all_reduce", "comm", attributes=(("rank", rank),)),), 1).merge(Totals(calls=1))
    assert [row.totals.calls for row in tally.made().iterate_totals()] == [2]
