"""The limits on a process in a container: how many cores and how much memory it may use.

The limits come from the process's CPU affinity and its control groups, of version 1 or 2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CONTROL_GROUPS = Path("/sys/fs/cgroup")


def cores(pid: int | None = None) -> float:
    """Return the number of cores, perhaps a fraction, that this process or process `pid` may use.

    Process `pid` must be in the same container.
    """
    try:
        allowed = float(len(os.sched_getaffinity(pid or os.getpid())))
    except (AttributeError, OSError):  # not on every system
        allowed = float(os.cpu_count() or 1)
    return min([allowed, *_group_core_limits(pid)])


def memory_bytes() -> int | None:
    """Return the bytes of memory that this process may use, None if unknown."""
    try:
        machine = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, OSError, ValueError):  # not on every system
        machine = []
    limits = [
        limit
        for controllers, group in _groups()
        if controllers in ("", "memory")
        for limit in _read_limit(group / ("memory.max" if controllers == "" else "memory.limit_in_bytes"))
    ]
    return min([*machine, *limits], default=None)


def memory_waits_us(pid: int | None = None) -> int | None:
    """Return the microseconds in which threads of a process's control group have waited for memory, None if unknown.

    If the group does not count them, return those of the whole machine.
    """
    groups = [group / "memory.pressure" for controller, group in _groups(pid) if controller == ""]
    for file in (*groups[:1], PROC / "pressure/memory"):
        try:
            return int(file.read_text("ascii").split("\n", 1)[0].rpartition("total=")[2])
        except (OSError, ValueError):
            continue
    return None


def _read_limit(file: Path) -> list[int]:
    try:
        return [int(file.read_text("ascii"))]
    except (OSError, ValueError):  # as for cores
        return []


def _groups(pid: int | None = None) -> Iterator[tuple[str, Path]]:
    """Yield a process's control groups and their ancestors, with the name of the controller, "" for version 2."""
    try:
        lines = (PROC / (str(pid) if pid else "self") / "cgroup").read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        folders = [Path(path), *Path(path).parents] if path.startswith("/") else [Path("/")]
        for controller in controllers.split(","):
            # Of version 1 all that share a hierarchy are links to one folder.
            yield from ((controller, CONTROL_GROUPS / controller / folder.relative_to("/")) for folder in folders)


def _group_core_limits(pid: int | None) -> list[float]:
    """Return the numbers of cores to which control groups limit a process. In version 2 ancestors limit it, too."""
    limits = []
    for controller, group in _groups(pid):
        if controller == "":
            limits += _read_core_limit(group / "cpu.max")
        elif controller == "cpu":
            limits += _read_core_limit(group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")
    return limits


def _read_core_limit(*files: Path) -> list[float]:
    """Return a list with the number of cores to which files of a group limit it, empty for no visible limit."""
    try:
        quota, period = " ".join(file.read_text("ascii") for file in files).split()
        return [int(quota) / int(period)] if int(quota) > 0 and int(period) > 0 else []
    except (OSError, ValueError):  # "max" is no number, and means no limit
        return []
