"""The newest readings of gauges of a process, in its recording, for all who tell of them, also once it has gone.

One process at a time adds some: the one whose they are, or the agent of its run, which reads them from outside.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable
from typing import Any

from instrument.recording import memory_layout as layout
from instrument.recording.claim import GAUGES as CLAIMED
from instrument.recording.claim import Claim
from instrument.recording.export_place import generation_of
from instrument.recording.memory_layout import SAMPLES
from instrument.recording.slot_ring import FindRoom, SlotRing
from instrument.recording.spans import GAUGES, Sample

_CELLS = struct.Struct("<qiId40s")
_U64 = struct.Struct("<Q")

FEW_SAMPLES = 4096
"""Three minutes with one GPU: so many are looked at first for those of a late time."""


def value_of(name: str, value: float, *, told: Any) -> float | None:
    """A value as its gauge has it: bytes are whole, and what the device does not tell is None."""
    if not told:
        return None
    return int(value) if GAUGES[name].unit == "bytes" else float(value)


def _cells_of(sample: Sample) -> tuple[int, int, bool, float, bytes]:
    return sample.at_ns, sample.device, sample.value is not None, sample.value or 0.0, sample.name.encode()


class Readings:
    """A ring of readings, as the process has it whose they are. Any thread may ask, one at a time adds."""

    def __init__(self, find_room: FindRoom | None = None) -> None:
        self._slots = SlotRing(_CELLS, SAMPLES, find_room)

    def add(self, samples: Iterable[Sample]) -> None:
        """Keep some, in place of the oldest if need be."""
        self._slots.follow()
        for sample in samples:
            self._slots.add(*_cells_of(sample))

    def samples(self, first_ns: int, last_ns: int) -> list[Sample]:
        """The newest that were read from the first time on and before the last, by time, device and name."""
        self._slots.follow()
        cells = self._since(max(self._slots.count - FEW_SAMPLES, 0))
        if not cells or min(cells)[0] >= first_ns:
            cells = self._since(0)
        found = [
            Sample(text, device, at_ns, value_of(text, value, told=is_told))
            for at_ns, device, is_told, value, name in cells
            if first_ns <= at_ns < last_ns
            and (text := name.rstrip(b"\0").decode("ascii", "replace")) in GAUGES
            and math.isfinite(value)
        ]
        return sorted(found, key=lambda one: (one.at_ns, one.device, one.name))

    def _since(self, number: int) -> list[tuple[int, int, int, float, bytes]]:
        """Those after the first so many, but for those that others have taken the place of meanwhile."""
        first = max(number, self._slots.overwritten)
        data = self._slots.since(number)
        self._slots.follow()
        cells: list[tuple[int, int, int, float, bytes]] = list(_CELLS.iter_unpack(data))
        return cells[max(self._slots.overwritten - first, 0) :]

    @property
    def overwritten(self) -> int:
        """How many newer ones have taken the place of."""
        self._slots.follow()
        return self._slots.overwritten


class GaugePlace(Claim):
    """The same ring, of another process: of the session that records there now. Raises `OSError`.

    Who has taken it reads the gauges, and nobody else.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd, CLAIMED)
        self._generation = generation_of(fd)

    def add(self, samples: Iterable[Sample]) -> bool:
        """Keep some, in place of the oldest if need be; False where another session records there by now."""
        fd = self.fileno()
        if fd < 0 or generation_of(fd) != self._generation:
            return False
        part_at = layout.HEADER.fields["parts"][0] + layout.PARTS.index("samples") * layout.PART.size
        offset, stride, slots, used, _ = struct.unpack("<5Q", os.pread(fd, layout.PART.size, part_at))
        if stride != _CELLS.size or not 0 < slots <= SAMPLES or offset + slots * stride > os.fstat(fd).st_size:
            return False
        for sample in samples:
            os.pwrite(fd, _CELLS.pack(*_cells_of(sample)), offset + used % slots * stride)
            used += 1
        os.pwrite(fd, _U64.pack(used), part_at + layout.PART.fields["used"][0])
        return True
