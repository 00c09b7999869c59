"""Traces between services: the caller's, read from headers, and ours, passed to OpenTelemetry and to headers.

A caller's trace is read from W3C Trace Context, or by the propagators that `OTEL_PROPAGATORS` names.

OpenTelemetry calls `trace.get_current_span()` for the trace that a client's request continues. If a request of ours is
open and no span of OpenTelemetry's own is, it returns our span. Clients that it instruments then continue our trace,
and spans that the service makes with it are children of ours. This costs nothing per request.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from importlib import import_module
from types import ModuleType
from typing import Any

from instrument.instrumentors.functions import Switch, Undo, replace, replaces
from instrument.instrumentors.verdict import Verdict
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.remote_parents import STATE_LIMIT, RemoteParent, noted, remote_of, state_of
from instrument.runtime.faults import FAULTS

MODULE = "opentelemetry.trace"
"""The module from which OpenTelemetry's propagators and tracers import `get_current_span`."""

Header = bytes | str
Caller = Header | tuple[Header, ...]
"""A caller for `remote_of`: a `traceparent`, alone or in a pair with a `tracestate`, or a stored span."""

Extract = Callable[[Mapping[bytes, bytes]], Caller | None]
"""A function that reads the caller from headers, whose names are in lower case."""


def with_state(parent: Header | None, state: Header) -> Caller | None:
    """Return a `traceparent` in a pair with its `tracestate`, alone if that is empty, None without a `traceparent`."""
    return None if parent is None else (parent, state if len(state) <= STATE_LIMIT else state[: STATE_LIMIT + 1])


def w3c(headers: Mapping[bytes, bytes]) -> Caller | None:
    """Return the `traceparent` of the headers, with the `tracestate` if there is one."""
    parent, state = headers.get(b"traceparent"), headers.get(b"tracestate")
    return parent if state is None else with_state(parent, state)


def configured_caller(headers: Mapping[bytes, bytes]) -> tuple[str, ...] | None:
    """Return the caller that OpenTelemetry's propagators of `OTEL_PROPAGATORS` read."""
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
    """Return `configured_caller` if `OTEL_PROPAGATORS` names other installed propagators than the default, or `w3c`."""
    propagators = {name.strip() for name in os.environ.get("OTEL_PROPAGATORS", "").split(",")} - {"", "baggage"}
    if propagators <= {"tracecontext"}:
        return w3c
    try:
        import_module("opentelemetry.propagate")  # raises at each import of a bad setting
    except Exception as problem:
        FAULTS.note_of_rule("OTEL_PROPAGATORS", str(problem))
        return w3c
    return configured_caller


def in_environment() -> str:
    """Return the caller in the variables of this process (`TRACEPARENT`, `TRACESTATE`) as `Origin` has it."""
    headers = {
        name.lower().replace("_", "-").encode(): os.fsencode(value)
        for name, value in os.environ.items()
        if name.isupper()
    }
    return " ".join((noted(remote_of(extractor()(headers))) or ())[:2])


def current(recorder: Recorder = RECORDER) -> tuple[int, int, int, str] | None:
    """Return trace id, span id, flags and state of our innermost open span, as exported. Return None without one."""
    trace_of = recorder.trace_of
    span = None if trace_of is None else recorder.current_trace()
    return None if span is None or trace_of is None else trace_of(*span)


def inject(headers: MutableMapping[str, str]) -> None:
    """Write our current span into the headers of a request that the service sends (W3C `traceparent`).

    The caller's `tracestate` is passed on. It is for clients that OpenTelemetry does not instrument. Without an open
    span no header is set.
    """
    trace = current()
    if trace is not None:
        trace_id, span_id, flags, state = trace
        headers["traceparent"] = f"00-{trace_id:032x}-{span_id:016x}-{flags & 0xFF:02x}"
        if state:
            headers["tracestate"] = state


def attach(module: ModuleType, has_request: Callable[[], bool], recorder: Recorder = RECORDER) -> list[Undo]:
    """Have `opentelemetry.trace` return our spans if the context has an open request."""
    # The last one has imported the function under its own name if the service has imported the SDK before.
    places = [module, sys.modules[f"{MODULE}.propagation"], sys.modules.get("opentelemetry.sdk.trace.sampling")]
    original: Callable[..., Any] = module.get_current_span

    @functools.wraps(original)
    def get_current_span(context: Any = None) -> Any:
        span = original(context)
        if context is not None or span.get_span_context().is_valid:
            return span
        if not has_request():
            return span
        own_span = current(recorder)
        return span if own_span is None else _span_of(*own_span)

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

    trace_state = TraceState.from_header([state]) if state else None
    return _kind_of_span()(SpanContext(trace_id, span_id, False, TraceFlags(flags), trace_state))


TRACE_ID, SPAN_ID = "trace_id", "span_id"

_CLASSES = {"logging": ("Logger", "makeRecord"), "structlog._base": ("BoundLoggerBase", "_process_event")}
"""The class and the method that make log records or events, by module."""


class LogRecords(Switch):
    """The instrumentor of `logs: auto`."""

    key = "logs"
    module = "logging"

    def wants(self, module_name: str) -> bool:
        """Return True for the modules that make records."""
        return module_name in _CLASSES

    def imported(self, module: Any) -> bool:
        """Have the imported module make records with ids."""
        class_name, name = _CLASSES[module.__name__]
        owner = getattr(module, class_name, None)
        if hasattr(owner, name):
            self._attach()
            self._undos.append((self._tag_records if class_name == "Logger" else self._tag_events)(owner, name))
        return False

    def _ids(self) -> dict[str, str]:
        try:
            trace = current(self._recorder) if self._recorder.on else None
        except Exception as fault:  # the record is the service's
            FAULTS.note("ids of a log record", fault)
            trace = None
        return {} if trace is None else {TRACE_ID: f"{trace[0]:032x}", SPAN_ID: f"{trace[1]:016x}"}

    def _tag_records(self, owner: Any, name: str) -> Any:
        make_record = getattr(owner, name)

        @replaces(owner, name)
        def undo(logger: Any, *args: Any, **kwargs: Any) -> Any:
            record = make_record(logger, *args, **kwargs)
            record.__dict__ = {TRACE_ID: "", SPAN_ID: "", **self._ids(), **record.__dict__}
            return record

        return undo

    def _tag_events(self, owner: Any, name: str) -> Any:
        process_event = getattr(owner, name)

        @replaces(owner, name)
        def undo(logger: Any, method: str, event: Any, event_kw: Any) -> Any:
            return process_event(logger, method, event, {**self._ids(), **event_kw})

        return undo

    def verdicts(self) -> list[Verdict]:
        """Return the verdict on the modules that make records."""
        if not self._met:
            return [Verdict("logs", "waiting", why="logging not imported")]
        return [Verdict("logs", "attached", "logging")]
