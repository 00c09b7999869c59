"""Call paths as columns: the site and the parent path of each. A site is an instrumented place in the code.

The paths of a process only grow, so a report computes only the facts of new paths.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeVar

from instrument.recording.spans import Site
from instrument.runtime.cheap_start import NamedTuple

Said = TypeVar("Said")

CallPath = tuple[Site, ...]

NOT_BELOW = -1
"""The parent of a topmost node."""

OVERFLOW = Site("(more call paths than the tally keeps)", kind="user")
"""The site for calls of new call paths after the tally is full."""


NAME, KIND, KEY = attrgetter("name"), attrgetter("kind"), attrgetter("key")
"""Facts of sites, for `CallTree.by_site` and `CallTree.numbered`."""


class CallTree:
    """Call paths as columns, by node number.

    A node's parent has a smaller number. A fact of a site must not change, because it is computed once. A column that
    grows is replaced by a new one: a thread may read the old one while another thread, or a signal's handler, extends
    it. Two threads that extend it get the same result. Columns must not be changed elsewhere.
    """

    def __init__(self) -> None:
        self.sites: list[Site] = []
        # The number of its site and its parent, per node: in one column, so that both have one length.
        self._nodes = array("i")
        self._located = Located(*(array("i") for _ in Located._fields))
        self._shared: tuple[Located, dict[int, list[int]]] = self._located, {}
        self._said: dict[Callable[[Site], Any], list[Any]] = {}
        self._numbers: dict[Callable[[Site], Hashable], tuple[array[int], dict[Hashable, int]]] = {}
        self._columns: dict[Callable[[CallTree, int], array[int]], array[int]] = {}

    def __len__(self) -> int:
        return len(self._nodes) // 2

    def extend(self, first: int, numbers: bytes, parents: bytes) -> None:
        """Add nodes from the number `first` on: the index of each one's site in `sites`, and its parent.

        A parent is a node or `NOT_BELOW`. Both are in 32 bits. For one thread at a time.
        """
        if numbers:
            added = array("i", 2 * numbers)
            added[::2], added[1::2] = array("i", numbers), array("i", parents)
            self._nodes = self._nodes[: 2 * first] + added

    def site(self, node: int) -> Site:
        """Return the site of a node."""
        return self.sites[self._nodes[2 * node]]

    def parent(self, node: int) -> int:
        """Return the parent of a node, or `NOT_BELOW`."""
        return self._nodes[2 * node + 1]

    def upwards(self, node: int) -> Iterator[Site]:
        """Yield the sites of a node's path, from its own upwards."""
        while node != NOT_BELOW:
            yield self.site(node)
            node = self._nodes[2 * node + 1]

    def nodes_of(self, sites: Collection[Site]) -> set[int]:
        """Return the nodes of some sites."""
        numbers = {number for number, site in enumerate(self.sites) if site in sites}
        return {node for node, number in enumerate(self.site_of) if number in numbers}

    @property
    def site_of(self) -> array[int]:
        """The current number of each node's site."""
        return self._nodes[::2]

    def located(self) -> Located:
        """Return the places of all nodes."""
        nodes, located = self._nodes, self._located
        if len(located.places) < len(nodes) // 2:
            located = self._located = Located.of(nodes[::2], nodes[1::2], self.keys())
        return located

    def nodes(self, places: Iterable[int]) -> array[int]:
        """Return all nodes of the places."""
        located = self.located()
        of, nodes_of = self._shared
        if of is not located:
            nodes_of = {}
            for node in located.shared:
                place = located.places[node]
                nodes_of.setdefault(place, [place]).append(node)
            self._shared = located, nodes_of
        if not nodes_of:
            return array("i", places)
        return array("i", [node for place in places for node in nodes_of.get(place, (place,))])

    def keys(self) -> array[int]:
        """Return for each site the number of the first site with the same key."""
        return self.numbered(KEY)

    def by_site(self, say: Callable[[Site], Said]) -> list[Said]:
        """Return `say(site)` for each site, by the site's number. Results are cached by function: pass no lambda."""
        results: list[Said] = self._said.get(say, [])
        if len(results) < len(self.sites):
            results = self._said[say] = [*results, *map(say, self.sites[len(results) :])]
        return results

    def numbered(self, say: Callable[[Site], Hashable]) -> array[int]:
        """Return for each site the number of the first site with the same `say(site)`."""
        numbers, number_by_result = self._numbers.setdefault(say, (array("i"), {}))
        start = len(numbers)
        if start < len(self.sites):
            firsts = map(number_by_result.setdefault, map(say, self.sites[start:]), itertools.count(start))
            numbers = numbers + array("i", firsts)
            self._numbers[say] = numbers, number_by_result
        return numbers

    def column(self, more: Callable[[CallTree, int], array[int]]) -> array[int]:
        """Return a column for all nodes. `more(tree, length)` returns the values that a column of that length lacks."""
        column = self._columns.get(more, array("i"))
        added = more(self, len(column))
        if added:
            column = self._columns[more] = column + added
        return column


class Located(NamedTuple):
    """The site, the parent's place and the own place of each node.

    `shared` has the nodes at another node's place. A node's place is the first node with the same parent's place and
    site's key.
    """

    site_of: array[int]
    parents: array[int]
    places: array[int]
    shared: array[int]

    @classmethod
    def of(cls, site_of: array[int], parents: array[int], keys: array[int]) -> Located:
        """Locate nodes by their parents, and by the numbers of their sites' keys."""
        above, places, shared = array("i"), array("i"), array("i")
        place_by_key: dict[int, int] = {}  # by numbers: a pair would be a thing more for the collector to look at
        for node, (site, parent) in enumerate(zip(site_of, parents, strict=True)):
            up = places[parent] if parent >= 0 else NOT_BELOW
            place = place_by_key.setdefault((up << 32) + keys[site], node)
            above.append(up)
            places.append(place)
            if place != node:
                shared.append(node)
        return cls(site_of, above, places, shared)
