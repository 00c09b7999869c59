"""The program of the agent's child that reads gauges: those of processes and devices that can be read from outside.

They go into the recordings, as those do that a process reads itself. A driver may hang for as long as it likes here:
neither a service nor the agent waits for it.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from instrument.agent.child import AgentEnd
from instrument.device.gauges import GaugeSources, Gone
from instrument.profile.model import Device
from instrument.recording.slot_ring import GaugePlace
from instrument.recording.spans import GAUGES, Sample
from instrument.runtime import packets

AGAIN_S = 1.0
"""How often it is tried to begin where the process still reads its gauges itself."""

LIFE_S = 1.0
"""How often it says that it lives, while it has anything to read."""

SHORTEST_NS = 10**6
"""No process has its gauges read more often, whatever it asks for."""

MOST_DEVICES = 1024

PROC = "/proc"


class _Watched:
    """A process whose gauges are read into its recording."""

    def __init__(self, pid: int, facts: Mapping[str, Any], fd: int) -> None:
        self._pid = pid
        self._wanted = Device(nvml_ns=_interval(facts.get("nvml_ns")), host_ns=_interval(facts.get("host_ns")))
        self._environ: dict[str, str] = {}
        self._sources: GaugeSources | None = None
        self._told: Mapping[str, Any] = {}
        self._begin_at = 0.0
        self.change(facts)
        self._place = GaugePlace(fd)

    def change(self, facts: Mapping[str, Any]) -> None:
        """Go by the variables that the process has now."""
        self._environ.clear()
        self._environ.update({str(name): str(value) for name, value in dict(facts.get("environ") or {}).items()})

    def close(self) -> None:
        """Read no more of it."""
        if self._sources is not None:
            self._sources.close()
        self._place.close()

    def wait_s(self) -> float:
        """How long there is nothing to do."""
        if self._sources is None:
            return max(self._begin_at - time.monotonic(), 0.0)
        wait_ns = self._sources.wait_ns()
        return math.inf if wait_ns is None else wait_ns / 1e9

    def look(self, *, is_last: bool = False) -> Mapping[str, Any]:
        """Read what it is time to. Returns what is new of devices and what cannot be read of them.

        Raises `_LeftError` with why the process is to read them itself, and `Gone`.
        """
        if self._sources is None and time.monotonic() >= self._begin_at:
            self._begin()
        sources = self._sources
        if sources is None:
            return {}
        if is_last or sources.wait_ns() == 0:
            sources.read(is_last=is_last)
        told = {"gpus": [asdict(gpu) for gpu in sources.gpus()], "notes": sources.notes()}
        before, self._told = self._told, told
        return told if told != before else {}

    def add(self, rows: Sequence[Any]) -> None:
        """Keep what the process alone can read."""
        if self._sources is not None:
            now_ns = time.monotonic_ns()
            self._keep([Sample(str(name), int(device), now_ns, _number(value)) for device, name, value in rows])

    def _begin(self) -> None:
        if not self._place.take():
            self._begin_at = time.monotonic() + AGAIN_S
            return
        if problem := why_not_here(self._pid):
            raise _LeftError(problem)
        sources = GaugeSources(self._wanted, self._keep, self._pid, self._environ)
        sources.prepare()
        is_open = sources.open()
        if self._wanted.nvml_ns is not None and not is_open:
            sources.close()
            raise _LeftError(f"it cannot read GPUs here ({'; '.join(sources.notes()) or 'there is no driver'})")
        self._sources = sources

    def _keep(self, samples: Sequence[Sample]) -> None:
        if not self._place.add(one for one in samples if one.name in GAUGES and -1 <= one.device < MOST_DEVICES):
            raise Gone  # another session records there


class _LeftError(Exception):
    """The process is to read its gauges itself; the message says why."""


class GaugeLoop:
    """Serves the agent at the other end of `connection` until that ends."""

    def __init__(self, connection: socket.socket) -> None:
        self._agent = AgentEnd(connection)
        self._watched: dict[int, _Watched] = {}
        self._lives_at = 0.0

    def serve(self) -> None:
        """Do so until the agent has gone."""
        try:
            while True:
                waits = [one.wait_s() for one in self._watched.values()]
                wait_s = min([*waits, max(self._lives_at - time.monotonic(), 0.0)]) if waits else math.inf
                for message, descriptors in self._agent.hear(wait_s):
                    try:
                        self._do(int(message["process"]), message, descriptors)
                    except Exception as problem:  # what a process says may be anything
                        self._leave(int(message["process"]), f"{type(problem).__name__}: {problem!s:.200}")
                if self._agent.has_gone:
                    return
                for number in list(self._watched):
                    self._look(number)
                if time.monotonic() >= self._lives_at:
                    self._lives_at = time.monotonic() + LIFE_S
                    self._agent.tell({"lives": True})
        finally:
            for number in list(self._watched):
                self._forget(number)

    def _do(self, number: int, message: packets.Message, descriptors: Sequence[int]) -> None:
        if descriptors:
            self._forget(number)
            try:
                self._watched[number] = _Watched(int(message["pid"]), message["gauges"], descriptors[0])
            finally:
                os.close(descriptors[0])
        elif number not in self._watched:
            self._tell(number, {"ended": True})
        elif "readings" in message:
            self._watched[number].add(message["readings"])
        elif "ended" in message:
            self._forget(number)
        elif message["gauges"] is None:
            self._look(number, is_last=True)
            self._forget(number)
            self._tell(number, {"ended": True})
        else:
            self._watched[number].change(message["gauges"])

    def _look(self, number: int, *, is_last: bool = False) -> None:
        try:
            told = self._watched[number].look(is_last=is_last)
        except Gone:
            self._forget(number)
        except _LeftError as problem:
            self._leave(number, str(problem))
        except Exception as problem:
            self._leave(number, f"{type(problem).__name__}: {problem!s:.200}")
        else:
            if told:
                self._tell(number, told)

    def _leave(self, number: int, why: str) -> None:
        """Have the process read its gauges itself."""
        self._forget(number)
        self._tell(number, {"yours": why})

    def _forget(self, number: int) -> None:
        watched = self._watched.pop(number, None)
        if watched is not None:
            watched.close()

    def _tell(self, number: int, told: Mapping[str, Any]) -> None:
        self._agent.tell({"process": number, "gauges": told})


def why_not_here(pid: int) -> str:
    """Why what is read here need not be what the process sees, "" where it is: devices, groups and files are those of
    a container, and containers may share their processes.
    """
    try:
        own, other = (os.readlink(f"{PROC}/{one}/ns/mnt") for one in ("self", pid))  # noqa: PTH115 - no file to find
    except OSError as problem:
        return f"it may not look at the process ({problem.strerror})"
    return "" if own == other else "it is in another container"


def _interval(found: Any) -> int | None:
    interval_ns = None if found is None else int(found)
    return interval_ns and max(interval_ns, SHORTEST_NS)


def _number(found: Any) -> float | None:
    value = None if found is None else float(found)
    if value is not None and not math.isfinite(value):
        raise ValueError("a reading without an end")
    return value
