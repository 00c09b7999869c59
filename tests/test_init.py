"""`instrument init`: a first profile of what a service did, that passes `check` and records."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from otlp_receiver import free_port
from server_programs import answers

from instrument import chrome
from instrument.instrumentors.argument_watch import DIGESTS, LOOKS, ArgumentWatch, SeenPath
from instrument.instrumentors.known_packages import MADE_FOR, find_presets
from instrument.profile.keys import loads
from instrument.profile.presets import PRESETS
from instrument.proposal.first_profile import (
    choose_keys,
    choose_layers,
    format_rules,
    propose_first_profile,
    remove_secret_words,
    wrap_comment,
)
from instrument.proposal.function_choice import RuleProposal, choose_functions
from instrument.proposal.observation import Callee, Observation, ObservedNode, find_service_modules

MS = 10**6


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of a service, and no variable that matters."""
    monkeypatch.chdir(tmp_path)
    for name in ("INSTRUMENT_PROFILE", "INSTRUMENT", "INSTRUMENT_RUN_PID", "OTEL_SERVICE_NAME", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write(name: str, text: str) -> Path:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(textwrap.dedent(text))
    return Path(name)


def command(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "instrument", *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **environ},
    )


def rules_of(text: str) -> dict[str, dict[str, Any]]:
    """The function rules of a profile by what they match, in its order."""
    found = {}
    for rule in yaml.safe_load(text).get("functions", []):
        match = rule.pop("match")
        found[match if isinstance(match, str) else match[0]] = rule
    return found


SCRIPT = """
import sys, time

def load_weights():
    time.sleep(0.06)
    return 3

def preprocess(x):
    time.sleep(0.001)
    return x

def run(weights, x):
    time.sleep(0.003)
    return weights * x

def tiny(i):
    return i + 1

def handle(weights, request_id, x):
    for i in range(2000):  # so often that their mean stays short where the machine interrupts some
        tiny(i)
    return run(weights, preprocess(x))

def main():
    weights = load_weights()
    print(*(handle(weights, f"r{i}", i) for i in range(30)))
    print("to stderr", file=sys.stderr)
    return 3

if __name__ == "__main__":
    sys.exit(main())
"""

OF_SCRIPT = {
    "__main__:load_weights": {"phase": "load"},
    "__main__:handle": {"kind": "request", "key": "request_id"},
    "__main__:preprocess": {"phase": "prepare"},
    "__main__:run": {"kind": "phase"},
}


@pytest.mark.slow
def test_a_script_is_observed_and_its_first_profile_passes_check_and_records_its_requests() -> None:
    write("batch.py", SCRIPT)
    bare = subprocess.run([sys.executable, "batch.py"], capture_output=True, text=True, check=False)
    done = command("init", "--", "batch.py")
    assert (done.returncode, done.stdout) == (0, bare.stdout)
    assert "to stderr\n" in done.stderr
    assert "wrote profile.yaml: 4 rules, from 30 requests in" in done.stderr
    assert f"ended with exit code {bare.returncode}" in done.stderr
    text = Path("profile.yaml").read_text()
    assert rules_of(text) == OF_SCRIPT
    assert "# ran 30 times, " in text
    assert "__main__:tiny: 60,000 " in text
    checked = command("check", "profile.yaml", "--", "batch.py")
    assert checked.returncode == 0
    assert "__main__:handle: attached (30 calls)" in checked.stdout
    shutil.rmtree("traces")
    ran = command("run", "--profile", "profile.yaml", "--", "batch.py")
    assert (ran.returncode, ran.stdout) == (bare.returncode, bare.stdout)
    assert "requests: 30; none ended" in ran.stderr
    [path] = Path("traces").glob("*.json.gz")
    requests = [span for span in chrome.load(path)[0].spans if span.site.kind == "request"]
    assert {span.site.name for span in requests} == {"handle"}
    assert len(requests) == 30


@pytest.mark.slow
def test_a_file_that_is_there_is_replaced_only_by_force_and_nothing_runs_before() -> None:
    write("batch.py", "print('ran')\ndef f(): pass\nfor _ in range(9): f()\n")
    write("profile.yaml", "service: mine\n")
    refused = command("init", "--", "batch.py")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "profile.yaml exists; replace it with --force" in refused.stderr
    assert Path("profile.yaml").read_text() == "service: mine\n"
    assert command("init", "--force", "--", "batch.py").returncode == 0
    assert "service: ${OTEL_SERVICE_NAME:-" in Path("profile.yaml").read_text()


