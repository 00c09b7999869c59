"""Handlers that a framework takes as their module runs: a rule records the requests for them."""

from __future__ import annotations

import asyncio
import importlib
import pickle
import sys
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
from trees import tree

from instrument.instrumentors.selection import Selection
from instrument.recorder.recorder import Recorder

FASTAPI = """
from fastapi import APIRouter, Depends, FastAPI
app, router = FastAPI(), APIRouter()
def user(): yield "you"
@app.get("/own")
async def handler(name: str = Depends(user)): return name
@router.get("/routed")
def routed(): return "you"
app.include_router(router, prefix="/below")
TABLE = (handler, routed)
"""
STARLETTE = """
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
async def handler(request): return PlainTextResponse("you")
app = Starlette(routes=[Route("/own", handler)])
"""
FLASK = """
from flask import Blueprint, Flask
app, blueprint = Flask("app"), Blueprint("b", "b")
@app.get("/own")
def handler(): return "you"
@blueprint.route("/routed")
def routed(): return "you"
app.register_blueprint(blueprint, url_prefix="/below")
"""
QUART = FLASK.replace("flask", "quart").replace("Flask", "Quart").replace("def", "async def")
BOTTLE = """
from bottle import Bottle
app = Bottle()
@app.get("/own")
def handler(): return "you"
"""
LITESTAR = """
from litestar import Litestar, get
@get("/own")
async def handler() -> str: return "you"
app = Litestar([handler])
"""
AIOHTTP = """
from aiohttp import web
app, routes = web.Application(), web.RouteTableDef()
@routes.get("/own")
async def handler(request): return web.Response(text="you")
class Views:
    async def view(self, request): return web.Response(text="you")
app.add_routes(routes)
app.router.add_get("/below/routed", Views().view)
"""
DJANGO = """
from django.conf import settings
if not settings.configured:
    settings.configure(ROOT_URLCONF="handled", SECRET_KEY="k", ALLOWED_HOSTS=["*"])
from django.http import HttpResponse
from django.urls import path
def handler(request): return HttpResponse("you")
urlpatterns = [path("own", handler)]
"""


def by_wsgi(module: Any, paths: list[str]) -> list[str]:
    import werkzeug.test

    return [werkzeug.test.Client(module.app).get(path).text for path in paths]


def by_asgi(module: Any, paths: list[str]) -> list[str]:
    from starlette.testclient import TestClient

    return [TestClient(module.app).get(path).text.strip('"') for path in paths]


def by_quart(module: Any, paths: list[str]) -> list[str]:
    async def ask() -> list[str]:
        client = module.app.test_client()
        return [await (await client.get(path)).get_data(as_text=True) for path in paths]

    return asyncio.run(ask())


def by_aiohttp(module: Any, paths: list[str]) -> list[str]:
    async def ask() -> list[str]:
        from aiohttp.test_utils import TestClient, TestServer

        async with TestClient(TestServer(module.app)) as client:
            return [await (await client.get(path)).text() for path in paths]

    return asyncio.run(ask())


def by_django(module: Any, paths: list[str]) -> list[str]:
    import django
    from django.test import Client

    django.setup()
    return [Client().get(path).content.decode() for path in paths]


BOTH = ["/own", "/below/routed"]
CASES = {
    "fastapi": (FASTAPI, by_asgi, BOTH, "user handler routed"),
    "starlette": (STARLETTE, by_asgi, BOTH[:1], "handler"),
    "flask": (FLASK, by_wsgi, BOTH, "handler routed"),
    "quart": (QUART, by_quart, BOTH, "handler routed"),
    "bottle": (BOTTLE, by_wsgi, BOTH[:1], "handler"),
    "litestar": (LITESTAR, by_asgi, BOTH[:1], "handler"),
    "aiohttp": (AIOHTTP, by_aiohttp, BOTH, "handler Views.view"),
    "django": (DJANGO, by_django, BOTH[:1], "handler"),
}


@pytest.fixture
def handled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a module with handlers."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(source: str) -> Any:
        (tmp_path / "handled.py").write_text(source)
        importlib.invalidate_caches()
        return importlib.import_module("handled")

    yield load
    sys.modules.pop("handled", None)


@pytest.mark.parametrize("framework", CASES)
def test_a_rule_records_a_handler_that_a_framework_took_while_its_module_ran(
    framework: str, handled: Callable[[str], Any], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    pytest.importorskip(framework)
    source, ask, paths, spans = CASES[framework]
    selection = select('functions: [{match: ["handled:*", "handled:Views.*"]}]')
    module = handled(source)
    assert set(ask(module, paths)) == {"you"}
    assert tree(recorder).split() == spans.split()
    for verdict in selection.verdicts():
        is_in_table = framework == "fastapi" and verdict.target != "handled:user"
        assert verdict.state == ("partly" if is_in_table else "attached"), str(verdict)
        assert ("a tuple in " in verdict.why and "handled.py:10 (TABLE)" in verdict.why) == is_in_table
    selection.detach_all()
    recorder.reset()
    if framework != "aiohttp":  # an application of which serves one loop
        assert set(ask(module, paths)) == {"you"}
    assert tree(recorder) == ""


def test_a_function_of_a_table_goes_to_a_pool_of_processes_as_before(
    handled: Callable[[str], Any], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    selection = select('functions: [{match: "handled:*"}]')
    module = handled("def double(x): return 2 * x\nTABLE = {'double': double}")
    for function in (module.double, module.TABLE["double"]):
        sent = ForkingPickler.dumps(function)
        assert pickle.loads(sent) is module.double
    assert module.TABLE["double"] is module.double.__instrument_function__
    selection.detach_all()
    assert not hasattr(ForkingPickler, "reducer_override")
    assert pickle.loads(sent) is module.double is module.TABLE["double"]


def test_a_rule_for_all_modules_of_a_package_passes_over_what_code_may_compare(
    handled: Callable[[str], Any], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    source = "def absent(): ...\ndef other(): ...\ndef is_absent(get=absent): return get is absent"
    selection = select('functions: [{match: "hand*:*"}]')
    module = handled(source)
    assert module.is_absent()
    states = {verdict.target: verdict.state for verdict in selection.verdicts()}
    assert states == {"handled:absent": "unreachable", "handled:other": "attached", "handled:is_absent": "attached"}
    why = next(verdict.why for verdict in selection.verdicts() if verdict.state == "unreachable")
    assert why.endswith("handled.py:3, which may compare it; a rule that names its module without * records it")
