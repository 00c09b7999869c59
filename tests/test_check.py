"""`instrument check`: a verdict for every target, before a service runs and after a command has run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.instrumentors.selection import Selection
from instrument.instrumentors.verdict import STATES, Verdict, merge_verdicts
from instrument.profile.keys import loads
from instrument.profile.values import FOLLOWED, VARIABLES

SERVICE = """
import itertools

HELD = {}

def register(function):
    HELD["route"] = itertools.repeat(function)  # an object made in C: what it holds cannot be changed
    return function

def busy(x): return x + 1
def idle(x): return x

@register
def routed(x): return x

class Engine:
    limit = 7
    def step(self, x): return busy(x)
    def rest(self, x): return x
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a service and no variable that matters."""
    monkeypatch.chdir(tmp_path)
    for name in ("INSTRUMENT_PROFILE", "INSTRUMENT", "INSTRUMENT_RUN_PID", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    write("checked.py", SERVICE)
    return tmp_path


def write(name: str, text: str) -> Path:
    Path(name).write_text(textwrap.dedent(text))
    return Path(name)


def check(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "instrument", "check", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **environ},
    )


def states(text: str) -> dict[str, str]:
    """Return the state by target that `check` printed, or by rule if it names no target."""
    lines = [line.strip() for line in text.partition("rules: ")[2].splitlines()[1:]]
    parts = [line.partition(" (")[0].rpartition(": ") for line in lines]
    return {subject: state for subject, _, state in parts}


PROFILE = """
functions:
  - {match: "checked:busy"}
  - {match: ["checked:idle", "checked:Engine.rest"]}
  - {match: "checked:Engine.limit"}
  - {match: "absent_package.*:f"}
"""


def test_each_target_has_one_of_the_states_that_are_documented() -> None:
    write("p.yaml", PROFILE)
    done = check("p.yaml")
    assert done.returncode == 2  # nothing imports what the last rule could mean
    assert states(done.stdout) == {
        "checked:busy": "attached",
        "checked:idle, checked:Engine.rest: checked:idle": "attached",
        "checked:idle, checked:Engine.rest: checked:Engine.rest": "attached",
        "checked:Engine.limit": "unreachable",
        "absent_package.*:f": "waiting",
    }
    assert set(states(done.stdout).values()) <= set(STATES)
    help_text = " ".join(check("--help").stdout.split())
    for state, meaning in STATES.items():
        assert f"{state}: {meaning}" in help_text


MAIN = """
import os, sys
import checked
print("to stdout", *sys.argv[1:])
print("to stderr", file=sys.stderr)
child = os.fork()
checked.busy(1) if child else [checked.busy(1), checked.Engine().rest(1)]
if child:
    os.waitpid(child, 0)
    next(checked.HELD["route"])(1)
