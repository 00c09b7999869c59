"""The files that a verb reads: recordings and Chrome traces, one by one or all of a folder."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from instrument.cli.option_values import one_of, size_bytes
from instrument.errors import TraceError
from instrument.runtime import compression
from instrument.runtime.memory_limit import within_memory

if TYPE_CHECKING:
    from instrument.trace.file import Saved

FILES = "recordings (.npz), .json or .json.gz, ours or other profilers', or a folder of them; several become one"
WALL = "wall"
CLOCKS = ("monotonic", WALL)
CLOCK = "wall = put files of several machines together by their time of day also where nobody knows how exact it is"

SUFFIXES = (".npz", ".json", ".json.gz")
"""How the names of files in a folder end that are read; of two that differ in the suffix alone the first of these."""


def expanded(paths: Sequence[str]) -> list[str]:
    """The files, those of a folder by name. Raises `TraceError` for a folder that has none."""
    found: list[str] = []
    for path in paths:
        if not Path(path).is_dir():
            found.append(path)
            continue
        known: dict[str, str] = {}
        names = sorted(entry.name for entry in Path(path).iterdir() if not entry.name.startswith("."))
        for suffix in SUFFIXES:
            for name in names:
                if name.endswith(suffix):
                    known.setdefault(name.removesuffix(suffix), str(Path(path, name)))
        if not known:
            raise TraceError(f"the folder {path} has no recording and no trace ({', '.join(SUFFIXES)}) in it")
        found += [known[stem] for stem in sorted(known)]
    return list(dict.fromkeys(found))


def saved_in(path: str) -> Saved:
    """A file of whichever form as a recording. Raises `TraceError`."""
    from instrument import chrome
    from instrument.trace import file

    return file.load(path) if file.is_recording(path) else chrome.load_columns(path)


def add_files(parser: argparse.ArgumentParser) -> None:
    """The files, and the options that say how they are put together and what they may take."""
    parser.add_argument("traces", nargs="+", metavar="FILE", help=FILES)
    parser.add_argument("--clock", **one_of(CLOCKS), default=CLOCKS[0], help=CLOCK)
    parser.add_argument(
        "--memory",
        type=size_bytes,
        metavar="SIZE",
        help="the most to use, such as 2GiB (default: 500MB, and more for files that are large themselves)",
    )


def load_libraries() -> None:
    """What reads files is there before memory is bounded: the system would not load all of a library, and OpenBLAS
    would end the process."""
    # Nothing here multiplies matrices, and each thread that OpenBLAS keeps for it takes memory that is bounded.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from instrument.chrome import reading  # noqa: F401
    from instrument.trace import file, merge  # noqa: F401

    compression.damages()


def read_bounded(verb: str, paths: Sequence[str], memory: int | None) -> list[Saved]:
    """The files as they are, read within the memory that they may take. Raises `TraceError`."""
    load_libraries()
    with within_memory(verb, paths, memory):
        return list(map(saved_in, paths))


def merged_of(verb: str, paths: Sequence[str], clock: str, memory: int | None) -> Saved:
    """All files as one, with one tree for each request. Raises `TraceError`."""
    from instrument.trace.grafted import graft
    from instrument.trace.merge import merge

    files = read_bounded(verb, expanded(paths), memory)
    return graft(files[0] if len(files) == 1 else merge(files, by_wall_clock=clock == WALL).saved)
