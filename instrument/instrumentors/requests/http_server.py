"""Record the requests of Python's http.server: each is one span, from its parsed headers to the handler's end.

Requests are named by their methods, because a `BaseHTTPRequestHandler` has no routes. If the handler raises, there is
no answer and no status. Handlers of werkzeug and wsgiref are recorded as WSGI.
"""

from __future__ import annotations

from typing import Any

from instrument.instrumentors.functions import Undo, replaces
from instrument.instrumentors.requests.exchange import EXCHANGE, SERVER_TIMING, Arrival, Exchange, Exchanges, reads


def attach(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Record the requests of all handlers, except those whose class overrides `handle_one_request`."""
    handler = module.BaseHTTPRequestHandler
    handle, parse = handler.handle_one_request, handler.parse_request
    respond, flush = handler.send_response_only, handler.flush_headers
    arrivals = exchanges.get_arrivals("wsgi", *READS)  # like an app of WSGI it has its thread for itself

    @replaces(handler, "handle_one_request")
    def undo_handle(self: Any) -> None:
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
                getattr(self.wfile, "__dict__", {}).pop("write", None)
                if isinstance(error, ConnectionError):
                    exchange.break_off()
                elif error is not None:
                    exchange.end(error)
                exchange.finish()

    @replaces(handler, "parse_request")
    def undo_parse(self: Any) -> Any:
        is_whole = parse(self)
        if is_whole and EXCHANGE in vars(self) and not hasattr(self, "run_wsgi"):
            exchange = vars(self)[EXCHANGE] = arrivals.begin(self)
            if exchange is not None:
                _count_parts(self.wfile, exchange)
        return is_whole

    @replaces(handler, "send_response_only")
    def undo_respond(self: Any, code: Any, message: Any = None) -> None:
        exchange = vars(self).get(EXCHANGE)
        if exchange is not None and code >= 200:
            exchange.begin_answer(code, None)
        respond(self, code, message)

    @replaces(handler, "flush_headers")
    def undo_flush(self: Any) -> None:
        exchange = vars(self).get(EXCHANGE)
        if exchange is None:
            flush(self)
            return
        lines = getattr(self, "_headers_buffer", [])
        exchange.is_events = any(b"text/event-stream" in line for line in lines)
        if exchange.timing is not None and lines and lines[-1] == b"\r\n":
            lines.insert(-1, f"{SERVER_TIMING}: {exchange.timing.text(exchange)}\r\n".encode())
        getattr(self.wfile, "__dict__", {}).pop("write", None)
        flush(self)
        _count_parts(self.wfile, exchange)

    return [undo_handle, undo_parse, undo_respond, undo_flush]


def _count_parts(file: Any, exchange: Exchange) -> None:
    """Count each part that is written to a handler's file as a part of the answer."""
    write = file.write

    def write_counted(data: Any) -> Any:
        exchange.add_part(data)
        return write(data)

    getattr(file, "__dict__", {})["write"] = write_counted


def _read_arrival(handler: Any) -> Arrival:
    address = handler.server.server_address
    host, port = address[:2] if isinstance(address, tuple) else (address or None, None)
    return handler.command, "https" if hasattr(handler.connection, "cipher") else "http", host, port


READS = reads(
    _read_arrival,
    lambda handler: handler.headers,
    lambda handler: handler.path.partition("?")[0],
    lambda handler: handler.path.partition("?")[2],
    lambda handler: handler.client_address[0] if handler.client_address else None,
)
