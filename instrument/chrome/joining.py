"""Joining of a trace with that of torch.profiler: its kernels, allocations and operations beside the spans of ours.

Both files have the wall clock of their times: torch's by its base, ours by the pair of clocks of its origin.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from datetime import datetime, timezone
from operator import attrgetter
from typing import TYPE_CHECKING

from instrument.errors import TraceError
from instrument.recording.allocations import Allocations
from instrument.recording.spans import FLOPS, Flops, Trace, flops_told

if TYPE_CHECKING:
    from instrument.trace.file import Saved

OURS = "trace of instrument"
TORCHS = "trace of torch.profiler"


def join_saved(saved: Saved, beside: Saved) -> Saved:
    """Join two files as `join` does, with no object for any span."""
    return replace(saved, facts=join(saved.facts, beside.trace()))


def join(trace: Trace, beside: Trace) -> Trace:
    """Return a trace of ours with the kernels, allocations and floating-point operations in a trace of torch.profiler,
    moved to our clock.

    Raises `TraceError` where the two are not what they should be, or of other processes or times.
    """
    # These import numpy, which a service alone has no use for.
    from instrument.trace.kernel_columns import KernelColumns
    from instrument.trace.of_spans import columns_of_spans

    if trace.origin.recorder == "other" or beside.origin.recorder != "other":
        found = [TORCHS if one.origin.recorder == "other" else OURS for one in (trace, beside)]
        raise TraceError(
            f"asked to join a {OURS} with a {TORCHS}, found a {found[0]} and a {found[1]}; give ours first"
        )
    columns = columns_of_spans(beside.spans)
    rows = columns.attributes.having(FLOPS)
    counts = [flops_told({FLOPS: value}) for value in columns.attributes.values(FLOPS, rows)]
    its = zip(columns.thread_id[rows].tolist(), columns.start_ns[rows].tolist(), counts, strict=True)
    flops = sorted((Flops(*one) for one in its if one[2]), key=attrgetter("at_ns"))
    if beside.watched is None and not flops:
        raise TraceError(
            "asked to join a trace of torch.profiler, found neither kernels nor allocations nor shapes of operators in "
            "it; record it with ProfilerActivity.CUDA, profile_memory=True or record_shapes=True"
        )
    ours, theirs = trace.origin.pid, beside.origin.pid
    if ours and theirs and ours != theirs:
        raise TraceError(f"asked to join two traces of one process, found those of {ours} and {theirs}")
    moved_ns = beside.origin.realtime_of(0) - trace.origin.realtime_of(0)
    first, last = (at_ns + moved_ns for at_ns in beside.watched or (beside.start_ns, beside.end_ns))
    if first >= trace.end_ns or last <= trace.start_ns:
        raise TraceError(
            f"asked to join two traces of one time, found ours from {_told(trace, trace.start_ns, trace.end_ns)} and "
            f"torch.profiler's from {_told(trace, first, last)}; give a window that torch.profiler watched"
        )
    first, last = max(first, trace.start_ns), min(last, trace.end_ns)
    try:
        kernels = KernelColumns.of(beside.kernels).moved(moved_ns)
    except (OverflowError, ValueError) as problem:
        raise TraceError(f"cannot join the traces: {problem}") from problem
    allocations = Allocations.of(beside.allocations).moved(moved_ns)
    at_ns = attrgetter("at_ns")
    return replace(
        trace,
        kernels=kernels,
        allocations=allocations[
            bisect_left(allocations, first, key=at_ns) : bisect_right(allocations, last, key=at_ns)
        ],
        watched=None if beside.watched is None else (first, last),
        flops=[
            one for one in (Flops(id_, at + moved_ns, count) for id_, at, count in flops) if first <= one.at_ns < last
        ],
    )


def _told(trace: Trace, *times_ns: int) -> str:
    return " to ".join(
        datetime.fromtimestamp(trace.origin.realtime_of(at_ns) / 1e9, timezone.utc).strftime("%F %T.%f")
        for at_ns in times_ns
    )
