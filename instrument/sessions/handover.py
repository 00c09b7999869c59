"""The handover of work from this process to its agent: the export of the recording, and the reading of gauges.

The agent of a process reads and exports the process's recording. If the agent is killed, the next agent continues from
the checkpoint in the recording. A session without an agent exports by itself.

Only the process can read torch's allocator, so the process sends the allocator's values to the agent. The process reads
all gauges itself if no agent does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from instrument.clock import Deadline
from instrument.device.gauge_thread import RARELY_NS, Gauges
from instrument.device.gpu_gauges import ORDER, VARIABLE
from instrument.recorder.recorder import RECORDER
from instrument.recording import export_checkpoint
from instrument.recording.export_checkpoint import DAMAGED, ExportCheckpoint, MeterState, Progress
from instrument.recording.memory import GaugePlace
from instrument.recording.memory_layout import RecordingHead, read_generation
from instrument.recording.spans import Gpu
from instrument.runtime import environment
from instrument.runtime.faults import FAULTS
from instrument.runtime.lazy_imports import dataclass
from instrument.sessions.membership import Membership

if TYPE_CHECKING:
    from instrument.otlp.delivery import Exporter
    from instrument.otlp.metrics_queue import Metrics

Value = TypeVar("Value")

LAST_READ_S = 5.0
"""Seconds for which a new session waits for the agent to read the rows of the previous session."""

UNREAD = "spans of the session before this one that its agent had not read"
UNDELIVERED = "spans on their way by the agent of the run, which reports those that it loses"
UNREPORTED = "spans on their way by the agent of the run, whose losses are not printed"
ABANDONED = "spans that no agent has exported: that of the run has gone, and no other one could begin"

LOOK_S = 0.005


class Handover:
    """The record of which process exports a session's recording: this one, or the run's agent."""

    def __init__(self, exporter: Exporter | None) -> None:
        self._exporter = exporter
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        self.is_here = True
        """True if this process exports its own recording."""
        self.writes_dataset = False
        """True if this process writes a dataset, and sends no spans."""
        self.has_agent = False
        """True if an agent of the run exports the recordings that it can read."""
        self.is_refused = False
        """True if the agent has reported that it cannot export this recording."""
        self.left: dict[str, int] = {}
        """Counts of spans that were not delivered as the session ended, by reason."""

    def is_left_unexported(self) -> bool:
        """Return True if the agent has refused or ended the export, so that no process reads the recording."""
        return self.is_refused and not self.is_export_taken()

    def note_undelivered_spans(self, count: int, *, is_reported: bool) -> None:
        reason = UNDELIVERED if is_reported else UNREPORTED
        self.left = {export_checkpoint.UNREAD if self.is_left_unexported() else reason: count} if count else {}

    def _read_checkpoint(self, read: Callable[[ExportCheckpoint], Value], default: Value) -> Value:
        try:
            if RECORDER.memory_fd >= 0:
                with closing(ExportCheckpoint(RECORDER.memory_fd)) as place:
                    return read(place)
        except OSError:
            pass
        return default

    def is_export_taken(self) -> bool:
        return self._read_checkpoint(ExportCheckpoint.is_taken, default=False)

    def await_agent_reading(self, recorded: int, *, metered: bool, is_left: Callable[[], bool]) -> int:
        """Wait until the agent has read all rows of the last session. A new session overwrites these rows. Return the
        number of unread rows.

        With `metered`, the rows must also be in the agent's metrics. `is_left()` returns True if an agent will read the
        rows.
        """
        end = time.monotonic() + LAST_READ_S
        while True:
            is_taken, progress = self.is_export_taken(), self.progress()
            unread_rows = recorded - progress.fates["seen"] - progress.fates["missed"]
            if progress.is_reported or (unread_rows <= 0 and not (metered and self._count_metered_rows() < recorded)):
                return 0
            if not is_taken and (progress.generation or not is_left()):
                return max(unread_rows, 0) if progress.generation else 0
            if time.monotonic() > end:
                return max(unread_rows, 0)
            time.sleep(LOOK_S)

    def _count_metered_rows(self) -> int:
        state = self.agent_metrics()
        ended_rows = self._read_checkpoint(lambda place: RecordingHead(place.fileno()).header_number("ended_rows"), 0)
        return ended_rows + sum(state.places.values()) if state is not None else 0

    def progress(self) -> Progress:
        """Return the agent's export progress in this session. `Progress.before` has unreported counts of the previous
        session."""

        def read_session_progress(place: ExportCheckpoint) -> Progress:
            progress = place.read_progress()
            is_of_now = progress.generation == read_generation(place.fileno())
            return progress if is_of_now else Progress(before=progress.unreported_counts())

        return self._read_checkpoint(read_session_progress, Progress())

    def agent_metrics(self) -> MeterState | None:
        def read_meter_state(place: ExportCheckpoint) -> MeterState | None:
            state = place.read_meter_state()
            return state if state is not None and state.generation == read_generation(place.fileno()) else None

        return self._read_checkpoint(read_meter_state, None)

    def restore_metrics(self) -> Metrics | None:
        exporter = self._exporter
        if exporter is None:
            return None
        metrics, state = exporter.make_metrics_queue(environment.metrics_variables()), self.agent_metrics()
        if state is not None:
            with suppress(*DAMAGED):
                metrics.restore_state(state.delivered)
        return metrics

    def losses(self) -> Mapping[str, int]:
        progress = self.progress()
        fates = progress.unreported_counts() if self.is_left_unexported() else progress.fates
        if self._exporter is None and not self.writes_dataset:  # an agent may write files nevertheless
            fates = {fate: fates[fate] for fate in ("unwritten", "unstored")}
        return {**export_checkpoint.losses_by_name(fates), **self.left}


# The gauges


LAST_READING_S = 0.5
"""The maximum seconds for which `stop` waits for the agent's last reading of gauges."""


