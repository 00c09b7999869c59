"""Stages of requests that batches serve: queue, prefill, decode and stalls, as the ledger has them.

An engine may record several batches a step, such as what schedules it, runs it and takes its answer, and each of its
workers may. Those that take turns are the parts of one step: the steps of a request are those batches of them that
say weights, and of these that take longest, of one worker.

A request that one step serves has a queue alone. Of one that several serve, the first make its first token, the
prefill: those that take clearly more of the weight than the later ones do, such as the tokens of a prompt, or where
all take alike those that are called differently from the later ones, else the first one. It ends with the last part
of its last step. The rest is the decode. A stall is a time between two batches that is at least as long as half of its
steps are: what is shorter is routine. It says which batches, of others then, took most of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import sqrt
from typing import NamedTuple

import numpy as np

from instrument.recording.generations import GENERATION
from instrument.recording.spans import BATCH_WEIGHTS, AttributeValue, Site, Span
from instrument.trace.columns import Trace
from instrument.trace.joined import Joined
from instrument.trace.ledger import QUEUE, STALL, served_stretches

PREFILL, DECODE = "prefill", "decode"

STALLED_BY = "instrument.stalled_by"
"""The attribute of a stall: what the batches are called that took most of it, if any did."""

STEPS = "instrument.decode.steps"
"""The attribute of a decode: how many steps it had, each of which made a token, or several at once."""

MOST_STALLS = 16
"""Stalls of a request that are told: the longest."""

APART = 8
"""The heaviest batch of a request is a prompt's for certain if it takes so many times what the lightest one does."""

