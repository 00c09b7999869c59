"""The agent's work at the end of a process or a run: it prints messages, and saves captures and files for reports.

A message goes to the service's standard error, which is open only during the write. A program that reads standard
error would otherwise wait for the agent after the service's end.
"""

from __future__ import annotations

import os
import re
import select
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from instrument.agent import crash_capture, processes
from instrument.agent.causes_of_end import describe_end, describe_vanishing
from instrument.agent.processes import EXITED, VANISHED, Process, Run
from instrument.runtime import agent_socket, file_writing
from instrument.runtime.environment import PROC
from instrument.runtime.lazy_imports import NamedTuple

SYSTEM_LOG = Path("/dev/log")

Says = Callable[[str], object] | None
"""A function that receives a message if standard error and the system's log fail."""

PIPE_WAIT_MS = 50
"""Milliseconds to wait for a full pipe of a standard error. The message is then cut."""

MESSAGE_SUFFIX = ".txt"
"""The suffix of a text file with a message that could not be printed. The file is next to the capture."""

_PIDFD_GETFD = 438
"""The number of the system call pidfd_getfd(2), the same on all architectures. Python has no function for it."""


def deliver_message(says: Says, run: Run, text: str, process: Process | None = None) -> None:
    """Write a message to the standard error of a process, or of the run if `process` is None.

    If that fails, the message goes to the system's log. If that fails too, `says` is called with the message. If `says`
    is None, the message goes to a text file next to the capture.
    """
    line = text if text.endswith("\n") else f"{text}\n"
    data = line.encode(errors="backslashreplace")
    targets = [run.stderr, *(str(member.facts.get("stderr", "")) for member in run.processes)]
    ordered = dict.fromkeys(targets if process is None else [str(process.facts.get("stderr", ""))])
    paths = (path for target in ordered or [""] for path in _paths_to_stderr(run, target))
    if any(_write_to_path(path, data) for path in paths) or _write_syslog(line):
        return
    if says is not None:
        says(text)
    elif process is not None and process.saved:
        with suppress(OSError), file_writing.open_replacement(Path(process.saved).with_suffix(MESSAGE_SUFFIX)) as file:
            file.write(f"{text}\n".encode(errors="backslashreplace"))


def _paths_to_stderr(run: Run, target: str) -> Iterator[str]:
    elsewhere = {process.pid for process in run.processes if process.is_elsewhere}
    numbers = {process.pid for process in run.processes if not process.ended_ns} | {run.first}
    for pid in numbers - elsewhere - {0}:
        path = PROC / str(pid) / "fd/2"
        with suppress(OSError):
            if not target or str(path.readlink()) == target:
                yield str(path)
    if target.startswith("/"):
        yield target


def _write_to_path(path: str, data: bytes) -> bool:
    try:
        descriptor = _open_descriptor(path)
    except OSError:
        return False
    try:
        kind = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) or stat.S_ISSOCK(kind)):
            return False
        waiting = select.poll()
        waiting.register(descriptor, select.POLLOUT)
        unwritten = memoryview(data)
        while unwritten and waiting.poll(PIPE_WAIT_MS):  # so much then fits without a wait
            unwritten = unwritten[os.write(descriptor, unwritten[: select.PIPE_BUF]) :]
        return len(unwritten) < len(data)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _open_descriptor(path: str) -> int:
    """Open a path for writing. The path `/proc/PID/fd/N` gives a duplicate of the process's descriptor N, with the same
    file offset."""
    parts = Path(path).parts
    if parts[1:2] == ("proc",):
        with suppress(OSError, AttributeError, ImportError):
            from ctypes import CDLL

            of_process = os.pidfd_open(int(parts[2]))
            try:
                descriptor = int(CDLL(None).syscall(_PIDFD_GETFD, of_process, int(parts[4]), 0))
            finally:
                os.close(of_process)
            if descriptor >= 0:
                return descriptor
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)


def _write_syslog(text: str) -> bool:
    if not SYSTEM_LOG.exists():
        return False
    import syslog

    syslog.openlog("instrument", 0, syslog.LOG_DAEMON)
    for line in text.splitlines():
        syslog.syslog(syslog.LOG_WARNING, line)
    return True


Answer = Mapping[str, Any]

CAPTURE = "-died.npz"
"""The end of the file name of a capture."""

REPORT_SUFFIX = "-left.npz"
"""The file suffix of a recording that is saved only for a run's report, and removed with the run."""

ENDED_BEFORE = "ended under an agent before this one"

