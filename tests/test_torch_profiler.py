"""torch.profiler during the windows of a loop: it is joined to them, and its failures are reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kineto import BASE_NS, Kineto

import instrument
from instrument import Profiler, chrome, schedule, scope
from instrument.compat import fluid, paddle, singa
from instrument.errors import ProfileError
from instrument.profile.keys import loads
from instrument.recording.spans import FLOPS, Origin, Site, Span, is_operator
from instrument.report.benchmark_view import benchmark
from instrument.report.phases_view import phases
from instrument.report.view import Options, Recording
from instrument.sessions import torch_profiler
from instrument.sessions.handlers import Window
from instrument.sessions.torch_profiler import insert_operator_spans
from instrument.trace.trace import Trace

PID = 4321
US = 1_000


@pytest.fixture(scope="module", autouse=True)
def late_imports() -> None:
    """Imported by the first test: this file is collected by every process of the tests and run by one."""
    global torch
    torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test works in a folder of its own; a session that a failing test left running is stopped."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INSTRUMENT_PROFILE", raising=False)
    yield
    instrument.stop()
    assert not torch_profiler._holding.locked()


def model() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def train(net: Any, steps: int, profiler: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(steps):
        net(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()


def names_above(trace: Trace, name: str) -> set[str]:
    """The names of the spans around each span of a name."""
    by_id = {span.span_id: span for span in trace.spans}
    return {by_id[span.parent_id].site.name for span in trace.spans if span.site.name == name if span.parent_id}


# -------------------------------------------------------------------- beside a loop


def test_a_profiler_without_a_profile_reports_phases_layers_operators_allocations_and_operations() -> None:
    net = model()
    with Profiler(schedule=(2, 5)) as profiler:
        train(net, 6, profiler)
    window = profiler.window
    assert window is not None
    spans = window.trace.spans
    counts = {name: sum(span.site.name == name for span in spans) for name in ("forward", "backward", "ReLU", "step")}
    assert counts == {"forward": 3, "backward": 3, "ReLU": 3, "step": 3}
    assert sum(span.site.name == "aten::relu" for span in spans) == 3
    assert names_above(window.trace, "aten::relu") == {"ReLU"}
    assert names_above(window.trace, "aten::randn") == {"step"}
    assert window.trace.allocations
    assert {"aten::addmm", "Linear"} <= {row.name for row in window.views(["operators"])["operators"].operations.rows}  # type: ignore[attr-defined]
    text = profiler.summary(views=["operators", "phases", "memory", "device", "kernels"])
    for found in (
        "aten::addmm",
        "optimizer",
        "CPU(Process)",
        "torch finds no GPU",
        "Cost of torch.profiler",
    ):
        assert found in text
    assert "waiting" not in text  # of rules that nobody wrote
    assert all(0 <= span.self_ns <= span.total_ns for span in spans)
    roots = {span.root_id for span in spans}
    for root_id in roots:
        tree = [span for span in spans if span.root_id == root_id]
        (root,) = (span for span in tree if span.span_id == root_id)
        assert sum(span.self_ns for span in tree) == root.total_ns


def test_each_window_has_the_operators_of_its_own_steps_and_torch_rests_between() -> None:
    net, found = model(), list[Window]()
    running: list[bool] = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    plan = schedule(closed=1, ready=1, record=2, repeat=2)
    with Profiler(schedule=plan, on_trace_ready=found.append) as profiler:
        for _ in range(10):
            running.append(profiler._torch is not None and profiler._torch.is_at_work)
            net(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            profiler.step()
    assert running == [False, False, True, True, False, False, True, True, False, False]
    assert [sum(span.site.name == "aten::relu" for span in window.trace.spans) for window in found] == [2, 2]


def test_a_window_is_saved_and_read_back_with_its_operators_and_kernels() -> None:
    net = model()
    with Profiler(schedule=(0, 2)) as profiler:
        train(net, 3, profiler)
    window = profiler.window
    assert window is not None
    read, tally = chrome.load(profiler.export("window.json.gz"))
    assert sum(is_operator(span.site) for span in read.spans) == sum(is_operator(s.site) for s in window.trace.spans)
    assert len(read.allocations) == len(window.trace.allocations)
    assert tally is not None
    assert any(is_operator(row.path[-1]) for row in tally.iterate_totals())


@pytest.mark.parametrize("asked", [False, None])
def test_it_is_off_where_it_is_switched_off_and_where_a_profile_says_what_is_recorded(asked: bool | None) -> None:
    profile = None if asked is False else loads("phases: auto", environ={})
    with Profiler(profile, torch=asked) as profiler:
        train(model(), 2, profiler)
    assert profiler.window is not None
    assert not any(is_operator(span.site) for span in profiler.window.trace.spans)


def test_it_is_on_next_to_a_running_session_where_it_is_asked_for() -> None:
    instrument.start(loads("", environ={}))
    with Profiler(torch={"profile_memory": False}) as profiler:
        other = threading.Thread(target=model(), args=(torch.randn(4, 8),))
        other.start()
        other.join()
        profiler.step()
    window = profiler.window
    assert window is not None
    assert not window.trace.allocations
    threads = {span.thread_id for span in window.trace.spans if span.site.name == "aten::addmm"}
    assert threads.isdisjoint({threading.get_native_id()})
    assert len(threads) == 1  # without allocations every thread is seen


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("yes", "torch: found 'yes'; allowed: True, False, or options: record_shapes, profile_memory"),
        ({"shapes": True}, "torch: found the option 'shapes'; allowed: record_shapes, profile_memory"),
        ({"profile_memory": 1}, "torch: profile_memory: found 1; allowed: True or False"),
        ({"with_stack": True}, "with_stack: found True; allowed: False, for calls of Python are not joined"),
        ({"limit_s": 0}, "torch: limit_s: found 0; allowed: seconds above 0"),
    ],
)
def test_options_that_cannot_be_used_are_reported(asked: Any, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        Profiler(torch=asked)


def test_another_torch_profiler_that_runs_already_is_left_alone_and_it_is_said() -> None:
    theirs = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with theirs:
        with Profiler() as profiler:
            train(model(), 2, profiler)
        assert profiler.window is not None
        notes = profiler.window.trace.notes
    assert [note for note in notes if note.startswith("another torch.profiler runs in this process")]
    assert not any(is_operator(span.site) for span in profiler.window.trace.spans)
    assert any(event.name == "aten::addmm" for event in theirs.events())


def test_a_torch_profiler_that_the_program_begins_meanwhile_goes_first() -> None:
    net = model()
    with Profiler() as profiler:
        net(torch.randn(4, 8))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
            net(torch.randn(4, 8))
        profiler.step()
    window = profiler.window
    assert window is not None
    assert sum(event.name == "aten::relu" for event in theirs.events()) == 1
    assert sum(span.site.name == "aten::relu" for span in window.trace.spans) == 1
    assert any("the program began a torch.profiler of its own" in note for note in window.trace.notes)
    assert "_prepare_trace" in vars(torch.autograd.profiler.profile)
    assert torch.autograd.profiler.profile._prepare_trace.__module__.startswith("torch")


@pytest.mark.parametrize("memory", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_ends_before_a_long_window_does_and_says_so(memory: bool) -> None:
    net = model()
    with Profiler(torch={"profile_memory": memory, "limit_s": 0.3}) as profiler:
        beside = profiler._torch
        assert beside is not None
        train(net, 1, profiler)
        time.sleep(0.31)
        until = time.monotonic() + 240
        while beside.is_at_work and time.monotonic() < until:
            profiler.step()
        assert not beside.is_at_work
        train(net, 3, profiler)
    window = profiler.window
    assert window is not None
    assert sum(span.site.name == "aten::relu" for span in window.trace.spans) == 1
    assert sum(span.site.name == "ReLU" for span in window.trace.spans) == 4
    assert any("it ran for 0.3 s and was ended before the window was" in note for note in window.trace.notes)


def test_a_loop_that_ends_on_another_thread_than_torch_began_on_does_without(caplog: pytest.LogCaptureFixture) -> None:
    profiler = Profiler()
    profiler.start()
    train(model(), 1, profiler)
    stopping = threading.Thread(target=profiler.stop)
    stopping.start()
    stopping.join()
    assert profiler.window is not None
    assert not any(is_operator(span.site) for span in profiler.window.trace.spans)
    assert "torch.profiler was started on another thread" in caplog.text
    beside = profiler._torch
    assert beside is not None
    assert beside.end() is not None  # here it can be ended


def test_errors_of_torch_are_reported_and_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(torch.profiler.profile, "start_trace", fail)
    with Profiler() as profiler:
        train(model(), 2, profiler)
    assert caplog.text.count("torch.profiler did not start (RuntimeError: no room)") == 1
    assert profiler.window is not None
    assert any(span.site.name == "ReLU" for span in profiler.window.trace.spans)
    monkeypatch.undo()


def test_its_files_are_gone_when_it_has_been_read_or_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Profiler(schedule=schedule(record=1)) as profiler:
        train(model(), 3, profiler)
    assert profiler.window is not None
    assert profiler.window.trace
    del profiler
    assert not list(tmp_path.glob("instrument-*"))


def test_nothing_is_imported_and_nothing_said_where_torch_is_not() -> None:
    program = """
