"""Requests at a server of aiohttp.web in this process: how each ends, its items, and its websockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from readback import spans_in

import instrument
from instrument.profile.model import Capture, Profile, RequestsRule
from instrument.recorder.recorder import RECORDER
from instrument.recording.spans import Span
from instrument.runtime.faults import FAULTS

web = pytest.importorskip("aiohttp.web")
aiohttp = pytest.importorskip("aiohttp")

Talk = Callable[[Any, str, int], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    attributes = ("url.query", "user_agent.original", "http.request.header.x-tenant")
    rule = RequestsRule(ignore=("/health",), attributes=attributes)
    instrument.start(Profile(requests=(rule,), capture=Capture(sample=1.0)))
    yield
    instrument.stop()
    assert FAULTS.count_by_place() == {}


def requests() -> dict[str, Span]:
    """The requests by the path of their route; a second one of a route replaces the first."""
    found = (span for span in spans_in(RECORDER) if span.site.kind == "request")
    return {dict(span.site.attributes).get("http.route", ""): span for span in found}


class Service:
    """An application whose handlers note that they have ended."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.pushed_by_others: list[Any] = []

    async def events(self, request: Any) -> Any:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: a\n\ndata: b\n\n")
        await response.write(b"data: c\n\n")
        return response

    async def whole(self, request: Any) -> Any:
        return web.Response(text="ok")

    async def fails(self, request: Any) -> Any:
        raise ValueError

    async def fails_late(self, request: Any) -> Any:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x")
        raise ValueError

    async def times_out(self, request: Any) -> Any:
        raise asyncio.TimeoutError

    async def endless(self, request: Any) -> Any:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 100_000)
                await asyncio.sleep(0)
        finally:
            self.ended.set()

    async def echo(self, request: Any) -> Any:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str(message.data)
        return socket

    async def pushed(self, request: Any) -> Any:
        """Messages are sent by a task that began before the request, as servers with one queue for all do."""
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.pushed_by_others.append(socket)
        async for _ in socket:
            pass
        return socket

    async def push(self) -> None:
        while not self.pushed_by_others:
            await asyncio.sleep(0.001)
        await self.pushed_by_others[0].send_bytes(b"tick")

    async def talked_endlessly(self, request: Any) -> Any:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        try:
            while True:
                await socket.send_str("x" * 100_000)
                await asyncio.sleep(0)
        finally:
            self.ended.set()


async def served(*asks: Talk) -> None:
    """Serve an application on a port of its own while these talk to it."""
    service = Service()
    app = web.Application()
    names = "events whole fails fails_late times_out endless echo pushed talked_endlessly"
    for name in names.split():
        app.router.add_get(f"/{name}", getattr(service, name))
    app.router.add_get("/health", service.whole)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    ((_, port),) = [one[:2] for one in runner.addresses]
    pushing = asyncio.create_task(service.push())
    async with aiohttp.ClientSession() as client:
        for ask in asks:
            await ask(client, f"http://127.0.0.1:{port}", port)
            if service.pushed_by_others:
                await pushing
            if ask in LEAVING:
                await service.ended.wait()
                service.ended.clear()
    pushing.cancel()
    await runner.cleanup()


async def answered(client: Any, base: str, port: int) -> None:
    for path in ("events?a=b", "whole", "fails", "times_out", "health"):
        async with client.get(f"{base}/{path}", headers={"User-Agent": "us", "X-Tenant": "t"}) as answer:
            await answer.read()
    with pytest.raises(aiohttp.ClientError):
        async with client.get(f"{base}/fails_late") as answer:
            await answer.read()


async def talked(client: Any, base: str, port: int) -> None:
    async with client.ws_connect(f"{base}/echo") as socket:
        for text in ("one", "two"):
            await socket.send_str(text)
            assert (await socket.receive()).data == text
        await socket.close(code=1001)
    async with client.ws_connect(f"{base}/pushed") as socket:
        assert (await socket.receive()).data == b"tick"


async def left_stream(client: Any, base: str, port: int) -> None:
    async with client.get(f"{base}/endless") as answer:
        await answer.content.read(10)
        answer.close()


async def left_websocket(client: Any, base: str, port: int) -> None:
    socket = await client.ws_connect(f"{base}/talked_endlessly")
    await socket.receive()
    socket._response.close()  # a network that breaks


LEAVING = (left_stream, left_websocket)


def test_answers_of_aiohttp_say_their_route_status_sizes_items_and_errors() -> None:
    asyncio.run(served(answered))
    found = requests()
    assert {
        route: (span.attributes["http.response.status_code"], span.error, span.attributes.get("items"))
        for route, span in found.items()
    } == {
        "/events": (200, None, 3),
        "/whole": (200, None, None),
        "/fails": (500, "ValueError", None),
        "/fails_late": (200, "ValueError", 1),
        "/times_out": (504, "TimeoutError", None),
    }
    whole = {**dict(found["/whole"].site.attributes), **found["/whole"].attributes}
    assert (whole["url.scheme"], whole["server.address"]) == ("http", "127.0.0.1")
    assert (whole["http.response.body.size"], whole["user_agent.original"]) == (2, "us")
    assert whole["http.request.header.x-tenant"] == ("t",)
    assert found["/events"].attributes["url.query"] == "a=b"


def test_a_client_of_aiohttp_that_goes_away_is_no_error() -> None:
    asyncio.run(served(left_stream, left_websocket))
    told = {route: (span.error, span.attributes.get("instrument.outcome")) for route, span in requests().items()}
    assert told == {"/endless": (None, "client gone"), "/talked_endlessly": (None, "client gone")}


def test_a_websocket_of_aiohttp_counts_the_messages_that_any_task_sends() -> None:
    asyncio.run(served(talked))
    echo, pushed = requests()["/echo"], requests()["/pushed"]
    assert dict(echo.site.attributes)["network.protocol.name"] == "websocket"
    assert (echo.error, echo.attributes["http.response.status_code"]) == (None, 101)
    assert (echo.attributes["items"], echo.attributes["websocket.close_code"]) == (2, 1001)
    assert pushed.attributes["items"] == 1


def test_a_session_that_ends_gives_aiohttp_its_own_functions_back() -> None:
    protocol, sockets = aiohttp.web_protocol, aiohttp.web_ws
    met = protocol.RequestHandler._handle_request, protocol.StreamWriter, sockets.WebSocketResponse.send_str
    instrument.stop()
    own = protocol.RequestHandler._handle_request, protocol.StreamWriter, sockets.WebSocketResponse.send_str
    assert protocol.StreamWriter is aiohttp.http_writer.StreamWriter
    assert not [one for one in own if one in met]
