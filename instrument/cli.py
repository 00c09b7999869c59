"""The `instrument` command: run a service under a profile, check a profile, report on a saved trace.

The only place that turns errors into exit codes: 0, 2 for errors of ours (bad profile, bad trace, a rule that matches
nothing), 1 where a gate said no, else the host's own.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instrument.errors import InstrumentError, ProfileError
from instrument.probes.scopes import OFF
from instrument.profile import SORT_KEYS, STATES, TRACER_OPTIONS, Profile, load


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command. Returns the exit code; `run` does not return, it becomes the host."""
    parser = _parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    options, host = _split(parser, given)
    try:
        code: int = options.verb(options, host)
        sys.stdout.flush()
    except ProfileError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return 2
    except InstrumentError as error:
        print(f"instrument: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (`| head`) has gone; point stdout elsewhere so that the interpreter's last flush does not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="instrument",
        description="Always-on instrumentation of inference services, selected by one profile.yaml.",
    )
    verbs = parser.add_subparsers(required=True, metavar="run | check | report")

    run = verbs.add_parser(
        "run",
        allow_abbrev=False,
        help="run a Python service under a profile",
        usage="instrument run [--profile P] -- script.py [argument ...] | -m module [argument ...]",
        description="The service runs as it would under `python`, with its own exit code and signals. Child processes "
        "that inherit the environment are instrumented too.",
    )
    run.add_argument("--profile", metavar="P", help="profile.yaml (default: the variable INSTRUMENT_PROFILE)")
    run.set_defaults(verb=_run, takes_host=True)

    check = verbs.add_parser(
        "check",
        help="load a profile, import what it names, show what each rule matches and what it cannot reach",
    )
    check.add_argument("profile", metavar="P")
    check.add_argument("modules", nargs="*", metavar="module", help="modules to import besides those the rules name")
    check.set_defaults(verb=_check, takes_host=False)

    report = verbs.add_parser("report", help="print the summary of a saved Chrome trace")
    report.add_argument("trace", metavar="FILE", help=".json or .json.gz, ours or another profiler's")
    report.add_argument("--tracer-option", choices=TRACER_OPTIONS, default="Default")
    report.add_argument("--state", choices=STATES, default="All")
    report.add_argument("--sorted-by", choices=SORT_KEYS, default="default")
    report.add_argument("--threads", choices=("both", "merged", "apart"), default="both")
    report.add_argument("--rows", type=_count, metavar="N", help="the N heaviest rows of each block (default: all)")
    report.set_defaults(verb=_report, takes_host=False)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: 1 or more")
    return int(text)


def _split(parser: argparse.ArgumentParser, given: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the host's command line.

    That begins after `--`, at `-m` or `-c`, or at the first word that is no option.
    """
    if given[:1] != ["run"]:
        return parser.parse_args(given), []
    own, host = given, []
    i = 1
    while i < len(given):
        word = given[i]
        if word == "--":
            own, host = given[:i], given[i + 1 :]
            break
        if word == "--profile":
            i += 2
            continue
        if word == "-h" or word.startswith("--"):
            i += 1  # ours, or a mistake for the parser to name
            continue
        own, host = given[:i], given[i:]
        break
    return parser.parse_args(own), host


# -------------------------------------------------------------------- verbs


def _run(options: argparse.Namespace, host: list[str]) -> int:
    wanted = options.profile or os.environ.get("INSTRUMENT_PROFILE")
    if not wanted:
        raise ProfileError(["instrument run: no profile; give --profile P or set INSTRUMENT_PROFILE"])
    if not host or host in (["-m"], ["-c"]):
        raise InstrumentError("run: nothing to run; give `-- script.py [argument ...]` or `-- -m module ...`")
    if not OFF:
        _refuse_what_cannot_work(load(wanted), host)  # a broken profile ends here, not in the service
    if not host[0].startswith("-") and not Path(host[0]).exists():
        raise InstrumentError(
            f"run: asked to run {host[0]!r}, found no such file in {Path.cwd()}; a module is run with -- -m {host[0]}"
        )
    environ = dict(os.environ)
    environ["INSTRUMENT_PROFILE"] = os.path.abspath(wanted)  # noqa: PTH100 - resolve() would follow links
    environ["INSTRUMENT_RUN_PID"] = str(os.getpid())
    paths = [str(Path(__file__).parent / "autostart"), *filter(None, [environ.get("PYTHONPATH")])]
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.stdout.flush()
    sys.stderr.flush()
    # Becoming the host, not calling it: its own __main__, exit code, signals and tracebacks.
    os.execve(sys.executable, [sys.executable, *_interpreter_flags(), *host], environ)  # noqa: S606 - no shell wanted


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


def _interpreter_flags() -> list[str]:
    """The options that this interpreter was started with and that matter to the host."""
    flags = [f"-W{option}" for option in sys.warnoptions]
    flags += [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items()]
    safe_path = getattr(sys.flags, "safe_path", False)
    for letter, value in (("B", sys.dont_write_bytecode), ("O", sys.flags.optimize), ("P", safe_path)):
        flags += [f"-{letter}"] * int(value)
    return flags


def _check(options: argparse.Namespace, host: list[str]) -> int:
    profile = load(options.profile)
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as `python -m` does
    from instrument import profiler
    from instrument.recorder import RECORDER

    verdicts = profiler.check(profile, options.modules)
    print(f"profile {profile.source}: service {profile.service}")
    for setting, origin in sorted(profile.origins.items()):
        value = _setting(profile, setting)
        if value is not None or origin != "default":
            print(f"  {setting} = {'not set' if value is None else value} (from {origin})")
    print(f"recorder: {'native' if RECORDER.native else 'pure Python'}")
    rules = {name: len(getattr(profile, name)) for name in ("functions", "layers", "copies", "frameworks")}
    print("rules: " + ", ".join(f"{count} {name}" for name, count in rules.items()))
    for verdict in verdicts:
        print(f"  {verdict}")
    missed = [verdict for verdict in verdicts if verdict.state == "nothing" or _never_imported(verdict, profile)]
    for verdict in missed:
        waits = verdict.state == "waiting"
        hint = "; name modules of it to import: instrument check P module ..." if waits else ""
        print(f"{profile.source}: {verdict}{hint}", file=sys.stderr)
    return 2 if missed else 0


def _never_imported(verdict: Any, profile: Profile) -> bool:
    """A function rule whose module nothing imported, though check imported all that was named."""
    return verdict.state == "waiting" and any(rule.text == verdict.rule for rule in profile.functions)


def _setting(profile: Profile, dotted: str) -> Any:
    value: Any = profile
    for part in dotted.split("."):
        value = getattr(value, part, getattr(value, f"{part}_ns", None))
    return value


def _report(options: argparse.Namespace, host: list[str]) -> int:
    from instrument import chrome
    from instrument.report.events import events

    trace, tally = chrome.load(options.trace)
    sys.stdout.write(
        events(
            tally,
            tracer_option=options.tracer_option,
            state=options.state,
            sorted_by=options.sorted_by,
            rows=options.rows,
            threads=options.threads,
            cost=trace.cost,
            losses=trace.losses,
            notes=trace.notes,
            window_ns=trace.end_ns - trace.start_ns,
            recorder=trace.origin.recorder,
        )
    )
    return 0
