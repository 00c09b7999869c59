"""The rings: each thread's newest rows, and the totals of all that it ever recorded, in bounded memory.

A finished span is a row, as `instrument.recording.rows` has it. Only its own thread writes to a ring. It counts each
row in the totals, or leaves that to whoever reads them just then.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from instrument.recording.histogram import bucket, bucket_start
from instrument.recording.rows import (
    ATTRIBUTES,
    END_NS,
    ERROR,
    NODE,
    SPAN_ID,
    START_NS,
    Row,
    is_cancelled_request,
    is_too_short,
    more_of,
    packed_row,
    self_ns,
)
from instrument.recording.tally import Node, Totals
from instrument.runtime.unpatched import RLock, local

First = tuple[int, int]
"""When a first call began, and how long it took on the host."""

ROW_BYTES = 340
"""Memory of one row with its integers, at most, measured with tracemalloc on CPython 3.11."""

SMALLEST_RING = 64
ENDED_RINGS_KEPT = 1000


class Ring:
    """The newest rows of one thread, and the totals of all of them by node index, with what they waited in `waits`."""

    __slots__ = (
        "capacity", "counted", "ended", "first_calls", "head", "lock", "mask", "name", "nodes", "rows", "stepping",
        "steps", "thread_id", "too_short", "totals", "waits",
    )  # fmt: skip

    def __init__(self, capacity: int, thread_id: int, name: str, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.capacity = capacity
        self.mask = capacity - 1
        self.rows: list[Any] = [None] * capacity
        self.head = 0
        self.counted = 0
        self.totals: dict[int, Totals] = {}
        self.first_calls: dict[int, First] = {}
        self.too_short = 0
        self.steps: dict[int, int] = {}
        self.stepping: Any = None  # what is awaited, and runs here: the innermost
        self.waits: dict[int, int] = {}
        self.thread_id = thread_id
        self.name = name
        self.ended = False
        self.lock = RLock()

    def newest(self, since: int) -> tuple[list[Row], int, int]:
        """Rows from number `since` on, the number after the last of them, and how many were overwritten before.

        Rows that are too short for their site are left out: they lie here for the totals alone. Safe while the owner
        writes: rows that were overwritten while being copied are left out and counted.
        """
        head = self.head
        copy = self.rows[:]
        first = min(max(since, self.head - self.capacity), head)
        rows = [copy[i & self.mask] for i in range(first, head)]
        nodes = self.nodes
        known = len(nodes)  # of a row that another thread's reset came in between no node is known here
        kept = [row for row in rows if row[NODE] >= known or not is_too_short(row, nodes[row[NODE]].site.min_ns)]
        return kept, head, first - since

    def copied(self, since: int) -> tuple[bytes, list[Any]]:
        """Rows from number `since` on, packed, and what those have that say more, in their order."""
        packed, rare = bytearray(), []
        for row in self.newest(since)[0]:
            if row[ERROR] is not None or row[ATTRIBUTES] is not None:
                rare.append(more_of(row))
            packed += packed_row(row)
        return bytes(packed), rare

    def held(self, after_ns: int, marks: bytes) -> tuple[int, int, bytes]:
        """Of the rows that ended after a time: how many, the end of the first, ids of those whose nodes are marked."""
        rows = self.newest(self.first_after(after_ns))[0]
        ids = array("Q", [row[SPAN_ID] for row in rows if row[NODE] < len(marks) and marks[row[NODE]]])
        return len(rows), rows[0][END_NS] if rows else 0, ids.tobytes()

    def shrink(self) -> None:
        """A thread that has ended needs no room beyond the rows that it wrote."""
        with self.lock:
            while self.capacity > SMALLEST_RING and self.capacity // 2 >= self.head:
                self.capacity //= 2
            self.mask = self.capacity - 1
            del self.rows[self.capacity :]

    def first_after(self, after_ns: int) -> int:
        """The number of the first row that ended after a time: a ring's rows lie in the order of their ends."""
        low, high = max(self.head - self.capacity, 0), self.head
        while low < high:
            middle = (low + high) // 2
            if self.rows[middle & self.mask][END_NS] > after_ns:
                high = middle
            else:
                low = middle + 1
        return low

    def put(self, row: Row) -> None:
        """Keep the row of a span that has ended, and count it."""
        self.rows[self.head & self.mask] = row
        self.head += 1
        self.count()

    def count(self) -> None:
        """Bring the totals up to the head.

        The owner does not wait for a reader that does so already, unless uncounted rows would be overwritten.
        """
        if not self.lock.acquire(blocking=self.head - self.counted > self.capacity // 2):
            return
        try:
            while self.counted < self.head:
                self._count(self.counted, self.rows[self.counted & self.mask])
        finally:
            self.lock.release()

    def _count(self, number: int, row: Row) -> None:
        """Count the row of a number.

        A signal handler may raise in here after any call, or count the row itself: what there is to add is prepared
        first, and then added without a call in between if nobody else has done it.
        """
        index = row[NODE] if row[NODE] < len(self.nodes) else 0  # of a call that began just as another thread reset
        node = self.nodes[index]
        start_ns, duration_ns, own_ns = row[START_NS], row[END_NS] - row[START_NS], self_ns(row)
        is_cancelled = is_cancelled_request(row, node.site)
        is_short = duration_ns < node.site.min_ns and is_too_short(row, node.site.min_ns)
        # A scope of this kind may carry anything there: what is no size counts for nothing.
        size = row[ATTRIBUTES].get("bytes") if row[ATTRIBUTES] and node.site.kind == "copy" else None
        moved_bytes = size if isinstance(size, int) and 0 <= size < 1 << 64 else 0
        totals = self.totals.get(index) or self.totals.setdefault(index, Totals())
        histogram, at = totals.histogram, bucket(duration_ns)
        if at not in histogram:
            histogram.setdefault(at, 0)
        if self.counted != number:
            return
        self.counted = number + 1
        self.too_short += is_short
        if not totals.calls or duration_ns < totals.min_ns:
            totals.min_ns = duration_ns
        if duration_ns > totals.max_ns:
            totals.max_ns = duration_ns
        if not totals.calls or start_ns < totals.first_ns:
            totals.first_ns = start_ns
            self.first_calls[index] = start_ns, duration_ns
        histogram[at] += 1
        totals.calls += 1
        totals.errors += row[ERROR] is not None
        totals.cancelled += is_cancelled
        if node.inner is not node:
            totals.total_ns += duration_ns
            totals.elapsed_ns += duration_ns
        totals.self_ns += own_ns
        totals.moved_bytes += moved_bytes

    def usage(self) -> list[tuple[int, int, int, int]]:
        """Node index, calls, total ns and steps of each call path: those of generators, also of such as go on."""
        with self.lock:
            self.count()
            steps = self.steps.copy()
            used = [(index, one.calls, one.total_ns, steps.pop(index, 0)) for index, one in self.totals.items()]
            return used + [(index, 0, 0, count) for index, count in steps.items()]

    def count_device(self, index: int, host_ns: int, device_ns: int, elapsed_ns: int) -> bool:
        """Add the device time of a call that was counted as long as its host time; False where no such call was.

        The least elapsed time is exact as long as it was another call's; else it is where the lowest bucket begins.
        """
        with self.lock:
            self.count()
            totals = self.totals.get(index)
            if totals is None or device_ns < 0 or not 0 <= host_ns <= elapsed_ns:
                return False
            histogram, before = totals.histogram, bucket(host_ns)
            if not histogram.get(before):
                return False
            totals.device_ns += device_ns
            if elapsed_ns > host_ns:
                totals.elapsed_ns += elapsed_ns - host_ns
                histogram[bucket(elapsed_ns)] = histogram.get(bucket(elapsed_ns), 0) + 1
                histogram[before] -= 1
                if not histogram[before]:
                    del histogram[before]
                totals.max_ns = max(totals.max_ns, elapsed_ns)
                if bucket(totals.min_ns) == before:
                    totals.min_ns = max(bucket_start(min(histogram)), totals.min_ns)
            return True

    def copied_totals(self) -> dict[int, Totals]:
        """The totals up to now, for another thread to keep."""
        with self.lock:
            self.count()
            found = {index: totals.copy() for index, totals in self.totals.items()}
        for index, waiting_ns in self.waits.copy().items():
            if index in found:
                found[index].waiting_ns = min(waiting_ns, found[index].self_ns)
        return found

    def firsts(self) -> dict[int, First]:
        """The first call of each call path."""
        with self.lock:
            self.count()
            return dict(self.first_calls)


class _Mark:
    """Lives in a thread's locals; its end is the thread's end."""

    ring: Ring | None = None  # a signal handler may raise before `__init__` has set it

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    def __del__(self) -> None:
        if self.ring is not None:
            self.ring.ended = True


class _Local(local):
    ring: Ring
    mark: _Mark


class Outside(Protocol):
    """Where rings lie for others to read: is told of those that shrink and go."""

    def shrink(self, ring: Ring, /) -> None:
        """A ring has no more rows than this."""

    def give_up(self, ring: Ring, ended: Mapping[int, Totals], ended_rows: int, ended_too_short: int, /) -> None:
        """A ring has gone; these are the totals and counts of all that have."""


class Rings:
    """The rings of one process: one for each thread that records, all together within a budget of rows.

    Threads that have ended keep their rows until there are too many of them or the room is needed; their totals stay.
    """

    def __init__(
        self, ring_bytes: int, nodes: list[Node], thread_name: Callable[[], str], writer: Outside | None = None
    ) -> None:
        self.local = _Local()
        self.ended_totals: dict[int, Totals] = {}
        self.ended_firsts: dict[int, First] = {}
        self.ended_rows = 0
        self.ended_too_short = 0
        self._budget = max(ring_bytes // ROW_BYTES, SMALLEST_RING)
        self._nodes = nodes
        self._thread_name = thread_name
        self._writer = writer
        self.lock = RLock()
        self._rings: list[Ring] = []

    def new(self) -> Ring:
        """Make the calling thread's ring.

        A quarter of what is left each time: the first threads get long rings, and there is always some left.
        """
        thread_id = threading.get_native_id()
        name = self._thread_name()
        with self.lock:
            self._retire()
            quarter = max(self._free() // 4, SMALLEST_RING)
            ring = Ring(1 << (quarter.bit_length() - 1), thread_id, name, self._nodes)
            mark = _Mark(ring)  # first of all: where a signal handler raises before it is kept, the ring has ended
            self._rings.append(ring)
        self.local.mark = mark
        self.local.ring = ring
        return ring

    def _free(self) -> int:
        return self._budget - sum(ring.capacity for ring in self._rings)

    def _retire(self) -> None:
        """Give up the rings of threads that have ended, oldest first, until there is room and few enough are left.

        Their totals are taken over.
        """
        ended = [ring for ring in self._rings if ring.ended]
        for ring in ended:
            ring.shrink()
            if self._writer is not None:
                self._writer.shrink(ring)
        while ended and (len(ended) > ENDED_RINGS_KEPT or self._free() < self._budget // 32):
            ring = ended.pop(0)
            for index, totals in ring.copied_totals().items():
                self.ended_totals.setdefault(index, Totals()).merge(totals)
            for index, first in ring.firsts().items():
                self.ended_firsts[index] = min(first, self.ended_firsts.get(index, first))
            self.ended_rows += ring.head
            self.ended_too_short += ring.too_short
            self._rings.remove(ring)
            if self._writer is not None:
                self._writer.give_up(ring, self.ended_totals, self.ended_rows, self.ended_too_short)

    def all(self) -> list[Ring]:
        """The rings in the order in which their threads first recorded."""
        with self.lock:
            return list(self._rings)


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
