"""The spans at an OpenTelemetry collector, and the exporter's reports about undelivered spans.

The collectors are real: `ddapm-test-agent`, and small HTTP servers that misbehave in one way each.
"""

from __future__ import annotations

import email.utils
import http.client
import importlib.util
import itertools
import logging
import os
import shutil
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from otlp_collectors import (
    Behave,
    Handler,
    at_most,
    babble,
    be_slow,
    collecting,
    drip,
    first,
    hang_up,
    hang_up_now,
    mumble,
    promise_more,
    refuse_with,
    reject_two,
    swallow,
    take,
    warn,
)
from otlp_receiver import Receiver, free_port, receiver
from otlp_spans import LAYER, ORIGIN, SECOND, SITE, THREADS, expected_attributes, offer, span, tree

from instrument.errors import ExportError
from instrument.otlp import packed_spans, senders
from instrument.otlp.delivery import Delivery, Exporter
from instrument.otlp.export_facts import Ids
from instrument.otlp.packing import REQUEST_BYTES, Body, make_span_attributes
from instrument.otlp.senders import Response
from instrument.otlp.service_sdk import read_current_span
from instrument.otlp.span_forms import REQUEST_SPANS
from instrument.otlp.span_queue import RequestQueue, Source
from instrument.profile.model import Otlp
from instrument.recording.spans import DeviceInterval, Site, Span
from instrument.recording.trace_context import RemoteParent
from instrument.runtime import threads
from instrument.runtime.faults import FAULTS
from instrument.trace.trace import columns_of_spans

REMOTE = RemoteParent(0xABCDEF0123456789_0011223344556677, 0x0102030405060708, 1)


@contextmanager
def exporting(settings: Otlp, threads: Callable[[], Mapping[int, str]] = lambda: THREADS) -> Iterator[Exporter]:
    exporter = Exporter(settings, ORIGIN, threads)
    exporter.start()
    try:
        yield exporter
    finally:
        exporter.stop(0)


def adds_up(exporter: Exporter) -> Mapping[str, int]:
    """The counts, after checking that every offer has exactly one fate."""
    counts = exporter.count_fates()
    fates = [counts[fate] for fate in ("exported", "rejected", "failed", "dropped", "pending")]
    assert counts["offered"] == sum(fates), counts
    assert min(fates) >= 0, counts
    return counts


