"""The two clocks of a process: CLOCK_MONOTONIC, which spans are timed with, and the wall clock."""

from __future__ import annotations

import time


def pair() -> tuple[int, int]:
    """One moment on the monotonic and on the wall clock, in ns: the tightest of five readings."""
    pairs = []
    for _ in range(5):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        pairs.append((after - before, (before + after) // 2, wall))
    _, monotonic_ns, realtime_ns = min(pairs)
    return monotonic_ns, realtime_ns
