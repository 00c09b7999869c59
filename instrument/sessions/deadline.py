"""The deadline of a session's end: one for all that it waits for, so that the limits of its waits do not add up."""

from __future__ import annotations

import math
import time

LEAST_S = 0.25
"""What each of the last waits has even where the end's own work, as on a large file, has used the time up."""


class Deadline:
    """A time, so many seconds from now, after which nothing more is waited for."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s

    def earlier(self, by_s: float) -> Deadline:
        """One that leaves so much of this one to the waits after its own."""
        return Deadline(self._end - time.monotonic() - by_s)

    def left_s(self, at_most_s: float = math.inf) -> float:
        """How long a wait may last that begins now."""
        return max(min(self._end - time.monotonic(), at_most_s), 0.0)

    def last_s(self) -> float:
        """The same for one of the last waits."""
        return max(self.left_s(), LEAST_S)
