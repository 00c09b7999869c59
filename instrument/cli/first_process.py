"""`instrument run` as the first process of a container: it stays, so that the run's agent outlives the service.

Were it the service, as elsewhere, its end would be that of all other processes, the agent's too. So the service is a
child, with a process group and the terminal to itself: signals are handed on to it, children that lost their parents
are reaped, and its exit code is ours.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from instrument.runtime import agent_launch, packets, run_folder

WAIT_S = 5.0
"""Seconds that the agent has for its last output after the service has ended."""

AGENTS = 10
"""The most agents of a run, each in place of one that has gone."""

_TERMINAL = (signal.SIGTTIN, signal.SIGTTOU)


def serve(listener: socket.socket, run: str, words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the service under an agent that listens on `listener`. Returns the exit code."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    service = os.fork()
    if service == 0:
        _become(words, {**environ, "INSTRUMENT_RUN_PID": str(os.getpid())}, before)
    agent = agent_launch.spawn(sys.executable, listener, run, service, says=True)
    path = Path(os.fsdecode(listener.getsockname()))
    listener.close()
    status, agent = _await(service, agent, path, run)
    _end_others(agent)
    if agent:
        _await_agent(agent, time.monotonic() + WAIT_S)
    run_folder.remove(path.parent)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _restarted_agent(path: Path, run: str, service: int) -> int:
    """Begin an agent in place of one that has gone. Returns its pid, 0 where it cannot listen."""
    with suppress(OSError), run_folder.listen(path) as listener:
        return agent_launch.spawn(sys.executable, listener, run, service, says=True)
    return 0


def _become(words: Sequence[str], environ: Mapping[str, str], mask: set[signal.Signals | int]) -> None:
    try:
        os.setpgid(0, 0)
        with suppress(OSError):  # no terminal
            os.tcsetpgrp(0, os.getpgrp())
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execve(words[0], list(words), dict(environ))  # noqa: S606 - no shell wanted
    finally:
        os._exit(127)


def _await(service: int, agent: int, path: Path, run: str) -> tuple[int, int]:
    """Hand on signals, reap children, and begin an agent anew that has gone, until the service has ended.

    Returns the service's status, and the pid of the last agent.
    """
    begun = 1
    while True:
        number = signal.sigwaitinfo(signal.valid_signals()).si_signo
        if number == signal.SIGCHLD:
            reaped = _reaped()
            ended = [status for pid, status in reaped if pid == service]
            if agent in dict(reaped):
                agent, begun = 0 if ended or begun == AGENTS else _restarted_agent(path, run, service), begun + 1
            for pid, status in reaped:
                _report_end(path, pid, status)
            if ended:
                return ended[0], agent
        elif number not in _TERMINAL:
            with suppress(ProcessLookupError):
                os.kill(service, number)


def _reaped() -> list[tuple[int, int]]:
    """Reap the children that have ended. Returns their pids and statuses."""
    ended = []
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(child)
    return ended


def _report_end(path: Path, pid: int, status: int) -> None:
    """Send the agent the exit status of a process, which the system gives to its parent alone."""
    with suppress(OSError), run_folder.connected(path, 0.1) as caller:
        packets.send(caller, {"ended": pid, "status": status})


def _end_others(agent: int) -> None:
    """Kill all processes but the agent, as the end of a container's first process does."""
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and int(path.name) not in (os.getpid(), agent):
            with suppress(OSError):
                if (path / "stat").read_text().rpartition(")")[2].split()[1] != str(agent):  # its children
                    os.kill(int(path.name), signal.SIGKILL)


def _await_agent(agent: int, until: float) -> None:
    while (left_s := until - time.monotonic()) > 0:
        if agent in [pid for pid, _ in _reaped()]:
            return
        signal.sigtimedwait({signal.SIGCHLD}, min(left_s, 0.1))
