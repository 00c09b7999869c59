"""Finds the engine steps that served each request, and counts the prefill steps. A step has one or several batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from instrument.trace.columns import Bools, Int64s
from instrument.trace.indices import find_group_starts
from instrument.trace.intervals import FARTHEST
from instrument.trace.joined import THOUSANDTHS

# Kinds of steps


class PartSeries(NamedTuple):
    """Series of batches, ordered by request, then by name. A series has the batches of one request, name and thread in
    order of time.

    A series is a run of indices in `order`. `spent_ns` is the total time of its batches.
    """

    order: Int64s
    first: Int64s
    size: Int64s
    request: Int64s
    name: Int64s
    spent_ns: Int64s

    @property
    def first_batches(self) -> Int64s:
        """The first batch of each series."""
        return np.asarray(self.order[self.first])

    @property
    def last_batches(self) -> Int64s:
        """The last batch of each series."""
        return np.asarray(self.order[self.first + self.size - 1])


class NamedParts(NamedTuple):
    """The batches by request and batch name: the first and the longest series, the first and the last batch."""

    first: Int64s
    longest: Int64s
    begin: Int64s
    last: Int64s


@dataclass(frozen=True)
class Parts:
    """The batches of requests, ordered by request and time. `first` is the first batch of each request. `name` is an
    index into `names`. `weight` is the request's weight in the batch, equal for all if the batch has no weights."""

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
    def series(self) -> PartSeries:
        if len(self.thread_id) and bool((self.thread_id == self.thread_id[0]).all()):
            threads, count = np.zeros(len(self.thread_id), dtype=np.int64), 1
        else:
            thread_ids, threads = np.unique(self.thread_id, return_inverse=True)
            count = len(thread_ids)
        keys = (self.request * len(self.names) + self.name) * count + threads
        order = np.argsort(keys, kind="stable")
        first = find_group_starts(keys[order])
        begin = order[first]
        counts = np.diff(first, append=len(order))
        spent_ns = np.add.reduceat((self.end_ns - self.start_ns)[order], first) if len(first) else first
        return PartSeries(order, first, counts, self.request[begin], self.name[begin], spent_ns)

    @cached_property
    def parts_by_name(self) -> NamedParts:
        runs = self.series
        first = find_group_starts(runs.request * len(self.names) + runs.name)
        of = np.repeat(np.arange(len(first)), np.diff(first, append=len(runs.first)))
        longest = np.lexsort((runs.first_batches, -runs.spent_ns, of))[first]
        if not len(first):
            return NamedParts(first, first, first, first)
        return NamedParts(
            first,
            longest,
            np.minimum.reduceat(runs.first_batches, first),
            np.maximum.reduceat(runs.last_batches, first),
        )


class StepKinds:
    """The kinds of engine steps, as groups of batch names, learned from requests.

    Two names are of one kind if they alternate in at least half of the requests with two or more batches of either
    name. Without such requests, they are of one kind if they serve a request with equal weights, or if only one has
    weights.
    """

    def __init__(self) -> None:
        self._turns, self._counts = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        self._alike, self._unlike = set[tuple[str, str]](), set[tuple[str, str]]()
        self._spent_ns, self._weighed = Counter[str](), set[str]()
        self.least = dict[str, int]()
        """The smallest weight in any batch with weights, by the batch's name."""

    def learn(self, parts: Parts) -> None:
        names, series, per_name = parts.names, parts.series, parts.parts_by_name
        spent_ns = np.zeros(len(names), dtype=np.int64)
        np.add.at(spent_ns, series.name, series.spent_ns)
        for name in np.unique(series.name).tolist():
            self._spent_ns[names[name]] += int(spent_ns[name])
        self._weighed.update(names[name] for name in np.unique(parts.name[parts.says_weight]).tolist())
        requests, series_names = series.request[per_name.first], series.name[per_name.first]
        starts, lasts = parts.start_ns[per_name.begin], parts.start_ns[per_name.last]
        most = series.size[per_name.longest]
        says, weights = parts.says_weight[per_name.begin], parts.weight[per_name.begin]
        for distance in range(1, int(np.bincount(requests).max(initial=1))):
            first = np.flatnonzero(requests[:-distance] == requests[distance:])
            second = first + distance
            has_turns = np.maximum(most[first], most[second]) > 1
            take_turns = (starts[first] < lasts[second]) & (starts[second] < lasts[first])
            some_say = says[first] | says[second]
            is_alike = (weights[first] == weights[second]) | (says[first] != says[second])
            pairs = series_names[first] * len(names) + series_names[second]
            for counter, is_counted in ((self._counts, has_turns), (self._turns, has_turns & take_turns)):
                for pair, count in zip(*np.unique(pairs[is_counted], return_counts=True), strict=True):
                    counter[_split_pair(names, int(pair))] += int(count)
            for pairs_seen, is_member in (
                (self._alike, ~has_turns & some_say & is_alike),
                (self._unlike, ~has_turns & some_say & ~is_alike),
            ):
                pairs_seen.update(_split_pair(names, pair) for pair in np.unique(pairs[is_member]).tolist())

    def weigh(self, names: Sequence[str], name: Int64s, weight: Int64s) -> None:
        """Learn the least weight of each batch name. `name` has, for each batch, the index of its name in `names`."""
        least = np.full(len(names), FARTHEST)
        np.minimum.at(least, name[weight > 0], weight[weight > 0])
        for place in np.flatnonzero(least < FARTHEST).tolist():
            self.least[names[place]] = min(self.least.get(names[place], FARTHEST), int(least[place]))

    def kind_by_name(self) -> Mapping[str, tuple[str, str]]:
        """Return the kind of each batch name, and the batch name that represents the kind."""
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


