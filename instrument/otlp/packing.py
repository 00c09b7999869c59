"""Packs spans and metrics as OTLP's protobuf messages, with attributes under OpenTelemetry's names.

A device interval is sent as a child of the span that enqueued the work. A distribution is sent as an exponential
histogram. At scale `s`, each bucket ends at a power of 2 ** (2 ** -s). Adjacent buckets are merged in pairs until at
most `MOST_BUCKETS` remain.
"""

from __future__ import annotations

import math
import numbers
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from instrument.recording.distributions import Distribution, Exemplar, bucket_middle
from instrument.recording.spans import ERROR_TYPE, STATUS_CODE, STATUS_DESCRIPTION, Site, Span
from instrument.recording.trace_context import LINK, LINK_REMOTE, LINK_STATE, LINK_TRACE_ID, LinkedSpan, parse_parent
from instrument.runtime.lazy_imports import dataclass, field

SCOPE = "instrument"
SCHEMA_URL = "https://opentelemetry.io/schemas/1.45.0"
"""The version of OpenTelemetry's conventions that defines the names of the attributes."""
EVENT_LIMIT = 128
"""The maximum number of events sent per span. OpenTelemetry has the same limit."""
DURATION = "instrument.duration_ns"
"""The attribute with the length of an event in ns."""
LINK_NAMES = frozenset((LINK, LINK_REMOTE))
"""The attributes in which a recorded span stores a link to another span."""
IS_REMOTE = 0x200
"""The bit of a span's OTLP flags that marks a parent in another process (opentelemetry-proto, SpanFlags)."""

HAS_IS_REMOTE = 0x100
"""The bit of a span's OTLP flags that makes the bit `IS_REMOTE` valid."""
INTERNAL_KIND, SERVER_KIND = b"\x30\x01", b"\x30\x02"
_MASK = (1 << 64) - 1
_pack_double = struct.Struct("<Bd").pack

_MEMCPY_KINDS = {
    "h2d": "MemcpyHostToDevice",
    "d2h": "MemcpyDeviceToHost",
    "d2d": "MemcpyDeviceToDevice",
    "p2p": "MemcpyDeviceToDevice",
    "h2h": "MemcpyHostToHost",
}
_FILLED = frozenset(
    (
        *("code.file.path", "code.function.name", "code.line.number", "error.type", "thread.id", "thread.name"),
        *(f"instrument.{name}" for name in ("active_ns", "clipped", "instance", "kind", "self_ns", "task_id")),
        *(LINK, LINK_REMOTE, LINK_STATE, LINK_TRACE_ID, STATUS_CODE, STATUS_DESCRIPTION),
    )
)


def find_cause_link(attributes: Mapping[str, object], linked: Callable[[int, int], LinkedSpan]) -> LinkedSpan | None:
    """Return the link in a span's attributes: to the caller's span, or to the ended span that started the task or
    thread."""
    state = attributes.get(LINK_STATE)
    state = state if isinstance(state, str) else ""
    remote = attributes.get(LINK_REMOTE)
    if isinstance(remote, str):
        parent = parse_parent(f"00-{remote}-00".encode("ascii", "replace"))
        return None if parent is None else LinkedSpan(parent.trace_id, parent.span_id, state)
    link = attributes.get(LINK)
    if not isinstance(link, tuple | list) or len(link) != 2 or set(map(type, link)) != {int}:
        return None
    trace_id = attributes.get(LINK_TRACE_ID)
    try:
        cause = linked(*link)
        number = cause.trace_id if trace_id is None else int(str(trace_id), 16)
    except (ValueError, OverflowError):
        return None  # no recorder wrote it
    return LinkedSpan(number, cause.span_id, state) if 0 < number < 1 << 128 else None


def select_interruptions(interruptions: Sequence[Span]) -> tuple[list[tuple[int, str, Mapping[str, object]]], int]:
    """Return a span's longest interruptions as events, and the number of the other interruptions."""
    longest = sorted(interruptions, key=lambda span: -span.total_ns)[:EVENT_LIMIT]
    longest.sort(key=attrgetter("start_ns"))
    events: list[tuple[int, str, Mapping[str, object]]] = [
        (span.start_ns, span.site.name, {**span.attributes, DURATION: span.total_ns}) for span in longest
    ]
    return events, len(interruptions) - len(longest)


def make_device_attributes(
    site: Site, attributes: Mapping[str, object], device: int, stream: int, label: str
) -> dict[str, object]:
    facts = _rename_attributes(site.kind, (*site.attributes, *attributes.items()))
    facts = {key: facts[key] for key in ("cuda.memcpy.kind", "instrument.bytes") if key in facts}
    return facts | {"cuda.device.index": device, "instrument.device.stream": stream, "instrument.device.label": label}


