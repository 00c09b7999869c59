"""Finds the stages of requests that batches serve: queue, prefill, decode and stalls.

Prefill and decode are stages of generations. A generation is a request whose spans have `gen_ai` attributes, or a
request with a streamed answer and several batches of one name. Other requests have `first batch` and `later batches`.

The prefill steps make the first token, and all later steps are the decode. A stall is a time between two batches that
is at least as long as the request's median step. If an engine records several batches per step, the longest batch with
weights represents the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import sqrt
from typing import NamedTuple

import numpy as np

from instrument.recording.metric_definitions import GENERATION, has_gen_ai_names
from instrument.recording.spans import BATCH_WEIGHTS, FIRST_ITEM, ITEMS, AttributeValue, Site, Span
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.indices import NONE, Groups, find_group_starts, make_mask, number_combinations, rank_distinct
from instrument.trace.intervals import FARTHEST, select_successive
from instrument.trace.joined import THOUSANDTHS, Joined
from instrument.trace.ledger import QUEUE, STALL, Intervals, find_batches_and_gaps

PREFILL, DECODE = "prefill", "decode"
FIRST_BATCH, LATER_BATCHES = "first batch", "later batches"
"""The names of the two stages of a request that generates no tokens."""

STALLED_BY = "instrument.stalled_by"
"""The attribute that names the longest-running batches of a stall."""

STEPS = "instrument.decode.steps"

LATER_STEPS = "instrument.later_batches.steps"

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
"""The metric of each stage's time in seconds, for generations (True) and for other requests (False)."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of the request with the index `place`. A stage is a begin and an end in ns.

    `steps` is the number of steps after the prefill. If a request generates no tokens, `prefill` is its first batch and
    `decode` its later batches.
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

    `kinds` has the kinds of steps in earlier requests. The call updates `kinds`.
    """
    batches, between = find_batches_and_gaps(trace, joined)
    is_queue = between.row == 0
    edges = zip(between.start_ns[is_queue].tolist(), between.end_ns[is_queue].tolist(), strict=True)
    queues = dict(zip(between.request[is_queue].tolist(), edges, strict=True))
    unserved = np.setdiff1d(np.array(list(queues), dtype=np.int64), batches.request)
    unserved = unserved[~trace.clipped[joined.rows[unserved]]]
    # Requests are generations by a rule or an attribute.
    are_generations = trace.are_of_sites([has_gen_ai_names(dict(site.attributes)) for site in trace.sites])
    rows = [np.flatnonzero(are_generations), *(trace.attributes.rows_with_attribute(name) for name in GENERATION)]
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
        says_weight=np.isin(batches.row, trace.attributes.rows_with_attribute(BATCH_WEIGHTS)),
    )
    kinds = StepKinds() if kinds is None else kinds
    kinds.learn_from_batches(parts)
    is_said = np.isin(joined.served.batch, trace.attributes.rows_with_attribute(BATCH_WEIGHTS))
    kinds.learn_least_weights(names, of_names[trace.site[joined.served.batch[is_said]]], joined.served.weight[is_said])
    steps = find_steps(parts, kinds.find_kinds_by_name())
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
    counts = count_prefills(parts, steps, sent_ns, kinds.least)
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


def _list_longest_batch_names(trace: Columns, joined: Joined, times: Sequence[tuple[int, int]]) -> Iterator[str]:
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
    """Return spans for the stages of requests, by the request's row.

    The spans are children of the request, on its thread and task. Their ids follow the largest id of the trace.
    """
    all_stages = find_stages(trace, joined) if all_stages is None else all_stages
    number = int(max(trace.span_id.max(initial=0), trace.parent_id.max(initial=0))) + 1
    spans: dict[int, list[Span]] = {}
    stalled_by = _list_longest_batch_names(trace, joined, [stall for item in all_stages for stall in item.stalls])
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


# Kinds of steps


class BatchSeries(NamedTuple):
    """Series of batches. A series has the batches of one name and thread that serve one request. `number` is the series
    of each batch. `order` has the batches by series. `spent_ns` is the total time of a series."""

    number: Int64s
    order: Int64s
    first: Int64s
    last: Int64s
    size: Int64s
    spent_ns: Int64s


@dataclass(frozen=True)
class Parts:
    """The batches of requests, ordered by request and time. `first` is the first batch of each request. `name` is an
    index into `names`.

    `weight` is the weight of the request in the batch. The weights are equal if the batch has none.
    """

    names: Sequence[str]
    first: Int64s
    request: Int64s
    name: Int64s
    thread_id: Int64s
    start_ns: Int64s
    end_ns: Int64s
    weight: Int64s
    says_weight: Bools

    @cached_property
    def series(self) -> BatchSeries:
        number, first = number_combinations(self.request, self.name, rank_distinct(self.thread_id)[1])
        order, size = np.argsort(number, kind="stable"), np.bincount(number)
        starts = np.cumsum(size) - size
        spent_ns = np.add.reduceat((self.end_ns - self.start_ns)[order], starts)
        return BatchSeries(number, order, first, order[starts + size - 1], size, spent_ns)


class StepKinds:
    """The kinds of engine steps, learned from requests. A kind is a group of batch names.

    Two names are of one kind if their batches alternate in at least half of the requests. Only requests with several
    batches of either name count. Without such requests, names are of one kind if their weights are equal, or if one of
    them has no weights.
    """

    def __init__(self) -> None:
        self._turns, self._counts, self._alike, self._unlike = (Counter[tuple[str, str]]() for _ in range(4))
        self._spent_ns, self._weighed = Counter[str](), set[str]()
        self.least = dict[str, int]()
        """The smallest weight in any batch with weights, by the batch's name."""

    def learn_from_batches(self, parts: Parts) -> None:
        names, series = parts.names, parts.series
        name = parts.name[series.first]
        spent_ns = Groups(name, len(names)).sum_by_group(series.spent_ns).tolist()
        self._spent_ns.update({names[place]: spent_ns[place] for place in np.unique(name).tolist()})
        self._weighed.update(names[place] for place in np.unique(parts.name[parts.says_weight]).tolist())
        # The batches of each request and name: the first one, the last one, and the most of one thread.
        pair, some = number_combinations(parts.request[series.first], name)
        groups = Groups(pair, len(some))
        first, last = groups.min_by_group(series.first, 0), groups.max_by_group(series.last, 0)
        requests, name, most = parts.request[first], name[some], groups.max_by_group(series.size, 0)
        starts, lasts = parts.start_ns[first], parts.start_ns[last]
        says, weights = parts.says_weight[first], parts.weight[first]
        for distance in range(1, int(np.bincount(requests).max(initial=1))):
            earlier = np.flatnonzero(requests[:-distance] == requests[distance:])
            later = earlier + distance
            has_turns = np.maximum(most[earlier], most[later]) > 1
            take_turns = (starts[earlier] < lasts[later]) & (starts[later] < lasts[earlier])
            says_either = says[earlier] | says[later]
            is_alike = (weights[earlier] == weights[later]) | (says[earlier] != says[later])
            for counter, is_counted in (
                (self._counts, has_turns),
                (self._turns, has_turns & take_turns),
                (self._alike, ~has_turns & says_either & is_alike),
                (self._unlike, ~has_turns & says_either & ~is_alike),
            ):
                pairs, counts = np.unique(
                    np.stack([name[earlier], name[later]])[:, is_counted], axis=1, return_counts=True
                )
                for (a, b), count in zip(pairs.T.tolist(), counts.tolist(), strict=True):
                    counter[names[a], names[b]] += count

    def learn_least_weights(self, names: Sequence[str], name: Int64s, weight: Int64s) -> None:
        least = Groups(np.where(weight > 0, name, NONE), len(names)).min_by_group(weight, FARTHEST)
        for place in np.flatnonzero(least < FARTHEST).tolist():
            self.least[names[place]] = min(self.least.get(names[place], FARTHEST), int(least[place]))

    def find_kinds_by_name(self) -> Mapping[str, tuple[str, str]]:
        counts, turns = self._counts, self._turns
        kind = {name: name for name in self._spent_ns}
        for a, b in sorted({*counts, *self._alike}):
            is_one_step = turns[a, b] * 2 >= counts[a, b] if counts[a, b] else (a, b) not in self._unlike
            if is_one_step and kind[a] != kind[b]:
                old_kind = kind[b]
                kind.update({name: kind[a] for name, its_kind in kind.items() if its_kind == old_kind})
        leads: dict[str, str] = {}
        for name in sorted(kind, key=lambda name: (name in self._weighed, self._spent_ns[name], name)):
            leads[kind[name]] = name
        return {name: (its_kind, leads[its_kind]) for name, its_kind in kind.items()}


