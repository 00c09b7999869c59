"""The text of a Chrome trace: values as strict JSON on the way out, taken one by one and checked on the way in."""

from __future__ import annotations

import codecs
import json
import math
import numbers
import re
from collections.abc import Callable, Sequence
from typing import Any

INT64 = 1 << 63
"""The first number beyond those of 64 bits, which is as far as viewers go."""

MILLI = tuple(f".{thousandths:03d}" for thousandths in range(1000))
"""The decimals of a time in microseconds, by nanoseconds."""

# What bounds the memory that a hostile file can ask for: characters of one value, microseconds of a time (ns since
# 1970 still are in int64).
LIMIT_VALUE, LIMIT_US = 128 << 20, 1 << 53

LIMIT_SPANS = 10_000_000
"""More slices of a kind are in no file that may be read."""

BLOCK_BYTES = 1 << 17
"""How much is read at a time: as much as a heap gives back and takes again without the kernel, which 1 MiB is not."""

MOST_EVENTS = 4096
"""Characters that are more than most events have: where fewer are at hand, the end of one may still have to be read."""

encode: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""The JSON of a value that is `safe`."""

LONGEST_WORD = 9
"""Characters of `-Infinity`, beyond which more text does not make a word of what is none."""

_BLANKS = re.compile(r"[ \t\n\r]*")

_GOES_ON = re.compile(r"(?:\.|[eE][+-]?)?\Z")
"""What follows a number at the end of the text at hand, if it may go on behind it."""


# Out


def clean(text: str) -> str:
    """The text without lone surrogates, which UTF-8 does not have."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def safe(value: object, depth: int = 0) -> Any:
    """The value as strict JSON and viewers take it. It never fails and runs no code of a foreign type: a tensor
    asked for its text would wait for the device and show what must not leave."""
    if isinstance(value, str):
        return clean(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Real):
        return _safe_number(value)
    if isinstance(value, (list, tuple)) and depth < 4:
        return [safe(item, depth + 1) for item in value]
    if isinstance(value, dict) and depth < 4:
        return {clean(key): safe(item, depth + 1) for key, item in value.items() if isinstance(key, str)}
    return _type_name(value)


def _safe_number(value: numbers.Real) -> int | float | str:
    """The number, or its text if JSON or int64 does not have it."""
    try:
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
    except (ArithmeticError, TypeError, ValueError):
        return _type_name(value)
    if isinstance(number, float):
        return number if math.isfinite(number) else str(number)
    if -INT64 <= number < INT64:
        return number
    return str(number) if number.bit_length() <= 4096 else f"<int of {number.bit_length()} bits>"


def _type_name(value: object) -> str:
    return f"<{clean(type(value).__name__)}>"


def is_number(value: float | None) -> bool:
    """Whether JSON and int64 have the value."""
    return value is not None and math.isfinite(value) and (not isinstance(value, int) or -INT64 <= value < INT64)


def microseconds(time_ns: int) -> str:
    """Nanoseconds as microseconds with three decimals, exactly."""
    return f"{time_ns // 1000}{MILLI[time_ns % 1000]}"


# In


def nanoseconds(time_us: object) -> int:
    """Microseconds as nanoseconds, exact for three decimals."""
    time: float = checked(time_us, float, int)
    if not -LIMIT_US < time < LIMIT_US:
        raise ValueError(f"it has {time} for a time in microseconds; write times relative to the start")
    return round(time * 1000)


def end_of(start_ns: int, end_ns: int) -> int:
    """The end of a slice, which must not lie before its start."""
    if end_ns < start_ns:
        raise ValueError("a slice in it ends before it starts; it is damaged")
    return end_ns


def checked(value: object, *kinds: type) -> Any:
    """The value, which must be of just one of these types, and no whole number beyond int64."""
    if type(value) not in kinds or (isinstance(value, int) and not -INT64 <= value < INT64):
        raise ValueError(f"it has {value!r:.40} where {kinds[0].__name__} belongs; give a Chrome trace in JSON")
    return value


