"""Runs in each interpreter that `instrument run` starts, children included, before the service's first line.

Starts the session that `INSTRUMENT_PROFILE` asks for, takes this folder off `sys.path` again and hands over to the
`sitecustomize` that would have run without it. Never stops the host from starting.
"""

import os
import sys


def _hand_over() -> None:
    """Run the next `sitecustomize` on the path, as if this one were not there."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib is not loaded this early
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != here]  # noqa: PTH100
    own = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if own is not None:
            sys.modules["sitecustomize"] = own


def _start() -> None:
    try:
        from instrument.sessions.autostart import start
    except Exception as error:
        why = str(error) or type(error).__name__
        sys.stderr.write(f"instrument: this process is not instrumented: {why}\n")
    else:
        start()


def _is_helper() -> bool:
    """Whether the interpreter runs no code of the service: it cleans up after multiprocessing's processes, or runs our
    own command. Within a run, `instrument run` begins another one, whose agent is no process of the service.
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


if os.environ.get("INSTRUMENT_PROFILE") and not _is_helper() and _is_main_interpreter():
    _start()
_hand_over()
