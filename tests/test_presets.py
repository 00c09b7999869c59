"""Presets: a profile by name that the lines of a file refine, and what `instrument run` takes where there is none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

import instrument.profile.keys
from instrument import chrome
from instrument.cli.interpreter import choose_service_name
from instrument.errors import ProfileError
from instrument.profile.keys import load, loads
from instrument.profile.model import Capture, Chrome, CopyRule, Device, Profile, Recordings, RequestsRule, Summary
from instrument.profile.presets import PRESETS, preset_path, read_preset
from instrument.sessions.window_files import Destination

SCHEMA = json.loads(Path(instrument.profile.keys.__file__).with_name("profile.schema.json").read_text("utf-8"))
HEALTH = loads(read_preset("serving"), environ={}).requests[0].ignore


def read(text: str, environ: Mapping[str, str] | None = None) -> Profile:
    return loads(text, name="profile.yaml", environ=environ or {})


# ---------------------------------------------------------------- what a preset stands for


@pytest.mark.parametrize("preset", PRESETS)
class TestEveryPreset:
    def test_its_file_is_a_profile_that_explains_itself(self, preset: str) -> None:
        text = read_preset(preset)
        Draft202012Validator(SCHEMA).validate(yaml.safe_load(text))
        assert text.startswith("# ")
        assert max(map(len, text.splitlines())) <= 120

    def test_naming_it_is_the_same_as_its_lines(self, preset: str) -> None:
        named, written = read(f"preset: {preset}"), read(read_preset(preset))
        assert named == written
        assert named.digest == written.digest
        assert (named.preset, written.preset) == (preset, None)

    def test_its_file_is_read_as_a_profile_that_names_it(self, preset: str) -> None:
        profile = load(preset_path(preset), environ={})
        assert (profile.source, profile.preset) == (preset_path(preset), preset)
        assert profile == read(f"preset: {preset}")
        assert "preset" in profile.origins.values()

    def test_it_is_shipped(self, preset: str) -> None:
        root = Path(__file__).parent.parent
        assert '"instrument.profile.presets" = ["*.yaml"]' in (root / "pyproject.toml").read_text("utf-8")
        assert Path(preset_path(preset)).is_file()


@pytest.mark.parametrize("preset", ["serving", "training"])
class TestPresetsOfAnyService:
    def test_it_shows_one_screen_and_a_trace_of_each_process(self, preset: str) -> None:
        export = read(f"preset: {preset}").export
        assert (export.summary, export.otlp) == (Summary(), None)
        assert (export.chrome, export.recording) == (Chrome(), Recordings())

    def test_a_container_that_starts_again_leaves_the_trace_of_its_first_life(
        self, preset: str, tmp_path: Path
    ) -> None:
        chrome = read(f"preset: {preset}").export.chrome
        assert chrome is not None
        lives = ("20261123T160205-2", "20261123T160930-2")
        paths = {Destination(tmp_path, "shop", run, is_first=True).make_path(chrome.path) for run in lives}
        assert len(paths) == 2


def test_serving_records_requests_but_not_those_of_probes() -> None:
    profile = read("preset: serving")
    assert profile.requests == (RequestsRule(ignore=HEALTH),)
    assert {"/health", "/metrics"} <= set(HEALTH)
    assert (profile.loaders, profile.startup, profile.phases, profile.comm) == ("auto", "auto", "off", "off")
    assert all(rule.auto for rule in profile.frameworks)
    assert profile.frameworks
    assert [rule.directions for rule in profile.copies] == [("h2d", "d2h")]
    assert profile.device == Device(host_ns=10**9)


def test_training_records_phases_loaders_and_communication() -> None:
    profile = read("preset: training")
    assert (profile.phases, profile.loaders, profile.comm, profile.requests) == ("auto", "auto", "auto", ())
    assert profile.device == Device(host_ns=10**9)


# ---------------------------------------------------------------- how a file refines it


@pytest.mark.parametrize(
    ("lines", "changed"),
    [
        ("loaders: off", {"loaders": "off"}),
        ("frameworks: off", {"frameworks": ()}),
        ("copies: []", {"copies": ()}),
        ("copies: [{min_bytes: 4KiB}]", {"copies": (CopyRule(min_bytes=4096, text="h2d d2h d2d p2p from 4096 B"),)}),
        ("requests: off", {"requests": ()}),
        ("requests: auto", {"requests": (RequestsRule(),)}),
        ("requests: {traceparent: off}", {"requests": (RequestsRule(ignore=HEALTH, traceparent="off"),)}),
        ("requests: {ignore: /up}", {"requests": (RequestsRule(ignore=("/up",)),)}),
        ("requests:", {}),
        ("device: {cuda: off}", {"device": Device(cuda="off", host_ns=10**9)}),
        ("device: {host: 5s}", {"device": Device(host_ns=5 * 10**9)}),
        ("device: {host: null}", {}),
        ("capture: {sample: 0.5}", {"capture": Capture(sample=0.5)}),
        ("service: shop", {"service": "shop"}),
    ],
)
def test_a_profile_replaces_its_preset_key_by_key(lines: str, changed: dict[str, object]) -> None:
    whole = read("preset: serving")
    assert read(f"preset: serving\n{lines}") == replace(whole, **changed)  # type: ignore[arg-type]
    assert read(f"{lines}\npreset: serving") == replace(whole, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lines", "chrome_", "summary", "sends"),
    [
        ("{}", Chrome(), Summary(), False),
        ("{chrome: , summary: }", Chrome(), Summary(), False),
        ("{chrome: off}", None, Summary(), False),
        ("{summary: {views: [requests]}}", Chrome(), Summary(views=("requests",)), False),
        ("{chrome: {path: /tmp/x.json}, summary: off}", Chrome("/tmp/x.json"), None, False),
        ("{otlp: {}}", Chrome(), Summary(), True),
    ],
)
def test_exports_are_refined_one_by_one_and_taken_away_with_off(
    lines: str, chrome_: Chrome | None, summary: Summary | None, sends: bool
) -> None:
    export = read(f"preset: serving\nexport: {lines}").export
    assert (export.chrome, export.summary, export.otlp is not None) == (chrome_, summary, sends)


def test_check_names_the_parts_from_the_preset() -> None:
    profile = read("preset: serving\ndevice: {host: 5s}\nloaders: off", {"OTEL_SERVICE_NAME": "shop"})
    of_preset = {name for name, origin in profile.origins.items() if origin == "preset"}
    assert of_preset == {
        "requests.ignore", "frameworks", "startup", "engines", "copies", "device.nvml", "export.otlp",
        "export.summary.to", "export.recording.path", "export.chrome.path",
    }  # fmt: skip
    assert profile.origins["service"] == "OTEL_SERVICE_NAME"
    assert profile.shown["copies"] == "[{directions: [h2d, d2h]}]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("preset: servin", "1:9: preset: found 'servin'; allowed: serving, training, vllm, "),
        ("preset: [serving]", "1:9: preset: found a list; allowed: serving, training, vllm, "),
        ("preset: serving\nloader: off", "2:1: profile: found the unknown key 'loader'"),
        ("preset: serving\nexport: {chrome: {paht: x}}", "2:19: export.chrome: found the unknown key 'paht'"),
        ("preset: serving\ndevice: {host: often}", "2:16: device.host: found 'often'"),
    ],
)
def test_a_mistake_next_to_a_preset_is_reported_once_with_its_place(text: str, expected: str) -> None:
    with pytest.raises(ProfileError) as caught:
        read(text)
    (problem,) = caught.value.problems
    assert problem.startswith(f"profile.yaml:{expected}")


def test_a_preset_may_come_from_the_environment() -> None:
    assert read("preset: ${KIND:-serving}").requests
    assert read("preset: ${KIND:-serving}", {"KIND": "training"}).phases == "auto"


# ---------------------------------------------------------------- the command without a profile


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("INSTRUMENT_PROFILE", "INSTRUMENT", "INSTRUMENT_RUN_PID", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def command(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "instrument", *words],
        capture_output=True, text=True, timeout=240, check=False, env={**os.environ, **environ},
    )  # fmt: skip


WAITRESS = """
import socket, threading, urllib.request
import waitress

