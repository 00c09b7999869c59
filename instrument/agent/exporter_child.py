"""The exporter, a child process of the agent, which sends spans to a collector and reads gauges such as GPU memory.

If the exporter is killed, the next exporter continues from the progress that is stored in the recordings. A separate
thread reads the gauges, so that a hanging driver does not delay the export.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument.agent.child import AgentEnd
from instrument.device.gauge_thread import GaugeSources, Gone
from instrument.errors import ExportError
from instrument.profile.model import Device, Otlp
from instrument.recording.memory import GaugePlace
from instrument.recording.metric_definitions import GAUGES
from instrument.recording.spans import Origin, Sample
from instrument.runtime import agent_socket
from instrument.runtime.faults import logger
from instrument.runtime.lazy_imports import LazyModule, asdict
from instrument.runtime.threads import Thread
from instrument.runtime.unpatched import TIMEOUT_MAX, Empty, SimpleQueue

CLAIM_RETRY_S = 1.0
"""Seconds between two attempts to take over the reading of a process's gauges."""

HANG_S = 10.0
"""Seconds after which the reading of a gauge counts as hanging. Each affected process then gets a note."""

SHORTEST_INTERVAL_NS = 10**6
"""The shortest allowed time between two readings of a gauge, in nanoseconds."""

MOST_DEVICES = 1024

PROC = "/proc"

Send = Callable[[agent_socket.Message], object]


class _WatchedProcess:
    """A process whose gauges the exporter reads. The readings are written into the recording of the process."""

    def __init__(self, pid: int, facts: Mapping[str, Any], fd: int) -> None:
        self._pid = pid
        self._wanted = Device(
            nvml_ns=_parse_interval(facts.get("nvml_ns")), host_ns=_parse_interval(facts.get("host_ns"))
        )
        self._environ: dict[str, str] = {}
        self._sources: GaugeSources | None = None
        self._begin_at = 0.0
        self.store_environment(facts)
        self._place = GaugePlace(fd)

    def store_environment(self, facts: Mapping[str, Any]) -> None:
        self._environ.clear()
        self._environ.update({str(name): str(value) for name, value in dict(facts.get("environ") or {}).items()})

    def close(self) -> None:
        if self._sources is not None:
            self._sources.close()
        self._place.close()

    def wait_s(self) -> float:
        if self._sources is None:
            return max(self._begin_at - time.monotonic(), 0.0)
        wait_ns = self._sources.wait_ns()
        return math.inf if wait_ns is None else wait_ns / 1e9

    def read_due_gauges(self, *, is_last: bool = False) -> Mapping[str, Any] | None:
        """Read the gauges that are due. Return descriptions of the GPUs, and notes on unreadable gauges. Return None
        before the first reading.

        Raises `_UnreadableHereError` if only the process itself can read its gauges, and `Gone` if the process has
        ended.
        """
        if self._sources is None and time.monotonic() >= self._begin_at:
            self._begin_reading()
        sources = self._sources
        if sources is None:
            return None
        if is_last or sources.wait_ns() == 0:
            sources.read_due_gauges(is_last=is_last)
        return {"gpus": [asdict(gpu) for gpu in sources.gpus()], "notes": sources.notes()}

    def store_readings(self, rows: Sequence[Any]) -> None:
        if self._sources is not None:
            now_ns = time.monotonic_ns()
            self._store_samples(
                [Sample(str(name), int(device), now_ns, _parse_reading(value)) for device, name, value in rows]
            )

    def _begin_reading(self) -> None:
        if not self._place.acquire():
            self._begin_at = time.monotonic() + CLAIM_RETRY_S
            return
        if problem := explain_unreliable_gauges(self._pid):
            raise _UnreadableHereError(problem)
        sources = GaugeSources(self._wanted, self._store_samples, self._pid, self._environ)
        sources.find_gauges()
        is_open = sources.open()
        if self._wanted.nvml_ns is not None and not is_open:
            sources.close()
            raise _UnreadableHereError(
                f"the agent cannot read GPUs ({'; '.join(sources.notes()) or 'there is no driver'})"
            )
        self._sources = sources

    def _store_samples(self, samples: Sequence[Sample]) -> None:
        if not self._place.add_readings(
            sample for sample in samples if sample.name in GAUGES and -1 <= sample.device < MOST_DEVICES
        ):
            raise Gone  # another session records there


class _UnreadableHereError(Exception): ...


