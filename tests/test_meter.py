"""Metrics of requests and calls: their sums are the calls, in spite of rings, forks and collectors."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from otlp_collectors import Collector, Handler, collecting, refuse_with, swallow, take
from otlp_receiver import receiver
from server_programs import serving
from test_requests import FLASK, STARLETTE, ask_all, gunicorn, uvicorn

import instrument
from instrument.instrumentors.requests import asgi_wsgi_apps
from instrument.instrumentors.requests.exchange import CURRENT, Exchanges
from instrument.otlp import delivery
from instrument.otlp.packing import make_exponential
from instrument.profile.keys import loads
from instrument.profile.model import Profile, RequestsRule
from instrument.recorder.request_meter import count_queued_tasks
from instrument.recording.distributions import MOST_EXEMPLARS, Distribution, Exemplar, Exemplars, Histograms, bucket_of

DURATION, ACTIVE, CALLS = "http.server.request.duration", "http.server.active_requests", "instrument.call.duration"
DELTA, CUMULATIVE = 1, 2


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    instrument.stop()


def profile(endpoint: str, more: str = "") -> Profile:
    text = f"requests: auto\nexport: {{otlp: {{endpoint: '{endpoint}', timeout: 2s}}}}\n{more}"
    return loads(text, environ={})


def url(server: Collector) -> str:
    return f"http://127.0.0.1:{server.server_port}"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a collector's answer to metrics as long as to spans. Metrics are sent again after a late answer."""
    monkeypatch.setattr(delivery, "PATIENCE_NS", 60 * 10**9)


