"""Claims: file locks that admit one process at a time to a task on a recording, such as the export.

The operating system releases a lock when its process ends.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress

EXPORT, GAUGES = 0, 1
"""The claims on a recording: to export its rows, and to write its process's gauges into it."""

FIRST_FD = 256
"""The lowest descriptor that we use. So the service's own files have the same numbers as without us."""

_OFD_SETLK, _OFD_GETLK = getattr(fcntl, "F_OFD_SETLK", 37), getattr(fcntl, "F_OFD_GETLK", 36)
_LOCK = struct.Struct("hhqqi4x")
_LOCK_AT = 1 << 50
"""The offset of the lock's byte. It is beyond the data of any recording, so it collides with no other lock."""


def duplicate(fd: int) -> int:
    """Return a copy of a descriptor with a number from `FIRST_FD` on, or with any number if the limit is lower."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD)
    except OSError:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def identity_of(fd: int) -> tuple[int, int]:
    """Return the identity of a descriptor's file, (-1, -1) for none."""
    try:
        status = os.fstat(fd)
    except OSError:
        return -1, -1
    return status.st_dev, status.st_ino


class OwnDescriptor:
    """A descriptor that a service may close and reuse for its own file, as daemons do. -1 is none."""

    def __init__(self, fd: int = -1) -> None:
        self._fd, self._identity = fd, identity_of(fd)

    def fileno(self) -> int:
        """Return the descriptor, or -1 if the service has closed or reused it."""
        if self._fd >= 0 and identity_of(self._fd) != self._identity:
            self._fd = -1
        return self._fd

    def close(self) -> None:
        """Close the descriptor if it is still ours."""
        if self.fileno() >= 0:
            with suppress(OSError):
                os.close(self._fd)
        self._fd = -1


class Claim(OwnDescriptor):
    """A claim on a recording: a lock that `take` acquires. `fileno` is the recording's descriptor. Raises `OSError`."""

    def __init__(self, fd: int, kind: int) -> None:
        # Open the file anew: a lock belongs to an open file, which a passed descriptor shares with its sender.
        opened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            super().__init__(duplicate(opened))
        finally:
            os.close(opened)
        self._lock_at = _LOCK_AT + kind

    def take(self) -> bool:
        """Acquire the claim. Return False while another process has it."""
        try:
            fcntl.fcntl(self.fileno(), _OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._lock_at, 1, 0))
        except OSError:
            return False
        return True

    def is_taken(self) -> bool:
        """Return True if another process has the claim now."""
        lock = fcntl.fcntl(self.fileno(), _OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._lock_at, 1, 0))
        return bool(_LOCK.unpack(lock)[0] != fcntl.F_UNLCK)