class GaugeThread:
    """A thread of the exporter that reads gauges of processes. A hanging driver then delays only this thread.

    The exporter's main thread calls the public methods.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._asked: SimpleQueue[tuple[agent_socket.Message, Sequence[int]] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._is_over = False
        self._watched: dict[int, _WatchedProcess] = {}
        self._busy_at = math.inf
        self._reports: dict[int, Mapping[str, Any]] = {}
        """The last report on each process's gauges, by number, without a note on a hanging driver."""
        self._silences: Counter[int] = Counter()
        self._silent: set[int] = set()
        """The processes that were sent a note about the current hang of a driver."""

    def queue_message(self, message: agent_socket.Message, descriptors: Sequence[int]) -> None:
        if descriptors:
            self._reports[int(message["process"])] = {"gpus": [], "notes": []}
        self._asked.put((message, descriptors))
        if self._thread is None:
            self._thread = Thread(self._run, "instrument-gauges", lambda: not self._is_over)
            self._thread.start()

    def report_hanging_driver(self, now: float) -> None:
        """Send each process a note that the driver hangs, if a reading takes longer than `HANG_S`."""
        if now - self._busy_at <= HANG_S:
            self._silent.clear()
            return
        for number in [number for number in list(self._reports) if number not in self._silent]:
            self._silent.add(number)
            self._silences[number] += 1
            self._send_report(number)

    def stop(self) -> None:
        """Ask the thread to end. It ends once the current call of a driver returns."""
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
                    number = int(request[0]["process"])
                    self._run_action(number, partial(self._handle_message, number, *request))
                    request = self._asked.get_nowait()
            self._busy_at = time.monotonic()
            for number in list(self._watched):
                self._run_action(number, partial(self._read_gauges, number))
        for number in list(self._watched):
            self._forget_process(number)

    def _run_action(self, number: int, action: Callable[[], object]) -> None:
        try:
            action()
        except Gone:
            self._forget_process(number)
        except _UnreadableHereError as problem:
            self._return_gauges(number, str(problem))
        except Exception as problem:  # a process may say anything
            self._return_gauges(number, f"{type(problem).__name__}: {problem!s:.200}")

    def _handle_message(self, number: int, message: agent_socket.Message, descriptors: Sequence[int]) -> None:
        if descriptors:
            self._forget_process(number)
            try:
                self._watched[number] = _WatchedProcess(int(message["pid"]), message["gauges"], descriptors[0])
                self._reports[number] = {}
            finally:
                os.close(descriptors[0])
        elif number not in self._watched:
            self._send_gauges(number, {"ended": True})
        elif "readings" in message:
            self._watched[number].store_readings(message["readings"])
        elif "ended" in message:
            self._forget_process(number)
        elif message["gauges"] is None:
            self._run_action(number, partial(self._read_gauges, number, is_last=True))
            self._forget_process(number)
            self._send_gauges(number, {"ended": True})
        else:
            self._watched[number].store_environment(message["gauges"])

    def _read_gauges(self, number: int, *, is_last: bool = False) -> None:
        report = self._watched[number].read_due_gauges(is_last=is_last)
        if report is not None and report != self._reports[number]:
            self._reports[number] = report
            self._send_report(number)

    def _send_report(self, number: int) -> None:
        report, count = self._reports.get(number, {}), self._silences[number]
        notes = list(report.get("notes", ()))
        if count:
            often = "" if count == 1 else f", {count} times"
            notes.append(
                f"device: the agent's exporter read no gauges for more than {HANG_S:g} s{often}: a driver did not "
                "answer; look for messages of the driver in the system's log"
            )
        self._send_gauges(number, {"gpus": report.get("gpus", []), "notes": notes})

    def _return_gauges(self, number: int, why: str) -> None:
        self._forget_process(number)
        self._send_gauges(number, {"yours": why})

    def _forget_process(self, number: int) -> None:
        self._reports.pop(number, None)
        watched = self._watched.pop(number, None)
        if watched is not None:
            watched.close()

    def _send_gauges(self, number: int, gauges: Mapping[str, Any]) -> None:
        self._send({"process": number, "gauges": gauges})


def explain_unreliable_gauges(pid: int) -> str:
    """Return the reason why the gauges of another process cannot be read reliably here, or an empty string."""
    try:
        own_namespace, namespace = (os.readlink(f"{PROC}/{name}/ns/mnt") for name in ("self", pid))  # noqa: PTH115 - no file to find
    except OSError as problem:
        return f"it may not look at the process ({problem.strerror})"
    return "" if own_namespace == namespace else "it is in another container"


def _parse_interval(stored: Any) -> int | None:
    interval_ns = None if stored is None else int(stored)
    return interval_ns and max(interval_ns, SHORTEST_INTERVAL_NS)


def _parse_reading(reading: Any) -> float | None:
    value = None if reading is None else float(reading)
    if value is not None and not math.isfinite(value):
        raise ValueError("a reading without an end")
    return value


