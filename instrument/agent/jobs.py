"""Jobs that child processes do for the agent, which stays small and answers meanwhile.

A recording of a crashed process may be damaged: a fault in its reader ends only the child. Each child has a time-out,
and few run at a time. One child saves many recordings, because a start takes longer than a save.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from instrument.agent import departure
from instrument.agent.child import run_in_child
from instrument.agent.processes import Process

AT_ONCE = 2
LIMIT_S = 60

RESULT_BYTES = 4 << 20

Answer = Mapping[str, Any]
Job = Callable[[], Answer]


@dataclass(eq=False, slots=True)
class _Child:
    pid: int
    read_fd: int
    on_answer: Callable[[Answer], object]
    received: bytearray = field(default_factory=bytearray)


class Jobs:
    """The children of the agent that do jobs. `selector` is the agent's own."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._waiting: deque[tuple[Job, Callable[[Answer], object]]] = deque()
        self._running: dict[int, _Child] = {}

    @property
    def is_idle(self) -> bool:
        """Return True if no job runs or waits."""
        return not self._running and not self._waiting

    def start(self, job: Job, on_answer: Callable[[Answer], object]) -> None:
        """Run `job` in a child, and call `on_answer` with its result, or with `{"error": ...}` if it fails."""
        self._waiting.append((job, on_answer))
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and len(self._running) < AT_ONCE:
            job, done_callback = self._waiting.popleft()
            try:
                child = self._start_child(job, done_callback)
            except OSError as error:
                done_callback({"error": f"no process could be made: {error.strerror}"})
                continue
            self._running[child.read_fd] = child
            self._selector.register(child.read_fd, selectors.EVENT_READ, self._read)

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
        """Do a job in its child, and write the answer."""
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)  # or others would hear nothing of the agent's end, or that it has hung up, until then
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        try:
            answer = job()
        except BaseException as problem:
            answer = {"error": f"{type(problem).__name__}: {problem!s:.500}"}
        data = memoryview(json.dumps(answer).encode())
        while data:
            data = data[os.write(write_fd, data) :]

    def _read(self, descriptor: int) -> None:
        child = self._running[descriptor]
        data = os.read(descriptor, 1 << 16)
        child.received += data
        if data and len(child.received) <= RESULT_BYTES:
            return
        self._selector.unregister(descriptor)
        del self._running[descriptor]
        os.close(descriptor)
        if data:
            _kill(child.pid)
        _, status = os.waitpid(child.pid, 0)
        child.on_answer(_result(child.received, status))
        self._start_waiting()

    def stop(self) -> None:
        """Kill all jobs, and drop the waiting ones."""
        self._waiting.clear()
        for child in self._running.values():
            self._selector.unregister(child.read_fd)
            os.close(child.read_fd)
            _kill(child.pid)
            os.waitpid(child.pid, 0)
        self._running.clear()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _result(received: bytearray, status: int) -> Answer:
    if status:
        return {"error": f"what was to read it ended with {os.waitstatus_to_exitcode(status)}"}
    try:
        answer = json.loads(received)
    except ValueError:
        return {"error": "what was to read it said nothing"}
    return answer if isinstance(answer, dict) else {"error": "what was to read it gave no answer"}


SAVED_AT_ONCE = 64
"""The most processes whose recordings one child saves."""


class Saves:
    """The processes whose recordings are to be saved, each to its path `saved`.

    `folder` has their notes. `on_saved` is called with each process afterwards; its `saved` is "" after a failure.
    """

    def __init__(self, jobs: Jobs, folder: Path, on_saved: Callable[[Process], object]) -> None:
        self._jobs = jobs
        self._folder = folder
        self._on_saved = on_saved
        self._waiting: deque[Process] = deque()
        self._running = 0

    def add(self, process: Process) -> None:
        """Save a process's recording: at once, or with others after the running job."""
        self._waiting.append(process)
        self._start_waiting()

    def _start_waiting(self) -> None:
        if not self._running and self._waiting:
            self._start([self._waiting.popleft() for _ in range(min(len(self._waiting), SAVED_AT_ONCE))])

    def _start(self, batch: Sequence[Process]) -> None:
        self._running += 1
        self._jobs.start(departure.captures_job(batch, self._folder), partial(self._end, batch))

    def _end(self, batch: Sequence[Process], answer: Answer) -> None:
        self._running -= 1
        if "each" not in answer and len(batch) > 1:  # the recording of one has ended the child
            for process in batch:
                self._start([process])
            return
        for process, result in zip(batch, answer.get("each", [answer]), strict=True):
            process.saved, process.files = str(result.get("path", "")), tuple(map(str, result.get("copies", ())))
            self._on_saved(process)
        self._start_waiting()
