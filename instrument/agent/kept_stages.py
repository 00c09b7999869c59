"""The stages of kept requests as spans: queue, prefill, decode and stalls, of requests that lasted however long.

They are those that `instrument.trace.stages` finds in a recording, by what is remembered of batches and of a request's
own work. They are told once all processes have been read to the request's end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.agent.keyed_requests import KeyedRequest, KeyedRequests
from instrument.agent.served_batches import ServedBatches
from instrument.otlp.packing import Ids
from instrument.recording.spans import BATCH_WEIGHTS, AttributeValue, RemoteParent, Site, Span
from instrument.trace.columns import DeviceIntervals, Int64s, Trace
from instrument.trace.forest import NONE
from instrument.trace.joined import Joined, Served, each_once
from instrument.trace.stages import stage_spans

LOOKED_NS = 10**9
"""So long after a request was kept all recordings have been read to its end, and what is below it has come."""

LATEST_NS = 10**10
"""So long it waits for recordings that are not read at the moment."""

DERIVED = 3 << 62
STAGES_BITS = 5
"""Spans of stages have numbers that no recorder gives and no device interval has, and that are the same whoever derives
them: those of their requests and of their places among the stages of these."""

_WORK, _REQUEST = Site("work", "phase"), Site("request", "request")


@dataclass(slots=True)
class _Kept:
    """A request that was kept, and its own span."""

    request: KeyedRequest
    first: Span
    remote: RemoteParent | None
    since_ns: int
    is_new: bool = True


class KeptStages:
    """Those of one process's requests. Used by one thread."""

    def __init__(self, requests: KeyedRequests) -> None:
        self._requests = requests
        self._kept: dict[int, _Kept] = {}
        self.untold = 0
        """Kept requests whose stages are not told, for what batches served them had been forgotten."""

    def __len__(self) -> int:
        """How many requests wait for their stages."""
        return len(self._kept)

    def add(self, request: KeyedRequest, first: Span, remote: RemoteParent | None) -> None:
        """A request is kept, whose own span this is, in a tree that a caller called."""
        if request.work is None:
            self.untold += 1
        else:
            self._kept[first.span_id] = _Kept(request, first, remote, time.monotonic_ns())

    def add_late(self, spans: Sequence[Span], ids: Ids) -> None:
        """More has come of a request's own tree."""
        kept = self._kept.get(spans[0].root_id)
        if kept is not None:
            self._requests.add(kept.request, spans, ids, is_own=True)

    def due(self, *, at_once: bool = False) -> list[list[Span]]:
        """The stages of those requests that have waited long enough, or of all but those that have just come."""
        now_ns, found = time.monotonic_ns(), list[_Kept]()
        waits_ns = LATEST_NS if self._requests.are_behind else LOOKED_NS
        for root_id, one in list(self._kept.items()):
            if not one.is_new and (at_once or now_ns - one.since_ns >= waits_ns):
                found.append(self._kept.pop(root_id))
            one.is_new = False
        return self._told(sorted(found, key=lambda one: one.first.start_ns)) if found else []

    def _told(self, kept: Sequence[_Kept]) -> list[list[Span]]:
        batches, told = self._requests.batches, []
        served: list[_Served] = []
        of_keys = batches.of(dict.fromkeys(key for one in kept for key in one.request.keys))
        for one in kept:
            if not batches.lost.isdisjoint(one.request.keys):
                self.untold += 1
            elif (pairs := self._pairs_of(one.request, of_keys)) is not None and len(pairs):
                served.append(_Served(one, pairs))
        if served:
            trace, joined = _columns(served, batches)
            for place, spans in sorted(stage_spans(trace, joined, kinds=self._requests.kinds).items()):
                _bear(spans, served[place].kept)
                told.append(spans)
        for one in kept:
            self._requests.settle(one.request)
        return told

    def _pairs_of(self, request: KeyedRequest, of_keys: Mapping[str, NDArray[Any]]) -> NDArray[Any] | None:
        """What batches served a request, as pairs of one and a key."""
        found = []
        for key in request.keys:
            if (pairs := of_keys.get(key)) is not None:
                starts = self._requests.batches.batches["start_ns"][pairs["batch"]]
                is_its = (starts >= request.start_ns) & (starts <= request.end_ns)
                for start_ns in self._requests.followers(request, key):
                    is_its &= starts < start_ns
                found.append(pairs[is_its])
        return np.concatenate(found) if found else None


