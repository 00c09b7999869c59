"""Work that is handed over to other threads, and stays a part of the request that was open there."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from readback import spans_in

import instrument
from instrument import profiled, scope
from instrument.instrumentors import tasks_and_threads
from instrument.profile.keys import loads
from instrument.recording.spans import Site
from instrument.trace.joined import join_requests
from instrument.trace.ledger import compute_ledger
from instrument.trace.trace import columns_of_spans

QUEUE = tasks_and_threads.QUEUE.name
NUMBER: contextvars.ContextVar[int] = contextvars.ContextVar("NUMBER", default=0)


@pytest.fixture
def carrying(recorder: Any) -> Iterator[Any]:
    """A recorder whose requests go over to other threads."""
    undo = tasks_and_threads.watch_thread_handovers(recorder)
    yield recorder
    undo()


def request(recorder: Any, name: str) -> Any:
    return recorder.make_span_factory(Site(name, "request"))()


def in_requests(recorder: Any) -> dict[str, list[str]]:
    """The names of what ran in each request, by its name; the rest by ''."""
    spans = {span.span_id: span for span in spans_in(recorder)}
    found: dict[str, list[str]] = {}
    for span in spans.values():
        if span.site.kind != "request":
            root = spans.get(span.root_id)
            found.setdefault(root.site.name if root and root.site.kind == "request" else "", []).append(span.site.name)
    return {name: sorted(names) for name, names in found.items()}


def test_work_in_a_pool_or_a_thread_is_a_part_of_its_request(carrying: Any) -> None:
    work = carrying.wrap(lambda: threading.current_thread().name, Site("work"))

    class Own(ThreadPoolExecutor):
        def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            return super().submit(function, *args, **kwargs)

    class Runner(threading.Thread):
        def run(self) -> None:
            work()

    async def serve() -> None:
        with request(carrying, "to a loop's pool"):
            await asyncio.get_running_loop().run_in_executor(None, work)
        with request(carrying, "to_thread"):
            await asyncio.to_thread(work)

    with ThreadPoolExecutor(1, "named") as pool, Own(1) as own:
        assert pool.submit(work).result() == "named_0"
        with request(carrying, "submit"):
            assert pool.submit(work).result() == "named_0"
        with request(carrying, "map"):
            assert list(pool.map(lambda number: (work(), number)[1], [1, 2])) == [1, 2]
        with request(carrying, "subclass"):
            own.submit(work).result()
        pool.submit(work).result()
        asyncio.run(serve())
    for thread in (threading.Thread(target=work, name="t"), Runner(name="t"), threading.Timer(0, work)):
        with request(carrying, f"thread {type(thread).__name__}"):
            thread.start()
            thread.join()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert in_requests(carrying) == {
        "": ["work"] * 3,
        "submit": [QUEUE, "work"],
        "map": [QUEUE, QUEUE, "work", "work"],
        "subclass": [QUEUE, "work"],
        "to a loop's pool": [QUEUE, "work"],
        "to_thread": [QUEUE, "work"],
        "thread Thread": ["work"],
        "thread Runner": ["work"],
        "thread Timer": ["work"],
    }
    assert carrying.open_rows() == []


def test_work_for_other_threads_runs_as_without_us(carrying: Any) -> None:
    def fail() -> None:
        raise KeyError("mine")

    def number() -> int:
        before = NUMBER.get()
        NUMBER.set(before + 1)
        return before

    def seen(pool: ThreadPoolExecutor) -> list[Any]:
        NUMBER.set(50)
        error = pool.submit(fail).exception()
        assert error is not None
        frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        values = [pool.submit(number).result() for _ in range(3)]  # kept by the pool's own thread
        with pytest.raises(TypeError) as wrong:
            pool.submit()  # type: ignore[call-arg]
        return [repr(error), frames, values, str(wrong.value), pool.submit(lambda *a, **k: (a, k), 1, b=2).result()]

    def initialize() -> None:
        NUMBER.set(7)

    with ThreadPoolExecutor(1, initializer=initialize) as pool:
        expected = contextvars.copy_context().run(seen, pool)
    with ThreadPoolExecutor(1, initializer=initialize) as pool, request(carrying, "r"):
        assert contextvars.copy_context().run(seen, pool) == expected
    assert "fail" in expected[1]
    assert expected[2] == [7, 8, 9]


def test_work_that_is_asked_for_while_another_waits_belongs_to_its_own_request(carrying: Any) -> None:
    go = threading.Event()
    hold, work = (carrying.wrap(function, Site(name)) for name, function in (("hold", go.wait), ("work", len)))
    with ThreadPoolExecutor(1) as pool:
        with request(carrying, "first"):
            first = pool.submit(hold)
        with request(carrying, "second"):
            second = pool.submit(work, "ab")
            go.set()
            assert second.result() == 2
        assert first.result()
    assert in_requests(carrying)["second"] == [QUEUE, "work"]


def test_a_request_that_has_ended_is_not_kept_alive_by_a_pool(carrying: Any) -> None:
    class Body:
        """The body of a request."""

    with ThreadPoolExecutor(1) as pool:
        body = Body()
        gone = weakref.ref(body)
        with request(carrying, "r"):
            carrying.annotate_innermost({"n": 1})
            pool.submit(lambda kept: None, body).result()
        done = pool.submit(len, "")
        assert done.result() == 0
        del body
        gc.collect()
        assert gone() is None
        assert not [thing for thing in gc.get_objects() if type(thing).__name__ in ("Carried", "Published")]


def test_the_wait_in_a_pool_is_a_part_of_the_request_s_time(recording: Any) -> None:
    session = instrument.start(loads("requests: off"))
    assert session is not None
    try:
        taken = threading.Event()

        @profiled(phase="compute")
        def work() -> None:
            time.sleep(0.002)

        with ThreadPoolExecutor(1) as pool:
            free = pool.submit(taken.wait)
            with scope("r", kind="request"):
                done = pool.submit(work)
                taken.set()
                done.result()
            free.result()
        spans = session.trace().spans
        trace = columns_of_spans(spans)
        own = compute_ledger(trace, join_requests(trace))
    finally:
        instrument.stop()
    parts = own.times_of_request(0)
    assert {QUEUE, "compute"} <= set(parts)
    (queue,) = (span for span in spans if span.site.name == QUEUE)
    assert (queue.active_ns, parts[QUEUE]) == (0, queue.total_ns)


def test_pools_and_threads_get_their_own_functions_back(recorder: Any) -> None:
    names = [name for name in tasks_and_threads.STARTS if hasattr(threading, name)]
    before = [ThreadPoolExecutor.submit, *[getattr(threading, name) for name in names]]
    tasks_and_threads.watch_thread_handovers(recorder)()
    assert [ThreadPoolExecutor.submit, *[getattr(threading, name) for name in names]] == before


def test_a_pool_that_is_imported_after_the_session_is_met(tmp_path: Path) -> None:
    program = """
import instrument, sys
from instrument.profile.keys import loads
sys.modules.pop("concurrent.futures.thread", None)
session = instrument.start(loads("requests: off"))
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(1) as pool, instrument.scope("r", kind="request"):
    pool.submit(len, "").result()
print([span.site.name for span in session.trace().spans])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert sorted(done.stdout.split("'")[1::2]) == [QUEUE, "r"], done.stderr
