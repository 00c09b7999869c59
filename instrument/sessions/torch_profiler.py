"""The driver of torch.profiler, which adds torch's operators, with their kernels and memory, to the window of a loop.

torch.profiler is costly, so it runs only in loops with a `Profiler`, never in a service. This module never imports
torch.

An operator becomes a child of the innermost span that was open on its thread in the middle of the operator's time.
Device work counts for the innermost operator that launched it.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument import chrome
from instrument.errors import InstrumentError, ProfileError
from instrument.instrumentors.profiled_functions import replace_attribute as replaced
from instrument.recording.spans import (
    FLOPS,
    OPERATORS,
    AttributeValue,
    DeviceInterval,
    Kernel,
    Site,
    Span,
    is_operator,
    read_flops,
)
from instrument.report.section import COST
from instrument.report.table import format_short_percent
from instrument.runtime.lazy_imports import dataclass, replace

if TYPE_CHECKING:
    from instrument.trace.trace import Trace

UNCERTAINTY_NS = 1_000
"""The maximum error in ns of a kernel's times after their conversion to the host's clock."""

_IDS = itertools.count(3 << 60)
"""A counter of ids for operator spans, larger than the ids of all recorded spans and of steps."""


def insert_operator_spans(trace: Trace, torch_trace: Trace, moved_ns: int) -> Trace:
    """Return the trace with an additional span for each operator in torch.profiler's trace. Changes the spans of
    `trace` in place.

    `moved_ns` is the offset from torch's clock to ours.
    """
    operators = _make_operators(trace, torch_trace, moved_ns)
    if not operators:
        return trace
    by_id = {span.span_id: span for span in operators}
    tops = [span for span in operators if span.parent_id not in by_id]
    _nest_operators(trace.spans, operators, by_id, tops)
    _move_into_operators(trace.spans, operators, by_id)
    _set_device_times(trace, operators)
    spans = [*trace.spans, *operators]
    _set_self_times(spans, by_id.keys() | {top.parent_id for top in tops})
    threads = {span.thread_id for span in operators}.difference(trace.threads)
    names = {thread: torch_trace.threads[thread] for thread in sorted(threads) if thread in torch_trace.threads}
    return replace(trace, spans=spans, threads={**trace.threads, **names}, flops=())  # the spans have these


def _make_operators(trace: Trace, torch_trace: Trace, moved_ns: int) -> list[Span]:
    """Return the spans of torch's operators within the interval of a trace, on that trace's clock. Parents come before
    children."""
    operators: list[Span] = []
    since_ns, until_ns = trace.watched or (trace.start_ns, trace.end_ns)
    sites: dict[str, Site] = {}
    innermost_ids: dict[int, int] = {}
    for source in torch_trace.spans:  # each comes after what is around it
        parent_id = innermost_ids.get(source.parent_id, 0)
        first, last = source.start_ns + moved_ns, source.end_ns + moved_ns
        start_ns, end_ns = max(first, since_ns), min(last, until_ns)
        is_operator_slice = source.site.kind == "op" and "device" not in source.attributes
        if start_ns >= end_ns or not is_operator_slice:  # but a kernel, a range or a call of a driver
            innermost_ids[source.span_id] = parent_id
            continue
        flops = read_flops(source.attributes)
        attributes: dict[str, AttributeValue] = {FLOPS: flops} if flops else {}
        site = sites.setdefault(source.site.name, Site(source.site.name, "op", OPERATORS))
        place = next(_IDS), parent_id, 0, source.thread_id, 0, start_ns, end_ns, end_ns - start_ns, 0
        span = Span(site, *place, None, attributes)
        span.clipped = (start_ns, end_ns) != (first, last)
        innermost_ids[source.span_id] = span.span_id
        operators.append(span)
    return operators


def _nest_operators(
    spans: Sequence[Span], operators: Sequence[Span], by_id: Mapping[int, Span], tops: Sequence[Span]
) -> None:
    """Make each outermost operator a child of the recorded span around it. Cut operators to the times of their
    parents."""
    middles = [(top.start_ns + top.end_ns) // 2 for top in tops]
    outer_spans = _find_innermost_open_spans(spans, [top.thread_id for top in tops], middles)
    outer_by_id = {top.span_id: outer for top, outer in zip(tops, outer_spans, strict=True)}
    for span in operators:
        outer = outer_by_id.get(span.span_id, by_id.get(span.parent_id))
        if outer is None:
            span.root_id = span.span_id
            continue
        span.parent_id, span.root_id, span.task_id = outer.span_id, outer.root_id, outer.task_id
        span.start_ns = min(max(span.start_ns, outer.start_ns), outer.end_ns)
        span.end_ns = max(min(span.end_ns, outer.end_ns), span.start_ns)
        span.active_ns = span.total_ns


def _move_into_operators(spans: Sequence[Span], operators: Sequence[Span], by_id: Mapping[int, Span]) -> None:
    """Move recorded spans that ran within an operator, such as those of a hook, below the innermost operator."""
    places = _find_innermost_open_spans(
        operators, [span.thread_id for span in spans], [span.start_ns for span in spans]
    )
    root_ids: dict[int, int] = {}
    for span, place in zip(spans, places, strict=True):
        while place is not None and place.end_ns < span.end_ns:
            place = by_id.get(place.parent_id)
        top = place
        while top is not None and top.parent_id in by_id:
            top = by_id[top.parent_id]
        if place is None or top is None or top.parent_id != span.parent_id or span.site.kind == "request":
            continue
        if span.root_id == span.span_id:
            root_ids[span.span_id] = place.root_id
        span.parent_id = place.span_id
    for span in itertools.chain(spans, operators) if root_ids else ():
        span.root_id = root_ids.get(span.root_id, span.root_id)


def _set_device_times(trace: Trace, operators: list[Span]) -> None:
    work = [kernel for kernel in trace.kernels if kernel.thread_id and kernel.kind != "copy"]
    if not work:
        return
    launchers = _find_innermost_open_spans(
        operators, [kernel.thread_id for kernel in work], [kernel.launched_ns for kernel in work]
    )
    overlapped = _find_overlapped_kernels(work)
    intervals_by_id: dict[int, list[DeviceInterval]] = {}
    for number, (place, kernel) in enumerate(zip(launchers, work, strict=True)):
        if place is not None:
            label = "overlapped" if number in overlapped else "exclusive"
            position = kernel.device, kernel.stream, kernel.start_ns, kernel.end_ns
            intervals_by_id.setdefault(place.span_id, []).append(DeviceInterval(*position, label, UNCERTAINTY_NS))
    for span in operators:
        if span.span_id in intervals_by_id:
            span.device = tuple(intervals_by_id[span.span_id])


def _set_self_times(spans: Sequence[Span], span_ids: Set[int]) -> None:
    import numpy as np  # as in `_find_innermost_open_spans`

    from instrument.trace.self_times import self_times_of
    from instrument.trace.trace import columns_of_spans

    rows = np.array([row for row, span in enumerate(spans) if span.span_id in span_ids], dtype=np.int64)
    for row, self_ns in zip(rows.tolist(), self_times_of(columns_of_spans(spans), rows).tolist(), strict=True):
        spans[row].self_ns = self_ns


def _find_innermost_open_spans(
    spans: Sequence[Span], thread_ids: Sequence[int], times_ns: Sequence[int]
) -> list[Span | None]:
    import numpy as np  # which a service imports when torch.profiler has seen something, and else not

    from instrument.trace.self_times import find_innermost_spans
    from instrument.trace.trace import columns_of_spans

    points = (np.array(column, dtype=np.int64) for column in (thread_ids, times_ns))
    rows = find_innermost_spans(columns_of_spans(spans), np.ones(len(spans), dtype=np.bool_), *points)
    return [None if row < 0 else spans[row] for row in rows.tolist()]


def _find_overlapped_kernels(work: Sequence[Kernel]) -> set[int]:
    """Return the indices of kernels that overlapped a kernel of another stream. `work` is in order of time."""
    overlapped: set[int] = set()
    latest: dict[int, int] = {}
    for number, kernel in enumerate(work):
        before = latest.get(kernel.device)
        if before is not None and work[before].end_ns > kernel.start_ns and work[before].stream != kernel.stream:
            overlapped |= {before, number}
        if before is None or kernel.end_ns > work[before].end_ns:
            latest[kernel.device] = number
    return overlapped


WINDOW_LIMIT_S = 10.0
"""Seconds after which torch.profiler stops within a scheduled window, to limit its memory."""

OPEN_WINDOW_LIMIT_S = 2.0
"""Seconds after which torch.profiler stops within a window without a scheduled end, to limit its memory."""

MARK = "instrument.clock"
MARKS = 4
"""The number of marks at each end of a window, which align torch's clock with ours."""

