"""The lines of a tally as columns, which is what reports that are made while a service runs add up.

A process may know sixteen thousand call paths, on many threads, of which a report shows fifty. So no object is made for
a line: lines are numbers in a row, WIDTH for each, and what is said of a path is said of its site, once. The loops over
all lines are in C (`_lines.c`) or, where that is not built or a number has more than 64 bits, in their twins here.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from instrument import native
from instrument.recording.paths import NOT_BELOW, CallTree
from instrument.recording.spans import Site
from instrument.recording.tally import Tally, Totals

_native = native.find("_lines")

Numbers = Sequence[int]
"""An array or a view of integers, which the native loops take, or a list, which they do not."""


class Sum(NamedTuple):
    """Lines added up: so many, and the fields of their `Totals`. All numbers of no line are 0."""

    lines: int
    calls: int
    errors: int
    total_ns: int
    self_ns: int
    device_ns: int
    elapsed_ns: int
    min_ns: int
    max_ns: int
    moved_bytes: int
    first_ns: int


WIDTH = len(Sum._fields)
"""Numbers of a line: its node, and those of its totals; of a sum: how many lines it is of, and the same."""
CALLS, ERRORS, TOTAL, SELF, DEVICE, ELAPSED, MIN, MAX, MOVED, FIRST = range(1, WIDTH)
_ADDED = (CALLS, ERRORS, TOTAL, SELF, DEVICE, ELAPSED, MOVED)

REQUEST, WORK = 1, 2
"""Marks of a site, for `functions`."""


class Lines:
    """The lines of a tally: `threads` names those that have any, in the tally's order, and `books` has their lines.

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
        self._device_below: dict[int | None, Mapping[int, int]] = {}

    @classmethod
    def of_tally(cls, tally: Tally) -> Lines:
        """Of a tally, in its order."""
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
        columns: dict[int, list[int]] = {}
        totals_of: dict[int, dict[int, list[Totals]]] = {}
        for row in tally.rows():
            if not row.path:
                continue
            totals, place = row.totals, places[known[row.path]]
            columns.setdefault(row.thread_id, []).extend((
                place, totals.calls, totals.errors, totals.total_ns, totals.self_ns, totals.device_ns,
                totals.elapsed_ns, totals.min_ns, totals.max_ns, totals.moved_bytes, totals.first_ns,
            ))  # fmt: skip
            totals_of.setdefault(row.thread_id, {}).setdefault(place, []).append(totals)

        def histogram(nodes: Iterable[int], thread: int | None) -> dict[int, int]:
            found = Totals()
            wanted = list(nodes)
            for lines in totals_of.values() if thread is None else [totals_of.get(thread, {})]:
                for node in wanted:
                    for totals in lines.get(node, ()):
                        found.merge(totals)
            return found.histogram

        books = {thread: [packed(column)] for thread, column in columns.items()}
        return cls(tree, tally.threads, books, histogram)

    def book(self, thread: int | None) -> list[Numbers]:
        """The lines of a thread, or of all (None), as the loops take them."""
        threads = self.threads if thread is None else [thread]
        return [lines for one in threads for lines in self._books.get(one, ())]

    def recorded(self, thread: int) -> bool:
        """Whether a call was counted on the thread."""
        return any(any(lines[CALLS::WIDTH]) for lines in self.book(thread))

    def has(self, field: int) -> bool:
        """Whether a number of any line is not 0."""
        return any(
            any(lines[field::WIDTH]) if _native is None or isinstance(lines, list) else _native.has(lines, field)
            for lines in self.book(None)
        )

    def merged(self) -> Numbers:
        """One line with calls for each path, of all threads together, in the order of first calls."""
        books = self.book(None)
        if len(books) == 1 and not isinstance(books[0], list):
            nodes = books[0][::WIDTH].tolist()  # type: ignore[attr-defined]
            if len(set(nodes)) == len(nodes) and all(books[0][CALLS::WIDTH]):
                firsts = books[0][FIRST::WIDTH].tolist()  # type: ignore[attr-defined]
                if sorted(firsts) == firsts:
                    return books[0]
        order = {node: None for lines in books for node in lines[::WIDTH]}
        all_sums = self.sums(range(len(self.parents)), len(self.parents))
        rows = [(node, all_sums[node]) for node in order if all_sums[node].calls]
        rows.sort(key=lambda row: row[1].first_ns)
        return packed([number for node, (_, *numbers) in rows for number in (node, *numbers)])

    def of_all_threads(self) -> Lines:
        """The same with all threads as one, thread 0."""
        lines = self.merged()
        books = {0: [lines]} if lines else {}
        names = {0: "(all threads)"} if lines else {}
        return Lines(self.tree, names, books, lambda nodes, thread: self.histogram(nodes, None))

    def sums(self, groups: Iterable[int], count: int, thread: int | None = None) -> Sums:
        """The lines of a thread, or of all (None), added up by the group of their node, -1 for none."""
        return Sums.of_lines(self.book(thread), array("i", groups), count)

    def total(self, say: Callable[[Site], bool]) -> Sum:
        """The sum of the topmost lines of whose site a function says so."""
        marks = self.tree.by_site(say)
        if not any(marks):
            return Sum(*[0] * WIDTH)
        groups = topmost(self.parents, self.site_of, array("i", marks))
        found = self.sums(groups, 1)[0]
        below_ns = sum(more_ns for node, more_ns in self.device_below(None).items() if groups[node] == 0)
        return found._replace(device_ns=found.device_ns + below_ns)

    def device_below(self, thread: int | None) -> Mapping[int, int]:
        """By how much the device time of what ran below a called node exceeds its own, on a thread or on all.

        Of the nodes where it does. What a node asked for with its own events holds what was asked for below it, on the
        same stream: it does not count once more.
        """
        if thread not in self._device_below:
            self._device_below[thread] = _device_below(self.book(thread), self.parents) if self.has(DEVICE) else {}
        return self._device_below[thread]

    def sites_around(self, nodes: Iterable[int]) -> set[int]:
        """The numbers of the sites of nodes, and of all that they are under."""
        known = set(nodes.tolist() if isinstance(nodes, memoryview) else nodes)  # a view's items take thrice as long
        others = set(map(self.parents.__getitem__, known)) - known
        while others - {NOT_BELOW}:
            known |= others
            others = set(map(self.parents.__getitem__, others - {NOT_BELOW})) - known
        known.discard(NOT_BELOW)
        return set(map(self.site_of.__getitem__, known))

    def by_site(self) -> Sums:
        """All lines added up by the number of their site."""
        return self.sums(self.site_of, 1 + max(self.site_of, default=-1))