def app(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"fine"]

listener = socket.create_server(("127.0.0.1", 0))
server = waitress.create_server(app, sockets=[listener])
thread = threading.Thread(target=server.run)
thread.start()
open_ = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
for path in ("/", "/", "/health"):
    assert open_(f"http://127.0.0.1:{listener.getsockname()[1]}{path}").read() == b"fine"
server.task_dispatcher.shutdown()  # waits for its threads, which use the trigger
server.trigger.pull_trigger(server.close)  # by its own thread, which may be about to look at it
thread.join(60)
"""


def write(name: str, text: str) -> None:
    Path(name).write_text(textwrap.dedent(text))


def test_a_service_runs_without_any_profile_and_its_requests_are_on_one_screen(folder: Path) -> None:
    pytest.importorskip("waitress")
    write("serve.py", WAITRESS)
    done = command("run", "--", "serve.py")
    assert done.returncode == 0, done.stderr
    first, screen = done.stderr.splitlines()[0], done.stderr.splitlines()[1:]
    assert first.startswith("instrument: no profile, so the preset serving (`instrument check --preset serving`")
    assert "requests: 2; none ended with an error" in done.stderr
    assert len(screen) <= 30
    (missed,) = [line for line in done.stderr.splitlines() if line.startswith("Not observed")]
    assert missed.startswith(
        "Not observed: requests: routes: unreachable (2 requests have none"
    )  # no framework has any
    (file,) = folder.glob("traces/*.json.gz")
    trace = chrome.read(file).trace
    assert sum(span.site.kind == "request" for span in trace.spans) == 2
    (recording,) = folder.glob("traces/*.npz")  # beside it, and read in its place
    assert recording.stem == file.name.removesuffix(".json.gz")
    assert "requests: 2; none ended with an error" in command("report", "traces").stdout


@pytest.mark.slow
def test_the_preset_holds_in_child_processes_and_is_reported_once(folder: Path) -> None:
    pytest.importorskip("waitress")
    write("serve.py", WAITRESS)
    write("main.py", "import subprocess, sys\nsys.exit(subprocess.run([sys.executable, 'serve.py']).returncode)")
    done = command("run", "--", "main.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no profile") == 1
    assert done.stderr.count("requests: 2; none ended with an error") == 1


def test_an_environment_with_a_profile_needs_no_preset(folder: Path) -> None:
    write("p.yaml", "export: {summary: {}}")
    done = command("run", "--", "-c", "pass", INSTRUMENT_PROFILE="p.yaml")
    assert done.returncode == 0
    assert "no profile" not in done.stderr


def test_a_run_that_is_switched_off_says_nothing_of_presets(folder: Path) -> None:
    done = command("run", "--", "-c", "print('fine')", INSTRUMENT="off")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


@pytest.mark.slow
def test_a_loop_of_torch_runs_under_the_preset_training(folder: Path) -> None:
    pytest.importorskip("torch")
    write(
        "train.py",
        """
        import torch
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters())
        data = torch.utils.data.TensorDataset(torch.zeros(8, 4))
        for (x,) in torch.utils.data.DataLoader(data, batch_size=4):
            model(x).sum().backward()
            optimizer.step()
        """,
    )
    done = command("run", "--preset", "training", "--", "train.py", INSTRUMENT_PROFILE="nowhere.yaml")
    assert done.returncode == 0, done.stderr
    assert "no profile" not in done.stderr
    for name in ("forward", "backward", "optimizer", "DataLoader"):
        assert name in done.stderr
    assert re.search(r"^step +2 ", done.stderr, re.MULTILINE)
    assert "request" not in done.stderr.partition("More:")[0]
    assert "h2d" not in done.stderr


def test_a_profile_and_a_preset_on_one_command_line_are_refused(folder: Path) -> None:
    write("p.yaml", "service: shop")
    for words in (["run", "--profile", "p.yaml", "--preset", "serving", "--", "-c", "pass"],
                  ["check", "p.yaml", "--preset", "serving"]):  # fmt: skip
        done = command(*words)
        assert done.returncode == 2
        assert "give one, or add the line `preset: serving` to the profile" in done.stderr


@pytest.mark.parametrize("preset", PRESETS)
def test_check_prints_the_yaml_of_a_preset_which_is_a_profile_to_begin_with(preset: str, folder: Path) -> None:
    done = command("check", "--preset", preset)
    assert (done.returncode, done.stdout, done.stderr) == (0, read_preset(preset), "")


@pytest.mark.slow
def test_check_without_a_profile_shows_what_the_preset_means_and_what_it_reaches(folder: Path) -> None:
    pytest.importorskip("waitress")
    done = command("check")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no profile, so the preset serving")
    for line in ("frameworks = auto (from preset)", "requests.ignore = [/health, ", "device.host = 1s (from preset)"):
        assert line in done.stdout
    write("serve.py", WAITRESS)
    done = command("check", "--", "serve.py")
    assert done.returncode == 0, done.stderr
    assert re.search(r"requests: attached \(2 calls; at waitress\.\S+\)", done.stdout)


# ---------------------------------------------------------------- engines


ENGINE = """
class Dispatcher:
    def dispatch_request(self, request_message):
        return Worker()._process_request(request_message)

