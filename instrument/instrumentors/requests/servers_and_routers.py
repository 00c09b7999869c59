"""Record the requests of the imported servers, by endpoint, for the profile's `requests` rule.

For ASGI and WSGI servers, the app is replaced by a recording proxy. Other servers have adapters (`KINDS`), which are
loaded with the server. The names of requests come from the routers of web frameworks (`ROUTERS`).
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from instrument.instrumentors.known_packages import filter_packages_by_role
from instrument.instrumentors.profiled_functions import (
    Instrumentor,
    Undo,
    change_argument,
    note_calls,
    replace_attribute,
    replaces_attribute,
)
from instrument.instrumentors.requests import blocked, propagation
from instrument.instrumentors.requests.asgi_wsgi_apps import AsgiApp, InterleavedApp, WsgiApp
from instrument.instrumentors.requests.exchange import (
    CURRENT,
    PORT,
    Attach,
    Exchange,
    Exchanges,
    ServedApp,
    current_exchange,
)
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import SERVERS, RequestsRule
from instrument.recorder.core import calls_by_site
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import Site
from instrument.runtime.faults import FAULTS
from instrument.runtime.lazy_imports import LazyModule, NamedTuple
from instrument.runtime.threads import catch_up_with_fork

if TYPE_CHECKING:
    from instrument.instrumentors.requests import grpc, model_servers, non_asgi_servers, queue_jobs, triton, websockets
else:
    for _name in ("grpc", "non_asgi_servers", "model_servers", "queue_jobs", "triton", "websockets"):
        globals()[_name] = LazyModule(f"instrument.instrumentors.requests.{_name}")


class Router(NamedTuple):
    """A framework's method that finds a request's route.

    `route` reads the route from the call's arguments, or from the call's result if `after` is True. `note` stores a
    route that is not None. `older` is True if older versions lack the method.
    """

    module: str
    owner: str
    method: str
    route: Callable[..., Any]
    after: bool = False
    note: Callable[[Exchange, Any], None] = Exchange.set_route
    older: bool = False

    def attach(self, module: Any) -> list[Undo]:
        """Wrap the method, so that it names the span of an open request. Raises `AttributeError` or `TypeError` for a
        missing method, unless `older` is True."""
        owner = getattr(module, self.owner)
        if self.older and self.method not in vars(owner):
            return []
        original = getattr(owner, self.method)
        if not isinstance(original, FunctionType) and not hasattr(original, "cache_clear"):  # such as a slot
            raise TypeError(f"{owner.__name__}.{self.method} is a {type(original).__name__}")
        read, after, note = self.route, self.after, self.note

        @wraps(original)
        def record_route(*args: Any, **kwargs: Any) -> Any:
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

        @wraps(original)
        async def call_app_noting_route(*args: Any, **kwargs: Any) -> Any:
            return await record_route(*args, **kwargs)

        if self.method == "__call__":  # asgiref takes an app without a coroutine function for one of ASGI 2
            return [replace_attribute(owner, self.method, call_app_noting_route)]
        for name in ("cache_clear", "cache_info", "cache_parameters"):
            if hasattr(original, name):
                setattr(record_route, name, getattr(original, name))
        is_static = isinstance(vars(owner).get(self.method), staticmethod)
        return [replace_attribute(owner, self.method, staticmethod(record_route) if is_static else record_route)]


def _read_route_path(_: Any, route: Any, *__: Any) -> str:
    path: str = route.path
    return path


def _read_fastapi_path(_: Any, route: Any, scope: Any, *__: Any) -> str:
    included = scope.get("fastapi", {}).get("effective_route_context")
    path: str = (included if included is not None and included.original_route is route else route).path
    return path


def _make_flask_reader(name: str) -> Callable[..., str | None]:
    def read_flask_rule(module: Any, _: Any, context: Any = None, *__: Any) -> str | None:
        rule = getattr(module if context is None else context, name).url_rule
        return None if rule is None else rule.rule

    return read_flask_rule


def _add_slash(pattern: str) -> str:
    return pattern if pattern.startswith(("/", "^")) else f"/{pattern}"


def _read_channels_route(_: Any, router: Any, scope: Any, *__: Any) -> tuple[str, bool] | None:
    """Return the pattern of the first route of Channels that matches. The second value is True if the route leads to
    another router."""
    path = scope.get("path_remaining")
    if path is None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
    for route in router.routes:
        if route.pattern.match(path.lstrip("/")):
            pattern = _add_slash(str(route.pattern))
            return (pattern, hasattr(route.callback, "_path_routing")) if pattern != "/" else None
    return None


def _note_channels_route(exchange: Exchange, route: tuple[str, bool]) -> None:
    (exchange.add_route_prefix if route[1] else exchange.set_route)(route[0])


def _read_aiohttp_route(_: Any, match: Any, *__: Any) -> str | None:
    return getattr(match.route.resource, "canonical", None)


def _read_blacksheep_route(_: Any, match: Any) -> str | None:
    return None if match is None or match.pattern == b"*" else match.pattern.decode()


def _end_websocket_with_exception(exchange: Exchange, error: BaseException) -> None:
    """End a websocket with an exception that its framework hides from the server."""
    exchange.end_after_server(error, is_gone=True, in_parts=False)


_DJANGO, _BLACKSHEEP, _ERROR = "django.core.handlers.base", "blacksheep.server.routing", "handle_websocket_exception"
_ROUTERS = (
    Router("starlette.routing", "Route", "handle", _read_route_path),
    Router("starlette.routing", "WebSocketRoute", "handle", _read_route_path),
    Router("starlette.routing", "Mount", "handle", _read_route_path, note=Exchange.add_route_prefix),
    Router("fastapi.routing", "APIRoute", "handle", _read_fastapi_path, older=True),
    Router("fastapi.routing", "APIWebSocketRoute", "handle", _read_fastapi_path, older=True),
    Router("litestar.routes.http", "HTTPRoute", "handle", _read_route_path),
    Router("litestar.routes.websocket", "WebSocketRoute", "handle", _read_route_path),
    Router(
        *("litestar.middleware._internal.exceptions.middleware", "ExceptionHandlerMiddleware", _ERROR),
        lambda _, __, error: None if hasattr(error, "code") else error,  # a code is an answer
        note=_end_websocket_with_exception,
        older=True,
    ),
    Router("flask.app", "Flask", "full_dispatch_request", _make_flask_reader("request")),
    Router("quart.app", "Quart", "full_dispatch_request", _make_flask_reader("request")),
    Router("quart.app", "Quart", "full_dispatch_websocket", _make_flask_reader("websocket")),
    Router("quart.app", "Quart", _ERROR, lambda *call: call[-1], note=_end_websocket_with_exception, older=True),
    Router(_DJANGO, "BaseHandler", "resolve_request", lambda _, match: _add_slash(match.route), after=True),
    Router("channels.routing", "URLRouter", "__call__", _read_channels_route, note=_note_channels_route),
    Router("falcon.app", "App", "_get_responder", lambda _, responder: responder[3] or None, after=True),
    Router("bottle", "Router", "match", lambda _, match: match[0].rule, after=True),
    Router(_BLACKSHEEP, "Router", "get_match", _read_blacksheep_route, after=True),
    Router(_BLACKSHEEP, "Router", "get_match_by_method_and_path", _read_blacksheep_route, after=True),
    Router(_BLACKSHEEP, "RouterFiltersMixin", "get_match", _read_blacksheep_route, after=True, older=True),
    Router("sanic.router", "Router", "get", lambda _, match: match[0].uri, after=True),
    Router("aiohttp.web_urldispatcher", "UrlMappingMatchInfo", "freeze", _read_aiohttp_route),
)
ROUTERS = {name: [router for router in _ROUTERS if router.module == name] for name, *_ in _ROUTERS}


def _make_recording_app(app: Any, kind: Any, exchanges: Exchanges) -> Any:
    """Return a proxy that records the requests of an app. Proxies of earlier rules are removed."""
    inner = app
    while isinstance(inner, ServedApp):
        if inner.instrument_exchanges is exchanges:
            return app
        inner = inner.app
    return kind(inner, exchanges)  # proxies of earlier rules are left out


def _attach_to_method(class_name: str, method: str, kind: Any, module: Any, exchanges: Exchanges) -> list[Undo]:
    """Record the apps of a server that passes the app to a method at each request."""
    owner = getattr(module, class_name)
    run = getattr(owner, method)
    last: tuple[Any, Any] = None, None

    @replaces_attribute(owner, method)
    def restore_method(self: Any, app: Any) -> Any:
        nonlocal last
        app_before, served = last
        if app_before is not app or served is None:
            served = _make_recording_app(app, kind, exchanges)
            last = app, served
        return run(self, served)

    return [restore_method]


def _attach_to_stored_app(
    class_name: str, methods: str, kind: Any, module: Any, exchanges: Exchanges, place: str = "app"
) -> list[Undo]:
    """Record the app of a server that stores the app in the attribute `place` of an object."""
    path, _, name = place.rpartition(".")
    holder_of = operator.attrgetter(path) if path else None

    def wrap_stored_app(server: Any, *_: Any, **__: Any) -> None:
        holder = server if holder_of is None else holder_of(server)
        setattr(holder, name, _make_recording_app(getattr(holder, name), kind, exchanges))

    return [note_calls(getattr(module, class_name), method, wrap_stored_app) for method in methods.split()]


def _attach_to_app_argument(name: str, position: int, kind: Any, module: Any, exchanges: Exchanges) -> list[Undo]:
    return [change_argument(module, name, position, lambda app: _make_recording_app(app, kind, exchanges))]


EMBEDDING = frozenset({"uwsgi"})
"""The modules whose import shows that a server written in C calls the app directly."""


def _attach_to_app_class(class_name: str, module: Any, exchanges: Exchanges) -> list[Undo]:
    """Record the requests of a framework's app class. Servers written in C, such as uWSGI, call the app directly."""
    if EMBEDDING.isdisjoint(sys.modules):
        return []
    owner = getattr(module, class_name)
    call = owner.__call__

    @replaces_attribute(owner, "__call__")
    def restore_app_call(self: Any, environ: Any, start_response: Any) -> Any:
        catch_up_with_fork()
        return WsgiApp(partial(call, self), exchanges)(environ, start_response)

    return [restore_app_call]


