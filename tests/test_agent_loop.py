"""In which order an agent hears what processes say, however late it comes to it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from instrument import clock
from instrument.agent.loop import EventLoop
from instrument.agent.peer import Connection
from instrument.agent.processes import GOODBYE, Process
from instrument.agent.runs import Runs
from instrument.runtime import packets, run_folder


class Agent:
    """Runs and their loop, which turns when it is told to, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / run_folder.SOCKET
        self.heard: list[packets.Message] = []
        self.loop = EventLoop(run_folder.listen(self.path), self._heard, self._dropped, None)
        self.runs = Runs(self.loop, folder, None, folder, None, lambda: None)

    def _heard(self, connection: Connection, message: packets.Message, descriptors: list[int]) -> list[int]:
        self.heard.append(message)
        process = self.runs.member(connection)
        if "join" in message:
            return self.runs.joined(connection, dict(message["join"]), descriptors)
        if process is not None and "goodbye" in message:
            self.runs.said_goodbye(process, dict(message["goodbye"]), is_answered=False)
        return []

    def _dropped(self, connection: Connection) -> None:
        self.runs.dropped(connection)

    @property
    def processes(self) -> list[Process]:
        return [process for run in self.runs for process in run.processes]

    def turn(self) -> None:
        """Do what can be done now."""
        self.loop.after(0, lambda: None)  # so that it waits for nothing
        self.loop.turn()

    def caller(self) -> socket.socket:
        """A new connection."""
        sock = socket.socket(packets.FAMILY, packets.KIND)
        sock.connect(str(self.path))
        return sock


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.chdir(tmp_path)
    found = Agent(Path())  # short: a socket's path has an end
    yield found
    found.loop.drop_all()
    found.runs.close()
    found.loop.close()


def facts(run: str) -> dict[str, Any]:
    return {"pid": os.getpid(), "started": clock.start_ticks(clock.STAT), "run": run, "records": True}


def test_who_joins_is_heard_before_what_others_say_after_that(agent: Agent) -> None:
    first, second = agent.caller(), agent.caller()
    with first, second:
        packets.send(first, {"join": facts("one")})
        for _ in range(3):
            agent.turn()
        packets.send(first, {"flush": 1})  # the agent has something to do for this one first
        packets.send(second, {"join": facts("two")})
        with agent.caller() as third:
            packets.send(third, {"join": facts("three")})
            packets.send(first, {"flush": 2})
            agent.turn()
            told = [one.get("flush") or one["join"]["run"] for one in agent.heard]
            assert set(told[:3]) == {"one", "two", "three"}
            assert told[3:] == [1, 2]


def test_a_goodbye_is_heard_behind_however_much_else_a_process_has_said(agent: Agent) -> None:
    source = f"""
import os, socket, sys
from instrument import clock
from instrument.runtime import packets
caller = socket.socket(packets.FAMILY, packets.KIND)
caller.connect({str(agent.path)!r})
packets.send(caller, {{"join": {{"pid": os.getpid(), "started": clock.start_ticks(clock.STAT), "records": True}}}})
print("joined", flush=True)
sys.stdin.readline()
for _ in range(150):
    packets.send(caller, {{"flush": True}})
packets.send(caller, {{"goodbye": {{}}}})
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
    assert process.how == GOODBYE


def test_a_process_says_goodbye_before_it_joins_for_its_next_session(agent: Agent) -> None:
    memory = os.memfd_create("recording")
    with agent.caller() as other, agent.caller() as first:
        packets.send(other, {"ask": "processes"})
        packets.send(first, {"join": facts("one")}, [memory])
        for _ in range(3):
            agent.turn()
        packets.send(other, {"ask": "processes"})
        packets.send(first, {"goodbye": {}})
        first.close()
        with agent.caller() as second:
            packets.send(second, {"join": facts("one")}, [memory])
            agent.turn()
            before, now = agent.processes
            assert before.how == GOODBYE
            assert now.lives
            assert now.connection is not None
    os.close(memory)
