"""The writer of a session's files: each window that the profile asks for, and the summary at the end.

Writing needs numpy, which the first written file imports.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from instrument import chrome
from instrument.errors import TraceError
from instrument.profile.model import Export, Summary
from instrument.recording.spans import Origin
from instrument.runtime.cheap_start import NamedTuple, replace
from instrument.runtime.faults import FAULTS
from instrument.runtime.threads import count_library_threads
from instrument.sessions import files
from instrument.sessions.recorded import Recorded

if TYPE_CHECKING:
    from instrument.recording.tally import Tally
    from instrument.trace.trace import Trace

RECORDING = ".npz"
"""The file suffix of a saved recording."""

WITHOUT_NUMPY = (
    "numpy is not installed, so no recordings, no Chrome traces and no reports are written; install it "
    "(pip install numpy)"
)


class Written(NamedTuple):
    """The result of writing a window: the paths of its files, and a sentence per file that could not be written."""

    paths: tuple[Path, ...]
    problems: tuple[str, ...]


def asks_for_files(export: Export) -> bool:
    """Return True if the profile writes windows to files."""
    return export.chrome is not None or export.recording is not None


def why_no_files() -> str:
    """Return why this process cannot write files, "" if it can. This does not import numpy."""
    try:
        return "" if find_spec("numpy") is not None else WITHOUT_NUMPY
    except (ImportError, ValueError):  # somebody put None, or something without a spec, into sys.modules
        return WITHOUT_NUMPY


def prepare() -> None:
    """Import all modules that writing needs, before a thread of ours could: a child forked during an import would
    inherit it half-done."""
    try:
        from instrument.chrome import writing  # noqa: F401
        from instrument.sessions import step_columns  # noqa: F401
        from instrument.trace import call_tree, file, of_recording, trace  # noqa: F401
    except ImportError:
        pass  # `why_no_files` reports it, or what is written


def templates(export: Export) -> tuple[str, ...]:
    """Return the path templates of the files to which windows are written."""
    return tuple(settings.path for settings in (export.chrome, export.recording) if settings is not None)


def write(export: Export, path_of: Callable[[str], Path], trace: Trace, tally: Tally | None) -> Written:
    """Write a trace to each file that the profile asks for. If one fails, the others are still written."""
    from instrument.trace import file

    ways = [(export.chrome, chrome.dump), (export.recording, file.dump)]
    paths: list[Path] = []
    problems: list[str] = []
    for settings, dump in ways:
        if settings is None:
            continue
        try:
            paths.append(dump(path_of(settings.path), trace, tally))
        except TraceError as error:
            problems.append(str(error))
        except Exception as fault:  # the other is written all the same
            FAULTS.note("trace file", fault)
    return Written(tuple(paths), tuple(problems))


class Saving:
    """A writer of the files of one session, in `folder`."""

    def __init__(self, session: Recorded, folder: Path, run: str) -> None:
        self._session = session
        self.folder = folder
        self.run = run
        self._is_child = False
        self.newest: tuple[Path, ...] = ()
        """The files of the newest window."""
        self._summary: Path | None = None

    def after_fork_in_child(self) -> None:
        """Forget the parent's files, because the child writes its own."""
        self._is_child = True
        self.newest, self._summary = (), None

    def write_window(self, index: int, start_ns: int, end_ns: int, origin: Origin | None = None) -> None:
        """Write the spans of a window to the profile's files. `origin` is the process's identity at the window's
        end."""
        session, place = self._session, self.place()
        export = session.profile.export
        if not asks_for_files(export) or why_no_files():  # which has been reported
            return
        trace = session.trace(start_ns, end_ns, index, origin)
        if start_ns <= session.start_ns and session.end_ns is not None and end_ns >= session.end_ns:
            trace = replace(trace, cost=session.cost())
            tally: Tally | None = session.tally()
        else:
            tally = self._counted(trace)
        written = write(export, lambda template: place.path(template, index), trace, tally)
        for problem in written.problems:
            session.account.complain(problem)
        if written.paths:
            self.newest = written.paths
            self._make_room()

    def _counted(self, trace: Trace) -> Tally | None:
        """Return the totals of a window, None without numpy. Readers of the file then count the spans themselves."""
        try:
            from instrument.report.view import Recording

            return self._session.charge_probes(Recording.of_trace(trace).tally)
        except ImportError:
            return None

    def _make_room(self) -> None:
        """Remove the oldest files of this service until the rest fits into `limits.disk`. Count them as lost."""
        profile, export = self._session.profile, self._session.profile.export
        written = [*templates(export)]
        written += [export.summary.to] if export.summary is not None and export.summary.to not in files.STREAMS else []
        paths = [path for path in (*self.newest, self._summary) if path is not None]
        removed = self.place().make_room(written, [self.folder / path for path in paths], profile.limits.disk_bytes)
        self._session.account.count_loss("files removed to stay within limits.disk", removed)

    def place(self) -> files.Destination:
        is_first = files.is_main() and not self._is_child
        return files.Destination(self.folder, self._session.profile.service, self.run, is_first=is_first)

    def print_summary(self, settings: Summary, limit_ns: int) -> None:
        if why_no_files():  # which has been reported
            return
        # Workers of one service write to one stream: each text names its process.
        text = self._session.summary() + f"\nProcess: {os.getpid()}\n"
        for path in self.newest:
            text += f"{'Recording' if path.suffix == RECORDING else 'Chrome trace'}: {path}\n"
        self.write_report(settings, text, limit_ns)

    def write_report(self, settings: Summary, text: str, limit_ns: int) -> None:
        """Write a report where the profile prints its summary, within `limit_ns`."""
        try:
            self._summary = self.place().write_text(settings.to, text, limit_ns)
        except (OSError, ValueError) as error:
            # A standard error that takes nothing does not take the complaint either.
            message = f"the summary could not be written to {settings.to}: {error}"
            self._session.account.complain(message, log=settings.to != "stderr")
        if self._summary is not None:
            FAULTS.attempt("room for the summary", self._make_room)

    def prepare_files(self) -> None:
        """Import the modules that the session's threads need to write windows. Complain if files cannot be written."""
        export = self._session.profile.export
        is_wanted = export.summary is not None or asks_for_files(export)
        if asks_for_files(export) and self._session.profile.schedule is not None:
            with count_library_threads():
                prepare()
        problem = why_no_files() if is_wanted else ""
        if problem:
            self._session.account.complain(f"export: {problem}")
