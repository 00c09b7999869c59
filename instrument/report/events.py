"""The `events` view: what ran, how often and how long, as a tree of names.

Layout and row names follow the report of Paddle's fluid profiler (`tracer_option`, state, `sorted_key`). The numbers
follow these rules, which differ from that report where it counted wrongly:

- Total is, in state All, the sum over calls of `elapsed`: the length of the union of a call's host and device
  interval, so that time in which both ran counts once. State CPU: the host interval. State GPU: the device time.
- Min., Max., Ave., p50 and p99 are of `elapsed` in every state, for that is what the tally's histogram holds.
- Ratio. is a row's Total divided by the Total time of its block, which is the sum of the topmost rows. A row whose
  span has not ended, or ended on another thread, has no call to count; what lies under it counts in its place.
- Rows are sums of work. Children that ran at the same time as each other, or on the device after their parent had
  returned, may together exceed their parent, and the Total time of all threads may exceed the time on the clock.
- A row is a path of names, held as a list: no character of a name has a meaning.

Fluid's table is 160 columns wide. Here a line has 100: cells show four significant digits where fluid shows six (the
objects hold integer ns, from which all six follow), and CPU Time and GPU Time with their ratios are a table of their
own, which has the rows with device time. Of any other row the CPU Time is the Total and the GPU Time 0.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from instrument.report.table import (
    GAP,
    LINE,
    MISSING,
    columns,
    compact,
    in_unit,
    percent,
    safe,
    section_title,
    share,
    shorten,
    table,
    title,
)
from instrument.report.view import UNITS, Options, Recording
from instrument.spans import Site
from instrument.tally import Tally, Totals

PLACES = {"All": "All", "CPU": "CPU", "GPU": "CUDA"}
ORDERS = {
    "default": "first call in ascending order",
    "calls": "number of calls in descending order",
    "total": "total time in descending order",
    "max": "maximum time in descending order",
    "min": "minimum time in descending order",
    "ave": "average time in descending order",
    "cpu_total": "host time in descending order",
    "cpu_max": "maximum time in descending order",
    "cpu_min": "minimum time in ascending order",
    "cpu_ave": "average host time in descending order",
    "gpu_total": "device time in descending order",
    "gpu_max": "maximum time in descending order",
    "gpu_min": "minimum time in ascending order",
    "gpu_ave": "average device time in descending order",
}
"""Of maxima and minima of host or device time alone the tally knows nothing; those of both together are the nearest."""

ENDPOINTS = {"h2d": ":CPU->GPU", "d2h": ":GPU->CPU", "d2d": "(same_gpu):GPU->GPU", "p2p": ":GPU->GPU"}
INSTANTIATED = ("op", "layer")
"""Kinds of which `AllOpDetail` shows each instance."""

NAME_LIMIT = 64
"""Columns of a name, indent and thread tag included; fluid's longest names fit."""
DETAIL_LEAST = 12
"""Columns below which an instance's detail is left out rather than shortened."""
INDENT_LIMIT = 12
"""Levels that are indented at most; deeper ones, and those that leave a name no room, are numbered."""
LABEL_WIDTH = 25
NUMBER_WIDTH = 12
CALLS_WIDTH = 10
"""Digits of a number of calls that are shown in full."""
RATIO_WIDTH = 6

DECIMALS = {unit: len(str(unit_ns)) - 1 for unit, unit_ns in UNITS.items()}
"""Decimals of a time that is shown to the nanosecond."""


