"""Device time of requests: what their own spans had, and their shares of what batches had, given out exactly once.

The device time of a batch is that of its span and of all below it: of each device the union, and these added up. It is
given out as its wall is. Other spans of a request have theirs likewise, outside of batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from instrument.recording.spans import BATCH_KEYS
from instrument.trace.columns import Int64s, Trace
from instrument.trace.forest import NONE, nearest
from instrument.trace.groups import Groups, numbered
from instrument.trace.intervals import lengths_by_group
from instrument.trace.joined import Joined
from instrument.trace.ledger import shares


@dataclass(frozen=True)
class DeviceLedger:
    """`own_ns` and `shared_ns` of each request, by its place.

    `batch_ns` is of each row, 0 of what is no batch, and `given_ns` of each pair of a batch and a request how much that
    request is given: over those of a batch it adds up to the batch's.
    """

    own_ns: Int64s
    shared_ns: Int64s
    batch_ns: Int64s
    given_ns: Int64s


def device_ledger(trace: Trace, joined: Joined) -> DeviceLedger:
    """What each request had of devices."""
    its, served = trace.device, joined.served
    timed = np.flatnonzero(its.timed)
    is_batch = np.zeros(len(trace), dtype=np.bool_)
    is_batch[trace.attributes.having(BATCH_KEYS)] = True
    rows = its.row[timed]
    batch = nearest(trace.parent, is_batch)[rows].astype(np.int64) if len(timed) else rows.astype(np.int64)
    request = np.where(batch == NONE, joined.of[rows], NONE)
    of_batches = _sums(trace, timed[batch != NONE], batch[batch != NONE], len(trace))
    own = _sums(trace, timed[request != NONE], request[request != NONE], len(joined.rows))
    given = shares(served, of_batches)
    return DeviceLedger(own, Groups(served.request, len(joined.rows)).sums(given), of_batches, given)


def _sums(trace: Trace, intervals: Int64s, owners: Int64s, count: int) -> Int64s:
    """Of each owner the unions of its intervals on each device, added up."""
    its = trace.device
    groups, firsts = numbered(owners, its.device[intervals])
    lengths = lengths_by_group(groups, its.start_ns[intervals], its.end_ns[intervals], len(firsts))
    return np.asarray(Groups(owners[firsts], count).sums(lengths), dtype=np.int64)
