"""The host: processor time and memory of the process and of the machine, as the operating system counts them.

The source is `/proc`. Processor time of the process comes from its clock, to the nanosecond, not from ticks of 10 ms.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from instrument.runtime.control_groups import cores

PROC = Path("/proc")

Values = dict[str, float | None]

_PROCESS_CLOCK = 2
"""Linux's `CPUCLOCK_SCHED` in the number of a process's clock, which `process_time` reads for this process."""


class Gone(Exception):  # noqa: N818 - no error: there is nothing more to read
    """The process has ended."""


class Host:
    """The host's gauges for a process, this one or that of a pid.

    Shares are of the time since the reading before. The constructor and `read` raise `Gone` for a process that ended.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._folder = PROC / ("self" if pid is None else str(pid))
        self._process_ns, self._at_ns = self._processor_ns(), time.monotonic_ns()
        self._busy, self._idle = self._system_times()

    def read(self, now_ns: int, rarely: bool) -> Values:
        """Read the gauges. `rarely` adds those that seldom change."""
        values: Values = {"cores": cores(self._pid)} if rarely else {}
        process_ns = self._processor_ns()
        elapsed_ns = now_ns - self._at_ns
        values["process_cpu"] = 100 * (process_ns - self._process_ns) / elapsed_ns if elapsed_ns > 0 else None
        values["process_memory"] = resident_bytes = self._resident_bytes()
        if self._pid is not None and not resident_bytes:
            raise Gone  # a zombie has no memory
        values["process_memory_peak"] = self._peak_bytes()
        busy, idle = self._system_times()
        passed = busy - self._busy + idle - self._idle
        # Time that waits for disks may run backwards (man 5 proc), so the sum may, too.
        share = 100 * (busy - self._busy) / passed if passed > 0 else None
        values["system_cpu"] = None if share is None else min(max(share, 0.0), 100.0)
        self._process_ns, self._at_ns, self._busy, self._idle = process_ns, now_ns, busy, idle
        return values

    def _processor_ns(self) -> int:
        """Read the clock of the process, which others may read, too (man clock_getcpuclockid)."""
        if self._pid is None:
            return time.process_time_ns()
        try:
            return time.clock_gettime_ns(~self._pid << 3 | _PROCESS_CLOCK)
        except OSError as error:
            raise Gone from error

    def _resident_bytes(self) -> float | None:
        try:
            return int((self._folder / "statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            return None

    def _peak_bytes(self) -> float | None:
        """Read the system's own high water mark of memory; None where it keeps none."""
        try:
            status = (self._folder / "status").read_bytes()
        except OSError:
            return None
        _, label, rest = status.partition(b"\nVmHWM:")
        return int(rest.split(None, 1)[0]) * 1024 if label else None

    def _system_times(self) -> tuple[float, float]:
        """Read busy and idle time of all cores since the machine started, in ticks; zeros where they are not there."""
        try:
            with (PROC / "stat").open("rb") as file:
                ticks = [int(number) for number in file.readline().split()[1:9]]
        except (OSError, ValueError):
            return 0.0, 0.0
        # user nice system idle iowait irq softirq steal; guests are in user already
        idle = sum(ticks[3:5])
        return sum(ticks) - idle, idle
