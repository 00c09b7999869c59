"""The ledger: what the wall of each request was spent on, part by part, to the nanosecond.

Every instant of a request belongs to one part, that which began last of those that went on then: a phase of its own
work, in whatever process, a batch that served it, or one of the times between these.

- `queue`: up to its first batch, from the newest span before that which handed it over: one that bears its key. It
  begins with the end of that span, or with its begin where that goes on or failed. Where no span did so the queue
  begins where the last of its own work before that began or ended. A further key has a queue of its own likewise. A
  request that failed or was broken off after it was handed over, and that no batch served, was in the queue to its end.
- `stall`: from a batch to its next one.
- `transport`: from the last that was done for it on a thread to the first that another thread of another kind of work
  did for it: from a batch to its own work, and from its own work to that of whoever accepts it before the first batch.
- `sub-requests`: requests that began within it and are no parts of it. Each has a ledger of its own.
- `unknown`: none of all.

An instant in a batch is the request's own share of it, as far as that goes, or waiting for the others in it. A
batch's time is given out by weight, exactly once: of `length` ns and weights w the first k get
`length * sum(w[:k]) // sum(w)` together. A batch within another one gives out its time, and the outer one the rest:
`own_lengths`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.recording.spans import BATCH_KEYS, KEY, OUTCOME, Site
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.forest import NONE, and_above, nearest, nearest_above
from instrument.trace.groups import Groups, distinct, numbered, running_most
from instrument.trace.intervals import Unions, lengths_by_group, union_by_group
from instrument.trace.joined import Joined, Served
from instrument.trace.self_times import turns

QUEUE, STALL, TRANSPORT, UNKNOWN = "queue", "stall", "transport", "unknown"
SHARE, WAITING = "share of batches", "waiting in batches"
SUB_REQUESTS = "sub-requests"

COPIES = {"h2d": "copy in", "d2h": "copy out"}
PHASE_OF_KIND = {"layer": "compute", "loader": "load", "comm": "comm"}


def phase_of(site: Site) -> str | None:
    """The phase of a request's work that spans of the site are, None of one that is no phase."""
    facts = dict(site.attributes)
    declared = facts.get("phase")
    if isinstance(declared, str) and declared:
        return declared
    if site.kind == "copy":
        direction = facts.get("direction")
        return COPIES.get(direction, "copy") if isinstance(direction, str) else "copy"
    if site.kind == "phase" or site.name == QUEUE:
        return site.name
    return PHASE_OF_KIND.get(site.kind)


@dataclass(frozen=True)
class Ledger:
    """The parts of requests: a row for each part that a request had any time of. They add up to its wall.

    The rows of a request lie together, by its place; `part` is a place among `names`. `given_ns` is the part of
    a batch that a request in it is given, for each pair of these. The parts of a batch add up to its own time.
    """

    names: tuple[str, ...]
    request: Int64s
    part: Int64s
    time_ns: Int64s
    given_ns: Int64s

    def parts_of(self, place: int) -> dict[str, int]:
        """The time of each part that one request had any of."""
        first, last = np.searchsorted(self.request, [place, place + 1])
        its = zip(self.part[first:last].tolist(), self.time_ns[first:last].tolist(), strict=True)
        return {self.names[part]: time_ns for part, time_ns in its}


