"""An agent hears of processes and sees them in the right order, even if it is late."""

from __future__ import annotations

import os
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from instrument import clock
from instrument.agent import end_reports, loop, processes, runs
from instrument.agent.child import Jobs
from instrument.agent.client import Member
from instrument.agent.live_view import LiveSampler
from instrument.agent.loop import Connection, EventLoop
from instrument.agent.processes import GOODBYE, VANISHED, Process, Run, exit_fd_of
from instrument.agent.runs import Runs
from instrument.runtime import agent_socket


class Agent:
    """Runs and their loop, which turns on command, in a folder of its own."""

    def __init__(self, folder: Path, says: Callable[[str], object] | None = None, own_run: Run | None = None) -> None:
        self.path = folder / agent_socket.SOCKET
        self.heard: list[agent_socket.Message] = []
        self.loop = EventLoop(agent_socket.listen_on_socket(self.path), self._heard, self._dropped, None)
        self.runs = Runs(self.loop, folder, own_run, folder, says, lambda: None)

    def _heard(self, connection: Connection, message: agent_socket.Message, descriptors: list[int]) -> list[int]:
        self.heard.append(message)
        process = self.runs.find_process(connection)
        if "join" in message:
            return self.runs.add_process(connection, dict(message["join"]), descriptors)
        if process is not None and "goodbye" in message:
            self.runs.handle_goodbye(process, dict(message["goodbye"]), is_answered=False)
        return []

    def _dropped(self, connection: Connection) -> None:
        self.runs.handle_disconnect(connection)

    @property
    def processes(self) -> list[Process]:
        return [process for run in self.runs for process in run.processes]

    def turn(self) -> None:
        """Do what can be done now."""
        self.loop.call_later(0, lambda: None)  # so that it waits for nothing
        self.loop.run_once()

    def close(self) -> None:
        self.loop.drop_connections()
        self.runs.close()
        self.loop.close()

    def caller(self) -> socket.socket:
        """A new connection."""
        sock = socket.socket(agent_socket.FAMILY, agent_socket.KIND)
        sock.connect(str(self.path))
        return sock


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.chdir(tmp_path)
    found = Agent(Path())  # short: a socket's path has an end
    yield found
    found.close()


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_first_process_that_ends_without_a_span_has_joined_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], has_joined: bool
) -> None:
    """It may take a while to end, as it waits for the report of the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "NONE_JOINED_S", 0.0)
    run = Run("run", first=os.getpid())
    if has_joined:
        left = Process(run=run, pid=run.first, started=1, facts={}, joined_ns=1, goodbye={})
        run.processes.append(left)
    agent = Agent(Path(), None, run)
    agent.turn()
    agent.close()
    assert ("records anything" in capfd.readouterr().err) != has_joined


def facts(run: str) -> dict[str, Any]:
    return {"pid": os.getpid(), "started": clock.read_process_start_ticks(clock.STAT), "run": run, "records": True}


def test_a_join_is_read_before_later_messages_of_others(agent: Agent) -> None:
    first, second = agent.caller(), agent.caller()
    with first, second:
        agent_socket.send(first, {"join": facts("one")})
        for _ in range(3):
            agent.turn()
        agent_socket.send(first, {"flush": 1})  # the agent has something to do for this one first
        agent_socket.send(second, {"join": facts("two")})
        with agent.caller() as third:
            agent_socket.send(third, {"join": facts("three")})
            agent_socket.send(first, {"flush": 2})
            agent.turn()
            told = [one.get("flush") or one["join"]["run"] for one in agent.heard]
            assert set(told[:3]) == {"one", "two", "three"}
            assert told[3:] == [1, 2]


def test_a_goodbye_is_heard_behind_however_much_else_a_process_has_said(agent: Agent) -> None:
    source = f"""
import os, socket, sys
from instrument import clock
from instrument.runtime import agent_socket
caller = socket.socket(agent_socket.FAMILY, agent_socket.KIND)
caller.connect({str(agent.path)!r})
started = clock.read_process_start_ticks(clock.STAT)
agent_socket.send(caller, {{"join": {{"pid": os.getpid(), "started": started, "records": True}}}})
print("joined", flush=True)
sys.stdin.readline()
for _ in range(150):
    agent_socket.send(caller, {{"flush": True}})
agent_socket.send(caller, {{"goodbye": {{}}}})
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", source], stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "joined\n"
        for _ in range(3):
            agent.turn()
        (process,) = agent.processes
        other.communicate("\n", timeout=240)
    agent.turn()
    assert process.end_kind == GOODBYE


