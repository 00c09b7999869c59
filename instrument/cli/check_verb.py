"""`instrument check`: what the rules of a profile match, here or in the processes of a command."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from instrument import native
from instrument.cli.check_facts import facts_document, print_verdicts
from instrument.cli.interpreter import host_of, running
from instrument.cli.option_values import Verbs, one_of
from instrument.cli.wanted_profile import DEFAULT, WITHOUT_PROFILE, wanted
from instrument.errors import InstrumentError
from instrument.instrumentors.verdict import CHECK_FOLDER, Verdict, over_processes, reports_to_check
from instrument.instrumentors.verdict import STATES as STATES_OF_TARGETS
from instrument.profile.keys import load
from instrument.profile.model import Profile
from instrument.profile.presets import PRESETS, text_of
from instrument.recorder.scopes import OFF
from instrument.runtime.main_module import MAINS


def add(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "check",
        help="load a profile, import what it names, show what each rule matches and what it cannot reach",
        usage="instrument check [--json] [--strict] [P [module ...] | --preset NAME] [-- command [argument ...]]",
        description="With a command it runs as under `instrument run`, and what is shown is what became of the rules "
        "at its end, in all of its processes. States: "
        + "; ".join(f"{state}: {meaning}" for state, meaning in STATES_OF_TARGETS.items())
        + ". Exit code 2: a bad profile, or a rule that matches nothing.",
    )
    parser.add_argument("profile", metavar="P", nargs="?", help=f"profile.yaml ({DEFAULT})")
    parser.add_argument(
        "--preset", **one_of(PRESETS), help="print the YAML of a preset; with --json or a command, check it instead"
    )
    parser.add_argument("modules", nargs="*", metavar="module", help="modules to import besides those the rules name")
    parser.add_argument(
        "--json", action="store_true", help="one JSON document; the command's output goes to stderr then"
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit code 1 where a target is not observed in full, or not at all"
    )
    parser.set_defaults(verb=check)


def check(options: argparse.Namespace, host: list[str]) -> int:
    """Show what became of each rule. Returns the exit code."""
    if native.WHY_MISSING:
        raise InstrumentError(f"check: nothing can be recorded here: {native.WHY_MISSING}")
    if options.modules and host:
        raise InstrumentError("check: modules are imported where there is no command; leave one of both out")
    path, is_unnamed = wanted(options)
    if options.preset and not host and not options.json:
        sys.stdout.write(text_of(options.preset))
        return 0
    profile = load(path)
    problems: list[str] = []
    command: dict[str, Any] | None = None
    if host:
        verdicts, command = verdicts_of(path, host, to_stderr=options.json)
    else:
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as `python -m` does
        from instrument.sessions import process

        verdicts, problems = process.check(profile, options.modules)
    if options.json:
        print(json.dumps(facts_document(profile, verdicts, command), indent=2))
    else:
        if is_unnamed:
            print(WITHOUT_PROFILE)
        print_verdicts(profile, verdicts, command)
    for problem in problems:
        print(problem, file=sys.stderr)
    missed = [v for v in verdicts if v.state == "not found" or (not host and _never_imported(v, profile))]
    for verdict in missed:
        hint = "; name modules of it to import: instrument check P module ..." if verdict.state == "waiting" else ""
        if not (problems and "fails to import" in verdict.why):
            print(f"{profile.source}: {verdict}{hint}", file=sys.stderr)
    if missed or problems:
        return 2
    doubtful = {"partly", "unreachable", "compiled", "unmet", *(("waiting", "uncalled") if host else ())}
    return 1 if options.strict and any(verdict.state in doubtful for verdict in verdicts) else 0


def _never_imported(verdict: Verdict, profile: Profile) -> bool:
    """A function rule whose module nothing imported, though check imported all that was named."""
    rules = [rule for rule in profile.functions if rule.text == verdict.rule]
    return verdict.state == "waiting" and any(
        text.partition(":")[0] not in MAINS for rule in rules for text in rule.match
    )


def verdicts_of(profile: str, host: list[str], *, to_stderr: bool) -> tuple[list[Verdict], dict[str, Any]]:
    """Run a command as `instrument run` does; what its processes say that became of the rules."""
    if OFF:
        raise InstrumentError(f"check: nothing of the command would be instrumented: {OFF}; unset it")
    host_of("check", host)
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="instrument-check-") as folder:
        with running(profile, host, {CHECK_FOLDER: folder}, [], to_stderr=to_stderr) as child:
            code = child.wait()
        reports = reports_to_check(folder)
    if not reports:
        raise InstrumentError(
            f"check: the command ended with exit code {code} and no process of it told what became of the rules; one "
            "that is killed or ends by os._exit before it has recorded for a second cannot"
        )
    verdicts = over_processes(Verdict(**facts) for report in reports for facts in report["verdicts"])
    processes = [{"pid": report["pid"], "calls": report["calls"]} for report in reports]
    return verdicts, {"words": host, "exit_code": code, "processes": processes}
