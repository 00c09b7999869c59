"""The `instrument` command: run a service under a profile, check or reload a profile, report on a saved trace.

The only place that turns errors into exit codes: 0, 2 for errors of ours (bad profile, bad trace, a rule that matches
nothing), 1 where a gate said no, else the host's own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from instrument import __version__, board, environment, hello, native
from instrument.control import WAIT_S, Answer, Request, folder_of, sockets, tell
from instrument.device import cuda
from instrument.document import nearest
from instrument.errors import InstrumentError, ProfileError
from instrument.main_module import MAINS
from instrument.memory_limit import within_memory
from instrument.presets import PRESETS, path_of, text_of
from instrument.probes.scopes import OFF
from instrument.probes.verdict import CHECK_FOLDER, Verdict, over_processes, reports_to_check
from instrument.probes.verdict import STATES as STATES_OF_TARGETS
from instrument.profile import SORT_KEYS, STATES, TRACER_OPTIONS, VIEWS, Profile
from instrument.report.view import THREADS, UNITS
from instrument.schema import BESIDE, KEYS, SIZE_UNITS, load, setting

ATTACHED_SHOWN = 20
"""The most targets of a rule that `check` shows line by line where all is well."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command. Returns the exit code; `run` does not return, it becomes the host."""
    parser = _parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options, host = _split(parser, given)
        code: int = options.verb(options, host)
        _flush(sys.stdout)
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


def _flush(stream: TextIO | None) -> None:
    if stream is not None:  # as it is where a daemon was started with it closed
        stream.flush()


