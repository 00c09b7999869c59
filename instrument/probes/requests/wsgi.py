"""WSGI: each request that a server hands to its app, as one span from the call to the end of the body.

A body that is a list or tuple is whole when the app returns it, and is handed on as it is; so is a file in the server's
own wrapper, which the server may send past Python. Any other body is iterated through us, and ends when it is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from instrument.probes.requests.exchange import (
    CLIENT_GONE,
    CURRENT,
    OUTCOME,
    PORT,
    SCHEME,
    SERVER,
    Exchange,
    Exchanges,
)

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
        path = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
        if not self._exchanges.wanted(path):
            return self.app(environ, start_response)  # type: ignore[no-any-return]
        facts: dict[str, Any] = {SCHEME: environ.get("wsgi.url_scheme", "http")}
        if "SERVER_NAME" in environ:
            facts[SERVER] = environ["SERVER_NAME"]
        if (port := str(environ.get("SERVER_PORT", ""))).isdigit():
            facts[PORT] = int(port)
        for name in self._exchanges.named:
            if told := environ.get(NAMED[name]) or (path if name == "url.path" else ""):
                facts[name] = told
        exchange = self._exchanges.begin("http", environ.get("REQUEST_METHOD", "GET"), _headers(environ), facts)

        def start(status: str, *more: Any, **named: Any) -> Any:
            exchange.status = int(status[:3]) if status[:3].isdigit() else 0
            return start_response(status, *more, **named)

        token = CURRENT.set(exchange)
        try:
            body = self.app(environ, start)
        except BaseException as error:
            exchange.status = exchange.status or 500
            exchange.end(error)
            raise
        finally:
            CURRENT.reset(token)
        if type(body) in (list, tuple):
            exchange.answer_bytes = sum(map(len, body))
            exchange.end()
            return body  # type: ignore[no-any-return]
        if _is_file(body, environ):
            exchange.end()
            return body  # type: ignore[no-any-return]
        return _Body(body, exchange)


NAMED = {
    "url.path": "",
    "url.query": "QUERY_STRING",
    "client.address": "REMOTE_ADDR",
    "user_agent.original": "HTTP_USER_AGENT",
}
"""What a request's environment calls what attributes hold."""


def _headers(environ: dict[str, Any]) -> dict[bytes, bytes]:
    """The headers, by their names in small letters."""
    found = {
        name[5:].replace("_", "-").lower().encode("latin-1"): value.encode("latin-1")
        for name, value in environ.items()
        if name.startswith("HTTP_") and isinstance(value, str)
    }
    if length := environ.get("CONTENT_LENGTH"):
        found[b"content-length"] = str(length).encode("latin-1")
    return found


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
            exchange.end()
            raise
        except BaseException as error:
            exchange.end(error)
            raise
        finally:
            CURRENT.reset(token)
        exchange.answer_bytes += len(part)
        if part:
            exchange.item()
            exchange.is_streamed = exchange.is_streamed or exchange.items > 1
        return part

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
            if exchange.is_open:
                if self._items is not None:
                    exchange.note(OUTCOME, CLIENT_GONE)
                exchange.end()
