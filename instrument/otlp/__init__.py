"""Sends spans and metrics to an OpenTelemetry collector from a background thread, and counts every loss.

`packed_spans` packs rows by the rules of `packing`. `span_queue` keeps the packed export requests and counts spans. The
thread of `exporter` sends these through `senders`, by HTTP or gRPC. `service_sdk` reads the resource and the current
span of the service's own OpenTelemetry SDK.
"""
