"""How a process ended that is no child of ours, as far as the system tells those who are not its parent."""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
CONTROL_GROUPS = Path("/sys/fs/cgroup")

_GET_INFO, _EXIT = 0xC040FF0B, 1 << 3
"""`PIDFD_GET_INFO`, and the part of it that tells of the end (linux/pidfd.h, since Linux 6.15)."""
_INFO = struct.Struct("=QQ11Ii")

_EXIT_CODE_FIELD = 49
"""Which word after the name of the program in `/proc/PID/stat` is its status (man 5 proc, exit_code)."""


def status_of(exit_fd: int, pid: int) -> int | None:
    """The status that its parent was told, or will be; None where nobody else is told."""
    with suppress(OSError):
        found = _INFO.unpack(fcntl.ioctl(exit_fd, _GET_INFO, _INFO.pack(_EXIT, *[0] * 13)))
        if found[0] & _EXIT:
            return int(found[-1])
    with suppress(OSError, ValueError, IndexError):  # it waits for its parent
        words = (PROC / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        if words[0] in "ZX":
            return int(words[_EXIT_CODE_FIELD])
    return None


def memory_events(pid: int) -> Path | None:
    """The file in which the memory's control group of a process counts what happened; None where there is none."""
    with suppress(OSError, ValueError, StopIteration):
        lines = (PROC / str(pid) / "cgroup").read_text().splitlines()
        group = next(line[3:] for line in lines if line.startswith("0::"))
        found = CONTROL_GROUPS / os.path.relpath(group, "/") / "memory.events"
        return found if found.is_file() else None
    return None


def oom_kills(events: Path | None) -> int:
    """How many processes of the group were killed for want of memory so far."""
    with suppress(OSError, ValueError, IndexError):
        for line in events.read_text().splitlines() if events is not None else ():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
