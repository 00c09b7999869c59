"""Samples of gauges as metrics at an OpenTelemetry collector, and what happens where there is no place for them."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from otlp_collectors import Behave, Handler, collecting, drip, refuse_with, swallow, take
from otlp_receiver import Receiver, free_port, receiver
from otlp_spans import ORIGIN, SECOND, offer, span

import instrument
from instrument.otlp import delivery as exporter_module
from instrument.otlp import metrics_queue
from instrument.otlp.delivery import Exporter
from instrument.otlp.export_facts import Ids
from instrument.otlp.metrics_queue import Metrics
from instrument.otlp.senders import Response, make_metrics_url
from instrument.otlp.span_queue import Source
from instrument.profile.keys import loads
from instrument.profile.model import Otlp
from instrument.recording.distributions import Metric, Snapshot
from instrument.recording.metric_definitions import COUNTER, GAUGES
from instrument.recording.spans import HOST, Gpu, Sample
from instrument.runtime.environment import TEMPORALITY
from instrument.runtime.faults import FAULTS

GPU = Gpu(1, "NVIDIA H200", "GPU-aaaa")


def metrics_of(exporter: Exporter) -> Metrics:
    """The metrics of the exporter's own process, which it sends."""
    if exporter.own.metrics is None:
        exporter.own.metrics = exporter.make_metrics_queue(os.environ)
        exporter.add_metrics(exporter.own)
    return exporter.own.metrics


@contextmanager
def exporting(settings: Otlp) -> Iterator[Exporter]:
    exporter = Exporter(settings, ORIGIN, dict)
    metrics_of(exporter)
    exporter.start()
    try:
        yield exporter
    finally:
        exporter.stop(0)


@pytest.fixture(scope="module")
def running_receiver() -> Iterator[Receiver]:
    with receiver() as found:
        yield found


@pytest.fixture
def collector(running_receiver: Receiver) -> Receiver:
    """The real one, empty."""
    running_receiver.clear()
    return running_receiver


def sample(name: str, value: float | None, device: int = 1, at: int = 7_000) -> Sample:
    return Sample(name, device, at, value)


