"""The tree of names that the `events` view prints, with the sums of each entry.

An entry is identified by its path of names. Entries are stored in arrays, and only printed entries become objects.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.recording.distributions import percentiles
from instrument.recording.paths import KIND, NAME
from instrument.recording.spans import Site, is_interruption
from instrument.recording.tally import Records, Tally, Totals, sum_all_lines, sum_lines
from instrument.report.table import Ratio, code_location_of, compute_share
from instrument.report.view import Options, SortKey
from instrument.trace.columns import Bools, Int64s
from instrument.trace.indices import NONE, Members, find_ancestor, find_least_at_or_below

ENDPOINTS = {"h2d": ":CPU->GPU", "d2h": ":GPU->CPU", "d2d": "(same_gpu):GPU->GPU", "p2p": ":GPU->GPU"}
INSTANTIATED = ("op", "layer")
"""The kinds of span that have a row for each instance if the tracer option is `AllOpDetail`."""

TIMES = {"All": "elapsed_ns", "CPU": "total_ns", "GPU": "device_ns"}
"""The tally field that the Total column shows, for each value of the option `state`."""

ROOT = 0

ROW, PHASE, COPY, INSTANCE = (role << 28 for role in range(4))
"""The roles of table entries, which are stored in the high bits of an entry's level."""
ROLES = INSTANCE


