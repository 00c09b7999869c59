"""The `events` view: all calls as a tree of names, in the layout of Paddle's fluid profiler.

The options `tracer_option` and `state`, and the names of rows, are the same as in fluid.
- Total is a sum over calls. With `state="All"`, a moment in which host and device both work counts once.
- A row's device time is the time of its own events, but at least the sum of the rows below it.
- The column `Ratio.` is the row's Total divided by the sum of the topmost rows of its block.
- Rows are sums, so the Total time of all threads may exceed the elapsed time.
- The Total time is divided into computation, framework and, for a service, waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from instrument.recording.paths import KIND
from instrument.recording.spans import Site, is_interruption, is_operator
from instrument.recording.tally import Tally
from instrument.report.event_rows import TIMES, EventRow, EventsBlock, make_event_blocks, sum_topmost_nodes
from instrument.report.section import Section, Text, View, field_value
from instrument.report.table import (
    GAP,
    LINE,
    MISSING,
    Ratio,
    compact_number,
    compute_share,
    format_six_digits,
    format_time,
    make_section_title_lines,
    make_table_lines,
    make_title_lines,
    measure_width,
    printable,
    shorten,
)
from instrument.report.view import UNITS, Options, Recording, SortKey

PLACES = {"All": "All", "CPU": "CPU", "GPU": "CUDA"}
COLUMNS = {
    "default": "first call", "calls": "number of calls", "total": "total time", "max": "maximum time",
    "min": "minimum time", "ave": "average time",
}  # fmt: skip
"""The printed name of the column for each sort key."""

WIDE = 160
"""The width in columns of lines in Paddle's fluid profiler."""

NAME_LIMIT = 64
"""The maximum width in columns of a name with its indent and thread."""
DETAIL_LEAST = 12
"""The minimum number of free columns after an instance's name to print the instance's detail."""
INDENT_LIMIT = 12
"""The maximum number of levels that are indented. Deeper rows print their level as a number."""
LABEL_WIDTH = 25
NUMBER_WIDTH = 12
CALLS_WIDTH = 10
"""The maximum number of digits of a count of calls. Larger counts are rounded."""
RATIO_WIDTH = 6
DIGITS = ((6, 6), (6, 5), (6, 4), (5, 4), (4, 4))
"""The numbers of significant digits for totals and for other exact times. The first pair that leaves room for names is
used."""
EXPONENT = 3
SAMPLE = 100
"""The number of first rows from which the digits are chosen."""

DECIMALS = {unit: len(str(unit_ns)) - 1 for unit, unit_ns in UNITS.items()}
"""The number of decimals that show single nanoseconds, for each unit of time."""


