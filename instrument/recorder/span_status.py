"""The name and the status of an open span, as a service changes them. Nothing here raises into the service."""

from __future__ import annotations

from typing import Any

from instrument.recorder import span_attributes
from instrument.recording.spans import Site
from instrument.runtime.cheap_start import replace

NAMES_OF_PLACE = 256
"""The most names that the spans of one place get while they are open."""


def rename(recorder: Any, frame: Any, name: object) -> None:
    """Rename the span of a frame, or with None the innermost open one of this context."""
    site = recorder.site_of_open(frame)
    text = span_attributes.name_of(name)
    if site is None:
        return
    if text is None:
        words = f"the name of a span must be a text, not {name!r:.60}"
        recorder.complain("span names that are no text", words)
    elif site.kind == "step":
        words = f"{site.name} is a step and cannot be renamed, because steps are counted by name"
        recorder.complain("steps not renamed", words)
    elif frame is None:
        recorder.rename_innermost(_renamed_site(recorder, site, text))
    else:
        recorder.rename(frame, _renamed_site(recorder, site, text))


def _renamed_site(recorder: Any, site: Site, name: str) -> Site:
    """Return the site of a place under another name, the same each time.

    A place has `NAMES_OF_PLACE` names at most, and all places as many as scopes; beyond, its own site is returned, and
    counted.
    """
    place: Site = recorder.place_of.get(site, site)
    if name == place.name:
        return place
    site_by_name: dict[str, Site] = recorder.renamed.setdefault(place, {})
    renamed = site_by_name.get(name)
    if renamed is None:
        if len(site_by_name) >= NAMES_OF_PLACE or len(recorder.place_of) >= recorder.scope_name_limit:
            recorder.count("span names beyond the limit of their place, counted under the name that it has")
            return place
        renamed = site_by_name.setdefault(name, replace(place, name=name))
        recorder.place_of[renamed] = place
        recorder.note_shape(renamed, recorder.shapes.get(place, "scope"))
    return renamed


def set_status(recorder: Any, frame: Any, code: object, description: object, error_type: object) -> None:
    """Set the status of a frame's span, or with None of the innermost open one of this context."""
    status = span_attributes.status_attributes(code, description, error_type)
    if status is None:
        recorder.complain("states that no span has", f"there is no status {code!r:.60}; allowed: ok, error")
    elif frame is None:
        recorder.annotate_innermost(status)
    else:
        recorder.annotate(frame, status)
