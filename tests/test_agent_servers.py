"""Servers that kill or fork their processes past Python: all are part of the one report, and nothing is left behind."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from test_agent import INSTRUMENT, folder, run, until

from instrument.trace import file

__all__ = ["folder"]

pytestmark = pytest.mark.slow


def of_this_run() -> list[str]:
    """The processes that have the run's own variable, zombies of this one among them."""
    own, found = os.environ["XDG_RUNTIME_DIR"].encode(), []
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal() or int(path.name) == os.getpid():
            continue
        try:
            stat = (path / "stat").read_text().rpartition(")")[2].split()
            is_zombie_of_ours = stat[0] == "Z" and int(stat[1]) == os.getpid()
            if is_zombie_of_ours or own in (path / "environ").read_bytes():
                found.append(f"{path.name} {stat[0]} {(path / 'cmdline').read_bytes()!r}")
        except OSError:
            continue
    return found


ENGINE = """
import multiprocessing, os, signal, sys

def work(requests, answers):
    import engine
    while True:
        answers.send(engine.step(requests.recv()))

if __name__ == "__main__":
    from instrument import scope
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context(sys.argv[1])
    process = context.Process(target=work, args=(theirs, theirs))
    process.start()
    for number in range(200):
        with scope("POST /generate", kind="request"):
            ours.send(number)
            ours.recv()
    process.kill()
    process.join()
    print(process.pid, process.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_engine_that_its_server_stops_by_sigkill_is_part_of_the_report_and_has_lost_nothing(method: str) -> None:
    done = run(ENGINE, method)
    assert done.returncode == 0, done.stderr
    pid = done.stdout.split()[0]
    assert done.stderr.count("Summary of shop") == 1
    assert re.search(r"requests: (\d+)", done.stderr)[1] == "200"  # type: ignore[index]
    (row,) = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert row.split()[3] == "200"
    assert done.stderr.count(f"instrument: process {pid} of shop ended without a goodbye") == 1
    assert f"{pid} (without a goodbye" in done.stderr
    (path,) = Path("traces").glob("*-died.npz")
    names = Counter(span.site.name for span in file.load(path).trace.spans)
    assert names == {"step": 200}
    until(lambda: not of_this_run())


EMBEDDED = """
import ctypes, os, sys, types
sys.modules["uwsgi"] = types.SimpleNamespace(worker_id=lambda: worker, masterpid=os.getppid, numproc=2)
worker = 0
from flask import Flask
app = Flask("shop")
app.route("/items/<number>")(lambda number: number)
ask = lambda: list(app({
    "wsgi.url_scheme": "http", "SERVER_NAME": "shop", "SERVER_PORT": "80", "REQUEST_METHOD": "GET",
    "PATH_INFO": "/items/1", "SERVER_PROTOCOL": "HTTP/1.1",
}, lambda *_: None))
for number in (1, 2):
    if not ctypes.PyDLL(None).fork():
        worker = number
        for _ in range(5):
            ask()
        sys.exit()
os.wait(), os.wait()
"""


def test_workers_that_a_server_in_c_forks_are_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uWSGI calls none of Python's hooks on forks."""
    monkeypatch.chdir(tmp_path)
    Path("profile.yaml").write_text("requests: auto\nexport: {summary: {to: stderr}}")
    Path("main.py").write_text(EMBEDDED)
    done = subprocess.run(
        [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py"],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert done.stderr.count("Window: ") == 1, done.stderr
    assert "requests: 10;" in done.stderr
    assert "GET /items/<number>" in done.stderr
