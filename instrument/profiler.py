"""The session: one profile at work in one process, from `start` to `stop`, across forks, signals and exit.

Only one session runs at a time. Everything that it changes in the process (import hook, patches, threads, exit
handler) is undone by `stop`.
"""

from __future__ import annotations

import atexit
import glob
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from instrument import chrome, clock, otlp
from instrument.capture import Trees
from instrument.errors import FAULTS, InstrumentError, ProfileError, StateError, TraceError, logger
from instrument.governor import Governor
from instrument.probes import contexts
from instrument.probes.scopes import OFF
from instrument.probes.selection import Selection
from instrument.probes.verdict import Verdict
from instrument.profile import Profile, Summary, load
from instrument.recorder import RECORDER, measure_costs_ns
from instrument.report.events import events
from instrument.spans import Cost, Origin, Span, Trace
from instrument.tally import Tally
from instrument.window import Windows

GOVERNOR_NS = 10**9
"""How often the cost of the probes is held against `budget`."""

TICKS_CHECK_NS = 10**9
TICKS_LIMIT_NS = 50_000
"""How far the time stamp counter may stray from the monotonic clock in a second before it is given up."""

PUMP_S = 0.2
"""How often finished spans are looked through; a thread's ring must hold what it records in that time."""

EXIT_LIMIT_NS = 5 * 10**9
"""The longest that `stop`, interpreter exit and SIGTERM wait for a collector, or for somebody to read the summary."""

CLOCK_RENEWAL_NS = 60 * 10**9
CLOCK_DRIFT_NS = 10**6
"""How often the wall clock is compared with the one that spans are sent by, and from what difference on it replaces it.
Not at once: spans of one tree that are sent by two readings of the clock nest a little less well."""

COMPLAINTS_KEPT = 20