@dataclass(frozen=True, slots=True)
class EventRow:
    """One row of the view. Times are in ns and sums over the row's calls.

    `name` is unescaped and in full, `depth` is 0 for the topmost rows. `thread` is the thread's id, or None where all
    threads are merged. `total_ns` is what the state asks for: `elapsed_ns`, `host_ns` or `device_ns`. `ratio` is its
    share of the block's Total time. `instance` tells the instances of `AllOpDetail` apart: a layer's path, else where
    the code is. `self_ns` is host time outside the row's children; a hidden phase leaves its own to the row around it,
    and the row of a type has that of its instances. A row with `remaining` stands for so many rows of its level that
    were left out.
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
    min_ns: int | None
    max_ns: int | None
    p50_ns: int | None
    p99_ns: int | None
    ratio: float | None
    remaining: int = 0

    @property
    def ave_ns(self) -> float | None:
        """Mean elapsed time of a call."""
        return share(self.elapsed_ns, self.calls)

    @property
    def host_ratio(self) -> float | None:
        """Host time as a share of what has elapsed."""
        return share(self.host_ns, self.elapsed_ns)

    @property
    def device_ratio(self) -> float | None:
        """Device time as a share of what has elapsed."""
        return share(self.device_ns, self.elapsed_ns)


@dataclass(slots=True, eq=False)
class _Entry:
    """A row to be: one place in the tree of names.

    `parts` are the lines of the tally that it is the sum of, by thread, None for all threads together, and `hidden`
    those of the phases that are hidden in it. `sums` has what was added up of them.
    """

    role: str
    name: str
    site: Site
    parent: _Entry | None
    depth: int
    parts: dict[int | None, list[Totals]] = field(default_factory=dict)
    hidden: dict[int | None, list[Totals]] | None = None
    sums: dict[int | None, Totals] = field(default_factory=dict)
    children: dict[tuple[str, object], _Entry] = field(default_factory=dict)

    def on(self, thread: int | None) -> Totals:
        """The totals on a thread, empty ones where it has none. They are not to be changed."""
        sums = self.sums.get(thread)
        if sums is None:
            parts = self.parts.get(thread, ())
            hidden = () if self.hidden is None else self.hidden.get(thread, ())
            if len(parts) == 1 and not hidden:
                sums = parts[0]
            else:
                sums = Totals()
                for part in parts:
                    sums.merge(part)
                _count_hidden(sums, hidden)
            self.sums[thread] = sums
        return sums

    @property
    def label(self) -> str:
        """The name as shown: a phase carries the name of what it is a phase of."""
        return f"{self.parent.name}/{self.name}" if self.role == "phase" and self.parent else self.name

    @property
    def detail(self) -> str:
        """What tells an instance apart from its siblings."""
        if self.role != "instance":
            return ""
        place = f"{self.site.file}:{self.site.line}" if self.site.file else ""
        return self.site.instance or self.site.function or place


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of one thread, or of all threads merged where `thread` is None.

    `total_ns` is the Total time that their ratios are of. `number` counts threads by their first call, from 0.
    """

    thread: int | None
    number: int | None
    name: str
    total_ns: int
    rows: tuple[EventRow, ...]


@dataclass(frozen=True, slots=True)
class Overhead:
    """How the Total time of all threads splits into computation and the rest.

    Computation is that of layers and of phases named `compute` or declared so (`phase: compute`, and forward, backward
    and optimizer), the topmost of them.
    Where it went on beside or beyond the calls around it, it is more than the Total time and the rest is not known.
    """

    total_ns: int
    computation_ns: int

    @property
    def computation_ratio(self) -> float | None:
        """Of the Total time."""
        return share(self.computation_ns, self.total_ns)

    @property
    def framework_ns(self) -> int | None:
        """The Total time that is no computation."""
        return self.total_ns - self.computation_ns if self.computation_ns <= self.total_ns else None

    @property
    def framework_ratio(self) -> float | None:
        """Of the Total time."""
        return None if self.framework_ns is None else share(self.framework_ns, self.total_ns)