sys.exit(3 if child else 0)
"""


@pytest.mark.slow
def test_a_command_runs_as_it_would_and_its_processes_report_what_was_called() -> None:
    write("p.yaml", 'functions: [{match: "checked:**"}, {match: "json.tool:main"}]\nexport: {summary: {to: s.txt}}')
    write("main.py", MAIN)
    done = check("p.yaml", "--", "main.py", "--json", "x")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == "to stdout --json x"
    assert done.stderr == "to stderr\n"
    assert "command: exit code 3, 2 processes reported" in done.stdout
    assert "checked:**: checked:busy: attached (2 calls)" in done.stdout
    assert states(done.stdout) == {
        "checked:**: checked:register": "uncalled",
        "checked:**: checked:busy": "attached",
        "checked:**: checked:idle": "uncalled",
        "checked:**: checked:routed": "partly",
        "checked:**: checked:Engine.step": "uncalled",
        "checked:**: checked:Engine.rest": "attached",
        "json.tool:main": "waiting",
    }
    assert "Summary of " in Path("s.txt").read_text()
    assert check("p.yaml", "--strict", "--", "main.py").returncode == 1


def test_a_call_that_has_not_ended_is_a_call() -> None:
    write("p.yaml", 'functions: [{match: "serving:serve"}]')
    write(
        "serving.py",
        "import threading, time\nbegun = threading.Event()\ndef serve():\n    begun.set()\n    time.sleep(30)\n",
    )
    write(
        "main.py",
        "import threading, serving\nthreading.Thread(target=serving.serve, daemon=True).start()\nserving.begun.wait()",
    )
    assert states(check("p.yaml", "--strict", "--", "main.py").stdout) == {"serving:serve": "attached"}


def test_the_document_has_this_shape() -> None:
    write(
        "p.yaml",
        'functions: [{match: "checked:busy", device: true}, {match: "checked:idle"}]\nservice: shop\n'
        "export: {otlp: {headers: {authorization: secret}, endpoint: 'http://127.0.0.1:9'}}",
    )
    write("main.py", "import checked\nprint('noise')\nfor i in range(5): checked.busy(i)")
    done = check("p.yaml", "--json", "--", "main.py", OTEL_EXPORTER_OTLP_TIMEOUT="2")
    document = json.loads(done.stdout)
    assert done.stderr.startswith("noise\n")
    assert "secret" not in done.stdout

    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [shape(value[0])] if value else []
        return type(value).__name__

    target = {"state": "str", "target": "str", "why": "str", "calls": "int"}
    assert shape(document) == {
        "format": "int",
        "profile": {"source": "str", "service": "str", "digest": "str"},
        "settings": [{"setting": "str", "value": "str", "from": "str"}],
        "exports": ["str"],
        "remarks": [],
        "recorder": {"kind": "str", "why_not_native": "str"},
        "python": {"version": "str", "implementation": "str"},
        "device": {"driver": "str", "bindings": "str", "rocm": "str", "problem": "str"},
        "nvml": {"why_not_read": "str"},
        "dataset": {"why_not_written": "str"},
        "rules": [{"family": "str", "rule": "str", "line": "int", "targets": [target]}],
        "command": {"words": ["str"], "exit_code": "int", "processes": [{"pid": "int", "calls": "int"}]},
    }
    assert [rule["targets"][0]["state"] for rule in document["rules"]] == ["attached", "uncalled"]
    assert [rule["targets"][0]["calls"] for rule in document["rules"]] == [5, 0]
    settings = {setting["setting"]: (setting["value"], setting["from"]) for setting in document["settings"]}
    assert settings["service"] == ("shop", "profile")
    assert settings["export.otlp.headers"] == (["authorization"], "profile")
    assert settings["export.otlp.timeout"] == (2 * 10**9, "OTEL_EXPORTER_OTLP_TIMEOUT")
    assert settings["export.otlp.compression"] == ("gzip", "default")
    plain = json.loads(check("p.yaml", "--json").stdout)
    assert plain["command"] is None
    assert plain["rules"][0]["targets"] == [
        {"state": "attached", "target": "checked:busy", "why": "", "calls": None},
    ]


def test_every_variable_of_opentelemetry_that_counts_is_shown_with_what_it_says(tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text("export: {otlp: {}}")
    file = tmp_path / "trust.pem"
    file.write_text("")
    says = {
        "SERVICE_NAME": "shop", "EXPORTER_OTLP_TRACES_ENDPOINT": "https://h:1/v1/traces", "EXPORTER_OTLP_TIMEOUT": "2",
        "EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "EXPORTER_OTLP_HEADERS": "a=b",
        "EXPORTER_OTLP_COMPRESSION": "none", "EXPORTER_OTLP_CERTIFICATE": str(file),
        "EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE": str(file), "EXPORTER_OTLP_CLIENT_KEY": str(file),
        "RESOURCE_ATTRIBUTES": "env=secret,team=x", "EXPERIMENTAL_RESOURCE_DETECTORS": "process",
        "METRICS_EXPORTER": "none", "PROPAGATORS": "b3",
    }  # fmt: skip
    environ = {**os.environ, **{f"OTEL_{name}": text for name, text in says.items()}}
    command = [sys.executable, "-m", "instrument", "check", str(profile)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    for name in says:
        assert f"(from OTEL_{name})" in done.stdout
    assert "resource attributes = env, team (from OTEL_RESOURCE_ATTRIBUTES)" in done.stdout
    environ.update(OTEL_EXPORTER_OTLP_CERTIFICATE="/nowhere/trust.pem", OTEL_BSP_SCHEDULE_DELAY="1")
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert "export.otlp.certificate (from OTEL_EXPORTER_OTLP_CERTIFICATE): found '/nowhere/trust.pem'" in done.stdout
    assert done.stdout.count("set without an effect: OTEL_BSP_SCHEDULE_DELAY") == 1


def test_no_variable_of_opentelemetry_is_read_that_is_not_in_the_list() -> None:
    known = set(FOLLOWED).union(*({name for name, _ in names} for names in VARIABLES.values()))
    root = Path(instrument.__file__).parent
    read = {
        name
        for path in root.rglob("*.py")
        for name in re.findall(r"""(?<!b)["'](OTEL_[A-Z_]*[A-Z])["']""", path.read_text("utf-8"))  # bytes name none
    }
    assert read <= known


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("chekced:busy", "nearest is checked"),
        ("jsn.decoder:JSONDecoder", "nearest is json"),
        ("json.decodr:JSONDecoder", "nearest is json.decoder"),
        ("checked.engine:f", "checked is a module, not a package"),
        ("checked:bsuy", "nearest is checked:busy"),
        ("checked:Engine.stpe", "nearest is checked:Engine.step"),
    ],
)
def test_a_typo_names_the_nearest_target(rule: str, says: str) -> None:
    write("p.yaml", f'functions: [{{match: "{rule}"}}]')
    done = check("p.yaml")
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


