"""Routers of web frameworks, which report the route of a request before they call its handler.

The route goes to the current exchange of the context. Without one nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from instrument.instrumentors.functions import Undo, takes_place
from instrument.instrumentors.requests.exchange import CURRENT, Exchange
from instrument.runtime.faults import FAULTS


def _meet(owner: Any, method: str, note: Callable[..., None], *, after: bool = False) -> Undo:
    """Call `note(exchange, *args)` before each call of a method, or `note(exchange, result)` after it."""
    original = _function(owner, method)

    @takes_place(owner, method)
    def undo(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs) if after else None
        exchange = CURRENT.get()
        if exchange is not None and exchange.is_open:
            try:
                note(exchange, *((result,) if after else args))
            except Exception as fault:
                FAULTS.note("route of a request", fault)
        return result if after else original(*args, **kwargs)

    return undo


def _function(owner: Any, method: str) -> Any:
    """Return a method that is a plain function. Raises `AttributeError` or `TypeError` in a version without it."""
    function = getattr(owner, method)
    if not isinstance(function, FunctionType):  # such as a slot
        raise TypeError(f"{owner.__name__}.{method} is a {type(function).__name__}")
    return function


def _found(exchange: Exchange, route: Any, *_: Any) -> None:
    exchange.found(route.path)


def _starlette(module: Any) -> list[Undo]:
    def mounted(exchange: Exchange, mount: Any, *_: Any) -> None:
        exchange.enter(mount.path)

    return [
        _meet(module.Route, "handle", _found),
        _meet(module.WebSocketRoute, "handle", _found),
        _meet(module.Mount, "handle", mounted),
    ]


def _fastapi(module: Any) -> list[Undo]:
    """Attach to FastAPI, whose scope has the path of a route with the prefixes of its routers."""

    def found(exchange: Exchange, route: Any, scope: Any, *_: Any) -> None:
        included = scope.get("fastapi", {}).get("effective_route_context")
        is_own = included is not None and included.original_route is route
        exchange.found(included.path if is_own else route.path)

    owners = [cls for cls in (module.APIRoute, module.APIWebSocketRoute) if "handle" in vars(cls)]
    return [_meet(owner, "handle", found) for owner in owners]


def _litestar(module: Any) -> list[Undo]:
    is_http = module.__name__ == "litestar.routes.http"
    return [_meet(module.HTTPRoute if is_http else module.WebSocketRoute, "handle", _found)]


def _flask(module: Any) -> list[Undo]:
    """Attach to Flask or Quart. The rule is known once the context of the request has been pushed."""

    def found(exchange: Exchange, _: Any, context: Any = None, *__: Any) -> None:
        rule = (module.request if context is None else context.request).url_rule
        if rule is not None:
            exchange.found(rule.rule)

    def talked(exchange: Exchange, _: Any, context: Any = None, *__: Any) -> None:
        rule = (module.websocket if context is None else context.websocket).url_rule
        if rule is not None:
            exchange.found(rule.rule)

    if not hasattr(module, "Quart"):
        return [_meet(module.Flask, "full_dispatch_request", found)]
    undo = _meet(module.Quart, "full_dispatch_request", found)
    return [undo, _meet(module.Quart, "full_dispatch_websocket", talked)]


def _django(module: Any) -> list[Undo]:
    def found(exchange: Exchange, match: Any) -> None:
        route = match.route
        exchange.found(route if route.startswith(("/", "^")) else "/" + route)

    return [_meet(module.BaseHandler, "resolve_request", found, after=True)]


def _falcon(module: Any) -> list[Undo]:
    def found(exchange: Exchange, result: Any) -> None:
        if result[3]:
            exchange.found(result[3])

    return [_meet(module.App, "_get_responder", found, after=True)]


def _bottle(module: Any) -> list[Undo]:
    def found(exchange: Exchange, result: Any) -> None:
        exchange.found(result[0].rule)

    return [_meet(module.Router, "match", found, after=True)]


def _aiohttp(module: Any) -> list[Undo]:
    def found(exchange: Exchange, match: Any) -> None:
        resource = match.route.resource
        if resource is not None:
            exchange.found(resource.canonical)

    return [_meet(module.UrlMappingMatchInfo, "freeze", found)]


ROUTERS: Mapping[str, Callable[[Any], list[Undo]]] = {
    "starlette.routing": _starlette,
    "fastapi.routing": _fastapi,
    "litestar.routes.http": _litestar,
    "litestar.routes.websocket": _litestar,
    "flask.app": _flask,
    "quart.app": _flask,
    "django.core.handlers.base": _django,
    "falcon.app": _falcon,
    "bottle": _bottle,
    "aiohttp.web_urldispatcher": _aiohttp,
}