@dataclass(frozen=True, slots=True)
class CopySum:
    """Every copy between devices and host, at any depth, or those that are known to be asynchronous or synchronous.

    `ratio` is of the Total time of all threads.
    """

    label: str
    calls: int
    total_ns: int
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Events:
    """The report: a block for all threads merged, where it is asked for, and then one for each thread, newest first.

    `overhead` and `copies` are of all threads together; there are none where only threads apart are reported, unless
    it is one thread. `probes_ns` is what the probes cost where self times were asked for without it (0: not known).
    """

    window_ns: int | None
    blocks: tuple[Block, ...]
    overhead: Overhead | None
    copies: tuple[CopySum, ...]
    probes_ns: int | None
    has_device_time: bool
    _options: Options

    def lines(self) -> list[str]:
        """The report as text: the one of all threads merged, and then the one with all blocks of threads."""
        lines: list[str] = []
        merged = [block for block in self.blocks if block.thread is None]
        apart = [block for block in self.blocks if block.thread is not None]
        for report in (merged, apart):
            if report:
                lines += _heading(self, report)
                lines += _sections(self) if report[0] is self.blocks[0] else []
                lines += _event_summary(self, report)
        if not self.blocks:
            lines += [*title("Profiling Report"), "No calls were recorded.", ""]
        return [*lines, *_reading_notes(self)]


def events(recording: Recording, options: Options) -> Events:
    """The view, from the tally: exact for all calls.

    `tracer_option`: Default shows operators and copies and hides phases, lifting what is under them; OpDetail shows
    phases too; AllOpDetail adds a row for each instance of an operator or layer, numbered from 0 by first call.
    `state`: which time Total is, see the module. `sorted_by` orders every level. `rows` bounds a block to the rows
    that are largest by the sort key (by Total for `default`), parents before children; `least_ns` is of the Total of
    a row or of one under it; what is left out of a level is one row more. `threads`: `both` puts the report of all
    threads merged before the report with a block per thread, unless only one thread recorded; `merged` and `apart` ask
    for one of the two. `corrected` adds a column of self times, less what the probes of the calls below them cost.
    """
    if options.corrected:
        tally = recording.tally.corrected()
    else:
        tally = recording.merged if options.threads == "merged" else recording.tally
    blocks = _blocks(tally, options)
    of_all = len(blocks) == 1 or (bool(blocks) and blocks[0].thread is None)
    total_ns = blocks[0].total_ns if of_all else 0
    return Events(
        window_ns=recording.window_ns,
        blocks=blocks,
        overhead=Overhead(total_ns, _computation_ns(tally, options.state)) if of_all else None,
        copies=_copy_sums(tally, total_ns, options.state) if of_all else (),
        probes_ns=sum(row.totals.probe_ns for row in tally.rows()) if options.corrected else None,
        has_device_time=any(row.totals.device_ns for row in tally.rows()),
        _options=options,
    )


# The tree of names.


def _tree(tally: Tally, tracer_option: str, merged: bool, apart: bool) -> list[_Entry]:
    """Every entry, the root first and parents before their children. Iterative, for call paths have no depth limit.

    Lines are counted for all threads together where they are to be `merged`, and for each thread where `apart`.
    """
    merged = merged or tracer_option == "AllOpDetail"  # instances are numbered over all threads
    root = _Entry(role="root", name="", site=Site(""), parent=None, depth=-1)
    entries = [root]
    levels_of: dict[Site, list[tuple[str, object]]] = {}
    # Of each path its entry, and the entries in which what was counted on it is counted.
    places: dict[tuple[Site, ...], tuple[_Entry, list[_Entry]]] = {(): (root, [])}
    for row in tally.rows():
        path = row.path
        place = places.get(path)
        if place is None:
            known = path[:-1]
            while known not in places:
                known = known[:-1]
            above, counted = places[known]
            for site in path[len(known) :]:
                levels = levels_of.get(site)
                if levels is None:
                    levels = levels_of[site] = _levels(site, tracer_option)
                # A phase that nothing surrounds is a row like any other, so that no option changes the Total time.
                if above is root and site.kind == "phase":
                    levels = [("row", site.name)]
                counted = []
                for level in levels:
                    entry = above.children.get(level)
                    if entry is None:
                        name = level[1] if isinstance(level[1], str) else site.name
                        entry = above.children[level] = _Entry(level[0], name, site, above, above.depth + 1)
                        entries.append(entry)
                    counted.append(entry)
                    above = entry
            place = places[path] = above, counted
        above, counted = place
        for thread in (None, row.thread_id) if merged and apart else (None,) if merged else (row.thread_id,):
            for entry in counted:
                parts = entry.parts.get(thread)
                if parts is None:
                    entry.parts[thread] = [row.totals]
                else:
                    parts.append(row.totals)
            if not counted:
                if above.hidden is None:
                    above.hidden = {}
                above.hidden.setdefault(thread, []).append(row.totals)
    if tracer_option == "AllOpDetail":
        _number_instances(entries)
    return entries


