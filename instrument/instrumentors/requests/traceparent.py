"""The caller's trace, as a request's headers tell it: W3C Trace Context, or what `OTEL_PROPAGATORS` says."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from instrument.recording.spans import RemoteParent
from instrument.runtime.faults import FAULTS

Extract = Callable[[Mapping[bytes, bytes]], RemoteParent | bytes | None]
"""Tells the caller's span, or what `spans.remote_of` reads, from headers by their names in small letters."""


def w3c(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The `traceparent`, to be read by whoever reads the span: that takes 3 us, which the service need not wait for."""
    return headers.get(b"traceparent")


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
