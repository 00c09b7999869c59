"""The board of a run: shared memory in which each process marks the profile's rules that it uses.

Each process of a service runs only some of the targets. Before a process reports a rule without a target, it checks on
the board if another process uses the rule. Processes find the board by a path in the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from instrument.recording.memory_layout import duplicate

VARIABLE = "INSTRUMENT_RUN_BOARD"

_NAME = "instrument-run"

_BYTES = 1 << 20
"""The maximum size of a board in bytes. Further marks, of some 20 bytes each, are not written."""

_WAIT_LINE = "%020d\n"
"""The format of a board's first line: the monotonic time in ns of the last wait for a collector that did not answer."""

RECORDED = "recorded"
"""The mark on the board if a process of the run has recorded calls. That process reports the calls itself."""


def make_board() -> Callable[[], None]:
    """Make a board that this process owns, unless there is one. Return a function that removes it."""
    if os.environ.get(VARIABLE):
        return lambda: None
    try:
        low_fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.write(low_fd, (_WAIT_LINE % 0).encode())
            fd = duplicate(low_fd)
        finally:
            os.close(low_fd)
    except (AttributeError, OSError):
        return lambda: None
    os.environ[VARIABLE] = path = f"/proc/{os.getpid()}/fd/{fd}"

    def remove() -> None:
        if os.environ.get(VARIABLE) == path:
            del os.environ[VARIABLE]
        if _is_board(fd):
            os.close(fd)

    return remove


def attached_mark(rule: str) -> str:
    """Return the mark for a rule that at least one process of the run has attached."""
    return f"a {_digest(rule)}"


def called_mark(rule: str) -> str:
    """Return the mark for a rule whose target was called in at least one process of the run."""
    return f"c {_digest(rule)}"


def _digest(rule: str) -> str:
    from hashlib import sha256  # it loads OpenSSL

    return sha256(rule.encode(errors="backslashreplace")).hexdigest()[:16]


def read_marks() -> set[str]:
    return set(_read(_BYTES).decode("ascii", "replace").splitlines()[1:])


def waited_in_vain_ns() -> int:
    """Return the last time in ns at which an ending process waited for a collector in vain, 0 for none."""
    line = _read(len(_WAIT_LINE % 0)).strip()
    return int(line) if line.isdigit() else 0


def note_wait_in_vain(at_ns: int) -> None:
    with _open_board(os.O_WRONLY) as descriptor:
        if descriptor is not None:
            os.pwrite(descriptor, (_WAIT_LINE % at_ns).encode(), 0)


def add_marks(rule_marks: Iterable[str]) -> None:
    if missing := sorted(set(rule_marks) - read_marks()):
        with _open_board(os.O_WRONLY | os.O_APPEND) as descriptor:
            if descriptor is not None and os.fstat(descriptor).st_size < _BYTES:
                os.write(descriptor, "".join(f"{mark}\n" for mark in missing).encode())


def _read(most_bytes: int) -> bytes:
    with _open_board(os.O_RDONLY) as descriptor:
        return b"" if descriptor is None else os.read(descriptor, most_bytes)
    return b""


@contextmanager
def _open_board(flags: int) -> Iterator[int | None]:
    """Open the board and yield its descriptor, None if the board's owner has ended and its path names another file. An
    `OSError` in the `with` block ends the block, and is not raised."""
    descriptor = -1
    with suppress(OSError):
        if path := os.environ.get(VARIABLE):
            descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        with suppress(OSError):
            yield descriptor if descriptor >= 0 and _is_board(descriptor) else None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _is_board(descriptor: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{_NAME}")  # noqa: PTH115 - not a path
    except OSError:
        return False
