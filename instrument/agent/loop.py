"""The loop of the agent: who joins, who leaves and who vanishes, what is asked of it, and when it is done.

One thread, one process. It looks into no recording itself (`jobs` has that done) and waits for nobody. What a process
or a caller sends is bounded and checked; whoever sends what is no packet of ours loses the connection.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from instrument.agent import departure, exit_status, journal, run_report, telling
from instrument.agent.exports import Exports
from instrument.agent.glance import rows_held
from instrument.agent.jobs import Jobs
from instrument.agent.peer import Connection
from instrument.agent.processes import GOODBYE, REPLACED, VANISHED, Process, Run, exit_fd_of, image_of
from instrument.recording import export_place
from instrument.runtime import packets

CONNECTIONS = 2048
"""The most at a time; a new one beyond them is closed."""

PACKETS_AT_ONCE = 64
"""Read from one connection before the others have their turn."""

GRACE_S = 0.3
"""How long nobody must have been left of a run before it is over: a child may be about to join."""

AGAIN_S = 5.0
"""How often it is looked whether a run is over, whatever has been heard of it."""

STATUS_S = 0.3
"""How long after a process vanished the one who reaps it may still tell its exit status."""

CAPTURES = 20
"""Of so many processes of a run that vanished captures are saved."""

DISK_BYTES = 1 << 30
"""What captures of processes may take that do not tell their `limits.disk`."""

MOST_ROWS = 10_000
"""So many spans a process saves itself as it leaves, with all that it knows of them."""

ENDED = 16
"""How many processes that have ended are kept with their spans; then of half of them only the totals are."""

START_S = 10.0
"""How long after its start somebody of a run must have joined, or it is said that nobody has."""

END_S = 5.0
"""How long the agent goes on after SIGTERM while processes of its run live, and exports what they record; and then for
what is under way."""

ASKED_S = 30.0
"""The longest that who asks something of the processes waits for their answers."""


class Agent:
    """The agent that listens on `listener`; `run` is the one that it is of, None for one that serves whoever joins.

    It ends when its run has; the other one by a signal. `folder` is where processes save what the run's report is made
    of. `says` is told each line that it has to say where no process
    of a run can be told it.
    """

    def __init__(
        self,
        listener: socket.socket,
        folder: Path,
        run: Run | None,
        captures: Path | None = None,
        says: Callable[[str], object] | None = None,
    ) -> None:
        self._listener = listener
        self._folder = folder
        self._captures = captures
        self._run = run
        self._says = says
        self.runs: dict[str, Run] = {} if run is None else {run.name: run}
        self._selector = selectors.DefaultSelector()
        self._jobs = Jobs(self._selector)
        self._exports = Exports(self._selector, self._exports_changed, self._say_everywhere, self._leave_export_to)
        self._connections: dict[Connection, Process | None] = {}  # None for somebody who asks
        self._timers: list[tuple[float, Callable[[], object]]] = []
        self._questions: dict[int, Question] = {}
        self._numbers = 0
        self.faults = 0
        self.refused = 0
        self._ends_at = 0.0
        self._is_over = self._has_told_exports = False
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        if run is not None:
            if run.first and run.first_fd < 0:
                run.first_fd = exit_fd_of(run.first, 0)
            if run.first_fd >= 0:
                self._selector.register(run.first_fd, selectors.EVENT_READ, self._first_exited)
            self._after(START_S, self._say_if_nobody_joined)
        self._after(AGAIN_S, self._look_again)
        self._after(0, self._take_over)

    # ---------------------------------------------------------------- the loop

    def serve(self) -> None:
        """Serve until the run is over, or a signal has come. On the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: os.write(self._waker, b"."))
        signal.siginterrupt(signal.SIGTERM, False)
        try:
            while not self._is_over:
                self._turn()
        finally:
            self._close()

    def _turn(self) -> None:
        now = time.monotonic()
        due = [one for one in self._timers if one[0] <= now]
        self._timers = [one for one in self._timers if one[0] > now]
        for _, action in due:
            self._attempt(action)
        if self._is_over:
            return
        left_s = min((at for at, _ in self._timers), default=now + 3600.0) - now
        for key, events in self._selector.select(max(left_s, 0.0)):
            if isinstance(key.fileobj, Connection):
                self._attempt(partial(self._served, key.fileobj, events))
            elif key.fd in self._selector.get_map():
                self._attempt(partial(key.data, key.fd))

    def _attempt(self, action: Callable[[], object]) -> None:
        """Go on with the others whatever becomes of one; a fault of ours is counted, and said once."""
        try:
            action()
        except Exception as fault:
            self.faults += 1
            if self.faults == 1 and self._says is not None:
                self._says(f"instrument: a fault of the agent itself, later ones are only counted: {fault!r:.500}")

    def _after(self, wait_s: float, action: Callable[[], object]) -> None:
        self._timers.append((time.monotonic() + wait_s, action))

    def _woken(self, descriptor: int) -> None:
        """A signal asks for the end: it comes at once where nobody is there, else after a while."""
        os.read(descriptor, 64)
        self._ends_at = self._ends_at or time.monotonic() + END_S
        self._after(END_S, self._end_if_done)
        self._end_if_done()

    def _look_again(self) -> None:
        """Whether a run is over without anything having said so."""
        self._after(AGAIN_S, self._look_again)
        for run in list(self.runs.values()):
            for process in run.living():
                if process.exit_fd < 0 and process.connection is None and process.has_exited() is not False:
                    self._vanished(process)
            self._report_if_due(run)
            self._end_of(run)

    def _end_if_done(self) -> None:
        """End where the run is over and has been told of, or the time after a signal is up."""
        now = time.monotonic()
        is_up = bool(self._ends_at) and now >= self._ends_at
        if is_up or (self._ends_at and self._jobs.is_idle and not any(run.living() for run in self.runs.values())):
            self._end()

    def _end(self) -> None:
        """End once all is exported that can be; the exporter has its own time for that."""
        if not self._exports.is_done:
            if not self._exports.is_ending:
                self._exports.end()
                self._after(END_S, self._close_exports)
            return
        if not self._is_over:
            for process in self._exports.forget_missed():
                self._say(process.run, departure.line_of_missed(process))
            lost = export_place.told(self._exports.fates)
            if lost:
                self._say_everywhere(departure.line_of_export(lost))
        self._is_over = True

    def _close_exports(self) -> None:
        self._exports.stop()
        self._end()

    def _exports_changed(self) -> None:
        self._say_of_exports()
        self._end_if_done()
        for run in list(self.runs.values()):
            self._end_of(run)

    def _say_of_exports(self) -> None:
        """Say once why the agent does not export what a process records."""
        if self._exports.problem and not self._has_told_exports:
            self._has_told_exports = True
            text = f"instrument: the agent could not export what a process records: {self._exports.problem}"
            self._say_everywhere(text)

    def _leave_export_to(self, process: Process) -> None:
        """Have a process that lives export what it records itself, and at once."""
        if process.lives and process.connection is not None:
            self._send(process.connection, {"yours": True})

    def _close(self) -> None:
        self._jobs.stop()
        self._exports.stop()
        for connection in list(self._connections):
            self._drop(connection)
        for run in self.runs.values():
            for process in run.processes:
                process.release()
            if run.first_fd >= 0:
                os.close(run.first_fd)
        self._selector.close()
        self._listener.close()
        os.close(self._wake)
        os.close(self._waker)

    # ---------------------------------------------------------------- connections

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self._listener.accept()
        except OSError:
            return  # it went away again, or there is no descriptor left
        connection = Connection(sock)
        if not connection.is_trusted or len(self._connections) >= CONNECTIONS:
            connection.close()
            return
        self._connections[connection] = None
        self._selector.register(connection, selectors.EVENT_READ)

    def _served(self, connection: Connection, events: int) -> None:
        if connection not in self._connections:
            return  # dropped in this very turn
        if events & selectors.EVENT_WRITE:
            connection.flush()
        if events & selectors.EVENT_READ:
            self._receive(connection)
        self._watch(connection)

    def _receive(self, connection: Connection) -> None:
        for _ in range(PACKETS_AT_ONCE):
            try:
                message, descriptors = connection.receive()
            except BlockingIOError:
                return
            except packets.PacketError:
                self._drop(connection)
                return
            if message is None:
                self._drop(connection)
                return
            try:
                kept = self._heard(connection, message, descriptors)
            except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, OSError) as problem:
                kept = []
                connection.is_broken = True  # it is JSON, and says nothing that we know, or the fault is ours
                self._note_refused(problem)
            for descriptor in descriptors:
                if descriptor not in kept:
                    os.close(descriptor)
            if connection.is_broken:
                self._drop(connection)
                return

    def _note_refused(self, problem: Exception) -> None:
        self.refused += 1
        if self.refused == 1 and self._says is not None:
            words = f"{type(problem).__name__}: {problem!s:.200}"
            self._says(f"instrument: the agent could not take what a process told it, later ones are counted: {words}")

    def _watch(self, connection: Connection) -> None:
        """Go on with a connection: wait until more can be sent where anything waits to be."""
        if connection not in self._connections:
            return
        if connection.is_broken:
            self._drop(connection)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_waiting else 0)
        if self._selector.get_key(connection).events != wanted:
            self._selector.modify(connection, wanted)

    def _send(self, connection: Connection, message: packets.Message, descriptors: list[int] | None = None) -> None:
        if connection in self._connections:
            connection.send(message, descriptors or [])
            self._watch(connection)

    def _drop(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        process = self._connections.pop(connection)
        self._selector.unregister(connection)
        connection.close()
        for question in list(self._questions.values()):
            if question.asker is connection:
                del self._questions[question.number]
        if process is not None and process.connection is connection:
            process.connection, process.hears = None, False
            self._lost(process)
        for run in self.runs.values():
            if run.waiting is connection:
                run.waiting = None

    def _heard(self, connection: Connection, message: packets.Message, descriptors: list[int]) -> list[int]:
        """Act on a packet. Returns those of its descriptors that are kept."""
        process = self._connections[connection]
        if "join" in message:
            return self._joined(connection, dict(message["join"]), descriptors)
        if "ask" in message:
            self._asked(connection, message)
        elif process is not None and "saved" in message:
            self._saved(process)
        elif process is not None and not process.lives:
            pass  # it goes on after its goodbye, or is about to end
        elif process is not None and "records" in message:
            process.has_recorded = True
            process.run.is_told = False
            journal.note(self._folder, process)
        elif process is not None and "exports" in message:
            self._exports.release(process)
        elif process is not None and "flush" in message:
            self._exports.flush(process)
        elif process is not None and "hears" in message:
            process.hears = True
        elif process is not None and "goodbye" in message:
            self._said_goodbye(process, dict(message["goodbye"]), is_answered=bool(message.get("is_answered")))
        elif process is not None and "answer" in message:
            self._answered(process, int(message["number"]), dict(message["answer"]))
        elif "ended" in message and connection.pid == os.getppid():
            self._told_status(int(message["ended"]), int(message["status"]))
        else:
            connection.is_broken = True
        return []

    # ---------------------------------------------------------------- processes

    def _joined(self, connection: Connection, facts: dict[str, Any], descriptors: list[int]) -> list[int]:
        if self._connections[connection] is not None:
            raise ValueError("a connection joins once")
        name = str(facts.get("run", ""))[:64]
        run = self._run_of(name)
        pid, started = connection.pid or int(facts["pid"]), int(facts["started"])
        image = bytes.fromhex(str(facts.pop("image", "")))  # by now it may run another program already
        memory = descriptors[0] if descriptors and stat.S_ISREG(os.fstat(descriptors[0]).st_mode) else -1
        known = next((one for one in run.processes if one.lives and (one.pid, one.started) == (pid, started)), None)
        is_back = memory < 0 or (known is not None and _is_same(memory, known.memory))
        if known is not None and is_back and not known.has_become_another_program():
            known.facts, known.connection, self._connections[connection] = facts, connection, known
            self._export(known)
            return []  # it has lost its connection, and comes back with the same recording
        if known is not None:
            self._replaced(known)
        process = Process(
            run=run, pid=pid, started=started, facts=facts, joined_ns=time.monotonic_ns(), memory=memory,
            exit_fd=exit_fd_of(connection.pid, started), connection=connection, image=image or image_of(connection.pid),
        )  # fmt: skip
        self._connections[connection] = process
        process.has_recorded = bool(facts.get("records"))
        if process.has_recorded:
            journal.note(self._folder, process)
        process.memory_events = exit_status.memory_events(connection.pid)
        process.oom_kills = exit_status.oom_kills(process.memory_events)
        run.processes.append(process)
        if facts.get("is_first") and not run.first:
            run.first = pid
        if not run.stderr or pid == run.first:
            run.stderr = str(facts.get("stderr", ""))
        if process.exit_fd >= 0:
            self._selector.register(process.exit_fd, selectors.EVENT_READ, lambda _: self._exited(process))
        self._export(process)
        return [memory] if memory >= 0 else []

    def _export(self, process: Process) -> None:
        self._attempt(partial(self._exports.add, process))
        self._say_of_exports()

    def _take_over(self) -> None:
        """Tell of the processes that have ended since an agent before this one did."""
        for process in journal.missed(self._folder, self._run_of):
            self._attempt(partial(self._exports.add_missed, process))
            self._vanished(process)

    def _run_of(self, name: str) -> Run:
        return self._run if self._run is not None else self.runs.setdefault(name, Run(name))

    def _said_goodbye(self, process: Process, facts: dict[str, Any], *, is_answered: bool) -> None:
        """A process leaves. Of several that have recorded, each saves it, and the last one gets the run's report."""
        connection, run = process.connection, process.run
        process.goodbye = facts
        process.has_recorded = process.has_recorded or bool(facts.get("calls"))
        is_last = run.is_last(process) and (process.has_recorded or not run.is_told)
        if is_answered and connection is not None:
            answer: dict[str, Any] = {}
            is_part = process.has_recorded and not (is_last and run.recorded() == [process])
            process.is_saving = is_part
            # Many spans are read from its memory, which takes a tenth of its time and nothing of the process.
            by_agent = not facts.get("is_timed") and process.memory >= 0 and rows_held(process.memory) > MOST_ROWS
            if is_part and by_agent:
                self._save(process)
            elif is_part:
                process.saves_itself = True
                process.saved = answer["save"] = str(self._folder / f"{process.pid}-{time.monotonic_ns()}.npz")
            if not is_last:
                answer["others"] = True
            elif run.recorded() not in ([], [process]):
                answer["wait"] = True
                run.waiting = connection
            run.is_told = run.is_told or is_last
            self._send(connection, {"goodbye": answer})
        self._ended(process, GOODBYE)
        if not process.is_saving:
            process.release()
        self._report_if_due(run)

    def _report_if_due(self, run: Run) -> None:
        """Make the report for the process that waits for it, once the others have saved what they recorded."""
        connection = run.waiting
        if connection is None or any(one.is_saving for one in run.processes) or not self._jobs.is_idle:
            return
        run.waiting = None

        def then(answer: Any) -> None:
            if connection in self._connections:
                self._send(connection, {"goodbye": answer})
            elif answer.get("report"):
                self._say(run, str(answer["report"]))  # who waited for it has not waited so long
            self._end_of(run)

        self._jobs.start(departure.report_of(run), then)

    def _saved(self, process: Process) -> None:
        """What a process that has ended recorded is saved now, by itself or from its memory, or cannot be."""
        process.is_saving = False
        process.release()
        self._report_if_due(process.run)
        self._end_of(process.run)

    def _exited(self, process: Process) -> None:
        """The system says that the process has ended: what it has said before that comes first."""
        if process.connection is not None:
            self._receive(process.connection)
        if process.lives:
            self._vanished(process)

    def _lost(self, process: Process) -> None:
        """Its connection has ended. It may run on: with another program, or having closed all that it found open."""
        if not process.lives:
            if process.is_saving and process.saves_itself:  # it has gone over it
                self._save(process)
            return
        has_exited = process.has_exited()
        if has_exited is None or has_exited:
            self._vanished(process)
        elif process.has_become_another_program():
            self._replaced(process)

    def _vanished(self, process: Process) -> None:
        process.is_saving = process.look()
        self._ended(process, VANISHED)
        if process.has_recorded:
            self._after(STATUS_S, lambda: self._capture(process))

    def _replaced(self, process: Process) -> None:
        """Its program has gone without a word, and for a good reason: what it recorded is part of the run's report."""
        process.is_saving = process.look()
        self._ended(process, REPLACED)
        if process.has_recorded:
            self._save(process)

    def _save(self, process: Process) -> None:
        """Save for the run's report what a process has left in memory."""
        process.saves_itself = False
        process.saved = str(self._folder / f"{process.pid}-{time.monotonic_ns()}.npz")

        def then(answer: Any) -> None:
            process.saved = str(answer.get("path", ""))
            self._saved(process)

        self._jobs.start(departure.capture_of(process, process.saved), then)

    def _ended(self, process: Process, how: str) -> None:
        process.ended_ns, process.how = time.monotonic_ns(), how
        journal.forget(self._folder, process)
        self._exports.note_ended(process)
        if process.exit_fd >= 0:
            self._selector.unregister(process.exit_fd)
            if how == VANISHED and process.status is None:
                process.status = exit_status.status_of(process.exit_fd, process.pid)
            os.close(process.exit_fd)
            process.exit_fd = -1
        self._trim(process.run)
        self._after(GRACE_S, lambda: self._end_of(process.run))

    def _told_status(self, pid: int, status: int) -> None:
        """Who reaps the processes tells how one has ended."""
        for run in self.runs.values():
            for process in run.processes:
                if process.pid == pid and process.status is None:
                    process.status = status

    def _capture(self, process: Process) -> None:
        """Save what a process that vanished has left, and say so."""
        run = process.run
        run.captures += 1
        if process.memory < 0:
            self._captured(process, {"error": departure.why_unread(process)})
            return
        if run.captures > CAPTURES:
            error = {"error": f"{CAPTURES} others are; what it recorded is in the report of the run"}
            self._say(run, departure.line_of(process, error), process)
            self._save(process)
            return
        path = departure.place_of_capture(process, self._captures)
        self._jobs.start(departure.capture_of(process, path), partial(self._captured, process))

    def _captured(self, process: Process, answer: Any) -> None:
        process.saved = str(answer.get("path", ""))
        if process.saved:
            service, disk_bytes = str(process.facts.get("service")), int(process.facts.get("disk_bytes") or DISK_BYTES)
            kept = {one.saved for run in self.runs.values() for one in run.processes}
            departure.make_room(Path(process.saved), service, kept, disk_bytes)
        self._say(process.run, departure.line_of(process, answer), process)
        self._saved(process)

    def _say(self, run: Run, text: str, process: Process | None = None) -> None:
        """Say something where the run's processes write their errors."""
        if telling.tell(run, text, process):
            return
        if self._says is not None:
            self._says(text)
        elif process is not None and process.saved:
            telling.leave_beside(process.saved, text)

    def _say_everywhere(self, text: str) -> None:
        for run in self.runs.values():
            self._say(run, text)

    def _first_exited(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        if self._run is not None:
            run = self._run
            self._after(GRACE_S, lambda: self._end_of(run))

    def _trim(self, run: Run) -> None:
        """Keep nothing of processes that have ended and had recorded nothing, and of many others only their totals."""
        ended = [one for one in run.processes if one.ended_ns and not one.is_saving]
        for process in [one for one in ended if not one.has_recorded]:
            run.processes.remove(process)
            process.release()
        kept = [one for one in ended if one.has_recorded]
        if len(kept) < ENDED or run.waiting is not None or not self._jobs.is_idle:
            return
        for process in kept[: ENDED // 2]:
            run.processes.remove(process)
            process.release()
        run.folded_count += ENDED // 2
        paths = [path for path in [run.folded, *(one.saved for one in kept[: ENDED // 2])] if path]
        into = str(self._folder / f"before-{time.monotonic_ns()}.npz")

        def then(answer: Any) -> None:
            run.folded = str(answer.get("path", ""))
            self._report_if_due(run)
            self._end_of(run)

        if paths:
            self._jobs.start(lambda: run_report.fold(paths, into), then)

    def _end_of(self, run: Run) -> None:
        """Tell of the run and let it go, once nobody is left of it; of one that nobody could tell, tell now."""
        now_ns = time.monotonic_ns()
        if not run.is_over() or any(now_ns - one.ended_ns < GRACE_S * 1e9 for one in run.processes):
            if run.is_over():
                self._after(GRACE_S, lambda: self._end_of(run))
            return
        if not self._jobs.is_idle or any(one.is_saving for one in run.processes):
            return  # what is being saved of it calls again
        if not run.is_told and any(one.facts.get("report") for one in run.recorded()):
            run.is_told = True
            self._jobs.start(departure.report_of(run), lambda answer: self._told(run, answer))
            return
        if run is self._run:
            self._end()
            return
        if self._exports.waits_for(run):
            return  # it calls again
        for process in run.processes:
            process.release()
        self.runs.pop(run.name, None)
        self._end_if_done()

    def _told(self, run: Run, answer: Any) -> None:
        if answer.get("report"):
            self._say(run, str(answer["report"]))
        self._end_of(run)

    def _say_if_nobody_joined(self) -> None:
        run = self._run
        if run is not None and run.first_lives() and not run.living() and not run.recorded():
            self._say(run, departure.nobody_joined(run.first, START_S))

    # ---------------------------------------------------------------- what is asked

    def _asked(self, connection: Connection, message: packets.Message) -> None:
        what = message["ask"]
        if what == "processes":
            for run in self.runs.values():
                for process in run.processes:
                    process.look()
                    memory = [process.memory] if message.get("memory") and process.memory >= 0 else []
                    self._send(connection, {"process": departure.facts_of(process)}, memory)
            names = [{"run": run.name, "first": run.first, "lost": run.lost} for run in self.runs.values()]
            self._send(connection, {"end": {"agent": os.getpid(), "runs": names, "faults": self.faults}})
        elif what == "do":
            self._ask_processes(connection, dict(message["do"]), [int(pid) for pid in message.get("pids") or ()])
        else:
            connection.is_broken = True

    def _ask_processes(self, connection: Connection, wanted: dict[str, Any], pids: list[int]) -> None:
        self._numbers += 1
        question = Question(self._numbers, connection)
        for run in self.runs.values():
            for process in run.living():
                if pids and process.pid not in pids:
                    continue
                if process.connection is None:
                    answer = {"error": "it has closed its connection to the agent"}
                    self._send(connection, {"pid": process.pid, "answer": answer})
                    continue
                self._send(process.connection, {"do": wanted, "number": question.number})
                if process.hears:
                    question.waiting.add(process)
                else:
                    why = "it has recorded nothing yet; it will do so before it records anything"
                    self._send(connection, {"pid": process.pid, "answer": {"pending": why}})
        self._questions[question.number] = question
        self._after(ASKED_S, lambda: self._questions.pop(question.number, None))
        self._end_question(question)

    def _answered(self, process: Process, number: int, answer: dict[str, Any]) -> None:
        question = self._questions.get(number)
        if question is None or process not in question.waiting:
            return
        question.waiting.discard(process)
        self._send(question.asker, {"pid": process.pid, "answer": answer})
        self._end_question(question)

    def _end_question(self, question: Question) -> None:
        question.waiting = {one for one in question.waiting if one.lives}
        if not question.waiting and self._questions.pop(question.number, None) is not None:
            self._send(question.asker, {"end": {"agent": os.getpid()}})


class Question:
    """What somebody asks the processes, and those that have not answered yet."""

    def __init__(self, number: int, asker: Connection) -> None:
        self.number = number
        self.asker = asker
        self.waiting: set[Process] = set()


def _is_same(one: int, other: int) -> bool:
    with suppress(OSError):
        return other >= 0 and os.path.sameopenfile(one, other)
    return False
