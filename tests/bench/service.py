"""What the instrumentation costs a service: `python tests/bench/service.py`, from the root of the repository.

The demonstration's server (`examples/chat`) runs bare (A) and under `instrument run` with a profile (B), each time as a
process of its own, in the order A B B A, so that a steady drift of the machine's speed falls on both alike. The same
requests go to each, the first of them not counted. Every neighbouring A and B make a pair; it gives one shift of the
median latency and one of the 99th percentile, as the client sees them, and one of the processor time that the server
spends on a request, which the client and the rest of the machine disturb least. The figures are the medians over the
pairs, and their 95 % confidence intervals come from drawing the pairs anew (bootstrap).

Two processes differ by more than the target without any instrumentation (where their memory lies, what else runs on
the machine), so a second table narrows the larger part of it down: in one instrumented process recording is switched
off and on by turns, block by block of requests, and each neighbouring two make a pair. It shows what recording costs,
with the probes in place both times; what the probes alone cost is only in the first table.

Where there is more than one core, the server has the last one for itself and the client the others: what the server
does on any of its threads then adds to its latency, and the client's work does not. An interval wider than the target
decides nothing, and the table says so.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from chat import load  # noqa: E402

TARGET = 0.01
WARM_UP = 64
DRAWS = 10_000
LIMIT_S = 120
BLOCK = 48
LISTENING = "listening on "
NAMES = ("p50", "p99", "processor")

Figures = dict[str, float]
"""Seconds by name."""


def environment(seed: int) -> dict[str, str]:
    """That of the caller, with a fixed hash seed for both of a pair and without a collector or another session."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "INSTRUMENT"))}
    path = [str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**own, "PYTHONPATH": os.pathsep.join(path), "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"}


