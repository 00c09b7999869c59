"""The commands that `instrument run`, `check` and `init` take: what a shell takes, and a container's CMD."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from instrument.cli import interpreter
from instrument.cli.interpreter import Command, find_command, list_interpreter_flags

PROFILE = "service: shop\nfunctions: [{match: 'engine:step'}]\nexport: {summary: {to: stderr}}\n"
MAIN = "import sys, engine\nengine.step(1)\nprint('ran', *sys.argv[1:])\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a service, and commands of this environment and of the system on PATH."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("INSTRUMENT")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}")
    for name, text in (("engine.py", "def step(x): return x\n"), ("main.py", MAIN), ("profile.yaml", PROFILE)):
        Path(name).write_text(text)
    program("bin/serve", f"#!{sys.executable}\nimport sys\nsys.path.insert(0, '.')\n{MAIN}")
    program("start.sh", "#!/bin/sh\nexport STARTED=1\npython main.py of-a-script\n")
    return tmp_path


def program(name: str, text: str) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)
    Path(name).chmod(0o755)


def instrument(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "instrument", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["python", "main.py", "a"], "ran a"),
        (["serve", "app:app"], "ran app:app"),
        (["./start.sh"], "ran of-a-script"),
        (["bash", "-c", "true; python main.py of-a-shell; exit 3"], "ran of-a-shell"),
        (["env", "-u", "NOTHING", "python", "main.py", "b"], "ran b"),
    ],
)
def test_a_command_runs_as_a_shell_runs_it_and_is_recorded(command: list[str], says: str) -> None:
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    done = instrument("run", "--profile", "profile.yaml", "--", *command)
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout), done.stderr
    assert says in done.stdout
    assert [line.split()[-2] for line in done.stderr.splitlines() if line.startswith("step ")] != [], done.stderr


@pytest.mark.slow
def test_check_and_init_take_the_same_commands() -> None:
    done = instrument("check", "profile.yaml", "--", "./start.sh")
    assert done.returncode == 0, done.stderr
    assert "engine:step" in done.stdout
    done = instrument("init", "-o", "-", "--", "bash", "-c", "python main.py")
    assert done.returncode == 0, done.stderr
    assert "1 process" in done.stdout


def test_each_kind_of_command_is_run_by_what_it_is_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "OFF", False)
    python = [sys.executable, *list_interpreter_flags()]
    own = Path(sys.executable).parent
    Path("app").mkdir()
    Path("app/__main__.py").touch()
    Path("plain.sh").write_text("python main.py\n")
    Path("bin/machine").write_bytes(b"\x7fELF")
    Path("bin/machine").chmod(0o755)
    program("bin/long", f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n{MAIN}")
    program("bin/by_env", f"#!/usr/bin/env python3\n{MAIN}")
    program("bin/python3.99", '#!/bin/sh\nexec python3 "$@"\n')  # as version managers have
    cases = {
        ("main.py", "x"): [*python, "main.py", "x"],
        ("-m", "app"): [*python, "-m", "app"],
        ("app",): [*python, "app"],
        ("python", "-O", "main.py"): [*python, "-O", "main.py"],
        (sys.executable, "-m", "app"): [*python, "-m", "app"],
        ("serve", "app:app"): [*python, f"{folder}/bin/serve", "app:app"],
        ("bin/serve",): [*python, "bin/serve"],
        ("long",): [*python, f"{folder}/bin/long"],
        ("by_env",): [*python, f"{folder}/bin/by_env"],
        ("plain.sh", "x"): ["/bin/sh", "plain.sh", "x"],
        ("./start.sh",): [f"{folder}/start.sh"],
        ("python3.99", "main.py"): [*python, "main.py"],
    }
    assert {given: find_command("run", list(given)) for given in cases} == {
        given: Command(words) for given, words in cases.items()
    }
    note = "machine is machine code: Python in it and below it is recorded, all else is not"
    assert find_command("run", ["machine", "--http", ":80"]) == Command(
        [f"{folder}/bin/machine", "--http", ":80"], note
    )
    assert own in Path(python[0]).parents
