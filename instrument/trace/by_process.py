"""Groups the rows of a merged trace by the process that recorded them. A tree can have rows of several processes.

Threads, streams and devices get back the numbers that they had in their own process. Span ids, parents, roots and times
remain those of the merged trace.

An interruption becomes an event of each span that it interrupts, not a trace of its own. A blocked event loop
interrupts the open requests and roots on its thread. A garbage collection interrupts those of its process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from instrument.recording.remote_parents import LINK
from instrument.recording.spans import Span, is_blocked_loop, is_interruption
from instrument.trace.columns import Columns, Int64s
from instrument.trace.forest import NONE
from instrument.trace.joined import Joined
from instrument.trace.trace import MergedProcess, Trace, spans_of, with_spans

if TYPE_CHECKING:
    from instrument.trace.merge import Merged  # an exporter has no files to merge


class ProcessRows(NamedTuple):
    """The facts of a process and its rows, ordered by tree and then by begin.

    `numbers` has the process's own numbers, None if the trace has the same ones. `interruptions` has the spans that
    interrupt each row, which are not among `rows`.
    """

    facts: Trace
    numbers: MergedProcess | None
    rows: Int64s
    interruptions: Mapping[int, Sequence[Span]]


def rows_by_process(merged: Merged, trace: Columns) -> Iterator[ProcessRows]:
    """Yield the rows of each process in a trace that extends the trace of a merge. An additional row belongs to its
    parent's process."""
    base = merged.saved.trace.origin
    process = np.zeros(len(trace), dtype=np.int64)
    for part in merged.parts:
        process[part.row[part.is_kept]] = part.process
    further = np.arange(len(merged.saved.trace.columns), len(trace))
    process[further] = process[trace.parent[further]]
    is_interrupting = trace.of_sites(list(map(is_interruption, trace.sites)))
    order = _sort_by_tree(trace)
    for number, parts in groupby(merged.parts, attrgetter("process")):
        process_parts = list(parts)
        facts = max((part.saved.trace for part in process_parts), key=attrgetter("end_ns"))
        origin = replace(facts.origin, monotonic_ns=base.monotonic_ns, realtime_ns=base.realtime_ns)
        threads = {thread_id: name for part in process_parts for thread_id, name in part.saved.trace.threads.items()}
        rows = order[(process[order] == number) & ~is_interrupting[order]]
        hits = find_interruptions(trace, rows, np.flatnonzero(is_interrupting & (process == number)))
        process_numbers = merged.saved.trace.processes[number] if merged.saved.trace.processes else None
        yield ProcessRows(replace(facts, origin=origin, threads=threads), process_numbers, rows, hits)


def _sort_by_tree(trace: Columns) -> Int64s:
    """Return the rows ordered by root, then by begin, the longer ones first, then by id."""
    starts, ends = trace.start_ns, trace.end_ns
    is_later = (starts[1:] > starts[:-1]) | ((starts[1:] == starts[:-1]) & (ends[1:] <= ends[:-1]))
    if is_later.all():  # then a stable sort by root is enough, in a fifth of the time
        return np.argsort(trace.root_id, kind="stable")
    return np.lexsort((trace.span_id, -ends, starts, trace.root_id))


def find_outer_spans(trace: Columns, joined: Joined) -> Mapping[int, tuple[int, int]]:
    """Return, for each row of a nested request with a key, the ids of the span around it and of that span's root. A
    request that already has a link is left out."""
    origins: dict[int, tuple[int, int]] = {}
    for place in joined.keys:
        row = int(joined.rows[place])
        above, root_id = int(trace.parent[row]), int(trace.root_id[row])
        if above != NONE and joined.of[above] != NONE and root_id == trace.span_id[row]:
            outer_root_id = int(trace.root_id[above])
            if outer_root_id != root_id and LINK not in trace.attributes[row]:
                origins[row] = int(trace.span_id[above]), outer_root_id
    return origins


def find_interruptions(trace: Columns, rows: Int64s, interruptions: Int64s) -> Mapping[int, Sequence[Span]]:
    """Return the interruptions of each request and each root among some rows of one process."""
    by_end = interruptions[np.argsort(trace.end_ns[interruptions], kind="stable")]
    hit = rows[trace.of_kind("request")[rows] | (trace.span_id[rows] == trace.root_id[rows])]
    if not len(by_end):
        return {}
    starts, ends = trace.start_ns[by_end], trace.end_ns[by_end]
    # Interruptions from `first` on end after the row's begin; none from `last` on begins before the row's end.
    first = np.searchsorted(ends, trace.start_ns[hit], side="right")
    last = np.searchsorted(np.minimum.accumulate(starts[::-1])[::-1], trace.end_ns[hit])
    counts = np.maximum(last - first, 0)
    row = np.repeat(hit, counts)
    place = np.arange(len(row)) + np.repeat(first - np.cumsum(counts) + counts, counts)
    is_of_loop = trace.of_sites(list(map(is_blocked_loop, trace.sites)))[by_end]
    is_hit = starts[place] < trace.end_ns[row]
    is_hit &= ~is_of_loop[place] | (trace.thread_id[by_end][place] == trace.thread_id[row])
    spans = spans_of(trace, by_end)
    hits: dict[int, list[Span]] = {}
    for hit_row, hit_place in zip(row[is_hit].tolist(), place[is_hit].tolist(), strict=True):
        hits.setdefault(hit_row, []).append(spans[hit_place])
    return hits


NEWEST = 1_000
"""The maximum number of interruptions kept per process for spans that have not ended. The oldest are dropped first."""


class Interruptions:
    """Keeps the newest interruptions of one process, to attach them to spans that end later."""

    def __init__(self) -> None:
        self._newest: list[Span] = []

    def attach(self, trace: Columns) -> tuple[Int64s, Mapping[int, Sequence[Span]]]:
        """Return the rows that are no interruptions, and the interruptions of each, from this trace and earlier
        ones."""
        alone = trace.of_sites([is_interruption(site) for site in trace.sites])
        if alone.any():
            _, trees, sizes = np.unique(trace.root_id, return_inverse=True, return_counts=True)
            alone &= (sizes == 1)[trees.reshape(-1)]
        rows, alone_rows = np.flatnonzero(~alone), np.flatnonzero(alone)
        extended = with_spans(trace, self._newest)
        hits = find_interruptions(extended, rows, np.concatenate([alone_rows, np.arange(len(trace), len(extended))]))
        self._newest = sorted([*self._newest, *spans_of(trace, alone_rows)], key=attrgetter("end_ns"))[-NEWEST:]
        return rows, hits