_COMPUTING = frozenset({"compute", "forward", "backward", "optimizer"})
_WAITING = frozenset({"queue", "wait"})
"""The phases that count as waiting. A span without a phase counts if its name is in the set."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """The Total time of all threads, split into computation, framework and, for a service, waiting.

    `computation_ns` and `framework_ns` are None if no span computes. `framework_ns` is also None if parallel
    computation exceeds the Total time.
    """

    total_ns: int
    computation_ns: int | None
    waiting_ns: int | None = None

    computation_ratio = Ratio("computation_ns", of="total_ns")
    waiting_ratio = Ratio("waiting_ns", of="total_ns")

    @property
    def framework_ns(self) -> int | None:
        if self.computation_ns is None or self.computation_ns > self.total_ns:
            return None
        return self.total_ns - self.computation_ns - (self.waiting_ns or 0)

    framework_ratio = Ratio("framework_ns", of="total_ns")


def split_overhead(tally: Tally, total_ns: int, state: str) -> Overhead:
    kinds, sites = tally.tree.map_sites(KIND), tally.tree.sites
    computes = _is_operation if any(tally.tree.map_sites(is_operator)) else _is_computation
    is_known = any(tally.tree.map_sites(computes))
    is_service = "request" in kinds or tally.is_field_nonzero("waiting_ns") or any(site.suspends for site in sites)
    if state == "GPU" or not is_service:
        return Overhead(total_ns, getattr(sum_topmost_nodes(tally, computes), TIMES[state]) if is_known else None)
    whole_ns, *parts_ns = _split_service_time(tally, state, computes)
    # A row of several paths has calls in some of them alone, so the total time may differ from that of topmost calls.
    computation_ns, waiting_ns = (part_ns * total_ns // whole_ns if whole_ns else 0 for part_ns in parts_ns)
    return Overhead(total_ns, computation_ns if is_known else None, waiting_ns)


def _split_service_time(tally: Tally, state: str, computes: Callable[[Site], bool]) -> list[int]:
    count = len(tally.parents)
    sums = tally.sum_by_group(np.arange(count), count)
    calls, times, waited = (sums[name].tolist() for name in ("calls", TIMES[state], "waiting_ns"))
    sites, site_of, parents = tally.tree.sites, tally.site_of.tolist(), tally.parents.tolist()
    # The time, computation and waiting of each node's children; the last place has those of the topmost nodes.
    below = [[0, 0, 0] for _ in range(count + 1)]
    for node in reversed(range(count)):  # a parent comes before its children
        site, time_ns = sites[site_of[node]], times[node]
        of_children_ns, computation_ns, waiting_ns = below[node]
        if is_interruption(site):
            continue  # its time is a part of the interrupted span
        if calls[node]:
            if computes(site):
                computation_ns, waiting_ns = time_ns, 0
            elif _is_waiting(site):
                computation_ns, waiting_ns = 0, time_ns
            else:
                if of_children_ns > time_ns:
                    computation_ns = computation_ns * time_ns // of_children_ns
                    waiting_ns = waiting_ns * time_ns // of_children_ns
                waiting_ns += min(waited[node], max(time_ns - of_children_ns, 0))
            of_children_ns = time_ns
        into = below[parents[node] if parents[node] >= 0 else count]
        for part, part_ns in enumerate((of_children_ns, computation_ns, waiting_ns)):
            into[part] += part_ns
    return below[count]


def _read_declared_phase(site: Site) -> object:
    return dict(site.attributes).get("phase") if site.attributes else None


def _is_computation(site: Site) -> bool:
    declared = _read_declared_phase(site)
    return declared in _COMPUTING or (
        declared is None and (site.kind == "layer" or (site.kind == "phase" and site.name == "compute"))
    )


def _is_operation(site: Site) -> bool:
    return (
        is_operator(site) or (_read_declared_phase(site) or (site.name if site.kind == "phase" else None)) == "compute"
    )


def _is_waiting(site: Site) -> bool:
    declared = _read_declared_phase(site)
    return declared in _WAITING or (declared is None and site.name in _WAITING)


@dataclass(frozen=True, slots=True)
class CopySum:
    """The sum of all, all asynchronous, or all synchronous copies that involve a device. `ratio` is the share of the
    Total time of all threads."""

    label: str
    calls: int
    total_ns: int
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Events(View):
    """The `events` view: a block of rows for all threads merged, then a block for each thread, the newest first.
    `probes_ns` is the cost of probes that is subtracted from self times, None without this correction."""

    window_ns: int | None
    blocks: tuple[EventsBlock, ...]
    overhead: Overhead | None
    copies: tuple[CopySum, ...]
    probes_ns: int | None
    has_device_time: bool
    _options: Options
    _columns: int = LINE

    def with_wide_lines(self) -> Events:
        """Return the view with lines as wide as those of Paddle's fluid profiler. Fewer names are then shortened."""
        return replace(self, _columns=WIDE)

    def sections(self) -> list[Section]:
        note = "Of all calls, also without kept spans. Ratio: of the sum of the topmost rows."
        return [
            *(
                replace(self._times_section(block.rows), title=block.name or "All threads", notes=(note,))
                for block in self.blocks
            ),
            Section("Copies", self.copies, "label=Copies|calls=Calls|total_ns=Total|ratio=Ratio"),
        ]

    def _times_section(self, rows: Sequence[EventRow], digits: tuple[int, int] = (6, 6)) -> Section:
        """Return the table of rows. `digits` has two numbers of digits: for totals, and for other exact times."""
        total, time = digits
        shown = dict.fromkeys(("min_ns", "max_ns", "ave_ns", "self_ns"), time) | {"p50_ns": 4, "p99_ns": 4}

        def format_field(name: str, digits: int, row: EventRow, unit: str) -> str:
            return _time_text(field_value(row, name), unit, digits)

        texts: dict[str, Text] = {name: partial(format_field, name, number) for name, number in shown.items()}
        texts["calls"] = lambda row, unit: compact_number(row.calls, CALLS_WIDTH)
        texts["total_ns"] = lambda row, unit: _time_text(row.total_ns if row.calls else None, unit, total)
        texts["ratio"] = lambda row, unit: compact_number(row.ratio, RATIO_WIDTH)
        columns = (
            "name=Event|calls=Calls|+errors=Errors|total_ns=Total|min_ns=Min.|max_ns=Max.|ave_ns=Ave.|ratio=Ratio.|"
            f"p50_ns=p50|p99_ns=p99|{'+' * (self.probes_ns is None)}self_ns=Self|+host_ns=Host|+device_ns=Device"
        )
        return Section("Event Summary", rows, columns, texts=texts)

    def _device_section(self, rows: Sequence[EventRow], digits: tuple[int, int]) -> Section:
        """Return the table of host and device times in the format of Paddle's fluid profiler."""
        texts: dict[str, Text] = {part: partial(_device_text, part) for part in ("host", "device")}
        texts["total_ns"] = lambda row, unit: _time_text(row.total_ns if row.calls else None, unit, digits[0])
        columns = "name=Event|total_ns=Total|host=CPU Time (Ratio)|device=GPU Time (Ratio)"
        return Section("Host and Device Time", rows, columns, texts=texts)

    def lines(self) -> list[str]:
        lines, nothing = list[str](), self.reasons_if_empty()
        merged = [block for block in self.blocks if block.thread is None]
        by_thread = [block for block in self.blocks if block.thread is not None]
        for report in (merged, by_thread):
            if report:
                lines += _list_heading_lines(self, report)
                lines += _summary_lines(self) if report[0] is self.blocks[0] else []
                lines += _event_lines(self, report)
        if nothing:
            lines += [*make_title_lines("Profiling Report"), *nothing, ""]
        return [*lines, *_explain_special_cells(self)]

    def reasons_if_empty(self) -> list[str]:
        return [] if self.blocks else ["No calls were recorded."]


