"""Reads the current span of the service's own OpenTelemetry SDK, and turns its instrumentations off on our threads."""

from __future__ import annotations

import sys
from typing import Any

from instrument.recording.trace_context import RemoteParent, sanitise_tracestate
from instrument.runtime.faults import FAULTS


def read_current_span() -> RemoteParent | None:
    """Return the current OpenTelemetry span of this thread, or None. Never raises.

    Takes about 30 ns before OpenTelemetry is imported, then 0.2 us without a current span and 0.9 us with one.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    try:
        current = trace.get_current_span()
        if getattr(current, "is_of_instrument", False):
            return None  # a span of ours, which OpenTelemetry was given as its current one
        context = current.get_span_context()
        if context.is_valid:
            is_local = not context.is_remote
            in_server_span = is_local and _is_in_server_span(current)
            flags, state = int(context.trace_flags), ""
            if context.trace_state:
                state = sanitise_tracestate(context.trace_state.to_header().encode("latin-1", "replace"))
            return RemoteParent(context.trace_id, context.span_id, flags, is_local, in_server_span, state)
    except Exception as fault:  # another tracer's object; the request goes on without it
        FAULTS.note("read of the current OpenTelemetry span", fault)
    return None


def _is_in_server_span(local: Any) -> bool:
    kind = getattr(getattr(local, "kind", None), "name", "SERVER")
    return kind in ("SERVER", "CONSUMER") or (kind == "INTERNAL" and getattr(local, "parent", None) is not None)


def suppress_instrumentation() -> None:
    """Turn off OpenTelemetry's instrumentations on this thread."""
    context = sys.modules.get("opentelemetry.context")
    if context is None:
        return
    for name in ("_SUPPRESS_INSTRUMENTATION_KEY", "_SUPPRESS_HTTP_INSTRUMENTATION_KEY"):
        key = getattr(context, name, "suppress_instrumentation")
        context.attach(context.set_value(key, True))
