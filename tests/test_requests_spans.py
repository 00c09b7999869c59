"""The span of a request has the same facts of server and app for each adapter, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from readback import spans_in
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute

import instrument
from instrument import chrome
from instrument.instrumentors.requests import asgi_wsgi_apps
from instrument.instrumentors.requests.exchange import ADDRESSES_KNOWN, CURRENT, Exchanges
from instrument.profile.model import Capture, Profile, RequestsRule
from instrument.recorder.recorder import RECORDER
from instrument.recorder.wrapping import STATUS
from instrument.recording.spans import Span, is_late_failure
from instrument.recording.trace_context import RemoteParent
from instrument.report.view import make_json_values

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
REMOTE = RemoteParent(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, 1)
ADDRESS = {"url.scheme": "http", "server.address": "127.0.0.1", "server.port": 80}


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    instrument.start(Profile(requests=(RequestsRule(),), capture=Capture(sample=1.0)))
    yield
    instrument.stop()


def told(span: Span) -> dict[str, Any]:
    """All that a span says, its site's part, too."""
    return dict(span.site.attributes) | dict(span.attributes)


def requests() -> list[Span]:
    return sorted((one for one in spans_in(RECORDER) if one.site.kind == "request"), key=lambda one: one.start_ns)


# -------------------------------------------------------------------- ASGI

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def answering(*messages: dict[str, Any]) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    return app


def ask(app: Any, headers: Sequence[tuple[bytes, bytes]] = (), rule: RequestsRule | None = None, **scope: Any) -> None:
    """One request to an ASGI app that is served."""
    serve = asgi_wsgi_apps.AsgiApp(app, Exchanges(rule or RequestsRule()))

    async def receive() -> dict[str, Any]:
        if not is_websocket:
            await asyncio.Event().wait()  # no client goes away
        return {"type": "websocket.disconnect", "code": 1001}

    async def send(_: Any) -> None: ...

    is_websocket = scope.get("type") == "websocket"
    asked = {"type": "http", "method": "GET", "path": "/", "scheme": "http", "server": ("127.0.0.1", 80)}
    asyncio.run(serve({**asked, "headers": headers, **scope}, receive, send))


def test_a_request_reports_its_method_address_status_and_sizes_and_its_callers_span() -> None:
    headers = [(b"traceparent", CALLER.encode()), (b"content-length", b"7"), (b"cookie", b"secret")]
    ask(answering(START, part(b"{}")), headers, method="POST")
    (span,) = requests()
    assert (span.site.name, span.error, span.remote) == ("POST", None, REMOTE)
    assert told(span) == {
        "http.request.method": "POST",
        **ADDRESS,
        "http.request.body.size": 7,
        "http.response.status_code": 200,
        "http.response.body.size": 2,
    }


@pytest.mark.parametrize("length", [b"-1", b"1_0", b"\xb2", b"", b"9" * 20, b" 7"])
def test_a_length_that_is_no_number_is_none(length: bytes) -> None:
    ask(answering(START, part(b"{}")), [(b"content-length", length)])
    serve_wsgi(wsgi_app([b"{}"]), CONTENT_LENGTH=length.decode("latin-1"))
    assert ["http.request.body.size" in told(span) for span in requests()] == [False, False]


def test_facts_that_the_server_lacks_are_left_out() -> None:
    ask(answering(START, part(b"")), server=None)
    ask(answering(START, part(b"")), server=("/run/app.sock", None), scheme="https")
    first, second = requests()
    both = {"http.request.method": "GET", "http.response.status_code": 200}
    assert told(first) == {**both, "url.scheme": "http"}
    assert told(second) == {**both, "url.scheme": "https", "server.address": "/run/app.sock"}


def test_items_of_a_stream_are_parts_or_events() -> None:
    parts = (part(b"a\n\nb\n\n", True), part(b"c", True), part(b""))
    events = START | {"headers": [(b"x", b"y"), (b"content-type", b"text/event-stream; charset=utf-8")]}
    ask(answering(START, *parts))
    ask(answering(events, *parts))
    ask(answering(START, part(b"a")))
    found = [told(span) for span in requests()]
    assert [one.get("items") for one in found] == [2, 3, None]
    assert all(0 <= one["first_item_ns"] <= one["last_item_ns"] for one in found[:2])
    assert [one["http.response.body.size"] for one in found] == [7, 7, 1]


def test_an_answer_in_a_single_part_is_a_stream_where_it_is_of_events_alone() -> None:
    """Middleware hands answers on as parts, also such as are whole."""
    events = START | {"headers": [(b"content-type", b"text/event-stream")]}
    for start in (START, events):
        ask(answering(start, part(b"data: x\n\n", True), part(b"")))
    assert [told(span).get("items") for span in requests()] == [None, 1]


