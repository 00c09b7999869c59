"""Call paths as columns: which site each is of and what it is below, and what is said of the sites.

What is known of a process grows and never shrinks, so that a report asks only for what it has not asked before.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import add
from typing import Any, NamedTuple, TypeVar

from instrument.recording.spans import Site

Said = TypeVar("Said")

CallPath = tuple[Site, ...]

NOT_BELOW = -1
"""The parent of a topmost node."""

OVERFLOW = Site("(more call paths than the tally keeps)", kind="user")
"""Counts the calls whose call path came after the tally was full."""


class Facts(NamedTuple):
    """Facts of sites: the kind of each and the number of the first of its name; and the numbers of those whose name
    another has before them, and of those with attributes."""

    names: array[int]
    kinds: list[str]
    repeated: list[int]
    declared: list[int]


class CallTree:
    """Call paths as columns, by the number of their node; a node's parent comes before it.

    What is said of a site may not change, for it is asked for once. A column that grows is another one from then on: it
    may be read while another thread, or a signal's handler, has it grow, and two that do so come to the same. Nobody
    else may change one.
    """

    def __init__(self) -> None:
        self.sites: list[Site] = []
        # Of each node the number of its site and its parent: in one column, so that none is longer.
        self._nodes = array("i")
        self._located = Located(*(array("i") for _ in Located._fields))
        self._shared: tuple[Located, dict[int, list[int]]] = self._located, {}
        self._facts = Facts(array("i"), [], [], [])
        self._first_of_name: dict[str, int] = {}
        self._keys = array("i")
        self._first_of_key: dict[tuple[object, ...], int] = {}
        self._said: dict[Callable[[Site], Any], list[Any]] = {}
        self._numbers: dict[Callable[[Site], Hashable], tuple[array[int], dict[Hashable, int]]] = {}
        self._columns: dict[Callable[[CallTree, int], array[int]], array[int]] = {}

    def __len__(self) -> int:
        return len(self._nodes) // 2

    def extend(self, first: int, numbers: bytes, parents: bytes) -> None:
        """Add nodes from a number on: of each where its site is in `sites`, and its parent, a node or `NOT_BELOW`.

        Both in 32 bits. Not for two threads at a time.
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
        """The sites of a node's path, its own first."""
        while node != NOT_BELOW:
            yield self.site(node)
            node = self._nodes[2 * node + 1]

    def nodes_of(self, sites: Collection[Site]) -> set[int]:
        """Return the nodes of some sites."""
        numbers = {number for number, site in enumerate(self.sites) if site in sites}
        return {node for node, number in enumerate(self.site_of) if number in numbers}

    @property
    def site_of(self) -> array[int]:
        """The number of each node's site, as it is now."""
        return self._nodes[::2]

    def located(self) -> Located:
        """All nodes with their places."""
        nodes, located = self._nodes, self._located
        if len(located.places) < len(nodes) // 2:
            located = self._located = Located.of(nodes[::2], nodes[1::2], self.keys())
        return located

    def nodes(self, places: Iterable[int]) -> array[int]:
        """All nodes of the places."""
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
        """Return the number of the first site that means the same place, per site."""
        known, (names, _, repeated, _) = self._keys, self.facts()
        if len(known) == len(names):
            return known
        keys = names[len(known) :]
        # A key is a thing more for the collector to look at, and most sites have a name of their own.
        for number in repeated[bisect_left(repeated, len(known)) :]:
            first = names[number]
            self._first_of_key.setdefault(self.sites[first].key, first)
            keys[number - len(known)] = self._first_of_key.setdefault(self.sites[number].key, number)
        self._keys = known + keys
        return self._keys

    def facts(self) -> Facts:
        """Return the facts of the sites that are known."""
        found, first_of_name = self._facts, self._first_of_name
        start = len(found.kinds)
        if start < len(self.sites):
            more = _facts(self.sites[start:], start, first_of_name)
            found = self._facts = Facts(*map(add, found, more))
        return found

    def by_site(self, say: Callable[[Site], Said]) -> list[Said]:
        """Return a function's result for each site, by the site's number; kept by function, so give no lambda."""
        said: list[Said] = self._said.get(say, [])
        if len(said) < len(self.sites):
            said = self._said[say] = [*said, *map(say, self.sites[len(said) :])]
        return said

    def numbered(self, say: Callable[[Site], Hashable]) -> array[int]:
        """Return the number of the first site with the same result of a function, per site."""
        numbers, known = self._numbers.setdefault(say, (array("i"), {}))
        start = len(numbers)
        if start < len(self.sites):
            firsts = map(known.setdefault, map(say, self.sites[start:]), itertools.count(start))
            numbers = numbers + array("i", firsts)
            self._numbers[say] = numbers, known
        return numbers

    def column(self, more: Callable[[CallTree, int], array[int]]) -> array[int]:
        """A column to which a function has given what it lacked, told how long it was, of the sites known by now."""
        column = self._columns.get(more, array("i"))
        added = more(self, len(column))
        if added:
            column = self._columns[more] = column + added
        return column


def _facts(sites: Sequence[Site], start: int, first_of_name: dict[str, int]) -> Facts:
    numbered = list(enumerate(sites, start))
    names = array("i", [first_of_name.setdefault(site.name, number) for number, site in numbered])
    repeated = [number for number, first in enumerate(names, start) if first != number]
    return Facts(
        names, [site.kind for site in sites], repeated, [number for number, site in numbered if site.attributes]
    )


def shaped(
    sites: list[Site], shapes: Mapping[Site, str], otherwise: str, site_of: array[int]
) -> tuple[array[int], tuple[str, ...]]:
    """Return the number of each node's shape, by `site_of`, and the shapes."""
    of_site = list(map(shapes.get, sites, itertools.repeat(otherwise)))
    known = {name: number for number, name in enumerate(dict.fromkeys(of_site))}
    return array("i", [known[of_site[site]] for site in site_of]), tuple(known)


class Located(NamedTuple):
    """The site's number, the parent's place and the own place of each node; and which nodes have another's place.

    A node's place is the first node whose path is of the same places.
    """

    site_of: array[int]
    parents: array[int]
    places: array[int]
    shared: array[int]

    @classmethod
    def of(cls, site_of: array[int], parents: array[int], keys: array[int]) -> Located:
        """Locate nodes by their parents, and by the numbers of their sites' keys."""
        above, places, shared = array("i"), array("i"), array("i")
        known: dict[int, int] = {}  # by numbers: a pair would be a thing more for the collector to look at
        for node, (site, parent) in enumerate(zip(site_of, parents, strict=True)):
            up = places[parent] if parent >= 0 else NOT_BELOW
            place = known.setdefault((up << 32) + keys[site], node)
            above.append(up)
            places.append(place)
            if place != node:
                shared.append(node)
        return cls(site_of, above, places, shared)