def shares(served: Served, amounts: Int64s) -> Int64s:
    """Return the request's part of the amount of a batch, for each pair of a batch and a request.

    `amounts` are by the rows of batches.
    """
    lengths = amounts[served.batch]
    if not len(lengths):
        return np.zeros(0, dtype=np.int64)
    is_first = np.concatenate([[True], served.batch[1:] != served.batch[:-1]])
    number, firsts = np.cumsum(is_first) - 1, np.flatnonzero(is_first)
    sums = np.add.reduceat(served.weight, firsts)[number]
    until = np.cumsum(served.weight)
    until -= (until - served.weight)[firsts][number]
    weights: NDArray[np.int64] = np.stack([until, until - served.weight])
    if int(lengths.max()) * int(sums.max()) < 1 << 62:
        upto = lengths * weights // sums
    else:
        upto = (lengths.astype(object) * weights.astype(object) // sums.astype(object)).astype(np.int64)
    return np.asarray(upto[0] - upto[1])


def own_lengths(trace: Columns, served: Served, parts: Unions, batch: Int64s, device: Int64s) -> Int64s:
    """The time that batches have for themselves, by the rows of the trace.

    `parts` are when each went on, by groups; `batch` and `device` are the row and the device of each group, of which
    parts of others are no rivals. Two batches may serve the same request, or one be below the other on its thread.
    The inner one, which began last, has the time in which both go on.
    """
    its_batch, lengths = batch[parts.groups], parts.ends - parts.starts
    at_once = np.flatnonzero(_overlapping(device[parts.groups], parts.starts, parts.ends))
    if not len(at_once):
        return np.asarray(Groups(its_batch, len(trace)).sums(lengths), dtype=np.int64)
    inner, outer = _nested(trace, served)
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
    which = np.repeat(at_once, ends - firsts)
    member = members[np.arange(len(which)) - np.repeat(np.cumsum(ends - firsts) - ends, ends - firsts)]
    _, once = numbered(which, member)  # keys that no request is known by may be there twice
    which, member = which[once], member[once]
    rivals, _ = numbered(member, device[parts.groups][which])
    is_rival = _overlapping(rivals, parts.starts[which], parts.ends[which])
    which, rivals = which[is_rival], rivals[is_rival]
    starts, stops = parts.starts[which], parts.ends[which]
    ranks = np.empty(len(which), dtype=np.int64)
    row = its_batch[which]
    ranks[np.lexsort((trace.span_id[row], -trace.end_ns[row], trace.start_ns[row]))] = np.arange(len(which))
    has_turn, begun, ended = turns(rivals, starts, stops, ranks)
    # An interval and its turns, in order: from its begin or the end of a turn to the next turn or its end it has none.
    places = np.concatenate([np.arange(len(which)), has_turn])
    lost_from, lost_to = np.concatenate([starts, ended]), np.concatenate([begun, stops])
    to_places = np.concatenate([has_turn, np.arange(len(which))])
    begins, finishes = np.lexsort((lost_from, places)), np.lexsort((lost_to, to_places))
    lost = lengths_by_group(which[places[begins]], lost_from[begins], lost_to[finishes], len(its_batch))
    return np.asarray(Groups(its_batch, len(trace)).sums(lengths - lost), dtype=np.int64)


def _nested(trace: Columns, served: Served) -> tuple[Int64s, Int64s]:
    """Return the rows of batches within another batch of the same thread and task, and the rows of the outer ones."""
    is_batch = np.zeros(len(trace), dtype=np.bool_)
    is_batch[served.batch] = True
    rows = np.flatnonzero(is_batch)
    outer = nearest_above(trace.parent, is_batch)[rows].astype(np.int64)
    is_within = (
        (outer != NONE)
        & (trace.thread_id[outer] == trace.thread_id[rows])
        & (trace.task_id[outer] == trace.task_id[rows])
    )
    return rows[is_within], outer[is_within]


def _overlapping(groups: Int64s, starts: Int64s, ends: Int64s) -> Bools:
    """A mark at each interval that may have something in common with another of its group."""
    found = np.zeros(len(groups), dtype=np.bool_)
    order = np.lexsort((starts, groups))
    its = np.cumsum(np.diff(groups[order], prepend=groups[order[:1]]) != 0)
    begins_before = starts[order][1:] < running_most(ends[order], its)[:-1]
    later = np.flatnonzero(begins_before & (its[1:] == its[:-1])) + 1
    found[order[later]] = found[order[later - 1]] = True
    return found


class Turns(NamedTuple):
    """The turns of requests, those of each in the order of time.

    `part` is a place among the `names` of parts. `row` is that of the span which had the turn, `NONE` between spans,
    and `pair` that of the batch and the request among what is served, `NONE` outside of batches.
    """

    names: tuple[str, ...]
    request: Int64s
    part: Int64s
    row: Int64s
    pair: Int64s
    start_ns: Int64s
    length_ns: Int64s


def turns_of(trace: Columns, joined: Joined) -> Turns:
    """Return the known parts of each request, turn by turn."""
    work, batches = _work(trace, joined), _batches(trace, joined)
    between, inner = _between(trace, joined, work, batches), _sub_requests(trace, joined)
    names: dict[str, int] = {QUEUE: 0, STALL: 1, TRANSPORT: 2, SHARE: 3}
    part_of_site = np.array(
        [NONE if one is None else names.setdefault(one, len(names)) for one in map(phase_of, trace.sites)] or [NONE],
        dtype=np.int64,
    )
    request, starts, ends, pair = (
        np.concatenate([getattr(one, name) for one in (between, work, inner, batches)])
        for name in ("request", "start_ns", "end_ns", "pair")
    )
    in_batch = np.full(len(batches.row), names[SHARE])
    in_others = np.full(len(inner.row), names.setdefault(SUB_REQUESTS, len(names)) if len(inner.row) else 0)
    part = np.concatenate([between.row, part_of_site[trace.site[work.row]], in_others, in_batch])
    spans, none = np.concatenate([work.row, inner.row, batches.row]), np.full(len(between.row), NONE)
    ranks = _ranks(trace, between, spans)
    del work, batches, between, inner, in_batch  # as much memory as the columns of the trace, which `turns` wants again
    taken, begun, ended = turns(request, starts, ends, ranks)
    row = np.concatenate([none, spans])[taken]
    return Turns(tuple(names), request[taken], part[taken], row, pair[taken], begun, ended - begun)


def _ranks(trace: Columns, between: Stretches, spans: Int64s) -> Int64s:
    """Times between spans and then spans by when these began, also before the request; what begins and ends with a time
    between spans comes after it."""
    begins = np.concatenate([between.start_ns, trace.start_ns[spans]])
    order = np.argsort(begins, kind="stable")
    in_order = begins[order]
    is_tied = in_order[1:] == in_order[:-1]
    tied = np.flatnonzero(np.append(is_tied, [False]) | np.append([False], is_tied))
    if len(tied):  # of a few: all keys for all spans would take five times as long
        its = order[tied]
        finishes = np.concatenate([between.end_ns, trace.end_ns[spans]])[its]
        by_id = np.concatenate([np.full(len(between.row), NONE), trace.span_id[spans]])[its]
        order[tied] = its[np.lexsort((its, by_id, its >= len(between.row), -finishes, begins[its]))]
    ranks = np.empty(len(begins), dtype=np.int64)
    ranks[order] = np.arange(len(order))
    return ranks


def served_stretches(trace: Columns, joined: Joined) -> tuple[Stretches, Stretches]:
    """The batches of each request, and what lies before and between them: of the latter `row` is 0 for the queue, 1 for
    a stall, 2 for transport. Both by request, batches in order of time."""
    batches = _batches(trace, joined)
    return batches, _between(trace, joined, _work(trace, joined), batches, of_all_keys=False)


def ledger(trace: Columns, joined: Joined) -> Ledger:
    """Return the parts of each request's time."""
    found = turns_of(trace, joined)
    rows = distinct(joined.served.batch)
    when = union_by_group(np.arange(len(rows)), trace.start_ns[rows], trace.end_ns[rows])
    given = shares(joined.served, own_lengths(trace, joined.served, when, rows, np.zeros(len(rows), dtype=np.int64)))
    numbers = {name: number for number, name in enumerate(found.names)}
    unknown = numbers.setdefault(UNKNOWN, len(numbers))
    own = found.pair == NONE
    its, own_shares, waiting = _in_batches(given, found.pair[~own], found.length_ns[~own])
    of_batches = joined.served.request[its]
    waits = numbers.setdefault(WAITING, len(numbers))
    request = np.concatenate([found.request[own], of_batches, of_batches])
    part = np.concatenate([found.part[own], np.full(len(its), numbers[SHARE]), np.full(len(its), waits)])
    time_ns = np.concatenate([found.length_ns[own], own_shares, waiting])
    told_ns = Groups(request, len(joined.rows)).sums(time_ns).astype(np.int64)  # at most the wall
    request = np.concatenate([request, np.arange(len(joined.rows))])
    part = np.concatenate([part, np.full(len(joined.rows), unknown)])
    time_ns = np.concatenate([time_ns, trace.total_ns[joined.rows] - told_ns])
    has_time = time_ns > 0
    request, part, time_ns = request[has_time], part[has_time], time_ns[has_time]
    groups, firsts = numbered(request, part)
    order = np.lexsort((part[firsts], request[firsts]))
    sums = Groups(groups, len(firsts)).sums(time_ns)[order].astype(np.int64)
    return Ledger(tuple(numbers), request[firsts[order]], part[firsts[order]], sums, given)


class Moment(NamedTuple):
    """A turn of one request: which part it is, from when to when, and the rows as in `Turns`."""

    part: str
    start_ns: int
    end_ns: int
    row: int
    pair: int


def timeline(trace: Columns, joined: Joined, place: int) -> list[Moment]:
    """All turns of one request in order, what is unknown among them: from its begin to its end without a gap.

    A turn in a batch is `SHARE`, whatever of it was the request's own.
    """
    served = joined.served
    its_own = replace(served, request=np.where(served.request == place, place, NONE))
    found = turns_of(trace, replace(joined, of=np.where(joined.of == place, place, NONE), served=its_own))
    row = int(joined.rows[place])
    at_ns, end_ns = int(trace.start_ns[row]), int(trace.end_ns[row])
    moments: list[Moment] = []
    columns = (found.part, found.row, found.pair, found.start_ns, found.length_ns)
    for part, span, pair, start_ns, length_ns in zip(*(column.tolist() for column in columns), strict=True):
        if start_ns > at_ns:
            moments.append(Moment(UNKNOWN, at_ns, start_ns, NONE, NONE))
        name, at_ns = found.names[part], start_ns + length_ns
        last = moments[-1] if moments else None
        if last is not None and (last.part, last.row, last.pair, last.end_ns) == (name, span, pair, start_ns):
            moments[-1] = last._replace(end_ns=at_ns)
        else:
            moments.append(Moment(name, start_ns, at_ns, span, pair))
    if at_ns < end_ns:
        moments.append(Moment(UNKNOWN, at_ns, end_ns, NONE, NONE))
    return moments


def _in_batches(given: Int64s, pairs: Int64s, lengths: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """The pairs that had turns in batches, and of each the time as its share of them and waiting for the others."""
    groups, firsts = numbered(pairs)
    spent = Groups(groups, len(firsts)).sums(lengths)
    its = pairs[firsts]
    own_shares = np.minimum(spent, given[its])
    return its, own_shares, spent - own_shares


_Part = tuple[Int64s, Int64s, Int64s, int]


class Stretches(NamedTuple):
    """Intervals of requests, clipped to these: spans by their `row`, or times between them by what they are."""

    request: Int64s
    row: Int64s
    start_ns: Int64s
    end_ns: Int64s
    pair: Int64s


def _clipped(trace: Columns, joined: Joined, request: Int64s, row: Int64s, pair: Int64s) -> Stretches:
    around = joined.rows[request]
    starts, ends = np.clip((trace.start_ns[row], trace.end_ns[row]), trace.start_ns[around], trace.end_ns[around])
    return Stretches(request, row, starts, ends, pair)


def _work(trace: Columns, joined: Joined) -> Stretches:
    """The phases of each request's own work, in whatever process."""
    is_phase = np.array([phase_of(site) is not None for site in trace.sites] or [False])[trace.site]
    is_phase[joined.rows] = False
    rows = np.flatnonzero(is_phase & (joined.of != NONE))
    rows = rows[~np.isin(rows, joined.served.batch)]
    return _clipped(trace, joined, joined.of[rows], rows, np.full(len(rows), NONE))


def _sub_requests(trace: Columns, joined: Joined) -> Stretches:
    """Requests that began within other ones, of which they are no parts."""
    above = trace.parent[joined.rows]
    around = np.append(joined.of, NONE)[above]
    inner = np.flatnonzero((around != NONE) & (around != np.arange(len(around))))
    return _clipped(trace, joined, around[inner], joined.rows[inner], np.full(len(inner), NONE))


def _batches(trace: Columns, joined: Joined) -> Stretches:
    """The batches of each request, in their order."""
    pairs = np.flatnonzero(joined.served.request != NONE)
    its = _clipped(trace, joined, joined.served.request[pairs], joined.served.batch[pairs], pairs)
    order = np.lexsort((its.end_ns, its.start_ns, its.request))
    order = order[(its.start_ns < its.end_ns)[order]]
    return Stretches(*(column[order] for column in its))


def _between(
    trace: Columns, joined: Joined, work: Stretches, batches: Stretches, *, of_all_keys: bool = True
) -> Stretches:
    """Return the times before and between the batches of each request: `row` is 0 queue, 1 stall, 2 transport.

    With `of_all_keys`, further keys of a request have queues, too.
    """
    if not len(joined.served.batch):
        nothing = np.zeros(0, dtype=np.int64)
        return Stretches(nothing, nothing, nothing, nothing, nothing)
    is_first = np.concatenate([[True], batches.request[1:] != batches.request[:-1]])[: len(batches.request)]
    # A pipeline's batches overlap: the time between two begins when all up to then have ended.
    reach = running_most(batches.end_ns, np.cumsum(is_first) - 1)
    firsts = np.flatnonzero(is_first)
    handing = _handing_over(trace, joined)
    parts = [_queued(trace, joined, work, handing, batches, firsts), _given_up(trace, joined, handing, batches)]
    if of_all_keys and len(firsts) < len(batches.request):
        parts.append(_queued_again(trace, joined, handing, batches))
    later = np.flatnonzero(~is_first)
    parts.append((batches.request[later], reach[later - 1], batches.start_ns[later], 1))
    parts += _handed_over(trace, joined, work, batches, firsts, reach)
    request, starts, ends = (np.concatenate([part[column] for part in parts]) for column in range(3))
    what = np.concatenate([np.full(len(part[0]), part[3]) for part in parts])
    filled = starts < ends
    return Stretches(request[filled], what[filled], starts[filled], ends[filled], np.full(int(filled.sum()), NONE))


def _handing_over(trace: Columns, joined: Joined) -> Stretches:
    """The spans that hand requests over, by request and begin: those that bear a key, but for the request's own and
    what its batches are below."""
    rows = trace.attributes.having(KEY)
    is_other = joined.of[rows] != NONE
    if not is_other.any():
        rows = rows[:0]
    else:
        serves = and_above(trace.parent, distinct(joined.served.batch))
        serves[joined.rows] = True
        rows = rows[is_other & ~serves[rows]]
    request = joined.of[rows].astype(np.int64)
    order = np.lexsort((trace.span_id[rows], -trace.end_ns[rows], trace.start_ns[rows], request))
    rows, request = rows[order], request[order]
    return Stretches(request, rows, trace.start_ns[rows], trace.end_ns[rows], np.full(len(rows), NONE))


def _handed_at(trace: Columns, handing: Stretches, which: Int64s, upto: Int64s) -> Int64s:
    """Return the times at which spans had handed their requests over. This is the end of a span, or its begin where it
    failed or went on after `upto`."""
    rows = handing.row[which]
    is_done = (handing.end_ns[which] <= upto) & (trace.error[rows] == NONE)
    is_done &= ~np.isin(rows, trace.attributes.having(OUTCOME))
    return np.where(is_done, handing.end_ns[which], handing.start_ns[which])


def _queued(
    trace: Columns, joined: Joined, work: Stretches, handing: Stretches, batches: Stretches, firsts: Int64s
) -> _Part:
    """Return the queue of each request: from its handing over to its first batch.

    A request that was never handed over begins its queue at the last begin or end of its own work.
    """
    whose = np.concatenate([work.request, work.request])
    edges = np.concatenate([work.start_ns, work.end_ns])
    order = np.lexsort((edges, whose))
    whose, edges = whose[order], edges[order]
    requests, upto = batches.request[firsts], batches.start_ns[firsts]
    last = _last_before(whose, edges, requests, upto)
    begins = trace.start_ns[joined.rows[requests]]
    from_ns = np.where(last == NONE, begins, edges[last] if len(edges) else begins)
    newest = _last_before(handing.request, handing.start_ns, requests, upto)
    known = np.flatnonzero(newest != NONE)
    from_ns[known] = _handed_at(trace, handing, newest[known], upto[known])
    return requests, np.maximum(from_ns, begins), upto, 0


def _given_up(trace: Columns, joined: Joined, handing: Stretches, batches: Stretches) -> _Part:
    """Return the queues of failed requests that no batch served: from their handing over to their ends."""
    rows = joined.rows
    is_lost = (trace.error[rows] != NONE) | np.isin(rows, trace.attributes.having(OUTCOME))
    is_lost[batches.request] = False
    requests = np.flatnonzero(is_lost)
    ends = trace.end_ns[rows[requests]]
    newest = _last_before(handing.request, handing.start_ns, requests, ends)
    known = np.flatnonzero(newest != NONE)
    requests, ends = requests[known], ends[known]
    from_ns = _handed_at(trace, handing, newest[known], ends)
    return requests, np.maximum(from_ns, trace.start_ns[rows[requests]]), ends, 0


def _queued_again(trace: Columns, joined: Joined, handing: Stretches, batches: Stretches) -> _Part:
    """Return the queues by further keys: from the handing over of a key to the first batch that has it."""
    several = np.array([place for place, keys in joined.keys.items() if len(keys) > 1], dtype=np.int64)
    handing, batches = (
        Stretches(*(column[np.isin(its.request, several)] for column in its)) for its in (handing, batches)
    )
    numbers: dict[str, int] = {}
    of_batch = np.array(
        [numbers.setdefault(joined.served.key[pair], len(numbers)) for pair in batches.pair.tolist()], dtype=np.int64
    )
    of_span = np.array(
        [numbers.get(str(key), NONE) for key in trace.attributes.values(KEY, handing.row)], dtype=np.int64
    )
    groups = batches.request * len(numbers) + of_batch
    _, firsts = np.unique(groups, return_index=True)
    firsts = firsts[batches.request[firsts - 1] == batches.request[firsts]]
    firsts = firsts[firsts > 0]  # the batches of a request lie together, in the order of time
    named = np.flatnonzero(of_span != NONE)
    its = Stretches(*(column[named] for column in handing))
    of_handing = its.request * len(numbers) + of_span[named]
    order = np.lexsort((np.arange(len(named)), its.start_ns, of_handing))
    its = Stretches(*(column[order] for column in its))
    newest = _last_before(of_handing[order], its.start_ns, groups[firsts], batches.start_ns[firsts])
    known = np.flatnonzero(newest != NONE)
    firsts = firsts[known]
    upto = batches.start_ns[firsts]
    requests = batches.request[firsts]
    from_ns = np.maximum(_handed_at(trace, its, newest[known], upto), trace.start_ns[joined.rows[requests]])
    return requests, from_ns, upto, 0


def _handed_over(
    trace: Columns, joined: Joined, work: Stretches, batches: Stretches, firsts: Int64s, reach: Int64s
) -> list[_Part]:
    """Transport: between a request's own threads and those of its batches, where work of its own tells when."""
    threads = distinct(trace.thread_id[distinct(joined.served.batch)])
    elsewhere = ~np.isin(trace.thread_id[work.row], threads)
    order = np.lexsort((work.start_ns, work.request))
    its = Stretches(*(column[order[elsewhere[order]]] for column in work))
    found: list[_Part] = []
    # Back: from all batches up to one to the next of its own work, where no batch of it comes before that.
    after = _next_after(its.request, its.start_ns, batches.request, reach)
    next_batch = np.append(batches.start_ns[1:], 0)
    last = np.append(batches.request[1:] != batches.request[:-1], [True])
    known = np.flatnonzero(after != NONE)
    starts = its.start_ns[after[known]]
    known = known[last[known] | (starts <= next_batch[known])]
    found.append((batches.request[known], reach[known], its.start_ns[after[known]], 2))
    # There: from its own work to what the thread of its batches, or one beside it, did first for it.
    accepting = np.lexsort((work.start_ns, work.request))
    accepting = accepting[~elsewhere[accepting]]
    accepted = Stretches(*(column[accepting] for column in work))
    begins = trace.start_ns[joined.rows[batches.request[firsts]]]
    first = _next_after(accepted.request, accepted.start_ns, batches.request[firsts], begins)
    before = np.flatnonzero(first != NONE)
    before = before[accepted.start_ns[first[before]] < batches.start_ns[firsts[before]]]
    arrived = accepted.start_ns[first[before]]
    requests = batches.request[firsts[before]]
    ends = np.lexsort((its.end_ns, its.request))
    left = _last_before(its.request[ends], its.end_ns[ends], requests, arrived)
    sent = np.flatnonzero(left != NONE)
    found.append((requests[sent], its.end_ns[ends][left[sent]], arrived[sent], 2))
    return found


def _next_after(groups: Int64s, times: Int64s, asked: Int64s, at: Int64s) -> Int64s:
    """The place of the first time of each asked group that is not before one, -1 for none. Times lie in order."""
    both = np.concatenate([asked, groups])
    order = np.lexsort((np.arange(len(both)), np.concatenate([at, times]), both))[::-1]
    return _last_seen(order, len(asked), both)


def _last_before(groups: Int64s, times: Int64s, asked: Int64s, at: Int64s) -> Int64s:
    """The place of the last time of each asked group that is not after one, -1 for none. Times lie in order."""
    both = np.concatenate([asked, groups])
    is_asked = np.arange(len(both)) < len(asked)
    order = np.lexsort((is_asked, np.concatenate([at, times]), both))
    return _last_seen(order, len(asked), both)


def _last_seen(order: Int64s, count: int, groups: Int64s) -> Int64s:
    """Return the last other before each of the first `count` in an order, where it is of the same group."""
    is_told = order >= count
    last = np.maximum.accumulate(np.where(is_told, np.arange(len(order)), NONE))
    found = np.full(count, NONE, dtype=np.int64)
    wanted = np.flatnonzero(~is_told & (last != NONE))
    before = order[last[wanted]]
    fits = groups[before] == groups[order[wanted]]
    found[order[wanted]] = np.where(fits, before - count, NONE)
    return found


# Device time of requests

# The device time of a batch is that of its span and of all below it: of each device the union, and these added up. It
# is given out as its wall is, without what batches within it had. Other spans of a request have theirs likewise.


@dataclass(frozen=True)
class DeviceLedger:
    """`own_ns` and `shared_ns` of each request, by its place.

    `batch_ns` is of each row, 0 of what is no batch, and `given_ns` of each pair of a batch and a request how much that
    request is given: over those of a batch it adds up to what the batch had for itself.
    """

    own_ns: Int64s
    shared_ns: Int64s
    batch_ns: Int64s
    given_ns: Int64s


def device_ledger(trace: Columns, joined: Joined) -> DeviceLedger:
    """Return the device time of each request."""
    its, served = trace.device, joined.served
    timed = np.flatnonzero(its.timed)
    is_batch = np.zeros(len(trace), dtype=np.bool_)
    is_batch[trace.attributes.having(BATCH_KEYS)] = True
    rows = its.row[timed]
    batch = nearest(trace.parent, is_batch)[rows].astype(np.int64) if len(timed) else rows.astype(np.int64)
    request = np.where(batch == NONE, joined.of[rows], NONE)
    of_batches, owners, devices = _busy(trace, timed[batch != NONE], batch[batch != NONE])
    batch_ns = Groups(owners[of_batches.groups], len(trace)).sums(of_batches.ends - of_batches.starts).astype(np.int64)
    of_requests, requests, _ = _busy(trace, timed[request != NONE], request[request != NONE])
    own = Groups(requests[of_requests.groups], len(joined.rows)).sums(of_requests.ends - of_requests.starts)
    given = shares(served, own_lengths(trace, served, of_batches, owners, devices))
    return DeviceLedger(
        own.astype(np.int64), Groups(served.request, len(joined.rows)).sums(given), batch_ns, given
    )  # fmt: skip


def _busy(trace: Columns, intervals: Int64s, owners: Int64s) -> tuple[Unions, Int64s, Int64s]:
    """The unions of the intervals of each owner on each device, by groups, and the owner and the device of each."""
    its = trace.device
    groups, firsts = numbered(owners, its.device[intervals])
    found = union_by_group(groups, its.start_ns[intervals], its.end_ns[intervals])
    return found, owners[firsts], its.device[intervals[firsts]].astype(np.int64)