import sys
from instrument import Profiler, scope
with Profiler() as profiler:
    with scope("work"):
        pass
    profiler.step()
print(profiler.summary(views=["user"]))
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "Not observed" not in done.stdout
    assert done.stderr == ""


# -------------------------------------------------------------------- operators among our spans


def span(name: str, span_id: int, parent_id: int, start_us: int, end_us: int, kind: str = "layer") -> Span:
    made = Span(Site(name, kind), span_id, parent_id, 1, PID, 0, start_us * US, end_us * US, 0, 0)
    made.active_ns = made.total_ns
    return made


def laid(ours: list[Span], theirs: Kineto, tmp_path: Path) -> Trace:
    """Our spans with the operators of a file whose times are on the same clock."""
    beside = chrome.read(theirs.save(tmp_path / "theirs.json")).trace
    trace = Trace(Origin(PID, "train", 0, BASE_NS), 0, 1_000 * US, ours, {PID: "main"})
    joined = chrome.join_torch_trace(trace, replace(beside, watched=(0, 1_000 * US)))
    return insert_operator_spans(joined, beside, 0)


def test_an_operator_is_in_the_span_around_its_middle_and_is_cut_to_it(tmp_path: Path) -> None:
    ours = [span("model", 1, 0, 0, 100), span("fc", 2, 1, 10, 50), span("hook", 3, 2, 20, 30, "user")]
    for one, self_us in zip(ours, (60, 30, 10), strict=True):
        one.self_ns = self_us * US
    theirs = Kineto(PID)
    theirs.op("aten::linear", 12 * US, 51 * US)
    theirs.op("aten::addmm", 15 * US, 40 * US)
    theirs.op("aten::relu", 60 * US, 70 * US)
    theirs.op("a range", 55 * US, 75 * US, category="user_annotation")
    theirs.op("aten::other", 5 * US, 8 * US, thread=7)
    trace = laid(ours, theirs, tmp_path)
    found = {one.site.name: one for one in trace.spans}
    parents = {name: one.parent_id for name, one in found.items()}
    assert parents == {
        "model": 0, "fc": 1, "aten::linear": 2, "aten::addmm": found["aten::linear"].span_id,
        "hook": found["aten::addmm"].span_id, "aten::relu": 1, "aten::other": 0,
    }  # fmt: skip
    assert (found["aten::linear"].start_ns, found["aten::linear"].end_ns) == (12 * US, 50 * US)
    self_us = {name: one.self_ns // US for name, one in found.items()}
    assert self_us == {
        "model": 50, "fc": 2, "aten::linear": 13, "aten::addmm": 15, "hook": 10, "aten::relu": 10, "aten::other": 3,
    }  # fmt: skip
    assert {one.root_id for name, one in found.items() if name != "aten::other"} == {1}
    assert set(trace.threads) == {PID, 7}


def test_kernels_are_the_device_time_of_the_innermost_operator_that_asked_and_copies_are_not(tmp_path: Path) -> None:
    theirs = Kineto(PID)
    theirs.op("aten::linear", 10 * US, 60 * US)
    theirs.op("aten::addmm", 20 * US, 50 * US, **{"Input Dims": [[16], [4, 8], [8, 16], [], []]})
    theirs.launch("gemm", 22 * US, 100 * US, 140 * US)
    theirs.launch("bias", 30 * US, 120 * US, 130 * US, stream=9)
    theirs.launch("Memcpy HtoD", 40 * US, 150 * US, 170 * US, category="gpu_memcpy")
    trace = laid([span("fc", 1, 0, 0, 80)], theirs, tmp_path)
    found = {one.site.name: one for one in trace.spans}
    assert [(one.stream, one.start_ns, one.label) for one in found["aten::addmm"].device] == [
        (7, 100 * US, "overlapped"), (9, 120 * US, "overlapped"),
    ]  # fmt: skip
    assert not found["aten::linear"].device
    assert found["aten::addmm"].attributes[FLOPS]
    assert not trace.flops  # the spans tell them
    assert len(trace.kernels) == 3


# -------------------------------------------------------------------- the faces


def test_the_first_example_of_paddles_document_prints_filled_tables(capsys: pytest.CaptureFixture[str]) -> None:
    lines = """
linear = torch.nn.Linear(13, 5)
momentum = torch.optim.SGD(linear.parameters(), lr=1e-4, momentum=0.9)
with profiler.Profiler(
         targets=[profiler.ProfilerTarget.CPU, profiler.ProfilerTarget.GPU],
         scheduler=(2, 10),
         on_trace_ready=profiler.export_chrome_tracing('./profiler_demo')) as prof:
  for i in range(30):
      data = torch.randn(26)
      data = torch.reshape(data, [2, 13])
      out = linear(data)
      out.sum().backward()
      momentum.step()
      momentum.zero_grad()
      prof.step()
prof.summary()
"""
    exec(lines, {"profiler": paddle, "torch": torch})
    text = capsys.readouterr().out
    sections = {part.partition("\n")[0].strip(" <-"): part for part in text.split("------------------------->")[1:]}
    assert list(sections) == [
        "Benchmark Report", "Device Report", "Overview Report", "Phases Report", "Distribution Report",
        "Kernels Report", "Operator Report", "Copies Report", "User Report",
    ]  # fmt: skip
    assert "aten::addmm" in sections["Operator Report"]
    assert "aten::reshape" in sections["Operator Report"]
    for phase in ("forward    8", "backward   8", "optimizer  8"):
        assert phase in sections["Phases Report"]
    assert "process_cpu" in sections["Device Report"]
    assert "torch finds no GPU" in sections["Kernels Report"]
    (path,) = Path("profiler_demo").iterdir()
    read = paddle.load_profiler_result(path)
    assert any(one.site.name == "aten::addmm" for one in read.trace.spans)


def test_options_of_paddles_profiler_for_torch_are_recorded(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with paddle.Profiler(record_shapes=True, profile_memory=True, with_flops=True) as profiler:
        train(model(), 2, profiler)
    profiler.summary()
    text = capsys.readouterr().out
    assert "Memory by place" in text
    assert "GFLOP/s" in text
    assert "not recorded" not in caplog.text


def test_the_first_example_of_fluids_document_prints_operators_and_what_was_overhead(
    capsys: pytest.CaptureFixture[str],
) -> None:
    net = model()
    with fluid.profiler("All", "total", None):
        for _ in range(10):
            net(torch.randn(4, 8))
    text = capsys.readouterr().out
    assert "thread0::forward" in text
    assert [line.split()[1] for line in text.splitlines() if line.split()[:1] == ["aten::relu"]] == ["10"]
    (computation,) = (line for line in text.splitlines() if "Computation time" in line)
    assert 0 < float(computation.split()[-1].rstrip("%")) < 100


def test_names_of_phases_are_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    phases = scope("prepare_data", kind="phase"), scope("infer_shape", kind="phase")
    outer, inner = (scope(name, kind="op") for name in ("sync_batch_norm_grad_of_a_long_name", "fill_constant_like"))
    with fluid.profiler("CPU", "total", None, "AllOpDetail"), outer, phases[0], inner, phases[1]:
        pass
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "/" in line]
    assert names[:2] == ["sync_batch_norm_grad_of_a_long_name0/prepare_data", "fill_constant_like0/infer_shape"]


@pytest.mark.parametrize("verbosity", [0, 1, 2])
def test_singas_verbosities_print_as_its_document_shows(verbosity: int, capsys: pytest.CaptureFixture[str]) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    device = singa.create_cuda_gpu()
    device.SetVerbosity(verbosity)
    device.SetSkipIteration(2)
    for _ in range(6):
        net(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    device.PrintTimeProfiling()
    device.PrintTimeProfiling()
    lines = capsys.readouterr().out.splitlines()
    device.SetVerbosity(0)
    assert lines[:2] == ([] if verbosity == 0 else ["", "Time Profiling:"])
    half = lines[2 : len(lines) // 2]
    if verbosity == 1:
        assert [line.split(" : ")[0] for line in half] == [
            "Forward Propagation Time", "Backward Propagation Time", "Timed iterations: 4",
        ]  # fmt: skip
    if verbosity == 2:
        assert lines == 2 * lines[: len(lines) // 2]
        named = [line.partition(". ")[2].split(" : ")[0] for line in half[:-1]]
        assert named[:5] == ["aten::linear", "aten::relu", "aten::linear", "aten::sum", "aten::ones_like"]
        assert named.count("ReluBackward0") == 1
        assert [line.partition(". ")[0] for line in half[:-1]] == [f"OP_ID{at}" for at in range(len(half) - 1)]
        assert all(float(line.split()[-2]) > 0 for line in half[:-1])
        assert half[-1] == "Timed iterations: 4"


THEANO = """
import torch
from instrument.compat import theano
f = theano.function(name="example")(lambda x, y, z: (x + y + z) * 2)
for _ in range(2):
    f(torch.ones(8), torch.ones(8), torch.ones(8))
"""


def theano_of(flags: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "THEANO_FLAGS": flags}
    return subprocess.run([sys.executable, "-c", THEANO], env=environ, capture_output=True, text=True, check=True)


@pytest.mark.slow
def test_theanos_flags_profile_a_program_and_the_others_are_refused_with_a_word() -> None:
    done = theano_of("optimizer_excluding=fusion:inplace,profile=True,profile_memory=True,profiling.n_ops=2")
    assert "theano: optimizer_excluding: not honoured" in done.stderr
    assert "theano: profile_memory: not honoured" in done.stderr
    text = done.stderr
    assert "Time in 2 calls to Function.__call__: " in text
    assert "Time in thunks: " in text
    rows = [line.split() for line in text.splitlines()]
    assert next(row[-2:] for row in rows if row[:1] == ["aten::add"]) == ["4", "1"]
    assert any(row[:1] == ["aten"] for row in rows)
    assert "(remaining " in text


@pytest.mark.slow
def test_without_the_flag_nothing_is_profiled_and_a_destination_may_be_a_file() -> None:
    assert theano_of("").stderr == ""
    done = theano_of("profile=True,profiling.destination=profile.txt")
    assert "Function profiling" not in done.stderr
    assert "aten::add" in Path("profile.txt").read_text()


def test_flags_are_set_in_code_too() -> None:
    from instrument.compat.theano import parse_flags

    config = parse_flags("profile=True, profiling.n_apply=7,profile=maybe")
    assert (config.profile, config.profiling.n_apply, config.profiling.n_ops) == (True, 7, 20)
    config.profiling.n_ops = 3
    with pytest.raises(ProfileError, match=r"theano.config.profile: found 1; allowed: True or False"):
        config.profile = 1  # type: ignore[assignment]
    with pytest.raises(ProfileError, match=r"theano.config.profiling.n_ops: found 0; allowed: a whole number from 1"):
        config.profiling.n_ops = 0


def test_json_of_a_window_counts_operators_once() -> None:
    """The numbers of a view are those of its text, and serialise."""
    from instrument.report.view import make_json_values

    with Profiler(torch={"profile_memory": False}) as profiler:
        train(model(), 2, profiler)
    assert profiler.window is not None
    views = profiler.window.views(["operators", "events", "overview"])
    told = json.loads(json.dumps({name: make_json_values(view) for name, view in views.items()}))
    rows = [row for row in told["operators"]["blocks"][0]["rows"] if row["depth"] == 0 and row["name"] == "aten::relu"]
    assert [row["calls"] for row in rows] == [2]


def test_the_steps_of_a_trace_of_torch_profiler_are_steps(tmp_path: Path) -> None:
    path = tmp_path / "torch.json"
    activities = [torch.profiler.ProfilerActivity.CPU]
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
    with torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=lambda one: one.export_chrome_trace(str(path))
    ) as profile:
        for _ in range(6):
            torch.ones(4).add_(1)
            profile.step()
    loaded, tally = chrome.load(path)
    steps = [one for one in loaded.spans if one.site.kind == "step"]
    assert [(one.site.name, one.attributes["step"]) for one in steps] == [("ProfilerStep", n) for n in (2, 3, 4)]
    recording = Recording(lambda: tally, lambda: loaded)
    (loop,) = benchmark(recording, Options()).loops
    assert (loop.name, loop.steps) == ("ProfilerStep", 3)
    assert phases(recording, Options()).of == "step"
