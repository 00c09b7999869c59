"""Gives each request one tree over all threads, tasks and processes, for viewers and collectors.

A span with a request's key may be in another tree. The span then becomes a child of the hand-off span. That is the
newest open span with the key. Without a hand-off span, the span becomes a child of the request. A batch keeps its tree,
because a batch may serve several requests. All processes make the same trace id from the same key, so the collector
joins their spans.

Facts, which are values that rules read from calls, become attributes of the request that the call serves. An
interruption, such as a garbage collection, becomes an event of each span that it interrupts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from instrument.recording.spans import (
    ATTRIBUTE_LIMIT,
    FACT_KEYS,
    FACTS,
    KEY,
    AttributeValue,
    Span,
    is_blocked_loop,
    is_interruption,
)
from instrument.recording.trace_context import LINK, RemoteParent
from instrument.trace.columns import Columns, Int64s
from instrument.trace.indices import NONE, find_nearest_row, sort_by_start, topmost_rows
from instrument.trace.joined import Joined, join_requests
from instrument.trace.layout import order_by_start
from instrument.trace.trace import MergedProcess, Trace, append_spans, make_spans

if TYPE_CHECKING:  # an exporter reads no files
    from instrument.trace.file import Saved
    from instrument.trace.merge import Merged


LOOK_BACK = 64
"""The number of newest spans with a request's key that are searched for its hand-off."""


def join_request_trees(saved: Saved) -> Saved:
    """Return a saved recording in which each request has one tree."""
    trace, facts = saved.trace.columns, saved.trace
    return replace(
        saved,
        trace=facts.with_columns(build_request_trees(trace, join_requests(trace, facts.apart_ns), facts.origin.run)),
    )


def move_facts_to_requests(facts: Trace) -> Trace:
    if not len(facts.columns.attributes.rows_with_attribute(FACTS)):
        return facts
    joined = join_requests(facts.columns, facts.apart_ns)
    return facts.with_columns(move_facts(facts.columns, joined))


def build_request_trees(trace: Columns, joined: Joined, run: str = "") -> Columns:
    """Return the trace with one tree per request. Facts move from calls to their requests. Without a `run`, no trace
    ids are made from keys."""
    trace = move_facts(trace, joined)
    moves, served_rows = _find_moved_rows(trace, joined), np.flatnonzero(joined.of != NONE)
    is_elsewhere = trace.root_id[served_rows] != trace.root_id[joined.rows[joined.of[served_rows]]]
    is_moved = bool(len(moves) or len(joined.foreign) or is_elsewhere.any())
    moved = _move_rows(trace, joined, moves, served_rows) if is_moved else trace
    root_id = moved.root_id
    remote = {row: remote_parent for row, remote_parent in trace.remote.items() if root_id[row] == trace.root_id[row]}
    if run:
        remote |= derive_traces_from_keys(trace, joined, run, root_id, remote)
    return moved.with_remote(remote)


def _move_rows(trace: Columns, joined: Joined, moves: Int64s, served_rows: Int64s) -> Columns:
    """Return the trace with the given rows below their hand-off spans or requests. The root ids change accordingly."""
    parent = trace.parent.copy()
    requests = joined.rows[joined.of[moves]]
    parent[moves] = _find_new_parents(trace, joined, moves)
    for fallback in (requests, trace.parent[moves]):
        above = parent.copy()  # by pointer doubling; those of a cycle never end
        for _ in range(len(parent).bit_length() + 1):
            if not (above != NONE).any():
                break
            above = np.where(above == NONE, np.int32(NONE), above[above]).astype(np.int32)
        stuck = (above != NONE)[moves]
        parent[moves[stuck]] = fallback[stuck]
    moved = moves[parent[moves] != trace.parent[moves]]
    root_id, parent_id = trace.root_id.copy(), trace.parent_id.copy()
    parent_id[moved] = trace.span_id[parent[moved]]
    parent[joined.foreign], parent_id[joined.foreign] = NONE, 0
    top = topmost_rows(parent)
    below = np.isin(top, joined.foreign)
    root_id[below] = trace.span_id[top[below]]
    around = joined.rows[joined.of[served_rows]]
    is_below = top[served_rows] == top[around]
    root_id[served_rows[is_below]] = trace.root_id[around[is_below]]
    return replace(trace, parent_id=parent_id, root_id=root_id)


