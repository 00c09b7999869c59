"""Keys: which request each span serves, across threads, tasks and processes, by what rules read of calls.

A request is known by the keys that spans of its tree bear. A span elsewhere that bears a key, and what lies below it,
is of the request of that key which began last before it: keys may come again. A key by which another request was known
first that was open at the time names this one from when it bore it. Other keys below a span that bears one name the
request from then on, too. A request that bears the key of one that it lies within is a part of that one, as where an
engine's process has request spans of its own. One in its own tree is a request of its own by its keys, and what bears
there the key of another request is of that one. A batch is of several requests,
and of none as a whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np

from instrument.recording.remote_parents import RemoteParent
from instrument.recording.spans import BATCH_KEYS, BATCH_LIMIT, BATCH_WEIGHTS, KEY
from instrument.trace.columns import Bools, Columns, Int32s, Int64s
from instrument.trace.file import Saved
from instrument.trace.forest import NONE, nearest, rows_of, tops
from instrument.trace.groups import counts_up_to, running_most

THOUSANDTHS = 1000
"""The unit of weights."""

HEAVIEST = 1 << 31
"""No weight is more than this."""

ROUNDS = 8
"""The most steps from a key to further keys of the same request."""


@dataclass(frozen=True)
class Served:
    """Batches and the requests in them, a row for each pair; those of a batch lie together, in its order.

    `request` is the place of the request, `NONE` of a key that no request is known by; `weight` is in thousandths.
    """

    batch: Int64s
    request: Int64s
    weight: Int64s
    key: tuple[str, ...]


@dataclass(frozen=True)
class Joined:
    """The requests of a trace, by their rows in the order of their begins, and what serves them.

    `of` has the place of each row's request among them, `NONE` without one. A batch has that of the request around it.
    `keys` are, by place, those that a request is known by. `foreign` are the batches in the tree of a request that they
    do not serve, as of a loop that this one began.
    """

    rows: Int64s
    of: Int64s
    foreign: Int64s
    keys: Mapping[int, tuple[str, ...]]
    served: Served
    unbound: int
    """Spans with a key that no request is known by."""

    @cached_property
    def owner(self) -> Int32s:
        """Return the row of each row's request, `NONE` without one."""
        if not len(self.rows):
            return np.full(len(self.of), NONE, dtype=np.int32)
        return np.where(self.of == NONE, NONE, self.rows[self.of]).astype(np.int32)


def join(trace: Columns, apart_ns: int = 0, owner: Int32s | None = None) -> Joined:
    """The requests of the trace, with what serves them anywhere in it. `owner` is that of each row, if it is known.

    Where the clocks of its processes are apart, a span may seem to begin before its request, by `apart_ns` at most.
    """
    if owner is None:
        owner = trace.owners(trace.of_kind("request"))
    keyed, key_of, numbers = _keys(trace)
    owner = with_sub_requests(trace, owner, keyed, key_of)
    first = FirstKeys(trace, owner, keyed, key_of)
    owner = without_strays(trace, owner, first)
    above = _above(trace)
    bears = owner[keyed] != NONE
    starts = trace.start_ns[keyed]
    pairs, since_ns = _pairs(key_of[bears], owner[keyed[bears]].astype(np.int64), starts[bears])
    for _ in range(ROUNDS):
        bound = _Bound(trace, pairs, since_ns, apart_ns, owner, first)
        rows, place_of, of, unbound = _resolved(trace, owner, above, keyed, key_of, bound)
        known = np.flatnonzero(of[keyed] != NONE)
        more, since_ns = _pairs(
            np.concatenate([pairs[0], key_of[known]]),
            np.concatenate([pairs[1], rows[of[keyed[known]]]]),
            np.concatenate([since_ns, starts[known]]),
        )
        if more.shape == pairs.shape:
            break
        pairs = more
    names = list(numbers)
    keys: dict[int, list[str]] = {}
    for place, key in zip(of[keyed].tolist(), key_of.tolist(), strict=True):
        if place != NONE and names[key] not in keys.setdefault(place, []):
            keys[place].append(names[key])
    served = _served(trace, numbers, bound, place_of)
    foreign = _foreign(served, of)
    if len(foreign):
        says_whose = np.zeros(len(trace), dtype=np.bool_)
        says_whose[keyed] = says_whose[foreign] = True
        of = np.where(np.isin(nearest(trace.parent, says_whose), foreign), NONE, of)
    return Joined(
        rows=rows,
        of=of,
        foreign=foreign,
        keys={place: tuple(its) for place, its in keys.items()},
        served=served,
        unbound=unbound,
    )


