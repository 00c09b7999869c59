"""The clocks of a recording: CLOCK_MONOTONIC times spans, and the wall clock aligns the recordings of several machines.

A `Deadline` limits the time that a session takes to end. All waits share it, so their time-outs do not add up.
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
"""The index of the process's start time in `/proc/PID/stat`, counted in words after the program's name."""


def read_clocks() -> tuple[int, int]:
    """Read the monotonic clock and the wall clock in nanoseconds, at nearly the same moment. The best of five attempts
    is returned."""
    pairs = []
    for _ in range(5):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        pairs.append((after - before, (before + after) // 2, wall))
    _, monotonic_ns, realtime_ns = min(pairs)
    return monotonic_ns, realtime_ns


_TIMEX_BYTES, _MAXERROR_AT, _STATUS_AT = 208, 24, 40
"""The size of `struct timex` in bytes on 64-bit Linux, and the byte offsets of `maxerror` and `status` in it."""

_UNSYNCHRONIZED, _FAILED = 0x40, (-1, 5)


def read_wall_clock_error_ns() -> int:
    """Return the kernel's estimate of the wall clock's maximum error, in nanoseconds.

    Return 0 if the error is unknown because no NTP or PTP client sets the clock.
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
    """Return the kernel's random id of the current boot. Return an empty string if it cannot be read."""
    try:
        return BOOT.read_text("ascii", "replace").strip()[:64]
    except OSError:
        return ""


def process_start_ns() -> int | None:
    """Return the start of this process on the monotonic clock, exact to 10 ms. Return None if it cannot be read.

    `exec` does not change the start. In a service it may be the start of `instrument run`.
    """
    ticks = read_process_start_ticks(STAT)
    if not ticks:
        return None
    try:
        since_boot_ns = ticks * 10**9 // os.sysconf("SC_CLK_TCK")
        asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    except (OSError, ValueError, AttributeError):
        return None
    return since_boot_ns - asleep_ns


def read_process_start_ticks(stat: Path) -> int:
    """Return the start of a process in clock ticks since boot. Return 0 for an ended process or a zombie.

    `stat` is the path `/proc/PID/stat`. The start distinguishes an earlier and a later process with the same id.
    """
    try:
        # The name of the program is in brackets, and may have blanks and brackets itself.
        words = stat.read_text("utf-8", "replace").rpartition(")")[2].split()
        return 0 if words[0] in "ZX" else int(words[START_FIELD])
    except (OSError, ValueError, IndexError):
        return 0


LEAST_S = 0.25
"""The minimum timeout of the last wait in seconds, which also applies after the deadline."""


class Deadline:
    """A deadline `limit_s` seconds from now, which all waits at the end of a session share."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s

    def make_earlier_deadline(self, by_s: float) -> Deadline:
        """Return a deadline `by_s` seconds earlier, which leaves time for further waits."""
        return Deadline(self._end - time.monotonic() - by_s)

    def seconds_left(self, at_most_s: float = math.inf) -> float:
        """Return the seconds until the deadline, at least 0 and at most `at_most_s`."""
        return max(min(self._end - time.monotonic(), at_most_s), 0.0)

    def seconds_for_last_wait(self) -> float:
        """Return the seconds until the deadline, at least `LEAST_S`."""
        return max(self.seconds_left(), LEAST_S)
