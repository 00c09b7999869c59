"""The tables of the views `operators` and `user`: a row for each name, with the host and device times of its calls.

If a call runs on another thread or task than its caller, the caller's time does not include the call.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from instrument.recording.spans import Interval
from instrument.report.section import Section
from instrument.report.table import LINE, compute_share, format_time, limit_rows, printable, shorten
from instrument.report.view import Options, SortKey
from instrument.trace.call_tree import CallPaths, NodeTimes, StreamTimes, build_call_tree
from instrument.trace.columns import Bools, Columns, Int32s, Int64s
from instrument.trace.indices import NONE, Groups, Members, find_ancestor, find_distinct


@dataclass(frozen=True, slots=True)
class CallTimes:
    """The times of a row's calls, as far as they are known. `ave_ns` is the sum divided by the number of all calls."""

    total_ns: int
    ave_ns: float | None
    max_ns: int
    min_ns: int


@dataclass(frozen=True)
class CallTable:
    """A call tree as columns, with a node for each call path in one thread or task. `around` is the caller's node.
    `inside` is True if any caller has one of the chosen kinds. `again` is True if any caller has the same name and
    kind."""

    paths: CallPaths
    names: Sequence[tuple[str, str]]
    name: Int64s
    around: Int32s
    inside: Bools
    again: Bools

    @classmethod
    def from_spans(
        cls, trace: Columns, kinds: Collection[str], window: Interval | None = None, among: Bools | None = None
    ) -> CallTable:
        """Return the call tree of the spans in the mask `among`. Calls have device times only if they or their parents
        are of `kinds`."""
        paths = build_call_tree(trace, kinds, window, among)
        names, of_site = trace.describe_sites(lambda site: (site.name, site.kind))
        name, around = of_site[paths.site], np.where(paths.is_elsewhere, NONE, paths.parent).astype(np.int32)
        inside = find_ancestor(around, np.array([kind in kinds for _, kind in names], dtype=np.bool_)[name]) != NONE
        again = inside & (find_outermost_callers(around, name) != np.arange(len(name)))
        return cls(paths, names, name, around, inside, again)

    def find_nodes_of_kinds(self, kinds: Collection[str]) -> Int64s:
        is_of = np.array([kind in kinds for _, kind in self.names], dtype=np.bool_)
        return np.flatnonzero((self.paths.host.calls > 0) & is_of[self.name])

    @cached_property
    def called_children(self) -> Members:
        return Members(np.where(self.paths.host.calls > 0, self.around, NONE), len(self.name))

    @cached_property
    def stream_times_by_node(self) -> dict[int, list[StreamTimes]]:
        by_node = defaultdict[int, list[StreamTimes]](list)
        for times in self.paths.streams:
            by_node[times.node].append(times)
        return by_node

    def group_nodes_by_name(self, nodes: Int64s) -> dict[tuple[str, str], Int64s]:
        groups = Groups(self.name[nodes], len(self.names)).list_rows()
        return {self.names[self.name[nodes[places[0]]]]: nodes[places] for places in groups}

    def summarise_times(self, nodes: Int64s, on: str) -> CallTimes | None:
        times: NodeTimes = getattr(self.paths, on)
        calls, timed = (int(counts[nodes].sum()) for counts in (self.paths.host.calls, times.calls))
        if not timed:
            return None
        total_ns, least_ns = sum(times.total_ns[nodes].tolist()), int(times.least_ns[nodes].min())
        return CallTimes(
            total_ns, compute_share(total_ns, calls), int(times.most_ns[nodes].max()), least_ns if timed == calls else 0
        )

    def sum_times_ns(self, nodes: Int64s, on: str) -> int:
        times: NodeTimes = getattr(self.paths, on)
        return sum(times.total_ns[nodes].tolist())


def find_outermost_callers(around: Int32s, name: Int64s) -> Int64s:
    """Return each node's outermost caller of the same name. Return the node itself if no caller has the name."""
    outermost, up = np.arange(len(name)), around.copy()
    inner = np.flatnonzero(up != NONE)
    while len(inner):
        alike = inner[name[up[inner]] == name[inner]]
        outermost[alike] = up[alike]
        up[inner] = around[up[inner]]
        inner = inner[up[inner] != NONE]
    return outermost


@dataclass(frozen=True, slots=True)
class CallRow:
    name: str
    kind: str
    depth: int
    calls: int
    cpu: CallTimes | None
    gpu: CallTimes | None
    cpu_ratio: float | None
    gpu_ratio: float | None
    remaining: int = 0


@dataclass(frozen=True, slots=True)
class CallBlock:
    """The rows of one thread, or of all threads if `thread` is None."""

    thread: int | None
    name: str
    cpu_base_ns: int
    gpu_base_ns: int
    rows: tuple[CallRow, ...]


def make_blocks(
    calls: CallTable,
    nodes: Int64s,
    names: Mapping[int, str],
    options: Options,
    block: Callable[[int | None, str, Int64s], CallBlock],
) -> tuple[CallBlock, ...]:
    thread_id = calls.paths.thread_id[nodes]
    threads, blocks = find_distinct(thread_id).tolist(), list[CallBlock]()
    if threads and (options.threads == "merged" or (options.threads == "both" and len(threads) > 1)):
        blocks.append(block(None, "", nodes))
    if options.threads != "merged":
        blocks += [
            block(thread, names.get(thread, f"thread {thread}"), nodes[thread_id == thread]) for thread in threads
        ]
    return tuple(blocks)


