"""Joins each span to the request that it serves, by keys, across threads, tasks and processes.

A rule reads a key, such as a request id, from a call. A request has the keys of all spans in its tree. If another tree
has a span with such a key, this span and all spans below it also serve the request. A batch may serve several requests.

If several requests have the same key, a span with the key serves the request that began last before the span. If two
requests have the same key and one runs within the other's time, the inner request is a part of the outer one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from instrument.recording.spans import BATCH_KEYS, BATCH_LIMIT, BATCH_WEIGHTS, KEY
from instrument.trace.columns import Attributes, Bools, Columns, Int32s, Int64s
from instrument.trace.indices import (
    NONE,
    Groups,
    compute_running_max,
    count_numbers_up_to,
    find_last_number,
    find_nearest_row,
    find_rows,
    index_rows,
    make_mask,
    number_by_first_occurrence,
)

THOUSANDTHS = 1000
"""The stored number for a weight of 1."""

HEAVIEST = 1 << 31
"""The largest weight. Larger weights are reduced to it."""

ROUNDS = 8
"""The maximum number of rounds in the search for a request's further keys."""


@dataclass(frozen=True)
class Served:
    """The pairs of a batch and a request that it serves, ordered by batch. `request` is the index of the request, or
    `NONE` if no request has the key. `weight` is in thousandths."""

    batch: Int64s
    request: Int64s
    weight: Int64s
    key: tuple[str, ...]


@dataclass(frozen=True)
class Joined:
    """The requests of a trace, as row numbers ordered by start time, and the spans that serve them.

    `of` has the index of each row's request, or `NONE`. `keys` has the keys of each request, by index. `foreign` has
    the batches in a request's tree that serve only other requests.
    """

    rows: Int64s
    of: Int64s
    foreign: Int64s
    keys: Mapping[int, tuple[str, ...]]
    served: Served
    unbound: int
    """The number of spans whose key names no request."""

    @cached_property
    def owner(self) -> Int32s:
        """The request of each row, as a row number. It is `NONE` for a row without a request."""
        return np.append(self.rows, NONE)[self.of].astype(np.int32)


def join_requests(trace: Columns, apart_ns: int = 0, owner: Int32s | None = None) -> Joined:
    """Return the requests of a trace with the spans that serve them. `owner` has each row's request, if already known.

    `apart_ns` is the largest difference of the processes' clocks. A span may seem to begin up to `apart_ns` before its
    request.
    """
    if owner is None:
        owner = trace.find_topmost_wanted_rows(trace.are_of_kind("request"))
    keyed = trace.attributes.rows_with_attribute(KEY)
    if not len(keyed) and not len(trace.attributes.rows_with_attribute(BATCH_KEYS)):
        return _join_own_trees(trace, owner)
    values = trace.attributes.values(KEY, keyed)
    keyed = keyed[np.array([isinstance(value, str) and bool(value) for value in values], dtype=np.bool_)]
    numbers: dict[str, int] = {}
    """The number of each key."""
    texts = (value for value in values if isinstance(value, str) and value)
    key_of = np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.int64)
    owner = split_sub_requests(trace, owner, keyed, key_of)
    first = FirstKeys(trace, owner, keyed, key_of)
    owner = remove_stray_spans(trace, owner, first)
    # The parent of each row, or its root if the parent was not kept but the root was.
    roots = find_rows(trace.span_id, trace.root_id)
    tops = (trace.parent == NONE) & (trace.root_id == trace.span_id)
    is_lost = (trace.parent == NONE) & (roots != NONE) & ~tops
    is_lost &= tops[roots]
    above = np.where(is_lost, roots, trace.parent).astype(np.int32)
    bears = owner[keyed] != NONE
    starts = trace.start_ns[keyed]
    pairs, since_ns = _pair_keys(key_of[bears], owner[keyed[bears]].astype(np.int64), starts[bears])
    for _ in range(ROUNDS):
        bound = _Bound(trace, pairs, since_ns, apart_ns, owner, first)
        rows, place_of, of, unbound = _resolve_requests(trace, owner, above, keyed, key_of, bound)
        bound_places = np.flatnonzero(of[keyed] != NONE)
        more, earlier_ns = _pair_keys(
            np.concatenate([pairs[0], key_of[bound_places]]),
            np.concatenate([pairs[1], rows[of[keyed[bound_places]]]]),
            np.concatenate([since_ns, starts[bound_places]]),
        )
        if more.shape == pairs.shape and np.array_equal(earlier_ns, since_ns):
            break
        pairs, since_ns = more, earlier_ns
    names = list(numbers)
    keys: dict[int, list[str]] = {}
    for place, key in zip(of[keyed].tolist(), key_of.tolist(), strict=True):
        if place != NONE and names[key] not in keys.setdefault(place, []):
            keys[place].append(names[key])
    batch, weights, member_keys = _read_members(trace.attributes)
    key_of_member = np.array([numbers.get(key, NONE) for key in member_keys], dtype=np.int64)
    request = place_of[bound.find_requests(key_of_member, trace.start_ns[batch])]
    served = merge_repeated_members(Served(batch, request, weights, member_keys))
    around = of[served.batch]  # the request in whose tree a batch is, which may serve only others
    serves = served.batch[(around != NONE) & (served.request != NONE)]
    foreign = np.setdiff1d(serves, served.batch[served.request == around])
    if len(foreign):
        has_owner = np.zeros(len(trace), dtype=np.bool_)
        has_owner[keyed] = has_owner[foreign] = True
        of = np.where(np.isin(find_nearest_row(trace.parent, has_owner), foreign), NONE, of)
    return Joined(
        rows=rows,
        of=of,
        foreign=foreign,
        keys={place: tuple(names_of_request) for place, names_of_request in keys.items()},
        served=served,
        unbound=unbound,
    )


