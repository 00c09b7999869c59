"""The export of a running session.

The session reads and sends spans in this process, or leaves both to the agent. The module `handover` makes this choice.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from instrument.errors import ExportError
from instrument.profile.model import Otlp
from instrument.recorder.recorder import RECORDER
from instrument.recording.export_checkpoint import SENT, losses_by_name
from instrument.recording.trace_context import encode_parent
from instrument.runtime import environment
from instrument.runtime.faults import FAULTS
from instrument.runtime.lazy_imports import LazyModule, dataclass
from instrument.runtime.unpatched import TIMEOUT_MAX, RLock
from instrument.sessions.handover import ABANDONED, GaugeWatch
from instrument.sessions.membership import Membership
from instrument.sessions.published_facts import PublishedFacts
from instrument.sessions.recorded import Recorded
from instrument.sessions.window_files import Saving

if TYPE_CHECKING:
    from instrument.otlp import delivery as sending
    from instrument.otlp import export_loop, metrics_queue, recording_reader, service_sdk
    from instrument.otlp.export_loop import EndedExport, ExportLoop
    from instrument.otlp.recording_export import RecordingExport
else:
    sending, service_sdk = LazyModule("instrument.otlp.delivery"), LazyModule("instrument.otlp.service_sdk")
    recording_reader = LazyModule("instrument.otlp.recording_reader")
    export_loop = LazyModule("instrument.otlp.export_loop")
    metrics_queue = LazyModule("instrument.otlp.metrics_queue")

FLUSH_POLL_S = 0.01
"""Seconds between checks while `flush` waits for the agent."""

SCRAPE_WAIT_S = 1.0
"""Seconds for which a scrape waits for a busy session. After that, the scrape gets the previous metrics."""

GAUGE_AGE_LIMIT_NS = 30 * 10**9
"""The time in ns after which a reading of a gauge is too old for a scrape."""

NO_AGENT = (
    "export.prometheus and capture.to: asked of the agent of a run, found none; nothing listens and nothing is written "
    "meanwhile (one begins unless the profile says `agent: off`, or `INSTRUMENT_AGENT` is empty)"
)


class SessionLock:
    """A re-entrant lock. Signals that arrive while its thread has the lock can be postponed until the release."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._postponed: list[int] = []

    @contextmanager
    def acquire_within(self, timeout_s: float = -1) -> Iterator[bool]:
        """Acquire the lock for a `with` block. Yield False if `timeout_s` passes first. Postponed signals are sent
        again after the release."""
        is_acquired = self._lock.acquire(timeout=timeout_s)
        try:
            yield is_acquired
        finally:
            if is_acquired:
                self._lock.release()
            if self._postponed and not self._is_owned():
                numbers, self._postponed = self._postponed, []
                for number in dict.fromkeys(numbers):
                    os.kill(os.getpid(), number)

    def postpone_signal(self, number: int) -> bool:
        """Return True if the calling thread has the lock, and postpone the signal until the release."""
        if self._is_owned():
            self._postponed.append(number)
        return self._is_owned()

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())


