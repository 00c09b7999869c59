"""The tree of names of the `events` view: which call paths are one row, what is in it, and which rows are kept.

An entry is a number, and its place in the tree a column; only what is shown becomes more than that.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

from instrument.recording.lines import (
    CALLS,
    DEVICE,
    ELAPSED,
    FIRST,
    MAX,
    MIN,
    TOTAL,
    Lines,
    Sums,
    heaviest,
    parted,
    tree_of_names,
)
from instrument.recording.paths import CallTree
from instrument.recording.spans import Site
from instrument.report.view import Options

ENDPOINTS = {"h2d": ":CPU->GPU", "d2h": ":GPU->CPU", "d2d": "(same_gpu):GPU->GPU", "p2p": ":GPU->GPU"}
INSTANTIATED = ("op", "layer")
"""Kinds of which `AllOpDetail` shows each instance."""

TIMES = {"All": ELAPSED, "CPU": TOTAL, "GPU": DEVICE}
"""What Total is in a state."""

WEIGHTS: Mapping[str, tuple[int, int, bool]] = {
    "calls": (CALLS, -1, False),
    "max": (MAX, -1, False),
    "min": (MIN, -1, False),
    "cpu_total": (TOTAL, -1, False),
    "cpu_max": (MAX, -1, False),
    "cpu_min": (MIN, -1, True),
    "cpu_ave": (TOTAL, CALLS, False),
    "gpu_total": (DEVICE, -1, False),
    "gpu_max": (MAX, -1, False),
    "gpu_min": (MIN, -1, True),
    "gpu_ave": (DEVICE, CALLS, False),
}
"""A sort key's field, what it is divided by (-1: nothing), and whether the least is first. Other keys are the Total,
by the calls for `ave`."""

ROOT = 0

ROW, PHASE, COPY, INSTANCE = (role << 28 for role in range(4))
"""What an entry is. Its level is that, and the number of the first site that is called the same."""
ROLES = INSTANCE


class NameTree:
    """The tree of names of all lines, as a tracer option asks for it."""

    def __init__(self, lines: Lines, tracer_option: str) -> None:
        self._lines = lines
        levels = lines.tree.column(LEVELS[tracer_option])
        self._names = tree_of_names(lines.parents, lines.site_of, levels, lines.book(None))
        self.parents = self._names.parents
        self._children: dict[int, list[int]] = {}
        self._has_instances = tracer_option == "AllOpDetail"
        self._numbers: dict[int, dict[int, int]] = {}
        self._sums: dict[int | None, Sums] = {}
        self._below: dict[int | None, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self.parents)

    def children(self, entry: int) -> list[int]:
        """What is right under an entry, in the order of the lines."""
        children = self._children.get(entry)
        if children is None:
            children = self._children[entry] = self._names.children(entry)
        return children

    def sums(self, thread: int | None) -> Sums:
        """The sums of a thread's lines, or of all (None), by entry; device time with that of what ran below."""
        if thread not in self._sums:
            names = self._names
            sums = Sums.of_lines(self._lines.book(thread), names.entry_of, len(self), names.counted, self.parents)
            added: dict[int, int] = {}
            for node, more_ns in self._lines.device_below(thread).items():
                entry = names.entry_of[node]
                for _ in range(names.counted[node]):
                    added[entry] = added.get(entry, 0) + more_ns
                    entry = self.parents[entry]
            self._below[thread] = added
            self._sums[thread] = sums.plus(DEVICE, added) if added else sums
        return self._sums[thread]

    def is_own_device(self, entries: Iterable[int], thread: int | None) -> bool:
        """Whether nothing that ran below these entries adds to their device time."""
        below = self._below[thread]
        return not below or not any(entry in below for entry in entries)

    def forget(self, thread: int | None) -> None:
        """Give up the sums of a thread."""
        self._sums.pop(thread, None)
        self._below.pop(thread, None)

    def site(self, entry: int) -> Site:
        """That of the first path that the entry is of."""
        return self._lines.tree.sites[self._lines.site_of[self._names.first_nodes[entry]]]

    def name(self, entry: int) -> str:
        """What the entry is called; an instance has its number."""
        site, role = self.site(entry), self._role(entry)
        name = _copy_name(site) if role == COPY else site.name
        return f"{name}{self._number(entry)}" if role == INSTANCE else name

    def label(self, entry: int) -> str:
        """The name as shown: a phase carries the name of what it is a phase of."""
        name = self.name(entry)
        return f"{self.name(self.parents[entry])}/{name}" if self._role(entry) == PHASE else name

    def detail(self, entry: int) -> str:
        """What tells an instance apart from its siblings."""
        if self._role(entry) != INSTANCE:
            return ""
        site = self.site(entry)
        return site.instance or site.function or (f"{site.file}:{site.line}" if site.file else "")

    def histogram(self, entries: Sequence[int], thread: int | None) -> dict[int, int]:
        """How long the calls of entries took."""
        if self._has_instances:
            below = [child for entry in entries for child in self.children(entry) if self._role(child) == INSTANCE]
            entries = [*entries, *below]
        return self._lines.histogram(self._names.nodes(entries), thread)

    def total_ns(self, thread: int | None, state: str) -> int | None:
        """The sum of the topmost rows; None where one has no call, so that what is hidden below may stand for it."""
        sums, topmost = self.sums(thread), self.children(ROOT)
        calls = sums.column(CALLS)
        # Where all but the root have calls, as in most processes, none need be looked at.
        uncalled = [entry for entry in topmost if not calls[entry]] if calls.count(0) > 1 else []
        if any(self.children(entry) or self._hides(entry) for entry in uncalled):
            return None
        return sums.together(topmost)[TIMES[state]]

    def total_below_ns(self, thread: int | None, state: str) -> int:
        """The sum of the topmost rows that have calls; in the tree with phases it is the same in every option."""
        sums, total_ns = self.sums(thread), 0
        calls, times = sums.column(CALLS), sums.column(TIMES[state])
        pending = [ROOT]
        while pending:
            for entry in self.children(pending.pop()):
                total_ns += times[entry]
                if not calls[entry]:
                    pending.append(entry)
        return total_ns

    def _role(self, entry: int) -> int:
        return self._names.levels[entry] & ROLES

    def _hides(self, entry: int) -> bool:
        """Whether a phase is hidden in the entry."""
        return any(
            above == entry and not levels
            for above, levels in zip(self._names.entry_of, self._names.counted, strict=True)
        )

    def _number(self, entry: int) -> int:
        """The number of an instance: from 0 by first call on any thread, then in the order of the lines."""
        above = self.parents[entry]
        if above not in self._numbers:
            first_ns = self.sums(None).values(self.parents, FIRST, least=True)
            instances = [child for child in self.children(above) if self._role(child) == INSTANCE]
            instances.sort(key=lambda child: first_ns[child] or 0)
            self._numbers[above] = {child: number for number, child in enumerate(instances)}
        return self._numbers[above][entry]


