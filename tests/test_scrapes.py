"""Scrapes of a run: its agent adds up all processes, those that have ended, too, whichever of them is asked."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest
from otlp_receiver import free_port

pytest.importorskip("prometheus_client")

from otlp_collectors import collecting, take
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from test_agent import agents, begin, children_of, folder, kill, processes, run, until

from instrument.agent.exporter_process import EXPORTER_NAME
from instrument.agent.scrapes import MOST_SEPARATE, EndedMetrics, Scrapes
from instrument.otlp.exposition import CONTENT_TYPE, format_metrics, metrics_of_run, prefers_protobuf
from instrument.otlp.metrics_queue import Metered
from instrument.recording import distributions
from instrument.recording.distributions import (
    OVERFLOW,
    Distribution,
    Exemplar,
    Histograms,
    Metric,
    Snapshot,
    sum_metrics,
)
from instrument.recording.metric_definitions import COUNTER, HISTOGRAM, UPDOWN
from instrument.recording.spans import HOST, Origin, Sample
from instrument.runtime import agent_socket

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

handled = threading.Semaphore(0)

class Quiet(WSGIRequestHandler):
    def log_message(self, *_):
        pass

    def handle(self):
        super().handle()
        handled.release()

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
                handled.acquire()  # a request ends after its answer has come
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
            assert instrument.flush(100).settled
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

    until(has_all)
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
            until(lambda: values(scraped(service), "instrument_processes") == {"": 2})  # its children have ended
            until(lambda: len(values(scraped(service), "process_memory_usage_bytes")) == 2)
            memory = values(scraped(service), "process_memory_usage_bytes")
            assert all(re.fullmatch(r'process_pid="\d+"', one) for one in memory)

            (agent,), (home,) = agents(), agent_socket.list_runs()
            until((home / "metrics.ended").exists)
            (exporter,) = children_of(agent, EXPORTER_NAME)
            os.kill(exporter, signal.SIGKILL)
            do(service, "child 1000")
            assert sum(values(scraped_once(service, 1131), f"{REQUESTS}_count").values()) == 5  # no counter falls
            assert children_of(agent, EXPORTER_NAME) != [exporter]
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
        until(lambda: not agents())  # while there is a collector, else the agent waits for it


@pytest.mark.slow
def test_a_run_that_exports_nothing_is_scraped_from_the_first_call_on() -> None:
    Path("profile.yaml").write_text("requests: auto\nfunctions: [{match: 'engine:work', metrics: true}]")
    with started() as service:
        for line in ("ask 3", "child 10"):
            do(service, line)
        until(lambda: any(process["ended_ns"] for process in processes()))  # else the first scrape has its counts
        do(service, "worker 100")
        text = scraped_once(service, 101)
        assert sum(values(text, f"{REQUESTS}_count").values()) == 3
        assert "trace_id" not in text
        do(service, "child 20")
        scraped_once(service, 121)
        (agent,), (home,) = agents(), agent_socket.list_runs()
        with (home / agent_socket.BEGINNINGS).open("a") as beginnings:  # no other agent may begin
            beginnings.writelines([f"{time.monotonic()}\n"] * agent_socket.MOST_AGENTS)
        kill(agent)
        alone = scraped(service)
        assert calls(alone) == 1
        assert "this one alone, for its agent does not answer" in alone
    agent_socket.remove_run_folder(home)


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
    ended.add_metrics("0-0", [("run", "r")], Metered(origin(3), of_one(100, 8 * 10**9)))
    text = format_metrics(
        metrics_of_run([one, other], ended.sum_by_service(("run", "r"), ["1-0", "2-0"])), openmetrics=True
    )
    assert values(text, "lost_total") == {'reason="full"': 105}
    assert values(text, "open") == {"": 2}  # nothing is open in what has ended
    assert values(text, "taken_seconds_count") == {'a="x"': 4}
    assert values(text, "taken_seconds_sum") == {'a="x"': 15}
    assert text.count("trace_id") == 3
    assert values(text, "process_memory_usage_bytes") == {'process_pid="1"': 5, 'process_pid="2"': 6}
    assert values(text, "system_cpu_utilization_ratio") == {"": 0.3}
    two = format_metrics(metrics_of_run([one, Metered(origin(2, "queue"), of_one(3, 1))], {}))
    assert values(two, "lost_total") == {
        'reason="full",service_name="shop"': 2,
        'reason="full",service_name="queue"': 3,
    }
    assert values(two, "instrument_processes") == {'service_name="shop"': 1, 'service_name="queue"': 1}


def test_exemplars_of_a_run_without_living_processes_have_todays_time() -> None:
    counted = Distribution()
    counted.add(10**9)
    exemplar = Exemplar(10**9, time.monotonic_ns(), 1, 7, 8)
    ended = {"shop": [Metric("taken", "s", HISTOGRAM, "", {(): counted}, {(): (exemplar,)})]}
    text = format_metrics(metrics_of_run([], ended), openmetrics=True)
    (found,) = [s.exemplar for f in text_string_to_metric_families(text) for s in f.samples if s.exemplar]
    assert float(found.timestamp) == pytest.approx(time.time(), abs=86_400)


def test_exemplars_of_series_beyond_the_limit_are_those_of_the_series_for_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributions, "SERIES_LIMIT", 1)
    monkeypatch.setattr(Histograms, "series_limit", 1)
    histograms, exemplar = Histograms(), Exemplar(5, 1, 1, 7, 8)
    parts = []
    for text in ("first", "second"):
        histograms.add("taken", (("a", text),), 5)
        assert histograms.add_exemplar("taken", (("a", text),), exemplar)
        part = Histograms()
        part.add("taken", (("a", text),), 5)
        part.add_exemplar("taken", (("a", text),), exemplar)
        parts.append(Metric("taken", "s", HISTOGRAM, "", *part.copy_series("taken")))
    (summed,) = sum_metrics(parts)
    assert not histograms.add_exemplar("given", (("a", "first"),), exemplar)
    expected = {(("a", "first"),): (exemplar,), OVERFLOW: (exemplar,)}
    assert summed.exemplars == histograms.copy_series("taken")[1] == expected


def test_counts_of_ended_processes_are_in_a_bounded_file(tmp_path: Path) -> None:
    home = tmp_path / "run"
    scopes = [("run", "r"), ("listen", "here")]
    for at in range(MOST_SEPARATE + 5):
        EndedMetrics(home).add_metrics(f"{at}-0", scopes, Metered(origin(at), of_one(1, 10**9)))
    ended = EndedMetrics(home)
    for scope in (("run", "r"), ("listen", "here")):
        (lost, taken) = ended.sum_by_service(scope, [f"{MOST_SEPARATE + 4}-0"])["shop"]  # one is read anew
        assert list(lost.series.values()) == [MOST_SEPARATE + 4]
        assert [one.count for one in taken.series.values() if isinstance(one, Distribution)] == [MOST_SEPARATE + 4]
    assert ended.sum_by_service(("run", "another"), []) == {}
    (path,) = home.iterdir()
    path.write_text("[1, 2]")
    assert EndedMetrics(home).sum_by_service(("run", "r"), []) == {}


# -------------------------------------------------------------------- native histograms

PROTOBUF = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


@pytest.mark.parametrize(
    ("accept", "is_asked"),
    [
        (f"{PROTOBUF},{OPENMETRICS};q=0.8,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", True),  # Prometheus 2.42
        (f"{PROTOBUF};q=0.6,{OPENMETRICS};escaping=allow-utf-8;q=0.5,*/*;q=0.2", True),  # Prometheus 3
        (PROTOBUF.replace(";", "; ").replace("MetricFamily", "metricfamily"), True),
        (f"{OPENMETRICS};q=0.6,{PROTOBUF};q=0.5", False),
        (f"{PROTOBUF};q=0", False),
        (f"{PROTOBUF};q=best,text/plain;q=0.5", False),
        (PROTOBUF.replace("delimited", "text"), False),
        (PROTOBUF.replace("MetricFamily", "Metric"), False),
        (f"{OPENMETRICS},text/plain;version=0.0.4;q=0.5,*/*;q=0.1", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_protobuf_is_for_scrapers_that_prefer_it(accept: str, is_asked: bool) -> None:
    assert prefers_protobuf(accept) is is_asked


@contextmanager
def scraped_at(*processes: Metered) -> Iterator[str]:
    """Yield the address at which the metrics of some processes are scraped."""
    scrapes = Scrapes(lambda: scrapes.answer_waiting(lambda _: (list(processes), {})))
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with suppress(OSError):  # once nothing listens any more
            while True:
                scrapes.answer_scrape(listener.accept()[0].detach(), "r")

    thread = Thread(target=answer)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def durations() -> list[int]:
    """Return durations over four orders of magnitude, in ns."""
    source = random.Random(5)
    return [round(source.lognormvariate(17, 2)) for _ in range(2_000)]


def families_of(stream: bytes) -> dict[str, Any]:
    """Return the families of an answer in protobuf by their names, decoded by Google's library."""
    pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.internal.decoder import _DecodeVarint32  # type: ignore[attr-defined]

    file = descriptor_pb2.FileDescriptorProto(name="metrics.proto", package="io.prometheus.client", syntax="proto2")
    for text in MESSAGES.split("\n\n"):
        head, *lines = text.strip().splitlines()
        message = file.message_type.add(name=head)
        for line in lines:
            label, type_name, name, number = line.split()
            field = message.field.add(name=name, number=int(number))
            field.label = getattr(field, f"LABEL_{label.upper()}")
            if type_name[0].isupper():
                field.type, field.type_name = field.TYPE_MESSAGE, f".io.prometheus.client.{type_name}"
            else:
                field.type = getattr(field, f"TYPE_{type_name.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call]
    family_class = message_factory.GetMessageClass(pool.FindMessageTypeByName("io.prometheus.client.MetricFamily"))
    families, at = {}, 0
    while at < len(stream):
        length, at = _DecodeVarint32(stream, at)
        family: Any = family_class.FromString(stream[at : at + length])
        families[family.name] = family
        at += length
    return families


MESSAGES = """
MetricFamily
optional string name 1
optional string help 2
optional int32 type 3
repeated Metric metric 4

Metric
repeated LabelPair label 1
optional Value gauge 2
optional Value counter 3
optional Histogram histogram 7

LabelPair
optional string name 1
optional string value 2

Value
optional double value 1

Histogram
optional uint64 sample_count 1
optional double sample_sum 2
repeated Bucket bucket 3
optional sint32 schema 5
optional double zero_threshold 6
optional uint64 zero_count 7
repeated BucketSpan positive_span 12
repeated sint64 positive_delta 13

BucketSpan
optional sint32 offset 1
optional uint32 length 2

Bucket
optional uint64 cumulative_count 1
optional double upper_bound 2
optional Exemplar exemplar 3

Exemplar
repeated LabelPair label 1
optional double value 2
optional Timestamp timestamp 3

Timestamp
optional int64 seconds 1
optional int32 nanos 2
"""
"""The messages of Prometheus's client_model that we write."""


def test_a_native_histogram_has_each_duration_in_the_bucket_of_its_schema() -> None:
    times = [0, *durations()]
    with scraped_at(Metered(Origin(1, "shop", 0, 5 * 10**9), of_one(2, *times))) as address:
        asks = Request(f"http://{address}/metrics", headers={"Accept": PROTOBUF, "Accept-Encoding": "gzip"})
        with urlopen(asks) as answer:
            assert answer.headers["Content-Type"] == CONTENT_TYPE
            stream = gzip.decompress(answer.read())
        with urlopen(Request(f"http://{address}/metrics", headers={"Accept": PROTOBUF})) as answer:
            assert answer.read() == stream
    families = families_of(stream)
    lost, opened, taken = families["lost_total"], families["open"], families["taken_seconds"]
    assert (lost.type, opened.type, taken.type) == (0, 1, 4)
    assert lost.metric[0].counter.value == 2
    assert [(pair.name, pair.value) for pair in lost.metric[0].label] == [("reason", "full")]
    assert opened.metric[0].gauge.value == 1
    (point,) = taken.metric
    histogram = point.histogram
    assert (histogram.sample_count, histogram.zero_count) == (len(times), 1)
    assert histogram.sample_sum == pytest.approx(sum(times) / 1e9)
    assert 0 < histogram.zero_threshold < 1e-9
    numbers, counts, end = [], [], 0
    for span in histogram.positive_span:
        numbers += range(end + span.offset, end + span.offset + span.length)
        end += span.offset + span.length
    for delta in histogram.positive_delta:
        counts.append(delta + (counts[-1] if counts else 0))
    assert len(numbers) == len(counts) <= 160
    assert sum(counts) == len(times) - 1
    base, below, ordered = 2 ** (2**-histogram.schema), 0, sorted(times[1:])
    for number, count in zip(numbers, counts, strict=True):
        lower, upper = base ** (number - 1), base**number
        assert all(lower * 0.99 <= value / 1e9 <= upper * 1.01 for value in ordered[below : below + count])
        below += count
    assert histogram.bucket[-1].cumulative_count == len(times)
    assert histogram.bucket[-1].upper_bound == float("inf")
    (exemplar,) = [bucket.exemplar for bucket in histogram.bucket if bucket.HasField("exemplar")]
    assert {pair.name: pair.value for pair in exemplar.label} == {"trace_id": f"{7:032x}", "span_id": f"{8:016x}"}
    assert exemplar.value == times[-1] / 1e9
    assert (exemplar.timestamp.seconds, exemplar.timestamp.nanos) == divmod(5 * 10**9 + 1, 10**9)


def test_a_scraper_that_asks_for_text_gets_no_native_histogram() -> None:
    processes = [Metered(origin(1), of_one(2, *durations()))]
    with scraped_at(*processes) as address:
        for accept, is_openmetrics in (("*/*", False), (f"{OPENMETRICS},{PROTOBUF};q=0.5", True)):
            with urlopen(Request(f"http://{address}/metrics", headers={"Accept": accept})) as answer:
                assert answer.read().decode() == format_metrics(
                    metrics_of_run(processes, {}), openmetrics=is_openmetrics
                )


def test_a_scraper_that_asks_for_openmetrics_2_gets_the_version_of_which_our_histograms_are() -> None:
    processes = [Metered(origin(1), of_one(2, *durations()))]
    with scraped_at(*processes) as address:
        asks = Request(f"http://{address}/metrics", headers={"Accept": OPENMETRICS.replace("1.0.0", "2.0.0")})
        with urlopen(asks) as answer:
            assert "version=1.0.0" in answer.headers["Content-Type"]
            assert answer.read().decode() == format_metrics(metrics_of_run(processes, {}), openmetrics=True)


PROMETHEUS = shutil.which("prometheus")


@pytest.mark.slow
@pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed")
def test_prometheus_computes_percentiles_from_native_histograms_without_our_bounds(tmp_path: Path) -> None:
    times = durations()
    port = free_port()

    def get(path: str, **parameters: str) -> list[Any]:
        try:
            with urlopen(f"http://127.0.0.1:{port}/api/v1/{path}?{urlencode(parameters)}") as answer:
                found = json.load(answer)["data"]
        except URLError:
            return []
        return list(found["result"])

    def value_of(query: str) -> float:
        (found,) = until(lambda: get("query", query=query), 60)
        return float(found["value"][1])

    with scraped_at(Metered(origin(1), of_one(2, *times))) as address:
        target = f"{{job_name: shop, static_configs: [{{targets: ['{address}']}}]}}"
        (tmp_path / "prometheus.yml").write_text(f"global: {{scrape_interval: 1s}}\nscrape_configs: [{target}]\n")
        command = [str(PROMETHEUS), "--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}"]
        command.append("--enable-feature=native-histograms")
        with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, cwd=tmp_path, stderr=log) as prometheus:
            try:
                assert value_of("histogram_count(taken_seconds)") == len(times)
                assert value_of("histogram_sum(taken_seconds)") == pytest.approx(sum(times) / 1e9)
                for share in (0.5, 0.99):
                    exact = sorted(times)[round(share * len(times))] / 1e9
                    assert value_of(f"histogram_quantile({share}, taken_seconds)") == pytest.approx(
                        exact, rel=0.045
                    )  # 2 ** (2 ** -4)
                assert value_of("lost_total") == 2
                assert not get("query", query="taken_seconds_bucket")  # its format, so its native histogram was taken
            finally:
                prometheus.terminate()
