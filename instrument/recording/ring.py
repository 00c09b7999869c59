"""A reader's place in the rings, which hold each thread's newest rows: each row is read once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from instrument.recording.rows import Row


class Cursor:
    """One reader's place in every ring: each row is read once, and what came too late to be read is counted.

    `rings` returns the rings there are now, `ended_rows` the number of rows that went with rings that were given up.
    """

    def __init__(self, rings: Callable[[], list[Any]], ended_rows: Callable[[], int]) -> None:
        self._rings = rings
        self._ended_rows = ended_rows
        self._places: dict[int, tuple[Any, int]] = {id(ring): (ring, ring.head) for ring in rings()}
        self._written = ended_rows() + sum(head for _, head in self._places.values())
        self._seen = self._written

    @property
    def lost(self) -> int:
        """Rows that were overwritten, or went with their ring, before they were read."""
        return self._written - self._seen

    def read(self) -> list[tuple[int, list[Row]]]:
        """The rows since the last read, with the native id of their thread, in order within each thread."""
        batches: list[tuple[int, list[Row]]] = []
        places: dict[int, tuple[Any, int]] = {}
        written = self._ended_rows()  # first: a ring given up in between is counted the next time
        for ring in self._rings():
            since = self._places.get(id(ring), (ring, 0))[1]
            rows, head, missed = ring.newest(since)
            places[id(ring)] = (ring, head)
            written += head
            self._seen += head - since - missed
            if rows:
                batches.append((ring.thread_id, rows))
        self._places = places
        self._written = written
        return batches
