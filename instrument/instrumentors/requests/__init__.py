"""Record the requests of servers by endpoint, without a function rule.

A server is instrumented where it calls the app. A web framework is instrumented where its router finds the route, which
names the open request. This package imports no server or framework. It attaches when the service imports one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from instrument.instrumentors.functions import Undo, replace, undo_all
from instrument.instrumentors.requests import blocked, propagation, servers
from instrument.instrumentors.requests.exchange import CURRENT, PORT, Exchange, Exchanges
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import SERVERS, RequestsRule
from instrument.profile.presets import ENGINES
from instrument.recorder.core import calls_by_site
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import Site
from instrument.runtime.cheap_start import LazyModule, NamedTuple
from instrument.runtime.faults import FAULTS

if TYPE_CHECKING:
    from instrument.instrumentors.requests import (
        aiohttp,
        grpc,
        grpclib,
        http_server,
        model_servers,
        queue_jobs,
        sanic,
        tornado,
        triton,
        websockets,
    )
else:
    for _name in (
        *("aiohttp", "grpc", "grpclib", "http_server", "model_servers", "queue_jobs"),
        *("sanic", "tornado", "triton", "websockets"),
    ):
        globals()[_name] = LazyModule(f"{__name__}.{_name}")


class Router(NamedTuple):
    """A framework's method that finds the route of a request, by class and name.

    `route` reads the route from the module and the call's arguments, or if `after` is True from the module and the
    call's result. `note` stores a route that is not None. `older` is True if older versions lack the method.
    """

    owner: str
    method: str
    route: Callable[..., Any]
    after: bool = False
    note: Callable[[Exchange, Any], None] = Exchange.set_route
    older: bool = False

    def attach(self, module: Any) -> Undo:
        """Read the route at each call of the method. Raises `AttributeError` or `TypeError` without the method."""
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
            return replace(owner, self.method, call_app)
        for name in ("cache_clear", "cache_info", "cache_parameters"):
            if hasattr(original, name):
                setattr(call, name, getattr(original, name))
        is_static = isinstance(vars(owner).get(self.method), staticmethod)
        return replace(owner, self.method, staticmethod(call) if is_static else call)


def attach_routers(module: Any) -> list[Undo]:
    """Read the routes that the routers of a module find, from now on."""
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
    """Return the path of a FastAPI route, with the prefixes of its routers, which the scope has."""
    included = scope.get("fastapi", {}).get("effective_route_context")
    path: str = (included if included is not None and included.original_route is route else route).path
    return path


def _flask_reader(name: str) -> Callable[..., str | None]:
    """Return a function that reads the URL rule of a request of Flask or Quart from its context."""

    def route(module: Any, _: Any, context: Any = None, *__: Any) -> str | None:
        rule = getattr(module if context is None else context, name).url_rule
        return None if rule is None else rule.rule

    return route


def _read_django_route(_: Any, match: Any) -> str:
    route: str = match.route
    return route if route.startswith(("/", "^")) else "/" + route


def _channels(_: Any, router: Any, scope: Any, *__: Any) -> tuple[str, bool] | None:
    """Return the pattern that a router of Channels matches, and True if another of its routers follows."""
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
    """End a websocket with an exception, because its framework only closes it, and the server sees no failure."""
    exchange.finish(error, is_gone=True, in_parts=False)


def _read_blacksheep_route(_: Any, match: Any) -> str | None:
    """Return the pattern of a BlackSheep route, None for the fallback route."""
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
"""The routers to instrument, by the framework's module."""


