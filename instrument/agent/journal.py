"""Notes on the recording processes of a run, as files next to its socket, for an agent that takes over.

A process whose agent is gone joins the next one by itself. One that ended in between, or before the agent had saved its
recording, is known by its note alone. Its rows are lost, except for those in a file (`limits.ring_dir`), and those that
a child of the former agent still saves. That child locks the note.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from instrument import clock
from instrument.agent.processes import PROC, Process, Run
from instrument.runtime import atomic, run_folder


def note(folder: Path, process: Process) -> None:
    """Note that a process records: of one whose end can be seen. Raises nothing.

    The settings of its collector may hold secrets, and stay in memory.
    """
    if process.exit_fd >= 0:
        facts = {name: fact for name, fact in process.facts.items() if name != "export"}
        facts.update(
            pid=process.pid, started=process.started, exports=bool((process.facts.get("export") or {}).get("otlp"))
        )
        with suppress(OSError, TypeError, ValueError), atomic.replacing(_place(folder, process)) as file:
            file.write(json.dumps(facts).encode())


def forget(folder: Path, process: Process) -> None:
    """Remove the note of a process whose end is reported. Without a goodbye its recording is saved first."""
    with suppress(OSError):
        _place(folder, process).unlink()


@contextmanager
def locked(folder: Path, process: Process) -> Iterator[None]:
    """Lock the note of a process while its recording is saved. Wait until no other process does that."""
    try:
        descriptor = os.open(_place(folder, process), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # its end cannot be seen, or it is already reported
        yield
        return
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def missed(folder: Path, run_of: Callable[[str], Run]) -> list[Process]:
    """Return the processes whose ends nobody has reported, each as a living one.

    `run_of` returns the run of a name. Processes that have joined since are left out: the agent sees their ends.
    """
    processes = []
    for path in run_folder.paths_in(folder, f"*{run_folder.NOTE_SUFFIX}"):
        with suppress(OSError, TypeError, ValueError, LookupError):
            facts = json.loads(path.read_bytes())
            run, now_ns = run_of(str(facts.get("run", ""))[:64]), time.monotonic_ns()
            pid, started = int(facts["pid"]), int(facts["started"])
            process = Process(run=run, pid=pid, started=started, facts=facts, joined_ns=now_ns, is_missed=True)
            is_known = any((member.pid, member.started) == (pid, started) for member in run.processes)
            if not is_known and process.has_exited():
                process.has_recorded = True
                process.memory = _file_of(facts.get("memory"))
                run.processes.append(process)
                processes.append(process)
    return processes


def awaits_others(folder: Path, run: Run) -> bool:
    """Return True where processes of a run live that an agent before this one knew, and that have not joined yet."""
    joined = {(process.pid, process.started) for process in run.processes}
    for path in run_folder.paths_in(folder, f"*{run_folder.NOTE_SUFFIX}"):
        with suppress(OSError, TypeError, ValueError, LookupError):
            facts = json.loads(path.read_bytes())
            pid, started = int(facts["pid"]), int(facts["started"])
            is_alive = clock.start_ticks(PROC / str(pid) / "stat") == started
            if is_alive and (pid, started) not in joined and facts.get("run") == run.name:
                return True
    return False


def noted(folder: Path) -> tuple[int, int, list[str]]:
    """Return the numbers of living and of ended processes that have notes, and the folders with recordings of the
    latter in files."""
    living, ended, folders = 0, 0, dict[str, None]()
    for path in run_folder.paths_in(folder, f"*{run_folder.NOTE_SUFFIX}"):
        with suppress(OSError, TypeError, ValueError, LookupError):
            facts = json.loads(path.read_bytes())
            if clock.start_ticks(PROC / str(int(facts["pid"])) / "stat") == int(facts["started"]):
                living += 1
                continue
            ended += 1
            memory = facts.get("memory")
            if isinstance(memory, str) and memory and Path(memory).exists():
                folders[str(Path(memory).parent)] = None
    return living, ended, list(folders)


def _file_of(path: object) -> int:
    """A descriptor of the file that a process recorded into, -1 where there is none."""
    if isinstance(path, str) and path:
        with suppress(OSError):
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    return -1


def _place(folder: Path, process: Process) -> Path:
    return run_folder.note_of(folder, process.pid, process.started)
