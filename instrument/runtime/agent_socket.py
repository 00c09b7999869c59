"""The agent's Unix socket: its folder, the packets on it, and the start of an agent.

The folder has the name of the run. It is below `instrument-UID`, a folder of this user alone, in `XDG_RUNTIME_DIR`,
`TMPDIR` or `/tmp`. A packet is a JSON object, with file descriptors if needed. Senders are not trusted, so the receiver
checks each packet.
"""

from __future__ import annotations

import _socket
import array
import fcntl
import json
import os
import posix
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from instrument import clock
from instrument.runtime.lazy_imports import late_pattern
from instrument.runtime.unpatched import sleep

VARIABLE = "INSTRUMENT_AGENT"
"""The environment variable with the path of the agent's socket."""

SOCKET = "agent.sock"
NOTE_SUFFIX = ".process"
UNSENT = "unsent"
UNSEEN_SUFFIX = ".unseen"
"""The suffix of the file of notes on unrecorded processes. `sitecustomize` repeats this value."""

ADDRESS_BYTES = 107
"""The maximum length in bytes of a Unix socket's path."""

MOST_WAITING = 512
"""The maximum number of processes that wait to join while the agent is busy."""

ANSWER_S = 5.0
"""The seconds without an answer after which an agent counts as hanging."""

_RUN_NAME = late_pattern(r"[\w.-]{1,64}")


