"""The tally: running totals for each call path and thread, in constant memory, exact for all calls.

A node of the call tree is a path of sites (instrumented functions). The totals are one numpy array, with a line per
node and thread.

Recursion makes no new paths: a recursive call counts at the existing node of its site. Such an inner call adds
nothing to total and device time, because the outer call's times include it.

Beyond the first `NODE_LIMIT` call paths, all new paths that end in the same site share one node.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.recording.distributions import LAST_BUCKET
from instrument.recording.paths import NOT_BELOW, CallPath, CallTree
from instrument.recording.spans import Site
from instrument.runtime.lazy_imports import NamedTuple

Records = NDArray[Any]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

LARGEST_COPY_BYTES = 1 << 50
"""The maximum number of bytes of one memory copy. A larger number is from a damaged file, and is ignored."""

LARGEST = 1 << 62
"""The maximum sum over all lines. Larger sums, as in a damaged file, are cut to fit into 64 bits."""

ALL_THREADS = "(all threads)"


class Totals(NamedTuple):
    """The totals of calls: a line of a tally, or a sum of lines. All times are in ns.

    - `waiting_ns`: the part of `self_ns` in which an await suspended the calls
    - `elapsed_ns`: the sum of the calls' times on the host or on a device; simultaneous time on both counts once
    - `cancelled`: the number of requests that were cancelled without an error
    - `first_ns`: the monotonic time at which the first call began, 0 without a call
    - `probe_ns`: the cost of the calls' probes that the callers' self times include, 0 if unknown
    """

    node: int = NOT_BELOW
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
    cancelled: int = 0
    first_ns: int = 0
    probe_ns: int = 0
    thread_id: int = 0


CORE_WIDTH = Totals._fields.index("first_ns") + 1
"""The number of fields that the recorder in C fills. They are the first fields of a line."""

TOTALS = np.dtype([(name, np.int64) for name in Totals._fields])
WIDTH = len(Totals._fields)

LEAST, MOST = ("min_ns", "first_ns"), ("max_ns",)
SUMS = tuple(name for name in Totals._fields if name not in ("node", "thread_id", *LEAST, *MOST))
"""The fields of `Totals` that a merge adds up."""

BUCKETS = np.dtype([("line", np.int64), ("bucket", np.int64), ("times", np.int64)])
"""The numpy type of a histogram bucket: line index, bucket number and number of calls."""

_ADDED = [Totals._fields.index(name) for name in SUMS]
_EXTREMES = {
    Totals._fields.index(name): choose for names, choose in ((LEAST, np.minimum), (MOST, np.maximum)) for name in names
}


class Row(NamedTuple):
    """The totals of one call path on one thread, with the path as sites."""

    path: CallPath
    totals: Totals

    @property
    def thread_id(self) -> int:
        return self.totals.thread_id


class Tally:
    """The totals of all calls by call path and thread.

    - `threads`: the names of threads by id, in the order of their first spans; thread 0 has merged calls of ended
      threads
    - `lines`: an array with a line per call path and thread, grouped by thread
    - `site_of`, `parents`: columns by node; parents come before their children
    - `buckets`: the histograms, unless there is a function `make_histogram` that adds them up on demand
    """

    def __init__(
        self,
        tree: CallTree | None = None,
        lines: Records | None = None,
        buckets: Records | None = None,
        threads: Mapping[int, str] | None = None,
        make_histogram: Callable[[Iterable[int], int | None], dict[int, int]] | None = None,
    ) -> None:
        self.tree = CallTree() if tree is None else tree
        located = self.tree.merge_equal_paths()
        self.site_of, self.parents = (np.asarray(ids, dtype=np.int32) for ids in (located.site_of, located.parents))
        self.lines = _cut_large_numbers(np.zeros(0, TOTALS) if lines is None else lines)
        self.buckets = np.zeros(0, BUCKETS) if buckets is None else buckets
        self.threads = dict(threads or {})
        self._make_histogram = make_histogram
        self._device_below: dict[int | None, Mapping[int, int]] = {}

    @classmethod
    def from_nodes(
        cls,
        tree: CallTree,
        lines: Records,
        buckets: Records,
        threads: Mapping[int, str],
        make_histogram: Callable[[Iterable[int], int | None], dict[int, int]] | None = None,
    ) -> Tally:
        """Return a tally of lines whose `node` is a node of `tree`. Lines of one thread with equal paths are merged."""
        order = np.argsort(lines["first_ns"], kind="stable")
        lines, buckets = lines[order], buckets.copy()
        buckets["line"] = np.argsort(order)[buckets["line"]]
        lines["node"] = np.asarray(tree.merge_equal_paths().places, dtype=np.int64)[lines["node"]]
        return cls(tree, *_merge_lines(lines, buckets, threads), threads, make_histogram)

    @classmethod
    def from_paths(
        cls, paths: Sequence[CallPath | None], lines: Records, buckets: Records, threads: Mapping[int, str]
    ) -> Tally:
        """Return a tally of lines whose `node` is an index in `paths`. Lines whose path is None are left out. Lines of
        one thread with equal paths are merged. Nodes are in the order of their paths."""
        lines, numbers = lines.copy(), np.full(len(paths), NOT_BELOW, dtype=np.int64)
        used = np.unique(lines["node"]).tolist()
        tree, nodes = _make_tree([paths[place] or () for place in used])
        numbers[used] = nodes
        lines["node"] = numbers[lines["node"]]
        names = dict(threads)
        for thread_id in dict.fromkeys(lines["thread_id"][lines["node"] != NOT_BELOW].tolist()):
            names.setdefault(thread_id, f"thread {thread_id}")
        return cls(tree, *_merge_lines(lines, buckets, names), names)

    @classmethod
    def sum_tallies(cls, tallies: Iterable[Tally], threads: Mapping[int, str] | None = None) -> Tally:
        """Return the sum of several tallies, such as those of processes. A thread's name is from `threads`, or else
        from the first tally with the thread."""
        paths, names, count = list[CallPath](), dict(threads or {}), 0
        lines, buckets = [np.zeros(0, TOTALS)], [np.zeros(0, BUCKETS)]
        for tally in tallies:
            for thread_id, name in tally.threads.items():
                names.setdefault(thread_id, name)
            moved, counted = tally.lines.copy(), tally.buckets.copy()
            moved["node"] += len(paths)
            counted["line"] += count
            paths += tally.paths
            count += len(moved)
            lines.append(moved)
            buckets.append(counted)
        return cls.from_paths(paths, np.concatenate(lines), np.concatenate(buckets), names)

    def change_paths(
        self,
        path_of: Callable[[CallPath], CallPath | None] | None = None,
        thread_of: Callable[[int], int | None] | None = None,
        threads: Mapping[int, str] | None = None,
        moved_ns: int = 0,
    ) -> Tally:
        """Return a tally with changed paths, threads and times. Lines whose new path or thread is None are left out."""
        lines = self.lines.copy()
        paths: list[CallPath | None] = [*self.paths]
        if path_of is not None:
            for node in dict.fromkeys(lines["node"].tolist()):
                paths[node] = path_of(self.paths[node])
        if thread_of is not None:
            paths.append(None)
            ids, of_line = np.unique(lines["thread_id"], return_inverse=True)
            renumbered = [thread_of(thread_id) for thread_id in ids.tolist()]
            lines["node"][np.array([thread_id is None for thread_id in renumbered], np.bool_)[of_line]] = len(paths) - 1
            lines["thread_id"] = np.array([thread_id or 0 for thread_id in renumbered], np.int64)[of_line]
        lines["first_ns"] += moved_ns
        return self.from_paths(paths, lines, self.buckets, self.threads if threads is None else threads)

    def __len__(self) -> int:
        return len(self.lines)

    # ---------------------------------------------------------------- single lines

    @cached_property
    def paths(self) -> list[CallPath]:
        paths, sites = list[CallPath](), self.tree.sites
        for site, parent in zip(self.site_of.tolist(), self.parents.tolist(), strict=True):
            paths.append((*(paths[parent] if parent != NOT_BELOW else ()), sites[site]))
        return paths

    def iterate_totals(self) -> Iterator[Row]:
        """Yield each line with its call path. For many lines, the array `lines` is faster."""
        paths = self.paths
        return (Row(paths[line[0]], Totals._make(line)) for line in self.lines.tolist())

    def sites(self) -> list[Site]:
        return list(dict.fromkeys(site for node in self.lines["node"].tolist() for site in self.paths[node]))

    # ---------------------------------------------------------------- sums

    def lines_of_thread(self, thread: int | None) -> Records:
        if thread is None:
            return self.lines
        begin, end = self._line_ranges.get(thread, (0, 0))
        return self.lines[begin:end]

    @cached_property
    def _line_ranges(self) -> dict[int, tuple[int, int]]:
        ids = self.lines["thread_id"]
        edges = [*np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1)).tolist(), len(ids)]
        return {int(ids[begin]): (begin, end) for begin, end in pairwise(edges)}

    def is_field_nonzero(self, field: str) -> bool:
        return bool(self.lines[field].any())

    def sum_by_group(self, groups: NDArray[Any], count: int, thread: int | None = None) -> Records:
        """Return the sum of the lines in each of `count` groups. `groups` has the group of each node. Nodes with a
        negative group are left out. `thread` is None for all threads."""
        lines = self.lines_of_thread(thread)
        return sum_lines(lines, np.asarray(groups)[lines["node"]], count)

    def sum_by_site(self) -> Records:
        return self.sum_by_group(self.site_of, int(self.site_of.max(initial=NOT_BELOW)) + 1)

    def lines_by_key(self, keys: Sequence[Any]) -> dict[Any, list[int]]:
        """Return the indices of lines by the key of their site. `keys` has the key of each site. Lines with an empty
        key are left out."""
        places = dict[Any, list[int]]()
        for line, site in enumerate(self.site_of[self.lines["node"]].tolist()):
            if keys[site]:
                places.setdefault(keys[site], []).append(line)
        return places

    def nodes_of_lines(self, places: Sequence[int]) -> list[int]:
        return list(dict.fromkeys(self.lines["node"][list(places)].tolist()))

    def total_of_lines(self, places: Sequence[int]) -> Totals:
        return sum_all_lines(self.lines[list(places)])

    def histogram(self, nodes: Iterable[int], thread: int | None = None) -> dict[int, int]:
        if self._make_histogram is not None:
            return self._make_histogram(nodes, thread)
        order, edges = self._buckets_by_node
        histogram = dict[int, int]()
        for node in nodes:
            buckets = self.buckets[order[edges[node] : edges[node + 1]]]
            if thread is not None:
                buckets = buckets[self.lines["thread_id"][buckets["line"]] == thread]
            for bucket, times in zip(buckets["bucket"].tolist(), buckets["times"].tolist(), strict=True):
                histogram[bucket] = histogram.get(bucket, 0) + times
        return histogram

    @cached_property
    def _buckets_by_node(self) -> tuple[Int64s, list[int]]:
        """The indices of the buckets sorted by node, and the position of each node's first bucket in this order."""
        nodes = self.lines["node"][self.buckets["line"]]
        order = np.argsort(nodes, kind="stable")
        return order, np.searchsorted(nodes[order], np.arange(len(self.parents) + 1)).tolist()

    def find_missing_device_ns(self, thread: int | None) -> Mapping[int, int]:
        """Return the device time that is missing at each node: the device time below the node, minus the node's own.
        Nodes without calls or without missing time are left out. `thread` is None for all threads."""
        if thread in self._device_below or not self.is_field_nonzero("device_ns"):
            return self._device_below.get(thread, {})
        sums = self.sum_by_group(np.arange(len(self.parents)), len(self.parents), thread)
        device, is_called, parents = sums["device_ns"].tolist(), (sums["calls"] != 0).tolist(), self.parents.tolist()
        below, more = [0] * len(device), dict[int, int]()
        for node in range(len(device) - 1, -1, -1):  # a parent comes before its children
            own_ns, below_ns = device[node], below[node]
            if below_ns > own_ns and is_called[node]:
                more[node] = below_ns - own_ns
            if parents[node] >= 0:
                below[parents[node]] += max(own_ns, below_ns)
        return self._device_below.setdefault(thread, more)

    @property
    def calls(self) -> int:
        return int(self.lines["calls"].sum())

    # ---------------------------------------------------------------- other tallies of it

    def merge_threads(self) -> Tally:
        """Return the sum over all threads, in the order of first calls. Paths without calls are left out."""
        sums = sum_lines(self.lines, self.lines["node"], len(self.parents))
        sums["node"] = np.arange(len(sums))
        called = np.flatnonzero(sums["calls"])
        called = called[np.argsort(sums["first_ns"][called], kind="stable")]
        place = np.full(len(sums), NOT_BELOW, dtype=np.int64)
        place[called] = np.arange(len(called))
        buckets = self.buckets.copy()
        buckets["line"] = place[self.lines["node"][buckets["line"]]]
        threads = {0: ALL_THREADS} if len(called) else {}
        return Tally(self.tree, sums[called], buckets[buckets["line"] >= 0], threads, self._make_histogram)

    def subtract_earlier(self, before: Tally) -> Tally:
        """Return the calls of all threads since an earlier tally. Minima and maxima remain those of all calls."""
        now, old = self.merge_threads(), before.merge_threads()
        place = np.full(len(now.parents), NOT_BELOW, dtype=np.int64)
        place[old.lines["node"]] = np.arange(len(old))
        lines = np.flatnonzero(place[now.lines["node"]] != NOT_BELOW)
        earlier = place[now.lines["node"][lines]]
        for name in SUMS:
            now.lines[name][lines] -= old.lines[name][earlier]
        removed = old.buckets.copy()
        node_of = np.full(len(now.parents), NOT_BELOW, dtype=np.int64)
        node_of[now.lines["node"]] = np.arange(len(now))
        removed["line"], removed["times"] = node_of[old.lines["node"][removed["line"]]], -removed["times"]
        now.buckets = _sum_buckets(np.concatenate([now.buckets, removed]))
        return now

    def set_probe_costs(self, outside_ns: Callable[[Site], float]) -> None:
        """Set `probe_ns` of all lines. `outside_ns` returns the cost per call that a site's probe adds outside of the
        span."""
        each_ns = np.array([*map(outside_ns, self.tree.sites), 0.0])
        self.lines["probe_ns"] = np.rint(self.lines["calls"] * each_ns[self.site_of[self.lines["node"]]])

    def correct_self_times(self) -> Tally:
        """Return a tally whose self times do not include the probes of children."""
        lines, above = self.lines.copy(), self.parents[self.lines["node"]].astype(np.int64)
        key, parent_key = _number_node_thread_pairs(lines["node"], lines["thread_id"], above)
        order = np.argsort(key, kind="stable")
        at = np.searchsorted(key, parent_key, sorter=order).clip(max=max(len(key) - 1, 0))
        has_line = (above != NOT_BELOW) & (key[order[at]] == parent_key) if len(key) else np.zeros(0, np.bool_)
        around = order[at[has_line]]
        np.subtract.at(lines["self_ns"], around, lines["probe_ns"][has_line])
        lines["self_ns"][around] = np.maximum(lines["self_ns"][around], 0)
        lines["waiting_ns"][around] = np.minimum(lines["waiting_ns"][around], lines["self_ns"][around])
        return Tally(self.tree, lines, self.buckets, self.threads, self._make_histogram)


