"""The lock of a session, whose holder no SIGTERM stops half way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from instrument.runtime.unpatched import RLock


class SessionLock:
    """A reentrant lock. A signal that comes to its holder can be put off until it lets go."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._postponed = 0

    @contextmanager
    def held(self, timeout_s: float = -1) -> Iterator[bool]:
        """Hold it; tells whether it could be had in that time. A signal that was put off is sent again at the end."""
        held = self._lock.acquire(timeout=timeout_s)
        try:
            yield held
        finally:
            if held:
                self._lock.release()
            if self._postponed and not self._is_mine():
                number, self._postponed = self._postponed, 0
                os.kill(os.getpid(), number)

    def postpone(self, number: int) -> bool:
        """Whether the calling thread holds it: the signal is then sent again when it lets go."""
        if self._is_mine():
            self._postponed = number
        return self._is_mine()

    def _is_mine(self) -> bool:
        return bool(self._lock._is_owned())
