"""A server reports the faults of an app as without us. Our own faults are counted and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from readback import spans_in

from instrument.instrumentors.requests import asgi_wsgi_apps
from instrument.instrumentors.requests.exchange import Exchanges, Method
from instrument.profile.model import RequestsRule
from instrument.recording.spans import Span
from instrument.runtime.faults import FAULTS

START = {"type": "http.response.start", "status": 200, "headers": []}
BODY = {"type": "http.response.body", "body": b"it"}
CALLER = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
STREAMED = [START, BODY | {"more_body": True}, BODY]


@pytest.fixture
def exchanges(recorder: Any) -> Exchanges:
    return Exchanges(RequestsRule(), recorder)


def ended(recorder: Any) -> Span:
    """The one request, which has ended."""
    assert recorder.open_rows() == []
    (span,) = spans_in(recorder)
    found: Span = span
    return found


# -------------------------------------------------------------------- ASGI


async def strict(message: Any) -> None:
    """A server's `send`, which reads all of a message before it goes on."""
    kind = message["type"]
    if kind == "http.response.start":
        if not 100 <= message["status"] < 600:
            raise RuntimeError("no such status")
        for name, value in message.get("headers", ()):
            name.lower() + b": " + value
    elif kind == "http.response.body":
        b"%x\r\n" % len(message.get("body", b"")) + message.get("body", b"")
    elif kind == "websocket.send":
        (message.get("text") or "").encode() + (message.get("bytes") or b"")
    else:
        raise RuntimeError(f"unexpected {kind}")


async def lenient(message: Any) -> None:
    """A server's `send` that minds nothing."""


def outcome_of(
    serve: Callable[[Any], Any], send: Any, messages: list[Any], kind: str, headers: Any = ()
) -> tuple[Any, ...]:
    """Return the messages that an app could send, and the exception of the last one."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(list(scope["headers"]))
        try:
            for message in messages:
                await send(message)
                seen.append("sent")
        except Exception as error:
            seen.append((type(error), error.args))

    scope = {"type": kind, "method": "GET", "path": "/", "headers": headers}
    asyncio.run(serve(app)(scope, None, send))
    return tuple(seen)


@pytest.mark.parametrize("send", [strict, lenient])
@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        ("http", [START, BODY | {"body": None}]),
        ("http", [START, BODY | {"body": 3}]),
        ("http", [START, BODY | {"body": None, "more_body": True}, BODY]),
        ("http", [{"status": 200}]),
        ("http", [None]),
        ("http", [{"type": ["unhashable"]}]),
        ("http", [{"type": "http.response.start"}, BODY]),
        ("http", [START | {"status": "200"}, BODY]),
        ("http", [START | {"status": None}, BODY]),
        ("http", [START | {"headers": None}, *STREAMED[1:]]),
        ("http", [START | {"headers": [(b"content-type", "text/event-stream")]}, *STREAMED[1:]]),
        ("http", [START | {"headers": [("content-type", "text/event-stream")]}, *STREAMED[1:]]),
        ("http", [START | {"headers": [(b"content-type",)]}, *STREAMED[1:]]),
        ("websocket", [{"type": "websocket.send", "text": 3}]),
        ("websocket", [{"type": "websocket.http.response.start"}]),
        ("websocket", [{"text": "it"}]),
        ("websocket", [None]),
    ],
)
def test_a_wrong_message_of_an_app_gets_the_servers_own_error(
    exchanges: Exchanges, recorder: Any, send: Any, kind: str, messages: list[Any]
) -> None:
    bare = outcome_of(lambda app: app, send, messages, kind)
    assert outcome_of(lambda app: asgi_wsgi_apps.AsgiApp(app, exchanges), send, messages, kind) == bare
    assert isinstance(ended(recorder).attributes.get("http.response.status_code", 0), int)
    assert FAULTS.count_by_place() == {}, "it is no fault of ours"


def test_a_message_that_cannot_be_read_is_counted(exchanges: Exchanges, recorder: Any) -> None:
    outcome_of(lambda app: asgi_wsgi_apps.AsgiApp(app, exchanges), lenient, [START, BODY | {"body": None}], "http")
    assert recorder.irregular["messages of apps that could not be read"] == 1


def test_headers_of_an_answer_that_can_be_read_once_are_left_to_the_server(exchanges: Exchanges) -> None:
    sent: list[Any] = []

    async def late(message: Any) -> None:
        """A server's `send` that holds the headers back until the answer is there."""
        sent.append(message)

    pairs = [(b"content-type", b"text/event-stream")]
    outcome_of(
        lambda app: asgi_wsgi_apps.AsgiApp(app, exchanges),
        late,
        [START | {"headers": iter(pairs)}, *STREAMED[1:]],
        "http",
    )
    assert list(sent[0]["headers"]) == pairs


