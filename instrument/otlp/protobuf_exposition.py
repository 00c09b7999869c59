"""Writes metrics in Prometheus's protobuf format, the only one with native histograms.

A Prometheus server that stores native histograms requests this format. A native histogram has the buckets of OTLP's
exponential histogram. Each histogram also has the fixed buckets of the text formats, which a server stores only with
its setting `always_scrape_classic_histograms`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress

from instrument.otlp.exposition import MetricAndOrigin, buckets_of, ids_of, make_name, texts_by_name
from instrument.otlp.packing import encode_varint, pack_field, pack_text
from instrument.otlp.points import Exponential, encode_zigzag, make_exponential
from instrument.recording.distributions import COUNTER, HISTOGRAM, Distribution, Labels, Metric
from instrument.recording.spans import Origin

MEDIA_TYPE, MESSAGE = "application/vnd.google.protobuf", "io.prometheus.client.MetricFamily"
CONTENT_TYPE = f"{MEDIA_TYPE}; proto={MESSAGE}; encoding=delimited"

ZERO_THRESHOLD = 2.0**-128
"""The upper bound in seconds of the bucket for zeros, the default of Prometheus's libraries. With a bound of 0,
Prometheus would regard an empty histogram as one without native buckets."""

_pack_double = struct.Struct("<Bd").pack


def is_preferred(accept: str) -> bool:
    """Return True if an HTTP header `Accept` prefers this format to all others."""
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
    """Return metrics as delimited protobuf messages."""
    return b"".join(pack_field(b"", _pack_family(metric, origin)) for metric, origin in metrics)


def _pack_family(metric: Metric, origin: Origin) -> bytes:
    name = make_name(metric.name, metric.unit) + ("_total" if metric.kind == COUNTER else "")
    kind = {COUNTER: b"\x18\x00", HISTOGRAM: b"\x18\x04"}.get(metric.kind, b"\x18\x01")
    points = []
    for labels, value in metric.series.items():
        if isinstance(value, Distribution):
            packed = pack_field(b"\x3a", _pack_histogram(metric, labels, value, origin))
        else:
            packed = pack_field(b"\x1a" if metric.kind == COUNTER else b"\x12", _pack_double(0x09, value))
        points.append(pack_field(b"\x22", _pack_labels(texts_by_name(labels)) + packed))
    return pack_text(b"\x0a", name) + pack_text(b"\x12", metric.description) + kind + b"".join(points)


def _pack_labels(texts: Mapping[str, str]) -> bytes:
    pairs = (pack_text(b"\x0a", name) + pack_text(b"\x12", text) for name, text in sorted(texts.items()))
    return b"".join(pack_field(b"\x0a", pair) for pair in pairs)


def _pack_histogram(metric: Metric, labels: Labels, of: Distribution, origin: Origin) -> bytes:
    buckets, count = [], 0
    for bound, count, exemplar in buckets_of(metric, labels, of):
        packed = b"\x08" + encode_varint(count) + _pack_double(0x11, bound)
        if exemplar is not None:
            seconds, nanos = divmod(max(origin.realtime_of(exemplar.at_ns), 0), 10**9)
            value = _pack_double(0x11, exemplar.value_ns / 1e9)
            time = pack_field(b"\x1a", b"\x08" + encode_varint(seconds) + b"\x10" + encode_varint(nanos))
            packed += pack_field(b"\x1a", _pack_labels(ids_of(exemplar)) + value + time)
        buckets.append(pack_field(b"\x1a", packed))
    total = b"\x08" + encode_varint(count) + _pack_double(0x11, of.sum_ns / 1e9)
    return total + b"".join(buckets) + _pack_native(make_exponential(of, has_extremes=False))


def _pack_native(of: Exponential) -> bytes:
    """Return the native buckets. A bucket is numbered by its upper bound here, and by its lower bound in OTLP."""
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