def _count_hidden(around: Totals, phases: Iterable[Totals]) -> None:
    """Give the self time of hidden phases to the row around them, and a place in time if it has no call of its own."""
    for phase in phases:
        around.self_ns += phase.self_ns
        if not around.calls:
            around.first_ns = min(around.first_ns or phase.first_ns, phase.first_ns)


def _levels(site: Site, tracer_option: str) -> list[tuple[str, object]]:
    """The levels that a site adds to the tree: none for a hidden phase, two where instances are shown."""
    if site.kind == "phase":
        return [] if tracer_option == "Default" else [("phase", site.name)]
    if site.kind == "copy":
        return [("copy", _copy_name(site))]
    if tracer_option == "AllOpDetail" and site.kind in INSTANTIATED:
        return [("row", site.name), ("instance", site.key)]
    return [("row", site.name)]


def _copy_name(site: Site) -> str:
    """Fluid's name for a copy of this direction and synchronicity; the site's own where it does not say them."""
    attributes = dict(site.attributes)
    direction, sync = attributes.get("direction"), attributes.get("sync")
    if not isinstance(direction, str) or direction not in ENDPOINTS or not isinstance(sync, bool):
        return site.name
    peer = "Peer" if direction == "p2p" else ""
    return f"GpuMemcpy{peer}{'Sync' if sync else 'Async'}{ENDPOINTS[direction]}"


def _number_instances(entries: Sequence[_Entry]) -> None:
    """Append its number to each instance's name: from 0 by first call on any thread, then in the tally's order."""
    first_ns = _by_entry(entries, None, lambda totals: totals.first_ns, min)
    for entry in entries:
        instances = [child for child in entry.children.values() if child.role == "instance"]
        instances.sort(key=lambda child: first_ns.get(child, 0))
        for index, instance in enumerate(instances):
            instance.name += str(index)


def _by_entry(
    entries: Sequence[_Entry],
    thread: int | None,
    value: Callable[[Totals], float],
    choose: Callable[[float, float], float],
) -> dict[_Entry, float]:
    """A value for each entry with calls on the thread; an entry without any takes it from those under it.

    Entries with no call at or under them are absent.
    """
    values: dict[_Entry, float] = {}
    for entry in reversed(entries):
        totals = entry.sums.get(thread) or entry.on(thread)
        found = values.get(entry)
        if totals.calls:
            found = value(totals)
        elif totals.first_ns:
            found = value(totals) if found is None else choose(found, value(totals))
        if found is None:
            continue
        values[entry] = found
        above = entry.parent
        if above is not None:
            known = values.get(above)
            values[above] = found if known is None else choose(known, found)
    return values


# Blocks of rows.


