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

from instrument.otlp.packing import (
    SCHEMA_URL,
    SCOPE,
    Identified,
    Ids,
    attributes_of,
    device_attributes,
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
        attributes = device_attributes(span, interval)
        return {**facts, "name": plain(device_name(span.site)), "kind": INTERNAL, "attributes": _attributes(attributes)}
    facts["name"], facts["kind"] = plain(span.site.name), SERVER if is_server(span) else INTERNAL
    facts["attributes"] = _attributes(attributes_of(span, threads))
    links, status = links_of(span, ids), status_of(span)
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
        events, dropped = events_of(span)
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