def view_as_numbers(lines: Records) -> Int64s:
    return lines.view(np.int64).reshape(-1, WIDTH)


def make_buckets(line: NDArray[Any], bucket: NDArray[Any], times: NDArray[Any]) -> Records:
    buckets = np.zeros(len(line), BUCKETS)
    buckets["line"], buckets["bucket"], buckets["times"] = line, bucket, np.minimum(times, LARGEST)
    return buckets


def sum_lines(lines: Records, groups: NDArray[Any], count: int) -> Records:
    """Return the sum of the lines in each group below `count`. Lines with a negative group, or without calls, are left
    out."""
    sums, table = np.zeros(count, TOTALS), view_as_numbers(lines)
    is_counted = (groups >= 0) & (lines["calls"] != 0)
    if not is_counted.all():
        table, groups = table[is_counted], groups[is_counted]
    if not len(groups):
        return sums
    small = groups.astype(np.uint16) if count <= 1 << 16 else groups  # sorted in a sixth of the time
    order = np.argsort(small, kind="stable")
    table, groups = table[order], groups[order]
    firsts = np.flatnonzero(np.diff(groups, prepend=NOT_BELOW))
    totals = np.add.reduceat(table, firsts)
    for field, choose in _EXTREMES.items():
        totals[:, field] = choose.reduceat(table[:, field], firsts)
    view_as_numbers(sums)[groups[firsts]] = totals
    for name in ("node", "thread_id"):
        sums[name] = 0
    return sums


