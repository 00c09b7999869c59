"""Writes spans as lines of OTLP JSON, the format of OpenTelemetry's file exporter.

In OTLP's JSON, ids are hexadecimal and 64-bit integers are text. `packed_spans` packs the same content for a collector.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from instrument.otlp.packed_spans import Part, RareMembers, SpanPacker
from instrument.otlp.packing import SCHEMA_URL, SCOPE, find_version, make_plain
from instrument.trace.columns import Int64s
from instrument.trace.groups import firsts_of
from instrument.trace.text import INT64

INTERNAL, SERVER, OK, ERROR = 1, 2, 1, 2

SPANS_IN_A_LINE = 1_000
"""The number of spans after which a line ends. The line still completes the current span tree."""


def json_lines(packer: SpanPacker, resource: Mapping[str, object], rows: Int64s, roots: Int64s) -> Iterator[bytes]:
    """Yield the lines for the spans of one process in pieces, with a packer of `JSON`. `rows` are in order of their
    trees, and `roots` has the root of each. Each line has complete trees."""
    scope = {"scope": {"name": SCOPE, "version": find_version()}, "spans": [0], "schemaUrl": SCHEMA_URL}
    line = {"resourceSpans": [{"resource": {"attributes": _encode_attributes(resource)}, "scopeSpans": [scope]}]}
    head, _, tail = msgspec.json.encode(line).partition(b'"spans":[0]')
    head, tail = head + b'"spans":[', b"]" + tail + b"\n"
    places = np.append(firsts_of(roots)[1:], len(roots))
    place, end = 0, 0
    is_open = False
    for pieces, _, row_ends in packer.pack(rows):
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
    return msgspec.Raw(b"%b%b}" % (_encode_key(key), msgspec.json.encode(_encode_value(make_plain(value)))))


@lru_cache(maxsize=4096)
def _encode_text(key: str, value: str) -> msgspec.Raw:
    """Return an attribute with a text value, cached because spans of a site share it."""
    return msgspec.Raw(b"%b%b}" % (_encode_key(key), msgspec.json.encode({"stringValue": make_plain(value)})))


@lru_cache(maxsize=1024)
def _encode_key(key: str) -> bytes:
    return b'{"key":%b,"value":' % msgspec.json.encode(make_plain(key))


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
_DIGITS = np.frombuffer(b"".join(b"%04d" % number for number in range(10_000)), dtype=np.uint32)
_POWERS = 10 ** np.arange(1, 19, dtype=np.int64)
_IDS = frozenset(("high", "low", "own", "parent"))


def encode_hexadecimal(ids: NDArray[Any]) -> NDArray[Any]:
    """Return 64-bit ids as 16 hexadecimal digits each."""
    return _HEX[ids.astype(">u8").view(np.uint8)].view("V16")


def count_digits(numbers: NDArray[Any]) -> Int64s:
    """Return the number of decimal digits of each number."""
    return np.asarray(np.searchsorted(_POWERS, np.abs(numbers), side="right") + 1 + (numbers < 0))


def encode_decimals(numbers: NDArray[Any], width: int) -> NDArray[Any]:
    """Return numbers as decimal texts of `width` characters."""
    remainder, parts = np.abs(numbers.astype(np.int64)), -(-width // 4)
    digits = np.empty((len(remainder), parts), dtype=np.uint32)
    for place in range(parts - 1, -1, -1):
        remainder, part = np.divmod(remainder, 10_000)
        digits[:, place] = _DIGITS[part]
    text = np.ascontiguousarray(digits.view(np.uint8)[:, parts * 4 - width :])
    text[numbers < 0, 0] = ord("-")
    return text.view(f"V{width}").reshape(-1)


class JsonForm:
    """The JSON encoding of spans in `ScopeSpans.spans`, with a comma before each."""

    end = b"}"
    around = 0

    def widths(self, name: str, values: NDArray[Any]) -> Int64s:
        return count_digits(values)

    def length_widths(self, lengths: Int64s) -> Int64s:
        return np.zeros(len(lengths), dtype=np.int64)

    def head(self, widths: Mapping[str, int]) -> Sequence[Part]:
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

    def field(self, name: str, width: int) -> str:
        return f"V{width}"

    def values(self, name: str, values: NDArray[Any], width: int) -> NDArray[Any]:
        return encode_hexadecimal(values) if name in _IDS else encode_decimals(values, width)

    def facts(self, name: str, is_server: bool, attributes: Mapping[str, object]) -> bytes:
        kind = SERVER if is_server else INTERNAL
        return b'%b],"name":%b,"kind":%d' % (self.attributes(attributes), msgspec.json.encode(make_plain(name)), kind)

    def attributes(self, attributes: Mapping[str, object]) -> bytes:
        return b"".join([b",%b" % attribute for attribute in _encode_attributes(attributes)])

    def members(self, members: RareMembers) -> bytes:
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
                {"timeUnixNano": str(time_ns), "name": make_plain(name), "attributes": _encode_attributes(values)}
                for time_ns, name, values in members.events
            ]
        if members.dropped:
            facts["droppedEventsCount"] = members.dropped
        if members.status is not None:
            failed, why = members.status
            facts["status"] = {"code": ERROR, "message": why} if failed else {"code": OK}
        return _encode_members(facts) + b"}"

    def state(self, state: str) -> bytes:
        return _encode_members({"traceState": make_plain(state)})


def _encode_members(facts: Mapping[str, Any]) -> bytes:
    return b",%b" % msgspec.json.encode(facts)[1:-1] if facts else b""


JSON = JsonForm()
