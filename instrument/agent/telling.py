"""Messages of the agent on the standard error of the service, which the agent does not keep open.

Readers that wait for the end of a service's output must not wait for the agent. So it opens the standard error of a
living process, writes, and closes it again. Without such a process it opens a file or a terminal by name. If all have
closed a pipe, the message goes to the system's log; without one, a message on a capture goes to a text file next to it.
"""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from instrument.agent.processes import PROC, Process, Run
from instrument.runtime import atomic

SYSTEM_LOG = Path("/dev/log")

Says = Callable[[str], object] | None
"""A call with each message that no process of a run can print; None where nobody can."""

WAIT_MS = 50
"""The longest wait for room in a full pipe, in milliseconds."""

BESIDE = ".txt"
"""The suffix of a text file with a message next to a capture."""

_PIDFD_GETFD = 438
"""The number of the system call (man 2 pidfd_getfd), the same on all machines; Python has no function for it."""


def tell(run: Run, text: str, of: Process | None = None) -> bool:
    """Write a text to standard error of a process, else of the service, else to the log. Return True on success."""
    text = text if text.endswith("\n") else f"{text}\n"
    data = text.encode(errors="backslashreplace")
    targets = [run.stderr, *(str(process.facts.get("stderr", "")) for process in run.processes)]
    ordered = dict.fromkeys(targets if of is None else [str(of.facts.get("stderr", ""))])
    for target in ordered or [""]:
        for path in _paths_of(run, target):
            if _written(path, data):
                return True
    return _logged(text)


def say(says: Says, run: Run, text: str, process: Process | None = None) -> None:
    """Say something where the run's processes write their errors, of a process where that one does."""
    if tell(run, text, process):
        return
    if says is not None:
        says(text)
    elif process is not None and process.saved:
        leave_beside(process.saved, text)


def _paths_of(run: Run, target: str) -> Iterator[str]:
    """The names by which a standard error can be opened now."""
    elsewhere = {process.pid for process in run.processes if process.is_elsewhere}
    numbers = {process.pid for process in run.processes if not process.ended_ns} | {run.first}
    for pid in numbers - elsewhere - {0}:
        path = PROC / str(pid) / "fd/2"
        with suppress(OSError):
            if not target or str(path.readlink()) == target:
                yield str(path)
    if target.startswith("/"):
        yield target


def _written(path: str, data: bytes) -> bool:
    try:
        descriptor = _opened(path)
    except OSError:
        return False
    try:
        kind = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) or stat.S_ISSOCK(kind)):
            return False
        waiting = select.poll()
        waiting.register(descriptor, select.POLLOUT)
        unwritten = memoryview(data)
        while unwritten and waiting.poll(WAIT_MS):  # so much then fits without a wait
            unwritten = unwritten[os.write(descriptor, unwritten[: select.PIPE_BUF]) :]
        return len(unwritten) < len(data)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _opened(path: str) -> int:
    """A process's own descriptor where the system hands it out, so that a file goes on where that one writes next."""
    parts = Path(path).parts
    if parts[1:2] == ("proc",):
        with suppress(OSError, AttributeError, ImportError):
            from ctypes import CDLL

            of_process = os.pidfd_open(int(parts[2]))
            try:
                descriptor = int(CDLL(None).syscall(_PIDFD_GETFD, of_process, int(parts[4]), 0))
            finally:
                os.close(of_process)
            if descriptor >= 0:
                return descriptor
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)


def leave_beside(saved: str, text: str) -> None:
    """Write a line into a text file next to `saved`. Raise nothing."""
    with suppress(OSError), atomic.replacing(Path(saved).with_suffix(BESIDE)) as file:
        file.write(f"{text}\n".encode(errors="backslashreplace"))


def _logged(text: str) -> bool:
    if not SYSTEM_LOG.exists():
        return False
    import syslog

    syslog.openlog("instrument", 0, syslog.LOG_DAEMON)
    for line in text.splitlines():
        syslog.syslog(syslog.LOG_WARNING, line)
    return True
