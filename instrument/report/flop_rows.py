"""Floating-point operations by operator: part of the `operators` view, where spans tell how many they did.

Spans tell it by their attribute `flops`: operators in traces of torch.profiler that noted shapes, spans of ours that
such a trace was laid beside, and scopes to which it was given. It is what a span did itself; a row adds up what its
calls and all below them on their line did, each call once. That is what the FLOPs column of the Operator Summary of
`paddle.profiler` and the Mflops and Gflops/s of Theano's Apply section are; Theano divides the operations of one call
by the time of all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from instrument.recording.spans import FLOPS, Span, Trace, flops_told
from instrument.report.calls import device_ns, lines
from instrument.report.places import NO_SPAN, places
from instrument.report.stretches import having
from instrument.report.table import MISSING, bounded, compact, in_unit, named_table, section_title, share, tenths
from instrument.report.view import Options


@dataclass(frozen=True, slots=True)
class FlopRow:
    """The operations of the calls of one operator, and of what is below them on their line.

    `calls` are those that told any or had any below them; where one lies in another of its name the outer one counts.
    They took `time_ns` `on` devices (`GPU`) if each of them asked for work there, on the host (`CPU`) if none did; else
    there is no such time. `ratio` is of all operations that were told. A row with `remaining` stands for so many.
    """

    name: str
    kind: str
    calls: int
    flops: int
    on: str
    time_ns: int | None
    ratio: float | None
    remaining: int = 0

    @property
    def per_call(self) -> float | None:
        """Operations of a call."""
        return share(self.flops, self.calls)

    @property
    def rate_gflop_s(self) -> float | None:
        """10^9 operations a second over the time of these calls."""
        return None if self.time_ns is None else share(self.flops, self.time_ns)


@dataclass(frozen=True, slots=True)
class FlopTable:
    """All operations that were told, and the rows by how many. `elsewhere` ran where no span was open, or those of
    several tasks, and are in no row."""

    flops: int
    elsewhere: int
    rows: tuple[FlopRow, ...]

    def lines(self, unit: str) -> list[str]:
        """The text, times in the unit."""
        cells = [
            [
                f"(remaining {row.remaining})" if row.remaining else row.name,
                str(row.calls),
                *(compact(value, 10) for value in (row.flops, row.per_call)),
                tenths(row.ratio, 1),
                row.on or MISSING,
                MISSING if row.time_ns is None else in_unit(row.time_ns, unit),
                compact(row.rate_gflop_s),
            ]
            for row in self.rows
        ]
        lines = [
            *section_title("Operations"),
            *named_table(["Operator", "Calls", "FLOPs", "Per call", "Of all", "On", "Time", "GFLOP/s"], cells, 7),
            "FLOPs: what calls and all below them were told to have done; a multiplication and an addition: two.",
            "Time: of these calls; where each of them asked a device for work, of that.",
        ]
        if self.elsewhere:
            part = tenths(self.elsewhere, self.flops)
            lines.append(f"{part} ran where no span was open, or those of several tasks: they are in no row.")
        return [*lines, ""]


def flop_table(trace: Trace, kinds: Collection[str], options: Options) -> FlopTable | None:
    """The table of spans of these kinds, and of others that tell operations of their own; None where nothing is told.

    `rows` and `least_ns` (of the time of a row's calls) bound it. Where anything is told, 1 us a span.
    """
    first, last = trace.held
    told: list[tuple[Span, int]] = []
    for span in having(trace.spans, FLOPS):
        count = flops_told(span)
        if count and first <= span.start_ns < last:
            told.append((span, count))
    beside = [one for one in trace.flops if one.flops > 0 and first <= one.at_ns < last]
    elsewhere = 0
    asked = places(trace, [one.thread_id for one in beside], [one.at_ns for one in beside])
    for place, one in zip(asked, beside, strict=True):
        if isinstance(place, str):
            elsewhere += one.flops
        else:
            told.append((place, one.flops))
    if not told and not elsewhere:
        return None
    whole = elsewhere + sum(count for _, count in told)
    tree = _Tree(trace.spans, told, kinds)
    launched = _launched(trace, {span.span_id: span for calls in tree.calls.values() for span in calls})

    def row(name: str, kind: str) -> FlopRow:
        flops, calls = tree.flops[name, kind], {span.span_id: span for span in tree.calls[name, kind]}
        return FlopRow(name, kind, len(calls), flops, *_time_of(calls.values(), launched), share(flops, whole))

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

    def __init__(self, spans: Sequence[Span], told: Sequence[tuple[Span, int]], kinds: Collection[str]) -> None:
        its, self._around = lines(spans, [span for span, _ in told])
        numbers = {id(span): number for number, span in enumerate(its)}
        self._told = [0] * len(its)
        for span, count in told:
            self._told[numbers[id(span)]] += count
        names: dict[tuple[str, str], int] = {}
        known = {site: names.setdefault((site.name, site.kind), len(names)) for site in {span.site for span in its}}
        self._names = names
        self._name_of = [known[span.site] for span in its]
        self._is_asked = [kind in kinds for _, kind in names]
        sums, calls = self._summed()
        self.flops = {name: sums[at] for name, at in names.items()}
        self.calls = {name: [its[number] for number in calls[at]] for name, at in names.items() if calls[at]}

    def _summed(self) -> tuple[list[int], list[dict[int, None]]]:
        """What was told by name, and the numbers of the calls."""
        count, name_of, arounds, told = len(self._told), self._name_of, self._around, self._told
        # Each comes after the one around it. Of each the first of those right in it, and the next beside it; those of
        # none at the end.
        below, first, beside = told.copy(), [NO_SPAN] * (count + 1), [NO_SPAN] * count
        for number in range(count - 1, -1, -1):
            around = arounds[number]
            if around != NO_SPAN:
                below[around] += below[number]
            beside[number] = first[around]
            first[around] = number
        sums = [0] * len(self._names)
        calls: list[dict[int, None]] = [{} for _ in sums]
        opened = [NO_SPAN] * len(sums)
        number = first[NO_SPAN]
        while number != NO_SPAN:
            name = name_of[number]
            if opened[name] == NO_SPAN:
                opened[name] = number
                if self._is_asked[name]:
                    sums[name] += below[number]
                    calls[name][number] = None
            if told[number] and not self._is_asked[name]:
                sums[name] += told[number]
                calls[name][opened[name]] = None
            inner = first[number]
            while inner == NO_SPAN and number != NO_SPAN:  # it is over, and maybe those around it
                if opened[name_of[number]] == number:
                    opened[name_of[number]] = NO_SPAN
                inner, number = beside[number], arounds[number]
            number = inner
        return sums, calls

    def flops_of_any(self, names: Collection[tuple[str, str]]) -> int:
        """What was told by or below spans that are of one of these names and kinds."""
        wanted = [name in names for name in self._names]
        found, inside = 0, list[bool]()
        for name, around, count in zip(self._name_of, self._around, self._told, strict=True):
            inside.append((around != NO_SPAN and inside[around]) or (wanted[name] and self._is_asked[name]))
            found += count if wanted[name] or inside[-1] else 0
        return found


def _launched(trace: Trace, calls: Mapping[int, Span]) -> dict[int, int]:
    """How long devices worked for what calls asked for: the kernels that torch.profiler saw, by the thread that asked
    for them and when, and of a call without any the device intervals of its own and of what is below it on its line."""
    by_thread: dict[int, list[tuple[int, int]]] = {}
    for one in trace.kernels:
        if one.thread_id and one.kind == "kernel":
            by_thread.setdefault(one.thread_id, []).append((one.launched_ns, one.end_ns - one.start_ns))
    kernels: dict[int, tuple[list[int], list[int]]] = {}
    for thread_id, its in by_thread.items():
        its.sort()
        sums = [0, *accumulate(length_ns for _, length_ns in its)]
        kernels[thread_id] = [launched_ns for launched_ns, _ in its], sums
    found: dict[int, int] = {}
    for id_, call in calls.items():
        times, sums = kernels.get(call.thread_id, ([], [0]))
        launched_ns = sums[bisect_left(times, call.end_ns)] - sums[bisect_left(times, call.start_ns)]
        if launched_ns:
            found[id_] = launched_ns
    return found | device_ns(trace.spans, [call for id_, call in calls.items() if id_ not in found])


def _time_of(calls: Collection[Span], launched: Mapping[int, int]) -> tuple[str, int | None]:
    """Where some calls took their time, and how long, if that is the same for all."""
    on_device = [launched[span.span_id] for span in calls if span.span_id in launched]
    if len(on_device) == len(calls):
        return "GPU", sum(on_device)
    return ("", None) if on_device else ("CPU", sum(span.total_ns for span in calls))
