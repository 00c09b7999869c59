"""The views `classes`, `ops` and `instances` of self times. The rows of a table add up to 100 % of the time of a
top-level call.

The views correspond to the Class, Ops and Apply sections of Theano's profile. A self time is host time without the
children on the same thread and task.
- `instances`: a row for each call path
- `ops`: a row for each function, layer or kind of copy
- `classes`: a row for each type of layer, and for each class whose methods are recorded

A top-level call is the topmost request of a call path. Outside of requests, it is the topmost span. All calls of all
threads are counted.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby
from operator import ne
from typing import NamedTuple

import numpy as np

from instrument.recording.distributions import percentiles
from instrument.recording.paths import KIND
from instrument.recording.spans import Site, is_interruption, is_operator
from instrument.recording.tally import Records, Tally, sum_all_lines
from instrument.report.section import Section, View
from instrument.report.table import (
    LINE,
    MISSING,
    Ratio,
    code_location_of,
    compute_share,
    format_short_percent,
    format_time,
    printable,
    shorten,
)
from instrument.report.view import Options, Recording, SortKey
from instrument.trace.columns import Int64s
from instrument.trace.indices import (
    NONE,
    Groups,
    Members,
    are_at_or_above,
    find_ancestor,
    find_nearest_row,
    make_mask,
    number_by_first_occurrence,
    number_combinations,
    topmost_rows,
)

NO_CALL = "No call was counted: name functions or layers in the profile, or open a scope."

WORKING = ("op", "layer", "comm", "copy")
"""The kinds of span that count as work."""

WITH_CLASS = ("op", "layer", "comm")
"""The kinds of span whose time may belong to the class of a method."""


@dataclass(frozen=True, slots=True)
class SelfRow:
    """The self time of a class, op or instance in a function. `running` is the sum of ratios down to this row. `names`
    is a call path that ends with the row's name. `where` is `device`, `host`, `both`, or `waiting` for the time of
    suspended coroutines. Only an instance has a `number`."""

    names: tuple[str, ...]
    time_ns: int
    ratio: float | None
    running: float | None
    where: str
    calls: int
    instances: int
    number: int | None
    _call_times: Callable[[], tuple[int | None, int | None, int | None]] = field(repr=False, compare=False)

    @property
    def p50_ns(self) -> int | None:
        return self._call_times()[0]

    @property
    def p99_ns(self) -> int | None:
        return self._call_times()[1]

    @property
    def max_ns(self) -> int | None:
        return self._call_times()[2]

    def path(self) -> str:
        return path_text(self.names)

    per_call_ns = Ratio("time_ns", of="calls")


@dataclass(frozen=True, slots=True)
class Remaining:
    rows: int
    time_ns: int
    ratio: float | None
    calls: int
    instances: int


@dataclass(frozen=True, slots=True)
class FunctionTimes:
    """The calls of one function, or of all functions if `name` is "". `outer_ns` is the time of the calls, and
    `inner_ns` the part of this time in inner spans. If calls run in parallel, `inner_ns` is None. `work_ns` is the self
    time of work below the function, on any thread. Ratios of rows are shares of `time_ns`."""

    name: str
    kind: str
    calls: int
    outer_ns: int
    inner_ns: int | None
    work_ns: int
    time_ns: int
    rows: tuple[SelfRow, ...]
    remaining: Remaining | None

    inner_ratio = Ratio("inner_ns", of="outer_ns")
    work_ratio = Ratio("work_ns", of="outer_ns")
    """The share of the calls' time that is work. It may exceed 1 if work runs in parallel."""


