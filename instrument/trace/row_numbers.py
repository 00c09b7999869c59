"""What rows say themselves of what few have: see `instrument.recording.ring.packed_row`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.trace.columns import Bools, Int64s


def numbers_in(rows: NDArray[Any]) -> tuple[Int64s, Int64s]:
    """The places of the rows that tell their active time as a number, and these times."""
    places = np.flatnonzero(rows["rare"] & 1)
    return places, (rows["rare"][places] >> 1).astype(np.int64)


def has_more(rows: NDArray[Any]) -> Bools:
    """Which rows have more to say, that stands beside them."""
    return np.asarray((rows["rare"] != 0) & (rows["rare"] & 1 == 0))
