"""The folder that `instrument run` puts on PYTHONPATH. Its `sitecustomize` starts a session in each interpreter.

Most processes of a service record nothing: tools, launchers and helpers. Such a process loads only this module and an
import hook. Its session begins just before one of the packages is imported, or as the service first uses a name of
`instrument`. Until then the run's agent does not know the process, and a reload needs no answer from it: the session
reads the profile as it begins. The run's first process begins its session at once, because it reports the rules without
a target.
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
"""The environment variable with the time and size of the profile's file, and the packages to wait for."""

FIRST = "first"
"""The name of the file that the first process of a run creates in the run's folder."""


def begin() -> None:
    """Begin the session of this process, or wait for a package that its profile may instrument. Raises nothing."""
    global _waiting
    if _is_helper():
        return
    packages = _awaited_packages()
    if _is_first() or packages is None or any(map(is_loaded, packages)):
        _start()
    else:
        _waiting = Wait(packages)
        sys.meta_path.insert(0, _waiting)


def is_loaded(package: str) -> bool:
    """Return True if a package is loaded. A namespace package counts once one of its modules is loaded.

    cuda-bindings 12.9 imports the namespace package `cuda` at each start of Python.
    """
    if package not in sys.modules:
        return False
    module = sys.modules[package]
    is_namespace = hasattr(module, "__path__") and getattr(module, "__file__", None) is None
    return not is_namespace or any(name.startswith(f"{package}.") for name in sys.modules)


def begin_now() -> None:
    """Begin the session of this process now, unless it has one. Raises nothing."""
    if _waiting is None:
        _start()
    else:
        _waiting.end()


def awaited_value(profile: str, packages: Collection[str]) -> str:
    """Return the value of `VARIABLE`: the time and size of the profile's file, and the awaited packages."""
    return " ".join([_state_of(profile), *sorted(packages)])


def _state_of(profile: str) -> str:
    try:
        facts = os.stat(profile)  # noqa: PTH116 - pathlib is not loaded this early
    except OSError:
        return "-"
    return f"{facts.st_mtime_ns}:{facts.st_size}"


def _awaited_packages() -> frozenset[str] | None:
    """Return the packages to wait for; None if the profile's file has changed since they were listed."""
    state, *packages = os.environ.get(VARIABLE, "").split() or [""]
    return frozenset(packages) if state == _state_of(os.environ["INSTRUMENT_PROFILE"]) else None


def _is_first() -> bool:
    """Return True in the first Python process of the run. The command of the run may be a shell."""
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
    """Return True if the interpreter runs no code of the service.

    It is a resource tracker of multiprocessing, or runs our own command. An `instrument run` within a run begins
    another run, whose agent is no process of the service.
    """
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


def _start() -> None:
    """Start the session that `INSTRUMENT_PROFILE` asks for, until SIGTERM at the latest.

    Raises nothing. Python's garbage collector is off meanwhile: it would double the time and free nothing. Then all new
    objects move to the oldest generation at once.
    """
    import gc

    is_collecting = gc.isenabled()
    gc.disable()
    try:
        from instrument.runtime import shadowing

        shadowing.guard_imports([shadowing.folder_of_main()])
        from instrument.sessions import process

        if process.start() is not None:
            process.stop_on_sigterm()
        shadowing.release()
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
    """The import hook of a waiting process, removed as the session begins.

    The import of another module of `instrument` ends the wait, too.
    """

    def __init__(self, packages: Collection[str]) -> None:
        self._packages = {*packages, "instrument"}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Begin the session if the module's package is awaited. The other finders find the module."""
        package = fullname.partition(".")[0]
        # Triton names the module of a model by a number.
        is_awaited = package in self._packages or fullname in self._packages or package.isdigit()
        if not is_awaited or not self.end():
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

    def end(self) -> bool:
        """Begin the session and return True. Return False to another thread that calls meanwhile or later."""
        try:
            sys.meta_path.remove(self)
        except ValueError:
            return False
        _start()
        return True


_waiting: Wait | None = None


def start_beside_opentelemetry() -> None:
    """Start our session from OpenTelemetry's autostart, by its entry point `opentelemetry_pre_instrument`.

    With `instrument run -- opentelemetry-instrument python service.py`, OpenTelemetry's `sitecustomize` comes before
    ours on PYTHONPATH. It does not call ours.
    """
    if not (os.environ.get("INSTRUMENT_PROFILE") and os.environ.get("INSTRUMENT_RUN_PID")):
        return
    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - as `sitecustomize` does
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != folder]  # noqa: PTH100
    process = sys.modules.get("instrument.sessions.process")
    if process is None or not process.is_running():
        begin_now()
