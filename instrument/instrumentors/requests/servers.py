"""Make servers of ASGI and WSGI call a recording proxy of their app.

`ASGI` and `WSGI` map the modules of servers to functions (`Attach`). When a module has run, its function is called,
before other modules import names from the module. Once the rule is removed, the proxy only calls the app.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

from instrument.instrumentors.functions import Undo, replaces
from instrument.instrumentors.requests import asgi, wsgi
from instrument.instrumentors.requests.exchange import Exchanges, ServedApp
from instrument.runtime.faults import FAULTS
from instrument.runtime.threads import catch_up_with_fork

Attach = Callable[[Any, Exchanges], list[Undo]]


def _make_recording_app(app: Any, kind: Any, exchanges: Exchanges) -> Any:
    """Return a proxy that records an app under a rule, or the app itself if it is that proxy already."""
    inner = app
    while isinstance(inner, ServedApp):
        if inner.serves(exchanges):
            return app
        inner = inner.app
    return kind(inner, exchanges)  # proxies of earlier rules are left out


def _attach_to_method(class_name: str, method: str, kind: Any) -> Attach:
    """Return the `Attach` of a server that passes the app to a method at each request."""

    def attach(module: Any, exchanges: Exchanges) -> list[Undo]:
        owner = getattr(module, class_name)
        run = getattr(owner, method)
        last: tuple[Any, Any] = None, None

        @replaces(owner, method)
        def undo(self: Any, app: Any) -> Any:
            nonlocal last
            app_before, served = last
            if app_before is not app or served is None:
                served = _make_recording_app(app, kind, exchanges)
                last = app, served
            return run(self, served)

        return [undo]

    return attach


def _kept(class_name: str, method: str, kind: Any, place: str = "app") -> Attach:
    """Return the `Attach` of a server whose method reads the app from an attribute of its object (`place`)."""
    path, _, name = place.rpartition(".")
    holder_of = operator.attrgetter(path) if path else None

    def attach(module: Any, exchanges: Exchanges) -> list[Undo]:
        owner = getattr(module, class_name)
        run = getattr(owner, method)

        @replaces(owner, method)
        def undo(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                holder = self if holder_of is None else holder_of(self)
                setattr(holder, name, _make_recording_app(getattr(holder, name), kind, exchanges))
            except Exception as fault:  # a version with another attribute
                FAULTS.note(f"app of {module.__name__}", fault)
            return run(self, *args, **kwargs)

        return [undo]

    return attach


def _join_attaches(*ways: Attach) -> Attach:
    """Join several `Attach` functions of a module into one."""
    return lambda module, exchanges: [undo for attach in ways for undo in attach(module, exchanges)]


def _app_argument(name: str, position: int, kind: Any) -> Attach:
    """Return the `Attach` of a server's function that takes the app as its argument at `position`."""

    def attach(module: Any, exchanges: Exchanges) -> list[Undo]:
        run = getattr(module, name)

        @replaces(module, name)
        def undo(*args: Any, **kwargs: Any) -> Any:
            app = _make_recording_app(args[position], kind, exchanges)
            return run(*args[:position], app, *args[position + 1 :], **kwargs)

        return [undo]

    return attach


EMBEDDING = frozenset({"uwsgi"})
"""The modules by which servers in C that embed Python are recognised. They call the app without Python code."""


def _app_class(class_name: str) -> Attach:
    """Return the `Attach` of a framework's app class, for servers in C, which call its `__call__`."""

    def attach(module: Any, exchanges: Exchanges) -> list[Undo]:
        if EMBEDDING.isdisjoint(sys.modules):
            return []
        owner = getattr(module, class_name)
        call = owner.__call__

        @replaces(owner, "__call__")
        def undo(self: Any, environ: Any, start_response: Any) -> Any:
            catch_up_with_fork()
            return wsgi.WsgiApp(functools.partial(call, self), exchanges)(environ, start_response)

        return [undo]

    return attach


def _attach_gunicorn(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Record the app of gunicorn's workers that call a WSGI app themselves, unlike uvicorn's workers.

    An app of Tornado is left alone, because Tornado's worker tests the app's type.
    """
    worker = module.Worker
    load = worker.load_wsgi

    @replaces(worker, "load_wsgi")
    def undo(self: Any) -> None:
        load(self)
        is_of_tornado = any(kind.__module__.startswith("tornado.") for kind in type(self.wsgi).__mro__)
        if hasattr(type(self), "handle_request") and not is_of_tornado:
            self.wsgi = _make_recording_app(self.wsgi, wsgi.WsgiApp, exchanges)

    return [undo]


ASGI: Mapping[str, Attach] = {
    "uvicorn.protocols.http.h11_impl": _attach_to_method("RequestResponseCycle", "run_asgi", asgi.AsgiApp),
    "uvicorn.protocols.http.httptools_impl": _attach_to_method("RequestResponseCycle", "run_asgi", asgi.AsgiApp),
    "uvicorn.protocols.websockets.websockets_impl": _kept("WebSocketProtocol", "run_asgi", asgi.AsgiApp),
    "uvicorn.protocols.websockets.websockets_sansio_impl": _kept("WebSocketsSansIOProtocol", "run_asgi", asgi.AsgiApp),
    "uvicorn.protocols.websockets.wsproto_impl": _kept("WSProtocol", "run_asgi", asgi.AsgiApp),
    "hypercorn.app_wrappers": _join_attaches(
        _kept("ASGIWrapper", "__call__", asgi.AsgiApp), _kept("WSGIWrapper", "__call__", wsgi.WsgiApp)
    ),
    "daphne.server": _kept("Server", "create_application", asgi.AsgiApp, "application"),
    "granian.asgi": _app_argument("_callback_wrapper", 0, asgi.AsgiApp),
    "gunicorn.asgi.protocol": _join_attaches(
        _kept("ASGIProtocol", "_handle_http_request", asgi.AsgiApp),
        _kept("ASGIProtocol", "_handle_http2_request", asgi.AsgiApp),
        _kept("ASGIProtocol", "_handle_websocket", asgi.AsgiApp),
    ),
}
WSGI: Mapping[str, Attach] = {
    "gunicorn.workers.base": _attach_gunicorn,
    "waitress.task": _kept("WSGITask", "execute", wsgi.WsgiApp, "channel.server.application"),
    "wsgiref.handlers": _attach_to_method("BaseHandler", "run", wsgi.WsgiApp),
    "werkzeug.serving": _kept("WSGIRequestHandler", "run_wsgi", wsgi.WsgiApp, "server.app"),
    "granian.wsgi": _app_argument("_callback_wrapper", 0, wsgi.WsgiApp),
    "gevent.pywsgi": _kept("WSGIHandler", "run_application", wsgi.WsgiApp, "application"),
    "cheroot.wsgi": _kept("Gateway", "respond", wsgi.WsgiApp, "req.server.wsgi_app"),
    "tornado.wsgi": _kept("WSGIContainer", "handle_request", wsgi.WsgiApp, "wsgi_application"),
    "bjoern": _app_argument("server_run", 1, wsgi.InterleavedApp),
    "flask.app": _app_class("Flask"),
    "django.core.handlers.wsgi": _app_class("WSGIHandler"),
    "falcon.app": _app_class("App"),
    "bottle": _app_class("Bottle"),
}