def sum_all_lines(lines: Records) -> Totals:
    (total,) = sum_lines(lines, np.zeros(len(lines), np.int64), 1).tolist()
    return Totals._make(total)


def _cut_large_numbers(lines: Records) -> Records:
    lines = np.ascontiguousarray(lines)
    table = view_as_numbers(lines)[:, : CORE_WIDTH - 1]
    if max(int(table.max(initial=0)), -int(table.min(initial=0))) * len(lines) < LARGEST:
        return lines
    table = view_as_numbers(lines)[:, _ADDED]
    if np.abs(table, dtype=np.float64).sum(axis=0).max() >= LARGEST:
        most = LARGEST // len(lines)
        lines = lines.copy()
        view_as_numbers(lines)[:, _ADDED] = table.clip(-most, most)
    return lines


def _merge_lines(lines: Records, buckets: Records, threads: Mapping[int, str]) -> tuple[Records, Records]:
    places = {thread_id: place for place, thread_id in enumerate(threads)}
    ids, of_line = np.unique(lines["thread_id"], return_inverse=True)
    rank = np.array([places.get(thread_id, len(places)) for thread_id in ids.tolist()], np.int64)[of_line]
    key, _ = _number_node_thread_pairs(lines["node"], rank, lines["node"])
    _, firsts, group = np.unique(key, return_index=True, return_inverse=True)
    order = np.lexsort((firsts, rank[firsts]))
    order = order[lines["node"][firsts[order]] != NOT_BELOW]
    place = np.full(len(firsts), NOT_BELOW, dtype=np.int64)
    place[order] = np.arange(len(order))
    group = place[group]
    sums = sum_lines(lines, group, len(order))
    for name in ("node", "thread_id"):
        sums[name] = lines[name][firsts[order]]
    buckets = buckets.copy()
    buckets["line"] = group[buckets["line"]]
    return sums, _sum_buckets(buckets)


