"""Metrics of requests that batches serve, over all processes: by the ledger, for whoever sees all of them.

Each request is counted once, by whoever hands it in. The times of one that streams its answer are those of its stream,
else the first token comes with the end of its prefill, and one token with each batch after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from instrument.recording.distributions import Exemplar, Labels, Metric
from instrument.recording.generations import (
    BATCH_SIZE,
    FIRST_TOKEN,
    ONE,
    OUTPUT_TOKEN,
    QUEUE_DURATION,
    REQUEST_DURATION,
    TOLD,
    GenerationTimes,
    generation_labels,
    token_times,
)
from instrument.trace.columns import Trace
from instrument.trace.forest import NONE
from instrument.trace.joined import Joined
from instrument.trace.stages import Stages, stages

IdsOf = Callable[[int], tuple[int, int] | None]
"""The trace and the span of a request by its row, as a collector has them; None of one that it has not."""


class RequestMetrics:
    """Counts requests and batches as they are handed in."""

    def __init__(self) -> None:
        self._generations = GenerationTimes()

    def count(self, trace: Trace, joined: Joined, ids_of: IdsOf = lambda row: None) -> None:
        """Count what the trace has of requests from their begin to their end, and its batches: each one time."""
        now_ns = time.monotonic_ns()
        labels_of: dict[int, Labels] = {}
        for one in stages(trace, joined):
            row = int(joined.rows[one.place])
            labels = labels_of[one.place] = _labels(trace, row)
            ids = ids_of(row)
            for name, its_labels, value_ns in _told(trace, row, one, labels):
                self._generations.add(name, its_labels, value_ns)
                if ids is not None:
                    at = Exemplar(value_ns, int(trace.end_ns[row]), now_ns, *ids)
                    self._generations.note(name, its_labels, at)
        self._count_batches(trace, joined, labels_of)

    def _count_batches(self, trace: Trace, joined: Joined, labels_of: dict[int, Labels]) -> None:
        """By the name of the batch, and by what all requests in it have in common."""
        served = joined.served
        firsts = np.flatnonzero(np.diff(served.batch, prepend=NONE))
        for its in np.split(np.arange(len(served.batch)), firsts[1:]) if len(firsts) else ():
            row = int(served.batch[its[0]])
            if trace.clipped[row]:
                continue
            known = [labels_of[place] for place in dict.fromkeys(served.request[its].tolist()) if place in labels_of]
            shared = [pair for pair in known[0] if all(pair in others for others in known)] if known else []
            site = trace.sites[trace.site[row]]
            self._generations.add(BATCH_SIZE, (("instrument.span.name", site.name), *shared), len(its) * ONE)

    def metrics(self) -> list[Metric]:
        """All that has been counted up to now."""
        return [one for one in self._generations.metrics(*TOLD) if one.series]


def _labels(trace: Trace, row: int) -> Labels:
    """What tells the requests of an endpoint and a model from others."""
    site = trace.sites[trace.site[row]]
    route = dict(site.attributes).get("http.route")
    known: Labels = (("http.route", route),) if isinstance(route, str) else (("instrument.span.name", site.name),)
    return generation_labels(known, trace.attributes[row])


def _told(trace: Trace, row: int, one: Stages, labels: Labels) -> list[tuple[str, Labels, int]]:
    wall_ns, error = int(trace.total_ns[row]), int(trace.error[row])
    queued = [] if one.queue is None else [(QUEUE_DURATION, labels, one.queue[1] - one.queue[0])]
    if one.prefill is None:
        return queued
    if error != NONE:
        return [*queued, (REQUEST_DURATION, (*labels, ("error.type", trace.errors[error])), wall_ns)]
    found = [*queued, (REQUEST_DURATION, labels, wall_ns)]
    times = token_times(trace.attributes[row])
    if times is None:
        decode_ns = one.decode[1] - one.decode[0] if one.decode is not None else 0
        times = one.prefill[1] - int(trace.start_ns[row]), decode_ns // one.steps if one.steps else None
    found.append((FIRST_TOKEN, labels, times[0]))
    return found if times[1] is None else [*found, (OUTPUT_TOKEN, labels, times[1])]
