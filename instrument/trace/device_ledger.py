"""Device time of requests: what their own spans had, and their shares of what batches had, given out exactly once.

The device time of a batch is that of its span and of all below it: of each device the union, and these added up. It is
given out as its wall is, without what batches within it had of the device. Other spans of a request have theirs
likewise, outside of batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from instrument.recording.spans import BATCH_KEYS
from instrument.trace.columns import Int64s, Trace
from instrument.trace.forest import NONE, nearest
from instrument.trace.groups import Groups, numbered
from instrument.trace.intervals import Unions, union_by_group
from instrument.trace.joined import Joined
from instrument.trace.ledger import own_lengths, shares


@dataclass(frozen=True)
class DeviceLedger:
    """`own_ns` and `shared_ns` of each request, by its place.

    `batch_ns` is of each row, 0 of what is no batch, and `given_ns` of each pair of a batch and a request how much that
    request is given: over those of a batch it adds up to what the batch had for itself.
    """

    own_ns: Int64s
    shared_ns: Int64s
    batch_ns: Int64s
    given_ns: Int64s


def device_ledger(trace: Trace, joined: Joined) -> DeviceLedger:
    """Return the device time of each request."""
    its, served = trace.device, joined.served
    timed = np.flatnonzero(its.timed)
    is_batch = np.zeros(len(trace), dtype=np.bool_)
    is_batch[trace.attributes.having(BATCH_KEYS)] = True
    rows = its.row[timed]
    batch = nearest(trace.parent, is_batch)[rows].astype(np.int64) if len(timed) else rows.astype(np.int64)
    request = np.where(batch == NONE, joined.of[rows], NONE)
    of_batches, owners, devices = _busy(trace, timed[batch != NONE], batch[batch != NONE])
    batch_ns = Groups(owners[of_batches.groups], len(trace)).sums(of_batches.ends - of_batches.starts).astype(np.int64)
    of_requests, requests, _ = _busy(trace, timed[request != NONE], request[request != NONE])
    own = Groups(requests[of_requests.groups], len(joined.rows)).sums(of_requests.ends - of_requests.starts)
    given = shares(served, own_lengths(trace, served, of_batches, owners, devices))
    return DeviceLedger(
        own.astype(np.int64), Groups(served.request, len(joined.rows)).sums(given), batch_ns, given
    )  # fmt: skip


def _busy(trace: Trace, intervals: Int64s, owners: Int64s) -> tuple[Unions, Int64s, Int64s]:
    """The unions of the intervals of each owner on each device, by groups, and the owner and the device of each."""
    its = trace.device
    groups, firsts = numbered(owners, its.device[intervals])
    found = union_by_group(groups, its.start_ns[intervals], its.end_ns[intervals])
    return found, owners[firsts], its.device[intervals[firsts]].astype(np.int64)