_REPORT_FILE = re.compile(
    rf"(before-(?P<count>\d+)|(?P<pid>\d+))-\d+-(?P<run>[\w.-]*){re.escape(REPORT_SUFFIX)}", re.ASCII
)

_RUN_IN_NAME, _NUMBER_IN_NAME = re.compile(r"\d{8}T\d{6}-\d+"), re.compile(r"-?\d+(T\d+)?")


def collect_process_facts(process: Process) -> dict[str, Any]:
    names = ("service", "profile", "digest", "generation", "run", "recorder", "folder", "call_ns", "request_ns")
    return {
        **{name: process.facts.get(name) for name in names},
        "pid": process.pid,
        "started": process.started,
        "is_first": process.pid == process.run.first,
        "has_recorded": process.has_recorded,
        "joined_ns": process.joined_ns,
        "ended_ns": process.ended_ns,
        "is_missed": process.is_missed,
        "how": process.end_kind,
        "status": process.status,
        "hears": process.hears,
    }


def make_report_job(run: Run, left_before: Sequence[ReportedProcess]) -> Callable[[], Answer]:
    of = next(
        (process.facts["report"] for process in reversed(run.processes_with_spans()) if process.facts.get("report")),
        None,
    )
    settings = of or {"views": ["brief"], "options": {}}
    parts = []
    for process in run.processes_with_spans():
        is_notable = process.end_kind == VANISHED or bool(process.status)
        line = _format_process_line(process)
        parts.append(ReportedProcess(line, process.saved, is_notable, is_reported=process.is_reported))
    if run.folded_ends:
        ends = ", ".join(f"{count} {end}" for end, count in run.folded_ends.most_common())
        unread = f"; of {run.unfolded} the recording could not be read" if run.unfolded else ""
        name = f"that ended before the others: {ends}{unread}"
        parts.insert(0, ReportedProcess(name, run.folded, True, run.folded_ends.total()))
    return lambda: combined_report([*left_before, *parts], settings["views"], settings["options"])


def list_processes_of_earlier_agent(folder: Path, run: Run) -> list[ReportedProcess]:
    """Return the run's processes that ended under an earlier agent."""
    known_paths, parts = {run.folded, *(process.saved for process in run.processes)}, []
    for path, of in _list_report_files(folder):
        saved = str(path.readlink() if path.is_symlink() else path)
        if of["run"] != _make_safe_run_name(run) or saved in known_paths:
            continue
        if path.is_symlink():
            name = f"{of['pid']} (without a goodbye; {ENDED_BEFORE}), {saved:.200}"
        else:
            name = f"that {ENDED_BEFORE}" if of["count"] else f"{of['pid']} ({ENDED_BEFORE})"
        is_notable = bool(of["count"]) or path.is_symlink()
        parts.append(ReportedProcess(name, str(path), is_notable, int(of["count"] or 1)))
    return parts


def _list_report_files(folder: Path) -> list[tuple[Path, re.Match[str]]]:
    paths = agent_socket.list_matching_paths(folder, f"*{REPORT_SUFFIX}")
    return [(path, of) for path in paths if (of := _REPORT_FILE.fullmatch(path.name)) is not None]


def _make_safe_run_name(run: Run) -> str:
    return re.sub(r"[^\w.-]", "_", run.name, flags=re.ASCII)


def _format_process_line(process: Process) -> str:
    files = process.files or (process.goodbye or {}).get("files", ())
    if process.saved.endswith(CAPTURE):
        files = [process.saved]
    return "".join([f"{process.pid} ({describe_end(process)})", *(f", {name!s:.200}" for name in files[:2])])


def make_batch_save_job(processes: Sequence[Process], folder: Path) -> Callable[[], Answer]:
    jobs = [make_save_job(process, process.saved, folder) for process in processes]

    def run_job_safely(job: Callable[[], Answer]) -> Answer:
        try:
            return job()
        except Exception as problem:
            return {"error": f"{type(problem).__name__}: {problem!s:.500}"}

    return lambda: {"each": [run_job_safely(job) for job in jobs]}


