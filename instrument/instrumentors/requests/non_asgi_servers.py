"""Record the requests of servers that call handlers without ASGI or WSGI: http.server, aiohttp, Tornado and Sanic.

A request is one span, from the call of the handler or app to the last byte of the answer. Requests of http.server are
named by their methods, because its handlers have no routes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from inspect import isawaitable
from operator import attrgetter
from typing import Any

from instrument.instrumentors.profiled_functions import Undo, note_calls, replace_attribute, replaces_attribute
from instrument.instrumentors.requests.exchange import (
    CLOSE_CODE,
    EXCHANGE,
    SERVER_TIMING,
    Attach,
    Exchange,
    Exchanges,
    count_part,
    current_exchange,
    exchange_of,
    make_request_readers,
)


def is_transport_closed(transport: Any) -> bool:
    return transport is None or bool(transport.is_closing())


def _is_websocket(headers: Any) -> bool:
    return bool(headers.get("Upgrade", "").lower() == "websocket")


def _note_failures(function: Callable[..., Any], exchange: Exchange) -> Callable[..., Any]:
    def call_and_note_failure(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            exchange.failure = error
            raise
        return await_and_note_failure(result) if isawaitable(result) else result

    async def await_and_note_failure(result: Any) -> Any:
        try:
            return await result
        except Exception as error:
            exchange.failure = error
            raise

    return call_and_note_failure


# http.server


def _attach_http_server(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Record the requests of handlers of http.server, unless a class overrides `handle_one_request`."""
    handler = module.BaseHTTPRequestHandler
    handle, parse, flush = handler.handle_one_request, handler.parse_request, handler.flush_headers
    arrivals = exchanges.get_arrivals("wsgi", *_HTTP_SERVER)  # like an app of WSGI it has its thread for itself

    @replaces_attribute(handler, "handle_one_request")
    def restore_handle_request(self: Any) -> None:
        vars(self)[EXCHANGE] = None
        error: BaseException | None = None
        try:
            handle(self)
        except BaseException as raised:
            error = raised
            raise
        finally:
            exchange: Exchange | None = vars(self).pop(EXCHANGE, None)
            if exchange is not None:
                _stop_counting_parts(self.wfile)
                if isinstance(error, ConnectionError):
                    exchange.end_incomplete()
                elif error is not None:
                    exchange.end(error)
                exchange.end_after_server()

    @replaces_attribute(handler, "parse_request")
    def restore_parse_request(self: Any) -> Any:
        is_whole = parse(self)
        if is_whole and EXCHANGE in vars(self) and not hasattr(self, "run_wsgi"):
            exchange = vars(self)[EXCHANGE] = arrivals.begin_exchange(self)
            if exchange is not None:
                _count_written_parts(self.wfile, exchange)
        return is_whole

    def note_status(handler: Any, code: Any, *_: Any, **__: Any) -> None:
        if code >= 200 and (exchange := exchange_of(handler)) is not None:
            exchange.begin_answer(code, None)

    @replaces_attribute(handler, "flush_headers")
    def restore_flush_headers(self: Any) -> None:
        exchange = exchange_of(self)
        if exchange is None:
            flush(self)
            return
        lines = getattr(self, "_headers_buffer", [])
        exchange.is_events = any(b"text/event-stream" in line for line in lines)
        if exchange.timing is not None and lines and lines[-1] == b"\r\n":
            lines.insert(-1, f"{SERVER_TIMING}: {exchange.timing.make_header_value(exchange)}\r\n".encode())
        _stop_counting_parts(self.wfile)
        flush(self)
        _count_written_parts(self.wfile, exchange)

    undo_status = note_calls(handler, "send_response_only", note_status)
    return [restore_handle_request, restore_parse_request, undo_status, restore_flush_headers]


def _count_written_parts(file: Any, exchange: Exchange) -> None:
    write = file.write

    def write_and_count(data: Any) -> Any:
        exchange.add_part(data)
        return write(data)

    getattr(file, "__dict__", {})["write"] = write_and_count


def _stop_counting_parts(file: Any) -> None:
    getattr(file, "__dict__", {}).pop("write", None)


_SCHEMES = ("http", "https")
_HTTP_SERVER = make_request_readers(
    lambda handler: (handler.command, _SCHEMES[hasattr(handler.connection, "cipher")], handler.server.server_address),
    attrgetter("headers"),
    lambda handler: handler.path.partition("?")[0],
    lambda handler: handler.path.partition("?")[2],
    lambda handler: handler.client_address[0] if handler.client_address else None,
)