# Steps


APART = 8
"""The minimum weight of a batch with a prompt, as a multiple of the lightest batch's weight."""

LEAST_CHUNKS = 2
"""The number of steps above which a request's steps can be equally heavy chunks of one prompt."""

CLEARLY = 2
"""The ratio of two batches' weights above which one batch is clearly heavier than the other."""


@dataclass(frozen=True)
class Steps:
    """The steps of each request, ordered by time. `first` is the first step of each request.

    `lead` is the index of the batch that represents the step. A step ends with its last batch.
    """

    request: Int64s
    first: Int64s
    lead: Int64s
    end_ns: Int64s

    @cached_property
    def steps_per_request(self) -> Int64s:
        return np.diff(self.first, append=len(self.lead))

    @cached_property
    def number_in_request(self) -> Int64s:
        return np.arange(len(self.lead)) - np.repeat(self.first, self.steps_per_request)


def find_steps(parts: Parts, kinds: Mapping[str, tuple[str, str]]) -> Steps:
    """Return the engine steps that served each request. `kinds` maps a batch name to its kind, and to the name of the
    batches that represent steps.

    Threads that run batches of that name at once, in equal numbers, are workers of the same steps. Other threads run
    different steps.
    """
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kind for kind, _ in kinds.values()))}
    kind_of_name = np.array([numbers[kinds[name][0]] if name in kinds else 0 for name in parts.names], dtype=np.int64)
    is_lead = np.array([kinds.get(name, ("", name))[1] == name for name in parts.names], dtype=np.bool_)
    series = parts.series
    first, last, size, name = series.first, series.last, series.size, parts.name[series.first]
    group, some = number_combinations(parts.request[first], kind_of_name[name])
    # A request's leading name of each kind, else its first name of that kind.
    order = np.lexsort((first, ~is_lead[name], group))
    candidates = np.flatnonzero(name == name[order[find_group_starts(group[order])]][group])
    candidates = candidates[np.lexsort((first[candidates], -series.spent_ns[candidates], group[candidates]))]
    longest = candidates[find_group_starts(group[candidates])][group]
    is_at_once = (parts.start_ns[first] < parts.end_ns[last[longest]]) & (
        parts.start_ns[first[longest]] < parts.end_ns[last]
    )
    is_worker = is_at_once & (size == size[longest]) & (longest != np.arange(len(first)))
    takes_part = make_mask(candidates, len(first)) & ~is_worker
    group_of, lead = group[series.number], np.flatnonzero(takes_part[series.number])
    in_turns = (np.bincount(group[takes_part]) > 1)[group_of[lead]]
    if in_turns.any():
        turns = lead[in_turns]
        turns = turns[select_successive(group_of[turns], parts.start_ns[turns], parts.end_ns[turns])]
        lead = np.concatenate([lead[~in_turns], turns])
    lead = lead[np.lexsort((lead, group_of[lead]))]
    counts, ends = np.bincount(group_of[lead]), parts.end_ns[lead]
    # A series of as many batches as steps has one batch in each step.
    aligned = (size == counts[group])[series.number[series.order]]
    begins = np.cumsum(counts) - counts
    ordinal = np.arange(len(series.order)) - np.repeat(np.cumsum(size) - size - begins[group], size)
    np.maximum.at(ends, ordinal[aligned], parts.end_ns[series.order[aligned]])
    appears = Groups(group, len(some)).min_by_group(first, 0)
    request = parts.request[lead]
    order = np.lexsort((appears[group_of[lead]], parts.start_ns[lead], request))
    request = request[order]
    return Steps(request, find_group_starts(request), lead[order], ends[order])