class NameTree:
    """The tree of names in the `events` view, for one tracer option. Entries are numbers, and parents come before their
    children. A call path without a row of its own counts for the entry of its caller."""

    def __init__(self, tally: Tally, tracer_option: str) -> None:
        self._tally = tally
        levels_of_site, site_of, parents = _find_levels(tally, tracer_option), tally.site_of.tolist(), tally.parents
        # The number of the first tally line at or below each node, or the number of all lines without one.
        own_line = np.full(len(parents), len(tally.lines), dtype=np.int64)
        own_line[tally.lines["node"][::-1]] = np.arange(len(tally.lines))[::-1]
        first_line = np.array(find_least_at_or_below(parents.tolist(), own_line.tolist()), dtype=np.int64)
        order = np.argsort(first_line, kind="stable")
        order = order[: np.searchsorted(first_line[order], len(tally.lines))]
        up, levels, first_nodes = [NONE], [NONE], [NONE]
        entry_of, visible = [NONE] * len(parents), [False] * len(parents)
        entries: dict[tuple[int, int], int] = {}
        for node, parent in zip(order.tolist(), parents[order].tolist(), strict=True):
            entry, (*inner_levels, topmost_level) = ROOT, levels_of_site[site_of[node]]
            if parent != NONE:
                entry = entry_of[parent]
            elif topmost_level != NONE:
                inner_levels = [topmost_level]
            visible[node] = inner_levels[0] != NONE
            for level in inner_levels if visible[node] else ():
                if level != NONE:
                    above, entry = entry, entries.setdefault((entry, level), len(up))
                    if entry == len(up):
                        up.append(above)
                        levels.append(level)
                        first_nodes.append(node)
            entry_of[node] = entry
        self.parents, self._levels, self._first_nodes = np.array(up), np.array(levels), first_nodes
        self._entry_of, self._visible = np.array(entry_of, dtype=np.int64), np.array(visible, dtype=np.bool_)
        self.children = Members(self.parents, len(self))
        """The children of each entry, in the order of the tally lines."""
        self._nodes = Members(np.where(self._visible, self._entry_of, NONE), len(self))
        self._instances = np.flatnonzero((self._levels & ROLES == INSTANCE) & (self._levels != NONE))

    def __len__(self) -> int:
        return len(self.parents)

    def sum_entries(self, thread: int | None) -> tuple[Records, set[int]]:
        """Return the sums for each entry, and the entries whose callees have device time. `thread` is None for all
        threads."""
        sums = self._tally.sum_by_group(np.where(self._visible, self._entry_of, NONE), len(self), thread)
        if len(self._instances):  # the sums of an instance are also in the row of its type
            entries = np.concatenate([np.arange(len(self)), self.parents[self._instances]])
            sums = sum_lines(np.concatenate([sums, sums[self._instances]]), entries, len(self))
        self._add_hidden_phases(sums, thread)
        below = set[int]()
        for node, more_ns in self._tally.find_missing_device_ns(thread).items():
            entry = int(self._entry_of[node]) if self._visible[node] else NONE
            while entry != NONE:
                sums["device_ns"][entry] += more_ns
                below.add(entry)
                entry = int(self.parents[entry]) if self._role_of_entry(entry) == INSTANCE else NONE
        return sums, below

    def _add_hidden_phases(self, sums: Records, thread: int | None) -> None:
        lines = self._tally.lines_of_thread(thread)
        lines = lines[~self._visible[lines["node"]] & (lines["calls"] != 0)]
        entries = self._entry_of[lines["node"]]
        for name in ("self_ns", "waiting_ns"):
            np.add.at(sums[name], entries, lines[name])
        for entry, first_ns in zip(entries.tolist(), lines["first_ns"].tolist(), strict=True):
            if not sums["calls"][entry]:
                sums["first_ns"][entry] = min(sums["first_ns"][entry] or first_ns, first_ns)

    def compute_sort_values(
        self, sums: Records, field: str, *, per_call: bool = False, least: bool = False
    ) -> tuple[NDArray[Any], Bools]:
        """Return the value of a field for each entry, and a mask of the entries with calls of their own or of callees.

        - `per_call`: divide values by the number of calls
        - `least`: an entry without calls gets the smallest value below it; by default, the largest
        """
        calls = sums["calls"]
        has_own = (calls != 0) | (sums["first_ns"] != 0)
        values = sums[field].copy()
        if per_call:
            values = np.where(calls != 0, values, 0) / np.maximum(calls, 1)
        has_value, choose = has_own.copy(), min if least else max
        for entry in np.flatnonzero(calls == 0)[::-1].tolist():  # children come after their parent
            below = self.children[entry]
            below = below[has_value[below]]
            if len(below):
                best = values[below].min() if least else values[below].max()
                values[entry] = choose(values[entry], best) if has_own[entry] else best
                has_value[entry] = True
        return values, has_value

    def site(self, entry: int) -> Site:
        return self._tally.tree.sites[int(self._tally.site_of[self._first_nodes[entry]])]

    def name(self, entry: int) -> str:
        site, role = self.site(entry), self._role_of_entry(entry)
        name = _fluid_copy_name(site) if role == COPY else site.name
        return f"{name}{self._instance_numbers[entry]}" if role == INSTANCE else name

    def label(self, entry: int) -> str:
        """Return the printed name of an entry. A phase is printed as `parent/phase`."""
        name = self.name(entry)
        return f"{self.name(int(self.parents[entry]))}/{name}" if self._role_of_entry(entry) == PHASE else name

    def instance_detail(self, entry: int) -> str:
        if self._role_of_entry(entry) != INSTANCE:
            return ""
        site = self.site(entry)
        return site.instance or code_location_of(site)

    def histogram(self, entries: Sequence[int], thread: int | None) -> dict[int, int]:
        if len(self._instances):
            below = [child for entry in entries for child in self.children[entry].tolist()]
            entries = [*entries, *(child for child in below if self._role_of_entry(child) == INSTANCE)]
        return self._tally.histogram([node for entry in entries for node in self._nodes[entry].tolist()], thread)

    def total_ns(self, sums: Records, state: str) -> int | None:
        """Return the Total time of all topmost rows for a `state`. Return None if a topmost row has calls only below
        it."""
        topmost = self._drop_interruptions(self.children[ROOT])
        uncalled = topmost[sums["calls"][topmost] == 0].tolist()
        hidden_in = self._entry_of[~self._visible]  # the entries in which phases are hidden
        if any(len(self.children[entry]) or (hidden_in == entry).any() for entry in uncalled):
            return None
        total_ns: int = getattr(sum_all_lines(sums[topmost]), TIMES[state])
        return total_ns

    def sum_topmost_calls_ns(self, sums: Records, state: str) -> int:
        total_ns, pending = 0, [ROOT]
        while pending:
            below = self._drop_interruptions(self.children[pending.pop()])
            total_ns += int(sums[TIMES[state]][below].sum())
            pending += below[sums["calls"][below] == 0].tolist()
        return total_ns

    def _drop_interruptions(self, entries: Int64s) -> Int64s:
        """Leave out interruptions, whose time is already in the interrupted entries."""
        return entries[[not is_interruption(self.site(entry)) for entry in entries.tolist()]]

    @cached_property
    def _instance_numbers(self) -> dict[int, int]:
        """The number of each instance among its siblings, from 0 in the order of first calls."""
        first_ns, _ = self.compute_sort_values(self.sum_entries(None)[0], "first_ns", least=True)
        above = self.parents[self._instances]
        order = np.lexsort((first_ns[self._instances], above))
        numbers = np.arange(len(order)) - np.searchsorted(above[order], above[order])
        return dict(zip(self._instances[order].tolist(), numbers.tolist(), strict=True))

    def _role_of_entry(self, entry: int) -> int:
        return int(self._levels[entry]) & ROLES


