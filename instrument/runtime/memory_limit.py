"""A bound on the memory that reading a file may take, which the system itself enforces."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from instrument.errors import InstrumentError

LEAST_BYTES = 500_000_000
"""The least bound for a verb, of all memory of the process."""

SHARE_OF_DATA = 0.9
"""The share of the bound that is the system's limit, which does not count libraries and stacks."""

PACKED_NEEDS, PLAIN_NEEDS, RECORDING_NEEDS = 60, 3, 150
"""The multiples of its size that a trace file may need: a span has 12 to 40 bytes packed, 200 plain and 6 in a
recording, and up to 600 while views are made of it."""


def bound_bytes(files: Sequence[str]) -> int:
    """Return the bound for trace files, by their sizes."""
    return max(LEAST_BYTES, sum(map(_need_bytes, map(Path, files))))


@contextmanager
def within_memory(verb: str, files: Sequence[str], asked_bytes: int | None) -> Iterator[None]:
    """Bound the memory of the process, as the user asks, or else by the sizes of the trace files.

    Raises `InstrumentError` for files that take more: they are malicious, or very large.
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
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))  # the message needs some, too
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
