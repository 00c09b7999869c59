"""Saves a recording (the columns of a trace, and its metadata) in one file of numpy's own format, and loads it.

`numpy.load` reads the file without this SDK. The module `layout` defines its arrays. The array `metadata`
is JSON in UTF-8. Nothing in the file is pickled, and every value is checked before use.

The file is a zip archive with compressed members (PKWARE's APPNOTE 6.3, 4.3.6 to 4.3.16).
"""

from __future__ import annotations

import io
import json
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from instrument.errors import TraceError
from instrument.recording.tally import Tally
from instrument.runtime import file_writing
from instrument.trace.call_tree import tally_spans
from instrument.trace.layout import (
    Column,
    pack_allocations,
    pack_columns,
    pack_kernels,
    unpack_allocations,
    unpack_columns,
    unpack_kernels,
)
from instrument.trace.metadata import LIMIT_LINKS, Metadata, Sites, encode_metadata, read_sample
from instrument.trace.text import LIMIT_SPANS, LIMIT_VALUE, check_type, encode, make_json_value
from instrument.trace.trace import SpanViews, Trace

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_VERSION, _DEFLATED, _DATE = 20, 8, 0x21
"""Values of zip headers. The date is fixed, so that equal traces make equal files."""

ARCHIVE_LIMIT_BYTES = (1 << 32) - 1
"""The maximum size of an archive in bytes, because the zip format stores sizes in 32 bits."""

ZLIB_LEVEL = 1


def write_archive(file: IO[bytes], members: Iterable[tuple[str, bytes]]) -> None:
    """Write named members as a zip archive, from the start of a file. Raises `OSError` beyond `ARCHIVE_LIMIT_BYTES`."""
    at, count, directory = 0, 0, bytearray()
    for name, data in members:
        packer = file_writing.compressor(ZLIB_LEVEL, is_raw=True)
        packed, called = packer.compress(data) + packer.flush(), name.encode()
        facts = (0, _DEFLATED, 0, _DATE, zlib.crc32(data), len(packed), len(data), len(called), 0)
        if at + len(packed) > ARCHIVE_LIMIT_BYTES or len(data) > ARCHIVE_LIMIT_BYTES:
            raise OSError("a recording of more than 4 GiB; record less into one file")
        directory += _CENTRAL.pack(b"PK\x01\x02", _VERSION, _VERSION, *facts, 0, 0, 0, 0o600 << 16, at) + called
        file.write(_LOCAL.pack(b"PK\x03\x04", _VERSION, *facts) + called)
        file.write(packed)
        at += _LOCAL.size + len(called) + len(packed)
        count += 1
    file.write(directory)
    file.write(_END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), at, 0))


LAYOUT = 2

LIMIT_BYTES = 2 << 30
"""The maximum number of unpacked bytes that `load` accepts."""

DEEPEST = 100_000
"""The maximum depth of nested calls that `load` accepts. No real program reaches it."""


@dataclass(frozen=True)
class Saved:
    """A trace and its totals, as they are saved in a file. `tally` is None if the file has no totals."""

    trace: Trace
    tally: Tally | None

    def read_or_count_totals(self) -> Tally:
        """Return the saved totals, or count them from the spans. Raises `TraceError` if the calls are nested too
        deeply."""
        if self.tally is not None:
            return self.tally
        try:
            return tally_spans(self.trace.columns, self.trace.threads, limit_links=LIMIT_LINKS)
        except ValueError as problem:
            raise TraceError(f"cannot count the calls of the recording: {problem}") from problem


# Written


def dump(path: str | os.PathLike[str], trace: Trace, tally: Tally | None = None) -> Path:
    """Write a trace and its totals to a file. The file has mode 0600, and never appears incomplete. Raises
    `TraceError`."""
    target = Path(path)
    try:
        with file_writing.open_replacement(target) as file:
            _write_members(file, trace, tally)
    except OSError as problem:
        raise TraceError(f"cannot write the recording {target}: {problem.strerror or problem}") from problem
    return target


def _write_members(file: Any, facts: Trace, tally: Tally | None) -> None:
    columns = facts.columns
    sites = Sites(columns.sites)
    places = np.array([sites.find_or_add_index(site) for site in columns.sites], dtype=np.int32)
    arrays, more = pack_columns(columns)
    arrays["site"] = places[arrays["site"]].astype(arrays["site"].dtype) if len(places) else arrays["site"]
    base_ns = facts.start_ns
    more["samples"] = [[s.name, s.device, s.at_ns - base_ns, s.value] for s in facts.samples if s.value is not None]
    kernels, names = pack_kernels(facts.kernels, base_ns)
    arrays |= kernels | pack_allocations(facts.allocations, base_ns)
    more["kernel_names"] = names
    facts_json = "".join(encode_metadata(replace(facts, kernels=(), allocations=()), base_ns, sites, tally, 0))
    text = f'{{"layout":{LAYOUT},"spans":{encode(make_json_value(more))},"trace":{facts_json}}}'
    arrays["metadata"] = np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_column(column: Column) -> bytes:
        member = io.BytesIO()
        np.lib.format.write_array(member, column, version=(1, 0), allow_pickle=False)
        return member.getvalue()

    write_archive(file, ((f"{name}.npy", encode_column(column)) for name, column in arrays.items()))


