"""The `phases` view: what the time of steps went to: loading, forward, backward, optimizer, and what no phase covers.

Where a loop waits for its input between two steps, a step begins with the wait for what it works on.

It is the Model Summary of `paddle.profiler` and the two lines of SINGA's first verbosity. Where no step was recorded,
it is of requests; where no request was either, of the window.

A phase is a span that is declared one (`phase:` in a rule or scope), one of kind `phase` by its name, or a loader. At
each instant one phase is under way on a thread: of those open, the one that began first, so that what is in a phase
belongs to it. An optimizer makes way for what its closure calls. A step's instants belong to what ran on its own thread
and task: of tasks that it began, and of generators that stood still meanwhile, it is known that they were open and not
when they ran, so that they have what is left; those of other tasks have nothing. Each instant thus counts once, the
rows add up to the steps, and `others` is never negative, as it may be with that profiler, which adds up phases that
overlap.

Device time is that of what a phase put on streams, copies too. Work of one stream counts once, of several streams for
each. `others` is what is on a stream and in no stretch of a phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.profile.model import PHASES
from instrument.recording.spans import Interval
from instrument.report.section import Coverage, Section, View
from instrument.report.table import in_unit, share, six_digits
from instrument.report.units import LOADER, OPTIMIZER, Units, phase_of, units_of
from instrument.report.view import Options, Recording
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.forest import NONE, nearest_above
from instrument.trace.groups import Groups, distinct, numbered
from instrument.trace.intervals import Unions, lengths_by_group, union_by_group
from instrument.trace.self_times import stood_aside, turns

OWN, OWN_OPTIMIZER, OTHER = range(3)
"""The order in which calls are asked who is under way."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of phases that were under way in a unit: of each the number of its phase in `names`, and how long.

    `whole_ns` are the times in whole units by phase. `pieces` are the stretches in which a call is under way, by line,
    and `of_piece` the call of each. `beside_ns` are the lengths of the calls that ran where there is no unit.
    """

    names: Sequence[str]
    phase: Int64s
    own_ns: Int64s
    whole_ns: Mapping[str, int]
    pieces: Unions
    of_piece: Int64s
    beside_ns: Sequence[int]

    def by_phase(self) -> dict[str, list[int]]:
        """Return the time for which each call of a phase was under way."""
        return _by_phase(self.names, self.phase, self.own_ns)


def _by_phase(names: Sequence[str], phase: Int64s, times_ns: NDArray[Any]) -> dict[str, list[int]]:
    """The times of each phase that has any."""
    order = np.argsort(phase, kind="stable")
    numbers = phase[order]
    firsts = np.flatnonzero(np.diff(numbers, prepend=NONE))
    parts = np.split(times_ns[order], firsts[1:])
    return {names[number]: part.tolist() for number, part in zip(numbers[firsts].tolist(), parts, strict=False)}


def calls_of(trace: Columns, units: Units, held: Interval) -> Calls:
    """The calls beside units. What a communication or a copy consists of is no phase of the step."""
    of_sites = list(map(phase_of, trace.sites))
    numbers: dict[str, int] = {}
    number_of = np.array(
        [*(NONE if name is None else numbers.setdefault(name, len(numbers)) for name in of_sites), NONE]
    )
    names = list(numbers)
    is_call = trace.of_sites([name is not None for name in of_sites])
    is_work = trace.of_sites(
        [site.kind in ("comm", "copy") and name is None for site, name in zip(trace.sites, of_sites, strict=True)]
    )
    rows = np.flatnonzero(is_call & ~np.append(is_work, np.False_)[trace.parent])
    stood_still = is_call & stood_aside(trace)
    is_below = nearest_above(trace.parent, stood_still) != NONE if stood_still.any() else stood_still
    rank = np.where((units.is_aside | is_below | stood_still)[rows], OTHER, OWN)
    rank[(rank == OWN) & (np.array([*(name == OPTIMIZER for name in of_sites), False])[trace.site[rows]])] = (
        OWN_OPTIMIZER
    )
    line, ends = _beside_steps(trace, units, rows, stood_still[rows])
    is_beside = (line == NONE) & (trace.start_ns[rows] < held[1]) & (trace.end_ns[rows] > held[0])
    beside = rows[is_beside]
    beside_ns = np.minimum(trace.end_ns[beside], held[1]) - np.maximum(trace.start_ns[beside], held[0])
    order = np.lexsort((trace.span_id[rows], -trace.end_ns[rows], trace.start_ns[rows], rank, line))
    order = order[np.searchsorted(line[order], 0) :]
    rows, line, ends, rank = rows[order], line[order], ends[order], rank[order]
    call, pieces, unit = _under_way(units, line, trace.start_ns[rows], ends, rank)
    lengths_ns = pieces.ends - pieces.starts
    known = distinct(call)
    own_ns = Groups(np.searchsorted(known, call), len(known)).sums(lengths_ns)
    phase = number_of[trace.site[rows]]
    is_whole = units.is_whole[unit]
    in_whole = phase[call[is_whole]]
    whole_ns = Groups(in_whole, len(names)).sums(lengths_ns[is_whole]).tolist()
    filled = lengths_ns > 0
    return Calls(
        names=names,
        phase=phase[known],
        own_ns=own_ns,
        whole_ns={names[number]: whole_ns[number] for number in distinct(in_whole).tolist()},
        pieces=Unions(*(one[filled] for one in pieces)),
        of_piece=np.searchsorted(known, call[filled]),
        beside_ns=beside_ns.tolist(),
    )


def _beside_steps(trace: Columns, units: Units, rows: Int64s, stood_still: Bools) -> tuple[Int64s, Int64s]:
    """The line of each call, `NONE` of one between steps, also ones that are skipped, and where it ends.

    Of a generator that stood still no more counts than is in the step in which it began.
    """
    line, starts, ends = units.line_of[rows], trace.start_ns[rows], trace.end_ns[rows].copy()
    if units.steps is None:
        return line, ends
    known = np.flatnonzero(line != NONE)
    at, starts, until, is_still = line[known], starts[known], ends[known], stood_still[known]
    step = units.steps.begun(at, starts)
    step_end = np.append(units.steps.ends, 0)[step]
    is_in_step = (step != NONE) & (starts < step_end)
    is_around = ~is_still & (units.steps.begun(at, until - 1) > step)
    line[known[~is_in_step & ~is_around]] = NONE
    ends[known] = np.where(is_in_step & is_still, np.minimum(until, step_end), until)
    return line, ends


def _under_way(
    units: Units, line: Int64s, starts: Int64s, ends: Int64s, rank: Int64s
) -> tuple[Int64s, Unions, Int64s]:  # fmt: skip
    """The stretches of units in which a call is under way, by line: of each the call, and the unit.

    Calls are in the order in which they are asked. One without length has a stretch where none of its rank goes on.
    """
    call, since, until = turns(line, starts, ends, np.arange(len(line))[::-1])
    empty = np.flatnonzero(starts == ends)
    if len(empty):
        going_on = union_by_group(3 * line + rank, starts, ends)
        empty = empty[going_on.at(3 * line[empty] + rank[empty], starts[empty]) == NONE]
        call, since, until = (
            np.concatenate(both) for both in ((call, empty), (since, starts[empty]), (until, ends[empty]))
        )
    which, unit = units.intervals.overlapping(line[call], since, until)
    call = call[which]
    pieces = Unions(
        line[call],
        np.maximum(since[which], units.intervals.starts[unit]),
        np.minimum(until[which], units.intervals.ends[unit]),
    )
    return call, pieces, unit


@dataclass(frozen=True, slots=True)
class StreamUses:
    """The work that spans of a unit put on streams: sums over streams, of each the union.

    `units` and `calls` are those of each unit and of each call, by phase, that put anything there; `phases` those of
    all calls of a phase, `base_ns` of all units, `covered_ns` of all calls.
    """

    units: Sequence[int]
    calls: Mapping[str, Sequence[int]]
    phases: Mapping[str, int]
    base_ns: int
    covered_ns: int


def streams_of(trace: Columns, units: Units, calls: Calls) -> StreamUses:
    """The device time of the spans that began in a unit, and in a call of it."""
    its = trace.device
    rows = distinct(its.row)
    rows = rows[units.line_of[rows] != NONE]
    unit = units.intervals.at(units.line_of[rows], trace.start_ns[rows])
    piece = calls.pieces.at(units.line_of[rows], trace.start_ns[rows])
    of_row = np.full((2, len(trace)), NONE, dtype=np.int64)
    of_row[:, rows] = unit, np.append(calls.of_piece, NONE)[piece]
    kept = np.flatnonzero(its.timed & (of_row[0][its.row] != NONE))
    unit, call = of_row[:, its.row[kept]]
    stream = numbered(its.device[kept], its.stream[kept])[0]
    parts = stream, its.start_ns[kept], its.end_ns[kept]
    in_call = call != NONE
    call, parts_of_calls = call[in_call], tuple(one[in_call] for one in parts)
    of_units, (of_calls, known) = _summed(unit, *parts)[0], _summed(call, *parts_of_calls)
    of_phases, phases = _summed(calls.phase[call], *parts_of_calls)
    return StreamUses(
        units=of_units.tolist(),
        calls=_by_phase(calls.names, calls.phase[known], of_calls),
        phases={
            calls.names[number]: total_ns for number, total_ns in zip(phases.tolist(), of_phases.tolist(), strict=True)
        },
        base_ns=sum(_summed(np.zeros_like(unit), *parts)[0].tolist()),
        covered_ns=sum(_summed(np.zeros_like(call), *parts_of_calls)[0].tolist()),
    )


def _summed(keys: Int64s, streams: Int64s, starts: Int64s, ends: Int64s) -> tuple[NDArray[Any], Int64s]:
    """By key the sum over streams, of each the union; and the keys."""
    parts, some = numbered(keys, streams)
    lengths_ns = lengths_by_group(parts, starts, ends, len(some))
    known = distinct(keys)
    return Groups(np.searchsorted(known, keys[some]), len(known)).sums(lengths_ns), known


ORDER: tuple[str, ...] = (LOADER, "forward", "backward", OPTIMIZER)
"""The phases of a training step, in its order; then come the others that a span may be declared to be."""

OTHERS = "others"

BASE_NOTE = (
    "Each instant counts for the phase that is under way: the rows add up to the first one, of which",
    "ratios are.",
)
DEVICE_NOTE = ("", "Device: sums over streams of what each phase put there; stretches, in which a stream may wait.")

NO_PHASE = (
    "No phase was recorded: `phases: auto` and `loaders: auto` in the profile record those of torch; others are "
    "declared by `phase:` in a function rule, in @profiled or in scope."
)


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Times of a row on the host or on devices: their sum, and the mean, greatest and least of a call.

    `ratio` is of the row of steps. What does not exist is None: a call of `others`, a ratio to nothing.
    """

    total_ns: int
    mean_ns: float | None
    max_ns: int | None
    min_ns: int | None
    ratio: float | None


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One row: the steps, a phase of them, or the others. `device` is None where no device time was recorded."""

    name: str
    calls: int | None
    host: PhaseTimes
    device: PhaseTimes | None


@dataclass(frozen=True, slots=True)
class PhasesView(View):
    """The view. `of` is what the phases are of: `step`, `request` or `window`.

    `timed` of them are whole, `cut` reach over an edge of what is held, `skipped` steps came before the first, and of
    `overwritten` ones before it the spans are gone.
    `mean_ns` are the means of a phase in a whole one, by its name. `beside` calls of phases, of `beside_ns`, ran where
    there is no step or request.
    """

    coverage: Coverage
    of: str
    timed: int
    skipped: int
    overwritten: int
    cut: int
    rows: tuple[PhaseRow, ...]
    mean_ns: Mapping[str, float]
    beside: int
    beside_ns: int
    _options: Options = field(repr=False)

    TITLE = "Phases"

    def head(self) -> list[str]:
        counted = [self._counted(), f"Time unit: {self._options.unit}"] if self.rows else []
        return [*self.coverage.lines(), *counted, *(BASE_NOTE if self.rows and self._options.state != "GPU" else ())]

    def nothing(self) -> list[str]:
        if self.rows:
            return [] if self.sections() else ["No device time was recorded in it."]
        if self.skipped and not self.timed + self.cut:
            return [f"No step was left: {self.skipped} were recorded, and all of them were to be skipped."]
        return self.coverage.none_held("phase", NO_PHASE)

    def foot(self) -> list[str]:
        lines = self._propagation() if self._options.state != "GPU" else []
        if self.beside:
            where = "in no step" if self.of == "step" else "in no request"
            time = f"{in_unit(self.beside_ns, self._options.unit)} {self._options.unit}"
            lines.append(f"Not counted: {self.beside} call{'s' * (self.beside > 1)} of phases {where}, {time}")
        return lines

    def _counted(self) -> str:
        if self.of == "window":
            return "Phases of the window: there is no step (Profiler.step, or kind: step in a rule) and no request"
        also = [f"{self.skipped} skipped before"] * bool(self.skipped)
        also += [f"{self.overwritten} overwritten before"] * bool(self.overwritten)
        also += [f"{self.cut} cut at an edge"] * bool(self.cut)
        return f"{self.of.capitalize()}s: {', '.join([f'{self.timed} whole', *also])}"

    def sections(self) -> list[Section]:
        base = "Of window" if self.of == "window" else f"Of {self.of}s"
        wanted: list[tuple[str, str, tuple[str, ...]]] = []
        if self._options.state != "GPU":
            wanted.append(("host", "Host time", ()))
        if self._options.state != "CPU" and any(row.device is not None for row in self.rows):
            wanted.append(("device", "Device time", DEVICE_NOTE))
        return [
            Section(
                heading, [row for row in self.rows if getattr(row, on) is not None],
                f"name=Phase|calls=Calls|{on}.total_ns=Total|{on}.mean_ns=Avg|{on}.max_ns=Max|{on}.min_ns=Min|"
                f"{on}.ratio={base}",
                notes, {"name": lambda row, unit: row.name if row is self.rows[0] else f"  {row.name}"}, widths=10,
            )
            for on, heading, notes in wanted
        ]  # fmt: skip

    def _propagation(self) -> list[str]:
        """SINGA's lines, which put into backward whatever is not forward; here it has names of its own."""
        if self.of != "step" or not self.timed or not {"forward", "backward"} & self.mean_ns.keys():
            return []
        told = [f"{self.timed} iteration{'s' * (self.timed > 1)} timed", f"{self.skipped} skipped"]
        more = [name for name in self.mean_ns if name not in ("forward", "backward", "step")]
        return [
            f"Time Profiling: host time, averages of {', '.join(told)}",
            *propagation_lines(self.mean_ns),
            *(f"{name.capitalize()} Time : {six_digits(self.mean_ns[name])} sec" for name in more),
            "",
        ]


