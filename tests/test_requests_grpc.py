"""`requests: auto` over gRPC: each call of a method is a span, for every server, kind and end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import server_programs
from readback import spans_in

if importlib.util.find_spec("grpc") is None:
    pytest.skip("could not find grpc", allow_module_level=True)

import grpc
import grpc._server
import grpc.aio
from otlp_receiver import read_until, receiver
from server_programs import requests_in

from instrument.instrumentors.requests import exchange
from instrument.instrumentors.requests.grpc import NOT_BEGUN
from instrument.instrumentors.requests.servers_and_routers import Requests
from instrument.profile.model import RequestsRule
from instrument.recording.spans import Site, Span
from instrument.runtime.faults import FAULTS

LIMIT_S = 60.0
STATUS = "rpc.status_code"
RULE = RequestsRule()


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def method(name: str) -> str:
    return f"/shop.Orders/{name}"


class Served:
    """A gRPC service in this process on a server of a kind, its requests recorded."""

    def __init__(self, recorder: Any, kind: str) -> None:
        self.recorder = recorder
        self.kind = kind
        self.functions: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self.rule = RULE
        self._stack = contextlib.ExitStack()

    def add(self, shape: str, name: str, behaviour: Any, **serializers: Any) -> None:
        self.functions[name] = getattr(grpc, f"{shape}_rpc_method_handler")(behaviour, **serializers)

    def start(self) -> grpc.Channel:
        requests = Requests([self.rule], self.recorder)
        for module in (grpc._server, grpc.aio._server):
            assert requests.may_match(module.__name__)
            requests.attach_to(module)
        self._stack.callback(requests.undo)
        self.requests = requests
        handler = grpc.method_handlers_generic_handler("shop.Orders", self.functions)
        if self.kind == "sync":
            server = grpc.server(self._stack.enter_context(ThreadPoolExecutor(4)), [handler], **self.options)
            self.port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            self._stack.callback(lambda: server.stop(None).wait())
        else:
            self._serve_async(handler)
        channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        self._stack.callback(channel.close)
        return channel

    def _serve_async(self, handler: Any) -> None:
        started, loop = threading.Event(), asyncio.new_event_loop()
        ended = asyncio.Event()

        async def serve() -> None:
            server = grpc.aio.server(
                self._stack.enter_context(ThreadPoolExecutor(4)), handlers=[handler], **self.options
            )
            self.port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            started.set()
            await ended.wait()
            await server.stop(None)

        def run() -> None:
            loop.run_until_complete(serve())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

        thread = threading.Thread(target=run)
        thread.start()
        assert started.wait(LIMIT_S)
        self._stack.callback(thread.join)
        self._stack.callback(loop.call_soon_threadsafe, ended.set)

    def spans(self, count: int) -> list[Span]:
        """Return the requests once there are enough and none is open: a caller has its answer before its span ends."""
        until(lambda: len(self.ended()) >= count)
        found = self.ended()
        assert len(found) == count
        return found

    def ended(self) -> list[Span]:
        """The requests so far; none while any is open."""
        if self.recorder.open_rows():
            return []
        return [span for span in spans_in(self.recorder) if span.site.kind == "request"]

    def stop(self) -> None:
        self._stack.close()


@pytest.fixture(params=["sync", "aio"])
def served(request: pytest.FixtureRequest, recorder: Any) -> Iterator[Served]:
    made = Served(recorder, request.param)
    yield made
    made.stop()
    assert not FAULTS.count_by_place()


def of_kind(kind: str, function: Any) -> Any:
    """A function of one request and the context as a handler for a server of a kind."""
    if kind == "sync":
        return function

    async def behaviour(request: Any, context: Any) -> Any:
        await asyncio.sleep(0)
        found = function(request, context)
        return await found if asyncio.iscoroutine(found) else found

    return behaviour


def code_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def test_a_call_is_a_request_named_by_its_method_with_its_status_and_address(served: Served) -> None:
    served.add("unary_unary", "Echo", of_kind(served.kind, lambda request, _: request + b"!"))
    channel = served.start()
    assert channel.unary_unary(method("Echo"))(b"one", timeout=LIMIT_S) == b"one!"
    (span,) = served.spans(1)
    assert (span.site.name, span.site.kind, span.error) == ("shop.Orders/Echo", "request", None)
    assert dict(span.site.attributes) == {"rpc.system.name": "grpc", "rpc.method": "shop.Orders/Echo"}
    address = {"server.address": "127.0.0.1", "server.port": served.port}
    assert dict(span.attributes) == {STATUS: "OK", **(address if served.kind == "sync" else {})}


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        ("INVALID_ARGUMENT", None),
        ("NOT_FOUND", None),
        ("RESOURCE_EXHAUSTED", None),
        ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
        ("INTERNAL", "INTERNAL"),
        ("UNAVAILABLE", "UNAVAILABLE"),
    ],
)
@pytest.mark.parametrize("way", ["abort", "set_code"])
def test_the_status_is_the_callers_and_an_error_where_it_counts_against_a_server(
    served: Served, raised: str, error: str | None, way: str
) -> None:
    def behaviour(request: bytes, context: Any) -> Any:
        code = grpc.StatusCode[raised]
        if way == "abort":
            return context.abort(code, "as asked")
        context.set_code(code)
        return b""

    served.add("unary_unary", "Refuse", of_kind(served.kind, behaviour))
    channel = served.start()
    assert code_of(lambda: channel.unary_unary(method("Refuse"))(b"", timeout=LIMIT_S)) == raised
    (span,) = served.spans(1)
    assert span.attributes[STATUS] == raised
    assert (span.error, "instrument.outcome" in span.attributes) == (error, False)


@pytest.mark.parametrize("shape", ["unary_unary", "unary_stream"])
def test_an_exception_is_the_error_of_its_request_whose_status_is_the_callers(served: Served, shape: str) -> None:
    def fail(request: bytes, context: Any) -> Any:
        raise ValueError("as asked")

    def fail_later(request: bytes, context: Any) -> Iterator[bytes]:
        yield b"one"
        raise ValueError("as asked")

    async def fail_later_async(request: bytes, context: Any) -> Any:
        yield b"one"
        raise ValueError("as asked")

    streamed = fail_later if served.kind == "sync" else fail_later_async
    served.add(shape, "Fail", of_kind(served.kind, fail) if shape == "unary_unary" else streamed)
    channel = served.start()
    call = getattr(channel, shape)(method("Fail"))
    found = code_of(lambda: list(call(b"", timeout=LIMIT_S)))
    (span,) = served.spans(1)
    assert (span.error, span.attributes[STATUS]) == ("ValueError", found) == ("ValueError", "UNKNOWN")


def test_an_exception_after_a_status_of_the_callers_is_no_error(served: Served) -> None:
    def behaviour(request: bytes, context: Any) -> bytes:
        context.set_code(grpc.StatusCode.NOT_FOUND)
        raise KeyError("no such order")

    served.add("unary_unary", "Find", of_kind(served.kind, behaviour))
    channel = served.start()
    assert code_of(lambda: channel.unary_unary(method("Find"))(b"", timeout=LIMIT_S)) == "NOT_FOUND"
    (span,) = served.spans(1)
    assert (span.error, span.attributes[STATUS]) == (None, "NOT_FOUND")


@pytest.mark.parametrize("way", ["generator", "written", "blocking"])
def test_a_stream_ends_with_its_last_message_and_reports_its_items(served: Served, way: str) -> None:
    if (served.kind, way) in (("sync", "written"), ("sync", "blocking")):
        pytest.skip("a way of asyncio's servers")
    pause_s = 0.02

    def generator(request: bytes, context: Any) -> Iterator[bytes]:
        for item in (b"a", b"b", b"c"):
            time.sleep(pause_s)
            yield item

    async def async_generator(request: bytes, context: Any) -> Any:
        for item in (b"a", b"b", b"c"):
            await asyncio.sleep(pause_s)
            yield item

    async def written(request: bytes, context: Any) -> None:
        for item in (b"a", b"b", b"c"):
            await asyncio.sleep(pause_s)
            await context.write(item)

    behaviour = {"written": written, "blocking": generator}.get(
        way, generator if served.kind == "sync" else async_generator
    )
    served.add("unary_stream", "Count", behaviour)
    channel = served.start()
    assert list(channel.unary_stream(method("Count"))(b"", timeout=LIMIT_S)) == [b"a", b"b", b"c"]
    (span,) = served.spans(1)
    told = span.attributes
    assert (told[STATUS], told["items"], span.error) == ("OK", 3, None)
    pause_ns = pause_s * 1e9 * 0.9  # sleeps may end a little early
    assert told["first_item_ns"] > pause_ns
    assert told["longest_gap_ns"] >= told["median_gap_ns"] > pause_ns
    assert span.end_ns - span.start_ns >= told["first_item_ns"] + told["longest_gap_ns"] + told["median_gap_ns"]
    if served.kind == "aio" and way != "blocking":
        assert span.total_ns - span.active_ns > 3 * pause_ns


def test_streams_of_requests_are_one_request_each(served: Served) -> None:
    def join(requests: Any, context: Any) -> bytes:
        return b"".join(requests)

    def talk(requests: Any, context: Any) -> Iterator[bytes]:
        for request in requests:
            yield request * 2

    async def async_join(requests: Any, context: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def async_talk(requests: Any, context: Any) -> Any:
        async for request in requests:
            yield request * 2

    is_sync = served.kind == "sync"
    served.add("stream_unary", "Join", join if is_sync else async_join)
    served.add("stream_stream", "Talk", talk if is_sync else async_talk)
    channel = served.start()
    assert channel.stream_unary(method("Join"))(iter((b"a", b"b")), timeout=LIMIT_S) == b"ab"
    assert list(channel.stream_stream(method("Talk"))(iter((b"a", b"b")), timeout=LIMIT_S)) == [b"aa", b"bb"]
    join_span, talk_span = sorted(served.spans(2), key=lambda span: span.site.name)
    assert "items" not in join_span.attributes
    assert talk_span.attributes["items"] == 2
    assert {span.attributes[STATUS] for span in (join_span, talk_span)} == {"OK"}


def test_methods_that_are_not_there_are_one_endpoint_however_many_are_asked_for(served: Served) -> None:
    channel = served.start()
    for number in range(20):
        call = channel.unary_unary(f"/nowhere.{number}/Method")
        assert code_of(lambda call=call: call(b"", timeout=LIMIT_S)) == "UNIMPLEMENTED"  # type: ignore[misc]
    spans = served.spans(20)
    assert {span.site.name for span in spans} == {"grpc"}
    assert {dict(span.site.attributes)["rpc.method"] for span in spans} == {"_OTHER"}
    assert {(span.error, span.attributes[STATUS]) for span in spans} == {("UNIMPLEMENTED", "UNIMPLEMENTED")}


def test_a_handler_of_every_name_has_no_more_endpoints_than_the_limit(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "ENDPOINT_LIMIT", 3)
    echo = of_kind(served.kind, lambda request, _: request)
    for number in range(6):
        served.add("unary_unary", f"Echo{number}", echo)
    channel = served.start()
    for number in range(6):
        channel.unary_unary(method(f"Echo{number}"))(b"", timeout=LIMIT_S)
    names = Counter(span.site.name for span in served.spans(6))
    assert names == {"shop.Orders/Echo0": 1, "shop.Orders/Echo1": 1, "shop.Orders/Echo2": 1, "grpc": 3}
    assert served.recorder.count_unusual_events()[exchange.BEYOND] == 3


def _whole_answer(stub: Any, limit_s: float) -> list[bytes]:
    return list(stub(b"", timeout=limit_s))


@pytest.mark.parametrize("shape", ["unary_unary", "unary_stream"])
@pytest.mark.parametrize("way", ["cancelled", "timed out"])
@pytest.mark.slow
def test_calls_that_are_cancelled_or_late_are_named(served: Served, shape: str, way: str) -> None:
    arrived, release = threading.Event(), threading.Event()

    def wait(request: bytes, context: Any) -> bytes:
        arrived.set()
        until(lambda: not context.is_active())
        return b""

    def wait_streaming(request: bytes, context: Any) -> Iterator[bytes]:
        yield b"one"
        arrived.set()
        until(lambda: not context.is_active())
        yield b"two"

    async def async_wait(request: bytes, context: Any) -> bytes:
        arrived.set()
        await asyncio.sleep(LIMIT_S)
        return b""

    async def async_wait_streaming(request: bytes, context: Any) -> Any:
        yield b"one"
        arrived.set()
        await asyncio.sleep(LIMIT_S)
        yield b"two"

    sync = {"unary_unary": wait, "unary_stream": wait_streaming}
    asynchronous = {"unary_unary": async_wait, "unary_stream": async_wait_streaming}
    served.add(shape, "Wait", (sync if served.kind == "sync" else asynchronous)[shape])
    channel = served.start()
    stub = getattr(channel, shape)(method("Wait"))
    if way == "cancelled":
        call = stub.future(b"") if shape == "unary_unary" else stub(b"")
        assert arrived.wait(LIMIT_S)
        call.cancel()
    else:
        for limit_s in (2, 10, 50):  # a busy server may not have met it by then
            assert code_of(partial(_whole_answer, stub, limit_s)) == "DEADLINE_EXCEEDED"
            if arrived.is_set():
                break
    until(lambda: bool(served.ended()))
    span = served.ended()[-1]
    assert span.attributes["instrument.outcome"] == way
    if way == "cancelled":
        assert (span.attributes[STATUS], span.error) == ("CANCELLED", None)
    else:
        assert (span.attributes[STATUS], span.error) == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")
    release.set()


def unreadable(message: bytes) -> bytes:
    raise UnicodeError("as asked")


def test_requests_that_cannot_be_read_and_answers_that_cannot_be_written_are_errors(served: Served) -> None:
    echo = of_kind(served.kind, lambda request, _: request)
    served.add("unary_unary", "Read", echo, request_deserializer=unreadable)
    served.add("unary_unary", "Write", echo, response_serializer=unreadable)
    channel = served.start()
    found = {name: code_of(lambda name=name: channel.unary_unary(method(name))(b"", timeout=LIMIT_S))  # type: ignore[misc]
             for name in ("Read", "Write")}  # fmt: skip
    assert {span.site.name.partition("/")[2]: (span.attributes[STATUS], span.error) for span in served.spans(2)} == {
        name: (code, "UnicodeError") for name, code in found.items()
    }


def test_calls_beyond_the_servers_limit_are_counted_not_recorded(served: Served) -> None:
    arrived, release = threading.Event(), threading.Event()

    def wait(request: bytes, context: Any) -> bytes:
        arrived.set()
        assert release.wait(LIMIT_S)
        return request

    async def async_wait(request: bytes, context: Any) -> bytes:
        arrived.set()
        while not release.is_set():
            await asyncio.sleep(0.005)
        return request

    served.add("unary_unary", "Wait", wait if served.kind == "sync" else async_wait)
    served.options = {"maximum_concurrent_rpcs": 1}
    channel = served.start()
    first = channel.unary_unary(method("Wait")).future(b"")
    assert arrived.wait(LIMIT_S)
    assert code_of(lambda: channel.unary_unary(method("Wait"))(b"", timeout=LIMIT_S)) == "RESOURCE_EXHAUSTED"
    release.set()
    first.result(LIMIT_S)
    served.spans(1)
    until(lambda: served.recorder.count_unusual_events().get(NOT_BEGUN) == 1)


def test_the_interceptors_of_the_service_come_after_ours(served: Served) -> None:
    order: list[str] = []

    class Sync(grpc.ServerInterceptor):  # type: ignore[misc]
        def intercept_service(self, continuation: Any, details: Any) -> Any:
            order.append(details.method)
            if details.method.endswith("Barred"):
                raise PermissionError("as asked")
            return continuation(details)

    class Async(grpc.aio.ServerInterceptor):  # type: ignore[misc]
        async def intercept_service(self, continuation: Any, details: Any) -> Any:
            order.append(details.method)
            if details.method.endswith("Barred"):
                raise PermissionError("as asked")
            return await continuation(details)

    served.options = {"interceptors": (Sync() if served.kind == "sync" else Async(),)}
    served.add("unary_unary", "Echo", of_kind(served.kind, lambda request, _: request))
    channel = served.start()
    assert channel.unary_unary(method("Echo"))(b"", timeout=LIMIT_S) == b""
    if served.kind == "sync":  # asyncio's servers leave the caller of a broken interceptor waiting
        assert code_of(lambda: channel.unary_unary(method("Barred"))(b"", timeout=LIMIT_S)) == "UNKNOWN"
        assert {(span.site.name, span.error) for span in served.spans(2)} == {
            ("shop.Orders/Echo", None),
            ("grpc", "PermissionError"),
        }
    served.spans(len(order))


def test_the_request_contains_exactly_the_handlers_work(served: Served, recorder: Any) -> None:
    site = Site("work", "phase")

    def work(request: bytes, context: Any) -> bytes:
        recorder.close(recorder.open(site))
        return request

    served.add("unary_unary", "Work", of_kind(served.kind, work))
    channel = served.start()
    for _ in range(12):
        channel.unary_unary(method("Work"))(b"", timeout=LIMIT_S)
    requests = {span.span_id: span for span in served.spans(12)}
    parts = [span for span in spans_in(recorder) if span.site.name == "work"]
    assert Counter(span.parent_id for span in parts) == dict.fromkeys(requests, 1)
    assert {span.parent_id for span in requests.values()} == {0}


def test_blocking_handlers_on_asyncio_are_recorded_with_the_status_they_set(recorder: Any) -> None:
    served = Served(recorder, "aio")
    served.add("unary_unary", "Echo", lambda request, context: request)
    served.add("unary_unary", "Refuse", lambda request, context: context.abort(grpc.StatusCode.NOT_FOUND, ""))
    served.add("unary_unary", "Set", lambda request, context: context.set_code(grpc.StatusCode.INTERNAL) or b"")
    channel = served.start()
    try:
        found = {name: code_of(lambda name=name: channel.unary_unary(method(name))(b"", timeout=LIMIT_S))  # type: ignore[misc]
                 for name in ("Echo", "Refuse", "Set")}  # fmt: skip
        told = {span.site.name.partition("/")[2]: (span.attributes[STATUS], span.error) for span in served.spans(3)}
    finally:
        served.stop()
    assert found == {"Echo": "OK", "Refuse": "NOT_FOUND", "Set": "INTERNAL"}
    assert told == {"Echo": ("OK", None), "Refuse": ("NOT_FOUND", None), "Set": ("INTERNAL", "INTERNAL")}


def test_only_what_the_rule_names_of_the_caller_is_recorded(served: Served) -> None:
    served.rule = RequestsRule(
        attributes=("http.request.header.x-tenant", "client.address"), ignore=("/shop.Orders/H*",)
    )
    served.add("unary_unary", "Echo", of_kind(served.kind, lambda request, _: request))
    served.add("unary_unary", "Health", of_kind(served.kind, lambda request, _: request))
    channel = served.start()
    secret = (("x-tenant", "blue"), ("authorization", "Bearer canary"), ("x-data-bin", b"canary"))
    for name in ("Health", "Echo"):
        channel.unary_unary(method(name))(b"canary", timeout=LIMIT_S, metadata=secret)
    (span,) = served.spans(1)
    assert span.attributes["http.request.header.x-tenant"] == ("blue",)
    assert "client.address" not in span.attributes
    assert "canary" not in repr(span)


def test_while_nothing_is_recorded_no_call_is(served: Served, recorder: Any) -> None:
    served.add("unary_unary", "Echo", of_kind(served.kind, lambda request, _: request))
    echo = served.start().unary_unary(method("Echo"))
    recorder.on = False
    echo(b"", timeout=LIMIT_S)
    recorder.on = True
    echo(b"", timeout=LIMIT_S)
    served.spans(1)


@pytest.mark.parametrize("name", ["Echo", "Count", "Nothing"])
def test_faults_of_ours_are_counted_and_callers_have_their_answers(
    served: Served, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a fault of ours")

    def count(_: bytes, __: Any) -> Iterator[bytes]:
        yield from (b"1", b"2")

    async def counted(_: bytes, __: Any) -> Any:
        yield b"1"
        yield b"2"

    served.add("unary_unary", "Echo", of_kind(served.kind, lambda request, _: request))
    served.add("unary_stream", "Count", count if served.kind == "sync" else counted)
    channel = served.start()
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr(type(served.recorder), "open_request", broken, raising=False)
    if name == "Count":
        assert list(channel.unary_stream(method(name))(b"", timeout=LIMIT_S)) == [b"1", b"2"]
    else:
        status = code_of(lambda: channel.unary_unary(method(name))(b"", timeout=LIMIT_S))
        assert status == ("OK" if name == "Echo" else "UNIMPLEMENTED")
    assert list(FAULTS.count_by_place().values()) == [1]
    FAULTS.clear()


def test_a_server_passes_its_calls_through_once_the_rule_is_gone(served: Served) -> None:
    served.add("unary_unary", "Echo", of_kind(served.kind, lambda request, _: request))
    channel = served.start()
    echo = channel.unary_unary(method("Echo"))
    echo(b"", timeout=LIMIT_S)
    served.requests.change_rules([], [grpc._server, grpc.aio._server])
    echo(b"", timeout=LIMIT_S)
    served.requests.change_rules([RULE], [grpc._server, grpc.aio._server])
    echo(b"", timeout=LIMIT_S)
    served.spans(2)


ASKED = {
    "Echo": ("unary_unary", "OK"),
    "Fail": ("unary_unary", "UNKNOWN"),
    "Refuse": ("unary_unary", "NOT_FOUND"),
    "Count": ("unary_stream", "OK"),
    "Join": ("stream_unary", "OK"),
    "Talk": ("stream_stream", "OK"),
    "Nothing": ("unary_unary", "UNIMPLEMENTED"),
}
PROFILE = """
service: served
requests: auto
functions: [{match: "work:*"}]
export:
  chrome: {path: "traces/{service}-{pid}-{window}.json"}
  summary: {to: "summary.txt", views: [requests]}
  otlp:
"""


def is_ready(port: int) -> bool:
    """Return True if the server at a port takes calls."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, contextlib.suppress(grpc.FutureTimeoutError):
        grpc.channel_ready_future(channel).result(10)
        return True
    return False


@contextlib.contextmanager
def serving(kind: str, folder: Path, endpoint: str | None) -> Iterator[int]:
    """The service of `served/grpc_app.py` in its own process, under `instrument run` where an endpoint is given."""
    (folder / "profile.yaml").write_text(PROFILE)
    command, environ = ["grpc_app.py", "{port}", kind], {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint or ""}
    with server_programs.serving(command, folder, environ, ours=endpoint is not None, is_ready=is_ready) as found:
        port, program = found
        yield port
    assert program.code == 0, program.output


def ask_all(port: int, count: int) -> tuple[list[tuple[str, Any]], set[int]]:
    """Call `count` methods, each with a trace of its own. Return the status and answer of each, and the traces."""
    answers, traces = [], set()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for number in range(count):
            name = list(ASKED)[number % len(ASKED)]
            shape, _ = ASKED[name]
            trace_id = (number + 1) << 64 | 0x5EED
            traces.add(trace_id)
            metadata = (("traceparent", f"00-{trace_id:032x}-{number + 1:016x}-01"),)
            given = iter((b"a", b"b")) if shape.startswith("stream") else b"some"
            answer: Any = None
            try:
                answer = getattr(channel, shape)(method(name))(given, timeout=LIMIT_S, metadata=metadata)
                answer = list(answer) if shape.endswith("stream") else answer
                status = "OK"
            except grpc.RpcError as error:
                status = error.code().name
            answers.append((name, status, answer))
    return answers, traces


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sync", "aio"])
def test_each_of_60_calls_is_in_tally_trace_file_and_collector_in_the_trace_of_its_caller(
    kind: str, tmp_path: Path
) -> None:
    with serving(kind, tmp_path, None) as port:
        expected, _ = ask_all(port, 60)
    with receiver() as collector:
        with serving(kind, tmp_path, f"http://127.0.0.1:{collector.http_port}") as port:
            answers, traces = ask_all(port, 60)
        spans = requests_in(tmp_path)
        received = read_until(
            lambda: [span for span in collector.spans() if span.kind == "SERVER"], lambda its: len(its) == len(spans)
        )
    assert answers == expected
    assert {(name, status) for name, status, _ in answers} == {(name, status) for name, (_, status) in ASKED.items()}
    wanted = Counter(("grpc" if name == "Nothing" else f"shop.Orders/{name}", status) for name, status, _ in answers)
    assert Counter((span.site.name, span.attributes[STATUS]) for span in spans) == wanted
    assert {span.remote.trace_id for span in spans if span.remote} == traces
    assert {span.site.name for span in spans if span.error} == {"shop.Orders/Fail", "grpc"}
    assert Counter(span.name for span in received) == Counter(span.site.name for span in spans)
    summary = (tmp_path / "summary.txt").read_text()
    for (name, _), count in wanted.items():
        assert any(name in line and str(count) in line.split() for line in summary.splitlines()), summary