def make_trace_id_of_key(run: str, key: str) -> int:
    """Return the 128-bit trace id of a request key. It is the same in all processes of a run."""
    text = f"{run}\0{key}".encode(errors="surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=16).digest(), "big") or 1


def _find_moved_rows(trace: Columns, joined: Joined) -> Int64s:
    of_parent = np.append(joined.of, NONE)[trace.parent]
    moves = (joined.of != NONE) & (of_parent != joined.of)
    moves[joined.rows] = False
    # A row that serves a request and is above it cannot move below it.
    places, above = np.arange(len(joined.rows)), trace.parent[joined.rows]
    while (goes_on := above != NONE).any():
        places, above = places[goes_on], above[goes_on]
        moves[above[joined.of[above] == places]] = False
        above = trace.parent[above]
    # A span of the request's own tree stays, even if its parent was not kept.
    own_root = np.append(trace.root_id[joined.rows], 0)[joined.of]
    moves &= (trace.parent != NONE) | (trace.root_id != own_root)
    return np.flatnonzero(moves)


def _find_new_parents(trace: Columns, joined: Joined, moves: Int64s) -> Int64s:
    """Return the new parent of each moved row: the hand-off span, or the request if no hand-off span exists."""
    hand_offs: Int64s = joined.rows[joined.of[moves]].copy()
    keyed = trace.attributes.rows_with_attribute(KEY)
    is_top = np.zeros(len(trace), dtype=np.bool_)
    is_top[joined.rows] = is_top[moves] = True
    top = find_nearest_row(trace.parent, is_top)
    keyed = keyed[(joined.of[keyed] != NONE) & (top[keyed] != NONE) & ~np.isin(keyed, joined.rows)]
    if not len(keyed) or not len(moves):
        return hand_offs
    keyed = keyed[sort_by_start(trace.start_ns[keyed], trace.end_ns[keyed], trace.span_id[keyed])]
    of_keys: dict[tuple[int, object], list[int]] = {}
    key_of: dict[int, object] = {}
    for row, place, key in zip(
        keyed.tolist(), joined.of[keyed].tolist(), trace.attributes.values(KEY, keyed), strict=True
    ):
        key_of[row] = key
        of_keys.setdefault((place, key), []).append(row)
    is_own = np.isin(top, joined.rows)
    starts = {pair: trace.start_ns[rows].tolist() for pair, rows in of_keys.items()}
    for index, (row, place) in enumerate(zip(moves.tolist(), joined.of[moves].tolist(), strict=True)):
        own_keys: Sequence[object] = [key_of[row]] if row in key_of else joined.keys.get(place, ())
        before = [
            candidate
            for pair in ((place, key) for key in own_keys)
            if pair in of_keys
            for candidate in of_keys[pair][: bisect_left(starts[pair], int(trace.start_ns[row]))][-LOOK_BACK:]
        ]
        # The newest that was open then, else the last one in the request's tree that had ended.
        still_open = [candidate for candidate in before if trace.end_ns[candidate] > trace.start_ns[row]]
        if still_open:
            hand_offs[index] = max(still_open, key=lambda at: (trace.start_ns[at], -trace.end_ns[at], at))
        elif ended := [candidate for candidate in before if is_own[candidate]]:
            hand_offs[index] = max(ended, key=lambda at: (trace.end_ns[at], at))
    return hand_offs


def derive_traces_from_keys(
    trace: Columns, joined: Joined, run: str, root_id: Int64s, remotes: dict[int, RemoteParent]
) -> dict[int, RemoteParent]:
    """Return trace ids made from request keys, by row. Only the first request with a key gets the trace id.

    A root outside of requests also gets the trace id of the root's key if no request has this key.
    """
    have_traces = {int(root_id[row]) for row in remotes}
    remote_by_row: dict[int, RemoteParent] = {}
    used_keys: set[str] = set()
    for place, keys in sorted(joined.keys.items()):
        row = int(joined.rows[place])
        if int(root_id[row]) not in have_traces and keys[0] not in used_keys and root_id[row] == trace.span_id[row]:
            remote_by_row[row] = RemoteParent(make_trace_id_of_key(run, keys[0]), 0)
        used_keys.update(keys)
    keyed = trace.attributes.rows_with_attribute(KEY)
    keyed = keyed[(joined.of[keyed] == NONE) & (trace.parent_id[keyed] == 0)]
    for row, key in zip(keyed.tolist(), trace.attributes.values(KEY, keyed), strict=True):
        if isinstance(key, str) and key and key not in used_keys and row not in remotes:
            remote_by_row[row] = RemoteParent(make_trace_id_of_key(run, key), 0)
    return remote_by_row


INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
CACHED_TOKENS, PREEMPTIONS = "gen_ai.usage.cache_read.input_tokens", "engine.preemptions"
"""The names of the facts that views show. The presets for engines record them."""


def move_facts(trace: Columns, joined: Joined) -> Columns:
    """Return the trace with facts moved from calls to their requests. Facts of unknown requests remain."""
    rows = trace.attributes.rows_with_attribute(FACTS)
    if not len(rows):
        return trace
    places_of: dict[str, list[int]] = {}
    for place, keys in sorted(joined.keys.items()):
        for key in keys:
            places_of.setdefault(key, []).append(place)
    starts = trace.start_ns[joined.rows].tolist()
    facts_by_request: dict[int, dict[str, Any]] = {}
    attributes_by_row: dict[int, dict[str, AttributeValue]] = {}
    for row in rows[np.argsort(trace.end_ns[rows], kind="stable")].tolist():
        attributes = dict(trace.attributes[row])
        at_ns, is_known = int(trace.end_ns[row]), True
        for keep, name, key_of_value, value in _parse_facts(attributes):
            place = int(joined.of[row])
            if key_of_value is not None:
                places = places_of.get(key_of_value, [])
                began = bisect_right(places, at_ns, key=starts.__getitem__)
                place = places[began - 1] if began else NONE
            is_known &= place != NONE
            if place != NONE:
                facts = facts_by_request.setdefault(int(joined.rows[place]), {})
                before = facts.get(name)
                with suppress(TypeError):  # of values that cannot be added or compared, the first stays
                    if keep == "list":
                        value = (*(before or ()), value)[:ATTRIBUTE_LIMIT]
                    elif before is not None and keep != "last":
                        value = before + value if keep == "sum" else max(before, value)
                    facts[name] = value
        if is_known:  # the lists of facts are now attributes of requests
            names = [text.partition(" ")[2] for text in _list_fact_texts(attributes)]
            lists = [name for name in names if name + FACT_KEYS in attributes]
            for name in (FACTS, *lists, *(name + FACT_KEYS for name in lists)):
                attributes.pop(name, None)
            attributes_by_row[row] = attributes
    for row, facts in facts_by_request.items():
        attributes_by_row[row] = {**attributes_by_row.get(row, trace.attributes[row]), **facts}
    return replace(trace, attributes=trace.attributes.override_rows(attributes_by_row))


def _parse_facts(attributes: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None, Any]]:
    """Yield the facts of a span. A fact is a word of `KEEPS`, a name, a request key and a value. The key is None for
    the span's own request."""
    for text in _list_fact_texts(attributes):
        keep, _, name = text.partition(" ")
        value, keys = attributes.get(name), attributes.get(name + FACT_KEYS)
        if isinstance(keys, (list, tuple)) and isinstance(value, (list, tuple)):
            yield from ((keep, name, key, part) for key, part in zip(keys, value, strict=False) if isinstance(key, str))
        elif value is not None:
            yield keep, name, None, value


