"""The agent's records of runs and their processes, with a note file on each process for the agent's successor.

The notes are in the folder of the run's socket. If the agent is killed, the living processes join the next agent. If a
process ends while there is no agent, its rows may be lost.
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
from instrument.runtime.cheap_start import dataclass, field
from instrument.runtime.environment import PROC

_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3
"""The `ioctl` request on a pidfd, and its flag that asks for the exit status (linux/pidfd.h, since Linux 6.15)."""
_PIDFD_INFO = struct.Struct("=QQ11Ii")

_EXIT_CODE_FIELD = 49
"""The index of exit_code among the fields after the program's name in `/proc/PID/stat` (man 5 proc)."""


def status_of(exit_fd: int, pid: int) -> int | None:
    """Return the exit status of an ended process in the form of `os.waitpid`, None if unknown."""
    with suppress(OSError):
        info = _PIDFD_INFO.unpack(fcntl.ioctl(exit_fd, _PIDFD_GET_INFO, _PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13)))
        if info[0] & _PIDFD_INFO_EXIT:
            return int(info[-1])
    with suppress(OSError, ValueError, IndexError):  # it waits for its parent
        words = (PROC / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        if words[0] in "ZX":
            return int(words[_EXIT_CODE_FIELD])
    return None


def memory_events(pid: int) -> Path | None:
    """Return the path of a process's `memory.events`, which counts kills for lack of memory in its control group."""
    groups = [group for controller, group in environment.control_groups(pid) if not controller] if pid else []
    return next((path for group in groups[:1] if (path := group / "memory.events").is_file()), None)


def oom_kills(events: Path | None) -> int:
    """Return the number of kills for lack of memory in a control group, from its `memory.events`."""
    with suppress(OSError, ValueError, IndexError):
        for line in events.read_text().splitlines() if events is not None else ():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


Value = TypeVar("Value")

GOODBYE, VANISHED, REPLACED, EXITED = "goodbye", "vanished", "replaced", "exited"
"""The ways in which a process ends for its agent. It sends a goodbye, or vanishes without one. Another program or
recording replaces it. It exits by `os._exit(0)` without an open span, as forked workers do."""


@dataclass(eq=False, kw_only=True)
class Process:
    """A process that has joined its run with a recording. One process has several if it records several times.

    - `facts` are the values that the process sent as it joined, `goodbye` those that it sent as it left.
    - `memory` is the descriptor of its recording. `exit_fd` becomes readable when the process ends. Both are -1 for
      none.
    - It `hears` commands once its control thread runs. `switch` is the newest command to record or not.
    - `saved` is the file of its recording for the run's report, unfinished while `is_saving`. The process writes it if
      `saves_itself`. `link` is a symbolic link to that file if the file is a capture.
    - A process with `is_reported` printed its own report, so no file is saved for it.
    - `files` are the profile's files that the agent wrote on behalf of the process.
    - `is_missed`: an earlier agent ended before it saved the recording.
    - `is_elsewhere`: the process is in another process namespace, so it counts as living while it is connected.
    - `ended_ns` is 0 while it lives. `status` is its exit status as in `os.waitpid`, None if unknown.
    - `ports` are the ports at which it `listened` and got connections without recording a request.
    - The process `has_requests` once it has recorded a request.
    - `number` names it in messages to the exporter.
    - `memory_events` is the file in which its control group counts kills for lack of memory. `oom_kills` is the count
      at the time of its join.
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
        """True if the process has neither ended nor said goodbye."""
        return not self.ended_ns and self.goodbye is None

    def check_recorded(self) -> bool:
        """Return True if the process has recorded a span, and remember that in `has_recorded`."""
        self.has_recorded = self.has_recorded or self.read_head(
            lambda head: any(ring.head for ring in head.read_rings()) or head.has_open_span(), default=False
        )
        return self.has_recorded

    def read_head(self, read: Callable[[RecordingHead], Value], default: Value) -> Value:
        """Return a value that `read` reads from the recording's head, `default` for an unreadable recording."""
        try:
            return read(RecordingHead(self.memory)) if self.memory >= 0 else default
        except OSError:
            return default

    def has_exited(self) -> bool | None:
        """Return True if the operating system reports the process as ended, None if unknown."""
        if self.exit_fd >= 0:
            return _is_readable(self.exit_fd)
        if self.started and not self.is_elsewhere:
            return clock.start_ticks(PROC / str(self.pid) / "stat") != self.started
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
    """A run: the processes that one `instrument run` started.

    - `first` is the process id of the command that it ran, 0 if unknown. `stderr` is the standard error of that
      process, or of the first one to join.
    - The run `is_reported` once a report of all spans so far is printed or in work. `waiting` is the connection of the
      process that prints that report.
    - The oldest ended processes are merged into the file `folded`. `folded_ends` counts them by how they ended,
      `unfolded` counts unreadable recordings.
    - `captures` counts the captures of vanished processes. The run `is_scraped` after its first scrape.
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
        return not (self.first_lives() or self.living_processes())

    def first_lives(self) -> bool:
        return self.first_fd >= 0 and not _is_readable(self.first_fd)

    def first_has_left(self) -> bool:
        return any(process.pid == self.first and process.goodbye is not None for process in self.processes)

    def must_print_report(self, leaving: Process) -> bool:
        """Return True if a leaving process must print the run's report, because no other process could print it
        later."""
        if self.stderr.startswith("/") and leaving.facts.get("stderr") != self.stderr:
            return False
        other_processes = [process for process in self.living_processes() if process is not leaving]
        for process in other_processes:
            if (process.pid == self.first or process.check_recorded()) and not process.has_exited():
                return False
        has_left = leaving.pid == self.first or self.first_has_left()
        return has_left or not self.first_has_joined or not self.first_lives()

    def processes_with_spans(self) -> list[Process]:
        return [process for process in self.processes if process.has_recorded]


def _is_readable(descriptor: int) -> bool:
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(0))


def exit_fd_of(pid: int, started: int) -> int:
    """Return a descriptor that becomes readable at a process's end, -1 if the process has ended or none can be made."""
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


def find_other_exit_fd(variable: str, value: str) -> int:
    """Find another process, except children, that has `variable` with this value in its environment. Return a
    descriptor that becomes readable at its end, -1 for none."""
    entry, own_pid = os.fsencode(f"{variable}={value}"), os.getpid()
    for path in agent_socket.paths_in(PROC, "[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            pid = int(path.name)
            if pid == own_pid or entry not in (path / "environ").read_bytes().split(b"\0"):
                continue
            if environment.parent_of(pid) != own_pid:
                descriptor = exit_fd_of(pid, 0)
                if descriptor >= 0:
                    return descriptor
    return -1


def write_note(folder: Path, process: Process) -> None:
    """Write the note of a process, without the collector's settings, which may contain secrets. Raises nothing."""
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
    """Lock a process's note within the block. First wait until no other process has the lock."""
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


def missed_processes(folder: Path, run_of: Callable[[str], Run]) -> list[Process]:
    """Read the notes of an earlier agent, and return the ended processes whose ends were not reported. `run_of` returns
    the run with a name."""
    processes = []
    for facts, pid, started in _notes(folder):
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
    """Return True if a living process of a run joined an earlier agent and has yet to join this one."""
    joined = {(process.pid, process.started) for process in run.processes}
    return any(
        facts.get("run") == run.name and (pid, started) not in joined and _is_running(pid, started)
        for facts, pid, started in _notes(folder)
    )


def noted_processes(folder: Path) -> tuple[int, int, list[str]]:
    """Return how many living and how many ended processes have notes, and the folders with the ended processes'
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
    for path in agent_socket.paths_in(folder, f"*{agent_socket.NOTE_SUFFIX}"):
        with suppress(OSError, TypeError, ValueError, LookupError):
            facts = json.loads(path.read_bytes())
            yield facts, int(facts["pid"]), int(facts["started"])


def _is_running(pid: int, started: int) -> bool:
    return clock.start_ticks(PROC / str(pid) / "stat") == started


def _note_path(folder: Path, process: Process) -> Path:
    return agent_socket.process_note_path(folder, process.pid, process.started)