def _keys(trace: Columns) -> tuple[Int64s, Int64s, dict[str, int]]:
    """The rows that bear a key, the number of each one's, and the numbers of all keys."""
    keyed = trace.attributes.having(KEY)
    told = trace.attributes.values(KEY, keyed)
    is_text = np.array([isinstance(one, str) and bool(one) for one in told], dtype=np.bool_)
    texts = [one for one in told if isinstance(one, str) and one]
    numbers: dict[str, int] = {}
    key_of = np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.int64)
    return keyed[is_text], key_of, numbers


def _pairs(keys: Int64s, requests: Int64s, times_ns: Int64s) -> tuple[Int64s, Int64s]:
    """Keys and the rows of requests that bear them, each pair once, and the first of its times."""
    if not len(keys):
        return np.zeros((2, 0), dtype=np.int64), times_ns
    order = np.lexsort((times_ns, requests, keys))
    found, firsts = np.unique(np.stack([keys, requests])[:, order], axis=1, return_index=True)
    return found, times_ns[order][firsts]


def _above(trace: Columns) -> Int32s:
    """The parent of each row, or its root where the parent was not kept and the root was."""
    roots = rows_of(trace.span_id, trace.root_id)
    if not len(trace):
        return roots
    tops = (trace.parent == NONE) & (trace.root_id == trace.span_id)
    is_lost = (trace.parent == NONE) & (roots != NONE) & tops[roots] & ~tops
    return np.where(is_lost, roots, trace.parent).astype(np.int32)


def _resolved(
    trace: Columns, owner: Int32s, above: Int32s, keyed: Int64s, key_of: Int64s, bound: _Bound
) -> tuple[Int64s, Int64s, Int64s, int]:
    """The rows of requests, the place of each row among them, of each row that of its request, and how many spans with
    keys have none."""
    is_part = np.zeros(len(trace), dtype=np.bool_)
    is_part[bound.parts] = True
    rows = np.flatnonzero((owner == np.arange(len(trace))) & ~is_part)
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    place_of = np.full(len(trace) + 1, NONE, dtype=np.int64)  # the last is that of no row
    place_of[rows] = np.arange(len(rows))
    whole = np.arange(len(trace) + 1)
    whole[bound.parts] = bound.wholes
    of = place_of[whole[owner]]
    apart = np.flatnonzero(owner[keyed] == NONE)
    requests = place_of[bound.at(key_of[apart], trace.start_ns[keyed[apart]])]
    of_key = np.full(len(trace) + 1, NONE, dtype=np.int64)
    of_key[keyed[apart]] = requests
    is_known = np.zeros(len(trace), dtype=np.bool_)
    is_known[keyed[apart[requests != NONE]]] = True
    if is_known.any():
        of = np.where(of == NONE, of_key[nearest(above, is_known)], of)
    return rows, place_of, of, int((requests == NONE).sum())


