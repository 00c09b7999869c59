"""The `instrument` command: write a first profile, run a service under a profile, check or reload one, see what a run
is doing, report on saved traces, convert, merge and query them.

The only place that turns errors into exit codes: 0, 2 for errors of ours (bad profile, bad trace, a rule that matches
nothing), 1 where a gate said no, else the host's own. The module of a verb says what it takes
and what it does.
"""

from __future__ import annotations

from instrument.runtime import shadowing

shadowing.guard()  # before anything else is imported

import argparse
import io
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TextIO

from instrument.errors import InstrumentError, ProfileError

VERBS: Mapping[str, str] = {
    **{word: f"{word}_verb" for word in ("init", "run", "check")},
    **dict.fromkeys(("ps", "live", "dump"), "runs_verb"),
    **dict.fromkeys(("on", "off", "reload"), "control_verb"),
    **{word: f"{word}_verb" for word in ("report", "compare")},
    **dict.fromkeys(("convert", "merge"), "convert_verb"),
    **{word: f"{word}_verb" for word in ("query", "agent")},
    "recover": "runs_verb",
    "help": "help_verb",
}
"""The module of each verb, in the order in which help lists them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command. Returns the exit code; `run` does not return, it becomes the host."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors != "backslashreplace":
        sys.stdout.reconfigure(errors="backslashreplace")  # for names on an ASCII terminal
    try:
        own, host = _split(given)
        options = _read(own)
        code: int = options.verb(options, host)
        flush(sys.stdout)
    except ProfileError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        print("instrument: `instrument help profile` describes every key", file=sys.stderr)
        return 2
    except InstrumentError as error:
        print(f"instrument: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (`| head`) has gone; point stdout elsewhere so that the interpreter's last flush does not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def flush(stream: TextIO | None) -> None:
    """Write out the buffer of a stream. A daemon that was started with it closed has None."""
    if stream is not None:
        stream.flush()


def _read(own: list[str]) -> argparse.Namespace:
    """Parse the words for the command itself. Raises `InstrumentError` for an unknown verb or option."""
    word = own[0] if own else ""
    parser, verbs = _parsers(word)
    if word not in VERBS and word and not word.startswith("-"):
        raise InstrumentError(f"asked for the verb {word!r}; allowed: {', '.join(VERBS)}{_meant(word, VERBS)}")
    options, unknown = parser.parse_known_args(own)
    if unknown:
        used = verbs.get(word, parser)
        meant = _meant(unknown[0], re.findall(r"--[a-z-]+", used.format_help()))
        raise InstrumentError(f"found {unknown[0]!r}, which `{used.prog}` does not know{meant}; its --help lists all")
    return options


def _meant(word: str, known: Iterable[str]) -> str:
    from instrument.profile.document import nearest

    meant = nearest(word, known)
    return f"; did you mean {meant!r}?" if meant else ""


def _parsers(word: str) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the command's parser, and those of this verb's module; of all verbs where the word is none."""
    parser = argparse.ArgumentParser(
        prog="instrument",
        description="Always-on instrumentation of inference services, selected by one profile.yaml.",
        epilog="`instrument help` lists the topics of the documentation.",
    )
    parser.add_argument("--version", action=_Version)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for module in dict.fromkeys([VERBS[word]] if word in VERBS else VERBS.values()):
        import_module(f"instrument.cli.{module}").add(verbs)
    return parser, verbs.choices


class _Version(argparse.Action):
    """Prints the version that is installed."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        sys.stdout.write(f"instrument {version('instrument-sdk')}\n")
        parser.exit()


def _split(given: list[str]) -> tuple[list[str], list[str]]:
    """Return the words for the command itself, and the host's command line.

    The host's begins after `--`, at `-m` or `-c`, or at the first word that is no option.
    """
    if given[:1] in (["check"], ["init"]) and "--" in given:
        at = given.index("--")
        if not given[at + 1 :]:
            raise InstrumentError(
                f"{given[0]}: nothing to run after --; give script.py [argument ...] or -m module ..."
            )
        return given[:at], given[at + 1 :]
    if given[:1] != ["run"]:
        return given, []
    own, host = given, []
    i = 1
    while i < len(given):
        word = given[i]
        if word == "--":
            own, host = given[:i], given[i + 1 :]
            break
        if word in ("--profile", "--preset"):
            i += 2
            continue
        if word == "-h" or word.startswith("--"):
            i += 1  # ours, or a mistake for the parser to name
            continue
        own, host = given[:i], given[i:]
        break
    return own, host