class Selection:
    """The entries of a tree that a block shows, in their order.

    `levels` has of each entry with something right under it those of that which are kept, and those left out.
    """

    def __init__(self, tree: NameTree, thread: int | None, options: Options) -> None:
        self._tree, self._options = tree, options
        self._sums = tree.sums(thread)
        per = CALLS if options.sorted_by == "ave" else -1
        field, per, negative = WEIGHTS.get(options.sorted_by, (TIMES[options.state], per, False))
        self._weight = self._sums.values(tree.parents, field, per, negative=negative)
        self._first_ns = self._sums.values(tree.parents, FIRST, least=True)
        self._kept = self._find_kept()

    def below(self, entry: int) -> tuple[list[int], list[int]]:
        """What is right under an entry and has calls at or under it: the kept ones in order, and those left out."""
        children, weight = self._tree.children(entry), self._weight
        left_out: list[int] = []
        if self._kept is None:
            kept = [child for child in children if weight[child] is not None]
        else:
            kept, left_out = parted(weight, children, self._kept)
        kept.sort(key=self._order)
        return kept, left_out

    def _order(self, entry: int) -> tuple[float, float]:
        return (0 if self._options.sorted_by == "default" else self._lightness(entry), self._first_ns[entry] or 0)

    def _lightness(self, entry: int) -> float:
        return -(self._weight[entry] or 0)

    def _find_kept(self) -> set[int] | None:
        """The heaviest entries that the options leave, none without its parent; None for all."""
        enough, rows = self._enough(), self._options.rows
        if rows is None:
            return enough
        order = itertools.count()
        kept: set[int] = set()
        heap: list[tuple[float, int, int]] = [(0, next(order), ROOT)]
        while heap and len(kept) <= rows:
            entry = heapq.heappop(heap)[-1]
            kept.add(entry)
            children = self._tree.children(entry)
            if enough is not None:
                children = [child for child in children if child in enough]
            for child in heaviest(self._weight, children, rows):
                heapq.heappush(heap, (self._lightness(child), next(order), child))
        return kept

    def _enough(self) -> set[int] | None:
        """The entries with as much time as is asked for; None where all have."""
        if not self._options.least_ns:
            return None
        # A background task may be longer than what began it: then both stay.
        enough: set[int] = set()
        times = self._sums.column(TIMES[self._options.state])
        for entry in reversed(range(len(self._tree))):
            if entry in enough or times[entry] >= self._options.least_ns:
                enough |= {entry, self._tree.parents[entry]}
        return enough


