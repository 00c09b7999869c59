"""Columns of whole numbers as text for a page: few bytes for small numbers, whatever the greatest one is."""

from __future__ import annotations

import base64

import numpy as np
from numpy.typing import NDArray

from instrument.trace.columns import Int64s

BITS = 7
"""Of a number in each byte; the eighth says that more follow."""


def varints(numbers: NDArray[np.int64]) -> bytes:
    """The numbers one after the other, of each the lowest bits first, its sign in the lowest (LEB128, zigzag)."""
    signed = np.asarray(numbers, dtype=np.int64)
    left = ((signed << 1) ^ (signed >> 63)).view(np.uint64)
    lengths = np.ones(len(left), dtype=np.int64)
    for more in range(1, 10):
        lengths += left >= np.uint64(1 << (BITS * more))
    ends = np.cumsum(lengths)
    out = np.zeros(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
    begins = ends - lengths
    for place in range(int(lengths.max(initial=0))):
        at = np.flatnonzero(lengths > place)
        low = (left[at] >> np.uint64(BITS * place)) & np.uint64(0x7F)
        out[begins[at] + place] = low.astype(np.uint8) | ((lengths[at] > place + 1).astype(np.uint8) << BITS)
    return out.tobytes()


def column_text(numbers: NDArray[np.int64]) -> str:
    """A column as base64 of `varints`."""
    return base64.b64encode(varints(numbers)).decode("ascii")


def steps_text(numbers: Int64s) -> str:
    """A column by the differences of its numbers, which are small where they are in order."""
    return column_text(np.diff(numbers, prepend=np.int64(0)))
