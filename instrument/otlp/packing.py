"""Packs spans as OTLP's protobuf messages, with attributes under OpenTelemetry's names.

No OpenTelemetry object is built. The fields that all spans of a site share are packed once. Each span adds its ids,
times and measurements. A device interval is sent and counted as a child span of the span that enqueued the work.
"""

from __future__ import annotations

import numbers
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from instrument.recording.remote_parents import LINK, LINK_REMOTE, LINK_STATE, LINK_TRACE_ID, LinkedSpan, remote_of
from instrument.recording.spans import ERROR_TYPE, STATUS_CODE, STATUS_DESCRIPTION, Site, Span

SCOPE = "instrument"
"""The name of the OpenTelemetry instrumentation scope that every span has."""
SCHEMA_URL = "https://opentelemetry.io/schemas/1.45.0"
"""The schema of OpenTelemetry's conventions from which the attributes take their names."""
EVENT_LIMIT = 128
"""The maximum number of events sent per span. OpenTelemetry has the same limit."""
DURATION = "instrument.duration_ns"
"""The attribute with the length of an event in ns."""
LINK_NAMES = frozenset((LINK, LINK_REMOTE))
"""The attributes in which a recorded span stores a link to another span."""
IS_REMOTE = 0x200
"""The bit of a span's OTLP flags that marks a parent in another process (opentelemetry-proto, SpanFlags)."""

HAS_IS_REMOTE = 0x100
"""The bit of a span's OTLP flags that marks `IS_REMOTE` as known."""
INTERNAL_KIND, SERVER_KIND = b"\x30\x01", b"\x30\x02"
_MASK = (1 << 64) - 1
_pack_double = struct.Struct("<cd").pack

_MEMCPY_KINDS = {
    "h2d": "MemcpyHostToDevice",
    "d2h": "MemcpyDeviceToHost",
    "d2d": "MemcpyDeviceToDevice",
    "p2p": "MemcpyDeviceToDevice",
    "h2h": "MemcpyHostToHost",
}
_FILLED = frozenset(
    (
        *("code.file.path", "code.function.name", "code.line.number", "error.type", "thread.id", "thread.name"),
        *(f"instrument.{name}" for name in ("active_ns", "clipped", "instance", "kind", "self_ns", "task_id")),
        *(LINK, LINK_REMOTE, LINK_STATE, LINK_TRACE_ID, STATUS_CODE, STATUS_DESCRIPTION),
    )
)


def find_cause(attributes: Mapping[str, object], linked: Callable[[int, int], LinkedSpan]) -> LinkedSpan | None:
    """Return the link that a span's attributes store: to the ended span that started its task or thread, or to the
    caller's span. `linked` finds a span by its number and its root's number."""
    state = attributes.get(LINK_STATE)
    state = state if isinstance(state, str) else ""
    remote = attributes.get(LINK_REMOTE)
    if isinstance(remote, str):
        parent = remote_of(f"00-{remote}-00".encode("ascii", "replace"))
        return None if parent is None else LinkedSpan(parent.trace_id, parent.span_id, state)
    link = attributes.get(LINK)
    if not isinstance(link, tuple | list) or len(link) != 2 or set(map(type, link)) != {int}:
        return None
    trace_id = attributes.get(LINK_TRACE_ID)
    try:
        cause = linked(*link)
        number = cause.trace_id if trace_id is None else int(str(trace_id), 16)
    except (ValueError, OverflowError):
        return None  # no recorder wrote it
    return LinkedSpan(number, cause.span_id, state) if 0 < number < 1 << 128 else None


def select_events(interruptions: Sequence[Span]) -> tuple[list[tuple[int, str, Mapping[str, object]]], int]:
    """Return a span's longest interruptions as events (time, name, attributes), and the count of the others."""
    longest = sorted(interruptions, key=lambda span: -span.total_ns)[:EVENT_LIMIT]
    longest.sort(key=attrgetter("start_ns"))
    events: list[tuple[int, str, Mapping[str, object]]] = [
        (span.start_ns, span.site.name, {**span.attributes, DURATION: span.total_ns}) for span in longest
    ]
    return events, len(interruptions) - len(longest)