def make_site_attributes(site: Site) -> dict[str, object]:
    facts = _rename_attributes(site.kind, site.attributes)
    facts["instrument.kind"] = site.kind
    if site.instance:
        facts["instrument.instance"] = site.instance
    if site.function:
        facts["code.function.name"] = site.function
    if site.file:
        facts["code.file.path"] = site.file
    if site.line:
        facts["code.line.number"] = site.line
    return facts


def make_span_attributes(
    site: Site, attributes: Mapping[str, object], error: str | None, is_clipped: bool
) -> dict[str, object]:
    facts = _rename_attributes(site.kind, attributes.items()) if attributes else {}
    if is_clipped:
        facts["instrument.clipped"] = True
    error_type = error if error is not None else attributes.get(ERROR_TYPE)
    if error_type is not None:
        facts["error.type"] = error_type
    return facts


def find_status(error: str | None, attributes: Mapping[str, object]) -> tuple[bool, str] | None:
    """Return (True, reason) for a failed span, (False, "") for a successful span, None if unknown."""
    if error is not None:
        return True, str(convert_value(attributes.get(STATUS_DESCRIPTION) or error))
    return (False, "") if attributes.get(STATUS_CODE) == "OK" else None


def _rename_attributes(kind: str, attributes: Iterable[tuple[str, object]]) -> dict[str, object]:
    facts = {key: value for key, value in attributes if key not in _FILLED}
    if kind == "copy":
        memcpy_kind = _MEMCPY_KINDS.get(str(facts.get("direction")))
        for key in ("direction", "bytes", "pinned", "sync"):
            if key in facts:
                facts[f"instrument.{key}"] = facts.pop(key)
        if memcpy_kind is not None:
            facts["cuda.memcpy.kind"] = memcpy_kind
    elif kind == "layer" and "region" in facts:
        facts["instrument.region"] = facts.pop("region")
    return facts


def convert_value(value: object) -> object:
    """Convert a value for OTLP. Return the type's name for an object that OTLP cannot represent, such as a tensor."""
    if isinstance(value, str):
        return str.__str__(value).encode("utf-8", "replace").decode()
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        number = int(value)
        if -1 << 63 <= number < 1 << 63:
            return number
        return str(number) if number.bit_length() < 4096 else hex(number)  # Python refuses to print much longer ones
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [convert_value(item) for item in value]
    return f"<{type(value).__name__}>"


def pack_resource(attributes: Mapping[str, object]) -> bytes:
    return pack_field(b"\x0a", pack_attributes(attributes, b"\x0a"))


def pack_request(
    resource: bytes, pieces: Sequence[bytes], foreign: Sequence[bytes] = (), size_bytes: int | None = None
) -> bytes:
    """Pack an OTLP request: a packed resource with spans or metrics. Entries in `foreign` get no schema URL.

    `size_bytes` is the size of all pieces. If it is None, the size is computed.
    """
    scope = pack_field(b"\x0a", pack_text(b"\x0a", SCOPE) + pack_text(b"\x12", find_version()))
    schema = pack_text(b"\x1a", SCHEMA_URL)
    without_schema = pack_field(b"\x12", b"".join((scope, *foreign))) if foreign else b""
    size = len(scope) + (sum(map(len, pieces)) if size_bytes is None else size_bytes) + len(schema)
    scope_head = b"\x12" + encode_varint(size)
    head = b"\x0a" + encode_varint(len(resource) + len(scope_head) + size + len(without_schema))
    return b"".join((head, resource, scope_head, scope, *pieces, schema, without_schema))


REQUEST_BYTES = 512 << 10
"""The maximum size of a request in bytes before compression. Some receivers refuse 1 MiB."""


class Body(NamedTuple):
    data: bytes
    spans: int


def split_request(request: bytes) -> Sequence[Body]:
    (of_resource,) = _split_fields(request, 0, len(request))
    resource, of_scope = _split_fields(request, *of_resource[1:])
    _, *pieces, _ = _split_fields(request, *of_scope[1:])
    packed = [request[first:end] for first, _, end in pieces]
    middle = len(packed) // 2
    packed_resource = request[resource[0] : resource[2]]
    return [Body(pack_request(packed_resource, half), len(half)) for half in (packed[:middle], packed[middle:])]


