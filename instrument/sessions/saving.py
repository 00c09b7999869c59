"""Saving: the files that windows and the end of a session become, as the profile asks for.

A recording takes numpy, which a session imports as it begins where its profile asks for recordings, and else not.
Where numpy is not to be had, what the recording would have held is written as a Chrome trace, unless one is written
beside it anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from instrument import chrome
from instrument.errors import TraceError
from instrument.profile.model import Export
from instrument.recording.spans import Trace
from instrument.recording.tally import Tally
from instrument.runtime.faults import FAULTS

RECORDING, INSTEAD = ".npz", ".json.gz"
"""How the names of recordings end, and those of the Chrome traces that take their place."""

WITHOUT_NUMPY = "numpy is not installed, so no recordings are written; install it (pip install numpy)"


class Written(NamedTuple):
    """The files that were written, and what was not, and why."""

    paths: tuple[Path, ...]
    problems: tuple[str, ...]


def why_no_recordings() -> str:
    """Why this process can write no recording, as far as can be told without importing numpy; "" where it can."""
    try:
        return "" if find_spec("numpy") is not None else WITHOUT_NUMPY
    except (ImportError, ValueError):  # somebody put None, or something without a spec, into sys.modules
        return WITHOUT_NUMPY


def prepare() -> None:
    """Import what recordings take: not on a thread, for a fork in the middle would leave the child half a module."""
    try:
        from instrument.trace import file  # noqa: F401
    except ImportError:
        pass  # `why_no_recordings` tells, or what is written


def templates(export: Export) -> tuple[str, ...]:
    """The paths of all files that windows may become."""
    found: tuple[str, ...] = () if export.chrome is None else (export.chrome.path,)
    if export.recording is not None:
        found += (export.recording.path, _instead(export.recording.path))
    return found


def write(export: Export, path_of: Callable[[str], Path], trace: Trace, tally: Tally | None) -> Written:
    """Write a trace as each of the files that the profile asks for; one that fails keeps no other from it."""
    ways: list[tuple[str, Callable[..., Path]]] = [] if export.chrome is None else [(export.chrome.path, chrome.dump)]
    paths: list[Path] = []
    problems: list[str] = []
    if export.recording is not None:
        template = export.recording.path
        try:
            from instrument.trace import file

            ways.append((template, file.dump))
        except ImportError as error:
            if not why_no_recordings():  # which has been told by now
                problems.append(f"export.recording: numpy cannot be imported ({error!s:.100})")
            if export.chrome is None:
                ways.append((_instead(template), chrome.dump))
    for template, dump in ways:
        try:
            paths.append(dump(path_of(template), trace, tally))
        except TraceError as error:
            problems.append(str(error))
        except Exception as fault:  # the others are written all the same
            FAULTS.note("trace file", fault)
    return Written(tuple(paths), tuple(problems))


def _instead(template: str) -> str:
    return template.removesuffix(RECORDING) + INSTEAD
