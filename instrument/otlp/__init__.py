"""Sends spans and metrics to an OpenTelemetry collector from a background thread, and counts every loss.

`packed_spans` encodes spans. `span_queue` queues the encoded export requests, and the thread of `delivery` sends them
by HTTP or gRPC (`senders`). `resource` makes the resource of this process. `service_sdk` reads the current span of the
service's own OpenTelemetry SDK.
"""
