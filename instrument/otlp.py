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
import socket
import struct
import sys
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from instrument.errors import FAULTS, ExportError, logger
from instrument.spans import DeviceInterval, Origin, RemoteParent, Site, Span

if TYPE_CHECKING:
    import logging
    import ssl

    from instrument.profile import Otlp

QUEUE_SPANS = 65_536
"""Spans that may wait for delivery; beyond it the oldest whole trees go."""
REQUEST_SPANS = 4_000
REQUEST_BYTES = 512 << 10
"""A request's limits, before compression: common receivers answer 413 above 1 MiB, some drop what is above 8,192 spans."""

_BATCH_SPANS = 2_000
_BATCH_DELAY_S = 1.0
_FIRST_BACK_OFF_S = 0.25
_QUIET_S = 60.0
_GRPC_REQUEST_SPANS = 1_000  # receivers stop at 4 MiB; the official exporter says no sizes
_MASK = (1 << 64) - 1
_SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
_UNNAMED = "unknown_service"
_NEVER_NS = 1 << 63
_OUTCOMES = ("exported", "rejected", "failed", "dropped")  # of a tree in several requests, the rightmost counts
_EXPORTED, _REJECTED, _FAILED, _DROPPED = range(4)
_HAS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200  # opentelemetry-proto, SpanFlags
_INTERNAL_KIND, _SERVER_KIND = b"\x30\x01", b"\x30\x02"
_pack_times = struct.Struct("<BQBQ").pack  # each number after its tag: 0x39 start, 0x41 end

_MEMCPY_KINDS = {
    "h2d": "MemcpyHostToDevice",
    "d2h": "MemcpyDeviceToHost",
    "d2d": "MemcpyDeviceToDevice",
    "p2p": "MemcpyDeviceToDevice",
}
_FILLED = frozenset(
    "code.file.path code.function.name code.line.number error.type instrument.active_ns instrument.clipped "
    "instrument.instance instrument.kind instrument.self_ns instrument.task_id thread.id thread.name".split()
)


