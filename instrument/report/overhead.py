"""How the Total time of the `events` view splits: into computation and framework, in services also into waiting.

A service waits for most of its time: in queues, for I/O, and for its turn on the event loop. That is no overhead: of
self times what coroutines waited, suspended by what they awaited, counts as waiting.

The parts of a service add up to the Total time. The time of a call is given to what lies below it, on whatever thread
or task: to each its own, or where that is more than the call took, since it went on side by side or beyond the call, in
proportion. What is left is the call's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from instrument.recording.lines import CALLS, WAITING
from instrument.recording.spans import Site, is_interruption, is_operator
from instrument.report.line_sums import LineSums
from instrument.report.table import Ratio
from instrument.report.tree import TIMES

_COMPUTING = frozenset({"compute", "forward", "backward", "optimizer"})
_WAITING = frozenset({"queue", "wait"})
"""Phases in which work stands in line; a span of any kind that is called so is one."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """How the Total time of all threads splits into computation and the rest, in a service into waiting, too.

    Computation is that of layers and of phases named `compute` or declared so (`phase: compute`, and forward, backward
    and optimizer), the topmost of them. Where torch.profiler told of torch's operators it is theirs, in place of what
    layers and a training step's phases took around them. Where nothing is, neither it nor the rest is known.
    Where it went on beside or beyond the calls around it, it is more than the Total time and the rest is not known; in
    a service, where `waiting_ns` is not None, it counts no more than these took, and the three add up.
    """

    total_ns: int
    computation_ns: int | None
    waiting_ns: int | None = None

    computation_ratio = Ratio("computation_ns", of="total_ns")
    waiting_ratio = Ratio("waiting_ns", of="total_ns")

    @property
    def framework_ns(self) -> int | None:
        """The Total time that is neither computation nor waiting."""
        if self.computation_ns is None or self.computation_ns > self.total_ns:
            return None
        return self.total_ns - self.computation_ns - (self.waiting_ns or 0)

    framework_ratio = Ratio("framework_ns", of="total_ns")


def overhead(lines: LineSums, total_ns: int, state: str) -> Overhead:
    """The split of this Total time of a state: in three for a service, which has requests or coroutines."""
    _, kinds, _, declared = lines.tree.facts()
    # Most processes have no such site, and then none need be asked.
    may_compute = bool(declared) or "layer" in kinds or "phase" in kinds
    has_operators = "op" in kinds and any(lines.tree.by_site(is_operator))
    computes = _operates if has_operators else _computes
    is_known = has_operators or (may_compute and any(lines.tree.by_site(computes)))
    is_service = "request" in kinds or lines.has(WAITING) or any(site.suspends for site in lines.tree.sites)
    if state == "GPU" or not is_service:
        return Overhead(total_ns, lines.total(computes)[TIMES[state]] if is_known else None)
    whole_ns, computation_ns, waiting_ns = _parts(lines, state, computes)
    if whole_ns != total_ns:  # where a row of several paths has calls in some of them alone
        computation_ns, waiting_ns = (
            part_ns * total_ns // whole_ns if whole_ns else 0 for part_ns in (computation_ns, waiting_ns)
        )
    return Overhead(total_ns, computation_ns if is_known else None, waiting_ns)


def _parts(lines: LineSums, state: str, computes: Callable[[Site], bool]) -> tuple[int, int, int]:
    """The time of the topmost calls, and what of it was computation and waiting."""
    count = len(lines.parents)
    sums = lines.by(np.arange(count), count)
    calls, times, waited = sums[:, CALLS].tolist(), sums[:, TIMES[state]].tolist(), sums[:, WAITING].tolist()
    sites, site_of, parents = lines.tree.sites, lines.site_of.tolist(), lines.parents.tolist()
    # Of what lies right below each node: its time, computation and waiting; last for what is topmost.
    below = [[0, 0, 0] for _ in range(count + 1)]
    for node in reversed(range(count)):  # a parent comes before its children
        site, time_ns = sites[site_of[node]], times[node]
        of_children_ns, computation_ns, waiting_ns = below[node]
        if is_interruption(site):
            continue  # a part of what it interrupted
        if calls[node]:
            if computes(site):
                computation_ns, waiting_ns = time_ns, 0
            elif _waits(site):
                computation_ns, waiting_ns = 0, time_ns
            else:
                if of_children_ns > time_ns:
                    computation_ns = computation_ns * time_ns // of_children_ns
                    waiting_ns = waiting_ns * time_ns // of_children_ns
                waiting_ns += min(waited[node], max(time_ns - of_children_ns, 0))
            of_children_ns = time_ns
        into = below[parents[node] if parents[node] >= 0 else count]
        for part, part_ns in enumerate((of_children_ns, computation_ns, waiting_ns)):
            into[part] += part_ns
    whole_ns, computation_ns, waiting_ns = below[count]
    return whole_ns, computation_ns, waiting_ns


def _declared(site: Site) -> object:
    return dict(site.attributes).get("phase") if site.attributes else None


def _computes(site: Site) -> bool:
    declared = _declared(site)
    return declared in _COMPUTING or (
        declared is None and (site.kind == "layer" or (site.kind == "phase" and site.name == "compute"))
    )


def _operates(site: Site) -> bool:
    return is_operator(site) or (_declared(site) or (site.name if site.kind == "phase" else None)) == "compute"


def _waits(site: Site) -> bool:
    declared = _declared(site)
    return declared in _WAITING or (declared is None and site.name in _WAITING)
