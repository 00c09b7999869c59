"""The profiles of Theano: one for each function and their sum, printed when the interpreter exits.

``@function(profile=True)`` stands for ``theano.function(..., profile=True)``: what runs within the calls of the Python
function is its profile, and the views `classes`, `ops` and `instances` are its sections Class, Ops and Apply. The first
such function begins a session where none runs, and torch.profiler, where torch is imported and no profile says what is
recorded, at the first call of one: operators of torch are the ops then. Differences: ``theano.function([x], y)``, which
compiles a graph, is refused; times are self times of spans in place of thunks. Functions that call each other have what
their own calls took; their sum counts that once. Of Theano's flags, in `THEANO_FLAGS` or as `config.profile`,
`profile`, `profiling.n_ops`, `profiling.n_apply` and `profiling.destination` are honoured; of others it is said in the
log that they are not.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, TypeVar

from instrument.compat.theano_flags import Config
from instrument.errors import ProfileError, StateError
from instrument.instrumentors.functions import profiled
from instrument.instrumentors.targets import site_on
from instrument.recorder.scopes import OFF
from instrument.recording.spans import Site, Trace, is_operator
from instrument.recording.tally import Tally
from instrument.report.summary import made
from instrument.report.table import safe
from instrument.report.view import Options, Recording
from instrument.runtime.faults import FAULTS
from instrument.sessions import process
from instrument.sessions.session import Session
from instrument.sessions.sharing import join, torch_beside
from instrument.sessions.torch_profiler import TorchOptions, TorchProfiler

Function = TypeVar("Function", bound=Callable[..., Any])

SECTIONS = ("classes", "ops", "instances")
SUM = Site("all functions")
"""Stands for every function in their sum."""

config = Config.of(os.environ.get("THEANO_FLAGS", ""))
"""Theano's flags: ``config.profile = True``, ``config.profiling.n_ops = 10``."""


class ProfileStats:
    """The profile of a function, or of all functions that were given this object.

    `message` names it, else the place of the first function. `calls` and `call_ns` are exact, whatever the rings hold.
    """

    def __init__(self, message: str | None = None) -> None:
        self.message = message
        self._sites: list[Site] = []

    def _add(self, site: Site) -> None:
        self._sites.append(site)
        if self.message is None:
            self.message = f"{os.path.basename(site.file)}:{site.line}"  # noqa: PTH119 - of a text

    @property
    def calls(self) -> int:
        """Calls of the functions, but not those from one of them."""
        return sum(row.totals.calls for row in self._tally().rows() if len(row.path) == 1)

    @property
    def call_ns(self) -> int:
        """Time in these calls, in ns."""
        return sum(row.totals.total_ns for row in self._tally().rows() if len(row.path) == 1)

    def summary(
        self, file: TextIO | None = None, n_ops_to_print: int | None = None, n_apply_to_print: int | None = None
    ) -> str:
        """Print the profile to `file`, else to where `config` says, and return the text. Raises as `text`."""
        text = self.text(n_ops_to_print, n_apply_to_print)
        _print(text, file)
        return text

    def text(self, rows: int | None = None, instances: int | None = None) -> str:
        """The profile, `rows` of classes and of ops, and of instances; left out, as many as `config` says.

        Ends the time in which torch.profiler is beside. Raises `StateError` where no session runs.
        """
        lines = ["Function profiling", "==================", f"  Message: {safe(self.message or '')}"]
        if OFF:
            return "\n".join([*lines, "", process.SWITCHED_OFF]) + "\n"
        tally, beside = self._tally(), _below(_beside_torch(), self._sites)
        lines.append(f"  Time in {self.calls} calls to Function.__call__: {self.call_ns / 1e9:e}s")
        if beside.calls:
            tally = beside
            calls_ns, calls = _outermost(beside)
            work_ns = sum(row.totals.self_ns for row in beside.rows() if is_operator(row.path[-1]))
            lines.append(f"  Time in thunks: {work_ns / 1e9:e}s ({100 * work_ns / (calls_ns or 1):.3f}%)")
            if calls < self.calls:
                lines.append(f"  Thunks, classes, ops and instances: of the first {calls}, with torch.profiler beside")
        return "\n".join([*lines, "", *_sections(tally, rows, instances)]) + "\n"

    def _tally(self) -> Tally:
        return Tally() if OFF else _below(process.session().tally(), self._sites)


