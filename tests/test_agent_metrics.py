"""The agent of a run reports all counts of its processes' metrics once, in spite of kills in between."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from otlp_collectors import Collector, collecting, refuse_with, take
from test_agent import INSTRUMENT, agents, begin, children_of, folder, run, until

from instrument.agent.exporter_process import EXPORTER_NAME
from instrument.otlp import export_facts
from instrument.otlp.export_facts import Ids, MeteredFacts
from instrument.profile.model import Capture
from instrument.recorder.request_meter import count_queued_tasks
from instrument.runtime import agent_socket
from instrument.runtime.environment import TEMPORALITY

__all__ = ["folder"]

PROFILE = """
service: shop
requests: auto
functions:
  - {match: "engine:work", metrics: true}
  - {match: "engine:tokens", gen_ai: true}
  - {match: "engine:step", batch: ids}
device: {host: 1s}
export: {otlp: {endpoint: "http://127.0.0.1:%d", timeout: 200s}}
"""

ENGINE = """
def work():
    pass

def tokens():
    yield from "abc"

def step(ids):
    pass

def app(environ, start_response):
    work()
    list(tokens())
    step(["a", "b"])
    start_response(environ["PATH_INFO"].strip("/") + " told", [("Content-Length", "1")])
    return [b"x"]
"""

SERVICE = """
import os, signal, sys, threading
from urllib.error import HTTPError
from urllib.request import urlopen
from wsgiref.simple_server import WSGIRequestHandler, make_server

import engine
import instrument

handled = threading.Semaphore(0)

class Quiet(WSGIRequestHandler):
    def log_message(self, *_):
        pass

    def handle(self):
        super().handle()
        handled.release()

with make_server("127.0.0.1", 0, engine.app, handler_class=Quiet) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("serves", flush=True)
    for line in sys.stdin:
        word, *more = line.split()
        if word == "ask":
            for _ in range(int(more[1])):
                try:
                    urlopen(f"http://127.0.0.1:{server.server_port}/{more[0]}").read()
                except HTTPError:
                    pass
                handled.acquire()  # a request ends after its answer has come
        elif word == "flush":
            found = instrument.flush(100)
            assert found.settled, found
        elif word == "scrape":
            name = "http_server_request_duration_seconds_count"
            found = [line for line in instrument.prometheus().splitlines() if line.startswith(name)]
            print("\\n".join(sorted(found)), flush=True)
        elif word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        print(word, instrument.session().handover.is_here, flush=True)
    server.shutdown()
"""

DURATION, CALLS = "http.server.request.duration", "instrument.call.duration"
FIRST, BATCH = "gen_ai.server.time_to_first_token", "instrument.batch.size"
QUEUED = "instrument.request.queue.duration"


@pytest.fixture(params=["cumulative", "delta"])
def preference(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(TEMPORALITY, request.param)
    return str(request.param)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting(take) as server:
        Path("engine.py").write_text(ENGINE)
        Path("profile.yaml").write_text(PROFILE % server.server_port)
        yield server


def do(service: subprocess.Popen[str], *lines: str) -> bool:
    """Have it do that; whether it exports itself by then."""
    assert service.stdin is not None
    assert service.stdout is not None
    is_own = False
    for line in lines:
        service.stdin.write(f"{line}\n")
        service.stdin.flush()
        answer = service.stdout.readline().split()
        assert answer[:1] == line.split()[:1], service.communicate()
        is_own = answer[1] == "True"
    return is_own


def started() -> subprocess.Popen[str]:
    service = begin(SERVICE)
    assert service.stdout is not None
    assert service.stdout.readline() == "serves\n", service.communicate()
    return service


def counted(metrics: Sequence[Metric], name: str, preference: str, label: str = "") -> dict[Any, int]:
    """Return a collector's counts of a metric of one process, by a label. Each point follows the one before."""
    found: Counter[Any] = Counter()
    starts: dict[Any, set[int]] = {}
    ends: dict[Any, int] = {}
    for point in (
        point for metric in metrics if metric.name == name for point in metric.exponential_histogram.data_points
    ):
        labels = {one.key: one.value.string_value or one.value.int_value for one in point.attributes}
        series, told = tuple(sorted(labels.items())), labels.get(label)
        assert ends.get(series, 0) <= point.time_unix_nano
        if preference == "delta":
            assert point.start_time_unix_nano == ends.get(series, point.start_time_unix_nano)
            found[told] += point.count
        else:
            assert found[told] <= point.count
            found[told] = point.count
        starts.setdefault(series, set()).add(point.start_time_unix_nano)
        ends[series] = point.time_unix_nano
    if preference == "cumulative":
        assert len(set().union(*starts.values())) <= 1, starts
    return dict(found)