def call_rows(
    calls: CallTable, nodes: Int64s, depth: int, cpu_base_ns: int, gpu_base_ns: int, options: Options
) -> tuple[CallRow, ...]:
    """Return a row for each name and kind, sorted and limited by the options. At depth 0, nested calls of one name
    count once in the ratio."""
    groups = calls.group_nodes_by_name(nodes)

    def make_row(name: str, kind: str, nodes: Int64s, once: Int64s) -> CallRow:
        cpu, gpu = calls.summarise_times(nodes, "host"), calls.summarise_times(nodes, "device")
        return CallRow(
            name,
            kind,
            depth,
            int(calls.paths.host.calls[nodes].sum()),
            cpu,
            gpu,
            compute_share(calls.sum_times_ns(once, "host"), cpu_base_ns),
            None if gpu is None else compute_share(calls.sum_times_ns(once, "device"), gpu_base_ns),
        )

    def sum_omitted(omitted: Sequence[CallRow]) -> CallRow:
        nodes = np.concatenate([groups[row.name, row.kind] for row in omitted])
        is_omitted = np.isin(calls.name, calls.name[nodes])
        outermost = nodes[find_ancestor(calls.around, is_omitted)[nodes] == NONE]
        total = replace(make_row(f"(remaining {len(omitted)})", "", nodes, outermost), remaining=len(omitted))
        if not depth:
            return total
        columns = zip(*((row.cpu_ratio, row.gpu_ratio) for row in omitted), strict=True)
        known_ratios = ([ratio for ratio in column if ratio is not None] for column in columns)
        cpu_ratio, gpu_ratio = (sum(ratios) if ratios else None for ratios in known_ratios)
        return replace(total, cpu_ratio=cpu_ratio, gpu_ratio=gpu_ratio)

    key = SortKey.parse_sort_key(options)
    sign = 1 if key.ascending else -1

    def sort_weight(row: CallRow) -> float:
        if key.column == "calls":
            return row.calls
        times = row.gpu if key.part == "gpu" else row.cpu
        column = "total" if key.column == "default" else key.column
        return (getattr(times, f"{column}_ns") if times else 0) or 0

    def compared_time_ns(row: CallRow) -> int:
        cpu_ns, gpu_ns = row.cpu.total_ns if row.cpu else 0, row.gpu.total_ns if row.gpu else 0
        return {"CPU": cpu_ns, "GPU": gpu_ns}.get(options.state, max(cpu_ns, gpu_ns))

    rows = [make_row(*key, nodes, nodes if depth else nodes[~calls.again[nodes]]) for key, nodes in groups.items()]
    rows.sort(key=lambda row: (sign * sort_weight(row), -compared_time_ns(row), row.name, row.kind))
    return limit_rows(rows, options, compared_time_ns, sum_omitted)


REMAINING = "Ratio of the remaining rows: without calls that are inside each other."


def explain_remaining_ratio(blocks: Iterable[CallBlock]) -> list[str]:
    return [REMAINING] if any(row.remaining and row.depth == 0 for block in blocks for row in block.rows) else []


def describe_sort_order(options: Options) -> str:
    key = SortKey.parse_sort_key(options)
    column = {"default": "total", "calls": "number of calls"}.get(key.column, key.column)
    column_text = column if key.column == "calls" else f"{key.part.upper()} {column}"
    return f"sorted by {column_text}, {'least' if key.ascending else 'greatest'} first"


@dataclass(frozen=True, slots=True)
class _Line:
    """A printed line with the host times or the device times of a row. Only the first line of a row has the name."""

    row: CallRow
    depth: int
    on: str
    times: CallTimes | None
    ratio: float | None
    name: str
    first: bool


def make_block_table(block: CallBlock, options: Options, noun: str) -> Section:
    bases = [] if options.state == "GPU" else [f"CPU {format_time(block.cpu_base_ns, options.unit)}"]
    if options.state != "CPU" and any(row.gpu for row in block.rows):
        bases.append(f"GPU {format_time(block.gpu_base_ns, options.unit)}")
    thread = [] if block.thread is None else [f"{shorten(printable(block.name), LINE // 2)} (id {block.thread})"]
    kinds = Counter((name, depth) for name, depth, _ in {(row.name, row.depth, row.kind) for row in block.rows})
    lines = list[_Line]()
    for row in block.rows:
        name = f"{row.name} ({row.kind})" if kinds[row.name, row.depth] > 1 and row.kind else row.name
        parts: list[tuple[str, CallTimes | None, float | None]] = [
            (on, times, ratio)
            for on, times, ratio in (("CPU", row.cpu, row.cpu_ratio), ("GPU", row.gpu, row.gpu_ratio))
            if times is not None and options.state in (on, "All")
        ]
        for part in parts or [("", None, None)]:
            lines.append(_Line(row, row.depth, *part, name, first=not lines or lines[-1].row is not row))
    return Section(
        "All threads" if block.thread is None else "Thread",
        lines,
        f"name={noun}|row.calls=Calls|on=On|times.total_ns=Total|times.ave_ns=Ave|times.max_ns=Max|times.min_ns=Min|"
        "ratio=Ratio",
        texts={
            "name": lambda line, unit: line.name if line.first else " ",
            "row.calls": lambda line, unit: str(line.row.calls) if line.first else "",
        },
        widths=7,
        lead=[*thread, *([f"Ratio of: {', '.join(bases)}"] if bases else [])],
    )
