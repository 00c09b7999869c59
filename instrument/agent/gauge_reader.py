"""The gauges of a run's processes as the agent has them: read by a child of its own, begun when the first are wanted.

What a process asks to have read is among what it tells as it joins. Where the child cannot read it, as in a sidecar
that sees no processes of other containers, the process is told so, and why, and reads its gauges itself.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable
from typing import Any

from instrument.agent import child
from instrument.agent.peer import Connection
from instrument.agent.processes import Process
from instrument.runtime import packets

READER = "instr-gauges"
"""The name of the child; the system keeps 15 characters."""

ELSEWHERE = "the processes of its container are not to be seen from that of the agent"
ENDED = "what the agent reads gauges with has ended"


class GaugeReader:
    """The processes whose gauges are read, and the child that does so. `selector` is the agent's own.

    `tell` has a process told a message.
    """

    def __init__(self, selector: selectors.BaseSelector, tell: Callable[[Process, packets.Message], object]) -> None:
        self._selector = selector
        self._tell = tell
        self._connection: Connection | None = None
        self._child = 0
        self._processes: dict[int, Process] = {}
        self._next = 0
        self._has_failed = False

    def add(self, process: Process) -> None:
        """Read what a process asks for, if it does, or go by what it says now."""
        facts = process.facts.get("gauges")
        if not isinstance(facts, dict) or not process.lives or process.memory < 0:
            return
        if (number := self._number_of(process)) is not None:
            self._send({"process": number, "gauges": facts})
            return
        if process.is_elsewhere or not self._is_begun():
            self._leave(process, ELSEWHERE if process.is_elsewhere else ENDED)
            return
        self._next += 1
        self._processes[self._next] = process
        self._send({"process": self._next, "pid": process.pid, "gauges": facts}, process.memory)

    def hear(self, process: Process, message: packets.Message) -> None:
        """Go by what a process says of its gauges: how they are to be read from now on, that they are to be read for
        the last time, or what it alone can read.
        """
        number = self._number_of(process)
        if number is not None:
            name = "readings" if "readings" in message else "gauges"
            self._send({"process": number, name: message[name]})
        elif message.get("gauges", ()) is None:
            self._tell(process, {"gauges": {"ended": True}})

    def note_ended(self, process: Process) -> None:
        """A process has ended."""
        number = self._number_of(process)
        if number is not None:
            del self._processes[number]
            self._send({"process": number, "ended": True})

    def stop(self) -> None:
        """End the child, whatever it is about."""
        self._processes.clear()
        self._forget_child()

    def _number_of(self, process: Process) -> int | None:
        return next((number for number, one in self._processes.items() if one is process), None)

    def _leave(self, process: Process, why: str) -> None:
        self._tell(process, {"gauges": {"yours": why}})

    # ---------------------------------------------------------------- the child

    def _is_begun(self) -> bool:
        """Whether there is a child; one that has failed is not begun again."""
        if self._connection is not None or self._has_failed:
            return not self._has_failed
        try:
            self._connection, self._child = child.begin(_serve, READER)
        except OSError:
            self._has_failed = True
            return False
        self._selector.register(self._connection.fileno(), selectors.EVENT_READ, self._hear)
        return True

    def _send(self, message: packets.Message, *descriptors: int) -> None:
        if self._connection is not None:
            self._connection.send(message, descriptors)
            self._watch(self._connection)

    def _watch(self, connection: Connection) -> None:
        """Hear the child, and wait until more can be sent where anything waits to be.

        One that hangs, and so hears nothing, holds nobody up; what more than a thousand packets say is not said.
        """
        if connection.is_broken:
            self._fail()
            return
        waits = selectors.EVENT_WRITE if connection.has_waiting else 0
        self._selector.modify(connection.fileno(), selectors.EVENT_READ | waits, self._hear)

    def _hear(self, _: int) -> None:
        connection = self._connection
        if connection is None:
            return
        connection.flush()
        self._watch(connection)
        try:
            message, descriptors = connection.receive()
        except BlockingIOError:
            return
        except packets.PacketError:
            message, descriptors = None, []
        for descriptor in descriptors:
            os.close(descriptor)
        if message is None:
            self._fail()
        else:
            self._told(int(message["process"]), dict(message["gauges"]))

    def _told(self, number: int, told: dict[str, Any]) -> None:
        process = self._processes.get(number)
        if process is not None:
            if "yours" in told or "ended" in told:
                del self._processes[number]
            self._tell(process, {"gauges": told})

    def _fail(self) -> None:
        """The child has ended by a fault, or hears nothing: processes read their gauges themselves from now on."""
        self._has_failed = True
        self._forget_child()
        processes, self._processes = self._processes, {}
        for process in processes.values():
            self._leave(process, ENDED)

    def _forget_child(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection.fileno())
            self._connection.close()
            self._connection = None
            child.end(self._child)


def _serve(connection: socket.socket) -> None:
    """In the child: read what is handed over."""
    from instrument.agent.gauge_loop import GaugeLoop

    GaugeLoop(connection).serve()
