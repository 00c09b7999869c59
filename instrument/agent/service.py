"""What an agent is from its begin to its end: its limits, its folder, the loop, and nothing left behind."""

from __future__ import annotations

import os
import resource
import socket
import sys
from contextlib import suppress
from pathlib import Path

from instrument.agent.loop import Agent
from instrument.agent.processes import Run
from instrument.runtime import run_folder


def serve(descriptor: int, run: str, first: int, *, says: bool) -> None:
    """Be the agent of a run, on the socket that the descriptor is; with what it has to say on standard error if so."""
    listener = socket.socket(fileno=descriptor)
    listener.setblocking(False)
    os.set_inheritable(descriptor, False)
    folder = Path(os.fsdecode(listener.getsockname())).parent
    try:
        serve_on(listener, folder, Run(run, first), says=says)
    finally:
        run_folder.remove(folder)


def serve_on(
    listener: socket.socket, folder: Path, run: Run | None, *, captures: Path | None = None, says: bool
) -> None:
    """Be the agent on a socket until there is nothing left to do. `captures` is the folder for those of all runs."""
    with suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    Agent(listener, folder, run, captures, _say if says else None).serve()


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(text if text.endswith("\n") else f"{text}\n")
        sys.stderr.flush()
