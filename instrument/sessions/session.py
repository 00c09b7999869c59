"""The session, which records with a profile in a process from `start` to `stop`, across forks and signals.

A process has at most one session. `stop` undoes all changes to the process. The parts of a session are in other
modules: `recorded` records, `exporting` sends spans, `window_files` writes files, and `leaving` ends the session.
`published_facts` describes the session to other processes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial

from instrument.clock import Deadline
from instrument.errors import InstrumentError
from instrument.instrumentors import profiled_functions, tasks_and_threads, torch_graphs
from instrument.instrumentors.verdict import make_rule_marks
from instrument.profile.model import Profile
from instrument.profile.presets import ENGINES
from instrument.recorder.recorder import RECORDER, call_at_first_span
from instrument.recording import board
from instrument.runtime import environment, process_context
from instrument.runtime.faults import FAULTS
from instrument.runtime.threads import Thread, will_server_fork
from instrument.runtime.unpatched import Event, RLock
from instrument.sessions.exporting import Exporting, SessionLock, count_recorded_rows
from instrument.sessions.handover import UNREAD, GaugeWatch
from instrument.sessions.leaving import SENDING_S, Leaving
from instrument.sessions.membership import Membership
from instrument.sessions.profile_reload import ControlThread, Generations, Reload
from instrument.sessions.published_facts import PublishedFacts
from instrument.sessions.recorded import Recorded
from instrument.sessions.window_files import Saving

READ_INTERVAL_S = 0.2
"""Seconds between two reads of the recording. The ring of each thread must have space for the spans of that time."""

BUSY_READ_INTERVAL_S = 0.05
"""Seconds between two reads of the recording while the probes cost more than their budget."""

START_DELAY_S = 0.2
"""Seconds from the first span to the start of the session's threads."""

TOUCHED_BYTES, AHEAD_BYTES = 4 << 20, 2 << 20
"""Bytes of ring memory to touch at the start, and ahead of writing threads, to avoid page faults."""

START_WAIT_S = 1.0
"""Seconds for which `stop` waits for threads that are just starting."""


class SessionThreads:
    """The threads of a session. One of them reads the recording at intervals, if an export needs this."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        self.stopping = Event()
        self.own: Thread | None = None
        self.begun: Event | None = None
        """The event that is set once the threads have started because of a first span, None before that span."""
        self.have_begun = self._is_over = False

    def stop(self, deadline: Deadline) -> None:
        """Start no more threads, and wait for the end of the session's own thread."""
        call_at_first_span(None)
        self.stopping.set()
        if self.begun is not None:
            self.begun.wait(deadline.seconds_left(START_WAIT_S))  # what has just begun to record is sent, too
        self._is_over = True
        if self.own is not None:
            self.own.join(deadline.seconds_left())

    def start_when_needed(self) -> None:
        """Start the threads. A process of `instrument run` starts them at its first span, because many such processes
        record none."""
        if self._session.is_of_run:
            call_at_first_span(self._start_at_first_span)
        else:
            self._start_threads()

    def _start_at_first_span(self) -> None:
        """Start the threads because a first span begins. This delays the service's thread by about 0.1 ms."""
        if will_server_fork():
            return  # those of the workers begin there
        has_begun = self.begun = Event()
        rests = Event()

        def start() -> None:
            rests.set()
            self.stopping.wait(START_DELAY_S)
            try:
                FAULTS.attempt("start of threads", self._start_threads)
            finally:
                has_begun.set()
            FAULTS.attempt("board of the run", self._session.publish_used_rules)

        try:
            Thread(start, "instrument-start").start(is_listed=False)
            rests.wait(START_DELAY_S)
        except BaseException:
            has_begun.set()
            raise

    def _start_threads(self) -> None:
        if self._is_over or will_server_fork():
            return  # the session sends what there is at its end
        self.have_begun, session = True, self._session
        FAULTS.attempt("first touch of pages", lambda: RECORDER.touch_ahead(TOUCHED_BYTES))
        if session.recorded.exporter is not None and session.handover.is_here:
            session.recorded.exporter.start()
        session.gauge_watch.begin()
        self.start_reader_thread()
        session.announce_process()

    def start_reader_thread(self) -> None:
        if self.have_begun and self._session.exporting.needs_reader_thread() and self.own is None:
            stopping = self.stopping
            self.own = Thread(self._run, "instrument", lambda: not stopping.is_set())
            self.own.start()

    def _run(self) -> None:
        session, budget = self._session, self._session.recorded.budget
        while not self.stopping.wait(BUSY_READ_INTERVAL_S if budget.is_busy else READ_INTERVAL_S):
            try:
                session.exporting.export_new_rows()
                RECORDER.touch_ahead(AHEAD_BYTES)
            except Exception as fault:
                FAULTS.note("export thread", fault)
            session.account.thread_ns = time.thread_time_ns()


