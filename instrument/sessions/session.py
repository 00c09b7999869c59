"""The session: one profile at work in one process, from `start` to `stop`, across forks, signals and exit.

Only one session runs at a time. Everything that it changes in the process (import hook, patches, threads, exit
handler) is undone by `stop`. It owns the parts and their order: `reader` and `outbox` look through what is recorded,
`account` keeps the books, `generation` says what another profile changes, `files` where it all goes.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from instrument import chrome, clock, otlp
from instrument.device.cuda import CudaDriver
from instrument.device.gauges import Gauges
from instrument.device.nvtx import Ranges
from instrument.device.timer import Timing
from instrument.errors import InstrumentError, ProfileError, StateError
from instrument.instrumentors import contexts, graphs
from instrument.instrumentors.import_times import ImportTimes
from instrument.instrumentors.probe_cost import Costs
from instrument.instrumentors.selection import Selection
from instrument.instrumentors.verdict import CHECK_FOLDER, Verdict, marks_of, report_to_check
from instrument.profile.keys import loads
from instrument.profile.model import EVERYTHING, Profile, Recordings, Summary
from instrument.recorder.governor import Budget
from instrument.recorder.recorder import RECORDER, await_first_span
from instrument.recorder.shelf import is_sampled
from instrument.recorder.ticks import Ticks
from instrument.recording import board
from instrument.recording.distributions import Snapshot
from instrument.recording.spans import (
    UNTIMED,
    Cost,
    FirstCall,
    Gpu,
    Origin,
    Sample,
    Site,
    Span,
    Startup,
    Trace,
    remote_of,
)
from instrument.recording.tally import Tally
from instrument.report.coverage import NO_EVENTS
from instrument.report.summary import made, prepare, summary, views_for
from instrument.report.view import HeldSpans, Options, Recording, View
from instrument.runtime.faults import FAULTS
from instrument.runtime.threads import Thread
from instrument.runtime.unpatched import TIMEOUT_MAX, Event, RLock, start_new_thread
from instrument.sessions import files, generation, saving
from instrument.sessions.account import Account
from instrument.sessions.control import Control, Request, folder_of
from instrument.sessions.first_request import taken_for_first
from instrument.sessions.generation import Reload
from instrument.sessions.lock import SessionLock
from instrument.sessions.membership import Membership
from instrument.sessions.meter import Books, Ended, Meter
from instrument.sessions.outbox import Outbox
from instrument.sessions.reader import Reader
from instrument.sessions.step_spans import Loop, steps_of_batches, with_steps
from instrument.sessions.stretch import Stretch, held_now

PUMP_S = 0.2
BUSY_S = 0.05
"""The same while the probes are being brought within their budget."""
"""How often finished spans are looked through; a thread's ring must hold what it records in that time."""

EXIT_LIMIT_NS = 5 * 10**9
"""The longest that `stop`, interpreter exit and SIGTERM wait for a collector, or for somebody to read the summary."""

START_DELAY_S = 0.2
"""How long after the first span the threads begin that wait for one. What the service does next has nobody beside it
who wants Python's lock: while a thread gives that up to sleep, a signal may fail to wake it."""

START_LIMIT_S = 1.0
"""The longest that `stop` waits for threads that are just about to begin."""

SCRAPE_WAIT_S = 1.0
"""The longest that a scrape waits for the session, which may be writing a file; it is told what was known before."""

GAUGES_FOR_NS = 30 * 10**9
"""How old a gauge may be that a scrape is told."""

NOTES_TOLD, NOTE_TOLD = 50, 500
"""How many notes the run's agent is told at the end, and characters of each."""

DEVICE_SHARE = 8
"""What part of `limits.ring` is there once more for device intervals."""


