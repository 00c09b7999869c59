"""Gauges of a run's processes as its agent reads them: what a process reads itself, and no thread in it for that."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from otlp_collectors import collecting, take
from test_agent import agents, begin, children_of, folder, run, until
from test_agent_containers import ALONE, INSTRUMENT, needs_namespaces

from instrument.agent.exporter_child import HANG_S, GaugeThread
from instrument.agent.exporter_process import ELSEWHERE, EXPORTER_NAME
from instrument.device.gauge_thread import GaugeSources
from instrument.recorder.recorder import RECORDER
from instrument.recording.metric_definitions import GAUGES as EVERY_GAUGE
from instrument.recording.spans import HOST
from instrument.runtime import agent_socket
from instrument.trace import file

__all__ = ["folder"]

CALLS = "instrument.call.duration"
GAUGES = "device: {cuda: off, host: 50ms}\n"
HOSTS = [*EVERY_GAUGE][:7]
OTLP = "export: {otlp: {endpoint: 'http://127.0.0.1:%d'}}\n"
FUNCTIONS = "service: shop\nfunctions: [{match: 'engine:step'}]\n"

SERVICE = """
import json, os, sys, threading, time
import engine
import instrument

def until(found):
    end = time.monotonic() + 240
    while not found():
        assert time.monotonic() < end
        time.sleep(0.005)

def threads():
    return sorted(thread.name for thread in threading.enumerate() if thread.name != "MainThread")

def samples():
    return instrument.session().trace().samples

engine.step(1)
for line in sys.stdin:
    exec(line)
    print(flush=True)
"""


STOP = (
    "session = instrument.session(); instrument.stop(); found = session.trace().samples; "
    "print(json.dumps([[one.device, one.name, one.at_ns, one.value] for one in found]))"
)


def serve(profile: str) -> subprocess.Popen[str]:
    Path("profile.yaml").write_text(profile)
    return begin(SERVICE)


def do(service: subprocess.Popen[str], line: str) -> str:
    """Have it do that; what it prints."""
    assert service.stdin is not None
    assert service.stdout is not None
    service.stdin.write(f"{line}\n")
    service.stdin.flush()
    answer = service.stdout.readline().strip()
    if answer:
        assert service.stdout.readline() == "\n"
    return answer


def end(service: subprocess.Popen[str]) -> str:
    _, errors = service.communicate(timeout=240)
    assert service.returncode == 0, errors
    return errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "alone", "beside_an_agent"),
    [
        pytest.param(FUNCTIONS + GAUGES, ["instrument-nvml"], [], id="gauges"),
        pytest.param(
            FUNCTIONS.replace("}", ", metrics: true}") + GAUGES + OTLP,
            ["instrument", "instrument-nvml", "instrument-otlp"],
            [],
            id="all-over-OTLP",
        ),
        pytest.param(
            FUNCTIONS + "schedule: {step: 'engine:step', closed: 1, record: 1}\nexport: {chrome: {path: 't.json'}}\n",
            ["instrument"],
            ["instrument"],
            id="windows",
        ),
    ],
)
def test_next_to_an_agent_a_service_has_the_thread_for_control_alone_unless_it_cuts_windows(
    profile: str, alone: list[str], beside_an_agent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    with collecting(take) as collector:
        for agent, expected in (("off", alone), ("auto", sorted([*beside_an_agent, "instrument-control"]))):
            service = serve(f"{profile.replace('%d', str(collector.server_port))}agent: {agent}\n")
            do(service, f"until(lambda: threads() == {expected})")
            if "host" in profile:
                do(service, "until(samples)")
            do(service, "time.sleep(0.3)")
            do(service, f"until(lambda: len(os.listdir('/proc/self/task')) == {1 + len(expected)})")
            found = do(service, "print(json.dumps([threads(), len(os.listdir('/proc/self/task'))]))")
            assert json.loads(found) == [expected, 1 + len(expected)]
            end(service)
            if "otlp" in profile:
                until(lambda: {metric.name for metric in collector.metrics} >= {"process.memory.usage", CALLS})
                collector.metrics.clear()


@pytest.mark.slow
def test_the_agent_reports_all_that_a_process_reads_of_itself() -> None:
    told: dict[str, dict[str, list[Any]]] = {}
    for agent in ("off", "auto"):
        service = serve(f"{FUNCTIONS}{GAUGES}agent: {agent}\n")
        do(service, "until(lambda: len(samples()) > 12); sum(range(10**6)); time.sleep(0.1)")
        rows = json.loads(do(service, STOP))
        end(service)
        assert {row[0] for row in rows} == {HOST}
        assert rows == sorted(rows, key=lambda row: (row[2], row[0], row[1]))
        found = told[agent] = {}
        for _, name, _, value in rows:
            found.setdefault(name, []).append(value)
    own, outside = told["off"], told["auto"]
    assert set(outside) == set(own) == set(HOSTS)
    assert outside["cores"][-1] == own["cores"][-1]
    assert max(outside["process_cpu"]) > 0
    for name in ("process_memory", "process_memory_peak"):
        assert type(outside[name][-1]) is type(own[name][-1]) is int
        assert outside[name][-1] == pytest.approx(own[name][-1], rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["off", "auto"])
def test_the_gauges_of_a_short_session_are_read_as_it_ends(agent: str) -> None:
    service = serve(f"{FUNCTIONS}device: {{cuda: off, host: 1h}}\nagent: {agent}\n")
    do(service, "until(threads)")
    rows = json.loads(do(service, STOP))
    assert [name for _, name, *_ in rows] == sorted(HOSTS)
    end(service)


def test_the_last_gauges_of_a_process_that_is_killed_are_in_what_it_leaves() -> None:
    service = serve(FUNCTIONS + GAUGES)
    do(service, "until(lambda: len(samples()) > 12)")
    service.kill()
    service.communicate(timeout=240)
    (path,) = until(lambda: list(Path().rglob("*-died.npz")))
    trace = until(lambda: file.load(path).trace)
    assert "Its last gauges, " in trace.died
    newest = {sample.name: sample.value for sample in trace.samples}
    assert newest["process_memory"] > 1e6
    assert all(sample.value for sample in trace.samples if sample.name == "process_memory"), "not of what was left"


def test_an_exporter_that_is_killed_has_another_one_in_its_place_which_reads_gauges_on() -> None:
    service = serve(FUNCTIONS + GAUGES)
    do(service, "until(samples)")
    (agent,) = agents()
    (exporter,) = children_of(agent)
    os.kill(exporter, signal.SIGKILL)
    do(service, "before = len(samples()); until(lambda: len(samples()) > before + 20)")
    assert do(service, "print(threads())") == "['instrument-control']"
    end(service)


def test_a_run_whose_gauges_alone_are_read_has_an_exporter_without_numpy() -> None:
    service = serve(FUNCTIONS + GAUGES)
    do(service, "until(samples)")
    (agent,) = agents()
    (exporter,) = children_of(agent, EXPORTER_NAME)
    assert "numpy" not in Path(f"/proc/{exporter}/maps").read_text()
    end(service)


def test_an_exporter_that_sends_over_plain_http_loads_no_tls() -> None:
    with collecting(take) as collector:
        service = serve(f"{FUNCTIONS}{OTLP % collector.server_port}")
        do(service, "engine.step(1); assert instrument.flush(100).settled")
        (agent,) = agents()
        (exporter,) = children_of(agent, EXPORTER_NAME)
        assert "libssl" not in Path(f"/proc/{exporter}/maps").read_text()
        end(service)


class Answers:
    """The messages of a gauge thread about its processes."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[agent_socket.Message] = queue.SimpleQueue()
        self.thread = GaugeThread(self._messages.put)

    def ask(self, number: int, message: dict[str, Any], *, anew: bool = True) -> None:
        descriptors = [os.dup(RECORDER.memory_fd)] if anew else []
        self.thread.queue_message({"process": number, "pid": os.getpid(), **message}, descriptors)

    def next(self, number: int) -> Any:
        message = self._messages.get(timeout=240)
        assert message["process"] == number
        return message["gauges"]


