"""The cost of an agent to an HTTP service, and of a reader in its process: `python tests/bench/agents.py`.

A service under uvicorn answers requests of `--calls` calls. Each call is some microseconds of work. Three servers run
the service: bare; under `instrument run` with its agent; and with `agent: off`, where a thread of the service is the
reader. The option `--export` makes the second and the third server send every span over OTLP. The collector accepts
every span, as many spans a second as the service makes. A fourth server then has an agent that sends nothing: the
difference is the cost of sending. All servers run at the same time. The client sends `--burst` requests in a row to
each server in turn, there and back again (ABCCBA). The machine's speed therefore affects all servers alike. Each block
starts the servers anew. The addresses of a process's memory can change its speed by more than the measured cost.

The unit of a latency is the median of the bare server in the same turn. The output has the medians and the 99th
percentiles, as ratios to the bare server's. The limits of 95 % confidence come from drawing the turns anew (bootstrap).
The output also has the processor time of a request, which other work on the machine changes less. The processor time of
the bare server is subtracted in each turn, and the median of the turns is printed. The processor time of the agent and
its child is printed too. On more than one core the servers use the last core, and the client, the collector and the
agents use the others.

The option `--demo` measures the demonstration (`examples/chat`, `configs/chat.yaml`) instead. With `--engine-process`
the demonstration has two processes.

One block decides little. On two cores with other work the processor time of identical servers differed by 3 to 10 %
either way. Take ten blocks on a machine that is idle. `tests/bench/service.py` compares within one process.

The option `--memory SECONDS` prints the memory of the agent and of its exporter instead. The service first records
nothing, and then `--rate` spans a second. A page that several processes share counts to each process in part. The
output has the median and the largest of many readings, the number of spans at the collector, and the time from the end
of a request to its arrival there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy
import yaml

from instrument.runtime import agent_socket

ROOT = Path(__file__).resolve().parents[2]
SERVICE = """
import sys
import uvicorn

CALLS, WORK = int(sys.argv[2]), int(sys.argv[3])

def work(count):
    total = 0
    for number in range(count):
        total += number * number
    return total

async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    for _ in range(CALLS):
        work(WORK)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error", lifespan="off")
"""
PROFILE = """
service: bench
requests: auto
functions:
  - match: "__main__:work"
"""
STATES = ["bare", "agent", "in the process"]
UNSENT = "nothing sent"
DRAWS = 1_000
LIMIT_S = 60
REQUEST = b"GET / HTTP/1.1\r\nHost: bench\r\n\r\n"
ASKED = json.dumps({"prompt": "Tell me about the sea", "max_tokens": 16}).encode()
DEMO_REQUEST = b"POST /generate HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n\r\n%b" % (len(ASKED), ASKED)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Collector:
    """Takes every request, and counts bytes. It keeps bodies in `kept`, with their times, where it is given a file."""

    def __init__(self, kept: BinaryIO | None = None) -> None:
        self.port, self.bytes, self.requests = free_port(), 0, 0
        self._kept, self._arrivals = kept, list[tuple[int, int]]()
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, limit=1 << 20)
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
                body = await reader.readexactly(length)
                if self._kept is not None and b"/v1/traces" in head:
                    body = zlib.decompress(body, 47) if b"\r\ncontent-encoding: gzip" in head else body
                    self._arrivals.append((time.time_ns(), self._kept.write(body)))
                self.bytes, self.requests = self.bytes + length, self.requests + 1
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def delays(self) -> tuple[int, list[float]]:
        """Count the spans that came, and return the seconds from the end of each request to its arrival, sorted."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert self._kept is not None
        self._kept.seek(0)
        count, delays = 0, list[float]()
        for at_ns, size in self._arrivals:
            for of_resource in ExportTraceServiceRequest.FromString(self._kept.read(size)).resource_spans:
                for of_scope in of_resource.scope_spans:
                    count += len(of_scope.spans)
                    roots = (span for span in of_scope.spans if not span.parent_span_id)
                    delays += [(at_ns - span.end_time_unix_nano) / 1e9 for span in roots]
        return count, sorted(delays)


def processes() -> list[int]:
    """All that there are now."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def command_of(process: int) -> str:
    """The words of a process's command, "" of one that is no more."""
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
    return ""


