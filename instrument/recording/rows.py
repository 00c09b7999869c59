"""The two forms of a row, which is a finished span: 64 bytes in a recording, or a tuple with the indices below."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import log2
from typing import Any, Final

from instrument.recording import memory_layout

Row = tuple[int, int, int, int, int, int, int, int, int, "str | None", "dict[Any, Any] | None"]
"""A row as a tuple, with the arguments of `row_of`."""

NODE: Final = 0
"""The index of the node (call path) in a row."""
SPAN_ID: Final = 1
PARENT_ID: Final = 2
ROOT_ID: Final = 3
TASK: Final = 4
START_NS: Final = 5
END_NS: Final = 6
CHILDREN_NS: Final = 7
"""The index of the children's time minus the span's own waits, in ns. The active time minus this value is the self time
including waits."""
ACTIVE_NS: Final = 8
"""The index of the active time in ns, which is -1 if it equals the total time."""
ERROR: Final = 9
"""The index of the name of the exception, which is None without an error."""
ATTRIBUTES: Final = 10
"""The index of the attributes, which are None if the span has none."""
MORE: Final = ACTIVE_NS
"""The index of the first detail of a row. Few rows have details. Their types are those of `More`."""

More = tuple[int, "str | None", "dict[Any, Any] | None"]

REQUEST_BIT = 1
"""The bit of a span id that only root requests have. So a root's id shows if the root is a request."""

PACKED_ROW = memory_layout.ROW.packer()
"""The 64-byte form of a row. Its field `rare` is 0, 8 if the row has details, or 1 plus twice the active time."""

_unpack = PACKED_ROW.iter_unpack


STREAM = object()
"""The key of the stream or `Work` to time on a device, among a span's attributes. Readers of spans do not get it."""


def row_of(
    node: int,
    span_id: int,
    parent_id: int,
    root_id: int,
    task: int,
    start_ns: int,
    end_ns: int,
    children_ns: int = 0,
    active_ns: int = -1,
    error: str | None = None,
    attributes: dict[Any, Any] | None = None,
) -> Row:
    """Return a row with these values."""
    return node, span_id, parent_id, root_id, task, start_ns, end_ns, children_ns, active_ns, error, attributes


def with_more(row: Row, more: More) -> Row:
    """Return the row with these details."""
    return *row[:MORE], *more


def unpacked_rows(data: bytes) -> Iterator[Row]:
    """Yield the rows in bytes of a recording, without their details."""
    for span_id, parent_id, root_id, start_ns, end_ns, children_ns, rare, node, task in _unpack(data):
        active_ns = rare >> 1 if rare & 1 else -1
        yield node, span_id, parent_id, root_id, task, start_ns, end_ns, children_ns, active_ns, None, None


def is_request_root(row: Row) -> bool:
    """Return True for the row of a request that is the root of its tree."""
    return row[SPAN_ID] == row[ROOT_ID] and bool(row[ROOT_ID] & REQUEST_BIT)


RANDOM_BITS = 56
"""The number of random bits at the end of a trace id. Samplers decide by them (W3C Trace Context, level 2)."""


@lru_cache(maxsize=64)
def threshold_of(sample: float) -> int:
    """Return the lowest value of a trace id's random bits at which the share `sample` of traces is sampled.

    It is rounded to four hexadecimal digits after leading digits of F, as OpenTelemetry's `tracestate` has it.
    """
    if sample <= 0:
        return 1 << RANDOM_BITS
    digits = min(4 + max(int(-log2(min(sample, 1.0)) / 4), 0), 14)
    dropped = RANDOM_BITS - 4 * digits
    most: int = 16**digits
    return min(round((1 - min(sample, 1.0)) * most), most - 1) << dropped


def is_sampled(trace_id: int, sample: float) -> bool:
    """Return True if a trace is in the sampled share of traces. The answer is the same for all its spans."""
    return trace_id & (1 << RANDOM_BITS) - 1 >= threshold_of(sample)


def state_of_share(sample: float) -> str:
    """Return the `tracestate` that names the sampled share of traces, "" for a share of 0 or 1."""
    if not 0 < sample < 1:
        return ""
    return f"ot=th:{threshold_of(sample):014x}".rstrip("0")
