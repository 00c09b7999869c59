"""Floating-point operations by operator: part of the `operators` view, where spans tell how many they did.

Spans tell it by their attribute `flops`: operators in traces of torch.profiler that noted shapes, spans of ours that
such a trace was laid beside, and scopes to which it was given. It is what a span did itself; a row adds up what its
calls and all below them on their line did, each call once. That is what the FLOPs column of the Operator Summary of
`paddle.profiler` and the Mflops and Gflops/s of Theano's Apply section are; Theano divides the operations of one call
by the time of all.
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
    """The operations of the calls of one operator, and of what is below them on their line.

    `calls` are those that told any or had any below them; where one is in another of its name the outer one counts.
    They took `time_ns` `on` devices (`GPU`) if each of them asked for work there, on the host (`CPU`) if none did; else
    there is no such time. `ratio` is of all operations that were told. A row with `remaining` replaces that many.
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
    """10^9 operations a second over the time of the calls."""


@dataclass(frozen=True, slots=True)
class FlopTable:
    """All operations that were told, and the rows by how many. `elsewhere` ran where no span was open, or those of
    several tasks, and are in no row."""

    flops: int
    elsewhere: int
    rows: tuple[FlopRow, ...]

    def section(self) -> Section:
        """Return the table, and below it what is in no row."""
        part = f"{tenths(self.elsewhere, self.flops)} ran where no span was open, or those of several tasks"
        elsewhere = [f"{part}: they are in no row."] if self.elsewhere else []
        return Section(
            "Operations", self.rows,
            "name=Operator|calls=Calls|flops=FLOPs|per_call=Per call|ratio=Of all|on=On|time_ns=Time|"
            "rate_gflop_s=GFLOP/s",
            (
                "FLOPs: what calls and all below them were told to have done; a multiplication and an addition: two.",
                "Time: of these calls; where each of them asked a device for work, of that.",
                *elsewhere,
            ),
            texts={
                "flops": lambda row, unit: compact(row.flops, 10),
                "per_call": lambda row, unit: compact(row.per_call, 10),
            },
            widths=7,
        )  # fmt: skip


def flop_table(recording: Recording, kinds: Collection[str], options: Options) -> FlopTable | None:
    """The table of spans of the kinds, and of others that tell operations of their own; None where nothing is told.

    `rows` and `least_ns` (of the time of a row's calls) bound it. Where anything is told, 1 us a span.
    """
    trace = recording.columns
    first, last = recording.trace.held
    having = trace.attributes.having(FLOPS)
    begins = trace.start_ns[having]
    having = having[(first <= begins) & (begins < last)]
    values = trace.attributes.values(FLOPS, having)
    counts = [flops_told({FLOPS: value}) for value in values]
    told = [(row, count) for row, count in zip(having.tolist(), counts, strict=True) if count]
    beside = [one for one in recording.trace.flops if one.flops > 0 and first <= one.at_ns < last]
    elsewhere = 0
    if beside:
        thread_ids, times_ns = (np.array([one[at] for one in beside], dtype=np.int64) for at in (0, 1))
        for number, one in zip(rows_open(recording, thread_ids, times_ns).tolist(), beside, strict=True):
            if number < 0:
                elsewhere += one.flops
            else:
                told.append((number, one.flops))
    if not told and not elsewhere:
        return None
    whole = elsewhere + sum(count for _, count in told)
    tree = _Tree(trace, told, kinds)
    launched_ns = _launched_ns(recording, [row for calls in tree.calls.values() for row in calls])

    def row(name: str, kind: str) -> FlopRow:
        flops, calls = tree.flops[name, kind], tree.calls[name, kind]
        return FlopRow(name, kind, len(calls), flops, *_time_of(trace, calls, launched_ns), share(flops, whole))

    def rest(rows: Sequence[FlopRow]) -> FlopRow:
        # They may lie in one another: each told number counts once, and times would count some twice.
        flops = tree.flops_of_any({(row.name, row.kind) for row in rows})
        return FlopRow("", "", sum(row.calls for row in rows), flops, "", None, share(flops, whole), len(rows))

    rows = sorted((row(*key) for key in tree.calls), key=lambda row: (-row.flops, row.name, row.kind))
    return FlopTable(whole, elsewhere, bounded(rows, options, lambda row: row.time_ns or 0, rest))


