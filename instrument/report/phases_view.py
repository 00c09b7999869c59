"""The `phases` view: the time of steps, divided into phases such as loading, forward and backward, and other time.

A phase is a loader, a span of kind `phase`, or a span whose rule or scope declares a phase. Each moment of a thread
belongs to the open phase that began first, so all rows add up to the time of the steps.

Without steps, the view divides requests or else the window. It is the Model Summary of `paddle.profiler`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.profile.model import PHASES
from instrument.recording.spans import Interval
from instrument.report.benchmark_view import LOADER, OPTIMIZER, Units, find_phase, find_steps_or_requests
from instrument.report.section import Coverage, Section, View
from instrument.report.table import compute_share, format_six_digits, format_time, limit_rows
from instrument.report.view import Options, Recording
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.indices import NONE, Groups, find_ancestor, find_distinct, number_combinations
from instrument.trace.intervals import Unions, lengths_by_group, union_by_group
from instrument.trace.self_times import remove_overlaps, were_suspended

OWN, OWN_OPTIMIZER, OTHER = range(3)
"""The ranks of calls. If several calls are open, the call with the lowest rank gets the time."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of phases in units. A unit is a step, a request, or the whole window. `phase` is an index into `names`.
    `whole_ns` is the time of each phase in complete units. Each interval in `pieces` belongs to the call whose index is
    in `of_piece`. `outside_ns` are the durations of calls outside of units."""

    names: Sequence[str]
    phase: Int64s
    own_ns: Int64s
    whole_ns: Mapping[str, int]
    pieces: Unions
    of_piece: Int64s
    outside_ns: Sequence[int]


def _group_by_phase(names: Sequence[str], phase: Int64s, times_ns: NDArray[Any]) -> dict[str, list[int]]:
    groups = Groups(phase, len(names)).list_rows()
    return {names[phase[indexes[0]]]: times_ns[indexes].tolist() for indexes in groups}


def find_phase_calls(trace: Columns, units: Units, interval: Interval) -> Calls:
    of_sites = list(map(find_phase, trace.sites))
    names = list(dict.fromkeys(name for name in of_sites if name is not None))
    number_of = np.array([*(NONE if name is None else names.index(name) for name in of_sites), NONE])
    is_call = trace.are_of_sites([name is not None for name in of_sites])
    is_work = trace.are_of_sites(
        [site.kind in ("comm", "copy") and name is None for site, name in zip(trace.sites, of_sites, strict=True)]
    )
    rows = np.flatnonzero(is_call & ~np.append(is_work, np.False_)[trace.parent])
    stood_still = is_call & were_suspended(trace)
    is_below = find_ancestor(trace.parent, stood_still) != NONE if stood_still.any() else stood_still
    is_optimizer = trace.are_of_sites([name == OPTIMIZER for name in of_sites])[rows]
    is_aside = (units.is_aside | is_below | stood_still)[rows]
    rank = np.select([is_aside, is_optimizer], [OTHER, OWN_OPTIMIZER], OWN)
    line, ends = _assign_calls_to_steps(trace, units, rows, stood_still[rows])
    is_outside = (line == NONE) & (trace.start_ns[rows] < interval[1]) & (trace.end_ns[rows] > interval[0])
    outside = rows[is_outside]
    outside_ns = np.minimum(trace.end_ns[outside], interval[1]) - np.maximum(trace.start_ns[outside], interval[0])
    order = np.lexsort((trace.span_id[rows], -trace.end_ns[rows], trace.start_ns[rows], rank, line))
    order = order[np.searchsorted(line[order], 0) :]
    rows, line, ends, rank = rows[order], line[order], ends[order], rank[order]
    call, pieces, unit = _divide_unit_time_among_calls(units, line, trace.start_ns[rows], ends, rank)
    lengths_ns = pieces.ends - pieces.starts
    call_numbers = find_distinct(call)
    own_ns = Groups(np.searchsorted(call_numbers, call), len(call_numbers)).sum_by_group(lengths_ns)
    phase = number_of[trace.site[rows]]
    is_whole = units.is_whole[unit]
    in_whole = phase[call[is_whole]]
    whole_ns = Groups(in_whole, len(names)).sum_by_group(lengths_ns[is_whole]).tolist()
    filled = lengths_ns > 0
    return Calls(
        names=names,
        phase=phase[call_numbers],
        own_ns=own_ns,
        whole_ns={names[number]: whole_ns[number] for number in find_distinct(in_whole).tolist()},
        pieces=Unions(*(column[filled] for column in pieces)),
        of_piece=np.searchsorted(call_numbers, call[filled]),
        outside_ns=outside_ns.tolist(),
    )


def _assign_calls_to_steps(trace: Columns, units: Units, rows: Int64s, stood_still: Bools) -> tuple[Int64s, Int64s]:
    """Return the track and the end of each call. The track is `NONE` outside of kept steps. A suspended generator ends
    no later than its first step."""
    line, starts, ends = units.line_of[rows], trace.start_ns[rows], trace.end_ns[rows].copy()
    if units.steps is None:
        return line, ends
    on_line = np.flatnonzero(line != NONE)
    at, starts, until, is_still = line[on_line], starts[on_line], ends[on_line], stood_still[on_line]
    step = units.steps.find_last_begun(at, starts)
    step_end = np.append(units.steps.ends, 0)[step]
    is_in_step = (step != NONE) & (starts < step_end)
    is_around = ~is_still & (units.steps.find_last_begun(at, until - 1) > step)
    line[on_line[~is_in_step & ~is_around]] = NONE
    ends[on_line] = np.where(is_in_step & is_still, np.minimum(until, step_end), until)
    return line, ends


def _divide_unit_time_among_calls(
    units: Units, line: Int64s, starts: Int64s, ends: Int64s, rank: Int64s
) -> tuple[Int64s, Unions, Int64s]:  # fmt: skip
    """Divide each unit's time among calls. Among several open calls, the first one in the list gets the time."""
    call, since, until = remove_overlaps(line, starts, ends, np.arange(len(line))[::-1])
    empty = np.flatnonzero(starts == ends)
    if len(empty):
        going_on = union_by_group(3 * line + rank, starts, ends)
        empty = empty[going_on.interval_at(3 * line[empty] + rank[empty], starts[empty]) == NONE]
        call, since, until = (
            np.concatenate(columns) for columns in ((call, empty), (since, starts[empty]), (until, ends[empty]))
        )
    indexes, unit = units.intervals.overlapping_pairs(line[call], since, until)
    call = call[indexes]
    pieces = Unions(
        line[call],
        np.maximum(since[indexes], units.intervals.starts[unit]),
        np.minimum(until[indexes], units.intervals.ends[unit]),
    )
    return call, pieces, unit


