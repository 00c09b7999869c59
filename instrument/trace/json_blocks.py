"""JSON text from a file, taken value by value or many values at once, so that one block of it is in memory.

Where values end is found by brackets alone, with arrays over the block: who takes many at once decodes them, and what
is no JSON fails there.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.trace.text import LIMIT_VALUE, checked

BLOCK_BYTES = PIECE_BYTES = 1 << 17
"""How much is read, and looked through, at a time: as much as a heap gives back and takes again without the kernel,
which 1 MiB is not."""

DEEPEST = 900
"""More brackets lie in one another in no trace."""

_BLANKS = re.compile(rb"[ \t\n\r]*")
_WORD = re.compile(rb'[^\s"{}\[\],:]*')
_QUOTE_OR_ESCAPE = re.compile(rb'["\\]')
_REPLACED = "\ufffd".encode()
_QUOTE, _BACKSLASH = b'"\\'
_MARKS = bytes(mark in b'"[]{}' for mark in range(256))
"""Of each byte whether it is a quote or a bracket."""

_STEPS = np.array([(mark in b"[{") - (mark in b"]}") for mark in range(256)], dtype=np.int8)
"""By how much each byte goes deeper."""


class LeftOut:
    """The parts of a file that were left out or changed: a count for each reason, and the place of the first."""

    def __init__(self) -> None:
        self._found: dict[str, list[Any]] = {}

    def add(self, what: str, place: str, count: int = 1) -> None:
        """Count something that is left out."""
        self._found.setdefault(what, [0, place])[0] += count

    def losses(self) -> dict[str, int]:
        """The numbers by reason and place of the first."""
        return {f"{what}, the first at {place}": count for what, (count, place) in self._found.items()}


class Json:
    """JSON text that is taken value by value, or many at once, so that one block of it is in memory.

    `read` returns the next bytes, about as many as asked for; more than `limit_bytes` in all are refused. What is no
    UTF-8 is replaced, and counted in `left_out`.
    """

    def __init__(self, read: Callable[[int], bytes], limit_bytes: int) -> None:
        self._read = read
        self._limit_bytes = limit_bytes
        self._seen_bytes = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode = json.JSONDecoder(strict=False).raw_decode
        self.left_out = LeftOut()
        self._text = b""
        self._at = 0
        self._passed = 0

    def refuse_beyond_limit(self, size_bytes: int) -> None:
        """Raise if a text of this size is more than may be read."""
        if size_bytes > self._limit_bytes:
            raise ValueError(f"it holds more than {self._limit_bytes} bytes of text; record less, or raise limit_bytes")

    @property
    def passed(self) -> int:
        """How many bytes have been taken."""
        return self._passed + self._at

    def peek(self) -> str:
        """The next character that is not blank, or "" at the end."""
        while True:
            blanks = _BLANKS.match(self._text, self._at)
            self._at = blanks.end() if blanks else self._at
            if self._at < len(self._text):
                return chr(self._text[self._at])
            if not self._more():
                return ""

    def begins_with_mark(self) -> bool:
        """Whether a byte order mark comes next."""
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
        """The next value."""
        length = self._length_of_brackets(only_one=True) if self.peek() in ("{", "[") else self._length_of_scalar()
        value = self.decoded(self._text[self._at : self._at + length], self.passed)
        self._at += length
        return value

    def values(self, opening: str) -> bytes:
        """The text of the next values of a list, with the commas between them: as many as are at hand, one at least.

        Each begins with the bracket `opening`, or is something wrong.
        """
        if self.peek() != opening:
            checked(self.value(), dict if opening == "{" else list)
        if len(self._text) - self._at < BLOCK_BYTES:
            self._more()
        length = self._length_of_brackets(only_one=False)
        text = self._text[self._at : self._at + length]
        self._at += length
        return text

    def decoded(self, text: bytes, since: int) -> Any:
        """The value of a text that began after so many bytes. Raises `ValueError` for what is none."""
        found = text.decode()
        try:
            value, end = self._decode(found, 0)
        except json.JSONDecodeError as problem:
            raise self._wrong(problem.msg, since + problem.pos) from problem
        if end < len(found):
            raise self._wrong("something stands behind a value", since + end)
        return value

    def _length_of_brackets(self, *, only_one: bool) -> int:
        """How long the first of the values at hand is, which are in brackets, or several of them; of one that is cut
        off all there is."""
        depths, length = Depths(), 0
        while True:
            piece = self._text[self._at + length : self._at + length + PIECE_BYTES]
            places, depth = depths.follow(piece)
            ends = np.flatnonzero(depth <= 0)
            if len(ends):
                outside = np.flatnonzero(depth < 0)
                within = len(ends) if not len(outside) else int(np.searchsorted(ends, outside[0]))
                if within:
                    return length + int(places[ends[0 if only_one else within - 1]]) + 1
                return length + int(places[outside[0]])  # which ends what is around
            length += len(piece)
            if self._at + length == len(self._text) and not self._more():
                return length

    def _length_of_scalar(self) -> int:
        """How long the next text, number or word is; of one that is cut off all there is."""
        while True:
            if self._text[self._at : self._at + 1] == b'"':
                end = self._end_of_string()
            else:
                found = _WORD.match(self._text, self._at)
                end = found.end() if found and found.end() < len(self._text) else -1
            if end >= 0 or not self._more():
                return end - self._at if end >= 0 else self._held

    def _end_of_string(self) -> int:
        """The place behind the string that begins here, -1 for one that goes on."""
        at = self._at + 1
        while found := _QUOTE_OR_ESCAPE.search(self._text, at):
            if found[0] == b'"':
                return found.end()
            at = found.start() + 2
        return -1

    @property
    def _held(self) -> int:
        return len(self._text) - self._at

    def _more(self) -> bool:
        """Read on, the further the longer the value at hand is already; False at the end of the text."""
        held = self._held
        if held > LIMIT_VALUE:
            raise ValueError("one value in it is longer than in any trace; give a Chrome trace in JSON")
        block = self._read(max(BLOCK_BYTES, held))
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


class Depths:
    """How deep brackets lie in one another, followed from the begin of a value through pieces of its text."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = False
        self._is_escaped = False

    def follow(self, piece: bytes) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The places of the brackets in a piece that are in no text, and how deep it is behind each."""
        data = np.frombuffer(piece, np.uint8)
        places = np.flatnonzero(np.frombuffer(piece.translate(_MARKS), np.bool_))
        kinds = data[places]
        if self._is_escaped or b"\\" in piece:
            kept = ~self._escaped(data)[places]
            places, kinds = places[kept], kinds[kept]
        is_quote = kinds == _QUOTE
        in_text = np.cumsum(is_quote, dtype=np.int32) + self._in_text & 1
        self._in_text = bool(in_text[-1]) if len(in_text) else self._in_text
        is_bracket = ~is_quote & (in_text == 0)
        depth = np.cumsum(_STEPS[kinds[is_bracket]], dtype=np.int32) + np.int32(self._depth)
        if len(depth):
            self._depth = int(depth[-1])
            if depth.max() > DEEPEST:
                raise RecursionError("brackets in it")
        return places[is_bracket], depth

    def _escaped(self, data: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Which characters a backslash stands before that is not escaped itself."""
        slashes = np.concatenate(([self._is_escaped], data == _BACKSLASH))
        numbers = np.arange(len(slashes), dtype=np.int32)
        # Of those that stand in a row, every second is escaped by the one before it.
        first = np.maximum.accumulate(np.where(slashes, 0, numbers + 1))
        escapes = slashes & ((numbers - first) % 2 == 0)
        self._is_escaped = bool(escapes[-1])
        return np.asarray(escapes[:-1])
