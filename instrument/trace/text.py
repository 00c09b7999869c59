"""Converts values and span attributes to strict JSON for files, and checks values that were read from files."""

from __future__ import annotations

import json
import math
import numbers
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from instrument.errors import TraceError
from instrument.recording.spans import AttributeValue
from instrument.trace.columns import Attributes, Bools, Int32s, Int64s
from instrument.trace.indices import NONE, append_numbers, find_distinct, make_mask, view_as_int64s

INT64 = 1 << 63

# Bounds for hostile files: the characters of one value, and the microseconds of a time, so that ns since 1970 fit into
# int64.
LIMIT_VALUE, LIMIT_US = 128 << 20, 1 << 53

LONGEST_PLAIN = 4_000
"""The size in bytes above which a JSON text is checked for numbers that Python refuses."""

LIMIT_BYTES = 2 << 30
"""The maximum number of bytes of text that `load` accepts by default."""

LIMIT_SPANS = 10_000_000
"""The maximum number of slices, of samples or of allocations that are read from a file."""

ROWS_AT_ONCE = 20_000
"""The maximum number of rows whose attributes are decoded at once, to bound the memory."""

encode: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""Encode a result of `make_json_value` as strict JSON."""

encode_numbers: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""Return the JSON of a value, with NaN and Infinity as Python's `json` writes them."""


# Out


def remove_surrogates(text: str) -> str:
    """Return the text without lone surrogates, which UTF-8 does not allow."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def make_json_value(value: object, depth: int = 0, *, finite: bool = True) -> Any:
    """Return a value that strict JSON and viewers accept. Without `finite`, infinities and NaN remain.

    Never fails, and runs no code of foreign types. `str` of a tensor would wait for the device and expose data.
    """
    if isinstance(value, str):
        return remove_surrogates(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Real):
        return _make_json_number(value, finite)
    if isinstance(value, (list, tuple)) and depth < 4:
        return [make_json_value(item, depth + 1, finite=finite) for item in value]
    if isinstance(value, dict) and depth < 4:
        items = ((key, item) for key, item in value.items() if isinstance(key, str))
        return {remove_surrogates(key): make_json_value(item, depth + 1, finite=finite) for key, item in items}
    return _type_name(value)


def _make_json_number(value: numbers.Real, finite: bool) -> int | float | str:
    """Return the number. Return its text if JSON or int64 cannot represent it."""
    try:
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
    except (ArithmeticError, TypeError, ValueError):
        return _type_name(value)
    if isinstance(number, float):
        return number if math.isfinite(number) or not finite else str(number)
    if -INT64 <= number < INT64:
        return number
    return str(number) if number.bit_length() <= 4096 else f"<int of {number.bit_length()} bits>"


def _type_name(value: object) -> str:
    return f"<{remove_surrogates(type(value).__name__)}>"


def is_json_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and (not isinstance(value, int) or -INT64 <= value < INT64)


# In


def convert_to_ns(time_us: object) -> int:
    """Convert microseconds to nanoseconds. Three decimals are exact. Raises `ValueError` beyond `LIMIT_US`."""
    time = time_us if type(time_us) is Decimal else check_type(time_us, float, int)
    if not -LIMIT_US < time < LIMIT_US:
        raise ValueError(f"it has {time} for a time in microseconds; write times relative to the start")
    return round(time * 1000)


def check_type(value: object, *kinds: type) -> Any:
    """Return the value. Raises `ValueError` for a type that is not in `kinds`, and for ints beyond int64."""
    if type(value) not in kinds or (isinstance(value, int) and not -INT64 <= value < INT64):
        raise ValueError(f"it has {value!r:.40} where {kinds[0].__name__} belongs; give a Chrome trace in JSON")
    return value


def check_ints(values: Sequence[Any]) -> Sequence[int]:
    """Return the values. Raises `ValueError` unless all are 64-bit ints."""
    if set(map(type, values)) != {int} or not -INT64 <= min(values) <= max(values) < INT64:
        return [check_type(value, int) for value in values]
    return values


def check_index(value: object) -> int:
    place: int = check_type(value, int)
    if place < 0:
        raise ValueError(f"it has {place} for a place in a list; it is damaged")
    return place


def encode_rows(attributes: Attributes, rows: Sequence[int], *, finite: bool = True) -> Iterator[str]:
    """Yield the JSON of each row's attributes. With `finite`, infinities and NaN become texts, which viewers can
    read."""
    for first in range(0, len(rows), ROWS_AT_ONCE):
        numbers, sets = attributes.distinct_sets(np.array(rows[first : first + ROWS_AT_ONCE], dtype=np.int64))
        texts = [encode_numbers(make_json_value(dict(distinct_set), finite=finite)) for distinct_set in sets]
        yield from map([*texts, "{}"].__getitem__, numbers.tolist())


# Unpacked

BYTES_AT_ONCE = 1 << 22


class TextSets:
    """Sets of attributes, stored as JSON and decoded on access. `ends` has the end of each set in `texts`."""

    def __init__(self, ends: Int64s, texts: bytes | bytearray) -> None:
        self._ends, self._texts = ends, texts

    def __len__(self) -> int:
        return len(self._ends)

    def _read_set_text(self, number: int) -> bytes:
        first = self._ends.item(number - 1) if number else 0
        return bytes(self._texts[first : self._ends.item(number)])

    def decode(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        return decode_json_texts(map(self._read_set_text, numbers))

    def values(self, name: str, numbers: Sequence[int]) -> list[AttributeValue | None]:
        return list(map(_make_value_reader(name), map(self._read_set_text, numbers)))

    def mask_sets_by_name(self, name: str) -> Bools:
        """Return True for each set with an attribute of this name. Flat JSON is searched as text, without decoding."""
        written, texts, ends = json.dumps(name, ensure_ascii=False).encode(), self._texts, self._ends
        at = np.fromiter((match.start() for match in re.finditer(re.escape(written) + rb"\s*:", texts)), np.int64)
        text_of_match = np.searchsorted(ends, at, side="right")
        numbers, braces = find_distinct(text_of_match), _find_byte(b"{", texts)
        firsts = np.where(numbers > 0, ends[numbers - 1], 0)
        are_flat = np.searchsorted(braces, ends[numbers]) - np.searchsorted(braces, firsts) == 1
        are_flat &= ~np.isin(numbers, text_of_match[np.frombuffer(texts, dtype=np.uint8)[at - 1] == ord("\\")])
        has = make_mask(numbers[are_flat], len(ends))
        has[numbers[~are_flat]] = [name in attributes for attributes in self.decode(numbers[~are_flat].tolist())]
        return has


def _find_byte(byte: bytes, texts: bytes | bytearray) -> Int64s:
    """Return the indices of a byte in the texts. The search works in chunks, to bound the memory."""
    every = np.frombuffer(texts, dtype=np.uint8)
    parts = [
        np.flatnonzero(every[first : first + BYTES_AT_ONCE] == ord(byte)) + first
        for first in range(0, len(every), BYTES_AT_ONCE)
    ]
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def decode_json_texts(texts: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the attributes in the given JSON texts, with lists as tuples. Raises `TraceError` if a text is no JSON
    object."""
    try:
        objects = json.loads(b"[%b]" % b",".join(texts))
    except ValueError as problem:
        raise TraceError(f"the attributes of its spans are damaged ({problem!s:.80}); record it again") from problem
    if not all(isinstance(attributes, dict) for attributes in objects):
        raise TraceError("its attributes are not valid; record it again")
    return [{key: convert_to_tuples(value) for key, value in attributes.items()} for attributes in objects]


