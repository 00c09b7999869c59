"""The view `neighbours`: each nanosecond of a wait is charged once, to those who were served or blocked meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from noisy_tenants import KINDS, is_conserved, is_placebo_free, workload
from simulated_engine import Service
from test_ledger import CHAT, ENGINE, STEP, TOKENISE, made, schedule

from instrument.cli import main
from instrument.recording.spans import BLOCKED_BY, BLOCKED_LOOP, DeviceInterval, Origin, Site, Span
from instrument.report.batches_view import NOBODY, batches, neighbours
from instrument.report.device_view import device
from instrument.report.request_groups import group_shares
from instrument.report.requests_view import requests
from instrument.report.view import Options, Recording
from instrument.trace import file
from instrument.trace.bill import WAYS, Account
from instrument.trace.trace import Trace

BY_TENANT = Options(requests_by="tenant", unit="ns")
LOAD = Site("load_lora", "op")


def of_tenant(span: Span, tenant: str) -> Span:
    span.attributes = {**span.attributes, "http.request.header.x-tenant": [tenant]}
    return span


def shared_engine() -> list[Span]:
    """Requests of tenant a and b. Of the queue of a 100 ns are a step of b, and 50 ns a loop that b blocks."""
    blocked = made(30, BLOCKED_LOOP, 250, 300, thread=ENGINE)
    blocked.attributes = {BLOCKED_BY: LOAD.name}
    own_loop = made(32, BLOCKED_LOOP, 760, 800)
    own_loop.attributes = {BLOCKED_BY: TOKENISE.name}
    return [
        of_tenant(made(1, CHAT, 90, 1000, key="a"), "a"),
        made(2, TOKENISE, 90, 120, 1),
        of_tenant(made(5, CHAT, 0, 900, key="b"), "b"),
        made(6, LOAD, 251, 300, 5, thread=ENGINE),
        made(7, TOKENISE, 760, 800, 5),
        made(11, STEP, 100, 220, thread=ENGINE, batch=["b"]),
        made(12, STEP, 310, 410, thread=ENGINE, batch=["a", "b"], weights=[1, 3]),
        made(13, STEP, 420, 450, thread=ENGINE, batch=["b"]),
        made(14, STEP, 450, 500, thread=ENGINE, batch=["a"]),
        blocked,
        own_loop,
    ]


def recording_of(spans: list[Span]) -> Recording:
    spans.sort(key=lambda span: span.start_ns)
    return Recording.from_trace(Trace(Origin(1, "shop", 0, 1_700_000_000 * 10**9), 0, 30_000, spans))


def test_each_wait_is_charged_to_those_who_were_served_or_blocked_the_loop() -> None:
    bill = neighbours(recording_of(shared_engine()), BY_TENANT)
    delays = {(delay.name, delay.cause): delay for delay in bill.delays}
    of_b = delays["a", "b"]
    assert (of_b.queued_ns, of_b.shared_ns, of_b.between_ns, of_b.blocked_ns) == (100, 75, 30, 50 + 40)
    assert delays["b", "a"].shared_ns == 25
    assert delays["a", NOBODY].summed_ns == (310 - 120) - 100 - 50 + 10
    assert bill.sentence() == "Requests of a waited 295 ns each for requests of b."
    assert bill.suffered_ns == bill.inflicted_ns + bill.nobody_ns
    assert "Suffered" in "\n".join(bill.lines())


def test_a_group_that_no_request_has_is_refused_with_those_that_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(file.dump(tmp_path / "run.npz", recording_of(shared_engine()).trace))
    assert main(["report", path, "--view", "neighbours", "--by", "tenant"]) == 0
    assert "Waits by tenant" in capsys.readouterr().out
    assert main(["report", path, "--by", "tenat"]) == 2
    assert "allowed: endpoint, http.request.header.x-tenant" in capsys.readouterr().err


def test_a_bill_without_waits_says_how_to_get_one() -> None:
    assert "`batch:`" in "\n".join(neighbours(recording_of([made(1, CHAT, 0, 5)]), Options()).lines())


def by_hand(recording: Recording, group: list[int], count: int) -> Counter[tuple[int, int, int]]:
    """Return what is charged by way, group that waited and group waited for, piece by piece."""
    trace, joined = recording.columns, recording.joined
    turns, served = recording.turns, joined.served
    given = recording.ledger.given_ns
    charged = Counter[tuple[int, int, int]]()
    members: dict[int, list[tuple[int, int, int]]] = {}
    for pair, (row, request, weight) in enumerate(zip(served.batch, served.request, served.weight, strict=True)):
        members.setdefault(int(row), []).append((count if request < 0 else group[request], int(weight), pair))

    def give(way: int, waiting: int, length: int, weights: list[tuple[int, int]]) -> None:
        whole, before = sum(weight for _, weight in weights), 0
        for number in range(count + 1):
            upto = sum(weight for of, weight in weights if of <= number)
            after = length * upto // whole if whole else length * (number == count)
            charged[way, waiting, number] += after - before
            before = after

    places = range(len(turns.request))
    spent = Counter[int]()
    for place in places:
        request, pair = int(turns.request[place]), int(turns.pair[place])
        begin, end = int(turns.start_ns[place]), int(turns.start_ns[place] + turns.length_ns[place])
        if pair >= 0:
            spent[pair] += end - begin
        name = turns.names[turns.part[place]]
        if name not in ("queue", "stall"):
            continue
        at = begin
        while at < end:  # all batches are on one thread
            running = [row for row in members if trace.start_ns[row] <= at < trace.end_ns[row]]
            edges = [int(edge) for row in members for edge in (trace.start_ns[row], trace.end_ns[row]) if edge > at]
            until = min([end, *edges])
            way, newest = (0 if name == "queue" else 2), max(running, key=lambda row: trace.start_ns[row], default=None)
            weights = [(of, weight) for of, weight, _ in members[newest]] if newest is not None else []
            give(way, group[request], until - at, weights)
            at = until
    for pair, time_ns in spent.items():
        waited = time_ns - min(time_ns, int(given[pair]))
        others = [(of, weight) for of, weight, other in members[int(served.batch[pair])] if other != pair]
        give(1, group[served.request[pair]], waited, others)
    return +charged


@pytest.mark.parametrize("seed", range(6))
def test_the_bill_equals_one_that_is_made_by_hand(seed: int) -> None:
    recording = Recording.from_trace(Service(seed, requests=25, a_second=2_000).run())
    rng, count = random.Random(seed), 3
    joined = recording.joined
    group = [rng.randrange(count) for _ in joined.rows]
    every = np.ones(len(group), dtype=np.bool_)
    account = Account(recording.columns, joined, recording.turns, np.array(group), count, every)
    bill = account.compute_bill(recording.ledger)
    places = {
        (way, waiting, cause): int(bill.charged_ns[way, waiting, cause])
        for way in WAYS
        for waiting in range(count)
        for cause in range(count + 1)
        if bill.charged_ns[way, waiting, cause]
    }
    assert places == by_hand(recording, group, count)
    assert (bill.charged_ns.sum(axis=(0, 2)) == bill.suffered_ns).all()


@pytest.mark.parametrize("seed", range(40))
def test_irregular_recordings_charge_each_nanosecond_once(seed: int) -> None:
    rng, spans = random.Random(seed), schedule(seed)
    threads, end = sorted({span.thread_id for span in spans}), max(span.end_ns for span in spans)
    names = ["", *(span.site.name for span in spans)]
    for number in range(rng.randrange(6)):
        at = rng.randrange(end)
        blocked = made(100_000 + number, BLOCKED_LOOP, at, at + rng.randrange(1, end), thread=rng.choice(threads))
        blocked.attributes = {BLOCKED_BY: rng.choice(names)}
        spans.append(blocked)
    recording = recording_of(spans)
    joined, count = recording.joined, rng.randrange(1, 5)
    group = np.array([rng.randrange(count) for _ in joined.rows], dtype=np.int64)
    every = np.ones(len(group), dtype=np.bool_)
    account = Account(recording.columns, joined, recording.turns, group, count, every)
    bill = account.compute_bill(recording.ledger)
    assert (bill.charged_ns.sum(axis=(0, 2)) == bill.suffered_ns).all()
    assert (bill.charged_ns >= 0).all()
    assert is_conserved(neighbours(recording, Options()))


def test_requests_share_batches_device_time_and_tokens_by_any_attribute() -> None:
    spans = shared_engine()
    for span in spans:
        if span.site is STEP and span.span_id == 12:
            span.device = (DeviceInterval(0, 7, 320, 400),)
        if span.span_id == 1:
            span.attributes = {**span.attributes, "gen_ai.usage.input_tokens": 12}
    recording = recording_of(spans)
    shares = {row.name: row for row in group_shares(recording, BY_TENANT)}
    assert (shares["a"].batches_ns, shares["b"].batches_ns) == (25 + 50, 75 + 30 + 120)
    assert (shares["a"].device_ns, shares["b"].device_ns) == (20, 60)
    assert (shares["a"].input_tokens, shares["b"].input_tokens) == (12, 0)
    for view in (requests, batches, device):
        assert "Shares by tenant" in "\n".join(view(recording, BY_TENANT).lines())  # type: ignore[operator]
    assert [row.name for row in requests(recording, BY_TENANT).groups] == ["b", "a"]
    assert group_shares(recording, Options()) == ()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 3, 5])
def test_suffered_time_equals_inflicted_time_and_queues_without_the_noisy_tenant_are_predicted(seed: int) -> None:
    bill, is_right = workload(seed, seconds=3)
    assert is_conserved(bill)
    assert is_right
    assert min(bill.predictions, key=lambda row: row.mean_without_ns / row.mean_ns).name == "noisy"
    delay = next(row for row in bill.delays if (row.name, row.cause) == ("a", "noisy"))
    assert (delay.blocked_ns > delay.summed_ns / 2) == (KINDS[seed] == "blocked loop")


@pytest.mark.slow
def test_a_placebo_is_charged_nothing_beyond_the_noise_of_groups_that_are_alike() -> None:
    assert is_placebo_free(0, seconds=3)


def test_queues_that_the_replay_does_not_reproduce_are_not_predicted() -> None:
    spans = []
    for number in range(20):
        at, key, tenant = 1_000 * number, f"r{number}", "ab"[number % 2]
        served_at = at + (100, 900)[number % 4 > 1]  # the engine waits without a reason
        spans.append(of_tenant(made(10 * number + 1, CHAT, at, at + 2_500, key=key), tenant))
        for place, begin in enumerate((served_at, at + 1_050)):
            step = made(10 * number + 2 + place, STEP, begin, begin + 20, thread=ENGINE, batch=[key])
            spans.append(step)
    bill = neighbours(recording_of(spans), BY_TENANT)
    assert bill.predictions == ()
    assert "Not predicted: a replay of all requests" in "\n".join(bill.lines())


def test_a_replay_of_an_engine_with_prefills_and_decodes_reproduces_its_queues() -> None:
    prefill, decode = Site("engine.prefill", "op"), Site("engine.decode", "op")
    rng, spans, now, waiting, active = random.Random(1), [], 0, [], dict[str, int]()
    arrivals = sorted(rng.randrange(200_000) for _ in range(300))
    waiting, ends = [(at, f"r{number}") for number, at in enumerate(arrivals)], dict[str, int]()
    while waiting or active:
        now = max(now, waiting[0][0]) if waiting and not active else now
        while waiting and waiting[0][0] <= now and len(active) < 4:
            key = waiting.pop(0)[1]
            spans.append(made(1_000 + len(spans), prefill, now, now + 300, thread=ENGINE, batch=[key]))
            active[key], now = 3, now + 300
        spans.append(
            made(1_000 + len(spans), decode, now, now + 500 + 50 * len(active), thread=ENGINE, batch=[*active])
        )
        now += 500 + 50 * len(active)
        ends |= dict.fromkeys(active, now)
        active = {key: steps - 1 for key, steps in active.items() if steps > 1}
    for number, at in enumerate(arrivals):
        spans.append(of_tenant(made(number + 1, CHAT, at, ends[f"r{number}"], key=f"r{number}"), "ab"[number % 2]))
    spans.sort(key=lambda span: span.start_ns)
    bill = neighbours(Recording.from_trace(Trace(Origin(1, "shop", 0, 1), 0, now, spans)), BY_TENANT)
    assert bill.replayed_ns == pytest.approx(bill.queue_ns, rel=0.02)
    assert {row.name for row in bill.predictions} == {"a", "b"}
    assert all(row.mean_without_ns < row.mean_ns for row in bill.predictions)
