"""The processes of a run in the agent: their facts, their states and ends, and a note on each for the next agent.

Notes are files next to the run's socket. A living process joins the next agent by itself. The next agent knows a
process only by its note if it ended without an agent, or before its recording was saved. Its rows are lost, unless they
are in a file (`limits.ring_dir`) or a child of the former agent still saves them. That child locks the note.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instrument import clock
from instrument.agent.loop import Connection
from instrument.recording.memory_layout import RecordingHead
from instrument.runtime import atomic, run_folder

PROC = Path("/proc")
CONTROL_GROUPS = Path("/sys/fs/cgroup")

_GET_INFO, _EXIT = 0xC040FF0B, 1 << 3
"""`PIDFD_GET_INFO`, and its flag for the exit status (linux/pidfd.h, since Linux 6.15)."""
_INFO = struct.Struct("=QQ11Ii")

_EXIT_CODE_FIELD = 49
"""The index of exit_code in `/proc/PID/stat`, counted after the name of the program (man 5 proc)."""


def status_of(exit_fd: int, pid: int) -> int | None:
    """Return the exit status that a process's parent gets, None if unknown."""
    with suppress(OSError):
        info = _INFO.unpack(fcntl.ioctl(exit_fd, _GET_INFO, _INFO.pack(_EXIT, *[0] * 13)))
        if info[0] & _EXIT:
            return int(info[-1])
    with suppress(OSError, ValueError, IndexError):  # it waits for its parent
        words = (PROC / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        if words[0] in "ZX":
            return int(words[_EXIT_CODE_FIELD])
    return None


def memory_events(pid: int) -> Path | None:
    """Return the file with the event counts of a process's memory control group, None without one."""
    with suppress(OSError, ValueError, StopIteration):
        lines = (PROC / str(pid) / "cgroup").read_text().splitlines()
        group = next(line[3:] for line in lines if line.startswith("0::"))
        path = CONTROL_GROUPS / os.path.relpath(group, "/") / "memory.events"
        return path if path.is_file() else None
    return None


def oom_kills(events: Path | None) -> int:
    """Return the count of processes in the group that were killed for lack of memory so far."""
    with suppress(OSError, ValueError, IndexError):
        for line in events.read_text().splitlines() if events is not None else ():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def has_content(fd: int) -> bool:
    """Return True if a span has begun in the recording's current session; False for any other file."""
    try:
        head = RecordingHead(fd)
        return any(ring.head for ring in head.rings()) or head.has_open_span()
    except OSError:
        return False


def has_open_span(fd: int) -> bool:
    """Return True if a span is open, or if the recording cannot be read."""
    try:
        return RecordingHead(fd).has_open_span()
    except OSError:
        return True


def rows_kept(fd: int) -> int:
    """Return the approximate number of spans in the rings of a recording; 0 for a file that is no recording."""
    try:
        return RecordingHead(fd).rows_kept()
    except OSError:
        return 0


GOODBYE, VANISHED, REPLACED, EXITED = "goodbye", "vanished", "replaced", "exited"
"""The kinds of a process's end. It said goodbye, or it vanished without one. It was replaced by another program or
another recording. It exited by `os._exit(0)` without an open span, as workers forked for a job do."""

_IMAGE_BYTES = 4096


@dataclass(eq=False, kw_only=True)
class Process:
    """One recording of one process, with the `facts` of its join and of its `goodbye`.

    It `hears` requests once it has a control thread, which starts with its first recorded span. `switch` is the newest
    request to record or not. `memory` is the descriptor of its recording, and `exit_fd` becomes readable at its end;
    both are -1 for none. `saved` is the file of its recording for the run's report, incomplete while `is_saving`, and
    written by the process if `saves_itself`.
    `link` is a symbolic link to `saved` if that is a capture. `files` are the profile's files that the agent wrote for
    it. A process that was alone printed its own report (`is_reported`), and has no `saved`. `is_missed`: an earlier
    agent ended before it had saved the recording. `is_elsewhere`: its process id is of another namespace; it lives as
    long as it is connected. `ended_ns` is 0 while it lives. `status` has the form of `os.waitpid`, None if unknown.
    `ports` are those at which it has `listened` and got connections without a recorded request. It `has_requests` once
    it reports one, and may share a network with its agent (`shares_network`). `memory_events` is the file in which its
    control group counts processes killed for lack of memory, `oom_kills` that count as it joined.
    """

    run: Run
    pid: int
    started: int
    facts: dict[str, Any]
    joined_ns: int
    memory: int = -1
    exit_fd: int = -1
    connection: Connection | None = None
    has_recorded: bool = False
    hears: bool = False
    switch: dict[str, Any] | None = None
    goodbye: dict[str, Any] | None = None
    saved: str = ""
    link: str = ""
    is_saving: bool = False
    saves_itself: bool = False
    files: Sequence[str] = ()
    is_reported: bool = False
    is_missed: bool = False
    is_elsewhere: bool = False
    ports: frozenset[int] = frozenset()
    listened: frozenset[int] = frozenset()
    shares_network: bool = False
    has_requests: bool = False
    ended_ns: int = 0
    end_kind: str = ""
    status: int | None = None
    memory_events: Path | None = None
    oom_kills: int = 0
    image: bytes = b""

    @property
    def lives(self) -> bool:
        """Return True if the process has neither ended nor said goodbye."""
        return not self.ended_ns and self.goodbye is None

    def check_recorded(self) -> bool:
        """Return True if the process has recorded a span, by its own message or by its recording."""
        self.has_recorded = self.has_recorded or (self.memory >= 0 and has_content(self.memory))
        return self.has_recorded

    def has_exited(self) -> bool | None:
        """Return True if the process has ended according to the system, None if unknown."""
        if self.exit_fd >= 0:
            waiting = select.poll()
            waiting.register(self.exit_fd, select.POLLIN)
            return bool(waiting.poll(0))
        if self.started and not self.is_elsewhere:
            return clock.start_ticks(PROC / str(self.pid) / "stat") != self.started
        return None

    def has_become_another_program(self) -> bool:
        """Return True if the process has executed another program since it joined."""
        now = b"" if self.is_elsewhere else program_of(self.pid)
        return bool(self.image and now and now != self.image)

    def release(self) -> None:
        """Close its descriptors."""
        for descriptor in (self.memory, self.exit_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self.memory = self.exit_fd = -1


@dataclass(eq=False)
class Run:
    """The processes that one `instrument run` started.

    `first` is the process id of its command, 0 if unknown. `is_reported` is True once a report of all spans so far is
    printed or under way. `waiting` is the connection of the process that waits for the report. `folded` is the file
    with the totals of the processes that ended first. `folded_ends` counts these by the kind of their end, `unfolded`
    those with unreadable recordings. `captures` counts vanished processes. The run `is_scraped` after its first scrape.
    `stderr` is the standard error of the first process, or of the first one to join, as helpers may have another.
    """

    name: str
    first: int = 0
    first_fd: int = -1
    first_has_joined: bool = False
    processes: list[Process] = field(default_factory=list)
    is_reported: bool = False
    waiting: Connection | None = None
    captures: int = 0
    is_scraped: bool = False
    stderr: str = ""
    folded: str = ""
    folded_ends: Counter[str] = field(default_factory=Counter)
    unfolded: int = 0

    def living(self) -> list[Process]:
        """Return the processes that have neither ended nor said goodbye."""
        return [process for process in self.processes if process.lives]

    def find_living(self, pid: int, started: int) -> Process | None:
        """Return the living process with that id and start time."""
        return next((process for process in self.living() if (process.pid, process.started) == (pid, started)), None)

    def is_over(self) -> bool:
        """Return True if no process of the run is known to live."""
        return not self.first_lives() and not self.living()

    def first_lives(self) -> bool:
        """Return True if the run's first process has not ended."""
        if self.first_fd < 0:
            return False
        waiting = select.poll()
        waiting.register(self.first_fd, select.POLLIN)
        return not waiting.poll(0)

    def first_has_left(self) -> bool:
        """Return True if the run's first process has said goodbye. It may take seconds to end after that."""
        return any(process.pid == self.first and process.goodbye is not None for process in self.processes)

    def is_last(self, leaving: Process) -> bool:
        """Return True if a leaving process prints the run's report, because no other living process could.

        The run's first process could, if it has joined, and so could any process that has recorded. If the leaving
        process has another standard error than the service, the agent prints the report.
        """
        if self.stderr.startswith("/") and leaving.facts.get("stderr") != self.stderr:
            return False
        other_processes = [process for process in self.living() if process is not leaving]
        for process in other_processes:
            if (process.pid == self.first or process.check_recorded()) and not process.has_exited():
                return False
        has_left = leaving.pid == self.first or self.first_has_left()
        return has_left or not self.first_has_joined or not self.first_lives()

    def recorded(self) -> list[Process]:
        """Return the processes that have recorded a span, the oldest first."""
        return [process for process in self.processes if process.has_recorded]


def exit_fd_of(pid: int, started: int) -> int:
    """Return a descriptor that becomes readable at a process's end; -1 if the system has none, or the id is another
    process's."""
    if pid <= 0:
        return -1
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1
    if started and clock.start_ticks(PROC / str(pid) / "stat") != started:
        os.close(descriptor)  # of another namespace, or of a later process of that number
        return -1
    return descriptor


def exit_fd_of_another(variable: str, value: str) -> int:
    """Find another process with this variable in its environment.

    Return a descriptor that becomes readable at its end, else -1. This process and its children do not count. A process
    that has overwritten its environment is not found.
    """
    entry, own_pid = os.fsencode(f"{variable}={value}"), os.getpid()
    for path in run_folder.paths_in(PROC, "[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            pid = int(path.name)
            if pid == own_pid or entry not in (path / "environ").read_bytes().split(b"\0"):
                continue
            if int((path / "stat").read_bytes().rpartition(b")")[2].split()[1]) != own_pid:
                descriptor = exit_fd_of(pid, 0)
                if descriptor >= 0:
                    return descriptor
    return -1


def program_of(pid: int) -> bytes:
    """Return bytes that change if a process executes another program; b"" if they cannot be read."""
    with suppress(OSError), (PROC / str(pid) / "auxv").open("rb") as file:
        return file.read(_IMAGE_BYTES)
    return b""


def write_note(folder: Path, process: Process) -> None:
    """Write the note of a process, if the agent can see its end.

    Raises nothing. The settings of its collector are not written: they may contain secrets.
    """
    if process.exit_fd >= 0:
        facts = {name: fact for name, fact in process.facts.items() if name != "export"}
        facts.update(
            pid=process.pid, started=process.started, exports=bool((process.facts.get("export") or {}).get("otlp"))
        )
        with suppress(OSError, TypeError, ValueError), atomic.replacing(_place(folder, process)) as file:
            file.write(json.dumps(facts).encode())


def remove_note(folder: Path, process: Process) -> None:
    """Remove the note of a process whose end is reported. Without a goodbye its recording is saved first."""
    with suppress(OSError):
        _place(folder, process).unlink()


@contextmanager
def locked_note(folder: Path, process: Process) -> Iterator[None]:
    """Lock the note of a process while its recording is saved. Wait until no other process does that."""
    try:
        descriptor = os.open(_place(folder, process), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # its end cannot be seen, or is reported already
        yield
        return
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def missed_processes(folder: Path, run_of: Callable[[str], Run]) -> list[Process]:
    """Return the processes whose ends no agent has reported, each as a living one.

    `run_of` returns the run of a name. Processes that have joined since are left out: the agent sees their ends.
    """
    processes = []
    for facts, pid, started in _notes(folder):
        with suppress(OSError, TypeError, ValueError, LookupError):
            run, now_ns = run_of(str(facts.get("run", ""))[:64]), time.monotonic_ns()
            process = Process(run=run, pid=pid, started=started, facts=facts, joined_ns=now_ns, is_missed=True)
            is_known = any((member.pid, member.started) == (pid, started) for member in run.processes)
            if not is_known and process.has_exited():
                process.has_recorded = True
                process.memory = _file_of(facts.get("memory"))
                run.processes.append(process)
                processes.append(process)
    return processes


def awaits_others(folder: Path, run: Run) -> bool:
    """Return True if a living process of a run had joined an earlier agent, but has not joined this one."""
    joined = {(process.pid, process.started) for process in run.processes}
    return any(
        facts.get("run") == run.name and (pid, started) not in joined and _is_running(pid, started)
        for facts, pid, started in _notes(folder)
    )


def noted_processes(folder: Path) -> tuple[int, int, list[str]]:
    """Return the counts of living and of ended processes with notes, and the folders with ended processes'
    recordings."""
    living, ended, folders = 0, 0, dict[str, None]()
    for facts, pid, started in _notes(folder):
        if _is_running(pid, started):
            living += 1
            continue
        ended += 1
        memory = facts.get("memory")
        with suppress(OSError, ValueError):
            if isinstance(memory, str) and memory and Path(memory).exists():
                folders[str(Path(memory).parent)] = None
    return living, ended, list(folders)


def _notes(folder: Path) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield the facts, the id and the start time of each process with a valid note."""
    for path in run_folder.paths_in(folder, f"*{run_folder.NOTE_SUFFIX}"):
        with suppress(OSError, TypeError, ValueError, LookupError):
            facts = json.loads(path.read_bytes())
            yield facts, int(facts["pid"]), int(facts["started"])


def _is_running(pid: int, started: int) -> bool:
    return clock.start_ticks(PROC / str(pid) / "stat") == started


def _file_of(path: object) -> int:
    """Return a descriptor of a process's recording in a file, -1 for none."""
    if isinstance(path, str) and path:
        with suppress(OSError):
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    return -1


def _place(folder: Path, process: Process) -> Path:
    return run_folder.note_file(folder, process.pid, process.started)
