"""The environment of a process: its variables, the cores and the memory that it may use, and its TCP connections."""

from __future__ import annotations

import _socket
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path

from instrument import clock
from instrument.runtime.lazy_imports import NamedTuple, late_pattern

CHECK_FOLDER = "INSTRUMENT_CHECK_FOLDER"
"""The environment variable with the folder for the reports that `instrument check` reads."""

INIT_FOLDER = "INSTRUMENT_INIT_FOLDER"
"""The environment variable with the folder for the reports that `instrument init` reads."""

PROC = Path("/proc")
CONTROL_GROUPS = Path("/sys/fs/cgroup")

RUN_VARIABLE = "INSTRUMENT_RUN"
SHARED_RUN_VARIABLE = "INSTRUMENT_RUN_NAME"
_RUN = late_pattern(r"\d{8}T\d{6}-\d+")

PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
METRICS_EXPORTER = "OTEL_METRICS_EXPORTER"
TEMPORALITY = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"


def initial_environment() -> dict[str, str]:
    """Return the environment with which this process started, or the current one if unknown."""
    try:
        lines = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(os.environ)
    return {
        os.fsdecode(name): os.fsdecode(value) for name, equals, value in (x.partition(b"=") for x in lines) if equals
    }


def user_settings(environ: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """Return the environment variables that count as the user's settings. `PROTOCOL` does not count if OpenTelemetry's
    distribution has set it."""
    if "opentelemetry.distro" not in sys.modules or PROTOCOL not in environ or PROTOCOL in initial_environment():
        return environ
    return {name: value for name, value in environ.items() if name != PROTOCOL}


def metrics_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in (TEMPORALITY, METRICS_EXPORTER) if name in os.environ}


def parse_resource_attributes() -> dict[str, object]:
    text, name = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""), os.environ.get("OTEL_SERVICE_NAME", "")
    pairs = [pair.partition("=") for pair in text.split(",") if "=" in pair]
    if "%" in text:
        from urllib.parse import unquote  # which few services have a use for

        pairs = [(unquote(key), equals, unquote(value)) for key, equals, value in pairs]
    attributes: dict[str, object] = {key.strip(): value.strip() for key, _, value in pairs if key.strip()}
    return {**attributes, "service.name": name} if name else attributes


# Runs


def make_run_name() -> str:
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"


def read_run_name() -> str:
    """Return the name of the run to which this process belongs, "" for none."""
    run = os.environ.get(RUN_VARIABLE, "")
    return run if _RUN.fullmatch(run) else ""


def shared_run_name() -> str:
    """Return the name that a run shares with runs on other hosts, "" for none."""
    return os.environ.get(SHARED_RUN_VARIABLE, "")


def is_first_process_of_run() -> bool:
    """Return True in the process that `instrument run` started, and outside of `instrument run`."""
    main = os.environ.get("INSTRUMENT_RUN_PID")
    return main is None or main == str(os.getpid())


