"""Child processes in which the agent reads recordings, because a damaged recording may crash its reader.

`Jobs` starts a child for each short task, such as saving a recording. `fork_child` starts a child that keeps running,
such as the exporter.
"""

from __future__ import annotations

import gc
import json
import math
import os
import select
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from instrument.agent import end_reports
from instrument.agent.loop import Connection
from instrument.agent.processes import Process
from instrument.runtime import agent_socket
from instrument.runtime.lazy_imports import dataclass, field

MOST_CHILDREN = 2
JOB_LIMIT_S = 60

MOST_ANSWER_BYTES = 4 << 20

Answer = Mapping[str, Any]
Job = Callable[[], Answer]


@dataclass(eq=False, slots=True)
class _Child:
    pid: int
    read_fd: int
    on_answer: Callable[[Answer], object]
    received: bytearray = field(default_factory=bytearray)


class Jobs:
    """A queue of jobs, each of which runs in a child process of the agent."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._waiting: deque[tuple[Job, Callable[[Answer], object]]] = deque()
        self._running: dict[int, _Child] = {}

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    def start(self, job: Job, on_answer: Callable[[Answer], object]) -> None:
        """Run a job in a child process, and call `on_answer` with the result. If the job fails, the result is
        `{"error": ...}`."""
        self._waiting.append((job, on_answer))
        self._start_waiting_jobs()

    def _start_waiting_jobs(self) -> None:
        while self._waiting and len(self._running) < MOST_CHILDREN:
            job, done_callback = self._waiting.popleft()
            try:
                child = self._start_child(job, done_callback)
            except OSError as error:
                done_callback({"error": f"no process could be made: {error.strerror}"})
                continue
            self._running[child.read_fd] = child
            self._selector.register(child.read_fd, selectors.EVENT_READ, self._read_answer)

    def _start_child(self, job: Job, on_answer: Callable[[Answer], object]) -> _Child:
        read_fd, write_fd = os.pipe()
        try:
            return _Child(run_in_child(partial(self._run_job, job, write_fd)), read_fd, on_answer)
        except OSError:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)

    def _run_job(self, job: Job, write_fd: int) -> None:
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)  # or others would hear nothing of the agent's end, or that it has hung up, until then
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(JOB_LIMIT_S)
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        try:
            answer = job()
        except BaseException as problem:
            answer = {"error": f"{type(problem).__name__}: {problem!s:.500}"}
        data = memoryview(json.dumps(answer).encode())
        while data:
            data = data[os.write(write_fd, data) :]

    def _read_answer(self, descriptor: int) -> None:
        child = self._running[descriptor]
        data = os.read(descriptor, 1 << 16)
        child.received += data
        if data and len(child.received) <= MOST_ANSWER_BYTES:
            return
        self._selector.unregister(descriptor)
        del self._running[descriptor]
        os.close(descriptor)
        if data:
            _kill_process(child.pid)
        _, status = os.waitpid(child.pid, 0)
        child.on_answer(_decode_answer(child.received, status))
        self._start_waiting_jobs()

    def stop(self) -> None:
        self._waiting.clear()
        for child in self._running.values():
            self._selector.unregister(child.read_fd)
            os.close(child.read_fd)
            _kill_process(child.pid)
            os.waitpid(child.pid, 0)
        self._running.clear()


def _kill_process(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _decode_answer(received: bytearray, status: int) -> Answer:
    if status:
        return {"error": f"the process that reads it ended with {os.waitstatus_to_exitcode(status)}"}
    try:
        answer = json.loads(received)
    except ValueError:
        return {"error": "the process that reads it ended without an answer"}
    return answer if isinstance(answer, dict) else {"error": "the process that reads it gave no answer"}


MOST_SAVES_PER_CHILD = 64


class Saves:
    """Saves recordings of processes in child processes of the agent.

    `on_saved` is called with each process after success or failure. `Process.saved` is the path of the file, or empty
    after a failure.
    """

    def __init__(self, jobs: Jobs, folder: Path, on_saved: Callable[[Process], object]) -> None:
        self._jobs = jobs
        self._folder = folder
        self._on_saved = on_saved
        self._waiting: deque[Process] = deque()
        self._running = 0

    def queue_recording(self, process: Process) -> None:
        self._waiting.append(process)
        self._start_next_batch()

    def _start_next_batch(self) -> None:
        if not self._running and self._waiting:
            self._save_batch([self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_SAVES_PER_CHILD))])

    def _save_batch(self, batch: Sequence[Process]) -> None:
        self._running += 1
        self._jobs.start(end_reports.make_batch_save_job(batch, self._folder), partial(self._handle_save_answer, batch))

    def _handle_save_answer(self, batch: Sequence[Process], answer: Answer) -> None:
        self._running -= 1
        if "each" not in answer and len(batch) > 1:  # the recording of one has ended the child
            for process in batch:
                self._save_batch([process])
            return
        for process, result in zip(batch, answer.get("each", [answer]), strict=True):
            process.saved, process.files = str(result.get("path", "")), tuple(map(str, result.get("copies", ())))
            self._on_saved(process)
        self._start_next_batch()


PIPE_BYTES = 1 << 16

_SET_PARENT_DEATH_SIGNAL = 1

_MALLOC_OPTIONS = {-1: 16 << 20, -3: 16 << 20, -8: 1}
"""Options of glibc's `mallopt` for a child. The allocator keeps up to 16 MiB of free memory for reuse
(M_TRIM_THRESHOLD, M_MMAP_THRESHOLD). Threads share one arena (M_ARENA_MAX)."""


class AgentEnd:
    """The child's end of its connection to the agent."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setblocking(False)
        self._waiting = select.poll()
        self._waiting.register(connection, select.POLLIN)
        self._woken, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._waiting.register(self._woken, select.POLLIN)
        self.has_gone = False

    def receive(self, wait_s: float) -> Iterator[tuple[agent_socket.Message, list[int]]]:
        if not self._waiting.poll(None if wait_s == math.inf else math.ceil(1000 * wait_s)):
            return
        with suppress(BlockingIOError):
            os.read(self._woken, PIPE_BYTES)
        while not self.has_gone:
            try:
                message, descriptors = agent_socket.receive(self._connection)
            except BlockingIOError:
                return
            except agent_socket.PacketError:
                continue  # what a process says is handed on, and may be too long
            except OSError:
                message, descriptors = None, []
            if message is None:
                self.has_gone = True
            else:
                yield message, descriptors

    def wake_receiver(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._waker, b".")

    def send(self, message: agent_socket.Message) -> None:
        """Send the agent a message. Ignore errors, because `receive` notices a closed connection."""
        with suppress(OSError):
            agent_socket.send(self._connection, message)