class Served:
    """An ASGI app as its server calls it: a path names its route, and the status that answers it."""

    def __init__(self, rule: RequestsRule | None = None) -> None:
        self._app = asgi_wsgi_apps.AsgiApp(self._answer, Exchanges(rule or RequestsRule()))
        self.asked: Counter[tuple[str, str, int]] = Counter()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        _, route, status = scope["path"].split("/")
        exchange = CURRENT.get()
        assert exchange is not None
        exchange.set_route(f"/{route}")
        if status == "boom":
            raise ValueError(route)
        await send({"type": "http.response.start", "status": int(status), "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def ask(self, path: str, times: int = 1, method: str = "GET", kind: str = "http", scheme: str = "http") -> None:
        scope = {"type": kind, "method": method, "path": path, "scheme": scheme, "headers": []}

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None: ...

        async def all_of_them() -> None:
            for _ in range(times):
                try:
                    await self._app(dict(scope), receive, send)
                except ValueError:
                    pass  # the service's own fault

        asyncio.run(all_of_them())


def told(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


def points(metrics: Sequence[Metric], name: str = DURATION) -> list[Any]:
    return [p for m in metrics if m.name == name for p in getattr(m, m.WhichOneof("data")).data_points]


def newest(metrics: Sequence[Metric], name: str = DURATION) -> dict[tuple[Any, ...], Any]:
    """The last point of each series."""
    return {tuple(sorted(told(p.attributes).items())): p for p in points(metrics, name)}


def ended(metrics: Sequence[Metric]) -> Counter[tuple[Any, ...]]:
    """Return the ended requests by method, route, status and error, from the totals that came last."""
    names = ("http.request.method", "http.route", "http.response.status_code", "error.type")
    found: Counter[tuple[Any, ...]] = Counter()
    for point in newest(metrics).values():
        labels = told(point.attributes)
        found[tuple(labels.get(name) for name in names)] += point.count
    return found


def test_requests_arrive_by_endpoint_status_and_error_as_exponential_histograms() -> None:
    with collecting(take) as server:
        session = instrument.start(profile(url(server)))
        assert session is not None
        app = Served()
        app.ask("/items/200", 30)
        app.ask("/items/404", 3)
        app.ask("/items/503", 2)
        app.ask("/other/boom", 4, "POST")
        app.ask("/other/200", 1, "BREW")
        instrument.stop()
        assert ended(server.metrics) == {
            ("GET", "/items", 200, None): 30,
            ("GET", "/items", 404, None): 3,
            ("GET", "/items", 503, "503"): 2,
            ("POST", "/other", 500, "ValueError"): 4,
            ("_OTHER", "/other", 200, None): 1,
        }
        for point in newest(server.metrics).values():
            assert told(point.attributes)["url.scheme"] == "http"
            assert sum(point.positive.bucket_counts) + point.zero_count == point.count
            assert 0 < point.min <= point.sum / point.count <= point.max
            assert point.start_time_unix_nano < point.time_unix_nano
        (metric,) = {m.name: m for m in server.metrics if m.name == DURATION}.values()
        assert (metric.unit, metric.exponential_histogram.aggregation_temporality) == ("s", CUMULATIVE)
        assert session.losses() == {}
        # Which depends on the servers that other tests have imported; this app has no router.
        assert all(note.startswith("requests: ") for note in session.notes())


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_real_receiver_holds_what_was_served(protocol: str) -> None:
    with receiver() as found:
        endpoint = found.grpc_endpoint if protocol == "grpc" else f"http://127.0.0.1:{found.http_port}"
        text = f"requests: auto\nexport: {{otlp: {{endpoint: '{endpoint}', protocol: {protocol}}}}}\n"
        text += "functions: [{match: 'test_meter:work', metrics: true}]\n"
        instrument.start(loads(text, environ={}))
        app = Served()
        app.ask("/items/200", 20)
        app.ask("/items/500", 5)
        instrument.flush(60)
        instrument.stop()
        requests: dict[Any, int] = {}
        for point in found.points():
            if point.name == DURATION:
                assert (point.unit, point.kind, point.temporality) == ("s", "histogram", "CUMULATIVE")
                requests[point.attributes["http.response.status_code"]] = int(point.value)
                counts = point.data["positive"]["bucket_counts"]
                assert sum(map(int, counts)) == point.value
        assert requests == {200: 20, 500: 5}


def test_deltas_add_up_to_what_was_served_and_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    with collecting(take) as server:
        instrument.start(profile(url(server)))
        app = Served()
        for times in (3, 0, 5, 7):
            app.ask("/items/200", times)
            instrument.flush(60)
        instrument.stop()
        told_points = points(server.metrics)
        assert [p.count for p in told_points] == [3, 5, 7]
        for before, after in itertools.pairwise(told_points):
            assert before.time_unix_nano == after.start_time_unix_nano
        assert {m.exponential_histogram.aggregation_temporality for m in server.metrics if m.name == DURATION} == {
            DELTA
        }
        assert {m.sum.aggregation_temporality for m in server.metrics if m.name == ACTIVE} == {CUMULATIVE}


def test_deltas_that_did_not_get_through_come_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    with collecting(take, metrics=refuse_with(400)) as server:
        instrument.start(profile(url(server)))
        app = Served()
        app.ask("/items/200", 3)
        instrument.flush(60)
        assert points(server.metrics) == []
        server.behave_with_metrics = take
        app.ask("/items/200", 4)
        instrument.stop()
        assert [p.count for p in points(server.metrics)] == [7]


def test_a_preference_that_there_is_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "detla")
    with collecting(take) as server:
        session = instrument.start(profile(url(server)))
        assert session is not None
        (note,) = [note for note in session.notes() if "TEMPORALITY" in note]
        assert "found 'detla'; allowed: cumulative, delta, lowmemory" in note
        instrument.stop()


@pytest.mark.parametrize("rule", [RequestsRule(), RequestsRule(name="{method}")], ids=["websocket", "one name"])
def test_endpoints_of_one_name_are_counted_once_each(rule: RequestsRule) -> None:
    """A route may have a websocket, and requests of two schemes. A rule may give several routes one name."""
    with collecting(take) as server:
        instrument.start(profile(url(server)))
        app, sums = Served(rule), Counter[tuple[Any, ...]]()
        app.ask("/items/200", 3)
        app.ask("/items/200", 4, kind="websocket")
        app.ask("/items/200", 5, scheme="https")
        app.ask("/other/200", 6)
        instrument.stop()
        for point in newest(server.metrics).values():
            labels = told(point.attributes)
            names = ("http.route", "url.scheme", "network.protocol.name")
            sums[tuple(labels.get(name) for name in names)] += point.count
        assert sums == {
            ("/items", "http", None): 3,
            ("/items", "http", "websocket"): 4,
            ("/items", "https", None): 5,
            ("/other", "http", None): 6,
        }


def test_requests_whose_rows_were_overwritten_are_counted_all_the_same() -> None:
    with collecting(take) as server:
        session = instrument.start(profile(url(server), "limits: {ring: 64KiB}\ncapture: {sample: 0}"))
        assert session is not None
        app = Served()
        with session.exporting.lock.acquire_within():  # nobody reads the rings meanwhile
            app.ask("/items/200", 3_000)
            app.ask("/items/500", 1)
        instrument.stop()
        found = ended(server.metrics)
        assert sum(found.values()) == 3_001
        assert found[("GET", "/items", None, None)] > 0, "those that nobody has met, without a status"
        assert found[("GET", "/items", 500, "500")] == 1


def test_endpoints_beyond_the_limit_are_one_series_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Histograms, "series_limit", 5)
    with collecting(take) as server:
        instrument.start(profile(url(server)))
        app = Served()
        for number in range(9):
            app.ask(f"/route{number}/200", 2)
        instrument.stop()
        found = newest(server.metrics)
        assert sum(point.count for point in found.values()) == 18
        assert found[("otel.metric.overflow", True),].count == 8


def test_requests_that_are_open_are_reported_as_such() -> None:
    is_inside, may_go = threading.Event(), threading.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        is_inside.set()
        await asyncio.to_thread(may_go.wait, 240)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with collecting(take) as server:
        instrument.start(profile(url(server)))
        app = Served()
        app._app = asgi_wsgi_apps.AsgiApp(wait, Exchanges(RequestsRule()))
        thread = threading.Thread(target=app.ask, args=("/",))
        thread.start()
        assert is_inside.wait(60)
        delivery = instrument.flush(60)
        assert delivery is not None
        assert delivery.settled
        (active,) = newest(server.metrics, ACTIVE).values()
        assert (told(active.attributes), active.as_int) == ({"http.request.method": "GET", "url.scheme": "http"}, 1)
        may_go.set()
        thread.join()
        instrument.stop()
        assert sum(point.as_int for point in newest(server.metrics, ACTIVE).values()) == 0
        assert sum(ended(server.metrics).values()) == 1


def test_a_flush_sends_metrics_again_that_the_collector_was_too_slow_for() -> None:
    tries: list[int] = []

    def be_slow_at_first(handler: Handler, points: int) -> None:
        tries.append(points)
        if len(tries) < 4:
            handler.server.closing.wait(2)  # the connection is closed by the other end long before
        else:
            handler.answer(200)

    with collecting(take, metrics=be_slow_at_first) as server:
        instrument.start(
            loads(f"requests: auto\nexport: {{otlp: {{endpoint: '{url(server)}', timeout: 100ms}}}}", environ={})
        )
        Served().ask("/items/200", 3)
        delivery = instrument.flush(60)
        assert delivery is not None
        assert delivery.settled
        assert sum(ended(server.metrics).values()) == 3
        assert len(tries) > 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_parent_and_child_each_report_their_own_requests() -> None:
    with collecting(take) as server:
        instrument.start(profile(url(server)))
        app = Served()
        app.ask("/items/200", 4)
        instrument.flush(60)
        app.ask("/items/200", 2)
        child = os.fork()
        if not child:
            try:
                app.ask("/items/200", 3)
                instrument.stop()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        app.ask("/items/200", 1)
        instrument.stop()
        counts: dict[int, int] = {}
        for point in points(server.metrics):
            counts[point.start_time_unix_nano] = max(point.count, counts.get(point.start_time_unix_nano, 0))
        assert sorted(counts.values()) == [3, 7], "the child's start is its own"


def test_a_collector_that_asks_to_wait_gets_no_metrics_meanwhile_and_spans_go_on() -> None:
    with collecting(take, metrics=refuse_with(503, Retry_After="30")) as server:
        session = instrument.start(profile(url(server)))
        assert session is not None
        app = Served()
        for _ in range(3):
            app.ask("/items/200", 2)
            instrument.flush(60)
        assert [name for name in server.taken if name != "loop blocked"] == ["GET /items"] * 6
        tried = server.tries
        instrument.flush(60)
        assert server.tries == tried, "nothing until it may be asked again"
        instrument.stop()
        assert session.losses()["series of metrics dropped by the OTLP export"] > 0
        assert any("asks to wait for 30 s" in note for note in session.notes())


@pytest.mark.slow
def test_without_a_collector_what_was_not_reported_is_counted_and_the_end_is_not_late() -> None:
    session = instrument.start(profile("http://127.0.0.1:9"))
    assert session is not None
    Served().ask("/items/200", 2)
    instrument.stop()
    assert session.losses()["series of metrics dropped by the OTLP export"] > 0


@pytest.mark.slow
def test_a_collector_that_never_answers_leaves_the_newest_totals_alone_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "PATIENCE_NS", 10**8)
    with collecting(take, metrics=swallow) as server:
        session = instrument.start(profile(url(server)))
        assert session is not None
        app = Served()
        for _ in range(5):
            app.ask("/items/200", 1)
            instrument.flush(0.3)
        server.closing.set()
        server.behave_with_metrics = take
        instrument.stop()
        assert ended(server.metrics) == {("GET", "/items", 200, None): 5}


