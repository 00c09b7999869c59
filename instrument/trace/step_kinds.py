"""Which batches are the parts of one step: the kinds of steps that an engine does, by the names of its batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from instrument.trace.columns import Bools, Int64s
from instrument.trace.groups import firsts_of
from instrument.trace.intervals import FARTHEST


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
        """Those of each request, name and thread."""
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
        """Those of each request and name."""
        its = self.series
        first = firsts_of(its.request * len(self.names) + its.name)
        of = np.repeat(np.arange(len(first)), np.diff(first, append=len(its.first)))
        longest = np.lexsort((its.begin, -its.spent_ns, of))[first]
        if not len(first):
            return NamedParts(first, first, first, first)
        return NamedParts(first, longest, np.minimum.reduceat(its.begin, first), np.maximum.reduceat(its.last, first))


class StepKinds:
    """What is known of the names of batches by the requests that were looked at.

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
        """Of each name the kind of steps that it is a part of, and the name that stands for these."""
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
