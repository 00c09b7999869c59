"""Finds the stages of requests that batches serve: queue, prefill, decode and stalls.

Prefill and decode are stages of generations. A request is a generation if its route, rule or attributes have `gen_ai`.
A request with a streamed answer and several batches of one name is also a generation. Other requests have the stages
`first batch` and `later batches`.

An engine may record several batches per step: for scheduling, execution and output, and in each worker. The longest
batch with weights represents the step.

The prefill steps make the first token, and all later steps are the decode. A stall is a time between two batches that
is at least as long as the request's median step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from instrument.recording.metric_definitions import GENERATION, has_generation_names
from instrument.recording.spans import BATCH_WEIGHTS, FIRST_ITEM, ITEMS, AttributeValue, Site, Span
from instrument.trace.columns import Columns, Int64s
from instrument.trace.indices import find_group_starts, number_combinations
from instrument.trace.intervals import FARTHEST
from instrument.trace.joined import Joined
from instrument.trace.ledger import QUEUE, STALL, Intervals, find_served_intervals
from instrument.trace.request_steps import Parts, StepKinds, count_prefills, find_steps

PREFILL, DECODE = "prefill", "decode"
FIRST_BATCH, LATER_BATCHES = "first batch", "later batches"
"""The names of the two stages of a request that generates no tokens."""

STALLED_BY = "instrument.stalled_by"
"""The attribute of a stall with the name of the batches that took most of it."""

STEPS = "instrument.decode.steps"
"""The attribute of a decode span for its number of steps. A step makes one or more tokens."""

LATER_STEPS = "instrument.later_batches.steps"
"""The attribute for the number of steps in the stage `later batches`."""

MOST_STALLS = 16
"""The maximum number of stalls reported per request. The longest are reported."""

SITES: Mapping[str, Site] = {
    name: Site(name, "phase", attributes=(("instrument.derived", True),))
    for name in (QUEUE, PREFILL, DECODE, FIRST_BATCH, LATER_BATCHES, STALL)
}

LATENCIES = {
    True: {
        QUEUE: "gen_ai.latency.time_in_queue",
        PREFILL: "gen_ai.latency.time_in_model_prefill",
        DECODE: "gen_ai.latency.time_in_model_decode",
    },
    False: {
        QUEUE: "instrument.latency.time_in_queue",
        FIRST_BATCH: "instrument.latency.time_in_first_batch",
        LATER_BATCHES: "instrument.latency.time_in_later_batches",
    },
}
"""The metric of each stage's time in seconds, for generations (True) and for other requests (False). The names for
generations are those of vLLM and SGLang."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of the request with the index `place`, each as begin and end in ns.

    `steps` is the number of steps after the prefill. For a request that is no generation, `prefill` is its first batch
    and `decode` its later batches.
    """

    place: int
    queue: tuple[int, int] | None
    prefill: tuple[int, int] | None
    decode: tuple[int, int] | None
    steps: int
    stalls: tuple[tuple[int, int], ...]
    is_generation: bool

    def list_named_intervals(self) -> Iterator[tuple[str, int, int]]:
        names = LATENCIES[self.is_generation]
        for name, interval in zip(names, (self.queue, self.prefill, self.decode), strict=True):
            if interval is not None:
                yield name, *interval
        for interval in self.stalls:
            yield STALL, *interval


def find_stages(trace: Columns, joined: Joined, kinds: StepKinds | None = None) -> list[Stages]:
    """Return the stages of each complete request that a batch serves. A request that ended in the queue has only a
    queue.

    `kinds` has the kinds of steps that were learned earlier, and learns from these requests.
    """
    batches, between = find_served_intervals(trace, joined)
    is_queue = between.row == 0
    edges = zip(between.start_ns[is_queue].tolist(), between.end_ns[is_queue].tolist(), strict=True)
    queues = dict(zip(between.request[is_queue].tolist(), edges, strict=True))
    unserved = np.setdiff1d(np.array(list(queues), dtype=np.int64), batches.request)
    unserved = unserved[~trace.clipped[joined.rows[unserved]]]
    # Requests are generations by a rule or an attribute.
    are_generations = trace.are_of_sites([has_generation_names(dict(site.attributes)) for site in trace.sites])
    rows = [np.flatnonzero(are_generations), *(trace.attributes.having(name) for name in GENERATION)]
    generating = set(joined.of[np.concatenate(rows)].tolist())
    given_up = [Stages(place, queues[place], None, None, 0, (), place in generating) for place in unserved.tolist()]
    if not len(batches.request):
        return given_up
    names = sorted({site.name for site in trace.sites})
    numbers = {name: number for number, name in enumerate(names)}
    of_names = np.array([numbers[site.name] for site in trace.sites], dtype=np.int64)
    first = find_group_starts(batches.request)
    place = batches.request[first]
    parts = Parts(
        names=names,
        first=first,
        request=np.repeat(np.arange(len(first)), np.diff(first, append=len(batches.request))),
        name=of_names[trace.site[batches.row]],
        thread_id=trace.thread_id[batches.row],
        start_ns=batches.start_ns,
        end_ns=batches.end_ns,
        weight=joined.served.weight[batches.pair],
        says_weight=np.isin(batches.row, trace.attributes.having(BATCH_WEIGHTS)),
    )
    kinds = StepKinds() if kinds is None else kinds
    kinds.learn(parts)
    is_said = np.isin(joined.served.batch, trace.attributes.having(BATCH_WEIGHTS))
    kinds.weigh(names, of_names[trace.site[joined.served.batch[is_said]]], joined.served.weight[is_said])
    steps = find_steps(parts, kinds.kind_by_name())
    # The time at which each request sent the first part of its answer, `FARTHEST` without a streamed answer.
    values = (trace.attributes.values(name, joined.rows[place]) for name in (FIRST_ITEM, ITEMS))
    begun_ns = trace.start_ns[joined.rows[place]].tolist()
    first_ns = [
        min(start_ns + after_ns, FARTHEST)
        if isinstance(after_ns, int) and isinstance(items, int) and 0 <= after_ns < FARTHEST and items > 1
        else FARTHEST
        for start_ns, after_ns, items in zip(begun_ns, *values, strict=True)
    ]
    sent_ns = np.array(first_ns, dtype=np.int64)
    counts = count_prefills(parts, steps, sent_ns.__getitem__, kinds.least)
    # So is a streamed answer that several steps of one name served.
    groups, firsts = number_combinations(steps.request, parts.name[steps.lead])
    several = steps.request[firsts][np.bincount(groups, minlength=len(firsts)) > 1]
    has_loop = np.isin(steps.request[steps.first], several)
    is_generation = np.isin(place, list(generating)) | ((sent_ns < FARTHEST) & has_loop)
    is_whole = ~trace.clipped[joined.rows[place]]
    is_prefill = steps.number_in_request < np.repeat(counts, steps.steps_per_request)
    prefilled_ns = np.maximum.reduceat(np.where(is_prefill, steps.end_ns, -FARTHEST), steps.first)
    columns = (
        place, parts.start_ns[first], prefilled_ns, np.maximum.reduceat(parts.end_ns, first),
        steps.steps_per_request, counts, is_generation, is_whole,
    )  # fmt: skip
    lengths = (parts.end_ns - parts.start_ns)[steps.lead]
    median_ns = lengths[np.lexsort((lengths, steps.request))][steps.first + steps.steps_per_request // 2]
    stalls = _find_stalls(between, place, median_ns)
    result = given_up
    for request, start_ns, until_ns, last_ns, count, of_prefill, generates, is_complete in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        if is_complete:
            prefill = (start_ns, until_ns) if count > 1 else None
            decode = (until_ns, last_ns) if count > 1 and last_ns > until_ns else None
            later = count - of_prefill
            request_stalls = stalls.get(request, ())
            result.append(Stages(request, queues.get(request), prefill, decode, later, request_stalls, generates))
    return result


def _find_stalls(between: Intervals, place: Int64s, least_ns: Int64s) -> Mapping[int, tuple[tuple[int, int], ...]]:
    """Return the longest stalls of the requests in `place`, without stalls shorter than `least_ns`."""
    lengths = between.end_ns - between.start_ns
    rows = np.flatnonzero(between.row == 1)
    rows = rows[lengths[rows] >= least_ns[np.searchsorted(place, between.request[rows])]]
    rows = rows[np.lexsort((rows, -lengths[rows], between.request[rows]))]
    first = find_group_starts(between.request[rows])
    rank = np.arange(len(rows)) - np.repeat(first, np.diff(first, append=len(rows)))
    rows = rows[rank < MOST_STALLS]
    rows = rows[np.lexsort((between.end_ns[rows], between.start_ns[rows], between.request[rows]))]
    stalls: dict[int, tuple[tuple[int, int], ...]] = {}
    pairs = list(zip(between.start_ns[rows].tolist(), between.end_ns[rows].tolist(), strict=True))
    first = find_group_starts(between.request[rows])
    for begin, end in pairwise([*first.tolist(), len(rows)]):
        stalls[int(between.request[rows[begin]])] = tuple(pairs[begin:end])
    return stalls


def _name_longest(trace: Columns, joined: Joined, times: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yield the name of the batches that took most of each interval, "" if none ran."""
    rows = np.unique(joined.served.batch)
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    starts, ends = trace.start_ns[rows], trace.end_ns[rows]
    names = [trace.sites[site].name for site in trace.site[rows].tolist()]
    begins, finishes = np.array(times, dtype=np.int64).reshape(-1, 2).T
    firsts = np.searchsorted(np.maximum.accumulate(ends), begins, side="right")
    columns = (firsts, np.searchsorted(starts, finishes), begins, finishes)
    for first, last, start_ns, end_ns in zip(*(column.tolist() for column in columns), strict=True):
        sums: dict[str, int] = {}
        for at in range(first, last):
            ran_ns = min(int(ends[at]), end_ns) - max(int(starts[at]), start_ns)
            if ran_ns > 0:
                sums[names[at]] = sums.get(names[at], 0) + ran_ns
        yield max(sums, key=lambda name: (sums[name], name), default="")