NOTHING = -1
PER_SITE = 3
"""Of each site the one or two levels that it adds to the tree, and the one that it adds where it is topmost."""


def _leveller(tracer_option: str) -> Callable[[CallTree, int], array[int]]:
    special = {"phase", "copy", *(INSTANTIATED if tracer_option == "AllOpDetail" else ())}

    def levels_from(tree: CallTree, known: int) -> array[int]:
        """What sites add to the tree: nothing where a phase is hidden, two levels where instances are shown.

        A phase that nothing surrounds is a row like any other, so that no option changes the Total time.
        """
        names, kinds, *_ = tree.facts()
        start = known // PER_SITE
        kinds = kinds[start:]
        instances = tree.keys() if special.intersection(INSTANTIATED) else names
        copies = tree.numbered(_copy_name) if "copy" in kinds else names
        levels = array("i", [NOTHING]) * (PER_SITE * len(kinds))
        levels[::PER_SITE] = names[start:]
        for number, kind in enumerate(kinds, start) if special.intersection(kinds) else ():
            if kind not in special:
                continue
            at, name = PER_SITE * (number - start), names[number]
            if kind == "phase":
                own = NOTHING if tracer_option == "Default" else PHASE | name
                levels[at : at + PER_SITE] = array("i", (own, NOTHING, ROW | name))
            elif kind == "copy":
                levels[at] = COPY | copies[number]
            else:
                levels[at + 1] = INSTANCE | instances[number]
        return levels

    return levels_from


LEVELS: Mapping[str, Callable[[CallTree, int], array[int]]] = {
    option: _leveller(option) for option in ("Default", "OpDetail", "AllOpDetail")
}
"""For `CallTree.column`, by the tracer option."""


def _copy_name(site: Site) -> str:
    """Fluid's name for a copy of this direction and synchronicity; the site's own where it does not say them."""
    attributes = dict(site.attributes)
    direction, sync = attributes.get("direction"), attributes.get("sync")
    if not isinstance(direction, str) or direction not in ENDPOINTS or not isinstance(sync, bool):
        return site.name
    peer = "Peer" if direction == "p2p" else ""
    return f"GpuMemcpy{peer}{'Sync' if sync else 'Async'}{ENDPOINTS[direction]}"
