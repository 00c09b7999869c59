"""`requests: auto`: unmodified apps on real servers, each request a span of its endpoint, in the trace of its caller.

Each app of `served` answers the same paths. It is asked over HTTP without us and with us: the answers are the same, and
what was sent, what the tally counted, what the trace files hold and what the collector got are the same requests.
"""

from __future__ import annotations

import http.client
import importlib.util
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from otlp_receiver import Receiver, receiver
from server_programs import requests_in, serving

from instrument.instrumentors.requests.servers_and_routers import Requests
from instrument.profile.model import RequestsRule

PROFILE = """
service: served
requests: {ignore: [/health]}
functions: [{match: "work:*"}]
export:
  chrome: {path: "traces/{service}-{pid}-{window}.json"}
  otlp:
"""


@dataclass(frozen=True)
class Ask:
    """A request: the status that answers it, and the route of the app that does, "" for none."""

    path: str
    status: int
    route: str
    method: str = "GET"
    body: str = ""


def asks(prefix: str = "", template: str = "", parameter: str = "{name}") -> list[Ask]:
    return [
        Ask(f"{prefix}/items/a1", 200, f"{template}/items/{parameter}"),
        Ask(f"{prefix}/items/b2?key=good", 200, f"{template}/items/{parameter}"),
        Ask(f"{prefix}/echo", 200, f"{template}/echo", "POST", "some text"),
        Ask(f"{prefix}/fail", 500, f"{template}/fail"),
        Ask(f"{prefix}/refuse", 403, f"{template}/refuse"),
        Ask(f"{prefix}/stream", 200, f"{template}/stream"),
    ]


NOWHERE = [Ask("/nowhere", 404, "")]


@dataclass(frozen=True)
class Case:
    """An app on a server: how it is started, and what is asked. `needs` are modules that have to be installed."""

    command: Sequence[str]
    asks: Sequence[Ask]
    needs: Sequence[str]


def uvicorn(app: str, *more: str) -> list[str]:
    return ["-m", "uvicorn", app, "--port", "{port}", "--log-level", "warning", *more]


def gunicorn(app: str, *more: str) -> list[str]:
    return ["-m", "gunicorn", app, "--bind", "127.0.0.1:{port}", "--log-level", "warning", "--no-control-socket", *more]


STARLETTE = [*asks(), *asks("/sub/x", "/sub/{tenant}"), Ask("/items/c?key=bad", 401, ""), *NOWHERE]
FASTAPI = [*asks(), *asks("/sub/x", "/sub/{tenant}"), *asks("/mounted", "/mounted"), *NOWHERE]
FLASK = [*asks(parameter="<name>"), *asks("/sub/x", "/sub/<tenant>", "<name>"), *NOWHERE]
DJANGO = [*asks(parameter="<name>"), *asks("/sub/x", "/sub/<tenant>", "<name>"), *NOWHERE]
LITESTAR = [*asks(parameter="{name:str}"), *asks("/sub/x", "/sub/{tenant:str}", "{name:str}"), *NOWHERE]
AIOHTTP = [*asks(), *asks("/sub", "/sub"), *NOWHERE]

