"""The thread of the agent's exporter that reads the gauges of processes and devices from outside.

Readings go into the recordings, like those of the process itself. If a driver hangs, neither a service nor the export
waits for it, and each process gets a note about it.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from instrument.device.gauges import GaugeSources, Gone
from instrument.profile.model import Device
from instrument.recording.slot_ring import GaugePlace
from instrument.recording.spans import GAUGES, Sample
from instrument.runtime import packets
from instrument.runtime.threads import Thread
from instrument.runtime.unpatched import TIMEOUT_MAX, Empty, SimpleQueue

AGAIN_S = 1.0
"""Seconds between two attempts to read a process's gauges, while the process still reads them itself."""

SILENT_S = 10.0
"""Seconds after which a reading is reported as hanging, in a note to each process."""

SHORTEST_NS = 10**6
"""The shortest interval of readings, in nanoseconds."""

MOST_DEVICES = 1024

PROC = "/proc"

Send = Callable[[packets.Message], object]


class _Watched:
    """A process whose gauges are read into its recording."""

    def __init__(self, pid: int, facts: Mapping[str, Any], fd: int) -> None:
        self._pid = pid
        self._wanted = Device(nvml_ns=_interval(facts.get("nvml_ns")), host_ns=_interval(facts.get("host_ns")))
        self._environ: dict[str, str] = {}
        self._sources: GaugeSources | None = None
        self._begin_at = 0.0
        self.change(facts)
        self._place = GaugePlace(fd)

    def change(self, facts: Mapping[str, Any]) -> None:
        """Replace the environment variables by those that the process has now."""
        self._environ.clear()
        self._environ.update({str(name): str(value) for name, value in dict(facts.get("environ") or {}).items()})

    def close(self) -> None:
        """End the readings."""
        if self._sources is not None:
            self._sources.close()
        self._place.close()

    def wait_s(self) -> float:
        """Return the seconds until a gauge is due."""
        if self._sources is None:
            return max(self._begin_at - time.monotonic(), 0.0)
        wait_ns = self._sources.wait_ns()
        return math.inf if wait_ns is None else wait_ns / 1e9

    def read_due(self, *, is_last: bool = False) -> Mapping[str, Any] | None:
        """Read the gauges that are due. Returns the devices and notes on unreadable gauges, None before the start.

        Raises `_LeftError` with the reason if the process must read them itself, and `Gone` if it has ended.
        """
        if self._sources is None and time.monotonic() >= self._begin_at:
            self._begin()
        sources = self._sources
        if sources is None:
            return None
        if is_last or sources.wait_ns() == 0:
            sources.read(is_last=is_last)
        return {"gpus": [asdict(gpu) for gpu in sources.gpus()], "notes": sources.notes()}

    def add(self, rows: Sequence[Any]) -> None:
        """Add readings that only the process itself can take."""
        if self._sources is not None:
            now_ns = time.monotonic_ns()
            self._store([Sample(str(name), int(device), now_ns, _number(value)) for device, name, value in rows])

    def _begin(self) -> None:
        if not self._place.take():
            self._begin_at = time.monotonic() + AGAIN_S
            return
        if problem := why_in_process(self._pid):
            raise _LeftError(problem)
        sources = GaugeSources(self._wanted, self._store, self._pid, self._environ)
        sources.prepare()
        is_open = sources.open()
        if self._wanted.nvml_ns is not None and not is_open:
            sources.close()
            raise _LeftError(f"the agent cannot read GPUs ({'; '.join(sources.notes()) or 'there is no driver'})")
        self._sources = sources

    def _store(self, samples: Sequence[Sample]) -> None:
        if not self._place.add(
            sample for sample in samples if sample.name in GAUGES and -1 <= sample.device < MOST_DEVICES
        ):
            raise Gone  # another session records there


class _LeftError(Exception):
    """The agent cannot read a process's gauges, so the process must. The message says why."""