def until(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("compression", ["gzip", "none"])
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_every_gauge_arrives_by_its_conventional_name_unit_and_kind(
    collector: Receiver, protocol: str, compression: str
) -> None:
    endpoint = collector.grpc_endpoint if protocol == "grpc" else collector.endpoint
    values = {name: 40 + place for place, name in enumerate(GAUGES)}
    hosts = list(GAUGES)[:7]
    samples = [sample(name, value, HOST if name in hosts else 1) for name, value in values.items()]
    samples.sort(key=lambda s: (s.device, s.name))
    with exporting(Otlp(endpoint, protocol, timeout_ns=5 * SECOND, compression=compression)) as exporter:
        offer(exporter, [span()])
        metrics_of(exporter).offer_samples(samples, [GPU])
        assert exporter.flush(60 * SECOND).complete
        assert (metrics_of(exporter).losses(), metrics_of(exporter).notes()) == ({}, [])
    assert [found.name for found in collector.spans()] == ["op"]
    points = collector.points()
    assert {(point.name, point.unit, point.kind) for point in points} == {
        ("instrument.process.cpu.limit", "{cpu}", "gauge"),
        ("process.cpu.utilization", "1", "gauge"),
        ("process.memory.usage", "By", "updown"),
        ("instrument.process.memory.peak", "By", "gauge"),
        ("instrument.process.cpu.wait", "1", "gauge"),
        ("instrument.process.memory.pressure", "1", "gauge"),
        ("instrument.torch.memory.allocated", "By", "updown"),
        ("instrument.torch.memory.allocated_peak", "By", "gauge"),
        ("instrument.torch.memory.reserved", "By", "updown"),
        ("instrument.torch.memory.reserved_peak", "By", "gauge"),
        ("system.cpu.utilization", "1", "gauge"),
        ("hw.gpu.utilization", "1", "gauge"),
        ("hw.gpu.memory.usage", "By", "updown"),
        ("hw.gpu.memory.utilization", "1", "gauge"),
        ("hw.gpu.memory.limit", "By", "updown"),
        ("hw.power", "W", "gauge"),
        ("hw.energy", "J", "counter"),
        ("hw.temperature", "Cel", "gauge"),
        ("instrument.gpu.memory.active", "1", "gauge"),
        ("instrument.gpu.process.memory.usage", "By", "updown"),
        ("instrument.gpu.sm.clock", "Hz", "gauge"),
        ("instrument.gpu.memory.clock", "Hz", "gauge"),
        ("instrument.gpu.sm.active", "1", "gauge"),
        ("instrument.gpu.sm.occupancy", "1", "gauge"),
        ("instrument.gpu.tensor.active", "1", "gauge"),
        ("instrument.gpu.dram.active", "1", "gauge"),
        ("instrument.gpu.pcie.io", "By/s", "gauge"),
        ("instrument.gpu.nvlink.io", "By/s", "gauge"),
    }
    assert len(points) == sum(len(gauge.metrics) for gauge in GAUGES.values())
    found = {(point.name, point.attributes.get("network.io.direction")): point for point in points}
    expected = {
        ("process.cpu.utilization", None): values["process_cpu"] / 100 / values["cores"],
        ("process.memory.usage", None): values["process_memory"],
        ("system.cpu.utilization", None): values["system_cpu"] / 100,
        ("hw.gpu.utilization", None): values["utilization"] / 100,
        ("hw.gpu.memory.utilization", None): values["memory_used"] / values["memory_total"],
        ("hw.energy", None): values["energy"],
        ("instrument.gpu.sm.clock", None): values["sm_clock"] * 1e6,
        ("instrument.gpu.pcie.io", "transmit"): values["pcie_sent"],
        ("instrument.gpu.nvlink.io", "receive"): values["nvlink_received"],
    }
    assert {key: found[key].value for key in expected} == {key: pytest.approx(value) for key, value in expected.items()}
    hardware = {
        "hw.id": "GPU-aaaa",
        "hw.type": "gpu",
        "hw.name": "GPU 1",
        "hw.model": "NVIDIA H200",
        "hw.vendor": "NVIDIA",
        "cuda.device.index": 1,
    }
    assert found["hw.power", None].attributes == hardware
    assert found["hw.gpu.utilization", None].attributes == {**hardware, "hw.gpu.task": "general"}
    assert found["process.memory.usage", None].attributes == {}
    for point in points:
        assert point.at_ns == ORIGIN.realtime_of(7_000)
        assert point.start_ns == (0 if point.kind == "gauge" else ORIGIN.realtime_of(7_000))
        assert point.temporality == ("" if point.kind == "gauge" else "CUMULATIVE")
        assert (point.scope, point.schema_url) == ("instrument", "https://opentelemetry.io/schemas/1.45.0")
        assert point.resource["service.name"] == "chat"


def test_samples_keep_the_time_at_which_they_were_read_and_sums_that_of_their_first(collector: Receiver) -> None:
    with exporting(Otlp(collector.endpoint)) as exporter:
        metrics_of(exporter).offer_samples([sample("energy", at * 1.5, at=at) for at in (10, 20)], [GPU])
        exporter.flush(60 * SECOND)
        metrics_of(exporter).offer_samples([sample("energy", 45.0, at=30)], [GPU])
        exporter.flush(60 * SECOND)
    points = sorted((p.start_ns, p.at_ns, p.value) for p in collector.points())
    wall = ORIGIN.realtime_of
    assert points == [(wall(10), wall(10), 15.0), (wall(10), wall(20), 30.0), (wall(10), wall(30), 45.0)]


def test_a_number_of_bytes_beyond_64_bits_arrives_with_the_other_metrics(collector: Receiver) -> None:
    with exporting(Otlp(collector.endpoint)) as exporter:
        metrics_of(exporter).offer_samples([sample("memory_total", 1e30), sample("memory_used", 5.0)], [GPU])
        exporter.flush(60 * SECOND)
    points = {point.name: point.value for point in collector.points()}
    assert (points["hw.gpu.memory.limit"], points["hw.gpu.memory.usage"]) == (1e30, 5)


@pytest.mark.parametrize("moved_ns", [5_000_000, -3600 * SECOND])
def test_sums_of_gauges_keep_their_start_when_the_wall_clock_is_set(moved_ns: int) -> None:
    begun_ns: dict[int, int] = {}
    found = []
    for at_ns, origin in ((7_000, ORIGIN), (9_000, replace(ORIGIN, realtime_ns=ORIGIN.realtime_ns + moved_ns))):
        (series,) = metrics_queue.convert_samples([sample("energy", 5.0, at=at_ns)], {}, origin, {}, begun_ns)
        found += series.points
    assert [point.start_ns for point in found] == [ORIGIN.realtime_of(7_000)] * 2
    assert all(point.start_ns <= point.at_ns for point in found)


@pytest.mark.parametrize("moved_ns", [5_000_000, -3600 * SECOND])
@pytest.mark.parametrize("preference", ["cumulative", "delta"])
def test_totals_keep_their_start_when_the_wall_clock_is_set(
    monkeypatch: pytest.MonkeyPatch, preference: str, moved_ns: int
) -> None:
    monkeypatch.setenv(TEMPORALITY, preference)
    counts, found = Metrics("http://collector"), []
    for at_ns, origin in ((7_000, ORIGIN), (9_000, replace(ORIGIN, realtime_ns=ORIGIN.realtime_ns + moved_ns))):
        counted = Metric("count", "s", COUNTER, "", {(): float(at_ns)})
        counts.put_snapshot(Snapshot(5_000, at_ns, (counted,)))
        for request in counts.make_requests(origin):
            found += request.series[0].points
            counts.settle_request(request, Response(True))
    first, second = found
    assert first.start_ns == ORIGIN.realtime_of(5_000)
    assert second.start_ns == (first.at_ns if preference == "delta" else first.start_ns)
    assert all(point.start_ns <= point.at_ns for point in found)


def test_gauges_that_a_device_does_not_report_are_not_sent(collector: Receiver) -> None:
    with exporting(Otlp(collector.endpoint)) as exporter:
        silent = [sample("utilization", None), sample("process_cpu", 3.0, HOST), sample("odd", 1.0)]
        metrics_of(exporter).offer_samples([*silent, sample("power", 0.0)], [])
        exporter.flush(60 * SECOND)
    assert [(p.name, p.value, p.attributes["hw.id"]) for p in collector.points()] == [("hw.power", 0.0, "GPU 1")]


def test_many_samples_go_in_several_requests_and_all_arrive(collector: Receiver) -> None:
    with exporting(Otlp(collector.endpoint)) as exporter:
        metrics_of(exporter).offer_samples([sample("power", float(at), at=at) for at in range(2_500)], [GPU])
        exporter.flush(60 * SECOND)
    assert sorted(p.value for p in collector.points()) == [float(at) for at in range(2_500)]


def test_samples_are_gathered_and_sent_in_time_without_any_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_queue, "DELAY_NS", 10**9)
    with collecting(take) as server, exporting(server.settings) as exporter:
        metrics_of(exporter).offer_samples([sample("power", 1.0)], [GPU])
        metrics_of(exporter).offer_samples([sample("power", 2.0)], [GPU])
        until(lambda: server.taken)
        assert server.taken == ["hw.power", "hw.power"]
        assert server.tries == 1


