"""The steps that served requests: one for each that an engine did, of however many batches, and which are prefill."""

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
from instrument.trace.groups import firsts_of
from instrument.trace.intervals import FARTHEST
from instrument.trace.joined import THOUSANDTHS

# Kinds of steps


class PartSeries(NamedTuple):
    """Batches of one request, one name and one thread, as their places among `order`, in the order of time.

    Those of a request lie together, and of these those of a name. `spent_ns` is how long they took in all.
    """

    order: Int64s
    first: Int64s
    size: Int64s
    request: Int64s
    name: Int64s
    spent_ns: Int64s

    @property
    def begin(self) -> Int64s:
        """The first part of each."""
        return np.asarray(self.order[self.first])

    @property
    def last(self) -> Int64s:
        """The last part of each."""
        return np.asarray(self.order[self.first + self.size - 1])


class NamedParts(NamedTuple):
    """The series of one request and one name: the first of them, the longest, and the first part and the last one."""

    first: Int64s
    longest: Int64s
    begin: Int64s
    last: Int64s


@dataclass(frozen=True)
class Parts:
    """Batches of requests, those of a request in the order of time: `first` is the first part of each request.

    `name` is a place among the `names`. `weight` is what the request takes of it, alike where it does not say so.
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
    def series(self) -> PartSeries:
        """Return the parts of each request, name and thread."""
        if len(self.thread_id) and bool((self.thread_id == self.thread_id[0]).all()):
            threads, count = np.zeros(len(self.thread_id), dtype=np.int64), 1
        else:
            known, threads = np.unique(self.thread_id, return_inverse=True)
            count = len(known)
        which = (self.request * len(self.names) + self.name) * count + threads
        order = np.argsort(which, kind="stable")
        first = firsts_of(which[order])
        begin = order[first]
        counts = np.diff(first, append=len(order))
        spent_ns = np.add.reduceat((self.end_ns - self.start_ns)[order], first) if len(first) else first
        return PartSeries(order, first, counts, self.request[begin], self.name[begin], spent_ns)

    @cached_property
    def named(self) -> NamedParts:
        """Return the parts of each request and name."""
        its = self.series
        first = firsts_of(its.request * len(self.names) + its.name)
        of = np.repeat(np.arange(len(first)), np.diff(first, append=len(its.first)))
        longest = np.lexsort((its.begin, -its.spent_ns, of))[first]
        if not len(first):
            return NamedParts(first, first, first, first)
        return NamedParts(first, longest, np.minimum.reduceat(its.begin, first), np.maximum.reduceat(its.last, first))


class StepKinds:
    """The kinds of steps that names of batches are parts of, by the requests that were looked at.

    Two names are parts of one kind of step where they take turns in at least half of the requests that tell. Where none
    has either twice they are if they serve it by the same weight, or one alone says any.
    """

    def __init__(self) -> None:
        self._turns, self._told = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        self._alike, self._unlike = set[tuple[str, str]](), set[tuple[str, str]]()
        self._spent_ns, self._weighed = Counter[str](), set[str]()
        self.least = dict[str, int]()
        """The least weight of a batch by its name, of those that say weights."""

    def learn(self, parts: Parts) -> None:
        """Look at some requests."""
        names, series, named = parts.names, parts.series, parts.named
        spent_ns = np.zeros(len(names), dtype=np.int64)
        np.add.at(spent_ns, series.name, series.spent_ns)
        for name in np.unique(series.name).tolist():
            self._spent_ns[names[name]] += int(spent_ns[name])
        self._weighed.update(names[name] for name in np.unique(parts.name[parts.says_weight]).tolist())
        requests, its_names = series.request[named.first], series.name[named.first]
        starts, lasts = parts.start_ns[named.begin], parts.start_ns[named.last]
        most = series.size[named.longest]
        says, weights = parts.says_weight[named.begin], parts.weight[named.begin]
        for apart in range(1, int(np.bincount(requests).max(initial=1))):
            one = np.flatnonzero(requests[:-apart] == requests[apart:])
            other = one + apart
            tells = np.maximum(most[one], most[other]) > 1
            take_turns = (starts[one] < lasts[other]) & (starts[other] < lasts[one])
            some_say = says[one] | says[other]
            is_alike = (weights[one] == weights[other]) | (says[one] != says[other])
            pairs = its_names[one] * len(names) + its_names[other]
            for book, wanted in ((self._told, tells), (self._turns, tells & take_turns)):
                for pair, count in zip(*np.unique(pairs[wanted], return_counts=True), strict=True):
                    book[_names(names, int(pair))] += int(count)
            for known, wanted in (
                (self._alike, ~tells & some_say & is_alike),
                (self._unlike, ~tells & some_say & ~is_alike),
            ):
                known.update(_names(names, pair) for pair in np.unique(pairs[wanted]).tolist())

    def weigh(self, names: Sequence[str], name: Int64s, weight: Int64s) -> None:
        """Look at what batches say that their requests take, by the places of their names."""
        least = np.full(len(names), FARTHEST)
        np.minimum.at(least, name[weight > 0], weight[weight > 0])
        for at in np.flatnonzero(least < FARTHEST).tolist():
            self.least[names[at]] = min(self.least.get(names[at], FARTHEST), int(least[at]))

    def kinds(self) -> Mapping[str, tuple[str, str]]:
        """Return the kind of steps that each name is a part of, and the name of that kind."""
        told, turns = self._told, self._turns
        kind = {name: name for name in self._spent_ns}
        for one, other in sorted({*told, *self._alike}):
            is_one_step = (
                turns[one, other] * 2 >= told[one, other] if told[one, other] else (one, other) not in self._unlike
            )
            if is_one_step and kind[one] != kind[other]:
                was = kind[other]
                kind.update({name: kind[one] for name, its_kind in kind.items() if its_kind == was})
        leads: dict[str, str] = {}
        for name in sorted(kind, key=lambda name: (name in self._weighed, self._spent_ns[name], name)):
            leads[kind[name]] = name
        return {name: (its_kind, leads[its_kind]) for name, its_kind in kind.items()}


def _names(names: Sequence[str], pair: int) -> tuple[str, str]:
    """The two names of a pair, in the order of the alphabet, as `names` are."""
    one, other = divmod(pair, len(names))
    return names[one], names[other]


APART = 8
"""The heaviest batch of a request is a prompt's for certain if it takes so many times what the lightest one does."""

