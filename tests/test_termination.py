"""Signals that end a process, in processes of their own: what is left behind, and what the service sees of us."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROFILE = 'functions: [{match: "work:step"}]\nexport: {summary: {to: stderr, views: [events]}}\n'


@pytest.fixture(autouse=True)
def hang_up_ends_a_process() -> Iterator[None]:
    """Restore the default action of SIGHUP during a test. Children of a process under nohup ignore SIGHUP."""
    found = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, found)


def run(folder: Path, source: str, *, instrumented: bool = True) -> subprocess.CompletedProcess[str]:
    (folder / "work.py").write_text("def step(x):\n    return x + 1\n")
    (folder / "profile.yaml").write_text(PROFILE)
    (folder / "main.py").write_text("from work import step\nstep(1)\n" + textwrap.dedent(source))
    ours = ["-m", "instrument", "run", "--profile", "profile.yaml"] if instrumented else []
    words = [sys.executable, *ours, "main.py"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=240, check=False)


ENDS = {
    "resets the signal": "signal.signal(N, lambda *_: None); signal.signal(N, signal.SIG_DFL); die()",
    "resets it by number": "signal.signal(N, lambda *_: None); signal.signal(N, 0); die()",
    "puts back what it found": "found = signal.signal(N, lambda *_: 0); signal.signal(N, found); die()",
    "puts back what it asked for": (
        "found = signal.getsignal(N); signal.signal(N, lambda *_: 0); signal.signal(N, found); die()"
    ),
    "dies of it at the end of a handler of its own": (
        "signal.signal(N, lambda *_: (signal.signal(N, signal.SIG_DFL), die())); die()"
    ),
    "takes its handler off an event loop": (
        "loop = asyncio.new_event_loop(); loop.add_signal_handler(N, print); loop.remove_signal_handler(N); die()"
    ),
    "is forked after a reset": (
        "signal.signal(N, lambda *_: 0); signal.signal(N, signal.SIG_DFL)\n"
        "pid = os.fork()\n"
        "if not pid: step(2); die()\n"
        "os.waitpid(pid, 0); die()"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "number"), [*zip(ENDS.values(), itertools.cycle([signal.SIGTERM, signal.SIGHUP]))], ids=ENDS.keys()
)
def test_a_service_that_resets_a_signal_leaves_its_summary_and_dies_of_the_signal(
    tmp_path: Path, source: str, number: signal.Signals
) -> None:
    begin = f"import asyncio, os, signal\nN = signal.{number.name}\ndef die(): signal.raise_signal(N)\n"
    done = run(tmp_path, begin + source)
    assert done.returncode == -number, done.stderr
    assert done.stderr.count("Profiling Report") == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_still_ends_a_program_that_asks_for_the_default_because_its_main_thread_runs_c(tmp_path: Path) -> None:
    source = """
    import signal, _signal
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    assert _signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    signal.raise_signal(signal.SIGINT)
    """
    done = run(tmp_path, source)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


SEEN = """
import inspect, json, signal, threading
def shown(found):
    return repr(found) if not callable(found) else found.__name__
def own(*_): pass
seen = [shown(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)]
seen += [shown(signal.signal(signal.SIGTERM, own)), shown(signal.getsignal(signal.SIGTERM))]
seen += [shown(signal.signal(signal.SIGTERM, signal.SIG_IGN)), shown(signal.signal(signal.SIGTERM, signal.SIG_DFL))]
seen += [shown(signal.signal(signal.SIGTERM, signal.SIG_DFL)), shown(signal.getsignal(15))]
for call in (lambda: signal.signal(99, own), lambda: signal.signal(15, "x"), lambda: signal.getsignal("x")):
    try: call()
    except Exception as error: seen.append(repr(error))
def elsewhere():
    try: signal.signal(signal.SIGTERM, signal.SIG_DFL)
    except ValueError as error: seen.append(repr(error))
thread = threading.Thread(target=elsewhere); thread.start(); thread.join()
seen += [signal.signal.__name__, signal.signal.__doc__, str(inspect.signature(signal.signal))]
print(json.dumps(seen))
"""


def test_the_service_sees_its_signals_as_without_us(tmp_path: Path) -> None:
    ours, plain = (run(tmp_path, SEEN, instrumented=instrumented) for instrumented in (True, False))
    assert plain.returncode == 0, plain.stderr
    assert json.loads(ours.stdout) == json.loads(plain.stdout)


def test_the_end_of_the_session_gives_back_the_functions_and_the_default(tmp_path: Path) -> None:
    source = """
    import instrument, signal, _signal
    replaced = signal.signal
    instrument.stop()
    assert _signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert "instrument" not in signal.signal.__code__.co_filename
    assert "instrument" not in signal.getsignal.__code__.co_filename
    replaced(signal.SIGTERM, signal.SIG_DFL)  # who holds it still has what it stands for
    assert _signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    """
    done = run(tmp_path, source)
    assert done.returncode == 0, done.stderr


def test_a_wrapper_of_somebody_else_around_ours_stays(tmp_path: Path) -> None:
    source = """
    import instrument, signal, _signal
    inner = signal.signal
    signal.signal = outer = lambda number, handler: inner(number, handler)
    instrument.stop()
    assert signal.signal is outer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert _signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    """
    done = run(tmp_path, source)
    assert done.returncode == 0, done.stderr


NATIVE = """
import ctypes, signal, sys, instrument
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
setsig = ctypes.pythonapi.PyOS_setsig  # C's sigaction
setsig.restype = ctypes.c_void_p
calls = []
@handler
def stop_gracefully(number):
    calls.append(number)
    if before:
        handler(before)(number)  # as tokio's signal-hook does: the default is not called
before = setsig(signal.SIGTERM, stop_gracefully)
signal.raise_signal(signal.SIGTERM)
for _ in range(1000): step(2)  # the handler in Python has its turn meanwhile
assert calls == [signal.SIGTERM]
"""


def test_a_signal_that_native_code_has_taken_since_ends_nothing(tmp_path: Path) -> None:
    at_the_end = """
    instrument.stop()
    signal.raise_signal(signal.SIGTERM)
    for _ in range(1000): step(3)
    assert len(calls) == 2
    """
    done = run(tmp_path, NATIVE + textwrap.dedent(at_the_end))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Profiling Report") == 1, done.stderr


def test_a_signal_that_native_code_has_given_back_ends_the_session_first(tmp_path: Path) -> None:
    give_back = """
    setsig(signal.SIGTERM, ctypes.c_void_p(before))
    signal.raise_signal(signal.SIGTERM)
    """
    done = run(tmp_path, NATIVE + textwrap.dedent(give_back))
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert done.stderr.count("Profiling Report") == 1, done.stderr


def test_none_of_it_happens_to_a_service_that_starts_a_session_itself(tmp_path: Path) -> None:
    source = """
    import signal
    before = signal.signal, signal.getsignal
    import instrument
    instrument.start("profile.yaml")
    assert (signal.signal, signal.getsignal) == before
    instrument.stop()
    """
    done: Any = run(tmp_path, source, instrumented=False)
    assert done.returncode == 0, done.stderr
