"""The two ways to a collector: HTTP/1.1 on a socket of our own, and gRPC by the official exporter at its own cost.

A sender encodes trees, delivers one request at a time within the time that it is given, and returns a verdict. Only
the export thread uses it, except for `abort` and `forked`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from instrument.errors import ExportError
from instrument.otlp import packing
from instrument.otlp.connection import TcpConnection, Timed, TlsConnection, context
from instrument.otlp.metrics import PATIENCE_NS, metrics_url
from instrument.otlp.points import Point, Series, pack_metric
from instrument.otlp.response import Response
from instrument.profile.document import without_secrets
from instrument.recording.spans import Origin, Span
from instrument.runtime.compression import compressor
from instrument.runtime.threads import current_name

if TYPE_CHECKING:
    import logging
    from http.client import HTTPResponse

    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import ReadableSpan

    from instrument.profile.model import Otlp

THREAD_NAME = "instrument-otlp"
"""The export thread. What the official exporter logs on a thread of ours, we say ourselves."""

_FIRST_BACK_OFF_S = 0.25
_REFUSED = (404, 405, 415, 501)  # what collectors of traces alone say of metrics
# ExportTraceServiceResponse.partial_success {rejected_spans, error_message}; serialisers write fields in this order
_PARTIAL_SUCCESS = re.compile(
    rb"\x0a[\x80-\xff]*[\x00-\x7f](?:\x08([\x80-\xff]*[\x00-\x7f]))?(?:\x12[\x80-\xff]*[\x00-\x7f](.*))?", re.DOTALL
)


class HttpSender:
    """OTLP over HTTP/1.1 on one connection that is kept alive.

    It speaks over its own socket, and only parses with `http.client`, because other instrumentations replace the
    methods of `http.client.HTTPConnection` and would make spans of these calls. Proxy variables are not read.
    """

    modules = ("http.client", "email.utils", "importlib.metadata", "ssl", "uuid")
    """What sending needs, imported before the export thread starts."""

    request_spans = 4_000  # there are receivers that drop beyond 8,192
    encode = staticmethod(packing.pack)

    def __init__(self, settings: Otlp) -> None:
        from urllib.parse import urlsplit

        self._settings = settings
        try:
            url = urlsplit(settings.endpoint)
            self._tls = url.scheme == "https"
            self._address = (url.hostname or "", url.port or (443 if self._tls else 80))
        except ValueError as fault:
            raise ExportError(f"asked to export spans to {without_secrets(settings.endpoint)!r}: {fault}") from fault
        if url.scheme not in ("http", "https") or not url.hostname:
            shown = without_secrets(settings.endpoint)
            raise ExportError(f"asked to export spans to {shown!r}, which is no http:// or https:// URL")
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        lines = [f"Host: {url.netloc.rpartition('@')[2]}"]
        lines += [f"{name}: {value}" for name, value in settings.headers]
        if " " in path or not all(line.isascii() and line.isprintable() for line in lines):
            raise ExportError("a header or the path of the OTLP endpoint holds characters that are not allowed there")
        lines += [f"User-Agent: instrument-sdk/{packing.version()}", "Content-Type: application/x-protobuf"]
        self._gzip = settings.compression == "gzip"
        lines += ["Content-Encoding: gzip"] if self._gzip else []
        head = "\r\n".join(["", *lines, "Content-Length: "])
        self._head = f"POST {path} HTTP/1.1{head}".encode()
        metrics = urlsplit(metrics_url(settings.endpoint) or settings.endpoint)
        path = metrics.path + (f"?{metrics.query}" if metrics.query else "")
        self._metrics_head = f"POST {path} HTTP/1.1{head}".encode()
        self._connection: TcpConnection | None = None
        self._resource = b""

    def speak_for(self, resource: Mapping[str, object]) -> None:
        """Send under this resource from now on."""
        self._resource = packing.pack_resource(resource)

    def size(self, piece: bytes) -> int:
        """Bytes that a piece adds to a request."""
        return len(piece)

    def send(self, pieces: Sequence[bytes], left_s: Callable[[], float], pause: Callable[[float], None]) -> Response:
        """Deliver one request, trying again while there is time and hope."""
        return self._send(self._head, packing.request_of(self._resource, pieces), len(pieces), left_s, pause)

    def send_metrics(
        self, series: Sequence[Series], left_s: Callable[[], float], pause: Callable[[float], None]
    ) -> Response:
        """Deliver one request of metrics, likewise; what is rejected counts points."""
        body = packing.request_of(self._resource, map(pack_metric, series))
        return self._send(self._metrics_head, body, sum(len(one.points) for one in series), left_s, pause)

    def _send(
        self, head: bytes, body: bytes, count: int, left_s: Callable[[], float], pause: Callable[[float], None]
    ) -> Response:
        from http.client import HTTPException

        if self._gzip:
            packer = compressor(zlib_level=1)
            body = packer.compress(body) + packer.flush()
        back_off_s = _FIRST_BACK_OFF_S
        while True:
            reused = self._connection is not None
            wait_s = back_off_s * (0.8 + os.urandom(1)[0] / 640)
            try:
                response, content = self._post(head, body, left_s)
            except OSError as fault:
                if reused:  # the collector may have closed an idle connection
                    continue
                reason = f"{type(fault).__name__}: {fault}"
            except HTTPException as fault:
                return Response(False, reason=f"an answer that is not HTTP ({type(fault).__name__})")
            else:
                if response.status not in (429, 502, 503, 504):
                    return _judge(response, content, count)
                reason = f"HTTP {response.status} {response.reason[:100]}"
                asked_s = _retry_after_s(response.getheader("Retry-After"))
                if asked_s > 0:
                    reason = f"{reason}, asks to wait for {asked_s:.0f} s"
                    return Response(False, wait_s=max(asked_s, wait_s), reason=reason)
            if wait_s >= left_s():
                return Response(False, reason=reason)
            pause(wait_s)
            back_off_s *= 2

    def _post(self, head: bytes, body: bytes, left_s: Callable[[], float]) -> tuple[HTTPResponse, bytes]:
        from http.client import HTTPException, HTTPResponse

        try:
            connection = self._connection = self._connection or self._connect(left_s)
            try:
                connection.send(b"%b%d\r\n\r\n%b" % (head, len(body), body), left_s)
            except (BrokenPipeError, ConnectionResetError):
                pass  # a collector that refuses the size closes early; its answer may still be there to read
            response = HTTPResponse(Timed(connection, left_s), method="POST")  # type: ignore[arg-type]
            response.begin()
            try:
                content = response.read(1 << 16)
            except (HTTPException, OSError):
                content = b""  # the status has been said; the rest is not worth a second delivery
            if response.will_close or not response.isclosed():
                self.close()
            return response, content
        except BaseException:
            self.close()
            raise

    def _connect(self, left_s: Callable[[], float]) -> TcpConnection:
        if not self._tls:
            return TcpConnection(*self._address, left_s)
        settings = self._settings
        trusted = context(settings.certificate, settings.client_certificate, settings.client_key)
        return TlsConnection(*self._address, left_s, trusted)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    forked = close

    def abort(self) -> None:
        """From another thread: wake the one that waits in the socket."""
        connection = self._connection
        if connection is not None:
            connection.abort()


def _judge(response: HTTPResponse, content: bytes, spans: int) -> Response:
    if 200 <= response.status < 300:
        rejected, message = partial_success(content)
        return Response(True, rejected=min(rejected, spans), reason=message)
    reason = f"HTTP {response.status} {response.reason[:100]}"
    location = response.getheader("Location")
    if location:
        reason += f", redirected to {without_secrets(location)[:200]}"
    refused = response.status in _REFUSED
    return Response(False, too_large=response.status == 413, refused=refused, reason=reason)


def partial_success(answer: bytes) -> tuple[int, str]:
    """How many spans the collector rejected in an answer that says success, and why; 0 when it does not parse."""
    found = _PARTIAL_SUCCESS.match(answer)
    if found is None:
        return 0, ""
    varint, message = found.group(1) or b"", found.group(2) or b""
    rejected = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(varint))
    return rejected if rejected < 1 << 63 else 0, message.decode("utf-8", "replace")[:500]


def _retry_after_s(text: str | None) -> float:
    """Seconds of a Retry-After header, which holds seconds or a date; 0 where it says neither."""
    from email.utils import parsedate_to_datetime

    if text is None:
        return 0.0
    try:
        return float(text) if text.strip().isdigit() else parsedate_to_datetime(text).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return 0.0


def require_grpc() -> None:
    """Raise ExportError when the official gRPC exporter is not installed. Imports no more than its parent packages."""
    from importlib.util import find_spec

    try:
        installed = find_spec("opentelemetry.exporter.otlp.proto.grpc") and find_spec("grpc")
    except ModuleNotFoundError:
        installed = None
    if installed is None:
        raise ExportError(
            "asked to export spans by grpc, but the official exporter is not installed; "
            "install instrument-sdk[grpc], or set the protocol to http/protobuf"
        )


class GrpcSender:
    """OTLP over gRPC by the official exporter, with its own retries.

    The official exporter does not tell how many spans the collector rejected: here those count as exported.
    """

    request_spans = 1_000  # receivers stop at 4 MiB; the official exporter says no sizes
    modules = (
        "grpc",
        "importlib.metadata",
        "opentelemetry.exporter.otlp.proto.grpc.metric_exporter",
        "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
        "opentelemetry.sdk.metrics.export",
        "opentelemetry.sdk.trace.export",
        "uuid",
    )

    said: ClassVar[str] = ""
    _of_parents: ClassVar[list[Any]] = []

    def __init__(self, settings: Otlp) -> None:
        require_grpc()
        self._settings = settings
        self._exporter: Any = None
        self._metric_exporter: Any = None
        self._resource: Any = None

    def speak_for(self, resource: Mapping[str, object]) -> None:
        """Send under this resource from now on."""
        from opentelemetry.sdk.resources import Resource

        self._resource = Resource(_official(resource))

    def encode(
        self, spans: Sequence[Span], ids: packing.Ids, origin: Origin, threads: Mapping[int, str]
    ) -> Iterator[ReadableSpan]:
        """Each span and device interval as the SDK's own, with our ids and times."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        scope = InstrumentationScope(packing.SCOPE, packing.version(), packing.SCHEMA_URL)
        unset = Status(StatusCode.UNSET)
        for trace_id, own, parent, flags, state, span, interval in packing.identify(spans, ids):
            name, kind, status, w3c_flags = span.site.name, SpanKind.INTERNAL, unset, TraceFlags(flags & 0xFF)
            if interval is not None:
                name, attributes = packing.device_name(span.site), packing.device_attributes(span, interval)
            else:
                attributes = packing.attributes_of(span, threads)
                kind = SpanKind.SERVER if packing.is_server(span) else kind
                told = packing.status_of(span)
                if told is not None:
                    status = Status(StatusCode.ERROR, told[1]) if told[0] else Status(StatusCode.OK)
            links = packing.links_of(span, ids) if interval is None else []
            yield ReadableSpan(
                str(packing.plain(name)),
                context=SpanContext(trace_id, own, False, w3c_flags, _trace_state(state)),
                parent=SpanContext(trace_id, parent, bool(flags & packing.IS_REMOTE), w3c_flags) if parent else None,
                resource=self._resource,
                attributes=_official(attributes),
                links=list(map(_official_link, links)),
                kind=kind,
                status=status,
                start_time=origin.realtime_of((interval or span).start_ns),
                end_time=origin.realtime_of((interval or span).end_ns),
                instrumentation_scope=scope,
            )

    def size(self, _piece: ReadableSpan) -> int:
        """Nothing: the official exporter packs, so only the number of spans is known."""
        return 0

    def send(self, pieces: Sequence[ReadableSpan], left_s: Callable[[], float], _pause: object) -> Response:
        """Deliver one request, within the time that the official exporter was given."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        if left_s() <= 0:
            return Response(False)
        GrpcSender.said = "the official gRPC exporter reported a failure"
        exporter = self._exporter = self._exporter or self._open()
        try:
            taken = exporter.export(pieces) is SpanExportResult.SUCCESS
        except Exception as fault:  # `abort` may close the channel between two of its tries
            return Response(False, reason=f"{type(fault).__name__}: {fault}")
        return Response(taken, reason="" if taken else self.said)

    def send_metrics(self, series: Sequence[Series], left_s: Callable[[], float], _pause: object) -> Response:
        """Deliver one request of metrics, likewise."""
        from opentelemetry.sdk.metrics.export import MetricExportResult

        if left_s() <= 0:
            return Response(False)
        GrpcSender.said = "the official gRPC exporter reported a failure"
        exporter = self._metric_exporter = self._metric_exporter or self._open_metrics()
        try:
            taken = exporter.export(self._metrics_data(series)) is MetricExportResult.SUCCESS
        except Exception as fault:  # as above
            return Response(False, reason=f"{type(fault).__name__}: {fault}")
        return Response(taken, refused="UNIMPLEMENTED" in self.said, reason="" if taken else self.said)

    def _metrics_data(self, series: Sequence[Series]) -> Any:
        from opentelemetry.sdk.metrics import export as sdk
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        def number(point: Point, unit: str) -> Any:
            value: Any = point.value
            return sdk.NumberDataPoint(
                attributes=point.attributes,
                start_time_unix_nano=point.start_ns,
                time_unix_nano=point.at_ns,
                value=round(value) if unit == "By" else value,
            )

        def metric(one: Series) -> Any:
            temporality = sdk.AggregationTemporality.DELTA if one.is_delta else sdk.AggregationTemporality.CUMULATIVE
            if one.kind == "histogram":
                data: Any = sdk.ExponentialHistogram([_official_histogram(point) for point in one.points], temporality)
            elif one.kind == "gauge":
                data = sdk.Gauge([number(point, one.unit) for point in one.points])
            else:
                points = [number(point, one.unit) for point in one.points]
                data = sdk.Sum(points, temporality, is_monotonic=one.kind == "counter")
            return sdk.Metric(name=one.name, description=one.description, unit=one.unit, data=data)

        scope = InstrumentationScope(packing.SCOPE, packing.version(), packing.SCHEMA_URL)
        metrics = sdk.ScopeMetrics(scope, [metric(one) for one in series], packing.SCHEMA_URL)
        return sdk.MetricsData([sdk.ResourceMetrics(self._resource, [metrics], "")])

    def _open(self) -> OTLPSpanExporter:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(**self._options(), timeout=self._settings.timeout_ns / 1e9)

    def _open_metrics(self) -> OTLPMetricExporter:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

        return OTLPMetricExporter(**self._options(), timeout=min(self._settings.timeout_ns, PATIENCE_NS) / 1e9)

    def _options(self) -> dict[str, Any]:
        import logging
        from importlib import import_module

        grpc, settings = import_module("grpc"), self._settings
        key = settings.client_key or settings.client_certificate  # one file may hold both
        trust = (settings.certificate, key, settings.client_certificate)
        compression = grpc.Compression
        filters = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").filters
        if _listen not in filters:
            filters.insert(0, _listen)  # before the exporter's own, which hides what was said in the last 20 s
        return {
            "endpoint": settings.endpoint,
            "insecure": not settings.endpoint.startswith("https:"),
            "credentials": grpc.ssl_channel_credentials(*(file and Path(file).read_bytes() for file in trust)),
            "headers": tuple((name.lower(), value) for name, value in settings.headers),
            "compression": compression.Gzip if settings.compression == "gzip" else compression.NoCompression,
        }

    def close(self) -> None:
        """Close the channels; the next request opens another."""
        exporters = self._exporter, self._metric_exporter
        self._exporter = self._metric_exporter = None
        for exporter in exporters:
            if exporter is not None:
                exporter.shutdown()

    abort = close

    def forked(self) -> None:
        """Leave the channel alone: closing or collecting the parent's in a child can hang it."""
        self._of_parents.extend((self._exporter, self._metric_exporter))
        self._exporter = self._metric_exporter = None


