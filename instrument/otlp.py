"""Spans to an OpenTelemetry collector: packed by hand, sent by one background thread, every loss counted.

A Span message of OTLP has a constant layout for a site: what never changes is packed once per site, and a span adds
its ids, its two times and what was measured. No OpenTelemetry object is built on the way (http/protobuf); the export
thread borrows only the SDK's `Resource`, so that both land under the same service. With grpc the official exporter
sends, at its own cost per span.

A device interval is a span of its own on the wire, a child of the span that enqueued the work, and counts as one.
"""

from __future__ import annotations

import io
import itertools
import numbers
import os
import re
import socket
import struct
import sys
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar

from instrument.errors import FAULTS, ExportError, logger
from instrument.spans import DeviceInterval, Origin, RemoteParent, Site, Span

if TYPE_CHECKING:
    import logging
    import ssl
    from http.client import HTTPResponse

    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import ReadableSpan

    from instrument.profile import Otlp

QUEUE_SPANS = 65_536
"""Spans that may wait for delivery; beyond it the oldest whole trees go."""
REQUEST_SPANS = 4_000
REQUEST_BYTES = 512 << 10
"""A request's limits, before compression: there are receivers that refuse 1 MiB, and that drop beyond 8,192 spans."""

_BATCH_SPANS = 2_000
_BATCH_DELAY_S = 1.0
_FIRST_BACK_OFF_S = 0.25
_QUIET_NS = 60 * 10**9
_PATIENCE_S = 0.1
_LEAST_REQUEST_BYTES = 64 << 10
_THREAD_NAME = "instrument-otlp"
_GRPC_REQUEST_SPANS = 1_000  # receivers stop at 4 MiB; the official exporter says no sizes
_MASK = (1 << 64) - 1
_SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
_UNNAMED = "unknown_service"
_NEVER_NS = 1 << 63
_OUTCOMES = ("exported", "rejected", "failed", "dropped")  # of a tree in several requests, the rightmost counts
_EXPORTED, _REJECTED, _FAILED, _DROPPED = range(4)
_HAS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200  # opentelemetry-proto, SpanFlags
_INTERNAL_KIND, _SERVER_KIND = b"\x30\x01", b"\x30\x02"
_pack_double = struct.Struct("<cd").pack
_pack_times = struct.Struct("<BQBQ").pack  # each number after its tag: 0x39 start, 0x41 end

_MEMCPY_KINDS = {
    "h2d": "MemcpyHostToDevice",
    "d2h": "MemcpyDeviceToHost",
    "d2d": "MemcpyDeviceToDevice",
    "p2p": "MemcpyDeviceToDevice",
}
_FILLED = frozenset(
    (
        *("code.file.path", "code.function.name", "code.line.number", "error.type", "thread.id", "thread.name"),
        *(f"instrument.{name}" for name in ("active_ns", "clipped", "instance", "kind", "self_ns", "task_id")),
    )
)
# ExportTraceServiceResponse.partial_success {rejected_spans, error_message}; serialisers write fields in this order
_PARTIAL_SUCCESS = re.compile(
    rb"\x0a[\x80-\xff]*[\x00-\x7f](?:\x08([\x80-\xff]*[\x00-\x7f]))?(?:\x12[\x80-\xff]*[\x00-\x7f](.*))?", re.DOTALL
)


