"""Renaming an open span: what it and all that is open below it count as from then on.

That this holds in any program, at any moment, `test_programs.py` shows.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from readback import spans_in

from instrument.recording.spans import Site

ROUTE = Site("GET /chat/{id}", "request")


def paths(recorder: Any) -> Counter[tuple[str, ...]]:
    found: Counter[tuple[str, ...]] = Counter()
    for row in recorder.tally().iterate_totals():
        found[tuple(site.name for site in row.path)] += row.totals.calls
    return found


def nothing() -> None:
    pass


def test_a_renamed_request_and_what_is_open_or_begins_below_it_count_at_the_new_path(recorder: Any) -> None:
    work = recorder.wrap(nothing, Site("work"))
    request = recorder.make_scope("GET", kind="request").start()
    work()
    with recorder.make_scope("outer"):
        with recorder.make_scope("inner"):
            recorder.rename(request._frame, ROUTE)
            work()
        work()
    request.end()
    route = ROUTE.name
    assert paths(recorder) == {
        (route,): 1, (route, "outer"): 1, (route, "outer", "inner"): 1, (route, "outer", "inner", "work"): 1,
        (route, "outer", "work"): 1, ("GET", "work"): 1,
    }  # fmt: skip
    (row,) = [row for row in recorder.tally().iterate_totals() if row.path == (ROUTE,)]
    assert row.totals.total_ns > 0
    assert sum(recorder.tally().histogram([row.totals.node]).values()) == 1
    (span,) = [span for span in spans_in(recorder) if span.site is ROUTE]
    assert span.root_id == span.span_id
    assert {span.root_id for span in spans_in(recorder)} == {span.span_id}
    assert recorder.count_unusual_events() == {}


def test_the_rest_of_an_app_that_runs_in_another_task_and_in_a_thread_moves_with_its_request(recorder: Any) -> None:
    work = recorder.wrap(nothing, Site("work"))

    def endpoint(request: Any) -> None:
        with recorder.make_scope("endpoint"):
            recorder.rename(request._frame, ROUTE)
            work()

    async def app(request: Any) -> None:
        with recorder.make_scope("app"):
            await asyncio.to_thread(endpoint, request)

    async def serve() -> None:
        with recorder.make_scope("GET", kind="request") as request, recorder.make_scope("middleware"):
            await asyncio.create_task(app(request))

    async def main() -> None:
        await asyncio.gather(*(serve() for _ in range(20)))

    asyncio.run(main())
    route = ROUTE.name
    below = [(), ("middleware",), ("middleware", "app"), ("middleware", "app", "endpoint")]
    below.append(("middleware", "app", "endpoint", "work"))
    assert paths(recorder) == {(route, *names): 20 for names in below}


def test_the_right_one_of_several_open_requests_is_renamed(recorder: Any) -> None:
    async def serve(number: int, all_open: Any) -> None:
        with recorder.make_scope("GET", kind="request") as request, recorder.make_scope("app"):
            await all_open()
            if number % 2:
                recorder.rename(request._frame, ROUTE)
            await all_open()

    async def main() -> None:
        arrived = 0
        changed = asyncio.Condition()

        async def all_open() -> None:
            nonlocal arrived
            async with changed:
                arrived += 1
                goal = (arrived + 9) // 10 * 10
                changed.notify_all()
                await changed.wait_for(lambda: arrived >= goal)

        await asyncio.gather(*(serve(number, all_open) for number in range(10)))

    asyncio.run(main())
    assert paths(recorder) == {("GET",): 5, ("GET", "app"): 5, (ROUTE.name,): 5, (ROUTE.name, "app"): 5}


def test_a_span_under_an_ended_one_keeps_the_path_between(recorder: Any) -> None:
    with recorder.make_scope("GET", kind="request") as request:
        handler = recorder.make_scope("handler").start()
        later = recorder.make_scope("later").start()
        handler.end()
        recorder.rename(request._frame, ROUTE)
        later.end()
    assert paths(recorder) == {
        (ROUTE.name,): 1, ("GET", "handler"): 1, (ROUTE.name, "handler", "later"): 1,
    }  # fmt: skip


def test_a_generator_moves_with_the_span_that_it_began_in_and_not_with_its_consumer(recorder: Any) -> None:
    def numbers() -> Iterator[int]:
        with recorder.make_scope("inside"):
            yield 1
            yield 2

    numbers = recorder.wrap(numbers, Site("numbers"))
    with recorder.make_scope("first") as first:
        generator = numbers()
        next(generator)
        with recorder.make_scope("consumer") as consumer:
            recorder.rename(first._frame, Site("first renamed"))
            next(generator)
            recorder.rename(consumer._frame, Site("consumer renamed"))
            assert list(generator) == []
    assert paths(recorder) == {
        ("first renamed",): 1, ("first renamed", "numbers"): 1, ("first renamed", "numbers", "inside"): 1,
        ("first renamed", "consumer renamed"): 1,
    }  # fmt: skip


def test_a_span_renamed_to_what_is_around_it_folds_and_counts_its_time_once(recorder: Any) -> None:
    with recorder.make_scope("a") as outer, recorder.make_scope("b") as inner:
        recorder.rename(inner._frame, recorder.find_or_make_scope_site("a", "user"))
        with recorder.make_scope("c"):
            pass
    assert paths(recorder) == {("a",): 2, ("a", "c"): 1}
    (row,) = [row for row in recorder.tally().iterate_totals() if len(row.path) == 1]
    longest = max(span.total_ns for span in spans_in(recorder))
    assert row.totals.total_ns == row.totals.max_ns == longest
    assert outer is not inner


def test_a_recursion_whose_outer_call_is_renamed_is_one_no_more(recorder: Any) -> None:
    with recorder.make_scope("a") as outer, recorder.make_scope("b"), recorder.make_scope("a"):
        recorder.rename(outer._frame, Site("z"))
    assert paths(recorder) == {("z",): 1, ("z", "b"): 1, ("z", "b", "a"): 1}
    (row,) = [row for row in recorder.tally().iterate_totals() if len(row.path) == 3]
    assert row.totals.total_ns == row.totals.max_ns > 0


def test_renaming_what_is_not_open_or_to_another_kind_is_counted_and_changes_nothing(recorder: Any) -> None:
    scope = recorder.make_scope("GET", kind="request")
    with scope:
        frame = scope._frame
        recorder.rename(frame, Site("op", "op"))
        recorder.rename(frame, None)
    recorder.rename(frame, ROUTE)
    recorder.rename(None, ROUTE)
    assert paths(recorder) == {("GET",): 1}
    assert recorder.count_unusual_events() == {
        "span not renamed to a site of another kind": 2, "span renamed that is not open": 1,
    }  # fmt: skip


def test_when_the_tally_is_full_a_renamed_span_counts_with_the_rest_of_its_site(recorder: Any) -> None:
    with recorder.make_scope("GET", kind="request") as request:
        recorder.node_limit = 1
        recorder.rename(request._frame, ROUTE)
        with recorder.make_scope("app"):
            recorder.rename(request._frame, Site("GET /other", "request"))
    found = paths(recorder)
    assert {path[-1]: calls for path, calls in found.items()} == {"GET /other": 1, "app": 1}


def test_a_span_from_before_a_reset_can_be_renamed(recorder: Any) -> None:
    with recorder.make_scope("GET", kind="request") as request, recorder.make_scope("app"):
        recorder.reset()
        recorder.rename(request._frame, ROUTE)
    assert paths(recorder) == {(ROUTE.name,): 1, (ROUTE.name, "app"): 1}


def test_open_spans_below_on_another_thread_move(recorder: Any) -> None:
    started, go_on = threading.Event(), threading.Event()

    def body() -> None:
        with recorder.make_scope("in a thread"):
            started.set()
            assert go_on.wait(60)

    with recorder.make_scope("GET", kind="request") as request:
        thread = threading.Thread(target=contextvars.copy_context().run, args=(body,))
        thread.start()
        assert started.wait(60)
        recorder.rename(request._frame, ROUTE)
        go_on.set()
        thread.join()
    assert paths(recorder) == {(ROUTE.name,): 1, (ROUTE.name, "in a thread"): 1}


@pytest.mark.parametrize("in_loop", [False, True], ids=["thread", "asyncio"])
def test_spans_hidden_by_another_context_of_the_thread_move_and_are_shown(recorder: Any, in_loop: bool) -> None:
    before = contextvars.copy_context()
    shown = []

    def elsewhere() -> None:
        shown.append(Counter(recorder.find_site(row).name for _, row in recorder.open_rows()))
        recorder.rename(request._frame, ROUTE)

    def endpoint() -> None:
        before.run(recorder.wrap(elsewhere, Site("elsewhere")))
        shown.append(Counter(recorder.find_site(row).name for _, row in recorder.open_rows()))
        recorder.wrap(nothing, Site("work"))()

    def serve() -> None:
        nonlocal request
        with recorder.make_scope("GET", kind="request") as request:
            recorder.wrap(endpoint, Site("endpoint"))()

    async def main() -> None:
        asyncio.get_running_loop().call_soon(serve)
        await asyncio.sleep(0)
        serve()

    request: Any = None
    if in_loop:
        asyncio.run(main())
    else:
        serve()
    times = 2 if in_loop else 1
    route = ROUTE.name
    assert shown == times * [{"GET": 1, "endpoint": 1, "elsewhere": 1}, {route: 1, "endpoint": 1}]
    assert paths(recorder) == {
        (route,): times, (route, "endpoint"): times, (route, "endpoint", "work"): times, ("elsewhere",): times,
    }  # fmt: skip
    assert recorder.open_rows() == []


def test_open_spans_are_shown_under_their_new_names(recorder: Any) -> None:
    with recorder.make_scope("GET", kind="request") as request:
        recorder.rename(request._frame, ROUTE)
        ((_, row),) = recorder.open_rows()
        assert recorder.find_site(row) is ROUTE
