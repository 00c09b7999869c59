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

from instrument.report.calls import around, device_ns
from instrument.report.places import places
from instrument.report.stretches import having
from instrument.report.table import MISSING, bounded, compact, in_unit, named_table, section_title, share, tenths
from instrument.report.view import Options
from instrument.spans import FLOPS, Span, Trace, flops_told


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
    found: dict[tuple[str, str], tuple[list[int], dict[int, Span]]] = {}
    for at, ((span, _), above) in enumerate(zip(told, around(trace.spans, [span for span, _ in told]), strict=True)):
        own = span.site.name, span.site.kind
        outermost = {own: span}
        for outer in above:
            key = outer.site.name, outer.site.kind
            if key == own or outer.site.kind in kinds:
                outermost[key] = outer
        for key, call in outermost.items():
            if key not in found:
                found[key] = [], {}
            its, calls = found[key]
            its.append(at)
            calls[call.span_id] = call
    whole = elsewhere + sum(count for _, count in told)
    launched = _launched(trace, {id_: call for _, calls in found.values() for id_, call in calls.items()})

    def row(name: str, kind: str) -> FlopRow:
        its, calls = found[name, kind]
        flops = sum(told[at][1] for at in its)
        return FlopRow(name, kind, len(calls), flops, *_time_of(calls.values(), launched), share(flops, whole))

    def rest(rows: Sequence[FlopRow]) -> FlopRow:
        # They may lie in one another: each told number counts once, and times would count some twice.
        flops = sum(told[at][1] for at in {at for row in rows for at in found[row.name, row.kind][0]})
        return FlopRow("", "", sum(row.calls for row in rows), flops, "", None, share(flops, whole), len(rows))

    rows = sorted((row(*key) for key in found), key=lambda row: (-row.flops, row.name, row.kind))
    return FlopTable(whole, elsewhere, bounded(rows, options, lambda row: row.time_ns or 0, rest))


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