PACKAGES: Mapping[str, tuple[str, ...]] = {
    "web": (
        "starlette",
        "litestar",
        "flask",
        "quart",
        "django",
        "falcon",
        "bottle",
        "blacksheep",
        "aiohttp.web",
        "tornado.web",
        "fastapi",
    ),
    "server": (
        *("uvicorn", "hypercorn", "daphne.server", "granian", "gunicorn", "waitress", "grpc", "grpclib.server"),
        *("gevent.pywsgi", "cheroot.wsgi", "bjoern"),
    ),
    "unrouted": ("pyramid.router", "cherrypy"),
    "unmet": ("robyn", "twisted.web.server"),
    "queue": ("huey.bin.huey_consumer",),
    "engine": (*ENGINES, "bentoml"),
    "library": (
        *("numpy", "jax", "tensorflow", "keras", "onnxruntime", "cupy", "numba"),
        *("sklearn", "sentence_transformers", "torch", "transformers"),
    ),
}
"""The import names of known packages, by role. Requests of `web` frameworks are recorded, and requests of `unrouted`
ones have no route. Those of `unmet` servers and jobs of `queue` packages are not recorded. A `server` runs apps of
other packages. An `engine` is a complete model server."""

MADE_FOR: Mapping[str, str] = {"fastapi": "fastapi", **ENGINES, "transformers": "transformers"}
"""The packages that have a preset, with its name."""

REMEDY = "give the function that handles one a rule of `kind: request`"


def imported_packages() -> list[str]:
    """Return the names in `PACKAGES` that this process has imported."""
    return filter_by_role(sys.modules, *PACKAGES)


def filter_by_role(names: Iterable[str], *roles: str) -> list[str]:
    """Return those of the names that have one of the roles in `PACKAGES`, in its order."""
    name_set = set(names)
    return [name for role, packages in PACKAGES.items() if role in roles for name in packages if name in name_set]