def current_parent() -> RemoteParent | None:
    """The OpenTelemetry span that is current on this thread, or None.

    For the service's threads: one dictionary look-up while nobody has imported OpenTelemetry, about 0.3 us after that.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    try:
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            return RemoteParent(context.trace_id, context.span_id, int(context.trace_flags))
    except Exception as fault:  # noqa: BLE001  another tracer's object; the request goes on without it
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
        for key in found.keys() & {"direction", "bytes", "pinned", "sync"}:
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
    if isinstance(value, str):
        return _text(b"\x0a", value)
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + _varint(value & _MASK)
    if isinstance(value, float):
        return b"\x21" + struct.pack("<d", value)
    if isinstance(value, list):
        return _field(b"\x2a", b"".join([_field(b"\x0a", _any_value(item)) for item in value]))
    raise TypeError(f"{type(value).__name__} is not a plain value")


@lru_cache(maxsize=1024)
def _int_head(tag: bytes, key: str, varint_bytes: int) -> bytes:
    named = _text(b"\x0a", key) + b"\x12" + _varint(varint_bytes + 1) + b"\x18"
    return tag + _varint(len(named) + varint_bytes) + named


def _attribute(key: str, value: object, tag: bytes = b"\x4a") -> bytes:
    """One KeyValue as a repeated field, by default `Span.attributes`."""
    if type(value) is int and 0 <= value < 1 << 63:
        number = _varint(value)
        return _int_head(tag, key, len(number)) + number
    return _field(tag, _text(b"\x0a", key) + _field(b"\x12", _any_value(_plain(value))))


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


def _identify(
    spans: Sequence[Span], ids: Ids
) -> Iterator[tuple[int, int, int, int, Span, DeviceInterval | None]]:
    """Trace id, span id, parent id (0: none) and OTLP flags of each span and, right after it, its device intervals."""
    remotes = {span.root_id: span.remote for span in spans if span.remote is not None and not span.parent_id}
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
    """Each span and device interval as one entry of `ScopeSpans.spans`."""
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


def _provider_resource() -> Any:
    """The resource of the tracer provider that the service configured, or None."""
    trace = sys.modules.get("opentelemetry.trace")
    return None if trace is None else getattr(trace.get_tracer_provider(), "resource", None)


def _resource_attributes(origin: Origin, ids: Ids, provider: Any) -> dict[str, object]:
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
    except Exception as fault:  # noqa: BLE001  a detector that somebody configured
        FAULTS.note("OpenTelemetry resource", fault)
    named: dict[str, object] = {"service.name": origin.service}
    for attributes in (named, {} if provider is None else provider.attributes):
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
    """What became of one request: whether it was taken, how many spans were rejected all the same, and why."""

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


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    phrase: str
    headers: Mapping[str, str]
    body: bytes


class _Http:
    """OTLP over HTTP/1.1, one connection kept alive.

    It speaks over its own socket, and only parses with `http.client`, because other instrumentations replace the
    methods of `http.client.HTTPConnection` and would make spans of these calls. Proxy variables are not read.
    """

    request_spans = REQUEST_SPANS

    def __init__(self, settings: Otlp) -> None:
        from urllib.parse import urlsplit

        url = urlsplit(settings.endpoint)
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        lines = [f"POST {path} HTTP/1.1", f"Host: {url.netloc.rpartition('@')[2]}", "User-Agent: instrument-sdk"]
        lines += [f"{name}: {value}" for name, value in settings.headers]
        if url.scheme not in ("http", "https") or not url.hostname or " " in path or not url.netloc.isprintable():
            raise ExportError(f"asked to export spans to {settings.endpoint!r}, which is no http:// or https:// URL")
        if not all(line.isprintable() and line.isascii() for line in lines):
            raise ExportError("a header or the path of the OTLP endpoint holds characters that HTTP does not allow")
        self._address = (url.hostname, url.port or (443 if url.scheme == "https" else 80))
        self._tls = url.scheme == "https"
        self._gzip = settings.compression == "gzip"
        lines += ["Content-Type: application/x-protobuf", *(["Content-Encoding: gzip"] if self._gzip else [])]
        self._head = "\r\n".join(lines).encode() + b"\r\nContent-Length: "
        self._socket: socket.socket | None = None
        self._packer = _Packer()
        self._batch: tuple[Ids, Origin, Mapping[int, str]] | None = None
        self._envelope: _Envelope | None = None
        self._envelope_key: tuple[object, ...] = ()

    def prepare(self, ids: Ids, origin: Origin, threads: Mapping[int, str]) -> None:
        provider = _provider_resource()
        if self._envelope is None or self._envelope_key != (ids, origin, provider):
            self._envelope = _Envelope.of(_resource_attributes(origin, ids, provider))
            self._envelope_key = (ids, origin, provider)
        self._batch = (ids, origin, threads)

    def encode(self, spans: Sequence[Span]) -> Iterator[bytes]:
        assert self._batch is not None  # noqa: S101  prepare came first
        return self._packer.pack(spans, *self._batch)

    def size(self, piece: bytes) -> int:
        return len(piece)

    def send(self, pieces: Sequence[bytes], left_s: Callable[[], float], pause: Callable[[float], None]) -> _Verdict:
        assert self._envelope is not None  # noqa: S101  prepare came first
        body = self._envelope.around(pieces)
        if self._gzip:
            press = zlib.compressobj(1, zlib.DEFLATED, 31)
            body = press.compress(body) + press.flush()
        back_off_s = _FIRST_BACK_OFF_S
        while True:
            reused = self._socket is not None
            wait_s = back_off_s * (0.8 + os.urandom(1)[0] / 640)
            try:
                reply = self._post(body, left_s)
            except TimeoutError as fault:
                return _Verdict(False, reason=str(fault) or "no answer in time")
            except OSError as fault:
                if reused:  # the collector may have closed an idle connection
                    continue
                reason = f"{type(fault).__name__}: {fault}"
            except _http_exception() as fault:
                return _Verdict(False, reason=f"an answer that is not HTTP ({type(fault).__name__})")
            else:
                if reply.status not in (429, 502, 503, 504):
                    return _judge(reply, len(pieces))
                reason = f"HTTP {reply.status} {reply.phrase}"
                asked_s = _retry_after_s(reply.headers.get("Retry-After"))
                wait_s = wait_s if asked_s is None else asked_s
            if wait_s >= left_s():
                return _Verdict(False, reason=reason)
            pause(wait_s)
            back_off_s *= 2

    def _post(self, body: bytes, left_s: Callable[[], float]) -> _Reply:
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
                content = b""  # the status has been said; the rest of the answer is not worth a second delivery
            if response.will_close or not response.isclosed():
                self.close()
            return _Reply(response.status, response.reason[:100], response.headers, content)
        except BaseException:
            self.close()
            raise

    def _connect(self, left_s: Callable[[], float]) -> socket.socket:
        sock = socket.create_connection(self._address, timeout=_positive(left_s()))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._tls:
            return sock
        try:
            return _tls_context().wrap_socket(sock, server_hostname=self._address[0])
        except BaseException:
            sock.close()
            raise

    def close(self) -> None:
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()

    def abort(self) -> None:
        sock = self._socket
        if sock is not None:
            try:
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # wakes the thread that waits in it; not TLS's own
            except OSError:
                pass  # already closed by the other side

    def forked(self) -> None:
        self.close()


def _http_exception() -> type[Exception]:
    from http.client import HTTPException

    return HTTPException


def _judge(reply: _Reply, spans: int) -> _Verdict:
    if 200 <= reply.status < 300:
        is_json = "json" in reply.headers.get("Content-Type", "")
        rejected, message = (0, "") if is_json else _partial_success(reply.body)
        return _Verdict(True, rejected=max(0, min(rejected, spans)), reason=message)
    location = reply.headers.get("Location")
    reason = f"HTTP {reply.status} {reply.phrase}" + (f", redirected to {location[:200]}" if location else "")
    return _Verdict(False, too_large=reply.status == 413, reason=reason)


def _partial_success(body: bytes) -> tuple[int, str]:
    """`rejected_spans` and `error_message` of an ExportTraceServiceResponse; what does not parse rejects nothing."""
    try:
        inner = dict(_fields(body)).get(1, b"")
        fields = dict(_fields(inner)) if isinstance(inner, bytes) else {}
    except (IndexError, struct.error):
        return 0, ""
    rejected, message = fields.get(1, 0), fields.get(2, b"")
    return (
        rejected - (rejected >> 63 << 64) if isinstance(rejected, int) else 0,
        message.decode("utf-8", "replace")[:500] if isinstance(message, bytes) else "",
    )


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    position = 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        value: int | bytes
        if tag & 7 == 0:
            value, position = _read_varint(message, position)
        elif tag & 7 == 2:
            size, position = _read_varint(message, position)
            value, position = message[position : position + size], position + size
        else:
            raise IndexError("a wire type that the answer does not use")
        yield tag >> 3, value


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = message[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number & _MASK, position


def _retry_after_s(text: str | None) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or a date."""
    from email.utils import parsedate_to_datetime

    if text is None:
        return None
    try:
        return float(text) if text.strip().isdigit() else parsedate_to_datetime(text).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return None


