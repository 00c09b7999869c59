"""Spans to an OpenTelemetry collector: packed from columns, sent by one background thread, every loss counted.

`packed_spans` packs rows by the facts of `packing`, `senders` carry requests by HTTP or gRPC, `span_queue` has the
requests that wait and the counts, `exporter` the thread. Of the service's own OpenTelemetry (`tracer`) we borrow the
SDK's `Resource` (`resource`), so that both are of the same service; it is imported on the export thread only.
"""

from instrument.otlp.exporter import Delivery, Exporter
from instrument.otlp.metrics import DELAY_NS as METRICS_EVERY_NS
from instrument.otlp.packing import Body, Ids, pack_resource
from instrument.otlp.resource import given_attributes, provider_attributes, resource_attributes
from instrument.otlp.senders import modules_of, require_grpc
from instrument.otlp.tracer import current_parent

__all__ = [
    "METRICS_EVERY_NS",
    "Body",
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
