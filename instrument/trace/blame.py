"""Blame: what made a request slower than those of its endpoint mostly are, and who ran meanwhile.

The part that made the difference is the one that exceeds its median over the endpoint's requests by most. Who caused it
is what took most of that part's time: among the spans of others on the threads that the request waited for, or, where
its own work was slow, the span right below that. A garbage collection that was most of the difference is the cause, on
whichever thread it came: no thread of its process goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from instrument.recording.histogram import percentiles_of
from instrument.recording.spans import BLOCKED_BY, is_blocked_loop, is_collection
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.forest import NONE, nearest, rows_of
from instrument.trace.groups import Groups
from instrument.trace.intervals import Union, union
from instrument.trace.joined import Joined
from instrument.trace.ledger import QUEUE, SHARE, STALL, TRANSPORT, WAITING, Ledger, Moment, timeline

BETWEEN = (QUEUE, STALL)
"""Parts in which a request waits for the threads that run its batches."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A span's name, how much of the part's time it ran, and the key or endpoint of the request that it was for.

    `request` is empty where it was for none, or for the request itself.
    """

    name: str
    request: str
    ran_ns: int


@dataclass(frozen=True, slots=True)
class Blame:
    """The part of a request that exceeds what is typical by most, by how much, and what ran then, if it is known."""

    part: str
    part_ns: int
    typical_ns: int
    cause: Cause | None

    @property
    def excess_ns(self) -> int:
        """By how much the part is longer than is typical."""
        return self.part_ns - self.typical_ns


def typical_times(found: Ledger, places: Int64s) -> dict[str, int]:
    """Return the median of each part over some requests, which may lack it."""
    is_one = np.zeros(int(max(found.request.max(initial=-1), places.max(initial=-1))) + 1, dtype=np.bool_)
    is_one[places] = True
    rows = np.flatnonzero(is_one[found.request])
    typical = {}
    for members in Groups(found.part[rows], len(found.names)).members():
        times = np.zeros(len(places), dtype=np.int64)
        times[len(places) - len(members) :] = np.sort(found.time_ns[rows[members]])
        name = found.names[found.part[rows[members[0]]]]
        typical[name] = percentiles_of(times.tolist(), (0.5,))[0]
    return typical


def blame(trace: Columns, joined: Joined, found: Ledger, place: int, typical: Mapping[str, int]) -> Blame | None:
    """Return the cause of a request that is slower than typical; None where no part is."""
    times = found.parts_of(place)
    part = max(times, key=lambda name: (times[name] - typical.get(name, 0), name), default=None)
    if part is None or times[part] <= typical.get(part, 0):
        return None
    moments = timeline(trace, joined, place)
    excess_ns = times[part] - typical.get(part, 0)
    cause = _collection(trace, joined, place, part, moments, excess_ns)
    cause = cause or _cause(trace, joined, found, place, part, moments)
    return Blame(part, times[part], typical.get(part, 0), cause)


def _collection(
    trace: Columns, joined: Joined, place: int, part: str, moments: Sequence[Moment], excess_ns: int
) -> Cause | None:
    """Garbage collections, where they were at least half of what a part is longer than is typical."""
    wanted = trace.of_sites([is_collection(site) for site in trace.sites])
    if not wanted.any():
        return None
    parts = (SHARE, WAITING) if part in (SHARE, WAITING) else (part,)
    its = [one for one in moments if one.part in parts]
    when = union(*(np.array([one[edge] for one in its], dtype=np.int64) for edge in (1, 2)))
    told = _taking_most(trace, joined, place, when, wanted) if its else None
    return told if told is not None and 2 * told.ran_ns >= excess_ns else None


def _cause(
    trace: Columns, joined: Joined, found: Ledger, place: int, part: str, moments: Sequence[Moment]
) -> Cause | None:
    if part in (SHARE, WAITING):
        return _of_batches(trace, joined, found, place, part, [one for one in moments if one.pair != NONE])
    its = [(index, one) for index, one in enumerate(moments) if one.part == part]
    when = union(*(np.array([edge[at] for _, edge in its], dtype=np.int64) for at in (1, 2)))
    # A request, or a coroutine, may be around what takes the time and only wait itself.
    works = trace.of_sites([site.kind != "request" and not site.suspends for site in trace.sites])
    on_threads = np.isin(trace.thread_id, list(_threads(trace, joined, place, part, its, moments)))
    others = _taking_most(trace, joined, place, when, works & on_threads & (joined.of != place))
    rows = np.array(sorted({one.row for _, one in its if one.row != NONE}), dtype=np.int64)
    if not len(rows):
        return others
    own = _taking_most(trace, joined, place, when, _below(trace, joined, place, rows))
    if own is None or (others is not None and others.ran_ns >= own.ran_ns):
        return others
    return own


def _below(trace: Columns, joined: Joined, place: int, rows: Int64s) -> Bools:
    """Return True for spans of a request that are below some of its own."""
    family = np.flatnonzero(joined.of == place)
    parents = rows_of(family, trace.parent[family].astype(np.int64))
    is_one = np.isin(family, rows)
    found = np.zeros(len(trace), dtype=np.bool_)
    found[family[(nearest(parents, is_one) != NONE) & ~is_one]] = True
    return found


def _threads(
    trace: Columns, joined: Joined, place: int, part: str, its: Iterable[tuple[int, Moment]], moments: Sequence[Moment]
) -> set[int]:
    """The threads that the request waited for while it had its turns in a part."""
    served = joined.served.batch[joined.served.request == place]
    if part in BETWEEN and len(served):
        return set(trace.thread_id[served].tolist())
    rows = [one.row for _, one in its]
    if part == TRANSPORT:  # for whoever was to take it up
        rows = [next((one.row for one in moments[index + 1 :] if one.row != NONE), NONE) for index, _ in its]
    root = int(joined.rows[place])
    return {int(trace.thread_id[root if row == NONE else row]) for row in rows or [root]}


def _taking_most(trace: Columns, joined: Joined, place: int, when: Union, wanted: Bools) -> Cause | None:
    """Return the topmost wanted spans of one name, and for one request, that ran most of some time."""
    low, high = int(when.starts[0]), int(when.ends[-1])
    rows = np.flatnonzero(wanted & (trace.start_ns < high) & (trace.end_ns > low))
    is_there = np.zeros(len(trace) + 1, dtype=np.bool_)  # the last is the parent of those without one
    is_there[rows] = True
    rows = rows[~is_there[trace.parent[rows]]]
    if not len(rows):
        return None
    rows = rows[when.within(trace.start_ns[rows], trace.end_ns[rows]) > 0]
    alike: dict[tuple[str, str], list[int]] = {}
    for row, (name, shown) in zip(rows.tolist(), _shown(trace, rows), strict=True):
        whom = _for_whom(joined, shown)
        alike.setdefault((name, called(trace, joined, NONE if whom == place else whom)), []).append(row)
    if not alike:
        return None
    sums = {key: _ran_ns(trace, when, np.array(its)) for key, its in alike.items()}
    (name, request), ran_ns = max(sums.items(), key=lambda item: (item[1], item[0]))
    return Cause(name, request, ran_ns)


def _ran_ns(trace: Columns, when: Union, rows: Int64s) -> int:
    """Return the part of some time that any of the spans ran, a blocked loop and the span that blocked it as one."""
    ran = union(trace.start_ns[rows], trace.end_ns[rows])
    return int(when.within(ran.starts, ran.ends).sum())


def _shown(trace: Columns, rows: Int64s) -> list[tuple[str, int]]:
    """Return the name of spans, and the row that says for whom they were: a blocked loop has those of the span that
    blocked it for most of the time."""
    shown = [(trace.sites[site].name, row) for site, row in zip(trace.site[rows].tolist(), rows.tolist(), strict=True)]
    is_blocked = np.array([is_blocked_loop(site) for site in trace.sites] or [False])[trace.site[rows]]
    at = np.flatnonzero(is_blocked)
    for index, told in zip(at.tolist(), trace.attributes.values(BLOCKED_BY, rows[at]), strict=True):
        if told:
            row = int(rows[index])
            shown[index] = str(told), _blocking(trace, row, str(told))
    return shown


def _blocking(trace: Columns, stretch: int, name: str) -> int:
    """The row of the span that blocked a loop for a stretch, by its name; that of the stretch where there is none."""
    is_one = trace.of_sites([site.name == name for site in trace.sites])
    its = np.flatnonzero(is_one & (trace.thread_id == trace.thread_id[stretch]))
    start_ns, end_ns = trace.start_ns[stretch], trace.end_ns[stretch]
    there_ns = np.minimum(trace.end_ns[its], end_ns) - np.maximum(trace.start_ns[its], start_ns)
    its = its[2 * there_ns > end_ns - start_ns]
    return int(its[np.argmax(trace.start_ns[its])]) if len(its) else stretch


def _for_whom(joined: Joined, row: int) -> int:
    """The request that a span is for; of a batch the one that most of it is given to."""
    if joined.of[row] != NONE:
        return int(joined.of[row])
    served = joined.served
    first, last = np.searchsorted(served.batch, [row, row + 1])
    if first == last:
        return NONE
    return int(served.request[first + int(np.argmax(served.weight[first:last]))])


def _of_batches(
    trace: Columns, joined: Joined, found: Ledger, place: int, part: str, moments: Sequence[Moment]
) -> Cause | None:
    """The batch in which the request spent most, and who of the others in it took most of that."""
    if not moments:
        return None
    served = joined.served
    spent = {one.pair: 0 for one in moments}
    for one in moments:
        spent[one.pair] += one.end_ns - one.start_ns

    def of_part(pair: int) -> int:
        own = min(spent[pair], int(found.given_ns[pair]))
        return own if part == SHARE else spent[pair] - own

    by_name: dict[tuple[str, str], int] = {}
    for pair in spent:
        row = int(served.batch[pair])
        name, request = trace.sites[trace.site[row]].name, ""
        if part == WAITING:
            first, last = np.searchsorted(served.batch, [row, row + 1])
            others = [at for at in range(int(first), int(last)) if served.request[at] != place]
            most = max(others, key=lambda at: int(found.given_ns[at]), default=None)
            request = "" if most is None else called(trace, joined, int(served.request[most])) or served.key[most]
        by_name[name, request] = by_name.get((name, request), 0) + of_part(pair)
    (name, request), ran_ns = max(by_name.items(), key=lambda item: (item[1], item[0]))
    return Cause(name, request, ran_ns)


def called(trace: Columns, joined: Joined, place: int) -> str:
    """Return the name of a request: its first key, or its endpoint; "" for none."""
    if place == NONE:
        return ""
    keys = joined.keys.get(place)
    return keys[0] if keys else trace.sites[trace.site[joined.rows[place]]].name