def make_entry_sorter(tree: NameTree, sums: Records, options: Options) -> Callable[[int], tuple[list[int], list[int]]]:
    """Return a function that divides an entry's children into two lists: the children to print, sorted, and those to
    omit."""
    key, part = SortKey.parse_sort_key(options), options.sorted_by.rpartition("_")[0]
    of_part = {"cpu": "total_ns", "gpu": "device_ns"}.get(part, TIMES[options.state])
    field = {"calls": "calls", "max": "max_ns", "min": "min_ns"}.get(key.column, of_part)
    weight, is_known = tree.compute_sort_values(sums, field, per_call=key.column == "ave", least=key.ascending)
    weight = -weight if key.ascending else weight
    first_ns, _ = tree.compute_sort_values(sums, "first_ns", least=True)
    # An entry counts as large if one below it is, because a background task may be longer than its parent.
    is_large: Bools = sums[TIMES[options.state]] >= options.least_ns
    for entry in range(len(is_large) - 1 if options.least_ns else ROOT, ROOT, -1):
        if is_large[entry]:
            is_large[tree.parents[entry]] = True
    is_kept = _mask_kept_entries(tree, weight, is_known, is_large, options.row_limit)

    def sort_children(entry: int) -> tuple[list[int], list[int]]:
        children = tree.children[entry]
        children = children[is_known[children]]
        left_out, children = children[~is_kept[children]].tolist(), children[is_kept[children]]
        keys = [first_ns[children]]
        keys += [-weight[children]] if options.sorted_by != "default" else []
        return children[np.lexsort(keys)].tolist(), left_out

    return sort_children


def _mask_kept_entries(
    tree: NameTree, weight: NDArray[Any], is_known: Bools, is_large: Bools, rows: int | None
) -> Bools:
    if rows is None:
        return is_large
    order = itertools.count()
    is_kept = np.zeros(len(tree), dtype=np.bool_)
    heap: list[tuple[float, int, int]] = [(0, next(order), ROOT)]
    for _ in range(rows + 1):
        if not heap:
            break
        entry = heapq.heappop(heap)[-1]
        is_kept[entry] = True
        children = tree.children[entry]
        children = children[is_known[children] & is_large[children]]
        heaviest = children[np.argsort(-weight[children], kind="stable")[:rows]]
        for light, child in zip((-weight[heaviest]).tolist(), heaviest.tolist(), strict=True):
            heapq.heappush(heap, (light, next(order), child))
    return is_kept


