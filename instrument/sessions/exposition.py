"""Metrics in Prometheus's text format, by its own client library, under the names that OpenTelemetry's have there.

Dots become underscores, the unit is put behind the name, counters end in `_total`. Histograms have the fixed bounds
that OpenTelemetry advises for durations of requests: the format knows no exponential ones. A call counts below a bound
by the middle of its bucket in the tally, so one within 0.78 % of a bound may count on its other side.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from instrument.errors import ExportError
from instrument.otlp.metrics import series_of
from instrument.recording.distributions import COUNTER, HISTOGRAM, Distribution, Exemplar, Snapshot
from instrument.recording.histogram import bucket_middle
from instrument.recording.spans import Gpu, Origin, Sample

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The bounds of OpenTelemetry's conventions for `http.server.request.duration`."""

BOUNDS_ITEMS = (1.5, 2.5, 4.5, 8.5, 16.5, 32.5, 64.5, 128.5, 256.5, 512.5, 1024.5)
"""Those of how many there are, between whole numbers."""

UNITS = {"s": "seconds", "By": "bytes", "1": "ratio", "Cel": "celsius", "Hz": "hertz", "J": "joules", "W": "watts"}
"""What units are called in names; one in braces is not in the name."""

_UNITS_OF_RATES = {"By/s": "bytes_per_second"}

Value = float | Distribution


def text_of(
    origin: Origin,
    snapshot: Snapshot | None,
    samples: Sequence[Sample],
    gpus: Iterable[Gpu],
    *,
    openmetrics: bool = False,
) -> str:
    """A snapshot, and the newest of the samples, as text; exemplars only where it is that of OpenMetrics.

    Raises `ExportError` where the client library is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.openmetrics import exposition as of_openmetrics
    except ImportError as missing:
        raise ExportError(
            "asked for metrics in Prometheus's format, but prometheus_client is not installed; "
            "install instrument-sdk[prometheus]"
        ) from missing

    class Collected:
        def collect(self) -> Iterator[Family]:
            for metric in snapshot.metrics if snapshot is not None else ():
                rows = [
                    ({name: _text(value) for name, value in labels}, value) for labels, value in metric.series.items()
                ]
                exemplars = [metric.exemplars.get(labels, ()) for labels in metric.series] if openmetrics else ()
                yield _family(metric.name, metric.unit, metric.kind, metric.description, rows, origin, exemplars)
            newest = {(sample.name, sample.device): sample for sample in samples}
            # A share's base, such as `cores`, is read more seldom, and may come after what is divided by it.
            known = {key: sample.value for key, sample in newest.items() if sample.value is not None}
            for series in series_of(newest.values(), {gpu.device: gpu for gpu in gpus}, origin, known, {}):
                read: list[tuple[Mapping[str, str], Any]] = [
                    ({name: _text(value) for name, value in point.attributes.items()}, point.value)
                    for point in series.points
                ]
                yield _family(series.name, series.unit, series.kind, "", read, origin)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected())
    return (of_openmetrics.generate_latest if openmetrics else generate_latest)(registry).decode()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def name_of(name: str, unit: str) -> str:
    """What a metric is called, without the ending of a counter."""
    known = UNITS.get(unit) or _UNITS_OF_RATES.get(unit, "")
    plain = re.sub(r"[^a-zA-Z0-9]+", "_", name)
    return plain if not known or plain.endswith(f"_{known}") else f"{plain}_{known}"


def _family(
    name: str,
    unit: str,
    kind: str,
    description: str,
    rows: Sequence[tuple[Mapping[str, str], Value]],
    origin: Origin,
    exemplars: Sequence[Sequence[Exemplar]] = (),
) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    names = sorted({re.sub(r"[^a-zA-Z0-9]+", "_", key) for labels, _ in rows for key in labels})
    told = name_of(name, unit)
    family: HistogramMetricFamily | CounterMetricFamily | GaugeMetricFamily
    if kind == HISTOGRAM:
        family = HistogramMetricFamily(told, description, labels=names)
    elif kind == COUNTER:
        family = CounterMetricFamily(told, description, labels=names)
    else:
        family = GaugeMetricFamily(told, description, labels=names)
    for at, (labels, value) in enumerate(rows):
        # Prometheus takes a label that a series has not for an empty one.
        by_name = {re.sub(r"[^a-zA-Z0-9]+", "_", key): text for key, text in labels.items()}
        texts = [by_name.get(label, "") for label in names]
        if isinstance(family, HistogramMetricFamily):
            if isinstance(value, Distribution):
                bounds = BOUNDS_S if unit == "s" else BOUNDS_ITEMS
                buckets = _buckets(value, bounds, exemplars[at] if exemplars else (), origin)
                family.add_metric(texts, buckets, value.sum_ns / 1e9)
        elif not isinstance(value, Distribution):
            family.add_metric(texts, value)
    return family


def _buckets(of: Distribution, bounds: Sequence[float], exemplars: Sequence[Exemplar], origin: Origin) -> Sequence[Any]:
    """The buckets as the client library takes them: each with the longest of its exemplars, where it has one."""
    from prometheus_client.samples import Exemplar as Told

    told = {}
    for one in exemplars:
        ids = {"trace_id": f"{one.trace_id:032x}", "span_id": f"{one.span_id:016x}"}
        at = bisect_left(bounds, one.value_ns / 1e9)
        told[at] = Told(ids, one.value_ns / 1e9, origin.realtime_of(one.at_ns) / 1e9)
    return [(*bucket, told.get(at)) for at, bucket in enumerate(_cumulative(of, bounds))]


def _cumulative(of: Distribution, bounds: Sequence[float]) -> list[tuple[str, float]]:
    """How many lie below each bound, as the format has it."""
    counts = [0] * (len(bounds) + 1)
    for index, count in of.buckets.items():
        counts[bisect_left(bounds, bucket_middle(index) / 1e9)] += count
    return list(zip([*map(str, bounds), "+Inf"], map(float, accumulate(counts)), strict=True))
