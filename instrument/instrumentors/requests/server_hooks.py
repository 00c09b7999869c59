"""Record the requests of servers by endpoint, as the profile's `requests` rule selects. No rule has to name a function.

`Requests` instruments the imported servers. Servers of ASGI and WSGI call a proxy of their app, which records requests
until the `requests` rule is removed. Other servers have adapters, which are loaded with the server (`KINDS`).
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrument.instrumentors.functions import Instrumentor, Undo, call_before, change_argument, replaces
from instrument.instrumentors.known_packages import filter_by_role
from instrument.instrumentors.requests import asgi_apps, blocked, propagation, wsgi
from instrument.instrumentors.requests.exchange import PORT, Attach, Exchanges, ServedApp, current_exchange
from instrument.instrumentors.requests.routers import ROUTERS, attach_routers
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import SERVERS, RequestsRule
from instrument.recorder.core import calls_by_site
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import Site
from instrument.runtime.cheap_start import LazyModule
from instrument.runtime.faults import FAULTS
from instrument.runtime.threads import catch_up_with_fork

if TYPE_CHECKING:
    from instrument.instrumentors.requests import grpc, http_servers, model_servers, queue_jobs, triton, websockets
else:
    for _name in ("grpc", "http_servers", "model_servers", "queue_jobs", "triton", "websockets"):
        globals()[_name] = LazyModule(f"instrument.instrumentors.requests.{_name}")


def _make_recording_app(app: Any, kind: Any, exchanges: Exchanges) -> Any:
    """Return a proxy that records an app under a rule. An app that is such a proxy is returned itself."""
    inner = app
    while isinstance(inner, ServedApp):
        if inner.serves(exchanges):
            return app
        inner = inner.app
    return kind(inner, exchanges)  # proxies of earlier rules are left out


def _attach_to_method(class_name: str, method: str, kind: Any) -> Attach:
    """Return the `Attach` for a server that passes the app to a method at each request."""

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


def _attach_to_stored_app(class_name: str, method: str, kind: Any, place: str = "app") -> Attach:
    """Return the `Attach` for a server whose method reads the app from the attribute `place` of its object."""
    path, _, name = place.rpartition(".")
    holder_of = operator.attrgetter(path) if path else None

    def attach(module: Any, exchanges: Exchanges) -> list[Undo]:
        def record_app(server: Any, *_: Any, **__: Any) -> None:
            holder = server if holder_of is None else holder_of(server)
            setattr(holder, name, _make_recording_app(getattr(holder, name), kind, exchanges))

        return [call_before(getattr(module, class_name), method, record_app)]

    return attach


def _join_attaches(*ways: Attach) -> Attach:
    return lambda module, exchanges: [undo for attach in ways for undo in attach(module, exchanges)]


def _attach_to_app_argument(name: str, position: int, kind: Any) -> Attach:
    """Return the `Attach` for a server's function with the app as its argument at `position`."""

    def attach(module: Any, exchanges: Exchanges) -> list[Undo]:
        return [change_argument(module, name, position, lambda app: _make_recording_app(app, kind, exchanges))]

    return attach


EMBEDDING = frozenset({"uwsgi"})
"""The modules that identify servers in C. Such servers call the app without Python code."""


def _attach_to_app_class(class_name: str) -> Attach:
    """Return the `Attach` for a framework's app class. Servers in C call the app's `__call__`."""

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
    """Record the WSGI app of gunicorn's own workers, not of uvicorn's.

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


SEAMS: Mapping[str, Mapping[str, Attach]] = {
    "asgi": {
        "uvicorn.protocols.http.h11_impl": _attach_to_method("RequestResponseCycle", "run_asgi", asgi_apps.AsgiApp),
        "uvicorn.protocols.http.httptools_impl": _attach_to_method(
            "RequestResponseCycle", "run_asgi", asgi_apps.AsgiApp
        ),
        "uvicorn.protocols.websockets.websockets_impl": _attach_to_stored_app(
            "WebSocketProtocol", "run_asgi", asgi_apps.AsgiApp
        ),
        "uvicorn.protocols.websockets.websockets_sansio_impl": _attach_to_stored_app(
            "WebSocketsSansIOProtocol", "run_asgi", asgi_apps.AsgiApp
        ),
        "uvicorn.protocols.websockets.wsproto_impl": _attach_to_stored_app("WSProtocol", "run_asgi", asgi_apps.AsgiApp),
        "hypercorn.app_wrappers": _join_attaches(
            _attach_to_stored_app("ASGIWrapper", "__call__", asgi_apps.AsgiApp),
            _attach_to_stored_app("WSGIWrapper", "__call__", wsgi.WsgiApp),
        ),
        "daphne.server": _attach_to_stored_app("Server", "create_application", asgi_apps.AsgiApp, "application"),
        "granian.asgi": _attach_to_app_argument("_callback_wrapper", 0, asgi_apps.AsgiApp),
        "gunicorn.asgi.protocol": _join_attaches(
            _attach_to_stored_app("ASGIProtocol", "_handle_http_request", asgi_apps.AsgiApp),
            _attach_to_stored_app("ASGIProtocol", "_handle_http2_request", asgi_apps.AsgiApp),
            _attach_to_stored_app("ASGIProtocol", "_handle_websocket", asgi_apps.AsgiApp),
        ),
    },
    "wsgi": {
        "gunicorn.workers.base": _attach_gunicorn,
        "waitress.task": _attach_to_stored_app("WSGITask", "execute", wsgi.WsgiApp, "channel.server.application"),
        "wsgiref.handlers": _attach_to_method("BaseHandler", "run", wsgi.WsgiApp),
        "werkzeug.serving": _attach_to_stored_app("WSGIRequestHandler", "run_wsgi", wsgi.WsgiApp, "server.app"),
        "granian.wsgi": _attach_to_app_argument("_callback_wrapper", 0, wsgi.WsgiApp),
        "gevent.pywsgi": _attach_to_stored_app("WSGIHandler", "run_application", wsgi.WsgiApp, "application"),
        "cheroot.wsgi": _attach_to_stored_app("Gateway", "respond", wsgi.WsgiApp, "req.server.wsgi_app"),
        "tornado.wsgi": _attach_to_stored_app("WSGIContainer", "handle_request", wsgi.WsgiApp, "wsgi_application"),
        "bjoern": _attach_to_app_argument("server_run", 1, wsgi.InterleavedApp),
        "flask.app": _attach_to_app_class("Flask"),
        "django.core.handlers.wsgi": _attach_to_app_class("WSGIHandler"),
        "falcon.app": _attach_to_app_class("App"),
        "bottle": _attach_to_app_class("Bottle"),
    },
}
"""The functions that make a server's module record requests, by kind of server (ASGI, WSGI) and module."""

