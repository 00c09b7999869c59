"""Where servers call the apps that they serve: the app that is called is the one that the host gave."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from instrument.instrumentors.requests import servers
from instrument.instrumentors.requests.exchange import Exchanges
from instrument.profile.model import RequestsRule


class Asgi:
    """An app with another one in its attribute `app`, as most middleware has it."""

    def __init__(self, app: Any, called: list[str]) -> None:
        self.app = app
        self.called = called

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.called.append("middleware")
        await self.app(scope, receive, send)


class Wsgi(Asgi):
    def __call__(self, environ: Any, start_response: Any) -> Any:
        self.called.append("middleware")
        return self.app(environ, start_response)


@pytest.fixture
def module() -> Any:
    """What granian has in the place where apps are wrapped."""
    return SimpleNamespace(_callback_wrapper=lambda callback, scope_opts: callback)


def test_granian_calls_the_middleware_that_holds_an_app_of_its_own(module: Any, recorder: Any) -> None:
    called: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        called.append("app")

    (undo,) = servers.ASGI["granian.asgi"](module, Exchanges(RequestsRule(), recorder))
    served = module._callback_wrapper(Asgi(app, called), {})
    undo()
    asyncio.run(served({"type": "http", "method": "GET", "path": "/", "headers": []}, None, None))
    assert called == ["middleware", "app"]
    assert len(recorder.spans()) == 1


def test_granian_calls_the_wsgi_middleware_that_holds_an_app_of_its_own(module: Any, recorder: Any) -> None:
    called: list[str] = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        called.append("app")
        return [b"it"]

    (undo,) = servers.WSGI["granian.wsgi"](module, Exchanges(RequestsRule(), recorder))
    served = module._callback_wrapper(Wsgi(app, called), {})
    undo()
    assert served({"REQUEST_METHOD": "GET", "PATH_INFO": "/"}, None) == [b"it"]
    assert called == ["middleware", "app"]
    assert len(recorder.spans()) == 1
