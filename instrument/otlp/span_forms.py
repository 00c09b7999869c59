"""The two forms of OTLP in which spans are encoded: protobuf for a collector, and JSON lines for a file.

In OTLP's JSON, ids are hexadecimal and 64-bit integers are text. A file has one JSON object per line, the format of
OpenTelemetry's file exporter.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from instrument.otlp.packing import (
    INTERNAL_KIND,
    REQUEST_BYTES,
    SCHEMA_URL,
    SCOPE,
    SERVER_KIND,
    Body,
    convert_value,
    encode_varint,
    find_version,
    pack_attributes,
    pack_field,
    pack_int_head,
    pack_link,
    pack_request,
    pack_text,
)
from instrument.recording.trace_context import LinkedSpan
from instrument.trace.columns import Int64s
from instrument.trace.indices import find_group_starts
from instrument.trace.text import INT64

Objects = NDArray[np.object_]


class RareMembers(NamedTuple):
    """The parts that few spans have: an outcome, links, events and a count of dropped events."""

    status: tuple[bool, str] | None
    links: Sequence[LinkedSpan]
    events: Sequence[tuple[int, str, Mapping[str, object]]]
    dropped: int


Part = tuple[str, bytes | int]
"""A part of an encoded span: ("", constant bytes), or (field name, width in bytes)."""


class PackedRows(NamedTuple):
    """Encoded spans in the order of their rows. Each span is followed by its device intervals.

    Each span or interval is an entry with two `pieces`. `sizes` has the size of each entry in bytes. `ends` has the
    number of entries up to the end of each row.
    """

    pieces: Objects
    sizes: Int64s
    ends: Int64s


def encode_varints(numbers: NDArray[Any], width: int) -> NDArray[Any]:
    number = numbers.astype(np.uint64)
    digits = np.empty((len(number), width), dtype=np.uint8)
    for place in range(width):
        digits[:, place] = number & np.uint64(0x7F)
        number = number >> np.uint64(7)
    digits[:, :-1] |= 0x80
    return digits.view(f"V{width}").reshape(-1)


def count_varint_bytes(numbers: NDArray[Any]) -> Int64s:
    widths = np.ones(len(numbers), dtype=np.int64)
    values = numbers.astype(np.uint64)
    most = int(values.max(initial=0)).bit_length()
    for bits in range(7, most, 7):
        widths += values >= np.uint64(1 << bits)
    return widths


_TYPES = {"high": ">u8", "low": ">u8", "own": ">u8", "parent": ">u8", "flags": "<u4", "start": "<u8", "end": "<u8"}


class ProtobufForm:
    """The protobuf encoding of spans in `ScopeSpans.spans`."""

    end = b""
    """The last bytes of a span without status, links and events."""
    around = 1
    """The number of bytes of an encoded span before its length field."""
    types: Mapping[str, str] = _TYPES
    """The numpy types of fields with a fixed size. All other fields of a head are texts or varints."""

    length_widths = staticmethod(count_varint_bytes)
    """Return the number of bytes of each entry's length field."""

    def measure_widths(self, name: str, values: NDArray[Any]) -> Int64s:
        return np.zeros(len(values), dtype=np.int64) if name in _TYPES else count_varint_bytes(values)

    def list_head_parts(self, widths: Mapping[str, int]) -> Sequence[Part]:
        """Return the fixed bytes and the fields of a span's head. `widths` are in bytes; width 0 leaves a field out."""
        parts: list[Part] = [("", b"\x12"), ("length", widths["length"]), ("", b"\x0a\x10"), ("high", 8), ("low", 8)]
        parts += [("", b"\x12\x08"), ("own", 8)]
        parts += [("", b"\x22\x08"), ("parent", 8)] if widths["parent"] else []
        parts += [("", b"\x39"), ("start", 8), ("", b"\x41"), ("end", 8), ("", b"\x85\x01"), ("flags", 4)]
        for name, width in widths.items():
            if width and name.startswith("instrument."):
                parts += [("", pack_int_head(b"\x4a", name, width)), (name, width)]
        return [part for part in parts if part[1]]

    def encode_values(self, name: str, values: NDArray[Any], width: int) -> NDArray[Any]:
        return values if name in _TYPES else encode_varints(values, width)

    def encode_shared_facts(self, name: str, is_server: bool, attributes: Mapping[str, object]) -> bytes:
        return pack_text(b"\x2a", name) + (SERVER_KIND if is_server else INTERNAL_KIND) + pack_attributes(attributes)

    attributes = staticmethod(pack_attributes)

    def encode_rare_members(self, members: RareMembers) -> bytes:
        packed: list[bytes] = []
        if members.status is not None:
            failed, why = members.status
            packed.append(pack_field(b"\x7a", pack_text(b"\x12", why) + b"\x18\x02" if failed else b"\x18\x01"))
        for time_ns, name, values in members.events:
            event = b"\x09" + struct.pack("<Q", time_ns) + pack_text(b"\x12", name) + pack_attributes(values, b"\x1a")
            packed.append(pack_field(b"\x5a", event))
        packed += [b"\x60" + encode_varint(members.dropped)] if members.dropped else []
        return b"".join([*packed, *map(pack_link, members.links)])

    def encode_tracestate(self, state: str) -> bytes:
        return pack_text(b"\x1a", state)


