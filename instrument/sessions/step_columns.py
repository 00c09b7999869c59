"""The insertion of a loop's steps as spans into a recorded trace. A step becomes the child of the span around it, and
the parent of the spans inside it.

A step cannot be recorded as a scope, because the call that ends it may be inside other spans. So steps are inserted
after recording.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from instrument.recording.spans import AttributeValue, Site, Span
from instrument.runtime.lazy_imports import NamedTuple
from instrument.sessions.window import STEP, Step
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.indices import NONE, find_rows
from instrument.trace.intervals import lengths_by_group
from instrument.trace.trace import Trace, append_spans

_FIRST_ID = 1 << 61
_IDS = itertools.count(_FIRST_ID)
"""A counter of ids for step spans, larger than the ids of all recorded spans."""


# Steps that nobody reports


class _Call(NamedTuple):
    """A call within a training step: the fetch of a batch, or a phase such as forward."""

    start_ns: int
    end_ns: int
    phase: object


def derive_training_steps(trace: Columns) -> list[Step]:
    """Return the steps of training loops that do not report their steps.

    A step begins with the fetch of a batch. It ends at the next fetch after a run of the optimizer. A batch without a
    backward pass, as in an evaluation, is in no step. A trace with recorded steps or requests has no derived steps.
    """
    if trace.are_of_kind("step", "request").any():
        return []
    fetches = _calls_by_thread(trace, trace.are_of_kind("loader"))
    passes = _calls_by_thread(
        trace, trace.are_of_sites([_phase_of_site(site) in ("backward", "optimizer") for site in trace.sites])
    )
    return [
        step
        for thread_id, thread_fetches in fetches.items()
        for step in _steps_of_thread(thread_id, _outermost_calls(thread_fetches), passes.get(thread_id, []))
    ]


def _calls_by_thread(trace: Columns, mask: Bools) -> dict[int, list[_Call]]:
    calls_by_thread: dict[int, list[_Call]] = {}
    rows = np.flatnonzero(mask)
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    columns = (trace.thread_id, trace.start_ns, trace.end_ns, trace.site)
    for thread_id, start_ns, end_ns, site in zip(*(column[rows].tolist() for column in columns), strict=True):
        calls_by_thread.setdefault(thread_id, []).append(_Call(start_ns, end_ns, _phase_of_site(trace.sites[site])))
    return calls_by_thread


def _steps_of_thread(thread_id: int, fetches: Sequence[_Call], passes: Sequence[_Call]) -> Iterator[Step]:
    numbers = itertools.count()
    starts = [call.start_ns for call in passes]
    begin_ns: int | None = None
    for fetch, following in itertools.zip_longest(fetches, fetches[1:]):
        first = bisect_left(starts, fetch.start_ns)
        step_passes = passes[first : len(passes) if following is None else bisect_left(starts, following.start_ns)]
        if not step_passes:
            begin_ns = None
            continue
        begin_ns = fetch.start_ns if begin_ns is None else begin_ns
        if any(call.phase == "optimizer" for call in step_passes):
            end_ns = max(call.end_ns for call in step_passes) if following is None else following.start_ns
            yield Step(next(numbers), begin_ns, end_ns, thread_id)
            begin_ns = None


def _outermost_calls(calls: Sequence[_Call]) -> list[_Call]:
    outermost: list[_Call] = []
    for call in calls:
        if not outermost or call.start_ns >= outermost[-1].end_ns:
            outermost.append(call)
    return outermost


def _phase_of_site(site: Site) -> object:
    return dict(site.attributes).get("phase") if site.kind == "phase" else None


# Steps among spans


def insert_step_spans(trace: Trace, steps: Sequence[Step]) -> Trace:
    """Return the trace with an additional span per step. The steps of a thread are in order and do not overlap. Spans
    of asyncio tasks are in no step."""
    if not steps:
        return trace
    by_thread: dict[int, list[Step]] = {}
    for step in steps:
        by_thread.setdefault(step.thread_id, []).append(step)
    among = _StepInserter(trace.columns)
    for thread_id, thread_steps in by_thread.items():
        among.insert_steps(thread_id, thread_steps)
    return trace.with_columns(
        among.insert_all_steps([step for thread_steps in by_thread.values() for step in thread_steps])
    )


class _StepInserter:
    def __init__(self, trace: Columns) -> None:
        self._trace = trace
        self._parent_id, self._self_ns = trace.parent_id.copy(), trace.self_ns.copy()
        self._root_of = np.zeros(len(trace), dtype=np.int64)  # the step around each former root, 0 for none
        self._made: list[tuple[Int64s, Int64s, Int64s, Int64s]] = []
        self._is_request = trace.are_of_kind("request")

    def insert_steps(self, thread_id: int, steps: Sequence[Step]) -> None:
        trace = self._trace
        rows = np.flatnonzero((trace.thread_id == thread_id) & (trace.task_id == 0))
        starts, ends = trace.start_ns[rows], trace.end_ns[rows]
        begins_ns = np.array([step.start_ns for step in steps], dtype=np.int64)
        finishes_ns = np.array([step.end_ns for step in steps], dtype=np.int64)
        covers = np.searchsorted(begins_ns, starts), np.searchsorted(finishes_ns, ends, side="right")
        outer = self._find_spans_around_steps(rows, *covers, len(steps))
        has_outer = outer != NONE
        step_id = np.fromiter(itertools.islice(_IDS, len(steps)), np.int64, len(steps))
        parent_id = np.where(has_outer, trace.span_id[outer], 0) if len(trace) else np.zeros(len(steps), np.int64)
        root_id = np.where(has_outer, trace.root_id[outer], step_id) if len(trace) else step_id
        # Each span with each step that it has a part in, where both are below the same.
        first, last = np.searchsorted(finishes_ns, starts, side="right"), np.searchsorted(begins_ns, ends)
        may = np.flatnonzero((first < last) & np.isin(self._parent_id[rows], parent_id))
        counts = last[may] - first[may]
        span = np.repeat(may, counts)
        step = np.arange(len(span)) - np.repeat(np.cumsum(counts) - counts - first[may], counts)
        are_siblings = self._parent_id[rows[span]] == parent_id[step]
        span, step = span[are_siblings], step[are_siblings]
        is_within = (begins_ns[step] <= starts[span]) & (ends[span] <= finishes_ns[step])
        inner = rows[span[is_within]]
        self._parent_id[inner] = step_id[step[is_within]]
        is_top = (parent_id[step[is_within]] == 0) & ~self._is_request[inner]
        self._root_of[inner[is_top]] = step_id[step[is_within]][is_top]
        parts = np.maximum(starts[span], begins_ns[step]), np.minimum(ends[span], finishes_ns[step])
        self_ns = finishes_ns - begins_ns - lengths_by_group(step, *parts, len(steps))
        np.subtract.at(self._self_ns, outer[has_outer], self_ns[has_outer])
        self._self_ns[outer[has_outer]] = np.maximum(self._self_ns[outer[has_outer]], 0)
        self._made.append((step_id, parent_id, root_id, self_ns))

    def _find_spans_around_steps(self, rows: Int64s, first: Int64s, last: Int64s, count: int) -> Int64s:
        trace = self._trace
        innermost = np.full(count, NONE, dtype=np.int64)
        around = np.flatnonzero(first < last)
        candidates = rows[around]
        order = np.lexsort((trace.span_id[candidates], -trace.end_ns[candidates], trace.start_ns[candidates]))
        for at in around[order].tolist():
            innermost[first[at] : last[at]] = rows[at]
        return innermost

    def insert_all_steps(self, steps: Sequence[Step]) -> Columns:
        trace = self._trace
        numbers = zip(*(np.concatenate(parts).tolist() for parts in zip(*self._made, strict=True)), strict=True)
        root_row = find_rows(trace.span_id, trace.root_id)
        moved = np.where(root_row != NONE, self._root_of[root_row], 0) if len(trace) else self._root_of
        root_id = np.where(moved != 0, moved, trace.root_id)
        spans = [_make_step_span(step, *ids_and_time) for step, ids_and_time in zip(steps, numbers, strict=True)]
        return append_spans(replace(trace, parent_id=self._parent_id, root_id=root_id, self_ns=self._self_ns), spans)


def _make_step_span(step: Step, span_id: int, parent_id: int, root_id: int, self_ns: int) -> Span:
    length_ns, attributes = step.end_ns - step.start_ns, dict[str, AttributeValue](step=step.number)
    if step.samples is not None:
        attributes["samples"] = step.samples if type(step.samples) is int else float(step.samples)
    place = span_id, parent_id, root_id, step.thread_id, 0, step.start_ns, step.end_ns, length_ns, self_ns
    span = Span(STEP, *place, None, attributes)
    span.clipped = step.clipped
    return span
