"""The session: one profile at work in one process, from `start` to `stop`, across forks, signals and exit.

Only one session runs at a time. Everything that it changes in the process (import hook, patches, threads, exit
handler) is undone by `stop`. It owns the order of its parts: `recorded` has them and what they tell, `reader` and
`outbox` look through what is recorded, `session_threads` when, `account` keeps the books, `generation` takes it to
another profile, `saving` leaves its files.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from instrument import otlp
from instrument.errors import ExportError, InstrumentError
from instrument.instrumentors import contexts, graphs
from instrument.instrumentors.argument_watch import FOLDER_VARIABLE
from instrument.instrumentors.verdict import CHECK_FOLDER, marks_of, report_to_check
from instrument.otlp.interval_join import SETTLE_NS
from instrument.otlp.metrics import Metrics
from instrument.profile.model import Profile
from instrument.recorder.meter import Ended
from instrument.recorder.recorder import RECORDER
from instrument.recording import board, export_place
from instrument.recording.distributions import Snapshot
from instrument.recording.meter_place import DAMAGED, MeterState
from instrument.recording.spans import Span, noted
from instrument.report.summary import prepare
from instrument.runtime import process_context
from instrument.runtime.faults import FAULTS, logger
from instrument.runtime.threads import Thread
from instrument.runtime.unpatched import TIMEOUT_MAX
from instrument.sessions import files
from instrument.sessions.generation import Generations, Reload
from instrument.sessions.handover import UNREAD, Standing
from instrument.sessions.lock import SessionLock
from instrument.sessions.membership import REPORT_S, Membership, RunFacts
from instrument.sessions.outbox import Outbox
from instrument.sessions.recorded import Recorded
from instrument.sessions.saving import Saving
from instrument.sessions.session_threads import SessionThreads

HAND_BACK_NS = 10**9
"""The longest that the session still sends what it has read for, as an agent takes over."""

LAST_SETTLE_S, SETTLE_S = 4.0, 1.0
"""How long the first process of a run waits at its end for the agent to send what it recorded: where it is in a
container, that may go with it. And any other one that is to print a summary, to say what was lost."""

UNSEEN_S = 0.5
"""How long it then waits for an agent that takes no notice: one that is stopped."""

FLUSH_S = 0.01
"""How often it is looked whether the agent has sent everything."""

EXIT_LIMIT_NS = 5 * 10**9
"""The longest that `stop`, interpreter exit and SIGTERM wait for a collector, or for somebody to read the summary."""

SCRAPE_WAIT_S = 1.0
"""The longest that a scrape waits for the session, which may be writing a file; it is told what was known before."""

GAUGES_FOR_NS = 30 * 10**9
"""How old a gauge may be that a scrape is told."""


class Session(Recorded):
    """A running session. Made by `start`; `stop` ends it. All methods may be called from any thread.

    `forget(session)` is told when it has ended.
    """

    def __init__(self, profile: Profile, forget: Callable[[Session], None]) -> None:
        super().__init__(profile)
        self._forget = forget
        self._lock = SessionLock()
        self._undos: list[Callable[[], None]] = []
        self._last_undos: list[Callable[[], object]] = [lambda: forget(self)]
        self.onlookers: list[Callable[[], object]] = []
        self._stopped = False
        self._forked = False
        self._is_of_thread = False
        self._is_of_run = "INSTRUMENT_RUN_PID" in os.environ
        self._is_scraped = False
        self._observed_for = os.environ.get(FOLDER_VARIABLE, "")
        self._resource_told: dict[str, object] = {}
        self._threads = SessionThreads(
            self.account,
            self._budget,
            self._gauges,
            self._exporter,
            waits=self._is_of_run,
            look=self._pump,
            is_needed=self._is_looked_after,
            sends=self._sends,
            follow=self._follow_threads,
            tell_others=self._tell_others,
        )
        folder = files.working_folder()
        self._saving = Saving(self, folder, files.run_of_process())
        self._facts_told = RunFacts(
            self, self._saving, is_of_run=self._is_of_run, has_threads=lambda: self._threads.have_begun
        )
        self._membership = Membership(self._facts_told.at_join, lambda: RECORDER.memory_fd)
        self._generations = Generations(
            self,
            folder,
            self._membership,
            self._enter,
            has_ended=lambda: self._threads.stopping.is_set(),
            end_of_main_thread=lambda: self._end_of_main_thread if self._is_of_thread else None,
            look_after_export=lambda is_joined: self.look_after_export(is_joined=is_joined),
            take_over_export=lambda: self.handover.take_over(),
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
        if self.profile.export.summary is not None:
            prepare(self.profile.export.summary.views)
        self._begin()
        try:
            if self.profile.startup == "auto":
                self._undos.append(self._imports.install())
            if self._exporter is not None:
                self._exporter.prepare()
                self._leave_export_to_agent()
                RECORDER.remote_parent = lambda: noted(otlp.current_parent())
            RECORDER.trace_of = self._trace_of
            self._undos.append(contexts.watch())
            if self._timing is not None:
                self._undos.append(self._timing.install())
                self._undos.append(graphs.watch())
            self._undos.append(self.selection.attach())
            self._undos.append(self._ranges.install())  # may import numpy, which a rule may name
            self._undos.append(self._gauges.stop)
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
            self._generations.stop(0)
            self._undo()
            self.handover.close()
            raise
        if self._is_first():
            self.make_board()
        FAULTS.attempt("process context", self._publish_context)
        self._last_undos.append(process_context.withdraw)
        self._join_run()
        self._begin_observation()
        atexit.register(self._at_exit)
        self._last_undos.append(lambda: atexit.unregister(self._at_exit))

    def _join_run(self) -> None:
        """Tell the run's agent of this process, where there is one."""
        if self.profile.agent == "off":
            return
        RECORDER.tell(self._facts())
        problem = self._membership.join()
        self._generations.listen_to_agent()
        if problem:
            self.handover.take_over()
            self.account.complain(f"{problem}; what this process records goes with it", log=False)

    def _publish_context(self) -> None:
        """Let profilers outside find who this process is."""
        problem = process_context.publish(otlp.pack_resource(self.resource()))
        if problem:
            self.account.complain(f"process context: {problem}; profilers name this process on their own", log=False)

    def _leave_export_to_agent(self) -> None:
        """Where there is an agent it exports what this process records."""
        if self._membership.path and self.profile.agent != "off":
            self.handover.leave_to_agent()

    def _begin_export(self, rows: Mapping[int, int], metered: MeterState | None) -> None:
        with self._lock.held():
            until_ns = 0
            if self._is_read():
                self._reader.look()
                until_ns = RECORDER.now_ns()
            if metered is not None:
                until_ns = self._go_on_metering(metered)
            self._reader.go_on(rows, until_ns)
            self._kept_count = 0
            self.handover.is_own = True
            if self._exporter is not None:
                self._go_on_telling(self._exporter.metrics, metered)
        if self._exporter is not None and not self._stopped and self._threads.have_begun:
            self._exporter.start()
            self._threads.start()

    def _go_on_metering(self, metered: MeterState) -> int:
        """Go on with what another process has counted, and count what has ended since; tells until when that is."""
        until_ns = RECORDER.now_ns()
        try:
            self._meter.go_on(metered.meter)
        except DAMAGED:
            return 0
        cursor = RECORDER.cursor(RECORDER.shelf(0.0, 0).sort)  # requests alone
        cursor.go_on(metered.places)
        ended = [row for _, rows in cursor.read() for row in rows if row[6] <= until_ns]
        self._meter.count(sorted(ended, key=lambda row: row[6]))
        self._meter.watch_from(metered.places)
        return until_ns

    def _go_on_telling(self, metrics: Metrics, metered: MeterState | None) -> None:
        """Go on from what another process has told, with the gauges that were read since."""
        if metered is not None:
            with suppress(*DAMAGED):
                metrics.go_on(metered.told)
        now_ns = time.monotonic_ns()
        samples = self._gauges.samples(metrics.taken_ns + 1, now_ns)
        if samples:
            metrics.offer(samples, self._gauges.gpus())

    def _end_export(self) -> Standing:
        exporter, outbox = self._exporter, self._outbox
        with self._lock.held():
            if self._has_metrics():
                self._pump(meters=True)
            self._reader.look()
            self._send_kept()
            standing = self._last_standing()
            self.handover.is_own = False
        if outbox is not None:
            self._send_settled(outbox)
        if exporter is not None:
            exporter.stop(HAND_BACK_NS)
        return standing

    def _send_settled(self, outbox: Outbox) -> None:
        """Send what waits for its device times as they come, and after a while without."""
        end_ns = time.monotonic_ns() + HAND_BACK_NS
        is_last = False
        while not is_last:
            is_last = time.monotonic_ns() > end_ns or not outbox.waits
            with self._lock.held():
                outbox.send_settled(is_last=is_last)
            if not is_last:
                time.sleep(FLUSH_S)

    def _last_standing(self) -> Standing:
        return self._standing()._replace(meter=self._meter.state() if self._has_metrics() else None)

    def look_after_export(self, *, is_joined: bool) -> None:
        """Export here, or have the agent do so, as things stand: called now and then."""
        self._tell_resource()
        if self._exporter is not None and not self.handover.is_own:
            self._tell_books()
        self.handover.look(self._membership.joins if is_joined else 0)

    def _follow_threads(self) -> None:
        """What there is to do once the threads have begun, on one of them or where the session does without waiting."""
        self._generations.hear_agent()
        if self._forked:  # most children that are forked never record
            FAULTS.attempt("process context", self._publish_context)

    def _tell_resource(self) -> None:
        """Tell the agent of a tracer provider that the service has configured by now: both are the same service."""
        if self._exporter is None or not self.handover.has_agent:
            return
        resource = dict(self._exporter.resource())
        if resource != self._resource_told:
            self._resource_told = resource
            RECORDER.tell(self._facts())

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
        if self._threads.have_begun:
            self._membership.tell({"records": True})
        if self._is_of_run or self._forked:
            has_recorded = RECORDER.calls or self._threads.has_met_span
            board.put([*marks_of(self.verdicts()), *([board.RECORDED] if has_recorded else [])])

    def _is_left_to_agent(self) -> bool:
        """Whether an agent is there that the session before this one has left its export to."""
        is_readable = RECORDER.memory_fd >= 0 and RECORDER.facts.get("export") is not None
        return is_readable and self._membership.is_heard()

    def _is_read(self) -> bool:
        """Whether anybody wants spans while the service runs. To read them takes about 0.7 us each."""
        is_sent = self._exporter is not None and self.handover.is_own
        return is_sent or self._has_metrics() or self.profile.schedule is not None or self._is_scraped

    def _is_looked_after(self) -> bool:
        """Whether anything is to be done while the service runs. Otherwise no thread does."""
        return self._is_read() or self.profile.budget is not None or self._ticks.are_used

    def _sends(self) -> bool:
        """Whether the session itself sends to a collector what no agent exports."""
        return self.handover.is_own

    def _undo(self) -> None:
        RECORDER.on = False
        RECORDER.remote_parent = RECORDER.trace_of = None
        while self._undos:
            FAULTS.attempt("way back", self._undos.pop())

    # ---------------------------------------------------------------- while it runs

    def _pump(self, timeout_s: float = -1, *, meters: bool = False) -> Snapshot | None:
        """Look through the spans that have finished since the last time.

        Where it `meters`, or it is time to, metrics are taken, for the collector and to be returned.
        """
        snapshot = None
        with self._lock.held(timeout_s) as held:
            if not held or not (self._is_looked_after() or self._reader.cut):
                return None
            if self._outbox is not None:
                self._outbox.renew_clock(self.origin)
            self._ticks.check(time.monotonic_ns())
            self._budget.step()
            RECORDER.learn_paths()
            meters = self._has_metrics() and (meters or time.monotonic_ns() - self._metered_ns >= otlp.METRICS_EVERY_NS)
            ended = self._meter.ended() if meters else {}
            if self._is_read():
                self._reader.look()
                self._send_kept()
                self._meter.count_generators(self._generators)
            if meters:
                snapshot = self._take_metrics(ended)
            if self._outbox is not None:
                self._outbox.send_settled(is_last=self._stopped)
            while self._reader.cut:
                window, origin = self._reader.cut.popleft()
                self._saving.write_window(*window, origin)
        return snapshot

    def _has_metrics(self) -> bool:
        """Whether the profile asks for any beside gauges, and there is somebody whom the session itself tells."""
        return self._is_scraped or (self._asks_for_metrics and self._exporter is not None and self.handover.is_own)

    def _take_metrics(self, ended: Ended) -> Snapshot:
        """Take all metrics, once the reader has met what had `ended` before."""
        self._metered_ns = time.monotonic_ns()
        self._meter.settle(ended)
        snapshot = self._meter.snapshot(requests=bool(self.profile.requests), marks=self._metered())
        if self._exporter is not None and self.handover.is_own:
            self.handover.note_meter(self._meter.state(), self._reader.places)
            self._exporter.metrics.put(snapshot)
        self._snapshot = snapshot
        return snapshot

    def prometheus(self, *, openmetrics: bool = False) -> str:
        """The metrics as they are now, in Prometheus's text format; see `instrument.prometheus`."""
        from instrument.sessions.exposition import text_of

        if not self._is_scraped:
            self._begin_scrapes()
            self._threads.start()  # from now on requests are told by status before the rings have lost them
        snapshot = self._pump(SCRAPE_WAIT_S, meters=True) or self._snapshot
        now_ns = time.monotonic_ns()
        samples = self._gauges.samples(now_ns - GAUGES_FOR_NS, now_ns)
        return text_of(self.origin(), snapshot, samples, self._gauges.gpus(), openmetrics=openmetrics)

    def _begin_scrapes(self) -> None:
        """From now on count metrics here, too: where another process does so, from what that one has counted."""
        with self._lock.held():
            metered = None if self.handover.is_own or self._is_read() else self.handover.metered()
            if metered is not None:
                heads = {ring.thread_id: ring.head for ring in RECORDER.rings()}
                self._reader.go_on(heads, self._go_on_metering(metered))
            self._is_scraped = True

    def flush(self, timeout_s: float = 5.0) -> otlp.Delivery | None:
        """Hand over all that has finished and wait, at most so long, until the collector has it.

        Returns what was delivered and what was not; None where the profile exports to no collector.
        """
        end = time.monotonic() + timeout_s
        self._pump(min(max(timeout_s, 0.0), TIMEOUT_MAX), meters=True)
        if self._exporter is None:
            return None
        if not self.handover.is_own:
            return self._flush_by_agent(end)[0]
        return self._exporter.flush(round(max(min(end - time.monotonic(), TIMEOUT_MAX), 0.0) * 1e9))

    def _flush_by_agent(self, end: float, patience_s: float = math.inf) -> tuple[otlp.Delivery, int]:
        """Have the agent send all that has finished, and wait until that is settled, or the time is up.

        Returns what was delivered, and how many spans nobody has decided about yet or are on their way.

        Of an agent that for `patience_s` takes no notice of what it has not seen, and has nothing to send before that,
        nothing more is awaited.
        """
        recorded, asked_ns = self._recorded(), time.monotonic_ns()
        if self._timing is not None:  # the agent waits for device times, too
            self._timing.await_settled(asked_ns, min(end, time.monotonic() + SETTLE_NS / 1e9))
        self._tell_books(at_once=True)
        self._membership.tell({"flush": True})
        seen, seen_at = -1, 0.0
        while True:
            progress = self.handover.progress()
            fates = progress.fates
            sent = {fate: fates[fate] for fate in export_place.SENT}
            pending = fates["kept"] - sum(sent.values())
            now, before, seen = time.monotonic(), seen, fates["seen"] + fates["missed"]
            seen_at = now if seen != before or pending else seen_at
            settled = seen >= recorded and not pending and self._are_metrics_settled(asked_ns)
            if settled or now >= end or (seen < recorded and now - seen_at > patience_s):
                found = otlp.Delivery(offered=fates["kept"], pending=pending, settled=settled, **sent)  # type: ignore[arg-type]
                return found, max(recorded - seen, 0) + pending
            time.sleep(FLUSH_S)

    def _are_metrics_settled(self, asked_ns: int) -> bool:
        """Whether what had been counted and read by a time was told by the agent, or given up."""
        if not (self._asks_for_metrics or self._gauges.are_wanted):
            return True
        metered = self.handover.metered()
        return metered is not None and metered.settled_ns >= asked_ns

    def _is_first(self) -> bool:
        return self._is_of_run and files.is_main()

    def _recorded(self) -> int:
        recorded: int = sum(ring.head for ring in RECORDER.rings()) + RECORDER.ended_rows
        return recorded

    def sends_to(self, endpoint: str) -> bool:
        """Whether the session itself sends what `capture` keeps to that collector."""
        wanted = self.profile.export.otlp
        return self._exporter is not None and wanted is not None and wanted.endpoint == endpoint

    def unsent(self, spans: Sequence[Span]) -> list[Span]:
        """Those spans of a window that the session neither has sent nor will send: the caller does.

        A request that has not ended is kept, for nobody else could tell what becomes of it. Raises `ExportError` where
        the agent does not let go of the export: what that one keeps, nobody knows here.
        """
        self._membership.tell({"exports": True})
        if not self.handover.insist():
            self.count_loss("spans of windows that the agent of the run may not have kept", len(spans))
            raise ExportError(
                f"asked to send {len(spans)} spans of a window, found that the agent of the run still exports what "
                "this process records; those that the profile's `capture` keeps are sent by it"
            )
        with self._lock.held():
            found = self._reader.unsent(spans)
            self._send_kept()
            return found

    def count_loss(self, what: str, count: int) -> None:
        """Have the reports tell of something that was recorded and not kept."""
        with self._lock.held():
            self.account.lose(what, count)

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

    def _change_settings(self, profile: Profile) -> None:
        before = self.profile
        if profile == before:
            self.profile = profile  # it may lie elsewhere now
            return
        now_ns = time.monotonic_ns()
        was_read = self._is_read()
        if was_read:
            self._reader.look()
            self._send_kept()
        self._reader.change(profile, now_ns)
        if profile.budget != before.budget:
            self._budget.change(profile.budget)
        self.profile = profile
        self._watch_generations()
        if profile.export != before.export:
            self._saving.prepare_files()
        self.generation += 1
        self.digest = profile.digest
        RECORDER.tell(self._facts())
        if self._exporter is not None:
            self._exporter.origin = self.origin()
        FAULTS.attempt("process context", self._publish_context)
        if self._is_read() and not was_read:
            self._reader.skip()  # nobody has read what was recorded until now
        self._threads.start()

    # ---------------------------------------------------------------- the end

    def stop(self) -> None:
        """Undo every change, write what the profile asks for and wait for the collector, at most five seconds.

        A second call does nothing but wait for the first. Raises nothing: what could not be written is logged and
        stands in `losses`. The `onlookers` are called first: functions of those who look at the session as it runs.
        """
        while self.onlookers:
            FAULTS.attempt("end of one who looks on", self.onlookers.pop())
        self._threads.stop(EXIT_LIMIT_NS / 1e9)
        self._generations.stop(EXIT_LIMIT_NS / 1e9)
        self.handover.end()
        with self._lock.held():
            if self._stopped:
                return
            self._stopped = True
            self._undo()
            FAULTS.attempt("resource of the service", self._tell_resource)
            if self._exporter is not None and not self.handover.is_own:
                FAULTS.attempt("books of the metrics", partial(self._tell_books, at_once=True))
            FAULTS.attempt("export in place of the agent", self._export_at_end)
            FAULTS.attempt("last look at the spans", partial(self._pump, meters=True))
            self.end_ns = time.monotonic_ns()
            FAULTS.attempt("board of the run", self._tell_others)
            asked = os.environ.get(CHECK_FOLDER)
            if asked:
                report = partial(report_to_check, asked, RECORDER.calls, self.profile)
                FAULTS.attempt("report to check", lambda: report(self.verdicts()))
            if self._observed_for:
                FAULTS.attempt("report to init", self._leave_observation)
            tells = RECORDER.calls or (self._saving.place().is_first and board.RECORDED not in board.marks())
            if tells:
                FAULTS.attempt("last window", self._deliver)
            elif self._exporter is not None:
                self._exporter.stop(0)
            FAULTS.attempt("end of the export", lambda: self.handover.close(self._last_standing()))
            RECORDER.say_goodbye()
            FAULTS.attempt("goodbye", partial(self._leave_run, tells=bool(tells)))
            # Until here an exit or a SIGTERM has waited for this end.
            while self._last_undos:
                FAULTS.attempt("way back", self._last_undos.pop())

    def _export_at_end(self) -> None:
        """Export here where the agent has gone, or has let go of the recording: it ends before this process."""
        if self.handover.is_own or not self.handover.has_agent:
            return
        is_left = self.handover.is_left()
        while message := self._membership.heard():
            is_left = is_left or "yours" in message
        if message is None:  # it has gone, and perhaps there is another one
            is_left = bool(self._membership.join())
        if is_left:
            self.handover.take_over_at_end()

    def _begin_observation(self) -> None:
        """Let `instrument init` know that this process is there, where that has started it."""
        if self._observed_for:
            from instrument.proposal import observation

            FAULTS.attempt("report to init", partial(observation.begin, self._observed_for))

    def _leave_observation(self) -> None:
        """Tell `instrument init` what this process did."""
        from instrument.proposal import observation

        watch, cost = self.selection.argument_watch(), self.cost()
        observation.leave(
            self._observed_for,
            tally=self.tally(),
            verdicts=self.verdicts(),
            arguments={} if watch is None else watch.facts(),
            shapes=RECORDER.shapes,
            lasted_ns=self._lasted_ns(),
            cost_ns=cost.calls * cost.per_call_ns + (0 if watch is None else watch.spent_ns),
        )

    def _deliver(self) -> None:
        """What a session leaves behind: its spans at the collector, its last trace file."""
        window = self._reader.stop(self.end_ns or 0)
        if self._exporter is not None:
            if self._sends():  # which may not have begun yet
                self._exporter.start()
            if not self.handover.is_own and (self._is_first() or self.profile.export.summary is not None):
                limit_s = LAST_SETTLE_S if self._is_first() else SETTLE_S
                _, self.handover.undelivered = self._flush_by_agent(time.monotonic() + limit_s, UNSEEN_S)
            self._exporter.stop(EXIT_LIMIT_NS)
        if window is not None:
            FAULTS.attempt("last trace file", lambda: self._saving.write_window(*window))

    def _leave_run(self, *, tells: bool) -> None:
        """Say goodbye to the run, and print the summary: of the whole run, where this is its last process.

        Of several processes that share a standard stream the last one prints one report of all. A process without an
        agent, and one whose summary is a file, tells of itself.
        """
        wanted = self.profile.export.summary
        shares = wanted is not None and wanted.to in files.STREAMS
        answer = self._membership.leave(self._facts_told.at_end(), self._facts_told.save if shares else None)
        if wanted is None or answer.get("others"):
            return
        if answer.get("late"):
            logger.warning("the report of the run was not there within %g s; its agent writes it once it is", REPORT_S)
        elif answer.get("report"):
            self._saving.tell(wanted, str(answer["report"]), EXIT_LIMIT_NS)
        elif tells:
            self._saving.print_summary(wanted, EXIT_LIMIT_NS)

    def _at_exit(self) -> None:
        FAULTS.attempt("exit", self.stop)

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
            self._undo()
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
        if self._outbox is not None:
            self._outbox.after_fork_in_child()
        if self._exporter is not None:
            self._exporter.after_fork_in_child()
            self._exporter.origin = self.origin()
        self.handover.after_fork_in_child()
        self._leave_export_to_agent()
        RECORDER.tell(self._facts())
        self._gauges.after_fork_in_child(begins=False)
        self._begin_readings()
        self._threads.start_when_needed()
        self._generations.listen_in_child()
        self._join_run()
        self._begin_observation()
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            # A multiprocessing child leaves by os._exit and runs only its own finalisers, which it clears first.
            util.register_after_fork(self, Session._finish_with_multiprocessing)

    def _finish_with_multiprocessing(self) -> None:
        util = sys.modules["multiprocessing.util"]
        util.Finalize(None, self._at_exit, exitpriority=-100)
