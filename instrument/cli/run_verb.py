"""`instrument run`: become the service, under a profile."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from instrument.agent import launch
from instrument.cli import first_process
from instrument.cli.interpreter import interpreter_flags
from instrument.cli.option_values import Verbs
from instrument.cli.output import flush
from instrument.cli.wanted_profile import DEFAULT, WITHOUT_PROFILE, wanted
from instrument.errors import InstrumentError
from instrument.profile.keys import load
from instrument.profile.model import Profile
from instrument.profile.presets import PRESETS
from instrument.recorder.scopes import OFF
from instrument.recording import board
from instrument.runtime import environment, run_folder
from instrument.sessions import autostart, files


def add(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "run",
        allow_abbrev=False,
        help="run a Python service under a profile",
        usage="instrument run [--profile P | --preset NAME] -- script.py [argument ...] | -m module [argument ...]",
        description="The service runs as it would under `python`, with its own exit code and signals. Child processes "
        f"that inherit the environment are instrumented too. Without a profile the preset {PRESETS[0]} is taken.",
    )
    parser.add_argument("--profile", metavar="P", help=f"profile.yaml ({DEFAULT})")
    parser.add_argument("--preset", choices=PRESETS, help="a profile that comes with the package")
    parser.set_defaults(verb=run)


def run(options: argparse.Namespace, host: list[str]) -> int:
    """Become the host under the profile, or stay as its parent where this is the first process of a container."""
    path, is_unnamed = wanted(options)
    if not host or host in (["-m"], ["-c"]):
        raise InstrumentError("run: nothing to run; give `-- script.py [argument ...]` or `-- -m module ...`")
    profile = None if OFF else load(path)
    if profile is not None:
        _refuse_what_cannot_work(profile, host)  # a broken profile ends here, not in the service
    if not host[0].startswith("-"):
        _refuse_what_is_no_script(host[0])
    environ = _environment_of_host()
    environ["INSTRUMENT_PROFILE"] = os.path.abspath(path)  # noqa: PTH100 - resolve() would follow links
    environ["INSTRUMENT_RUN_PID"] = str(os.getpid())
    environ[files.RUN_VARIABLE] = name = _new_run()
    environ.pop(board.VARIABLE, None)
    paths = [str(Path(autostart.__file__).parent), *filter(None, [environ.get("PYTHONPATH")])]
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    listener = None
    if profile is None or profile.agent == "off":
        environ.pop(run_folder.VARIABLE, None)
    elif "INSTRUMENT_RUN_PID" in os.environ or not environ.get(run_folder.VARIABLE):  # a run within another has its own
        listener = _listener_of_agent(environ, name)
    if is_unnamed and not OFF:
        print(f"instrument: {WITHOUT_PROFILE}", file=sys.stderr)
    flush(sys.stdout)
    flush(sys.stderr)
    words = [sys.executable, *interpreter_flags(), *host]
    if listener is not None and os.getpid() == 1:
        return first_process.serve(listener, name, words, environ)
    if listener is not None:
        _begin_agent(listener, name, environ)
    return _become(words, environ)


def _new_run() -> str:
    """What this run is called: not as the one that it is within, which this very process may have begun just now."""
    while (name := files.new_run()) == os.environ.get(files.RUN_VARIABLE):
        time.sleep(0.05)
    return name


def _become(words: list[str], environ: dict[str, str]) -> NoReturn:
    """Become the host, not call it: its own __main__, exit code, signals and tracebacks."""
    os.execve(words[0], words, environ)  # noqa: S606 - no shell wanted


def _listener_of_agent(environ: dict[str, str], run: str) -> socket.socket | None:
    """Where the agent of a run is to listen, put into `environ`; None where it cannot."""
    environ.pop(run_folder.VARIABLE, None)
    try:
        listener = launch.prepare(run)
    except OSError as error:
        print(f"instrument: this run has no agent: {error}", file=sys.stderr)
        return None
    environ[run_folder.VARIABLE] = os.fsdecode(listener.getsockname())
    return listener


def _begin_agent(listener: socket.socket, run: str, environ: dict[str, str]) -> None:
    try:
        launch.begin(listener, run, os.getpid())
    except OSError as error:
        del environ[run_folder.VARIABLE]
        print(f"instrument: this run has no agent: {error}", file=sys.stderr)
    listener.close()


def _environment_of_host() -> dict[str, str]:
    """Our environment; where the `sitecustomize` of another program has begun this interpreter, as it was before that.

    `opentelemetry-instrument instrument run -- service.py`: that one takes itself off PYTHONPATH, and would not
    instrument the service.
    """
    file = getattr(sys.modules.get("sitecustomize"), "__file__", None)
    folder = os.path.dirname(os.path.abspath(file)) if file else ""  # noqa: PTH100, PTH120 - as it stands on the path
    before = environment.given()
    had, has = (folder in one.get("PYTHONPATH", "").split(os.pathsep) for one in (before, os.environ))
    return before if folder and had and not has else dict(os.environ)


def _refuse_what_cannot_work(profile: Profile, host: list[str]) -> None:
    if profile.export.otlp is not None and profile.export.otlp.protocol == "grpc":
        from instrument import otlp

        otlp.require_grpc()
    words = iter(host)
    for word in words:
        found = re.match(r"-(?=[A-Za-z])(\w*?)([WXmc]|$)(.*)", word)
        if found is None:
            break
        letters, last, rest = found.groups()
        if set(letters) & set("IES"):
            raise InstrumentError(
                f"run: found {word} before the script; with -I, -E or -S Python does not load what starts the session. "
                "Leave it out, or call instrument.start() in the service"
            )
        if last in ("m", "c"):
            break
        if last and not rest:
            next(words, None)  # what -W or -X means


def _refuse_what_is_no_script(word: str) -> None:
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
    raise InstrumentError(f"run: asked to run {word!r}, found {found}; {hint}")


def _head(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError:
        return b""  # a folder, which Python can run, or what it will complain about
