"""The handover of the export from this process to the agent, with the progress and the losses of the export.

The agent of a process reads and exports its recording, so the session needs no reader and no thread for that. If the
agent is killed, the next agent continues from the checkpoint in the recording. A session that never had an agent
exports by itself, with the same classes, and imports numpy for that.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from instrument.errors import ExportError, InstrumentError
from instrument.recorder.recorder import RECORDER
from instrument.recording import export_checkpoint
from instrument.recording.export_checkpoint import DAMAGED, ExportCheckpoint, MeterState, Progress
from instrument.recording.spans import Span
from instrument.runtime import environment
from instrument.runtime.cheap_start import LazyModule, replace
from instrument.runtime.faults import logger

if TYPE_CHECKING:
    from instrument import otlp
    from instrument.otlp.metrics import Metered, Metrics
    from instrument.otlp.recording_export import ExportedRun, RecordingExport
    from instrument.otlp.span_queue import Source
    from instrument.profile.model import Parquet
else:
    otlp = LazyModule("instrument.otlp")

MOST_READS = 20
"""The maximum number of reads of the recording in one call of `look`. Each reads some thousand rows."""

FULL_RETRY_S = 0.02
"""Seconds between two attempts to read more rows while the exporter's queue is full."""

UNREAD_LIMIT_S = 1.0
"""Seconds for which the export of a window waits until all its rows are read. Then the export fails."""


class OwnExport:
    """A reader that passes this process's own recording to the session's exporter.

    Without `sends` it only counts metrics for scrapes and writes a dataset. `dataset` has the settings of the dataset,
    None for none. Only one thread may use the reader at a time, except for `note_sent`.
    """

    def __init__(
        self, exporter: otlp.Exporter, *, sends: bool = True, dataset: Parquet | None = None, disk_bytes: int = 0
    ) -> None:
        self._exporter = exporter
        exporter.settled = self.note_sent
        self.sends = sends
        self.dataset, self._disk_bytes = dataset, disk_bytes
        self._exported: RecordingExport | None = None
        self._run: ExportedRun | None = None
        self._fates: Mapping[str, int] = {}
        self.is_over = False
        """True if the session has ended, and its recording was released."""
        self.is_broken = False
        """True if the recording could not be read."""

    def prepare(self) -> None:
        """Import the needed modules while no fork can happen, because a forked child would inherit a half-done
        import."""
        import instrument.otlp.recording_export  # noqa: F401

    def begin(self, memory_fd: int) -> None:
        """Open the recording, to read on from the row at which its last exporter stopped. Raises `OSError`."""
        if self._exported is not None or self.is_over:
            return
        from instrument.otlp.recording_export import ExportedRun, RecordingExport
        from instrument.otlp.recording_meter import GROUPS

        GROUPS.clear()  # those of the session before
        self._exported = RecordingExport(memory_fd, self._exporter, sends=self.sends)
        self._run = ExportedRun({0: self._exported})
        if self.dataset is not None:
            from instrument.otlp.file_exports import DatasetExport

            try:
                key = f"{os.uname().nodename} {os.getpid()}"  # containers may share the folder of its journal
                self._exported.dataset = DatasetExport(self.dataset, key, self._disk_bytes)
            except (InstrumentError, OSError) as problem:
                logger.warning("export.parquet: %s", problem)

    def after_fork_in_child(self) -> None:
        """Release the parent's recording."""
        exported, self._exported, self._run, self._fates = self._exported, None, None, {}
        self.is_over = self.is_broken = False
        if exported is not None:
            exported.after_fork_in_child()

    # ---------------------------------------------------------------- while it records

    def look(self, *, at_once: bool = False, is_last: bool = False, meters: bool = False) -> bool:
        """Read more rows and pass sampled spans to the exporter. With `meters`, also send metrics that are not due.

        Settle ended requests without waiting if `at_once`, all requests if `is_last`. Return True if rows are left.
        """
        exported, run = self._exported, self._run
        if exported is None or run is None:
            return False
        has_more, looks = True, 0
        while has_more and (looks := looks + 1) <= MOST_READS:
            has_more = run.look(_attempt, at_once=at_once, is_last=is_last, metered=exported if meters else None)
        run.close_datasets()
        return has_more

    def send_now(self) -> bool:
        """Have the exporter send all rows recorded so far. Return False if it had no room for all."""
        exported = self._exported
        if exported is None:
            return True
        has_more = self.look(at_once=True, meters=True)
        exported.is_settled()
        return not (has_more or exported.is_behind or exported.reading is None)

    def unsent(self, spans: Sequence[Span]) -> list[Span]:
        """Return those spans that this export will not send, and have it send open requests once they end. Raises
        `ExportError` if not all rows could be read because the exporter's queue stayed full."""
        exported, end = self._exported, time.monotonic() + UNREAD_LIMIT_S
        if exported is None:
            return list(spans)
        exported.keep_open(spans)
        while self.look(at_once=True) or exported.is_behind:
            if time.monotonic() > end:
                raise ExportError(
                    f"{len(spans)} spans of a window were not sent, because the collector has not accepted earlier "
                    "ones; those that `capture` keeps are sent later"
                )
            time.sleep(FULL_RETRY_S)
        return exported.unsent(spans)

    def metered(self) -> Metered | None:
        """Return the metrics for a scrape, as of the last read."""
        return None if self._exported is None else self._exported.metered()

    def before_scrape(self) -> None:
        """Note the requests that have ended, before the recording is read for a scrape."""
        if self._exported is not None:
            self._exported.before_scrape()

    def note_sent(self, source: Source) -> None:
        """Store how far the spans of a recording (`source`) have been sent."""
        exported = self._exported
        if exported is not None and exported.owns_source(source):
            exported.note_sent()

    @property
    def fates(self) -> Mapping[str, int]:
        """The counts of this session's spans by outcome, such as sent or dropped."""
        return self._fates if self._exported is None else self._exported.fates

    # ---------------------------------------------------------------- the end

    def end(self, end: float) -> bool:
        """Pass all remaining rows of an ended session to the exporter, until the time `end` of the monotonic clock.

        Return True if the exporter had no room for all rows.
        """
        exported = self._exported
        if exported is None:
            return False
        exported.has_ended = True
        while (self.look() or exported.is_behind) and time.monotonic() < end:
            time.sleep(FULL_RETRY_S if exported.is_behind else 0)
        self.look(is_last=True)
        exported.is_settled()
        if (dataset := exported.dataset) is not None:
            dataset.forget(exported)
            dataset.end(end)
            exported.note_unstored(dataset.take_lost())
            exported.dataset = None
        return not exported.is_over

    def finish(self) -> None:
        """End the export, count the unsent spans, and release the recording."""
        exported, self.is_over = self._exported, True
        if exported is None:
            return
        try:
            unread = exported.finish().get("unread", 0)
            self._fates = Counter({**exported.fates, "unread": unread})
        finally:
            self.release()

    def release(self) -> None:
        """Release the recording. The next session's reader continues from here."""
        exported, self._exported, self._run = self._exported, None, None
        if exported is not None:
            exported.close()


