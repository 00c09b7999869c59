"""`instrument init`: observe a service, and write a first profile for it."""

from __future__ import annotations

import argparse
import re
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from instrument.cli.interpreter import choose_service_name, find_command, run_command
from instrument.cli.option_values import Verbs, read_time_ns
from instrument.errors import InstrumentError
from instrument.instrumentors.argument_watch import SALT_VARIABLE
from instrument.native import OFF
from instrument.profile.keys import loads
from instrument.proposal.first_profile import propose_first_profile
from instrument.proposal.observation import (
    Observation,
    await_reports,
    find_service_modules,
    merge_reports,
    patterns_of_all_functions,
)
from instrument.runtime.environment import INIT_FOLDER

END_S = 30.0
"""Seconds from SIGTERM until a command is killed."""

OTHERS_S = 5.0
"""Seconds to wait, after the command's end, for observations from its other processes."""

OBSERVING = """\
service: init
agent: off
requests: auto
frameworks: auto
functions: [{{match: [{patterns}]}}]
layers: [{{match: "**"}}]
phases: auto
copies: [{{directions: [h2d, d2h]}}]
device: {{cuda: off}}
limits: {{ring: 4MiB, blocked: off}}
"""
"""The profile under which the command is observed. It records all functions of the command's own modules."""


def add_verbs(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "init",
        allow_abbrev=False,
        help="watch a service while you send it requests, and write a first profile",
        usage="instrument init [--for TIME] [-o FILE] [--force] -- command [argument ...]",
        description="Runs the command and records all functions of the service itself. Send it requests meanwhile. "
        "When the command ends, init proposes rules for the functions that took the time. The last line names the "
        "exit code of the command.",
    )
    parser.add_argument(
        "--for",
        dest="for_ns",
        type=read_time_ns,
        metavar="TIME",
        help="end the command by SIGTERM after this time, such as 30s",
    )
    parser.add_argument(
        "-o", dest="file", metavar="FILE", default="profile.yaml",
        help=(
            "the file to write (default: profile.yaml); - prints the profile, and the output of the command goes to "
            "stderr"
        ),
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    parser.set_defaults(verb=write_first_profile)


def write_first_profile(options: argparse.Namespace, host: list[str]) -> int:
    prints = options.file == "-"
    path = Path(options.file)
    if not prints and path.exists() and not options.force:
        raise InstrumentError(
            f"init: {path} exists; replace it with --force, write another file with -o FILE, or print the "
            "profile with -o -"
        )
    if not prints and not path.absolute().parent.is_dir():
        raise InstrumentError(f"init: the folder {path.absolute().parent} of {path.name} does not exist; create it")
    if not host:
        raise InstrumentError(
            "init: there is no command to observe; give that of the service after `--`: `instrument init -- "
            "python server.py`"
        )
    profile_name = "profile.yaml" if prints else str(path)
    find_command("init", host)
    words = host[1:] if re.fullmatch(r"python[\d.]*", Path(host[0]).name) and not Path(host[0]).is_dir() else host
    observation, code = _observe_command(words, options.for_ns, to_stderr=prints)
    first = propose_first_profile(observation, words, choose_service_name(words), profile_name)
    loads(first.text)  # what we write must be a profile
    if prints:
        sys.stdout.write(first.text)
        return 0
    _write_profile(path, first.text, replaces=options.force)
    count = f"{first.rules} rule{'s' * (first.rules != 1)}"
    end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    print(f"instrument: wrote {path}: {count}, from {first.summary}; the command {end}", file=sys.stderr)
    return 0


def _write_profile(path: Path, text: str, *, replaces: bool) -> None:
    try:
        with path.open("w" if replaces else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InstrumentError(f"init: cannot write {path}: {error.strerror}; -o - prints the profile") from None


def _observe_command(words: list[str], for_ns: int | None, *, to_stderr: bool) -> tuple[Observation, int]:
    if OFF:
        raise InstrumentError(f"init: the environment has {OFF}, so the command would not be observed; unset it")
    names = find_service_modules(words, Path.cwd())
    patterns = ", ".join(f'"{pattern}"' for pattern in patterns_of_all_functions(names))
    with TemporaryDirectory(prefix="instrument-init-") as folder:
        profile = Path(folder, "observing.yaml")
        profile.write_text(OBSERVING.format(patterns=patterns), encoding="utf-8")
        environ = {INIT_FOLDER: folder, SALT_VARIABLE: secrets.token_hex(16)}
        end = "ends" if for_ns is None else f"ends, or {for_ns / 1e9:g} s have passed"
        print(
            f"instrument: observing the command; send it requests. The profile is written when the command {end}",
            file=sys.stderr,
        )
        ended = list[int]()
        with run_command(str(profile), words, environ, ended, to_stderr=to_stderr) as child:
            code, is_over_time = _await_command(child, for_ns)
        await_reports(folder, OTHERS_S, ends=bool(ended) or is_over_time)
        observation = merge_reports(folder)
    if not observation.processes:
        raise InstrumentError(
            f"init: the command ended with exit code {code} before any of its processes reported; end it by SIGTERM "
            "or Ctrl-C"
        )
    if not any(node.callee.label or node.callee.kind == "request" for node in observation.nodes()):
        raise InstrumentError(
            f"init: the command ended with exit code {code}, and no function of its own modules was called; own "
            "modules are below the current folder, next to the script, or on PYTHONPATH: "
            f"{', '.join(names) or 'none'}"
        )
    return observation, code


def _await_command(child: subprocess.Popen[bytes], for_ns: int | None) -> tuple[int, bool]:
    """Wait for a command, and end it if it still runs after `for_ns`. Return the exit code, and True if the command was
    ended here."""
    try:
        return child.wait(None if for_ns is None else for_ns / 1e9), False
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGTERM)
    try:
        return child.wait(END_S), True
    except subprocess.TimeoutExpired:
        print(f"instrument: the command did not end within {END_S:g} s after SIGTERM, so it is killed", file=sys.stderr)
        child.kill()
        return child.wait(), True
