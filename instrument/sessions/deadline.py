"""The deadline of a session's end: one for all that it waits for, so that the limits of its waits do not add up."""

from __future__ import annotations

import math
import time

LEAST_S = 0.25
"""Seconds that each of the last waits has, even where the work of the end, as on a large file, has used up the time."""


class Deadline:
    """A moment after which a session's end waits for nothing more, `limit_s` seconds from now."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s

    def earlier(self, by_s: float) -> Deadline:
        """Return a deadline `by_s` seconds before this one, for waits that leave that time to later ones."""
        return Deadline(self._end - time.monotonic() - by_s)

    def left_s(self, at_most_s: float = math.inf) -> float:
        """Return the seconds that a wait may last from now on, at most `at_most_s`."""
        return max(min(self._end - time.monotonic(), at_most_s), 0.0)

    def last_s(self) -> float:
        """Return the seconds that one of the last waits may last: at least `LEAST_S`."""
        return max(self.left_s(), LEAST_S)