@dataclass(frozen=True, slots=True)
class SelfTimes(View):
    """The view that `of` names: `classes`, `ops` or `instances`. A sum of several functions comes first. Functions with
    inner calls follow, the longest first. `remaining` counts the functions without a table."""

    of: str
    functions: tuple[FunctionTimes, ...]
    remaining: int
    remaining_ns: int
    corrected: bool
    _options: Options = field(repr=False)

    def heading(self) -> str:
        return self.of.capitalize()

    def header_lines(self) -> list[str]:
        less = ", less what the probes of the spans below cost" if self.corrected else ""
        return [
            f"Time unit: {self._options.unit}; times are self times{less}",
            "Time%: 100% is the sum of the self times of all rows of the table",
        ]

    def reasons_if_empty(self) -> list[str]:
        return [] if self.functions else [NO_CALL]

    def footnotes(self) -> list[str]:
        lines = list[str]()
        if self.remaining:
            time = format_time(self.remaining_ns, self._options.unit)
            lines += [
                f"... (remaining {self.remaining} functions account for {time}; all of it is in the sum above)",
                "",
            ]
        wheres = {row.where for function in self.functions for row in function.rows}
        if WAITING in wheres:
            lines += [
                "On waiting: self time in which coroutines were suspended: for I/O, in a queue, or until their turn",
                "on the event loop. The code that they ran has rows of its own. A scope outside of recorded",
                "coroutines and requests cannot detect suspensions: all its self time is on host.",
            ]
        if wheres & {"device", "both"}:
            lines.append("On device: the host's part, in which work was launched that the device does on its own time.")
        return lines

    def sections(self) -> list[Section]:
        last = "number=Id" if self.of == "instances" else "instances=Instances"
        columns = (
            f"path={_SINGULAR[self.of].capitalize()}|ratio=Time%|running=Sum%|time_ns=Time|per_call_ns=Per call|"
            f"where=On|calls=Calls|{last}"
        )
        return [
            Section(
                function.name or ("(no name)" if function.kind else "All functions"), function.rows, columns,
                [] if function.remaining is None else [self._describe_remaining(function.remaining)], widths=7,
                lead=[*self._call_lines(function), ""],
            )
            for function in self.functions
        ]  # fmt: skip

    def _call_lines(self, function: FunctionTimes) -> list[str]:
        unit = self._options.unit
        name = printable(function.name) or ("(no name)" if function.kind else "")
        called = f" to {shorten(name, LINE // 2)} ({function.kind})" if function.kind else ""
        outer, work = format_time(function.outer_ns, unit), format_time(function.work_ns, unit)
        inner = f"{MISSING} (it calls itself side by side)"
        if function.inner_ns is not None:
            share_of_calls = format_short_percent(function.inner_ns, function.outer_ns)
            inner = f"{format_time(function.inner_ns, unit)} ({share_of_calls} of the calls)"
        lines = [f"Time in {function.calls} call{'s' * (function.calls != 1)}{called}: {outer}"]
        if function.inner_ns != 0 or function.work_ns:
            lines += [
                f"Time in spans inside: {inner}",
                f"Time in ops, layers, copies and communication: {work} "
                f"({format_short_percent(function.work_ns, function.outer_ns)} of the calls)",
            ]
        if function.time_ns != function.outer_ns:
            lines.append(f"Time of all rows, which Time% is of: {format_time(function.time_ns, unit)}")
        if function.time_ns > function.outer_ns:
            lines.append("(it includes spans on other threads and tasks, in calls not ended, and across other spans)")
        if function.work_ns > function.outer_ns:
            lines.append("(work on several threads is summed, so it may exceed the calls)")
        return lines

    def _describe_remaining(self, omitted: Remaining) -> str:
        ratio = MISSING if omitted.ratio is None else f"{100 * omitted.ratio:.2f}%"
        time = f"({format_time(omitted.time_ns, self._options.unit)}) of the time, {omitted.calls} calls)"
        return f"... (remaining {omitted.rows} {self.of} account for {ratio} {time}"


def path_text(names: Sequence[str]) -> str:
    """Return a call path as text. A name that repeats is printed once, with its count."""
    if all(map(ne, names, names[1:])):
        return " > ".join(names)
    runs = ((name, sum(1 for _ in run)) for name, run in groupby(names))
    return " > ".join(name if times == 1 else f"{name} x{times}" for name, times in runs)


_SINGULAR = {"classes": "class", "ops": "op", "instances": "instance"}


