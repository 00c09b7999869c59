"""The board of a run: what its processes know of one another, a few marks in memory that all of them can reach.

Processes of a service share a profile, and each sees a part of it: a rule that finds nothing here may be at work in the
engine's process, and a parent that only starts others has nothing to tell where they have. The first process of the run
holds the memory, which goes with it; others find it by a path in the environment. Where they cannot, each knows what it
sees itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from hashlib import sha256

from instrument.recording.claim import duplicate

VARIABLE = "INSTRUMENT_RUN_BOARD"

_NAME = "instrument-run"

_BYTES = 1 << 20
"""More is not written: a mark is a line of 20 bytes, and each is written about once."""

_IN_VAIN = "%020d\n"
"""The first line: when a process last waited at its end for a collector in vain, on the monotonic clock."""

RECORDED = "recorded"
"""The mark of a process that has recorded calls and will tell of them itself."""


def make() -> Callable[[], None]:
    """Make a board in the first of the processes that share it, which is this one; returns the way back.

    Nothing happens where there is one already, or where the system has none.
    """
    if os.environ.get(VARIABLE):
        return lambda: None
    try:
        made = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.write(made, (_IN_VAIN % 0).encode())
            held = duplicate(made)
        finally:
            os.close(made)
    except (AttributeError, OSError):
        return lambda: None
    os.environ[VARIABLE] = path = f"/proc/{os.getpid()}/fd/{held}"

    def remove() -> None:
        if os.environ.get(VARIABLE) == path:
            del os.environ[VARIABLE]
        if _is_board(held):
            os.close(held)

    return remove


def attached(rule: str) -> str:
    """The mark of a rule that is at work in some process."""
    return f"a {_digest(rule)}"


def called(rule: str) -> str:
    """The mark of a rule of which some process has called a target."""
    return f"c {_digest(rule)}"


def _digest(rule: str) -> str:
    return sha256(rule.encode(errors="backslashreplace")).hexdigest()[:16]


def marks() -> set[str]:
    """Return the content of the board, nothing where it cannot be reached."""
    descriptor = _opened(os.O_RDONLY)
    if descriptor is None:
        return set()
    with os.fdopen(descriptor, "rb") as file:
        return set(file.read(_BYTES).decode("ascii", "replace").splitlines()[1:])


def waited_in_vain_ns() -> int:
    """When a process of the run last waited at its end for a collector in vain; 0 for never, or not that is known."""
    descriptor = _opened(os.O_RDONLY)
    if descriptor is None:
        return 0
    with os.fdopen(descriptor, "rb") as file:
        line = file.readline(_BYTES).strip()
    return int(line) if line.isdigit() else 0


def note_wait_in_vain(at_ns: int) -> None:
    """Tell the others that this process has waited at its end for a collector in vain."""
    descriptor = _opened(os.O_WRONLY)
    if descriptor is not None:
        try:
            os.pwrite(descriptor, (_IN_VAIN % at_ns).encode(), 0)
        except OSError:
            pass
        finally:
            os.close(descriptor)


def put(wanted: Iterable[str]) -> None:
    """Put marks on the board that are not there."""
    missing = sorted(set(wanted) - marks())
    descriptor = _opened(os.O_WRONLY | os.O_APPEND) if missing else None
    if descriptor is None:
        return
    try:
        if os.fstat(descriptor).st_size < _BYTES:
            os.write(descriptor, "".join(f"{mark}\n" for mark in missing).encode())
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _opened(flags: int) -> int | None:
    """The board's memory; None where its holder has gone, or has something else under that number by now."""
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    if _is_board(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _is_board(descriptor: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{_NAME}")  # noqa: PTH115 - not a path
    except OSError:
        return False
