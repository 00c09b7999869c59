"""Converts values to strict JSON for files, and checks values that were read from files."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

INT64 = 1 << 63
"""The lowest number above all signed 64-bit integers. Viewers cannot read larger numbers."""

# Bounds for hostile files: the characters of one value, and the microseconds of a time, so that ns since 1970 fit into
# int64.
LIMIT_VALUE, LIMIT_US = 128 << 20, 1 << 53

LONGEST_PLAIN = 4_000
"""The maximum number of bytes of a JSON text that needs no check. A longer text may have a number with more digits than
Python accepts."""

LIMIT_BYTES = 2 << 30
"""The maximum number of bytes of text that `load` accepts by default. Browsers fail with far less."""

LIMIT_SPANS = 10_000_000
"""The maximum number of slices, of samples or of allocations that are read from a file."""

encode: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""Return the strict JSON of a value that `safe` has returned."""

encode_numbers: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""Return the JSON of a value, with NaN and Infinity as Python's `json` writes them."""


# Out


def clean(text: str) -> str:
    """Return the text without lone surrogates, which UTF-8 does not allow."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def safe(value: object, depth: int = 0, *, finite: bool = True) -> Any:
    """Return a value that strict JSON and viewers accept. Without `finite`, infinities and NaN remain. The function
    never fails and runs no code of foreign types, because the text of a tensor would wait for the device and expose its
    data."""
    if isinstance(value, str):
        return clean(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Real):
        return _safe_number(value, finite)
    if isinstance(value, (list, tuple)) and depth < 4:
        return [safe(item, depth + 1, finite=finite) for item in value]
    if isinstance(value, dict) and depth < 4:
        items = ((key, item) for key, item in value.items() if isinstance(key, str))
        return {clean(key): safe(item, depth + 1, finite=finite) for key, item in items}
    return _type_name(value)


def _safe_number(value: numbers.Real, finite: bool) -> int | float | str:
    """Return the number or, if JSON or int64 cannot represent it, its text."""
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
    return f"<{clean(type(value).__name__)}>"


def is_number(value: float | None) -> bool:
    """Return True if JSON and int64 can represent the value."""
    return value is not None and math.isfinite(value) and (not isinstance(value, int) or -INT64 <= value < INT64)


# In


def nanoseconds(time_us: object) -> int:
    """Return microseconds as nanoseconds, exact for three decimals. Raises `ValueError` beyond `LIMIT_US`."""
    time = time_us if type(time_us) is Decimal else checked(time_us, float, int)
    if not -LIMIT_US < time < LIMIT_US:
        raise ValueError(f"it has {time} for a time in microseconds; write times relative to the start")
    return round(time * 1000)


def checked(value: object, *kinds: type) -> Any:
    """Return the value. Raises `ValueError` for a type that is not in `kinds`, and for ints beyond int64."""
    if type(value) not in kinds or (isinstance(value, int) and not -INT64 <= value < INT64):
        raise ValueError(f"it has {value!r:.40} where {kinds[0].__name__} belongs; give a Chrome trace in JSON")
    return value


def check_ints(values: Sequence[Any]) -> Sequence[int]:
    """Return the values. Raises `ValueError` unless all are 64-bit ints. One call is faster than `checked` for each
    value."""
    if set(map(type, values)) != {int} or not -INT64 <= min(values) <= max(values) < INT64:
        return [checked(value, int) for value in values]
    return values


def index(value: object) -> int:
    """Return the value as an index of a list. Raises `ValueError` for a negative one."""
    place: int = checked(value, int)
    if place < 0:
        raise ValueError(f"it has {place} for a place in a list; it is damaged")
    return place
