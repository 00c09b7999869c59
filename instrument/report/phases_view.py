"""The `phases` view: what the time of steps went to: loading, forward, backward, optimizer, and what no phase covers.

Where a loop waits for its input between two steps, a step begins with the wait for what it works on.

It is the Model Summary of `paddle.profiler` and the two lines of SINGA's first verbosity. Where no step was recorded,
it is of requests; where no request was either, of the window.

A phase is a span that is declared one (`phase:` in a rule or scope), one of kind `phase` by its name, or a loader. At
each instant one phase is under way on a thread: of those open, the one that began first, so that what lies in a phase
belongs to it. An optimizer makes way for what its closure calls. A step's instants belong to what ran on its own thread
and task: of tasks that it began, and of generators that stood still meanwhile, it is known that they were open and not
when they ran, so that they have what is left; those of other tasks have nothing. Each instant thus counts once, the
rows add up to the steps, and `others` is never negative, as it may be with that profiler, which adds up phases that
overlap.

Device time is that of what a phase put on streams, copies too. Work of one stream counts once, of several streams for
each. `others` is what lies on a stream and in no stretch of a phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from instrument.profile.kinds import PHASES
from instrument.report.coverage import Coverage
from instrument.report.phase_calls import StreamUses, calls_of, streams_of
from instrument.report.section import Section, View
from instrument.report.table import in_unit, share, six_digits
from instrument.report.units import LOADER, OPTIMIZER, units_of
from instrument.report.view import Options, Recording

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

    `timed` of these are whole, `cut` reach over an edge of what is held, `skipped` steps came before the first, and of
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
    trace, facts = recording.columns, recording.facts
    units = units_of(trace, facts.held, options.skip_first)
    calls = calls_of(trace, units, facts.held)
    told = Coverage.of_recording(recording)
    lengths_ns = (units.its.ends - units.its.starts).tolist()
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
    whole_ns = sum((units.its.ends - units.its.starts)[units.is_whole].tolist())
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
    """Of so many units or calls, of which those of `each` put something on a stream."""
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
