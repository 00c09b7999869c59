"""A run's agent ends soon and reports all losses, in spite of its collector and its processes."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from otlp_collectors import Handler, collecting, drip, refuse_with, swallow, take
from test_agent import INSTRUMENT, agents, asked, folder, kill, until
from test_agent_export import ENGINE, PROFILE, spans_of

from instrument.agent.agent import STOP_LIMIT_S
from instrument.runtime import agent_socket

__all__ = ["folder"]

SERVICE = """
import os, signal, time
from engine import serve

if os.fork() == 0:
    for x in range(%d):
        serve(x)
    os.kill(os.getpid(), signal.SIGKILL)
os.wait()
serve(0)
open("ready", "w").close()
end = time.monotonic() + 600
while not os.path.exists("over") and time.monotonic() < end:
    time.sleep(0.01)
"""

BURSTS = """
import time
from engine import serve
from instrument.sessions import leaving

leaving.STALLED_AGENT_S = 60  # a machine with other work is no agent that is stopped

for x in range(5000):
    serve(x)
time.sleep(1)
for x in range(5000, 6000):
    serve(x)
"""


@contextmanager
def refusing() -> Iterator[int]:
    """A port at which connections are refused."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])


@contextmanager
def swallowing() -> Iterator[int]:
    with collecting(swallow) as server:
        yield server.server_port


@contextmanager
def dripping() -> Iterator[int]:
    with collecting(drip) as server:
        yield server.server_port


def has_ended(pid: int) -> bool:
    """Return True if a process has ended, even if it has not been reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize(("collector", "requests"), [(refusing, 10), (swallowing, 6000), (dripping, 10)])
def test_an_agent_ends_within_five_seconds_of_a_request_and_reports_its_losses(
    collector: Callable[[], AbstractContextManager[int]], requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMPATIENT", "agents")
    assert STOP_LIMIT_S < 5
    Path("engine.py").write_text(ENGINE)
    Path("main.py").write_text(SERVICE % requests)
    with collector() as port, Path("errors").open("w") as errors:
        Path("profile.yaml").write_text(PROFILE % (port, ", timeout: 1000s", ""))
        command = [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py"]
        service = subprocess.Popen(command, stderr=errors)
        try:
            until(lambda: Path("ready").exists())
            (agent,) = agents()
            os.kill(agent, signal.SIGTERM)
            until(lambda: has_ended(agent), 100)
            assert service.poll() is None
        finally:
            Path("over").touch()
            service.wait(240)
    errors_text = Path("errors").read_text()
    lines = [line for line in errors_text.splitlines() if "some data of this run has not arrived" in line]
    counts = [sum(map(int, re.findall(r"(\d+) span", line))) for line in lines]
    assert counts[:1] == [spans_of(requests)], errors_text
    assert counts[1:] in ([], [spans_of(1)]), errors_text  # of the agent that comes after it, if it has ended by now


@pytest.mark.slow
def test_the_first_process_of_a_run_waits_for_an_agent_whose_collector_is_slow() -> None:
    def take_slowly(handler: Handler, _: int) -> None:
        time.sleep(0.8 if handler.server.tries <= 2 else 0)
        handler.answer(200)

    Path("engine.py").write_text(ENGINE)
    Path("main.py").write_text(BURSTS)
    with collecting(take_slowly, metrics=take) as server:
        Path("profile.yaml").write_text(PROFILE % (server.server_port, "", ""))
        command = [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py"]
        subprocess.run(command, check=True, timeout=240)
        assert len(server.taken) == spans_of(6000)


PARENT = """
import gc, os, time
import engine

if os.fork() == 0:
    engine.serve(1)
    open("ready", "w").close()
    end = time.monotonic() + 600
    while not os.path.exists("over") and time.monotonic() < end:
        time.sleep(0.01)
else:
    gc.collect()
    os.wait()
"""


def test_processes_whose_agent_was_killed_are_one_report_and_a_mere_parent_is_not_in_it() -> None:
    functions = 'functions: [{match: "engine:*"}]'
    Path("engine.py").write_text(ENGINE)
    Path("profile.yaml").write_text(
        f"service: shop\n{functions}\nlimits: {{blocked: 100us}}\nrequests: auto\nexport: {{summary: {{to: stderr}}}}\n"
    )
    Path("main.py").write_text(PARENT)
    command = [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as service:
        until(Path("ready").exists)
        (agent,) = agents()
        kill(agent)
        Path("over").touch()
        _, told = service.communicate(timeout=240)
    until(lambda: not agent_socket.list_runs())
    assert service.returncode == 0, told
    assert told.count("Summary of shop") == 1, told
    assert f"Process: {service.pid}" not in told


ALONE = """
import os, time
import engine

engine.serve(1)
open("ready", "w").close()
end = time.monotonic() + 600
while not os.path.exists("over") and time.monotonic() < end:
    time.sleep(0.01)
"""


def test_an_agent_that_loses_the_right_to_descriptors_ends_with_its_run_and_leaves_no_folder() -> None:
    Path("main.py").write_text(ALONE)
    Path("profile.yaml").write_text("functions: [{match: 'engine:*'}]\nexport: {summary: {to: stderr}}\n")
    Path("engine.py").write_text(ENGINE)
    command = [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as service:
        until(Path("ready").exists)
        (agent,) = agents()
        _, most = resource.prlimit(agent, resource.RLIMIT_NOFILE)
        resource.prlimit(agent, resource.RLIMIT_NOFILE, (4, most))
        Path("over").touch()
        _, told = service.communicate(timeout=240)
    assert service.returncode == 0, told
    until(lambda: has_ended(agent))
    assert not agent_socket.list_runs()


@pytest.mark.slow
def test_a_report_into_a_pipe_has_the_export_losses_of_a_killed_worker() -> None:
    Path("engine.py").write_text(ENGINE)
    Path("main.py").write_text(SERVICE % 10)
    with collecting(refuse_with(400)) as server:
        Path("profile.yaml").write_text(PROFILE % (server.server_port, "", "  summary: {to: stderr}"))
        command = [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as service:
            until(agents)
            (folder,) = agent_socket.list_runs()
            until(lambda: asked(folder, {"ask": "processes"})[-1]["end"]["runs"][0]["lost"])
            Path("over").touch()
            _, told = service.communicate(timeout=240)
    lost = re.search(r"destination: (\d+) spans failed by the OTLP export", told.partition("Summary of")[2])
    assert lost is not None, told
    assert int(lost[1]) >= spans_of(10)
