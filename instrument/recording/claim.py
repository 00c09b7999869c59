"""Claims: what one process at a time does with a recording, which need not be the one that records into it.

Who does so holds a lock on the recording, which the system takes back as that process ends.
"""

from __future__ import annotations

import fcntl
import os
import struct

EXPORT, GAUGES = 0, 1
"""The claims on a recording: to export its rows, and to read its process's gauges into it."""

FIRST_FD = 256
"""Descriptors below are the service's: its own keep the numbers that they would have without us."""

_OFD_SETLK, _OFD_GETLK = getattr(fcntl, "F_OFD_SETLK", 37), getattr(fcntl, "F_OFD_GETLK", 36)
_LOCK = struct.Struct("hhqqi4x")
_LOCK_AT = 1 << 50
"""Beyond every byte of a recording: other locks on it mean other things."""


def duplicate(fd: int) -> int:
    """Return a copy of a descriptor under a high number, or any, where the process may not have as many."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD)
    except OSError:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


class Claim:
    """A claim to a recording that may be taken; what is claimed is written to by `fileno`. Raises `OSError`."""

    def __init__(self, fd: int, what: int) -> None:
        # Opened anew: a lock belongs to what was opened, and who was given a descriptor shares that with the giver.
        opened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._fd = duplicate(opened)
        finally:
            os.close(opened)
        self._identity = self._identified()
        self._lock_at = _LOCK_AT + what

    def close(self) -> None:
        """Let go of the recording, and of the claim."""
        if self.fileno() >= 0:
            os.close(self._fd)
        self._fd = -1

    def fileno(self) -> int:
        """Its descriptor, -1 where a service has closed it, and perhaps has a file of its own there."""
        if self._fd >= 0 and self._identified() != self._identity:
            self._fd = -1
        return self._fd

    def _identified(self) -> tuple[int, int]:
        try:
            found = os.fstat(self._fd)
        except OSError:
            return -1, -1
        return found.st_dev, found.st_ino

    def take(self) -> bool:
        """Be the one who does it from now on; False while another one is."""
        try:
            fcntl.fcntl(self.fileno(), _OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._lock_at, 1, 0))
        except OSError:
            return False
        return True

    def is_taken(self) -> bool:
        """Return True where another process has the claim now."""
        found = fcntl.fcntl(self.fileno(), _OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._lock_at, 1, 0))
        return bool(_LOCK.unpack(found)[0] != fcntl.F_UNLCK)