class _Bound:
    """The requests that keys name at a time: rows of requests by key and begin.

    A key of which another request was known first, which has not ended yet, names a request from `since_ns` on.
    """

    def __init__(
        self, trace: Columns, pairs: Int64s, since_ns: Int64s, apart_ns: int, owner: Int32s, first: FirstKeys
    ) -> None:
        keys, requests = pairs
        starts, ends = trace.start_ns[requests], trace.end_ns[requests]
        order = np.lexsort((requests, -ends, starts, keys))
        keys, requests, starts, ends = keys[order], requests[order], starts[order], ends[order]
        reach, wholes = ends.copy(), requests.copy()
        parts: dict[int, int] = {}
        for place in range(1, len(keys)):  # of requests with keys, a few steps for each
            if keys[place] == keys[place - 1] and ends[place] <= reach[place - 1]:
                reach[place], wholes[place] = reach[place - 1], wholes[place - 1]
                if wholes[place] != requests[place]:
                    parts.setdefault(int(requests[place]), int(wholes[place]))
        # One that is a part by one key may be whole by another: what is whole of it stands.
        self.parts = np.array(list(parts), dtype=np.int64)
        self.wholes = np.array([_top(parts, one) for one in parts], dtype=np.int64)
        whole = np.array([_top(parts, one) for one in requests.tolist()], dtype=np.int64)
        names_from = self._named_from(trace, keys, whole, since_ns[order], owner, first)
        order = np.lexsort((-trace.end_ns[whole], trace.start_ns[whole], names_from, keys))
        self._keys, self._requests, self._starts = keys[order], whole[order], names_from[order]
        self._ends, self._apart_ns = trace.end_ns, apart_ns

    def _named_from(
        self, trace: Columns, keys: Int64s, whole: Int64s, since_ns: Int64s, owner: Int32s, first: FirstKeys
    ) -> Int64s:
        """Return the time from which each key names its request: the begin of the request as a rule.

        Where another request is known by the key first, and was open when this one bore it, it is right after that.
        """
        found = trace.start_ns[whole]
        further = np.flatnonzero(~first.are_first(whole, keys))
        if not len(further):
            return found
        keys, whole, since_ns = keys[further], whole[further], since_ns[further]
        whole_of = np.arange(len(trace))
        whole_of[self.parts] = self.wholes
        around = owner[first.rows].astype(np.int64)
        around = whole_of[np.where(around == NONE, first.rows, around)]
        ends = np.maximum(first.ends, first.starts + 1)
        begun = counts_up_to(first.keys, first.starts, keys, since_ns)
        before = counts_up_to(first.keys, ends, keys, trace.start_ns[whole])
        of_own = first.keys * len(trace) + around
        own = counts_up_to(of_own, first.starts, keys * len(trace) + whole, since_ns)
        is_theirs = begun - before > own
        found[further[is_theirs]] = since_ns[is_theirs] + 1
        return found

    def at(self, keys: Int64s, times_ns: Int64s) -> Int64s:
        """The row of the request that each key names at a time, -1 for none: an index of what says so.

        Where that one had ended, it is one that begins right after, as far as clocks are apart.
        """
        found = self._begun(keys, times_ns)
        if self._apart_ns and len(self._keys):
            is_over = (found == NONE) | (self._ends[found] < times_ns)
            found = np.where(is_over, self._begun(keys, times_ns + self._apart_ns), found)
        return found

    def _begun(self, keys: Int64s, times_ns: Int64s) -> Int64s:
        """The row of the request of each key that began last up to a time."""
        begun = counts_up_to(self._keys, self._starts, keys, times_ns)
        last = np.searchsorted(self._keys, keys) + begun - 1
        return np.where(begun > 0, np.append(self._requests, NONE)[last], NONE)


def _top(parts: Mapping[int, int], request: int) -> int:
    """The request that one is a part of in the end. Keys may disagree, but nothing is within itself."""
    seen = {request}
    while (above := parts.get(request)) is not None and above not in seen:
        seen.add(request := above)
    return request


