"""The reader with which a process reads its own recording.

It is a subclass of `Mapped`, the reader for other processes, and uses the recorder's own objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from instrument.recording.mapped import MOST_TOTALS_READS, Mapped
from instrument.recording.mapped_facts import OpenSpan, Records, RingRows
from instrument.recording.memory import make_private_header
from instrument.recording.paths import CallTree


class OwnRecording(Mapped):
    """A reader of the recorder's own memory. No row is half-written, because the threads of this process wait for the
    reader."""

    in_doubt = 0

    def __init__(self, recorder: Any, memory: memoryview | None) -> None:
        self._recorder = recorder
        super().__init__(memoryview(make_private_header(0)) if memory is None else memory)

    def read_tree(self) -> CallTree:
        tree: CallTree = self._recorder.paths()
        return tree

    def _read_slots(self, name: str, kind: np.dtype[np.void]) -> Records:
        self._read_head()
        part, memory = self._parts[name], self._memory
        if memory is None or not part.used:
            return np.zeros(0, kind)
        return np.frombuffer(memory, kind, min(part.used, part.slots), part.offset)

    def _copy_slots_at_once(self, *parts: tuple[str, np.dtype[np.void]]) -> list[Records]:
        """Copy the slots of several parts at one moment. `bytes.join` keeps the GIL, so no thread writes meanwhile."""
        memory = memoryview(b"") if self._memory is None else self._memory

        def slot_counts() -> list[int]:
            self._read_head()
            return [min(self._parts[name].used, self._parts[name].slots) for name, _ in parts]

        counts = slot_counts()
        for _ in range(MOST_TOTALS_READS):
            pieces = [
                memory[self._parts[name].offset :][: count * kind.itemsize]
                for (name, kind), count in zip(parts, counts, strict=True)
            ]
            data, expected = b"".join(pieces), counts
            counts = slot_counts()
            if counts == expected:
                break  # no slot was taken between the two
        slots, begin = [], 0
        for piece, (_, kind) in zip(pieces, parts, strict=True):
            slots.append(
                np.frombuffer(data, kind, piece.nbytes // kind.itemsize, begin) if piece.nbytes else np.zeros(0, kind)
            )
            begin += piece.nbytes
        return slots

    def open_spans(self) -> list[OpenSpan]:
        spans = []
        for thread_id, row in self._recorder.open_rows():
            node, span_id, parent_id, root_id, task, start_ns, _, children_ns, active_ns, _, attributes = row
            attributes = {name: value for name, value in (attributes or {}).items() if isinstance(name, str)}
            spans.append(OpenSpan(
                self.read_tree().site(node), node, span_id, parent_id, root_id, task << 4, thread_id, start_ns,
                children_ns, attributes, active_ns,
            ))  # fmt: skip
        return spans


class Cursor:
    """A reader that returns each row once. It counts the rows that were overwritten before it could read them."""

    def __init__(self, recording: Callable[[], OwnRecording]) -> None:
        self._recording = recording
        mapped = recording()
        self._places = mapped.count_written_rows()
        self._written = self._seen = mapped.ended_rows + sum(self._places.values())

    @property
    def lost_rows(self) -> int:
        """The number of rows that were overwritten before they could be read."""
        return self._written - self._seen

    def read_new_rows(self) -> list[RingRows]:
        """Return the rows since the last call. The rows of a thread are in order."""
        mapped = self._recording()
        written = mapped.ended_rows  # first: a ring given up in between is counted the next time
        rings = mapped.read_rows(self._places)
        self._places = {ring.ring: ring.head for ring in rings}
        self._seen += sum(ring.head - ring.first for ring in rings)
        self._written = written + sum(self._places.values())
        return rings
