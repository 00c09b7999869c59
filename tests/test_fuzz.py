"""Damaged files by the ten thousand are traces or `TraceError`, in bounded memory, and each command has a message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("inputs", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_damaged_files_load_or_are_refused(inputs: int) -> None:
    # A process of its own, because its memory is measured.
    command = [sys.executable, "-X", "faulthandler", str(Path(__file__).with_name("fuzz_traces.py")), str(inputs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert f"traces: {inputs} inputs" in done.stdout


@pytest.mark.slow
def test_commands_answer_or_refuse_damaged_recordings() -> None:
    command = [sys.executable, "-X", "faulthandler", str(Path(__file__).with_name("fuzz_commands.py")), "200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "explain 0" in done.stdout
