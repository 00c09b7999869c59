"""`startup: auto`: the loading and compiling of a model is recorded, in any order of imports, and only then."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from readback import spans_in

import instrument
from instrument import chrome
from instrument.instrumentors.selection import Selection
from instrument.instrumentors.startup import COMPILES, LOADS, StartupWatch
from instrument.profile.keys import loads
from instrument.recorder.recorder import RECORDER
from instrument.report.startup_view import StartupView, startup
from instrument.report.view import Options, Recording
from instrument.sessions import process

PROFILE = "startup: auto"


@pytest.fixture(scope="module", autouse=True)
def late_imports() -> None:
    """Imported by the first test: this file is collected by every process of the tests and run by one."""
    global torch, dynamo
    torch = pytest.importorskip("torch")
    dynamo = importlib.import_module("torch._dynamo.callback")


def recorded(selection: Selection) -> list[str]:
    spans = spans_in(selection._recorder)
    return [one.site.name for one in sorted(spans, key=lambda one: one.start_ns)]


@pytest.mark.slow
def test_loading_a_model_records_each_step_of_it(select: Callable[[str], Selection], tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    before = torch.load, torch.nn.Module.load_state_dict
    selection = select(PROFILE)
    assert model.load_state_dict(torch.load(tmp_path / "model.pt")).missing_keys == []
    exported = torch.export.export(model, (torch.ones(1, 2),))
    torch.export.save(exported, tmp_path / "model.pt2")
    assert torch.export.load(tmp_path / "model.pt2").module()(torch.ones(1, 2)).shape == (1, 2)
    names = [name for name in recorded(selection) if name != "torch.compile"]
    assert [*dict.fromkeys(names)] == ["torch.load", "load_state_dict", "torch.export.export", "torch.export.load"]
    phases = {dict(one.site.attributes)["phase"] for one in spans_in(selection._recorder)}
    assert phases == {"load", "compile"}
    selection.detach_all()
    assert (torch.load, torch.nn.Module.load_state_dict) == before


@pytest.mark.slow
def test_a_compilation_of_torch_is_a_span_of_the_waiting_call(
    select: Callable[[str], Selection], recorder: Any
) -> None:
    handler = dynamo.CompilationCallbackHandler
    before = handler.install_callbacks
    selection = select(PROFILE)
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def double(x: Any) -> Any:
        return x * 2 + 1

    with recorder.make_scope("request", kind="request"):
        assert double(torch.ones(3)).tolist() == [3, 3, 3]
    with recorder.make_scope("again", kind="request"):
        double(torch.ones(3))
    spans = {one.site.name: one for one in spans_in(recorder)}
    compiled = [one for one in spans_in(recorder) if one.site.name == "torch.compile"]
    assert len(compiled) == 1
    assert compiled[0].parent_id == spans["request"].span_id
    selection.detach_all()
    assert handler.install_callbacks is before
    torch._dynamo.reset()


def test_a_compilation_that_fails_fails_as_it_would(select: Callable[[str], Selection], recorder: Any) -> None:
    select(PROFILE)
    handler = dynamo.CompilationCallbackHandler()
    with pytest.raises(ZeroDivisionError), handler.install_callbacks(dynamo.CallbackTrigger.DYNAMO, "0"):
        raise ZeroDivisionError
    (one,) = spans_in(recorder)
    assert (one.site.name, one.error) == ("torch.compile", "ZeroDivisionError")
    recorder.on = False
    with handler.install_callbacks(dynamo.CallbackTrigger.DYNAMO, "0"):
        pass
    assert len(spans_in(recorder)) == 1


def test_a_torch_that_does_not_report_is_named(recorder: Any) -> None:
    family = StartupWatch(recorder=recorder)
    family.attach_to(types.ModuleType("torch._dynamo.callback"))
    (verdict,) = family.verdicts()
    assert (
        str(verdict) == "startup: torch.compile: unreachable (this version of torch does not report when it compiles)"
    )
    family.undo()


@pytest.mark.slow
def test_every_name_that_is_installed_here_is_where_the_table_says(select: Callable[[str], Selection]) -> None:
    for target in (*LOADS, *COMPILES):
        with contextlib.suppress(ImportError):
            importlib.import_module(target.partition(":")[0])
    selection = select(PROFILE)
    there = {label for label in (*LOADS, *COMPILES) if label.partition(":")[0] in sys.modules}
    attached = {verdict.target for verdict in selection.verdicts() if verdict.state in ("attached", "partly")}
    # partly: a table of another package holds the function as it was
    assert attached == {*there, "torch.compile"}
    assert len(there) >= 6


@pytest.mark.slow
def test_a_reload_without_it_takes_every_probe_off(select: Callable[[str], Selection]) -> None:
    selection = select(PROFILE)
    before = torch.load
    selection.change(loads("", environ={}))
    assert torch.load is not before
    assert selection.verdicts() == []
    selection.change(loads(PROFILE, environ={}))
    assert torch.load is not before
    assert any(verdict.target == "torch.compile" for verdict in selection.verdicts())


# ---------------------------------------------------------------- in a session


def view_of(session: Any) -> StartupView:
    view = session.views(["startup"])["startup"]
    assert isinstance(view, StartupView)
    return view


def test_first_calls_stay_known_when_their_spans_are_long_overwritten() -> None:
    session = instrument.start(loads("limits: {ring: 64KiB}", environ={}))
    assert session is not None
    try:
        for turn in range(5_000):
            with instrument.scope("handle", kind="request"):
                sum(range(30_000 if turn == 0 else 1))
        view = view_of(session)
        (warm,) = view.warm_ups
        assert (warm.name, warm.calls) == ("handle", 5_000)
        assert warm.first_ns > 10 * warm.median_ns > 0
        assert view.request is not None
        assert view.request.first_ns == warm.first_ns
        assert not any(span.start_ns == warm.start_ns for span in session.trace().spans)
    finally:
        process.stop()


def test_a_window_reports_the_way_to_serving_only_where_all_of_it_is_within() -> None:
    """Its own calls are not those that loaded the model before: all of the way would have been `Anything else`."""
    windows: list[Any] = []
    with instrument.Profiler(schedule=instrument.schedule(record=2), on_trace_ready=windows.append) as profiler:
        for _ in range(2):
            with instrument.scope("load", phase="load"), instrument.scope("read"):
                pass
            with instrument.scope("handle", kind="request"):
                pass
            for _ in range(2):
                profiler.step()
        first, second = (window.views(["startup"])["startup"] for window in windows)
    assert first.is_known
    assert [row.name for row in first.preparations] == ["load"]
    assert not second.is_known
    assert second.way == ()
    assert "How this process came to serve is not in this trace" in windows[1].summary(views=["startup"])


def test_a_thread_that_ended_leaves_its_first_call(make_recorder: Any) -> None:
    import threading

    recorder = make_recorder(1 << 16)

    def work() -> None:
        with recorder.make_scope("only here"):
            pass

    for _ in range(40):  # more than the rings of ended threads that are kept
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    ((node, (start_ns, total_ns)),) = recorder.make_reader().first_calls().items()
    site = recorder.paths().site(node)
    rows = list(recorder.tally().iterate_totals())
    assert site.name == "only here"
    assert start_ns == min(row.totals.first_ns for row in rows)
    assert 0 < total_ns <= max(row.totals.max_ns for row in rows)


def test_the_first_call_is_the_one_that_began_first(recorder: Any) -> None:
    for nap in (5_000, 10, 10):
        with recorder.make_scope("call"):
            sum(range(nap))
    spans = sorted(spans_in(recorder), key=lambda one: one.start_ns)
    assert list(recorder.make_reader().first_calls().values()) == [(spans[0].start_ns, spans[0].total_ns)]


PROGRAM = """
import fractions
import instrument
import torch
from pathlib import Path

