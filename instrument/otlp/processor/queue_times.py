"""How long each request with a key was in the queue, and in what company it was served, kept or not, for metrics.

It is what `instrument.trace.stages` finds, by the first batch of each request and by what was done for it before,
in whatever process. It is told once all processes have been read to the request's end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.otlp.packing import Ids
from instrument.otlp.processor.key_facts import KeyFacts
from instrument.otlp.processor.keyed_requests import KEYS_KNOWN, KeyedRequests
from instrument.otlp.processor.known_request import KeyedRequest
from instrument.otlp.processor.own_work import NO_PHASES, OwnWork
from instrument.otlp.processor.served_requests import ServedRequest, pairs_of, trace_of_served
from instrument.recording.rows import ATTRIBUTES, ERROR, SPAN_ID, Row
from instrument.recording.spans import ITEMS, OUTCOME, Span
from instrument.trace.stages import queue_times

WAIT_NS = 3 * 10**9
"""So long after a request ended all recordings have been read to its end, and it is known whether it is kept."""

LATEST_NS = 8 * 10**9
"""So long it waits for recordings that are not read at the moment: less than requests that have ended are known."""

LOOKS = 2
"""So often all recordings have been looked at, at least, after a request that ended was met."""


class _Ended(NamedTuple):
    """A request that has ended, and its own row, or its span where it lies in the tree of another one."""

    request: KeyedRequest
    own: Row | Span
    since_ns: int
    look: int


class QueueTimes:
    """Those of one process's requests. Used by one thread.

    `count(own, queue_ns, batch_size, request, streams=...)` is called for each request, with its own row or span, how
    many were in its batches on average, and whether it streams what several steps make. `left_out` counts those of
    which it is not known, though a batch has served them.
    """

    def __init__(self, requests: KeyedRequests, ids: Ids, count: Callable[..., object]) -> None:
        self._requests = requests
        self._ids = ids
        self._count = count
        self._work = OwnWork()
        self._new: list[Row] = []
        self._met: list[Row] = []
        """Requests that ended the last time: a row with a key may come after its root's, of another ring."""
        self._waiting: deque[_Ended] = deque()
        self._around_others: set[int] = set()
        self._look = 0
        self.left_out = 0

    def __len__(self) -> int:
        """How many requests wait for what is to be known of them."""
        return len(self._new) + len(self._met) + len(self._waiting)

    @property
    def waiting(self) -> int:
        """Those of them that are known to have keys."""
        return len(self._waiting)

    def note_ended(self, rows: Sequence[Row]) -> None:
        """Requests have ended, by their own rows."""
        self._new += rows

    def learn(self, facts: KeyFacts, *, at_once: bool = False) -> None:
        """Take in what rows tell of requests, once that was learnt of keys."""
        met, self._met, self._new = self._met, self._new, []
        if at_once:
            met, self._met = [*met, *self._met], []
        self._around_others |= facts.around_others
        self._work.add(facts.work, (facts.opened, {row[SPAN_ID] for row in met}, {row[SPAN_ID] for row in self._met}))
        phases = self._work.take([row[SPAN_ID] for row in met]) if met else {}
        now_ns = time.monotonic_ns()
        for row in met:
            request = self._requests.known(self._ids, row[SPAN_ID])
            if request is not None and request.keys:
                if not request.is_apart:
                    request.own = phases.get(row[SPAN_ID], NO_PHASES)
                request.is_around_others = row[SPAN_ID] in self._around_others
                self._waiting.append(_Ended(request, row, now_ns, self._look))
            self._around_others.discard(row[SPAN_ID])
        if len(self._around_others) > KEYS_KNOWN:
            self._around_others &= facts.opened
        while len(self._waiting) > KEYS_KNOWN:
            self._requests.settle_nested(self._waiting.popleft().request)
            self.left_out += 1

    def note_nested(self, nested: Sequence[tuple[KeyedRequest, Span]]) -> None:
        """Requests of their own have ended in the tree of another one, each by its own span."""
        now_ns = time.monotonic_ns()
        self._waiting.extend(_Ended(request, span, now_ns, self._look) for request, span in nested)

    def due(self, *, at_once: bool = False, may_be_kept: bool = False) -> None:
        """Count those that have waited long enough, or `at_once` all that all recordings were read for.

        Where others may still keep requests, those that hold others wait: these are not known yet.
        """
        now_ns, found, undecided = time.monotonic_ns(), list[_Ended](), list[_Ended]()
        waits_ns = LATEST_NS if self._requests.are_behind else WAIT_NS + self._requests.lag_ns
        while self._waiting and self._waiting[0].look + LOOKS <= self._look:
            if not (at_once or now_ns - self._waiting[0].since_ns >= waits_ns):
                break
            one = self._waiting.popleft()
            is_early = may_be_kept and now_ns - one.since_ns < waits_ns
            (undecided if is_early and _is_for_others(one.request) else found).append(one)
        self._waiting.extendleft(reversed(undecided))
        self._look += 1
        if found:
            self._requests.note_work(at_once=at_once)
            self._tell([one for one in found if self._requests.whole_of(one.request) is None])
            for one in found:
                self._requests.settle_nested(one.request)

    def _tell(self, ended: Sequence[_Ended]) -> None:
        batches, served = self._requests.batches, list[tuple[_Ended, ServedRequest, float]]()
        of_keys = batches.of(dict.fromkeys(key for one in ended for key in one.request.keys))
        for one in ended:
            its = self._served(one, of_keys)
            if its is not None:
                served.append((one, *its))
            one.request.own, one.request.elsewhere, one.request.below_others = NO_PHASES, {}, {}
        if served:
            times_ns = queue_times(*trace_of_served([its for _, its, _ in served], batches, with_others=False))
            for place, queue_ns in times_ns.items():
                one, request, batch_size = served[place]
                self._count(one.own, queue_ns, batch_size, one.request, streams=request.is_generation)

    def _served(self, ended: _Ended, of_keys: Mapping[str, NDArray[Any]]) -> tuple[ServedRequest, float] | None:
        """A request with its first batch, and how many were in its batches on average: 0 where it was given up before.

        None where none served it else, or it is not known when it was in the queue.
        """
        request, batches = ended.request, self._requests.batches
        if request.is_apart and not request.keys:
            return None  # the keys were those of requests in its tree
        if request.start_ns < self._requests.known_since_ns or not (
            request.keys and batches.lost.isdisjoint(request.keys)
        ):
            self.left_out += 1
            return None
        pairs = pairs_of(request, of_keys, self._requests)
        its = batches.batches[pairs["batch"]]
        starts, ends = its["start_ns"], its["end_ns"]
        has_time = starts < np.minimum(ends, request.end_ns)
        if not has_time.any():
            return self._given_up(ended, pairs[:0]) if _is_lost(ended.own) else None
        first_ns, phases = int(starts[has_time].min()), self._requests.work_of(request)
        if phases.missing_ns <= first_ns or _is_for_others(request):
            self.left_out += 1
            return None
        names = its["name"][has_time]
        pairs = pairs[has_time & (starts == first_ns)]
        first = ServedRequest(
            request.start_ns, request.end_ns, phases.edges, pairs, {}, self._requests.handing_over(request)
        )._replace(is_generation=_streams(ended.own) and len(np.unique(names)) < len(names))
        return first, float(its["size"][has_time].mean())

    def _given_up(self, ended: _Ended, none: NDArray[Any]) -> tuple[ServedRequest, float]:
        request = ended.request
        handing = self._requests.handing_over(request)
        return ServedRequest(request.start_ns, request.end_ns, (), none, {}, handing, is_lost=True), 0.0


def _streams(own: Row | Span) -> bool:
    items = ((own.attributes if isinstance(own, Span) else own[ATTRIBUTES]) or {}).get(ITEMS)
    return isinstance(items, int) and items > 1


def _is_lost(own: Row | Span) -> bool:
    error, said = (own.error, own.attributes) if isinstance(own, Span) else (own[ERROR], own[ATTRIBUTES])
    return error is not None or OUTCOME in (said or ())


def _is_for_others(request: KeyedRequest) -> bool:
    """Return True where a request bears keys of several requests within it. A single key is its own."""
    return request.is_around_others and len(request.borne) > 1 and not request.is_apart
