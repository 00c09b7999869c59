"""Self times: what of a span's time no child took that ran on its thread and task."""

from __future__ import annotations

import numpy as np

from instrument.trace.columns import Bools, Int64s, Trace
from instrument.trace.intervals import lengths_by_group


def self_times(trace: Trace) -> Int64s:
    """Of each span its total less the union of the children on its line, clipped to it."""
    return trace.total_ns - _within_children(trace, trace.on_line_of_parent)


def self_times_of(trace: Trace, rows: Int64s) -> Int64s:
    """The same of some rows."""
    wanted = np.zeros(len(trace), dtype=np.bool_)
    wanted[rows] = True
    return trace.total_ns[rows] - _within_children(trace, trace.on_line_of_parent & wanted[trace.parent])[rows]


def _within_children(trace: Trace, which: Bools) -> Int64s:
    """How much of each span's time lies in some of its children."""
    children = np.flatnonzero(which)
    parents = trace.parent[children]
    starts = np.maximum(trace.start_ns[children], trace.start_ns[parents])
    ends = np.minimum(trace.end_ns[children], trace.end_ns[parents])
    return lengths_by_group(parents, starts, ends, len(trace))
