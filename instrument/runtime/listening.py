"""The listening TCP sockets of a process and their connections, read from `/proc`.

Unix sockets do not count, because most of them belong to internal helpers.
"""

from __future__ import annotations

import _socket
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from instrument import clock
from instrument.runtime.cheap_start import NamedTuple

_INTERNET = (_socket.AF_INET, _socket.AF_INET6)

LISTENS, TIME_WAIT = "0A", "06"
"""The states of a listening and of a recently closed socket in `/proc/net/tcp` (the kernel's `tcp_states.h`)."""

TIME_WAIT_S = 60
"""Seconds for which the system still lists a closed connection (TCP_TIMEWAIT_LEN in the kernel's `tcp.h`)."""


class Connections(NamedTuple):
    """The ports of a process with `open` connections, and those with connections `closed` since its start.

    A closed connection may be of another process that shares the listening socket. `listens` are the ports at which the
    process listens, `sockets` the inodes of its listening sockets.
    """

    open: frozenset[int]
    closed: frozenset[int]
    listens: frozenset[int]
    sockets: frozenset[str]


def connections_of(
    process: Path, listened: frozenset[int] = frozenset(), table: Iterable[TcpRow] | None = None, start_ticks: int = 0
) -> Connections:
    """Return the connections of a process, given by its folder in `/proc`, none if the system does not show them.

    `listened` are ports at which the process listened earlier. For an ended process, `table` has the sockets of its
    network, and `start_ticks` is its start time.
    """
    least_left = _ticks_left_since(start_ticks or clock.start_ticks(process / "stat"))
    inodes = sockets_of(process)
    rows = list(rows_of(process) if table is None else table)
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


def listens() -> bool:
    """Return True if this process listens at a port. It examines its own descriptors, because tables cost more."""
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - of thousands
            with suppress(OSError):
                if _is_listening(os.dup(int(name))):
                    return True
    return False


def _is_listening(descriptor: int) -> bool:
    """Return True if a descriptor is that of a listening socket. Close the descriptor."""
    try:
        opened = _socket.socket(fileno=descriptor)
    except OSError:  # a file
        os.close(descriptor)
        return False
    try:
        return opened.family in _INTERNET and bool(opened.getsockopt(_socket.SOL_SOCKET, _socket.SO_ACCEPTCONN))
    finally:
        opened.close()


def is_same_network(process: Path) -> bool:
    try:
        return (process / "ns/net").readlink() == Path("/proc/self/ns/net").readlink()
    except OSError:
        return False


def sockets_of(process: Path) -> frozenset[str]:
    """Return the inodes of a process's sockets."""
    inodes = []
    with suppress(OSError):
        for name in os.listdir(process / "fd"):  # noqa: PTH208 - of thousands
            with suppress(OSError):
                target = os.readlink(process / "fd" / name)  # noqa: PTH115
                if target.startswith("socket:["):
                    inodes.append(target[8:-1])
    return frozenset(inodes)


class TcpRow(NamedTuple):
    """A row of `/proc/net/tcp`: a socket of a network namespace.

    It `is_local` if both ends have the same address. The system removes a closed socket after `ticks_left` clock ticks.
    """

    port: int
    to_port: int
    state: str
    inode: str
    is_local: bool
    ticks_left: int


def _ticks_left_since(start_ticks: int) -> int:
    """Return the `ticks_left` of a connection that was closed just as a process started.

    A connection with fewer was closed earlier, perhaps by an earlier server.
    """
    hertz = os.sysconf("SC_CLK_TCK")
    clock_id = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # without it there are no rows to judge either
    return TIME_WAIT_S * hertz - (int(time.clock_gettime(clock_id) * hertz) - start_ticks)


def rows_of(process: Path) -> Iterator[TcpRow]:
    """Yield the TCP sockets in the network namespace of a process."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError), (process / "net" / table).open(encoding="ascii", errors="replace") as file:
            next(file, None)
            for fields in map(str.split, file):
                if len(fields) > 9:
                    (address, _, port), (to_address, _, to_port) = (end.rpartition(":") for end in fields[1:3])
                    ticks_left = int(fields[5].partition(":")[2], 16)
                    ports = int(port, 16), int(to_port, 16)
                    yield TcpRow(*ports, fields[3], fields[9], address == to_address, ticks_left)