def _join_own_trees(trace: Columns, owner: Int32s) -> Joined:
    """Join each request only with the spans of its tree, because no span has a key."""
    rows = np.flatnonzero(owner == np.arange(len(trace)))
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    none = np.zeros(0, dtype=np.int64)
    return Joined(rows, index_rows(rows, len(trace))[owner], none, {}, Served(none, none, none, ()), 0)


def _pair_keys(keys: Int64s, requests: Int64s, times_ns: Int64s) -> tuple[Int64s, Int64s]:
    if not len(keys):
        return np.zeros((2, 0), dtype=np.int64), times_ns
    order = np.lexsort((times_ns, requests, keys))
    pairs, firsts = np.unique(np.stack([keys, requests])[:, order], axis=1, return_index=True)
    return pairs, times_ns[order][firsts]


def _resolve_requests(
    trace: Columns, owner: Int32s, above: Int32s, keyed: Int64s, key_of: Int64s, bound: _Bound
) -> tuple[Int64s, Int64s, Int64s, int]:
    is_part = make_mask(bound.parts, len(trace))
    rows = np.flatnonzero((owner == np.arange(len(trace))) & ~is_part)
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    place_of = np.full(len(trace) + 1, NONE, dtype=np.int64)  # the last place is that of a missing row
    place_of[rows] = np.arange(len(rows))
    of = place_of[bound.whole_of[owner]]
    outside = np.flatnonzero(owner[keyed] == NONE)
    requests = place_of[bound.find_requests(key_of[outside], trace.start_ns[keyed[outside]])]
    of_key = np.full(len(trace) + 1, NONE, dtype=np.int64)
    of_key[keyed[outside]] = requests
    is_known = make_mask(keyed[outside[requests != NONE]], len(trace))
    if is_known.any():
        of = np.where(of == NONE, of_key[find_nearest_row(above, is_known)], of)
    return rows, place_of, of, int((requests == NONE).sum())


