"""Writes metrics in Prometheus's text formats with its client library, under OpenTelemetry's names for Prometheus.

In names, dots become underscores, the unit is a suffix, and counters end in `_total`. The text formats have no
exponential histograms, so bucket bounds are fixed, by OpenTelemetry's advice if there is any. The tally counts a call
at the middle of a bucket of its own. A call within 0.78 % of a bound may count in the next bucket.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from instrument.errors import ExportError
from instrument.otlp.metrics import convert_samples
from instrument.recording.distributions import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    Distribution,
    Exemplar,
    Labels,
    Metric,
    Snapshot,
    bucket_middle,
    summed,
)
from instrument.recording.gen_ai_metrics import FIRST_TOKEN, OUTPUT_TOKEN, QUEUE_TIME, REQUEST_DURATION
from instrument.recording.numbers import is_own
from instrument.recording.spans import Gpu, Origin, Sample

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family
    from prometheus_client.registry import CollectorRegistry

BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The bucket bounds in seconds that OpenTelemetry's conventions advise for `http.server.request.duration`."""

_GENERATION_S = tuple(round(0.01 * 2**power, 2) for power in range(14))

BOUNDS_OF: Mapping[str, Sequence[float]] = {
    REQUEST_DURATION: _GENERATION_S,
    FIRST_TOKEN: (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    ),
    OUTPUT_TOKEN: (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    QUEUE_TIME: (0.001, 0.005, *_GENERATION_S),
    "instrument.call.duration": tuple(round(1e-5 * 4**power, 5) for power in range(13)),
}  # fmt: skip
"""The bucket bounds of each metric's histogram, in seconds. GenAI metrics have the bounds of OpenTelemetry's
convention. Calls of functions have bounds from 10 us to some minutes."""

BOUNDS_ITEMS = (1.5, 2.5, 4.5, 8.5, 16.5, 32.5, 64.5, 128.5, 256.5, 512.5, 1024.5)
"""The bucket bounds of histograms of counts. No bound is a whole number, so no count equals a bound."""

UNITS = {"s": "seconds", "By": "bytes", "1": "ratio", "Cel": "celsius", "Hz": "hertz", "J": "joules", "W": "watts"}
"""The words for units at the end of Prometheus's metric names. A unit in braces has no word."""

_UNITS_OF_RATES = {"By/s": "bytes_per_second"}

OF_PROCESSES = ("process.", "instrument.process.", "instrument.gpu.process.", "instrument.torch.")
"""The prefixes of gauges that measure one process. All other gauges measure the machine, so its processes report the
same values."""

PROCESSES, PROCESS_PID, SERVICE = "instrument.processes", "process.pid", "service.name"

MetricAndOrigin = tuple[Metric, Origin]
"""A metric, and the origin that converts the times of its exemplars to wall time."""


@dataclass(frozen=True, slots=True)
class Metered:
    """The metrics of one process: its totals, and the newest samples of its gauges while it lives."""

    origin: Origin
    snapshot: Snapshot | None
    samples: Sequence[Sample] = ()
    gpus: Sequence[Gpu] = ()


def require_client() -> None:
    """Raise `ExportError` if the client library is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as missing:
        raise ExportError(
            "prometheus_client is not installed, so metrics cannot be served; install instrument-sdk[prometheus]"
        ) from missing


def registry_of(make: Callable[[], Iterable[MetricAndOrigin]]) -> CollectorRegistry:
    """Return a registry for the client library's writers. It calls `make` for the metrics of each output."""
    from prometheus_client import CollectorRegistry

    class Collected:
        def collect(self) -> Iterable[Family]:
            return (_make_family(metric, origin) for metric, origin in make())

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected())
    return registry


def text_of(metrics: Iterable[MetricAndOrigin], *, openmetrics: bool = False) -> str:
    """Return metrics as text. Only the OpenMetrics format has exemplars."""
    from prometheus_client import generate_latest
    from prometheus_client.openmetrics import exposition as of_openmetrics

    encode = of_openmetrics.generate_latest if openmetrics else generate_latest
    return encode(registry_of(lambda: metrics)).decode()


def metrics_of_process(metered: Metered, why_alone: str) -> Iterator[MetricAndOrigin]:
    """Yield the metrics of one process."""
    yield from _make_totals([((), metered)])
    yield from _make_gauges([((), metered)])
    description = f"Processes that these metrics are of: this one alone, {why_alone}."
    yield Metric(PROCESSES, "{process}", GAUGE, description, {(): 1}), metered.origin


def metrics_of_run(living: Sequence[Metered], ended: Mapping[str, Sequence[Metric]]) -> Iterator[MetricAndOrigin]:
    """Yield the metrics of several processes: for each service the sums over living and `ended` processes. Gauges have
    the id of their process as a label. If there are several services, each series has the service's name."""
    services = {*ended, *(process.origin.service for process in living)}
    labels: dict[str, Labels] = {name: ((SERVICE, name),) if len(services) > 1 else () for name in services}
    before = [
        (labels[name], Metered(Origin(0, name, 0, 0), Snapshot(0, 0, tuple(metrics))))
        for name, metrics in ended.items()
    ]
    yield from _make_totals([*before, *((labels[process.origin.service], process) for process in living)])
    pids = [((*labels[process.origin.service], (PROCESS_PID, str(process.origin.pid))), process) for process in living]
    yield from _make_gauges(pids, of_processes=True)
    yield from _make_gauges([((), _merge_samples(living))] if living else [], of_processes=False)
    description = "Living processes that these metrics are of. Totals include the processes that have ended."
    counts = Counter(process.origin.service for process in living)
    series: dict[Labels, float] = {key: counts[name] for name, key in labels.items()}
    yield Metric(PROCESSES, "{process}", GAUGE, description, series or {(): 0}), Origin(0, "", 0, 0)


