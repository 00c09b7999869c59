"""The agent's exporter reports times in the queue of all requests, kept or not."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_service import beside_engine
from otlp_collectors import Collector, collecting, take
from test_agent import agents, begin, children_of, folder, until

from instrument.agent.exporter_process import EXPORTER_NAME
from instrument.recorder.request_meter import Meter
from instrument.recording.distributions import Distribution, Metric
from instrument.recording.memory_layout import Row
from instrument.recording.spans import Site, Span
from instrument.runtime import agent_socket
from instrument.runtime.environment import TEMPORALITY

__all__ = ["folder"]

PROFILE = """
service: shop
functions:
  - {match: "front:serve", kind: request}
  - {match: "front:tokenise", kind: phase}
  - {match: "front:submit", key: request_id}
  - {match: "core:accept", key: request_id, kind: phase}
  - {match: "core:step", batch: ids}
capture: {sample: 0, where: {tenant: x}}
export: {otlp: {endpoint: "http://127.0.0.1:%d"}, summary: {to: stderr}}
"""

CORE = """
import json, time

accepted, returned, asked_for, begun, sizes = {}, {}, {}, {}, {}

def accept(request_id):
    time.sleep(0.001)
    accepted[request_id] = time.monotonic_ns()

def step(ids):
    now_ns = time.monotonic_ns()
    for x in ids:
        begun.setdefault(x, now_ns)
        sizes.setdefault(x, []).append(len(ids))
    time.sleep(0.002)

def loop(asked, done):
    done.put("ready")
    left = {}
    while True:
        while not left or not asked.empty():
            x = asked.get()
            if x is None:
                with open("times.json", "w") as file:
                    json.dump([accepted, returned, asked_for, begun, sizes], file)
                return
            accept(x)
            returned[x] = time.monotonic_ns()
            left[x] = 3
        time.sleep(0.002)
        now_ns = time.monotonic_ns()
        for x in left:
            asked_for.setdefault(x, now_ns)
        step(list(left))
        left = {x: steps - 1 for x, steps in left.items()}
        for x in [x for x in left if not left[x]]:
            del left[x]
            done.put(x)
"""

FRONT = """
import threading, time
import instrument

waiting = {}

def tokenise(text):
    time.sleep(0.001)
    return text

def submit(request_id, asked):
    waiting[request_id] = threading.Event()
    if request_id.startswith("r"):
        asked.put(request_id)
        waiting[request_id].wait()

def serve(request_id, asked):
    tenant = "x" if request_id in ("r7", "r23", "r35") else "y"
    instrument.annotate_request({"gen_ai.request.model": "tiny", "tenant": tenant})
    submit(tokenise(request_id), asked)

def answer(done):
    while (request_id := done.get()) is not None:
        waiting[request_id].set()
"""

SERVICE = beside_engine("""
    answering = threading.Thread(target=front.answer, args=(done,))
    answering.start()
    numbers = iter(range(1000))
    for line in sys.stdin:
        if line == "flush\\n":
            assert instrument.flush(100).settled
            with open("scraped.txt", "w") as file:
                file.write(instrument.prometheus())
            line = "0"
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda x: front.serve(f"r{x}", asked), [next(numbers) for _ in range(int(line))]))
        print("served", flush=True)
    front.serve("nobody serves it", asked)
