"""Events of a Chrome trace: taken from its text block by block, their fields, and the sound parts of damaged ones."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from instrument.recording.remote_parents import RemoteParent
from instrument.trace.layout import written
from instrument.trace.text import INT64, LIMIT_VALUE, checked, nanoseconds

# Text

BLOCK_BYTES = 1 << 17
"""Bytes that are read at a time: as much as a heap gives back and takes again without the kernel."""

DEEPEST = 900
"""The most brackets around a value of a trace."""

MOST_TRIES = 4
"""The last brackets of a block that may end a value, of which one mostly does."""

FIRST_BYTES, CUT_BYTES = 1 << 10, 16
"""Bytes in which a value is looked for at first, and bytes of a token that may be cut off at the end of a text."""

DELIMITERS = frozenset(",:]} \t\n\r")

_BLANKS = re.compile(rb"[ \t\n\r]*")
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*("?)|[\[\]{}]', re.DOTALL)
_REPLACED = "\ufffd".encode()

Value = TypeVar("Value")


class LeftOut:
    """The parts of a file that were left out or changed: a count for each reason, and the place of the first."""

    def __init__(self) -> None:
        self._found: dict[str, list[Any]] = {}

    def add(self, what: str, place: str, count: int = 1) -> None:
        """Count something that is left out."""
        self._found.setdefault(what, [0, place])[0] += count

    def losses(self) -> dict[str, int]:
        """Return the numbers by reason and place of the first."""
        return {f"{what}, the first at {place}": count for what, (count, place) in self._found.items()}


class JsonText:
    """JSON text of which `read` returns the next bytes; more than `limit_bytes` in all are refused, and more than
    `unpacked_bytes` of a packed file.

    Bytes that are no UTF-8 are replaced, and counted in `left_out`.
    """

    def __init__(self, read: Callable[[int], bytes], limit_bytes: int, unpacked_bytes: int) -> None:
        self._read, self._limit_bytes, self._unpacked_bytes, self._seen_bytes = read, limit_bytes, unpacked_bytes, 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode = json.JSONDecoder(strict=False).raw_decode
        self.left_out = LeftOut()
        self._text = b""
        self._at = self._passed = 0

    def refuse_beyond_limit(self, size_bytes: int) -> None:
        """Raise if a text of this size is more than may be read."""
        if size_bytes > self._limit_bytes:
            raise ValueError(f"it holds more than {self._limit_bytes} bytes of text; record less, or raise limit_bytes")

        if size_bytes > self._unpacked_bytes:
            raise ValueError("it unpacks to more than 100 times its size; if you trust it, unpack it first")

    @property
    def passed(self) -> int:
        """The number of bytes that have been taken."""
        return self._passed + self._at

    def peek(self) -> str:
        """Return the next character that is not blank, or "" at the end."""
        while True:
            blanks = _BLANKS.match(self._text, self._at)
            self._at = blanks.end() if blanks else self._at
            if self._at < len(self._text):
                return chr(self._text[self._at])
            if not self._more():
                return ""

    def begins_with_mark(self) -> bool:
        """Return True where a byte order mark comes next."""
        self.peek()
        return self._text.startswith(codecs.BOM_UTF8, self._at)

    def take(self, expected: str) -> str:
        """Pass over the next character that is not blank, which must be one of those expected."""
        found = self.peek()
        if not found or found not in expected:
            what = f"{found!r} comes" if found else "it ends"
            raise self._wrong(f"{what} where one of {expected} belongs", self.passed)
        self._at += 1
        return found

    def value(self) -> Any:
        """Return the next value."""
        self.peek()
        size = FIRST_BYTES
        error: json.JSONDecodeError | None
        while True:
            text = self._text[self._at : self._at + size].decode(errors="ignore")  # the last character may be cut off
            try:
                value, end = self._decode(text, 0)
                may_go_on = text[end : end + 1] not in DELIMITERS and end + CUT_BYTES > len(text)
            except json.JSONDecodeError as problem:
                value, end, error = None, problem.pos, problem
                may_go_on = problem.msg.startswith("Unterminated") or end + CUT_BYTES > len(text)
            else:
                error = None
            if may_go_on and self._at + size < len(self._text):
                size *= 8
            elif not (may_go_on and self._more()):
                break
        if error is not None:
            raise self._wrong(error.msg, self.passed + end) from error
        self._at += len(text[:end].encode())
        return value

    def values(self, decode: Callable[[bytes], Value], closing: bytes) -> tuple[Value | None, bytes]:
        """Take the values at hand of a list, one at least, that end with a bracket. Return them decoded, and as text.

        Return None for them where one is damaged. The text is all that is left where the last one has no end.
        """
        if len(self._text) - self._at < BLOCK_BYTES:
            self._more()
        while True:
            end = len(self._text)
            for _ in range(MOST_TRIES):
                end = self._text.rfind(closing, self._at, end)
                if end < 0:
                    break
                text = self._text[self._at : end + 1]
                try:
                    values = decode(b"[%b]" % text)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    continue
                self._at += len(text)
                return values, text
            length = max(ends_of_values(memoryview(self._text)[self._at :]), default=0)
            if length or not self._more():
                text = self._text[self._at : self._at + length] if length else self._text[self._at :]
                self._at += len(text)
                return None, text

    def _more(self) -> bool:
        """Read on, the further the longer the value at hand is already; return False at the end of the text."""
        size = len(self._text) - self._at
        if size > LIMIT_VALUE:
            raise ValueError("one value in it is longer than in any trace; give a Chrome trace in JSON")
        block = self._read(max(BLOCK_BYTES, size))
        self._seen_bytes += len(block)
        self.refuse_beyond_limit(self._seen_bytes)
        self._passed += self._at
        self._text = self._text[self._at :] + self._as_utf8(block)
        self._at = 0
        return bool(block)

    def _as_utf8(self, block: bytes) -> bytes:
        cut = self._utf8.getstate()[0]
        if block.isascii() and not cut:
            return block
        text = self._utf8.decode(block, final=not block)
        found = text.encode()
        replaced = found.count(_REPLACED) - block.count(_REPLACED)
        if replaced > 0:
            try:
                (cut + block).decode()
            except UnicodeDecodeError as error:
                place = f"byte {self._seen_bytes - len(cut) - len(block) + error.start}"
                self.left_out.add("characters that are no UTF-8", place, replaced)
        return found

    def _wrong(self, why: str, at: int) -> ValueError:
        return ValueError(f"it is no JSON, or cut off ({why}, at character {at}); write or copy it again")


def ends_of_values(text: bytes | memoryview) -> Iterator[int]:
    """Yield where each value in brackets ends, up to the end of the list around them."""
    depth = 0
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark in (b"{", b"["):
            depth += 1
            if depth > DEEPEST:
                raise RecursionError("brackets in it")
        elif mark in (b"}", b"]"):
            depth -= 1
            if depth < 0:
                return
            if depth == 0:
                yield token.end()


# Events

Int64 = Annotated[int, msgspec.Meta(ge=-INT64, le=INT64 - 1)]

EXACT_US = 1 << 42
"""Microseconds; a float above this limit cannot separate two neighbouring nanoseconds."""

NO_ARGUMENTS = msgspec.Raw(b"{}")

Scalar = int | str | float | bool | None


class TraceEvent(msgspec.Struct, gc=False):
    """One event; what it says of itself in `args` stays text, for what there is depends on what it is."""

    ph: str = ""
    ts: Any = None
    dur: Any = None
    pid: Scalar = None
    tid: Scalar = None
    cat: Scalar = None
    name: Scalar = None
    id: Any = None
    id2: Any = None
    args: msgspec.Raw = NO_ARGUMENTS


class ExactEvent(TraceEvent, gc=False):
    """An event of which a float does not hold the times to the nanosecond."""

    ts: Decimal | None = None
    dur: Decimal | None = None


class Remote(msgspec.Struct, omit_defaults=True):
    """The parent of a span in another process."""

    trace_id: str
    span_id: str
    flags: Int64
    is_local: bool = False
    in_server_span: bool = False

    @classmethod
    def of(cls, its: RemoteParent) -> Remote:
        """Return the parent as it is written."""
        ids = f"{its.trace_id:032x}", f"{its.span_id:016x}"
        return cls(*ids, its.flags, its.is_local, its.is_local and its.in_server_span)

    def parent(self) -> RemoteParent:
        """Return the parent as it was before it was written."""
        ids = int(self.trace_id, 16), int(self.span_id, 16)
        return RemoteParent(*ids, self.flags, self.is_local, self.in_server_span)


Number = Int64 | UnsetType


class Arguments(msgspec.Struct, gc=False):
    """The arguments of a slice of ours: of a span, or with `owner` of a device interval of that span.

    A number that follows from other slices is left out. The order of fields is that of the file.
    """

    thread: Number = UNSET
    lane: Number = UNSET
    kind: str | UnsetType = UNSET
    site: Number = UNSET
    code: str | UnsetType = UNSET
    id: Number = UNSET
    root: Number = UNSET
    parent: Number = UNSET
    own_id: Number = UNSET
    task: Number = UNSET
    self_ns: Number = UNSET
    active_ns: Number = UNSET
    error: str | UnsetType | None = UNSET
    clipped: bool | UnsetType = UNSET
    remote: Remote | UnsetType | None = UNSET
    attributes: msgspec.Raw | UnsetType = UNSET
    device: Number = UNSET
    stream: Number = UNSET
    enclosing_stream: Number = UNSET
    label: str | UnsetType = UNSET
    uncertainty_ns: Number = UNSET
    place: Number = UNSET
    owner: Number = UNSET


_decode_arguments = msgspec.json.Decoder(list[Arguments]).decode
_decode = msgspec.json.Decoder(list[TraceEvent]).decode
_decode_exact = msgspec.json.Decoder(list[ExactEvent]).decode


def decoded_arguments(texts: Sequence[bytes | msgspec.Raw]) -> list[Arguments]:
    """Return the arguments of slices of ours. Raises for texts that are none."""
    return _decode_arguments(b"[%b]" % b",".join(texts))


def times_ns(times_us: Sequence[Any], limit_ns: int) -> NDArray[np.int64]:
    """Return microseconds as nanoseconds, exact for three decimals, as `nanoseconds` has them.

    Raises for those of `limit_ns` and beyond.
    """
    kinds = set(map(type, times_us))
    if not kinds <= {float, int, Decimal}:
        for time in times_us:
            checked(time, float, int)
    if Decimal not in kinds:
        times = np.array(times_us, dtype=np.float64)
        if not len(times) or np.abs(times).max() < EXACT_US:
            return np.asarray(np.rint(times * 1000).astype(np.int64))
    found = list(map(nanoseconds, times_us))
    if not -limit_ns < min(found) <= max(found) < limit_ns:
        raise ValueError("it has a time that no clock reads; write times relative to the start")
    return np.array(found, dtype=np.int64)


# Damaged events

FARTHEST_US = 1 << 52
"""Microseconds that no clock reads."""

LONGEST_TIME = 64
"""Characters of a number that may be a time."""

_ESCAPE = re.compile(
    rb"(\\(?:[\"\\/bfnrt]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}))"
    rb"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|(\\)"
)
_decode_one = msgspec.json.Decoder(TraceEvent).decode
_decode_any = json.JSONDecoder(strict=False).decode
"""JSON in which texts may have line ends and other control characters."""


def next_events(text: JsonText, first: int) -> list[TraceEvent]:
    """Return the events of a list that come next: as many as are at hand. `first` is the number of the first."""
    events, found = text.values(_decode, b"}")
    if events is None:
        return _mended_events(found, first, text.left_out)
    if any(type(time) is float and abs(time) >= EXACT_US for one in events for time in (one.ts, one.dur)):
        with suppress(msgspec.MsgspecError):  # a time in it is none
            return [*_decode_exact(b"[%b]" % found)]
    return events


def _mended_events(found: bytes, first: int, left_out: LeftOut) -> list[TraceEvent]:
    """Return the events of a text in which not all are sound. One that is none is void."""
    events: list[TraceEvent] = []
    for chunk, is_whole in _chunks(found):
        number = first + len(events)
        try:
            events.append(_decode_one(chunk))
            continue
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
        events.append((_mended(chunk, number, left_out) if is_whole else None) or TraceEvent())
        if not is_whole:
            left_out.add("events that are cut off", f"event {number}")
    return events


def _chunks(found: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield the text of each event, and True where the event has an end. Text between two events counts as an event."""
    begin = 0
    for end in ends_of_values(found):
        opening = min(at for mark in b"{[" if (at := found.find(mark, begin)) >= 0)
        yield from ((one, True) for one in found[begin:opening].split(b",") if one.strip())
        yield found[opening:end], True
        begin = end
    if rest := found[begin:].strip(b", \t\r\n"):
        yield rest, False