class Session:
    """A running session. Made by `start`; `stop` ends it. All methods may be called from any thread.

    `forget(session)` is told when it has ended.
    """

    def __init__(self, profile: Profile, forget: Callable[[Session], None]) -> None:
        self.profile = profile
        self.generation = 1
        self._digest = profile.digest
        self._forget = forget
        self._lock = SessionLock()
        self._undos: list[Callable[[], None]] = []
        self._last_undos: list[Callable[[], object]] = [lambda: forget(self)]
        self.onlookers: list[Callable[[], object]] = []
        self._stopping = Event()
        self._stopped = False
        self._forked = False
        self._thread: Thread | None = None
        self._begun: Event | None = None
        self._has_threads = False
        self._is_of_run = "INSTRUMENT_RUN_PID" in os.environ
        self._folder = files.working_folder()
        self._run = files.run_of_process()
        self._newest_files: tuple[Path, ...] = ()
        self._summary_file: Path | None = None
        self._ticks = Ticks(RECORDER)
        self._reloading = RLock()
        self._file = generation.file_of(profile, self._folder)
        self._control: Control | None = None
        self._membership = Membership(self._told_at_join, lambda: RECORDER.memory_fd)
        self._ids: otlp.Ids | None = None

        self.selection = Selection(profile)
        # To ask for the current span is to begin recording on a thread: not where nothing has been recorded.
        self._imports = ImportTimes(lambda: RECORDER.rings() and RECORDER.current_id())
        self._ranges = Ranges(RECORDER)
        self._gauges = Gauges(profile.device, self._keep_samples)
        self._timing: Timing | None = None
        if profile.device.cuda != "off" and profile.state != "CPU":
            self._timing = Timing(
                profile.limits.ring_bytes // DEVICE_SHARE,
                make_driver=partial(CudaDriver, holds_gil=profile.device.gil == "hold"),
                ranges=self._ranges,
            )
        self._exporter: otlp.Exporter | None = None
        self._outbox: Outbox | None = None
        if profile.export.otlp is not None:
            self._exporter = otlp.Exporter(profile.export.otlp, self.origin(), RECORDER.threads)
            self._outbox = Outbox(self._exporter, self._timing)
        self._costs = Costs(RECORDER)
        self._budget = Budget(RECORDER, self._costs.usual_ns, lambda: self._costs.passed_ns, self.selection.detach)
        self._meter = Meter(RECORDER, Books(self.losses, self._costs_ns))
        self._metered_ns = 0
        self._is_scraped = False
        self._reader = Reader(RECORDER, self.selection, self._keep, self.origin, self._meter.count)
        self.account = Account(
            recorder=RECORDER,
            selection=self.selection,
            reader=self._reader,
            costs=self._costs,
            budget=self._budget,
            gauges=self._gauges,
            ranges=self._ranges,
            imports=self._imports,
            timing=self._timing,
            exporter=self._exporter,
            tells_waiting=profile.source != EVERYTHING.source,
        )
        self._begin()

    def _begin(self) -> None:
        self.start_ns = time.monotonic_ns()
        self.end_ns: int | None = None
        self.loop = Loop()
        self._reader.begin(self.profile, self.start_ns)
        self._meter.begin(self.start_ns)
        self._watch_generations()
        self._metered_ns = self.start_ns
        self._snapshot: Snapshot | None = None

    def _start(self) -> None:
        limits = self.profile.limits
        folder = "" if limits.ring_folder is None else str(self._folder / limits.ring_folder)
        RECORDER.begin(limits.ring_bytes, self._facts(), folder, limits.disk_bytes)
        if folder and RECORDER.no_memory:
            self.account.complain(f"limits.ring_dir: nothing outlives this process: {RECORDER.no_memory}")
        if self.profile.export.summary is not None:
            prepare(self.profile.export.summary.views)
        self._begin()
        try:
            if self.profile.startup == "auto":
                self._undos.append(self._imports.install())
            if self._exporter is not None:
                self._exporter.prepare()
                RECORDER.remote_parent = otlp.current_parent
            RECORDER.trace_of = self._trace_of
            self._undos.append(contexts.watch())
            if self._timing is not None:
                self._undos.append(self._timing.install())
                self._undos.append(graphs.watch())
            self._undos.append(self.selection.attach())
            self._undos.append(self._ranges.install())  # may import numpy, which a rule may name
            self._undos.append(self._gauges.stop)
            self._gauges.prepare()
            self._prepare_files()
            self._choose_clock()
            self._costs.measure(with_ticks=self._ticks.are_used)
            self._undos.append(self._budget.release)
            self._budget.change(self.profile.budget)
            self._start_threads_when_needed()
            RECORDER.on = True
            self._start_control()
        except BaseException:
            if self._control is not None:
                self._control.stop(0)
            self._undo()
            raise
        if self._is_of_run and is_main():
            self.make_board()
        self._join_run()
        atexit.register(self._at_exit)
        self._last_undos.append(lambda: atexit.unregister(self._at_exit))

    def _prepare_files(self) -> None:
        """Import what files of spans and the report take, also for the end: what is imported then makes Python forget
        that a `KeyboardInterrupt` ended the program, which would exit with 1 and not by the signal."""
        export = self.profile.export
        if export.summary is not None or saving.is_asked(export):
            saving.prepare_columns()
        if not saving.is_asked(export):
            return
        problem = saving.why_no_files()
        if problem:
            self.account.complain(f"export: {problem}")
        else:
            saving.prepare()

    def _join_run(self) -> None:
        """Tell the run's agent of this process, where there is one."""
        if self.profile.agent == "off":
            return
        problem = self._membership.join()
        if problem:
            self.account.complain(f"{problem}; what this process records goes with it", log=False)

    def _told_at_join(self) -> dict[str, Any]:
        recording = self.profile.export.recording or Recordings()
        return {
            "run": self._run,
            "service": self.profile.service,
            "profile": self.profile.source,
            "digest": self._digest,
            "generation": self.generation,
            "recorder": "native" if RECORDER.native else "pure",
            "is_first": self._is_of_run and is_main(),
            "records": self._has_threads,
            "folder": str(self._folder),
            "captures": str(self._folder / self._place().path(recording.path)),
            "disk_bytes": self.profile.limits.disk_bytes,
            "report": self._report_of_run(),
        }

    def _report_of_run(self) -> dict[str, Any] | None:
        """Which views the run's report has, and their options; None where this process has no part in one."""
        wanted = self.profile.export.summary
        if wanted is None or wanted.to not in files.STREAMS:
            return None
        return {"views": list(self._views(None, {})), "options": asdict(self._options({}))}

    def _told_at_end(self) -> dict[str, Any]:
        notes = [note[:NOTE_TOLD] for note in self.notes()[:NOTES_TOLD]]
        return {
            "calls": RECORDER.calls,
            "losses": dict(self.losses()),
            "notes": notes,
            "cost": asdict(self.cost()),
            "files": [str(path) for path in self._newest_files],
        }

    def _save_for_run(self, path: str) -> None:
        """Save all that is held, for the report of the run."""
        files.save(path, replace(self.trace(), cost=self.cost()), self.tally())

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

    def _start_control(self) -> None:
        wanted = self.profile.control
        if not wanted.watch and wanted.socket is None:
            return
        loads("")  # imports what reading a profile needs: not on a thread, for a fork in the middle would spoil it
        if wanted.watch and self._file is None:
            self.account.complain(f"control.watch: there is no file to watch; the profile is {self.profile.source}")
        self._control = self._new_control(None if wanted.socket is None else folder_of(wanted.socket, self._folder))
        self._listen(self._control)

    def _new_control(self, folder: Path | None) -> Control:
        return Control(
            folder,
            lambda: self._file if self.profile.control.watch else None,
            self._told,
            self.selection.settle,
            self._refuse,
            self._membership,
        )

    def _hear_agent(self) -> None:
        """Do what the run's agent asks for from now on: on the thread that there is for control, or on one for that."""
        if not self._membership.is_joined:
            return
        if self._control is None:
            self._control = self._new_control(None)
        self._listen(self._control)

    def _listen(self, control: Control) -> None:
        problem = control.start()
        if problem:
            self.account.complain(problem)

    def _start_threads_when_needed(self) -> None:
        """Those of the exporter, of gauges and the session's own: at once, or when the first span is recorded.

        Processes of `instrument run` begin sessions without being asked, and many never record anything: parents that
        only start others, and helpers. What the threads need is imported by now.
        """
        if self._is_of_run:
            await_first_span(self._recording_begins)
        else:
            self._start_threads()

    def _recording_begins(self) -> None:
        """The first span is about to be recorded, on this thread of the service: it goes on after some 0.1 ms."""
        begun = self._begun = Event()
        rests = Event()

        def start() -> None:
            rests.set()
            self._stopping.wait(START_DELAY_S)
            try:
                _attempt("start of threads", self._start_threads)
            finally:
                begun.set()
            _attempt("board of the run", self._tell_others)

        try:
            start_new_thread(start, ())
            rests.wait(START_DELAY_S)
        except BaseException:
            begun.set()
            raise

    def _start_threads(self) -> None:
        self._has_threads = True
        if self._exporter is not None:
            self._exporter.start()
        self._gauges.begin()
        self._start_thread()
        self._hear_agent()

    def _tell_others(self) -> None:
        """Let the other processes of the run know what this one records."""
        if self._has_threads:
            self._membership.tell({"records": True})
        if self._is_of_run or self._forked:
            has_recorded = RECORDER.calls or self._begun is not None
            board.put([*marks_of(self.verdicts()), *([board.RECORDED] if has_recorded else [])])

    def _start_thread(self) -> None:
        if self._has_threads and self._is_looked_after() and self._thread is None:
            stopping = self._stopping
            self._thread = Thread(self._pump_until_stopped, "instrument", lambda: not stopping.is_set())
            self._thread.start()

    def _is_read(self) -> bool:
        """Whether anybody wants spans while the service runs. To read them takes about 0.7 us each."""
        return self._exporter is not None or self.profile.schedule is not None or self._is_scraped

    def _is_looked_after(self) -> bool:
        """Whether anything is to be done while the service runs. Otherwise no thread does."""
        return self._is_read() or self.profile.budget is not None or self._ticks.are_used

    def _undo(self) -> None:
        RECORDER.on = False
        RECORDER.remote_parent = RECORDER.trace_of = None
        while self._undos:
            _attempt("way back", self._undos.pop())

    # ---------------------------------------------------------------- while it runs

    def _pump_until_stopped(self) -> None:
        while not self._stopping.wait(BUSY_S if self._budget.is_busy else PUMP_S):
            try:
                self._pump()
            except Exception as fault:
                FAULTS.note("export thread", fault)
            self.account.thread_ns = time.thread_time_ns()

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
                self._meter.count_generators(self._generators)
            if meters:
                snapshot = self._take_metrics(ended)
            if self._outbox is not None:
                self._outbox.send_settled(is_last=self._stopped)
            while self._reader.cut:
                window, origin = self._reader.cut.popleft()
                self._write_window(*window, origin)
        return snapshot

    def _has_metrics(self) -> bool:
        """Whether the profile asks for any beside gauges, and there is somebody to be told."""
        asks = bool(self.profile.requests) or any(rule.metrics or rule.gen_ai for rule in self.profile.functions)
        return self._is_scraped or (asks and self._exporter is not None)

    def _watch_generations(self) -> None:
        self._meter.generations = tuple(route for rule in self.profile.requests for route in rule.gen_ai)
        self._meter.watch(functions=any(rule.gen_ai for rule in self.profile.functions))

    def _generators(self) -> set[Site]:
        """What the rules with `gen_ai` are recorded as."""
        return self._sites_of({rule.text for rule in self.profile.functions if rule.gen_ai})

    def _take_metrics(self, ended: Ended) -> Snapshot:
        """Take all metrics, once the reader has met what had `ended` before."""
        self._metered_ns = time.monotonic_ns()
        self._meter.settle(ended)
        rules = {rule.text for rule in self.profile.functions if rule.metrics}
        snapshot = self._meter.snapshot(requests=bool(self.profile.requests), sites=self._sites_of(rules))
        if self._exporter is not None:
            self._exporter.metrics.put(snapshot)
        self._snapshot = snapshot
        return snapshot

    def _costs_ns(self) -> Mapping[str, float]:
        """What the instrumentation has cost so far, by what for."""
        cost = self.cost()
        return {"probes": cost.calls * cost.per_call_ns, **self.account.threads_ns()}

    def prometheus(self, *, openmetrics: bool = False) -> str:
        """The metrics as they are now, in Prometheus's text format; see `instrument.prometheus`."""
        from instrument.sessions.exposition import text_of

        if not self._is_scraped:
            self._is_scraped = True
            self._start_thread()  # from now on requests are told by status before the rings have lost them
        snapshot = self._pump(SCRAPE_WAIT_S, meters=True) or self._snapshot
        now_ns = time.monotonic_ns()
        samples = self._gauges.samples(now_ns - GAUGES_FOR_NS, now_ns)
        return text_of(self.origin(), snapshot, samples, self._gauges.gpus(), openmetrics=openmetrics)

    def _keep(self, spans: list[Span]) -> None:
        if self._outbox is not None:
            self._outbox.put(spans)
            # A request comes first among its spans; those that end after it come alone.
            if spans[0].site.kind == "request" and spans[0].span_id == spans[0].root_id:
                self._meter.note_kept(spans[0], *self.ids().of(spans[0]))

    def _keep_samples(self, samples: Sequence[Sample], gpus: Sequence[Gpu]) -> None:
        if self._exporter is not None:
            self._exporter.metrics.offer(samples, gpus)

    def flush(self, timeout_s: float = 5.0) -> otlp.Delivery | None:
        """Hand over all that has finished and wait, at most so long, until the collector has it.

        Returns what was delivered and what was not; None where the profile exports to no collector.
        """
        end = time.monotonic() + timeout_s
        self._pump(min(max(timeout_s, 0.0), TIMEOUT_MAX), meters=True)
        if self._exporter is None:
            return None
        return self._exporter.flush(round(max(min(end - time.monotonic(), TIMEOUT_MAX), 0.0) * 1e9))

    def sends_to(self, endpoint: str) -> bool:
        """Whether the session itself sends what `capture` keeps to that collector."""
        wanted = self.profile.export.otlp
        return self._exporter is not None and wanted is not None and wanted.endpoint == endpoint

    def unsent(self, spans: Sequence[Span]) -> list[Span]:
        """Those spans of a window that the session neither has sent nor will send: the caller does.

        A request that has not ended is kept, for nobody else could tell what becomes of it.
        """
        with self._lock.held():
            return self._reader.unsent(spans)

    def ids(self) -> otlp.Ids:
        """What the spans of this session are called at collectors."""
        if self._exporter is not None:
            return self._exporter.ids
        if self._ids is None:
            self._ids = otlp.Ids()
        return self._ids

    def _trace_of(self, span_id: int, root_id: int, told: Any) -> tuple[int, int, int, str]:
        """Trace id, span id, flags and state of a span: those of the caller's trace, or of our own, by the sample."""
        ids, remote = self.ids(), remote_of(told)
        if remote is not None:
            return remote.trace_id, ids.span_id(span_id), remote.flags, remote.state
        return ids.trace_id(root_id), ids.span_id(span_id), int(is_sampled(root_id, self.profile.capture.sample)), ""

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
            return self._reload(profile)
        except InstrumentError as error:
            self._refuse(str(error))
            raise

    def _reload(self, profile: Profile | str | os.PathLike[str] | None) -> Reload:
        if profile is None and self._file is None:
            raise StateError(
                f"asked to reload, but the session's profile is no file ({self.profile.source}); give one to reload"
            )
        with self._reloading:  # the file is read within, or of two callers the one that read first might be the last
            if self._stopping.is_set():
                raise StateError("asked to reload a session that has been stopped; call instrument.start()")
            wanted, file = generation.read(profile, self._file)
            kept = generation.taken_on(wanted, self.profile)
            attached: list[str] = []
            undone: list[str] = []
            if kept != self.profile:
                attached, undone = generation.change_rules(self.selection, self.profile, kept)
            refused = self.account.refused = generation.refusals(wanted, kept)
            self._file = file
            with self._lock.held():
                self._change_settings(kept)
            return Reload(self.generation, self._digest, tuple(attached), tuple(undone), refused)

    def _change_settings(self, profile: Profile) -> None:
        before = self.profile
        if profile == before:
            self.profile = profile  # it may lie elsewhere now
            return
        now_ns = time.monotonic_ns()
        was_read = self._is_read()
        if was_read:
            self._reader.look()
        self._reader.change(profile, now_ns)
        if profile.budget != before.budget:
            self._budget.change(profile.budget)
        self.profile = profile
        self._watch_generations()
        if profile.export != before.export:
            self._prepare_files()
        self.generation += 1
        self._digest = profile.digest
        RECORDER.tell(self._facts())
        if self._exporter is not None:
            self._exporter.origin = self.origin()
        if self._is_read() and not was_read:
            self._reader.skip()  # nobody has read what was recorded until now
        self._start_thread()

    def _refuse(self, error: str) -> None:
        """Note why a profile was not taken on, until one is."""
        self.account.refuse(f"the profile of generation {self.generation} stays in force: {error}")

    def _told(self, request: Request) -> Mapping[str, Any]:
        """What a caller of the control socket, or a changed file, asks for; the answer as JSON takes it."""
        path = request.path
        facts: dict[str, Any] = {"pid": os.getpid(), "service": self.profile.service}
        if request.records is not None:
            RECORDER.on = request.records and not self._stopping.is_set()
            return {**facts, "generation": self.generation, "records": RECORDER.on}
        try:
            if path is not None and Path(path).exists() and not Path(path).is_file():
                raise ProfileError([f"{path}: found no regular file; give the path of a profile"])
            other = generation.other_than(request, self.profile, self._file)
            if other:
                return {**facts, "generation": self.generation, "digest": self._digest, "other": other}
            done = self._reload(path)
        except (InstrumentError, ValueError) as error:
            return {**facts, "generation": self.generation, "digest": self._digest, "error": str(error)}
        return {**facts, **done.facts()}

    # ---------------------------------------------------------------- reading

    def origin(self) -> Origin:
        """Which process this is, with a fresh pair of monotonic and wall clock."""
        monotonic_ns, realtime_ns = clock.pair()
        return Origin(
            pid=os.getpid(),
            service=self.profile.service,
            monotonic_ns=monotonic_ns,
            realtime_ns=realtime_ns,
            recorder="native" if RECORDER.native else "pure",
            profile=self.profile.source,
            host=socket.gethostname(),
            generation=self.generation,
            digest=self._digest,
            boot=clock.boot_id(),
            wall_error_ns=clock.wall_error_ns(),
        )

    def _facts(self) -> Mapping[str, Any]:
        """What others are to know who read this process's recording."""
        return {"origin": asdict(self.origin())}

    def cost(self) -> Cost:
        """What the instrumentation has cost so far: the spans of each shape of probe at its cost on this machine.

        A generator counts as one step, whatever it made. Device times add what a pair of events costs on this device.
        """
        return self.account.cost(self._lasted_ns())

    def _lasted_ns(self) -> int:
        return (self.end_ns or time.monotonic_ns()) - self.start_ns

    def losses(self) -> Mapping[str, int]:
        """Everything that was recorded and not kept, by reason."""
        unseen = self._meter.lost
        of_meter = {"spans overwritten before it was seen whether a model generated them": unseen} if unseen else {}
        return {**self.account.losses(), **of_meter}

    def notes(self) -> list[str]:
        """Everything that could not be observed, and what went wrong, in sentences."""
        return self.account.notes()

    def verdicts(self) -> list[Verdict]:
        """What became of every rule and target up to now, with the calls of each target."""
        return self.account.verdicts()

    def tally(self) -> Tally:
        """Exact totals of all calls up to now, with what their probes cost."""
        return self._charged(RECORDER.tally())

    def _charged(self, tally: Tally) -> Tally:
        tally.charge(lambda site: self._costs.of(site).outside_ns)
        return tally

    def trace(
        self, start_ns: int | None = None, end_ns: int | None = None, window: int = 0, origin: Origin | None = None
    ) -> Trace:
        """The newest spans that the rings still hold, as they lie in the window; open ones are clipped and marked.

        Steps of the outermost `Profiler` that counts any are spans, too, and where nobody says what a step is and the
        profile wants the phases of training and its loaders, the steps that these show. `origin` is that of the
        window's end, where it has ended before now.
        """
        first = self.start_ns if start_ns is None else start_ns
        last = (self.end_ns or time.monotonic_ns()) if end_ns is None else end_ns
        trace = self.trace_of(self.take(first, last, window, origin))
        if self._finds_steps:
            trace = with_steps(trace, steps_of_batches(trace.spans))
        else:
            trace = with_steps(trace, self.loop.within(max(first, trace.held_from_ns), last))
        if start_ns is None and end_ns is None:
            trace.cost = self.account.cost(last - first)  # of the very time that the trace says to be its own
        return trace

    @property
    def _finds_steps(self) -> bool:
        """Whether the steps of a training loop are looked for in what is recorded."""
        profile = self.profile
        is_wanted = profile.phases == profile.loaders == "auto" and profile.schedule is None
        return is_wanted and self.loop.is_unused

    def take(self, start_ns: int, end_ns: int, window: int = 0, origin: Origin | None = None) -> Stretch:
        """What the rings hold of that time, at 10 ns a span; `trace_of` makes a trace of it later."""
        return Stretch.of(RECORDER, start_ns, end_ns, window, origin or self.origin())

    def trace_of(self, stretch: Stretch) -> Trace:
        """The trace of what was taken, with the device times that have come by now, and the cost of these spans.

        0.3 us a span; while the session runs, on any thread. Objects of the spans are made for whoever looks at them.
        """
        from instrument.trace.of_spans import LaterSpans, spans_of

        columns, window_ns = stretch.columns(self._timing), stretch.end_ns - stretch.start_ns
        spans: Sequence[Span] = LaterSpans(columns)
        if self.selection.times_nodes():
            spans = spans_of(columns)
            spans += self.selection.nodes_within(spans)
        return Trace(
            origin=stretch.origin,
            start_ns=stretch.start_ns,
            end_ns=stretch.end_ns,
            spans=spans,
            threads=stretch.threads,
            losses=self.losses(),
            notes=self.notes(),
            window=stretch.window,
            cost=self.account.cost_of(columns.calls(), columns.timed(), window_ns, self._lasted_ns()),
            held_from_ns=stretch.held_from_ns(),
            samples=self._gauges.samples(stretch.start_ns, stretch.end_ns),
            gpus=self._gauges.gpus(),
            startup=self._startup_in(stretch),
        )

    def _startup_in(self, stretch: Stretch) -> Startup | None:
        """How the process came to serve, None where that began before the stretch: its calls do not tell of it."""
        found = self.startup()
        return None if any(first.start_ns < stretch.start_ns for first in found.firsts) else found

    def _held(self) -> HeldSpans | None:
        """What there is to say of the spans that the rings hold now, None where only they themselves tell."""
        if self.end_ns is not None or self.selection.times_nodes() or self._finds_steps:
            return None
        held, from_ns = held_now(RECORDER, self.start_ns)
        first_ns = max(from_ns, self.start_ns)
        timing = self._timing if held.asking else None
        intervals = {} if timing is None else timing.intervals.of(set(held.asking))
        until_ns = max(time.monotonic_ns(), first_ns)
        unanswered = Counter(its[0].label for its in intervals.values() if all(one.label in UNTIMED for one in its))
        unanswered[NO_EVENTS] += len(held.asking) - len(intervals)
        return HeldSpans(
            count=held.spans + len(self.loop.within(first_ns, until_ns)),
            complete=first_ns == self.start_ns,
            since_ns=first_ns - self.start_ns,
            until_ns=until_ns - self.start_ns,
            asked=len(held.asking),
            unanswered=+unanswered,
        )

    def startup(self) -> Startup:
        """How the process came to serve: kept for ever, whatever the rings have overwritten since."""
        firsts = tuple(FirstCall(site, *first) for site, first in RECORDER.firsts().items())
        request, why = taken_for_first(RECORDER.firsts_by_node(), RECORDER.paths(), self._named_first())
        facts = Startup(self.start_ns, clock.process_start_ns(), firsts=firsts, request=request, why=why)
        if self.profile.startup != "auto":
            return facts
        first = facts.first_request
        return replace(facts, imports=self._imports.packages(None if first is None else first.start_ns))

    def _named_first(self) -> set[Site]:
        """What the rules with `first_request` are recorded as."""
        return self._sites_of({rule.text for rule in self.profile.functions if rule.first_request})

    def _sites_of(self, rules: Set[str]) -> set[Site]:
        """What the targets of these rules are recorded as."""
        found = self.selection.verdicts() if rules else ()
        return {verdict.site for verdict in found if verdict.rule in rules and verdict.site is not None}

    def recording(self, beside: str | os.PathLike[str] | None = None) -> Recording:
        """What reports are made of, as it is now: a tally and a trace that are taken when they are first read."""
        window_ns = self._lasted_ns()
        return Recording(
            self.tally,
            self.trace if beside is None else lambda: chrome.join(self.trace(), chrome.read(beside)[0]),
            make_lines=lambda merged: RECORDER.lines(merged=merged),
            make_held=self._held,
            make_cost=lambda: self.account.cost(window_ns),
            losses=self.losses(),
            notes=self.notes(),
            window_ns=window_ns,
            recorder="native" if RECORDER.native else "pure",
            make_upkeep=lambda: self.account.upkeep(self._ticks.clock, self.profile.limits.ring_bytes),
            collector_ids=None if self._exporter is None else self._exporter.ids.of,
            make_startup=self.startup,
        )

    def summary(
        self,
        *,
        views: Sequence[str] | None = None,
        beside: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> str:
        """The views, in the order asked, of everything since the start; what is left out comes from the profile.

        Where neither names any, it is `brief`, one screen, or with `tracer_option` or `threads` given `events`.
        `options` are those of `instrument.report.view.Options`. Views that are made from the tally are exact for all
        calls; those of spans are of the ones that the rings still hold, and say from when on these are complete.
        `brief` takes some 1.3 us of processor time for each span that is held, a second where rings of 64 MiB are full.
        Those of the tally, and that of costs, with threads merged and some tens of `rows`, take up to some 15 ms of
        processor time for as many call paths as there may be (16,384), whatever the uptime; the first asks each path
        and site what it is, 0.3 us each, unless a thread of ours has done so before. A block for each thread adds
        some 30 us for each of its rows. `beside` is a trace file of `torch.profiler`, recorded meanwhile, whose
        kernels and allocations the views `kernels` and `memory` are then of, and `operators` tells FLOPs by the
        shapes in it. Raises `ValueError` for a view or a value that there is not, and `TraceError` for a file that is
        not of this process and time.
        """
        return summary(self._views(views, options), self.recording(beside), self._options(options))

    def views(
        self, views: Sequence[str] | None = None, *, beside: str | os.PathLike[str] | None = None, **options: Any
    ) -> dict[str, View]:
        """The numbers of the same views, by name, as objects. Options and errors as for `summary`."""
        return made(self._views(views, options), self.recording(beside), self._options(options))

    def _views(self, asked: Sequence[str] | None, options: Mapping[str, Any]) -> Sequence[str]:
        if asked is not None:
            return asked
        of_profile = (self.profile.export.summary or Summary()).views
        return views_for(options) if of_profile == Summary().views else of_profile

    def _options(self, asked: Mapping[str, Any]) -> Options:
        wanted = self.profile.export.summary or Summary()
        defaults = {
            "tracer_option": self.profile.tracer_option,
            "state": self.profile.state,
            "sorted_by": wanted.sorted_by,
            "rows": wanted.rows,
            "threads": "both" if wanted.per_thread else "merged",
            "least_ns": wanted.least_ns,
            "unit": wanted.unit,
            "corrected": wanted.corrected,
            "skip_first": wanted.skip_first,
        }
        return Options.of({**defaults, **{name: value for name, value in asked.items() if value is not None}})

    def dump(self, path: str | os.PathLike[str]) -> Path:
        """Write what is held now, as a recording (`.npz`) or a Chrome trace; nothing is reset. Raises `TraceError`."""
        return files.save(path, self.trace(), self.tally())

    # ---------------------------------------------------------------- the end

    def stop(self) -> None:
        """Undo every change, write what the profile asks for and wait for the collector, at most five seconds.

        A second call does nothing but wait for the first. Raises nothing: what could not be written is logged and
        stands in `losses`. The `onlookers` are called first: functions of those who look at the session as it runs.
        """
        while self.onlookers:
            _attempt("end of one who looks on", self.onlookers.pop())
        await_first_span(None)
        self._stopping.set()
        if self._begun is not None:
            self._begun.wait(START_LIMIT_S)  # what has just begun to record is sent, too
        thread = self._thread
        if thread is not None:
            thread.join(EXIT_LIMIT_NS / 1e9)
        control, self._control = self._control, None
        if control is not None:
            control.stop(EXIT_LIMIT_NS / 1e9)
        with self._reloading:
            pass  # a reload on another thread ends; there is none from now on
        with self._lock.held():
            if self._stopped:
                return
            self._stopped = True
            self._undo()
            _attempt("last look at the spans", partial(self._pump, meters=True))
            self.end_ns = time.monotonic_ns()
            _attempt("board of the run", self._tell_others)
            asked = os.environ.get(CHECK_FOLDER)
            if asked:
                report = partial(report_to_check, asked, RECORDER.calls, self.profile)
                _attempt("report to check", lambda: report(self.verdicts()))
            tells = RECORDER.calls or (self._place().is_first and board.RECORDED not in board.marks())
            if tells:
                _attempt("last window", self._deliver)
            elif self._exporter is not None:
                self._exporter.stop(0)
            RECORDER.say_goodbye()
            _attempt("goodbye", partial(self._leave_run, tells=bool(tells)))
            # Until here an exit or a SIGTERM has waited for this end.
            while self._last_undos:
                _attempt("way back", self._last_undos.pop())

    def _deliver(self) -> None:
        """What a session leaves behind: its spans at the collector, its last trace file."""
        window = self._reader.stop(self.end_ns or 0)
        if self._exporter is not None:
            self._exporter.stop(EXIT_LIMIT_NS)
        if window is not None:
            _attempt("last trace file", lambda: self._write_window(*window))

    def _leave_run(self, *, tells: bool) -> None:
        """Say goodbye to the run, and print the summary: of the whole run, where this is its last process.

        Of several processes that share a standard stream the last one prints one report of all. A process without an
        agent, and one whose summary is a file, tells of itself.
        """
        wanted = self.profile.export.summary
        shares = wanted is not None and wanted.to in files.STREAMS
        answer = self._membership.leave(self._told_at_end(), self._save_for_run if shares else None)
        if wanted is None or answer.get("others"):
            return
        if answer.get("report"):
            self._print(wanted, str(answer["report"]))
        elif tells:
            self._print_summary(wanted)

    def _at_exit(self) -> None:
        _attempt("exit", self.stop)

    def _write_window(self, index: int, start_ns: int, end_ns: int, origin: Origin | None = None) -> None:
        export, place = self.profile.export, self._place()
        if not saving.is_asked(export) or saving.why_no_files():  # which has been told
            return
        self.selection.finish_nodes()
        trace = self.trace(start_ns, end_ns, index, origin)
        if start_ns <= self.start_ns and self.end_ns is not None and end_ns >= self.end_ns:
            trace = replace(trace, cost=self.cost())
            tally: Tally | None = self.tally()
        else:
            tally = self._counted(trace)
        written = saving.write(export, lambda template: place.path(template, index), trace, tally)
        for problem in written.problems:
            self.account.complain(problem)
        if written.paths:
            self._newest_files = written.paths
            self._make_room()

    def _counted(self, trace: Trace) -> Tally | None:
        """The tally of a window; None where numpy is not to be had: whoever reads the file then counts its spans."""
        try:
            return self._charged(Recording.of_trace(trace).tally)
        except ImportError:
            return None

    def _make_room(self) -> None:
        """Keep all that sessions of this service have left in files within `limits.disk`."""
        export = self.profile.export
        written = [*saving.templates(export)]
        written += [export.summary.to] if export.summary is not None and export.summary.to not in files.STREAMS else []
        kept = [path for path in (*self._newest_files, self._summary_file) if path is not None]
        removed = self._place().make_room(
            written, [self._folder / path for path in kept], self.profile.limits.disk_bytes
        )
        self.account.lose("files removed to stay within limits.disk", removed)

    def _place(self) -> files.Destination:
        return files.Destination(self._folder, self.profile.service, self._run, is_first=is_main() and not self._forked)

    def _print_summary(self, wanted: Summary) -> None:
        # Workers of one service write to one stream: which of them this is stands in each.
        text = self.summary() + f"\nProcess: {os.getpid()}\n"
        for path in self._newest_files:
            text += f"{'Recording' if path.suffix == saving.RECORDING else 'Chrome trace'}: {path}\n"
        self._print(wanted, text)

    def _print(self, wanted: Summary, text: str) -> None:
        try:
            self._summary_file = self._place().tell(wanted.to, text, EXIT_LIMIT_NS)
        except (OSError, ValueError) as error:
            # A standard error that takes nothing does not take the complaint either.
            message = f"the summary could not be written to {wanted.to}: {error}"
            self.account.complain(message, log=wanted.to != "stderr")
        if self._summary_file is not None:
            _attempt("room for the summary", self._make_room)

    def _after_fork_in_child(self, whole: bool) -> None:
        """The child records on its own: own rings, ids, threads and files. `whole`: no reload was under way."""
        self._forked = True
        self._membership.after_fork_in_child()
        self._reloading = RLock()
        self._lock = SessionLock()
        self.selection.after_fork_in_child()
        if not whole:
            _attempt("reload that a fork cut short", lambda: self.selection.change(self.profile, anew=True))
        if self._stopping.is_set():  # the parent's other thread was about to stop it, and is not here
            self._undo()
            self._forget(self)
            return
        self._stopping = Event()
        self._begun = None
        self._has_threads = False
        self._thread = None
        self._newest_files, self._summary_file = (), None
        self._ids = None
        self.account.after_fork_in_child()
        self._ranges.after_fork_in_child()
        self._imports.after_fork_in_child()
        if self._timing is not None:
            self._timing.after_fork_in_child()
        self._begin()
        RECORDER.tell(self._facts())
        if self._outbox is not None:
            self._outbox.after_fork_in_child()
        if self._exporter is not None:
            self._exporter.after_fork_in_child()
            self._exporter.origin = self.origin()
        self._gauges.after_fork_in_child(begins=False)
        self._start_threads_when_needed()
        if self._control is not None:
            self._control.after_fork_in_child()
            self._join_run()
            if not self._control.is_for_agent_alone:
                self._listen(self._control)
        else:
            self._join_run()
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            # A multiprocessing child leaves by os._exit and runs only its own finalisers, which it clears first.
            util.register_after_fork(self, Session._finish_with_multiprocessing)

    def _finish_with_multiprocessing(self) -> None:
        util = sys.modules["multiprocessing.util"]
        util.Finalize(None, self._at_exit, exitpriority=-100)


def _attempt(place: str, action: Callable[[], object]) -> None:
    """One of several things to do of which none may keep the others from being done."""
    try:
        action()
    except Exception as fault:
        FAULTS.note(place, fault)


def is_main() -> bool:
    """Whether this is the process that `instrument run` started, or one that called `start` itself."""
    main = os.environ.get("INSTRUMENT_RUN_PID")
    return main is None or main == str(os.getpid())