@dataclass(eq=False)
class GaugeWatch:
    """Reads a process's gauges, through the agent or on a thread here. `_changed()` is called when the list of GPUs
    changes. Only one thread at a time may call `begin` and `stop`."""

    _gauges: Gauges
    _membership: Membership
    _changed: Callable[[], object]

    def __post_init__(self) -> None:
        self._claim: GaugePlace | None = None
        self._reset()

    def _reset(self) -> None:
        self._has_begun = self._has_stopped = False
        self._sent_settings: Mapping[str, Any] | None = None
        self._torch_ns = 0

    def after_fork_in_child(self) -> None:
        self._close_claim()
        self._reset()

    def make_settings_for_agent(self) -> Mapping[str, Any] | None:
        if not self._gauges.has_readable_gauges:
            return None
        settings = self._gauges.readable_settings()
        environ = {name: os.environ[name] for name in (VARIABLE, ORDER) if name in os.environ}
        self._sent_settings = {"nvml_ns": settings.nvml_ns, "host_ns": settings.host_ns, "environ": environ}
        return self._sent_settings

    # ---------------------------------------------------------------- who reads

    def begin(self) -> None:
        self._has_begun = True
        if not (self._membership.can_have_agent() and RECORDER.memory_fd >= 0):
            self._start_own_thread()

    def _start_own_thread(self) -> None:
        if self._has_stopped or self._gauges.is_reading or not self._gauges.has_readable_gauges:
            return
        if self._membership.path and RECORDER.memory_fd >= 0:
            with suppress(OSError):
                self._claim = GaugePlace(RECORDER.memory_fd)
                if not self._claim.acquire():
                    self._close_claim()
                    return
        self._gauges.begin()

    def _close_claim(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.close()

    def send_updates(self) -> None:
        if not self._has_begun or self._has_stopped or not self._gauges.has_readable_gauges or RECORDER.memory_fd < 0:
            return
        if not self._gauges.is_reading and self._membership.is_joined:
            before = self._sent_settings
            if self.make_settings_for_agent() != before:
                self._membership.send({"gauges": self._sent_settings})
            self._send_torch_memory()

    def handle_message(self, message: Any) -> None:
        if not isinstance(message, dict):
            return
        if "yours" in message:
            why = f"device: a thread of this process reads the gauges, not the agent: {message['yours']!s}"
            self._gauges.store_agent_gpus((), [why])
            if self._has_begun:
                self._start_own_thread()
        elif "gpus" in message:
            gpus = [Gpu(int(gpu["device"]), str(gpu["model"]), str(gpu["uuid"])) for gpu in message["gpus"]]
            self._gauges.store_agent_gpus(gpus, [str(note) for note in message["notes"]])
            self._changed()

    # ---------------------------------------------------------------- what the agent does not know

    def _send_torch_memory(self, *, is_last: bool = False) -> None:
        """Send readings of torch's allocator to the agent, because only this process can read them."""
        if self._gauges.readable_settings().host_ns is None:
            return
        now_ns = time.monotonic_ns()
        rarely = is_last or now_ns >= self._torch_ns
        readings = self._gauges.read_torch_memory(rarely=rarely)
        if rarely:
            self._torch_ns = now_ns + RARELY_NS
        rows = [[device, name, value] for device, values in readings for name, value in values.items()]
        if rows:
            self._membership.send({"readings": rows})

    # ---------------------------------------------------------------- the end

    def stop(self, deadline: Deadline) -> None:
        """Take a last reading of all gauges, and stop. If the agent reads the gauges, wait for its last reading."""
        self._has_stopped = True
        is_own = self._gauges.is_reading
        self._gauges.stop(deadline.seconds_left())
        self._close_claim()
        if is_own or not (self._has_begun and self._gauges.has_readable_gauges and self._membership.is_joined):
            return
        FAULTS.attempt("last reading of torch", lambda: self._send_torch_memory(is_last=True))
        if self._membership.send({"gauges": None}):
            self._await_last_reading(deadline.seconds_left(LAST_READING_S))

    def _await_last_reading(self, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while (left_s := end - time.monotonic()) > 0:
            message = self._membership.await_message("gauges", left_s)
            if message is None:
                break
            self.handle_message(message["gauges"])
            if isinstance(message["gauges"], dict) and message["gauges"].keys() & {"ended", "yours"}:
                return
        self._gauges.store_agent_gpus(
            self._gauges.gpus(), [f"device: the agent had not read the gauges again {limit_s:.2g} s after the end"]
        )
