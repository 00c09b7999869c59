"""The cost of the instrumentation in a service: `python tests/bench/service.py`, from the root of the repository.

The demonstration's server (`examples/chat`) answers the same requests again and again, one after the other. Three
states take turns: bare (without a probe), recording, and with recording switched off. All states are of one process,
because the memory of two processes makes a greater difference than the measured cost. The speed of a machine drifts by
some percent within seconds, so compared requests must be close together in time. A round is one request, which is
answered four times in a row, while the server records and while it does not. The order is ABBA or BAAB. The request is
also answered twice without the probes, before or after the four answers, drawn anew each time. The session adds and
removes the probes by a change of the profile. The first requests after a change do not count, because Python's
interpreter specialises its code again. The threads of the session, which read gauges, run in all states. The table has
the processor time of the session's threads.

Run the benchmark with the scheduler's usual policy: the kernel takes a twentieth of each second from real-time
processes. The number of requests that the 99th percentile needs depends on the machine's spread. Shorter requests are
sent with `--tokens 2 --repeat 6`.

The unit of a latency, as the client measures it, is the median of its round. Requests of all lengths and at all speeds
of the machine therefore count alike. The table compares the 50th and the 99th percentile and the processor time of the
server between the states. The 95 % confidence intervals come from drawing the rounds of each server anew (bootstrap).
On more than one core, the server has the last core and the client the others. The work of every server thread then adds
to its latency, and the client's work does not. An interval wider than the target decides nothing, and the table prints
a note.

The results are from two shared cores, requests of 70 to 110 ms with some 700 calls each, and 1,320 requests in each
state. Recording takes 0.8 % longer in the median, with 95 % confidence 0.5 to 1.1 %. The probes take 0.3 % of that,
also when recording is switched off. The 99th percentile differs by 0.5 % (-3.9 to 7.2 %: the machine's own stalls). The
processor time differs by 1.4 % (0.7 to 2.1 %). The session's own threads take 0.15 % of a processor. The probes and the
call paths of each turn are new there.
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
from typing import Any, NamedTuple

import httpx
import numpy
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from chat import load  # noqa: E402

TARGET = 0.01
WARM_UP = 64
SETTLING = 2
REQUESTS = 8
RING = "1MiB"
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

RECORDED = ("functions", "layers", "copies")
"""Parts of a profile that say what is recorded."""

Figures = dict[str, float]
"""By name, in units of a request."""


def environment(seed: int) -> dict[str, str]:
    """Return the caller's environment with a fixed hash seed and without a collector or another session."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "INSTRUMENT"))}
    path = [str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**own, "PYTHONPATH": os.pathsep.join(path), "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"}


