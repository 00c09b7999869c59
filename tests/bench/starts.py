"""The costs of starts and of memory under `instrument run`: `python tests/bench/starts.py [--rounds N] [--workers N]`.

Four ratios, each of medians over rounds in which both ways take turns, so that a slower moment of the machine meets
both. The first three are of processor time, user and system; that of the servers is of the time until all are up.

- `off`, `waits`: `python -c pass` with `INSTRUMENT=off`, and where no package that the profile is about is imported,
  over the same without us. Targets: 1.05 and 1.5.
- `records`: a child that multiprocessing spawns, until it has called a function that a rule names, over the same
  without us. Target: 3.
- `servers`: `uvicorn --workers 12` with a FastAPI app until all workers are up, under the preset `serving`, over the
  same without us. Target: 1.2.

Two differences of medians, in the same way, of `uvicorn` with one process and that app:

- `answer`: the time from the start of the command to the end of the first answer. Target: 150 ms.
- `memory`: the proportional set size of the server a second after ten answers. Target: 16 MB.

On two shared cores, Python 3.11, with bytecode of all packages: off 1.03, waits 1.07, records 2.1, memory +10 MB. The
other two need an idle machine. While others kept both cores busy, twelve workers took 1.10 times the processor time of
plain ones, in the hour before the last changes 1.28. All processes of the run together took 1.19 times as much.

Instructions (`valgrind --tool=cachegrind --cache-sim=no`) are the same under any load. A worker that serves FastAPI
executes 1,328 million without us, 1,493 with us (before: 1,501), `instrument run` 299 million before it becomes the
service (before: 370), a Python that does nothing 134. A plain worker maps and unmaps 16 KiB for its stack 1,217 times
(`strace -e trace=mmap`), one with us 2 times (before: 1,793). Each took 25 us here.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty
from typing import Any

PROFILE = "service: starts\nfunctions: [{match: 'started:*'}]\nexport: {recording: }\n"
APP = "from fastapi import FastAPI\napp = FastAPI()\n"
INSTRUMENT = [sys.executable, "-m", "instrument", "run"]
UP, UP_S = "Application startup complete", 300.0


def bare(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith(("INSTRUMENT", "PYTHONPATH"))}


def starts_ns(environ: Mapping[str, str]) -> float:
    """Processor time of a process that does nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "pass"], env=environ, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def records(queue: Any) -> None:
    import started  # type: ignore[import-not-found]

    started.step()
    queue.put(time.process_time())


def spawns_ns(environ: Mapping[str, str]) -> float:
    """Processor time of a spawned child until it has recorded a call."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    kept = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        child = context.Process(target=records, args=(queue,))
        child.start()
    finally:
        os.environ.clear()
        os.environ.update(kept)
    try:
        return float(queue.get(timeout=UP_S))
    except Empty:
        raise SystemExit("the child has not answered") from None
    finally:
        child.join()


def ratios(rounds: int, of: Callable[[Mapping[str, str]], float], ways: Mapping[str, Mapping[str, str]]) -> list[float]:
    """The medians of all ways over that of the first."""
    spent: dict[str, list[float]] = {way: [] for way in ways}
    for round_number in range(-1, rounds):
        for way, environ in ways.items():
            took = of(environ)
            if round_number >= 0:  # before, bytecode was written
                spent[way].append(took)
    first, *others = map(statistics.median, spent.values())
    return [other / first for other in others]


def within(rounds: int) -> None:
    """In a process of a run: measure its children against such that have nothing of us."""
    without, on = bare(os.environ), dict(os.environ)
    off = {**on, "INSTRUMENT": "off"}
    off_ratio, waits_ratio = ratios(rounds, starts_ns, {"bare": without, "off": off, "waits": on})
    (records_ratio,) = ratios(rounds, spawns_ns, {"bare": {**without, "PYTHONPATH": "."}, "records": on})
    print(f"off      {off_ratio:.2f}\nwaits    {waits_ratio:.2f}\nrecords  {records_ratio:.2f}", flush=True)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def up_s(words: list[str], workers: int) -> float:
    """The time until that many workers of a server are up."""
    port = free_port()
    # Its health check would kill workers that take long on a busy machine.
    words = [*words, "started:app", "--port", str(port), "--workers", str(workers)]
    with Path("errors").open("w+") as errors:
        began = time.monotonic()
        server = subprocess.Popen([*words, "--timeout-worker-healthcheck", "60"], stdout=errors, stderr=errors)
        while Path("errors").read_text().count(UP) < workers:
            if server.poll() is not None or time.monotonic() - began > UP_S:
                raise SystemExit(f"the server has not come up:\n{Path('errors').read_text()}")
            time.sleep(0.02)
        took = time.monotonic() - began
        server.send_signal(signal.SIGTERM)
        server.wait()
    return took


def answer_s(words: list[str]) -> tuple[float, float]:
    """Return the seconds to the first answer of a server, and its memory (PSS) in MB after ten."""
    port = free_port()
    began = time.monotonic()
    words = [*words, "started:app", "--port", str(port)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        took = 0.0
        for _ in range(10):
            while not answers(port):
                if server.poll() is not None or time.monotonic() - began > UP_S:
                    raise SystemExit("the server does not answer")
                time.sleep(0.002)
            took = took or time.monotonic() - began
        time.sleep(1)  # the session's threads have begun
        rollup = Path(f"/proc/{server.pid}/smaps_rollup").read_text()
        return took, next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) / 1000
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            return bool(connection.recv(1000))
    except ConnectionRefusedError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description="What the start of a process costs under `instrument run`.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--servers", type=int, default=5, help="rounds of servers")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--within", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.within:
        within(options.rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        # Bytecode of all packages is there, as where they were installed, also where this environment writes none.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(Path("bytecode").resolve())
        Path("started.py").write_text("def step(): pass\n")
        Path("profile.yaml").write_text(PROFILE)
        own = [str(Path(__file__).resolve()), "--within", "--rounds", str(options.rounds)]
        environ = {**os.environ, "PYTHONPATH": "."}
        subprocess.run([*INSTRUMENT, "--profile", "profile.yaml", "--", *own], env=environ, check=True)
        Path("started.py").write_text(APP)
        uvicorn = [sys.executable, "-m", "uvicorn"]
        ways = {"plain": uvicorn, "run": [*INSTRUMENT, "--", *uvicorn]}
        firsts: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for round_number in range(-1, options.rounds):
            for way, words in ways.items():
                first = answer_s(words)
                if round_number >= 0:  # before, bytecode was written
                    firsts[way].append(first)
        (plain_s, plain_mb), (run_s, run_mb) = (map(statistics.median, zip(*firsts[way], strict=True)) for way in ways)
        print(f"answer   {1000 * (run_s - plain_s):+.0f} ms\nmemory   {run_mb - plain_mb:+.1f} MB", flush=True)
        spent: dict[str, list[float]] = {way: [] for way in ways}
        for round_number in range(-1, options.servers):
            for way, words in ways.items():
                took = up_s(words, options.workers)
                if round_number >= 0:  # before, bytecode was written
                    spent[way].append(took)
        print(f"servers  {statistics.median(spent['run']) / statistics.median(spent['plain']):.2f}")


if __name__ == "__main__":
    main()
