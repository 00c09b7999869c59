"""Writes metrics for Prometheus, as text by Prometheus's client library, or as protobuf.

The names are OpenTelemetry's, with underscores for dots, the unit as a suffix, and `_total` at the end of counters.
Histograms have fixed buckets. In protobuf, they are also native histograms with the buckets of OTLP's exponential
histogram.
"""

from __future__ import annotations

import math
import re
import struct
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from instrument.clock import read_clocks
from instrument.errors import ExportError
from instrument.otlp.metrics_queue import Metered, convert_samples
from instrument.otlp.packing import Exponential, encode_varint, encode_zigzag, make_exponential, pack_field, pack_text
from instrument.recording.distributions import (
    Distribution,
    Exemplar,
    Labels,
    Metric,
    Snapshot,
    bucket_middle,
    sum_metrics,
)
from instrument.recording.metric_definitions import (
    BOUNDS_ITEMS,
    BOUNDS_S,
    COUNTER,
    DEFINITIONS,
    GAUGE,
    GAUGES,
    HISTOGRAM,
    PROCESSES,
    UPDOWN,
)
from instrument.recording.spans import Origin

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.registry import CollectorRegistry

UNITS = {"s": "seconds", "By": "bytes", "1": "ratio", "Cel": "celsius", "Hz": "hertz", "J": "joules", "W": "watts"}
"""The suffixes of Prometheus's metric names, by unit. A unit in braces has no suffix."""

_UNITS_OF_RATES = {"By/s": "bytes_per_second"}

PROCESS_PID, SERVICE = "process.pid", "service.name"

MetricAndOrigin = tuple[Metric, Origin]
"""A metric, and the origin that converts the times of its exemplars to wall time."""


def require_prometheus() -> None:
    try:
        import prometheus_client  # noqa: F401
    except ImportError as missing:
        raise ExportError(
            "prometheus_client is not installed, so metrics cannot be served; install instrument-sdk[prometheus]"
        ) from missing


def make_registry(make: Callable[[], Iterable[MetricAndOrigin]]) -> CollectorRegistry:
    """Return a registry for `prometheus_client`. Each output calls `make` for the current metrics."""
    from prometheus_client import CollectorRegistry

    class Collected:
        def collect(self) -> Iterable[Family]:
            return (_make_family(metric, origin) for metric, origin in make())

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected())
    return registry


def format_metrics(metrics: Iterable[MetricAndOrigin], *, openmetrics: bool = False) -> str:
    """Return metrics as text. Only the OpenMetrics format has exemplars."""
    from prometheus_client import generate_latest
    from prometheus_client.openmetrics import exposition as of_openmetrics

    encode = of_openmetrics.generate_latest if openmetrics else generate_latest
    return encode(make_registry(lambda: metrics)).decode()


def metrics_of_process(metered: Metered, why_alone: str) -> Iterator[MetricAndOrigin]:
    yield from _make_totals([((), metered)])
    yield from _make_gauges([((), metered)])
    description = f"Processes that these metrics are of: this one alone, {why_alone}."
    yield replace(PROCESSES.make_metric({(): 1}), description=description), metered.origin


def metrics_of_run(living: Sequence[Metered], ended: Mapping[str, Sequence[Metric]]) -> Iterator[MetricAndOrigin]:
    """Yield the metrics of several processes. Totals are sums over the living and the ended processes of a service.
    Gauges of processes have the process id as a label."""
    services = {*ended, *(process.origin.service for process in living)}
    labels: dict[str, Labels] = {name: ((SERVICE, name),) if len(services) > 1 else () for name in services}
    clocks = read_clocks()  # exemplars of ended processes have times of this machine's monotonic clock
    before = [
        (labels[name], Metered(Origin(0, name, *clocks), Snapshot(0, 0, tuple(metrics))))
        for name, metrics in ended.items()
    ]
    yield from _make_totals([*before, *((labels[process.origin.service], process) for process in living)])
    pids = [((*labels[process.origin.service], (PROCESS_PID, str(process.origin.pid))), process) for process in living]
    yield from _make_gauges(pids, of_processes=True)
    yield from _make_gauges([((), _merge_samples(living))] if living else [], of_processes=False)
    counts = Counter(process.origin.service for process in living)
    series: dict[Labels, float] = {key: counts[name] for name, key in labels.items()}
    yield PROCESSES.make_metric(series or {(): 0}), Origin(0, "", 0, 0)


def _merge_samples(living: Sequence[Metered]) -> Metered:
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
    for metric in sum_metrics(metrics):
        yield metric, parts[-1][1].origin


