"""Scrapes of a run: its agent adds up all processes, those that have ended, too, whichever of them is asked."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("prometheus_client")

from otlp_collectors import collecting, take
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from test_agent import agents, begin, children_of, folder, run, until

from instrument.agent.exporter_process import EXPORTER
from instrument.agent.scrapes import APART, EndedMetrics
from instrument.otlp.exposition import Metered, families_of_run, text_of
from instrument.recording.distributions import COUNTER, HISTOGRAM, UPDOWN, Distribution, Exemplar, Metric, Snapshot
from instrument.recording.spans import HOST, Origin, Sample
from instrument.runtime import run_folder

__all__ = ["folder"]

CALLS, REQUESTS = "instrument_call_duration_seconds", "http_server_request_duration_seconds"

ENGINE = """
def work():
    pass

def app(environ, start_response):
    start_response("200 OK", [("Content-Length", "1")])
    return [b"x"]
"""

SERVICE = """
import os, sys, threading
from urllib.request import urlopen
from wsgiref.simple_server import WSGIRequestHandler, make_server

import engine
import instrument

class Quiet(WSGIRequestHandler):
    def log_message(self, *_):
        pass

def work(times):
    for _ in range(times):
        engine.work()

with make_server("127.0.0.1", 0, engine.app, handler_class=Quiet) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    work(1)
    print("serves", flush=True)
    for line in sys.stdin:
        word, *more = line.split()
        if word == "ask":
            for _ in range(int(more[0])):
                urlopen(f"http://127.0.0.1:{server.server_port}/").read()
        elif word == "child":  # which works and ends
            if os.fork() == 0:
                work(int(more[0]))
                sys.exit(0)
            os.wait()
        elif word == "worker":  # which works and stays
            if os.fork() == 0:
                work(int(more[0]))
                print("worker", flush=True)
                sys.stdin.close()
                threading.Event().wait()
            continue
        elif word == "flush":
            assert instrument.flush(20).settled
        elif word == "scrape":
            with open("scraped.txt", "w") as file:
                file.write(instrument.prometheus(openmetrics=True))
        print(word, flush=True)
    server.shutdown()
