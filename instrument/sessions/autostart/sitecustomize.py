"""Runs in each interpreter that `instrument run` starts, children included, before the service's first line.

Has the process wait for what its run's profile names, takes this folder off `sys.path` again and hands over to the
`sitecustomize` that would have run without it. Never stops the host from starting. Any Python reads this file, 2.7 too:
newer syntax stays out of it.
"""

import os
import sys


def _hand_over():
    # type: () -> None
    """Run the next `sitecustomize` on the path, as if this one were not there."""
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


def _begin():
    # type: () -> None
    if sys.version_info < (3, 10):
        _note_unseen("Python %d.%d" % sys.version_info[:2])
        return
    if not _is_main_interpreter():
        return
    try:
        from instrument.sessions.autostart import waiting
    except Exception as error:
        if isinstance(error, ImportError) and (error.name or "").split(".")[0] == "instrument":
            _note_unseen("without instrument-sdk: " + sys.executable)
        else:
            why = str(error) or type(error).__name__
            sys.stderr.write("instrument: this process is not instrumented: " + why + "\n")
    else:
        waiting.begin()


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


def _note_unseen(why):
    # type: (str) -> None
    """Leave the agent of the run a line on this process, which is not going to be recorded."""
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
        _begin()
finally:
    _hand_over()
