"""The module that Python runs before the service's first line, in each interpreter below `instrument run`.

The module begins a session, or installs an import hook that begins one later. Then the module takes its folder off
`sys.path`, and runs the `sitecustomize` that Python would have run otherwise. Any Python may read this file, so it has
no syntax newer than 2.7.
"""

import os
import sys


def _run_next_sitecustomize():
    # type: () -> None
    """Run the `sitecustomize` that this one hides."""
    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib is not loaded this early
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != folder]  # noqa: PTH100
    hook = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        is_missing = getattr(error, "name", "sitecustomize") == "sitecustomize"
        if not is_missing or not str(error).startswith("No module named"):
            raise
        if hook is not None:
            sys.modules["sitecustomize"] = hook


def _begin_session():
    # type: () -> None
    if sys.version_info < (3, 10):
        _note_missed_process("Python %d.%d" % sys.version_info[:2])
        return
    if not _is_main_interpreter():
        return
    try:
        from instrument.sessions import autostart
    except Exception as error:
        if isinstance(error, ImportError) and (error.name or "").split(".")[0] == "instrument":
            _note_missed_process("without instrument-sdk: " + sys.executable)
        else:
            why = str(error) or type(error).__name__
            sys.stderr.write("instrument: this process is not instrumented: " + why + "\n")
    else:
        autostart.begin_or_await()


def _is_main_interpreter():
    # type: () -> bool
    """Return False in a sub-interpreter, where neither the recorder nor numpy can be loaded."""
    try:
        from _thread import _is_main_interpreter  # type: ignore[attr-defined]  # Python 3.12 and later
    except ImportError:
        try:
            import _xxsubinterpreters as known  # type: ignore[import-not-found]
        except ImportError:
            return True
        del sys.modules["_xxsubinterpreters"]  # it is there where the program has imported it
        return bool(known.get_current() == known.get_main())
    return bool(_is_main_interpreter())


def _note_missed_process(why):
    # type: (str) -> None
    """Report to the run's agent, by a file, that this process will not be recorded."""
    agent = os.environ.get("INSTRUMENT_AGENT", "")
    try:
        file = os.open(agent + ".unseen", os.O_WRONLY | os.O_APPEND)
    except OSError:
        return  # no agent asks for it
    try:
        if os.fstat(file).st_size < 1 << 20:
            os.write(file, ("%d %s\n" % (os.getpid(), why)).encode("utf-8"))
    finally:
        os.close(file)


_OFF = ("off", "0", "false", "no")

try:
    if os.environ.get("INSTRUMENT_PROFILE") and os.environ.get("INSTRUMENT", "").strip().lower() not in _OFF:
        _begin_session()
finally:
    _run_next_sitecustomize()
