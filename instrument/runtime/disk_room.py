"""Room on a disk: files of ours go, the least needed first, so that all keep within a profile's `limits.disk`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def removed(files: Iterable[tuple[Path, int]], over_bytes: int) -> list[Path]:
    """Remove files, each told with its size, in this order until `over_bytes` of them are gone: those removed.

    One that another process removes meanwhile counts as gone, one that is another user's stays.
    """
    found = []
    for path, size_bytes in files:
        if over_bytes <= 0:
            break
        with suppress(OSError):
            path.unlink()
            found.append(path)
        over_bytes -= 0 if os.path.lexists(path) else size_bytes
    return found