def children_of(process: int) -> list[int]:
    """Return the process ids of the children that the threads of a process have started."""
    threads = Path(f"/proc/{process}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def processor_s(process: int) -> float:
    """Processor time of all threads that a process has now."""
    threads = Path(f"/proc/{process}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def profile_of(state: str, options: argparse.Namespace, collector: int) -> str:
    """The profile of a server, as text."""
    otlp = {"endpoint": f"http://127.0.0.1:{collector}"} if options.export and state != UNSENT else None
    document = yaml.safe_load((ROOT / "configs" / "chat.yaml").read_text() if options.demo else PROFILE)
    document["export"] = {"summary": {"to": "stderr"}, **({"otlp": otlp} if otlp else {})}
    document["capture"] = {"sample": 1.0 if options.export else 0.001}
    return str(yaml.safe_dump({**document, **({"agent": "off"} if state == "in the process" else {})}))


def is_whole(answer: bytes) -> bool:
    """Return True if the answer is complete."""
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    return length is not None and len(body) == int(length[1])


class Server:
    """One of the servers, and a connection to it."""

    def __init__(self, state: str, folder: Path, options: argparse.Namespace, collector: int, core: set[int]) -> None:
        self.port, self.took_s = free_port(), list[float]()
        self.request = DEMO_REQUEST if options.demo else REQUEST
        profile = folder / f"{state}.yaml"
        profile.write_text(profile_of(state, options, collector))
        words = ["service.py", str(self.port), str(options.calls), str(options.work)]
        if options.demo:
            words = ["-m", "chat.server", "--port", str(self.port), *["--engine-process"] * options.engine_process]
        ours = ["-m", "instrument", "run", "--profile", str(profile), "--"] if state != "bare" else []
        self.errors = (folder / f"{state}.errors").open("w+")
        own = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "INSTRUMENT"))}
        own |= {"PYTHONPATH": str(ROOT / "examples"), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *ours, *words], cwd=folder, stderr=self.errors, stdout=self.errors, env=own
        )
        self.processes = [self.process.pid]
        self.ask(1)
        self.processes += [one for one in children_of(self.process.pid) if "spawn_main" in command_of(one)]
        for process in self.processes:
            for thread in Path(f"/proc/{process}/task").iterdir():
                os.sched_setaffinity(int(thread.name), core)
        self.took_s.clear()

    def _connected(self) -> socket.socket:
        end = time.monotonic() + LIMIT_S
        while True:
            try:
                found = socket.create_connection(("127.0.0.1", self.port), 30)
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return found
            except OSError:
                if time.monotonic() > end or self.process.poll() is not None:
                    self.errors.seek(0)
                    raise RuntimeError(f"the server did not start: {self.errors.read()[-2000:]}") from None
                time.sleep(0.05)

    def processor_s(self) -> float:
        """Processor time of all threads that the server has now."""
        return sum(map(processor_s, self.processes))

    def agents_s(self) -> float:
        """Return the processor time of the run's agent and its children in seconds, or 0 without an agent."""
        agents = [process for process in processes() if f'"first": {self.process.pid},' in command_of(process)]
        return sum(processor_s(one) for agent in agents for one in (agent, *children_of(agent)))

    def ask(self, times: int) -> list[float]:
        """Return the latencies in seconds of consecutive requests, and append their mean processor time to `took_s`."""
        found = []
        with self._connected() as connection:  # a new one, for uvicorn closes those that wait for 5 s
            before_s = self.processor_s()
            for _ in range(times):
                begin = time.perf_counter()
                connection.sendall(self.request)
                answer = b""
                while not is_whole(answer):
                    answer += (more := connection.recv(4096))
                    if not more or not answer.startswith(b"HTTP/1.1 200"):
                        raise RuntimeError(f"a request failed: {answer!r:.200}")
                found.append(time.perf_counter() - begin)
        self.took_s.append((self.processor_s() - before_s) / times)
        return found

    def stop(self, agent: int = 0) -> str:
        """End it, and wait for its agent where one is given. Returns what they said of losses."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(LIMIT_S)
        while agent and command_of(agent):
            time.sleep(0.1)
        self.errors.seek(0)
        said = [
            line
            for line in self.errors.read().splitlines()
            if re.search("overwritten|dropped|not sent|collector", line)
        ]
        self.errors.close()
        return "; ".join(line.strip()[:110] for line in said[:3])


@contextmanager
def servers_of(options: argparse.Namespace, collector: int, core: set[int]) -> Iterator[dict[str, Server]]:
    """All three, and what they say at their ends."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        Path(folder, "service.py").write_text(SERVICE)
        servers = {}
        for state in STATES:
            server = servers[state] = Server(state, Path(folder), options, collector, core)
            ends.callback(lambda state=state, server=server: print(f"  {state}: {server.stop() or 'no losses said'}"))
        yield servers


