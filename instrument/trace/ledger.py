"""Divides the time of each request into parts, which add up exactly, to the nanosecond (the ledger).

Every instant belongs to the open part that began last. A part is a phase of the request's own work, a batch that served
the request, or a time in between:
- `queue`: from the hand-off span to the first batch. The hand-off span is the newest earlier span with the request's
  key, such as a call of `submit`. Without it, the queue begins at the last begin or end of the request's own work.
- `stall`: from one batch of the request to the next batch.
- `transport`: between the request's own threads and the threads that run batches.
- `lock`: calls that wait for a lock or a place in a pool.
- `sub-requests`: requests that began within the request but count on their own.
- `unknown`: none of the above.

The time of a batch is divided among its members by weight. In the ledger of a request, a batch has two parts: first the
request's own share, then the wait for the other members. For a batch of `length` ns and the
weights `w`, the shares of the first `k` members add up to `length * sum(w[:k]) // sum(w)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.recording.spans import BATCH_KEYS, KEY, OUTCOME, Site
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.indices import (
    NONE,
    Groups,
    are_at_or_above,
    compute_running_max,
    count_numbers_up_to,
    find_ancestor,
    find_distinct,
    find_group_starts,
    find_last_number,
    find_nearest_row,
    index_rows,
    make_mask,
    number_combinations,
    sort_by_start,
)
from instrument.trace.intervals import Unions, lengths_by_group, union_by_group
from instrument.trace.joined import Joined, Served
from instrument.trace.self_times import remove_overlaps

QUEUE, STALL, TRANSPORT, UNKNOWN = "queue", "stall", "transport", "unknown"
SHARE, WAITING = "share of batches", "waiting in batches"
SUB_REQUESTS = "sub-requests"
LOCK = "lock"

LOCK_WAITS = ("acquire", "Condition.wait", "Condition.wait_for")

COPIES = {"h2d": "copy in", "d2h": "copy out"}
PHASE_OF_KIND = {"layer": "compute", "loader": "load", "comm": "comm"}


def find_phase(site: Site) -> str | None:
    facts = dict(site.attributes)
    declared = facts.get("phase")
    if isinstance(declared, str) and declared:
        return declared
    if site.kind == "copy":
        direction = facts.get("direction")
        return COPIES.get(direction, "copy") if isinstance(direction, str) else "copy"
    if site.kind == "phase" or site.name == QUEUE:
        return site.name
    return LOCK if is_lock_wait(site) else PHASE_OF_KIND.get(site.kind)


def is_lock_wait(site: Site) -> bool:
    is_named = f".{site.qualname}".endswith(tuple(f".{name}" for name in LOCK_WAITS))
    return dict(site.attributes).get("phase") == LOCK or (is_named and site.kind in ("op", "phase", "user"))


@dataclass(frozen=True)
class Ledger:
    """The parts of requests, such as their queues, which add up to the requests' times. Each row is one part of one
    request. The rows are ordered by request.

    `part` is an index into `names`. `given_ns` has, for each pair in `Served`, the request's share of the batch's own
    time.
    """

    names: tuple[str, ...]
    request: Int64s
    part: Int64s
    time_ns: Int64s
    given_ns: Int64s

    def times_of_request(self, place: int) -> dict[str, int]:
        first, last = np.searchsorted(self.request, [place, place + 1])
        rows = zip(self.part[first:last].tolist(), self.time_ns[first:last].tolist(), strict=True)
        return {self.names[part]: time_ns for part, time_ns in rows}

    def times_by_part(self, columns: Mapping[str, str], count: int) -> dict[str, Int64s]:
        """Return the times of all `count` requests as columns, by column name. `columns` maps parts to column names."""
        times = {column: np.zeros(count, dtype=np.int64) for column in columns.values()}
        for number, name in enumerate(self.names):
            if name in columns:
                is_part = self.part == number
                times[columns[name]][self.request[is_part]] = self.time_ns[is_part]
        return times


def divide_among_members(served: Served, amounts: Int64s) -> Int64s:
    lengths, firsts = amounts[served.batch], find_group_starts(served.batch)
    counts = np.diff(firsts, append=len(lengths))
    sums = np.repeat(np.add.reduceat(served.weight, firsts), counts)
    until = np.cumsum(served.weight)
    until -= np.repeat((until - served.weight)[firsts], counts)
    return compute_portion(lengths, until, sums) - compute_portion(lengths, until - served.weight, sums)


def compute_portion(amounts: Int64s, weights: Int64s, sums: Int64s) -> Int64s:
    """Return `amounts * weights // sums`, exact even if products exceed 64 bits. Sums must be positive."""
    if int(amounts.max(initial=0)) * int(sums.max(initial=0)) < 1 << 62:
        return np.asarray(amounts * weights // sums)
    return np.asarray(amounts.astype(object) * weights.astype(object) // sums.astype(object), dtype=np.int64)


def measure_own_batch_times(trace: Columns, served: Served, parts: Unions, batch: Int64s, device: Int64s) -> Int64s:
    """Return the time of each batch without the time of competing batches.

    Batches on a device compete if they serve the same request or are nested. Their overlap belongs to the batch that
    began last.
    """
    its_batch, lengths = batch[parts.groups], parts.ends - parts.starts
    at_once = np.flatnonzero(_may_overlap(device[parts.groups], parts.starts, parts.ends))
    if not len(at_once):
        return np.asarray(Groups(its_batch, len(trace)).sum_by_group(lengths), dtype=np.int64)
    # A batch nested in another one of the same thread and task competes with it.
    is_batch = make_mask(served.batch, len(trace))
    inner = np.flatnonzero(is_batch)
    outer = find_ancestor(trace.parent, is_batch)[inner].astype(np.int64)
    is_within = (outer != NONE) & (trace.thread_id[outer] == trace.thread_id[inner])
    is_within &= trace.task_id[outer] == trace.task_id[inner]
    inner, outer = inner[is_within], outer[is_within]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(served.key), len(trace))}
    unknown = np.array([numbers[key] for key in served.key], dtype=np.int64)
    pair_of_nested = np.arange(len(inner)) + len(trace) + len(numbers)
    batches = np.concatenate([served.batch, inner, outer])
    members = np.concatenate(
        [np.where(served.request == NONE, unknown, served.request), pair_of_nested, pair_of_nested]
    )
    in_order = np.argsort(batches, kind="stable")
    batches, members = batches[in_order], members[in_order]
    firsts, ends = (np.searchsorted(batches, its_batch[at_once], side=side) for side in ("left", "right"))
    interval_of = np.repeat(at_once, ends - firsts)
    member = members[np.arange(len(interval_of)) - np.repeat(np.cumsum(ends - firsts) - ends, ends - firsts)]
    _, once = number_combinations(interval_of, member)  # a batch may have a key of no request twice
    interval_of, member = interval_of[once], member[once]
    rivals, _ = number_combinations(member, device[parts.groups][interval_of])
    is_rival = _may_overlap(rivals, parts.starts[interval_of], parts.ends[interval_of])
    interval_of, rivals = interval_of[is_rival], rivals[is_rival]
    starts, stops = parts.starts[interval_of], parts.ends[interval_of]
    row = its_batch[interval_of]
    ranks = index_rows(sort_by_start(trace.start_ns[row], trace.end_ns[row], trace.span_id[row]), len(row))[:-1]
    has_turn, turn_starts, turn_ends = remove_overlaps(rivals, starts, stops, ranks)
    # An interval loses the time outside of its turns: from its begin or a turn's end to the next turn or its end.
    places = np.concatenate([np.arange(len(interval_of)), has_turn])
    lost_from, lost_to = np.concatenate([starts, turn_ends]), np.concatenate([turn_starts, stops])
    to_places = np.concatenate([has_turn, np.arange(len(interval_of))])
    begins, finishes = np.lexsort((lost_from, places)), np.lexsort((lost_to, to_places))
    lost = lengths_by_group(interval_of[places[begins]], lost_from[begins], lost_to[finishes], len(its_batch))
    return np.asarray(Groups(its_batch, len(trace)).sum_by_group(lengths - lost), dtype=np.int64)


def _may_overlap(groups: Int64s, starts: Int64s, ends: Int64s) -> Bools:
    is_overlapping = np.zeros(len(groups), dtype=np.bool_)
    order = np.lexsort((starts, groups))
    group_numbers = np.cumsum(np.diff(groups[order], prepend=groups[order[:1]]) != 0)
    begins_before = starts[order][1:] < compute_running_max(ends[order], group_numbers)[:-1]
    later = np.flatnonzero(begins_before & (group_numbers[1:] == group_numbers[:-1])) + 1
    is_overlapping[order[later]] = is_overlapping[order[later - 1]] = True
    return is_overlapping


class Turns(NamedTuple):
    """The turns of requests, ordered by request and time. A turn is an interval in which a request is in one part.

    `part` is an index into `names`. `row` is the turn's span, or `NONE` between spans. `pair` is the index in `Served`,
    or `NONE` outside of batches.
    """

    names: tuple[str, ...]
    request: Int64s
    part: Int64s
    row: Int64s
    pair: Int64s
    start_ns: Int64s
    length_ns: Int64s


def find_turns(trace: Columns, joined: Joined) -> Turns:
    work, batches = _find_phase_spans(trace, joined), _find_batches(trace, joined)
    between = _find_gaps(trace, joined, work, batches)
    # The requests that began within another request and count as separate requests.
    around = np.append(joined.of, NONE)[trace.parent[joined.rows]]
    nested = np.flatnonzero((around != NONE) & (around != np.arange(len(around))))
    inner = _clip_to_requests(trace, joined, around[nested], joined.rows[nested], np.full(len(nested), NONE))
    names: dict[str, int] = {QUEUE: 0, STALL: 1, TRANSPORT: 2, SHARE: 3}
    part_of_site = np.array(
        [NONE if name is None else names.setdefault(name, len(names)) for name in map(find_phase, trace.sites)]
        or [NONE],
        dtype=np.int64,
    )
    request, starts, ends, pair = (
        np.concatenate([getattr(intervals, name) for intervals in (between, work, inner, batches)])
        for name in ("request", "start_ns", "end_ns", "pair")
    )
    in_batch = np.full(len(batches.row), names[SHARE])
    in_others = np.full(len(inner.row), names.setdefault(SUB_REQUESTS, len(names)) if len(inner.row) else 0)
    part = np.concatenate([between.row, part_of_site[trace.site[work.row]], in_others, in_batch])
    spans, none = np.concatenate([work.row, inner.row, batches.row]), np.full(len(between.row), NONE)
    # By start time before clipping. Of equal intervals, a time between spans ranks lower.
    ranked = sort_by_start(
        np.concatenate([between.start_ns, trace.start_ns[spans]]),
        np.concatenate([between.end_ns, trace.end_ns[spans]]),
        np.concatenate([none, trace.span_id[spans]]),
    )
    ranks = index_rows(ranked, len(ranked))[:-1]
    del work, batches, between, inner, in_batch  # frees as much memory as `remove_overlaps` needs
    order, begins, finishes = remove_overlaps(request, starts, ends, ranks)
    row = np.concatenate([none, spans])[order]
    return Turns(tuple(names), request[order], part[order], row, pair[order], begins, finishes - begins)


def find_batches_and_gaps(trace: Columns, joined: Joined) -> tuple[Intervals, Intervals]:
    """Return the batches of each request, and the gaps before and between them. Both are ordered by request.

    The `row` of a gap is 0 for a queue, 1 for a stall, and 2 for transport.
    """
    batches = _find_batches(trace, joined)
    return batches, _find_gaps(trace, joined, _find_phase_spans(trace, joined), batches, of_all_keys=False)


def compute_ledger(trace: Columns, joined: Joined, all_turns: Turns | None = None) -> Ledger:
    all_turns = find_turns(trace, joined) if all_turns is None else all_turns
    rows = find_distinct(joined.served.batch)
    spans = union_by_group(np.arange(len(rows)), trace.start_ns[rows], trace.end_ns[rows])
    given_ns = divide_among_members(
        joined.served, measure_own_batch_times(trace, joined.served, spans, rows, np.zeros(len(rows), dtype=np.int64))
    )
    numbers = {name: number for number, name in enumerate(all_turns.names)}
    unknown = numbers.setdefault(UNKNOWN, len(numbers))
    is_own = all_turns.pair == NONE
    pairs, own_shares, waiting = split_batch_time(given_ns, all_turns.pair[~is_own], all_turns.length_ns[~is_own])
    of_batches = joined.served.request[pairs]
    waits = numbers.setdefault(WAITING, len(numbers))
    request = np.concatenate([all_turns.request[is_own], of_batches, of_batches])
    part = np.concatenate([all_turns.part[is_own], np.full(len(pairs), numbers[SHARE]), np.full(len(pairs), waits)])
    time_ns = np.concatenate([all_turns.length_ns[is_own], own_shares, waiting])
    known_ns = Groups(request, len(joined.rows)).sum_by_group(time_ns).astype(np.int64)  # up to the wall time
    request = np.concatenate([request, np.arange(len(joined.rows))])
    part = np.concatenate([part, np.full(len(joined.rows), unknown)])
    time_ns = np.concatenate([time_ns, trace.total_ns[joined.rows] - known_ns])
    has_time = time_ns > 0
    request, part, time_ns = request[has_time], part[has_time], time_ns[has_time]
    groups, firsts = number_combinations(request, part)
    order = np.lexsort((part[firsts], request[firsts]))
    sums = Groups(groups, len(firsts)).sum_by_group(time_ns)[order].astype(np.int64)
    return Ledger(tuple(numbers), request[firsts[order]], part[firsts[order]], sums, given_ns)


class Moment(NamedTuple):
    """A turn of one request: an interval in one part, with the fields of `Turns`."""

    part: str
    start_ns: int
    end_ns: int
    row: int
    pair: int


def list_turns(trace: Columns, joined: Joined, place: int) -> list[Moment]:
    """Return all turns of one request in order. Gaps get the part `UNKNOWN`, and all turns in batches the part
    `SHARE`."""
    served = joined.served
    own_served = replace(served, request=np.where(served.request == place, place, NONE))
    own_turns = find_turns(trace, replace(joined, of=np.where(joined.of == place, place, NONE), served=own_served))
    row = int(joined.rows[place])
    at_ns, end_ns = int(trace.start_ns[row]), int(trace.end_ns[row])
    moments: list[Moment] = []
    columns = (own_turns.part, own_turns.row, own_turns.pair, own_turns.start_ns, own_turns.length_ns)
    for part, span, pair, start_ns, length_ns in zip(*(column.tolist() for column in columns), strict=True):
        if start_ns > at_ns:
            moments.append(Moment(UNKNOWN, at_ns, start_ns, NONE, NONE))
        name, at_ns = own_turns.names[part], start_ns + length_ns
        last = moments[-1] if moments else None
        if last is not None and (last.part, last.row, last.pair, last.end_ns) == (name, span, pair, start_ns):
            moments[-1] = last._replace(end_ns=at_ns)
        else:
            moments.append(Moment(name, start_ns, at_ns, span, pair))
    if at_ns < end_ns:
        moments.append(Moment(UNKNOWN, at_ns, end_ns, NONE, NONE))
    return moments


def split_batch_time(given_ns: Int64s, pairs: Int64s, lengths: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    groups, firsts = number_combinations(pairs)
    spent = Groups(groups, len(firsts)).sum_by_group(lengths)
    distinct_pairs = pairs[firsts]
    own_shares = np.minimum(spent, given_ns[distinct_pairs])
    return distinct_pairs, own_shares, spent - own_shares


_Part = tuple[Int64s, Int64s, Int64s, int]


class Intervals(NamedTuple):
    """The intervals of requests, clipped to the requests. `row` is the row of a span, or the kind of a gap."""

    request: Int64s
    row: Int64s
    start_ns: Int64s
    end_ns: Int64s
    pair: Int64s

    def select_intervals(self, places: NDArray[Any]) -> Intervals:
        return Intervals(*(column[places] for column in self))


def _clip_to_requests(trace: Columns, joined: Joined, request: Int64s, row: Int64s, pair: Int64s) -> Intervals:
    around = joined.rows[request]
    starts, ends = np.clip((trace.start_ns[row], trace.end_ns[row]), trace.start_ns[around], trace.end_ns[around])
    return Intervals(request, row, starts, ends, pair)


def _find_phase_spans(trace: Columns, joined: Joined) -> Intervals:
    is_phase = np.array([find_phase(site) is not None for site in trace.sites] or [False])[trace.site]
    is_phase[joined.rows] = False
    rows = np.flatnonzero(is_phase & (joined.of != NONE))
    rows = rows[~np.isin(rows, joined.served.batch)]
    return _clip_to_requests(trace, joined, joined.of[rows], rows, np.full(len(rows), NONE))


def _find_batches(trace: Columns, joined: Joined) -> Intervals:
    pairs = np.flatnonzero(joined.served.request != NONE)
    intervals = _clip_to_requests(trace, joined, joined.served.request[pairs], joined.served.batch[pairs], pairs)
    order = np.lexsort((intervals.end_ns, intervals.start_ns, intervals.request))
    return intervals.select_intervals(order[(intervals.start_ns < intervals.end_ns)[order]])


def _find_gaps(
    trace: Columns, joined: Joined, work: Intervals, batches: Intervals, *, of_all_keys: bool = True
) -> Intervals:
    if not len(joined.served.batch):
        return Intervals(*np.zeros((5, 0), dtype=np.int64))
    # A pipeline's batches overlap. A stall begins when all earlier batches have ended.
    reach, firsts = compute_running_max(batches.end_ns, batches.request), find_group_starts(batches.request)
    hand_offs = _find_hand_offs(trace, joined)
    parts = [
        _find_first_queues(trace, joined, work, hand_offs, batches, firsts),
        _find_lost_queues(trace, joined, hand_offs, batches),
    ]
    if of_all_keys and len(firsts) < len(batches.request):
        parts.append(_find_further_queues(trace, joined, hand_offs, batches))
    later = np.flatnonzero(batches.request[1:] == batches.request[:-1]) + 1
    parts.append((batches.request[later], reach[later - 1], batches.start_ns[later], 1))
    parts += _find_transports(trace, joined, work, batches, firsts, reach)
    request, starts, ends = (np.concatenate([part[column] for part in parts]) for column in range(3))
    kinds = np.concatenate([np.full(len(part[0]), part[3]) for part in parts])
    filled = starts < ends
    return Intervals(request[filled], kinds[filled], starts[filled], ends[filled], np.full(int(filled.sum()), NONE))


def _find_hand_offs(trace: Columns, joined: Joined) -> Intervals:
    rows = trace.attributes.rows_with_attribute(KEY)
    serves = are_at_or_above(trace.parent, find_distinct(joined.served.batch))
    serves[joined.rows] = True
    rows = rows[(joined.of[rows] != NONE) & ~serves[rows]]
    rows = rows[np.lexsort((trace.span_id[rows], -trace.end_ns[rows], trace.start_ns[rows], joined.of[rows]))]
    return Intervals(joined.of[rows], rows, trace.start_ns[rows], trace.end_ns[rows], np.full(len(rows), NONE))


def _find_queue_begins(
    trace: Columns, hand_offs: Intervals, groups: Int64s, of: Int64s, begins: Int64s, upto: Int64s, otherwise: Int64s
) -> Int64s:
    """Return the time at which the queue of each group in `of` begins.

    A queue begins at the newest hand-off span that began by `upto`. Without a hand-off span, the queue begins at
    `otherwise`.
    """
    if not len(groups):
        return otherwise
    newest = find_last_number(groups, hand_offs.start_ns, of, upto)
    rows = hand_offs.row[newest]
    is_done = (hand_offs.end_ns[newest] <= upto) & (trace.error[rows] == NONE)
    is_done &= ~np.isin(rows, trace.attributes.rows_with_attribute(OUTCOME))
    handed_over = np.where(is_done, hand_offs.end_ns[newest], hand_offs.start_ns[newest])
    return np.where(newest == NONE, otherwise, np.maximum(handed_over, begins))


def _find_first_queues(
    trace: Columns, joined: Joined, work: Intervals, hand_offs: Intervals, batches: Intervals, firsts: Int64s
) -> _Part:
    """Return the queue of each request. It lasts from the hand-off or the last own work to the first batch."""
    owners = np.concatenate([work.request, work.request])
    edges = np.concatenate([work.start_ns, work.end_ns])
    order = np.lexsort((edges, owners))
    owners, edges = owners[order], edges[order]
    requests, upto = batches.request[firsts], batches.start_ns[firsts]
    last = find_last_number(owners, edges, requests, upto)
    begins = trace.start_ns[joined.rows[requests]]
    edge_ns = np.where(last == NONE, begins, np.maximum(np.append(edges, 0)[last], begins))
    from_ns = _find_queue_begins(trace, hand_offs, hand_offs.request, requests, begins, upto, edge_ns)
    return requests, from_ns, upto, 0


def _find_lost_queues(trace: Columns, joined: Joined, hand_offs: Intervals, batches: Intervals) -> _Part:
    """Return the queues of failed requests that no batch served. Such a queue lasts from the hand-off to the end of the
    request."""
    rows = joined.rows
    is_lost = (trace.error[rows] != NONE) | np.isin(rows, trace.attributes.rows_with_attribute(OUTCOME))
    is_lost[batches.request] = False
    requests = np.flatnonzero(is_lost)
    begins, ends = trace.start_ns[rows[requests]], trace.end_ns[rows[requests]]
    return requests, _find_queue_begins(trace, hand_offs, hand_offs.request, requests, begins, ends, ends), ends, 0


def _find_further_queues(trace: Columns, joined: Joined, hand_offs: Intervals, batches: Intervals) -> _Part:
    several = np.array([place for place, keys in joined.keys.items() if len(keys) > 1], dtype=np.int64)
    hand_offs, batches = (part.select_intervals(np.isin(part.request, several)) for part in (hand_offs, batches))
    numbers: dict[str, int] = {}
    of_batch = np.array(
        [numbers.setdefault(joined.served.key[pair], len(numbers)) for pair in batches.pair.tolist()], dtype=np.int64
    )
    of_span = np.array(
        [numbers.get(str(key), NONE) for key in trace.attributes.values(KEY, hand_offs.row)], dtype=np.int64
    )
    groups = batches.request * len(numbers) + of_batch
    _, firsts = np.unique(groups, return_index=True)
    firsts = firsts[batches.request[firsts - 1] == batches.request[firsts]]
    firsts = firsts[firsts > 0]  # the batches of a request are consecutive, in the order of time
    of_hand_offs = np.where(of_span == NONE, NONE, hand_offs.request * len(numbers) + of_span)
    order = np.lexsort((hand_offs.start_ns, of_hand_offs))
    requests, upto = batches.request[firsts], batches.start_ns[firsts]
    begins = trace.start_ns[joined.rows[requests]]
    from_ns = _find_queue_begins(
        trace, hand_offs.select_intervals(order), of_hand_offs[order], groups[firsts], begins, upto, upto
    )  # fmt: skip
    return requests, from_ns, upto, 0


def _find_transports(
    trace: Columns, joined: Joined, work: Intervals, batches: Intervals, firsts: Int64s, reach: Int64s
) -> list[_Part]:
    threads = find_distinct(trace.thread_id[find_distinct(joined.served.batch)])
    elsewhere = ~np.isin(trace.thread_id[work.row], threads)
    order = np.lexsort((work.start_ns, work.request))
    own_work, accepted = work.select_intervals(order[elsewhere[order]]), work.select_intervals(order[~elsewhere[order]])
    parts: list[_Part] = []
    # From the end of all batches so far to the next own work, if no batch of the request comes before it.
    after = _find_first_at_or_after(own_work.request, own_work.start_ns, batches.request, reach)
    next_batch = np.append(batches.start_ns[1:], 0)
    last = np.append(batches.request[1:] != batches.request[:-1], [True])
    returning = np.flatnonzero(after != NONE)
    starts = own_work.start_ns[after[returning]]
    returning = returning[last[returning] | (starts <= next_batch[returning])]
    parts.append((batches.request[returning], reach[returning], own_work.start_ns[after[returning]], 2))
    # From own work to the first work on a batch thread.
    begins = trace.start_ns[joined.rows[batches.request[firsts]]]
    first = _find_first_at_or_after(accepted.request, accepted.start_ns, batches.request[firsts], begins)
    before = np.flatnonzero(first != NONE)
    before = before[accepted.start_ns[first[before]] < batches.start_ns[firsts[before]]]
    arrivals = accepted.start_ns[first[before]]
    requests = batches.request[firsts[before]]
    ends = np.lexsort((own_work.end_ns, own_work.request))
    last_work = find_last_number(own_work.request[ends], own_work.end_ns[ends], requests, arrivals)
    departing = np.flatnonzero(last_work != NONE)
    parts.append((requests[departing], own_work.end_ns[ends][last_work[departing]], arrivals[departing], 2))
    return parts


def _find_first_at_or_after(groups: Int64s, times: Int64s, queries: Int64s, at: Int64s) -> Int64s:
    places = np.searchsorted(groups, queries) + count_numbers_up_to(groups, times, queries, at - 1)
    return np.where(places < np.searchsorted(groups, queries, side="right"), places, NONE)


# Device time of requests

# The device time of a batch is that of its span and all spans below it: the sum over devices of the union on each. It
# is distributed as its wall time is, without that of nested batches. Other spans of a request count likewise.


@dataclass(frozen=True)
class DeviceLedger:
    """The device times of requests, by the index of the request. `own_ns` is the device time outside of batches.
    `shared_ns` is the request's share of its batches.

    `batch_ns` has the device time of each row that is a batch. `given_ns` has, for each pair in `Served`, the request's
    share of the batch's device time.
    """

    own_ns: Int64s
    shared_ns: Int64s
    batch_ns: Int64s
    given_ns: Int64s


def compute_device_ledger(trace: Columns, joined: Joined) -> DeviceLedger:
    device, served = trace.device, joined.served
    timed = np.flatnonzero(device.is_measured)
    is_batch = make_mask(trace.attributes.rows_with_attribute(BATCH_KEYS), len(trace))
    rows = device.row[timed]
    batch = find_nearest_row(trace.parent, is_batch)[rows].astype(np.int64) if len(timed) else rows.astype(np.int64)
    request = np.where(batch == NONE, joined.of[rows], NONE)
    of_batches, owners, devices = _unite_device_intervals(trace, timed[batch != NONE], batch[batch != NONE])
    batch_ns = (
        Groups(owners[of_batches.groups], len(trace)).sum_by_group(of_batches.ends - of_batches.starts).astype(np.int64)
    )
    of_requests, requests, _ = _unite_device_intervals(trace, timed[request != NONE], request[request != NONE])
    own_ns = Groups(requests[of_requests.groups], len(joined.rows)).sum_by_group(of_requests.ends - of_requests.starts)
    given_ns = divide_among_members(served, measure_own_batch_times(trace, served, of_batches, owners, devices))
    return DeviceLedger(
        own_ns.astype(np.int64), Groups(served.request, len(joined.rows)).sum_by_group(given_ns), batch_ns, given_ns
    )  # fmt: skip


def _unite_device_intervals(trace: Columns, intervals: Int64s, owners: Int64s) -> tuple[Unions, Int64s, Int64s]:
    device = trace.device
    groups, firsts = number_combinations(owners, device.device[intervals])
    busy = union_by_group(groups, device.start_ns[intervals], device.end_ns[intervals])
    return busy, owners[firsts], device.device[intervals[firsts]].astype(np.int64)