def test_an_app_that_fails_before_its_answer_has_status_500_and_its_error() -> None:
    async def failing(*_: Any) -> None:
        raise ValueError

    with pytest.raises(ValueError):
        ask(failing)
    ask(answering(START | {"status": 503}, part(b"")))
    assert [(span.error, told(span)["http.response.status_code"]) for span in requests()] == [
        ("ValueError", 500),
        ("503", 503),
    ]


def test_an_error_that_middleware_answers_before_it_raises_it_is_the_requests_own() -> None:
    async def failing(request: Any) -> Any:
        raise ValueError

    async def explain(request: Any, error: Exception) -> JSONResponse:
        return JSONResponse({}, HTTPStatus.BAD_GATEWAY)

    for handlers in ({}, {Exception: explain}):
        with pytest.raises(ValueError):
            ask(Starlette(routes=[Route("/", failing)], exception_handlers=handlers))
    found = [(span.error, told(span)["http.response.status_code"]) for span in requests()]
    assert found == [("ValueError", 500), ("ValueError", 502)]
    assert late_failures() == []


def test_a_status_may_be_a_member_of_an_enumeration_and_so_may_other_attributes() -> None:
    class Code(str, Enum):
        BIG = "big"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        CURRENT.get().facts.update(code=Code.BIG, close_code=HTTPStatus.OK, ratio=type("Ratio", (float,), {})(0.5))  # type: ignore[union-attr]
        await answering(START | {"status": HTTPStatus.BAD_GATEWAY}, part(b""))(scope, receive, send)

    ask(app)
    ((span,),) = (requests(),)
    facts = told(span)
    assert span.error == "502"
    assert facts["http.response.status_code"] == 502
    assert (facts["code"], facts["close_code"], facts["ratio"]) == ("big", 200, 0.5)


@pytest.mark.parametrize("length", [b"5", None])
def test_an_answer_that_is_a_file_ends_with_it_and_says_its_size(tmp_path: Path, length: bytes | None) -> None:
    """The server sends the file, past the app: as its path, or as its descriptor in parts."""
    file = tmp_path / "blob"
    file.write_bytes(b"12345")
    headers = [] if length is None else [(b"content-length", length)]
    ask(answering(START | {"headers": headers}, {"type": "http.response.pathsend", "path": str(file)}))
    with file.open("rb") as opened:
        parts = [{"type": "http.response.zerocopysend", "file": opened, "count": 2, "more_body": True}]
        parts += [{"type": "http.response.zerocopysend", "file": opened, "count": 3}]
        ask(answering(START | {"headers": headers}, *parts))
    told_of = [(told(span)["http.response.body.size"], told(span).get("instrument.outcome")) for span in requests()]
    assert told_of == [(5, None), (5, None)]


def late_failures() -> list[dict[str, Any]]:
    return [dict(span.attributes) | {"error": span.error} for span in spans_in(RECORDER) if is_late_failure(span.site)]


