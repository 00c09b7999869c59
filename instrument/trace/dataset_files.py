"""Writes a dataset as Parquet files into a folder or an object store. Each table, service, day and hour has a folder.

A file has a name without `.parquet` until it is complete, and is then renamed. In the path of a folder, such as
`service=s-chat/date=d2026-11-29/hour=h07`, each value has a letter in front, because query engines read `07` as 7.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from instrument.errors import TraceError
from instrument.trace.dataset import definition, pyarrow, schema
from instrument.trace.text import clean

FILE_BYTES = 128 << 20
"""The size in bytes at which a file is closed and the next file begins."""

HOUR_NS = 3600 * 10**9

NAME_LENGTH = 200
"""The maximum number of characters of a service's name in a folder's name. File systems refuse names over 255 bytes."""

PLAIN = frozenset({
    "span_id", "parent_span_id", "start_unix_ns", "duration_ns", "children_ns", "waiting_ns", "link_span_id", "own_ns",
    "share_ns", "request_span_id", "queue_ns", "stall_ns", "transport_ns", "unknown_ns", "value",
})  # fmt: skip
"""The columns that Parquet stores without a dictionary, because most of their values are distinct."""


def make_folder_path(service: str, hour: int) -> str:
    """Return the path of the folder for a service's rows that began in `hour`, counted from 1970."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", clean(service))[:NAME_LENGTH] or "_"
    return time.strftime(f"service=s-{name}/date=d%Y-%m-%d/hour=h%H", time.gmtime(hour * 3600))


class Folder:
    """A local folder or one in an object store, given by its path or its URL, such as `s3://bucket/traces`. Raises
    `TraceError`."""

    def __init__(self, path: str) -> None:
        pyarrow()
        from pyarrow import fs

        self.is_local = "://" not in path
        try:
            if self.is_local:
                self.files, self.path = fs.LocalFileSystem(), os.path.abspath(path)  # noqa: PTH100 - not resolved
            else:
                self.files, self.path = fs.FileSystem.from_uri(path)
        except (OSError, ValueError) as problem:
            raise TraceError(f"cannot write to {path}: {problem}") from problem

    def why_not_written(self) -> str:
        """Return the reason why a local folder cannot be made or written to, "" if it can be or is not local."""
        path = self.path
        while self.is_local and not os.path.lexists(path):
            path = os.path.dirname(path)  # noqa: PTH120
        is_usable = not self.is_local or (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK))  # noqa: PTH112
        return "" if is_usable else f"cannot write to {self.path}: {path} is no folder in which this user may write"

    def create(self, name: str) -> Any:
        """Return a new file for writing. Only the owner can read a local file."""
        path = f"{self.path}/{name}"
        if self.is_local:
            self.files.create_dir(path.rpartition("/")[0], recursive=True)
            return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")
        return self.files.open_output_stream(path)

    def rename(self, name: str, new_name: str) -> None:
        self.files.move(f"{self.path}/{name}", f"{self.path}/{new_name}")

    def size_bytes(self, name: str) -> int:
        """Return the size of a file."""
        return int(self.files.get_file_info(f"{self.path}/{name}").size or 0)

    def remove(self, name: str) -> None:
        with suppress(OSError):
            self.files.delete_file(f"{self.path}/{name}")


class _OpenFile:
    """A file that is being written. `part` is its name until it is complete."""

    def __init__(self, folder: Folder, table: str, name: str) -> None:
        from pyarrow import parquet

        self.name, self._folder = name, folder
        directory, slash, base = name.rpartition("/")
        self.part = f"{directory}{slash}.{base}.part"
        self.rows = 0
        self._sink = folder.create(self.part)
        types = schema(table)
        self._writer = parquet.ParquetWriter(
            self._sink, types, compression="zstd", compression_level=6,
            use_dictionary=[field.name for field in types if field.name not in PLAIN],
        )  # fmt: skip

    def write(self, rows: Any) -> int:
        """Write rows. Return the size of the file so far, in bytes."""
        self._writer.write_table(rows)
        self.rows += len(rows)
        return int(self._sink.tell())

    def close(self) -> None:
        """Complete the file under its temporary name `part`."""
        self._writer.close()
        self._sink.close()

    def discard(self) -> None:
        """Close and remove the file."""
        for closing in (self._writer.close, self._sink.close):
            with suppress(Exception):  # the store may have gone
                closing()
        self._writer.is_open = False  # or its end would try once more, and print that it cannot
        self._folder.remove(self.part)


