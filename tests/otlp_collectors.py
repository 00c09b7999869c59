"""Small collectors over HTTP that decode with the official messages and misbehave in one way each."""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from otlp_spans import SECOND

from instrument.profile.model import Otlp

Behave = Callable[["Handler", int], None]
"""The answer of a collector to a request with that number of spans."""


class Collector(ThreadingHTTPServer):
    """A collector that decodes each request with the official messages, and then behaves as configured.

    - `taken` has the names of the spans and metrics that were answered with success, one for each span or point.
    - `metrics` has the decoded metrics, and `schemas` the schema of each metric by its name.
    - `spans` has the spans by the `service.instance.id` of the resource. `resources` has the resource attributes.
    - `connections` counts all connections of the collector's life.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, behave: Behave, port: int = 0, metrics: Behave | None = None) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.behave = behave
        self.behave_with_metrics = metrics or behave
        self.closing = threading.Event()
        self.taken: list[str] = []
        self.metrics: list[Metric] = []
        self.schemas: dict[str, str] = {}
        self.spans: dict[str, list[Span]] = {}
        self.resources: dict[str, Mapping[str, str | int]] = {}
        self.connections = 0
        self.tries = 0
        self.headers: list[Mapping[str, str]] = []
        self.open: set[socket.socket] = set()

    @property
    def settings(self) -> Otlp:
        return Otlp(f"http://127.0.0.1:{self.server_port}/v1/traces", timeout_ns=30 * SECOND)

    def handle_error(self, *_: Any) -> None:
        """The client may leave when it likes."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    handle_one_request = BaseHTTPRequestHandler.handle_one_request  # no session records it in this process
    server: Collector
    metrics: Sequence[Metric] = ()
    found: Sequence[tuple[str, Span]] = ()

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1
        self.server.open.add(self.connection)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        self.server.tries += 1
        self.server.headers.append(dict(self.headers.items()))
        self.metrics, self.found = [], []
        if self.path.endswith("/v1/metrics"):
            of_scopes = [
                (of_scope.schema_url, metric)
                for of_resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
                for of_scope in of_resource.scope_metrics
                for metric in of_scope.metrics
            ]
            self.metrics = [metric for _, metric in of_scopes]
            self.server.schemas.update((metric.name, schema) for schema, metric in of_scopes)
            self.names = [
                metric.name for metric in self.metrics for _ in getattr(metric, metric.WhichOneof("data")).data_points
            ]
            self.server.behave_with_metrics(self, len(self.names))
            return
        traces = ExportTraceServiceRequest.FromString(body).resource_spans
        for of_resource in traces:
            attributes = of_resource.resource.attributes
            told = {one.key: one.value.string_value or one.value.int_value for one in attributes}
            self.server.resources[resource_id(of_resource.resource)] = told
        self.found = [
            (resource_id(of_resource.resource), found)
            for of_resource in traces
            for of_scope in of_resource.scope_spans
            for found in of_scope.spans
        ]
        self.names = [found.name for _, found in self.found]
        self.server.behave(self, len(self.names))

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        if status == 200:
            self.server.taken += self.names
            self.server.metrics += self.metrics
            for instance, found in self.found:
                self.server.spans.setdefault(instance, []).append(found)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing on the test's output."""


def resource_id(resource: Any) -> str:
    """Return the id of the process that a resource describes."""
    return next((one.value.string_value for one in resource.attributes if one.key == "service.instance.id"), "")


@contextmanager
def collecting(behave: Behave, port: int = 0, metrics: Behave | None = None) -> Iterator[Collector]:
    server = Collector(behave, port, metrics)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        for connection in server.open:
            hang_up_now(connection)
            connection.close()
        thread.join()


def hang_up_now(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the exporter was quicker


def take(handler: Handler, _: int) -> None:
    handler.answer(200)


def refuse_with(status: int, **headers: str) -> Behave:
    return lambda handler, _: handler.answer(status, **headers)


def swallow(handler: Handler, _: int) -> None:
    handler.server.closing.wait(120)


def drip(handler: Handler, _: int) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while not handler.server.closing.wait(0.05):
        handler.wfile.write(b".")


def babble(handler: Handler, _: int) -> None:
    handler.wfile.write(b"\x00\xff not http at all\r\n\r\n")
    handler.close_connection = True


def hang_up(handler: Handler, _: int) -> None:
    handler.close_connection = True


def be_slow(handler: Handler, _: int) -> None:
    handler.server.closing.wait(0.2)
    handler.answer(200)


def reject_two(handler: Handler, _: int) -> None:
    partial = ExportTracePartialSuccess(rejected_spans=2, error_message="quota")
    handler.answer(200, ExportTraceServiceResponse(partial_success=partial).SerializeToString())


def warn(handler: Handler, _: int) -> None:
    partial = ExportTracePartialSuccess(error_message="deprecated")
    handler.answer(200, ExportTraceServiceResponse(partial_success=partial).SerializeToString())


def mumble(handler: Handler, _: int) -> None:
    handler.answer(200, b"\xff\xfe\x00 thanks")


def promise_more(handler: Handler, _: int) -> None:
    handler.answer(200, b"", Transfer_Encoding="chunked")
    handler.close_connection = True


def first(count: int, behave: Behave, then: Behave = take) -> Behave:
    """Misbehave for the first requests, then take them."""
    return lambda handler, spans: (behave if handler.server.tries <= count else then)(handler, spans)


def at_most(limit: int) -> Behave:
    return lambda handler, spans: handler.answer(413 if spans > limit else 200)