def wait_until(holds: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def running_receiver() -> Iterator[Receiver]:
    with receiver() as found:
        yield found


@pytest.fixture
def collector(running_receiver: Receiver) -> Receiver:
    """The real one, empty."""
    running_receiver.clear()
    return running_receiver


WAYS = [("http/protobuf", "gzip"), ("http/protobuf", "none"), ("grpc", "gzip"), ("grpc", "none")]


def way_to(collector: Receiver, protocol: str = "http/protobuf", compression: str = "gzip") -> Otlp:
    endpoint = collector.grpc_endpoint if protocol == "grpc" else collector.endpoint
    return Otlp(endpoint, protocol, timeout_ns=60 * SECOND, compression=compression)


@pytest.mark.parametrize(
    ("protocol", "compression"), [pytest.param(*way, marks=[pytest.mark.slow] * ("none" in way)) for way in WAYS]
)
def test_every_span_of_large_and_small_trees_arrives_exactly(
    collector: Receiver, protocol: str, compression: str
) -> None:
    site = Site("request", "request", "chat.server", "handle", "/srv/chat/server.py", 7)
    offered = [tree(4_500, 1), tree(3, 10_000, site), tree(1, 20_000, LAYER, attributes={"prompt": "x" * 700_000})]
    with exporting(way_to(collector, protocol, compression)) as exporter:
        for spans in offered:
            assert offer(exporter, spans)
        delivery = exporter.flush(60 * SECOND)
        ids = exporter.own.ids
        counts = adds_up(exporter)
    assert delivery == Delivery(4_504, 4_504, 0, 0, 0, 0, settled=True)
    assert delivery.complete
    assert counts["requests"] >= 3
    arrived = {found.span_id: found for found in collector.spans()}
    assert len(arrived) == 4_504
    for of in itertools.chain(*offered):
        found = arrived[ids.span_id(of.span_id)]
        assert found.trace_id == ids.trace_id(of.root_id)
        assert found.parent_id == (ids.span_id(of.parent_id) if of.parent_id else 0)
        serves = of.site.kind == "request" and of.span_id == of.root_id
        assert (found.name, found.kind) == (of.site.name, "SERVER" if serves else "INTERNAL")
        assert (found.start_ns, found.end_ns) == (ORIGIN.realtime_of(of.start_ns), ORIGIN.realtime_of(of.end_ns))
        assert found.attributes == expected_attributes(of)
        assert (found.status, found.scope) == ("UNSET", "instrument")


@pytest.mark.parametrize(("protocol", "compression"), [WAYS[0], WAYS[2]])
def test_a_request_joins_the_trace_of_its_caller_and_shows_its_error(
    collector: Receiver, protocol: str, compression: str
) -> None:
    root = span(Site("handle", "request"), 5, 0, 5, remote=REMOTE, error="ValueError")
    child = span(LAYER, 6, 5, 5, device=(DeviceInterval(0, 9, 2_500, 2_900),))
    late = span(SITE, 7, 5, 5, remote=REMOTE)
    with exporting(way_to(collector, protocol, compression)) as exporter:
        offer(exporter, [root, child])
        offer(exporter, [late])
        assert exporter.flush(60 * SECOND).complete
        ids = exporter.own.ids
    found = {span.name: span for span in collector.spans()}
    assert {span.trace_id for span in found.values()} == {REMOTE.trace_id}
    assert (found["handle"].parent_id, found["handle"].flags & 0x300) == (REMOTE.span_id, 0x300)
    assert (found["handle"].status, found["handle"].message) == ("ERROR", "ValueError")
    assert found["handle"].attributes["error.type"] == "ValueError"
    assert found["Linear"].parent_id == found["op"].parent_id == ids.span_id(5)
    assert found["Linear (device)"].parent_id == ids.span_id(6)
    assert found["Linear (device)"].end_ns == ORIGIN.realtime_of(2_900)


def test_the_resource_is_the_profiles_service_with_what_the_environment_says(
    collector: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=prod,service.namespace=nlp")
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    with exporting(way_to(collector)) as exporter:
        offer(exporter, tree(1))
        assert exporter.flush(60 * SECOND).complete
    (found,) = collector.spans()
    expected = {
        "service.name": "chat",
        "service.namespace": "nlp",
        "deployment.environment": "prod",
        "process.pid": os.getpid(),
        "host.name": "box",
        "telemetry.distro.name": "instrument",
        "telemetry.sdk.language": "python",
    }
    assert expected.items() <= found.resource.items()
    assert len(found.resource["service.instance.id"]) == 36


@pytest.mark.parametrize("theirs", ["shop", None])
def test_a_configured_tracer_provider_and_we_are_the_same_service_instance(
    collector: Receiver, monkeypatch: pytest.MonkeyPatch, theirs: str | None
) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    named = {"service.name": theirs} if theirs else {}
    resource = Resource.create({"team": "a", "service.instance.id": "chat-0", **named})
    with exporting(way_to(collector)) as exporter:
        offer(exporter, tree(1, site=Site("before")))
        assert exporter.flush(60 * SECOND).complete
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider(resource=resource))
        offer(exporter, tree(1, 10, Site("after")))
        assert exporter.flush(60 * SECOND).complete
    found = {span.name: span for span in collector.spans()}
    before, after = found["before"], found["after"]
    assert (before.resource["service.name"], before.resource.get("team")) == ("chat", None)
    assert (after.resource["service.name"], after.resource["team"]) == (theirs or "chat", "a")
    assert after.resource["service.instance.id"] == "chat-0"


def test_the_current_span_of_opentelemetry_is_the_parent() -> None:
    from opentelemetry.sdk.trace import TracerProvider

    assert read_current_span() is None
    with TracerProvider().get_tracer("theirs").start_as_current_span("theirs") as theirs:
        context = theirs.get_span_context()
        assert read_current_span() == RemoteParent(context.trace_id, context.span_id, int(context.trace_flags), True)
    assert read_current_span() is None


def test_never_two_server_spans_for_one_request(collector: Receiver) -> None:
    """A request has the kind SERVER only if no current span of OpenTelemetry has it."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider, sampling
    from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags

    tracer = TracerProvider().get_tracer("theirs")
    dropping = TracerProvider(sampler=sampling.ALWAYS_OFF).get_tracer("theirs")
    seen: dict[str, RemoteParent | None] = {"nothing": read_current_span()}
    caller = NonRecordingSpan(SpanContext(5, 6, is_remote=True, trace_flags=TraceFlags(1)))
    with trace.use_span(caller):
        seen["caller"] = read_current_span()
    for kind in SpanKind:
        with tracer.start_as_current_span("theirs", kind=kind):
            seen[kind.name.lower()] = read_current_span()
    with tracer.start_as_current_span("theirs", kind=SpanKind.SERVER), tracer.start_as_current_span("middleware"):
        seen["middleware"] = read_current_span()
    with dropping.start_as_current_span("theirs", kind=SpanKind.SERVER):
        seen["unsampled"] = read_current_span()
    with exporting(way_to(collector)) as exporter:
        for number, (name, parent) in enumerate(seen.items(), start=1):
            spans = tree(2, 10 * number, Site(name, "request"))
            spans[0].remote = parent
            offer(exporter, spans)
        assert exporter.flush(60 * SECOND).complete
    kinds = Counter((span.name, span.kind) for span in collector.spans())
    assert sorted(name for name, kind in kinds if kind == "SERVER") == [
        *("caller", "client", "internal", "nothing", "producer"),
    ]
    assert set(kinds.values()) == {1, 2}  # the second span of a tree is a request in a request, and no server either


def test_a_service_thread_imports_nothing_of_opentelemetry() -> None:
    script = """
        import sys
        from instrument.otlp import delivery as sending, service_sdk
        from instrument.profile.model import Otlp
        from instrument.otlp.packing import Body, make_span_attributes
        from instrument.recording.spans import Origin
        exporter = sending.Exporter(Otlp("http://127.0.0.1:1/v1/traces"), Origin(1, "s", 0, 0), dict)
        exporter.submit([Body(b"any", 1)])
        assert service_sdk.read_current_span() is None
        assert exporter.stop(0).dropped == 1
        found = [name for name in sys.modules if name.startswith(("opentelemetry", "http.client", "ssl", "grpc"))]
        assert not found, found
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=240)


