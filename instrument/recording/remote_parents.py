"""Spans of other tracers: the caller of a request, links of a root or a batch, and their texts in rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from instrument.runtime.cheap_start import NamedTuple, dataclass, late_pattern


@dataclass(frozen=True, slots=True)
class RemoteParent:
    """The span of another tracer that was current when a request began: the fields of an OpenTelemetry span context.

    `span_id` is 0 if only the trace is known. `is_local` is True for a span of this process, `in_server_span` for a
    server span of the request or a span below it. `state` is its W3C `tracestate`, which is passed on unchanged.
    """

    trace_id: int
    span_id: int
    flags: int = 1
    is_local: bool = False
    in_server_span: bool = False
    state: str = ""


OF_OURS = 3
"""The flags of our own traces: sampled, with a random id (W3C Trace Context, level 2)."""

REMOTE = "instrument.remote"
"""The name of the attribute of a request's row with the caller's trace, which `remote_of` reads. Readers of spans do
not get it. It is a text, because the garbage collector would follow each row with an object."""

_TRACEPARENT = late_pattern(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


STATE_LIMIT = 512
"""The most characters of a `tracestate`. The last entries of a longer one are left out (W3C Trace Context, 3.3.1.5)."""

_ENTRY = r"[ \t]*(?:[a-z0-9][a-z0-9_\-*/@]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~][ \t]*)?"
_TRACESTATE = late_pattern(f"{_ENTRY}(?:,{_ENTRY}){{0,31}}")


def state_of(header: bytes | str) -> str:
    """Return the entries of a `tracestate` that are passed on, up to `STATE_LIMIT`; "" for an invalid one."""
    header = header[: STATE_LIMIT + 1]
    text = header if isinstance(header, str) else header.decode("latin-1")
    if len(text) > STATE_LIMIT:
        text = text.rpartition(",")[0]
    return text if _TRACESTATE.fullmatch(text) else ""


def remote_of(context: object) -> RemoteParent | None:
    """Return another tracer's span from its context, its headers, or the result of `noted`.

    Headers are the `traceparent`, alone or with the `tracestate`, as bytes or text. An invalid `traceparent` (W3C Trace
    Context, 3.2) counts as none.
    """
    parent, state, *marks = context if isinstance(context, tuple) and len(context) > 1 else (context, b"")
    if isinstance(parent, str):
        parent = parent.encode("latin-1", "replace")
    if not isinstance(parent, bytes):
        return parent if isinstance(parent, RemoteParent) else None
    match = _TRACEPARENT.fullmatch(parent.strip())
    if match is None:
        return None
    version, trace, span, flags, more = match.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    if version == b"ff" or (version == b"00" and more) or not trace_id or not (span_id or marks == [OWN]):
        return None
    is_local, in_server_span = marks in ([LOCAL], [IN_SERVER_SPAN]), marks == [IN_SERVER_SPAN]
    return RemoteParent(
        trace_id,
        span_id,
        int(flags, 16),
        is_local,
        in_server_span,
        state_of(state) if isinstance(state, str | bytes) else "",
    )


def header_of(carrier: Mapping[str, object]) -> tuple[object, object]:
    """Return the `traceparent` and the `tracestate` of headers, whose names may be in any case."""
    headers = {name.lower(): value for name, value in carrier.items() if isinstance(name, str)}
    return headers.get("traceparent"), headers.get("tracestate", "")


LOCAL, IN_SERVER_SPAN = "local", "in server span"

OWN = "own"
"""The mark of a trace that began in this request and was passed on to other services."""


def noted(remote: RemoteParent | None) -> tuple[str, ...] | None:
    """Return another tracer's span as text for a recording, which `remote_of` reads."""
    if remote is None:
        return None
    parent = f"00-{remote.trace_id:032x}-{remote.span_id:016x}-{remote.flags & 255:02x}"
    if not remote.span_id:
        return parent, remote.state, OWN
    if not remote.is_local:
        return parent, remote.state
    return parent, remote.state, IN_SERVER_SPAN if remote.in_server_span else LOCAL


LINK = "instrument.link"
"""The attribute of a root that an ended span had started: the ids of that span and of its root."""

LINK_TRACE_ID = "instrument.link.trace_id"
"""The attribute with the trace id of the root in `LINK` in hexadecimal digits, if it is another tracer's."""


LINK_REMOTE = "instrument.link.remote"
"""The attribute of a request with only a link to its caller's span: the trace id and span id in hexadecimal digits,
with a hyphen between them."""

LINK_STATE = "instrument.link.tracestate"
"""The attribute with the `tracestate` of the caller's span in `LINK_REMOTE`, if it has one."""


def link_of(span_id: int, root_id: int, remote: object) -> dict[Any, Any]:
    """Return the attributes of a root for its link to an ended span."""
    link: dict[Any, Any] = {LINK: (span_id, root_id)}
    remote = remote_of(remote)
    return link if remote is None else {**link, LINK_TRACE_ID: f"{remote.trace_id:032x}"}


class LinkedSpan(NamedTuple):
    """The target of a link between spans: its ids at a collector, and the `tracestate` of its trace."""

    trace_id: int
    span_id: int
    state: str = ""
