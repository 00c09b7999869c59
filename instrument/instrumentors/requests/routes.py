"""Routers of web frameworks, which report the route of a request before they call its handler.

The route goes to the current exchange of the context. Without one nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

from instrument.instrumentors.functions import Undo, takes_place
from instrument.instrumentors.requests.exchange import CURRENT, Exchange
from instrument.runtime.faults import FAULTS


class Router(NamedTuple):
    """A method of a router, by its class, that knows the route of a request.

    `route` reads it from the router's module and the arguments, or from the module and the result if it is known
    `after` the call. None means no route. `note` gets it. A class of `older` versions may lack the method.
    """

    owner: str
    method: str
    route: Callable[..., str | None]
    after: bool = False
    note: Callable[[Exchange, str], None] = Exchange.found
    older: bool = False

    def attach(self, module: Any) -> Undo:
        """Read the route at each call. Raises `AttributeError` or `TypeError` in a version without the method."""
        owner = getattr(module, self.owner)
        original = getattr(owner, self.method)
        if not isinstance(original, FunctionType):  # such as a slot
            raise TypeError(f"{owner.__name__}.{self.method} is a {type(original).__name__}")
        _, _, read, after, note, _ = self

        @takes_place(owner, self.method)
        def undo(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs) if after else None
            exchange = CURRENT.get()
            if exchange is not None and exchange.is_open:
                try:
                    route = read(module, result) if after else read(module, *args)
                    if route is not None:
                        note(exchange, route)
                except Exception as fault:
                    FAULTS.note("route of a request", fault)
            return result if after else original(*args, **kwargs)

        return undo


def attach(module: Any) -> list[Undo]:
    """Read the routes of a module's routers."""
    routers = ROUTERS[module.__name__]
    return [
        router.attach(module)
        for router in routers
        if not router.older or router.method in vars(getattr(module, router.owner))
    ]


def _path(_: Any, route: Any, *__: Any) -> str:
    path: str = route.path
    return path


def _fastapi(_: Any, route: Any, scope: Any, *__: Any) -> str:
    """Return the path of a route with the prefixes of its routers, which the scope has."""
    included = scope.get("fastapi", {}).get("effective_route_context")
    path: str = (included if included is not None and included.original_route is route else route).path
    return path


def _flask(name: str) -> Callable[..., str | None]:
    """Return the reader of a rule of Flask or Quart. It is known once the context of the request has been pushed."""

    def route(module: Any, _: Any, context: Any = None, *__: Any) -> str | None:
        rule = getattr(module if context is None else context, name).url_rule
        return None if rule is None else rule.rule

    return route


def _django(_: Any, match: Any) -> str:
    route: str = match.route
    return route if route.startswith(("/", "^")) else "/" + route


def _aiohttp(_: Any, match: Any, *__: Any) -> str | None:
    resource = match.route.resource
    return None if resource is None else resource.canonical


ROUTERS: Mapping[str, tuple[Router, ...]] = {
    "starlette.routing": (
        Router("Route", "handle", _path),
        Router("WebSocketRoute", "handle", _path),
        Router("Mount", "handle", _path, note=Exchange.enter),
    ),
    "fastapi.routing": (
        Router("APIRoute", "handle", _fastapi, older=True),
        Router("APIWebSocketRoute", "handle", _fastapi, older=True),
    ),
    "litestar.routes.http": (Router("HTTPRoute", "handle", _path),),
    "litestar.routes.websocket": (Router("WebSocketRoute", "handle", _path),),
    "flask.app": (Router("Flask", "full_dispatch_request", _flask("request")),),
    "quart.app": (
        Router("Quart", "full_dispatch_request", _flask("request")),
        Router("Quart", "full_dispatch_websocket", _flask("websocket")),
    ),
    "django.core.handlers.base": (Router("BaseHandler", "resolve_request", _django, after=True),),
    "falcon.app": (Router("App", "_get_responder", lambda _, responder: responder[3] or None, after=True),),
    "bottle": (Router("Router", "match", lambda _, match: match[0].rule, after=True),),
    "aiohttp.web_urldispatcher": (Router("UrlMappingMatchInfo", "freeze", _aiohttp),),
}
"""The routers of each module of a framework."""