def test_a_profile_that_is_printed_is_alone_on_standard_output() -> None:
    write("batch.py", SCRIPT)
    done = command("init", "-o", "-", "--", "batch.py")
    assert rules_of(done.stdout) == OF_SCRIPT
    assert "to stderr" in done.stderr
    assert not Path("profile.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "init: there is no command to observe"),
        (["-o", "nowhere/p.yaml"], "does not exist; create it"),
        (["--"], "init: there is no command after `--`"),
        (["--", "-m"], "init: there is no command to run; give"),
        (["--", "absent.py"], "init: there is no file 'absent.py'"),
        (["--", "killed.py"], "exit code -9 before any of its processes reported"),
        (["--for", "soon", "--", "x.py"], "allowed: a number and one of s ms us ns"),
        (["--", "idle.py"], "no function of its own modules was called"),
    ],
)
def test_bad_input_is_reported_with_what_to_do(words: Sequence[str], told: str) -> None:
    write("idle.py", "x = 1\n")
    write("killed.py", "import os\nos.kill(os.getpid(), 9)\n")
    done = command("init", *words)
    assert done.returncode == 2
    assert told in done.stderr
    assert not Path("profile.yaml").exists()


def test_it_refuses_to_observe_where_the_environment_has_switched_us_off() -> None:
    write("batch.py", SCRIPT)
    assert "INSTRUMENT=off" in command("init", "--", "batch.py", INSTRUMENT="off").stderr


@pytest.mark.slow
def test_a_service_that_never_ends_is_ended_by_sigterm_when_its_time_is_over_and_children_are_observed() -> None:
    write(
        "service.py",
        """
        import multiprocessing, os, time
        from work import work

        def child():
            while True:
                work(1)

        if __name__ == "__main__":
            multiprocessing.get_context("spawn").Process(target=child, daemon=True).start()
            if not os.fork():
                work(0)
                os._exit(0)
            while True:
                time.sleep(0.01)
        """,
    )
    write("work.py", "import time\ndef work(x):\n    time.sleep(0.002)\n    return x\n")
    for allowed in ("4s", "30s", "100s"):  # a busy machine needs more before the service and its child are at work
        done = command("init", "--force", "--for", allowed, "--", "service.py")
        text = Path("profile.yaml").read_text() if done.returncode == 0 else ""
        if "1 process that ended without a goodbye" in text:
            break
    assert "was ended by SIGTERM" in done.stderr
    assert "work:work" in rules_of(text)
    assert "1 process that ended without a goodbye" in text


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_interrupts_the_command_once() -> None:
    write(
        "service.py",
        """
        import signal, time

        def work():
            time.sleep(0.005)

        def main():
            came = []
            signal.signal(signal.SIGINT, lambda number, frame: came.append(time.monotonic()))
            print("ready", flush=True)
            until = time.monotonic() + 240
            while time.monotonic() < (came[0] + 0.5 if came else until):
                work()
            print(len(came), "interrupts", flush=True)

        main()
        """,
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "instrument", "init", "--", "service.py"])
    told = b""
    with contextlib.suppress(OSError):  # how a terminal ends
        while read := os.read(terminal, 1000):
            told += read
            if b"ready" in read:
                os.write(terminal, b"\x03")
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, told
    assert b"1 interrupts" in told
    assert "__main__:work" in rules_of(Path("profile.yaml").read_text())


def test_own_modules_are_those_next_to_the_service_and_those_that_its_command_names(folder: Path) -> None:
    write("shop/api.py", "")
    write("src/lib/__init__.py", "")
    write("tool.py", "")
    write("tests/test_it.py", "")
    write("venv/pyvenv.cfg", "")
    write("venv/x.py", "")
    write("data/readme.txt", "")
    assert find_service_modules(["tool.py"], folder) == ["lib", "shop", "src", "tool"]
    assert find_service_modules(["-m", "uvicorn", "wsgiref.types:app"], folder) == ["lib", "shop", "src", "tool"]
    assert "yaml" in find_service_modules(
        ["-m", "uvicorn", "yaml.loader:app"], folder
    )  # installed, and named as the app


# ---------------------------------------------------------------- what is chosen of what was observed


def node(
    label: str, calls: int, total_ms: float, *below: ObservedNode, self_ms: float | None = None, **more: Any
) -> ObservedNode:
    """A call path with those below it; its self time is what these leave."""
    kind = more.get("kind", "op")
    name = more.get("name") or label.rpartition(":")[2]
    callee = Callee(name, kind, label if ":" in label else "", more.get("instance", ""), more.get("shape", "call"))
    left = total_ms - sum(one.total_ns for one in below) / MS if self_ms is None else self_ms
    made = ObservedNode(callee, None, {one.callee: one for one in below}, calls, 0)
    made.total_ns, made.self_ns, made.first_ns = round(total_ms * MS), round(left * MS), more.get("first_ns", 1)
    made.processes = {1}
    for one in below:
        one.parent = made
    return made


