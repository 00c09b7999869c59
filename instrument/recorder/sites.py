"""The sites of a recorder: those whose calls pass without a span, and those whose spans get another name."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from instrument import native
from instrument.recorder import annotation, wrapping
from instrument.recorder.core import Core
from instrument.recording.spans import AttributeValue, Site
from instrument.runtime.faults import FAULTS

KNOWN_SITES = 65_536
"""The most sites that are known singly. A service that decorates a function at each request makes one each time."""

NAMES_OF_PLACE = 256
"""The most names that the spans of one place get while they are open."""


class SiteCore(Core):
    """A core that mutes sites, and renames, ends or binds spans while they are open."""

    scope_name_limit: int
    _renamed: dict[Site, dict[str, Site]]  # by the place's own site
    _place_of: dict[Site, Site]
    shapes: dict[Site, str]
    _shapes_noted: int
    _counters: dict[Site, Any]
    _mutable: dict[Site, weakref.WeakSet[Any] | None]

    def note_shape(self, site: Site, shape: str) -> bool:
        """Note the shape of a site's probe. Returns False where there are too many sites to know each."""
        if len(self.shapes) >= KNOWN_SITES and site not in self.shapes:
            return False
        self.shapes[site] = shape
        self._shapes_noted += 1  # last, so that a reader that sees one number twice has seen the shape
        return True

    def may_mute(self, site: Site, function: Any = None, shape: str = "") -> None:
        """Let a site be muted, of a function that `wrap` has made, or of a probe that reads `passes` itself."""
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
        """Let new calls of a site pass without a span, counted. Returns False for a site that cannot be muted.

        Open calls end as they began; the span of a generator ends when its body next goes on.
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
        """Have the calls of a site's functions pass, or be recorded again."""
        for function in list(self._mutable.get(site) or ()):
            wrapping.turn(function, passing or self)

    def pass_muted(self, site: Site) -> bool:
        """Return True for a muted site, and count its call. For probes that ask at each call."""
        passing = self.passes.get(site)
        if passing is None:
            return False
        passing.count()
        return True

    def muted_calls(self) -> dict[Site, int]:
        """Return the number of calls per site that passed without a span."""
        return {site: calls for site, counter in list(self._counters.items()) if (calls := counter.calls)}

    def cut_spans(self) -> dict[Site, int]:
        """Return the number of generators' spans per site that ended early, muted while they were suspended."""
        return {site: cut for site, counter in list(self._counters.items()) if (cut := counter.cut)}

    def renamed_site(self, site: Site, name: str) -> Site:
        """Return the site of a place under another name, the same each time.

        A place has `NAMES_OF_PLACE` names at most, and all places as many as scopes; beyond, its own site is returned,
        and counted.
        """
        place = self._place_of.get(site, site)
        if name == place.name:
            return place
        known = self._renamed.setdefault(place, {})
        renamed = known.get(name)
        if renamed is None:
            if len(known) >= NAMES_OF_PLACE or len(self._place_of) >= self.scope_name_limit:
                self.count("span names beyond the limit of their place, counted under the name that it has")
                return place
            renamed = known.setdefault(name, replace(place, name=name))
            self._place_of[renamed] = place
            self.note_shape(renamed, self.shapes.get(place, "scope"))
        return renamed

    def rename_open(self, frame: Any, name: object) -> None:
        """Rename the span of a frame, or with None the innermost open one of this context. Never raises."""
        site = self.site_of_open(frame)
        known = annotation.name_of(name)
        if site is None:
            return
        if known is None:
            self._complain("span names that are no text", f"asked for a span's name, found {name!r:.60}; allowed: text")
        elif site.kind == "step":
            self._complain("steps not renamed", f"asked to rename {site.name}, found a step, which is counted by name")
        elif frame is None:
            self.rename_innermost(self.renamed_site(site, known))
        else:
            self.rename(frame, self.renamed_site(site, known))

    def set_status_open(self, frame: Any, code: object, description: object, error_type: object) -> None:
        """Set the status of a frame's span, or with None of the innermost open one of this context. Never raises."""
        status = annotation.status_attributes(code, description, error_type)
        if status is None:
            self._complain("states that no span has", f"asked for status {code!r:.60}; allowed: ok, error")
        elif frame is None:
            self.annotate_innermost(status)
        else:
            self.annotate(frame, status)

    def bind_innermost(self, key: object) -> None:
        """Set the key of the request that the innermost open span serves."""
        self.annotate_innermost(annotation.key_attributes(key, None, self._complain))

    def _annotate_checked(self, attributes: object, more: dict[str, object]) -> dict[str, AttributeValue]:
        return annotation.checked(attributes, more, self._complain)

    def _complain(self, what: str, words: str, kind: str = "") -> None:
        self.count(what)
        FAULTS.note_of_rule("annotate", words, kind)