def _blocks(tally: Tally, options: Options) -> tuple[Block, ...]:
    """The merged block, if asked for, then a block per thread, the newest thread first."""
    recorded = {row.thread_id for row in tally.rows() if row.totals.calls}
    apart: list[int | None] = [thread for thread in reversed(tally.threads) if thread in recorded]
    shown: list[int | None] = []
    if options.threads == "merged" or (options.threads == "both" and len(apart) > 1):
        shown = [None] if apart else []
    if options.threads != "merged":
        shown += apart
    if not shown:
        return ()
    merged, of_threads = shown[0] is None, shown[-1] is not None
    tree = _tree(tally, options.tracer_option, merged, of_threads)
    full = tree if options.tracer_option == "OpDetail" else None
    numbers = {thread: number for number, thread in enumerate(tally.threads)}
    blocks = []
    for thread in shown:
        total_ns = _total_time(tree, thread, options.state)
        if total_ns is None:
            full = full or _tree(tally, "OpDetail", merged, of_threads)
            total_ns = _total_time_below(full, thread, options.state)
        number, name = (None, "") if thread is None else (numbers[thread], tally.threads[thread])
        blocks.append(Block(thread, number, name, total_ns, _rows(tree, thread, total_ns, options)))
    return tuple(blocks)


def _total_time(tree: Sequence[_Entry], thread: int | None, state: str) -> int | None:
    """The sum of the topmost rows; None where one has no call, so that what may be hidden below it stands for it."""
    time_ns = _time_in(state)
    total_ns = 0
    for entry in tree[0].children.values():
        totals = entry.on(thread)
        if not totals.calls and (entry.children or entry.hidden):
            return None
        total_ns += time_ns(totals)
    return total_ns


def _total_time_below(full: Sequence[_Entry], thread: int | None, state: str) -> int:
    """The sum of the topmost rows that have calls, of the tree with phases, so that it is the same in every option."""
    time_ns = _time_in(state)
    total_ns = 0
    without_calls = {full[0]}
    for entry in full[1:]:
        if entry.parent in without_calls:
            totals = entry.on(thread)
            total_ns += time_ns(totals)
            if not totals.calls:
                without_calls.add(entry)
    return total_ns


_TIMES = {"All": attrgetter("elapsed_ns"), "CPU": attrgetter("total_ns"), "GPU": attrgetter("device_ns")}


def _time_in(state: str) -> Callable[[Totals], int]:
    """What Total is in a state."""
    return _TIMES[state]


def _time_ns(totals: Totals, state: str) -> int:
    return _time_in(state)(totals)


def _rows(tree: Sequence[_Entry], thread: int | None, base_ns: int, options: Options) -> tuple[EventRow, ...]:
    state, sorted_by = options.state, options.sorted_by
    first_ns = _by_entry(tree, thread, attrgetter("first_ns"), min)
    weight = _by_entry(tree, thread, _weight(state, sorted_by), max)

    def order(entry: _Entry) -> tuple[float, float]:
        return (0 if sorted_by == "default" else -weight[entry], first_ns[entry])

    kept = _kept(tree, weight, thread, options)
    rows: list[EventRow] = []
    pending: list[_Entry | EventRow] = [tree[0]]
    while pending:
        item = pending.pop()
        if isinstance(item, EventRow):
            rows.append(item)
            continue
        if item.parent is not None:
            rows.append(_event_row(item, item.label, item.on(thread), thread, base_ns, state))
        children = sorted((child for child in item.children.values() if child in weight), key=order)
        left_out = [child for child in children if child not in kept]
        if left_out:
            pending.append(_remaining_row(left_out, thread, base_ns, state))
        pending += [child for child in reversed(children) if child in kept]
    return tuple(rows)


def _weight(state: str, sorted_by: str) -> Callable[[Totals], float]:
    """The value of the sort key; for the default order, which has none, the Total."""
    chosen: Mapping[str, Callable[[Totals], float]] = {
        "calls": attrgetter("calls"),
        "max": attrgetter("max_ns"),
        "min": attrgetter("min_ns"),
        "ave": lambda totals: share(totals.elapsed_ns, totals.calls) or 0,
        "cpu_total": attrgetter("total_ns"),
        "cpu_max": attrgetter("max_ns"),
        "cpu_min": lambda totals: -totals.min_ns,
        "cpu_ave": lambda totals: share(totals.total_ns, totals.calls) or 0,
        "gpu_total": attrgetter("device_ns"),
        "gpu_max": attrgetter("max_ns"),
        "gpu_min": lambda totals: -totals.min_ns,
        "gpu_ave": lambda totals: share(totals.device_ns, totals.calls) or 0,
    }
    return chosen.get(sorted_by, _time_in(state))


