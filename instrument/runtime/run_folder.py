"""The folder of a run, with its agent's socket, for the processes of the run and for commands that ask about them.

It has the name of the run, in a folder of this user alone, `instrument-UID` below `XDG_RUNTIME_DIR`, `TMPDIR` or
`/tmp`. Processes get the socket's path by `VARIABLE` in their environment.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from instrument import clock
from instrument.runtime import packets
from instrument.runtime.cheap_start import late_pattern

VARIABLE = "INSTRUMENT_AGENT"
"""The variable that names the agent's socket to the processes of a run."""

SOCKET = "agent.sock"
NOTE_SUFFIX = ".process"
UNSENT = "unsent"
UNSEEN_SUFFIX = ".unseen"
"""The suffix of the file of notes on unrecorded processes, after the socket's name. `sitecustomize` repeats it."""

ADDRESS_BYTES = 107
"""The longest path that a Unix socket can have."""

WAITING = 512
"""The maximum number of processes that may wait to join while the agent is busy."""

ANSWER_S = 5.0
"""The longest wait in seconds for an agent's answer. An agent may be suspended."""

_RUN = late_pattern(r"[\w.-]{1,64}")


def shared_file(name: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file with a name for results that the run's processes share, None without a run.

    Each build of Python has its own file. It is in the run's own folder, never in one of several runs.
    """
    folder = Path(environ.get(VARIABLE, "")).parent
    is_own = folder.name == environ.get("INSTRUMENT_RUN") and folder.is_dir()
    return folder / f"{name}-{sys.implementation.cache_tag}" if is_own else None


def run_parents() -> list[Path]:
    """Return the folders that may have this user's runs. New runs go into the first folder."""
    paths = [os.environ.get(name, "") for name in ("XDG_RUNTIME_DIR", "TMPDIR")]
    folders = [Path(name) for name in [*paths, "/tmp"] if name.startswith("/")]  # noqa: S108 - 0700, and checked
    return list(dict.fromkeys(folder / f"instrument-{os.geteuid()}" for folder in folders))


def make(run: str) -> Path:
    """Create the folder of a run, for its owner only. Raises `OSError`."""
    problem: OSError = FileNotFoundError("no folder for runs")
    for home in run_parents():
        if len(os.fsencode(home / run / SOCKET)) > ADDRESS_BYTES:
            continue
        try:
            home.mkdir(mode=0o700, exist_ok=True)
            refuse_shared(home)
            folder = home / run
            folder.mkdir(mode=0o700)
        except OSError as error:
            problem = error
        else:
            return folder
    raise problem


def refuse_shared(folder: Path) -> None:
    """Raise `PermissionError` for a folder of another user, or one that other users may enter."""
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise PermissionError(
            f"{folder}: its mode is {stat.filemode(facts.st_mode)} of user {facts.st_uid}; it must belong to this "
            "user, with mode 0700"
        )


def listen(path: Path) -> socket.socket:
    """Create an agent's socket at a path, in place of a socket without a listener. Raises `OSError`."""
    holder = listener_pid(path)
    if holder is not None:
        raise FileExistsError(
            f"{path}: {agent_name(holder)} already listens there{'' if _answers(path) else no_answer_text(holder)}"
        )
    path.unlink(missing_ok=True)
    listener = socket.socket(packets.FAMILY, packets.KIND)
    try:
        os.fchmod(listener.fileno(), 0o600)  # before it has a name, and for any umask
        listener.bind(os.fspath(path))
        listener.listen(WAITING)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def has_listener(path: Path) -> bool:
    """Return True if a process listens on a socket."""
    return listener_pid(path) is not None


def listener_pid(path: Path) -> int | None:
    """Return the pid of the process, perhaps suspended, that listens on a socket, 0 if unknown, None for none."""
    with socket.socket(packets.FAMILY, packets.KIND) as caller:
        caller.setblocking(False)
        try:
            caller.connect(os.fspath(path))
        except BlockingIOError:
            return 0  # its queue is full
        except OSError:
            return None
        return packets.peer_of(caller)[0]


def identity(path: Path) -> tuple[int, int] | None:
    """Return the identity (device, inode) of the socket at a path, None without a socket."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def agent_name(holder: int) -> str:
    """Return a text that names an agent, by its pid if known."""
    return f"an agent (process {holder})" if holder else "an agent"


def no_answer_text(holder: int) -> str:
    """Return a sentence on an agent that listens but does not answer."""
    advice = f"; `kill -9 {holder}` ends it, so that another one can take over" if holder else ""
    return f", and does not answer{advice}"


def _answers(path: Path) -> bool:
    """Return True if the agent that listens on a socket answers."""
    with suppress(OSError, packets.PacketError), connect_to_agent(path, ANSWER_S) as caller:
        packets.send(caller, {"ask": "processes"})
        return packets.receive(caller)[0] is not None
    return False


def list_runs() -> list[Path]:
    """Return the folders of this user's runs, the oldest first, also those without an agent."""
    folders = []
    for home in run_parents():
        with suppress(OSError):
            refuse_shared(home)
            folders += [path for path in home.iterdir() if _RUN.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=lambda path: path.name)


def first_process(run: str) -> int:
    """Return the pid of the process that began a run, from the run's name, 0 if the name has none."""
    number = run.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def paths_in(folder: Path, pattern: str) -> list[Path]:
    """Return the matching paths in a folder, sorted. Return none for an unreadable folder."""
    with suppress(OSError):
        return sorted(folder.glob(pattern))
    return []


def note_file(folder: Path, pid: int, started: int) -> Path:
    """Return the file that marks a recording process of the run for agents."""
    return folder / f"{pid}-{started}{NOTE_SUFFIX}"


def unreported(folder: Path) -> list[int]:
    """Return the pids of the run's recorded processes that have ended and that no agent has reported."""
    pids = []
    for path in paths_in(folder, f"*{NOTE_SUFFIX}"):
        pid, _, started = path.name.removesuffix(NOTE_SUFFIX).partition("-")
        if pid.isdecimal() and started.isdecimal() and clock.start_ticks(Path(f"/proc/{pid}/stat")) != int(started):
            pids.append(int(pid))
    return sorted(pids)


def unsent(folder: Path) -> int:
    """Return the number of ended processes' spans that may be unsent, from the agent's note."""
    with suppress(OSError, ValueError):
        return int((folder / UNSENT).read_text())
    return 0


@contextmanager
def register_socket(path: Path) -> Iterator[None]:
    """Link to an agent's socket from the folder of runs within the block, so that commands find it."""
    link = None
    with suppress(OSError):
        link = make(f"by-hand-{os.getpid()}") / SOCKET
        link.symlink_to(path)
    try:
        yield
    finally:
        if link is not None:
            remove(link.parent)


def remove(folder: Path) -> None:
    """Remove the folder of a run that has ended, with its files."""
    for path in paths_in(folder, "*"):
        with suppress(OSError):  # another process was faster
            path.unlink()
    with suppress(OSError):
        folder.rmdir()
    with suppress(OSError):
        folder.parent.rmdir()  # the last run of the user; others keep it


def remove_abandoned() -> None:
    """Remove the folders of runs whose first process and agent have both ended."""
    for folder in list_runs():
        pid = first_process(folder.name)
        lives = pid and pid != os.getpid() and Path(f"/proc/{pid}").exists()  # ours is not there yet
        if not lives and not has_listener(folder / SOCKET):
            remove(folder)


@contextmanager
def connect_to_agent(path: Path, timeout_s: float) -> Iterator[socket.socket]:
    """Connect to an agent, with a time limit for each call. Raises `OSError`."""
    with socket.socket(packets.FAMILY, packets.KIND) as caller:
        caller.settimeout(timeout_s)
        caller.connect(os.fspath(path))
        yield caller
