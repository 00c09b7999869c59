"""Record the requests of aiohttp's server: each is one span, from the call of the application to the end of the answer.

The span includes middlewares and sub-applications. Each message that a task of the service sends over a websocket is an
item of the request. gunicorn's worker for aiohttp is recorded, too, because it uses the same handlers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from instrument.instrumentors.functions import Undo, replace, replaces
from instrument.instrumentors.requests.exchange import CLOSE_CODE, SERVER_TIMING, Arrival, Exchange, Exchanges, reads


def _attach_handler(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Record the requests that the handler of a connection passes to the application."""
    owner, base = module.RequestHandler, module.StreamWriter
    handle, handle_error = owner._handle_request, owner.handle_error
    http, websocket = (exchanges.get_arrivals(kind, *READS) for kind in ("http", "websocket"))

    class StreamWriter(base):  # type: ignore[misc, valid-type]
        """The server's writer of an answer, which also counts the bytes and items of the exchange."""

        exchange: Exchange | None = None
        method = ""

        def write_headers(self, status_line: Any, headers: Any, *args: Any) -> Any:
            exchange = self.exchange
            if exchange is not None:
                try:
                    exchange.begin_answer(int(status_line.split(" ", 2)[1]), headers.get("Content-Type"))
                    if exchange.timing is not None:
                        exchange.timing.begin_parts(headers.items(), self.method)
                        headers = headers.copy()  # an application may send them again
                        headers.add(SERVER_TIMING, exchange.timing.text(exchange))
                except Exception:
                    exchange.count_unread()
            return super().write_headers(status_line, headers, *args)

        def write(self, chunk: Any, **kwargs: Any) -> Any:
            if self.exchange is not None:
                self.exchange.add_part(chunk)
            return super().write(chunk, **kwargs)

        def write_eof(self, chunk: Any = b"") -> Any:
            if self.exchange is not None and chunk:
                self.exchange.add_part(chunk, is_last=True)
            if self.exchange is not None and self.exchange.timing is not None:
                chunk = bytes(chunk) + self.exchange.timing.comment(self.exchange)
            return super().write_eof(chunk)

    StreamWriter.__qualname__, StreamWriter.__module__ = base.__qualname__, base.__module__

    @replaces(owner, "_handle_request")
    async def undo_handle(self: Any, request: Any, start_time: Any, request_handler: Any) -> Any:
        writer = request._payload_writer
        if not isinstance(writer, StreamWriter) or request._message is module.ERROR:
            return await handle(self, request, start_time, request_handler)  # a malformed request
        is_http = request.headers.get("Upgrade", "").lower() != "websocket"
        exchange = (http if is_http else websocket).begin(request)
        if exchange is None:
            return await handle(self, request, start_time, request_handler)
        writer.exchange, writer.method = exchange, request.method
        try:
            result = await exchange.track_waits(handle(self, request, start_time, request_handler))
        except BaseException as error:
            exchange.finish(getattr(exchange, "failure", None) or error, is_gone=is_closed(self.transport))
            raise
        finally:
            writer.exchange = None
        try:
            answer = result[0]
            exchange.set_status(exchange.status or answer.status)
            if not is_http and getattr(answer, "close_code", None) is not None:
                exchange.facts[CLOSE_CODE] = answer.close_code
        except Exception:
            exchange.count_unread()
        exchange.finish(is_gone=is_closed(self.transport), in_parts=is_http)
        return result

    @replaces(owner, "handle_error")
    def undo_error(self: Any, request: Any, status: int = 500, exc: Any = None, *args: Any, **kwargs: Any) -> Any:
        exchange = getattr(request._payload_writer, "exchange", None)
        if exchange is not None:
            exchange.failure = exc or sys.exc_info()[1]  # a time-out is not passed as an argument
        return handle_error(self, request, status, exc, *args, **kwargs)

    return [undo_handle, undo_error, replace(module, "StreamWriter", StreamWriter)]


def is_closed(transport: Any) -> bool:
    """Return True if the transport of a connection is closed or missing."""
    return transport is None or bool(transport.is_closing())


def _attach_websocket(module: Any, _: Exchanges) -> list[Undo]:
    """Count each message that the service sends over a websocket as an item of the exchange."""
    owner = module.WebSocketResponse

    def count_sends(name: str) -> Undo:
        send = getattr(owner, name)

        @replaces(owner, name)
        def undo(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
            exchange = getattr(self._payload_writer, "exchange", None)
            if exchange is not None and exchange.is_open:
                exchange.add_part(data)
            return send(self, data, *args, **kwargs)

        return undo

    return [count_sends(name) for name in ("send_str", "send_bytes", "send_frame") if hasattr(owner, name)]


def _read_arrival(request: Any) -> Arrival:
    transport = request.transport
    if transport is None:
        return request.method, "http", None, None
    address = transport.get_extra_info("sockname")
    scheme = "http" if transport.get_extra_info("sslcontext") is None else "https"
    host, port = address[:2] if isinstance(address, tuple) else (address or None, None)
    return request.method, scheme, host, port


READS = reads(
    _read_arrival,
    lambda request: request.headers,
    lambda request: request.path,
    lambda request: request.query_string,
    lambda request: request.remote,
)

AIOHTTP: Mapping[str, Callable[[Any, Exchanges], list[Undo]]] = {
    "aiohttp.web_protocol": _attach_handler,
    "aiohttp.web_ws": _attach_websocket,
}
