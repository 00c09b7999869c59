"""Exports one recording: reads its new rows, applies tail sampling, and passes the kept spans to an exporter.

The progress is stored in the recording, so that a later exporter can continue. It is stored before the first span of a
request is sent, so that no span is sent twice.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np

from instrument import clock
from instrument.otlp.delivery import Exporter
from instrument.otlp.export_facts import ExportFacts, Ids, decode_facts
from instrument.otlp.metrics_queue import Metered
from instrument.otlp.recording_meter import Metering
from instrument.otlp.recording_reader import RecordingReader
from instrument.otlp.span_queue import Source
from instrument.recording.export_checkpoint import (
    DERIVED_LOST,
    ENDS,
    METRICS_LOST,
    ExportCheckpoint,
    Progress,
    count_undecided_as_lost,
)
from instrument.recording.mapped import Mapped
from instrument.recording.memory import NOTHING_TO_COME
from instrument.recording.memory_layout import REQUEST_BIT
from instrument.recording.spans import Span
from instrument.recording.trace_context import is_sampled
from instrument.runtime.unpatched import RLock
from instrument.trace.columns import DeviceIntervals, Int64s
from instrument.trace.of_recording import read_origin, read_spans_and_tally
from instrument.trace.request_trees import Interruptions
from instrument.trace.settling import Settled
from instrument.trace.trace import columns_of_spans, make_spans
from instrument.trace.unsettled import BEYOND, TOO_LONG, UnsettledRows

WAITING_SPANS = 20_000
"""The number of unsent spans above which the exporter stops reading rows. Further rows wait in the recording."""

LAST_METRICS_S = 5.0
"""The maximum seconds to send the last metrics of a session after a new session has begun."""


class RecordingExport:
    """Exports one session of a recording. One thread reads and settles; another may call `write_counts` and
    `note_sent`.

    `fd` is the recording's file descriptor. The export opens a copy of it. `generation` is the number of the session, 0
    for the current one. Without `sends`, no span is sent. Raises `TraceError` and `OSError`.
    """

    def __init__(self, fd: int, exporter: Exporter, generation: int = 0, *, sends: bool = True) -> None:
        self.sends = sends
        self._exporter = exporter
        self._lock = RLock()
        self._place = ExportCheckpoint(fd)
        try:
            self.mapped = Mapped(fd)
        except BaseException:
            self._place.close()
            raise
        self.generation = generation or self.mapped.generation
        file = os.fstat(self._place.fileno())
        self.file_id = file.st_dev, file.st_ino
        """The identity of the recording's file, which all sessions of a process share."""
        self._progress = Progress()
        self._reported_fates: Counter[str] = Counter()
        self._reading: _Reading | None = None
        self._facts: ExportFacts | None = None
        self._published_ns, self._superseded_at = 0, 0.0
        self.is_ours = self._has_more = False
        self.is_spoilt = False
        """True if the last rows that were read may belong to another session."""
        self.is_behind = False
        """True if reading stopped because the exporter has no space for more spans."""
        self.has_ended = False
        """True if the process of the recording has ended."""
        self.ended_ns = 0
        """The time in ns at which `has_ended` was set."""
        self.is_over = False
        """True once the process has ended and all rows are read."""
        self.keep_spans: Callable[[Sequence[Span], Source], object] | None = None
        """A function that adds kept spans to files, None for no files."""
        self.has_dataset = False
        """True if settled requests are written into a dataset."""
        self.unwritten = 0
        """The number of spans in no complete file of the dataset, if spans are not sent."""
        self.is_scraped = False
        """True if a scrape will read the metrics after the process's end."""

    def close(self) -> None:
        with closing(self._place), closing(self.mapped):
            try:
                if self._reading is not None and self.is_ours:
                    self._reading.metering.end()
            finally:
                with self._lock:
                    self.write_counts()
                    self.is_ours = False

    def after_fork_in_child(self) -> None:
        """Close the parent's recording in the child. The parent continues to export it."""
        self._place.close()
        self.mapped.close()

    # ---------------------------------------------------------------- reading

    def read_new_rows(self, *, is_last: bool = False, meters: bool = False) -> bool:
        ended = self.has_ended
        if ended and not self.ended_ns:
            self.ended_ns = time.monotonic_ns()
        if self._reading is not None and self.is_ours:
            self._reading.metering.count_before_read(meters=meters or is_last)
        has_more = self._has_more = self._read_rows()
        reading = self._reading
        self.is_over = ended and not (has_more or self.is_behind)
        if self.is_over and reading is not None:
            reading.reader.rows.is_over = True
            reading.reader.rows.opened = {}
        return has_more

    def take_due_metrics(self) -> None:
        if self._reading is not None and self.is_ours:
            self._reading.metering.snapshot_after_read(is_complete=not (self._has_more or self.is_behind))

    def _read_rows(self) -> bool:
        if not self.is_ours:
            self.is_ours = self._place.acquire()
            if not self.is_ours:
                return False  # the process does so itself, or another agent
            self._progress = self._place.read_progress()
        if self._is_session_superseded():
            self.has_ended, self.is_behind = True, False
            return False
        facts = self._read_facts()
        if facts is None:
            return False
        if self._reading is not None and self._exporter.pending_spans > WAITING_SPANS:
            self.is_behind = True
            return False
        self.is_behind = False
        reading = self._reading or self._begin_reading(facts)
        reading.source.update_clock_origin()
        reading.derived.update_clock_origin()
        reading.reader.note_interval_count()
        ended = reading.reader.read_new_rows()
        if self._is_session_superseded():
            self.is_spoilt = True
            self.has_ended = True
            return False  # what was read last may be another session's
        reading.metering.count_ended_requests(ended)
        self.write_progress()
        return reading.reader.has_more

    @property
    def current_reading(self) -> _Reading | None:
        """The current reading. None before the first read, and while another exporter has the recording."""
        return self._reading if self.is_ours else None

    def take_settled_rows(self, settled: Settled, settled_ns: int) -> None:
        reading = self._reading
        if reading is None:
            return
        reading.threads = self.mapped.read_thread_names()
        for served in settled.served:
            reading.metering.count_served_request(served)
        trace, rows = settled.trace, np.zeros(0, np.int64)
        if trace is not None:
            trace = reading.reader.join_intervals(trace, self.mapped.settled_ns() or NOTHING_TO_COME)
            rows, hits = reading.interruptions.attach_to_spans(trace)
            is_first = trace.are_of_kind("request") & (trace.span_id == trace.root_id)
            for request in make_spans(trace, rows[is_first[rows]]):
                reading.metering.add_request_exemplar(request)
        with self._lock:
            intervals = 0 if trace is None else len(trace.device)
            self._count_kept_spans(len(rows), intervals)
            self.write_progress(settled_ns)
        if trace is not None and self.sends:
            self._exporter.submit_rows(reading.source, trace, rows, links=settled.links, interruptions=hits)
        if trace is not None and self.keep_spans is not None:
            self.keep_spans(make_spans(trace, rows), reading.source)
        elif self.has_dataset and not self.sends:
            self.unwritten += len(rows) + intervals
        if settled.derived and self.sends:
            stages = columns_of_spans(settled.derived)
            self._exporter.submit_rows(reading.derived, stages, np.arange(len(stages)))
        self.write_counts()

    def count_written_spans(self, count: int, *, is_written: bool) -> None:
        if (reading := self._reading) is not None:
            reading.source.counts["exported" if is_written else "unwritten"] += count
            self.write_counts()

    def count_unstored_rows(self, rows: int) -> None:
        if rows and self._reading is not None:
            self._progress.fates["unstored"] += rows
            self.write_counts()

    def find_device_intervals(self, span_id: Int64s, asking: Int64s, start_ns: Int64s) -> DeviceIntervals:
        reading = self._reading
        return (
            DeviceIntervals.make_empty()
            if reading is None
            else reading.reader.find_intervals(span_id, asking, start_ns)
        )

    @property
    def ids(self) -> Ids | None:
        return self._reading.source.ids if self._reading is not None and self.sends else None

    def _is_session_superseded(self) -> bool:
        """Return True if a later session of the process has begun and has overwritten the rows."""
        return self.mapped.read_generation() != self.generation

    def _read_facts(self) -> ExportFacts | None:
        header = self.mapped.header if self.mapped.published_ns != self._published_ns else None
        facts = decode_facts(header.facts.get("export")) if header is not None else None
        reading = self._reading
        if header is None or facts is None or header.generation != self.generation:
            return self._facts
        self._facts, self._published_ns = facts, header.monotonic_ns
        if reading is not None:
            reading.apply_facts(facts)
        return facts

    def _begin_reading(self, facts: ExportFacts) -> _Reading:
        self.mapped.read_tree()
        progress = self._progress
        if progress.generation != self.generation:
            progress = Progress(self.generation, before=progress.unreported_counts())
        elif progress.is_reported:
            self._reported_fates, progress.is_reported = Counter(progress.fates), False
        unsettled, unanswered = progress.unsettled_spans, progress.unanswered_spans
        reading = _Reading(self.mapped, progress, facts, self._exporter, self._place, self.sends)
        with self._lock:
            self._progress, self._reading = progress, reading
        if unsettled:  # what was on its way when the one before was ended may have come there: it is not sent again
            progress.fates["kept"] = sum(progress.fates[fate] for fate in ENDS)
            progress.fates["unanswered"] += unanswered
            reading.left_over = unsettled - unanswered
        self.write_progress()
        return reading

    # ---------------------------------------------------------------- the books

    def write_progress(self, settled_ns: int = 0) -> None:
        reading = self._reading
        if reading is None or not self.is_ours:
            return
        reader, fates = reading.reader, self._progress.fates
        with self._lock:
            self._progress.settled_ns = max(self._progress.settled_ns, settled_ns)
            left_over = reading.left_over - reader.rows.adopted
            if not self.is_spoilt:  # a negative rest are rows for which the exporter before had no room
                beyond = reading.earlier["beyond"] + reader.rows.counts[BEYOND] + reader.rows.counts[TOO_LONG]
                beyond += min(left_over, 0)
                fates.update(seen=reader.seen, missed=reader.missed, beyond=max(beyond, 0))
                self._progress.places = reader.places
            fates.update(untimed=reading.reader.untimed, abandoned=reading.earlier["abandoned"] + max(left_over, 0))
            counts = sum(fates[fate] for fate in ("kept", "beyond", "unanswered", "abandoned"))
            fates["passed"] = max(fates["seen"] + fates["intervals"] - counts - reader.rows.undecided_count, 0)
            self.write_counts()

    def _count_kept_spans(self, spans: int, intervals: int) -> None:
        self._progress.fates["intervals"] += intervals
        self._progress.fates["kept"] += spans + intervals

    def write_counts(self) -> None:
        """Write into the recording the number of spans that are being sent, and the number of ended spans by fate."""
        with self._lock:
            reading = self._reading
            if not self.is_ours or reading is None:
                return
            counts, derived = reading.source.counts, reading.derived.counts
            self._progress.fates.update({fate: counts[fate] for fate in (*ENDS, "sending")})
            lost = sum(derived[fate] for fate in ENDS if fate != "exported")
            self._progress.fates[DERIVED_LOST] = reading.earlier[DERIVED_LOST] + lost
            self._progress.fates.update(deriving=derived["pending"], queueing=reading.metering.unsaved)
            self._place.write_progress(self._progress)

    def note_sent(self) -> None:
        """Write into the recording which spans and metrics were sent or lost."""
        self.write_counts()
        with self._lock:
            if self.is_ours and self._reading is not None:
                self._reading.metering.note_sent()

    def keep_open_requests(self, spans: Sequence[Span]) -> None:
        """Make tail sampling keep the requests of open spans, even requests without an error."""
        reading = self._reading
        if reading is not None:
            roots = {span.root_id for span in spans if span.clipped and span.root_id & REQUEST_BIT}
            reading.reader.rows.sampler.wanted |= roots - reading.reader.rows.decided.keys()

    def select_unsent_spans(self, spans: Sequence[Span]) -> list[Span]:
        """Return the ended spans that the exporter never sends. All rows of ended spans must have been read."""
        reading = self._reading
        if reading is None:
            return [span for span in spans if not span.clipped]
        rows = reading.reader.rows
        sample = rows.sampler.capture.sample
        unsent_spans = [span for span in spans if not (span.clipped or _is_or_will_be_sent(span, rows, sample))]
        rows.drop_requests({span.root_id for span in unsent_spans if span.root_id & REQUEST_BIT})
        return unsent_spans

    def read_spans_between(self, begin_ns: int, end_ns: int) -> list[Span]:
        """Return the spans that overlap an interval. Open spans are `clipped`."""
        spans = read_spans_and_tally(self.mapped, begin_ns).trace.spans
        return [span for span in spans if span.start_ns < end_ns]

    def send_spans(self, spans: Sequence[Span]) -> None:
        """Send spans of a window, even if tail sampling has dropped them."""
        reading = self._reading
        if reading is None or not spans:
            return
        with self._lock:
            self._count_kept_spans(len(spans), sum(len(span.device) for span in spans))
            self.write_progress()
        self._exporter.submit_rows(reading.source, columns_of_spans(spans), np.arange(len(spans)))
        self.write_counts()

    @property
    def fates(self) -> Mapping[str, int]:
        """The counts of this recording's spans by fate, as named in `instrument.recording.export_checkpoint`."""
        return self._progress.fates

    @property
    def key(self) -> str:
        return f"{read_origin(self.mapped.header).pid}-{self.generation}"

    def prepare_scrape(self) -> None:
        if self._reading is not None and self.is_ours:
            self._reading.metering.count_before_read(meters=False, scrapes=True)

    def read_metrics_for_scrape(self) -> Metered | None:
        return None if self._reading is None or not self.is_ours else self._reading.metering.read_totals_for_scrape()

    @property
    def source(self) -> Source | None:
        return None if self._reading is None else self._reading.source

    def owns_source(self, source: Source) -> bool:
        return self._reading is not None and source in (self._reading.source, self._reading.derived)

    def settle_remaining_spans(self) -> bool:
        """Send all due spans. Return True if no spans, and no metrics of an ended process, remain."""
        reading = self._reading
        if reading is None:
            return True
        if self.is_over and not reading.reader.rows.lingers:
            reading.metering.take_last_metrics()
        if reading.source.counts["pending"] or reading.derived.counts["pending"]:
            self._exporter.send_soon()
            return False
        if not self._is_session_superseded():
            return reading.metering.has_settled_metrics and not reading.reader.rows.lingers
        self._superseded_at = self._superseded_at or time.monotonic()
        return reading.metering.has_settled_metrics or time.monotonic() - self._superseded_at > LAST_METRICS_S

    def finish_export(self) -> Mapping[str, int]:
        """End the export. Return the unreported counts of spans by fate. Requests that never ended count as abandoned.

        The session must have ended, and no span may be waiting.
        """
        with self._lock:
            reading, progress = self._reading, self._progress
            if reading is not None:
                self.write_progress()
                reading.earlier["abandoned"] += reading.reader.rows.undecided_count
                progress.fates["abandoned"] += reading.reader.rows.undecided_count
                self.write_counts()
                count_undecided_as_lost(progress.fates)
            fates = Counter(progress.unreported_counts())
            fates.subtract(self._reported_fates)
            if reading is not None:
                fates[METRICS_LOST] += reading.metering.drop_unsent_metrics()
            if self.is_ours and not self._is_session_superseded() and progress.generation == self.generation:
                fates["unread"] += self._place.count_unread_rows()  # nobody counts it once this is reported
            progress.is_reported, progress.before = True, Progress().before
            if self.is_ours:
                self._place.write_progress(progress)
        if self.sends or self.keep_spans is not None:
            return dict(fates)
        # Without a collector or files nothing was to go anywhere. A dataset writes rows after the end.
        return {fate: fates[fate] for fate in ("missed", "unread", "unstored") if self.has_dataset and fates[fate]}


