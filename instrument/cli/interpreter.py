"""The interpreter that the host is run by, and commands that are waited for."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from instrument.errors import InstrumentError
from instrument.recorder.scopes import OFF

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interpreter_flags() -> list[str]:
    """The options that this interpreter was started with and that matter to the host."""
    flags = [f"-W{option}" for option in sys.warnoptions]
    flags += [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items()]
    safe_path = getattr(sys.flags, "safe_path", False)
    for letter, value in (("B", sys.dont_write_bytecode), ("O", sys.flags.optimize), ("P", safe_path)):
        flags += [f"-{letter}"] * int(value)
    return flags


@contextmanager
def running(
    profile: str,
    host: list[str],
    environ: Mapping[str, str],
    handed_on: list[int],
    *,
    to_stderr: bool,
) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs under a profile, as by `instrument run`.

    Signals that would end us are handed on to it, and noted in `handed_on`.
    """
    sys.stdout.flush()
    words = [sys.executable, *interpreter_flags(), "-m", "instrument", "run", "--profile", profile, "--", *host]
    child = subprocess.Popen(  # noqa: S603 - the user's own command
        words, env={**os.environ, **environ}, stdout=sys.stderr.fileno() if to_stderr else None
    )

    def hand_on(number: int, _: object) -> None:
        if number != signal.SIGINT or not _is_of_terminal():
            handed_on.append(number)
            child.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in ENDING}
    try:
        yield child
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_of_terminal() -> bool:
    """Return whether we run in the foreground of a terminal, whose Ctrl-C reaches the command by itself."""
    try:
        with Path("/dev/tty").open("rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def refuse_what_is_no_host(verb: str, host: list[str]) -> None:
    """Raise `InstrumentError` for words that this interpreter cannot run, or not so that a session starts."""
    if not host or host in (["-m"], ["-c"]):
        raise InstrumentError(f"{verb}: nothing to run; give `-- script.py [argument ...]` or `-- -m module ...`")
    words = iter(() if OFF else host)
    for word in words:
        found = re.match(r"-(?=[A-Za-z])(\w*?)([WXmc]|$)(.*)", word)
        if found is None:
            break
        letters, last, rest = found.groups()
        if set(letters) & set("IES"):
            raise InstrumentError(
                f"{verb}: found {word} before the script; with -I, -E or -S Python does not load what starts the "
                "session. Leave it out, or call instrument.start() in the service"
            )
        if last in ("m", "c"):
            break
        if last and not rest:
            next(words, None)  # what -W or -X means
    if not host[0].startswith("-"):
        _refuse_what_is_no_script(verb, host[0])


def _refuse_what_is_no_script(verb: str, word: str) -> None:
    path = Path(word)
    is_python = re.fullmatch(r"python[\d.]*", path.name) is not None
    if not path.exists():
        found, hint = f"no such file in {Path.cwd()}", f"a module is run with -- -m {word}"
        command = shutil.which(word)
        if command is not None and re.match(rb"#!.*python", _head(Path(command), 256), re.DOTALL):
            hint += f", a command by its path: -- {command}"
    elif _head(path, 4) == b"\x7fELF":
        found, hint = "machine code", "give a script or module of Python"
    else:
        return
    if is_python:
        hint = f"leave it out and give what would follow it: -- script.py or -- -m module, not -- {word} ..."
    raise InstrumentError(f"{verb}: asked to run {word!r}, found {found}; {hint}")


def _head(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError:
        return b""  # a folder, which Python can run, or what it will complain about