def processor_s(process: int) -> float:
    """Processor time of all threads that the process has now."""
    threads = Path(f"/proc/{process}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


HOST = """
import gc, sys, threading, time
import instrument
from chat import server
from instrument.recorder.recorder import RECORDER

RECORDER.node_limit = 1 << 20  # probes that come back are new ones, with call paths of their own

def follow():
    for line in sys.stdin:
        state, _, profile = line.rstrip().partition(" ")
        if profile:
            try:
                instrument.session().reload(profile)
            except instrument.StateError:
                instrument.start(profile)
        (instrument.enable if state == "on" else instrument.disable)()
        if profile:
            gc.collect()
        # What is open when recording is switched off is still recorded when it ends, and an answer has come before the
        # spans of its request have ended.
        for _ in range(1_000):
            if not RECORDER.open_rows():
                break
            time.sleep(0.001)
        if RECORDER.node_count == RECORDER.node_limit:
            state = "too-many-call-paths"
        cost = instrument.session().cost()
        print(state, RECORDER.calls, cost.thread_ns / cost.window_ns, flush=True)

threading.Thread(target=follow, daemon=True).start()
sys.argv[0] = "chat.server"
server.main()
"""
"""The server, and a thread that waits for words on its standard input: the state to be in, and maybe the profile.

With it garbage is collected: what a profile leaves behind that was given up a moment ago, which no service does, would
have the collector stop one of the next requests for some 30 ms.
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


Taken = dict[str, list[tuple[float, float]]]
"""By state, the latencies and the processor times of the server of a round, in seconds."""


@dataclass
class Work:
    """The request of each round: one of the first requests, with `tokens` tokens or with its own number for None."""

    tokens: int | None
    repeat: int

    def fields(self, number: int) -> dict[str, object]:
        """Return the fields of a request."""
        own = load.make_request(number % REQUESTS)
        return own if self.tokens is None else {**own, "max_tokens": self.tokens}


def tell(server: subprocess.Popen[str], state: str, profile: Path | str = "") -> tuple[int, float]:
    """Bring a server into a state; how many calls it has recorded, and the share of a processor of our threads."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(f"{state} {profile}\n")
    server.stdin.flush()
    said, *rest = server.stdout.readline().split()
    if said != state:
        raise RuntimeError(f"the server does not follow: {said}")
    return int(rest[0]), float(rest[1])


async def ask(
    client: httpx.AsyncClient, server: subprocess.Popen[str], fields: dict[str, object]
) -> tuple[float, float]:
    """Send a request; its latency and the server's processor time meanwhile, in seconds."""
    before_s = processor_s(server.pid)
    answer = await load.ask(client, fields)
    if answer.error:
        raise RuntimeError(f"{fields} failed: {answer.error}")
    return answer.total_s, processor_s(server.pid) - before_s


async def turn(
    client: httpx.AsyncClient,
    server: subprocess.Popen[str],
    states: tuple[str, ...],
    profile: Path,
    fields: dict[str, object],
) -> Taken:
    """Answer a request in these states, one after the other, with this profile."""
    first = "on" if "on" in states else states[0]
    tell(server, first, profile)
    for _ in range(SETTLING):
        await ask(client, server, fields)
    calls, _ = tell(server, first)
    taken: Taken = {state: [] for state in states}
    for state in states:
        tell(server, state)
        taken[state].append(await ask(client, server, fields))
        before, (calls, _) = calls, tell(server, state)
        # A comparison with a session that did not record would show how little nothing costs.
        if (calls > before) != (state == "on"):
            raise RuntimeError(f"{calls - before} calls were recorded in a request when {state}")
    return taken


async def rounds_of(
    server: subprocess.Popen[str], url: str, count: int, profiles: Profiles, work: Work, seed: int
) -> list[Taken]:
    """Run `count` rounds with a server, and return the measurements of each round."""
    chance = random.Random(seed)
    rounds: list[Taken] = []
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False) as client:
        tell(server, "on", profiles.full)
        for number in range(WARM_UP * work.repeat):  # in which the ring wraps, too
            await ask(client, server, work.fields(number))
        for number in range(count):
            order = chance.choice((("on", "off", "off", "on"), ("off", "on", "on", "off")))
            turns = [(("bare", "bare"), profiles.empty), (order, profiles.full)]
            rounds.append({})
            for states, profile in chance.sample(turns, 2):
                rounds[-1].update(await turn(client, server, states * work.repeat, profile, work.fields(number)))
    return rounds


@dataclass
class Server:
    """The measurements of a server.

    The latencies and processor times are by state and round, in units of the median latency of the round. `usual_s` is
    the median of the rounds' medians in seconds. `threads` is the share of a processor that the session's threads used.
    """

    latencies: dict[str, Any]
    processor: dict[str, Any]
    usual_s: float
    threads: float

    @classmethod
    def of_rounds(cls, rounds: list[Taken], threads: float) -> Server:
        """Return the server of some rounds. The usual latency of a request is its median in all states."""
        # By state: round, turn, and which of the two times.
        times = {state: numpy.array([taken[state] for taken in rounds]) for state in STATES}
        usual_s = numpy.median(numpy.concatenate([of[..., 0] for of in times.values()], axis=1), axis=1)
        units = {state: of / usual_s[:, None, None] for state, of in times.items()}
        return cls(
            {state: of[..., 0] for state, of in units.items()},
            {state: of[..., 1] for state, of in units.items()},
            float(numpy.median(usual_s)),
            threads,
        )

    def figures(self, drawn: Any) -> dict[str, Figures]:
        """Return for each state the percentiles of the latencies and the processor time of the drawn rounds."""
        found: dict[str, Figures] = {}
        for state in STATES:
            of = self.latencies[state][drawn].ravel()
            places = {name: min(int(share * of.size), of.size - 1) for name, share in (("p50", 0.5), ("p99", 0.99))}
            of.partition(list(places.values()))
            found[state] = {name: of[at] for name, at in places.items()}
            found[state]["processor"] = self.processor[state][drawn].mean()
        return found

    @property
    def rounds(self) -> int:
        """Return the number of rounds."""
        return len(self.latencies["bare"])


Key = tuple[str, str, str]
"""A state, the one that it is compared with, and the figure."""