@lru_cache(maxsize=64)
def _make_value_reader(name: str) -> Callable[[bytes], Any]:
    """Return a function that reads the value of one attribute from JSON, without making objects of other values."""

    def read_value(text: bytes) -> Any:
        try:
            return convert_to_tuples(decode(text).value)
        except msgspec.MsgspecError:  # JSON has no infinity, and attributes may
            return decode_json_texts([text])[0].get(name)

    try:
        only_value = msgspec.defstruct("Attributes", [("value", Any, None)], rename={"value": name})
    except ValueError:  # a name with quotes
        return lambda text: decode_json_texts([text])[0].get(name)
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(only_value).decode
    return read_value


def convert_to_tuples(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return tuple([convert_to_tuples(item) if isinstance(item, list) else item for item in value])


# Columns that grow


MOST_KNOWN = 10_000
"""The maximum number of distinct attribute texts that rows share. Any further text is stored once per row."""


class GatheredAttributes:
    """Collects the attributes of rows as JSON, with equal texts stored once. `refuse` raises an error for an invalid
    text."""

    def __init__(self, refuse: Callable[[bytes], None] | None = None) -> None:
        self._refuse = refuse
        self._known: dict[bytes, int] = {}
        self._texts = bytearray()
        self._ends = array("q")
        self._rows = array("q")
        self._numbers = array("q")

    def add(self, row: int, text: bytes) -> None:
        number = self._known.get(text)
        if number is None:
            if self._refuse is not None:
                self._refuse(text)
            number = len(self._ends)
            self._texts += text
            self._ends.append(len(self._texts))
            if number < MOST_KNOWN:
                self._known[text] = number
        self._rows.append(row)
        self._numbers.append(number)

    def add_all(self, rows: Sequence[int], texts: Sequence[bytes]) -> None:
        number = len(self._ends)
        append_numbers(self._ends, [*accumulate(map(len, texts), initial=len(self._texts))][1:])
        self._texts += b"".join(texts)
        append_numbers(self._rows, rows)
        append_numbers(self._numbers, range(number, number + len(rows)))

    def pack_attributes(self, rank: Int32s) -> Attributes:
        number = np.full(len(rank), NONE, dtype=np.int32)
        number[rank[view_as_int64s(self._rows)]] = view_as_int64s(self._numbers)
        return Attributes(number, [TextSets(view_as_int64s(self._ends), self._texts)])


def attributes_to_json(attributes: Mapping[str, object]) -> bytes:
    """Return attributes as JSON. Names are not escaped, because `TextSets.mask_sets_by_name` searches the text for
    them."""
    try:
        text = msgspec.json.encode(attributes)
    except (ValueError, OverflowError):
        text = b"null"
    # msgspec writes null for numbers that JSON does not have, such as infinity.
    if b"null" not in text:
        return text
    return json.dumps(attributes, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")
