"""The paths of the files that a process writes, how much disk they may use, and how to write a report.

All workers of a service use the same templates for paths. File names contain process ids to keep the files apart.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Collection, Iterable
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from instrument.errors import TraceError
from instrument.runtime import atomic
from instrument.runtime.cheap_start import LazyModule, dataclass, late_pattern, replace
from instrument.runtime.unpatched import poll

if TYPE_CHECKING:
    from instrument import chrome
    from instrument.profile.model import Parquet
    from instrument.recording.tally import Tally
    from instrument.trace import text as trace_text
    from instrument.trace.trace import Trace
else:
    chrome, trace_text = LazyModule("instrument.chrome"), LazyModule("instrument.trace.text")

_NUMBERED = late_pattern(r"(\{(?:run|pid|window)\})")
RUN_VARIABLE = "INSTRUMENT_RUN"
SHARED_RUN_VARIABLE = "INSTRUMENT_RUN_NAME"
_RUN = late_pattern(r"\d{8}T\d{6}-\d+")
STREAMS = ("stderr", "stdout")
"""The values of `export.summary.to` that are standard streams and not files."""


def with_pid(template: str, *, is_first: bool) -> str:
    """Return a path template with `{pid}` added, unless it has one or belongs to the run's first process."""
    if "{pid}" in template or is_first:
        return template
    folder, name = os.path.split(template)
    stem, dot, suffix = name.partition(".")
    return os.path.join(folder, f"{stem}-{{pid}}{dot}{suffix}")  # noqa: PTH118 - keeps an empty folder empty


