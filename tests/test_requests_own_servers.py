"""Servers with an interface of their own, in this process: each request is a span with what became of it.

Each service of the table has the same handlers. It is asked without a session and with one: its answers are the same,
and the requests that were sent are those that were recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib
import itertools
import socket
import threading
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from readback import spans_in

import instrument
from instrument.profile.model import Capture, Profile, RequestsRule
from instrument.recorder.recorder import RECORDER
from instrument.recording.spans import Span
from instrument.runtime.faults import FAULTS

LIMIT_S = 60
Service = Callable[[], contextlib.AbstractContextManager[int]]


class Left:
    """An event that a handler sets once its client has gone."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def set(self) -> None:
        self.event.set()

    def wait(self) -> None:
        assert self.event.wait(LIMIT_S)
        self.event.clear()


LEFT = Left()
NUMBERS = itertools.count()


@contextlib.contextmanager
def in_loop(serve: Callable[[], contextlib.AbstractAsyncContextManager[int]]) -> Iterator[int]:
    """Run a service in an event loop of another thread, and yield its port."""
    loop, ports, stop = asyncio.new_event_loop(), [], asyncio.Event()
    started = threading.Event()

    async def main() -> None:
        try:
            async with serve() as port:
                ports.append(port)
                started.set()
                await stop.wait()
            handlers = asyncio.all_tasks() - {asyncio.current_task()}
            if handlers:
                await asyncio.wait(handlers, timeout=LIMIT_S)
        finally:
            started.set()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    try:
        assert started.wait(LIMIT_S)
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def tornado_service() -> contextlib.AbstractContextManager[int]:
    web, websocket = importlib.import_module("tornado.web"), importlib.import_module("tornado.websocket")
    testing = importlib.import_module("tornado.testing")

    class Item(web.RequestHandler):  # type: ignore[misc, name-defined]
        async def get(self, name: str) -> None:
            await asyncio.sleep(0)
            self.write({"item": name})

    class Echo(web.RequestHandler):  # type: ignore[misc, name-defined]
        def post(self) -> None:
            self.write(self.request.body)

    class Fail(web.RequestHandler):  # type: ignore[misc, name-defined]
        def get(self) -> None:
            raise ValueError("as asked")

    class FailLate(web.RequestHandler):  # type: ignore[misc, name-defined]
        async def get(self) -> None:
            self.write("x")
            await self.flush()
            raise ValueError("as asked")

    class Refuse(web.RequestHandler):  # type: ignore[misc, name-defined]
        def get(self) -> None:
            raise web.HTTPError(403)

    class Stream(web.RequestHandler):  # type: ignore[misc, name-defined]
        async def get(self) -> None:
            self.set_header("Content-Type", "text/event-stream")
            for part in ("a", "b", "c"):
                self.write(f"data: {part}\n\n")
                await self.flush()

    class Endless(web.RequestHandler):  # type: ignore[misc, name-defined]
        async def get(self) -> None:
            try:
                while True:
                    self.write("x" * 100_000)
                    await self.flush()
            finally:
                LEFT.set()

    class Talk(websocket.WebSocketHandler):  # type: ignore[misc, name-defined]
        async def on_message(self, message: str) -> None:
            if message == "fail":
                raise ValueError("as asked")
            await self.write_message(message)

    @contextlib.asynccontextmanager
    async def serve() -> AsyncIterator[int]:
        routes = [
            (r"/items/([^/]+)", Item),
            (r"/echo", Echo),
            (r"/fail", Fail),
            (r"/fail_late", FailLate),
            (r"/refuse", Refuse),
            (r"/stream", Stream),
            (r"/endless", Endless),
            (r"/talk/(?P<room>\w+)", type("Talk", (Talk,), {"open": lambda self, room: None})),
        ]
        listener, port = testing.bind_unused_port()
        server = importlib.import_module("tornado.httpserver").HTTPServer(web.Application(routes))
        server.add_sockets([listener])
        yield port
        server.stop()
        await server.close_all_connections()

    return in_loop(serve)