# Read back


def is_recording(path: str | os.PathLike[str]) -> bool:
    """Return True if a file begins like a zip archive."""
    try:
        with Path(path).open("rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError:
        return False


def load(path: str | os.PathLike[str], *, limit_bytes: int = LIMIT_BYTES) -> Saved:
    """Read a recording. Raises `TraceError` for an unreadable or damaged file."""
    with _convert_errors(path):
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > limit_bytes:
                raise ValueError(f"it unpacks to more than {limit_bytes} bytes")
            arrays = {member.filename.removesuffix(".npy"): _read_array(archive.read(member)) for member in members}
        if not arrays.keys() >= {"metadata", "span_id_steps"}:
            raise ValueError("it is no recording of `instrument`; give one, or a Chrome trace")
        if len(arrays["span_id_steps"]) > LIMIT_SPANS:
            raise ValueError(f"it has more than {LIMIT_SPANS} spans; record less into one file")
        content = json.loads(arrays.pop("metadata").tobytes())
        if content["layout"] != LAYOUT:
            raise ValueError(f"its layout is {content['layout']!r:.20}; read it with the version that wrote it")
        read = Metadata(check_type(content["trace"], dict))
        more = check_type(content["spans"], dict)
        columns = unpack_columns(arrays, more, read.sites)
        facts = read.make_trace(SpanViews(columns), [read_sample(read.base_ns, *sample) for sample in more["samples"]])
        names = [check_type(name, str) for name in more["kernel_names"]]
        facts.kernels = unpack_kernels(arrays, names, read.base_ns)
        facts.allocations = unpack_allocations(arrays, read.base_ns)
        return check_call_depth(Saved(facts, read.read_tally()))


def check_call_depth(saved: Saved) -> Saved:
    """Return the recording. Raises `ValueError` or `TraceError` if calls are nested more deeply than `DEEPEST`."""
    level = saved.trace.columns.level
    if int(level.max(initial=0)) > DEEPEST:
        raise ValueError("its calls are nested too deeply; it is damaged")
    if saved.tally is None and int(level.sum(dtype=np.int64)) > LIMIT_LINKS:
        return replace(saved, tally=saved.read_or_count_totals())
    return saved


def load_metadata(path: str | os.PathLike[str]) -> Trace:
    """Read a recording's metadata, without its spans and gauges. Raises `TraceError`."""
    with _convert_errors(path), zipfile.ZipFile(path) as archive:
        member = archive.getinfo("metadata.npy")
        if member.file_size > LIMIT_VALUE:
            raise ValueError("its metadata is too long")
        content = json.loads(_read_array(archive.read(member)).tobytes())
        return Metadata(check_type(content["trace"], dict)).make_trace([], [])


def _read_array(data: bytes) -> Column:
    """Return the integers in the data as a view, so that a hostile header cannot cause an allocation."""
    head = io.BytesIO(data)
    if np.lib.format.read_magic(head) != (1, 0):
        raise ValueError("an array in it is of another version of numpy's format")
    shape, _, kind = np.lib.format.read_array_header_1_0(head)
    begin = head.tell()
    if kind.kind not in "iub" or len(shape) != 1 or shape[0] * kind.itemsize != len(data) - begin:
        raise ValueError("an array in it is no column of whole numbers; it is damaged")
    return np.frombuffer(data, kind, offset=begin)


@contextmanager
def _convert_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        why: str = f"{problem.strerror or problem}; give a recording that may be read"
        raise TraceError(f"cannot read the recording {os.fspath(path)}: {why}") from problem
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError) as problem:
        if str(problem).startswith("Error -4 "):
            raise MemoryError from problem  # zlib had none
        why = f"it is cut off or damaged ({problem!s:.80}); write or copy it again"
        raise TraceError(f"cannot read the recording {os.fspath(path)}: {why}") from problem
    # numpy reads the header of an array as Python: a damaged one may be no tokens, or no expression.
    except (
        ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SyntaxError, tokenize.TokenError
    ) as problem:  # fmt: skip
        raise TraceError(f"cannot read the recording {os.fspath(path)}: {problem!s:.200}") from problem