def shifts(servers: list[Server], drawn: list[Any]) -> dict[Key, float]:
    """By what share each figure of one state differs from that of another, the mean over the servers."""
    told = [server.figures(rounds) for server, rounds in zip(servers, drawn, strict=True)]
    return {
        (of, against, name): statistics.mean(float(one[of][name] / one[against][name] - 1) for one in told)
        for _, of, against in COMPARISONS
        for name in NAMES
    }


def intervals(servers: list[Server]) -> dict[Key, tuple[float, float]]:
    """95 % confidence intervals of the shifts, from rounds drawn with replacement; the same for the same rounds."""
    draw = numpy.random.default_rng(1)
    drawn = [
        shifts(servers, [draw.integers(0, server.rounds, server.rounds) for server in servers]) for _ in range(DRAWS)
    ]
    low, high = int(0.025 * DRAWS), int(0.975 * DRAWS)
    ordered = {key: sorted(one[key] for one in drawn) for key in drawn[0]}
    return {key: (values[low], values[high]) for key, values in ordered.items()}


class Profiles(NamedTuple):
    """Files: the whole profile, and the same with nothing to record."""

    full: Path
    empty: Path


def profiles_in(folder: str, profile: Path) -> Profiles:
    """Write a full and an empty profile, and return the paths.

    The profiles have no exports, which a session writes at its end, and small rings that wrap soon.

    The memory of a ring is new in the first pass, and each new page is a fault for the system. The ring of a service
    that has run for a minute has no new pages.
    """
    document = {**yaml.safe_load(profile.read_text()), "export": {}, "limits": {"ring": RING}}
    found = Profiles(Path(folder, "full.yaml"), Path(folder, "empty.yaml"))
    found.full.write_text(yaml.safe_dump(document))
    found.empty.write_text(yaml.safe_dump({name: part for name, part in document.items() if name not in RECORDED}))
    return found


def pin(process: int, cores: set[int]) -> None:
    """Keep a process on these cores, where the system can."""
    if hasattr(os, "sched_setaffinity") and cores:
        os.sched_setaffinity(process, cores)


def server_core() -> set[int]:
    """The last core that this process may use; none where it has only one."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return set(cores[-1:]) if len(cores) > 1 else set()


def verdict(low: float, high: float) -> str:
    """Return the verdict of the interval on the target."""
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
    parser.add_argument("--rounds", type=int, default=300, help="with each, at least 2 (default: 300)")
    parser.add_argument(
        "--tokens", type=int, help="of each answer, instead of 16 to 23: more requests in the same time"
    )
    parser.add_argument("--repeat", type=int, default=1, help="how often a round has its turns (default: 1)")
    parser.add_argument("--profile", type=Path, default=ROOT / "configs" / "chat.yaml", help="what is recorded")
    options = parser.parse_args()
    if options.servers < 1 or options.rounds < 2 or options.repeat < 1:
        parser.error("--servers and --repeat must be at least 1, --rounds at least 2")
    begin = time.perf_counter()
    core = server_core()
    if core:
        pin(0, set(os.sched_getaffinity(0)) - core)
    work = Work(options.tokens, options.repeat)
    servers: list[Server] = []
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    count = 2 * options.repeat
    print(f"{options.servers} servers, {options.rounds} rounds of {count} requests in each state\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        profiles = profiles_in(folder, options.profile.resolve())
        for number in range(1, options.servers + 1):
            with server_of(number, folder, core) as (server, url):
                rounds = asyncio.run(rounds_of(server, url, options.rounds, profiles, work, number))
                servers.append(Server.of_rounds(rounds, tell(server, "off")[1]))
            own = shifts(servers[-1:], [slice(None)])
            told = ", ".join(f"{name} {own['on', 'bare', name]:+.2%}" for name in NAMES)
            print(f"server {number}: {told}, {servers[-1].usual_s * 1e3:.1f} ms a request", flush=True)
    found, within = shifts(servers, [slice(None)] * len(servers)), intervals(servers)
    for title, of, against in COMPARISONS:
        print(f"\n{title:<24}{'shift':>9}{'95 % interval':>22}  target")
        for name in NAMES:
            low, high = within[of, against, name]
            print(
                f"{name:<24}{found[of, against, name]:>+9.2%}{f'{low:+.2%} to {high:+.2%}':>22}"
                f"  <= {TARGET:.0%} {verdict(low, high)}"
            )
    threads = statistics.mean(server.threads for server in servers)
    print(f"\nThe threads of the session's own, in all states: {threads:.3%} of a processor")
    print(f"took {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
