"""Stages of requests that batches serve: queue, prefill, decode and stalls, as the ledger has them.

These are the words of generations. A request is one that says so, by `gen_ai` of its route or rule or by its
attributes. So is one whose answer is sent in parts, and whose batches of one name serve it several times. Other
requests have a first batch and later ones.

An engine may record several batches a step, such as what schedules it, runs it and takes its answer, and each of its
workers may. Those that take turns are the parts of one step: the steps of a request are those batches of them that
say weights, and of these that take longest, of one worker.

A request that one step serves has a queue alone. Of one that several serve, the first make its first token, the
prefill: the steps that take clearly more of the weight than the later ones, such as the tokens of a prompt. Where all
take alike, they are the steps with another name than the later ones. Else they are those that had ended when the first
part of a streamed answer was sent, else the first one. It ends with the last part of its last step. The rest is the
decode. A stall is a time between two batches that is at least as long as half of its steps are: what is shorter is
routine. It says which batches, of others then, took most of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from instrument.recording.generations import GENERATION, says_generation
from instrument.recording.spans import BATCH_WEIGHTS, FIRST_ITEM, ITEMS, AttributeValue, Site, Span
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.groups import firsts_of, numbered
from instrument.trace.intervals import FARTHEST
from instrument.trace.joined import Joined
from instrument.trace.ledger import QUEUE, STALL, Stretches, served_stretches
from instrument.trace.request_steps import Parts, StepKinds, Steps, last_of_firsts, prefills, steps_of, usual_ns

PREFILL, DECODE = "prefill", "decode"
FIRST_BATCH, LATER_BATCHES = "first batch", "later batches"
"""The names of the same stages in a request for which no model generates an answer."""

STALLED_BY = "instrument.stalled_by"
"""The attribute of a stall: what the batches are called that took most of it, if any did."""

STEPS = "instrument.decode.steps"
"""The attribute of a decode: how many steps it had, each of which made a token, or several at once."""

LATER_STEPS = "instrument.later_batches.steps"
"""The attribute of later batches: how many steps they were."""

MOST_STALLS = 16
"""Stalls of a request that are told: the longest."""

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
"""The names of the metrics of the stages' times, in s, by whether a request is a generation. The names for generations
are those of vLLM and SGLang, and proposed for OpenTelemetry."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of the request at a place: begin and end of each, in order of time.

    `steps` are those after the prefill, of which each makes a token, or several at once. Of what is no generation the
    prefill is its first batch, and the decode are the later ones.
    """

    place: int
    queue: tuple[int, int] | None
    prefill: tuple[int, int] | None
    decode: tuple[int, int] | None
    steps: int
    stalls: tuple[tuple[int, int], ...]
    is_generation: bool

    def told(self) -> Iterator[tuple[str, int, int]]:
        """The name, begin and end of each that there is."""
        names = LATENCIES[self.is_generation]
        for name, one in zip(names, (self.queue, self.prefill, self.decode), strict=True):
            if one is not None:
                yield name, *one
        for one in self.stalls:
            yield STALL, *one


def stages(trace: Columns, joined: Joined, kinds: StepKinds | None = None) -> list[Stages]:
    """The stages of each request that a batch serves, and that is there from its begin to its end.

    One that was given up in the queue has that alone.

    What kinds of steps there are is told by these requests, and by those that `kinds` has learnt from before.
    """
    batches, between = served_stretches(trace, joined)
    queues = _queues(between)
    unserved = np.setdiff1d(np.array(list(queues), dtype=np.int64), batches.request)
    unserved = unserved[~trace.clipped[joined.rows[unserved]]]
    generating = _generating(trace, joined)
    given_up = [Stages(place, queues[place], None, None, 0, (), place in generating) for place in unserved.tolist()]
    if not len(batches.request):
        return given_up
    names = sorted({site.name for site in trace.sites})
    numbers = {name: number for number, name in enumerate(names)}
    of_names = np.array([numbers[site.name] for site in trace.sites], dtype=np.int64)
    first = firsts_of(batches.request)
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
    steps = steps_of(parts, kinds.kinds())
    sent_ns = _streamed_ns(trace, joined.rows[place])
    counts = prefills(parts, steps, sent_ns.__getitem__, kinds.least)
    is_generation = np.isin(place, list(generating)) | ((sent_ns < FARTHEST) & _have_loops(parts, steps))
    is_whole = ~trace.clipped[joined.rows[place]]
    columns = (
        place, parts.start_ns[first], last_of_firsts(steps, counts), np.maximum.reduceat(parts.end_ns, first),
        steps.count, counts, is_generation, is_whole,
    )  # fmt: skip
    stalls = _stalls(between, place, usual_ns(parts, steps))
    found = given_up
    for request, start_ns, until_ns, last_ns, count, of_prefill, generates, its in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        if its:
            prefill = (start_ns, until_ns) if count > 1 else None
            decode = (until_ns, last_ns) if count > 1 and last_ns > until_ns else None
            left = count - of_prefill
            its_stalls = stalls.get(request, ())
            found.append(Stages(request, queues.get(request), prefill, decode, left, its_stalls, generates))
    return found


def _generating(trace: Columns, joined: Joined) -> set[int]:
    """The places of the requests of which a rule, or the service, says that a model generates something."""
    rows = [trace.attributes.having(name) for name in GENERATION]
    rows.append(np.flatnonzero(trace.of_sites([says_generation(dict(site.attributes)) for site in trace.sites])))
    return set(joined.of[np.concatenate(rows)].tolist())


def _have_loops(parts: Parts, steps: Steps) -> Bools:
    """A mark at each request that a batch of one name served several times."""
    groups, firsts = numbered(steps.request, parts.name[steps.lead])
    several = steps.request[firsts][np.bincount(groups, minlength=len(firsts)) > 1]
    return np.isin(steps.request[steps.first], several)


def _streamed_ns(trace: Columns, rows: Int64s) -> Int64s:
    """Return the time at which the first part of each request's answer was sent, of answers in several parts."""
    firsts, items = (trace.attributes.values(name, rows) for name in (FIRST_ITEM, ITEMS))
    after_ns = [
        first if isinstance(first, int) and isinstance(count, int) and 0 <= first < FARTHEST and count > 1 else None
        for first, count in zip(firsts, items, strict=True)
    ]
    starts = trace.start_ns[rows].tolist()
    told = [
        FARTHEST if one is None else min(start + one, FARTHEST) for start, one in zip(starts, after_ns, strict=True)
    ]
    return np.array(told, dtype=np.int64)