@dataclass(frozen=True, slots=True)
class DividedTime:
    """The host or device time of units and of the calls in them, in ns. `calls` has the times of calls by phase. Units
    and calls without device time are missing. `base_ns` is the sum of all units, and `covered_ns` the sum of all
    calls."""

    units: Sequence[int]
    calls: Mapping[str, Sequence[int]]
    phases: Mapping[str, int]
    base_ns: int
    covered_ns: int

    def sum_units(self, count: int) -> PhaseTimes:
        return self._measure_times(self.units, count, self.base_ns)

    def sum_phase(self, name: str, count: int) -> PhaseTimes:
        return self._measure_times(self.calls.get(name, ()), count, self.phases.get(name, 0))

    def sum_rest(self, rest_ns: int) -> PhaseTimes:
        return PhaseTimes(rest_ns, None, None, None, compute_share(rest_ns, self.base_ns))

    def _measure_times(self, times_ns: Sequence[int], count: int, total_ns: int) -> PhaseTimes:
        """Summarize `count` times. Times that are missing in `times_ns` are 0."""
        some_ns = times_ns if len(times_ns) == count else [*times_ns, 0]
        return PhaseTimes(
            total_ns, compute_share(total_ns, count), max(some_ns), min(some_ns), compute_share(total_ns, self.base_ns)
        )


def measure_device_time_of_phases(trace: Columns, units: Units, calls: Calls) -> DividedTime:
    device = trace.device
    rows = find_distinct(device.row)
    rows = rows[units.line_of[rows] != NONE]
    unit = units.intervals.interval_at(units.line_of[rows], trace.start_ns[rows])
    piece = calls.pieces.interval_at(units.line_of[rows], trace.start_ns[rows])
    of_row = np.full((2, len(trace)), NONE, dtype=np.int64)
    of_row[:, rows] = unit, np.append(calls.of_piece, NONE)[piece]
    indexes = np.flatnonzero(device.is_measured & (of_row[0][device.row] != NONE))
    unit, call = of_row[:, device.row[indexes]]
    stream = number_combinations(device.device[indexes], device.stream[indexes])[0]
    parts = stream, device.start_ns[indexes], device.end_ns[indexes]
    in_call = call != NONE
    call, parts_of_calls = call[in_call], tuple(column[in_call] for column in parts)
    of_calls, call_numbers = _sum_stream_time_by_key(call, *parts_of_calls)
    of_phases, phases = _sum_stream_time_by_key(calls.phase[call], *parts_of_calls)
    return DividedTime(
        units=_sum_stream_time_by_key(unit, *parts)[0].tolist(),
        calls=_group_by_phase(calls.names, calls.phase[call_numbers], of_calls),
        phases=dict(zip(map(calls.names.__getitem__, phases.tolist()), of_phases.tolist(), strict=True)),
        base_ns=sum(_sum_stream_time_by_key(np.zeros_like(unit), *parts)[0].tolist()),
        covered_ns=sum(_sum_stream_time_by_key(np.zeros_like(call), *parts_of_calls)[0].tolist()),
    )


