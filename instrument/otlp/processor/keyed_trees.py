"""Requests by their keys, over all processes of a run: what bears a request's key elsewhere goes into its trace.

A span outside of a request's own tree that bears its key goes, with all below it but what bears the key of another
request, below the span that handed the request over: of the spans that bear the key and had begun, the newest that was
open, else of the request's own tree the one that ended last, else the request. A request that lies within another one
of its key is a part of that one. Batches stay where they lie, and are linked to their requests. It is the rule of
`instrument.trace.grafted`, here for rows as they come: a tree waits until its request is kept, for as long as that is
open, and is let go where that is not kept.

A batch does not wait for requests to end: it is linked to one that is open once that is known to be kept, and to one of
which that is not known after some seconds. Their stages follow as they end, see
`instrument.otlp.processor.kept_stages`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from instrument.otlp.packing import Ids
from instrument.otlp.processor.kept_stages import KeptStages
from instrument.otlp.processor.keyed_requests import KEYS_KNOWN, KeyedRequest, KeyedRequests, batch_of, is_phase
from instrument.otlp.processor.own_work import OwnPhases
from instrument.recorder.shared_decisions import LINGER_NS
from instrument.recorder.shelf import is_sampled
from instrument.recording.remote_parents import LINK, LinkedRequest, RemoteParent, link_of
from instrument.recording.rows import REQUEST_BIT
from instrument.recording.spans import BATCH_KEYS, KEY, AttributeValue, Span
from instrument.trace.joined import join
from instrument.trace.of_spans import trace_of

MOST_WAITING = 50_000
"""Spans of a process that wait for their requests; of more the oldest go on without."""

LOOKED_NS = 10**9
"""So long after a tree came all recordings have been read to that time."""

PATIENCE_NS = LINGER_NS + LOOKED_NS
"""How long a tree waits for a request that is not open: it may have ended, and be kept by then."""

_Top = tuple[int, str, int]
"""A span that goes below its request: its id, its key and when it began."""


class _OpenSpan(Protocol):
    """A span that is open."""

    @property
    def parent_id(self) -> int: ...
    @property
    def root_id(self) -> int: ...
    @property
    def start_ns(self) -> int: ...
    @property
    def attributes(self) -> Mapping[str, AttributeValue]: ...


@dataclass(slots=True, eq=False)
class _Waiting:
    """Spans that wait for requests: the one that they serve, or those of the batches among them."""

    spans: list[Span]
    keys: set[str]
    top: _Top | None = None
    is_request: bool = False
    is_kept: bool = True
    is_noted: bool = False
    since_ns: int = field(default_factory=lambda: time.monotonic_ns())
    was_open: bool = False
    came_ns: int = field(default_factory=lambda: time.monotonic_ns())
    around: KeyedRequest | None = None
    """The request that one is a part of, as was known when it was last looked at."""

    @property
    def key(self) -> str:
        """The key of the request that spans wait for."""
        return "" if self.top is None else self.top[1]

    @property
    def start_ns(self) -> int:
        """When what waits began."""
        return self.spans[0].start_ns if self.top is None else self.top[2]


class KeyedTrees:
    """The kept trees of one process on their way to the exporter. Used by one thread."""

    def __init__(self, requests: KeyedRequests, ids: Ids) -> None:
        self._requests = requests
        self._ids = ids
        self.stages = KeptStages(requests)
        self._unplaced: list[Span] = []
        self._has_keys = False
        self._moved: OrderedDict[int, _Top] = OrderedDict()
        self._callers: OrderedDict[int, RemoteParent] = OrderedDict()
        """Of requests that are parts of others what they lie below: of them there may be more to come."""
        self._waiting: list[_Waiting] = []
        self._unnoted: list[_Waiting] = []
        """Those of them whose work is not noted yet."""
        self.waiting = 0
        """Spans that wait."""

    @property
    def undecided(self) -> int:
        """Requests that wait, for they may be parts of others."""
        return sum(one.is_request for one in self._waiting)

    def take(
        self, trees: Sequence[list[Span]], opened: Mapping[int, _OpenSpan], sample: float, *,
        is_last: bool = False, at_once: bool = False,
    ) -> list[list[Span]]:  # fmt: skip
        """Take in what is kept, and of other trees what is below spans with keys; returns what can be sent.

        What is to be sent `at_once` waits for open requests alone, the last time for nothing.
        """
        unplaced, self._unplaced = self._unplaced, []
        ready: list[list[Span]] = []
        loose: dict[int, list[Span]] = {}
        undecided = {one.spans[0].root_id: one for one in self._waiting if one.is_request}
        for spans in trees:
            first = spans[0]
            if not first.root_id & REQUEST_BIT:
                loose.setdefault(first.root_id, []).extend(spans)
            elif first.root_id in undecided:
                undecided[first.root_id].spans.extend(spans)
            elif first.span_id == first.root_id and (keys := set(_keys_of(spans))):
                top = (first.span_id, min(keys), first.start_ns)
                self._waiting.append(_Waiting(spans, keys, top, is_request=True))
            else:
                for span in spans:
                    span.remote = self._callers.get(span.root_id, span.remote)
                self.stages.add_late(spans, self._ids)
                self._link(spans)
                ready.append(spans)
        again = {span.span_id for span in unplaced}
        for span in unplaced:
            loose.setdefault(span.root_id, []).append(span)
        for root_id, spans in loose.items():
            self._place(spans, opened, again, is_kept=is_sampled(root_id, sample), ready=ready)
        ready.extend(self._due(is_last=is_last, at_once=at_once))
        self.note_work(at_once=False)
        self.waiting = sum(len(one.spans) for one in self._waiting) + len(self._unplaced)
        return ready

    def is_sent_elsewhere(self, span: Span) -> bool:
        """Whether a span has left the tree that it lies in for that of a request, which is kept or may yet be."""
        top = self._moved.get(span.span_id)
        request = None if top is None else self._requests.of(top[1], top[2])
        return request is not None and (request.is_kept or request.is_open)

    # ---------------------------------------------------------------- what is below spans with keys

    def _place(
        self, spans: list[Span], opened: Mapping[int, _OpenSpan], again: set[int], *, is_kept: bool,
        ready: list[list[Span]],
    ) -> None:  # fmt: skip
        """Take what is below spans with keys from the tree that it lies in."""
        self._has_keys = self._has_keys or any(
            KEY in one.attributes or BATCH_KEYS in one.attributes for one in (*opened.values(), *spans)
        )
        if not self._has_keys:
            if is_kept:
                ready.append(spans)
            return
        by_id: dict[int, _OpenSpan] = {**opened, **{span.span_id: span for span in spans}}
        tops: dict[int, _Top | None] = {}
        lost: set[int] = set()
        for span in spans:
            self._find_top(span.span_id, by_id, tops, lost)
        stay: list[Span] = []
        pieces: dict[_Top, list[Span]] = {}
        for span in spans:
            top = tops[span.span_id]
            if top is not None:
                self._moved[span.span_id] = top
                pieces.setdefault(top, []).append(span)
            elif span.span_id in lost and span.span_id not in again:
                self._unplaced.append(span)  # what lies above it ended as this was read, and comes next
            elif is_kept:
                stay.append(span)
        while len(self._moved) > KEYS_KNOWN:
            self._moved.popitem(last=False)
        for top, piece in pieces.items():
            self._requests.note_names(top[1], top[2], _keys_of(piece))
            self._waiting.append(_Waiting(piece, {top[1]}, top, is_kept=is_kept))
            self._unnoted.append(self._waiting[-1])
        if keys := {key for span in stay for key in batch_of(span.attributes)}:
            self._waiting.append(_Waiting(stay, keys))
        elif stay:
            ready.append(stay)

    def _find_top(
        self, span_id: int, by_id: Mapping[int, _OpenSpan], tops: dict[int, _Top | None], lost: set[int]
    ) -> None:
        """Find the topmost span with a key at or above one, or the lowest whose key names another request than those
        above it; and whether what is above it is not at hand."""
        path: list[tuple[int, _OpenSpan]] = []
        at, found, is_lost = span_id, None, False
        while at and at not in tops:
            one = by_id.get(at)
            if one is None:
                found = self._moved.get(at)
                is_lost = found is None
                break
            tops[at] = None  # so that parents in a circle have an end
            path.append((at, one))
            at = 0 if at == one.root_id else one.parent_id
        else:
            found, is_lost = tops.get(at), at in lost
        for at, one in reversed(path):
            key = one.attributes.get(KEY)
            if isinstance(key, str) and key and (found is None or self._is_of_another(key, one.start_ns, found)):
                found = at, key, one.start_ns
            tops[at] = found
            if is_lost and found is None:
                lost.add(at)

    def _is_of_another(self, key: str, start_ns: int, top: _Top) -> bool:
        """Whether a key below a span with one names another request than that does."""
        if key == top[1]:
            return False
        found = self._requests.of(key, start_ns)
        return found is not None and found is not self._requests.of(top[1], top[2])

    # ---------------------------------------------------------------- waiting

    def _due(self, *, is_last: bool, at_once: bool) -> Iterator[list[Span]]:
        waiting, self._waiting = self._waiting, []
        size = sum(len(one.spans) for one in waiting)
        read_ns = time.monotonic_ns() - self._requests.lag_ns
        is_last = is_last or self._requests.are_over
        for one in waiting:
            one.around = self._around(one) if one.is_request else None
        # Requests first, and parts of them as they began: what one hands over may wait here, too.
        for one in sorted(waiting, key=lambda one: (not (one.is_request and one.around is None), one.start_ns)):
            is_over = size > MOST_WAITING or (is_last and (one.is_request or not self._requests.undecided))
            age_ns = PATIENCE_NS + LOOKED_NS if at_once else read_ns - one.since_ns
            if self._is_awaited(one, age_ns, is_over=is_over) or (
                at_once and not one.is_request and self._requests.undecided
            ):
                self._waiting.append(one)
                continue
            size -= len(one.spans)
            yield from self._sent(one, is_over=is_over)

    def _is_awaited(self, one: _Waiting, age_ns: int, *, is_over: bool) -> bool:
        """Whether the request of this may yet come."""
        if is_over:
            return False
        requests = self._requests
        if one.top is None:
            at_ns = one.spans[0].start_ns
            unsure = [key for key in one.keys if requests.linked(key, at_ns, is_sure=True) is None]
            if not unsure:
                return False
            return age_ns < PATIENCE_NS or (
                time.monotonic_ns() - one.since_ns < 2 * PATIENCE_NS
                and any((found := requests.of(key, at_ns)) is not None and found.is_open for key in unsure)
            )
        if one.is_request:
            around = one.around
            if around is None:
                return len(requests.members) > 1 and age_ns < LOOKED_NS
            if around.is_open:
                one.since_ns = time.monotonic_ns()
            return not around.is_kept and (around.is_open or age_ns < PATIENCE_NS)
        known = requests.of(one.top[1], one.top[2])
        if known is not None and known.is_kept and (one.top[2] <= known.end_ns or age_ns > LOOKED_NS):
            return False
        if known is not None and known.is_open:
            one.was_open = True
            one.since_ns = time.monotonic_ns()
            return True
        return age_ns < PATIENCE_NS

    def note_work(self, *, at_once: bool) -> None:
        """Note what was done for requests of other processes: of what came `at_once`, or a while ago."""
        until_ns = time.monotonic_ns() - self._requests.lag_ns - (0 if at_once else LOOKED_NS)
        for one in self._unnoted:
            if one.came_ns <= until_ns:
                self._note_work(one)
        self._unnoted = [one for one in self._unnoted if not one.is_noted]

    def _note_work(self, one: _Waiting) -> None:
        if one.top is None or one.is_request or one.is_noted:
            return
        request = self._requests.of(one.top[1], one.top[2])
        if request is not None:
            one.is_noted = True
            request.note_elsewhere(OwnPhases([(span.start_ns, span.end_ns) for span in one.spans if is_phase(span)]))

    def _around(self, one: _Waiting) -> KeyedRequest | None:
        """The request that this one is a part of."""
        first = one.spans[0]
        if first.remote is not None:
            return None  # its caller has said so
        return self._requests.around(first, self._ids, one.keys)

    def _sent(self, one: _Waiting, *, is_over: bool) -> list[list[Span]]:
        """The spans as they go to the exporter, none where their request was let go."""
        self._note_work(one)
        one.is_noted = True
        requests, spans = self._requests, one.spans
        if one.top is None:
            self._link(spans)
            return [spans]
        top_id, key, start_ns = one.top
        request = one.around if one.is_request else requests.of(key, start_ns)
        if request is None or not request.is_kept:
            if one.is_request:
                self._link_to_around(spans[0])
                self._note(spans)
            elif (one.was_open and not is_over) or not one.is_kept:
                return []
        else:
            caller = self._below(one, request)
            for span in spans:
                span.root_id, span.remote = top_id, caller
            if one.is_request:
                self._callers[top_id] = caller
                if len(self._callers) > KEYS_KNOWN:
                    self._callers.popitem(last=False)
            requests.add(request, spans, self._ids)
        self._link(spans)
        return [spans]

    def _note(self, spans: Sequence[Span]) -> None:
        """A request is kept, and so are those of its tree that are requests of their own."""
        requests, ids, first = self._requests, self._ids, spans[0]
        apart = sub_requests(spans) if any(one.site.kind == "request" for one in spans[1:]) else {}
        theirs = {one.span_id for its in apart.values() for one in its}
        whole = requests.note([one for one in spans if one.span_id not in theirs], ids)
        self.stages.add(whole, first, first.remote)
        for place, its in apart.items():
            self.stages.add(requests.note_within(whole, spans[place], its, ids), spans[place], first.remote)

    def _below(self, one: _Waiting, request: KeyedRequest) -> RemoteParent:
        """What of a request such spans lie below: a part of it that began in its tree stays where it is."""
        first = one.spans[0]
        if one.is_request and first.parent_id and self._requests.began_within(first, self._ids) is request:
            caller = request.caller
            return RemoteParent(
                caller.trace_id, self._ids.span_id(first.parent_id), caller.flags, True, True, caller.state
            )
        key = str(first.attributes.get(KEY) or "") if one.is_request else one.key
        return request.below(one.start_ns, self._ids.instance, key)

    def _link_to_around(self, root: Span) -> None:
        """Link a request that began within another one, and is no part of it, to the span in which it did."""
        around = self._requests.began_within(root, self._ids)
        if around is not None and LINK not in root.attributes:
            root.attributes = {**root.attributes, **link_of(root.parent_id, 0, around.caller)}

    def _link(self, spans: Sequence[Span]) -> None:
        for span in spans:
            keys = batch_of(span.attributes)
            found = (self._requests.linked(key, span.start_ns, is_sure=False) for key in keys)
            links = dict.fromkeys(LinkedRequest(0, 0, one.caller) for one in found if one is not None)
            if links:
                span.links = tuple(links)


def sub_requests(spans: Sequence[Span]) -> Mapping[int, list[Span]]:
    """The spans of those in a request's tree that are requests of their own, by the places of these."""
    joined = join(trace_of(spans))
    its = [(place, row) for place, row in enumerate(joined.rows.tolist()) if row and place in joined.keys]
    return {row: [spans[one] for one in np.flatnonzero(joined.of == place).tolist()] for place, row in its}


def _keys_of(spans: Sequence[Span]) -> Iterator[str]:
    return (key for span in spans if isinstance(key := span.attributes.get(KEY), str) and key)
