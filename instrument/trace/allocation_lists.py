"""The allocations of a file: written some thousand at a time, and read back one by one into one piece of memory.

They stand in the key `instrument` as lists of their numbers in the order of the fields. A trace has a million of them,
which are more text than all else in the key together. Both ways have a twin in C (`_slices.c`, `_reading.c`), which
takes a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from instrument import native
from instrument.recording.spans import Allocation, Allocations
from instrument.trace.text import Json, checked, encode

BATCH = 4096
"""How many are in memory as text."""

_native_writer = native.find("_slices")
_native_reader = native.find("_reading")


def texts(allocations: Sequence[Allocation], base_ns: int) -> Iterator[str | bytes]:
    """The lists as JSON, with commas between them and times counted from the base."""
    for first in range(0, len(allocations), BATCH):
        if first:
            yield ",\n"
        yield _text(allocations[first : first + BATCH], base_ns)


def _text(allocations: Sequence[Allocation], base_ns: int) -> str | bytes:
    if _native_writer is not None:
        try:
            packed = Allocations.of(allocations)
            text: bytes | None = _native_writer.allocations(packed.rows, packed.base_ns - base_ns)
        except OverflowError:
            text = None
        if text is not None:
            return text
    lists = [
        [one.device, one.at_ns - base_ns, one.thread_id, one.size_bytes, one.address, one.allocated_bytes,
         one.reserved_bytes]
        for one in allocations
    ]  # fmt: skip
    return encode(lists)[1:-1]


def take(text: Json, most: int) -> bytearray:
    """The rows of `Allocations` from a list of lists that comes next in the text; at most so many."""
    rows = bytearray()

    def scan(text: str, at: int) -> int:
        place: int = _native_reader.allocations(text, at, rows)
        return place

    text.take("[")
    end = text.take("]") if text.peek() == "]" else ","
    while end == ",":
        if _native_reader is None or not text.advance(scan):
            rows += _row(text.value())
        if len(rows) > most * Allocations.ROW.size:
            raise ValueError(f"it has more than {most} allocations; record less into one file")
        end = text.take(",]")
    return rows


def rows_of(lists: Iterable[Any]) -> bytes:
    """The same of lists that were taken already."""
    return b"".join(map(_row, lists))


def _row(numbers: Any) -> bytes:
    found = [checked(number, int) for number in checked(numbers, list)]
    if not 6 <= len(found) <= 7:  # all that an allocation has; the last may be left out
        raise ValueError("an allocation in it is none; it is damaged")
    return Allocations.ROW.pack(*found, *[0] * (7 - len(found)))
