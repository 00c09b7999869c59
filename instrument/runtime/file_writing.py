"""Writes files that only their owner can read, and that appear only once they are complete. Compresses files with gzip.

A writer locks a file `.instrument-*.part` in the same folder, and renames it once it is complete. Files are compressed
by Intel's ISA-L if its package `isal` is installed, else by zlib.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from instrument.runtime.lazy_imports import LazyModule

if TYPE_CHECKING:
    import gzip
else:
    gzip = LazyModule("gzip")

PREFIX, SUFFIX = ".instrument-", ".part"


@contextmanager
def open_replacement(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, which replaces the file at `path` when the block ends without an error. Missing folders are
    created. A symbolic link at `path` is replaced, not followed. Raises `OSError`, also if `path` is not a regular
    file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        if not _may_be_replaced(path):
            raise FileExistsError(errno.EEXIST, "this path exists, and is not a regular file")
    file, part = _create_unfinished_file(path.parent)
    try:
        with file:
            yield file
            file.flush()
            part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _may_be_replaced(path: Path) -> bool:
    """Return True for a regular file, a link to a regular file, or a broken link. Links below `/dev`, such as
    `/dev/stdout`, may not be replaced."""
    is_link = stat.S_ISLNK(path.lstat().st_mode)
    if is_link and path.parent.resolve().is_relative_to("/dev"):
        return False
    return path.is_file() or (is_link and not path.exists())


def _create_unfinished_file(folder: Path) -> tuple[BinaryIO, Path]:
    while True:
        part = folder / f"{PREFIX}{os.urandom(8).hex()}{SUFFIX}"
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            part.lstat()
            return os.fdopen(descriptor, "wb"), part
        os.close(descriptor)  # another process took it for abandoned before it was locked


def append_text(path: Path, text: str) -> None:
    """Append text to a file, completely or not at all. Missing folders are created. Raises `OSError`. Only the owner
    can read a new file. A symbolic link is refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "ab", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileExistsError(errno.EEXIST, "this path exists, and is not a regular file")
        data, before = memoryview(text.encode(errors="backslashreplace")), os.fstat(file.fileno()).st_size
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


def remove_unfinished_files(folder: Path) -> int:
    """Remove the unfinished files in a folder if their writers have ended. Return the total bytes of the other
    unfinished files."""
    written_bytes = 0
    for part in folder.glob(f"{PREFIX}*{SUFFIX}"):
        with suppress(OSError):  # its writer, or another process that looks, was faster
            descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                facts = os.fstat(descriptor)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    written_bytes += facts.st_size
                else:
                    part.unlink()
            finally:
                os.close(descriptor)
    return written_bytes


def remove_files_until_freed(files: Iterable[tuple[Path, int]], over_bytes: int) -> list[Path]:
    """Remove files in the given order until `over_bytes` are freed. Return the removed files. `files` has paths and
    sizes. Files that another process has just removed also count as freed."""
    removed = []
    for path, size_bytes in files:
        if over_bytes <= 0:
            break
        with suppress(OSError):
            path.unlink()
            removed.append(path)
        over_bytes -= 0 if os.path.lexists(path) else size_bytes
    return removed


# Compression


ISAL_LEVEL = 1
"""The compression level for ISA-L. Level 0 makes files a quarter larger. Levels 2 and 3 save nothing."""

ZLIB_MEMORY_LEVEL = 9
"""The highest memory level of zlib, which is the fastest. Each written file takes half a MiB."""


class Compressor(Protocol):
    """A compressor of one stream, which gets its data in chunks."""

    def compress(self, data: bytes, /) -> bytes:
        """Compress a chunk. Return the bytes that are ready, often none."""

    def flush(self) -> bytes:
        """End the stream. Return the last compressed bytes."""


def compressor(zlib_level: int, *, is_raw: bool = False) -> Compressor:
    """Return a compressor of one gzip stream. With `is_raw`, the stream has no header and no checksum, as in zip
    archives. `zlib_level` is used only without ISA-L."""
    window_bits = -zlib.MAX_WBITS if is_raw else 16 + zlib.MAX_WBITS
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.compressobj(zlib_level, zlib.DEFLATED, window_bits, ZLIB_MEMORY_LEVEL)
    packer: Compressor = isal_zlib.compressobj(ISAL_LEVEL, isal_zlib.DEFLATED, window_bits)
    return packer


def open_gzip(path: Path) -> gzip.GzipFile:
    """Open a gzip file for reading. Incomplete data raises one of `list_gzip_errors()`."""
    try:
        from isal import igzip
    except ImportError:
        return gzip.open(path)
    return igzip.IGzipFile(path)  # type: ignore[no-untyped-call]


def list_gzip_errors() -> tuple[type[Exception], ...]:
    of_zlib: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    try:
        from isal import isal_zlib
    except ImportError:
        return of_zlib
    error: type[Exception] = isal_zlib.error  # type: ignore[assignment]
    return (*of_zlib, error)