def _number_node_thread_pairs(nodes: Int64s, threads: Int64s, other_nodes: Int64s) -> tuple[Int64s, Int64s]:
    """Return numbers for the (node, thread) pairs, first with `nodes`, then with `other_nodes`. Equal pairs have equal
    numbers."""
    _, numbers = np.unique(threads, return_inverse=True)
    width = int(max(nodes.max(initial=0), other_nodes.max(initial=0))) + 2
    return numbers * width + nodes + 1, numbers * width + other_nodes + 1


def _sum_buckets(buckets: Records) -> Records:
    key, group = np.unique(buckets["line"] * (LAST_BUCKET + 1) + buckets["bucket"], return_inverse=True)
    times = np.zeros(len(key), np.int64)
    np.add.at(times, group, buckets["times"])
    line, bucket = np.divmod(key, LAST_BUCKET + 1)
    is_counted = (line >= 0) & (times > 0)
    return make_buckets(line[is_counted], bucket[is_counted], times[is_counted])


def _make_tree(paths: Iterable[CallPath]) -> tuple[CallTree, list[int]]:
    node_of: dict[CallPath, int] = {(): NOT_BELOW}
    number_of: dict[Site, int] = {}
    numbers, parents, nodes = array("i"), array("i"), list[int]()
    for path in paths:
        upper = path
        while upper not in node_of:
            upper = upper[:-1]
        for depth in range(len(upper), len(path)):
            numbers.append(number_of.setdefault(path[depth], len(number_of)))
            parents.append(node_of[path[:depth]])
            node_of[path[: depth + 1]] = len(node_of) - 1
        nodes.append(node_of[path])
    tree = CallTree()
    tree.sites += number_of
    tree.add_nodes(0, numbers.tobytes(), parents.tobytes())
    places = tree.merge_equal_paths().places
    return tree, [node if node == NOT_BELOW else places[node] for node in nodes]