CASES = {
    "FastAPI on uvicorn": Case(uvicorn("fastapi_app:app"), FASTAPI, ["fastapi", "uvicorn"]),
    "Flask on gunicorn": Case(gunicorn("flask_app:app"), FLASK, ["flask", "gunicorn"]),
}
SLOW_CASES = {
    "Starlette on 4 workers of uvicorn": Case(
        uvicorn("starlette_app:app", "--workers", "4"), STARLETTE, ["starlette", "uvicorn"]
    ),
    "Starlette on hypercorn": Case(
        ["-m", "hypercorn", "starlette_app:app", "--bind", "127.0.0.1:{port}"], STARLETTE, ["hypercorn"]
    ),
    "Starlette on granian": Case(
        ["-m", "granian", "--interface", "asgi", "starlette_app:app", "--port", "{port}", "--no-ws"],
        STARLETTE,
        ["granian"],
    ),
    "Litestar on uvicorn": Case(uvicorn("litestar_app:app"), LITESTAR, ["litestar"]),
    "Quart on hypercorn": Case(
        ["-m", "hypercorn", "quart_app:app", "--bind", "127.0.0.1:{port}"], FLASK, ["quart", "hypercorn"]
    ),
    "Django on Daphne": Case(
        ["-m", "daphne", "-p", "{port}", "-v", "0", "django_app:app"], DJANGO, ["django", "daphne"]
    ),
    "Django on uvicorn": Case(uvicorn("django_app:app"), DJANGO, ["django", "uvicorn"]),
    "Django on gunicorn": Case(gunicorn("django_app:wsgi"), DJANGO, ["django", "gunicorn"]),
    "Flask on gunicorn's threads": Case(
        gunicorn("flask_app:app", "-k", "gthread", "--threads", "4", "--preload"), FLASK, ["flask", "gunicorn"]
    ),
    "FastAPI on gunicorn with workers of uvicorn": Case(
        gunicorn("fastapi_app:app", "-k", "uvicorn_worker.UvicornWorker"), FASTAPI, ["fastapi", "uvicorn_worker"]
    ),
    "FastAPI on gunicorn's own workers of ASGI": Case(
        gunicorn("fastapi_app:app", "-k", "asgi"), FASTAPI, ["fastapi", "gunicorn.asgi"]
    ),
    "Flask on waitress": Case(["serve_wsgi.py", "waitress", "{port}"], FLASK, ["flask", "waitress"]),
    "Flask on gevent": Case(["serve_wsgi.py", "gevent", "{port}"], FLASK, ["flask", "gevent"]),
    "Flask on cheroot": Case(["serve_wsgi.py", "cheroot", "{port}"], FLASK, ["flask", "cheroot"]),
    "Flask on its own server": Case(
        ["-m", "flask", "--app", "flask_app", "run", "--port", "{port}"], FLASK, ["flask", "werkzeug"]
    ),
    "aiohttp": Case(["aiohttp_app.py", "{port}"], AIOHTTP, ["aiohttp"]),
    "aiohttp on gunicorn with its workers": Case(
        gunicorn("aiohttp_app:app", "-k", "aiohttp.GunicornWebWorker"), AIOHTTP, ["aiohttp", "gunicorn"]
    ),
}


@dataclass
class Answered:
    """The answer of a server, and the trace id that its caller sent."""

    ask: Ask
    trace_id: int
    status: int
    body: bytes


def ask_all(port: int, wanted: Sequence[Ask], times: int) -> list[Answered]:
    """Ask each request `times` times, each time as the caller of a separate trace, and return the answers.

    The server closes the connection after each answer, and its app has ended by then. Some servers end at once on a
    request to stop.
    """
    answers = []
    for number in range(times * len(wanted)):
        ask = wanted[number % len(wanted)]
        trace_id = (number + 1) << 64 | 0x5EED
        headers = {"traceparent": f"00-{trace_id:032x}-{number + 1:016x}-01", "Connection": "close"}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
        connection.request(ask.method, ask.path, ask.body or None, headers)
        with connection.sock.dup() as kept_open:
            response = connection.getresponse()
            answers.append(Answered(ask, trace_id, response.status, response.read()))
            assert kept_open.recv(1) == b""
        connection.close()
    return answers


def name_of(ask: Ask) -> str:
    return f"{ask.method} {ask.route}".strip()


@pytest.fixture(scope="module")
def started() -> Iterator[Receiver]:
    with receiver() as found:
        yield found


@pytest.fixture
def collector(started: Receiver) -> Receiver:
    """One that has received nothing yet."""
    started.clear()
    return started


