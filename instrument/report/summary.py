"""The printed summary: several views in a row, then one section on the cost and losses of the instrumentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from instrument.profile.document import nearest
from instrument.profile.model import VIEWS
from instrument.report.section import View, instrumentation_lines
from instrument.report.table import safe, wrapped
from instrument.report.view import Options, Recording, document

MODULES = {**dict.fromkeys(("classes", "ops", "instances"), "self_times"), "user": "operators"}
"""The modules of views whose module has another name than the view."""


def _import_view(name: str) -> ModuleType:
    """Import the module of a view. It imports numpy, so a service calls this only when it prints the view."""
    return import_module(f"instrument.report.{MODULES.get(name, name)}_view")


def _view_maker(name: str) -> Callable[[Recording, Options], View]:
    def make(recording: Recording, options: Options) -> View:
        view: View = getattr(_import_view(name), name)(recording, options)
        return view

    return make


VIEW_OF: Mapping[str, Callable[[Recording, Options], View]] = {name: _view_maker(name) for name in VIEWS}
"""The function that computes each view, by the view's name."""

TABLE_OPTIONS = ("tracer_option", "threads")
"""The options that only views with tables use. The one-screen view `brief` does not use them."""


def import_views(views: Sequence[str]) -> None:
    """Import the modules of views while the process may still allocate memory freely."""
    for name in views:
        if name in VIEW_OF:
            with suppress(ImportError):  # the views report a missing numpy
                _import_view(name)


def default_views(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the default views for some options: `events` if an option for tables is set, else `brief`."""
    return ("events",) if any(options.get(option) is not None for option in TABLE_OPTIONS) else ("brief",)


def refuse_unknown_views(views: Sequence[str]) -> None:
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
    refuse_unknown_views(views)
    return {view: VIEW_OF[view](recording, options) for view in views}


def summary(views: Sequence[str], recording: Recording, options: Options) -> str:
    """Return the views as one text in the given order, then the cost and losses of the instrumentation. These come last
    only without the views `brief` and `cost`, which print them themselves. Raises `ValueError` for an unknown view."""
    parts = [view.lines() for view in make_views(views, recording, options).values()]
    if not {"brief", "cost"}.intersection(views):
        parts.append(instrumentation_lines(recording))
    if recording.died:
        parts.insert(0, ["", *wrapped(safe(recording.died))])
    return "\n".join("\n".join(lines).rstrip("\n") + "\n" for lines in parts if lines)


def summary_document(views: Sequence[str], recording: Recording, options: Options) -> dict[str, Any]:
    """Return the summary as JSON values: `views` by name with times in ns, and the numbers that all views share."""
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
