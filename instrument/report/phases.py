"""The `phases` view: what the time of steps went to: loading, forward, backward, optimizer, and what no phase covers.

Where a loop waits for its input between two steps, a step begins with the wait for what it works on.

It is the Model Summary of `paddle.profiler` and the two lines of SINGA's first verbosity. Where no step was recorded,
it is of requests; where no request was either, of the window.

A phase is a span that is declared one (`phase:` in a rule or scope), one of kind `phase` by its name, or a loader. At
each instant one phase is under way on a thread: of those open, the one that began first, so that what lies in a phase
belongs to it. An optimizer makes way for what its closure calls. Each instant thus counts once, the rows add up to the
steps, and `others` is never negative, as it may be with that profiler, which adds up phases that overlap.

Device time is that of what a phase put on streams, copies too. Work of one stream counts once, of several streams for
each. `others` is what lies on a stream and in no stretch of a phase.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

from instrument.report.device import Coverage, none_held
from instrument.report.stretches import Line, grouped, packed, placed, sites, summed
from instrument.report.table import MISSING, in_unit, named_table, number, section_title, share, tenths, title
from instrument.report.view import Options, Recording
from instrument.spans import PHASES, Interval, Site, Span, Trace, subtract, union

LOADER = "loader"
OPTIMIZER = "optimizer"
ORDER: tuple[str, ...] = (LOADER, "forward", "backward", OPTIMIZER)
"""The phases of a training step, in its order; then come the others that a span may be declared to be."""

OTHERS = "others"

NO_PHASE = (
    "No phase was recorded: `phases: auto` and `loaders: auto` in the profile record those of torch; others are "
    "declared by `phase:` in a function rule, in @profiled or in scope."
)

PROFILERS = "instrument.Profiler.step"
"""The function of the steps that a `Profiler` makes."""


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
class Phases:
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

    def lines(self) -> list[str]:
        """The text."""
        lines = [*title("Phases Report"), *self.coverage.lines()]
        if not self.rows and self.skipped and not self.timed + self.cut:
            return [*lines, "", f"No step was left: {self.skipped} were recorded, and all of them were to be skipped."]
        if not self.rows:
            return [
                *lines,
                "",
                *none_held("phase", NO_PHASE, complete=self.coverage.complete),
            ]
        lines += [self._counted(), f"Time unit: {self._options.unit}"]
        if self._options.state != "GPU":
            lines += [
                "Each instant counts for the phase that is under way: the rows add up to the first one, of which",
                "ratios are.",
                "",
                *section_title("Host time"),
                *self._table({row.name: row.host for row in self.rows}),
                "",
            ]
        on_device = {row.name: row.device for row in self.rows if row.device is not None}
        if on_device and self._options.state != "CPU":
            lines += [*section_title("Device time"), *self._table(on_device), ""]
            lines += [
                "Device: sums over streams of what each phase put there; stretches, in which a stream may wait.",
                "",
            ]
        elif self._options.state == "GPU":
            lines += ["", "No device time was recorded in it.", ""]
        lines += self._propagation()
        if self.beside:
            where = "in no step" if self.of == "step" else "in no request"
            lines.append(
                f"Not counted: {self.beside} call{'s' * (self.beside > 1)} of phases {where}, "
                f"{in_unit(self.beside_ns, self._options.unit)} {self._options.unit}"
            )
        return lines

    def _counted(self) -> str:
        if self.of == "window":
            return "Phases of the window: there is no step (Profiler.step, or kind: step in a rule) and no request"
        also = [f"{self.skipped} skipped before"] * bool(self.skipped)
        also += [f"{self.overwritten} overwritten before"] * bool(self.overwritten)
        also += [f"{self.cut} cut at an edge"] * bool(self.cut)
        return f"{self.of.capitalize()}s: {', '.join([f'{self.timed} whole', *also])}"

    def _table(self, times: Mapping[str, PhaseTimes]) -> list[str]:
        unit = self._options.unit
        calls = {row.name: row.calls for row in self.rows}
        cells = [
            [
                name if not index else f"  {name}",
                MISSING if calls[name] is None else str(calls[name]),
                *(in_unit(value, unit) for value in (one.total_ns, one.mean_ns, one.max_ns, one.min_ns)),
                tenths(one.ratio, 1),
            ]
            for index, (name, one) in enumerate(times.items())
        ]
        base = "Of window" if self.of == "window" else f"Of {self.of}s"
        return named_table(["Phase", "Calls", "Total", "Avg", "Max", "Min", base], cells, 10)

    def _propagation(self) -> list[str]:
        """SINGA's lines, which put into backward whatever is not forward; here it has names of its own."""
        if self.of != "step" or not self.timed or not {"forward", "backward"} & self.mean_ns.keys():
            return []
        told = [f"{self.timed} iteration{'s' * (self.timed > 1)} timed", f"{self.skipped} skipped"]
        more = [name for name in self.mean_ns if name not in ("forward", "backward", "step")]
        return [
            f"Time Profiling: host time, averages of {', '.join(told)}",
            *(
                f"{name.capitalize()} Propagation Time : {_seconds(self.mean_ns.get(name))} sec"
                for name in ("forward", "backward")
            ),
            *(f"{name.capitalize()} Time : {_seconds(self.mean_ns[name])} sec" for name in more),
            "",
        ]


