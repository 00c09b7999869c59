"""Blocked event loops: who kept a loop from open requests, for how long, and what stays as it was without us."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import time
import traceback
import types
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import Context, ContextVar
from typing import Any

import pytest
import starlette  # noqa: F401 - requests are met where a framework of them is imported
from readback import spans_in

import instrument
from instrument import chrome
from instrument.instrumentors.requests import asgi_wsgi_apps, blocked
from instrument.instrumentors.requests.blocked import LoopPlaces, make_block_attributes
from instrument.instrumentors.requests.exchange import Exchanges
from instrument.profile.model import Capture, FunctionRule, Limits, Profile, RequestsRule
from instrument.recorder.recorder import RECORDER
from instrument.recording.spans import BLOCKED_AT, BLOCKED_BY, BLOCKED_LOOP, Origin, Site, Span, is_blocked_loop
from instrument.report.requests_view import requests
from instrument.report.section import format_summary
from instrument.report.self_times_view import ops
from instrument.report.view import Options, Recording
from instrument.trace.trace import Trace

BLOCK_NS = 20_000_000
LIMIT_NS = 5_000_000
UNTOUCHED = asyncio.events.Handle._run

PROFILE = Profile(
    requests=(RequestsRule(),),
    functions=(FunctionRule((f"{__name__}:crunch",)),),
    capture=Capture(sample=1.0),
    limits=Limits(blocked_ns=LIMIT_NS),
)


@pytest.fixture
def session() -> Iterator[None]:
    PLANTED.clear()
    instrument.start(PROFILE)
    yield
    instrument.stop()


PLANTED: list[tuple[int, int]] = []
"""On which threads and when a loop was blocked on purpose: a loaded machine may block it at other times."""


def plant() -> int:
    at_ns = RECORDER.now_ns()
    PLANTED.append((threading.get_native_id(), at_ns))
    return at_ns


def crunch() -> None:
    begun_ns = plant()
    while RECORDER.now_ns() - begun_ns < BLOCK_NS:
        pass


def rest() -> None:
    plant()
    time.sleep(BLOCK_NS / 1e9)


Handler = Callable[[], Awaitable[None]]


def app_of(handlers: dict[str, Handler]) -> Any:
    """An ASGI application that awaits the handler of a path and answers."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await handlers[scope["path"]]()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    return app


async def ask(app: Any, path: str) -> None:
    async def nothing(*_: Any) -> Any: ...

    scope = {
        "type": "http", "method": "GET", "path": path, "scheme": "http", "server": ("127.0.0.1", 80), "headers": [],
    }  # fmt: skip
    await app(scope, nothing, nothing)


def serve(*paths: str, **handlers: Handler) -> None:
    """Requests to these paths at once, on a loop of their own; the handlers by their names."""
    serve_by(asyncio.run, paths, handlers)


def serve_by(run: Callable[..., object], paths: Sequence[str], handlers: dict[str, Handler]) -> None:
    """Ask until the machine leaves what was planted alone.

    Who waits for a processor for longer than that, within the same callback, blocks the loop for most of the time, and
    is named with good reason.
    """
    app = asgi_wsgi_apps.AsgiApp(
        app_of({f"/{name}": handler for name, handler in handlers.items()}), Exchanges(RequestsRule())
    )
    planted = len(PLANTED)

    async def main() -> None:
        await asyncio.gather(*(ask(app, path) for path in paths))

    for _ in range(20):
        del PLANTED[planted:]
        run(main())
        if all(span.total_ns < 2 * BLOCK_NS for span in stretches()):
            break


def stretches() -> list[Span]:
    """Return the spans of the planted blocks."""
    found = [span for span in spans_in(RECORDER) if is_blocked_loop(span.site)]
    return [
        span
        for span in found
        if any(span.thread_id == thread_id and span.start_ns <= at_ns < span.end_ns for thread_id, at_ns in PLANTED)
    ]


async def wait() -> None:
    await asyncio.sleep(0.001)


def test_a_handler_that_blocks_the_loop_while_others_wait_is_named_with_its_time(session: None) -> None:
    async def sleepy() -> None:
        await asyncio.sleep(0)
        rest()
        await asyncio.sleep(0)

    serve("/wait", "/sleepy", "/wait", sleepy=instrument.profiled(sleepy), wait=wait)
    (stretch,) = stretches()
    assert stretch.attributes[BLOCKED_BY] == sleepy.__qualname__.rpartition(".")[2]
    assert stretch.total_ns >= BLOCK_NS
    assert stretch.parent_id == 0


def test_without_a_span_of_its_own_the_request_that_blocks_is_named(session: None) -> None:
    async def sleepy() -> None:
        rest()

    serve("/wait", "/sleepy", sleepy=sleepy, wait=wait)
    (stretch,) = stretches()
    assert stretch.attributes[BLOCKED_BY] == "GET"
    assert str(stretch.attributes["code.function.name"]).endswith("ask")
    assert stretch.attributes["code.file.path"] == __file__


