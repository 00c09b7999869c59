"""Spans as a file of OTLP in JSON: a line for each request, as OpenTelemetry's file exporter has them.

Ids are hexadecimal and numbers of 64 bits are text, as OTLP's own mapping to JSON has them. What a span says is what
a collector gets of it, by the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from instrument.otlp.packed_spans import Part, RareMembers
from instrument.otlp.packing import (
    SCHEMA_URL,
    SCOPE,
    Identified,
    Ids,
    attributes_of,
    attributes_of_interval,
    device_name,
    events_of,
    identify,
    is_server,
    links_of,
    plain,
    status_of,
    version,
)
from instrument.otlp.resource import resource_of
from instrument.recording.spans import Origin, Span
from instrument.trace.columns import Int64s
from instrument.trace.text import INT64

INTERNAL, SERVER, OK, ERROR = 1, 2, 1, 2


def json_lines(
    trees: Iterable[Sequence[Span]], origin: Origin, threads: Mapping[int, str], ids: Ids | None = None
) -> Iterator[bytes]:
    """The lines of a process's spans, one for some whole trees. `ids` are those of all whose trees it shares."""
    own = Ids()
    ids = ids or own
    resource, offset_ns = resource_of(origin, own.instance), origin.realtime_of(0)
    for spans in trees:
        yield _line(resource, [_span(found, ids, threads, offset_ns) for found in identify(spans, ids)])


def _line(resource: Mapping[str, object], spans: list[dict[str, Any]]) -> bytes:
    scope = {"scope": {"name": SCOPE, "version": version()}, "spans": spans, "schemaUrl": SCHEMA_URL}
    request = {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}]}
    return msgspec.json.encode(request) + b"\n"


def _span(found: Identified, ids: Ids, threads: Mapping[int, str], offset_ns: int) -> dict[str, Any]:
    trace_id, own, parent, flags, state, span, interval = found
    times = interval or span
    facts: dict[str, Any] = {
        "traceId": f"{trace_id:032x}",
        "spanId": f"{own:016x}",
        **({"traceState": plain(state)} if state else {}),
        **({"parentSpanId": f"{parent:016x}"} if parent else {}),
        "flags": flags,
        "startTimeUnixNano": str(times.start_ns + offset_ns),
        "endTimeUnixNano": str(times.end_ns + offset_ns),
    }
    if interval is not None:
        attributes = attributes_of_interval(span, interval)
        return {**facts, "name": plain(device_name(span.site)), "kind": INTERNAL, "attributes": _attributes(attributes)}
    facts["name"], facts["kind"] = plain(span.site.name), SERVER if is_server(span) else INTERNAL
    facts["attributes"] = _attributes(attributes_of(span, threads))
    links, status = links_of(span, ids), status_of(span.error, span.attributes)
    if links:
        facts["links"] = [
            {
                "traceId": f"{one.trace_id:032x}",
                "spanId": f"{one.span_id:016x}",
                **({"traceState": one.state} if one.state else {}),
            }
            for one in links
        ]
    if span.interruptions:
        events, dropped = events_of(span.interruptions)
        facts["events"] = [
            {"timeUnixNano": str(at_ns + offset_ns), "name": name, "attributes": _attributes(its)}
            for at_ns, name, its in events
        ]
        if dropped:
            facts["droppedEventsCount"] = dropped
    if status is not None:
        failed, why = status
        facts["status"] = {"code": ERROR, "message": why} if failed else {"code": OK}
    return facts


def _attributes(found: Mapping[str, object]) -> list[msgspec.Raw]:
    return [_attribute(key, value) for key, value in found.items()]


def _attribute(key: str, value: object) -> msgspec.Raw:
    if type(value) is str:
        return _text(key, value)
    if type(value) is int and -INT64 <= value < INT64:
        return msgspec.Raw(b'%b{"intValue":"%d"}}' % (_head(key), value))
    return msgspec.Raw(b"%b%b}" % (_head(key), msgspec.json.encode(_value(plain(value)))))


