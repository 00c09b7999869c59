"""The board of a run: a file in shared memory, in which each process marks the profile's rules that it uses.

A rule may match functions in only some processes of a service. A process reports a rule without a match only if no
other process has marked it. Processes find the board by a path in the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from instrument.recording.memory_layout import OwnDescriptor, duplicate_descriptor

VARIABLE = "INSTRUMENT_RUN_BOARD"

_NAME = "instrument-run"

_BYTES = 1 << 20
"""The maximum size in bytes of a run's board."""

RECORDED = "recorded"
"""The mark that reports that a process of the run has recorded calls."""


def make_board() -> Callable[[], None]:
    """Make a run's shared memory for marks of rules, unless it exists. Return a function that removes the memory."""
    if os.environ.get(VARIABLE):
        return lambda: None
    try:
        low_fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            board = OwnDescriptor(duplicate_descriptor(low_fd))
        finally:
            os.close(low_fd)
    except (AttributeError, OSError):
        return lambda: None
    os.environ[VARIABLE] = path = f"/proc/{os.getpid()}/fd/{board.fileno()}"

    def remove_board() -> None:
        if os.environ.get(VARIABLE) == path:
            del os.environ[VARIABLE]
        board.close()

    return remove_board


def attached_mark(rule: str) -> str:
    """Return the mark that shows that a rule is attached in some process of the run."""
    return f"a {_hash_rule(rule)}"


def called_mark(rule: str) -> str:
    """Return the mark that shows that some process of the run has called a rule's target."""
    return f"c {_hash_rule(rule)}"


def _hash_rule(rule: str) -> str:
    from hashlib import sha256  # it loads OpenSSL

    return sha256(rule.encode(errors="backslashreplace")).hexdigest()[:16]


def read_marks() -> set[str]:
    with suppress(OSError), _find_board().open("rb") as file:
        return set(file.read(_BYTES).decode("ascii", "replace").splitlines())
    return set()


def add_marks(rule_marks: Iterable[str]) -> None:
    if missing := sorted(set(rule_marks) - read_marks()):
        with suppress(OSError), _find_board().open("ab", buffering=0) as file:
            if os.fstat(file.fileno()).st_size < _BYTES:
                file.write("".join(f"{mark}\n" for mark in missing).encode())


def _find_board() -> Path:
    """Return the path of the board. Raises `OSError` if there is no board or its owner has ended."""
    path = os.environ.get(VARIABLE, "")
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # noqa: PTH115 - not a path
        raise FileNotFoundError(path)
    return Path(path)
