"""Device times of single spans: how long devices worked for each by its own intervals."""

from __future__ import annotations

import numpy as np

from instrument.trace.columns import Bools, Int64s, Trace
from instrument.trace.forest import NONE
from instrument.trace.groups import places_of
from instrument.trace.intervals import lengths_by_group


def device_times(trace: Trace, rows: Int64s) -> tuple[Int64s, Bools]:
    """Of some rows how long devices worked for each, and whether any of that was timed."""
    its = trace.device
    numbers = places_of(rows, len(trace))[its.row]
    wanted = numbers != NONE
    lengths_ns = lengths_by_group(numbers[wanted], its.start_ns[wanted], its.end_ns[wanted], len(rows))
    timed = np.zeros(len(rows), dtype=np.bool_)
    timed[numbers[wanted & its.timed]] = True
    return lengths_ns, timed
