"""Decodes the events of a Chrome trace file block by block, and repairs damaged events."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cached_property
from itertools import compress, islice
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from instrument.chrome.slice_arguments import EXACT_US, Arguments, Int64
from instrument.trace.text import INT64, LIMIT_VALUE, attributes_to_json, convert_to_ns

# Text

BLOCK_BYTES = 1 << 18

DEEPEST = 900
"""The maximum depth of nested JSON brackets that is read."""

MOST_TRIES = 4
"""The maximum number of attempts to decode the values read so far. Each attempt ends at an earlier bracket."""

FIRST_BYTES, CUT_BYTES = 1 << 10, 16
"""The number of bytes to decode first. In the last `CUT_BYTES` bytes, a token may be incomplete."""

DELIMITERS = frozenset(",:]} \t\n\r")

_BLANKS = re.compile(rb"[ \t\n\r]*")
_NEXT_VALUE = re.compile(rb"[ \t\n\r]*(?:,[ \t\n\r]*(?:\{|$)|\]|$)")
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*("?)|[\[\]{}]', re.DOTALL)
_REPLACED = "\ufffd".encode()

Value = TypeVar("Value")


class LeftOut:
    """Counts the damaged or unsupported parts of a file that reading has left out or changed."""

    def __init__(self) -> None:
        self._found: dict[str, list[Any]] = {}

    def count_omission(self, reason: str, place: str, count: int = 1) -> None:
        """Count an omission. Only the first place in the file is stored for each reason."""
        self._found.setdefault(reason, [0, place])[0] += count

    def losses(self) -> dict[str, int]:
        return {f"{reason}, the first at {place}": count for reason, (count, place) in self._found.items()}


class JsonText:
    """A JSON text that is read in blocks. Invalid UTF-8 is replaced and counted.

    - `read`: returns up to the given number of bytes of the text
    - `limit_bytes`: the maximum size of the text. A longer text raises `ValueError`
    - `unpacked_bytes`: the maximum size in proportion to the packed file. A longer text also raises `ValueError`
    """

    def __init__(self, read: Callable[[int], bytes], limit_bytes: int, unpacked_bytes: int) -> None:
        self._read, self._limit_bytes, self._unpacked_bytes, self._seen_bytes = read, limit_bytes, unpacked_bytes, 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode = json.JSONDecoder(strict=False).raw_decode
        self.left_out = LeftOut()
        self._text = b""
        self._at = self._passed = 0

    def refuse_large_text(self, size_bytes: int) -> None:
        if size_bytes > self._limit_bytes:
            raise ValueError(f"it holds more than {self._limit_bytes} bytes of text; record less, or raise limit_bytes")

        if size_bytes > self._unpacked_bytes:
            raise ValueError("it unpacks to more than 100 times its size; if you trust it, unpack it first")

    @property
    def bytes_read(self) -> int:
        return self._passed + self._at

    def peek_character(self) -> str:
        """Return the next character that is not blank, without consuming it. Return an empty string at the end of the
        text."""
        while True:
            blanks = _BLANKS.match(self._text, self._at)
            self._at = blanks.end() if blanks else self._at
            if self._at < len(self._text):
                return chr(self._text[self._at])
            if not self._read_block():
                return ""

    def begins_with_bom(self) -> bool:
        self.peek_character()
        return self._text.startswith(codecs.BOM_UTF8, self._at)

    def take_character(self, expected: str) -> str:
        mark = self.peek_character()
        if not mark or mark not in expected:
            problem = f"{mark!r} comes" if mark else "it ends"
            raise self._make_syntax_error(f"{problem} where one of {expected} belongs", self.bytes_read)
        self._at += 1
        return mark

    def take_value(self) -> Any:
        self.peek_character()
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
            elif not (may_go_on and self._read_block()):
                break
        if error is not None:
            raise self._make_syntax_error(error.msg, self.bytes_read + end) from error
        self._at += len(text[:end].encode())
        return value

    def take_json_values(self, decode: Callable[[bytes], Value], closing: bytes) -> tuple[Value | None, bytes]:
        """Read the next values of a JSON list. Return the decoded values and the text. Return None and the text if the
        text is damaged."""
        if len(self._text) - self._at < BLOCK_BYTES:
            self._read_block()
        while True:
            for end in islice(self._find_value_ends(closing), MOST_TRIES):
                text = self._text[self._at : end]
                try:
                    values = decode(b"[%b]" % text)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    continue
                self._at += len(text)
                return values, text
            length = max(find_value_ends(memoryview(self._text)[self._at :]), default=0)
            if length or not self._read_block():
                text = self._text[self._at : self._at + length] if length else self._text[self._at :]
                self._at += len(text)
                return None, text

    def _find_value_ends(self, closing: bytes) -> Iterator[int]:
        """Yield positions at which a value probably ends, the last position first."""
        end = len(self._text)
        while (end := self._text.rfind(closing, self._at, end)) >= 0:
            if _NEXT_VALUE.match(self._text, end + 1):
                yield end + 1

    def _read_block(self) -> bool:
        size = len(self._text) - self._at
        if size > LIMIT_VALUE:
            raise ValueError("a value in it is too long; give a Chrome trace in JSON")
        block = self._read(max(BLOCK_BYTES, size))
        self._seen_bytes += len(block)
        self.refuse_large_text(self._seen_bytes)
        self._passed += self._at
        self._text = self._text[self._at :] + self._replace_invalid_utf8(block)
        self._at = 0
        return bool(block)

    def _replace_invalid_utf8(self, block: bytes) -> bytes:
        cut = self._utf8.getstate()[0]
        if block.isascii() and not cut:
            return block
        text = self._utf8.decode(block, final=not block)
        encoded = text.encode()
        replaced = encoded.count(_REPLACED) - block.count(_REPLACED)
        if replaced > 0:
            try:
                (cut + block).decode()
            except UnicodeDecodeError as error:
                place = f"byte {self._seen_bytes - len(cut) - len(block) + error.start}"
                self.left_out.count_omission("characters that are no UTF-8", place, replaced)
        return encoded

    def _make_syntax_error(self, why: str, at: int) -> ValueError:
        return ValueError(f"it is no JSON, or cut off ({why}, at character {at}); write or copy it again")


def find_value_ends(text: bytes | memoryview) -> Iterator[int]:
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

NO_ARGUMENTS = msgspec.Raw(b"{}")

Scalar = int | str | float | bool | None


class ScopedId(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The id of an async slice, which is either local to a process or global."""

    local: Scalar = None
    of_all: Scalar = msgspec.field(default=None, name="global")


