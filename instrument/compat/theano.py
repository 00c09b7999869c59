"""A substitute for Theano's profiles: one per function and their sum, printed when the interpreter exits.

Differences from Theano:
- ``@function(profile=True)`` on a Python function replaces ``theano.function(..., profile=True)``.
- ``theano.function([x], y)``, which compiles a graph, is refused.
- The views `classes`, `ops` and `instances` replace the sections Class, Ops and Apply. They show self times of spans.
- If torch is imported and no `profile.yaml` is in use, the ops are torch's operators.
- Only the flags `profile`, `profiling.n_ops`, `profiling.n_apply` and `profiling.destination` have an effect.
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
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from instrument.errors import ProfileError
from instrument.instrumentors.function_patterns import read_own_site
from instrument.instrumentors.profiled_functions import profiled
from instrument.native import OFF
from instrument.recording.paths import NOT_BELOW, CallPath
from instrument.recording.spans import Site, is_operator
from instrument.recording.tally import Tally, Totals, sum_all_lines
from instrument.report.section import make_views
from instrument.report.table import printable
from instrument.report.view import Options, Recording
from instrument.runtime.faults import FAULTS, logger
from instrument.sessions import process
from instrument.sessions.profiler import join_or_begin_session, make_torch_profiler
from instrument.sessions.session import Session
from instrument.sessions.torch_profiler import TorchOptions, TorchProfiler

if TYPE_CHECKING:
    from instrument.trace.trace import Trace

Function = TypeVar("Function", bound=Callable[..., Any])

SECTIONS = ("classes", "ops", "instances")
SUM = Site("all functions")
"""The root site of the call tree that sums all profiled functions."""

_ALLOWED: Mapping[type, str] = {bool: "True or False", int: "a whole number from 1", str: "stderr, stdout or a path"}
_BOOLS: Mapping[str, bool] = {
    **dict.fromkeys(("true", "1", "yes", "on"), True), **dict.fromkeys(("false", "0", "no", "off"), False)
}  # fmt: skip


class Flags:
    """The flags of Theano as attributes. Setting an unknown flag logs a warning and has no effect."""

    def __init__(self, prefix: str = "", **values: Any) -> None:
        vars(self).update(values, _prefix=prefix)

    def __setattr__(self, name: str, value: Any) -> None:
        flag = vars(self)["_prefix"] + name
        kind: type[Any] = type(vars(self).get(name))
        if kind not in _ALLOWED:
            logger.warning("theano: %s: not honoured: no graph is compiled here; the views show what is recorded", flag)
        elif type(value) is not kind or (kind is int and value < 1):
            raise ProfileError([f"theano.config.{flag}: found {value!r}; allowed: {_ALLOWED[kind]}"])
        else:
            vars(self)[name] = value


def parse_flags(text: str) -> Any:
    """Parse flags from a text, such as ``profile=True,profiling.n_ops=10``. A mistake in the text is logged."""
    flags: Any = Flags(profile=False, profiling=Flags("profiling.", n_apply=20, n_ops=20, destination="stderr"))
    for flag in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = flag.partition("=")
        owner = flags.profiling if name.startswith("profiling.") else flags
        name = name.removeprefix("profiling.")
        kind: type[Any] = type(vars(owner).get(name))
        parsed = _BOOLS.get(value.lower(), value) if kind is bool else value
        try:
            setattr(owner, name, int(value) if kind is int and value.isdecimal() else parsed)
        except ProfileError as error:
            logger.warning("THEANO_FLAGS: %s", error)
    return flags


config = parse_flags(os.environ.get("THEANO_FLAGS", ""))
"""Theano's flags, which code sets by ``config.profile = True`` or ``config.profiling.n_ops = 10``."""


