"""Points of metrics, as both protocols send them, and their bytes on the wire."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from instrument.otlp.histograms import Exponential, pack_exponential
from instrument.otlp.packing import pack_attributes, pack_field, pack_text
from instrument.recording.distributions import Exemplar


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a metric. `start_ns` is the wall time from which a sum or a histogram counts, 0 for a gauge.

    `exemplars` of a histogram have times of the wall clock.
    """

    attributes: Mapping[str, str | int]
    start_ns: int
    at_ns: int
    value: float | Exponential
    exemplars: tuple[Exemplar, ...] = ()


@dataclass(slots=True)
class Series:
    """A metric with its points. Those of a delta tell what came since the last ones."""

    name: str
    unit: str
    kind: str
    points: list[Point] = field(default_factory=list)
    description: str = ""
    is_delta: bool = False


# The wire: Metric {name 1, description 2, unit 3, gauge 5, sum 7, exponential_histogram 10}; Gauge {data_points 1};
# Sum {data_points 1, temporality 2, is_monotonic 3}; ExponentialHistogram {data_points 1, temporality 2};
# NumberDataPoint {start_time 2, time 3, as_double 4, as_int 6, attributes 7}; ExponentialHistogramDataPoint
# {attributes 1, start_time 2, time 3, exemplars 11}, and what the histogram adds; Exemplar {time 2, as_double 3,
# span_id 4, trace_id 5}.
_pack_time = struct.Struct("<BQ").pack
_pack_double = struct.Struct("<Bd").pack
_pack_int = struct.Struct("<Bq").pack
_DELTA, _CUMULATIVE = b"\x10\x01", b"\x10\x02"
_MONOTONIC = b"\x18\x01"


def pack_metric(series: Series) -> bytes:
    """One entry of `ScopeMetrics.metrics`. Whole numbers, and those of bytes, are sent as such."""
    points = b"".join([pack_field(b"\x0a", _pack_point(point, series.unit == "By")) for point in series.points])
    temporality = _DELTA if series.is_delta else _CUMULATIVE
    if series.kind == "gauge":
        data = pack_field(b"\x2a", points)
    elif series.kind == "histogram":
        data = pack_field(b"\x52", points + temporality)
    else:
        data = pack_field(b"\x3a", points + temporality + (_MONOTONIC if series.kind == "counter" else b""))
    described = pack_text(b"\x12", series.description) if series.description else b""
    named = pack_text(b"\x0a", series.name) + described + pack_text(b"\x1a", series.unit)
    return pack_field(b"\x12", named + data)


def _pack_point(point: Point, whole: bool) -> bytes:
    times = (_pack_time(0x11, point.start_ns) if point.start_ns else b"") + _pack_time(0x19, point.at_ns)
    value = point.value
    if isinstance(value, Exponential):
        exemplars = b"".join([pack_field(b"\x5a", _pack_exemplar(one)) for one in point.exemplars])
        return times + pack_exponential(value) + exemplars + pack_attributes(point.attributes, b"\x0a")
    whole = whole or isinstance(value, int)
    packed = _pack_int(0x31, round(value)) if whole else _pack_double(0x21, value)
    return times + packed + pack_attributes(point.attributes, b"\x3a")


def _pack_exemplar(one: Exemplar) -> bytes:
    ids = pack_field(b"\x22", one.span_id.to_bytes(8, "big")) + pack_field(b"\x2a", one.trace_id.to_bytes(16, "big"))
    return _pack_time(0x11, one.at_ns) + _pack_double(0x19, one.value_ns / 1e9) + ids