def test_outside_of_every_span_the_function_is_named_and_never_its_arguments(session: None) -> None:
    def sleepy(argument: str) -> None:
        rest()

    async def call() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(functools.partial(sleepy, "secret"), context=Context())
        await asyncio.sleep(0.001)

    serve("/wait", "/call", call=call, wait=wait)
    (stretch,) = stretches()
    line = sleepy.__code__.co_firstlineno
    assert stretch.attributes[BLOCKED_BY] == f"{sleepy.__qualname__} (test_requests_blocked.py:{line})"
    assert "secret" not in str(dict(stretch.attributes))


def test_a_task_outside_of_every_span_is_named_by_its_coroutine(session: None) -> None:
    async def chore() -> None:
        rest()

    async def main() -> None:
        is_done = asyncio.Event()
        app = asgi_wsgi_apps.AsgiApp(app_of({"/wait": is_done.wait}), Exchanges(RequestsRule()))
        request = asyncio.create_task(ask(app, "/wait"))
        await asyncio.sleep(0)
        await asyncio.create_task(chore())
        is_done.set()
        await request

    for _ in range(20):
        PLANTED.clear()
        asyncio.run(main())
        (stretch,) = stretches()
        if stretch.total_ns < 2 * BLOCK_NS:  # as in `serve_by`
            break
    assert str(stretch.attributes[BLOCKED_BY]).startswith(f"{chore.__qualname__} (")


def test_a_function_of_a_rule_that_computes_is_named_by_its_span(session: None) -> None:
    async def compute() -> None:
        await asyncio.sleep(0)
        crunch()
        with instrument.scope("after"):
            await asyncio.sleep(0)

    serve("/wait", "/compute", compute=compute, wait=wait)
    assert [one.attributes[BLOCKED_BY] for one in stretches()] == ["crunch"]


def test_spans_that_began_late_in_a_blocked_callback_are_not_named(session: None) -> None:
    async def compute() -> None:
        rest()
        with instrument.scope("after"):
            await asyncio.sleep(0)

    serve("/compute", compute=compute)
    assert [one.attributes[BLOCKED_BY] for one in stretches()] == ["GET"]


def test_a_request_that_begins_and_ends_within_the_callback_counts(session: None) -> None:
    async def compute() -> None:
        crunch()

    serve("/compute", compute=compute)
    assert [one.attributes[BLOCKED_BY] for one in stretches()] == ["crunch"]


def test_nothing_is_recorded_while_no_request_is_open(session: None) -> None:
    async def main() -> None:
        crunch()
        await asyncio.sleep(0)
        crunch()

    asyncio.run(main())
    serve("/wait", wait=wait)
    asyncio.run(main())
    assert stretches() == []


def test_a_request_on_another_loop_does_not_count(session: None) -> None:
    async def main() -> None:
        crunch()

    async def handler() -> None:
        await asyncio.to_thread(asyncio.run, main())

    serve("/handler", handler=handler)
    assert stretches() == []


def test_limits_say_from_when_on_and_whether_it_is_recorded() -> None:
    async def compute() -> None:
        crunch()

    for limit_ns, expected in ((3600 * 10**9, 0), (LIMIT_NS, 1), (None, 0)):
        PLANTED.clear()
        limits = Limits(blocked_ns=limit_ns)
        instrument.start(Profile(requests=(RequestsRule(),), capture=Capture(sample=1.0), limits=limits))
        assert (asyncio.events.Handle._run is UNTOUCHED) == (limit_ns is None)
        serve("/compute", compute=compute)
        found = stretches()
        instrument.stop()
        assert len(found) == expected
        assert asyncio.events.Handle._run is UNTOUCHED


def test_without_requests_the_loop_is_left_alone() -> None:
    instrument.start(Profile(functions=PROFILE.functions))
    assert asyncio.events.Handle._run is UNTOUCHED
    instrument.stop()


def test_a_caller_that_kept_the_replaced_function_records_nothing_after_the_stop() -> None:
    instrument.start(PROFILE)
    taken = asyncio.events.Handle._run
    instrument.stop()
    calls: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        taken(asyncio.events.Handle(calls.append, (1,), loop))

    asyncio.run(main())
    assert calls == [1]


