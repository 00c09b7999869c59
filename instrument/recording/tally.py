"""The tally: the call tree with running totals, in constant memory, exact for every call that was made.

A node is a path of sites; each thread keeps its own totals for it. Merging tallies of threads and processes adds
integers and takes minima and maxima, so it is exact and its order does not matter.

Recursion makes no new paths: a site that is on the path already, directly or through others, counts at the node where
it stands. A call of a node inside another one of the same node and thread is an *inner* call. It counts as a call, with
its error, its own time, and its length in extremes and percentiles; its total and its device time do not count, for the
time of the outer call holds them. So the self times of a tree still sum to its total, `total / calls` is the time for
each call with none counted twice, and the children of a node may have more in all than it has, where one of them ran
inside another. The spans of a timeline keep their true parents.

A node's calls have a line of their own while there is room for `NODE_LIMIT` of them; then each site has one line more,
below that of the overflow, for all its calls whose path came too late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from instrument.recording.histogram import merge, percentiles, unpacked
from instrument.recording.spans import Site
from instrument.runtime.cheap_start import dataclass, field

Key = TypeVar("Key", bound=Hashable)

OVERFLOW = Site("(more call paths than the tally keeps)", kind="user")
"""Counts the calls whose call path came after the tally was full."""

LARGEST_COPY_BYTES = 1 << 50
"""No machine copies more at once; a damaged file that says so does not spoil the sum."""


@dataclass(slots=True)
class Totals:
    """Running totals of one node: exact sums, extremes, and a histogram of the elapsed time of its calls.

    All times in ns. Of `self_ns` the calls waited, suspended by what they awaited, `waiting_ns`, and ran in the rest.
    `elapsed` is the union of host and device interval of each call; without device work it equals the host total.
    `first_ns` is the monotonic time at which the first call began (0: no call). `cancelled` counts requests that were
    broken off and have no error. `probe_ns` is the cost of the calls' probes outside of the calls (0: not known): it is
    in the self time of what is around them.

    The native recorder gives histograms as bytes, which few readers ask for: `packed` has them, and whatever else the
    histogram is the sum of, until it is first read.
    """

    calls: int = 0
    errors: int = 0
    total_ns: int = 0
    self_ns: int = 0
    waiting_ns: int = 0
    device_ns: int = 0
    elapsed_ns: int = 0
    min_ns: int = 0
    max_ns: int = 0
    moved_bytes: int = 0
    first_ns: int = 0
    histogram: dict[int, int] = field(default_factory=dict)
    probe_ns: int = 0
    cancelled: int = 0
    packed: list[dict[int, int] | bytes] | None = field(default=None, init=False, repr=False, compare=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The histogram where it is packed: the slot is empty then."""
            if name != "histogram" or self.packed is None:
                raise AttributeError(f"'Totals' object has no attribute '{name}'", name=name, obj=self)
            found = unpacked(self.packed)
            self.histogram, self.packed = found, None
            return found

    @classmethod
    def of_core(cls, sums: tuple[Any, ...]) -> Totals:
        """Return totals of a recorder's tuple: the fields up to `first_ns`, `cancelled`, and the packed histogram."""
        *numbers, cancelled, packed = sums
        totals = cls(*numbers)
        totals.cancelled = cancelled
        del totals.histogram
        totals.packed = [packed]
        return totals

    def merge(self, other: Totals) -> None:
        """Add another node's totals to these."""
        if not other.calls:
            return
        if self.calls:
            self.min_ns = min(self.min_ns, other.min_ns)
            self.max_ns = max(self.max_ns, other.max_ns)
            self.first_ns = min(self.first_ns, other.first_ns)
        else:
            self.min_ns, self.max_ns, self.first_ns = other.min_ns, other.max_ns, other.first_ns
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.packed is not None:
            if self.packed is None:
                self.packed = [self.histogram] if self.histogram else []
                del self.histogram
            self.packed += other.packed
            return
        merge(self.histogram, other.histogram)

    def since(self, before: Totals | None) -> Totals:
        """Return what was counted after an earlier state of the same; extremes remain those of all calls."""
        grown = self.copy()
        if before is not None:
            for name in SUMS:
                setattr(grown, name, getattr(self, name) - getattr(before, name))
            grown.histogram = dict(Counter(self.histogram) - Counter(before.histogram))
        return grown

    def copy(self) -> Totals:
        """Return totals of the caller's own."""
        own = Totals()
        own.merge(self)
        return own

    def percentile(self, fraction: float) -> int | None:
        """The percentile of the calls' elapsed times in ns, as `percentiles` says; None without calls."""
        return percentiles(self.histogram, (fraction,), self.calls, self.min_ns, self.max_ns)[0]


