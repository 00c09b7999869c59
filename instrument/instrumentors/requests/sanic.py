"""Record the requests of Sanic's own server: each is one span, from the call of the app to the last byte of the answer.

When Sanic starts, it compiles some methods of its classes again from source (`sanic.touchup`), which undoes a
replacement. So only other methods are replaced here. Under an ASGI server the requests are recorded as ASGI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from instrument.instrumentors.functions import Undo, replaces
from instrument.instrumentors.requests.exchange import (
    CLOSE_CODE,
    CURRENT,
    EXCHANGE,
    SERVER_TIMING,
    Arrival,
    Exchange,
    Exchanges,
    reads,
)


def _attach_protocol(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Record the requests that a connection passes to the app."""
    mixin = module.HttpProtocolMixin
    setup = mixin._setup
    http, websocket = (exchanges.get_arrivals(kind, *READS) for kind in ("http", "websocket"))

    @replaces(mixin, "_setup")
    def undo(self: Any) -> None:
        setup(self)
        handle = self.request_handler

        async def handle_recorded(request: Any) -> None:
            is_http = request.headers.get("upgrade", "").lower() != "websocket"
            exchange = (http if is_http else websocket).begin(request)
            if exchange is None:
                await handle(request)
                return
            error: BaseException | None = None
            try:
                await exchange.track_waits(handle(request))
            except BaseException as raised:
                error = raised
                raise
            finally:
                websocket_of = getattr(self, "websocket", None)
                close_code = None if websocket_of is None else websocket_of.ws_proto.close_rcvd
                is_gone = request.transport is None or request.transport.is_closing()
                if close_code is not None:
                    exchange.facts[CLOSE_CODE] = close_code.code
                elif exchange.status == 101 and is_gone and getattr(exchange, "failure", None) is None:
                    exchange.break_off()
                exchange.finish(error, is_gone=is_gone, in_parts=is_http)

        self.request_handler = handle_recorded

    return [undo]


def _attach_response(module: Any, _: Exchanges) -> list[Undo]:
    """Note the status of each answer, and count its parts."""
    owner = module.BaseHTTPResponse
    send = owner.send

    @replaces(owner, "send")
    async def undo(self: Any, data: Any = None, end_stream: Any = None) -> None:
        exchange = CURRENT.get()
        if exchange is not None and exchange.is_open and self.stream is not None and self.stream.send is not None:
            _note_part(exchange, self, data)
        await send(self, data, end_stream)

    return [undo]


def _note_part(exchange: Exchange, response: Any, data: Any) -> None:
    try:
        begins = not exchange.status
        part = data or (getattr(response, "body", None) if begins else None)
        if begins:
            exchange.begin_answer(response.status, response.content_type or response.headers.get("content-type"))
            if exchange.timing is not None:
                response.headers.add(SERVER_TIMING, exchange.timing.text(exchange))
        if part:
            exchange.add_part(part.encode() if isinstance(part, str) else part, is_last=begins and not data)
    except Exception:
        exchange.count_unread()


def _attach_errors(module: Any, _: Exchanges) -> list[Undo]:
    """Note each exception for which Sanic looks up an error handler."""
    owner = module.ErrorHandler
    look_up = owner._lookup

    @replaces(owner, "_lookup")
    def undo(self: Any, exception: Any, *args: Any, **kwargs: Any) -> Any:
        exchange = CURRENT.get()
        if exchange is not None and exchange.is_open:
            exchange.failure = exception
        return look_up(self, exception, *args, **kwargs)

    return [undo]


def _attach_websocket(module: Any, _: Exchanges) -> list[Undo]:
    """Note the answer to a websocket's handshake, and store the exchange at the new connection."""
    owner = module.WebSocketProtocol
    shake_hands = owner.websocket_handshake

    @replaces(owner, "websocket_handshake")
    async def undo(self: Any, *args: Any, **kwargs: Any) -> Any:
        connection = await shake_hands(self, *args, **kwargs)
        exchange = CURRENT.get()
        if exchange is not None and exchange.is_open:
            exchange.begin_answer(101, None)
            setattr(connection, EXCHANGE, exchange)
        return connection

    return [undo]


def _attach_messages(module: Any, _: Exchanges) -> list[Undo]:
    """Count each message that any task sends over a websocket."""
    owner = module.WebsocketImplProtocol
    send = owner.send

    @replaces(owner, "send")
    async def undo(self: Any, message: Any) -> None:
        exchange = getattr(self, EXCHANGE, None)
        if exchange is not None and exchange.is_open:
            exchange.add_part(message)
        await send(self, message)

    return [undo]


def _attach_app(module: Any, _: Exchanges) -> list[Undo]:
    """Note exceptions of websockets' handlers, because Sanic only logs them."""
    owner = module.Sanic
    run = owner._websocket_handler

    @replaces(owner, "_websocket_handler")
    async def undo(self: Any, handler: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        async def handle_recorded(*args: Any, **kwargs: Any) -> Any:
            try:
                return await handler(*args, **kwargs)
            except Exception as error:
                exchange = CURRENT.get()
                if exchange is not None and exchange.is_open:
                    exchange.failure = error
                raise

        await run(self, handle_recorded, request, *args, **kwargs)

    return [undo]


def _read_arrival(request: Any) -> Arrival:
    address = getattr(request.conn_info, "sockname", None)
    host, port = address[:2] if isinstance(address, tuple) else (address or None, None)
    return request.method, request.scheme, host, port


READS = reads(
    _read_arrival,
    lambda request: request.headers,
    lambda request: request.path,
    lambda request: request.query_string,
    lambda request: request.ip,
)

SANIC: Mapping[str, Callable[[Any, Exchanges], list[Undo]]] = {
    "sanic.app": _attach_app,
    "sanic.handlers.error": _attach_errors,
    "sanic.response.types": _attach_response,
    "sanic.server.protocols.http_protocol": _attach_protocol,
    "sanic.server.protocols.websocket_protocol": _attach_websocket,
    "sanic.server.websockets.impl": _attach_messages,
}
