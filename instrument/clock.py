"""The two clocks of a process: CLOCK_MONOTONIC, which times spans, and the wall clock; the deadline of a session's end.

All waits of an end share one deadline, so their time-outs do not add up.
"""

from __future__ import annotations

import math
import os
import struct
import sys
import time
from functools import cache
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")
STAT = Path("/proc/self/stat")
START_FIELD = 19
"""The index of `starttime` among the words after the program's name in `/proc/self/stat` (man 5 proc)."""


def pair() -> tuple[int, int]:
    """Return one moment on the monotonic and on the wall clock, in ns, by the tightest of five readings."""
    pairs = []
    for _ in range(5):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        pairs.append((after - before, (before + after) // 2, wall))
    _, monotonic_ns, realtime_ns = min(pairs)
    return monotonic_ns, realtime_ns


_TIMEX_BYTES, _MAXERROR_AT, _STATUS_AT = 208, 24, 40
"""The size of `struct timex` on 64-bit Linux and the offsets of two fields (man 2 adjtimex)."""

_UNSYNCHRONIZED, _FAILED = 0x40, (-1, 5)


def wall_error_ns() -> int:
    """Return the largest error of the wall clock in ns, as the kernel reports it; 0 if unknown.

    NTP or PTP must set the clock. The call changes nothing.
    """
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        return 0
    try:
        from _ctypes import call_cdeclfunction, dlopen, dlsym  # `ctypes` takes 40 times as long to load

        timex = bytes(2 * _TIMEX_BYTES)  # a new object, which the call fills
        state = call_cdeclfunction(dlsym(dlopen(None, 0), "adjtimex"), (timex,))  # type: ignore[arg-type]
    except (ImportError, OSError, AttributeError):
        return 0
    (maxerror_us,) = struct.unpack_from("=q", timex, _MAXERROR_AT)
    (status,) = struct.unpack_from("=i", timex, _STATUS_AT)
    return 0 if state in _FAILED or status & _UNSYNCHRONIZED else max(maxerror_us, 0) * 1000


@cache
def boot_id() -> str:
    """Return the system's identifier of its current boot, "" if it cannot be read."""
    try:
        return BOOT.read_text("ascii", "replace").strip()[:64]
    except OSError:
        return ""


def process_start_ns() -> int | None:
    """Return the start of this process on the monotonic clock, to a tick of 10 ms; None if it cannot be read.

    `exec` does not change it: programs that ran in the process before, such as `instrument run`, count.
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
    """Return the start of a process in ticks since boot, from a file like `/proc/self/stat`; 0 for an ended process.

    The start distinguishes processes that had the same id. A zombie has ended.
    """
    try:
        # The name of the program is in brackets, and may have blanks and brackets itself.
        words = stat.read_text("utf-8", "replace").rpartition(")")[2].split()
        return 0 if words[0] in "ZX" else int(words[START_FIELD])
    except (OSError, ValueError, IndexError):
        return 0


LEAST_S = 0.25
"""The least seconds of each last wait. So a report or summary is tried even if saving has used all the time."""


class Deadline:
    """A deadline for all waits of a session's end, `limit_s` seconds from now."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s

    def earlier(self, by_s: float) -> Deadline:
        """Return a deadline `by_s` seconds before this one, for waits that leave time to later waits."""
        return Deadline(self._end - time.monotonic() - by_s)

    def left_s(self, at_most_s: float = math.inf) -> float:
        """Return the seconds left for a wait, at most `at_most_s`."""
        return max(min(self._end - time.monotonic(), at_most_s), 0.0)

    def last_s(self) -> float:
        """Return the seconds left for one of the last waits, at least `LEAST_S`."""
        return max(self.left_s(), LEAST_S)