def _kept(
    tree: Sequence[_Entry], weight: Mapping[_Entry, float], thread: int | None, options: Options
) -> Collection[_Entry]:
    """The heaviest entries that the options leave, none without its parent."""
    enough: Collection[_Entry] = weight
    if options.least_ns:
        # A background task may be longer than what began it: then both stay.
        enough = set()
        for entry in reversed(tree):
            if entry in enough or _time_ns(entry.on(thread), options.state) >= options.least_ns:
                enough |= {entry} if entry.parent is None else {entry, entry.parent}
    if options.rows is None:
        return enough
    order = itertools.count()
    kept: set[_Entry] = set()
    heap: list[tuple[float, int, _Entry]] = [(0, next(order), tree[0])]
    while heap and len(kept) <= options.rows:
        entry = heapq.heappop(heap)[-1]
        kept.add(entry)
        for child in entry.children.values():
            if child in weight and child in enough:
                heapq.heappush(heap, (-weight[child], next(order), child))
    return kept


def _event_row(
    entry: _Entry, name: str, totals: Totals, thread: int | None, base_ns: int, state: str, remaining: int = 0
) -> EventRow:
    total_ns = _time_ns(totals, state)
    called = totals.calls > 0
    return EventRow(
        name=name,
        depth=entry.depth,
        thread=thread,
        kind="" if remaining else entry.site.kind,
        instance="" if remaining else entry.detail,
        calls=totals.calls,
        errors=totals.errors,
        total_ns=total_ns,
        host_ns=totals.total_ns,
        device_ns=totals.device_ns,
        elapsed_ns=totals.elapsed_ns,
        self_ns=totals.self_ns,
        min_ns=totals.min_ns if called else None,
        max_ns=totals.max_ns if called else None,
        p50_ns=totals.percentile(0.5),
        p99_ns=totals.percentile(0.99),
        ratio=share(total_ns, base_ns) if called else None,
        remaining=remaining,
    )


def _remaining_row(left_out: Sequence[_Entry], thread: int | None, base_ns: int, state: str) -> EventRow:
    """One row for those of a level that the limit leaves out, so that the level still adds up."""
    totals = Totals()
    for entry in left_out:
        totals.merge(entry.on(thread))
    name = f"(remaining {len(left_out)})"
    return _event_row(left_out[0], name, totals, thread, base_ns, state, remaining=len(left_out))


# The text.


def _heading(view: Events, blocks: Sequence[Block]) -> list[str]:
    """The lines that say what the report is of and what every ratio in it is a share of."""
    options, merged = view._options, blocks[0].thread is None
    base = "Total time" if merged else "the thread's Total time"
    lines = [
        *title("Profiling Report"),
        *(["Note! This Report merge all thread info into one."] if merged else []),
        f"Place: {PLACES[options.state]}",
        f"Time unit: {options.unit}",
        f"Sorted by {ORDERS[options.sorted_by]}{'' if merged else ' in the same thread'}",
        *([] if view.window_ns is None else [f"Window: {in_unit(view.window_ns, options.unit)}"]),
        f"Ratio: of {base}, the sum of the top rows; work that ran side by side is",
        "  summed, so it may exceed the time on the clock",
    ]
    if options.state != "All" and view.has_device_time:
        lines.append("Min., Max., Ave., p50, p99: of host and device time together")
    if view.probes_ns is not None:
        known = f"less what their probes cost ({in_unit(view.probes_ns, options.unit)} in all)"
        unknown = "what the probes cost is not known"
        lines.append(
            "Self: host time outside of the row's children" + (f", {known}" if view.probes_ns else f"; {unknown}")
        )
    return [*lines, ""]