if TYPE_CHECKING:
    from instrument.agent import scrapes
    from instrument.otlp import delivery, export_facts, export_loop, file_exports, recording_export, senders
    from instrument.otlp.metrics_queue import Metered
    from instrument.recording.distributions import Metric
else:  # a run that has only its gauges read needs no numpy
    scrapes, senders = LazyModule("instrument.agent.scrapes"), LazyModule("instrument.otlp.senders")
    export_facts, export_loop = LazyModule("instrument.otlp.export_facts"), LazyModule("instrument.otlp.export_loop")
    delivery, file_exports = LazyModule("instrument.otlp.delivery"), LazyModule("instrument.otlp.file_exports")

READ_INTERVAL_S = 0.25
"""Seconds between two reads of all recordings. If a ring overwrites rows in less time, those rows are lost."""

BUSY_READ_INTERVAL_S = 0.02
"""Seconds between two reads of all recordings while spans wait to be sent."""

MOST_EXPORTERS = 8
"""The maximum number of `Exporter` objects, one per collector. Beyond it, unused objects are stopped."""

MOST_MESSAGE_CHARACTERS = 1000
"""The maximum number of characters of a warning that the agent prints for the exporter."""


def import_without_tls() -> None:
    """Import the modules of the exporter without `ssl` and other optional modules. This saves 3 MB of memory. Later
    imports load the optional modules."""
    hidden = dict.fromkeys(name for name in ("ssl", "_hashlib", "typing_extensions") if name not in sys.modules)
    sys.modules.update(hidden)  # type: ignore[arg-type]
    try:
        senders.import_once("http.client")
        import_module("instrument.otlp.export_loop")
    finally:
        for name in (*hidden, *(["http.client"] if "ssl" in hidden else [])):
            del sys.modules[name]


