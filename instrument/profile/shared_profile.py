"""The file in which `instrument run` saves the parsed profile, so that the processes of the run need not parse YAML.

A process uses it only if the profile's file, and all environment variables that the profile used, are unchanged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from instrument.profile import model
from instrument.profile.model import Profile
from instrument.runtime import file_writing
from instrument.runtime.environment import user_settings
from instrument.runtime.lazy_imports import fields_of, replace

NAME = "profile"
"""The name of the file with the parsed profile, in a run's folder."""

_CLASS = ""
"""The key for the class name in a saved dataclass. No field has this name."""

_ITERATED = "OTEL_"
"""The prefix of environment variables. Any change of such a variable makes the saved profile invalid."""


class Consulted(Mapping[str, str]):
    """A mapping of environment variables. `names` has the variables that were read."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = user_settings(environ)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.names.add(name)
        return self._environ[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._environ)

    def __len__(self) -> int:
        return len(self._environ)


def write_shared_profile(path: Path, profile: Profile, consulted: Consulted) -> None:
    """Write a parsed profile for other processes, unless the profile has a collector's secret. Never raises."""
    otlp = profile.export.otlp
    if otlp is not None and otlp.headers:
        return
    with suppress(OSError, ValueError), file_writing.open_replacement(path) as file:
        names = sorted(consulted.names)
        facts = names, _read_variables(names, consulted), _read_file_state(profile.source), _convert_to_json(profile)
        file.write(json.dumps(facts).encode())


def read_shared_profile(path: Path | None, source: str) -> Profile | None:
    """Return the profile that another process has parsed. Return None if the profile is missing or out of date."""
    if path is None:
        return None
    try:
        names, values, state, plain = json.loads(path.read_bytes())
        if values != _read_variables(names, user_settings()) or state != [*_read_file_state(source)]:
            return None
        profile: Profile = _restore_from_json(plain)
    except (OSError, ValueError, TypeError, LookupError):
        return None
    return replace(profile, source=source)


def _read_variables(names: Any, environ: Mapping[str, str]) -> dict[str, str | None]:
    return {name: environ.get(name) for name in {*names, *(key for key in environ if key.startswith(_ITERATED))}}


def _read_file_state(source: str) -> tuple[int, int]:
    facts = Path(source).stat()
    return facts.st_mtime_ns, facts.st_size


def _convert_to_json(thing: Any) -> Any:
    if fields := fields_of(thing):
        return {_CLASS: type(thing).__name__, **{name: _convert_to_json(getattr(thing, name)) for name, _ in fields}}
    if isinstance(thing, Mapping):
        return dict(thing)
    return [*map(_convert_to_json, thing)] if isinstance(thing, tuple) else thing


def _restore_from_json(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple(map(_restore_from_json, plain))
    if isinstance(plain, dict) and _CLASS in plain:
        kind = getattr(model, plain.pop(_CLASS))
        return kind(**{name: _restore_from_json(value) for name, value in plain.items()})
    return plain
