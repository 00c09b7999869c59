"""Prepares metrics for a collector, from samples of gauges and snapshots of totals, and counts lost metrics.

A snapshot that cannot be delivered is no loss: the next snapshot repeats the totals, or has all changes since the last
delivery.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from instrument.otlp.packing import Exponential, Point, Series, make_exponential
from instrument.otlp.senders import Response
from instrument.recording.distributions import Distribution, Labels, Metric, Snapshot
from instrument.recording.metric_definitions import COUNTER, GAUGE, GAUGES, HISTOGRAM, MetricDefinition
from instrument.recording.spans import HOST, Gpu, Origin, Sample
from instrument.runtime.environment import METRICS_EXPORTER, TEMPORALITY
from instrument.runtime.lazy_imports import dataclass, field, replace
from instrument.runtime.unpatched import Lock

DELTAS = {"cumulative": (), "delta": (COUNTER, HISTOGRAM), "lowmemory": (HISTOGRAM,)}
"""The kinds of metrics that are sent as deltas, by the value of OpenTelemetry's temporality variable."""

QUEUE_SAMPLES = 65_536
"""The maximum number of samples that wait for delivery. Above that the oldest are dropped."""

DELAY_NS = 10 * 10**9
"""Nanoseconds for which samples are gathered before they are sent in a request."""

REQUEST_SAMPLES, LEAST_REQUEST_SAMPLES = 1_000, 100
"""The maximum number of samples or series per request. Refusals by the collector reduce the first number to the
second."""

PATIENCE_NS = 2 * 10**9
"""The maximum time in ns for which a request of metrics may delay the spans that wait behind it."""

TimedValue = tuple[float | Distribution, int]
"""The value of a series, and its wall time in ns."""


@dataclass(slots=True)
class MetricsRequest:
    """The metrics of one OTLP request: `count` samples of gauges, or `count` series of a snapshot."""

    series: list[Series] = field(default_factory=list)
    count: int = 0
    values: dict[tuple[str, Labels], TimedValue] = field(default_factory=dict)


@dataclass(slots=True)
class _State:
    """The attributes of `Metrics` that the next exporter continues from."""

    start_ns: int
    start_realtime_ns: int
    delivered_ns: int
    values: list[tuple[tuple[str, Labels], TimedValue]]
    taken_ns: int
    begun_ns: dict[int, int]
    newest: list[tuple[tuple[str, int], float]]
    lost: dict[str, int]
    reason: str
    off: str
    has_metrics: bool


