"""A simulated service whose costs are known: requests wait for an engine that serves up to eight of them at a time."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from instrument.recording.spans import (
    BATCH_KEYS,
    BATCH_WEIGHTS,
    BLOCKED_BY,
    BLOCKED_LOOP,
    COLLECTION,
    EXECUTOR_QUEUE,
    HOST,
    KEY,
    Cost,
    DeviceInterval,
    FirstCall,
    Origin,
    Sample,
    Site,
    Span,
    Startup,
)
from instrument.trace.trace import Trace

MOST_MEMBERS = 8
FUNCTIONS = 10
REQUEST = Site("POST /generate", "request", "app", "generate")
PARSE = Site("parse", "phase", "app", "parse")
STEP = Site("engine.step", "step", "engine", "step")
PARTS = tuple(Site(f"part {number}", "op", "engine", f"part_{number}") for number in range(FUNCTIONS))
TOKENISE = Site("tokenise", "op", "app", "tokenise")
TOKENS, TENANT = "gen_ai.usage.input_tokens", "tenant"


@dataclass
class Request:
    """A request on its way: `left` tokens are to come. It blocks the engine's loop for `blocks_ns` as it arrives."""

    number: int
    arrives_ns: int
    prompt: int
    left: int
    tenant: str = ""
    blocks_ns: int = 0
    has_begun: bool = False


@dataclass(frozen=True)
class Service:
    """The settings of a simulated service and of its users.

    `arrivals` replace the random arrivals. `slower` has the factors of the functions of a step by name. `correlation`
    is the correlation of adjacent steps. `noise` is the standard deviation of the differences of their times.
    """

    seed: int
    requests: int = 800
    a_second: float = 40.0
    prompt: float = 200.0
    slower: Mapping[str, float] = field(default_factory=dict)
    correlation: float = 0.9
    noise: float = 0.05
    arrivals: Sequence[Request] = ()

    def run(self) -> Trace:
        """Return the recording of the service until it has answered all requests."""
        rng = random.Random(self.seed)
        now_ns, coming = 10**9, deque(replace(request) for request in self.arrivals)
        for number in range(0 if self.arrivals else self.requests):
            now_ns += round(rng.expovariate(self.a_second) * 1e9)
            prompt = max(1, round(self.prompt * math.exp(rng.gauss(0, 0.6))))
            coming.append(Request(number, now_ns, prompt, 1 + int(rng.expovariate(1 / 6))))
        everyone = list(coming)
        spans: list[Span] = []
        active: list[Request] = []
        blocking = deque(request for request in everyone if request.blocks_ns)
        blocked: dict[int, tuple[int, int]] = {}
        now_ns, alike = coming[0].arrives_ns, 0.0
        spread = self.noise * math.sqrt(1 - self.correlation**2)
        ended_ns: dict[int, int] = {}
        identity = 1
        while coming or active:
            while blocking and blocking[0].arrives_ns <= now_ns:
                request = blocking.popleft()
                blocked[request.number] = (now_ns, now_ns + request.blocks_ns)
                now_ns += request.blocks_ns
            while coming and len(active) < MOST_MEMBERS and coming[0].arrives_ns <= now_ns:
                active.append(coming.popleft())
            if not active:
                now_ns = max(now_ns, coming[0].arrives_ns)
                continue
            weights = [1 if request.has_begun else request.prompt for request in active]
            alike = self.correlation * alike + rng.gauss(0, spread)
            step_id, identity = identity, identity + 1 + FUNCTIONS
            at_ns = now_ns + 20_000
            for number, site in enumerate(PARTS):
                cost_ns = (
                    40_000
                    + (0, 15_000, 0, 9_000)[number % 4] * len(active)
                    + (0, 0, 500, 300)[number % 4] * sum(weights)
                )
                took = cost_ns * self.slower.get(site.name, 1.0) * math.exp(alike + rng.gauss(0, self.noise))
                took_ns = round(took * (8 if rng.random() < 0.003 else 1))
                spans.append(self._span(site, step_id + 1 + number, step_id, step_id, 2, at_ns, at_ns + took_ns))
                at_ns += took_ns
            keys = {BATCH_KEYS: tuple(f"r{one.number}" for one in active), BATCH_WEIGHTS: tuple(weights)}
            spans.append(self._span(STEP, step_id, 0, step_id, 2, now_ns, at_ns + 10_000, 30_000, keys))
            now_ns = at_ns + 15_000
            for request in active:
                request.has_begun, request.left = True, request.left - 1
                if not request.left:
                    ended_ns[request.number] = now_ns
            active = [request for request in active if request.left]
        for request in everyone:
            request_id, identity = identity, identity + 2
            begin_ns, end_ns = request.arrives_ns - 200_000, ended_ns[request.number] + 20_000
            parse_ns = round((20_000 + 100 * request.prompt) * math.exp(rng.gauss(0, 0.1)))
            thread = 1_000 + request.number  # each on a line of its own, as tasks are
            facts = {KEY: f"r{request.number}", TOKENS: request.prompt}
            if request.tenant:
                facts[TENANT] = request.tenant
            own_ns = 50_000
            spans.append(self._span(REQUEST, request_id, 0, request_id, thread, begin_ns, end_ns, own_ns, facts))
            spans.append(
                self._span(PARSE, request_id + 1, request_id, request_id, thread, begin_ns, begin_ns + parse_ns)
            )
            if request.number in blocked:
                times = blocked[request.number]
                spans.append(self._span(TOKENISE, identity, request_id, request_id, 2, *times))
                by = {BLOCKED_BY: TOKENISE.name}
                spans.append(self._span(BLOCKED_LOOP, identity + 1, 0, identity + 1, 2, *times, None, by))
                identity += 2
        origin = Origin(self.seed + 1, "simulated", 0, 1_700_000_000 * 10**9, run=f"run-{self.seed}")
        return Trace(origin, 10**9, max(span.end_ns for span in spans), spans)

    @staticmethod
    def _span(
        site: Site, span_id: int, parent: int, root: int, thread: int, begin_ns: int, end_ns: int,
        own_ns: int | None = None, attributes: Mapping[str, object] | None = None,
    ) -> Span:  # fmt: skip
        total_ns = end_ns - begin_ns
        return Span(
            site, span_id, parent, root, start_ns=begin_ns, end_ns=end_ns, active_ns=total_ns,
            self_ns=total_ns if own_ns is None else own_ns, thread_id=thread, task_id=0,
            **({"attributes": attributes} if attributes else {}),
        )  # fmt: skip


