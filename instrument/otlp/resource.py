"""Makes the OpenTelemetry resource of this process: the attributes by which a collector identifies it.

The resource merges attributes of the recording process, attributes that OpenTelemetry detects, and attributes of the
service's tracer provider.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace

from instrument.otlp.packing import find_version
from instrument.recording.spans import Origin
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
"""The resource attributes that no other SDK may replace."""


def merge_resource_attributes(
    origin: Origin, instance: str, detected: Mapping[str, object], provider: Mapping[str, object]
) -> dict[str, object]:
    """Return the resource of this process. The order of priority is: the service's tracer provider, the profile,
    detected attributes."""
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