def _served(trace: Columns, numbers: Mapping[str, int], bound: _Bound, place_of: Int64s) -> Served:
    rows = trace.attributes.having(BATCH_KEYS)
    of_rows = [batch_keys(one) for one in trace.attributes.values(BATCH_KEYS, rows)]
    sizes = np.array([len(its) for its in of_rows], dtype=np.int64)
    weights = [
        batch_weights(told, len(its))
        for told, its in zip(trace.attributes.values(BATCH_WEIGHTS, rows), of_rows, strict=True)
    ]
    keys = tuple(chain.from_iterable(of_rows))
    batch = np.repeat(rows, sizes)
    key_of = np.array([numbers.get(key, NONE) for key in keys], dtype=np.int64)
    request = place_of[bound.at(key_of, trace.start_ns[batch])]
    flat = np.fromiter(chain.from_iterable(weights), np.int64, len(keys))
    return each_once(Served(batch, request, flat, keys))


def _foreign(served: Served, of: Int64s) -> Int64s:
    """The batches in the tree of a request that serve known ones, and not this one."""
    around = of[served.batch]
    serves = served.batch[(around != NONE) & (served.request != NONE)]
    return np.setdiff1d(serves, served.batch[served.request == around])


def each_once(served: Served) -> Served:
    """Each request once in a batch: one that is there under several keys, or several times, has the weight of all."""
    places = np.arange(len(served.batch))
    whose = np.where(served.request == NONE, NONE - 1 - places, served.request)  # what is of none stays as it is
    order = np.lexsort((places, whose, served.batch))
    batch, whose = served.batch[order], whose[order]
    firsts = np.flatnonzero(
        np.concatenate([[True], (batch[1:] != batch[:-1]) | (whose[1:] != whose[:-1])])[: len(order)]
    )
    if len(firsts) == len(order):
        return served
    kept = order[firsts]
    back = np.argsort(kept)
    weight = np.add.reduceat(served.weight[order], firsts)[back]
    kept = kept[back]
    return Served(served.batch[kept], served.request[kept], weight, tuple(served.key[at] for at in kept.tolist()))


def batch_keys(told: Any) -> Sequence[str]:
    """The keys that a batch serves, by what it says of them."""
    found = told if isinstance(told, (list, tuple)) else ()
    return [one for one in found[:BATCH_LIMIT] if isinstance(one, str)]


def batch_weights(told: Any, count: int) -> Sequence[int]:
    """Return the weight of each key in thousandths; equal ones where weights are missing or all 0."""
    alike = [THOUSANDTHS] * count
    if not isinstance(told, (list, tuple)) or len(told) != count:
        return alike
    found = [
        round(min(one, HEAVIEST) * THOUSANDTHS) if isinstance(one, (int, float)) and one > 0 else 0 for one in told
    ]
    return found if any(found) else alike


# Sub-requests

# A request in the tree of another one is one of its own if it bears a key that the request around it bears only in it.
# A request without a key outside of such has the single key in it; several keys, of several requests in it, are theirs.
# A stray is done for one request in the tree of another, where an engine's loop began in the context of the first one.


def with_sub_requests(trace: Columns, owner: Int32s, keyed: Int64s, key_of: Int64s) -> Int32s:
    """The request of each row, with sub-requests, by that which is topmost, and by the keys that some rows bear."""
    is_request = trace.of_kind("request")
    inner = is_request & (owner != np.arange(len(trace))) & (owner != NONE)
    if not inner.any() or not len(keyed):
        return owner
    of = nearest(trace.parent, is_request)
    is_theirs = inner[of[keyed]] & (of[keyed] != NONE)
    if not is_theirs.any():
        return owner
    keys: dict[int, set[int]] = {}
    for row, key in zip(np.where(of == NONE, owner, of)[keyed].tolist(), key_of.tolist(), strict=True):
        keys.setdefault(row, set()).add(key)
    is_own = is_request & ~inner
    candidates = np.unique(of[keyed[is_theirs]])
    for level in np.unique(trace.level[candidates]).tolist():
        around = nearest(trace.parent, is_own)
        within: dict[int, list[int]] = {}
        for row in candidates[trace.level[candidates] == level].tolist():
            within.setdefault(int(around[row]), []).append(row)
        for outer, rows in within.items():
            others = keys.get(outer, set())
            found = [row for row in rows if not keys[row] & others]
            if others or len({frozenset(keys[row]) for row in found}) > 1:
                is_own[found] = True
    own = nearest(trace.parent, is_own)
    is_within = (own != NONE) & inner[own]
    return np.where(is_within, own, owner).astype(np.int32)