def test_profiles_without_requests_send_gauges_alone() -> None:
    with collecting(take) as server:
        instrument.start(loads(f"export: {{otlp: {{endpoint: '{url(server)}'}}}}", environ={}))
        with instrument.scope("work"):
            pass
        instrument.stop()
        assert server.taken == ["work"]


def test_streams_of_generations_report_the_time_to_the_first_token_and_of_each() -> None:
    async def generate(scope: Any, receive: Any, send: Any) -> None:
        exchange = CURRENT.get()
        assert exchange is not None
        exchange.set_route(scope["path"])
        instrument.annotate_request({"gen_ai.request.model": "tiny", "tenant": "acme"})
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for number in range(5):
            await send({"type": "http.response.body", "body": b"data: x\n\n", "more_body": True})
            if scope["path"] == "/v1/broken" and number == 2:
                raise ValueError
        await send({"type": "http.response.body", "body": b""})

    with collecting(take) as server:
        asked = "requests: {by: tenant, gen_ai: [/v1/chat/completions, /v1/b*], provider: acme-ai}"
        text = f"{asked}\nexport: {{otlp: {{endpoint: '{url(server)}'}}}}"
        instrument.start(loads(text, environ={}))
        app = Served()
        app._app = asgi_wsgi_apps.AsgiApp(generate, Exchanges(loads(text, environ={}).requests[0]))
        for path in ("/v1/chat/completions", "/v1/broken", "/other"):
            app.ask(path, 4)
        instrument.stop()
        requests = ended(server.metrics)
        assert sum(requests.values()) == 12
        ((labels, first),) = newest(server.metrics, "gen_ai.server.time_to_first_token").items()
        assert dict(labels) == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "acme-ai",
            "gen_ai.request.model": "tiny",
            "http.route": "/v1/chat/completions",
            "tenant": "acme",
        }
        (each,) = newest(server.metrics, "gen_ai.server.time_per_output_token").values()
        assert (first.count, each.count) == (4, 4)
        of_requests = [
            p for p in points(server.metrics) if told(p.attributes).get("http.route") == "/v1/chat/completions"
        ]
        assert first.sum + 4 * each.sum <= of_requests[-1].sum
        whole = newest(server.metrics, "gen_ai.server.request.duration")
        assert {dict(labels)["http.route"]: (point.count, dict(labels).get("error.type")) for labels, point in
            whole.items()} == {"/v1/chat/completions": (4, None), "/v1/broken": (4, "ValueError")}  # fmt: skip
        assert whole[labels].sum == of_requests[-1].sum
        kept = {bytes(one.span_id) for one in of_requests[-1].exemplars}
        for point in (whole[labels], first, each):
            assert point.exemplars
            assert {bytes(one.span_id) for one in point.exemplars} & kept
        # OpenTelemetry's conventions for generative models have a repository of their own, and no schema yet.
        assert {name: bool(schema) for name, schema in server.schemas.items()} == {
            name: not name.startswith("gen_ai.") for name in server.taken if name in server.schemas
        }


