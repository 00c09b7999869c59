"""Frameworks that keep the functions they are given, and other tools that change functions: each as without us."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from trees import tree

import instrument
from instrument.instrumentors.selection import Selection
from instrument.profile.keys import loads
from instrument.recorder.recorder import Recorder


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Write modules below a folder on the path; all that are imported from there are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def make(**sources: str) -> None:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0].startswith("served")]:
        del sys.modules[name]


@pytest.fixture
def select(recorder: Recorder) -> Iterator[Callable[[str], Selection]]:
    """A selection of one function rule, attached; undone after the test."""
    made: list[Selection] = []

    def attach(match: str) -> Selection:
        made.append(Selection(loads(f'functions: [{{match: "{match}"}}]', environ={}), recorder))
        made[-1].attach()
        return made[-1]

    yield attach
    for selection in made:
        selection.detach_all()


def ask_asgi(module: ModuleType, path: str) -> str:
    from starlette.testclient import TestClient

    return str(TestClient(module.app).get(path).json())


def ask_flask(module: ModuleType, path: str) -> str:
    return str(module.app.test_client().get(path).get_json())


def ask_click(module: ModuleType, path: str) -> str:
    from click.testing import CliRunner

    return str(CliRunner().invoke(module.app, [path.strip("/")]).output.strip())


def ask_celery(module: ModuleType, path: str) -> str:
    return str(vars(module)[path.strip("/")].apply(args=()).get())


FRAMEWORKS: dict[str, tuple[str, Callable[[ModuleType, str], str]]] = {
    "starlette": (
        """
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
def first(request): return JSONResponse("1")
async def second(request): return JSONResponse("2")
app = Starlette(routes=[Route("/first", first), Route("/second", second)])
""",
        ask_asgi,
    ),
    "fastapi": (
        """
from fastapi import FastAPI
app = FastAPI()
@app.get("/first")
def first(): return "1"
@app.get("/second")
async def second(): return "2"
""",
        ask_asgi,
    ),
    "flask": (
        """
from flask import Flask, jsonify
app = Flask(__name__)
@app.route("/first")
def first(): return jsonify("1")
@app.get("/second")
def second(): return jsonify("2")
""",
        ask_flask,
    ),
    "click": (
        """
import click
@click.group()
def app(): pass
@app.command()
def first(): click.echo("1")
@app.command()
def second(): click.echo("2")
""",
        ask_click,
    ),
    "celery": (
        """