class FirstKeys:
    """The requests of a trace by the keys that they were known by first: those in the trees of others, too, for parts
    of a request lie in its tree or in their own."""

    def __init__(self, trace: Columns, owner: Int32s, keyed: Int64s, key_of: Int64s) -> None:
        near = nearest(trace.parent, trace.of_kind("request"))
        self.around = np.where((near == NONE) | (owner == NONE), owner, near).astype(np.int64)
        """The nearest request at or above each row."""
        borne, keys = keyed[owner[keyed] != NONE], key_of[owner[keyed] != NONE]
        order = np.lexsort((trace.span_id[borne], trace.start_ns[borne]))
        self.borne, self.borne_keys = borne[order], keys[order]
        """The rows of requests that bear keys, in the order of their begins, and the numbers of these."""
        rows, firsts = np.unique(self.around[self.borne], return_index=True)
        first = self.borne_keys[firsts]
        self._first_of = np.full(len(trace) + 1, NONE, dtype=np.int64)  # the last is that of no row
        self._first_of[rows] = first
        order = np.lexsort((trace.start_ns[rows], first))
        self.rows, self.keys = rows[order].astype(np.int64), first[order]
        self.starts, self.ends = trace.start_ns[self.rows], trace.end_ns[self.rows]
        self._reach = running_most(self.ends, self.keys)

    def are_first(self, rows: Int64s, keys: Int64s) -> Bools:
        """Return True for requests that were known by these keys first."""
        return np.asarray(self._first_of[rows] == keys)

    def are_of_others(self, keys: Int64s, at_ns: Int64s, start_ns: Int64s) -> Bools:
        """Return True for keys of other requests, of keys that requests bore first at a time.

        Such a request began at `start_ns` and is known by another key first. The key is another request's, which is
        known by it first and had begun by then. Had that one ended by then, it began after the request around.
        """
        begun = counts_up_to(self.keys, self.starts, keys, at_ns)
        last = np.searchsorted(self.keys, keys) + begun - 1
        if not len(self.keys):
            return np.zeros(len(keys), dtype=np.bool_)
        return np.asarray((begun > 0) & ((self._reach[last] > at_ns) | (self.starts[last] >= start_ns)))


def without_strays(trace: Columns, owner: Int32s, first: FirstKeys) -> Int32s:
    """The request of each row, `NONE` of strays and of what lies below them: their own key says whose they are.

    They bear the key by which another request was known first, and which the request around them, known by another one,
    did not bear before that one began. Else it is a further name of the request around them, which handed it over.
    """
    around = first.around[first.borne]
    pairs, began, pair_of = np.unique(
        np.stack([around, first.borne_keys]), axis=1, return_index=True, return_inverse=True
    )  # fmt: skip
    at_ns = trace.start_ns[first.borne[began]]
    are_astray = ~first.are_first(*pairs) & first.are_of_others(pairs[1], at_ns, trace.start_ns[pairs[0]])
    if not are_astray.any():
        return owner
    is_stray = np.zeros(len(trace), dtype=np.bool_)
    is_stray[first.borne] = are_astray[pair_of.reshape(-1)]
    top = nearest(trace.parent, is_stray | (owner == np.arange(len(trace))))
    return np.where((top != NONE) & is_stray[top], np.int32(NONE), owner).astype(np.int32)


