"""Floating-point operations by operator: part of the `operators` view, where spans tell how many they did.

Spans tell it by their attribute `flops`: operators in traces of torch.profiler that noted shapes, spans of ours that
such a trace was laid beside, and scopes to which it was given. It is what a span did itself; a row adds up what its
calls and all below them on their line did, each call once. That is what the FLOPs column of the Operator Summary of
`paddle.profiler` and the Mflops and Gflops/s of Theano's Apply section are; Theano divides the operations of one call
by the time of all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from instrument.report.places import places
from instrument.report.stretches import UNTIMED, having
from instrument.report.table import MISSING, bounded, compact, in_unit, named_table, section_title, share, tenths
from instrument.report.view import Options
from instrument.spans import FLOPS, Interval, Span, Trace, flops_told, length, union


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
            "FLOPs: what calls and all below them were told to have done; a multiplication and an addition are two.",
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
    for number, place in places(trace, ((one.thread_id, one.at_ns, at) for at, one in enumerate(beside))):
        if isinstance(place, str):
            elsewhere += beside[number].flops
        else:
            told.append((place, beside[number].flops))
    if not told and not elsewhere:
        return None
    parents = {span.parent_id for span in trace.spans} if told else set()
    above = {span.span_id: span for span in trace.spans if span.span_id in parents} if told else {}
    found: dict[tuple[str, str], tuple[list[int], dict[int, Span]]] = {}
    for at, (span, _) in enumerate(told):
        outermost: dict[tuple[str, str], Span] = {}
        own = span.site.name, span.site.kind
        for one in _upwards(span, above):
            key = one.site.name, one.site.kind
            if key == own or one.site.kind in kinds:
                outermost[key] = one
        for key, call in outermost.items():
            its, calls = found.setdefault(key, ([], {}))
            its.append(at)
            calls[call.span_id] = call
    whole = elsewhere + sum(count for _, count in told)
    launched = _Launched(trace, above, {id_: call for _, calls in found.values() for id_, call in calls.items()})

    def row(name: str, kind: str) -> FlopRow:
        its, calls = found[name, kind]
        flops = sum(told[at][1] for at in its)
        return FlopRow(name, kind, len(calls), flops, *launched.time_of(calls.values()), share(flops, whole))

    def rest(rows: Sequence[FlopRow]) -> FlopRow:
        # They may lie in one another: each told number counts once, and times would count some twice.
        flops = sum(told[at][1] for at in {at for row in rows for at in found[row.name, row.kind][0]})
        return FlopRow("", "", sum(row.calls for row in rows), flops, "", None, share(flops, whole), len(rows))

    rows = sorted((row(*key) for key in found), key=lambda row: (-row.flops, row.name, row.kind))
    return FlopTable(whole, elsewhere, bounded(rows, options, lambda row: row.time_ns or 0, rest))


def _upwards(span: Span, above: Mapping[int, Span]) -> Iterator[Span]:
    """A span and those around it on its line. Ids of a damaged file may run in a circle."""
    seen: set[int] = set()
    one: Span | None = span
    while (
        one is not None and one.span_id not in seen and (one.thread_id, one.task_id) == (span.thread_id, span.task_id)
    ):
        yield one
        seen.add(one.span_id)
        one = above.get(one.parent_id)


def _asking(
    span: Span, above: Mapping[int, Span], asks: Collection[int], known: dict[int, tuple[int, ...]]
) -> tuple[int, ...]:
    """Which of some calls are a span, or around it on its line. `known` has it of the spans around, found once each."""
    own = (span.span_id,) if span.span_id in asks else ()
    up = above.get(span.parent_id)
    if up is None or up.thread_id != span.thread_id or up.task_id != span.task_id:
        return own
    if up.span_id not in known:
        its: tuple[int, ...] = ()
        for one in reversed(list(_upwards(up, above))):
            its = known[one.span_id] = (*its, one.span_id) if one.span_id in asks else its
    return known[up.span_id] + own


class _Launched:
    """What calls asked a device for: the kernels that torch.profiler saw, by the thread that asked for them and when,
    and of a call without any the device intervals of its own and of what is below it on its line."""

    def __init__(self, trace: Trace, above: Mapping[int, Span], calls: Mapping[int, Span]) -> None:
        by_thread: dict[int, list[tuple[int, int]]] = {}
        for one in trace.kernels:
            if one.thread_id and one.kind == "kernel":
                by_thread.setdefault(one.thread_id, []).append((one.launched_ns, one.end_ns - one.start_ns))
        self._times: dict[int, tuple[list[int], list[int]]] = {}
        for thread_id, its in by_thread.items():
            its.sort()
            sums = [0, *accumulate(length_ns for _, length_ns in its)]
            self._times[thread_id] = [launched_ns for launched_ns, _ in its], sums
        self._launched = {id_: self._within(call) for id_, call in calls.items()}
        asks = {id_ for id_, launched_ns in self._launched.items() if not launched_ns}
        stretches: dict[int, list[Interval]] = {}
        known: dict[int, tuple[int, ...]] = {}
        for span in trace.spans if asks else ():
            if not span.device:
                continue
            for call in _asking(span, above, asks, known):
                timed = ((part.start_ns, part.end_ns) for part in span.device if part.label not in UNTIMED)
                stretches.setdefault(call, []).extend(timed)
        self._launched.update((id_, length(union(parts))) for id_, parts in stretches.items())

    def time_of(self, calls: Collection[Span]) -> tuple[str, int | None]:
        """Where some calls took their time, and how long, if that is the same for all."""
        on_device = [self._launched[span.span_id] for span in calls]
        if all(on_device):
            return "GPU", sum(on_device)
        return ("", None) if any(on_device) else ("CPU", sum(span.total_ns for span in calls))

    def _within(self, span: Span) -> int:
        times, sums = self._times.get(span.thread_id, ([], [0]))
        return sums[bisect_left(times, span.end_ns)] - sums[bisect_left(times, span.start_ns)]
