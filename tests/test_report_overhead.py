"""The Total time of a service splits into computation, waiting and framework, which add up."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from golden_views import of_tally
from readback import spans_in
from tallies import Tally, Totals, made

from instrument import chrome
from instrument.instrumentors.function_patterns import make_site
from instrument.recorder.wrapping import wrap
from instrument.recording.spans import Origin, Site
from instrument.report.events_view import Overhead, events, split_overhead
from instrument.report.self_times_view import SelfTimes, classes, instances, ops
from instrument.report.view import Options, Recording
from instrument.trace.trace import Trace

REQUEST = Site("POST /chat", "request", suspends=True)
HANDLER = Site("handle", "request")
FETCH = Site("fetch", "op", suspends=True)
QUEUE = Site("queue", "phase")
PREPARE = Site("prepare", "op")
COMPUTE = Site("run", "op", attributes=(("phase", "compute"),))


def split(*rows: tuple[tuple[Site, ...], int, int], state: str = "All") -> Overhead:
    """Return the split of paths with their total and self time."""
    tally = Tally()
    for path, total_ns, self_ns in rows:
        tally.totals(path, 1).merge(
            Totals(
                calls=1, total_ns=total_ns, self_ns=self_ns, waiting_ns=self_ns * path[-1].suspends,
                elapsed_ns=total_ns, histogram={0: 1},
            )
        )  # fmt: skip
    lines = made(tally)
    total_ns = sum(total_ns for path, total_ns, _ in rows if len(path) == 1)
    return split_overhead(lines, total_ns, state)


def parts(found: Overhead) -> tuple[int | None, int | None, int | None]:
    return found.computation_ns, found.waiting_ns, found.framework_ns


def test_the_wait_of_a_coroutine_is_waiting_and_the_work_of_a_function_is_framework() -> None:
    found = split(
        ((REQUEST,), 1_000, 700),
        ((REQUEST, PREPARE), 100, 100),
        ((REQUEST, COMPUTE), 200, 200),
    )
    assert parts(found) == (200, 700, 100)


def test_a_queue_is_waiting_and_what_is_in_computation_is_computation() -> None:
    found = split(
        ((HANDLER,), 1_000, 300),
        ((HANDLER, QUEUE), 400, 350),
        ((HANDLER, QUEUE, COMPUTE), 50, 50),
        ((HANDLER, COMPUTE), 300, 100),
        ((HANDLER, COMPUTE, FETCH), 200, 200),
    )
    assert parts(found) == (300, 400, 300)


def test_tasks_side_by_side_leave_parts_that_add_up() -> None:
    """A request that awaits three tasks at once: its self time is all of it, and so is theirs."""
    tasks = [Site(f"task {number}", "op", suspends=True) for number in range(2)]
    found = split(
        ((REQUEST,), 900, 900),
        *(((REQUEST, task), 900, 900) for task in tasks),
        ((REQUEST, COMPUTE), 900, 900),
    )
    assert parts(found) == (300, 600, 0)


def test_work_that_outlives_its_request_counts_up_to_the_requests_end() -> None:
    found = split(((REQUEST,), 100, 100), ((REQUEST, FETCH), 500, 100), ((REQUEST, FETCH, COMPUTE), 400, 400))
    assert parts(found) == (80, 20, 0)


def test_calls_that_have_not_ended_have_what_is_under_them() -> None:
    tally = Tally()
    loop = Site("engine loop", "op", suspends=True)
    for path, total_ns in (((loop, COMPUTE), 60), ((loop, PREPARE), 40)):
        tally.totals(path, 1).merge(Totals(calls=1, total_ns=total_ns, elapsed_ns=total_ns, histogram={0: 1}))
    assert parts(split_overhead(made(tally), 100, "CPU")) == (60, 0, 40)


def test_a_total_without_computation_has_waiting_and_no_overhead() -> None:
    assert parts(split(((REQUEST,), 1_000, 600), ((REQUEST, PREPARE), 400, 400))) == (None, 600, None)


def test_a_total_of_no_service_splits_in_two() -> None:
    rows = ((Site("train", "op"),), 1_000, 200), ((Site("train", "op"), COMPUTE), 800, 800)
    assert split(*rows).waiting_ns is None
    service = ((HANDLER,), 1_000, 200), ((HANDLER, COMPUTE), 800, 800)
    assert split(*service, state="GPU").waiting_ns is None


@pytest.mark.parametrize("functions", [True, False])
def test_sites_of_coroutines_and_async_generators_suspend(functions: bool) -> None:
    async def coroutine() -> None: ...

    async def async_generator() -> Any:
        yield

    def function() -> None: ...

    def generator() -> Any:
        yield

    suspending, others = (coroutine, async_generator), (function, generator, print, object())
    assert all(make_site(one).suspends == functions for one in (suspending if functions else others))


def served(recorder: Any) -> Recording:
    """Requests that prepare, wait for another task's answer, and compute."""

    def busy(ms: float) -> None:
        until_ns = time.perf_counter_ns() + round(ms * 1e6)
        while time.perf_counter_ns() < until_ns:
            pass

    compute, prepare = (wrap(recorder, lambda: busy(1), site) for site in (COMPUTE, PREPARE))

    async def handle() -> None:
        prepare()
        await asyncio.sleep(0.02)
        compute()

    wrapped = wrap(recorder, handle, make_site(handle, name="http.request", kind="request"))

    async def main() -> None:
        for _ in range(3):
            await wrapped()

    asyncio.run(main())
    spans = spans_in(recorder)
    first_ns, last_ns = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    trace = Trace(Origin(1, "chat", 0, 0), first_ns, last_ns, spans)
    return Recording(recorder.tally, lambda: trace)