LEAST_CHUNKS = 2
"""Chunks; a prompt in more chunks, all alike but the last, is recognised by them."""

CLEARLY = 2
"""A batch takes clearly more than another one with more than this many times its weight."""


@dataclass(frozen=True)
class Steps:
    """The steps of each request, in the order of time: `first` is the first one of each request.

    Each is told by the batch that stands for it, its `lead`, a place among the parts, and ends with its last part.
    """

    request: Int64s
    first: Int64s
    lead: Int64s
    end_ns: Int64s

    @cached_property
    def count(self) -> Int64s:
        """Return the number of steps of each request."""
        return np.diff(self.first, append=len(self.lead))

    @cached_property
    def ordinal(self) -> Int64s:
        """Return the place of each step among those of its request."""
        return np.arange(len(self.lead)) - np.repeat(self.first, self.count)


def steps_of(parts: Parts, kinds: Mapping[str, tuple[str, str]]) -> Steps:
    """The steps that served each request, by what is known of the names of batches."""
    series, named = parts.series, parts.named
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kind for kind, _ in kinds.values()))}
    told = [kinds.get(name, (name, name)) for name in parts.names]
    kind_of_name = np.array([numbers.get(kind, 0) for kind, _ in told], dtype=np.int64)
    is_lead = np.array([lead == name for name, (_, lead) in zip(parts.names, told, strict=True)], dtype=np.bool_)
    of_name = series.name[named.first]
    which = series.request[named.first] * len(numbers) + kind_of_name[of_name]
    # Of the names of one kind that a request has the one that stands for them all, else the first.
    order = np.lexsort((named.begin, ~is_lead[of_name], which))
    first = firsts_of(which[order])
    chosen = order[first]
    kind_of_named = np.empty(len(order), dtype=np.int64)
    kind_of_named[order] = np.repeat(np.arange(len(first)), np.diff(first, append=len(order)))
    appears = np.minimum.reduceat(named.begin[order], first)
    named_of = np.repeat(np.arange(len(named.first)), np.diff(named.first, append=len(series.first)))
    longest = named.longest[chosen]
    lead, counts = _leads(parts, named_of, chosen, longest)
    begins = np.cumsum(counts) - counts
    ends = parts.end_ns[lead]
    of_series = kind_of_named[named_of]
    alike = np.flatnonzero(series.size == counts[of_series])
    for_steps = _spread(begins[of_series[alike]], series.size[alike])
    np.maximum.at(ends, for_steps, parts.end_ns[series.order[_spread(series.first[alike], series.size[alike])]])
    request = np.repeat(series.request[longest], counts)
    order = np.lexsort((np.repeat(appears, counts), parts.start_ns[lead], request))
    request = request[order]
    return Steps(request, firsts_of(request), lead[order], ends[order])


