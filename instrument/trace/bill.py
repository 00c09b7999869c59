"""Charges each wait of a request to the groups of requests that caused it. The `neighbours` view shows this bill.

A request waits in its queue, in batches beyond its own share, in stalls between batches, and while another request
blocks its event loop. Each nanosecond of a wait is charged once:

- `BEHIND` in a queue, `BETWEEN` in a stall: the time in which the thread of the request's next batch ran other batches.
  The members of such a batch share it by their weights.
- `SHARED`: the time in a batch beyond the request's own share. The other members share it by their weights.
- `BLOCKED`: the time in which another request blocked the event loop of the batch's thread or of the request's thread.

Time in which no recorded batch ran is charged to nobody. If groups with the weights w share `length` ns, the first k
groups get `length * sum(w[:k]) // sum(w)` together. So the charges add up to the waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from instrument.recording.spans import is_blocked_loop
from instrument.trace.blame import find_blocking_rows
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.forest import NONE
from instrument.trace.groups import Groups, distinct
from instrument.trace.intervals import Unions, union_by_group
from instrument.trace.joined import Joined
from instrument.trace.ledger import QUEUE, STALL, WAITING, Ledger, Turns, compute_portion, divide_own_and_waiting
from instrument.trace.self_times import turns

BEHIND, SHARED, BETWEEN, BLOCKED = WAYS = range(4)
"""The ways to wait for other requests: in a queue, in a batch, between batches, and for a blocked event loop."""


@dataclass(frozen=True)
class Lanes:
    """The batches and blocked event loops of each thread, as disjoint intervals (`pieces`).

    The group of an interval is the index of its thread in `threads`. `row` is the row of its batch or blocked loop.
    `blocker` is the index of the request that blocked the loop, `NONE` if unknown or in a batch.
    """

    threads: Int64s
    pieces: Unions
    row: Int64s
    is_blocked: Bools
    blocker: Int64s

    @classmethod
    def of(cls, trace: Columns, joined: Joined) -> Lanes:
        """Return the lanes of a trace. An instant counts for the batch or the blocked loop that began last."""
        batches = distinct(joined.served.batch)
        blocked = np.flatnonzero(trace.of_sites([is_blocked_loop(site) for site in trace.sites]))
        rows = np.concatenate([batches, blocked]).astype(np.int64)
        requests = np.full(len(rows), NONE, dtype=np.int64)
        requests[len(batches) :] = joined.of[find_blocking_rows(trace, blocked)]
        threads = distinct(trace.thread_id[rows])
        lanes = np.searchsorted(threads, trace.thread_id[rows])
        ranks = np.empty(len(rows), dtype=np.int64)
        ranks[np.lexsort((trace.span_id[rows], -trace.end_ns[rows], trace.start_ns[rows]))] = np.arange(len(rows))
        place, starts, ends = turns(lanes, trace.start_ns[rows], trace.end_ns[rows], ranks)
        return cls(threads, Unions(lanes[place], starts, ends), rows[place], place >= len(batches), requests[place])

    def of_threads(self, thread_id: Int64s) -> Int64s:
        """Return the index of each thread's lane, `NONE` for a thread without one."""
        if not len(self.threads):
            return np.full(len(thread_id), NONE, dtype=np.int64)
        lanes = np.searchsorted(self.threads, thread_id).clip(max=len(self.threads) - 1)
        return np.where(self.threads[lanes] == thread_id, lanes, NONE)


@dataclass(frozen=True)
class Bill:
    """Waits in ns. The indices of `charged_ns` are the kind of wait, the group that waited and the group that caused
    the wait.

    The last causing group is nobody. `suffered_ns` has all waits of each group: those of the ledger, and the time in
    which the event loop was blocked during own work.
    """

    charged_ns: NDArray[np.int64]
    suffered_ns: Int64s


