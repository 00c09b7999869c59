"""Registrations: frameworks' tables of handlers get the probe of a function that a rule names.

A decorator such as `@app.get` hands the function to its table before a module has a name for it. So does a list of
routes in the handlers' own module. Other tables keep the bare function, while its module has the probe under its name.
Pickling compares the two, so `keep_picklable` pickles the bare function by its name.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from types import FunctionType, MethodType
from typing import Any

from instrument.instrumentors.functions import Undo, replace
from instrument.runtime.cheap_start import NamedTuple
from instrument.runtime.faults import FAULTS


class Seam(NamedTuple):
    """A method that registers a handler with a framework, and the name and position of the handler argument."""

    owner: str
    method: str
    argument: str
    position: int


SEAMS: Mapping[str, tuple[Seam, ...]] = {
    "starlette.routing": (
        Seam("Route", "__init__", "endpoint", 2),
        Seam("WebSocketRoute", "__init__", "endpoint", 2),
    ),
    "fastapi.routing": (
        Seam("APIRoute", "__init__", "endpoint", 2),
        Seam("APIWebSocketRoute", "__init__", "endpoint", 2),
    ),
    "fastapi.params": (Seam("Depends", "__init__", "dependency", 1),),
    "flask.sansio.app": (Seam("App", "add_url_rule", "view_func", 3),),  # of Quart, too
    "flask.sansio.blueprints": (Seam("Blueprint", "add_url_rule", "view_func", 3),),
    "aiohttp.web_routedef": (Seam("RouteDef", "__init__", "handler", 3),),
    "aiohttp.web_urldispatcher": (Seam("AbstractRoute", "__init__", "handler", 2),),
    "django.urls.resolvers": (Seam("URLPattern", "__init__", "callback", 2),),
    "litestar.handlers.base": (Seam("BaseRouteHandler", "__call__", "fn", 1),),
    "bottle": (Seam("Route", "__init__", "callback", 4),),
    "celery.app.base": (Seam("Celery", "_task_from_fun", "fun", 1),),  # at the first use of a task, long after
}
"""The methods by which each module of a framework registers a handler."""


def install(module: Any, registered: Callable[[FunctionType], Any]) -> list[Undo]:
    """Replace each handler by the result of `registered(handler)` when it is registered with its framework."""
    undos = []
    for seam in SEAMS[module.__name__]:
        owner = getattr(module, seam.owner, None)
        if isinstance(getattr(owner, seam.method, None), FunctionType):
            undos.append(replace(owner, seam.method, _wrap_registration(seam, getattr(owner, seam.method), registered)))
    return undos


def _wrap_registration(seam: Seam, original: FunctionType, registered: Callable[[FunctionType], Any]) -> Any:
    @functools.wraps(original)
    def take(*args: Any, **kwargs: Any) -> Any:
        try:
            if seam.argument in kwargs:
                kwargs[seam.argument] = _probe_handler(kwargs[seam.argument], registered)
            elif len(args) > seam.position:
                handler = _probe_handler(args[seam.position], registered)
                args = (*args[: seam.position], handler, *args[seam.position + 1 :])
        except Exception as fault:
            FAULTS.note("registration of a handler", fault)
        return original(*args, **kwargs)

    return take


def _probe_handler(handler: Any, registered: Callable[[FunctionType], Any]) -> Any:
    if type(handler) is MethodType and type(handler.__func__) is FunctionType:
        probe = registered(handler.__func__)
        return handler if probe is handler.__func__ else MethodType(probe, handler.__self__)
    return registered(handler) if type(handler) is FunctionType else handler


def keep_picklable() -> Undo:
    """Have process pools pickle a function by its name, although its module has the probe under that name."""
    from multiprocessing.reduction import ForkingPickler

    if hasattr(ForkingPickler, "reducer_override"):
        return lambda: None
    return replace(ForkingPickler, "reducer_override", _reduce_function)


def _reduce_function(_: Any, thing: Any) -> Any:
    if isinstance(thing, FunctionType):
        value: Any = sys.modules.get(thing.__module__)
        path: str = thing.__qualname__
        for name in path.split("."):
            value = getattr(value, name, None)
        if getattr(value, "__instrument_function__", None) is thing:
            return resolve_name, (f"{thing.__module__}:{path}",)
    return NotImplemented