def make_save_job(process: Process, path: str, folder: Path) -> Callable[[], Answer]:
    """Return a job that saves the recording of an ended process. The job continues if the agent is killed."""
    copies = process.facts.get("files", ()) if process.end_kind == EXITED else ()
    end_kind = describe_vanishing(process) if process.end_kind == VANISHED else ""
    end_ns, goodbye = None if process.is_missed else process.ended_ns or None, process.goodbye or {}

    def job() -> Answer:
        with processes.locked_note(folder, process):
            earlier = crash_capture.load_capture(path, str(process.facts.get("run"))) if process.is_missed else None
            if earlier is None and process.memory < 0:
                return {"error": explain_read_failure(process)}
            return earlier or crash_capture.save_recording(
                process.memory, path, end_kind=end_kind, end_ns=end_ns, goodbye=goodbye, copies=copies
            )

    return job


def path_for_report(folder: Path, process: Process) -> str:
    return str(folder / f"{process.pid}-{time.monotonic_ns()}-{_make_safe_run_name(process.run)}{REPORT_SUFFIX}")


def path_for_merged(folder: Path, run: Run) -> str:
    return str(
        folder / f"before-{run.folded_ends.total()}-{time.monotonic_ns()}-{_make_safe_run_name(run)}{REPORT_SUFFIX}"
    )


def link_to_capture(folder: Path, process: Process) -> str:
    link = path_for_report(folder, process)
    try:
        Path(link).symlink_to(process.saved)
    except OSError:
        return ""
    return link


def captures_for_reports(folder: Path) -> set[str]:
    return {str(path.readlink()) for path, _ in _list_report_files(folder) if path.is_symlink()}


def remove_report_files(folder: Path, run: Run) -> None:
    remove_listed_report_files(
        folder, [str(path) for path, of in _list_report_files(folder) if of["run"] == _make_safe_run_name(run)]
    )


def remove_listed_report_files(folder: Path, paths: Iterable[str]) -> None:
    for path in paths:
        if path.endswith(REPORT_SUFFIX) and Path(path).parent == folder:
            with suppress(OSError):
                Path(path).unlink(missing_ok=True)


def remove_abandoned_report_files(folder: Path, runs: Iterable[Run], says: Callable[[str], object]) -> None:
    living_runs, counts = {_make_safe_run_name(run) for run in runs}, Counter[str]()
    for path, of in _list_report_files(folder):
        if of["run"] not in living_runs:
            counts[of["run"]] += int(of["count"] or 1)
            remove_listed_report_files(folder, [str(path)])
    for run, count in counts.items():
        says(
            f"instrument: no report covers {count} of the processes of the run {run}, which {ENDED_BEFORE}: none of "
            "the others has come back"
        )


def explain_read_failure(process: Process) -> str:
    if process.is_missed:
        return "the agent of its run had gone before that was done, and what it recorded went with it"
    return "it recorded where nobody else can read"


def path_of_capture(process: Process, folder: Path | None) -> str:
    path = Path(str(process.facts["captures"]))
    path = path if folder is None else folder / path.name
    number = "" if f"-{process.pid}" in path.stem else f"-{process.pid}"
    return str(path.with_name(f"{path.stem}{number}{CAPTURE}"))


def remove_oldest_files(saved: Path, service: str, kept_paths: Collection[str], disk_bytes: int) -> int:
    """Remove a service's oldest files until the remaining files fit into `disk_bytes`. Return the number of removed
    files.

    The file `saved` and the files in `kept_paths` are never removed.
    """
    service_part, files = _mask_numbers(saved.name, service), []
    for path in agent_socket.list_matching_paths(saved.parent, f"*{CAPTURE}" if saved.name.endswith(CAPTURE) else "*"):
        if _mask_numbers(path.name, service) != service_part:
            continue
        with suppress(OSError):  # another agent has just removed it
            facts = path.stat()
            files.append((path == saved or str(path) in kept_paths, facts.st_mtime_ns, facts.st_size, path))
    over_bytes = sum(size for _, _, size, _ in files) - disk_bytes
    removed = file_writing.remove_files_until_freed(
        ((path, size) for stays, _, size, path in sorted(files) if not stays), over_bytes
    )
    for path in removed:
        with suppress(OSError):
            path.with_suffix(MESSAGE_SUFFIX).unlink(missing_ok=True)
    return len(removed)


def _mask_numbers(name: str, service: str) -> str:
    """Remove the numbers of the run and the process from a file name. All files of a service then have the same
    name."""
    run = _RUN_IN_NAME.search(name)
    at = run.start() if run is not None else len(service) if name.startswith(service) else 0
    return f"{name[:at]}*{_NUMBER_IN_NAME.sub('', name[at:])}"