def test_a_process_says_goodbye_before_it_joins_for_its_next_session(agent: Agent) -> None:
    memory = os.memfd_create("recording")
    with agent.caller() as other, agent.caller() as first:
        agent_socket.send(other, {"ask": "processes"})
        agent_socket.send(first, {"join": facts("one")}, [memory])
        for _ in range(3):
            agent.turn()
        agent_socket.send(other, {"ask": "processes"})
        agent_socket.send(first, {"goodbye": {}})
        first.close()
        with agent.caller() as second:
            agent_socket.send(second, {"join": facts("one")}, [memory])
            agent.turn()
            before, now = agent.processes
            assert before.end_kind == GOODBYE
            assert now.lives
            assert now.connection is not None
    os.close(memory)


def test_the_next_agent_reports_a_process_that_ended_before_it_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(runs, "EXIT_STATUS_WAIT_S", 0.01)
    with subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL) as other:
        started = clock.read_process_start_ticks(Path(f"/proc/{other.pid}/stat"))
        known = Process(
            run=Run("one"), pid=other.pid, started=started, facts={"run": "one", "service": "shop", "captures": "shop"},
            joined_ns=0,
            exit_fd=exit_fd_of(other.pid, started),
        )  # fmt: skip
        processes.write_note(Path(), known)
        known.release()
        said: list[str] = []
        agent = Agent(Path(), said.append)
        for _ in range(3):
            agent.turn()
        assert said == agent.processes == []
        other.kill()
    end = time.monotonic() + 240
    while not said and time.monotonic() < end:
        agent.turn()
    agent.close()
    assert said[0].startswith(f"instrument: process {other.pid} of shop ended without a goodbye")


def test_files_for_the_report_of_an_abandoned_run_are_removed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    clock_s = [0.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    left = [Path(f"{name}-left.npz") for name in ("7-1-gone", "before-8-2-gone", "9-3-one")]
    for path in left:
        path.touch()
    said: list[str] = []
    agent = Agent(Path(), said.append)
    with agent.caller() as caller:
        agent_socket.send(caller, {"join": facts("one")})
        while not agent.heard:
            agent.turn()
        clock_s[0] = runs.ABANDONED_S
        agent.turn()
        assert [path.exists() for path in left] == [False, False, True]
    agent.close()
    assert said[0].startswith("instrument: no report covers 9 of the processes of the run gone, which ended under")


def test_ps_reports_no_age_of_a_process_that_ended_while_its_run_had_no_agent(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        started = clock.read_process_start_ticks(Path(f"/proc/{other.pid}/stat"))
        told = {"run": "one", "service": "shop", "generation": 1, "digest": "0"}
        known = Process(
            run=Run("one"),
            pid=other.pid,
            started=started,
            facts=told,
            joined_ns=0,
            exit_fd=exit_fd_of(other.pid, started),
        )
        processes.write_note(tmp_path, known)
        known.release()
        other.kill()
    (missed,) = processes.add_missed_processes(tmp_path, Run)
    missed.ended_ns, missed.end_kind = time.monotonic_ns(), VANISHED
    (shown,) = LiveSampler("one").make_screen([Member(end_reports.collect_process_facts(missed))]).processes
    assert (shown.pid, shown.state, shown.up_ns) == (other.pid, VANISHED, None)


def test_a_dropped_process_gets_a_message_even_while_the_agent_reads_a_recording() -> None:
    selector = selectors.DefaultSelector()
    jobs = Jobs(selector)
    ours, theirs = socket.socketpair(agent_socket.FAMILY, agent_socket.KIND)
    selector.register(ours, selectors.EVENT_READ)
    wait, go_on = os.pipe()
    answers: list[Any] = []
    jobs.start(lambda: {"read": os.read(wait, 1).decode()}, answers.append)
    selector.unregister(ours)
    ours.close()
    theirs.settimeout(240)
    assert theirs.recv(1) == b""
    os.write(go_on, b".")
    while not answers:
        for key, _ in selector.select():
            key.data(key.fd)
    assert answers == [{"read": "."}]
    for descriptor in (wait, go_on):
        os.close(descriptor)
    theirs.close()
    selector.close()


def test_an_agent_without_a_descriptor_for_who_connects_does_not_turn_in_vain(agent: Agent) -> None:
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with agent.caller() as one, socket.socket(agent_socket.FAMILY, agent_socket.KIND) as other:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (4, most))
            agent.turn()
            agent.turn()
            assert agent.loop.selector.select(0) == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
        other.connect(str(agent.path))
        agent_socket.send(one, {"join": facts("one")})
        agent_socket.send(other, {"join": facts("other")})
        while len(agent.heard) < 2:
            agent.turn()
