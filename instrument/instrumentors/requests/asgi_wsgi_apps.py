"""Record the requests of ASGI and WSGI apps, and the websockets of ASGI apps: each is one span.

A span begins when the server calls the app, so it includes all middleware. It ends when the last part of the answer has
been sent. Later work of the app, such as background tasks, is not part of the span.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextvars import Context, copy_context
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument.instrumentors.requests.exchange import (
    CLOSE_CODE,
    CURRENT,
    SERVER_TIMING,
    Arrival,
    Arrivals,
    Exchange,
    Exchanges,
    Reading,
    ServedApp,
)
from instrument.instrumentors.requests.propagation import Caller, pair_with_tracestate
from instrument.recorder.recorder import header_values
from instrument.recorder.wrapping import FIRST_OF_SERVER
from instrument.runtime.faults import FAULTS

if TYPE_CHECKING:
    from instrument.instrumentors.requests.server_timing import AnswerTimings

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

KINDS = ("http", "websocket")
"""The types of ASGI scopes that are recorded."""

PLAIN = (b"traceparent", b"tracestate", b"content-length")
"""The headers that are read for every request."""

NOWHERE = (None, None)
CONTENT_TYPE, CONTENT_LENGTH = (b"content-type",), (b"content-length",)

TIMINGS, TRAILERS = b"server-timing", "http.response.trailers"

WHOLE_FILE = "http.response.pathsend"
FILES = (WHOLE_FILE, "http.response.zerocopysend")
"""The types of ASGI messages by which an app sends a file. The first type always ends the answer."""


class AsgiApp(ServedApp):
    """A proxy of an ASGI app that records its requests and websockets."""

    def __init__(self, app: Any, exchanges: Exchanges) -> None:
        super().__init__(app, exchanges)
        self._parts = app, exchanges.recorder, get_arrivals(exchanges)

    def __call__(self, scope: Message, receive: Receive, send: Send) -> Awaitable[Any]:
        app, recorder, arrivals = self._parts  # each attribute takes 0.05 us, as the class has a `__getattr__`
        kind = arrivals.get(scope["type"])
        if kind is None or not recorder.on:
            return app(scope, receive, send)  # type: ignore[no-any-return]
        return _serve_and_record(app, kind, scope, receive, send)


async def _serve_and_record(app: Any, arrivals: Arrivals, scope: Message, receive: Receive, send: Send) -> Any:
    exchange = arrivals.begin_exchange(scope)
    if exchange is None:
        return await app(scope, receive, send)
    is_http = scope["type"] == "http"
    channel = Websocket() if not is_http else Http() if exchange.timing is None else TimedHttp(scope)
    channel.exchange, channel.server_receive, channel.server_send = exchange, receive, send
    try:
        answer = app(scope, receive if is_http else channel.receive, channel.send)
        result = await exchange.track_waits(answer)
    except BaseException as error:
        if not isinstance(error, Exception) and getattr(channel, "is_complete", False):
            channel.end()
        exchange.end_with_exception(error)
        raise
    if exchange.frame is not None:
        is_served = not is_http or hasattr(channel, "is_complete") or hasattr(channel, "is_last_cancelled")
        channel.end() if is_served else exchange.end_incomplete()
    return result


class AsgiChannel:
    """Passes the messages of one request between the server and the app.

    Contexts may keep an exchange for a long time, so an exchange must not refer to a channel.
    """

    __slots__ = ("exchange", "server_receive", "server_send")

    exchange: Exchange
    server_receive: Receive
    server_send: Send

    def receive(self) -> Awaitable[Message]:
        return self.server_receive()

    def send(self, message: Message) -> Awaitable[None]:
        return self.server_send(message)

    def end(self) -> None:
        self.exchange.end()


class Http(AsgiChannel):
    """The messages of one HTTP request. Messages from the server are passed on unread."""

    __slots__ = ("_headers", "_is_events", "is_complete", "is_last_cancelled")

    is_complete: bool
    is_last_cancelled: bool

    def send(self, message: Message) -> Awaitable[None]:
        exchange, is_last = self.exchange, False
        try:
            kind = message["type"]
            if kind == "http.response.body":
                is_last = "more_body" not in message or not message["more_body"]  # half of what `get` takes
                body = message.get("body", b"")
                exchange.answer_bytes += len(body)
                if body and (exchange.stream is not None or not is_last):
                    if exchange.stream is None:
                        self._is_events = self._is_event_stream()
                    exchange.note_sent_items((body.count(b"\n\n") or 1) if self._is_events else 1)
            elif kind in FILES:
                is_last = kind == WHOLE_FILE or not message.get("more_body")
                exchange.answer_bytes += message.get("count") or self._measure_file_bytes(message)
            elif kind == "http.response.start":
                self._headers = message.get("headers", ())
                exchange.set_status(message["status"])
        except Exception:
            exchange.count_unread()
        return self._send_last_message(message) if is_last else self.server_send(message)

    def _is_event_stream(self) -> bool:
        try:
            return (self._find_header(CONTENT_TYPE) or b"").startswith(b"text/event-stream")
        except Exception:
            self.exchange.count_unread()
            return False

    def _find_header(self, names: tuple[bytes]) -> bytes | None:
        headers = self._headers
        (value,) = header_values(headers, names) if iter(headers) is not headers else (None,)
        return value

    def _measure_file_bytes(self, message: Message) -> int:
        length = self._find_header(CONTENT_LENGTH)
        if length is not None and length.isdigit():
            return int(length)
        return Path(message["path"]).stat().st_size if "path" in message else os.fstat(message["file"].fileno()).st_size

    async def _send_last_message(self, message: Message) -> None:
        try:
            await self.server_send(message)
        except BaseException as error:  # hypercorn reports a disconnect within the last send: Starlette then cancels it
            if not isinstance(error, Exception):
                self.is_last_cancelled = True
            raise
        if self.exchange.status >= FIRST_OF_SERVER:
            self.is_complete = True
        else:
            self.end()

    def end(self) -> None:
        exchange = self.exchange
        if exchange.stream is None or self._is_events:
            exchange.end()
        else:
            exchange.end_after_parts()


class TimedHttp(Http):
    """The messages of a request whose answer has a `Server-Timing` header. A stream has its final timings in a trailer,
    if server and client accept one."""

    __slots__ = ("_has_own_trailer", "_method", "_takes_trailer", "_timings_at_end")

    def __init__(self, scope: Message) -> None:
        (accepted,) = header_values(_read_headers(scope["headers"], scope), (b"te",))
        is_known = TRAILERS in (scope.get("extensions") or ())
        self._takes_trailer = is_known and accepted is not None and b"trailers" in accepted.lower()
        self._method = scope.get("method", "")
        self._has_own_trailer, self._timings_at_end = False, b""

    def send(self, message: Message) -> Awaitable[None]:
        try:
            message = self._add_timings(message)
        except Exception as fault:
            FAULTS.note("server timing", fault)
        return super().send(message)

    def _add_timings(self, message: Message) -> Message:
        timing, kind = self.exchange.timing, message["type"]
        if timing is None:
            return message
        if kind == "http.response.start":
            pairs = [*message.get("headers", ()), (TIMINGS, timing.make_header_value(self.exchange).encode())]
            timing.decide_if_comment_fits(pairs, self._method)
            (length,) = header_values(pairs, CONTENT_LENGTH)
            has_parts = length is None and self._method != "HEAD" and message["status"] not in (204, 304)
            if self._takes_trailer and has_parts and not message.get("trailers"):
                self._has_own_trailer, message = True, {**message, "trailers": True}
                pairs.append((b"trailer", TIMINGS))
            return {**message, "headers": pairs}
        if kind == "http.response.body":
            timing.note_body_part(message.get("body", b""))
        elif kind == TRAILERS and self._timings_at_end and not message.get("more_trailers"):
            return {**message, "headers": [*message.get("headers", ()), (TIMINGS, self._timings_at_end)]}
        return message

    async def _send_last_message(self, message: Message) -> None:
        timing = self.exchange.timing
        if timing is not None and self.exchange.is_open:
            if self._takes_trailer:
                self._timings_at_end = timing.make_header_value(self.exchange).encode()
            elif message["type"] == "http.response.body" and (comment := timing.make_comment(self.exchange)):
                message = {**message, "body": message.get("body", b"") + comment}
        if self._has_own_trailer:
            await self.server_send(message)
            message = {"type": TRAILERS, "headers": [(TIMINGS, self._timings_at_end)], "more_trailers": False}
        await super()._send_last_message(message)


class Websocket(AsgiChannel):
    """The messages of one websocket. Each message from the app counts as an item of the answer."""

    __slots__ = ()

    async def receive(self) -> Message:
        message = await self.server_receive()
        try:
            if message["type"] == "websocket.disconnect":
                self.exchange.facts[CLOSE_CODE] = message.get("code", 1005)
        except Exception:
            self.exchange.count_unread()
        return message

    async def send(self, message: Message) -> None:
        exchange = self.exchange
        try:
            kind = message["type"]
            if kind == "websocket.send":
                exchange.answer_bytes += len(message.get("bytes") or message.get("text") or b"")
                exchange.note_sent_items()
            elif kind == "websocket.accept":
                exchange.set_status(101)
            elif kind == "websocket.close" and not exchange.status:
                exchange.set_status(403)  # servers answer so if the app refuses a websocket (ASGI, websocket spec)
            elif kind == "websocket.http.response.start":
                exchange.set_status(message["status"])
        except Exception:
            exchange.count_unread()
        await self.server_send(message)


def get_arrivals(exchanges: Exchanges) -> Mapping[str, Arrivals]:
    return {kind: exchanges.get_arrivals(kind, _read_path, _read_basic_facts, _read_all_facts) for kind in KINDS}


_read_path = itemgetter("path")


def _read_basic_facts(scope: Message) -> tuple[Arrival, Caller | None, bytes | None]:
    headers = scope["headers"]
    if type(headers) is not list:
        headers = _read_headers(headers, scope)
    parent, state, length = header_values(headers, PLAIN)
    address, port = scope.get("server") or NOWHERE
    # A websocket begins with a GET. Daphne names no scheme for it.
    scheme = scope.get("scheme") or ("http" if scope["type"] == "http" else "ws")
    arrival = scope.get("method", "GET"), scheme, address, port
    return arrival, parent if state is None else pair_with_tracestate(parent, state), length


def _read_all_facts(scope: Message, names: tuple[str, ...]) -> Reading:
    headers, client = dict(_read_headers(scope["headers"], scope)), scope.get("client")
    values = {
        "url.path": str(scope["path"]),
        "url.query": scope.get("query_string", b"").decode("latin-1"),
        "client.address": "" if client is None else str(client[0]),
        "user_agent.original": headers.get(b"user-agent", b"").decode("latin-1"),
    }
    return _read_basic_facts(scope)[0], headers, {name: values[name] for name in names if values[name]}


def _read_headers(headers: Any, scope: Message) -> Any:
    """Return the headers of a request. If they are an iterator, put a new iterator for the app into the scope."""
    if iter(headers) is not headers:
        return headers
    pairs = tuple(headers)
    scope["headers"] = iter(pairs)
    return pairs


# WSGI

StartResponse = Callable[..., Any]

ARRIVAL = itemgetter("REQUEST_METHOD", "wsgi.url_scheme", "SERVER_NAME", "SERVER_PORT")

STATUSES = {str(status): status for status in range(100, 1000)}
"""HTTP statuses as numbers, by the first three characters of a status line."""


class WsgiApp(ServedApp):
    """A proxy of a WSGI app that records its requests."""

    def __init__(self, app: Any, exchanges: Exchanges) -> None:
        super().__init__(app, exchanges)
        readers = _path_of_environ, _read_basic_environ_facts, _read_all_environ_facts
        self._parts = app, exchanges.get_arrivals("wsgi", *readers)

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        app, arrivals = self._parts  # each attribute takes 0.05 us, as the class has a `__getattr__`
        exchange = arrivals.begin_exchange(environ)
        if exchange is None:
            return app(environ, start_response)  # type: ignore[no-any-return]
        if exchange.timing is not None:
            start_response = _wrap_start_response(exchange.timing, exchange, environ, start_response)

        def start_and_note_status(*arguments: Any, **kwargs: Any) -> Any:
            try:
                exchange.set_status(STATUSES.get(arguments[0][:3], 0))
            except Exception:
                exchange.set_status(0)
            if kwargs or len(arguments) != 2:
                return start_response(*arguments, **kwargs)
            status, headers = arguments
            return start_response(status, headers)  # passing `*arguments` takes 0.1 us more

        try:
            body = app(environ, start_and_note_status)
        except BaseException as error:
            exchange.end_with_exception(error)
            raise
        if type(body) is list or type(body) is tuple:
            try:
                exchange.answer_bytes = len(body[0]) if len(body) == 1 else sum(map(len, body))
            except Exception:
                exchange.count_unread()
            exchange.end()
            return body
        if isinstance(wrapper := environ.get("wsgi.file_wrapper"), type) and isinstance(body, wrapper):
            exchange.end()
            return body  # type: ignore[return-value]
        return _Body(body, exchange)


def _wrap_start_response(
    timing: AnswerTimings, exchange: Exchange, environ: dict[str, Any], start_response: StartResponse
) -> StartResponse:
    def start_with_timings(*arguments: Any, **kwargs: Any) -> Any:
        try:
            status, headers, *more = arguments
            timing.decide_if_comment_fits(headers, environ["REQUEST_METHOD"])
            arguments = status, [*headers, (SERVER_TIMING, timing.make_header_value(exchange))], *more
        except Exception as fault:
            FAULTS.note("server timing", fault)
        return start_response(*arguments, **kwargs)

    return start_with_timings


class InterleavedApp(WsgiApp):
    """A proxy of a WSGI app, for servers that begin requests while they send other answers on the same thread."""

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        context = copy_context()
        body = context.run(super().__call__, environ, start_response)
        return _BodyInContext(body, context) if type(body) is _Body else body


def _path_of_environ(environ: dict[str, Any]) -> str:
    path: str = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    return path


def _read_basic_environ_facts(environ: dict[str, Any]) -> tuple[Arrival, Caller | None, str | None]:
    caller = environ.get("HTTP_TRACEPARENT")
    if "HTTP_TRACESTATE" in environ:
        caller = pair_with_tracestate(caller, environ["HTTP_TRACESTATE"])
    return ARRIVAL(environ), caller, environ.get("CONTENT_LENGTH")


def _read_all_environ_facts(environ: dict[str, Any], names: tuple[str, ...]) -> Reading:
    values = {name: _path_of_environ(environ) if name == "url.path" else environ.get(NAMED[name], "") for name in names}
    texts = {name[5:]: text for name, text in environ.items() if name.startswith("HTTP_")}
    texts |= {"CONTENT_LENGTH": environ.get("CONTENT_LENGTH")}
    pairs = [(name.replace("_", "-").lower(), text) for name, text in texts.items() if text]
    headers = {name.encode(): text.encode("latin-1") for name, text in pairs}
    return ARRIVAL(environ), headers, {name: value for name, value in values.items() if value}


NAMED = {"url.query": "QUERY_STRING", "client.address": "REMOTE_ADDR", "user_agent.original": "HTTP_USER_AGENT"}
"""The key in the WSGI environment for each request attribute that a rule can select."""


class _Body:
    """A proxy of an answer's body. It counts the parts, and ends the exchange."""

    __slots__ = ("_body", "_exchange", "_items")

    def __init__(self, body: Iterable[bytes], exchange: Exchange) -> None:
        self._body = body
        self._exchange = exchange
        self._items: Iterator[bytes] | None = None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        exchange = self._exchange
        token = CURRENT.set(exchange)
        try:
            if self._items is None:
                self._items = iter(self._body)
            part = next(self._items)
        except StopIteration:
            if exchange.timing is not None and (comment := exchange.timing.make_comment(exchange)):
                return comment
            exchange.end_after_parts()
            raise
        except BaseException as error:
            exchange.end(error)
            raise
        finally:
            CURRENT.reset(token)
        try:
            if exchange.timing is not None:
                exchange.timing.note_body_part(part)
            exchange.answer_bytes += len(part)
            if part:
                exchange.note_sent_items()
        except Exception:
            exchange.count_unread()
        return part

    def __del__(self) -> None:
        """End the exchange if the server has dropped the body without closing it."""
        self._exchange.end_incomplete()

    def close(self) -> None:
        exchange = self._exchange
        token = CURRENT.set(exchange)
        try:
            close = getattr(self._body, "close", None)
            if close is not None:
                close()
        except BaseException as error:
            exchange.end(error)
            raise
        finally:
            CURRENT.reset(token)
            if self._items is not None:
                exchange.end_incomplete()
            exchange.end()


class _BodyInContext:
    """A proxy of an answer's body. Each part is made in the context of the request."""

    __slots__ = ("_body", "_context")

    def __init__(self, body: _Body, context: Context) -> None:
        self._body = body
        self._context = context

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        return self._context.run(self._body.__next__)

    def close(self) -> None:
        self._context.run(self._body.close)
