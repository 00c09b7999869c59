"""The agent's main program, which runs the event loop, answers commands, and shuts down cleanly at a signal."""

from __future__ import annotations

import math
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from instrument.agent import end_reports
from instrument.agent.loop import Connection, EventLoop
from instrument.agent.processes import Process, Run
from instrument.agent.runs import Runs
from instrument.runtime import agent_socket
from instrument.runtime.agent_socket import Message

REQUEST_TIMEOUT_S = 30.0
"""Seconds for which the agent waits for the answers to a command."""


class Questions:
    """Forwards commands of the user, such as `off` or `reload`, to processes, and returns the processes' answers."""

    def __init__(self, loop: EventLoop, runs: Runs) -> None:
        self._loop = loop
        self._runs = runs
        self._questions: dict[int, tuple[Connection, set[Process]]] = {}
        """The unanswered requests of commands, by number: the command's connection, and the processes that have not
        answered."""
        self._numbers = 0

    def forget_connection(self, asker: Connection) -> None:
        self._questions = {number: pair for number, pair in self._questions.items() if pair[0] is not asker}

    def handle_command(self, connection: Connection, message: Message) -> None:
        subject = message["ask"]
        if subject == "processes":
            for run in self._runs:
                for process in run.processes:
                    process.update_has_recorded()
                    memory = [process.memory] if message.get("memory") and process.memory >= 0 else []
                    self._loop.send(connection, {"process": end_reports.collect_process_facts(process)}, memory)
            lost, unseen = self._runs.exports.lost_by_reason, self._runs.unseen.describe_unseen()
            runs = [
                {"run": run.name, "first": run.first, "lost": lost, "folded": run.folded_ends.total()}
                for run in self._runs
            ]
            facts = {"agent": os.getpid(), "runs": runs, "faults": self._loop.faults, "unseen": unseen}
            self._loop.send(connection, {"end": facts})
        elif subject == "scrape":
            self._start_scrape(connection, str(message.get("run")))
        elif subject == "do":
            self._forward_command(connection, dict(message["do"]), [int(pid) for pid in message.get("pids") or ()])
        else:
            connection.is_broken = True

    def _start_scrape(self, connection: Connection, run: str) -> None:
        """Send the connection one end of a socket pair. The exporter writes the run's metrics to the other end."""
        asked_run = next((member for member in self._runs if member.name == run), None)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            if asked_run is not None:
                self._runs.exports.answer_scrape(asked_run, theirs)
            self._loop.send(connection, {"end": {"agent": os.getpid()}}, [ours.fileno()])

    def _forward_command(self, connection: Connection, action: dict[str, Any], pids: list[int]) -> None:
        self._numbers += 1
        number, waiting = self._numbers, set[Process]()
        for run in self._runs:
            for process in run.living_processes():
                if pids and process.pid not in pids:
                    continue
                if action.get("records") is not None:
                    process.switch = action
                if process.connection is None:
                    answer = {"error": "it has closed its connection to the agent"}
                    self._loop.send(connection, {"pid": process.pid, "answer": answer})
                    continue
                self._loop.send(process.connection, {"do": action, "number": number})
                if process.hears:
                    waiting.add(process)
                else:
                    why = "it has recorded nothing yet; the command takes effect as soon as it records"
                    self._loop.send(connection, {"pid": process.pid, "answer": {"pending": why}})
        self._questions[number] = connection, waiting
        self._loop.call_later(REQUEST_TIMEOUT_S, lambda: self._questions.pop(number, None))
        self._end_answered_command(number)

    def inherit_on_off_state(self, process: Process) -> None:
        parent = next((member for member in process.run.processes if member.pid == process.facts.get("parent")), None)
        if parent is not None and process.switch is None and process.connection is not None:
            process.switch = parent.switch
            if parent.switch is not None:
                self._loop.send(process.connection, {"do": parent.switch, "number": 0})  # its answer is for nobody

    def forward_answer(self, process: Process, number: int, answer: dict[str, Any]) -> None:
        if number in self._questions and process in self._questions[number][1]:
            asker, waiting = self._questions[number]
            waiting.discard(process)
            self._loop.send(asker, {"pid": process.pid, "answer": answer})
            self._end_answered_command(number)

    def _end_answered_command(self, number: int) -> None:
        asker, waiting = self._questions.get(number, (None, set()))
        if asker is not None and not any(process.lives for process in waiting):
            del self._questions[number]
            self._loop.send(asker, {"end": {"agent": os.getpid()}})


STOP_LIMIT_S = 4.5
"""The maximum seconds from SIGTERM to the end of the agent."""

STOP_WAIT_S = 3.0
"""The maximum seconds after SIGTERM for which the agent waits for living processes to end."""

LAST_SEND_S = 4.0
"""The maximum number of seconds for which an ending agent sends the last spans."""

OUTCOME_WAIT_S = 0.5
"""Seconds that the exporter has, after the last send, to report the result to the agent."""

STOP_POLL_S = 0.1
"""Seconds between two checks by an ending agent for unsaved recordings."""