_DEFAULT = f"default: the variable INSTRUMENT_PROFILE, else the preset {PRESETS[0]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="instrument",
        description="Always-on instrumentation of inference services, selected by one profile.yaml.",
    )
    parser.add_argument("--version", action="version", version=f"instrument {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="run | check | reload | report")

    run = verbs.add_parser(
        "run",
        allow_abbrev=False,
        help="run a Python service under a profile",
        usage="instrument run [--profile P | --preset NAME] -- script.py [argument ...] | -m module [argument ...]",
        description="The service runs as it would under `python`, with its own exit code and signals. Child processes "
        f"that inherit the environment are instrumented too. Without a profile the preset {PRESETS[0]} is taken.",
    )
    run.add_argument("--profile", metavar="P", help=f"profile.yaml ({_DEFAULT})")
    run.add_argument("--preset", choices=PRESETS, help="a profile that comes with the package")
    run.set_defaults(verb=_run, takes_host=True)

    check = verbs.add_parser(
        "check",
        help="load a profile, import what it names, show what each rule matches and what it cannot reach",
        usage="instrument check [--json] [--strict] [P [module ...] | --preset NAME] "
        "[-- script.py [argument ...] | -- -m module ...]",
        description="With a command it runs as under `instrument run`, and what is shown is what became of the rules "
        "at its end, in all of its processes. States: "
        + "; ".join(f"{state}: {meaning}" for state, meaning in STATES_OF_TARGETS.items())
        + ". Exit code 2: a bad profile, or a rule that matches nothing.",
    )
    check.add_argument("profile", metavar="P", nargs="?", help=f"profile.yaml ({_DEFAULT})")
    check.add_argument(
        "--preset", choices=PRESETS, help="print the YAML of a preset; with --json or a command, check it instead"
    )
    check.add_argument("modules", nargs="*", metavar="module", help="modules to import besides those the rules name")
    check.add_argument(
        "--json", action="store_true", help="one JSON document; the command's output goes to stderr then"
    )
    check.add_argument(
        "--strict", action="store_true", help="exit code 1 where a target is not observed in full, or not at all"
    )
    check.set_defaults(verb=_check, takes_host=False)

    reload = verbs.add_parser(
        "reload",
        help="tell running processes to go over to a changed profile",
        description="Tells every process that listens (the profile's `control.socket`) and prints what each answers. "
        "With P, only processes that run that very file follow; others that listen are named and left alone. "
        "Exit code 0: all follow; 1: a process has not answered in time, or keeps a setting until it is restarted; "
        "2: the profile was refused, or there is nobody to tell.",
    )
    reload.add_argument(
        "profile", nargs="?", metavar="P", help="the profile.yaml that has changed (default: each its own)"
    )
    reload.add_argument(
        "--pid", type=int, metavar="N", help="tell this process alone; P may be another file of its service then"
    )
    reload.add_argument(
        "--socket",
        metavar="PATH",
        help="the socket, or the folder of sockets (default: what P or INSTRUMENT_PROFILE says, else `auto`)",
    )
    reload.add_argument(
        "--wait", type=_seconds, default=WAIT_S, metavar="S", help=f"the longest, for the answers (default: {WAIT_S:g})"
    )
    reload.set_defaults(verb=_reload, takes_host=False)

    report = verbs.add_parser(
        "report",
        help="print the summary of a saved Chrome trace",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="views:\n" + "\n".join(f"  {view:<12}  {shows}" for view, shows in VIEWS.items()),
    )
    report.add_argument("trace", metavar="FILE", help=".json or .json.gz, ours or another profiler's")
    report.add_argument(
        "--with",
        dest="beside",
        metavar="FILE",
        help="a trace that torch.profiler saved of the same time: its kernels, allocations and FLOPs beside our spans",
    )
    report.add_argument(
        "--view",
        action="extend",
        type=_views,
        metavar="V[,V]",
        help="which reports, in this order (default: brief, or events where --tracer-option or --threads is given)",
    )
    report.add_argument("--tracer-option", choices=TRACER_OPTIONS, help="default: Default")
    report.add_argument("--state", choices=STATES, default="All")
    report.add_argument("--sorted-by", choices=SORT_KEYS, default="default")
    report.add_argument("--threads", choices=THREADS, help="tables of all, of each, or both (default: both)")
    report.add_argument("--rows", type=_count, metavar="N", help="the N heaviest rows of each table (default: all)")
    report.add_argument(
        "--least", type=_time_ns, default=0, metavar="T", help="leave out rows with less time, such as 50us"
    )
    report.add_argument(
        "--skip-first", type=_whole, default=0, metavar="N", help="iterations to leave out of means over iterations"
    )
    report.add_argument("--unit", choices=tuple(UNITS), default="ms", help="of times in text (default: ms)")
    report.add_argument("--json", action="store_true", help="the same numbers as one JSON document, times in ns")
    report.add_argument(
        "--memory",
        type=_size_bytes,
        metavar="SIZE",
        help="the most to use, such as 2GiB (default: 500MB, and more for files that are large themselves)",
    )
    report.add_argument("--corrected", action="store_true", help="self times, less what the probes below them cost")
    report.set_defaults(verb=_report, takes_host=False)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: 1 or more")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: 0 or more")
    return int(text)


def _time_ns(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ns|us|ms|s)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a number and one of ns, us, ms, s, such as 50us")
    return round(float(found[1]) * UNITS[found[2]])


def _size_bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([A-Za-z]+)", text)
    if not found or found[2] not in SIZE_UNITS:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a number and one of {' '.join(SIZE_UNITS)}")
    return round(float(found[1]) * SIZE_UNITS[found[2]])


def _views(text: str) -> list[str]:
    views = text.split(",")
    for view in views:
        if view not in VIEWS:
            meant = nearest(view, VIEWS)
            hint = f"; nearest is {meant}" if meant else ""
            raise argparse.ArgumentTypeError(f"found {view!r}; allowed: {', '.join(VIEWS)}{hint}")
    return views


def _seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]+)?", text):
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a number of seconds")
    return float(text)


