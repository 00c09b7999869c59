"""Computes the call tree of a trace, and the tally: the times of the calls of each call path.

A track (called `line` in identifiers) is one thread, or one task on a thread. A call on another track is not part of
its parent's time. The device time of a call is the union of its device intervals and those of the calls below it on the
same track.

Recursion is folded: a call of a function that is already on the call path counts at that function's node.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.recording.distributions import LAST_BUCKET, bucket_start
from instrument.recording.spans import OUTCOME, Interval, Site
from instrument.recording.tally import LARGEST, LARGEST_COPY_BYTES, TOTALS, Records, Tally, make_buckets
from instrument.trace.columns import FARTHEST_NS, Bools, Columns, Int32s, Int64s
from instrument.trace.indices import (
    NONE,
    Groups,
    are_at_or_above,
    count_ancestors,
    count_distinct,
    find_least_at_or_below,
    find_nearest_row,
    index_rows,
    make_mask,
    number_combinations,
    rows_by_level,
)
from instrument.trace.intervals import are_in_window, clip_intervals, union_by_group
from instrument.trace.layout import order_by_start
from instrument.trace.self_times import waiting_times


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """The number of calls per node of a call tree, and the sum, maximum and minimum of the calls' times."""

    calls: Int64s
    total_ns: Int64s
    most_ns: Int64s
    least_ns: Int64s

    @classmethod
    def sum_calls(cls, groups: Groups, lengths_ns: NDArray[Any]) -> NodeTimes:
        return cls(
            groups.count_members(),
            groups.sum_by_group(lengths_ns),
            groups.max_by_group(lengths_ns, 0),
            groups.min_by_group(lengths_ns, FARTHEST_NS),
        )


class StreamTimes(NamedTuple):
    node: int
    device: int
    stream: int
    intervals: int
    total_ns: int
    most_ns: int
    least_ns: int


@dataclass(frozen=True, slots=True)
class CallPaths:
    """The nodes of a call tree. Each node is a call path. The nodes are in order of first appearance, with parents
    before children.

    `parent` is `NONE` for a root. `is_elsewhere` is True if the parent is on another track. `first_ns` is the earliest
    begin of a call. `device` counts only calls with device time.
    """

    parent: Int64s
    site: Int64s
    thread_id: Int64s
    is_elsewhere: Bools
    first_ns: Int64s
    host: NodeTimes
    device: NodeTimes
    streams: list[StreamTimes]

    def __len__(self) -> int:
        return len(self.parent)


def build_call_tree(
    trace: Columns, kinds: Collection[str], window: Interval | None = None, among: Bools | None = None
) -> CallPaths:  # fmt: skip
    """Return the call tree of spans, with times clipped to the `window`. `among` selects spans, by default all.

    Only calls of the given `kinds`, and the calls directly below them, get device times.
    """
    first, last = window or (-FARTHEST_NS, FARTHEST_NS)
    counted = are_in_window(trace.start_ns, trace.end_ns, (first, last))
    is_included = counted if counted.all() else are_at_or_above(trace.parent, np.flatnonzero(counted))
    level = trace.level
    if among is not None:
        counted, is_included = counted & among, is_included & among
        level = count_ancestors(np.where(np.append(is_included, False)[trace.parent], trace.parent, np.int32(NONE)))
    on_line = trace.is_on_track_of_parent & is_included[trace.parent]
    node_of, parent, some_row = _number_nodes(trace, level, is_included, on_line)
    count, calls = len(parent), np.flatnonzero(counted)
    first_row = np.full(count, len(trace))
    first_row[node_of[calls[::-1]]] = calls[::-1]
    old = np.argsort(
        np.array(find_least_at_or_below(parent.tolist(), first_row.tolist()), dtype=np.int64), kind="stable"
    )
    new_of = index_rows(old, count)
    node_of, parent, some_row = new_of[node_of], new_of[parent[old]], some_row[old]
    is_elsewhere = ~on_line[some_row]
    is_of = np.array([*(site.kind in kinds for site in trace.sites), False])[trace.site[some_row]]
    around = np.where(is_elsewhere, NONE, parent)
    below = (around != NONE) & is_of[around] if count else is_of
    inside = find_nearest_row(around.astype(np.int32), below) != NONE
    groups = Groups(node_of[calls], count)
    starts, ends = clip_intervals(trace.start_ns[calls], trace.end_ns[calls], (first, last))
    device, streams = _measure_device_times(
        trace, counted, on_line, node_of, is_of | below, inside, (first, last), count
    )
    return CallPaths(
        parent=parent,
        site=trace.site[some_row].astype(np.int64),
        thread_id=trace.thread_id[some_row],
        is_elsewhere=is_elsewhere,
        first_ns=groups.min_by_group(starts, FARTHEST_NS),
        host=NodeTimes.sum_calls(groups, ends - starts),
        device=device,
        streams=streams,
    )