class GaugeThread:
    """Reads the gauges of numbered processes.

    `send` sends the agent a message about one of them. The agent's server thread calls `ask` and `report_silence`.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._asked: SimpleQueue[tuple[packets.Message, Sequence[int]] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._is_over = False
        self._watched: dict[int, _Watched] = {}
        self._busy_at = math.inf
        self._reports: dict[int, Mapping[str, Any]] = {}
        """The last report on each process, by number, without the sentence on a hanging driver."""
        self._silences: Counter[int] = Counter()
        self._silent: set[int] = set()
        """The processes that were sent a note about the current hang of a driver."""

    def ask(self, message: packets.Message, descriptors: Sequence[int]) -> None:
        """Handle a message of the agent about the gauges of a process."""
        if descriptors:
            self._reports[int(message["process"])] = {"gpus": [], "notes": []}
        self._asked.put((message, descriptors))
        if self._thread is None:
            self._thread = Thread(self._run, "instrument-gauges", lambda: not self._is_over)
            self._thread.start()

    def report_silence(self, now: float) -> None:
        """Send each process a note if a reading takes more than `SILENT_S`: the thread hangs in a driver."""
        if now - self._busy_at <= SILENT_S:
            self._silent.clear()
            return
        for number in [number for number in list(self._reports) if number not in self._silent]:
            self._silent.add(number)
            self._silences[number] += 1
            self._report(number)

    def stop(self) -> None:
        """End the thread after its current call of a driver."""
        self._is_over = True
        self._asked.put(None)

    def _run(self) -> None:
        while not self._is_over:
            self._busy_at = math.inf
            wait_s = min((process.wait_s() for process in self._watched.values()), default=math.inf)
            with suppress(Empty):
                request = self._asked.get(timeout=min(wait_s, TIMEOUT_MAX))
                self._busy_at = time.monotonic()
                while request is not None:
                    self._attempt(int(request[0]["process"]), *request)
                    request = self._asked.get_nowait()
            self._busy_at = time.monotonic()
            for number in list(self._watched):
                self._read_gauges(number)
        for number in list(self._watched):
            self._forget(number)

    def _attempt(self, number: int, message: packets.Message, descriptors: Sequence[int]) -> None:
        try:
            self._handle_message(number, message, descriptors)
        except Exception as problem:  # a process may say anything
            self._return_to_process(number, f"{type(problem).__name__}: {problem!s:.200}")

    def _handle_message(self, number: int, message: packets.Message, descriptors: Sequence[int]) -> None:
        if descriptors:
            self._forget(number)
            try:
                self._watched[number] = _Watched(int(message["pid"]), message["gauges"], descriptors[0])
                self._reports[number] = {}
            finally:
                os.close(descriptors[0])
        elif number not in self._watched:
            self._send_gauges(number, {"ended": True})
        elif "readings" in message:
            self._watched[number].add(message["readings"])
        elif "ended" in message:
            self._forget(number)
        elif message["gauges"] is None:
            self._read_gauges(number, is_last=True)
            self._forget(number)
            self._send_gauges(number, {"ended": True})
        else:
            self._watched[number].change(message["gauges"])

    def _read_gauges(self, number: int, *, is_last: bool = False) -> None:
        try:
            report = self._watched[number].read_due(is_last=is_last)
        except Gone:
            self._forget(number)
        except _LeftError as problem:
            self._return_to_process(number, str(problem))
        except Exception as problem:
            self._return_to_process(number, f"{type(problem).__name__}: {problem!s:.200}")
        else:
            if report is not None and report != self._reports[number]:
                self._reports[number] = report
                self._report(number)

    def _report(self, number: int) -> None:
        """Send a process the last report on its gauges, with a sentence on a hanging driver."""
        report, count = self._reports.get(number, {}), self._silences[number]
        notes = list(report.get("notes", ()))
        if count:
            often = "" if count == 1 else f", {count} times"
            notes.append(
                f"device: the agent's exporter read no gauges for more than {SILENT_S:g} s{often}: a driver did not "
                "answer; look for messages of the driver in the system's log"
            )
        self._send_gauges(number, {"gpus": report.get("gpus", []), "notes": notes})

    def _return_to_process(self, number: int, why: str) -> None:
        """Have the process read its gauges itself."""
        self._forget(number)
        self._send_gauges(number, {"yours": why})

    def _forget(self, number: int) -> None:
        self._reports.pop(number, None)
        watched = self._watched.pop(number, None)
        if watched is not None:
            watched.close()

    def _send_gauges(self, number: int, gauges: Mapping[str, Any]) -> None:
        self._send({"process": number, "gauges": gauges})


def why_in_process(pid: int) -> str:
    """Return the reason why a reading here may differ from one in the process, "" if it is the same.

    Each container has its own devices, groups and files, but containers may share process ids.
    """
    try:
        own_namespace, namespace = (os.readlink(f"{PROC}/{name}/ns/mnt") for name in ("self", pid))  # noqa: PTH115 - no file to find
    except OSError as problem:
        return f"it may not look at the process ({problem.strerror})"
    return "" if own_namespace == namespace else "it is in another container"


def _interval(stored: Any) -> int | None:
    interval_ns = None if stored is None else int(stored)
    return interval_ns and max(interval_ns, SHORTEST_NS)


def _number(reading: Any) -> float | None:
    value = None if reading is None else float(reading)
    if value is not None and not math.isfinite(value):
        raise ValueError("a reading without an end")
    return value
