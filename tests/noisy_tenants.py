"""Workloads of three tenants on a simulated engine, one noisy in one of six ways, and what their bill must be."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
from simulated_engine import Request, Service

from instrument.recording.distributions import percentiles_of_times
from instrument.report.batches_view import NeighbourBill, Without, neighbours
from instrument.report.request_groups import request_groups
from instrument.report.view import Options, Recording
from instrument.trace.bill import Account

KINDS = ("many requests", "bursts", "long prompts", "huge prompts", "long answers", "blocked loop")
SECONDS = 10
BY_TENANT = Options(requests_by="tenant")


def arrivals(seed: int, kind: str, seconds: float = SECONDS) -> list[Request]:
    """Return the requests of the tenants a, b and noisy, by their arrival."""
    rng = random.Random(seed)

    def of(tenant: str, a_second: float, prompt: float = 200, tokens: float = 6, blocks_ns: int = 0) -> list[Request]:
        at_ns, made = 10**9, []
        while (at_ns := at_ns + round(rng.expovariate(a_second) * 1e9)) < (1 + seconds) * 1e9:
            size = max(1, round(prompt * np.exp(rng.gauss(0, 0.4))))
            made.append(Request(0, at_ns, size, 1 + int(rng.expovariate(1 / tokens)), tenant, blocks_ns))
        return made

    quiet = of("a", 240) + of("b", 200)
    noisy: dict[str, Callable[[], list[Request]]] = {
        "many requests": lambda: of("noisy", 260),
        "bursts": lambda: [
            Request(0, burst.arrives_ns + place, burst.prompt, burst.left, "noisy")
            for burst in of("noisy", 2)
            for place in range(60)
        ],
        "long prompts": lambda: of("noisy", 80, prompt=2_000),
        "huge prompts": lambda: of("noisy", 5, prompt=30_000),
        "long answers": lambda: of("noisy", 40, tokens=80),
        "blocked loop": lambda: of("noisy", 3, blocks_ns=60_000_000),
    }
    requests = sorted(quiet + noisy[kind](), key=lambda request: request.arrives_ns)
    for number, request in enumerate(requests):
        request.number = number
    return requests


def recorded(seed: int, requests: Sequence[Request]) -> Recording:
    return Recording.from_trace(Service(seed, arrivals=requests).run())


def bill_of(recording: Recording) -> NeighbourBill:
    return neighbours(recording, BY_TENANT)


def is_conserved(bill: NeighbourBill) -> bool:
    """Return True if what is charged equals the waits by every way of adding them up."""
    delays = sum(delay.summed_ns for delay in bill.delays)
    ways = sum(row.queued_ns + row.shared_ns + row.between_ns + row.blocked_ns for row in bill.delays)
    waits = sum(row.suffered_ns for row in bill.groups)
    inflicted = sum(row.inflicted_ns for row in bill.groups) + bill.nobody_ns
    return len({delays, ways, waits, inflicted, bill.suffered_ns, bill.inflicted_ns + bill.nobody_ns}) == 1


def queue_times(recording: Recording, tenants: Sequence[str] = ()) -> tuple[float, int]:
    """Return the mean and p99 of the queue times of requests, of all without `tenants`, as the ledger has them."""
    parts, grouped = recording.ledger, request_groups(recording, BY_TENANT)
    places = [place for place, group in enumerate(grouped.group) if not tenants or grouped.names[group] in tenants]
    times = sorted(parts.times_of_request(place).get("queue", 0) for place in places)
    return sum(times) / len(times), percentiles_of_times(times, (0.99,))[0]


def is_right(row: Without, measured: tuple[float, int]) -> bool:
    """Return True if both predicted falls are within 15 % of the measured ones."""
    falls = (row.mean_ns - row.mean_without_ns, row.p99_ns - row.p99_without_ns)
    truths = (row.mean_ns - measured[0], row.p99_ns - measured[1])
    return all(abs(fall - truth) <= 0.15 * truth for fall, truth in zip(falls, truths, strict=True))


def workload(seed: int, seconds: float = SECONDS) -> tuple[NeighbourBill, bool]:
    """Return the bill of a workload, and True if its prediction for the noisy tenant is right."""
    requests = arrivals(seed, KINDS[seed % len(KINDS)], seconds)
    bill = bill_of(recorded(seed, requests))
    noisy = next((row for row in bill.predictions if row.name == "noisy"), None)
    quiet = recorded(seed + 1_000, [request for request in requests if request.tenant != "noisy"])
    return bill, noisy is not None and is_right(noisy, queue_times(quiet))


def is_placebo_free(seed: int, seconds: float = SECONDS) -> bool:
    """Return True if a placebo is charged no more than by chance."""
    rng, requests = random.Random(seed), arrivals(seed, KINDS[0], seconds)
    for request in requests:
        request.tenant = rng.choice(("a", "b", "placebo"))
    return is_free(recorded(seed, requests), seed)


def is_free(recording: Recording, seed: int) -> bool:
    """Return True if the tenant `placebo` is not charged more than all of 180 groups by chance are."""
    grouped = request_groups(recording, BY_TENANT)
    rng, joined, each = np.random.default_rng(seed), recording.joined, []
    is_charged = np.ones(len(joined.rows), dtype=np.bool_)
    for number in range(61):
        group = rng.permutation(grouped.group) if number else grouped.group
        account = Account(recording.columns, joined, recording.turns, group, 3, is_charged)
        inflicted = account.compute_bill(recording.ledger).charged_ns.sum(axis=(0, 1))[:-1]
        each.append(inflicted / np.bincount(group, minlength=3))
    return bool(each[0][grouped.names.index("placebo")] <= np.max(each[1:]))