def _spread(firsts: Int64s, counts: Int64s) -> Int64s:
    """The numbers from each of the first ones on, as many as there are of each."""
    begins = np.cumsum(counts) - counts
    return np.asarray(np.arange(int(counts.sum())) + np.repeat(firsts - begins, counts))


def _leads(parts: Parts, named_of: Int64s, chosen: Int64s, longest: Int64s) -> tuple[Int64s, Int64s]:
    """The batches that stand for steps, those of each request and kind together, and how many these are.

    Threads that run as many batches of a name at once are workers that do the same steps, others take steps in turn.
    """
    series = parts.series
    of_chosen = np.full(len(parts.named.first), -1, dtype=np.int64)
    of_chosen[chosen] = np.arange(len(chosen))
    place = of_chosen[named_of]
    others = np.flatnonzero((place >= 0) & (np.append(longest, -1)[place] != np.arange(len(place))))
    its = longest[place[others]]
    is_at_once = (parts.start_ns[series.begin[others]] < parts.end_ns[series.last[its]]) & (
        parts.start_ns[series.begin[its]] < parts.end_ns[series.last[others]]
    )
    others = others[~is_at_once | (series.size[others] != series.size[its])]
    counts = series.size[longest].copy()
    if not len(others):
        return series.order[_spread(series.first[longest], counts)], counts
    merged = {
        number: _merged(parts, [int(longest[number]), *others[place[others] == number].tolist()])
        for number in np.unique(place[others]).tolist()
    }
    for number, taken in merged.items():
        counts[number] = len(taken)
    begins = np.cumsum(counts) - counts
    found = np.empty(int(counts.sum()), dtype=np.int64)
    alone = np.ones(len(longest), dtype=np.bool_)
    alone[list(merged)] = False
    found[_spread(begins[alone], counts[alone])] = series.order[_spread(series.first[longest[alone]], counts[alone])]
    for number, taken in merged.items():
        found[begins[number] : begins[number] + len(taken)] = taken
    return found, counts


def _merged(parts: Parts, which: Sequence[int]) -> list[int]:
    """Batches of several series, each step once: of other threads none that began before the last one ended."""
    series = parts.series
    taken = [
        place
        for one in sorted(which, key=lambda one: (-series.spent_ns[one], series.begin[one]))
        for place in series.order[series.first[one] : series.first[one] + series.size[one]].tolist()
    ]
    starts, ends = (dict(zip(taken, column[taken].tolist(), strict=True)) for column in (parts.start_ns, parts.end_ns))
    threads = dict(zip(taken, parts.thread_id[taken].tolist(), strict=True))
    taken.sort(key=lambda place: (starts[place], ends[place]))
    found = taken[:1]
    for place in taken[1:]:
        if starts[place] >= ends[found[-1]] or threads[place] == threads[found[-1]]:
            found.append(place)
    return found