def _list_fact_texts(attributes: Mapping[str, Any]) -> list[str]:
    listed = attributes.get(FACTS)
    return [text for text in listed if isinstance(text, str)] if isinstance(listed, (list, tuple)) else []


class ProcessRows(NamedTuple):
    """A process of a merged trace, with its rows ordered by tree and then by start time.

    `numbers` converts thread, device and stream numbers of the merged trace to those of the process. It is None if the
    numbers do not differ. `interruptions` has the spans that interrupt each row. Such spans are not among `rows`.
    """

    facts: Trace
    numbers: MergedProcess | None
    rows: Int64s
    interruptions: Mapping[int, Sequence[Span]]


def rows_by_process(merged: Merged, trace: Columns) -> Iterator[ProcessRows]:
    base, process = merged.saved.trace.origin, merged.find_row_processes()
    process = np.append(process, process[trace.parent[len(process) :]])
    is_interrupting = trace.are_of_sites(list(map(is_interruption, trace.sites)))
    order = order_by_start(trace)
    order = order[np.argsort(trace.root_id[order], kind="stable")]
    for number, parts in groupby(merged.parts, attrgetter("process")):
        process_parts = list(parts)
        facts = max((part.saved.trace for part in process_parts), key=attrgetter("end_ns"))
        origin = replace(facts.origin, monotonic_ns=base.monotonic_ns, realtime_ns=base.realtime_ns)
        threads = {thread_id: name for part in process_parts for thread_id, name in part.saved.trace.threads.items()}
        rows = order[(process[order] == number) & ~is_interrupting[order]]
        hits = find_interruptions(trace, rows, trace.select(is_interrupting & (process == number)))
        process_numbers = merged.saved.trace.processes[number] if merged.saved.trace.processes else None
        yield ProcessRows(replace(facts, origin=origin, threads=threads), process_numbers, rows, hits)


