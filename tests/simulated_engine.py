"""A simulated service whose costs are known: requests wait for an engine that serves up to eight of them at a time."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from instrument.recording.spans import BATCH_KEYS, BATCH_WEIGHTS, KEY, Origin, Site, Span
from instrument.trace.trace import Trace

MOST_MEMBERS = 8
FUNCTIONS = 10
REQUEST = Site("POST /generate", "request", "app", "generate")
PARSE = Site("parse", "phase", "app", "parse")
STEP = Site("engine.step", "step", "engine", "step")
PARTS = tuple(Site(f"part {number}", "op", "engine", f"part_{number}") for number in range(FUNCTIONS))
TOKENS = "gen_ai.usage.input_tokens"


@dataclass
class _Request:
    number: int
    arrives_ns: int
    prompt: int
    left: int
    parsed_ns: int = 0
    has_begun: bool = False


@dataclass(frozen=True)
class Service:
    """The settings of a simulated service, and of those who use it.

    `slower` are factors of the functions of a step by their names. Neighbouring steps are alike by `correlation`, their
    times differ by `noise` in the standard deviation.
    """

    seed: int
    requests: int = 800
    a_second: float = 40.0
    prompt: float = 200.0
    slower: Mapping[str, float] = field(default_factory=dict)
    correlation: float = 0.9
    noise: float = 0.05

    def run(self) -> Trace:
        """Return the recording of the service until it has answered all requests."""
        rng = random.Random(self.seed)
        now_ns, coming = 10**9, deque[_Request]()
        for number in range(self.requests):
            now_ns += round(rng.expovariate(self.a_second) * 1e9)
            prompt = max(1, round(self.prompt * math.exp(rng.gauss(0, 0.6))))
            coming.append(_Request(number, now_ns, prompt, 1 + int(rng.expovariate(1 / 6))))
        everyone = list(coming)
        spans: list[Span] = []
        active: list[_Request] = []
        now_ns, alike = coming[0].arrives_ns, 0.0
        spread = self.noise * math.sqrt(1 - self.correlation**2)
        ended_ns: dict[int, int] = {}
        identity = 1
        while coming or active:
            while coming and len(active) < MOST_MEMBERS and coming[0].arrives_ns <= now_ns:
                active.append(coming.popleft())
            if not active:
                now_ns = coming[0].arrives_ns
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
            own_ns = 50_000
            spans.append(self._span(REQUEST, request_id, 0, request_id, thread, begin_ns, end_ns, own_ns, facts))
            spans.append(
                self._span(PARSE, request_id + 1, request_id, request_id, thread, begin_ns, begin_ns + parse_ns)
            )
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