_profiles: list[ProfileStats] = []
_made: Counter[tuple[object, ...]] = Counter()
"""How many functions of each place have been made."""

_lock = threading.RLock()


class _Torch:
    """torch.profiler beside the calls of the functions of a session, from the first one on."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._options = TorchOptions(record_shapes=False, profile_memory=False)
        self.profiler: TorchProfiler | None = torch_beside(session, self._options)
        self._since_ns = 0
        self.tally = Tally()

    def begin(self) -> None:
        """Once, where torch is imported."""
        profiler = self.profiler
        if profiler is None or self._since_ns:
            return
        profiler.begin()
        if profiler.is_at_work:
            self._since_ns = time.monotonic_ns()

    def end(self) -> Tally:
        """The calls that it was beside, with torch's operators in them."""
        profiler = self.profiler
        if profiler is not None and self._since_ns:
            self.profiler = None
            seen = profiler.end()
            if seen is not None:
                trace = seen.join(self.session.trace_of(self.session.take(self._since_ns, seen.end_ns)))
                if any(is_operator(span.site) for span in trace.spans):
                    whole = [span for span in trace.spans if not span.clipped]
                    self.tally = Recording.of_trace(replace(trace, spans=whole)).tally
        return self.tally


_torch: _Torch | None = None


def function(
    *graph: object, profile: bool | str | ProfileStats | None = None, name: str | None = None
) -> Callable[[Function], Function]:
    """A decorator whose result has its `profile`: one of its own, by a message, or one that functions share.

    Left out, `profile` is what `config.profile` says.
    `name` is that of its spans, else the function's own; one made again at the same place has a number behind it, for
    its calls are its own. `profile=False` records nothing. Raises `ProfileError` for
    the inputs and outputs of a graph.
    """
    if graph:
        raise ProfileError(
            ["function: found inputs of a graph, which nothing compiles here; allowed: function(profile=)(callable)"]
        )
    profile = config.profile if profile is None else profile
    if not isinstance(profile, (bool, str, ProfileStats)):
        raise ProfileError([f"function: profile: found {profile!r}; allowed: True, False, a message, a ProfileStats"])
    if profile is False:
        return lambda target: target
    stats = (
        profile if isinstance(profile, ProfileStats) else ProfileStats(profile if isinstance(profile, str) else name)
    )

    def decorate(target: Function) -> Function:
        recorded = profiled(name)(target) if name else profiled(target)
        if OFF:
            off: Function = _with_profile(recorded, stats)
            return off
        site = site_on(recorded)
        if site is not None:
            with _lock:
                _made[site.key] += 1
                number = _made[site.key]
            if number > 1:  # another one of a factory, or of the same line: what they are known by would be the same
                recorded = profiled(f"{site.name} ({number})")(target)
                site = site_on(recorded)
        if site is None:
            return recorded
        stats._add(site)
        with _lock:
            if stats not in _profiles:
                _profiles.append(stats)
            _begin()
            recorded = _beginning(recorded)
        recorded.profile = stats  # type: ignore[attr-defined]
        return recorded

    return decorate


def _with_profile(target: Any, stats: ProfileStats) -> Any:
    """The very same function, or one that calls it where it takes no attribute, such as a bound method."""
    try:
        target.profile = stats
    except (AttributeError, TypeError):
        return _with_profile(functools.wraps(target)(lambda *args, **kwargs: target(*args, **kwargs)), stats)
    return target