@lru_cache(maxsize=4096)
def _text(key: str, value: str) -> msgspec.Raw:
    """An attribute that is text: what sites say, which many spans have."""
    return msgspec.Raw(b"%b%b}" % (_head(key), msgspec.json.encode({"stringValue": plain(value)})))


@lru_cache(maxsize=1024)
def _head(key: str) -> bytes:
    return b'{"key":%b,"value":' % msgspec.json.encode(plain(key))


def _value(value: object) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        told = value if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
        return {"doubleValue": told}
    if isinstance(value, list):
        return {"arrayValue": {"values": list(map(_value, value))}}
    return {"stringValue": str(value)}


_HEX = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), dtype=np.uint16)
_DIGITS = np.frombuffer(b"".join(b"%04d" % number for number in range(10_000)), dtype=np.uint32)
_POWERS = 10 ** np.arange(1, 19, dtype=np.int64)
_IDS = frozenset(("high", "low", "own", "parent"))


def hexadecimal(ids: NDArray[Any]) -> NDArray[Any]:
    """Ids of 64 bits as 16 characters each."""
    return _HEX[ids.astype(">u8").view(np.uint8)].view("V16")


def decimal_widths(numbers: NDArray[Any]) -> Int64s:
    """The characters that each number takes."""
    return np.asarray(np.searchsorted(_POWERS, np.abs(numbers), side="right") + 1 + (numbers < 0))


def decimals(numbers: NDArray[Any], width: int) -> NDArray[Any]:
    """Numbers that take this many characters."""
    left, parts = np.abs(numbers.astype(np.int64)), -(-width // 4)
    found = np.empty((len(left), parts), dtype=np.uint32)
    for place in range(parts - 1, -1, -1):
        left, part = np.divmod(left, 10_000)
        found[:, place] = _DIGITS[part]
    text = np.ascontiguousarray(found.view(np.uint8)[:, parts * 4 - width :])
    text[numbers < 0, 0] = ord("-")
    return text.view(f"V{width}").reshape(-1)


class JsonForm:
    """Entries of `ScopeSpans.spans` in JSON, with a comma before each."""

    end = b"}"
    around = 0

    def widths(self, name: str, values: NDArray[Any]) -> Int64s:
        return decimal_widths(values)

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
                parts += [("", b'%b%b{"intValue":"' % (comma, _head(name))), (name, width), ("", b'"}}')]
                comma = b","
        return parts

    def field(self, name: str, width: int) -> str:
        return f"V{width}"

    def values(self, name: str, values: NDArray[Any], width: int) -> NDArray[Any]:
        return hexadecimal(values) if name in _IDS else decimals(values, width)

    def facts(self, name: str, is_server: bool, attributes: Mapping[str, object]) -> bytes:
        kind = SERVER if is_server else INTERNAL
        return b'%b],"name":%b,"kind":%d' % (self.attributes(attributes), msgspec.json.encode(plain(name)), kind)

    def attributes(self, attributes: Mapping[str, object]) -> bytes:
        return b"".join([b",%b" % one for one in _attributes(attributes)])

    def members(self, members: RareMembers) -> bytes:
        facts: dict[str, Any] = {}
        if members.links:
            facts["links"] = [
                {
                    "traceId": f"{one.trace_id:032x}",
                    "spanId": f"{one.span_id:016x}",
                    **({"traceState": one.state} if one.state else {}),
                }
                for one in members.links
            ]
        if members.events:
            facts["events"] = [
                {"timeUnixNano": str(time_ns), "name": name, "attributes": _attributes(its)}
                for time_ns, name, its in members.events
            ]
        if members.dropped:
            facts["droppedEventsCount"] = members.dropped
        if members.status is not None:
            failed, why = members.status
            facts["status"] = {"code": ERROR, "message": why} if failed else {"code": OK}
        return _members(facts) + b"}"

    def state(self, state: str) -> bytes:
        return _members({"traceState": plain(state)})


def _members(facts: Mapping[str, Any]) -> bytes:
    return b",%b" % msgspec.json.encode(facts)[1:-1] if facts else b""


JSON = JsonForm()
