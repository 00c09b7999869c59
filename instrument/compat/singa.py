"""A substitute for the profiling of SINGA's device: `SetVerbosity`, `SetSkipIteration`, `PrintTimeProfiling`.

Verbosity 0 prints nothing, and 1 prints the times of forward and backward. Verbosity 2 prints a line per operator, and
3 only operators of communication.

Differences from SINGA:
- An iteration begins with the first forward after a backward or an optimizer step. A program may instead call
  `EndIteration`, which SINGA lacks.
- The profiler times spans, and neither uses nor synchronises a device.
- If no session runs, one begins with the profile in `INSTRUMENT_PROFILE`. Without that variable, the session records
  phases, layers, communication and copies.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping

from instrument.errors import ProfileError
from instrument.recording.spans import Span, is_operator
from instrument.report.benchmark_view import OPTIMIZER, find_phase
from instrument.report.operators_view import IN_ORDER, operators
from instrument.report.phases_view import phases, propagation_lines
from instrument.report.table import format_six_digits, printable
from instrument.report.view import Options, Recording
from instrument.runtime.faults import logger
from instrument.sessions.profiler import join_or_begin_session, leave_session, make_torch_profiler
from instrument.sessions.session import Session
from instrument.sessions.step_columns import insert_step_spans
from instrument.sessions.torch_profiler import OPERATORS_ALONE, TorchProfiler
from instrument.sessions.window import MOST_STEPS, STEP, Step
from instrument.trace.trace import Trace

SKIPPED_ITERATIONS = 5

_EVALUATES = "autograd::engine::evaluate_function"
"""The name prefix of autograd's enclosing operators, which are not printed. Each encloses an operator of the backward
pass."""


class Device:
    """A substitute for SINGA's device, with only the methods for timing."""

    def __init__(self) -> None:
        self.verbosity = 0
        self.skip_iteration = SKIPPED_ITERATIONS
        self._session: Session | None = None
        self._torch: TorchProfiler | None = None
        self._joined: Trace | None = None
        self._cut_note = ""
        self._since_ns = self._step_ns = 0
        self._steps: deque[Step] = deque(maxlen=MOST_STEPS)
        self._ended = 0

    def SetVerbosity(self, verbosity: int) -> None:  # noqa: N802 - the name that its users have
        """Set the verbosity, from 0 to 3. A value above 0 begins the first iteration, and 0 ends the recording. Raises
        `ProfileError` for other values."""
        if verbosity not in (0, 1, 2, 3):
            raise ProfileError([f"SetVerbosity: found {verbosity!r}; allowed: 0, 1, 2, 3"])
        self.verbosity = verbosity
        if verbosity and self._session is None:
            self._session, self._ended, self._joined, self._cut_note = join_or_begin_session(None), 0, None, ""
            self._steps.clear()
            self._since_ns = self._step_ns = time.monotonic_ns()
        if verbosity > 1 and self._session is not None and self._torch is None:
            self._torch = make_torch_profiler(self._session, OPERATORS_ALONE)
            if self._torch is not None and not self._ended:
                self._torch.begin()
                self._since_ns = self._step_ns = time.monotonic_ns()
        elif not verbosity and self._session is not None:
            session, self._session = self._session, None
            torch, self._torch = self._torch, None
            if torch is not None:
                torch.end()
            leave_session(session)

    def SetSkipIteration(self, iterations: int) -> None:  # noqa: N802
        """Exclude the first iterations from the mean times. Raises `ProfileError` for a negative number."""
        if not isinstance(iterations, int) or isinstance(iterations, bool) or iterations < 0:
            raise ProfileError([f"SetSkipIteration: found {iterations!r}; allowed: a whole number from 0"])
        self.skip_iteration = iterations

    def EndIteration(self) -> None:  # noqa: N802
        """End the current iteration, and begin the next one."""
        if self._session is not None:
            began_ns, self._step_ns = self._step_ns, time.monotonic_ns()
            self._steps.append(Step(self._ended, began_ns, self._step_ns, threading.get_native_id()))
            self._ended += 1
            if self._torch is not None:
                self._torch.stop_at_limit()

    def PrintTimeProfiling(self) -> None:  # noqa: N802
        """Print the mean times of all iterations so far. With verbosity 0, nothing is printed."""
        if not self.verbosity:
            logger.info("SINGA: verbosity is 0: nothing was timed; SetVerbosity(1) or more")
        elif self._session is not None:  # None: switched off by the environment
            print("\n".join(["", "Time Profiling:", *self._report_lines(self._session)]), flush=True)

    def _report_lines(self, session: Session) -> list[str]:
        options = Options(tracer_option="AllOpDetail", skip_first=self.skip_iteration)
        trace = self._trace_with_iterations(session)
        recording = Recording.from_trace(trace)
        if self.verbosity == 1:
            view = phases(recording, options)
            return [*propagation_lines(view.mean_ns), self._format_count(view.timed if view.of == "step" else 0)]
        if any(is_operator(span.site) for span in trace.spans):
            means, timed = _compute_mean_times(trace, self.skip_iteration)
            shown = [(at, *item) for at, item in enumerate(means.items()) if self._prints_kind(item[0][1])]
            return [
                *(_format_operator_line(at, name, mean_ns) for at, (name, *_), mean_ns in shown),
                self._format_count(timed),
            ]
        order = operators(recording, options).in_order
        if order is None:
            return [self._format_count(0)]
        listed = [item for item in order.operators if item.total_ns and self._prints_kind(item.kind)]
        return [
            *(_format_operator_line(item.number, item.name, item.mean_ns) for item in listed),
            self._format_count(order.timed),
        ]

    def _prints_kind(self, kind: str) -> bool:
        return self.verbosity == 2 or kind == "comm"

    def _trace_with_iterations(self, session: Session) -> Trace:
        """Return the trace with a span per iteration. If torch.profiler was on, the trace covers only the time until
        torch.profiler stopped."""
        profiled = None if self._torch is None else self._torch.end()
        if profiled is None and self._joined is not None and self.verbosity > 1:
            return self._joined
        until_ns = time.monotonic_ns() if profiled is None else profiled.end_ns
        trace = session.trace_of(session.take(self._since_ns, until_ns))
        steps = [step for step in self._steps if step.end_ns <= until_ns] if self._ended else _split_iterations(trace)
        trace = insert_step_spans(trace, steps)
        if profiled is not None:
            trace = self._joined = profiled.add_to_trace(trace)
            self._cut_note = f"; torch.profiler was on for these alone: {profiled.cut}" if profiled.cut else ""
        return trace

    def _format_count(self, count: int) -> str:
        why = self._cut_note if self.verbosity > 1 else ""
        if not count and not self._ended:
            why = f"; call EndIteration() after each, or use torch; the first {self.skip_iteration} are skipped"
        return f"Timed iterations: {count}{why}"