def test_an_app_that_fails_after_its_answer_is_recorded_as_such() -> None:
    """Starlette's middleware has ended the answer before the stream's error comes out of the app."""

    async def failing(request: Any) -> Any:
        async def parts() -> Any:
            yield "a"
            raise ValueError

        return StreamingResponse(parts())

    async def passed_on(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    app = Starlette(routes=[Route("/fails/{name}", failing)])
    app.add_middleware(BaseHTTPMiddleware, dispatch=passed_on)
    scope = {"path": "/fails/x", "raw_path": b"/fails/x", "query_string": b"", "root_path": ""}
    with pytest.raises(ValueError):
        ask(app, **scope)
    ((span,), (late,)) = requests(), late_failures()
    assert (span.site.name, span.error) == ("GET /fails/{name}", None)
    assert (late["error"], late["http.route"]) == ("ValueError", "/fails/{name}")
    assert "1 failed after its answer" in instrument.summary()
    session = instrument.session()
    assert session is not None
    facts = make_json_values(session.views(["requests"])["requests"])
    assert facts["late_failures"] == 1
    assert "failed after" not in str(facts)


def test_a_task_after_the_answer_that_is_cancelled_has_not_failed() -> None:
    async def cancelled(scope: Any, receive: Any, send: Any) -> None:
        await answering(START, part(b"{}"))(scope, receive, send)
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        ask(cancelled)
    assert late_failures() == []


def test_an_answer_that_never_ends_was_broken_off() -> None:
    ask(answering(START, part(b"a", True)))
    (span,) = requests()
    assert told(span)["instrument.outcome"] == "client gone"


def test_a_client_that_leaves_within_its_upload_is_no_error_of_the_service() -> None:
    """Starlette answers 500 to nobody, and raises its `ClientDisconnect` again."""

    async def upload(request: Any) -> Any:
        return JSONResponse(len(await request.body()))

    messages = [{"type": "http.request", "body": b"a", "more_body": True}, {"type": "http.disconnect"}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("status"))

    app = asgi_wsgi_apps.AsgiApp(
        Starlette(routes=[Route("/upload", upload, methods=["POST"])]), Exchanges(RequestsRule())
    )
    scope = {"type": "http", "method": "POST", "path": "/upload", "raw_path": b"/upload", "query_string": b""}
    with pytest.raises(ClientDisconnect):
        asyncio.run(app({**scope, "root_path": "", "headers": []}, receive, send))  # type: ignore[arg-type]
    (span,) = requests()
    assert sent == [500, None]
    assert (span.error, told(span)["instrument.outcome"], told(span).get(STATUS)) == (None, "client gone", None)


def test_a_stream_whose_server_reports_a_disconnect_within_the_last_send_was_served() -> None:
    """Hypercorn does so under trio. Starlette then cancels the send, though the client has the whole answer."""

    async def stream(request: Any) -> Any:
        async def parts() -> Any:
            yield "a"
            yield "b"

        return StreamingResponse(parts())

    sent: list[bytes] = []

    async def serve() -> None:
        is_over = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await is_over.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message.get("body", b""))
            if message["type"] == "http.response.body" and not message["more_body"]:
                is_over.set()
                await asyncio.Event().wait()

        app = asgi_wsgi_apps.AsgiApp(Starlette(routes=[Route("/stream", stream)]), Exchanges(RequestsRule()))
        scope = {"type": "http", "method": "GET", "path": "/stream", "raw_path": b"/stream", "query_string": b""}
        await app({**scope, "root_path": "", "headers": [], "asgi": {"spec_version": "2.1"}}, receive, send)

    asyncio.run(serve())
    (span,) = requests()
    assert sent == [b"", b"a", b"b", b""]
    assert (span.error, told(span).get("instrument.outcome"), told(span)[STATUS]) == (None, None, 200)


def test_named_parts_of_a_request_are_recorded_and_ignored_requests_are_not() -> None:
    rule = RequestsRule(
        ignore=("/up", "/static/*"), attributes=("url.path", "url.query", "http.request.header.x-tenant")
    )
    for path in ("/up", "/static/a.css", "/upper"):
        headers = [(b"x-tenant", b"shop"), (b"traceparent", CALLER.encode())]
        ask(answering(START, part(b"")), headers, rule, path=path, query_string=b"a=1")
    (span,) = requests()
    named = {"url.path": "/upper", "url.query": "a=1", "http.request.header.x-tenant": ("shop",)}
    assert {name: value for name, value in told(span).items() if name in named} == named
    assert span.remote == REMOTE


def test_an_app_within_an_app_is_one_request() -> None:
    async def outer(scope: Any, receive: Any, send: Any) -> None:
        await asgi_wsgi_apps.AsgiApp(answering(START, part(b"")), Exchanges(RequestsRule()))(scope, receive, send)

    ask(outer)
    assert len(requests()) == 1


def test_a_route_is_named_within_its_mount_and_the_address_stays() -> None:
    async def routed(scope: Any, receive: Any, send: Any) -> None:
        exchange = CURRENT.get()
        assert exchange is not None
        exchange.add_route_prefix("/api/")
        exchange.set_route("/items/{id}")
        await answering(START, part(b""))(scope, receive, send)

    ask(routed)
    (span,) = requests()
    assert (span.site.name, told(span)) == (
        "GET /api/items/{id}",
        {
            "http.request.method": "GET",
            "http.route": "/api/items/{id}",
            **ADDRESS,
            "http.response.status_code": 200,
        },
    )


def starlette_echo() -> tuple[Any, Any]:
    async def echo(websocket: Any) -> None:
        await websocket.accept()
        while True:
            await websocket.send_text(await websocket.receive_text())

    return Starlette(routes=[WebSocketRoute("/echo/{room}", echo)]), "/echo/{room}"


def litestar_echo() -> tuple[Any, Any]:
    litestar = pytest.importorskip("litestar")

    async def echo(socket: Any) -> None:
        await socket.accept()
        while True:
            await socket.send_text(await socket.receive_text())

    echo.__annotations__["socket"] = litestar.WebSocket
    return litestar.Litestar([litestar.websocket("/echo/{room:str}")(echo)]), "/echo/{room:str}"