def request(calls: int, total_ms: float, *below: ObservedNode, name: str = "POST /x") -> ObservedNode:
    return node("", calls, total_ms, *below, kind="request", name=name)


def observation(*roots: ObservedNode, keys: Mapping[str, Mapping[str, SeenPath]] | None = None) -> Observation:
    return Observation(list(roots), keys={label: dict(paths) for label, paths in (keys or {}).items()}, seconds=10.0)


def chosen(*roots: ObservedNode) -> dict[str, RuleProposal]:
    return {rule.label: rule for rule in choose_functions(observation(*roots)).rules}


def test_a_function_that_repeats_the_request_is_left_out_and_its_slow_parts_are_named() -> None:
    rules = chosen(
        request(
            100,
            1000,
            node("app:handler", 100, 990, node("app:encode", 100, 200), node("app:_run", 100, 700, shape="coroutine")),
        )
    )
    assert list(rules) == ["app:_run", "app:encode"]
    assert rules["app:encode"].reasons[0] == "ran 100 times, 2 ms each, 20 % of the requests"


@pytest.mark.parametrize(
    ("label", "below"),
    [("app:RequestIds.__call__", True), ("app:RequestIds.__call__", False), ("app:add_ids", True)],
)
def test_a_middleware_around_every_request_says_what_the_request_says_however_long_it_waits_itself(
    label: str, below: bool
) -> None:
    handler = [node("app:generate", 100, 550, shape="coroutine")] if below else []
    rules = chosen(request(100, 1000, node(label, 100, 995, *handler, shape="coroutine")))
    assert list(rules) == (["app:generate"] if below else [])


def test_a_handler_below_which_nothing_of_the_service_runs_is_named() -> None:
    assert list(chosen(request(100, 1000, node("app:handler", 100, 995)))) == ["app:handler"]


def test_a_blocker_of_an_event_loop_is_named_for_any_share_of_the_time() -> None:
    handler = node("app:handler", 100, 995, node("app:audit", 4, 6), shape="coroutine")
    seen = observation(request(100, 1000, handler))
    assert "app:audit" not in {rule.label for rule in choose_functions(seen).rules}
    seen.blockers = {"app:audit": (3, 2_000_000), "app:gone": (1, 1)}
    rules = {rule.label: rule for rule in choose_functions(seen).rules}
    assert rules["app:audit"].reasons == [
        "ran 4 times, 1.5 ms each",
        "blocked an event loop 3 times, for 2 ms at most",
    ]
    assert "app:gone" not in rules


def test_time_of_what_is_too_short_counts_as_that_of_the_function_around_it() -> None:
    loop = node("app:tokenize", 100, 300, node("app:_one", 90_000, 290))
    choice = choose_functions(observation(request(100, 1000, loop)))
    assert [rule.label for rule in choice.rules] == ["app:tokenize"]
    assert choice.hot == {"app:_one": "90,000 times, 3.2 us each"}
    often = node("app:often", 200_000, 2_000)
    choice = choose_functions(observation(request(100, 3000, node("app:loop", 100, 2500, often))))
    assert choice.hot == {"app:often": "200,000 calls, 20,000 a second"}


def test_the_work_of_threads_is_found_below_the_loops_that_never_end() -> None:
    step = node(
        "engine:Engine.step", 50, 900, node("engine:Engine.prepare", 50, 300), node("engine:Engine.compute", 50, 590)
    )
    rules = chosen(
        request(10, 100),
        node(
            "engine:Engine._run",
            0,
            0,
            node("engine:Engine._wait", 50, 5000),
            node("engine:Engine._safe", 50, 901, step),
        ),
    )
    assert {label: (rule.kind, rule.phase) for label, rule in rules.items()} == {
        "engine:Engine.step": ("step", ""),
        "engine:Engine.prepare": ("phase", "prepare"),
        "engine:Engine.compute": ("phase", "compute"),
    }


def test_a_handler_is_taken_for_the_request_where_no_server_was_met() -> None:
    rules = chosen(node("s:main", 1, 0, node("s:Handler.do_POST", 60, 300, node("s:classify", 60, 200))))
    assert {label: rule.kind for label, rule in rules.items()} == {
        "s:Handler.do_POST": "request",
        "s:classify": "phase",
    }
    rules = chosen(node("s:main", 1, 0, node("s:handleRequest", 60, 300), node("s:query", 400_000, 4_000)))
    assert {label: rule.kind for label, rule in rules.items()} == {"s:handleRequest": "request"}  # not what is too hot


