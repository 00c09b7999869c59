"""The steps of a loop as spans of its window: beneath what was open all the while, above what lay within.

A step is not opened as a scope is, for whoever says that it has ended may do so in the middle of other spans. It is put
among the spans of its thread afterwards, when all of them are known. What was open across the end of a step stays where
it was, beside it, and reduces the self time of each step by its part in it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from instrument.recording.spans import AttributeValue, Interval, Site, Span, Trace, covered_ns
from instrument.runtime.unpatched import RLock

STEP = Site("step", "step", "instrument", "Profiler.step")
"""The site of every step; its attribute `step` is the number, `samples` how many it had."""

STEPS_KEPT = 100_000
"""How many of the newest steps of a window, or of a session, are spans of its trace. They take 0.2 KB each."""

_FIRST_ID = 1 << 61
_IDS = itertools.count(_FIRST_ID)
"""Span ids that no recorder reaches."""


class Step(NamedTuple):
    """One step, from its begin up to, and without, that of the next one. One that was cut short is `clipped`."""

    number: int
    start_ns: int
    end_ns: int
    thread_id: int
    samples: float | None = None
    clipped: bool = False


class Loop:
    """The newest steps of all loops, of which no two overlap: those of a loop that joined earlier come first.

    Loops within the loop would count each instant again: their steps give way as soon as one around them has ended, and
    stay where there is none. Steps are added on any thread, and read beside.
    """

    def __init__(self) -> None:
        self._lock = RLock()  # a signal's handler may add one, too
        self._joined = itertools.count()
        self._orders: dict[object, int] = {}
        self._steps: deque[tuple[int, Step]] = deque(maxlen=STEPS_KEPT)

    def join(self, whose: object) -> None:
        """A loop begins."""
        self._orders.setdefault(whose, next(self._joined))

    def add(self, step: Step, whose: object) -> None:
        """A step has ended."""
        if whose not in self._orders:
            self.join(whose)
        order, steps = self._orders[whose], self._steps
        with self._lock:
            if not steps or steps[-1][1].end_ns <= step.start_ns or self._gives_way(order, step.start_ns):
                steps.append((order, step))

    def _gives_way(self, order: int, start_ns: int) -> bool:
        """Whether all that reach over a time are of loops that joined later; they are dropped then."""
        over = list(itertools.takewhile(lambda one: one[1].end_ns > start_ns, reversed(self._steps)))
        if any(other <= order for other, _ in over):
            return False
        for _ in over:
            self._steps.pop()
        return True

    @property
    def is_unused(self) -> bool:
        """Whether no loop has said anything of steps."""
        return not self._orders and not self._steps

    def leave(self, whose: object) -> None:
        """No more steps of that loop will come."""
        self._orders.pop(whose, None)

    def within(self, start_ns: int, end_ns: int) -> list[Step]:
        """The steps that reach into that time, as they lie in it: the others are clipped, and marked."""
        found: list[Step] = []
        for _, step in reversed(self._steps.copy()):
            if step.end_ns <= start_ns:
                break
            if step.start_ns < start_ns or step.end_ns > end_ns:
                if step.start_ns >= end_ns:
                    continue
                start, end = max(step.start_ns, start_ns), min(step.end_ns, end_ns)
                found.append(step._replace(start_ns=start, end_ns=end, clipped=True))
            else:
                found.append(step)
        found.reverse()
        return found


def steps_of_batches(spans: Sequence[Span]) -> list[Step]:
    """The steps of training loops that say nothing of steps, numbered from 0: from the fetch of a batch to the next.

    Batches are one step up to that in which an optimizer has run, so those whose gradients are added up are one. A
    batch without a backward pass is in none, as those of an evaluation. The last step ends with its optimizer.
    None where spans of steps or requests say what is done. n log n for n spans.
    """
    fetches: dict[int, list[Span]] = {}
    passes: dict[int, list[Span]] = {}
    for span in spans:
        if span.site.kind in ("step", "request"):
            return []
        if span.site.kind == "loader":
            fetches.setdefault(span.thread_id, []).append(span)
        elif _phase(span) in ("backward", "optimizer"):
            passes.setdefault(span.thread_id, []).append(span)
    return [
        step
        for thread_id, own in fetches.items()
        for step in _steps_of_thread(thread_id, _outermost(own), sorted(passes.get(thread_id, ()), key=_start))
    ]


def _steps_of_thread(thread_id: int, fetches: Sequence[Span], passes: Sequence[Span]) -> Iterator[Step]:
    numbers = itertools.count()
    starts = [span.start_ns for span in passes]
    begin_ns: int | None = None
    for fetch, following in itertools.zip_longest(fetches, fetches[1:]):
        first = bisect_left(starts, fetch.start_ns)
        own = passes[first : len(passes) if following is None else bisect_left(starts, following.start_ns)]
        if not own:
            begin_ns = None
            continue
        begin_ns = fetch.start_ns if begin_ns is None else begin_ns
        if any(_phase(span) == "optimizer" for span in own):
            end_ns = max(span.end_ns for span in own) if following is None else following.start_ns
            yield Step(next(numbers), begin_ns, end_ns, thread_id)
            begin_ns = None


def _outermost(spans: Sequence[Span]) -> list[Span]:
    """Spans of one thread, in order, without those that lie in another."""
    found: list[Span] = []
    for span in sorted(spans, key=_start):
        if not found or span.start_ns >= found[-1].end_ns:
            found.append(span)
    return found


def _start(span: Span) -> int:
    return span.start_ns


def _phase(span: Span) -> object:
    return dict(span.site.attributes).get("phase") if span.site.kind == "phase" else None


def with_steps(trace: Trace, steps: Sequence[Step]) -> Trace:
    """The trace with a span for each step. The spans of the trace are changed in place. n log n for n spans.

    Steps of one thread come in order and do not overlap. Spans that a task ran lie beside the steps.
    """
    if not steps:
        return trace
    by_thread: dict[int, list[Step]] = {}
    for step in steps:
        by_thread.setdefault(step.thread_id, []).append(step)
    made: list[Span] = []
    roots: dict[int, int] = {}
    for thread_id, own in by_thread.items():
        beside = [span for span in trace.spans if span.thread_id == thread_id and not span.task_id]
        made += _put(own, beside, roots)
    if roots:
        for span in trace.spans:
            span.root_id = roots.get(span.root_id, span.root_id)
    return replace(trace, spans=[*trace.spans, *made])


def _put(steps: Sequence[Step], spans: Sequence[Span], roots: dict[int, int]) -> list[Span]:
    """The spans of the steps of one thread; notes in `roots` which step each former root lies in."""
    starts, ends = [step.start_ns for step in steps], [step.end_ns for step in steps]
    around: list[Span | None] = [None] * len(steps)
    for span in spans:
        for index in range(bisect_left(starts, span.start_ns), bisect_right(ends, span.end_ns)):
            outer = around[index]
            if outer is None or _depth(span) > _depth(outer):
                around[index] = span
    made = [
        Span(
            site=STEP,
            span_id=next(_IDS),
            parent_id=0 if outer is None else outer.span_id,
            root_id=0 if outer is None else outer.root_id,
            thread_id=step.thread_id,
            task_id=0,
            start_ns=step.start_ns,
            end_ns=step.end_ns,
            active_ns=step.end_ns - step.start_ns,
            self_ns=0,
            attributes={"step": step.number, **_samples(step)},
            clipped=step.clipped,
        )
        for step, outer in zip(steps, around, strict=True)
    ]
    covered: list[list[Interval]] = [[] for _ in steps]
    for span in spans:
        for index in range(bisect_right(ends, span.start_ns), bisect_left(starts, span.end_ns)):
            step = made[index]
            if span.parent_id != step.parent_id:
                continue
            if step.start_ns <= span.start_ns and span.end_ns <= step.end_ns:
                covered[index].append((span.start_ns, span.end_ns))
                span.parent_id = step.span_id
                if not step.parent_id and span.site.kind != "request":
                    roots[span.span_id] = step.span_id
                break
            covered[index].append((span.start_ns, span.end_ns))
    for step, outer, parts in zip(made, around, covered, strict=True):
        step.root_id = step.root_id or step.span_id
        step.self_ns = step.total_ns - covered_ns(parts, (step.start_ns, step.end_ns))
        if outer is not None:
            outer.self_ns = max(outer.self_ns - step.self_ns, 0)
    return made


def _samples(step: Step) -> dict[str, AttributeValue]:
    if step.samples is None:
        return {}
    return {"samples": step.samples if type(step.samples) is int else float(step.samples)}


def _depth(span: Span) -> tuple[int, int, int]:
    """Greater for the inner one of two spans of a thread that both hold a step."""
    return span.start_ns, -span.end_ns, span.span_id