# A service with the rows of a whole life, and one incident whose delay is known

LOOP_THREAD, ENGINE_THREAD, TRAINING_THREAD = 1, 2, 3
SUBMIT = Site("submit", "op", "app", "submit")
ACQUIRE = Site("Lock.acquire", "op", "asyncio.locks", "Lock.acquire")
LOAD_IN = Site("load", "copy", "app", "load", attributes=(("direction", "h2d"),))
MOVE = Site("move", "copy", "engine", "move", attributes=(("direction", "h2d"),))
DETOKENIZE = Site("detokenize", "phase", "app", "detokenize")
TRAINING = Site("train", "op", "training", "train", device=True)
EXECUTOR = Site(EXECUTOR_QUEUE, "phase")
ON_DEVICE = Site("part 2", "op", "engine", "part_2", device=True)
LIFE_PARTS = tuple(ON_DEVICE if site.name == ON_DEVICE.name else site for site in PARTS)

INCIDENTS = (
    "arrival burst", "slow service", "another request's prefill", "waiting to fill a batch", "preemption",
    "padding", "blocked event loop", "garbage collection", "full executor", "copy", "busy device", "first call",
    "processor contention", "memory pressure", "transport", "own work", "wait for a lock",
)  # fmt: skip
"""The causes that can be planted."""


CROWDED = 15
"""The factor of all times while threads wait for a processor or for memory."""