def propagation_lines(mean_ns: Mapping[str, float]) -> list[str]:
    """The two lines of SINGA, from the mean time of each phase."""
    return [
        f"{name.capitalize()} Propagation Time : {six_digits(mean_ns.get(name))} sec"
        for name in ("forward", "backward")
    ]


def phases(recording: Recording, options: Options) -> PhasesView:
    """The view of the spans that are held. `state`, `rows`, `least_ns`, `skip_first` and `unit` mean something to it.

    `rows` and `least_ns` leave the phases with most time; the order is that of a step. `skip_first` leaves out the
    first steps of each thread, by the number that a step bears or else by their begin. n log n for n phases.
    """
    trace, facts = recording.columns, recording.trace
    units = units_of(trace, facts.held, options.skip_first)
    calls = calls_of(trace, units, facts.held)
    told = Coverage.of_recording(recording)
    lengths_ns = (units.intervals.ends - units.intervals.starts).tolist()
    whole, count, is_counted = int(units.is_whole.sum()), len(lengths_ns), units.of != "window"
    timed, cut = whole * is_counted, (count - whole) * is_counted
    own_ns = calls.by_phase()
    if not count or (not own_ns and not calls.beside_ns):
        return PhasesView(told, units.of, timed, units.skipped, 0, cut, (), {}, 0, 0, options)
    streams = streams_of(trace, units, calls)
    base_ns = sum(lengths_ns)
    rest_ns = base_ns - sum(map(sum, own_ns.values()))
    rows = [
        PhaseRow(
            name,
            len(own),
            _times(own, sum(own), base_ns),
            _on_devices(streams, streams.calls.get(name, ()), len(own), streams.phases.get(name, 0)),
        )
        for name, own in sorted(own_ns.items(), key=lambda item: _place(item[0]))
    ]
    on_devices = _on_devices(streams, streams.units, count, streams.base_ns)
    unit_row = PhaseRow(units.of, count, _times(lengths_ns, base_ns, base_ns), on_devices)
    rest = _rest(streams.base_ns - streams.covered_ns, streams.base_ns) if streams.units else None
    others = PhaseRow(OTHERS, None, _rest(rest_ns, base_ns), rest)
    before, is_short = units.before, facts.held[0] > facts.start_ns
    whole_ns = sum((units.intervals.ends - units.intervals.starts)[units.is_whole].tolist())
    return PhasesView(
        coverage=told,
        of=units.of,
        timed=timed,
        skipped=units.skipped if is_short else max(before, units.skipped),
        overwritten=max(before - units.skipped, 0) if is_short else 0,
        cut=cut,
        rows=(unit_row, *_shown(rows, options, base_ns, streams.base_ns), others),
        mean_ns=_means(calls.whole_ns, whole, whole_ns) if is_counted else {},
        beside=len(calls.beside_ns),
        beside_ns=sum(calls.beside_ns),
        _options=options,
    )


