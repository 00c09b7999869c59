"""The summary: the given views one after the other, and one section on all of them."""

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
"""The modules of views without a module of their own name."""


def _import_view(name: str) -> ModuleType:
    """Import the module of a view, with numpy. A service does so only when it makes the view."""
    return import_module(f"instrument.report.{MODULES.get(name, name)}_view")


def _view_maker(name: str) -> Callable[[Recording, Options], View]:
    def make(recording: Recording, options: Options) -> View:
        view: View = getattr(_import_view(name), name)(recording, options)
        return view

    return make


VIEW_OF: Mapping[str, Callable[[Recording, Options], View]] = {name: _view_maker(name) for name in VIEWS}
"""The function of each view of `VIEWS`."""

OF_TABLES = ("tracer_option", "threads")
"""Options without an effect on the view `brief`."""


def prepare(views: Sequence[str]) -> None:
    """Import the modules of some views, before the memory of the process is limited."""
    for name in views:
        if name in VIEW_OF:
            with suppress(ImportError):  # the views report a missing numpy
                _import_view(name)


def views_for(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the views for options without a named view: one screen, or the tables if a table option is set."""
    return ("events",) if any(options.get(option) is not None for option in OF_TABLES) else ("brief",)


def refuse_unknown(views: Sequence[str]) -> None:
    """Raise `ValueError` for an unknown view, and `TypeError` for a text in place of a list."""
    if isinstance(views, str):
        raise TypeError(f"views is {views!r}; allowed: a list of their names, such as [{views!r}]")
    for view in views:
        if view not in VIEW_OF:
            near = nearest(view, VIEWS)
            hint = f"; nearest is {near}" if near else ""
            raise ValueError(f"view is {view!r}; allowed: {', '.join(VIEWS)}{hint}")


def made(views: Sequence[str], recording: Recording, options: Options) -> dict[str, View]:
    """Return the views in the given order, each once. Raises `ValueError` for an unknown view."""
    refuse_unknown(views)
    return {view: VIEW_OF[view](recording, options) for view in views}


def summary(views: Sequence[str], recording: Recording, options: Options) -> str:
    """Return the views as one text, in the given order, each once, and the cost and the losses of the instrumentation.

    The view `brief` has the most important part of the last section and `cost` has more of it, so each replaces it.

    Raises `ValueError` for an unknown view.
    """
    parts = [view.lines() for view in made(views, recording, options).values()]
    if not {"brief", "cost"}.intersection(views):
        parts.append(instrumentation(recording))
    if recording.died:
        parts.insert(0, ["", *wrapped(safe(recording.died))])
    return "\n".join("\n".join(lines).rstrip("\n") + "\n" for lines in parts if lines)


def summary_document(views: Sequence[str], recording: Recording, options: Options) -> dict[str, Any]:
    """Return the same numbers as JSON values: `views` by name, times in ns, and the facts of all views."""
    return {
        "window_ns": recording.window_ns,
        "recorder": recording.recorder,
        **({"died": recording.died} if recording.died else {}),
        "options": document(options),
        "views": {name: document(view) for name, view in made(views, recording, options).items()},
        "cost": document(recording.cost),
        "losses": recording.losses,
        "notes": list(recording.notes),
    }
