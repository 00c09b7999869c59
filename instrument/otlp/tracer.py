"""The service's own OpenTelemetry, where it has one: its current span, its resource, how we stay out of its sight."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from instrument.otlp.packing import version
from instrument.recording.spans import Origin, RemoteParent, state_of
from instrument.runtime.faults import FAULTS

_UNNAMED = "unknown_service"


def current_parent() -> RemoteParent | None:
    """The OpenTelemetry span that is current on this thread, or None.

    For the service's threads: about 30 ns while nobody has imported OpenTelemetry, then 0.2 us without a current span
    and 0.9 us with one. Never raises.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    try:
        current = trace.get_current_span()
        if getattr(current, "is_of_instrument", False):
            return None  # there is none of OpenTelemetry's own: this is one of ours, as it is told of it
        context = current.get_span_context()
        if context.is_valid:
            is_local = not context.is_remote
            in_server_span = is_local and _lies_in_server_span(current)
            flags, state = int(context.trace_flags), ""
            if context.trace_state:
                state = state_of(context.trace_state.to_header().encode("latin-1", "replace"))
            return RemoteParent(context.trace_id, context.span_id, flags, is_local, in_server_span, state)
    except Exception as fault:  # another tracer's object; the request goes on without it
        FAULTS.note("read of the current OpenTelemetry span", fault)
    return None


def _lies_in_server_span(local: Any) -> bool:
    """Whether a span of this process serves a request, or may lie in one that does.

    Of a span that is not recorded no more is known than that it is there, and of what is around a span only whether
    there is anything: a request that has two server spans is counted twice, so in doubt there is one.
    """
    kind = getattr(getattr(local, "kind", None), "name", "SERVER")
    return kind in ("SERVER", "CONSUMER") or (kind == "INTERNAL" and getattr(local, "parent", None) is not None)


def detected_attributes() -> dict[str, object]:
    """What OpenTelemetry's SDK finds out about this process and reads from `OTEL_RESOURCE_ATTRIBUTES`.

    Imports the SDK and runs detectors that somebody configured: about 0.1 s, once, when a session starts. Where the
    interpreter is about to exit the SDK refuses; then only the variable counts.
    """
    try:
        from opentelemetry.sdk.resources import Resource

        return dict(Resource.create().attributes)
    except RuntimeError:  # threads and exit handlers can no longer be made
        return given_attributes()
    except Exception as fault:  # a detector that somebody configured
        FAULTS.note("OpenTelemetry resource", fault)
        return {}


def given_attributes() -> dict[str, object]:
    """What `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_SERVICE_NAME` say, where nobody asks the SDK."""
    pairs = (pair.partition("=") for pair in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","))
    found: dict[str, object] = {
        unquote(key.strip()): unquote(value.strip()) for key, equals, value in pairs if equals and key.strip()
    }
    name = os.environ.get("OTEL_SERVICE_NAME", "")
    return {**found, "service.name": name} if name else found


def of_a_child(detected: Mapping[str, object]) -> dict[str, object]:
    """What was detected in the parent, for a forked child: without the instance that the SDK made up for the parent."""
    given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return {key: value for key, value in detected.items() if key != "service.instance.id" or key in given}


def resource_attributes(
    origin: Origin, instance: str, detected: Mapping[str, object], provider: Mapping[str, object]
) -> dict[str, object]:
    """The service as OpenTelemetry names it: the provider's word over the profile's, that over what was detected.

    `instance` is its service.instance.id where none of them has one.
    """
    found: dict[str, object] = {
        "service.instance.id": instance,
        "host.name": origin.host or socket.gethostname(),
        "telemetry.distro.name": "instrument",
        "telemetry.distro.version": version(),
    }
    found.update(detected)
    for attributes in ({"service.name": origin.service}, provider):
        unnamed = str(attributes.get("service.name") or _UNNAMED).startswith(_UNNAMED)
        found.update({key: value for key, value in attributes.items() if not (unnamed and key == "service.name")})
    found.setdefault("service.name", _UNNAMED)
    found["process.pid"] = os.getpid()
    if origin.generation:
        found["instrument.profile.generation"] = origin.generation
        found["instrument.profile.digest"] = origin.digest
    return found


def provider_attributes() -> dict[str, object]:
    """The resource of the tracer provider that the service configured; nothing without one."""
    trace = sys.modules.get("opentelemetry.trace")
    try:
        resource = None if trace is None else getattr(trace.get_tracer_provider(), "resource", None)
        return {} if resource is None else dict(resource.attributes)
    except Exception as fault:  # a provider that somebody else wrote
        FAULTS.note("read of the tracer provider's resource", fault)
        return {}


def suppress_instrumentation() -> None:
    """Keep other instrumentations off the calling thread's work, in the way that they agreed on."""
    context = sys.modules.get("opentelemetry.context")
    if context is None:
        return
    for name in ("_SUPPRESS_INSTRUMENTATION_KEY", "_SUPPRESS_HTTP_INSTRUMENTATION_KEY"):
        key = getattr(context, name, "suppress_instrumentation")
        context.attach(context.set_value(key, True))