def quart_echo() -> tuple[Any, Any]:
    quart = pytest.importorskip("quart")
    app = quart.Quart("echoing")

    @app.websocket("/echo/<room>")
    async def echo(room: str) -> None:
        while True:
            await quart.websocket.send(await quart.websocket.receive())

    return app, "/echo/<room>"


def grouped_echo() -> tuple[Any, Any]:
    """An app of no framework that talks in a task group, whose error is a group of errors."""

    class WebSocketDisconnect(Exception):
        """A framework's own."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        raise Group([WebSocketDisconnect(), WebSocketDisconnect()])

    return app, None


class Group(Exception):
    """A group of exceptions, as Python has it from 3.11."""

    def __init__(self, members: Sequence[Exception]) -> None:
        self.exceptions = tuple(members)


@pytest.mark.parametrize("made", [starlette_echo, litestar_echo, quart_echo, grouped_echo])
@pytest.mark.parametrize("is_sending", [False, True])
def test_a_websocket_that_its_client_closes_is_no_error_and_has_its_route(made: Any, is_sending: bool) -> None:
    """The app learns of it as it waits for a message, or as the server refuses to send one."""
    app, route = made()
    serve = asgi_wsgi_apps.AsgiApp(app, Exchanges(RequestsRule()))
    messages = [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": "a"}]
    gone = {"type": "websocket.disconnect", "code": 1001}

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return messages.pop(0) if messages else gone

    async def send(message: dict[str, Any]) -> None:
        if is_sending and message["type"] == "websocket.send":
            raise ConnectionResetError

    async def talk() -> None:
        scope = {"type": "websocket", "path": "/echo/1", "raw_path": b"/echo/1", "query_string": b"", "root_path": ""}
        await serve({**scope, "scheme": "ws", "headers": [(b"host", b"shop")], "subprotocols": []}, receive, send)

    with contextlib.suppress(Exception):
        asyncio.run(talk())
    (span,) = requests()
    assert (told(span).get("http.route"), span.error) == (route, None)


def test_a_websocket_of_channels_has_the_route_of_its_routers() -> None:
    routing = pytest.importorskip("channels.routing")
    settings, urls = importlib.import_module("django.conf").settings, importlib.import_module("django.urls")
    if not settings.configured:
        settings.configure()
    consumer = importlib.import_module("channels.generic.websocket").AsyncWebsocketConsumer.as_asgi()
    inner = routing.URLRouter([urls.path("other", consumer), urls.path("<str:room>", consumer)])
    app = routing.URLRouter([urls.path("echo/", inner), urls.re_path("^plain", consumer), urls.re_path("", consumer)])
    compatibility = importlib.import_module("asgiref.compatibility")
    assert compatibility.guarantee_single_callable(app) is app  # as Daphne asks

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None: ...

    for path in ("/echo/1", "/plain", "/none"):
        messages = [{"type": "websocket.connect"}, {"type": "websocket.disconnect", "code": 1001}]
        serve = asgi_wsgi_apps.AsgiApp(app, Exchanges(RequestsRule()))
        asyncio.run(serve({"type": "websocket", "path": path, "headers": []}, receive, send))  # type: ignore[arg-type]
    assert [told(span).get("http.route") for span in requests()] == ["/echo/<str:room>", "^plain", None]


def test_a_websocket_whose_app_fails_of_itself_is_an_error() -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        raise OSError

    with pytest.raises(OSError):
        ask(failing, type="websocket", scheme="ws")
    (span,) = requests()
    assert span.error == "OSError"


def test_a_websocket_reports_its_messages_and_how_it_was_closed() -> None:
    async def talk(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "four"})
        await receive()

    ask(talk, type="websocket", scheme="")  # ASGI's default, as with Daphne
    (span,) = requests()
    facts = told(span)
    names = ("network.protocol.name", "url.scheme", "http.response.status_code", "websocket.close_code", "items")
    assert [facts[name] for name in names] == ["websocket", "ws", 101, 1001, 1]


def test_annotations_of_a_request_are_kept() -> None:
    async def annotated(scope: Any, receive: Any, send: Any) -> None:
        instrument.annotate_request(tenant="shop")
        await answering(START, part(b"{}"))(scope, receive, send)

    ask(annotated, [(b"traceparent", CALLER.encode())])
    (span,) = requests()
    assert {"tenant": "shop", **ADDRESS, "http.response.status_code": 200}.items() <= told(span).items()
    assert span.remote == REMOTE


def test_endpoints_at_several_addresses_are_one_in_reports_and_each_span_reports_its_own() -> None:
    exchanges = Exchanges(RequestsRule())
    ports = range(8000, 8000 + ADDRESSES_KNOWN + 3)
    for port in ports:
        environ = {"wsgi.url_scheme": "http", "SERVER_NAME": "shop", "SERVER_PORT": str(port), "REQUEST_METHOD": "GET"}
        list(asgi_wsgi_apps.WsgiApp(wsgi_app([b""]), exchanges)(environ, lambda *_: None))
    assert [told(span)["server.port"] for span in requests()] == list(ports)
    assert len({span.site for span in requests()}) == ADDRESSES_KNOWN + 1
    (row,) = RECORDER.tally().iterate_totals()
    assert (row.path[-1].name, row.totals.calls) == ("GET", len(ports))


# -------------------------------------------------------------------- WSGI


class Parts:
    """A body that is no list."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._parts)


