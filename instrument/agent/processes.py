"""The agent's records of runs and their processes.

Each process has a note file in the folder of the run's socket. If the agent is killed, the next agent reads these files
to find the processes that have ended in the meantime.
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
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from instrument import clock
from instrument.agent.loop import Connection
from instrument.recording.memory_layout import RecordingHead
from instrument.runtime import agent_socket, environment, file_writing
from instrument.runtime.environment import PROC
from instrument.runtime.lazy_imports import dataclass, field

_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3
"""The `ioctl` request on a pidfd, and its flag that asks for the exit status (linux/pidfd.h, since Linux 6.15)."""
_PIDFD_INFO = struct.Struct("=QQ11Ii")

_EXIT_CODE_FIELD = 49
"""The index of exit_code among the fields after the program's name in `/proc/PID/stat` (man 5 proc)."""


def read_exit_status(exit_fd: int, pid: int) -> int | None:
    """Return the exit status of an ended process in the form of `os.waitpid`, or None if it is unknown."""
    with suppress(OSError):
        info = _PIDFD_INFO.unpack(fcntl.ioctl(exit_fd, _PIDFD_GET_INFO, _PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13)))
        if info[0] & _PIDFD_INFO_EXIT:
            return int(info[-1])
    with suppress(OSError, ValueError, IndexError):  # it waits for its parent
        words = (PROC / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        if words[0] in "ZX":
            return int(words[_EXIT_CODE_FIELD])
    return None


Value = TypeVar("Value")

GOODBYE, VANISHED, REPLACED, EXITED = "goodbye", "vanished", "replaced", "exited"
"""The ways in which a process ends.

- GOODBYE: a goodbye to the agent
- VANISHED: an end without a goodbye
- REPLACED: another program or recording in the same process
- EXITED: a call of `os._exit(0)` without an open span, usual in forked workers
"""


@dataclass(eq=False, kw_only=True)
class Process:
    """A process that has joined its run. If it starts a second recording, it becomes a second `Process`.

    - `started`: the start time in clock ticks since boot, 0 if unknown
    - `facts`: the values that the process sent when it joined
    - `memory`: a descriptor of the recording, or -1
    - `exit_fd`: a descriptor that becomes readable when the process ends, or -1
    - `hears`: True once the process accepts commands
    - `switch`: the newest command to switch recording on or off
    - `goodbye`: the values that the process sent when it left
    - `saved`: the path of the saved recording, which is unfinished while `is_saving`
    - `link`: the link to the saved recording if that is a capture
    - `saves_itself`: True if the process saves the recording, False if the agent does
    - `files`: the files that the agent wrote because the profile names them
    - `is_reported`: True if the process printed its own report. No recording is then saved for the run's report
    - `is_missed`: True if the process joined an earlier agent, and that agent ended before the process
    - `is_elsewhere`: True for a process in another PID namespace, which counts as living while it is connected
    - `ports`: the ports at which the process had connections before it recorded a request
    - `listened`: the ports at which the process has listened
    - `has_requests`: True once the process has recorded a request
    - `ended_ns`: the time of the end, 0 before
    - `status`: the exit status as in `os.waitpid`, or None if it is unknown
    - `memory_events`: the file in which the control group counts kills for lack of memory
    - `oom_kills`: the count in that file when the process joined
    - `number`: the number of the process in messages to the exporter
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
    number: int = field(default_factory=count(1).__next__)

    @property
    def lives(self) -> bool:
        """True until the process ends or says goodbye."""
        return not self.ended_ns and self.goodbye is None

    def update_has_recorded(self) -> bool:
        self.has_recorded = self.has_recorded or self.read_recording_head(
            lambda head: any(ring.head for ring in head.read_rings()) or head.has_open_span(), default=False
        )
        return self.has_recorded

    def read_recording_head(self, read: Callable[[RecordingHead], Value], default: Value) -> Value:
        try:
            return read(RecordingHead(self.memory)) if self.memory >= 0 else default
        except OSError:
            return default

    def has_exited(self) -> bool | None:
        """Return True if the process has ended, or None if that is unknown."""
        if self.exit_fd >= 0:
            return _is_readable(self.exit_fd)
        if self.started and not self.is_elsewhere:
            return clock.read_process_start_ticks(PROC / str(self.pid) / "stat") != self.started
        return None

    def has_become_another_program(self) -> bool:
        now = b"" if self.is_elsewhere else environment.read_auxiliary_vector(self.pid)
        return bool(self.image and now and now != self.image)

    def release(self) -> None:
        for descriptor in (self.memory, self.exit_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self.memory = self.exit_fd = -1


@dataclass(eq=False)
class Run:
    """The processes that one `instrument run` started.

    - `first`: the process id of the command that was run, 0 if unknown
    - `is_reported`: True once the report on all spans so far is printed or is being made
    - `waiting`: the connection of the process that waits for the report, and will print it
    - `captures`: the number of captures of vanished processes
    - `is_scraped`: True after the first scrape of the run
    - `stderr`: the standard error of the first process, or of another process until the first one joins
    - `folded`: the file into which the oldest ended processes are merged
    - `folded_ends`: the number of merged processes, by the way they ended
    - `unfolded`: the number of recordings that could not be read and merged
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

    def living_processes(self) -> list[Process]:
        return [process for process in self.processes if process.lives]

    def find_living(self, pid: int, started: int) -> Process | None:
        return next(
            (process for process in self.living_processes() if (process.pid, process.started) == (pid, started)), None
        )

    def is_over(self) -> bool:
        return not (self.first_process_lives() or self.living_processes())

    def first_process_lives(self) -> bool:
        return self.first_fd >= 0 and not _is_readable(self.first_fd)

    def first_process_has_left(self) -> bool:
        return any(process.pid == self.first and process.goodbye is not None for process in self.processes)

    def must_print_report(self, leaving: Process) -> bool:
        """Return True if a leaving process must print the report of the run, because no other process can print it
        later."""
        if self.stderr.startswith("/") and leaving.facts.get("stderr") != self.stderr:
            return False
        other_processes = [process for process in self.living_processes() if process is not leaving]
        for process in other_processes:
            if (process.pid == self.first or process.update_has_recorded()) and not process.has_exited():
                return False
        has_left = leaving.pid == self.first or self.first_process_has_left()
        return has_left or not self.first_has_joined or not self.first_process_lives()

    def processes_with_spans(self) -> list[Process]:
        return [process for process in self.processes if process.has_recorded]


def _is_readable(descriptor: int) -> bool:
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(0))