def classes(recording: Recording, options: Options) -> SelfTimes:
    """Return the `classes` view: self times by type of layer, by class, or by kind. The option `rows` limits the
    functions, and the rows of each function. Rows are sorted by time unless `sorted_by` is calls or averages.
    `tracer_option`, `state`, `threads` and `skip_first` do not apply."""
    return _make_view("classes", recording, options)


def ops(recording: Recording, options: Options) -> SelfTimes:
    """Return the `ops` view: self times by site. The options are those of `classes`."""
    return _make_view("ops", recording, options)


def instances(recording: Recording, options: Options) -> SelfTimes:
    """Return the `instances` view: self times by place in the call tree. The options are those of `classes`."""
    return _make_view("instances", recording, options)


def class_of_site(site: Site) -> str:
    """Return a site's class, such as a layer's type, a method's class, or `aten`. Return the kind in brackets if the
    site has no class."""
    if is_operator(site) and "::" in site.name:
        return site.name.partition("::")[0]
    owner = site.qualname.rpartition(".")[0]
    if site.kind in WITH_CLASS and owner and not owner.endswith("<locals>"):
        return f"{site.module}.{owner}" if site.module else owner
    return site.name if site.kind in ("layer", "copy", "loader") or site.instance else f"({site.kind})"


def _make_view(of: str, recording: Recording, options: Options) -> SelfTimes:
    tally = recording.tally.correct_self_times().merge_threads() if options.corrected else recording.totals(merged=True)
    table = _FunctionTable(of, tally, options)
    times, counts = (table.functions[:, FunctionSums._fields.index(name)].tolist() for name in ("time_ns", "lines"))
    # A function without calls of others has no report, unless it is the only one.
    shown = [number for number in range(1, len(times)) if counts[number] > 1 or len(times) == 2]
    most = len(shown) if options.row_limit is None else options.row_limit
    shown = heapq.nsmallest(most, shown, key=lambda number: -times[number])
    left_ns = times[0] - sum(times[number] for number in shown)
    together = [0] if len(times) > 2 else []
    reports = tuple(table.make_function_times(number) for number in together + shown)
    return SelfTimes(of, reports, len(times) - 1 - len(shown), left_ns, options.corrected, options)


WAITING = "waiting"


def _site_label(site: Site) -> str:
    return f"{site.name} [{site.instance}]" if site.instance else site.name


class Group(NamedTuple):
    """The sum of the tally lines of one row in a function's table. `first` is the number of the first line. In a row of
    waiting time, `waiting` equals `lines`."""

    first: int
    lines: int
    time_ns: int
    calls: int
    on_device: int
    waiting: int
    number: int


class FunctionSums(NamedTuple):
    """The sums of one function. `node` is its topmost call node, `NONE` for the sum of all functions. `own_ns` is the
    part of `outer_ns` outside of inner spans. `work_ns` is the self time of inner work. `first` is the index of its
    first row, and `rows` counts its rows."""

    node: int
    lines: int
    calls: int
    outer_ns: int
    own_ns: int
    work_ns: int
    time_ns: int
    first: int
    rows: int


