"""The profiles of Theano: one for each function and their sum, printed when the interpreter exits.

``@function(profile=True)`` stands for ``theano.function(..., profile=True)``: what runs within the calls of the Python
function is its profile, with the sections class, ops and apply of the views `classes`, `ops` and `instances`. The
first such function begins a session where none runs. Differences: `Time in what was recorded` stands for the time in
thunks; what compiles is not known to us; of functions that call each other each has what its own calls took, and the
sum counts it once.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from instrument import process
from instrument.errors import FAULTS, ProfileError, StateError
from instrument.probes.functions import profiled, site_on
from instrument.report.summary import made
from instrument.report.table import safe
from instrument.report.view import Options, Recording
from instrument.spans import Site, Span, Trace
from instrument.steps import join
from instrument.tally import Tally

Function = TypeVar("Function", bound=Callable[..., Any])

SECTIONS = ("classes", "ops", "instances")
ROWS = 20


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

    def summary(self, *, rows: int = ROWS) -> str:
        """The profile as text, `rows` in each section. Raises `StateError` where no session runs."""
        session = process.session()
        whole = session.recording()
        tally = _below(whole.tally, self._sites)
        top = [row.totals for row in tally.rows() if len(row.path) == 1]
        calls, call_ns = sum(totals.calls for totals in top), sum(totals.total_ns for totals in top)
        inside_ns = call_ns - sum(totals.self_ns for totals in top)
        lines = ["Function profiling", "==================", f"  Message: {safe(self.message or '')}"]
        lines.append(f"  Time in {calls} calls: {call_ns / 1e9:e}s")
        if call_ns:
            share = inside_ns / call_ns
            lines.append(f"  Time in what was recorded: {inside_ns / 1e9:e}s ({share:.3%} of the time in calls)")
        recording = Recording(
            lambda: tally, lambda: _spans_below(whole.trace, self._sites), window_ns=whole.window_ns
        )  # fmt: skip
        for view in made(SECTIONS, recording, Options(rows=rows, sorted_by="total")).values():
            lines += ["", *view.lines()]
        return "\n".join(lines) + "\n"

    def _tally(self) -> Tally:
        return _below(process.session().tally(), self._sites)


_profiles: list[ProfileStats] = []
_lock = threading.RLock()


def function(*, profile: bool | str | ProfileStats = True, name: str | None = None) -> Callable[[Function], Function]:
    """A decorator whose result has its `profile`: one of its own, by a message, or one that functions share.

    `name` is that of its spans, else the function's own. `profile=False` records nothing.
    """
    if not isinstance(profile, (bool, str, ProfileStats)):
        raise ProfileError([f"function: profile: found {profile!r}; allowed: True, False, a message, a ProfileStats"])
    if profile is False:
        return lambda target: target
    stats = (
        profile if isinstance(profile, ProfileStats) else ProfileStats(profile if isinstance(profile, str) else name)
    )

    def decorate(target: Function) -> Function:
        recorded = profiled(name)(target) if name else profiled(target)
        site = site_on(recorded)
        if site is None:
            return recorded  # switched off by the environment
        stats._add(site)
        recorded.profile = stats  # type: ignore[attr-defined]
        with _lock:
            if stats not in _profiles:
                _profiles.append(stats)
            _begin()
        return recorded

    return decorate


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
    """All profiles, those with most time in calls first, and their sum; what is printed at exit."""
    with _lock:
        profiles = sorted(_profiles, key=lambda stats: stats.call_ns, reverse=True)
    called = [stats for stats in profiles if stats.calls]
    texts = [f"Skipping empty Profile: {safe(stats.message or '')}\n" for stats in profiles if not stats.calls]
    texts += [stats.summary() for stats in called]
    if len(called) > 1:
        total = ProfileStats(f"Sum of all({len(called)}) printed profiles at exit")
        total._sites = [site for stats in called for site in stats._sites]
        texts.append(total.summary())
    return "\n".join(texts)


def _below(tally: Tally, sites: Collection[Site]) -> Tally:
    """The part of a tally that lies in calls of these sites, the outermost of them the root."""
    keys = {site.key for site in sites}
    part = Tally(tally.threads)
    for row in tally.rows():
        first = next((depth for depth, site in enumerate(row.path) if site.key in keys), None)
        if first is not None:
            part.totals(row.path[first:], row.thread_id).merge(row.totals)
    return part


def _spans_below(trace: Trace, sites: Sequence[Site]) -> Trace:
    keys = {site.key for site in sites}
    by_id = {span.span_id: span for span in trace.spans}
    known: dict[int, bool] = {}

    def lies_below(span: Span) -> bool:
        chain: list[int] = []
        above: Span | None = span
        found = False
        while above is not None and not found:
            found = known.get(above.span_id) or above.site.key in keys
            chain.append(above.span_id)
            above = None if above.span_id in known else by_id.get(above.parent_id)
        known.update(dict.fromkeys(chain, found))
        return found

    return replace(trace, spans=[span for span in trace.spans if lies_below(span)])