def test_other_instrumentations_do_not_see_our_requests(collector: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import context

    seen: list[str] = []
    for name in ("connect", "request", "putrequest", "endheaders", "send", "getresponse"):
        monkeypatch.setattr(http.client.HTTPConnection, name, lambda *_, name=name: seen.append(name))
    suppressed: list[object] = []

    with exporting(way_to(collector)) as exporter:
        exporter.settled = lambda _: suppressed.append(context.get_value(context._SUPPRESS_INSTRUMENTATION_KEY))
        for _ in range(2):
            offer(exporter, tree(1))
            assert exporter.flush(60 * SECOND).complete
    assert seen == []
    assert suppressed == [True] * 4, "before each request and after it"
    assert context.get_value(context._SUPPRESS_INSTRUMENTATION_KEY) is None


# -------------------------------------------------------------------- collectors that misbehave

FATES: dict[str, tuple[Behave, str, str]] = {
    "takes it": (take, "exported", ""),
    "takes its time": (be_slow, "exported", ""),
    "takes it with a warning": (warn, "exported", "deprecated"),
    "takes it and mumbles": (mumble, "exported", ""),
    "takes it and dies in the answer": (promise_more, "exported", ""),
    "takes only small requests": (at_most(3), "exported", ""),
    "takes nothing at all of any size": (refuse_with(413), "failed", "413"),
    "is busy for a moment": (first(2, refuse_with(503, Retry_After="0")), "exported", ""),
    "is overloaded until a date": (
        first(1, refuse_with(429, Retry_After=email.utils.formatdate(0, usegmt=True))),
        "exported",
        "",
    ),
    "is busy without saying for how long": (first(1, refuse_with(502)), "exported", ""),
    "is busy for longer than one request may take": (first(1, refuse_with(503, Retry_After="2")), "exported", ""),
    "stays busy": (refuse_with(504, Retry_After="soon"), "failed", "504"),
    "hangs up once": (first(1, hang_up), "exported", ""),
    "always hangs up": (hang_up, "failed", "RemoteDisconnected"),
    "is gone": (refuse_with(404), "failed", "HTTP 404 Not Found"),
    "wants a key": (refuse_with(401), "failed", "401"),
    "does not understand": (refuse_with(400), "failed", "400"),
    "has moved": (refuse_with(307, Location="http://127.0.0.1:1/"), "failed", "redirected to http://127.0.0.1:1/"),
    "speaks no HTTP": (babble, "failed", "not HTTP"),
    "never answers": (swallow, "failed", "TimeoutError"),
    "answers for ever": (drip, "failed", "TimeoutError"),
}
UNTIL_THE_TIME_IS_UP = {"never answers": 1.0, "answers for ever": 1.0} | {
    "is busy for longer than one request may take": 1.5,
    # Two more tries, after a quarter of a second and a half; then the time that is left is less than the next pause.
    "stays busy": 1.35,
    "always hangs up": 1.35,
}
"""Seconds that a request may take if that decides the test; 30 elsewhere, enough for any machine."""


@pytest.mark.parametrize("what", FATES)
@pytest.mark.slow
def test_every_span_has_exactly_one_outcome_with_any_collector(what: str) -> None:
    behave, fate, reason = FATES[what]
    timeout_ns = round(UNTIL_THE_TIME_IS_UP.get(what, 30) * SECOND)
    for _ in range(10):
        with collecting(behave) as server, exporting(replace(server.settings, timeout_ns=timeout_ns)) as exporter:
            offer(exporter, tree(5))
            offer(exporter, tree(2, 100))
            delivery = exporter.flush(60 * SECOND)
            counts = adds_up(exporter)
        if "TimeoutError" not in delivery.reason or "TimeoutError" in reason:
            break  # else the machine had no time for the collector
    assert delivery.settled
    assert delivery.complete == (fate == "exported")
    assert counts[fate] == 7
    assert reason in delivery.reason
    assert bool(reason) == bool(delivery.reason) or fate == "exported"
    assert len(server.taken) == (7 if fate == "exported" else 0)


@pytest.mark.slow
def test_spans_wait_in_the_queue_as_long_as_the_collector_asks_for() -> None:
    tried_at: list[float] = []
    may_take = threading.Event()

    def refuse_once(handler: Handler, _: int) -> None:
        tried_at.append(time.monotonic())
        if len(tried_at) == 1:
            handler.answer(429, Retry_After="2")
        else:
            may_take.wait(60)
            handler.answer(200)

    with collecting(refuse_once) as server, exporting(server.settings) as exporter:
        for number in range(20):
            offer(exporter, tree(1_000, 1_000 * number))
        in_vain = exporter.flush(SECOND // 10)
        assert not in_vain.settled
        assert not in_vain.complete
        assert in_vain.pending == 20_000
        wait_until(lambda: len(tried_at) == 2)
        assert tried_at[1] - tried_at[0] >= 2  # nothing else was sent meanwhile
        assert exporter.flush(0).pending == 20_000
        may_take.set()
        assert exporter.flush(60 * SECOND).complete
        assert adds_up(exporter)["exported"] == 20_000


@pytest.mark.slow
def test_the_oldest_spans_go_while_a_collector_has_them_wait_for_ever_and_a_stop_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("instrument.otlp.span_queue.QUEUE_BYTES", 4 << 20)
    with collecting(refuse_with(503, Retry_After="86400")) as server:
        exporter = Exporter(server.settings, ORIGIN, lambda: THREADS)
        exporter.start()
        offer(exporter, tree(10))
        wait_until(lambda: server.tries == 1)
        for number in range(10):
            offer(exporter, tree(10_000, 1_000 + 10_000 * number))
        exporter.flush(60 * SECOND)  # at once: it would be in vain
        assert 10_000 < adds_up(exporter)["dropped"] < 90_000
        delivery = exporter.stop(5 * SECOND)
        assert server.tries == 1
    assert not delivery.complete
    assert delivery.pending == 0
    assert delivery.failed + delivery.dropped == 100_010
    assert "HTTP 503 Service Unavailable, asks to wait for 86400 s" in delivery.reason


@pytest.mark.slow
def test_a_collector_that_refuses_every_size_gets_few_requests() -> None:
    with collecting(refuse_with(413)) as server, exporting(server.settings) as exporter:
        for number in range(60):
            offer(exporter, tree(1_000, 1_000 * number))
        delivery = exporter.flush(60 * SECOND)
        assert (delivery.settled, delivery.failed) == (True, 60_000)
        first_tries = server.tries
        assert first_tries < 400
        server.behave = at_most(7)  # and once it takes some, it gets all
        offer(exporter, tree(20, 90_000))
        exporter.flush(60 * SECOND)
        assert adds_up(exporter)["failed"] == 60_020  # that one was as large as those refused before
        offer(exporter, tree(5, 91_000))
        exporter.flush(60 * SECOND)
        offer(exporter, tree(20, 92_000))
        exporter.flush(60 * SECOND)
        assert adds_up(exporter)["exported"] == 25


@pytest.mark.parametrize(("offered", "rejected"), [(5, 2), (1, 1)], ids=["a part", "more than it got"])
def test_a_collector_that_rejects_two_spans_is_believed_where_it_can_be(offered: int, rejected: int) -> None:
    with collecting(reject_two) as server, exporting(server.settings) as exporter:
        offer(exporter, tree(offered))
        delivery = exporter.flush(60 * SECOND)
        counts = adds_up(exporter)
    assert delivery == Delivery(offered, offered - rejected, rejected, 0, 0, 0, settled=True, reason="quota")
    assert not delivery.complete
    assert counts["rejected"] == rejected


def test_after_a_refused_size_later_requests_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.otlp.delivery.LEAST_REQUEST_BYTES", 100)
    with collecting(at_most(100)) as server, exporting(server.settings) as exporter:
        offer(exporter, tree(150))
        assert exporter.flush(60 * SECOND).complete
        tries = server.tries
        offer(exporter, tree(140, 1_000))
        assert exporter.flush(60 * SECOND).complete
        adds_up(exporter)
    assert tries == 3  # refused, and two halves
    assert server.tries - tries == 2  # no more refusals


def test_one_span_that_is_too_large_fails_alone() -> None:
    def refuse_the_large(handler: Handler, _: int) -> None:
        handler.answer(413 if "large" in handler.names else 200)

    with collecting(refuse_the_large) as server, exporting(server.settings) as exporter:
        offer(exporter, [*tree(6), span(Site("large"), 50, 1)])
        offer(exporter, tree(4, 100))
        delivery = exporter.flush(60 * SECOND)
        counts = adds_up(exporter)
    assert (delivery.exported, delivery.failed) == (10, 1)
    assert (counts["exported"], counts["failed"]) == (10, 1)


def test_a_request_keeps_within_both_limits() -> None:
    sizes: list[tuple[int, int]] = []

    def measure(handler: Handler, spans: int) -> None:
        sizes.append((spans, int(handler.headers["Content-Length"])))
        handler.answer(200)

    with collecting(measure) as server:
        settings = Otlp(server.settings.endpoint, compression="none")
        with exporting(settings) as exporter:
            offer(exporter, tree(9_000, site=Site("s", "op")))
            offer(exporter, tree(40, 20_000, attributes={"text": "x" * 50_000}))
            assert exporter.flush(60 * SECOND).complete
    assert sum(spans for spans, _ in sizes) == 9_040
    assert max(spans for spans, _ in sizes) <= REQUEST_SPANS
    assert max(size for _, size in sizes) <= REQUEST_BYTES + 2_048  # the resource and the scope
    assert len(sizes) < 12


def test_a_refusal_that_comes_before_the_body_was_read_is_understood() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse_early() -> None:
            for _ in range(3):  # the whole, then two halves
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1_000)
                    connection.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        thread = threading.Thread(target=refuse_early)
        thread.start()
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        with exporting(Otlp(endpoint, compression="none", timeout_ns=30 * SECOND)) as exporter:
            offer(exporter, tree(2, attributes={"text": "x" * 200_000}))
            delivery = exporter.flush(60 * SECOND)
        thread.join()
    assert (delivery.failed, delivery.reason) == (2, "HTTP 413 Too Large")


def test_the_spans_of_several_processes_come_over_one_connection_each_under_its_own_resource() -> None:
    with collecting(reject_two) as server, exporting(server.settings) as exporter:
        noted: list[tuple[Source, int]] = []
        exporter.settled = lambda source: noted.append((source, source.counts["sending"]))
        sources = []
        for number in range(3):
            ids = Ids((number, number, number), f"process-{number}")
            resource = {"service.instance.id": ids.instance, "service.name": "shop"}
            sources.append(Source(ids, ORIGIN, lambda: THREADS, lambda found=resource: found))
        for source in sources:
            offer(exporter, tree(50), source)
        offer(exporter, tree(5))
        delivery = exporter.flush(60 * SECOND)
        assert (delivery.exported, delivery.rejected) == (155 - 4 * 2, 4 * 2)
        assert server.connections == 1
    assert {name: len(spans) for name, spans in server.spans.items()} == {
        **dict.fromkeys(("process-0", "process-1", "process-2"), 50),
        exporter.own.ids.instance: 5,
    }
    assert [sending for source, sending in noted if source is exporter.own] == [5, 0]
    for source in sources:
        assert source.counts == {"offered": 50, "exported": 48, "rejected": 2, "pending": 0, "sending": 0}
        sent = server.spans[source.ids.instance]
        assert sent[0].span_id == source.ids.span_id(1).to_bytes(8, "big")


def test_packed_requests_are_sent_under_the_resource_that_they_have_and_in_halves_where_they_are_too_large() -> None:
    with collecting(at_most(5)) as server, exporting(server.settings) as exporter:
        sources = [
            Source(Ids(), ORIGIN, dict, lambda name=name: {"service.instance.id": name})
            for name in ("process-0", "process-1")
        ]
        for source in sources:
            exporter.submit(bodies_of(source, tree(13)), source)
        offer(exporter, tree(2))
        exporter.submit([])
        delivery = exporter.flush(60 * SECOND)
        adds_up(exporter)
        assert delivery == Delivery(28, 28, 0, 0, 0, 0, settled=True)
        assert {source.counts["exported"] for source in sources} == {13}
    for source in sources:
        sent = server.spans[str(source.resource()["service.instance.id"])]
        assert {one.span_id for one in sent} == {
            source.ids.span_id(number).to_bytes(8, "big") for number in range(1, 14)
        }


def test_the_oldest_of_too_many_packed_requests_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = Exporter(Otlp(), ORIGIN, dict)
    bodies = [
        next(iter(bodies_of(exporter.own, tree(3, 1 + 10 * number, Site(f"tree {number}"))))) for number in range(9)
    ]
    monkeypatch.setattr("instrument.otlp.span_queue.QUEUE_BYTES", sum(len(request) for request, _ in bodies[5:]))
    exporter.submit(bodies)
    counts = adds_up(exporter)
    assert (counts["pending"], counts["dropped"]) == (12, 15)
    with collecting(take) as server:
        exporter._settings = server.settings
        exporter.start()
        assert exporter.stop(60 * SECOND).exported == 12
    assert set(server.taken) == {f"tree {number}" for number in range(5, 9)}


def bodies_of(source: Source, spans: Sequence[Span]) -> list[Body]:
    """The spans packed as requests."""
    return list(source.pack_requests(columns_of_spans(spans), np.arange(len(spans)), REQUEST_BYTES))


def test_the_headers_of_the_profile_are_sent_on_one_kept_connection() -> None:
    with collecting(take) as server:
        settings = Otlp(server.settings.endpoint, headers=(("Api-Key", "s3cret"), ("X-Team", "a b")))
        with exporting(settings) as exporter:
            for number in (1, 2, 3):
                offer(exporter, tree(1, number))
                assert exporter.flush(60 * SECOND).complete
        assert len(server.open) == 1
    sent = server.headers[-1]
    assert (sent["Api-Key"], sent["X-Team"]) == ("s3cret", "a b")
    assert (sent["Content-Type"], sent["Content-Encoding"]) == ("application/x-protobuf", "gzip")


def test_a_kept_connection_that_the_collector_has_closed_costs_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(senders, "_FIRST_BACK_OFF_S", 3600)
    with collecting(take) as server, exporting(server.settings) as exporter:
        offer(exporter, tree(1))
        assert exporter.flush(60 * SECOND).complete
        for connection in server.open:
            hang_up_now(connection)
        offer(exporter, tree(1, 10))
        assert exporter.flush(60 * SECOND).complete


@pytest.mark.slow
def test_a_collector_that_dies_and_comes_back_gets_what_is_offered_then() -> None:
    port = free_port()
    with exporting(Otlp(f"http://127.0.0.1:{port}/v1/traces", timeout_ns=2 * SECOND)) as exporter:
        with collecting(take, port) as server:
            offer(exporter, tree(2))
            assert exporter.flush(60 * SECOND).complete
            assert server.taken == ["op"] * 2
        offer(exporter, tree(3, 10))
        lost = exporter.flush(60 * SECOND)
        assert (lost.settled, lost.failed) == (True, 3)
        with collecting(take, port) as server:
            offer(exporter, tree(4, 20))
            assert exporter.flush(60 * SECOND).exported == 6
            assert server.taken == ["op"] * 4
        adds_up(exporter)


def test_a_collector_that_comes_back_in_time_gets_everything() -> None:
    port = free_port()
    with exporting(Otlp(f"http://127.0.0.1:{port}/v1/traces", timeout_ns=60 * SECOND)) as exporter:
        offer(exporter, tree(5))
        assert not exporter.flush(SECOND // 10).settled
        assert adds_up(exporter)["pending"] == 5
        with collecting(take, port):
            assert exporter.flush(60 * SECOND).complete


BLOCKED = {name: FATES[name][0] for name in ("never answers", "answers for ever", "stays busy", "always hangs up")}


def keeps_within(bound_s: float, stop: Callable[[], float]) -> bool:
    """Return True if a stop can keep within the bound. A machine with other work may be late, but not every time."""
    return any(stop() < bound_s for _ in range(10))


@pytest.mark.parametrize("behave", BLOCKED.values(), ids=BLOCKED.keys())
def test_stop_keeps_to_its_bound_and_counts_what_it_gave_up(behave: Behave) -> None:
    def stop() -> float:
        with collecting(behave) as server:
            exporter = Exporter(server.settings, ORIGIN, dict)
            exporter.start()
            offer(exporter, tree(5))
            unsettled = exporter.flush(SECOND // 10)
            assert (unsettled.settled, unsettled.pending) == (False, 5)
            wait_until(lambda: server.tries > 0)
            for number in range(10):
                offer(exporter, tree(2, 100 + 10 * number))
            began = time.monotonic()
            delivery = exporter.stop(SECOND // 4)
            took_s = time.monotonic() - began
            counts = adds_up(exporter)
            assert counts["pending"] == 0
            assert (delivery.failed + delivery.dropped, delivery.failed >= 5, delivery.complete) == (25, True, False)
            assert delivery.reason
        wait_until(lambda: "instrument-otlp" not in {thread.name for thread in threading.enumerate()})
        return took_s

    assert keeps_within(0.6, stop)


def test_stop_uses_the_time_that_it_has_to_deliver() -> None:
    with collecting(be_slow) as server:
        exporter = Exporter(server.settings, ORIGIN, dict)
        exporter.start()
        offer(exporter, tree(5))
        assert exporter.stop(60 * SECOND) == Delivery(5, 5, 0, 0, 0, 0, settled=True)


def test_stop_does_not_wait_out_a_long_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(senders, "_FIRST_BACK_OFF_S", 3600)
    port = free_port()
    exporter = Exporter(Otlp(f"http://127.0.0.1:{port}/v1/traces", timeout_ns=2 * 3600 * SECOND), ORIGIN, dict)
    exporter.start()
    offer(exporter, tree(5))
    exporter.flush(SECOND)  # by now it waits for about an hour
    with collecting(take, port):
        assert exporter.stop(60 * SECOND).complete


def test_after_stop_offers_count_as_dropped_until_the_next_start() -> None:
    with collecting(take) as server:
        exporter = Exporter(server.settings, ORIGIN, dict)
        assert offer(exporter, tree(1))
        assert not exporter.flush(0).settled  # nobody is there to send it
        exporter.start()
        exporter.start()
        assert exporter.stop(60 * SECOND).complete
        assert not offer(exporter, tree(2, 10))
        assert adds_up(exporter)["dropped"] == 2
        exporter.start()
        assert offer(exporter, tree(3, 20))
        assert exporter.stop(60 * SECOND).exported == 4
        assert adds_up(exporter)["dropped"] == 2


def test_device_intervals_count_as_the_spans_that_they_become() -> None:
    with collecting(take) as server, exporting(server.settings) as exporter:
        offer(exporter, [span(device=(DeviceInterval(0, 1, 1, 2), DeviceInterval(0, 2, 1, 2)))])
        assert exporter.flush(60 * SECOND).exported == 3
        adds_up(exporter)
    assert server.taken == ["op", "op (device)", "op (device)"]


@pytest.mark.slow
def test_sums_hold_while_threads_offer_and_the_collector_wavers() -> None:
    def waver(handler: Handler, spans: int) -> None:
        (take, refuse_with(400), reject_two, hang_up, at_most(50))[handler.server.tries % 5](handler, spans)

    with collecting(waver) as server, exporting(server.settings) as exporter:

        def serve() -> None:
            for number in range(100):
                offer(exporter, tree(1 + number % 30, number * 100))
                adds_up(exporter)

        threads = [threading.Thread(target=serve) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            exporter.flush(SECOND // 50)
        for thread in threads:
            thread.join()
        delivery = exporter.flush(60 * SECOND)
        counts = adds_up(exporter)
    assert delivery.settled
    assert counts["offered"] == 4 * sum(1 + number % 30 for number in range(100))
    assert counts["pending"] == 0
    assert counts["exported"] + counts["rejected"] == len(server.taken)


def test_a_signal_handler_may_stop_the_exporter_while_its_thread_holds_the_lock() -> None:
    exporter = Exporter(Otlp(), ORIGIN, dict)
    assert offer(exporter, tree(3))
    with exporter._queue.lock:
        assert exporter.stop(0).dropped == 3
    assert adds_up(exporter)["offered"] == 3


def test_a_span_that_cannot_be_said_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(site: Site, given: Mapping[str, object], *facts: Any) -> dict[str, object]:
        if "what" in given:
            raise ValueError("no words for it")
        return make_span_attributes(site, given, *facts)

    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr(packed_spans, "make_span_attributes", fail)
    with collecting(take) as server, exporting(server.settings) as exporter:
        offer(exporter, [*tree(2), span(span_id=50, root_id=50, attributes={"what": 1}), *tree(2, 10)])
        delivery = exporter.flush(60 * SECOND)
        adds_up(exporter)
    assert (delivery.exported, delivery.failed) == (4, 1)
    assert FAULTS.count_by_place() == {"packing of spans": 1}
    FAULTS.clear()


def test_a_fault_of_ours_fails_what_is_under_way_and_not_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    with collecting(take) as server, exporting(server.settings) as exporter:
        with monkeypatch.context() as patch:
            patch.setattr(senders, "compressor", None)
            offer(exporter, tree(2))
            assert exporter.flush(60 * SECOND).failed == 2
        offer(exporter, tree(2, 10))
        assert exporter.flush(60 * SECOND).exported == 2
        adds_up(exporter)
    assert FAULTS.count_by_place() == {"OTLP export": 1}
    FAULTS.clear()


def test_a_failing_collector_is_logged_once_and_its_recovery_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "instrument")
    behaviours = [refuse_with(400), refuse_with(404), take, take, refuse_with(400), take]

    def follow(handler: Handler, spans: int) -> None:
        behaviours[handler.server.tries - 1](handler, spans)

    with collecting(follow) as server, exporting(server.settings) as exporter:
        for number, _ in enumerate(behaviours):
            offer(exporter, tree(1, 1 + number))
            exporter.flush(60 * SECOND)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "spans do not reach the OpenTelemetry collector (HTTP 400 Bad Request); the service is not affected, "
        "losses are counted",
        "spans reach the OpenTelemetry collector again",
    ]


def test_few_spans_are_sent_without_being_asked() -> None:
    with collecting(take) as server, exporting(server.settings) as exporter:
        offer(exporter, tree(1))
        wait_until(lambda: server.taken == ["op"])


def test_many_spans_are_sent_at_once_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.otlp.delivery._BATCH_DELAY_S", 3600)
    with collecting(take) as server, exporting(server.settings) as exporter:
        offer(exporter, tree(2_000))
        wait_until(lambda: server.taken == ["op"] * 2_000)


# -------------------------------------------------------------------- settings that cannot work, TLS, gRPC, fork


@pytest.mark.parametrize(
    "settings",
    [
        Otlp("localhost:4318"),
        Otlp("ftp://localhost/"),
        Otlp("http:///v1/traces"),
        Otlp("http://localhost:99999/"),
        Otlp("http://[::1/"),
        Otlp("http://localhost/v1 traces"),
        Otlp("http://localhost/", headers=(("A", "b\r\nX: y"),)),
        Otlp("http://localhost/", headers=(("A", "ü"),)),
        Otlp("http://localhost/", protocol="http/json"),
        Otlp("http://localhost/", protocol="grpc", headers=(("trace-bin", "AA=="),)),
    ],
    ids=repr,
)
def test_settings_that_cannot_work_are_refused(settings: Otlp) -> None:
    with pytest.raises(ExportError):
        Exporter(settings, ORIGIN, dict)


def test_grpc_without_its_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r"install instrument-sdk\[grpc\]"):
        Exporter(Otlp("http://localhost:4317", "grpc"), ORIGIN, dict)


def test_spans_after_a_step_of_the_wall_clock_have_the_new_time_and_earlier_ones_the_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look(at_s: int, wall_ns: int) -> None:
        monkeypatch.setattr("instrument.clock.read_clocks", lambda: (at_s * SECOND, wall_ns))
        source.update_clock_origin()

    with collecting(take) as server, exporting(server.settings) as exporter:
        source = exporter.own
        source.origin = replace(ORIGIN, monotonic_ns=0, realtime_ns=0)
        look(1000, 1000 * SECOND)
        look(1001, 1001 * SECOND + SECOND // 10)  # drifts; not yet
        source.renewed_ns = 1001 * SECOND
        look(1030, 1030 * SECOND + SECOND // 10)
        assert source.origin.realtime_of(0) == 0
        look(1062, 1062 * SECOND + SECOND // 10)
        assert source.origin.realtime_of(0) == SECOND // 10
        look(1063, 3600 * SECOND)
        begun = [[span(SITE, at_s, 0, at_s, start_ns=at_s * SECOND, end_ns=1064 * SECOND)] for at_s in (1061, 1063)]
        for spans in begun:
            offer(exporter, spans)
        assert exporter.flush(60 * SECOND).exported == 2
    sent = [found.start_time_unix_nano for of in server.spans.values() for found in of]
    starts = [spans[0].start_ns for spans in begun]
    assert sent == [starts[0] + SECOND // 10, starts[1] + (3600 - 1063) * SECOND]


def test_a_request_that_waits_long_for_an_answer_is_in_the_log_before_its_time_is_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("instrument.otlp.delivery.SILENCE_NS", 0)
    with collecting(swallow) as server, exporting(server.settings) as exporter:
        offer(exporter, tree(1))
        exporter.send_soon()
        wait_until(lambda: server.tries > 0)
        exporter.log_collector_silence()
        exporter.log_collector_silence()
        assert caplog.text.count("spans do not reach the OpenTelemetry collector (no answer yet)") == 1


def test_spans_given_up_by_stop_are_in_the_log_with_the_last_reason(caplog: pytest.LogCaptureFixture) -> None:
    with exporting(Otlp(f"http://127.0.0.1:{free_port()}/v1/traces", timeout_ns=60 * SECOND)) as exporter:
        offer(exporter, tree(1))
        exporter.send_soon()
        wait_until(lambda: exporter._sender.obstacle != "")
        assert "Connection refused" in exporter.stop(0).reason
    assert caplog.text.count("spans do not reach the OpenTelemetry collector (ConnectionRefusedError") == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes the certificate, is not installed")
def test_https_trusts_what_the_settings_name_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(senders, "_FIRST_BACK_OFF_S", 3600)  # longer than the time of a request: it is tried once
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    alternative = ["-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*make.split(), *alternative, *files], check=True, capture_output=True)
    with collecting(take) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        settings = Otlp(f"https://localhost:{server.server_port}/v1/traces", timeout_ns=30 * SECOND)
        with exporting(settings) as exporter:
            offer(exporter, tree(1))
            distrusted = exporter.flush(60 * SECOND)
            assert (distrusted.failed, "CERTIFICATE_VERIFY_FAILED" in distrusted.reason) == (1, True)
        with exporting(replace(settings, certificate=str(certificate))) as exporter:
            offer(exporter, tree(2, 10))
            assert exporter.flush(60 * SECOND).exported == 2


@pytest.mark.parametrize("listening", [False, True], ids=["refuses", "never answers"])
def test_grpc_to_a_dead_collector_stops_within_its_bound(listening: bool, caplog: pytest.LogCaptureFixture) -> None:
    def stop() -> float:
        settings = Otlp(f"http://127.0.0.1:{silent.getsockname()[1]}", "grpc", timeout_ns=60 * SECOND)
        exporter = Exporter(settings, ORIGIN, dict)
        exporter.start()
        offer(exporter, tree(5))
        assert not exporter.flush(SECOND // 2).settled
        began = time.monotonic()
        delivery = exporter.stop(SECOND // 2)
        took_s = time.monotonic() - began
        assert (delivery.failed, delivery.pending) == (5, 0)
        adds_up(exporter)
        wait_until(lambda: "instrument-otlp" not in {thread.name for thread in threading.enumerate()})
        return took_s

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listening:
            silent.listen()
        assert keeps_within(1, stop)
    assert [record.name for record in caplog.records if record.name.startswith("opentelemetry")] == []


def test_grpc_says_why_it_failed() -> None:
    settings = Otlp(f"http://127.0.0.1:{free_port()}", "grpc", timeout_ns=2 * SECOND)
    with exporting(settings) as exporter:
        offer(exporter, tree(5))
        delivery = exporter.flush(60 * SECOND)
    assert (delivery.settled, delivery.failed) == (True, 5)
    assert "UNAVAILABLE" in delivery.reason


def test_by_grpc_rejections_are_counted_and_a_collector_that_asks_for_time_gets_it() -> None:
    grpc = pytest.importorskip("grpc")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

    class Spans(services.TraceServiceServicer):  # type: ignore[misc]
        tries_at: ClassVar[list[float]] = []

        def Export(self, request: Any, context: Any) -> Any:
            self.tries_at.append(time.monotonic())
            if len(self.tries_at) == 1:
                context.set_trailing_metadata([("google.rpc.retryinfo-bin", b"\x0a\x02\x08\x01")])
                context.abort(grpc.StatusCode.UNAVAILABLE, "too busy")
            answer = messages.ExportTraceServiceResponse()
            answer.partial_success.rejected_spans = 2
            answer.partial_success.error_message = "too old"
            return answer

    server = grpc.server(ThreadPoolExecutor(2))
    services.add_TraceServiceServicer_to_server(Spans(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with exporting(Otlp(f"http://127.0.0.1:{port}", "grpc", timeout_ns=5 * SECOND)) as exporter:
            offer(exporter, tree(5))
            delivery = exporter.flush(60 * SECOND)
    finally:
        server.stop(None).wait()
    assert (delivery.exported, delivery.rejected, delivery.reason) == (3, 2, "too old")
    first, second = Spans.tries_at
    assert second - first >= 1


def length_delimited(field: int, content: bytes) -> bytes:
    return bytes([field << 3 | 2, len(content)]) + content


RETRY_INFO = length_delimited(1, b"type.googleapis.com/google.rpc.RetryInfo") + length_delimited(
    2, length_delimited(1, b"\x10\x80\xc6\x86\x8f\x01")
)
"""A detail of a status: try again after 0.3 s."""
IN_0_3_S = ("grpc-status-details-bin", b"\x08\x08" + length_delimited(3, RETRY_INFO))


@pytest.mark.parametrize(
    ("status", "details", "told", "exported", "tries"),
    [
        ("RESOURCE_EXHAUSTED", "the quota of this month", [("own-bin", b"\x0a\x02\x08\x01")], 0, 1),
        ("RESOURCE_EXHAUSTED", "too busy", [IN_0_3_S], 5, 2),
        ("RESOURCE_EXHAUSTED", "gRPC message exceeds maximum size 4: 9", [], 5, 3),
        ("OUT_OF_RANGE", "Error, decoded message length too large: found 9 bytes, the limit is: 4 bytes", [], 5, 3),
        ("OUT_OF_RANGE", "beyond the end", [], 5, 2),
        ("PERMISSION_DENIED", "", [IN_0_3_S], 0, 1),
    ],
)
def test_by_grpc_a_status_is_taken_as_otlp_says(
    status: str, details: str, told: list[tuple[str, bytes]], exported: int, tries: int
) -> None:
    grpc = pytest.importorskip("grpc")
    tries_at = list[float]()

    def export(request: bytes, context: Any) -> bytes:
        tries_at.append(time.monotonic())
        if len(tries_at) == 1:
            context.set_trailing_metadata(told)
            context.abort(grpc.StatusCode[status], details)
        return b""

    served = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    server = grpc.server(ThreadPoolExecutor(2))
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, served)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with exporting(Otlp(f"http://127.0.0.1:{port}", "grpc", timeout_ns=5 * SECOND)) as exporter:
            offer(exporter, tree(5))
            delivery = exporter.flush(60 * SECOND)
    finally:
        server.stop(None).wait()
    assert (delivery.exported, delivery.failed, len(tries_at)) == (exported, 5 - exported, tries)
    assert exported or delivery.reason == f"gRPC {status}: {details}"
    assert not exported or IN_0_3_S not in told or tries_at[1] - tries_at[0] >= 0.3


def test_files_that_are_empty_for_a_moment_do_not_end_the_process_that_exports_by_grpc(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    files = {name: str(tmp_path / name) for name in ("client_certificate", "client_key")}
    for name, text in zip(files, ("a certificate", ""), strict=True):
        Path(files[name]).write_text(text)
    settings = Otlp(f"https://127.0.0.1:{free_port()}", "grpc", timeout_ns=SECOND // 2, **files)
    with exporting(settings) as exporter:
        offer(exporter, tree(1))
        assert f"{files['client_key']} is empty" in exporter.flush(60 * SECOND).reason


FORK = """
    import json, os, sys, time
    import numpy as np
    from instrument.otlp import delivery as sending
    from instrument.profile.model import Otlp
    from instrument.recording.spans import Origin, Site, Span
    from instrument.trace.trace import columns_of_spans

    def tree(name, number):
        return [Span(Site(name), number, 0, number, 1, 0, 1, 2, 1, 1)]

    exporter = sending.Exporter(Otlp(sys.argv[1], sys.argv[2]), Origin(1, "s", 0, time.time_ns()), dict)
    os.register_at_fork(after_in_child=exporter.after_fork_in_child)
    exporter.start()
    def offer(spans):
        exporter.submit_rows(exporter.own, columns_of_spans(spans), np.arange(len(spans)))

    offer(tree("before", 1))
    assert exporter.flush(60 * 10**9).complete
    offer(tree("queued", 2))
    child = os.fork()
    if not child:
        assert exporter.count_fates()["offered"] == 0
        offer(tree("child", 2))
        assert exporter.count_fates()["pending"] == 1
        exporter.start()
        delivery = exporter.stop(60 * 10**9)
        os._exit(0 if delivery.complete and delivery.exported == 1 else 1)
    offer(tree("parent", 3))
    assert exporter.stop(60 * 10**9).exported == 3
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("protocol", "compression"), [WAYS[0], WAYS[2]])
def test_a_fork_in_the_middle_gives_two_exporters(collector: Receiver, protocol: str, compression: str) -> None:
    settings = way_to(collector, protocol, compression)
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORK), settings.endpoint, protocol]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stderr
    found = {span.name: span for span in collector.spans()}
    assert sorted(span.name for span in collector.spans()) == ["before", "child", "parent", "queued"]
    assert len({span.span_id for span in found.values()}) == 4
    assert len({span.trace_id for span in found.values()}) == 4
    parent, child = found["parent"].resource, found["child"].resource
    assert parent["service.instance.id"] == found["before"].resource["service.instance.id"]
    assert parent["service.instance.id"] != child["service.instance.id"]
    assert parent["process.pid"] != child["process.pid"]


def test_spans_that_were_given_up_before_their_answer_came_have_one_fate() -> None:
    queue, source = RequestQueue(), Source(Ids(), ORIGIN, dict, dict)
    for spans in (1, 2):
        queue.offer_request(Body(b"any", spans), source)
    with queue.lock:
        answered, pending = queue.take_next_request(), queue.take_next_request()
        assert answered is not None
        assert pending is not None
        queue.settle_request(answered, Response(taken=True))
        queue.is_closed = True
        queue.give_up_requests("stopped")
        queue.settle_request(pending, Response(taken=True, rejected=1))
    counts = queue.count_fates()
    assert (counts["exported"], counts["failed"], counts["rejected"]) == (1, 2, 0)
    assert (counts["pending"], source.counts["pending"]) == (0, 0)


def test_the_export_next_to_a_service_rests_between_stretches_of_work_and_that_of_an_agent_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rests: list[float] = []
    monkeypatch.setattr(threads, "WORK_SLICE_S", -1)
    monkeypatch.setattr(threads, "sleep", rests.append)
    with collecting(take) as server:
        for detects in (True, False):
            exporter = Exporter(server.settings, ORIGIN, dict, detects=detects)
            for number in range(5):
                offer(exporter, tree(3, 1 + 10 * number))
                exporter.count_fates()
    assert len(rests) == 5