def phases(recording: Recording, options: Options) -> Phases:
    """The view of the spans that are held. `state`, `rows`, `least_ns`, `skip_first` and `unit` mean something to it.

    `rows` and `least_ns` leave the phases with most time; the order is that of a step. `skip_first` leaves out the
    first steps of each thread, by the number that a step bears or else by their begin. n log n for n phases.
    """
    trace = recording.trace
    found = _Found(trace, options.skip_first)
    shares = _Shares(found)
    told = Coverage.of(trace)
    units = [unit for line in found.lines for unit in line.units]
    is_counted = found.of != "window"
    timed, cut = shares.whole * is_counted, (len(units) - shares.whole) * is_counted
    if not units or (not shares.own_ns and not found.beside):
        return Phases(told, found.of, timed, found.skipped, 0, cut, (), {}, 0, 0, options)
    streams = _Streams(trace.spans, found, shares)
    lengths = [end - start for start, end, _ in units]
    base_ns = sum(lengths)
    rest_ns = base_ns - sum(sum(own) for own in shares.own_ns.values())
    rows = [
        PhaseRow(name, len(own), _times(own, sum(own), base_ns), streams.of_phase(name))
        for name, own in sorted(shares.own_ns.items(), key=lambda item: _place(item[0]))
    ]
    unit_row = PhaseRow(found.of, len(units), _times(lengths, base_ns, base_ns), streams.of_units(len(units)))
    others = PhaseRow(OTHERS, None, _rest(rest_ns, base_ns), streams.of_others())
    before, is_short = found.before, trace.held[0] > trace.start_ns
    return Phases(
        coverage=told,
        of=found.of,
        timed=timed,
        skipped=found.skipped if is_short else max(before, found.skipped),
        overwritten=max(before - found.skipped, 0) if is_short else 0,
        cut=cut,
        rows=(unit_row, *_shown(rows, options, base_ns, streams.base_ns), others),
        mean_ns=shares.means() if is_counted else {},
        beside=len(found.beside),
        beside_ns=sum(found.beside),
        _options=options,
    )


def phase_of(site: Site) -> str | None:
    """The phase that spans of a site are, None where they are none."""
    if site.kind == LOADER:
        return LOADER
    declared = dict(site.attributes).get("phase")
    if isinstance(declared, str) and declared:
        return declared
    return site.name if site.kind == "phase" else None


_Key = tuple[int, int]
"""A thread and the task that ran on it, 0 for none."""


def steps_of(spans: Iterable[Span]) -> dict[_Key, list[Span]]:
    """The steps of each thread and task that begin in no other one of it, in the order of time."""
    by_key: dict[_Key, list[Span]] = {}
    for span in spans:
        by_key.setdefault((span.thread_id, span.task_id), []).append(span)
    for key, own in by_key.items():
        own.sort(key=_end, reverse=True)
        own.sort(key=_begin)
        outermost: list[Span] = []
        for span in own:
            if not outermost or span.start_ns >= outermost[-1].end_ns:
                outermost.append(span)
        by_key[key] = outermost
    return by_key


