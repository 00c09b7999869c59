"""The summary: several views one after the other, followed by one section on the cost and losses of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from instrument.profile.document import nearest
from instrument.profile.model import VIEWS
from instrument.report.section import View, instrumentation
from instrument.report.table import safe, wrapped
from instrument.report.view import Options, Recording, document

MODULES = {**dict.fromkeys(("classes", "ops", "instances"), "self_times"), "user": "operators"}
"""The modules of views whose module has another name."""


def _import_view(name: str) -> ModuleType:
    """Import the module of a view. It imports numpy, so a service does this only to make the view."""
    return import_module(f"instrument.report.{MODULES.get(name, name)}_view")


def _view_maker(name: str) -> Callable[[Recording, Options], View]:
    def make(recording: Recording, options: Options) -> View:
        view: View = getattr(_import_view(name), name)(recording, options)
        return view

    return make


VIEW_OF: Mapping[str, Callable[[Recording, Options], View]] = {name: _view_maker(name) for name in VIEWS}
"""The function of each view of `VIEWS`."""

OF_TABLES = ("tracer_option", "threads")
"""Options that the view `brief` does not use."""


def prepare(views: Sequence[str]) -> None:
    """Import the modules of some views, before the process limits its memory."""
    for name in views:
        if name in VIEW_OF:
            with suppress(ImportError):  # the views report a missing numpy
                _import_view(name)


def views_for(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the default view for some options: `events` if an option for its tables is set, else `brief`."""
    return ("events",) if any(options.get(option) is not None for option in OF_TABLES) else ("brief",)


def refuse_unknown(views: Sequence[str]) -> None:
    """Raise `ValueError` for an unknown view, `TypeError` for a text in place of a list."""
    if isinstance(views, str):
        raise TypeError(f"views is {views!r}; allowed: a list of their names, such as [{views!r}]")
    for view in views:
        if view not in VIEW_OF:
            near = nearest(view, VIEWS)
            hint = f"; nearest is {near}" if near else ""
            raise ValueError(f"view is {view!r}; allowed: {', '.join(VIEWS)}{hint}")


def make_views(views: Sequence[str], recording: Recording, options: Options) -> dict[str, View]:
    """Return the computed views in the given order, each once. Raises `ValueError` for an unknown view."""
    refuse_unknown(views)
    return {view: VIEW_OF[view](recording, options) for view in views}


def summary(views: Sequence[str], recording: Recording, options: Options) -> str:
    """Return the views as one text in the given order, each once, then the cost and the losses of the instrumentation.
    The views `brief` and `cost` already have these, so that section is left out after them. Raises `ValueError` for an
    unknown view."""
    parts = [view.lines() for view in make_views(views, recording, options).values()]
    if not {"brief", "cost"}.intersection(views):
        parts.append(instrumentation(recording))
    if recording.died:
        parts.insert(0, ["", *wrapped(safe(recording.died))])
    return "\n".join("\n".join(lines).rstrip("\n") + "\n" for lines in parts if lines)


def summary_document(views: Sequence[str], recording: Recording, options: Options) -> dict[str, Any]:
    """Return the numbers of the summary as JSON values: `views` by name, times in ns, and the facts of all views."""
    return {
        "window_ns": recording.window_ns,
        "recorder": recording.recorder,
        **({"died": recording.died} if recording.died else {}),
        "options": document(options),
        "views": {name: document(view) for name, view in make_views(views, recording, options).items()},
        "cost": document(recording.cost),
        "losses": recording.losses,
        "notes": list(recording.notes),
    }