@instrument.profiled("handle", kind="request")
def handle(model, x):
    import wave
    return model(x)

model = torch.nn.Linear(4, 4)
torch.save(model.state_dict(), "model.pt")
model.load_state_dict(torch.load("model.pt"))
for _ in range(3):
    handle(model, torch.ones(2, 4))
import colorsys
torch.load("model.pt")
print(instrument.summary(views=["startup"]))
"""


@pytest.mark.slow
def test_a_program_under_run_reports_its_whole_way_to_serving(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(PROGRAM)
    (tmp_path / "p.yaml").write_text("startup: auto\nexport: {chrome: {path: trace.json.gz}}\n")
    words = [sys.executable, "-m", "instrument", "run", "--profile", "p.yaml", "--", "app.py"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    trace, tally = chrome.load(tmp_path / "trace.json.gz")
    view = startup(Recording.from_trace(trace, lambda: tally), Options())
    assert view.imports is not None
    imports = {one.package: one for one in view.imports}
    assert {"torch", "fractions", "wave"} <= set(imports)
    assert view.imports[0].package == "torch"
    assert imports["wave"].in_spans_ns == imports["wave"].self_ns > 0
    assert {one.name: one.calls for one in view.preparations} == {"torch.load": 2, "load_state_dict": 1}
    assert view.before_ns is not None
    assert 0 < view.before_ns < 120 * 10**9
    parts = {part.name: part.total_ns for part in view.way}
    assert sum(parts.values()) == view.way_ns
    assert parts["Imports, outside of spans"] > parts["Loading"] > 0
    assert imports["colorsys"].late_ns == imports["colorsys"].self_ns > 0
    assert (imports["torch"].late_ns, imports["wave"].late_ns) == (0, 0)
    loads = sorted((span for span in trace.spans if span.site.name == "torch.load"), key=lambda span: span.start_ns)
    assert {part.name: part.total_ns for part in view.late} == {
        "Imports, outside of spans": sum(one.late_ns for one in view.imports), "Loading": loads[-1].total_ns,
    }  # fmt: skip
    for told in ("First request: handle", "torch ", "torch.load"):
        assert told in done.stdout


def serve(*paths: str) -> None:
    """Requests of one route that answers by path: probes call nothing, the others do."""
    for path in paths:
        with instrument.scope("http.request", kind="request"):
            if path != "/healthz":
                with instrument.scope("predict"):
                    time.sleep(0.001)


def test_a_health_probe_of_the_same_route_is_not_taken_for_the_first_request() -> None:
    session = instrument.start(loads("startup: auto", environ={}))
    assert session is not None
    serve("/healthz", "/healthz")
    before_ns = time.monotonic_ns()
    assert session.startup().why == ""
    serve("/predict", "/predict")
    facts = session.startup()
    text = session.summary(views=["startup"])
    instrument.stop()
    assert facts.first_request is not None
    assert (facts.first_request.site.name, facts.why) == ("http.request", "passed")
    assert facts.first_request.start_ns >= before_ns
    assert "First request: Requests before it have the name of a health probe, or called nothing" in text


def test_the_first_request_that_works_is_known_with_its_length_and_needs_no_word() -> None:
    session = instrument.start(loads("startup: auto", environ={}))
    assert session is not None
    serve("/predict", "/healthz")
    facts = session.startup()
    instrument.stop()
    assert (facts.request, facts.why) == (None, "")


def test_a_route_of_its_own_that_is_called_after_a_probe_does_not_count(tmp_path: Path) -> None:
    session = instrument.start(loads("startup: auto", environ={}))
    assert session is not None
    with instrument.scope("GET /healthz", kind="request"), instrument.scope("query"):
        pass
    assert session.startup().first_request is not None, "there is no other yet"
    with instrument.scope("GET /liver", kind="request"):
        pass
    facts = session.startup()
    path = instrument.dump(tmp_path / "trace.json")
    instrument.stop()
    assert facts.first_request is not None
    assert (facts.first_request.site.name, facts.why) == ("GET /liver", "passed")
    assert facts.first_request.total_ns > 0
    read = chrome.load(path)[0].startup
    assert read is not None
    assert read.first_request is not None
    assert (read.first_request.site.key, read.why) == (facts.first_request.site.key, "passed")
    assert (read.first_request.start_ns, read.first_request.total_ns) == (
        facts.first_request.start_ns,
        facts.first_request.total_ns,
    )


def test_a_rule_may_name_the_first_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "served_first.py").write_text("def probe(): pass\ndef answer(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rules = "functions: [{match: 'served_first:answer', first_request: true}, {match: 'served_first:*', kind: request}]"
    session = instrument.start(loads(f"startup: auto\n{rules}", environ={}))
    assert session is not None
    import served_first  # type: ignore[import-not-found]

    served_first.probe()
    served_first.answer()
    facts, text = session.startup(), session.summary(views=["startup"])
    instrument.stop()
    sys.modules.pop("served_first")
    assert facts.first_request is not None
    assert (facts.first_request.site.name, facts.why) == ("answer", "named")
    assert "A rule of the profile names it" in text


def test_a_session_without_it_touches_no_import_and_says_what_to_do() -> None:
    bootstrap = sys.modules["_frozen_importlib"]
    before = bootstrap._find_and_load
    session = instrument.start(loads("", environ={}))
    assert session is not None
    try:
        assert bootstrap._find_and_load is before
        text = session.summary(views=["startup"])
        assert "`startup: auto` in the profile times them" in text
        assert "No request has ended." in text
    finally:
        process.stop()
    assert not RECORDER.on


def test_a_reload_cannot_begin_it_and_says_why() -> None:
    session = instrument.start(loads("", environ={}))
    assert session is not None
    try:
        done = session.reload(loads("startup: auto", environ={}))
        assert done.refused == ("startup keeps its value until a restart: what it is about has begun by then",)
    finally:
        process.stop()