def sanic_service() -> contextlib.AbstractContextManager[int]:
    sanic, response = importlib.import_module("sanic"), importlib.import_module("sanic.response")
    number = next(NUMBERS)
    app = sanic.Sanic(f"app_{number}", configure_logging=False)
    app.config.TOUCHUP = number == 1  # once in a process, where a session records
    app.config.FALLBACK_ERROR_FORMAT = "text"

    @app.get("/items/<name>")  # type: ignore[untyped-decorator]
    async def item(request: Any, name: str) -> Any:
        return response.json({"item": name})

    @app.post("/echo")  # type: ignore[untyped-decorator]
    async def echo(request: Any) -> Any:
        return response.raw(request.body)

    @app.get("/fail")  # type: ignore[untyped-decorator]
    async def fail(request: Any) -> Any:
        raise ValueError("as asked")

    @app.get("/fail_late")  # type: ignore[untyped-decorator]
    async def fail_late(request: Any) -> Any:
        answer = await request.respond()
        await answer.send("x")
        raise ValueError("as asked")

    @app.get("/refuse")  # type: ignore[untyped-decorator]
    async def refuse(request: Any) -> Any:
        raise sanic.exceptions.Forbidden("no")

    @app.get("/stream")  # type: ignore[untyped-decorator]
    async def stream(request: Any) -> Any:
        answer = await request.respond(content_type="text/event-stream")
        for part in ("a", "b", "c"):
            await answer.send(f"data: {part}\n\n")
        await answer.eof()

    @app.get("/endless")  # type: ignore[untyped-decorator]
    async def endless(request: Any) -> Any:
        answer = await request.respond()
        try:
            while True:
                await answer.send("x" * 100_000)
                await asyncio.sleep(0)
        finally:
            LEFT.set()

    @app.websocket("/talk/<room>")  # type: ignore[untyped-decorator]
    async def talk(request: Any, socket: Any, room: str) -> None:
        async for message in socket:
            if message == "fail":
                raise ValueError("as asked")
            await socket.send(message)

    @contextlib.asynccontextmanager
    async def serve() -> AsyncIterator[int]:
        listener = socket.create_server(("127.0.0.1", 0))
        server = await app.create_server(sock=listener, return_asyncio_server=True)
        await server.startup()
        await server.before_start()
        await server.after_start()
        yield listener.getsockname()[1]
        server.close()
        for connection in server.connections.copy():
            connection.close_if_idle()

    return in_loop(serve)


async def talk(socket: Any) -> None:
    async for message in socket:
        if message == "fail":
            raise ValueError("as asked")
        await socket.send(message)


def talk_by_thread(socket: Any) -> None:
    for message in socket:
        if message == "fail":
            raise ValueError("as asked")
        socket.send(message)


def websockets_service(refuse: Any = None) -> contextlib.AbstractContextManager[int]:
    server = importlib.import_module("websockets.asyncio.server")

    @contextlib.asynccontextmanager
    async def serve() -> AsyncIterator[int]:
        # Services often give a handler more arguments by a lambda, which is no coroutine function.
        async with server.serve(lambda socket: talk(socket), "127.0.0.1", 0, process_request=refuse) as serving:
            yield serving.sockets[0].getsockname()[1]

    return in_loop(serve)


def routed_websockets_service() -> contextlib.AbstractContextManager[int]:
    router = pytest.importorskip("websockets.asyncio.router")
    routing = pytest.importorskip("werkzeug.routing")
    rules = routing.Map([routing.Rule("/talk/<name>", endpoint=lambda socket, name: talk(socket))])

    @contextlib.asynccontextmanager
    async def serve() -> AsyncIterator[int]:
        async with router.route(rules, "127.0.0.1", 0) as serving:
            yield serving.sockets[0].getsockname()[1]

    return in_loop(serve)


@contextlib.contextmanager
def threaded_websockets_service(refuse: Any = None) -> Iterator[int]:
    server = importlib.import_module("websockets.sync.server")
    with server.serve(handler=talk_by_thread, host="127.0.0.1", port=0, process_request=refuse) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield serving.socket.getsockname()[1]
        serving.shutdown()
        thread.join()


