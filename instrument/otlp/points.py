"""Packs metrics as OTLP's data points.

A distribution is sent as an exponential histogram, from which a collector computes any percentile. A bucket of scale
`s` ends at a power of 2 ** (2 ** -s), so at scale 5 it is 2.2 % wide. The tally knows only the bucket of each value. A
value counts at its bucket's middle, so within 0.78 % of a border it may count in the next bucket. Adjacent buckets are
merged in pairs until at most `MOST_BUCKETS` remain.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from functools import lru_cache

from instrument.otlp.packing import encode_varint, pack_attributes, pack_field, pack_text
from instrument.recording.distributions import Distribution, Exemplar, bucket_middle
from instrument.runtime.cheap_start import dataclass, field

FINEST_SCALE = 5
MOST_BUCKETS = 160
"""The maximum number of buckets of an exponential histogram, as in OpenTelemetry's SDKs."""


@dataclass(frozen=True, slots=True)
class Exponential:
    """An exponential histogram of durations in s. `counts` begin with the bucket `offset`. The minimum and the maximum
    are None if unknown."""

    count: int
    sum_s: float
    scale: int
    zero_count: int
    offset: int
    counts: tuple[int, ...]
    least_s: float | None = None
    most_s: float | None = None


def make_exponential(of: Distribution, *, has_extremes: bool) -> Exponential:
    """Return a distribution as an exponential histogram."""
    count_by_place: dict[int, int] = {}
    zero_count = 0
    for index, count in of.buckets.items():
        if index == 0:
            zero_count += count
        else:
            at = _find_finest_bucket(index)
            count_by_place[at] = count_by_place.get(at, 0) + count
    scale, first, last = FINEST_SCALE, min(count_by_place, default=0), max(count_by_place, default=-1)
    while last - first >= MOST_BUCKETS:
        scale, first, last = scale - 1, first >> 1, last >> 1
    counts = [0] * (last - first + 1)
    for at, count in count_by_place.items():
        counts[(at >> FINEST_SCALE - scale) - first] += count
    has_range = has_extremes and of.count > 0
    return Exponential(
        of.count,
        of.sum_ns / 1e9,
        scale,
        zero_count,
        first,
        tuple(counts),
        of.least_ns / 1e9 if has_range else None,
        of.most_ns / 1e9 if has_range else None,
    )


@lru_cache(maxsize=4096)
def _find_finest_bucket(index: int) -> int:
    """Return the bucket of the finest scale into which the middle of a tally's bucket falls."""
    return math.ceil(math.log2(bucket_middle(index) / 1e9) * (1 << FINEST_SCALE)) - 1


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a metric. `start_ns` is the wall time from which a sum or a histogram counts, 0 for a gauge.
    `exemplars` of a histogram have times of the wall clock."""

    attributes: Mapping[str, str | int]
    start_ns: int
    at_ns: int
    value: float | Exponential
    exemplars: tuple[Exemplar, ...] = ()


@dataclass(slots=True)
class Series:
    """A metric with its points. The points of a delta count from the last delivery."""

    name: str
    unit: str
    kind: str
    points: list[Point] = field(default_factory=list)
    description: str = ""
    is_delta: bool = False


# The wire: Metric {name 1, description 2, unit 3, gauge 5, sum 7, exponential_histogram 10}; Gauge {data_points 1};
# Sum {data_points 1, temporality 2, is_monotonic 3}; ExponentialHistogram {data_points 1, temporality 2};
# NumberDataPoint {start_time 2, time 3, as_double 4, as_int 6, attributes 7}; ExponentialHistogramDataPoint
# {attributes 1, start_time 2, time 3, count 4, sum 5, scale 6, zero_count 7, positive 8, exemplars 11, min 12, max 13};
# its Buckets {offset 1, bucket_counts 2}; Exemplar {time 2, as_double 3, span_id 4, trace_id 5}.
_pack_time = struct.Struct("<BQ").pack
_pack_double = struct.Struct("<Bd").pack
_pack_int = struct.Struct("<Bq").pack
_DELTA, _CUMULATIVE = b"\x10\x01", b"\x10\x02"
_MONOTONIC = b"\x18\x01"


def pack_metric(series: Series) -> bytes:
    """Return one packed entry of `ScopeMetrics.metrics`. Integers and byte counts are sent as integers."""
    points = b"".join([pack_field(b"\x0a", _pack_point(point, series.unit == "By")) for point in series.points])
    temporality = _DELTA if series.is_delta else _CUMULATIVE
    if series.kind == "gauge":
        data = pack_field(b"\x2a", points)
    elif series.kind == "histogram":
        data = pack_field(b"\x52", points + temporality)
    else:
        data = pack_field(b"\x3a", points + temporality + (_MONOTONIC if series.kind == "counter" else b""))
    described = pack_text(b"\x12", series.description) if series.description else b""
    head = pack_text(b"\x0a", series.name) + described + pack_text(b"\x1a", series.unit)
    return pack_field(b"\x12", head + data)


def _pack_point(point: Point, whole: bool) -> bytes:
    times = (_pack_time(0x11, point.start_ns) if point.start_ns else b"") + _pack_time(0x19, point.at_ns)
    value = point.value
    if isinstance(value, Exponential):
        exemplars = b"".join([pack_field(b"\x5a", _pack_exemplar(exemplar)) for exemplar in point.exemplars])
        return times + pack_exponential(value) + exemplars + pack_attributes(point.attributes, b"\x0a")
    whole = whole or isinstance(value, int)
    packed = _pack_int(0x31, round(value)) if whole else _pack_double(0x21, value)
    return times + packed + pack_attributes(point.attributes, b"\x3a")


def _pack_exemplar(exemplar: Exemplar) -> bytes:
    span_id, trace_id = exemplar.span_id.to_bytes(8, "big"), exemplar.trace_id.to_bytes(16, "big")
    ids = pack_field(b"\x22", span_id) + pack_field(b"\x2a", trace_id)
    return _pack_time(0x11, exemplar.at_ns) + _pack_double(0x19, exemplar.value_ns / 1e9) + ids


def pack_exponential(of: Exponential) -> bytes:
    """Return the fields of a data point with an exponential histogram."""
    counts = b"".join(map(encode_varint, of.counts))
    return b"".join(
        (
            _pack_time(0x21, of.count),
            _pack_double(0x29, of.sum_s),
            b"\x30" + encode_varint(encode_zigzag(of.scale)),
            _pack_time(0x39, of.zero_count),
            pack_field(b"\x42", b"\x08" + encode_varint(encode_zigzag(of.offset)) + pack_field(b"\x12", counts)),
            b"" if of.least_s is None else _pack_double(0x61, of.least_s),
            b"" if of.most_s is None else _pack_double(0x69, of.most_s),
        )
    )


def encode_zigzag(number: int) -> int:
    """Return a signed number in protobuf's encoding of `sint`."""
    return number << 1 if number >= 0 else (-number << 1) - 1