class AsyncResponses:
    def resolve(self, response):
        pass

class Worker:
    def _process_request(self, request):
        return request.id
"""

MAIN = """
import importlib.util, subprocess, sys
importlib.util.find_spec("mlserver")  # to look for it is no import
import instrument
profile = instrument.session().profile
if profile.engines == "auto":
    assert not any(rule.engine for rule in profile.functions), profile.functions
import types
import mlserver.parallel.dispatcher, mlserver.parallel.worker

message = types.SimpleNamespace(id="r7")
with instrument.scope("POST /infer", kind="request"):
    mlserver.parallel.dispatcher.Dispatcher().dispatch_request(message)
session = instrument.session()
sites = [row.path[-1] for row in session.tally().iterate_totals()]
print(sorted(site.name for site in sites if site.kind != "user" or site.module))
print("/v2/health/*" in session.profile.requests[0].ignore, session.recorded.generation)
print([note for note in session.notes() if "mlserver" in note])
if sys.argv[1:]:
    session.reload("changed.yaml")
    mlserver.parallel.worker.Worker()._process_request(message)
    print(sum(row.totals.calls for row in session.tally().iterate_totals() if row.path[-1].name == "worker"))
    subprocess.run([sys.executable, "main.py"], check=True)
"""


@pytest.fixture
def engine(folder: Path) -> Path:
    """A service on a package that has the names of an engine's."""
    dispatcher = "from mlserver.parallel import worker\n" + ENGINE.replace("Worker()", "worker.Worker()")
    for name, text in {"__init__": "", "dispatcher": dispatcher, "worker": ENGINE}.items():
        path = folder / "mlserver" / "parallel" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "mlserver" / "__init__.py").write_text("import mlserver.parallel.worker\n")
    write("main.py", MAIN)
    return folder


