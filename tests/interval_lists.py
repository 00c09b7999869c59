"""Intervals as lists, for tests that say what is expected of a few."""

from __future__ import annotations

from collections.abc import Iterable

from instrument.recording.spans import Interval


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Intervals that overlap or touch as one; sorted and disjoint. An empty one that touches nothing stays."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(disjoint: Iterable[Interval]) -> int:
    """How long disjoint intervals are in all."""
    return sum(end - start for start, end in disjoint)