def events(recording: Recording, options: Options) -> Events:
    """Return the `events` view of the tally, which is exact for all calls. These options are used:

    - `tracer_option`: `OpDetail` adds phases, `AllOpDetail` also adds instances of operators and layers
    - `state`: the time that Total adds up
    - `rows`, `least_ns`: the limits of rows; one row per level sums up the omitted rows
    - `threads`: `merged`, `apart` or `both`
    - `corrected`: adds self times without the cost of probes
    """
    probes_ns = None
    if options.corrected:
        tally = recording.tally.correct_self_times()
        probes_ns = int(tally.lines["probe_ns"].sum())
    else:
        tally = recording.totals(merged=options.threads == "merged")
    blocks = make_event_blocks(tally, options)
    of_all = len(blocks) == 1 or (bool(blocks) and blocks[0].thread is None)
    total_ns = blocks[0].total_ns if of_all else 0
    return Events(
        window_ns=recording.window_ns,
        blocks=blocks,
        overhead=split_overhead(tally, total_ns, options.state) if of_all else None,
        copies=sum_copies_by_synchronicity(tally, total_ns, options.state) if of_all else (),
        probes_ns=probes_ns,
        has_device_time=tally.is_field_nonzero("device_ns"),
        _options=options,
    )


def sum_copies_by_synchronicity(tally: Tally, total_ns: int, state: str) -> tuple[CopySum, ...]:
    """Return the sums of copies: all, asynchronous, and synchronous. Copies within the host are left out."""
    by_site = tally.sum_by_site()
    columns = (by_site[name].tolist() for name in ("calls", TIMES[state]))
    copies = [
        (dict(site.attributes).get("sync"), calls, time_ns)
        for site, calls, time_ns in zip(tally.tree.sites, *columns, strict=False)
        if site.kind == "copy" and ("direction", "h2h") not in site.attributes
    ]
    sums = []
    for label, sync in (("GpuMemcpy", None), ("GpuMemcpyAsync", False), ("GpuMemcpySync", True)):
        chosen = [(calls, time_ns) for way, calls, time_ns in copies if sync is None or way is sync]
        calls, copied_ns = map(sum, zip(*chosen, strict=True)) if chosen else (0, 0)
        if calls or sync is None:
            sums.append(CopySum(label, calls, copied_ns, compute_share(copied_ns, total_ns)))
    return tuple(sums)