def _computation_ns(tally: Tally, state: str) -> int:
    sites = {site for row in tally.rows() for site in row.path[-1:]}
    computing = {site for site in sites if _computes(site)}
    time_ns = _time_in(state)
    return sum(
        time_ns(row.totals)
        for row in tally.rows()
        if row.path[-1] in computing and not any(_computes(site) for site in row.path[:-1])
    )


_COMPUTING = frozenset({"compute", "forward", "backward", "optimizer"})


def _computes(site: Site) -> bool:
    declared = dict(site.attributes).get("phase")
    return declared in _COMPUTING or (
        declared is None and (site.kind == "layer" or (site.kind == "phase" and site.name == "compute"))
    )


def _copy_sums(tally: Tally, total_ns: int, state: str) -> tuple[CopySum, ...]:
    """All copies but those from host to host, then those known to be asynchronous and to be synchronous."""
    rows = (row for row in tally.rows() if row.path[-1].kind == "copy")
    copies = [row for row in rows if dict(row.path[-1].attributes).get("direction") != "h2h"]
    sums = []
    for label, sync in (("GpuMemcpy", None), ("GpuMemcpyAsync", False), ("GpuMemcpySync", True)):
        chosen = [row.totals for row in copies if sync is None or dict(row.path[-1].attributes).get("sync") is sync]
        calls = sum(totals.calls for totals in chosen)
        if calls or sync is None:
            copied_ns = sum(_time_ns(totals, state) for totals in chosen)
            sums.append(CopySum(label, calls, copied_ns, share(copied_ns, total_ns)))
    return tuple(sums)


def _sections(view: Events) -> list[str]:
    """Overhead Summary and GpuMemCpy Summary."""
    split, unit = view.overhead, view._options.unit
    if split is None:
        return []
    lines = [
        *section_title("Overhead Summary"),
        f"Total time: {in_unit(split.total_ns, unit)}",
        _summary_line("  Computation time", split.total_ns, split.computation_ns, unit),
        _summary_line("  Framework overhead", split.total_ns, split.framework_ns, unit),
    ]
    if split.framework_ns is None:
        lines.append("  (computation went on beside or beyond the calls around it, so the rest is not known)")
    lines += ["", *section_title("GpuMemCpy Summary")]
    for copies in view.copies:
        label = "  " * (copies is not view.copies[0]) + copies.label
        lines.append(_summary_line(label, split.total_ns, copies.total_ns, unit, copies.calls))
    return [*lines, ""]


def _summary_line(label: str, base_ns: int, part_ns: int | None, unit: str, calls: int | None = None) -> str:
    counted = "" if calls is None else f"Calls: {calls:<{NUMBER_WIDTH}}"
    ratio = MISSING if part_ns is None else percent(part_ns, base_ns)
    return f"{label:<{LABEL_WIDTH}}{counted}Total: {in_unit(part_ns, unit):<{NUMBER_WIDTH}}Ratio: {ratio}"


def _event_summary(view: Events, blocks: Sequence[Block]) -> list[str]:
    """The table, before it which thread is which, and after it how the times of host and device share a row's Total."""
    unit = view._options.unit
    legend = []
    for block in blocks:
        if block.number is not None:
            known = f" (id {block.thread}), Total time: {in_unit(block.total_ns, unit)}"
            tag = f"thread{block.number}: "
            legend.append(tag + shorten(safe(block.name), LINE - len(tag) - len(known)) + known)
    header = ["Event", "Calls", "Total", "Min.", "Max.", "Ave.", "Ratio.", "p50", "p99"]
    rows = [(block, row) for block in blocks for row in block.rows]
    corrected = view.probes_ns is not None
    cells = [_cells(row, unit) + ([compact(row.self_ns / UNITS[unit])] if corrected else []) for _, row in rows]
    lines = [*legend, *([""] if legend else []), *section_title("Event Summary")]
    lines += [*_tree_table([*header, *(["Self"] if corrected else [])], rows, cells), ""]
    timed = _with_device_time(rows)
    if view._options.state == "All" and timed:
        cells = [_part_cells(row, unit) for _, row in timed]
        lines += section_title("Host and Device Time")
        lines += _tree_table(["Event", "Total", "CPU Time (Ratio)", "GPU Time (Ratio)"], timed, cells)
        lines += [
            "",
            "Ratio: of the row's Total, in which time that host and device shared counts once; the two may",
            "  together exceed 1. Of any other row, CPU Time is the Total and GPU Time is 0.",
            "",
        ]
    return lines


