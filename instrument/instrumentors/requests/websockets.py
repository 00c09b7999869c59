"""Record the connections to servers of the package `websockets`: each is a request that lasts as long as its handler.

The items of a request are the messages that the service sends.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from instrument.instrumentors.profiled_functions import Undo, change_argument, note_calls, replaces_attribute
from instrument.instrumentors.references import rebind_objects
from instrument.instrumentors.requests.exchange import (
    ABNORMAL,
    CLIENT_GONE,
    CLOSE_CODE,
    EXCHANGE,
    Attach,
    Exchange,
    Exchanges,
    count_part,
    make_request_readers,
)
from instrument.runtime.faults import FAULTS

ROUTE = "__instrument_route__"
"""The attribute of a connection that stores the route."""


def attach_server(module: Any, exchanges: Exchanges) -> list[Undo]:
    arrivals = exchanges.get_arrivals("websocket", *READS)
    is_older = hasattr(module, "Serve")
    entry = module.Serve if is_older else module.serve  # a class in some versions
    is_class = isinstance(entry, type)
    owner, name = (entry, "__init__") if is_class else (module, "serve")
    key = "ws_handler" if is_older else "handler"
    connection = module.WebSocketServerProtocol if is_older else module.ServerConnection
    is_async = inspect.iscoroutinefunction(connection.send)
    record = functools.partial(_wrap_handler, arrivals=arrivals, is_async=is_async)
    serve, undo_serve = getattr(owner, name), change_argument(owner, name, int(is_class), record, key)
    undos = [undo_serve, note_calls(connection, "send", count_part)]
    undos += [] if is_older else [_record_refusals(connection, arrivals)]
    if not is_class:
        served = module.serve
        rebind_objects([(serve, served)])  # programs have imported the function itself

        def restore_references() -> None:
            rebind_objects([(served, serve)])

        undos.append(restore_references)
    return undos


def _wrap_handler(handler: Any, arrivals: Any, *, is_async: bool) -> Any:
    """Wrap a handler to record its connections. A handler that is not async runs in a thread."""
    if not callable(handler) or hasattr(handler, EXCHANGE):
        return handler

    @contextmanager
    def record_request(connection: Any) -> Iterator[Exchange | None]:
        exchange: Exchange | None = arrivals.begin_exchange(connection)
        if exchange is not None:
            exchange.begin_answer(101, None)
            setattr(connection, EXCHANGE, exchange)
            if (route := getattr(connection, ROUTE, None)) is not None:
                exchange.set_route(route)
        try:
            yield exchange
        except BaseException as error:
            _end_request(exchange, connection, error)
            raise
        _end_request(exchange, connection)

    async def handle_async(connection: Any, *args: Any) -> Any:
        with record_request(connection) as exchange:
            answer = handler(connection, *args)
            return await (answer if exchange is None else exchange.track_waits(answer))

    def handle_in_thread(connection: Any, *args: Any) -> Any:
        with record_request(connection):
            return handler(connection, *args)

    wrapper: Any = functools.wraps(handler)(handle_async if is_async else handle_in_thread)
    setattr(wrapper, EXCHANGE, True)
    return wrapper


def _end_request(exchange: Exchange | None, connection: Any, error: BaseException | None = None) -> None:
    """End the request of a connection. A closed or lost connection is no error."""
    if exchange is None:
        return
    code = getattr(connection if hasattr(connection, "close_code") else connection.protocol, "close_code", None)
    if code is not None:
        exchange.facts[CLOSE_CODE] = code
    is_closed = error is not None and "ConnectionClosed" in {kind.__name__ for kind in type(error).__mro__}
    if code == ABNORMAL and (error is None or is_closed):
        exchange.end_incomplete(CLIENT_GONE)
    exchange.end_after_server(None if is_closed else error, in_parts=False)


def _record_refusals(connection: Any, arrivals: Any) -> Undo:
    shake_hands = connection.handshake

    def note_refusal(self: Any) -> None:
        response = self.response
        if self.request is None or response is None or response.status_code == 101:
            return
        exchange = arrivals.begin_exchange(self)
        if exchange is not None:
            exchange.begin_answer(response.status_code, None)
            exchange.answer_bytes = len(response.body or b"")
            exchange.end_after_server(
                getattr(self.protocol, "handshake_exc", None) if response.status_code >= 500 else None
            )

    async def shake_hands_async(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            await shake_hands(self, *args, **kwargs)
        finally:
            note_refusal(self)

    def shake_hands_in_thread(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            shake_hands(self, *args, **kwargs)
        finally:  # older versions raise after a refusal
            note_refusal(self)

    is_async = inspect.iscoroutinefunction(shake_hands)
    return replaces_attribute(connection, "handshake")(shake_hands_async if is_async else shake_hands_in_thread)


def _read_headers(connection: Any) -> dict[str, str]:
    request = getattr(connection, "request", None)
    headers = connection.request_headers if request is None else request.headers
    return {name.lower(): value for name, value in headers.raw_items()}


def _split_path(connection: Any) -> tuple[str, str, str]:
    path: str = (getattr(connection, "request", None) or connection).path
    return path.partition("?")


def _read_scheme_address(connection: Any) -> tuple[str, str, Any]:
    transport = getattr(connection, "transport", None)
    socket = getattr(connection, "socket", None)
    secured = getattr(socket, "context", None) if transport is None else transport.get_extra_info("sslcontext")
    address = None
    with suppress(OSError):  # it is closed
        address = connection.local_address
    return "GET", "ws" if secured is None else "wss", address


def _read_client(connection: Any) -> str | None:
    with suppress(OSError):
        if isinstance(address := connection.remote_address, tuple):
            return str(address[0])
    return None


READS = make_request_readers(
    _read_scheme_address,
    _read_headers,
    lambda connection: _split_path(connection)[0],
    lambda connection: _split_path(connection)[2],
    _read_client,
)


def attach_router(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Name connections by the routes of the server's router. The routes are rules of werkzeug."""
    route_request = module.Router.route_request

    @replaces_attribute(module.Router, "route_request")
    def restore_route_request(self: Any, connection: Any, request: Any) -> Any:
        response = route_request(self, connection, request)
        if response is None:
            with FAULTS.guard("route of websockets"):
                adapter = self.url_map.bind(self.get_server_name(connection, request), url_scheme=self.url_scheme)
                path, _, query = request.path.partition("?")
                setattr(connection, ROUTE, adapter.match(path, query_args=query, return_rule=True)[0].rule)
        return response

    return [restore_route_request]


SEAMS: Mapping[str, Mapping[str, Attach]] = {
    "websockets": {
        **{f"websockets.{name}.server": attach_server for name in ("asyncio", "sync", "trio", "legacy")},
        **{f"websockets.{name}.router": attach_router for name in ("asyncio", "sync")},
    }
}
"""The functions that instrument the modules of servers, by kind of server and module name."""