def _tls_context() -> ssl.SSLContext:
    """The system's trust, or what OpenTelemetry's variables name instead."""
    import ssl

    def named(setting: str) -> str | None:
        prefixes = ("OTEL_EXPORTER_OTLP_TRACES_", "OTEL_EXPORTER_OTLP_")
        return next(filter(None, (os.environ.get(prefix + setting) for prefix in prefixes)), None)

    context = ssl.create_default_context(cafile=named("CERTIFICATE"))
    certificate = named("CLIENT_CERTIFICATE")
    if certificate is not None:
        context.load_cert_chain(certificate, named("CLIENT_KEY"))
    return context


class _Grpc:
    """OTLP over gRPC by the official exporter, with its own retries.

    That exporter does not tell how many spans the collector rejected, so here a rejected span counts as exported.
    """

    request_spans = _GRPC_REQUEST_SPANS

    def __init__(self, settings: Otlp) -> None:
        from importlib.util import find_spec

        try:
            installed = find_spec("opentelemetry.exporter.otlp.proto.grpc") and find_spec("grpc")
        except ModuleNotFoundError:
            installed = None
        if installed is None:
            raise ExportError(
                f"asked to export spans to {settings.endpoint!r} by grpc, but the official exporter is not installed; "
                "install instrument-sdk[grpc], or set the protocol to http/protobuf"
            )
        self._settings = settings
        self._exporter: Any = None
        self._left_to_the_parent: list[Any] = []
        self._said = ""
        self._resource: Any = None
        self._resource_key: tuple[object, ...] = ()
        self._batch: tuple[Ids, Origin, Mapping[int, str]] | None = None

    def prepare(self, ids: Ids, origin: Origin, threads: Mapping[int, str]) -> None:
        from opentelemetry.sdk.resources import Resource

        provider = _provider_resource()
        if self._resource_key != (ids, origin, provider):
            attributes = _resource_attributes(origin, ids, provider)
            self._resource = Resource({key: _plain(value) for key, value in attributes.items()})  # type: ignore[misc]
            self._resource_key = (ids, origin, provider)
        self._batch = (ids, origin, threads)

    def encode(self, spans: Sequence[Span]) -> Iterator[Any]:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        assert self._batch is not None  # noqa: S101  prepare came first
        ids, origin, threads = self._batch
        remotes = _remotes(spans)
        scope = InstrumentationScope("instrument", _version(), _SCHEMA_URL)
        for span in spans:
            remote = remotes.get(span.root_id)
            trace_id = ids.trace_id(span.root_id) if remote is None else remote.trace_id
            flags = TraceFlags(1 if remote is None else remote.flags & 0xFF)
            context = SpanContext(trace_id, ids.span_id(span.span_id), False, flags)
            parent = None
            if span.parent_id:
                parent = SpanContext(trace_id, ids.span_id(span.parent_id), False, flags)
            elif remote is not None:
                parent = SpanContext(trace_id, remote.span_id, True, flags)
            error = None if span.error is None else Status(StatusCode.ERROR, str(_plain(span.error)))
            yield ReadableSpan(
                str(_plain(span.site.name)),
                context,
                parent,
                self._resource,
                _plain_attributes(attributes_of(span, threads)),
                kind=SpanKind.SERVER if span.site.kind == "request" else SpanKind.INTERNAL,
                status=error or Status(StatusCode.UNSET),
                start_time=origin.realtime_of(span.start_ns),
                end_time=origin.realtime_of(span.end_ns),
                instrumentation_scope=scope,
            )
            for interval in span.device:
                yield ReadableSpan(
                    str(_plain(_device_name(span.site))),
                    SpanContext(trace_id, ids.device_span_id(), False, flags),
                    context,
                    self._resource,
                    _plain_attributes(_device_attributes(span, interval)),
                    start_time=origin.realtime_of(interval.start_ns),
                    end_time=origin.realtime_of(interval.end_ns),
                    instrumentation_scope=scope,
                )

    def size(self, piece: Any) -> int:
        return 0

    def send(self, pieces: Sequence[Any], left_s: Callable[[], float], pause: Callable[[float], None]) -> _Verdict:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._said = ""
        exporter = self._exporter = self._exporter or self._open()
        if exporter.export(pieces) is SpanExportResult.SUCCESS:
            return _Verdict(True)
        return _Verdict(False, reason=self._said or "the official gRPC exporter reported a failure")

    def _open(self) -> Any:
        import logging

        from grpc import Compression
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        thread_id = threading.get_ident()

        def listen(record: logging.LogRecord) -> bool:
            if record.thread != thread_id:
                return True
            self._said = record.getMessage()  # said once by us, not once a request by it
            return False

        logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").addFilter(listen)
        return OTLPSpanExporter(
            endpoint=self._settings.endpoint,
            headers=tuple((name.lower(), value) for name, value in self._settings.headers),
            timeout=self._settings.timeout_ns / 1e9,
            compression=Compression.Gzip if self._settings.compression == "gzip" else Compression.NoCompression,
        )

    def close(self) -> None:
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.shutdown(timeout_millis=0)

    def abort(self) -> None:
        self.close()

    def forked(self) -> None:
        self._left_to_the_parent.append(self._exporter)  # closing the parent's channel in a child can hang it
        self._exporter = None
