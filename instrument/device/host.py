"""The host: how much processor time and memory the process and the machine use, as the operating system counts them.

Linux tells by `/proc`; elsewhere `psutil` does, where it is installed. Processor time of the process comes from its
clock, to the nanosecond, and not from ticks of 10 ms.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

PROC = Path("/proc")
CONTROL_GROUPS = Path("/sys/fs/cgroup")

Values = dict[str, float | None]


class Host:
    """Reads the host's gauges for one process. Shares are of the time since the reading before.

    Imports `psutil` where there is no `/proc`: to be made on a thread that nobody forks beside.
    """

    def __init__(self) -> None:
        self._psutil: Any = None
        if not (PROC / "stat").exists():
            try:
                self._psutil = import_module("psutil")
            except ImportError:
                pass  # what it would tell is not known then
        self._process_ns, self._at_ns = time.process_time_ns(), time.monotonic_ns()
        self._busy, self._idle = self._system_times()

    def read(self, now_ns: int, rarely: bool) -> Values:
        """What the host tells now; `rarely` asks also for what changes seldom."""
        values: Values = {"cores": cores()} if rarely else {}
        process_ns = time.process_time_ns()
        elapsed_ns = now_ns - self._at_ns
        values["process_cpu"] = 100 * (process_ns - self._process_ns) / elapsed_ns if elapsed_ns > 0 else None
        values["process_memory"] = self._resident_bytes()
        values["process_memory_peak"] = self._peak_bytes()
        busy, idle = self._system_times()
        passed = busy - self._busy + idle - self._idle
        # Time that waits for disks may run backwards (man 5 proc), so the sum may, too.
        share = 100 * (busy - self._busy) / passed if passed > 0 else None
        values["system_cpu"] = None if share is None else min(max(share, 0.0), 100.0)
        self._process_ns, self._at_ns, self._busy, self._idle = process_ns, now_ns, busy, idle
        return values

    def _resident_bytes(self) -> float | None:
        if self._psutil is not None:
            return int(self._psutil.Process().memory_info().rss)
        try:
            return int((PROC / "self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            return None

    def _peak_bytes(self) -> float | None:
        """The system's own high water mark, which no two readings miss; None where it keeps none of a process."""
        try:
            status = (PROC / "self/status").read_bytes()
        except OSError:
            return None
        _, found, rest = status.partition(b"\nVmHWM:")
        return int(rest.split(None, 1)[0]) * 1024 if found else None

    def _system_times(self) -> tuple[float, float]:
        """Busy and idle time of all cores since the machine started, in any unit; zeros where nobody tells."""
        if self._psutil is not None:
            times = self._psutil.cpu_times()
            idle = times.idle + getattr(times, "iowait", 0.0)
            return sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0), idle
        try:
            with (PROC / "stat").open("rb") as file:
                ticks = [int(number) for number in file.readline().split()[1:9]]
        except (OSError, ValueError):
            return 0.0, 0.0
        # user nice system idle iowait irq softirq steal; guests are in user already
        idle = sum(ticks[3:5])
        return sum(ticks) - idle, idle


def cores() -> float:
    """How many cores the process may use: what its affinity and the limits of its control groups leave it."""
    try:
        allowed = float(len(os.sched_getaffinity(os.getpid())))
    except (AttributeError, OSError):  # not on every system
        allowed = float(os.cpu_count() or 1)
    return min([allowed, *_limits()])


def memory_bytes() -> int | None:
    """How much memory the process may use: the machine's, or what its control groups leave it; None if unknown."""
    try:
        machine = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, OSError, ValueError):  # not on every system
        machine = []
    limits = [
        limit
        for controllers, group in _groups()
        if controllers in ("", "memory")
        for limit in _memory_of(group / ("memory.max" if controllers == "" else "memory.limit_in_bytes"))
    ]
    return min([*machine, *limits], default=None)


def _memory_of(file: Path) -> list[int]:
    try:
        return [int(file.read_text("ascii"))]
    except (OSError, ValueError):  # as for cores
        return []


def _groups() -> Iterator[tuple[str, Path]]:
    """The control groups that the process is in, those above them included: the controller, "" in version 2."""
    try:
        lines = (PROC / "self/cgroup").read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        folders = [Path(path), *Path(path).parents] if path.startswith("/") else [Path("/")]
        for controller in controllers.split(","):
            # Of version 1 all that share a hierarchy are links to one folder.
            yield from ((controller, CONTROL_GROUPS / controller / folder.relative_to("/")) for folder in folders)


def _limits() -> list[float]:
    """Cores that control groups allow: of version 2 every group above the process limits it, too."""
    limits = []
    for controller, group in _groups():
        if controller == "":
            limits += _quota(group / "cpu.max")
        elif controller == "cpu":
            limits += _quota(group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")
    return limits


def _quota(*files: Path) -> list[float]:
    """The cores of one group, nothing where it has no limit or is not to be seen from here."""
    try:
        quota, period = " ".join(file.read_text("ascii") for file in files).split()
        return [int(quota) / int(period)] if int(quota) > 0 and int(period) > 0 else []
    except (OSError, ValueError):  # "max" is no number, and means no limit
        return []
