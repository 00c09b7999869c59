"""The allocations of a file: written some thousand at a time, and read back into one piece of memory.

They stand in the key `instrument` as lists of their numbers in the order of the fields. A trace has a million of them,
which are more text than all else in the key together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from instrument.recording.allocations import Allocation, Allocations
from instrument.trace.text import checked, encode

BATCH = 4096
"""How many are in memory as text."""

_LIST = "[%d,%d,%d,%d,%d,%d,%d],"


def texts(allocations: Sequence[Allocation], base_ns: int) -> Iterator[str]:
    """The lists as JSON, with commas between them and times counted from the base."""
    for first in range(0, len(allocations), BATCH):
        if first:
            yield ",\n"
        yield _text(allocations[first : first + BATCH], base_ns)


def _text(allocations: Sequence[Allocation], base_ns: int) -> str:
    try:
        packed = Allocations.of(allocations)
    except OverflowError:
        lists = [
            [one.device, one.at_ns - base_ns, one.thread_id, one.size_bytes, one.address, one.allocated_bytes,
             one.reserved_bytes]
            for one in allocations
        ]  # fmt: skip
        return encode(lists)[1:-1]
    numbers, moved_ns = memoryview(packed.rows).cast("q").tolist(), packed.base_ns - base_ns
    numbers[1::7] = [at_ns + moved_ns for at_ns in numbers[1::7]]
    return (_LIST * len(packed))[:-1] % tuple(numbers)


def rows_of(lists: Iterable[Any]) -> bytes:
    """The rows of `Allocations` of such lists."""
    return b"".join(map(_row, lists))


def _row(numbers: Any) -> bytes:
    found = [checked(number, int) for number in checked(numbers, list)]
    if not 6 <= len(found) <= 7:  # all that an allocation has; the last may be left out
        raise ValueError("an allocation in it is none; it is damaged")
    return Allocations.ROW.pack(*found, *[0] * (7 - len(found)))