class Agent:
    """An agent, which serves the processes that connect to its socket.

    - `run`: the only run to serve. If it is None, the agent serves any process until a signal comes
    - `folder`: the folder for recordings from which the report of a run is made
    - `captures`: the folder for captures of processes that vanished
    - `says`: called with each message that neither a standard error nor the system's log accepts
    """

    def __init__(
        self,
        listener: socket.socket,
        folder: Path,
        run: Run | None,
        captures: Path | None = None,
        says: Callable[[str], object] | None = None,
    ) -> None:
        self._loop = EventLoop(listener, self._handle_packet, self._handle_disconnect, says)
        self._runs = Runs(self._loop, folder, run, captures, says, self._end_if_done)
        self._questions = Questions(self._loop, self._runs)
        self._ends_at = math.inf
        self._has_waited = self._is_over = False
        self._is_of_run = run is not None
        self._says = says
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._loop.selector.register(self._wake, selectors.EVENT_READ, self._end_after_signal)

    def serve(self) -> bool:
        """Serve on the main thread until the run is over or a signal comes. Return False if another agent must continue
        the run."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: os.write(self._waker, b"."))
        signal.siginterrupt(signal.SIGTERM, False)
        try:
            while not (self._is_over or self._loop.is_replaced):
                self._loop.run_once()
        finally:
            go_on = [run for run in self._runs if run.living_processes() or self._loop.is_replaced]
            self._runs.exports.stop()
            self._loop.drop_connections()
            self._runs.close(go_on)
            self._loop.close()
            os.close(self._wake)
            os.close(self._waker)
        if self._loop.is_replaced and self._says is not None:
            self._says("instrument: another agent has taken the place of this one")
        return not (self._loop.is_replaced or (self._is_of_run and go_on))

    def _handle_packet(self, connection: Connection, message: Message, descriptors: list[int]) -> list[int]:
        """Handle a packet. Return the received descriptors that the caller must not close."""
        if connection is self._runs.exports.connection:
            self._runs.exports.handle_message(message)
            return []
        process = self._runs.find_process(connection)
        if "join" in message:
            return self._runs.add_process(connection, dict(message["join"]), descriptors)
        if "ask" in message:
            self._questions.handle_command(connection, message)
        elif process is None or not self._handle_process_message(process, message):
            if "ended" in message and connection.pid == os.getppid():
                self._runs.note_exit_status(int(message["ended"]), int(message["status"]))
            else:
                connection.is_broken = True
        return []

    def _handle_process_message(self, process: Process, message: Message) -> bool:
        if "saved" in message:
            self._runs.note_saved_recording(process)
        elif not process.lives:
            pass  # it goes on after its goodbye, or is about to end
        elif "exits" in message:
            process.status = (int(message["exits"]) & 0xFF) << 8
        elif "records" in message:
            self._runs.note_recording_start(process)
        elif "requests" in message:
            process.has_requests = True
        elif "window" in message:
            self._runs.exports.send_window(process, *map(int, message["window"]))
        elif "flush" in message:
            self._runs.exports.flush(process)
        elif "gauges" in message or "readings" in message:
            self._runs.exports.forward_gauge_message(process, message)
        elif "hears" in message:
            process.hears = True
            self._questions.inherit_on_off_state(process)
        elif "goodbye" in message:
            self._runs.handle_goodbye(process, dict(message["goodbye"]), is_answered=bool(message.get("is_answered")))
        elif "answer" in message:
            self._questions.forward_answer(process, int(message["number"]), dict(message["answer"]))
        else:
            return False
        return True

    def _handle_disconnect(self, connection: Connection) -> None:
        self._questions.forget_connection(connection)
        self._runs.handle_disconnect(connection)

    # ---------------------------------------------------------------- the end

    def _end_after_signal(self, descriptor: int) -> None:
        os.read(descriptor, 64)
        if self._ends_at == math.inf:
            self._ends_at = time.monotonic() + STOP_LIMIT_S
            self._loop.call_later(STOP_WAIT_S, self._stop_waiting_for_processes)
            self._loop.call_later(STOP_LIMIT_S, self._stop)
        self._end_if_done()

    def _stop_waiting_for_processes(self) -> None:
        self._has_waited = True
        self._end_exports()
        self._end_if_done()
        self._loop.call_later(STOP_POLL_S, self._stop_waiting_for_processes)

    def _end_if_done(self) -> None:
        is_asked, runs = self._ends_at < math.inf, self._runs
        if runs.own_is_over or (is_asked and (runs.are_done or (self._has_waited and runs.are_saved))):
            self._end_exports()
            if runs.exports.is_done:
                self._stop()

    def _end_exports(self) -> None:
        exports = self._runs.exports
        if not (exports.is_done or exports.is_ending):
            within_s = min(self._ends_at - time.monotonic(), LAST_SEND_S + OUTCOME_WAIT_S)
            exports.end_exports(within_s - OUTCOME_WAIT_S)
            self._loop.call_later(within_s, self._stop)

    def _stop(self) -> None:
        self._runs.exports.stop()
        if not self._is_over and (lost := self._runs.exports.lost_by_reason):
            self._runs.write_stderr_of_runs(end_reports.export_loss_line(lost))
        self._is_over = True


def serve(descriptor: int, run: str, first: int, *, says: bool) -> None:
    """Run the agent of a run on an inherited socket. `first` is the process id of the run's first process, 0 if
    unknown."""
    listener = socket.socket(fileno=descriptor)
    listener.setblocking(False)
    listener.listen(agent_socket.MOST_WAITING)  # a client sees the process that listens, not the one that made it
    os.set_inheritable(descriptor, False)
    folder = Path(os.fsdecode(listener.getsockname())).parent
    is_ours = True
    try:
        is_ours = serve_on_socket(listener, folder, Run(run, first), says=says)
    finally:
        if is_ours:
            agent_socket.remove_run_folder(folder)


def serve_on_socket(
    listener: socket.socket, folder: Path, run: Run | None, *, captures: Path | None = None, says: bool
) -> bool:
    """Serve at a socket until the run is over or a signal comes. Return False if another agent continues the run."""
    with suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return Agent(listener, folder, run, captures, _write_stderr if says else None).serve()


def _write_stderr(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(text if text.endswith("\n") else f"{text}\n")
        sys.stderr.flush()
