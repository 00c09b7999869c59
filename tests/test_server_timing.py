"""Timings in answers: their parts are those of the ledger, at real servers, and the body stays as it was."""

from __future__ import annotations

import asyncio
import http.client
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from readback import columns_in

import instrument
from instrument import scope
from instrument.instrumentors.requests import server_timing
from instrument.profile import keys
from instrument.profile.model import Capture, Profile, RequestsRule
from instrument.recorder.recorder import RECORDER
from instrument.recording.memory_layout import REQUEST_BIT, ROOT_ID
from instrument.recording.spans import BATCH_KEYS, BATCH_WEIGHTS, Site
from instrument.runtime.faults import FAULTS
from instrument.trace.joined import join_requests
from instrument.trace.ledger import compute_ledger
from instrument.trace.stages import find_stages

EVENTS = b"data: a\n\ndata: b\n\n"
STEP = Site("step", "step", attributes=(("gen_ai", True),))
Ask = Callable[..., tuple[dict[str, str], bytes]]


class Engine:
    """An engine with a thread of its own: three steps for each request, the first one the heaviest."""

    def __init__(self) -> None:
        self._submitted: queue.Queue[tuple[str, threading.Event] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while (submitted := self._submitted.get()) is not None:
            for weight in (9, 1, 1):
                with RECORDER.new_span(STEP) as span:
                    span.annotate({BATCH_KEYS: [submitted[0], "another"], BATCH_WEIGHTS: [weight, 1]})
            submitted[1].set()

    def serve(self, key: str) -> None:
        is_done = threading.Event()
        instrument.annotate_request({"gen_ai.request.model": "tiny"})
        with scope("tokenise", kind="phase"):
            pass
        with scope("submit", kind="phase"):
            instrument.bind(key)
            self._submitted.put((key, is_done))
        assert is_done.wait(60)

    def close(self) -> None:
        self._submitted.put(None)
        self._thread.join()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


@contextmanager
def session(server_timing: str = "true") -> Iterator[None]:
    rule = RequestsRule(server_timing=server_timing)
    instrument.start(Profile(requests=(rule,), capture=Capture(sample=1.0)))
    try:
        yield
    finally:
        instrument.stop()
    assert FAULTS.count_by_place() == {}


def durations(text: str) -> dict[str, int]:
    return {name: round(float(number) * 1e6) for name, number in re.findall(r"([\w.-]+);dur=([\d.]+)", text)}


def are_of_ledger(text: str, *, is_end: bool = True) -> None:
    """Compare the timings of the newest answer with the ledger of what was recorded in the end."""
    while any(row[ROOT_ID] & REQUEST_BIT for _, row in RECORDER.open_rows()):
        time.sleep(0.001)  # a client has an answer before the server has ended it
    times = durations(text)
    trace = columns_in(RECORDER)
    joined = join_requests(trace)
    place = len(joined.rows) - 1
    parts = {
        re.sub(r"\W+", "-", name).strip("-"): time_ns
        for name, time_ns in compute_ledger(trace, joined).times_of_request(place).items()
    }
    total_ns, unknown_ns = times.pop("total"), times.pop("unknown", 0)
    stage = {name: times.pop(name) for name in ("prefill", "decode") if name in times}
    assert total_ns == sum(times.values()) + unknown_ns <= int(trace.total_ns[joined.rows[place]])
    if is_end:
        (its,) = (its for its in find_stages(trace, joined) if its.place == place)
        expected = {name: end - begin for name, begin, end in its.list_named_intervals()}
        assert stage == {name: expected[name] for name in ("prefill", "decode")}
        assert unknown_ns <= parts.pop("unknown")
        assert times == parts
        assert {"tokenise", "submit", "queue", "share-of-batches", "waiting-in-batches"} <= set(times)
    (trace_id,) = set(re.findall(r'traceparent;desc="00-(\w{32})-\w{16}-01"', text))
    assert trace_id == f"{1:032x}", "the trace of the caller"


CALLER = {"traceparent": f"00-{1:032x}-{2:016x}-01"}


def ask(port: int, path: str, headers: dict[str, str] = CALLER) -> tuple[list[str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.msg.get_all("server-timing") or [], body


def asgi_app(engine: Engine) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/events":
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for part in (EVENTS[:9], EVENTS[9:]):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.to_thread(engine.serve, "of events")
            await send({"type": "http.response.body", "body": b""})
            return
        await asyncio.to_thread(engine.serve, "of asgi")
        headers = [(b"server-timing", b"db;dur=1"), (b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"it"})

    return app


def wsgi_app(engine: Engine) -> Any:
    def app(environ: Any, start_response: Any) -> Any:
        if environ["PATH_INFO"] == "/events":
            start_response("200 OK", [("Content-Type", "text/event-stream")])
            return parts()
        engine.serve("of wsgi")
        start_response("200 OK", [("Server-Timing", "db;dur=1"), ("Content-Length", "2")])
        return [b"it"]

    def parts() -> Iterator[bytes]:
        yield EVENTS
        engine.serve("of events of wsgi")

    return app


@contextmanager
def on_uvicorn(engine: Engine) -> Iterator[int]:
    uvicorn = pytest.importorskip("uvicorn")
    config = uvicorn.Config(asgi_app(engine), port=0, log_level="error", lifespan="off", http="h11")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def on_waitress(engine: Engine) -> Iterator[int]:
    waitress = pytest.importorskip("waitress")
    server = waitress.create_server(wsgi_app(engine), port=0, host="127.0.0.1", threads=2)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.effective_port
    finally:
        server.task_dispatcher.shutdown()
        server.trigger.pull_trigger(server.close)
        thread.join()


@contextmanager
def in_loop(start: Callable[[asyncio.Event], Any]) -> Iterator[int]:
    """A server in a thread with an event loop. `start` gets the event that ends it, and yields its port."""
    ports: queue.Queue[int] = queue.Queue()
    loop, ends = asyncio.new_event_loop(), asyncio.Event()

    async def run() -> None:
        async for port in start(ends):
            ports.put(port)

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        yield ports.get(timeout=240)
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join()
        loop.close()


def on_aiohttp(engine: Engine) -> Any:
    web = pytest.importorskip("aiohttp.web")

    async def whole(request: Any) -> Any:
        await asyncio.to_thread(engine.serve, "of aiohttp")
        return web.Response(text="it", headers={"Server-Timing": "db;dur=1"})

    async def events(request: Any) -> Any:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENTS)
        await asyncio.to_thread(engine.serve, "of events of aiohttp")
        return response

    async def start(ends: asyncio.Event) -> Any:
        app = web.Application()
        app.add_routes([web.get("/whole", whole), web.get("/events", events)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield runner.addresses[0][1]
        await ends.wait()
        await runner.cleanup()

    return in_loop(start)


@pytest.mark.parametrize("serve", [on_uvicorn, on_waitress, on_aiohttp])
def test_the_header_and_the_last_event_have_the_parts_of_the_ledger(serve: Any, engine: Engine) -> None:
    with session(), serve(engine) as port:
        (own, added), body = ask(port, "/whole")
        assert (own, body) == ("db;dur=1", b"it")
        are_of_ledger(added)
        (begin,), body = ask(port, "/events")
        are_of_ledger(begin, is_end=False)
        events, comment = body[: len(EVENTS)], body[len(EVENTS) :].decode()
        assert events == EVENTS
        assert re.fullmatch(r": server-timing [^\n]+\n\n", comment)
        are_of_ledger(comment)


def test_only_requests_with_the_header_have_timings(engine: Engine) -> None:
    with session("header X-Timing"), on_uvicorn(engine) as port:
        assert ask(port, "/whole") == (["db;dur=1"], b"it")
        assert ask(port, "/events") == ([], EVENTS)
        (_, added), _ = ask(port, "/whole", {**CALLER, "x-timing": "1"})
        are_of_ledger(added)
    with session(""), on_uvicorn(engine) as port:
        assert ask(port, "/whole", {"x-timing": "1"}) == (["db;dur=1"], b"it")


def test_other_streams_keep_their_bodies(engine: Engine) -> None:
    answers = {
        "/text": ([(b"content-type", b"text/plain")], b"it\n\n"),
        "/zipped": ([(b"content-type", b"text/event-stream"), (b"content-encoding", b"gzip")], b"zip\n\n"),
        "/long": ([(b"content-type", b"text/event-stream"), (b"content-length", b"9")], b"data: a\n\n"),
        "/cut": ([(b"content-type", b"text/event-stream")], b"data: a"),
    }

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers, body = answers[scope["path"]]
        await send({"type": "http.response.start", "status": 200, "headers": iter(headers)})
        await send({"type": "http.response.body", "body": body})

    from instrument.instrumentors.requests import asgi_wsgi_apps
    from instrument.instrumentors.requests.exchange import Exchanges

    async def bodies(path: str) -> tuple[bytes, list[bytes]]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": path, "headers": []}
        served = asgi_wsgi_apps.AsgiApp(app, Exchanges(RequestsRule(server_timing="true")))
        await served(scope, None, send)  # type: ignore[arg-type]
        return b"".join(part.get("body", b"") for part in sent), [name for name, _ in sent[0]["headers"]]

    with session():
        for path, (headers, body) in answers.items():
            names = [name for name, _ in headers]
            assert asyncio.run(bodies(path)) == (body, [*names, b"server-timing"])


def test_a_stream_over_http_2_has_its_timings_in_a_trailer(engine: Engine) -> None:
    hypercorn = pytest.importorskip("hypercorn.asyncio")
    connections = pytest.importorskip("h2.connection")
    events = pytest.importorskip("h2.events")
    from hypercorn.config import Config

    async def start(ends: asyncio.Event) -> Any:
        listener = socket.create_server(("127.0.0.1", 0))
        config = Config()
        config.bind, config.loglevel = [f"fd://{listener.fileno()}"], "CRITICAL"
        task = asyncio.ensure_future(hypercorn.serve(asgi_app(engine), config, shutdown_trigger=ends.wait))
        yield listener.getsockname()[1]
        await task
        listener.detach()  # the server has closed it

    def ask_h2(port: int, **headers: str) -> tuple[dict[bytes, bytes], bytes, dict[bytes, bytes]]:
        connection = connections.H2Connection()
        connection.initiate_connection()
        pairs = {":method": "GET", ":path": "/events", ":scheme": "http", ":authority": "it", **CALLER, **headers}
        connection.send_headers(1, list(pairs.items()), end_stream=True)
        heads: dict[Any, dict[bytes, bytes]] = {events.ResponseReceived: {}, events.TrailersReceived: {}}
        body, is_open = b"", True
        with socket.create_connection(("127.0.0.1", port)) as wire:
            wire.settimeout(60)
            while is_open:
                wire.sendall(connection.data_to_send())
                for event in connection.receive_data(wire.recv(65536)):
                    if type(event) in heads:
                        encoded = ([x if isinstance(x, bytes) else x.encode() for x in pair] for pair in event.headers)
                        heads[type(event)] = dict(encoded)  # type: ignore[arg-type]
                    elif isinstance(event, events.DataReceived):
                        body += event.data
                    is_open = is_open and not isinstance(event, events.StreamEnded)
        return heads[events.ResponseReceived], body, heads[events.TrailersReceived]

    with session(), in_loop(start) as port:
        headers, body, trailers = ask_h2(port, te="trailers")
        assert body == EVENTS
        assert headers[b"trailer"] == b"server-timing"
        are_of_ledger(headers[b"server-timing"].decode(), is_end=False)
        are_of_ledger(trailers[b"server-timing"].decode())
        _, body, trailers = ask_h2(port)
        assert trailers == {}
        assert body.startswith(EVENTS + b": server-timing ")


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_a_call_of_grpc_has_its_timings_in_the_metadata_after_its_answer(kind: str, engine: Engine) -> None:
    grpc = pytest.importorskip("grpc")

    def unary(request: bytes, context: Any) -> bytes:
        engine.serve("of grpc")
        context.set_trailing_metadata((("own", "1"),))
        return b"it"

    def stream(request: bytes, context: Any) -> Iterator[bytes]:
        yield b"a"
        engine.serve("of a stream")
        yield b"b"

    def refuse(request: bytes, context: Any) -> bytes:
        engine.serve("of an error")
        raise ValueError("no")

    async def unary_async(request: bytes, context: Any) -> bytes:
        return await asyncio.to_thread(unary, request, context)

    async def stream_async(request: bytes, context: Any) -> Any:
        yield b"a"
        await asyncio.to_thread(engine.serve, "of a stream")
        yield b"b"

    async def refuse_async(request: bytes, context: Any) -> bytes:
        return await asyncio.to_thread(refuse, request, context)

    is_async = kind == "asyncio"
    handler = grpc.method_handlers_generic_handler("it", {
        "unary": grpc.unary_unary_rpc_method_handler(unary_async if is_async else unary),
        "stream": grpc.unary_stream_rpc_method_handler(stream_async if is_async else stream),
        "refuse": grpc.unary_unary_rpc_method_handler(refuse_async if is_async else refuse),
    })  # fmt: skip

    async def start(ends: asyncio.Event) -> Any:
        server = grpc.aio.server() if is_async else grpc.server(ThreadPoolExecutor(2))
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        started = server.start()
        if is_async:
            await started
        yield port
        await ends.wait()
        stopped = server.stop(None)
        if is_async:
            await stopped
        else:
            stopped.wait()

    with session(), in_loop(start) as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        metadata = tuple(CALLER.items())
        _, call = channel.unary_unary("/it/unary").with_call(b"", metadata=metadata)
        trailing = dict(call.trailing_metadata())
        assert trailing["own"] == "1"
        are_of_ledger(trailing["server-timing"])
        parts = channel.unary_stream("/it/stream")(b"", metadata=metadata)
        assert list(parts) == [b"a", b"b"]
        are_of_ledger(dict(parts.trailing_metadata())["server-timing"])
        with pytest.raises(grpc.RpcError) as raised:
            channel.unary_unary("/it/refuse")(b"", metadata=metadata)
        are_of_ledger(dict(raised.value.trailing_metadata())["server-timing"])  # type: ignore[attr-defined]


@pytest.mark.parametrize(("text", "value"), [("true", "true"), ("off", ""), ("header X-Timing", "header X-Timing")])
def test_a_profile_asks_for_timings(text: str, value: str) -> None:
    (rule,) = keys.loads(f"requests: {{server_timing: {text}}}").requests
    assert rule.server_timing == value


def test_the_answer_to_a_request_among_very_many_spans_has_its_total_alone_and_is_counted() -> None:
    with session():
        frame = RECORDER.open(Site("GET /", "request"), {})
        try:
            for _ in range(server_timing.MOST_ROWS + 1):
                with instrument.scope("work"):
                    pass
            method = SimpleNamespace(recorder=RECORDER)
            exchange = SimpleNamespace(frame=frame, method=method, stream=None)
            text = server_timing.AnswerTimings(RECORDER).make_header_value(exchange)
        finally:
            RECORDER.close(frame)
        assert list(durations(text)) == ["total"]
        assert RECORDER.count_unusual_events()[server_timing.WITHOUT_PARTS] == 1