def exit_fd_of(pid: int, started: int) -> int:
    """Return a descriptor that becomes readable when a process ends, or -1 on failure."""
    if pid <= 0:
        return -1
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1
    if started and clock.read_process_start_ticks(PROC / str(pid) / "stat") != started:
        os.close(descriptor)  # of another namespace, or of a later process of that number
        return -1
    return descriptor


def find_exit_fd_by_variable(variable: str, value: str) -> int:
    """Find a process whose environment has the variable with this value. The caller's own process and its children are
    skipped.

    Return a descriptor that becomes readable when the process ends, or -1 if there is no such process.
    """
    entry, own_pid = os.fsencode(f"{variable}={value}"), os.getpid()
    for path in agent_socket.list_matching_paths(PROC, "[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            pid = int(path.name)
            if pid == own_pid or entry not in (path / "environ").read_bytes().split(b"\0"):
                continue
            if environment.read_parent_pid(pid) != own_pid:
                descriptor = exit_fd_of(pid, 0)
                if descriptor >= 0:
                    return descriptor
    return -1


def write_note(folder: Path, process: Process) -> None:
    """Write a file with the facts of a process for the next agent. Settings of the collector are left out, because they
    may contain secrets. Raises nothing."""
    if process.exit_fd >= 0:
        facts = {name: fact for name, fact in process.facts.items() if name != "export"}
        facts.update(
            pid=process.pid, started=process.started, exports=bool((process.facts.get("export") or {}).get("otlp"))
        )
        with (
            suppress(OSError, TypeError, ValueError),
            file_writing.open_replacement(_note_path(folder, process)) as file,
        ):
            file.write(json.dumps(facts).encode())


def remove_note(folder: Path, process: Process) -> None:
    with suppress(OSError):
        _note_path(folder, process).unlink()


@contextmanager
def locked_note(folder: Path, process: Process) -> Iterator[None]:
    try:
        descriptor = os.open(_note_path(folder, process), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # its end cannot be seen, or is reported already
        yield
        return
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def add_missed_processes(folder: Path, run_of: Callable[[str], Run]) -> list[Process]:
    """Return the processes that joined an earlier agent and have ended since. Add them to their runs."""
    processes = []
    for facts, pid, started in _read_notes(folder):
        with suppress(OSError, TypeError, ValueError, LookupError):
            run, now_ns = run_of(str(facts.get("run", ""))[:64]), time.monotonic_ns()
            process = Process(run=run, pid=pid, started=started, facts=facts, joined_ns=now_ns, is_missed=True)
            is_known = any((member.pid, member.started) == (pid, started) for member in run.processes)
            if not is_known and process.has_exited():
                process.has_recorded = True
                with suppress(OSError):
                    process.memory = os.open(
                        str(facts.get("memory") or ""), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                    )
                run.processes.append(process)
                processes.append(process)
    return processes


def has_unjoined_processes(folder: Path, run: Run) -> bool:
    """Return True if a living process of a run has joined an earlier agent, but not this one."""
    joined = {(process.pid, process.started) for process in run.processes}
    return any(
        facts.get("run") == run.name and (pid, started) not in joined and _is_running(pid, started)
        for facts, pid, started in _read_notes(folder)
    )


def count_noted_processes(folder: Path) -> tuple[int, int, list[str]]:
    """Return the number of living processes and of ended processes that have a note file. Also return the folders with
    the recordings of the ended processes."""
    living, ended, folders = 0, 0, dict[str, None]()
    for facts, pid, started in _read_notes(folder):
        if _is_running(pid, started):
            living += 1
            continue
        ended += 1
        memory = facts.get("memory")
        with suppress(OSError, ValueError):
            if isinstance(memory, str) and memory and Path(memory).exists():
                folders[str(Path(memory).parent)] = None
    return living, ended, list(folders)


def _read_notes(folder: Path) -> Iterator[tuple[dict[str, Any], int, int]]:
    for path in agent_socket.list_matching_paths(folder, f"*{agent_socket.NOTE_SUFFIX}"):
        with suppress(OSError, TypeError, ValueError, LookupError):
            facts = json.loads(path.read_bytes())
            yield facts, int(facts["pid"]), int(facts["started"])


def _is_running(pid: int, started: int) -> bool:
    return clock.read_process_start_ticks(PROC / str(pid) / "stat") == started


def _note_path(folder: Path, process: Process) -> Path:
    return agent_socket.process_note_path(folder, process.pid, process.started)
