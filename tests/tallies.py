"""Tallies that are made by hand, path by path, and the lines of any tally as plain values to compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from instrument.recording import tally as product
from instrument.recording.paths import NOT_BELOW, CallPath, CallTree
from instrument.recording.spans import Site
from instrument.recording.tally import LEAST, MOST, SUMS, TOTALS, make_buckets


@dataclass
class Totals:
    """The totals of a path on a thread, which may still grow."""

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

    def merge(self, other: Totals) -> None:
        """Add the totals of other calls, if there are any."""
        if not other.calls:
            return
        for names, choose in ((LEAST, min), (MOST, max)):
            for name in names:
                its = getattr(other, name)
                setattr(self, name, choose(getattr(self, name), its) if self.calls else its)
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for bucket, times in other.histogram.items():
            self.histogram[bucket] = self.histogram.get(bucket, 0) + times


class Tally:
    """A tally to which paths are added."""

    def __init__(self, threads: Mapping[int, str] | None = None) -> None:
        self.threads = dict(threads or {})
        self._totals: dict[tuple[CallPath, int], Totals] = {}

    def __len__(self) -> int:
        return len(self._totals)

    def totals(self, path: CallPath, thread_id: int) -> Totals:
        """The totals of a path on a thread, empty at first."""
        self.threads.setdefault(thread_id, f"thread {thread_id}")
        return self._totals.setdefault((path, thread_id), Totals())

    def merge(self, other: Tally) -> None:
        """Add the totals of another tally."""
        for (path, thread_id), totals in other._totals.items():
            self.totals(path, thread_id).merge(totals)

    def charge(self, outside_ns: Callable[[Site], float]) -> None:
        """Set the cost of the probes by that of one call."""
        for (path, _), totals in self._totals.items():
            totals.probe_ns = round(totals.calls * outside_ns(path[-1]))

    def made(self) -> product.Tally:
        """Return these totals as the product has them."""
        lines, buckets = np.zeros(len(self), TOTALS), list[tuple[int, int, int]]()
        for number, ((_, thread_id), totals) in enumerate(self._totals.items()):
            for known in fields(Totals):
                if known.name != "histogram":
                    lines[known.name][number] = getattr(totals, known.name)
            lines["node"][number], lines["thread_id"][number] = number, thread_id
            buckets += ((number, bucket, times) for bucket, times in totals.histogram.items())
        table = np.array(buckets, np.int64).reshape(-1, 3)
        return product.Tally.from_paths([path for path, _ in self._totals], lines, make_buckets(*table.T), self.threads)


def made(tally: Tally | product.Tally) -> product.Tally:
    """The product's tally of either."""
    return tally.made() if isinstance(tally, Tally) else tally


def rows_of(tally: Tally | product.Tally) -> list[tuple[CallPath, int, Totals]]:
    """The path, the thread and the totals of every line, without the number of its node."""
    found, its = [], made(tally)
    for row in its.iterate_totals():
        known = {one.name: getattr(row.totals, one.name) for one in fields(Totals) if one.name != "histogram"}
        totals = Totals(**known, histogram=its.histogram([row.totals.node], row.thread_id))
        found.append((row.path, row.thread_id, totals))
    return found


def by_keys(tally: Tally | product.Tally) -> dict[tuple[tuple[object, ...], int], Totals]:
    """The totals of every line by the keys of its sites and its thread."""
    return {(tuple(site.key for site in path), thread_id): totals for path, thread_id, totals in rows_of(tally)}


def of_all_threads(tally: product.Tally) -> dict[tuple[object, ...], Totals]:
    """The totals of every path of all threads together, by the keys of its sites."""
    found: dict[tuple[object, ...], Totals] = {}
    for path, _, totals in rows_of(tally):
        found.setdefault(tuple(site.key for site in path), Totals()).merge(totals)
    return found


def path_upwards(tree: CallTree, node: int) -> list[Site]:
    """Return the sites on a node's call path, from the node's own site upwards."""
    sites = []
    while node != NOT_BELOW:
        sites.append(tree.site(node))
        node = tree.parent(node)
    return sites
