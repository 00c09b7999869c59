"""A substitute for the profiler of Paddle's fluid: ``start_profiler("All", "OpDetail")``, ``stop_profiler("total")``.

Differences from fluid:
- The profiler neither synchronises a device nor launches a kernel.
- With the state `All`, parallel work of host and device counts once in the column Total.
- The file at `profile_path` is a Chrome trace.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instrument import chrome
from instrument.errors import ProfileError
from instrument.profile.model import STATES, TRACER_OPTIONS
from instrument.report.events_view import events
from instrument.report.section import list_cost_and_losses
from instrument.report.view import Options, Recording
from instrument.sessions.profiler import join_or_begin_session, leave_session, make_torch_profiler
from instrument.sessions.session import Session
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
    """True while the session's tally counts exactly the calls since `since_ns`."""
    torch: TorchProfiler | None


_lock = threading.RLock()
_run: _Run | None = None


def start_profiler(state: str, tracer_option: str = "Default") -> None:
    """Start recording. If recording is already on, nothing changes.

    - `state`: "CPU", "GPU" or "All"
    - `tracer_option`: "Default", "OpDetail" or "AllOpDetail"

    Raises `ProfileError`, a subclass of ValueError, for other values.
    """
    global _run
    _check_choices("start_profiler", state=(state, STATES), tracer_option=(tracer_option, TRACER_OPTIONS))
    with _lock:
        if _run is not None:
            return
        now_ns = time.monotonic_ns()
        session = join_or_begin_session(None, state=state, tracer_option=tracer_option)
        if session is not None:  # None: switched off by the environment
            torch = make_torch_profiler(session, OPERATORS_ALONE, state)
            if torch is not None:
                torch.begin()
            _run = _Run(session, state, tracer_option, now_ns, session.recorded.start_ns >= now_ns, torch)
            if torch is not None and torch.is_at_work:
                _run.since_ns = time.monotonic_ns()


def stop_profiler(sorted_key: str | None = None, profile_path: _Path | None = PROFILE_PATH) -> None:
    """Stop recording, print a report, and write a Chrome trace. If recording is off, nothing happens.

    - `sorted_key`: the column by which rows are sorted: "calls", "total", "max", "min" or "ave". None and "default"
      keep the order
    - `profile_path`: the path of the Chrome trace, or None to write no file
    """
    global _run
    _check_choices("stop_profiler", sorted_key=(sorted_key or "default", SORTED_KEYS))
    with _lock:
        run, _run = _run, None
        if run is None:
            return
        try:
            trace = run.session.trace(run.since_ns, time.monotonic_ns())
            profiled = None if run.torch is None else run.torch.end()
            is_whole = trace.coverage[0] == trace.start_ns
            if profiled is not None and (is_whole or not run.counts_all):
                recording = Recording.from_trace(profiled.add_to_trace(trace))
            else:
                recording = run.session.recording() if run.counts_all else Recording.from_trace(trace)
            options = Options(tracer_option=run.tracer_option, state=run.state, sorted_by=sorted_key or "default")
            lines = [*events(recording, options).with_wide_lines().lines(), *list_cost_and_losses(recording)]
            print("\n".join(lines), flush=True)
            if profile_path is not None:
                chrome.dump(profile_path, trace)
        finally:
            leave_session(run.session)


def reset_profiler() -> None:
    """Drop the spans recorded so far, such as those of the first iterations. An open span counts only from now on."""
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
    """Record a `with` block, and print the report at its end, also after an exception. The arguments are as in
    `start_profiler` and `stop_profiler`."""
    _check_choices(
        "profiler",
        state=(state, STATES),
        sorted_key=(sorted_key or "default", SORTED_KEYS),
        tracer_option=(tracer_option, TRACER_OPTIONS),
    )
    start_profiler(state, tracer_option)
    try:
        yield
    finally:
        stop_profiler(sorted_key, profile_path)


def _check_choices(function: str, **arguments: tuple[Any, tuple[str, ...]]) -> None:
    problems = [
        f"{function}: {name}: found {value!r}; allowed: {', '.join(allowed)}"
        for name, (value, allowed) in arguments.items()
        if value not in allowed
    ]
    if problems:
        raise ProfileError(problems)