def working_folder() -> Path:
    """Return the working directory, "/" if it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/")


# Processes


def read_parent_pid(pid: int) -> int:
    try:
        return int((PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def read_auxiliary_vector(pid: int | None = None) -> bytes:
    """Return the auxiliary vector of a process, or b"" if unreadable. The vector changes when the process executes
    another program."""
    try:
        return (PROC / str(pid or "self") / "auxv").read_bytes()
    except OSError:
        return b""


# The limits of a container


def count_usable_cores(pid: int | None = None) -> float:
    """Return the number of cores that a process may use, which may be a fraction. Process `pid` must be in the same
    container."""
    try:
        allowed = float(len(os.sched_getaffinity(pid or os.getpid())))
    except (AttributeError, OSError):  # not on every system
        allowed = float(os.cpu_count() or 1)
    limits = (numbers for numbers in _read_cgroup_limits(_CORE_LIMITS, pid) if len(numbers) == 2 and min(numbers) > 0)
    return min([allowed, *(quota / period for quota, period in limits)])


def measure_usable_memory_bytes() -> int | None:
    try:
        machine = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, OSError, ValueError):  # not on every system
        machine = []
    limits = chain.from_iterable(_read_cgroup_limits(_MEMORY_LIMITS))
    return min([*machine, *limits], default=None)


def memory_waits_us(pid: int | None = None) -> int | None:
    """Return the us for which threads of the control group have waited for memory. Without such a measurement, return
    the time of the whole machine, or None."""
    groups = [group / "memory.pressure" for controller, group in control_groups(pid) if controller == ""]
    for file in (*groups[:1], PROC / "pressure/memory"):
        try:
            return int(file.read_text("ascii").split("\n", 1)[0].rpartition("total=")[2])
        except (OSError, ValueError):
            continue
    return None


_CORE_LIMITS = {"": ["cpu.max"], "cpu": ["cpu.cfs_quota_us", "cpu.cfs_period_us"]}
_MEMORY_LIMITS = {"": ["memory.max"], "memory": ["memory.limit_in_bytes"]}
"""The file with the memory limit of a control group, by controller. Version 2 has "" as controller."""


def _read_cgroup_limits(names: Mapping[str, list[str]], pid: int | None = None) -> Iterator[list[int]]:
    for controller, group in control_groups(pid):
        with suppress(OSError, ValueError):  # "max" is no number, and means no limit
            yield [int(number) for name in names.get(controller, ()) for number in (group / name).read_text().split()]


def control_groups(pid: int | None = None) -> Iterator[tuple[str, Path]]:
    """Yield the controller and folder of each control group of a process. Parent groups are included. In version 2, the
    controller is "" for all groups."""
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


# TCP connections


_INTERNET = (_socket.AF_INET, _socket.AF_INET6)

LISTENS, TIME_WAIT = "0A", "06"
"""The states in `/proc/net/tcp` of a listening socket and of a recently closed one (the kernel's `tcp_states.h`)."""

TIME_WAIT_S = 60
"""The seconds for which the system lists a closed connection (TCP_TIMEWAIT_LEN in the kernel's `tcp.h`)."""


class Connections(NamedTuple):
    """The TCP ports of a process. `open` has the ports with open connections. `closed` has the ports with connections
    that closed since the process started. A closed connection may belong to another process with the same listening
    socket. `listens` are the ports at which the process listens, and `sockets` the inodes of its listening sockets."""

    open: frozenset[int]
    closed: frozenset[int]
    listens: frozenset[int]
    sockets: frozenset[str]


def list_connections(
    process: Path, listened: frozenset[int] = frozenset(), table: Iterable[TcpRow] | None = None, start_ticks: int = 0
) -> Connections:
    """Return the TCP connections of a process. `process` is the process's folder in `/proc`. `listened` has ports at
    which the process listened earlier. The last arguments are for an ended process. `table` has the sockets of the
    process's network. `start_ticks` is the process's start time in clock ticks."""
    least_left = _compute_time_wait(start_ticks or clock.read_process_start_ticks(process / "stat"))
    inodes = list_socket_inodes(process)
    rows = list(read_tcp_rows(process) if table is None else table)
    listening = {row.port: row.inode for row in rows if row.state == LISTENS and row.inode in inodes}
    ports = listening.keys() | listened
    connected = [row for row in rows if row.state != LISTENS]
    closed = [row for row in connected if row.state == TIME_WAIT and row.ticks_left >= least_left]
    return Connections(
        frozenset(row.port for row in connected if row.port in ports and row.inode in inodes),
        # The end that closes first waits; of a client on this machine that is the other one.
        frozenset({row.port for row in closed} & ports)
        | frozenset({row.to_port for row in closed if row.is_local} & ports),
        frozenset(listening),
        frozenset(listening.values()),
    )


def has_listening_socket() -> bool:
    """Return True if this process listens at a port. This examines the process's own descriptors, which takes less time
    than reading the system's tables."""
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - of thousands
            with suppress(OSError):
                if _is_listening_socket(os.dup(int(name))):
                    return True
    return False


def _is_listening_socket(descriptor: int) -> bool:
    """Return True for a listening socket. Close the descriptor."""
    try:
        opened = _socket.socket(fileno=descriptor)
    except OSError:  # a file
        os.close(descriptor)
        return False
    try:
        return opened.family in _INTERNET and bool(opened.getsockopt(_socket.SOL_SOCKET, _socket.SO_ACCEPTCONN))
    finally:
        opened.close()


def is_in_same_network(process: Path) -> bool:
    try:
        return (process / "ns/net").readlink() == Path("/proc/self/ns/net").readlink()
    except OSError:
        return False


def list_socket_inodes(process: Path) -> frozenset[str]:
    inodes = []
    with suppress(OSError):
        for name in os.listdir(process / "fd"):  # noqa: PTH208 - of thousands
            with suppress(OSError):
                target = os.readlink(process / "fd" / name)  # noqa: PTH115
                if target.startswith("socket:["):
                    inodes.append(target[8:-1])
    return frozenset(inodes)


class TcpRow(NamedTuple):
    """A row of `/proc/net/tcp`. `is_local` is True if both ends have the same address. The system removes a closed
    socket after `ticks_left` clock ticks."""

    port: int
    to_port: int
    state: str
    inode: str
    is_local: bool
    ticks_left: int


def _compute_time_wait(start_ticks: int) -> int:
    """Return the clock ticks for which the system keeps listing a connection that closed at `start_ticks`."""
    hertz = os.sysconf("SC_CLK_TCK")
    clock_id = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # without it there are no rows to judge either
    return TIME_WAIT_S * hertz - (int(time.clock_gettime(clock_id) * hertz) - start_ticks)


def read_tcp_rows(process: Path) -> Iterator[TcpRow]:
    for table in ("tcp", "tcp6"):
        with suppress(OSError), (process / "net" / table).open(encoding="ascii", errors="replace") as file:
            next(file, None)
            for fields in map(str.split, file):
                if len(fields) > 9:
                    (address, _, port), (to_address, _, to_port) = (end.rpartition(":") for end in fields[1:3])
                    ticks_left = int(fields[5].partition(":")[2], 16)
                    ports = int(port, 16), int(to_port, 16)
                    yield TcpRow(*ports, fields[3], fields[9], address == to_address, ticks_left)