def wsgi_app(body: Iterable[bytes], status: str = "200 OK") -> Any:
    def app(_: Any, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response(status, [("content-type", "text/plain")])
        return body

    return app


def serve_wsgi(app: Any, start_response: Any = lambda *_: None, **environ: str) -> bytes:
    asked = {"wsgi.url_scheme": "http", "SERVER_NAME": "127.0.0.1", "SERVER_PORT": "80", "REQUEST_METHOD": "GET"}
    return b"".join(asgi_wsgi_apps.WsgiApp(app, Exchanges(RequestsRule()))({**asked, **environ}, start_response))


@pytest.mark.parametrize("body", [[b"four"], (b"fo", b"ur"), Parts(b"four"), Parts(b"", b"four")])
def test_an_answer_over_wsgi_that_comes_as_a_whole_is_no_stream(body: Any) -> None:
    assert serve_wsgi(wsgi_app(body), HTTP_TRACEPARENT=CALLER, CONTENT_LENGTH="7") == b"four"
    (span,) = requests()
    assert (span.site.name, span.error, span.remote) == ("GET", None, REMOTE)
    assert told(span) == {
        "http.request.method": "GET",
        **ADDRESS,
        "http.request.body.size": 7,
        "http.response.status_code": 200,
        "http.response.body.size": 4,
    }


def test_an_answer_over_wsgi_in_parts_is_a_stream() -> None:
    assert serve_wsgi(wsgi_app(Parts(b"one", b"", b"two"))) == b"onetwo"
    (span,) = requests()
    assert (told(span)["items"], told(span)["http.response.body.size"]) == (2, 6)


class Line(str):
    """A status line of a class of the app's own."""


@pytest.mark.parametrize(
    "call",
    [
        lambda start: start("204 No Content", []),
        lambda start: start("204 No Content", [], None),
        lambda start: start("204 No Content", [], exc_info=None),
        lambda start: start("204 No Content", response_headers=[]),
        lambda start: start(Line("204 No Content"), []),
    ],
)
def test_start_response_is_called_as_the_app_called_it(call: Callable[[Any], Any]) -> None:
    seen = []

    def start_response(*args: Any, **named: Any) -> str:
        seen.append((args, named))
        return "write"

    call(start_response)

    def app(_: Any, start: Any) -> list[bytes]:
        assert call(start) == "write"
        return []

    serve_wsgi(app, start_response)
    assert seen[0] == seen[1]
    assert told(requests()[0])["http.response.status_code"] == 204


# -------------------------------------------------------------------- the end of the process


def test_a_request_that_is_still_open_has_the_status_that_its_app_answered_with(tmp_path: Path) -> None:
    known = []

    def note_status() -> None:
        trace, _ = chrome.load(instrument.dump(tmp_path / "now.json"))
        known.append([span.attributes.get(STATUS) for span in trace.spans if span.clipped])

    async def answering_in_parts(scope: Any, receive: Any, send: Any) -> None:
        await send({**START, "status": 404})
        note_status()
        await send(part(b""))

    def body() -> Iterator[bytes]:
        note_status()
        yield b""

    ask(answering_in_parts)
    serve_wsgi(wsgi_app(body(), "404 Not Found"))
    assert known == [[404], [404]]


# -------------------------------------------------------------------- fork


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_none_of_its_parents_requests_open() -> None:
    async def forking(scope: Any, receive: Any, send: Any) -> None:
        assert RECORDER.open_requests(threading.get_native_id()) == 1
        child = os.fork()
        if not child:
            os._exit(len(RECORDER.open_rows()))
        assert os.waitpid(child, 0)[1] == 0
        await answering(START, part(b""))(scope, receive, send)

    ask(forking)
    assert len(requests()) == 1
