"""The main job end to end: a real service under load, explained by its profile alone, its answers unchanged.

A real HTTP server, a real model, a real load and a real OTLP receiver. One run serves all the tests of this module.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import chrome_rules
import pytest
from otlp_receiver import Received, receiver

pytest.importorskip("torch")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from instrument import chrome
from instrument.spans import Span, Trace

ROOT = Path(__file__).parent.parent
REQUESTS = 60


@dataclass(frozen=True)
class Run:
    """What one instrumented run of the demonstration left behind."""

    trace_path: Path
    trace: Trace
    received: Mapping[int, Received]
    stderr: str


def demonstrate(folder: Path, options: list[str], command: list[str], **environment: str) -> str:
    """Run `chat.demo` in a folder; returns what it wrote to standard error."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "INSTRUMENT"))}
    environ |= {"PYTHONPATH": str(ROOT / "examples"), **environment}
    done = subprocess.run(
        [sys.executable, "-m", "chat.demo", "--requests", str(REQUESTS), "--signal", "SIGTERM", *options, *command],
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The bare service first, then the same under `instrument run`: equal answers, byte for byte, or `demo` fails."""
    folder = tmp_path_factory.mktemp("main_job")
    demonstrate(folder, ["--save", "answers.json"], [])
    with receiver() as collector:
        profile = ROOT / "configs" / "chat.yaml"
        command = [sys.executable, "-m", "instrument", "run", "--profile", str(profile), "--", "-m", "chat.server"]
        stderr = demonstrate(
            folder,
            ["--check", "answers.json"],
            ["--", *command, "--port", "0"],
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{collector.http_port}",
        )
        received = {span.span_id: span for span in collector.spans()}
    (path,) = (folder / "traces").iterdir()
    return Run(path, chrome.load(path)[0], received, stderr)


def test_every_request_sent_arrives_as_one_request_span(run: Run) -> None:
    requests = [span for span in run.received.values() if span.name == "http.request"]
    assert len(requests) == REQUESTS
    assert {span.kind for span in requests} == {"SERVER"}
    assert {span.parent_id for span in requests} == {0}
    assert len({span.trace_id for span in requests}) == REQUESTS


def test_every_child_that_arrives_has_its_parent_and_lies_inside_it(run: Run) -> None:
    children = [span for span in run.received.values() if span.parent_id]
    assert len(children) > 20 * REQUESTS
    for span in children:
        parent = run.received[span.parent_id]
        assert parent.trace_id == span.trace_id
        assert parent.start_ns <= span.start_ns <= span.end_ns <= parent.end_ns


def test_what_arrives_is_what_was_recorded_to_the_nanosecond(run: Run) -> None:
    def shape(name: str, start_ns: int, end_ns: int, base_ns: int) -> tuple[str, int, int]:
        return (name, start_ns - base_ns, end_ns - start_ns)

    recorded = [span for span in run.trace.spans if not span.clipped]
    first_recorded = min(span.start_ns for span in recorded)
    first_received = min(span.start_ns for span in run.received.values())
    mine = Counter(shape(span.site.name, span.start_ns, span.end_ns, first_recorded) for span in recorded)
    theirs = Counter(shape(s.name, s.start_ns, s.end_ns, first_received) for s in run.received.values())
    assert theirs == mine


def test_the_resource_and_the_code_of_a_span_arrive(run: Run) -> None:
    span = next(span for span in run.received.values() if span.name == "engine.step")
    assert span.resource["service.name"] == "chat"
    assert span.resource["process.pid"] == run.trace.origin.pid
    assert span.attributes["code.function.name"] == "chat.engine.Engine.step"
    assert span.attributes["code.file.path"].endswith("chat/engine.py")
    assert span.attributes["code.line.number"] > 0


def paths(trace: Trace) -> Counter[str]:
    by_id: dict[int, Span] = {span.span_id: span for span in trace.spans}

    def path(span: Span) -> str:
        above = by_id.get(span.parent_id)
        return (path(above) + " > " if above else "") + span.site.name

    return Counter(path(span) for span in trace.spans)


def test_requests_engine_phases_and_layers_nest_as_they_run(run: Run) -> None:
    found = paths(run.trace)
    assert found["http.request"] == REQUESTS
    assert found["http.request > encode"] == found["http.request > stream_tokens"] == REQUESTS
    steps = found["engine.step"]
    assert steps > 0
    assert found["engine.step > Engine.prefill > compute"] == REQUESTS
    decodes = found["engine.step > Engine.decode > compute"]
    assert 0 < decodes <= steps
    assert found["engine.step > Engine.decode > compute > Attention"] == 4 * decodes
    assert found["engine.step > Engine.decode > compute > MLP > Linear"] == 8 * decodes
    layers = {span.site.instance for span in run.trace.spans if span.site.name == "Attention"}
    assert layers == {f"model.layers.{index}.attention" for index in range(4)}


def test_self_times_of_a_step_add_up_to_its_total(run: Run) -> None:
    by_id = {span.span_id: span for span in run.trace.spans}
    sums: Counter[int] = Counter()
    for span in run.trace.spans:
        sums[span.root_id] += span.self_ns
    steps = [span for span in run.trace.spans if span.site.name == "engine.step"]
    assert all(sums[step.span_id] == by_id[step.span_id].total_ns for step in steps)


def test_the_trace_keeps_every_rule_of_the_format(run: Run) -> None:
    assert chrome_rules.problems(json.loads(gzip.decompress(run.trace_path.read_bytes()))) == []


def test_the_summary_explains_the_service_and_names_what_it_could_not_see(run: Run) -> None:
    for wanted in (
        "Profiling Report",
        "Framework overhead",
        "GpuMemcpy",
        "http.request",
        "Engine.decode/compute",
        "p99",
        "Cost of the instrumentation",
        "Chrome trace: traces/chat-",
    ):
        assert wanted in run.stderr
    import torch

    if torch.version.cuda is None:
        assert "no copy to or from one can happen" in " ".join(run.stderr.split())


def test_a_collector_that_is_not_there_costs_the_service_nothing_but_a_line(tmp_path: Path) -> None:
    profile = ROOT / "configs" / "chat.yaml"
    command = [sys.executable, "-m", "instrument", "run", "--profile", str(profile), "--", "-m", "chat.server"]
    stderr = demonstrate(
        tmp_path, [], ["--", *command, "--port", "0"], OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9"
    )
    assert "by the OTLP export" in stderr
    assert "Traceback" not in stderr


def test_the_example_with_decorators_and_scopes_prints_its_table(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "scopes.py")], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    rows = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines() if line.strip()}
    assert (rows["request"], rows["conv_layer"], done.stderr) == ("100", "100", "")
