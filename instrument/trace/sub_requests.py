"""Sub-requests: those in the tree of another request that are requests of their own, for they have keys of their own.

That is one that bears no key which the request around it bears outside of it. Where that one bears none of its own, a
single key within it is its key; several, of several requests within it, are theirs.

And strays: what is done for one request in the tree of another one, as where an engine's loop began in the context of
the request that came first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from instrument.trace.columns import Bools, Int32s, Int64s, Trace
from instrument.trace.forest import NONE, nearest
from instrument.trace.groups import counts_up_to, running_most


def with_sub_requests(trace: Trace, owner: Int32s, keyed: Int64s, key_of: Int64s) -> Int32s:
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


def are_strays(at_ns: int, start_ns: int, other_start_ns: int, other_end_ns: int) -> bool:
    """Whether what bears a key in the tree of a request is of another one, which is known by that key first.

    The request around it began at `start_ns`, is known by another key first, and bore this one first at a time at which
    the other one had begun: had that one ended by then it is its key all the same if it began after the one around.
    """
    return other_start_ns <= at_ns and (other_end_ns > at_ns or other_start_ns >= start_ns)


class FirstKeys:
    """The requests of a trace by the keys that they were known by first: those in the trees of others, too, for parts
    of a request lie in its tree or in their own."""

    def __init__(self, trace: Trace, owner: Int32s, keyed: Int64s, key_of: Int64s) -> None:
        near = nearest(trace.parent, trace.of_kind("request"))
        self.around = np.where((near == NONE) | (owner == NONE), owner, near).astype(np.int64)
        """Of each row the request that is nearest at or above it."""
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
        """Which of some requests were known by these keys first."""
        return np.asarray(self._first_of[rows] == keys)

    def are_of_others(self, keys: Int64s, at_ns: Int64s, start_ns: Int64s) -> Bools:
        """Which of some keys, each first borne at a time in a request that began then, and that is known by another one
        first, are those of others: it is `are_strays` for all of them."""
        begun = counts_up_to(self.keys, self.starts, keys, at_ns)
        last = np.searchsorted(self.keys, keys) + begun - 1
        if not len(self.keys):
            return np.zeros(len(keys), dtype=np.bool_)
        return np.asarray((begun > 0) & ((self._reach[last] > at_ns) | (self.starts[last] >= start_ns)))


def without_strays(
    trace: Trace,
    owner: Int32s,
    first: FirstKeys,
    elsewhere: Callable[[int, int, int], bool] | None = None,
) -> Int32s:
    """The request of each row, `NONE` of strays and of what lies below them: their own key says whose they are.

    They bear the key by which another request was known first, and which the request around them, known by another one,
    did not bear before that one began. Else it is a further name of the request around them, which handed it over.
    `elsewhere` tells whether that other one is not in the trace, for the row of a request, the number of a key that is
    not its first, and when it bore that first.
    """
    around = first.around[first.borne]
    pairs, began, pair_of = np.unique(
        np.stack([around, first.borne_keys]), axis=1, return_index=True, return_inverse=True
    )  # fmt: skip
    at_ns = trace.start_ns[first.borne[began]]
    is_further = ~first.are_first(*pairs)
    are_astray = is_further & first.are_of_others(pairs[1], at_ns, trace.start_ns[pairs[0]])
    if elsewhere is not None:
        for at in np.flatnonzero(is_further & ~are_astray).tolist():
            are_astray[at] = elsewhere(int(pairs[0, at]), int(pairs[1, at]), int(at_ns[at]))
    if not are_astray.any():
        return owner
    is_stray = np.zeros(len(trace), dtype=np.bool_)
    is_stray[first.borne] = are_astray[pair_of.reshape(-1)]
    top = nearest(trace.parent, is_stray | (owner == np.arange(len(trace))))
    return np.where((top != NONE) & is_stray[top], np.int32(NONE), owner).astype(np.int32)
