"""Sub-requests: those in the tree of another request that are requests of their own, for they have keys of their own.

That is one that bears no key which the request around it bears outside of it. Where that one bears none of its own, a
single key within it is its key; several, of several requests within it, are theirs.
"""

from __future__ import annotations

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