@pytest.mark.parametrize(
    ("name", "value", "has_spans", "has_metrics"),
    [
        ("OTEL_SDK_DISABLED", "true", False, False),
        ("OTEL_TRACES_EXPORTER", "none", False, True),
        ("OTEL_TRACES_SAMPLER", "always_off", False, True),
        ("OTEL_METRICS_EXPORTER", "none", True, False),
        ("OTEL_TRACES_EXPORTER", "otlp", True, True),
    ],
)
def test_a_switch_of_opentelemetry_keeps_its_signal_from_the_collector(
    name: str, value: str, has_spans: bool, has_metrics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with collecting(take) as server:
        text = f"requests: auto\nagent: off\nexport: {{otlp: {{endpoint: '{url(server)}'}}}}"
        instrument.start(loads(text, environ={name: value}))
        app = Served()
        app.ask("/items/200", 3)
        app.ask("/items/boom", 2)
        instrument.stop()
        assert (bool(server.spans), bool(server.metrics)) == (has_spans, has_metrics)
        assert bool(server.tries) == (has_spans or has_metrics)


def test_calls_of_grpc_have_a_duration_by_method_and_status() -> None:
    def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.NOT_FOUND if request else grpc.StatusCode.INTERNAL, "as asked")

    with collecting(take) as server, ThreadPoolExecutor(2) as pool:
        instrument.start(profile(url(server)))
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(answer)
            for name, answer in (("Echo", lambda request, _: request), ("Refuse", refuse))
        }
        served = grpc.server(pool, [grpc.method_handlers_generic_handler("shop.Orders", handlers)])
        port = served.add_insecure_port("127.0.0.1:0")
        served.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for name, body in (("Echo", b""), ("Echo", b"x"), ("Refuse", b"x"), ("Refuse", b"")):
                with contextlib.suppress(grpc.RpcError):
                    channel.unary_unary(f"/shop.Orders/{name}")(body, timeout=240)
        served.stop(None).wait()
        instrument.stop()
        calls = {
            tuple(dict(labels).get(name) for name in ("rpc.method", "rpc.status_code", "error.type")): point.count
            for labels, point in newest(server.metrics, "rpc.server.call.duration").items()
        }
        assert calls == {
            ("shop.Orders/Echo", "OK", None): 2,
            ("shop.Orders/Refuse", "NOT_FOUND", None): 1,
            ("shop.Orders/Refuse", "INTERNAL", "INTERNAL"): 1,
        }
        (unit,) = {metric.unit for metric in server.metrics if metric.name == "rpc.server.call.duration"}
        assert unit == "s"
        assert not [*points(server.metrics), *points(server.metrics, ACTIVE)]