class TraceEvent(msgspec.Struct, gc=False):
    ph: str = ""
    ts: Any = None
    dur: Any = None
    pid: Scalar = None
    tid: Scalar = None
    cat: Scalar = None
    name: Scalar = None
    id: Scalar = None
    id2: ScopedId | Scalar = None
    args: msgspec.Raw = NO_ARGUMENTS


class TimedEvent(TraceEvent, gc=False):
    """An event whose times are floats. A missing time is NaN."""

    ts: float = np.nan
    dur: float = np.nan


class ExactEvent(TraceEvent, gc=False):
    """An event with times so large that floats are not exact to the nanosecond."""

    ts: Decimal | None = None
    dur: Decimal | None = None


class NoArguments(msgspec.Struct, gc=False, frozen=True):
    """The arguments of an event that has none."""


SomeArguments = TypeVar("SomeArguments")
_NOT_GIVEN: Any = NoArguments()


class OwnId(msgspec.Struct, frozen=True, gc=False):
    """The id of an async slice, which is unique in the file."""

    local: Scalar = None


class OwnEvent(msgspec.Struct, Generic[SomeArguments], gc=False):
    """An event of a file that `dump` has written. Samples have another class. `SomeArguments` has some fields of
    `Arguments`."""

    ph: Literal["X", "b", "e", "n", "s", "f", "M"]
    ts: float = np.nan
    dur: float = np.nan
    pid: Int64 | None = None
    tid: Int64 | None = None
    id2: OwnId | None = None
    args: SomeArguments = _NOT_GIVEN


