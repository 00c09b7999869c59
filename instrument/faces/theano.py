"""The profiles of Theano: one for each function and their sum, printed when the interpreter exits.

``@function(profile=True)`` stands for ``theano.function(..., profile=True)``: what runs within the calls of the Python
function is its profile, and the views `classes`, `ops` and `instances` are its sections Class, Ops and Apply. The first
such function begins a session where none runs. Differences: ``theano.function([x], y)``, which compiles a graph, is
refused; times are self times of spans in place of thunks. Functions that call each other have what their own calls
took; their sum counts that once.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, TextIO, TypeVar

from instrument import process
from instrument.errors import FAULTS, ProfileError, StateError
from instrument.probes.functions import profiled, site_on
from instrument.probes.scopes import OFF
from instrument.report.summary import made
from instrument.report.table import safe
from instrument.report.view import Options, Recording
from instrument.spans import Site, Trace
from instrument.steps import join
from instrument.tally import Tally

Function = TypeVar("Function", bound=Callable[..., Any])

SECTIONS = ("classes", "ops", "instances")
ROWS = 20
SUM = Site("all functions")
"""Stands for every function in their sum."""


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

    def summary(self, file: TextIO | None = None, n_ops_to_print: int = ROWS, n_apply_to_print: int = ROWS) -> str:
        """Print the profile to `file`, else to standard error, and return the text. Raises as `text`."""
        text = self.text(n_ops_to_print, n_apply_to_print)
        print(text, end="", file=file or sys.stderr, flush=True)
        return text

    def text(self, rows: int = ROWS, instances: int = ROWS) -> str:
        """The profile, `rows` of classes and of ops, and of instances. Raises `StateError` where no session runs."""
        lines = ["Function profiling", "==================", f"  Message: {safe(self.message or '')}", ""]
        if OFF:
            return "\n".join([*lines, process.SWITCHED_OFF]) + "\n"
        return "\n".join([*lines, *_sections(self._tally(), rows, instances)]) + "\n"

    def _tally(self) -> Tally:
        return Tally() if OFF else _below(process.session().tally(), self._sites)


_profiles: list[ProfileStats] = []
_made: Counter[tuple[object, ...]] = Counter()
"""How many functions of each place have been made."""

_lock = threading.RLock()


def function(
    *graph: object, profile: bool | str | ProfileStats = True, name: str | None = None
) -> Callable[[Function], Function]:
    """A decorator whose result has its `profile`: one of its own, by a message, or one that functions share.

    `name` is that of its spans, else the function's own; one made again at the same place has a number behind it, for
    its calls are its own. `profile=False` records nothing. Raises `ProfileError` for
    the inputs and outputs of a graph.
    """
    if graph:
        raise ProfileError(
            ["function: found inputs of a graph, which nothing compiles here; allowed: function(profile=)(callable)"]
        )
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
        recorded.profile = stats  # type: ignore[attr-defined]
        with _lock:
            if stats not in _profiles:
                _profiles.append(stats)
            _begin()
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
    try:
        process.session()
    except StateError:
        join(None)
    atexit.unregister(_print_at_exit)
    atexit.register(_print_at_exit)  # before the session's own end, which was registered earlier


def _print_at_exit() -> None:
    try:
        process.session()
        sys.stderr.write(report())
    except StateError:
        pass  # it was stopped before, and said what it was asked to say
    except Exception as fault:
        FAULTS.note("profiles at exit", fault)


def report() -> str:
    """Each profile, that with most time in calls first, and their sum; what is printed at exit."""
    with _lock:
        profiles = sorted(_profiles, key=lambda stats: stats.call_ns, reverse=True)
    called = [stats for stats in profiles if stats.calls]
    texts = [f"Skipping empty Profile: {safe(stats.message or '')}\n" for stats in profiles if not stats.calls]
    texts += [stats.text() for stats in called]
    if len(called) > 1:
        lines = [f"Sum of all({len(called)}) printed profiles at exit", ""]
        tally = _below(process.session().tally(), [site for stats in called for site in stats._sites], SUM)
        texts.append("\n".join([*lines, *_sections(tally)]) + "\n")
    return "\n".join(texts)


def _sections(tally: Tally, rows: int = ROWS, instances: int = ROWS) -> list[str]:
    recording = Recording(lambda: tally, _no_trace)
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
