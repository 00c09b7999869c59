"""Record the requests of WSGI apps: each is one span, from the server's call of the app to the end of the body.

If the body is a list, a tuple or a file in `wsgi.file_wrapper`, the span ends when the app returns. Any other body is
wrapped, and the span ends when the server closes the body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import Context, copy_context
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from instrument.instrumentors.requests.exchange import (
    CURRENT,
    SERVER_TIMING,
    Arrival,
    Exchange,
    Exchanges,
    ServedApp,
)
from instrument.instrumentors.requests.propagation import Caller, with_state
from instrument.runtime.faults import FAULTS

if TYPE_CHECKING:
    from instrument.instrumentors.requests.server_timing import AnswerTimings

StartResponse = Callable[..., Any]


ARRIVAL = itemgetter("REQUEST_METHOD", "wsgi.url_scheme", "SERVER_NAME", "SERVER_PORT")

STATUSES = {str(status): status for status in range(100, 1000)}
"""The number of each possible status, by the first three characters of a status line."""

LINES_KNOWN = 100

_lines: dict[Any, int] = {}
"""A cache of statuses by whole status lines, with up to `LINES_KNOWN` entries."""


class WsgiApp(ServedApp):
    """A proxy of a WSGI app that records its requests."""

    def __init__(self, app: Any, exchanges: Exchanges) -> None:
        super().__init__(app, exchanges)
        self._parts = app, exchanges.get_arrivals("wsgi", _read_path, _read_plain, _read_all)

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        app, arrivals = self._parts  # each attribute takes 0.05 us, as the class has a `__getattr__`
        exchange = arrivals.begin(environ)
        if exchange is None:
            return app(environ, start_response)  # type: ignore[no-any-return]
        if exchange.timing is not None:
            start_response = _add_timings(exchange.timing, exchange, environ, start_response)

        def start(*arguments: Any, **kwargs: Any) -> Any:
            try:
                exchange.set_status(_lines[arguments[0]])
            except Exception:
                exchange.set_status(_read_status(arguments))
            if kwargs or len(arguments) != 2:
                return start_response(*arguments, **kwargs)
            status, headers = arguments
            return start_response(status, headers)  # passing `*arguments` takes 0.1 us more

        try:
            body = app(environ, start)
        except BaseException as error:
            exchange.fail(error)
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


def _add_timings(
    timing: AnswerTimings, exchange: Exchange, environ: dict[str, Any], start_response: StartResponse
) -> StartResponse:
    def start(*arguments: Any, **kwargs: Any) -> Any:
        try:
            status, headers, *more = arguments
            timing.begin_parts(headers, environ["REQUEST_METHOD"])
            arguments = status, [*headers, (SERVER_TIMING, timing.header_text(exchange))], *more
        except Exception as fault:
            FAULTS.note("server timing", fault)
        return start_response(*arguments, **kwargs)

    return start


class InterleavedApp(WsgiApp):
    """A proxy of a WSGI app, for servers that begin requests while they send other answers on the same thread."""

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        context = copy_context()
        body = context.run(super().__call__, environ, start_response)
        return _BodyInContext(body, context) if type(body) is _Body else body


def _read_status(arguments: Sequence[Any]) -> int:
    line = arguments[0] if arguments else None
    if not isinstance(line, str):
        return 0
    status = STATUSES.get(str.__getitem__(line, slice(3)), 0)
    if type(line) is str and len(_lines) < LINES_KNOWN:
        _lines[line] = status
    return status


def _read_path(environ: dict[str, Any]) -> str:
    path: str = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    return path


def _read_plain(environ: dict[str, Any]) -> tuple[Arrival, Caller | None, str | None]:
    caller = environ.get("HTTP_TRACEPARENT")
    if "HTTP_TRACESTATE" in environ:
        caller = with_state(caller, environ["HTTP_TRACESTATE"])
    return ARRIVAL(environ), caller, environ.get("CONTENT_LENGTH")


def _read_all(environ: dict[str, Any], names: tuple[str, ...]) -> tuple[Arrival, Mapping[bytes, bytes], dict[Any, Any]]:
    values = {name: _read_path(environ) if name == "url.path" else environ.get(NAMED[name], "") for name in names}
    return ARRIVAL(environ), _read_headers(environ), {name: value for name, value in values.items() if value}


NAMED = {
    "url.query": "QUERY_STRING",
    "client.address": "REMOTE_ADDR",
    "user_agent.original": "HTTP_USER_AGENT",
}
"""The key in the WSGI environment for each attribute of a request that a rule can name."""


def _read_headers(environ: dict[str, Any]) -> dict[bytes, bytes]:
    texts = {name[5:]: text for name, text in environ.items() if name.startswith("HTTP_")}
    texts |= {"CONTENT_LENGTH": environ.get("CONTENT_LENGTH")}
    return {name.replace("_", "-").lower().encode(): text.encode("latin-1") for name, text in texts.items() if text}


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
            if exchange.timing is not None and (comment := exchange.timing.timings_comment(exchange)):
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
                exchange.timing.note_sent(part)
            exchange.answer_bytes += len(part)
            if part:
                exchange.add_items()
        except Exception:
            exchange.count_unread()
        return part

    def __del__(self) -> None:
        """End the exchange if the server has dropped the body without closing it."""
        self._exchange.break_off()

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
                exchange.break_off()
            exchange.end()


class _BodyInContext:
    """A proxy of a body. It makes the body's parts in the context of the request."""

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