class _Bound:
    """Finds the request that a key names at a time. A request may get a key while another request with that key is
    open. The key then names the new request only after `since_ns`."""

    def __init__(
        self, trace: Columns, pairs: Int64s, since_ns: Int64s, apart_ns: int, owner: Int32s, first: FirstKeys
    ) -> None:
        keys, requests = pairs
        starts, ends = trace.start_ns[requests], trace.end_ns[requests]
        order = np.lexsort((requests, -ends, starts, keys))
        keys, requests, starts, ends = keys[order], requests[order], starts[order], ends[order]
        reach = compute_running_max(ends, keys)
        is_part = np.append([False], (keys[1:] == keys[:-1]) & (ends[1:] <= reach[:-1]))[: len(keys)]
        wholes = requests[np.maximum.accumulate(np.where(is_part, 0, np.arange(len(keys))))]
        contained = zip(requests[is_part].tolist(), wholes[is_part].tolist(), strict=True)
        parts = {part: whole for part, whole in reversed([*contained]) if part != whole}  # the first one counts
        # A request may be a part by one key and whole by another. Its whole wins.
        self.parts = np.array(list(parts), dtype=np.int64)
        self.whole_of = np.arange(len(trace) + 1)  # the last is that of a missing row
        self.whole_of[self.parts] = [_outermost_request(parts, request) for request in parts]
        whole = self.whole_of[requests]
        (keys, whole), since_ns = _pair_keys(keys, whole, since_ns[order])  # the first use in any part
        names_from = self._find_first_use(trace, keys, whole, since_ns, owner, first)
        order = np.lexsort((-trace.end_ns[whole], trace.start_ns[whole], names_from, keys))
        self._keys, self._requests, self._starts = keys[order], whole[order], names_from[order]
        self._ends, self._apart_ns = trace.end_ns, apart_ns

    def _find_first_use(
        self, trace: Columns, keys: Int64s, whole: Int64s, since_ns: Int64s, owner: Int32s, first: FirstKeys
    ) -> Int64s:
        from_ns = trace.start_ns[whole]
        further = np.flatnonzero(~first.are_first_keys(whole, keys))
        if not len(further):
            return from_ns
        keys, whole, since_ns = keys[further], whole[further], since_ns[further]
        around = self.whole_of[np.where(owner[first.rows] == NONE, first.rows, owner[first.rows])]
        ends = np.maximum(first.ends, first.starts + 1)
        begun_counts = count_numbers_up_to(first.keys, first.starts, keys, since_ns)
        ended_counts = count_numbers_up_to(first.keys, ends, keys, trace.start_ns[whole])
        of_own = first.keys * len(trace) + around
        own_counts = count_numbers_up_to(of_own, first.starts, keys * len(trace) + whole, since_ns)
        is_theirs = begun_counts - ended_counts > own_counts
        from_ns[further[is_theirs]] = since_ns[is_theirs] + 1
        return from_ns

    def find_requests(self, keys: Int64s, times_ns: Int64s) -> Int64s:
        requests = self._find_newest_requests(keys, times_ns)
        if self._apart_ns and len(self._keys):
            is_over = (requests == NONE) | (self._ends[requests] < times_ns)
            requests = np.where(is_over, self._find_newest_requests(keys, times_ns + self._apart_ns), requests)
        return requests

    def _find_newest_requests(self, keys: Int64s, times_ns: Int64s) -> Int64s:
        return np.append(self._requests, NONE)[find_last_number(self._keys, self._starts, keys, times_ns)]


def _outermost_request(parts: Mapping[int, int], request: int) -> int:
    """Return the outermost request around a request. `parts` may have cycles."""
    path = {request}
    while (above := parts.get(request)) is not None and above not in path:
        path.add(request := above)
    return request


_members_of: WeakKeyDictionary[Attributes, tuple[Int64s, Int64s, tuple[str, ...]]] = WeakKeyDictionary()
"""A cache of the members of batches, by the attributes of a trace."""


def _read_members(attributes: Attributes) -> tuple[Int64s, Int64s, tuple[str, ...]]:
    if (members := _members_of.get(attributes)) is None:
        rows = attributes.rows_with_attribute(BATCH_KEYS)
        of_rows = [
            [key for key in value[:BATCH_LIMIT] if isinstance(key, str)] if isinstance(value, (list, tuple)) else []
            for value in attributes.values(BATCH_KEYS, rows)
        ]
        counts = np.fromiter(map(len, of_rows), np.int64, len(of_rows))
        weights = read_batch_weights(attributes.values(BATCH_WEIGHTS, rows), counts)
        keys = tuple(chain.from_iterable(of_rows))
        members = _members_of[attributes] = np.repeat(rows, counts), weights, keys
    return members


def merge_repeated_members(served: Served) -> Served:
    further = served.request.max(initial=NONE) + 1 + np.arange(len(served.batch))
    members = np.where(served.request == NONE, further, served.request)  # a key of no request stays distinct
    order = np.lexsort((members, served.batch))
    batch, member = served.batch[order], members[order]
    if not ((batch[1:] == batch[:-1]) & (member[1:] == member[:-1])).any():
        return served
    groups, firsts = number_by_first_occurrence(served.batch, members)
    weight = Groups(groups, len(firsts)).sum_by_group(served.weight).astype(np.int64)
    return Served(served.batch[firsts], served.request[firsts], weight, tuple(served.key[at] for at in firsts.tolist()))


def read_batch_weights(values: Sequence[Any], counts: Int64s) -> Int64s:
    """Return the weight of each key in thousandths. If a batch has no weight above 0, its keys have equal weights."""
    items = list(
        chain.from_iterable(
            value if isinstance(value, (list, tuple)) and len(value) == count else (0,) * count
            for value, count in zip(values, counts.tolist(), strict=True)
        )
    )
    if not set(map(type, items)) <= {int, float}:
        items = [item if isinstance(item, (int, float)) else 0 for item in items]
    numbers = np.array([min(item, HEAVIEST) for item in items], dtype=np.float64)
    weights = np.round(np.where(numbers > 0, numbers, 0) * THOUSANDTHS).astype(np.int64)
    batch = np.repeat(np.arange(len(counts)), counts)
    return np.where(np.bincount(batch, weights, len(counts))[batch] > 0, weights, THOUSANDTHS)


# Sub-requests

