"""Find the files that a command line names, directly or by a folder, and read them within a memory limit."""

from __future__ import annotations

import argparse
import errno
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from instrument.cli import print_remark
from instrument.cli.option_values import choice_arguments, read_size_bytes
from instrument.errors import InstrumentError, TraceError
from instrument.runtime import file_writing

if TYPE_CHECKING:
    from instrument.trace.file import Saved
    from instrument.trace.trace import Trace


LEAST_BYTES = 500_000_000
"""The smallest memory limit, in bytes, of a command that reads files. Large files raise the limit."""

COMMAND_BYTES = 150_000_000
"""The memory that a command uses before it reads files, in bytes."""

SHARE_OF_DATA = 0.9
"""The share of the memory limit that is set as RLIMIT_DATA, which does not count libraries and stacks."""

PACKED_NEEDS, PLAIN_NEEDS, RECORDING_NEEDS = 60, 3, 150
"""The maximum bytes of memory per byte of a packed trace, of a plain trace, and of a recording."""


def memory_limit_bytes(files: Sequence[str]) -> int:
    return max(LEAST_BYTES, sum(map(_estimate_needed_memory, map(Path, files))))


@contextmanager
def limit_memory(verb: str, files: Sequence[str], asked_bytes: int | None) -> Iterator[None]:
    """Limit the memory of the process within a `with` block. The default limit depends on the sizes of the files.

    Raises `InstrumentError` if the block needs more memory.
    """
    bound = asked_bytes or memory_limit_bytes(files)
    limit = int(bound * SHARE_OF_DATA) + max(0, _measure_used_memory() - COMMAND_BYTES)
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (before, most) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([limit, *limits]), most))
    try:
        yield
    except (MemoryError, OSError) as problem:
        if isinstance(problem, OSError) and problem.errno != errno.ENOMEM:
            raise
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))  # the message needs some, too
        raise InstrumentError(
            f"{verb}: {' with '.join(files)} takes more than {bound / 1e6:.0f} MB of memory; if you trust the file, "
            "give more with --memory, such as --memory 4GiB"
        ) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def _measure_used_memory() -> int:
    """Return the bytes of this process that count for RLIMIT_DATA, or 0 if they are unknown."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text("ascii", "replace").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmData:")).split()[1])
    return 0


def _estimate_needed_memory(file: Path) -> int:
    try:
        with file.open("rb") as opened:
            needs = {b"\x1f\x8b": PACKED_NEEDS, b"PK": RECORDING_NEEDS}.get(opened.read(2), PLAIN_NEEDS)
        return file.stat().st_size * needs
    except OSError:
        return 0  # reading it will say what is wrong


FILES = (
    "recordings (.npz), Chrome traces (.json, .json.gz; also of other profilers), or a folder of such files; several "
    "files are joined"
)
WALL = "wall"
CLOCKS = ("monotonic", WALL)
CLOCK = "wall: join files of several machines by the time of day, even if the accuracy of the clocks is unknown"

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""The numbers of two parameters of `mallopt`, from `malloc.h` of glibc."""

LARGEST_REUSED_BYTES, MOST_KEPT_BYTES = 32 << 20, 256 << 20
"""The maximum size of an array whose freed memory is reused, and the maximum free memory that is kept at the end of the
heap."""

SUFFIXES = (".npz", ".json", ".json.gz")
"""The suffixes of files to read in a folder. Of two files that differ only in the suffix, the earlier suffix wins."""


def find_files(verb: str, options: argparse.Namespace) -> list[str]:
    import_file_libraries()
    with limit_memory(verb, [path for path in options.traces if not Path(path).is_dir()], options.memory):
        return expand_paths(options.traces, options.run, options.all, partial(print_remark, verb))


def expand_paths(paths: Sequence[str], run: str | None, is_of_all: bool, say: Callable[[str], None]) -> list[str]:
    """Return the files that paths name. In a folder, only the files of one run are returned, unless `is_of_all`.

    `run` is the name of the run, by default the newest run. `say` is called with a sentence if the folder has several
    runs.
    """
    files: list[str] = []
    for path in paths:
        inside = _list_files(path) if Path(path).is_dir() else [path]
        is_whole = inside == [path] or is_of_all or (len(inside) == 1 and run is None)
        files += inside if is_whole else _choose_files_of_run(path, inside, run, say)
    return list(dict.fromkeys(files))


def list_runs(folder: str) -> list[list[str]]:
    """Return the files of each run in a folder, the oldest run first. A file without metadata counts as a run."""
    unnamed, runs = _group_files_by_run(_list_files(folder))
    return [*([path] for path in unnamed), *(run.files for run in runs)]


def _list_files(folder: str) -> list[str]:
    path_by_stem: dict[str, str] = {}
    names = sorted(entry.name for entry in Path(folder).iterdir() if not entry.name.startswith("."))
    for suffix in SUFFIXES:
        for name in names:
            if name.endswith(suffix):
                path_by_stem.setdefault(name.removesuffix(suffix), str(Path(folder, name)))
    if not path_by_stem:
        raise TraceError(
            f"the folder {folder} has no recording and no trace ({', '.join(SUFFIXES)}); name the folder of "
            "`export.recording.path`"
        )
    return [path_by_stem[stem] for stem in sorted(path_by_stem)]


