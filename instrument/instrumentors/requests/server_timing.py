"""Send the parts of a request's time to its client, in the header `Server-Timing` (W3C) of the answer.

The parts, such as queue and batches, add up to `total`. They are computed from the spans of this process before the
headers are sent. For a stream, most work comes later, so the timings are sent again at its end: in a trailer, or in a
comment of server-sent events, which clients ignore.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from instrument.recorder.recorder import Recorder
from instrument.recording.mapped import parse_details
from instrument.recording.mapped_facts import parse_facts
from instrument.recording.spans import FACTS, KEY
from instrument.runtime.faults import FAULTS
from instrument.trace.columns import Columns, device_intervals
from instrument.trace.joined import ROUNDS, join_requests
from instrument.trace.ledger import QUEUE, STALL, compute_ledger
from instrument.trace.of_recording import RowSnapshot, have_details
from instrument.trace.stages import LATENCIES, find_stages

MOST_ROWS, MOST_DETAIL_BYTES = 10_000, 128 << 10
"""The maximum number of rows and of attribute bytes to read per answer. A larger answer gets only `total`."""

WITHOUT_PARTS = "Server-Timing without parts: too many spans since the begin of the request"

EVENTS, ENDS = "text/event-stream", (b"\n\n", b"\r\n\r\n", b"\r\r")
_TIMES = frozenset(name for names in LATENCIES.values() for name in names.values())


class AnswerTimings:
    """The timings of one answer. They do not refer to the exchange, because that would make a reference cycle."""

    __slots__ = ("_details_from", "_is_events", "_tail")

    def __init__(self, recorder: Recorder) -> None:
        details = recorder.find_part_memory("details")
        self._details_from = 0 if details is None else details.count_used_slots()
        self._is_events, self._tail = False, b"\n\n"

    def make_header_value(self, exchange: Any) -> str:
        """Return the value of the `Server-Timing` header. Never raises. After a fault, the value has only the total
        time."""
        frame, recorder = exchange.frame, exchange.method.recorder
        try:
            if exchange.stream is not None and exchange.stream.items > 1:
                exchange.facts.update(exchange.stream.make_attributes(frame.start_ns))
            texts, trace_of = _make_header_entries(recorder, frame, self._details_from), recorder.trace_of
            innermost = None if trace_of is None else recorder.current_trace()
            if trace_of is not None and innermost is not None and innermost[1] == frame.root_id:
                trace_id, span_id, flags, _ = trace_of(frame.span_id, frame.root_id, innermost[2])
                texts.append(f'traceparent;desc="00-{trace_id:032x}-{span_id:016x}-{flags & 0xFF:02x}"')
            return ", ".join(texts)
        except Exception as fault:
            FAULTS.note("server timing", fault)
            return _total_text(recorder, frame)

    def decide_if_comment_fits(self, pairs: Iterable[tuple[Any, Any]], method: str) -> None:
        texts = ([text.decode("latin-1") if isinstance(text, bytes) else str(text) for text in pair] for pair in pairs)
        headers = {name.lower(): value for name, value in texts}
        is_open = method != "HEAD" and "content-length" not in headers and "content-encoding" not in headers
        self._is_events = is_open and headers.get("content-type", "").startswith(EVENTS)

    def note_body_part(self, part: bytes) -> None:
        if self._is_events:
            self._tail = (self._tail + bytes(part[-4:]))[-4:]

    def make_comment(self, exchange: Any) -> bytes:
        """Return the timings as a comment for an event stream, or b"" if the body is no complete event stream."""
        is_whole, self._is_events = self._is_events and self._tail.endswith(ENDS), False
        return f": server-timing {self.make_header_value(exchange)}\n\n".encode() if is_whole else b""


def _total_text(recorder: Recorder, frame: Any) -> str:
    return f"total;dur={_milliseconds_text(recorder.now_ns() - frame.start_ns)}"


def _milliseconds_text(time_ns: int) -> str:
    return f"{time_ns / 1e6:.6f}".rstrip("0").rstrip(".")


def _make_header_entries(recorder: Recorder, frame: Any, details_from: int) -> list[str]:
    """Return the entries of the header, such as `total;dur=12.5`, in ms."""
    mapped, details = recorder.make_reader(), recorder.find_part_memory("details")
    heads, firsts = mapped.count_written_rows(), mapped.find_first_rows_after(frame.start_ns)
    detail_bytes = 0 if details is None else details.count_used_slots() - details_from
    if sum(heads.values()) - sum(firsts.values()) > MOST_ROWS or detail_bytes > MOST_DETAIL_BYTES:
        recorder.count(WITHOUT_PARTS)
        return [_total_text(recorder, frame)]
    trace = _read_request_spans(recorder, frame, details_from)
    joined = join_requests(trace)
    place = joined.rows.tolist().index(int(np.flatnonzero(trace.span_id == frame.span_id)[0]))
    row = int(joined.rows[place])
    times = compute_ledger(trace, joined).times_of_request(place)
    times["total"] = int(trace.total_ns[row])
    for stage in find_stages(trace, joined):
        if stage.place == place:
            times.update(
                (name, end - begin) for name, begin, end in stage.list_named_intervals() if name not in (QUEUE, STALL)
            )
    facts: dict[str, int] = {}
    for fact_row in np.intersect1d(
        trace.attributes.rows_with_attribute(FACTS), np.flatnonzero(joined.of == place)
    ).tolist():
        attributes = trace.attributes[fact_row]
        times_s = {name: attributes[name] for name in _TIMES & attributes.keys()}
        facts |= {name: round(time_s * 1e9) for name, time_s in times_s.items() if isinstance(time_s, (int, float))}
    tokens = {re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-"): time_ns for name, time_ns in (times | facts).items()}
    return [f"{token};dur={_milliseconds_text(time_ns)}" for token, time_ns in tokens.items()]


def _read_request_spans(recorder: Recorder, frame: Any, details_from: int) -> Columns:
    """Read the spans of an open request: its own tree, and all trees that share a key with the request."""
    mapped = recorder.make_reader()
    snapshot = RowSnapshot.copy_from(mapped, frame.start_ns, details_from=details_from)
    texts = {span_id: text for span_id, (_, text) in parse_details(snapshot.details).items()}
    root_by_id = {span.span_id: span.root_id for span in snapshot.open_spans}
    for ring in snapshot.rings if texts else ():
        rows = ring.rows[have_details(ring.rows)]  # few of many
        root_by_id.update(zip(rows["span_id"].tolist(), rows["root_id"].tolist(), strict=True))
    texts = {span_id: text for span_id, text in texts.items() if span_id in root_by_id}
    for span in snapshot.open_spans:
        texts[span.span_id] = json.dumps({"attributes": span.attributes}, default=str).encode()
    roots, keys = {frame.root_id}, set[bytes]()
    for _ in range(ROUNDS):
        of_roots = [parse_facts(text).get("attributes") for id_, text in texts.items() if root_by_id[id_] in roots]
        new_keys = {json.dumps(facts[KEY]).encode() for facts in of_roots if facts and KEY in facts} - keys
        if not new_keys:
            break
        keys |= new_keys
        roots |= {root_by_id[id_] for id_, text in texts.items() if any(key in text for key in new_keys)}
    root_ids = np.array(sorted(roots), np.uint64)
    rings = [ring._replace(rows=ring.rows[np.isin(ring.rows["root_id"], root_ids)]) for ring in snapshot.rings]
    open_spans = [span for span in snapshot.open_spans if span.root_id in roots]
    none = mapped.read_intervals(1 << 62)
    trace, _ = replace(snapshot, rings=rings, open_spans=open_spans).make_columns(
        recorder.now_ns(), lambda span_ids: device_intervals(none, span_ids)
    )
    return replace(trace, clipped=trace.clipped & (trace.span_id != frame.span_id))