@contextlib.contextmanager
def older_websockets_service() -> Iterator[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        server = importlib.import_module("websockets.legacy.server")

        @contextlib.asynccontextmanager
        async def serve() -> AsyncIterator[int]:
            async with server.serve(talk, "127.0.0.1", 0) as serving:
                yield serving.sockets[0].getsockname()[1]

        with in_loop(serve) as port:
            yield port


def on_uvicorn(app: Any) -> contextlib.AbstractContextManager[int]:
    uvicorn = importlib.import_module("uvicorn")

    @contextlib.asynccontextmanager
    async def serve() -> AsyncIterator[int]:
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
        server.capture_signals = contextlib.nullcontext
        serving = asyncio.create_task(server.serve([listener]))
        yield listener.getsockname()[1]
        server.should_exit = True
        await serving

    return in_loop(serve)


def litestar_service() -> contextlib.AbstractContextManager[int]:
    litestar = importlib.import_module("litestar")

    async def talk(socket: Any) -> None:
        await socket.accept()
        async for message in socket.iter_data():
            if message == "fail":
                raise ValueError("as asked")
            await socket.send_text(message)

    talk.__annotations__["socket"] = litestar.WebSocket
    return on_uvicorn(litestar.Litestar([litestar.websocket("/talk/{room:str}")(talk)]))


def blacksheep_service() -> contextlib.AbstractContextManager[int]:
    blacksheep = importlib.import_module("blacksheep")
    app = blacksheep.Application(router=blacksheep.Router())

    async def talk(socket: Any) -> None:
        await socket.accept()
        while (message := await socket.receive_text()) != "fail":
            await socket.send_text(message)
        raise ValueError("as asked")

    talk.__annotations__["socket"] = blacksheep.WebSocket
    app.router.add_ws("/talk/{room}", talk)
    return on_uvicorn(app)


def quart_service() -> contextlib.AbstractContextManager[int]:
    quart = importlib.import_module("quart")
    app = quart.Quart("shop")

    @app.websocket("/talk/<room>")  # type: ignore[untyped-decorator]
    async def talk(room: str) -> None:
        while (message := await quart.websocket.receive()) != "fail":
            await quart.websocket.send(message)
        raise ValueError("as asked")

    return on_uvicorn(app)


class Handler(BaseHTTPRequestHandler):
    """A handler of `http.server`, whose exceptions its server reports without an answer."""

    protocol_version = "HTTP/1.1"

    def answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def begin(self, content_type: str) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Connection", "close")
        self.end_headers()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/items/"):
            self.answer(path.removeprefix("/items/").encode())
        elif path == "/stream":
            self.begin("text/event-stream")
            for part in ("a", "b", "c"):
                self.wfile.write(f"data: {part}\n\n".encode())
        elif path == "/fail":
            raise ValueError("as asked")
        elif path == "/fail_late":
            self.begin("text/plain")
            self.wfile.write(b"x")
            raise ValueError("as asked")
        elif path == "/endless":
            self.begin("text/plain")
            try:
                while True:
                    self.wfile.write(b"x" * 100_000)
            finally:
                LEFT.set()
        elif path == "/refuse":
            self.answer(b"no", 403)
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        self.answer(self.rfile.read(int(self.headers["Content-Length"])))

    def log_message(self, *_: object) -> None: ...


class HttpServer(ThreadingHTTPServer):
    daemon_threads = False

    def handle_error(self, *_: object) -> None: ...


@contextlib.contextmanager
def http_service() -> Iterator[int]:
    with HttpServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield server.server_address[1]
        server.shutdown()
        serving.join()


SERVICES: dict[str, Service] = {"tornado": tornado_service, "sanic": sanic_service, "http.server": http_service}
ROUTES = {
    "tornado": {"items": "/items/([^/]+)", "talk": r"/talk/(?P<room>\w+)"},
    "sanic": {"items": "/items/<name:str>", "talk": "/talk/<room:str>"},
    "litestar": {"talk": "/talk/{room:str}"},
    "quart": {"talk": "/talk/<room>"},
    "blacksheep": {"talk": "/talk/{room}"},
    "websockets.asyncio.router": {"talk": "/talk/<name>"},
    "http.server": {},
}
TALKING: dict[str, Service] = {
    "tornado": tornado_service,
    "sanic": sanic_service,
    "websockets.asyncio": websockets_service,
    "websockets.asyncio.router": routed_websockets_service,
    "websockets.sync": threaded_websockets_service,
    "websockets.legacy": older_websockets_service,
    "litestar": litestar_service,
    "quart": quart_service,
    "blacksheep": blacksheep_service,
}


@pytest.fixture(params=SERVICES)
def name(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return str(request.param)


@contextlib.contextmanager
def recorded(**options: Any) -> Iterator[None]:
    """Record with a rule that names attributes, and find no fault of ours."""
    attributes = ("url.query", "client.address", "user_agent.original", "http.request.header.x-tenant")
    rule = RequestsRule(ignore=("/health",), attributes=attributes, **options)
    instrument.start(Profile(requests=(rule,), capture=Capture(sample=1.0)))
    try:
        yield
    finally:
        instrument.stop()
    assert FAULTS.count_by_place() == {}


class Slotted:
    __slots__ = ("close", "closed", "flush", "write")

    def __init__(self, file: Any) -> None:
        self.write, self.flush, self.close, self.closed = file.write, file.flush, file.close, False


class SlottedHandler(BaseHTTPRequestHandler):
    def setup(self) -> None:
        super().setup()
        self.wfile: Any = Slotted(self.wfile)

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ok")


def test_a_handler_of_http_server_may_write_to_a_file_without_attributes() -> None:
    with recorded(), ThreadingHTTPServer(("127.0.0.1", 0), SlottedHandler) as server:
        threading.Thread(target=server.handle_request).start()
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=LIMIT_S)
        connection.request("GET", "/")
        assert connection.getresponse().read() == b"ok"
        connection.close()


def requests() -> list[Span]:
    return [span for span in spans_in(RECORDER) if span.site.kind == "request"]


def route_of(span: Span) -> str:
    return str(dict(span.site.attributes).get("http.route", ""))


def ask_all(port: int) -> list[tuple[int, bytes]]:
    """Ask each path twice over one connection, and each time in a trace of its own."""
    answers = []
    asks = [("GET", "/items/a1?b=c"), ("POST", "/echo"), ("GET", "/fail"), ("GET", "/refuse"), ("GET", "/nowhere")]
    for number, (method, path) in enumerate([*asks, ("GET", "/stream")] * 2, 1):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        with contextlib.closing(connection):
            headers = {"traceparent": f"00-{number:032x}-{number:016x}-01", "User-Agent": "us", "X-Tenant": "t"}
            connection.request(method, path, b"some text" if method == "POST" else None, headers)
            try:
                answer = connection.getresponse()
                answers.append((answer.status, answer.read()))
            except http.client.RemoteDisconnected:
                answers.append((0, b""))
    return answers


def leave(port: int, path: str) -> None:
    """Read the first bytes of an answer, and go away."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert client.recv(1000)
    LEFT.wait()


def test_requests_of_a_server_with_an_interface_of_its_own_are_recorded(name: str) -> None:
    with SERVICES[name]() as port:
        expected = ask_all(port)
    with recorded():
        with SERVICES[name]() as port:
            assert ask_all(port) == expected
        spans = requests()
    paths = [ROUTES[name].get("items"), "/echo", "/fail", "/refuse", "", "/stream"]
    wanted = [(path if paths[0] else "", code) for path, (code, _) in zip(paths * 2, expected, strict=True)]
    status = "http.response.status_code"
    assert Counter((route_of(span), span.attributes.get(status, 0)) for span in spans) == Counter(wanted)
    assert Counter(span.error for span in spans) == {None: 10, "ValueError": 2}
    assert {span.remote.trace_id for span in spans if span.remote} == set(range(1, 13))
    streams = [span for span in spans if "items" in span.attributes]
    assert [(span.attributes["items"], span.attributes[status]) for span in streams] == [(3, 200)] * 2
    assert all(0 < span.attributes["first_item_ns"] <= span.attributes["last_item_ns"] for span in streams)
    (first, *_) = spans
    facts = {**dict(first.site.attributes), **first.attributes}
    assert (facts["url.query"], facts["user_agent.original"], facts["client.address"]) == ("b=c", "us", "127.0.0.1")
    assert (facts["server.address"], facts["server.port"], facts["url.scheme"]) == ("127.0.0.1", port, "http")
    assert facts["http.request.header.x-tenant"] == ("t",)
    echoes = [span for span in spans if dict(span.site.attributes)["http.request.method"] == "POST"]
    assert {span.attributes["http.response.body.size"] for span in echoes} == {9}
    assert {span.attributes["http.request.body.size"] for span in echoes} == {9}


def test_such_a_server_sends_the_timings_of_a_request_that_asks(name: str) -> None:
    with recorded(server_timing="true"), SERVICES[name]() as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        with contextlib.closing(connection):
            connection.request("GET", "/items/a1")
            answer = connection.getresponse()
            answer.read()
    assert "total;dur=" in answer.headers["Server-Timing"]


def test_a_client_that_leaves_such_a_server_is_no_error_and_a_late_failure_is_one(name: str) -> None:
    with recorded(), SERVICES[name]() as port:
        leave(port, "/endless")
        with contextlib.suppress(http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
            connection.request("GET", "/fail_late")
            connection.getresponse().read()
        connection.close()
    left, late = sorted(requests(), key=lambda span: span.start_ns)
    assert (left.error, left.attributes["instrument.outcome"]) == (None, "client gone")
    assert (late.error, late.attributes["http.response.status_code"]) == ("ValueError", 200)


@pytest.mark.parametrize("name", TALKING)
def test_a_websocket_of_such_a_server_is_one_request(name: str) -> None:
    pytest.importorskip(name.partition(".")[0])
    client = pytest.importorskip("websockets.sync.client")
    with recorded():
        with TALKING[name]() as port:
            with client.connect(f"ws://127.0.0.1:{port}/talk/a") as talk:
                for text in ("one", "two"):
                    talk.send(text)
                    assert talk.recv() == text
                talk.close(1001)
            with client.connect(f"ws://127.0.0.1:{port}/talk/a") as talk:
                talk.send("fail")
                with pytest.raises(Exception, match=r"close frame|internal error|1000|4500"):
                    talk.recv()
            with client.connect(f"ws://127.0.0.1:{port}/talk/b") as talk:
                talk.send("one")
                assert talk.recv() == "one"
                talk.socket.shutdown(socket.SHUT_RDWR)  # a network that breaks
        spans = sorted(requests(), key=lambda span: span.start_ns)
    assert {route_of(span) for span in spans} == {ROUTES.get(name, {}).get("talk", "")}
    assert {dict(span.site.attributes)["network.protocol.name"] for span in spans} == {"websocket"}
    assert {span.attributes["http.response.status_code"] for span in spans} == {101}
    ended, failed, left = spans
    assert (ended.error, ended.attributes["items"], ended.attributes["websocket.close_code"]) == (None, 2, 1001)
    assert failed.error == (None if name == "blacksheep" else "ValueError")  # it logs the exception and closes
    assert (left.error, left.attributes["items"]) == (None, 1)
    if name not in ("litestar", "quart", "blacksheep"):  # to whose apps uvicorn passes a lost connection as a close
        assert left.attributes["instrument.outcome"] == "client gone"


@pytest.mark.parametrize("service", [websockets_service, threaded_websockets_service])
def test_a_handshake_that_websockets_refuses_is_a_request_with_its_status(service: Any) -> None:
    pytest.importorskip("websockets")

    def refuse(connection: Any, request: Any) -> Any:
        if request.path == "/fail":
            raise ValueError("as asked")
        return connection.respond(403, "no")

    with recorded():
        with service(refuse) as port:
            for path in ("/", "/fail"):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
                with contextlib.closing(connection):
                    connection.request("GET", path)
                    assert connection.getresponse().status == (500 if path == "/fail" else 403)
        spans = requests()  # in any order: each thread records its refusal when it has answered
    status = "http.response.status_code"
    found = sorted((int(str(span.attributes[status])), span.error) for span in spans)
    assert found == [(403, None), (500, "ValueError")]


class RawCodec:
    """A codec of grpclib whose messages are bytes."""

    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: Any) -> bytes:
        return message

    decode = encode


def grpclib_service() -> contextlib.AbstractContextManager[int]:
    const, server = importlib.import_module("grpclib.const"), importlib.import_module("grpclib.server")
    exceptions = importlib.import_module("grpclib.exceptions")

    async def echo(stream: Any) -> None:
        await stream.send_message(await stream.recv_message())

    async def fail(stream: Any) -> None:
        raise ValueError("as asked")

    async def refuse(stream: Any) -> None:
        raise exceptions.GRPCError(const.Status.NOT_FOUND, "as asked")

    async def count(stream: Any) -> None:
        for item in (b"a", b"b", b"c"):
            await stream.send_message(item)

    async def wait(stream: Any) -> None:
        try:
            await stream.send_message(b"a")
            await asyncio.Event().wait()
        finally:
            LEFT.set()

    kinds = const.Cardinality

    class Shop:
        def __mapping__(self) -> dict[str, Any]:
            unary = {"Echo": echo, "Fail": fail, "Refuse": refuse}
            handlers = {name: (function, kinds.UNARY_UNARY) for name, function in unary.items()}
            handlers |= {"Count": (count, kinds.UNARY_STREAM), "Wait": (wait, kinds.UNARY_STREAM)}
            return {f"/shop.Shop/{name}": const.Handler(*parts, None, None) for name, parts in handlers.items()}

    @contextlib.asynccontextmanager
    async def serve() -> AsyncIterator[int]:
        listener = socket.create_server(("127.0.0.1", 0))
        serving = server.Server([Shop()], codec=RawCodec())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            await serving.start(sock=listener)
        yield listener.getsockname()[1]
        serving.close()
        await serving.wait_closed()

    return in_loop(serve)


def call_all(port: int, grpc: Any) -> list[Any]:
    """Call each method in a trace of its own, leave two streams, and return the answers or statuses."""
    answers: list[Any] = []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for number, name in enumerate(("Echo", "Fail", "Refuse", "Invented", "Count"), 1):
            headers = (("traceparent", f"00-{number:032x}-{number:016x}-01"),)
            try:
                if name == "Count":
                    answers.append(list(channel.unary_stream(f"/shop.Shop/{name}")(b"x", metadata=headers)))
                else:
                    answers.append(channel.unary_unary(f"/shop.Shop/{name}")(b"x", metadata=headers))
            except grpc.RpcError as error:
                answers.append(error.code().name)
        left = channel.unary_stream("/shop.Shop/Wait")(b"x")
        assert next(left) == b"a"
        left.cancel()
        LEFT.wait()
        for limit_s in (0.2, 2, 10, 50):  # a busy server may not have met it by then
            left = channel.unary_stream("/shop.Shop/Wait")(b"x", timeout=limit_s)
            items: list[bytes] = []
            with pytest.raises(grpc.RpcError):
                items.extend(left)
            if items:
                break
        LEFT.wait()
    return answers


def test_calls_of_grpclib_are_recorded_as_those_of_grpcio() -> None:
    pytest.importorskip("grpclib")
    grpc = pytest.importorskip("grpc")
    with grpclib_service() as port:
        expected = call_all(port, grpc)
    with recorded():
        with grpclib_service() as port:
            assert call_all(port, grpc) == expected
        spans = sorted(requests(), key=lambda span: span.start_ns)
    status, outcome = "rpc.status_code", "instrument.outcome"
    spans = [*spans[:6], spans[-1]]  # the server may have met calls that were timed out before it answered
    facts = [(span.site.name, span.attributes.get(status), span.error, span.attributes.get("items")) for span in spans]
    assert facts == [
        ("shop.Shop/Echo", "OK", None, None),
        ("shop.Shop/Fail", "UNKNOWN", "ValueError", None),
        ("shop.Shop/Refuse", "NOT_FOUND", None, None),
        ("grpc", "UNIMPLEMENTED", "UNIMPLEMENTED", None),
        ("shop.Shop/Count", "OK", None, 3),
        ("shop.Shop/Wait", "CANCELLED", None, 1),
        ("shop.Shop/Wait", "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", 1),
    ]
    assert [span.attributes.get(outcome) for span in spans[-2:]] == ["cancelled", "timed out"]
    assert {span.remote.trace_id for span in spans if span.remote} == {1, 2, 3, 4, 5}
    assert {span.attributes["server.port"] for span in spans} == {port}