def prefills(
    parts: Parts, steps: Steps, streamed_ns: Callable[[Int64s], Int64s], least: Mapping[str, int] = MappingProxyType({})
) -> Int64s:
    """Return the number of steps of each request that make its first token.

    `least` is the least weight of any request's by the names of batches: where all steps of a request take clearly more
    they are a prompt's, of which one token was made.

    `streamed_ns` tells of some requests when the first part of their answer was sent, `FARTHEST` of what is no stream.
    """
    counts = np.ones(len(steps.first), dtype=np.int64)
    if not len(counts):
        return counts
    weights, names, ordinal = parts.weight[steps.lead], parts.name[steps.lead], steps.ordinal
    is_first = ordinal == 0
    lightest = np.maximum(np.minimum.reduceat(weights, steps.first), 1)
    most = np.maximum.reduceat(weights, steps.first)
    is_called_otherwise = names != np.repeat(names[steps.first], steps.count)
    first_other = np.minimum.reduceat(np.where(is_called_otherwise, ordinal, FARTHEST), steps.first)
    are_alike = most <= lightest
    are_named = are_alike & (first_other < FARTHEST)
    counts[are_named] = first_other[are_named]
    untold = np.flatnonzero(are_alike & ~are_named & (steps.count > 1))
    if len(untold):
        sent_ns = np.full(len(counts), -FARTHEST)
        sent_ns[untold] = streamed_ns(untold)
        done = np.add.reduceat(steps.end_ns <= np.repeat(sent_ns, steps.count), steps.first, dtype=np.int64)
        counts[untold] = np.where(done < steps.count, np.maximum(done, 1), 1)[untold]  # else it came all at once
    later_least = np.minimum.reduceat(np.where(is_first, FARTHEST, weights), steps.first)
    later_most = np.maximum.reduceat(np.where(is_first, -1, weights), steps.first)
    # Where all but the first take alike the first one is it, whatever it takes.
    unlike = np.flatnonzero(~are_alike & (later_least != later_most))
    pieces = zip(unlike.tolist(), steps.first[unlike].tolist(), steps.count[unlike].tolist(), strict=True)
    for request, first, count in pieces:
        counts[request] = _prefills(weights[first : first + count].tolist())
    least_of_all = np.array([least.get(name, 0) for name in parts.names], dtype=np.int64)[names[steps.first]]
    says_weight = np.minimum.reduceat(parts.says_weight[steps.lead], steps.first)
    is_prompt = says_weight & (least_of_all > 0) & (lightest >= APART * least_of_all)
    counts[is_prompt] = steps.count[is_prompt]
    return counts


def _prefills(weights: Sequence[int]) -> int:
    """Return the number of a request's steps that make its first token, of steps that do not take alike."""
    least, most = max(min(weights), 1), max(weights)
    count = 0
    if (
        len(weights) > LEAST_CHUNKS
        and least >= APART * THOUSANDTHS
        and len({*weights[:-1]}) == 1
        and weights[-1] < most
    ):
        return len(weights)  # a prompt in chunks, of which one token was made
    if most >= APART * least:
        between = sqrt(most) * sqrt(least)
        count = next((place for place, weight in enumerate(weights) if weight <= between), len(weights))
    # Of a prompt in chunks the last one may be small, and some tokens at once later on are no prompt.
    while len(later := sorted(weights[count + 1 :])) > (count > 0):
        if weights[count] <= CLEARLY * later[(len(later) - 1) // 2]:
            break
        count += 1
    return max(count, 1)


def usual_ns(parts: Parts, steps: Steps) -> Int64s:
    """Return the length of each request's middle step, by its leading batch."""
    lengths = (parts.end_ns - parts.start_ns)[steps.lead]
    order = np.lexsort((lengths, steps.request))
    return np.asarray(lengths[order][steps.first + steps.count // 2])


def last_of_firsts(steps: Steps, counts: Int64s) -> Int64s:
    """Return the time at which the last of each request's first steps ended."""
    is_first: Bools = steps.ordinal < np.repeat(counts, steps.count)
    return np.asarray(np.maximum.reduceat(np.where(is_first, steps.end_ns, -FARTHEST), steps.first))