ROUNDS, TRIALS = 8, 32
"""The number of rounds in a measurement of torch operators, and the number of operators per round."""

OPTIONS = ("record_shapes", "profile_memory", "with_flops", "with_stack", "limit_s")

BUSY = "another torch.profiler runs in this process, which has one; its operators and kernels are not joined"

_holding = threading.Lock()
"""The lock that a `TorchProfiler` acquires while torch.profiler runs, because a process can run only one."""

_operator_ns: dict[tuple[bool, bool], float] = {}
"""The time in ns that torch.profiler adds to an operator, by `record_shapes` and `profile_memory`."""


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """The options of torch.profiler for a loop.

    If `is_wanted` is None, torch.profiler runs only if the session uses the default profile of `Profiler`.
    `record_shapes` adds floating-point operations. `profile_memory` adds allocations, and limits the record to the
    thread of the loop.

    torch.profiler stops after `limit_s` seconds of a window. The default is `WINDOW_LIMIT_S` with a schedule, and
    `OPEN_WINDOW_LIMIT_S` without one.
    """

    is_wanted: bool | None = None
    record_shapes: bool = True
    profile_memory: bool = True
    limit_s: float | None = None

    @classmethod
    def from_argument(cls, options: bool | Mapping[str, Any] | None) -> TorchOptions:
        """Return the options for a value of `Profiler(torch=...)`. Raises `ProfileError` for an invalid one."""
        if options is None or isinstance(options, bool):
            return cls(options)
        if not isinstance(options, Mapping):
            raise ProfileError(
                [f"Profiler: torch: found {options!r}; allowed: True, False, or options: {', '.join(OPTIONS)}"]
            )
        problems = [
            f"Profiler: torch: found the option {name!r}; allowed: {', '.join(OPTIONS)}"
            for name in options
            if name not in OPTIONS
        ]
        problems += [
            f"Profiler: torch: {name}: found {options[name]!r}; allowed: True or False"
            for name in OPTIONS[:-1]
            if not isinstance(options.get(name, False), bool)
        ]
        if options.get("with_stack") is True:
            problems.append(
                "Profiler: torch: with_stack: found True; allowed: False, for calls of Python are not joined; use a "
                "torch.profiler of your own and torch=False"
            )
        limit_s = options.get("limit_s")
        is_number = isinstance(limit_s, (int, float)) and not isinstance(limit_s, bool)
        if limit_s is not None and not (is_number and limit_s > 0):
            problems.append(f"Profiler: torch: limit_s: found {limit_s!r}; allowed: seconds above 0")
        if problems:
            raise ProfileError(problems)
        shapes = options.get("record_shapes", True) or options.get("with_flops", False)
        return cls(True, shapes, options.get("profile_memory", True), limit_s)


