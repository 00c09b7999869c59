"""Events of a Chrome trace, many at once: what of each is read, whoever wrote it, and what is refused."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
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
"""Below it nanoseconds are whole numbers that a float has."""

NO_ARGUMENTS = msgspec.Raw(b"{}")


class TraceEvent(msgspec.Struct, gc=False):
    """One event; what it says of itself in `args` stays text, for what there is depends on what it is."""

    ph: str = ""
    ts: int | float | None = None
    dur: int | float | None = None
    pid: int | str | float | bool | None = None
    tid: int | str | float | bool | None = None
    cat: Any = None
    name: Any = None
    id: Any = None
    id2: Any = None
    args: msgspec.Raw = NO_ARGUMENTS


_decode_allocations = msgspec.json.Decoder(
    list[Annotated[list[Int64], msgspec.Meta(min_length=6, max_length=7)]]
).decode
_decode = msgspec.json.Decoder(list[TraceEvent]).decode

_LONE_SURROGATE = re.compile(
    rb"(\\(?:[^u]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u(?![dD][89a-fA-F])))|\\u[dD][89a-fA-F]..",
    re.DOTALL,
)


def next_events(text: Json) -> list[TraceEvent]:
    """The events of a list that come next: as many as are at hand."""
    found = text.values("{")
    try:
        return _decode(b"[%b]" % found)
    except UnicodeDecodeError:
        raise
    except msgspec.MsgspecError as problem:
        # Rare: either it is refused, and told why, or texts in it have what UTF-8 has not.
        for event in text.decoded(b"[%b]" % found, text.passed - len(found) - 1):
            refuse(event)
        try:
            return _decode(b"[%b]" % _LONE_SURROGATE.sub(lambda known: known[1] or b"\\ufffd", found))
        except msgspec.MsgspecError:
            raise ValueError(f"{problem}; write or copy it again") from problem


def refuse(event: Any) -> None:
    """Raise `ValueError` for an event that is none, or has what does not belong there."""
    checked(event, dict)
    checked(event.get("ph", ""), str)
    for key in ("pid", "tid"):
        checked(event.get(key), int, str, float, bool, type(None))
    for key in ("ts", "dur"):
        if event.get(key) is not None:
            nanoseconds(event[key])


def times_ns(times_us: Sequence[float | None], limit_ns: int) -> NDArray[np.int64]:
    """Microseconds as nanoseconds, exact for three decimals, as `nanoseconds` has them; those of `limit_ns` and beyond
    are refused."""
    if not {float, int}.issuperset(map(type, times_us)):
        for time in times_us:
            checked(time, float, int)
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
