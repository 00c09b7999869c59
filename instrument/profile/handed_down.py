"""A profile as `instrument run` has read it, for the processes of its run: none of them reads YAML once more.

It holds for a process in which the variables that its values came from are as they were, while its file is as it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from instrument.profile import model
from instrument.profile.model import Profile
from instrument.runtime import atomic
from instrument.runtime.environment import settings

NAME = "profile"
"""The file of it in the folder of a run."""

_CLASS = ""
"""The key of a plain mapping that names the class of a dataclass; no field is called so."""

_ITERATED = "OTEL_"
"""The prefix of the variables of which a profile asks for all that there are."""


class Consulted(Mapping[str, str]):
    """An environment that notes which variables are asked for."""

    def __init__(self) -> None:
        self._environ = settings()
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.names.add(name)
        return self._environ[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._environ)

    def __len__(self) -> int:
        return len(self._environ)


def write(path: Path, profile: Profile, consulted: Consulted) -> None:
    """Hand a profile down by a file. One with a secret for a collector is not. Raises nothing."""
    otlp = profile.export.otlp
    if otlp is not None and otlp.headers:
        return
    with suppress(OSError, ValueError), atomic.replacing(path) as file:
        names = sorted(consulted.names)
        facts = names, _values(names), _state_of(profile.source), _plain(profile)
        file.write(json.dumps(facts).encode())


def read(path: Path | None, source: str) -> Profile | None:
    """The profile of a file, as it was handed down; None where there is none, or it would be another one here."""
    if path is None:
        return None
    try:
        names, values, state, plain = json.loads(path.read_bytes())
        if values != _values(names) or state != [*_state_of(source)]:
            return None
        made: Profile = _made(plain)
    except (OSError, ValueError, TypeError, LookupError):
        return None
    return replace(made, source=source)


def _values(names: Any) -> dict[str, str | None]:
    environ = settings()
    return {name: environ.get(name) for name in {*names, *(one for one in environ if one.startswith(_ITERATED))}}


def _state_of(source: str) -> tuple[int, int]:
    facts = Path(source).stat()
    return facts.st_mtime_ns, facts.st_size


def _plain(thing: Any) -> Any:
    """A dataclass of the model, with what it holds, as JSON takes it."""
    if is_dataclass(thing):
        known = {field.name: _plain(getattr(thing, field.name)) for field in fields(thing)}
        return {_CLASS: type(thing).__name__, **known}
    if isinstance(thing, Mapping):
        return dict(thing)
    return [*map(_plain, thing)] if isinstance(thing, tuple) else thing


def _made(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple(map(_made, plain))
    if isinstance(plain, dict) and _CLASS in plain:
        kind = getattr(model, plain.pop(_CLASS))
        return kind(**{name: _made(value) for name, value in plain.items()})
    return plain
