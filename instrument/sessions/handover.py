"""The choice of the exporter of this recording, the agent or this process, and the losses of the export.

If the process has an agent, the agent reads and exports the recording. The session then has neither a reader nor an
export thread. If the agent is killed, the next agent continues from the checkpoint in the recording. Only a session
that never had an agent exports by itself, with the same classes, and imports numpy for that.
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
    from instrument.otlp.exposition import Metered
    from instrument.otlp.metrics import Metrics
    from instrument.otlp.recording_export import ExportedRun, RecordingExport
    from instrument.otlp.span_queue import Source
    from instrument.profile.model import Parquet
else:
    otlp = LazyModule("instrument.otlp")

LOOKS = 20
"""The maximum number of reads of the recording per call of `look`, some thousand rows each."""

ROOM_S = 0.02
"""The seconds between two attempts to read the recording, while the exporter has no room for more rows."""

UNREAD_S = 1.0
"""The maximum number of seconds that a window waits until all rows up to its end are read."""


class OwnExport:
    """Reads this process's recording for the session's exporter.

    One thread at a time uses it. Without `sends` it only counts metrics for scrapes and writes a dataset. `dataset` has
    the settings of the dataset, None for none. Only `note_sent` may be called on another thread meanwhile.
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
        """Import the needed modules while no fork can happen: a forked child would have half an import."""
        import instrument.otlp.recording_export  # noqa: F401

    def begin(self, memory_fd: int) -> None:
        """Prepare to read this recording, from the row at which its last exporter stopped. Raises `OSError`."""
        if self._exported is not None or self.is_over:
            return
        from instrument.otlp.metering import GROUPS
        from instrument.otlp.recording_export import ExportedRun, RecordingExport

        GROUPS.clear()  # those of the session before
        self._exported = RecordingExport(memory_fd, self._exporter, sends=self.sends)
        self._run = ExportedRun({0: self._exported})
        if self.dataset is not None:
            from instrument.otlp.dataset_export import DatasetExport

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
        """Read more of the recording and offer kept spans. Take metrics if they are due, or with `meters`.

        Ended requests are settled with `at_once`, and all requests with `is_last`. Returns True if more can be read.
        """
        exported, run = self._exported, self._run
        if exported is None or run is None:
            return False
        has_more, looks = True, 0
        while has_more and (looks := looks + 1) <= LOOKS:
            has_more = run.look(_attempt, at_once=at_once, is_last=is_last, metered=exported if meters else None)
        run.close_datasets()
        return has_more

    def send_now(self) -> bool:
        """Have the exporter send all rows up to now. Return True if all were read."""
        exported = self._exported
        if exported is None:
            return True
        has_more = self.look(at_once=True, meters=True)
        exported.is_settled()
        return not (has_more or exported.is_behind or exported.reading is None)

    def unsent(self, spans: Sequence[Span]) -> list[Span]:
        """Return the spans that were not and will not be sent, and keep those of undecided requests. Raises
        `ExportError` if the rows up to now cannot be read, because the exporter has no room."""
        exported, end = self._exported, time.monotonic() + UNREAD_S
        if exported is None:
            return list(spans)
        exported.keep_open(spans)
        while self.look(at_once=True) or exported.is_behind:
            if time.monotonic() > end:
                raise ExportError(
                    f"{len(spans)} spans of a window were not sent, because the collector has not accepted earlier "
                    "ones; those that `capture` keeps are sent later"
                )
            time.sleep(ROOM_S)
        return exported.unsent(spans)

    def metered(self) -> Metered | None:
        """Return all metrics for a scrape, as they were read last."""
        return None if self._exported is None else self._exported.metered()

    def before_scrape(self) -> None:
        """Note the requests that have ended, before the recording is read for a scrape."""
        if self._exported is not None:
            self._exported.before_scrape()

    def note_sent(self, source: Source) -> None:
        """Note that the exporter has sent spans of a source, or is about to."""
        exported = self._exported
        if exported is not None and exported.owns_source(source):
            exported.note_sent()

    @property
    def fates(self) -> Mapping[str, int]:
        """The counts of this session's spans by fate."""
        return self._fates if self._exported is None else self._exported.fates

    # ---------------------------------------------------------------- the end

    def end(self, end: float) -> bool:
        """Offer all remaining rows until the time `end` of the monotonic clock; the session records no more.

        Returns True if rows remain that the exporter had no room for.
        """
        exported = self._exported
        if exported is None:
            return False
        exported.has_ended = True
        while (self.look() or exported.is_behind) and time.monotonic() < end:
            time.sleep(ROOM_S if exported.is_behind else 0)
        self.look(is_last=True)
        exported.is_settled()
        if (dataset := exported.dataset) is not None:
            dataset.forget(exported)
            dataset.end(end)
            exported.note_unstored(dataset.take_lost())
            exported.dataset = None
        return not exported.is_over

    def finish(self) -> None:
        """End the export: count the spans that were not sent, and release the recording."""
        exported, self.is_over = self._exported, True
        if exported is None:
            return
        try:
            unread = exported.finish().get("unread", 0)
            self._fates = Counter({**exported.fates, "unread": unread})
        finally:
            self.release()

    def release(self) -> None:
        """Release the recording. Another session may continue to read from here."""
        exported, self._exported, self._run = self._exported, None, None
        if exported is not None:
            exported.close()


