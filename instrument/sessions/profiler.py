"""The `Profiler` for training loops. A loop calls `step` at the end of each step, and gets a trace of each window (a
range of steps).

A `Profiler` joins the running session, or begins a session that ends with the last `Profiler`. Recording is never
switched off, so a window also has the spans that were open at the window's edges, clipped.

If no profile is named, the loop records with `EVERYTHING`.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any

from instrument.device.gauge_thread import Host
from instrument.errors import ProfileError, StateError, TargetError
from instrument.instrumentors.loaders import Waiting, listen_to_waits, loader
from instrument.native import OFF
from instrument.profile.keys import load
from instrument.profile.model import EVERYTHING, STATES, TRACER_OPTIONS, Profile
from instrument.recording.spans import HOST, Sample
from instrument.report.benchmark_view import Benchmark, LoopTimes, find_profiler_steps, format_benchmark_line, make_view
from instrument.report.section import format_summary
from instrument.report.view import Options
from instrument.runtime.faults import FAULTS, logger
from instrument.runtime.lazy_imports import replace
from instrument.runtime.unpatched import Lock, RLock
from instrument.sessions import process
from instrument.sessions.handlers import WAIT_LIMIT_NS, Backlog, Handler, InBackground, Window, is_asynchronous
from instrument.sessions.leaving import EXIT_LIMIT_NS
from instrument.sessions.session import Session
from instrument.sessions.torch_profiler import WINDOW_LIMIT_S, TorchOptions, TorchProfiler
from instrument.sessions.window import MOST_STEPS, RECORDING_STATES, State, States, Step, Windows
from instrument.sessions.window import schedule as make_states

STEP_LIMIT_S = 1.0
"""Seconds for which the end of the session waits for a call of `step` on another thread."""

_ANY_THREAD = 0
"""The thread key of waits in `Profiler.loader`. Such waits count for the steps of all threads."""


class Profiler:
    """Record windows of a loop's steps.

        with Profiler(schedule=(2, 10), on_trace_ready=export_chrome("traces")) as profiler:
            for batch in batches:
                train(batch)
                profiler.step()

    - `profile` begins a session of its own, as in `start`, so no session may be running. Without it, the Profiler uses
      the running session and does not change it. If no session runs, the Profiler begins one with the profile that
      `INSTRUMENT_PROFILE` names, else with `EVERYTHING`: phases, the wait for batches, communication, every layer,
      copies, and the load of process and machine. This session ends with the last Profiler that uses it. The `schedule`
      of a profile counts requests, not these steps.
    - `schedule` is ``(first, end)`` for the steps first to end - 1, a result of `schedule(...)`, or any function from a
      step to a state (CLOSED, READY, RECORD, RECORD_AND_RETURN). Without it, all steps are one window.
    - `on_trace_ready` is a function of a `Window`, or several in a list. It runs within `step` or `stop`, between two
      windows, so that its own work is in neither. `export_chrome` and `export_otlp` run on a thread of ours, in the
      order of the windows; `stop` waits for that thread at most `WAIT_LIMIT_NS`. A failed handler, or a window that was
      dropped because newer ones came too fast, is noted and counted in `failures`. It never stops the loop.
    - `state` and `tracer_option` are those of the profile.
    - `timer_only` measures the steps and records nothing, even with a `profile`.
    - `torch` makes torch.profiler run in each window, if torch is imported. Its operators become spans, and the window
      gets its kernels, allocations and floating-point operations. `torch` is True, False, or options, see
      `TorchOptions`: ``{"record_shapes": True, "profile_memory": True, "limit_s": 2.0}``. The default is True if the
      Profiler begins a session with `EVERYTHING`. Each window's notes state the cost. On a GPU, torch.profiler waits
      for the device at a window's end. If the program runs torch.profiler itself, ours does not run.
    """

    def __init__(
        self,
        profile: Profile | str | os.PathLike[str] | None = None,
        *,
        state: str | None = None,
        schedule: tuple[int, int] | States | None = None,
        on_trace_ready: Handler | Sequence[Handler] | None = None,
        tracer_option: str | None = None,
        timer_only: bool = False,
        torch: bool | Mapping[str, Any] | None = None,
    ) -> None:
        problems = []
        for name, value, allowed in (("state", state, STATES), ("tracer_option", tracer_option, TRACER_OPTIONS)):
            if value is not None and value not in allowed:
                problems.append(f"Profiler: {name}: found {value!r}; allowed: {', '.join(allowed)}")
        handlers = [] if on_trace_ready is None else on_trace_ready
        all_handlers: tuple[Any, ...] = tuple(handlers) if isinstance(handlers, (list, tuple)) else (handlers,)
        problems.extend(
            f"Profiler: on_trace_ready: found {'the asynchronous ' * is_asynchronous(handler)}{handler!r}; allowed: a "
            "function of a window, such as export_chrome('traces'), or a list of them"
            for handler in all_handlers
            if not callable(handler) or is_asynchronous(handler)
        )
        self._at_once: tuple[Handler, ...] = tuple(call for call in all_handlers if not isinstance(call, InBackground))
        self._later: tuple[Handler, ...] = tuple(call for call in all_handlers if isinstance(call, InBackground))
        self._schedule: States | None = None
        argument: object = schedule
        if argument is make_states:
            raise ProfileError(["Profiler: schedule: found the function schedule itself; call it: schedule(record=3)"])
        if callable(schedule):
            self._schedule = schedule
        elif schedule is not None:
            pair = schedule if isinstance(schedule, (list, tuple)) else ()
            whole = len(pair) == 2 and all(isinstance(step, int) and not isinstance(step, bool) for step in pair)
            if whole and 0 <= pair[0] < pair[1]:
                self._schedule = make_states(record=pair[1] - pair[0], skip_first=pair[0], repeat=1)
            else:
                problems.append(
                    f"Profiler: schedule: found {schedule!r}; allowed: (first, end) with 0 <= first < end, "
                    "schedule(closed=, ready=, record=), or a function from a step to its state"
                )
        if problems:
            raise ProfileError(problems)
        self._profile = profile
        self._state = state
        self._tracer_option = tracer_option
        self._timer_only = timer_only
        self._torch_options = TorchOptions.from_argument(torch)
        if schedule is not None and self._torch_options.limit_s is None:
            self._torch_options = replace(self._torch_options, limit_s=WINDOW_LIMIT_S)
        self._torch: TorchProfiler | None = None
        self._host: Host | None = None
        self._samples: list[Sample] = []
        self._lock = RLock()
        self._is_running = self._is_making = self._is_delivering = False
        self._session: Session | None = None
        self._windows: Windows | None = None
        self._reset_state()

    def _reset_state(self) -> None:
        self.window: Window | None = None
        self.failures = 0
        self._steps: deque[Step] = deque(maxlen=MOST_STEPS)
        self._failing = Lock()
        self._backlog = Backlog(self._count_failure)
        self._delivered: list[weakref.ref[Window]] = []
        self._pid = os.getpid()
        self._is_over = False
        self._reset_benchmarks()

    def _reset_benchmarks(self) -> None:
        self._benchmark = Benchmark(keeps=True)
        self._since = Benchmark(skip=0)
        self._step_ns = time.monotonic_ns()
        self._waited: dict[int, int] = {}

    def start(self) -> None:
        """Begin step 0.

        Raises `StateError` if the Profiler already runs, or if a session with another profile runs.
        """
        with self._lock:
            if self._is_running:
                raise StateError("the Profiler already runs; call stop() first, or create another one")
            if not self._timer_only:
                session = join_or_begin_session(self._profile, state=self._state, tracer_option=self._tracer_option)
                try:
                    guarded = None if self._schedule is None else partial(self._find_state, self._schedule)
                    self._windows = Windows(guarded) if session else None
                except BaseException:
                    if session is not None:
                        leave_session(session)
                    raise
                self._session = session
                if session is not None:
                    session.onlookers.append(self._leave_ending_session)
                    atexit.register(self.stop)  # before the session's own end, which was registered earlier
            self._reset_state()
            self._is_running = True
            self._unlisten = listen_to_waits(self._count_wait)
            if self._windows is not None and self._session is not None:
                self._torch = make_torch_profiler(self._session, self._torch_options, self._state)
                self._host = Host() if records_everything(self._session) else None
                self._prepare_window(self._windows)
            self._reset_benchmarks()
            if self._windows is not None:
                self._windows.begin_window(self._step_ns)

    def _prepare_window(self, windows: Windows) -> bool:
        if self._torch is not None:
            self._torch.stop_at_limit()
            if windows.state is State.READY:
                self._torch.prepare()
            elif windows.is_due:
                self._torch.begin()
            elif windows.state is State.CLOSED:
                self._torch.cancel()
        if windows.is_due and self._host is not None:
            self._read_host(self._host)
        return windows.is_due

    def _read_host(self, host: Host, *, is_end: bool = False) -> None:
        now_ns = time.monotonic_ns()
        values = host.read(now_ns, rarely=True)
        if not is_end:
            values = {name: value for name, value in values.items() if name.startswith("process_memory")}
            self._samples = []
        self._samples += [Sample(name, HOST, now_ns, value) for name, value in values.items()]

    def _find_state(self, schedule: States, step: int) -> State:
        """Return the state of a step in the user's schedule. An error at step 0 is raised. A later error makes the step
        CLOSED."""
        try:
            value = schedule(step)
            problem: Exception = ProfileError(
                [f"Profiler: schedule: found {value!r} for step {step}; allowed: {', '.join(State.__members__)}"]
            )
            if value in list(State):
                return State(value)
        except Exception as error:
            problem = error
        if step == 0:
            raise problem
        self._count_failure(f"the schedule of a Profiler failed at step {step}, which is closed", problem)
        return State.CLOSED

    def __enter__(self) -> Profiler:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def step(self, num_samples: int | None = None) -> None:
        """End the current step and begin the next one.

        `num_samples` is the number of samples in the current step. A call takes about 5 us.

        At the end of a window, a call also copies the rows of the window, at 0.3 us per row. It then calls the
        handlers, except those with a thread of their own. A handler that reads spans needs 2 us more per span.

        Raises `StateError` without a current step, and `ProfileError` if `num_samples` is not a number.
        """
        if self._pid != os.getpid():
            return
        if num_samples is not None and not (isinstance(num_samples, Real) and num_samples >= 0):
            raise ProfileError([f"Profiler.step: num_samples: found {num_samples!r}; allowed: a number from 0"])
        with self._lock:
            if self._is_over:
                return
            if self._is_delivering:
                raise StateError("cannot step in a handler of on_trace_ready: no step is open; call it in the loop")
            if not self._is_running:
                raise StateError(
                    "cannot step a Profiler that does not run; use it in a with statement, or call start()"
                )
            now_ns = time.monotonic_ns()  # not before: this may have waited for a step of another thread
            thread_id, waited, reader_ns = threading.get_native_id(), self._waited, 0
            if waited:
                self._waited = {}
                reader_ns = min(waited.get(thread_id, 0) + waited.get(_ANY_THREAD, 0), now_ns - self._step_ns)
            for costs in (self._benchmark, self._since):
                costs.add_step(now_ns - self._step_ns, reader_ns, num_samples)
            windows, session = self._windows, self._session
            began_ns, self._step_ns = self._step_ns, now_ns
            if windows is not None and session is not None:
                last = windows.steps
                step = Step(last, began_ns, now_ns, thread_id, num_samples)
                if windows.state in RECORDING_STATES:
                    self._steps.append(step)
                session.recorded.steps.append(step)
                bounds = windows.end_step(now_ns)
                try:
                    if bounds is not None:
                        self._deliver_window(self._make_window(session, windows, bounds, last))
                except Exception as fault:
                    FAULTS.note("window of a Profiler", fault)
                finally:  # a Ctrl-C in a handler ends the loop, not the Profiler
                    if self._is_over:
                        self._stop()
                    elif self._prepare_window(windows) or bounds is not None:
                        self._step_ns, self._waited = time.monotonic_ns(), {}
                    windows.begin_window(self._step_ns)

    def stop(self) -> None:
        """End the last step, deliver the open window, and leave the session.

        A window without a complete step and without a span is not delivered. A last step without a span is left out. In
        a handler, the call takes effect after the window is delivered, and later steps are ignored. A second call does
        nothing.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._is_delivering:
                self._is_over = self._is_running
            else:
                self._stop()

    def _stop(self) -> None:
        is_running, self._is_running = self._is_running, False
        if is_running:
            self._unlisten()
            self._leave_session(WAIT_LIMIT_NS)

    def _leave_ending_session(self) -> None:
        """Stop recording because the session ends, perhaps on SIGTERM. Later steps are only timed."""
        if self._pid != os.getpid():
            return
        if self._lock.acquire(timeout=STEP_LIMIT_S):
            try:
                self._leave_session(EXIT_LIMIT_NS // 2)
                if self._is_over and not self._is_delivering:
                    self._stop()
            finally:
                self._lock.release()
            return
        windows, session = self._windows, self._session
        if windows is not None and session is not None:
            if windows.is_open or self._is_making:
                session.exporting.count_loss("windows of loops that were not written", 1)
            self._backlog.stop(EXIT_LIMIT_NS // 2)

    def _leave_session(self, limit_ns: int) -> None:
        now_ns = time.monotonic_ns()
        windows, self._windows = self._windows, None
        session = self._session
        if session is None or windows is None:
            return
        try:
            bounds = windows.stop(now_ns)
            if bounds is not None:
                window = self._make_window(session, windows, bounds, windows.steps, partial=True)
                if window.first_step <= window.last_step:
                    self._deliver_window(window)
        except Exception as fault:
            FAULTS.note("last window of a Profiler", fault)
        finally:
            if self._torch is not None:
                self._torch.cancel()
            self._detach_from_session(session, limit_ns)

    def _detach_from_session(self, session: Session, limit_ns: int) -> None:
        def end_windows() -> None:
            self._backlog.stop(limit_ns)
            for reference in self._delivered:  # windows that the user still has: their facts end with the session
                if (window := reference()) is not None:
                    window.trace  # noqa: B018 - is made now

        try:
            FAULTS.attempt("windows of a Profiler", end_windows)
        finally:
            atexit.unregister(self.stop)
            if self._leave_ending_session in session.onlookers:
                session.onlookers.remove(self._leave_ending_session)
            if self.failures > 1:
                session.account.complain(f"on_trace_ready or the schedule of a Profiler failed {self.failures} times")
            leave_session(session)

    def _make_window(
        self, session: Session, windows: Windows, bounds: tuple[int, int, int], last_step: int, *, partial: bool = False
    ) -> Window:
        self._is_making = True
        index, start_ns, end_ns = bounds
        if self._host is not None:
            self._read_host(self._host, is_end=True)
        torch_record = None if self._torch is None else self._torch.end()
        stretch = session.take(start_ns, end_ns, index)
        steps = list(self._steps)
        self._steps.clear()
        if partial and stretch.has_span_since(self._step_ns):
            thread_id = steps[-1].thread_id if steps else threading.get_native_id()
            steps.append(Step(last_step, self._step_ns, end_ns, thread_id, clipped=True))
        elif partial:
            last_step -= 1
        return Window(
            session=session,
            recorded=stretch,
            steps=steps,
            first_step=windows.first_step,
            last_step=last_step,
            partial=partial,
            tracer_option=self._tracer_option or session.profile.tracer_option,
            state=self._state or session.profile.state,
            torch_record=torch_record,
            samples=[replace(sample, at_ns=min(sample.at_ns, end_ns)) for sample in self._samples],
        )

    def _deliver_window(self, window: Window) -> None:
        self.window = window
        self._delivered = [reference for reference in self._delivered if reference() is not None]
        self._delivered.append(weakref.ref(window))
        if self._later:  # first, so that no other handler delays or prevents it
            self._backlog.queue_window(window, self._later)
        self._is_making = False
        self._is_delivering = True
        try:
            for handler in self._at_once:
                try:
                    handler(window)
                except Exception as error:
                    self._count_failure(f"on_trace_ready failed for {window}", error)
        finally:
            self._is_delivering = False

    def _count_failure(self, event: str, error: Exception) -> None:
        with self._failing:
            self.failures += 1
            if self.failures > 1:
                return
        message = f"{event}: {type(error).__name__}: {error}"
        logger.warning("%s", message, exc_info=error)
        if self._session is not None:
            self._session.account.complain(message, log=False)

    # ---------------------------------------------------------------- what it has measured

    def loader(self, batches: Any, name: str | None = None) -> LoaderItems:
        """Return the items of an iterable, and measure the wait for each item.

        Waits on all threads count, even without a session. `Profiler.step_info` calls the waits the reader cost. `name`
        and the spans are those of `instrument.loader`.

        Raises `TargetError` for an asynchronous iterable, and the errors of `instrument.loader`.
        """
        if hasattr(batches, "__aiter__") and not hasattr(batches, "__iter__"):
            raise TargetError(
                f"Profiler.loader: it cannot take the asynchronous {batches!r:.80}; use instrument.loader for it"
            )
        kind = SizedLoaderItems if hasattr(batches, "__len__") else LoaderItems
        return kind(loader(batches, name), self)

    def _count_wait(self, thread_id: int, waited_ns: int, of: object) -> None:
        waited, reader = self._waited, _ANY_THREAD if of is self else thread_id
        waited[reader] = waited.get(reader, 0) + waited_ns

    def step_info(self, unit: str | None = None) -> str:
        """Return a line of averages since the last call of this method.

        The line has the reader cost and the batch cost in seconds, and the samples per second. Without numbers of
        samples, the line has the steps per second. `unit` is the word for a sample. A missing value is `-`.
        """
        with self._lock:
            since, self._since = self._since, Benchmark(skip=0)
        return format_benchmark_line(since, unit)

    def benchmark(self) -> LoopTimes:
        """Return the times of all steps except the first `SKIPPED_STEPS`."""
        return self._benchmark.measure_loop_times()

    def summary(
        self,
        *,
        views: Sequence[str] | None = None,
        unit: str = "ms",
        torch_trace: str | os.PathLike[str] | None = None,
        skip_first: int | None = None,
        **options: Any,
    ) -> str:
        """Return a report on the newest window and on the times of all steps.

        `views` are the names of the views, by default `events` and `benchmark`. `benchmark` leaves out the first
        `skip_first` steps, by default `SKIPPED_STEPS`, and at most `FIRST_KEPT`. Other options and the errors are those
        of `Window.summary`. Before the first window has ended, the report has only the step times.
        """
        window, names = self.window, ("events", "benchmark") if views is None else views
        steps = self._benchmark if skip_first is None else self._benchmark.without_first_steps(skip_first)
        if window is not None:
            recording = window._recording(torch_trace)
            recording.store_result(find_profiler_steps, steps)
            text = format_summary(
                names, recording, window._options({"unit": unit, "skip_first": skip_first, **options})
            )
            return f"{str(window).capitalize()}\n{text}"
        lines = [] if self._timer_only else [process.SWITCHED_OFF if OFF else "No window has ended yet."]
        if self._timer_only or "benchmark" in names:
            lines += make_view(steps, Options(unit=unit, skip_first=skip_first or 0)).lines()
        return "\n".join(lines).rstrip("\n") + "\n"

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write the newest window to a file with `Window.export`. Raises `StateError` if no window has ended."""
        window = self.window
        if window is None and OFF:
            process.log_switched_off()
            return Path(path)
        if window is None:
            raise StateError(f"no window has ended yet that could be exported to {os.fspath(path)}; see the schedule")
        return window.export(path)


class LoaderItems(Iterator[Any]):
    """The iterable that `Profiler.loader` returns. It can be iterated as often as its source."""

    def __init__(self, source: Any, of: object) -> None:
        self._source = source
        self._of = of
        self._begun: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        iterator, self._begun = self._begun, None
        return self._iterate_source() if iterator is None else iterator

    def __next__(self) -> Any:
        if self._begun is None:
            self._begun = self._iterate_source()
        return next(self._begun)

    def _iterate_source(self) -> Iterator[Any]:
        items: Iterator[Any] | None = None
        while True:
            waiting = Waiting(self._of)
            try:
                items = iter(self._source) if items is None else items
                item = next(items)
            except StopIteration:
                return
            finally:
                waiting.end_waiting()
            yield item


class SizedLoaderItems(LoaderItems):
    """The iterable that `Profiler.loader` returns for a source with a length."""

    def __len__(self) -> int:
        return len(self._source)


def records_everything(session: Session) -> bool:
    return session.profile.source == EVERYTHING.source


def make_torch_profiler(session: Session, options: TorchOptions, state: str | None = None) -> TorchProfiler | None:
    if options.is_wanted is False or (options.is_wanted is None and not records_everything(session)):
        return None
    is_of_host = (state or session.profile.state) == "CPU"
    return TorchProfiler(options, session.account.complain, host_only=is_of_host)


_guests: dict[Session, int] = {}
_guests_lock = threading.RLock()


def join_or_begin_session(profile: Profile | str | os.PathLike[str] | None, **overrides: str | None) -> Session | None:
    """Return the running session, or begin one. Returns None if `INSTRUMENT` is `off`."""
    if OFF:
        return None
    settings: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    with _guests_lock:
        running = process.running_session()
        if running is None:
            source = profile or os.environ.get("INSTRUMENT_PROFILE") or EVERYTHING
            chosen = source if isinstance(source, Profile) else load(source)
            session = process.start(replace(chosen, **settings))
            if session is not None:
                _guests[session] = 1
            return session
        if profile is not None:
            source = profile.source if isinstance(profile, Profile) else os.fspath(profile)
            raise StateError(
                f"a Profiler with the profile {source} cannot start: a session with {running.profile.source} runs; "
                "leave the profile out, or stop the session"
            )
        if settings.get("state", "CPU") != "CPU" and running.profile.state == "CPU":
            raise StateError(
                f"a Profiler with state {settings['state']} cannot start: the session with {running.profile.source} "
                "has state CPU, without device times; leave the state out, or change the profile"
            )
        if running in _guests:
            _guests[running] += 1
        return running


def leave_session(session: Session) -> None:
    with _guests_lock:
        if session not in _guests:
            return
        _guests[session] -= 1
        if not _guests[session]:
            del _guests[session]
            session.stop()
