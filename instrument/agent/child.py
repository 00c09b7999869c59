"""Children of the agent that go on beside it: what takes long, hangs or fails in one does not do so in the agent."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from instrument.agent.peer import Connection
from instrument.runtime import packets

REAP_S, LOOK_S = 2.0, 0.001
"""How long the end of a child that was killed is waited for, and how often it is looked for."""


def begin(serve: Callable[[socket.socket], object], name: str) -> tuple[Connection, int]:
    """Fork a child that serves the agent at the other end of a connection until it returns. `ps` shows the name.

    Returns the agent's end, and the child's number. Raises `OSError`.
    """
    ours, theirs = socket.socketpair(packets.FAMILY, packets.KIND)
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    if pid == 0:
        _be(theirs, serve, name)
    theirs.close()
    return Connection(ours), pid


def end(pid: int) -> None:
    """End a child, whatever it is about, and reap it; one that hangs in a driver is left to that after a while."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + REAP_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
        time.sleep(LOOK_S)


def _be(connection: socket.socket, serve: Callable[[socket.socket], object], name: str) -> None:
    """In the child: serve, with nothing else of the agent's in its hands. Does not return."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # they are for the agent, which ends this one in its time
        descriptor = 3
        os.dup2(connection.fileno(), descriptor)
        os.closerange(descriptor + 1, min(1 << 16, os.sysconf("SC_OPEN_MAX")))
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        with suppress(OSError):
            Path("/proc/self/comm").write_text(name, "ascii")
        gc.freeze()
        serve(socket.socket(packets.FAMILY, packets.KIND, fileno=descriptor))
        code = 0
    finally:
        os._exit(code)
