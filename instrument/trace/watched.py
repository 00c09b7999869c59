"""What torch.profiler saw, as columns of a file: kernels, and the allocations of torch's allocators.

Both are in the order of time, so that their times are kept as steps; threads stand once in a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.recording.allocations import Allocation, Allocations
from instrument.recording.spans import WORK, Kernel
from instrument.trace.columns import FARTHEST_NS, Int64s, lie_within
from instrument.trace.groups import ranked
from instrument.trace.kernel_columns import KernelColumns
from instrument.trace.layout import Column, Columns, narrow, steps, summed
from instrument.trace.text import clean

ROW = np.dtype([(known.name, np.int64) for known in fields(Allocation)])
"""An allocation, with the names of `Allocation`."""

INT64 = np.iinfo(np.int64)

PLAIN = ("size_bytes", "address")
LEVELS = ("allocated_bytes", "reserved_bytes")
"""Of an allocation what differs from one to the next, and what changes little."""


def rows_and_times(found: Sequence[Allocation]) -> tuple[NDArray[Any], Int64s]:
    """The rows, whose own times count from wherever they were counted from, and the times on the clock.

    A time that no clock reads is told as the first or last one that none reads. Raises `OverflowError` for numbers
    beyond 64 bits.
    """
    packed = Allocations.of(found)
    rows, base_ns = np.frombuffer(packed.rows, dtype=ROW), packed.base_ns
    first, last = max(-FARTHEST_NS - base_ns, int(INT64.min)), min(FARTHEST_NS - base_ns, int(INT64.max))
    return rows, rows["at_ns"].clip(first, last) + base_ns


def packed_kernels(found: Sequence[Kernel], base_ns: int) -> tuple[dict[str, Column], list[str]]:
    """Columns of kernels, times counted from a base, and the table of their names."""
    its = KernelColumns.of(found)
    names: dict[str, int] = {}
    of_name = np.array([names.setdefault(clean(name), len(names)) for name in its.names], dtype=np.int64)
    kinds = np.array([WORK.index(kind) for kind in its.kinds], dtype=np.int64)
    threads, thread = ranked(its.thread_id)
    return {
        "kernel_name": narrow(of_name[its.name]),
        "kernel_kind": narrow(kinds[its.kind]),
        "kernel_device": narrow(its.device),
        "kernel_stream": narrow(its.stream),
        "kernel_start_ns_steps": steps(its.start_ns - base_ns),
        "kernel_total_ns": narrow(its.end_ns - its.start_ns),
        "kernel_thread": narrow(thread),
        "kernel_thread_ids": threads,
        "kernel_waited_ns": narrow(np.where(its.thread_id == 0, 0, its.start_ns - its.launched_ns)),
    }, list(names)


def unpacked_kernels(columns: Columns, names: Sequence[str], base_ns: int) -> KernelColumns:
    """The kernels again. Raises `ValueError` and `LookupError` for what is damaged."""
    start_ns = summed(columns["kernel_start_ns_steps"]) + base_ns
    thread_id = _of_table(columns, "kernel_thread")
    end_ns = start_ns + columns["kernel_total_ns"]
    launched_ns = np.where(thread_id == 0, 0, start_ns - columns["kernel_waited_ns"])
    name, kind = columns["kernel_name"], columns["kernel_kind"]
    numbers = [columns[f"kernel_{known}"].astype(np.int64) for known in ("device", "stream")]
    numbers += [start_ns, end_ns, thread_id, launched_ns]
    is_sound = {len(name), len(kind), *map(len, numbers)} == {len(start_ns)}
    is_sound = is_sound and lie_within(name, 0, len(names)) and lie_within(kind, 0, len(WORK))
    is_sound = is_sound and all(
        lie_within(times, -FARTHEST_NS, FARTHEST_NS) for times in (start_ns, end_ns, launched_ns)
    )
    if not is_sound or (end_ns < start_ns).any() or len(set(names)) != len(names):
        raise ValueError("a kernel in it is none; it is damaged")
    return KernelColumns(tuple(names), WORK, name.astype(np.int32), kind.astype(np.int32), *numbers)


def packed_allocations(found: Sequence[Allocation], base_ns: int) -> dict[str, Column]:
    """Columns of allocations, times counted from a base."""
    its = Allocations.of(found)
    rows = np.frombuffer(its.rows, dtype=ROW)
    threads, thread = ranked(rows["thread_id"])
    return {
        "allocation_device": narrow(rows["device"]),
        "allocation_at_ns_steps": steps(rows["at_ns"] + (its.base_ns - base_ns)),
        "allocation_thread": narrow(thread),
        "allocation_thread_ids": threads,
        **{f"allocation_{name}": narrow(rows[name]) for name in PLAIN},
        **{f"allocation_{name}_steps": steps(rows[name]) for name in LEVELS},
    }


def unpacked_allocations(columns: Columns, base_ns: int) -> Allocations:
    thread_id = _of_table(columns, "allocation_thread")
    known: dict[str, NDArray[Any]] = {"device": columns["allocation_device"], "thread_id": thread_id}
    known |= {name: columns[f"allocation_{name}"] for name in PLAIN}
    known |= {name: summed(columns[f"allocation_{name}_steps"]) for name in ("at_ns", *LEVELS)}
    if {len(column) for column in known.values()} != {len(thread_id)}:
        raise ValueError("an allocation in it is none; it is damaged")
    rows = np.empty(len(thread_id), dtype=ROW)
    for name, column in known.items():
        rows[name] = column
    return Allocations(rows.tobytes(), base_ns)


def _of_table(columns: Columns, name: str) -> Int64s:
    table, places = columns[f"{name}_ids"], columns[name]
    if not lie_within(places, 0, len(table)):
        raise ValueError("it names what is in none of its tables; it is damaged")
    return np.asarray(table.astype(np.int64)[places])
