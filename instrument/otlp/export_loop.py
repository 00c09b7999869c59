"""Reads recordings, decides which ended requests to keep (settles them), and passes on their rows for sending and
writing.

The agent's exporter process reads the recordings of all processes of a run. A service without an agent reads only its
own recording, on a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from instrument.otlp.metrics_queue import Metered
from instrument.otlp.recording_export import RecordingExport
from instrument.otlp.recording_meter import GROUPS
from instrument.runtime.faults import logger
from instrument.trace.settling import Settling

if TYPE_CHECKING:
    from pathlib import Path

    from instrument.otlp.delivery import Exporter
    from instrument.otlp.file_exports import DatasetExport, KeptFiles
    from instrument.otlp.span_queue import Source
    from instrument.profile.model import Parquet

SETTLE_EACH_NS = 10**9
"""Nanoseconds between two rounds of settling requests. After many new rows, the next round begins sooner."""

BEHIND_NS = 5 * 10**9
"""Nanoseconds after which requests are settled although the collector has not accepted earlier spans."""

MOST_LOOKS = 20
"""The maximum number of reads of all recordings for one scrape or flush."""

UNREAD_LIMIT_S = 1.0
"""Seconds to wait for space in the exporter's queue before the export of a window fails."""

FULL_RETRY_S = 0.02
"""Seconds between two attempts to read rows while the exporter's queue is full."""


class EndedExport(NamedTuple):
    """The result of a recording's export. `fates` has the span counts that were not reported before. `problem` is the
    error that ended the export. `metered` has the last metrics if a scrape will read them."""

    fates: Mapping[str, int]
    problem: Exception | None
    key: str = ""
    metered: Metered | None = None


