"""The cores and the memory that the process may use, by its affinity and its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CONTROL_GROUPS = Path("/sys/fs/cgroup")


def cores(pid: int | None = None) -> float:
    """Return the number of cores that this process, or process `pid`, may use by its affinity and control groups.

    Process `pid` must be in the same container.
    """
    try:
        allowed = float(len(os.sched_getaffinity(pid or os.getpid())))
    except (AttributeError, OSError):  # not on every system
        allowed = float(os.cpu_count() or 1)
    return min([allowed, *_cores_of_groups(pid)])


def memory_bytes() -> int | None:
    """Return the bytes of memory that the process may use, by the machine and its control groups, None if unknown."""
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
    """Return the us so far in which threads of the process's control group waited for memory, None if unknown.

    If the group has no number, return the machine's.
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
    """Yield the control groups of the process and their ancestors, each with its controller, "" in version 2."""
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


def _cores_of_groups(pid: int | None) -> list[float]:
    """Return the numbers of cores that control groups allow. In version 2 all ancestors limit the process, too."""
    limits = []
    for controller, group in _groups(pid):
        if controller == "":
            limits += _group_cores(group / "cpu.max")
        elif controller == "cpu":
            limits += _group_cores(group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")
    return limits


def _group_cores(*files: Path) -> list[float]:
    """Return the number of cores of one group in a list, empty if it has no visible limit."""
    try:
        quota, period = " ".join(file.read_text("ascii") for file in files).split()
        return [int(quota) / int(period)] if int(quota) > 0 and int(period) > 0 else []
    except (OSError, ValueError):  # "max" is no number, and means no limit
        return []
