"""Stages of requests that batches serve: queue, prefill, decode and stalls, as the ledger has them.

A request that one batch serves has a queue alone. Of one that several serve, the first make its first token, the
prefill: those that take more of the weight than the least that any takes, such as the tokens of a prompt, or where all
take alike those that are called differently from the later ones, else the first one. The rest is the decode. A stall
is a time between two batches that is at least as long as half of its batches are: what is shorter is routine. It says
which batches, of others then, took most of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from instrument.recording.generations import GENERATION
from instrument.recording.spans import AttributeValue, Site, Span
from instrument.trace.columns import Trace
from instrument.trace.joined import Joined
from instrument.trace.ledger import QUEUE, STALL, served_stretches

PREFILL, DECODE = "prefill", "decode"

STALLED_BY = "instrument.stalled_by"
"""The attribute of a stall: what the batches are called that took most of it, if any did."""

MOST_STALLS = 16
"""Stalls of a request that are told: the longest."""

SITES: Mapping[str, Site] = {
    name: Site(name, "phase", attributes=(("instrument.derived", True),)) for name in (QUEUE, PREFILL, DECODE, STALL)
}

LATENCIES = {
    QUEUE: "gen_ai.latency.time_in_queue",
    PREFILL: "gen_ai.latency.time_in_model_prefill",
    DECODE: "gen_ai.latency.time_in_model_decode",
}
"""What vLLM and SGLang call these times, in s, and what is proposed as OpenTelemetry's names."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Those of the request at a place: begin and end of each, in order of time.

    `steps` are the batches after the prefill, of which each is taken to make a token.
    """

    place: int
    queue: tuple[int, int] | None
    prefill: tuple[int, int] | None
    decode: tuple[int, int] | None
    steps: int
    stalls: tuple[tuple[int, int], ...]

    def told(self) -> Iterator[tuple[str, int, int]]:
        """The name, begin and end of each that there is."""
        for name, one in ((QUEUE, self.queue), (PREFILL, self.prefill), (DECODE, self.decode)):
            if one is not None:
                yield name, *one
        for one in self.stalls:
            yield STALL, *one


def stages(trace: Trace, joined: Joined) -> list[Stages]:
    """The stages of each request that a batch serves, and that is there from its begin to its end."""
    batches, between = served_stretches(trace, joined)
    weights, sites = joined.served.weight[batches.pair], trace.site[batches.row]
    queues: dict[int, tuple[int, int]] = {}
    gaps: dict[int, list[tuple[int, int]]] = {}
    for place, what, start_ns, end_ns in zip(
        *(column.tolist() for column in (between.request, between.row, between.start_ns, between.end_ns)), strict=True
    ):
        if what == 0:
            queues[place] = start_ns, end_ns
        elif what == 1:
            gaps.setdefault(place, []).append((start_ns, end_ns))
    firsts = np.flatnonzero(np.diff(batches.request, prepend=-1))
    found = []
    for its in np.split(np.arange(len(batches.request)), firsts[1:]) if len(firsts) else ():
        place = int(batches.request[its[0]])
        if trace.clipped[joined.rows[place]]:
            continue
        lengths = batches.end_ns[its] - batches.start_ns[its]
        long_ns = int(np.sort(lengths)[len(its) // 2])
        stalls = sorted(gaps.get(place, ()), key=lambda gap: gap[0] - gap[1])[:MOST_STALLS]
        notable = tuple(sorted(gap for gap in stalls if gap[1] - gap[0] >= long_ns))
        prefill = decode = None
        first = _prefills(weights[its].tolist(), sites[its].tolist())
        if len(its) > 1:
            begin_ns, until_ns = int(batches.start_ns[its[0]]), int(batches.end_ns[its[:first]].max())
            prefill, last_ns = (begin_ns, until_ns), int(batches.end_ns[its].max())
            decode = (until_ns, last_ns) if last_ns > until_ns else None
        found.append(Stages(place, queues.get(place), prefill, decode, len(its) - first, notable))
    return found


def _prefills(weights: Sequence[int], sites: Sequence[int]) -> int:
    """How many of a request's batches, of which there are these in order, make its first token."""
    least = min(weights)
    if max(weights) > least:
        return max(weights.index(least), 1)
    return next((place for place, site in enumerate(sites) if site != sites[0]), 1)


class _Batches:
    """All batches by their begins, to be asked which of them took most of a time."""

    def __init__(self, trace: Trace, joined: Joined) -> None:
        rows = np.unique(joined.served.batch)
        rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
        self._starts, self._ends = trace.start_ns[rows], trace.end_ns[rows]
        self._reach = np.maximum.accumulate(self._ends) if len(rows) else self._ends
        self._names = [trace.sites[site].name for site in trace.site[rows].tolist()]

    def taking_most(self, start_ns: int, end_ns: int) -> str:
        """Their name, "" where there were none."""
        first = int(np.searchsorted(self._reach, start_ns, side="right"))
        sums: dict[str, int] = {}
        for at in range(first, int(np.searchsorted(self._starts, end_ns))):
            ran_ns = min(int(self._ends[at]), end_ns) - max(int(self._starts[at]), start_ns)
            if ran_ns > 0:
                sums[self._names[at]] = sums.get(self._names[at], 0) + ran_ns
        return max(sums, key=lambda name: (sums[name], name), default="")


def stage_spans(trace: Trace, joined: Joined, first_id: int = 0) -> Mapping[int, list[Span]]:
    """Spans of the stages by the row of their request, below which they hang, on the thread and task of that.

    They are numbered from `first_id` on, or from the first number that no span of the trace has.
    """
    number = first_id or int(max(trace.span_id.max(initial=0), trace.parent_id.max(initial=0))) + 1
    found: dict[int, list[Span]] = {}
    batches = _Batches(trace, joined)
    for one in stages(trace, joined):
        row = int(joined.rows[one.place])
        span_id, root_id, thread_id, task_id = (
            int(column[row]) for column in (trace.span_id, trace.root_id, trace.thread_id, trace.task_id)
        )
        given = trace.attributes[row]
        generation: dict[str, AttributeValue] = {name: given[name] for name in GENERATION if name in given}
        for name, start_ns, end_ns in one.told():
            length_ns = end_ns - start_ns
            span = Span(
                SITES[name], number, span_id, root_id, thread_id, task_id, start_ns, end_ns, length_ns, length_ns
            )
            span.attributes = generation
            if name in LATENCIES:
                span.attributes = {**generation, LATENCIES[name]: length_ns / 1e9}
            elif by := batches.taking_most(start_ns, end_ns):
                span.attributes = {**generation, STALLED_BY: by}
            found.setdefault(row, []).append(span)
            number += 1
    return found
