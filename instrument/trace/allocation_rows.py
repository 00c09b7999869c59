"""The allocations of a trace as numpy's structured rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.recording.allocations import Allocation, Allocations
from instrument.trace.columns import FARTHEST_NS, Int64s

ROW = np.dtype([(known.name, np.int64) for known in fields(Allocation)])
"""An allocation, with the names of `Allocation`."""

INT64 = np.iinfo(np.int64)


def rows_and_times(found: Sequence[Allocation]) -> tuple[NDArray[Any], Int64s]:
    """The rows, whose own times count from wherever they were counted from, and the times on the clock.

    A time that no clock reads is told as the first or last one that none reads. Raises `OverflowError` for numbers
    beyond 64 bits.
    """
    packed = Allocations.of(found)
    rows, base_ns = np.frombuffer(packed.rows, dtype=ROW), packed.base_ns
    first, last = max(-FARTHEST_NS - base_ns, int(INT64.min)), min(FARTHEST_NS - base_ns, int(INT64.max))
    return rows, rows["at_ns"].clip(first, last) + base_ns
