"""The tally of a trace: the totals of its spans by call path and thread, as recorders count them.

Recursion is folded as they fold it: a call of a site that is on its path already counts at the node where that stands,
and where a call around it on the same node and thread had not ended, it is an inner call, whose total and device time
do not count. What is around a call is told by its parents: a generator's that in which it began, whoever else resumed
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from instrument.recording.histogram import LAST_BUCKET, bucket_start
from instrument.recording.spans import OUTCOME, Site
from instrument.recording.tally import LARGEST_COPY_BYTES, Tally, Totals
from instrument.trace.columns import FARTHEST_NS, Bools, Columns, Int32s, Int64s
from instrument.trace.forest import NONE, by_level
from instrument.trace.groups import Groups, numbered, places_of
from instrument.trace.intervals import union_by_group
from instrument.trace.layout import in_order
from instrument.trace.self_times import waiting_times

_STARTS = np.array([bucket_start(index) for index in range(LAST_BUCKET + 1)], dtype=np.int64)


_TOO_DEEP = "its calls lie in one another deeper than any program's; it is damaged"


class _Paths:
    """Call paths as nodes, each with its site's number and the node above it, and of each call of a site in one, its
    node: `recurring` are those in which a call may have another one of the same node around it.

    Raises `ValueError` where it has gone over more than `limit_links` nodes to find such.
    """

    def __init__(self, limit_links: int | None) -> None:
        self._links_left = limit_links
        self.site: list[int] = []
        self.parent: list[int] = []
        self.depth: list[int] = []
        self.recurring: set[int] = set()
        self._below: dict[tuple[int, int], int] = {}
        self._known_sites: set[int] = set()

    def below(self, parent: int, site: int) -> int:
        """The node of a site that is called in another, on first sight that of its path which is of the site."""
        node = self._below.get((parent, site))
        if node is None:
            node = self._below[parent, site] = self._folded(parent, site)
        return node

    def _folded(self, parent: int, site: int) -> int:
        if site in self._known_sites:
            on_path = [parent]
            while (node := on_path[-1]) != NONE:
                self._go_over_link()
                if self.site[node] == site:
                    self.recurring.update(on_path)
                    return node
                on_path.append(self.parent[node])
        self._known_sites.add(site)
        self.site.append(site)
        self.parent.append(parent)
        self.depth.append(1 if parent == NONE else self.depth[parent] + 1)
        return len(self.site) - 1

    def _go_over_link(self) -> None:
        if self._links_left is not None:
            self._links_left -= 1
            if self._links_left < 0:
                raise ValueError(_TOO_DEEP)

    def all(self, sites: Sequence[Site]) -> list[tuple[Site, ...]]:
        """The path of each node, the topmost site first."""
        found: list[tuple[Site, ...]] = []
        for site, parent in zip(self.site, self.parent, strict=True):
            found.append((*(() if parent == NONE else found[parent]), sites[site]))
        return found


def tally_of(trace: Columns, threads: Mapping[int, str] | None = None, *, limit_links: int | None = None) -> Tally:
    """The tally of all spans; `threads` are the names of some.

    Raises `ValueError` where the call paths have more than `limit_links` sites in all, as no program's have.
    """
    tally, names = Tally(), dict(threads or {})
    if not len(trace):
        return tally
    paths = _Paths(limit_links)
    node_of = _nodes(trace, paths)
    cell_of, rows = numbered(node_of, numbered(trace.thread_id)[0])
    nodes = node_of[rows]
    if limit_links is not None and int(np.array(paths.depth)[nodes].sum()) > limit_links:
        raise ValueError(_TOO_DEEP)
    totals = _totals(trace, cell_of, len(rows), _inner(trace, node_of, paths.recurring))
    path_of = paths.all(trace.sites)
    node_numbers, thread_ids = nodes.tolist(), trace.thread_id[rows].tolist()
    for cell in _in_order(trace, cell_of, len(rows)):
        thread_id = thread_ids[cell]
        tally.threads.setdefault(thread_id, names.get(thread_id, f"thread {thread_id}"))
        tally.append(path_of[node_numbers[cell]], thread_id, totals[cell])
    return tally


def _nodes(trace: Columns, paths: _Paths) -> Int64s:
    """Return the node of each row. Sites that mean the same place are one."""
    known: dict[tuple[object, ...], int] = {}
    places = np.array([known.setdefault(site.key, number) for number, site in enumerate(trace.sites)], dtype=np.int64)
    node_of = np.full(len(trace) + 1, NONE, dtype=np.int64)  # the last one is above those that have no parent
    for rows in by_level(trace.level):
        above, sites = node_of[trace.parent[rows]], places[trace.site[rows]]
        if len(rows) == 1:  # as in a chain, of which there may be thousands of levels
            node_of[rows[0]] = paths.below(int(above[0]), int(sites[0]))
            continue
        numbers, some = numbered(above + 1, sites)
        nodes = map(paths.below, above[some].tolist(), sites[some].tolist())
        node_of[rows] = np.fromiter(nodes, np.int64, len(some))[numbers]
    return node_of[:-1]


def _inner(trace: Columns, node_of: Int64s, recurring: set[int]) -> Bools:
    """Return True for calls that began before one around them of the same node and thread had ended."""
    inner = np.zeros(len(trace), dtype=np.bool_)
    if not recurring:
        return inner
    is_recurring = np.zeros(int(node_of.max()) + 1, dtype=np.bool_)
    is_recurring[list(recurring)] = True
    rows = np.flatnonzero(is_recurring[node_of])
    around = _around_of_node(trace, node_of, rows)
    # The latest end of all that are around: pointers are doubled.
    latest, up = np.full(len(trace), -FARTHEST_NS, dtype=np.int64), around.copy()
    latest[rows] = np.where(around[rows] == NONE, -FARTHEST_NS, trace.end_ns[around[rows]])
    rows = found = rows[around[rows] != NONE]
    while len(rows):
        its = up[rows]
        later, farther = latest[its], up[its]
        latest[rows] = np.maximum(latest[rows], later)
        up[rows] = farther
        rows = rows[farther != NONE]
    inner[found] = latest[found] >= trace.start_ns[found]
    return inner


def _around_of_node(trace: Columns, node_of: Int64s, rows: Int64s) -> Int32s:
    """Return the nearest row above each of some rows that is of the same node and thread."""
    around = np.full(len(trace), NONE, dtype=np.int32)
    up = trace.parent[rows]
    while True:
        goes_on = up != NONE
        rows, up = rows[goes_on], up[goes_on]
        if not len(rows):
            return around
        same = (node_of[up] == node_of[rows]) & (trace.thread_id[up] == trace.thread_id[rows])
        around[rows[same]] = up[same]
        rows, up = rows[~same], trace.parent[up[~same]]


def _totals(trace: Columns, cells: Int64s, count: int, inner: Bools) -> list[Totals]:
    """The totals of each cell."""
    device_ns, elapsed_ns = _device_and_elapsed(trace)
    elapsed_ns[inner] = trace.total_ns[inner]
    moved = np.zeros(len(trace), dtype=np.int64)
    copied = np.intersect1d(trace.attributes.having("bytes"), np.flatnonzero(trace.of_kind("copy")))
    moved[copied] = [
        value if isinstance(value, int) and 0 <= value <= LARGEST_COPY_BYTES else 0
        for value in trace.attributes.values("bytes", copied)
    ]
    cancelled = trace.of_kind("request") & (trace.error == NONE)
    cancelled[np.setdiff1d(np.flatnonzero(cancelled), trace.attributes.having(OUTCOME))] = False
    groups, outer = Groups(cells, count), ~inner
    columns: list[NDArray[np.int64]] = [
        groups.sizes(),
        groups.sums(trace.error != NONE),
        groups.sums(trace.total_ns * outer),
        groups.sums(trace.self_ns),
        groups.sums(waiting_times(trace)),
        groups.sums(device_ns * outer),
        groups.sums(elapsed_ns * outer),
        groups.least(elapsed_ns, 0),
        groups.most(elapsed_ns, 0),
        groups.sums(moved),
        groups.least(trace.start_ns, 0),
    ]
    buckets = np.searchsorted(_STARTS, elapsed_ns, side="right") - 1
    keys, sizes = np.unique(cells * (LAST_BUCKET + 1) + buckets, return_counts=True)
    histograms: list[dict[int, int]] = [{} for _ in range(count)]
    its, of_buckets = np.divmod(keys, LAST_BUCKET + 1)
    for cell, index, calls in zip(its.tolist(), of_buckets.tolist(), sizes.tolist(), strict=True):
        histograms[cell][index] = calls
    found = list(map(Totals, *(column.tolist() for column in columns), histograms))
    for totals, count_of_cell in zip(found, groups.sums(cancelled).tolist(), strict=True):
        totals.cancelled = count_of_cell
    return found


def _device_and_elapsed(trace: Columns) -> tuple[Int64s, Int64s]:
    """Return the length of the union of each row's device intervals, and of them and its host interval."""
    device_ns, elapsed_ns = np.zeros(len(trace), dtype=np.int64), trace.total_ns.copy()
    if len(trace.device):
        rows, starts, ends = union_by_group(trace.device.row, trace.device.start_ns, trace.device.end_ns)
        before = np.maximum(np.minimum(ends, trace.start_ns[rows]) - starts, 0)
        after = np.maximum(ends - np.maximum(starts, trace.end_ns[rows]), 0)
        groups = Groups(rows, len(trace))
        device_ns[:] = groups.sums(ends - starts)
        elapsed_ns += groups.sums(before + after).astype(np.int64)
    return device_ns, elapsed_ns