def whole(values: Sequence[Any]) -> Sequence[int]:
    """The values, which must be whole numbers of 64 bits: those of one object, or of a few, in a third of the time."""
    if set(map(type, values)) != {int} or not -INT64 <= min(values) <= max(values) < INT64:
        return [checked(value, int) for value in values]
    return values


def index(value: object) -> int:
    """A place in a list, which must not count from the end."""
    place: int = checked(value, int)
    if place < 0:
        raise ValueError(f"it has {place} for a place in a list; it is damaged")
    return place


class Json:
    """JSON text that is taken value by value, so that one value and one block of it are in memory.

    `read` returns the next bytes, about as many as asked for; more than `limit_bytes` in all are refused.
    """

    def __init__(self, read: Callable[[int], bytes], limit_bytes: int) -> None:
        self._read = read
        self._limit_bytes = limit_bytes
        self._seen_bytes = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._decode = json.JSONDecoder(parse_constant=_refuse_constant).raw_decode
        self._text = ""
        self._at = 0
        self._passed = 0

    def refuse_beyond_limit(self, size_bytes: int) -> None:
        """Raise if a text of this size is more than may be read."""
        if size_bytes > self._limit_bytes:
            raise ValueError(f"it holds more than {self._limit_bytes} bytes of text; record less, or raise limit_bytes")

    @property
    def passed(self) -> int:
        """How many characters have been taken."""
        return self._passed + self._at

    def peek(self) -> str:
        """The next character that is not blank, or "" at the end."""
        while True:
            blanks = _BLANKS.match(self._text, self._at)
            self._at = blanks.end() if blanks else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def take(self, expected: str) -> str:
        """Pass over the next character that is not blank, which must be one of those expected."""
        found = self.peek()
        if not found or found not in expected:
            what = f"{found!r} stands" if found else "it ends"
            raise self._wrong(f"{what} where one of {expected} belongs", 0)
        self._at += 1
        return found

    def value(self) -> Any:
        """The next value."""
        self.peek()
        if self._at > len(self._text) - self._at:
            self._drop()  # an error counts the lines of all the text before it, at the end of each block
        failed_at = -1
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except json.JSONDecodeError as problem:
                # Cut off by the block's end, or wrong: with more text the first kind fails elsewhere or not at all.
                at = problem.pos - self._at
                is_told = at == failed_at and len(self._text) - problem.pos >= LONGEST_WORD
                if (is_told and not problem.msg.startswith("Unterminated")) or not self._more():
                    raise self._wrong(problem.msg, at) from problem
                failed_at = at
                continue
            length = end - self._at
            # A number may go on in the next block.
            is_cut = not isinstance(value, (dict, list, str)) and _GOES_ON.match(self._text, end)
            if not is_cut or not self._more():
                self._at += length
                return value

    def advance(self, scan: Callable[[str, int], int]) -> bool:
        """Let `scan` take values of the text at hand: it gets that and the place, and returns the place after them."""
        self.peek()
        if len(self._text) - self._at < MOST_EVENTS:
            self._more()
        before, self._at = self._at, scan(self._text, self._at)
        return self._at > before

    def _more(self) -> bool:
        """Read on, the further the longer the value at hand is already; False at the end of the text."""
        held = len(self._text) - self._at
        if held > LIMIT_VALUE:
            raise ValueError("one value in it is longer than in any trace; give a Chrome trace in JSON")
        block = self._read(max(BLOCK_BYTES, held))
        self._seen_bytes += len(block)
        self.refuse_beyond_limit(self._seen_bytes)
        self._drop()
        self._text += self._utf8.decode(block, final=not block)
        return bool(block)

    def _drop(self) -> None:
        """Let go of the text that has been taken."""
        self._passed += self._at
        self._text = self._text[self._at :]
        self._at = 0

    def _wrong(self, why: str, further: int) -> ValueError:
        at = self._passed + self._at + further
        return ValueError(f"it is no JSON, or cut off ({why}, at character {at}); write or copy it again")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}, which is not JSON; write it with finite numbers")
