"""The start of a session in each Python process of `instrument run`, which puts this folder on PYTHONPATH.

A process at first loads only this module and an import hook. The session begins just before an import of a package that
the profile may instrument, or at the first use of a name of `instrument`. The first process of the run begins its
session at once.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # `typing` is not loaded for a process that only starts
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

VARIABLE = "INSTRUMENT_AWAITED"
"""The environment variable that lists the packages whose import begins a session. Its first word is the profile file's
modification time and size."""

FIRST = "first"
"""The file in the run's folder that only the first Python process of the run can create."""


def begin_or_await() -> None:
    """Begin the session of this process, or wait for the import of a package that the profile instruments. Raises
    nothing."""
    global _waiting
    if _is_helper():
        return
    packages = _read_awaited_packages()
    if _is_first_python_process() or packages is None or any(map(is_package_loaded, packages)):
        _start_session()
    else:
        _waiting = Wait(packages)
        sys.meta_path.insert(0, _waiting)


def is_package_loaded(package: str) -> bool:
    """Return True if a package is loaded. A namespace package counts as loaded if one of its modules is loaded."""
    if package not in sys.modules:
        return False
    module = sys.modules[package]
    is_namespace = hasattr(module, "__path__") and getattr(module, "__file__", None) is None
    return not is_namespace or any(name.startswith(f"{package}.") for name in sys.modules)


def begin_session_now() -> None:
    if _waiting is None:
        _start_session()
    else:
        _waiting.begin_session()


def format_awaited_packages(profile: str, packages: Collection[str]) -> str:
    return " ".join([_describe_file_state(profile), *sorted(packages)])


def _describe_file_state(profile: str) -> str:
    try:
        facts = os.stat(profile)  # noqa: PTH116 - pathlib is not loaded this early
    except OSError:
        return "-"
    return f"{facts.st_mtime_ns}:{facts.st_size}"


def _read_awaited_packages() -> frozenset[str] | None:
    """Return the packages whose import begins the session. Return None if the profile file has changed."""
    state, *packages = os.environ.get(VARIABLE, "").split() or [""]
    return frozenset(packages) if state == _describe_file_state(os.environ["INSTRUMENT_PROFILE"]) else None


def _is_first_python_process() -> bool:
    """Return True in the first Python process of the run, even if a shell started it."""
    is_first = os.environ.get("INSTRUMENT_RUN_PID") == str(os.getpid())
    folder = os.path.dirname(os.environ.get("INSTRUMENT_AGENT", ""))  # noqa: PTH120 - as above
    if os.path.basename(folder) != os.environ.get("INSTRUMENT_RUN", ""):  # noqa: PTH119 - as above
        return is_first  # its agent was begun by hand, and the folder is none of ours
    try:
        os.close(os.open(os.path.join(folder, FIRST), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # noqa: PTH118
    except OSError:
        return is_first
    return True


def _is_helper() -> bool:
    """Return True in a process without code of the service: a resource tracker of multiprocessing, or our own
    command."""
    words = iter(sys.orig_argv[1:])
    if any(" import main" in word and "_tracker" in word for word in sys.orig_argv[1:]):
        return True
    for word in words:
        if word in ("-X", "-W"):
            next(words, None)
        elif word == "-m":
            return next(words, "") == "instrument"
        elif word == "-c" or not word.startswith("-"):
            return os.path.basename(word) == "instrument" and _is_own_command(word)  # noqa: PTH119 - as above
    return False


def _is_own_command(script: str) -> bool:
    try:
        with open(script, "rb") as file:  # noqa: PTH123 - as above
            return b"from instrument.cli import main" in file.read(1000)
    except OSError:
        return False


def _start_session() -> None:
    """Start a session with the profile of `INSTRUMENT_PROFILE`, and end it on SIGTERM. Raises nothing. The garbage
    collector is off meanwhile, because it would double the time and free nothing."""
    import gc

    is_collecting = gc.isenabled()
    gc.disable()
    try:
        from instrument.runtime import shadowing

        shadowing.guard_imports([shadowing.folder_of_main()])
        from instrument.sessions import process

        if process.start() is not None:
            process.stop_on_sigterm()
        shadowing.restore_service_modules()
    except Exception as error:
        why = str(error) or type(error).__name__
        sys.stderr.write(f"instrument: this process is not instrumented: {why}\n")
    finally:
        if is_collecting:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


class Wait:
    """An import hook that begins the session. It waits for the import of one of `packages`, or of a module of
    `instrument`."""

    def __init__(self, packages: Collection[str]) -> None:
        self._packages = {*packages, "instrument"}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = fullname.partition(".")[0]
        # Triton names the module of a model by a number.
        is_awaited = package in self._packages or fullname in self._packages or package.isdigit()
        if not is_awaited or not self.begin_session():
            return None
        loaded = sys.modules.get(fullname)
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None:
                if loaded is not None:
                    from instrument.runtime.shadowing import Loaded

                    spec.loader = Loaded(loaded)
                    loaded.__spec__ = spec  # the import system goes by that of a module that is there by now
                return spec  # type: ignore[no-any-return]
        return None

    def begin_session(self) -> bool:
        try:
            sys.meta_path.remove(self)
        except ValueError:
            return False
        _start_session()
        return True


_waiting: Wait | None = None


def start_beside_opentelemetry() -> None:
    """Begin our session under `opentelemetry-instrument`, whose `sitecustomize` prevents ours. OpenTelemetry calls this
    as the entry point `opentelemetry_pre_instrument`."""
    if not (os.environ.get("INSTRUMENT_PROFILE") and os.environ.get("INSTRUMENT_RUN_PID")):
        return
    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - as `sitecustomize` does
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != folder]  # noqa: PTH100
    process = sys.modules.get("instrument.sessions.process")
    if process is None or not process.is_session_running():
        begin_session_now()