def _queues(between: Stretches) -> Mapping[int, tuple[int, int]]:
    its = np.flatnonzero(between.row == 0)
    times = zip(between.start_ns[its].tolist(), between.end_ns[its].tolist(), strict=True)
    return dict(zip(between.request[its].tolist(), times, strict=True))


def _stalls(between: Stretches, place: Int64s, least_ns: Int64s) -> Mapping[int, tuple[tuple[int, int], ...]]:
    """The longest of those times between batches of the requests at these places that are no routine."""
    lengths = between.end_ns - between.start_ns
    its = np.flatnonzero(between.row == 1)
    its = its[lengths[its] >= least_ns[np.searchsorted(place, between.request[its])]]
    its = its[np.lexsort((its, -lengths[its], between.request[its]))]
    first = firsts_of(between.request[its])
    rank = np.arange(len(its)) - np.repeat(first, np.diff(first, append=len(its)))
    its = its[rank < MOST_STALLS]
    its = its[np.lexsort((between.end_ns[its], between.start_ns[its], between.request[its]))]
    found: dict[int, tuple[tuple[int, int], ...]] = {}
    pairs = list(zip(between.start_ns[its].tolist(), between.end_ns[its].tolist(), strict=True))
    first = firsts_of(between.request[its])
    for begin, end in pairwise([*first.tolist(), len(its)]):
        found[int(between.request[its[begin]])] = tuple(pairs[begin:end])
    return found


class _Batches:
    """All batches by their begins, to be asked which of them took most of a time."""

    def __init__(self, trace: Columns, joined: Joined) -> None:
        rows = np.unique(joined.served.batch)
        rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
        self._starts, self._ends = trace.start_ns[rows], trace.end_ns[rows]
        self._reach = np.maximum.accumulate(self._ends) if len(rows) else self._ends
        self._names = [trace.sites[site].name for site in trace.site[rows].tolist()]

    def taking_most(self, times: Sequence[tuple[int, int]]) -> list[str]:
        """Return the name at each time, "" where there was none."""
        starts, ends = np.array(times, dtype=np.int64).reshape(-1, 2).T
        firsts = np.searchsorted(self._reach, starts, side="right").tolist()
        lasts = np.searchsorted(self._starts, ends).tolist()
        return [self._taking_most(*its) for its in zip(firsts, lasts, starts.tolist(), ends.tolist(), strict=True)]

    def _taking_most(self, first: int, last: int, start_ns: int, end_ns: int) -> str:
        sums: dict[str, int] = {}
        for at in range(first, last):
            ran_ns = min(int(self._ends[at]), end_ns) - max(int(self._starts[at]), start_ns)
            if ran_ns > 0:
                sums[self._names[at]] = sums.get(self._names[at], 0) + ran_ns
        return max(sums, key=lambda name: (sums[name], name), default="")


def stage_spans(trace: Columns, joined: Joined) -> Mapping[int, list[Span]]:
    """Return the spans of the stages of all requests, as `spans_of_stages` does."""
    return spans_of_stages(trace, joined, stages(trace, joined))


def spans_of_stages(trace: Columns, joined: Joined, its_stages: Sequence[Stages]) -> Mapping[int, list[Span]]:
    """Return spans of stages by the row of their request, below which they hang, on the thread and task of that.

    They are numbered from the first number on that no span of the trace has.
    """
    number = int(max(trace.span_id.max(initial=0), trace.parent_id.max(initial=0))) + 1
    found: dict[int, list[Span]] = {}
    stalled_by = iter(_Batches(trace, joined).taking_most([stall for one in its_stages for stall in one.stalls]))
    for one in its_stages:
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
            if latency := LATENCIES[one.is_generation].get(name):
                span.attributes = {**generation, latency: length_ns / 1e9}
                if name in (DECODE, LATER_BATCHES):
                    steps = STEPS if one.is_generation else LATER_STEPS
                    span.attributes = {**span.attributes, steps: one.steps}
            elif by := next(stalled_by):
                span.attributes = {**generation, STALLED_BY: by}
            found.setdefault(row, []).append(span)
            number += 1
    return found
