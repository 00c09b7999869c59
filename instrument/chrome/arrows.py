"""Arrows: from a span to the work that it started on another thread, task or device, and from a batch to its requests.

An arrow that would point into the past, or that the format has no room for, is left out and counted in
`instrument.arrows_left_out`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from instrument.chrome.lanes import OrderedIntervals, Spans
from instrument.recording.spans import BATCH_KEYS
from instrument.trace.columns import Bools, Int32s, Int64s
from instrument.trace.forest import NONE
from instrument.trace.joined import join


class BatchMarks:
    """Marks on the lanes of requests, at the begin of each batch that serves one; each is the end of an arrow from it.

    An arrow from a request to a batch of several would be the natural one, but a slice has room for one bind id: so all
    arrows of a batch begin at it. `batch` and `request` are places, a row for each request that goes on as the batch
    begins; `left_out` counts the others.
    """

    def __init__(self, spans: Spans) -> None:
        self.batch = self.request = np.zeros(0, dtype=np.int64)
        self.left_out = 0
        if not len(spans.trace.attributes.having(BATCH_KEYS)):
            return
        joined = join(spans.trace)
        known = np.flatnonzero(joined.served.request != NONE)
        rows = np.stack([joined.served.batch[known], joined.rows[joined.served.request[known]]])
        batch, request = spans.place_of[np.unique(rows, axis=1)].astype(np.int64)
        at_ns = spans.start_ns[batch]
        is_within = (spans.start_ns[request] <= at_ns) & (at_ns < spans.end_ns[request]) & (batch != request)
        self.left_out = int((~is_within).sum())
        self._keep(batch, request, is_within)

    def _keep(self, batch: Int64s, request: Int64s, wanted: Bools) -> None:
        order = np.flatnonzero(wanted)
        order = order[np.argsort(batch[order], kind="stable")]
        self.batch, self.request = batch[order], request[order]

    def leave_out(self, others: Sequence[int]) -> None:
        """Draw none from these batches, whose only bind id is another one's."""
        is_other = np.isin(self.batch, others)
        self.left_out += int(is_other.sum())
        self._keep(self.batch, self.request, ~is_other)


class Arrows:
    """The arrows that a file with these spans and intervals can have.

    Complete events have arrows of their own: from `callers` to `called` spans, and to `launched` intervals. Async
    slices can only be tied by a bind id, and a slice has room for one. Where a span would need two, its own intervals
    win, then the spans that it called. `binds` has the source by place of each tied span, `ties` by place of each tied
    interval. `left_out` counts what is not drawn.
    """

    def __init__(self, spans: Spans, intervals: OrderedIntervals, marks: BatchMarks) -> None:
        self._spans, owners = spans, intervals.owner
        of_async = spans.is_async[owners]
        is_drawn = self._may_lead(owners, intervals.start_ns, of_async)
        self.launched = np.flatnonzero(is_drawn & ~of_async)
        tied = np.flatnonzero(is_drawn & of_async)
        self.ties = dict(zip(tied.tolist(), owners[tied].tolist(), strict=True))
        self.binds = {owner: owner for owner in self.ties.values()}
        self.left_out = int((~is_drawn).sum())
        called, callers = spans.called_away()
        by_bind = spans.is_async[callers] | spans.is_async[called]
        is_drawn = self._may_lead(callers, spans.start_ns[called], by_bind)
        self.called = called[is_drawn & ~by_bind]
        self.left_out += int((~is_drawn).sum())
        by_bind &= is_drawn
        binds = self.binds
        for caller, one in zip(callers[by_bind][::-1].tolist(), called[by_bind][::-1].tolist(), strict=True):
            if one not in binds and binds.get(caller, caller) == caller:
                binds[one] = binds[caller] = caller
            else:
                self.left_out += 1
        marks.leave_out([one for one in np.unique(marks.batch).tolist() if binds.setdefault(one, one) != one])
        self.left_out += marks.left_out

    def _may_lead(self, sources: Int64s | Int32s, targets_ns: Int64s, by_bind: Bools) -> Bools:
        """Return True for arrows that can lead to what starts then. What a bind ties must start later than its source:
        at the same time Perfetto sees complete events before async ones, and what it sees first cannot be an end."""
        starts_ns = self._spans.start_ns[sources]
        return np.asarray((starts_ns < targets_ns) | ((starts_ns == targets_ns) & ~by_bind))
