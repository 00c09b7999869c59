"""Claims: file locks that let one process at a time work on a recording, such as its exporter.

The operating system releases the lock when its process ends.
"""

from __future__ import annotations

import fcntl
import os
import struct

EXPORT, GAUGES = 0, 1
"""The claims on a recording: to export its rows, and to read its process's gauges into it."""

FIRST_FD = 256
"""Our lowest descriptor. The service's own files keep the numbers that they would have without us."""

_OFD_SETLK, _OFD_GETLK = getattr(fcntl, "F_OFD_SETLK", 37), getattr(fcntl, "F_OFD_GETLK", 36)
_LOCK = struct.Struct("hhqqi4x")
_LOCK_AT = 1 << 50
"""The offset of the lock's byte. It is beyond the data of any recording, so it collides with no other lock on the
file."""


def duplicate(fd: int) -> int:
    """Return a copy of a descriptor with a high number, or with any number if the process may not have high ones."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD)
    except OSError:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


class Claim:
    """A claim on a recording: a lock that `take` acquires. Its process writes to `fileno`. Raises `OSError`."""

    def __init__(self, fd: int, kind: int) -> None:
        # Open the file anew: a lock belongs to an open file, which a passed descriptor shares with its sender.
        opened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._fd = duplicate(opened)
        finally:
            os.close(opened)
        self._identity = self._identified()
        self._lock_at = _LOCK_AT + kind

    def close(self) -> None:
        """Close the recording and release the claim."""
        if self.fileno() >= 0:
            os.close(self._fd)
        self._fd = -1

    def fileno(self) -> int:
        """Return the descriptor, or -1 if the service has closed it; the number may be a file of the service by now."""
        if self._fd >= 0 and self._identified() != self._identity:
            self._fd = -1
        return self._fd

    def _identified(self) -> tuple[int, int]:
        try:
            status = os.fstat(self._fd)
        except OSError:
            return -1, -1
        return status.st_dev, status.st_ino

    def take(self) -> bool:
        """Take the claim. Return False while another process has it."""
        try:
            fcntl.fcntl(self.fileno(), _OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._lock_at, 1, 0))
        except OSError:
            return False
        return True

    def is_taken(self) -> bool:
        """Return True if another process has the claim now."""
        lock = fcntl.fcntl(self.fileno(), _OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._lock_at, 1, 0))
        return bool(_LOCK.unpack(lock)[0] != fcntl.F_UNLCK)
