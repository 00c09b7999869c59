"""Device intervals as columns, those of a span one after another."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from instrument.recording.interval_ring import LABELS
from instrument.trace.columns import DeviceIntervals, Int64s
from instrument.trace.forest import NONE, rows_of

CELL = np.dtype(
    [(name, "i8") for name in ("span_id", "device", "stream", "start_ns", "end_ns", "label", "uncertainty_ns")]
)
"""One, as `instrument.recording.interval_ring` packs it. A stream is an address, or a small number."""


def cells_in(packed: bytes) -> NDArray[np.void]:
    """The intervals that a ring has packed."""
    return np.frombuffer(packed, dtype=CELL)


def device_intervals(cells: NDArray[np.void], span_id: Int64s) -> DeviceIntervals:
    """Of some intervals those of spans by their ids, each one's by time. Those of other spans are left out."""
    rows = rows_of(span_id, cells["span_id"])
    order = np.lexsort((cells["start_ns"], rows))
    order = order[rows[order] != NONE]
    its = cells[order]
    return DeviceIntervals(
        row=rows[order],
        device=its["device"].copy(),
        stream=its["stream"].copy(),
        start_ns=its["start_ns"].copy(),
        # Where a clock was placed anew between the two, an end may lie before its begin.
        end_ns=np.maximum(its["start_ns"], its["end_ns"]),
        label=its["label"].astype(np.int32),
        uncertainty_ns=its["uncertainty_ns"].copy(),
        labels=LABELS,
    )
