"""The rows of a merged trace by the process that recorded them, in trees that go over all processes.

A process keeps the numbers that it gave to threads, streams and devices. Ids, parents and roots are those of the merged
trace, and times are on its clock. A batch knows the requests that it serves.

Interruptions become events of the spans that they hit, not traces of one span. A blocked event loop hits the requests
and the roots that were open on its thread, a garbage collection those of its process.
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
    """The facts of a process and its rows: trees together, those of a tree in the order of their begins.

    `own` has the numbers that the process gave, None where they are those of the trace. `interruptions` are by row.
    Interruptions have no rows of their own.
    """

    facts: Trace
    own: MergedProcess | None
    rows: Int64s
    interruptions: Mapping[int, Sequence[Span]]


def rows_by_process(merged: Merged, trace: Columns) -> Iterator[ProcessRows]:
    """Yield each process of merged files with its rows of a trace that has the same rows, and perhaps more behind them.

    A row behind them is of its parent's process.
    """
    base = merged.saved.trace.origin
    process = np.zeros(len(trace), dtype=np.int64)
    for part in merged.parts:
        process[part.row[part.is_kept]] = part.process
    further = np.arange(len(merged.saved.trace.columns), len(trace))
    process[further] = process[trace.parent[further]]
    is_one = trace.of_sites(list(map(is_interruption, trace.sites)))
    order = _by_trees(trace)
    for number, parts in groupby(merged.parts, attrgetter("process")):
        its = list(parts)
        facts = max((part.saved.trace for part in its), key=attrgetter("end_ns"))
        origin = replace(facts.origin, monotonic_ns=base.monotonic_ns, realtime_ns=base.realtime_ns)
        threads = {thread_id: name for part in its for thread_id, name in part.saved.trace.threads.items()}
        rows = order[(process[order] == number) & ~is_one[order]]
        hits = interruptions_of(trace, rows, np.flatnonzero(is_one & (process == number)))
        own = merged.saved.trace.processes[number] if merged.saved.trace.processes else None
        yield ProcessRows(replace(facts, origin=origin, threads=threads), own, rows, hits)


def _by_trees(trace: Columns) -> Int64s:
    """The rows by root, then by begin, the longer ones first, then by id."""
    starts, ends = trace.start_ns, trace.end_ns
    is_later = (starts[1:] > starts[:-1]) | ((starts[1:] == starts[:-1]) & (ends[1:] <= ends[:-1]))
    if is_later.all():  # a stable sort of roots that are nearly in order takes a fifth of the time
        return np.argsort(trace.root_id, kind="stable")
    return np.lexsort((trace.span_id, -ends, starts, trace.root_id))


def where_began(trace: Columns, joined: Joined) -> Mapping[int, tuple[int, int]]:
    """Return the span in which a request with keys began, and that span's root, by the rows of requests within others.

    A request that is linked to a span already has no other one.
    """
    found: dict[int, tuple[int, int]] = {}
    for place in joined.keys:
        row = int(joined.rows[place])
        above, root_id = int(trace.parent[row]), int(trace.root_id[row])
        if above != NONE and joined.of[above] != NONE and root_id == trace.span_id[row]:
            around = int(trace.root_id[above])
            if around != root_id and LINK not in trace.attributes[row]:
                found[row] = int(trace.span_id[above]), around
    return found


def interruptions_of(trace: Columns, rows: Int64s, interruptions: Int64s) -> Mapping[int, Sequence[Span]]:
    """Return the interruptions that hit requests and roots among some rows, by row. All are of one process."""
    ones = interruptions[np.argsort(trace.end_ns[interruptions], kind="stable")]
    hit = rows[trace.of_kind("request")[rows] | (trace.span_id[rows] == trace.root_id[rows])]
    if not len(ones):
        return {}
    starts, ends = trace.start_ns[ones], trace.end_ns[ones]
    # The ones from `first` on end after a row begins, and of the ones from `last` on none begins before it ends.
    first = np.searchsorted(ends, trace.start_ns[hit], side="right")
    last = np.searchsorted(np.minimum.accumulate(starts[::-1])[::-1], trace.end_ns[hit])
    counts = np.maximum(last - first, 0)
    row = np.repeat(hit, counts)
    one = np.arange(len(row)) + np.repeat(first - np.cumsum(counts) + counts, counts)
    is_of_loop = trace.of_sites(list(map(is_blocked_loop, trace.sites)))[ones]
    is_hit = starts[one] < trace.end_ns[row]
    is_hit &= ~is_of_loop[one] | (trace.thread_id[ones][one] == trace.thread_id[row])
    its = spans_of(trace, ones)
    found: dict[int, list[Span]] = {}
    for at, which in zip(row[is_hit].tolist(), one[is_hit].tolist(), strict=True):
        found.setdefault(at, []).append(its[which])
    return found


NEWEST = 1_000
"""Interruptions of a process that are kept for the spans that end after them."""


class Interruptions:
    """The newest interruptions of one process."""

    def __init__(self) -> None:
        self._newest: list[Span] = []

    def attach(self, trace: Columns) -> tuple[Int64s, Mapping[int, Sequence[Span]]]:
        """Return the rows without interruptions, and by row those that hit it, of this trace and of those before."""
        alone = trace.of_sites([is_interruption(site) for site in trace.sites])
        if alone.any():
            _, trees, sizes = np.unique(trace.root_id, return_inverse=True, return_counts=True)
            alone &= (sizes == 1)[trees.reshape(-1)]
        rows, own = np.flatnonzero(~alone), np.flatnonzero(alone)
        found = with_spans(trace, self._newest)
        hits = interruptions_of(found, rows, np.concatenate([own, np.arange(len(trace), len(found))]))
        self._newest = sorted([*self._newest, *spans_of(trace, own)], key=attrgetter("end_ns"))[-NEWEST:]
        return rows, hits
