"""Spans to an OpenTelemetry collector: packed by hand, sent by one background thread, every loss counted.

`packing` says a span in OTLP's bytes, `senders` carry requests by HTTP or gRPC, `span_queue` has what waits and the
counts, `exporter` the thread. Of the service's own OpenTelemetry (`tracer`) we borrow the SDK's `Resource`
(`resource`), so that both land under the same service; it is imported on the export thread only.
"""

from instrument.otlp.exporter import Delivery, Exporter
from instrument.otlp.metrics import DELAY_NS as METRICS_EVERY_NS
from instrument.otlp.packing import Ids, pack_resource
from instrument.otlp.resource import given_attributes, provider_attributes, resource_attributes
from instrument.otlp.senders import modules_of, require_grpc
from instrument.otlp.tracer import current_parent

__all__ = [
    "METRICS_EVERY_NS",
    "Delivery",
    "Exporter",
    "Ids",
    "current_parent",
    "given_attributes",
    "modules_of",
    "pack_resource",
    "provider_attributes",
    "require_grpc",
    "resource_attributes",
]