OPERATORS_ALONE = TorchOptions(record_shapes=False, profile_memory=False, limit_s=WINDOW_LIMIT_S)
"""The options that record operators and kernels of all threads, without shapes and allocations."""


class TorchProfiler:
    """Starts and stops torch.profiler for one loop. Before torch is imported, all methods do nothing.

    No method raises. `complain` is called with the errors of torch.profiler. With `profile_memory`, torch.profiler must
    stop on the thread that started it.
    """

    def __init__(self, options: TorchOptions, complain: Callable[[str], object], *, host_only: bool = False) -> None:
        self._options = options
        self._limit_s = options.limit_s or OPEN_WINDOW_LIMIT_S
        self._complain_once = functools.cache(complain)
        self._host_only = host_only
        self._lock = threading.RLock()
        self._prepared: Any = None
        self._running: Any = None
        self._record: TorchRecord | None = None
        self._thread_id = self._prepared_ns = 0
        self._is_bound = True
        self._timer: threading.Timer | None = None
        self._undo: Callable[[], object] = bool
        self._is_broken = False

    @property
    def is_at_work(self) -> bool:
        return self._running is not None

    def prepare(self) -> None:
        """Load torch.profiler before a window begins. The first call takes a second or two."""
        with self._lock:
            if self._prepared is not None or self._running is not None or self._is_broken or not is_torch_imported():
                return
            began_ns = time.monotonic_ns()
            if not _holding.acquire(blocking=False):
                if self._options.is_wanted:
                    self._complain_once(BUSY)
                return
            autograd = sys.modules["torch"].autograd
            if autograd._profiler_enabled() or getattr(autograd.profiler, "_is_profiler_enabled", False):
                _holding.release()
                self._complain_once(BUSY)
                return
            try:
                prepared = self._new_profiler()
                prepared.prepare_trace()
            except Exception as error:
                self._give_up("prepare", error)
                return
            self._prepared, self._prepared_ns = prepared, time.monotonic_ns() - began_ns

    def begin(self) -> None:
        with self._lock:
            self.prepare()
            prepared, self._prepared = self._prepared, None
            if prepared is None:
                return
            began_ns = time.monotonic_ns()
            try:
                prepared.start_trace()
                record = TorchRecord()
                record.write_marks()
                self._undo = self._stop_before_other_profilers(prepared)
            except Exception as error:
                self._give_up("start", error)
                return
            self._running, self._record, self._thread_id = prepared, record, threading.get_ident()
            record.begin_ns = time.monotonic_ns()
            record.starting_ns = record.begin_ns - began_ns + self._prepared_ns
            if not self._is_bound:
                self._timer = threading.Timer(self._limit_s, self.stop_at_limit)
                self._timer.daemon = True
                self._timer.start()

    def stop_at_limit(self) -> None:
        with self._lock:
            record = self._record
            if self._running is not None and record is not None:
                lasted_ns = time.monotonic_ns() - record.begin_ns
                if lasted_ns >= self._limit_s * 1e9 and self._can_stop_on_this_thread():
                    self._stop(f"it ran for {self._limit_s:g} s and was ended before the window was")

    def end(self) -> TorchRecord | None:
        with self._lock:
            if self._running is not None and not self._can_stop_on_this_thread():
                self._complain_once(
                    "torch.profiler was started on another thread, and can only stop there; its operators are not "
                    "joined"
                )
                return None
            self._stop("")
            record, self._record = self._record, None
            return record

    def cancel(self) -> None:
        """Drop the prepared torch.profiler, because its window will not begin."""
        with self._lock:
            prepared, self._prepared = self._prepared, None
            if prepared is not None:
                try:
                    prepared.start_trace()
                    prepared.stop_trace()
                except Exception as error:
                    self._give_up("stop", error)
                else:
                    _holding.release()

    # ---------------------------------------------------------------- torch

    def _new_profiler(self) -> Any:
        torch = sys.modules["torch"]
        profiler = sys.modules.get("torch.profiler") or torch.profiler
        activities = [profiler.ProfilerActivity.CPU]
        if not self._host_only and torch.cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        more = {}
        self._is_bound = True
        if not self._options.profile_memory:
            with suppress(AttributeError, TypeError):  # an older torch knows no other threads
                more["experimental_config"] = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
                self._is_bound = False
        return profiler.profile(
            activities=activities,
            record_shapes=self._options.record_shapes,
            profile_memory=self._options.profile_memory,
            **more,
        )

    def _can_stop_on_this_thread(self) -> bool:
        return not self._is_bound or threading.get_ident() == self._thread_id

    def _stop_before_other_profilers(self, ours: Any) -> Callable[[], None]:
        """Stop our torch.profiler when the program starts its own, because ours would otherwise lose its record."""
        kind = type(ours.profiler)
        original = kind._prepare_trace

        def stop_and_prepare(profiler: Any) -> Any:
            if self._running is ours and profiler is not ours.profiler:
                with self._lock:
                    if self._running is ours and self._can_stop_on_this_thread():
                        self._stop("the program began a torch.profiler of its own")
            return original(profiler)

        return replaced(kind, "_prepare_trace", stop_and_prepare)

    def _stop(self, why: str) -> None:
        running, self._running = self._running, None
        record = self._record
        if running is None or record is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._undo()
        record.end_ns, record.cut = time.monotonic_ns(), why
        key = self._options.record_shapes, self._options.profile_memory
        try:
            record.write_marks()
            with_ns = 0 if key in _operator_ns else _measure_operators_ns()
            running.stop_trace()
            if with_ns:
                _operator_ns[key] = max(with_ns - _measure_operators_ns(), 0) / TRIALS
            record.save(running)
        except Exception as error:
            self._record = None
            self._give_up("stop", error)
            return
        _holding.release()
        record.operator_ns = _operator_ns.get(key, 0.0)
        record.ending_ns = time.monotonic_ns() - record.end_ns

    def _give_up(self, verb: str, error: Exception) -> None:
        """Stop using torch.profiler after an error. Releases the lock `_holding`, which the caller must have
        acquired."""
        self._is_broken, self._prepared, self._running = True, None, None
        self._undo()
        _holding.release()
        self._complain_once(
            f"torch.profiler did not {verb} ({type(error).__name__}: {error}); its operators are not joined"
        )