def find_shared_file(name: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of a file that a run's processes of the same Python version share. Return None outside of a
    run."""
    folder = Path(environ.get(VARIABLE, "")).parent
    is_own = folder.name == environ.get("INSTRUMENT_RUN") and folder.is_dir()
    return folder / f"{name}-{sys.implementation.cache_tag}" if is_own else None


def list_parent_folders() -> list[Path]:
    """Return the folders that may contain this user's runs. New runs go into the first usable one."""
    paths = [os.environ.get(name, "") for name in ("XDG_RUNTIME_DIR", "TMPDIR")]
    folders = [Path(name) for name in [*paths, "/tmp"] if name.startswith("/")]  # noqa: S108 - 0700, and checked
    return list(dict.fromkeys(folder / f"instrument-{os.geteuid()}" for folder in folders))


def create_run_folder(run: str) -> Path:
    """Create a run's folder, which only its owner may enter. Raises `OSError`."""
    problem: OSError = FileNotFoundError("no folder for runs")
    for home in list_parent_folders():
        if len(os.fsencode(home / run / SOCKET)) > ADDRESS_BYTES:
            continue
        try:
            home.mkdir(mode=0o700, exist_ok=True)
            refuse_shared_folder(home)
            folder = home / run
            folder.mkdir(mode=0o700)
        except OSError as error:
            problem = error
        else:
            return folder
    raise problem


def refuse_shared_folder(folder: Path) -> None:
    """Raise `PermissionError` if a folder belongs to another user, or if other users may enter it."""
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise PermissionError(
            f"{folder}: its mode is {stat.filemode(facts.st_mode)} of user {facts.st_uid}; it must belong to this "
            "user, with mode 0700"
        )


def listen_on_socket(path: Path) -> socket.socket:
    """Listen on a new socket at a path. A leftover socket at the path is replaced. Raises `OSError`, for example if a
    process already listens at the path."""
    holder = listener_pid(path)
    if holder is not None:
        silence = "" if _agent_answers(path) else no_answer_text(holder)
        raise FileExistsError(f"{path}: {agent_name(holder)} already listens there{silence}")
    path.unlink(missing_ok=True)
    listener = socket.socket(FAMILY, KIND)
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
    """Return the id of the process that listens on a socket, 0 if unknown. Return None if no process listens."""
    with socket.socket(FAMILY, KIND) as caller:
        caller.setblocking(False)
        try:
            caller.connect(os.fspath(path))
        except BlockingIOError:
            return 0  # its queue is full
        except OSError:
            return None
        return read_peer_ids(caller)[0]


def socket_identity(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def agent_name(holder: int) -> str:
    return f"an agent (process {holder})" if holder else "an agent"


def no_answer_text(holder: int) -> str:
    advice = f"; `kill -9 {holder}` ends it, so that another one can take over" if holder else ""
    return f", and does not answer{advice}"


def _agent_answers(path: Path) -> bool:
    with suppress(OSError, PacketError), connect_to_agent(path, ANSWER_S) as caller:
        send(caller, {"ask": "processes"})
        return receive(caller)[0] is not None
    return False


def list_runs() -> list[Path]:
    """Return the folders of this user's runs, the oldest first. Runs without an agent are included."""
    folders = []
    for home in list_parent_folders():
        with suppress(OSError):
            refuse_shared_folder(home)
            folders += [path for path in home.iterdir() if _RUN_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=lambda path: path.name)


def parse_first_pid(run: str) -> int:
    """Return the process id at the end of a run's name, or 0."""
    number = run.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def list_matching_paths(folder: Path, pattern: str) -> list[Path]:
    with suppress(OSError):
        return sorted(folder.glob(pattern))
    return []


def process_note_path(folder: Path, pid: int, started: int) -> Path:
    return folder / f"{pid}-{started}{NOTE_SUFFIX}"


def find_unreported_processes(folder: Path) -> list[int]:
    """Return the ids of ended processes that no agent has reported."""
    pids = []
    for path in list_matching_paths(folder, f"*{NOTE_SUFFIX}"):
        pid, _, started = path.name.removesuffix(NOTE_SUFFIX).partition("-")
        if (
            pid.isdecimal()
            and started.isdecimal()
            and clock.read_process_start_ticks(Path(f"/proc/{pid}/stat")) != int(started)
        ):
            pids.append(int(pid))
    return sorted(pids)


def read_unsent_count(folder: Path) -> int:
    """Return the number of possibly unsent spans of ended processes, from the agent's file."""
    with suppress(OSError, ValueError):
        return int((folder / UNSENT).read_text())
    return 0


@contextmanager
def register_socket(path: Path) -> Iterator[None]:
    """Link a socket into a new run folder for the `with` block, so that commands find the agent."""
    link = None
    with suppress(OSError):
        link = create_run_folder(f"by-hand-{os.getpid()}") / SOCKET
        link.symlink_to(path)
    try:
        yield
    finally:
        if link is not None:
            remove_run_folder(link.parent)


def remove_run_folder(folder: Path) -> None:
    for path in list_matching_paths(folder, "*"):
        with suppress(OSError):  # another process was faster
            path.unlink()
    with suppress(OSError):
        folder.rmdir()
    with suppress(OSError):
        folder.parent.rmdir()  # the last run of the user; others keep it


def remove_abandoned_runs() -> None:
    """Remove the folders of runs whose first process and agent have both ended."""
    for folder in list_runs():
        pid = parse_first_pid(folder.name)
        lives = pid and pid != os.getpid() and Path(f"/proc/{pid}").exists()  # ours is not there yet
        if not lives and not has_listener(folder / SOCKET):
            remove_run_folder(folder)


@contextmanager
def connect_to_agent(path: Path, timeout_s: float) -> Iterator[socket.socket]:
    """Yield a connection to an agent. `timeout_s` limits each send and receive. Raises `OSError`."""
    with socket.socket(FAMILY, KIND) as caller:
        caller.settimeout(timeout_s)
        caller.connect(os.fspath(path))
        yield caller


# Packets


PACKET_BYTES = 128 << 10
"""The maximum size of a packet in bytes. The system allows slightly more."""

MOST_DESCRIPTORS = 2
"""The maximum number of descriptors in a packet."""

FAMILY, KIND = _socket.AF_UNIX, _socket.SOCK_SEQPACKET

Message = Mapping[str, Any]

_CREDENTIALS = struct.Struct("3i")


class PacketError(ValueError): ...


def send(connection: _socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one complete packet. Raises `OSError`, in particular `BlockingIOError` if the socket is full."""
    data = json.dumps(message, separators=(",", ":")).encode()
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([data], rights, _socket.MSG_NOSIGNAL)


def receive(connection: _socket.socket) -> tuple[Message | None, list[int]]:
    """Return the next message and its descriptors. The message is None if the peer has closed the connection. The
    caller must close the descriptors. Raises `PacketError` for invalid data, `BlockingIOError` if no packet has
    arrived, and `OSError` for a broken connection."""
    room = _socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
    data, rights, flags, _ = connection.recvmsg(PACKET_BYTES, room, _socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, value in rights:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            descriptors.frombytes(value[: len(value) - len(value) % descriptors.itemsize])
    try:
        if not data and not descriptors:
            return None, []
        return _parse_packet(data, flags), descriptors.tolist()
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _parse_packet(data: bytes, flags: int) -> Message:
    if flags & _socket.MSG_TRUNC:
        raise PacketError(f"a packet has more than {PACKET_BYTES} bytes")
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise PacketError(f"a packet is not JSON: {problem!s:.80}") from None
    if not isinstance(message, dict):
        raise PacketError("a packet is not a JSON object")
    return message


def read_peer_ids(connection: _socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the peer. The process id is 0 if the peer is in another process
    namespace. The ids are 0 and -1 if the system does not report them."""
    try:
        credentials = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
    except OSError:
        return 0, -1
    return pid, uid


# The start of an agent


AGENT_SCRIPT = Path(__file__).parents[1] / "agent" / "entry.py"

FIRST = "INSTRUMENT_RUN_PID"
"""The environment variable with the process id of the command under `instrument run`."""

INTERPRETER, BEGINNINGS = "python", "agents"
"""The names of files in a run's folder: a link to the agents' interpreter, and the agents' start times."""

MOST_AGENTS, AGENTS_WINDOW_S = 10, 600.0
"""The maximum number of agents that start for a run within `AGENTS_WINDOW_S` seconds. Further starts are refused."""

LOCK_RETRY_S, LOCK_TRIES = 0.01, 50
"""The seconds between two attempts to lock the start of an agent, and the maximum number of attempts."""


def create_run_socket(run: str) -> socket.socket:
    """Create a run's folder and its agent's socket, so that processes can join. Raises `OSError`."""
    path = create_run_and_socket_path(run)
    try:
        return listen_on_socket(path)
    except BaseException:
        remove_run_folder(path.parent)
        raise


def create_run_and_socket_path(run: str) -> Path:
    """Create a run's folder, and return the path of the agent's future socket. Raises `OSError`."""
    remove_abandoned_runs()
    folder = create_run_folder(run)
    (folder / INTERPRETER).symlink_to(sys.executable)
    (folder / f"{SOCKET}{UNSEEN_SUFFIX}").touch(0o600)  # a child may be there before the agent
    return folder / SOCKET


def start_agent(listener: socket.socket, run: str, first: int) -> None:
    """Start the agent of a run, without waiting until it is ready. `first` is the id of the run's first process. This
    forks, so the process must have only one thread. Raises `OSError`."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:  # from here on, nothing of the caller's may run
        os.setsid()
        spawn_agent(sys.executable, listener, run, first)
    finally:
        os._exit(1)


def can_replace_agent(path: Path) -> bool:
    """Return True if this process may replace an ended agent. Agents that a user started are never replaced. If
    `instrument run` is a container's first process, only `instrument run` replaces the agent."""
    folder = path.parent
    is_of_container = parse_first_pid(folder.name) == 1 and FIRST in os.environ
    is_of_run = folder.name == os.environ.get("INSTRUMENT_RUN") and not is_of_container
    return is_of_run and (folder / INTERPRETER).is_symlink()


def replace_ended_agent(path: Path) -> bool:
    """Start an agent if the run's agent has ended. Return True if an agent listens now. The start takes some 20 ms and
    runs no fork hooks. Other threads must not fork meanwhile, because the child would inherit the socket."""
    folder = path.parent
    with suppress(OSError), (folder / BEGINNINGS).open("a+") as beginnings:
        if not _try_lock_file(beginnings):
            return False
        if has_listener(path):
            return True
        beginnings.seek(0)
        times = [float(line) for line in beginnings]
        if len(times) >= MOST_AGENTS and time.monotonic() - times[-MOST_AGENTS] < AGENTS_WINDOW_S:
            return False
        beginnings.write(f"{time.monotonic()}\n")
        interpreter = str((folder / INTERPRETER).readlink())
        with closing(listen_on_socket(path)) as listener:
            first = parse_first_pid(folder.name) if FIRST in os.environ else 0
            child = spawn_agent(interpreter, listener, folder.name, first, is_apart=True)
            with suppress(ChildProcessError):  # the service has reaped it
                return posix.waitpid(child, 0)[1] == 0
            return True
    return False


def _try_lock_file(file: IO[str]) -> bool:
    """Lock a file for this process, but not for its forked children. Return False after `LOCK_TRIES` attempts."""
    for _ in range(LOCK_TRIES):
        with suppress(BlockingIOError, PermissionError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        sleep(LOCK_RETRY_S)
    return False


def spawn_agent(
    interpreter: str, listener: socket.socket, run: str, first: int, *, says: bool = False, is_apart: bool = False
) -> int:
    """Start an agent on a listening socket, and return the agent's process id. With `is_apart`, the agent becomes an
    orphan. With `says`, the agent keeps the standard error of this process. No fork hooks run. Raises `OSError`."""
    settings = {"run": run, "first": first, "path": [*filter(None, sys.path)], "says": says, "is_apart": is_apart}
    words = [interpreter, "-I", "-S", str(AGENT_SCRIPT), json.dumps(settings)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("INSTRUMENT", "PYTHON"))}
    listening = fcntl.fcntl(listener.fileno(), fcntl.F_DUPFD_CLOEXEC, 4)  # no number that is replaced below
    try:
        actions: Sequence[tuple[int, ...] | tuple[int, int, str, int, int]] = [
            *((os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in ((0, 1) if says else (0, 1, 2))),
            (os.POSIX_SPAWN_DUP2, listening, 3),
        ]
        ends = (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
        return posix.posix_spawn(interpreter, words, environ, file_actions=actions, setsigmask=(), setsigdef=ends)
    finally:
        os.close(listening)
