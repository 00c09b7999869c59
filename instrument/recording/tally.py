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

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from instrument import native
from instrument.recording.histogram import bucket, merge, percentiles, unpacked
from instrument.recording.spans import Site, Span, by_start

OVERFLOW = Site("(more call paths than the tally keeps)", kind="user")
"""Counts the calls whose call path came after the tally was full."""


_native = native.find("_spans")

LARGEST_COPY_BYTES = 1 << 50
"""No machine copies more at once; a damaged file that says so does not spoil the sum."""


@dataclass(slots=True)
class Totals:
    """Running totals of one node: exact sums, extremes, and a histogram of the elapsed time of its calls.

    All times in ns. `elapsed` is the union of host and device interval of each call; without device work it equals
    the host total. `first_ns` is the monotonic time at which the first call began (0: no call). `probe_ns` is what the
    probes of the calls cost outside of them, which the self time of what is around them holds (0: not known).

    The native recorder gives histograms as bytes, which few readers ask for: `packed` has them, and whatever else the
    histogram is the sum of, until it is first read.
    """

    calls: int = 0
    errors: int = 0
    total_ns: int = 0
    self_ns: int = 0
    device_ns: int = 0
    elapsed_ns: int = 0
    min_ns: int = 0
    max_ns: int = 0
    moved_bytes: int = 0
    first_ns: int = 0
    histogram: dict[int, int] = field(default_factory=dict)
    probe_ns: int = 0
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
        """Of the native recorder's tuple: the fields up to `first_ns` in their order, and the histogram packed."""
        totals = cls(*sums)
        packed: Any = totals.histogram
        del totals.histogram
        totals.packed = [packed]
        return totals

    def add(self, span: Span, *, is_inner: bool = False) -> None:
        """Count one span; where it is of an inner call, the time of the outer one holds its total and device time."""
        elapsed_ns = span.total_ns if is_inner else span.elapsed_ns
        if not self.calls:
            self.min_ns = self.max_ns = elapsed_ns
            self.first_ns = span.start_ns
        self.calls += 1
        self.errors += span.error is not None
        self.self_ns += span.self_ns
        if not is_inner:
            self.total_ns += span.total_ns
            self.device_ns += span.device_ns
            self.elapsed_ns += elapsed_ns
        self.min_ns = min(self.min_ns, elapsed_ns)
        self.max_ns = max(self.max_ns, elapsed_ns)
        self.first_ns = min(self.first_ns, span.start_ns)
        index = bucket(elapsed_ns)
        self.histogram[index] = self.histogram.get(index, 0) + 1
        if span.site.kind == "copy":
            moved = span.attributes.get("bytes")
            if isinstance(moved, int) and 0 <= moved <= LARGEST_COPY_BYTES:
                self.moved_bytes += moved

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
        self.calls += other.calls
        self.errors += other.errors
        self.total_ns += other.total_ns
        self.self_ns += other.self_ns
        self.device_ns += other.device_ns
        self.elapsed_ns += other.elapsed_ns
        self.moved_bytes += other.moved_bytes
        self.probe_ns += other.probe_ns
        if other.packed is not None:
            if self.packed is None:
                self.packed = [self.histogram] if self.histogram else []
                del self.histogram
            self.packed += other.packed
            return
        merge(self.histogram, other.histogram)

    def copy(self) -> Totals:
        """Totals of the caller's own."""
        own = Totals()
        own.merge(self)
        return own

    def percentile(self, fraction: float) -> int | None:
        """The percentile of the calls' elapsed times in ns, as `percentiles` says; None without calls."""
        return percentiles(self.histogram, (fraction,), self.calls, self.min_ns, self.max_ns)[0]


class Node:
    """One call path: a site under a parent path.

    `children` is keyed by site. A site that is on the path already, and one that comes when the tally is full, leads to
    a node that is not below. `inner` is a node of the same path under which calls are counted that run inside a call
    of it; it is one itself where it is its own.
    """

    __slots__ = ("children", "index", "inner", "parent", "site")

    def __init__(self, index: int, site: Site, parent: Node | None) -> None:
        self.index = index
        self.site = site
        self.parent = parent
        self.children: dict[Site, Node] = {}
        self.inner: Node | None = None

    def path(self) -> tuple[Site, ...]:
        """The sites from the root's child down to this node."""
        sites: list[Site] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            sites.append(node.site)
            node = node.parent
        return tuple(reversed(sites))


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

    def charge(self, outside_ns: Callable[[Site], float]) -> None:
        """Set `probe_ns` of every line, from what a call of a site's probe costs outside of its span."""
        for row in self.rows():
            row.totals.probe_ns = round(row.totals.calls * outside_ns(row.path[-1])) if row.path else 0

    def corrected(self) -> Tally:
        """A copy in which self times no longer hold what the probes of the children cost, but are never negative."""
        tally = Tally()
        tally.merge(self)
        by_path = {key: row.totals for key, row in tally._cells.items()}
        for (path, thread_id), totals in by_path.items():
            around = by_path.get((path[:-1], thread_id))
            if path and around is not None:
                around.self_ns = max(around.self_ns - totals.probe_ns, 0)
        return tally

    @property
    def calls(self) -> int:
        """All calls counted."""
        return sum(row.totals.calls for row in self.rows())

    @classmethod
    def of_spans(
        cls, spans: Iterable[Span], threads: Mapping[int, str] | None = None, *, limit_links: int | None = None
    ) -> Tally:
        """Count spans, for a trace that carries no tally of its own, as recorders do. Self times must be set.

        Raises `ValueError` where the call paths have more than `limit_links` sites in all, as no program's have.
        """
        names = dict(threads or {})
        tally = cls()
        ordered = list(spans)
        links = 0
        lines = []
        for line in _counted(ordered) or _counted_in_python(ordered):
            links += len(line[0])
            if limit_links is not None and links > limit_links:
                raise ValueError("its calls lie in one another deeper than any program's; it is damaged")
            lines.append(line)
        if any(len(set(path)) < len(path) for path, _, _ in lines):
            lines = [*_counted_with_recursion(ordered)]
        for path, thread_id, totals in lines:
            tally.threads.setdefault(thread_id, names.get(thread_id, f"thread {thread_id}"))
            tally.totals(path, thread_id).merge(totals)
        return tally