# Grafting: one tree for each request

# A span elsewhere that bears a request's key moves, with all below it, to below the span that handed the request
# over. Of the spans that bear the key and had begun, that is the newest that was open. Else it is the one of the
# request's own tree that ended last, else the request. A batch keeps its tree, for it is of several requests. In the
# tree of a request that it does not serve it becomes a root. No row comes or goes, and none changes but in what is
# above it.
# A trace without an id gets one of the run and the key. So a process whose spans go to a collector by themselves
# finds its request there.

LOOK_BACK = 64
"""The number of newest spans with a key among which the one is found that handed a request over."""


def graft(saved: Saved) -> Saved:
    """Return a saved recording with one tree for each of its requests."""
    trace, facts = saved.trace.columns, saved.trace
    return replace(saved, trace=facts.with_columns(grafted(trace, join(trace, facts.apart_ns), facts.origin.run)))


def grafted(trace: Columns, joined: Joined, run: str = "") -> Columns:
    """Return the trace with one tree for each request. Without a `run` no trace gets an id.

    Spans stay in their place where parents would run in a circle, as keys of one span within another may cause.
    """
    moves = _moves(trace, joined)
    parent = trace.parent.copy()
    requests = joined.rows[joined.of[moves]]
    parent[moves] = _givers(trace, joined, moves)
    for instead in (requests, trace.parent[moves]):
        stuck = _in_circles(parent)[moves]
        parent[moves[stuck]] = instead[stuck]
    moved = moves[parent[moves] != trace.parent[moves]]
    root_id, parent_id = trace.root_id.copy(), trace.parent_id.copy()
    parent_id[moved] = trace.span_id[parent[moved]]
    parent[joined.foreign], parent_id[joined.foreign] = NONE, 0
    top = tops(parent)
    below = np.isin(top, joined.foreign)
    root_id[below] = trace.span_id[top[below]]
    its = np.flatnonzero(joined.of != NONE)
    around = joined.rows[joined.of[its]]
    is_below = top[its] == top[around]
    root_id[its[is_below]] = trace.root_id[around[is_below]]
    remote = {row: one for row, one in trace.remote.items() if root_id[row] == trace.root_id[row]}
    if run:
        remote |= _by_key(trace, joined, run, root_id, remote)
    return replace(trace, parent_id=parent_id, root_id=root_id, remote=remote)