SUMS = (
    "calls", "errors", "total_ns", "self_ns", "waiting_ns", "device_ns", "elapsed_ns", "moved_bytes", "probe_ns",
    "cancelled",
)  # fmt: skip
"""Fields of `Totals` that add up."""


@dataclass(slots=True)
class Row:
    """One line of a tally: a call path on one thread."""

    path: tuple[Site, ...]
    thread_id: int
    totals: Totals


class Tally:
    """Totals by call path and thread.

    `threads` maps thread ids to names in the order in which the threads first recorded; thread 0 collects threads
    that have ended and were merged to keep the tally small.
    """

    def __init__(self, threads: Mapping[int, str] | None = None) -> None:
        self.threads: dict[int, str] = dict(threads or {})
        self._rows: list[Row] = []
        # Those of the rows that have been looked for by path: the first so many.
        self._cells: dict[tuple[tuple[int, ...], int], Row] = {}
        # Sites that mean the same place have one number.
        self._places: dict[tuple[object, ...], int] = {}
        self._place_of: dict[Site, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def totals(self, path: tuple[Site, ...], thread_id: int) -> Totals:
        """The totals of a path on a thread, made empty on first sight."""
        for row in self._rows[len(self._cells) :]:
            self._cells[self._key(row.path, row.thread_id)] = row
        key = self._key(path, thread_id)
        known = self._cells.get(key)
        if known is not None:
            return known.totals
        totals = Totals()
        self._cells[key] = self.append(path, thread_id, totals)
        return totals

    def _key(self, path: tuple[Site, ...], thread_id: int) -> tuple[tuple[int, ...], int]:
        for site in path:
            if site not in self._place_of:
                self._place_of[site] = self._places.setdefault(site.key, len(self._places))
        return tuple(map(self._place_of.__getitem__, path)), thread_id

    def append(self, path: tuple[Site, ...], thread_id: int, totals: Totals) -> Row:
        """Add a line of which the caller knows that there is none yet."""
        row = Row(path, thread_id, totals)
        self._rows.append(row)
        self.threads.setdefault(thread_id, f"thread {thread_id}")
        return row

    def rows(self) -> Iterator[Row]:
        """Every line, parents before their children within a thread when the tally was built that way."""
        return iter(self._rows)

    def merge(self, other: Tally) -> None:
        """Add another tally, for instance of another process."""
        for thread_id, name in other.threads.items():
            self.threads.setdefault(thread_id, name)
        for row in other.rows():
            self.totals(row.path, row.thread_id).merge(row.totals)

    def by(self, key_of: Callable[[Row], Key]) -> dict[Key, Totals]:
        """Add up the lines below the root by the key that a function returns; the caller may change no totals."""
        found: dict[Key, Totals] = {}
        for row in self._rows:
            if row.path:
                key = key_of(row)
                if key in found:
                    found[key] = found[key].copy()
                    found[key].merge(row.totals)
                else:
                    found[key] = row.totals
        return found

    def charge(self, outside_ns: Callable[[Site], float]) -> None:
        """Set `probe_ns` of every line, from what a call of a site's probe costs outside of its span."""
        for row in self.rows():
            row.totals.probe_ns = round(row.totals.calls * outside_ns(row.path[-1])) if row.path else 0

    def corrected(self) -> Tally:
        """A copy in which self times no longer hold what the probes of the children cost, but are never negative."""
        tally = Tally()
        tally.merge(self)
        for (path, thread_id), row in tally._cells.items():
            around = tally._cells.get((path[:-1], thread_id))
            if path and around is not None:
                around.totals.self_ns = max(around.totals.self_ns - row.totals.probe_ns, 0)
                around.totals.waiting_ns = min(around.totals.waiting_ns, around.totals.self_ns)
        return tally

    @property
    def calls(self) -> int:
        """All calls counted."""
        return sum(row.totals.calls for row in self.rows())
