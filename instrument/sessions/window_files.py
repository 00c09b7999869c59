"""The files that a process writes, such as its windows and the final summary: their paths, and the disk space that they
may use.

All workers of a service use the same templates for paths. File names contain process ids to keep the files apart.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Collection, Iterable
from itertools import chain, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from instrument import chrome
from instrument.errors import TraceError
from instrument.profile.model import Export, Summary
from instrument.recording.spans import Origin
from instrument.runtime import environment, file_writing
from instrument.runtime.faults import FAULTS
from instrument.runtime.lazy_imports import dataclass, late_pattern, replace
from instrument.runtime.threads import count_library_threads
from instrument.runtime.unpatched import poll
from instrument.sessions.recorded import Recorded

if TYPE_CHECKING:
    from instrument.recording.tally import Tally
    from instrument.trace.trace import Trace

_NUMBERED = late_pattern(r"(\{(?:run|pid|window)\})")
STREAMS = ("stderr", "stdout")
"""The values of `export.summary.to` that are standard streams and not files."""


def add_pid_to_template(template: str, *, is_first: bool) -> str:
    """Add `{pid}` to a path template that lacks it. The template of the run's first process remains unchanged."""
    if "{pid}" in template or is_first:
        return template
    folder, name = os.path.split(template)
    stem, dot, suffix = name.partition(".")
    return os.path.join(folder, f"{stem}-{{pid}}{dot}{suffix}")  # noqa: PTH118 - keeps an empty folder empty


def fill_template(template: str, *, service: str, pid: int, window: int, run: str = "") -> str:
    """Replace `{service}`, `{run}`, `{pid}` and `{window}` in a path template. Raises `TraceError` for any other name
    in braces."""
    safe_service = re.sub(r"[^\w.-]+", "_", service).encode()[:96].decode(errors="ignore").lstrip(".")
    values = {"service": safe_service or "service", "run": run, "pid": str(pid), "window": str(window)}

    def fill_field(match: re.Match[str]) -> str:
        name = match[1]
        if name not in values:
            names = ", ".join(f"{{{key}}}" for key in values)
            raise TraceError(f"the path {template!r} has the unknown field {{{name}}}; allowed: {names}")
        return values[name]

    name = re.sub(r"\{(.*?)\}", fill_field, template)
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # by an ASCII locale; the file has the name that it has by others
        name = os.fsdecode(name.encode("utf-8", "surrogateescape"))
    return name


def _pids_by_file(template: str, folder: Path, service: str) -> dict[str, int]:
    import glob

    pid_by_name: dict[str, int] = {}
    for form in {add_pid_to_template(template, is_first=first) for first in (True, False)}:
        parts = _NUMBERED.split(form)
        texts = [fill_template(text, service=service, run="", pid=0, window=0) for text in parts[::2]]
        texts[0] = os.path.join(folder, texts[0])  # noqa: PTH118 - keeps the slash where nothing follows
        fields = parts[1::2]
        numbers = (r"(\d{8}T\d{6}-\d+)" if field == "{run}" else r"(\d+)" for field in fields)
        pattern = "".join(chain.from_iterable(zip_longest(map(re.escape, texts), numbers, fillvalue="")))
        for name in glob.glob("*".join(map(glob.escape, texts))):  # noqa: PTH207 - absolute
            match = re.fullmatch(pattern, name)
            values = set(zip(fields, match.groups(), strict=True)) if match is not None else set()
            by_field = dict(values)
            if match is not None and len(by_field) == len(values):  # a field has the same value wherever it is
                # Where no number of a process is in it, it is that of the run's first one.
                pid = by_field.get("{pid}", by_field.get("{run}", "0").rpartition("-")[2])
                pid_by_name.setdefault(name, int(pid))
    return pid_by_name


def save_trace(path: str | os.PathLike[str], trace: Trace, tally: Tally | None = None) -> Path:
    """Write a trace as a recording if the path ends in `.npz`, else as Chrome JSON. Raises `TraceError`."""
    if os.fspath(path).endswith(".npz"):
        from instrument.trace import file  # numpy, which a service that writes none does without

        return file.dump(path, trace, tally)
    return chrome.dump(path, trace, tally)


