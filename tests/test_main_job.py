"""The main job end to end: a real service under load, explained by its profile alone, its answers unchanged.

A real HTTP server, a real model, a real load and a real OTLP receiver. One run serves all the tests of this module.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import chrome_rules
import pytest
from otlp_receiver import Received, receiver

from instrument import chrome
from instrument.profile.model import VIEWS
from instrument.recorder.recorder import MOST_DEVIATION_NS
from instrument.recording.spans import Span, covered_ns, is_interruption
from instrument.report.requests_view import requests
from instrument.report.view import Options, Recording
from instrument.trace.trace import Trace

if not all(map(find_spec, ("torch", "starlette", "uvicorn", "httpx"))):
    pytest.skip("needs torch, starlette, uvicorn and httpx", allow_module_level=True)

ROOT = Path(__file__).parent.parent
DEMONSTRATION = ROOT / "configs" / "chat.yaml"
REQUESTS = 36
PRINTED = [view for view in VIEWS if view not in ("brief", "distribution")]
"""Views that have something to say of the service: it says nothing to other processes."""


@dataclass(frozen=True)
class Run:
    """The results of one instrumented run of the demonstration."""

    trace_path: Path
    trace: Trace
    received: Mapping[int, Received]
    stderr: str


def demonstrate(
    folder: Path, options: list[str], command: list[str], stderr: int = subprocess.PIPE, **environment: str
) -> str:
    """Run `chat.demo` in a folder; returns what it wrote to standard error, or all where that is no pipe of its own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "INSTRUMENT"))}
    environ |= {"PYTHONPATH": str(ROOT / "examples"), **environment}
    done = subprocess.run(
        [sys.executable, "-m", "chat.demo", "--requests", str(REQUESTS), "--signal", "SIGTERM", *options, *command],
        env=environ,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr or ''}"
    return done.stdout if done.stderr is None else done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The bare service first, then the same under `instrument run`: equal answers, byte for byte, or `demo` fails.

    The profile is the demonstration's, but for the views that it prints: every one that has something to say.
    """
    folder = tmp_path_factory.mktemp("bare")
    demonstrate(folder, ["--save", "answers.json"], [])
    for _ in range(3):
        found = instrumented(tmp_path_factory.mktemp("main_job"), folder / "answers.json")
        if "by the OTLP export" not in found.stderr and "by the agent of the run" not in found.stderr:
            break  # the machine had time for the collector before the end of the run, which does not wait for long
    return found


def instrumented(folder: Path, answers: Path) -> Run:
    with receiver() as collector:
        profile = folder / "chat.yaml"
        brief = DEMONSTRATION.read_text("utf-8")
        assert "  summary:\n" in brief
        more = f"  summary:\n    views: [{', '.join(PRINTED)}]\n    rows: 100\n"
        profile.write_text(brief.replace("  summary:\n", more))
        command = [sys.executable, "-m", "instrument", "run", "--profile", str(profile), "--", "-m", "chat.server"]
        stderr = demonstrate(
            folder,
            ["--check", str(answers)],
            ["--", *command, "--port", "0"],
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{collector.http_port}",
        )
        (path,) = (folder / "traces").iterdir()
        trace, _ = chrome.load(path)
        sent = sum(not span.clipped and not is_interruption(span.site) for span in trace.spans)  # these are events
        until = time.monotonic() + 100
        while len(own(received := collector.spans())) < sent and time.monotonic() < until:
            time.sleep(0.1)  # the agent of the run outlives the service by some seconds
    return Run(path, trace, {span.span_id: span for span in received}, stderr)


def own(spans: Iterable[Received]) -> list[Received]:
    """Return the recorded spans: queue, prefill, decode and stalls of a request are derived from them."""
    return [span for span in spans if not span.attributes.get("instrument.derived")]


def test_every_request_sent_arrives_as_one_request_span(run: Run) -> None:
    requests = [span for span in run.received.values() if span.name == "POST /generate"]
    assert len(requests) == REQUESTS
    assert {span.kind for span in requests} == {"SERVER"}
    assert {span.parent_id for span in requests} == {0}
    assert len({span.trace_id for span in requests}) == REQUESTS


def test_every_child_that_arrives_has_its_parent_and_is_inside_it(run: Run) -> None:
    children = [span for span in run.received.values() if span.parent_id]
    assert len(children) > 20 * REQUESTS
    for span in children:
        parent = run.received[span.parent_id]
        assert parent.trace_id == span.trace_id
        assert parent.start_ns <= span.start_ns <= span.end_ns <= parent.end_ns


def test_spans_arrive_as_recorded_to_the_nanosecond(run: Run) -> None:
    """Each length is. Begins differ where the processor's counter is measured anew in between."""

    def shape(name: str, start_ns: int, end_ns: int, base_ns: int) -> tuple[str, int, int]:
        return (name, start_ns - base_ns, end_ns - start_ns)

    recorded = [span for span in run.trace.spans if not span.clipped and not is_interruption(span.site)]
    first_recorded = min(span.start_ns for span in recorded)
    received = own(run.received.values())
    first_received = min(span.start_ns for span in received)
    mine = sorted(shape(span.site.name, span.start_ns, span.end_ns, first_recorded) for span in recorded)
    theirs = sorted(shape(span.name, span.start_ns, span.end_ns, first_received) for span in received)
    assert [(name, length_ns) for name, _, length_ns in theirs] == [(name, length_ns) for name, _, length_ns in mine]
    assert max(abs(one[1] - other[1]) for one, other in zip(theirs, mine, strict=True)) < MOST_DEVIATION_NS


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
    assert found["POST /generate"] == REQUESTS
    assert found["POST /generate > read_ask > encode"] == found["POST /generate > generate"] == REQUESTS
    assert found["POST /generate > generate > queue"] == found["POST /generate > generate > prefill"] == REQUESTS
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