class ProfileStats:
    """The profile of a function, or of several functions that share the object.

    `message` is the name of the profile, by default the file and line of the first function.
    """

    def __init__(self, message: str | None = None) -> None:
        self.message = message
        self._sites: list[Site] = []

    def _add_site(self, site: Site) -> None:
        self._sites.append(site)
        if self.message is None:
            self.message = f"{os.path.basename(site.file)}:{site.line}"  # noqa: PTH119 - of a text

    @property
    def calls(self) -> int:
        """The number of calls of the functions, including calls whose spans are lost. Only the outermost of nested
        calls counts."""
        return _sum_outermost_calls(self._make_tally()).calls

    @property
    def call_ns(self) -> int:
        """The total time of the calls in `calls`, in nanoseconds."""
        return _sum_outermost_calls(self._make_tally()).total_ns

    def summary(
        self, file: TextIO | None = None, n_ops_to_print: int | None = None, n_apply_to_print: int | None = None
    ) -> str:
        """Print the profile, and return it as text. The default of `file` is `config.profiling.destination`.

        `n_ops_to_print` limits the rows of the sections Class and Ops, and `n_apply_to_print` those of Apply.
        """
        text = self.text(n_ops_to_print, n_apply_to_print)
        _print_text(text, file)
        return text

    def text(self, rows: int | None = None, instances: int | None = None) -> str:
        """Return the profile as text. This ends torch.profiler. Raises `StateError` if no session has begun.

        `rows` limits the sections Class and Ops, and `instances` limits the section Apply. The defaults are in
        `config`.
        """
        lines = ["Function profiling", "==================", f"  Message: {printable(self.message or '')}"]
        if OFF:
            return "\n".join([*lines, "", process.SWITCHED_OFF]) + "\n"
        tally, torch_tally = self._make_tally(), _select_calls_below(_end_torch_recording(), self._sites)
        lines.append(f"  Time in {self.calls} calls to Function.__call__: {self.call_ns / 1e9:e}s")
        if torch_tally.calls:
            tally = torch_tally
            outermost = _sum_outermost_calls(torch_tally)
            calls_ns, calls = outermost.total_ns, outermost.calls
            work_ns = sum(row.totals.self_ns for row in torch_tally.iterate_totals() if is_operator(row.path[-1]))
            lines.append(f"  Time in thunks: {work_ns / 1e9:e}s ({100 * work_ns / (calls_ns or 1):.3f}%)")
            if calls < self.calls:
                lines.append(f"  Thunks, classes, ops and instances: of the first {calls}, with torch.profiler")
        return "\n".join([*lines, "", *_format_sections(tally, rows, instances)]) + "\n"

    def _make_tally(self) -> Tally:
        return Tally() if OFF else _select_calls_below(process.session().tally(), self._sites)


_profiles: list[ProfileStats] = []
_function_counts: Counter[tuple[object, ...]] = Counter()
"""The number of functions that share a site, by the site's key."""

_lock = threading.RLock()


class _TorchRun:
    """A run of torch.profiler within a session. It begins at the first call of a profiled function."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._options = TorchOptions(record_shapes=False, profile_memory=False)
        self.profiler: TorchProfiler | None = make_torch_profiler(session, self._options)
        self._since_ns = 0
        self.tally = Tally()

    def begin_profiler(self) -> None:
        """Begin torch.profiler, if torch is imported. Only the first call has an effect."""
        profiler = self.profiler
        if profiler is None or self._since_ns:
            return
        profiler.begin()
        if profiler.is_at_work:
            self._since_ns = time.monotonic_ns()

    def end_profiler(self) -> Tally:
        """End torch.profiler. Return the tally of the recorded calls and torch operators."""
        profiler = self.profiler
        if profiler is not None and self._since_ns:
            self.profiler = None
            profiled = profiler.end()
            if profiled is not None:
                trace = profiled.add_to_trace(self.session.trace_of(self.session.take(self._since_ns, profiled.end_ns)))
                if any(is_operator(span.site) for span in trace.spans):
                    whole = [span for span in trace.spans if not span.clipped]
                    self.tally = Recording.from_trace(replace(trace, spans=whole)).tally
        return self.tally


_torch: _TorchRun | None = None


def function(
    *graph: object, profile: bool | str | ProfileStats | None = None, name: str | None = None
) -> Callable[[Function], Function]:
    """Return a decorator that profiles a function.

    - `profile`: True for a new profile, the message of a new profile, or an existing profile. If False, nothing is
      recorded. The default is `config.profile`
    - `name`: the name of the spans, by default the name of the function

    If two functions are defined at the same line, the second name ends with a number. Raises `ProfileError` if the
    inputs and outputs of a graph are given.
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
            off: Function = _attach_profile(recorded, stats)
            return off
        site = read_own_site(recorded)
        if site is not None:
            with _lock:
                _function_counts[site.key] += 1
                number = _function_counts[site.key]
            if number > 1:  # another function of a factory, or of the same line, with the same site
                recorded = profiled(f"{site.name} ({number})")(target)
                site = read_own_site(recorded)
        if site is None:
            return recorded
        stats._add_site(site)
        with _lock:
            if stats not in _profiles:
                _profiles.append(stats)
            _begin_session()
            recorded = _profile_first_call(recorded)
        recorded.profile = stats  # type: ignore[attr-defined]
        return recorded

    return decorate


