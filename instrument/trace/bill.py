"""Charges each wait of a request to the groups of requests that caused it, for the `neighbours` view.

A request waits in its queue, for the other members of its batch, in stalls between batches, and while another request
blocks its event loop. Each nanosecond of a wait is charged once, to the requests that were served meanwhile or that
blocked the loop. Time in which no recorded batch ran is charged to nobody.

A wait of `length` ns is divided in proportion to the groups' weights `w`. The charges of the first `k` groups sum up to
`length * sum(w[:k]) // sum(w)`. So all charges together are exactly the wait.

An `Engine` predicts the queue times of the other requests if some requests are removed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from instrument.recording.spans import is_blocked_loop
from instrument.trace.blame import find_blocking_rows
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.indices import (
    NONE,
    Groups,
    Members,
    find_ancestor,
    find_distinct,
    find_group_starts,
    find_rows,
    index_rows,
    make_mask,
    number_combinations,
    sort_by_start,
)
from instrument.trace.intervals import FARTHEST, Union, Unions, measure_overlap, union_by_group
from instrument.trace.joined import Joined
from instrument.trace.ledger import QUEUE, STALL, WAITING, Ledger, Turns, compute_portion, split_batch_time
from instrument.trace.self_times import remove_overlaps

BEHIND, SHARED, BETWEEN, BLOCKED = WAYS = range(4)
"""The ways to wait for other requests: in a queue, in a batch, between batches, and for a blocked event loop."""


@dataclass(frozen=True)
class Lanes:
    """The times in which each thread ran a batch or had a blocked event loop. The intervals of a thread are disjoint.

    `pieces` has the intervals, grouped by the index of their thread in `threads`. `row` is the span of the batch or of
    the blocked loop. `blocker` is the request that blocked the loop, or `NONE`.
    """

    threads: Int64s
    pieces: Unions
    row: Int64s
    is_blocked: Bools
    blocker: Int64s

    @classmethod
    def from_trace(cls, trace: Columns, joined: Joined) -> Lanes:
        """Return the intervals of a trace. Overlapping time belongs to the interval that began last."""
        batches = find_distinct(joined.served.batch)
        blocked = np.flatnonzero(trace.are_of_sites([is_blocked_loop(site) for site in trace.sites]))
        rows = np.concatenate([batches, blocked]).astype(np.int64)
        requests = np.full(len(rows), NONE, dtype=np.int64)
        requests[len(batches) :] = joined.of[find_blocking_rows(trace, blocked)]
        threads = find_distinct(trace.thread_id[rows])
        lanes = np.searchsorted(threads, trace.thread_id[rows])
        ranks = index_rows(sort_by_start(trace.start_ns[rows], trace.end_ns[rows], trace.span_id[rows]), len(rows))[:-1]
        place, starts, ends = remove_overlaps(lanes, trace.start_ns[rows], trace.end_ns[rows], ranks)
        return cls(threads, Unions(lanes[place], starts, ends), rows[place], place >= len(batches), requests[place])

    def find_lanes(self, thread_id: Int64s) -> Int64s:
        return find_rows(self.threads, thread_id).astype(np.int64)


@dataclass(frozen=True)
class Bill:
    """The waits of groups of requests, in ns.

    `charged_ns` has three axes: the kind of wait, the waiting group, and the causing group. The last causing group has
    the waits that no request caused. `suffered_ns` is the total wait of each group.
    """

    charged_ns: NDArray[np.int64]
    suffered_ns: Int64s


class Account:
    """Computes how long groups of requests waited for one another. `group` has the number of each request's group. Only
    the waits of requests in `is_charged` count, but any request may have caused them."""

    def __init__(
        self, trace: Columns, joined: Joined, all_turns: Turns, group: Int64s, count: int, is_charged: Bools
    ) -> None:  # fmt: skip
        self._trace, self._joined, self._turns, self._count = trace, joined, all_turns, count
        self._group, self._is_charged = group, is_charged
        self._charged_turns = np.flatnonzero(is_charged[all_turns.request])
        self.lanes = lanes = Lanes.from_trace(trace, joined)
        served = joined.served
        # The members of each piece: the pairs of its batch, or the request that blocks the loop.
        self._batches = find_distinct(served.batch)
        self._of_pair = np.searchsorted(self._batches, served.batch)
        self._sums = Groups(self._of_pair, len(self._batches)).sum_by_group(served.weight).astype(np.int64)
        places = np.searchsorted(self._batches, lanes.row).clip(max=max(len(self._batches) - 1, 0))
        self._of_piece = np.where(lanes.is_blocked, NONE, places)

    def compute_bill(self, parts: Ledger) -> Bill:
        count, group = self._count, self._group
        charged = np.zeros((len(WAYS), count, count + 1), dtype=np.int64)
        threads = self._find_awaited_threads()
        for way, name in ((BEHIND, QUEUE), (BETWEEN, STALL)):
            waits = self._charged_turns
            waits = waits[self._turns.part[waits] == self._turns.names.index(name)]
            lanes, waiting = self.lanes.find_lanes(threads[waits]), group[self._turns.request[waits]]
            starts, lengths = self._turns.start_ns[waits], self._turns.length_ns[waits]
            ran, blocked = (
                self._measure_waits(waiting, lanes, starts, starts + lengths, blocked=is_so) for is_so in (False, True)
            )
            charged[way] += ran
            charged[BLOCKED] += blocked
            charged[way, :, count] += Groups(waiting, count).sum_by_group(lengths) - (ran + blocked).sum(axis=1)
        charged[SHARED] = self._charge_batches(parts.given_ns)
        of_work = self._charge_blocked_work()
        charged[BLOCKED] += of_work
        waits_of_ledger = [place for place, name in enumerate(parts.names) if name in (QUEUE, STALL, WAITING)]
        rows = np.flatnonzero(np.isin(parts.part, waits_of_ledger) & self._is_charged[parts.request])
        waited_ns = Groups(group[parts.request[rows]], count).sum_by_group(parts.time_ns[rows])
        return Bill(charged, np.asarray(waited_ns + of_work.sum(axis=1), dtype=np.int64))

    def _find_awaited_threads(self) -> Int64s:
        batch_rows = self._joined.served.batch
        if not len(batch_rows):
            return np.full(len(self._turns.pair), NONE, dtype=np.int64)
        threads, counts = np.unique(self._trace.thread_id[self._batches], return_counts=True)
        count, request = len(self._turns.pair), self._turns.request
        places = np.where(self._turns.pair != NONE, np.arange(count), count)
        following = np.minimum.accumulate(places[::-1])[::-1]
        is_own = np.append(request, NONE)[following] == request
        pair = np.append(self._turns.pair, 0)[following]
        return np.asarray(np.where(is_own, self._trace.thread_id[batch_rows[pair]], threads[np.argmax(counts)]))

    def _accumulate_weights(self) -> Iterator[tuple[int, Int64s]]:
        groups = np.append(self._group, self._count)[self._joined.served.request]
        weights = np.zeros(len(self._batches), dtype=np.int64)
        members_of = Members(groups, self._count + 1)
        for number in range(self._count + 1):
            members = members_of[number]
            np.add.at(weights, self._of_pair[members], self._joined.served.weight[members])
            yield number, weights

    def _measure_waits(
        self, waiting: Int64s, lanes: Int64s, starts: Int64s, ends: Int64s, *, blocked: bool
    ) -> NDArray[np.int64]:
        pieces, upto = self.lanes.pieces, np.zeros((self._count, self._count + 1), dtype=np.int64)
        some = np.flatnonzero(lanes != NONE)
        firsts, stops = pieces.overlapping_ranges(lanes[some], starts[some], ends[some])
        has_work = firsts < stops
        some, firsts, last = some[has_work], firsts[has_work], stops[has_work] - 1
        if not len(some) or (blocked and not self.lanes.is_blocked.any()):
            return upto
        starts, ends = starts[some], ends[some]
        # The first and the last piece may be cut. Those between are whole.
        head = np.minimum(ends, pieces.ends[firsts]) - np.maximum(starts, pieces.starts[firsts])
        tail = np.where(last > firsts, np.minimum(ends, pieces.ends[last]) - pieces.starts[last], 0)
        between, lengths = np.maximum(firsts + 1, last), pieces.ends - pieces.starts
        groups = Groups(waiting[some], self._count)
        owner = np.append(self._group, self._count)[self.lanes.blocker]
        sums = np.where(self.lanes.is_blocked, 1, np.append(self._sums, 1)[self._of_piece])
        for number, weights in self._accumulate_weights():
            of_blocked = self.lanes.is_blocked & (owner <= number) & blocked
            weights_up_to = of_blocked.astype(np.int64) if blocked else np.append(weights, 0)[self._of_piece]
            before = np.concatenate([[0], np.cumsum(compute_portion(lengths, weights_up_to, sums))])
            amounts = compute_portion(head, weights_up_to[firsts], sums[firsts]) + compute_portion(
                tail, weights_up_to[last], sums[last]
            )
            upto[:, number] = groups.sum_by_group(amounts + before[between] - before[firsts + 1])
        return np.diff(upto, axis=1, prepend=0)

    def _charge_batches(self, given_ns: Int64s) -> NDArray[np.int64]:
        served, rows = self._joined.served, self._charged_turns
        rows = rows[self._turns.pair[rows] != NONE]
        pairs, _, waited_ns = split_batch_time(given_ns, self._turns.pair[rows], self._turns.length_ns[rows])
        own_group, weight, batch = self._group[served.request[pairs]], served.weight[pairs], self._of_pair[pairs]
        groups, other_weights = Groups(own_group, self._count), self._sums[batch] - weight
        upto = np.zeros((self._count, self._count + 1), dtype=np.int64)
        for number, weights in self._accumulate_weights():
            weights_up_to = weights[batch] - weight * (own_group <= number)
            upto[:, number] = groups.sum_by_group(
                compute_portion(waited_ns, weights_up_to, np.maximum(other_weights, 1))
            )
        upto[:, self._count] = groups.sum_by_group(waited_ns)  # nobody, where a request had the batch for itself
        return np.diff(upto, axis=1, prepend=0)

    def _charge_blocked_work(self) -> NDArray[np.int64]:
        lanes, requests = self.lanes, np.flatnonzero(self._is_charged)
        if not lanes.is_blocked.any():
            return np.zeros((self._count, self._count + 1), dtype=np.int64)
        roots = self._joined.rows
        lane_of = lanes.find_lanes(self._trace.thread_id[roots])
        is_own = lanes.is_blocked & (lanes.blocker != NONE)
        is_own &= lane_of[lanes.blocker] == lanes.pieces.groups
        stretches = union_by_group(lanes.blocker[is_own], lanes.pieces.starts[is_own], lanes.pieces.ends[is_own])
        names = (self._turns.names.index(QUEUE), self._turns.names.index(STALL))
        rows = self._charged_turns
        rows = rows[np.isin(self._turns.part[rows], names) | (self._turns.pair[rows] != NONE)]
        starts, turn_lengths = self._turns.start_ns[rows], self._turns.length_ns[rows]
        work = np.zeros((self._count, self._count + 1), dtype=np.int64)
        for sign, request, begins, ends in (
            (1, requests, self._trace.start_ns[roots[requests]], self._trace.end_ns[roots[requests]]),
            (-1, self._turns.request[rows], starts, starts + turn_lengths),
        ):
            group = self._group[request]
            work += sign * self._measure_waits(group, lane_of[request], begins, ends, blocked=True)
            own_ns = Groups(group, self._count).sum_by_group(stretches.length_within(request, begins, ends))
            work[np.arange(self._count), np.arange(self._count)] -= sign * own_ns.astype(np.int64)
        return work


MOST_PAIRS = 40_000
"""The maximum number of batch members in a simulation. Later requests are left out."""

TOLERANCE = 0.1
"""The maximum relative error of the simulated mean queue time. Above it, a simulation is not used."""


@dataclass(frozen=True)
class Replay:
    """The requests of a simulation, in order of arrival. `queue_ns` are their recorded times in the queue, and
    `replayed_ns` the simulated ones."""

    place: Int64s
    queue_ns: Int64s
    replayed_ns: Int64s

    @property
    def is_sound(self) -> bool:
        recorded = float(self.queue_ns.mean()) if len(self.queue_ns) else 0.0
        return recorded > 0 and abs(float(self.replayed_ns.mean()) - recorded) <= TOLERANCE * recorded


class Engine:
    """A simulator of the engine that served the requests of a trace."""

    def __init__(self, trace: Columns, joined: Joined, all_turns: Turns, lanes: Lanes) -> None:
        served = joined.served
        self._lanes = lanes
        is_main = make_mask(served.batch, len(trace))
        is_main &= find_ancestor(trace.parent, is_main) == NONE
        threads, counts = np.unique(trace.thread_id[is_main], return_counts=True)
        if len(threads):  # of the outermost batches, those on the thread that ran most of them
            is_main &= trace.thread_id == threads[np.argmax(counts)]
        pairs = np.flatnonzero((served.request != NONE) & is_main[served.batch])
        pairs = pairs[np.lexsort((trace.start_ns[served.batch[pairs]], served.request[pairs]))]
        first = find_group_starts(served.request[pairs])
        self._place = served.request[pairs[first]]
        begins = trace.start_ns[served.batch[pairs[first]]]
        is_queue = np.flatnonzero(all_turns.part == all_turns.names.index(QUEUE))
        queued = Groups(all_turns.request[is_queue], len(joined.rows)).sum_by_group(all_turns.length_ns[is_queue])
        self._queue_ns = queued[self._place].astype(np.int64)
        self._latency_ns = int(self._queue_ns.min(initial=FARTHEST))
        self._arrival = begins - self._queue_ns + self._latency_ns
        last = np.append(first[1:], len(pairs))
        order = np.argsort(self._arrival, kind="stable")
        order = order[np.cumsum((last - first)[order]) <= MOST_PAIRS]
        self._place, self._queue_ns, self._arrival = self._place[order], self._queue_ns[order], self._arrival[order]
        batches = find_distinct(served.batch[is_main[served.batch]])
        names, _ = number_combinations(trace.site[batches])
        of_pair = np.searchsorted(batches, served.batch).clip(max=max(len(batches) - 1, 0))
        members = np.flatnonzero(is_main[served.batch])
        by_batch = Groups(of_pair[members], len(batches))
        sizes, weights = by_batch.count_members(), by_batch.sum_by_group(served.weight[members])
        of_names = Groups(names, int(names.max(initial=-1)) + 1).list_rows()
        self._costs = [_Costs(sizes[rows], weights[rows], trace.total_ns[batches[rows]]) for rows in of_names]
        ratios = np.ones(len(batches))
        for rows, cost in zip(of_names, self._costs, strict=True):
            ratios[rows] = cost.ratios
        # The mean time between two batches of a thread. Gaps longer than the median batch do not count.
        rows = batches[np.lexsort((trace.start_ns[batches], trace.thread_id[batches]))]
        gaps = trace.start_ns[rows[1:]] - trace.end_ns[rows[:-1]]
        is_gap = (trace.thread_id[rows[1:]] == trace.thread_id[rows[:-1]]) & (gaps >= 0)
        is_gap &= gaps <= float(np.median(trace.total_ns[batches])) if len(batches) else False
        self._gap_ns = float(gaps[is_gap].mean()) if is_gap.any() else 0.0
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
        """Simulate the engine with only the requests that `is_present` marks."""
        present = np.flatnonzero(is_present[self._place])
        arrivals, costs = self._arrival.tolist(), self._costs
        lanes, pieces = self._lanes, self._lanes.pieces
        has_batches = np.isin(pieces.groups, pieces.groups[~lanes.is_blocked])
        # Times in which a request that is present, or an unknown one, blocked the engine's event loop.
        is_stop = lanes.is_blocked & has_batches & np.append(is_present, [True])[lanes.blocker]
        starts, ends = pieces.starts[is_stop], pieces.ends[is_stop]
        stops = deque(sorted(zip(starts.tolist(), (ends - starts).tolist(), strict=True)))
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
                    now_ns += ratio * cost.estimate_ns(len(some), sum(weight for weight, _, _ in some)) + self._gap_ns
            active = [item for item in active if self._next_batch_name(item) != NONE]
        replayed = np.array([queues[number] for number in present.tolist()], dtype=np.float64)
        replayed_ns = np.round(replayed).astype(np.int64) + self._latency_ns
        return Replay(self._place[present], self._queue_ns[present], replayed_ns)

    def _next_batch_name(self, item: Sequence[int]) -> int:
        steps = self._steps[item[0]]
        return steps[item[1]][0] if item[1] < len(steps) else NONE


class _Costs:
    """A model of a batch's time, linear in the number of members and in their weight. `ratios` are the recorded times
    divided by the modelled ones."""

    def __init__(self, sizes: Int64s, weights: Int64s, took_ns: Int64s) -> None:
        self.most = int(sizes.max())
        columns = np.stack([np.ones(len(sizes)), sizes, weights], axis=1)
        took, scale = np.maximum(took_ns, 1).astype(np.float64), columns.max(axis=0).clip(min=1)
        # Relative errors count: a short batch as much as a long one.
        fitted = np.linalg.lstsq(columns / scale / took[:, None], np.ones(len(took)), rcond=1e-9)[0] / scale
        self._base, self._per_member, self._per_weight = fitted.tolist()
        modelled = columns @ fitted
        self.ratios = np.where(modelled > 0, took / np.where(modelled > 0, modelled, 1), 1).clip(max=1e3)

    def estimate_ns(self, members: int, weight: int) -> float:
        modelled: float = self._base + self._per_member * members + self._per_weight * weight
        return max(modelled, 0.0)
