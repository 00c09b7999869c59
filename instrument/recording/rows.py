"""Rows that were taken from the rings, and the span that a single one stands for."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from instrument.recording.paths import CallTree
from instrument.recording.remote_parents import REMOTE, RemoteParent, remote_of
from instrument.recording.ring import PACKED_ROW, Row, self_ns
from instrument.recording.spans import Site, Span

STREAM = object()
"""The key under which a span's attributes hold what its device time is taken on, where that is known: the handle of a
stream, or `Work`. It is nothing that a reader sees."""


class Block(NamedTuple):
    """Rows of one thread in the order of ends, packed, and what some of them have more."""

    thread_id: int
    rows: bytes
    rare: list[Any]


class Taken(NamedTuple):
    """Rows as they were at one moment: the finished ones of each ring, and the open ones by thread id.

    `tree` has their call paths, also when the recorder has been reset since.
    """

    blocks: list[Block]
    open_rows: list[tuple[int, Row]]
    tree: CallTree

    @property
    def size(self) -> int:
        """How many rows there are."""
        return sum(len(block.rows) for block in self.blocks) // PACKED_ROW.size + len(self.open_rows)


class Held(NamedTuple):
    """Spans that are held: how many, the first end on each thread, and the ids of those that ask for device time."""

    spans: int
    oldest_ns: dict[int, int]
    asking: array[int]


def span_of(row: Row, site: Site, thread_id: int) -> Span:
    """The span that a row of a site and a thread stands for."""
    _, span_id, parent_id, root_id, task_id, start_ns, end_ns, _, active_ns, error, attributes = row
    remote: RemoteParent | None = None
    if attributes and (REMOTE in attributes or STREAM in attributes):
        attributes = dict(attributes)
        remote = remote_of(attributes.pop(REMOTE, None))
        attributes.pop(STREAM, None)
    if active_ns < 0:
        active_ns = end_ns - start_ns
    return Span(
        site, span_id, parent_id, root_id, thread_id, task_id, start_ns, end_ns, active_ns, self_ns(row), error,
        attributes or {}, (), False, remote,
    )  # fmt: skip