def _split_pair(names: Sequence[str], pair: int) -> tuple[str, str]:
    first, second = divmod(pair, len(names))
    return names[first], names[second]


APART = 8
"""The minimum ratio of the weight of a batch with a prompt to the weight of the lightest batch."""

LEAST_CHUNKS = 2
"""Batches of equal weight with a lighter last one are the chunks of one prompt if there are more than this many."""

CLEARLY = 2
"""The ratio of two batches' weights above which one batch is clearly heavier than the other."""


@dataclass(frozen=True)
class Steps:
    """The steps of each request, ordered by time. `first` is the first step of each request. `lead` is the index of the
    batch that represents the step. A step ends with its last batch."""

    request: Int64s
    first: Int64s
    lead: Int64s
    end_ns: Int64s

    @cached_property
    def steps_per_request(self) -> Int64s:
        return np.diff(self.first, append=len(self.lead))

    @cached_property
    def number_in_request(self) -> Int64s:
        """The number of each step in its request, from 0."""
        return np.arange(len(self.lead)) - np.repeat(self.first, self.steps_per_request)


def find_steps(parts: Parts, kinds: Mapping[str, tuple[str, str]]) -> Steps:
    """Return the steps that served each request. `kinds` has the kind and the representing name of each batch name."""
    series, per_name = parts.series, parts.parts_by_name
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kind for kind, _ in kinds.values()))}
    pairs = [kinds.get(name, (name, name)) for name in parts.names]
    kind_of_name = np.array([numbers.get(kind, 0) for kind, _ in pairs], dtype=np.int64)
    is_lead = np.array([lead == name for name, (_, lead) in zip(parts.names, pairs, strict=True)], dtype=np.bool_)
    of_name = series.name[per_name.first]
    keys = series.request[per_name.first] * len(numbers) + kind_of_name[of_name]
    # A request's leading name of each kind, else its first name of that kind.
    order = np.lexsort((per_name.begin, ~is_lead[of_name], keys))
    first = find_group_starts(keys[order])
    chosen = order[first]
    kind_of_named = np.empty(len(order), dtype=np.int64)
    kind_of_named[order] = np.repeat(np.arange(len(first)), np.diff(first, append=len(order)))
    appears = np.minimum.reduceat(per_name.begin[order], first)
    named_of = np.repeat(np.arange(len(per_name.first)), np.diff(per_name.first, append=len(series.first)))
    longest = per_name.longest[chosen]
    lead, counts = _find_leading_batches(parts, named_of, chosen, longest)
    begins = np.cumsum(counts) - counts
    ends = parts.end_ns[lead]
    of_series = kind_of_named[named_of]
    alike = np.flatnonzero(series.size == counts[of_series])
    for_steps = _concatenate_ranges(begins[of_series[alike]], series.size[alike])
    np.maximum.at(
        ends, for_steps, parts.end_ns[series.order[_concatenate_ranges(series.first[alike], series.size[alike])]]
    )
    request = np.repeat(series.request[longest], counts)
    order = np.lexsort((np.repeat(appears, counts), parts.start_ns[lead], request))
    request = request[order]
    return Steps(request, find_group_starts(request), lead[order], ends[order])


def _concatenate_ranges(firsts: Int64s, counts: Int64s) -> Int64s:
    """Return runs of consecutive numbers, one after the other: run `i` has `counts[i]` numbers from `firsts[i]` on."""
    begins = np.cumsum(counts) - counts
    return np.asarray(np.arange(int(counts.sum())) + np.repeat(firsts - begins, counts))


