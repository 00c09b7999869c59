"""The client side of an agent's socket, which commands use to list this user's runs and to query the agents."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from instrument.agent import processes
from instrument.errors import InstrumentError
from instrument.runtime import agent_socket


@dataclass(frozen=True, slots=True)
class Member:
    """A process of a run, as the agent describes it.

    `memory` is a descriptor of the process's recording, or -1.
    """

    facts: Mapping[str, Any]
    memory: int = -1

    @property
    def pid(self) -> int:
        return int(self.facts["pid"])

    @property
    def lives(self) -> bool:
        return not self.facts["ended_ns"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A run and its processes, as the agent describes them.

    - `name`: the name of the run, or the path of the agent's socket while the agent has no run
    - `problem`: the reason why the agent did not answer
    - `folded`: the number of ended processes that are not in `members`
    - `unseen`: a sentence on the processes that record nothing
    """

    socket: Path
    name: str
    members: list[Member] = field(default_factory=list)
    agent: int = 0
    faults: int = 0
    problem: str = ""
    folded: int = 0
    unseen: str = ""

    @property
    def living_processes(self) -> list[Member]:
        return [member for member in self.members if member.lives]

    @property
    def description(self) -> str:
        members = self.living_processes or self.members
        if not members:
            return f"{self.name} ({self.problem or 'no process has joined'})"
        services = ", ".join(dict.fromkeys(str(member.facts["service"]) for member in members))
        begun_ns = min(int(member.facts["joined_ns"]) for member in members)
        count = f"{len(self.living_processes)} process{'es' * (len(self.living_processes) != 1)}"
        return f"{self.name} ({services}: {count}, for {(time.monotonic_ns() - begun_ns) / 1e9:.3g} s)"

    @property
    def empty_run_text(self) -> str:
        if self.problem or self.members:
            return ""
        if self.name != str(self.socket):
            return "no process has joined yet"
        return f"no process has joined; those do that are started with {agent_socket.VARIABLE}={self.socket.absolute()}"


@contextmanager
def find_runs(name: str | None = None, *, memory: bool = False) -> Iterator[list[Asked]]:
    """Find this user's runs that match a name, for use in a `with` block. Raises `InstrumentError` if no run matches.

    `name` is the beginning of a run's name, a service, a process id, or the path of an agent's socket. The default is
    the environment variable `INSTRUMENT_AGENT`. If the name and the variable are empty, all runs match. If `memory` is
    true, the recordings are open within the block.
    """
    own_agent = os.environ.get(agent_socket.VARIABLE, "")
    asked_name = name or own_agent
    is_socket = "/" in asked_name
    # Some agents have their socket elsewhere.
    sockets = [(folder / agent_socket.SOCKET).resolve() for folder in agent_socket.list_runs()]
    if is_socket:
        sockets = [Path(asked_name)]
    elif "/" in own_agent:
        sockets.append(Path(own_agent).resolve())
    runs = [run for socket in dict.fromkeys(sockets) for run in _query_agent(socket, memory=memory)]
    try:
        matches = (
            runs
            if is_socket or not asked_name
            else [match for run in runs for match in _filter_by_name(run, asked_name)]
        )
        if not matches:
            known_runs = "; ".join(run.description for run in runs) or "none"
            wish = f"a run, a service or a process named {asked_name}" if asked_name else "a run"
            advice = "`instrument ps` lists their processes" if runs else "`instrument run` starts a run"
            raise InstrumentError(f"there is not {wish}; the runs are: {known_runs}; {advice}")
        yield matches
    finally:
        for member in (member for run in runs for member in run.members):
            if member.memory >= 0:
                os.close(member.memory)


