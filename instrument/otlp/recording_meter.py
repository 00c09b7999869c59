"""Counts the metrics of one recording, from the spans that the recording's exporter reads.

The counts are written into the recording before and after they are sent. Another agent's exporter, or the process
itself, can then continue from these counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from instrument.otlp.delivery import Exporter
from instrument.otlp.export_facts import ExportFacts, decode_facts
from instrument.otlp.metrics_queue import DELAY_NS, Metered
from instrument.otlp.recording_reader import RecordingReader
from instrument.otlp.span_queue import Source
from instrument.recorder.request_meter import Ended, Meter
from instrument.recording.distributions import Labels, Metric, Snapshot
from instrument.recording.export_checkpoint import (
    DAMAGED,
    ENDS,
    NO_LOSSES,
    ExportCheckpoint,
    MeterState,
    losses_by_name,
)
from instrument.recording.mapped import Mapped, read_service_metrics
from instrument.recording.memory_layout import Row, is_request_root
from instrument.recording.metric_definitions import (
    EXPORTED_SPANS,
    INFLIGHT_SPANS,
    LIVE_SPANS,
    PROCESSED_SPANS,
    RECORDING_MEMORY,
    STARTED_SPANS,
    make_metrics,
)
from instrument.recording.spans import Span
from instrument.runtime.faults import logger
from instrument.runtime.unpatched import Lock
from instrument.trace.of_recording import read_origin
from instrument.trace.settling import ServedRequest

NEVER_NS = 1 << 63

ASKED_NS = 200 * 10**6
"""The time in ns until the next metrics snapshot if the last snapshot was incomplete."""

GAUGES_FOR_NS = 30 * 10**9
"""The age in ns above which a gauge's sample is left out of a scrape."""

RELEASE_S = 0.5
"""The maximum seconds to wait for the collector's last answer when an export ends."""


GROUPS: dict[tuple[str, str], set[str]] = {}
"""The names of request groups, by service and grouping attribute. All processes of a service share them."""


_EXPORT_ERRORS = {
    "": ["exported"],
    "rejected": ["rejected"],
    "failed": ["failed", "unwritten"],
    "queue_full": ["dropped"],
}
_PROCESSOR_ERRORS = {"": ["kept"], "queue_full": ["missed", "beyond"], "already_shutdown": ["abandoned", "unanswered"]}
"""The span counters for each `error.type` of the tail sampler's metrics, "" for success."""


def _label_errors(component: str, counts: Mapping[str, float]) -> dict[Labels, float]:
    labels: Labels = (("otel.component.name", f"{component}/0"), ("otel.component.type", component))
    return {(*labels, *([("error.type", error)] if error else [])): count for error, count in counts.items()}