def _attempt(_: int, action: Callable[[], object]) -> None:
    """Call the action. The caller handles its exceptions."""
    action()


LAST_READ_S = 5.0
"""Seconds for which a new session waits for the agent to read the rows of the previous session."""

UNREAD = "spans of the session before this one that its agent had not read"
UNDELIVERED = "spans on their way by the agent of the run, which reports those that it loses"
UNREPORTED = "spans on their way by the agent of the run, whose losses are not printed"
ABANDONED = "spans that no agent has exported: that of the run has gone, and no other one could begin"

LOOK_S = 0.005


class Handover:
    """The choice who exports, this process (`is_here`) or the agent, and the progress of that export.

    `own` is the reader in this process, None if the profile exports nothing here.
    """

    def __init__(self, exporter: otlp.Exporter | None, reader: OwnExport | None) -> None:
        self._exporter, self.own = exporter, reader
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Begin anew for the child's recording, which nobody reads yet."""
        self.is_here = True
        """True if this process exports its own recording."""
        self.has_agent = False
        """True if an agent of the run exports the recordings that it can read."""
        self.is_refused = False
        """True if the agent has reported that it cannot export this recording."""
        self.left: dict[str, int] = {}
        """Counts of spans that were not delivered as the session ended, by reason."""

    def export_by_agent(self) -> None:
        """Leave the export to the agent, if this process has a recording that others can read."""
        if self._exporter is not None and RECORDER.memory_fd >= 0:
            self.is_here, self.has_agent = False, True

    def is_abandoned(self) -> bool:
        """Return True if the agent has refused or ended the export, and nobody else exports the recording."""
        return self.is_refused and not self.is_taken()

    def note_undelivered(self, count: int, *, is_reported: bool) -> None:
        """Count the spans that are undelivered at the session's end. If `is_reported`, the agent will report losses."""
        reason = UNDELIVERED if is_reported else UNREPORTED
        self.left = {export_checkpoint.UNREAD if self.is_abandoned() else reason: count} if count else {}

    def _opened(self) -> ExportCheckpoint:
        if RECORDER.memory_fd < 0:
            raise OSError("the service has closed the recording")
        return ExportCheckpoint(RECORDER.memory_fd)

    def is_taken(self) -> bool:
        try:
            with closing(self._opened()) as place:
                return place.is_taken()
        except OSError:
            return False

    def await_reader(self, recorded: int, *, metered: bool, is_left: Callable[[], bool]) -> int:
        """Wait until the agent has read all `recorded` rows of an ended session, which the next session overwrites.

        With `metered`, wait also until it has counted their metrics. `is_left()` returns True if an agent will read
        the rows, even if it has not begun. Return the count of unread rows.
        """
        end = time.monotonic() + LAST_READ_S
        while True:
            is_taken, progress = self.is_taken(), self.progress()
            unread_rows = recorded - progress.fates["seen"] - progress.fates["missed"]
            awaits_metrics = metered and recorded > 0 and not progress.is_reported and self._metered_rows() < recorded
            if progress.is_reported or (unread_rows <= 0 and not awaits_metrics):
                return 0
            if not is_taken and (progress.generation or not is_left()):
                return max(unread_rows, 0) if progress.generation else 0
            if time.monotonic() > end:
                return max(unread_rows, 0)
            time.sleep(LOOK_S)

    def _metered_rows(self) -> int:
        """Return how many of the recorded rows have been counted in metrics, by any process."""
        try:
            with closing(self._opened()) as place:
                state, head = place.read_meter(), place.head()
        except OSError:
            return 0
        is_of_now = state is not None and state.generation == head.generation
        return head.number("ended_rows") + sum(state.places.values()) if state is not None and is_of_now else 0

    def progress(self) -> Progress:
        """Return the agent's progress with the export of this session."""
        try:
            with closing(self._opened()) as place:
                return _session_progress(place)
        except OSError:
            return Progress()

    def metered(self) -> MeterState | None:
        """Return the metrics that the agent has counted from this recording, None for none."""
        try:
            with closing(self._opened()) as place:
                return _metered_of_session(place)
        except OSError:
            return None

    def metrics(self) -> Metrics | None:
        """Return the state of the metrics that this process or the agent sends, None if none are sent."""
        exporter = self._exporter
        if exporter is None:
            return None
        metrics, state = exporter.new_metrics(environment.metrics_variables()), self.metered()
        if state is not None:
            with suppress(*DAMAGED):
                metrics.go_on(state.delivered)
        return metrics

    def losses(self) -> Mapping[str, int]:
        """Return the counts of spans that the export has lost, in this process or in the agent, by reason."""
        fates: Mapping[str, int]
        if self.own is None:  # an agent may write files nevertheless
            of_files = self.progress().fates
            fates = {fate: of_files[fate] for fate in ("unwritten", "unstored")}
        elif self.is_here:
            fates = self.own.fates
        else:
            progress = self.progress() if self.has_agent else Progress()
            fates = progress.unreported() if self.is_abandoned() else progress.fates
        return {**export_checkpoint.losses_by_name(fates), **self.left}


def _metered_of_session(place: ExportCheckpoint) -> MeterState | None:
    """Return the metrics counted for the current session, with progress by native thread id, None for none."""
    state, head = place.read_meter(), place.head()
    if state is None or state.generation != head.generation:
        return None
    threads = {ring.number: ring.thread_id for ring in head.rings() if ring.thread_id}
    return replace(state, places={threads[ring]: row for ring, row in state.places.items() if ring in threads})


def _session_progress(place: ExportCheckpoint) -> Progress:
    """Return the export's progress for the current session. The recording may still show that of the one before."""
    progress = place.read()
    return progress if progress.generation == place.head().generation else Progress(before=progress.unreported())
