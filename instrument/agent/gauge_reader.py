"""The gauges of a run's processes as the agent has them: read by a child of its own, begun when the first are wanted.

What a process asks to have read is among what it tells as it joins. Where the child cannot read it, as in a sidecar
that sees no processes of other containers, the process is told so, and why, and reads its gauges itself.
"""

from __future__ import annotations

import selectors
import socket
from collections import Counter
from collections.abc import Callable

from instrument.agent.child import Child
from instrument.agent.processes import Process
from instrument.runtime import packets

READER = "instr-gauges"
"""The name of the child."""

LOOK_S = 1.0
"""How often it is looked whether the child lives; it says so as often."""

SILENT_S = 10.0
"""How long the child may give no sign of life before it is taken to hang, and another one goes on."""

ELSEWHERE = "the processes of its container are not to be seen from that of the agent"


class GaugeReader:
    """The processes whose gauges are read, and the child that does so. `selector` is the agent's own.

    `after(wait_s, action)` has the agent do something later, `tell` has a process told a message.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        after: Callable[[float, Callable[[], object]], object],
        tell: Callable[[Process, packets.Message], object],
    ) -> None:
        self._child = Child(selector, _serve, READER, self._heard, self._go_on)
        self._after = after
        self._tell = tell
        self._processes: dict[int, Process] = {}
        self._next = 0
        self._silent_s = 0.0
        self._is_watching = False
        self._hung: Counter[int] = Counter()

    def add(self, process: Process) -> None:
        """Read what a process asks for, if it does, or go by what it says now."""
        facts = process.facts.get("gauges")
        if not isinstance(facts, dict) or not process.lives or process.memory < 0:
            return
        if (number := self._number_of(process)) is not None:
            self._child.send({"process": number, "gauges": facts})
            return
        why = ELSEWHERE if process.is_elsewhere else self._why_not_begun()
        if why:
            self._leave(process, why)
            return
        self._next += 1
        self._processes[self._next] = process
        self._hand_over(self._next)

    def _hand_over(self, number: int) -> None:
        process = self._processes[number]
        facts = {"process": number, "pid": process.pid, "gauges": process.facts["gauges"]}
        self._child.send(facts, process.memory)
        if not self._is_watching:
            self._is_watching, self._silent_s = True, 0.0
            self._after(LOOK_S, self._watch)

    def hear(self, process: Process, message: packets.Message) -> None:
        """Go by what a process says of its gauges: how they are to be read from now on, that they are to be read for
        the last time, or what it alone can read.
        """
        number = self._number_of(process)
        if "gauges" in message:
            process.facts["gauges"] = message["gauges"]
        if number is not None:
            name = "readings" if "readings" in message else "gauges"
            self._child.send({"process": number, name: message[name]})
        elif message.get("gauges", ()) is None:
            self._tell(process, {"gauges": {"ended": True}})

    def note_ended(self, process: Process) -> None:
        """A process has ended."""
        number = self._number_of(process)
        if number is not None:
            del self._processes[number]
            self._child.send({"process": number, "ended": True})

    def stop(self) -> None:
        """End the child, whatever it is about."""
        self._processes.clear()
        self._child.end()

    def _number_of(self, process: Process) -> int | None:
        return next((number for number, one in self._processes.items() if one is process), None)

    def _leave(self, process: Process, why: str) -> None:
        self._tell(process, {"gauges": {"yours": why}})

    # ---------------------------------------------------------------- the child

    def _why_not_begun(self) -> str:
        """Why there is no child, "" where there is one: one is begun where there is none."""
        problem = self._child.begin()
        return problem and f"what the agent reads gauges with {problem}"

    def _watch(self) -> None:
        """Have another child go on where this one hangs. An agent that was stopped itself asks once as it goes on."""
        self._is_watching = bool(self._processes)
        if not self._is_watching:
            return
        self._silent_s += LOOK_S
        if self._silent_s > SILENT_S:
            self._silent_s = 0.0
            self._hung.update(self._processes.keys())
            self._child.end()
            self._go_on()
        self._after(LOOK_S, self._watch)

    def _heard(self, message: packets.Message) -> None:
        self._silent_s = 0.0
        if "process" not in message:
            return  # it lives
        number, told = int(message["process"]), dict(message["gauges"])
        process = self._processes.get(number)
        if process is not None:
            if "notes" in told and self._hung[number]:
                told["notes"] = [*told["notes"], _hung_note(self._hung[number])]
            if "yours" in told or "ended" in told:
                del self._processes[number]
            self._tell(process, {"gauges": told})

    def _go_on(self) -> None:
        """The child has ended by a fault, or heard nothing: another one goes on, or processes read their gauges."""
        why = self._why_not_begun() if self._processes else ""
        for number, process in list(self._processes.items()):
            if why:
                del self._processes[number]
                self._leave(process, why)
            elif process.facts["gauges"] is None:
                del self._processes[number]
                self._tell(process, {"gauges": {"ended": True}})
            else:
                self._hand_over(number)


def _hung_note(count: int) -> str:
    often = "" if count == 1 else f", {count} times"
    return (
        f"device: what the agent reads gauges with gave no sign of life for {SILENT_S:g} s and was begun anew{often}; "
        "no gauges were read meanwhile"
    )


def _serve(connection: socket.socket) -> None:
    """In the child: read what is handed over."""
    from instrument.agent.gauge_loop import GaugeLoop

    GaugeLoop(connection).serve()
