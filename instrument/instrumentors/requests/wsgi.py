"""WSGI: each request that a server hands to its app, as one span from the call to the end of the body.

A body that is a list or tuple is whole when the app returns it, and is handed on as it is; so is a file in the server's
own wrapper, which the server may send past Python. Any other body is iterated through us, and ends when it is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from instrument.instrumentors.requests.exchange import CURRENT, Exchange, Exchanges
from instrument.instrumentors.requests.traceparent import with_state
from instrument.runtime.faults import FAULTS

StartResponse = Callable[..., Any]


class App:
    """A WSGI application whose requests record; passes them through while off."""

    def __init__(self, app: Any, exchanges: Exchanges) -> None:
        self.app = app
        self._exchanges = exchanges

    def __getattr__(self, name: str) -> Any:
        return getattr(self.app, name)

    def serves(self, exchanges: Exchanges) -> bool:
        """Whether it records for these."""
        return self._exchanges is exchanges

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        exchange = self._begin(environ) if self._exchanges.recorder.on else None
        if exchange is None:
            return self.app(environ, start_response)  # type: ignore[no-any-return]

        def start(status: str, *more: Any, **named: Any) -> Any:
            exchange.status = STATUSES.get(status[:3], 0)
            if named or len(more) != 1:
                return start_response(status, *more, **named)
            return start_response(status, more[0])  # to hand on whatever there is would take 0.1 us more

        try:
            body = self.app(environ, start)
        except BaseException as error:
            exchange.status = exchange.status or 500
            exchange.end(error)
            raise
        if type(body) is list or type(body) is tuple:
            exchange.answer_bytes = len(body[0]) if len(body) == 1 else sum(map(len, body))
            exchange.end()
            return body
        if _is_file(body, environ):
            exchange.end()
            return body  # type: ignore[no-any-return]
        return _Body(body, exchange)

    def _begin(self, environ: dict[str, Any]) -> Exchange | None:
        """Begin the span of a request; None where it is not to be recorded, or for a fault of ours."""
        exchanges = self._exchanges
        try:
            if exchanges.ignores and exchanges.ignored(_path(environ)):
                return None
            method, scheme = environ["REQUEST_METHOD"], environ["wsgi.url_scheme"]
            arrival = "wsgi", method, scheme, environ["SERVER_NAME"], environ["SERVER_PORT"]
            if exchanges.is_plain:
                parent, state = environ.get("HTTP_TRACEPARENT"), environ.get("HTTP_TRACESTATE")
                caller = parent if state is None else with_state(parent, state)
                return exchanges.begin_plain(arrival, caller, environ.get("CONTENT_LENGTH"))
            named = {name: told for name in exchanges.named if (told := _told(environ, name))}
            return exchanges.begin_at(arrival, _Headers(environ), named)
        except Exception as fault:
            FAULTS.note("begin of a request", fault)
            return None


def _path(environ: dict[str, Any]) -> str:
    path: str = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    return path


STATUSES = {str(status): status for status in range(100, 1000)}
"""Statuses by how a status line begins."""


def _told(environ: dict[str, Any], name: str) -> str:
    """What the caller's request says of an attribute, "" where it says nothing."""
    told: str = _path(environ) if name == "url.path" else environ.get(NAMED[name], "")
    return told


NAMED = {
    "url.query": "QUERY_STRING",
    "client.address": "REMOTE_ADDR",
    "user_agent.original": "HTTP_USER_AGENT",
}
"""What a request's environment calls what attributes hold."""


VARIABLES = {
    b"traceparent": "HTTP_TRACEPARENT",
    b"tracestate": "HTTP_TRACESTATE",
    b"content-length": "CONTENT_LENGTH",
}
"""What a request's environment calls the headers that are asked for each time."""


class _Headers(Mapping[bytes, bytes]):
    """The headers in a request's environment, by their names in small letters."""

    __slots__ = ("_environ",)

    def __init__(self, environ: dict[str, Any]) -> None:
        self._environ = environ

    def get(self, name: bytes, default: Any = None) -> Any:
        """The value of one, 0.2 us."""
        variable = VARIABLES.get(name) or "HTTP_" + name.decode().upper().replace("-", "_")
        value = self._environ.get(variable)
        return value.encode("latin-1") if value else default

    def __getitem__(self, name: bytes) -> bytes:
        value: bytes | None = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[bytes]:
        for variable in self._environ:
            if variable.startswith("HTTP_"):
                yield variable[5:].replace("_", "-").lower().encode("latin-1")

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _is_file(body: Any, environ: dict[str, Any]) -> bool:
    wrapper = environ.get("wsgi.file_wrapper")
    return isinstance(wrapper, type) and isinstance(body, wrapper)


class _Body:
    """The body of an answer on its way to the server."""

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
            exchange.end_of_parts()
            raise
        except BaseException as error:
            exchange.end(error)
            raise
        finally:
            CURRENT.reset(token)
        exchange.answer_bytes += len(part)
        if part:
            exchange.item()
        return part

    def __del__(self) -> None:
        """End what its server has dropped."""
        self._exchange.broken_off()

    def close(self) -> None:
        """The server is done with it, perhaps before its end."""
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
                exchange.broken_off()
            exchange.end()
