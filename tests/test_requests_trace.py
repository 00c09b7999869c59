"""A request in the trace of its caller, and what the service sends in the trace of the request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from otlp_receiver import receiver
from otlp_spans import links_of
from readback import spans_in

import instrument
from instrument.instrumentors.requests import asgi_wsgi_apps
from instrument.instrumentors.requests.exchange import Exchanges
from instrument.instrumentors.requests.propagation import read_w3c_caller
from instrument.otlp.export_facts import Ids
from instrument.profile.model import Capture, Profile, RequestsRule
from instrument.recorder.recorder import RECORDER
from instrument.recording.spans import Span
from instrument.recording.trace_context import encode_parent, parse_parent

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture
def session() -> Iterator[instrument.Session]:
    instrument.start(Profile(requests=(RequestsRule(),), capture=Capture(sample=1.0)))
    yield instrument.session()
    instrument.stop()


def serve(app: Any, headers: dict[str, str], rule: RequestsRule | None = None) -> list[dict[str, Any]]:
    """Return the messages that an ASGI app sends for a request with these headers."""
    sent = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "GET", "path": "/", "scheme": "http", "server": ("127.0.0.1", 80),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    asyncio.run(asgi_wsgi_apps.AsgiApp(app, Exchanges(rule or RequestsRule()))(scope, receive, send))
    return sent


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def request_of(session: instrument.Session) -> Span:
    (span,) = [span for span in spans_in(RECORDER) if span.site.kind == "request"]
    return span


def test_a_request_waits_while_its_app_is_suspended(session: instrument.Session) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.002)
        await answer(scope, receive, send)

    serve(app, {})
    span = request_of(session)
    assert 0 < span.active_ns < span.total_ns == span.self_ns
    (row,) = [row for row in RECORDER.tally().iterate_totals() if row.path[-1].kind == "request"]
    assert row.totals.waiting_ns == span.total_ns - span.active_ns


@pytest.mark.parametrize(
    ("header", "is_taken"),
    [
        (CALLER, True),
        (CALLER.replace("-01", "-00"), True),
        (f"cc-{TRACE}-00f067aa0ba902b7-01-what comes later", True),
        (f"{CALLER}-more", False),
        (f"ff-{TRACE}-00f067aa0ba902b7-01", False),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (CALLER.upper(), False),
        ("nothing of the kind", False),
    ],
)
def test_a_sound_traceparent_is_followed_and_another_one_is_none(
    session: instrument.Session, header: str, is_taken: bool
) -> None:
    serve(answer, {"traceparent": header})
    remote = request_of(session).remote
    assert (remote is not None and f"{remote.trace_id:032x}" == TRACE) == is_taken


def test_a_request_may_be_linked_to_its_caller_or_know_nothing_of_it(session: instrument.Session) -> None:
    serve(answer, {"traceparent": CALLER}, RequestsRule(traceparent="link"))
    span = request_of(session)
    assert (span.remote, links_of(span, Ids())) == (None, [(int(TRACE, 16), 0x00F067AA0BA902B7, "")])


def test_a_request_whose_rule_is_off_knows_nothing_of_its_caller(session: instrument.Session) -> None:
    serve(answer, {"traceparent": CALLER}, RequestsRule(traceparent="off"))
    span = request_of(session)
    assert (span.remote, links_of(span, Ids())) == (None, [])


def test_headers_sent_by_hand_continue_the_trace_of_the_caller(session: instrument.Session) -> None:
    sent: dict[str, str] = {}

    async def calls(scope: Any, receive: Any, send: Any) -> None:
        with instrument.scope("call"):
            instrument.inject(sent)
        await answer(scope, receive, send)

    serve(calls, {"traceparent": CALLER})
    (call,) = [span for span in spans_in(RECORDER) if span.site.name == "call"]
    told = parse_parent(sent["traceparent"].encode())
    assert told is not None
    assert (told.trace_id, told.span_id, told.flags) == (
        int(TRACE, 16),
        session.recorded.id_generator().span_id(call.span_id),
        1,
    )
    instrument.inject(sent := {})
    assert sent == {}


def test_clients_and_spans_of_opentelemetry_continue_the_request(session: instrument.Session) -> None:
    from opentelemetry import propagate, trace
    from opentelemetry.sdk.trace import TracerProvider

    tracer = TracerProvider().get_tracer("service")
    sent: dict[str, str] = {}
    made = []

    async def calls(scope: Any, receive: Any, send: Any) -> None:
        propagate.inject(sent)
        with tracer.start_as_current_span("theirs") as span:
            made.append(span)
        await answer(scope, receive, send)

    serve(calls, {})
    span = request_of(session)
    trace_id, own = session.recorded.id_generator().make_root_ids(span)
    told = parse_parent(sent["traceparent"].encode())
    assert told is not None
    assert (told.trace_id, told.span_id, told.flags) == (trace_id, own, 3)
    assert (made[0].parent.trace_id, made[0].parent.span_id) == (trace_id, own)
    assert span.remote is None
    assert not trace.get_current_span().get_span_context().is_valid


def test_a_request_below_a_span_of_opentelemetry_is_its_child(session: instrument.Session) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    from instrument.otlp import service_sdk

    RECORDER.remote_parent = lambda: encode_parent(service_sdk.read_current_span())
    with TracerProvider().get_tracer("service").start_as_current_span("theirs") as around:
        serve(answer, {"traceparent": CALLER})
    remote = request_of(session).remote
    assert remote is not None
    assert (remote.span_id, remote.is_local) == (around.get_span_context().span_id, True)


def secret_request(requests: str, tmp_path: Any) -> str:
    """All that comes out of a session in which one request was full of secrets."""
    from instrument.profile.keys import loads

    path = tmp_path / "trace.json"
    canaries = {name: f"{name} c4n4ry" for name in ("authorization", "cookie", "x-tenant", "user-agent", "referer")}

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await answer(scope, receive, send)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"body c4n4ry", "more_body": False}

    async def send(_: dict[str, Any]) -> None:
        pass

    session = instrument.start(loads(requests, environ={}))
    try:
        (rule,) = session.profile.requests
        scope = {
            "type": "http", "method": "GET-c4n4ry", "path": "/items/c4n4ry", "scheme": "http", "server": ("::1", 80),
            "query_string": b"key=c4n4ry", "client": ("c4n4ry", 1),
            "headers": [(name.encode(), value.encode()) for name, value in canaries.items()],
        }  # fmt: skip
        asyncio.run(asgi_wsgi_apps.AsgiApp(reads, Exchanges(rule))(scope, receive, send))
        instrument.dump(path)
        return path.read_text() + instrument.summary(views=["brief", "requests", "events"])
    finally:
        instrument.stop()


def test_nothing_that_a_caller_sends_comes_out_unless_it_is_named(tmp_path: Any) -> None:
    told = secret_request("requests: auto", tmp_path)
    assert ("_OTHER" in told, "c4n4ry" in told) == (True, False)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("http.request.header.x-tenant", "x-tenant c4n4ry"),
        ("url.path", "/items/c4n4ry"),
        ("url.query", "key=c4n4ry"),
        ("client.address", "c4n4ry"),
        ("user_agent.original", "user-agent c4n4ry"),
    ],
)
def test_a_trace_has_exactly_the_targets_of_the_profile(name: str, told: str, tmp_path: Any) -> None:
    found = secret_request(f"requests: {{attributes: [{name}]}}", tmp_path)
    assert told in found
    assert found.count("c4n4ry") == 1


def test_another_propagator_of_opentelemetry_is_asked_where_the_environment_names_it(
    session: instrument.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.propagators.textmap import TextMapPropagator

    class Reversed(TextMapPropagator):
        """One that has its header the other way round."""

        fields = {"x-trace"}  # noqa: RUF012 - as the interface has it

        def inject(self, *_: Any, **__: Any) -> None:
            raise NotImplementedError

        def extract(self, carrier: Any, context: Any = None, getter: Any = None) -> Context:
            trace_id = int(carrier["x-trace"][::-1], 16)
            span = trace.SpanContext(trace_id, 7, is_remote=True, trace_flags=trace.TraceFlags(1))
            return trace.set_span_in_context(trace.NonRecordingSpan(span), context)

    before = propagate.get_global_textmap()
    monkeypatch.setenv("OTEL_PROPAGATORS", "reversed,baggage")
    propagate.set_global_textmap(Reversed())
    try:
        serve(answer, {"x-trace": TRACE[::-1], "traceparent": CALLER.replace("4bf9", "1111")})
    finally:
        propagate.set_global_textmap(before)
    remote = request_of(session).remote
    assert remote is not None
    assert (f"{remote.trace_id:032x}", remote.span_id) == (TRACE, 7)


# -------------------------------------------------------------------- the state of the caller's trace

STATE = "dd=s:1;p:00f067aa0ba902b7, rojo=00f067aa0ba902b7,0/tenant@ot=th:8"


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_spans_of_a_request_bear_the_state_of_its_callers_trace(protocol: str) -> None:
    from instrument.profile.keys import loads

    async def calls(scope: Any, receive: Any, send: Any) -> None:
        with instrument.scope("work"):
            await answer(scope, receive, send)

    with receiver() as found:
        endpoint = found.grpc_endpoint if protocol == "grpc" else f"http://127.0.0.1:{found.http_port}"
        text = f"requests: auto\nexport: {{otlp: {{endpoint: '{endpoint}', protocol: {protocol}}}}}\n"
        instrument.start(loads(text, environ={}))
        serve(calls, {"traceparent": CALLER, "tracestate": STATE})
        serve(calls, {"traceparent": CALLER, "tracestate": STATE}, RequestsRule(traceparent="link"))
        serve(calls, {"traceparent": CALLER})
        instrument.stop()
        spans = found.spans()
    followed = [span for span in spans if f"{span.trace_id:032x}" == TRACE]
    assert sorted((span.name, span.trace_state) for span in followed) == [
        ("GET", ""), ("GET", STATE), ("work", ""), ("work", STATE),
    ]  # fmt: skip
    (linked,) = [span for span in spans if span.link_states and span.name == "GET"]
    assert (linked.trace_state, linked.link_states) == ("", (STATE,))
    assert not any("tracestate" in name for span in spans for name in span.attributes)


def test_the_state_goes_on_with_what_the_service_sends(session: instrument.Session) -> None:
    from opentelemetry import propagate, trace
    from opentelemetry.sdk.trace import TracerProvider

    by_hand: dict[str, str] = {}
    by_opentelemetry: dict[str, str] = {}
    below: dict[str, str] = {}
    tracer = TracerProvider().get_tracer("service")

    async def calls(scope: Any, receive: Any, send: Any) -> None:
        instrument.inject(by_hand)
        propagate.inject(by_opentelemetry)
        with tracer.start_as_current_span("theirs"):
            propagate.inject(below)
        await answer(scope, receive, send)

    state = STATE.replace(", ", ",")
    serve(calls, {"traceparent": CALLER, "tracestate": state})
    assert [sent["tracestate"] for sent in (by_hand, by_opentelemetry, below)] == [state] * 3
    by_hand.clear()
    serve(calls, {"traceparent": CALLER})
    assert "tracestate" not in by_hand
    assert not trace.get_current_span().get_span_context().is_valid


def test_a_request_below_a_span_of_opentelemetry_has_its_state(session: instrument.Session) -> None:
    from opentelemetry import propagate, trace

    from instrument.otlp import service_sdk

    RECORDER.remote_parent = lambda: encode_parent(service_sdk.read_current_span())
    context = propagate.extract({"traceparent": CALLER, "tracestate": "a=1"})
    with trace.use_span(trace.get_current_span(context)):
        serve(answer, {})
    remote = request_of(session).remote
    assert remote is not None
    assert remote.state == "a=1"


@pytest.mark.parametrize(
    ("header", "state"),
    [
        (b"", ""),
        (b"a=1", "a=1"),
        (b"a=1,,b=2 ", "a=1,,b=2 "),
        (b"a", ""),
        (b"A=1", ""),
        (b"a=1=2", ""),
        (b"a=\xff\xfe", ""),
        (b"a=1\r\nset-cookie: x", ""),
        (b"a=1\nb=2", ""),
        (b"\x00" * 100_000, ""),
        (b" " * 100_000, ""),
        (b"," * 100_000, ""),
        (b"a=" + b"1" * 100_000, ""),
        (b",".join(b"k%d=1" % number for number in range(32)), ",".join(f"k{number}=1" for number in range(32))),
        (b",".join(b"k%d=1" % number for number in range(33)), ""),
        (b"first=1," + b"long=" + b"x" * 200 + b",much=" + b"y" * 250 + b",cut=" + b"z" * 100,
         "first=1," + "long=" + "x" * 200 + ",much=" + "y" * 250),
    ],
)  # fmt: skip
def test_a_state_is_bounded_and_one_that_is_not_sound_is_none(
    session: instrument.Session, header: bytes, state: str
) -> None:
    remote = parse_parent(read_w3c_caller({b"traceparent": CALLER.encode(), b"tracestate": header}))
    assert remote is not None
    assert (f"{remote.trace_id:032x}", remote.state) == (TRACE, state)
    sent: dict[str, str] = {}

    async def calls(scope: Any, receive: Any, send: Any) -> None:
        instrument.inject(sent)
        await answer(scope, receive, send)

    serve(calls, {"traceparent": CALLER, "tracestate": header.decode("latin-1")})
    assert sent.get("tracestate", "") == (state if header.isascii() else "")
