"""Servers call the apps that they serve: the called app is the one that the host gave."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from readback import spans_in

from instrument.instrumentors.requests import asgi_wsgi_apps, model_servers, servers_and_routers
from instrument.instrumentors.requests.exchange import Exchanges
from instrument.instrumentors.requests.servers_and_routers import Requests
from instrument.profile.model import RequestsRule
from instrument.runtime.faults import FAULTS


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
    """Return granian's wrapper of apps."""
    return SimpleNamespace(_callback_wrapper=lambda callback, scope_opts: callback)


def test_granian_calls_the_middleware_that_holds_an_app_of_its_own(module: Any, recorder: Any) -> None:
    called: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        called.append("app")

    (undo,) = servers_and_routers.SEAMS["asgi"]["granian.asgi"](module, Exchanges(RequestsRule(), recorder))
    served = module._callback_wrapper(Asgi(app, called), {})
    undo()
    asyncio.run(served({"type": "http", "method": "GET", "path": "/", "headers": []}, None, None))
    assert called == ["middleware", "app"]
    assert len(spans_in(recorder)) == 1


def test_granian_calls_the_wsgi_middleware_that_holds_an_app_of_its_own(module: Any, recorder: Any) -> None:
    called: list[str] = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        called.append("app")
        return [b"it"]

    (undo,) = servers_and_routers.SEAMS["wsgi"]["granian.wsgi"](module, Exchanges(RequestsRule(), recorder))
    served = module._callback_wrapper(Wsgi(app, called), {})
    undo()
    environ = {"wsgi.url_scheme": "http", "SERVER_NAME": "shop", "SERVER_PORT": "80", "REQUEST_METHOD": "GET"}
    assert served(environ, None) == [b"it"]
    assert called == ["middleware", "app"]
    assert len(spans_in(recorder)) == 1


def test_a_server_that_names_its_app_with_each_request_calls_that_app() -> None:
    class RequestResponseCycle:
        """The class by which uvicorn handles each request."""

        async def run_asgi(self, app: Any) -> None:
            called.append(app)

    called: list[Any] = []
    module = SimpleNamespace(RequestResponseCycle=RequestResponseCycle)
    (undo,) = servers_and_routers.SEAMS["asgi"]["uvicorn.protocols.http.h11_impl"](module, Exchanges(RequestsRule()))
    apps = [object(), object()]
    for app in (apps[0], apps[0], apps[1], apps[0]):
        asyncio.run(RequestResponseCycle().run_asgi(app))
    undo()
    assert [served.app for served in called] == [apps[0], apps[0], apps[1], apps[0]]
    assert called[0] is called[1], "one made for each request would forget what it has seen"


class Replica:
    """The attributes of a deployment by which Ray Serve calls its code."""

    _deployment_id = SimpleNamespace(name="shop")
    _local_testing_mode = False

    async def call_http_entrypoint(self, metadata: Any, told: Any, scope: Any, receive: Any) -> AsyncIterator[Any]:
        yield [{"type": "http.response.start", "status": 200, "headers": []}]
        yield [{"type": "http.response.body", "body": b"it"}]

    async def call_user_method(self, metadata: Any, *args: Any) -> Any:
        return args

    async def call_user_generator(self, metadata: Any, *args: Any) -> AsyncIterator[Any]:
        for one in args:
            yield one


async def asked(replica: Replica) -> list[Any]:
    """The answers to a request of each kind."""
    metadata = SimpleNamespace(call_method="sell", route="/sell")
    scope = {"type": "http", "method": "GET", "path": "/sell", "headers": []}
    parts = [part async for part in replica.call_http_entrypoint(metadata, None, scope, None)]
    items = [item async for item in replica.call_user_generator(metadata, 1, 2)]
    return [len(parts), await replica.call_user_method(metadata, 1, 2), items]


