"""ASGI: each HTTP request and each websocket that a server hands to its app, as one span.

The server's own call of the app is where we stand, outside of all middleware. The span ends when the last part of the
answer has been sent; what the app does after that, such as background tasks, is no part of the request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from instrument.instrumentors.requests.exchange import PLAIN, Exchange, Exchanges
from instrument.instrumentors.requests.traceparent import with_state
from instrument.recorder.recorder import header_values
from instrument.runtime.faults import FAULTS

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


RECORDED = frozenset({"http", "websocket"})
"""The types of scope that are requests."""

NOWHERE = (None, None)
CONTENT_TYPE = (b"content-type",)


class App:
    """An ASGI application whose requests record. Passes the rest through: lifespan, and all of it while off."""

    def __init__(self, app: Any, exchanges: Exchanges) -> None:
        self.app = app
        self._exchanges = exchanges

    def __getattr__(self, name: str) -> Any:
        return getattr(self.app, name)

    def serves(self, exchanges: Exchanges) -> bool:
        """Whether it records for these."""
        return self._exchanges is exchanges

    def __call__(self, scope: Message, receive: Receive, send: Send) -> Awaitable[Any]:
        kind = scope["type"]
        if kind not in RECORDED or not self._exchanges.recorder.on:
            return self.app(scope, receive, send)  # type: ignore[no-any-return]
        return self._record(kind, scope, receive, send)

    async def _record(self, kind: str, scope: Message, receive: Receive, send: Send) -> Any:
        exchange = begun(self._exchanges, kind, scope)
        if exchange is None:
            return await self.app(scope, receive, send)
        try:
            if kind == "http":
                result = await self.app(scope, receive, Http(exchange, send).send)
            else:
                talk = Websocket(exchange, receive, send)
                result = await self.app(scope, talk.receive, talk.send)
        except BaseException as error:
            exchange.status = exchange.status or 500  # without an answer yet the server will say so
            exchange.end(error)
            raise
        if exchange.frame is not None:
            exchange.end() if kind == "websocket" else exchange.broken_off()
        return result


def begun(exchanges: Exchanges, kind: str, scope: Message) -> Exchange | None:
    """Begin the span of a request; None where it is not to be recorded, or for a fault of ours."""
    try:
        if exchanges.ignores and exchanges.ignored(scope["path"]):
            return None
        address, port = scope.get("server") or NOWHERE
        method = scope.get("method", "GET")  # a websocket begins with one
        arrival = kind, method, scope.get("scheme", "http"), address, port
        if exchanges.is_plain:
            parent, state, length = header_values(scope["headers"], PLAIN)
            return exchanges.begin_plain(arrival, parent if state is None else with_state(parent, state), length)
        named = {name: told for name in exchanges.named if (told := _told(scope, name)) is not None}
        return exchanges.begin_at(arrival, dict(scope["headers"]), named)
    except Exception as fault:
        FAULTS.note("begin of a request", fault)
        return None


def _told(scope: Message, name: str) -> str | None:
    """What the caller's request says of an attribute, None where it says nothing."""
    if name == "url.path":
        return str(scope["path"])
    if name == "url.query":
        return scope.get("query_string", b"").decode("latin-1") or None
    if name == "client.address":
        client = scope.get("client")
        return None if client is None else str(client[0])
    found = dict(scope["headers"]).get(b"user-agent")
    return None if found is None else found.decode("latin-1")


class Http:
    """What the app sends for one HTTP request."""

    __slots__ = ("_exchange", "_headers", "_is_events", "_send")

    def __init__(self, exchange: Exchange, send: Send) -> None:
        self._exchange = exchange
        self._send = send
        self._headers: Iterable[tuple[bytes, bytes]] = ()
        self._is_events: bool | None = None

    def send(self, message: Message) -> Awaitable[None]:
        """What the server's own `send` gives, awaited by the app; of the last part what ends the span after it."""
        kind, exchange = message["type"], self._exchange
        if kind == "http.response.body":
            body = message.get("body", b"")
            exchange.answer_bytes += len(body)
            is_last = not message.get("more_body", False)
            if body and (exchange.stream is not None or not is_last):
                exchange.item(self._items_in(body))
            return self._send_last(message) if is_last else self._send(message)
        if kind == "http.response.start":
            exchange.status = message["status"]
            self._headers = message.get("headers", ())
        return self._send(message)

    def _items_in(self, body: bytes) -> int:
        """How many items a part of the answer is: as many as there are server-sent events, each with an empty line."""
        if self._is_events is None:
            try:
                (kind,) = header_values(self._headers, CONTENT_TYPE)
                self._is_events = kind is not None and kind.startswith(b"text/event-stream")
            except Exception as fault:
                FAULTS.note("headers of an answer", fault)
                self._is_events = False
        return (body.count(b"\n\n") or 1) if self._is_events else 1

    async def _send_last(self, message: Message) -> None:
        await self._send(message)
        exchange = self._exchange
        if exchange.stream is None or self._is_events:
            exchange.end()
        else:
            exchange.end_of_parts()


class Websocket:
    """What goes by between the server and the app for one websocket: its items are the messages that the app sends."""

    __slots__ = ("_exchange", "_receive", "_send")

    def __init__(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        self._exchange = exchange
        self._receive = receive
        self._send = send

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            self._exchange.facts["websocket.close_code"] = message.get("code", 1005)
        return message

    async def send(self, message: Message) -> None:
        kind, exchange = message["type"], self._exchange
        if kind == "websocket.send":
            exchange.answer_bytes += len(message.get("bytes") or message.get("text") or b"")
            exchange.item()
        elif kind == "websocket.accept":
            exchange.status = 101
        elif kind == "websocket.close" and not exchange.status:
            exchange.status = 403  # refused before it was accepted, which servers answer so (ASGI, websocket spec)
        elif kind == "websocket.http.response.start":
            exchange.status = message["status"]
        await self._send(message)
