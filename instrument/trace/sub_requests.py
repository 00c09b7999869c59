"""Sub-requests: those in the tree of another request that are requests of their own, for they have keys of their own.

That is one that bears no key which the request around it bears outside of it. Where that one bears none of its own, a
single key within it is its key; several, of several requests within it, are theirs.

And strays: what is done for one request in the tree of another one, as where an engine's loop began in the context of
the request that came first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from instrument.trace.columns import Int32s, Int64s, Trace
from instrument.trace.forest import NONE, nearest


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


def without_strays(
    trace: Trace,
    owner: Int32s,
    keyed: Int64s,
    key_of: Int64s,
    elsewhere: Callable[[int, int, int], bool] = lambda row, key, at_ns: False,
) -> Int32s:
    """The request of each row, `NONE` of strays and of what lies below them: their own key says whose they are.

    They bear the key by which another request was known first, and which the request around them, known by another one,
    did not bear before that one began. Else it is a further name of the request around them, which handed it over.
    `elsewhere` tells whether that other one is not in the trace, for the row of a request, the number of a key that is
    not its first, and when it bore that first.
    """
    borne, keys = keyed[owner[keyed] != NONE], key_of[owner[keyed] != NONE]
    order = np.lexsort((trace.level[borne], trace.start_ns[borne]))
    borne, keys = borne[order], keys[order]
    requests, firsts = np.unique(owner[borne], return_index=True)
    pairs, began = np.unique(np.stack([owner[borne].astype(np.int64), keys]), axis=1, return_index=True)
    if len(began) == len(firsts):
        return owner
    first = dict(zip(requests.tolist(), keys[firsts].tolist(), strict=True))
    known: dict[int, list[int]] = {}
    for request, key in first.items():
        known.setdefault(key, []).append(request)
    starts, ends = trace.start_ns, trace.end_ns
    strays = {
        (request, key)
        for request, key, at_ns in zip(*pairs.tolist(), starts[borne[began]].tolist(), strict=True)
        if key != first[request]
        and (
            any(are_strays(at_ns, int(starts[request]), int(starts[one]), int(ends[one])) for one in known.get(key, ()))
            or elsewhere(request, key, at_ns)
        )
    }
    if not strays:
        return owner
    is_stray = np.zeros(len(trace), dtype=np.bool_)
    is_stray[borne] = [pair in strays for pair in zip(owner[borne].tolist(), keys.tolist(), strict=True)]
    top = nearest(trace.parent, is_stray | (owner == np.arange(len(trace))))
    return np.where((top != NONE) & is_stray[top], np.int32(NONE), owner).astype(np.int32)