@dataclass
class _Life:
    """A request of the service: its work, and the times that the simulation found."""

    number: int
    arrives_ns: int
    prompt: int
    steps: int
    rng: random.Random
    handed_ns: int = 0
    left: int = 0
    out_until_ns: int = 0
    ended_ns: int = 0
    spans: list[tuple[Site, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Lives:
    """The settings of a service whose requests have whole lives: a loop, an executor, copies, an engine, a device.

    `incident` is one of `INCIDENTS`, of `size_ms`. Noise comes with every run: short collections, short blocks, slow
    calls, and gauges that are never 0. The same seed has the same requests with and without an incident.
    """

    seed: int
    incident: str = ""
    size_ms: float = 80.0
    requests: int = 600
    a_second: float = 60.0
    pads: bool = False
    """True for an engine that computes as much for each member of a step as for the heaviest."""

    def run(self) -> tuple[Trace, dict[str, int]]:
        """Return the recording, and the wall of each request by its key."""
        return _LivesRun(self).result()

    def planted(self) -> tuple[Trace, str, int]:
        """Return the recording, the key of the request that the incident delayed most, and by how many ns."""
        trace, walls = self.run()
        _, before = (replace(self, pads=False) if self.pads else replace(self, incident="")).run()
        key = max(before, key=lambda key: walls[key] - before[key])
        return trace, key, walls[key] - before[key]


class _LivesRun:
    def __init__(self, lives: Lives) -> None:
        self.lives, self.size_ns = lives, round(lives.size_ms * 1e6)
        rng = random.Random(f"requests {lives.seed}")
        now_ns, everyone = 10**9, []
        for number in range(lives.requests):
            now_ns += round(rng.expovariate(lives.a_second) * 1e9)
            everyone.append(self._request(number, now_ns))
        self.victim = (lives.requests // 2 + lives.seed % 50) % lives.requests
        self.at_ns = everyone[self.victim].arrives_ns
        everyone[self.victim].steps = max(everyone[self.victim].steps, 4)
        plan = random.Random(f"incident {lives.seed}")
        self.path = plan.randrange(FUNCTIONS)
        self.choice = plan.random()
        if lives.incident == "arrival burst":
            everyone += [
                self._request(10_000 + number, self.at_ns + number * 20_000 - 1_000_000)
                for number in range(round(self.size_ns / 1.2e6))
            ]
        if lives.incident == "wait for a lock":
            everyone.append(self._request(10_000, self.at_ns - 1_000_000))
        if lives.incident == "another request's prefill":
            heavy = self._request(10_000, self.at_ns - 1_000_000)
            heavy.prompt = round(self.size_ns / 1_600)
            everyone.append(heavy)
        if lives.incident == "padding":
            company = [self._request(10_000 + number, self.at_ns - 1_000_000) for number in range(MOST_MEMBERS)]
            company[0].prompt = round(self.size_ns / 2_100 / (MOST_MEMBERS - 1))
            everyone += company
        if lives.incident == "preemption":
            for number in range(3):
                other = self._request(10_000 + number, self.at_ns - 2_000_000)
                other.steps = 40 + round(self.size_ns / 1e6)
                everyone.append(other)
        self.everyone = sorted(everyone, key=lambda request: request.arrives_ns)
        self.spans: list[Span] = []
        self.identity, self.unlocked_ns = 1, 0

    def _request(self, number: int, at_ns: int) -> _Life:
        rng = random.Random(f"request {self.lives.seed} {number}")
        prompt = max(1, round(200 * math.exp(rng.gauss(0, 0.5))))
        return _Life(number, at_ns, prompt, 1 + int(rng.expovariate(1 / 6)), rng)

    def _is(self, incident: str, at_ns: int | None = None) -> bool:
        within = at_ns is None or 0 <= at_ns - self.at_ns < self.size_ns
        return self.lives.incident == incident and within

    def _accept(self, request: _Life) -> None:
        """Do the work before the engine."""
        at_ns, rng = request.arrives_ns + 30_000, request.rng
        if self._is("blocked event loop", at_ns) and self.choice < 0.5:
            at_ns = self.at_ns + self.size_ns
        waits_ns = round(rng.expovariate(1 / 30_000))
        if request.number == self.victim and self._is("full executor"):
            waits_ns += self.size_ns
        parse_ns = round((20_000 + 100 * request.prompt) * math.exp(rng.gauss(0, 0.1)))
        if request.number == self.victim and self._is("own work"):
            parse_ns += self.size_ns
        copy_ns = round(30_000 * math.exp(rng.gauss(0, 0.2)))
        asks_ns = at_ns + waits_ns + parse_ns
        locked_ns = max(2_000, self.unlocked_ns - asks_ns)
        if request.number == 10_000 and self._is("wait for a lock"):
            copy_ns += self.size_ns
            self.unlocked_ns = asks_ns + locked_ns + copy_ns
        if request.number == self.victim and self._is("copy") and self.choice < 0.5:
            copy_ns += self.size_ns
        for site, took_ns in (
            (EXECUTOR, waits_ns),
            (PARSE, parse_ns),
            (ACQUIRE, locked_ns),
            (LOAD_IN, copy_ns),
            (SUBMIT, 15_000),
        ):
            request.spans.append((site, at_ns, at_ns + took_ns))
            at_ns += took_ns
        request.handed_ns, request.left = at_ns, request.steps

    def _answer(self, request: _Life, now_ns: int) -> None:
        at_ns = now_ns + round(request.rng.expovariate(1 / 60_000))
        if request.number == self.victim and self._is("transport"):
            at_ns += self.size_ns
        if self._is("blocked event loop", at_ns) and self.choice >= 0.5:
            at_ns = self.at_ns + self.size_ns
        took_ns = round(40_000 * math.exp(request.rng.gauss(0, 0.1)))
        request.spans.append((DETOKENIZE, at_ns, at_ns + took_ns))
        request.ended_ns = at_ns + took_ns + 20_000

    def _add(self, site: Site, thread: int, task: int, begin_ns: int, end_ns: int, parent: Span | None = None,
             **more: Any) -> Span:  # fmt: skip
        number, self.identity = self.identity, self.identity + 1
        parent_id, root = (0, number) if parent is None else (parent.span_id, parent.root_id)
        length_ns = end_ns - begin_ns
        span = Span(site, number, parent_id, root, thread, task, begin_ns, end_ns, length_ns, length_ns, **more)
        if parent is not None and parent.thread_id == thread:
            parent.self_ns -= length_ns
        self.spans.append(span)
        return span

    def _step(self, number: int, active: list[_Life], now_ns: int) -> int:
        """Run a step. Returns its end."""
        rng = random.Random(f"step {self.lives.seed} {number}")
        weights = [request.prompt if request.left == request.steps else 1 for request in active]
        keys = {BATCH_KEYS: tuple(f"r{one.number}" for one in active), BATCH_WEIGHTS: tuple(weights)}
        step = self._add(STEP, ENGINE_THREAD, 0, now_ns, now_ns, attributes=keys)
        at_ns = now_ns + 20_000
        is_begun = any(request.number == self.victim for request in active)
        alike = rng.gauss(0, 0.05)
        load = max(weights) * len(weights) if self.lives.pads else sum(weights)
        for place, site in enumerate((*LIFE_PARTS, MOVE)):
            cost_ns = 40_000 + (0, 15_000, 0, 9_000)[place % 4] * len(active) + (0, 0, 500, 300)[place % 4] * load
            took = cost_ns * math.exp(alike + rng.gauss(0, 0.05)) * (8 if rng.random() < 0.003 else 1)
            if self._is("slow service", at_ns) and place == self.path:
                took *= 100
            if self._is("processor contention", at_ns) or self._is("memory pressure", at_ns):
                took *= CROWDED
            if self._is("first call") and number == 0 and place == self.path:
                took += self.size_ns
            if self._is("copy") and self.choice >= 0.5 and site is MOVE and is_begun and not self.moved:
                took, self.moved = took + self.size_ns, True
            if self._is("garbage collection") and place == self.path and is_begun and not self.moved:
                took, self.moved = took + self.size_ns, True
                self._add(COLLECTION, ENGINE_THREAD, 0, at_ns + 10_000, at_ns + 10_000 + self.size_ns)
            end_ns = at_ns + round(took)
            if self._is("busy device", at_ns) and site is ON_DEVICE:
                end_ns = self.at_ns + self.size_ns + round(took)
            on_device = (DeviceInterval(0, 7, end_ns - round(took), end_ns),) if site is ON_DEVICE else ()
            self._add(site, ENGINE_THREAD, 0, at_ns, end_ns, step, device=on_device)
            at_ns = end_ns
        step.end_ns = at_ns + 10_000
        step.self_ns += step.end_ns - now_ns
        step.active_ns = step.end_ns - now_ns
        return step.end_ns + 5_000

    def result(self) -> tuple[Trace, dict[str, int]]:
        for request in self.everyone:
            self._accept(request)
        coming = deque(sorted(self.everyone, key=lambda request: request.handed_ns))
        active: list[_Life] = []
        now_ns, number, self.moved = coming[0].handed_ns, 0, False
        while coming or active:
            waiting = [request for request in active if request.out_until_ns > now_ns]
            while coming and len(active) - len(waiting) < MOST_MEMBERS and coming[0].handed_ns <= now_ns:
                active.append(coming.popleft())
            ready = [request for request in active if request.out_until_ns <= now_ns]
            if not ready:
                times = [request.out_until_ns for request in active] + [one.handed_ns for one in [*coming][:1]]
                now_ns = max(now_ns, min(times))
                continue
            fresh = [request for request in ready if request.left == request.steps]
            if self._is("waiting to fill a batch") and len(fresh) == len(ready) and not self.moved:
                victim = [request for request in ready if request.arrives_ns >= self.at_ns]
                if victim:
                    now_ns, self.moved = now_ns + self.size_ns, True
                    continue
            now_ns = self._step(number, ready, now_ns)
            number += 1
            for request in ready:
                is_first = request.left == request.steps
                request.left -= 1
                if not request.left:
                    self._answer(request, now_ns)
                elif is_first and request.number == self.victim and self._is("preemption"):
                    request.out_until_ns = now_ns + self.size_ns
            active = [request for request in active if request.left]
        return self._trace(), {f"r{one.number}": one.ended_ns - one.arrives_ns for one in self.everyone}

    def _trace(self) -> Trace:
        end_ns = max(request.ended_ns for request in self.everyone)
        for request in self.everyone:
            task = request.number + 1
            tenant = "noisy" if request.number >= 10_000 else "quiet"
            facts = {KEY: f"r{request.number}", TOKENS: request.prompt, TENANT: tenant}
            root = self._add(REQUEST, LOOP_THREAD, task, request.arrives_ns, request.ended_ns, attributes=facts)
            for site, begin_ns, until_ns in request.spans:
                more = {"attributes": {KEY: f"r{request.number}"}} if site is SUBMIT else {}
                self._add(site, LOOP_THREAD, task, begin_ns, until_ns, root, **more)
        self._interrupt(end_ns)
        first = min(self.everyone, key=lambda request: request.arrives_ns)
        startup = Startup(10**9 - 10**8, request=FirstCall(REQUEST, first.arrives_ns, 1))
        origin = Origin(self.lives.seed + 1, "simulated", 0, 1_700_000_000 * 10**9, run=f"run-{self.lives.seed}")
        spans = sorted(self.spans, key=lambda span: span.end_ns)
        return Trace(
            origin, 10**9, end_ns, spans, samples=self._samples(end_ns), startup=startup,
            cost=Cost(len(spans), 50, end_ns - 10**9),
        )  # fmt: skip

    def _interrupt(self, end_ns: int) -> None:
        """Add the interruptions of the incident, and short ones that are noise."""
        rng = random.Random(f"noise {self.lives.seed}")
        if self._is("blocked event loop"):
            self._add(BLOCKED_LOOP, LOOP_THREAD, 0, self.at_ns, self.at_ns + self.size_ns,
                      attributes={BLOCKED_BY: "render"})  # fmt: skip
        if self._is("busy device"):
            interval = DeviceInterval(0, 8, self.at_ns, self.at_ns + self.size_ns)
            self._add(TRAINING, TRAINING_THREAD, 0, self.at_ns - 50_000, self.at_ns, device=(interval,))
        for site in (COLLECTION, BLOCKED_LOOP):
            for _ in range(10):
                at_ns = 10**9 + round(rng.random() * (end_ns - 10**9))
                self._add(site, LOOP_THREAD, 0, at_ns, at_ns + round(rng.expovariate(1 / 1e6)))

    def _samples(self, end_ns: int) -> list[Sample]:
        rng = random.Random(f"gauges {self.lives.seed}")
        samples = []
        every_ns = 100_000_000
        for at_ns in range(10**9 + every_ns, end_ns + every_ns, every_ns):
            overlap_ns = max(0, min(at_ns, self.at_ns + self.size_ns) - max(at_ns - every_ns, self.at_ns))
            for name, incident in (("cpu_wait", "processor contention"), ("memory_pressure", "memory pressure")):
                planted = 100 * overlap_ns / every_ns * (1 - 1 / CROWDED) if self._is(incident) else 0.0
                samples.append(Sample(name, HOST, at_ns, planted + rng.expovariate(2)))
        return samples