def trace_id_of(run: str, key: str) -> int:
    """The trace, 128 bits, of the request that a key names in a run: the same wherever it is asked."""
    text = f"{run}\0{key}".encode(errors="surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=16).digest(), "big") or 1


def _moves(trace: Columns, joined: Joined) -> Int64s:
    """The topmost rows of what is done for a request outside of its tree."""
    of_parent = np.append(joined.of, NONE)[trace.parent]
    moves = (joined.of != NONE) & (of_parent != joined.of)
    moves[joined.rows] = False
    moves[_around(trace, joined)] = False
    # A span of the request's own tree whose parent was not kept is where it belongs.
    own = np.append(trace.root_id[joined.rows], 0)[joined.of]
    moves &= (trace.parent != NONE) | (trace.root_id != own)
    return np.flatnonzero(moves)


def _around(trace: Columns, joined: Joined) -> Int64s:
    """The rows above requests that are done for the same ones: they cannot go below these."""
    found = [np.zeros(0, dtype=np.int64)]
    places, above = np.arange(len(joined.rows)), trace.parent[joined.rows]
    while (goes_on := above != NONE).any():
        places, above = places[goes_on], above[goes_on]
        found.append(above[joined.of[above] == places].astype(np.int64))
        above = trace.parent[above]
    return np.asarray(np.concatenate(found))


def _givers(trace: Columns, joined: Joined, moves: Int64s) -> Int64s:
    """Return the row that handed over the request of each row."""
    found: Int64s = joined.rows[joined.of[moves]].copy()
    keyed = trace.attributes.having(KEY)
    top = _tops_of_pieces(trace, joined.rows, moves)
    keyed = keyed[(joined.of[keyed] != NONE) & (top[keyed] != NONE) & ~np.isin(keyed, joined.rows)]
    if not len(keyed) or not len(moves):
        return found
    keyed = keyed[np.lexsort((trace.span_id[keyed], -trace.end_ns[keyed], trace.start_ns[keyed]))]
    of_keys: dict[tuple[int, object], list[int]] = {}
    key_of: dict[int, object] = {}
    for row, place, key in zip(
        keyed.tolist(), joined.of[keyed].tolist(), trace.attributes.values(KEY, keyed), strict=True
    ):
        key_of[row] = key
        of_keys.setdefault((place, key), []).append(row)
    is_own = np.isin(top, joined.rows)
    starts = {which: trace.start_ns[rows].tolist() for which, rows in of_keys.items()}
    for at, (row, place) in enumerate(zip(moves.tolist(), joined.of[moves].tolist(), strict=True)):
        own_keys: Sequence[object] = [key_of[row]] if row in key_of else joined.keys.get(place, ())
        before = [
            one
            for which in ((place, key) for key in own_keys)
            if which in of_keys
            for one in of_keys[which][: bisect_left(starts[which], int(trace.start_ns[row]))][-LOOK_BACK:]
        ]
        giver = _giver(trace, before, is_own, int(trace.start_ns[row]))
        if giver is not None:
            found[at] = giver
    return found


def _giver(trace: Columns, before: Sequence[int], is_own: Bools, at_ns: int) -> int | None:
    """Return the newest of some rows that was open at a time, else the last that ended in the request's own tree."""
    still_open = [row for row in before if trace.end_ns[row] > at_ns]
    if still_open:
        return max(still_open, key=lambda row: (trace.start_ns[row], -trace.end_ns[row], row))
    ended = [row for row in before if is_own[row]]
    return max(ended, key=lambda row: (trace.end_ns[row], row), default=None)


def _tops_of_pieces(trace: Columns, requests: Int64s, moves: Int64s) -> Int32s:
    """At or above each row the nearest one that is a request, or goes below one."""
    is_top = np.zeros(len(trace), dtype=np.bool_)
    is_top[requests] = is_top[moves] = True
    return nearest(trace.parent, is_top)


def _in_circles(parent: Int32s) -> Bools:
    """Return True for rows without a root above them, because parents run in a circle."""
    above = parent.copy()
    for _ in range(len(parent).bit_length() + 1):
        above = np.where(above == NONE, np.int32(NONE), above[above]).astype(np.int32)
    return np.asarray(above != NONE)


def _by_key(
    trace: Columns, joined: Joined, run: str, root_id: Int64s, known: dict[int, RemoteParent]
) -> dict[int, RemoteParent]:
    """Return the traces of requests by their first keys, and of spans with a key of no request here.

    The first request of a key has its trace, because other processes cannot distinguish later ones.
    """
    have_traces = {int(root_id[row]) for row in known}
    found: dict[int, RemoteParent] = {}
    taken: set[str] = set()
    for place, keys in sorted(joined.keys.items()):
        row = int(joined.rows[place])
        if int(root_id[row]) not in have_traces and keys[0] not in taken and root_id[row] == trace.span_id[row]:
            found[row] = RemoteParent(trace_id_of(run, keys[0]), 0)
        taken.update(keys)
    keyed = trace.attributes.having(KEY)
    keyed = keyed[(joined.of[keyed] == NONE) & (trace.parent_id[keyed] == 0)]
    for row, key in zip(keyed.tolist(), trace.attributes.values(KEY, keyed), strict=True):
        if isinstance(key, str) and key and key not in taken and row not in known:
            found[row] = RemoteParent(trace_id_of(run, key), 0)
    return found