def _make_gauges(
    parts: Sequence[tuple[Labels, Metered]], *, of_processes: bool | None = None
) -> Iterator[MetricAndOrigin]:
    """Yield the newest sample of each gauge. `of_processes` is True for gauges of processes, False for gauges of
    machines, None for both."""
    metrics: dict[str, Metric] = {}
    for labels, part in parts:
        newest = {
            (sample.name, sample.device): sample
            for sample in part.samples
            if sample.name in GAUGES and of_processes in (None, GAUGES[sample.name].is_process_gauge)
        }
        # A share's base, such as `cores`, is read more seldom, and may come after what is divided by it.
        values = {key: sample.value for key, sample in newest.items() if sample.value is not None}
        for series in convert_samples(newest.values(), {gpu.device: gpu for gpu in part.gpus}, part.origin, values, {}):
            metric = metrics.setdefault(series.name, Metric(series.name, series.unit, series.kind, "", {}))
            points: dict[Labels, Any] = {(*labels, *point.attributes.items()): point.value for point in series.points}
            metrics[series.name] = replace(metric, series={**metric.series, **points})
    for metric in metrics.values():
        yield metric, parts[0][1].origin


def make_label_texts(labels: Labels) -> dict[str, str]:
    return {_make_label(key): str(value).lower() if isinstance(value, bool) else str(value) for key, value in labels}


def _make_label(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9]+", "_", name)


def make_metric_name(name: str, unit: str) -> str:
    """Return the name of a metric in Prometheus's format, without the suffix of a counter."""
    unit_name = UNITS.get(unit) or _UNITS_OF_RATES.get(unit, "")
    plain = _make_label(name)
    return plain if not unit_name or plain.endswith(f"_{unit_name}") else f"{plain}_{unit_name}"


def _make_family(metric: Metric, origin: Origin) -> Family:
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.samples import Exemplar as BucketExemplar

    name = make_metric_name(metric.name, metric.unit)
    family = Family(name, metric.description, GAUGE if metric.kind == UPDOWN else metric.kind)
    # Prometheus takes a label that a series has not for an empty one.
    blanks = {_make_label(key): "" for labels in metric.series for key, _ in labels}
    for labels, value in metric.series.items():
        texts = {**blanks, **make_label_texts(labels)}
        if not isinstance(value, Distribution):
            family.add_sample(f"{name}_total" if metric.kind == COUNTER else name, texts, value)
            continue
        count = 0
        for bound, count, exemplar in iterate_buckets(metric, labels, value):
            longest = None
            if exemplar is not None:
                at_s = origin.realtime_of(exemplar.at_ns) / 1e9
                longest = BucketExemplar(make_exemplar_labels(exemplar), exemplar.value_ns / 1e9, at_s)
            edge = "+Inf" if bound == math.inf else str(bound)
            family.add_sample(f"{name}_bucket", {**texts, "le": edge}, count, exemplar=longest)
        family.add_sample(f"{name}_count", texts, count)
        family.add_sample(f"{name}_sum", texts, value.sum_ns / 1e9)
    return family


def make_exemplar_labels(exemplar: Exemplar) -> dict[str, str]:
    return {"trace_id": f"{exemplar.trace_id:032x}", "span_id": f"{exemplar.span_id:016x}"}


def iterate_buckets(metric: Metric, labels: Labels, of: Distribution) -> Iterator[tuple[float, int, Exemplar | None]]:
    """Yield each bucket of a histogram: its upper bound, the number of values up to the bound, and the exemplar with
    the largest value."""
    usual_bounds = BOUNDS_S if metric.unit == "s" else BOUNDS_ITEMS
    bounds = DEFINITIONS[metric.name].bounds if metric.name in DEFINITIONS else usual_bounds
    counts = [0] * (len(bounds) + 1)
    for index, count in of.buckets.items():
        counts[bisect_left(bounds, bucket_middle(index) / 1e9)] += count
    exemplars = sorted(metric.exemplars.get(labels, ()), key=attrgetter("value_ns"))
    longest = {bisect_left(bounds, exemplar.value_ns / 1e9): exemplar for exemplar in exemplars}
    for at, (bound, count) in enumerate(zip((*bounds, math.inf), accumulate(counts), strict=True)):
        yield bound, count, longest.get(at)


# ---------------------------------------------------------------- protobuf

MEDIA_TYPE, MESSAGE = "application/vnd.google.protobuf", "io.prometheus.client.MetricFamily"
CONTENT_TYPE = f"{MEDIA_TYPE}; proto={MESSAGE}; encoding=delimited"

ZERO_THRESHOLD = 2.0**-128
"""The upper bound in seconds of the bucket for zeros, as in Prometheus's libraries. With 0, Prometheus would ignore the
native buckets of an empty histogram."""

