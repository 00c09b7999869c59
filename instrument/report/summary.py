"""The summary: the views that are asked for, one after the other, and once what holds for all of them."""

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
"""The modules of views that have none of their own."""


def _imported(name: str) -> ModuleType:
    """Import the module that makes a view, with numpy: a service does so when it is to make one, and else not."""
    return import_module(f"instrument.report.{MODULES.get(name, name)}_view")


def _made(name: str) -> Callable[[Recording, Options], View]:
    def make(recording: Recording, options: Options) -> View:
        view: View = getattr(_imported(name), name)(recording, options)
        return view

    return make


VIEW_OF: Mapping[str, Callable[[Recording, Options], View]] = {name: _made(name) for name in VIEWS}
"""The function of each view of `VIEWS`."""

OF_TABLES = ("tracer_option", "threads")
"""Options that mean nothing to the view `brief`."""


def prepare(views: Sequence[str]) -> None:
    """Import what makes these views, before the memory of the process is limited."""
    for name in views:
        if name in VIEW_OF:
            with suppress(ImportError):  # where numpy is not to be had, the views say so
                _imported(name)


def views_for(asked: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the views to show where none is named: one screen, or the tables that an option means something to."""
    return ("events",) if any(asked.get(option) is not None for option in OF_TABLES) else ("brief",)


def refuse_unknown(views: Sequence[str]) -> None:
    """Raises `ValueError` for a view that there is not, and `TypeError` for a text in place of a list."""
    if isinstance(views, str):
        raise TypeError(f"views is {views!r}; allowed: a list of their names, such as [{views!r}]")
    for view in views:
        if view not in VIEW_OF:
            meant = nearest(view, VIEWS)
            hint = f"; nearest is {meant}" if meant else ""
            raise ValueError(f"view is {view!r}; allowed: {', '.join(VIEWS)}{hint}")


def made(views: Sequence[str], recording: Recording, options: Options) -> dict[str, View]:
    """The views in the order asked, each once. Raises `ValueError` for a view that there is not."""
    refuse_unknown(views)
    return {view: VIEW_OF[view](recording, options) for view in views}


def summary(views: Sequence[str], recording: Recording, options: Options) -> str:
    """The views as one text, in the order asked, each once, and what the instrumentation cost and could not see.

    Of this the view `brief` has the most important part and `cost` has more; each stands for it.

    Raises `ValueError` for a view that there is not.
    """
    parts = [view.lines() for view in made(views, recording, options).values()]
    if not {"brief", "cost"}.intersection(views):
        parts.append(instrumentation(recording))
    if recording.died:
        parts.insert(0, ["", *wrapped(safe(recording.died))])
    return "\n".join("\n".join(lines).rstrip("\n") + "\n" for lines in parts if lines)


def summary_document(views: Sequence[str], recording: Recording, options: Options) -> dict[str, Any]:
    """The same numbers as JSON takes them: `views` by name, times in ns, and beside them what holds for all."""
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