def _mended(chunk: bytes, number: int, left_out: LeftOut) -> TraceEvent | None:
    place = f"event {number}"
    try:
        found = _decode_any(_with_sound_escapes(chunk).decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        left_out.add("events that are no JSON", place)
        return None
    if not isinstance(found, dict):
        left_out.add("events that are no object", place)
        return None
    if not isinstance(found.get("ph", ""), str):
        left_out.add("events without a phase", place)
        return None
    its = {key: found[key] for key in ("ph", "ts", "dur", "id", "id2") if key in found}
    its |= {key: text_of(found[key]) for key in ("cat", "name") if key in found}
    its |= {key: lane_of(found[key]) for key in ("pid", "tid") if key in found}
    args = found.get("args", {})
    return TraceEvent(**its, args=msgspec.Raw(written(args)) if isinstance(args, dict) else msgspec.Raw(b"0"))


def _with_sound_escapes(text: bytes) -> bytes:
    """Return the text in which a backslash that escapes nothing is one, and half of a character is a mark for that."""
    return _ESCAPE.sub(lambda known: known[1] or (rb"\\" if known[2] else rb"\ufffd"), text)


# Slices


def fault_of(event: TraceEvent, left_out: LeftOut, number: int) -> str:
    """Return why a slice is left out, "" for one that has a time. Its other parts that are not sound are left out."""
    start_us = event.ts = _time(event.ts)
    if start_us is None:
        return "slices without a time"
    if event.ph == "X":
        length_us = event.dur = _time(event.dur)
        if length_us is None or length_us < 0:
            return f"slices of {'no' if length_us is None else 'a negative'} length"
        if float(start_us) + float(length_us) >= FARTHEST_US:
            return "slices that end later than any clock reads"
    args = bytes(event.args)
    if args[:1] != b"{":
        if args != b"null":
            left_out.add("arguments of events that are no object", f"event {number}")
        event.args = NO_ARGUMENTS
    return ""


def _time(value: Any) -> Any:
    """Return a time in microseconds, also where it is a text; None for what no clock reads."""
    if type(value) is float and -FARTHEST_US < value < FARTHEST_US:
        return value
    if isinstance(value, str):
        try:
            value = Decimal(value) if len(value) <= LONGEST_TIME else None
        except InvalidOperation:
            return None
    try:
        return value if type(value) in (int, float, Decimal) and abs(float(value)) < FARTHEST_US else None
    except OverflowError:
        return None


def text_of(value: Any) -> str | None:
    """Return a name or a category, which some write as a number."""
    if value is None or isinstance(value, str):
        return value
    return written({"": value})[4:-1].decode("utf-8", "replace")


def lane_of(value: Any) -> int | str | None:
    """Return the number or the name of a process or a thread."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        return int(value) if -INT64 <= value < INT64 else f"{value:x}"[:40]
    return text_of(value)
