"""Marks on the lanes of requests, where a batch begins that serves them, each the end of an arrow from the batch.

An arrow from a request to a batch of several would be the natural one, but a slice has room for one bind id: so all
arrows of a batch begin at it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from instrument.chrome.ordered import Spans, batches
from instrument.chrome.span_events import SpanEvents
from instrument.recording.spans import BATCH_KEYS
from instrument.trace.columns import Bools, Int64s
from instrument.trace.forest import NONE
from instrument.trace.joined import join
from instrument.trace.metadata import SiteText
from instrument.trace.text import MILLI


class BatchMarks:
    """The places of `batch` and `request`, a row for each request in a batch that begins while the request goes on.

    `left_out` counts those for which the other holds.
    """

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
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

    def texts(self, of_spans: SpanEvents, of_sites: Sequence[SiteText], binds: Mapping[int, str]) -> Iterator[str]:
        """The marks, each behind a comma. `binds` are the ids of the batches by their places."""
        spans = self._spans
        heads = {place: of_spans.lane_text(place) for place in np.unique(self.request).tolist()}
        for first, end in batches(len(self.batch)):
            batch, request = self.batch[first:end], self.request[first:end]
            us, ns = np.divmod(spans.start_ns[batch], 1000)
            columns = (batch, request, spans.site[batch], spans.span_id[batch], us, ns)
            yield "".join(
                [
                    f',\n{{"ph":"n"{of_sites[site].name},"args":{{"batch":{span_id}}}{heads[its]}{at_us}{MILLI[at_ns]}'
                    f',"bind_id":"{binds[place]}","flow_in":true}}'
                    for place, its, site, span_id, at_us, at_ns in zip(
                        *(column.tolist() for column in columns), strict=True
                    )
                ]
            )
