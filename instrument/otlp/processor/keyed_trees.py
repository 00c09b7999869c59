"""Requests by their keys, over all processes of a run: what bears a request's key elsewhere goes into its trace.

A span outside of a request's own tree that bears its key goes, with all below it but what bears the key of another
request, below the span that handed the request over: of the spans that bear the key and had begun, the newest that was
open, else of the request's own tree the one that ended last, else the request. A request that lies within another one
of its key is a part of that one. Batches stay where they lie, and are linked to their requests. It is the rule of
`instrument.trace.grafted`, here for rows as they come: a tree waits until its request is kept, for as long as that is
open, and is let go where that is not kept.

Strays, which lie in the tree of another request, go to their own all the same: as a tree is sent, or is let go, they
are taken from it, and wait for their own request, which decides about them. Those of which it is not known by then
whose they are, or that are too many, stay where they lie, and are counted once it is. What handed a request over may
be sent later than what it handed over, see `instrument.otlp.processor.handed_over`: a span waits for the end of the one
that it goes below for some seconds, and goes below the next best one then.

A batch does not wait for requests to end: it is linked to one that is open once that is known to be kept, and to one of
which that is not known after some seconds. Their stages follow as they end, see
`instrument.otlp.processor.kept_stages`. One that the sample leaves out waits for that, and is sent, without what is
above and below it, where any of its requests is kept.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush

from instrument.otlp.packing import Ids
from instrument.otlp.processor.kept_stages import KeptStages
from instrument.otlp.processor.key_traces import name_unknown
from instrument.otlp.processor.keyed_requests import KEYS_KNOWN, KeyedRequests, batch_of
from instrument.otlp.processor.known_request import OPEN_NS, KeyedRequest, is_phase
from instrument.otlp.processor.own_work import OwnPhases
from instrument.otlp.processor.stray_spans import count_sent, find_strays, keys_of, nearest_keys, sub_requests
from instrument.otlp.processor.waiting_spans import Top, WaitingBatches, WaitingSpans
from instrument.recorder.shared_decisions import LINGER_NS
from instrument.recorder.shelf import is_sampled
from instrument.recording.mapped_facts import OpenSpan
from instrument.recording.remote_parents import LINK, LINK_TRACE_ID, LinkedRequest, RemoteParent, link_of
from instrument.recording.rows import REQUEST_BIT
from instrument.recording.spans import BATCH_KEYS, KEY, Span

MOST_WAITING = 50_000
"""Spans of a process that wait for their requests; of more the oldest go on without."""

LOOKED_NS = 10**9
"""So long after a tree came all recordings have been read to that time."""

PATIENCE_NS = LINGER_NS + LOOKED_NS
"""How long a tree waits for a request that is not open: it may have ended, and be kept by then."""


class KeyedTrees:
    """The kept trees of one process on their way to the exporter. Used by one thread."""

    def __init__(self, requests: KeyedRequests, ids: Ids) -> None:
        self._requests = requests
        self._ids = ids
        self.stages = KeptStages(requests)
        self._unplaced: list[Span] = []
        self._has_keys = False
        self._moved: OrderedDict[int, Top] = OrderedDict()
        self._callers: OrderedDict[int, RemoteParent] = OrderedDict()
        """What requests lie below that are parts of others, or in traces of keys: of them there may be more to come."""
        self._several: OrderedDict[int, KeyedRequest] = OrderedDict()
        """Requests with several keys whose trees were sent, or let go: of them there may be more to come."""
        self._taken: OrderedDict[int, set[int]] = OrderedDict()
        """The strays that were taken from requests that were let go: these may yet be kept, as what came before."""
        self._waiting: list[WaitingSpans] = []
        self._batches = WaitingBatches(requests)
        self._unnoted: list[WaitingSpans] = []
        """Those of them whose work is not noted yet."""
        self.nested: list[tuple[KeyedRequest, Span]] = []
        """Requests that lie in the trees of others, whether these are kept or not, by their own spans: as they come."""
        self.waiting = 0
        """Spans that wait."""

    @property
    def undecided(self) -> int:
        """Kept requests that wait, for they may be parts of others."""
        return sum(one.is_request and one.is_kept for one in self._waiting)

    def take(
        self, trees: Sequence[list[Span]], opened: Mapping[int, OpenSpan], sample: float, *,
        let_go: Sequence[list[Span]] = (), is_last: bool = False, at_once: bool = False,
    ) -> list[list[Span]]:  # fmt: skip
        """Take in what is kept, and of other trees what is below spans with keys; returns what can be sent.

        Of requests that are `let_go`, or parts of such that come late, strays alone. What is to be sent `at_once` waits
        for open requests alone, the last time for nothing.
        """
        unplaced, self._unplaced = self._unplaced, []
        ready: list[list[Span]] = []
        loose: dict[int, list[Span]] = {}
        undecided = {one.spans[0].root_id: one for one in self._waiting if one.is_request}
        for spans in trees:
            first = spans[0]
            if not first.root_id & REQUEST_BIT:
                loose.setdefault(first.root_id, []).extend(spans)
            elif first.span_id == first.root_id and (keys := set(keys_of(spans))):
                by_chance = first.error is None and is_sampled(first.root_id, sample)
                self._take_request(spans, keys, undecided.get(first.root_id), is_kept=True, by_chance=by_chance)
            elif first.root_id in undecided:
                undecided[first.root_id].spans.extend(spans)
            elif spans := self._without_late_strays(spans, opened, is_kept=True):
                for span in spans:
                    span.remote = self._callers.get(span.root_id, span.remote)
                self.stages.add_late(spans, self._ids)
                self._link(spans)
                ready.append(spans)
        for spans in let_go:
            if spans[0].span_id == spans[0].root_id:
                self._take_request(spans, set(keys_of(spans)), None, is_kept=False)
            else:
                self._without_late_strays(spans, opened, is_kept=False)
        again = {span.span_id for span in unplaced}
        for span in unplaced:
            loose.setdefault(span.root_id, []).append(span)
        for root_id, spans in loose.items():
            self._place(spans, opened, again, is_kept=is_sampled(root_id, sample), ready=ready)
        ready.extend(self._due(opened, is_last=is_last, at_once=at_once))
        for spans in ready if self._ids.run else ():
            self._name_causes(spans)
        self.note_work(at_once=False)
        self.waiting = sum(len(one.spans) for one in self._waiting) + len(self._unplaced) + len(self._batches)
        return ready

    def is_sent_elsewhere(self, span: Span) -> bool:
        """Whether a span has left the tree that it lies in for a request, which is kept or may yet be."""
        if span in self._batches:
            return True
        top = self._moved.get(span.span_id)
        request = None if top is None else self._requests.of(top[1], top[2])
        return request is not None and (request.is_kept or request.is_open)

    # ---------------------------------------------------------------- what is below spans with keys

    def _place(
        self, spans: list[Span], opened: Mapping[int, OpenSpan], again: set[int], *, is_kept: bool,
        ready: list[list[Span]],
    ) -> None:  # fmt: skip
        """Take what is below spans with keys from the tree that it lies in."""
        told = (one.attributes for some in (opened.values(), spans) for one in some)
        self._has_keys = self._has_keys or any(KEY in one or BATCH_KEYS in one for one in told)
        if not self._has_keys:
            if is_kept:
                ready.append(spans)
            return
        by_id: dict[int, OpenSpan | Span] = {**opened, **{span.span_id: span for span in spans}}
        tops: dict[int, Top | None] = {}
        lost: set[int] = set()
        for span in spans:
            self._find_top(span.span_id, by_id, tops, lost)
        stay: list[Span] = []
        below: list[Span] = []
        for span in spans:
            if tops[span.span_id] is not None:
                below.append(span)
            elif span.span_id in lost and span.span_id not in again:
                self._unplaced.append(span)  # what lies above it ended as this was read, and comes next
            elif is_kept or batch_of(span.attributes):
                stay.append(span)
        self._waiting += self._pieces(below, tops, is_kept=is_kept)
        if not is_kept:
            self._batches.add(stay)
            return
        if keys := {key for span in stay for key in batch_of(span.attributes)}:
            self._waiting.append(WaitingSpans(stay, keys))
        elif stay:
            ready.append(stay)

    def _pieces(
        self, spans: Sequence[Span], tops: Mapping[int, Top | None], *, is_kept: bool, is_stray: bool = False
    ) -> list[WaitingSpans]:
        """What is below spans with keys, by these."""
        pieces: dict[Top, list[Span]] = {}
        for span in spans:
            top = tops[span.span_id]
            if top is not None:
                self._moved[span.span_id] = top
                pieces.setdefault(top, []).append(span)
        while len(self._moved) > KEYS_KNOWN:
            self._moved.popitem(last=False)
        found = []
        for top, piece in pieces.items():
            names = {top[1], *keys_of(piece)}
            self._requests.note_names(top[1], top[2], names - {top[1]})
            found.append(
                WaitingSpans(piece, {top[1]}, top, is_kept=is_kept, is_stray=is_stray, has_several=len(names) > 1)
            )
            if is_stray:
                self._note_work(found[-1])
        self._unnoted += found
        return found

    def _cut_off(self, one: WaitingSpans) -> list[WaitingSpans]:
        """Take what is done for other requests from what waited for one: when it came, these may have been as one, for
        it was not known yet that they are requests of their own in one tree."""
        if one.top is None:
            return []
        tops: dict[int, Top | None] = {one.top[0]: one.top}
        by_id = {span.span_id: span for span in one.spans}
        for span in one.spans:
            self._find_top(span.span_id, by_id, tops, set())
        others = [span for span in one.spans if tops[span.span_id] != one.top]
        if not others:
            return []
        one.spans = [span for span in one.spans if tops[span.span_id] == one.top]
        found = self._pieces(others, tops, is_kept=one.is_kept, is_stray=one.is_stray)
        for piece in found:
            piece.since_ns, piece.came_ns, piece.was_known = one.since_ns, one.came_ns, one.was_known
            piece.is_noted = piece.is_noted or one.is_noted
        return found

    def _find_top(
        self,
        span_id: int,
        by_id: Mapping[int, OpenSpan | Span],
        tops: dict[int, Top | None],
        lost: set[int],
        strays: Container[object] = (),
        *,
        is_late: bool = False,
    ) -> None:
        """Find the topmost span with a key at or above one, of what `is_late` with the key of `strays`, or the lowest
        whose key names another request than those above it; and whether what is above it is not at hand."""
        path: list[tuple[int, OpenSpan | Span]] = []
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
            if isinstance(key, str) and key:
                is_named = key in strays
                if found is None:
                    is_top = is_named or not is_late
                else:
                    is_top = key != found[1] and (is_named or self._is_of_another(key, one.start_ns, found))
                found = (at, key, one.start_ns) if is_top else found
            tops[at] = found
            if is_lost and found is None:
                lost.add(at)

    def _is_of_another(self, key: str, start_ns: int, top: Top) -> bool:
        """Whether a key below a span with one names another request than that does."""
        found = self._requests.of(key, start_ns)
        return found is not None and found is not self._requests.of(top[1], top[2])

    # ---------------------------------------------------------------- strays in the trees of requests

    def _take_request(
        self, spans: list[Span], keys: set[str], known: WaitingSpans | None, *, is_kept: bool, by_chance: bool = False
    ) -> None:
        """A request has ended. One that was let go may be kept later."""
        first = spans[0]
        if taken := self._taken.pop(first.root_id, None):
            spans = [span for span in spans if span.span_id not in taken]
        if known is not None:
            known.spans, known.is_kept, known.by_chance = spans, is_kept, by_chance
        else:
            top = (first.span_id, min(keys), first.start_ns)
            self._waiting.append(WaitingSpans(spans, keys, top, is_request=True, is_kept=is_kept, by_chance=by_chance))

    def _without_strays(
        self, one: WaitingSpans, opened: Mapping[int, OpenSpan]
    ) -> tuple[list[Span], list[WaitingSpans]]:
        """The spans of a request that are its own, and the others as they wait for theirs."""
        spans, first = one.spans, one.spans[0]
        request = self._requests.known(self._ids, first.root_id)
        strays = find_strays(spans, opened, request, one.around, self._requests)
        if request is not None and len(request.borne) > 1:
            self._several[first.root_id] = request
            if len(self._several) > KEYS_KNOWN:
                self._several.popitem(last=False)
        if not strays:
            count_sent(spans, request)
            return spans, []
        by_id: dict[int, OpenSpan | Span] = {**opened, **{span.span_id: span for span in spans}}
        tops: dict[int, Top | None] = dict.fromkeys(by_id.keys() - strays)
        of_others = set[str]() if request is None else request.strays | request.below_strays
        for span_id in strays:
            self._find_top(span_id, by_id, tops, set(), of_others)
        pieces = self._pieces(
            [span for span in spans if span.span_id in strays], tops, is_kept=one.is_kept, is_stray=True
        )  # fmt: skip
        for piece in pieces:
            for span in piece.spans:
                span.remote = first.remote
        spans = [span for span in spans if span.span_id not in strays]
        count_sent(spans, request)
        if not one.is_kept:
            self._taken[first.root_id] = strays
            while sum(map(len, self._taken.values())) > MOST_WAITING:
                self._taken.popitem(last=False)
        return spans, pieces

    def _without_late_strays(
        self, spans: list[Span], opened: Mapping[int, OpenSpan], *, is_kept: bool
    ) -> list[Span]:  # fmt: skip
        """Of what comes late of a request's tree that which is its own; the rest waits for its requests."""
        root_id = spans[0].root_id
        request = self._requests.known(self._ids, root_id) or self._several.get(root_id)
        if request is None or not request.strays:
            return spans
        by_id: dict[int, OpenSpan | Span] = {**opened, **{span.span_id: span for span in spans}}
        tops: dict[int, Top | None] = {}
        for span in spans:
            self._find_top(span.span_id, by_id, tops, set(), request.strays, is_late=True)
        self._waiting += self._pieces(spans, tops, is_kept=is_kept, is_stray=True)
        return [span for span in spans if tops[span.span_id] is None]

    # ---------------------------------------------------------------- waiting

    def _due(self, opened: Mapping[int, OpenSpan], *, is_last: bool, at_once: bool) -> Iterator[list[Span]]:
        waiting, self._waiting = self._waiting, []
        size = sum(len(one.spans) for one in waiting)
        read_ns = time.monotonic_ns() - self._requests.lag_ns
        is_last = is_last or self._requests.are_over
        for one in waiting:
            one.around = self._around(one) if one.is_request else None
            if one.around is not None and one.is_kept and not one.by_chance:
                one.around.is_wanted = True
        # Requests first, and parts of them as they began: what one hands over may wait here, too.
        ordered = [(one.is_part, one.start_ns, place, one) for place, one in enumerate(waiting)]
        heapify(ordered)
        count = len(ordered)
        while ordered:
            one = heappop(ordered)[-1]
            is_over = size > MOST_WAITING or (is_last and (one.is_request or not self._requests.undecided))
            age_ns = PATIENCE_NS + LOOKED_NS if at_once else read_ns - one.since_ns
            if self._is_awaited(one, age_ns, is_over=is_over) or (
                at_once and not one.is_request and self._requests.undecided
            ):
                self._waiting.append(one)
                continue
            size -= len(one.spans)
            if one.is_request:
                one.spans, pieces = self._without_strays(one, opened)
                for piece in pieces:
                    size += len(piece.spans)
                    heappush(ordered, (True, piece.start_ns, count, piece))
                    count += 1
            elif one.has_several:
                for piece in self._cut_off(one):
                    size += len(piece.spans)
                    heappush(ordered, (True, piece.start_ns, count, piece))
                    count += 1
                if not one.spans:
                    continue
            yield from self._sent(one, is_over=is_over)
        is_decided = not self._requests.undecided
        for batch in self._batches.due(
            PATIENCE_NS, LOOKED_NS, is_over=is_last and is_decided, at_once=at_once and is_decided
        ):
            self._link([batch])
            yield [batch]

    def _is_awaited(self, one: WaitingSpans, age_ns: int, *, is_over: bool) -> bool:
        """Whether the request of this may yet come."""
        if is_over:
            return False
        requests = self._requests
        if one.top is None:
            at_ns = one.spans[0].start_ns
            unsure = [
                key
                for key in one.keys
                if (found := requests.linked(key, at_ns, is_sure=True)) is None
                or (age_ns < LOOKED_NS and (found.end_ns < at_ns or requests.is_used_again(key)))
            ]
            if not unsure:
                return False
            return age_ns < PATIENCE_NS or (
                time.monotonic_ns() - one.since_ns < 2 * PATIENCE_NS
                and any((found := requests.of(key, at_ns)) is not None and found.is_open for key in unsure)
            )
        if one.is_request:
            around = one.around
            if not one.is_kept:
                return False  # which was so only after others had been asked for a while
            if around is None:
                return len(requests.members) > 1 and age_ns < LOOKED_NS
            if around.is_open:
                one.since_ns = time.monotonic_ns()
            return not around.is_kept and (around.is_open or age_ns < PATIENCE_NS)
        known = requests.of(one.top[1], one.top[2])
        if known is not None and known.is_kept and (one.top[2] <= known.end_ns or age_ns > LOOKED_NS):
            one.kept_ns = one.kept_ns or time.monotonic_ns()
            if one.is_stray and time.monotonic_ns() - one.kept_ns < LOOKED_NS:
                return True  # what handed strays over may come from other processes
            givers = requests.givers(known, one.top[2], one.key) if age_ns < PATIENCE_NS else ()
            newest = max(givers, key=lambda its: (its.start_ns, -its.end_ns), default=None)
            return newest is not None and newest.end_ns == OPEN_NS
        one.was_known = one.was_known or known is not None
        if known is not None and known.is_open:
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

    def _note_work(self, one: WaitingSpans) -> None:
        if one.top is None or one.is_request or one.is_noted:
            return
        request = self._requests.of(one.top[1], one.top[2])
        if request is None:
            return
        one.is_noted = True
        keys = nearest_keys(one.spans) if one.has_several else {}
        edges: dict[str, list[tuple[int, int]]] = {one.key: []}
        for span in one.spans:
            if is_phase(span):
                edges.setdefault(keys.get(span.span_id) or one.key, []).append((span.start_ns, span.end_ns))
        for key, its in edges.items():
            theirs = self._requests.of(key, its[0][0]) if key != one.key else request
            (theirs or request).note_elsewhere(OwnPhases(its), key)

    def _around(self, one: WaitingSpans) -> KeyedRequest | None:
        """The request that this one is a part of."""
        first = one.spans[0]
        if first.remote is not None:
            return None  # its caller has said so
        return self._requests.around(first, self._ids, one.keys)

    def _sent(self, one: WaitingSpans, *, is_over: bool) -> list[list[Span]]:
        """The spans as they go to the exporter, none where their request was let go."""
        self._note_work(one)
        one.is_noted = True
        requests, spans = self._requests, one.spans
        if one.top is None:
            self._link(spans)
            return [spans]
        top_id, key, start_ns = one.top
        request = one.around if one.is_request else requests.of(key, start_ns)
        if one.is_request and not one.is_kept:
            request = requests.known(self._ids, one.spans[0].root_id)
            if request is not None:
                self._note_nested(request, spans)
            return []
        if request is None or not request.is_kept:
            if one.is_stray:
                if not is_over or request is None or not request.is_open:
                    return []
                requests.note_misplaced(len(spans))
                if not one.is_kept:
                    return []
                for span in spans:
                    span.remote = self._callers.get(span.root_id, span.remote)
            elif one.is_request and one.around is not None and one.by_chance and not one.around.is_open:
                return []  # the whole is let go, and so is its part
            elif one.is_request:
                self._link_to_around(spans[0])
                own = requests.known(self._ids, spans[0].root_id)
                if (named := requests.traces.name_kept(spans, own, self._ids)) is not None:
                    self._note_caller(spans[0].root_id, named)
                self._note(spans)
            elif (one.was_known and not is_over) or not one.is_kept:
                return []
            elif request is None:
                name_unknown(spans, top_id, key, self._ids)
        else:
            caller = self._below(one, request)
            for span in spans:
                span.root_id, span.remote = top_id, caller
            if one.is_request:
                self._note_caller(top_id, caller)
            requests.add(request, spans, self._ids)
        self._link(spans)
        return [spans]

    def _name_causes(self, spans: Sequence[Span]) -> None:
        """What came from a request that has the trace of its key is linked to it there."""
        for span in spans:
            cause = span.attributes.get(LINK) if span.attributes else None
            if isinstance(cause, tuple | list) and len(cause) == 2 and LINK_TRACE_ID not in span.attributes:
                caller = self._callers.get(int(cause[1]))
                if caller is not None:
                    span.attributes = {**span.attributes, LINK_TRACE_ID: f"{caller.trace_id:032x}"}

    def _note_caller(self, root_id: int, caller: RemoteParent) -> None:
        self._callers[root_id] = caller
        if len(self._callers) > KEYS_KNOWN:
            self._callers.popitem(last=False)

    def _note(self, spans: Sequence[Span]) -> None:
        """A request is kept, and so are those of its tree that are requests of their own."""
        requests, ids, first = self._requests, self._ids, spans[0]
        apart = self._apart(spans)
        theirs = {one.span_id for its in apart.values() for one in its}
        whole = requests.note([one for one in spans if one.span_id not in theirs], ids)
        self.stages.add(whole, first, first.remote)
        for request, own in self._note_nested(whole, spans, apart):
            self.stages.add(request, own, first.remote)

    def _apart(self, spans: Sequence[Span]) -> Mapping[int, list[Span]]:
        return sub_requests(spans) if any(one.site.kind == "request" for one in spans[1:]) else {}

    def _note_nested(
        self, whole: KeyedRequest, spans: Sequence[Span], apart: Mapping[int, list[Span]] | None = None
    ) -> list[tuple[KeyedRequest, Span]]:
        """Those of a request's tree that are requests of their own are known from now on."""
        apart = self._apart(spans) if apart is None else apart
        if not apart:
            return []
        whole.is_apart = True
        theirs = {one.span_id for its in apart.values() for one in its}
        self._requests.note_apart(whole, [one for one in spans if one.span_id not in theirs])
        found = [
            (self._requests.note_within(whole, spans[place], its, self._ids), spans[place])
            for place, its in apart.items()
        ]
        self.nested += found
        return found

    def _below(self, one: WaitingSpans, request: KeyedRequest) -> RemoteParent:
        """What of a request such spans lie below: a part of it that began in its tree stays where it is."""
        first = one.spans[0]
        if one.is_request and first.parent_id and self._requests.began_within(first, self._ids) is request:
            caller = request.caller
            return RemoteParent(
                caller.trace_id, self._ids.span_id(first.parent_id), caller.flags, True, True, caller.state
            )
        key = str(first.attributes.get(KEY) or "") if one.is_request else one.key
        others = [its for its in self._requests.givers(request, one.start_ns, key) if its.end_ns != OPEN_NS]
        return request.below(one.start_ns, self._ids.instance, key, others)

    def _link_to_around(self, root: Span) -> None:
        """Link a request that began within another one, and is no part of it, to the span in which it did."""
        around = self._requests.began_within(root, self._ids)
        if around is not None and LINK not in root.attributes:
            root.attributes = {**root.attributes, **link_of(root.parent_id, 0, self._requests.traces.name(around))}

    def _link(self, spans: Sequence[Span]) -> None:
        for span in spans:
            keys = batch_of(span.attributes)
            found = (self._requests.linked(key, span.start_ns, is_sure=False) for key in keys)
            links = dict.fromkeys(
                LinkedRequest(0, 0, self._requests.traces.name(one)) for one in found if one is not None
            )
            if links:
                span.links = tuple(links)
