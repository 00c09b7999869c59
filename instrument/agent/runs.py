"""The agent's bookkeeping of runs: it follows each process until its end, and prints a report at the end of a run."""

from __future__ import annotations

import os
import selectors
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from instrument.agent import causes_of_end, end_reports, processes
from instrument.agent.child import Jobs, Saves
from instrument.agent.exporter_process import Exports
from instrument.agent.loop import Connection, EventLoop
from instrument.agent.processes import (
    EXITED,
    GOODBYE,
    REPLACED,
    VANISHED,
    Process,
    Run,
    exit_fd_of,
    find_exit_fd_by_variable,
)
from instrument.agent.unseen import ConnectionWatch, Unseen
from instrument.recording.memory_layout import RecordingHead
from instrument.runtime import agent_socket, environment

RUN_END_S = 0.3
"""Seconds without a living process after which a run ends. Within this time a child process may still join."""

CHECK_INTERVAL_S = 5.0
"""Seconds between two searches for ended processes and runs whose end caused no event."""

EXIT_STATUS_WAIT_S = 0.3
"""Seconds for which the agent waits until a vanished process's parent reports the exit status."""

MOST_CAPTURES = 20
"""The maximum number of captures per run. Beyond that, vanished processes are counted without a capture."""

DEFAULT_DISK_BYTES = 1 << 30
"""The maximum number of bytes of a service's captures if its profile gives no `limits.disk`."""

MOST_SELF_SAVED_ROWS = 10_000
"""The maximum number of spans that an exiting process saves itself. The agent saves a larger recording."""

MOST_ENDED = 16
"""The maximum number of ended processes per run. Beyond it, the older half is merged into totals."""

NONE_JOINED_S = 10.0
"""Seconds after a run's start at which the agent reports that no process has joined."""

ABANDONED_S = 60.0
"""Seconds after which a new agent removes the report files of an earlier agent."""


