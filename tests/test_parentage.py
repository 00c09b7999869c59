"""The parents of spans of tasks, threads and copied contexts, alike in the trace, the tally and the collector.

The rule is that the parent of a span is the nearest span above it that is open at its begin. A span without such a
parent is a root, and names the span of its context. `test_programs` checks the same for random programs.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kept import Kept
from otlp_spans import links_of, messages_of
from readback import spans_in
from trees import tree_of

from instrument import chrome
from instrument.instrumentors.requests import model_servers
from instrument.instrumentors.requests.exchange import Exchanges
from instrument.otlp import export_facts
from instrument.profile.model import Capture, RequestsRule
from instrument.recording.spans import Origin, Site, Span
from instrument.recording.trace_context import LINK, RemoteParent, encode_parent
from instrument.trace.trace import Trace


def wrapped(recorder: Any, name: str, kind: str = "user") -> Callable[[Any], Any]:
    return lambda function: recorder.wrap(function, Site(name, kind))


def spans_by_name(recorder: Any) -> dict[str, Span]:
    return {span.site.name: span for span in spans_in(recorder)}


def tallied(recorder: Any) -> dict[str, int]:
    """Calls by path, outermost name first."""
    found: Counter[str] = Counter()
    for row in recorder.tally().iterate_totals():
        found[" > ".join(site.name for site in row.path)] += row.totals.calls
    return dict(found)


def trace_of(recorder: Any) -> str:
    return tree_of(spans_in(recorder))


# -------------------------------------------------------------------- owners without a span of their own


def test_spans_that_a_task_starts_between_its_own_are_children_of_its_origin(recorder: Any) -> None:
    leaf = wrapped(recorder, "leaf")(lambda: None)

    @wrapped(recorder, "awaited")
    async def awaited() -> None:
        leaf()

    async def owner() -> None:
        await awaited()  # it had a span, and has none now
        await asyncio.gather(awaited(), asyncio.create_task(awaited()), asyncio.to_thread(leaf))
        done = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(lambda: done.set_result(leaf()))
        await done
        thread = threading.Thread(target=contextvars.copy_context().run, args=(leaf,))
        thread.start()
        thread.join()

    @wrapped(recorder, "request", "request")
    async def request() -> None:
        await asyncio.create_task(owner())

    asyncio.run(request())
    expected = {"request": 1, "request > awaited": 3, "request > awaited > leaf": 3, "request > leaf": 3}
    assert tallied(recorder) == expected
    spans = spans_in(recorder)
    root = next(span for span in spans if span.site.name == "request")
    assert {span.root_id for span in spans} == {root.span_id}
    assert sum(span.parent_id == root.span_id for span in spans) == 6


@pytest.mark.parametrize("loop_of", ["asyncio", "uvloop"])
def test_a_task_is_below_its_origin_under_any_loop_that_reports_tasks(recorder: Any, loop_of: str) -> None:
    loops = pytest.importorskip(loop_of)
    call = wrapped(recorder, "call")(lambda job: asyncio.get_running_loop().create_task(job))

    async def job() -> None:
        with recorder.make_scope("job"):
            await asyncio.sleep(0)

    @wrapped(recorder, "request", "request")
    async def request() -> None:
        with recorder.make_scope("part"):
            made = asyncio.create_task(job())
            await asyncio.gather(made, job())
            await call(job())

    loop = loops.new_event_loop()
    try:
        loop.run_until_complete(request())
    finally:
        loop.close()
    below = "request > part"
    assert tallied(recorder) == {"request": 1, below: 1, f"{below} > job": 3, f"{below} > call": 1}
    assert recorder.count_unusual_events() == {}


def test_a_task_made_past_its_loop_is_of_the_request_that_made_it(recorder: Any) -> None:
    leaf = wrapped(recorder, "leaf")(lambda: None)

    async def job() -> None:
        leaf()

    async def items() -> AsyncIterator[Any]:
        for _ in range(2):
            yield asyncio.Task(job(), loop=asyncio.get_running_loop())

    stream = wrapped(recorder, "stream", "request")(items)

    @wrapped(recorder, "request", "request")
    async def request() -> None:
        with recorder.make_scope("part"):
            made = asyncio.Task(job(), loop=asyncio.get_running_loop())
            await asyncio.create_task(job())
        with recorder.make_scope("part"):
            again = asyncio.Task(job(), loop=asyncio.get_running_loop())
        await asyncio.wait([made, again])

    async def main() -> None:
        await asyncio.wait([asyncio.Task(request(), loop=asyncio.get_running_loop())])
        async for made in stream():
            await made

    asyncio.run(main())
    spans = {span.span_id: span for span in spans_in(recorder)}
    roots = [spans[span.root_id].site.name for span in spans.values() if span.site.name == "leaf"]
    assert sorted(roots) == ["request"] * 3 + ["stream"] * 2
    assert recorder.count_unusual_events() == {}


def test_tasks_of_a_suspended_async_generator_are_its_children(recorder: Any) -> None:
    leaf = wrapped(recorder, "leaf")(lambda: None)
    started: list[asyncio.Task[None]] = []

    async def background() -> None:
        await asyncio.sleep(0)
        leaf()

    @wrapped(recorder, "stream")
    async def stream() -> AsyncIterator[int]:
        started.append(asyncio.create_task(background()))
        yield 1

    @wrapped(recorder, "request", "request")
    async def request() -> None:
        async for _ in stream():
            await started[0]

    asyncio.run(request())
    assert tallied(recorder) == {"request": 1, "request > stream": 1, "request > stream > leaf": 1}


def test_a_request_through_two_middlewares_of_starlette_is_one_path(recorder: Any) -> None:
    applications = pytest.importorskip("starlette.applications")
    base = pytest.importorskip("starlette.middleware.base")
    client = pytest.importorskip("starlette.testclient")
    responses = pytest.importorskip("starlette.responses")
    routing = pytest.importorskip("starlette.routing")

    class Middleware(base.BaseHTTPMiddleware):  # type: ignore[misc, name-defined]
        async def dispatch(self, request: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
            leaf()
            return await call_next(request)

    leaf = wrapped(recorder, "leaf")(lambda: None)
    predict = wrapped(recorder, "predict")(lambda: "done")

    async def endpoint(request: Any) -> Any:
        return responses.PlainTextResponse(predict())

    inner = applications.Starlette(routes=[routing.Route("/", endpoint)])
    for _ in range(2):
        inner.add_middleware(Middleware)

    @wrapped(recorder, "http.request", "request")
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await inner(scope, receive, send)

    trees = Kept(recorder, Capture(sample=0.0, slow_ns=0), 100)
    browser = client.TestClient(app)
    for _ in range(3):
        assert browser.get("/").text == "done"
    trees.take()
    assert tallied(recorder) == {"http.request": 3, "http.request > leaf": 6, "http.request > predict": 3}
    names = [sorted(span.site.name for span in spans) for spans in trees.trees]
    assert names == 3 * [["http.request", "leaf", "leaf", "predict"]]


# -------------------------------------------------------------------- tasks that live longer than what started them


class Batcher:
    """A queue and the task that serves it, started by the first who asks: what `@serve.batch` of Ray Serve does."""

    def __init__(self, predict: Callable[[], Awaitable[None]]) -> None:
        self.predict = predict
        self.queue: asyncio.Queue[asyncio.Future[None]] | None = None
        self.task: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        if self.queue is None:
            self.queue = asyncio.Queue()
            self.task = asyncio.create_task(self._process_batches(self.queue))
        done = asyncio.get_running_loop().create_future()
        self.queue.put_nowait(done)
        await done

    async def _process_batches(self, queue: asyncio.Queue[asyncio.Future[None]]) -> None:
        while True:
            done = await queue.get()
            await self.predict()
            done.set_result(None)


def serve_batches(recorder: Any, requests: int, around: str | None = None) -> None:
    leaf = wrapped(recorder, "leaf")(lambda: None)

    @wrapped(recorder, "batch")
    async def predict() -> None:
        await asyncio.sleep(0)
        leaf()

    async def main() -> None:
        batcher = Batcher(predict)
        request = wrapped(recorder, "request", "request")(batcher.__call__)
        for _ in range(requests):
            await asyncio.create_task(request())
        assert batcher.task is not None
        batcher.task.cancel()

    asyncio.run(main() if around is None else wrapped(recorder, around)(main)())


def test_batches_of_a_long_lived_task_are_roots_once_the_request_that_started_it_has_ended(recorder: Any) -> None:
    trees = Kept(recorder, Capture(sample=1.0), 100)
    serve_batches(recorder, 5)
    trees.take()
    expected = {"request": 5, "request > batch": 1, "request > batch > leaf": 1, "batch": 4, "batch > leaf": 4}
    assert tallied(recorder) == expected
    spans = sorted(spans_in(recorder), key=lambda span: span.start_ns)
    first, *_ = (span for span in spans if span.site.name == "request")
    under, *later = (span for span in spans if span.site.name == "batch")
    assert (under.parent_id, under.root_id, dict(under.attributes)) == (first.span_id, first.span_id, {})
    for batch in later:
        assert (batch.parent_id, batch.root_id) == (0, batch.span_id)
        assert batch.attributes == {LINK: (first.span_id, first.span_id)}
    ids = export_facts.Ids()
    messages = [message for tree in trees.trees for message in messages_of(tree, ids)]
    assert len(messages) == len(spans)
    linked = [message for message in messages if message.links]
    assert sorted(message.name for message in linked) == 4 * ["batch"]
    for message in linked:
        (link,) = message.links
        assert not message.parent_span_id
        assert message.trace_id != link.trace_id
        assert int.from_bytes(link.trace_id, "big") == ids.trace_id(first.span_id)
        assert int.from_bytes(link.span_id, "big") == ids.span_id(first.span_id)


def test_batches_of_ray_serves_loop_are_no_part_of_the_request_that_began_it(recorder: Any) -> None:
    attach = model_servers.SEAMS["ray_serve"]["ray.serve.batching"]
    (undo,) = attach(SimpleNamespace(_BatchQueue=Batcher), Exchanges(RequestsRule(), recorder))
    serve_batches(recorder, 3, around="main")
    undo()
    assert tallied(recorder) == {"main": 1, "main > request": 3, "batch": 3, "batch > leaf": 3}


def test_batches_of_a_long_lived_task_hang_below_what_is_open_around_the_request_that_started_it(recorder: Any) -> None:
    serve_batches(recorder, 3, around="main")
    assert tallied(recorder) == {
        "main": 1,
        "main > request": 3,
        "main > request > batch": 1,
        "main > request > batch > leaf": 1,
        "main > batch": 2,
        "main > batch > leaf": 2,
    }
    spans = spans_in(recorder)
    main = spans_by_name(recorder)["main"]
    batches = sorted((span for span in spans if span.site.name == "batch"), key=lambda span: span.start_ns)
    assert [batch.parent_id == main.span_id for batch in batches] == [False, True, True]
    assert {batch.root_id for batch in batches[1:]} == {main.span_id}


def test_a_link_to_a_request_of_another_tracers_trace_names_that_trace(recorder: Any) -> None:
    recorder.remote_parent = lambda: encode_parent(RemoteParent(0xABC << 64, 0xDEF))
    serve_batches(recorder, 2)
    ids = export_facts.Ids()
    batch = max((span for span in spans_in(recorder) if span.site.name == "batch"), key=lambda span: span.start_ns)
    first = min((span for span in spans_in(recorder) if span.site.name == "request"), key=lambda span: span.start_ns)
    assert links_of(batch, ids) == [(0xABC << 64, ids.span_id(first.span_id), "")]


def test_a_trace_file_keeps_the_link(recorder: Any, tmp_path: Path) -> None:
    serve_batches(recorder, 2)
    spans = sorted(spans_in(recorder), key=lambda span: span.start_ns)
    first = next(span.span_id for span in spans if span.site.name == "request")
    origin = Origin(1, "chat", spans[0].start_ns, 0)
    trace = Trace(origin, spans[0].start_ns, max(span.end_ns for span in spans), spans)
    loaded, _ = chrome.load(chrome.dump(tmp_path / "trace.json", trace))
    (linked,) = (span for span in loaded.spans if LINK in span.attributes)
    assert (linked.site.name, linked.parent_id, list(linked.attributes[LINK])) == ("batch", 0, [first, first])
    assert len(links_of(linked, export_facts.Ids())) == 1


@pytest.mark.parametrize("how", ["call", "scope", "coroutine", "generator", "request", "record"])
def test_every_kind_of_span_says_what_its_context_came_from(recorder: Any, how: str) -> None:
    def scope() -> None:
        with recorder.make_scope("late", attributes={"rows": 3}):
            pass

    async def coroutine() -> None: ...

    def drive() -> None:
        with pytest.raises(StopIteration):
            wrapped(recorder, "late")(coroutine)().send(None)

    ways: dict[str, Callable[[], object]] = {
        "call": wrapped(recorder, "late")(lambda: None),
        "scope": scope,
        "coroutine": drive,
        "generator": lambda: list(wrapped(recorder, "late")(lambda: (yield from ()))()),
        "request": wrapped(recorder, "late", "request")(lambda: None),
        "record": lambda: recorder.record(Site("late"), recorder.now_ns(), {"rows": 3}),
    }
    copies = []

    @wrapped(recorder, "first")
    def first() -> None:
        copies.append(contextvars.copy_context())

    first()
    for _ in range(2):
        copies[0].run(ways[how])
    origin = spans_by_name(recorder)["first"]
    late = [span for span in spans_in(recorder) if span.site.name == "late"]
    given = {"rows": 3} if how in ("scope", "record") else {}
    link = {LINK: (origin.span_id, origin.span_id)}
    assert [(span.parent_id, dict(span.attributes)) for span in late] == 2 * [(0, {**given, **link})]
    assert tallied(recorder) == {"first": 1, "late": 2}


def test_spans_of_an_orphaned_task_are_linked_to_its_origin(recorder: Any) -> None:
    leaf = wrapped(recorder, "leaf")(lambda: None)

    async def orphan(ended: asyncio.Event) -> None:
        await ended.wait()
        leaf()
        await asyncio.gather(asyncio.create_task(child()), asyncio.to_thread(leaf))

    async def child() -> None:
        leaf()

    @wrapped(recorder, "request", "request")
    async def request(ended: asyncio.Event) -> asyncio.Task[None]:
        return asyncio.create_task(orphan(ended))

    async def main() -> None:
        ended = asyncio.Event()
        made = await request(ended)
        ended.set()
        await made

    asyncio.run(main())
    assert tallied(recorder) == {"request": 1, "leaf": 3}
    spans = spans_in(recorder)
    origin = next(span.span_id for span in spans if span.site.name == "request")
    links = [dict(span.attributes) for span in spans if span.site.name == "leaf"]
    assert links == 3 * [{LINK: (origin, origin)}]


def test_a_request_that_begins_where_an_ended_one_left_off_is_no_part_of_it(recorder: Any) -> None:
    leaf = wrapped(recorder, "leaf")(lambda: None)
    nested = wrapped(recorder, "nested", "request")(leaf)
    copies = []

    @wrapped(recorder, "task")
    async def task(ended: asyncio.Event) -> None:
        nested()  # within the request, which is open
        await ended.wait()
        copies.append(contextvars.copy_context())
        nested()  # below the task, which is open; the request has ended
        leaf()

    @wrapped(recorder, "request", "request")
    async def request(ended: asyncio.Event) -> asyncio.Task[None]:
        made = asyncio.create_task(task(ended))
        await asyncio.sleep(0)
        return made

    async def main() -> None:
        ended = asyncio.Event()
        made = await request(ended)
        ended.set()
        await made

    asyncio.run(main())
    assert tallied(recorder) == {
        "request": 1,
        "request > task": 1,
        "request > task > nested": 2,
        "request > task > nested > leaf": 2,
        "request > task > leaf": 1,
    }
    spans = sorted(spans_in(recorder), key=lambda span: span.start_ns)
    root = next(span for span in spans if span.site.name == "request")
    inside, after = (span for span in spans if span.site.name == "nested")
    assert (inside.root_id, after.root_id) == (root.span_id, after.span_id)


# -------------------------------------------------------------------- what belongs to a kept request


def test_spans_of_nested_tasks_of_slow_requests_are_kept(recorder: Any) -> None:
    predict = wrapped(recorder, "predict")(lambda: None)

    async def outer() -> None:
        predict()
        await asyncio.create_task(inner())

    async def inner() -> None:
        predict()

    @wrapped(recorder, "request", "request")
    async def request() -> None:
        await asyncio.create_task(outer())
        await asyncio.sleep(0.012)

    trees = Kept(recorder, Capture(sample=0.0, slow_ns=10_000_000), 100)
    for _ in range(5):
        asyncio.run(request())
    trees.take()
    assert [sorted(span.site.name for span in spans) for spans in trees.trees] == 5 * [
        ["predict", "predict", "request"]
    ]


def test_a_kept_request_is_whole_when_the_tally_has_no_room_for_its_paths(recorder: Any) -> None:
    recorder.node_limit = 3  # the overflow line, and two more
    leaf = wrapped(recorder, "leaf")(lambda: None)
    other = wrapped(recorder, "other")(leaf)
    request = wrapped(recorder, "request", "request")(other)
    trees = Kept(recorder, Capture(sample=0.0, slow_ns=0), 100)
    leaf()
    other()
    request()
    trees.take()
    (spans,) = trees.trees
    assert len(spans) == 3
    assert {span.root_id for span in spans} == {spans[0].span_id}


# -------------------------------------------------------------------- memory


@pytest.mark.slow
def test_a_chain_of_tasks_keeps_no_objects_of_earlier_tasks(recorder: Any) -> None:
    last: list[asyncio.Task[None]] = []

    @wrapped(recorder, "link")
    async def link(left: int) -> None:
        if left:
            last[:] = [asyncio.create_task(link(left - 1))]
            if left % 2:  # every other one ends after the next has begun
                await asyncio.sleep(0)
                await asyncio.sleep(0)

    held: list[int] = []

    async def main(length: int) -> None:
        last[:] = [asyncio.create_task(link(length))]
        while not last[0].done():
            await last[0]
        gc.collect()
        held.append(sum(type(found).__name__ in ("Published", "Current", "list") for found in gc.get_objects()))

    for length in (10, 10, 500):
        asyncio.run(main(length))
    assert held[2] - held[1] < 50


# -------------------------------------------------------------------- tasks that share a context


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tasks are given contexts since Python 3.11")
@pytest.mark.parametrize(
    "how", ["both tasks are given it", "it is a task's own", "it is that of the task that gives it"]
)
def test_spans_of_two_tasks_in_one_context_know_their_task(recorder: Any, how: str) -> None:
    leaf = wrapped(recorder, "leaf")(lambda: ran_in.append(asyncio.current_task()))
    ran_in: list[Any] = []

    async def work(name: str) -> None:
        with recorder.make_scope(name):
            leaf()
            await asyncio.sleep(0)
            leaf()
            await asyncio.sleep(0)
        leaf()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        context: Any = contextvars.copy_context()

        async def giving() -> None:
            second = loop.create_task(work("second"), context=context)
            await work("first")
            await second

        if how == "it is that of the task that gives it":
            await loop.create_task(giving(), context=context)
            return
        first = loop.create_task(work("first"), context=context)
        if how == "it is a task's own":
            await asyncio.sleep(0)
        await asyncio.gather(first, loop.create_task(work("second"), context=context))

    asyncio.run(main())
    spans = sorted(spans_in(recorder), key=lambda span: span.start_ns)
    first, second = (next(span for span in spans if span.site.name == name) for name in ("first", "second"))
    leaves = [span for span in spans if span.site.name == "leaf"]
    # What the context's variables say: the second began while the first was the context's current span.
    assert (first.parent_id, second.parent_id) == (0, first.span_id)
    assert {leaf.parent_id for leaf in leaves} == {first.span_id, second.span_id, 0}
    assert len({first.task_id, second.task_id}) == 2
    tasks = dict(zip(map(id, ran_in), (leaf.task_id for leaf in leaves), strict=True))
    assert [leaf.task_id for leaf in leaves] == [tasks[id(task)] for task in ran_in]
    assert set(tasks.values()) == {first.task_id, second.task_id}
    for span in (first, second):
        inside = [one for one in leaves if one.parent_id == span.span_id and one.task_id == span.task_id]
        assert span.self_ns == span.total_ns - sum(one.total_ns for one in inside)
    assert recorder.count_unusual_events() == {"scope closed before a scope inside it": 1}
