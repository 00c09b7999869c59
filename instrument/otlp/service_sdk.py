"""Reads the current span and the resource of the service's own OpenTelemetry SDK.

The resource that we send includes the attributes of that resource. On our own threads, OpenTelemetry's instrumentation
of libraries is turned off.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from instrument.otlp.packing import find_version
from instrument.recording.spans import Origin
from instrument.recording.trace_context import RemoteParent, sanitise_tracestate
from instrument.runtime.environment import parse_resource_attributes
from instrument.runtime.faults import FAULTS

_UNNAMED = "unknown_service"


def detect_attributes() -> dict[str, object]:
    """Return the resource attributes that OpenTelemetry's SDK detects, in about 0.1 s."""
    try:
        from opentelemetry.sdk.resources import Resource

        return dict(Resource.create().attributes)
    except RuntimeError:  # threads and exit handlers can no longer be made
        return parse_resource_attributes()
    except Exception as fault:  # a detector that somebody configured
        FAULTS.note("OpenTelemetry resource", fault)
        return {}


def drop_parent_id(detected: Mapping[str, object]) -> dict[str, object]:
    """Return the attributes without the instance id that the SDK made for the parent process."""
    variable = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return {key: value for key, value in detected.items() if key != "service.instance.id" or key in variable}


def make_resource(origin: Origin, instance: str) -> dict[str, object]:
    attributes: dict[str, object] = {
        "service.name": origin.service or _UNNAMED,
        "service.instance.id": instance,
        "telemetry.distro.name": "instrument",
        "telemetry.distro.version": find_version(),
        "process.pid": origin.pid,
    }
    if origin.host:
        attributes["host.name"] = origin.host
    if origin.generation:
        attributes["instrument.profile.generation"] = origin.generation
        attributes["instrument.profile.digest"] = origin.digest
    return attributes


CERTAIN = ("process.pid", "instrument.profile.generation", "instrument.profile.digest")
"""The resource attributes that no other SDK may set, because this process knows their values itself."""


def merge_resource_attributes(
    origin: Origin, instance: str, detected: Mapping[str, object], provider: Mapping[str, object]
) -> dict[str, object]:
    """Return the resource of this process. Attributes of the service's tracer provider have priority, then the
    profile's, then detected attributes."""
    own_attributes = make_resource(replace(origin, host=origin.host or socket.gethostname(), pid=os.getpid()), instance)
    merged = {**own_attributes, **detected}
    for attributes in ({"service.name": origin.service}, provider):
        unnamed = str(attributes.get("service.name") or _UNNAMED).startswith(_UNNAMED)
        merged.update({key: value for key, value in attributes.items() if not (unnamed and key == "service.name")})
    return {**merged, **{name: own_attributes[name] for name in CERTAIN if name in own_attributes}}


def provider_attributes() -> dict[str, object]:
    trace = sys.modules.get("opentelemetry.trace")
    try:
        resource = None if trace is None else getattr(trace.get_tracer_provider(), "resource", None)
        return {} if resource is None else dict(resource.attributes)
    except Exception as fault:  # a provider that somebody else wrote
        FAULTS.note("read of the tracer provider's resource", fault)
        return {}


def current_parent() -> RemoteParent | None:
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
