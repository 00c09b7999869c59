"""Interruptions as a collector gets them: events of the spans that they hit, in place of traces of one span.

A blocked event loop hits the requests and the roots that were open on its thread, a garbage collection those of its
process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np

from instrument.recording.spans import Span, is_interruption
from instrument.trace.by_process import interruptions_of
from instrument.trace.columns import Columns, Int64s
from instrument.trace.trace import spans_of, with_spans

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
