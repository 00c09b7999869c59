"""The call tree of a page: the rows of the view `events` of all threads together, and how wide each is drawn.

A row is as wide as the self times at and below it, so that what is below a row never is wider than it, whatever ran
side by side. What coroutines waited may be left out of it; of devices the width is device time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from instrument.report.event_rows import EventRow
from instrument.report.events_view import events
from instrument.report.page.varints import column_text
from instrument.report.table import safe
from instrument.report.view import Options, Recording

MOST_ROWS = 4000
"""Rows of the tree, at most: the heaviest, and what was left out of a level as one row more."""

DETAIL = "OpDetail"
"""Phases are rows, instances of a layer are one."""

NEVER = -1
"""For a number that does not exist, and for the row above a topmost one: neither is below 0 else."""

GREATEST = (1 << 63) - 1


class CallsTree:
    """The rows in the order of the tree, each after what it is below, and their widths."""

    def __init__(self, recording: Recording, options: Options) -> None:
        asked = replace(options, tracer_option=DETAIL, threads="merged", state="All", rows=MOST_ROWS, corrected=False)
        blocks = events(recording, asked).blocks
        self.rows: tuple[EventRow, ...] = blocks[0].rows if blocks else ()
        self._parents = _parents(self.rows)
        self.names: list[str] = []
        for row, parent in zip(self.rows, self._parents, strict=True):
            # A phase is labelled with what it is a phase of, which here stands above it.
            is_below = row.kind == "phase" and parent != NEVER
            self.names.append(row.name.removeprefix(f"{self.names[parent]}/") if is_below else row.name)

    def widths(self) -> list[int]:
        """Self times at and below each row."""
        return self._with_below([max(row.self_ns, 0) for row in self.rows])

    def running_widths(self) -> list[int]:
        """The same without what coroutines waited."""
        return self._with_below([max(row.self_ns - row.waiting_ns, 0) for row in self.rows])

    def device_widths(self) -> list[int]:
        """Device time of each row, or that of the rows right below where it is more."""
        found, below = [max(row.device_ns, 0) for row in self.rows], [0] * len(self.rows)
        for place in range(len(found) - 1, -1, -1):
            found[place] = max(found[place], below[place])
            if self._parents[place] != NEVER:
                below[self._parents[place]] += found[place]
        return found

    def _with_below(self, own: list[int]) -> list[int]:
        for place in range(len(own) - 1, -1, -1):
            if self._parents[place] != NEVER:
                own[self._parents[place]] += own[place]
        return own

    def document(self) -> dict[str, Any]:
        """The rows as columns."""
        numbers: dict[tuple[str, str], int] = {}
        for name, row in zip(self.names, self.rows, strict=True):
            numbers.setdefault((name, row.kind), len(numbers))
        of_rows = (numbers[name, row.kind] for name, row in zip(self.names, self.rows, strict=True))
        fields = (
            "depth", "calls", "errors", "total_ns", "self_ns", "waiting_ns", "device_ns", "min_ns", "max_ns", "p50_ns",
            "p99_ns", "remaining",
        )  # fmt: skip
        return {
            "names": [[safe(name) or "(no name)", kind] for name, kind in numbers],
            "name": _column(of_rows),
            "width": _column(self.widths()),
            "running": _column(self.running_widths()),
            "on_device": _column(self.device_widths()),
            **{field: _column(getattr(row, field) for row in self.rows) for field in fields},
        }

    def left_out(self) -> list[str]:
        """A sentence on the rows that are no more than a number."""
        together = sum(row.remaining for row in self.rows)
        if not together:
            return []
        return [
            f"The call tree has its {len(self.rows):,} heaviest rows; {together:,} more stand as what remains of their "
            "level, by their own self times, and what is below these is left out."
        ]


def _column(numbers: Iterable[int | None]) -> str:
    found = [NEVER if one is None else min(one, GREATEST) for one in numbers]
    return column_text(np.array(found, dtype=np.int64))


def _parents(rows: Sequence[EventRow]) -> list[int]:
    above: list[int] = []
    found = []
    for place, row in enumerate(rows):
        del above[row.depth :]
        found.append(above[-1] if above else NEVER)
        above.append(place)
    return found
