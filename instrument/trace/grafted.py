"""Grafting: one tree for each request, over all threads and processes that worked for it.

What bears a request's key elsewhere is taken, with all below it, from where it lies to below the span that handed the
request over: of the spans that bear the key and had begun, the newest that was open, else of the request's own tree the
one that ended last, else the request. A batch keeps its tree, for it is of several requests. In the tree of a request
that it does not serve it becomes a root. No row comes or goes, and none changes but in what is above it.

A trace that nobody has given an id gets one of the run and the key. So a process whose spans go to a collector by
themselves finds its request there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from instrument.recording.remote_parents import RemoteParent
from instrument.recording.spans import KEY
from instrument.trace.columns import Bools, Columns, Int32s, Int64s
from instrument.trace.file import Saved
from instrument.trace.forest import NONE, nearest, tops
from instrument.trace.joined import Joined, join

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
