"""Servers of ASGI and WSGI: where each calls the app that it serves.

`Server.attach` is called when the host has imported the module that has the seam, before anybody can have taken a name
from it. What stands in for an app passes everything through once its rule is gone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from instrument.instrumentors.functions import Undo, replace
from instrument.instrumentors.requests import asgi, wsgi
from instrument.instrumentors.requests.exchange import Exchanges

Attach = Callable[[Any, Exchanges], list[Undo]]


def _served(app: Any, kind: Any, exchanges: Exchanges) -> Any:
    """The app as it is served: once around it for each rule."""
    inner = app
    while type(inner) in (asgi.AsgiApp, wsgi.WsgiApp):
        if inner.serves(exchanges):
            return app
        inner = inner.app
    return kind(inner, exchanges)  # those of rules that are gone are left out


def _server_of(kind: Any, exchanges: Exchanges) -> Callable[[Any], Any]:
    """`_served` for servers that tell the app anew with each request: to make another each time would take 0.5 us."""
    last: tuple[Any, Any] = None, None

    def served(app: Any) -> Any:
        nonlocal last
        told, found = last
        if told is not app or found is None:
            found = _served(app, kind, exchanges)
            last = app, found
        return found

    return served


def _uvicorn_http(module: Any, exchanges: Exchanges) -> list[Undo]:
    cycle = module.RequestResponseCycle
    run, served = cycle.run_asgi, _server_of(asgi.AsgiApp, exchanges)

    @functools.wraps(run)
    def run_asgi(self: Any, app: Any) -> Any:
        return run(self, served(app))

    return [replace(cycle, "run_asgi", run_asgi)]


def _uvicorn_websocket(class_name: str) -> Attach:
    def attach(module: Any, exchanges: Exchanges) -> list[Undo]:
        protocol = getattr(module, class_name)
        run = protocol.run_asgi

        @functools.wraps(run)
        def run_asgi(self: Any) -> Any:
            self.app = _served(self.app, asgi.AsgiApp, exchanges)
            return run(self)

        return [replace(protocol, "run_asgi", run_asgi)]

    return attach


def _hypercorn(module: Any, exchanges: Exchanges) -> list[Undo]:
    def attach(owner: Any, kind: Any) -> Undo:
        call = owner.__call__

        @functools.wraps(call)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it is one
            self.app = _served(self.app, kind, exchanges)
            return call(self, *args, **kwargs)

        return replace(owner, "__call__", __call__)

    return [attach(module.ASGIWrapper, asgi.AsgiApp), attach(module.WSGIWrapper, wsgi.WsgiApp)]


def _granian(kind: Any) -> Attach:
    def attach(module: Any, exchanges: Exchanges) -> list[Undo]:
        wrapper = module._callback_wrapper

        @functools.wraps(wrapper)
        def _callback_wrapper(callback: Any, *args: Any, **kwargs: Any) -> Any:
            return wrapper(_served(callback, kind, exchanges), *args, **kwargs)

        return [replace(module, "_callback_wrapper", _callback_wrapper)]

    return attach


def _gunicorn(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Workers that call a WSGI app themselves; those of uvicorn hand an ASGI app on to it."""
    worker = module.Worker
    load = worker.load_wsgi

    @functools.wraps(load)
    def load_wsgi(self: Any) -> None:
        load(self)
        if hasattr(type(self), "handle_request"):
            self.wsgi = _served(self.wsgi, wsgi.WsgiApp, exchanges)

    return [replace(worker, "load_wsgi", load_wsgi)]


def _waitress(module: Any, exchanges: Exchanges) -> list[Undo]:
    task = module.WSGITask
    execute = task.execute

    @functools.wraps(execute)
    def served(self: Any) -> Any:
        server = self.channel.server
        server.application = _served(server.application, wsgi.WsgiApp, exchanges)
        return execute(self)

    return [replace(task, "execute", served)]


def _wsgiref(module: Any, exchanges: Exchanges) -> list[Undo]:
    handler = module.BaseHandler
    run, served = handler.run, _server_of(wsgi.WsgiApp, exchanges)

    @functools.wraps(run)
    def run_served(self: Any, application: Any) -> Any:
        return run(self, served(application))

    return [replace(handler, "run", run_served)]


def _werkzeug(module: Any, exchanges: Exchanges) -> list[Undo]:
    handler = module.WSGIRequestHandler
    run = handler.run_wsgi

    @functools.wraps(run)
    def run_wsgi(self: Any) -> Any:
        self.server.app = _served(self.server.app, wsgi.WsgiApp, exchanges)
        return run(self)

    return [replace(handler, "run_wsgi", run_wsgi)]


ASGI: Mapping[str, Attach] = {
    "uvicorn.protocols.http.h11_impl": _uvicorn_http,
    "uvicorn.protocols.http.httptools_impl": _uvicorn_http,
    "uvicorn.protocols.websockets.websockets_impl": _uvicorn_websocket("WebSocketProtocol"),
    "uvicorn.protocols.websockets.websockets_sansio_impl": _uvicorn_websocket("WebSocketsSansIOProtocol"),
    "uvicorn.protocols.websockets.wsproto_impl": _uvicorn_websocket("WSProtocol"),
    "hypercorn.app_wrappers": _hypercorn,
    "granian.asgi": _granian(asgi.AsgiApp),
}
WSGI: Mapping[str, Attach] = {
    "gunicorn.workers.base": _gunicorn,
    "waitress.task": _waitress,
    "wsgiref.handlers": _wsgiref,
    "werkzeug.serving": _werkzeug,
    "granian.wsgi": _granian(wsgi.WsgiApp),
}