def _find_leading_batches(parts: Parts, named_of: Int64s, chosen: Int64s, longest: Int64s) -> tuple[Int64s, Int64s]:
    """Return the batch that represents each step, by request and kind, and the number of steps of each request and
    kind.

    Threads that run equally many batches of a name at once are workers of the same steps. Other threads take turns.
    """
    series = parts.series
    of_chosen = np.full(len(parts.parts_by_name.first), -1, dtype=np.int64)
    of_chosen[chosen] = np.arange(len(chosen))
    place = of_chosen[named_of]
    other_series = np.flatnonzero((place >= 0) & (np.append(longest, -1)[place] != np.arange(len(place))))
    longest_of_others = longest[place[other_series]]
    is_at_once = (
        parts.start_ns[series.first_batches[other_series]] < parts.end_ns[series.last_batches[longest_of_others]]
    ) & (parts.start_ns[series.first_batches[longest_of_others]] < parts.end_ns[series.last_batches[other_series]])
    other_series = other_series[~is_at_once | (series.size[other_series] != series.size[longest_of_others])]
    counts = series.size[longest].copy()
    if not len(other_series):
        return series.order[_concatenate_ranges(series.first[longest], counts)], counts
    merged = {
        number: _merge_series(parts, [int(longest[number]), *other_series[place[other_series] == number].tolist()])
        for number in np.unique(place[other_series]).tolist()
    }
    for number, merged_parts in merged.items():
        counts[number] = len(merged_parts)
    begins = np.cumsum(counts) - counts
    leads = np.empty(int(counts.sum()), dtype=np.int64)
    alone = np.ones(len(longest), dtype=np.bool_)
    alone[list(merged)] = False
    leads[_concatenate_ranges(begins[alone], counts[alone])] = series.order[
        _concatenate_ranges(series.first[longest[alone]], counts[alone])
    ]
    for number, merged_parts in merged.items():
        leads[begins[number] : begins[number] + len(merged_parts)] = merged_parts
    return leads, counts


def _merge_series(parts: Parts, series_places: Sequence[int]) -> list[int]:
    series = parts.series
    items = [
        place
        for index in sorted(series_places, key=lambda index: (-series.spent_ns[index], series.first_batches[index]))
        for place in series.order[series.first[index] : series.first[index] + series.size[index]].tolist()
    ]
    starts, ends = (dict(zip(items, column[items].tolist(), strict=True)) for column in (parts.start_ns, parts.end_ns))
    threads = dict(zip(items, parts.thread_id[items].tolist(), strict=True))
    items.sort(key=lambda place: (starts[place], ends[place]))
    merged = items[:1]
    for place in items[1:]:
        if starts[place] >= ends[merged[-1]] or threads[place] == threads[merged[-1]]:
            merged.append(place)
    return merged


def count_prefills(
    parts: Parts, steps: Steps, streamed_ns: Callable[[Int64s], Int64s], least: Mapping[str, int] = MappingProxyType({})
) -> Int64s:
    """Return, for each request, the number of steps that make its first token.

    `least` is the least weight of any request, by batch name. If all steps of a request are clearly heavier, they all
    make its only token. `streamed_ns` returns the times at which requests sent the first part of their answer,
    `FARTHEST` without a stream.
    """
    counts = np.ones(len(steps.first), dtype=np.int64)
    if not len(counts):
        return counts
    weights, names, ordinal = parts.weight[steps.lead], parts.name[steps.lead], steps.number_in_request
    is_first = ordinal == 0
    lightest = np.maximum(np.minimum.reduceat(weights, steps.first), 1)
    most = np.maximum.reduceat(weights, steps.first)
    is_called_otherwise = names != np.repeat(names[steps.first], steps.steps_per_request)
    first_other = np.minimum.reduceat(np.where(is_called_otherwise, ordinal, FARTHEST), steps.first)
    are_alike = most <= lightest
    are_named = are_alike & (first_other < FARTHEST)
    counts[are_named] = first_other[are_named]
    undecided = np.flatnonzero(are_alike & ~are_named & (steps.steps_per_request > 1))
    if len(undecided):
        answer_ns = np.full(len(counts), -FARTHEST)
        answer_ns[undecided] = streamed_ns(undecided)
        past = np.add.reduceat(
            steps.end_ns <= np.repeat(answer_ns, steps.steps_per_request), steps.first, dtype=np.int64
        )
        counts[undecided] = np.where(past < steps.steps_per_request, np.maximum(past, 1), 1)[undecided]  # else at once
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
    """Return the number of a request's steps that make its first token, judged by their unequal weights."""
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