def find_outer_spans(trace: Columns, joined: Joined) -> Mapping[int, tuple[int, int]]:
    origins: dict[int, tuple[int, int]] = {}
    for place in joined.keys:
        row = int(joined.rows[place])
        above, root_id = int(trace.parent[row]), int(trace.root_id[row])
        if above != NONE and joined.of[above] != NONE and root_id == trace.span_id[row]:
            outer_root_id = int(trace.root_id[above])
            if outer_root_id != root_id and LINK not in trace.attributes[row]:
                origins[row] = int(trace.span_id[above]), outer_root_id
    return origins


def find_interruptions(trace: Columns, rows: Int64s, interruptions: Columns) -> Mapping[int, Sequence[Span]]:
    by_end = np.argsort(interruptions.end_ns, kind="stable")
    hit = rows[trace.are_of_kind("request")[rows] | (trace.span_id[rows] == trace.root_id[rows])]
    if not len(by_end):
        return {}
    starts, ends = interruptions.start_ns[by_end], interruptions.end_ns[by_end]
    # Interruptions from `first` on end after the row's begin; none from `last` on begins before the row's end.
    first = np.searchsorted(ends, trace.start_ns[hit], side="right")
    last = np.searchsorted(np.minimum.accumulate(starts[::-1])[::-1], trace.end_ns[hit])
    counts = np.maximum(last - first, 0)
    row = np.repeat(hit, counts)
    place = np.arange(len(row)) + np.repeat(first - np.cumsum(counts) + counts, counts)
    is_of_loop = interruptions.are_of_sites(list(map(is_blocked_loop, interruptions.sites)))[by_end]
    is_hit = starts[place] < trace.end_ns[row]
    is_hit &= ~is_of_loop[place] | (interruptions.thread_id[by_end][place] == trace.thread_id[row])
    spans = make_spans(interruptions, by_end)
    hits: dict[int, list[Span]] = {}
    for hit_row, hit_place in zip(row[is_hit].tolist(), place[is_hit].tolist(), strict=True):
        hits.setdefault(hit_row, []).append(spans[hit_place])
    return hits


NEWEST = 1_000
"""The maximum number of interruptions kept per process for spans that have not ended. The oldest are dropped first."""


class Interruptions:
    """Keeps the newest garbage collections and blocked event loops of one process, to attach them to spans that end
    later."""

    def __init__(self) -> None:
        self._newest: list[Span] = []

    def attach_to_spans(self, trace: Columns) -> tuple[Int64s, Mapping[int, Sequence[Span]]]:
        """Separate interruptions from other rows. Return the other rows, and the interruptions of each. Interruptions
        from earlier traces count, too."""
        alone = trace.are_of_sites([is_interruption(site) for site in trace.sites])
        if alone.any():
            _, trees, sizes = np.unique(trace.root_id, return_inverse=True, return_counts=True)
            alone &= (sizes == 1)[trees.reshape(-1)]
        rows, known = np.flatnonzero(~alone), append_spans(trace.select(alone), self._newest)
        self._newest = sorted(make_spans(known, np.arange(len(known))), key=attrgetter("end_ns"))[-NEWEST:]
        return rows, find_interruptions(trace, rows, known)
