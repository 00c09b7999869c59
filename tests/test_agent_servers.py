"""Servers of several processes under one run: one report, every request once, and nothing of the run left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from test_agent import INSTRUMENT, PROFILE, agents, folder, processes, run, until

from instrument.trace import file

__all__ = ["folder"]

pytestmark = pytest.mark.slow

SHOP = """
import engine

def wsgi(environ, start_response):
    engine.step(1)
    start_response("200 OK", [("Content-Length", "1")])
    return [b"x"]

async def asgi(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    engine.step(1)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
    await send({"type": "http.response.body", "body": b"x"})
"""

GUNICORN = ["-m", "gunicorn", "-w", "2", "-b", "127.0.0.1:{port}", "--graceful-timeout", "10"]
SERVERS = {
    "sync": [*GUNICORN, "shop:wsgi"],
    "preload": [*GUNICORN, "--preload", "shop:wsgi"],
    "gthread": [*GUNICORN, "-k", "gthread", "--threads", "4", "shop:wsgi"],
    "gevent": [*GUNICORN, "-k", "gevent", "shop:wsgi"],
    "uvicorn-worker": [*GUNICORN, "-k", "uvicorn_worker.UvicornWorker", "shop:asgi"],
    "uvicorn": ["-m", "uvicorn", "--workers", "4", "--port", "{port}", "--log-level", "warning", "shop:asgi"],
}
NEEDS = {"gevent": ("gunicorn", "gevent"), "uvicorn-worker": ("gunicorn", "uvicorn_worker"), "uvicorn": ("uvicorn",)}


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 10) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: shop\r\nConnection: close\r\n\r\n")
            return client.recv(12).endswith(b"200")
    except OSError:
        return False


def recording() -> list[int]:
    return [one["pid"] for one in processes() if one["has_recorded"] and not one["ended_ns"]]


def memories(agent: int) -> int:
    """How many recordings an agent holds."""
    links = [os.readlink(path) for path in Path(f"/proc/{agent}/fd").iterdir() if path.is_symlink()]  # noqa: PTH115
    return sum(link.startswith("/memfd:instrument") for link in links)


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


def asked_by_many(port: int, times: int) -> int:
    """How many of so many requests, eight at a time, were answered."""
    answered: list[bool] = []

    def client() -> None:
        answered.extend([answers(port) for _ in range(times // 8)])

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(answered)


def until_many(found: Callable[[], int], wanted: int, ask: Callable[[], int]) -> int:
    """Ask until as many processes record; how often it was answered."""
    asked, end = 0, time.monotonic() + 240
    while found() < wanted:
        assert time.monotonic() < end, f"{found()} of {wanted} processes record"
        asked += ask()
    return asked


@pytest.mark.parametrize("server", SERVERS)
def test_every_request_of_a_server_is_in_one_report_once_and_nothing_is_left(server: str) -> None:
    for needed in NEEDS.get(server, ("gunicorn",)):
        pytest.importorskip(needed)
    Path("shop.py").write_text(SHOP)
    Path("profile.yaml").write_text(PROFILE + "requests: auto\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.format(port=port) for word in SERVERS[server]]
    workers = 4 if server == "uvicorn" else 2
    with Path("errors").open("w") as errors, Path("out").open("w") as out:
        service = subprocess.Popen(
            [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", *words], stderr=errors, stdout=out
        )
    try:
        asked = until(lambda: int(answers(port)))
        asked += until_many(lambda: len(recording()), workers, lambda: asked_by_many(port, 8))
        asked += asked_by_many(port, 400)
        (agent,) = agents()
        assert memories(agent) == len([one for one in processes() if not one["ended_ns"]])
    finally:
        service.send_signal(signal.SIGTERM)
        code = service.wait(240)
    assert code in (0, -signal.SIGTERM), Path("errors").read_text()
    until(lambda: "Summary of shop" in Path("errors").read_text() or not of_this_run())
    told = Path("errors").read_text() + Path("out").read_text()
    assert told.count("Summary of shop") == 1, told
    assert re.search(r"requests: (\d+)", told)[1] == str(asked), told  # type: ignore[index]
    (row,) = [line for line in told.splitlines() if line.startswith("step ")]
    assert row.split()[3] == str(asked)
    assert "without a goodbye" not in told
    assert told.partition("Processes:")[2].count("in order") >= workers
    until(lambda: not of_this_run())


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


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
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
    names = Counter(span.site.name for span in file.load(path).trace().spans)
    assert names == {"step": 200}
    until(lambda: not of_this_run())


RELOADED = """
import os, sys, json, multiprocessing

def work(number):
    import engine
    return engine.step(number)

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(4, maxtasksperchild=12) as pool:
        print(json.dumps(sum(pool.map(work, range(100), chunksize=1))))
        pool.close()
        pool.join()
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_a_pool_that_come_and_go_are_one_report(method: str) -> None:
    done = run(RELOADED, method)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == sum(range(1, 101))
    assert done.stderr.count("Summary of shop") == 1
    (row,) = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert row.split()[3] == "100"
    assert "without a goodbye" not in done.stderr
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