def run_in_child(work: Callable[[], object]) -> int:
    """Fork a child that calls `work` and then exits. Return its process id. Raises `OSError`."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def fork_child(serve: Callable[[socket.socket], object], name: str) -> tuple[Connection, int]:
    """Fork a child that calls `serve` and exits. Return a connection to the child, and its process id.

    `ps` shows the first 15 characters of `name`. Raises `OSError`.
    """
    ours, theirs = socket.socketpair(agent_socket.FAMILY, agent_socket.KIND)
    with theirs:
        try:
            pid = run_in_child(partial(_serve_in_child, theirs, serve, name, os.getpid()))
        except OSError:
            ours.close()
            raise
    return Connection(ours), pid


def _serve_in_child(connection: socket.socket, serve: Callable[[socket.socket], object], name: str, agent: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the agent, which ends this one in its time
    descriptor = 3
    os.dup2(connection.fileno(), descriptor)
    os.closerange(descriptor + 1, min(1 << 16, os.sysconf("SC_OPEN_MAX")))
    with suppress(ImportError, OSError, AttributeError):
        import ctypes

        library = ctypes.CDLL(None)
        library.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)  # which frees the locks of this child, too
        for option, value in _MALLOC_OPTIONS.items():
            library.mallopt(option, value)
    if os.getppid() != agent:
        os._exit(1)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name, "ascii")
    gc.freeze()
    serve(socket.socket(agent_socket.FAMILY, agent_socket.KIND, fileno=descriptor))
