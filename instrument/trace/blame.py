"""Finds the part that makes a request slower than the median of its endpoint, and the spans that caused the delay.

A request's time is divided into parts (see `ledger`). Each part has a median over the requests of the endpoint. The
blamed part exceeds its median the most, and the cause is the span that took most of the blamed part's time. Candidates
are other requests' spans on the threads that the request waited for, and the spans below the request's own work. A
garbage collection on any thread is the cause if it took at least half of the excess, because it stops all threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from instrument.recording.distributions import percentiles_of
from instrument.recording.spans import BLOCKED_BY, is_blocked_loop, is_collection
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.forest import NONE, nearest, rows_of
from instrument.trace.groups import Groups, numbered
from instrument.trace.intervals import Union, union
from instrument.trace.joined import Joined
from instrument.trace.ledger import QUEUE, SHARE, STALL, TRANSPORT, WAITING, Ledger, Moment, find_last_before, timeline

BETWEEN = (QUEUE, STALL)
"""The parts in which a request waits for the threads of its batches."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of a delay: a span's name, its time within the blamed part, and the key or endpoint of its request.
    `request` is "" if the span belongs to no request, or to the slow request itself."""

    name: str
    request: str
    ran_ns: int


@dataclass(frozen=True, slots=True)
class Blame:
    """The part of a request with the largest excess over the part's typical time, and the cause, None if unknown."""

    part: str
    part_ns: int
    typical_ns: int
    cause: Cause | None

    @property
    def excess_ns(self) -> int:
        """The part's time beyond its typical time."""
        return self.part_ns - self.typical_ns


def typical_times(ledger: Ledger, places: Int64s) -> dict[str, int]:
    """Return the median time of each part over the requests in `places`. A request without the part counts as 0 ns."""
    is_chosen = np.zeros(int(max(ledger.request.max(initial=-1), places.max(initial=-1))) + 1, dtype=np.bool_)
    is_chosen[places] = True
    rows = np.flatnonzero(is_chosen[ledger.request])
    typical = {}
    for members in Groups(ledger.part[rows], len(ledger.names)).members():
        times = np.zeros(len(places), dtype=np.int64)
        times[len(places) - len(members) :] = np.sort(ledger.time_ns[rows[members]])
        name = ledger.names[ledger.part[rows[members[0]]]]
        typical[name] = percentiles_of(times.tolist(), (0.5,))[0]
    return typical


def blame(trace: Columns, joined: Joined, ledger: Ledger, place: int, typical: Mapping[str, int]) -> Blame | None:
    """Return the blame of a slow request, None if no part is longer than typical."""
    times = ledger.parts_of(place)
    part = max(times, key=lambda name: (times[name] - typical.get(name, 0), name), default=None)
    if part is None or times[part] <= typical.get(part, 0):
        return None
    moments = timeline(trace, joined, place)
    excess_ns = times[part] - typical.get(part, 0)
    cause = _find_collection(trace, joined, place, part, moments, excess_ns)
    cause = cause or _find_cause(trace, joined, ledger, place, part, moments)
    return Blame(part, times[part], typical.get(part, 0), cause)


def _find_collection(
    trace: Columns, joined: Joined, place: int, part: str, moments: Sequence[Moment], excess_ns: int
) -> Cause | None:
    """Return the garbage collections as the cause if they took at least half of the excess, else None."""
    is_collected = trace.of_sites([is_collection(site) for site in trace.sites])
    if not is_collected.any():
        return None
    parts = (SHARE, WAITING) if part in (SHARE, WAITING) else (part,)
    turns = [moment for moment in moments if moment.part in parts]
    times = union(*(np.array([moment[edge] for moment in turns], dtype=np.int64) for edge in (1, 2)))
    cause = _find_longest(trace, joined, place, times, is_collected) if turns else None
    return cause if cause is not None and 2 * cause.ran_ns >= excess_ns else None