from celery import Celery
app = Celery("served", broker="memory://", backend="cache+memory://")
@app.task
def first(): return "1"
@app.task(bind=True)
def second(self): return "2"
""",
        ask_celery,
    ),
}


@pytest.mark.parametrize("moment", ["before the import", "after the import", "after the first call"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.filterwarnings("ignore")
def test_a_function_that_a_framework_keeps_is_recorded_or_named_with_it(
    framework: str,
    moment: str,
    write: Callable[..., None],
    select: Callable[[str], Selection],
    recorder: Recorder,
) -> None:
    pytest.importorskip(framework)
    source, ask = FRAMEWORKS[framework]
    write(served=source)
    recorder.on = False
    selections: list[Selection] = []

    def attach() -> None:
        selections.extend([select("served:first"), select("served:second")])

    if moment == "before the import":
        attach()
    module = importlib.import_module("served")
    if moment == "after the first call":
        assert (ask(module, "/first"), ask(module, "/second")) == ("1", "2")
    if moment != "before the import":
        attach()
    recorder.on = True
    assert (ask(module, "/first"), ask(module, "/second")) == ("1", "2")
    for verdict in [verdict for selection in selections for verdict in selection.verdicts()]:
        name = verdict.target.rpartition(":")[2]
        is_recorded = name in tree(recorder).split("\n")
        assert verdict.state == "attached" if is_recorded else verdict.state in ("partly", "unreachable"), str(verdict)
        assert is_recorded or "also referenced by " in verdict.why or "has no name for it" in verdict.why
    if (
        moment == "before the import"
        or framework == "click"
        or (framework, moment) == ("celery", "after the first call")
    ):
        assert tree(recorder) == "first\nsecond"
    for selection in selections:
        selection.detach_all()
    recorder.reset()
    assert (ask(module, "/first"), ask(module, "/second")) == ("1", "2")
    assert tree(recorder) == ""


def test_a_namespace_package_and_a_zipped_module_are_reached_as_any_other(
    write: Callable[..., None],
    select: Callable[[str], Selection],
    recorder: Recorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "served_space" / "inner").mkdir(parents=True)
    (tmp_path / "served_space" / "inner" / "text.py").write_text("def encode(): return 1")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("served_zipped.py", "def decode(): return 2")
    monkeypatch.syspath_prepend(str(tmp_path / "archive.zip"))
    write()
    select("served_*.**:*")
    select("served_zipped:*")
    assert importlib.import_module("served_space.inner.text").encode() == 1
    assert importlib.import_module("served_zipped").decode() == 2
    assert tree(recorder) == "encode\ndecode"


def test_a_reloaded_module_is_attached_once_and_the_old_function_stays_what_it_was(
    write: Callable[..., None], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    write(served="TABLE = globals().get('TABLE', [])\ndef f(): return len(TABLE)\nTABLE.append(f)")
    selection = select("served:f")
    module = importlib.import_module("served")
    for _ in range(3):
        importlib.reload(module)
    assert [function() for function in [*module.TABLE, module.f]] == [4] * 5
    assert tree(recorder) == "f"
    (verdict,) = selection.verdicts()
    assert (verdict.state, "served.py:1 (TABLE)" in verdict.why) == ("partly", True)
    selection.detach_all()
    assert [hasattr(function, "__instrument__") for function in module.TABLE] == [False] * 4
    assert module.f is module.TABLE[-1]


# -------------------------------------------------------------------- other tools


@pytest.mark.parametrize(("first", "order"), list(itertools.product(["ours", "wrapt"], ["same", "reversed"])))
def test_wrapt_and_we_take_one_function_in_either_order_and_undo_in_either_order(
    first: str, order: str, write: Callable[..., None], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    wrapt = pytest.importorskip("wrapt")
    if (first, order) == ("ours", "same") and int(wrapt.__version__.partition(".")[0]) < 2:
        pytest.skip("what wrapt 1 wraps is not found from it, so that it goes on calling our function, which is off")
    write(served="def f(x): return x\nclass C:\n    def m(self, x): return x")
    module = importlib.import_module("served")
    before = module.f, vars(module.C)["m"]
    seen: list[str] = []

    def note(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        seen.append(f"{wrapped.__name__} of a {type(instance).__name__}")
        return wrapped(*args, **kwargs)

    def patch() -> Callable[[], None]:
        held = module.f, vars(module.C)["m"]
        wrapt.wrap_function_wrapper(module, "f", note)
        wrapt.wrap_function_wrapper(module, "C.m", note)
        ours = module.f, vars(module.C)["m"]

        def unpatch() -> None:
            # As OpenTelemetry's `unwrap` does it: by what the wrapper holds now.
            assert (module.f, vars(module.C)["m"]) == ours or held
            module.f, module.C.m = module.f.__wrapped__, vars(module.C)["m"].__wrapped__

        return unpatch

    steps = [lambda: select("served:**").detach_all, patch]
    undos = [step() for step in (steps if first == "ours" else reversed(steps))]
    assert (module.f(1), module.C().m(2)) == (1, 2)
    assert tree(recorder) == "f\nC.m"
    assert seen == ["f of a NoneType", "m of a C"]
    for undo in undos if order == "same" else reversed(undos):
        undo()
    recorder.reset()
    assert (module.f(1), module.C().m(2), tree(recorder)) == (1, 2, "")
    if order != "same":  # there the second way back finds the other one's function in its place
        assert (module.f, vars(module.C)["m"]) == before


def test_a_function_that_wrapt_decorates_in_the_source_is_recorded_inside_its_wrapper(
    write: Callable[..., None], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    pytest.importorskip("wrapt")
    write(
        served="""
import wrapt
SEEN = []
@wrapt.decorator
def noted(wrapped, instance, args, kwargs):
    SEEN.append(type(instance).__name__)
    return wrapped(*args, **kwargs)
@noted
def f(x): return x
class C:
    @noted
    def m(self, x): return x
