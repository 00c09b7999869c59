"""The lines of a tally as columns, which is what reports that are made while a service runs add up.

A process may know sixteen thousand call paths, on many threads, of which a report shows fifty. So no object is made for
a line: lines are numbers in a row, WIDTH for each, and what is said of a path is said of its site, once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from instrument.recording.paths import NOT_BELOW, CallTree
from instrument.recording.spans import Site
from instrument.recording.tally import Tally, Totals

Numbers = Sequence[int]
"""A view of integers of 64 bits, or a list where one needs more."""


class Sum(NamedTuple):
    """Lines added up: so many, and the fields of their `Totals`. All numbers of no line are 0."""

    lines: int
    calls: int
    errors: int
    total_ns: int
    self_ns: int
    waiting_ns: int
    device_ns: int
    elapsed_ns: int
    min_ns: int
    max_ns: int
    moved_bytes: int
    first_ns: int


_NUMBERS = attrgetter(*Sum._fields[1:])

WIDTH = len(Sum._fields)
"""Numbers of a line: its node, and those of its totals; of a sum: how many lines it is of, and the same."""
CALLS, ERRORS, TOTAL, SELF, WAITING, DEVICE, ELAPSED, MIN, MAX, MOVED, FIRST = range(1, WIDTH)

ALL_THREADS = "(all threads)"


class Lines:
    """The lines of a tally: `threads` names those that have any, in the tally's order, and `books` has their lines.

    Merged lines are those of thread 0 alone: one with calls for each path, in the order of first calls.
    `make_histogram` adds up the histograms of nodes, on a thread or on all (None).
    """

    def __init__(
        self,
        tree: CallTree,
        threads: Mapping[int, str],
        books: Mapping[int, Sequence[Numbers]],
        make_histogram: Callable[[Iterable[int], int | None], dict[int, int]],
    ) -> None:
        self.tree = tree
        self.site_of, self.parents, *_ = tree.located()
        self.threads = dict(threads)
        self._books = books
        self.histogram = make_histogram

    @classmethod
    def of_tally(cls, tally: Tally, *, merged: bool = False) -> Lines:
        """Return the lines of a tally, in its order, or of all its threads `merged`."""
        tree, place_of = _tree_of(tally)
        books: dict[int, dict[int, Totals]] = {}
        threads: Mapping[int, str] = tally.threads
        if merged:
            called = [one for one in tally.by(lambda row: place_of[row.path]).items() if one[1].calls]
            threads = {0: ALL_THREADS} if called else {}
            books = {thread: dict(sorted(called, key=lambda line: line[1].first_ns)) for thread in threads}
        else:
            for (thread, place), totals in tally.by(lambda row: (row.thread_id, place_of[row.path])).items():
                books.setdefault(thread, {})[place] = totals

        def histogram(nodes: Iterable[int], thread: int | None) -> dict[int, int]:
            found, wanted = Totals(), list(nodes)
            for lines in books.values() if thread is None else [books.get(thread, {})]:
                for node in wanted:
                    if node in lines:
                        found.merge(lines[node])
            return found.histogram

        return cls(tree, threads, {thread: [_packed(lines)] for thread, lines in books.items()}, histogram)

    def book(self, thread: int | None) -> list[Numbers]:
        """The lines of a thread, or of all (None)."""
        threads = self.threads if thread is None else [thread]
        return [lines for one in threads for lines in self._books.get(one, ())]

    def merged(self) -> Numbers:
        """The numbers of lines that are merged."""
        books = self.book(None)
        return books[0] if books else ()


def _tree_of(tally: Tally) -> tuple[CallTree, dict[tuple[Site, ...], int]]:
    """The call paths of a tally, and the place of each."""
    known: dict[tuple[Site, ...], int] = {(): NOT_BELOW}
    number_of: dict[Site, int] = {}
    numbers, parents = array("i"), array("i")
    for row in tally.rows():
        path, upper = row.path, row.path
        while upper not in known:
            upper = upper[:-1]
        for depth in range(len(upper), len(path)):
            numbers.append(number_of.setdefault(path[depth], len(number_of)))
            parents.append(known[path[:depth]])
            known[path[: depth + 1]] = len(known) - 1
    tree = CallTree()
    tree.sites += number_of
    tree.extend(0, numbers.tobytes(), parents.tobytes())
    places = tree.located().places
    return tree, {path: places[node] for path, node in known.items() if path}


def _packed(lines: Mapping[int, Totals]) -> Numbers:
    numbers = [number for place, its in lines.items() for number in (place, *_NUMBERS(its))]
    try:
        return memoryview(array("q", numbers))
    except OverflowError:
        return numbers