def _find_cause(
    trace: Columns, joined: Joined, ledger: Ledger, place: int, part: str, moments: Sequence[Moment]
) -> Cause | None:
    if part in (SHARE, WAITING):
        return _find_batch_cause(
            trace, joined, ledger, place, part, [moment for moment in moments if moment.pair != NONE]
        )
    turns = [(index, moment) for index, moment in enumerate(moments) if moment.part == part]
    times = union(*(np.array([edge[at] for _, edge in turns], dtype=np.int64) for at in (1, 2)))
    # Requests and coroutines are no candidates: they may only wait for the span below that takes the time.
    works = trace.of_sites([site.kind != "request" and not site.suspends for site in trace.sites])
    on_threads = np.isin(trace.thread_id, list(_find_threads(trace, joined, place, part, turns, moments)))
    other_cause = _find_longest(trace, joined, place, times, works & on_threads & (joined.of != place))
    rows = np.array(sorted({moment.row for _, moment in turns if moment.row != NONE}), dtype=np.int64)
    if not len(rows):
        return other_cause
    own_cause = _find_longest(trace, joined, place, times, _is_below(trace, joined, place, rows))
    if own_cause is None or (other_cause is not None and other_cause.ran_ns >= own_cause.ran_ns):
        return other_cause
    return own_cause


def _is_below(trace: Columns, joined: Joined, place: int, rows: Int64s) -> Bools:
    """Return an array over all rows, True for spans of a request below the given rows."""
    family = np.flatnonzero(joined.of == place)
    parents = rows_of(family, trace.parent[family].astype(np.int64))
    is_given = np.isin(family, rows)
    is_below = np.zeros(len(trace), dtype=np.bool_)
    is_below[family[(nearest(parents, is_given) != NONE) & ~is_given]] = True
    return is_below


def _find_threads(
    trace: Columns, joined: Joined, place: int, part: str, work: Iterable[tuple[int, Moment]], moments: Sequence[Moment]
) -> set[int]:
    """Return the threads that a request waited for in a part."""
    served = joined.served.batch[joined.served.request == place]
    if part in BETWEEN and len(served):
        return set(trace.thread_id[served].tolist())
    rows = [moment.row for _, moment in work]
    if part == TRANSPORT:  # the next span receives the request
        rows = [next((moment.row for moment in moments[index + 1 :] if moment.row != NONE), NONE) for index, _ in work]
    root = int(joined.rows[place])
    return {int(trace.thread_id[root if row == NONE else row]) for row in rows or [root]}


def _find_longest(trace: Columns, joined: Joined, place: int, times: Union, is_wanted: Bools) -> Cause | None:
    """Return the wanted spans of one name and request that ran longest in the given times. Only topmost spans count."""
    low, high = int(times.starts[0]), int(times.ends[-1])
    rows = np.flatnonzero(is_wanted & (trace.start_ns < high) & (trace.end_ns > low))
    is_candidate = np.zeros(len(trace) + 1, dtype=np.bool_)  # the last place is that of a missing parent
    is_candidate[rows] = True
    rows = rows[~is_candidate[trace.parent[rows]]]
    if not len(rows):
        return None
    rows = rows[times.within(trace.start_ns[rows], trace.end_ns[rows]) > 0]
    groups: dict[tuple[str, str], list[int]] = {}
    for row, (name, shown) in zip(rows.tolist(), _name_spans(trace, rows), strict=True):
        served = _find_request(joined, shown)
        groups.setdefault((name, called(trace, joined, NONE if served == place else served)), []).append(row)
    if not groups:
        return None
    sums = {key: _measure_runs(trace, times, np.array(named_rows)) for key, named_rows in groups.items()}
    (name, request), ran_ns = max(sums.items(), key=lambda item: (item[1], item[0]))
    return Cause(name, request, ran_ns)


def _measure_runs(trace: Columns, times: Union, rows: Int64s) -> int:
    """Return how long the spans ran within the given times. Overlapping spans count once."""
    ran = union(trace.start_ns[rows], trace.end_ns[rows])
    return int(times.within(ran.starts, ran.ends).sum())