def _begin() -> None:
    global _torch
    try:
        session: Session | None = process.session()
    except StateError:
        session = join(None)
    if session is not None and (_torch is None or _torch.session is not session):
        _torch = _Torch(session)
    atexit.unregister(_print_at_exit)
    atexit.register(_print_at_exit)  # before the session's own end, which was registered earlier


def _beginning(target: Function) -> Function:
    """The function, at whose first call torch.profiler begins, or which begins it now where it is no plain function."""
    torch = _torch
    if torch is None or torch.profiler is None:
        return target
    if not inspect.isfunction(target) or any(
        kind(target) for kind in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    ):
        torch.begin()
        return target

    @functools.wraps(target)
    def first(*args: Any, **kwargs: Any) -> Any:
        torch.begin()
        return target(*args, **kwargs)

    return first  # type: ignore[return-value]


def _beside_torch() -> Tally:
    with _lock:
        return Tally() if _torch is None or _torch.session is not process.session() else _torch.end()


def _print_at_exit() -> None:
    try:
        process.session()
        _print(report())
    except StateError:
        pass  # it was stopped before, and said what it was asked to say
    except Exception as fault:
        FAULTS.note("profiles at exit", fault)


def _print(text: str, file: TextIO | None = None) -> None:
    """To the file, else to where the flags say, at the end of a file."""
    destination = config.profiling.destination
    if file is None and destination not in ("stderr", "stdout"):
        with Path(destination).open("a", encoding="utf-8") as opened:
            opened.write(text)
        return
    print(text, end="", file=file or (sys.stdout if destination == "stdout" else sys.stderr), flush=True)


def report() -> str:
    """Each profile, that with most time in calls first, and their sum; what is printed at exit."""
    with _lock:
        profiles = sorted(_profiles, key=lambda stats: stats.call_ns, reverse=True)
    called = [stats for stats in profiles if stats.calls]
    texts = [f"Skipping empty Profile: {safe(stats.message or '')}\n" for stats in profiles if not stats.calls]
    texts += [stats.text() for stats in called]
    if len(called) > 1:
        lines = [f"Sum of all({len(called)}) printed profiles at exit", ""]
        sites = [site for stats in called for site in stats._sites]
        tally, beside = _below(process.session().tally(), sites, SUM), _below(_beside_torch(), sites, SUM)
        tally = beside if beside.calls else tally
        texts.append("\n".join([*lines, *_sections(tally)]) + "\n")
    return "\n".join(texts)


def _outermost(tally: Tally) -> tuple[int, int]:
    """Time and number of the calls that lie in no other one of the functions."""
    rows = [row.totals for row in tally.rows() if len(row.path) == 1]
    return sum(totals.total_ns for totals in rows), sum(totals.calls for totals in rows)


def _sections(tally: Tally, rows: int | None = None, instances: int | None = None) -> list[str]:
    recording = Recording(lambda: tally, _no_trace)
    rows, instances = rows or config.profiling.n_ops, instances or config.profiling.n_apply
    lines: list[str] = []
    for views, most in ((SECTIONS[:2], rows), (SECTIONS[2:], instances)):
        for view in made(views, recording, Options(rows=most, sorted_by="total")).values():
            lines += view.lines()
    return lines


def _no_trace() -> Trace:
    raise AssertionError("these views are made of a tally alone")


def _below(tally: Tally, sites: Collection[Site], root: Site | None = None) -> Tally:
    """The part of a tally that lies in calls of these sites, below the outermost of them, or `root` in its place."""
    keys = {site.key for site in sites}
    part = Tally(tally.threads)
    for row in tally.rows():
        first = next((depth for depth, site in enumerate(row.path) if site.key in keys), None)
        if first is not None:
            path = row.path[first:]
            part.totals(path if root is None else (root, *path[1:]), row.thread_id).merge(row.totals)
    return part