MEMORY_CALLS, IDLE_S, READING_S = 499, 3, 1
DELAYS = {"median": 0.5, "p99": 0.99, "longest": 1.0}
MEMORY = ("Rss", "Anonymous", "Pss", "Pss_Anon", "Pss_File", "Pss_Shmem")


def memory_of(pid: int) -> dict[str, float]:
    """The memory of a process in MB of 2^20 bytes, as the system shares it out."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    found = dict(line.split()[:2] for line in lines if ":" in line.split()[0])
    return {name: int(found.get(f"{name}:", 0)) / 1024 for name in MEMORY}


def agent_of(server: Server) -> int:
    """The agent of a server's run."""
    environ = Path(f"/proc/{server.process.pid}/environ").read_bytes().split(b"\0")
    (path,) = [os.fsdecode(one.partition(b"=")[2]) for one in environ if one.startswith(b"INSTRUMENT_AGENT=")]
    with agent_socket.connect_to_agent(Path(path), LIMIT_S) as caller:
        agent_socket.send(caller, {"ask": "processes"})
        while "end" not in (answer := agent_socket.receive(caller)[0] or {"end": {}}):
            pass
    return int(answer["end"]["agent"])


def read_memory(agent: int) -> list[dict[str, float]]:
    """Return the memory of an agent and of its exporter now."""
    return [memory_of(pid) for pid in (agent, *children_of(agent))]


def sum_shared(both: list[dict[str, float]]) -> float:
    return sum(one["Pss"] for one in both)


def tell_memory(when: str, both: list[dict[str, float]]) -> None:
    for name, its in zip(("agent", "exporter"), both, strict=True):
        print(f"{when:8} {name:9}" + "".join(f"{kind:>10} {size:5.1f}" for kind, size in its.items()))
    alone = sum(one["Pss_Anon"] for one in both)
    alone += max(one["Rss"] - one["Anonymous"] for one in both)  # the agent's programs are among its exporter's
    print(f"{when:8} together {sum_shared(both):.1f} MB, {alone:.1f} where no other process has their programs")