def processor_s(process: int) -> float:
    """Processor time of all threads that the process has now."""
    threads = Path(f"/proc/{process}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


SWITCHED = """
import sys, threading
import instrument
from chat import server

def follow():
    for line in sys.stdin:
        (instrument.enable if line == "on\\n" else instrument.disable)()
        print(line, end="", flush=True)

threading.Thread(target=follow, daemon=True).start()
sys.argv[0] = "chat.server"
server.main()
"""
"""The same server with a thread that waits for words on its standard input."""


@contextmanager
def server_of(
    profile: Path | None, seed: int, folder: str, core: set[int], host: list[str]
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server and its address. One that is instrumented must have counted requests at its end."""
    run = ["-m", "instrument", "run", "--profile", str(profile), "--"] if profile else []
    command = [sys.executable, *run, *host, "--port", "0"]
    with (
        tempfile.TemporaryFile("w+", dir=folder) as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
            env=environment(seed),
        ) as server,
    ):
        assert server.stdout is not None
        pin(server.pid, core)
        try:
            line = server.stdout.readline()
            if not line.startswith(LISTENING):
                errors.seek(0)
                raise RuntimeError(f"the server did not start: {line}{errors.read()[-2000:]}")
            yield server, line.removeprefix(LISTENING).strip()
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=LIMIT_S)
        errors.seek(0)
        # A comparison with a session that did not run would show how little nothing costs.
        if profile and "http.request" not in errors.read():
            raise RuntimeError("the instrumented server ended without a summary that counts requests")


def figures(server: subprocess.Popen[str], url: str, requests: int, concurrency: int) -> Figures:
    """What as many requests take."""
    before_s = processor_s(server.pid)
    answers = asyncio.run(load.run(url, requests, concurrency, LIMIT_S))
    spent_s = processor_s(server.pid) - before_s
    faults = [answer.error for answer in answers if answer.error]
    if faults:
        raise RuntimeError(f"{len(faults)} requests failed, the first: {faults[0]}")
    ordered = sorted(answer.total_s for answer in answers)
    return {"p50": quantile(ordered, 0.5), "p99": quantile(ordered, 0.99), "processor": spent_s / requests}


def serve(profile: Path | None, requests: int, concurrency: int, seed: int, folder: str, core: set[int]) -> Figures:
    """What as many requests take, sent to a server of its own."""
    with server_of(profile, seed, folder, core, ["-m", "chat.server"]) as (server, url):
        asyncio.run(load.run(url, WARM_UP, concurrency, LIMIT_S))
        return figures(server, url, requests, concurrency)


def switch(profile: Path, blocks: int, concurrency: int, folder: str, core: set[int]) -> list[dict[bool, Figures]]:
    """Pairs of blocks of requests to one server, with recording off and on."""
    with server_of(profile, 1, folder, core, ["-c", SWITCHED]) as (server, url):
        assert server.stdin is not None
        assert server.stdout is not None
        asyncio.run(load.run(url, WARM_UP, concurrency, LIMIT_S))
        pairs: list[dict[bool, Figures]] = []
        for pair in range(blocks):
            found: dict[bool, Figures] = {}
            for on in (False, True) if pair % 2 == 0 else (True, False):
                word = "on\n" if on else "off\n"
                server.stdin.write(word)
                server.stdin.flush()
                if server.stdout.readline() != word:
                    raise RuntimeError("the server does not follow")
                found[on] = figures(server, url, BLOCK, concurrency)
            pairs.append(found)
        return pairs


def pin(process: int, cores: set[int]) -> None:
    """Keep a process on these cores, where the system can."""
    if hasattr(os, "sched_setaffinity") and cores:
        os.sched_setaffinity(process, cores)


def server_core() -> set[int]:
    """The last core that this process may use; none where it has only one."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return set(cores[-1:]) if len(cores) > 1 else set()


def quantile(ordered: list[float], share: float) -> float:
    """Nearest rank."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def interval(values: list[float]) -> tuple[float, float]:
    """95 % confidence interval of the median, from samples drawn with replacement; the same for the same values."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(DRAWS))
    return medians[int(0.025 * DRAWS)], medians[int(0.975 * DRAWS)]


def verdict(low: float, high: float) -> str:
    """What the interval says about the target."""
    if high <= TARGET:
        return "met"
    if low > TARGET:
        return "MISSED"
    width = high - low
    wider = f", {width / TARGET:.1f} times as wide as the target" if width > TARGET else ""
    return f"NOT DECIDED: the interval is {width:.2%} wide{wider}; more --pairs"


def shift(pair: dict[bool, Figures], name: str) -> float:
    """By what share B differs from A."""
    return pair[True][name] / pair[False][name] - 1


def print_table(without: str, pairs: list[dict[bool, Figures]]) -> None:
    """One line for each figure."""
    print(f"\n{'a request':<10}{f'{without} ms':>9}{'shift':>9}{'95 % interval':>22}{'pairs differ by':>17}  target")
    for name in NAMES:
        values = [shift(pair, name) for pair in pairs]
        low, high = interval(values)
        print(
            f"{name:<10}{statistics.median(pair[False][name] for pair in pairs) * 1e3:>9.2f}"
            f"{statistics.median(values):>+9.2%}{f'{low:+.2%} to {high:+.2%}':>22}{max(values) - min(values):>17.2%}"
            f"  <= {TARGET:.0%} {verdict(low, high)}"
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="what the instrumentation costs the demonstration's service")
    parser.add_argument("--pairs", type=int, default=8, help="how many, at least 2 (default: 8)")
    parser.add_argument("--requests", type=int, default=400, help="to each server (default: 400)")
    parser.add_argument("--concurrency", type=int, default=8, help="how many at a time (default: 8)")
    parser.add_argument("--blocks", type=int, default=60, help="pairs of blocks in one process (default: 60; 0: none)")
    parser.add_argument("--profile", type=Path, default=ROOT / "configs" / "chat.yaml", help="what B records")
    options = parser.parse_args()
    if options.pairs < 2 or options.requests < 100 or options.blocks == 1:
        parser.error("--pairs and --blocks must be at least 2, --requests at least 100")
    begin = time.perf_counter()
    core = server_core()
    if core:
        pin(0, set(os.sched_getaffinity(0)) - core)
    pairs: list[dict[bool, Figures]] = []
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{options.pairs} pairs of processes, {options.requests} requests each, {options.concurrency} at a time\n")
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(options.pairs):
            found: dict[bool, Figures] = {}
            for on in (False, True) if pair % 2 == 0 else (True, False):
                profile = options.profile.resolve() if on else None
                found[on] = serve(profile, options.requests, options.concurrency, pair + 1, folder, core)
            pairs.append(found)
            print(f"pair {pair + 1}: " + ", ".join(f"{name} {shift(found, name):+.2%}" for name in NAMES))
        print_table("bare", pairs)
        if options.blocks:
            print(f"\n{options.blocks} pairs of blocks in one process, {BLOCK} requests each: recording off and on")
            print_table("off", switch(options.profile.resolve(), options.blocks, options.concurrency, folder, core))
    print(f"took {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