def _find_levels(tally: Tally, tracer_option: str) -> list[tuple[int, int, int]]:
    """Return three levels for each site: its name, its instance, and a replacement for both at the top of the tree.
    `NONE` means no level."""
    tree, hides_phases = tally.tree, tracer_option == "Default"
    instantiated = INSTANTIATED if tracer_option == "AllOpDetail" else ()
    columns = zip(
        tree.map_sites(KIND),
        tree.number_sites(NAME),
        tree.number_sites_by_key(),
        tree.number_sites(_fluid_copy_name),
        strict=False,
    )
    return [
        (NONE if hides_phases else PHASE | name, NONE, ROW | name)
        if kind == "phase"
        else (COPY | copy, NONE, NONE)
        if kind == "copy"
        else (name, INSTANCE | key if kind in instantiated else NONE, NONE)
        for kind, name, key, copy in columns
    ]


def _fluid_copy_name(site: Site) -> str:
    """Return the name of a copy in Paddle's fluid, such as `GpuMemcpyAsync:CPU->GPU`, or the site's name for other
    sites."""
    attributes = dict(site.attributes)
    direction, sync = attributes.get("direction"), attributes.get("sync")
    if not isinstance(direction, str) or direction not in ENDPOINTS or not isinstance(sync, bool):
        return site.name
    peer = "Peer" if direction == "p2p" else ""
    return f"GpuMemcpy{peer}{'Sync' if sync else 'Async'}{ENDPOINTS[direction]}"


@dataclass(frozen=True, slots=True)
class EventRow:
    """A row of the `events` view. Times are sums over the row's calls, in ns.

    - `thread`: None for all threads merged
    - `total_ns`, `ratio`: the time that the state selects, and its share of the block's Total time
    - `min_ns`, `max_ns`, `p50_ns`, `p99_ns`: None unless they are exact for the state
    - `self_ns`: the time on the host outside of the row's children
    - `waiting_ns`: the part of `self_ns` in which calls were suspended
    """

    name: str
    depth: int
    thread: int | None
    kind: str
    instance: str
    calls: int
    errors: int
    total_ns: int
    host_ns: int
    device_ns: int
    elapsed_ns: int
    self_ns: int
    waiting_ns: int
    min_ns: int | None
    max_ns: int | None
    p50_ns: int | None
    p99_ns: int | None
    ratio: float | None
    remaining: int = 0

    ave_ns = Ratio("total_ns", of="calls")
    host_ratio = Ratio("host_ns", of="elapsed_ns")
    device_ratio = Ratio("device_ns", of="elapsed_ns")


@dataclass(frozen=True, slots=True)
class EventsBlock:
    """The rows of one thread, or of all threads merged if `thread` is None. `ratio` of a row is its share of
    `total_ns`. `number` counts the threads from 0, by first call."""

    thread: int | None
    number: int | None
    name: str
    total_ns: int
    rows: tuple[EventRow, ...]


def make_event_blocks(tally: Tally, options: Options) -> tuple[EventsBlock, ...]:
    by_thread: list[int | None] = [
        thread for thread in reversed(tally.threads) if tally.lines_of_thread(thread)["calls"].any()
    ]
    shown: list[int | None] = []
    if options.threads == "merged" or (options.threads == "both" and len(by_thread) > 1):
        shown = [None] if by_thread else []
    if options.threads != "merged":
        shown += by_thread
    if not shown:
        return ()
    tree = NameTree(tally, options.tracer_option)
    full = tree if options.tracer_option == "OpDetail" else None
    numbers = {thread: number for number, thread in enumerate(tally.threads)}
    blocks = []
    for thread in shown:
        sums, with_calls_below = tree.sum_entries(thread)
        total_ns = tree.total_ns(sums, options.state)
        if total_ns is None:
            full = full or NameTree(tally, "OpDetail")
            total_ns = full.sum_topmost_calls_ns(full.sum_entries(thread)[0], options.state)
        number, name = (None, "") if thread is None else (numbers[thread], tally.threads[thread])
        rows = _make_event_rows(tree, thread, sums, with_calls_below, total_ns, options)
        blocks.append(EventsBlock(thread, number, name, total_ns, tuple(rows)))
    return tuple(blocks)