class OwnDecoder:
    """Decodes the events of a file that `dump` has written.

    The decoder knows only the fields of arguments that have occurred in the file, because each known field slows down
    the decoding of every event.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._decode_seen = self._make_decoder()

    def decode(self, text: bytes) -> list[Any]:
        try:
            return self._decode_seen(text)
        except msgspec.ValidationError:  # further fields, samples, or damaged events
            pass
        try:
            events = _decode_own(text)
        except msgspec.ValidationError:
            return _decode_foreign_events(text)
        names = {
            field.name
            for field in _FIELDS
            if any(getattr(event.args, field.name, field.default) != field.default for event in events)
        }
        if not names <= self._names:
            self._names |= names
            self._decode_seen = self._make_decoder()
        return events

    def _make_decoder(self) -> Callable[[bytes], list[Any]]:
        fields = [(field.name, field.type, field.default) for field in _FIELDS if field.name in self._names]
        arguments_type = msgspec.defstruct("SeenArguments", fields, gc=False, frozen=True, forbid_unknown_fields=True)
        return msgspec.json.Decoder(list[OwnEvent[arguments_type]]).decode  # type: ignore[valid-type]


_FIELDS = msgspec.structs.fields(Arguments)
_decode_arguments = msgspec.json.Decoder(list[Arguments]).decode
_decode_own = msgspec.json.Decoder(list[OwnEvent[Arguments]]).decode
_decode_timed = msgspec.json.Decoder(list[TimedEvent]).decode
_decode_any_times = msgspec.json.Decoder(list[TraceEvent]).decode
_decode_exact = msgspec.json.Decoder(list[ExactEvent]).decode


def convert_times_to_ns(times_us: Sequence[Any], limit_ns: int) -> NDArray[np.int64]:
    """Convert microseconds to nanoseconds, exactly if they have up to three decimals. Raises `ValueError` for a time of
    `limit_ns` or more."""
    if Decimal not in set(map(type, times_us)):
        times = np.array(times_us, dtype=np.float64)
        if not len(times) or np.abs(times).max() < EXACT_US:
            return np.asarray(np.rint(times * 1000).astype(np.int64))
    numbers = list(map(convert_to_ns, times_us))
    if not -limit_ns < min(numbers) <= max(numbers) < limit_ns:
        raise ValueError("it has a time out of range; write times relative to the start")
    return np.array(numbers, dtype=np.int64)


# Damaged events

FARTHEST_US = 1 << 52
"""The limit of event times in microseconds. Times at or above it are invalid."""

LONGEST_TIME = 64
"""The maximum number of characters of a time that is written as text."""

_ESCAPE = re.compile(
    rb"(\\(?:[\"\\/bfnrt]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}))"
    rb"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|(\\)"
)
_decode_one = msgspec.json.Decoder(TraceEvent).decode
_decode_any = json.JSONDecoder(strict=False).decode
"""Decode JSON, including strings with unescaped line ends and other control characters."""


class EventBatch(NamedTuple):
    """Successive events of a file. `times_us` has arrays of `ts` and `dur` if all times are floats, otherwise None."""

    events: Sequence[Any]
    times_us: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None


def read_next_events(text: JsonText, first: int, decode_own: Callable[[bytes], list[Any]] | None) -> EventBatch:
    """Read the next events of a file. `decode_own` decodes the events of a file that `dump` has written."""
    events, raw = text.take_json_values(decode_own or _decode_foreign_events, b"}")
    if events is None:
        return EventBatch(_decode_damaged_events(raw, first, text.left_out))
    times_us = None
    if type(events[0]) is TraceEvent:
        are_far = any(
            type(time) in (int, float) and abs(time) >= EXACT_US for event in events for time in (event.ts, event.dur)
        )
    else:
        times = [event.ts for event in events], [event.dur for event in events]
        times_us = np.fromiter(times[0], np.float64, len(events)), np.fromiter(times[1], np.float64, len(events))
        are_far = any((np.abs(times) >= EXACT_US).any() for times in times_us)
    if are_far:
        with suppress(msgspec.MsgspecError):  # a time in it is invalid
            return EventBatch(_decode_exact(b"[%b]" % raw))
    return EventBatch(events, times_us)


def _decode_foreign_events(text: bytes) -> list[Any]:
    try:
        return _decode_timed(text)
    except msgspec.ValidationError:  # some times are no numbers
        return _decode_any_times(text)


def _decode_damaged_events(text: bytes, first: int, left_out: LeftOut) -> list[TraceEvent]:
    events: list[TraceEvent] = []
    for chunk, is_whole in _split_events(text):
        number = first + len(events)
        try:
            events.append(_decode_one(chunk))
            continue
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
        events.append((_repair_event(chunk, number, left_out) if is_whole else None) or TraceEvent())
        if not is_whole:
            left_out.count_omission("events that are cut off", f"event {number}")
    return events


def _split_events(text: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield the text of each event, and True if it is complete. Other text between two events is yielded like an
    event."""
    begin = 0
    for end in find_value_ends(text):
        opening = min(at for mark in b"{[" if (at := text.find(mark, begin)) >= 0)
        yield from ((part, True) for part in text[begin:opening].split(b",") if part.strip())
        yield text[opening:end], True
        begin = end
    if tail := text[begin:].strip(b", \t\r\n"):
        yield tail, False


