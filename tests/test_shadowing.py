"""A service whose own folder has modules named as those of the standard library: it and we get each their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROFILE = "service: shop\nfunctions: [{match: 'jobs:step'}]\nexport: {recording: , summary: {to: stderr}}\n"
MAIN = """
import jobs, calendar
for i in range(3): jobs.step(i)
import statistics, token
print("done", calendar.X, statistics.X, token.X)
"""
OF_MODULES = (
    "token platform types queue statistics calendar secrets random code profile trace email string numbers select gc "
    "dataclasses typing"
)
COMMAND = str(Path(sys.executable).with_name("instrument"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "python_path"),
    [
        ([COMMAND, "run", "--profile", "p.yaml", "--", "main.py"], ""),
        ([COMMAND, "run", "--profile", "p.yaml", "--", "-m", "main"], "."),
        pytest.param(
            [sys.executable, "-m", "instrument", "run", "--profile", "p.yaml", "--", "main.py"],
            "",
            marks=pytest.mark.slow,
        ),
        pytest.param([COMMAND, "check", "p.yaml", "jobs"], ".", marks=pytest.mark.slow),
    ],
    ids=["script", "on PYTHONPATH", "-m", "check"],
)
def test_modules_of_the_service_named_as_those_of_the_standard_library_are_its_own(
    words: list[str], python_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("INSTRUMENT", "PYTHONPATH"))]:
        monkeypatch.delenv(name)
    # All but those that Python itself takes as it starts, or as it is to run a module.
    probe = [sys.executable, "-c", "import runpy, sys; print(*sys.modules)"]
    taken = subprocess.run(probe, capture_output=True, text=True, check=True).stdout.split()
    names = {*OF_MODULES.split()}.difference(taken)
    assert {"calendar", "statistics", "token"} <= names
    for name in names:
        Path(f"{name}.py").write_text("X = 1\n")
    Path("jobs.py").write_text("def step(i): return i + 1\n")
    Path("main.py").write_text(MAIN)
    Path("p.yaml").write_text(PROFILE)
    environ = {**os.environ, "PYTHONPATH": python_path} if python_path else dict(os.environ)
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environ, timeout=240)
    assert done.returncode == 0, done.stderr
    if "check" in words:
        assert "jobs:step" in done.stdout
        return
    assert done.stdout == "done 1 1 1\n", done.stderr
    assert any(line.split()[:1] == ["step"] for line in done.stderr.splitlines()), done.stderr
    assert "Error" not in done.stderr
    assert "fault" not in done.stderr
    assert list(Path("traces").glob("*.npz"))