class Runs:
    """The runs of an agent, with their processes.

    - `own_run`: the only run of the agent, or None if any process may join
    - `folder`: the folder for recordings from which the report of a run is made
    - `captures`: the folder for captures of processes that vanished
    - `says`: called with each message that neither a standard error nor the system's log accepts
    - `changed`: called when the agent may have nothing left to do
    """

    def __init__(
        self,
        loop: EventLoop,
        folder: Path,
        own_run: Run | None,
        captures: Path | None,
        says: Callable[[str], object] | None,
        changed: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._folder = folder
        self._own = own_run
        self._captures = captures
        self._say = partial(end_reports.deliver_message, says)
        self._changed = changed
        self._runs: dict[str, Run] = {} if own_run is None else {own_run.name: own_run}
        self._members: dict[Connection, Process] = {}
        self._jobs = Jobs(loop.selector)
        self._saves = Saves(self._jobs, folder, self.note_saved_recording)
        self.exports = Exports(loop, folder, self._handle_export_end, self.write_stderr_of_runs, self._send_message)
        self._takes_over = bool(processes.count_noted_processes(folder)[0])
        """True if processes that joined an earlier agent are still alive."""
        self._connections = ConnectionWatch(
            loop, self._send_message, lambda: (process for run in self for process in run.living_processes())
        )
        self._another_fd = -1
        self.unseen = Unseen(
            loop,
            folder / agent_socket.SOCKET,
            0 if own_run is None else own_run.first,
            lambda: {process.pid for run in self for process in run.processes},
        )
        """The Python processes of the agent's own run that record nothing."""
        self.own_is_over = False
        """True once the agent's own run is over and was reported."""
        if own_run is None:
            loop.call_later(ABANDONED_S, lambda: end_reports.remove_abandoned_report_files(folder, self, says or bool))
        else:
            if own_run.first and own_run.first_fd < 0:
                own_run.first_fd = exit_fd_of(own_run.first, 0)
            if own_run.first_fd >= 0:
                loop.selector.register(own_run.first_fd, selectors.EVENT_READ, self._handle_exit_of_first_process)
            loop.call_later(NONE_JOINED_S, self._report_empty_run)
        loop.call_later(CHECK_INTERVAL_S, self._check_for_missed_ends)
        loop.call_later(0, self._handle_missed_ends)

    def __iter__(self) -> Iterator[Run]:
        return iter(list(self._runs.values()))

    def find_process(self, connection: Connection) -> Process | None:
        return self._members.get(connection)

    @property
    def are_done(self) -> bool:
        """True if no process is alive, and no child is saving a recording."""
        return self.are_saved and not any(run.living_processes() for run in self)

    @property
    def are_saved(self) -> bool:
        return self._jobs.is_idle

    def close(self, kept_runs: Collection[Run] = ()) -> None:
        """Stop all work and close all descriptors. The report files of `kept_runs` remain for the next agent."""
        self._jobs.stop()
        self.exports.stop()
        if self._another_fd >= 0:
            os.close(self._another_fd)
        for run in self:
            self._forget(run, keeps_files=run in kept_runs)
            if run.first_fd >= 0:
                os.close(run.first_fd)

    # ---------------------------------------------------------------- who joins

    def add_process(self, connection: Connection, facts: dict[str, Any], descriptors: list[int]) -> list[int]:
        """Add a process that joins or connects again. Return the received descriptors that the caller must not
        close."""
        if connection in self._members:
            raise ValueError("a connection joins once")
        name = str(facts.get("run", ""))[:64]
        run = self._get_or_add_run(name)
        pid, started = connection.pid or int(facts["pid"]), int(facts["started"])
        image = bytes.fromhex(str(facts.pop("image", "")))  # by now it may run another program already
        memory = descriptors[0] if descriptors and stat.S_ISREG(os.fstat(descriptors[0]).st_mode) else -1
        living = run.find_living(pid, started)
        if living is not None and living.connection is not None:
            self._loop.handle_packets(living.connection, is_last=True)  # its goodbye, where this is its next session
            living = run.find_living(pid, started)
        is_back = memory < 0 or (living is not None and _is_same_file(memory, living.memory))
        if living is not None and is_back and not living.has_become_another_program():
            living.facts, living.connection, self._members[connection] = facts, connection, living
            self._export_recording(living)
            if facts.get("records") and not living.has_recorded:
                self.note_recording_start(living)
            else:
                self._read_gauges(living)
            return []  # it has lost its connection, and comes back with the same recording
        if living is not None:
            self._end_replaced_process(living)
        process = Process(
            run=run, pid=pid, started=started, facts=facts, joined_ns=time.monotonic_ns(), memory=memory,
            exit_fd=exit_fd_of(connection.pid, started), connection=connection, is_elsewhere=not connection.pid,
            image=image or (environment.read_auxiliary_vector(connection.pid) if connection.pid else b""),
        )  # fmt: skip
        self._members[connection] = process
        process.has_recorded = bool(facts.get("records"))
        if process.has_recorded:
            processes.write_note(self._folder, process)
        process.memory_events = causes_of_end.find_memory_events(connection.pid)
        process.oom_kills = causes_of_end.read_oom_kills(process.memory_events)
        run.processes.append(process)
        if facts.get("is_first") and not run.first:
            run.first = pid
        run.first_has_joined = run.first_has_joined or pid == run.first
        if not run.stderr or pid == run.first:
            run.stderr = str(facts.get("stderr", ""))
        if process.exit_fd >= 0:
            self._loop.selector.register(process.exit_fd, selectors.EVENT_READ, lambda _: self._handle_exit(process))
        self._export_recording(process)
        self._read_gauges(process)
        self._connections.watch_process(process)
        return [memory] if memory >= 0 else []

    def _handle_missed_ends(self) -> None:
        for process in processes.add_missed_processes(self._folder, self._get_or_add_run):
            self._note_vanished(process)
            if process.memory >= 0:
                self.exports.count_unread_rows(process, process.memory, is_reported=False)

    def _get_or_add_run(self, name: str) -> Run:
        return self._own if self._own is not None else self._runs.setdefault(name, Run(name))

    def note_recording_start(self, process: Process) -> None:
        process.has_recorded = True
        process.run.is_reported = False
        processes.write_note(self._folder, process)
        self._read_gauges(process)

    def _read_gauges(self, process: Process) -> None:
        if process.has_recorded:
            self._loop.attempt(partial(self.exports.read_gauges, process))

    # ---------------------------------------------------------------- who leaves

    def handle_goodbye(self, process: Process, facts: dict[str, Any], *, is_answered: bool) -> None:
        """Answer the goodbye of a process. The answer may ask the process to save its recording. The last process is
        asked to print the run's report."""
        connection, run = process.connection, process.run
        process.goodbye = facts
        unmet, process.has_requests = facts.get("unmet"), process.has_requests or bool(facts.get("requests"))
        process.has_recorded = process.has_recorded or bool(facts.get("calls") or unmet)
        is_last = run.must_print_report(process) and (process.has_recorded or not run.is_reported)
        is_last = is_last and not (self._takes_over and processes.has_unjoined_processes(self._folder, run))
        if is_answered and connection is not None:
            answer: dict[str, Any] = {}
            has_others = run.processes_with_spans() not in ([], [process]) or bool(
                end_reports.list_processes_of_earlier_agent(self._folder, run)
            )
            process.is_reported = is_last and not has_others
            is_part = process.has_recorded and not process.is_reported
            process.is_saving = is_part
            # Many spans are read from its memory, which takes a tenth of its time and nothing of the process.
            rows = 0 if facts.get("is_timed") else process.read_recording_head(RecordingHead.count_rows, 0)
            if is_part and rows > MOST_SELF_SAVED_ROWS:
                self._save_recording(process)
            elif is_part:
                process.saves_itself = True
                process.saved = answer["save"] = end_reports.path_for_report(self._folder, process)
            if not is_last:
                answer["others"] = True
            elif has_others:
                answer["wait"] = True
                run.waiting = connection
            else:
                answer["unseen"] = self.unseen.describe_unseen(for_report=True)
            run.is_reported = run.is_reported or is_last
            self._loop.send(connection, {"goodbye": answer})
        self._note_process_end(process, GOODBYE)
        self._report_unrecorded(process, str(unmet or ""))
        if not process.is_saving:
            process.release()
        self._report_if_due(run)

    def _report_if_due(self, run: Run) -> None:
        connection = run.waiting
        if connection is None or any(process.is_saving for process in run.processes) or not self._jobs.is_idle:
            return
        run.waiting = None
        report = end_reports.make_report_job(run, end_reports.list_processes_of_earlier_agent(self._folder, run))
        self._jobs.start(report, partial(self._print_report, run, connection=connection))

    def note_saved_recording(self, process: Process) -> None:
        process.is_saving = False
        for path in process.files:
            self._make_room(process, Path(path))
        if process.end_kind in (VANISHED, EXITED):
            processes.remove_note(self._folder, process)
        process.release()
        self._limit_ended_processes(process.run)
        self._report_if_due(process.run)
        self._end_if_over(process.run)

    def _handle_exit(self, process: Process) -> None:
        if process.connection is not None:
            self._loop.handle_packets(process.connection, is_last=True)
        if process.lives:
            self._note_vanished(process)
        elif not process.ended_ns:  # a fault came between its goodbye and this
            self._note_process_end(process, GOODBYE)

    def handle_disconnect(self, connection: Connection) -> None:
        if connection is self.exports.connection:
            self.exports.handle_end()
            return
        process = self._members.pop(connection, None)
        if process is not None and process.connection is connection:
            process.connection, process.hears = None, False
            self._find_disconnect_cause(process)
        for run in self:
            if run.waiting is connection:
                run.waiting, run.is_reported = None, False  # its process cannot print it: we do
                self._end_if_over(run)

    def _find_disconnect_cause(self, process: Process) -> None:
        if not process.lives:
            if process.is_saving and process.saves_itself:  # it has gone over it, or before it said that it is done
                end_reports.remove_listed_report_files(self._folder, [process.saved])
                self._save_recording(process)
            return
        has_exited = process.has_exited()
        if has_exited is None or has_exited:
            self._note_vanished(process)
        elif process.has_become_another_program():
            self._end_replaced_process(process)

    # ---------------------------------------------------------------- who vanishes

    def _note_vanished(self, process: Process) -> None:
        process.is_saving = process.update_has_recorded()
        if process.has_recorded:  # it may not have said so yet
            processes.write_note(self._folder, process)
        self._note_process_end(process, VANISHED)
        if process.has_recorded:
            wait_s = 0 if process.status == 0 else EXIT_STATUS_WAIT_S
            self._loop.call_later(wait_s, lambda: self._save_capture(process))
        self._report_unrecorded(process, "")

    def _report_unrecorded(self, process: Process, reason: str) -> None:
        if reason and process.facts.get("report"):
            return
        is_asked = process.facts.get("asks_for_requests", True)
        if not reason and is_asked and not any(member.has_requests for member in (process, *process.run.processes)):
            self._loop.attempt(partial(self._connections.update_ports, process))
            ports = ", ".join(map(str, sorted(process.ports)))
            reason = f"connections came to its port {ports}, and it has recorded no request" if ports else ""
        if reason:
            self._say(process.run, f"instrument: process {process.pid}: {reason}", process)

    def _end_replaced_process(self, process: Process) -> None:
        process.is_saving = process.update_has_recorded()
        self._note_process_end(process, REPLACED)
        if process.has_recorded:
            self._save_recording(process)

    def _save_recording(self, process: Process) -> None:
        process.saves_itself = False
        process.saved = end_reports.path_for_report(self._folder, process)
        self._saves.queue_recording(process)

    def _make_room(self, process: Process, saved: Path) -> None:
        service, disk_bytes = (
            str(process.facts.get("service")),
            int(process.facts.get("disk_bytes") or DEFAULT_DISK_BYTES),
        )
        report_files = {member.saved for run in self for member in run.processes} | end_reports.captures_for_reports(
            self._folder
        )
        end_reports.remove_oldest_files(saved, service, report_files, disk_bytes)

    def _note_process_end(self, process: Process, end_kind: str) -> None:
        process.ended_ns, process.end_kind = time.monotonic_ns(), end_kind
        if end_kind != VANISHED or not process.has_recorded:
            processes.remove_note(self._folder, process)
        self.exports.note_process_end(process)
        if process.exit_fd >= 0:
            self._loop.selector.unregister(process.exit_fd)
            if end_kind == VANISHED and process.status is None:
                process.status = processes.read_exit_status(process.exit_fd, process.pid)
            os.close(process.exit_fd)
            process.exit_fd = -1
        self._limit_ended_processes(process.run)
        self._loop.call_later(RUN_END_S, lambda: self._end_if_over(process.run))

    def note_exit_status(self, pid: int, status: int) -> None:
        for run in self:
            for process in run.processes:
                if process.pid == pid and process.status is None:
                    process.status = status

    def _save_capture(self, process: Process) -> None:
        """Save a capture of a vanished process, and print a message. A process with exit code 0 and no open span gets
        no capture, only a recording for the run's report."""
        run = process.run
        if process.status == 0 and not process.read_recording_head(RecordingHead.has_open_span, default=True):
            process.end_kind = EXITED
            self._save_recording(process)
            return
        run.captures += 1
        if process.memory < 0 and not process.is_missed:
            self._note_capture(process, {"error": end_reports.explain_read_failure(process)})
            return
        if run.captures > MOST_CAPTURES and process.memory >= 0:
            error = {"error": f"{MOST_CAPTURES} others are; what it recorded is in the report of the run"}
            self._say(run, end_reports.format_vanished_message(process, error), process)
            self._save_recording(process)
            return
        path = end_reports.path_of_capture(process, self._captures)
        self._jobs.start(end_reports.make_save_job(process, path, self._folder), partial(self._note_capture, process))

    def _note_capture(self, process: Process, answer: Any) -> None:
        process.saved = str(answer.get("path", ""))
        if process.saved:
            process.link = end_reports.link_to_capture(self._folder, process)
            self._make_room(process, Path(process.saved))
        self._say(process.run, end_reports.format_vanished_message(process, answer), process)
        self.note_saved_recording(process)

    # ---------------------------------------------------------------- the end of a run

    def write_stderr_of_runs(self, text: str) -> None:
        for run in self:
            self._say(run, text)

    def _handle_exit_of_first_process(self, descriptor: int) -> None:
        self._loop.selector.unregister(descriptor)
        if self._own is not None:
            run = self._own
            self._loop.call_later(RUN_END_S, lambda: self._end_if_over(run))

    def _limit_ended_processes(self, run: Run) -> None:
        ended = [process for process in run.processes if process.ended_ns and not process.is_saving]
        for process in [member for member in ended if not member.has_recorded]:
            run.processes.remove(process)
            process.release()
        with_rows = [process for process in ended if process.has_recorded]
        if len(with_rows) < MOST_ENDED or run.waiting is not None or not self._jobs.is_idle:
            return
        first = with_rows[: MOST_ENDED // 2]
        for process in first:
            run.processes.remove(process)
            process.release()
        run.folded_ends.update(map(causes_of_end.describe_end, first))
        first_files = [process.link or process.saved for process in first]
        paths = [path for path in [run.folded, *first_files] if path]
        into = end_reports.path_for_merged(self._folder, run)

        def note_merged(answer: Any) -> None:
            run.unfolded += int(answer.get("unread", len(first)))
            if answer.get("path"):
                run.folded = str(answer["path"])
            else:  # what was folded before is still there
                end_reports.remove_listed_report_files(self._folder, [into, *first_files])
            self._limit_ended_processes(run)
            self._report_if_due(run)
            self._end_if_over(run)

        if paths:
            self._jobs.start(lambda: end_reports.merge_files(paths, into), note_merged)

    def _end_if_over(self, run: Run) -> None:
        now_ns = time.monotonic_ns()
        if not run.is_over() or any(now_ns - process.ended_ns < RUN_END_S * 1e9 for process in run.processes):
            if run.is_over():
                self._loop.call_later(RUN_END_S, lambda: self._end_if_over(run))
            return
        if not self._jobs.is_idle or any(process.is_saving for process in run.processes):
            return  # what is being saved of it calls again
        if not run.is_reported and any(process.facts.get("report") for process in run.processes_with_spans()):
            run.is_reported = True
            report = end_reports.make_report_job(run, end_reports.list_processes_of_earlier_agent(self._folder, run))
            self._jobs.start(report, partial(self._print_report, run))
            return
        if run is self._own:
            if not self._may_another_process_join():
                if not self.own_is_over and (text := self.unseen.describe_unseen(for_report=True)):
                    self._say(run, f"instrument: {text}")
                self.own_is_over = True
        elif self.exports.is_exporting(run):
            return  # it calls again
        else:
            self._forget(run)
        self._changed()

    def _may_another_process_join(self) -> bool:
        """Return True if the agent's socket is in the environment of a process that has not joined. Watch for the end
        of that process."""
        if self._another_fd < 0:
            self._another_fd = find_exit_fd_by_variable(agent_socket.VARIABLE, str(self._folder / agent_socket.SOCKET))
            if self._another_fd >= 0:
                self._loop.selector.register(self._another_fd, selectors.EVENT_READ, self._handle_other_exit)
        return self._another_fd >= 0

    def _handle_other_exit(self, descriptor: int) -> None:
        self._loop.selector.unregister(descriptor)
        os.close(descriptor)
        self._another_fd = -1
        if self._own is not None:
            self._end_if_over(self._own)

    def _forget(self, run: Run, *, keeps_files: bool = False) -> None:
        for process in run.processes:
            process.release()
        if not keeps_files:
            end_reports.remove_report_files(self._folder, run)
        self._runs.pop(run.name, None)

    def _print_report(self, run: Run, answer: Any, connection: Connection | None = None) -> None:
        answer = self._complete_report(run, answer)
        if connection is not None and self._loop.is_open(connection):
            self._loop.send(connection, {"goodbye": answer})
        elif answer.get("report"):
            self._say(run, str(answer["report"]))
        self._end_if_over(run)

    def _complete_report(self, run: Run, answer: Any) -> Any:
        if not answer.get("report"):
            return answer
        unseen = self.unseen.describe_unseen(for_report=True)
        text = f"{answer['report']}  {unseen}\n" if unseen else answer["report"]
        if run is self._own and not run.stderr.startswith("/") and self.exports.lost_by_reason:
            # No process can write to a pipe any more once the agent knows of the last losses.
            text += f"{end_reports.export_loss_line(self.exports.lost_by_reason)}\n"
        return {**answer, "report": text}

    def _report_empty_run(self) -> None:
        run = self._own
        if run is None or run.living_processes() or run.processes_with_spans() or run.first_process_has_left():
            return
        if run.first_process_lives():
            self._say(run, end_reports.describe_empty_run(run.first, NONE_JOINED_S))

    def _check_for_missed_ends(self) -> None:
        """Search for processes and runs that ended without an event. Retry failed exports."""
        self._loop.call_later(CHECK_INTERVAL_S, self._check_for_missed_ends)
        self._handle_missed_ends()
        for run in self:
            for process in run.living_processes():
                self._export_recording(process)  # which may have failed before
            for process in [member for member in run.living_processes() if member.connection is None]:
                if process.exit_fd < 0 and process.has_exited() is not False:
                    self._note_vanished(process)
                elif process.has_become_another_program():  # long after it had closed all that it found open
                    self._end_replaced_process(process)
            self._report_if_due(run)
            self._end_if_over(run)

    # ---------------------------------------------------------------- what is exported of them

    def _export_recording(self, process: Process) -> None:
        self._loop.attempt(partial(self.exports.export_if_wanted, process))

    def _handle_export_end(self) -> None:
        self._changed()
        for run in self:
            self._end_if_over(run)

    def _send_message(self, process: Process, message: Mapping[str, Any]) -> None:
        if process.connection is not None:
            self._loop.send(process.connection, message)


def _is_same_file(descriptor: int, other_descriptor: int) -> bool:
    with suppress(OSError):
        return other_descriptor >= 0 and os.path.sameopenfile(descriptor, other_descriptor)
    return False