def _attach_gunicorn(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Record the WSGI app of gunicorn's own workers, not the app of uvicorn's workers.

    An app of Tornado is left alone, because Tornado's worker tests the app's type.
    """
    worker = module.Worker
    load = worker.load_wsgi

    @replaces_attribute(worker, "load_wsgi")
    def restore_load_wsgi(self: Any) -> None:
        load(self)
        is_of_tornado = any(kind.__module__.startswith("tornado.") for kind in type(self.wsgi).__mro__)
        if hasattr(type(self), "handle_request") and not is_of_tornado:
            self.wsgi = _make_recording_app(self.wsgi, WsgiApp, exchanges)

    return [restore_load_wsgi]


_GUNICORN_METHODS = "_handle_http_request _handle_http2_request _handle_websocket"

SEAMS: Mapping[str, Mapping[str, Attach]] = {
    "asgi": {
        **{
            f"uvicorn.protocols.http.{name}": partial(_attach_to_method, "RequestResponseCycle", "run_asgi", AsgiApp)
            for name in ("h11_impl", "httptools_impl")
        },
        **{
            f"uvicorn.protocols.websockets.{name}": partial(_attach_to_stored_app, protocol, "run_asgi", AsgiApp)
            for name, protocol in (
                ("websockets_impl", "WebSocketProtocol"),
                ("websockets_sansio_impl", "WebSocketsSansIOProtocol"),
                ("wsproto_impl", "WSProtocol"),
            )
        },
        "hypercorn.app_wrappers": lambda module, exchanges: [
            undo
            for class_name, kind in (("ASGIWrapper", AsgiApp), ("WSGIWrapper", WsgiApp))
            for undo in _attach_to_stored_app(class_name, "__call__", kind, module, exchanges)
        ],
        "daphne.server": partial(_attach_to_stored_app, "Server", "create_application", AsgiApp, place="application"),
        "granian.asgi": partial(_attach_to_app_argument, "_callback_wrapper", 0, AsgiApp),
        "gunicorn.asgi.protocol": partial(_attach_to_stored_app, "ASGIProtocol", _GUNICORN_METHODS, AsgiApp),
    },
    "wsgi": {
        "gunicorn.workers.base": _attach_gunicorn,
        "wsgiref.handlers": partial(_attach_to_method, "BaseHandler", "run", WsgiApp),
        **{
            name: partial(_attach_to_stored_app, class_name, method, WsgiApp, place=place)
            for name, class_name, method, place in (
                ("waitress.task", "WSGITask", "execute", "channel.server.application"),
                ("werkzeug.serving", "WSGIRequestHandler", "run_wsgi", "server.app"),
                ("gevent.pywsgi", "WSGIHandler", "run_application", "application"),
                ("cheroot.wsgi", "Gateway", "respond", "req.server.wsgi_app"),
                ("tornado.wsgi", "WSGIContainer", "handle_request", "wsgi_application"),
            )
        },
        "granian.wsgi": partial(_attach_to_app_argument, "_callback_wrapper", 0, WsgiApp),
        "bjoern": partial(_attach_to_app_argument, "server_run", 1, InterleavedApp),
        "flask.app": partial(_attach_to_app_class, "Flask"),
        "django.core.handlers.wsgi": partial(_attach_to_app_class, "WSGIHandler"),
        "falcon.app": partial(_attach_to_app_class, "App"),
        "bottle": partial(_attach_to_app_class, "Bottle"),
    },
}
"""The functions that instrument the modules of ASGI and WSGI servers, by kind of server and module name."""

KINDS: Mapping[str, tuple[str, Any]] = {
    "aiohttp": ("aiohttp", non_asgi_servers),
    "http.server": ("http_server", non_asgi_servers),
    **dict.fromkeys(("tornado.web", "tornado.websocket"), ("tornado", non_asgi_servers)),
    "sanic": ("sanic", non_asgi_servers),
    "grpc": ("grpc", grpc),
    "grpclib.server": ("grpclib", grpc),
    **{
        f"websockets.{name}": ("websockets", websockets)
        for name in ("asyncio.server", "sync.server", "trio.server", "legacy.server", "asyncio.router", "sync.router")
    },
    "ray": ("ray_serve", model_servers),
    **{name: (name, model_servers) for name in ("litserve", "mosec", "bentoml")},
    **{name: (name, queue_jobs) for name in ("celery", "rq", "dramatiq", "arq", "taskiq", "faststream", "gradio")},
}
"""The kind of server and the module that instruments it, by name of the server's package or module."""

STALLS: Mapping[str, Callable[[ModuleType, int, Recorder], list[Undo]]] = {
    blocked.ASYNCIO: blocked.attach_asyncio,
    blocked.UVLOOP: blocked.attach_uvloop,
    blocked.COLLECTOR: blocked.attach_collector,
}
"""The functions that record blocked event loops and long garbage collections, by module."""

REMEDY = "give the function that handles one a rule of `kind: request`"


class Requests(Instrumentor):
    """The instrumentor of a session's rule for requests. A profile has at most one such rule."""

    def __init__(self, rules: Sequence[RequestsRule], recorder: Recorder = RECORDER) -> None:
        super().__init__(rules, recorder)
        self._met: dict[str, str] = {}
        self.ports: frozenset[int] = frozenset()
        """The ports of this process on which connections have been seen, by the agent or the session."""
        self._set_rules(rules)

    def _set_rules(self, rules: Sequence[RequestsRule]) -> None:
        self.rules = tuple(rules)
        self._blocked_ns = rules[0].blocked_ns if rules else None
        self._exchanges = Exchanges(rules[0], self._recorder) if rules else None
        self._kinds = {kind for rule in rules for kind in rule.servers}
        self._known = {*ROUTERS, propagation.OPENTELEMETRY} if rules else set()
        if self._blocked_ns is not None:
            self._known.update(STALLS)

    def may_match(self, module_name: str) -> bool:
        return module_name in self._known or self._find_attach_function(module_name) is not None

    def _find_attach_function(self, module_name: str) -> tuple[str, Attach] | None:
        if module_name[:1].isdigit() and "triton" in self._kinds and triton.TRITON_MODEL.fullmatch(module_name):
            return "triton", triton.attach_triton
        kind, adapter = KINDS.get(module_name) or KINDS.get(module_name.partition(".")[0], ("", None))
        if kind in self._kinds and module_name in adapter.SEAMS[kind]:
            return kind, adapter.SEAMS[kind][module_name]
        kinds = (kind for kind, seams in SEAMS.items() if kind in self._kinds and module_name in seams)
        return next(((kind, SEAMS[kind][module_name]) for kind in kinds), None)

    def attach_to(self, module: ModuleType) -> None:
        name = module.__name__
        if name in self._met:
            return
        try:
            self._met[name] = ""
            seam = self._find_attach_function(name)
            if seam is not None and self._exchanges is not None:
                kind, attach = seam
                undos = attach(module, self._exchanges)
                self._undos += undos
                self._met[name] = kind if undos else ""
            if name == propagation.OPENTELEMETRY:
                self._undos += propagation.attach_opentelemetry(
                    module, lambda: current_exchange() is not None, self._recorder
                )
            if name in STALLS and self._blocked_ns is not None:
                self._undos += STALLS[name](module, self._blocked_ns, self._recorder)
            if name in ROUTERS:
                self._undos += [undo for router in ROUTERS[name] for undo in router.attach(module)]
        except (AttributeError, TypeError) as missing:
            self._met[name] = f"{name} {getattr(module, '__version__', '')} has no place where it can be met: {missing}"
        except Exception as fault:
            FAULTS.note(f"requests of {name}", fault)

    def change_rules(self, rules: Sequence[RequestsRule], modules: Iterable[ModuleType]) -> None:
        """Apply another rule. Open requests still end under the old rule."""
        self.undo()
        self._met.clear()
        before = self._exchanges
        self._set_rules(rules)
        if before is not None:
            before.next = self._exchanges
        for module in modules:
            if self.may_match(module.__name__):
                self.attach_to(module)

    def probes_by_name(self) -> Mapping[str, Any]:
        return {f"requests {rule.text}": rule for rule in self.rules}

    def undo(self) -> None:
        if self._exchanges is not None:
            self._exchanges.is_on = False
        super().undo()

    def has_begun_request(self) -> bool:
        has_met = self._exchanges is not None and bool(self._exchanges.sites)
        return has_met or any(site.kind == "request" for site in calls_by_site(self._recorder))

    def blockers(self) -> Mapping[Site, tuple[int, int]]:
        """Return the sites that blocked an event loop, with the number of blocks and the length of the longest block in
        ns."""
        return dict(blocked.BLOCKERS)

    def verdicts(self) -> list[Verdict]:
        if self._exchanges is None:
            return []
        rule: RequestsRule = self.rules[0]
        met = {name: kind for name, kind in self._met.items() if kind in SERVERS}
        lacking = [text for text in self._met.values() if " " in text]
        sites, calls_of = list(self._exchanges.sites.values()), calls_by_site(self._recorder)
        calls = sum(calls_of.get(site, 0) for site in sites)
        if lacking:
            verdict = Verdict(rule.text, "unreachable", why="; ".join(lacking))
        elif not met:
            verdict = Verdict(rule.text, "waiting", why=f"no server of {', '.join(rule.servers)} is imported")
        else:
            why = f"at {', '.join(sorted(met))}"
            state = "attached" if sites or "mosec" in met.values() else "uncalled"
            verdict = Verdict(rule.text, state, rule.text, why, calls=calls or None)
        unrecorded = self._explain_unrecorded_requests(rule, sites, calls_of)
        return [verdict, *unrecorded, *self._explain_missing_routes(rule, sites, calls_of)]

    def _explain_unrecorded_requests(
        self, rule: RequestsRule, sites: list[Site], calls_of: Mapping[Site, int]
    ) -> Iterator[Verdict]:
        has_requests = bool(sites) or any(site.kind == "request" for site in calls_of)
        strangers = filter_packages_by_role(sys.modules, "unmet")
        ports = self.ports - {dict(site.attributes).get(PORT) for site in sites}
        if ports and (strangers or not has_requests):
            port_text = f"port{'s' * (len(ports) > 1)} {', '.join(map(str, sorted(ports)))}"
            names = f"; requests of {' and '.join(strangers)} are not met" if strangers else ""
            why = f"they came to {port_text}, and no request was recorded there{names}; {REMEDY}"
            yield Verdict(rule.text, "unmet", "connections", why)
        queues = filter_packages_by_role(sys.modules, "queue")
        if queues and not has_requests:
            names = " and ".join(name.partition(".")[0] for name in queues)
            yield Verdict(rule.text, "unmet", "jobs", f"{names} takes jobs from a queue; none was recorded; {REMEDY}")

    def _explain_missing_routes(
        self, rule: RequestsRule, sites: list[Site], calls_of: Mapping[Site, int]
    ) -> Iterator[Verdict]:
        strangers = filter_packages_by_role(sys.modules, "unrouted")
        rows = [(dict(site.attributes), calls_of.get(site, 0)) for site in sites]
        routed = sum(calls for facts, calls in rows if "http.route" in facts)
        unnamed = sum(calls for facts, calls in rows if "http.route" not in facts and "http.request.method" in facts)
        if routed or not unnamed or (ROUTERS.keys() & self._met.keys() and not strangers):
            return
        why = f"{', '.join(strangers)} is imported, whose router is not known" if strangers else "no router is known"
        many = "1 request has none" if unnamed == 1 else f"{unnamed} requests have none"
        yield Verdict(rule.text, "unreachable", "routes", f"{many}: {why}; they are named by their methods alone")