"""


@contextmanager
def started() -> Iterator[subprocess.Popen[str]]:
    """The service in a group of its own, which is ended with all of its workers."""
    Path("engine.py").write_text(ENGINE)
    service = begin(f"import os\nos.setpgrp()\n{SERVICE}")
    assert service.stdout is not None
    try:
        assert service.stdout.readline() == "serves\n", service.communicate()
        yield service
    finally:
        os.killpg(service.pid, signal.SIGKILL)
        service.communicate()


def do(service: subprocess.Popen[str], line: str) -> None:
    assert service.stdin is not None
    assert service.stdout is not None
    service.stdin.write(f"{line}\n")
    service.stdin.flush()
    assert service.stdout.readline() == f"{line.split()[0]}\n", service.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def values(text: str, name: str) -> dict[str, float]:
    """The samples of that name, by their labels as they are written."""
    lines = re.findall(rf"^{name}(?:{{(.*?)}})? (\S+)", text, re.MULTILINE)
    return {labels: float(value) for labels, value in lines}


def scraped(service: subprocess.Popen[str]) -> str:
    do(service, "scrape")
    return Path("scraped.txt").read_text()


def scraped_once(service: subprocess.Popen[str], wanted: int) -> str:
    """Return the text of a scrape once it counts that number of calls: a process reports its counts after a while."""
    found = ""

    def has_all() -> bool:
        nonlocal found
        found = scraped(service)
        return calls(found) == wanted

    until(has_all, 60)
    return found


def calls(text: str) -> float:
    return sum(values(text, f"{CALLS}_count").values())


@pytest.mark.slow
def test_any_process_of_a_run_reports_the_metrics_of_all_and_so_does_the_agent_over_http() -> None:
    port = free_port()
    with collecting(take) as collector:
        Path("profile.yaml").write_text(
            "service: shop\nrequests: auto\nfunctions: [{match: 'engine:work', metrics: true}]\ndevice: {host: 100ms}\n"
            f"export: {{prometheus: {{listen: '127.0.0.1:{port}'}}, "
            f"otlp: {{endpoint: 'http://127.0.0.1:{collector.server_port}'}}}}\n"
        )
        with started() as service:
            for line in ("ask 5", "child 10", "child 20", "worker 100", "flush"):
                do(service, line)
            text = scraped_once(service, 131)
            assert sum(values(text, f"{REQUESTS}_count").values()) == 5
            (family,) = [one for one in text_string_to_metric_families(text) if one.name == REQUESTS]
            exemplars = {sample.exemplar.labels["trace_id"] for sample in family.samples if sample.exemplar}
            assert exemplars
            assert exemplars <= {span.trace_id.hex() for spans in collector.spans.values() for span in spans}
            assert values(text, "instrument_processes") == {"": 2}
            until(lambda: len(values(scraped(service), "process_memory_usage_bytes")) == 2, 60)
            memory = values(scraped(service), "process_memory_usage_bytes")
            assert all(re.fullmatch(r'process_pid="\d+"', one) for one in memory)

            (agent,), (home,) = agents(), run_folder.list_runs()
            until((home / "metrics.ended").exists, 60)
            (exporter,) = children_of(agent, EXPORTER)
            os.kill(exporter, signal.SIGKILL)
            do(service, "child 1000")
            assert sum(values(scraped_once(service, 1131), f"{REQUESTS}_count").values()) == 5  # no counter falls
            assert children_of(agent, EXPORTER) != [exporter]
            url = f"http://127.0.0.1:{port}/metrics"
            with urlopen(url) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain")
                plain = answer.read().decode()
            assert calls(plain) == 1131
            assert "trace_id" not in plain
            asks = Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
            with urlopen(asks) as answer:
                assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
                assert answer.read().endswith(b"# EOF\n")


@pytest.mark.slow
def test_a_run_that_exports_nothing_is_scraped_from_the_first_call_on() -> None:
    Path("profile.yaml").write_text("requests: auto\nfunctions: [{match: 'engine:work', metrics: true}]")
    with started() as service:
        for line in ("ask 3", "child 10", "worker 100"):
            do(service, line)
        text = scraped_once(service, 101)
        assert sum(values(text, f"{REQUESTS}_count").values()) == 3
        assert "trace_id" not in text
        do(service, "child 20")
        scraped_once(service, 121)
        (agent,), (home,) = agents(), run_folder.list_runs()
        os.kill(agent, signal.SIGKILL)
        alone = scraped(service)
        assert calls(alone) == 1
        assert "this one alone, for its agent does not answer" in alone
    run_folder.remove(home)


def test_an_address_that_is_taken_is_named_and_costs_the_service_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        Path("profile.yaml").write_text(
            f"functions: [{{match: 'engine:step', metrics: true}}]\nexport: {{prometheus: {{listen: '{address}'}}}}"
        )
        done = run("import engine, instrument\nengine.step(1)\nprint(instrument.prometheus())\n")
    assert done.returncode == 0
    assert calls(done.stdout) == 1
    assert f"export.prometheus: cannot listen at {address}: Address already in use" in done.stderr


def origin(pid: int, service: str = "shop") -> Origin:
    return Origin(pid, service, 0, 0)


def of_one(count: float, *durations_ns: int) -> Snapshot:
    times = Distribution()
    for duration_ns in durations_ns:
        times.add(duration_ns)
    exemplars = {(("a", "x"),): (Exemplar(durations_ns[-1], 1, 1, 7, 8),)}
    return Snapshot(
        0,
        1,
        (
            Metric("lost", "{loss}", COUNTER, "", {(("reason", "full"),): count}),
            Metric("open", "{request}", UPDOWN, "", {(): 1}),
            Metric("taken", "s", HISTOGRAM, "", {(("a", "x"),): times}, exemplars),
        ),
    )


def test_the_metrics_of_a_run_are_the_sums_of_its_processes_and_gauges_bear_whose_they_are() -> None:
    one = Metered(
        origin(1), of_one(2, 10**9, 4 * 10**9),
        [Sample("process_memory", HOST, 1, 5.0), Sample("system_cpu", HOST, 1, 10.0)],
    )  # fmt: skip
    other = Metered(
        origin(2), of_one(3, 2 * 10**9), [Sample("process_memory", HOST, 2, 6.0), Sample("system_cpu", HOST, 2, 30.0)]
    )
    ended = EndedMetrics(None)
    ended.add("0-0", [("run", "r")], Metered(origin(3), of_one(100, 8 * 10**9)))
    text = text_of(families_of_run([one, other], ended.totals_of(("run", "r"), ["1-0", "2-0"])), openmetrics=True)
    assert values(text, "lost_total") == {'reason="full"': 105}
    assert values(text, "open") == {"": 2}  # nothing is open in what has ended
    assert values(text, "taken_seconds_count") == {'a="x"': 4}
    assert values(text, "taken_seconds_sum") == {'a="x"': 15}
    assert text.count("trace_id") == 3
    assert values(text, "process_memory_usage_bytes") == {'process_pid="1"': 5, 'process_pid="2"': 6}
    assert values(text, "system_cpu_utilization_ratio") == {"": 0.3}
    two = text_of(families_of_run([one, Metered(origin(2, "queue"), of_one(3, 1))], {}))
    assert values(two, "lost_total") == {
        'reason="full",service_name="shop"': 2,
        'reason="full",service_name="queue"': 3,
    }
    assert values(two, "instrument_processes") == {'service_name="shop"': 1, 'service_name="queue"': 1}


def test_counts_of_ended_processes_are_in_a_bounded_file(tmp_path: Path) -> None:
    home = tmp_path / "run"
    scopes = [("run", "r"), ("listen", "here")]
    for at in range(APART + 5):
        EndedMetrics(home).add(f"{at}-0", scopes, Metered(origin(at), of_one(1, 10**9)))
    ended = EndedMetrics(home)
    for scope in (("run", "r"), ("listen", "here")):
        (lost, taken) = ended.totals_of(scope, [f"{APART + 4}-0"])["shop"]  # one is read anew, and so not of those
        assert list(lost.series.values()) == [APART + 4]
        assert [one.count for one in taken.series.values() if isinstance(one, Distribution)] == [APART + 4]
    assert ended.totals_of(("run", "another"), []) == {}
    (path,) = home.iterdir()
    path.write_text("[1, 2]")
    assert EndedMetrics(home).totals_of(("run", "r"), []) == {}