def test_a_rule_that_names_the_script_by_its_file_gets_the_name_to_use() -> None:
    write("p.yaml", 'functions: [{match: "main:work"}]')
    write("main.py", "def work():\n    return 1\nwork()")
    done = check("p.yaml", "--", "main.py")
    assert "main not imported, but run as the program: a rule calls it __main__, not main" in done.stdout, done.stdout


@pytest.mark.slow
def test_a_command_that_never_imports_a_misspelt_module_names_the_nearest_one() -> None:
    write("p.yaml", 'functions: [{match: "chekced:busy"}]')
    write("main.py", "import checked\nchecked.busy(1)")
    done = check("p.yaml", "--", "main.py")
    assert (done.returncode, "chekced not imported; nearest is checked" in done.stdout) == (0, True), done.stdout
    assert check("p.yaml", "--strict", "--", "main.py").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "environ", "says"),
    [
        (["p.yaml", "--"], {}, "there is no command after `--`"),
        (["p.yaml", "checked", "--", "main.py"], {}, "exclude each other"),
        (["p.yaml", "--", "main.py"], {"INSTRUMENT": "off"}, "INSTRUMENT=off"),
        (["p.yaml", "--", "absent.py"], {}, "check: there is no file 'absent.py'"),
        (["p.yaml", "--", "-I", "main.py"], {}, "check: the option -I of Python"),
        (["p.yaml", "--", "-m"], {}, "check: there is no command to run"),
        (["p.yaml", "--", "killed.py"], {}, "ended with exit code -9 before any of its processes reported"),
        (["bad.yaml", "--", "main.py"], {}, "bad.yaml:1:1"),
    ],
)
def test_an_impossible_check_is_one_clear_error(arguments: list[str], environ: dict[str, str], says: str) -> None:
    write("p.yaml", 'functions: [{match: "checked:busy"}]')
    write("bad.yaml", "servce: x")
    write("main.py", "import checked")
    write("killed.py", "import os\nos.kill(os.getpid(), 9)")
    done = check(*arguments, **environ)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_check_alone_ends_the_command_and_its_verdicts_are_reported(number: signal.Signals) -> None:
    write("p.yaml", 'functions: [{match: "checked:busy"}]')
    write("main.py", "import checked, time\nchecked.busy(1)\nprint('ready', flush=True)\ntime.sleep(60)")
    command = [sys.executable, "-m", "instrument", "check", "p.yaml", "--", "main.py"]
    checking = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert checking.stdout is not None
        assert checking.stdout.readline() == "ready\n"
        checking.send_signal(number)
        text, _ = checking.communicate(timeout=240)
    finally:
        checking.kill()
    assert checking.returncode == 0
    assert f"command: exit code {-number}, 1 process reported" in text
    assert states(text) == {"checked:busy": "attached"}


def test_the_first_of_many_uncalled_targets_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    session = instrument.start(loads('functions: [{match: "many_late:*"}]', environ={}))
    assert session is not None
    try:
        write("many_late.py", "\n".join(f"def {name * 80}(): ..." for name in "gfedcba"))
        __import__("many_late")
        (note,) = [note for note in session.notes() if "never called" in note]
        assert note.startswith("7 targets were never called: many_late:aaa")
        assert [name * 9 in note for name in "abcdefg"] == [True] * 4 + [False] * 3
        assert note.endswith(", and 3 more (`instrument check` names all)")
        assert len(note) < 400
    finally:
        instrument.stop()


