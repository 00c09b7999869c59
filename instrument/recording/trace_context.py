"""References to spans of other tracers, such as a request's caller or a linked span, and their form as text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import log2
from typing import Any

from instrument.runtime.lazy_imports import NamedTuple, dataclass, late_pattern


@dataclass(frozen=True, slots=True)
class RemoteParent:
    """The span of another tracer that was current when a request began. It has the fields of OpenTelemetry's span
    context.

    - `span_id`: 0 if only the trace is known
    - `is_local`: True for a span of this process
    - `in_server_span`: True for the request's server span and for spans below it
    - `state`: the W3C `tracestate`, which is passed on unchanged
    """

    trace_id: int
    span_id: int
    flags: int = 1
    is_local: bool = False
    in_server_span: bool = False
    state: str = ""


OWN_TRACE_FLAGS = 3
"""The W3C trace flags of our own traces: sampled, and with a random id (Trace Context, level 2)."""

REMOTE = "instrument.remote"
"""The attribute with the span that called a request, as text."""

_TRACEPARENT = late_pattern(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


STATE_LIMIT = 512
"""The maximum length of a `tracestate`. The last entries of a longer one are left out (W3C Trace Context, 3.3.1.5)."""

_ENTRY = r"[ \t]*(?:[a-z0-9][a-z0-9_\-*/@]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~][ \t]*)?"
_TRACESTATE = late_pattern(f"{_ENTRY}(?:,{_ENTRY}){{0,31}}")


def sanitise_tracestate(header: bytes | str) -> str:
    """Return a `tracestate` of at most `STATE_LIMIT` characters that may be passed on. Return "" for an invalid one."""
    header = header[: STATE_LIMIT + 1]
    text = header if isinstance(header, str) else header.decode("latin-1")
    if len(text) > STATE_LIMIT:
        text = text.rpartition(",")[0]
    return text if _TRACESTATE.fullmatch(text) else ""


def parse_parent(context: object) -> RemoteParent | None:
    """Return the span of another tracer, None if it is missing or invalid. `context` is a `traceparent`, alone or with
    a `tracestate`, or the result of `encode_parent`."""
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
        sanitise_tracestate(state) if isinstance(state, str | bytes) else "",
    )


def find_trace_headers(carrier: Mapping[str, object]) -> tuple[object, object]:
    headers = {name.lower(): value for name, value in carrier.items() if isinstance(name, str)}
    return headers.get("traceparent"), headers.get("tracestate", "")


LOCAL, IN_SERVER_SPAN = "local", "in server span"

OWN = "own"
"""A mark in the result of `encode_parent` for a request that began its trace: there is no id of a parent."""


def encode_parent(remote: RemoteParent | None) -> tuple[str, ...] | None:
    if remote is None:
        return None
    parent = f"00-{remote.trace_id:032x}-{remote.span_id:016x}-{remote.flags & 255:02x}"
    if not remote.span_id:
        return parent, remote.state, OWN
    if not remote.is_local:
        return parent, remote.state
    return parent, remote.state, IN_SERVER_SPAN if remote.in_server_span else LOCAL


LINK = "instrument.link"
"""The attribute with two span ids: the ended span that started a root span's task, and the root of that ended span."""

LINK_TRACE_ID = "instrument.link.trace_id"
"""The attribute with the trace id of the span in `LINK`, in hexadecimal digits, if that trace began elsewhere."""


LINK_REMOTE = "instrument.link.remote"
"""The attribute of a request that is linked to its caller's span instead of being its child. The value is the
hexadecimal trace id and span id, joined by a hyphen."""

LINK_STATE = "instrument.link.tracestate"
"""The attribute for the `tracestate` of the span in `LINK_REMOTE`."""


def make_link_attributes(span_id: int, root_id: int, remote: object) -> dict[Any, Any]:
    """Return the attributes that link a root span to the ended span that started its task."""
    link: dict[Any, Any] = {LINK: (span_id, root_id)}
    remote = parse_parent(remote)
    return link if remote is None else {**link, LINK_TRACE_ID: f"{remote.trace_id:032x}"}


class LinkedSpan(NamedTuple):
    """The target of a link between spans: its ids at a collector, and the `tracestate` of its trace."""

    trace_id: int
    span_id: int
    state: str = ""


RANDOM_BITS = 56
"""The number of random bits at the end of a trace id, on which samplers base their decisions (W3C Trace Context, level
2)."""


@lru_cache(maxsize=64)
def sampling_threshold(sample: float) -> int:
    """Return the smallest random part of a trace id that is sampled. The rounding follows OpenTelemetry's rules for
    `tracestate`."""
    if sample <= 0:
        return 1 << RANDOM_BITS
    digits = min(4 + max(int(-log2(min(sample, 1.0)) / 4), 0), 14)
    dropped = RANDOM_BITS - 4 * digits
    most: int = 16**digits
    return min(round((1 - min(sample, 1.0)) * most), most - 1) << dropped


def is_sampled(trace_id: int, sample: float) -> bool:
    """Return True if a trace is sampled at the rate `sample`. All spans of a trace get the same result."""
    return trace_id & (1 << RANDOM_BITS) - 1 >= sampling_threshold(sample)


def make_tracestate(sample: float) -> str:
    if not 0 < sample < 1:
        return ""
    return f"ot=th:{sampling_threshold(sample):014x}".rstrip("0")