# aiohttp


def _attach_aiohttp(module: Any, exchanges: Exchanges) -> list[Undo]:
    owner, base = module.RequestHandler, module.StreamWriter
    handle = owner._handle_request
    http, websocket = (exchanges.get_arrivals(kind, *_AIOHTTP) for kind in ("http", "websocket"))

    class StreamWriter(base):  # type: ignore[misc, valid-type]
        exchange: Exchange | None = None
        method = ""

        def write_headers(self, status_line: Any, headers: Any, *args: Any) -> Any:
            exchange = self.exchange
            if exchange is not None:
                try:
                    exchange.begin_answer(int(status_line.split(" ", 2)[1]), headers.get("Content-Type"))
                    if exchange.timing is not None:
                        exchange.timing.decide_if_comment_fits(headers.items(), self.method)
                        headers = headers.copy()  # an application may send them again
                        headers.add(SERVER_TIMING, exchange.timing.make_header_value(exchange))
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
                chunk = bytes(chunk) + self.exchange.timing.make_comment(self.exchange)
            return super().write_eof(chunk)

    StreamWriter.__qualname__, StreamWriter.__module__ = base.__qualname__, base.__module__

    @replaces_attribute(owner, "_handle_request")
    async def restore_handle_request(self: Any, request: Any, start_time: Any, request_handler: Any) -> Any:
        writer = request._payload_writer
        if not isinstance(writer, StreamWriter) or request._message is module.ERROR:
            return await handle(self, request, start_time, request_handler)  # a malformed request
        is_http = not _is_websocket(request.headers)
        exchange = (http if is_http else websocket).begin_exchange(request)
        if exchange is None:
            return await handle(self, request, start_time, request_handler)
        writer.exchange, writer.method = exchange, request.method
        try:
            result = await exchange.track_waits(handle(self, request, start_time, request_handler))
        except BaseException as error:
            exchange.end_after_server(
                getattr(exchange, "failure", None) or error, is_gone=is_transport_closed(self.transport)
            )
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
        exchange.end_after_server(is_gone=is_transport_closed(self.transport), in_parts=is_http)
        return result

    def note_error(_: Any, request: Any, status: int = 500, exc: Any = None, *args: Any, **kwargs: Any) -> None:
        exchange = getattr(request._payload_writer, "exchange", None)
        if exchange is not None:
            exchange.failure = exc or sys.exc_info()[1]  # a time-out is not passed as an argument

    undo_writer = replace_attribute(module, "StreamWriter", StreamWriter)
    return [restore_handle_request, note_calls(owner, "handle_error", note_error), undo_writer]


def _attach_aiohttp_websocket(module: Any, _: Exchanges) -> list[Undo]:
    owner = module.WebSocketResponse

    def note_message(websocket: Any, data: Any, *args: Any, **kwargs: Any) -> None:
        exchange = getattr(websocket._payload_writer, "exchange", None)
        if exchange is not None and exchange.is_open:
            exchange.add_part(data)

    names = ("send_str", "send_bytes", "send_frame")
    return [note_calls(owner, name, note_message) for name in names if hasattr(owner, name)]


def _read_aiohttp_arrival(request: Any) -> tuple[str, str, Any]:
    transport = request.transport
    if transport is None:
        return request.method, "http", None
    scheme = "http" if transport.get_extra_info("sslcontext") is None else "https"
    return request.method, scheme, transport.get_extra_info("sockname")


_AIOHTTP = make_request_readers(_read_aiohttp_arrival, *map(attrgetter, ("headers", "path", "query_string", "remote")))

# Tornado

TORNADO_ROUTE = "_instrument_route"
"""The attribute of Tornado's request object that stores the route."""


