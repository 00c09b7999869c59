"""Spans that are given another name, a status, a key or attributes while they are open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from instrument.recorder import annotation
from instrument.recorder.muting import Muting
from instrument.recording.spans import AttributeValue, Site
from instrument.runtime.faults import FAULTS

NAMES_OF_PLACE = 256
"""Names that the spans of one place may be given while they are open."""


class Renaming(Muting):
    """What is known of a span only later."""

    scope_name_limit: int
    _renamed: dict[Site, dict[str, Site]]  # by the place's own site
    _place_of: dict[Site, Site]

    def renamed_site(self, site: Site, name: str) -> Site:
        """The site of a place under another name, the same each time.

        Of names there are `NAMES_OF_PLACE` for a place, and as many in all as scopes have; beyond, it is the site that
        the place has, counted.
        """
        place = self._place_of.get(site, site)
        if name == place.name:
            return place
        known = self._renamed.setdefault(place, {})
        found = known.get(name)
        if found is None:
            if len(known) >= NAMES_OF_PLACE or len(self._place_of) >= self.scope_name_limit:
                self.count("span names beyond the limit of their place, counted under the name that it has")
                return place
            found = known.setdefault(name, replace(place, name=name))
            self._place_of[found] = place
            self.note_shape(found, self.shapes.get(place, "scope"))
        return found

    def rename_open(self, frame: Any, name: object) -> None:
        """Give the span of a frame another name, or with None the innermost open one of this context. Never raises."""
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
        """Say how the span of a frame ended, or with None the innermost open one of this context. Never raises."""
        said = annotation.status_attributes(code, description, error_type)
        if said is None:
            self._complain("states that no span has", f"asked for status {code!r:.60}; allowed: ok, error")
        elif frame is None:
            self.annotate_innermost(said)
        else:
            self.annotate(frame, said)

    def bind_innermost(self, key: object) -> None:
        """Name the request that the innermost open span serves."""
        self.annotate_innermost(annotation.keys_told(key, None, self._complain))

    def _annotate_checked(self, attributes: object, more: dict[str, object]) -> dict[str, AttributeValue]:
        return annotation.checked(attributes, more, self._complain)

    def _complain(self, what: str, words: str, kind: str = "") -> None:
        self.count(what)
        FAULTS.note_of_rule("annotate", words, kind)
