"""Sends requests to a collector, by HTTP/1.1 on a socket of our own or by gRPC's official library.

A sender sends one request at a time within a time-out, and returns a `Response`. Threads other than the export thread
may call only `abort` and `after_fork_in_child`.
"""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from instrument.errors import ExportError
from instrument.otlp import packing
from instrument.otlp.packing import Series, pack_metric
from instrument.otlp.sockets import TcpConnection, Timed, TlsConnection, find_proxy, require_time_left, tls_context
from instrument.profile.document import without_secrets
from instrument.recording.metric_definitions import NAMESPACE
from instrument.runtime.file_writing import compressor
from instrument.runtime.lazy_imports import dataclass

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from instrument.profile.model import Otlp


@cache
def import_once(name: str) -> Any:
    """Import a module, or return the cached module. In an agent's exporter, the cache has `http.client` without TLS."""
    return import_module(name)


THREAD_NAME = "instrument-otlp"

_FIRST_BACK_OFF_S = 0.25
_REFUSED = (404, 405, 415, 501)  # what collectors of traces alone say of metrics
_VARINT = rb"([\x80-\xff]*[\x00-\x7f])"
# ExportTraceServiceResponse.partial_success {rejected_spans, error_message}; serialisers write fields in this order
_PARTIAL_SUCCESS = re.compile(
    rb"\x0a[\x80-\xff]*[\x00-\x7f](?:\x08" + _VARINT + rb")?(?:\x12[\x80-\xff]*[\x00-\x7f](.*))?", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Response:
    """The outcome of a request: `taken` if it was accepted, the count of `rejected` spans, and the `reason`.

    `refused` is True if the collector never accepts such requests, `is_late` if the collector did not answer in time.
    `wait_s` is the pause in seconds that the collector asks for.
    """

    taken: bool
    rejected: int = 0
    too_large: bool = False
    refused: bool = False
    wait_s: float = 0.0
    is_late: bool = False
    reason: str = ""


class _UnavailableError(Exception):
    """An error that reports that the collector accepts no request now. `asked_s` is the pause in seconds that the
    collector asks for, 0 if unknown."""

    def __init__(self, reason: str, asked_s: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.asked_s = reason, asked_s


class Sender(ABC):
    """Sends requests to a collector. A request is retried while time is left and the collector may accept it."""

    modules: ClassVar[tuple[str, ...]]
    """The modules for sending, imported before the export thread starts."""

    obstacle = ""
    """The reason why the last attempt to send the current request failed."""

    _places: tuple[Any, Any]
    """The addresses to which spans and metrics are sent."""

    def send(self, request: bytes, spans: int, left_s: Callable[[], float], pause: Callable[[float], None]) -> Response:
        return self._send_with_retries(self._places[0], request, spans, left_s, pause)

    def send_metrics(
        self,
        resource: Mapping[str, object],
        series: Sequence[Series],
        left_s: Callable[[], float],
        pause: Callable[[float], None],
    ) -> Response:
        packed = [(metric.name.startswith(NAMESPACE), pack_metric(metric)) for metric in series]
        pieces, foreign = ([metric for of_gen_ai, metric in packed if of_gen_ai == flag] for flag in (False, True))
        body = packing.pack_request(packing.pack_resource(resource), pieces, foreign)
        return self._send_with_retries(
            self._places[1], body, sum(len(metric.points) for metric in series), left_s, pause
        )

    def _send_with_retries(
        self, place: Any, body: bytes, count: int, left_s: Callable[[], float], pause: Callable[[float], None]
    ) -> Response:
        body = self._compress(body)
        back_off_s, self.obstacle = _FIRST_BACK_OFF_S, ""
        while True:
            wait_s = back_off_s * (0.8 + os.urandom(1)[0] / 640)
            try:
                return self._send_once(place, body, count, left_s)
            except _UnavailableError as answer:
                reason = self.obstacle = answer.reason
                asked_s = answer.asked_s
            if asked_s > 0:
                reason = f"{reason}, asks to wait for {round(asked_s, 1):g} s"
                return Response(False, wait_s=max(asked_s, wait_s), reason=reason)
            if wait_s >= left_s():
                return Response(False, is_late=True, reason=reason)
            pause(wait_s)
            back_off_s *= 2

    def _compress(self, body: bytes) -> bytes:
        return body

    @abstractmethod
    def _send_once(self, place: Any, body: bytes, count: int, left_s: Callable[[], float]) -> Response:
        """Send a request with `count` spans or points once. Raises `_UnavailableError` if a retry may succeed."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; the next request opens another."""

    @abstractmethod
    def abort(self) -> None:
        """Wake the thread that waits for an answer. Another thread calls this."""

    def after_fork_in_child(self) -> None:
        self.close()


class HttpSender(Sender):
    """OTLP over HTTP/1.1 on one connection that is kept alive. It uses only the parser of `http.client`, because other
    instrumentations patch `http.client.HTTPConnection`."""

    modules = ("http.client", "email.utils")

    def __init__(self, settings: Otlp) -> None:
        from urllib.parse import urlsplit

        self._settings = settings
        try:
            url = urlsplit(settings.endpoint)
            self._tls = url.scheme == "https"
            self._address = (url.hostname or "", url.port or (443 if self._tls else 80))
        except ValueError as fault:
            raise ExportError(
                f"the OTLP endpoint is not valid: {without_secrets(settings.endpoint)!r}: {fault}"
            ) from fault
        if url.scheme not in ("http", "https") or not url.hostname:
            shown = without_secrets(settings.endpoint)
            raise ExportError(f"the OTLP endpoint is not valid: {shown!r}, which is no http:// or https:// URL")
        self._proxy = proxy = find_proxy(settings.endpoint)
        # A proxy is asked for the whole URL, but where it has opened a tunnel.
        before = f"http://{url.netloc.rpartition('@')[2]}" if proxy is not None and not self._tls else ""
        path = before + (url.path or "/") + (f"?{url.query}" if url.query else "")
        lines = [f"Host: {url.netloc.rpartition('@')[2]}"]
        lines += [f"{name}: {value}" for name, value in settings.headers]
        if proxy is not None and before and proxy.authorization:
            lines.append(f"Proxy-Authorization: {proxy.authorization}")
        if " " in path or not all(line.isascii() and line.isprintable() for line in lines):
            raise ExportError("a header or the path of the OTLP endpoint has characters that are not allowed")
        lines += [f"User-Agent: {_make_user_agent()}", "Content-Type: application/x-protobuf"]
        self._gzip = settings.compression == "gzip"
        lines += ["Content-Encoding: gzip"] if self._gzip else []
        head = "\r\n".join(["", *lines, "Content-Length: "])
        spans = f"POST {path} HTTP/1.1{head}".encode()
        metrics = urlsplit(make_metrics_url(settings.endpoint) or settings.endpoint)
        path = before + metrics.path + (f"?{metrics.query}" if metrics.query else "")
        self._places = spans, f"POST {path} HTTP/1.1{head}".encode()
        self._connection: TcpConnection | None = None

    def _compress(self, body: bytes) -> bytes:
        if not self._gzip:
            return body
        packer = compressor(zlib_level=1)
        return packer.compress(body) + packer.flush()

    def _send_once(self, place: Any, body: bytes, count: int, left_s: Callable[[], float]) -> Response:
        reused = self._connection is not None
        try:
            response, content = self._post(place, body, left_s)
        except OSError as fault:
            if reused:  # the collector may have closed an idle connection
                return self._send_once(place, body, count, left_s)
            by = f", by way of the proxy {self._proxy.address}" if self._proxy is not None else ""
            raise _UnavailableError(f"{type(fault).__name__}: {fault}{by}") from fault
        except import_once("http.client").HTTPException as fault:
            return Response(False, reason=f"an answer that is not HTTP ({type(fault).__name__})")
        if response.status in (429, 502, 503, 504):
            reason = f"HTTP {response.status} {response.reason[:100]}"
            raise _UnavailableError(reason, _parse_retry_after(response.getheader("Retry-After")))
        return _judge_response(response, content, count)

    def _post(self, head: bytes, body: bytes, left_s: Callable[[], float]) -> tuple[HTTPResponse, bytes]:
        client = import_once("http.client")
        try:
            connection = self._connection = self._connection or self._connect(left_s)
            try:
                connection.send(b"%b%d\r\n\r\n%b" % (head, len(body), body), left_s)
            except (BrokenPipeError, ConnectionResetError):
                pass  # a collector that refuses the size closes early; its answer may still be there to read
            response: HTTPResponse = client.HTTPResponse(Timed(connection, left_s), method="POST")
            response.begin()
            try:
                content = response.read(1 << 16)
            except (client.HTTPException, OSError):
                content = b""  # the status has been said; the rest is not worth a second delivery
            if response.will_close or not response.isclosed():
                self.close()
            return response, content
        except BaseException:
            self.close()
            raise

    def _connect(self, left_s: Callable[[], float]) -> TcpConnection:
        proxy = self._proxy
        if not self._tls:
            return TcpConnection(*(self._address if proxy is None else (proxy.host, proxy.port)), left_s)
        settings = self._settings
        trusted = tls_context(settings.certificate, settings.client_certificate, settings.client_key)
        return TlsConnection(*self._address, left_s, trusted, proxy)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.abort()


def make_metrics_url(traces_url: str) -> str | None:
    path, question, query = traces_url.partition("?")
    path = path.rstrip("/")
    return f"{path[: -len('/v1/traces')]}/v1/metrics{question}{query}" if path.endswith("/v1/traces") else None


def _make_user_agent() -> str:
    return f"instrument-sdk/{packing.find_version()}"


def _judge_response(response: HTTPResponse, content: bytes, spans: int) -> Response:
    if 200 <= response.status < 300:
        rejected, message = parse_partial_success(content)
        return Response(True, rejected=min(rejected, spans), reason=message)
    reason = f"HTTP {response.status} {response.reason[:100]}"
    location = response.getheader("Location")
    if location:
        reason += f", redirected to {without_secrets(location)[:200]}"
    refused = response.status in _REFUSED
    return Response(False, too_large=response.status == 413, refused=refused, reason=reason)


def parse_partial_success(answer: bytes) -> tuple[int, str]:
    """Parse a successful answer. Return the number of rejected spans, 0 for a malformed answer, and the reason."""
    match = _PARTIAL_SUCCESS.match(answer)
    if match is None:
        return 0, ""
    rejected, message = _decode_varint(match.group(1) or b""), match.group(2) or b""
    return rejected if rejected < 1 << 63 else 0, message.decode("utf-8", "replace")[:500]


def _decode_varint(varint: bytes) -> int:
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(varint))


def _parse_retry_after(text: str | None) -> float:
    from email.utils import parsedate_to_datetime

    if text is None:
        return 0.0
    try:
        return float(text) if text.strip().isdigit() else parsedate_to_datetime(text).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return 0.0


def require_grpc() -> None:
    """Raise `ExportError` if gRPC is not installed. Imports nothing."""
    from importlib.util import find_spec

    if find_spec("grpc") is None:
        raise ExportError(
            "grpc is not installed, so spans cannot be sent; install instrument-sdk[grpc], or set the protocol to "
            "http/protobuf"
        )


_SERVICES = ("trace.v1.TraceService", "metrics.v1.MetricsService")
_PASSING = (
    "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS",
)  # fmt: skip
"""The gRPC statuses after which an OTLP client may retry."""
_TOO_LARGE = re.compile(r"larger than max|too large|exceeds maximum")
_METADATA = re.compile(r"[0-9a-z_.-]+(?<!-bin)")
# RetryInfo {retry_delay {seconds, nanos}}, as a detail of a status or by itself
_RETRY_INFO = {"grpc-status-details-bin": rb"google\.rpc\.RetryInfo\x12.", "google.rpc.retryinfo-bin": rb"\A"}
_RETRY_DELAY = rb"(?:\x0a.(?:\x08" + _VARINT + rb")?(?:\x10" + _VARINT + rb")?)?"


class GrpcSender(Sender):
    """Sends OTLP over gRPC. Only the channel is from the package `grpc`; requests are packed here."""

    modules = ("grpc",)
    _of_parents: ClassVar[list[Any]] = []

    def __init__(self, settings: Otlp) -> None:
        require_grpc()
        self._settings = settings
        self._channel: Any = None
        self._places = _SERVICES
        self._metadata = tuple((name.lower(), value) for name, value in settings.headers)
        for name, _ in self._metadata:
            if not _METADATA.fullmatch(name):
                raise ExportError(
                    f"gRPC cannot send the header {name!r}; allowed: letters, digits and _.-, and no -bin at the end"
                )

    def _send_once(self, place: str, body: bytes, count: int, left_s: Callable[[], float]) -> Response:
        grpc = import_once("grpc")
        try:
            channel = self._channel = self._channel or self._open_channel(grpc)
            export = channel.unary_unary(f"/opentelemetry.proto.collector.{place}/Export")
            answer = export(body, timeout=require_time_left(left_s()), metadata=self._metadata)
        except grpc.RpcError as fault:
            status, details = fault.code().name, fault.details() or ""
            reason = f"gRPC {status}: {details[:200]}"
            asked_s = _find_retry_info(fault.trailing_metadata())
            exhausted = status == "RESOURCE_EXHAUSTED" and asked_s is None
            too_large = (exhausted or status == "OUT_OF_RANGE") and _TOO_LARGE.search(details) is not None
            if too_large or exhausted or status not in _PASSING:
                return Response(False, too_large=too_large, refused=status == "UNIMPLEMENTED", reason=reason)
            raise _UnavailableError(reason, asked_s or 0.0) from fault
        except (OSError, ValueError) as fault:  # no time is left, or `abort` has closed the channel
            raise _UnavailableError(f"{type(fault).__name__}: {fault}") from fault
        rejected, message = parse_partial_success(answer)
        return Response(True, rejected=min(rejected, count), reason=message)

    def _open_channel(self, grpc: Any) -> Any:
        from urllib.parse import urlsplit

        settings = self._settings
        compression = grpc.Compression.Gzip if settings.compression == "gzip" else grpc.Compression.NoCompression
        facts = {"compression": compression, "options": [("grpc.primary_user_agent", _make_user_agent())]}
        target = urlsplit(settings.endpoint).netloc or settings.endpoint
        if not settings.endpoint.startswith("https:"):
            return grpc.insecure_channel(target, **facts)
        key = settings.client_key or settings.client_certificate  # one file may hold both
        trust = (settings.certificate, key, settings.client_certificate)
        read = [file and Path(file).read_bytes() for file in trust]
        if b"" in read:  # with half of a pair gRPC ends the process
            raise OSError(f"{trust[read.index(b'')]} is empty")
        credentials = grpc.ssl_channel_credentials(*read)
        return grpc.secure_channel(target, credentials, **facts)

    def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    abort = close

    def after_fork_in_child(self) -> None:
        """Keep the parent's channel open. Closing or collecting the channel can hang the child."""
        self._of_parents.append(self._channel)
        self._channel = None


def _find_retry_info(metadata: Sequence[tuple[str, str | bytes]] | None) -> float | None:
    for name, value in metadata or ():
        if name in _RETRY_INFO and isinstance(value, bytes):
            match = re.search(_RETRY_INFO[name] + _RETRY_DELAY, value, re.DOTALL)
            if match is not None:
                return _decode_varint(match[1] or b"") + _decode_varint(match[2] or b"") / 1e9
    return None


_SENDERS: Mapping[str, type[HttpSender | GrpcSender]] = {"http/protobuf": HttpSender, "grpc": GrpcSender}


def make_sender(settings: Otlp) -> Sender:
    if settings.protocol not in _SENDERS:
        raise ExportError(f"there is no OTLP protocol {settings.protocol!r}; allowed: {', '.join(_SENDERS)}")
    return _SENDERS[settings.protocol](settings)


def list_sender_modules(settings: Otlp) -> tuple[str, ...]:
    return _SENDERS[settings.protocol].modules
