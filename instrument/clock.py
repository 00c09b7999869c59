"""The two clocks of a process: CLOCK_MONOTONIC, which spans are timed with, and the wall clock."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")
STAT = Path("/proc/self/stat")
START_FIELD = 19
"""Which word after the name of the program in `/proc/self/stat` is the time of its start (man 5 proc, starttime)."""


def pair() -> tuple[int, int]:
    """One moment on the monotonic and on the wall clock, in ns: the tightest of five readings."""
    pairs = []
    for _ in range(5):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        pairs.append((after - before, (before + after) // 2, wall))
    _, monotonic_ns, realtime_ns = min(pairs)
    return monotonic_ns, realtime_ns


@cache
def boot_id() -> str:
    """What the system calls the time since it was started; "" where it does not tell."""
    try:
        return BOOT.read_text("ascii", "replace").strip()[:64]
    except OSError:
        return ""


def process_start_ns() -> int | None:
    """When the system made this process, on the monotonic clock, to a tick of 10 ms; None where it does not tell.

    `exec` does not change it: what ran in the process before, such as `instrument run`, is part of its time.
    """
    try:
        # The name of the program stands in brackets, and may hold blanks and brackets.
        ticks = int(STAT.read_text("utf-8", "replace").rpartition(")")[2].split()[START_FIELD])
        since_boot_ns = ticks * 10**9 // os.sysconf("SC_CLK_TCK")
        asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return since_boot_ns - asleep_ns
