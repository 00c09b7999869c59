"""Replays recorded arrivals through a model of the engine, to predict queue times without some of the requests.

A request arrives at the model after the shortest recorded queue time. The model serves requests in the order of
arrival, at most as many at once as were recorded. A request passes through batches with its recorded names and weights.
In each turn the model runs the batches of each name, in the order in which requests meet the names. The time of a batch
is a linear function of its members and weight, fitted to the recorded batches of its name. The result is multiplied by
the ratio of recorded to fitted time of the heaviest member's batch. While an event loop is blocked, the model stops.
Engines with another order, or that wait for batches to fill, are not reproduced (`Replay.is_sound`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from instrument.trace.bill import Lanes
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.forest import NONE, nearest_above
from instrument.trace.groups import Groups, distinct, firsts_of, numbered
from instrument.trace.intervals import FARTHEST, Union, measure_overlap
from instrument.trace.joined import Joined
from instrument.trace.ledger import QUEUE, Turns

MOST_PAIRS = 40_000
"""The maximum number of pairs (a request and one of its batches) that are replayed. Later requests are left out."""

TOLERANCE = 0.1
"""The largest relative error of the mean queue time, in a replay of all requests, with which the model is sound."""


@dataclass(frozen=True)
class Replay:
    """The result of a replay: the indices of requests by arrival, and their queue times as recorded and as replayed."""

    place: Int64s
    queue_ns: Int64s
    replayed_ns: Int64s

    @property
    def is_sound(self) -> bool:
        """True if the model reproduces the recorded mean queue time within `TOLERANCE`."""
        recorded = float(self.queue_ns.mean()) if len(self.queue_ns) else 0.0
        return recorded > 0 and abs(float(self.replayed_ns.mean()) - recorded) <= TOLERANCE * recorded


class Engine:
    """A model of the engine that served the requests of a trace."""

    def __init__(self, trace: Columns, joined: Joined, all_turns: Turns, lanes: Lanes) -> None:
        served = joined.served
        self._lanes = lanes
        is_main = _are_main_batches(trace, served.batch)
        pairs = np.flatnonzero((served.request != NONE) & is_main[served.batch])
        pairs = pairs[np.lexsort((trace.start_ns[served.batch[pairs]], served.request[pairs]))]
        first = firsts_of(served.request[pairs])
        self._place = served.request[pairs[first]]
        begins = trace.start_ns[served.batch[pairs[first]]]
        is_queue = np.flatnonzero(all_turns.part == all_turns.names.index(QUEUE))
        queued = Groups(all_turns.request[is_queue], len(joined.rows)).sums(all_turns.length_ns[is_queue])
        self._queue_ns = queued[self._place].astype(np.int64)
        self._latency_ns = int(self._queue_ns.min(initial=FARTHEST))
        self._arrival = begins - self._queue_ns + self._latency_ns
        last = np.append(first[1:], len(pairs))
        order = np.argsort(self._arrival, kind="stable")
        order = order[np.cumsum((last - first)[order]) <= MOST_PAIRS]
        self._place, self._queue_ns, self._arrival = self._place[order], self._queue_ns[order], self._arrival[order]
        batches = distinct(served.batch[is_main[served.batch]])
        names, _ = numbered(trace.site[batches])
        of_pair = np.searchsorted(batches, served.batch).clip(max=max(len(batches) - 1, 0))
        members = np.flatnonzero(is_main[served.batch])
        by_batch = Groups(of_pair[members], len(batches))
        sizes, weights = by_batch.sizes(), by_batch.sums(served.weight[members])
        of_names = Groups(names, int(names.max(initial=-1)) + 1).members()
        self._costs = [_Costs(sizes[rows], weights[rows], trace.total_ns[batches[rows]]) for rows in of_names]
        ratios = np.ones(len(batches))
        for rows, cost in zip(of_names, self._costs, strict=True):
            ratios[rows] = cost.ratios
        self._gap_ns = _measure_gap(trace, batches)
        ends = np.maximum.reduceat(trace.end_ns[served.batch[pairs]], first) if len(first) else begins
        self._slots = max(measure_overlap([Union(begins, ends)])[1], 1)
        # A request that has had its prefill takes part in the decode of the same turn of the engine.
        ordinals = np.arange(len(pairs)) - np.repeat(first, last - first)
        by_name = [ordinals[names[of_pair[pairs]] == name] for name in range(len(of_names))]
        ordinal_of = [float(ordinal.mean()) if len(ordinal) else 0.0 for ordinal in by_name]
        self._names = sorted(range(len(of_names)), key=ordinal_of.__getitem__)
        columns = names[of_pair[pairs]], served.weight[pairs], ratios[of_pair[pairs]]
        steps = list(zip(*(column.tolist() for column in columns), strict=True))
        self._steps = [steps[begin:end] for begin, end in zip(first[order].tolist(), last[order].tolist(), strict=True)]

    def replay(self, is_present: Bools) -> Replay:
        """Replay only the requests for which `is_present`, by index of the request, is True."""
        present = np.flatnonzero(is_present[self._place])
        arrivals, costs = self._arrival.tolist(), self._costs
        stops = self._list_stops(is_present)
        waiting, active, now_ns = deque(present.tolist()), list[list[int]](), 0.0
        queues = dict.fromkeys(present.tolist(), 0.0)
        while waiting or active:
            if not active:
                now_ns = max(now_ns, arrivals[waiting[0]])
            while stops and stops[0][0] <= now_ns:
                now_ns += stops.popleft()[1]
            while waiting and len(active) < self._slots and arrivals[waiting[0]] <= now_ns:
                active.append([waiting.popleft(), 0])
            for name in self._names:
                members = [
                    (*self._steps[item[0]][item[1]][1:], item) for item in active if self._next_batch_name(item) == name
                ]
                cost = costs[name]
                for at in range(0, len(members), cost.most):
                    some = members[at : at + cost.most]
                    for _, _, item in some:
                        if item[1] == 0:
                            queues[item[0]] = now_ns - arrivals[item[0]]
                        item[1] += 1
                    ratio = max(some, key=itemgetter(0))[1]
                    now_ns += ratio * cost.of(len(some), sum(weight for weight, _, _ in some)) + self._gap_ns
            active = [item for item in active if self._next_batch_name(item) != NONE]
        replayed = np.array([queues[number] for number in present.tolist()], dtype=np.float64)
        replayed_ns = np.round(replayed).astype(np.int64) + self._latency_ns
        return Replay(self._place[present], self._queue_ns[present], replayed_ns)

    def _next_batch_name(self, item: Sequence[int]) -> int:
        """Return the name of a request's next batch, `NONE` after the last one."""
        steps = self._steps[item[0]]
        return steps[item[1]][0] if item[1] < len(steps) else NONE

    def _list_stops(self, is_present: Bools) -> deque[tuple[int, int]]:
        """Return the begin and length of each time in which a loop was blocked, but not by an absent request."""
        lanes = self._lanes
        has_batches = np.isin(lanes.pieces.groups, lanes.pieces.groups[~lanes.is_blocked])
        is_stop = lanes.is_blocked & has_batches & np.append(is_present, [True])[lanes.blocker]
        starts, ends = lanes.pieces.starts[is_stop], lanes.pieces.ends[is_stop]
        return deque(sorted(zip(starts.tolist(), (ends - starts).tolist(), strict=True)))