def make_device_attributes(
    site: Site, attributes: Mapping[str, object], device: int, stream: int, label: str
) -> dict[str, object]:
    """Return the attributes of a device interval of a span, except its uncertainty."""
    facts = _rename_attributes(site.kind, (*site.attributes, *attributes.items()))
    facts = {key: facts[key] for key in ("cuda.memcpy.kind", "instrument.bytes") if key in facts}
    return facts | {"cuda.device.index": device, "instrument.device.stream": stream, "instrument.device.label": label}


def make_device_name(site: Site) -> str:
    """Return the name of the device intervals of a site's spans."""
    return f"{site.name} (device)"


def make_site_attributes(site: Site) -> dict[str, object]:
    """Return the attributes that all spans of a site share."""
    facts = _rename_attributes(site.kind, site.attributes)
    facts["instrument.kind"] = site.kind
    if site.instance:
        facts["instrument.instance"] = site.instance
    if site.function:
        facts["code.function.name"] = site.function
    if site.file:
        facts["code.file.path"] = site.file
    if site.line:
        facts["code.line.number"] = site.line
    return facts


def make_thread_attributes(thread_id: int, name: str | None) -> dict[str, object]:
    """Return the attributes that all spans of a thread share."""
    return {"thread.id": thread_id} if name is None else {"thread.id": thread_id, "thread.name": name}


def make_own_attributes(
    site: Site, attributes: Mapping[str, object], error: str | None, is_clipped: bool
) -> dict[str, object]:
    """Return the attributes of one span, except its measured numbers."""
    facts = _rename_attributes(site.kind, attributes.items()) if attributes else {}
    if is_clipped:
        facts["instrument.clipped"] = True
    error_type = error if error is not None else attributes.get(ERROR_TYPE)
    if error_type is not None:
        facts["error.type"] = error_type
    return facts


def find_status(error: str | None, attributes: Mapping[str, object]) -> tuple[bool, str] | None:
    """Return (True, reason) for a failed span, (False, "") for a successful one, None if unknown."""
    if error is not None:
        return True, str(make_plain(attributes.get(STATUS_DESCRIPTION) or error))
    return (False, "") if attributes.get(STATUS_CODE) == "OK" else None


def _rename_attributes(kind: str, attributes: Iterable[tuple[str, object]]) -> dict[str, object]:
    facts = {key: value for key, value in attributes if key not in _FILLED}
    if kind == "copy":
        memcpy_kind = _MEMCPY_KINDS.get(str(facts.get("direction")))
        for key in ("direction", "bytes", "pinned", "sync"):
            if key in facts:
                facts[f"instrument.{key}"] = facts.pop(key)
        if memcpy_kind is not None:
            facts["cuda.memcpy.kind"] = memcpy_kind
    elif kind == "layer" and "region" in facts:
        facts["instrument.region"] = facts.pop("region")
    return facts


