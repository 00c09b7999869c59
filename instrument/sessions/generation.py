"""Generations: how a session goes from one profile to the next, what it takes on, and what it answers who asked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from instrument.errors import StateError
from instrument.instrumentors.selection import Selection
from instrument.profile.keys import load, setting
from instrument.profile.model import Profile
from instrument.sessions import files
from instrument.sessions.control import Request

NAMES_TOLD = 100
"""The most names of a kind in the answer to a caller of the control socket."""

AT_START = {
    "clock": "spans that are open now were begun by the other one",
    "limits.ring": "the rings are made when the session starts",
    "limits.ring_dir": "the rings are made when the session starts",
    "device": "the device is set up when the session starts",
    "control": "it is set up when the session starts",
    "agent": "the run has one, or has none, from its start",
    "startup": "what it is about has begun by then",
    "export.otlp": "what sending needs is set up when the session starts",
}
"""Settings that a reload cannot change, and why."""


@dataclass(frozen=True)
class Reload:
    """What became of a profile that was handed to a running session.

    `attached` and `undone` name targets of function rules and, for layers and copies, rules; what both profiles want
    is in neither. `refused` tells each setting that keeps its value, and why. `generation` counts profiles from 1;
    `digest` is that of the profile now in force.
    """

    generation: int
    digest: str
    attached: tuple[str, ...] = ()
    undone: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = f"{len(self.attached)} attached, {len(self.undone)} undone"
        return "; ".join([f"generation {self.generation} ({self.digest}): {counts}", *self.refused])

    def facts(self) -> Mapping[str, Any]:
        """As JSON takes it, and no longer than a caller wants to read."""
        return {
            "generation": self.generation,
            "digest": self.digest,
            "attached": _clipped(self.attached),
            "undone": _clipped(self.undone),
            "refused": list(self.refused),
        }


def _clipped(names: Sequence[str]) -> list[str]:
    more = len(names) - NAMES_TOLD
    return [*names[:NAMES_TOLD], *([f"and {more} more"] if more > 0 else [])]


def file_of(profile: Profile, folder: Path) -> Path | None:
    """Where a profile was read, None for one that was made otherwise."""
    path = folder / profile.source
    return path if path.is_file() else None


def read(asked: Profile | str | os.PathLike[str] | None, file: Path | None) -> tuple[Profile, Path | None]:
    """The profile that is asked for, and its file: None means the present one's. Raises `ProfileError`."""
    folder = files.working_folder()
    if isinstance(asked, Profile):
        return asked, file_of(asked, folder)
    path = folder / (asked or file or "")
    return load(path), path


def other_than(request: Request, now: Profile, file: Path | None) -> str:
    """Which process this is, where a request is not meant for it; "" where it is. Raises `ProfileError`.

    Meant is one whose own file it is or, if the caller switches it to another, one of that profile's service.
    """
    service, path = request.service, request.path
    if path is not None and not (file is not None and _is_same(Path(path), file)):
        if not request.switch:
            return _known_as(now)
        service = load(path).service
    return "" if service in (None, now.service) else _known_as(now)


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one that is gone just now, as where a file is being replaced
        return one.resolve() == other.resolve()


def _known_as(profile: Profile) -> str:
    return f"it runs the service {profile.service} with {profile.source}"


def taken_on(wanted: Profile, now: Profile) -> Profile:
    """What a session with the profile `now` takes on of another: all but the settings of `AT_START`."""
    return replace(
        wanted,
        clock=now.clock,
        device=now.device,
        control=now.control,
        agent=now.agent,
        startup=now.startup,
        limits=replace(wanted.limits, ring_bytes=now.limits.ring_bytes, ring_folder=now.limits.ring_folder),
        export=replace(wanted.export, otlp=now.export.otlp),
    )


def refusals(wanted: Profile, kept: Profile) -> tuple[str, ...]:
    """Each setting of the wanted profile that is not in the one that was taken on, and why."""
    return tuple(
        f"{name} keeps its value until a restart: {why}"
        for name, why in AT_START.items()
        if setting(wanted, name) != setting(kept, name)
    )


def change_rules(selection: Selection, now: Profile, to: Profile) -> tuple[list[str], list[str]]:
    """Attach and undo as another profile asks: what was attached, and what undone, by name.

    Raises `StateError` where that fails; the rules of `now` are at work then.
    """
    try:
        return selection.change(to)
    except Exception as fault:
        selection.change(now, anew=True)
        raise StateError(f"{to.source} could not be put to work: {type(fault).__name__}: {fault}") from fault