@pytest.mark.slow
def test_the_rules_for_an_engine_are_taken_on_where_the_service_imports_it_and_that_is_said_once(engine: Path) -> None:
    write("changed.yaml", "preset: serving\nrequests: auto")
    done = command("run", "--preset", "serving", "--", "main.py", "again")
    assert done.returncode == 0, done.stderr
    first = ["['POST /infer', 'dispatch', 'worker']", "True 1", "[]"]
    assert done.stdout.splitlines() == [*first, "2", *first]
    assert done.stderr.count("imports mlserver, so the rules of the preset mlserver apply, too") == 1


@pytest.mark.slow
def test_a_profile_that_wants_no_rules_for_engines_gets_none(engine: Path) -> None:
    write("p.yaml", "preset: serving\nengines: off")
    done = command("run", "--profile", "p.yaml", "--", "main.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['POST /infer']", "False 1", "[]"]
    assert "mlserver" not in done.stderr


@pytest.mark.slow
def test_a_service_without_a_name_is_called_as_what_is_run(engine: Path) -> None:
    (engine / "shop").mkdir()
    (engine / "shop" / "api.py").write_text("import instrument\nprint(instrument.session().profile.service)\n")
    words = ("run", "--preset", "serving", "--", "-m", "shop.api")
    assert command(*words).stdout == "shop\n"
    assert command(*words, OTEL_SERVICE_NAME="chat").stdout == "chat\n"
    assert command(*words, OTEL_RESOURCE_ATTRIBUTES="service.name=chat").stdout == "unknown_service\n"
    write("p.yaml", "service: mine")
    assert command("run", "--profile", "p.yaml", "--", "-m", "shop.api").stdout == "mine\n"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("uvicorn app:app", "acme"),
        ("-m uvicorn shop.api:app --port 80", "shop"),
        ("-m your.service", "your"),
        ("server.py", "acme"),
        ("/venv/bin/python3.11 train.py", "train"),
        ("/venv/bin/gunicorn -w 3 -b localhost:8000 wapp:app", "wapp"),
        ("/venv/bin/vllm serve org/model", "vllm"),
        ("-c pass", "acme"),
    ],
)
def test_a_command_names_its_service_by_app_module_script_or_folder(
    words: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme").mkdir()
    monkeypatch.chdir(tmp_path / "acme")
    assert choose_service_name(words.split()) == name
    (tmp_path / "acme" / "pyproject.toml").write_text('[tool.x]\nname = "y"\n[project]\nname = "chat 7"\n')
    assert choose_service_name(words.split()) == "chat-7"
