"""The session: one profile at work in one process, from `start` to `stop`, across forks, signals and exit.

Only one session runs at a time. Everything that it changes in the process (import hook, patches, threads, exit
handler) is undone by `stop`.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from instrument import chrome, clock, files, otlp
from instrument.control import Control, folder_of
from instrument.device.cuda import CudaDriver
from instrument.device.gauges import Gauges
from instrument.device.nvtx import Ranges
from instrument.device.timer import Timing
from instrument.document import nearest
from instrument.errors import FAULTS, InstrumentError, ProfileError, StateError, TraceError, logger
from instrument.governor import Governor
from instrument.import_times import ImportTimes
from instrument.outbox import Outbox
from instrument.probe_cost import ProbeCost, measure_cold_ns, measure_costs
from instrument.probes import contexts, graphs
from instrument.probes.selection import Selection
from instrument.probes.verdict import Verdict
from instrument.profile import Profile, Summary
from instrument.reader import Reader
from instrument.recorder import RECORDER
from instrument.report.summary import made, summary
from instrument.report.view import Options, Recording, Upkeep, View
from instrument.schema import load, loads, setting
from instrument.spans import Cost, FirstCall, Gpu, Origin, Sample, Span, Startup, Trace
from instrument.stretch import Stretch
from instrument.tally import Tally

GOVERNOR_NS = 10**9
"""How often the cost of the probes is held against `budget`."""

TICKS_CHECK_NS = 10**9
TICKS_LIMIT_NS = 50_000
"""How far the time stamp counter may stray from the monotonic clock in a second before it is given up."""

PUMP_S = 0.2
"""How often finished spans are looked through; a thread's ring must hold what it records in that time."""

EXIT_LIMIT_NS = 5 * 10**9
"""The longest that `stop`, interpreter exit and SIGTERM wait for a collector, or for somebody to read the summary."""

DEVICE_SHARE = 8
"""What part of `limits.ring` is there once more for device intervals."""

COMPLAINTS_KEPT = 20

FORK_WAIT_S = 1.0
"""The longest that a fork waits for a reload on another thread, so that the child does not find half of it."""

NAMES_TOLD = 100
"""The most names of a kind in the answer to a caller of the control socket."""

CHECK_FOLDER = "INSTRUMENT_CHECK_FOLDER"
"""The variable by which `instrument check` asks the processes of a command to report to it."""

AT_START = {
    "clock": "spans that are open now were begun by the other one",
    "limits.ring": "the rings are made when the session starts",
    "device": "the device is set up when the session starts",
    "control": "it is set up when the session starts",
    "startup": "what it is about has begun by then",
    "export.otlp": "what sending needs is set up when the session starts",
}
"""Settings that a reload cannot change, and why."""


@dataclass(frozen=True)
class Reload:
    """What became of a profile that was handed to a running session.

    `attached` and `undone` name targets of function rules and, for layers and copies, rules; what both profiles want
    is in neither. `refused` tells each setting that keeps its value, and why. `generation` counts profiles from 1;
    `digest` is that of the profile now in force.
    """

    generation: int
    digest: str
    attached: tuple[str, ...] = ()
    undone: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = f"{len(self.attached)} attached, {len(self.undone)} undone"
        return "; ".join([f"generation {self.generation} ({self.digest}): {counts}", *self.refused])