def behaviour() -> list[Any]:
    """Return the loop's reports of callbacks, tasks and errors."""
    seen: list[Any] = []

    def fail() -> None:
        raise ValueError("planted")

    async def failing() -> None:
        await asyncio.sleep(0)
        fail()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_debug(True)
        loop.slow_callback_duration = 10**6

        def note(_: Any, told: dict[str, Any]) -> None:
            error = told.get("exception")
            frames = [] if error is None else [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            seen.append((told["message"].partition(" at ")[0], repr(error), frames))

        loop.set_exception_handler(note)
        loop.call_soon(fail)
        loop.call_later(0, fail)
        handle = loop.call_soon(fail)
        handle.cancel()
        seen.append(handle.cancelled())
        try:
            await asyncio.create_task(failing())
        except ValueError as error:
            seen.append([frame.name for frame in traceback.extract_tb(error.__traceback__)])
        if sys.version_info >= (3, 12):
            loop.set_task_factory(asyncio.eager_task_factory)
            seen.append(await asyncio.create_task(asyncio.sleep(0, "eager")))
        await asyncio.sleep(0.01)

    asyncio.run(main())
    return seen


def test_callbacks_tasks_and_their_errors_are_as_without_us() -> None:
    expected = behaviour()
    instrument.start(PROFILE)
    try:
        assert behaviour() == expected
    finally:
        instrument.stop()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_exceptions_that_stop_a_loop_stop_it(session: None, error: type[BaseException]) -> None:
    def stop() -> None:
        raise error("planted")

    async def main() -> None:
        asyncio.get_running_loop().call_soon(stop)
        await asyncio.sleep(60)

    with pytest.raises(error, match="planted"):
        asyncio.run(main())


def test_a_stretch_is_in_files_views_and_the_summary_and_takes_no_time_from_others(
    session: None, tmp_path: Any
) -> None:
    async def compute() -> None:
        crunch()

    serve("/wait", "/compute", wait=wait, compute=compute)
    spans = spans_in(RECORDER)
    begun_ns, ended_ns = min(one.start_ns for one in spans), max(one.end_ns for one in spans)
    chrome.dump(tmp_path / "trace.json", Trace(Origin(7, "shop", 0, 0, "native"), begun_ns, ended_ns, spans))
    trace, _ = chrome.load(tmp_path / "trace.json")
    recording = Recording.from_trace(trace)
    found = requests(recording, Options()).blocked
    assert found is not None
    assert found.longest_ns >= BLOCK_NS
    assert "crunch" in {one.name for one in found.by}
    assert "  crunch" in format_summary(["requests"], recording, Options())
    (line,) = (one for one in format_summary(["brief"], recording, Options()).splitlines() if "Loop blocked" in one)
    assert "at most" in line
    names = {row.names[-1] for function in ops(recording, Options()).functions for row in function.rows}
    assert "crunch" in names
    assert "loop blocked" not in names


# -------------------------------------------------------------------- uvloop


@pytest.fixture
def uvloop(session: None) -> Any:
    return pytest.importorskip("uvloop")


def serve_on(loops: Any, *paths: str, **handlers: Handler) -> None:
    serve_by(loops.run, paths, handlers)


def test_a_request_that_blocks_a_loop_of_uvloop_is_named_with_its_time(uvloop: Any) -> None:
    async def sleepy() -> None:
        await asyncio.sleep(0)
        rest()
        await asyncio.sleep(0)

    serve_on(uvloop, "/wait", "/sleepy", "/wait", sleepy=instrument.profiled(sleepy), wait=wait)
    (stretch,) = stretches()
    assert stretch.attributes[BLOCKED_BY] == sleepy.__qualname__.rpartition(".")[2]
    assert stretch.total_ns >= BLOCK_NS
    assert stretch.parent_id == 0


@pytest.mark.parametrize("how", ["call_soon", "call_later", "call_at", "call_soon_threadsafe"])
def test_callbacks_of_uvloop_are_named_by_their_function(uvloop: Any, how: str) -> None:
    came = []

    def sleepy(argument: str) -> None:
        came.append(argument)
        rest()

    async def call() -> None:
        loop = asyncio.get_running_loop()
        before = {"call_later": (0.001,), "call_at": (loop.time() + 0.001,)}.get(how, ())
        getattr(loop, how)(*before, sleepy, "secret", context=Context())
        await asyncio.sleep(0.01)

    serve_on(uvloop, "/wait", "/call", call=call, wait=wait)
    (stretch,) = stretches()
    line = sleepy.__code__.co_firstlineno
    assert stretch.attributes[BLOCKED_BY] == f"{sleepy.__qualname__} (test_requests_blocked.py:{line})"
    assert set(came) == {"secret"}
    assert "secret" not in str(dict(stretch.attributes))


def test_callbacks_of_uvloop_keep_their_context_their_faults_and_their_handles(uvloop: Any) -> None:
    variable: ContextVar[int] = ContextVar("variable")
    seen: list[Any] = []

    def fails() -> None:
        seen.append(variable.get())
        raise KeyError("as asked")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, facts: seen.append((facts["message"], repr(facts["exception"]))))
        context = Context()
        context.run(variable.set, 7)
        loop.call_soon(fails, context=context)
        handle = loop.call_later(0.001, seen.append, "cancelled")
        handle.cancel()
        assert handle.cancelled()
        with pytest.raises(TypeError):
            loop.call_soon()
        await asyncio.sleep(0.01)

    uvloop.run(main())
    here = seen[1][0]
    assert seen == [7, (here, repr(KeyError("as asked")))]
    instrument.stop()
    seen.clear()
    uvloop.run(main())
    assert seen[1][0] == here, "without us the loop says the same"


