"""The functions of `import instrument` that start, stop and read the one session of a process.

The module's handlers end the session on a signal, and continue it in a forked child.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
from _thread import get_native_id
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from instrument import native
from instrument.errors import InstrumentError, StateError
from instrument.instrumentors.selection import Selection
from instrument.instrumentors.verdict import Verdict
from instrument.native import OFF
from instrument.profile import shared_profile
from instrument.profile.model import Profile
from instrument.recorder.recorder import RECORDER, call_at_first_span
from instrument.recording import board
from instrument.runtime import agent_socket, environment
from instrument.runtime.environment import RUN_VARIABLE, is_first_process_of_run, make_run_name
from instrument.runtime.faults import FAULTS, logger
from instrument.runtime.lazy_imports import replace
from instrument.runtime.main_module import MAINS
from instrument.runtime.termination import Termination
from instrument.runtime.threads import Thread, hook_forks, restore_fork_warning, silence_fork_warning
from instrument.runtime.unpatched import RLock, local, sleep
from instrument.sessions.leaving import EXIT_LIMIT_NS
from instrument.sessions.profile_reload import FORK_WAIT_S, Reload, load_profile
from instrument.sessions.recorded import Recorded
from instrument.sessions.session import Session

if TYPE_CHECKING:
    from instrument.otlp.delivery import Delivery

SWITCHED_OFF = f"instrument is off ({OFF})"

NO_EXPORT = (
    "the profile has no `export:` (recording, chrome, otlp, prometheus, parquet or summary), so nothing will be "
    "written or sent"
)

_session: Session | None = None
_session_lock = RLock()
_fork_hook_registered = False
_checking = False


@functools.cache
def log_switched_off() -> None:
    """Log that nothing is recorded or written: as a warning if the recorder is missing, else as information."""
    level = logging.WARNING if native.WHY_MISSING else logging.INFO
    logger.log(level, "%s: nothing is recorded, and nothing is written", SWITCHED_OFF)


def start(profile: Profile | str | os.PathLike[str] | None = None) -> Session | None:
    """Record the functions, layers and copies that a profile names, until `stop`. Return the session:
    ``instrument.start("profile.yaml")``.

    `profile` is a path or a `Profile`, by default the file that `INSTRUMENT_PROFILE` names. Without any profile,
    decorators and scopes record, and nothing is exported.

    Returns None if `INSTRUMENT` is `off`, and while `check` imports the service. Raises `ProfileError` for an invalid
    file, and `StateError` if a session runs already.
    """
    global _session, _fork_hook_registered
    if OFF:
        log_switched_off()
    if OFF or _checking:
        return None
    source = profile if profile is not None else os.environ.get("INSTRUMENT_PROFILE") or Profile()
    if isinstance(source, Profile):
        chosen = source
    else:
        of_run = None if profile is not None else agent_socket.find_shared_file(shared_profile.NAME)
        chosen = (
            shared_profile.read_shared_profile(of_run, str(source)) if of_run is not None else None
        ) or load_profile(source)
    is_read = chosen is not source
    is_reported = is_read and chosen.exports_nothing and environment.INIT_FOLDER not in os.environ
    for remark in chosen.remarks if is_read and "INSTRUMENT_RUN_PID" not in os.environ else ():
        logger.warning("%s", remark)
    if is_reported and is_first_process_of_run():
        logger.warning("%s: %s; call instrument.summary() or instrument.dump() in code", chosen.source, NO_EXPORT)
    with _session_lock:
        if _session is not None:
            raise StateError(
                f"cannot start a session with {chosen.source}: a session with {_session.profile.source} runs; call "
                "instrument.stop() first"
            )
        leave = _begin_run(chosen)
        session = Session(chosen, _forget_session)
        session.leaving.undos.append(leave)
        _session = session
        try:
            session.start()
        except BaseException:
            _session = None
            leave()
            raise
        if not _fork_hook_registered:
            hook_forks(_before_fork, _after_fork_in_parent, _after_fork_in_child)
            _fork_hook_registered = True
    return session


def _begin_run(profile: Profile) -> Callable[[], object]:
    """Begin a run of this process and its children, if the profile's exports need an agent. Return a function that ends
    the run, so that later children do not join it."""
    export = profile.export
    is_asked = bool(export.otlp or export.prometheus or export.parquet or profile.capture.to)
    is_free = not {agent_socket.VARIABLE, RUN_VARIABLE} & os.environ.keys()
    if profile.agent == "off" or not (is_asked and is_free and "python" in Path(sys.executable).name):
        return bool
    try:
        path = agent_socket.create_run_and_socket_path(run := make_run_name())
    except OSError:
        return bool  # the session exports by itself
    os.environ.update({agent_socket.VARIABLE: str(path), RUN_VARIABLE: run})
    pid = os.getpid()

    def end_run() -> None:
        for name in (agent_socket.VARIABLE, RUN_VARIABLE):
            os.environ.pop(name, None)
        if os.getpid() == pid and not agent_socket.has_listener(path):
            agent_socket.remove_run_folder(path.parent)

    return end_run


def stop() -> None:
    """End the running session, if there is one. Undo every change to the service, write the profile's files, and print
    its summary."""
    session = _session
    if session is not None:
        session.stop()


def is_session_running() -> bool:
    return _session is not None


def running_session() -> Session | None:
    return _session


def session() -> Session:
    """Return the running session. Raises `StateError` if none runs."""
    if _session is None:
        raise StateError("no session runs; call instrument.start(profile), or use `instrument run`")
    return _session


def summary(**options: Any) -> str:
    """Return the text report on everything since the start of the session.

    With `INSTRUMENT=off`, the text is one sentence. The defaults of the options come from the profile. Options:

    - `views`: the reports, in this order: brief (one screen), overview, events, phases, operators, kernels, device,
      copies, memory, distribution, user, requests, batches, classes, ops, instances, startup, neighbours, benchmark,
      cost
    - `torch_trace`: a trace file of `torch.profiler` from the same time, for kernels, allocations and FLOPs
    - `tracer_option`: Default, OpDetail or AllOpDetail; `state`: CPU, GPU or All
    - `sorted_by`: default, calls, total, max, min or ave; the last four also with the prefix cpu_ or gpu_
    - `rows`: the maximum number of rows of each table; if it is None, `most` applies, and None there means all
    - `least_ns`: the minimum time of a row in ns
    - `threads`: merged, apart or both; `unit`: s, ms, us or ns, for times
    - `corrected`: subtracts the cost of the probes below a span from self times; `skip_first`: the number of first
      iterations to leave out of means
    - `requests_by`: endpoint, or an attribute by which views group requests; `at_most`: the maximum number of groups,
      with one more for all others

    Raises `StateError` if no session runs, `ValueError` for an unknown view or value, `TypeError` for an unknown
    option, and `TraceError` for a file of another process or time.
    """
    if OFF:
        return f"{SWITCHED_OFF}\n"
    return session().summary(**options)


def dump(path: str | os.PathLike[str]) -> Path:
    """Write the current spans and totals of the running session to a file. The session continues.

    The file is a recording if the path ends in `.npz`. It is a Chrome trace, which Perfetto shows, if the path ends in
    `.json` or `.json.gz`. Reports load a recording ten times as fast.

    Raises `StateError` if no session runs, and `TraceError` if writing fails.
    """
    if OFF:
        log_switched_off()
        return Path(path)
    return session().dump(path)


def reload(profile: Profile | str | os.PathLike[str] | None = None) -> Reload:
    """Change the running session to another profile, or read its own file again. See `Session.reload`."""
    if OFF:
        log_switched_off()
        return Reload(0, "", refused=(SWITCHED_OFF,))
    return session().reload(profile)


def flush(timeout_s: float = 5.0) -> Delivery | None:
    """Send all finished spans to the collector. Wait up to `timeout_s` seconds for its answers. See `Session.flush`."""
    if OFF:
        log_switched_off()
        return None
    return session().flush(timeout_s)


def prometheus(*, openmetrics: bool = False) -> str:
    """Return the metrics of the run in Prometheus's text format (0.0.4), with which a service can answer scrapes.

    With `openmetrics` the format is OpenMetrics (1.0.0), for scrapes that accept it. The buckets of request histograms
    then have exemplars with `trace_id` and `span_id`, if OTLP exports the traces.

    The metrics are those that a collector gets by OTLP: requests by endpoint and status, calls of the rules with
    `metrics`, gauges, losses and cost. Queue times and batch sizes of requests with keys appear some seconds after the
    requests end.

    The run's agent adds up all processes, so any process can answer. Without an agent (`agent: off`) the metrics are of
    this process alone.

    Processes that ended before the first scrape count only if the profile has `export: {prometheus: }`. The agent then
    also answers scrapes itself.

    A call takes some milliseconds, the first call of a run up to a second. Raises `StateError` if no session runs, and
    `ExportError` if `prometheus_client` is not installed.
    """
    if OFF:
        return "# EOF\n" if openmetrics else f"# {SWITCHED_OFF}\n"
    return session().prometheus(openmetrics=openmetrics)


def enable() -> None:
    """Record again after `disable`."""
    if OFF:
        return
    session()
    RECORDER.switch_recording(on=True)


def disable() -> None:
    """Stop recording until `enable`. The probes stay attached, and each call costs one branch."""
    RECORDER.switch_recording(on=False)


def check(profile: Profile, modules: Sequence[str] = ()) -> tuple[list[Verdict], list[str]]:
    """Check a profile without recording. Import the given modules, the modules of the profile's rules, and the
    frameworks that the rules need. Attach the rules. Return the verdict on each rule, and a sentence per module that
    failed to import. Every change is undone. Raises `StateError` while a session runs."""
    global _checking
    with _session_lock:
        if _session is not None:
            raise StateError("cannot check while a session runs; call instrument.stop() first")
        _checking = True
        selection = Selection(profile)
        undo = selection.attach(main=False)  # that is `instrument check` itself
        module_names = {text.partition(":")[0] for rule in profile.functions for text in rule.match} - set(MAINS)
        failed: dict[str, str] = {}
        try:
            for name in [*modules, *sorted(name for name in module_names if "*" not in name and name not in modules)]:
                try:
                    __import__(name)
                except (Exception, SystemExit) as error:
                    failed[name] = f"{type(error).__name__}: {error}{_suggest_module(name, error)}"
            uses_torch = "auto" in (profile.loaders, profile.phases, profile.comm)
            frameworks = {"torch"} if profile.layers or profile.copies or uses_torch else set()
            frameworks.update(rule.name for rule in profile.frameworks if not rule.auto)
            for name in sorted(frameworks):
                try:
                    __import__(name)
                except ImportError:
                    pass  # the verdicts say that it is not there
            verdicts = selection.verdicts()
        finally:
            undo()
            _checking = False
    patterns = {rule.text: rule.match for rule in profile.functions}
    verdicts = [_add_import_failure(verdict, patterns.get(verdict.rule, ()), failed) for verdict in verdicts]
    problems = [f"{profile.source}: module {name} fails to import: {reason}" for name, reason in failed.items()]
    return verdicts, problems


def _add_import_failure(verdict: Verdict, patterns: Sequence[str], failed: Mapping[str, str]) -> Verdict:
    failing = [name for name in dict.fromkeys(text.partition(":")[0] for text in patterns) if name in failed]
    if verdict.state != "waiting" or not failing:
        return verdict
    return replace(verdict, why="; ".join(f"{name} fails to import: {failed[name]}" for name in failing))


def _suggest_module(name: str, error: BaseException) -> str:
    missing = getattr(error, "name", None) or ""
    if not isinstance(error, ModuleNotFoundError) or not f"{name}.".startswith(f"{missing}."):
        return ""
    import pkgutil

    from instrument.profile.document import find_most_similar

    parent, _, last = missing.rpartition(".")
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and path is None:
        return f"; {parent} is a module, not a package"
    names = [module.name for module in pkgutil.iter_modules(path)] + list(() if parent else sys.builtin_module_names)
    nearest_name = find_most_similar(last, names)
    return f"; nearest is {parent}.{nearest_name}".replace(" .", " ") if nearest_name else ""


def stop_on_sigterm() -> None:
    """Make SIGTERM stop the session before it ends the process. The stop takes at most twice `EXIT_LIMIT_NS`. A handler
    that the service sets has precedence."""
    session().leaving.undos.append(Termination(_stop_for_signal).install())


def _stop_for_signal(number: int, frame: FrameType | None) -> bool:
    """Stop the session because of a signal. Return False if the signal will be sent again later."""
    running = _session
    if running is not None and running.exporting.lock.postpone_signal(number):
        return False
    # On a thread of its own: the interrupted main thread may hold any lock. Where it may be one of ours, go on and
    # come again.
    inside = _is_in_own_code(frame)
    if inside and _resending.get(number) == os.getpid():
        return False
    _resending[number] = os.getpid() if inside else 0
    ending = Thread(functools.partial(_resend_signal, number) if inside else stop, "instrument-exit")
    try:
        ending.start()
        if inside:
            return False
        ending.join(EXIT_LIMIT_NS / 1e9 * 2)
    except RuntimeError:
        pass  # the interpreter is ending, where no thread can begin
    return True


_resending: dict[int, int] = {}
"""The id of the process that resends a signal to itself, by signal. 0 means no process."""


def _is_in_own_code(frame: FrameType | None) -> bool:
    """Return True if a frame, or one of its callers, runs code that may have a lock of the session."""
    rooms = {__name__, *(part.__module__ for part in (Session, Recorded, Selection))}
    while frame is not None:
        if frame.f_globals.get("__name__") in rooms:
            return True
        frame = frame.f_back
    return False


def _resend_signal(number: int) -> None:
    while _resending.get(number):
        sleep(0.02)
        is_ours = signal.getsignal(number) == signal.SIG_DFL  # as the service sees it
        if _resending.get(number):
            os.kill(os.getpid(), number)
        if not is_ours:
            _resending[number] = 0


def _forget_session(session: Session) -> None:
    global _session
    with _session_lock:
        if _session is session:
            _session = None


_forking = local()


def _before_fork() -> None:
    """Wait for a reload on another thread. Make the run's board if the run has none. In this shared memory, processes
    mark the rules that they use."""
    session = _session
    if session is not None and not os.environ.get(board.VARIABLE):
        session.leaving.undos.append(board.make_board())
    _forking.is_main_thread = get_native_id() == os.getpid()
    is_acquired = session is not None and session.generations.lock.acquire(timeout=FORK_WAIT_S)
    _forking.session = session if is_acquired else None
    silence_fork_warning()


def _after_fork_in_parent() -> None:
    session, _forking.session = getattr(_forking, "session", None), None
    if session is not None:
        session.generations.lock.release()


def _after_fork_in_child() -> None:
    global _session_lock
    restore_fork_warning()
    _session_lock = RLock()
    locked_session, _forking.session = getattr(_forking, "session", None), None
    FAULTS.clear()
    call_at_first_span(None)  # the parent's
    RECORDER.after_fork_in_child()
    if _session is not None:
        try:
            is_by_main = getattr(_forking, "is_main_thread", True)
            _session.after_fork_in_child(whole=locked_session is _session, by_main_thread=is_by_main)
        except InstrumentError as error:
            logger.warning("a forked child is not instrumented: %s", error)
        except Exception as fault:
            FAULTS.note("fork", fault)
