"""The allocations and releases of torch's allocator, from torch.profiler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter, le
from struct import Struct, error
from typing import overload

from instrument.runtime.cheap_start import dataclass, fields


@dataclass(frozen=True, slots=True)
class Allocation:
    """An allocation of torch's allocator, or a release (`size_bytes` below 0), from torch.profiler.

    `device` is `HOST` for the host. `allocated_bytes` and `reserved_bytes` are the allocator's totals afterwards: the
    memory in use, and the memory from the driver.
    """

    device: int
    at_ns: int
    thread_id: int
    size_bytes: int
    address: int
    allocated_bytes: int
    reserved_bytes: int = 0


class Allocations(Sequence[Allocation]):
    """A sequence of allocations packed in one block of memory.

    Objects are made on access. `rows` has seven 64-bit numbers per allocation: 56 bytes, while an object takes 320.
    Times count from `base_ns`. The rows must not change.
    """

    ROW = Struct("=7q")
    _FACTS = attrgetter(*(member.name for member in fields(Allocation)))
    __slots__ = ("base_ns", "rows")

    def __init__(self, rows: bytes | bytearray = b"", base_ns: int = 0) -> None:
        self.rows, self.base_ns = rows, base_ns

    @classmethod
    def of(cls, allocations: Iterable[Allocation]) -> Allocations:
        """Pack allocations. Raises `OverflowError` for a number beyond 64 bits."""
        if isinstance(allocations, Allocations):
            return allocations
        try:
            return cls(b"".join([cls.ROW.pack(*cls._FACTS(allocation)) for allocation in allocations]))
        except error as problem:
            raise OverflowError("an allocation has a number beyond 64 bits") from problem

    def moved(self, by_ns: int) -> Allocations:
        """Return the allocations with their times moved by `by_ns`."""
        return Allocations(self.rows, self.base_ns + by_ns)

    def in_order(self) -> Allocations:
        """Return the allocations sorted by time. Allocations at the same time keep their order."""
        times = memoryview(self.rows).cast("q")[1::7].tolist()
        if all(map(le, times, islice(times, 1, None))):
            return self
        return self._taken(sorted(range(len(times)), key=times.__getitem__))

    def _taken(self, places: Iterable[int]) -> Allocations:
        size, rows = self.ROW.size, bytearray()
        for at in places:
            rows += self.rows[at * size : at * size + size]
        return Allocations(rows, self.base_ns)

    def __len__(self) -> int:
        return len(self.rows) // self.ROW.size

    @overload
    def __getitem__(self, place: int) -> Allocation: ...
    @overload
    def __getitem__(self, place: slice) -> Allocations: ...
    def __getitem__(self, place: int | slice) -> Allocation | Allocations:
        if isinstance(place, slice):
            places = range(*place.indices(len(self)))
            if places.step != 1:
                return self._taken(places)
            size = self.ROW.size
            return Allocations(self.rows[places.start * size : places.stop * size], self.base_ns)
        at = range(len(self))[place]
        device, since_ns, *values = self.ROW.unpack_from(self.rows, at * self.ROW.size)
        return Allocation(device, self.base_ns + since_ns, *values)

    def __iter__(self) -> Iterator[Allocation]:
        base_ns = self.base_ns
        for device, since_ns, *values in self.ROW.iter_unpack(self.rows):
            yield Allocation(device, base_ns + since_ns, *values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, (str, bytes)):
            return NotImplemented
        if isinstance(other, Allocations) and other.base_ns == self.base_ns:
            return self.rows == other.rows
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Allocations({list(self)!r})"
