"""Sends spans and metrics to an OpenTelemetry collector from a background thread, and counts every loss.

`packed_spans` packs rows by the rules of `packing`. `span_queue` keeps the packed export requests and counts spans. The
thread of `exporter` sends these through `senders`, by HTTP or gRPC. `service_sdk` reads the resource and the current
span of the service's own OpenTelemetry SDK.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instrument.otlp.export_facts import Ids
    from instrument.otlp.exporter import Delivery, Exporter
    from instrument.otlp.packing import Body, pack_resource
    from instrument.otlp.senders import modules_of, require_grpc
    from instrument.otlp.service_sdk import current_parent, provider_attributes, resource_attributes

__all__ = [
    "Body",
    "Delivery",
    "Exporter",
    "Ids",
    "current_parent",
    "modules_of",
    "pack_resource",
    "provider_attributes",
    "require_grpc",
    "resource_attributes",
]

_NAMES_OF = {
    "export_facts": "Ids",
    "exporter": "Delivery Exporter",
    "packing": "Body pack_resource",
    "senders": "modules_of require_grpc",
    "service_sdk": "current_parent provider_attributes resource_attributes",
}


def __getattr__(name: str) -> Any:
    """Import the module of a name at the first use of the name. If an agent exports for this process, only a few
    modules are needed."""
    module = next((module for module, names in _NAMES_OF.items() if name in names.split()), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
    return value