def new_run() -> str:
    """Return a name for a new run: the UTC time in seconds, and the id of this process."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"


def run_of_environment() -> str:
    """Return the name of the `instrument run` that started this process, "" for none."""
    run = os.environ.get(RUN_VARIABLE, "")
    return run if _RUN.fullmatch(run) else ""


def run_of_keys() -> str:
    """Return the name of the run in which a key is unique: the run of several hosts, else this `instrument run`."""
    return run_shared() or run_of_environment()


def run_shared() -> str:
    """Return the name that the runs on several hosts share, from the environment, "" for none."""
    return os.environ.get(SHARED_RUN_VARIABLE, "")


def file_name(template: str, *, service: str, pid: int, window: int, run: str = "") -> str:
    """Fill in `{service}`, `{run}`, `{pid}` and `{window}` of a path template. The service gets only safe characters.

    Raises `TraceError` for any other name in braces.
    """
    safe_service = re.sub(r"[^\w.-]+", "_", trace_text.clean(service)).encode()[:96].decode(errors="ignore").lstrip(".")
    values = {"service": safe_service or "service", "run": run, "pid": str(pid), "window": str(window)}

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in values:
            names = ", ".join(f"{{{key}}}" for key in values)
            raise TraceError(f"the path {template!r} has the unknown field {{{name}}}; allowed: {names}")
        return values[name]

    name = re.sub(r"\{(.*?)\}", value, template)
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # by an ASCII locale; the file has the name that it has by others
        name = os.fsdecode(name.encode("utf-8", "surrogateescape"))
    return name


def is_main() -> bool:
    """Return True in the process that `instrument run` started, and outside of `instrument run`."""
    main = os.environ.get("INSTRUMENT_RUN_PID")
    return main is None or main == str(os.getpid())


def path_of(template: str, folder: Path, service: str, run: str, window: int) -> Path:
    """Return the path for a template. A relative path is below `folder`, in which the session began."""
    name = file_name(template, service=service, run=run, pid=os.getpid(), window=window)
    return Path(name) if folder == working_folder() else folder / name


def make_room(templates: Iterable[str], folder: Path, service: str, keep: Collection[Path], disk_bytes: int) -> int:
    """Remove the oldest files of the templates until the rest fits into `disk_bytes`. Return the count of removed ones.

    Files in `keep` stay. Unfinished files of ended processes are removed first, the newest file of each other running
    process last.
    """
    free_bytes = disk_bytes
    rank_by_name: dict[str, tuple[bool, int, int]] = {}
    folders = {path.parent for path in keep}
    for template in templates:
        newest: dict[int, tuple[int, str]] = {}
        for name, pid in _pids_by_file(template, folder, service).items():
            folders.add(Path(name).parent)
            try:
                facts = os.lstat(name)
            except OSError:
                continue  # another process has just removed it
            free_bytes -= facts.st_size
            if Path(name) in keep:
                continue
            rank_by_name[name] = False, facts.st_mtime_ns, facts.st_size
            if _is_alive(pid):
                newest[pid] = max(newest.get(pid, (0, "")), (facts.st_mtime_ns, name))
        for at_ns, name in newest.values():
            rank_by_name[name] = True, at_ns, rank_by_name[name][2]
    free_bytes -= sum(map(atomic.remove_abandoned, folders))
    oldest = ((Path(name), size) for name, (_, _, size) in sorted(rank_by_name.items(), key=itemgetter(1)))
    return len(atomic.remove_first(oldest, -free_bytes))


def _pids_by_file(template: str, folder: Path, service: str) -> dict[str, int]:
    """Return the files of a template, with and without `{pid}`, and the process id in each name, 0 for none."""
    import glob

    pid_by_name: dict[str, int] = {}
    for form in {with_pid(template, is_first=first) for first in (True, False)}:
        pattern, numbered = "", ""
        for part in _NUMBERED.split(form):
            if _NUMBERED.fullmatch(part):
                pattern += "*"
                of_process = r"(?P=pid)" if "(?P<pid>" in numbered else r"(?P<pid>\d+)"
                of_run = r"(?P=run)" if "(?P<run>" in numbered else r"(?P<run>\d{8}T\d{6}-\d+)"
                numbered += {"{pid}": of_process, "{run}": of_run}.get(part, r"\d+")
                continue
            text = file_name(part, service=service, run="", pid=0, window=0)
            text = text if pattern else os.path.join(folder, text)  # noqa: PTH118 - keeps the slash where nothing follows
            pattern += glob.escape(text)
            numbered += re.escape(text)
        for name in glob.glob(pattern):  # noqa: PTH207 - absolute
            match = re.fullmatch(numbered, name)
            if match is not None:
                # Where no number of a process is in it, it is that of the run's first one.
                of = {"run": "0", **match.groupdict()}
                pid_by_name.setdefault(name, int(of.get("pid", of["run"].rpartition("-")[2])))
    return pid_by_name


def _is_alive(pid: int) -> bool:
    return pid > 0 and Path(f"/proc/{pid}").exists()


def save(path: str | os.PathLike[str], trace: Trace, tally: Tally | None = None) -> Path:
    """Write a trace as a recording if the path ends in `.npz`, else as Chrome JSON. Raises `TraceError`."""
    if os.fspath(path).endswith(".npz"):
        from instrument.trace import file  # numpy, which a service that writes none does without

        return file.dump(path, trace, tally)
    return chrome.dump(path, trace, tally)


def write(stream: TextIO, text: str, limit_ns: int) -> None:
    """Write a text to a standard stream. Raises `TimeoutError` if the pipe stays full for `limit_ns`."""
    if stream not in (sys.__stdout__, sys.__stderr__):
        stream.write(text)  # the host's own
        stream.flush()
        return
    stream.flush()
    writable = poll()
    writable.register(stream.fileno(), select.POLLOUT)
    end_ns = time.monotonic_ns() + limit_ns
    data = text.encode(stream.encoding, "backslashreplace")
    while data:
        if not writable.poll(max(end_ns - time.monotonic_ns(), 0) / 1e6):
            raise TimeoutError("nobody reads it")
        try:
            data = data[os.write(stream.fileno(), data[: select.PIPE_BUF]) :]
        except BlockingIOError:
            pass  # shared with somebody who was faster


@dataclass(frozen=True, slots=True)
class Destination:
    """The folder, service and run from which a process's files get their paths.

    The files of the run's first process need no process id in their names.
    """

    folder: Path
    service: str
    run: str
    is_first: bool

    def path(self, template: str, window: int = 0) -> Path:
        """Return this process's path for a template."""
        return path_of(with_pid(template, is_first=self.is_first), self.folder, self.service, self.run, window)

    def make_room(self, templates: Iterable[str], keep: Collection[Path], disk_bytes: int) -> int:
        """Remove the oldest files of the templates, as the function `make_room` does in this destination's folder."""
        return make_room(templates, self.folder, self.service, keep, disk_bytes)

    def write_text(self, to: str, text: str, limit_ns: int) -> Path | None:
        """Write a text to `stderr`, `stdout`, or a file that only its owner can read. Return the path of the file.

        Wait for a full pipe at most `limit_ns`. Raises `OSError` and `ValueError`.
        """
        if to in STREAMS:
            stream = sys.stderr if to == "stderr" else sys.stdout
            if stream is not None:
                write(stream, text, limit_ns)
            return None
        path = self.path(to)
        with atomic.replacing(path) as file:
            file.write(text.encode(errors="backslashreplace"))
        return path


def dataset_settings(settings: Parquet) -> Parquet:
    """Return the dataset's settings with an absolute path, because the agent runs in another folder."""
    return settings if "://" in settings.path else replace(settings, path=str(working_folder() / settings.path))


def working_folder() -> Path:
    """Return the working directory, "/" if it has been removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/")
