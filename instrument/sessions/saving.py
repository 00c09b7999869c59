"""Saving: the files that windows and the end of a session become, as the profile asks for.

They take numpy, which a session imports as it begins where its profile asks for any, and else not.
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

RECORDING = ".npz"
"""How the names of recordings end."""

WITHOUT_NUMPY = (
    "numpy is not installed, so no recordings and no Chrome traces are written; install it (pip install numpy)"
)


class Written(NamedTuple):
    """The files that were written, and what was not, and why."""

    paths: tuple[Path, ...]
    problems: tuple[str, ...]


def is_asked(export: Export) -> bool:
    """Whether the profile asks for any file of spans."""
    return export.chrome is not None or export.recording is not None


def why_no_files() -> str:
    """Why this process can write none, as far as can be told without importing numpy; "" where it can."""
    try:
        return "" if find_spec("numpy") is not None else WITHOUT_NUMPY
    except (ImportError, ValueError):  # somebody put None, or something without a spec, into sys.modules
        return WITHOUT_NUMPY


def prepare() -> None:
    """Import what they take: not on a thread, for a fork in the middle would leave the child half a module."""
    try:
        from instrument.chrome import writing  # noqa: F401
        from instrument.trace import file  # noqa: F401
    except ImportError:
        pass  # `why_no_files` tells, or what is written


def prepare_columns() -> None:
    """Import what makes columns of what a session has recorded, for files and for reports."""
    try:
        from instrument.device import interval_columns  # noqa: F401
        from instrument.trace import of_rows, of_spans  # noqa: F401
    except ImportError:
        pass


def templates(export: Export) -> tuple[str, ...]:
    """The paths of all files that windows may become."""
    return tuple(one.path for one in (export.chrome, export.recording) if one is not None)


def write(export: Export, path_of: Callable[[str], Path], trace: Trace, tally: Tally | None) -> Written:
    """Write a trace as each of the files that the profile asks for; one that fails keeps no other from it."""
    from instrument.trace import file

    ways = [(export.chrome, chrome.dump), (export.recording, file.dump)]
    paths: list[Path] = []
    problems: list[str] = []
    for wanted, dump in ways:
        if wanted is None:
            continue
        try:
            paths.append(dump(path_of(wanted.path), trace, tally))
        except TraceError as error:
            problems.append(str(error))
        except Exception as fault:  # the other is written all the same
            FAULTS.note("trace file", fault)
    return Written(tuple(paths), tuple(problems))