def _split_fields(message: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the offsets of each field's tag, content and end. Fields have a one-byte tag and a length."""
    while at < end:
        first, size, shift = at, 0, 0
        while True:
            at += 1
            size |= (message[at] & 0x7F) << shift
            shift += 7
            if message[at] < 0x80:
                break
        yield first, at + 1, at + 1 + size
        at += 1 + size


def find_version() -> str:
    return str(sys.modules["instrument"].__version__)


@lru_cache(maxsize=16_384)
def pack_link(link: LinkedSpan) -> bytes:
    """Pack a link of a span as a field. Cached, because batches link the same requests repeatedly."""
    ids = b"\x0a\x10" + link.trace_id.to_bytes(16, "big") + b"\x12\x08" + link.span_id.to_bytes(8, "big")
    ids += pack_text(b"\x1a", link.state) if link.state else b""
    return pack_field(b"\x6a", ids + b"\x35" + struct.pack("<I", HAS_IS_REMOTE))


def pack_attributes(attributes: Mapping[str, object], tag: bytes = b"\x4a") -> bytes:
    return b"".join([_pack_attribute(key, value, tag) for key, value in attributes.items()])


def _pack_attribute(key: str, value: object, tag: bytes = b"\x4a") -> bytes:
    if type(value) is int and 0 <= value < 1 << 63:
        number = encode_varint(value)
        return pack_int_head(tag, key, len(number)) + number
    return pack_field(tag, _pack_key(key) + pack_field(b"\x12", _pack_value(value)))


@lru_cache(maxsize=1024)
def _pack_key(key: str) -> bytes:
    return pack_text(b"\x0a", key)


@lru_cache(maxsize=1024)
def pack_int_head(tag: bytes, key: str, varint_bytes: int) -> bytes:
    """Return the bytes of a KeyValue before its integer value. The value is a varint of `varint_bytes` bytes."""
    head = _pack_key(key) + b"\x12" + encode_varint(varint_bytes + 1) + b"\x18"
    return tag + encode_varint(len(head) + varint_bytes) + head


def _pack_value(value: object) -> bytes:
    if type(value) is str:
        return pack_text(b"\x0a", value)
    if type(value) is bool:
        return b"\x10\x01" if value else b"\x10\x00"
    if type(value) is int and -1 << 63 <= value < 1 << 63:
        return b"\x18" + encode_varint(value & _MASK)
    if type(value) is float:
        return _pack_double(0x21, value)
    if type(value) is list:
        return pack_field(b"\x2a", b"".join([pack_field(b"\x0a", _pack_value(item)) for item in value]))
    return _pack_value(convert_value(value))


def pack_text(tag: bytes, text: str) -> bytes:
    return pack_field(tag, text.encode("utf-8", "replace"))


def pack_field(tag: bytes, content: bytes) -> bytes:
    return tag + encode_varint(len(content)) + content


def encode_varint(number: int) -> bytes:
    if number < 0x80:
        return bytes((number,))
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    return bytes((number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80)) + encode_varint(number >> 14)


# ---------------------------------------------------------------- metrics

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
    return math.ceil(math.log2(bucket_middle(index) / 1e9) * (1 << FINEST_SCALE)) - 1


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a metric. `start_ns` is the wall time from which a sum or a histogram counts, 0 for a gauge.
    Exemplars have times of the wall clock."""

    attributes: Mapping[str, str | int]
    start_ns: int
    at_ns: int
    value: float | Exponential
    exemplars: tuple[Exemplar, ...] = ()


@dataclass(slots=True)
class Series:
    """A metric with its points. With `is_delta`, the points count from the last delivery."""

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
_pack_int = struct.Struct("<Bq").pack
_DELTA, _CUMULATIVE = b"\x10\x01", b"\x10\x02"
_MONOTONIC = b"\x18\x01"


def pack_metric(series: Series) -> bytes:
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
    whole = (whole or isinstance(value, int)) and abs(value) < 1 << 63
    packed = _pack_int(0x31, round(value)) if whole else _pack_double(0x21, value)
    return times + packed + pack_attributes(point.attributes, b"\x3a")


def _pack_exemplar(exemplar: Exemplar) -> bytes:
    span_id, trace_id = exemplar.span_id.to_bytes(8, "big"), exemplar.trace_id.to_bytes(16, "big")
    ids = pack_field(b"\x22", span_id) + pack_field(b"\x2a", trace_id)
    return _pack_time(0x11, exemplar.at_ns) + _pack_double(0x19, exemplar.value_ns / 1e9) + ids


def pack_exponential(of: Exponential) -> bytes:
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
    return number << 1 if number >= 0 else (-number << 1) - 1