def current_parent() -> RemoteParent | None:
    """The OpenTelemetry span that is current on this thread, or None.

    For the service's threads: about 30 ns while nobody has imported OpenTelemetry, then 0.2 us without a current span
    and 0.9 us with one. Never raises.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    try:
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            return RemoteParent(context.trace_id, context.span_id, int(context.trace_flags))
    except Exception as fault:  # another tracer's object; the request goes on without it
        FAULTS.note("read of the current OpenTelemetry span", fault)
    return None


class Ids:
    """Turns the recorder's small numbers into ids that are unique in the process, look random, and are never zero.

    splitmix64's finaliser maps 64 bits one to one, so distinct numbers give distinct ids. Number 0 is no span: its id
    stands in for the one number that would give zero. Numbers from 2**63 up are device intervals. `instance` is the
    process's service.instance.id. Made anew after a fork.
    """

    __slots__ = ("_device_numbers", "_seed", "_trace_seeds", "instance")

    def __init__(self) -> None:
        import uuid

        self._seed, *self._trace_seeds = struct.unpack("<3Q", os.urandom(24))
        self._device_numbers = itertools.count(1 << 63)
        self.instance = str(uuid.uuid4())

    def span_id(self, number: int) -> int:
        """The id, 64 bits, of a span of the recorder."""
        return _mix(self._seed + number) or _mix(self._seed)

    def device_span_id(self) -> int:
        """A fresh id for a device interval."""
        return self.span_id(next(self._device_numbers))

    def trace_id(self, number: int) -> int:
        """The id, 128 bits, of the tree whose root has this number."""
        high, low = self._trace_seeds
        return (_mix(high + number) or _mix(high)) << 64 | (_mix(low + number) or _mix(low))


def _mix(value: int) -> int:
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def attributes_of(span: Span, threads: Mapping[int, str]) -> dict[str, object]:
    """All attributes of a span as the collector gets them, by OpenTelemetry's names where it has one.

    What a span was given wins over what its site was given; the names that this room fills itself win over both.
    """
    thread = _thread_attributes(span.thread_id, threads.get(span.thread_id))
    return {**_site_attributes(span.site), **thread, **_span_attributes(span)}


def _site_attributes(site: Site) -> dict[str, object]:
    found = _given(site.kind, site.attributes)
    found["instrument.kind"] = site.kind
    if site.instance:
        found["instrument.instance"] = site.instance
    if site.function:
        found["code.function.name"] = site.function
    if site.file:
        found["code.file.path"] = site.file
    if site.line:
        found["code.line.number"] = site.line
    return found


def _thread_attributes(thread_id: int, name: str | None) -> dict[str, object]:
    return {"thread.id": thread_id} if name is None else {"thread.id": thread_id, "thread.name": name}


def _span_attributes(span: Span) -> dict[str, object]:
    found = _given(span.site.kind, span.attributes.items()) if span.attributes else {}
    found["instrument.self_ns"] = span.self_ns
    if span.active_ns != span.end_ns - span.start_ns:
        found["instrument.active_ns"] = span.active_ns
    if span.task_id:
        found["instrument.task_id"] = span.task_id
    if span.clipped:
        found["instrument.clipped"] = True
    if span.error is not None:
        found["error.type"] = span.error
    return found


def _device_attributes(span: Span, interval: DeviceInterval) -> dict[str, object]:
    found = _given(span.site.kind, (*span.site.attributes, *span.attributes.items()))
    found = {key: found[key] for key in ("cuda.memcpy.kind", "instrument.bytes") if key in found}
    found["cuda.device.index"] = interval.device
    found["instrument.device.stream"] = interval.stream
    found["instrument.device.label"] = interval.label
    found["instrument.device.uncertainty_ns"] = interval.uncertainty_ns
    return found


def _device_name(site: Site) -> str:
    return f"{site.name} (device)"


def _given(kind: str, attributes: Iterable[tuple[str, object]]) -> dict[str, object]:
    found = {key: value for key, value in attributes if key not in _FILLED}
    if kind == "copy":
        memcpy_kind = _MEMCPY_KINDS.get(str(found.get("direction")))
        for key in ("direction", "bytes", "pinned", "sync"):
            if key in found:
                found[f"instrument.{key}"] = found.pop(key)
        if memcpy_kind is not None:
            found["cuda.memcpy.kind"] = memcpy_kind
    return found


def _plain(value: object) -> object:
    """The value as OTLP can say it; anything else by the name of its type, because a tensor is never looked into."""
    if isinstance(value, str):
        return str.__str__(value).encode("utf-8", "replace").decode()
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        number = int(value)
        if -1 << 63 <= number < 1 << 63:
            return number
        return str(number) if number.bit_length() < 4096 else hex(number)  # Python refuses to print much longer ones
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _varint(number: int) -> bytes:
    if number < 0x80:
        return bytes((number,))
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    return bytes((number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80)) + _varint(number >> 14)


def _field(tag: bytes, content: bytes) -> bytes:
    return tag + _varint(len(content)) + content


def _text(tag: bytes, text: str) -> bytes:
    return _field(tag, text.encode("utf-8", "replace"))


def _any_value(value: object) -> bytes:
    if type(value) is str:
        return _text(b"\x0a", value)
    if type(value) is bool:
        return b"\x10\x01" if value else b"\x10\x00"
    if type(value) is int and -1 << 63 <= value < 1 << 63:
        return b"\x18" + _varint(value & _MASK)
    if type(value) is float:
        return _pack_double(b"\x21", value)
    if type(value) is list:
        return _field(b"\x2a", b"".join([_field(b"\x0a", _any_value(item)) for item in value]))
    return _any_value(_plain(value))


@lru_cache(maxsize=1024)
def _key(key: str) -> bytes:
    return _text(b"\x0a", key)


@lru_cache(maxsize=1024)
def _int_head(tag: bytes, key: str, varint_bytes: int) -> bytes:
    named = _key(key) + b"\x12" + _varint(varint_bytes + 1) + b"\x18"
    return tag + _varint(len(named) + varint_bytes) + named


def _attribute(key: str, value: object, tag: bytes = b"\x4a") -> bytes:
    """One KeyValue as a repeated field, by default `Span.attributes`."""
    if type(value) is int and 0 <= value < 1 << 63:
        number = _varint(value)
        return _int_head(tag, key, len(number)) + number
    return _field(tag, _key(key) + _field(b"\x12", _any_value(value)))


def _attributes(attributes: Mapping[str, object], tag: bytes = b"\x4a") -> bytes:
    return b"".join([_attribute(key, value, tag) for key, value in attributes.items()])


@lru_cache(maxsize=16_384)
def _pack_site(site: Site) -> tuple[bytes, frozenset[str]]:
    """The constant tail of a site's spans, and the names of the attributes in it."""
    return _pack_tail(site, ()), frozenset(_site_attributes(site))