def write_to_stream(stream: TextIO, text: str, limit_ns: int) -> None:
    """Write a text to a standard stream. Raises `TimeoutError` if a pipe remains full for `limit_ns`."""
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
    """The folder and names for the files that a process writes. File names of the run's first process have no process
    id."""

    folder: Path
    service: str
    run: str
    is_first: bool

    def make_path(self, template: str, window: int = 0) -> Path:
        template = add_pid_to_template(template, is_first=self.is_first)
        name = fill_template(template, service=self.service, run=self.run, pid=os.getpid(), window=window)
        return Path(name) if self.folder == environment.working_folder() else self.folder / name

    def remove_oldest_files(self, templates: Iterable[str], keep: Collection[Path], disk_bytes: int) -> int:
        """Remove old files of `templates` until the others fit into `disk_bytes`. Return the number of removed files.
        Files in `keep` remain. Unfinished files of ended processes are removed first, and the newest file of each
        running process last."""
        free_bytes = disk_bytes
        rank_by_name: dict[str, tuple[bool, int, int]] = {}
        folders = {path.parent for path in keep}
        for template in templates:
            newest: dict[int, tuple[int, str]] = {}
            for name, pid in _pids_by_file(template, self.folder, self.service).items():
                folders.add(Path(name).parent)
                try:
                    facts = os.lstat(name)
                except OSError:
                    continue  # another process has just removed it
                free_bytes -= facts.st_size
                if Path(name) in keep:
                    continue
                rank_by_name[name] = False, facts.st_mtime_ns, facts.st_size
                if pid > 0 and Path(f"/proc/{pid}").exists():
                    newest[pid] = max(newest.get(pid, (0, "")), (facts.st_mtime_ns, name))
            for at_ns, name in newest.values():
                rank_by_name[name] = True, at_ns, rank_by_name[name][2]
        free_bytes -= sum(map(file_writing.remove_unfinished_files, folders))
        oldest = ((Path(name), size) for name, (_, _, size) in sorted(rank_by_name.items(), key=itemgetter(1)))
        return len(file_writing.remove_files_until_freed(oldest, -free_bytes))

    def write_text(self, to: str, text: str, limit_ns: int) -> Path | None:
        """Write a text to `stderr`, `stdout`, or a file that only its owner can read. Return the file's path. Wait up
        to `limit_ns` for a full pipe. Raises `OSError` and `ValueError`."""
        if to in STREAMS:
            stream = sys.stderr if to == "stderr" else sys.stdout
            if stream is not None:
                write_to_stream(stream, text, limit_ns)
            return None
        path = self.make_path(to)
        with file_writing.open_replacement(path) as file:
            file.write(text.encode(errors="backslashreplace"))
        return path


# The files of a session


RECORDING = ".npz"
"""The file suffix of a saved recording."""


def asks_for_files(export: Export) -> bool:
    return export.chrome is not None or export.recording is not None


def path_templates(export: Export) -> tuple[str, ...]:
    return tuple(settings.path for settings in (export.chrome, export.recording) if settings is not None)


class Saving:
    def __init__(self, session: Recorded, folder: Path, run: str) -> None:
        self._session = session
        self.folder = folder
        self.run = run
        self._is_child = False
        self.newest: tuple[Path, ...] = ()
        """The files of the newest window."""
        self._summary: Path | None = None

    def after_fork_in_child(self) -> None:
        self._is_child = True
        self.newest, self._summary = (), None

    def write_window(self, index: int, start_ns: int, end_ns: int, origin: Origin | None = None) -> None:
        """Write the spans of a window to the profile's files. `origin` is the process's identity at the window's
        end."""
        session, place = self._session, self.destination()
        export = session.profile.export
        if not asks_for_files(export):
            return
        from instrument.report.view import Recording
        from instrument.trace import file

        trace = session.trace(start_ns, end_ns, index, origin)
        if start_ns <= session.start_ns and session.end_ns is not None and end_ns >= session.end_ns:
            trace = replace(trace, cost=session.cost())
            tally = session.tally()
        else:
            tally = session.add_probe_costs(Recording.from_trace(trace).tally)
        paths = []
        for settings, dump in ((export.chrome, chrome.dump), (export.recording, file.dump)):
            try:
                if settings is not None:
                    paths.append(dump(place.make_path(settings.path, index), trace, tally))
            except TraceError as error:
                session.account.complain(str(error))
            except Exception as fault:  # the other is written all the same
                FAULTS.note("trace file", fault)
        if paths:
            self.newest = tuple(paths)
            self._remove_oldest_files()

    def _remove_oldest_files(self) -> None:
        profile, export = self._session.profile, self._session.profile.export
        written = [*path_templates(export)]
        written += [export.summary.to] if export.summary is not None and export.summary.to not in STREAMS else []
        paths = [path for path in (*self.newest, self._summary) if path is not None]
        removed = self.destination().remove_oldest_files(
            written, [self.folder / path for path in paths], profile.limits.disk_bytes
        )
        self._session.account.count_loss("files removed to stay within limits.disk", removed)

    def destination(self) -> Destination:
        is_first = environment.is_first_process_of_run() and not self._is_child
        return Destination(self.folder, self._session.profile.service, self.run, is_first=is_first)

    def print_summary(self, settings: Summary, limit_ns: int) -> None:
        # Workers of one service write to one stream: each text names its process.
        text = self._session.summary() + f"\nProcess: {os.getpid()}\n"
        for path in self.newest:
            text += f"{'Recording' if path.suffix == RECORDING else 'Chrome trace'}: {path}\n"
        self.write_report(settings, text, limit_ns)

    def write_report(self, settings: Summary, text: str, limit_ns: int) -> None:
        try:
            self._summary = self.destination().write_text(settings.to, text, limit_ns)
        except (OSError, ValueError) as error:
            # A standard error that takes nothing does not take the complaint either.
            message = f"the summary could not be written to {settings.to}: {error}"
            self._session.account.complain(message, log=settings.to != "stderr")
        if self._summary is not None:
            FAULTS.attempt("room for the summary", self._remove_oldest_files)

    def import_file_writers(self) -> None:
        """Import the modules that `write_window` needs. If a thread imported these modules later, a fork could leave
        the child a half-done import."""
        if asks_for_files(self._session.profile.export) and self._session.profile.schedule is not None:
            with count_library_threads():
                from instrument.chrome import writing  # noqa: F401
                from instrument.sessions import step_columns  # noqa: F401
                from instrument.trace import call_tree, file, of_recording, trace  # noqa: F401

    def dump(self, path: str | os.PathLike[str]) -> Path:
        """Write the current spans and totals to a recording (`.npz`) or a Chrome trace. Raises `TraceError`."""
        return save_trace(path, self._session.trace(), self._session.tally())