CLEARLY = 2
"""What takes more than so many times as much takes clearly more."""

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

    `steps` are those after the prefill, of which each makes a token, or several at once.
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
    says_weight = np.isin(batches.row, trace.attributes.having(BATCH_WEIGHTS))
    names = [site.name for site in trace.sites]
    weights, threads = joined.served.weight[batches.pair], trace.thread_id[batches.row]
    columns = (trace.site[batches.row], threads, batches.start_ns, batches.end_ns, weights, says_weight)

    def parts_of(first: int, last: int) -> list[_Part]:
        of_all = zip(*(column[first:last].tolist() for column in columns), strict=True)
        return [_Part(names[site], *more) for site, *more in of_all]

    ranges = list(pairwise([*firsts.tolist(), len(batches.request)]))
    kinds = _kinds_of_steps(parts_of(*its) for its in ranges)
    found = []
    for place, (first, last) in zip(batches.request[firsts].tolist(), ranges, strict=True):
        if trace.clipped[joined.rows[place]]:
            continue
        its = parts_of(first, last)
        steps = _steps(its, kinds)
        long_ns = sorted(one.lead.end_ns - one.lead.start_ns for one in steps)[len(steps) // 2]
        stalls = sorted(gaps.get(place, ()), key=lambda gap: gap[0] - gap[1])[:MOST_STALLS]
        notable = tuple(sorted(gap for gap in stalls if gap[1] - gap[0] >= long_ns))
        prefill = decode = None
        count = _prefills([one.lead.weight for one in steps], [one.lead.name for one in steps])
        if len(steps) > 1:
            until_ns, last_ns = max(one.end_ns for one in steps[:count]), max(one.end_ns for one in its)
            prefill = its[0].start_ns, until_ns
            decode = (until_ns, last_ns) if last_ns > until_ns else None
        found.append(Stages(place, queues.get(place), prefill, decode, len(steps) - count, notable))
    return found


class _Part(NamedTuple):
    """One batch of a request: `weight` is what the request takes of it, 1 for each where it does not say so."""

    name: str
    thread_id: int
    start_ns: int
    end_ns: int
    weight: int
    says_weight: bool


class _Step(NamedTuple):
    """A step of an engine for a request: the batch that stands for it, and when the last part of it ended."""

    lead: _Part
    end_ns: int


def _kinds_of_steps(asked: Iterable[Sequence[_Part]]) -> dict[str, tuple[str, str]]:
    """Of each name of batches the kind of steps that they are parts of, and the name that stands for these.

    Two names are parts of one kind where they take turns in at least half of the requests that tell. Where none has
    either twice they are if they serve it by the same weight, or one alone says any.
    """
    turns, told = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    alike, unlike = set[tuple[str, str]](), set[tuple[str, str]]()
    spent_ns, weighed = Counter[str](), set[str]()
    for its in asked:
        by_name: dict[str, list[_Part]] = {}
        for part in its:
            by_name.setdefault(part.name, []).append(part)
            spent_ns[part.name] += part.end_ns - part.start_ns
            if part.says_weight:
                weighed.add(part.name)
        for one, other in combinations(sorted(by_name), 2):
            here, there = by_name[one], by_name[other]
            if max(len(_of_longest_thread(here)), len(_of_longest_thread(there))) > 1:
                told[one, other] += 1
                take_turns = here[0].start_ns < there[-1].start_ns and there[0].start_ns < here[-1].start_ns
                turns[one, other] += take_turns
            elif here[0].says_weight or there[0].says_weight:
                is_alike = here[0].weight == there[0].weight or here[0].says_weight != there[0].says_weight
                (alike if is_alike else unlike).add((one, other))
    kind = {name: name for name in spent_ns}
    for one, other in sorted({*told, *alike}):
        is_one_step = turns[one, other] * 2 >= told[one, other] if told[one, other] else (one, other) not in unlike
        if is_one_step and kind[one] != kind[other]:
            was = kind[other]
            kind.update({name: kind[one] for name, its_kind in kind.items() if its_kind == was})
    leads: dict[str, str] = {}
    for name in sorted(kind, key=lambda name: (name in weighed, spent_ns[name], name)):
        leads[kind[name]] = name
    return {name: (its_kind, leads[its_kind]) for name, its_kind in kind.items()}


def _of_longest_thread(parts: Sequence[_Part]) -> list[_Part]:
    """Those of the thread on which they took longest."""
    spent_ns = Counter[int]()
    for part in parts:
        spent_ns[part.thread_id] += part.end_ns - part.start_ns
    longest = max(spent_ns, key=lambda thread_id: spent_ns[thread_id])
    return [part for part in parts if part.thread_id == longest]


def _steps(its: Sequence[_Part], kinds: Mapping[str, tuple[str, str]]) -> list[_Step]:
    """The steps that served a request, in the order of time."""
    series: dict[str, dict[str, dict[int, list[_Part]]]] = {}
    for part in its:
        series.setdefault(kinds[part.name][0], {}).setdefault(part.name, {}).setdefault(part.thread_id, []).append(part)
    found: list[_Step] = []
    for of_kind in series.values():
        known = next(iter(of_kind))
        name = kinds[known][1] if kinds[known][1] in of_kind else known
        leads = _leads(list(of_kind[name].values()))
        ends = [lead.end_ns for lead in leads]
        for parts in (parts for threads in of_kind.values() for parts in threads.values()):
            if len(parts) == len(leads):
                ends = [max(end_ns, part.end_ns) for end_ns, part in zip(ends, parts, strict=True)]
        found += map(_Step, leads, ends)
    return sorted(found, key=lambda one: one.lead.start_ns)


def _leads(threads: Sequence[Sequence[_Part]]) -> list[_Part]:
    """Batches of one name on several threads, each step once: threads that run as many at once are workers that do
    the same steps, others take steps in turn."""
    threads = sorted(threads, key=lambda parts: sum(part.start_ns - part.end_ns for part in parts))
    longest = threads[0]
    taken = list(longest)
    for parts in threads[1:]:
        is_at_once = parts[0].start_ns < longest[-1].end_ns and longest[0].start_ns < parts[-1].end_ns
        if not is_at_once or len(parts) != len(longest):
            taken += parts
    taken.sort(key=lambda part: (part.start_ns, part.end_ns))
    found = taken[:1]
    for part in taken[1:]:
        if part.start_ns >= found[-1].end_ns or part.thread_id == found[-1].thread_id:
            found.append(part)
    return found


def _prefills(weights: Sequence[int], names: Sequence[str]) -> int:
    """How many of a request's steps, of which there are these in order, make its first token."""
    least, most = max(min(weights), 1), max(weights)
    if most <= least:
        return next((place for place, name in enumerate(names) if name != names[0]), 1)
    count = 0
    if most >= APART * least:
        between = sqrt(most) * sqrt(least)
        count = next((place for place, weight in enumerate(weights) if weight <= between), len(weights))
    # Of a prompt in chunks the last one may be small, and some tokens at once later on are no prompt.
    while len(later := sorted(weights[count + 1 :])) > (count > 0):
        if weights[count] <= CLEARLY * later[(len(later) - 1) // 2]:
            break
        count += 1
    return max(count, 1)


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
                if name == DECODE:
                    span.attributes = {**span.attributes, STEPS: one.steps}
            elif by := batches.taking_most(start_ns, end_ns):
                span.attributes = {**generation, STALLED_BY: by}
            found.setdefault(row, []).append(span)
            number += 1
    return found