def test_the_summary_explains_the_service_and_names_what_it_could_not_see(run: Run, torch: Any) -> None:
    for wanted in (
        "Profiling Report",
        "Framework overhead",
        "GpuMemcpy",
        "POST /generate",
        "Engine.decode/compute",
        "p99",
        "Chrome trace: traces/chat-",
    ):
        assert wanted in run.stderr
    if torch.version.cuda is None:
        assert "no copy to or from one can happen" in " ".join(run.stderr.split())


def section(run: Run, title: str) -> list[str]:
    """The lines of one view in what the service printed at its end."""
    lines = run.stderr.splitlines()
    heads = [index for index, line in enumerate(lines) if line.startswith("-") and ">" in line]
    begin = next(index for index in heads if f" {title} " in lines[index])
    return lines[begin : next((index for index in heads if index > begin), len(lines))]


def cells(run: Run, title: str, name: str) -> list[str]:
    """The numbers behind the first row of that name in a view."""
    found = next(line for line in section(run, title) if line.strip().startswith(f"{name} "))
    return found.strip().removeprefix(name).split()


def named(run: Run, name: str) -> list[Span]:
    return [span for span in run.trace.spans if span.site.name == name]


def shown(value: float) -> str:
    """A number as views print it, with four significant digits."""
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def test_each_instant_of_a_request_has_its_phase_and_the_engine_had_begun_with_it_when_it_left_the_queue(
    run: Run,
) -> None:
    view = requests(Recording.from_trace(run.trace), Options())
    (endpoint,) = view.endpoints
    assert (endpoint.name, endpoint.requests, endpoint.errors) == ("POST /generate", REQUESTS, 0)
    phases = {phase.name: phase for phase in endpoint.phases}
    always = {"queue", "prepare", "accept", "prefill", "generate", "share of batches", "waiting in batches", "post"}
    assert phases.keys() - {"stall", "transport"} == always
    assert {phases[name].requests for name in ("queue", "prepare", "share of batches", "post")} == {REQUESTS}
    spent_ns = sum(phase.summed_ns for phase in phases.values())
    assert spent_ns + endpoint.unknown_ns == endpoint.wall_ns
    # Hand-overs, the sending of the last event: some hundredths, more where the machine has no time for the service.
    assert endpoint.unknown_ns < endpoint.wall_ns / 5

    by_root: dict[int, dict[str, Span]] = {}
    for span in run.trace.spans:
        by_root.setdefault(span.root_id, {})[span.site.name] = span
    for tree in (by_root[span.span_id] for span in named(run, "POST /generate")):
        read, queue, prefill, generate = (tree[name] for name in ("read_ask", "queue", "prefill", "generate"))
        assert read.end_ns <= generate.start_ns <= queue.start_ns <= queue.end_ns <= prefill.start_ns
        assert prefill.end_ns <= generate.end_ns <= tree["POST /generate"].end_ns
    # On another thread the engine computes the prompts: none has left the queue before its own was begun.
    begun = sorted(span.start_ns for span in named(run, "Engine.prefill"))
    left = sorted(span.end_ns for span in named(run, "queue"))
    assert all(start_ns < end_ns for start_ns, end_ns in zip(begun, left, strict=True))
    prompts = {span.span_id for span in named(run, "Engine.prefill")}
    first = sorted(span.end_ns for span in named(run, "sample") if span.parent_id in prompts)
    assert all(a < b for a, b in zip(first, sorted(span.end_ns for span in named(run, "prefill")), strict=True))