def _is_or_will_be_sent(span: Span, rows: UnsettledRows, sample: float) -> bool:
    if not span.root_id & REQUEST_BIT:
        return (
            is_sampled(rows.ids.trace_id(span.root_id), sample)
            or span.span_id in rows.sent_apart
            or rows.is_row_waiting(span.span_id)
        )
    decided = rows.decided.get(span.root_id)
    return span.root_id in rows.sampler.wanted if decided is None else decided.is_kept


class _Reading:
    """The state of reading one session. It continues the rows and counts of the previous exporter."""

    def __init__(
        self, mapped: Mapped, progress: Progress, facts: ExportFacts, exporter: Exporter, place: ExportCheckpoint,
        sends: bool,
    ) -> None:  # fmt: skip
        monotonic_ns, realtime_ns = clock.read_clocks()  # both clocks of the machine are read anew
        origin = replace(read_origin(mapped.header), monotonic_ns=monotonic_ns, realtime_ns=realtime_ns)
        self.facts = facts
        self.threads: Mapping[int, str] = {}
        count_undecided_as_lost(progress.fates)
        self.earlier = dict(progress.fates)
        """The counts of earlier exporters."""
        self.left_over = 0
        """The number of rows that an earlier exporter had read without a recorded outcome."""
        self.reader = RecordingReader(mapped, progress, facts)
        self.interruptions = Interruptions()
        ended = Counter({fate: progress.fates[fate] for fate in ENDS})
        self.source = Source(facts.ids, origin, lambda: self.threads, lambda: self.facts.resource, ended)
        self.derived = replace(self.source, counts=Counter())
        """The source of the spans of stages, which are made from this process's rows."""
        self.metering = Metering(mapped, facts, exporter, place, self.reader, self.source, progress.fates, sends)

    def apply_facts(self, facts: ExportFacts) -> None:
        self.facts = facts
        self.metering.change_facts(facts)
        self.reader.rows.spans_per_request = facts.spans_per_request
        if facts.capture != self.reader.rows.sampler.capture:
            self.reader.rows.sampler.change_settings(facts.capture)
