"""Rows: the one description of a finished span as recorders tell it, and of many that were taken from the rings.

A row is a tuple, immutable and so never torn, that is taken apart by these names alone. Rows that are copied to be
looked at together are bytes, as `PACKED_ROW` has them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from instrument.recording import memory_layout
from instrument.recording.paths import CallTree
from instrument.recording.remote_parents import REMOTE, RemoteParent, remote_of
from instrument.recording.spans import Site, Span

Row = tuple[int, int, int, int, int, int, int, int, int, "str | None", "dict[Any, Any] | None"]
"""A row as the recorder makes it in `row_as_tuple`, and Python by `row_of`."""

NODE: Final = 0
"""The index of its call path."""
SPAN_ID: Final = 1
PARENT_ID: Final = 2
ROOT_ID: Final = 3
TASK: Final = 4
START_NS: Final = 5
END_NS: Final = 6
CHILDREN_NS: Final = 7
"""Time of the children, less what the span waited: the active time less this is its own, in which it waits, too."""
ACTIVE_NS: Final = 8
"""-1 where that is the total."""
ERROR: Final = 9
"""The name of the exception, or None."""
ATTRIBUTES: Final = 10
"""Or None."""
MORE: Final = ACTIVE_NS
"""The first place of the further facts of a row: their types are `More`."""

More = tuple[int, "str | None", "dict[Any, Any] | None"]

REQUEST_BIT = 1
"""Set in the id of a request that is a root, and in no other: a root id tells whether it is a request's."""

PACKED_ROW = memory_layout.ROW.packer()
"""A row in 64 bytes, as recordings have it; `rare` is 0, the active time as `packed_row` says it, or else where what
fewer have is noted. That stands beside the rows: active time or -1, error and attributes, or the attributes alone."""

_pack, _unpack = PACKED_ROW.pack, PACKED_ROW.iter_unpack
_FARTHEST = (1 << 63) - 1

HAS_MORE = 8
"""`rare` of a row that Python packs, which has no address to give."""

SCRAMBLE = 0x9E3779B97F4A7C15
"""The multiplier of `is_sampled`."""

STREAM = object()
"""The key under which a span's attributes hold what its device time is taken on, where that is known: the handle of a
stream, or `Work`. It is nothing that a reader sees."""


def row_of(
    node: int,
    span_id: int,
    parent_id: int,
    root_id: int,
    task: int,
    start_ns: int,
    end_ns: int,
    children_ns: int = 0,
    active_ns: int = -1,
    error: str | None = None,
    attributes: dict[Any, Any] | None = None,
) -> Row:
    """A row of these."""
    return node, span_id, parent_id, root_id, task, start_ns, end_ns, children_ns, active_ns, error, attributes


def more_of(row: Row) -> More:
    """The further facts of a row."""
    return row[MORE:]


def with_more(row: Row, more: More) -> Row:
    """The row with this instead of what it has more."""
    return *row[:MORE], *more


def packed_row(row: Row) -> bytes:
    """A row as recordings have it. Of what few have an active time alone is a number twice as large and odd."""
    node, span_id, parent_id, root_id, task, start_ns, end_ns, children_ns, active_ns, error, attributes = row
    rare = HAS_MORE if error is not None or attributes is not None else active_ns << 1 | 1 if active_ns >= 0 else 0
    children_ns = children_ns if children_ns < _FARTHEST else _FARTHEST  # noqa: FURB136 - see `self_ns`
    return _pack(span_id, parent_id, root_id, start_ns, end_ns, children_ns, rare, node, task)


def unpacked_rows(data: bytes) -> Iterator[Row]:
    """Rows of a recording, without what stands beside them."""
    for span_id, parent_id, root_id, start_ns, end_ns, children_ns, rare, node, task in _unpack(data):
        active_ns = rare >> 1 if rare & 1 else -1
        yield node, span_id, parent_id, root_id, task, start_ns, end_ns, children_ns, active_ns, None, None


def is_request_root(row: Row) -> bool:
    """Return True for the row of a request that is the root of its tree."""
    return row[SPAN_ID] == row[ROOT_ID] and bool(row[ROOT_ID] & REQUEST_BIT)


def self_ns(row: Row) -> int:
    """Time of a row outside its children, never negative."""
    own = (row[END_NS] - row[START_NS] if row[ACTIVE_NS] < 0 else row[ACTIVE_NS]) - row[CHILDREN_NS]
    return own if own > 0 else 0  # noqa: FURB136 - `max` costs as much as all the rest


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
        """Return the number of rows."""
        return sum(len(block.rows) for block in self.blocks) // PACKED_ROW.size + len(self.open_rows)


class Held(NamedTuple):
    """Spans that are held: how many, the first end on each thread, and the ids of those that ask for device time."""

    spans: int
    oldest_ns: dict[int, int]
    asking: array[int]


def span_of(row: Row, site: Site, thread_id: int) -> Span:
    """The span that a row of a site and a thread stands for."""
    active_ns, attributes = row[ACTIVE_NS], row[ATTRIBUTES]
    remote: RemoteParent | None = None
    if attributes and (REMOTE in attributes or STREAM in attributes):
        attributes = dict(attributes)
        remote = remote_of(attributes.pop(REMOTE, None))
        attributes.pop(STREAM, None)
    if active_ns < 0:
        active_ns = row[END_NS] - row[START_NS]
    return Span(
        site, row[SPAN_ID], row[PARENT_ID], row[ROOT_ID], thread_id, row[TASK], row[START_NS], row[END_NS], active_ns,
        self_ns(row), row[ERROR], attributes or {}, (), False, remote,
    )  # fmt: skip


def is_sampled(root_id: int, sample: float) -> bool:
    """Return the same answer for every span of a tree: its root's id, scrambled by Knuth's multiplicative hash."""
    return (root_id * SCRAMBLE & (1 << 64) - 1) < sample * (1 << 64)


# A reader's place


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
