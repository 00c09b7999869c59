"""What the instrumentation costs a service: `python tests/bench/service.py`, from the root of the repository.

The demonstration's server (`examples/chat`) takes the same block of requests again and again, in three states that take
turns in an order drawn anew each time: recording, with recording switched off, and bare, when the session has been
stopped and every probe taken off. All three are of one process, for where the memory of two lies makes them differ by
more than what is looked for; and a change of the machine's speed falls on all three alike. The first requests are not
counted, nor is the first block after the probes were put on or taken off, which Python's interpreter needs to learn its
way anew. Each server gives one shift of the median latency and one of the 99th percentile over all its blocks, as the
client sees them, and one of the processor time that the server spends on a request, the median of its blocks, which the
client and the rest of the machine disturb least. The figures are the medians over the servers, and their 95 %
confidence intervals come from drawing the servers anew (bootstrap). Three comparisons: all of it, the probes alone,
recording alone.

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

import yaml

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
COMPARISONS = (
    ("recording, all of it", "on", "bare"),
    ("the probes alone", "off", "bare"),
    ("recording alone", "on", "off"),
)

Figures = dict[str, float]
"""Seconds by name."""


def environment(seed: int) -> dict[str, str]:
    """That of the caller, with a fixed hash seed and without a collector or another session."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "INSTRUMENT"))}
    path = [str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**own, "PYTHONPATH": os.pathsep.join(path), "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"}