def _name_spans(trace: Columns, rows: Int64s) -> list[tuple[str, int]]:
    """Return the name of each span, and the row that determines its request. A blocked loop has the name and the row of
    the span that blocked it."""
    shown = [(trace.sites[site].name, row) for site, row in zip(trace.site[rows].tolist(), rows.tolist(), strict=True)]
    is_blocked = np.array([is_blocked_loop(site) for site in trace.sites] or [False])[trace.site[rows]]
    places = np.flatnonzero(is_blocked)
    names, blocking = trace.attributes.values(BLOCKED_BY, rows[places]), find_blocking_rows(trace, rows[places])
    for index, blocking_name, row in zip(places.tolist(), names, blocking.tolist(), strict=True):
        if blocking_name:
            shown[index] = str(blocking_name), row
    return shown


def find_blocking_rows(trace: Columns, blocked_rows: Int64s) -> Int64s:
    """Return the row of the span that blocked each event loop, else the blocked loop's own row. The blocking span is
    the innermost one of the recorded name on that thread in the middle of the blocked time."""
    names = [str(name or "") for name in trace.attributes.values(BLOCKED_BY, blocked_rows)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(filter(None, names)))}
    of_site = np.array([numbers.get(site.name, NONE) for site in trace.sites] or [NONE], dtype=np.int64)
    candidates = np.flatnonzero(of_site[trace.site] != NONE)
    candidates = candidates[np.isin(trace.thread_id[candidates], trace.thread_id[blocked_rows])]
    number_of_row = np.array([numbers.get(name, NONE) for name in names], dtype=np.int64)
    threads = np.concatenate([trace.thread_id[candidates], trace.thread_id[blocked_rows]])
    groups, _ = numbered(
        threads - threads.min(initial=0), np.concatenate([of_site[trace.site[candidates]], number_of_row]) + 1
    )
    order = np.lexsort((trace.start_ns[candidates], groups[: len(candidates)]))
    candidates = candidates[order]
    middles = trace.start_ns[blocked_rows] + trace.total_ns[blocked_rows] // 2
    last = find_last_before(
        groups[: len(candidates)][order], trace.start_ns[candidates], groups[len(candidates) :], middles
    )
    blocking = np.append(candidates, NONE)[last]
    return np.where(
        (last != NONE) & (number_of_row != NONE) & (trace.end_ns[blocking] > middles), blocking, blocked_rows
    )


def _find_request(joined: Joined, row: int) -> int:
    """Return the index of a span's request. For a batch it is the request with the largest weight."""
    if joined.of[row] != NONE:
        return int(joined.of[row])
    served = joined.served
    first, last = np.searchsorted(served.batch, [row, row + 1])
    if first == last:
        return NONE
    return int(served.request[first + int(np.argmax(served.weight[first:last]))])


def _find_batch_cause(
    trace: Columns, joined: Joined, ledger: Ledger, place: int, part: str, moments: Sequence[Moment]
) -> Cause | None:
    """Return the batches in which a request spent most time, with the other request that took most of it."""
    if not moments:
        return None
    served = joined.served
    spent = {moment.pair: 0 for moment in moments}
    for moment in moments:
        spent[moment.pair] += moment.end_ns - moment.start_ns

    def of_part(pair: int) -> int:
        own_ns = min(spent[pair], int(ledger.given_ns[pair]))
        return own_ns if part == SHARE else spent[pair] - own_ns

    by_name: dict[tuple[str, str], int] = {}
    for pair in spent:
        row = int(served.batch[pair])
        name, request = trace.sites[trace.site[row]].name, ""
        if part == WAITING:
            first, last = np.searchsorted(served.batch, [row, row + 1])
            other_pairs = [at for at in range(int(first), int(last)) if served.request[at] != place]
            main = max(other_pairs, key=lambda at: int(ledger.given_ns[at]), default=None)
            request = "" if main is None else called(trace, joined, int(served.request[main])) or served.key[main]
        by_name[name, request] = by_name.get((name, request), 0) + of_part(pair)
    (name, request), ran_ns = max(by_name.items(), key=lambda item: (item[1], item[0]))
    return Cause(name, request, ran_ns)


def called(trace: Columns, joined: Joined, place: int) -> str:
    """Return the first key of a request, else its endpoint; "" for `NONE`."""
    if place == NONE:
        return ""
    keys = joined.keys.get(place)
    return keys[0] if keys else trace.sites[trace.site[joined.rows[place]]].name
