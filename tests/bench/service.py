"""What the instrumentation costs a service: `python tests/bench/service.py`, from the root of the repository.

The demonstration's server (`examples/chat`) answers the same requests again and again, one after the other, in three
states that take turns: bare, when there is no session and no probe, recording, and with recording switched off. All
three are of one process, for where the memory of two lies makes them differ by more than what is looked for. In each
round a session is started and stopped, its requests are answered while it records and while it does not, in the order
ABBA or BAAB, and those of the bare server come before or after, drawn anew each time: the speed of a machine wanders
by some percent within seconds, and what is compared must lie close together. The first requests after the probes were
put on or taken off do not count, for Python's interpreter learns its way anew.

A latency, as the client sees it, is told in units of the median that its own request takes, so that requests of all
lengths count alike; the 50th and the 99th percentile of these are compared between states, and so is the processor
time of the server. The 95 % confidence intervals come from drawing the rounds of each server anew (bootstrap). Where
there is more than one core, the server has the last one for itself and the client the others: what the server does on
any of its threads then adds to its latency, and the client's work does not. An interval wider than the target decides
nothing, and the table says so.
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
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from chat import load  # noqa: E402

TARGET = 0.01
WARM_UP = 64
SETTLING = 6
REQUESTS = 8
DRAWS = 1_000
LIMIT_S = 120
LISTENING = "listening on "
STATES = ("bare", "off", "on")
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
import gc, sys, threading
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
        gc.collect()
        print(state, RECORDER.calls, flush=True)

threading.Thread(target=follow, daemon=True).start()
sys.argv[0] = "chat.server"
server.main()
"""
"""The server, and a thread that waits for words on its standard input: the state to be in, and the profile.

Each turn begins with a collection of garbage: what a session leaves behind that was started or stopped a moment ago,
which no service does, would have the collector stop one of the next requests for some 30 ms.
"""


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


@dataclass
class Taken:
    """What the requests of one turn took in one state: latencies by request, processor time of all, in seconds."""

    total_s: list[float]
    processor_s: float


Round = dict[str, list[Taken]]
"""The turns of a round by state."""


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


async def turn(client: httpx.AsyncClient, server: subprocess.Popen[str], requests: int) -> Taken:
    """Send the first requests, one after the other."""
    before_s = processor_s(server.pid)
    answers = [await load.ask(client, load.make_request(number)) for number in range(requests)]
    spent_s = processor_s(server.pid) - before_s
    faults = [answer.error for answer in answers if answer.error]
    if faults:
        raise RuntimeError(f"{len(faults)} requests failed, the first: {faults[0]}")
    return Taken([answer.total_s for answer in answers], spent_s)


async def rounds_of(server: subprocess.Popen[str], url: str, count: int, profile: Path, seed: int) -> list[Round]:
    """So many rounds with a server."""
    chance = random.Random(seed)
    rounds: list[Round] = []
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False) as client:
        await turn(client, server, WARM_UP)
        for _ in range(count):
            found: Round = {"bare": [], "off": [], "on": []}
            turns = chance.choice((["on", "off", "off", "on"], ["off", "on", "on", "off"]))
            for states in chance.sample((["bare", "bare"], turns), 2):
                tell(server, states[0], profile)
                await turn(client, server, SETTLING)
                for state in states:
                    before = tell(server, state, profile)
                    found[state].append(await turn(client, server, REQUESTS))
                    recorded = tell(server, state, profile) - before
                    # A comparison with a session that did not record would show how little nothing costs.
                    if (recorded >= REQUESTS) != (state == "on"):
                        raise RuntimeError(f"{recorded} calls were recorded in {REQUESTS} requests when {state}")
            rounds.append(found)
    return rounds


def figures(rounds: list[Round], usual_s: list[float]) -> dict[str, Figures]:
    """By state the percentiles of the latencies in units of what a request usually takes, and the processor time."""
    found: dict[str, Figures] = {}
    for state in STATES:
        turns = [taken for one in rounds for taken in one[state]]
        ordered = sorted(
            total_s / usual for taken in turns for total_s, usual in zip(taken.total_s, usual_s, strict=True)
        )
        spent_s = statistics.mean(taken.processor_s for taken in turns)
        found[state] = {"p50": quantile(ordered, 0.5), "p99": quantile(ordered, 0.99), "processor": spent_s}
    return found


