"""A reader's place in the rings, which hold each thread's newest rows: each row is read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from instrument.recording.rows import Row


class Cursor:
    """One reader's place in every ring: each row is read once, and what came too late to be read is counted.

    `rings` tells the rings there are now, `ended_rows` how many rows went with rings that were given up. `read_on`
    reads a ring from a row number on, as `Ring.newest` does; it may leave rows out.
    """

    def __init__(
        self,
        rings: Callable[[], list[Any]],
        ended_rows: Callable[[], int],
        read_on: Callable[[Any, int], tuple[list[Row], int, int]],
    ) -> None:
        self._rings = rings
        self._ended_rows = ended_rows
        self._read_on = read_on
        self._places: dict[int, tuple[Any, int]] = {id(ring): (ring, ring.head) for ring in rings()}
        self._written = ended_rows() + sum(head for _, head in self._places.values())
        self._seen = self._written
        self.taken = 0
        """The rows that were there to be read."""

    @property
    def lost(self) -> int:
        """Rows that were overwritten, or went with their ring, before they were read."""
        return self._written - self._seen

    @property
    def places(self) -> dict[int, int]:
        """The next row of each thread, by its native id."""
        return {ring.thread_id: row for ring, row in self._places.values()}

    def go_on(self, places: Mapping[int, int], done: int | None = None) -> None:
        """Read on from these rows of each thread, those that are not named from their first one.

        `done` is the number of all rows that others have read, or missed: the rest of those that went with their
        rings is lost.
        """
        for key, (ring, row) in self._places.items():
            since = min(places.get(ring.thread_id, 0), row)
            self._places[key] = ring, since
            self._seen -= row - since
        self._seen = self._seen if done is None else done

    def read(self) -> list[tuple[int, list[Row]]]:
        """The rows since the last read, with the native id of their thread, in order within each thread."""
        batches: list[tuple[int, list[Row]]] = []
        places: dict[int, tuple[Any, int]] = {}
        written = self._ended_rows()  # first: a ring given up in between is counted the next time
        for ring in self._rings():
            since = self._places.get(id(ring), (ring, 0))[1]
            rows, head, missed = self._read_on(ring, since)
            places[id(ring)] = (ring, head)
            written += head
            self._seen += head - since - missed
            self.taken += head - since - missed
            if rows:
                batches.append((ring.thread_id, rows))
        self._places = places
        self._written = written
        return batches