def _sum_stream_time_by_key(keys: Int64s, streams: Int64s, starts: Int64s, ends: Int64s) -> tuple[NDArray[Any], Int64s]:
    """Return the device time of each distinct key, and the keys. Overlapping times on one stream count once."""
    parts, firsts = number_combinations(keys, streams)
    distinct_keys = find_distinct(keys)
    groups = Groups(np.searchsorted(distinct_keys, keys[firsts]), len(distinct_keys))
    return groups.sum_by_group(lengths_by_group(parts, starts, ends, len(firsts))), distinct_keys


ORDER: tuple[str, ...] = (LOADER, "forward", "backward", OPTIMIZER)
"""The order of the phases of a training step. Other declared phases follow."""

OTHERS = "others"

BASE_NOTE = (
    "A moment belongs to the open phase that began first. So the rows add up to the first row, which is",
    "100 % of the ratios.",
)
DEVICE_NOTE = ("", "Device: sums over streams of what each phase put there; stretches, in which a stream may wait.")

NO_PHASE = (
    "No phase was recorded: `phases: auto` and `loaders: auto` in the profile record those of torch; others are "
    "declared by `phase:` in a function rule, in @profiled or in scope."
)


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The host or device times of a row. `ratio` is the share of the time in the table's first row. A missing value is
    None."""

    total_ns: int
    mean_ns: float | None
    max_ns: int | None
    min_ns: int | None
    ratio: float | None


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """A row of the table: all units, one phase in them, or `others`. `device` is None without device time."""

    name: str
    calls: int | None
    host: PhaseTimes
    device: PhaseTimes | None


@dataclass(frozen=True, slots=True)
class PhasesView(View):
    """The `phases` view. `of` is the unit: `step`, `request` or `window`.

    `timed` counts the complete units, and `cut` the incomplete ones. `skipped` counts the steps left out by
    `skip_first`. `overwritten` counts the steps before the kept spans. `mean_ns` is the mean time of each phase in
    complete units. `outside` counts calls outside of all units.
    """

    coverage: Coverage
    of: str
    timed: int
    skipped: int
    overwritten: int
    cut: int
    rows: tuple[PhaseRow, ...]
    mean_ns: Mapping[str, float]
    outside: int
    outside_ns: int
    _options: Options = field(repr=False)

    TITLE = "Phases"

    def header_lines(self) -> list[str]:
        if not self.rows:
            return self.coverage.lines()
        left_out = {"skipped before": self.skipped, "overwritten before": self.overwritten, "cut at an edge": self.cut}
        counts = ", ".join([f"{self.timed} whole", *(f"{count} {place}" for place, count in left_out.items() if count)])
        if self.of == "window":
            counted = "Phases of the window: there is no step (Profiler.step, or kind: step in a rule) and no request"
        else:
            counted = f"{self.of.capitalize()}s: {counts}"
        note = BASE_NOTE if self._options.state != "GPU" else ()
        return [*self.coverage.lines(), counted, f"Time unit: {self._options.unit}", *note]

    def reasons_if_empty(self) -> list[str]:
        if self.rows:
            return [] if self.sections() else ["No device time was recorded in it."]
        if self.skipped and not self.timed + self.cut:
            return [f"No step was left: {self.skipped} were recorded, and all of them were to be skipped."]
        return self.coverage.explain_no_spans("phase", NO_PHASE)

    def footnotes(self) -> list[str]:
        lines = self._format_like_singa() if self._options.state != "GPU" else []
        if self.outside:
            place = "in no step" if self.of == "step" else "in no request"
            time = f"{format_time(self.outside_ns, self._options.unit)} {self._options.unit}"
            lines.append(f"Not counted: {self.outside} call{'s' * (self.outside > 1)} of phases {place}, {time}")
        return lines

    def sections(self) -> list[Section]:
        base = "Of window" if self.of == "window" else f"Of {self.of}s"
        tables: list[tuple[str, str, tuple[str, ...]]] = []
        if self._options.state != "GPU":
            tables.append(("host", "Host time", ()))
        if self._options.state != "CPU" and any(row.device is not None for row in self.rows):
            tables.append(("device", "Device time", DEVICE_NOTE))
        return [
            Section(
                heading, [row for row in self.rows if getattr(row, on) is not None],
                f"name=Phase|calls=Calls|{on}.total_ns=Total|{on}.mean_ns=Avg|{on}.max_ns=Max|{on}.min_ns=Min|"
                f"{on}.ratio={base}",
                notes, {"name": lambda row, unit: row.name if row is self.rows[0] else f"  {row.name}"}, widths=10,
            )
            for on, heading, notes in tables
        ]  # fmt: skip

    def _format_like_singa(self) -> list[str]:
        if self.of != "step" or not self.timed or not {"forward", "backward"} & self.mean_ns.keys():
            return []
        counts = [f"{self.timed} iteration{'s' * (self.timed > 1)} timed", f"{self.skipped} skipped"]
        more = [name for name in self.mean_ns if name not in ("forward", "backward", "step")]
        return [
            f"Time Profiling: host time, averages of {', '.join(counts)}",
            *propagation_lines(self.mean_ns),
            *(f"{name.capitalize()} Time : {format_six_digits(self.mean_ns[name])} sec" for name in more),
            "",
        ]


def propagation_lines(mean_ns: Mapping[str, float]) -> list[str]:
    return [
        f"{name.capitalize()} Propagation Time : {format_six_digits(mean_ns.get(name))} sec"
        for name in ("forward", "backward")
    ]


def phases(recording: Recording, options: Options) -> PhasesView:
    """Return the `phases` view. The options `rows` and `least_ns` keep the phases with the most time. `skip_first`
    leaves out the first steps of each thread. `state` and `unit` apply as well."""
    trace, facts = recording.columns, recording.trace
    units = find_steps_or_requests(trace, facts.coverage, options.skip_first)
    calls = find_phase_calls(trace, units, facts.coverage)
    coverage = Coverage.measure_coverage(recording)
    lengths_ns = (units.intervals.ends - units.intervals.starts).tolist()
    whole, count, is_counted = int(units.is_whole.sum()), len(lengths_ns), units.of != "window"
    timed, cut = whole * is_counted, (count - whole) * is_counted
    own_ns = _group_by_phase(calls.names, calls.phase, calls.own_ns)
    if not count or (not own_ns and not calls.outside_ns):
        return PhasesView(coverage, units.of, timed, units.skipped, 0, cut, (), {}, 0, 0, options)
    phases_ns = {name: sum(times_ns) for name, times_ns in own_ns.items()}
    host = DividedTime(lengths_ns, own_ns, phases_ns, sum(lengths_ns), sum(phases_ns.values()))
    device = measure_device_time_of_phases(trace, units, calls)
    has_device = bool(device.units)
    rows = [
        PhaseRow(name, number, host.sum_phase(name, number), device.sum_phase(name, number) if has_device else None)
        for name in sorted(own_ns, key=_rank_of_phase)
        for number in [len(own_ns[name])]
    ]
    unit_row = PhaseRow(units.of, count, host.sum_units(count), device.sum_units(count) if has_device else None)
    on_device = device.sum_rest(device.base_ns - device.covered_ns) if has_device else None
    others_row = PhaseRow(OTHERS, None, host.sum_rest(host.base_ns - host.covered_ns), on_device)
    before, is_short = units.before, facts.coverage[0] > facts.start_ns
    mean_ns: dict[str, float] = {}
    if whole:
        whole_ns = sum((units.intervals.ends - units.intervals.starts)[units.is_whole].tolist())
        mean_ns = {name: calls.whole_ns[name] / whole for name in sorted(calls.whole_ns, key=_rank_of_phase)}
        mean_ns[OTHERS] = (whole_ns - sum(calls.whole_ns.values())) / whole
    return PhasesView(
        coverage=coverage,
        of=units.of,
        timed=timed,
        skipped=units.skipped if is_short else max(before, units.skipped),
        overwritten=max(before - units.skipped, 0) if is_short else 0,
        cut=cut,
        rows=(unit_row, *_largest_rows(rows, options, host, device), others_row),
        mean_ns=mean_ns if is_counted else {},
        outside=len(calls.outside_ns),
        outside_ns=sum(calls.outside_ns),
        _options=options,
    )


def _rank_of_phase(phase: str) -> tuple[int, str]:
    order = (*ORDER, *(name for name in PHASES if name not in ORDER))
    return order.index(phase) if phase in order else len(order), phase


def _largest_rows(rows: Sequence[PhaseRow], options: Options, host: DividedTime, device: DividedTime) -> list[PhaseRow]:
    def sum_omitted(omitted: Sequence[PhaseRow]) -> PhaseRow:
        timed = [row.device.total_ns for row in omitted if row.device is not None]
        on_host = host.sum_rest(sum(row.host.total_ns for row in omitted))
        on_device = device.sum_rest(sum(timed)) if timed else None
        return PhaseRow(f"(remaining {len(omitted)})", sum(row.calls or 0 for row in omitted), on_host, on_device)

    longest = sorted(rows, key=lambda row: -row.host.total_ns)
    places = {row.name: place for place, row in enumerate(rows)}
    shown = limit_rows(longest, options, lambda row: row.host.total_ns, sum_omitted)
    return sorted(shown, key=lambda row: places.get(row.name, len(rows)))