def test_probes_are_no_requests() -> None:
    choice = choose_functions(
        observation(request(1000, 10, name="GET /health"), request(2, 100, node("app:f", 2, 50), name="POST /x"))
    )
    assert [one.callee.name for one in choice.requests] == ["POST /x"]


def test_no_profile_has_more_functions_than_one_can_read() -> None:
    rules = chosen(request(10, 4000, *(node(f"app:f{i}", 10, 100) for i in range(40))))
    assert len(rules) == 12


def test_layers_are_named_by_block_and_by_what_takes_its_time() -> None:
    def layer(path: str, total_ms: float, *below: ObservedNode) -> ObservedNode:
        return node("", 10, total_ms, *below, kind="layer", name="Layer", instance=path)

    blocks = [
        layer(f"h.{i}", 100, layer(f"h.{i}.attn", 60), layer(f"h.{i}.mlp", 35), layer(f"h.{i}.norm", 0.1))
        for i in range(3)
    ]
    found = choose_layers(observation(request(10, 500, layer("embed", 1), *blocks, layer("head", 50))))
    assert [layer.label for layer in found] == ["h.*", "h.*.attn", "h.*.mlp", "head"]
    assert found[0].reasons == ["3 of Layer: ran 30 times, 10 ms each, 85 % of the layers' time"]


def keys_of(*names: str, many: bool = False, weights: str = "", of_class: str = "") -> SeenPath:
    return SeenPath(many, looks=20, items=40, largest=4, weights=weights, of_class=of_class, digests=set(names))


IDS = [f"r{i}" for i in range(20)]


def test_keys_and_batches_are_paths_whose_values_come_again_elsewhere() -> None:
    seen = {
        "api:submit": {"request.request_id": keys_of(*IDS), "tenant_id": keys_of("a", "b")},
        "engine:accept": {"item.id": keys_of(*IDS[:15])},
        "engine:step": {
            "output.num_tokens": keys_of(*IDS, many=True),
            "self.running[].request_id": keys_of(*IDS, many=True),
            "names": keys_of("x", "y", many=True),
        },
    }
    found = observation(
        request(20, 1000, node("api:submit", 20, 900)),
        node("engine:loop", 1, 500, node("engine:accept", 20, 30), node("engine:step", 40, 400)),
        keys=seen,
    )
    choice = choose_functions(found)
    choose_keys(found, choice)
    rules = {rule.label: (rule.key, rule.batch) for rule in choice.rules}
    assert rules == {
        "api:submit": ("request.request_id", ""),
        "engine:accept": ("item.id", ""),
        "engine:step": ("", "output.num_tokens"),
    }
    # A phase there is what transport leads to: see `instrument.trace.ledger`.
    assert [rule.kind for rule in choice.rules if rule.label == "engine:accept"] == ["phase"]


def test_functions_named_for_their_key_are_not_reported_as_left_out() -> None:
    seen = {
        "api:chat": {"request_id": keys_of(*IDS)},
        "engine:accept": {"item.id": keys_of(*IDS)},
        "engine:step": {"self.running[].id": keys_of(*IDS, many=True)},
    }
    short = node("engine:accept", 20, 0.04), node("engine:other", 20, 0.04)
    found = observation(request(20, 1000, node("api:chat", 20, 900)), *short, node("engine:step", 40, 400), keys=seen)
    text = propose_first_profile(found, ["-m", "chat"], "chat", "profile.yaml").text
    told = text.partition("# Left out")[2]
    assert ("engine:accept",) in [rule.match for rule in loads(text).functions if rule.key]
    assert ("engine:other" in told, "engine:accept" in told) == (True, False)


def test_requests_are_named_where_all_of_them_pass() -> None:
    seen = {
        "api:stream": {"job.id": keys_of(*IDS[:15])},
        "engine:submit": {"request_id": keys_of(*IDS)},
        "engine:step": {"self.running[].id": keys_of(*IDS, many=True)},
    }
    submit = node("api:handle", 20, 900, node("engine:submit", 20, 10))
    found = observation(request(20, 1000, submit, node("api:stream", 15, 90)), node("engine:step", 40, 400), keys=seen)
    choice = choose_functions(found)
    choose_keys(found, choice)
    assert [(rule.label, rule.key) for rule in choice.rules if rule.key] == [("engine:submit", "request_id")]


@pytest.mark.parametrize(("path", "key"), [("id", ""), ("return", ""), ("request_id", "request_id")])
def test_a_value_that_comes_nowhere_again_names_requests_only_by_a_name_that_says_so(path: str, key: str) -> None:
    found = observation(request(20, 100, node("app:get", 20, 50)), keys={"app:get": {path: keys_of(*IDS)}})
    choice = choose_functions(found)
    choose_keys(found, choice)
    assert [rule.key for rule in choice.rules] == [key]