@pytest.fixture
def gauges() -> Iterator[Answers]:
    RECORDER.begin_recording(1 << 20, {})
    found = Answers()
    try:
        yield found
    finally:
        found.thread.stop()


def test_a_driver_that_hangs_keeps_the_gauge_thread_alone_and_its_silence_is_named_and_counted(
    gauges: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, answers, is_over = threading.Semaphore(0), threading.Semaphore(0), threading.Event()
    read = GaugeSources.read_due_gauges

    def hang(sources: GaugeSources, *, is_last: bool = False) -> None:
        if not is_over.is_set():
            inside.release()
            answers.acquire(timeout=600)
        read(sources, is_last=is_last)

    monkeypatch.setattr(GaugeSources, "read_due_gauges", hang)
    gauges.ask(1, {"gauges": {"host_ns": 10**6}})
    assert gauges.next(1) == {"gpus": [], "notes": []}
    for often in ("", ", 2 times"):
        assert inside.acquire(timeout=240)
        gauges.thread.report_hanging_driver(time.monotonic())  # a short silence is none
        for _ in range(2):  # it is named once
            gauges.thread.report_hanging_driver(time.monotonic() + 2 * HANG_S)
        (note,) = gauges.next(1)["notes"]
        assert f"read no gauges for more than 10 s{often}: a driver did not answer" in note
        answers.release()
    gauges.ask(2, {"gauges": {"host_ns": 10**6}})
    assert inside.acquire(timeout=240)
    gauges.thread.report_hanging_driver(time.monotonic())
    gauges.thread.report_hanging_driver(time.monotonic() + 2 * HANG_S)
    assert {gauges.next(number)["notes"][0][-50:] for number in (1, 2)} == {note[-50:]}, "also who has come meanwhile"
    is_over.set()
    answers.release()
    gauges.ask(1, {"gauges": None}, anew=False)
    assert gauges.next(1) == {"ended": True}


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
def test_the_next_agent_reads_the_gauges_of_a_killed_agents_processes(hangs: bool) -> None:
    service = serve(FUNCTIONS + GAUGES)
    do(service, "until(samples); until(lambda: threads() == ['instrument-control'])")
    (agent,) = agents()
    if hangs:
        (exporter,) = children_of(agent, EXPORTER_NAME)
        os.kill(exporter, signal.SIGSTOP)
    os.kill(agent, signal.SIGKILL)
    until(lambda: [one for one in agents() if one != agent])
    do(service, "before = len(samples()); until(lambda: len(samples()) > before + 1)")
    assert do(service, "print(threads())") == "['instrument-control']"
    end(service)


TORCH = """
class _C:
    def _cuda_memoryStats(device):
        return {name: {"all": {"current": 5 + device, "peak": 7}} for name in ("allocated_bytes", "reserved_bytes")}
    def _cuda_getDeviceCount():
        return 1
    def _cuda_hasPrimaryContext(device):
        return True

class cuda:
    def is_initialized():
        return True
"""


@pytest.mark.slow
def test_gauges_of_torchs_allocator_from_the_process_are_reported_with_the_agents() -> None:
    service = serve(FUNCTIONS + GAUGES)
    do(service, f"import types; exec({TORCH!r}, found := types.ModuleType('torch').__dict__); 0")
    do(service, "sys.modules['torch'] = types.SimpleNamespace(**found)")
    do(service, "read = lambda: {(one.name, one.device, one.value) for one in samples() if one.name[:5] == 'torch'}")
    do(service, "until(lambda: len(read()) == 4)")
    found = do(service, "print(read())")
    assert eval(found) == {
        ("torch_allocated", 0, 5),
        ("torch_allocated_peak", 0, 7),
        ("torch_reserved", 0, 5),
        ("torch_reserved_peak", 0, 7),
    }
    assert do(service, "print(threads())") == "['instrument-control']"
    end(service)


@needs_namespaces
@pytest.mark.parametrize("which", ["agent", "service"])
def test_an_agent_of_another_container_leaves_gauges_to_the_process_which_says_why(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path("/tmp") / f"instrument-test-{os.getpid()}" / "beside" / "agent.sock"
    words = ["agent", "--socket", str(path), "--captures", "captures"]
    pipe = subprocess.PIPE
    alone = {which: ALONE}
    agent = subprocess.Popen([*alone.get("agent", []), *INSTRUMENT, *words], stderr=pipe, text=True)
    assert agent.stderr is not None
    assert "the agent listens at " in agent.stderr.readline()
    monkeypatch.setenv(agent_socket.VARIABLE, str(path))
    Path("profile.yaml").write_text(FUNCTIONS + GAUGES)
    Path("main.py").write_text(SERVICE)
    words = [*alone.get("service", []), *INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py"]
    service = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    do(service, "until(samples)")
    do(service, "until(lambda: threads() == ['instrument-control', 'instrument-nvml'])")
    whose = "it is in another container" if which == "service" else ELSEWHERE
    note = f"device: a thread of this process reads the gauges, not the agent: {whose}"
    do(service, f"until(lambda: {note!r} in instrument.session().notes())")
    end(service)
    agent.kill()  # and what it has begun, which lives in its namespace
    agent.communicate(timeout=240)
    path.unlink(missing_ok=True)
    path.parent.rmdir()


def test_unusable_settings_of_gauges_leave_them_to_the_process(gauges: Answers) -> None:
    for facts in ({"host_ns": "soon"}, [1], {"host_ns": 10**6, "environ": 5}, {"host_ns": float("inf")}):
        gauges.ask(1, {"gauges": facts})
        assert list(gauges.next(1)) == ["yours"]
    gauges.ask(2, {"gauges": {"host_ns": 10**6}})
    assert gauges.next(2) == {"gpus": [], "notes": []}
    for row in ([0, "torch_reserved"], [0, "torch_reserved", float("nan")], ["x", "y", 1]):
        gauges.ask(2, {"readings": [row]}, anew=False)
        assert list(gauges.next(2)) == ["yours"]
        gauges.ask(2, {"gauges": {"host_ns": 10**6}})
        assert gauges.next(2) == {"gpus": [], "notes": []}
    gauges.ask(2, {"ended": True}, anew=False)
    gauges.ask(9, {"readings": []}, anew=False)
    assert gauges.next(9) == {"ended": True}


def test_a_process_that_records_nothing_has_no_gauges_read() -> None:
    Path("profile.yaml").write_text(FUNCTIONS + GAUGES)
    done = run("""
        import threading
        print([thread.name for thread in threading.enumerate()])
    """)
    assert (done.returncode, done.stdout) == (0, "['MainThread']\n"), done.stderr
