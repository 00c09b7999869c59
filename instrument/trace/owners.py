"""Owners: which request each span belongs to, the topmost one at or above it."""

from __future__ import annotations

import numpy as np

from instrument.trace.columns import Bools, Int32s, Trace
from instrument.trace.forest import NONE, rows_of


def owners(trace: Trace, wanted: Bools) -> Int32s:
    """The row of the topmost wanted span at or above each, `NONE` where there is none.

    The root that a span names is asked first: its parents may be among the spans that were not kept.
    """
    rows = np.arange(len(trace), dtype=np.int32)
    found = np.where(wanted, rows, np.int32(NONE)).astype(np.int32)
    above, open_rows = trace.parent.copy(), np.flatnonzero(trace.parent != NONE)
    while len(open_rows):  # of ever longer ways up, whose upper part comes first
        up = above[open_rows]
        higher, farther = found[up], above[up]
        found[open_rows] = np.where(higher != NONE, higher, found[open_rows])
        above[open_rows] = farther
        open_rows = open_rows[farther != NONE]
    roots = rows_of(trace.span_id, trace.root_id)
    by_root = (roots != NONE) & wanted[roots] if len(trace) else np.zeros(0, dtype=np.bool_)
    return np.where(by_root, roots, found).astype(np.int32)