def presets_for(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return (package, preset) for the names that have a preset. If one is a model server, only model servers count."""
    served_packages = set(filter_by_role(names, "engine") or names)
    return [(name, preset) for name, preset in MADE_FOR.items() if name in served_packages]


def _queue_kind(name: str) -> tuple[str, Callable[[], Mapping[str, servers.Attach]]]:
    return name, lambda: queue_jobs.SEAMS[name]


KINDS: Mapping[str, tuple[str, Callable[[], Mapping[str, servers.Attach]]]] = {
    "aiohttp": ("aiohttp", lambda: aiohttp.AIOHTTP),
    "grpc": ("grpc", lambda: grpc.GRPC),
    "grpclib.server": ("grpclib", lambda: {"grpclib.server": grpclib.attach}),
    **dict.fromkeys(("tornado.web", "tornado.websocket"), ("tornado", lambda: tornado.TORNADO)),
    **{
        f"websockets.{name}": ("websockets", lambda: websockets.WEBSOCKETS)
        for name in (
            *("asyncio.server", "sync.server", "trio.server", "legacy.server"),
            *("asyncio.router", "sync.router"),
        )
    },
    "sanic": ("sanic", lambda: sanic.SANIC),
    "http.server": ("http_server", lambda: {"http.server": http_server.attach}),
    "ray": ("ray_serve", lambda: model_servers.RAY_SERVE),
    "litserve": ("litserve", lambda: model_servers.LITSERVE),
    "mosec": ("mosec", lambda: model_servers.MOSEC),
    "bentoml": ("bentoml", lambda: model_servers.BENTOML),
    **{name: _queue_kind(name) for name in ("celery", "rq", "dramatiq", "arq", "taskiq", "faststream", "gradio")},
}
"""The kind of server of each package or module, with a function that returns the kind's `Attach` functions."""

STALLS: Mapping[str, Callable[[ModuleType, int, Recorder], list[Undo]]] = {
    blocked.MODULE: blocked.attach,
    blocked.UVLOOP: blocked.attach_uvloop,
    blocked.COLLECTOR: blocked.attach_collector,
}
"""The functions that record blocks of event loops and garbage collections longer than `limits.blocked`, by module."""


class Requests:
    """The instrumentor of a session's rule for requests. A profile has at most one such rule."""

    def __init__(self, rules: Sequence[RequestsRule], recorder: Recorder = RECORDER) -> None:
        self._recorder = recorder
        self._undos: list[Undo] = []
        self._met: dict[str, str] = {}
        self.ports: frozenset[int] = frozenset()
        """The ports of this process on which connections have been seen, by the agent or the session."""
        self._set_rules(rules)

    def _set_rules(self, rules: Sequence[RequestsRule]) -> None:
        self.rules = tuple(rules)
        self._blocked_ns = rules[0].blocked_ns if rules else None
        self._exchanges = [Exchanges(rule, self._recorder) for rule in rules]
        self._kinds = {kind for rule in rules for kind in rule.servers}
        self._seams = {
            module: (kind, attach)
            for kind, seams in (("asgi", servers.ASGI), ("wsgi", servers.WSGI))
            for module, attach in seams.items()
            if kind in self._kinds
        }
        self._known = {*self._seams, *((*ROUTERS, propagation.MODULE) if rules else ())}
        if self._blocked_ns is not None:
            self._known.update(STALLS)

    def may_match(self, module_name: str) -> bool:
        """Return True if a server or router of the module can be instrumented under the rule."""
        return module_name in self._known or self._find_seam(module_name) is not None

    def _find_seam(self, module_name: str) -> tuple[str, servers.Attach] | None:
        """Return the kind of a module's server, and the function that instruments it. Return None for other modules."""
        if module_name[:1].isdigit() and "triton" in self._kinds and triton.MODULE.fullmatch(module_name):
            return "triton", triton.attach
        kind, seams = KINDS.get(module_name) or KINDS.get(module_name.partition(".")[0], ("", dict))
        attach = seams().get(module_name) if kind in self._kinds else None
        return (kind, attach) if attach is not None else self._seams.get(module_name)

    def attach_to(self, module: ModuleType) -> bool:
        """Instrument the server or router of an imported module. If its version cannot be, verdicts report it."""
        name = module.__name__
        if name in self._met:
            return False
        try:
            self._met[name] = ""
            seam = self._find_seam(name)
            if seam is not None:
                kind, attach = seam
                undos = attach(module, self._exchanges[0])
                self._undos += undos
                self._met[name] = kind if undos else ""
            if name == propagation.MODULE:
                self._undos += propagation.attach(module, self._has_open_request, self._recorder)
            if name in STALLS and self._blocked_ns is not None:
                self._undos += STALLS[name](module, self._blocked_ns, self._recorder)
            if name in ROUTERS:
                self._undos += attach_routers(module)
        except (AttributeError, TypeError) as missing:
            self._met[name] = f"{name} {getattr(module, '__version__', '')} has no place where it can be met: {missing}"
        except Exception as fault:
            FAULTS.note(f"requests of {name}", fault)
        return False

    @staticmethod
    def _has_open_request() -> bool:
        exchange = CURRENT.get()
        return exchange is not None and exchange.is_open

    def change(self, rules: Sequence[RequestsRule], modules: Iterable[ModuleType]) -> None:
        """Apply another rule. Requests that are open end under the earlier rule."""
        self.undo()
        self._met.clear()
        before = self._exchanges
        self._set_rules(rules)
        for exchanges in before:
            exchanges.next = self._exchanges[0] if self._exchanges else None
        for module in modules:
            if self.may_match(module.__name__):
                self.attach_to(module)

    def probes_by_name(self) -> Mapping[str, Any]:
        """Return the rule by its text."""
        return {f"requests {rule.text}": rule for rule in self.rules}

    def undo(self) -> None:
        """Restore the functions of servers and routers. The verdicts still name them."""
        for exchanges in self._exchanges:
            exchanges.is_on = False
        undo_all(self._undos)

    def has_begun(self) -> bool:
        """Return True if this rule or a function rule has recorded the begin of a request."""
        has_met = any(exchanges.sites() for exchanges in self._exchanges)
        return has_met or any(site.kind == "request" for site in calls_by_site(self._recorder))

    def blockers(self) -> Mapping[Site, tuple[int, int]]:
        """Return the count of blocks of an event loop and the nanoseconds of the longest, by the blocking site."""
        return dict(blocked.BLOCKERS)

    def verdicts(self) -> list[Verdict]:
        """Return the verdict on the rule, and verdicts on requests that were not recorded."""
        pairs = zip(self.rules, self._exchanges, strict=True)
        return [verdict for rule, exchanges in pairs for verdict in self._rule_verdicts(rule, exchanges)]

    def _rule_verdicts(self, rule: RequestsRule, exchanges: Exchanges) -> list[Verdict]:
        """Return the verdict on a rule, and verdicts on requests that it did not record or name."""
        met = {name: kind for name, kind in self._met.items() if kind in SERVERS}
        lacking = [text for text in self._met.values() if " " in text]
        sites, calls_of = exchanges.sites(), calls_by_site(self._recorder)
        calls = sum(calls_of.get(site, 0) for site in sites)
        if lacking:
            verdict = Verdict(rule.text, "unreachable", why="; ".join(lacking))
        elif not met:
            verdict = Verdict(rule.text, "waiting", why=f"no server of {', '.join(rule.servers)} is imported")
        else:
            why = f"at {', '.join(sorted(met))}"
            if "mosec" in met.values():
                why += "; mosec's requests are not seen, but its workers' batches"
            state = "attached" if sites or "mosec" in met.values() else "uncalled"
            verdict = Verdict(rule.text, state, rule.text, why, calls=calls or None)
        return [verdict, *self._check_unmet(rule, sites, calls_of), *self._check_routes(rule, sites, calls_of)]

    def _check_unmet(self, rule: RequestsRule, sites: list[Site], calls_of: Mapping[Site, int]) -> Iterator[Verdict]:
        """Yield verdicts on connections and queues of this process for which no request was recorded.

        If requests came to another port, a port is named only if a server that cannot be instrumented is imported.
        """
        has_requests = bool(sites) or any(site.kind == "request" for site in calls_of)
        strangers = filter_by_role(sys.modules, "unmet")
        ports = self.ports - {dict(site.attributes).get(PORT) for site in sites}
        if ports and (strangers or not has_requests):
            port_text = f"port{'s' * (len(ports) > 1)} {', '.join(map(str, sorted(ports)))}"
            names = f"; requests of {' and '.join(strangers)} are not met" if strangers else ""
            why = f"they came to {port_text}, and no request was recorded there{names}; {REMEDY}"
            yield Verdict(rule.text, "unmet", "connections", why)
        queues = filter_by_role(sys.modules, "queue")
        if queues and not has_requests:
            names = " and ".join(name.partition(".")[0] for name in queues)
            yield Verdict(rule.text, "unmet", "jobs", f"{names} takes jobs from a queue; none was recorded; {REMEDY}")

    def _check_routes(self, rule: RequestsRule, sites: list[Site], calls_of: Mapping[Site, int]) -> Iterator[Verdict]:
        """Yield a verdict on missing routes, if no request has one and no known router is imported."""
        strangers = filter_by_role(sys.modules, "unrouted")
        rows = [(dict(site.attributes), calls_of.get(site, 0)) for site in sites]
        routed = sum(calls for facts, calls in rows if "http.route" in facts)
        unnamed = sum(calls for facts, calls in rows if "http.route" not in facts and "http.request.method" in facts)
        if routed or not unnamed or (ROUTERS.keys() & self._met.keys() and not strangers):
            return
        why = f"{', '.join(strangers)} is imported, whose router is not known" if strangers else "no router is known"
        many = "1 request has none" if unnamed == 1 else f"{unnamed} requests have none"
        yield Verdict(rule.text, "unreachable", "routes", f"{many}: {why}; they are named by their methods alone")