class _Tree:
    """The spans that told operations and those around them on their lines, each once: however deep they lie in one
    another, the work is as much as there are of them.

    By name and kind `calls` are the outermost of their line, and `flops` what these and all below them told; of a kind
    that is not asked for, only what spans of that name told themselves.
    """

    def __init__(self, trace: Columns, told: Sequence[tuple[int, int]], kinds: Collection[str]) -> None:
        its, self._around = _lines(trace, [row for row, _ in told])
        numbers = {row: number for number, row in enumerate(its)}
        self._told = [0] * len(its)
        for row, count in told:
            self._told[numbers[row]] += count
        names: dict[tuple[str, str], int] = {}
        places = trace.site[its].tolist()
        sites = {place: trace.sites[place] for place in dict.fromkeys(places)}
        known = {place: names.setdefault((site.name, site.kind), len(names)) for place, site in sites.items()}
        self._names = names
        self._name_of = [known[place] for place in places]
        self._is_asked = [kind in kinds for _, kind in names]
        sums, calls = self._summed()
        self.flops = {name: sums[at] for name, at in names.items()}
        self.calls = {name: [its[number] for number in calls[at]] for name, at in names.items() if calls[at]}

    def _summed(self) -> tuple[list[int], list[dict[int, None]]]:
        """Return the operations by name, and the numbers of the calls."""
        count, name_of, arounds, told = len(self._told), self._name_of, self._around, self._told
        # Each comes after the one around it. Of each the first of those right in it, and the next beside it; those of
        # none at the end.
        below, first, beside = told.copy(), [NONE] * (count + 1), [NONE] * count
        for number in range(count - 1, -1, -1):
            around = arounds[number]
            if around != NONE:
                below[around] += below[number]
            beside[number] = first[around]
            first[around] = number
        sums = [0] * len(self._names)
        calls: list[dict[int, None]] = [{} for _ in sums]
        opened = [NONE] * len(sums)
        number = first[NONE]
        while number != NONE:
            name = name_of[number]
            if opened[name] == NONE:
                opened[name] = number
                if self._is_asked[name]:
                    sums[name] += below[number]
                    calls[name][number] = None
            if told[number] and not self._is_asked[name]:
                sums[name] += told[number]
                calls[name][opened[name]] = None
            inner = first[number]
            while inner == NONE and number != NONE:  # it is over, and maybe those around it
                if opened[name_of[number]] == number:
                    opened[name_of[number]] = NONE
                inner, number = beside[number], arounds[number]
            number = inner
        return sums, calls

    def flops_of_any(self, names: Collection[tuple[str, str]]) -> int:
        """Return the operations of spans of some names and kinds, and below them."""
        wanted = [name in names for name in self._names]
        found, inside = 0, list[bool]()
        for name, around, count in zip(self._name_of, self._around, self._told, strict=True):
            inside.append((around != NONE and inside[around]) or (wanted[name] and self._is_asked[name]))
            found += count if wanted[name] or inside[-1] else 0
        return found


def _lines(trace: Columns, some: Sequence[int]) -> tuple[list[int], list[int]]:
    """Some rows and those around them on their lines, each once and after the one right around it, and of each the
    number of that one, `NONE` for none."""
    rows = np.flatnonzero(and_above(trace.around, np.array(some, dtype=np.int64)))
    rows = rows[np.argsort(trace.level[rows], kind="stable")]
    return rows.tolist(), places_of(rows, len(trace))[trace.around[rows]].tolist()


def _launched_ns(recording: Recording, calls: Sequence[int]) -> Int64s:
    """By row how long devices worked for what calls asked for, 0 where for nothing: the kernels that torch.profiler
    saw, by the thread that asked for them and when, and of a call without any the device intervals of its own and of
    what is below it on its line."""
    trace, its = recording.columns, KernelColumns.of(recording.trace.kernels)
    rows = distinct(np.array(calls, dtype=np.int64))
    kernels = np.flatnonzero((its.thread_id != 0) & (its.kind == its.place_of_kind("kernel")))
    found = np.zeros(len(trace), dtype=np.int64)
    if len(kernels):
        clock = Clock.of(its.thread_id[kernels], its.launched_ns[kernels])
        launches = clock.numbers(its.thread_id[kernels], its.launched_ns[kernels])
        order = np.argsort(launches, kind="stable")
        sums = np.concatenate([[0], np.cumsum((its.end_ns - its.start_ns)[kernels[order]])])
        on_known = rows[clock.knows(trace.thread_id[rows])]
        first, end = (
            np.searchsorted(launches[order], clock.numbers(trace.thread_id[on_known], times[on_known]))
            for times in (trace.start_ns, trace.end_ns)
        )
        found[on_known] = sums[end] - sums[first]
    without = np.zeros(len(trace), dtype=np.bool_)
    without[rows] = found[rows] == 0
    with_intervals, lengths_ns = _device_ns(trace, without)
    found[with_intervals] = lengths_ns
    return found


def _device_ns(trace: Columns, is_call: Bools) -> tuple[Int64s, Int64s]:
    """The calls for which and for what is below them on their line devices worked, and for how long."""
    its = trace.device
    its = its.only(its.timed & (its.start_ns < its.end_ns))
    return lengths_below(trace.around, is_call, its.row, its.start_ns, its.end_ns)


def _time_of(trace: Columns, calls: Sequence[int], launched_ns: Int64s) -> tuple[str, int | None]:
    """Return the place and the time of some calls, if that is the same for all."""
    rows = np.array(calls, dtype=np.int64)
    on_device = launched_ns[rows][launched_ns[rows] > 0]
    if len(on_device) == len(rows):
        return "GPU", int(on_device.sum())
    return ("", None) if len(on_device) else ("CPU", int(trace.total_ns[rows].sum()))