def _attach_tornado(module: Any, exchanges: Exchanges) -> list[Undo]:
    handler, connection = module.RequestHandler, sys.modules["tornado.http1connection"].HTTP1Connection
    matcher = sys.modules["tornado.routing"].PathMatches
    execute, match, write_headers, finish = handler._execute, matcher.match, connection.write_headers, connection.finish
    http, websocket = (exchanges.get_arrivals(kind, *_TORNADO) for kind in ("http", "websocket"))

    @replaces_attribute(matcher, "match")
    def restore_match(self: Any, request: Any) -> Any:
        groups = match(self, request)
        if groups is not None:
            setattr(request, TORNADO_ROUTE, self.regex.pattern.removesuffix("$"))
        return groups

    @replaces_attribute(handler, "_execute")
    async def restore_execute(self: Any, transforms: Any, *args: Any, **kwargs: Any) -> None:
        request = self.request
        is_http = not _is_websocket(request.headers)
        is_passed_on = isinstance(self, module.FallbackHandler)  # to a server of its own, such as a container of WSGI
        exchange = None if is_passed_on else (http if is_http else websocket).begin_exchange(request)
        if exchange is None:
            await execute(self, transforms, *args, **kwargs)
            return
        if hasattr(request, TORNADO_ROUTE):
            exchange.set_route(getattr(request, TORNADO_ROUTE))
        setattr(request.connection, EXCHANGE, exchange)

        def end_request(error: BaseException | None) -> None:
            close_code = getattr(self, "close_code", None)
            is_gone = _has_client_closed(request.connection) if is_http else close_code is None
            if close_code is not None:
                exchange.facts[CLOSE_CODE] = close_code
            elif is_gone and exchange.status in (0, 101) and error is getattr(exchange, "failure", None):
                exchange.end_incomplete()
            if error is not None or is_gone or self._finished or self._auto_finish:
                exchange.end_after_server(error, is_gone=is_gone, in_parts=is_http)

        await exchange.serve(execute(self, transforms, *args, **kwargs), end_request)

    def note_exception(handler: Any, error: BaseException) -> None:
        exchange = getattr(handler.request.connection, EXCHANGE, None)  # perhaps after the answer
        if exchange is not None and not isinstance(error, module.HTTPError | module.Finish):
            exchange.failure = error

    @replaces_attribute(connection, "write_headers")
    def restore_write_headers(self: Any, start_line: Any, headers: Any, chunk: Any = None) -> Any:
        exchange = exchange_of(self)
        if exchange is not None:
            exchange.begin_answer(start_line.code, headers.get("Content-Type"))
            if chunk:
                # A handler that has finished writes its whole answer at once.
                exchange.add_part(chunk, is_last=headers.get("Content-Length") == str(len(chunk)))
            if exchange.timing is not None and exchange.status >= 200:
                headers = headers.copy()
                headers.add(SERVER_TIMING, exchange.timing.make_header_value(exchange))
        return write_headers(self, start_line, headers, chunk)

    @replaces_attribute(connection, "finish")
    def restore_finish(self: Any) -> None:
        finish(self)
        exchange = exchange_of(self)
        if exchange is not None and 200 <= exchange.status < 500 and getattr(exchange, "failure", None) is None:
            exchange.end_after_server(is_gone=_has_client_closed(self))

    undo_exception = note_calls(handler, "_handle_request_exception", note_exception)
    undo_part = note_calls(connection, "write", count_part)
    return [restore_match, restore_execute, undo_exception, restore_write_headers, undo_part, restore_finish]


