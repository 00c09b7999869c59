"""The caller's trace, as a request's headers tell it: W3C Trace Context, or what `OTEL_PROPAGATORS` says."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module

from instrument.recording.remote_parents import STATE_LIMIT, RemoteParent, state_of
from instrument.runtime.faults import FAULTS

Header = bytes | str
Caller = RemoteParent | Header | tuple[Header, Header]
"""A caller as `remote_of` reads it: a span, a `traceparent`, or that and a `tracestate`."""

Extract = Callable[[Mapping[bytes, bytes]], Caller | None]
"""A function that reads the caller from headers by their names in small letters."""


def with_state(parent: Header | None, state: Header) -> Caller | None:
    """Join a `traceparent`, if there is one, and a `tracestate`, which the reader of the span parses."""
    return None if parent is None else (parent, state if len(state) <= STATE_LIMIT else state[: STATE_LIMIT + 1])


def w3c(headers: Mapping[bytes, bytes]) -> Caller | None:
    """The `traceparent`, with the `tracestate` if there is one."""
    parent, state = headers.get(b"traceparent"), headers.get(b"tracestate")
    return parent if state is None else with_state(parent, state)


def configured(headers: Mapping[bytes, bytes]) -> RemoteParent | None:
    """The span that OpenTelemetry's propagators find, those of `OTEL_PROPAGATORS`."""
    try:
        from opentelemetry import propagate, trace

        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        context = trace.get_current_span(propagate.extract(carrier)).get_span_context()
        if not context.is_valid:
            return None
        state = state_of(context.trace_state.to_header().encode("latin-1", "replace")) if context.trace_state else ""
        return RemoteParent(context.trace_id, context.span_id, int(context.trace_flags), state=state)
    except Exception as fault:  # a propagator that is not installed, or somebody else's
        FAULTS.note("OTEL_PROPAGATORS", fault)
        return None


def extractor() -> Extract:
    """Return `configured` where `OTEL_PROPAGATORS` names others than the default that are installed, else `w3c`."""
    asked = {name.strip() for name in os.environ.get("OTEL_PROPAGATORS", "").split(",")} - {"", "baggage"}
    if asked <= {"tracecontext"}:
        return w3c
    try:
        import_module("opentelemetry.propagate")  # it raises each time that it is imported
    except Exception as problem:
        FAULTS.note_of_rule("OTEL_PROPAGATORS", str(problem))
        return w3c
    return configured