def write_spans(path: str, rows: Iterable[Any]) -> str:
    """Write rows of the table `spans` as one file. Return its name. The caller handles `OSError`."""
    directory, slash, name = path.rpartition("/")
    folder = Folder(directory or slash or ".")
    file = _OpenFile(folder, "spans", name)
    try:
        for some in rows:
            file.write(some)
        file.close()
    except BaseException:
        file.discard()
        raise
    folder.rename(file.part, name)
    return f"{folder.path}/{name}"


class DatasetWriter:
    """Writes tables to the files of a dataset. Files that begin with `name` replace older ones.

    A file gets its final name in `close`. After an error, `discard` removes all incomplete files. The caller handles
    `OSError`. With `fills`, a table without rows has a file, too, because query engines refuse a folder that does not
    exist.
    """

    def __init__(self, folder: Folder, name: str, file_bytes: int = FILE_BYTES, *, fills: bool = True) -> None:
        self._folder, self._name, self._file_bytes, self._fills = folder, name, file_bytes, fills
        self._open: dict[str, _OpenFile] = {}
        self._closed: list[_OpenFile] = []
        self._counts: dict[str, int] = {}
        self._tables: set[str] = set()
        self._last_folder = ""

    def write(self, table: str, rows: Any) -> None:
        """Write the rows of a table to the files of their services and hours."""
        for folder, some in _split_by_folder(rows):
            self._last_folder = folder
            self._write(table, folder, some)

    def _write(self, table: str, folder: str, rows: Any) -> None:
        place = f"{table}/{folder}"
        file = self._open.get(place)
        if file is None:
            number = self._counts[place] = self._counts.get(place, -1) + 1
            self._tables.add(table)
            file = self._open[place] = _OpenFile(self._folder, table, f"{place}/{self._name}-{number}.parquet")
        if file.write(rows) >= self._file_bytes:
            self._open.pop(place)
            self._closed.append(file)
            file.close()

    def close(self) -> list[str]:
        """Complete and rename all files. Return their names."""
        for table in set(definition()["tables"]) - self._tables if self._fills and self._last_folder else ():
            self._write(table, self._last_folder, schema(table).empty_table())
        for place in list(self._open):
            file = self._open.pop(place)
            self._closed.append(file)
            file.close()
        names = []
        for file in self._closed:
            self._folder.rename(file.part, file.name)
            names.append(f"{self._folder.path}/{file.name}")
        self._closed = []
        return names

    @property
    def parts(self) -> list[str]:
        """The temporary names of files that are not renamed yet."""
        return [file.part for file in (*self._open.values(), *self._closed)]

    def discard(self) -> None:
        """Remove all files that are not renamed yet."""
        for file in (*self._open.values(), *self._closed):
            file.discard()
        self._open, self._closed = {}, []


def _split_by_folder(rows: Any) -> Iterator[tuple[str, Any]]:
    """Yield the folder and the rows of each service and hour."""
    from pyarrow import compute

    if not len(rows):
        return
    hours = np.floor_divide(rows.column("start_unix_ns").to_numpy(), HOUR_NS)
    services = compute.dictionary_encode(rows.column("service_name")).combine_chunks()
    pairs, places = np.unique(np.stack([services.indices.to_numpy(), hours]), axis=1, return_inverse=True)
    for number, (service, hour) in enumerate(pairs.T.tolist()):
        some = np.flatnonzero(places.reshape(-1) == number)
        folder = make_folder_path(services.dictionary[service].as_py(), hour)
        yield folder, rows if len(some) == len(rows) else rows.take(some)