class Session:
    """A running session. Made by `start`; `stop` ends it. All methods may be called from any thread."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.selection = Selection(profile)
        self._lock = threading.RLock()
        self._postponed = 0
        self._undos: list[Callable[[], None]] = []
        self._last_undos: list[Callable[[], object]] = []
        self._stopping = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._exporter: otlp.Exporter | None = None
        self._folder = _working_folder()
        self._newest_file: Path | None = None
        self._losses: Counter[str] = Counter()
        self._complaints: deque[str] = deque(maxlen=COMPLAINTS_KEPT)
        self._costs_ns: dict[str, float] | None = None
        self._ticks_checked_ns: int | None = None
        self._governor: Governor | None = None
        self._governed_ns = 0
        self._forked = False
        self._begin()

    def _begin(self) -> None:
        self.start_ns = time.monotonic_ns()
        self.end_ns: int | None = None
        self._cursor = RECORDER.cursor()
        self._clock_renewed_ns = self.start_ns
        self._windows = Windows(self.profile.schedule, self.start_ns)
        self._trees = Trees(RECORDER, self.profile.capture, self.profile.limits.spans_per_request, self._keep)

    def _start(self) -> None:
        RECORDER.reset(self.profile.limits.ring_bytes)
        self._begin()
        try:
            if self.profile.export.otlp is not None:
                self._exporter = otlp.Exporter(self.profile.export.otlp, self.origin(), RECORDER.threads)
                self._exporter.start()
                RECORDER.remote_parent = otlp.current_parent
            self._undos.append(contexts.watch())
            self._undos.append(self.selection.attach())
            self._choose_clock()
            if self.profile.budget is not None:
                costs = self._measured_costs()
                self._governor = Governor(RECORDER, self.profile.budget, costs, time.monotonic_ns())
                self._undos.append(self._governor.release)
            RECORDER.on = True
            self._start_thread()
        except BaseException:
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

    def _start_thread(self) -> None:
        if self._has_reader():
            self._thread = threading.Thread(target=self._pump_until_stopped, name="instrument", daemon=True)
            self._thread.start()

    def _has_reader(self) -> bool:
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

    def _pump(self, timeout_s: float = -1) -> None:
        """Look through the spans that have finished since the last time."""
        with self._alone(timeout_s) as held:
            if not held or not self._has_reader():
                return
            self._renew_clock()
            self._check_clock()
            self._govern()
            for _, end_ns in self._trees.take(self._cursor.read()):
                window = self._windows.step(end_ns)
                if window is not None:
                    self._write_window(*window)

    def _renew_clock(self) -> None:
        now = time.monotonic_ns()
        if self._exporter is None or now - self._clock_renewed_ns < CLOCK_RENEWAL_NS:
            return
        self._clock_renewed_ns = now
        fresh = self.origin()
        if abs(fresh.realtime_of(now) - self._exporter.origin.realtime_of(now)) > CLOCK_DRIFT_NS:
            self._exporter.origin = fresh

    def _keep(self, spans: list[Span]) -> None:
        if self._exporter is not None:
            self._exporter.offer(spans)

    def flush(self, timeout_s: float = 5.0) -> otlp.Delivery | None:
        """Hand over all that has finished and wait, at most so long, until the collector has it.

        Returns what was delivered and what was not; None where the profile exports to no collector.
        """
        end = time.monotonic() + timeout_s
        self._pump(min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
        if self._exporter is None:
            return None
        return self._exporter.flush(round(max(min(end - time.monotonic(), threading.TIMEOUT_MAX), 0.0) * 1e9))

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
        )

    def cost(self) -> Cost:
        """What the instrumentation has cost so far: the spans of each shape of probe at its cost on this machine.

        A generator counts as one step, whatever it made.
        """
        costs = self._measured_costs()
        by_shape: Counter[str] = Counter()
        for _, site, calls, _ in RECORDER.usage():
            by_shape[RECORDER.shapes.get(site, "scope")] += calls
        counted = sum(by_shape.values())
        mean_ns = sum(calls * costs[shape] for shape, calls in by_shape.items()) / counted if counted else 0.0
        return Cost(RECORDER.calls, mean_ns, (self.end_ns or time.monotonic_ns()) - self.start_ns)

    def _measured_costs(self) -> dict[str, float]:
        if self._costs_ns is None:
            self._costs_ns = measure_costs_ns()
        return self._costs_ns

    def losses(self) -> Mapping[str, int]:
        """Everything that was recorded and not kept, by reason."""
        counts: Counter[str] = Counter(self._losses)
        counts.update(RECORDER.losses())
        if self._exporter is not None:
            kept = self._trees.counts()
            counts.update({name: count for name, count in kept.items() if name not in ("requests", "requests kept")})
            sent = self._exporter.counts()
            counts.update({f"spans {name} by the OTLP export": sent.get(name, 0) for name in _UNSENT})
            counts["spans overwritten before the export read them"] = self._cursor.lost
        return {name: count for name, count in counts.items() if count}

    def notes(self) -> list[str]:
        """Everything that could not be observed, and what went wrong, in sentences."""
        notes = [str(verdict) for verdict in self.selection.verdicts() if verdict.state != "attached"]
        notes.extend(f"{what}: {count} times" for what, count in RECORDER.counts().items())
        notes.extend(f"fault of instrument in the {place}: {count} times" for place, count in FAULTS.counts().items())
        if self.selection.late:
            notes.append(
                "started after the import of "
                + ", ".join(self.selection.late)
                + ": module-level names were replaced; copies kept in lists, closures or instances are not seen"
            )
        if self._governor is not None:
            notes.extend(self._governor.notes())
        notes.extend(self._complaints)
        return notes

    def tally(self) -> Tally:
        """Exact totals of all calls up to now."""
        return RECORDER.tally()

    def trace(self, start_ns: int | None = None, end_ns: int | None = None, window: int = 0) -> Trace:
        """The newest spans that the rings still hold, as they lie in the window; open ones are clipped and marked."""
        first = self.start_ns if start_ns is None else start_ns
        last = (self.end_ns or time.monotonic_ns()) if end_ns is None else end_ns
        spans = RECORDER.spans(first, last)
        spans.extend(self.selection.nodes_within(spans))
        return Trace(
            origin=self.origin(),
            start_ns=first,
            end_ns=last,
            spans=spans,
            threads=RECORDER.threads(),
            losses=self.losses(),
            notes=self.notes(),
            window=window,
            cost=self.cost(),
        )

    def summary(
        self,
        *,
        tracer_option: str | None = None,
        state: str | None = None,
        sorted_by: str | None = None,
        rows: int | None = None,
        threads: str | None = None,
    ) -> str:
        """The `events` report of everything since the start; what is left out comes from the profile."""
        wanted = self.profile.export.summary or Summary()
        cost = self.cost()
        return events(
            self.tally(),
            tracer_option=tracer_option or self.profile.tracer_option,
            state=state or self.profile.state,
            sorted_by=sorted_by or wanted.sorted_by,
            rows=rows if rows is not None else wanted.rows,
            threads=threads or ("both" if wanted.per_thread else "merged"),
            cost=cost,
            losses=self.losses(),
            notes=self.notes(),
            window_ns=cost.window_ns,
            recorder="native" if RECORDER.native else "pure",
        )

    def dump(self, path: str | os.PathLike[str]) -> Path:
        """Write what is held now as a Chrome trace; nothing is reset. Raises `TraceError`."""
        return chrome.dump(path, self.trace(), self.tally())

    # ---------------------------------------------------------------- the end

    def stop(self) -> None:
        """Undo every change, write what the profile asks for and wait for the collector, at most five seconds.

        A second call does nothing but wait for the first. Raises nothing: what could not be written is logged and
        stands in `losses`.
        """
        self._stopping.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(EXIT_LIMIT_NS / 1e9)
        with self._alone():
            if self._stopped:
                return
            self._stopped = True
            self._undo()
            _attempt("last look at the spans", self._pump)
            self.end_ns = time.monotonic_ns()
            if RECORDER.calls or (_is_main() and not self._forked):
                _attempt("last window", self._deliver)
            elif self._exporter is not None:
                self._exporter.stop(0)
            # Until here an exit or a SIGTERM has waited for this end.
            while self._last_undos:
                _attempt("way back", self._last_undos.pop())
            _forget(self)

    def _deliver(self) -> None:
        """What a session leaves behind: its spans at the collector, its last trace file, its summary."""
        window = self._windows.stop(self.end_ns or 0)
        if self._exporter is not None:
            self._exporter.stop(EXIT_LIMIT_NS)
        if window is not None:
            _attempt("last trace file", lambda: self._write_window(*window))
        if self.profile.export.summary is not None:
            self._print_summary(self.profile.export.summary)

    def _at_exit(self) -> None:
        _attempt("exit", self.stop)

    def _write_window(self, index: int, start_ns: int, end_ns: int) -> None:
        wanted = self.profile.export.chrome
        if wanted is None:
            return
        self.selection.finish_nodes()
        try:
            path = chrome.dump(self._path(wanted.path, index), self.trace(start_ns, end_ns, index), self.tally())
        except TraceError as error:
            self._complain(str(error))
            return
        self._newest_file = path
        self._make_room(wanted.path, path)

    def _make_room(self, template: str, newest: Path) -> None:
        """Remove the oldest trace files of this profile, of whichever process, until all keep within `limits.disk`."""
        parts = [
            chrome.file_name(part, service=self.profile.service, pid=0, window=0) for part in _NUMBERED.split(template)
        ]
        parts[0] = os.path.join(self._folder, parts[0])  # noqa: PTH118 - keeps the slash where nothing follows it
        numbered = re.compile(r"\d+".join(map(re.escape, parts)))
        newest = self._folder / newest
        files = []
        for name in glob.glob("*".join(map(glob.escape, parts))):  # noqa: PTH207 - absolute
            try:
                facts = os.stat(name)  # noqa: PTH116
            except OSError:
                continue  # another process has just removed it
            if numbered.fullmatch(name) and Path(name) != newest:
                files.append((facts.st_mtime_ns, name, facts.st_size))
        room = self.profile.limits.disk_bytes - newest.stat().st_size - sum(size for _, _, size in files)
        for _, name, size in sorted(files):
            if room >= 0:
                break
            Path(name).unlink(missing_ok=True)
            room += size
            self._losses["trace files removed to stay within limits.disk"] += 1

    def _path(self, template: str, window: int) -> Path:
        """The file that a template of the profile means, below the folder in which the session began."""
        name = chrome.file_name(template, service=self.profile.service, pid=os.getpid(), window=window)
        return Path(name) if self._folder == _working_folder() else self._folder / name

    def _print_summary(self, wanted: Summary) -> None:
        text = self.summary()
        if self._newest_file is not None:
            text += f"\nChrome trace: {self._newest_file}\n"
        try:
            if wanted.to in ("stderr", "stdout"):
                stream = sys.stderr if wanted.to == "stderr" else sys.stdout
                if stream is not None:
                    _write(stream, text)
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

    def _after_fork_in_child(self) -> None:
        """The child records on its own: own rings, ids, threads and files."""
        self._forked = True
        self._lock = threading.RLock()
        self._postponed = 0
        self.selection.after_fork_in_child()
        if self._stopping.is_set():  # the parent's other thread was about to stop it, and is not here
            self._undo()
            _forget(self)
            return
        self._stopping = threading.Event()
        self._thread = None
        self._newest_file = None
        self._losses.clear()
        self._complaints.clear()
        self._begin()
        if self._exporter is not None:
            self._exporter.after_fork_in_child()
            self._exporter.origin = self.origin()
            self._exporter.start()
        self._start_thread()
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            # A multiprocessing child leaves by os._exit and runs only its own finalisers, which it clears first.
            util.register_after_fork(self, Session._finish_with_multiprocessing)

    def _finish_with_multiprocessing(self) -> None:
        util = sys.modules["multiprocessing.util"]
        util.Finalize(None, self._at_exit, exitpriority=-100)


_UNSENT = ("failed", "rejected", "dropped")
_NUMBERED = re.compile(r"\{(?:pid|window)\}")


_session: Session | None = None
_session_lock = threading.RLock()
_fork_hook_registered = False
_checking = False


def start(profile: Profile | str | os.PathLike[str] | None = None) -> Session | None:
    """Begin a session: attach what the profile names and record from now on.

    `profile` is a path, a `Profile`, or None for the file that `INSTRUMENT_PROFILE` names, else for no rules at all
    (decorators and scopes record, nothing is exported). Returns None, having done nothing, when `INSTRUMENT=off` and
    while `check` imports the service.
    Raises `ProfileError` for a bad file and `StateError` when a session runs already.
    """
    global _session, _fork_hook_registered
    if OFF or _checking:
        return None
    if profile is None:
        profile = os.environ.get("INSTRUMENT_PROFILE") or Profile()
    wanted = profile if isinstance(profile, Profile) else load(profile)
    with _session_lock:
        if _session is not None:
            raise StateError(
                f"asked to start a session with {wanted.source}, but one with {_session.profile.source} runs already; "
                "call instrument.stop() first"
            )
        session = Session(wanted)
        _session = session
        try:
            session._start()
        except BaseException:
            _session = None
            raise
        if not _fork_hook_registered:
            os.register_at_fork(after_in_child=_after_fork_in_child)
            _fork_hook_registered = True
    return session


def stop() -> None:
    """End the session: undo every change, write and print what the profile asks for. Nothing running is nothing."""
    session = _session
    if session is not None:
        session.stop()


def session() -> Session:
    """The session that runs. Raises `StateError` where none does."""
    if _session is None:
        raise StateError("no session runs; call instrument.start(profile) or use `instrument run`")
    return _session


def summary(**options: Any) -> str:
    """The text report of the running session, or a sentence saying that none runs. Options of `Session.summary`."""
    if OFF:
        return "instrument is off (INSTRUMENT=off)\n"
    return session().summary(**options)


def dump(path: str | os.PathLike[str]) -> Path:
    """Write what the running session holds now as a Chrome trace (`.json` or `.json.gz`); nothing is reset."""
    return session().dump(path)


def flush(timeout_s: float = 5.0) -> otlp.Delivery | None:
    """Deliver what has finished to the collector, waiting at most `timeout_s`. See `Session.flush`."""
    return session().flush(timeout_s)


def enable() -> None:
    """Record again after `disable`."""
    session()
    RECORDER.on = True


def disable() -> None:
    """Stop recording without undoing anything: each probe costs one branch from now on."""
    RECORDER.on = False


def check(profile: Profile, modules: Sequence[str] = ()) -> list[Verdict]:
    """Import the modules, those that the rules name in full, and their frameworks, and tell what each rule reaches.

    Nothing is recorded and every change is undone. Raises `ProfileError` naming every module that fails to import.
    """
    global _checking
    with _session_lock:
        if _session is not None:
            raise StateError("check was asked while a session runs; call instrument.stop() first")
        _checking = True
        selection = Selection(profile)
        undo = selection.attach()
        named = {text.partition(":")[0] for rule in profile.functions for text in rule.match}
        problems = []
        try:
            for name in [*modules, *sorted(name for name in named if "*" not in name and name not in modules)]:
                try:
                    __import__(name)
                except (Exception, SystemExit) as error:
                    problems.append(f"{profile.source}: module {name} fails to import: {type(error).__name__}: {error}")
            frameworks = {"torch"} if profile.layers or profile.copies else set()
            frameworks.update(rule.name for rule in profile.frameworks if not rule.auto)
            for name in () if problems else sorted(frameworks):
                try:
                    __import__(name)
                except ImportError:
                    pass  # the verdicts say that it is not there
            verdicts = selection.verdicts()
        finally:
            undo()
            _checking = False
    if problems:
        raise ProfileError(problems)
    return verdicts


def stop_on_sigterm() -> None:
    """Where SIGTERM would end the process at once, stop the session first; the process then ends by the same signal.

    Only a default disposition is replaced, from the main thread; a handler that the service sets later replaces ours.
    The session's end takes it back. Bounded by twice `EXIT_LIMIT_NS`.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return

    def handle(number: int, frame: FrameType | None) -> None:
        running = _session
        if running is not None and running._postpone(number):
            return
        # On a thread of its own: the interrupted main thread may hold any lock. Where it may be one of ours, go on and
        # come again.
        inside = _is_inside(frame)
        ending = threading.Thread(target=_send_again if inside else stop, args=(number,) if inside else ())
        ending.name, ending.daemon = "instrument-exit", True
        try:
            ending.start()
            if inside:
                return
            ending.join(EXIT_LIMIT_NS / 1e9 * 2)
        except RuntimeError:
            pass  # the interpreter is ending, where no thread can begin
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def release() -> None:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, handle)
    session()._last_undos.append(release)