def test_the_service_prints_every_view_that_applies_with_what_it_did(run: Run, torch: Any) -> None:
    steps, prompts, decodes = (len(named(run, name)) for name in ("engine.step", "Engine.prefill", "Engine.decode"))
    passes = prompts + decodes
    walls = sorted(span.total_ns for span in named(run, "POST /generate"))
    summed = [span for span in run.trace.spans if not is_interruption(span.site)]  # a part of what they interrupted
    counts = Counter(span.site.kind for span in summed)

    assert cells(run, "Requests Report", "POST /generate")[:2] == [str(REQUESTS), "0"]
    assert float(cells(run, "Requests Report", "POST /generate")[-2]) == pytest.approx(walls[-1] / 1e6, rel=5e-4)
    assert cells(run, "Requests Report", "queue")[0] == cells(run, "Requests Report", "generate")[0] == str(REQUESTS)

    for kind in ("request", "step", "op", "phase", "layer", "user"):
        spans = [span for span in summed if span.site.kind == kind]
        union_ms = covered_ns((span.start_ns, span.end_ns) for span in spans) / 1e6
        count, told_ms = cells(run, "Overview Report", kind)[:2]
        assert count == str(counts[kind])
        assert float(told_ms) == pytest.approx(union_ms, rel=5e-4)

    assert f"Steps: {steps} whole" in section(run, "Phases Report")
    step_ns = sum(span.total_ns for span in named(run, "engine.step"))
    assert cells(run, "Phases Report", "step")[:2] == [str(steps), shown(step_ns / 1e6)]
    parts = [float(cells(run, "Phases Report", name)[1]) for name in ("compute", "prepare_data", "sample", "others")]
    assert sum(parts) == pytest.approx(step_ns / 1e6, rel=5e-4)  # four digits each
    assert cells(run, "Phases Report", "compute")[0] == str(passes)

    assert f"{steps} steps timed, the first 0 skipped" in section(run, "Benchmark Report")
    assert float(cells(run, "Benchmark Report", "batch_cost")[0]) == pytest.approx(step_ns / steps / 1e6, rel=1e-3)

    assert cells(run, "Profiling Report", "POST /generate/generate")[0] == str(REQUESTS)
    assert cells(run, "Profiling Report", "Engine.decode/compute")[0] == str(decodes)
    compute_ns = sum(span.total_ns for span in named(run, "compute"))
    assert f"Total: {compute_ns / 1e6:g}" in " ".join(cells(run, "Profiling Report", "Computation time"))

    linear = cells(run, "Operator Report", "Linear")
    assert cells(run, "Operator Report", "Attention")[:2] == [str(4 * passes), "CPU"]
    assert cells(run, "Classes Report", "chat.model.Attention")[5:] == [str(4 * passes), "8"]
    assert linear[1] == "CPU"
    for view in ("Ops Report", "Instances Report"):
        assert f"Time in {REQUESTS} calls to POST /generate (request): {shown(sum(walls) / 1e6)}" in section(run, view)
    layer = next(line for line in section(run, "Ops Report") if line.startswith("Attention [model.layers.0.attention]"))
    assert layer.split()[-2:] == [str(passes), "2"]  # called by prefill and by decode
    assert cells(run, "Instances Report", "POST /generate > generate > queue")[5] == str(REQUESTS)

    assert cells(run, "User Report", "Engine.submit")[:2] == [str(REQUESTS), "CPU"]
    assert cells(run, "User Report", "Engine.admit")[0] == str(steps)

    assert "First request: POST /generate" in " ".join(section(run, "Startup Report"))
    assert cells(run, "Startup Report", "make_weights")[:2] == ["load", "1"]
    assert float(cells(run, "Startup Report", "torch")[1]) > 10
    # A row for those whose first call took longer than the others; on a busy machine a later one may.
    prefills = sorted(named(run, "Engine.prefill"), key=lambda span: span.start_ns)
    slow = [line.split()[1:3] for line in section(run, "Startup Report") if line.startswith("Engine.prefill ")]
    if prefills[0].total_ns > 1.1 * statistics.median(span.total_ns for span in prefills):
        assert slow == [["op", str(prompts)]]

    samples, *_, most, at_ms, _ = cells(run, "Memory Report", "Process: process_memory")
    read = [sample for sample in run.trace.samples if sample.name == "process_memory"]
    assert int(samples) == len(read) >= 1
    greatest = max(sample.value or 0 for sample in read)
    assert float(most) == pytest.approx(greatest / 2**20, abs=1)
    at = [(sample.at_ns - run.trace.start_ns) / 1e6 for sample in read if sample.value == greatest]
    assert any(float(at_ms) == pytest.approx(when, rel=1e-3, abs=1) for when in at)

    told = section(run, "Instrumentation Report")
    assert any(line.startswith(f"{len(run.trace.spans)} calls x ") for line in told)
    assert "Nothing was lost." in told, "\n".join(told)
    (probe,) = (line for line in told if line.startswith("decode_next [chat.text.decode_next]"))
    assert probe.split()[2:4] == ["phase", str(len(named(run, "decode_next")))]

    if torch.cuda.is_available():
        assert cells(run, "Operator Report", "Engine.decode")[0] == str(decodes)
        assert any("starved" in line for line in section(run, "Device Report"))
        assert any("h2d" in line for line in section(run, "Copies Report"))
    else:
        for view in ("Device Report", "Kernels Report"):
            assert any(line.startswith("No device time was recorded") for line in section(run, view))
        assert any(line.startswith("No copy was recorded.") for line in section(run, "Copies Report"))