def _are_main_batches(trace: Columns, batch_rows: Int64s) -> Bools:
    """Return True for the outermost batches on the thread with most of them."""
    is_batch = np.zeros(len(trace), dtype=np.bool_)
    is_batch[batch_rows] = True
    is_batch &= nearest_above(trace.parent, is_batch) == NONE
    threads, counts = np.unique(trace.thread_id[is_batch], return_counts=True)
    return is_batch & (trace.thread_id == threads[np.argmax(counts)]) if len(threads) else is_batch


class _Costs:
    """The cost of batches of one name, linear in members and weight. `ratios` are the recorded times divided by that
    cost."""

    def __init__(self, sizes: Int64s, weights: Int64s, took_ns: Int64s) -> None:
        self.most = int(sizes.max())
        columns = np.stack([np.ones(len(sizes)), sizes, weights], axis=1)
        took, scale = np.maximum(took_ns, 1).astype(np.float64), columns.max(axis=0).clip(min=1)
        # Relative errors count: a short batch as much as a long one.
        fitted = np.linalg.lstsq(columns / scale / took[:, None], np.ones(len(took)), rcond=1e-9)[0] / scale
        self._base, self._per_member, self._per_weight = fitted.tolist()
        modelled = columns @ fitted
        self.ratios = np.where(modelled > 0, took / np.where(modelled > 0, modelled, 1), 1).clip(max=1e3)

    def of(self, members: int, weight: int) -> float:
        """Return the modelled time of a batch in ns."""
        modelled: float = self._base + self._per_member * members + self._per_weight * weight
        return max(modelled, 0.0)


def _measure_gap(trace: Columns, batches: Int64s) -> float:
    """Return the mean time between two batches of a thread. Gaps longer than a batch do not count."""
    order = np.lexsort((trace.start_ns[batches], trace.thread_id[batches]))
    rows = batches[order]
    gaps = trace.start_ns[rows[1:]] - trace.end_ns[rows[:-1]]
    is_gap = (trace.thread_id[rows[1:]] == trace.thread_id[rows[:-1]]) & (gaps >= 0)
    is_gap &= gaps <= float(np.median(trace.total_ns[batches])) if len(batches) else False
    return float(gaps[is_gap].mean()) if is_gap.any() else 0.0
