"""What blocked event loops while requests were open: by whom, how often and for how long.

The stretches are spans that `requests:` in the profile sees to, of callbacks longer than its `limits.blocked`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from instrument.recording.spans import BLOCKED_AT, BLOCKED_BY, is_blocked_loop
from instrument.report.table import bounded, row_name
from instrument.report.view import Options
from instrument.trace.columns import Trace


@dataclass(frozen=True, slots=True)
class Blocker:
    """The stretches by one span or function: their number, their sum and the longest, both in nanoseconds.

    `remaining` is the number of spans and functions in the row of the others. `at` is the place in the service's code
    that took most of the time, "" where no place was recorded.
    """

    name: str
    stretches: int
    summed_ns: int
    longest_ns: int
    remaining: int = 0
    at: str = ""

    def indented(self) -> Blocker:
        """The same with a name that stands below that of the whole."""
        return replace(self, name=f"  {row_name(self)}", remaining=0)


@dataclass(frozen=True, slots=True)
class BlockedLoops:
    """All stretches, of all event loops: how many, their sum and the longest, and by whom, most time first."""

    stretches: int
    summed_ns: int
    longest_ns: int
    by: tuple[Blocker, ...]

    def whole(self) -> Blocker:
        """All of them as a row."""
        return Blocker("loop blocked", self.stretches, self.summed_ns, self.longest_ns)


def blocked_loops(trace: Trace, options: Options) -> BlockedLoops | None:
    """Return the blocked loops of a trace, None where no loop was blocked. `rows` and `least_ns` bound `by`."""
    found: dict[str, list[int]] = {}
    places: dict[str, Counter[str]] = {}
    rows = np.flatnonzero(trace.of_sites([is_blocked_loop(site) for site in trace.sites]))
    columns = (trace.attributes.values(name, rows) for name in (BLOCKED_BY, BLOCKED_AT))
    for by, at, took_ns in zip(*columns, trace.total_ns[rows].tolist(), strict=True):
        name = "" if by is None else str(by)
        found.setdefault(name, []).append(took_ns)
        if at is not None:
            places.setdefault(name, Counter())[str(at)] += took_ns
    if not found:
        return None
    each = [_blocker(name, times) for name, times in found.items()]
    each = [replace(one, at=places[one.name].most_common(1)[0][0]) if one.name in places else one for one in each]
    each.sort(key=lambda one: (-one.summed_ns, one.name))

    def rest(others: Sequence[Blocker]) -> Blocker:
        return _blocker("", (ns for one in others for ns in found[one.name]), remaining=len(others))

    all_of_it = _blocker("", (ns for times in found.values() for ns in times))
    shown = bounded(each, options, lambda one: one.summed_ns, rest)
    return BlockedLoops(all_of_it.stretches, all_of_it.summed_ns, all_of_it.longest_ns, shown)


def _blocker(name: str, times: Iterable[int], remaining: int = 0) -> Blocker:
    known = list(times)
    return Blocker(name, len(known), sum(known), max(known), remaining)