def _pack_tail(site: Site, without: Iterable[str]) -> bytes:
    facts = _site_attributes(site)
    for key in without:
        facts.pop(key, None)
    kind = _SERVER_KIND if site.kind == "request" else _INTERNAL_KIND
    return _text(b"\x2a", site.name) + kind + _attributes(facts)


@lru_cache(maxsize=1024)
def _pack_thread(thread_id: int, name: str | None) -> bytes:
    return _attributes(_thread_attributes(thread_id, name))


@lru_cache(maxsize=512)
def _pack_flags(flags: int) -> bytes:
    return b"\x85\x01" + struct.pack("<I", flags)


def _pack_facts(span: Span, threads: Mapping[int, str]) -> bytes:
    tail, static = _pack_site(span.site)
    measured = _span_attributes(span)
    if span.attributes and not static.isdisjoint(measured):
        tail = _pack_tail(span.site, measured)
    facts = tail + _pack_thread(span.thread_id, threads.get(span.thread_id)) + _attributes(measured)
    if span.error is not None:
        facts += _field(b"\x7a", _text(b"\x12", span.error) + b"\x18\x02")
    return facts


def _pack_device_facts(span: Span, interval: DeviceInterval) -> bytes:
    return _text(b"\x2a", _device_name(span.site)) + _INTERNAL_KIND + _attributes(_device_attributes(span, interval))


def _identify(spans: Sequence[Span], ids: Ids) -> Iterator[tuple[int, int, int, int, Span, DeviceInterval | None]]:
    """Trace id, span id, parent id (0: none) and OTLP flags of each span and, right after it, its device intervals."""
    remotes = {span.root_id: span.remote for span in spans if span.remote is not None}
    known: dict[int, int] = {}
    root_id = -1
    for span in spans:
        if span.root_id != root_id:
            root_id = span.root_id
            remote = remotes.get(root_id)
            trace_id = ids.trace_id(root_id) if remote is None else remote.trace_id
            flags = _HAS_IS_REMOTE | (1 if remote is None else remote.flags & 0xFF)
        own = known[span.span_id] = ids.span_id(span.span_id)
        if span.parent_id:
            yield trace_id, own, known.get(span.parent_id) or ids.span_id(span.parent_id), flags, span, None
        elif remote is None:
            yield trace_id, own, 0, flags, span, None
        else:
            yield trace_id, own, remote.span_id, flags | _IS_REMOTE, span, None
        for interval in span.device:
            yield trace_id, ids.device_span_id(), own, flags, span, interval


def pack(spans: Sequence[Span], ids: Ids, origin: Origin, threads: Mapping[int, str]) -> Iterator[bytes]:
    """Each span and device interval as one entry of `ScopeSpans.spans`.

    Costs 2 to 4 us a span with 8 to 12 attributes, a tenth of the official objects and encoder.
    """
    offset_ns = origin.realtime_ns - origin.monotonic_ns
    for trace_id, own, parent, flags, span, interval in _identify(spans, ids):
        times = interval or span
        body = (
            b"\x0a\x10",
            trace_id.to_bytes(16, "big"),
            b"\x12\x08",
            own.to_bytes(8, "big"),
            b"\x22\x08" + parent.to_bytes(8, "big") if parent else b"",
            _pack_times(0x39, times.start_ns + offset_ns, 0x41, times.end_ns + offset_ns),
            _pack_flags(flags),
            _pack_facts(span, threads) if interval is None else _pack_device_facts(span, interval),
        )
        yield _field(b"\x12", b"".join(body))


def request_of(resource: bytes, pieces: Iterable[bytes]) -> bytes:
    """An ExportTraceServiceRequest of packed spans under a packed resource."""
    scope = _field(b"\x0a", _text(b"\x0a", "instrument") + _text(b"\x12", _version()))
    scope_spans = b"".join((scope, *pieces, _text(b"\x1a", _SCHEMA_URL)))
    return _field(b"\x0a", resource + _field(b"\x12", scope_spans))


@lru_cache(maxsize=1)
def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("instrument-sdk")
    except PackageNotFoundError:  # run from a source tree
        return "0"


def _provider_attributes() -> dict[str, object]:
    """The resource of the tracer provider that the service configured; nothing without one."""
    trace = sys.modules.get("opentelemetry.trace")
    try:
        resource = None if trace is None else getattr(trace.get_tracer_provider(), "resource", None)
        return {} if resource is None else dict(resource.attributes)
    except Exception as fault:  # a provider that somebody else wrote
        FAULTS.note("read of the tracer provider's resource", fault)
        return {}


