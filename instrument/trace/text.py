"""The text of a Chrome trace: values as strict JSON on the way out, taken one by one and checked on the way in."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

INT64 = 1 << 63
"""The first number beyond those of 64 bits, which is as far as viewers go."""

# What bounds the memory that a hostile file can ask for: characters of one value, microseconds of a time (ns since
# 1970 still are in int64).
LIMIT_VALUE, LIMIT_US = 128 << 20, 1 << 53

LONGEST_PLAIN = 4_000
"""Bytes of JSON that may stay as they are without a look: a number of more digits would be none."""

LIMIT_BYTES = 2 << 30
"""Most bytes of text that `load` reads unless told otherwise; browsers give up far below."""

LIMIT_SPANS = 10_000_000
"""More slices of a kind are in no file that may be read."""

encode: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""The JSON of a value that is `safe`."""

encode_numbers: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""The same with NaN and Infinity, which JSON has not, as Python's `json` writes and reads them."""


# Out


def clean(text: str) -> str:
    """The text without lone surrogates, which UTF-8 does not have."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def safe(value: object, depth: int = 0, *, finite: bool = True) -> Any:
    """The value as strict JSON and viewers take it, or with numbers that are not `finite` as they are. It never fails
    and runs no code of a foreign type: a tensor asked for its text would wait for the device and show what must not
    leave."""
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
    """The number, or its text if JSON or int64 does not have it."""
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
    """Return True if JSON and int64 have the value."""
    return value is not None and math.isfinite(value) and (not isinstance(value, int) or -INT64 <= value < INT64)


# In


def nanoseconds(time_us: object) -> int:
    """Microseconds as nanoseconds, exact for three decimals."""
    time = time_us if type(time_us) is Decimal else checked(time_us, float, int)
    if not -LIMIT_US < time < LIMIT_US:
        raise ValueError(f"it has {time} for a time in microseconds; write times relative to the start")
    return round(time * 1000)


def checked(value: object, *kinds: type) -> Any:
    """The value, which must be of just one of some types, and no whole number beyond int64."""
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