GUNICORN = "3 workers that gunicorn forks from one that has the app"
CASES = {
    "uvicorn": (uvicorn("starlette_app:app"), STARLETTE),
    "4 workers of uvicorn": (uvicorn("starlette_app:app", "--workers", "4"), STARLETTE),
    GUNICORN: (
        # Which kills workers that it has heard nothing of, on a machine that stood still, too.
        gunicorn("flask_app:app", "-w", "3", "--preload", "--timeout", "120", "--graceful-timeout", "60"),
        FLASK,
    ),
}
UNTOLD = ("metrics did not get through", "series of metrics dropped")
"""The losses that the report names if the processes or the collector did not answer within the time of an end."""


@pytest.mark.slow
@pytest.mark.parametrize(("case", "preference"), [*zip(CASES, ["cumulative", "delta", "cumulative"], strict=True)])
def test_answers_of_servers_equal_the_metrics_of_their_processes(case: str, preference: str, tmp_path: Path) -> None:
    for _ in range(3):
        found, wanted, output = told_and_wanted(case, preference, tmp_path)
        if not any(words in output for words in UNTOLD):
            break
    assert found == wanted, f"lacking: {wanted - found}; too many: {found - wanted}; {output}"


def told_and_wanted(
    case: str, preference: str, folder: Path, kills: int = 0
) -> tuple[Counter[tuple[Any, ...]], Counter[tuple[Any, ...]], str]:
    """Return the reported and the answered requests by method, route and status, and the output.

    Some of the workers are killed, and the others asked the same.
    """
    command, asks = CASES[case]
    with collecting(take) as server:
        export = f"{{otlp: {{endpoint: {url(server)}}}, summary: {{views: [cost]}}}}"
        (folder / "profile.yaml").write_text(f"requests: {{ignore: [/health]}}\nexport: {export}")
        environ = {"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": preference}
        with serving(command, folder, environ, ours=True) as (port, served):
            answers = ask_all(port, asks, 4)
            if kills:
                for pid in workers(folder)[:kills]:
                    os.kill(pid, signal.SIGKILL)
                answers += ask_all(port, asks, 2)
        wanted = Counter((one.ask.method, one.ask.route, one.status) for one in answers)
        return finally_told(server, preference, wanted), wanted, served.output


def finally_told(server: Collector, preference: str, wanted: Counter[tuple[Any, ...]]) -> Counter[tuple[Any, ...]]:
    """Return the reported requests once they are the wanted ones: the agent reports a process soon after its end."""
    end = time.monotonic() + 60
    while told_in_all(server.metrics, preference) != wanted and time.monotonic() < end:
        time.sleep(0.1)
    return told_in_all(server.metrics, preference)


def told_in_all(metrics: Sequence[Metric], preference: str) -> Counter[tuple[Any, ...]]:
    """Return the requests that all processes have reported, by method, route and status."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for point in points(metrics):
        labels = told(point.attributes)
        names = ("http.request.method", "http.route", "http.response.status_code")
        endpoint = (labels[names[0]], labels.get(names[1], ""), labels.get(names[2]))
        if preference == "delta":
            counts[endpoint] += point.count
        else:  # a process is known by its start
            of_process = (*endpoint, labels.get("error.type"), point.start_time_unix_nano)
            counts[of_process] = max(counts[of_process], point.count)
    found: Counter[tuple[Any, ...]] = Counter()
    for endpoint, count in counts.items():
        found[endpoint[:3]] += count
    return found


def workers(folder: Path) -> list[int]:
    """The processes of a server program that others of it have begun."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "cwd").readlink() == folder:
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    return [pid for pid, parent in parents.items() if parent in parents]


