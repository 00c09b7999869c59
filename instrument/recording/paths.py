"""The call tree, in which each node is a call path. A node has the path's last site (an instrumented function) and the
caller's node.

The tree of a process only grows. So a value that was computed for a node stays valid, and is kept.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Collection, Hashable
from operator import attrgetter
from typing import Any, TypeVar

from instrument.recording.spans import Site
from instrument.runtime.lazy_imports import NamedTuple

Result = TypeVar("Result")

CallPath = tuple[Site, ...]

NOT_BELOW = -1
"""The parent number of a topmost node."""

OVERFLOW = Site("(more call paths than the tally keeps)", kind="user")
"""The site of all calls on new call paths once the tally is full."""


NAME, KIND, KEY = attrgetter("name"), attrgetter("kind"), attrgetter("key")
"""Functions that return the name, the kind and the key of a site."""


class CallTree:
    """The call tree of a process, as columns by node number. The parent of a node has a smaller number.

    A column is never changed in place, because another thread may read it. A longer column replaces it. Values of a
    site are computed once, so sites must not change.
    """

    def __init__(self) -> None:
        self.sites: list[Site] = []
        # The number of its site and its parent, per node: in one column, so that both have one length.
        self._nodes = array("i")
        self._located = Located(*(array("i") for _ in Located._fields))
        self._said: dict[Callable[[Site], Any], list[Any]] = {}

    def __len__(self) -> int:
        return len(self._nodes) // 2

    def add_nodes(self, first: int, numbers: bytes, parents: bytes) -> None:
        """Add nodes from the number `first` on. Only one thread may call this at a time.

        - `numbers`: the index of each node's site in `sites`, as 32-bit numbers
        - `parents`: the parent of each node, or `NOT_BELOW`, as 32-bit numbers
        """
        if numbers:
            added = array("i", 2 * numbers)
            added[::2], added[1::2] = array("i", numbers), array("i", parents)
            self._nodes = self._nodes[: 2 * first] + added

    def site(self, node: int) -> Site:
        return self.sites[self._nodes[2 * node]]

    def parent(self, node: int) -> int:
        return self._nodes[2 * node + 1]

    def find_nodes_of_sites(self, sites: Collection[Site]) -> set[int]:
        numbers = {number for number, site in enumerate(self.sites) if site in sites}
        return {node for node, number in enumerate(self.site_of) if number in numbers}

    @property
    def site_of(self) -> array[int]:
        return self._nodes[::2]

    def merge_equal_paths(self) -> Located:
        nodes, located = self._nodes, self._located
        if len(located.places) < len(nodes) // 2:
            located = self._located = Located.merge_nodes(nodes[::2], nodes[1::2], self.number_sites_by_key())
        return located

    def number_sites_by_key(self) -> array[int]:
        return self.number_sites(KEY)

    def map_sites(self, say: Callable[[Site], Result]) -> list[Result]:
        """Return the result of `say` for each site, by the site's number. Results are cached by function, so `say` must
        not be a lambda."""
        results: list[Result] = self._said.get(say, [])
        if len(results) < len(self.sites):
            results = self._said[say] = [*results, *map(say, self.sites[len(results) :])]
        return results

    def number_sites(self, say: Callable[[Site], Hashable]) -> array[int]:
        """Return a number for each site. Sites with equal results of `say` get the number of the first such site."""
        number_by_result: dict[Hashable, int] = {}
        return array("i", map(number_by_result.setdefault, self.map_sites(say), itertools.count()))


class Located(NamedTuple):
    """The nodes of a call tree, merged if their paths are equal. A node's place is the first node with an equal path.

    Paths are equal if the keys of their sites are equal. `parents` has the place of each node's parent.
    """

    site_of: array[int]
    parents: array[int]
    places: array[int]

    @classmethod
    def merge_nodes(cls, site_of: array[int], parents: array[int], keys: array[int]) -> Located:
        above, places = array("i"), array("i")
        place_by_key: dict[int, int] = {}  # by numbers: a pair would be a thing more for the collector to look at
        for node, (site, parent) in enumerate(zip(site_of, parents, strict=True)):
            up = places[parent] if parent >= 0 else NOT_BELOW
            above.append(up)
            places.append(place_by_key.setdefault((up << 32) + keys[site], node))
        return cls(site_of, above, places)