def _attempt(_: int, action: Callable[[], object]) -> None:
    """Call the action. The caller handles its exceptions."""
    action()


LAST_READ_S = 5.0
"""Seconds for which a new session waits until the agent has read the earlier session's rows."""

UNREAD = "spans of the session before this one that its agent had not read"
UNDELIVERED = "spans on their way by the agent of the run, which reports those that it loses"
UNREPORTED = "spans on their way by the agent of the run, whose losses are not printed"
ABANDONED = "spans that no agent has exported: that of the run has gone, and no other one could begin"

LOOK_S = 0.005


class Handover:
    """The choice of the exporter, this process (`is_here`) or the agent, and the progress of the export.

    `own` reads the recording in this process; None for no reader.
    """

    def __init__(self, exporter: otlp.Exporter | None, reader: OwnExport | None) -> None:
        self._exporter, self.own = exporter, reader
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Begin with the child's recording, which has no reader yet."""
        self.is_here = True
        """True if this process exports."""
        self.has_agent = False
        """True if an agent of the run exports the recordings that it can read."""
        self.is_refused = False
        """True if the agent has reported that it cannot export this recording."""
        self.left: dict[str, int] = {}
        """Counts of spans that were not delivered as the session ended, by reason."""

    def export_by_agent(self) -> None:
        """Leave the export to the process's agent, if there is a recording for it to read."""
        if self._exporter is not None and RECORDER.memory_fd >= 0:
            self.is_here, self.has_agent = False, True

    def is_abandoned(self) -> bool:
        """Return True if the agent has refused or ended the export, and no other reader exports."""
        return self.is_refused and not self.is_taken()

    def note_undelivered(self, count: int, *, is_reported: bool) -> None:
        """Note the count of undelivered spans at the session's end. With `is_reported` the agent can report losses."""
        reason = UNDELIVERED if is_reported else UNREPORTED
        self.left = {export_checkpoint.UNREAD if self.is_abandoned() else reason: count} if count else {}

    def _opened(self) -> ExportCheckpoint:
        if RECORDER.memory_fd < 0:
            raise OSError("the service has closed the recording")
        return ExportCheckpoint(RECORDER.memory_fd)

    def is_taken(self) -> bool:
        """Return True if any reader exports this recording."""
        try:
            with closing(self._opened()) as place:
                return place.is_taken()
        except OSError:
            return False

    def await_reader(self, recorded: int, *, metered: bool, is_left: Callable[[], bool]) -> int:
        """Wait until the agent has read `recorded` rows of an ended session, because the next session discards them.

        With `metered`, wait also for their metrics. `is_left()` is True if an agent will read them, even if it has not
        begun. Returns the count of rows that are still unread.
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
        """Return the count of recorded rows that any process has counted in metrics."""
        try:
            with closing(self._opened()) as place:
                state, head = place.read_meter(), place.head()
        except OSError:
            return 0
        is_of_now = state is not None and state.generation == head.generation
        return head.number("ended_rows") + sum(state.places.values()) if state is not None and is_of_now else 0

    def progress(self) -> Progress:
        """Return the progress of this session's export by another process."""
        try:
            with closing(self._opened()) as place:
                return _session_progress(place)
        except OSError:
            return Progress()

    def metered(self) -> MeterState | None:
        """Return another process's metrics of this recording, with rows by native thread id; None for none."""
        try:
            with closing(self._opened()) as place:
                return _metered_of_session(place)
        except OSError:
            return None

    def metrics(self) -> Metrics | None:
        """Return the state of the sent metrics, from any sender; None if no metrics are sent."""
        exporter = self._exporter
        if exporter is None:
            return None
        metrics, state = exporter.new_metrics(environment.metrics_variables()), self.metered()
        if state is not None:
            with suppress(*DAMAGED):
                metrics.go_on(state.delivered)
        return metrics

    def losses(self) -> Mapping[str, int]:
        """Return the losses of the export, by the session or by the agent."""
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
    """Return the metrics of the current session, with rows by native thread id; None for an earlier session's."""
    state, head = place.read_meter(), place.head()
    if state is None or state.generation != head.generation:
        return None
    threads = {ring.number: ring.thread_id for ring in head.rings() if ring.thread_id}
    return replace(state, places={threads[ring]: row for ring, row in state.places.items() if ring in threads})


def _session_progress(place: ExportCheckpoint) -> Progress:
    """Return the export's progress for the current session. The recording may still have that of an earlier session."""
    progress = place.read()
    return progress if progress.generation == place.head().generation else Progress(before=progress.unreported())
