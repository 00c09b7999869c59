"""Find the interpreter and the name of a service from its command, and run the command as a child process."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from instrument.errors import InstrumentError
from instrument.native import OFF
from instrument.runtime.lazy_imports import NamedTuple, late_pattern

if TYPE_CHECKING:
    import subprocess

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def list_interpreter_flags() -> list[str]:
    flags = [f"-W{option}" for option in sys.warnoptions]
    flags += [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items()]
    safe_path = getattr(sys.flags, "safe_path", False)
    for letter, value in (("B", sys.dont_write_bytecode), ("O", sys.flags.optimize), ("P", safe_path)):
        flags += [f"-{letter}"] * int(value)
    return flags


@contextmanager
def run_command(
    profile: str,
    host: list[str],
    environ: Mapping[str, str],
    handed_on: list[int],
    *,
    to_stderr: bool,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command under `instrument run`.

    Signals that end a process are forwarded to the command. The number of each forwarded signal is added to
    `handed_on`.
    """
    import subprocess

    sys.stdout.flush()
    words = [sys.executable, *list_interpreter_flags(), "-m", "instrument", "run", "--profile", profile, "--", *host]
    child = subprocess.Popen(  # noqa: S603 - the user's own command
        words, env={**os.environ, **environ}, stdout=sys.stderr.fileno() if to_stderr else None
    )

    def forward_signal(number: int, _: object) -> None:
        if number != signal.SIGINT or not _is_in_foreground():
            handed_on.append(number)
            child.send_signal(number)

    before = {number: signal.signal(number, forward_signal) for number in ENDING}
    try:
        yield child
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    try:
        with Path("/dev/tty").open("rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


class Command(NamedTuple):
    """A user's command as words, with a note on its parts that are not recorded."""

    words: list[str]
    note: str = ""


def find_command(verb: str, words: list[str]) -> Command:
    """Return the command to run. A Python program is run by this interpreter, and any other program directly.

    Raises `InstrumentError` if the command cannot run, or if no process could be recorded.
    """
    if not words:
        raise InstrumentError(f"{verb}: {_NOTHING}")
    if words[0].startswith("-"):
        return _make_python_command(verb, words)
    path = _find_program(verb, words[0])
    head = b"" if path.is_dir() else _read_head(path)
    if _INTERPRETER.fullmatch(path.name) and not path.is_dir():
        _refuse_other_interpreter(verb, words[0], path)
        return _make_python_command(verb, words[1:])
    if head.startswith(b"\x7fELF"):
        is_shell = path.name in _SHELLS
        note = f"{path.name} is machine code: Python in it and below it is recorded, all else is not"
        return Command([str(path), *words[1:]], "" if is_shell else note)
    if path.suffix in (".sh", ".bash") and not head.startswith(b"#!"):
        return Command(["/bin/sh", str(path), *words[1:]])
    if not head.startswith(b"#!") or (of_python := _OF_PYTHON.match(head)):
        if str(path) != words[0] and of_python and (interpreter := os.fsdecode(of_python[1])).startswith("/"):
            _refuse_other_interpreter(verb, words[0], Path(interpreter))
        return _make_python_command(verb, [str(path), *words[1:]])
    if not os.access(path, os.X_OK):
        raise InstrumentError(f"{verb}: {words[0]} is not executable; make it so with `chmod +x {path}`")
    return Command([str(path.absolute()), *words[1:]])


_NOTHING = "there is no command to run; give it as to a shell: `-- python server.py`, `-- uvicorn app:app`"
_INTERPRETER = late_pattern(r"python[\d.]*")
_SHELLS = {"sh", "bash", "dash", "ash", "zsh", "busybox", "env"}
_OF_PYTHON = late_pattern(rb"#!(?:/bin/sh\n'''exec' \"?|\s*\S*/env\s+(?:-S\s+)?)?([^\n\"]*python[\d.]*)")
"""A pattern of a Python script's first lines. The group is the path of the interpreter, or the name that `env` gets."""


def _make_python_command(verb: str, words: list[str]) -> Command:
    if not words or words in (["-m"], ["-c"]):
        raise InstrumentError(f"{verb}: {_NOTHING}")
    options = iter(() if OFF else words)
    for word in options:
        option = re.match(r"-(?=[A-Za-z])(\w*?)([WXmc]|$)(.*)", word)
        if option is None:
            break
        letters, last, argument = option.groups()
        if set(letters) & set("IES"):
            raise InstrumentError(
                f"{verb}: the option {word} of Python prevents the start of the session; remove it, or call "
                "instrument.start() in the service"
            )
        if last in ("m", "c"):
            break
        if last and not argument:
            next(options, None)  # what -W or -X means
    return Command([sys.executable, *list_interpreter_flags(), *words])


_GENERIC = frozenset(
    ("app", "main", "server", "service", "serve", "run", "api", "wsgi", "asgi", "manage", "src", "code")
)
_SERVERS = frozenset(("uvicorn", "gunicorn", "hypercorn", "granian", "flask", "fastapi", "celery"))


def choose_service_name(words: Sequence[str]) -> str:
    """Choose the name of a service: the name of the project, app, module, script or folder. General names, such as
    `app`, come last."""
    project = Path("pyproject.toml")
    if project.is_file():
        text = project.read_text("utf-8", "replace")
        name = re.search(r'(?ms)^\[project\](?:(?!^\[).)*?^name\s*=\s*["\']([^"\']+)["\']', text)
        if name:
            return _sanitize_service_name(name[1])
    targets = [
        word
        for before, word in zip(("", *words), words, strict=False)
        if before == "-m" or re.match(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*(?:\.\w+)*(?:\(|$)", word)
    ]
    modules = [re.split(r"[.:]", word)[0] for word in reversed(targets)]
    programs = [Path(word).stem for word in words if not re.match(r"-|(.*/)?python[\d.]*$", word)]
    is_script = not targets and words[:1] != ["-c"]
    names = [name for name in (*modules, *programs[:is_script], Path.cwd().name) if name and name not in _SERVERS]
    return _sanitize_service_name(next((name for name in names if name not in _GENERIC), next(iter(names), "service")))


def _sanitize_service_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip("-.") or "service"


def _find_program(verb: str, word: str) -> Path:
    path = Path(word)
    if path.is_file() or (path.is_dir() and ("/" in word or (path / "__main__.py").exists())):
        return path
    command = None if "/" in word else shutil.which(word)
    if command is None:
        raise InstrumentError(
            f"{verb}: there is no file {word!r} in {Path.cwd()}, and no such command; run a module with `-- -m {word}`"
        )
    return Path(command)


def _refuse_other_interpreter(verb: str, word: str, interpreter: Path) -> None:
    """Raise `InstrumentError` for the interpreter of another environment, because this package may be missing there.

    Scripts that choose an interpreter, such as those of pyenv, are allowed.
    """
    running = Path(sys.executable)
    is_same = interpreter.parent.resolve() == running.parent.resolve()
    if OFF or is_same or not _read_head(interpreter).startswith(b"\x7fELF"):
        return
    environments = [(python.parent.parent / "pyvenv.cfg").exists() for python in (interpreter, running)]
    if any(environments) or not interpreter.samefile(running):
        raise InstrumentError(
            f"{verb}: {word!r} runs with {interpreter}, and this is {running}; install instrument-sdk there, and use "
            "its `instrument`"
        )


def _read_head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(256)
    except OSError:
        return b""  # what Python will complain about
