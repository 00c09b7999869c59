"""The `instrument` command, which runs the module of a verb and turns errors into exit codes.

- 0: success
- 1: a gate, such as `check --strict`, has failed
- 2: an error of `instrument`, such as a bad profile
- 141: the reader of the output has gone away
- any other exit code is the service's own
"""

from __future__ import annotations

from instrument.runtime import shadowing

shadowing.guard_imports()  # before anything else is imported

import argparse
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from instrument.errors import InstrumentError, ProfileError

VERBS: Mapping[str, str] = {
    **{word: f"{word}_verb" for word in ("init", "run", "check")},
    **dict.fromkeys(("ps", "live", "dump"), "ps_live_dump_verbs"),
    **dict.fromkeys(("on", "off", "reload"), "on_off_reload_verbs"),
    **dict.fromkeys(("report", "explain"), "report_explain_verbs"),
    "compare": "compare_verb",
    **dict.fromkeys(("convert", "merge", "query"), "convert_merge_query_recover_verbs"),
    "agent": "agent_verb",
    "recover": "convert_merge_query_recover_verbs",
    "help": "help_verb",
}
"""The module of each verb, in the order in which the help lists the verbs."""


READER_GONE = 128 + 13
"""The exit code if the reader of the output has gone, as in shells after SIGPIPE."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `instrument`. Returns the exit code.

    The verb `run` does not return, because the service replaces this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # it was closed before
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors != "backslashreplace":
        sys.stdout.reconfigure(errors="backslashreplace")  # for names on an ASCII terminal
    try:
        try:
            own_words, host = _split_off_service_command(words)
            options = _parse_options(own_words)
            code: int = options.verb(options, host)
        finally:
            flush_stream(sys.stdout)
    except ProfileError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        print_remark("`instrument help profile` describes every key")
        return 2
    except BrokenPipeError:  # such as of `| head`
        _discard_output()
        return READER_GONE
    except (InstrumentError, OSError) as error:
        print_remark(error)
        try:
            flush_stream(sys.stdout)
        except OSError:
            _discard_output()
        return 2
    except Exception:
        traceback.print_exc()
        return 2
    return code


def _discard_output() -> None:
    """Redirect the standard output to /dev/null. Otherwise the interpreter's last flush would raise an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def flush_stream(stream: TextIO | None) -> None:
    """Flush a stream. The stream is None if it was closed when the process started."""
    if stream is not None:
        stream.flush()


def print_remark(*parts: object) -> None:
    print("instrument", *parts, sep=": ", file=sys.stderr)


def print_json(document: Any) -> None:
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_lines(lines: Iterable[str]) -> None:
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in lines)


def _parse_options(words: list[str]) -> argparse.Namespace:
    word = words[0] if words else ""
    parser, verbs = _make_parsers(word)
    if word not in VERBS and word and not word.startswith("-"):
        from instrument.cli.option_values import suggest_name

        raise InstrumentError(f"there is no command {word!r}; allowed: {', '.join(VERBS)}{suggest_name(word, VERBS)}")
    options, unknown = parser.parse_known_args(words)
    name = getattr(options, "last_word", "")
    if name and unknown == words[-1:] and not unknown[0].startswith("-") and getattr(options, name) is None:
        setattr(options, name, unknown.pop())  # a word after the options, of a verb that takes one there
    if unknown:
        from instrument.cli.option_values import suggest_name

        used = verbs.get(word, parser)
        hint = suggest_name(unknown[0], re.findall(r"--[a-z-]+", used.format_help()))
        raise InstrumentError(f"`{used.prog}` has no option {unknown[0]!r}{hint}; `--help` lists its options")
    return options


def _make_parsers(word: str) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="instrument",
        description="Always-on instrumentation of inference services. A profile.yaml selects what to record.",
        epilog="Begin with `instrument run -- COMMAND`. `instrument help` lists the topics of the documentation.",
    )
    if word not in VERBS:
        from importlib.metadata import version

        text = f"instrument {version('instrument-sdk')}"
        parser.add_argument("--version", action="version", version=text, help="print the version and exit")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for module in dict.fromkeys([VERBS[word]] if word in VERBS else VERBS.values()):
        import_module(f"instrument.cli.{module}").add_verbs(verbs)
    return parser, verbs.choices


def _split_off_service_command(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the words into those of `instrument` and those of the service's command.

    The service's command begins after `--`, at `-m` or `-c`, or at the first word that is not an option.
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
    at = 1
    while at < len(words) and words[at] != "--" and (words[at] == "-h" or words[at].startswith("--")):
        at += 2 if words[at] in ("--profile", "--preset") else 1  # ours, or a mistake for the parser to name
    return words[:at], words[at + (words[at : at + 1] == ["--"]) :]