def _number_nodes(trace: Columns, level: Int32s, is_included: Bools, on_line: Bools) -> tuple[Int64s, Int64s, Int64s]:
    node_of = np.full(len(trace), NONE, dtype=np.int64)
    parents: list[Int64s] = [np.zeros(0, dtype=np.int64)]
    some_rows: list[Int64s] = [np.zeros(0, dtype=np.int64)]
    count = 0
    threads = np.where(on_line, 0, number_combinations(trace.thread_id)[0] + 1)
    for rows in rows_by_level(level):
        rows = rows[is_included[rows]]
        if not len(rows):
            break
        above = np.where(trace.parent[rows] == NONE, NONE, node_of[trace.parent[rows]])
        if len(rows) == 1:  # a chain may have thousands of levels
            numbers, firsts = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        else:
            numbers, firsts = number_combinations(above - above.min(), trace.site[rows], threads[rows])
        node_of[rows] = numbers + count
        parents.append(above[firsts])
        some_rows.append(rows[firsts])
        count += len(firsts)
    return node_of, np.concatenate(parents), np.concatenate(some_rows)


def _measure_device_times(
    trace: Columns, counted: Bools, on_line: Bools, node_of: Int64s, is_timed: Bools, inside: Bools, window: Interval,
    count: int,
) -> tuple[NodeTimes, list[StreamTimes]]:  # fmt: skip
    work, (first, last) = trace.device, window
    if not len(work) or not count:
        nothing = np.zeros(0, dtype=np.int64)
        return NodeTimes.sum_calls(Groups(nothing, count), nothing), []
    nodes = node_of[work.row]
    is_kept = (
        work.is_measured
        & counted[work.row]
        & (is_timed | inside)[nodes]
        & are_in_window(work.start_ns, work.end_ns, window)
    )
    rows, nodes = work.row[is_kept], nodes[is_kept]
    starts, ends = np.maximum(work.start_ns[is_kept], first), np.minimum(work.end_ns[is_kept], last)
    devices, streams = work.device[is_kept], work.stream[is_kept]
    keys, firsts = number_combinations(nodes, devices, streams)
    times = NodeTimes.sum_calls(Groups(keys, len(firsts)), ends - starts)
    columns = (nodes[firsts], devices[firsts], streams[firsts], *(getattr(times, name) for name in times.__slots__))
    stream_times = [StreamTimes(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
    is_call = (node_of != NONE) & is_timed[node_of]
    around = np.where(on_line, trace.parent, np.int32(NONE))
    calls, lengths_ns = measure_device_times_of_calls(around, is_call, rows, starts, ends)
    is_counted = counted[calls]
    return NodeTimes.sum_calls(Groups(node_of[calls[is_counted]], count), lengths_ns[is_counted]), stream_times


def measure_device_times_of_calls(
    around: Int32s, is_call: Bools, rows: Int32s, starts: Int64s, ends: Int64s
) -> tuple[Int64s, Int64s]:  # fmt: skip
    nearest_call = find_nearest_row(around, is_call)
    up = np.where(around == NONE, NONE, nearest_call[around]).astype(np.int32)
    owner = nearest_call[rows]
    has_owner = owner != NONE
    owner, starts, ends = owner[has_owner], starts[has_owner], ends[has_owner]
    # The forest of the calls that have intervals, numbered from 0.
    calls = np.flatnonzero(are_at_or_above(up, owner))
    number_of = index_rows(calls, len(around)).astype(np.int32)
    up, owner = number_of[up[calls]], number_of[owner]
    has_intervals = np.bincount(owner, minlength=len(calls)) > 0
    children = np.bincount(up[up != NONE], minlength=len(calls))
    joins = has_intervals | (children != 1)
    # A call that joins nothing has the length of the nearest call below it that joins intervals.
    lengths_ns = np.zeros(len(calls), dtype=np.int64)
    above = np.where(up == NONE, NONE, find_nearest_row(up, joins)[up]).astype(np.int32)
    level = count_ancestors(above)
    joining = np.flatnonzero(joins)
    order = joining[np.argsort(-level[joining], kind="stable")]
    by_depth = np.argsort(-level[owner], kind="stable")
    owner, starts, ends = owner[by_depth], starts[by_depth], ends[by_depth]
    position = 0
    passed = (np.zeros(0, dtype=np.int64),) * 3
    for depth in range(int(level[order].max(initial=NONE)), -1, -1):
        until = int(np.searchsorted(-level[owner], -depth, side="right"))
        joined_calls, joined_starts, joined_ends = union_by_group(
            *(np.concatenate([part, more[position:until]])
              for part, more in zip(passed, (owner, starts, ends), strict=True))
        )  # fmt: skip
        position = until
        np.add.at(lengths_ns, joined_calls, joined_ends - joined_starts)
        ups = above[joined_calls].astype(np.int64)
        goes_on = ups != NONE
        passed = ups[goes_on], joined_starts[goes_on], joined_ends[goes_on]
    below = np.full(len(calls), NONE, dtype=np.int32)
    hands_on = (up != NONE) & ~joins[up]
    below[up[hands_on]] = np.flatnonzero(hands_on)
    return calls, lengths_ns[find_nearest_row(below, joins)]


# The tally

_STARTS = np.array([bucket_start(index) for index in range(LAST_BUCKET + 1)], dtype=np.int64)


_TOO_DEEP = "its calls are nested too deeply; it is damaged"


class _Paths:
    """A tree of call paths, in which a recursive call has the node of its outer call.

    A call in a node of `recurring` may be recursive. Raises `ValueError` if the search for recursion visits more than
    `limit_links` nodes.
    """

    def __init__(self, limit_links: int | None) -> None:
        self._links_left = limit_links
        self.site: list[int] = []
        self.parent: list[int] = []
        self.depth: list[int] = []
        self.recurring: set[int] = set()
        self._below: dict[tuple[int, int], int] = {}
        self._known_sites: set[int] = set()

    def find_or_add_node(self, parent: int, site: int) -> int:
        node = self._below.get((parent, site))
        if node is None:
            node = self._below[parent, site] = self._add_node(parent, site)
        return node

    def _add_node(self, parent: int, site: int) -> int:
        if site in self._known_sites:
            on_path = [parent]
            while (node := on_path[-1]) != NONE:
                if self._links_left is not None:
                    self._links_left -= 1
                    if self._links_left < 0:
                        raise ValueError(_TOO_DEEP)
                if self.site[node] == site:
                    self.recurring.update(on_path)
                    return node
                on_path.append(self.parent[node])
        self._known_sites.add(site)
        self.site.append(site)
        self.parent.append(parent)
        self.depth.append(1 if parent == NONE else self.depth[parent] + 1)
        return len(self.site) - 1

    def list_paths(self, sites: Sequence[Site]) -> list[tuple[Site, ...]]:
        paths: list[tuple[Site, ...]] = []
        for site, parent in zip(self.site, self.parent, strict=True):
            paths.append((*(() if parent == NONE else paths[parent]), sites[site]))
        return paths


def paths_of_rows(trace: Columns) -> tuple[Int64s, list[tuple[Site, ...]]]:
    """Return the number of each row's call path, and the sites of each path. The topmost site comes first."""
    paths = _Paths(None)
    node_of = _find_nodes_of_rows(trace, paths)
    return node_of, paths.list_paths(trace.sites)


def tally_spans(trace: Columns, threads: Mapping[int, str] | None = None, *, limit_links: int | None = None) -> Tally:
    """Return the totals of all spans by call path. Raises `ValueError` if the paths have more than `limit_links` sites
    in total."""
    if not len(trace):
        return Tally()
    paths = _Paths(limit_links)
    node_of = _find_nodes_of_rows(trace, paths)
    cell_of, rows = number_combinations(node_of, number_combinations(trace.thread_id)[0])
    nodes = node_of[rows]
    if limit_links is not None and int(np.array(paths.depth)[nodes].sum()) > limit_links:
        raise ValueError(_TOO_DEEP)
    lines, buckets = _sum_times_by_cell(trace, cell_of, len(rows), _are_inner_calls(trace, node_of, paths.recurring))
    lines["node"], lines["thread_id"] = nodes, trace.thread_id[rows]
    order = np.array(_order_cells(trace, cell_of, len(rows)), dtype=np.int64)
    buckets["line"] = np.argsort(order)[buckets["line"]]
    lines, names = lines[order], dict(threads or {})
    labels = {thread: names.get(thread, f"thread {thread}") for thread in dict.fromkeys(lines["thread_id"].tolist())}
    every, used = paths.list_paths(trace.sites), dict.fromkeys(lines["node"].tolist())
    lines["node"] = index_rows(np.array(list(used), dtype=np.int64), len(every))[lines["node"]]
    return Tally.from_paths([every[node] for node in used], lines, buckets, labels)


def _find_nodes_of_rows(trace: Columns, paths: _Paths) -> Int64s:
    by_key: dict[tuple[object, ...], int] = {}
    places = np.array([by_key.setdefault(site.key, number) for number, site in enumerate(trace.sites)], dtype=np.int64)
    node_of = np.full(len(trace) + 1, NONE, dtype=np.int64)  # the last place is the parent of roots
    for rows in rows_by_level(trace.level):
        above, sites = node_of[trace.parent[rows]], places[trace.site[rows]]
        if len(rows) == 1:  # a chain may have thousands of levels
            node_of[rows[0]] = paths.find_or_add_node(int(above[0]), int(sites[0]))
            continue
        numbers, some = number_combinations(above + 1, sites)
        nodes = map(paths.find_or_add_node, above[some].tolist(), sites[some].tolist())
        node_of[rows] = np.fromiter(nodes, np.int64, len(some))[numbers]
    return node_of[:-1]


def _are_inner_calls(trace: Columns, node_of: Int64s, recurring: set[int]) -> Bools:
    inner = np.zeros(len(trace), dtype=np.bool_)
    if not recurring:
        return inner
    is_recurring = make_mask(list(recurring), int(node_of.max()) + 1)
    rows = np.flatnonzero(is_recurring[node_of])
    around = _find_outer_calls(trace, node_of, rows)
    # The latest end of all outer calls, by pointer doubling.
    latest, up = np.full(len(trace), -FARTHEST_NS, dtype=np.int64), around.copy()
    latest[rows] = np.where(around[rows] == NONE, -FARTHEST_NS, trace.end_ns[around[rows]])
    rows = enclosed = rows[around[rows] != NONE]
    while len(rows):
        above = up[rows]
        later, farther = latest[above], up[above]
        latest[rows] = np.maximum(latest[rows], later)
        up[rows] = farther
        rows = rows[farther != NONE]
    inner[enclosed] = latest[enclosed] >= trace.start_ns[enclosed]
    return inner


def _find_outer_calls(trace: Columns, node_of: Int64s, rows: Int64s) -> Int32s:
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


def _sum_times_by_cell(trace: Columns, cells: Int64s, count: int, inner: Bools) -> tuple[Records, Records]:
    """Return the totals and the histogram of each cell. A cell is a node on a thread."""
    device_ns, elapsed_ns = _measure_row_times(trace)
    elapsed_ns[inner] = trace.total_ns[inner]
    moved = np.zeros(len(trace), dtype=np.int64)
    copied = trace.attributes.rows_with_attribute("bytes")
    copied = copied[trace.are_of_kind("copy")[copied]]
    moved[copied] = [
        value if isinstance(value, int) and 0 <= value <= LARGEST_COPY_BYTES else 0
        for value in trace.attributes.values("bytes", copied)
    ]
    cancelled = np.zeros(len(trace), dtype=np.bool_)
    cancelled[trace.attributes.rows_with_attribute(OUTCOME)] = True
    cancelled &= trace.are_of_kind("request") & (trace.error == NONE)
    groups, outer = Groups(cells, count), ~inner
    lines = np.zeros(count, TOTALS)
    sums = {
        "errors": trace.error != NONE,
        "total_ns": trace.total_ns * outer,
        "self_ns": trace.self_ns,
        "waiting_ns": waiting_times(trace),
        "device_ns": device_ns * outer,
        "elapsed_ns": elapsed_ns * outer,
        "moved_bytes": moved,
        "cancelled": cancelled,
    }
    for name, column in sums.items():
        lines[name] = groups.sum_by_group(column).clip(-LARGEST, LARGEST)
    lines["calls"] = groups.count_members()
    lines["min_ns"], lines["max_ns"] = groups.min_by_group(elapsed_ns, 0), groups.max_by_group(elapsed_ns, 0)
    lines["first_ns"] = groups.min_by_group(trace.start_ns, 0)
    buckets = np.searchsorted(_STARTS, elapsed_ns, side="right") - 1
    keys, sizes = count_distinct(cells * (LAST_BUCKET + 1) + buckets, count * (LAST_BUCKET + 1))
    return lines, make_buckets(*np.divmod(keys, LAST_BUCKET + 1), sizes)


def _measure_row_times(trace: Columns) -> tuple[Int64s, Int64s]:
    device_ns, elapsed_ns = np.zeros(len(trace), dtype=np.int64), trace.total_ns.copy()
    if len(trace.device):
        rows, starts, ends = union_by_group(trace.device.row, trace.device.start_ns, trace.device.end_ns)
        before = np.maximum(np.minimum(ends, trace.start_ns[rows]) - starts, 0)
        after = np.maximum(ends - np.maximum(starts, trace.end_ns[rows]), 0)
        groups = Groups(rows, len(trace))
        device_ns[:] = groups.sum_by_group(ends - starts)
        elapsed_ns += groups.sum_by_group(before + after).astype(np.int64)
    return device_ns, elapsed_ns


def _order_cells(trace: Columns, cells: Int64s, count: int) -> list[int]:
    rank = index_rows(order_by_start(trace), len(trace))
    by_depth, parent = rows_by_level(trace.level), trace.parent
    sizes = np.ones(len(trace) + 1, dtype=np.int64)  # the number of rows at and below each
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
    ordered: list[int] = np.argsort(Groups(cells, count).min_by_group(places[:-1], 0)).tolist()
    return ordered