def make_plain(value: object) -> object:
    """Return a value that OTLP can represent. Any other value, such as a tensor, is never read: its type's name
    replaces it."""
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
        return [make_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def pack_resource(attributes: Mapping[str, object]) -> bytes:
    """Return the packed resource of a request."""
    return pack_field(b"\x0a", pack_attributes(attributes, b"\x0a"))


def pack_request(resource: bytes, pieces: Iterable[bytes], foreign: Sequence[bytes] = ()) -> bytes:
    """Return an ExportTraceServiceRequest of packed spans under a packed resource. Metrics are packed in the same
    form."""
    scope = pack_field(b"\x0a", pack_text(b"\x0a", SCOPE) + pack_text(b"\x12", find_version()))
    of_schema = pack_field(b"\x12", b"".join((scope, *pieces, pack_text(b"\x1a", SCHEMA_URL))))
    without_schema = pack_field(b"\x12", b"".join((scope, *foreign))) if foreign else b""
    return pack_field(b"\x0a", resource + of_schema + without_schema)


class Body(NamedTuple):
    """The bytes of an `ExportTraceServiceRequest`, and the count of its spans."""

    data: bytes
    spans: int


def split_request(request: bytes) -> Sequence[Body]:
    """Split a request that `pack_request` made into two."""
    (of_resource,) = _split_fields(request, 0, len(request))
    resource, of_scope = _split_fields(request, *of_resource[1:])
    _, *pieces, _ = _split_fields(request, *of_scope[1:])
    packed = [request[first:end] for first, _, end in pieces]
    middle = len(packed) // 2
    packed_resource = request[resource[0] : resource[2]]
    return [Body(pack_request(packed_resource, half), len(half)) for half in (packed[:middle], packed[middle:])]


def _split_fields(message: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the offsets of the tag, the content and the end of each field. Fields have a one-byte tag and a length."""
    while at < end:
        first, size, shift = at, 0, 0
        while True:
            at += 1
            size |= (message[at] & 0x7F) << shift
            shift += 7
            if message[at] < 0x80:
                break
        yield first, at + 1, at + 1 + size
        at += 1 + size


def find_version() -> str:
    """Return the version of this package."""
    return str(sys.modules["instrument"].__version__)


def pack_status(status: tuple[bool, str] | None) -> bytes:
    """Return the status of a span as a field, no bytes for None."""
    if status is None:
        return b""
    failed, message = status
    return pack_field(b"\x7a", pack_text(b"\x12", message) + b"\x18\x02" if failed else b"\x18\x01")


def pack_event(time_ns: int, name: str, attributes: Mapping[str, object]) -> bytes:
    """Return an event of a span as a field."""
    body = b"\x09" + struct.pack("<Q", time_ns) + pack_text(b"\x12", name) + pack_attributes(attributes, b"\x1a")
    return pack_field(b"\x5a", body)


@lru_cache(maxsize=16_384)
def pack_link(link: LinkedSpan) -> bytes:
    """Return a link of a span as a field. Batches link the same requests repeatedly, so results are cached."""
    ids = b"\x0a\x10" + link.trace_id.to_bytes(16, "big") + b"\x12\x08" + link.span_id.to_bytes(8, "big")
    ids += pack_text(b"\x1a", link.state) if link.state else b""
    return pack_field(b"\x6a", ids + b"\x35" + struct.pack("<I", HAS_IS_REMOTE))


def pack_attributes(attributes: Mapping[str, object], tag: bytes = b"\x4a") -> bytes:
    """Return attributes as KeyValues of a repeated field, by default `Span.attributes`."""
    return b"".join([_pack_attribute(key, value, tag) for key, value in attributes.items()])


def _pack_attribute(key: str, value: object, tag: bytes = b"\x4a") -> bytes:
    """Return an attribute as a KeyValue of a repeated field, by default `Span.attributes`."""
    if type(value) is int and 0 <= value < 1 << 63:
        number = encode_varint(value)
        return pack_int_head(tag, key, len(number)) + number
    return pack_field(tag, _pack_key(key) + pack_field(b"\x12", _pack_value(value)))


@lru_cache(maxsize=1024)
def _pack_key(key: str) -> bytes:
    return pack_text(b"\x0a", key)


@lru_cache(maxsize=1024)
def pack_int_head(tag: bytes, key: str, varint_bytes: int) -> bytes:
    """Return the bytes of a KeyValue before an integer whose varint takes `varint_bytes`."""
    head = _pack_key(key) + b"\x12" + encode_varint(varint_bytes + 1) + b"\x18"
    return tag + encode_varint(len(head) + varint_bytes) + head


def _pack_value(value: object) -> bytes:
    if type(value) is str:
        return pack_text(b"\x0a", value)
    if type(value) is bool:
        return b"\x10\x01" if value else b"\x10\x00"
    if type(value) is int and -1 << 63 <= value < 1 << 63:
        return b"\x18" + encode_varint(value & _MASK)
    if type(value) is float:
        return _pack_double(b"\x21", value)
    if type(value) is list:
        return pack_field(b"\x2a", b"".join([pack_field(b"\x0a", _pack_value(item)) for item in value]))
    return _pack_value(make_plain(value))


def pack_text(tag: bytes, text: str) -> bytes:
    """Return a field with text."""
    return pack_field(tag, text.encode("utf-8", "replace"))


def pack_field(tag: bytes, content: bytes) -> bytes:
    """Return a field with bytes, or with a message."""
    return tag + encode_varint(len(content)) + content


def encode_varint(number: int) -> bytes:
    """Encode a non-negative integer of any size as a varint."""
    if number < 0x80:
        return bytes((number,))
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    return bytes((number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80)) + encode_varint(number >> 14)