def count_prefills(parts: Parts, steps: Steps, sent_ns: Int64s, least: Mapping[str, int]) -> Int64s:
    """Return, per request, the number of steps that make its first token.

    `least` is the least weight of each batch name. If all steps of a request weigh at least `APART` times this weight,
    all steps count. `sent_ns` has the time at which each request sent the first part of a streamed answer, or
    `FARTHEST`.
    """
    counts = np.ones(len(steps.first), dtype=np.int64)
    weights, names, ordinal = parts.weight[steps.lead], parts.name[steps.lead], steps.number_in_request
    is_first = ordinal == 0
    lightest = np.maximum(np.minimum.reduceat(weights, steps.first), 1)
    most = np.maximum.reduceat(weights, steps.first)
    is_called_otherwise = names != np.repeat(names[steps.first], steps.steps_per_request)
    first_other = np.minimum.reduceat(np.where(is_called_otherwise, ordinal, FARTHEST), steps.first)
    are_alike = most <= lightest
    are_named = are_alike & (first_other < FARTHEST)
    counts[are_named] = first_other[are_named]
    past = np.add.reduceat(steps.end_ns <= np.repeat(sent_ns, steps.steps_per_request), steps.first, dtype=np.int64)
    has_sent = are_alike & ~are_named & (past < steps.steps_per_request)  # else the answer was sent at once
    counts[has_sent] = np.maximum(past, 1)[has_sent]
    later_least = np.minimum.reduceat(np.where(is_first, FARTHEST, weights), steps.first)
    later_most = np.maximum.reduceat(np.where(is_first, -1, weights), steps.first)
    # If all later steps have equal weights, the first step alone is the prefill.
    unlike = np.flatnonzero(~are_alike & (later_least != later_most))
    pieces = zip(unlike.tolist(), steps.first[unlike].tolist(), steps.steps_per_request[unlike].tolist(), strict=True)
    for request, first, count in pieces:
        counts[request] = _count_prefills(weights[first : first + count].tolist())
    least_of_all = np.array([least.get(name, 0) for name in parts.names], dtype=np.int64)[names[steps.first]]
    says_weight = np.minimum.reduceat(parts.says_weight[steps.lead], steps.first)
    is_prompt = says_weight & (least_of_all > 0) & (lightest >= APART * least_of_all)
    counts[is_prompt] = steps.steps_per_request[is_prompt]
    return counts


def _count_prefills(weights: Sequence[int]) -> int:
    least, most = max(min(weights), 1), max(weights)
    count = 0
    if (
        len(weights) > LEAST_CHUNKS
        and least >= APART * THOUSANDTHS
        and len({*weights[:-1]}) == 1
        and weights[-1] < most
    ):
        return len(weights)  # a prompt in chunks with one token
    if most >= APART * least:
        between = sqrt(most) * sqrt(least)
        count = next((place for place, weight in enumerate(weights) if weight <= between), len(weights))
    # The last chunk of a prompt may be small, and a later step with several tokens is no prompt.
    while len(later := sorted(weights[count + 1 :])) > (count > 0):
        if weights[count] <= CLEARLY * later[(len(later) - 1) // 2]:
            break
        count += 1
    return max(count, 1)