def format_vanished_message(process: Process, answer: Answer) -> str:
    service = f" of {process.facts['service']}" if process.facts.get("service") else ""
    saved = f"saved as {answer['path']}" if answer.get("path") else f"nothing of it is saved: {answer.get('error')}"
    return f"instrument: process {process.pid}{service} {answer.get('died') or describe_vanishing(process)}; {saved}"


def export_loss_line(lost: Mapping[str, int]) -> str:
    counts = ", ".join(f"{count} {reason}" for reason, count in lost.items())
    return f"instrument: some data of this run has not arrived at its destination: {counts}"


def describe_empty_run(pid: int, after_s: float) -> str:
    return (
        f"instrument: {after_s:g} s after its start no process of this run records anything"
        f"{_explain_missing_sitecustomize(pid)}. Give `instrument run ...` to that program as the command that it "
        "is to run, or call instrument.start() in the service"
    )


def _explain_missing_sitecustomize(pid: int) -> str:
    try:
        environ = dict(line.partition(b"=")[::2] for line in (PROC / str(pid) / "environ").read_bytes().split(b"\0"))
    except OSError:
        return ""
    autostart = Path(__file__).parents[1] / "sessions/autostart"
    for folder in os.fsdecode(environ.get(b"PYTHONPATH", b"")).split(os.pathsep):
        if folder and Path(folder) == autostart:
            return ": something on the way keeps our sitecustomize from being loaded"
        customization = Path(folder, "sitecustomize.py")
        if folder and customization.exists():
            return f": {customization} runs in place of ours"
    return ": something on the way has taken our folder off PYTHONPATH"


MOST_REPORT_BYTES = 100_000
"""The maximum size of a report in bytes. A longer report is cut, because it must fit into one packet of a socket."""

CUT_NOTE = "\n\n(The rest is left out here; `instrument report FILE...` has all of what processes have saved.)\n"

MOST_NAMED_PROCESSES = 12


class ReportedProcess(NamedTuple):
    """An entry of the process list in a run's report: one process, or several processes with a common recording.

    - `path`: the path of the recording, or empty
    - `is_notable`: True if a process vanished or failed
    - `processes`: the number of processes
    - `is_reported`: True if the process printed a report before other processes joined
    """

    name: str
    path: str
    is_notable: bool = False
    processes: int = 1
    is_reported: bool = False


def combined_report(
    parts: Sequence[ReportedProcess], views: Sequence[str], options: Mapping[str, Any]
) -> dict[str, str]:
    from instrument.errors import TraceError
    from instrument.report.section import format_summary
    from instrument.report.view import Options, Recording
    from instrument.trace import file
    from instrument.trace.merge import merge_recordings

    read, lines = [], []
    for part in parts:
        line = part.name if part.processes == 1 else f"{part.processes} {part.name}"
        try:
            if part.path:
                read.append(file.load(part.path))
            else:
                line += ", which printed a report of its own" if part.is_reported else ", which left no recording"
        except TraceError as problem:
            line += f", whose recording cannot be read: {problem!s:.200}"
        lines.append(line)
    if not read:
        raise TraceError("no process of the run has a recording")
    text = format_summary(views, Recording.from_file(merge_recordings(read).saved), Options.from_mapping(options))
    if len(text.encode()) > MOST_REPORT_BYTES:
        text = text.encode()[:MOST_REPORT_BYTES].decode(errors="ignore").rpartition("\n")[0] + CUT_NOTE
    places = sorted(sorted(range(len(parts)), key=lambda place: not parts[place].is_notable)[:MOST_NAMED_PROCESSES])
    more = len(parts) - len(places)
    text += f"\nProcesses: {sum(part.processes for part in parts)}\n"
    text += "".join(f"  {lines[place]}\n" for place in places)
    return {"report": text + (f"  and {more} more\n" if more else "")}


def merge_files(paths: Sequence[str], into: str) -> dict[str, Any]:
    """Merge recordings into the file `into`, which has a bounded size. Remove the merged files that are in the same
    folder as `into`."""
    from instrument.errors import TraceError
    from instrument.trace import file
    from instrument.trace.merge import fold_recordings

    read = []
    for path in paths:
        with suppress(TraceError):
            read.append(file.load(path))
    if not read:
        raise TraceError(f"none of {len(paths)} recordings can be read")
    saved = fold_recordings(read)
    file.dump(into, saved.trace, saved.read_or_count_totals())
    for merged_path in map(Path, paths):
        if merged_path.parent == Path(into).parent:
            merged_path.unlink(missing_ok=True)
    return {"path": into, "unread": len(paths) - len(read)}