@pytest.mark.slow
def test_answers_of_a_killed_worker_are_reported_with_the_others(tmp_path: Path) -> None:
    for _ in range(3):
        found, wanted, output = told_and_wanted(GUNICORN, "delta", tmp_path, kills=2)
        if not any(words in output for words in UNTOLD):
            break
    assert found == wanted, f"lacking: {wanted - found}; too many: {found - wanted}; {output}"


# ---------------------------------------------------------------- calls


def work(depth: int = 0) -> None:
    if depth:
        work(depth - 1)


@pytest.fixture
def restored() -> Iterator[None]:
    bare = work
    yield
    globals()["work"] = bare


RULES = "functions: [{match: 'test_meter:work', name: work, metrics: true}]\n"


def test_rules_that_ask_for_it_have_the_duration_of_all_calls_as_a_metric(restored: None) -> None:
    with collecting(take) as server:
        session = instrument.start(profile(url(server), RULES + "capture: {sample: 0}\nlimits: {ring: 64KiB}"))
        assert session is not None
        for _ in range(5_000):
            work()
        instrument.stop()
        (point,) = newest(server.metrics, CALLS).values()
        assert told(point.attributes) == {"instrument.span.name": "work", "code.function.name": "test_meter.work"}
        assert point.count == sum(point.positive.bucket_counts) + point.zero_count == 5_000
        (row,) = [row for row in session.tally().iterate_totals() if row.path[-1].name == "work"]
        assert point.sum == pytest.approx(row.totals.total_ns / 1e9)
        assert (point.min, point.max) == (row.totals.min_ns / 1e9, row.totals.max_ns / 1e9)