def test_uvloop_is_as_it_was_after_the_end(uvloop: Any) -> None:
    assert "call_soon" in vars(uvloop.Loop)
    instrument.stop()
    assert not {"call_soon", "call_later", "call_soon_threadsafe"} & vars(uvloop.Loop).keys()


def test_a_uvloop_that_has_no_such_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", types.ModuleType("uvloop"))
    for limit_ns, count in ((LIMIT_NS, 1), (None, 0)):
        instrument.start(Profile(requests=(RequestsRule(),), limits=Limits(blocked_ns=limit_ns)))
        told = [note for note in instrument.session().notes() if "uvloop  has no place where it can be met" in note]
        instrument.stop()
        assert len(told) == count


# -------------------------------------------------------------------- where it was


def audit(places: LoopPlaces) -> None:
    while not places._seen:
        time.sleep(0.001)


def test_a_callback_that_runs_on_is_seen_where_it_is_in_the_services_own_code(recorder: Any) -> None:
    places = LoopPlaces(recorder, 1_000_000)
    assert (places.take_stack(0), places.is_on) == ((), True), "nobody has looked before the first slow one"
    begun_ns = recorder.now_ns()
    places.begun[threading.get_ident()] = begun_ns
    audit(places)
    innermost, above, *_ = places.take_stack(begun_ns)
    line = audit.__code__.co_firstlineno
    assert innermost in [f"test_requests_blocked.py:{line + more} audit" for more in (1, 2)]
    assert above.endswith(test_a_callback_that_runs_on_is_seen_where_it_is_in_the_services_own_code.__name__)
    assert places.take_stack(begun_ns) == ()
    places.begun[threading.get_ident()] = 0
    places.is_on = False
    assert places._thread is not None
    places._thread.join(60)
    assert not places._thread.is_alive()


def test_nobody_looks_any_more_once_nothing_has_been_slow_for_a_while(
    recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "REST_NS", 0)
    places = LoopPlaces(recorder, 1_000_000)
    places.take_stack(0)
    assert places._thread is not None
    places._thread.join(60)
    assert not places.is_on


def test_the_attributes_of_a_place_keep_as_much_of_its_stack_as_there_is_room_for() -> None:
    stack = ("app.py:44 audit", "app.py:60 handler", "x" * 300)
    assert make_block_attributes(stack, 256) == {
        BLOCKED_AT: "app.py:44 audit",
        "code.stacktrace": "app.py:44 audit\napp.py:60 handler",
    }
    assert make_block_attributes((), 256) == {}


def test_a_repeated_blocker_is_named_with_its_place(session: None) -> None:
    async def sleepy() -> None:
        rest()

    def found() -> list[Span]:
        return [span for span in stretches() if BLOCKED_AT in span.attributes]

    end = time.monotonic() + 240
    while not found() and time.monotonic() < end:
        serve("/wait", "/sleepy", sleepy=sleepy, wait=wait)
    place = f"test_requests_blocked.py:{rest.__code__.co_firstlineno + 2} rest"
    assert place in {span.attributes[BLOCKED_AT] for span in found()}


def test_reports_say_at_which_place_most_of_the_time_was_spent() -> None:
    request = Site("GET /x", "request")
    spans = [Span(request, 1, 0, 1, 1, 0, 0, 100_000_000, 100_000_000, 100_000_000)]
    for number, (by, at, took_ms) in enumerate([("GET /x", "app.py:9 b", 10), ("GET /x", "app.py:44 audit", 30)]):
        facts = {BLOCKED_BY: by, BLOCKED_AT: at}
        begun_ns, took_ns = 10_000_000 + number * 40_000_000, took_ms * 1_000_000
        times = begun_ns, begun_ns + took_ns, took_ns, took_ns
        spans.append(Span(BLOCKED_LOOP, number + 2, 0, number + 2, 1, 0, *times, attributes=facts))
    recording = Recording.from_trace(Trace(Origin(7, "shop", 0, 0, "native"), 0, 100_000_000, spans))
    text = " ".join(format_summary(["brief", "requests"], recording, Options()).split())
    assert "Loop blocked: 2 times" in text
    assert "mostly by GET /x, at app.py:44 audit" in text
    assert "Longest Mostly at" in text
