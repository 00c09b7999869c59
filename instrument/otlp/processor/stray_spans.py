"""Strays in the trees of requests: what is done for another request, by its key, is found as a tree is sent.

It is the rule of `instrument.trace.sub_requests`, by what is known of requests of all processes at that time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

import numpy as np

from instrument.otlp.packing import Ids
from instrument.otlp.processor.key_facts import KeyFactsReader
from instrument.otlp.processor.keyed_requests import KeyedRequests
from instrument.otlp.processor.known_request import KeyedRequest
from instrument.recording.mapped_facts import OpenSpan
from instrument.recording.spans import KEY, Span
from instrument.trace.joined import join, strays_of
from instrument.trace.of_spans import trace_of


class LetGo:
    """What the tail sampler of one process lets go that other requests may keep. Used by one thread."""

    def __init__(self, reader: KeyFactsReader, requests: KeyedRequests, ids: Ids) -> None:
        self._reader = reader
        self._requests = requests
        self._ids = ids
        self._trees: list[list[Span]] = []

    def may_be_in(self, root_id: int) -> bool:
        """Whether there may be strays in the tree of a request that has just ended."""
        return self._reader.have_several(root_id)

    def keys(self, root_id: int) -> Set[str]:
        """The keys that strays bear in the tree of a request, as far as is known."""
        request = self._requests.known(self._ids, root_id)
        return set() if request is None else {key for key in request.borne if request.is_astray(key)}

    def take(self, spans: Sequence[Span]) -> None:
        """A request is let go, or more comes of one that was."""
        self._trees.append(list(spans))

    def taken(self) -> list[list[Span]]:
        """What was let go since the last time."""
        found, self._trees = self._trees, []
        return found


def find_strays(
    spans: Sequence[Span],
    opened: Mapping[int, OpenSpan],
    request: KeyedRequest | None,
    around: KeyedRequest | None,
    requests: KeyedRequests,
) -> set[int]:
    """The ids of strays among the spans of a request, its own one first, and those that are `opened` in its tree.

    What is done for the request `around` it, of which it is a part, is no stray.
    """
    if request is not None and not request.strays and all(span.site.kind != "request" for span in spans[1:]):
        return set()
    root_id = spans[0].root_id
    rows = [*spans, *(_until(spans[0].end_ns, one) for one in opened.values() if one.root_id == root_id)]
    if len(set(keys_of(rows))) < 2:
        return set()

    def is_of_another(row: int, key: str, at_ns: int) -> bool:
        if around is not None and requests.of(key, at_ns) is around:
            return False
        if row == 0 and request is not None and key in request.strays:
            return True
        return requests.is_known_first(key, at_ns, rows[row].start_ns, but=request)

    return {rows[row].span_id for row in strays_of(trace_of(rows), is_of_another).tolist()}


def count_sent(spans: Sequence[Span], request: KeyedRequest | None) -> None:
    """Note how many spans go with a request, in its tree, by keys that may turn out to be those of others."""
    if request is None or len(request.borne) < 2:
        return
    for key in nearest_keys(spans).values():
        if key and key != request.first_key and key in request.borne:
            request.sent[key] = request.sent.get(key, 0) + 1


def nearest_keys(spans: Sequence[Span]) -> Mapping[int, str]:
    """By the id of each span the key of the nearest one at or above it, of these, that bears one, "" without."""
    by_id = {span.span_id: span for span in spans}
    found: dict[int, str] = {}
    for span in spans:
        path: list[int] = []
        at: Span | None = span
        while at is not None and at.span_id not in found:
            key = at.attributes.get(KEY)
            found[at.span_id] = key if isinstance(key, str) else ""  # so that parents in a circle have an end
            path.append(at.span_id)
            at = None if found[at.span_id] else by_id.get(at.parent_id)
        key = found[path[-1]] if at is None and path else found[at.span_id] if at is not None else ""
        found.update(dict.fromkeys(path, key))
    return found


def sub_requests(spans: Sequence[Span]) -> Mapping[int, list[Span]]:
    """The spans of those in a request's tree that are requests of their own, by the places of these."""
    joined = join(trace_of(spans))
    its = [(place, row) for place, row in enumerate(joined.rows.tolist()) if row and place in joined.keys]
    return {row: [spans[one] for one in np.flatnonzero(joined.of == place).tolist()] for place, row in its}


def keys_of(spans: Sequence[Span]) -> Iterator[str]:
    """The keys that spans bear."""
    return (key for span in spans if isinstance(key := span.attributes.get(KEY), str) and key)


def _until(end_ns: int, one: OpenSpan) -> Span:
    end_ns = max(one.start_ns, end_ns)
    found = Span(
        one.site, one.span_id, one.parent_id, one.root_id, one.thread_id, one.task_id, one.start_ns, end_ns, 0, 0
    )
    found.attributes = one.attributes
    return found
