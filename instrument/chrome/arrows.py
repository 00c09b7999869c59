"""Arrows: what leads from a span to what it started on another thread or task, and on the device, and from a batch to
where its requests are.

One that would point into the past, or that the format has no room for, is left out and counted in
`instrument.arrows_left_out`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.chrome.batch_marks import BatchMarks
from instrument.chrome.interval_events import IntervalEvents
from instrument.chrome.ordered import OrderedIntervals, Spans, batches
from instrument.chrome.span_events import SpanEvents
from instrument.trace.columns import Bools, Int32s, Int64s
from instrument.trace.groups import by_first_sight
from instrument.trace.text import MILLI

SPARE_BINDS = 1 << 63
"""Set in every bind id, because Perfetto numbers the `s` and `f` arrows from 0 in the same space."""


class Arrows:
    """The arrows that a file of these spans and intervals can have.

    Complete events have arrows of their own. Async slices can only be tied by a bind id, of which a slice has room for
    one: `binds` are those texts of spans, `ties` those of intervals, by their places. Where a span would need two, its
    own intervals win, then what it called. `left_out` counts what is not drawn. `marked` are the bind ids of batches,
    from which arrows lead to `marks`.
    """

    def __init__(self, spans: Spans, intervals: OrderedIntervals, marks: BatchMarks) -> None:
        self._spans, self._intervals, owners = spans, intervals, intervals.owner
        of_async = spans.is_async[owners]
        drawn = self._may_lead(owners, intervals.start_ns, of_async)
        self._launched = np.flatnonzero(drawn & ~of_async)
        tied = np.flatnonzero(drawn & of_async).tolist()
        self.ties = {place: self._bind(int(owners[place]), "in") for place in tied}
        bound = {owner: owner for owner in owners[tied].tolist()}
        self.left_out = int((~drawn).sum())
        called, callers = spans.called_away()
        by_bind = spans.is_async[callers] | spans.is_async[called]
        drawn = self._may_lead(callers, spans.start_ns[called], by_bind)
        self._called = called[drawn & ~by_bind]
        self.left_out += int((~drawn).sum())
        by_bind &= drawn
        for caller, one in zip(callers[by_bind][::-1].tolist(), called[by_bind][::-1].tolist(), strict=True):
            if one not in bound and bound.get(caller, caller) == caller:
                bound[one] = bound[caller] = caller
            else:
                self.left_out += 1
        its_batches = np.unique(marks.batch).tolist()
        marks.leave_out([one for one in its_batches if bound.setdefault(one, one) != one])
        self.left_out += marks.left_out
        self.marked = {one: self._bind_id(one) for one in np.unique(marks.batch).tolist()}
        self.binds = {one: self._bind(source, "out" if one == source else "in") for one, source in bound.items()}

    def _may_lead(self, sources: Int64s | Int32s, targets_ns: Int64s, by_bind: Bools) -> Bools:
        """Which arrows can lead to what starts then. What a bind ties must start later than its source: at the same
        time Perfetto sees complete events before async ones, and what it sees first cannot be an end."""
        starts_ns = self._spans.start_ns[sources]
        return np.asarray((starts_ns < targets_ns) | ((starts_ns == targets_ns) & ~by_bind))

    def _bind(self, source: int, direction: str) -> str:
        return f',"bind_id":"{self._bind_id(source)}","flow_{direction}":true'

    def _bind_id(self, source: int) -> str:
        return f"{SPARE_BINDS | int(self._spans.span_id[source]):#x}"

    def texts(self, of_spans: SpanEvents, of_intervals: IntervalEvents) -> Iterator[str]:
        """The arrows between complete events, each behind a comma. Both ends attach to the innermost slice at their
        time."""
        spans, intervals, calls, launches = self._spans, self._intervals, self._called, self._launched
        for name, sources, to_ns, kinds, addresses in (
            ("call", spans.parent[calls], spans.start_ns[calls], of_spans.kind[calls], of_spans.addresses),
            (
                "ac2g", intervals.owner[launches], intervals.start_ns[launches], of_intervals.kind[launches],
                of_intervals.addresses,
            ),
        ):  # fmt: skip
            begins = np.zeros(len(sources), dtype=np.bool_)
            begins[by_first_sight(sources)[1]] = True
            its_name = f',"name":"{name}","cat":"{name}","id":'
            for first, end in batches(len(sources)):
                source = sources[first:end]
                us, ns = np.divmod(spans.start_ns[source], 1000)
                to_us, to_rest = np.divmod(to_ns[first:end], 1000)
                columns: tuple[NDArray[Any], ...] = (
                    begins[first:end], of_spans.kind[source], spans.span_id[source], us, ns, kinds[first:end], to_us,
                    to_rest,
                )  # fmt: skip
                yield "".join(
                    [
                        (
                            f',\n{{"ph":"s"{of_spans.addresses[kind]}{its_name}{span_id},"ts":{at_us}{MILLI[at_ns]}}}'
                            if is_first
                            else ""
                        )
                        + f',\n{{"ph":"f","bp":"e"{addresses[to]}{its_name}{span_id},"ts":{then_us}{MILLI[then_ns]}}}'
                        for is_first, kind, span_id, at_us, at_ns, to, then_us, then_ns in zip(
                            *(column.tolist() for column in columns), strict=True
                        )
                    ]
                )