class Account:
    """Computes the bill of a trace's requests. `group` has the group of each request, from 0 to below `count`. Only
    waits of the requests in `is_charged` are charged, but any request may have caused them."""

    def __init__(
        self, trace: Columns, joined: Joined, all_turns: Turns, group: Int64s, count: int, is_charged: Bools
    ) -> None:  # fmt: skip
        self._trace, self._joined, self._turns, self._count = trace, joined, all_turns, count
        self._group, self._is_charged = group, is_charged
        self._charged_turns = np.flatnonzero(is_charged[all_turns.request])
        self.lanes = lanes = Lanes.of(trace, joined)
        served = joined.served
        # The members of each piece: the pairs of its batch, or the request that blocks the loop.
        self._batches = distinct(served.batch)
        self._of_pair = np.searchsorted(self._batches, served.batch)
        self._sums = Groups(self._of_pair, len(self._batches)).sums(served.weight).astype(np.int64)
        places = np.searchsorted(self._batches, lanes.row).clip(max=max(len(self._batches) - 1, 0))
        self._of_piece = np.where(lanes.is_blocked, NONE, places)

    def bill(self, parts: Ledger) -> Bill:
        """Return the bill. `parts` is the ledger of the requests."""
        count, group = self._count, self._group
        charged = np.zeros((len(WAYS), count, count + 1), dtype=np.int64)
        threads = self._find_awaited_threads()
        for way, name in ((BEHIND, QUEUE), (BETWEEN, STALL)):
            waits = self._charged_turns
            waits = waits[self._turns.part[waits] == self._turns.names.index(name)]
            lanes, starts, lengths = self.lanes.of_threads(threads[waits]), *self._select_intervals(waits)
            waiting = group[self._turns.request[waits]]
            ran, blocked = (
                self._measure_runs(waiting, lanes, starts, starts + lengths, blocked=is_so) for is_so in (False, True)
            )
            charged[way] += ran
            charged[BLOCKED] += blocked
            charged[way, :, count] += Groups(waiting, count).sums(lengths) - (ran + blocked).sum(axis=1)
        charged[SHARED] = self._charge_batches(parts.given_ns)
        of_work = self._charge_blocked_work()
        charged[BLOCKED] += of_work
        waits_of_ledger = [place for place, name in enumerate(parts.names) if name in (QUEUE, STALL, WAITING)]
        rows = np.flatnonzero(np.isin(parts.part, waits_of_ledger) & self._is_charged[parts.request])
        waited_ns = Groups(group[parts.request[rows]], count).sums(parts.time_ns[rows])
        return Bill(charged, np.asarray(waited_ns + of_work.sum(axis=1), dtype=np.int64))

    def _select_intervals(self, rows: Int64s) -> tuple[Int64s, Int64s]:
        return self._turns.start_ns[rows], self._turns.length_ns[rows]

    def _find_awaited_threads(self) -> Int64s:
        """Return, for each turn, the thread of the request's next batch, else the thread with the most batches."""
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

    def _sum_weights(self) -> Iterator[tuple[int, Int64s]]:
        """Yield each group, nobody last, with the sum of the weights of all members up to that group in each batch."""
        groups = np.append(self._group, self._count)[self._joined.served.request]
        weights = np.zeros(len(self._batches), dtype=np.int64)
        for number, members in enumerate(_split_by_group(groups, self._count + 1)):
            np.add.at(weights, self._of_pair[members], self._joined.served.weight[members])
            yield number, weights

    def _measure_runs(
        self, waiting: Int64s, lanes: Int64s, starts: Int64s, ends: Int64s, *, blocked: bool
    ) -> NDArray[np.int64]:
        """Return how long batches, or blocked loops, ran in intervals of lanes, by waiting and by running group.
        `waiting` has the group of each interval."""
        pieces, upto = self.lanes.pieces, np.zeros((self._count, self._count + 1), dtype=np.int64)
        some = np.flatnonzero(lanes != NONE)
        firsts, stops = pieces.reached(lanes[some], starts[some], ends[some])
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
        for number, weights in self._sum_weights():
            of_blocked = self.lanes.is_blocked & (owner <= number) & blocked
            weights_up_to = of_blocked.astype(np.int64) if blocked else np.append(weights, 0)[self._of_piece]
            before = np.concatenate([[0], np.cumsum(compute_portion(lengths, weights_up_to, sums))])
            amounts = compute_portion(head, weights_up_to[firsts], sums[firsts]) + compute_portion(
                tail, weights_up_to[last], sums[last]
            )
            upto[:, number] = groups.sums(amounts + before[between] - before[firsts + 1])
        return np.diff(upto, axis=1, prepend=0)

    def _charge_batches(self, given_ns: Int64s) -> NDArray[np.int64]:
        """Return the time that requests waited in batches for other members, by waiting and by causing group."""
        served, rows = self._joined.served, self._charged_turns
        rows = rows[self._turns.pair[rows] != NONE]
        pairs, _, waited_ns = divide_own_and_waiting(given_ns, self._turns.pair[rows], self._turns.length_ns[rows])
        own_group, weight, batch = self._group[served.request[pairs]], served.weight[pairs], self._of_pair[pairs]
        groups, other_weights = Groups(own_group, self._count), self._sums[batch] - weight
        upto = np.zeros((self._count, self._count + 1), dtype=np.int64)
        for number, weights in self._sum_weights():
            weights_up_to = weights[batch] - weight * (own_group <= number)
            upto[:, number] = groups.sums(compute_portion(waited_ns, weights_up_to, np.maximum(other_weights, 1)))
        upto[:, self._count] = groups.sums(waited_ns)  # nobody, where a request had the batch for itself
        return np.diff(upto, axis=1, prepend=0)

    def _charge_blocked_work(self) -> NDArray[np.int64]:
        """Return the time of own work in which other requests blocked the loop, by waiting and by causing group."""
        lanes, requests = self.lanes, np.flatnonzero(self._is_charged)
        if not lanes.is_blocked.any():
            return np.zeros((self._count, self._count + 1), dtype=np.int64)
        roots = self._joined.rows
        lane_of = lanes.of_threads(self._trace.thread_id[roots])
        is_own = lanes.is_blocked & (lanes.blocker != NONE)
        is_own &= lane_of[lanes.blocker] == lanes.pieces.groups
        stretches = union_by_group(lanes.blocker[is_own], lanes.pieces.starts[is_own], lanes.pieces.ends[is_own])
        names = (self._turns.names.index(QUEUE), self._turns.names.index(STALL))
        rows = self._charged_turns
        rows = rows[np.isin(self._turns.part[rows], names) | (self._turns.pair[rows] != NONE)]
        starts, turn_lengths = self._select_intervals(rows)
        work = np.zeros((self._count, self._count + 1), dtype=np.int64)
        for sign, request, begins, ends in (
            (1, requests, self._trace.start_ns[roots[requests]], self._trace.end_ns[roots[requests]]),
            (-1, self._turns.request[rows], starts, starts + turn_lengths),
        ):
            group = self._group[request]
            work += sign * self._measure_runs(group, lane_of[request], begins, ends, blocked=True)
            own_ns = Groups(group, self._count).sums(stretches.within(request, begins, ends))
            work[np.arange(self._count), np.arange(self._count)] -= sign * own_ns.astype(np.int64)
        return work


def _split_by_group(groups: Int64s, count: int) -> list[Int64s]:
    """Return the indices of each group's members, an empty array for a group without members."""
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.searchsorted(groups[order], np.arange(1, count)))
