"""A zip archive of packed members, written in one go: `zipfile` can only pack by zlib, which takes four times as long.

The form is the plain one, of which PKWARE's APPNOTE 6.3 (4.3.6 to 4.3.16) says what stands where; `zipfile` reads it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import IO

from instrument.runtime import compression

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_VERSION, _DEFLATED, _DATE = 20, 8, 0x21
"""Of the form: 2.0, packed by deflate; and 1980-01-01, for the same trace is the same file."""

LIMIT_BYTES = (1 << 32) - 1
"""Most that an archive of this form can hold."""

ZLIB_LEVEL = 1


def write_archive(file: IO[bytes], members: Iterable[tuple[str, bytes]]) -> None:
    """Write members, by name, at the file's begin. Raises `OSError` for more than `LIMIT_BYTES`."""
    at, count, directory = 0, 0, bytearray()
    for name, data in members:
        packer = compression.raw_compressor(ZLIB_LEVEL)
        packed, called = packer.compress(data) + packer.flush(), name.encode()
        facts = (0, _DEFLATED, 0, _DATE, zlib.crc32(data), len(packed), len(data), len(called), 0)
        if at + len(packed) > LIMIT_BYTES or len(data) > LIMIT_BYTES:
            raise OSError("a recording of more than 4 GiB; record less into one file")
        directory += _CENTRAL.pack(b"PK\x01\x02", _VERSION, _VERSION, *facts, 0, 0, 0, 0o600 << 16, at) + called
        file.write(_LOCAL.pack(b"PK\x03\x04", _VERSION, *facts) + called)
        file.write(packed)
        at += _LOCAL.size + len(called) + len(packed)
        count += 1
    file.write(directory)
    file.write(_END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), at, 0))
