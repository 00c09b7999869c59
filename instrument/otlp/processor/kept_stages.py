"""The stages of kept requests as spans: queue, prefill, decode and stalls, of requests that lasted however long.

They are those that `instrument.trace.stages` finds in a recording, by what is remembered of batches and of a request's
own work. They are told once all processes have been read to the request's end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from instrument.otlp.packing import Ids
from instrument.otlp.processor.keyed_requests import KeyedRequests
from instrument.otlp.processor.known_request import KeyedRequest
from instrument.otlp.processor.served_requests import ServedRequest, pairs_of, trace_of_served
from instrument.recording.generations import GENERATION
from instrument.recording.remote_parents import RemoteParent
from instrument.recording.spans import OUTCOME, Span
from instrument.trace.stages import stage_spans

LOOKED_NS = 10**9
"""So long after a request was kept all recordings have been read to its end, and what is below it has come."""

LATEST_NS = 10**10
"""So long it waits for recordings that are not read at the moment."""

DERIVED = 3 << 62
STAGES_BITS = 5
"""Spans of stages have numbers that no recorder gives and no device interval has, and that are the same whoever derives
them: those of their requests and of their places among the stages of these."""


@dataclass(slots=True)
class _Kept:
    """A request that was kept, and its own span."""

    request: KeyedRequest
    first: Span
    remote: RemoteParent | None
    since_ns: int
    is_new: bool = True


class KeptStages:
    """Those of one process's requests. Used by one thread."""

    def __init__(self, requests: KeyedRequests) -> None:
        self._requests = requests
        self._kept: dict[int, _Kept] = {}
        self.untold = 0
        """Kept requests whose stages are not told: what served them had been forgotten, or was read by another one."""

    def __len__(self) -> int:
        """How many requests wait for their stages."""
        return len(self._kept)

    def add(self, request: KeyedRequest, first: Span, remote: RemoteParent | None) -> None:
        """A request is kept, whose own span this is, in a tree that a caller called."""
        if request.work is None:
            self.untold += 1
        else:
            self._kept[first.span_id] = _Kept(request, first, remote, time.monotonic_ns())

    def add_late(self, spans: Sequence[Span], ids: Ids) -> None:
        """More has come of a request's own tree."""
        kept = self._kept.get(spans[0].root_id)
        if kept is not None:
            self._requests.add(kept.request, spans, ids, is_own=True)

    def due(self, *, at_once: bool = False) -> list[list[Span]]:
        """The stages of those requests that have waited long enough, or of all but those that have just come."""
        now_ns, found = time.monotonic_ns(), list[_Kept]()
        waits_ns = LATEST_NS if self._requests.are_behind else LOOKED_NS
        for root_id, one in list(self._kept.items()):
            if not one.is_new and (at_once or now_ns - one.since_ns >= waits_ns):
                found.append(self._kept.pop(root_id))
            one.is_new = False
        return self._told(sorted(found, key=lambda one: one.first.start_ns)) if found else []

    def _told(self, kept: Sequence[_Kept]) -> list[list[Span]]:
        batches, told = self._requests.batches, []
        served: list[tuple[_Kept, ServedRequest]] = []
        of_keys = batches.of(dict.fromkeys(key for one in kept for key in one.request.keys))
        for one in kept:
            if one.request.start_ns < self._requests.known_since_ns or not batches.lost.isdisjoint(one.request.keys):
                self.untold += 1
            elif len(pairs := pairs_of(one.request, of_keys, self._requests)) or _is_lost(one.first):
                work = [*(one.request.work or ()), *one.request.done_elsewhere()]  # some twice, which alters nothing
                its = one.request.start_ns, one.request.end_ns, work
                handing = self._requests.handing_over(one.request)
                of_site = {name: value for name, value in one.first.site.attributes if name in GENERATION}
                said = {**of_site, **one.first.attributes}
                served.append((one, ServedRequest(*its, pairs, said, handing, _is_lost(one.first))))
        if served:
            self._requests.kinds.weigh(*batches.weights())
            trace, joined = trace_of_served([its for _, its in served], batches)
            for place, spans in sorted(stage_spans(trace, joined, kinds=self._requests.kinds).items()):
                _bear(spans, served[place][0])
                told.append(spans)
        for one in kept:
            self._requests.settle(one.request)
        return told


def _is_lost(own: Span) -> bool:
    return own.error is not None or OUTCOME in own.attributes


def _bear(spans: Sequence[Span], kept: _Kept) -> None:
    """Make them spans of a request."""
    first = kept.first
    for place, span in enumerate(spans):
        span.span_id = DERIVED | (first.span_id << STAGES_BITS | place) & (1 << 62) - 1
        span.parent_id, span.root_id = first.span_id, first.root_id
        span.thread_id, span.task_id, span.remote = first.thread_id, first.task_id, kept.remote
