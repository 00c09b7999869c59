"""The `instrument` command: write a first profile, run a service under a profile, check or reload one, see what a run
is doing, report on saved traces, convert, merge and query them.

It alone turns errors into exit codes. 0 is success, and 1 is a failed gate. 2 is an error of ours: a bad profile or
trace, a rule that matches nothing, an unexpected exception. 141 means that the reader of the output went away. Another
code is that of the service. Each verb is a module.
"""

from __future__ import annotations

from instrument.runtime import shadowing

shadowing.guard_imports()  # before anything else is imported

import argparse
import io
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TextIO

from instrument.errors import InstrumentError, ProfileError

VERBS: Mapping[str, str] = {
    **{word: f"{word}_verb" for word in ("init", "run", "check")},
    **dict.fromkeys(("ps", "live", "dump"), "runs_verb"),
    **dict.fromkeys(("on", "off", "reload"), "control_verb"),
    **{word: f"{word}_verb" for word in ("report", "explain", "compare")},
    **dict.fromkeys(("convert", "merge", "query"), "convert_verb"),
    "agent": "agent_verb",
    "recover": "runs_verb",
    "help": "help_verb",
}
"""The module of each verb, in the order in which help lists them."""


READER_GONE = 128 + 13
"""The exit code of a shell's command that SIGPIPE ended. No gate returns it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code, except for `run`, which becomes the host process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # it was closed before
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors != "backslashreplace":
        sys.stdout.reconfigure(errors="backslashreplace")  # for names on an ASCII terminal
    try:
        try:
            own_words, host = _split(words)
            options = _read(own_words)
            code: int = options.verb(options, host)
        finally:
            flush(sys.stdout)
    except ProfileError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        print("instrument: `instrument help profile` describes every key", file=sys.stderr)
        return 2
    except InstrumentError as error:
        print(f"instrument: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # such as of `| head`
        _discard_output()
        return READER_GONE
    except OSError as error:
        print(f"instrument: {error}", file=sys.stderr)
        try:
            flush(sys.stdout)
        except OSError:
            _discard_output()
        return 2
    except Exception:
        traceback.print_exc()
        return 2
    return code


def _discard_output() -> None:
    """Point standard output elsewhere, so that the interpreter's last flush does not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def flush(stream: TextIO | None) -> None:
    """Flush a stream. It is None in a process that was started with the stream closed."""
    if stream is not None:
        stream.flush()


def _read(words: list[str]) -> argparse.Namespace:
    """Parse the command's own words. Raises `InstrumentError` for an unknown verb or option."""
    word = words[0] if words else ""
    parser, verbs = _parsers(word)
    if word not in VERBS and word and not word.startswith("-"):
        raise InstrumentError(f"there is no command {word!r}; allowed: {', '.join(VERBS)}{_suggestion(word, VERBS)}")
    options, unknown = parser.parse_known_args(words)
    name = getattr(options, "last_word", "")
    if name and unknown == words[-1:] and not unknown[0].startswith("-") and getattr(options, name) is None:
        setattr(options, name, unknown.pop())  # a word after the options, of a verb that takes one there
    if unknown:
        used = verbs.get(word, parser)
        hint = _suggestion(unknown[0], re.findall(r"--[a-z-]+", used.format_help()))
        raise InstrumentError(f"`{used.prog}` has no option {unknown[0]!r}{hint}; `--help` lists its options")
    return options


def _suggestion(word: str, names: Iterable[str]) -> str:
    from instrument.profile.document import nearest

    name = nearest(word, names)
    return f"; did you mean {name!r}?" if name else ""


def _parsers(word: str) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the command's parser, and the parsers of the verb's module, or of all verbs for an unknown word."""
    parser = argparse.ArgumentParser(
        prog="instrument",
        description="Always-on instrumentation of inference services. A profile.yaml selects what to record.",
        epilog="Begin with `instrument run -- COMMAND`. `instrument help` lists the topics of the documentation.",
    )
    parser.add_argument("--version", action=_Version)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for module in dict.fromkeys([VERBS[word]] if word in VERBS else VERBS.values()):
        import_module(f"instrument.cli.{module}").add(verbs)
    return parser, verbs.choices


class _Version(argparse.Action):
    """An option that prints the installed version."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        sys.stdout.write(f"instrument {version('instrument-sdk')}\n")
        parser.exit()


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the command's own words, and the host's command line.

    That begins after `--`, at `-m` or `-c`, or at the first word that is no option.
    """
    if words[:1] in (["check"], ["init"]) and "--" in words:
        at = words.index("--")
        if not words[at + 1 :]:
            raise InstrumentError(
                f"{words[0]}: there is no command after `--`; give `script.py [argument ...]` or `-m module ...`"
            )
        return words[:at], words[at + 1 :]
    if words[:1] != ["run"]:
        return words, []
    own_words, host = words, []
    i = 1
    while i < len(words):
        word = words[i]
        if word == "--":
            own_words, host = words[:i], words[i + 1 :]
            break
        if word in ("--profile", "--preset"):
            i += 2
            continue
        if word == "-h" or word.startswith("--"):
            i += 1  # ours, or a mistake for the parser to name
            continue
        own_words, host = words[:i], words[i:]
        break
    return own_words, host