def _resource_attributes(origin: Origin, ids: Ids, provider: Mapping[str, object]) -> dict[str, object]:
    """The service as OpenTelemetry names it: the provider's word over the profile's, that over the environment's."""
    found: dict[str, object] = {
        "service.instance.id": ids.instance,
        "host.name": origin.host or socket.gethostname(),
        "telemetry.distro.name": "instrument",
        "telemetry.distro.version": _version(),
    }
    try:
        from opentelemetry.sdk.resources import Resource

        found.update(Resource.create().attributes)
    except Exception as fault:  # a detector that somebody configured
        FAULTS.note("OpenTelemetry resource", fault)
    for attributes in ({"service.name": origin.service}, provider):
        unnamed = str(attributes.get("service.name") or _UNNAMED).startswith(_UNNAMED)
        found.update({key: value for key, value in attributes.items() if not (unnamed and key == "service.name")})
    found.setdefault("service.name", _UNNAMED)
    found["process.pid"] = os.getpid()
    return found


def _suppress_instrumentation() -> None:
    """Keep other instrumentations off this thread's own calls, in the way that they agreed on."""
    context = sys.modules.get("opentelemetry.context")
    if context is None:
        return
    for name in ("_SUPPRESS_INSTRUMENTATION_KEY", "_SUPPRESS_HTTP_INSTRUMENTATION_KEY"):
        key = getattr(context, name, "suppress_instrumentation")
        context.attach(context.set_value(key, True))


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What became of one request: whether it was taken, how many of its spans were rejected all the same, and why."""

    taken: bool
    rejected: int = 0
    too_large: bool = False
    reason: str = ""


class _Timed(io.RawIOBase):
    """Reads a socket within one total time, where the socket's own time-out starts anew with every byte."""

    def __init__(self, sock: socket.socket, left_s: Callable[[], float]) -> None:
        self._sock = sock
        self._left_s = left_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(_positive(self._left_s()))
        return self._sock.recv_into(buffer)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)


def _positive(seconds: float) -> float:
    if seconds <= 0:
        raise TimeoutError("no answer in time")
    return seconds