def _merge_samples(living: Sequence[Metered]) -> Metered:
    """Return the samples of all processes as one process's, in order of time."""
    samples = sorted((sample for process in living for sample in process.samples), key=lambda sample: sample.at_ns)
    gpus = {gpu.device: gpu for process in living for gpu in process.gpus}
    return replace(living[0], samples=samples, gpus=list(gpus.values()))


def _make_totals(parts: Sequence[tuple[Labels, Metered]]) -> Iterator[MetricAndOrigin]:
    metrics = [
        replace(
            metric,
            series={(*labels, *key): value for key, value in metric.series.items()},
            exemplars={(*labels, *key): items for key, items in metric.exemplars.items()},
        )
        for labels, part in parts
        for metric in (part.snapshot.metrics if part.snapshot is not None else ())
    ]
    for metric in summed(metrics):
        yield metric, parts[-1][1].origin


def _make_gauges(
    parts: Sequence[tuple[Labels, Metered]], *, of_processes: bool | None = None
) -> Iterator[MetricAndOrigin]:
    """Yield the newest sample of each gauge. `of_processes` selects gauges of processes, or of machines (False)."""
    metrics: dict[str, Metric] = {}
    for labels, part in parts:
        newest = {(sample.name, sample.device): sample for sample in part.samples}
        # A share's base, such as `cores`, is read more seldom, and may come after what is divided by it.
        values = {key: sample.value for key, sample in newest.items() if sample.value is not None}
        for series in convert_samples(newest.values(), {gpu.device: gpu for gpu in part.gpus}, part.origin, values, {}):
            is_of_process = series.name.startswith(OF_PROCESSES) or is_own(series.name)
            if of_processes not in (None, is_of_process):
                continue
            metric = metrics.setdefault(series.name, Metric(series.name, series.unit, series.kind, "", {}))
            points: dict[Labels, Any] = {(*labels, *point.attributes.items()): point.value for point in series.points}
            metrics[series.name] = replace(metric, series={**metric.series, **points})
    for metric in metrics.values():
        yield metric, parts[0][1].origin


def texts_by_name(labels: Labels) -> dict[str, str]:
    """Return the labels of a series in Prometheus's format."""
    return {_make_label(key): str(value).lower() if isinstance(value, bool) else str(value) for key, value in labels}


def _make_label(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9]+", "_", name)


def make_name(name: str, unit: str) -> str:
    """Return the name of a metric in Prometheus's format, without the suffix of a counter."""
    unit_name = UNITS.get(unit) or _UNITS_OF_RATES.get(unit, "")
    plain = _make_label(name)
    return plain if not unit_name or plain.endswith(f"_{unit_name}") else f"{plain}_{unit_name}"


def _make_family(metric: Metric, origin: Origin) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.samples import Exemplar as BucketExemplar

    names = sorted({_make_label(key) for labels in metric.series for key, _ in labels})
    name = make_name(metric.name, metric.unit)
    family: HistogramMetricFamily | CounterMetricFamily | GaugeMetricFamily
    if metric.kind == HISTOGRAM:
        family = HistogramMetricFamily(name, metric.description, labels=names)
    elif metric.kind == COUNTER:
        family = CounterMetricFamily(name, metric.description, labels=names)
    else:
        family = GaugeMetricFamily(name, metric.description, labels=names)
    for labels, value in metric.series.items():
        # Prometheus takes a label that a series has not for an empty one.
        by_name = texts_by_name(labels)
        texts = [by_name.get(label, "") for label in names]
        if isinstance(family, HistogramMetricFamily):
            if isinstance(value, Distribution):
                buckets: list[Any] = []
                for bound, count, exemplar in buckets_of(metric, labels, value):
                    longest = exemplar and BucketExemplar(
                        ids_of(exemplar), exemplar.value_ns / 1e9, origin.realtime_of(exemplar.at_ns) / 1e9
                    )
                    buckets.append(("+Inf" if bound == math.inf else str(bound), float(count), longest))
                family.add_metric(texts, buckets, value.sum_ns / 1e9)
        elif not isinstance(value, Distribution):
            family.add_metric(texts, value)
    return family


def ids_of(exemplar: Exemplar) -> dict[str, str]:
    """Return the labels of an exemplar."""
    return {"trace_id": f"{exemplar.trace_id:032x}", "span_id": f"{exemplar.span_id:016x}"}


def buckets_of(metric: Metric, labels: Labels, of: Distribution) -> Iterator[tuple[float, int, Exemplar | None]]:
    """Yield each bound in s, the count of all values below it, and the longest exemplar of its bucket, if any."""
    bounds = BOUNDS_OF.get(metric.name, BOUNDS_S) if metric.unit == "s" else BOUNDS_ITEMS
    counts = [0] * (len(bounds) + 1)
    for index, count in of.buckets.items():
        counts[bisect_left(bounds, bucket_middle(index) / 1e9)] += count
    exemplars = sorted(metric.exemplars.get(labels, ()), key=attrgetter("value_ns"))
    longest = {bisect_left(bounds, exemplar.value_ns / 1e9): exemplar for exemplar in exemplars}
    for at, (bound, count) in enumerate(zip((*bounds, math.inf), accumulate(counts), strict=True)):
        yield bound, count, longest.get(at)
