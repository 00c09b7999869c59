"""The cores and the memory that the process may use, by its affinity and its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CONTROL_GROUPS = Path("/sys/fs/cgroup")


def cores(pid: int | None = None) -> float:
    """Return the number of cores that this process, or process `pid`, may use by its affinity and control groups.

    The other process is assumed to be in the same container.
    """
    try:
        allowed = float(len(os.sched_getaffinity(pid or os.getpid())))
    except (AttributeError, OSError):  # not on every system
        allowed = float(os.cpu_count() or 1)
    return min([allowed, *_limits(pid)])


def memory_bytes() -> int | None:
    """Return the memory that the process may use: the machine's, or that of its control groups; None if unknown."""
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


def memory_waits_us(pid: int | None = None) -> int | None:
    """Return the time so far in which a thread of the process's group waited for memory, in us; None if unknown.

    Without such a number of the group it is that of the machine.
    """
    groups = [group / "memory.pressure" for controller, group in _groups(pid) if controller == ""]
    for file in (*groups[:1], PROC / "pressure/memory"):
        try:
            return int(file.read_text("ascii").split("\n", 1)[0].rpartition("total=")[2])
        except (OSError, ValueError):
            continue
    return None


def _memory_of(file: Path) -> list[int]:
    try:
        return [int(file.read_text("ascii"))]
    except (OSError, ValueError):  # as for cores
        return []


def _groups(pid: int | None = None) -> Iterator[tuple[str, Path]]:
    """Yield the control groups of the process and those above them, with the controller, "" in version 2."""
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


def _limits(pid: int | None) -> list[float]:
    """Return the cores that each control group allows: in version 2 every group above the process limits it, too."""
    limits = []
    for controller, group in _groups(pid):
        if controller == "":
            limits += _quota(group / "cpu.max")
        elif controller == "cpu":
            limits += _quota(group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")
    return limits


def _quota(*files: Path) -> list[float]:
    """Return the cores of one group, nothing where it has no limit or is not visible."""
    try:
        quota, period = " ".join(file.read_text("ascii") for file in files).split()
        return [int(quota) / int(period)] if int(quota) > 0 and int(period) > 0 else []
    except (OSError, ValueError):  # "max" is no number, and means no limit
        return []
