"""How the agent of a run begins: beside the service, and nothing of the service's in its hands.

It is no child of the service, which may wait for all of its own; it has a session and a process group to itself, so
that no signal of a terminal or of a group meets it; and of the service's descriptors it keeps none.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
from pathlib import Path

from instrument.runtime import run_folder

ENTRY = Path(__file__).with_name("entry.py")


def prepare(run: str) -> socket.socket:
    """Make the folder of a run and listen in it: processes may join from now on. Raises `OSError`."""
    run_folder.remove_abandoned()
    folder = run_folder.make(run)
    try:
        return run_folder.listen(folder / run_folder.SOCKET)
    except BaseException:
        run_folder.remove(folder)
        raise


def begin(listener: socket.socket, run: str, first: int) -> None:
    """Begin the agent of a run whose first process is `first`; returns when it is on its way. Raises `OSError`."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:  # from here on, nothing of the caller's may run
        os.setsid()
        if os.fork() == 0:
            become(listener, run, first, keeps_stderr=False)
    finally:
        os._exit(1)


def become(listener: socket.socket, run: str, first: int, *, keeps_stderr: bool) -> None:
    """Become the agent, in a process that was forked for it. Does not return."""
    # Where the caller's streams are closed the listener may have the number of one.
    listening = fcntl.fcntl(listener.fileno(), fcntl.F_DUPFD, 3)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1) if keeps_stderr else (0, 1, 2):
        os.dup2(null, descriptor)
    descriptor = 3
    os.dup2(listening, descriptor)
    os.set_inheritable(descriptor, True)  # also where it is that one already
    os.closerange(descriptor + 1, min(1 << 16, os.sysconf("SC_OPEN_MAX")))
    os.chdir("/")
    os.umask(0o077)
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    settings = {"run": run, "first": first, "path": sys.path, "says": keeps_stderr}
    words = [sys.executable, "-I", "-S", str(ENTRY), json.dumps(settings)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("INSTRUMENT", "PYTHON"))}
    os.execve(sys.executable, words, environ)  # noqa: S606 - no shell wanted
