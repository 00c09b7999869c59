"""The profiler of Paddle's fluid: ``start_profiler("All", "OpDetail")``, ``stop_profiler("total")``.

Differences: no device is synchronised and no kernel launched. The Total of state `All` is the union of host and device
time, not their sum. `profile_path` gets a Chrome trace. A running session is used and continues afterwards.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from instrument import chrome
from instrument.errors import ProfileError
from instrument.profile.model import STATES, TRACER_OPTIONS
from instrument.report.events_view import events
from instrument.report.section import instrumentation
from instrument.report.view import Options, Recording
from instrument.runtime import atomic
from instrument.sessions.session import Session
from instrument.sessions.sharing import join, leave, torch_beside
from instrument.sessions.torch_profiler import OPERATORS_ALONE, TorchProfiler

_Path = str | os.PathLike[str]

SORTED_KEYS = ("default", "calls", "total", "max", "min", "ave")
PROFILE_PATH = str(Path(tempfile.gettempdir(), "profile"))


@dataclass
class _Run:
    session: Session
    state: str
    tracer_option: str
    since_ns: int
    counts_all: bool
    """True if the session began with the run, so that its tally is exact for all calls."""
    torch: TorchProfiler | None


_lock = threading.RLock()
_run: _Run | None = None


def start_profiler(state: str, tracer_option: str = "Default") -> None:
    """Record from now on. Does nothing if it runs already. Raises `ProfileError`, a ValueError, as `profiler` does."""
    global _run
    _refuse(state=(state, STATES), tracer_option=(tracer_option, TRACER_OPTIONS))
    with _lock:
        if _run is not None:
            return
        now_ns = time.monotonic_ns()
        session = join(None, state=state, tracer_option=tracer_option)
        if session is not None:  # None: switched off by the environment
            torch = torch_beside(session, OPERATORS_ALONE, state)
            if torch is not None:
                torch.begin()
            _run = _Run(session, state, tracer_option, now_ns, session.recorded.start_ns >= now_ns, torch)
            if torch is not None and torch.is_at_work:
                _run.since_ns = time.monotonic_ns()


def stop_profiler(sorted_key: str | None = None, profile_path: _Path | None = PROFILE_PATH) -> None:
    """Print the report of all threads together, then by thread, and write the timeline. Does nothing if it is off."""
    _stop(sorted_key, (profile_path,), None)


def _stop(sorted_key: str | None, timelines: Iterable[_Path | None], report: _Path | None) -> None:
    global _run
    _refuse(sorted_key=(sorted_key or "default", SORTED_KEYS))
    with _lock:
        run, _run = _run, None
        if run is None:
            return
        try:
            trace = run.session.trace(run.since_ns, time.monotonic_ns())
            profiled = None if run.torch is None else run.torch.end()
            is_whole = trace.held[0] == trace.start_ns
            if profiled is not None and (is_whole or not run.counts_all):
                recording = Recording.of_trace(profiled.join(trace))
            else:
                recording = run.session.recording() if run.counts_all else Recording.of_trace(trace)
            options = Options(tracer_option=run.tracer_option, state=run.state, sorted_by=sorted_key or "default")
            text = _report(recording, options)
            print(text, flush=True)
            if report is not None:
                with atomic.replacing(Path(report)) as file:
                    file.write(text.encode(errors="backslashreplace"))
            for path in timelines:
                if path is not None:
                    chrome.dump(path, trace)
        finally:
            leave(run.session)


def _report(recording: Recording, options: Options) -> str:
    """Return the report with full names, and the cost and the gaps of the instrumentation."""
    about = instrumentation(recording)
    return "\n".join([*events(recording, options).wide().lines(), *about])


def reset_profiler() -> None:
    """Drop the spans up to now, such as the first iterations. Open spans count from now on."""
    with _lock:
        if _run is not None:
            _run.since_ns, _run.counts_all = time.monotonic_ns(), False


@contextmanager
def profiler(
    state: str,
    sorted_key: str | None = None,
    profile_path: _Path | None = PROFILE_PATH,
    tracer_option: str = "Default",
) -> Iterator[None]:
    """Record within the block, and report at its end, also after an exception."""
    _refuse(sorted_key=(sorted_key or "default", SORTED_KEYS))
    start_profiler(state, tracer_option)
    try:
        yield
    finally:
        stop_profiler(sorted_key, profile_path)


class ProfilerOptions:
    """The options of a `Profiler` of `paddle.utils`, as an object."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = dict(options or {})

    def with_state(self, state: str) -> ProfilerOptions:
        """Set another state, and return the options."""
        self.options["state"] = state
        return self


class Profiler:
    """The `Profiler` of `paddle.utils`: ``with Profiler(options={"batch_range": [10, 20]}) as p``, `p.record_step()`.

    Options: state, sorted_key, tracer_level, batch_range (batches first to end - 1), and the files, with `none` for no
    file: profile_path and timeline_path get a Chrome trace, op_summary_path the report. The report has separate threads
    with and without output_thread_detail.
    """

    DEFAULTS: Mapping[str, Any] = {
        "state": "All",
        "sorted_key": "default",
        "tracer_level": "Default",
        "batch_range": (0, 2**63 - 1),
        "output_thread_detail": False,
        "profile_path": "none",
        "timeline_path": "none",
        "op_summary_path": "none",
    }

    def __init__(self, enabled: bool = True, options: Mapping[str, Any] | ProfilerOptions | None = None) -> None:
        self._enabled = enabled
        settings = options.options if isinstance(options, ProfilerOptions) else options or {}
        self._options = {**self.DEFAULTS, **settings}
        problems = [
            f"Profiler: options: found the key {key!r}; allowed: {', '.join(self.DEFAULTS)}"
            for key in self._options
            if key not in self.DEFAULTS
        ]
        value = self._options["batch_range"]
        pair = value if isinstance(value, (list, tuple)) else ()
        if not (len(pair) == 2 and all(isinstance(batch, int) for batch in pair) and 0 <= pair[0] < pair[1]):
            problems.append(f"Profiler: batch_range: found {value!r}; allowed: [first, end] with 0 <= first < end")
        if problems:
            raise ProfileError(problems)
        self._first, self._end = pair
        self.batch_id = 0

    def start(self) -> None:
        """Record from now on, in any batch."""
        if self._enabled:
            start_profiler(self._options["state"], self._options["tracer_level"])

    def stop(self) -> None:
        """Print and write the report. Does nothing if the range has ended before."""
        if self._enabled:
            profile, timeline, report = (
                None if self._options[name] == "none" else self._options[name]
                for name in ("profile_path", "timeline_path", "op_summary_path")
            )
            _stop(self._options["sorted_key"], (profile, timeline), report)

    def reset(self) -> None:
        """Drop the spans up to now, as `reset_profiler`."""
        if self._enabled:
            reset_profiler()

    def record_step(self, change_profiler_status: bool = True) -> None:
        """Count a batch that has ended."""
        self.batch_id += 1
        if not change_profiler_status:
            return
        if self.batch_id == self._first:
            self.reset() if _run is not None else self.start()
        if self.batch_id == self._end:
            self.stop()

    def __enter__(self) -> Profiler:
        if self._first == 0:
            self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def _refuse(**arguments: tuple[Any, tuple[str, ...]]) -> None:
    problems = [
        f"start_profiler: {name}: found {value!r}; allowed: {', '.join(allowed)}"
        for name, (value, allowed) in arguments.items()
        if value not in allowed
    ]
    if problems:
        raise ProfileError(problems)