def _listen(record: logging.LogRecord) -> bool:
    """A log filter that keeps for the report what the official exporter says of our requests: we say it once.

    It stays for good, because a request that `stop` gave up may still be logged later.
    """
    if current_name() is None:
        return True
    GrpcSender.said = record.getMessage()
    return False


def _official_histogram(point: Point) -> Any:
    from opentelemetry.sdk.metrics import Exemplar
    from opentelemetry.sdk.metrics import export as sdk

    value: Any = point.value
    return sdk.ExponentialHistogramDataPoint(
        attributes=point.attributes,
        start_time_unix_nano=point.start_ns,
        time_unix_nano=point.at_ns,
        count=value.count,
        sum=value.sum_s,
        scale=value.scale,
        zero_count=value.zero_count,
        positive=sdk.Buckets(value.offset, value.counts),
        negative=sdk.Buckets(0, ()),
        flags=0,
        min=value.least_s,
        max=value.most_s,
        exemplars=[Exemplar({}, one.value_ns / 1e9, one.at_ns, one.span_id, one.trace_id) for one in point.exemplars],
    )


def _trace_state(state: str) -> Any:
    from opentelemetry.trace import TraceState

    return TraceState.from_header([state]) if state else None


def _official_link(link: packing.LinkedSpan) -> Any:
    from opentelemetry.trace import Link, SpanContext

    context = SpanContext(link.trace_id, link.span_id, is_remote=False, trace_state=_trace_state(link.state))
    return Link(context)


def _official(attributes: Mapping[str, object]) -> dict[str, Any]:
    return {str(packing.plain(key)): packing.plain(value) for key, value in attributes.items()}


Sender = HttpSender | GrpcSender
"""Either way; the exporter does not care which."""


def sender_for(settings: Otlp) -> Sender:
    """The sender that the profile's protocol asks for; ExportError for settings that cannot work."""
    if settings.protocol == "grpc":
        return GrpcSender(settings)
    if settings.protocol == "http/protobuf":
        return HttpSender(settings)
    raise ExportError(f"asked to export spans by {settings.protocol!r}; there are http/protobuf and grpc")


def modules_of(settings: Otlp) -> tuple[str, ...]:
    """What sending by these settings needs."""
    return GrpcSender.modules if settings.protocol == "grpc" else HttpSender.modules