def measure_memory(options: argparse.Namespace, collector: Collector) -> None:
    """Print the memory of the agent of a service that records nothing, and then `--rate` spans a second."""
    options.calls, options.work, options.export = MEMORY_CALLS, 1, True
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "service.py").write_text(SERVICE)
        server = Server("agent", Path(folder), options, collector.port, os.sched_getaffinity(0))
        try:
            server.ask(1)
            time.sleep(IDLE_S)
            agent = agent_of(server)
            tell_memory("idle", read_memory(agent))
            (exporter,) = children_of(agent)
            begin, asked, before_s, readings = time.monotonic(), 0, processor_s(exporter), []
            while (passed_s := time.monotonic() - begin) < options.memory:
                if len(readings) < passed_s / READING_S:
                    readings.append(read_memory(agent))
                if asked * (MEMORY_CALLS + 1) < passed_s * options.rate:
                    server.ask(1)
                    asked += 1
                else:
                    time.sleep(0.001)
            readings.sort(key=sum_shared)
            tell_memory("median", readings[len(readings) // 2])
            tell_memory("most", readings[-1])
            spans, took_s = asked * (MEMORY_CALLS + 1), processor_s(exporter) - before_s
            each_us = 1e6 * took_s / spans
            print(f"{spans / passed_s:,.0f} spans a second, {each_us:.2f} us of the exporter's processor each")
        finally:
            print(server.stop(agent) or "no losses said")
    count, delays = collector.delays()
    late = ", ".join(f"{name} {delays[int(share * (len(delays) - 1))]:.2f} s" for name, share in DELAYS.items())
    print(f"from the end of a request to the collector: {late}")
    print(f"{count:,} of {(asked + 2) * (MEMORY_CALLS + 1):,} spans came to the collector")


Turn = dict[str, list[float]]


def ratios(turns: list[Turn], rng: numpy.random.Generator) -> None:
    """Print medians and 99th percentiles, and what they are of the bare server's."""
    base = [statistics.median(turn["bare"]) for turn in turns]
    units = {
        state: [numpy.array(turn[state]) / unit for turn, unit in zip(turns, base, strict=True)] for state in STATES
    }
    for percentile in (50, 99):
        told = {state: float(numpy.percentile(numpy.concatenate(its), percentile)) for state, its in units.items()}
        pairs = [(state, "bare") for state in STATES[1:]] + [("agent", UNSENT)] * (UNSENT in STATES)
        for state, other in pairs:
            drawn = []
            for _ in range(DRAWS):
                chosen = rng.integers(0, len(turns), len(turns))
                own, its = (
                    numpy.percentile(numpy.concatenate([units[one][turn] for turn in chosen]), percentile)
                    for one in (state, other)
                )
                drawn.append(own / its - 1)
            low, high = numpy.percentile(drawn, (2.5, 97.5))
            ratio = told[state] / told[other] - 1
            print(f"p{percentile} {state:15} over {other:15} {ratio:+7.2%}   ({low:+.2%} to {high:+.2%})")


def processor_ratios(took_s: dict[str, list[float]], rng: numpy.random.Generator) -> None:
    """Print how much more processor time a request takes than the bare server's: the median of turns' differences."""
    bare = numpy.array(took_s["bare"])
    print(f"processor time of a request, bare: {1e3 * numpy.median(bare):.3f} ms")
    for state in STATES[1:]:
        more = numpy.array(took_s[state]) - bare
        drawn = numpy.median(rng.choice(more, (DRAWS, len(more))), axis=1)
        low, high = numpy.percentile(drawn, (2.5, 97.5)) / numpy.median(bare)
        middle = float(numpy.median(more))
        share = middle / float(numpy.median(bare))
        print(f"processor {state:15} {share:+7.2%}   ({low:+.2%} to {high:+.2%}), {1e6 * middle:+.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--turns", type=int, default=12, help="of each block")
    parser.add_argument("--burst", type=int, default=20, help="requests in a row")
    parser.add_argument("--calls", type=int, default=40, help="of each request")
    parser.add_argument("--work", type=int, default=1000, help="steps of each call's loop, some 30 ns each")
    parser.add_argument("--demo", action="store_true", help="ask the demonstration, of its own work")
    parser.add_argument("--engine-process", action="store_true", help="of the demonstration: its engine is a process")
    parser.add_argument("--export", action="store_true", help="send every span over OTLP")
    parser.add_argument("--memory", type=float, metavar="SECONDS", help="tell the agent's memory under such a load")
    parser.add_argument("--rate", type=int, default=50_000, help="spans a second of that load")
    options = parser.parse_args()
    if options.memory:
        with tempfile.TemporaryFile() as bodies:
            measure_memory(options, Collector(bodies))
        return
    if options.export:
        STATES.append(UNSENT)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, set(cores[:-1]) or set(cores))
    collector, rng, turns = Collector(), numpy.random.default_rng(7), list[Turn]()
    took_s: dict[str, list[float]] = {state: [] for state in STATES}
    agents_s, wall_s, asked = 0.0, 0.0, 0
    for _ in range(options.blocks):
        with servers_of(options, collector.port, {cores[-1]}) as servers:
            for server in servers.values():
                server.ask(options.burst)
            agents_s, wall_s = agents_s - servers["agent"].agents_s(), wall_s - time.monotonic()
            for _ in range(options.turns):
                order = [STATES[place] for place in rng.permutation(len(STATES))]
                turn: Turn = {state: [] for state in STATES}
                for state in (*order, *reversed(order)):
                    turn[state] += servers[state].ask(options.burst)
                turns.append(turn)
                for state in STATES:
                    took_s[state].append(statistics.mean(servers[state].took_s[-2:]))
            asked += 2 * options.turns * options.burst
            agents_s, wall_s = agents_s + servers["agent"].agents_s(), wall_s + time.monotonic()
    bare_s = statistics.median(latency for turn in turns for latency in turn["bare"])
    print(f"{asked} requests in each state, {1e3 * bare_s:.2f} ms each, bare")
    if not options.demo:
        print(f"{(options.calls + 1) / bare_s:,.0f} spans a second while one is asked")
    if options.export:
        print(f"the collector got {collector.bytes / 1e6:.1f} MB")
    ratios(turns, rng)
    processor_ratios(took_s, rng)
    print(f"the agent and its children: {agents_s / wall_s:.2%} of a processor")


if __name__ == "__main__":
    main()