def check(case: Case, folder: Path, times: int, collector: Receiver) -> None:
    (folder / "profile.yaml").write_text(PROFILE)
    with serving(case.command, folder, {}, ours=False) as (port, bare):
        expected = [(one.status, one.body) for one in ask_all(port, case.asks, 1)]
    environ = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector.endpoint, "OTEL_METRICS_EXPORTER": "none"}
    with serving(case.command, folder, environ, ours=True) as (port, served):
        answers = ask_all(port, case.asks, times)
    assert [(one.status, one.body) for one in answers] == expected * times
    assert served.code == bare.code
    spans = requests_in(folder)
    wanted = Counter((name_of(one.ask), one.status) for one in answers)
    status = "http.response.status_code"
    assert Counter((span.site.name, span.attributes.get(status)) for span in spans) == wanted, served.output
    assert {span.remote.trace_id for span in spans if span.remote} == {one.trace_id for one in answers}
    failed = {span.site.name for span in spans if span.error}
    assert failed == {name_of(one.ask) for one in answers if one.status >= 500}
    streamed = [span for span in spans if span.site.name.endswith("/stream")]
    assert {span.attributes.get("items") for span in streamed} == {3}
    assert not [span for span in spans if "items" in span.attributes and span not in streamed]
    inner = {span.attributes.get("http.response.body.size") for span in spans if span.site.name.endswith("/echo")}
    assert inner == {9}
    end = time.monotonic() + 60
    while len(received := [span for span in collector.spans() if span.kind == "SERVER"]) < len(answers):
        assert time.monotonic() < end, received  # the agent sends what ended last, after the service
        time.sleep(0.05)
    assert Counter((span.name, span.attributes[status]) for span in received) == wanted
    assert {span.trace_id for span in received} == {one.trace_id for one in answers}
    assert {span.name for span in received if span.status == "ERROR"} == failed


def parametrised(cases: dict[str, Case]) -> pytest.MarkDecorator:
    made = []
    for name, case in cases.items():
        missing = [module for module in case.needs if importlib.util.find_spec(module) is None]
        marks = [pytest.mark.skipif(bool(missing), reason=f"could not find {' and '.join(missing)}")]
        made.append(pytest.param(case, id=name, marks=marks))
    return pytest.mark.parametrize("case", made)


@pytest.mark.slow
@parametrised(CASES)
def test_each_request_is_a_span_of_its_endpoint_in_the_trace_of_its_caller(
    case: Case, tmp_path: Path, collector: Receiver
) -> None:
    check(case, tmp_path, 2, collector)


@pytest.mark.slow
@parametrised(SLOW_CASES)
def test_each_request_is_a_span_of_its_endpoint_on_other_servers(
    case: Case, tmp_path: Path, collector: Receiver
) -> None:
    check(case, tmp_path, 3, collector)


@pytest.mark.slow
def test_a_websocket_is_one_request_whose_items_are_its_messages(tmp_path: Path, collector: Receiver) -> None:
    client = pytest.importorskip("websockets.sync.client")
    (tmp_path / "profile.yaml").write_text(PROFILE)
    environ = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector.endpoint, "OTEL_METRICS_EXPORTER": "none"}
    with serving(uvicorn("starlette_app:app"), tmp_path, environ, ours=True) as (port, _):
        for room in ("a", "b"):
            with client.connect(f"ws://127.0.0.1:{port}/talk/{room}") as socket_:
                for text in ("one", "two", "three"):
                    socket_.send(text)
                    assert socket_.recv() == text
                socket_.send("end")
    told = [
        (span.site.name, span.attributes["http.response.status_code"], span.attributes["items"], span.error)
        for span in requests_in(tmp_path)
    ]
    assert told == [("GET /talk/{room}", 101, 3, None)] * 2


def test_the_verdict_still_reports_after_the_end_which_server_was_met() -> None:
    task = pytest.importorskip("waitress.task")
    family = Requests((RequestsRule(),))
    original = task.WSGITask.execute
    family.attach_to(task)
    try:
        assert family.verdicts()[0].state == "uncalled"
    finally:
        family.undo()
    assert task.WSGITask.execute is original
    assert [(one.state, one.why) for one in family.verdicts()] == [("uncalled", "at waitress.task")]
    family.change_rules((RequestsRule(ignore=("/up",)),), ())
    assert family.verdicts()[0].state == "waiting"