class TorchRecord:
    """The trace that torch.profiler made of one window, and the times to start and stop torch.profiler.

    `cut` is the reason why torch.profiler stopped before the end of the window.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.begin_ns = self.end_ns = self.starting_ns = self.ending_ns = 0
        self.cut = ""
        self.operator_ns = 0.0
        self._marks: list[tuple[int, int]] = []
        self._folder = ""

    def write_marks(self) -> None:
        """Write marks into torch's trace, to compare torch's clock with ours."""
        profiler = sys.modules["torch"]._C._profiler
        for _ in range(MARKS):
            mark = profiler._RecordFunctionFast(MARK)
            before_ns = time.monotonic_ns()
            mark.__enter__()
            after_ns = time.monotonic_ns()
            mark.__exit__(None, None, None)
            self._marks.append((before_ns, after_ns))

    def save(self, profiler: Any) -> None:
        """Save torch's trace to a folder that only this user can read. The folder is removed with this object."""
        self._folder = tempfile.mkdtemp(prefix="instrument-")
        weakref.finalize(self, _remove_folder, self._folder, os.getpid())
        profiler.export_chrome_trace(str(Path(self._folder, "window.json")))

    def add_to_trace(self, trace: Trace) -> Trace:
        """Return the window's trace with torch's operators, kernels and allocations. After an error, the trace has a
        note instead. Call this only once."""
        window = f"window {trace.window}"
        try:
            joined = self._join_torch_trace(trace)
        except (InstrumentError, OSError) as error:
            return replace(trace, notes=[*trace.notes, f"{window}: what torch.profiler saw is not joined: {error}"])
        finally:
            _remove_folder(self._folder, os.getpid())
        count = sum(is_operator(span.site) for span in joined.spans)
        outside_ms = (self.starting_ns + self.ending_ns) / 1e6
        notes = [
            f"{COST}torch.profiler in {window}: {count} operators, each some {self.operator_ns / 1e3:.1f} us longer by "
            f"it, {format_short_percent(round(count * self.operator_ns), trace.end_ns - trace.start_ns)} of the "
            f"window; it took {outside_ms:.0f} ms to begin and to end, outside of it"
        ]
        if self.cut:
            notes.append(
                f"{window}: torch.profiler ran during its first {(self.end_ns - trace.start_ns) / 1e9:.3g} s alone: "
                f"{self.cut}; operators, kernels and allocations are from them"
            )
        return replace(joined, notes=[*joined.notes, *notes])

    def _join_torch_trace(self, trace: Trace) -> Trace:
        torch_trace = chrome.read(Path(self._folder, "window.json")).trace
        moved_ns = self._clock_offset_ns(trace, torch_trace)
        watched = self.begin_ns - moved_ns, self.end_ns - moved_ns
        # On our clock by the marks: the wall clock may have been set since the session began.
        origin = replace(torch_trace.origin, monotonic_ns=0, realtime_ns=trace.origin.realtime_of(0) + moved_ns)
        joined = chrome.join_torch_trace(trace, replace(torch_trace, origin=origin, watched=watched))
        return insert_operator_spans(joined, torch_trace, moved_ns)

    def _clock_offset_ns(self, trace: Trace, torch_trace: Trace) -> int:
        mark_times = sorted(span.start_ns for span in torch_trace.spans if span.site.name == MARK)
        if len(mark_times) != len(self._marks):
            return torch_trace.origin.realtime_of(0) - trace.origin.realtime_of(0)
        least = max(before_ns - at_ns for (before_ns, _), at_ns in zip(self._marks, mark_times, strict=True))
        most = min(after_ns - at_ns for (_, after_ns), at_ns in zip(self._marks, mark_times, strict=True))
        return (least + most) // 2


def is_torch_imported() -> bool:
    """Return True if torch is completely imported."""
    torch = sys.modules.get("torch")
    return hasattr(torch, "profiler") and hasattr(torch, "autograd")


def _measure_operators_ns() -> int:
    """Return the time of `TRIALS` torch operators in ns. Returns 0 if the program intercepts operators."""
    torch = sys.modules["torch"]
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return 0
    rounds = []
    for _ in range(ROUNDS):
        begin_ns = time.monotonic_ns()
        for _ in range(TRIALS):
            torch.empty(0, device="cpu")
        rounds.append(time.monotonic_ns() - begin_ns)
    return min(rounds)


def _remove_folder(folder: str, pid: int) -> None:
    if pid == os.getpid():  # what is of the parent stays where a forked child ends
        shutil.rmtree(folder, ignore_errors=True)
