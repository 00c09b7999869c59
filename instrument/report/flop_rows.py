"""Floating-point operations by operator: a part of the `operators` view, if spans report their operations.

They are in the attribute `flops` of operators in traces of torch.profiler with shapes, of our spans next to such a
trace, and of scopes that set it. The value is the span's own work. A row is the sum of its calls and of all spans below
them on their line, each span once. The FLOPs column of the Operator Summary of `paddle.profiler` is the same, as are
the Mflops and Gflops/s of Theano's Apply section. But Theano divides the operations of one call by the time of all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from instrument.recording.spans import FLOPS, flops_told
from instrument.report.section import Section
from instrument.report.table import Ratio, bounded, compact, share, tenths
from instrument.report.units import rows_open
from instrument.report.view import Options, Recording
from instrument.trace.call_tree import lengths_below
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.forest import NONE, and_above
from instrument.trace.groups import distinct, places_of
from instrument.trace.self_times import Clock
from instrument.trace.watched import KernelColumns


@dataclass(frozen=True, slots=True)
class FlopRow:
    """The operations of the calls of one operator and of the spans below them on their line.

    `calls` are those with operations of their own or below; an inner call of the same name does not count. They took
    `time_ns` `on` devices (`GPU`) if each of them asked for work there, or on the host (`CPU`) if none did. Else the
    time is None. `ratio` is the share of all reported operations. A row with `remaining` replaces that many.
    """

    name: str
    kind: str
    calls: int
    flops: int
    on: str
    time_ns: int | None
    ratio: float | None
    remaining: int = 0

    per_call = Ratio("flops", of="calls")
    rate_gflop_s = Ratio("flops", of="time_ns")
    """The 10^9 operations per second over the time of the calls."""


@dataclass(frozen=True, slots=True)
class FlopTable:
    """All reported operations, and the rows with the most first. `elsewhere` operations ran without an open span, or
    with spans of several tasks open, and are in no row."""

    flops: int
    elsewhere: int
    rows: tuple[FlopRow, ...]

    def section(self) -> Section:
        """Return the table, with a note on the operations in no row."""
        part = f"{tenths(self.elsewhere, self.flops)} ran where no span was open, or those of several tasks"
        elsewhere = [f"{part}: they are in no row."] if self.elsewhere else []
        return Section(
            "Operations", self.rows,
            "name=Operator|calls=Calls|flops=FLOPs|per_call=Per call|ratio=Of all|on=On|time_ns=Time|"
            "rate_gflop_s=GFLOP/s",
            (
                "FLOPs: of the calls and all below them; a multiplication and an addition are two.",
                "Time: of the calls, or of their device work if each of them has some.",
                *elsewhere,
            ),
            texts={
                "flops": lambda row, unit: compact(row.flops, 10),
                "per_call": lambda row, unit: compact(row.per_call, 10),
            },
            widths=7,
        )  # fmt: skip


def flop_table(recording: Recording, kinds: Collection[str], options: Options) -> FlopTable | None:
    """Return the table of spans of the kinds and of other spans with own operations, None without operations.

    `rows` and `least_ns` (of the time of a row's calls) bound it. The cost is 1 us per span with operations.
    """
    trace = recording.columns
    first, last = recording.trace.coverage
    having = trace.attributes.having(FLOPS)
    begins = trace.start_ns[having]
    having = having[(first <= begins) & (begins < last)]
    values = trace.attributes.values(FLOPS, having)
    counts = [flops_told({FLOPS: value}) for value in values]
    flops_of_rows = [(row, count) for row, count in zip(having.tolist(), counts, strict=True) if count]
    launches = [launch for launch in recording.trace.flops if launch.flops > 0 and first <= launch.at_ns < last]
    elsewhere = 0
    if launches:
        thread_ids, times_ns = (np.array([launch[at] for launch in launches], dtype=np.int64) for at in (0, 1))
        for number, launch in zip(rows_open(recording, thread_ids, times_ns).tolist(), launches, strict=True):
            if number < 0:
                elsewhere += launch.flops
            else:
                flops_of_rows.append((number, launch.flops))
    if not flops_of_rows and not elsewhere:
        return None
    whole = elsewhere + sum(count for _, count in flops_of_rows)
    tree = _Tree(trace, flops_of_rows, kinds)
    launched_ns = _launched_ns(recording, [row for calls in tree.calls.values() for row in calls])

    def row(name: str, kind: str) -> FlopRow:
        flops, calls = tree.flops[name, kind], tree.calls[name, kind]
        return FlopRow(name, kind, len(calls), flops, *_time_of(trace, calls, launched_ns), share(flops, whole))

    def rest(rows: Sequence[FlopRow]) -> FlopRow:
        # Rows may be nested: each span's operations count once, but times would count some spans twice.
        flops = tree.flops_of_any({(row.name, row.kind) for row in rows})
        return FlopRow("", "", sum(row.calls for row in rows), flops, "", None, share(flops, whole), len(rows))

    rows = sorted((row(*key) for key in tree.calls), key=lambda row: (-row.flops, row.name, row.kind))
    return FlopTable(whole, elsewhere, bounded(rows, options, lambda row: row.time_ns or 0, rest))


class _Tree:
    """The spans with operations and the spans around them on their lines, each once.

    By name and kind `calls` are the outermost calls of a line, and `flops` the operations of the outermost calls and
    all below. For another kind than the given ones `flops` has only the own operations of spans with that name.
    """

    def __init__(self, trace: Columns, flops_of_rows: Sequence[tuple[int, int]], kinds: Collection[str]) -> None:
        rows, self._around = _lines(trace, [row for row, _ in flops_of_rows])
        numbers = {row: number for number, row in enumerate(rows)}
        self._own_flops = [0] * len(rows)
        for row, count in flops_of_rows:
            self._own_flops[numbers[row]] += count
        names: dict[tuple[str, str], int] = {}
        places = trace.site[rows].tolist()
        sites = {place: trace.sites[place] for place in dict.fromkeys(places)}
        number_by_place = {place: names.setdefault((site.name, site.kind), len(names)) for place, site in sites.items()}
        self._names = names
        self._name_of = [number_by_place[place] for place in places]
        self._is_asked = [kind in kinds for _, kind in names]
        below = self._own_flops.copy()
        for number, around in reversed(list(enumerate(self._around))):
            if around != NONE:
                below[around] += below[number]
        sums, calls = [0] * len(names), [dict[int, None]() for _ in names]
        for number, (name, outermost) in enumerate(zip(self._name_of, self._outermost(), strict=True)):
            if self._is_asked[name]:
                counted = below[number] if outermost == number else 0
                calls[name][outermost] = None
            elif counted := self._own_flops[number]:
                calls[name][outermost] = None
            sums[name] += counted
        self.flops = {name: sums[at] for name, at in names.items()}
        self.calls = {name: [rows[number] for number in calls[at]] for name, at in names.items() if calls[at]}

    def _outermost(self) -> list[int]:
        """Return the outermost span around each span that has its name."""
        name, around = np.array(self._name_of, dtype=np.int64), np.array(self._around, dtype=np.int64)
        outermost, up = np.arange(len(name)), around.copy()
        inner = np.flatnonzero(up != NONE)
        while len(inner):
            alike = inner[name[up[inner]] == name[inner]]
            outermost[alike] = up[alike]
            up[inner] = around[up[inner]]
            inner = inner[up[inner] != NONE]
        numbers: list[int] = outermost.tolist()
        return numbers

    def flops_of_any(self, names: Collection[tuple[str, str]]) -> int:
        """Return the operations of spans of some names and kinds, and of the spans below them."""
        is_wanted = [name in names for name in self._names]
        flops, inside = 0, list[bool]()
        for name, around, count in zip(self._name_of, self._around, self._own_flops, strict=True):
            inside.append((around != NONE and inside[around]) or (is_wanted[name] and self._is_asked[name]))
            flops += count if is_wanted[name] or inside[-1] else 0
        return flops


def _lines(trace: Columns, some: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return some rows and the rows around them on their lines, each once and after its parent. Return also the number
    of each one's parent, `NONE` without a parent."""
    rows = np.flatnonzero(and_above(trace.around, np.array(some, dtype=np.int64)))
    rows = rows[np.argsort(trace.level[rows], kind="stable")]
    return rows.tolist(), places_of(rows, len(trace))[trace.around[rows]].tolist()


def _launched_ns(recording: Recording, calls: Sequence[int]) -> Int64s:
    """Return the time of devices on the work of each call by row, in ns, 0 without any. The kernels of torch.profiler
    count by launching thread and time. Without any, the device intervals of the call and of spans below it on its line
    count."""
    trace, columns = recording.columns, KernelColumns.of(recording.trace.kernels)
    rows = distinct(np.array(calls, dtype=np.int64))
    kernels = np.flatnonzero((columns.thread_id != 0) & (columns.kind == columns.place_of_kind("kernel")))
    device_ns = np.zeros(len(trace), dtype=np.int64)
    if len(kernels):
        clock = Clock.of(columns.thread_id[kernels], columns.launched_ns[kernels])
        launches = clock.numbers(columns.thread_id[kernels], columns.launched_ns[kernels])
        order = np.argsort(launches, kind="stable")
        sums = np.concatenate([[0], np.cumsum((columns.end_ns - columns.start_ns)[kernels[order]])])
        on_known = rows[clock.knows(trace.thread_id[rows])]
        first, end = (
            np.searchsorted(launches[order], clock.numbers(trace.thread_id[on_known], times[on_known]))
            for times in (trace.start_ns, trace.end_ns)
        )
        device_ns[on_known] = sums[end] - sums[first]
    has_none = np.zeros(len(trace), dtype=np.bool_)
    has_none[rows] = device_ns[rows] == 0
    with_intervals, lengths_ns = _device_ns(trace, has_none)
    device_ns[with_intervals] = lengths_ns
    return device_ns


def _device_ns(trace: Columns, is_call: Bools) -> tuple[Int64s, Int64s]:
    """Return the calls with device work of their own or below them on their line, and its time."""
    intervals = trace.device
    intervals = intervals.only(intervals.timed & (intervals.start_ns < intervals.end_ns))
    return lengths_below(trace.around, is_call, intervals.row, intervals.start_ns, intervals.end_ns)


def _time_of(trace: Columns, calls: Sequence[int], launched_ns: Int64s) -> tuple[str, int | None]:
    """Return the place and the time of some calls, "" and None if the places differ."""
    rows = np.array(calls, dtype=np.int64)
    on_device = launched_ns[rows][launched_ns[rows] > 0]
    if len(on_device) == len(rows):
        return "GPU", int(on_device.sum())
    return ("", None) if len(on_device) else ("CPU", int(trace.total_ns[rows].sum()))
