"""`instrument check`: show which functions and layers a profile's rules match. It imports the modules that the profile
names, or runs a command."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections import Counter
from typing import Any

from instrument import native
from instrument.cli import print_json
from instrument.cli.interpreter import find_command, run_command
from instrument.cli.option_values import DEFAULT, WITHOUT_PROFILE, Verbs, choice_arguments, choose_profile_file
from instrument.device import cuda
from instrument.errors import InstrumentError
from instrument.instrumentors.verdict import STATES as STATES_OF_TARGETS
from instrument.instrumentors.verdict import Verdict, merge_verdicts, read_check_reports
from instrument.native import OFF
from instrument.otlp.sockets import find_proxy
from instrument.profile.keys import KEYS, get_setting, load
from instrument.profile.model import Profile
from instrument.profile.presets import PRESETS, read_preset
from instrument.profile.values import FOLLOWED
from instrument.runtime.environment import CHECK_FOLDER
from instrument.runtime.main_module import MAINS

_ATTACHED_SHOWN = 20


def add_verbs(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "check",
        help="check a profile, and show for each rule which functions and layers it matches",
        usage="instrument check [--json] [--strict] [P [module ...] | --preset NAME] [-- command [argument ...]]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Imports the modules that the profile names, and prints the state of each target (function, class\n"
        "or layer). With a command, check runs it as `instrument run` does, and prints the states in all\n"
        "of its processes. Exit code 2: a bad profile, or a rule that matches nothing.",
        epilog="states:\n" + "\n".join(f"  {state}: {meaning}" for state, meaning in STATES_OF_TARGETS.items()),
    )
    parser.add_argument("profile", metavar="P", nargs="?", help=f"path of the profile.yaml ({DEFAULT})")
    parser.add_argument(
        "--preset",
        **choice_arguments(PRESETS),
        help="print the YAML of a preset; with --json or a command, check it instead",
    )
    parser.add_argument("modules", nargs="*", metavar="module", help="more modules to import")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document; the output of the command goes to stderr"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a target is not recorded, or only partly")
    parser.set_defaults(verb=check)


def check(options: argparse.Namespace, host: list[str]) -> int:
    """Print the state of each target in the profile. Returns the exit code."""
    if native.WHY_MISSING:
        raise InstrumentError(f"check: no call can be recorded here: {native.WHY_MISSING}")
    if options.modules and host:
        raise InstrumentError("check: a command and modules to import exclude each other; remove one of them")
    path, is_unnamed = choose_profile_file(options)
    if options.preset and not host and not options.json:
        sys.stdout.write(read_preset(options.preset))
        return 0
    profile = load(path)
    problems: list[str] = []
    command: dict[str, Any] | None = None
    if host:
        verdicts, command = check_command(path, host, to_stderr=options.json)
    else:
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as `python -m` does
        from instrument.sessions import process

        verdicts, problems = process.check(profile, options.modules)
    if options.json:
        print_json(_make_document(profile, verdicts, command))
    else:
        if is_unnamed:
            print(WITHOUT_PROFILE)
        _print_check(profile, verdicts, command)
    for problem in problems:
        print(problem, file=sys.stderr)
    missed = [v for v in verdicts if v.state == "not found" or (not host and _is_never_imported(v, profile))]
    for verdict in missed:
        hint = "; name modules of it to import: instrument check P module ..." if verdict.state == "waiting" else ""
        if not (problems and "fails to import" in verdict.why):
            print(f"{profile.source}: {verdict}{hint}", file=sys.stderr)
    if missed or problems:
        return 2
    doubtful = {"partly", "unreachable", "compiled", "unmet", *(("waiting", "uncalled") if host else ())}
    return 1 if options.strict and any(verdict.state in doubtful for verdict in verdicts) else 0


def _is_never_imported(verdict: Verdict, profile: Profile) -> bool:
    """Return True if a rule still waits for a module, although `check` imports the modules that rules name."""
    texts = (text for rule in profile.functions if rule.text == verdict.rule for text in rule.match)
    return verdict.state == "waiting" and any(text.partition(":")[0] not in MAINS for text in texts)


def check_command(profile: str, host: list[str], *, to_stderr: bool) -> tuple[list[Verdict], dict[str, Any]]:
    """Run a command under `instrument run`. Return the verdicts of all processes, and facts for the JSON document."""
    if OFF:
        raise InstrumentError(f"check: the environment has {OFF}, so the command would not be instrumented; unset it")
    find_command("check", host)
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="instrument-check-", ignore_cleanup_errors=True) as folder:
        with run_command(profile, host, {CHECK_FOLDER: folder}, [], to_stderr=to_stderr) as child:
            code = child.wait()
        reports = read_check_reports(folder)
    if not reports:
        raise InstrumentError(
            f"check: the command ended with exit code {code} before any of its processes reported on the rules; let "
            "it run for a second, and end it by SIGTERM"
        )
    verdicts = merge_verdicts(Verdict(**facts) for report in reports for facts in report["verdicts"])
    processes = [{"pid": report["pid"], "calls": report["calls"]} for report in reports]
    return verdicts, {"words": host, "exit_code": code, "processes": processes}


def _make_document(profile: Profile, verdicts: list[Verdict], command: dict[str, Any] | None) -> dict[str, Any]:
    """Return the document of `check --json`. If a key is renamed or removed, the number in `format` must be raised."""
    rules = [(family, rule) for family in ("functions", "layers", "copies") for rule in getattr(profile, family)]
    targets: dict[str, list[dict[str, Any]]] = {}
    for verdict in verdicts:
        facts = verdict.fields_as_json()
        targets.setdefault(facts.pop("rule"), []).append(facts)
    return {
        "format": 1,
        "profile": {"source": profile.source, "service": _name_of_service(profile), "digest": profile.digest},
        "settings": [
            {"setting": name, "value": value, "from": origin} for name, value, origin in _list_settings(profile)
        ],
        "remarks": list(profile.remarks),
        "exports": [name for name in KEYS["export"] if getattr(profile.export, name) is not None],
        "recorder": {"kind": "native", "why_not_native": ""},
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "device": cuda.find_versions() if _asks_for_device_time(profile) else None,
        "nvml": {"why_not_read": _explain_unread_gpu_gauges(profile)},
        "dataset": {"why_not_written": _explain_missing_dataset(profile)},
        "rules": [
            {"family": family, "rule": rule.text, "line": rule.line, "targets": targets.get(rule.text, [])}
            for family, rule in rules
        ],
        "command": command,
    }


def _print_check(profile: Profile, verdicts: list[Verdict], command: dict[str, Any] | None) -> None:
    print(f"profile {profile.source}: service {_name_of_service(profile)}, digest {profile.digest}")
    if profile.exports_nothing:
        from instrument.sessions.process import NO_EXPORT

        print(f"  {NO_EXPORT}")
    for remark in profile.remarks:
        print(f"  {remark}")
    for name, value, origin in _list_settings(profile):
        print(f"  {name} = {'not set' if value is None else value} (from {origin})")
    print(f"Python {platform.python_version()}")
    if _asks_for_device_time(profile):
        print(f"device: {_describe_device(cuda.find_versions())}")
    why = _explain_unread_gpu_gauges(profile)
    print(f"gauges of GPUs: {f'not read ({why})' if why else 'read'}")
    if why := _explain_missing_dataset(profile):
        print(f"export.parquet: {why}")
    if command is not None:
        count = len(command["processes"])
        print(f"command: exit code {command['exit_code']}, {count} process{'es' * (count > 1)} reported")
    print(f"rules: {len(profile.functions)} functions, {len(profile.layers)} layers, {len(profile.copies)} copies")
    shown: Counter[tuple[str, str]] = Counter()
    for verdict in verdicts:
        shown[verdict.rule, verdict.state] += 1
        if verdict.state != "attached" or shown[verdict.rule, verdict.state] <= _ATTACHED_SHOWN:
            print(f"  {verdict}")
    for (rule, state), count in shown.items():
        if state == "attached" and count > _ATTACHED_SHOWN:
            print(f"  {rule}: attached ({count - _ATTACHED_SHOWN} more; --json shows all)")


def _asks_for_device_time(profile: Profile) -> bool:
    if profile.device.cuda == "off" or profile.state == "CPU":
        return False
    return bool(profile.copies) or any(rule.device for rules in (profile.functions, profile.layers) for rule in rules)


def _describe_device(versions: dict[str, str]) -> str:
    if versions["rocm"]:
        return f"torch {versions['rocm']}, timed by its own events"
    driver = f"driver for CUDA {versions['driver']}" if versions["driver"] else ""
    bindings = f"cuda-bindings {versions['bindings']}" if driver and versions["bindings"] else ""
    return "; ".join(filter(None, [", ".join(filter(None, [driver, bindings])), versions["problem"]]))


def _explain_unread_gpu_gauges(profile: Profile) -> str:
    from instrument.device import gpu_gauges

    return "device.nvml is off" if profile.device.nvml_ns is None else gpu_gauges.explain_unreadable_gpus()


def _explain_missing_dataset(profile: Profile) -> str:
    if profile.export.parquet is None:
        return ""
    from instrument.trace.dataset_files import Folder

    try:
        return Folder(profile.export.parquet.path).explain_unwritable()
    except InstrumentError as problem:
        return str(problem)


def _name_of_service(profile: Profile) -> str:
    return profile.shown.get("service", profile.service)


def _list_settings(profile: Profile) -> list[tuple[str, Any, str]]:
    """Return the settings that environment variables can set, with their values and sources. Values of headers are left
    out."""
    settings = []
    for name, origin in sorted(profile.origins.items()):
        value = get_setting(profile, name)
        if name.endswith(".headers"):
            value = [header for header, _ in value or ()]
        elif value is not None or origin == "preset":
            value = profile.shown.get(name, value)
        if value is not None or origin != "default":
            settings.append((name, value, origin))
    for variable, (name, _) in FOLLOWED.items():
        is_followed = profile.export.otlp is not None or (variable == "OTEL_PROPAGATORS" and profile.requests)
        if is_followed and (text := os.environ.get(variable)):
            # Of attributes by name alone, as of headers.
            names = [part.partition("=")[0].strip() for part in text.split(",")]
            settings.append((name, ", ".join(filter(None, names)), variable))
    collector = profile.export.otlp
    if collector is not None and collector.protocol != "grpc" and (proxy := find_proxy(collector.endpoint)) is not None:
        settings.append(("proxy", proxy.address, proxy.variable))
    return settings