class _Http:
    """OTLP over HTTP/1.1 on one connection that is kept alive. The export thread's, except `abort` and `forked`.

    It speaks over its own socket, and only parses with `http.client`, because other instrumentations replace the
    methods of `http.client.HTTPConnection` and would make spans of these calls. Proxy variables are not read.
    """

    request_spans = REQUEST_SPANS
    encode = staticmethod(pack)

    def __init__(self, settings: Otlp) -> None:
        from urllib.parse import urlsplit

        try:
            url = urlsplit(settings.endpoint)
            self._tls = url.scheme == "https"
            self._address = (url.hostname or "", url.port or (443 if self._tls else 80))
        except ValueError as fault:
            raise ExportError(f"asked to export spans to {settings.endpoint!r}: {fault}") from fault
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ExportError(f"asked to export spans to {settings.endpoint!r}, which is no http:// or https:// URL")
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        lines = [f"POST {path} HTTP/1.1", f"Host: {url.netloc.rpartition('@')[2]}"]
        lines += [f"{name}: {value}" for name, value in settings.headers]
        if " " in path or not all(line.isascii() and line.isprintable() for line in lines):
            raise ExportError("a header or the path of the OTLP endpoint holds characters that are not allowed there")
        lines += [f"User-Agent: instrument-sdk/{_version()}", "Content-Type: application/x-protobuf"]
        self._gzip = settings.compression == "gzip"
        lines += ["Content-Encoding: gzip"] if self._gzip else []
        self._head = "\r\n".join([*lines, "Content-Length: "]).encode()
        self._socket: socket.socket | None = None
        self._resource = b""

    def speak_for(self, resource: Mapping[str, object]) -> None:
        """Send under this resource from now on."""
        self._resource = _field(b"\x0a", _attributes(resource, b"\x0a"))

    def size(self, piece: bytes) -> int:
        """Bytes that a piece adds to a request."""
        return len(piece)

    def send(self, pieces: Sequence[bytes], left_s: Callable[[], float], pause: Callable[[float], None]) -> _Verdict:
        """Deliver one request, trying again while there is time and hope."""
        from http.client import HTTPException

        body = request_of(self._resource, pieces)
        if self._gzip:
            press = zlib.compressobj(1, zlib.DEFLATED, 31)
            body = press.compress(body) + press.flush()
        back_off_s = _FIRST_BACK_OFF_S
        while True:
            reused = self._socket is not None
            wait_s = back_off_s * (0.8 + os.urandom(1)[0] / 640)
            try:
                response, content = self._post(body, left_s)
            except OSError as fault:
                if reused:  # the collector may have closed an idle connection
                    continue
                reason = f"{type(fault).__name__}: {fault}"
            except HTTPException as fault:
                return _Verdict(False, reason=f"an answer that is not HTTP ({type(fault).__name__})")
            else:
                if response.status not in (429, 502, 503, 504):
                    return _judge(response, content, len(pieces))
                reason = f"HTTP {response.status} {response.reason[:100]}"
                wait_s = max(wait_s, _retry_after_s(response.getheader("Retry-After")))
            if wait_s >= left_s():
                return _Verdict(False, reason=reason)
            pause(wait_s)
            back_off_s *= 2

    def _post(self, body: bytes, left_s: Callable[[], float]) -> tuple[HTTPResponse, bytes]:
        from http.client import HTTPException, HTTPResponse

        try:
            sock = self._socket = self._socket or self._connect(left_s)
            sock.settimeout(_positive(left_s()))
            try:
                sock.sendall(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
            except (BrokenPipeError, ConnectionResetError):
                pass  # a collector that refuses the size closes early; its answer may still be there to read
            response = HTTPResponse(_Timed(sock, left_s), method="POST")  # type: ignore[arg-type]
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

    def _connect(self, left_s: Callable[[], float]) -> socket.socket:
        sock = socket.create_connection(self._address, timeout=_positive(left_s()))
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return _tls_context().wrap_socket(sock, server_hostname=self._address[0]) if self._tls else sock
        except BaseException:
            sock.close()
            raise

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()

    forked = close

    def abort(self) -> None:
        """From another thread: wake the one that waits in the socket."""
        sock = self._socket
        if sock is not None:
            try:
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # the plain one: TLS's own would drop its state
            except OSError:
                pass  # the other side was quicker


def _judge(response: HTTPResponse, content: bytes, spans: int) -> _Verdict:
    if 200 <= response.status < 300:
        rejected, message = _partial_success(content)
        return _Verdict(True, rejected=min(rejected, spans), reason=message)
    reason = f"HTTP {response.status} {response.reason[:100]}"
    location = response.getheader("Location")
    if location:
        reason += f", redirected to {location[:200]}"
    return _Verdict(False, too_large=response.status == 413, reason=reason)


def _partial_success(answer: bytes) -> tuple[int, str]:
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


def _tls_context() -> ssl.SSLContext:
    """The system's trust, or the certificates that OpenTelemetry's variables name."""
    import ssl

    def named(setting: str) -> str | None:
        signal = os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{setting}")
        return signal or os.environ.get(f"OTEL_EXPORTER_OTLP_{setting}") or None

    context = ssl.create_default_context(cafile=named("CERTIFICATE"))
    certificate = named("CLIENT_CERTIFICATE")
    if certificate is not None:
        context.load_cert_chain(certificate, named("CLIENT_KEY"))
    return context


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


class _Grpc:
    """OTLP over gRPC by the official exporter, with its own retries. The export thread's, except `abort` and `forked`.

    The official exporter does not tell how many spans the collector rejected: here those count as exported.
    """

    request_spans = _GRPC_REQUEST_SPANS
    said: ClassVar[str] = ""
    _of_parents: ClassVar[list[Any]] = []

    def __init__(self, settings: Otlp) -> None:
        require_grpc()
        self._settings = settings
        self._exporter: Any = None
        self._resource: Any = None

    def speak_for(self, resource: Mapping[str, object]) -> None:
        """Send under this resource from now on."""
        from opentelemetry.sdk.resources import Resource

        self._resource = Resource(_official(resource))

    def encode(
        self, spans: Sequence[Span], ids: Ids, origin: Origin, threads: Mapping[int, str]
    ) -> Iterator[ReadableSpan]:
        """Each span and device interval as the SDK's own, with our ids and times."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        scope = InstrumentationScope("instrument", _version(), _SCHEMA_URL)
        for trace_id, own, parent, flags, span, interval in _identify(spans, ids):
            times, site, w3c_flags = interval or span, span.site, TraceFlags(flags & 0xFF)
            failed = interval is None and span.error is not None
            facts = attributes_of(span, threads) if interval is None else _device_attributes(span, interval)
            yield ReadableSpan(
                str(_plain(site.name if interval is None else _device_name(site))),
                context=SpanContext(trace_id, own, False, w3c_flags),
                parent=SpanContext(trace_id, parent, bool(flags & _IS_REMOTE), w3c_flags) if parent else None,
                resource=self._resource,
                attributes=_official(facts),
                kind=SpanKind.SERVER if interval is None and site.kind == "request" else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, str(_plain(span.error))) if failed else Status(StatusCode.UNSET),
                start_time=origin.realtime_of(times.start_ns),
                end_time=origin.realtime_of(times.end_ns),
                instrumentation_scope=scope,
            )

    def size(self, _piece: ReadableSpan) -> int:
        """Nothing: the official exporter packs, so only the number of spans is known."""
        return 0

    def send(self, pieces: Sequence[ReadableSpan], left_s: Callable[[], float], _pause: object) -> _Verdict:
        """Deliver one request, within the time that the official exporter was given."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        if left_s() <= 0:
            return _Verdict(False)
        _Grpc.said = "the official gRPC exporter reported a failure"
        exporter = self._exporter = self._exporter or self._open()
        try:
            taken = exporter.export(pieces) is SpanExportResult.SUCCESS
        except Exception as fault:  # old versions raise where they give up
            return _Verdict(False, reason=f"{type(fault).__name__}: {fault}")
        return _Verdict(taken, reason="" if taken else self.said)

    def _open(self) -> OTLPSpanExporter:
        import logging
        from importlib import import_module

        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        compression = import_module("grpc").Compression
        filters = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").filters
        if _listen not in filters:
            filters.insert(0, _listen)  # before the exporter's own, which hides what was said in the last 20 s
        return OTLPSpanExporter(
            endpoint=self._settings.endpoint,
            headers=tuple((name.lower(), value) for name, value in self._settings.headers),
            timeout=self._settings.timeout_ns / 1e9,
            compression=compression.Gzip if self._settings.compression == "gzip" else compression.NoCompression,
        )

    def close(self) -> None:
        """Close the channel; the next request opens another."""
        exporter, self._exporter = self._exporter, None
        try:
            if exporter is not None:
                exporter.shutdown(timeout_millis=0)
        except TypeError:  # versions in which it takes no time of its own
            exporter.shutdown()

    def abort(self) -> None:
        """From another thread: have the channel closed; not here, where some versions' shutdown takes half a minute."""
        try:
            threading.Thread(target=self.close, name=f"{_THREAD_NAME}-abort", daemon=True).start()
        except RuntimeError:
            pass  # the interpreter is about to exit, and the channel with it

    def forked(self) -> None:
        """Leave the channel alone: closing or collecting the parent's in a child can hang it."""
        self._of_parents.append(self._exporter)
        self._exporter = None


def _listen(record: logging.LogRecord) -> bool:
    """A log filter that keeps for the report what the official exporter says of our requests: we say it once.

    It stays for good, because a request that `stop` gave up may still be logged later.
    """
    if not str(record.threadName).startswith(_THREAD_NAME):
        return True
    _Grpc.said = record.getMessage()
    return False


class _Attributes(dict[str, Any]):
    """What older SDKs ask the attributes of a `ReadableSpan` for."""

    dropped = 0


def _official(attributes: Mapping[str, object]) -> _Attributes:
    return _Attributes({str(_plain(key)): _plain(value) for key, value in attributes.items()})


@dataclass(frozen=True, slots=True)
class Delivery:
    """What became of the spans offered since the exporter was made.

    `settled` says whether the fate of everything offered before the flush was known in time, `reason` why the last
    spans that were lost were lost.
    """

    offered: int
    exported: int
    rejected: int
    failed: int
    dropped: int
    pending: int
    settled: bool
    reason: str = ""

    @property
    def complete(self) -> bool:
        """Whether all of it was delivered: settled in time, and nothing ever lost."""
        return self.settled and not (self.rejected or self.failed or self.dropped)


@dataclass(slots=True, eq=False)
class _Tree:
    """One kept tree on its way. `size` counts its spans on the wire, `left` those of unknown fate."""

    spans: Sequence[Span]
    size: int
    left: int
    outcome: int = _EXPORTED


class Exporter:
    """Delivers kept trees to a collector from one daemon thread, and counts the fate of every span.

    Every method but `after_fork_in_child` may be called from any thread, also from a signal handler or a finaliser.
    `threads` gives the names of threads by native id. `origin` and `ids` may be read, and `origin` replaced by a
    renewed one, at any time.

    Raises ExportError for settings that cannot work, among them grpc without its extra.
    """

    def __init__(self, settings: Otlp, origin: Origin, threads: Callable[[], Mapping[int, str]]) -> None:
        self._settings = settings
        self._threads = threads
        self.origin = origin
        self._sender = self._make_sender()
        self._begin_anew()

    def _make_sender(self) -> _Http | _Grpc:
        if self._settings.protocol == "grpc":
            return _Grpc(self._settings)
        if self._settings.protocol == "http/protobuf":
            return _Http(self._settings)
        raise ExportError(f"asked to export spans by {self._settings.protocol!r}; there are http/protobuf and grpc")

    def _begin_anew(self) -> None:
        fates = ("offered", *_OUTCOMES, "pending")
        self.ids = Ids()
        self._lock = threading.Lock()
        self._inbox: deque[_Tree] = deque()
        self._queue: deque[_Tree] = deque()
        self._queued_spans = 0
        self._in_flight: set[_Tree] = set()
        self._counts = dict.fromkeys((*fates, *(f"{fate}_trees" for fate in fates), "requests"), 0)
        self._wake: SimpleQueue[SimpleQueue[bool] | None] = SimpleQueue()
        self._halt: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stop_at_ns = _NEVER_NS
        self._closed = False
        self._request_bytes = REQUEST_BYTES
        self._resource_key: tuple[object, ...] = ()
        self._reason = ""
        self._failing = False
        self._quiet_until_ns = 0

    def start(self) -> None:
        """Start the thread; nothing happens when it runs already. What was offered before is sent too."""
        with self._lock:
            if self._thread is not None:
                return
            self._closed, self._stop_at_ns, self._halt = False, _NEVER_NS, SimpleQueue()
            self._sender, self._resource_key = self._make_sender(), ()
            thread = threading.Thread(target=self._run, args=(self._sender,), name=_THREAD_NAME, daemon=True)
            self._thread = thread
        try:
            thread.start()
        except RuntimeError:  # no more threads, or the interpreter is about to exit
            self._thread = None
            raise

    def offer(self, spans: Sequence[Span]) -> bool:
        """Hand over one kept tree; True if it will be sent unless newer ones push it out.

        Never blocks and never raises; about 1 us, and 20 ns a span. When the queue is full the oldest trees go. A later
        part of the same tree may be offered by itself; any one span with the root's `remote` gives the part its trace.
        """
        if not spans:
            return False
        try:
            size = len(spans) + sum([len(span.device) for span in spans])
            self._inbox.append(_Tree(spans, size, size))
            if self._lock.acquire(blocking=False):  # whoever holds it, or the thread's next round, takes it in instead
                try:
                    self._take_in()
                finally:
                    self._lock.release()
            if self._queued_spans >= _BATCH_SPANS and self._wake.empty():
                self._wake.put(None)
        except Exception as fault:  # our own fault is counted, not raised into the service
            FAULTS.note("offer of spans to the OTLP exporter", fault)
            return False
        return size <= QUEUE_SPANS and not self._closed

    def flush(self, timeout_ns: int) -> Delivery:
        """Send what was offered so far, wait for its fate up to the time given, and tell the truth about it."""
        thread = self._thread
        settled = not self.counts()["pending"]
        if not settled and thread is not None and thread.is_alive():
            reply: SimpleQueue[bool] = SimpleQueue()
            self._wake.put(reply)
            try:
                settled = reply.get(timeout=min(max(0, timeout_ns) / 1e9, threading.TIMEOUT_MAX))
            except Empty:
                pass  # the time is up; the counts say how far it came
        counts = self.counts()
        fates = {fate: counts[fate] for fate in ("offered", *_OUTCOMES, "pending")}
        return Delivery(**fates, settled=settled, reason=self._reason)

    def stop(self, timeout_ns: int) -> Delivery:
        """Flush within the time given and end the thread, whatever the collector does.

        It returns a fifth of a second after that time at the latest. What still waits then counts as dropped, what was
        under way as failed. `start` begins again.
        """
        self._stop_at_ns = time.monotonic_ns() + timeout_ns
        self._halt.put(None)
        settled = self.flush(timeout_ns).settled
        sender, thread = self._sender, self._thread
        held = self._lock.acquire(timeout=_PATIENCE_S)
        try:
            self._closed, self._thread = True, None
            self._give_up("stopped before the collector had answered")
        finally:
            if held:
                self._lock.release()
        self._wake.put(None)
        if thread is not None:
            sender.abort()
            thread.join(_PATIENCE_S)
        return replace(self.flush(0), settled=settled)

    def counts(self) -> Mapping[str, int]:
        """Spans by fate (``exported``), trees by fate (``exported_trees``) and settled ``requests``, since it was made.

        offered = exported + rejected + failed + dropped + pending, in both units. A device interval counts as a span,
        an offer as a tree, and a tree as exported only if all its spans surely were.
        """
        held = self._lock.acquire(timeout=_PATIENCE_S)  # not for ever: a signal handler may have interrupted the holder
        try:
            if held:
                self._take_in()
            return dict(self._counts)
        finally:
            if held:
                self._lock.release()

    def after_fork_in_child(self) -> None:
        """Forget the parent's spans, counts, ids, thread and connection; `start` begins again in the child."""
        self._sender.forked()
        self._begin_anew()

    def _take_in(self) -> None:
        """With the lock: move what was offered to the queue, and keep the queue within its bound."""
        counts = self._counts
        while self._inbox:
            tree = self._inbox.popleft()
            for fate in ("offered", "pending"):
                counts[fate] += tree.size
                counts[f"{fate}_trees"] += 1
            if self._closed or tree.size > QUEUE_SPANS:
                self._settle(tree, tree.size, _DROPPED)
                continue
            self._queue.append(tree)
            self._queued_spans += tree.size
            while self._queued_spans > QUEUE_SPANS:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        tree = self._queue.popleft()
        self._queued_spans -= tree.size
        self._settle(tree, tree.size, _DROPPED)

    def _settle(self, tree: _Tree, spans: int, outcome: int) -> None:
        """With the lock: some spans of a tree have met their fate."""
        tree.left -= spans
        tree.outcome = max(tree.outcome, outcome)
        self._counts[_OUTCOMES[outcome]] += spans
        self._counts["pending"] -= spans
        if not tree.left:
            self._counts[f"{_OUTCOMES[tree.outcome]}_trees"] += 1
            self._counts["pending_trees"] -= 1
            self._in_flight.discard(tree)

    def _give_up(self, reason: str) -> None:
        """With the lock: settle what is under way as failed and, once closed, what waits as dropped."""
        if self._in_flight or (self._closed and self._queue):
            self._reason = reason
        for tree in list(self._in_flight):
            self._settle(tree, tree.left, _FAILED)
        self._take_in()
        while self._closed and self._queue:
            self._drop_oldest()

    def _run(self, sender: _Http | _Grpc) -> None:
        """The export thread: every second, or when enough waits or somebody asks, send all that waits."""
        me = threading.current_thread()
        while self._thread is me:
            try:
                reply = self._wake.get(timeout=_BATCH_DELAY_S)
            except Empty:
                reply = None
            settled = True
            try:
                self._send_queue(sender)
            except Exception as fault:  # the thread has to outlive what it did not expect
                settled = False
                with self._lock:
                    if self._thread is me:
                        self._give_up(f"{type(fault).__name__}: {fault}")
                FAULTS.note("OTLP export", fault)
            if reply is not None:
                reply.put(settled)
        sender.close()

    def _send_queue(self, sender: _Http | _Grpc) -> None:
        with self._lock:
            self._take_in()
            waiting = len(self._queue)
        if not waiting:
            return
        origin, threads = self.origin, self._threads()
        self._renew_resource(sender, origin)
        pieces: list[Any] = []
        owners: list[_Tree] = []
        size = 0
        for _ in range(waiting):
            tree = self._next_tree()
            if tree is None:
                break
            encoded = self._encode(sender, tree, origin, threads)
            for piece in encoded:
                added = sender.size(piece)
                if pieces and (len(pieces) >= sender.request_spans or size + added > self._request_bytes):
                    self._deliver(sender, pieces, owners)
                    pieces, owners, size = [], [], 0
                pieces.append(piece)
                owners.append(tree)
                size += added
        if pieces:
            self._deliver(sender, pieces, owners)

    def _renew_resource(self, sender: _Http | _Grpc, origin: Origin) -> None:
        provider = _provider_attributes()
        key = (self.ids, origin, provider)
        if key != self._resource_key:
            sender.speak_for(_resource_attributes(origin, self.ids, provider))
            self._resource_key = key
            _suppress_instrumentation()

    def _next_tree(self) -> _Tree | None:
        with self._lock:
            if self._thread is not threading.current_thread() or not self._queue:
                return None
            tree = self._queue.popleft()
            self._queued_spans -= tree.size
            self._in_flight.add(tree)
            return tree

    def _encode(self, sender: _Http | _Grpc, tree: _Tree, origin: Origin, threads: Mapping[int, str]) -> list[Any]:
        spans, tree.spans = tree.spans, ()
        try:
            encoded = list(sender.encode(spans, self.ids, origin, threads))
            if len(encoded) != tree.size:
                self._recount(tree, len(encoded))
            return encoded
        except Exception as fault:  # one tree that cannot be said does not stop the others
            with self._lock:
                if tree in self._in_flight:
                    self._reason = f"{type(fault).__name__}: {fault}"
                    self._settle(tree, tree.left, _FAILED)
            FAULTS.note("encoding of spans", fault)
            return []

    def _recount(self, tree: _Tree, size: int) -> None:
        """A tree has grown or shrunk since it was offered, for instance by a device interval that came late."""
        with self._lock:
            if tree in self._in_flight:
                for fate in ("offered", "pending"):
                    self._counts[fate] += size - tree.left
                tree.left = tree.size = size
                self._settle(tree, 0, _EXPORTED)

    def _deliver(self, sender: _Http | _Grpc, pieces: list[Any], owners: list[_Tree]) -> None:
        """Send one request, in halves when the collector finds it too large, and settle its spans."""
        me = threading.current_thread()
        deadline_ns = time.monotonic_ns() + self._settings.timeout_ns

        def left_s() -> float:
            """Nothing once another thread has taken over or the exporter has stopped."""
            return (min(deadline_ns, self._stop_at_ns) - time.monotonic_ns()) / 1e9 if self._thread is me else 0.0

        verdict = sender.send(pieces, left_s, self._pause)
        if verdict.too_large and len(pieces) > 1:
            self._request_bytes = max(_LEAST_REQUEST_BYTES, sum(map(sender.size, pieces)) // 2)
            middle = len(pieces) // 2
            self._deliver(sender, pieces[:middle], owners[:middle])
            self._deliver(sender, pieces[middle:], owners[middle:])
            return
        with self._lock:
            if self._thread is not me:
                return
            outcome = _FAILED if not verdict.taken else _REJECTED if verdict.rejected else _EXPORTED
            for tree, spans in Counter(owners).items():
                self._settle(tree, spans, outcome)
            if outcome == _REJECTED:
                self._counts["rejected"] -= len(owners) - verdict.rejected
                self._counts["exported"] += len(owners) - verdict.rejected
            self._counts["requests"] += 1
        self._say(verdict)

    def _pause(self, seconds: float) -> None:
        """Wait before another try; `stop` cuts it short."""
        try:
            self._halt.get(timeout=min(seconds, threading.TIMEOUT_MAX))
        except Empty:
            pass  # waited in full

    def _say(self, verdict: _Verdict) -> None:
        """Log the first failure and the recovery from it, each at most once in a while."""
        if verdict.reason:
            self._reason = verdict.reason if verdict.reason.isprintable() else repr(verdict.reason)
        lost = not verdict.taken or verdict.rejected > 0
        if lost and not self._failing and time.monotonic_ns() >= self._quiet_until_ns:
            self._failing = True
            logger.warning(
                "spans do not reach the OpenTelemetry collector (%s); the service is not affected, losses are counted",
                self._reason if verdict.reason else f"{verdict.rejected} spans rejected",
            )
        elif self._failing and not lost:
            self._failing = False
            self._quiet_until_ns = time.monotonic_ns() + _QUIET_NS
            logger.warning("spans reach the OpenTelemetry collector again")