@pytest.mark.parametrize("status", [404, 405, 415, 501])
def test_a_collector_without_a_place_for_metrics_says_so_once_and_spans_go_on(status: int) -> None:
    with collecting(take, metrics=refuse_with(status)) as server, exporting(server.settings) as exporter:
        for number in range(3):
            metrics_of(exporter).offer_samples([sample("power", 1.0), sample("energy", 1.0)], [GPU])
            offer(exporter, [span(span_id=number + 1, root_id=number + 1)])
            assert exporter.flush(60 * SECOND).complete
        assert server.taken == ["op"] * 3
        assert server.tries == 4, "three times spans, once metrics"
        (note,) = metrics_of(exporter).notes()
        assert note.startswith(f"export.otlp: metrics are not sent: the collector takes none (HTTP {status}")
        assert metrics_of(exporter).losses() == {"samples of gauges failed by the OTLP export": 2}


def test_a_collector_that_serves_spans_alone_by_grpc_gets_no_more_metrics() -> None:
    grpc = pytest.importorskip("grpc")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

    class Spans(services.TraceServiceServicer):  # type: ignore[misc]
        taken = 0

        def Export(self, request: Any, context: Any) -> Any:
            Spans.taken += 1
            return messages.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    services.add_TraceServiceServicer_to_server(Spans(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with exporting(Otlp(f"http://127.0.0.1:{port}", "grpc", timeout_ns=5 * SECOND)) as exporter:
            for number in range(2):
                metrics_of(exporter).offer_samples([sample("power", 1.0)], [GPU])
                offer(exporter, [span(span_id=number + 1, root_id=number + 1)])
                assert exporter.flush(60 * SECOND).complete
            (note,) = metrics_of(exporter).notes()
            assert "the collector takes none" in note
            assert "UNIMPLEMENTED" in note
            assert metrics_of(exporter).losses() == {"samples of gauges failed by the OTLP export": 1}
        assert Spans.taken == 2
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize(
    ("behave", "fate"),
    [
        (refuse_with(400), "failed"),
        (refuse_with(503), "failed"),
        (swallow, "failed"),
        (drip, "failed"),
    ],
    ids=["400", "503", "swallow", "drip"],
)
def test_metrics_that_do_not_get_through_are_counted_and_do_not_hold_up_spans_for_long(
    monkeypatch: pytest.MonkeyPatch, behave: Behave, fate: str
) -> None:
    from instrument.otlp import delivery as room

    monkeypatch.setattr(room, "PATIENCE_NS", 3 * 10**8)
    with collecting(take, metrics=behave) as server, exporting(server.settings) as exporter:
        metrics_of(exporter).offer_samples([sample("power", 1.0)], [GPU])
        exporter.flush(60 * SECOND)
        assert metrics_of(exporter).losses() == {f"samples of gauges {fate} by the OTLP export": 1}
        assert metrics_of(exporter).notes()[0].startswith("export.otlp: metrics did not get through: ")
        offer(exporter, [span()])
        assert exporter.flush(60 * SECOND).complete
        assert server.taken == ["op"]


def test_spans_rejected_in_a_successful_answer_are_counted() -> None:
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as messages

    def reject_one(handler: Any, _: int) -> None:
        partial = messages.ExportMetricsPartialSuccess(rejected_data_points=1, error_message="quota")
        handler.answer(200, messages.ExportMetricsServiceResponse(partial_success=partial).SerializeToString())

    with collecting(take, metrics=reject_one) as server, exporting(server.settings) as exporter:
        metrics_of(exporter).offer_samples([sample("power", 1.0), sample("energy", 1.0)], [GPU])
        exporter.flush(60 * SECOND)
        assert metrics_of(exporter).losses() == {"samples of gauges rejected by the OTLP export": 1}
        assert metrics_of(exporter).notes() == ["export.otlp: metrics did not get through: quota"]


def test_a_collector_that_finds_a_request_too_large_gets_smaller_ones() -> None:
    def at_most(limit: int) -> Behave:
        return lambda handler, points: handler.answer(413 if points > limit else 200)

    with collecting(take, metrics=at_most(600)) as server, exporting(server.settings) as exporter:
        for _ in range(2):
            metrics_of(exporter).offer_samples([sample("power", 1.0)] * 1_000, [GPU])
            exporter.flush(60 * SECOND)
        assert metrics_of(exporter).losses() == {"samples of gauges failed by the OTLP export": 1_000}
        assert server.taken == ["hw.power"] * 1_000


def test_samples_that_nobody_fetches_stay_bounded_and_the_newest_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_queue, "QUEUE_SAMPLES", 10)
    with collecting(take) as server:
        exporter = Exporter(server.settings, ORIGIN, dict)
        for at in range(25):
            metrics_of(exporter).offer_samples([sample("power", float(at), at=at)], [GPU])
        assert metrics_of(exporter).losses() == {"samples of gauges dropped by the OTLP export": 15}
        (request,) = metrics_of(exporter).make_requests(ORIGIN)
        assert [point.value for point in request.series[0].points] == [float(at) for at in range(15, 25)]


def test_spans_that_wait_when_the_exporter_stops_are_counted() -> None:
    exporter = Exporter(Otlp(f"http://127.0.0.1:{free_port()}/v1/traces", timeout_ns=SECOND), ORIGIN, dict)
    metrics_of(exporter).offer_samples([sample("power", 1.0)], [GPU])
    exporter.stop(0)
    assert metrics_of(exporter).losses() == {"samples of gauges dropped by the OTLP export": 1}


@pytest.mark.parametrize(
    ("spans_url", "expected"),
    [
        ("http://c:4318/v1/traces", "http://c:4318/v1/metrics"),
        ("https://c/prefix/v1/traces/", "https://c/prefix/v1/metrics"),
        ("http://c/v1/traces?key=v1/traces", "http://c/v1/metrics?key=v1/traces"),
        ("http://c:4318/ingest/spans", None),
        ("http://c:4318", None),
    ],
)
def test_metrics_go_next_to_the_spans(spans_url: str, expected: str | None) -> None:
    assert make_metrics_url(spans_url) == expected


def test_a_note_names_metrics_without_a_destination() -> None:
    with collecting(take) as server:
        settings = Otlp(server.settings.endpoint.replace("/v1/traces", "/spans"))
        with exporting(settings) as exporter:
            assert metrics_of(exporter).notes() == []
            metrics_of(exporter).offer_samples([sample("power", 1.0)], [GPU])
            (note,) = metrics_of(exporter).notes()
            assert "does not end in /v1/traces" in note
            assert exporter.flush(SECOND).settled
        assert server.tries == 0


def test_the_variable_that_switches_metrics_off_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    with collecting(take) as server, exporting(server.settings) as exporter:
        metrics_of(exporter).offer_samples([sample("power", 1.0)], [GPU])
        assert exporter.flush(SECOND).settled
        assert metrics_of(exporter).notes() == ["export.otlp: metrics are not sent: OTEL_METRICS_EXPORTER is none"]
        assert server.tries == 0


def service(server: Any, device: str) -> str:
    return f"device: {device}\nexport: {{otlp: {{endpoint: 'http://127.0.0.1:{server.server_port}', timeout: 2s}}}}"


def test_a_session_sends_the_gauges_of_its_host_next_to_its_spans() -> None:
    with collecting(take) as server:
        session = instrument.start(loads(service(server, "{cuda: off, nvml: off, host: 50ms}"), environ={}))
        assert session is not None
        with instrument.scope("work"):
            until(lambda: len(session.trace().samples) > 8)
        instrument.stop()
        counts: Mapping[str, int] = Counter(server.taken)
        assert counts["work"] == 1
        # The end may fall between two gauges of one reading.
        assert abs(counts["process.cpu.utilization"] - counts["system.cpu.utilization"]) <= 1
        assert counts["process.cpu.utilization"] >= 2
        assert session.losses() == {}
        assert session.notes() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_sends_its_own_gauges_and_none_of_its_parent() -> None:
    with collecting(take) as server:
        session = instrument.start(loads(service(server, "{cuda: off, nvml: off, host: 20ms}"), environ={}))
        assert session is not None
        until(lambda: session.trace().samples)
        child = os.fork()
        if not child:
            code = 1
            try:
                until(lambda: session.trace().samples)
                inherited = [one for one in session.trace().samples if one.at_ns < session.recorded.start_ns]
                names = [thread.name for thread in threading.enumerate()]
                instrument.stop()
                code = 0 if not inherited and "instrument-nvml" in names else 1
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        instrument.stop()
        assert session.losses() == {}


def test_metrics_of_a_process_that_a_collector_does_not_take_do_not_stop_those_of_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take_but_refused(handler: Handler, _: int) -> None:
        names = [metric.name for metric in handler.metrics]
        handler.answer(400 if "refused" in names else 200)

    def tell() -> None:
        for source in (refused, sound):
            assert source.metrics is not None
            name = source.resource()["service.name"]
            source.metrics.put_snapshot(Snapshot(5_000, 7_000, (Metric(str(name), "s", COUNTER, "", {(): 1.0}),)))

    monkeypatch.setattr(exporter_module, "DELAY_NS", 10**7)
    with collecting(take_but_refused) as server, exporting(server.settings) as exporter:
        refused, sound = (
            Source(Ids(), ORIGIN, dict, partial(dict, {"service.name": name}), metrics=exporter.make_metrics_queue({}))
            for name in ("refused", "sound")
        )
        for source in (refused, sound):
            exporter.add_metrics(source)
        for _ in range(1_200):
            tell()
            exporter.send_soon()
            time.sleep(0.05)
            if server.taken:
                break
        assert set(server.taken) == {"sound"}


def test_metrics_of_a_process_that_cannot_be_said_do_not_stop_those_of_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_process(name: str, value: Any) -> Source:
        found = Source(Ids(), ORIGIN, dict, lambda: {"service.name": name}, metrics=exporter.make_metrics_queue({}))
        assert found.metrics is not None
        found.metrics.put_snapshot(Snapshot(5_000, 7_000, (Metric(name, "s", COUNTER, "", {(): value}),)))
        return found

    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    with collecting(take) as server, exporting(server.settings) as exporter:
        damaged, sound = of_process("damaged", "x"), of_process("sound", 1.0)
        exporter.add_metrics(damaged)
        exporter.add_metrics(sound)
        assert exporter.flush(20 * SECOND).settled
        assert server.taken == ["sound"]
        assert damaged.metrics is not None
        assert damaged.metrics.losses() == {"series of metrics dropped by the OTLP export": 1}
    assert FAULTS.count_by_place() == {"OTLP export of metrics": 1}
    FAULTS.clear()
