"""KernelColumns as columns: an object is made of one when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import overload

import numpy as np

from instrument.recording.spans import Kernel
from instrument.trace.columns import FARTHEST_NS, Int32s, Int64s
from instrument.trace.forest import NONE

AT_ONCE = 20_000
"""KernelColumns of which objects are made together."""


@dataclass(frozen=True, eq=False)
class KernelColumns(Sequence[Kernel]):
    """The work of streams of devices, with the fields of `Kernel`; `name` is a place in `names`, `kind` in `kinds`."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    name: Int32s
    kind: Int32s
    device: Int64s
    stream: Int64s
    start_ns: Int64s
    end_ns: Int64s
    thread_id: Int64s
    launched_ns: Int64s

    @classmethod
    def of(cls, found: Sequence[Kernel]) -> KernelColumns:
        """These. Raises `OverflowError` for a number beyond 64 bits."""
        if isinstance(found, KernelColumns):
            return found
        names, kinds = dict[str, int](), dict[str, int]()
        count = len(found)
        name = np.fromiter((names.setdefault(one.name, len(names)) for one in found), np.int32, count)
        kind = np.fromiter((kinds.setdefault(one.kind, len(kinds)) for one in found), np.int32, count)
        numbers = [np.fromiter(map(itemgetter(place), found), np.int64, count) for place in range(2, 8)]
        return cls(tuple(names), tuple(kinds), name, kind, *numbers)

    def moved(self, by_ns: int) -> KernelColumns:
        """The same, so much later. Raises `ValueError` where that is a time that no clock reads."""
        times_ns = [self.start_ns, self.end_ns, self.launched_ns[self.thread_id != 0]]
        edges_ns = [int(edge) for one in times_ns if len(one) for edge in (one.min(), one.max())]
        if not all(-FARTHEST_NS < edge_ns + by_ns < FARTHEST_NS for edge_ns in edges_ns):
            raise ValueError("it has a time that no clock reads; it is damaged")
        by_ns = by_ns if edges_ns else 0
        return replace(
            self,
            start_ns=self.start_ns + by_ns,
            end_ns=self.end_ns + by_ns,
            launched_ns=np.where(self.thread_id == 0, 0, self.launched_ns + by_ns),
        )

    def place_of_kind(self, kind: str) -> int:
        """The place of a kind, `NONE` where it has no work of it."""
        return self.kinds.index(kind) if kind in self.kinds else NONE

    def __len__(self) -> int:
        return len(self.name)

    @overload
    def __getitem__(self, place: int) -> Kernel: ...
    @overload
    def __getitem__(self, place: slice) -> list[Kernel]: ...
    def __getitem__(self, place: int | slice) -> Kernel | list[Kernel]:
        if isinstance(place, slice):
            return [self[at] for at in range(*place.indices(len(self)))]
        return next(self._made(slice(at := range(len(self))[place], at + 1)))

    def __iter__(self) -> Iterator[Kernel]:
        for first in range(0, len(self), AT_ONCE):
            yield from self._made(slice(first, first + AT_ONCE))

    def _made(self, some: slice) -> Iterator[Kernel]:
        numbers = (self.device, self.stream, self.start_ns, self.end_ns, self.thread_id, self.launched_ns)
        names = map(self.names.__getitem__, self.name[some].tolist())
        kinds = map(self.kinds.__getitem__, self.kind[some].tolist())
        return map(Kernel, names, kinds, *(column[some].tolist() for column in numbers))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, (str, bytes)):
            return NotImplemented
        return len(self) == len(other) and all(one == its for one, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"KernelColumns({list(self)!r})"