class Session:
    """A running session. All methods may be called from any thread.

    The functions in `onlookers` are called before the session ends. `forget` is called with the session afterwards.
    """

    exporting: Exporting
    threads: SessionThreads
    _facts: PublishedFacts
    _membership: Membership
    gauge_watch: GaugeWatch
    leaving: Leaving

    def __init__(self, profile: Profile, forget: Callable[[Session], None]) -> None:
        self._forget = forget
        self._undos: list[Callable[[], None]] = []
        self._undo_by = Deadline(0)
        self.onlookers: list[Callable[[], object]] = []
        self._stopped = self._forked = self._is_of_thread = False
        self.is_of_run = "INSTRUMENT_RUN_PID" in os.environ
        self.recorded = recorded = Recorded(profile, lambda gpus: self._facts.publish_gpus(gpus))
        self.account, self.selection, self.handover = recorded.account, recorded.selection, recorded.handover
        run = environment.read_run_name() or environment.make_run_name()
        self._saving = saving = Saving(recorded, environment.working_folder(), run)
        self._facts = facts = PublishedFacts(
            recorded, saving, lambda: self.gauge_watch.make_settings_for_agent(), lambda: self.threads.have_begun
        )
        self.selection.noted = lambda: FAULTS.attempt("marks of metrics", facts.publish_marks)
        self.generations = Generations(
            recorded, saving.folder, self._replace_profile, self._add_rules, lambda: self.threads.stopping.is_set()
        )
        self._prepare = prepare = self.generations.call_without_forks
        self._membership = membership = Membership(facts.make_join_message, prepare)
        self.gauge_watch = watch = GaugeWatch(recorded.gauges, membership, facts.publish)
        self.exporting = Exporting(
            recorded, facts, saving, membership, watch, prepare, lambda: self.threads.start_reader_thread()
        )
        stop_on_thread = lambda: self.leaving.stop_on_thread if self._is_of_thread else None  # noqa: E731
        self.control = ControlThread(self.generations, membership, self.exporting, stop_on_thread)
        self.threads = SessionThreads(self)
        self.leaving = Leaving(recorded, self.exporting, saving, membership, facts, self.stop)
        self.leaving.undos.append(lambda: forget(self))
        self.flush, self.prometheus = self.exporting.flush, self.exporting.prometheus
        self.losses, self.notes, self.verdicts = self.account.losses, self.account.notes, self.account.verdicts
        self.cost, self.tally, self.trace, self.dump = recorded.cost, recorded.tally, recorded.trace, saving.dump
        self.summary, self.views = recorded.summary, recorded.views
        self.startup, self.recording = recorded.startup, recorded.make_report_input
        self.take, self.trace_of = recorded.copy_rows, recorded.make_stretch_trace

    @property
    def profile(self) -> Profile:
        return self.recorded.profile

    # ---------------------------------------------------------------- start

    def start(self) -> None:
        """Attach the probes and begin to record. After a failure, undo every change and raise the error."""
        recorded, limits = self.recorded, self.profile.limits
        folder = "" if limits.ring_folder is None else str(self._saving.folder / limits.ring_folder)
        metered = self._facts.asks_for_metrics or recorded.gauges.has_readable_gauges
        is_left = RECORDER.memory_fd >= 0 and bool(RECORDER.facts.get("is_awaited"))
        unread = self.handover.await_agent_reading(
            count_recorded_rows(), metered=metered, is_left=lambda: is_left and self._membership.is_agent_listening()
        )
        if unread:
            self.account.count_loss(UNREAD, unread)
        RECORDER.begin_recording(limits.ring_bytes, self._facts.gather_facts(), folder, limits.disk_bytes)
        if RECORDER.no_memory:
            why = f"what this process records ends with it, and no other process can read it: {RECORDER.no_memory}"
            self.account.complain(f"limits.ring_dir: {why}" if folder else why, log=bool(folder))
        recorded.reset_recording()
        try:
            self._attach()
        except BaseException:
            self.control.stop(0)
            self.generations.await_reload(Deadline(0))
            self._undo_changes(self.leaving.make_deadline())
            raise
        if self.is_of_run and environment.is_first_process_of_run():
            self.leaving.undos.append(board.make_board())
        if not self.is_of_run:  # else once it records, for it may never do
            FAULTS.attempt("process context", self._facts.publish_context)
        self.leaving.undos.append(process_context.withdraw_context)
        self._join_run()
        self.leaving.prepare_exit()
        profiled_functions.withdraw_hint()

    def _attach(self) -> None:
        recorded, undos = self.recorded, self._undos
        if self.profile.startup == "auto":
            undos.append(recorded.imports.install())
        self.exporting.prepare_export()
        RECORDER.trace_of = recorded.trace_context_of_span
        undos.append(tasks_and_threads.report_context_copies())
        undos.append(tasks_and_threads.watch_thread_handovers())
        if (timing := recorded.timing) is not None:
            timing.install()
            undos.append(lambda: timing.uninstall(self._undo_by.seconds_left()))
            undos.append(torch_graphs.watch_graph_replays())
        self.selection.begun = self.generations.add_engine_rules
        undos.append(self.selection.attach())
        for package in ENGINES:
            if package in sys.modules:
                self.generations.add_engine_rules(package)
        undos.append(recorded.ranges.install())  # may import numpy, which a rule may name
        undos.append(lambda: self.gauge_watch.stop(self._undo_by))
        recorded.gauges.find_gauges()
        self._saving.import_file_writers()
        if self.profile.clock == "tsc":
            if unsound := recorded.ticks.use_tick_counter(time.monotonic_ns()):
                self.account.complain(f"clock: tsc is not used: {unsound}", log=False)
            else:
                undos.append(RECORDER.stop_ticks)
        recorded.costs.measure(with_ticks=recorded.ticks.is_counter_used)
        undos.append(recorded.budget.unmute_all_sites)
        recorded.budget.change(self.profile.budget)
        self.threads.start_when_needed()
        RECORDER.on = True
        self.control.watch_file()

    def _join_run(self) -> None:
        if self.exporting.join_agent():
            self.control.start_or_wake()
            if self.threads.have_begun:  # before it had joined, or as it did
                self._report_recording()

    # ---------------------------------------------------------------- while it runs

    def announce_process(self) -> None:
        self._report_recording()
        if self.is_of_run or self._forked:  # of which many never record
            publish = self._facts.publish_context  # it imports what packs it
            FAULTS.attempt("process context", partial(self._prepare, publish))

    def _report_recording(self) -> None:
        """Report to the agent that this process records. From now on the agent may send it requests."""
        self._membership.send({"records": True})
        self.control.hear_agent()

    def publish_used_rules(self) -> None:
        if self.is_of_run or self._forked:
            marks = [board.RECORDED] if RECORDER.calls or self.threads.begun is not None else []
            board.add_marks([*make_rule_marks(self.verdicts(of_all=False)), *marks])

    def reload(self, profile: Profile | str | os.PathLike[str] | None = None) -> Reload:
        """Change to another profile.

        `profile` is a path or a `Profile`. None reads the current file again.

        New rules are attached, also to modules that are already imported. Rules that are missing in the new profile are
        detached. Rules in both profiles continue with the same totals. The change takes about ten milliseconds, and the
        service continues meanwhile.

        The settings in `profile_reload.FIXED_SETTINGS` do not change. If the new profile has other values for them,
        `Reload.refused` lists these settings.

        Raises `ProfileError` for an invalid profile, and `StateError` for a session that has ended or has no file. The
        current profile then remains in use.
        """
        try:
            return self.generations.change_profile(profile)
        except InstrumentError as error:
            self.generations.note_refused_profile(str(error))
            raise

    def _replace_profile(self, profile: Profile) -> None:
        """Replace the current profile by one whose rules are already attached."""
        with self.exporting.lock.acquire_within():
            before = self.profile
            if profile == before:
                self.recorded.profile = profile  # it may be in another file now
                return
            self.recorded.apply_settings(profile)
            if profile.export != before.export:
                self._saving.import_file_writers()
            self._facts.publish()
            FAULTS.attempt("process context", self._facts.publish_context)
            self.threads.start_reader_thread()

    def _add_rules(self, profile: Profile) -> None:
        """Replace the current profile by a copy with more rules. The generation number stays the same."""
        with self.exporting.lock.acquire_within():
            self.recorded.profile = profile
            self._facts.publish()

    def after_fork_in_child(self, whole: bool, by_main_thread: bool) -> None:
        """Record in the child, with its own rings, ids, threads and files.

        `whole` is False if the fork interrupted a reload. Without `by_main_thread`, the child may end when the forking
        thread ends. Our threads must not keep the child alive.
        """
        self._is_of_thread = self._is_of_thread or not by_main_thread
        self._forked = True
        self._membership.after_fork_in_child()
        self.generations.lock = RLock()  # a thread of the parent may have locked it
        self.control.after_fork_in_child()
        self.exporting.lock = SessionLock()
        self.selection.after_fork_in_child()
        if not whole:
            FAULTS.attempt("reload that a fork cut short", lambda: self.selection.change(self.profile, anew=True))
        if self.threads.stopping.is_set():  # the parent's other thread was about to stop it, and is not here
            self._undo_changes(Deadline(0))
            self._forget(self)
            return
        process_context.after_fork_in_child()
        for part in (self.threads, self._saving, self.recorded, self._facts, self.exporting, self.gauge_watch):
            part.after_fork_in_child()
        self._facts.publish()
        self.threads.start_when_needed()
        self.control.start_or_wake()
        self._join_run()
        self.leaving.after_fork_in_child()

    # ---------------------------------------------------------------- stop

    def stop(self) -> None:
        """End the session. This undoes every change, writes the profile's files, and sends the last spans.

        The waits for other processes and drivers take at most five seconds in total. A second call only waits for the
        first. Failures are logged and counted, not raised.
        """
        deadline = self.leaving.make_deadline()
        before_sending = deadline.make_earlier_deadline(SENDING_S)
        while self.onlookers:
            FAULTS.attempt("end of one who looks on", self.onlookers.pop())
        self.threads.stop(before_sending)
        self.control.stop(before_sending.seconds_left())
        self.generations.await_reload(before_sending)
        FAULTS.attempt("last look at connections", self.selection.note_current_connections)
        while message := self._membership.next_message():  # there is no thread for it, or there never was
            FAULTS.attempt("words of the agent", partial(self.exporting.handle_agent_message, message))
        with self.exporting.lock.acquire_within():
            if self._stopped:
                return
            self._stopped = True
            self._undo_changes(before_sending)
            FAULTS.attempt("resource of the service", self._facts.publish_resource)
            FAULTS.attempt("books of the metrics", partial(self._facts.publish_losses_and_costs, at_once=True))
            if self.profile.export.parquet is not None:  # whose rows of processes have the notes
                FAULTS.attempt("last notes", partial(self._facts.publish_verdicts, at_once=True))
            FAULTS.attempt("another agent", self.exporting.replace_lost_agent)
            FAULTS.attempt("last look at the spans", partial(self.exporting.export_new_rows, meters=True))
            self.recorded.end_ns = time.monotonic_ns()
            FAULTS.attempt("board of the run", self.publish_used_rules)
            self.leaving.finish_session(deadline)

    def _undo_changes(self, deadline: Deadline) -> None:
        self._undo_by = deadline
        RECORDER.on = False
        RECORDER.remote_parent = RECORDER.trace_of = None
        while self._undos:
            FAULTS.attempt("way back", self._undos.pop())
