"""The hello of a run's processes, and the process that waits for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from instrument.sessions import hello

SAY = "from instrument.sessions import hello; hello.say(); print(flush=True)"
SLEEP = "import time; time.sleep(60)"
EXEC = f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(flush=True); {SLEEP}'])"

Begin = Callable[[str], tuple[int, socket.socket]]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Begin a process that is the first of a run, with a socket that hears it."""
    begun: list[subprocess.Popen[str]] = []
    heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    run = f"test-{os.getpid()}"
    heard.bind(hello._address(run))
    monkeypatch.setenv("INSTRUMENT_RUN_PID", run)

    def start(source: str) -> tuple[int, socket.socket]:
        begun.append(subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True))
        assert begun[-1].stdout is not None
        begun[-1].stdout.readline()
        if "execv" in source:
            begun[-1].stdout.readline()
        return begun[-1].pid, heard

    yield start
    heard.close()
    for process in begun:
        process.kill()
        process.communicate()


def test_a_process_that_has_said_hello_is_enough(begin: Begin) -> None:
    pid, heard = begin(f"{SAY}; {SLEEP}")
    assert hello.wait(pid, heard, 0.3) == ""


def test_so_is_the_hello_of_another_process_of_the_run(begin: Begin) -> None:
    begin(f"{SAY}; {SLEEP}")
    pid, heard = begin(f"print(flush=True); {SLEEP}")
    assert hello.wait(pid, heard, 0.3) == ""


def test_silence_is_told_with_what_keeps_our_autostart_away(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = Path(hello.__file__).parent / "autostart"
    other = tmp_path / "sitecustomize.py"
    other.touch()
    for path, obstacle in (
        (f"{tmp_path}:{own}", f"{other} runs in place of ours"),
        (f"{tmp_path / 'no'}:{own}:{tmp_path}", "something on the way keeps our sitecustomize from being loaded"),
        (str(tmp_path / "no"), "something on the way has taken our folder off PYTHONPATH"),
    ):
        monkeypatch.setenv("PYTHONPATH", path)
        monkeypatch.delenv("INSTRUMENT_PROFILE", raising=False)
        pid, heard = begin(f"print(flush=True); {SLEEP}")
        said = hello.wait(pid, heard, 0.2)
        assert said.startswith(f"instrument: 0.2 s after its start no process of this run records anything: {obstacle}")
        assert said.count("\n") == 1


def test_a_program_that_has_become_another_since_its_hello_counts_no_more(begin: Begin) -> None:
    pid, heard = begin(f"{SAY}; {EXEC}")
    assert "no process of this run records anything" in hello.wait(pid, heard, 0.3)


@pytest.mark.parametrize("descriptors", [True, False], ids=["pidfd", "no pidfd"])
def test_nobody_waits_for_a_service_that_has_ended(
    begin: Begin, descriptors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not descriptors:
        monkeypatch.setattr(hello, "_exit_of", lambda pid: None)
    pid, heard = begin("print(flush=True)")
    done: list[str] = []
    waiting = threading.Thread(target=lambda: done.append(hello.wait(pid, heard, 600)))
    waiting.start()
    waiting.join(60)
    assert done == [""]


def test_a_hello_that_nobody_hears_and_one_without_a_run_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for run in ("", "0"):
        monkeypatch.setenv("INSTRUMENT_RUN_PID", run)
        hello.say()


def test_who_listens_is_no_child_of_the_service_and_holds_none_of_its_files(tmp_path: Path) -> None:
    source = """
import os, sys, time
from instrument.sessions import hello
read, write = os.pipe()
os.set_inheritable(write, True)
hello.listen(os.getpid())
os.close(write)
assert os.read(read, 1) == b"", "the pipe is still open somewhere"
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    os.write(1, b"no children")
"""
    words = [sys.executable, "-c", source]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)  # its end is also theirs
    assert (done.returncode, done.stdout, done.stderr) == (0, "no children", "")
