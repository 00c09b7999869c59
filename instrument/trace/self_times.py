"""Self times: what of a span's time no child took that ran on its thread and task, and what of that it waited.

A span runs while its body does. A coroutine that is suspended waits, and so does what it awaits and what awaits it; of
these it is the own waiting of the innermost. A generator stands still between two items while others run, which is no
part of its self time.
"""

from __future__ import annotations

import numpy as np

from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.forest import by_level
from instrument.trace.intervals import lengths_by_group


def self_times_of(trace: Columns, rows: Int64s) -> Int64s:
    """Return the total of some rows, each less the union of the children on its line, clipped to it."""
    wanted = np.zeros(len(trace), dtype=np.bool_)
    wanted[rows] = True
    return trace.total_ns[rows] - _within_children(trace, trace.on_line_of_parent & wanted[trace.parent])[rows]


def waiting_times(trace: Columns) -> Int64s:
    """Return the waiting part of each span's self time: the rest, once it has run while no child on its line ran.

    One that was active all the time has not waited.
    """
    if not (trace.active_ns < trace.total_ns).any():
        return np.zeros(len(trace), dtype=np.int64)
    ran_ns = np.maximum(trace.active_ns - _of_children(trace, trace.active_ns), 0)
    return np.asarray(np.clip(trace.self_ns - ran_ns, 0, np.maximum(trace.total_ns - trace.active_ns, 0)))


def stood_aside(trace: Columns) -> Bools:
    """Return True for generators that stood still for longer than they waited: others ran meanwhile."""
    stood_ns = trace.total_ns - trace.active_ns
    if not (stood_ns > 0).any():
        return np.zeros(len(trace), dtype=np.bool_)
    # The time that counts against whoever resumed it, self times at and below it on its line.
    counted_ns = trace.self_ns.copy()
    is_on_line = trace.on_line_of_parent
    for rows in reversed(by_level(trace.level)):
        below = rows[is_on_line[rows]]
        np.add.at(counted_ns, trace.parent[below], counted_ns[below])
    return np.asarray((stood_ns > 0) & (2 * (trace.total_ns - counted_ns) > stood_ns))


def _of_children(trace: Columns, times_ns: Int64s) -> Int64s:
    """The sums of the times of each span's children on its line."""
    found = np.zeros(len(trace), dtype=np.int64)
    children = np.flatnonzero(trace.on_line_of_parent)
    np.add.at(found, trace.parent[children], times_ns[children])
    return found


def _within_children(trace: Columns, which: Bools) -> Int64s:
    """Return the time of each span that is within some of its children."""
    children = np.flatnonzero(which)
    parents = trace.parent[children]
    starts = np.maximum(trace.start_ns[children], trace.start_ns[parents])
    ends = np.minimum(trace.end_ns[children], trace.end_ns[parents])
    return lengths_by_group(parents, starts, ends, len(trace))