def _split_iterations(trace: Trace) -> list[Step]:
    """Split a trace into iterations. An iteration begins at the first forward pass after a backward pass or optimizer
    step. Without such passes, each forward pass is an iteration."""
    by_thread: dict[int, list[tuple[Span, str]]] = {}
    for span in trace.spans:
        phase = find_phase(span.site)
        if phase in ("forward", "backward", OPTIMIZER) and not span.clipped:
            by_thread.setdefault(span.thread_id, []).append((span, phase))
    steps: list[Step] = []
    for thread_id, phases_of_thread in by_thread.items():
        phases_of_thread.sort(key=lambda item: item[0].start_ns)
        trains = any(phase != "forward" for _, phase in phases_of_thread)
        starts: list[int] = []
        has_updated = True
        for span, phase in phases_of_thread:
            if phase == "forward" and (has_updated or not trains):
                starts.append(span.start_ns)
                has_updated = False
            has_updated |= phase != "forward"
        ends = [*starts[1:], max(span.end_ns for span, _ in phases_of_thread)]
        steps += [Step(at, *times, thread_id) for at, times in enumerate(zip(starts, ends, strict=True)) if starts]
    return steps


def _compute_mean_times(trace: Trace, skip: int) -> tuple[Mapping[tuple[str, str, int], float], int]:
    """Return the mean time of each operator in the order of execution, and the number of timed iterations.

    A key is the operator's name, the kind, and the number of earlier calls in the iteration.
    """
    by_id = {span.span_id: span for span in trace.spans}
    iterations = {
        span.span_id: Counter[tuple[str, str]]()
        for span in trace.spans
        if span.site is STEP and not span.clipped and span.attributes["step"] >= skip  # type: ignore[operator]
    }
    device_ns: Counter[int] = Counter()
    for span in trace.spans:
        if span.device and is_operator(span.site):
            for outer in (span, *_ancestors(span, by_id)):
                device_ns[outer.span_id] += span.device_ns
    sums: dict[tuple[str, str, int], int] = {}
    for span in sorted(trace.spans, key=lambda span: (span.start_ns, -span.end_ns)):
        if not _is_printed(span, by_id):
            continue
        counts = next(
            (iterations[outer.span_id] for outer in _ancestors(span, by_id) if outer.span_id in iterations), None
        )
        if counts is not None:
            name, kind = span.site.name, span.site.kind
            key = name, kind, counts[name, kind]
            counts[name, kind] += 1
            sums[key] = sums.get(key, 0) + (span.device_ns or device_ns[span.span_id] or span.total_ns)
    return {key: total_ns / len(iterations) for key, total_ns in sums.items()}, len(iterations)


def _is_printed(span: Span, by_id: Mapping[int, Span]) -> bool:
    if not is_operator(span.site):
        return span.site.kind in IN_ORDER and span.site.kind != "layer"
    around = [outer.site for outer in _ancestors(span, by_id) if is_operator(outer.site)]
    return all(site.name.startswith(_EVALUATES) for site in around) and not span.site.name.startswith(_EVALUATES)


def _ancestors(span: Span, by_id: Mapping[int, Span]) -> Iterator[Span]:
    outer = by_id.get(span.parent_id)
    while outer is not None:
        yield outer
        outer = by_id.get(outer.parent_id)


def _format_operator_line(at: int, name: str, mean_ns: float) -> str:
    return f"OP_ID{at}. {printable(name)} : {format_six_digits(mean_ns)} sec"


def create_cpu_device() -> Device:
    """Return the device of a program that computes on the CPU."""
    return Device()


def create_cuda_gpu() -> Device:
    """Return the device of a program that computes on a GPU."""
    return Device()


def create_cuda_gpu_on(device_id: int) -> Device:
    """Return the device of a program that computes on the GPU number `device_id`."""
    return Device()