class _Served(NamedTuple):
    """A request, and what batches served it."""

    kept: _Kept
    pairs: NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Said:
    """What attributes of requests and of batches tell about stages."""

    requests: Sequence[Mapping[str, AttributeValue]]
    weighed: Int64s

    def __getitem__(self, row: int, /) -> Mapping[str, AttributeValue]:
        return self.requests[row] if row < len(self.requests) else {}

    def rows(self) -> Int64s:
        """Those of the requests."""
        return np.arange(len(self.requests))

    def having(self, name: str) -> Int64s:
        """The batches that say weights."""
        return self.weighed if name == BATCH_WEIGHTS else np.zeros(0, dtype=np.int64)

    def values(self, name: str, rows: Int64s) -> list[AttributeValue | None]:
        """What requests say."""
        return [self[row].get(name) for row in rows.tolist()]


def _columns(served: Sequence[_Served], batches: ServedBatches) -> tuple[Trace, Joined]:
    """The requests, their own work and the batches of their time as a trace, and which of these serve them."""
    all_batches, count = batches.batches, len(served)
    first_ns = min(one.kept.request.start_ns for one in served)
    last_ns = max(one.kept.request.end_ns for one in served)
    used = np.flatnonzero((all_batches["end_ns"] >= first_ns) & (all_batches["start_ns"] <= last_ns))
    its = all_batches[used]
    requests = np.array([(one.kept.request.start_ns, one.kept.request.end_ns) for one in served], dtype=np.int64)
    work = np.array([edges for one in served for edges in one.kept.request.work or ()], dtype=np.int64).reshape(-1, 2)
    whose = np.repeat(np.arange(count), [len(one.kept.request.work or ()) for one in served])
    starts = np.concatenate([requests[:, 0], work[:, 0], its["start_ns"]])
    ends = np.concatenate([requests[:, 1], work[:, 1], its["end_ns"]])
    before = count + len(work)
    numbers = np.arange(1, len(starts) + 1)
    none, lengths = np.zeros(len(starts), dtype=np.int64), ends - starts
    trace = Trace(
        sites=(_REQUEST, _WORK, *(Site(name, "op") for name in batches.names)),
        errors=(),
        span_id=numbers,
        parent_id=none,
        root_id=numbers,
        thread_id=np.concatenate([none[:before], its["thread"].astype(np.int64) + 1]),
        task_id=none,
        start_ns=starts,
        end_ns=ends,
        active_ns=lengths,
        self_ns=lengths,
        site=np.concatenate([np.repeat([0, 1], [count, len(work)]), its["name"] + 2]).astype(np.int32),
        error=np.full(len(starts), NONE, dtype=np.int32),
        clipped=np.zeros(len(starts), dtype=np.bool_),
        device=DeviceIntervals.none(),
        attributes=_Said([one.kept.first.attributes for one in served], before + np.flatnonzero(its["says_weight"])),
        remote={},
    )
    of = np.concatenate([np.arange(count), whose, np.full(len(its), NONE)])
    pairs = np.concatenate([one.pairs for one in served])
    batch = before + np.searchsorted(used, pairs["batch"])
    request = np.repeat(np.arange(count), [len(one.pairs) for one in served])
    idle = np.setdiff1d(np.arange(before, len(starts)), batch)  # which serve none of these, and may be what stalls them
    batch, request = np.concatenate([batch, idle]), np.concatenate([request, np.full(len(idle), NONE)])
    weight = np.concatenate([pairs["weight"], np.zeros(len(idle), dtype=np.int64)])
    order = np.argsort(batch, kind="stable")
    joined = Joined(
        rows=np.arange(count),
        of=of,
        keys={},
        served=each_once(Served(batch[order], request[order], weight[order], ("",) * len(order))),
        unbound=0,
    )
    return trace, joined


def _bear(spans: Sequence[Span], kept: _Kept) -> None:
    """Make them spans of a request."""
    first = kept.first
    for place, span in enumerate(spans):
        span.span_id = DERIVED | (first.span_id << STAGES_BITS | place) & (1 << 62) - 1
        span.parent_id, span.root_id = first.span_id, first.root_id
        span.thread_id, span.task_id, span.remote = first.thread_id, first.task_id, kept.remote
