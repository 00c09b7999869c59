"""Name requests by the routes that the routers of web frameworks find.

When the service imports a router's module, the router's method is replaced (`ROUTERS`). Each call of the method names
the open request.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from instrument.instrumentors.functions import Undo, replace_attribute
from instrument.instrumentors.requests.exchange import CURRENT, Exchange
from instrument.runtime.cheap_start import NamedTuple
from instrument.runtime.faults import FAULTS


class Router(NamedTuple):
    """The class and the name of a framework's method that finds a request's route.

    `route` reads the route from the module and the call's arguments, or from the module and the result if `after` is
    True. `note` stores the route, unless it is None. `older` is True if older versions lack the method.
    """

    owner: str
    method: str
    route: Callable[..., Any]
    after: bool = False
    note: Callable[[Exchange, Any], None] = Exchange.set_route
    older: bool = False

    def attach(self, module: Any) -> Undo:
        """Make the router's method name open requests. Raises `AttributeError` or `TypeError` if there is no such
        method."""
        owner = getattr(module, self.owner)
        original = getattr(owner, self.method)
        if not isinstance(original, FunctionType) and not hasattr(original, "cache_clear"):  # such as a slot
            raise TypeError(f"{owner.__name__}.{self.method} is a {type(original).__name__}")
        _, _, read, after, note, _ = self

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs) if after else None
            exchange = CURRENT.get()
            if exchange is not None and exchange.is_open:
                try:
                    route = read(module, result) if after else read(module, *args, *kwargs.values())
                    if route is not None:
                        note(exchange, route)
                except Exception as fault:
                    FAULTS.note("route of a request", fault)
            return result if after else original(*args, **kwargs)

        @functools.wraps(original)
        async def call_app(*args: Any, **kwargs: Any) -> Any:
            return await call(*args, **kwargs)

        if self.method == "__call__":  # asgiref takes an app without a coroutine function for one of ASGI 2
            return replace_attribute(owner, self.method, call_app)
        for name in ("cache_clear", "cache_info", "cache_parameters"):
            if hasattr(original, name):
                setattr(call, name, getattr(original, name))
        is_static = isinstance(vars(owner).get(self.method), staticmethod)
        return replace_attribute(owner, self.method, staticmethod(call) if is_static else call)


def attach_routers(module: Any) -> list[Undo]:
    routers = ROUTERS[module.__name__]
    return [
        router.attach(module)
        for router in routers
        if not router.older or router.method in vars(getattr(module, router.owner))
    ]


def _read_path(_: Any, route: Any, *__: Any) -> str:
    path: str = route.path
    return path


def _read_fastapi_path(_: Any, route: Any, scope: Any, *__: Any) -> str:
    included = scope.get("fastapi", {}).get("effective_route_context")
    path: str = (included if included is not None and included.original_route is route else route).path
    return path


def _flask_reader(name: str) -> Callable[..., str | None]:
    def read_flask_rule(module: Any, _: Any, context: Any = None, *__: Any) -> str | None:
        rule = getattr(module if context is None else context, name).url_rule
        return None if rule is None else rule.rule

    return read_flask_rule


def _read_django_route(_: Any, match: Any) -> str:
    route: str = match.route
    return route if route.startswith(("/", "^")) else "/" + route


def _channels(_: Any, router: Any, scope: Any, *__: Any) -> tuple[str, bool] | None:
    """Return the pattern that matched in a router of Channels, and True if its route leads to another router. Return
    None without a match."""
    path = scope.get("path_remaining")
    if path is None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
    for route in router.routes:
        if route.pattern.match(path.lstrip("/")):
            pattern = str(route.pattern)
            pattern = pattern if pattern.startswith(("/", "^")) else "/" + pattern
            return (pattern, hasattr(route.callback, "_path_routing")) if pattern != "/" else None
    return None


def _note_channels(exchange: Exchange, route: tuple[str, bool]) -> None:
    pattern, is_prefix = route
    (exchange.add_prefix if is_prefix else exchange.set_route)(pattern)


def _read_aiohttp_route(_: Any, match: Any, *__: Any) -> str | None:
    resource = match.route.resource
    return None if resource is None else resource.canonical


def _end_failed(exchange: Exchange, error: BaseException) -> None:
    """End a websocket with an exception. The framework hides it from the server, and only closes the websocket."""
    exchange.finish(error, is_gone=True, in_parts=False)


def _read_blacksheep_route(_: Any, match: Any) -> str | None:
    return None if match is None or match.pattern == b"*" else match.pattern.decode()


ROUTERS: Mapping[str, tuple[Router, ...]] = {
    "starlette.routing": (
        Router("Route", "handle", _read_path),
        Router("WebSocketRoute", "handle", _read_path),
        Router("Mount", "handle", _read_path, note=Exchange.add_prefix),
    ),
    "fastapi.routing": (
        Router("APIRoute", "handle", _read_fastapi_path, older=True),
        Router("APIWebSocketRoute", "handle", _read_fastapi_path, older=True),
    ),
    "litestar.routes.http": (Router("HTTPRoute", "handle", _read_path),),
    "litestar.routes.websocket": (Router("WebSocketRoute", "handle", _read_path),),
    "litestar.middleware._internal.exceptions.middleware": (
        Router(
            *("ExceptionHandlerMiddleware", "handle_websocket_exception"),
            lambda _, __, error: None if hasattr(error, "code") else error,  # a code is an answer
            note=_end_failed,
            older=True,
        ),
    ),
    "flask.app": (Router("Flask", "full_dispatch_request", _flask_reader("request")),),
    "quart.app": (
        Router("Quart", "full_dispatch_request", _flask_reader("request")),
        Router("Quart", "full_dispatch_websocket", _flask_reader("websocket")),
        Router("Quart", "handle_websocket_exception", lambda *arguments: arguments[-1], note=_end_failed, older=True),
    ),
    "django.core.handlers.base": (Router("BaseHandler", "resolve_request", _read_django_route, after=True),),
    "channels.routing": (Router("URLRouter", "__call__", _channels, note=_note_channels),),
    "falcon.app": (Router("App", "_get_responder", lambda _, responder: responder[3] or None, after=True),),
    "bottle": (Router("Router", "match", lambda _, match: match[0].rule, after=True),),
    "blacksheep.server.routing": (
        Router("Router", "get_match", _read_blacksheep_route, after=True),
        Router("Router", "get_match_by_method_and_path", _read_blacksheep_route, after=True),
        Router("RouterFiltersMixin", "get_match", _read_blacksheep_route, after=True, older=True),
    ),
    "sanic.router": (Router("Router", "get", lambda _, match: match[0].uri, after=True),),
    "aiohttp.web_urldispatcher": (Router("UrlMappingMatchInfo", "freeze", _read_aiohttp_route),),
}
"""The routers to instrument, by module."""