def _with_device_time(rows: Sequence[tuple[Block, EventRow]]) -> list[tuple[Block, EventRow]]:
    """The rows with device time, and those above them."""
    found: list[tuple[Block, EventRow]] = []
    above = 0
    for block, row in reversed(rows):
        if row.device_ns or row.depth < above:
            found.append((block, row))
            above = row.depth
    return found[::-1]


def _tree_table(
    header: Sequence[str], rows: Sequence[tuple[Block, EventRow]], cells: Sequence[Sequence[str]]
) -> list[str]:
    """A table whose first column holds the names, indented by their depth, in what the numbers leave of a line."""
    widths = [max(columns(cell) for cell in column) + GAP for column in zip(header[1:], *cells, strict=True)]
    room = min(LINE - sum(widths) - GAP, NAME_LIMIT)
    names = [_name_cell(row, "" if block.number is None else f"thread{block.number}::", room) for block, row in rows]
    return table(header, [[name, *line] for name, line in zip(names, cells, strict=True)], [0] * len(header))


def _cells(row: EventRow, unit: str) -> list[str]:
    """Total, Min., Max., Ave., Ratio., p50 and p99 of a row; its calls before them."""
    total_ns = row.total_ns if row.calls else None
    times = [total_ns, row.min_ns, row.max_ns, row.ave_ns, row.p50_ns, row.p99_ns]
    shown = [MISSING if time_ns is None else compact(time_ns / UNITS[unit]) for time_ns in times]
    return [compact(row.calls, CALLS_WIDTH), *shown[:4], compact(row.ratio, RATIO_WIDTH), *shown[4:]]


def _part_cells(row: EventRow, unit: str) -> list[str]:
    """Total, and each part with its ratio to what has elapsed, in fluid's format `%f (%f)`."""
    return [
        compact(row.total_ns / UNITS[unit]) if row.calls else MISSING,
        *(
            f"{part_ns / UNITS[unit]:.{DECIMALS[unit]}f} ({MISSING if ratio is None else format(ratio, 'f')})"
            if row.calls
            else MISSING
            for part_ns, ratio in ((row.host_ns, row.host_ratio), (row.device_ns, row.device_ratio))
        ),
    ]


def _name_cell(row: EventRow, tag: str, room: int) -> str:
    """Indent, thread tag of a topmost row, name, and an instance's detail where there is room for it.

    Below the deepest indent the depth is a number, so that the name keeps its place.
    """
    levels = min(INDENT_LIMIT, room // 4)
    before = "  " * min(row.depth, levels) + (f"({row.depth}) " if row.depth > levels else "")
    before += tag if row.depth == 0 else ""
    name = safe(row.name) or "(no name)"
    spare = room - columns(before) - columns(name) - len(" []")
    if row.instance and spare >= DETAIL_LEAST:
        return f"{before}{name} [{shorten(safe(row.instance), spare)}]"
    return before + shorten(name, room - len(before))


def _reading_notes(view: Events) -> list[str]:
    """What a reader has to know to read the table right, where it applies."""
    lines = []
    if any(not row.calls for block in view.blocks for row in block.rows):
        lines.append("Calls 0: the span had not ended, or it ended on another thread.")
    if view.has_device_time:
        lines.append("GPU times are stretches of a stream between two events, not kernels.")
    elif view.blocks and view._options.state != "CPU":
        lines.append("No device time was recorded.")
    return lines