class _FunctionTable:
    """The functions of a tally, by first call. Number 0 is the sum of all functions. `functions` has a column for each
    field of `FunctionSums`."""

    def __init__(self, of: str, tally: Tally, options: Options) -> None:
        self._of, self._options, self._histogram = of, options, tally.histogram
        # The time of interruptions is already in the interrupted lines.
        is_interrupting = np.array([*tally.tree.map_sites(is_interruption), False], dtype=np.bool_)[tally.site_of]
        is_counted = ~is_interrupting[tally.lines["node"]]
        self._lines = lines = tally.lines if is_counted.all() else tally.lines[is_counted]
        self._every: list[Site] = tally.tree.sites
        nodes, parents, site_of = lines["node"], tally.parents, tally.site_of
        self._nodes, self._parents = nodes.tolist(), parents.tolist()
        self._site_of: list[int] = site_of.tolist()
        keys = np.asarray(tally.tree.number_sites_by_key(), dtype=np.int64)
        kinds = np.array(tally.tree.map_sites(KIND)[: len(keys)], dtype=np.str_)
        # The number of keys per label, for the keys of the lines and of their parents.
        used = np.unique(keys[site_of[are_at_or_above(parents, nodes)]]).tolist()
        self._same = Counter(map(tally.tree.map_sites(_site_label).__getitem__, used))
        self._names: dict[int, str] = {}
        self._is_request = (kinds == "request").tolist()
        # The row that a site's lines share, or a row for each line.
        rows = np.arange(len(nodes))
        if of != "instances":
            row_of_site = keys if of == "ops" else np.asarray(tally.tree.number_sites(class_of_site), dtype=np.int64)
            rows = row_of_site[site_of[nodes]]
        # A function is the topmost request of a call path or, outside of requests, its topmost node.
        is_request, root_of = (kinds == "request")[site_of], topmost_rows(parents)
        topmost = is_request & (find_ancestor(parents, is_request) == NONE)
        request = find_nearest_row(parents, topmost)
        function_of = np.where(request == NONE, root_of, request)
        its_function, its_root = function_of[nodes], root_of[nodes]
        key_of_node = keys[site_of]
        is_called = make_mask(nodes, len(parents))
        is_around = (its_root != nodes) & is_called[its_root]
        in_same = is_around & (key_of_node[function_of[its_root]] == key_of_node[its_function])
        # Each line counts in its function, and once more in number 0, all functions together.
        numbers, firsts = number_by_first_occurrence(key_of_node[its_function])
        number = np.concatenate([numbers + 1, np.zeros(len(nodes), dtype=np.int64)])
        is_own = np.concatenate([(its_function == nodes) & ~in_same, (its_function == nodes) & ~is_around])
        is_work = np.concatenate([np.isin(kinds, WORKING)[site_of[nodes]]] * 2) & ~is_own
        lines, at = np.concatenate([lines, lines]), np.concatenate([np.arange(len(nodes))] * 2)
        counted = np.stack([lines[name] for name in ("calls", "total_ns", "self_ns", "self_ns", "self_ns")], axis=1)
        counted[~is_own, :3] = 0
        counted[~is_work, 3] = 0
        ones = np.ones((len(lines), 1), dtype=np.int64)
        count = len(firsts) + 1
        sums = _sum_columns_by_group(np.concatenate([ones, counted], axis=1), number, count)
        groups, of_groups, of_line, at = _group_lines(lines, number, np.concatenate([rows, rows]), at)
        first, instances, time_ns, group_calls, *_ = groups.T
        weights = {"calls": group_calls, "ave": time_ns / group_calls}
        weight = weights.get(SortKey.parse_sort_key(options).column, time_ns)
        order = np.lexsort((-first, -instances, -group_calls, -time_ns, -weight, of_groups))
        self._groups = groups[order]
        self._lines_of_group = Members(of_line, len(groups), at)
        sizes = np.bincount(of_groups, minlength=count)
        edges = np.stack([np.cumsum(sizes) - sizes, sizes], axis=1)
        node = np.concatenate([[NONE], its_function[firsts]])[:, None]
        self.functions: Int64s = np.concatenate([node, sums, edges], axis=1)

    def _label_of_node(self, node: int) -> str:
        number = self._site_of[node]
        label = self._names.get(number)
        if label is None:
            site = self._every[number]
            name = _site_label(site)
            label = self._names[number] = (
                name if self._same[name] == 1 else f"{name} ({code_location_of(site) or site.kind})"
            )
        return label

    def _site_of_node(self, node: int) -> Site:
        return self._every[self._site_of[node]]

    def _list_path_nodes(self, node: int, *, whole: bool) -> list[int]:
        parents, site_of, is_request = self._parents, self._site_of, self._is_request
        path, inside = [node], 0
        while True:
            if is_request[site_of[node]]:
                inside = len(path)
            node = parents[node]
            if node == NONE:
                break
            path.append(node)
        if not whole:
            path = path[: (inside or len(path)) - 1] or path[:1]
        return path[::-1]

    def make_function_times(self, number: int) -> FunctionTimes:
        """Return a function's rows up to the row limit, and the sum of the omitted rows."""
        sums = FunctionSums._make(self.functions[number].tolist())
        groups = self._groups[sums.first : sums.first + sums.rows]
        time_ns = groups[:, Group._fields.index("time_ns")]
        heavy = groups[time_ns >= self._options.least_ns][: self._options.row_limit]
        running_ns = np.cumsum(heavy[:, Group._fields.index("time_ns")]).tolist()
        rows = zip(map(Group._make, heavy.tolist()), running_ns, strict=True)
        remaining = None
        if len(heavy) < len(groups):
            omitted = Group._make((groups.sum(axis=0) - heavy.sum(axis=0)).tolist())
            ratio = compute_share(omitted.time_ns, sums.time_ns)
            remaining = Remaining(len(groups) - len(heavy), omitted.time_ns, ratio, omitted.calls, omitted.lines)
        is_one = sums.node != NONE
        return FunctionTimes(
            name=self._label_of_node(sums.node) if is_one else "",
            kind=self._site_of_node(sums.node).kind if is_one else "",
            calls=sums.calls,
            outer_ns=sums.outer_ns,
            inner_ns=sums.outer_ns - sums.own_ns if sums.own_ns <= sums.outer_ns else None,
            work_ns=sums.work_ns,
            time_ns=sums.time_ns,
            rows=tuple(self._make_row(group, sum_ns, sums) for group, sum_ns in rows),
            remaining=remaining,
        )

    def _summarise_call_times(self, group: Group) -> tuple[int | None, int | None, int | None]:
        at = self._lines_of_group[group.number]
        total = sum_all_lines(self._lines[at])
        if not total.calls:
            return None, None, None
        histogram = self._histogram([self._nodes[line] for line in at.tolist()], None)
        p50_ns, p99_ns = percentiles(histogram, (0.5, 0.99), total.calls, total.min_ns, total.max_ns)
        return p50_ns, p99_ns, total.max_ns

    def _make_row(self, group: Group, running_ns: int, sums: FunctionSums) -> SelfRow:
        node = self._nodes[group.first]
        path = self._list_path_nodes(node, whole=sums.node == NONE) if self._of == "instances" else [node]
        is_class = self._of == "classes"
        place = "host" if not group.on_device else "device" if group.on_device == group.lines else "both"
        return SelfRow(
            names=(class_of_site(self._site_of_node(node)),) if is_class else tuple(map(self._label_of_node, path)),
            time_ns=group.time_ns,
            ratio=compute_share(group.time_ns, sums.time_ns),
            running=compute_share(running_ns, sums.time_ns),
            where=WAITING if group.waiting else place,
            calls=group.calls,
            instances=group.lines,
            number=group.first if self._of == "instances" else None,
            _call_times=cache(partial(self._summarise_call_times, group)),
        )


