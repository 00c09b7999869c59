"""gzip and deflate, by Intel's ISA-L where its package is installed, else by zlib.

Traces of a million spans take ISA-L 0.15 us a span to pack, zlib 0.7 to 1.1, into files of nearly the same size; to
unpack them it takes a third of zlib's time. Both read what the other writes. Which it is shows nowhere but in the time.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Protocol

ISAL_LEVEL = 1
"""Level 0 is a quarter larger, 2 and 3 pack traces no better."""

MEMORY = 9
"""zlib's memory level: the most, half a MiB for the time of the write."""


class Compressor(Protocol):
    """What packs a stream piece by piece."""

    def compress(self, data: bytes, /) -> bytes:
        """Some of the packed stream, often none."""

    def flush(self) -> bytes:
        """Its end."""


def compressor(zlib_level: int) -> Compressor:
    """Packs one gzip stream; `zlib_level` counts only where zlib does it."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.compressobj(zlib_level, zlib.DEFLATED, 16 + zlib.MAX_WBITS, MEMORY)
    packer: Compressor = isal_zlib.compressobj(ISAL_LEVEL, isal_zlib.DEFLATED, 16 + isal_zlib.MAX_WBITS)
    return packer


def raw_compressor(zlib_level: int) -> Compressor:
    """Packs one stream as zip archives have it, without head and checksum."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.compressobj(zlib_level, zlib.DEFLATED, -zlib.MAX_WBITS, MEMORY)
    packer: Compressor = isal_zlib.compressobj(ISAL_LEVEL, isal_zlib.DEFLATED, -isal_zlib.MAX_WBITS)
    return packer


def opened(path: Path) -> gzip.GzipFile:
    """The unpacked text of a gzip file. Reading it raises one of `damages()` where the file is not whole."""
    try:
        from isal import igzip
    except ImportError:
        return gzip.open(path)
    return igzip.IGzipFile(path)  # type: ignore[no-untyped-call]


def damages() -> tuple[type[Exception], ...]:
    """What reading a gzip file raises that is cut off or damaged."""
    found: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    try:
        from isal import isal_zlib
    except ImportError:
        return found
    error: type[Exception] = isal_zlib.error  # type: ignore[assignment]
    return (*found, error)
