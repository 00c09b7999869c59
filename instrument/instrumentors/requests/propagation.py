"""Our trace, handed on: to OpenTelemetry's propagators and tracers, and into headers by hand.

OpenTelemetry asks `trace.get_current_span()` whose trace a client's request continues. Where a request of ours is open
and no span of OpenTelemetry's own is, that answers with ours: clients that are instrumented by it continue our trace,
and spans that the service makes with it are children of ours. Nothing is done for each request.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, MutableMapping
from types import ModuleType
from typing import Any

from instrument.instrumentors.functions import Undo, replace
from instrument.instrumentors.requests.exchange import CURRENT
from instrument.recorder.recorder import RECORDER, Recorder

MODULE = "opentelemetry.trace"
"""The module from which OpenTelemetry's propagators and tracers take `get_current_span`."""


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


def attach(module: ModuleType, recorder: Recorder = RECORDER) -> list[Undo]:
    """`opentelemetry.trace` is imported: let it know of our requests."""
    # The last one has a name of its own for it where the service has imported the SDK before us.
    places = [module, sys.modules[f"{MODULE}.propagation"], sys.modules.get("opentelemetry.sdk.trace.sampling")]
    original: Callable[..., Any] = module.get_current_span

    @functools.wraps(original)
    def get_current_span(context: Any = None) -> Any:
        span = original(context)
        if context is not None or span.get_span_context().is_valid:
            return span
        exchange = CURRENT.get()
        if exchange is None or exchange.frame is None:
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