def _group_lines(lines: Records, number: Int64s, rows: Int64s, at: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Group tally lines into table rows. Running time and waiting time have separate rows."""
    waited, self_ns = lines["waiting_ns"], lines["self_ns"]
    runs, waits = np.flatnonzero((waited == 0) | (self_ns > waited)), np.flatnonzero(waited != 0)
    own_ns = np.concatenate([self_ns[runs] - waited[runs], waited[waits]])
    is_waiting = np.arange(len(own_ns)) >= len(runs)
    line_numbers = np.concatenate([runs, waits])
    of_group, firsts = number_combinations(number[line_numbers], rows[line_numbers], is_waiting.astype(np.int64))
    on_device = (lines["device_ns"][line_numbers] > 0) & ~is_waiting
    ones = np.ones(len(line_numbers), dtype=np.int64)
    parts = np.stack([ones, own_ns, lines["calls"][line_numbers], on_device, is_waiting], axis=1)
    first, numbers = at[line_numbers][firsts][:, None], np.arange(len(firsts))[:, None]
    rows_of_groups = np.concatenate([first, _sum_columns_by_group(parts, of_group, len(firsts)), numbers], axis=1)
    return rows_of_groups, number[line_numbers][firsts], of_group, at[line_numbers]


def _sum_columns_by_group(columns: Int64s, groups: Int64s, count: int) -> Int64s:
    sums = Groups(groups, count)
    return np.stack([sums.sum_by_group(column) for column in columns.T], axis=1)
