"""The connection of a process to the agent of its run.

While the connection is open, the agent knows that the process lives. A dead, stopped or slow agent does not delay the
service. A process waits briefly for the agent only when the process leaves. The control thread handles the agent's
messages.
"""

from __future__ import annotations

import _socket
import errno
import os
import select
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from instrument import clock
from instrument.clock import LEAST_S, Deadline
from instrument.recorder.recorder import RECORDER
from instrument.recording.memory_layout import OwnDescriptor, duplicate_descriptor
from instrument.runtime import agent_socket, environment
from instrument.runtime.unpatched import poll

ANSWER_LIMIT_S, FIRST_ANSWER_LIMIT_S = 0.5, 2.5
"""Seconds to wait for the answer to a goodbye: from a running agent, and from an agent that has just been started."""

SCRAPE_LIMIT_S = 2.0
"""Seconds for which a scrape waits for the agent, and then again for the exporter."""

OPENMETRICS = "Accept: application/openmetrics-text; version=1.0.0\r\n"

NOBODY = "nobody listens there"


class Membership:
    """The connection of this process to the agent's socket. The variable `INSTRUMENT_AGENT` has the socket's path.
    Without the variable, the methods do nothing. No method raises, except `fetch_metrics`.

    `facts()` returns what `join` sends to the agent. `while_no_fork(function)` calls a function while no fork can
    happen.
    """

    def __init__(
        self, facts: Callable[[], Mapping[str, Any]], while_no_fork: Callable[[Callable[[], object]], object]
    ) -> None:
        self._facts = facts
        self._while_no_fork = while_no_fork
        self._has_begun_agent = False
        self._descriptor = OwnDescriptor()
        self._recording: OwnDescriptor | None = None
        self._put_aside: list[Mapping[str, Any]] = []
        self.joins = 0
        """The count of attempts to join, each with a new connection."""
        self.path = os.environ.get(agent_socket.VARIABLE, "")

    def join(self, *, begins: bool = False) -> str:
        """Connect to the agent, and send it this process's facts and recording. Return the reason of a failure, or "".
        With `begins`, replace an ended agent, which takes some 20 ms."""
        self.close()
        if not self.path:
            return ""
        problem = self._send_join()
        if problem and begins and self.can_begin_agent() and not agent_socket.has_listener(Path(self.path)):
            has_begun: list[bool] = []
            self._while_no_fork(lambda: has_begun.append(agent_socket.replace_ended_agent(Path(self.path))))
            if any(has_begun):
                self._has_begun_agent = True
                problem = self._send_join()
        self.joins += 1  # when it is done: the thread for control goes on from there
        return problem

    def _send_join(self) -> str:
        facts = {
            **self._facts(),
            "pid": os.getpid(),
            "started": clock.read_process_start_ticks(clock.STAT),
            "stderr": file_of_descriptor(2),
            "image": environment.read_auxiliary_vector().hex(),
        }
        if self._recording is None and RECORDER.memory_fd >= 0:
            self._recording = OwnDescriptor(RECORDER.memory_fd)
        memory = -1 if self._recording is None else self._recording.fileno()
        try:
            connection = _socket.socket(agent_socket.FAMILY, agent_socket.KIND | _socket.SOCK_CLOEXEC)
            try:
                connection.setblocking(False)
                connection.connect(self.path)
                agent_socket.send(connection, {"join": facts}, [memory] if memory >= 0 else [])
                self._descriptor = OwnDescriptor(duplicate_descriptor(connection.fileno()))
            finally:
                connection.close()
        except (OSError, ValueError) as error:
            self.close()
            is_gone = isinstance(error, OSError) and error.errno in (errno.ECONNREFUSED, errno.ENOENT)
            return f"agent: cannot join the run at {self.path}: {NOBODY if is_gone else error}"
        return ""

    def is_agent_listening(self) -> bool:
        return bool(self.path) and agent_socket.has_listener(Path(self.path))

    def can_have_agent(self) -> bool:
        """Return True if an agent exists, or if this process may start another one."""
        return bool(self.path) and (Path(self.path).exists() or self.can_begin_agent())

    def can_begin_agent(self) -> bool:
        return bool(self.path) and agent_socket.can_replace_agent(Path(self.path))

    @property
    def is_joined(self) -> bool:
        """True if this process has an open connection to the agent. The agent may have closed its end."""
        return self.fileno() >= 0

    def is_connected(self) -> bool:
        """Return True if the agent has not closed its end of the connection."""
        descriptor = self.fileno()
        if descriptor < 0:
            return False
        closed = poll()
        closed.register(descriptor, 0)  # its end is reported unasked
        return not closed.poll(0)

    def fileno(self) -> int:
        """Return the connection's descriptor, or -1. The service may have closed the descriptor, as daemons do."""
        return self._descriptor.fileno()

    def send(self, message: Mapping[str, Any]) -> bool:
        with suppress(OSError), self._wrap_connection() as connection:
            if connection is not None:
                agent_socket.send(connection, message)
                return True
        return False

    def fetch_metrics(self, run: str, *, openmetrics: bool) -> str:
        """Return the metrics of all processes of a run in Prometheus's text format. Raises `OSError`, or `TimeoutError`
        if the agent is slow."""
        asks = f"GET /metrics HTTP/1.0\r\n{OPENMETRICS if openmetrics else ''}\r\n".encode()
        with agent_socket.connect_to_agent(Path(self.path), SCRAPE_LIMIT_S) as caller:
            agent_socket.send(caller, {"ask": "scrape", "run": run})
            message, descriptors = agent_socket.receive(caller)
        if message is None or not descriptors:
            raise ConnectionResetError("the agent has gone")
        connection, answer = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, fileno=descriptors[0]), bytearray()
        try:
            connection.settimeout(SCRAPE_LIMIT_S)
            connection.sendall(asks)
            while part := connection.recv(1 << 20):
                answer += part
        finally:
            connection.close()
        head, _, text = bytes(answer).partition(b"\r\n\r\n")
        if not head.partition(b"\r\n")[0].endswith(b" 200 OK"):
            raise ConnectionResetError("the agent does not answer scrapes")
        return text.decode()

    def next_message(self) -> Mapping[str, Any] | None:
        """Return the agent's next message, or None if the agent has ended. The message is {} if none has arrived."""
        return self._put_aside.pop(0) if self._put_aside else self._receive_message()

    def _receive_message(self) -> Mapping[str, Any] | None:
        try:
            with self._wrap_connection() as connection:
                message, descriptors = (None, []) if connection is None else agent_socket.receive(connection)
        except (BlockingIOError, agent_socket.PacketError):
            return {}
        except OSError:
            return None
        for descriptor in descriptors:
            os.close(descriptor)
        return message

    def leave(
        self, facts: Mapping[str, Any], save: Callable[[str], object] | None, deadline: Deadline
    ) -> Mapping[str, Any]:
        """Send the goodbye to the agent, and return the agent's answer. The agent answers only if `save` is given.
        `save(path)` writes this process's recording for the run's report. Keys of the answer:

        - `others`: a running process will print the run's report.
        - `report`: the caller must print this text.
        - `late`: the report was not ready in time.
        - `unheard`: the agent is slow or has ended.
        - `unreported`: the ids of ended processes that no agent has reported, if the agent has ended.
        - `unsent`: the number of unsent spans, if the agent has ended.
        - `unseen`: a note on processes that record nothing.
        """
        if not self.path:
            return {}
        goodbye = {"goodbye": dict(facts), "is_answered": save is not None}
        # Where its agent has gone, or the service has closed the connection, another one may have taken over.
        begins = bool(facts.get("calls") or facts.get("unmet"))
        if not self.send(goodbye) and (self.join(begins=begins) or not self.send(goodbye)):
            folder = Path(self.path).parent
            with suppress(OSError):  # nobody hears it; who comes later need not miss this process
                agent_socket.process_note_path(folder, os.getpid(), clock.read_process_start_ticks(clock.STAT)).unlink()
            unsent = agent_socket.read_unsent_count(folder)
            return {"unheard": True, "unreported": agent_socket.find_unreported_processes(folder), "unsent": unsent}
        wait_s = max(ANSWER_LIMIT_S, FIRST_ANSWER_LIMIT_S) if self._has_begun_agent else ANSWER_LIMIT_S
        answer = {} if save is None else self._await_answer(wait_s)
        if answer is None:
            answer = {"unheard": True}
        try:
            if save is not None and answer.get("save"):
                save(str(answer["save"]))
                self.send({"saved": True})
            if answer.get("wait"):
                wait_s = deadline.make_earlier_deadline(LEAST_S).seconds_for_last_wait()
                answer = self._await_answer(wait_s) or {"late": True}
            return answer
        finally:
            self.close()

    def _await_answer(self, wait_s: float) -> Mapping[str, Any] | None:
        message = self.await_message("goodbye", wait_s)
        answer = message and message["goodbye"]
        return dict(answer) if isinstance(answer, dict) else None

    def await_message(self, name: str, wait_s: float) -> Mapping[str, Any] | None:
        """Return the next message with the key `name`, or None after `wait_s`. Other messages remain for
        `next_message`."""
        end = time.monotonic() + wait_s
        while (descriptor := self.fileno()) >= 0 and (left_s := end - time.monotonic()) > 0:
            readable = poll()
            readable.register(descriptor, select.POLLIN)
            if not readable.poll(1000 * left_s):
                break
            message = self._receive_message()
            if message is None:
                break
            if name in message:
                return message
            if message:
                self._put_aside.append(message)
        return None

    def after_fork_in_child(self) -> None:
        self._recording = None
        self._put_aside.clear()
        self.joins = 0
        self._has_begun_agent = False
        self.close()

    @contextmanager
    def _wrap_connection(self) -> Iterator[_socket.socket | None]:
        """Yield the connection as a socket, or None. The descriptor remains open after the block."""
        descriptor = self.fileno()
        if descriptor < 0:
            yield None
            return
        connection = _socket.socket(agent_socket.FAMILY, agent_socket.KIND, 0, fileno=descriptor)
        try:
            yield connection
        finally:
            connection.detach()

    def close(self) -> None:
        """Close the connection, unless the service has reused its descriptor for another file."""
        self._descriptor.close()


def file_of_descriptor(descriptor: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return ""
