"""The caller's trace, as a request's headers tell it: W3C Trace Context, or what `OTEL_PROPAGATORS` says."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

from instrument.errors import FAULTS
from instrument.spans import RemoteParent

HEADER = b"traceparent"

_PARTS = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

Extract = Callable[[Mapping[bytes, bytes]], RemoteParent | None]
"""Tells the caller's span from headers by their names in small letters. Never raises."""


def w3c(headers: Mapping[bytes, bytes]) -> RemoteParent | None:
    """The span that a `traceparent` names (W3C Trace Context, 3.2). A header that is no sound one counts as none."""
    text = headers.get(HEADER)
    found = None if text is None else _PARTS.fullmatch(text.strip())
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    if version == b"ff" or (version == b"00" and more) or not trace_id or not span_id:
        return None
    return RemoteParent(trace_id, span_id, int(flags, 16))


def configured(headers: Mapping[bytes, bytes]) -> RemoteParent | None:
    """The span that OpenTelemetry's propagators find, those of `OTEL_PROPAGATORS`."""
    try:
        from opentelemetry import propagate, trace

        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        context = trace.get_current_span(propagate.extract(carrier)).get_span_context()
        return RemoteParent(context.trace_id, context.span_id, int(context.trace_flags)) if context.is_valid else None
    except Exception as fault:  # a propagator that is not installed, or somebody else's
        FAULTS.note("OTEL_PROPAGATORS", fault)
        return None


def extractor() -> Extract:
    """`w3c` for the default of `OTEL_PROPAGATORS`, which need not be imported; else `configured`."""
    asked = {name.strip() for name in os.environ.get("OTEL_PROPAGATORS", "").split(",")} - {"", "baggage"}
    return w3c if asked <= {"tracecontext"} else configured