def _in_order(trace: Columns, cells: Int64s, count: int) -> list[int]:
    """The cells as one meets them from the roots down, of calls side by side those first that begin first.

    Of some that begin together the longer ones come first, then by id.
    """
    rank = places_of(in_order(trace), len(trace))
    by_depth, parent = by_level(trace.level), trace.parent
    sizes = np.ones(len(trace) + 1, dtype=np.int64)  # of a row and all below it
    for rows in reversed(by_depth[1:]):
        if len(rows) == 1:
            sizes[parent[rows[0]]] += sizes[rows[0]]
        else:
            np.add.at(sizes, parent[rows], sizes[rows])
    places = np.full(len(trace) + 1, NONE, dtype=np.int64)
    for rows in by_depth:
        if len(rows) == 1:
            places[rows[0]] = places[parent[rows[0]]] + 1
            continue
        rows = rows[np.lexsort((rank[rows], places[parent[rows]]))]
        before = np.cumsum(sizes[rows]) - sizes[rows]
        firsts = np.flatnonzero(np.diff(parent[rows], prepend=NONE - 1))
        before -= np.repeat(before[firsts], np.diff(firsts, append=len(rows)))
        places[rows] = places[parent[rows]] + 1 + before
    found: list[int] = np.argsort(Groups(cells, count).least(places[:-1], 0)).tolist()
    return found
