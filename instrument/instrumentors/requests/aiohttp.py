"""aiohttp.web: each request that its server hands to an application, as one span up to the end of the answer.

A connection's handler runs the application, middlewares and sub-applications included, and sends the answer. The items
of a websocket are the messages that the service sends, by any task. gunicorn's worker of aiohttp runs these handlers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from instrument.instrumentors.functions import Undo, replace, takes_place
from instrument.instrumentors.requests.exchange import SERVER_TIMING, Arrival, Exchange, Exchanges
from instrument.instrumentors.requests.propagation import Caller, with_state
from instrument.recorder.outcomes import STATUS


def _handler(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Replace the handler of a connection, and the writer that it makes for each answer."""
    owner, base = module.RequestHandler, module.StreamWriter
    handle, handle_error = owner._handle_request, owner.handle_error
    http, websocket = (exchanges.arrivals(kind, _path, _plain, _all) for kind in ("http", "websocket"))

    class StreamWriter(base):  # type: ignore[misc, valid-type]
        """The server's own writer, which also counts the bytes and items of an exchange."""

        exchange: Exchange | None = None
        is_events = False
        failure: BaseException | None = None
        method = ""

        def write_headers(self, status_line: Any, headers: Any, *args: Any) -> Any:
            exchange = self.exchange
            if exchange is not None:
                try:
                    exchange.answer(int(status_line.split(" ", 2)[1]))
                    self.is_events = headers.get("Content-Type", "").startswith("text/event-stream")
                    if exchange.timing is not None:
                        exchange.timing.begin_parts(headers.items(), self.method)
                        headers = headers.copy()  # an application may send them again
                        headers.add(SERVER_TIMING, exchange.timing.text(exchange))
                except Exception:
                    exchange.unread()
            return super().write_headers(status_line, headers, *args)

        def write(self, chunk: Any, **kwargs: Any) -> Any:
            if self.exchange is not None:
                self._count(self.exchange, chunk, is_last=False)
            return super().write(chunk, **kwargs)

        def write_eof(self, chunk: Any = b"") -> Any:
            if self.exchange is not None and chunk:
                self._count(self.exchange, chunk, is_last=True)
            if self.exchange is not None and self.exchange.timing is not None:
                chunk = bytes(chunk) + self.exchange.timing.comment(self.exchange)
            return super().write_eof(chunk)

        def _count(self, exchange: Exchange, chunk: Any, *, is_last: bool) -> None:
            try:
                exchange.answer_bytes += len(chunk)
                if exchange.timing is not None:
                    exchange.timing.sent(bytes(chunk))
                if len(chunk) and (exchange.stream is not None or not is_last):
                    exchange.item((bytes(chunk).count(b"\n\n") or 1) if self.is_events else 1)
            except Exception:
                exchange.unread()

    StreamWriter.__qualname__, StreamWriter.__module__ = base.__qualname__, base.__module__

    @takes_place(owner, "_handle_request")
    async def undo_handle(self: Any, request: Any, start_time: Any, request_handler: Any) -> Any:
        writer = request._payload_writer
        if not isinstance(writer, StreamWriter) or request._message is module.ERROR:
            return await handle(self, request, start_time, request_handler)  # a malformed request
        is_http = request.headers.get("Upgrade", "").lower() != "websocket"
        exchange = (http if is_http else websocket).begun(request)
        if exchange is None:
            return await handle(self, request, start_time, request_handler)
        writer.exchange, writer.method = exchange, request.method
        try:
            result = await exchange.stepped(handle(self, request, start_time, request_handler))
        except BaseException as error:
            _fail(exchange, writer.failure or error, self.transport)
            raise
        finally:
            failure, writer.exchange, writer.failure = writer.failure, None, None
        try:
            answer = result[0]
            exchange.answer(exchange.status or answer.status)
            if not is_http and getattr(answer, "close_code", None) is not None:
                exchange.facts["websocket.close_code"] = answer.close_code
        except Exception:
            exchange.unread()
        if failure is not None and exchange.status >= 500:
            _fail(exchange, failure, self.transport)
        elif writer.is_events or not is_http:
            exchange.end()
        else:
            exchange.end_of_parts()
        return result

    @takes_place(owner, "handle_error")
    def undo_error(self: Any, request: Any, status: int = 500, exc: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(writer := request._payload_writer, StreamWriter):
            writer.failure = exc or sys.exc_info()[1]  # a time-out is not passed as an argument
        return handle_error(self, request, status, exc, *args, **kwargs)

    return [undo_handle, undo_error, replace(module, "StreamWriter", StreamWriter)]


def _fail(exchange: Exchange, error: BaseException, transport: Any) -> None:
    """End an exchange whose handler has failed. If the connection is gone, the client has broken it off."""
    is_gone = transport is None or transport.is_closing()
    if is_gone and (isinstance(error, ConnectionError) or not isinstance(error, Exception)):
        if exchange.status >= 500:  # the client never got that answer
            exchange.status = 0
            exchange.facts.pop(STATUS, None)
        exchange.broken_off()
    else:
        exchange.fail(error)


def _websocket(module: Any, _: Exchanges) -> list[Undo]:
    """Count each message that a service sends as an item of its websocket's exchange."""
    owner = module.WebSocketResponse

    def counted(name: str) -> Undo:
        send = getattr(owner, name)

        @takes_place(owner, name)
        def undo(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
            exchange = getattr(self._payload_writer, "exchange", None)
            if exchange is not None and exchange.is_open:
                try:
                    exchange.answer_bytes += len(data)
                    exchange.item()
                except Exception:
                    exchange.unread()
            return send(self, data, *args, **kwargs)

        return undo

    return [counted(name) for name in ("send_str", "send_bytes", "send_frame") if hasattr(owner, name)]


def _path(request: Any) -> str:
    path: str = request.path
    return path


def _plain(request: Any) -> tuple[Arrival, Caller | None, str | None]:
    headers = request.headers
    parent, state = headers.get("traceparent"), headers.get("tracestate")
    caller = parent if state is None else with_state(parent, state)
    return _arrival(request), caller, headers.get("Content-Length")


def _arrival(request: Any) -> Arrival:
    transport = request.transport
    if transport is None:
        return request.method, "http", None, None
    address = transport.get_extra_info("sockname")
    scheme = "http" if transport.get_extra_info("sslcontext") is None else "https"
    host, port = address[:2] if isinstance(address, tuple) else (address or None, None)
    return request.method, scheme, host, port


def _all(request: Any, names: tuple[str, ...]) -> tuple[Arrival, Mapping[bytes, bytes], dict[Any, Any]]:
    headers = {name.lower(): value for name, value in request._message.raw_headers}
    attributes = {name: value for name in names if (value := NAMED[name](request))}
    return _arrival(request), headers, attributes


NAMED: Mapping[str, Callable[[Any], str | None]] = {
    "url.path": _path,
    "url.query": lambda request: request.query_string,
    "client.address": lambda request: request.remote,
    "user_agent.original": lambda request: request.headers.get("User-Agent"),
}
"""The readers of a request's attributes."""

AIOHTTP: Mapping[str, Callable[[Any, Exchanges], list[Undo]]] = {
    "aiohttp.web_protocol": _handler,
    "aiohttp.web_ws": _websocket,
}