# The text.


def _list_heading_lines(view: Events, blocks: Sequence[EventsBlock]) -> list[str]:
    options, merged = view._options, blocks[0].thread is None
    base = "Total time" if merged else "the thread's Total time"
    key, (part, _, _) = SortKey.parse_sort_key(options), options.sorted_by.rpartition("_")
    column, is_ascending = COLUMNS[key.column], key.ascending or key.column == "default"
    if part and key.column in ("total", "ave"):
        time = {"cpu": "host time", "gpu": "device time"}[part]
        column = time if key.column == "total" else f"average {time}"
    lines = [
        *make_title_lines("Profiling Report"),
        *(["Note! This Report merge all thread info into one."] if merged else []),
        f"Place: {PLACES[options.state]}",
        f"Time unit: {options.unit}",
        f"Sorted by {column} in {'ascending' if is_ascending else 'descending'} order"
        f"{'' if merged else ' in the same thread'}",
        *([] if view.window_ns is None else [f"Window: {format_time(view.window_ns, options.unit)}"]),
        f"Ratio: of {base}, the sum of the top rows; work at the same time is",
        "  summed, so it may be longer than the window",
    ]
    if view.probes_ns is not None:
        cost_text = f"less what their probes cost ({format_time(view.probes_ns, options.unit)} in all)"
        unknown = "what the probes cost is not known"
        lines.append(
            "Self: host time outside of the row's children" + (f", {cost_text}" if view.probes_ns else f"; {unknown}")
        )
    return [*lines, ""]


def _summary_lines(view: Events) -> list[str]:
    split, unit = view.overhead, view._options.unit
    if split is None:
        return []
    lines = [
        *make_section_title_lines("Overhead Summary"),
        f"Total time: {format_six_digits(split.total_ns, unit)}",
        _summary_line("  Computation time", split.total_ns, split.computation_ns, unit),
        *([] if split.waiting_ns is None else [_summary_line("  Waiting", split.total_ns, split.waiting_ns, unit)]),
        _summary_line("  Framework overhead", split.total_ns, split.framework_ns, unit),
    ]
    if split.waiting_ns is not None:
        lines.append("  (waiting: queues and suspended coroutines, which wait for I/O or for the event loop)")
    if split.computation_ns is None:
        lines.append("  (nothing is declared as computation: layers are, and rules with `phase: compute`)")
    elif split.framework_ns is None:
        lines.append("  (computation ran in parallel to the calls around it, or after them, so the rest is unknown)")
    lines += ["", *make_section_title_lines("GpuMemCpy Summary")]
    for copies in view.copies:
        label = "  " * (copies is not view.copies[0]) + copies.label
        lines.append(_summary_line(label, split.total_ns, copies.total_ns, unit, copies.calls))
    return [*lines, ""]


def _summary_line(label: str, base_ns: int, part_ns: int | None, unit: str, calls: int | None = None) -> str:
    counted = "" if calls is None else f"Calls: {calls:<{NUMBER_WIDTH}}"
    ratio = MISSING if part_ns is None or not base_ns else f"{100 * (part_ns / base_ns):g}%"
    return f"{label:<{LABEL_WIDTH}}{counted}Total: {format_six_digits(part_ns, unit):<{NUMBER_WIDTH}}Ratio: {ratio}"


