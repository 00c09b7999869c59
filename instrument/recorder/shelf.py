"""The bounds of the shelf, and the names of its losses.

The shelf is in C (`_recorder_shelf.h`). It puts rows of requests that have not ended aside by their root, until it is
decided what they become.
"""

from __future__ import annotations

from instrument.recording.rows import Row

Held = tuple[Row, int]
"""A row and the native id of its thread."""

HELD_ROWS = 200_000
DECIDED_ROOTS = 10_000
"""Rows of open requests, and roots that were kept or passed, that are remembered; the oldest go first."""

BEYOND = "spans beyond spans_per_request"
TOO_LONG = "spans of requests that stayed open too long"


def is_sampled(root_id: int, sample: float) -> bool:
    """Return the same answer for every span of a tree: its root's id, scrambled by Knuth's multiplicative hash."""
    return (root_id * 0x9E3779B97F4A7C15 & (1 << 64) - 1) < sample * (1 << 64)
