"""Continue traces between services: read the caller's span from headers, and pass the current span on.

Headers are read by W3C Trace Context, or by the propagators that `OTEL_PROPAGATORS` names. During a request,
OpenTelemetry's `trace.get_current_span()` returns our current span, so clients that OpenTelemetry instruments continue
the trace. An open span of OpenTelemetry itself takes precedence.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from importlib import import_module
from types import ModuleType
from typing import Any

from instrument.instrumentors.profiled_functions import Switch, Undo, replace_attribute, replaces_attribute
from instrument.instrumentors.verdict import Verdict
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.trace_context import (
    STATE_LIMIT,
    RemoteParent,
    encode_parent,
    parse_parent,
    sanitise_tracestate,
)
from instrument.runtime.faults import FAULTS

OPENTELEMETRY = "opentelemetry.trace"
"""The module of OpenTelemetry that defines `get_current_span`."""

Header = bytes | str
Caller = Header | tuple[Header, ...]
"""The caller's span: a `traceparent`, a pair of `traceparent` and `tracestate`, or a result of `encode_parent`."""

Extract = Callable[[Mapping[bytes, bytes]], Caller | None]
"""A function that reads the caller's span from headers with lower-case names."""


def pair_with_tracestate(parent: Header | None, state: Header) -> Caller | None:
    """Return a `traceparent` with its `tracestate`. Cut a long `tracestate` to one character above `STATE_LIMIT`, so
    that the parser still recognises it as too long."""
    return None if parent is None else (parent, state if len(state) <= STATE_LIMIT else state[: STATE_LIMIT + 1])


def read_w3c_caller(headers: Mapping[bytes, bytes]) -> Caller | None:
    parent, state = headers.get(b"traceparent"), headers.get(b"tracestate")
    return parent if state is None else pair_with_tracestate(parent, state)


def read_configured_caller(headers: Mapping[bytes, bytes]) -> tuple[str, ...] | None:
    with FAULTS.guard("OTEL_PROPAGATORS"):  # a propagator that is not installed, or somebody else's
        from opentelemetry import propagate, trace

        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        context = trace.get_current_span(propagate.extract(carrier)).get_span_context()
        if not context.is_valid:
            return None
        header = context.trace_state.to_header() if context.trace_state else ""
        state = sanitise_tracestate(header.encode("latin-1", "replace")) if header else ""
        return encode_parent(RemoteParent(context.trace_id, context.span_id, int(context.trace_flags), state=state))
    return None


def choose_extractor() -> Extract:
    propagators = {name.strip() for name in os.environ.get("OTEL_PROPAGATORS", "").split(",")} - {"", "baggage"}
    if propagators <= {"tracecontext"}:
        return read_w3c_caller
    try:
        import_module("opentelemetry.propagate")  # raises at each import of a bad setting
    except Exception as problem:
        FAULTS.note_unreadable_value("OTEL_PROPAGATORS", str(problem))
        return read_w3c_caller
    return read_configured_caller


def read_caller_from_environment() -> str:
    """Return the caller's span from the environment variables `TRACEPARENT` and `TRACESTATE`, or ""."""
    variables = ((name, value) for name, value in os.environ.items() if name.isupper())
    headers = {name.lower().replace("_", "-").encode(): os.fsencode(value) for name, value in variables}
    return " ".join((encode_parent(parse_parent(choose_extractor()(headers))) or ())[:2])


def current_span_ids(recorder: Recorder = RECORDER) -> tuple[int, int, int, str] | None:
    """Return the exported trace id, span id, flags and state of the innermost open span, or None."""
    trace_of = recorder.trace_of
    span = None if trace_of is None else recorder.current_trace()
    return None if span is None or trace_of is None else trace_of(*span)


def inject(headers: MutableMapping[str, str]) -> None:
    """Add the current span to the headers of a request that the service sends, as a W3C `traceparent`.

    The caller's `tracestate` is also added. Without an open span, `headers` does not change. A client that
    OpenTelemetry instruments does not need this.
    """
    trace = current_span_ids()
    if trace is not None:
        trace_id, span_id, flags, state = trace
        headers["traceparent"] = f"00-{trace_id:032x}-{span_id:016x}-{flags & 0xFF:02x}"
        if state:
            headers["tracestate"] = state


def attach_opentelemetry(
    module: ModuleType, has_request: Callable[[], bool], recorder: Recorder = RECORDER
) -> list[Undo]:
    """Make OpenTelemetry's `get_current_span` return the current span of `instrument` during a request."""
    # The last one has imported the function under its own name if the service has imported the SDK before.
    places = [module, sys.modules[f"{OPENTELEMETRY}.propagation"], sys.modules.get("opentelemetry.sdk.trace.sampling")]
    original: Callable[..., Any] = module.get_current_span

    class CurrentSpan(module.NonRecordingSpan):  # type: ignore[misc, name-defined]
        """A substitute for OpenTelemetry's span. It has the ids of our span, and records nothing."""

        is_of_instrument = True

    @functools.wraps(original)
    def get_current_span(context: Any = None) -> Any:
        span = original(context)
        if context is not None or span.get_span_context().is_valid:
            return span
        if not has_request():
            return span
        own_span = current_span_ids(recorder)
        if own_span is None:
            return span
        trace_id, span_id, flags, state = own_span
        trace_state = module.TraceState.from_header([state]) if state else None
        return CurrentSpan(module.SpanContext(trace_id, span_id, False, module.TraceFlags(flags), trace_state))

    replaced = [place for place in places if place and vars(place).get("get_current_span") is original]
    return [replace_attribute(place, "get_current_span", get_current_span) for place in replaced]


TRACE_ID, SPAN_ID = "trace_id", "span_id"

_CLASSES = {"logging": ("Logger", "makeRecord"), "structlog._base": ("BoundLoggerBase", "_process_event")}
"""The class and the method that make log records or events, by module."""


class LogRecords(Switch):
    """The instrumentor of `logs: auto`, which adds trace id and span id to log records."""

    key = "logs"
    module = "logging"

    def may_match(self, module_name: str) -> bool:
        return module_name in _CLASSES

    def attach_to(self, module: Any) -> None:
        class_name, name = _CLASSES[module.__name__]
        owner = getattr(module, class_name, None)
        if hasattr(owner, name):
            self._mark_attached()
            make = getattr(owner, name)

            def tag_records(logger: Any, *args: Any, **kwargs: Any) -> Any:
                record = make(logger, *args, **kwargs)
                record.__dict__ = {TRACE_ID: "", SPAN_ID: "", **self._read_span_ids(), **record.__dict__}
                return record

            def tag_events(logger: Any, method: str, event: Any, event_kw: Any) -> Any:
                return make(logger, method, event, {**self._read_span_ids(), **event_kw})

            self._undos.append(replaces_attribute(owner, name)(tag_records if class_name == "Logger" else tag_events))

    def _read_span_ids(self) -> dict[str, str]:
        try:
            trace = current_span_ids(self._recorder) if self._recorder.on else None
        except Exception as fault:  # the record is the service's
            FAULTS.note("ids of a log record", fault)
            trace = None
        return {} if trace is None else {TRACE_ID: f"{trace[0]:032x}", SPAN_ID: f"{trace[1]:016x}"}

    def verdicts(self) -> list[Verdict]:
        if not self._met:
            return [Verdict("logs", "waiting", why="logging not imported")]
        return [Verdict("logs", "attached", "logging")]
