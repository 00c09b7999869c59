"""Traces between services: the caller's, read from headers, and ours, handed on to OpenTelemetry and by hand.

A caller's trace is read from W3C Trace Context, or by the propagators that `OTEL_PROPAGATORS` names.

OpenTelemetry asks `trace.get_current_span()` for the trace that a client's request continues. Where a request of ours
is open and no span of OpenTelemetry's own is, that returns ours: clients that it instruments continue our trace, and
spans that the service makes with it are children of ours. Nothing is done for each request.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from importlib import import_module
from types import ModuleType
from typing import Any

from instrument.instrumentors.functions import Undo, replace
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.remote_parents import STATE_LIMIT, RemoteParent, noted, state_of
from instrument.runtime.faults import FAULTS

MODULE = "opentelemetry.trace"
"""The module from which OpenTelemetry's propagators and tracers take `get_current_span`."""

Header = bytes | str
Caller = Header | tuple[Header, ...]
"""A caller as `remote_of` reads it in any process: a `traceparent`, that and a `tracestate`, or a noted span."""

Extract = Callable[[Mapping[bytes, bytes]], Caller | None]
"""A function that reads the caller from headers by their names in small letters."""


def with_state(parent: Header | None, state: Header) -> Caller | None:
    """Join a `traceparent`, if there is one, and a `tracestate`, which the reader of the span parses."""
    return None if parent is None else (parent, state if len(state) <= STATE_LIMIT else state[: STATE_LIMIT + 1])


def w3c(headers: Mapping[bytes, bytes]) -> Caller | None:
    """The `traceparent`, with the `tracestate` if there is one."""
    parent, state = headers.get(b"traceparent"), headers.get(b"tracestate")
    return parent if state is None else with_state(parent, state)


def configured(headers: Mapping[bytes, bytes]) -> tuple[str, ...] | None:
    """The span that OpenTelemetry's propagators find, those of `OTEL_PROPAGATORS`."""
    try:
        from opentelemetry import propagate, trace

        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        context = trace.get_current_span(propagate.extract(carrier)).get_span_context()
        if not context.is_valid:
            return None
        state = state_of(context.trace_state.to_header().encode("latin-1", "replace")) if context.trace_state else ""
        return noted(RemoteParent(context.trace_id, context.span_id, int(context.trace_flags), state=state))
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


def current(recorder: Recorder = RECORDER) -> tuple[int, int, int, str] | None:
    """Trace id, span id, flags and state of the innermost span of ours, as others know it; None where none is open."""
    trace_of = recorder.trace_of
    found = None if trace_of is None else recorder.current_trace()
    return None if found is None or trace_of is None else trace_of(*found)


def inject(headers: MutableMapping[str, str]) -> None:
    """Name the current span of ours in the headers of a request that the service sends (W3C `traceparent`).

    The caller's `tracestate` goes on with it. For clients that OpenTelemetry does not instrument. Where no span is
    open, nothing is set.
    """
    found = current()
    if found is not None:
        trace_id, span_id, flags, state = found
        headers["traceparent"] = f"00-{trace_id:032x}-{span_id:016x}-{flags & 0xFF:02x}"
        if state:
            headers["tracestate"] = state


def attach(module: ModuleType, has_request: Callable[[], bool], recorder: Recorder = RECORDER) -> list[Undo]:
    """Let `opentelemetry.trace` find the spans of ours where the context has an open request."""
    # The last one has a name of its own for it where the service has imported the SDK before us.
    places = [module, sys.modules[f"{MODULE}.propagation"], sys.modules.get("opentelemetry.sdk.trace.sampling")]
    original: Callable[..., Any] = module.get_current_span

    @functools.wraps(original)
    def get_current_span(context: Any = None) -> Any:
        span = original(context)
        if context is not None or span.get_span_context().is_valid:
            return span
        if not has_request():
            return span
        found = current(recorder)
        return span if found is None else _span_of(*found)

    return [
        replace(place, "get_current_span", get_current_span)
        for place in places
        if place is not None and vars(place).get("get_current_span") is original
    ]


@functools.cache
def _kind_of_span() -> Any:
    from opentelemetry.trace import NonRecordingSpan

    class CurrentSpan(NonRecordingSpan):
        """A span of ours, as OpenTelemetry sees it."""

        is_of_instrument = True

    return CurrentSpan


def _span_of(trace_id: int, span_id: int, flags: int, state: str) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags, TraceState

    kept = TraceState.from_header([state]) if state else None
    return _kind_of_span()(SpanContext(trace_id, span_id, False, TraceFlags(flags), kept))