def check(collector: Collector, preference: str, by_status: dict[int, int]) -> None:
    every = sum(by_status.values())
    assert counted(collector.metrics, DURATION, preference, "http.response.status_code") == by_status
    for name in (CALLS, FIRST, BATCH):
        assert counted(collector.metrics, name, preference) == {None: every}, name


@pytest.mark.slow
def test_counts_of_a_killed_process_reach_the_collector(collector: Collector, preference: str) -> None:
    service = started()
    do(service, "ask 200 20", "ask 404 5")
    assert service.stdin is not None
    service.stdin.write("die\n")
    service.communicate(timeout=240)
    until(lambda: not agent_socket.list_runs())
    check(collector, preference, {200: 20, 404: 5})
    (active,) = [metric for metric in collector.metrics if metric.name == "http.server.active_requests"][
        -1
    ].sum.data_points
    assert active.as_int == 0
    assert collector.connections == 1


@pytest.mark.slow
def test_the_next_exporter_continues_the_counts_of_a_killed_one(collector: Collector, preference: str) -> None:
    service = started()
    do(service, "ask 200 10", "ask 404 5", "flush", "ask 404 2")
    (agent,) = agents()
    (exporter,) = children_of(agent, EXPORTER_NAME)
    time.sleep(0.3)  # it has read what was asked last
    os.kill(exporter, signal.SIGKILL)
    do(service, "ask 503 3", "flush", "ask 200 1")
    service.communicate(timeout=240)
    until(lambda: not agent_socket.list_runs())
    check(collector, preference, {200: 11, 404: 7, 503: 3})


def readings(collector: Collector) -> list[int]:
    """Return the times of all reported readings of the memory."""
    its = [metric for metric in collector.metrics if metric.name == "process.memory.usage"]
    return [point.time_unix_nano for metric in its for point in metric.sum.data_points]


@pytest.mark.slow
def test_the_next_agent_goes_on_with_the_metrics_of_one_that_was_killed(collector: Collector, preference: str) -> None:
    service = started()
    do(service, "ask 200 10", "ask 404 5", "flush")
    until(lambda: (do(service, "flush"), readings(collector))[1])
    do(service, "ask 404 2")
    (agent,) = agents()
    os.kill(agent, signal.SIGKILL)
    do(service, "ask 200 1")
    until(lambda: [one for one in agents() if one != agent])
    do(service, "ask 503 3", "flush")
    check(collector, preference, {200: 11, 404: 7, 503: 3})
    do(service, "ask 503 1", "ask 200 4", "flush", "ask 404 1")
    service.communicate(timeout=240)
    until(lambda: not agent_socket.list_runs())
    check(collector, preference, {200: 15, 404: 8, 503: 4})
    read = readings(collector)
    assert len(read) == len(set(read)) > 1


def test_a_scrape_of_a_process_whose_agent_counts_reports_all_with_their_status(collector: Collector) -> None:
    service = started()
    do(service, "ask 200 10", "ask 404 5", "flush", "ask 503 2")
    assert service.stdin is not None
    assert service.stdout is not None
    for _ in range(2):
        service.stdin.write("scrape\n")
        service.stdin.flush()
        lines = [service.stdout.readline() for _ in range(4)][:3]
        found = {line.partition('status_code="')[2][:3]: float(line.split()[-1]) for line in lines}
        assert found == {"200": 10, "404": 5, "503": 2}
    service.communicate(timeout=240)
    until(lambda: not agent_socket.list_runs())
    check(collector, "cumulative", {200: 10, 404: 5, 503: 2})


def test_processes_that_record_nothing_have_no_metrics(collector: Collector) -> None:
    done = run("import os, time, instrument\ntime.sleep(0.3)\ninstrument.flush(1)\n")
    assert done.returncode == 0, done.stderr
    until(lambda: not agent_socket.list_runs())
    assert collector.taken == []


def test_processes_that_ask_for_no_metrics_have_none_but_gauges(collector: Collector) -> None:
    Path("profile.yaml").write_text(
        f"functions: [{{match: 'engine:work'}}]\nexport: {{otlp: {{endpoint: 'http://127.0.0.1:{collector.server_port}'}}}}"
    )
    done = run("import engine\nengine.work()\n")
    assert done.returncode == 0, done.stderr
    until(lambda: not agent_socket.list_runs())
    assert collector.taken == ["work"]