@dataclass(eq=False)
class Exporting:
    """The export of one session. All methods may be called from any thread.

    `_while_no_fork_comes(function)` delays forks until the function has imported modules. `_start_reading()` starts the
    thread that calls `export_new_rows`, if needed.
    """

    _recorded: Recorded
    _facts: PublishedFacts
    _saving: Saving
    _membership: Membership
    _gauge_watch: GaugeWatch
    _while_no_fork_comes: Callable[[Callable[[], object]], None]
    _start_reading: Callable[[], None]

    def __post_init__(self) -> None:
        recorded = self._recorded
        self._exporter, self.handover = recorded.exporter, recorded.handover
        self.lock = SessionLock()
        """The lock that guards the profile in force, and the reader of the recording."""
        self._scraped_here: metrics_queue.Metered | None = None
        """The metrics that the last scrape returned for this process alone."""
        self._scraped: dict[bool, str] = {}
        """The last answers of the agent to scrapes. The key is True for OpenMetrics."""
        self._announced_join = 0
        self.loop: ExportLoop | None = None
        """The reader of this process's own recording, None if the agent reads it, nobody does, or its export has
        ended."""
        self._read_by: sending.Exporter | None = None
        """The exporter for the rows that `loop` reads, None if this process has not begun to read its recording."""
        self._problem: Exception | None = None

    def after_fork_in_child(self) -> None:
        if self.loop is not None:
            self.loop.after_fork_in_child()
        self._announced_join, self.loop, self._read_by = 0, None, None
        if self._exporter is not None:
            self._exporter.after_fork_in_child()
            self._exporter.own.origin = self._recorded.origin()
        self.handover.after_fork_in_child()
        self._choose_export_process()

    def prepare_export(self) -> None:
        if self._exporter is not None:
            self._exporter.import_sending_modules()
            RECORDER.remote_parent = lambda: encode_parent(service_sdk.read_current_span())
        self._choose_export_process()

    # ---------------------------------------------------------------- who exports

    def join_agent(self) -> bool:
        """Connect to the run's agent, if there is one. Return False if the profile says `agent: off`."""
        account = self._recorded.account
        if self._facts.needs_agent_to_export and not self._facts.can_have_agent():
            account.complain(NO_AGENT)
        if self._recorded.profile.agent == "off":
            return False
        self._facts.publish()
        if (problem := self._membership.join()) and not self._membership.can_begin_agent():
            account.complain(f"{problem}; the recording of this process ends with it", log=False)
        return True

    def _choose_export_process(self) -> None:
        """Leave the export to the agent if the run can have one, else export here. The choice is final."""
        if self._is_left_to_agent() and self._exporter is not None and RECORDER.memory_fd >= 0:
            self.handover.is_here, self.handover.has_agent = False, True
        if self._exporter is not None:  # an agent joins the requests of its run, and leaves them their own traces
            run = environment.shared_run_name() or ("" if self.handover.has_agent else environment.read_run_name())
            if run != self._exporter.own.ids.run:
                self._exporter.own.ids.run = run
                self._facts.publish()
            if self.handover.is_here:
                self._begin_loop(self._exporter)
        elif self._recorded.profile.export.parquet is not None and not self._is_left_to_agent():
            self._begin_loop(self._make_idle_exporter())
            self.handover.writes_dataset = True

    def _is_left_to_agent(self) -> bool:
        return self._recorded.profile.agent != "off" and self._membership.can_have_agent()

    def _make_idle_exporter(self) -> sending.Exporter:
        return sending.Exporter(Otlp(), self._recorded.origin(), RECORDER.read_thread_names, detects=False, sends=False)

    def _begin_loop(self, sender: sending.Exporter) -> None:
        """Create the loop that reads the recording. No fork may happen meanwhile, because a child would inherit a
        half-done import."""
        self._read_by = sender
        self.loop = export_loop.ExportLoop(
            self._note_export_end, lambda rows: self.handover.left.update(losses_by_name({"unstored": rows}))
        )

    def _note_export_end(self, _: int, ended: EndedExport) -> None:
        self.loop, self._problem = None, ended.problem
        self.handover.left |= losses_by_name({"unread": ended.fates.get("unread", 0)})

    def _read_own_recording(self, read: Callable[[ExportLoop, RecordingExport], bool]) -> bool:
        """Call `read`, which reads new rows of this process. Return the result of `read`. Return True without a
        recording. An error ends the export and returns True."""
        loop, sender = self.loop, self._read_by
        if loop is None or sender is None or RECORDER.memory_fd < 0:
            return True
        try:
            result = read(loop, loop.recordings.get(0) or self._open_recording(loop, sender))
        except Exception as fault:
            loop.end_export(0, fault)
            result = True
        problem, self._problem = self._problem, None
        if problem is not None:
            FAULTS.note("export of the recording", problem)
        return result

    def _open_recording(self, loop: ExportLoop, sender: sending.Exporter) -> RecordingExport:
        """Open this process's recording, to continue where the last exporter stopped."""
        settings = self._recorded.dataset_settings()
        export = loop.begin_export(0, RECORDER.memory_fd, sender, sends=sender is self._exporter)
        if settings is not None:
            key = f"{os.uname().nodename} {os.getpid()}"  # containers may share the folder of its journal
            disk_bytes = self._recorded.profile.limits.disk_bytes
            loop.attempt_on_dataset(partial(loop.begin_dataset, export, settings, key, disk_bytes))
        return export

    def publish_facts(self, *, is_joined: bool) -> None:
        self._facts.publish_resource()
        self._facts.publish_losses_and_costs()
        joined = self._membership.joins if is_joined else 0
        self._gauge_watch.send_updates()
        self._facts.publish_verdicts()
        if joined != self._announced_join and joined and self._recorded.selection.has_begun_request():
            self._announced_join = joined
            self._membership.send({"requests": True})

    def handle_agent_message(self, message: Mapping[str, Any]) -> None:
        if "unexported" in message:
            self.handover.is_refused = True
        if "gauges" in message:
            self._gauge_watch.handle_message(message["gauges"])
        if isinstance(ports := message.get("connections"), list):
            self._recorded.selection.note_connections(ports)

    def sends_spans_to(self, settings: Otlp) -> bool:
        """Return True if the session's own export sends spans to the same endpoint with the same headers."""
        of_session = self._recorded.profile.export.otlp
        if self._exporter is None or of_session is None:
            return False
        return (of_session.endpoint, of_session.headers) == (settings.endpoint, settings.headers)

    def send_window(self, begin_ns: int, end_ns: int) -> None:
        """Make the session's export send all spans of an interval, also spans that `capture` would drop.

        Raises `ExportError` if the agent does not answer, or if the collector has not accepted earlier spans.
        """
        if not self.handover.is_here:
            problem = "the agent of the run does not answer"
            is_sent = self._membership.send({"window": [begin_ns, end_ns]})
        else:
            with self.lock.acquire_within():
                problem = "the collector has not accepted earlier spans" if self.loop else "the export has ended"
                is_sent = self._read_own_recording(lambda loop, export: loop.send_window(export, begin_ns, end_ns))
                is_sent = is_sent and self.loop is not None
        if not is_sent:
            self.count_loss("windows of which only spans that `capture` keeps are sent", 1)
            raise ExportError(f"a window was not sent, because {problem}; spans that `capture` keeps are sent later")

    def count_loss(self, reason: str, count: int) -> None:
        with self.lock.acquire_within():
            self._recorded.account.count_loss(reason, count)

    # ---------------------------------------------------------------- while it runs

    def needs_reader_thread(self) -> bool:
        recorded = self._recorded
        is_read = self.loop is not None or recorded.profile.schedule is not None
        return is_read or recorded.profile.budget is not None or recorded.ticks.is_counter_used

    def export_new_rows(self, timeout_s: float = -1, *, meters: bool = False) -> None:
        """Read and export the rows since the last call. With `meters`, send metrics, too."""
        recorded, cut = self._recorded, self._recorded.windows.cut
        with self.lock.acquire_within(timeout_s) as is_acquired:
            if not is_acquired or not (self.needs_reader_thread() or cut):
                return
            if self._exporter is not None:
                self._exporter.own.update_clock_origin()
            recorded.ticks.check_counter(time.monotonic_ns())
            recorded.budget.enforce_budget()
            recorded.windows.read_new_rows()
            if self.loop is not None:
                self._facts.publish_resource()
                self._facts.publish_losses_and_costs(at_once=meters)
                self._read_own_recording(lambda loop, export: loop.read_new_rows(metered=export if meters else None))
            while cut:
                window, origin = cut.popleft()
                self._saving.write_window(*window, origin)

    def prometheus(self, *, openmetrics: bool = False) -> str:
        from instrument.otlp import exposition

        exposition.require_prometheus()
        why_alone = "agent: off" if self._recorded.profile.agent == "off" else "for it has no agent"
        if self._facts.can_have_agent():
            try:
                self._scraped[openmetrics] = self._membership.fetch_metrics(self._saving.run, openmetrics=openmetrics)
            except TimeoutError:
                pass  # the answer is the last one
            except OSError:
                self._scraped.clear()
            if openmetrics in self._scraped:
                return self._scraped[openmetrics]
            why_alone = "for its agent does not answer"
        if not (self._exporter or self._read_by) and RECORDER.memory_fd >= 0:
            FAULTS.attempt("reading for a scrape", partial(self._while_no_fork_comes, self._begin_reading_for_scrapes))
            self._start_reading()
        nothing = metrics_queue.Metered(self._recorded.origin(), None, [], ())
        metered = self._read_own_metrics() or self._scraped_here or nothing
        self._scraped_here = metered
        return exposition.format_metrics(exposition.metrics_of_process(metered, why_alone), openmetrics=openmetrics)

    def _begin_reading_for_scrapes(self) -> None:
        self._begin_loop(self._make_idle_exporter())
        self._facts.is_scraped = True
        self._facts.publish()

    def _read_own_metrics(self) -> metrics_queue.Metered | None:
        with self.lock.acquire_within(SCRAPE_WAIT_S) as is_acquired:
            if not is_acquired:
                return None
            metered_of: dict[str, metrics_queue.Metered] = {}
            if self.loop is not None:
                self._facts.publish_losses_and_costs(at_once=True)
                self._read_own_recording(lambda loop, _: loop.read_new_rows())
                self._read_own_recording(
                    lambda loop, export: bool(metered_of.update(loop.read_current_metrics([export])))
                )
            gauges = self._recorded.gauges
            samples = RECORDER.make_reader().read_samples(time.monotonic_ns() - GAUGE_AGE_LIMIT_NS)
            snapshot = next((metered.snapshot for metered in metered_of.values()), None)
            return metrics_queue.Metered(self._recorded.origin(), snapshot, samples, gauges.gpus())

    # ---------------------------------------------------------------- what is still on its way

    def flush(self, timeout_s: float = 5.0) -> sending.Delivery | None:
        """Send all finished spans to the collector. Wait up to `timeout_s` seconds for its answers. Return the counts
        of delivered and undelivered spans, or None without a collector."""
        end = time.monotonic() + timeout_s
        self.export_new_rows(min(max(timeout_s, 0.0), TIMEOUT_MAX), meters=True)
        if self._exporter is None:
            return None
        if self.loop is not None:
            self._flush_own_export(end)
        elif not self.handover.is_here:
            return self.flush_by_agent(end)[0]
        return self._exporter.flush(round(max(min(end - time.monotonic(), TIMEOUT_MAX), 0.0) * 1e9))

    def _await_device_times(self, end: float) -> None:
        if (timing := self._recorded.timing) is not None:
            timing.await_device_times(
                time.monotonic_ns(), min(end, time.monotonic() + recording_reader.DEVICE_WAIT_NS / 1e9)
            )

    def _flush_own_export(self, end: float) -> None:
        self._await_device_times(end)
        self._facts.publish_losses_and_costs(at_once=True)
        is_done = False
        while not is_done:
            with self.lock.acquire_within(min(max(end - time.monotonic(), 0.0), TIMEOUT_MAX)) as is_acquired:
                is_done = not is_acquired or self._read_own_recording(export_loop.ExportLoop.send_now)
            is_done = is_done or time.monotonic() > end
            if not is_done:
                time.sleep(FLUSH_POLL_S)

    def flush_by_agent(self, end: float, patience_s: float = math.inf) -> tuple[sending.Delivery, int]:
        """Let the agent send all finished spans. Wait until `end` (`time.monotonic`), or until the agent makes no
        progress for `patience_s` seconds. Return the delivery and the number of unsent spans."""
        handover, recorded, asked_ns = self.handover, count_recorded_rows(), time.monotonic_ns()
        self._await_device_times(end)  # the agent does so, too
        self._facts.publish_losses_and_costs(at_once=True)
        seen_rows, seen_at, joins = -1, 0.0, -1
        while True:
            if joins != self._membership.joins:  # another agent may have come meanwhile
                joins = self._membership.joins
                self._membership.send({"flush": True})
            progress = handover.progress()
            fates = progress.fates
            sent_counts = {fate: fates[fate] for fate in SENT}
            pending = fates["kept"] - sum(sent_counts.values())
            now, before, seen_rows = time.monotonic(), seen_rows, fates["seen"] + fates["missed"]
            is_starting = self._membership.is_connected() and not (handover.is_export_taken() or handover.is_refused)
            is_awaited = seen_rows != before or pending or is_starting
            seen_at = now if is_awaited else seen_at
            is_read = seen_rows >= recorded and progress.settled_ns >= asked_ns
            settled = is_read and not pending and self._are_metrics_settled(asked_ns)
            if handover.is_left_unexported():  # what it has read and not sent is lost, and counted so
                end = pending = 0
            if settled or now >= end or (seen_rows < recorded and now - seen_at > patience_s):
                delivery = sending.Delivery(offered=fates["kept"], pending=pending, settled=settled, **sent_counts)  # type: ignore[arg-type]
                return delivery, max(recorded - seen_rows, 0) + pending
            time.sleep(FLUSH_POLL_S)

    def _are_metrics_settled(self, asked_ns: int) -> bool:
        if not (self._facts.asks_for_metrics or self._recorded.gauges.has_readable_gauges):
            return True
        metered = self.handover.agent_metrics()
        return metered is not None and metered.settled_ns >= asked_ns

    # ---------------------------------------------------------------- the end

    def replace_lost_agent(self) -> None:
        """Start another agent if the run has lost its agent. If that fails, the unexported spans count as lost."""
        if self.handover.is_here or not count_recorded_rows() or self._membership.is_connected():
            return
        if not self._membership.join(begins=True):
            return
        if count := self.flush_by_agent(0.0)[1]:
            self.handover.left = {ABANDONED: count}

    def export_rest(self, until: float) -> None:
        """Export the remaining rows if this process reads its own recording. `until` is a time of `time.monotonic`."""

        def read_rows(loop: ExportLoop, export: RecordingExport) -> bool:
            export.has_ended = True
            loop.read_remaining_rows(until)
            export.settle_remaining_spans()
            loop.end_datasets(until)
            return True

        self._read_own_recording(read_rows)

    def finish_export(self, *, has_delivered: bool) -> None:
        loop, self.loop = self.loop, None
        if not has_delivered and self._exporter is not None:
            if loop is not None:
                FAULTS.attempt("end of the export", loop.close)
            self._exporter.stop(0)
        for export in () if loop is None else loop.recordings.values():
            export.has_ended = True
        if loop is not None:
            FAULTS.attempt("end of the export", partial(loop.end_export, 0))


def count_recorded_rows() -> int:
    recorded: int = sum(ring.head for ring in RECORDER.rings()) + RECORDER.ended_rows
    return recorded
