"""Clients that go away and a service that is stopped differ from failures, in every report."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from readback import spans_in

pytest.importorskip("prometheus_client")

from otlp_collectors import Collector, collecting, take
from prometheus_client.parser import text_string_to_metric_families

import instrument
from instrument.agent.client import Member
from instrument.agent.live_view import LiveSampler
from instrument.instrumentors.requests import asgi_wsgi_apps
from instrument.instrumentors.requests.exchange import CURRENT, Exchanges
from instrument.profile.keys import loads
from instrument.profile.model import RequestsRule
from instrument.recorder.recorder import RECORDER

START = {"type": "http.response.start", "status": 200, "headers": []}


class ClientDisconnect(Exception):
    """The exception that starlette raises for a reader of the body if its client has gone."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting(take) as server:
        profile = f"""
            requests: auto
            capture: {{sample: 0, errors: true}}
            export: {{otlp: {{endpoint: "http://127.0.0.1:{server.server_port}"}}}}
        """
        instrument.start(loads(profile, environ={}))
        yield server
        instrument.stop()


def serve(way: str) -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        exchange = CURRENT.get()
        assert exchange is not None
        exchange.set_route("/chat")
        if way == "cancelled":
            await asyncio.sleep(240)
        if way == "failed":
            raise ValueError
        if way == "read in vain":
            raise ClientDisconnect
        await send(START)
        await send({"type": "http.response.body", "body": b"a", "more_body": way != "ok"})
        if way == "timed out":
            await asyncio.wait_for(asyncio.sleep(240), 0.001)
        if way == "cancelled amid its answer":
            await asyncio.sleep(240)

    async def nothing(*_: Any) -> None: ...

    async def ask() -> None:
        app = asgi_wsgi_apps.AsgiApp(answer, Exchanges(RequestsRule()))
        task = asyncio.ensure_future(
            app({"type": "http", "method": "GET", "path": "/", "headers": []}, nothing, nothing)
        )
        await asyncio.sleep(0.005 if way.startswith("cancelled") else 0)
        if way.startswith("cancelled"):
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(ask())


TIMES = {
    "ok": 8, "gone": 4, "cancelled": 3, "cancelled amid its answer": 2, "read in vain": 1, "failed": 2, "timed out": 1,
}  # fmt: skip
ENDED = Counter(
    {("", ""): 8, ("", "client gone"): 5, ("", "cancelled"): 5, ("ValueError", ""): 2, ("TimeoutError", ""): 1}
)
"""The ended requests by error and by the reason for which they were broken off."""


def test_metrics_reports_and_live_agree_on_what_has_failed_and_what_was_cancelled(collector: Collector) -> None:
    for way, times in TIMES.items():
        for _ in range(times):
            serve(way)
    session = instrument.session()
    requests = [span for span in spans_in(RECORDER) if span.site.kind == "request"]  # a loop may have been blocked, too
    ways = ((span.error or "", span.attributes.get("instrument.outcome", "")) for span in requests)
    assert Counter((error, "" if error else str(outcome)) for error, outcome in ways) == ENDED
    statuses = Counter(span.attributes.get("http.response.status_code") for span in requests)
    assert statuses == {200: 15, 500: 2, None: 4}

    found: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(instrument.prometheus()):
        for sample in family.samples:
            if sample.name == "http_server_request_duration_seconds_count":
                labels = sample.labels
                found[labels["error_type"], labels["instrument_outcome"]] += int(sample.value)
    assert found == ENDED

    assert instrument.flush(100).settled
    found.clear()
    for metric in collector.metrics:
        if metric.name == "http.server.request.duration":
            newest = metric.exponential_histogram.data_points
    for point in newest:
        labels = {one.key: one.value.string_value for one in point.attributes}
        found[labels.get("error.type", ""), labels.get("instrument.outcome", "")] += point.count
    assert found == ENDED
    spans = [span for its in collector.spans.values() for span in its]
    assert [span.status.code for span in spans] == [2, 2, 2]  # what is kept is what has failed

    (endpoint,) = session.views(views=["requests"])["requests"].endpoints  # type: ignore[attr-defined]
    assert (endpoint.requests, endpoint.errors, endpoint.cancelled) == (21, 3, 10)
    assert session.summary(views=["requests"]).partition("Request  ")[2].split()[:3] == ["Count", "Errors", "Cancelled"]
    assert "3 of them ended with an error, 10 were cancelled" in session.summary()

    looker, now = (
        LiveSampler(""),
        Member({"pid": os.getpid(), "ended_ns": 0, "how": "", "service": ""}, RECORDER.memory_fd),
    )
    screen = looker.make_screen([now])
    (shown,) = screen.endpoints
    assert (shown.requests, shown.errors, shown.cancelled) == (21, 3, 10)
    header, row = screen.lines()[2:4]
    assert header.split()[:5] == ["Endpoint", "Ended", "Errors", "Cancelled", "A"]
    assert row.split()[:5] == ["GET", "/chat", "21", "3", "10"]
    serve("ok")
    header, row = looker.make_screen([now]).lines()[2:4]
    assert (header.split()[:4], row.split()[:4]) == (["Endpoint", "Ended", "Errors", "A"], ["GET", "/chat", "1", "0"])
