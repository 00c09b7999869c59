"""The session: one profile at work in one process, from `start` to `stop`, across forks, signals and exit.

Only one session runs at a time. Everything that it changes in the process (import hook, patches, threads, exit
handler) is undone by `stop`. It owns the order of its parts: `recorded` has them and what they tell, `exporting`
looks through what is recorded and has it told, `session_threads` says when, `account` keeps the books, `generation`
takes it to another profile, `saving` leaves its files.
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
from typing import TYPE_CHECKING

from instrument.errors import InstrumentError
from instrument.instrumentors import compilers, contexts, functions
from instrument.instrumentors.verdict import CHECK_FOLDER, marks_of, report_to_check
from instrument.profile.model import Profile
from instrument.profile.presets import ENGINES
from instrument.recorder.recorder import RECORDER
from instrument.recording import board
from instrument.recording.remote_parents import noted
from instrument.recording.spans import COLLECTION
from instrument.runtime import environment, process_context
from instrument.runtime.cheap_start import LazyModule
from instrument.runtime.faults import FAULTS, logger
from instrument.runtime.termination import before_exit
from instrument.runtime.threads import Thread
from instrument.sessions import files
from instrument.sessions.deadline import LEAST_S, Deadline
from instrument.sessions.exporting import Exporting
from instrument.sessions.gauge_watch import GaugeWatch
from instrument.sessions.generation import Generations, Reload
from instrument.sessions.handover import UNDELIVERED, UNREAD
from instrument.sessions.lock import SessionLock
from instrument.sessions.membership import Membership, RunFacts, target_of
from instrument.sessions.saving import Saving
from instrument.sessions.session_threads import SessionThreads

if TYPE_CHECKING:
    from instrument import otlp
else:
    otlp = LazyModule("instrument.otlp")

SETTLE_S = 1.0
"""How long a process of a run that is to print a summary waits at its end for the agent to send what it recorded, to
say what was lost. The first process waits as long as it may: where it is in a container, that may go with it."""

UNSEEN_S = 1.0
"""Seconds that it then waits for an agent that exports and takes no notice: one that is stopped."""

LAST_SEND_S = 1.0
"""So much of that time is left to send what was read last, where the session reads its recording."""

EXIT_LIMIT_NS = 5 * 10**9
"""The longest that `stop`, interpreter exit and SIGTERM wait in all: for threads of ours, drivers, the agent, the
collector, and somebody to read the summary. Files are written to their end, however long that takes."""

SENDING_S, REPORT_S, SUMMARY_S = 2.5, 1.5, 0.5
"""What of that the waits before leave to the collector and all that follows, to the report of a run and to a summary
without one."""


UNHEARD = "agent: that of the run has gone or hears nothing: each process of the run tells of itself alone"


NO_AGENT = (
    "export.prometheus and capture.to: asked of the agent of a run, found none; nothing listens and nothing is written "
    "meanwhile (`instrument run` begins one, unless the profile says `agent: off`)"
)

UNTOLD = "agent: nobody has told how process %s ended, or whether it left a capture: the agent of the run had gone"
UNSENT = "agent: up to %d spans of processes that had ended are perhaps not exported: the agent of the run was killed"


class Session(Exporting):
    """A running session. Made by `start`; `stop` ends it. All methods may be called from any thread.

    `forget(session)` is told when it has ended.
    """

    def __init__(self, profile: Profile, forget: Callable[[Session], None]) -> None:
        super().__init__(profile)
        self._forget = forget
        self._undos: list[Callable[[], None]] = []
        self._undo_by = Deadline(0)
        self._last_undos: list[Callable[[], object]] = [lambda: forget(self)]
        self.onlookers: list[Callable[[], object]] = []
        self._forked = False
        self._is_of_thread = False
        self._observed_for = os.environ.get(environment.INIT_FOLDER, "")
        self._threads = SessionThreads(
            self.account,
            self._budget,
            self._exporter,
            waits=self._is_of_run,
            look=self._pump,
            begin_gauges=lambda: self._gauge_watch.begin(),
            is_needed=self._is_looked_after,
            sends=self._sends,
            follow=self._follow_threads,
            tell_others=self._tell_others,
        )
        folder = files.working_folder()
        self._saving = Saving(self, folder, files.run_of_process())
        self._facts_told = RunFacts(
            self,
            self._saving,
            lambda: self._gauge_watch.facts(),
            is_of_run=self._is_of_run,
            has_threads=lambda: self._threads.have_begun,
        )
        self._membership = Membership(self._facts_told.at_join, lambda: RECORDER.memory_fd, self._while_no_fork_comes)
        self._gauge_watch = GaugeWatch(
            self._gauges, self._membership, lambda: RECORDER.memory_fd, lambda: RECORDER.tell(self._facts())
        )
        self._generations = Generations(
            self,
            folder,
            self._membership,
            self._enter,
            self._refine,
            has_ended=lambda: self._threads.stopping.is_set(),
            end_of_main_thread=lambda: self._end_of_main_thread if self._is_of_thread else None,
            look_after_export=lambda is_joined: self.look_after_export(is_joined=is_joined),
            hear_agent=self._hear_agent,
        )

    def _start(self) -> None:
        limits = self.profile.limits
        folder = "" if limits.ring_folder is None else str(self._saving.folder / limits.ring_folder)
        metered = self._asks_for_metrics or self._gauges.are_wanted
        unread = self.handover.await_reader(self._recorded(), metered=metered, is_left=self._is_left_to_agent)
        if unread:
            self.account.lose(UNREAD, unread)
        RECORDER.begin(limits.ring_bytes, self._facts(), folder, limits.disk_bytes)
        if RECORDER.no_memory:
            told = f"what this process records ends with it, and no other process can read it: {RECORDER.no_memory}"
            self.account.complain(f"limits.ring_dir: {told}" if folder else told, log=bool(folder))
        self._begin()
        try:
            if self.profile.startup == "auto":
                self._undos.append(self._imports.install())
            if self._exporter is not None:
                self._exporter.prepare()
                self._choose_who_exports()
                if self._own is not None and self.handover.is_here:
                    self._own.prepare()
                RECORDER.remote_parent = lambda: noted(otlp.current_parent())
            RECORDER.trace_of = self._trace_of
            self._undos.append(contexts.watch())
            self._undos.append(contexts.watch_handovers())
            if (timing := self._timing) is not None:
                timing.install()
                self._undos.append(lambda: timing.uninstall(self._undo_by.left_s()))
                self._undos.append(compilers.watch_graphs())
            self.selection.begun = self._generations.add_engine
            self._undos.append(self.selection.attach())
            for package in ENGINES:
                if package in sys.modules:
                    self._generations.add_engine(package)
            self._undos.append(self._ranges.install())  # may import numpy, which a rule may name
            self._undos.append(lambda: self._gauge_watch.stop(self._undo_by))
            self._gauges.prepare()
            self._saving.prepare_files()
            self._choose_clock()
            self._costs.measure(with_ticks=self._ticks.are_used)
            self._undos.append(self._budget.release)
            self._budget.change(self.profile.budget)
            self._threads.start_when_needed()
            RECORDER.on = True
            self._generations.start_control()
        except BaseException:
            self._generations.stop(Deadline(0))
            self._undo(Deadline(EXIT_LIMIT_NS / 1e9))
            raise
        if self._is_first():
            self.make_board()
        if not self._is_of_run:  # else once it records, for it may never do
            FAULTS.attempt("process context", self._publish_context)
        self._last_undos.append(process_context.withdraw)
        self._join_run()
        self._begin_observation()
        self._end_with_multiprocessing()
        functions.withdraw_hint()
        atexit.register(self._at_exit)
        self._last_undos.append(lambda: atexit.unregister(self._at_exit))
        if self._membership.path:
            self._last_undos.append(before_exit(lambda status: self._membership.tell({"exits": status})))

    def _join_run(self) -> None:
        """Tell the run's agent of this process, where there is one."""
        if self._wants_agent and not self._has_agent():
            self.account.complain(NO_AGENT)
        if self.profile.agent == "off":
            return
        RECORDER.tell(self._facts())
        problem = self._membership.join()
        self._generations.listen_to_agent()
        if self._threads.have_begun:  # before it had joined, or as it did
            self._tell_that_it_records()
        if problem and not self._membership.can_begin_agent():
            self.account.complain(f"{problem}; what this process records goes with it", log=False)

    def _publish_context(self) -> None:
        """Let profilers outside find who this process is."""
        problem = process_context.publish(otlp.pack_resource(self.resource()))
        if problem:
            self.account.complain(f"process context: {problem}; profilers name this process on their own", log=False)

    def _follow_threads(self) -> None:
        """What there is to do once the threads have begun, on one of them or where the session does without waiting."""
        self._tell_that_it_records()
        if self._is_of_run or self._forked:  # of which many never record
            publish = partial(self._while_no_fork_comes, self._publish_context)  # it imports what packs it
            FAULTS.attempt("process context", publish)

    def _tell_that_it_records(self) -> None:
        """Tell the agent so before it is told that this process hears: who can be asked is known to record."""
        self._membership.tell({"records": True})
        self._generations.hear_agent()

    def make_board(self) -> None:
        """Have this process hold what the processes below it tell one another. At its start, or before it forks."""
        self._last_undos.append(board.make())

    def _choose_clock(self) -> None:
        if self.profile.clock != "tsc":
            return
        unsound = self._ticks.start(time.monotonic_ns())
        if unsound:
            self.account.complain(f"clock: tsc is not used: {unsound}", log=False)
        else:
            self._undos.append(RECORDER.stop_ticks)

    def _tell_others(self) -> None:
        """Let the other processes of the run know what this one records."""
        if self._is_of_run or self._forked:
            has_recorded = RECORDER.calls or self._threads.has_met_span
            board.put([*marks_of(self.account.verdicts(of_all=False)), *([board.RECORDED] if has_recorded else [])])

    def _undo(self, deadline: Deadline) -> None:
        self._undo_by = deadline
        RECORDER.on = False
        RECORDER.remote_parent = RECORDER.trace_of = None
        while self._undos:
            FAULTS.attempt("way back", self._undos.pop())

    # ---------------------------------------------------------------- while it runs

    # ---------------------------------------------------------------- another profile

    def reload(self, profile: Profile | str | os.PathLike[str] | None = None) -> Reload:
        """Go over to another profile: a path, a `Profile`, or None for the file of the present one, read again.

        What is new is attached, also to modules that are imported; what is gone is undone; what both want goes on
        without a gap, with the same totals. Settings of `generation.AT_START` keep their values and are told. Works on
        the calling thread, some ten milliseconds; calls of the service go on meanwhile.
        Raises `ProfileError` for a profile that cannot be used and `StateError` for a session that has ended or has no
        file; the present profile then stays in force, and the notes say so.
        """
        try:
            return self._generations.change(profile)
        except InstrumentError as error:
            self._generations.refuse(str(error))
            raise

    def _enter(self, profile: Profile) -> None:
        """Go by the settings of another profile, whose rules are at work."""
        with self._lock.held():
            self._change_settings(profile)

    def _refine(self, profile: Profile) -> None:
        """Go by rules that were added to those of the present profile, which stays the same generation."""
        with self._lock.held():
            self.profile = profile
            RECORDER.tell(self._facts())

    def _change_settings(self, profile: Profile) -> None:
        before = self.profile
        if profile == before:
            self.profile = profile  # it may lie elsewhere now
            return
        now_ns = time.monotonic_ns()
        self._windows.change(profile, now_ns)
        if profile.budget != before.budget:
            self._budget.change(profile.budget)
        self.profile = profile
        if profile.export != before.export:
            self._saving.prepare_files()
        self.generation += 1
        self.digest = profile.digest
        RECORDER.tell(self._facts())
        if self._exporter is not None:
            self._exporter.origin = self.origin()
        FAULTS.attempt("process context", self._publish_context)
        self._threads.start()

    # ---------------------------------------------------------------- the end

    def stop(self) -> None:
        """Undo every change, write what the profile asks for and wait for the collector: at most five seconds in all.

        A second call does nothing but wait for the first. Raises nothing: what could not be written is logged and
        stands in `losses`. The `onlookers` are called first: functions of those who look at the session as it runs.
        """
        deadline = Deadline(EXIT_LIMIT_NS / 1e9)
        before_sending = deadline.earlier(SENDING_S)
        while self.onlookers:
            FAULTS.attempt("end of one who looks on", self.onlookers.pop())
        self._threads.stop(before_sending)
        self._generations.stop(before_sending)
        FAULTS.attempt("last look at connections", self.selection.look_for_connections)
        while message := self._membership.heard():  # since there is no thread for it, or never was
            FAULTS.attempt("words of the agent", partial(self._hear_agent, message))
        with self._lock.held():
            if self._stopped:
                return
            self._stopped = True
            self._undo(before_sending)
            FAULTS.attempt("resource of the service", self._tell_resource)
            if self._is_metered_elsewhere:
                FAULTS.attempt("books of the metrics", partial(self._tell_books, at_once=True))
            FAULTS.attempt("another agent", self._find_agent_at_end)
            FAULTS.attempt("last look at the spans", partial(self._pump, meters=True))
            self.end_ns = time.monotonic_ns()
            FAULTS.attempt("board of the run", self._tell_others)
            asked = os.environ.get(CHECK_FOLDER)
            if asked:
                report = partial(report_to_check, asked, RECORDER.calls, self.profile)
                FAULTS.attempt("report to check", lambda: report(self.verdicts()))
            if self._observed_for:
                FAULTS.attempt("report to init", self._leave_observation)
            tells = (
                RECORDER.calls
                or self.account.unmet()
                or (self._saving.place().is_first and board.RECORDED not in board.marks())
            )
            if tells:
                FAULTS.attempt("last window", partial(self._deliver, deadline))
            elif self._exporter is not None:
                if self._own is not None:  # its gauges are of no use to anybody
                    FAULTS.attempt("end of the export", self._own.release)
                self._exporter.stop(0)
            if self._own is not None:
                FAULTS.attempt("end of the export", self._own.finish)
            if self._scrape is not None:
                FAULTS.attempt("end of reading for a scrape", self._scrape.finish)
            RECORDER.say_goodbye()
            FAULTS.attempt("goodbye", partial(self._leave_run, deadline, tells=bool(tells)))
            # Until here an exit or a SIGTERM has waited for this end.
            while self._last_undos:
                FAULTS.attempt("way back", self._last_undos.pop())

    def _begin_observation(self) -> None:
        """Let `instrument init` know that this process is there, where that has started it."""
        if self._observed_for:
            from instrument.proposal import observation

            FAULTS.attempt("report to init", partial(observation.mark_begun, self._observed_for))

    def _leave_observation(self) -> None:
        """Tell `instrument init` what this process did."""
        from instrument.proposal import observation

        watch, cost = self.selection.argument_watch(), self.cost()
        observation.write_report(
            self._observed_for,
            tally=self.tally(),
            verdicts=self.verdicts(),
            arguments={} if watch is None else watch.facts(),
            shapes=RECORDER.shapes,
            blockers=self.selection.blockers(),
            lasted_ns=self._lasted_ns(),
            cost_ns=cost.calls * cost.per_call_ns + (0 if watch is None else watch.spent_ns),
        )

    def _deliver(self, deadline: Deadline) -> None:
        """What a session leaves behind: its spans at the collector, its last trace file."""
        window = self._windows.stop(self.end_ns or 0)
        deadline = deadline.earlier(REPORT_S if self._membership.path else SUMMARY_S)
        if self._exporter is not None:
            if self._sends():  # which may not have begun yet
                self._exporter.start()
            if (own := self._reading) is not None and self.handover.is_here:
                read_by = time.monotonic() + deadline.earlier(LAST_SEND_S).left_s()
                self._read_own(partial(own.end, read_by))
            elif not self.handover.is_here and (self._is_first() or self.profile.export.summary is not None):
                limit_s = deadline.left_s(math.inf if self._is_first() else SETTLE_S)
                if not self.handover.left:
                    count = self._flush_by_agent(time.monotonic() + limit_s, UNSEEN_S)[1]
                    self.handover.left = {UNDELIVERED: count} if count else {}
            self._wait_for_collector(self._exporter, deadline)
        if window is not None:
            FAULTS.attempt("last trace file", lambda: self._saving.write_window(*window))

    def _wait_for_collector(self, exporter: otlp.Exporter, deadline: Deadline) -> None:
        """Wait for the collector; but a moment where another process of the run has just done so in vain.

        A parent that ends its workers one after the other would add up what each of them waits. Who has waited but a
        moment tells nobody of it: a collector that hears again has its chance once that time is over.
        """
        others_ns = board.waited_in_vain_ns()
        has_just_been = bool(others_ns) and time.monotonic_ns() - others_ns < EXIT_LIMIT_NS
        before = exporter.counts()
        after = exporter.stop(round(deadline.left_s(LEAST_S if has_just_been else math.inf) * 1e9))
        has_lost = after.failed + after.dropped > before["failed"] + before["dropped"]
        if not has_just_been and (has_lost or not after.settled):
            board.note_wait_in_vain(time.monotonic_ns())

    def _leave_run(self, deadline: Deadline, *, tells: bool) -> None:
        """Say goodbye to the run, and print the summary: of the whole run, where this is its last process.

        Of several processes that share a standard stream the last one prints one report of all. A process without an
        agent, and one whose summary is a file, tells of itself.
        """
        wanted = self.profile.export.summary
        if wanted is None:
            self._say_unsent()
        shares = wanted is not None and wanted.to in files.STREAMS
        save = self._facts_told.save if shares else None
        answer = self._membership.leave(self._facts_told.at_end(), save, deadline)
        if unsent := answer.get("unsent"):
            self.account.complain(UNSENT % unsent)
        if unseen := answer.get("unseen"):
            self.account.complain(unseen, log=False)
        if wanted is None or answer.get("others"):
            return
        if answer.get("late"):
            logger.warning("the report of the run was not there in time; its agent writes it once it is")
        elif answer.get("report"):
            self._saving.tell(wanted, str(answer["report"]), round(deadline.last_s() * 1e9))
        elif tells and not self._has_little_to_tell():
            if answer.get("unheard") and self.profile.agent != "off":
                self.account.complain(UNHEARD, log=False)
                if untold := answer.get("untold"):
                    self.account.complain(UNTOLD % ", ".join(map(str, untold)), log=False)
            self._saving.print_summary(wanted, round(deadline.last_s() * 1e9))

    def _say_unsent(self) -> None:
        """Say what of the spans has not been sent where no summary does: the agent can open no pipe after the end."""
        lost = dict(self.handover.losses())
        if self._exporter is not None and self.handover.is_here:
            lost |= {reason: count for reason, count in self.losses().items() if "OTLP export" in reason}
        is_for_agent = self.handover.has_agent and not self.handover.left and target_of(2).startswith("/")
        if lost and not is_for_agent:
            losses = ", ".join(f"{count} {reason}" for reason, count in lost.items())
            logger.warning("not all that this process recorded had reached the collector at its end: %s", losses)

    def _has_little_to_tell(self) -> bool:
        """Return True where only collections of garbage were recorded here, and rules are at work in other processes.

        Such a one is a parent of workers, whose report would say that there was nothing to record.
        """
        rows = list(self.tally().rows())
        others = board.marks() - marks_of(self.account.verdicts(of_all=False)) - {board.RECORDED}
        return bool(rows and others) and all(row.path[-1] == COLLECTION for row in rows)

    def _at_exit(self) -> None:
        """End with the interpreter. Modules that are imported now make Python forget that an interrupt has ended it.

        It would exit with 1 then, and not by the signal, if it were not reminded.
        """
        FAULTS.attempt("exit", self.stop)
        if issubclass(getattr(sys, "last_type", None) or object, KeyboardInterrupt):
            with suppress(KeyboardInterrupt):
                exec("raise KeyboardInterrupt")  # noqa: S102 - of text: the end of such code is what is noted

    def _end_of_main_thread(self) -> None:
        """The process would have ended by now, were it not for threads of ours."""
        Thread(self.stop, "instrument-exit").start()

    def _after_fork_in_child(self, whole: bool, by_main_thread: bool) -> None:
        """The child records on its own: own rings, ids, threads and files. `whole`: no reload was under way.

        A child of another thread than the main one may end by that thread's end: threads of ours must not keep it.
        """
        self._is_of_thread = self._is_of_thread or not by_main_thread
        self._forked = True
        self._membership.after_fork_in_child()
        self._generations.after_fork_in_child()
        self._lock = SessionLock()
        self.selection.after_fork_in_child()
        if not whole:
            FAULTS.attempt("reload that a fork cut short", lambda: self.selection.change(self.profile, anew=True))
        if self._threads.stopping.is_set():  # the parent's other thread was about to stop it, and is not here
            self._undo(Deadline(0))
            self._forget(self)
            return
        process_context.after_fork_in_child()
        self._threads.after_fork_in_child()
        self._saving.after_fork_in_child()
        self._ids = None
        self.account.after_fork_in_child()
        self._ranges.after_fork_in_child()
        self._imports.after_fork_in_child()
        if self._timing is not None:
            self._timing.after_fork_in_child()
        self._begin()
        if self._own is not None:
            self._own.after_fork_in_child()
        if self._scrape is not None:
            self._scrape.after_fork_in_child()
            self._scrape = None
        if self._exporter is not None:
            self._exporter.after_fork_in_child()
            self._exporter.origin = self.origin()
        self.handover.after_fork_in_child()
        self._choose_who_exports()
        RECORDER.tell(self._facts())
        self._gauges.after_fork_in_child(begins=False)
        self._gauge_watch.after_fork_in_child()
        self._gpus_told = ()
        self._threads.start_when_needed()
        self._generations.listen_in_child()
        self._join_run()
        self._begin_observation()
        self._end_with_multiprocessing()

    def _end_with_multiprocessing(self) -> None:
        """A child of multiprocessing leaves by os._exit and runs only its own finalisers, which it clears first."""
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.register_after_fork(self, Session._finish_with_multiprocessing)
            if sys.modules["multiprocessing.process"].parent_process() is not None:  # it has cleared them
                self._finish_with_multiprocessing()

    def _finish_with_multiprocessing(self) -> None:
        util = sys.modules["multiprocessing.util"]
        util.Finalize(None, self._at_exit, exitpriority=-100)
