"""The steps that loops report, and those that become spans of a window; `step_columns` puts them there."""

from __future__ import annotations

import itertools
from collections import deque
from typing import NamedTuple

from instrument.recording.spans import Site
from instrument.runtime.unpatched import RLock

STEP = Site("step", "step", "instrument", "Profiler.step")
"""The site of every step; its attribute `step` is the number, `samples` how many it had."""

STEPS_KEPT = 100_000
"""The most steps of a window, or of a session, that are spans of its trace: the newest. A step takes 0.2 KB."""


class Step(NamedTuple):
    """A step, from its begin up to, and without, that of the next one. One that was cut short is `clipped`."""

    number: int
    start_ns: int
    end_ns: int
    thread_id: int
    samples: float | None = None
    clipped: bool = False


class Loop:
    """The newest steps of all loops, without overlaps: those of a loop that joined earlier come first.

    Loops within the loop would count each instant again: their steps give way as soon as one around them has ended, and
    stay where there is none. Steps are added on any thread, and read meanwhile.
    """

    def __init__(self) -> None:
        self._lock = RLock()  # a signal's handler may add one, too
        self._joined = itertools.count()
        self._orders: dict[object, int] = {}
        self._steps: deque[tuple[int, Step]] = deque(maxlen=STEPS_KEPT)

    def join(self, loop: object) -> None:
        """Register a loop that begins."""
        self._orders.setdefault(loop, next(self._joined))

    def add(self, step: Step, loop: object) -> None:
        """Add a step that has ended."""
        if loop not in self._orders:
            self.join(loop)
        order, steps = self._orders[loop], self._steps
        with self._lock:
            if not steps or steps[-1][1].end_ns <= step.start_ns or self._gives_way(order, step.start_ns):
                steps.append((order, step))

    def _gives_way(self, order: int, start_ns: int) -> bool:
        """Return True where all steps that reach over a time are of loops that joined later; these are dropped then."""
        over = list(itertools.takewhile(lambda entry: entry[1].end_ns > start_ns, reversed(self._steps)))
        if any(step_order <= order for step_order, _ in over):
            return False
        for _ in over:
            self._steps.pop()
        return True

    @property
    def is_unused(self) -> bool:
        """True where no loop has reported steps."""
        return not self._orders and not self._steps

    def leave(self, loop: object) -> None:
        """Remove a loop, from which no more steps come."""
        self._orders.pop(loop, None)

    def within(self, start_ns: int, end_ns: int) -> list[Step]:
        """Return the steps that reach into an interval; those that reach over its edges are clipped, and marked."""
        steps: list[Step] = []
        for _, step in reversed(self._steps.copy()):
            if step.end_ns <= start_ns:
                break
            if step.start_ns < start_ns or step.end_ns > end_ns:
                if step.start_ns >= end_ns:
                    continue
                start, end = max(step.start_ns, start_ns), min(step.end_ns, end_ns)
                steps.append(step._replace(start_ns=start, end_ns=end, clipped=True))
            else:
                steps.append(step)
        steps.reverse()
        return steps
