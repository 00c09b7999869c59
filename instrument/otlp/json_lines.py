"""Spans as a file of OTLP in JSON: a line for each request, as OpenTelemetry's file exporter has them.

Ids are hexadecimal and numbers of 64 bits are text, as OTLP's own mapping to JSON has them. What a span says is what
a collector gets of it, by the same functions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from instrument.otlp.packing import (
    SCHEMA_URL,
    SCOPE,
    Identified,
    Ids,
    attributes_of,
    device_attributes,
    device_name,
    identify,
    is_server,
    links_of,
    plain,
    status_of,
    version,
)
from instrument.recording.spans import Origin, Span

SPANS_AT_ONCE = 1_000
"""Spans of a line; a tree is not cut."""

INTERNAL, SERVER, OK, ERROR = 1, 2, 1, 2


def json_lines(
    spans: Sequence[Span], origin: Origin, threads: Mapping[int, str], ids: Ids | None = None
) -> Iterator[str]:
    """The lines of a process's spans, with the newline of each. `ids` are those of all whose trees it shares."""
    own = Ids()
    ids = ids or own
    resource = {
        "service.name": origin.service,
        "service.instance.id": own.instance,
        "process.pid": origin.pid,
        **({"host.name": origin.host} if origin.host else {}),
    }
    ordered = sorted(spans, key=lambda span: (span.root_id, span.start_ns, -span.end_ns, span.span_id))
    part: list[dict[str, Any]] = []
    root_id = 0
    offset_ns = origin.realtime_of(0)
    for found in identify(ordered, ids):
        if len(part) >= SPANS_AT_ONCE and found[5].root_id != root_id:
            yield _line(resource, part)
            part = []
        root_id = found[5].root_id
        part.append(_span(found, ids, threads, offset_ns))
    if part:
        yield _line(resource, part)


def _line(resource: Mapping[str, object], spans: list[dict[str, Any]]) -> str:
    scope = {"scope": {"name": SCOPE, "version": version()}, "spans": spans, "schemaUrl": SCHEMA_URL}
    request = {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}]}
    return json.dumps(request, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"


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
    if status is not None:
        failed, why = status
        facts["status"] = {"code": ERROR, "message": why} if failed else {"code": OK}
    return facts


def _attributes(found: Mapping[str, object]) -> list[dict[str, Any]]:
    return [{"key": plain(key), "value": _value(plain(value))} for key, value in found.items()]


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
