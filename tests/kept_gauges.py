"""Rings of a recording in memory of a test's own, without a recorder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from instrument.device.gauge_thread import Gauges
from instrument.profile.model import Device
from instrument.recording import memory_layout as layout
from instrument.recording.mapped import _convert_reading
from instrument.recording.memory import SlotRoom
from instrument.recording.spans import Gpu, Sample

_SAMPLE = layout.SAMPLE.make_struct()


def make_room(name: str, slots: int) -> SlotRoom:
    memory = memoryview(bytearray(layout.HEADER_BYTES)), memoryview(bytearray(slots * layout.STRIDES[name]))
    return SlotRoom(memory[0], name, memory[1], slots)


class KeptGauges(Gauges):
    """Gauges that keep their newest readings themselves."""

    def __init__(
        self,
        settings: Device,
        keep: Callable[[Sequence[Sample], Sequence[Gpu]], object] | None = None,
        slots: int = 1 << 14,
    ) -> None:
        self.room = make_room("samples", slots)
        super().__init__(settings, lambda: self.room, keep)

    def after_fork_in_child(self, **how: Any) -> None:
        self.room = make_room("samples", self.room.slots)
        super().after_fork_in_child(**how)

    def samples(self, first_ns: int, last_ns: int) -> list[Sample]:
        """Return the readings from `first_ns` to before `last_ns`, ordered by time, device and name."""
        used = min(self.room.count_used_slots(), self.room.slots)
        readings = [
            Sample(name, device, at_ns, _convert_reading(name, value, is_reported))
            for at_ns, device, is_reported, value, text in _SAMPLE.iter_unpack(self.room.part[: used * _SAMPLE.size])
            if first_ns <= at_ns < last_ns and (name := text.rstrip(b"\0").decode())
        ]
        return sorted(readings, key=lambda reading: (reading.at_ns, reading.device, reading.name))
