"""What was done when, as the service itself knows it: with CHAT_DEBUG_LOG=FILE each of its processes adds to the file.

A line has a time in nanoseconds (CLOCK_MONOTONIC), the process, the thread, `begin` or `end`, what was done, and the
ids of the requests that it was done for. Lines are kept in memory until `save`: a write would give the processor away.
"""

import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

_PATH = os.environ.get("CHAT_DEBUG_LOG")
_NOTHING = nullcontext()
_lines: list[tuple[int, int, tuple[str, ...]]] = []


def logged(what: str, *ids: str) -> AbstractContextManager[None]:
    """Log when this block begins and ends, if there is a log."""
    return _Logged(what, *ids) if _PATH else _NOTHING


def save() -> None:
    """Add the lines of this process to the file, if there is a log."""
    if _PATH:
        with Path(_PATH).open("a", encoding="utf-8") as file:
            file.write("".join(f"{at} {os.getpid()} {thread} {' '.join(words)}\n" for at, thread, words in _lines))
        _lines.clear()


class _Logged(AbstractContextManager[None]):
    def __init__(self, *words: str) -> None:
        self._words = words

    def __enter__(self) -> None:
        _lines.append((time.monotonic_ns(), threading.get_ident(), ("begin", *self._words)))

    def __exit__(self, *_: object) -> None:
        _lines.append((time.monotonic_ns(), threading.get_ident(), ("end", *self._words)))
