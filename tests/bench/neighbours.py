"""How right the neighbours' bill is, on a simulated engine whose costs are known, and what it takes.

    python tests/bench/neighbours.py [--workloads N] [--spans N] [--demonstration N]

Three tenants share an engine; one is noisy in one of six ways: many requests, bursts, long prompts, huge prompts, long
answers, or a blocked event loop. Each workload runs with it, and its arrivals run again without it. The bill must be
conserved, and the predicted fall of the queue time of the others, in the mean and at p99, within 15 % of the measured.
Then a placebo: the requests of one tenant get one of three names by chance, two of them for A/A. A request of the
placebo must inflict on others what requests of the other two do, but for twice the difference of these.

`--demonstration` does the same on the service in `examples/chat` over HTTP, with a tenant that sends bursts. It needs a
machine without other work: a run in which decodes take longer than in the other says nothing.

Targets: suffered equals inflicted in 30 of 30, predictions right in 27 of 30, placebos within noise in 27 of 30. A
recording of a million spans within 2 s.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

import instrument
from instrument.report.view import Recording

sys.path.insert(0, str(Path(__file__).parents[1]))
from noisy_tenants import (
    KINDS,
    arrivals,
    bill_of,
    is_conserved,
    is_placebo_free,
    is_right,
    queue_times,
    recorded,
    workload,
)

ROOT = Path(__file__).parents[2]
SECONDS = 20
Arrival = tuple[float, str, int, int]


def bursts(seed: int) -> list[Arrival]:
    """Return the requests of three tenants to the demonstration: when, whose, words of the prompt, tokens."""
    rng, requests = random.Random(seed), list[Arrival]()
    for tenant, a_second, tokens, burst in (("a", 6, 10, 1), ("b", 5, 10, 1), ("noisy", 1.2, 30, 10)):
        at_s = rng.expovariate(a_second)
        while at_s < SECONDS:
            for _ in range(burst):
                requests.append((at_s, tenant, 1 + rng.randrange(8), min(1 + int(rng.expovariate(1 / tokens)), 32)))
            at_s += rng.expovariate(a_second)
    return sorted(requests)


async def send(url: str, requests: Sequence[Arrival]) -> None:
    began_s = time.perf_counter()

    async def one(client: httpx.AsyncClient, at_s: float, tenant: str, words: int, tokens: int) -> None:
        await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
        fields = {"prompt": "the memory of the device " * words, "max_tokens": tokens}
        answer = await client.post(f"{url}/generate", json=fields, headers={"x-tenant": tenant})
        answer.raise_for_status()

    limits = httpx.Limits(max_connections=500)
    async with httpx.AsyncClient(timeout=240, limits=limits, trust_env=False) as client:
        await asyncio.gather(*(one(client, *request) for request in requests))


def served(requests: Sequence[Arrival]) -> instrument.LoadedTrace:
    """Return the recording of the demonstration while it answers the requests."""
    profile = (ROOT / "configs" / "chat.yaml").read_text("utf-8")
    profile = re.sub(r"\n  chrome:\n    path: .*", "\n  recording: {path: traces/run.npz}", profile)
    header = "http.request.header.x-tenant"
    profile = profile.replace("  ignore: [/health]\n", f"  ignore: [/health]\n  attributes: [{header}]\n")
    with TemporaryDirectory() as folder:
        Path(folder, "profile.yaml").write_text(profile, "utf-8")
        command = [sys.executable, "-m", "instrument", "run", "--profile", "profile.yaml", "--", "-m", "chat.server"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "examples")}
        with subprocess.Popen(
            [*command, "--port", "0"], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True,
        ) as server:  # fmt: skip
            assert server.stdout is not None
            asyncio.run(send(server.stdout.readline().removeprefix("listening on ").strip(), requests))
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=120)
        return instrument.load(Path(folder, "traces"))


def decode_ns(recording: Recording) -> float:
    """Return the mean time of a decode, by which two runs show that the machine was as fast in both."""
    trace = recording.columns
    return float(trace.total_ns[trace.of_sites([site.qualname == "Engine.decode" for site in trace.sites])].mean())


def demonstration(seed: int) -> tuple[bool, str]:
    """Return True if the prediction for the noisy tenant is right, and the numbers."""
    requests = bursts(seed)
    loaded = served(requests).recording
    quiet = served([request for request in requests if request[1] != "noisy"]).recording
    bill, (mean_ns, p99_ns) = bill_of(loaded), queue_times(quiet)
    noisy = next((row for row in bill.predictions if row.name == "noisy"), None)
    if noisy is None:
        return False, f"not predicted: {bill.queue_ns} ns recorded, {bill.replayed_ns} replayed"
    falls = (noisy.mean_ns - noisy.mean_without_ns) / (noisy.mean_ns - mean_ns)
    p99_falls = (noisy.p99_ns - noisy.p99_without_ns) / (noisy.p99_ns - p99_ns)
    slower = decode_ns(quiet) / decode_ns(loaded)  # a decode costs the same for any number of requests
    text = f"the mean falls by {falls:.2f} of the measured, p99 by {p99_falls:.2f}, a decode took {slower:.2f}"
    return is_conserved(bill) and is_right(noisy, (mean_ns, p99_ns)), text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=30)
    parser.add_argument("--spans", type=int, default=1_000_000)
    parser.add_argument("--demonstration", type=int, default=0)
    options = parser.parse_args()
    for seed in range(options.demonstration):
        print("demonstration: right {}; {}".format(*demonstration(seed)), flush=True)
    conserved = right = free = 0
    for seed in range(options.workloads):
        bill, is_predicted = workload(seed)
        conserved, right, free = conserved + is_conserved(bill), right + is_predicted, free + is_placebo_free(seed)
    print(
        f"suffered equals inflicted in {conserved} of {options.workloads}, the fall of others' queues is right in "
        f"{right}, a placebo within noise in {free}",
        flush=True,
    )
    recording = recorded(1, arrivals(0, KINDS[0], options.spans / 12_500))
    started = time.process_time()
    bill_of(recording)
    most_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    took_s = time.process_time() - started
    print(f"{len(recording.columns)} spans: {took_s:.2f} s of processor, {most_mb:.0f} MB with the simulation")


if __name__ == "__main__":
    main()