def test_parts_of_a_step_that_serve_batches_are_named_in_its_place() -> None:
    seen = {
        "api:submit": {"return": keys_of(*IDS, of_class="api:Job")},
        "engine:Engine.step": {"self.active": keys_of(*IDS, many=True, of_class="api:Job")},
        "engine:Engine.decode": {"self.active": keys_of(*IDS, many=True, of_class="api:Job")},
        "engine:Engine.prefill": {"job": keys_of(*IDS, of_class="api:Job")},
    }
    parts = node("engine:Engine.prefill", 20, 100), node("engine:Engine.decode", 40, 390)
    found = observation(
        request(20, 1000, node("api:submit", 20, 1)), node("engine:Engine.step", 40, 500, *parts), keys=seen
    )
    choice = choose_functions(found)
    choose_keys(found, choice)
    assert {rule.label: (rule.kind, rule.key, rule.batch) for rule in choice.rules} == {
        "api:submit": ("op", "return", ""),
        "engine:Engine.step": ("step", "", ""),
        "engine:Engine.prefill": ("phase", "", "job"),
        "engine:Engine.decode": ("phase", "", "self.active"),
    }


def test_targets_that_the_preset_records_and_unseen_ones_are_named() -> None:
    copy = node("", 12, 24, kind="copy", name="h2d")
    found = observation(
        request(10, 100, node("app:f", 10, 90, copy)),
        request(99, 1, name="GET /health"),
        request(7, 1, name="GET /v1/health"),
        request(0, 0, name="GET"),
    )
    found.unseen, found.silent, found.packages = {"app:odd": "why not"}, 2, {"fastapi", "uvicorn"}
    text = propose_first_profile(found, ["serve.py"], "shop", "profile.yaml").text
    assert text == propose_first_profile(found, ["serve.py"], "shop", "profile.yaml").text
    assert "The preset records these, too: h2d 12 times, 2 ms each." in text
    assert " 10 times, 10 ms each.\n" in text
    assert "Not observed: app:odd (why not)." in text
    assert "Not observed: 2 processes that ended without a goodbye" in text
    assert "made for fastapi, by hand: `instrument check --preset fastapi`" in text
    ignored = loads(text).requests[0].ignore
    assert ignored.count("/health") == ignored.count("/v1/health") == 1
    assert "/ping" in ignored


def test_a_loop_with_backward_passes_and_no_requests_gets_the_preset_for_training() -> None:
    loop = node("train:step", 200, 600, node("", 200, 300, kind="phase", name="backward"))
    assert "\npreset: training " in propose_first_profile(observation(loop), ["train.py"], "train", "profile.yaml").text
    served = observation(request(10, 100), loop)
    assert "\npreset: serving " in propose_first_profile(served, ["train.py"], "train", "profile.yaml").text


def test_a_preset_that_is_made_for_a_package_is_named_where_that_is_imported() -> None:
    assert set(PRESETS) - {"serving", "training"} == set(MADE_FOR.values())
    assert find_presets(["fastapi", "uvicorn", "vllm"]) == [("vllm", "vllm")]  # which is made of the others


def test_names_of_the_service_are_data_in_the_profile_that_is_written() -> None:
    rule = RuleProposal("app:f\u00fc.true", key="on", reasons=["a\nreason: ${HOME} # 'x'"])
    text = "\n".join([*wrap_comment("line\n- functions: [x]"), *format_rules("functions", [rule])])
    [read] = loads(text).functions
    assert read.match == ("app:f\u00fc.true",)
    assert read.key is not None
    assert read.key.argument == "on"


def test_a_command_is_shown_without_what_may_be_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text("")
    (tmp_path / "admin").write_text("")
    assert remove_secret_words(["-m", "uvicorn", "app:app", "--key", "secret"]) == "-m uvicorn app:app ..."
    assert remove_secret_words(["-m", "uvicorn", "app:app", "app.py"]) == "-m uvicorn app:app app.py"
    assert remove_secret_words(["serve.py", "token=secret"]) == "serve.py ..."
    for secret in ("postgres://me:secret@db/shop", "sk-0123456789abcdef", "admin:hunter2", "hunter2", "x" * 5000):
        assert remove_secret_words(["serve.py", "app.py", secret, "app.py"]) == "serve.py app.py ..."


# ---------------------------------------------------------------- what is seen of arguments