def test_notes_name_the_targets_that_were_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    session = instrument.start(loads('functions: [{match: "checked_late:*"}]', environ={}))
    assert session is not None
    try:
        write("checked_late.py", SERVICE.replace("@register\n", ""))
        module = __import__("checked_late")
        (note,) = [note for note in session.notes() if "never called" in note]
        assert note == (
            "4 targets were never called: checked_late:busy, checked_late:idle, checked_late:register, "
            "checked_late:routed"
        )
        module.busy(1)
        module.register(module.idle(1))
        (note,) = [note for note in session.notes() if "never called" in note]
        assert note == "1 target was never called: checked_late:routed"
        assert {verdict.target: verdict.calls for verdict in session.verdicts()}["checked_late:busy"] == 1
        module.routed(1)
        assert session.notes() == []
    finally:
        instrument.stop()
        del sys.modules["checked_late"]


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        ([("r", "uncalled", "t", 0), ("r", "attached", "t", 3)], [("attached", "t", 3)]),
        ([("r", "attached", "t", 2), ("r", "attached", "t", 3)], [("attached", "t", 5)]),
        ([("r", "partly", "t", 0), ("r", "attached", "t", 3)], [("partly", "t", 3)]),
        ([("r", "waiting", "", None), ("r", "attached", "t", 1)], [("attached", "t", 1)]),
        ([("r", "waiting", "", None), ("r", "not found", "", None)], [("not found", "", None)]),
        ([("r", "waiting", "", None), ("q", "attached", "t", 1)], [("waiting", "", None), ("attached", "t", 1)]),
    ],
)
def test_the_process_that_saw_more_knows_better(verdicts: list[Any], whole: list[Any]) -> None:
    made = [Verdict(rule, state, target, calls=calls) for rule, state, target, calls in verdicts]
    for order in (made, made[::-1]):
        found = {(verdict.state, verdict.target, verdict.calls) for verdict in merge_verdicts(order)}
        assert found == set(whole)


@pytest.mark.slow
def test_layers_that_torch_has_compiled_away_and_paths_that_no_layer_has_are_named(recorder: Any, torch: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    rules = "layers: [{type: Linear}, {match: '1'}, {match: 'lyers.*'}, {type: Conv2d}]"
    selection = Selection(loads(rules, environ={}), recorder)
    selection.attach()
    try:
        compiled = torch.compile(model, backend="eager")
        compiled(torch.zeros(2))
        found = [(verdict.state, verdict.why) for verdict in selection.verdicts()]
    finally:
        selection.detach_all()
    assert [state for state, _ in found] == ["compiled", "compiled", "waiting", "waiting"]
    assert "no layer has such a path" in found[2][1]
    assert found[3][1] == "no layer that it selects has run"


def test_a_path_rule_with_a_typo_names_the_nearest_path(recorder: Any, torch: Any) -> None:
    selection = Selection(loads("layers: [{match: 'encoder.lyers.0'}]", environ={}), recorder)
    selection.attach()
    try:
        model = torch.nn.ModuleDict({"encoder": torch.nn.ModuleDict({"layers": torch.nn.Sequential(torch.nn.ReLU())})})
        model["encoder"]["layers"](torch.zeros(1))
        (verdict,) = selection.verdicts()
    finally:
        selection.detach_all()
    assert verdict.why == "no layer has such a path; nearest is encoder.layers.0"


def test_a_module_that_fails_to_import_hides_none_of_the_others() -> None:
    write("broken.py", "import absent_module")
    write("p.yaml", 'functions: [{match: "broken:f"}, {match: "checked:busy"}, {match: "checked:bsuy"}]')
    done = check("p.yaml")
    assert done.returncode == 2
    assert states(done.stdout) == {"broken:f": "waiting", "checked:busy": "attached", "checked:bsuy": "not found"}
    assert "broken:f: waiting (broken fails to import: ModuleNotFoundError: No module named 'absent_m" in done.stdout
    assert done.stderr.startswith("p.yaml: module broken fails to import: ModuleNotFoundError")
    assert done.stderr.count("fails to import") == 1


def test_check_takes_the_profile_of_the_environment() -> None:
    write("p.yaml", 'functions: [{match: "checked:busy"}]')
    assert states(check(INSTRUMENT_PROFILE="p.yaml").stdout) == {"checked:busy": "attached"}


def test_help_on_the_summary_lists_every_option() -> None:
    from dataclasses import fields

    from instrument.profile.model import VIEWS
    from instrument.report.view import Options

    listed = instrument.summary.__doc__ or ""
    assert [field.name for field in fields(Options) if f"`{field.name}`" not in listed] == []
    assert [view for view in VIEWS if view not in listed] == []