_pack_double = struct.Struct("<Bd").pack


def prefers_protobuf(accept: str) -> bool:
    offers = [(0.0, False)]
    for offer in accept.lower().split(","):
        media_type, *parameters = map(str.strip, offer.split(";"))
        is_ours = media_type == MEDIA_TYPE and {f"proto={MESSAGE}".lower(), "encoding=delimited"} <= {*parameters}
        qualities = [parameter[2:] for parameter in parameters if parameter.startswith("q=")]
        with suppress(ValueError):
            offers.append((float(qualities[0]) if qualities else 1.0, is_ours))
    quality, is_best = max(offers)
    return is_best and quality > 0


# The wire: each MetricFamily {name 1, help 2, type 3, metric 4} follows its length. Metric {label 1, gauge 2, counter
# 3, histogram 7}; LabelPair {name 1, value 2}; Gauge, Counter {value 1}; Histogram {sample_count 1, sample_sum 2,
# bucket 3, schema 5, zero_threshold 6, zero_count 7, positive_span 12, positive_delta 13}; BucketSpan {offset 1, length
# 2}; Bucket {cumulative_count 1, upper_bound 2, exemplar 3}; Exemplar {label 1, value 2, timestamp 3}; Timestamp
# {seconds 1, nanos 2}.
def pack_families(metrics: Iterable[MetricAndOrigin]) -> bytes:
    return b"".join(pack_field(b"", _pack_family(metric, origin)) for metric, origin in metrics)


def _pack_family(metric: Metric, origin: Origin) -> bytes:
    name = make_metric_name(metric.name, metric.unit) + ("_total" if metric.kind == COUNTER else "")
    kind = {COUNTER: b"\x18\x00", HISTOGRAM: b"\x18\x04"}.get(metric.kind, b"\x18\x01")
    points = []
    for labels, value in metric.series.items():
        if isinstance(value, Distribution):
            packed = pack_field(b"\x3a", _pack_histogram(metric, labels, value, origin))
        else:
            packed = pack_field(b"\x1a" if metric.kind == COUNTER else b"\x12", _pack_double(0x09, value))
        points.append(pack_field(b"\x22", _pack_labels(make_label_texts(labels)) + packed))
    return pack_text(b"\x0a", name) + pack_text(b"\x12", metric.description) + kind + b"".join(points)


def _pack_labels(texts: Mapping[str, str]) -> bytes:
    pairs = (pack_text(b"\x0a", name) + pack_text(b"\x12", text) for name, text in sorted(texts.items()))
    return b"".join(pack_field(b"\x0a", pair) for pair in pairs)


def _pack_histogram(metric: Metric, labels: Labels, of: Distribution, origin: Origin) -> bytes:
    buckets, count = [], 0
    for bound, count, exemplar in iterate_buckets(metric, labels, of):
        packed = b"\x08" + encode_varint(count) + _pack_double(0x11, bound)
        if exemplar is not None:
            seconds, nanos = divmod(max(origin.realtime_of(exemplar.at_ns), 0), 10**9)
            value = _pack_double(0x11, exemplar.value_ns / 1e9)
            time = pack_field(b"\x1a", b"\x08" + encode_varint(seconds) + b"\x10" + encode_varint(nanos))
            packed += pack_field(b"\x1a", _pack_labels(make_exemplar_labels(exemplar)) + value + time)
        buckets.append(pack_field(b"\x1a", packed))
    total = b"\x08" + encode_varint(count) + _pack_double(0x11, of.sum_ns / 1e9)
    return total + b"".join(buckets) + _pack_native_buckets(make_exponential(of, has_extremes=False))


def _pack_native_buckets(of: Exponential) -> bytes:
    """Pack the buckets for Prometheus, which numbers a bucket by its upper bound. OTLP uses the lower bound."""
    spans: list[list[int]] = []
    deltas, end, before = b"", 0, 0
    for number, count in enumerate(of.counts, of.offset + 1):
        if count:
            if spans and number == end:
                spans[-1][1] += 1
            else:
                spans.append([number - end, 1])
            deltas += encode_varint(encode_zigzag(count - before))
            end, before = number + 1, count
    head = (
        b"\x28"
        + encode_varint(encode_zigzag(of.scale))
        + _pack_double(0x31, ZERO_THRESHOLD)
        + b"\x38"
        + encode_varint(of.zero_count)
    )
    packed = (
        b"\x08" + encode_varint(encode_zigzag(offset)) + b"\x10" + encode_varint(length) for offset, length in spans
    )
    return head + b"".join(pack_field(b"\x62", span) for span in packed) + pack_field(b"\x6a", deltas)