def _choose_files_of_run(folder: str, paths: Sequence[str], run: str | None, say: Callable[[str], None]) -> list[str]:
    unnamed, runs = _group_files_by_run(paths)
    names = ", ".join(map(str, reversed(runs[-RUNS_NAMED:])))
    more = len(runs) - RUNS_NAMED
    names += f" and {more} more" if more > 0 else ""
    chosen = [candidate for candidate in runs if run in (None, candidate.name)][-1:]
    if run is not None and not chosen:
        raise TraceError(f"the folder {folder} has no run {run}; its runs are: {names}")
    if run is None and len(runs) > 1:
        say(
            f"the folder {folder} has files of {len(runs)} runs: {names}; this is the newest, {runs[-1].name}; "
            "--run RUN takes another one, --all all of them"
        )
    return [path for path in paths if path in unnamed or any(path in candidate.files for candidate in chosen)]


def _read_metadata(path: str) -> Trace | None:
    from instrument.chrome import reading
    from instrument.trace import file

    try:
        return file.load_metadata(path) if file.is_recording(path) else reading.read_metadata(path)
    except TraceError:
        return None  # who reads the file says what is wrong with it


def read_file(path: str) -> Saved:
    from instrument import chrome
    from instrument.trace import file

    return file.load(path) if file.is_recording(path) else chrome.read(path)


def add_file_arguments(parser: argparse.ArgumentParser, runs: str = "") -> None:
    """Add the arguments that name files, and the options for merging and memory.

    If `runs` is given, files are optional, and the help text on files ends with `runs`.
    """
    parser.add_argument("traces", nargs="*" if runs else "+", metavar="FILE", help=f"{FILES}{runs}")
    several = parser.add_mutually_exclusive_group()
    several.add_argument("--run", metavar="RUN", help="in a folder, read only this run (default: the newest one)")
    several.add_argument("--all", action="store_true", help="in a folder, read all runs as one recording")
    add_merge_options(parser)


def add_merge_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clock", **choice_arguments(CLOCKS), default=CLOCKS[0], help=CLOCK)
    parser.add_argument(
        "--memory",
        type=read_size_bytes,
        metavar="SIZE",
        help="largest memory to use, such as 2GiB (default: 500MB, and more for large files)",
    )


def import_file_libraries() -> None:
    """Import the libraries that read files, because an import could fail after memory is limited."""
    # Nothing here multiplies matrices, and each of OpenBLAS's threads takes bounded memory.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from instrument.chrome import reading  # noqa: F401
    from instrument.trace import file, merge  # noqa: F401

    file_writing.list_gzip_errors()
    _reuse_freed_memory()


def _reuse_freed_memory() -> None:
    """Let malloc reuse the memory of freed arrays. Otherwise the kernel must clear new pages for each array."""
    with suppress(ImportError, OSError, AttributeError):  # a Python without ctypes, or musl
        import ctypes

        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGEST_REUSED_BYTES)
        mallopt(M_TRIM_THRESHOLD, MOST_KEPT_BYTES)


def read_within_memory_limit(verb: str, paths: Sequence[str], memory: int | None) -> list[Saved]:
    import_file_libraries()
    with limit_memory(verb, paths, memory):
        return list(map(read_file, paths))


def read_merged(verb: str, paths: Sequence[str], options: argparse.Namespace) -> Saved:
    """Read files as a single trace, with one tree per request. Raises `TraceError`."""
    return merge_saved_files(read_within_memory_limit(verb, paths, options.memory), options.clock)


def merge_saved_files(files: Sequence[Saved], clock: str = CLOCKS[0]) -> Saved:
    """Merge files into a single trace, with one tree per request. Raises `TraceError`."""
    from instrument.trace.merge import merge_recordings
    from instrument.trace.request_trees import join_request_trees

    return join_request_trees(
        files[0] if len(files) == 1 else merge_recordings(files, by_wall_clock=clock == WALL).saved
    )


# Runs of the files of a folder

RUNS_NAMED = 5
"""The maximum number of runs that a message on a folder lists."""


@dataclass
class FilesOfRun:
    """The files and processes of a run. `end_ns` is the latest time in the files, in nanoseconds since 1970."""

    name: str
    files: list[str]
    end_ns: int
    processes: set[object]

    def __str__(self) -> str:
        return f"{self.name} ({len(self.files)} file{'s' * (len(self.files) != 1)})"


def _group_files_by_run(paths: Sequence[str]) -> tuple[list[str], list[FilesOfRun]]:
    files = {path: facts for path in paths if (facts := _read_metadata(path)) is not None}
    runs: list[FilesOfRun] = []
    for path, facts in sorted(files.items(), key=lambda item: item[1].origin.realtime_of(item[1].start_ns)):
        newest = max([part.facts for part in facts.processes] or [facts], key=attrgetter("end_ns"))
        origin = newest.origin
        start_ns, end_ns = origin.realtime_of(newest.start_ns), origin.realtime_of(newest.end_ns)
        process = origin.host, origin.boot, origin.pid, origin.start_ticks
        for run in runs:
            is_same = start_ns <= run.end_ns or process in run.processes
            if run.name == origin.run if origin.run else is_same and run.name.startswith(UNNAMED):
                run.files.append(path)
                run.end_ns = max(run.end_ns, end_ns)
                run.processes.add(process)
                break
        else:
            began = time.strftime("%Y%m%dT%H%M%S", time.gmtime(start_ns // 10**9))
            name = origin.run or f"{UNNAMED}{began}-{origin.pid}"
            runs.append(FilesOfRun(name, [path], end_ns, {process}))
    return [path for path in paths if path not in files], sorted(runs, key=attrgetter("end_ns"))


UNNAMED = "unnamed-"
"""The prefix of the names of runs whose files give no name."""