def _repair_event(chunk: bytes, number: int, left_out: LeftOut) -> TraceEvent | None:
    place = f"event {number}"
    # Invalid escapes become backslashes, and lone surrogates become replacement characters.
    text = _ESCAPE.sub(lambda match: match[1] or (rb"\\" if match[2] else rb"\ufffd"), chunk)
    try:
        value = _decode_any(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        left_out.count_omission("events that are no JSON", place)
        return None
    if not isinstance(value, dict):
        left_out.count_omission("events that are no object", place)
        return None
    if not isinstance(value.get("ph", ""), str):
        left_out.count_omission("events without a phase", place)
        return None
    fields = {key: value[key] for key in ("ph", "ts", "dur") if key in value}
    fields |= {key: _parse_slice_id(value[key]) for key in ("id", "id2") if key in value}
    fields |= {key: convert_to_text(value[key]) for key in ("cat", "name") if key in value}
    fields |= {key: parse_lane_id(value[key]) for key in ("pid", "tid") if key in value}
    args = value.get("args", {})
    return TraceEvent(
        **fields, args=msgspec.Raw(attributes_to_json(args)) if isinstance(args, dict) else msgspec.Raw(b"0")
    )


def _parse_slice_id(value: Any) -> Any:
    try:
        return msgspec.convert(value, ScopedId | Scalar)
    except msgspec.ValidationError:
        return convert_to_text(value)


# Slices


LOWER_CASE = 0x20
"""The bit that distinguishes a lower-case letter. Chrome's phases of async slices are lower-case letters."""


@dataclass(frozen=True)
class Block:
    """Successive slices with their phases and times. `has_parts` is True if a time has a fraction of a nanosecond."""

    slices: Sequence[Any]
    phases: NDArray[np.uint8]
    start_ns: NDArray[np.int64]
    length_ns: NDArray[np.int64]
    has_parts: bool

    @cached_property
    def are_begins(self) -> NDArray[np.bool_]:
        return np.asarray(self.phases | LOWER_CASE != ord("e"))

    @cached_property
    def joined_arguments(self) -> bytes:
        """The arguments of all slices as text. Zero bytes separate them, because JSON has no zero bytes."""
        return b"\0".join([event.args for event in self.slices])

    def arguments(self) -> list[Arguments]:
        if self.slices and type(self.slices[0]) is OwnEvent:
            return [event.args for event in self.slices]
        return _decode_arguments(b"[%b]" % self.joined_arguments.replace(b"\0", b","))

    def select(self, are_chosen: NDArray[np.bool_]) -> Block:
        if are_chosen.all():
            return self
        slices = [*compress(self.slices, are_chosen.tolist())]
        times = self.start_ns[are_chosen], self.length_ns[are_chosen]
        return Block(slices, self.phases[are_chosen], *times, self.has_parts)


def make_block(slices: Sequence[Any], limit_ns: int) -> Block:
    times_us = [event.ts for event in slices], [event.dur if event.ph == "X" else 0 for event in slices]
    start_ns, length_ns = (convert_times_to_ns(times, limit_ns) for times in times_us)
    has_parts = any(map(_has_fractions_of_ns, times_us, (start_ns, length_ns)))
    return Block(slices, read_phases(slices), start_ns, length_ns, has_parts)


def make_valid_block(
    events: EventBatch, slices: Sequence[Any], phases: NDArray[np.uint8], are_slices: NDArray[np.bool_]
) -> Block | None:
    """Return a block of slices, or None if a slice may be invalid."""
    if events.times_us is None:
        return None
    phases, (starts, lengths) = phases[are_slices], (times[are_slices] for times in events.times_us)
    lengths[phases != ord("X")] = 0
    if not ((np.abs(starts) < EXACT_US) & (lengths >= 0) & (starts + lengths < EXACT_US)).all():
        return None
    start_ns, length_ns = (np.rint(times * 1000).astype(np.int64) for times in (starts, lengths))
    if slices and type(slices[0]) is OwnEvent:
        return Block(slices, phases, start_ns, length_ns, has_parts=False)
    has_parts = _has_fractions_of_ns(starts, start_ns) or _has_fractions_of_ns(lengths, length_ns)
    block = Block(slices, phases, start_ns, length_ns, has_parts)
    return block if (b"\0" + block.joined_arguments).count(b"\0{") == len(slices) else None


def read_phases(events: Sequence[Any]) -> NDArray[np.uint8]:
    """Return the phase letter of each event. A phase that is not one ASCII character becomes a blank."""
    phases = [event.ph for event in events]
    odd = {phase for phase in set(phases) if len(phase) != 1 or not phase.isascii()}
    text = "".join([" " if phase in odd else phase for phase in phases] if odd else phases)
    return np.frombuffer(text.encode(), np.uint8)


_PARTS_NS = 1e-3


def _has_fractions_of_ns(times_us: Sequence[Any] | NDArray[np.float64], rounded_ns: NDArray[np.int64]) -> bool:
    if not len(times_us) or type(times_us[0]) is Decimal:
        return any(type(time) is Decimal and time * 1000 % 1 for time in times_us)
    exact_ns = np.array(times_us, dtype=np.float64) * 1000
    return bool((np.abs(exact_ns - rounded_ns) > _PARTS_NS + np.abs(exact_ns) * np.finfo(np.float64).eps).any())


def has_valid_times(event: Any, left_out: LeftOut, number: int) -> bool:
    """Return True if the times of a slice are valid. Invalid slices are counted. Invalid arguments are counted and
    removed."""
    fault = ""
    event.ts, event.dur = _parse_time_us(event.ts), _parse_time_us(event.dur) if event.ph == "X" else 0
    if event.ts is None:
        fault = "slices without a time"
    elif event.dur is None or event.dur < 0:
        fault = f"slices of {'no' if event.dur is None else 'a negative'} length"
    elif event.ph == "X" and float(event.ts) + float(event.dur) >= FARTHEST_US:
        fault = "slices that end later than any clock reads"
    elif type(event) is not OwnEvent and bytes(event.args)[:1] != b"{":
        if bytes(event.args) != b"null":
            left_out.count_omission("arguments of events that are no object", f"event {number}")
        event.args = NO_ARGUMENTS
    if fault:
        left_out.count_omission(fault, f"event {number}")
    return not fault


def _parse_time_us(value: Any) -> Any:
    """Parse a time in microseconds, which may be a number or a text. Return None if it is invalid."""
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


def convert_to_text(value: Any) -> str | None:
    """Return a name or a category as text. Some writers use other types, which become JSON."""
    if value is None or isinstance(value, str):
        return value
    return attributes_to_json({"": value})[4:-1].decode("utf-8", "replace")


def parse_lane_id(value: Any) -> int | str | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        return int(value) if -INT64 <= value < INT64 else f"{value:x}"[:40]
    return convert_to_text(value)
