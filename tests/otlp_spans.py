"""Spans for the tests of OTLP, and what a collector must hold of each."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from instrument.otlp.delivery import Exporter
from instrument.otlp.export_facts import Ids
from instrument.otlp.span_queue import Source
from instrument.recording.spans import Origin, Site, Span
from instrument.recording.trace_context import LinkedSpan, make_link_attributes
from instrument.trace.columns import Columns
from instrument.trace.indices import NONE
from instrument.trace.joined import Joined
from instrument.trace.merge import Merged
from instrument.trace.request_trees import find_outer_spans, rows_by_process
from instrument.trace.trace import Trace, append_spans, columns_of_spans, make_spans

SECOND = 10**9
ORIGIN = Origin(pid=1, service="chat", monotonic_ns=1_000, realtime_ns=1_700_000_000 * SECOND + 123_456_789, host="box")
THREADS = {7: "MainThread", 8: "wörker"}
SITE = Site("op", "op")
LAYER = Site("Linear", "layer", "chat.net", "Mlp.forward", "/srv/chat/net.py", 42, "model.layers.3.mlp")


def span(site: Site = SITE, span_id: int = 1, parent_id: int = 0, root_id: int = 1, **facts: Any) -> Span:
    times = {"start_ns": 2_000, "end_ns": 5_000, "active_ns": 3_000, "self_ns": 3_000, "thread_id": 7, "task_id": 0}
    return Span(site, span_id, parent_id, root_id, **{**times, **facts})


def tree(spans: int, first_id: int = 1, site: Site = SITE, **facts: Any) -> list[Span]:
    """A root and its children, three to a parent, with numbers from `first_id`."""
    return [
        span(site, first_id + i, first_id + (i - 1) // 3 if i else 0, first_id, start_ns=2_000 + i % 2_999, **facts)
        for i in range(spans)
    ]


def offer(exporter: Exporter, spans: Sequence[Span], source: Source | None = None) -> bool:
    """Hand over spans of one process, packed at once. Returns True unless the exporter is closed."""
    source = source or exporter.own
    links = {row: one.links for row, one in enumerate(spans) if one.links}
    exporter.submit_rows(source, columns_of_spans(spans), np.arange(len(spans)), links=links)
    return not exporter._queue.is_closed


def messages_of(
    spans: Sequence[Span], ids: Ids | None = None, origin: Origin = ORIGIN, threads: Mapping[int, str] | None = None
) -> list[Any]:
    """Return the official messages of spans of one process, each followed by those of its device intervals."""
    ids = ids or Ids()
    source = Source(ids, origin, lambda: threads or {}, dict)
    links = {row: one.links for row, one in enumerate(spans) if one.links}
    bodies = source.pack_requests(columns_of_spans(spans), np.arange(len(spans)), 1 << 30, links=links)
    return [
        message
        for body in bodies
        for of_resource in ExportTraceServiceRequest.FromString(body.data).resource_spans
        for of_scope in of_resource.scope_spans
        for message in of_scope.spans
    ]


def identify(spans: Sequence[Span], ids: Ids) -> list[tuple[int, int, int, Span]]:
    """Return the ids of the trace, the span and the parent, 0 for none, of spans without device intervals."""
    return [
        (*(int.from_bytes(one, "big") for one in (message.trace_id, message.span_id, message.parent_span_id)), span)
        for message, span in zip(messages_of(spans, ids), spans, strict=True)
    ]  # fmt: skip


def links_of(span: Span, ids: Ids) -> list[tuple[int, int, str]]:
    """Return the ids of the trace and of the span, and the state, of what a span is linked to."""
    return [
        (int.from_bytes(one.trace_id, "big"), int.from_bytes(one.span_id, "big"), one.trace_state)
        for one in messages_of([span], ids)[0].links
    ]


def linked_requests(columns: Columns, joined: Joined, ids: Ids | None = None) -> Mapping[int, Sequence[LinkedSpan]]:
    """By the row of each batch the requests that it serves, those that are known, each once and in its order.

    Without `ids` the links have the numbers of the spans and of the roots.
    """
    served, rows = joined.served, joined.rows
    requests = [
        LinkedSpan(root_id, span_id) if ids is None else LinkedSpan(ids.trace_id(root_id), ids.span_id(span_id))
        for span_id, root_id in zip(columns.span_id[rows].tolist(), columns.root_id[rows].tolist(), strict=True)
    ]
    known = np.flatnonzero(served.request != NONE)
    found: dict[int, dict[int, None]] = {}
    for batch, place in zip(served.batch[known].tolist(), served.request[known].tolist(), strict=True):
        found.setdefault(batch, {})[place] = None
    return {batch: tuple(map(requests.__getitem__, its)) for batch, its in found.items()}


def legal(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def said(value: Any) -> Any:
    """An attribute's value as it must arrive."""
    if isinstance(value, str):
        return legal(value)
    if isinstance(value, list | tuple):
        return [said(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    return value


def expected_attributes(of: Span) -> dict[str, Any]:
    """Return the attributes that a collector must have of a span that is no copy."""
    site = of.site
    found = {key: said(value) for key, value in (*site.attributes, *of.attributes.items())}
    candidates = {
        "instrument.kind": (site.kind, True),
        "instrument.instance": (legal(site.instance), site.instance),
        "code.function.name": (legal(site.function), site.function),
        "code.file.path": (legal(site.file), site.file),
        "code.line.number": (site.line, site.line),
        "thread.id": (of.thread_id, True),
        "thread.name": (THREADS.get(of.thread_id), of.thread_id in THREADS),
        "instrument.self_ns": (of.self_ns, True),
        "instrument.active_ns": (of.active_ns, of.active_ns != of.total_ns),
        "instrument.task_id": (of.task_id, of.task_id),
        "instrument.clipped": (True, of.clipped),
        "error.type": (legal(of.error or ""), of.error is not None),
    }
    return found | {key: value for key, (value, there) in candidates.items() if there}


def requests_in(lines: list[str]) -> list[Any]:
    """The lines as messages; OTLP has ids in hexadecimal where protobuf's own JSON has base64."""

    def translated(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(translated, value))
        if not isinstance(value, dict):
            return value
        return {
            key: base64.b64encode(bytes.fromhex(it)).decode()
            if key in ("traceId", "spanId", "parentSpanId")
            else translated(it)
            for key, it in value.items()
        }

    return [ParseDict(translated(json.loads(line)), ExportTraceServiceRequest()) for line in lines]


def spans_by_process(
    merged: Merged, trace: Columns, joined: Joined, below: Mapping[int, Sequence[Span]] | None = None
) -> Iterator[tuple[Trace, list[Span]]]:
    """The spans of each process of merged files, with what hangs below rows."""
    more = [span for its in (below or {}).values() for span in its]
    linked, began = linked_requests(trace, joined), find_outer_spans(trace, joined)
    remotes = {int(trace.root_id[row]): one for row, one in trace.remote.items()}
    for facts, own, rows, _ in rows_by_process(merged, append_spans(trace, more)):
        found = make_spans(append_spans(trace, more), rows)
        for span, row in zip(found, rows.tolist(), strict=True):
            span.thread_id = span.thread_id if own is None else own.threads.get(span.thread_id, span.thread_id)
            span.links = linked.get(row, ())
            span.remote = remotes.get(span.root_id)
            if row in began:
                span_id, root_id = began[row]
                span.attributes = {**span.attributes, **make_link_attributes(span_id, root_id, remotes.get(root_id))}
        yield facts, found