def test_a_request_that_awaits_is_not_called_overhead(recorder: Any, tmp_path: Path) -> None:
    recording = served(recorder)
    path = tmp_path / "saved.json"
    chrome.dump(path, recording.trace, recording.tally)
    trace, tally = chrome.load(path)
    for one in (recording, Recording.from_trace(trace, lambda: made(tally))):
        found = events(one, Options()).overhead
        assert found is not None
        assert found.computation_ns is not None
        assert found.waiting_ns is not None
        assert found.framework_ns is not None
        assert found.computation_ns + found.waiting_ns + found.framework_ns == found.total_ns
        assert found.waiting_ns >= 3 * 20_000_000
        assert min(found.computation_ns, found.framework_ns) >= 3 * 1_000_000
        text = "\n".join(events(one, Options()).lines())
        assert "  Waiting  " in text
        rows = {(row.names[-1], row.where) for row in ops(one, Options()).functions[0].rows}
        requested = {("http.request", "waiting"), ("http.request", "host")}
        assert rows == {*requested, ("prepare", "host"), ("run", "host")}


def of_mixed(view: Any) -> SelfTimes:
    tally = Tally()
    for path in ((REQUEST,), (REQUEST, FETCH), (REQUEST, PREPARE)):
        tally.totals(path, 1).merge(
            Totals(calls=1, total_ns=5, self_ns=5, waiting_ns=5 * path[-1].suspends, elapsed_ns=5, histogram={5: 1})
        )
    found: SelfTimes = view(of_tally(tally), Options())
    return found


def test_a_row_says_waiting_of_what_coroutines_waited() -> None:
    def wheres(view: Any) -> set[tuple[str, str]]:
        return {(row.names[-1], row.where) for row in of_mixed(view).functions[0].rows}

    told = {("POST /chat", "waiting"), ("fetch", "waiting"), ("prepare", "host")}
    assert wheres(ops) == wheres(instances) == told
    assert wheres(classes) == {("(request)", "waiting"), ("(op)", "waiting"), ("(op)", "host")}
    lines = "\n".join(of_mixed(ops).lines())
    assert "On waiting: self time in which coroutines were suspended" in lines
    assert "On device" not in lines
