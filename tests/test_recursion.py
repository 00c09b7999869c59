"""The call tree under recursion and when it is full: what folds, and how folded calls count."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from otlp_spans import ORIGIN
from raw_spans import counted
from readback import snapshot_of, spans_in
from tallies import Totals, by_keys, rows_of

from instrument import chrome
from instrument.recorder import wrapping
from instrument.recording.paths import OVERFLOW
from instrument.recording.spans import DeviceInterval, Site, Span
from instrument.report.section import format_summary
from instrument.report.view import Options, Recording
from instrument.trace.columns import DeviceIntervals
from instrument.trace.trace import Trace


def wrapped(recorder: Any, name: str, function: Any, kind: str = "op") -> Any:
    return recorder.wrap(function, Site(name, kind))


def by_path(recorder: Any) -> dict[tuple[str, ...], Totals]:
    found: dict[tuple[str, ...], Totals] = {}
    for path, _, totals in rows_of(recorder.tally()):
        found.setdefault(tuple(site.name for site in path), Totals()).merge(totals)
    return found


def spin(until_ns: int) -> None:
    end = time.monotonic_ns() + until_ns
    while time.monotonic_ns() < end:
        pass


def test_mutual_recursion_makes_as_many_paths_as_there_are_orders_of_its_functions(recorder: Any) -> None:
    chance = random.Random(3)
    calls: Counter[str] = Counter()

    def call(depth: int) -> None:
        for _ in range(chance.choice((0, 1, 2)) if depth else 0):
            name = chance.choice("abc")
            calls[name] += 1
            functions[name](depth - 1)

    functions = {name: wrapped(recorder, name, lambda depth: call(depth)) for name in "abc"}
    for _ in range(1_000):
        call(12)
    tally = by_path(recorder)
    assert len(tally) == 3 + 6 + 6
    assert all(len(set(path)) == len(path) for path in tally)
    found: Counter[str] = Counter()
    for path, totals in tally.items():
        found[path[-1]] += totals.calls
    assert found == calls
    wrapped(recorder, "new", lambda: None)()
    assert by_path(recorder)["new",].calls == 1


def test_the_time_of_a_recursion_counts_once_and_own_times_sum_to_it(recorder: Any) -> None:
    def one(depth: int) -> None:
        spin(200_000)
        if depth:
            two_(depth - 1)

    def two(depth: int) -> None:
        spin(200_000)
        leaf_()
        one_(depth)

    one_, two_ = wrapped(recorder, "one", one), wrapped(recorder, "two", two)
    leaf_ = wrapped(recorder, "leaf", lambda: spin(100_000))
    one_(3)
    spans = spans_in(recorder)
    (root,) = [span for span in spans if not span.parent_id]
    tally = by_path(recorder)
    assert {path: totals.calls for path, totals in tally.items()} == {
        ("one",): 4, ("one", "two"): 3, ("one", "two", "leaf"): 3,
    }  # fmt: skip
    assert tally["one",].total_ns == tally["one",].elapsed_ns == root.total_ns
    outer = min((span for span in spans if span.site.name == "two"), key=lambda span: span.start_ns)
    assert tally["one", "two"].total_ns == outer.total_ns
    for path, totals in tally.items():
        of_site = [span for span in spans if span.site.name == path[-1]]
        assert totals.self_ns == sum(span.self_ns for span in of_site)
        assert (totals.min_ns, totals.max_ns) == (
            min(span.total_ns for span in of_site), max(span.total_ns for span in of_site),
        )  # fmt: skip
        assert sum(totals.histogram.values()) == totals.calls
    assert sum(totals.self_ns for totals in tally.values()) == root.total_ns
    # A timeline keeps the true parents.
    parents = {span.span_id: span for span in spans}
    deepest = max(spans, key=lambda span: span.start_ns)
    names = []
    above: Any = deepest
    while above is not None:
        names.append(above.site.name)
        above = parents.get(above.parent_id)
    assert names == ["one", "two", "one", "two", "one", "two", "one"]


def test_calls_one_after_another_below_a_fold_count_their_time_each(recorder: Any) -> None:
    def outer(depth: int) -> None:
        if depth:
            outer_(depth - 1)
        for _ in range(3):
            leaf_()

    outer_, leaf_ = wrapped(recorder, "outer", outer), wrapped(recorder, "leaf", lambda: spin(50_000))
    outer_(2)
    outer_(0)
    tally = by_path(recorder)
    assert tally["outer", "leaf"].calls == 12
    leaves = [span.total_ns for span in spans_in(recorder) if span.site.name == "leaf"]
    assert tally["outer", "leaf"].total_ns == sum(leaves)
    roots = [span.total_ns for span in spans_in(recorder) if not span.parent_id]
    assert tally["outer",].total_ns == sum(roots)


def test_a_generator_and_a_scope_that_recur_fold(recorder: Any) -> None:
    def walk(depth: int) -> Iterator[int]:
        with recorder.scope("level"):
            yield depth
        if depth:
            yield from walk_(depth - 1)

    walk_ = wrapped(recorder, "walk", walk)
    assert list(walk_(3)) == [3, 2, 1, 0]
    tally = by_path(recorder)
    assert {path: totals.calls for path, totals in tally.items()} == {("walk",): 4, ("walk", "level"): 4}
    (root,) = [span for span in spans_in(recorder) if not span.parent_id]
    assert tally["walk",].total_ns == root.total_ns


def test_a_recursion_through_tasks_counts_the_time_of_the_outermost(recorder: Any) -> None:
    async def crawl(depth: int) -> None:
        await asyncio.sleep(0.001)
        if depth:
            await asyncio.gather(*(asyncio.create_task(crawl_(depth - 1)) for _ in range(2)))

    crawl_ = wrapped(recorder, "crawl", crawl)
    asyncio.run(crawl_(2))
    (path, totals), *others = by_path(recorder).items()
    assert (path, totals.calls, others) == (("crawl",), 7, [])
    (root,) = [span for span in spans_in(recorder) if not span.parent_id]
    assert totals.total_ns == root.total_ns


def test_a_recursion_on_another_thread_counts_its_time_there(recorder: Any) -> None:
    def work(depth: int) -> None:
        spin(100_000)
        if depth:
            context = recorder.copy_context()
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                pool.submit(context.run, work_, depth - 1).result()

    work_ = wrapped(recorder, "work", work)
    work_(1)
    rows = list(recorder.tally().iterate_totals())
    spans = {span.thread_id: span for span in spans_in(recorder)}
    assert [(len(row.path), row.totals.calls) for row in rows] == [(1, 1), (1, 1)]
    assert all(row.totals.total_ns == spans[row.thread_id].total_ns for row in rows)


def test_a_saved_trace_without_a_tally_has_of_a_recursion_the_tally_that_was_live(
    recorder: Any, tmp_path: Path
) -> None:
    def even(depth: int) -> None:
        leaf_()
        if depth:
            odd_(depth - 1)
            odd_(depth - 2 if depth > 1 else 0)

    def odd(depth: int) -> None:
        if depth:
            even_(depth - 1)
            odd_(depth - 1)

    def walk(depth: int) -> Iterator[int]:
        yield depth
        if depth:
            yield from walk_(depth - 1)

    async def crawl(depth: int) -> None:
        await asyncio.sleep(0)
        leaf_()
        if depth:
            await asyncio.gather(*(asyncio.create_task(crawl_(depth - 1)) for _ in range(2)))
            await asyncio.to_thread(odd_, depth)
            await crawl_(0)

    async def crawl_with_one_worker() -> None:
        # The order of two workers' first spans may differ from the order in which they began to record.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        await crawl_(3)

    def fail(depth: int) -> None:
        if not depth:
            raise ValueError
        fail_(depth - 1)

    even_, odd_, walk_, crawl_, fail_, leaf_ = (
        wrapped(recorder, function.__name__, function) for function in (even, odd, walk, crawl, fail, lambda: None)
    )
    for depth in range(5):
        even_(depth)
        odd_(depth)
    assert list(walk_(3)) == [3, 2, 1, 0]
    asyncio.run(crawl_with_one_worker())
    with pytest.raises(ValueError):
        fail_(4)
    live = recorder.tally()
    trace = Trace(ORIGIN, 0, time.monotonic_ns(), spans_in(recorder), live.threads)
    loaded, tally = chrome.load(chrome.dump(tmp_path / "trace.json", trace))
    assert {len(row.path) for row in tally.iterate_totals()} == {1, 2, 3, 4}
    assert by_keys(tally) == by_keys(counted(trace.spans)) == by_keys(live)
    assert tally.threads == live.threads
    of_live, of_saved = (
        format_summary(["events", "ops"], Recording.from_trace(loaded, lambda tally=tally: tally), Options())
        for tally in (live, tally)
    )
    assert of_live == of_saved


def test_the_device_time_of_a_call_inside_another_of_its_path_counts_once_of_spans_too() -> None:
    site, stretch = Site("timed"), DeviceInterval(0, 7, 5, 50)
    spans = [
        Span(site, number, number - 1, 1, thread, 0, start, end, end - start, end - start, device=(stretch,))
        for number, thread, start, end in [(1, 1, 0, 40), (2, 1, 1, 9), (3, 2, 2, 8), (4, 1, 45, 48)]
    ]
    (main, other) = counted(spans).iterate_totals()
    # The last one began after those around it had ended.
    assert (main.totals.calls, main.totals.total_ns, main.totals.device_ns) == (3, 43, 90)
    assert (main.totals.elapsed_ns, main.totals.min_ns, main.totals.max_ns) == (50 + 45, 8, 50)
    assert (other.totals.calls, other.totals.total_ns, other.totals.device_ns) == (1, 6, 45)


def test_a_full_tally_counts_what_comes_later_by_site(recorder: Any) -> None:
    recorder.node_limit = 20

    def chain(names: list[str]) -> None:
        if names:
            with recorder.scope(names[0]):
                chain(names[1:])

    chain([f"level {number}" for number in range(30)])
    late = wrapped(recorder, "late", lambda: late_inner())
    late_inner = wrapped(recorder, "inner", lambda: spin(50_000))
    for _ in range(5):
        late()
    again = wrapped(recorder, "again", lambda depth: depth and again(depth - 1))
    again(4)
    assert recorder.node_count >= 20
    tally = by_path(recorder)
    assert tally[OVERFLOW.name, "late"].calls == 5
    assert tally[OVERFLOW.name, "inner"].calls == 5
    assert tally[OVERFLOW.name, "again"].calls == 5
    assert [tally[OVERFLOW.name, f"level {number}"].calls for number in range(20, 30)] == [1] * 10
    assert sum(totals.calls for totals in tally.values()) == 30 + 10 + 5
    recursion = [span for span in spans_in(recorder) if span.site.name == "again"]
    assert tally[OVERFLOW.name, "again"].total_ns == max(span.total_ns for span in recursion)
    known = recorder.node_count
    late()
    assert recorder.node_count == known


def test_a_request_that_comes_when_the_tally_is_full_is_still_a_request(recorder: Any) -> None:
    recorder.node_limit = 1
    with recorder.new_scope(Site("around")), recorder.new_scope(Site("served", "request")):
        pass
    around, served = sorted(spans_in(recorder), key=lambda span: span.start_ns)
    assert served.root_id == served.span_id != around.root_id
    assert served.site.kind == "request"


def test_sites_of_a_full_tally_are_bounded_too(recorder: Any) -> None:
    recorder.node_limit, sites = 1, 5_000
    for number in range(sites):
        recorder.wrap(lambda: None, Site(f"site {number}"))()
    tally = recorder.tally()
    assert tally.calls == sites
    assert 4_096 <= len(list(tally.iterate_totals())) < sites
    assert recorder.node_count <= 2 * 4_096 + 1


def test_a_device_time_inside_a_recursion_is_that_of_the_outermost(recorder: Any) -> None:
    told = []

    class Pair:
        def end(self, ring: Any, index: int, span_id: int, start_ns: int, end_ns: int) -> None:
            told.append((index, recorder.count_device(ring, index, end_ns - start_ns, 10, end_ns - start_ns)))

    recorder.begin_device = lambda site, attributes, span_id: Pair()
    site = Site("timed", device=True)

    def timed(depth: int) -> None:
        if depth:
            made(depth - 1)

    made = recorder.wrap(timed, site)
    made(2)
    assert [(index < 0, counted) for index, counted in told] == [(True, False), (True, False), (False, True)]
    assert by_path(recorder)["timed",].device_ns == 10


# -------------------------------------------------------------------- the next session


def _names_deep(recorder: Any, count: int, prefix: str) -> None:
    def chain(number: int) -> None:
        if number < count:
            with recorder.scope(f"{prefix} {number}"):
                chain(number + 1)

    chain(0)


def test_a_reset_gives_the_call_paths_and_scope_names_of_the_session_before_back(recorder: Any) -> None:
    recorder.node_limit = recorder.scope_name_limit = 40
    function = wrapped(recorder, "function", lambda: None)
    for turn in range(5):
        _names_deep(recorder, 30, f"turn {turn}")
        function()
        with recorder.scope("around"):
            function()
            function()
        tally = by_path(recorder)
        assert {path: totals.calls for path, totals in tally.items() if "function" in path[-1]} == {
            ("function",): 1, ("around", "function"): 2,
        }  # fmt: skip
        assert len(tally) == 33
        assert not any(path[0] == OVERFLOW.name for path in tally)
        recorder.reset()
        assert by_path(recorder) == {}
        assert recorder.node_count == 1
    assert recorder.count_unusual_events() == {}


def test_spans_open_at_a_reset_count_at_their_paths_with_their_later_calls(recorder: Any) -> None:
    leaf = wrapped(recorder, "leaf", lambda: None)

    def items() -> Iterator[int]:
        with recorder.scope("held open"):
            leaf()
            yield 1
            leaf()

    async def wait(event: asyncio.Event) -> None:
        leaf()
        await event.wait()
        leaf()

    def reset() -> None:
        leaf()
        recorder.reset()
        leaf()

    items_, wait_, reset_ = (
        wrapped(recorder, "items", items), wrapped(recorder, "wait", wait), wrapped(recorder, "reset", reset),
    )  # fmt: skip

    async def run() -> None:
        event = asyncio.Event()
        with recorder.scope("outer"):
            task = asyncio.create_task(wait_(event))
            await asyncio.sleep(0)
            generator = items_()
            next(generator)
            reset_()
            list(generator)
            event.set()
            await task

    asyncio.run(run())
    assert {path: totals.calls for path, totals in by_path(recorder).items()} == {
        ("outer",): 1, ("outer", "wait"): 1, ("outer", "wait", "leaf"): 1, ("outer", "items"): 1,
        ("outer", "items", "held open"): 1, ("outer", "items", "held open", "leaf"): 1, ("outer", "reset"): 1,
        ("outer", "reset", "leaf"): 1,
    }  # fmt: skip


def test_a_recursion_that_is_open_at_a_reset_counts_its_time_once(recorder: Any) -> None:
    def work(depth: int) -> None:
        if depth == 1:
            recorder.reset()
        if depth:
            work_(depth - 1)

    work_ = wrapped(recorder, "work", work)
    work_(3)
    ((path, totals),) = by_path(recorder).items()
    assert (path, totals.calls) == (("work",), 4)
    assert totals.total_ns == totals.max_ns


def test_methods_of_thousands_of_instances_find_their_paths_after_a_reset(recorder: Any) -> None:
    class Layer:
        def forward(self, inner: Any) -> None:
            if inner is not None:
                inner.forward(None)

    layers = [Layer() for _ in range(100)]
    sites: dict[int, Site | None] = {id(layer): Site("layer", instance=str(n)) for n, layer in enumerate(layers)}
    Layer.forward = wrapping.wrap_method(recorder, Layer.forward, sites, lambda layer: sites[id(layer)])  # type: ignore[method-assign]
    for turn in range(4):
        for outer, inner in zip(layers, layers[1:] if turn % 2 else reversed(layers[:-1]), strict=False):
            outer.forward(inner)
        found = {
            tuple(site.instance for site in row.path): row.totals.calls for row in recorder.tally().iterate_totals()
        }
        pairs = zip(range(99), range(1, 100) if turn % 2 else range(98, -1, -1), strict=True)
        assert {path for path in found if len(path) == 2} == {(str(a), str(b)) for a, b in pairs if a != b}
        assert sum(found.values()) == 2 * 99
        recorder.reset()


def test_rows_that_were_taken_before_a_reset_keep_their_sites(recorder: Any) -> None:
    with recorder.scope("before"):
        wrapped(recorder, "call", lambda: None)()
    taken = snapshot_of(recorder)
    recorder.reset()
    _names_deep(recorder, 5, "after")
    trace, _ = taken.make_columns(time.monotonic_ns(), lambda _: DeviceIntervals.make_empty(), start_ns=0)
    assert sorted(trace.sites[site].name for site in trace.site.tolist()) == ["before", "call"]


def test_a_context_copied_before_a_reset_begins_its_path_anew(recorder: Any) -> None:
    async def run() -> None:
        async def late(event: asyncio.Event) -> None:
            await event.wait()
            with recorder.scope("late"):
                pass

        event = asyncio.Event()
        with recorder.scope("before"):
            task = asyncio.create_task(late(event))
            await asyncio.sleep(0)
        for turn in range(3):
            recorder.reset()
            _names_deep(recorder, 5, str(turn))
        event.set()
        await task

    asyncio.run(run())
    assert by_path(recorder)["late",].calls == 1
