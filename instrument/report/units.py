"""Units, of which phases are: the steps of each thread and task, else the requests, else the window; and which calls of
phases ran beside them.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter

from instrument.recording.spans import Interval, Site, Span, Trace, subtract, union
from instrument.report.stretches import Line, grouped, packed, sites

LOADER = "loader"
OPTIMIZER = "optimizer"

PROFILERS = "instrument.Profiler.step"
"""The function of the steps that a `Profiler` makes."""


def phase_of(site: Site) -> str | None:
    """The phase that spans of a site are, None where they are none: also one that is declared to be none of a step."""
    if site.kind == LOADER:
        return LOADER
    declared = dict(site.attributes).get("phase")
    if declared is False:
        return None
    if isinstance(declared, str) and declared:
        return declared
    return site.name if site.kind == "phase" else None


Key = tuple[int, int]
"""A thread and the task that ran on it, 0 for none."""


def steps_of(spans: Iterable[Span]) -> dict[Key, list[Span]]:
    """The steps of each thread and task that begin in no other one of it, in the order of time."""
    by_key: dict[Key, list[Span]] = {}
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


Unit = tuple[int, int, bool]
"""Start and end of a step or request, or of the window, and whether it is whole."""

Call = tuple[int, int, int, int, int]
"""Start of a call of a phase, its end with a minus, its id, its rank and the number of the phase: what is around comes
first."""

OWN, ASIDE, SUSPENDED = range(3)
"""The rank of a call: one on the track of its unit; one of another track that works for it, or below a generator; and a
generator that stood still for some of its time. A unit's instants belong to what ran on its own track, since what is
known of the others is that they were open, and not when they ran."""


class UnitLine:
    """Units that follow one another, and the calls of phases beside them.

    `pieces` are the stretches of the units in which a call is the one under way, with its number among all calls.
    """

    __slots__ = ("_steps", "calls", "first_unit", "number", "pieces", "units")

    def __init__(
        self, units: list[Unit], first_unit: int, steps: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> None:
        self.units = units
        self._steps = steps
        self.first_unit = first_unit
        self.number = 0
        self.calls: list[Call] = []
        self.pieces: list[tuple[int, int, int]] = []

    def settle(self) -> list[Call]:
        """Put the calls in order, and leave out and return those that lie between steps, also ones that are skipped.

        Of a generator that stood still no more counts than lies in the step in which it began.
        """
        self.calls.sort()
        if self._steps is None:
            return []
        starts, ends = self._steps
        within, beside = list[Call](), list[Call]()
        begun, count = 0, len(starts)
        for call in self.calls:
            start_ns, minus_end_ns, span_id, rank, phase = call
            while begun < count and starts[begun] <= start_ns:
                begun += 1
            is_within = begun > 0 and start_ns < ends[begun - 1]
            if is_within and rank == SUSPENDED:
                within.append((start_ns, max(minus_end_ns, -ends[begun - 1]), span_id, rank, phase))
            elif is_within or (rank != SUSPENDED and begun < count and starts[begun] < -minus_end_ns):
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
        """Each instant given to one call: start, end and place of the call, in the order of time.

        First come those on the track of the unit, of these an optimizer after the rest, and then all others.
        """
        calls = self.calls
        by_turn: tuple[list[int], list[int], list[int]] = [], [], []
        for place, (*_, rank, phase) in enumerate(calls):
            by_turn[2 if rank != OWN else 1 if phase == optimizer else 0].append(place)
        taken = list[tuple[int, int, int]]()
        for places in filter(None, by_turn):
            if not taken:
                taken += _in_turn(calls, places)
                continue
            others = [(start, end) for start, end, _ in taken if start < end]
            for start, end, place in _in_turn(calls, places):
                index = bisect_right(others, start, key=lambda part: part[1])
                stop = bisect_right(others, end, key=lambda part: part[0])
                free = subtract([(start, end)], others[index:stop]) if index < stop and start < end else [(start, end)]
                taken.extend((*part, place) for part in free)
            taken.sort()
        return taken


def _in_turn(calls: Sequence[Call], places: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    """Calls in their order, each from where those before it are over. One that lies in another is left out."""
    over_ns: int | None = None
    for place in places:
        start_ns, minus_end_ns, *_ = calls[place]
        end_ns = -minus_end_ns
        if over_ns is None or start_ns >= over_ns:
            yield start_ns, end_ns, place
        elif end_ns > over_ns:
            yield over_ns, end_ns, place
        else:
            continue
        over_ns = end_ns


class Units:
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
        self.by_key: dict[Key, UnitLine] = {}
        self._parents: dict[int, int] = {}
        self._of_step: dict[int, UnitLine] = {}
        self._known: dict[int, int] = {}
        self.skipped = self.before = 0
        if steps:
            self._find_steps(trace, steps, loaders, skip_first)
        elif requests:
            self.by_key = {
                (span.span_id, 0): UnitLine([_unit(span, held, span.start_ns)], count)
                for count, span in enumerate(requests)
            }
        else:
            self.by_key = {(0, 0): UnitLine([(*held, True)], 0)}
        self.lines = list(self.by_key.values())
        for place, own in enumerate(self.lines):
            own.number = place
        self.names = list({phase: None for phase in phase_of_site.values() if phase})
        numbers = {phase: number for number, phase in enumerate(self.names)}
        calls = [*loaders, *others]
        stood_still = {span.span_id for span in calls if span.active_ns < span.total_ns}
        is_task_aside = steps and any(
            span.task_id and (span.thread_id, span.task_id) not in self.by_key for span in calls
        )
        if (stood_still or is_task_aside) and not self._parents:
            self._parents = {span.span_id: span.parent_id for span in trace.spans}
        self._stood_still = stood_still
        self.beside = [
            min(-minus_end_ns, held[1]) - max(start_ns, held[0])
            for start_ns, minus_end_ns, *_ in self._give_out(
                calls,
                {site: numbers[phase] for site, phase in phase_of_site.items() if phase},
                {span.span_id for span in around},
            )
            if start_ns < held[1] and -minus_end_ns > held[0]
        ]

    def _give_out(self, calls: Iterable[Span], numbers: Mapping[Site, int], around: Collection[int]) -> list[Call]:
        """Give the calls to the lines beside which they ran, and return those of none.

        What a communication or a copy consists of, the spans `around`, is no phase of the step.
        """
        by_key, by_root, beside = self.by_key, self.of == "request", list[Call]()
        stood_still, below = self._stood_still, dict[int, int]()
        for span in calls:
            if span.parent_id not in around:
                key = (span.root_id, 0) if by_root else (span.thread_id, span.task_id)
                own = by_key.get(key)
                line = own or self.line_of(span)
                rank = OWN if own is not None or self.of != "step" else ASIDE
                if stood_still:
                    rank = SUSPENDED if span.span_id in stood_still else rank
                    rank = ASIDE if rank == OWN and self._above(span, stood_still, below) else rank
                call = span.start_ns, -span.end_ns, span.span_id, rank, numbers[span.site]
                (beside if line is None else line.calls).append(call)
        for line in self.lines:
            beside += line.settle()
        return beside

    def _find_steps(self, trace: Trace, steps: list[Span], loaders: Iterable[Span], skip_first: int) -> None:
        by_key = steps_of(steps)
        if len({thread_id for thread_id, _ in by_key}) < len(by_key):  # tasks, which may have steps at the same time
            self._parents = {span.span_id: span.parent_id for span in trace.spans}
            ids, known = {step.span_id for own in by_key.values() for step in own}, dict[int, int]()
            topmost = {
                key: [step for step in own if not self._above(step, ids, known) and not _lies_in(step, key, by_key)]
                for key, own in by_key.items()
            }
            by_key = {key: own for key, own in topmost.items() if own}
        waits: dict[Key, list[Interval]] = {}
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
            line = self.by_key[key] = UnitLine(units, count, (starts, [step.end_ns for step in own]))
            count += len(units)
            self._of_step.update((step.span_id, line) for step in own)

    @staticmethod
    def _first_of_threads(by_key: Mapping[Key, Sequence[Span]], count: int) -> set[int]:
        """The ids of steps that come before the one of this number on their thread, by the number that a step bears."""
        on_thread: dict[int, list[Span]] = {}
        for (thread_id, _), own in by_key.items():
            on_thread.setdefault(thread_id, []).extend(own)
        for own in on_thread.values():
            own.sort(key=_begin)
        return {
            step.span_id for own in on_thread.values() for place, step in enumerate(own) if _number(step, place) < count
        }

    def _above(self, span: Span, ids: Collection[int], known: dict[int, int]) -> int:
        """The nearest span around one whose id is among these, 0 for none. `known` keeps what was found by the way."""
        way: list[int] = []
        at = self._parents.get(span.span_id, 0)
        while at and at not in ids and at not in known:
            known[at] = 0  # which it stays where parents run in a circle, as in a damaged file
            way.append(at)
            at = self._parents.get(at, 0)
        found = at if at in ids else known.get(at, 0)
        known.update(dict.fromkeys(way, found))
        return found

    def line_of(self, span: Span) -> UnitLine | None:
        """The line beside which a span ran."""
        if self.of == "request":
            return self.by_key.get((span.root_id, 0))
        if self.of == "window":
            return self.by_key[0, 0]
        # A task that has no steps of its own works for those of its thread, or for the one that it was begun in.
        line = self.by_key.get((span.thread_id, span.task_id)) or self.by_key.get((span.thread_id, 0))
        return line or self._of_step.get(self._above(span, self._of_step, self._known))

    def number_of(self, span: Span) -> int | None:
        """The number of its line."""
        line = self.line_of(span)
        return None if line is None else line.number


def _lies_in(step: Span, key: Key, by_key: Mapping[Key, Sequence[Span]]) -> bool:
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


def _unit(span: Span, window: Interval, start_ns: int) -> Unit:
    """A step or request from a time on, as far as it lies in the part of the window of which every span is held."""
    first, last = window
    is_whole = not span.clipped and first <= start_ns and span.end_ns <= last
    return max(start_ns, first), min(span.end_ns, last), is_whole