class ExportLoop:
    """Reads the recordings of one exporter, and settles their requests. One thread uses an instance, except for
    `note_sent`.

    - `report_end` is called when the export of a recording has ended.
    - `report_unstored` gets the number of lost dataset rows of ended processes.
    - `has_looked` is called after each pass over all recordings.
    - `has_room` is called after spans were sent, if reading has paused for lack of space.
    """

    def __init__(
        self,
        report_end: Callable[[int, EndedExport], object],
        report_unstored: Callable[[int], object],
        has_looked: Callable[[], object] = bool,
        has_room: Callable[[], object] = bool,
    ) -> None:
        self._report_end, self._report_unstored = report_end, report_unstored
        self._has_looked, self._has_room = has_looked, has_room
        self.recordings: dict[int, RecordingExport] = {}
        self.datasets: dict[tuple[str, Parquet], DatasetExport] = {}
        """The datasets by run and settings."""
        self._files: dict[int, KeptFiles] = {}
        self._settling = Settling()
        self._settled_at_ns = 0
        self.faults = 0
        GROUPS.clear()  # those of the session before

    # ---------------------------------------------------------------- recordings

    def begin_export(
        self, number: int, fd: int, exporter: Exporter, generation: int = 0, *, sends: bool = True
    ) -> RecordingExport:
        exporter.settled = self.note_sent
        export = self.recordings[number] = RecordingExport(fd, exporter, generation, sends=sends)
        return export

    def begin_dataset(self, export: RecordingExport, settings: Parquet, key: str, disk_bytes: int) -> None:
        from instrument.otlp.file_exports import DatasetExport

        place = key, settings
        if place not in self.datasets:
            self.datasets[place] = DatasetExport(settings, key, disk_bytes)
        self.datasets[place].members.add(export)
        export.has_dataset = True

    def begin_kept_files(self, number: int, folder: Path, run: str, disk_bytes: int) -> None:
        from instrument.otlp.file_exports import KeptFiles

        files = self._files[number] = KeptFiles(folder, run, disk_bytes)
        self.recordings[number].keep_spans = files.add_spans

    def attempt_on_recording(self, number: int, action: Callable[[], object]) -> None:
        """Call an action on a recording. If it fails, end the export of that recording only."""
        try:
            action()
        except Exception as problem:  # what another process has recorded may be anything
            self.faults += 1
            self.end_export(number, problem)

    def attempt_on_dataset(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as problem:
            self.faults += 1
            logger.warning("export.parquet: %.500s", problem)
        for dataset in self.datasets.values():
            if lost := dataset.count_newly_lost_rows():
                member = next((export for export in dataset.members if export.current_reading is not None), None)
                (self._report_unstored if member is None else member.count_unstored_rows)(lost)

    def end_export(self, number: int, problem: Exception | None = None) -> None:
        export, ended = self.recordings.pop(number, None), EndedExport({}, problem)
        if export is None and problem is None:
            return
        try:
            if export is not None:
                with closing(export):
                    ended = ended._replace(
                        key=export.key, metered=export.read_metrics_for_scrape() if export.is_scraped else None
                    )
                    self._write_kept_spans(number, export, at_once=True)
                    self._files.pop(number, None)
                    for dataset in self.datasets.values():
                        if export in dataset.members:
                            self.attempt_on_dataset(partial(dataset.remove_recording, export))
                    ended = ended._replace(fates=export.finish_export() if export.has_ended else {})
        except Exception as fault:
            ended = ended._replace(problem=problem or fault)
        self._report_end(number, ended)

    def end_settled_exports(self) -> None:
        for number, export in list(self.recordings.items()):
            self.attempt_on_recording(number, partial(self._end_if_settled, number, export))

    def _end_if_settled(self, number: int, export: RecordingExport) -> None:
        if export.is_over and export.settle_remaining_spans():
            self.end_export(number)

    def end_datasets(self, until: float) -> None:
        for place, dataset in list(self.datasets.items()):
            for export in dataset.members:
                if export.source is not None:
                    self.attempt_on_dataset(partial(dataset.put_window, export))
            self.attempt_on_dataset(partial(dataset.end_dataset, until))
            del self.datasets[place]

    def close(self) -> None:
        """Release all recordings. Another exporter can continue their exports."""
        while self.recordings:
            self.recordings.popitem()[1].close()

    def after_fork_in_child(self) -> None:
        """Close the parent's recordings in the child. The parent continues to export them."""
        for export in self.recordings.values():
            export.after_fork_in_child()

    def note_sent(self, source: Source) -> None:
        """Write the outcome of sent spans into the recording of their process. The sending thread calls this."""
        for export in list(self.recordings.values()):
            if export.owns_source(source):
                export.note_sent()
        if self.is_paused:
            self._has_room()

    # ---------------------------------------------------------------- reading

    @property
    def is_paused(self) -> bool:
        """True if the exporter has no space for more spans of a recording."""
        return any(export.is_behind for export in list(self.recordings.values()))

    def read_new_rows(self, *, at_once: bool = False, metered: RecordingExport | None = None) -> bool:
        """Read the new rows of all recordings. Return True if rows are left after `MOST_LOOKS` attempts."""
        return all(self.read_and_settle(at_once=at_once, metered=metered) for _ in range(MOST_LOOKS))

    def read_remaining_rows(self, until: float) -> None:
        while (self.read_and_settle() or self.is_paused) and time.monotonic() < until:
            time.sleep(FULL_RETRY_S if self.is_paused else 0)
        while self.read_and_settle(is_last=True) and time.monotonic() < until:
            pass

    def await_earlier_sessions(self, until: float) -> bool:
        """Wait up to the time `until` for the export of an earlier session to end. Return True if a later session can
        now be exported."""
        waiting = self._find_waiting_sessions()
        while waiting and any(export.is_ours for export in self.recordings.values()) and time.monotonic() < until:
            self.end_settled_exports()
            if self._find_waiting_sessions() != waiting:
                return True
            time.sleep(FULL_RETRY_S)
        return False

    def _find_waiting_sessions(self) -> set[int]:
        return {number for number, export in self.recordings.items() if self._is_earlier_session_open(export)}

    def send_now(self, export: RecordingExport) -> bool:
        """Send all spans and metrics that a process has recorded so far. Return False if there was no space for all."""
        has_more = self.read_new_rows(at_once=True, metered=export)
        export.settle_remaining_spans()
        return not (has_more or export.is_behind or export.current_reading is None)

    def send_window(self, export: RecordingExport, begin_ns: int, end_ns: int) -> bool:
        """Send all spans of a process in an interval. Open requests are sent after their end.

        Return False if earlier rows cannot be read within `UNREAD_LIMIT_S`, because the exporter's queue is full.
        """
        spans, until = export.read_spans_between(begin_ns, end_ns), time.monotonic() + UNREAD_LIMIT_S
        if export.current_reading is None:
            self.read_new_rows()
        export.keep_open_requests(spans)
        while self.read_new_rows(at_once=True) or self.is_paused:
            if time.monotonic() > until:
                return False
            time.sleep(FULL_RETRY_S)
        export.send_spans(export.select_unsent_spans(spans))
        return True

    def read_current_metrics(self, exports: Sequence[RecordingExport]) -> dict[str, Metered]:
        for export in exports:
            export.is_scraped = True
            export.prepare_scrape()
        self.read_new_rows()
        metered_of = {
            export.key: export.read_metrics_for_scrape() for export in self.recordings.values() if export in exports
        }
        return {key: metered for key, metered in metered_of.items() if metered is not None}

    def read_and_settle(
        self, *, is_last: bool = False, at_once: bool = False, metered: RecordingExport | None = None
    ) -> bool:
        """Read all recordings, and settle the requests that are due. Return True if a recording has more rows.

        With `at_once`, settle all ended requests; with `is_last`, all requests. Send the metrics of `metered`.
        """
        if not self.recordings:
            return False
        has_more: list[int] = []

        def read_recording(number: int, export: RecordingExport) -> None:
            if self._is_earlier_session_open(export):
                return
            if export.read_new_rows(is_last=is_last, meters=export is metered or is_last):
                has_more.append(number)

        for number, export in list(self.recordings.items()):
            self.attempt_on_recording(number, partial(read_recording, number, export))
        now_ns = time.monotonic_ns()
        since_ns = now_ns - self._settled_at_ns
        is_behind = self.is_paused and since_ns < BEHIND_NS
        is_due = is_last or since_ns >= SETTLE_EACH_NS or self._settling.has_more
        if (is_due and (is_last or not is_behind)) or self._is_ahead or (at_once and not has_more):
            self._settle_requests(now_ns, is_last=is_last, at_once=at_once and not has_more)
        for number, export in list(self.recordings.items()):
            self.attempt_on_recording(number, partial(self._finish_reading, number, export))
        if self.datasets:
            self.attempt_on_dataset(self._close_datasets)
        self._has_looked()
        return bool(has_more) or (self._settling.has_more and not is_behind)

    @property
    def _is_ahead(self) -> bool:
        """True if a recording is not read further before the next round of settling."""
        sending = (export.current_reading for export in self.recordings.values() if not export.is_behind)
        return any(reading is not None and reading.reader.is_ahead for reading in sending)

    def _is_earlier_session_open(self, export: RecordingExport) -> bool:
        """Return True if the export of an earlier session in the same recording has not ended."""
        return not export.is_ours and any(
            earlier.file_id == export.file_id and earlier.generation < export.generation
            for earlier in self.recordings.values()
        )

    def _finish_reading(self, number: int, export: RecordingExport) -> None:
        export.take_due_metrics()
        self._write_kept_spans(number, export, at_once=False)
        if self.is_paused and not export.is_behind:  # the next look begins with those for which there was no room
            self.recordings[number] = self.recordings.pop(number)

    def _write_kept_spans(self, number: int, export: RecordingExport, *, at_once: bool) -> None:
        files = self._files.get(number)
        if files is not None and (at_once or files.is_due):
            count, is_written = files.write_spans()
            if not export.sends:
                export.count_written_spans(count, is_written=is_written)

    def _settle_requests(self, now_ns: int, *, is_last: bool, at_once: bool) -> None:
        self._settled_at_ns = now_ns
        readings = []
        for number, export in self.recordings.items():
            if (reading := export.current_reading) is not None:
                reading.reader.ahead = 0
                readings += [] if export.is_spoilt else [(number, export, reading)]
        exports = [export for _, export, _ in readings]
        self._settling.taken = [partial(dataset.put_settled_requests, exports) for dataset in self.datasets.values()]
        self._settling.members = [reading.reader.rows for *_, reading in readings]
        settled_by_place = self._settling.settle(
            now_ns,
            is_last=is_last or all(export.is_over for export in self.recordings.values()),
            at_once=at_once,
            asks_queues=any(reading.facts.metered.asks for *_, reading in readings),
        )
        for place, settled in settled_by_place.items():
            number, export, _ = readings[place]
            self.attempt_on_recording(number, partial(export.take_settled_rows, settled, self._settling.settled_ns))
        for number, export, _ in readings:
            self.attempt_on_recording(number, partial(export.write_progress, self._settling.settled_ns))

    def _close_datasets(self) -> None:
        for dataset in self.datasets.values():
            if dataset.is_due:
                for export in dataset.members:
                    dataset.put_window(export)
                dataset.close_files()