class Session:
    """A running session. Made by `start`; `stop` ends it. All methods may be called from any thread.

    `forget(session)` is told when it has ended.
    """

    def __init__(self, profile: Profile, forget: Callable[[Session], None]) -> None:
        self.profile = profile
        self._forget = forget
        self.selection = Selection(profile)
        self._lock = threading.RLock()
        self._postponed = 0
        self._undos: list[Callable[[], None]] = []
        self._last_undos: list[Callable[[], object]] = [lambda: forget(self)]
        self.onlookers: list[Callable[[], object]] = []
        self._stopping = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._exporter: otlp.Exporter | None = None
        self._ids: otlp.Ids | None = None
        self._ranges = Ranges(RECORDER)
        self._timing: Timing | None = None
        self._outbox: Outbox | None = None
        self._gauges = Gauges(profile.device, self._keep_samples)
        self._imports = ImportTimes(RECORDER.current_id)
        self._folder = files.working_folder()
        self._newest_file: Path | None = None
        self._losses: Counter[str] = Counter()
        self._complaints: deque[str] = deque(maxlen=COMPLAINTS_KEPT)
        self._costs: dict[str, ProbeCost] | None = None
        self._cold_ns: float | None = None
        self._ticks_checked_ns: int | None = None
        self._governor: Governor | None = None
        self._governed_ns = 0
        self._thread_ns = 0
        self._forked = False
        self._reloading = threading.RLock()
        self._control: Control | None = None
        self._file = _file_of(profile, self._folder)
        self._refused: tuple[str, ...] = ()
        self.generation = 1
        self._digest = profile.digest
        self._begin()

    def _begin(self) -> None:
        self.start_ns = time.monotonic_ns()
        self.end_ns: int | None = None
        self._reader = Reader(RECORDER, self.profile, self.selection, self.start_ns, self._keep, self.origin)

    def _start(self) -> None:
        RECORDER.reset(self.profile.limits.ring_bytes)
        self._begin()
        try:
            if self.profile.startup == "auto":
                self._undos.append(self._imports.install())
            if self.profile.export.otlp is not None:
                self._exporter = otlp.Exporter(self.profile.export.otlp, self.origin(), RECORDER.threads)
                self._exporter.start()
                RECORDER.remote_parent = otlp.current_parent
            self._undos.append(contexts.watch())
            if self.profile.device.cuda != "off" and self.profile.state != "CPU":
                self._timing = Timing(
                    self.profile.limits.ring_bytes // DEVICE_SHARE,
                    make_driver=partial(CudaDriver, holds_gil=self.profile.device.gil == "hold"),
                    ranges=self._ranges,
                )
                self._undos.append(self._timing.install())
                self._undos.append(graphs.watch())
            if self._exporter is not None:
                self._outbox = Outbox(self._exporter, self._timing)
            self._undos.append(self.selection.attach())
            self._undos.append(self._ranges.install())  # may import numpy, which a rule may name
            self._undos.append(self._gauges.stop)
            self._gauges.start()
            self._choose_clock()
            self._undos.append(self._release_governor)
            self._govern_by(self.profile.budget)
            RECORDER.on = True
            self._start_thread()
            self._start_control()
        except BaseException:
            if self._control is not None:
                self._control.stop(0)
            self._undo()
            raise
        atexit.register(self._at_exit)
        self._last_undos.append(lambda: atexit.unregister(self._at_exit))

    def _choose_clock(self) -> None:
        if self.profile.clock != "tsc":
            return
        unsound = RECORDER.use_ticks()
        if unsound:
            self._complaints.append(f"clock: tsc is not used: {unsound}")
            return
        self._ticks_checked_ns = time.monotonic_ns()
        self._undos.append(RECORDER.stop_ticks)

    def _govern_by(self, budget: float | None) -> None:
        self._release_governor()
        self._governor = None
        if budget is not None:
            costs = {shape: cost.added_ns for shape, cost in self._measured_costs().items()}
            self._governor = Governor(RECORDER, budget, costs, time.monotonic_ns())

    def _release_governor(self) -> None:
        if self._governor is not None:
            self._governor.release()

    def _govern(self) -> None:
        now = time.monotonic_ns()
        if self._governor is not None and now - self._governed_ns >= GOVERNOR_NS:
            self._governed_ns = now
            self._governor.step(now)

    def _check_clock(self) -> None:
        """Hold the time stamp counter against the monotonic clock once a second."""
        now = time.monotonic_ns()
        if self._ticks_checked_ns is None or now - self._ticks_checked_ns < TICKS_CHECK_NS:
            return
        self._ticks_checked_ns = now
        if RECORDER.check_ticks(TICKS_LIMIT_NS) is None:
            self._ticks_checked_ns = None  # given up and counted

    def _start_control(self) -> None:
        wanted = self.profile.control
        if not wanted.watch and wanted.socket is None:
            return
        loads("")  # imports what reading a profile needs: not on a thread, for a fork in the middle would spoil it
        if wanted.watch and self._file is None:
            self._complain(f"control.watch: there is no file to watch; the profile is {self.profile.source}")
        self._control = Control(
            None if wanted.socket is None else folder_of(wanted.socket, self._folder),
            lambda: self._file if self.profile.control.watch else None,
            self._told,
            self.selection.settle,
            self._refuse,
        )
        self._listen(self._control)

    def _listen(self, control: Control) -> None:
        problem = control.start()
        if problem:
            self._complain(problem)

    def _start_thread(self) -> None:
        if self._is_read() and self._thread is None:
            self._thread = threading.Thread(target=self._pump_until_stopped, name="instrument", daemon=True)
            self._thread.start()

    def _is_read(self) -> bool:
        """Whether anything looks at spans, or at the clock, while the service runs. Otherwise no thread does."""
        return (
            self._exporter is not None
            or self.profile.schedule is not None
            or self.profile.budget is not None
            or self._ticks_checked_ns is not None
        )

    def _undo(self) -> None:
        RECORDER.on = False
        RECORDER.remote_parent = None
        while self._undos:
            _attempt("way back", self._undos.pop())

    @contextmanager
    def _alone(self, timeout_s: float = -1) -> Iterator[bool]:
        """Hold the session's lock; tells whether it could be had in that time.

        A SIGTERM that interrupts its holder waits until it is given back: another thread is to stop the session then.
        """
        held = self._lock.acquire(timeout=timeout_s)
        try:
            yield held
        finally:
            if held:
                self._lock.release()
            if self._postponed and not self._is_mine():
                number, self._postponed = self._postponed, 0
                os.kill(os.getpid(), number)

    def _is_mine(self) -> bool:
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def _postpone(self, number: int) -> bool:
        """Whether the calling thread holds the session: the signal is then sent again when it lets go."""
        if self._is_mine():
            self._postponed = number
        return self._is_mine()

    # ---------------------------------------------------------------- while it runs

    def _pump_until_stopped(self) -> None:
        while not self._stopping.wait(PUMP_S):
            try:
                self._pump()
            except Exception as fault:
                FAULTS.note("export thread", fault)
            self._thread_ns = time.thread_time_ns()

    def _pump(self, timeout_s: float = -1) -> None:
        """Look through the spans that have finished since the last time."""
        with self._alone(timeout_s) as held:
            if not held or not (self._is_read() or self._reader.cut):
                return
            if self._outbox is not None:
                self._outbox.renew_clock(self.origin)
            self._check_clock()
            self._govern()
            self._reader.look()
            if self._outbox is not None:
                self._outbox.send_settled(is_last=self._stopped)
            while self._reader.cut:
                window, origin = self._reader.cut.popleft()
                self._write_window(*window, origin)

    def _keep(self, spans: list[Span]) -> None:
        if self._outbox is not None:
            self._outbox.put(spans)

    def _keep_samples(self, samples: Sequence[Sample], gpus: Sequence[Gpu]) -> None:
        if self._exporter is not None:
            self._exporter.metrics.offer(samples, gpus)

    def flush(self, timeout_s: float = 5.0) -> otlp.Delivery | None:
        """Hand over all that has finished and wait, at most so long, until the collector has it.

        Returns what was delivered and what was not; None where the profile exports to no collector.
        """
        end = time.monotonic() + timeout_s
        self._pump(min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
        if self._exporter is None:
            return None
        return self._exporter.flush(round(max(min(end - time.monotonic(), threading.TIMEOUT_MAX), 0.0) * 1e9))

    def sends_to(self, endpoint: str) -> bool:
        """Whether the session itself sends what `capture` keeps to that collector."""
        wanted = self.profile.export.otlp
        return self._exporter is not None and wanted is not None and wanted.endpoint == endpoint

    def unsent(self, spans: Sequence[Span]) -> list[Span]:
        """Those spans of a window that the session neither has sent nor will send: the caller does.

        A request that has not ended is kept, for nobody else could tell what becomes of it.
        """
        with self._alone():
            return self._reader.unsent(spans)

    def ids(self) -> otlp.Ids:
        """What the spans of this session are called at collectors."""
        if self._exporter is not None:
            return self._exporter.ids
        if self._ids is None:
            self._ids = otlp.Ids()
        return self._ids

    def count_loss(self, what: str, count: int) -> None:
        """Have the reports tell of something that was recorded and not kept."""
        with self._alone():
            self._losses[what] += count

    # ---------------------------------------------------------------- another profile

    def reload(self, profile: Profile | str | os.PathLike[str] | None = None) -> Reload:
        """Go over to another profile: a path, a `Profile`, or None for the file of the present one, read again.

        What is new is attached, also to modules that are imported; what is gone is undone; what both want goes on
        without a gap, with the same totals. Settings of `AT_START` keep their values and are told. Works on the
        calling thread, some ten milliseconds; calls of the service go on meanwhile.
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
            if isinstance(profile, Profile):
                wanted, file = profile, _file_of(profile, files.working_folder())
            else:
                file = files.working_folder() / (profile or self._file or "")
                wanted = load(file)
            now = self.profile
            kept = replace(
                wanted,
                clock=now.clock,
                device=now.device,
                control=now.control,
                startup=now.startup,
                limits=replace(wanted.limits, ring_bytes=now.limits.ring_bytes),
                export=replace(wanted.export, otlp=now.export.otlp),
            )
            attached: list[str] = []
            undone: list[str] = []
            if kept != now:
                attached, undone = self._change_rules(kept)
            self._refused = tuple(
                f"{name} keeps its value until a restart: {why}"
                for name, why in AT_START.items()
                if setting(wanted, name) != setting(kept, name)
            )
            self._file = file
            with self._alone():
                self._change_settings(kept)
            return Reload(self.generation, self._digest, tuple(attached), tuple(undone), self._refused)

    def _change_rules(self, profile: Profile) -> tuple[list[str], list[str]]:
        try:
            return self.selection.change(profile)
        except Exception as fault:
            self.selection.change(self.profile, anew=True)
            raise StateError(f"{profile.source} could not be put to work: {type(fault).__name__}: {fault}") from fault

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
            self._govern_by(profile.budget)
        self.profile = profile
        self.generation += 1
        self._digest = profile.digest
        if self._exporter is not None:
            self._exporter.origin = self.origin()
        if self._is_read() and not was_read:
            self._reader.skip()  # nobody has read what was recorded until now
        self._start_thread()

    def _refuse(self, error: str) -> None:
        """Note why a profile was not taken on, until one is."""
        message = f"the profile of generation {self.generation} stays in force: {error}"
        if (message,) != self._refused:
            logger.warning("reload: %s", message)
        self._refused = (message,)

    def _told(self, path: str | None) -> Mapping[str, Any]:
        """What a caller of the control socket, or a changed file, asks for; the answer as JSON takes it."""
        facts: dict[str, Any] = {"pid": os.getpid(), "service": self.profile.service}
        try:
            if path is not None and Path(path).exists() and not Path(path).is_file():
                raise ProfileError([f"{path}: found no regular file; give the path of a profile"])
            done = self._reload(path)
        except (InstrumentError, ValueError) as error:
            return {**facts, "generation": self.generation, "digest": self._digest, "error": str(error)}
        return {
            **facts,
            "generation": done.generation,
            "digest": done.digest,
            "attached": _clipped(done.attached),
            "undone": _clipped(done.undone),
            "refused": list(done.refused),
        }

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
        )

    def cost(self) -> Cost:
        """What the instrumentation has cost so far: the spans of each shape of probe at its cost on this machine.

        A generator counts as one step, whatever it made. Device times add what a pair of events costs on this device.
        """
        costs = self._measured_costs()
        by_shape: Counter[str] = Counter()
        for site, calls in RECORDER.site_calls().items():
            by_shape[RECORDER.shapes.get(site, "scope")] += calls
        counted = sum(by_shape.values())
        mean_ns = sum(calls * costs[shape].added_ns for shape, calls in by_shape.items()) / counted if counted else 0.0
        if counted:
            mean_ns += self._pairs_ns() / counted
        window_ns = (self.end_ns or time.monotonic_ns()) - self.start_ns
        cold_ns = mean_ns + self._measured_cold_ns() if counted else 0.0
        return Cost(RECORDER.calls, mean_ns, window_ns, sum(self._threads_ns().values()), cold_ns)

    def _pairs_ns(self) -> float:
        return 0.0 if self._timing is None else self._timing.cost_ns()[0]

    def _threads_ns(self) -> dict[str, int]:
        """Processor time of the threads of our own, by what they do."""
        found = {"looking through spans": self._thread_ns, "reading gauges": self._gauges.thread_ns}
        if self._exporter is not None:
            found["sending to the collector"] = self._exporter.thread_ns
        if self._timing is not None:
            found["resolving device times"] = self._timing.cost_ns()[1]
        return {name: spent_ns for name, spent_ns in found.items() if spent_ns}

    def _upkeep(self) -> Upkeep:
        costs, rings = self._measured_costs(), RECORDER.rings()
        return Upkeep(
            clock="CLOCK_MONOTONIC" if self._ticks_checked_ns is None else "time stamp counter",
            added_ns=lambda site: costs[RECORDER.shapes.get(site, "scope")].added_ns,
            pairs_ns=self._pairs_ns(),
            threads_ns=self._threads_ns(),
            passed=RECORDER.muted_calls(),
            muted=set(RECORDER.muted),
            held_rows=sum(min(ring.head, ring.capacity) for ring in rings),
            ring_rows=sum(ring.capacity for ring in rings),
            ring_bytes=self.profile.limits.ring_bytes,
            notes=self.notes(with_muted=False),
        )

    def _measured_costs(self) -> dict[str, ProbeCost]:
        if self._costs is None:
            self._costs = measure_costs()
        return self._costs

    def _measured_cold_ns(self) -> float:
        """By how much a call costs more where its memory is in no cache."""
        if self._cold_ns is None:
            self._cold_ns = max(measure_cold_ns() - self._measured_costs()["method"].added_ns, 0.0)
        return self._cold_ns

    def losses(self) -> Mapping[str, int]:
        """Everything that was recorded and not kept, by reason."""
        counts: Counter[str] = Counter(self._losses)
        counts.update(RECORDER.losses())
        if self._timing is not None:
            counts.update(self._timing.losses())
        counts.update(self._gauges.losses())
        counts["spans overwritten before the steps in them were counted"] = self._reader.steps_lost
        if self._exporter is not None:
            counts.update(self._exporter.metrics.losses())
            counts.update(self._reader.losses())
            sent = self._exporter.counts()
            counts.update({f"spans {name} by the OTLP export": sent.get(name, 0) for name in _UNSENT})
            counts["spans overwritten before the export read them"] = self._reader.lost
        return {name: count for name, count in counts.items() if count}

    def notes(self, *, with_muted: bool = True) -> list[str]:
        """Everything that could not be observed, and what went wrong, in sentences.

        Without those on sites that are or were muted, where a table says it.
        """
        verdicts = self.verdicts()
        notes = [str(verdict) for verdict in verdicts if verdict.state not in ("attached", "uncalled")]
        uncalled = sum(verdict.state == "uncalled" for verdict in verdicts)
        if uncalled:
            notes.append(f"{uncalled} targets were never called" if uncalled > 1 else "1 target was never called")
        notes.extend(f"{what}: {count} times" for what, count in RECORDER.counts().items())
        notes.extend(f"fault of instrument in the {place}: {count} times" for place, count in FAULTS.counts().items())
        if self.selection.late:
            notes.append(
                "started after the import of "
                + ", ".join(self.selection.late)
                + ": what had been bound elsewhere was found and replaced; what could not be is named with its rule"
            )
        if self._timing is not None:
            notes.extend(self._timing.notes())
        if self._ranges.reason:
            notes.append(self._ranges.reason)
        if self._imports.why_not:
            notes.append(self._imports.why_not)
        if self._governor is not None and with_muted:
            notes.extend(self._governor.notes())
        notes.extend(self._gauges.notes())
        if self._exporter is not None:
            notes.extend(self._exporter.metrics.notes())
        notes.extend(f"reload: {refused}" for refused in self._refused)
        notes.extend(self._complaints)
        return notes

    def verdicts(self) -> list[Verdict]:
        """What became of every rule and target up to now, with the calls of each target."""
        calls: Counter[object] = Counter()
        for site, called in RECORDER.site_calls().items():
            calls[site.key] += called
        for site, passed in RECORDER.muted_calls().items():
            calls[site.key] += passed
        # A call that has not ended is one too: a server's main loop never does.
        calls.update(RECORDER.site_of(row).key for _, row in RECORDER.open_rows())
        return [verdict.counted(lambda site: calls[site.key]) for verdict in self.selection.verdicts()]

    def _report_to_check(self, folder: str) -> None:
        """Leave what became of the rules to `instrument check`, which has started this process or one above it."""
        facts = {
            "pid": os.getpid(),
            "calls": RECORDER.calls,
            "verdicts": [_with_nearest_module(verdict, self.profile).facts() for verdict in self.verdicts()],
        }
        path = Path(folder, f"{os.getpid()}.{time.monotonic_ns()}")
        path.write_text(json.dumps(facts), encoding="utf-8")
        path.rename(path.with_suffix(".json"))

    def tally(self) -> Tally:
        """Exact totals of all calls up to now, with what their probes cost."""
        costs, tally = self._measured_costs(), RECORDER.tally()
        tally.charge(lambda site: costs[RECORDER.shapes.get(site, "scope")].outside_ns)
        return tally

    def trace(
        self, start_ns: int | None = None, end_ns: int | None = None, window: int = 0, origin: Origin | None = None
    ) -> Trace:
        """The newest spans that the rings still hold, as they lie in the window; open ones are clipped and marked.

        `origin` is that of the window's end, where it has ended before now.
        """
        first = self.start_ns if start_ns is None else start_ns
        last = (self.end_ns or time.monotonic_ns()) if end_ns is None else end_ns
        return self.trace_of(self.take(first, last, window, origin))

    def take(self, start_ns: int, end_ns: int, window: int = 0, origin: Origin | None = None) -> Stretch:
        """What the rings hold of that time, at 0.3 us a span; `trace_of` makes a trace of it later."""
        return Stretch.of(RECORDER, start_ns, end_ns, window, origin or self.origin())

    def trace_of(self, stretch: Stretch) -> Trace:
        """The trace of what was taken, with the device times that have come by now.

        2 us a span; while the session runs, on any thread.
        """
        spans = stretch.spans()
        if self._timing is not None:
            self._timing.join(spans)
        spans.extend(self.selection.nodes_within(spans))
        return Trace(
            origin=stretch.origin,
            start_ns=stretch.start_ns,
            end_ns=stretch.end_ns,
            spans=spans,
            threads=stretch.threads,
            losses=self.losses(),
            notes=self.notes(),
            window=stretch.window,
            cost=self.cost(),
            held_from_ns=stretch.held_from_ns(spans),
            samples=self._gauges.samples(stretch.start_ns, stretch.end_ns),
            gpus=self._gauges.gpus(),
            startup=self.startup(),
        )

    def startup(self) -> Startup:
        """How the process came to serve: kept for ever, whatever the rings have overwritten since."""
        return Startup(
            session_ns=self.start_ns,
            process_ns=clock.process_start_ns(),
            imports=self._imports.packages() if self.profile.startup == "auto" else None,
            firsts=tuple(FirstCall(site, *first) for site, first in RECORDER.firsts().items()),
        )

    def recording(self) -> Recording:
        """What reports are made of, as it is now: a tally and a trace that are taken when they are first read."""
        cost = self.cost()
        return Recording(
            self.tally,
            self.trace,
            make_merged=lambda: RECORDER.tally(merged=True),
            cost=cost,
            losses=self.losses(),
            notes=self.notes(),
            window_ns=cost.window_ns,
            recorder="native" if RECORDER.native else "pure",
            make_upkeep=self._upkeep,
            collector_ids=None if self._exporter is None else self._exporter.ids.of,
            make_startup=self.startup,
        )

    def summary(self, *, views: Sequence[str] | None = None, **options: Any) -> str:
        """The views, in the order asked, of everything since the start; what is left out comes from the profile.

        `options` are those of `instrument.report.view.Options`. Views that are made from the tally are exact for all
        calls; those of spans are of the ones that the rings still hold, and say from when on these are complete.
        Those of the tally, with threads merged and some tens of `rows`, take 6 to 10 us for each call path whatever the
        uptime; there are at most 16,384 paths, and threads hardly matter.
        Raises `ValueError` for a view or a value that there is not.
        """
        return summary(self._views(views), self.recording(), self._options(options))

    def views(self, views: Sequence[str] | None = None, **options: Any) -> dict[str, View]:
        """The numbers of the same views, by name, as objects. Options and errors as for `summary`."""
        return made(self._views(views), self.recording(), self._options(options))

    def _views(self, asked: Sequence[str] | None) -> Sequence[str]:
        return (self.profile.export.summary or Summary()).views if asked is None else asked

    def _options(self, asked: Mapping[str, Any]) -> Options:
        wanted = self.profile.export.summary or Summary()
        defaults = {
            "tracer_option": self.profile.tracer_option,
            "state": self.profile.state,
            "sorted_by": wanted.sorted_by,
            "rows": wanted.rows,
            "threads": "both" if wanted.per_thread else "merged",
        }
        return Options(**{**defaults, **{name: value for name, value in asked.items() if value is not None}})

    def dump(self, path: str | os.PathLike[str]) -> Path:
        """Write what is held now as a Chrome trace; nothing is reset. Raises `TraceError`."""
        return chrome.dump(path, self.trace(), self.tally())

    # ---------------------------------------------------------------- the end

    def stop(self) -> None:
        """Undo every change, write what the profile asks for and wait for the collector, at most five seconds.

        A second call does nothing but wait for the first. Raises nothing: what could not be written is logged and
        stands in `losses`. The `onlookers` are called first: functions of those who look at the session as it runs.
        """
        while self.onlookers:
            _attempt("end of one who looks on", self.onlookers.pop())
        self._stopping.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(EXIT_LIMIT_NS / 1e9)
        control, self._control = self._control, None
        if control is not None:
            control.stop(EXIT_LIMIT_NS / 1e9)
        with self._reloading:
            pass  # a reload on another thread ends; there is none from now on
        with self._alone():
            if self._stopped:
                return
            self._stopped = True
            self._undo()
            _attempt("last look at the spans", self._pump)
            self.end_ns = time.monotonic_ns()
            asked = os.environ.get(CHECK_FOLDER)
            if asked:
                _attempt("report to check", lambda: self._report_to_check(asked))
            if RECORDER.calls or (_is_main() and not self._forked):
                _attempt("last window", self._deliver)
            elif self._exporter is not None:
                self._exporter.stop(0)
            # Until here an exit or a SIGTERM has waited for this end.
            while self._last_undos:
                _attempt("way back", self._last_undos.pop())

    def _deliver(self) -> None:
        """What a session leaves behind: its spans at the collector, its last trace file, its summary."""
        window = self._reader.stop(self.end_ns or 0)
        if self._exporter is not None:
            self._exporter.stop(EXIT_LIMIT_NS)
        if window is not None:
            _attempt("last trace file", lambda: self._write_window(*window))
        if self.profile.export.summary is not None:
            self._print_summary(self.profile.export.summary)

    def _at_exit(self) -> None:
        _attempt("exit", self.stop)

    def _write_window(self, index: int, start_ns: int, end_ns: int, origin: Origin | None = None) -> None:
        wanted = self.profile.export.chrome
        if wanted is None:
            return
        self.selection.finish_nodes()
        try:
            path = chrome.dump(
                self._path(wanted.path, index), self.trace(start_ns, end_ns, index, origin), self.tally()
            )
        except TraceError as error:
            self._complain(str(error))
            return
        self._newest_file = path
        template = files.own(wanted.path, is_first=self._is_first())
        disk_bytes = self.profile.limits.disk_bytes
        removed = files.make_room(template, self._folder, self.profile.service, path, disk_bytes)
        self._losses["trace files removed to stay within limits.disk"] += removed

    def _is_first(self) -> bool:
        return _is_main() and not self._forked

    def _path(self, template: str, window: int) -> Path:
        own = files.own(template, is_first=self._is_first())
        return files.path_of(own, self._folder, self.profile.service, window)

    def _print_summary(self, wanted: Summary) -> None:
        # Workers of one service write to one stream: which of them this is stands in each.
        text = self.summary() + f"\nProcess: {os.getpid()}\n"
        if self._newest_file is not None:
            text += f"Chrome trace: {self._newest_file}\n"
        try:
            if wanted.to in ("stderr", "stdout"):
                stream = sys.stderr if wanted.to == "stderr" else sys.stdout
                if stream is not None:
                    files.write(stream, text, EXIT_LIMIT_NS)
            else:
                path = self._path(wanted.to, 0)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:
            # A standard error that takes nothing does not take the complaint either.
            self._complain(f"the summary could not be written to {wanted.to}: {error}", log=wanted.to != "stderr")

    def _complain(self, message: str, *, log: bool = True) -> None:
        self._complaints.append(message)
        if log:
            logger.warning(message)

    def _after_fork_in_child(self, whole: bool) -> None:
        """The child records on its own: own rings, ids, threads and files. `whole`: no reload was under way."""
        self._forked = True
        self._reloading = threading.RLock()
        self._lock = threading.RLock()
        self._postponed = 0
        self.selection.after_fork_in_child()
        if not whole:
            _attempt("reload that a fork cut short", lambda: self.selection.change(self.profile, anew=True))
        if self._stopping.is_set():  # the parent's other thread was about to stop it, and is not here
            self._undo()
            self._forget(self)
            return
        self._stopping = threading.Event()
        self._thread = None
        self._thread_ns = 0
        self._newest_file = None
        self._losses.clear()
        self._ids = None
        self._complaints.clear()
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
            self._exporter.start()
        self._gauges.after_fork_in_child()
        self._start_thread()
        if self._control is not None:
            self._control.after_fork_in_child()
            self._listen(self._control)
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            # A multiprocessing child leaves by os._exit and runs only its own finalisers, which it clears first.
            util.register_after_fork(self, Session._finish_with_multiprocessing)

    def _finish_with_multiprocessing(self) -> None:
        util = sys.modules["multiprocessing.util"]
        util.Finalize(None, self._at_exit, exitpriority=-100)


_UNSENT = ("failed", "rejected", "dropped")


def _with_nearest_module(verdict: Verdict, profile: Profile) -> Verdict:
    """With the imported module that a function rule perhaps means, where it waits for one that is not."""
    texts = [text for rule in profile.functions if rule.text == verdict.rule for text in rule.match]
    if verdict.state != "waiting":
        return verdict
    for text in texts:
        meant = nearest(text.partition(":")[0], sys.modules, 0.8)
        if meant:
            return replace(verdict, why=f"{verdict.why}; nearest is {meant}")
    return verdict


def _attempt(place: str, action: Callable[[], object]) -> None:
    """One of several things to do of which none may keep the others from being done."""
    try:
        action()
    except Exception as fault:
        FAULTS.note(place, fault)


def _file_of(profile: Profile, folder: Path) -> Path | None:
    """Where a profile was read, None for one that was made otherwise."""
    path = folder / profile.source
    return path if path.is_file() else None


def _clipped(names: Sequence[str]) -> list[str]:
    more = len(names) - NAMES_TOLD
    return [*names[:NAMES_TOLD], *([f"and {more} more"] if more > 0 else [])]


def _is_main() -> bool:
    """Whether this is the process that `instrument run` started, or one that called `start` itself."""
    main = os.environ.get("INSTRUMENT_RUN_PID")
    return main is None or main == str(os.getpid())
