"""The rings: each thread's newest rows, and the totals of all that it ever recorded, in bounded memory.

A finished span is a *row*, a tuple of (all but the last two) integers, immutable and so never torn:

    0 node index   1 span id   2 parent id   3 root id   4 task   5 start ns   6 end ns   7 time of the children ns
    8 active ns, or -1 where that is the total   9 name of the exception or None   10 attributes or None

Only its own thread writes to a ring. Totals are brought up to date from the rows in blocks, by the thread that fills a
block or by whoever reads first, so that their cost is paid in tight loops instead of once a call.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from instrument.spans import Site
from instrument.tally import Node, Totals

Row = tuple[int, int, int, int, int, int, int, int, int, "str | None", "dict[Any, Any] | None"]

ROW_BYTES = 340
"""Memory of one row with its integers, at most, measured with tracemalloc on CPython 3.11."""

SMALLEST_RING = 64
FOLD_ROWS = 4096
ENDED_RINGS_KEPT = 1000


class Ring:
    """The newest rows of one thread, and the totals of all of them by node index."""

    __slots__ = (
        "capacity", "ended", "fold_mask", "folded", "head", "lock", "mask", "name", "nodes", "rows", "thread_id",
        "top", "totals",
    )  # fmt: skip

    def __init__(self, capacity: int, thread_id: int, name: str, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.capacity = capacity
        self.mask = capacity - 1
        self.fold_mask = min(capacity // 2, FOLD_ROWS) - 1
        self.rows: list[Any] = [None] * capacity
        self.head = 0
        self.folded = 0
        self.top: Any = None
        self.totals: dict[int, Totals] = {}
        self.thread_id = thread_id
        self.name = name
        self.ended = False
        self.lock = threading.RLock()

    def newest(self, since: int) -> tuple[list[Row], int, int]:
        """Rows from number `since` on, the number after the last of them, and how many were overwritten before.

        Safe while the owner writes: rows that were overwritten while being copied are left out and counted.
        """
        head = self.head
        copy = self.rows[:]
        first = min(max(since, self.head - self.capacity), head)
        return [copy[i & self.mask] for i in range(first, head)], head, first - since

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
            if self.rows[middle & self.mask][6] > after_ns:
                high = middle
            else:
                low = middle + 1
        return low

    def fold(self, nodes: list[Node]) -> None:
        """Bring the totals up to the head.

        The owner does not wait for a reader that folds already, unless unread rows would be overwritten; a signal
        handler or finaliser that comes in while its own thread folds leaves the work to it.
        """
        if not self.lock.acquire(blocking=self.head - self.folded > self.capacity - self.fold_mask):
            return
        try:
            try:
                self._fold(nodes)
            except BaseException:
                # A signal handler raised, and nothing has changed: again, before the rows are overwritten.
                self._fold(nodes)
                raise
        finally:
            self.lock.release()

    def _fold(self, nodes: list[Node]) -> None:
        before, first, last = self.totals, self.folded, self.head
        rows, mask = self.rows, self.mask
        groups: dict[int, list[Row]] = {}
        for i in range(first, last):
            row = rows[i & mask]
            group = groups.get(row[0])
            if group is None:
                groups[row[0]] = [row]
            else:
                group.append(row)
        after = dict(before)
        for index, group in groups.items():
            totals = after[index] = Totals(histogram=Counter())
            if index in before:
                totals.merge(before[index])
            _count(totals, group, nodes[index].site)
        # Both at once: a handler may raise anywhere before this line, and the next fold does all of it.
        self.totals, self.folded = after, last

    def usage(self) -> list[tuple[int, int, int]]:
        """Node index, calls and total ns of each call path."""
        with self.lock:
            self.fold(self.nodes)
            return [(index, totals.calls, totals.total_ns) for index, totals in self.totals.items()]

    def copied_totals(self) -> dict[int, Totals]:
        """The totals up to now, for another thread to keep."""
        with self.lock:
            self.fold(self.nodes)
            return {index: totals.copy() for index, totals in self.totals.items()}


def self_ns(row: Row) -> int:
    """Time of a row outside its children, never negative."""
    own = (row[6] - row[5] if row[8] < 0 else row[8]) - row[7]
    return max(0, own)


def _count(totals: Totals, rows: list[Row], site: Site) -> None:
    durations = [row[6] - row[5] for row in rows]
    total_ns = sum(durations)
    low, high = min(durations), max(durations)
    if totals.calls:
        totals.min_ns = min(totals.min_ns, low)
        totals.max_ns = max(totals.max_ns, high)
    else:
        totals.min_ns, totals.max_ns = low, high
        totals.first_ns = min(row[5] for row in rows)
    totals.calls += len(rows)
    totals.total_ns += total_ns
    totals.elapsed_ns += total_ns
    totals.self_ns += sum([self_ns(row) for row in rows])
    totals.errors += sum([row[9] is not None for row in rows])
    if site.kind == "copy":
        sizes = [row[10].get("bytes") for row in rows if row[10]]
        # A scope of this kind may carry anything there: what is no size counts for nothing, as in the native core.
        totals.moved_bytes += sum([size for size in sizes if isinstance(size, int) and 0 <= size < 1 << 64])
    # The buckets of `tally.bucket`, written out because a call each would double the cost.
    cast("Counter[int]", totals.histogram).update(
        [d if d < 128 else ((e := d.bit_length() - 7) << 6) + (d >> e) for d in durations]
    )


class _Mark:
    """Lives in a thread's locals; its end is the thread's end."""

    __slots__ = ("ring",)

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    def __del__(self) -> None:
        self.ring.ended = True


class _Local(threading.local):
    ring: Ring
    mark: _Mark


class Rings:
    """The rings of one process: one for each thread that records, all together within a budget of rows.

    Threads that have ended keep their rows until there are too many of them or the room is needed; their totals stay.
    """

    def __init__(self, ring_bytes: int, nodes: list[Node], thread_name: Callable[[], str]) -> None:
        self.local = _Local()
        self.ended_totals: dict[int, Totals] = {}
        self.ended_rows = 0
        self._budget = max(ring_bytes // ROW_BYTES, SMALLEST_RING)
        self._nodes = nodes
        self._thread_name = thread_name
        self._lock = threading.RLock()
        self._rings: list[Ring] = []

    def new(self) -> Ring:
        """Make the calling thread's ring.

        A quarter of what is left each time: the first threads get long rings, and there is always some left.
        """
        thread_id = threading.get_native_id()
        name = self._thread_name()
        with self._lock:
            self._retire()
            quarter = max(self._free() // 4, SMALLEST_RING)
            ring = Ring(1 << (quarter.bit_length() - 1), thread_id, name, self._nodes)
            self._rings.append(ring)
        self.local.ring = ring
        self.local.mark = _Mark(ring)
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
        while ended and (len(ended) > ENDED_RINGS_KEPT or self._free() < self._budget // 32):
            ring = ended.pop(0)
            for index, totals in ring.copied_totals().items():
                self.ended_totals.setdefault(index, Totals()).merge(totals)
            self.ended_rows += ring.head
            self._rings.remove(ring)

    def all(self) -> list[Ring]:
        """The rings in the order in which their threads first recorded."""
        with self._lock:
            return list(self._rings)

    def copied_ended_totals(self) -> dict[int, Totals]:
        """The totals of the threads whose rings were given up."""
        with self._lock:
            return {index: totals.copy() for index, totals in self.ended_totals.items()}


class Cursor:
    """One reader's place in every ring: each row is read once, and what came too late to be read is counted.

    `rings` tells the rings there are now, `ended_rows` how many rows went with rings that were given up.
    """

    def __init__(self, rings: Callable[[], list[Any]], ended_rows: Callable[[], int]) -> None:
        self._rings = rings
        self._ended_rows = ended_rows
        self._places: dict[int, tuple[Any, int]] = {}
        self._seen = 0
        self._written = 0
        self.read()
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
            rows, head, _ = ring.newest(since)
            places[id(ring)] = (ring, head)
            written += head
            self._seen += len(rows)
            if rows:
                batches.append((ring.thread_id, rows))
        self._places = places
        self._written = written
        return batches