def _event_lines(view: Events, blocks: Sequence[EventsBlock]) -> list[str]:
    unit = view._options.unit
    legend = []
    for block in blocks:
        if block.number is not None:
            facts = f" (id {block.thread}), Total time: {format_six_digits(block.total_ns, unit)}"
            tag = f"thread{block.number}: "
            legend.append(tag + shorten(printable(block.name), LINE - len(tag) - len(facts)) + facts)
    rows = [(block, row) for block in blocks for row in block.rows]
    lines = [*legend, *([""] if legend else []), *_tree_table(rows, view._times_section, unit, view._columns), ""]
    timed = _select_device_rows(rows)
    if view._options.state == "All" and timed:
        lines += _tree_table(timed, view._device_section, unit, view._columns)
        lines += [
            "",
            "Ratio: of the row's Total, in which time that host and device shared counts once; the two may",
            "  together exceed 1. Of any other row, CPU Time is the Total and GPU Time is 0.",
            "",
        ]
    return lines


def _select_device_rows(rows: Sequence[tuple[EventsBlock, EventRow]]) -> list[tuple[EventsBlock, EventRow]]:
    timed_rows: list[tuple[EventsBlock, EventRow]] = []
    above = 0
    for block, row in reversed(rows):
        if row.device_ns or row.depth < above:
            timed_rows.append((block, row))
            above = row.depth
    return timed_rows[::-1]


def _tree_table(
    rows: Sequence[tuple[EventsBlock, EventRow]],
    section_of: Callable[[Sequence[EventRow], tuple[int, int]], Section],
    unit: str,
    line: int,
) -> list[str]:
    names = _format_names(rows, NAME_LIMIT)
    longest, every = max(map(measure_width, names), default=0), [row for _, row in rows]
    for digits in DIGITS:
        header, cells = section_of(every[:SAMPLE], digits).cells(unit)
        if _name_width(header, cells, line) >= longest or digits == DIGITS[-1]:
            cells += section_of(every[SAMPLE:], digits).cells(unit)[1]
        room = _name_width(header, cells, line)
        if room >= longest and len(cells) == len(rows):
            break
    if room < longest:
        names = _format_names(rows, room)
    shown = [[name, *texts] for name, (_, *texts) in zip(names, cells, strict=True)]
    title = make_section_title_lines(section_of((), digits).title)
    return [*title, *make_table_lines(header, shown, [0] * len(header))]


def _format_names(rows: Sequence[tuple[EventsBlock, EventRow]], room: int) -> list[str]:
    return [_format_name(row, "" if block.number is None else f"thread{block.number}::", room) for block, row in rows]


def _name_width(header: Sequence[str], cells: Sequence[Sequence[str]], line: int) -> int:
    widths = [max(measure_width(cell) + GAP for cell in column) for column in zip(header, *cells, strict=True)][1:]
    return line - sum(widths) - GAP


def _time_text(time_ns: float | None, unit: str, digits: int) -> str:
    return MISSING if time_ns is None else compact_number(time_ns / UNITS[unit], digits + EXPONENT, digits)


def _device_text(part: str, row: EventRow, unit: str) -> str:
    if not row.calls:
        return MISSING
    ratio = field_value(row, f"{part}_ratio")
    time = f"{field_value(row, f'{part}_ns') / UNITS[unit]:.{DECIMALS[unit]}f}"
    return f"{time} ({MISSING if ratio is None else format(ratio, 'f')})"


def _format_name(row: EventRow, tag: str, room: int) -> str:
    levels = min(INDENT_LIMIT, room // 4)
    before = "  " * min(row.depth, levels) + (f"({row.depth}) " if row.depth > levels else "")
    before += tag if row.depth == 0 else ""
    name = printable(row.name) or "(no name)"
    spare = room - measure_width(before) - measure_width(name) - len(" []")
    if row.instance and spare >= DETAIL_LEAST:
        return f"{before}{name} [{shorten(printable(row.instance), spare)}]"
    return before + shorten(name, room - len(before))


def _explain_special_cells(view: Events) -> list[str]:
    lines = []
    if any(not row.calls for block in view.blocks for row in block.rows):
        lines.append("Calls 0: the span had not ended, or it ended on another thread.")
    if any(row.calls and row.max_ns is None for block in view.blocks for row in block.rows):
        lines += [
            f"Min., Max., p50, p99 {MISSING}: they are kept of host and device time together, which is more than the",
            f"  row's {view._options.state} time.",
        ]
    if view.has_device_time:
        lines.append("GPU times are stretches of a stream between two events, not kernels.")
    elif view.blocks and view._options.state != "CPU":
        lines.append("No device time was recorded.")
    return lines