class Metrics:
    """A queue of metrics for a collector: samples of gauges, and the newest snapshot of totals. It counts losses.

    Any thread may call any method, but only one thread makes and settles requests. If a collector refuses all metrics,
    only spans are sent from then on. `environ`, the measured process's environment, names the preferred temporality.
    """

    def __init__(self, endpoint: str | None, environ: Mapping[str, str] = os.environ) -> None:
        self.off = (
            "" if endpoint else "the endpoint for spans does not end in /v1/traces, so that of metrics is unknown"
        )
        if environ.get(METRICS_EXPORTER, "").strip() == "none":
            self.off = f"{METRICS_EXPORTER} is none"
        temporality = environ.get(TEMPORALITY, "").strip().lower() or "cumulative"
        self._deltas = DELTAS.get(temporality, ())
        self._problem = (
            "" if temporality in DELTAS else f"{TEMPORALITY}: found {temporality!r}; allowed: {', '.join(DELTAS)}"
        )
        self._has_metrics = False
        self.is_late = False
        """True if the collector did not answer the last request in time, and the same numbers can be sent again."""
        self._lock = Lock()
        self._waiting: deque[Sample] = deque()
        self._oldest_ns = 0
        self.taken_ns = 0
        """The time in ns of the newest sample that was offered to this exporter or the previous one."""
        self._gpus: dict[int, Gpu] = {}
        self._newest: dict[tuple[str, int], float] = {}
        self._begun_ns: dict[int, int] = {}
        self._snapshot: Snapshot | None = None
        self._tried: Snapshot | None = None
        self._delivered: Snapshot | None = None
        self._delivered_values: dict[tuple[str, Labels], TimedValue] = {}
        self._start_ns = self._start_realtime_ns = self._delivered_ns = 0
        self._lost: Counter[str] = Counter()
        self._reason = ""
        self._request_samples = REQUEST_SAMPLES

    def save_state(self) -> dict[str, Any]:
        """Return the losses and the delivered values as JSON values, for `restore_state`."""
        with self._lock:
            state = _State(
                self._start_ns, self._start_realtime_ns, self._delivered_ns, [*self._delivered_values.items()],
                self.taken_ns, self._begun_ns, [*self._newest.items()], self._lost, self._reason,
                self.off, self._has_metrics,
            )  # fmt: skip
            return cast("dict[str, Any]", msgspec.to_builtins(state, enc_hook=int))

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another exporter. Raises one of `export_checkpoint.DAMAGED` for a malformed
        state."""
        before = msgspec.convert(state, _State, strict=False)
        with self._lock:
            self._start_ns, self._start_realtime_ns = before.start_ns, before.start_realtime_ns
            self._delivered_ns, self._delivered_values = before.delivered_ns, dict(before.values)
            self.taken_ns, self._begun_ns, self._newest = before.taken_ns, before.begun_ns, dict(before.newest)
            self._lost, self._reason = Counter(before.lost), before.reason
            self.off, self._has_metrics = self.off or before.off, self._has_metrics or before.has_metrics

    # ---------------------------------------------------------------- what waits

    def offer_samples(self, samples: Sequence[Sample], gpus: Sequence[Gpu]) -> None:
        if self.off:
            self._has_metrics = self._has_metrics or bool(samples)
            return
        with self._lock:
            if not self._waiting:
                self._oldest_ns = time.monotonic_ns()
            self._gpus.update({gpu.device: gpu for gpu in gpus})
            self._waiting.extend(samples)
            self.taken_ns = max([self.taken_ns, *(sample.at_ns for sample in samples)])
            while len(self._waiting) > QUEUE_SAMPLES:
                self._waiting.popleft()
                self._lost["samples of gauges dropped"] += 1

    def put_snapshot(self, snapshot: Snapshot) -> None:
        if self.off:
            self._has_metrics = True
        else:
            self._snapshot = snapshot

    def has_waiting_metrics(self) -> bool:
        return bool(self._waiting) or self._snapshot is not self._delivered

    def is_due(self, now_ns: int) -> bool:
        return self._snapshot is not self._tried or (bool(self._waiting) and now_ns - self._oldest_ns >= DELAY_NS)

    def make_samples_due(self) -> None:
        self._oldest_ns = 0

    def retry_snapshot(self) -> None:
        """Make the waiting snapshot due again after a failed attempt."""
        self._tried = None

    def drop_waiting_metrics(self) -> None:
        with self._lock:
            self._lost["samples of gauges dropped"] += len(self._waiting)
            self._waiting.clear()
            snapshot, delivered = self._snapshot, self._delivered
            self._tried = self._delivered = snapshot
            if snapshot is not None and snapshot is not delivered:
                self._lost["series of metrics dropped"] += sum(len(metric.series) for metric in snapshot.metrics)

    # ---------------------------------------------------------------- requests

    def make_requests(self, origin: Origin) -> Iterator[MetricsRequest]:
        """Yield OTLP requests with the waiting snapshot, then with the waiting samples. The caller settles each
        request, and stops after a failure."""
        snapshot = self._tried = self._snapshot
        if snapshot is not None and snapshot is not self._delivered:
            yield from self._split_snapshot(snapshot, origin)
            self._delivered, self._delivered_ns = snapshot, snapshot.at_ns
        while self._waiting:
            with self._lock:
                samples = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._request_samples))]
                self._oldest_ns = time.monotonic_ns()
                gpus = dict(self._gpus)
            if series := convert_samples(samples, gpus, origin, self._newest, self._begun_ns):
                yield MetricsRequest(series, len(samples))

    def _split_snapshot(self, snapshot: Snapshot, origin: Origin) -> Iterator[MetricsRequest]:
        if self._start_ns != snapshot.start_ns or not self._start_realtime_ns:
            self._start_ns, self._start_realtime_ns = snapshot.start_ns, origin.realtime_of(snapshot.start_ns)
        at_ns = origin.realtime_of(snapshot.at_ns)
        request = MetricsRequest()
        for metric in snapshot.metrics:
            series: Series | None = None
            for labels, value in metric.series.items():
                point = self._make_point(metric, labels, value, at_ns, origin)
                if point is None:
                    continue
                if request.count >= self._request_samples:
                    yield request
                    request, series = MetricsRequest(), None
                if series is None:
                    is_delta = metric.kind in self._deltas
                    series = Series(metric.name, metric.unit, metric.kind, [], metric.description, is_delta)
                    request.series.append(series)
                series.points.append(point)
                request.count += 1
                request.values[metric.name, labels] = value, point.at_ns
        if request.count:
            yield request

    def _make_point(
        self, metric: Metric, labels: Labels, value: float | Distribution, at_ns: int, origin: Origin
    ) -> Point | None:
        start_ns = self._start_realtime_ns
        sent_value: float | Exponential
        if metric.kind in self._deltas:
            before, start_ns = self._delivered_values.get((metric.name, labels), (None, start_ns))
            if isinstance(value, Distribution):
                since = value.subtract_state(before) if isinstance(before, Distribution) else value
                if not since.count:
                    return None
                sent_value = make_exponential(since, has_extremes=before is None)
            else:
                sent_value = value - before if isinstance(before, int | float) else value
                if not sent_value:
                    return None
        else:
            sent_value = make_exponential(value, has_extremes=True) if isinstance(value, Distribution) else value
        since_ns = self._delivered_ns
        exemplars = tuple(
            replace(exemplar, at_ns=origin.realtime_of(exemplar.at_ns))
            for exemplar in metric.exemplars.get(labels, ())
            if exemplar.kept_ns > since_ns
        )
        # Not before its start, where the wall clock was set back.
        return Point(dict(labels), 0 if metric.kind == GAUGE else start_ns, max(at_ns, start_ns), sent_value, exemplars)

    def settle_request(self, request: MetricsRequest, verdict: Response) -> None:
        self.is_late = verdict.is_late and not self._deltas
        lost = min(verdict.rejected, request.count) if verdict.taken else request.count
        with self._lock:
            if not request.values:
                self._lost[f"samples of gauges {'rejected' if verdict.taken else 'failed'}"] += lost
            elif verdict.taken:
                self._delivered_values.update(request.values if self._deltas else {})
                self._lost["series of metrics rejected"] += lost
            if lost:
                self._reason = verdict.reason or "the collector did not say why"
            if verdict.too_large:
                self._request_samples = max(self._request_samples // 2, LEAST_REQUEST_SAMPLES)
            if verdict.refused:
                self.off, self._has_metrics = f"the collector takes none ({self._reason})", True
        if verdict.refused:
            self.drop_waiting_metrics()

    def losses(self) -> dict[str, int]:
        return {f"{reason} by the OTLP export": lost for reason, lost in self._lost.items() if lost}

    def notes(self) -> list[str]:
        if self.off:
            return [f"export.otlp: metrics are not sent: {self.off}"] if self._has_metrics else []
        notes = [f"export.otlp: {self._problem}"] if self._problem else []
        return [*notes, f"export.otlp: metrics did not get through: {self._reason}"] if self._reason else notes


@dataclass(frozen=True, slots=True)
class Metered:
    """The metrics of one process: its totals, and the newest samples of its gauges while it lives."""

    origin: Origin
    snapshot: Snapshot | None
    samples: Sequence[Sample] = ()
    gpus: Sequence[Gpu] = ()


def convert_samples(
    samples: Iterable[Sample],
    gpus: Mapping[int, Gpu],
    origin: Origin,
    newest: dict[tuple[str, int], float],
    begun_ns: dict[int, int],
) -> list[Series]:
    """Convert samples of gauges to metrics. Store the last value of each gauge in `newest`, and the wall time of each
    device's first sample in `begun_ns`."""
    series_by_name: dict[str, Series] = {}
    for sample in samples:
        if sample.value is None:
            continue
        newest[sample.name, sample.device] = sample.value
        at_ns = origin.realtime_of(sample.at_ns)
        first_ns = begun_ns.setdefault(sample.device, at_ns)
        for metric in GAUGES[sample.name].metrics if sample.name in GAUGES else ():
            base = newest.get((metric.per, sample.device)) if metric.per else 1.0
            if base:
                series = series_by_name.setdefault(metric.name, Series(metric.name, metric.unit, metric.kind))
                series.points.append(
                    Point(
                        _describe_device(metric, gpus.get(sample.device), sample.device),
                        first_ns if metric.kind != "gauge" else 0,
                        max(at_ns, first_ns) if metric.kind != "gauge" else at_ns,
                        sample.value * metric.scale / base,
                    )
                )
    return list(series_by_name.values())


def _describe_device(metric: MetricDefinition, gpu: Gpu | None, device: int) -> dict[str, str | int]:
    if device == HOST:
        return dict(metric.attributes)
    known_gpu = gpu or Gpu(device)
    return {
        "hw.id": known_gpu.uuid or f"GPU {device}",
        "hw.type": "gpu",
        "hw.name": f"GPU {device}",
        **({"hw.model": known_gpu.model} if known_gpu.model else {}),
        # A GPU that NVML does not list may be another maker's: torch alone reported it.
        **({"hw.vendor": "NVIDIA"} if gpu is not None else {}),
        "cuda.device.index": device,
        **dict(metric.attributes),
    }
