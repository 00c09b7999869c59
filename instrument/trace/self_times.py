"""Self times: what of a span's time no child took that ran on its thread and task."""

from __future__ import annotations

import numpy as np

from instrument.trace.columns import Int64s, Trace
from instrument.trace.intervals import lengths_by_group


def self_times(trace: Trace) -> Int64s:
    """Of each span its total less the union of the children on its line, clipped to it."""
    children = np.flatnonzero(trace.on_line_of_parent)
    parents = trace.parent[children]
    starts = np.maximum(trace.start_ns[children], trace.start_ns[parents])
    ends = np.minimum(trace.end_ns[children], trace.end_ns[parents])
    return trace.total_ns - lengths_by_group(parents, starts, ends, len(trace))
