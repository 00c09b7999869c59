"""The `events` view: what ran, how often and how long, as a tree of names.

Layout, row names and number formats follow the report of Paddle's fluid profiler (`tracer_option`, state,
`sorted_key`). The numbers follow these rules, which differ from that report where it counted wrongly:

- Total is, in state All, the sum over calls of `elapsed`: the length of the union of a call's host and device
  interval, so that time in which both ran counts once. State CPU: the host interval. State GPU: the device time.
- Min., Max., Ave., p50 and p99 are of `elapsed` in every state, for that is what the tally's histogram holds.
- Ratio. is a row's Total divided by the Total time of its block, which is the sum of the topmost rows. A row whose
  span has not ended, or ended on another thread, has no call to count; what lies under it counts in its place.
- Rows are sums of work. Children that ran at the same time as each other, or on the device after their parent had
  returned, may together exceed their parent, and the Total time of all threads may exceed the time on the clock.
- A row is a path of names, held as a list: no character of a name has a meaning.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from instrument.profile import SORT_KEYS, STATES, TRACER_OPTIONS
from instrument.report.instrumentation import instrumentation
from instrument.report.table import (
    MISSING,
    columns,
    ms,
    number,
    percent,
    safe,
    section_title,
    share,
    shorten,
    table,
    title,
)
from instrument.report.view import THREADS
from instrument.spans import Cost, Site
from instrument.tally import Row, Tally, Totals

PLACES = {"All": "All", "CPU": "CPU", "GPU": "CUDA"}
ORDERS = {
    "default": "first call in ascending order",
    "calls": "number of calls in descending order",
    "total": "total time in descending order",
    "max": "maximum time in descending order",
    "min": "minimum time in descending order",
    "ave": "average time in descending order",
}

ENDPOINTS = {"h2d": ":CPU->GPU", "d2h": ":GPU->CPU", "d2d": "(same_gpu):GPU->GPU", "p2p": ":GPU->GPU"}
INSTANTIATED = ("op", "layer")
"""Kinds of which `AllOpDetail` shows each instance."""

NAME_LIMIT = 64
"""Columns of a name, indent and thread tag included; fluid's longest names fit."""
DETAIL_LEAST = 12
"""Columns below which an instance's detail is left out rather than shortened."""
INDENT_LIMIT = 12
"""Levels that are indented; deeper ones are numbered."""
LABEL_WIDTH = 25
NUMBER_WIDTH = 12
PART_WIDTH = 24


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


@dataclass(slots=True, eq=False)
class _Entry:
    """A row to be: one place in the tree of names. `totals` is by thread, None for all threads together."""

    role: str
    name: str
    site: Site
    parent: _Entry | None
    depth: int
    totals: dict[int | None, Totals] = field(default_factory=dict)
    children: dict[tuple[str, object], _Entry] = field(default_factory=dict)

    def on(self, thread: int | None) -> Totals:
        """The totals on a thread, empty ones where it has none."""
        return self.totals.get(thread) or Totals()

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
class _Block:
    """The rows of one thread, or of all threads merged, and the Total time that their ratios are of."""

    thread: int | None
    total_ns: int
    rows: Sequence[EventRow]


def events(
    tally: Tally,
    *,
    tracer_option: str = "Default",
    state: str = "All",
    sorted_by: str = "default",
    rows: int | None = None,
    threads: str = "both",
    corrected: bool = False,
    cost: Cost | None = None,
    losses: Mapping[str, int] | None = None,
    notes: Sequence[str] = (),
    window_ns: int | None = None,
    recorder: str = "",
) -> str:
    """The report as text, times in ms.

    `tracer_option`: Default shows operators and copies and hides phases, lifting what is under them; OpDetail shows
    phases too; AllOpDetail adds a row for each instance of an operator or layer, numbered from 0 by first call.
    `state`: which time Total is, see the module. `sorted_by` orders every level. `rows` bounds a block to the rows
    that are largest by the sort key (by Total for `default`), parents before children; what is left out of a level is
    one row more. `threads`: `both` puts the report of all threads merged before the report with a block per thread,
    unless only one thread recorded; `merged` and `apart` ask for one of the two. The overhead and copy sections are
    left out of a report that has several blocks, as their figures are of all threads together.
    `corrected` adds a column of self times, less what the probes of the calls below them cost.

    Computation time is that of layers and of phases named `compute` or declared so (`phase: compute`), the topmost of
    them; the rest of the Total time is framework overhead. The copy section counts every copy at any depth, peer copies
    too.

    `cost`, `losses` (counts by reason), `notes` and `recorder` (`pure` or `native`) fill the last section;
    `window_ns` is the length of the time that the tally covers.
    """
    if corrected:
        tally = tally.corrected()
    blocks = _blocks(tally, tracer_option, state, sorted_by, rows, threads)
    lines: list[str] = []
    for report in ([b for b in blocks if b.thread is None], [b for b in blocks if b.thread is not None]):
        if report:
            lines += _heading(report, state, sorted_by, window_ns, _has_device_time(tally))
            lines[-1:] = [_correction(tally), ""] if corrected else [""]
            lines += _sections(tally, report[0].total_ns, state) if len(report) == 1 else []
            lines += _event_summary(tally, report, state, corrected)
    if not blocks:
        lines += [*title("Profiling Report"), "No calls were recorded.", ""]
    lines += instrumentation(cost, losses or {}, notes, window_ns, recorder)
    lines += _reading_notes(tally, blocks, state)
    return "\n".join(lines).rstrip("\n") + "\n"


