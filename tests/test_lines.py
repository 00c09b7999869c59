"""Lines as columns: they add up exactly, and live views say what those of the tally say."""

from __future__ import annotations

import random
import threading
import time
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from readback import snapshot_of, spans_in
from tallies import Tally, Totals, of_all_threads, path_upwards

from instrument.profile.model import SORT_KEYS, STATES, TRACER_OPTIONS
from instrument.recording.paths import NOT_BELOW, CallTree
from instrument.recording.spans import Cost, Origin, Site
from instrument.recording.tally import LARGEST, TOTALS
from instrument.report.cost_view import cost
from instrument.report.events_view import events
from instrument.report.self_times_view import classes, instances, ops
from instrument.report.view import Options, Recording
from instrument.trace.trace import Trace

SITES = [
    Site("POST /chat", "request"), Site("a", "request"), Site("a", "op", "m", "A.f"), Site("a", "op", "m", "A.f"),
    Site("b", "layer", instance="0"), Site("b", "layer", instance="1", device=True), Site("queue", "phase"),
    Site("compute", "phase"), Site("h2d", "copy", attributes=(("direction", "h2d"), ("sync", True))), Site("c"),
]  # fmt: skip

NAMES = [name for name in TOTALS.names or () if name not in ("node", "thread_id")]

numbers = st.sampled_from([st.integers(0, 9), st.integers(0, 2**40), st.integers(2**54, 2**55 - 1)])


@st.composite
def tallies(draw: st.DrawFn, least_calls: int = 0) -> Tally:
    """Totals of some paths on some threads, small ones and as large as they may be."""
    tally = Tally()
    own = draw(numbers)
    paths: list[tuple[Site, ...]] = [()]
    for _ in range(draw(st.integers(0, 15))):
        path = (*draw(st.sampled_from(paths)), draw(st.sampled_from(SITES)))
        paths.append(path)
        calls = draw(st.integers(least_calls, 3))
        totals = Totals()
        if calls:
            host_ns, device_ns, elapsed_ns, self_ns, waiting_ns, low_ns, first_ns = (draw(own) for _ in range(7))
            totals = Totals(
                calls, draw(st.integers(0, calls)), host_ns, self_ns, waiting_ns, device_ns, elapsed_ns, low_ns,
                low_ns + draw(own), draw(own), first_ns, {draw(st.integers(0, 300)): calls},
            )  # fmt: skip
        tally.totals(path, draw(st.integers(1, 3))).merge(totals)
    return tally


@given(tallies())
def test_places_distinguish_paths_by_their_keys(tally: Tally) -> None:
    tree = tally.made().tree
    keys = [tuple(site.key for site in path_upwards(tree, node)) for node in range(len(tree))]
    assert list(tree.merge_equal_paths().places) == [keys.index(key) for key in keys]


@given(tallies(), st.lists(st.integers(-1, 4), min_size=16, max_size=16))
def test_lines_of_a_group_add_up_exactly(tally: Tally, group_of: list[int]) -> None:
    found = tally.made()
    assert sum(len(found.lines_of_thread(thread)) for thread in found.threads) == len(found)
    expected = [Totals() for _ in range(5)]
    for row in found.iterate_totals():
        if group_of[row.totals.node] >= 0:
            expected[group_of[row.totals.node]].merge(Totals(**{name: getattr(row.totals, name) for name in NAMES}))
    by_group, group_of_line = found.sum_by_group(np.array(group_of), 5), np.array(group_of)[found.lines["node"]]
    for group, (of, its) in enumerate(zip(expected, by_group, strict=True)):
        assert [getattr(of, name) for name in NAMES] == [its[name] for name in NAMES]
        total = found.total_of_lines(np.flatnonzero(group_of_line == group).tolist())
        assert [getattr(total, name) for name in NAMES] == [its[name] for name in NAMES]