@dataclass(eq=False)
class Metering:
    """Counts the metrics of one session in a recording, for the recording's exporter. The sending thread calls
    `note_sent`, the reading thread the other methods."""

    _mapped: Mapped
    _facts: ExportFacts
    _exporter: Exporter
    _place: ExportCheckpoint
    _reader: RecordingReader
    _source: Source
    _fates: Mapping[str, int]
    """The number of the recording's spans per fate, such as sent or dropped. The export writes these numbers."""
    _sends: bool

    def __post_init__(self) -> None:
        facts, exporter = self._facts, self._exporter
        self._generation = self._mapped.generation
        self._service = read_origin(self._mapped.header).service
        self._lock = Lock()
        self._meter = Meter(self._reader, facts.metered.start_ns)
        self.metrics = self._source.metrics = exporter.make_metrics_queue(facts.metered.environ)
        self._ended: tuple[int, Ended] | None = None
        """A time in ns, and the requests that had ended by then. Some of their rows may not be read yet."""
        self._asked_ns = 0
        self._due_ns = time.monotonic_ns() + DELAY_NS
        self._state: MeterState | None = None
        self._settled_ns = self._taken_ns = self._retry_until_ns = 0
        self._has_last = self._is_said = False
        self.unsaved = 0
        """The number of requests whose queue time was counted since the state was last written."""
        self.change_facts(facts)
        self._count_earlier_rows(self._restore_state(self._place.read_meter_state()))
        exporter.add_metrics(self._source)

    def _restore_state(self, saved: MeterState | None) -> Mapping[int, int]:
        if saved is None or saved.generation != self._generation:
            return {}
        try:
            self._meter.restore(saved.meter)
            self.metrics.restore_state(saved.delivered)
        except DAMAGED:
            return {}  # it is no state of ours
        self._state, self._settled_ns, self._due_ns = saved, saved.settled_ns, 0
        return saved.places

    def _count_earlier_rows(self, places: Mapping[int, int]) -> None:
        if not self._facts.metered.asks:
            return
        for rows in self._reader.reread_rows(places):
            self._meter.count_requests([row for row in rows if is_request_root(row)])
            if self._meter.watches:
                self._meter.count_items_and_batches(rows, self._facts.metered.streams)

    def change_facts(self, facts: ExportFacts) -> None:
        self._facts = facts
        self._meter.generations = facts.metered.routes
        self._meter.marks.update(facts.metered.calls)
        self._meter.by, self._meter.at_most = facts.metered.by, facts.metered.at_most
        self._meter.groups = GROUPS.setdefault((self._service, facts.metered.by), set())
        self._meter.watches = facts.metered.watches
        if rows := self._reader.take_watched_rows(goes_on=facts.metered.watches):
            self._meter.count_items_and_batches(rows, facts.metered.streams)

    # ---------------------------------------------------------------- counting

    def count_ended_requests(self, ended: Sequence[Row]) -> None:
        self._meter.count_requests(ended)

    def count_served_request(self, request: ServedRequest) -> None:
        self.unsaved += 1
        self._meter.count_queue_and_batches(request.span, request.queue_ns, request.batch_size, request.sampled_ids)

    def add_request_exemplar(self, request: Span) -> None:
        self._meter.add_exemplar(request, *self._facts.ids.make_root_ids(request))

    def count_before_read(self, *, meters: bool, scrapes: bool = False) -> None:
        """Count the ended requests before the recording is read, so that the read includes all their rows."""
        if meters:
            self._asked_ns, self._due_ns = time.monotonic_ns(), 0
        if (self._is_snapshot_due or scrapes) and self._facts.metered.asks and self._ended is None:
            self._ended = time.monotonic_ns(), self._meter.count_ended_requests()

    def snapshot_after_read(self, *, is_complete: bool) -> None:
        until_ns = time.monotonic_ns()
        if is_complete and self._ended is not None and self._ended[0] <= until_ns:
            self._count_lost_requests()
        if self._is_snapshot_due:
            self._take_snapshot(until_ns if is_complete else 0)

    def _count_lost_requests(self) -> None:
        if self._ended is not None and self._mapped.read_generation() == self._generation:
            self._meter.count_lost_requests(self._ended[1])
        self._ended = None

    @property
    def _is_snapshot_due(self) -> bool:
        return time.monotonic_ns() >= self._due_ns

    def _take_snapshot(self, until_ns: int) -> None:
        """Take a snapshot of the metrics and of the new samples of gauges. All rows that ended by `until_ns` must have
        been read."""
        metrics, header = self.metrics, self._mapped.header
        if self._mapped.generation != self._generation:
            return  # what is there by now is another session's
        if until_ns < self._asked_ns:
            self._due_ns = time.monotonic_ns() + ASKED_NS
        else:
            self._due_ns = NEVER_NS if header.state == "goodbye" else time.monotonic_ns() + DELAY_NS
        snapshot = self._make_snapshot()
        samples = [] if metrics.off else self._mapped.read_samples(metrics.taken_ns + 1)
        gpus = header.gpus if samples else ()
        if self._mapped.generation != self._generation:
            return  # what was just read is another session's
        state = MeterState(self._generation, 0, self._meter.state(), {}, dict(self._reader.places))
        with self._lock:
            self._state = state
        self._write_state()  # before the exporter may send any of it
        self.unsaved = 0
        with self._lock:
            self._taken_ns = max(self._taken_ns, until_ns)
            if samples:
                metrics.offer_samples(samples, gpus)
            if snapshot is not None:
                metrics.put_snapshot(snapshot)
        metrics.make_samples_due()
        self._write_state()

    def _make_snapshot(self) -> Snapshot | None:
        if (newest := decode_facts(self._mapped.header.facts.get("export"))) is not None:
            self.change_facts(newest)
        facts = self._facts.metered
        numbers = tuple(make_metrics(read_service_metrics(self._mapped)[1]))
        has_rows = sum(self._mapped.count_written_rows().values()) or self._mapped.ended_rows
        has_recorded = has_rows or (not self._meter.has_ended and self._reader.open_rows())
        if not (facts.asks and has_recorded):  # many processes only start others
            return Snapshot(facts.start_ns, time.monotonic_ns(), numbers) if numbers else None
        snapshot = self._meter.snapshot(
            requests=facts.requests,
            losses={**NO_LOSSES, **facts.losses, **losses_by_name(self._fates)},
            costs_ns=facts.costs_ns,
            queued=facts.queued,
        )
        used_bytes = 0 if self._meter.has_ended else self._mapped.header.memory_bytes
        memory = RECORDING_MEMORY.make_metric({(): used_bytes})
        return replace(snapshot, metrics=(*snapshot.metrics, memory, *self._make_sdk_metrics(), *numbers))

    def _make_sdk_metrics(self) -> list[Metric]:
        fates, live = self._fates, 0 if self._meter.has_ended else len(self._mapped.open_spans())
        started = sum(self._mapped.count_written_rows().values()) + self._mapped.ended_rows + live
        processed, exported = (
            self._meter.keep_highest_values(
                metric.name, {error: sum(map(fates.__getitem__, lost)) for error, lost in of.items()}
            )
            for metric, of in ((PROCESSED_SPANS, _PROCESSOR_ERRORS), (EXPORTED_SPANS, _EXPORT_ERRORS))
        )
        exporter = self._exporter.component_type if self._sends else "instrument.file_span_exporter"
        waiting = max(fates["kept"] - sum(fates[fate] for fate in ENDS), 0)
        return [
            LIVE_SPANS.make_metric({(): live}),
            STARTED_SPANS.make_metric({(): started}),
            PROCESSED_SPANS.make_metric(_label_errors("instrument.tail_sampler", processed)),
            INFLIGHT_SPANS.make_metric(_label_errors(exporter, {"": waiting})),
            EXPORTED_SPANS.make_metric(_label_errors(exporter, exported)),
        ]

    def read_totals_for_scrape(self) -> Metered | None:
        if self._mapped.generation != self._generation:
            return None  # what is there by now is another session's
        snapshot, header = self._make_snapshot(), self._mapped.header
        samples = [] if self._meter.has_ended else self._mapped.read_samples(time.monotonic_ns() - GAUGES_FOR_NS)
        return Metered(read_origin(header), snapshot, samples, header.gpus)

    # ---------------------------------------------------------------- the end

    def take_last_metrics(self) -> None:
        if not self._has_last:
            self._has_last = self._meter.has_ended = True
            until_ns = time.monotonic_ns()
            self._retry_until_ns = until_ns + self._exporter.timeout_ns
            if self._facts.metered.asks:
                self._ended = until_ns, self._meter.count_ended_requests()
                self._count_lost_requests()
            self._take_snapshot(until_ns)

    @property
    def has_settled_metrics(self) -> bool:
        """True if no metrics wait to be sent. An unanswered attempt is repeated until the exporter's time-out."""
        if not self.metrics.has_waiting_metrics():
            return True
        self._exporter.send_soon()
        now_ns = time.monotonic_ns()
        may_wait = not self.metrics.is_late or now_ns < self._retry_until_ns
        # In this order: who sends them says so before it takes them.
        if (self.metrics.is_due(now_ns) and may_wait) or self._exporter.is_sending_metrics(self._source):
            return False
        if self.metrics.is_late and may_wait:
            self.metrics.retry_snapshot()
            return False
        self.metrics.drop_waiting_metrics()
        self._write_state()
        return True

    def drop_unsent_metrics(self) -> int:
        self.metrics.drop_waiting_metrics()
        return 0 if self.metrics.off else sum(self.metrics.losses().values())

    def note_sent(self) -> None:
        if self._exporter.is_sending_metrics(self._source):
            self._write_state()

    def end(self) -> None:
        self._exporter.remove_metrics(self._source, RELEASE_S)
        self._write_state()

    def _write_state(self) -> None:
        with self._lock:
            if self._state is None:
                return
            if not self.metrics.has_waiting_metrics():
                self._settled_ns = max(self._settled_ns, self._taken_ns)
            state = replace(self._state, settled_ns=self._settled_ns, delivered=self.metrics.save_state())
            is_written = self._place.write_meter_state(state)
        if not is_written and not self._is_said:
            self._is_said = True
            logger.warning(
                "the recording has no room for the state of all metrics: the next exporter may report some of them "
                "from 0"
            )