class Sums:
    """Sums by the number of their group."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers

    @classmethod
    def of_lines(
        cls, books: list[Numbers], groups: Numbers, count: int, counted: Numbers | None = None, parents: Numbers = ()
    ) -> Sums:
        """Lines added up by the group of their node, -1 for none.

        With `counted` a line is added to so many groups, its own and that of the group's parent. Where that is none, it
        is hidden in its group: that has its self time, and a place in time from it if it has no calls of its own.
        """
        found = None
        if _native is not None and not any(isinstance(lines, list) for lines in books):
            found = _native.sums(books, groups, count, *(() if counted is None else (counted, parents)))
        if found is not None:
            return cls(_view(found))
        sums = [0] * (count * WIDTH)
        for start, lines in _starts(books):
            group, left = groups[lines[start]], 1 if counted is None else counted[lines[start]]
            while left > 0 and group >= 0:
                _add(sums, group * WIDTH, lines, start, 1)
                left -= 1
                group = parents[group] if left else -1
        for start, lines in _starts(books) if counted is not None else ():
            group = groups[lines[start]]
            if group < 0 or not lines[start + CALLS] or (counted is not None and counted[lines[start]] > 0):
                continue
            at = group * WIDTH
            sums[at + SELF] += lines[start + SELF]
            if not sums[at + CALLS]:
                first_ns = lines[start + FIRST]
                sums[at + FIRST] = min(sums[at + FIRST] or first_ns, first_ns)
        return cls(sums)

    def __len__(self) -> int:
        return len(self.numbers) // WIDTH

    def __getitem__(self, row: int) -> Sum:
        return Sum(*self.numbers[row * WIDTH : (row + 1) * WIDTH])

    def plus(self, field: int, added: Mapping[int, int]) -> Sums:
        """The same with something added to a number of some of them."""
        numbers = list(self.numbers)
        for row, more in added.items():
            numbers[row * WIDTH + field] += more
        return Sums(packed(numbers))

    def column(self, field: int) -> list[int]:
        """A number of every sum."""
        column = self.numbers[field::WIDTH]
        return column.tolist() if isinstance(column, memoryview) else list(column)

    def together(self, rows: Iterable[int]) -> Sum:
        """Several as one."""
        wanted = array("i", rows)
        found = None
        if _native is not None and not isinstance(self.numbers, list):
            found = _native.together(self.numbers, wanted)
        if found is not None:
            return Sum(*_view(found))
        sums = [0] * WIDTH
        for row in wanted:
            _add(sums, 0, self.numbers, row * WIDTH, self.numbers[row * WIDTH])
        return Sum(*sums)

    def values(
        self, parents: Numbers, field: int, per: int = -1, *, negative: bool = False, least: bool = False
    ) -> list[float | None]:
        """A number of each, or its quotient with another: of one without calls the most or `least` of those below it.

        None for what has no call at or under it.
        """
        if _native is not None and not isinstance(self.numbers, list):
            found: list[float | None] | None = _native.values(parents, self.numbers, field, per, negative, least)
            if found is not None:
                return found
        numbers, choose = self.numbers, min if least else max
        values: list[float | None] = [None] * len(self)
        for row in reversed(range(len(self))):
            at = row * WIDTH
            value, calls = values[row], numbers[at + CALLS]
            if calls or numbers[at + FIRST]:
                own: float = -numbers[at + field] if negative else numbers[at + field]
                if per >= 0:
                    own = own / numbers[at + per] if numbers[at + per] else 0
                value = values[row] = own if calls or value is None else choose(value, own)
            above = parents[row]
            if value is not None and above >= 0:
                known = values[above]
                values[above] = value if known is None else choose(known, value)
        return values


def _device_below(books: list[Numbers], parents: Numbers) -> Mapping[int, int]:
    if _native is not None and not any(isinstance(lines, list) for lines in books):
        found = _native.device_below(books, parents)
        if found is not None:
            return {node: more_ns for node, more_ns in enumerate(_view(found)) if more_ns}
    own, called = [0] * len(parents), set[int]()
    for start, lines in _starts(books):
        node = lines[start]
        own[node] += lines[start + DEVICE]
        if lines[start + CALLS]:
            called.add(node)
    below, more = [0] * len(parents), dict[int, int]()
    for node in reversed(range(len(parents))):  # a parent comes before its children
        if below[node] > own[node] and node in called:
            more[node] = below[node] - own[node]
        if parents[node] >= 0:
            below[parents[node]] += max(own[node], below[node])
    return more


class Names(NamedTuple):
    """A tree of names: entries, parents before children, the root first; -1 stands for none.

    Of each entry its parent, its level, the node that it was first needed for, the last of its children, the child of
    the same parent before it, and the last of its nodes. Of each node its entry, in how many entries, up from there,
    its lines count (none: it is hidden in its entry, and not one of its nodes), and the node of the entry before it.
    """

    parents: Numbers
    levels: Numbers
    first_nodes: Numbers
    last_children: Numbers
    before: Numbers
    last_nodes: Numbers
    entry_of: Numbers
    counted: Numbers
    node_before: Numbers

    def children(self, entry: int) -> list[int]:
        """What is right under an entry, in the order of the lines."""
        return _chained(self.before, self.last_children, [entry])[::-1]

    def nodes(self, entries: Iterable[int]) -> list[int]:
        """The nodes that entries are the last ones of."""
        return _chained(self.node_before, self.last_nodes, entries)


def tree_of_names(parents: Numbers, site_of: Numbers, levels: Numbers, books: list[Numbers]) -> Names:
    """The tree of names that lines need.

    `levels` has three numbers for each site: the one or two levels that it adds to the tree, and the one that it adds
    where it is topmost, -1 for none.
    """
    if _native is not None and not any(isinstance(lines, list) for lines in books):
        found = _native.tree_of_names(parents, site_of, levels, books)
        return Names._make(memoryview(part).cast("i") for part in found)
    entries = [[-1] * 6]
    known: dict[tuple[int, int], int] = {}
    entry_of, counted, node_before = [-1] * len(parents), [0] * len(parents), [-1] * len(parents)
    for start, lines in _starts(books):
        node = lines[start]
        waiting = []
        while node >= 0 and entry_of[node] < 0:
            waiting.append(node)
            node = parents[node]
        above = 0 if node < 0 else entry_of[node]
        for node in reversed(waiting):
            at = 3 * site_of[node]
            its = levels[at + 2 : at + 3] if above == 0 and levels[at + 2] >= 0 else levels[at : at + 2]
            for level in its:
                if level < 0:
                    break
                if (above, level) not in known:
                    known[above, level] = len(entries)
                    entries.append([above, level, node, -1, entries[above][3], -1])
                    entries[above][3] = known[above, level]
                above = known[above, level]
                counted[node] += 1
            entry_of[node] = above
            if counted[node]:
                node_before[node], entries[above][5] = entries[above][5], node
    of_entries = [array("i", column) for column in zip(*entries, strict=True)]
    return Names._make([*of_entries, array("i", entry_of), array("i", counted), array("i", node_before)])


def topmost(parents: Numbers, site_of: Numbers, marks: Numbers) -> Numbers:
    """Group 0 for each node of a marked site that lies under none, -1 for the others."""
    if _native is not None:
        return memoryview(_native.topmost(parents, site_of, marks)).cast("i")
    below: list[bool] = []
    groups = array("i")
    for node, parent in enumerate(parents):
        inside, marked = parent >= 0 and below[parent], bool(marks[site_of[node]])
        groups.append(0 if marked and not inside else -1)
        below.append(marked or inside)
    return groups


class Group(NamedTuple):
    """Lines of a function that are one row: the number of the first of them, how many, and their sums."""

    first: int
    lines: int
    time_ns: int
    calls: int
    on_device: int


class Function(NamedTuple):
    """A function: its topmost node or request (NOT_BELOW for all functions together), and what is in it.

    `calls` took `outer_ns`, of which `own_ns` in no span inside. `work_ns` is the self time of other lines that are
    work, `all_calls` and `time_ns` are the calls and the self times of all lines. Its `rows` begin with the `first`.
    """

    node: int
    lines: int
    all_calls: int
    calls: int
    outer_ns: int
    own_ns: int
    work_ns: int
    time_ns: int
    first: int
    rows: int


def heaviest(weights: list[float | None], entries: list[int], most: int) -> list[int]:
    """So many of the entries with a weight, heaviest first, of equal ones that which stands first."""
    found: list[int] | None = None if _native is None else _native.heaviest(weights, entries, most)
    if found is not None:
        return found
    known = ((weight, entry) for entry in entries if (weight := weights[entry]) is not None)
    return [entry for _, entry in heapq.nlargest(most, known, key=itemgetter(0))]


def parted(weights: list[float | None], entries: list[int], chosen: set[int]) -> tuple[list[int], list[int]]:
    """The entries with a weight: those that are chosen, and the others."""
    if _native is not None:
        found: tuple[list[int], list[int]] = _native.parted(weights, entries, chosen)
        return found
    known = [entry for entry in entries if weights[entry] is not None]
    return [entry for entry in known if entry in chosen], [entry for entry in known if entry not in chosen]


class Functions:
    """The functions by their numbers, all of them together as 0 and each in the order of first calls."""

    def __init__(self, functions: Numbers, groups: Numbers) -> None:
        self._functions, self._groups = functions, groups

    def __len__(self) -> int:
        return len(self._functions) // len(Function._fields)

    def __getitem__(self, number: int) -> Function:
        width = len(Function._fields)
        return Function._make(self._functions[number * width : (number + 1) * width])

    def column(self, field: str) -> list[int]:
        """A number of each."""
        return list(self._functions[Function._fields.index(field) :: len(Function._fields)])

    def groups(self, function: Function) -> Iterator[Group]:
        """The rows of a function in their order."""
        width = len(Group._fields)
        for start in range(function.first * width, (function.first + function.rows) * width, width):
            yield Group._make(self._groups[start : start + width])


ORDERS = ("total", "calls", "ave")
"""What the rows of functions may be in descending order of: self time, calls, or self time of a call."""


def functions(
    lines: Numbers, parents: Numbers, site_of: Numbers, marks: Numbers, keys: Numbers, rows: Numbers, order: str
) -> Functions:
    """The functions that lines are of, which are those of `Lines.merged`.

    A function is the topmost request of a path, or what is topmost where there is none. Of each site, `marks` says
    whether it is a REQUEST and whether it is WORK, `keys` the number of its key, `rows` that of the row that its lines
    are in, -1 for one of its own for each. A call of a request that lies in another function counts as the latter's,
    too, but where that is the same.
    """
    if _native is not None and not isinstance(lines, list):
        found = _native.functions(lines, parents, site_of, marks, keys, rows, ORDERS.index(order))
        if found is not None:
            return Functions(_view(found[0]), _view(found[1]))
    function_of: list[int] = []
    root_of: list[int] = []
    for node, parent in enumerate(parents):
        function = function_of[parent] if parent >= 0 else node
        if not marks[site_of[function]] & REQUEST and marks[site_of[node]] & REQUEST:
            function = node
        function_of.append(function)
        root_of.append(root_of[parent] if parent >= 0 else node)
    called = set(lines[::WIDTH])
    sums: dict[int, list[int]] = {-1: [NOT_BELOW, *[0] * 7]}
    groups: dict[int, dict[int, list[int]]] = {-1: {}}
    for index, start in enumerate(range(0, len(lines), WIDTH)):
        node = lines[start]
        site, function, root = site_of[node], function_of[node], root_of[node]
        key = keys[site_of[function]]
        row = rows[site] if rows[site] >= 0 else index
        is_around = root != node and root in called
        in_same = is_around and keys[site_of[function_of[root]]] == key
        for its, is_inside in ((key, in_same), (-1, is_around)):
            total = sums.setdefault(its, [function, *[0] * 7])
            total[1] += 1
            total[2] += lines[start + CALLS]
            if function == node and not is_inside:
                for at, field in ((3, CALLS), (4, TOTAL), (5, SELF)):
                    total[at] += lines[start + field]
            elif marks[site] & WORK:
                total[6] += lines[start + SELF]
            total[7] += lines[start + SELF]
            group = groups.setdefault(its, {}).setdefault(row, [index, 0, 0, 0, 0])
            added = (0, 1, lines[start + SELF], lines[start + CALLS], int(lines[start + DEVICE] > 0))
            group[:] = map(sum, zip(group, added, strict=True))

    def weight(group: Sequence[int]) -> tuple[float, ...]:
        first, count, time_ns, calls, _ = group
        return {"calls": calls, "ave": time_ns / calls}.get(order, time_ns), time_ns, calls, count, first

    of_functions: list[int] = []
    of_groups: list[int] = []
    for key, total in sums.items():
        in_order = sorted(groups[key].values(), key=weight, reverse=True)
        of_functions += [*total, len(of_groups) // len(Group._fields), len(in_order)]
        of_groups += [number for group in in_order for number in group]
    return Functions(of_functions, of_groups)


def _chained(before: Numbers, lasts: Numbers, entries: Iterable[int]) -> list[int]:
    """The numbers along the links from the last of each entry."""
    if _native is not None and isinstance(before, memoryview):
        return _native.chained(before, lasts, array("i", entries))  # type: ignore[no-any-return]
    found = []
    for entry in entries:
        at = lasts[entry]
        while at >= 0:
            found.append(at)
            at = before[at]
    return found


def packed(numbers: list[int]) -> Numbers:
    """As the native loops take them, if none is too large."""
    try:
        return memoryview(array("q", numbers))
    except OverflowError:
        return numbers


def _view(found: bytes) -> Numbers:
    return memoryview(found).cast("q")


def _starts(books: Iterable[Numbers]) -> Iterator[tuple[int, Numbers]]:
    for lines in books:
        for start in range(0, len(lines), WIDTH):
            yield start, lines


def _add(sums: list[int], at: int, lines: Numbers, start: int, count: int) -> None:
    """Add a line, or the sum of so many, to a sum."""
    if not lines[start + CALLS]:
        return
    for field, choose in ((MIN, min), (MAX, max), (FIRST, min)):
        known, other = sums[at + field], lines[start + field]
        sums[at + field] = choose(known, other) if sums[at + CALLS] else other
    for field in _ADDED:
        sums[at + field] += lines[start + field]
    sums[at] += count
