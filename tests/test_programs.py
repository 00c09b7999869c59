"""Parentage against a reference: what recorders, tally and exporter say of random programs must be what happened.

`PROGRAMS` in the environment says how many programs (10,000 take half an hour for each test). A failure names the seed
of its program, which `programs.program` makes again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from kept import Kept
from otlp_spans import messages_of
from programs import Machine, Tracked, program, recursive
from raw_spans import counted
from readback import read_rows, spans_in
from tallies import by_keys

from instrument.otlp import export_facts
from instrument.profile.model import Capture
from instrument.recording.spans import Site, Span
from instrument.recording.trace_context import LINK

PROGRAMS = int(os.environ.get("PROGRAMS", "200"))
FIRST = 25
"""The number of programs that run with the tests that are not slow."""
CHUNK = 250
"""Programs that one recorder sees: it keeps every call path of theirs."""

chunks = pytest.mark.parametrize(
    "seeds",
    [
        range(min(FIRST, PROGRAMS)),
        *(
            pytest.param(range(first, min(first + CHUNK, PROGRAMS)), marks=pytest.mark.slow)
            for first in range(FIRST, PROGRAMS, CHUNK)
        ),
    ],
    ids=lambda seeds: f"from {seeds.start}",
)
modes = pytest.mark.parametrize("in_loop", [False, True], ids=["threads", "asyncio"])

Edge = tuple[object, object, str]
"""A span, its parent or None, and what is said of it."""


def shape_of(edges: Iterable[Edge]) -> tuple[Any, ...]:
    """A forest in a form that does not depend on identities or on the order of siblings."""
    children: dict[object, list[tuple[object, str]]] = {}
    for own, parent, said in edges:
        children.setdefault(parent, []).append((own, said))

    def below(parent: object) -> tuple[Any, ...]:
        return tuple(sorted((said, below(own)) for own, said in children.get(parent, ())))

    return below(None)


# -------------------------------------------------------------------- against the reference


def facts(name: str, root: str, came_from: str | None) -> str:
    return f"{name} in {root}" + ("" if came_from is None else f" from {came_from}")


def expected_tree(spans: Iterable[Tracked]) -> tuple[Any, ...]:
    return shape_of(
        (span, span.parent, facts(span.name, span.root.name, span.came_from.name if span.came_from else None))
        for span in spans
    )


def recorded_tree(spans: list[Span]) -> tuple[Any, ...]:
    names = {span.span_id: span.site.name for span in spans}
    return shape_of(
        (
            span.span_id,
            span.parent_id or None,
            facts(span.site.name, names[span.root_id], names.get(span.attributes.get(LINK, [None])[0])),
        )
        for span in spans
    )


def tallied(recorder: Any) -> Counter[tuple[str, ...]]:
    found: Counter[tuple[str, ...]] = Counter()
    for row in recorder.tally().iterate_totals():
        found[tuple(site.name for site in row.path)] += row.totals.calls
    return found


def expected_delivery(spans: Iterable[Tracked], *, requests_alone: bool) -> tuple[Any, ...]:
    """The traces that a collector gets: a request is the root of its own."""
    return shape_of(
        (
            span,
            None if span.root is span else span.parent,
            facts(span.name, span.root.name, span.came_from.name if span.came_from else None),
        )
        for span in spans
        if span.root.is_request or not requests_alone
    )


def delivered_tree(trees: list[list[Span]], spans: list[Span]) -> tuple[Any, ...]:
    """The same, as the official messages read it from what the exporter packs."""
    ids = export_facts.Ids()
    names = {ids.span_id(span.span_id): span.site.name for span in spans}
    roots = {ids.trace_id(span.span_id): span.site.name for span in spans}
    edges: list[Edge] = []
    for tree in trees:
        for message in messages_of(tree, ids):
            own, parent = int.from_bytes(message.span_id, "big"), int.from_bytes(message.parent_span_id, "big")
            links = [names[int.from_bytes(link.span_id, "big")] for link in message.links]
            for link in message.links:
                assert int.from_bytes(link.trace_id, "big") in roots
            root = roots[int.from_bytes(message.trace_id, "big")]
            edges.append((own, parent or None, facts(message.name, root, *(links or [None]))))
    assert len({own for own, _, _ in edges}) == len(edges), "a span was delivered twice"
    return shape_of(edges)


def assert_waited(tracked: Iterable[Tracked], spans: list[Span], about: str) -> None:
    """Assert that the wait of coroutines is between the measurements around their calls and inside their bodies.

    The wait of a coroutine is at least as long as the wait of its awaited coroutine. It may be longer by the time from
    one to the other.
    """
    least, most, found = Counter[str](), Counter[str](), Counter[str]()
    names = {one.name for one in tracked if one.waits_from_ns is not None}
    awaited: dict[Tracked, int] = {}
    for one in reversed(list(tracked)):  # what began last, first
        bound_ns = max(one.waits_to_ns, awaited.get(one, 0))
        least[one.name] += one.waits_from_ns or 0
        most[one.name] += bound_ns
        if one.parent is not None:
            awaited[one.parent] = awaited.get(one.parent, 0) + bound_ns
    for span in spans:
        found[span.site.name] += span.total_ns - span.active_ns
    for name in names:
        assert least[name] <= found[name] <= most[name], f"{name} {about}"


@chunks
@modes
def test_trees_paths_totals_and_what_is_delivered_are_what_happened_in_random_programs(
    make_recorder: Any, in_loop: bool, seeds: range
) -> None:
    recorder = make_recorder(ring_bytes=1 << 26)
    recorder.node_limit = 1 << 24
    for seed in seeds:
        steps = program(seed, in_loop=in_loop)
        # Of every other program the requests alone are kept, for they are slow; of the rest everything.
        requests_alone = seed % 2 == 0
        trees = Kept(recorder, Capture(sample=0.0 if requests_alone else 1.0, slow_ns=0), 10_000)
        cursor = recorder.make_row_cursor()
        machine = Machine([recorder], look=trees.take)
        machine.run_program(steps, in_loop=in_loop)
        trees.take()
        spans = spans_in(recorder)
        assert len(read_rows(cursor)) == len(spans)
        assert cursor.lost_rows == 0
        about = f"program {seed}: {steps}"
        assert recorded_tree(spans) == expected_tree(machine.spans), about
        assert tallied(recorder) == Counter(span.path for span in machine.spans), about
        delivery = expected_delivery(machine.spans, requests_alone=requests_alone)
        assert delivered_tree(trees.trees, spans) == delivery, about
        assert not trees.counts, about
        assert trees.rows.undecided_count == 0, about
        assert recorder.current_span_id() == 0
        assert recorder.open_rows() == []
        for span in spans:
            assert 0 <= span.self_ns <= span.total_ns
            assert 0 <= span.active_ns <= span.total_ns
        assert_waited(machine.spans, spans, about)
        recorder.reset()
    assert recorder.count_unusual_events() == {}


@chunks
@modes
def test_spans_of_random_programs_that_recur_count_as_they_were_counted_live(
    make_recorder: Any, in_loop: bool, seeds: range
) -> None:
    recorder = make_recorder(ring_bytes=1 << 26)
    sites: dict[tuple[str, str], Site] = {}
    for seed in seeds:
        steps = recursive(program(seed, in_loop=in_loop), 1 + seed % 3, sites)
        Machine([recorder]).run_program(steps, in_loop=in_loop)
        assert by_keys(recorder.tally()) == by_keys(counted(spans_in(recorder))), f"program {seed}: {steps}"
        recorder.reset()
