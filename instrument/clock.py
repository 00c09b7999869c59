"""The two clocks of a process: CLOCK_MONOTONIC, which spans are timed with, and the wall clock."""

from __future__ import annotations

import os
import struct
import sys
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


_TIMEX_BYTES, _MAXERROR_AT, _STATUS_AT = 208, 24, 40
"""Of `struct timex` on 64-bit Linux (man 2 adjtimex), more than which is asked of it."""

_UNSYNCHRONIZED, _FAILED = 0x40, (-1, 5)


def wall_error_ns() -> int:
    """How far the wall clock is from true time at most, as the system keeps account of it; 0 where that is not known.

    It is known where NTP or PTP sets the clock. To ask changes nothing.
    """
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        return 0
    try:
        from ctypes import CDLL, create_string_buffer

        timex = create_string_buffer(2 * _TIMEX_BYTES)
        state = CDLL(None).adjtimex(timex)
    except (ImportError, OSError, AttributeError):
        return 0
    (maxerror_us,) = struct.unpack_from("=q", timex, _MAXERROR_AT)
    (status,) = struct.unpack_from("=i", timex, _STATUS_AT)
    return 0 if state in _FAILED or status & _UNSYNCHRONIZED else max(maxerror_us, 0) * 1000


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
    ticks = start_ticks(STAT)
    if not ticks:
        return None
    try:
        since_boot_ns = ticks * 10**9 // os.sysconf("SC_CLK_TCK")
        asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    except (OSError, ValueError, AttributeError):
        return None
    return since_boot_ns - asleep_ns


def start_ticks(stat: Path) -> int:
    """When the process of a file such as `/proc/self/stat` was made, in ticks since boot; 0 where it does not tell.

    It tells a process from a later one of the same number. One that has ended and waits for its parent has gone.
    """
    try:
        # The name of the program stands in brackets, and may hold blanks and brackets.
        words = stat.read_text("utf-8", "replace").rpartition(")")[2].split()
        return 0 if words[0] in "ZX" else int(words[START_FIELD])
    except (OSError, ValueError, IndexError):
        return 0