def usual(rounds: list[Round]) -> list[float]:
    """The median of what each request takes, in all states."""
    turns = [taken.total_s for one in rounds for takens in one.values() for taken in takens]
    return [statistics.median(request) for request in zip(*turns, strict=True)]


def shifts(servers: list[list[Round]], usual_s: list[list[float]]) -> dict[tuple[str, str, str], float]:
    """By what share each figure of one state differs from that of another, the mean over the servers."""
    told = [figures(rounds, each) for rounds, each in zip(servers, usual_s, strict=True)]
    return {
        (of, against, name): statistics.mean(one[of][name] / one[against][name] - 1 for one in told)
        for _, of, against in COMPARISONS
        for name in NAMES
    }


def intervals(servers: list[list[Round]]) -> dict[tuple[str, str, str], tuple[float, float]]:
    """95 % confidence intervals of the shifts, from rounds drawn with replacement; the same for the same rounds."""
    draw = random.Random(1)
    usual_s = [usual(rounds) for rounds in servers]
    drawn = [shifts([draw.choices(rounds, k=len(rounds)) for rounds in servers], usual_s) for _ in range(DRAWS)]
    low, high = int(0.025 * DRAWS), int(0.975 * DRAWS)
    ordered = {key: sorted(one[key] for one in drawn) for key in drawn[0]}
    return {key: (values[low], values[high]) for key, values in ordered.items()}


def without_exports(profile: Path, folder: str) -> Path:
    """The profile, but for what a session writes when it is stopped."""
    document = {**yaml.safe_load(profile.read_text()), "export": {}}
    path = Path(folder, "profile.yaml")
    path.write_text(yaml.safe_dump(document))
    return path


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


def verdict(low: float, high: float) -> str:
    """What the interval says about the target."""
    if high <= TARGET:
        return "met"
    if low > TARGET:
        return "MISSED"
    width = high - low
    wider = f", {width / TARGET:.1f} times as wide as the target" if width > TARGET else ""
    return f"NOT DECIDED: the interval is {width:.2%} wide{wider}; more --rounds"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="what the instrumentation costs the demonstration's service")
    parser.add_argument("--servers", type=int, default=3, help="how many, one after the other (default: 3)")
    parser.add_argument("--rounds", type=int, default=40, help="with each, at least 2 (default: 40)")
    parser.add_argument("--profile", type=Path, default=ROOT / "configs" / "chat.yaml", help="what is recorded")
    options = parser.parse_args()
    if options.servers < 1 or options.rounds < 2:
        parser.error("--servers must be at least 1, --rounds at least 2")
    begin = time.perf_counter()
    core = server_core()
    if core:
        pin(0, set(os.sched_getaffinity(0)) - core)
    servers: list[list[Round]] = []
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{options.servers} servers, {options.rounds} rounds of {2 * REQUESTS} requests in each state\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        profile = without_exports(options.profile.resolve(), folder)
        for number in range(1, options.servers + 1):
            with server_of(number, folder, core) as (server, url):
                servers.append(asyncio.run(rounds_of(server, url, options.rounds, profile, number)))
            own = shifts(servers[-1:], [usual(servers[-1])])
            told = ", ".join(f"{name} {own['on', 'bare', name]:+.2%}" for name in NAMES)
            print(
                f"server {number}: {told}, {statistics.median(usual(servers[-1])) * 1e3:.1f} ms a request", flush=True
            )
    found, within = shifts(servers, [usual(rounds) for rounds in servers]), intervals(servers)
    for title, of, against in COMPARISONS:
        print(f"\n{title:<24}{'shift':>9}{'95 % interval':>22}  target")
        for name in NAMES:
            low, high = within[of, against, name]
            print(
                f"{name:<24}{found[of, against, name]:>+9.2%}{f'{low:+.2%} to {high:+.2%}':>22}"
                f"  <= {TARGET:.0%} {verdict(low, high)}"
            )
    print(f"took {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