def _make_event_rows(
    tree: NameTree, thread: int | None, sums: Records, with_calls_below: set[int], base_ns: int, options: Options
) -> list[EventRow]:
    order_children, state = make_entry_sorter(tree, sums, options), options.state

    def make_row(depth: int, entries: Sequence[int], *, is_rest: bool) -> EventRow:
        entry = entries[0]
        totals = sum_all_lines(sums[entries]) if is_rest else Totals._make(sums[entry].tolist())
        called, total_ns = totals.calls > 0, getattr(totals, TIMES[state])
        # No call's time of a state exceeds its elapsed time, so with equal sums each is the same.
        exact = called and total_ns == totals.elapsed_ns
        exact = exact and (state != "GPU" or with_calls_below.isdisjoint(entries))
        p50_ns = p99_ns = None
        # Percentiles over many functions have no meaning, and cost a third of the time of a summary of thousands.
        if exact and not is_rest:
            histogram = tree.histogram(entries, thread)
            p50_ns, p99_ns = percentiles(histogram, (0.5, 0.99), totals.calls, totals.min_ns, totals.max_ns)
        return EventRow(
            name=f"(remaining {len(entries)})" if is_rest else tree.label(entry),
            depth=depth,
            thread=thread,
            kind="" if is_rest else tree.site(entry).kind,
            instance="" if is_rest else tree.instance_detail(entry),
            calls=totals.calls,
            errors=totals.errors,
            total_ns=total_ns,
            host_ns=totals.total_ns,
            device_ns=totals.device_ns,
            elapsed_ns=totals.elapsed_ns,
            self_ns=totals.self_ns,
            waiting_ns=totals.waiting_ns,
            min_ns=totals.min_ns if exact else None,
            max_ns=totals.max_ns if exact else None,
            p50_ns=p50_ns,
            p99_ns=p99_ns,
            ratio=compute_share(total_ns, base_ns) if called else None,
            remaining=len(entries) if is_rest else 0,
        )

    rows = []
    pending: list[tuple[int, list[int], bool]] = [(-1, [ROOT], False)]
    while pending:
        depth, entries, is_rest = pending.pop()
        if depth >= 0:
            rows.append(make_row(depth, entries, is_rest=is_rest))
        if not is_rest:
            children, left_out = order_children(entries[0])
            pending += [(depth + 1, left_out, True)] if left_out else []
            pending += [(depth + 1, [child], False) for child in reversed(children)]
    return rows


def mask_topmost_nodes(tally: Tally, say: Callable[[Site], bool]) -> Bools:
    """Mark the nodes with a site for which `say` returns True. Leave out nodes below another such node."""
    marked = np.array([*tally.tree.map_sites(say), False], dtype=np.bool_)[tally.site_of]
    return np.asarray(marked & (find_ancestor(tally.parents, marked) == NONE))


def sum_topmost_by_name(tally: Tally, say: Callable[[Site], bool]) -> dict[str, Totals]:
    """Return the totals of topmost nodes by name (see `mask_topmost_nodes`)."""
    numbers = np.array([*tally.tree.number_sites(NAME), NONE], dtype=np.int32)
    sums = tally.sum_by_group(np.where(mask_topmost_nodes(tally, say), numbers[tally.site_of], NONE), len(numbers))
    called = np.flatnonzero(sums["calls"]).tolist()
    return {tally.tree.sites[number].name: Totals._make(sums[number].tolist()) for number in called}


def sum_topmost_nodes(tally: Tally, say: Callable[[Site], bool]) -> Totals:
    groups = np.where(mask_topmost_nodes(tally, say), 0, NONE)
    totals = Totals._make(tally.sum_by_group(groups, 1)[0].tolist())
    below_ns = sum(more_ns for node, more_ns in tally.find_missing_device_ns(None).items() if groups[node] == 0)
    return totals._replace(device_ns=totals.device_ns + below_ns)
