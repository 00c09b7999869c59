"""The spans of merged files as each process has them, in trees that go over all of them.

A process keeps what it calls its threads, streams and devices. Ids, parents and roots are those of the merged trace,
and times are on its clock. A batch knows the requests that it serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

import numpy as np

from instrument.recording import spans
from instrument.recording.remote_parents import LINK, LinkedRequest, link_of
from instrument.recording.spans import AttributeValue, Span, is_interruption
from instrument.trace.apart import ApartFile
from instrument.trace.columns import Int64s, Trace
from instrument.trace.forest import NONE
from instrument.trace.interruptions import Interruptions
from instrument.trace.joined import Joined
from instrument.trace.merge import Merged, moved_link
from instrument.trace.of_spans import spans_of

SPANS_AT_ONCE = 1_000
"""Spans that are made at a time; a tree is not cut."""


def spans_by_process(
    merged: Merged, columns: Trace, joined: Joined, below: Mapping[int, Sequence[Span]] | None = None
) -> Iterator[tuple[spans.Trace, Iterator[list[Span]]]]:
    """Of each process what is known of it, and its spans, by the columns that are left of those that were merged.

    `columns` have the same rows, as where requests were made one tree each. Spans that hang `below` rows are of the
    process that the row is of. Some whole trees of a process come at a time.
    """
    base = merged.saved.facts.origin
    linked, began = linked_requests(columns, joined), where_began(columns, joined)
    for _, parts in groupby(merged.parts, attrgetter("process")):
        its = list(parts)
        facts = max((part.saved.facts for part in its), key=attrgetter("end_ns"))
        origin = replace(facts.origin, monotonic_ns=base.monotonic_ns, realtime_ns=base.realtime_ns)
        threads = {thread_id: name for part in its for thread_id, name in part.saved.facts.threads.items()}
        yield replace(facts, origin=origin, threads=threads), _trees(its, columns, linked, began, below or {})


def linked_requests(columns: Trace, joined: Joined) -> Mapping[int, Sequence[LinkedRequest]]:
    """By the row of each batch the requests that it serves, those that are known, each once and in its order."""
    served, rows = joined.served, joined.rows
    remotes = {int(columns.root_id[row]): one for row, one in columns.remote.items()}
    requests = [
        LinkedRequest(span_id, root_id, remotes.get(root_id))
        for span_id, root_id in zip(columns.span_id[rows].tolist(), columns.root_id[rows].tolist(), strict=True)
    ]
    known = np.flatnonzero(served.request != NONE)
    found: dict[int, dict[int, None]] = {}
    for batch, place in zip(served.batch[known].tolist(), served.request[known].tolist(), strict=True):
        found.setdefault(batch, {})[place] = None
    return {batch: tuple(map(requests.__getitem__, its)) for batch, its in found.items()}


def where_began(columns: Trace, joined: Joined) -> Mapping[int, Mapping[str, AttributeValue]]:
    """By the rows of requests that have keys, and began within others, the link to the span in which they did."""
    remotes = {int(columns.root_id[row]): one for row, one in columns.remote.items()}
    found: dict[int, Mapping[str, AttributeValue]] = {}
    for place in joined.keys:
        row = int(joined.rows[place])
        above, root_id = int(columns.parent[row]), int(columns.root_id[row])
        if above != NONE and joined.of[above] != NONE and root_id == columns.span_id[row]:
            around = int(columns.root_id[above])
            if around != root_id:
                found[row] = link_of(int(columns.span_id[above]), around, remotes.get(around))
    return found


def _trees(
    parts: Sequence[ApartFile],
    columns: Trace,
    linked: Mapping[int, Sequence[LinkedRequest]],
    began: Mapping[int, Mapping[str, AttributeValue]],
    below: Mapping[int, Sequence[Span]],
) -> Iterator[list[Span]]:
    """The spans of a process, some whole trees at a time, those of a tree in the order of their begins."""
    of_part = np.repeat(np.arange(len(parts)), [len(part.row) for part in parts])
    own = np.concatenate([np.arange(len(part.row)) for part in parts])
    is_kept = np.concatenate([part.is_kept for part in parts])
    row = np.concatenate([part.row for part in parts])
    interruptions = Interruptions()
    is_one = is_kept & columns.of_sites(list(map(is_interruption, columns.sites)))[row]
    for number, part in enumerate(parts):
        its = is_one & (of_part == number)
        interruptions.note(_spans_of(part, own[its], row[its], columns, {}, {}, {}))
    is_kept &= ~is_one
    row, of_part, own = row[is_kept], of_part[is_kept], own[is_kept]
    order = np.lexsort((columns.span_id[row], -columns.end_ns[row], columns.start_ns[row], columns.root_id[row]))
    roots = columns.root_id[row[order]]
    remotes = {int(columns.root_id[at]): one for at, one in columns.remote.items()}
    begin = 0
    for end in [*(np.flatnonzero(roots[1:] != roots[:-1]) + 1).tolist(), len(order)]:
        if (end - begin < SPANS_AT_ONCE and end < len(order)) or end == begin:
            continue
        its, begin = order[begin:end], end
        found = [
            span
            for number, part in enumerate(parts)
            if (its_own := its[of_part[its] == number]).size
            for span in _spans_of(part, own[its_own], row[its_own], columns, linked, began, below)
        ]
        found.sort(key=lambda span: (span.root_id, span.start_ns, -span.end_ns, span.span_id))
        for span in found:
            span.remote = remotes.get(span.root_id)
        interruptions.hit(found)
        yield found


def _spans_of(
    part: ApartFile,
    own: Int64s,
    rows: Int64s,
    columns: Trace,
    linked: Mapping[int, Sequence[LinkedRequest]],
    began: Mapping[int, Mapping[str, AttributeValue]],
    below: Mapping[int, Sequence[Span]],
) -> Iterator[Span]:
    """The spans of a file by their `own` rows in it and their `rows` among all, and what hangs below them."""
    moved_ns = part.moved_ns
    numbers = (column[rows].tolist() for column in (columns.span_id, columns.parent_id, columns.root_id))
    for span, row, span_id, parent_id, root_id in zip(spans_of(part.trace, own), rows.tolist(), *numbers, strict=True):
        span.span_id, span.parent_id, span.root_id = span_id, parent_id, root_id
        if moved_ns:
            span.start_ns, span.end_ns = span.start_ns + moved_ns, span.end_ns + moved_ns
            span.device = tuple(
                replace(one, start_ns=one.start_ns + moved_ns, end_ns=one.end_ns + moved_ns) for one in span.device
            )
        if span.attributes and LINK in span.attributes:
            span.attributes = {**span.attributes, **moved_link(span.attributes[LINK], part)}
        elif row in began:
            span.attributes = {**span.attributes, **began[row]}
        span.links = linked.get(row, ())
        yield span
        for one in below.get(row, ()):
            one.thread_id = span.thread_id
            yield one