KINDS: Mapping[str, tuple[str, Any]] = {
    "aiohttp": ("aiohttp", http_servers),
    "http.server": ("http_server", http_servers),
    **dict.fromkeys(("tornado.web", "tornado.websocket"), ("tornado", http_servers)),
    "sanic": ("sanic", http_servers),
    "grpc": ("grpc", grpc),
    "grpclib.server": ("grpclib", grpc),
    **{
        f"websockets.{name}": ("websockets", websockets)
        for name in (
            *("asyncio.server", "sync.server", "trio.server", "legacy.server"),
            *("asyncio.router", "sync.router"),
        )
    },
    "ray": ("ray_serve", model_servers),
    **{name: (name, model_servers) for name in ("litserve", "mosec", "bentoml")},
    **{name: (name, queue_jobs) for name in ("celery", "rq", "dramatiq", "arq", "taskiq", "faststream", "gradio")},
}
"""The kind of server for each package or module, with the adapter that has this kind in its `SEAMS`."""

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
        return module_name in self._known or self._find_seam(module_name) is not None

    def _find_seam(self, module_name: str) -> tuple[str, Attach] | None:
        """Return the kind of server that a module belongs to, and the function that instruments the module. Return None
        for other modules."""
        if module_name[:1].isdigit() and "triton" in self._kinds and triton.TRITON_MODEL.fullmatch(module_name):
            return "triton", triton.attach_triton
        kind, adapter = KINDS.get(module_name) or KINDS.get(module_name.partition(".")[0], ("", None))
        if kind in self._kinds and module_name in adapter.SEAMS[kind]:
            return kind, adapter.SEAMS[kind][module_name]
        kinds = (kind for kind, seams in SEAMS.items() if kind in self._kinds and module_name in seams)
        return next(((kind, SEAMS[kind][module_name]) for kind in kinds), None)

    def attach_to(self, module: ModuleType) -> None:
        """Instrument an imported server or router. An unsupported version gets a verdict."""
        name = module.__name__
        if name in self._met:
            return
        try:
            self._met[name] = ""
            seam = self._find_seam(name)
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
                self._undos += attach_routers(module)
        except (AttributeError, TypeError) as missing:
            self._met[name] = f"{name} {getattr(module, '__version__', '')} has no place where it can be met: {missing}"
        except Exception as fault:
            FAULTS.note(f"requests of {name}", fault)

    def change(self, rules: Sequence[RequestsRule], modules: Iterable[ModuleType]) -> None:
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
        """Restore the functions of servers and routers. Later verdicts still name them."""
        if self._exchanges is not None:
            self._exchanges.is_on = False
        super().undo()

    def has_begun(self) -> bool:
        """Return True if the start of a request has been recorded, by this rule or a function rule."""
        has_met = self._exchanges is not None and bool(self._exchanges.sites())
        return has_met or any(site.kind == "request" for site in calls_by_site(self._recorder))

    def blockers(self) -> Mapping[Site, tuple[int, int]]:
        """Return each site that blocked an event loop, with the number of blocks and the longest in ns."""
        return dict(blocked.BLOCKERS)

    def verdicts(self) -> list[Verdict]:
        """Return the verdict on the rule, and on requests that were not recorded or have no route."""
        if self._exchanges is None:
            return []
        rule: RequestsRule = self.rules[0]
        met = {name: kind for name, kind in self._met.items() if kind in SERVERS}
        lacking = [text for text in self._met.values() if " " in text]
        sites, calls_of = self._exchanges.sites(), calls_by_site(self._recorder)
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
        """Yield verdicts on this process's connections and queues without a recorded request."""
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
        """Yield a verdict if no request has a route and no known router is imported."""
        strangers = filter_by_role(sys.modules, "unrouted")
        rows = [(dict(site.attributes), calls_of.get(site, 0)) for site in sites]
        routed = sum(calls for facts, calls in rows if "http.route" in facts)
        unnamed = sum(calls for facts, calls in rows if "http.route" not in facts and "http.request.method" in facts)
        if routed or not unnamed or (ROUTERS.keys() & self._met.keys() and not strangers):
            return
        why = f"{', '.join(strangers)} is imported, whose router is not known" if strangers else "no router is known"
        many = "1 request has none" if unnamed == 1 else f"{unnamed} requests have none"
        yield Verdict(rule.text, "unreachable", "routes", f"{many}: {why}; they are named by their methods alone")
