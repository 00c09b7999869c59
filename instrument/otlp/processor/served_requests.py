"""Requests, their own work and the batches that served them as a trace, for what `instrument.trace` tells of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.otlp.processor.keyed_requests import KeyedRequests
from instrument.otlp.processor.known_request import KeyedRequest
from instrument.otlp.processor.served_batches import PAIR, ServedBatches
from instrument.recording.spans import BATCH_WEIGHTS, KEY, AttributeValue, Site
from instrument.trace.columns import Attributes, DeviceIntervals, Int64s, Trace
from instrument.trace.forest import NONE
from instrument.trace.joined import Joined, Served, each_once

_WORK, _REQUEST, _HANDING = Site("work", "phase"), Site("request", "request"), Site("handing over", "user")


class ServedRequest(NamedTuple):
    """A request: begin and end of each phase of its own work and of each span that handed it over, and what batches
    served it, as pairs of one and a key."""

    start_ns: int
    end_ns: int
    work: Sequence[tuple[int, int]]
    pairs: NDArray[Any]
    attributes: Mapping[str, AttributeValue]
    handing: Sequence[tuple[int, int]] = ()
    is_lost: bool = False
    is_generation: bool = False


def pairs_of(request: KeyedRequest, of_keys: Mapping[str, NDArray[Any]], requests: KeyedRequests) -> NDArray[Any]:
    """What batches served a request, of all pairs that have its keys."""
    found = []
    for key in request.keys:
        if (pairs := of_keys.get(key)) is not None:
            starts = requests.batches.batches["start_ns"][pairs["batch"]]
            is_its = (starts >= request.start_ns) & (starts <= request.end_ns)
            for start_ns in requests.followers(request, key):
                is_its &= starts < start_ns
            found.append(pairs[is_its])
    return np.concatenate(found) if found else np.zeros(0, PAIR)


@dataclass(frozen=True, slots=True)
class _Said(Attributes):
    """What attributes of requests and of batches tell about stages."""

    requests: Sequence[Mapping[str, AttributeValue]]
    weighed: Int64s
    handing: Int64s

    def __getitem__(self, row: int, /) -> Mapping[str, AttributeValue]:
        return self.requests[row] if row < len(self.requests) else {}

    def rows(self) -> Int64s:
        """Those of the requests."""
        return np.arange(len(self.requests))

    def having(self, name: str) -> Int64s:
        """The batches that say weights, the spans that handed requests over, or requests."""
        if name in (BATCH_WEIGHTS, KEY):
            return self.weighed if name == BATCH_WEIGHTS else self.handing
        return np.array([row for row, its in enumerate(self.requests) if name in its], dtype=np.int64)

    def values(self, name: str, rows: Int64s) -> list[AttributeValue | None]:
        """What requests say."""
        return [self[row].get(name) for row in rows.tolist()]


def trace_of_served(
    served: Sequence[ServedRequest], batches: ServedBatches, *, with_others: bool = True
) -> tuple[Trace, Joined]:
    """Requests as a trace, and which batches serve them: `with_others`, all batches of their time."""
    all_batches, count = batches.batches, len(served)
    pairs = np.concatenate([one.pairs for one in served])
    if with_others:
        first_ns, last_ns = min(one.start_ns for one in served), max(one.end_ns for one in served)
        used = np.flatnonzero((all_batches["end_ns"] >= first_ns) & (all_batches["start_ns"] <= last_ns))
    else:
        used = np.unique(pairs["batch"]) if len(pairs) else np.arange(len(all_batches))[-1:]
    its = all_batches[used]
    requests = np.array([(one.start_ns, one.end_ns) for one in served], dtype=np.int64)
    work = np.array([edges for one in served for edges in one.work], dtype=np.int64).reshape(-1, 2)
    whose = np.repeat(np.arange(count), [len(one.work) for one in served])
    edges = [  # some have not ended
        (start, max(start, min(end, one.end_ns + 1))) for one in served for start, end in one.handing
    ]
    handing = np.array(edges, dtype=np.int64).reshape(-1, 2)
    handed = np.repeat(np.arange(count), [len(one.handing) for one in served])
    starts = np.concatenate([requests[:, 0], work[:, 0], handing[:, 0], its["start_ns"]])
    ends = np.concatenate([requests[:, 1], work[:, 1], handing[:, 1], its["end_ns"]])
    before = count + len(work) + len(handing)
    numbers = np.arange(1, len(starts) + 1)
    none, lengths = np.zeros(len(starts), dtype=np.int64), ends - starts
    trace = Trace(
        sites=(_REQUEST, _WORK, _HANDING, *(Site(name, "op") for name in batches.names)),
        errors=("Error",),
        span_id=numbers,
        parent_id=none,
        root_id=numbers,
        thread_id=np.concatenate([none[:before], its["thread"].astype(np.int64) + 1]),
        task_id=none,
        start_ns=starts,
        end_ns=ends,
        active_ns=lengths,
        self_ns=lengths,
        site=np.concatenate([np.repeat([0, 1, 2], [count, len(work), len(handing)]), its["name"] + 3]).astype(np.int32),
        error=np.concatenate([[0 if one.is_lost else NONE for one in served], none[count:] + NONE]).astype(np.int32),
        clipped=np.zeros(len(starts), dtype=np.bool_),
        device=DeviceIntervals.none(),
        attributes=_Said(
            [one.attributes for one in served],
            before + np.flatnonzero(its["says_weight"]),
            count + len(work) + np.arange(len(handing)),
        ),
        remote={},
    )
    of = np.concatenate([np.arange(count), whose, handed, np.full(len(its), NONE)])
    batch = before + np.searchsorted(used, pairs["batch"])
    request = np.repeat(np.arange(count), [len(one.pairs) for one in served])
    idle = np.setdiff1d(np.arange(before, len(starts)), batch)  # which serve none of these, and may be what stalls them
    batch, request = np.concatenate([batch, idle]), np.concatenate([request, np.full(len(idle), NONE)])
    weight = np.concatenate([pairs["weight"], np.zeros(len(idle), dtype=np.int64)])
    order = np.argsort(batch, kind="stable")
    joined = Joined(
        rows=np.arange(count),
        of=of,
        foreign=np.zeros(0, dtype=np.int64),
        keys={},
        served=each_once(Served(batch[order], request[order], weight[order], ("",) * len(order))),
        unbound=0,
    )
    return trace, joined