def _is_inside(frame: FrameType | None) -> bool:
    """Whether the session or its selection is at work in a frame or above it. Neither runs code of the service."""
    while frame is not None:
        if frame.f_globals.get("__name__") in (__name__, Selection.__module__):
            return True
        frame = frame.f_back
    return False


def _send_again(number: int) -> None:
    time.sleep(0.02)
    os.kill(os.getpid(), number)


def _forget(session: Session) -> None:
    global _session
    with _session_lock:
        if _session is session:
            _session = None


def _after_fork_in_child() -> None:
    global _session_lock
    _session_lock = threading.RLock()
    FAULTS.clear()
    RECORDER.after_fork_in_child()
    if _session is not None:
        try:
            _session._after_fork_in_child()
        except InstrumentError as error:
            logger.warning("a forked child is not instrumented: %s", error)
        except Exception as fault:
            FAULTS.note("fork", fault)


def _attempt(place: str, action: Callable[[], object]) -> None:
    """One of several things to do of which none may keep the others from being done."""
    try:
        action()
    except Exception as fault:
        FAULTS.note(place, fault)


def _write(stream: TextIO, text: str) -> None:
    """Write to a standard stream, but do not wait for ever for a reader who has stopped reading (a full pipe)."""
    if stream not in (sys.__stdout__, sys.__stderr__):
        stream.write(text)  # the host's own
        stream.flush()
        return
    stream.flush()
    writable = select.poll()
    writable.register(stream.fileno(), select.POLLOUT)
    end_ns = time.monotonic_ns() + EXIT_LIMIT_NS
    data = text.encode(stream.encoding, "backslashreplace")
    while data:
        if not writable.poll(max(end_ns - time.monotonic_ns(), 0) / 1e6):
            raise TimeoutError("nobody reads it")
        try:
            data = data[os.write(stream.fileno(), data[: select.PIPE_BUF]) :]
        except BlockingIOError:
            pass  # shared with somebody who was faster


def _working_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it has been removed
        return Path("/")


def _is_main() -> bool:
    """Whether this is the process that `instrument run` started, or one that called `start` itself."""
    main = os.environ.get("INSTRUMENT_RUN_PID")
    return main is None or main == str(os.getpid())