class Hostile:
    """Runs code of the service wherever it is touched."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("iter")

    def __len__(self) -> int:
        raise AssertionError("len")

    def __hash__(self) -> int:
        raise AssertionError("hash")

    @property
    def request_id(self) -> str:
        raise AssertionError("property")


def handled(request: Any, request_id: str, items: Any = ()) -> None: ...


def leaf(request: Any, items: Any) -> int:
    return len(items)


def test_functions_that_only_compute_are_not_looked_at() -> None:
    assert ArgumentWatch(lambda _: True).make_examiners(leaf, "f") == (None, None)


def test_looking_at_arguments_runs_no_code_of_theirs_and_is_bounded() -> None:
    watch = ArgumentWatch(lambda module: module == __name__)
    look, _ = watch.make_examiners(handled, "app:handled")
    assert look is not None
    for i in range(2 * LOOKS):
        look((Hostile(), f"r{i}", [Hostile(), Hostile()]), {})
    seen = watch.make_summaries()["app:handled"]
    assert seen["request_id"]["looks"] == LOOKS
    assert len(seen["request_id"]["digests"]) == LOOKS <= DIGESTS
    assert not any("r1" in digest for digest in seen["request_id"]["digests"])
    assert set(seen) == {"items", "request", "request_id"}
    watch.clear()
    assert watch.make_summaries() == {}


def test_ids_are_found_in_attributes_slots_and_mappings() -> None:
    class Slotted:
        __slots__ = ("max_tokens", "num_tokens", "request_id")

        def __init__(self, name: str) -> None:
            self.request_id, self.num_tokens, self.max_tokens = name, 3, 16

    class Output:
        def __init__(self) -> None:
            self.weights = {"r1": 1, "r2": 2}

    watch = ArgumentWatch(lambda _: True)
    look, _ = watch.make_examiners(handled, "f")
    assert look is not None
    look((Slotted("r1"), "r1", [Slotted("r1"), Slotted("r2")]), {})
    look(({"request_id": "r1"}, "r1", Output()), {})
    seen = watch.make_summaries()["f"]
    assert {path: (facts["many"], facts["weights"]) for path, facts in seen.items() if not facts["of_class"]} == {
        "items.weights": (True, ""),
        "items[].request_id": (True, "items[].num_tokens"),
        "request": (True, ""),
        "request.request_id": (False, ""),
        "request_id": (False, ""),
    }
    assert seen["request_id"]["digests"] == seen["request.request_id"]["digests"]


def test_ids_are_found_in_the_mappings_of_a_batch() -> None:
    watch = ArgumentWatch(lambda _: True)
    look, _ = watch.make_examiners(handled, "f")
    assert look is not None
    look((None, "r1", [{"request_id": "r1", "n": 1}, {"request_id": "r2", "n": 2}, {"n": 3}]), {})
    seen = watch.make_summaries()["f"]
    assert {path: (facts["many"], facts["items"]) for path, facts in seen.items()} == {
        "items[].request_id": (True, 3),
        "request_id": (False, 1),
    }


def test_keys_of_mappings_that_are_data_never_become_paths() -> None:
    watch = ArgumentWatch(lambda _: True)
    look, _ = watch.make_examiners(handled, "f")
    assert look is not None
    secrets = ["jane@shop.example_request_id", "4111 1111_uuid", "/home/jane_job_id", f"{'x' * 100}_request_id"]
    for secret in secrets:
        look(({secret: "r1", "n": 1.5}, "r1"), {secret: "r1"})
    look(({"user_request_id": "r1", "n": 1.5}, "r1"), {})
    assert set(watch.make_summaries()["f"]) == {"request", "request_id", "request.user_request_id"}


def test_objects_without_ids_are_distinguished_even_at_a_reused_address() -> None:
    class Job:
        pass

    watch = ArgumentWatch(lambda _: True)
    look, _ = watch.make_examiners(handled, "f")
    assert look is not None
    for _ in range(50):
        look((Job(), "r"), {})
    assert len(watch.make_summaries()["f"]["request"]["digests"]) == 50


# ---------------------------------------------------------------- real servers


@contextlib.contextmanager
def observed_server(words: Sequence[str], port: int, ready: str) -> Iterator[None]:
    """A server that `instrument init` observes until the block ends."""
    words = [word.replace("{port}", str(port)) for word in words]
    with Path("log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "instrument", "init", "--", *words],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        await_answer(process, port, ready)
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0, Path("log").read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def await_answer(process: subprocess.Popen[Any], port: int, ready: str) -> None:
    until = time.monotonic() + 240
    while not answers(ready)(port):
        assert process.poll() is None, Path("log").read_text()
        assert time.monotonic() < until
        time.sleep(0.05)


def send(port: int, path: str, count: int) -> None:
    """Requests, four at a time."""

    def some() -> None:
        for i in range(count // 4):
            body = json.dumps({"text": "a b c", "input": i}).encode()
            asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"content-type": "application/json"})
            urllib.request.urlopen(asked, timeout=240).read()

    threads = [threading.Thread(target=some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def recorded_by(words: Sequence[str], path: str, ready: str, count: int, stop: int = signal.SIGTERM) -> dict[str, int]:
    """Return the spans by name of a run under the profile in the folder."""
    port = free_port()
    words = [word.replace("{port}", str(port)) for word in words]
    with Path("log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "instrument", "run", "--profile", "profile.yaml", "--", *words],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        await_answer(process, port, ready)
        send(port, path, count)
        process.send_signal(stop)
        process.wait(240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found: dict[str, int] = {}
    for file in Path("traces").glob("*.json.gz"):
        for span in chrome.load(file)[0].spans:
            found[span.site.name] = found.get(span.site.name, 0) + 1
    return found


FASTAPI = """
import asyncio, time, uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass
from fastapi import FastAPI