@pytest.mark.parametrize("broken", [True, False])
def test_faults_of_ours_are_counted_and_ray_serves_callers_have_their_answers(
    recorder: Any, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    def fault(*_: Any) -> Any:
        raise RuntimeError("a fault of ours")

    replica = type("Replica", (Replica,), dict(vars(Replica)))
    undos = model_servers.SEAMS["ray_serve"]["ray.serve._private.replica"](
        SimpleNamespace(UserCallableWrapper=replica), Exchanges(RequestsRule(), recorder)
    )
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    if broken:
        monkeypatch.setattr(type(recorder), "open_request", fault, raising=False)
    # This replica knows nothing of its methods, as another version of Ray may.
    assert asyncio.run(asked(replica())) == [2, (1, 2), [1, 2]]
    assert sum(FAULTS.count_by_place().values()) == (3 if broken else 1)
    FAULTS.clear()
    recorder.on = False
    assert asyncio.run(asked(replica())) == [2, (1, 2), [1, 2]]
    recorder.on = True
    assert len(spans_in(recorder)) == (0 if broken else 3)
    assert (recorder.open_rows(), FAULTS.count_by_place()) == ([], {})
    for undo in undos:
        undo()


def test_a_server_that_keeps_its_app_elsewhere_serves_on_without_us(monkeypatch: pytest.MonkeyPatch) -> None:
    class WSGIHandler:
        """The class by which gevent handles each request, in a version that has its app under another name."""

        def run_application(self) -> str:
            return "served"

    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    module = SimpleNamespace(WSGIHandler=WSGIHandler, __name__="gevent.pywsgi")
    (undo,) = servers_and_routers.SEAMS["wsgi"]["gevent.pywsgi"](module, Exchanges(RequestsRule()))
    assert WSGIHandler().run_application() == "served"
    undo()
    assert list(FAULTS.count_by_place().values()) == [1]
    FAULTS.clear()


ENVIRON = {"wsgi.url_scheme": "http", "SERVER_NAME": "shop", "SERVER_PORT": "80", "REQUEST_METHOD": "GET"}


def app_of_wsgi(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [])
    return [b"it"]


def test_bjoern_is_given_an_app_whose_requests_record(recorder: Any) -> None:
    module = SimpleNamespace(server_run=lambda sock, wsgi_app, statsd=None: wsgi_app(ENVIRON, lambda *_: None))
    (undo,) = servers_and_routers.SEAMS["wsgi"]["bjoern"](module, Exchanges(RequestsRule(), recorder))
    assert module.server_run(None, app_of_wsgi, None) == [b"it"]
    undo()
    assert len(spans_in(recorder)) == 1


def test_bjoern_begins_a_request_while_other_answers_are_on_their_way(recorder: Any) -> None:
    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        return iter([b"a", b"b"])

    def serve(sock: Any, wsgi_app: Any) -> None:
        bodies = [wsgi_app(ENVIRON, lambda *_: None) for _ in range(3)]
        assert [list(zip(*bodies, strict=True))] == [[(b"a",) * 3, (b"b",) * 3]]
        for body in bodies:
            assert list(body) == []
            body.close()

    module = SimpleNamespace(server_run=serve)
    (undo,) = servers_and_routers.SEAMS["wsgi"]["bjoern"](module, Exchanges(RequestsRule(), recorder))
    module.server_run(None, app)
    undo()
    spans = spans_in(recorder)
    assert [(span.site.name, span.parent_id) for span in spans] == [("GET", 0)] * 3


def test_an_app_that_a_server_in_c_calls_is_met_at_its_framework(
    recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    flask = pytest.importorskip("flask.app")
    exchanges = Exchanges(RequestsRule(), recorder)
    assert servers_and_routers.SEAMS["wsgi"]["flask.app"](flask, exchanges) == [], (
        "other servers call their apps from Python"
    )
    monkeypatch.setitem(sys.modules, "uwsgi", ModuleType("uwsgi"))
    (undo,) = servers_and_routers.SEAMS["wsgi"]["flask.app"](flask, exchanges)
    app = flask.Flask("shop")
    app.add_url_rule("/", view_func=lambda: "it")
    body = app({**ENVIRON, "PATH_INFO": "/", "wsgi.input": io.BytesIO()}, lambda *_: None)
    assert b"".join(body) == b"it"
    body.close()
    undo()
    assert [span.site.name for span in spans_in(recorder)] == ["GET"]


def test_an_app_that_a_server_was_given_once_goes_over_to_the_rule_of_a_reload(recorder: Any) -> None:
    family = Requests((RequestsRule(),), recorder)
    module: Any = ModuleType("granian.wsgi")
    module._callback_wrapper = lambda callback, scope_opts: callback
    family.attach_to(module)
    served = module._callback_wrapper(app_of_wsgi, {})
    served(ENVIRON, lambda *_: None)
    family.change_rules((RequestsRule(name="{method} again"),), [module])
    served(ENVIRON, lambda *_: None)
    family.change_rules((), [module])
    served(ENVIRON, lambda *_: None)
    assert [span.site.name for span in spans_in(recorder)] == ["GET", "GET again"]


def test_bottle_reports_the_rule_of_a_request(recorder: Any) -> None:
    bottle = pytest.importorskip("bottle")
    family = Requests((RequestsRule(),), recorder)
    family.attach_to(bottle)
    app = bottle.Bottle()
    app.route("/items/<name>", callback=lambda name: name)
    served = servers_and_routers._make_recording_app(app, asgi_wsgi_apps.WsgiApp, Exchanges(RequestsRule(), recorder))
    assert b"".join(served({**ENVIRON, "PATH_INFO": "/items/a"}, lambda *_: None)) == b"a"
    family.undo()
    assert [span.site.name for span in spans_in(recorder)] == ["GET /items/<name>"]