def test_a_report_from_the_saved_trace_has_every_view_that_the_service_printed(run: Run) -> None:
    command = [sys.executable, "-m", "instrument", "report", str(run.trace_path), "--view", ",".join(PRINTED)]
    told = subprocess.run([*command, "--rows", "100"], capture_output=True, text=True, check=True).stdout
    later = Run(run.trace_path, run.trace, run.received, told)
    for title, name in (
        ("Requests Report", "queue"), ("Overview Report", "request"), ("Phases Report", "compute"),
        ("Benchmark Report", "batch_cost"), ("Operator Report", "Attention"),
        ("Classes Report", "chat.model.Attention"), ("Instances Report", "POST /generate > generate > queue"),
        ("User Report", "Engine.submit"), ("Startup Report", "make_weights"),
    ):  # fmt: skip
        assert cells(later, title, name) == cells(run, title, name), title


@pytest.mark.slow
def test_a_collector_that_is_not_there_costs_the_service_nothing_but_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "instrument", "run", "--profile", str(DEMONSTRATION), "--", "-m", "chat.server"]
    stderr = demonstrate(
        tmp_path, [], ["--", *command, "--port", "0"], OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9"
    )
    assert re.search(r"Not kept: [0-9]+ \(spans (on their way by the agent of the run|\w+ by the OTLP export)", stderr)
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_the_demonstration_prints_one_screen(tmp_path: Path, torch: Any) -> None:
    command = [sys.executable, "-m", "instrument", "run", "--profile", str(DEMONSTRATION), "--", "-m", "chat.server"]
    lines = demonstrate(tmp_path, [], ["--", *command, "--port", "0"], stderr=subprocess.STDOUT).splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    assert [line.partition(" ")[0] for line in lines[:3]] == [
        "instrument:",
        "instrument:",
        "listening",
    ]  # and no warning
    first_words = {line.split()[0] for line in lines if line}
    wanted = ["Window:", "POST", "queue", "generate", "Where", "Device:", "Process:", "Cost:", "Chrome"]
    assert [word for word in wanted if word not in first_words] == []
    if torch.version.cuda is None and torch.version.hip is None:
        assert any(line.startswith("Device: no device time: ") for line in lines), lines


def test_the_example_with_decorators_and_scopes_prints_its_table(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "scopes.py")], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    tables = done.stdout.partition("Request, and its parts")[2].splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in reversed(tables) if line.strip()}
    assert (rows["request"][0], rows["conv_layer"][2], done.stderr) == ("100", "100", "")