def processor_s(process: int) -> float:
    """Processor time of all threads that the process has now."""
    threads = Path(f"/proc/{process}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


HOST = """
import sys, threading
import instrument
from chat import server
from instrument.recorder import RECORDER

def follow():
    for line in sys.stdin:
        state, profile = line.rstrip().split(" ", 1)
        try:
            instrument.session()
        except instrument.StateError:
            if state != "bare":
                instrument.start(profile)
        if state == "bare":
            instrument.stop()
        else:
            (instrument.enable if state == "on" else instrument.disable)()
        print(state, RECORDER.calls, flush=True)

threading.Thread(target=follow, daemon=True).start()
sys.argv[0] = "chat.server"
server.main()
"""
"""The server, and a thread that waits for words on its standard input: the state to be in, and the profile."""

Blocks = list[tuple[list[float], float]]
"""Of each block the latency of its requests and the processor time of one, in seconds."""


@contextmanager
def server_of(seed: int, folder: str, core: set[int]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server and its address, without probes."""
    command = [sys.executable, "-c", HOST, "--port", "0"]
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


def block(server: subprocess.Popen[str], url: str, concurrency: int) -> tuple[list[float], float]:
    """What a block of requests takes."""
    before_s = processor_s(server.pid)
    answers = asyncio.run(load.run(url, BLOCK, concurrency, LIMIT_S))
    spent_s = processor_s(server.pid) - before_s
    faults = [answer.error for answer in answers if answer.error]
    if faults:
        raise RuntimeError(f"{len(faults)} requests failed, the first: {faults[0]}")
    return [answer.total_s for answer in answers], spent_s / BLOCK


def tell(server: subprocess.Popen[str], state: str, profile: Path) -> int:
    """Bring a server into a state; how many calls it has recorded."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(f"{state} {profile}\n")
    server.stdin.flush()
    said, _, calls = server.stdout.readline().partition(" ")
    if said != state:
        raise RuntimeError("the server does not follow")
    return int(calls)


def compare(profile: Path, blocks: int, concurrency: int, seed: int, folder: str, core: set[int]) -> dict[str, Figures]:
    """The figures of a server in each state: bare, off, on."""
    order = random.Random(seed)
    found: dict[str, Blocks] = {"bare": [], "off": [], "on": []}
    with server_of(seed, folder, core) as (server, url):
        asyncio.run(load.run(url, WARM_UP, concurrency, LIMIT_S))
        now, recorded = "bare", 0
        for _ in range(blocks):
            for state in order.sample(sorted(found), len(found)):
                before = tell(server, state, profile)
                if "bare" in (state, now) and state != now:
                    block(server, url, concurrency)
                    before = tell(server, state, profile)
                now = state
                found[state].append(block(server, url, concurrency))
                calls = tell(server, state, profile) - before
                # A comparison with a session that did not record would show how little nothing costs.
                if (calls >= BLOCK) != (state == "on"):
                    raise RuntimeError(f"{calls} calls were recorded in {BLOCK} requests of the state {state}")
                recorded += calls
    told = {state: figures(taken) for state, taken in found.items()}
    told["on"]["calls"] = recorded / (BLOCK * blocks)
    return told


def without_exports(profile: Path, folder: str) -> Path:
    """The profile, but for what a session writes when it is stopped."""
    document = yaml.safe_load(profile.read_text())
    document["export"] = {"summary": {"to": f"{folder}/summary.txt", "views": ["cost"]}}
    path = Path(folder, "profile.yaml")
    path.write_text(yaml.safe_dump(document))
    return path


def figures(blocks: Blocks) -> Figures:
    """Percentiles over all requests, processor time as the median of the blocks."""
    ordered = sorted(total_s for totals, _ in blocks for total_s in totals)
    spent = statistics.median(spent_s for _, spent_s in blocks)
    return {"p50": quantile(ordered, 0.5), "p99": quantile(ordered, 0.99), "processor": spent}


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
    return f"NOT DECIDED: the interval is {width:.2%} wide{wider}; more --servers"


def shift(found: dict[str, Figures], name: str, of: str, against: str) -> float:
    """By what share a figure of one state differs from that of another."""
    return found[of][name] / found[against][name] - 1


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="what the instrumentation costs the demonstration's service")
    parser.add_argument("--servers", type=int, default=8, help="how many, at least 2 (default: 8)")
    parser.add_argument(
        "--blocks", type=int, default=10, help=f"of {BLOCK} requests to each server in each state (default: 10)"
    )
    parser.add_argument("--concurrency", type=int, default=8, help="how many at a time (default: 8)")
    parser.add_argument("--profile", type=Path, default=ROOT / "configs" / "chat.yaml", help="what is recorded")
    options = parser.parse_args()
    if options.servers < 2 or options.blocks < 2:
        parser.error("--servers and --blocks must be at least 2")
    begin = time.perf_counter()
    core = server_core()
    if core:
        pin(0, set(os.sched_getaffinity(0)) - core)
    servers: list[dict[str, Figures]] = []
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{options.servers} servers, {options.blocks} blocks of {BLOCK} requests in each state, ", end="")
    print(f"{options.concurrency} at a time\n")
    with tempfile.TemporaryDirectory() as folder:
        profile = without_exports(options.profile.resolve(), folder)
        for number in range(options.servers):
            servers.append(compare(profile, options.blocks, options.concurrency, number + 1, folder, core))
            shifts = ", ".join(f"{name} {shift(servers[-1], name, 'on', 'bare'):+.2%}" for name in NAMES)
            print(f"server {number + 1}: {shifts}, {servers[-1]['on']['calls']:.0f} calls a request", flush=True)
    for title, of, against in COMPARISONS:
        columns = f"{f'{against} ms':>10}{'shift':>9}{'95 % interval':>22}{'servers differ by':>19}"
        print(f"\n{title:<24}{columns}  target")
        for name in NAMES:
            values = [shift(found, name, of, against) for found in servers]
            low, high = interval(values)
            without_ms = statistics.median(found[against][name] for found in servers) * 1e3
            spread = max(values) - min(values)
            print(
                f"{name:<24}{without_ms:>10.2f}"
                f"{statistics.median(values):>+9.2%}{f'{low:+.2%} to {high:+.2%}':>22}{spread:>19.2%}"
                f"  <= {TARGET:.0%} {verdict(low, high)}"
            )
    print(f"took {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