# A request in the tree of another one is a sub-request if it bears a key that the outer request bears only in it. An
# outer request without a key of its own gets the only key within it. Several keys stay those of its sub-requests.
# A stray serves one request in the tree of another one. This happens if a request began the engine's loop.


def split_sub_requests(trace: Columns, owner: Int32s, keyed: Int64s, key_of: Int64s) -> Int32s:
    """Return the request of each row. A nested request with a key of its own counts separately. `owner` has the topmost
    request of each row."""
    is_request = trace.are_of_kind("request")
    inner = is_request & (owner != np.arange(len(trace))) & (owner != NONE)
    if not inner.any() or not len(keyed):
        return owner
    of = find_nearest_row(trace.parent, is_request)
    is_theirs = inner[of[keyed]] & (of[keyed] != NONE)
    if not is_theirs.any():
        return owner
    keys: dict[int, set[int]] = {}
    for row, key in zip(np.where(of == NONE, owner, of)[keyed].tolist(), key_of.tolist(), strict=True):
        keys.setdefault(row, set()).add(key)
    is_own = is_request & ~inner
    candidates = np.unique(of[keyed[is_theirs]])
    for level in np.unique(trace.level[candidates]).tolist():
        around = find_nearest_row(trace.parent, is_own)
        inner_by_outer: dict[int, list[int]] = {}
        for row in candidates[trace.level[candidates] == level].tolist():
            inner_by_outer.setdefault(int(around[row]), []).append(row)
        for outer, rows in inner_by_outer.items():
            outer_keys = keys.get(outer, set())
            inner_rows = [row for row in rows if not keys[row] & outer_keys]
            if outer_keys or len({frozenset(keys[row]) for row in inner_rows}) > 1:
                is_own[inner_rows] = True
    nearest_own = find_nearest_row(trace.parent, is_own)
    is_within = (nearest_own != NONE) & inner[nearest_own]
    return np.where(is_within, nearest_own, owner).astype(np.int32)


class FirstKeys:
    """Finds the requests of a trace, also nested ones, by their first keys."""

    def __init__(self, trace: Columns, owner: Int32s, keyed: Int64s, key_of: Int64s) -> None:
        near = find_nearest_row(trace.parent, trace.are_of_kind("request"))
        self.around = np.where((near == NONE) | (owner == NONE), owner, near).astype(np.int64)
        """The nearest request at or above each row."""
        borne, keys = keyed[owner[keyed] != NONE], key_of[owner[keyed] != NONE]
        order = np.lexsort((trace.span_id[borne], trace.start_ns[borne]))
        self.borne, self.borne_keys = borne[order], keys[order]
        """The rows with keys that belong to requests, ordered by begin, and the number of each row's key."""
        rows, firsts = np.unique(self.around[self.borne], return_index=True)
        first = self.borne_keys[firsts]
        self._first_of = np.full(len(trace) + 1, NONE, dtype=np.int64)  # the last is that of no row
        self._first_of[rows] = first
        order = np.lexsort((trace.start_ns[rows], first))
        self.rows, self.keys = rows[order].astype(np.int64), first[order]
        self.starts, self.ends = trace.start_ns[self.rows], trace.end_ns[self.rows]
        self._reach = compute_running_max(self.ends, self.keys)

    def are_first_keys(self, rows: Int64s, keys: Int64s) -> Bools:
        return np.asarray(self._first_of[rows] == keys)

    def are_keys_of_other_requests(self, keys: Int64s, at_ns: Int64s, start_ns: Int64s) -> Bools:
        last = find_last_number(self.keys, self.starts, keys, at_ns)
        reach, starts = (np.append(times, NONE)[last] for times in (self._reach, self.starts))
        return np.asarray((last != NONE) & ((reach > at_ns) | (starts >= start_ns)))


def remove_stray_spans(trace: Columns, owner: Int32s, first: FirstKeys) -> Int32s:
    """Return the request of each row, `NONE` for strays and the rows below them.

    A stray is a span in one request's tree that has another request's first key.
    """
    around = first.around[first.borne]
    pairs, began, pair_of = np.unique(
        np.stack([around, first.borne_keys]), axis=1, return_index=True, return_inverse=True
    )  # fmt: skip
    at_ns = trace.start_ns[first.borne[began]]
    are_astray = ~first.are_first_keys(*pairs) & first.are_keys_of_other_requests(
        pairs[1], at_ns, trace.start_ns[pairs[0]]
    )
    if not are_astray.any():
        return owner
    is_stray = np.zeros(len(trace), dtype=np.bool_)
    is_stray[first.borne] = are_astray[pair_of.reshape(-1)]
    top = find_nearest_row(trace.parent, is_stray | (owner == np.arange(len(trace))))
    return np.where((top != NONE) & is_stray[top], np.int32(NONE), owner).astype(np.int32)