def make_stage_spans(
    trace: Columns, joined: Joined, all_stages: Sequence[Stages] | None = None
) -> Mapping[int, list[Span]]:
    """Return spans for stages, by default those of all requests, by the request's row. The spans are children of the
    request on its thread and task. Their ids follow the largest id of the trace."""
    all_stages = find_stages(trace, joined) if all_stages is None else all_stages
    number = int(max(trace.span_id.max(initial=0), trace.parent_id.max(initial=0))) + 1
    spans: dict[int, list[Span]] = {}
    stalled_by = _name_longest(trace, joined, [stall for item in all_stages for stall in item.stalls])
    for item in all_stages:
        row = int(joined.rows[item.place])
        span_id, root_id, thread_id, task_id = (
            int(column[row]) for column in (trace.span_id, trace.root_id, trace.thread_id, trace.task_id)
        )
        attributes = trace.attributes[row]
        generation: dict[str, AttributeValue] = {name: attributes[name] for name in GENERATION if name in attributes}
        for name, start_ns, end_ns in item.list_named_intervals():
            length_ns = end_ns - start_ns
            span = Span(
                SITES[name], number, span_id, root_id, thread_id, task_id, start_ns, end_ns, length_ns, length_ns
            )
            span.attributes = generation
            if latency := LATENCIES[item.is_generation].get(name):
                span.attributes = {**generation, latency: length_ns / 1e9}
                if name in (DECODE, LATER_BATCHES):
                    steps = STEPS if item.is_generation else LATER_STEPS
                    span.attributes = {**span.attributes, steps: item.steps}
            elif by := next(stalled_by):
                span.attributes = {**generation, STALLED_BY: by}
            spans.setdefault(row, []).append(span)
            number += 1
    return spans
