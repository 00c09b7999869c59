"""The start of a run's agent, as a process that the service does not notice.

The agent is no child of the service, because the service may wait for all its children. The agent has a session and a
process group of its own, so that no signal to the service's group reaches it. It keeps no descriptor of the service.
"""

from __future__ import annotations

import fcntl
import json
import os
import posix
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import IO

from instrument.runtime import run_folder
from instrument.runtime.unpatched import sleep

AGENT_SCRIPT = Path(__file__).parents[1] / "agent" / "entry.py"

FIRST = "INSTRUMENT_RUN_PID"
"""The environment variable with the process id of the command that `instrument run` runs."""

INTERPRETER, BEGINNINGS = "python", "agents"
"""The names of two entries of a run's folder: a link to the interpreter for agents, and a file of their start times."""

MOST_AGENTS, AGENTS_WINDOW_S = 10, 600.0
"""The maximum number of agents that start for a run within a window of this many seconds. Further starts are
refused."""

LOCK_RETRY_S, LOCK_TRIES = 0.01, 50
"""Seconds between two attempts to lock the start of an agent, and the maximum number of attempts."""


def prepare_run(run: str) -> socket.socket:
    """Create the folder of a run, and its agent's socket, so that processes can join. Raises `OSError`."""
    path = socket_of(run)
    try:
        return run_folder.listen(path)
    except BaseException:
        run_folder.remove(path.parent)
        raise


def socket_of(run: str) -> Path:
    """Create the folder of a run. Return the path for its agent's socket, which is not made yet. Raises `OSError`."""
    run_folder.remove_abandoned()
    folder = run_folder.make(run)
    (folder / INTERPRETER).symlink_to(sys.executable)
    (folder / f"{run_folder.SOCKET}{run_folder.UNSEEN_SUFFIX}").touch(0o600)  # a child may be there before the agent
    return folder / run_folder.SOCKET


def start_agent(listener: socket.socket, run: str, first: int) -> None:
    """Start the agent of a run whose first process is `first`, without waiting until it is ready.

    This forks, so the process must have only one thread. Raises `OSError`.
    """
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:  # from here on, nothing of the caller's may run
        os.setsid()
        spawn_agent(sys.executable, listener, run, first)
    finally:
        os._exit(1)


def can_replace(path: Path) -> bool:
    """Return True if a process of the run may start another agent at a socket after the end of the current one.

    It may not if a user started that agent by hand, or if `instrument run` is a container's first process, which
    restarts its own agent.
    """
    folder = path.parent
    is_of_container = run_folder.first_process(folder.name) == 1 and FIRST in os.environ
    is_of_run = folder.name == os.environ.get("INSTRUMENT_RUN") and not is_of_container
    return is_of_run and (folder / INTERPRETER).is_symlink()


def replace_ended_agent(path: Path) -> bool:
    """Start an agent in place of an ended one, unless another process does. Return True if an agent listens.

    It takes some 20 ms, and runs no fork hooks. No other thread may fork meanwhile, because the child would inherit the
    agent's socket.
    """
    folder = path.parent
    with suppress(OSError), (folder / BEGINNINGS).open("a+") as beginnings:
        if not _try_lock(beginnings):
            return False
        if run_folder.has_listener(path):
            return True
        beginnings.seek(0)
        times = [float(line) for line in beginnings]
        if len(times) >= MOST_AGENTS and time.monotonic() - times[-MOST_AGENTS] < AGENTS_WINDOW_S:
            return False
        beginnings.write(f"{time.monotonic()}\n")
        interpreter = str((folder / INTERPRETER).readlink())
        with closing(run_folder.listen(path)) as listener:
            first = run_folder.first_process(folder.name) if FIRST in os.environ else 0
            child = spawn_agent(interpreter, listener, folder.name, first, is_apart=True)
            with suppress(ChildProcessError):  # the service has reaped it
                return posix.waitpid(child, 0)[1] == 0
            return True
    return False


def _try_lock(file: IO[str]) -> bool:
    """Lock a file for this process, but not for its forked children. Return False after `LOCK_TRIES` attempts."""
    for _ in range(LOCK_TRIES):
        with suppress(BlockingIOError, PermissionError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        sleep(LOCK_RETRY_S)
    return False


def spawn_agent(
    interpreter: str, listener: socket.socket, run: str, first: int, *, says: bool = False, is_apart: bool = False
) -> int:
    """Start an agent on a listening socket as a child, or with `is_apart` as an orphan. Return the child's process id.

    This runs no fork hooks. Raises `OSError`.
    """
    settings = {"run": run, "first": first, "path": [*filter(None, sys.path)], "says": says, "is_apart": is_apart}
    words = [interpreter, "-I", "-S", str(AGENT_SCRIPT), json.dumps(settings)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("INSTRUMENT", "PYTHON"))}
    listening = fcntl.fcntl(listener.fileno(), fcntl.F_DUPFD_CLOEXEC, 4)  # no number that is replaced below
    try:
        actions: Sequence[tuple[int, ...] | tuple[int, int, str, int, int]] = [
            *((os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in ((0, 1) if says else (0, 1, 2))),
            (os.POSIX_SPAWN_DUP2, listening, 3),
        ]
        ends = (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
        return posix.posix_spawn(interpreter, words, environ, file_actions=actions, setsigmask=(), setsigdef=ends)
    finally:
        os.close(listening)