def _means(times_ns: Mapping[str, int], whole: int, whole_ns: int) -> dict[str, float]:
    """The mean time of each phase in a whole unit, and of the others."""
    if not whole:
        return {}
    means = {phase: times_ns[phase] / whole for phase in sorted(times_ns, key=_place)}
    return {**means, OTHERS: (whole_ns - sum(times_ns.values())) / whole}


def _on_devices(streams: StreamUses, each: Sequence[int], count: int, total_ns: int) -> PhaseTimes | None:
    """Return the times of `count` units or calls, of which those of `each` put something on a stream."""
    if not streams.units:
        return None
    return _times(each if len(each) == count else [*each, 0], total_ns, streams.base_ns, count)


def _times(each: Sequence[int], total_ns: int, base_ns: int, count: int | None = None) -> PhaseTimes:
    mean_ns = share(total_ns, len(each) if count is None else count)
    return PhaseTimes(total_ns, mean_ns, max(each), min(each), share(total_ns, base_ns))


def _rest(rest_ns: int, base_ns: int) -> PhaseTimes:
    return PhaseTimes(rest_ns, None, None, None, share(rest_ns, base_ns))


def _place(phase: str) -> tuple[int, str]:
    known = (*ORDER, *(name for name in PHASES if name not in ORDER))
    return known.index(phase) if phase in known else len(known), phase


def _shown(rows: Sequence[PhaseRow], options: Options, base_ns: int, device_base_ns: int) -> list[PhaseRow]:
    """The rows with most time, in their order; the rest is one row more."""
    large = sorted((row for row in rows if row.host.total_ns >= options.least_ns), key=lambda row: -row.host.total_ns)
    kept = {row.name for row in large[: options.bound]}
    rest = [row for row in rows if row.name not in kept]
    shown = [row for row in rows if row.name in kept]
    if rest:
        host = _rest(sum(row.host.total_ns for row in rest), base_ns)
        timed = [row.device.total_ns for row in rest if row.device is not None]
        device = _rest(sum(timed), device_base_ns) if timed else None
        shown.append(PhaseRow(f"(remaining {len(rest)})", sum(row.calls or 0 for row in rest), host, device))
    return shown