def test_numbers_that_no_process_counts_are_cut_so_that_their_sums_have_64_bits() -> None:
    tally = Tally()
    for name in "abc":
        tally.totals((Site(name),), 1).merge(Totals(calls=1, total_ns=2**62, self_ns=7))
    found = tally.made()
    assert found.lines["total_ns"].tolist() == [LARGEST // 3] * 3
    assert found.total_of_lines(range(3)).total_ns <= LARGEST
    assert found.total_of_lines(range(3)).self_ns == 21


@given(tallies())
def test_lines_of_all_threads_have_the_sums_of_the_tally(tally: Tally) -> None:
    whole = tally.made()
    merged = whole.merge_threads()
    expected = {path: totals for path, totals in of_all_threads(whole).items() if totals.calls}
    assert of_all_threads(merged) == expected
    firsts = merged.lines["first_ns"].tolist()
    assert firsts == sorted(firsts)


def extend(tree: CallTree, site: Site, parent: int) -> None:
    if site not in tree.sites:
        tree.sites.append(site)
    tree.add_nodes(len(tree), array("i", [tree.sites.index(site)]).tobytes(), array("i", [parent]).tobytes())


def test_sites_of_the_same_place_are_one_path_and_keep_all_their_nodes() -> None:
    first, same, other = Site("f", "op"), Site("f", "op"), Site("g")
    tree = CallTree()
    for site, parent in ((first, NOT_BELOW), (same, NOT_BELOW), (other, 0), (other, 1), (same, 3)):
        extend(tree, site, parent)
    located = tree.merge_equal_paths()
    assert list(located.places) == [0, 0, 2, 2, 4]
    assert list(located.parents) == [NOT_BELOW, NOT_BELOW, 0, 0, 2]
    assert list(located.site_of) == [0, 1, 2, 2, 1]
    assert list(tree.number_sites_by_key()) == [0, 0, 2]


def test_the_verdict_on_a_site_is_requested_once() -> None:
    tree, asked = CallTree(), []

    def say(site: Site) -> str:
        asked.append(site.name)
        return site.kind

    for name, kind in (("a", "op"), ("b", "layer"), ("c", "op")):
        extend(tree, Site(name, kind), NOT_BELOW)
        found, said = tree.number_sites(say), tree.map_sites(say)
    assert asked == ["a", "b", "c"]
    assert (found, said) == (array("i", [0, 1, 0]), ["op", "layer", "op"])


def test_a_nested_question_about_a_site_has_the_same_answer() -> None:
    """A signal's handler may print a report while another is made on the same thread."""
    tree, alone = CallTree(), CallTree()
    for name in "aba":
        extend(tree, Site(name), NOT_BELOW)
        extend(alone, Site(name), NOT_BELOW)
    asked = []

    def say(site: Site) -> str:
        if not asked:
            asked.append(site)
            tree.number_sites(say)
            tree.map_sites(say)
            extend(tree, Site("b"), NOT_BELOW)
            tree.number_sites_by_key()
        return site.name

    tree.number_sites(say)
    extend(alone, Site("b"), NOT_BELOW)
    assert tree.number_sites(say) == alone.number_sites(say) == array("i", [0, 1, 0, 1])
    assert tree.map_sites(say) == list("abab")
    assert (tree.number_sites_by_key(), tree.merge_equal_paths()) == (
        alone.number_sites_by_key(),
        alone.merge_equal_paths(),
    )
    assert list(tree.merge_equal_paths().places) == [0, 1, 0, 1]


# -------------------------------------------------------------------- of a process that runs

VIEWS = {"events": events, "classes": classes, "ops": ops, "instances": instances}


def record(recorder: Any, chance: random.Random) -> None:
    """Spans on threads one after the other, some of which never end."""

    def work() -> None:
        frames: list[Any] = []
        for _ in range(chance.randrange(60)):
            choice = chance.random()
            if frames and choice < 0.45:
                recorder.close(frames.pop(), KeyError() if choice < 0.05 else None)
            elif choice < 0.6:
                recorder.record(chance.choice(SITES), recorder.now_ns() - chance.randrange(10**6), {"bytes": 5})
            else:
                frames.append(recorder.open(chance.choice(SITES)))
        left.extend(frames)

    left: list[Any] = []
    for _ in range(chance.randrange(1, 4)):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()


def text(view: Any) -> list[str]:
    return list(view.lines())


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 8)) for seed in range(25)])
def test_live_views_are_those_of_the_tally(make_recorder: Any, seed: int) -> None:
    chance = random.Random(seed)
    recorder = make_recorder()
    record(recorder, chance)
    tally = recorder.tally()
    live = Recording(lambda: tally, pytest.fail)
    apart = Recording(lambda: tally, pytest.fail)
    together = Recording(lambda: tally.merge_threads(), pytest.fail)
    for _ in range(10):
        options = Options(
            tracer_option=chance.choice(TRACER_OPTIONS), state=chance.choice(STATES), unit="ns",
            sorted_by=chance.choice(SORT_KEYS), rows=chance.choice([None, 1, 3, 50]),
            threads=chance.choice(["both", "merged", "apart"]), least_ns=chance.choice([0, 0, 10**5]),
        )  # fmt: skip
        for name, view in VIEWS.items():
            is_merged = name != "events" or options.threads == "merged"
            assert text(view(live, options)) == text(view(together if is_merged else apart, options))


def test_views_that_are_asked_for_again_leave_nothing_more_in_the_call_tree(make_recorder: Any) -> None:
    recorder = make_recorder()
    record(recorder, random.Random(1))
    trace = Trace(Origin(1, "", 0, 0), 0, 1, [])

    def look() -> int:
        live = Recording(recorder.tally, lambda: trace, make_cost=lambda: Cost(1, 50, 1))
        for view in (*VIEWS.values(), cost):
            text(view(live, Options()))
        return len(recorder.tally().tree._said)

    assert look() == look()


def test_the_time_without_a_missing_span_is_known_without_making_spans(make_recorder: Any) -> None:
    recorder = make_recorder(1 << 14)  # so that rings wrap
    record(recorder, random.Random(3))
    for _ in range(500):
        recorder.close(recorder.open(SITES[5]))
    open_one = recorder.open(SITES[5])
    held, spans = snapshot_of(recorder), spans_in(recorder)
    recorder.close(open_one)
    assert held.find_complete_from(0, time.monotonic_ns()) == max(
        min(span.end_ns for span in spans if span.thread_id == thread_id) for thread_id in held.wrapped
    )