def _attach_profile(target: Any, stats: ProfileStats) -> Any:
    """Set the attribute `profile` of a function, and return the function. A function without settable attributes is
    wrapped."""
    try:
        target.profile = stats
    except (AttributeError, TypeError):
        return _attach_profile(functools.wraps(target)(lambda *args, **kwargs: target(*args, **kwargs)), stats)
    return target


def _begin_session() -> None:
    global _torch
    session = process.running_session() or join_or_begin_session(None)
    if session is not None and (_torch is None or _torch.session is not session):
        _torch = _TorchRun(session)
    atexit.unregister(_print_at_exit)
    atexit.register(_print_at_exit)  # before the session's own end, which was registered earlier


def _profile_first_call(target: Function) -> Function:
    torch = _torch
    if torch is None or torch.profiler is None:
        return target
    are_unlike = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if not inspect.isfunction(target) or any(is_unlike(target) for is_unlike in are_unlike):
        torch.begin_profiler()
        return target

    @functools.wraps(target)
    def run_first_call(*args: Any, **kwargs: Any) -> Any:
        torch.begin_profiler()
        return target(*args, **kwargs)

    return run_first_call  # type: ignore[return-value]


def _end_torch_recording() -> Tally:
    with _lock:
        return Tally() if _torch is None or _torch.session is not process.session() else _torch.end_profiler()


def _print_at_exit() -> None:
    if process.is_session_running():
        FAULTS.attempt("profiles at exit", lambda: _print_text(report()))


def _print_text(text: str, file: TextIO | None = None) -> None:
    destination = config.profiling.destination
    if file is None and destination not in ("stderr", "stdout"):
        with Path(destination).open("a", encoding="utf-8") as opened:
            opened.write(text)
        return
    print(text, end="", file=file or (sys.stdout if destination == "stdout" else sys.stderr), flush=True)


def report() -> str:
    """Return the text that is printed when the interpreter exits: the profiles, the longest time first, and their
    sum."""
    with _lock:
        profiles = sorted(_profiles, key=lambda stats: stats.call_ns, reverse=True)
    called = [stats for stats in profiles if stats.calls]
    texts = [f"Skipping empty Profile: {printable(stats.message or '')}\n" for stats in profiles if not stats.calls]
    texts += [stats.text() for stats in called]
    if len(called) > 1:
        lines = [f"Sum of all({len(called)}) printed profiles at exit", ""]
        sites = [site for stats in called for site in stats._sites]
        tally = _select_calls_below(process.session().tally(), sites, SUM)
        torch_tally = _select_calls_below(_end_torch_recording(), sites, SUM)
        tally = torch_tally if torch_tally.calls else tally
        texts.append("\n".join([*lines, *_format_sections(tally)]) + "\n")
    return "\n".join(texts)


def _sum_outermost_calls(tally: Tally) -> Totals:
    return sum_all_lines(tally.lines[tally.parents[tally.lines["node"]] == NOT_BELOW])


def _format_sections(tally: Tally, rows: int | None = None, instances: int | None = None) -> list[str]:
    recording = Recording(lambda: tally, _raise_missing_trace)
    rows, instances = rows or config.profiling.n_ops, instances or config.profiling.n_apply
    lines: list[str] = []
    for views, limit in ((SECTIONS[:2], rows), (SECTIONS[2:], instances)):
        for view in make_views(views, recording, Options(rows=limit, sorted_by="total")).values():
            lines += view.lines()
    return lines


def _raise_missing_trace() -> Trace:
    raise AssertionError("these views are made of a tally alone")


def _select_calls_below(tally: Tally, sites: Collection[Site], root: Site | None = None) -> Tally:
    keys_of_sites = {site.key for site in sites}

    def cut_path(path: CallPath) -> CallPath | None:
        first = next((depth for depth, site in enumerate(path) if site.key in keys_of_sites), None)
        return None if first is None else path[first:] if root is None else (root, *path[first + 1 :])

    return tally.change_paths(cut_path)