""")

TIME_IN_QUEUE = "instrument.request.queue.duration"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting(take) as server:
        Path("core.py").write_text(CORE)
        Path("front.py").write_text(FRONT)
        Path("profile.yaml").write_text(PROFILE % server.server_port)
        yield server


def points(collector: Collector, name: str = TIME_IN_QUEUE, unit: str = "s") -> list[Any]:
    found = [metric for metric in collector.metrics if metric.name == name]
    assert {metric.unit for metric in found} == {unit}
    return [point for metric in found for point in metric.exponential_histogram.data_points]


def bounds_s() -> tuple[float, float]:
    """Return the least and the most time of all requests in the queue together, by its own log."""
    accepted, returned, asked_for, begun, _ = json.loads(Path("times.json").read_text())
    assert len(begun) == 40
    least = sum(asked_for[x] - returned[x] for x in begun)
    return least / 1e9, sum(begun[x] - accepted[x] for x in begun) / 1e9


@pytest.mark.slow
@pytest.mark.parametrize("preference", ["cumulative", pytest.param("delta", marks=pytest.mark.slow)])
def test_all_requests_are_reported_with_their_queue_time_if_only_some_are_kept(
    collector: Collector, preference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TEMPORALITY, preference)
    service = begin(SERVICE)
    _, errors = service.communicate("40\nflush\n", timeout=240)
    assert service.returncode == 0, errors
    scraped = Path("scraped.txt").read_text()  # in the one process what both have recorded together
    for name in ("instrument_request_queue_duration_seconds", "instrument_request_batch_size"):
        ((labels, count),) = re.findall(rf"^{name}_count{{(.*)}} (.*)$", scraped, re.MULTILINE)
        assert (float(count), 'gen_ai_request_model="tiny"' in labels) == (40, True)
    until(lambda: not agent_socket.list_runs())
    every = points(collector)
    found = every[-1:] if preference == "cumulative" else every
    assert sum(point.count for point in found) == 40
    least_s, most_s = bounds_s()
    assert least_s <= sum(point.sum for point in found) <= most_s
    labels = {one.key: one.value.string_value for one in found[-1].attributes}
    assert labels == {
        "instrument.span.name": "serve", "code.function.name": "front.serve", "gen_ai.request.model": "tiny",
    }  # fmt: skip
    queues = {
        (span.trace_id, span.parent_span_id): span.end_time_unix_nano - span.start_time_unix_nano
        for spans in collector.spans.values()
        for span in spans
        if span.name == "queue"
    }
    kept = [one for point in every for one in point.exemplars]
    assert kept
    assert len(queues) == 3
    for one in kept:
        assert one.as_double == queues[one.trace_id, one.span_id] / 1e9
    sizes = points(collector, "instrument.request.batch.size", "{request}")
    last = sizes[-1:] if preference == "cumulative" else sizes
    *_, of_requests = json.loads(Path("times.json").read_text())
    assert sum(point.count for point in last) == 40
    expected = sum(sum(its) / len(its) for its in of_requests.values())
    assert sum(point.sum for point in last) == pytest.approx(expected)
    assert {one.trace_id for point in sizes for one in point.exemplars} <= {trace_id for trace_id, _ in queues}
    assert "without their time in the queue" not in errors


@pytest.mark.slow
def test_requests_that_an_exporter_had_counted_that_was_killed_are_reported_by_the_next_one_or_counted(
    collector: Collector,
) -> None:
    service = begin(SERVICE)
    assert service.stdin is not None
    assert service.stdout is not None
    for line in ("30", "flush", "12"):
        service.stdin.write(f"{line}\n")
        service.stdin.flush()
        assert service.stdout.readline() == "served\n"
        if line == "flush":
            assert points(collector)[-1].count == 30
    time.sleep(0.5)  # what was served last has been read
    (agent,) = agents()
    (exporter,) = children_of(agent, EXPORTER_NAME)
    os.kill(exporter, signal.SIGKILL)
    until(lambda: set(children_of(agent, EXPORTER_NAME)) - {exporter})
    _, errors = service.communicate("8\n", timeout=240)
    assert service.returncode == 0, errors
    until(lambda: not agent_socket.list_runs())
    left_out = sum(
        map(int, re.findall(r"(\d+) \(requests that batches served without their time in the queue", errors))
    )
    assert points(collector)[-1].count + left_out == 50
    stages = [span for spans in collector.spans.values() for span in spans if span.name == "queue"]
    assert len(stages) == 3


ROUTED = Site(
    "POST /v1/chat/completions",
    "request",
    attributes=(("http.request.method", "POST"), ("http.route", "/v1/chat/completions")),
)


class _Rows:
    """Rows of one site, of which none is open."""

    def site_of(self, row: Row) -> Site:
        return ROUTED

    def open_rows(self) -> list[tuple[int, Row]]:
        return []

    def totals(self, **_: Any) -> Any:
        raise AssertionError("no calls are counted")


def ended(error: str | None, attributes: dict[str, Any]) -> Span:
    site = _Rows().site_of((0, 1, 0, 1, 0, 100, 900, 0, -1, error, attributes))
    return Span(site, 1, 0, 1, 1, 0, 100, 900, 800, 800, error, attributes)


def meter_of(*generations: str) -> Meter:
    found = Meter(_Rows(), 0)
    found.generations = generations
    return found


def metrics_of(meter: Meter) -> list[Metric]:
    return [*meter.snapshot(requests=False, losses={}, costs_ns={}, queued={}).metrics]


def test_requests_are_reported_by_route_and_by_what_they_say_of_what_is_generated() -> None:
    own = ended("ValueError", {"gen_ai.request.model": "tiny", "other": "x"})
    common = (("gen_ai.request.model", "tiny"), ("error.type", "ValueError"))
    route = ("http.route", "/v1/chat/completions")
    for routes, labels in (((), (route, *common)), (("/v1/*",), (("gen_ai.operation.name", "chat"), route, *common))):
        counted = meter_of(*routes)
        counted.count_queue_and_batches(own, 40, 2.5, (7, 8))
        taken = meter_of(*routes)
        taken.restore(counted.state())
        taken.count_queue_and_batches(own, 2, 4.0, None)
        found = {one.name: one for one in metrics_of(taken)}
        for name, total in ((TIME_IN_QUEUE, 42), ("instrument.request.batch.size", 6_500_000_000)):
            ((told, times),) = found[name].series.items()
            assert told == labels
            assert isinstance(times, Distribution)
            assert (times.count, times.sum_ns) == (2, total)
        kept = {one.name: one.exemplars for one in metrics_of(counted)}
        ((one,),) = kept[TIME_IN_QUEUE].values()
        assert (one.value_ns, one.at_ns, one.trace_id, one.span_id) == (40, 900, 7, 8)
