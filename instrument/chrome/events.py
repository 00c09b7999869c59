"""Events of a Chrome trace, many at once: what of each is read, whoever wrote it, and what is refused."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from decimal import Decimal
from itertools import chain
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from instrument.recording.allocations import Allocations
from instrument.trace import allocation_lists
from instrument.trace.json_blocks import Json
from instrument.trace.text import INT64, checked, nanoseconds

Int64 = Annotated[int, msgspec.Meta(ge=-INT64, le=INT64 - 1)]

LENGTH = 7
"""Numbers of an allocation; the last may be left out."""

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


_decode_allocations = msgspec.json.Decoder(
    list[Annotated[list[Int64], msgspec.Meta(min_length=6, max_length=7)]]
).decode
_decode = msgspec.json.Decoder(list[TraceEvent]).decode


def decoded_events(found: bytes) -> list[TraceEvent] | None:
    """The events of a text, None where one of them is none, or is not as it should be."""
    try:
        return _decode(b"[%b]" % found)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def times_ns(times_us: Sequence[Any], limit_ns: int) -> NDArray[np.int64]:
    """Microseconds as nanoseconds, exact for three decimals, as `nanoseconds` has them; those of `limit_ns` and beyond
    are refused."""
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


def next_allocations(text: Json, most: int) -> bytearray:
    """The rows of `Allocations` from a list of lists that comes next; at most so many."""
    rows = bytearray()
    text.take("[")
    end = text.take("]") if text.peek() == "]" else ","
    while end == ",":
        found = text.values("[")
        try:
            lists = _decode_allocations(b"[%b]" % found)
        except msgspec.MsgspecError as problem:
            allocation_lists.rows_of(text.decoded(b"[%b]" % found, text.passed - len(found) - 1))
            raise ValueError(f"{problem}; write or copy it again") from problem
        for numbers in lists:
            if len(numbers) < LENGTH:
                numbers.append(0)
        rows += array("q", chain.from_iterable(lists)).tobytes()
        if len(rows) > most * Allocations.ROW.size:
            raise ValueError(f"it has more than {most} allocations; record less into one file")
        end = text.take(",]")
    return rows
