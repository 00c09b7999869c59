"""A bound for the memory that reading a file may take, set by the system itself, whatever asks for the memory."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from instrument.errors import InstrumentError

LEAST_BYTES = 500_000_000
"""What a verb may use of any file, all of the process counted."""

SHARE_OF_DATA = 0.9
"""What part of it the system's limit is for, which does not count libraries and stacks."""

PACKED_NEEDS, PLAIN_NEEDS, RECORDING_NEEDS = 60, 3, 150
"""How many times its size a trace file may need where that is more: a span has 12 to 40 bytes packed, 200 plain and 6
in a recording, and up to 600 while views are made of it."""


def bound_bytes(files: Sequence[str]) -> int:
    """What trace files may take, by their sizes."""
    return max(LEAST_BYTES, sum(map(_need_bytes, map(Path, files))))


@contextmanager
def within_memory(verb: str, files: Sequence[str], asked_bytes: int | None) -> Iterator[None]:
    """Bound what the process may use in all: to what the verb is asked for, or else by the sizes of the trace files.

    Raises `InstrumentError` where they take more: they are made to do so, or very large.
    """
    bound = asked_bytes or bound_bytes(files)
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    known = [limit for limit in (before, most) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([int(bound * SHARE_OF_DATA), *known]), most))
    try:
        yield
    except (MemoryError, OSError) as problem:
        if isinstance(problem, OSError) and problem.errno != errno.ENOMEM:
            raise
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))  # what is told now needs some, too
        raise InstrumentError(
            f"{verb}: {' with '.join(files)} takes more than {bound / 1e6:.0f} MB of memory; if you trust it, give "
            "more with --memory, such as --memory 4GiB"
        ) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def _need_bytes(file: Path) -> int:
    try:
        with file.open("rb") as opened:
            needs = {b"\x1f\x8b": PACKED_NEEDS, b"PK": RECORDING_NEEDS}.get(opened.read(2), PLAIN_NEEDS)
        return file.stat().st_size * needs
    except OSError:
        return 0  # reading it will say what is wrong