@dataclass
class Job:
    id: str
    text: str
    done: asyncio.Future

class Batcher:
    def __init__(self):
        self.queue = asyncio.Queue()

    async def loop(self):
        while True:
            jobs = [await self.queue.get()]
            await asyncio.sleep(0.003)
            while not self.queue.empty():
                jobs.append(self.queue.get_nowait())
            for job, result in zip(jobs, await asyncio.to_thread(self.run_batch, jobs)):
                job.done.set_result(result)

    def run_batch(self, jobs):
        return infer(collate([job.text for job in jobs]))

    async def enqueue(self, job):
        await self.queue.put(job)
        return await job.done

def collate(texts):
    time.sleep(0.001)
    return [len(text) for text in texts]

def infer(x):
    time.sleep(0.004)
    return x

@asynccontextmanager
async def lifespan(app):
    app.state.batcher = Batcher()
    task = asyncio.create_task(app.state.batcher.loop())
    yield
    task.cancel()

app = FastAPI(lifespan=lifespan)

@app.post("/embed")
async def embed(body: dict):
    job = Job(uuid.uuid4().hex, body["text"], asyncio.get_running_loop().create_future())
    return {"result": await app.state.batcher.enqueue(job)}

@app.get("/v1/health")
async def health():
    return {}
"""


@pytest.mark.slow
def test_the_batches_of_a_fastapi_service_are_found_and_recorded() -> None:
    write("app.py", FASTAPI)
    words = ["-m", "uvicorn", "app:app", "--port", "{port}", "--log-level", "warning"]
    port = free_port()
    with observed_server(words, port, "/v1/health"):
        send(port, "/embed", 40)
    text = Path("profile.yaml").read_text()
    rules = rules_of(text)
    assert rules["app:Batcher.enqueue"] == {"kind": "phase", "key": "job.id"}
    assert rules["app:Batcher.run_batch"] == {"kind": "step", "batch": "jobs[].id"}
    assert (rules["app:collate"], rules["app:infer"]) == ({"phase": "prepare"}, {"phase": "compute"})
    assert "/v1/health" in yaml.safe_load(text)["requests"]["ignore"]
    assert "POST /embed 40 times" in text
    assert command("check", "profile.yaml").returncode == 0
    spans = recorded_by(words, "/embed", "/v1/health", 20)
    assert spans["POST /embed"] == spans["Batcher.enqueue"] == 20
    assert spans["infer"] == spans["Batcher.run_batch"] > 0


@pytest.mark.slow
def test_an_engine_in_a_spawned_process_behind_starlette_is_known_by_the_keys_of_its_requests() -> None:
    write(
        "engine.py",
        """
        import queue, time
        from dataclasses import dataclass, field

        @dataclass
        class Request:
            request_id: str
            left: int

        @dataclass
        class Output:
            num_tokens: dict = field(default_factory=dict)

        class Core:
            def __init__(self):
                self.running = []

            def accept(self, request):
                time.sleep(0.001)
                self.running.append(request)

            def step(self, output):
                self.run_model(list(output.num_tokens))
                for request in self.running:
                    request.left -= 1
                done = [request for request in self.running if not request.left]
                self.running = [request for request in self.running if request.left]
                return done

            def run_model(self, ids):
                time.sleep(0.004)

        def run_engine(inbox, outbox):
            core = Core()
            while True:
                try:
                    while True:
                        item = inbox.get(block=not core.running)
                        if item is None:
                            outbox.put(None)
                            return
                        core.accept(item)
                except queue.Empty:
                    pass
                for request in core.step(Output({each.request_id: 1 for each in core.running})):
                    outbox.put(request.request_id)
        """,
    )
    write(
        "server.py",
        """
        import asyncio, contextlib, multiprocessing, sys, threading, uuid
        import uvicorn
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route
        from engine import Request, run_engine

        class Client:
            def __init__(self):
                context = multiprocessing.get_context("spawn")
                self.inbox, self.outbox = context.Queue(), context.Queue()
                self.process = context.Process(target=run_engine, args=(self.inbox, self.outbox), daemon=True)
                self.waiting = {}

            def start(self):
                self.process.start()
                self.loop = asyncio.get_running_loop()
                threading.Thread(target=self._collect, daemon=True).start()

            def _collect(self):
                while (name := self.outbox.get()) is not None:
                    self.loop.call_soon_threadsafe(self.waiting.pop(name).set_result, "done")

            async def submit(self, request):
                future = self.waiting[request.request_id] = asyncio.get_running_loop().create_future()
                self.inbox.put(request)
                return await future

            def stop(self):
                self.inbox.put(None)
                self.process.join(240)

        async def generate(request):
            return JSONResponse({"text": await client.submit(Request(str(uuid.uuid4()), 4))})

        async def health(request):
            return JSONResponse({})

        @contextlib.asynccontextmanager
        async def lifespan(app):
            client.start()
            yield
            client.stop()

        if __name__ == "__main__":
            client = Client()
            routes = [Route("/generate", generate, methods=["POST"]), Route("/health", health)]
            app = Starlette(routes=routes, lifespan=lifespan)
            uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
        """,
    )
    words = ["server.py", "{port}"]
    port = free_port()
    with observed_server(words, port, "/health"):
        send(port, "/generate", 40)
    rules = rules_of(Path("profile.yaml").read_text())
    assert rules["__main__:Client.submit"] == {"kind": "phase", "key": "request.request_id"}
    assert rules["engine:Core.accept"]["key"] == "request.request_id"
    assert rules["engine:Core.step"] == {"kind": "step", "batch": "output.num_tokens"}
    assert command("check", "profile.yaml").returncode == 0
    spans = recorded_by(words, "/generate", "/health", 20)
    assert spans["POST /generate"] == spans["Client.submit"] == spans["Core.accept"] == 20
    assert spans["Core.step"] > 0


@pytest.mark.slow
def test_the_forked_workers_of_gunicorn_are_one_profile() -> None:
    write(
        "web.py",
        """
        import time
        from flask import Flask, jsonify, request
        from model import Model

        app = Flask(__name__)
        model = Model()

        def validate(data):
            time.sleep(0.001)
            return data["text"]

        @app.post("/score")
        def score():
            return jsonify(score=model.predict(validate(request.get_json())))

        @app.get("/ping")
        def ping():
            return "ok"
        """,
    )
    write(
        "model.py",
        """
        import time

        class Model:
            def __init__(self):
                time.sleep(0.1)

            def predict(self, text):
                time.sleep(0.004)
                return len(text)
        """,
    )
    words = ["-m", "gunicorn", "-w", "2", "-b", "127.0.0.1:{port}", "--log-level", "warning", "web:app"]
    port = free_port()
    with observed_server(words, port, "/ping"):
        send(port, "/score", 40)
    text = Path("profile.yaml").read_text()
    assert "POST /score 40 times" in text
    rules = rules_of(text)
    assert rules["model:Model.__init__"] == {"phase": "load"}
    assert rules["web:validate"] == {"phase": "prepare"}
    assert rules["model:Model.predict"] == {"phase": "compute"}
    assert command("check", "profile.yaml").returncode == 0
    assert recorded_by(words, "/score", "/ping", 20)["POST /score"] == 20


@pytest.mark.slow
def test_the_workers_of_litserve_are_observed() -> None:
    write(
        "serve.py",
        """
        import sys, time
        import litserve

        class Api(litserve.LitAPI):
            def setup(self, device):
                time.sleep(0.1)

            def decode_request(self, request):
                time.sleep(0.001)
                return request["input"]

            def predict(self, x):
                time.sleep(0.004)
                return x

            def encode_response(self, output):
                return {"output": output}

        if __name__ == "__main__":
            server = litserve.LitServer(Api(), accelerator="cpu")
            server.run(port=int(sys.argv[1]), num_api_servers=1, generate_client_file=False, log_level="warning")
        """,
    )
    words = ["serve.py", "{port}"]
    port = free_port()
    with observed_server(words, port, "/health"):
        send(port, "/predict", 40)
    rules = rules_of(Path("profile.yaml").read_text())
    assert rules == {
        "__main__:Api.setup": {"phase": "load"},
        "__main__:Api.decode_request": {"phase": "prepare"},
        "__main__:Api.predict": {"phase": "compute"},
    }
    spans = recorded_by(words, "/predict", "/health", 20, signal.SIGINT)
    assert spans["Api.predict"] == spans["POST /predict"] == 20