"""
    )
    selection = select("served:**")
    module = importlib.import_module("served")
    wrappers = module.f, vars(module.C)["m"]
    assert (module.f(1), module.C().m(2), module.SEEN) == (1, 2, ["NoneType", "C"])
    assert tree(recorder) == "f\nC.m"
    selection.detach_all()
    assert (module.f is wrappers[0], vars(module.C)["m"] is wrappers[1]) == (True, True)
    assert not hasattr(module.f.__wrapped__, "__instrument__")


# Theirs goes back by `__wrapped__` of whatever is there, so it cannot go first when ours came later.
@pytest.mark.parametrize(("first", "order"), [("ours", "same"), ("ours", "reversed"), ("theirs", "reversed")])
@pytest.mark.filterwarnings("ignore")
def test_an_instrumentation_of_opentelemetry_and_we_share_a_function(
    first: str, order: str, select: Callable[[str], Selection], recorder: Recorder
) -> None:
    instrumentation = pytest.importorskip("opentelemetry.instrumentation.requests")
    requests = pytest.importorskip("requests")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    class Answers(requests.adapters.BaseAdapter):  # type: ignore[misc,name-defined]
        def send(self, request: Any, **kwargs: Any) -> Any:
            response = requests.Response()
            response.status_code, response.url, response.request = 204, request.url, request
            return response

        def close(self) -> None:
            pass

    def theirs() -> Callable[[], None]:
        instrumentor = instrumentation.RequestsInstrumentor()
        instrumentor.instrument(tracer_provider=provider)
        return instrumentor.uninstrument  # type: ignore[no-any-return]

    before = vars(requests.Session)["send"]
    steps = [lambda: select("requests.sessions:Session.send").detach_all, theirs]
    undos = [step() for step in (steps if first == "ours" else reversed(steps))]
    try:
        with requests.Session() as session:
            session.mount("http://", Answers())
            assert session.get("http://service/").status_code == 204
        assert [span.name for span in exporter.get_finished_spans()] == ["GET"]
        assert tree(recorder).split("\n") == ["Session.send"]
    finally:
        for undo in undos if order == "same" else reversed(undos):
            undo()
    recorder.reset()
    with requests.Session() as session:
        session.mount("http://", Answers())
        assert session.get("http://service/").status_code == 204
    assert tree(recorder) == ""
    assert len(exporter.get_finished_spans()) == 1
    assert vars(requests.Session)["send"] is before


DDTRACE = """
import sys, served
from instrument.instrumentors.selection import Selection
from instrument.profile.keys import loads
from instrument.recorder.core import calls_by_site
from instrument.recorder.recorder import RECORDER
selection = Selection(loads('functions: [{match: "served_late:f"}, {match: "served:g"}]', environ={}))
undo = selection.attach()
RECORDER.begin_recording(1 << 24, {})
RECORDER.on = True
import served_late
before = served_late.f
assert (served_late.f(1), served.g(2)) == (1, 2)
assert sorted(site.name for site in calls_by_site(RECORDER)) == ["f", "g"]
assert [verdict.state for verdict in selection.verdicts()] == ["attached", "attached"]
undo()
assert not hasattr(served_late.f, "__instrument__") and not hasattr(served.g, "__instrument__")
assert "ddtrace" in sys.modules
print("as it should be")
"""


def test_under_ddtrace_run_each_hook_hears_a_module_once(tmp_path: Path) -> None:
    if importlib.util.find_spec("ddtrace") is None:
        pytest.skip("ddtrace is not installed")
    (tmp_path / "served.py").write_text("def g(x): return x")
    (tmp_path / "served_late.py").write_text("def f(x): return x")
    (tmp_path / "host.py").write_text(DDTRACE)
    root = str(Path(instrument.__file__).parent.parent)
    environ = {
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "0",
        "DD_REMOTE_CONFIGURATION_ENABLED": "0",
        "DD_TRACE_AGENT_URL": "http://127.0.0.1:9",  # nobody listens there
    }
    done = subprocess.run(
        [sys.executable, "-m", "ddtrace.commands.ddtrace_run", sys.executable, "host.py"],
        cwd=tmp_path,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, "as it should be" in done.stdout) == (0, True), done.stderr
