"""`instrument.prometheus()`: the same numbers in Prometheus's text format, as its own parser reads them."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from otlp_spans import ORIGIN
from readback import spans_in

import instrument
from instrument.instrumentors.requests import asgi_wsgi_apps
from instrument.instrumentors.requests.exchange import CURRENT, Exchanges
from instrument.otlp.exposition import BOUNDS_S, format_metrics, make_metric_name, metrics_of_process
from instrument.otlp.metrics_queue import Metered
from instrument.profile.keys import loads
from instrument.profile.model import RequestsRule
from instrument.recorder.recorder import RECORDER
from instrument.recorder.request_meter import Meter
from instrument.recording.distributions import Distribution, Metric, Snapshot
from instrument.recording.metric_definitions import HISTOGRAM, HTTP_DURATION
from instrument.recording.spans import HOST, Sample

pytest.importorskip("prometheus_client")

from otlp_collectors import collecting, take
from prometheus_client.parser import text_string_to_metric_families

REQUESTS = "http_server_request_duration_seconds"


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    instrument.stop()


def start(text: str) -> None:
    instrument.start(loads(text, environ={}))


def scraped() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(instrument.prometheus())
        for sample in family.samples
    }


def of(name: str, **labels: str) -> dict[Mapping[str, str], float]:
    found = {}
    for (known, told), value in scraped().items():
        if known == name and labels.items() <= dict(told).items():
            found[told] = value
    return found  # type: ignore[return-value]


def serve(route: str, status: int, times: int) -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        exchange = CURRENT.get()
        assert exchange is not None
        exchange.set_route(route)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def nothing(*_: Any) -> None: ...

    async def all_of_them() -> None:
        app = asgi_wsgi_apps.AsgiApp(answer, Exchanges(RequestsRule()))
        for _ in range(times):
            await app({"type": "http", "method": "GET", "path": "/", "headers": []}, nothing, nothing)

    asyncio.run(all_of_them())


def test_a_scrape_without_any_export_reports_requests_by_endpoint_and_status() -> None:
    start("requests: auto")
    serve("/items/{id}", 200, 7)
    serve("/items/{id}", 503, 2)
    serve('/odd"\\\n', 200, 1)
    ((labels, count),) = of(f"{REQUESTS}_count", http_response_status_code="503").items()
    assert count == 2
    assert dict(labels) == {
        "error_type": "503",
        "http_request_method": "GET",
        "http_response_status_code": "503",
        "http_route": "/items/{id}",
        "url_scheme": "http",
    }
    assert sum(of(f"{REQUESTS}_count").values()) == 10
    assert list(of(f"{REQUESTS}_count", http_route='/odd"\\\n').values()) == [1]
    assert len(of(f"{REQUESTS}_bucket", http_response_status_code="503")) == len(BOUNDS_S) + 1
    assert list(of(f"{REQUESTS}_bucket", http_response_status_code="503", le="+Inf").values()) == [2]
    assert 0 < sum(of(f"{REQUESTS}_sum").values()) < 60
    assert list(of("http_server_active_requests").values()) == [0]
    serve("/items/{id}", 200, 3)
    assert sum(of(f"{REQUESTS}_count").values()) == 13


def ask_as(tenant: str, times: int, *, annotates: bool = False) -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if annotates:
            instrument.annotate_request({"tenant": tenant})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def nothing(*_: Any) -> None: ...

    async def all_of_them() -> None:
        (rule,) = instrument.session().profile.requests
        app = asgi_wsgi_apps.AsgiApp(answer, Exchanges(rule))
        headers = [] if annotates else [(b"x-tenant", tenant.encode())]
        for _ in range(times):
            await app({"type": "http", "method": "GET", "path": "/", "headers": headers}, nothing, nothing)

    asyncio.run(all_of_them())


@pytest.mark.parametrize("by", ["http.request.header.x-tenant", "tenant"])
def test_requests_are_distinguished_by_tenant_in_metrics_and_in_a_view_up_to_a_limit(by: str) -> None:
    start(f"requests: {{by: {by}, at_most: 2}}")
    for tenant, times in (("ada", 3), ("bo", 2), ("cy", 4), ("di", 1), ("ada", 2)):
        ask_as(tenant, times, annotates=by == "tenant")
    serve("/items/{id}", 200, 1)  # of nobody
    label = by.replace(".", "_").replace("-", "_")
    found = {dict(labels).get(label): count for labels, count in of(f"{REQUESTS}_count").items()}
    assert found == {"ada": 5, "bo": 2, "other": 5, "": 1}
    view: Any = instrument.session().views(["requests"])["requests"]
    assert [(one.name, one.requests) for one in view.groups] == [("ada", 5), ("cy", 4), ("other", 3)]
    for name in ("requests", "brief"):
        text = instrument.summary(views=[name])
        assert re.search(rf"By {re.escape(by)}", text)
        assert re.search(r"^other +3 ", text, re.MULTILINE)


def test_a_later_exporter_keeps_the_same_tenants() -> None:
    before, after = (Meter(RECORDER, 0) for _ in range(2))
    for one in (before, after):
        one.by, one.at_most = "tenant", 1
    assert before._group_label({"tenant": "ada"}) == (("tenant", "ada"),)
    before._histograms.limit_series(HTTP_DURATION.name, (("tenant", "ada"),))
    after.restore(before.state())
    assert after._group_label({"tenant": "bo"}) == (("tenant", "other"),)
    after.groups = before.groups  # of the processes of one service
    assert after._group_label({"tenant": "ada"}) == (("tenant", "ada"),)
    assert after._group_label({}) == ()


def test_requests_that_the_rings_had_lost_before_the_first_scrape_are_counted() -> None:
    start("requests: auto\nlimits: {ring: 64KiB}")
    serve("/items", 200, 3_000)
    assert sum(of(f"{REQUESTS}_count").values()) == 3_000
    serve("/items", 200, 5)
    assert sum(of(f"{REQUESTS}_count").values()) == 3_005


def test_gauges_calls_losses_and_cost_are_reported_by_the_names_that_they_have_in_prometheus() -> None:
    start("device: {cuda: off, nvml: off, host: 20ms}\nlimits: {ring: 64KiB}")
    for _ in range(3_000):
        with instrument.scope("work"):
            pass
    while not RECORDER.make_reader().read_samples():
        pass
    assert min(of("process_memory_usage_bytes").values()) > 1e6
    assert max(of("instrument_cost_seconds_total", instrument_part="probes").values()) > 0
    assert max(of("instrument_losses_total").values()) > 0


def test_a_scrape_before_any_loss_has_the_usual_losses_as_0() -> None:
    start("device: {cuda: off, nvml: off, host: off}")
    with instrument.scope("work"):
        pass
    losses = of("instrument_losses_total")
    assert len(losses) == 6
    assert set(losses.values()) == {0}


@pytest.mark.parametrize(
    ("name", "unit", "told"),
    [
        ("http.server.request.duration", "s", "http_server_request_duration_seconds"),
        ("http.server.active_requests", "{request}", "http_server_active_requests"),
        ("hw.gpu.utilization", "1", "hw_gpu_utilization_ratio"),
        ("instrument.gpu.pcie.io", "By/s", "instrument_gpu_pcie_io_bytes_per_second"),
        ("hw.temperature", "Cel", "hw_temperature_celsius"),
    ],
)
def test_names_are_those_that_opentelemetry_gives_in_prometheus(name: str, unit: str, told: str) -> None:
    assert make_metric_name(name, unit) == told


def test_a_share_is_reported_whichever_of_it_and_its_base_was_read_first() -> None:
    samples = [Sample("process_cpu", HOST, 1, 50.0), Sample("cores", HOST, 2, 4.0)]
    for read in (samples, samples[::-1]):
        lines = format_metrics(metrics_of_process(Metered(ORIGIN, None, read), "")).splitlines()
        assert "process_cpu_utilization_ratio 0.125" in lines


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("http.server.request.duration", 0.005, 10),
        ("gen_ai.server.request.duration", 0.01, 81.92),
        ("gen_ai.server.time_to_first_token", 0.001, 10),
        ("gen_ai.server.time_per_output_token", 0.01, 2.5),
        ("instrument.request.queue.duration", 0.001, 81.92),
        ("instrument.call.duration", 1e-5, 167.77216),
    ],
)
def test_each_duration_has_bounds_of_its_own_size(name: str, first: float, last: float) -> None:
    long = Distribution()
    long.add(round(last * 0.9e9))
    snapshot = Snapshot(0, 1, (Metric(name, "s", HISTOGRAM, "", {(): long}),))
    text = format_metrics(metrics_of_process(Metered(ORIGIN, snapshot), ""))
    buckets = [(float(le), float(count)) for le, count in re.findall(r'_bucket{le="(.*?)"} (\S+)', text)]
    assert (buckets[0][0], buckets[-2][0]) == (first, pytest.approx(last, abs=1e-5))
    assert [count for _, count in buckets[-3:]] == [0, 1, 1]


def test_metrics_of_one_process_alone_are_marked_as_such() -> None:
    start("agent: off")
    assert "# HELP instrument_processes Processes that these metrics are of: this one alone, agent: off." in (
        instrument.prometheus()
    )


def test_a_scrape_while_the_session_is_busy_reports_what_was_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from instrument.sessions import exporting

    monkeypatch.setattr(exporting, "SCRAPE_WAIT_S", 0.01)
    start("requests: auto")
    serve("/items", 200, 2)
    assert sum(of(f"{REQUESTS}_count").values()) == 2
    with instrument.session().exporting.lock.acquire_within(), ThreadPoolExecutor(1) as other:
        serve("/items", 200, 2)
        assert sum(other.submit(of, f"{REQUESTS}_count").result(120).values()) == 2
    assert sum(of(f"{REQUESTS}_count").values()) == 4


def test_without_the_client_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    start("requests: auto")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(
        instrument.ExportError,
        match=r"prometheus_client is not installed, so metrics cannot be served; install instrument-sdk\[",
    ):
        instrument.prometheus()


def test_without_a_session_it_says_so() -> None:
    with pytest.raises(instrument.StateError, match="no session runs"):
        instrument.prometheus()


def test_openmetrics_has_exemplars_of_the_traces_that_are_kept() -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed

    with collecting(take) as server:
        otlp = f"export: {{otlp: {{endpoint: 'http://127.0.0.1:{server.server_port}'}}}}"
        start(f"requests: auto\ncapture: {{sample: 0, errors: true}}\n{otlp}")
        serve("/items", 200, 3)
        serve("/items", 500, 3)
        found: list[Any] = []
        while not found:  # once it is decided that they are kept
            text = instrument.prometheus(openmetrics=True)
            (family,) = [one for one in parsed(text) if one.name == REQUESTS]
            found = [sample for sample in family.samples if sample.exemplar]
        ids = instrument.session().recorded.id_generator()
        kept = {
            f"{ids.span_id(span.span_id):016x}": span
            for span in spans_in(RECORDER)
            if span.error and not span.parent_id
        }
        for sample in found:
            assert sample.labels["http_response_status_code"] == "500"
            span = kept[sample.exemplar.labels["span_id"]]
            assert sample.exemplar.labels["trace_id"] == f"{ids.trace_id(span.span_id):032x}"
            assert sample.exemplar.value == span.total_ns / 1e9 <= float(sample.labels["le"])
        assert "span_id" not in instrument.prometheus()
        instrument.stop()  # while the collector is there, or the end waits for it


def test_openmetrics_points_to_no_trace_that_goes_nowhere() -> None:
    start("requests: auto")
    serve("/items", 200, 3)
    text = instrument.prometheus(openmetrics=True)
    assert text.endswith("# EOF\n")
    assert f"{REQUESTS}_count" in text
    assert "span_id" not in text