def require_single_run(verb: str, runs: Sequence[Asked]) -> Asked:
    answering = [run for run in runs if not run.problem]
    if len(answering) > 1:
        answering = [run for run in answering if run.living_processes] or answering
    if len(answering) == 1:
        return answering[0]
    if len(answering) > 1 or len(runs) > 1:
        names = "; ".join(run.description for run in answering or runs)
        raise InstrumentError(f"{verb}: there are several runs: {names}; name one of them, its service or a process id")
    raise InstrumentError(f"{verb}: {runs[0].name}: {runs[0].problem}")


def _filter_by_name(run: Asked, name: str) -> list[Asked]:
    if run.name.startswith(name) and not name.isdecimal():
        return [run]
    members = [member for member in run.members if name in (str(member.pid), member.facts["service"])]
    return [replace(run, members=members, folded=0)] if members else []


def _query_agent(socket: Path, *, memory: bool) -> list[Asked]:
    members: list[Member] = []
    try:
        with agent_socket.connect_to_agent(socket, agent_socket.ANSWER_S) as caller:
            agent_socket.send(caller, {"ask": "processes", "memory": memory})
            while True:
                message, descriptors = agent_socket.receive(caller)
                if message is None:
                    raise ConnectionError("the process closed the connection")
                if "end" in message:
                    end = message["end"]
                    break
                members.append(Member(message["process"], *descriptors[:1]))
    except (OSError, agent_socket.PacketError) as error:
        for member in members:
            if member.memory >= 0:
                os.close(member.memory)
        return [Asked(socket, socket.parent.name, problem=_why_silent(socket, error))] if socket.parent.exists() else []
    folded = {run["run"]: int(run.get("folded", 0)) for run in end["runs"]}
    if not folded:  # an agent that serves any process
        return [Asked(socket, str(socket), agent=end["agent"], faults=end["faults"])]
    return [
        Asked(
            socket, name, [process for process in members if process.facts["run"] == name], end["agent"], end["faults"],
            folded=folded[name], unseen=str(end.get("unseen", "")),
        )
        for name in folded
    ]  # fmt: skip


def _why_silent(socket: Path, error: Exception) -> str:
    if not isinstance(error, ConnectionRefusedError | FileNotFoundError):
        holder = agent_socket.listener_pid(socket)
        if isinstance(error, TimeoutError) and holder is not None:
            return f"{agent_socket.agent_name(holder)} listens{agent_socket.no_answer_text(holder)}"
        return f"its agent does not answer: {error}"
    folder = socket.parent
    if folder not in agent_socket.list_runs():
        return f"no agent listens; `instrument agent --socket {socket.absolute()}` begins one"
    living, ended, folders = processes.count_noted_processes(folder)
    if living or Path(f"/proc/{agent_socket.parse_first_pid(folder.name) or '-'}").exists():
        return f"no agent listens; `instrument agent --run {folder.name}` takes over"
    saved = f"; `instrument recover {shlex.join(folders)}` saves what it recorded" if folders else ""
    losses = f"; {ended} ended without a goodbye{saved or ', and what they recorded is lost'}" if ended else ""
    if unsent := agent_socket.read_unsent_count(folder):
        losses += f"; up to {unsent} spans of others are perhaps not exported"
    return f"its agent and its processes have gone{losses}; the next `instrument run` removes its folder"


def send_request(
    run: Asked, do: Mapping[str, Any], pids: Sequence[int], wait_s: float
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Send a request to processes of a run. Yield each answer with the process id, for up to `wait_s` seconds."""
    end = time.monotonic() + wait_s
    with agent_socket.connect_to_agent(run.socket, min(ANSWER_POLL_S, wait_s)) as caller:
        agent_socket.send(caller, {"ask": "do", "do": do, "pids": list(pids)})
        while time.monotonic() < end:
            try:
                message, _ = agent_socket.receive(caller)
            except TimeoutError:
                continue
            if message is None or "end" in message:
                return
            yield int(message["pid"]), message["answer"]


ANSWER_POLL_S = 0.2
"""Seconds between two checks of the time limit while a client waits for an answer."""
