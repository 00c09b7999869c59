"""Operators of torch as spans of a window: children of what was open around them, parents of what ran within.

torch.profiler reports the begin and end of each operator. An operator becomes a child of the innermost span that was
open on its thread at its middle, for the two clocks agree to within a microsecond. It is cut to the time of that span.
Device work is the device time of the innermost operator that launched it. Copies are left to the spans of copies, so no
copy counts as an operator's work.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from instrument.recording.spans import FLOPS, OPERATORS, AttributeValue, DeviceInterval, Kernel, Site, Span, flops_told
from instrument.runtime.cheap_start import replace

if TYPE_CHECKING:
    from instrument.trace.trace import Trace

UNCERTAINTY_NS = 1_000
"""The uncertainty of a kernel's time on the host's clock, in nanoseconds."""

_IDS = itertools.count(3 << 60)
"""Span ids that neither a recorder reaches nor a step has."""

_start = attrgetter("start_ns")


def is_operator_slice(span: Span) -> bool:
    """Return True where a slice of torch.profiler is an operator, and no kernel, range or call of a driver."""
    return span.site.kind == "op" and "device" not in span.attributes


def with_operators(trace: Trace, torch_trace: Trace, moved_ns: int) -> Trace:
    """Return the trace with a span for each operator of torch.profiler's trace, `moved_ns` before our clock.

    The kernels of the trace, which are on our clock, become device times of operators. The spans of the trace are
    changed in place. Takes some 10 us an operator.
    """
    operators = _Operators(trace, torch_trace, moved_ns)
    if not operators.made:
        return trace
    operators.nest()
    operators.take_in(trace.spans)
    operators.set_self_times(trace.spans)
    _set_device_times(trace, operators.made)
    threads = {span.thread_id for span in operators.made}.difference(trace.threads)
    names = {thread: torch_trace.threads[thread] for thread in sorted(threads) if thread in torch_trace.threads}
    spans = [*trace.spans, *operators.made]
    return replace(trace, spans=spans, threads={**trace.threads, **names}, flops=())  # the spans have these


class _Operators:
    """The operators of a trace's time on its clock. `tops` are those that no other one contains. `below` has the
    operators within each, by its id, in the order of time."""

    def __init__(self, trace: Trace, torch_trace: Trace, moved_ns: int) -> None:
        self.made: list[Span] = []
        self.tops: list[Span] = []
        self.below: dict[int, list[Span]] = {}
        self._trace = trace
        since_ns, until_ns = trace.watched or (trace.start_ns, trace.end_ns)
        sites: dict[str, Site] = {}
        innermost: dict[int, Span | None] = {}
        for source in torch_trace.spans:  # each comes after what is around it
            around = innermost.get(source.parent_id)
            first, last = source.start_ns + moved_ns, source.end_ns + moved_ns
            start_ns, end_ns = max(first, since_ns), min(last, until_ns)
            if start_ns >= end_ns or not is_operator_slice(source):
                innermost[source.span_id] = around
                continue
            flops = flops_told(source.attributes)
            attributes: dict[str, AttributeValue] = {FLOPS: flops} if flops else {}
            site = sites.setdefault(source.site.name, Site(source.site.name, "op", OPERATORS))
            number, active_ns, is_cut = next(_IDS), end_ns - start_ns, (start_ns, end_ns) != (first, last)
            span = Span(site, number, 0, 0, source.thread_id, 0, start_ns, end_ns, active_ns, 0, None, attributes)
            span.clipped = is_cut
            innermost[source.span_id] = span
            self.made.append(span)
            if around is None:
                self.tops.append(span)
            else:
                span.parent_id = around.span_id
                self.below.setdefault(around.span_id, []).append(span)

    def nest(self) -> None:
        """Make each topmost operator, with those in it, a child of the span around it."""
        tops = self.tops
        middles = [(span.start_ns + span.end_ns) // 2 for span in tops]
        outer_spans = _open_at(self._trace.spans, [span.thread_id for span in tops], middles)
        for top, around in zip(tops, outer_spans, strict=True):
            pending: list[tuple[Span, Span | None]] = [(top, around)]
            while pending:
                span, outer = pending.pop()
                if outer is None:
                    span.root_id = span.span_id
                else:
                    span.parent_id, span.root_id, span.task_id = outer.span_id, outer.root_id, outer.task_id
                    span.start_ns = min(max(span.start_ns, outer.start_ns), outer.end_ns)
                    span.end_ns = max(min(span.end_ns, outer.end_ns), span.start_ns)
                    span.active_ns = span.total_ns
                pending += [(inner, span) for inner in self.below.get(span.span_id, ())]

    def take_in(self, spans: Sequence[Span]) -> None:
        """Make spans that ran within an operator, as from a hook or a checkpoint, children of the innermost one."""
        tops: dict[int, list[Span]] = {}
        for top in self.tops:
            tops.setdefault(top.thread_id, []).append(top)
        for thread_tops in tops.values():
            thread_tops.sort(key=_start)
        roots: dict[int, int] = {}
        moves: list[tuple[Span, Span]] = []
        for span in spans:
            around = _last_around(tops.get(span.thread_id, ()), span)
            if around is None or around.parent_id != span.parent_id or span.site.kind == "request":
                continue
            inner: Span | None = around
            while inner is not None:
                around, inner = inner, _last_around(self.below.get(inner.span_id, ()), span)
            moves.append((span, around))
            if span.root_id == span.span_id:
                roots[span.span_id] = around.root_id
            span.parent_id = around.span_id
        for span, around in moves:
            self.below.setdefault(around.span_id, []).append(span)
        if roots:
            for span in itertools.chain(spans, self.made):
                span.root_id = roots.get(span.root_id, span.root_id)

    def set_self_times(self, spans: Sequence[Span]) -> None:
        """Compute the self times of the operators, and reduce those of the spans around them."""
        for span in self.made:
            inner_ns = sum(inner.total_ns for inner in self.below.get(span.span_id, ()))
            span.self_ns = max(span.total_ns - inner_ns, 0)
        by_id = {span.span_id: span for span in spans}
        ours = {span.span_id for span in spans}
        for top in self.tops:
            around = by_id.get(top.parent_id)
            if around is None:
                continue
            own_ns, pending = 0, [top]
            while pending:
                span = pending.pop()
                own_ns += span.self_ns
                pending += [inner for inner in self.below.get(span.span_id, ()) if inner.span_id not in ours]
            around.self_ns = max(around.self_ns - own_ns, 0)


def _last_around(among: Sequence[Span], span: Span) -> Span | None:
    """Return the span, of a sequence without overlaps, that contains a span; None where there is none."""
    at = bisect_right(among, span.start_ns, key=_start) - 1
    return among[at] if at >= 0 and among[at].end_ns >= span.end_ns else None


def _set_device_times(trace: Trace, operators: list[Span]) -> None:
    work = [kernel for kernel in trace.kernels if kernel.thread_id and kernel.kind != "copy"]
    if not work:
        return
    launchers = _open_at(operators, [kernel.thread_id for kernel in work], [kernel.launched_ns for kernel in work])
    overlapped = _overlapped(work)
    intervals_by_id: dict[int, list[DeviceInterval]] = {}
    for number, (place, kernel) in enumerate(zip(launchers, work, strict=True)):
        if place is not None:
            label = "overlapped" if number in overlapped else "exclusive"
            position = kernel.device, kernel.stream, kernel.start_ns, kernel.end_ns
            intervals_by_id.setdefault(place.span_id, []).append(DeviceInterval(*position, label, UNCERTAINTY_NS))
    for span in operators:
        if span.span_id in intervals_by_id:
            span.device = tuple(intervals_by_id[span.span_id])


def _open_at(spans: Sequence[Span], thread_ids: Sequence[int], times_ns: Sequence[int]) -> list[Span | None]:
    """Return the innermost of the spans that was open on each thread at each time, None where none was known."""
    import numpy as np  # which a service imports when torch.profiler has seen something, and else not

    from instrument.trace.self_times import innermost
    from instrument.trace.trace import columns_of_spans

    points = (np.array(column, dtype=np.int64) for column in (thread_ids, times_ns))
    rows = innermost(columns_of_spans(spans), np.ones(len(spans), dtype=np.bool_), *points)
    return [None if row < 0 else spans[row] for row in rows.tolist()]


def _overlapped(work: Sequence[Kernel]) -> set[int]:
    """Return the numbers of kernels that overlapped another stream's on their device; `work` is in order of time."""
    overlapped: set[int] = set()
    latest: dict[int, int] = {}
    for number, kernel in enumerate(work):
        before = latest.get(kernel.device)
        if before is not None and work[before].end_ns > kernel.start_ns and work[before].stream != kernel.stream:
            overlapped |= {before, number}
        if before is None or kernel.end_ns > work[before].end_ns:
            latest[kernel.device] = number
    return overlapped