@pytest.mark.parametrize("attributes", [(), ("user_agent.original", "http.request.header.x-tenant")])
def test_an_app_has_the_headers_that_its_server_gives_once(recorder: Any, attributes: tuple[str, ...]) -> None:
    exchanges = Exchanges(RequestsRule(attributes=attributes), recorder)
    pairs = [
        (b"user-agent", b"me"),
        (b"x-tenant", b"shop"),
        (b"traceparent", b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"),
    ]
    seen = outcome_of(lambda app: asgi_wsgi_apps.AsgiApp(app, exchanges), lenient, [START, BODY], "http", iter(pairs))
    assert seen[0] == pairs
    span = ended(recorder)
    assert span.remote is not None
    assert [name in span.attributes for name in attributes] == [True] * len(attributes)


# -------------------------------------------------------------------- WSGI


ENVIRON = {"REQUEST_METHOD": "GET", "wsgi.url_scheme": "http", "SERVER_NAME": "shop", "SERVER_PORT": "80"}


def checked_start(status: Any, headers: Any, exc_info: Any = None) -> None:
    """A server's `start_response`."""
    if not status[:3].isdigit():
        raise AssertionError(f"no status: {status}")


def lenient_start(status: Any, headers: Any, exc_info: Any = None) -> None:
    """A server's `start_response` that minds nothing."""


def served(app: Any, start_response: Any) -> Any:
    """Return the parts that the server sends, or the exception that it meets."""
    try:
        return [part + b"" for part in app(dict(ENVIRON), start_response)]
    except Exception as error:
        return type(error), error.args


class Parts:
    """A body that is no list."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts)


@pytest.mark.parametrize("start_response", [checked_start, lenient_start])
@pytest.mark.parametrize("status", [200, None, b"200 OK", ["unhashable"], "", "OK"])
def test_a_status_that_is_none_is_what_the_wsgi_server_says_of_it(
    exchanges: Exchanges, recorder: Any, start_response: Any, status: Any
) -> None:
    def app(_: Any, start: Any) -> list[bytes]:
        start(status, [])
        return [b"it"]

    assert served(asgi_wsgi_apps.WsgiApp(app, exchanges), start_response) == served(app, start_response)
    assert ended(recorder).attributes.get("http.response.status_code") in (None, 500)


@pytest.mark.parametrize(
    "body", [[None], [b"it", None], (3,), [b"it", 3], Parts(None), Parts(b"it", None), Parts(3), Parts("text"), 3]
)
def test_a_part_that_is_no_bytes_is_what_the_wsgi_server_says_of_it(
    exchanges: Exchanges, recorder: Any, body: Any
) -> None:
    def app(_: Any, start: Any) -> Any:
        start("200 OK", [])
        return body

    assert served(asgi_wsgi_apps.WsgiApp(app, exchanges), lenient_start) == served(app, lenient_start)
    ended(recorder)
    assert FAULTS.count_by_place() == {}


@pytest.mark.parametrize("call", [lambda start: start(), lambda start: start("200 OK"), lambda start: start(state=1)])
def test_start_response_is_called_wrong_as_the_app_called_it(exchanges: Exchanges, call: Callable[[Any], Any]) -> None:
    def app(_: Any, start: Any) -> list[bytes]:
        call(start)
        return []

    assert served(asgi_wsgi_apps.WsgiApp(app, exchanges), checked_start) == served(app, checked_start)


# -------------------------------------------------------------------- exchanges


@pytest.mark.parametrize("lost", ["status", "route"])
def test_a_request_whose_facts_cannot_be_reported_ends_all_the_same(
    exchanges: Exchanges, recorder: Any, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    def fault(*_: Any) -> Any:
        raise RuntimeError("a fault of ours")

    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    exchange = asgi_wsgi_apps.get_arrivals(exchanges)["http"].begin_exchange(
        {"type": "http", "method": "GET", "path": "/", "headers": []}
    )
    assert exchange is not None
    if lost == "status":
        exchange.status = "200"  # type: ignore[assignment]
    else:
        exchange.add_route_prefix("/api")
        monkeypatch.setattr(Method, "site_of_route", fault)
    exchange.end()
    ended(recorder)
    assert not exchange.is_open
    assert FAULTS.count_by_place() == {"end of a request": 1}
    FAULTS.clear()


@pytest.mark.parametrize("adapter", ["asgi", "wsgi"])
def test_a_fault_of_ours_at_the_begin_is_counted_and_the_app_is_called(
    exchanges: Exchanges, monkeypatch: pytest.MonkeyPatch, adapter: str
) -> None:
    def fault(*_: Any) -> Any:
        raise RuntimeError("a fault of ours")

    def app(_: Any, start: Any) -> list[bytes]:
        start("200 OK", [])
        return [b"it"]

    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr(type(exchanges.recorder), "open_request", fault, raising=False)
    if adapter == "asgi":
        seen = outcome_of(lambda app: asgi_wsgi_apps.AsgiApp(app, exchanges), strict, [START, BODY], "http")
        assert seen == ([], "sent", "sent")
    else:
        assert served(asgi_wsgi_apps.WsgiApp(app, exchanges), checked_start) == [b"it"]
    assert FAULTS.count_by_place() == {"begin of a request": 1}
    FAULTS.clear()