class _AgentLogHandler(logging.Handler):
    """A logging handler that sends warnings to the agent, which prints them to the standard error of the runs."""

    def __init__(self, send: Callable[[agent_socket.Message], object]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send({"said": record.getMessage()[:MOST_MESSAGE_CHARACTERS]})


class ExporterChild:
    """The exporter, a child process of the agent. `connection` connects it to the agent."""

    def __init__(self, connection: socket.socket) -> None:
        self._agent = AgentEnd(connection)
        self._gauges = GaugeThread(self._agent.send)
        self._exporters: dict[Otlp | None, delivery.Exporter] = {}
        self._settings: dict[int, Otlp | None] = {}
        self._scopes: dict[int, list[scrapes.Scope]] = {}
        """The scrape scopes of each recording, by the recording's number."""
        self._scrapes: scrapes.Scrapes | None = None
        self._folder: Path | None = None
        self._ends_at = 0.0
        logger.addHandler(_AgentLogHandler(self._agent.send))
        logger.propagate = False

    def serve(self) -> None:
        """Serve until the agent asks the exporter to end, or until the agent is gone."""
        has_more = False
        while not self._ends_at:
            wait_s = BUSY_READ_INTERVAL_S if self._exporters and self._loop.is_paused else READ_INTERVAL_S
            for message, descriptors in self._agent.receive(0 if has_more else wait_s):
                self._handle_message(message, descriptors)
            if self._agent.has_gone:
                return
            self._gauges.report_hanging_driver(time.monotonic())
            if self._scrapes is not None:
                self._scrapes.answer_waiting(self._read_metrics)
            if self._exporters:
                has_more = self._loop.read_and_settle()
                self._loop.end_settled_exports()
        if self._exporters:
            self._end_exports()
        self._gauges.stop()

    def _end_exports(self) -> None:
        is_unread = True
        while is_unread:
            self._loop.read_remaining_rows(self._ends_at)
            for sender in self._exporters.values():
                sender.send_soon()  # all at the same time: one slow collector delays no other
            is_unread = self._loop.await_earlier_sessions(self._ends_at)
        for sender in self._exporters.values():
            sender.stop(max(round((self._ends_at - time.monotonic()) * 1e9), 0))
        self._loop.end_datasets(self._ends_at)
        for number in list(self._loop.recordings):
            self._loop.end_export(number)

    @cached_property
    def _loop(self) -> export_loop.ExportLoop:
        import_without_tls()
        return export_loop.ExportLoop(
            self._report_export_end,
            lambda rows: self._agent.send({"dataset": rows}),
            self._note_silent_processes,
            self._agent.wake_receiver,
        )

    @cached_property
    def _ended_metrics(self) -> scrapes.EndedMetrics:
        return scrapes.EndedMetrics(self._folder)

    def _note_silent_processes(self) -> None:
        for sender in self._exporters.values():
            sender.log_collector_silence()

    # ---------------------------------------------------------------- the agent

    def _handle_message(self, message: agent_socket.Message, descriptors: list[int]) -> None:
        if "process" in message:
            self._gauges.queue_message(message, descriptors)
        elif "export" in message:
            number = int(message["export"])
            self._loop.attempt_on_recording(number, partial(self._begin_export, number, message, descriptors))
        elif "folder" in message:
            self._folder = Path(message["folder"])
        elif "listen" in message or "scrape" in message:
            self._begin_scrapes(message, *descriptors)
        elif "end" in message:
            self._ends_at = time.monotonic() + float(message["end"])
        elif self._exporters:
            (name,) = message.keys() & {"ended", "flush", "window"}
            number = int(message[name])
            if (export := self._loop.recordings.get(number)) is not None:
                actions: dict[str, Callable[[], object]] = {
                    "ended": partial(setattr, export, "has_ended", True),
                    "flush": partial(self._loop.send_now, export),
                    "window": partial(
                        self._loop.send_window, export, int(message.get("begin_ns", 0)), int(message.get("end_ns", 0))
                    ),
                }
                self._loop.attempt_on_recording(number, actions[name])

    def _begin_scrapes(self, message: Mapping[str, Any], descriptor: int) -> None:
        try:
            self._scrapes = self._scrapes or scrapes.Scrapes(self._agent.wake_receiver)
        except ExportError as problem:
            os.close(descriptor)
            self._agent.send({"said": f"export.prometheus: {problem}"})
            return
        if "listen" in message:
            self._scrapes.listen(descriptor, str(message["listen"]))
        else:
            self._scrapes.answer_scrape(descriptor, str(message["scrape"]))

    def _read_metrics(self, scope: scrapes.Scope) -> tuple[list[Metered], dict[str, list[Metric]]]:
        exports = [export for number, export in self._loop.recordings.items() if scope in self._scopes[number]]
        metered_of = self._loop.read_current_metrics(exports)
        return list(metered_of.values()), self._ended_metrics.sum_by_service(scope, metered_of)

    # ---------------------------------------------------------------- recordings

    def _begin_export(self, number: int, message: Mapping[str, Any], descriptors: list[int]) -> None:
        settings, run, disk_bytes = message["settings"], str(message["run"]), int(message.get("disk_bytes") or 0)
        listens = settings.get("prometheus")
        self._scopes[number] = [("run", run), *([("listen", str(listens))] if listens else [])]
        (fd,) = descriptors
        try:
            otlp = None if settings.get("otlp") is None else export_facts.decode_collector_settings(settings["otlp"])
            generation = int(message.get("generation", 0))
            export = self._loop.begin_export(
                number, fd, self._get_or_start_exporter(otlp), generation, sends=otlp is not None
            )
        finally:
            os.close(fd)
        self._settings[number] = otlp
        export.is_scraped = bool(listens or message["is_scraped"])
        if folder := settings.get("captures"):
            self._loop.begin_kept_files(number, Path(folder), run, disk_bytes)
        if settings.get("parquet"):
            self._loop.attempt_on_dataset(partial(self._begin_dataset, export, settings["parquet"], run, disk_bytes))

    def _begin_dataset(
        self, export: recording_export.RecordingExport, settings: Mapping[str, Any], run: str, disk_bytes: int
    ) -> None:
        file_exports.limit_pyarrow()
        self._loop.begin_dataset(export, file_exports.decode_dataset_settings(settings), run, disk_bytes)

    def _get_or_start_exporter(self, settings: Otlp | None) -> delivery.Exporter:
        if settings not in self._exporters:
            self._stop_unused()
            origin = Origin(os.getpid(), "", 0, 0)
            sender = delivery.Exporter(settings or Otlp(), origin, dict, detects=False, sends=settings is not None)
            if settings is not None:
                sender.start()
            self._exporters[settings] = sender
        return self._exporters[settings]

    def _stop_unused(self) -> None:
        used = set(self._settings.values())
        unused = [
            otlp for otlp, sender in self._exporters.items() if otlp not in used and not sender.count_fates()["pending"]
        ]
        for settings in unused[: max(len(self._exporters) - MOST_EXPORTERS + 1, 0)]:
            self._exporters.pop(settings).stop(0)

    def _report_export_end(self, number: int, ended: export_loop.EndedExport) -> None:
        self._settings.pop(number, None)
        scopes, problem = self._scopes.pop(number, []), ended.problem
        if ended.metered is not None:
            self._ended_metrics.add_metrics(ended.key, scopes, ended.metered)
        text = "" if problem is None else f"{type(problem).__name__}: {problem!s:.500}"
        self._agent.send({"done": number, "fates": ended.fates, "problem": text})