def events_rows(
    tally: Tally,
    *,
    tracer_option: str = "Default",
    state: str = "All",
    sorted_by: str = "default",
    rows: int | None = None,
    threads: str = "both",
) -> list[EventRow]:
    """The rows of the report in its order, for code and JSON. The arguments mean what they mean for `events`."""
    blocks = _blocks(tally, tracer_option, state, sorted_by, rows, threads)
    return [row for block in blocks for row in block.rows]


# The tree of names.


def _tree(tally: Tally, tracer_option: str) -> list[_Entry]:
    """Every entry, the root first and parents before their children. Iterative, for call paths have no depth limit."""
    root = _Entry(role="root", name="", site=Site(""), parent=None, depth=-1)
    entries = [root]
    for row in tally.rows():
        above, counted = root, list[_Entry]()
        for site in row.path:
            counted = []
            for level in _levels(site, above is root, tracer_option):
                entry = above.children.get(level)
                if entry is None:
                    name = level[1] if isinstance(level[1], str) else site.name
                    entry = above.children[level] = _Entry(level[0], name, site, above, above.depth + 1)
                    entries.append(entry)
                counted.append(entry)
                above = entry
        for thread in (None, row.thread_id):
            for entry in counted:
                entry.totals.setdefault(thread, Totals()).merge(row.totals)
            if not counted:
                _count_hidden(above.totals.setdefault(thread, Totals()), row.totals)
    _number_instances(entries)
    return entries


def _count_hidden(around: Totals, phase: Totals) -> None:
    """Give a hidden phase's self time to the row around it, and a place in time if that row has no call of its own."""
    around.self_ns += phase.self_ns
    if not around.calls:
        around.first_ns = min(around.first_ns or phase.first_ns, phase.first_ns)


def _levels(site: Site, at_root: bool, tracer_option: str) -> list[tuple[str, object]]:
    """The levels that a site adds to the tree: none for a hidden phase, two where instances are shown.

    A phase that nothing surrounds is a row like any other, so that no option changes the Total time.
    """
    if site.kind == "phase" and not at_root:
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
        totals = entry.on(thread)
        if totals.calls:
            values[entry] = value(totals)
        elif totals.first_ns:
            values[entry] = choose(values.get(entry, value(totals)), value(totals))
        if entry in values and entry.parent is not None:
            values[entry.parent] = choose(values.get(entry.parent, values[entry]), values[entry])
    return values


# Blocks of rows.


def _blocks(
    tally: Tally, tracer_option: str, state: str, sorted_by: str, rows: int | None, threads: str
) -> list[_Block]:
    """The merged block, if asked for, then a block per thread, the newest thread first."""
    _check("tracer_option", tracer_option, TRACER_OPTIONS)
    _check("state", state, STATES)
    _check("sorted_by", sorted_by, SORT_KEYS)
    _check("threads", threads, THREADS)
    if rows is not None and rows < 1:
        raise ValueError(f"rows is {rows!r}; allowed: 1 or more, or None for every row")
    recorded = {row.thread_id for row in tally.rows() if row.totals.calls}
    apart: list[int | None] = [thread for thread in reversed(tally.threads) if thread in recorded]
    shown: list[int | None] = []
    if threads == "merged" or (threads == "both" and len(apart) > 1):
        shown = [None] if apart else []
    if threads != "merged":
        shown += apart
    if not shown:
        return []
    full = _tree(tally, "OpDetail")
    tree = full if tracer_option == "OpDetail" else _tree(tally, tracer_option)
    return [_block(tree, thread, _total_time(full, thread, state), state, sorted_by, rows) for thread in shown]