def _attach_tornado_websocket(module: Any, _: Exchanges) -> list[Undo]:
    handler, protocol = module.WebSocketHandler, module.WebSocketProtocol
    write_message, run = handler.write_message, protocol._run_callback

    @replaces_attribute(handler, "write_message")
    def restore_write_message(self: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
        future = write_message(self, message, *args, **kwargs)
        exchange = exchange_of(self.request.connection)
        if exchange is not None:
            exchange.add_part(message)
        return future

    @replaces_attribute(protocol, "_run_callback")
    def restore_run_callback(self: Any, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        request = getattr(self.handler, "request", None)
        exchange: Exchange | None = getattr(getattr(request, "connection", None), EXCHANGE, None)
        return run(self, callback if exchange is None else _note_failures(callback, exchange), *args, **kwargs)

    return [restore_write_message, restore_run_callback]


def _has_client_closed(connection: Any) -> bool:
    stream = connection.stream
    return stream is None or bool(stream.closed())


def _read_tornado_arrival(request: Any) -> tuple[str, str, Any]:
    socket = getattr(request.connection.stream, "socket", None)
    return request.method, request.protocol, None if socket is None else socket.getsockname()


_TORNADO = make_request_readers(_read_tornado_arrival, *map(attrgetter, ("headers", "path", "query", "remote_ip")))

# Sanic


def _attach_sanic_protocol(module: Any, exchanges: Exchanges) -> list[Undo]:
    mixin = module.HttpProtocolMixin
    setup = mixin._setup
    http, websocket = (exchanges.get_arrivals(kind, *_SANIC) for kind in ("http", "websocket"))

    @replaces_attribute(mixin, "_setup")
    def restore_sanic_setup(self: Any) -> None:
        setup(self)
        handle = self.request_handler

        async def handle_and_record(request: Any) -> None:
            is_http = not _is_websocket(request.headers)
            exchange = (http if is_http else websocket).begin_exchange(request)
            if exchange is None:
                await handle(request)
                return

            def end_request(error: BaseException | None) -> None:
                websocket_of = getattr(self, "websocket", None)
                close_code = None if websocket_of is None else websocket_of.ws_proto.close_rcvd
                is_gone = is_transport_closed(request.transport)
                if close_code is not None:
                    exchange.facts[CLOSE_CODE] = close_code.code
                elif exchange.status == 101 and is_gone and getattr(exchange, "failure", None) is None:
                    exchange.end_incomplete()
                exchange.end_after_server(error, is_gone=is_gone, in_parts=is_http)

            await exchange.serve(handle(request), end_request)

        self.request_handler = handle_and_record

    return [restore_sanic_setup]


def _note_answer_part(response: Any, data: Any = None, end_stream: Any = None) -> None:
    exchange = current_exchange()
    if exchange is None or response.stream is None or response.stream.send is None:
        return
    try:
        begins = not exchange.status
        part = data or (getattr(response, "body", None) if begins else None)
        if begins:
            exchange.begin_answer(response.status, response.content_type or response.headers.get("content-type"))
            if exchange.timing is not None:
                response.headers.add(SERVER_TIMING, exchange.timing.make_header_value(exchange))
        if part:
            exchange.add_part(part.encode() if isinstance(part, str) else part, is_last=begins and not data)
    except Exception:
        exchange.count_unread()


def _note_sanic_failure(_: Any, exception: Any, *args: Any, **kwargs: Any) -> None:
    """Note an exception before Sanic looks for its error handler."""
    if (exchange := current_exchange()) is not None:
        exchange.failure = exception


def _attach_sanic_websocket(module: Any, _: Exchanges) -> list[Undo]:
    owner = module.WebSocketProtocol
    shake_hands = owner.websocket_handshake

    @replaces_attribute(owner, "websocket_handshake")
    async def restore_handshake(self: Any, *args: Any, **kwargs: Any) -> Any:
        connection = await shake_hands(self, *args, **kwargs)
        if (exchange := current_exchange()) is not None:
            exchange.begin_answer(101, None)
            setattr(connection, EXCHANGE, exchange)
        return connection

    return [restore_handshake]


def _attach_sanic_app(module: Any, _: Exchanges) -> list[Undo]:
    """Note the exceptions of websocket handlers. Sanic only logs such exceptions."""
    owner = module.Sanic
    run = owner._websocket_handler

    @replaces_attribute(owner, "_websocket_handler")
    async def restore_websocket_handler(self: Any, handler: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        exchange = current_exchange()
        noted = handler if exchange is None else _note_failures(handler, exchange)
        await run(self, noted, request, *args, **kwargs)

    return [restore_websocket_handler]


_SANIC = make_request_readers(
    lambda request: (request.method, request.scheme, getattr(request.conn_info, "sockname", None)),
    *map(attrgetter, ("headers", "path", "query_string", "ip")),
)


def _attach_note_before_call(
    class_name: str, method: str, note: Callable[..., None], module: Any, _: Exchanges
) -> list[Undo]:
    return [note_calls(getattr(module, class_name), method, note)]


SEAMS: Mapping[str, Mapping[str, Attach]] = {
    "http_server": {"http.server": _attach_http_server},
    "aiohttp": {"aiohttp.web_protocol": _attach_aiohttp, "aiohttp.web_ws": _attach_aiohttp_websocket},
    "tornado": {"tornado.web": _attach_tornado, "tornado.websocket": _attach_tornado_websocket},
    "sanic": {
        "sanic.app": _attach_sanic_app,
        "sanic.handlers.error": partial(_attach_note_before_call, "ErrorHandler", "_lookup", _note_sanic_failure),
        "sanic.response.types": partial(_attach_note_before_call, "BaseHTTPResponse", "send", _note_answer_part),
        "sanic.server.protocols.http_protocol": _attach_sanic_protocol,
        "sanic.server.protocols.websocket_protocol": _attach_sanic_websocket,
        "sanic.server.websockets.impl": partial(_attach_note_before_call, "WebsocketImplProtocol", "send", count_part),
    },
}
"""The functions that instrument the modules of servers, by kind of server and module name."""