def starts_of(steps: Iterable[Span], waits: Sequence[Interval]) -> list[int]:
    """When each step of a thread or task begins: with the wait for what it works on, if there is one.

    That is the last of `waits` for loaders, a union, since a step before it ended or one around it began. Where a
    `Profiler` says that a step has ended the next one begins, and what it waits for lies in it. Steps are in the order
    of their begin.
    """
    starts: list[int] = []
    open_ends: list[int] = []
    since_ns = over = 0
    for step in steps:
        start_ns = step.start_ns
        while open_ends and open_ends[0] <= start_ns:
            since_ns = max(since_ns, heapq.heappop(open_ends))
        while over < len(waits) and waits[over][1] <= start_ns:
            over += 1
        is_told = over > 0 and waits[over - 1][0] >= since_ns and step.site.function != PROFILERS
        starts.append(waits[over - 1][0] if is_told else start_ns)
        heapq.heappush(open_ends, step.end_ns)
        since_ns = max(since_ns, start_ns)
    return starts


_Unit = tuple[int, int, bool]
"""Start and end of a step or request, or of the window, and whether it is whole."""

_Call = tuple[int, int, int]
"""Start of a call of a phase, its end with a minus, and the number of the phase: what is around comes first."""


class _Line:
    """Units that follow one another, and the calls of phases beside them.

    `pieces` are the stretches of the units in which a call is the one under way, with its number among all calls.
    """

    __slots__ = ("_steps", "calls", "first_unit", "number", "pieces", "units")

    def __init__(
        self, units: list[_Unit], first_unit: int, steps: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> None:
        self.units = units
        self._steps = steps
        self.first_unit = first_unit
        self.number = 0
        self.calls: list[_Call] = []
        self.pieces: list[tuple[int, int, int]] = []

    def settle(self) -> list[_Call]:
        """Put the calls in order, and leave out and return those that lie between steps, also ones that are skipped."""
        self.calls.sort()
        if self._steps is None:
            return []
        starts, ends = self._steps
        within, beside = list[_Call](), list[_Call]()
        begun, count = 0, len(starts)
        for call in self.calls:
            start_ns = call[0]
            while begun < count and starts[begun] <= start_ns:
                begun += 1
            is_within = begun > 0 and start_ns < ends[begun - 1]
            if is_within or (begun < count and starts[begun] < -call[1]):
                within.append(call)
            else:
                beside.append(call)
        self.calls = within
        return beside

    def packed(self) -> Line:
        """In memory as the loops over all spans take it."""
        units = packed((start, end) for start, end, _ in self.units)
        return Line(self.first_unit, units, array("q", chain.from_iterable(self.pieces)).tobytes())

    def turns(self, optimizer: int | None) -> list[tuple[int, int, int]]:
        """Each instant given to one call: start, end and place of the call, in the order of time."""
        calls = self.calls
        if optimizer is None or all(phase != optimizer for _, _, phase in calls):
            return list(_in_turn(calls, range(len(calls))))
        taken = list(_in_turn(calls, [place for place, call in enumerate(calls) if call[2] != optimizer]))
        others = [(start, end) for start, end, _ in taken if start < end]
        for start, end, place in _in_turn(calls, [place for place, call in enumerate(calls) if call[2] == optimizer]):
            index = bisect_right(others, start, key=lambda part: part[1])
            stop = bisect_right(others, end, key=lambda part: part[0])
            free = subtract([(start, end)], others[index:stop]) if index < stop and start < end else [(start, end)]
            taken.extend((*part, place) for part in free)
        return sorted(taken)


def _in_turn(calls: Sequence[_Call], places: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    """Calls in their order, each from where those before it are over. One that lies in another is left out."""
    over_ns: int | None = None
    for place in places:
        start_ns, minus_end_ns, _ = calls[place]
        end_ns = -minus_end_ns
        if over_ns is None or start_ns >= over_ns:
            yield start_ns, end_ns, place
        elif end_ns > over_ns:
            yield over_ns, end_ns, place
        else:
            continue
        over_ns = end_ns


class _Found:
    """What a trace holds: the lines of steps, requests or the window, and their phases.

    `by_key` has the lines of steps by thread and task, and those of requests by id and 0.
    `beside` are the lengths of calls of phases that have no line, `skipped` is how many first steps were left out,
    `before` how many came before the first that is left, by the number that it bears.
    """

    def __init__(self, trace: Trace, skip_first: int) -> None:
        of_kind = {"step": 1, "request": 2, "comm": 3, "copy": 3}
        phase_of_site = {site: phase_of(site) for site in sites(trace.spans)}
        labels = {site: of_kind.get(site.kind, 0) for site in phase_of_site}
        labels.update((site, 5 if site.kind == LOADER else 4) for site, phase in phase_of_site.items() if phase)
        steps, requests, around, others, loaders = grouped(trace.spans, labels, 5)
        requests = [span for span in requests if span.root_id == span.span_id]
        held = trace.held
        steps = [span for span in steps if _reaches_into(span, held)]
        requests = [span for span in requests if _reaches_into(span, held)]
        self.of = "step" if steps else "request" if requests else "window"
        self.by_key: dict[_Key, _Line] = {}
        self._parents: dict[int, int] = {}
        self._of_step: dict[int, _Line] = {}
        self._only: dict[int, _Line | None] = {}
        self.skipped = self.before = 0
        if steps:
            self._find_steps(trace, steps, loaders, skip_first)
        elif requests:
            self.by_key = {
                (span.span_id, 0): _Line([_unit(span, held, span.start_ns)], count)
                for count, span in enumerate(requests)
            }
        else:
            self.by_key = {(0, 0): _Line([(*held, True)], 0)}
        self.lines = list(self.by_key.values())
        for place, own in enumerate(self.lines):
            own.number = place
        self.names = list({phase: None for phase in phase_of_site.values() if phase})
        self.beside = [
            min(-minus_end_ns, held[1]) - max(start_ns, held[0])
            for start_ns, minus_end_ns, _ in self._give_out(
                chain(loaders, others),
                {site: self.names.index(phase) for site, phase in phase_of_site.items() if phase},
                {span.span_id for span in around},
            )
            if start_ns < held[1] and -minus_end_ns > held[0]
        ]

    def _give_out(self, calls: Iterable[Span], numbers: Mapping[Site, int], around: Collection[int]) -> list[_Call]:
        """Give the calls to the lines beside which they ran, and return those of none.

        What a communication or a copy consists of, the spans `around`, is no phase of the step.
        """
        by_key, by_root, beside = self.by_key, self.of == "request", list[_Call]()
        for span in calls:
            if span.parent_id not in around:
                key = (span.root_id, 0) if by_root else (span.thread_id, span.task_id)
                line = by_key.get(key) or self.line_of(span)
                call = span.start_ns, -span.end_ns, numbers[span.site]
                (beside if line is None else line.calls).append(call)
        for line in self.lines:
            beside += line.settle()
        return beside

    def _find_steps(self, trace: Trace, steps: list[Span], loaders: Iterable[Span], skip_first: int) -> None:
        by_key = steps_of(steps)
        if len({thread_id for thread_id, _ in by_key}) < len(by_key):  # tasks, which may have steps at the same time
            self._parents = {span.span_id: span.parent_id for span in trace.spans}
            ids = {step.span_id for own in by_key.values() for step in own}
            topmost = {
                key: [step for step in own if not self._above(step, ids) and not _lies_in(step, key, by_key)]
                for key, own in by_key.items()
            }
            by_key = {key: own for key, own in topmost.items() if own}
        waits: dict[_Key, list[Interval]] = {}
        for span in loaders:
            waits.setdefault((span.thread_id, span.task_id), []).append((span.start_ns, span.end_ns))
        skipped = self._first_of_threads(by_key, skip_first) if skip_first > 0 else ()
        self.skipped, count = len(skipped), 0
        kept = [_number(step, 0) for own in by_key.values() for step in own if step.span_id not in skipped]
        self.before = min(kept, default=0)
        for key, own in by_key.items():
            starts = starts_of(own, union(waits.get(key, ())))
            units = [
                _unit(step, trace.held, start)
                for step, start in zip(own, starts, strict=True)
                if step.span_id not in skipped
            ]
            line = self.by_key[key] = _Line(units, count, (starts, [step.end_ns for step in own]))
            count += len(units)
            self._only[key[0]] = line if key[0] not in self._only else None
            if self._parents:
                self._of_step.update((step.span_id, line) for step in own)

    @staticmethod
    def _first_of_threads(by_key: Mapping[_Key, Sequence[Span]], count: int) -> set[int]:
        """The ids of steps that come before the one of this number on their thread, by the number that a step bears."""
        on_thread: dict[int, list[Span]] = {}
        for (thread_id, _), own in by_key.items():
            on_thread.setdefault(thread_id, []).extend(own)
        for own in on_thread.values():
            own.sort(key=_begin)
        return {
            step.span_id for own in on_thread.values() for place, step in enumerate(own) if _number(step, place) < count
        }

    def _above(self, span: Span, ids: Collection[int]) -> int:
        """The nearest span around one whose id is among these, 0 for none."""
        above = self._parents.get(span.span_id, 0)
        while above and above not in ids:
            above = self._parents.get(above, 0)
        return above

    def line_of(self, span: Span) -> _Line | None:
        """The line beside which a span ran."""
        if self.of == "request":
            return self.by_key.get((span.root_id, 0))
        if self.of == "window":
            return self.by_key[0, 0]
        # A task that has no steps of its own works for those of its thread, or for the one that it was begun in.
        line = self.by_key.get((span.thread_id, span.task_id)) or self.by_key.get((span.thread_id, 0))
        if line is None:
            line = self._of_step.get(self._above(span, self._of_step))
        return line or self._only.get(span.thread_id)

    def number_of(self, span: Span) -> int | None:
        """The number of its line."""
        line = self.line_of(span)
        return None if line is None else line.number


def _lies_in(step: Span, key: _Key, by_key: Mapping[_Key, Sequence[Span]]) -> bool:
    """Whether a task's step begins in one of its thread, as where a `Profiler` counts what tasks do."""
    own = by_key.get((key[0], 0), ()) if key[1] else ()
    index = bisect_right(own, step.start_ns, key=_begin) - 1
    return index >= 0 and step.start_ns < own[index].end_ns


_begin, _end = attrgetter("start_ns"), attrgetter("end_ns")


def _reaches_into(span: Span, window: Interval) -> bool:
    return span.start_ns < window[1] and span.end_ns > window[0]


def _number(span: Span, otherwise: int) -> int:
    """The number that a step bears."""
    number = span.attributes.get("step")
    return number if isinstance(number, int) and not isinstance(number, bool) else otherwise


def _unit(span: Span, window: Interval, start_ns: int) -> _Unit:
    """A step or request from a time on, as far as it lies in the part of the window of which every span is held."""
    first, last = window
    is_whole = not span.clipped and first <= start_ns and span.end_ns <= last
    return max(start_ns, first), min(span.end_ns, last), is_whole


class _Shares:
    """How long each call of a phase was the one under way within a unit.

    `own_ns` are these times by phase, `phase_of_call` the numbers of phases by that of the call.
    """

    def __init__(self, found: _Found) -> None:
        self.own_ns: dict[str, list[int]] = {}
        self.phase_of_call: list[int] = []
        self.whole = 0
        self._whole_ns = 0
        self._timed: dict[str, int] = {}
        names = found.names
        optimizer = names.index(OPTIMIZER) if OPTIMIZER in names else None
        for line in found.lines:
            for start, end, is_whole in line.units:
                self.whole += is_whole
                self._whole_ns += (end - start) * is_whole
            if not line.calls:
                continue
            first = len(self.phase_of_call)
            own: dict[int, int] = {}
            self._cut(line, line.turns(optimizer), own, first, names)
            self.phase_of_call.extend(phase for _, _, phase in line.calls)
            for place, own_ns in own.items():
                self.own_ns.setdefault(names[line.calls[place][2]], []).append(own_ns)

    def _cut(
        self, line: _Line, turns: Iterable[tuple[int, int, int]], own: dict[int, int], first: int, names: Sequence[str]
    ) -> None:
        """The parts of the turns that lie in units."""
        units, pieces, timed = line.units, line.pieces, self._timed
        index = 0
        for start, end, place in turns:
            while index < len(units) and units[index][1] <= start:
                index += 1
            at = index
            while at < len(units) and (units[at][0] < end or units[at][0] == start):
                since, until, is_whole = units[at]
                piece_start, piece_end = max(start, since), min(end, until)
                own[place] = own.get(place, 0) + piece_end - piece_start
                pieces.append((piece_start, piece_end, first + place))
                if is_whole:
                    name = names[line.calls[place][2]]
                    timed[name] = timed.get(name, 0) + piece_end - piece_start
                if until >= end:
                    break
                at += 1

    def means(self) -> dict[str, float]:
        """The mean time of each phase in a whole unit, and of the others."""
        if not self.whole:
            return {}
        rest_ns = self._whole_ns - sum(self._timed.values())
        means = {phase: self._timed[phase] / self.whole for phase in sorted(self._timed, key=_place)}
        return {**means, OTHERS: rest_ns / self.whole}


class _Streams:
    """The device time of units and phases: sums over streams of what was put there, and of each stream the union."""

    def __init__(self, spans: Sequence[Span], found: _Found, shares: _Shares) -> None:
        spans, units, calls = placed(
            spans, {key: line.number for key, line in found.by_key.items()}, found.of == "request", found.number_of,
            [line.packed() for line in found.lines],
        )  # fmt: skip
        unit_count, call_count = sum(len(line.units) for line in found.lines), len(shares.phase_of_call)
        one, numbers = array("q", bytes(8)), array("q", range(max(unit_count, call_count)))
        each_unit, all_units, each_call, all_calls, of_phases = summed(
            spans,
            [
                (units, numbers[:unit_count]),
                (units, one * unit_count),
                (calls, numbers[:call_count]),
                (calls, one * call_count),
                (calls, array("q", shares.phase_of_call)),
            ],
        )
        self._units = [device_ns for device_ns in each_unit if device_ns is not None]
        self.base_ns, self._covered_ns = (sum(its or 0 for its in every) for every in (all_units, all_calls))
        self._calls: dict[str, list[int]] = {}
        for phase, device_ns in zip(shares.phase_of_call, each_call, strict=True):
            if device_ns is not None:
                self._calls.setdefault(found.names[phase], []).append(device_ns)
        self._phases = {name: device_ns or 0 for name, device_ns in zip(found.names, of_phases, strict=False)}
        self._counts = {name: len(own) for name, own in shares.own_ns.items()}

    def of_units(self, count: int) -> PhaseTimes | None:
        """Of all units, and of each."""
        return self._of(self._units, count, self.base_ns)

    def of_phase(self, name: str) -> PhaseTimes | None:
        """Of the calls of one phase, and of each."""
        return self._of(self._calls.get(name, []), self._counts[name], self._phases.get(name, 0))

    def of_others(self) -> PhaseTimes | None:
        """What is of no phase."""
        return _rest(self.base_ns - self._covered_ns, self.base_ns) if self._units else None

    def _of(self, each: list[int], count: int, total_ns: int) -> PhaseTimes | None:
        """Of so many calls, of which those of `each` put something on a stream."""
        if not self._units:
            return None
        return _times(each if len(each) == count else [*each, 0], total_ns, self.base_ns, count)


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
    kept = {row.name for row in large[: options.rows]}
    rest = [row for row in rows if row.name not in kept]
    shown = [row for row in rows if row.name in kept]
    if rest:
        host = _rest(sum(row.host.total_ns for row in rest), base_ns)
        timed = [row.device.total_ns for row in rest if row.device is not None]
        device = _rest(sum(timed), device_base_ns) if timed else None
        shown.append(PhaseRow(f"(remaining {len(rest)})", sum(row.calls or 0 for row in rest), host, device))
    return shown


def _seconds(value_ns: float | None) -> str:
    return MISSING if value_ns is None else number(value_ns / 1e9)
