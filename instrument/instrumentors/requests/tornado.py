"""Record the requests of Tornado: each is one span, from the call of its handler to the last byte of the answer.

The route is the path pattern of the handler. Each message that the handler sends over a websocket is an item of the
request. An app in a `WSGIContainer` is recorded as WSGI.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from inspect import isawaitable
from typing import Any

from instrument.instrumentors.functions import Undo, replaces
from instrument.instrumentors.requests.exchange import (
    CLOSE_CODE,
    EXCHANGE,
    SERVER_TIMING,
    Arrival,
    Exchange,
    Exchanges,
    reads,
)

ROUTE = "_instrument_route"
"""The attribute of Tornado's request object for its route."""


def _web(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Record the requests of all handlers, with their exceptions, bytes and routes."""
    handler, connection = module.RequestHandler, sys.modules["tornado.http1connection"].HTTP1Connection
    matcher = sys.modules["tornado.routing"].PathMatches
    execute, handle_exception, match = handler._execute, handler._handle_request_exception, matcher.match
    write_headers, write, finish = connection.write_headers, connection.write, connection.finish
    http, websocket = (exchanges.get_arrivals(kind, *READS) for kind in ("http", "websocket"))

    @replaces(matcher, "match")
    def undo_match(self: Any, request: Any) -> Any:
        groups = match(self, request)
        if groups is not None:
            setattr(request, ROUTE, self.regex.pattern.removesuffix("$"))
        return groups

    @replaces(handler, "_execute")
    async def undo_execute(self: Any, transforms: Any, *args: Any, **kwargs: Any) -> None:
        request = self.request
        is_http = request.headers.get("Upgrade", "").lower() != "websocket"
        is_passed_on = isinstance(self, module.FallbackHandler)  # to a server of its own, such as a container of WSGI
        exchange = None if is_passed_on else (http if is_http else websocket).begin(request)
        if exchange is None:
            return await execute(self, transforms, *args, **kwargs)  # type: ignore[no-any-return]
        if hasattr(request, ROUTE):
            exchange.set_route(getattr(request, ROUTE))
        setattr(request.connection, EXCHANGE, exchange)
        error = None
        try:
            await exchange.track_waits(execute(self, transforms, *args, **kwargs))
        except BaseException as raised:
            error = raised
            raise
        finally:
            close_code = getattr(self, "close_code", None)
            is_gone = _is_gone(request.connection) if is_http else close_code is None
            if close_code is not None:
                exchange.facts[CLOSE_CODE] = close_code
            elif is_gone and exchange.status in (0, 101) and error is getattr(exchange, "failure", None):
                exchange.break_off()
            if error is not None or is_gone or self._finished or self._auto_finish:
                exchange.finish(error, is_gone=is_gone, in_parts=is_http)
        return None

    @replaces(handler, "_handle_request_exception")
    def undo_exception(self: Any, error: BaseException) -> None:
        exchange = getattr(self.request.connection, EXCHANGE, None)
        if exchange is not None and not isinstance(error, module.HTTPError | module.Finish):
            exchange.failure = error
        handle_exception(self, error)

    @replaces(connection, "write_headers")
    def undo_headers(self: Any, start_line: Any, headers: Any, chunk: Any = None) -> Any:
        exchange: Exchange | None = getattr(self, EXCHANGE, None)
        if exchange is not None:
            exchange.begin_answer(start_line.code, headers.get("Content-Type"))
            if chunk:
                # A handler that has finished writes its whole answer at once.
                exchange.add_part(chunk, is_last=headers.get("Content-Length") == str(len(chunk)))
            if exchange.timing is not None and exchange.status >= 200:
                headers = headers.copy()
                headers.add(SERVER_TIMING, exchange.timing.text(exchange))
        return write_headers(self, start_line, headers, chunk)

    @replaces(connection, "write")
    def undo_write(self: Any, chunk: Any) -> Any:
        exchange: Exchange | None = getattr(self, EXCHANGE, None)
        if exchange is not None and chunk:
            exchange.add_part(chunk)
        return write(self, chunk)

    @replaces(connection, "finish")
    def undo_finish(self: Any) -> None:
        finish(self)
        exchange: Exchange | None = getattr(self, EXCHANGE, None)
        if exchange is not None and 200 <= exchange.status < 500 and getattr(exchange, "failure", None) is None:
            exchange.finish(is_gone=_is_gone(self))

    return [undo_match, undo_execute, undo_exception, undo_headers, undo_write, undo_finish]


def _websocket(module: Any, _: Exchanges) -> list[Undo]:
    """Count each message that a websocket's handler sends, and note exceptions of its functions for messages."""
    handler, protocol = module.WebSocketHandler, module.WebSocketProtocol
    write_message, run = handler.write_message, protocol._run_callback

    @replaces(handler, "write_message")
    def undo_write(self: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
        future = write_message(self, message, *args, **kwargs)
        exchange = getattr(self.request.connection, EXCHANGE, None)
        if exchange is not None and exchange.is_open:
            exchange.add_part(message)
        return future

    @replaces(protocol, "_run_callback")
    def undo_run(self: Any, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        request = getattr(self.handler, "request", None)
        exchange: Any = getattr(getattr(request, "connection", None), EXCHANGE, None)

        def call_noted(*args: Any, **kwargs: Any) -> Any:
            try:
                result = callback(*args, **kwargs)
            except Exception as error:
                exchange.failure = error
                raise
            return await_noted(result) if isawaitable(result) else result

        async def await_noted(result: Any) -> Any:
            try:
                return await result
            except Exception as error:
                exchange.failure = error
                raise

        return run(self, callback if exchange is None else call_noted, *args, **kwargs)

    return [undo_write, undo_run]


def _is_gone(connection: Any) -> bool:
    stream = connection.stream
    return stream is None or bool(stream.closed())


def _read_arrival(request: Any) -> Arrival:
    socket = getattr(request.connection.stream, "socket", None)
    address = None if socket is None else socket.getsockname()
    host, port = address[:2] if isinstance(address, tuple) else (address or None, None)
    return request.method, request.protocol, host, port


READS = reads(
    _read_arrival,
    lambda request: request.headers,
    lambda request: request.path,
    lambda request: request.query,
    lambda request: request.remote_ip,
)

TORNADO: Mapping[str, Callable[[Any, Exchanges], list[Undo]]] = {"tornado.web": _web, "tornado.websocket": _websocket}
"""The functions that attach to Tornado, by module. That for `WSGIContainer` is in `servers.WSGI`."""
