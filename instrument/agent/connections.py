"""Connections that came to processes which have recorded no request: looked for from outside, at no cost to a service.

A process is looked at soon after it has joined, then at growing distances, until it says that it records requests. The
agent sends it each port, and the process makes a verdict of that. The agent itself reports on a process that ended
before its verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from instrument.agent.processes import PROC, Process
from instrument.runtime import listening

FIRST_S, LONGEST_S = 0.5, 60.0
"""The fewest and the most seconds between two looks at a process."""

AGE_SHARE, COST_SHARE = 4, 100
"""Between two looks is a fourth of the time since a process has joined, and a hundred times what a look has cost."""


class ConnectionWatch:
    """Looks at the processes that live. `after(seconds, function)` calls a function later, `tell` sends a message."""

    def __init__(
        self,
        after: Callable[[float, Callable[[], object]], object],
        tell: Callable[[Process, Mapping[str, Any]], None],
        living: Callable[[], Iterable[Process]],
    ) -> None:
        self._after = after
        self._tell = tell
        self._living = living

    def begin(self, process: Process) -> None:
        """Look at a process that has joined, if its number means anything here."""
        if not process.is_elsewhere and process.facts.get("asks_for_requests", True):
            self._after(FIRST_S, lambda: self._look(process))

    def _look(self, process: Process) -> None:
        if not process.lives or process.has_requests:
            return
        began = time.thread_time()
        before = process.ports
        self.last_look(process)
        if process.ports != before:
            self._tell(process, {"connections": sorted(process.ports)})
        age_s = (time.monotonic_ns() - process.joined_ns) / 1e9
        wait_s = min(max(age_s / AGE_SHARE, FIRST_S), LONGEST_S) + COST_SHARE * (time.thread_time() - began)
        self._after(wait_s, lambda: self._look(process))

    def last_look(self, process: Process) -> None:
        """Take down the ports of a process that connections came to, also where it listens there no more."""
        folder = PROC / str(process.pid)
        process.shares_network = process.shares_network or listening.is_same_network(folder)
        network = PROC / "self" if process.shares_network else None
        found = listening.connections_of(folder, process.listened, network, process.started)
        process.listened |= found.listens
        process.ports |= found.open
        if not found.closed <= process.ports and self._has_alone(process, found):
            process.ports |= found.closed

    def _has_alone(self, process: Process, found: listening.Connections) -> bool:
        """Return True where no other process of the run has its listening sockets. Workers of a server share them."""
        others = (one for one in self._living() if one.pid != process.pid)
        return not any(
            found.sockets & listening.sockets_of(PROC / str(one.pid)) for one in others if one.run is process.run
        )