RESTARTS = """
import subprocess, sys
import engine
import instrument

if sys.argv[1:]:
    for count in (7, 5, 3):
        for _ in range(count):
            engine.work()
        instrument.stop()
        instrument.start("profile.yaml")
else:
    subprocess.run([sys.executable, "main.py", "below"], check=True)
"""


@pytest.mark.slow
def test_each_session_of_a_process_that_stops_and_starts_has_its_metrics_reported(collector: Collector) -> None:
    Path("engine.py").write_text(ENGINE)
    Path("main.py").write_text(RESTARTS)
    Path("profile.yaml").write_text(PROFILE % collector.server_port)
    subprocess.run([*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py"], check=True, timeout=240)

    def told() -> list[int]:
        calls = [metric for metric in collector.metrics if metric.name == "instrument.call.duration"]
        points = [point for metric in calls for point in metric.exponential_histogram.data_points]
        return sorted({point.start_time_unix_nano: point.count for point in points}.values())

    until(lambda: told() == [3, 5, 7])


def test_waiting_work_of_executors_is_published() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: None).result()
        facts = MeteredFacts(0, queued=count_queued_tasks())
        told = json.loads(
            json.dumps(export_facts.encode_facts(export_facts.ExportFacts(Ids(), {}, Capture(), 1, facts)))
        )
    found = export_facts.decode_facts(told)
    assert found is not None
    assert found.metered.queued["ThreadPoolExecutor"] == 0


@pytest.mark.parametrize("name", ["start_ns", "losses"])
def test_infinite_numbers_from_a_process_count_as_missing(name: str) -> None:
    told = export_facts.encode_facts(export_facts.ExportFacts(Ids(), {}, Capture(), 1, MeteredFacts(0)))
    told["metered"][name] = {"losses": {"x": float("inf")}, "start_ns": float("inf")}[name]
    assert export_facts.decode_facts(json.loads(json.dumps(told))) is None


NESTED = """
import os, sys, time
from instrument import scope

asked, answered = os.pipe(), os.pipe()
if os.fork() == 0:
    while key := os.read(asked[0], 4).decode():
        with scope("accept", phase="accept", key=key):
            pass
        time.sleep(0.001)
        with scope("step", kind="step", batch=[key]):
            time.sleep(0.001)
        os.write(answered[1], b".")
        if key == "last":
            sys.exit()

def ask(key):
    with scope("submit", key=key):
        os.write(asked[1], key.encode())
    os.read(answered[0], 1)

for number in range(10, 20):
    with scope("outer", kind="request"):
        with scope("inner", kind="request"):
            ask(f"i-{number}")
        ask(f"o-{number}")
ask("last")
os.wait()
"""


def in_queue(collector: Collector) -> dict[str, int]:
    """The requests whose time in the queue the collector knows, by name."""
    found = {}
    for metric in collector.metrics:
        for point in metric.exponential_histogram.data_points if metric.name == QUEUED else ():
            (name,) = [one.value.string_value for one in point.attributes if one.key == "instrument.span.name"]
            found[name] = point.count
    return found


@pytest.mark.slow
def test_at_the_end_of_a_run_the_time_in_the_queue_of_requests_in_others_is_sent_too(collector: Collector) -> None:
    Path("profile.yaml").write_text(
        "requests: auto\ncapture: {sample: 0}\n"
        f"export: {{otlp: {{endpoint: 'http://127.0.0.1:{collector.server_port}'}}}}\n"
    )
    done = run(NESTED)
    assert done.returncode == 0, done.stderr
    until(lambda: not agent_socket.list_runs())
    assert in_queue(collector) == {"outer": 10, "inner": 10}
    assert "has arrived there" not in done.stderr


@pytest.mark.slow
def test_metrics_that_a_collector_does_not_take_at_the_end_of_a_run_are_reported() -> None:
    Path("engine.py").write_text(ENGINE)
    with collecting(take, metrics=refuse_with(400)) as server, Path("errors").open("w") as errors:
        Path("profile.yaml").write_text(PROFILE % server.server_port)
        Path("main.py").write_text("import engine\nengine.work()\n")
        command = [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py"]
        subprocess.run(command, check=True, timeout=240, stderr=errors, env={**os.environ, "IMPATIENT": "all"})
        until(lambda: not agent_socket.list_runs())
    assert re.search("destination: .*points of metrics that the collector did not accept", Path("errors").read_text())