def _counted(spans: list[Span]) -> Iterator[tuple[tuple[Site, ...], int, Totals]] | None:
    """Path, thread and totals of every call path, counted in C; None where that cannot be."""
    found = None if _native is None else _native.count(spans, LARGEST_COPY_BYTES)
    return None if found is None else _lines(*found)


def _lines(
    nodes: list[tuple[int, Site]], cells: list[tuple[Any, ...]]
) -> Iterator[tuple[tuple[Site, ...], int, Totals]]:
    for node, thread_id, *sums in cells:
        path = []
        while node >= 0:
            node, site = nodes[node]
            path.append(site)
        yield tuple(reversed(path)), thread_id, Totals(*sums)


def _counted_in_python(spans: list[Span]) -> Iterator[tuple[tuple[Site, ...], int, Totals]]:
    """The same, span by span. Sorts the list."""
    by_start(spans)
    by_id = {span.span_id: span for span in spans}
    nodes: dict[int, Node] = {}
    root = Node(-1, OVERFLOW, None)

    def node_of(span: Span) -> Node:
        chain: dict[int, Site] = {}
        above: Span | None = span
        while above is not None and above.span_id not in nodes and above.span_id not in chain:
            chain[above.span_id] = above.site
            above = by_id.get(above.parent_id)
        node = root if above is None else nodes.get(above.span_id, root)
        for span_id, site in reversed(chain.items()):
            below = node.children.get(site)
            if below is None:
                below = node.children[site] = Node(len(nodes), site, node)
            node = nodes[span_id] = below
        return node

    cells: dict[tuple[Node, int], Totals] = {}
    for span in spans:
        cell = node_of(span), span.thread_id
        if cell not in cells:
            cells[cell] = Totals()
        cells[cell].add(span)
    for (node, thread_id), totals in cells.items():
        yield node.path(), thread_id, totals


BEFORE_ALL = -(1 << 63)
"""No later than the begin of any span."""


def _counted_with_recursion(spans: list[Span]) -> Iterator[tuple[tuple[Site, ...], int, Totals]]:
    """The same with recursion folded as recorders fold it: from the roots down, 4 us a span. Sorts the list.

    What is around a call is told by its parents: a generator's that in which it began, whoever else resumed it.
    """
    by_start(spans)
    ids = {span.span_id for span in spans}
    below: dict[int | None, list[Span]] = {}
    for span in spans:
        below.setdefault(span.parent_id if span.parent_id in ids else None, []).append(span)
    root = Node(-1, Site("(root)"), None)
    cells: dict[tuple[Node, int], Totals] = {}
    ends: dict[tuple[Node, int], int] = {}  # of the calls around, the latest
    seen: set[int] = set()
    # All of them once more for a damaged file, whose ids may run in a circle.
    for first in itertools.chain(below.get(None, ()), spans):
        pending: list[tuple[Span, Node, int | None]] = [(first, root, None)]
        while pending:
            span, node, ended_ns = pending.pop()
            if ended_ns is not None:
                ends[node, span.thread_id] = ended_ns
                continue
            if id(span) in seen:
                continue
            seen.add(id(span))
            node = _folded(node, span.site)
            cell = node, span.thread_id
            before_ns = ends.get(cell, BEFORE_ALL)
            cells.setdefault(cell, Totals()).add(span, is_inner=before_ns >= span.start_ns)
            ends[cell] = max(before_ns, span.end_ns)
            pending.append((span, node, before_ns))
            pending += [(inside, node, None) for inside in reversed(below.get(span.span_id, ()))]
    for (node, thread_id), totals in cells.items():
        yield node.path(), thread_id, totals


def _folded(parent: Node, site: Site) -> Node:
    """The node of a site called under a parent, on first sight that of its path which is of the site, if one is."""
    known = parent.children.get(site)
    if known is None:
        again: Node | None = parent
        while again is not None and again.site is not site:
            again = again.parent
        known = parent.children[site] = again or Node(0, site, parent)
    return known