PROTOBUF = ProtobufForm()


REQUEST_SPANS = 4_000
"""The maximum number of spans of a request. Some receivers drop spans above 8,192."""


def split_into_requests(
    packed: Iterable[PackedRows], resource: bytes, most_bytes: int = REQUEST_BYTES, most_spans: int = REQUEST_SPANS
) -> Iterator[Body]:
    """Yield OTLP requests, each with at most `most_bytes` and `most_spans`. A span larger than `most_bytes` gets a
    separate request."""
    for pieces, sizes, _ in packed:
        sums = np.cumsum(sizes)
        at = 0
        while at < len(sums):
            before = int(sums[at - 1]) if at else 0
            end = int(np.searchsorted(sums, before + most_bytes, side="right"))
            end = max(min(end, at + most_spans), at + 1)
            size_bytes = int(sums[end - 1]) - before
            yield Body(pack_request(resource, pieces[at:end].ravel().tolist(), size_bytes=size_bytes), end - at)
            at = end


# ---------------------------------------------------------------- JSON

INTERNAL, SERVER, OK, ERROR = 1, 2, 1, 2

SPANS_IN_A_LINE = 1_000
"""The number of spans after which a JSON line ends. The current span tree is completed first."""


def make_json_lines(packed: Iterable[PackedRows], resource: Mapping[str, object], roots: Int64s) -> Iterator[bytes]:
    """Yield pieces of JSON lines for the spans of one process. Each line has complete trees."""
    scope = {"scope": {"name": SCOPE, "version": find_version()}, "spans": [0], "schemaUrl": SCHEMA_URL}
    line = {"resourceSpans": [{"resource": {"attributes": _encode_attributes(resource)}, "scopeSpans": [scope]}]}
    head, _, tail = msgspec.json.encode(line).partition(b'"spans":[0]')
    head, tail = head + b'"spans":[', b"]" + tail + b"\n"
    places = np.append(find_group_starts(roots)[1:], len(roots))
    place, end = 0, 0
    is_open = False
    for pieces, _, row_ends in packed:
        begin, first = 0, place
        place += len(row_ends)
        while begin < len(pieces):
            if not is_open:
                end = int(places[np.searchsorted(places, min(end + SPANS_IN_A_LINE, len(roots)))])
            until = int(row_ends[min(end, place) - first - 1])
            parts = pieces[begin:until].ravel().tolist()
            if not is_open:
                parts[0] = head + parts[0][1:]
            is_open = end > place
            if not is_open:
                parts.append(tail)
            yield b"".join(parts)
            begin = until


def _encode_attributes(attributes: Mapping[str, object]) -> list[msgspec.Raw]:
    return [_encode_attribute(key, value) for key, value in attributes.items()]


def _encode_attribute(key: str, value: object) -> msgspec.Raw:
    if type(value) is str:
        return _encode_text(key, value)
    if type(value) is int and -INT64 <= value < INT64:
        return msgspec.Raw(b'%b{"intValue":"%d"}}' % (_encode_key(key), value))
    return msgspec.Raw(b"%b%b}" % (_encode_key(key), msgspec.json.encode(_encode_value(convert_value(value)))))


@lru_cache(maxsize=4096)
def _encode_text(key: str, value: str) -> msgspec.Raw:
    return msgspec.Raw(b"%b%b}" % (_encode_key(key), msgspec.json.encode({"stringValue": convert_value(value)})))


@lru_cache(maxsize=1024)
def _encode_key(key: str) -> bytes:
    return b'{"key":%b,"value":' % msgspec.json.encode(convert_value(key))