def _split(parser: argparse.ArgumentParser, given: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the host's command line.

    That begins after `--`, at `-m` or `-c`, or at the first word that is no option.
    """
    if given[:1] == ["check"] and "--" in given:
        at = given.index("--")
        if not given[at + 1 :]:
            raise InstrumentError("check: nothing to run after --; give script.py [argument ...] or -m module ...")
        return parser.parse_args(given[:at]), given[at + 1 :]
    if given[:1] != ["run"]:
        return parser.parse_args(given), []
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
    return parser.parse_args(own), host


# -------------------------------------------------------------------- verbs

_WITHOUT_PROFILE = (
    f"no profile, so the preset {PRESETS[0]} (`instrument check --preset {PRESETS[0]}` prints it; "
    f"for training loops: --preset {PRESETS[1]})"
)


def _wanted(options: argparse.Namespace) -> tuple[str, bool]:
    """The file of the profile that `run` or `check` is to take, and whether nobody has named one."""
    if options.profile and options.preset:
        raise InstrumentError(
            f"found both the profile {options.profile} and --preset {options.preset}; give one of them, or put the "
            f"line `preset: {options.preset}` into the profile"
        )
    named = path_of(options.preset) if options.preset else options.profile or os.environ.get("INSTRUMENT_PROFILE")
    return named or path_of(PRESETS[0]), not named


def _run(options: argparse.Namespace, host: list[str]) -> int:
    wanted, is_unnamed = _wanted(options)
    if not host or host in (["-m"], ["-c"]):
        raise InstrumentError("run: nothing to run; give `-- script.py [argument ...]` or `-- -m module ...`")
    if not OFF:
        _refuse_what_cannot_work(load(wanted), host)  # a broken profile ends here, not in the service
    if not host[0].startswith("-"):
        _refuse_what_is_no_script(host[0])
    environ = _environment_of_host()
    environ["INSTRUMENT_PROFILE"] = os.path.abspath(wanted)  # noqa: PTH100 - resolve() would follow links
    environ["INSTRUMENT_RUN_PID"] = str(os.getpid())
    environ.pop(board.VARIABLE, None)
    paths = [str(Path(__file__).parent / "autostart"), *filter(None, [environ.get("PYTHONPATH")])]
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    if not OFF:
        hello.listen(os.getpid())
    if is_unnamed and not OFF:
        print(f"instrument: {_WITHOUT_PROFILE}", file=sys.stderr)
    _flush(sys.stdout)
    _flush(sys.stderr)
    # Becoming the host, not calling it: its own __main__, exit code, signals and tracebacks.
    os.execve(sys.executable, [sys.executable, *_interpreter_flags(), *host], environ)  # noqa: S606 - no shell wanted


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


def _interpreter_flags() -> list[str]:
    """The options that this interpreter was started with and that matter to the host."""
    flags = [f"-W{option}" for option in sys.warnoptions]
    flags += [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items()]
    safe_path = getattr(sys.flags, "safe_path", False)
    for letter, value in (("B", sys.dont_write_bytecode), ("O", sys.flags.optimize), ("P", safe_path)):
        flags += [f"-{letter}"] * int(value)
    return flags


def _check(options: argparse.Namespace, host: list[str]) -> int:
    if options.modules and host:
        raise InstrumentError("check: modules are imported where there is no command; leave one of both out")
    wanted, is_unnamed = _wanted(options)
    if options.preset and not host and not options.json:
        sys.stdout.write(text_of(options.preset))
        return 0
    profile = load(wanted)
    problems: list[str] = []
    command: dict[str, Any] | None = None
    if host:
        verdicts, command = _verdicts_of(wanted, host, to_stderr=options.json)
    else:
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as `python -m` does
        from instrument import process

        verdicts, problems = process.check(profile, options.modules)
    if options.json:
        print(json.dumps(_document(profile, verdicts, command), indent=2))
    else:
        if is_unnamed:
            print(_WITHOUT_PROFILE)
        _print_verdicts(profile, verdicts, command)
    for problem in problems:
        print(problem, file=sys.stderr)
    missed = [v for v in verdicts if v.state == "not found" or (not host and _never_imported(v, profile))]
    for verdict in missed:
        hint = "; name modules of it to import: instrument check P module ..." if verdict.state == "waiting" else ""
        if not (problems and "fails to import" in verdict.why):
            print(f"{profile.source}: {verdict}{hint}", file=sys.stderr)
    if missed or problems:
        return 2
    doubtful = {"partly", "unreachable", "compiled", *(("waiting", "uncalled") if host else ())}
    return 1 if options.strict and any(verdict.state in doubtful for verdict in verdicts) else 0


def _verdicts_of(profile: str, host: list[str], *, to_stderr: bool) -> tuple[list[Verdict], dict[str, Any]]:
    """Run a command as `instrument run` does; what its processes say that became of the rules."""
    if OFF:
        raise InstrumentError("check: INSTRUMENT=off, so nothing of the command would be instrumented; unset it")
    from tempfile import TemporaryDirectory

    words = [sys.executable, *_interpreter_flags(), "-m", "instrument", "run", "--profile", profile, "--", *host]
    with TemporaryDirectory(prefix="instrument-check-") as folder:
        sys.stdout.flush()
        child = subprocess.Popen(  # noqa: S603 - the user's own command
            words, env={**os.environ, CHECK_FOLDER: folder}, stdout=sys.stderr.fileno() if to_stderr else None
        )
        # A terminal's Ctrl-C reaches the command by itself; what is sent to us alone is handed on.
        before = {
            number: signal.signal(
                number, lambda number, _: None if number == signal.SIGINT else child.send_signal(number)
            )
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        try:
            code = child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        reports = reports_to_check(folder)
    if not reports:
        raise InstrumentError(
            f"check: the command ended with exit code {code} and no process of it told what became of the rules; one "
            "that is killed, or ends by os._exit, cannot"
        )
    verdicts = over_processes(Verdict(**facts) for report in reports for facts in report["verdicts"])
    processes = [{"pid": report["pid"], "calls": report["calls"]} for report in reports]
    return verdicts, {"words": host, "exit_code": code, "processes": processes}


def _document(profile: Profile, verdicts: list[Verdict], command: dict[str, Any] | None) -> dict[str, Any]:
    """What `check --json` prints. Keys may be added, never renamed or taken away while `format` stays."""
    rules = [(family, rule) for family in ("functions", "layers", "copies") for rule in getattr(profile, family)]
    targets: dict[str, list[dict[str, Any]]] = {}
    for verdict in verdicts:
        facts = verdict.facts()
        targets.setdefault(facts.pop("rule"), []).append(facts)
    return {
        "format": 1,
        "profile": {"source": profile.source, "service": _service_told(profile), "digest": profile.digest},
        "settings": [
            {"setting": name, "value": value, "from": origin} for name, value, origin in _settings_of(profile)
        ],
        "exports": [name for name in KEYS["export"] if getattr(profile.export, name) is not None],
        "recorder": _native_or_pure("recorder"),
        "traces": _native_or_pure("traces"),
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "device": cuda.found() if _asks_for_device_time(profile) else None,
        "nvml": {"why_not_read": _why_no_gpu(profile)},
        "rules": [
            {"family": family, "rule": rule.text, "line": rule.line, "targets": targets.get(rule.text, [])}
            for family, rule in rules
        ],
        "command": command,
    }


def _print_verdicts(profile: Profile, verdicts: list[Verdict], command: dict[str, Any] | None) -> None:
    print(f"profile {profile.source}: service {_service_told(profile)}, digest {profile.digest}")
    if profile.export.is_empty:
        from instrument.process import NO_EXPORT

        print(f"  {NO_EXPORT}")
    for name, value, origin in _settings_of(profile):
        print(f"  {name} = {'not set' if value is None else value} (from {origin})")
    print(f"{_twins_line()}, Python {platform.python_version()}")
    if _asks_for_device_time(profile):
        print(f"device: {_device_line(cuda.found())}")
    why = _why_no_gpu(profile)
    print(f"gauges of GPUs: {f'not read ({why})' if why else 'read'}")
    if command is not None:
        count = len(command["processes"])
        print(f"command: exit code {command['exit_code']}, {count} process{'es' * (count > 1)} reported")
    print(f"rules: {len(profile.functions)} functions, {len(profile.layers)} layers, {len(profile.copies)} copies")
    shown: Counter[tuple[str, str]] = Counter()
    for verdict in verdicts:
        shown[verdict.rule, verdict.state] += 1
        if verdict.state != "attached" or shown[verdict.rule, verdict.state] <= ATTACHED_SHOWN:
            print(f"  {verdict}")
    for (rule, state), count in shown.items():
        if state == "attached" and count > ATTACHED_SHOWN:
            print(f"  {rule}: attached ({count - ATTACHED_SHOWN} more; --json shows all)")


def _asks_for_device_time(profile: Profile) -> bool:
    if profile.device.cuda == "off" or profile.state == "CPU":
        return False
    asks = [rule.device for rule in profile.functions] + [rule.device for rule in profile.layers]
    return any(asks) or bool(profile.copies)


def _device_line(found: dict[str, str]) -> str:
    if found["rocm"]:
        return f"torch {found['rocm']}, timed by its own events"
    driver = f"driver for CUDA {found['driver']}" if found["driver"] else ""
    bindings = f"cuda-bindings {found['bindings']}" if driver and found["bindings"] else ""
    return "; ".join(filter(None, [", ".join(filter(None, [driver, bindings])), found["problem"]]))


def _native_or_pure(part: str) -> dict[str, str]:
    """Whether the recorder, or what reads and writes traces, runs in C, and why not."""
    missing = native.why_missing()
    why = "; ".join(
        dict.fromkeys(why for name, why in missing.items() if (name == "_recorder") == (part == "recorder"))
    )
    return {"kind": "pure" if why else "native", "why_not_native": why}


def _twins_line() -> str:
    """Which twins are in use, in one word where they were built together as they should be."""
    recorder, traces = (_native_or_pure(part) for part in ("recorder", "traces"))
    shown = [
        f"{part}: native" if facts["kind"] == "native" else f"{part}: pure Python ({facts['why_not_native']})"
        for part, facts in (("recorder", recorder), ("traces", traces))
    ]
    return ", ".join(shown[:1] if traces == recorder or recorder["kind"] == traces["kind"] else shown)


def _why_no_gpu(profile: Profile) -> str:
    """Why the gauges of GPUs are not read on this machine, "" where they are."""
    from instrument.device import nvml

    return "device.nvml is off" if profile.device.nvml_ns is None else nvml.reason_against()


def _never_imported(verdict: Verdict, profile: Profile) -> bool:
    """A function rule whose module nothing imported, though check imported all that was named."""
    rules = [rule for rule in profile.functions if rule.text == verdict.rule]
    return verdict.state == "waiting" and any(
        text.partition(":")[0] not in MAINS for rule in rules for text in rule.match
    )


def _service_told(profile: Profile) -> str:
    return profile.told.get("service", profile.service)


def _settings_of(profile: Profile) -> list[tuple[str, Any, str]]:
    """Each setting that a variable can give, where it is on: its value, and who gave it. Headers by name alone."""
    found = []
    for name, origin in sorted(profile.origins.items()):
        value = setting(profile, name)
        if name.endswith(".headers"):
            value = [header for header, _ in value or ()]
        elif value is not None or origin == "preset":
            value = profile.told.get(name, value)
        if value is not None or origin != "default":
            found.append((name, value, origin))
    for variable, name in BESIDE.items():
        is_followed = profile.export.otlp is not None or (variable == "OTEL_PROPAGATORS" and profile.requests)
        if is_followed and (text := os.environ.get(variable)):
            # Of attributes by name alone, as of headers.
            names = [part.partition("=")[0].strip() for part in text.split(",")]
            found.append((name, ", ".join(filter(None, names)), variable))
    return found


def _reload(options: argparse.Namespace, host: list[str]) -> int:
    known = options.profile or os.environ.get("INSTRUMENT_PROFILE")
    profile = load(known) if known else Profile()  # a broken profile ends here, not in the service
    where = Path(options.socket) if options.socket else folder_of(profile.control.socket or "auto", Path.cwd())
    paths = [where] if where.is_socket() else sockets(where)
    if options.pid is not None:
        paths = [path for path in paths if path.stem == str(options.pid)]
    request = Request()
    if options.profile:
        # What the file does not say itself may be said otherwise to a process; a variable here tells which is meant.
        service = profile.service if profile.origins.get("service") == "OTEL_SERVICE_NAME" else None
        request = Request(str(Path(options.profile).absolute()), service, switch=options.pid is not None)
    answers = tell(paths, request, options.wait, lambda slow: _say_who_is_slow(slow, options.wait))
    others = {path: str(answer["other"]) for path, answer in answers.items() if answer and answer.get("other")}
    for path, other in others.items():
        hint = "" if request.switch else f"; --pid {path.stem} gives it another file of its service"
        print(f"{path.stem}: left alone: {other}{hint}")
        del answers[path]
    if not answers:
        asked = "a process" if options.pid is None else f"process {options.pid}"
        if others:
            raise InstrumentError(
                f"reload: asked for {asked} that runs {options.profile}, found only others in {where}, named above"
            )
        raise InstrumentError(
            f"reload: asked for {asked} that listens in {where}, found none; the running profile needs "
            "`control: {socket: ...}`, and --socket names its folder"
        )
    for path, answer in answers.items():
        print(f"{path.stem}: {_told(answer, options.wait)}")
    silent = [path.stem for path, answer in answers.items() if answer is None]
    if silent:
        names = ", ".join(silent)
        print(
            f"instrument: reload: no answer yet after {options.wait:g} s from {names}; --wait S gives more time",
            file=sys.stderr,
        )
    if any(answer and answer.get("error") for answer in answers.values()):
        return 2
    return 1 if silent or any(answer and answer.get("refused") for answer in answers.values()) else 0


def _say_who_is_slow(paths: Sequence[Path], wait_s: float) -> None:
    names = ", ".join(path.stem for path in paths)
    print(f"instrument: reload: no answer yet from {names}; waiting up to {wait_s:g} s", file=sys.stderr)


def _told(answer: Answer | None, waited_s: float) -> str:
    if answer is None:
        return f"no answer yet after {waited_s:g} s; it goes over when it comes to read what was asked"
    state = f"generation {answer.get('generation')} ({answer.get('digest')})"
    if answer.get("error"):
        return f"{state} stays in force: {answer['error']}"
    parts = [f"{word} {', '.join(map(str, answer[word]))}" for word in ("attached", "undone") if answer.get(word)] or [
        "no probe changed"
    ]
    return "; ".join([state, *parts, *map(str, answer.get("refused", ()))])


@contextmanager
def _without_collector() -> Iterator[None]:
    """Spans and rows are no cycles: to look for some each time that there are more takes a fifth of a report's time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_without_collector()
def _report(options: argparse.Namespace, host: list[str]) -> int:
    files = [options.trace, *filter(None, [options.beside])]
    with within_memory(files, options.memory):
        return _reported(options)


def _reported(options: argparse.Namespace) -> int:
    from instrument import chrome
    from instrument.report.summary import summary, summary_document, views_for
    from instrument.report.view import Options, Recording

    trace, make_tally = chrome.read(options.trace)
    if options.beside:
        trace = chrome.join(trace, chrome.read(options.beside)[0])
    recording = Recording.of_trace(trace, make_tally)
    given = {
        "tracer_option": options.tracer_option,
        "state": options.state,
        "sorted_by": options.sorted_by,
        "rows": options.rows,
        "threads": options.threads,
        "corrected": options.corrected,
        "least_ns": options.least,
        "skip_first": options.skip_first,
        "unit": options.unit,
    }
    views, asked = options.view or views_for(given), Options.of(given)
    if options.json:
        json.dump(summary_document(views, recording, asked), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        sys.stdout.write(summary(views, recording, asked))
    return 0
