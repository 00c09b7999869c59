"""The agent's handle on its exporter, the child process that sends spans and reads gauges.

The agent starts the child when the first recording must be exported or the first gauge read. If the child crashes, the
agent starts another child, which continues from the progress that is stored in the recordings.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from instrument.agent.child import fork_child
from instrument.agent.loop import Connection, EventLoop
from instrument.agent.processes import Process, Run
from instrument.recording.export_checkpoint import ExportCheckpoint, Progress, losses_by_name
from instrument.recording.memory_layout import read_generation
from instrument.runtime import agent_socket, file_writing

EXPORTER_NAME = "instr-exporter"
"""The process name of the exporter, as `ps` shows it."""

MOST_RESTARTS, RESTART_WINDOW_S = 5, 600.0
"""The maximum number of restarts of the exporter within a window, and the window in seconds."""

REAP_LIMIT_S, REAP_POLL_S = 2.0, 0.001
"""Seconds for which the agent waits for a killed exporter to end, and seconds between two checks."""

ELSEWHERE = "the agent cannot see the processes of that container"


class Exports:
    """Starts the exporter child, and sends it the recordings to export and the processes whose gauges it reads.

    - `folder`: the folder with a file for the next agent, which counts the possibly unsent spans
    - `changed`: called after the export of a recording
    - `says`: called with each message about exports
    - `send`: sends a message to a process
    """

    def __init__(
        self,
        loop: EventLoop,
        folder: Path,
        changed: Callable[[], object],
        says: Callable[[str], object],
        send: Callable[[Process, agent_socket.Message], object],
    ) -> None:
        self._loop = loop
        self.connection: Connection | None = None
        """The connection to the child, None while none runs."""
        self._pid = 0
        self._begun: deque[float] = deque(maxlen=MOST_RESTARTS + 1)
        self._changed = changed
        self._send = send
        self._says = says
        self.is_ending = False
        """True once the agent has asked the child to end."""
        self._recordings: dict[int, tuple[Process, int, int]] = {}
        """The exported processes by number, with a descriptor of the recording, and its generation."""
        self._gauged: dict[int, Process] = {}
        """The processes whose gauges the child reads, by number."""
        self._folder = folder
        self._unsent: dict[Process, int] = {}
        """The number of spans of each ended process that may be unsent."""
        self._listeners: dict[str, socket.socket | None] = {}
        """The listening socket of each address for scrapes, None if it cannot be opened."""
        self._handed_over: set[str] = set()
        """The addresses whose listening sockets the child has."""
        self.fates: Counter[str] = Counter()
        """The outcomes of spans of ended processes, with their counts."""
        self.fates["perhaps"] = agent_socket.read_unsent_count(folder)
        self.problem = ""

    def is_exporting(self, run: Run) -> bool:
        return any(process.run is run and not process.lives for process, *_ in self._recordings.values())

    @property
    def is_done(self) -> bool:
        return self.connection is None

    @property
    def lost_by_reason(self) -> Mapping[str, int]:
        return losses_by_name(self.fates)

    def export_if_wanted(self, process: Process) -> None:
        """Export the recording of a process if its profile asks for that, or if Prometheus scrapes the run."""
        if process.number in self._recordings:
            return
        settings = process.facts.get("export") or {}
        if address := str(settings.get("prometheus") or ""):
            self._listen_for_scrapes(address)
        is_read = any(settings.get(name) for name in ("otlp", "captures", "parquet", "prometheus"))
        if not (is_read or (settings and process.run.is_scraped)) or process.memory < 0:
            return
        if self.is_ending or not self._begin_child():
            self.count_unread_rows(process, process.memory, is_reported=False)
            self._notify_unexported(process)
            return
        try:
            memory = os.dup(process.memory)
        except OSError as problem:
            self._note_problem(f"the recording of process {process.pid} could not be kept: {problem.strerror}")
            self._notify_unexported(process)
            return
        self._recordings[process.number] = process, memory, read_generation(memory)
        self._start_export(process.number)

    def answer_scrape(self, run: Run, connection: socket.socket) -> None:
        run.is_scraped = True
        for process in run.living_processes():
            self.export_if_wanted(process)
        if not self.is_ending and not self._try_to_begin_child():
            self._send_to_child({"scrape": run.name}, connection.fileno())

    def _listen_for_scrapes(self, address: str) -> None:
        if address in self._listeners:
            return
        try:
            host, _, port = address.rpartition(":")
            family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
            self._listeners[address] = socket.create_server((host.strip("[]"), int(port)), family=family)
        except OSError as problem:
            self._listeners[address] = None
            advice = "give export.prometheus.listen another address"
            self._says(f"instrument: export.prometheus: cannot listen at {address}: {problem.strerror}; {advice}")

    def note_process_end(self, process: Process) -> None:
        if process.number in self._recordings:
            self._send_to_child({"ended": process.number})
            self._count_unsent_spans(*self._recordings[process.number])
        if self._gauged.pop(process.number, None) is not None:
            self._send_to_child({"process": process.number, "ended": True})

    def send_window(self, process: Process, begin_ns: int, end_ns: int) -> None:
        """Send all spans that a process recorded in an interval, including the spans that sampling has dropped."""
        if process.number in self._recordings:
            self._send_to_child({"window": process.number, "begin_ns": begin_ns, "end_ns": end_ns})

    def flush(self, process: Process) -> None:
        """Have the child send the spans that a process has recorded so far."""
        if process.number in self._recordings:
            self._send_to_child({"flush": process.number})

    def end_exports(self, within_s: float) -> None:
        if not self.is_ending:
            self.is_ending = True
            self._send_to_child({"end": within_s})

    def stop(self) -> None:
        self.is_ending = True
        self._gauged.clear()
        if (connection := self.connection) is not None:
            self._kill_child()
            self._loop.handle_packets(connection, is_last=True)
            self._loop.drop_connection(connection)  # unless the child has closed it: it may hang in a driver
        self._forget_recordings()
        for listener in self._listeners.values():
            if listener is not None:
                listener.close()
        self._listeners.clear()

    # ---------------------------------------------------------------- gauges

    def read_gauges(self, process: Process) -> None:
        settings = process.facts.get("gauges")
        if not isinstance(settings, dict) or not process.lives or process.memory < 0:
            return
        if process.number in self._gauged:
            self._send_to_child({"process": process.number, "gauges": settings})
        elif why := ELSEWHERE if process.is_elsewhere else self._try_to_begin_child():
            self._send(process, {"gauges": {"yours": why}})
        else:
            self._gauged[process.number] = process
            self._start_gauges(process)

    def forward_gauge_message(self, process: Process, message: agent_socket.Message) -> None:
        """Forward a process's gauge readings or gauge settings to the child. The child stops reading if the settings
        are None."""
        if "gauges" in message:
            process.facts["gauges"] = message["gauges"]
        if process.number in self._gauged:
            name = "readings" if "readings" in message else "gauges"
            self._send_to_child({"process": process.number, name: message[name]})
        elif message.get("gauges", ()) is None:
            self._send(process, {"gauges": {"ended": True}})

    def _start_gauges(self, process: Process) -> None:
        message = {"process": process.number, "pid": process.pid, "gauges": process.facts["gauges"]}
        self._send_to_child(message, process.memory)

    def _handle_gauges_report(self, number: int, gauges: agent_socket.Message) -> None:
        process = self._gauged.get(number)
        if process is not None:
            if gauges.keys() & {"yours", "ended"}:
                del self._gauged[number]
            self._send(process, {"gauges": gauges})

    # ---------------------------------------------------------------- the child

    def _start_export(self, number: int) -> None:
        process, memory, generation = self._recordings[number]
        run, facts = process.run, process.facts
        self._send_to_child(
            {
                "export": number,
                "settings": facts["export"],
                "generation": generation,
                "run": run.name,
                "is_scraped": run.is_scraped,
                "disk_bytes": facts.get("disk_bytes"),
            },
            memory,
        )
        if not process.lives:
            self._count_unsent_spans(process, memory, generation)
            self._send_to_child({"ended": number})

    def _note_problem(self, problem: str) -> None:
        if problem and not self.problem:
            self._says(f"instrument: the agent could not export what a process records: {problem}")
        self.problem = problem or self.problem

    def _begin_child(self) -> bool:
        self._note_problem(self._try_to_begin_child())
        return self.connection is not None

    def _try_to_begin_child(self) -> str:
        if self.connection is None:
            now = time.monotonic()
            if len(self._begun) > MOST_RESTARTS and now - self._begun[0] < RESTART_WINDOW_S:
                return f"the agent's exporter has ended {len(self._begun)} times in {RESTART_WINDOW_S:g} s"
            self._begun.append(now)
            try:
                self.connection, self._pid = fork_child(_serve, EXPORTER_NAME)
            except OSError as problem:
                return f"the agent's exporter could not be made: {problem.strerror}"
            self._loop.add_connection(self.connection)
            self._send_to_child({"folder": str(self._folder)})
        for address, listener in self._listeners.items():
            if listener is not None and address not in self._handed_over:
                self._handed_over.add(address)
                self._send_to_child({"listen": address}, listener.fileno())
        return ""

    def _send_to_child(self, message: agent_socket.Message, *descriptors: int) -> None:
        """Send the child a message, or queue the message if the socket is full. An overflow of the queue ends the
        child."""
        connection = self.connection
        if connection is not None:
            connection.send(message, descriptors)
            if connection.is_broken:
                self._loop.call_later(0, partial(self._loop.drop_connection, connection))
            else:
                self._loop.watch_connection(connection)

    def _kill_child(self) -> None:
        pid, self._pid = self._pid, 0
        until = time.monotonic() + REAP_LIMIT_S
        with suppress(ProcessLookupError, ChildProcessError):
            if pid:
                os.kill(pid, signal.SIGKILL)
            while pid and os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
                time.sleep(REAP_POLL_S)

    def handle_end(self) -> None:
        """Handle the end of the connection to the child. Start another child unless the agent ends."""
        self._kill_child()
        self.connection = None
        self._restart_exporter()

    def handle_message(self, message: agent_socket.Message) -> None:
        if "process" in message:
            self._handle_gauges_report(int(message["process"]), dict(message["gauges"]))
            return
        if "dataset" in message:
            self.fates["unstored"] += int(message["dataset"])
            return
        if "said" in message:
            self._says(f"instrument: {message['said']!s}")
        else:
            self._note_export_end(message)
        self._changed()

    def _note_export_end(self, message: Mapping[str, Any]) -> None:
        number = int(message["done"])
        self._note_problem(str(message.get("problem") or ""))
        if number in self._recordings:
            fates = message.get("fates") or {}
            self.fates.update(fates)
            self._end_export(number, is_reported=bool(fates))

    def _end_export(self, number: int, *, is_reported: bool) -> None:
        process, memory, generation = self._recordings.pop(number)
        self.count_unread_rows(process, memory, generation, is_reported=is_reported)
        self._notify_unexported(process)
        os.close(memory)
        if self._unsent.pop(process, 0):
            self._write_unsent_count()

    def count_unread_rows(self, process: Process, memory: int, generation: int = 0, *, is_reported: bool) -> None:
        """Count the rows of an ended process that the child has not read. Also count sent and lost spans, unless the
        child has reported them. `generation` is the number of the process's session, 0 for all sessions."""
        if process.lives or not exports_spans(process):
            return
        with suppress(OSError):
            progress, unread_rows = _read_checkpoint(memory, generation)
            self.fates.update({} if is_reported else progress.unreported_counts())
            self.fates["unread"] += unread_rows

    def _restart_exporter(self) -> None:
        self._handed_over.clear()
        if self.is_ending:
            self._gauged.clear()
        if not self.is_ending and self._recordings and self._begin_child():
            for number in list(self._recordings):
                self._start_export(number)
        else:
            self._forget_recordings()
        why = self._try_to_begin_child() if self._gauged else ""
        for number, process in list(self._gauged.items()):
            if process.facts["gauges"] is None:
                self._handle_gauges_report(number, {"ended": True})
            elif why:
                self._handle_gauges_report(number, {"yours": why})
            else:
                self._start_gauges(process)
        self._changed()

    def _notify_unexported(self, process: Process) -> None:
        """Notify a process that its recording is not exported. The process then exits without waiting for the
        export."""
        if exports_spans(process):
            self._send(process, {"unexported": True})

    def _forget_recordings(self) -> None:
        for number in list(self._recordings):
            self._end_export(number, is_reported=False)

    def _count_unsent_spans(self, process: Process, memory: int, generation: int) -> None:
        if process in self._unsent or not exports_spans(process):
            return
        with suppress(OSError):
            progress, unread_rows = _read_checkpoint(memory, generation)
            self._unsent[process] = progress.unsettled_spans + unread_rows
            self._write_unsent_count()

    def _write_unsent_count(self) -> None:
        path, spans = self._folder / agent_socket.UNSENT, self.fates["perhaps"] + sum(self._unsent.values())
        with suppress(OSError):
            if not spans:
                path.unlink()
                return
            with file_writing.open_replacement(path) as file:
                file.write(b"%d" % spans)


def exports_spans(process: Process) -> bool:
    return bool((process.facts.get("export") or {}).get("otlp") or process.facts.get("exports"))


def _read_checkpoint(memory: int, generation: int) -> tuple[Progress, int]:
    """Return the export progress of a session, and the number of unread rows. For an earlier session of the process,
    the number is 0."""
    with closing(ExportCheckpoint(memory)) as place:
        progress, is_current = place.read_progress(), generation in (0, read_generation(memory))
        is_of_session = generation in (0, progress.generation)
        return progress if is_of_session else Progress(), place.count_unread_rows() if is_current else 0


def _serve(connection: socket.socket) -> None:
    from instrument.agent.exporter_child import ExporterChild

    ExporterChild(connection).serve()
