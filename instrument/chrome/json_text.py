"""JSON text from a file, taken value by value or many values at once, so that one block of it is in memory."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from instrument.trace.text import LIMIT_VALUE

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
    """JSON text of which `read` returns the next bytes; more than `limit_bytes` in all are refused.

    Bytes that are no UTF-8 are replaced, and counted in `left_out`.
    """

    def __init__(self, read: Callable[[int], bytes], limit_bytes: int) -> None:
        self._read, self._limit_bytes, self._seen_bytes = read, limit_bytes, 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode = json.JSONDecoder(strict=False).raw_decode
        self.left_out = LeftOut()
        self._text = b""
        self._at = self._passed = 0

    def refuse_beyond_limit(self, size_bytes: int) -> None:
        """Raise if a text of this size is more than may be read."""
        if size_bytes > self._limit_bytes:
            raise ValueError(f"it holds more than {self._limit_bytes} bytes of text; record less, or raise limit_bytes")

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
            what = f"{found!r} stands" if found else "it ends"
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
        if block.isascii() and not self._utf8.getstate()[0]:
            return block
        text = self._utf8.decode(block, final=not block)
        found = text.encode()
        replaced = found.count(_REPLACED) - block.count(_REPLACED)
        if replaced > 0:
            self.left_out.add("characters that are no UTF-8", f"byte {self.passed}", replaced)
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
