"""The `operators` view: host and device times by operator name, as in the Operator Summary of `paddle.profiler`.

An operator is a span of kind `op`, `layer` or `comm`, at any depth. Ratios are shares of the time in outermost
operators. `tracer_option: OpDetail` adds the parts of each operator. `AllOpDetail` adds the operators of an iteration
in the order of execution. The attribute `flops` of a span is the number of its own floating-point operations.

The `user` view, also in this module, has a row for each name of the scopes in the service's code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from instrument.recording.spans import FLOPS, read_flops
from instrument.report.kernels_view import find_open_spans
from instrument.report.operator_rows import (
    CallBlock,
    CallRow,
    CallTable,
    CallTimes,
    call_rows,
    describe_sort_order,
    explain_remaining_ratio,
    find_outermost_callers,
    make_block_table,
    make_blocks,
)
from instrument.report.section import Coverage, Section, View
from instrument.report.table import (
    LINE,
    Ratio,
    compact_number,
    compute_share,
    format_percent,
    format_six_digits,
    limit_rows,
    make_section_title_lines,
    measure_width,
    printable,
    shorten,
    sum_omitted_rows,
)
from instrument.report.view import Options, Recording
from instrument.trace.call_tree import StreamTimes, measure_device_times_of_calls
from instrument.trace.columns import Columns, Int64s
from instrument.trace.indices import (
    NONE,
    Groups,
    Members,
    are_at_or_above,
    find_distinct,
    find_nearest_row,
    index_rows,
    make_mask,
    number_by_first_occurrence,
)
from instrument.trace.intervals import shift_to_one_axis
from instrument.trace.layout import KernelColumns


@dataclass(frozen=True, slots=True)
class FlopRow:
    """The floating-point operations in one operator's calls, inner calls included. `calls` counts the outermost calls.
    `time_ns` is their time on the device or the host (see `on`). It is None if only some calls have device time.
    `ratio` is the share of all counted operations."""

    name: str
    kind: str
    calls: int
    flops: int
    on: str
    time_ns: int | None
    ratio: float | None
    remaining: int = 0

    per_call = Ratio("flops", of="calls")
    rate_gflop_s = Ratio("flops", of="time_ns")
    """The number of operations per ns, which equals the rate in GFLOP/s."""


@dataclass(frozen=True, slots=True)
class FlopTable:
    """The floating-point operations of each operator, the most operations first. `elsewhere` counts operations that are
    in no row. They ran outside of spans, or while several tasks had open spans."""

    flops: int
    elsewhere: int
    rows: tuple[FlopRow, ...]

    def make_section(self) -> Section:
        part = f"{format_percent(self.elsewhere, self.flops)} ran where no span was open, or those of several tasks"
        elsewhere = [f"{part}: they are in no row."] if self.elsewhere else []
        return Section(
            "Operations", self.rows,
            "name=Operator|calls=Calls|flops=FLOPs|per_call=Per call|ratio=Of all|on=On|time_ns=Time|"
            "rate_gflop_s=GFLOP/s",
            (
                "FLOPs: of the calls and all below them; a multiplication and an addition are two.",
                "Time: of the calls, or of their device work if each of them has some.",
                *elsewhere,
            ),
            texts={
                "flops": lambda row, unit: compact_number(row.flops, 10),
                "per_call": lambda row, unit: compact_number(row.per_call, 10),
            },
            widths=7,
        )  # fmt: skip


def make_flop_table(recording: Recording, options: Options) -> FlopTable | None:
    """Return the floating-point operations by name, or None if there are none. The count of an operator includes inner
    calls. Other spans count only their own operations. This takes about 1 us per span with operations."""
    trace = recording.columns
    first, last = recording.trace.coverage
    having = trace.attributes.rows_with_attribute(FLOPS)
    having = having[(first <= trace.start_ns[having]) & (trace.start_ns[having] < last)]
    own_flops = Counter[int]()
    for row, value in zip(having.tolist(), trace.attributes.values(FLOPS, having), strict=True):
        own_flops[row] = read_flops({FLOPS: value})
    launches = [launch for launch in recording.trace.flops if launch.flops > 0 and first <= launch.at_ns < last]
    if launches:
        thread_ids, times_ns = (np.array([launch[at] for launch in launches], dtype=np.int64) for at in (0, 1))
        for row, launch in zip(find_open_spans(recording, thread_ids, times_ns).tolist(), launches, strict=True):
            own_flops[max(row, NONE)] += launch.flops
    own_flops = +own_flops
    whole, elsewhere = own_flops.total(), own_flops.pop(NONE, 0)
    if not whole:
        return None
    # The spans with operations and all their callers on the same track, parents first.
    rows = np.flatnonzero(are_at_or_above(trace.parent_on_same_track, np.array(list(own_flops), dtype=np.int64)))
    rows = rows[np.argsort(trace.level[rows], kind="stable")]
    around = index_rows(rows, len(trace))[trace.parent_on_same_track[rows]].astype(np.int32)
    flops_of_rows = [own_flops.get(row, 0) for row in rows.tolist()]
    names, of_site = trace.describe_sites(lambda site: (site.name, site.kind))
    name, is_operator = of_site[trace.site[rows]], np.array([kind in OPERATORS for _, kind in names], dtype=np.bool_)
    below = flops_of_rows.copy()
    for number, caller in reversed(list(enumerate(around.tolist()))):
        if caller != NONE:
            below[caller] += below[number]
    # The outermost calls of each name, and their operations.
    flops, calls = [0] * len(names), [dict[int, None]() for _ in names]
    for number, (key, first) in enumerate(
        zip(name.tolist(), find_outermost_callers(around, name).tolist(), strict=True)
    ):
        counted = below[number] * (first == number) if is_operator[key] else flops_of_rows[number]
        if is_operator[key] or counted:
            calls[key][int(rows[first])] = None
        flops[key] += counted
    launched_ns = _measure_launched_work_ns(recording, list(chain.from_iterable(calls)))

    def sum_omitted(omitted: Sequence[FlopRow]) -> FlopRow:
        # Rows may be nested: each span's operations count once, but times would count some spans twice.
        keys = {(row.name, row.kind) for row in omitted}
        is_wanted = np.array([key in keys for key in names], dtype=np.bool_)
        is_inside = find_nearest_row(around, (is_wanted & is_operator)[name]) != NONE
        added = sum(flops_of_rows[number] for number in np.flatnonzero(is_wanted[name] | is_inside).tolist())
        return sum_omitted_rows(omitted, ("calls",), flops=added, ratio=compute_share(added, whole))

    shown = [
        FlopRow(
            *key, len(of_key), added, *_sum_call_times(trace, list(of_key), launched_ns), compute_share(added, whole)
        )
        for key, of_key, added in zip(names, calls, flops, strict=True)
        if of_key
    ]
    shown.sort(key=lambda row: (-row.flops, row.name, row.kind))
    return FlopTable(whole, elsewhere, limit_rows(shown, options, lambda row: row.time_ns or 0, sum_omitted))


def _measure_launched_work_ns(recording: Recording, calls: Sequence[int]) -> Int64s:
    """Return the device times of `calls` in ns, indexed by trace row. The times come from launched kernels. Calls
    without recorded kernels use their device intervals."""
    trace, columns = recording.columns, KernelColumns.from_objects(recording.trace.kernels)
    rows = find_distinct(np.array(calls, dtype=np.int64))
    kernels = np.flatnonzero((columns.thread_id != 0) & (columns.kind == columns.find_kind_index("kernel")))
    device_ns = np.zeros(len(trace), dtype=np.int64)
    if len(kernels):
        threads = trace.thread_id[rows]
        launches, starts, ends = shift_to_one_axis(
            (columns.thread_id[kernels], columns.launched_ns[kernels]),
            (threads, trace.start_ns[rows]),
            (threads, trace.end_ns[rows]),
        )
        order = np.argsort(launches, kind="stable")
        sums = np.concatenate([[0], np.cumsum((columns.end_ns - columns.start_ns)[kernels[order]])])
        first, end = np.searchsorted(launches[order], starts), np.searchsorted(launches[order], ends)
        device_ns[rows] = sums[end] - sums[first]
    has_none = make_mask(rows[device_ns[rows] == 0], len(trace))
    work = trace.device.select(trace.device.is_measured & (trace.device.start_ns < trace.device.end_ns))
    calls_with_work, lengths_ns = measure_device_times_of_calls(
        trace.parent_on_same_track, has_none, work.row, work.start_ns, work.end_ns
    )
    device_ns[calls_with_work] = lengths_ns
    return device_ns


def _sum_call_times(trace: Columns, calls: Sequence[int], launched_ns: Int64s) -> tuple[str, int | None]:
    """Return `GPU` and the sum of device times if all calls have device times. Return `CPU` and the sum of host times
    if no call has a device time. Otherwise return "" and None."""
    rows = np.array(calls, dtype=np.int64)
    on_device = launched_ns[rows][launched_ns[rows] > 0]
    if len(on_device) == len(rows):
        return "GPU", int(on_device.sum())
    return ("", None) if len(on_device) else ("CPU", int(trace.total_ns[rows].sum()))


OPERATORS = ("op", "layer", "comm")

IN_ORDER = (*OPERATORS, "copy")
"""The kinds of span in the list of operators by order of execution."""

ITERATIONS = ("step", "request")
"""The kinds of span that may be iterations. The first kind that the trace contains is used."""


NO_OPERATOR = "No operator was recorded: give functions and layers in the profile (functions:, layers:)."
NO_ITERATION = "No iteration was recorded: open one with scope(..., kind='step'), or name the requests."


@dataclass(frozen=True, slots=True)
class OrderedOperator:
    """An operator at the position `number`, from 0, in the order of execution. `total_ns` is the device time of the
    calls, or else their host time. `mean_ns` is the time per timed iteration."""

    number: int
    name: str
    instance: str
    kind: str
    depth: int
    calls: int
    on_device: bool
    total_ns: int
    mean_ns: float


@dataclass(frozen=True, slots=True)
class ExecutionOrder:
    """The operators of the iterations in the order of execution. `iteration` is the kind of span, "" without
    iterations. `skipped` counts the iterations left out by `skip_first`, and `cut` those with missing spans.
    `remaining_ns` is the mean time of the operators that are not listed."""

    iteration: str
    timed: int
    skipped: int
    cut: int
    operators: tuple[OrderedOperator, ...]
    remaining: int
    remaining_ns: float


@dataclass(frozen=True, slots=True)
class Operators(View):
    """The `operators` view. `in_order` is the order of execution, for the tracer option `AllOpDetail`. `operations` are
    floating-point operations."""

    coverage: Coverage
    blocks: tuple[CallBlock, ...]
    in_order: ExecutionOrder | None
    operations: FlopTable | None
    _options: Options = field(repr=False)

    TITLE = "Operator"

    def header_lines(self) -> list[str]:
        return [
            *self.coverage.lines(),
            f"Time unit: {self._options.unit}; {describe_sort_order(self._options)}",
            "Ratio: 100 % is the sum of all operators that are inside no other one. For a row below an operator,",
            "100 % is that operator. Work at the same time counts for each.",
            *explain_remaining_ratio(self.blocks),
        ]

    def reasons_if_empty(self) -> list[str]:
        return [] if self.blocks or self.operations is not None else self._explain_no_operators()

    def _explain_no_operators(self) -> list[str]:
        return self.coverage.explain_no_spans("operator", NO_OPERATOR)

    def sections(self) -> list[Section]:
        operations = [] if self.operations is None else [self.operations.make_section()]
        return [*(make_block_table(block, self._options, "Operator") for block in self.blocks), *operations]

    def footnotes(self) -> list[str]:
        order = [] if self.in_order is None else _format_order(self.in_order, self.coverage)
        return order if self.blocks else self._explain_no_operators()


def operators(recording: Recording, options: Options) -> Operators:
    """Return the `operators` view. All options except `corrected` apply. `rows` and `least_ns` limit the operators, and
    the rows below each operator."""
    facts = recording.trace
    calls = CallTable.from_spans(recording.columns, OPERATORS, facts.coverage)

    def make_block(thread: int | None, name: str, nodes: Int64s) -> CallBlock:
        outermost = nodes[~calls.inside[nodes]]
        cpu_ns, gpu_ns = (calls.sum_times_ns(outermost, on) for on in ("host", "device"))
        groups, shown = calls.group_nodes_by_name(nodes), list[CallRow]()
        for row in call_rows(calls, nodes, 0, cpu_ns, gpu_ns, options):
            shown.append(row)
            if options.tracer_option != "Default" and not row.remaining:
                shown += _child_rows(calls, row, groups[row.name, row.kind], options)
        return CallBlock(thread, name, cpu_ns, gpu_ns, tuple(shown))

    blocks = make_blocks(calls, calls.find_nodes_of_kinds(OPERATORS), facts.threads, options, make_block)
    in_order = _execution_order(recording, options) if options.tracer_option == "AllOpDetail" and blocks else None
    operations = make_flop_table(recording, options)
    return Operators(Coverage.measure_coverage(recording), blocks, in_order, operations, options)


def _child_rows(calls: CallTable, row: CallRow, nodes: Int64s, options: Options) -> Iterator[CallRow]:
    cpu_ns, gpu_ns = row.cpu.total_ns if row.cpu else 0, row.gpu.total_ns if row.gpu else 0
    below = np.concatenate([calls.called_children[node] for node in nodes.tolist()])
    children = calls.group_nodes_by_name(below)
    for child_row in call_rows(calls, below, 1, cpu_ns, gpu_ns, options):
        yield child_row
        if not child_row.remaining and child_row.gpu and options.state != "CPU":
            yield from _stream_rows(2, calls, children[child_row.name, child_row.kind], child_row.gpu.total_ns)
    if row.gpu and options.state != "CPU":
        yield from _stream_rows(1, calls, nodes, gpu_ns)


def _stream_rows(depth: int, calls: CallTable, nodes: Int64s, base_ns: int) -> Iterator[CallRow]:
    times_by_stream: dict[tuple[int, int], list[StreamTimes]] = {}
    for node in nodes.tolist():
        for times in calls.stream_times_by_node.get(node, ()):
            times_by_stream.setdefault((times.device, times.stream), []).append(times)
    for (device, stream), all_times in sorted(times_by_stream.items()):
        *_, counts, totals_ns, greatest_ns, least_ns = zip(*all_times, strict=True)
        count, total_ns = sum(counts), sum(totals_ns)
        gpu = CallTimes(total_ns, compute_share(total_ns, count), max(greatest_ns), min(least_ns))
        name = f"device {device}, stream {stream}"
        yield CallRow(name, "", depth, count, None, gpu, None, compute_share(total_ns, base_ns))


# The order of execution.


def _execution_order(recording: Recording, options: Options) -> ExecutionOrder:
    trace, (first, last) = recording.columns, recording.trace.coverage
    kinds = {trace.sites[place].kind for place in find_distinct(trace.site).tolist()}
    kind = next((kind for kind in ITERATIONS if kind in kinds), "")
    owner = trace.find_topmost_wanted_rows(trace.are_of_kind(kind))
    topmost = np.flatnonzero(owner == np.arange(len(trace)))
    topmost = topmost[np.lexsort((trace.span_id[topmost], trace.start_ns[topmost]))]
    is_whole = ~trace.clipped & (first <= trace.start_ns) & (trace.end_ns <= last)
    whole = topmost[is_whole[topmost]]
    timed = whole[options.skip_first :]
    is_timed = make_mask(timed, len(trace) + 1)
    executed = list(_ordered_operators(trace, CallTable.from_spans(trace, IN_ORDER, among=is_timed[owner]), len(timed)))
    shown = [operator for operator in executed if operator.mean_ns >= options.least_ns][: options.row_limit]
    shown_numbers = {operator.number for operator in shown}
    return ExecutionOrder(
        iteration=kind,
        timed=len(timed),
        skipped=len(whole) - len(timed),
        cut=len(topmost) - len(whole),
        operators=tuple(shown),
        remaining=len(executed) - len(shown),
        remaining_ns=sum(operator.mean_ns for operator in executed if operator.number not in shown_numbers),
    )


def _ordered_operators(trace: Columns, calls: CallTable, timed: int) -> Iterator[OrderedOperator]:
    paths, number = calls.paths, 0
    _, key_of_site = trace.describe_sites(lambda site: site.key)
    key, order = key_of_site[paths.site], np.argsort(paths.is_elsewhere, kind="stable")
    below = Members(paths.parent[order], len(paths), order)

    def group_by_site(nodes: Int64s) -> list[Int64s]:
        """Group nodes by site. Sites are sorted by their first calls, in descending order."""
        groups = [nodes[places] for places in Groups(number_by_first_occurrence(key[nodes])[0], len(nodes)).list_rows()]
        return sorted(groups, key=lambda group: -int(paths.first_ns[group].min()))

    pending = [(0, group) for group in group_by_site(np.flatnonzero(paths.parent == NONE))]
    while pending:
        depth, group = pending.pop()
        site = trace.sites[paths.site[group[0]]]
        listed = site.kind in IN_ORDER
        if listed:
            on_device = bool(paths.device.calls[group].any())
            total_ns = calls.sum_times_ns(group, "device" if on_device else "host")
            count = int(paths.host.calls[group].sum())
            yield OrderedOperator(
                number, site.name, site.instance, site.kind, depth, count, on_device, total_ns, total_ns / timed
            )
            number += 1
        children = np.concatenate([below[node] for node in group.tolist()])
        pending += [(depth + listed, group) for group in group_by_site(children)]


# The text.


def _format_order(order: ExecutionOrder, coverage: Coverage) -> list[str]:
    lines = make_section_title_lines("Order of execution")
    if not order.iteration:
        return [*lines, *coverage.explain_no_spans("iteration", NO_ITERATION), ""]
    skipped = f"{order.skipped} skipped as the first, {order.cut} cut at the edge of the kept spans"
    lines.append(f"Iterations ({order.iteration}): {order.timed} timed, {skipped}")
    if not order.timed:
        return [*lines, "None is left to be timed.", ""]
    lines += [
        "Seconds for each timed iteration, on the device where the operator has device time. An outer",
        "operator's hold those of the ones in it.",
        "",
    ]
    for operator in order.operators:
        before, after = f"OP_ID{operator.number}. ", f" : {format_six_digits(operator.mean_ns)} sec"
        name = f"{operator.name} [{operator.instance}]" if operator.instance else operator.name
        lines.append(before + shorten(printable(name), LINE - measure_width(before + after)) + after)
    if order.remaining:
        lines.append(f"(remaining {order.remaining}) : {format_six_digits(order.remaining_ns)} sec")
    return [*lines, ""]


NO_SPAN = "No span of kind user was recorded: open one with scope(name), or give a rule that kind."


@dataclass(frozen=True, slots=True)
class User(View):
    """The `user` view of the spans of kind `user`. Ratios are shares of `window_ns`, the time without missing spans.
    Only the part of a call in that time counts."""

    coverage: Coverage
    window_ns: int
    blocks: tuple[CallBlock, ...]
    _options: Options = field(repr=False)

    TITLE = "User"

    def header_lines(self) -> list[str]:
        return [
            *self.coverage.lines(),
            f"Time unit: {self._options.unit}; {describe_sort_order(self._options)}",
            "Ratio: of the window, or of its part with all spans; work at the same time counts for each.",
            *explain_remaining_ratio(self.blocks),
        ]

    def reasons_if_empty(self) -> list[str]:
        return [] if self.blocks else self.coverage.explain_no_spans("span of kind user", NO_SPAN)

    def sections(self) -> list[Section]:
        return [make_block_table(block, self._options, "Name") for block in self.blocks]


def user(recording: Recording, options: Options) -> User:
    """Return the `user` view. All options except `tracer_option`, `corrected` and `skip_first` apply."""
    window = recording.trace.coverage
    window_ns = window[1] - window[0]

    calls = CallTable.from_spans(recording.columns, ("user",), window)

    def make_block(thread: int | None, name: str, nodes: Int64s) -> CallBlock:
        return CallBlock(thread, name, window_ns, window_ns, call_rows(calls, nodes, 0, window_ns, window_ns, options))

    blocks = make_blocks(calls, calls.find_nodes_of_kinds(("user",)), recording.trace.threads, options, make_block)
    return User(Coverage.measure_coverage(recording), window_ns, blocks, options)
