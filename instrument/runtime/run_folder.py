"""The folder of a run, which contains the agent's socket. Processes and commands find the agent by this folder.

The folder has the name of the run. Its parent folder is `instrument-UID`, which only this user may enter, below
`XDG_RUNTIME_DIR`, `TMPDIR` or `/tmp`. Processes get the socket's path from the variable `INSTRUMENT_AGENT`.
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
"""The environment variable with the path of the agent's socket, for the processes of a run."""

SOCKET = "agent.sock"
NOTE_SUFFIX = ".process"
UNSENT = "unsent"
UNSEEN_SUFFIX = ".unseen"
"""The suffix, after the socket's name, of the file with notes on unrecorded processes. `sitecustomize` has a copy."""

ADDRESS_BYTES = 107
"""The maximum length in bytes of a Unix socket's path."""

MOST_WAITING = 512
"""The maximum number of processes that can wait to join while the agent is busy (the backlog of its socket)."""

ANSWER_S = 5.0
"""Seconds after which an agent that has not answered counts as hanging, because it may be suspended."""

_RUN_NAME = late_pattern(r"[\w.-]{1,64}")


def shared_file(name: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of a file for results that the processes of a run share, None without a run.

    Each version of Python has its own file. It is in the folder of this one run, not in one that several runs use.
    """
    folder = Path(environ.get(VARIABLE, "")).parent
    is_own = folder.name == environ.get("INSTRUMENT_RUN") and folder.is_dir()
    return folder / f"{name}-{sys.implementation.cache_tag}" if is_own else None


def run_parents() -> list[Path]:
    """Return the folders in which this user's runs may be. New runs go into the first usable one."""
    paths = [os.environ.get(name, "") for name in ("XDG_RUNTIME_DIR", "TMPDIR")]
    folders = [Path(name) for name in [*paths, "/tmp"] if name.startswith("/")]  # noqa: S108 - 0700, and checked
    return list(dict.fromkeys(folder / f"instrument-{os.geteuid()}" for folder in folders))


def make(run: str) -> Path:
    """Create the folder of a run, which only its owner may enter. Raises `OSError`."""
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
    """Raise `PermissionError` if a folder belongs to another user, or other users may enter it."""
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise PermissionError(
            f"{folder}: its mode is {stat.filemode(facts.st_mode)} of user {facts.st_uid}; it must belong to this "
            "user, with mode 0700"
        )


def listen(path: Path) -> socket.socket:
    """Listen on a new socket at a path, in place of a socket without a listener. Raises `OSError`."""
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
        listener.listen(MOST_WAITING)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def has_listener(path: Path) -> bool:
    return listener_pid(path) is not None


def listener_pid(path: Path) -> int | None:
    """Return the id of the process that listens on a socket, 0 if its id is unknown, None if no process listens."""
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
    """Return the device and the inode of the socket at a path, None if there is none."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def agent_name(holder: int) -> str:
    """Return a text that names an agent, with its process id unless that is 0."""
    return f"an agent (process {holder})" if holder else "an agent"


def no_answer_text(holder: int) -> str:
    """Return the end of a sentence on an agent that listens but does not answer."""
    advice = f"; `kill -9 {holder}` ends it, so that another one can take over" if holder else ""
    return f", and does not answer{advice}"


def _answers(path: Path) -> bool:
    """Return True if the agent that listens on a socket answers."""
    with suppress(OSError, packets.PacketError), connect_to_agent(path, ANSWER_S) as caller:
        packets.send(caller, {"ask": "processes"})
        return packets.receive(caller)[0] is not None
    return False


def list_runs() -> list[Path]:
    """Return the folders of this user's runs, the oldest first, including runs without an agent."""
    folders = []
    for home in run_parents():
        with suppress(OSError):
            refuse_shared(home)
            folders += [path for path in home.iterdir() if _RUN_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=lambda path: path.name)


def first_process(run: str) -> int:
    """Return the id of the process that began a run, which is part of the run's name, 0 if the name has none."""
    number = run.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def paths_in(folder: Path, pattern: str) -> list[Path]:
    """Return the sorted paths in a folder that match a pattern, none if the folder cannot be read."""
    with suppress(OSError):
        return sorted(folder.glob(pattern))
    return []


def note_file(folder: Path, pid: int, started: int) -> Path:
    """Return the path of the file by which later agents know a recording process of the run."""
    return folder / f"{pid}-{started}{NOTE_SUFFIX}"


def unreported(folder: Path) -> list[int]:
    """Return the ids of ended processes of the run whose end no agent has reported."""
    pids = []
    for path in paths_in(folder, f"*{NOTE_SUFFIX}"):
        pid, _, started = path.name.removesuffix(NOTE_SUFFIX).partition("-")
        if pid.isdecimal() and started.isdecimal() and clock.start_ticks(Path(f"/proc/{pid}/stat")) != int(started):
            pids.append(int(pid))
    return sorted(pids)


def unsent(folder: Path) -> int:
    """Return how many spans of ended processes may be unsent, from the file that the agent keeps."""
    with suppress(OSError, ValueError):
        return int((folder / UNSENT).read_text())
    return 0


@contextmanager
def register_socket(path: Path) -> Iterator[None]:
    """Link to an agent's socket from the folder of runs during the block, so that commands find the agent."""
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
    """Connect to an agent for the block. `timeout_s` limits each send and receive. Raises `OSError`."""
    with socket.socket(packets.FAMILY, packets.KIND) as caller:
        caller.settimeout(timeout_s)
        caller.connect(os.fspath(path))
        yield caller
