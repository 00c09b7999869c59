"""The end of a session within a deadline: the last spans are sent, files are written, and the summary is printed.

The process first says goodbye to the agent. The agent decides which process prints the run's report.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from instrument.clock import Deadline
from instrument.instrumentors.verdict import write_check_report
from instrument.recorder.recorder import RECORDER
from instrument.recording import board
from instrument.runtime import agent_socket, environment
from instrument.runtime.environment import CHECK_FOLDER
from instrument.runtime.faults import FAULTS, logger
from instrument.runtime.lazy_imports import dataclass
from instrument.runtime.termination import call_before_exit
from instrument.runtime.threads import Thread
from instrument.sessions import window_files
from instrument.sessions.exporting import Exporting
from instrument.sessions.membership import Membership, file_of_descriptor
from instrument.sessions.published_facts import PublishedFacts
from instrument.sessions.recorded import Recorded
from instrument.sessions.window_files import Saving

AGENT_SEND_S = 1.0
"""The maximum seconds for which an ending process waits for the agent to send the process's spans. The run's first
process waits until its deadline."""

STALLED_AGENT_S = 1.0
"""Seconds for which an ending process waits for an agent that reads no new rows, such as a stopped one."""

LAST_SEND_S = 1.0
"""Seconds before the deadline that are reserved for sending if this process exports by itself."""

EXIT_LIMIT_NS = 5 * 10**9
"""The maximum time in ns for the end of a session, without the time to write files."""

SENDING_S, REPORT_S, SUMMARY_S = 2.5, 1.5, 0.5
"""The minimum seconds of `EXIT_LIMIT_NS` that remain at the start of sending, of the run's report, and of the
summary."""

UNHEARD = "agent: the agent of the run does not answer: each process of the run reports on itself alone"
UNTOLD = "agent: it is not known how process %s ended, or whether there is a capture: the agent of the run had ended"
UNSENT = "agent: up to %d spans of processes that had ended are perhaps not exported: the agent of the run was killed"


def _can_agent_report() -> bool:
    """Return True if the agent can print after this process has ended, because standard error is a file or a
    terminal."""
    return file_of_descriptor(2).startswith("/")


@dataclass(eq=False)
class Leaving:
    """The end of a session: the last exports, the goodbye to the agent with `_facts`, and the summary. `_stop()` ends
    the session."""

    _recorded: Recorded
    _exporting: Exporting
    _saving: Saving
    _membership: Membership
    _facts: PublishedFacts
    _stop: Callable[[], None]

    def __post_init__(self) -> None:
        self._observed_for = os.environ.get(environment.INIT_FOLDER, "")
        self.undos: list[Callable[[], object]] = []
        """Functions that undo the exit and signal handlers. They are called last, so that these handlers work until
        then."""

    def prepare_exit(self) -> None:
        """Make the session end at the process's exit. Report to `instrument init` if it started the process."""
        atexit.register(self._stop_at_exit)
        self.undos.append(lambda: atexit.unregister(self._stop_at_exit))
        if self._membership.path:
            self.undos.append(call_before_exit(lambda status: self._membership.send({"exits": status})))
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Make the session end when a forked child exits by `os._exit`, which calls no handler of `atexit`."""
        if self._observed_for:
            from instrument.proposal import observation

            FAULTS.attempt("report to init", partial(observation.mark_process_started, self._observed_for))
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.register_after_fork(self, Leaving._register_finalizer)
            if sys.modules["multiprocessing.process"].parent_process() is not None:  # it has cleared them
                self._register_finalizer()
        if (signals := sys.modules.get("celery.signals")) is not None:
            signals.worker_process_shutdown.connect(
                lambda **_: self._stop_at_exit(), weak=False, dispatch_uid="instrument"
            )

    def _register_finalizer(self) -> None:
        util = sys.modules["multiprocessing.util"]
        util.Finalize(None, self._stop_at_exit, exitpriority=-100)

    def _stop_at_exit(self) -> None:
        """End the session at interpreter exit. If a KeyboardInterrupt ended the program, raise it again, so that Python
        exits by the signal."""
        FAULTS.attempt("exit", self._stop)
        if issubclass(getattr(sys, "last_type", None) or object, KeyboardInterrupt):
            with suppress(KeyboardInterrupt):
                exec("raise KeyboardInterrupt")  # noqa: S102 - of text: the end of such code is what is noted

    def stop_on_thread(self) -> None:
        """End the session on a new thread after the main thread has ended. Otherwise our threads keep the process
        alive."""
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        Thread(self._stop, "instrument-exit").start()

    def _write_reports(self) -> None:
        if folder := os.environ.get(CHECK_FOLDER):
            report = partial(write_check_report, folder, RECORDER.calls, self._recorded.profile)
            FAULTS.attempt("report to check", lambda: report(self._recorded.account.verdicts()))
        if self._observed_for:
            FAULTS.attempt("report to init", self._write_observation)

    def _write_observation(self) -> None:
        from instrument.proposal import observation

        recorded = self._recorded
        watch, cost = recorded.selection.argument_watch(), recorded.cost()
        observation.write_report(
            self._observed_for,
            tally=recorded.tally(),
            verdicts=recorded.account.verdicts(),
            arguments={} if watch is None else watch.make_summaries(),
            shapes=RECORDER.shapes,
            blockers=recorded.selection.blockers(),
            lasted_ns=recorded.measure_length_ns(),
            cost_ns=cost.calls * cost.per_call_ns + (0 if watch is None else watch.spent_ns),
        )

    def make_deadline(self) -> Deadline:
        return Deadline(EXIT_LIMIT_NS / 1e9)

    def finish_session(self, deadline: Deadline) -> None:
        recorded, exporting = self._recorded, self._exporting
        self._write_reports()
        is_first = self._saving.destination().is_first
        is_due = (
            RECORDER.calls
            or recorded.account.describe_unrecorded_requests()
            or (is_first and board.RECORDED not in board.read_marks())
        )
        if is_due:
            FAULTS.attempt("last window", partial(self._send_last_data, deadline))
        exporting.finish_export(has_delivered=bool(is_due))
        RECORDER.write_goodbye()
        FAULTS.attempt("goodbye", partial(self._say_goodbye, deadline, is_due=bool(is_due)))
        while self.undos:
            FAULTS.attempt("way back", self.undos.pop())

    def _send_last_data(self, deadline: Deadline) -> None:
        recorded, exporting, exporter = self._recorded, self._exporting, self._recorded.exporter
        window = recorded.windows.stop(recorded.end_ns or 0)
        deadline = deadline.make_earlier_deadline(REPORT_S if self._membership.path else SUMMARY_S)
        if exporter is not None:
            is_here = exporting.handover.is_here
            if is_here:  # which may not have begun yet
                exporter.start()
                exporting.export_rest(time.monotonic() + deadline.make_earlier_deadline(LAST_SEND_S).seconds_left())
            elif (
                self._is_first_process()
                or recorded.profile.export.summary is not None
                or exporting.handover.is_left_unexported()
            ):
                limit_s = deadline.seconds_left(math.inf if self._is_first_process() else AGENT_SEND_S)
                if not exporting.handover.left:
                    count = exporting.flush_by_agent(time.monotonic() + limit_s, STALLED_AGENT_S)[1]
                    exporting.handover.note_undelivered_spans(count, is_reported=_can_agent_report())
            exporter.stop(round(deadline.seconds_left() * 1e9))
        elif exporting.handover.writes_dataset:
            exporting.export_rest(time.monotonic() + deadline.seconds_left())
        if window is not None:
            FAULTS.attempt("last trace file", lambda: self._saving.write_window(*window))

    def _is_first_process(self) -> bool:
        is_of_run = "INSTRUMENT_RUN_PID" in os.environ
        first_pid = agent_socket.parse_first_pid(environment.read_run_name())
        return environment.is_first_process_of_run() and (is_of_run or first_pid == os.getpid())

    def _say_goodbye(self, deadline: Deadline, *, is_due: bool) -> None:
        """Send the goodbye to the agent, and print a summary. If summaries go to a standard stream, the last process
        prints one report on the whole run. Without an agent, or with a summary file, each process reports on itself."""
        account, profile = self._recorded.account, self._recorded.profile
        settings = profile.export.summary
        if settings is None:
            self._log_unsent_spans()
        shares = settings is not None and settings.to in window_files.STREAMS
        answer = self._membership.leave(
            self._facts.make_goodbye_message(), self._facts.save_recording if shares else None, deadline
        )
        if unsent := answer.get("unsent"):
            account.complain(UNSENT % unsent)
        if unseen := answer.get("unseen"):
            account.complain(unseen, log=False)
        if settings is None or answer.get("others"):
            return
        if answer.get("late"):
            logger.warning("the report of the run was not ready in time; the agent prints it later")
        elif answer.get("report"):
            self._saving.write_report(settings, str(answer["report"]), round(deadline.seconds_for_last_wait() * 1e9))
        elif is_due:
            if answer.get("unheard") and profile.agent != "off":
                account.complain(UNHEARD, log=False)
                if unreported := answer.get("unreported"):
                    account.complain(UNTOLD % ", ".join(map(str, unreported)), log=False)
            self._saving.print_summary(settings, round(deadline.seconds_for_last_wait() * 1e9))

    def _log_unsent_spans(self) -> None:
        handover = self._exporting.handover
        lost = dict(handover.losses())
        if self._recorded.exporter is not None and handover.is_here:
            losses = self._recorded.account.losses()
            lost |= {reason: count for reason, count in losses.items() if "OTLP export" in reason}
        is_for_agent = handover.has_agent and not handover.left and _can_agent_report()
        if lost and not is_for_agent:
            text = ", ".join(f"{count} {reason}" for reason, count in lost.items())
            logger.warning("some spans of this process had not reached the collector at its end: %s", text)
