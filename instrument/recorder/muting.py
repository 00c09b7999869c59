"""Muted sites, whose calls pass without a span and are counted, and the shapes of probes."""

from __future__ import annotations

import weakref
from typing import Any

from instrument import native
from instrument.recorder import wrapping
from instrument.recorder.core import Core
from instrument.recording.spans import Site

KNOWN_SITES = 65_536
"""A service that decorates a function at each request makes a site each time: the first so many are known singly."""


class Muting(Core):
    """Which sites may be muted, and which are."""

    shapes: dict[Site, str]
    _shapes_noted: int
    _counters: dict[Site, Any]
    _mutable: dict[Site, weakref.WeakSet[Any] | None]

    def note_shape(self, site: Site, shape: str) -> bool:
        """Note how the probe of a site is made; False where there are too many sites to know each."""
        if len(self.shapes) >= KNOWN_SITES and site not in self.shapes:
            return False
        self.shapes[site] = shape
        self._shapes_noted += 1  # after it, so that whoever sees the same number twice has seen the shape
        return True

    def may_mute(self, site: Site, function: Any = None, shape: str = "") -> None:
        """Let the site be muted: that of a function that `wrap` has made, or of a probe that asks `passes` itself."""
        if not self.note_shape(site, shape or ("method" if function is None else "call")):
            return
        functions = self._mutable.setdefault(site, None)
        if function is None:
            return
        if functions is None:
            functions = self._mutable[site] = weakref.WeakSet()
        functions.add(function)
        if site in self.passes:
            wrapping.turn(function, self.passes[site])

    @property
    def muted(self) -> set[Site]:
        """The sites that are muted now."""
        return set(self.passes)

    def mute(self, site: Site) -> bool:
        """Let the calls of a site that begin from now on pass without a span, counted. False where it cannot be muted.

        Calls that are open end as they began; the span of a generator ends when it next goes on.
        """
        if site not in self._mutable or site in self.passes:
            return False
        if site not in self._counters:
            self._counters[site] = native.MODULE.Pass(self)
        self.passes[site] = self._counters[site]
        self._turn(site, self._counters[site])
        return True

    def unmute(self, site: Site) -> None:
        """Record the site's calls again."""
        self.passes.pop(site, None)
        self._turn(site, None)

    def _turn(self, site: Site, passing: Any) -> None:
        """Tell the functions of a site that their calls pass, or that they are recorded again."""
        for function in list(self._mutable.get(site) or ()):
            wrapping.turn(function, passing or self)

    def pass_muted(self, site: Site) -> bool:
        """Whether a site is muted, whose call is counted then: for probes that ask at each call."""
        passing = self.passes.get(site)
        if passing is None:
            return False
        passing.count()
        return True

    def muted_calls(self) -> dict[Site, int]:
        """How many calls of each site passed without a span."""
        return {site: calls for site, counter in list(self._counters.items()) if (calls := counter.calls)}

    def cut_spans(self) -> dict[Site, int]:
        """How many spans of generators ended early, because their site was muted while they stood still."""
        return {site: cut for site, counter in list(self._counters.items()) if (cut := counter.cut)}