def test_calls_of_functions_beyond_the_limit_are_one_series_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "many_functions.py").write_text("".join(f"def f{number}(): pass\n" for number in range(12)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(Histograms, "series_limit", 5)
    with collecting(take) as server:
        instrument.start(profile(url(server), "functions: [{match: 'many_functions:*', metrics: true}]\n"))
        many: Any = importlib.import_module("many_functions")
        for _ in range(2):
            for number in range(12):
                getattr(many, f"f{number}")()
            instrument.flush(60)
        instrument.stop()
        found = newest(server.metrics, CALLS)
        assert sum(point.count for point in found.values()) == 24
        assert found[("otel.metric.overflow", True),].count == 14


def test_calls_count_on_after_reloads_that_take_a_rule_away_and_bring_it_back(restored: None) -> None:
    with collecting(take) as server:
        session = instrument.start(profile(url(server), RULES))
        assert session is not None
        for count, rules in ((10, "limits: {spans_per_request: 50}\n"), (0, RULES), (7, RULES)):
            for _ in range(count):
                globals()["work"]()
            assert instrument.flush(60) is not None
            session.reload(profile(url(server), rules))
        instrument.stop()
        (point,) = newest(server.metrics, CALLS).values()
        assert point.count == sum(point.positive.bucket_counts) + point.zero_count == 17


def test_calls_before_a_reload_that_takes_all_rules_away_are_reported(restored: None) -> None:
    with collecting(take) as server:
        session = instrument.start(profile(url(server), RULES))
        assert session is not None
        assert instrument.flush(60) is not None  # the rules have been seen
        for _ in range(10):
            work()
        session.reload(profile(url(server)))
        instrument.stop()
        assert [point.count for point in newest(server.metrics, CALLS).values()] == [10]


def test_calls_within_calls_count_and_the_sum_is_no_less_than_its_buckets(restored: None) -> None:
    with collecting(take) as server:
        instrument.start(profile(url(server), RULES))
        for _ in range(10):
            work(20)
        instrument.stop()
        (point,) = newest(server.metrics, CALLS).values()
        assert point.count == 210
        base = 2**2**-point.scale
        buckets = enumerate(point.positive.bucket_counts, point.positive.offset)
        assert point.sum == pytest.approx(sum(count * base ** (at + 0.5) for at, count in buckets), rel=0.2)


def test_metrics_include_our_own_cost_and_losses() -> None:
    with collecting(take) as server:
        instrument.start(profile(url(server), "limits: {ring: 64KiB}\ncapture: {sample: 0}"))
        Served().ask("/items/200", 3_000)
        instrument.stop()
        costs = {told(p.attributes)["instrument.part"]: p.as_double for p in points(server.metrics, "instrument.cost")}
        assert costs["probes"] > 0
        losses = {
            told(p.attributes)["instrument.reason"]: p.as_int for p in points(server.metrics, "instrument.losses")
        }
        assert losses["spans overwritten by newer ones"] > 0
        (metric,) = {m.name: m for m in server.metrics if m.name == "instrument.losses"}.values()
        assert metric.sum.is_monotonic


# ---------------------------------------------------------------- exponential histograms


def test_each_value_is_within_its_exponential_bucket_by_no_more_than_the_tallys_error() -> None:
    for value_ns in [*range(1, 400), *(7**power for power in range(4, 20)), 10**9, 2**40, 2**53]:
        one = Distribution()
        one.add(value_ns)
        found = make_exponential(one, has_extremes=True)
        assert (found.count, found.zero_count, found.counts) == (1, 0, (1,))
        base = 2**2**-found.scale
        low, high = base**found.offset, base ** (found.offset + 1)
        assert low * (1 - 1 / 128) <= value_ns / 1e9 <= high * (1 + 1 / 128)


def test_times_that_differ_much_share_wider_buckets() -> None:
    many = Distribution()
    values = [3**power for power in range(39)]
    for value_ns in [0, *values]:
        many.add(value_ns)
    found = make_exponential(many, has_extremes=True)
    assert len(found.counts) <= 160
    assert (found.zero_count, sum(found.counts), found.sum_s) == (1, 39, sum(values) / 1e9)
    assert (found.least_s, found.most_s) == (0.0, values[-1] / 1e9)


def test_calls_that_got_their_device_time_later_are_not_reported_twice() -> None:
    told_so_far = Distribution()
    first = Distribution()
    for value_ns in (1_000, 1_000, 5_000):
        first.add(value_ns)
    told_so_far.add_later_calls(first)
    later = Distribution(4, 27_000, 1_000, 20_000, {bucket_of(1_000): 1, bucket_of(5_000): 1, bucket_of(20_000): 2})
    before = told_so_far.copy()
    told_so_far.add_later_calls(later)
    assert told_so_far.count == sum(told_so_far.buckets.values()) == 4
    assert all(count >= before.buckets.get(index, 0) for index, count in told_so_far.buckets.items())
    assert told_so_far.subtract_state(before).buckets == {bucket_of(20_000): 1}


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_exemplars_point_to_the_requests_that_are_kept_and_to_no_other(protocol: str) -> None:
    with receiver() as found:
        endpoint = found.grpc_endpoint if protocol == "grpc" else f"http://127.0.0.1:{found.http_port}"
        text = f"requests: auto\nexport: {{otlp: {{endpoint: '{endpoint}', protocol: {protocol}}}}}\n"
        instrument.start(loads(text + "capture: {sample: 0, errors: true}", environ={}))
        app = Served()
        app.ask("/items/200", 20)
        app.ask("/items/500", 5)
        instrument.flush(60)
        instrument.stop()
        kept = {(span.trace_id, span.span_id): span for span in found.spans()}
        assert len(kept) == 5
        pointed = Counter()
        for point in found.points():
            if point.name != DURATION:
                continue
            for one in point.data.get("exemplars", ()):
                ids = tuple(int.from_bytes(base64.b64decode(one[name]), "big") for name in ("trace_id", "span_id"))
                span = kept[ids]
                assert point.attributes["http.response.status_code"] == 500
                assert int(one["time_unix_nano"]) == span.end_ns
                assert one["as_double"] == pytest.approx((span.end_ns - span.start_ns) / 1e9)
                assert point.start_ns < int(one["time_unix_nano"]) <= point.at_ns
                pointed[ids] += 1
        # Each is told once, though totals are told twice.
        assert pointed
        assert set(pointed.values()) == {1}


def test_a_series_has_few_exemplars_of_which_the_longest_stay() -> None:
    held = Exemplars()
    for number in range(10_000):
        held.add(Exemplar(number * number, number, number, 1, number))
    assert len(held.all()) == MOST_EXEMPLARS
    assert held.all()[-1].span_id == 9_999
    assert [one.value_ns for one in held.all()] == sorted(one.value_ns for one in held.all())


def tokens(count: int, *, breaks: bool = False) -> Iterator[str]:
    for number in range(count):
        if breaks and number == 2:
            raise ValueError(number)
        yield "x"


async def streamed(count: int) -> AsyncIterator[str]:
    instrument.annotate({"gen_ai.request.model": "tiny"})
    for _ in range(count):
        yield "x"


def test_generators_of_a_rule_report_the_time_to_the_first_token_and_of_each() -> None:
    async def consume() -> None:
        async for _ in streamed(4):
            pass

    with collecting(take) as server:
        rules = "functions: [{match: ['test_meter:tokens', 'test_meter:streamed'], gen_ai: true}]"
        instrument.start(loads(f"{rules}\nexport: {{otlp: {{endpoint: '{url(server)}'}}}}", environ={}))
        for _ in range(3):
            with instrument.scope("request", kind="request"):
                assert list(tokens(5)) == ["x"] * 5
        list(tokens(1))
        with pytest.raises(ValueError, match="2"):
            list(tokens(3, breaks=True))
        asyncio.run(consume())
        instrument.stop()
        common = {"gen_ai.operation.name": "text_completion"}
        of_tokens = common | {"instrument.span.name": "tokens", "code.function.name": "test_meter.tokens"}
        of_stream = common | {"instrument.span.name": "streamed", "code.function.name": "test_meter.streamed"}
        of_stream["gen_ai.request.model"] = "tiny"
        first, each = (
            {labels: point.count for labels, point in newest(server.metrics, f"gen_ai.server.{name}").items()}
            for name in ("time_to_first_token", "time_per_output_token")
        )
        assert first == {tuple(sorted(of_tokens.items())): 4, tuple(sorted(of_stream.items())): 1}
        assert each == {tuple(sorted(of_tokens.items())): 3, tuple(sorted(of_stream.items())): 1}


def serve_batch(batch: dict[str, int]) -> int:
    return len(batch)


def test_batches_of_a_rule_report_how_many_requests_they_have() -> None:
    with collecting(take) as server:
        rules = "functions: [{match: 'test_meter:serve_batch', batch: batch}]"
        instrument.start(loads(f"{rules}\nexport: {{otlp: {{endpoint: '{url(server)}'}}}}", environ={}))
        for size in (1, 2, 3, 64):
            serve_batch({f"r{number}": 1 for number in range(size)})
        text = instrument.prometheus()
        instrument.stop()
        ((labels, point),) = newest(server.metrics, "instrument.batch.size").items()
        assert dict(labels)["instrument.span.name"] == "serve_batch"
        assert (point.count, point.sum, point.min, point.max) == (4, 70, 1, 64)
        assert 'le="2.5"} 2.0' in text
        assert 'le="64.5"} 4.0' in text


def test_generators_that_nobody_could_look_at_in_time_are_counted() -> None:
    with collecting(take) as server:
        rules = "functions: [{match: 'test_meter:tokens', gen_ai: true}]\nlimits: {ring: 64KiB}"
        session = instrument.start(loads(f"{rules}\nexport: {{otlp: {{endpoint: '{url(server)}'}}}}", environ={}))
        assert session is not None
        with session.exporting.lock.acquire_within():
            for _ in range(5_000):
                list(tokens(1))
        instrument.stop()
        (point,) = newest(server.metrics, "gen_ai.server.time_to_first_token").values()
        reason = "spans overwritten before the export read them"
        assert point.count + session.losses()[reason] == 5_000


def test_waiting_work_of_executors_is_reported_by_pool() -> None:
    def told_lengths(server: Collector) -> dict[str, float]:
        instrument.flush(60)
        found = newest(server.metrics, "instrument.executor.queue.length")
        return {dict(labels)["instrument.executor"]: point.as_double or point.as_int for labels, point in found.items()}

    gate = threading.Event()
    with collecting(take) as server:
        instrument.start(profile(url(server)))
        Served().ask("/items/200", 1)  # of what records nothing there are no metrics
        with (
            ThreadPoolExecutor(1, "test_meter_pool") as named,
            ThreadPoolExecutor(2) as first,
            ThreadPoolExecutor(1) as second,
        ):
            pools = {named: 1 + 5, first: 2 + 3, second: 1 + 4}
            started = threading.Semaphore(0)

            def work() -> None:
                started.release()
                gate.wait(60)

            try:
                before = count_queued_tasks().get("ThreadPoolExecutor", 0)
                for pool, count in pools.items():
                    for _ in range(count):
                        pool.submit(work)
                for _ in range(4):
                    assert started.acquire(timeout=240)
                lengths = told_lengths(server)
                assert lengths["test_meter_pool"] == 5
                assert lengths["ThreadPoolExecutor"] == before + 7
            finally:
                gate.set()
            for pool in pools:
                pool.submit(int).result(60)
            assert told_lengths(server)["test_meter_pool"] == 0
        instrument.stop()
