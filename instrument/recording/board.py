"""The board of a run: a few marks in shared memory that every process of the run can read and add.

The processes of a service share a profile, and each runs some of its targets. A rule without a target here may be
attached in another process, such as the engine's. A process that only starts others reports nothing if they have
recorded. The first process of the run owns the memory, which ends with that process. Other processes find it by a path
in the environment. Without it each process knows only its own marks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from instrument.recording.memory_layout import duplicate

VARIABLE = "INSTRUMENT_RUN_BOARD"

_NAME = "instrument-run"

_BYTES = 1 << 20
"""The maximum number of bytes of a board that are read. A mark is a line of 20 bytes, and is written about once."""

_IN_VAIN = "%020d\n"
"""The first line of a board: the monotonic time in ns at which a process last waited in vain for a collector."""

RECORDED = "recorded"
"""The mark of a process that has recorded calls and will report them itself."""


def make() -> Callable[[], None]:
    """Make a board owned by this process, and return the function that removes it.

    Do nothing if there is a board already, or if the system has no memory files.
    """
    if os.environ.get(VARIABLE):
        return lambda: None
    try:
        low_fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.write(low_fd, (_IN_VAIN % 0).encode())
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
    """Return the mark of a rule that is attached in a process."""
    return f"a {_digest(rule)}"


def called_mark(rule: str) -> str:
    """Return the mark of a rule with a called target."""
    return f"c {_digest(rule)}"


def _digest(rule: str) -> str:
    from hashlib import sha256  # it loads OpenSSL

    return sha256(rule.encode(errors="backslashreplace")).hexdigest()[:16]


def marks() -> set[str]:
    """Return the marks on the board, none if there is no board."""
    return set(_read(_BYTES).decode("ascii", "replace").splitlines()[1:])


def waited_in_vain_ns() -> int:
    """Return the last time in ns at which a process's end waited in vain for a collector; 0 for none."""
    line = _read(len(_IN_VAIN % 0)).strip()
    return int(line) if line.isdigit() else 0


def note_wait_in_vain(at_ns: int) -> None:
    """Note on the board that this process's end has waited in vain for a collector."""
    with _opened(os.O_WRONLY) as descriptor:
        if descriptor is not None:
            os.pwrite(descriptor, (_IN_VAIN % at_ns).encode(), 0)


def put(rule_marks: Iterable[str]) -> None:
    """Add the given marks that are missing on the board."""
    if missing := sorted(set(rule_marks) - marks()):
        with _opened(os.O_WRONLY | os.O_APPEND) as descriptor:
            if descriptor is not None and os.fstat(descriptor).st_size < _BYTES:
                os.write(descriptor, "".join(f"{mark}\n" for mark in missing).encode())


def _read(most_bytes: int) -> bytes:
    with _opened(os.O_RDONLY) as descriptor:
        return b"" if descriptor is None else os.read(descriptor, most_bytes)
    return b""


@contextmanager
def _opened(flags: int) -> Iterator[int | None]:
    """Yield a descriptor of the board, or None if its owner has ended or the path is another file now.

    An `OSError` in the block ends the block without being raised.
    """
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