def _encode_value(value: object) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        text = value if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
        return {"doubleValue": text}
    if isinstance(value, list):
        return {"arrayValue": {"values": list(map(_encode_value, value))}}
    return {"stringValue": str(value)}


_HEX = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), dtype=np.uint16)
_POWERS = 10 ** np.arange(1, 19, dtype=np.int64)
_IDS = frozenset(("high", "low", "own", "parent"))


@cache
def _make_four_digit_texts() -> NDArray[np.uint32]:
    return np.frombuffer(b"".join(b"%04d" % number for number in range(10_000)), dtype=np.uint32)


def encode_decimals(numbers: NDArray[Any], width: int) -> NDArray[Any]:
    remainder, parts = np.abs(numbers.astype(np.int64)), -(-width // 4)
    digits = np.empty((len(remainder), parts), dtype=np.uint32)
    for place in range(parts - 1, -1, -1):
        remainder, part = np.divmod(remainder, 10_000)
        digits[:, place] = _make_four_digit_texts()[part]
    text = np.ascontiguousarray(digits.view(np.uint8)[:, parts * 4 - width :])
    text[numbers < 0, 0] = ord("-")
    return text.view(f"V{width}").reshape(-1)


class JsonForm:
    """The JSON encoding of spans in `ScopeSpans.spans`, with a comma before each span."""

    end = b"}"
    around = 0
    types: Mapping[str, str] = {}

    def measure_widths(self, name: str, values: NDArray[Any]) -> Int64s:
        return np.asarray(np.searchsorted(_POWERS, np.abs(values), side="right") + 1 + (values < 0))

    def length_widths(self, lengths: Int64s) -> Int64s:
        return np.zeros(len(lengths), dtype=np.int64)

    def list_head_parts(self, widths: Mapping[str, int]) -> Sequence[Part]:
        parts: list[Part] = [("", b',{"traceId":"'), ("high", 16), ("low", 16), ("", b'","spanId":"'), ("own", 16)]
        parts += [("", b'","parentSpanId":"'), ("parent", 16)] if widths["parent"] else []
        parts += [("", b'","flags":'), ("flags", widths["flags"])]
        parts += [("", b',"startTimeUnixNano":"'), ("start", widths["start"])]
        parts += [("", b'","endTimeUnixNano":"'), ("end", widths["end"]), ("", b'","attributes":[')]
        comma = b""
        for name, width in widths.items():
            if width and name.startswith("instrument."):
                parts += [("", b'%b%b{"intValue":"' % (comma, _encode_key(name))), (name, width), ("", b'"}}')]
                comma = b","
        return parts

    def encode_values(self, name: str, values: NDArray[Any], width: int) -> NDArray[Any]:
        if name in _IDS:
            return _HEX[values.astype(">u8").view(np.uint8)].view("V16")
        return encode_decimals(values, width)

    def encode_shared_facts(self, name: str, is_server: bool, attributes: Mapping[str, object]) -> bytes:
        kind = SERVER if is_server else INTERNAL
        return b'%b],"name":%b,"kind":%d' % (
            self.attributes(attributes),
            msgspec.json.encode(convert_value(name)),
            kind,
        )

    def attributes(self, attributes: Mapping[str, object]) -> bytes:
        return b"".join([b",%b" % attribute for attribute in _encode_attributes(attributes)])

    def encode_rare_members(self, members: RareMembers) -> bytes:
        facts: dict[str, Any] = {}
        if members.links:
            facts["links"] = [
                {
                    "traceId": f"{link.trace_id:032x}",
                    "spanId": f"{link.span_id:016x}",
                    **({"traceState": link.state} if link.state else {}),
                }
                for link in members.links
            ]
        if members.events:
            facts["events"] = [
                {"timeUnixNano": str(time_ns), "name": convert_value(name), "attributes": _encode_attributes(values)}
                for time_ns, name, values in members.events
            ]
        if members.dropped:
            facts["droppedEventsCount"] = members.dropped
        if members.status is not None:
            failed, why = members.status
            facts["status"] = {"code": ERROR, "message": why} if failed else {"code": OK}
        return _encode_members(facts) + b"}"

    def encode_tracestate(self, state: str) -> bytes:
        return _encode_members({"traceState": convert_value(state)})


def _encode_members(facts: Mapping[str, Any]) -> bytes:
    return b",%b" % msgspec.json.encode(facts)[1:-1] if facts else b""


JSON = JsonForm()

Form = ProtobufForm | JsonForm