def _check(option: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{option} is {value!r}; allowed: {', '.join(allowed)}")


def _total_time(full: Sequence[_Entry], thread: int | None, state: str) -> int:
    """The sum of the topmost rows that have calls, of the tree with phases, so that it is the same in every option."""
    total_ns = 0
    without_calls = {full[0]}
    for entry in full[1:]:
        if entry.parent in without_calls:
            totals = entry.on(thread)
            total_ns += _time_ns(totals, state)
            if not totals.calls:
                without_calls.add(entry)
    return total_ns


def _time_ns(totals: Totals, state: str) -> int:
    return {"All": totals.elapsed_ns, "CPU": totals.total_ns, "GPU": totals.device_ns}[state]


def _block(
    tree: Sequence[_Entry], thread: int | None, base_ns: int, state: str, sorted_by: str, limit: int | None
) -> _Block:
    first_ns = _by_entry(tree, thread, lambda totals: totals.first_ns, min)
    weight = _by_entry(tree, thread, lambda totals: _weight(totals, state, sorted_by), max)

    def order(entry: _Entry) -> tuple[float, float]:
        return (0 if sorted_by == "default" else -weight[entry], first_ns[entry])

    kept = _kept(tree[0], weight, limit)
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
    return _Block(thread, base_ns, rows)


def _weight(totals: Totals, state: str, sorted_by: str) -> float:
    """The value of the sort key; for the default order, which has none, the Total."""
    return {
        "calls": totals.calls,
        "max": totals.max_ns,
        "min": totals.min_ns,
        "ave": share(totals.elapsed_ns, totals.calls) or 0,
    }.get(sorted_by, _time_ns(totals, state))


def _kept(root: _Entry, weight: Mapping[_Entry, float], limit: int | None) -> Collection[_Entry]:
    """The `limit` heaviest entries, none without its parent."""
    if limit is None:
        return weight
    order = itertools.count()
    kept: set[_Entry] = set()
    heap: list[tuple[float, int, _Entry]] = [(0, next(order), root)]
    while heap and len(kept) <= limit:
        entry = heapq.heappop(heap)[-1]
        kept.add(entry)
        for child in entry.children.values():
            if child in weight:
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


def _heading(
    blocks: Sequence[_Block], state: str, sorted_by: str, window_ns: int | None, device_time: bool
) -> list[str]:
    """The lines that say what the report is of and what every ratio in it is a share of."""
    merged = blocks[0].thread is None
    base = "Total time" if merged else "the thread's Total time"
    lines = [
        *title("Profiling Report"),
        *(["Note! This Report merge all thread info into one."] if merged else []),
        f"Place: {PLACES[state]}",
        "Time unit: ms",
        f"Sorted by {ORDERS[sorted_by]}{'' if merged else ' in the same thread'}",
        *([] if window_ns is None else [f"Window: {ms(window_ns)}"]),
        f"Ratio: of {base}, the sum of the top rows; work that ran side by side is summed, "
        "so it may exceed the time on the clock",
    ]
    if state == "All":
        lines.append(
            "CPU and GPU Time (Ratio): of the row's Total, in which time that host and device shared counts once; "
            "together they may exceed 1"
        )
    elif device_time:
        lines.append("Min., Max., Ave., p50, p99: of host and device time together")
    return [*lines, ""]


def _sections(tally: Tally, total_ns: int, state: str) -> list[str]:
    """Overhead Summary and GpuMemCpy Summary, over all threads of the tally."""
    computation_ns = sum(_time_ns(row.totals, state) for row in tally.rows() if _is_topmost_computation(row))
    lines = [
        *section_title("Overhead Summary"),
        f"Total time: {ms(total_ns)}",
        _summary_line("  Computation time", total_ns, computation_ns),
    ]
    if computation_ns <= total_ns:
        lines.append(_summary_line("  Framework overhead", total_ns, total_ns - computation_ns))
    else:
        lines.append(_summary_line("  Framework overhead", total_ns, None))
        lines.append("  (computation went on beside or beyond the calls around it, so the rest is not known)")
    return [*lines, "", *_copy_section(tally, total_ns, state)]


def _is_topmost_computation(row: Row) -> bool:
    return _computes(row.path[-1]) and not any(_computes(site) for site in row.path[:-1])


def _computes(site: Site) -> bool:
    declared = dict(site.attributes).get("phase")
    return declared == "compute" or (
        declared is None and (site.kind == "layer" or (site.kind == "phase" and site.name == "compute"))
    )


def _copy_section(tally: Tally, total_ns: int, state: str) -> list[str]:
    """All copies but those from host to host, then those known to be asynchronous and to be synchronous."""
    rows = (row for row in tally.rows() if row.path[-1].kind == "copy")
    copies = [row for row in rows if dict(row.path[-1].attributes).get("direction") != "h2h"]
    lines = section_title("GpuMemCpy Summary")
    for label, sync in (("GpuMemcpy", None), ("  GpuMemcpyAsync", False), ("  GpuMemcpySync", True)):
        chosen = [row.totals for row in copies if sync is None or dict(row.path[-1].attributes).get("sync") is sync]
        calls = sum(totals.calls for totals in chosen)
        if calls or sync is None:
            lines.append(_summary_line(label, total_ns, sum(_time_ns(totals, state) for totals in chosen), calls))
    return [*lines, ""]


def _summary_line(label: str, base_ns: int, part_ns: int | None, calls: int | None = None) -> str:
    counted = "" if calls is None else f"Calls: {calls:<{NUMBER_WIDTH}}"
    ratio = MISSING if part_ns is None else percent(part_ns, base_ns)
    return f"{label:<{LABEL_WIDTH}}{counted}Total: {ms(part_ns):<{NUMBER_WIDTH}}Ratio: {ratio}"


def _correction(tally: Tally) -> str:
    """What the column of self times means."""
    probes_ns = sum(row.totals.probe_ns for row in tally.rows())
    if not probes_ns:
        return "Self: host time outside of the row's children; what the probes cost is not known"
    return f"Self: host time outside of the row's children, less what their probes cost ({ms(probes_ns)} in all)"


def _event_summary(tally: Tally, blocks: Sequence[_Block], state: str, corrected: bool) -> list[str]:
    """The table, and before it which thread is which."""
    numbers: dict[int | None, int] = {thread: index for index, thread in enumerate(tally.threads)}
    legend = [
        f"thread{numbers[block.thread]}: {shorten(safe(tally.threads[block.thread]), NAME_LIMIT)} "
        f"(id {block.thread}), Total time: {ms(block.total_ns)}"
        for block in blocks
        if block.thread is not None
    ]
    parts = ["CPU Time (Ratio)", "GPU Time (Ratio)"] if state == "All" else []
    header = [
        "Event",
        "Calls",
        "Total",
        *parts,
        "Min.",
        "Max.",
        "Ave.",
        "Ratio.",
        "p50",
        "p99",
        *(["Self"] if corrected else []),
    ]
    cells = [
        [
            *_cells(row, "" if block.thread is None else f"thread{numbers[block.thread]}::", state),
            *([ms(row.self_ns)] if corrected else []),
        ]
        for block in blocks
        for row in block.rows
    ]
    widths = [PART_WIDTH if name in parts else NUMBER_WIDTH for name in header]
    return [*legend, *([""] if legend else []), *section_title("Event Summary"), *table(header, cells, widths), ""]


def _cells(row: EventRow, tag: str, state: str) -> list[str]:
    parts = [_part(row, row.host_ns), _part(row, row.device_ns)] if state == "All" else []
    return [
        _name_cell(row, tag),
        str(row.calls),
        ms(row.total_ns) if row.calls else MISSING,
        *parts,
        ms(row.min_ns),
        ms(row.max_ns),
        ms(row.ave_ns),
        number(row.ratio),
        ms(row.p50_ns),
        ms(row.p99_ns),
    ]


def _part(row: EventRow, part_ns: int) -> str:
    """A part of the row's time and its share, in the format `%f (%f)`."""
    if not row.calls:
        return MISSING
    fraction = share(part_ns, row.elapsed_ns)
    return f"{part_ns / 1e6:f} ({MISSING if fraction is None else format(fraction, 'f')})"


def _name_cell(row: EventRow, tag: str) -> str:
    """Indent, thread tag of a topmost row, name, and an instance's detail where there is room for it.

    Below the deepest indent the depth is a number, so that the name keeps its place.
    """
    indent = "  " * min(row.depth, INDENT_LIMIT) + (f"({row.depth}) " if row.depth > INDENT_LIMIT else "")
    before = indent + (tag if row.depth == 0 else "")
    name = safe(row.name) or "(no name)"
    room = NAME_LIMIT - len(before)
    spare = room - columns(name) - len(" []")
    if row.instance and spare >= DETAIL_LEAST:
        return f"{before}{name} [{shorten(safe(row.instance), spare)}]"
    return before + shorten(name, room)


def _reading_notes(tally: Tally, blocks: Sequence[_Block], state: str) -> list[str]:
    """What a reader has to know to read the table right, where it applies."""
    lines = []
    if any(not row.calls for block in blocks for row in block.rows):
        lines.append("Calls 0: the span had not ended, or it ended on another thread.")
    if _has_device_time(tally):
        lines.append("GPU times are stretches of a stream between two events, not kernels.")
    elif blocks and state != "CPU":
        lines.append("No device time was recorded.")
    return lines


def _has_device_time(tally: Tally) -> bool:
    return any(row.totals.device_ns for row in tally.rows())
