"""Metrics of requests over all processes, by endpoint and model, from what batches did for them."""

from __future__ import annotations

from typing import Any

from test_ledger import CHAT, ENGINE, STEP, engine, made

from instrument.recording.distributions import Distribution
from instrument.recording.spans import FIRST_ITEM, ITEMS, LAST_ITEM, Site, Span
from instrument.trace.joined import join
from instrument.trace.of_spans import trace_of
from instrument.trace.request_metrics import RequestMetrics

ROUTED = Site("POST /v1/chat/completions", "request", attributes=(("http.route", "/v1/chat/completions"),))


def counted(*parts: list[Span], **more: Any) -> dict[str, dict[tuple[Any, ...], Distribution]]:
    found = RequestMetrics()
    for spans in parts:
        trace = trace_of(spans)
        found.count(trace, join(trace), **more)
    return {one.name: dict(one.series) for one in found.metrics()}


def test_requests_tell_their_times_by_endpoint() -> None:
    found = counted(engine())
    chat = (("gen_ai.operation.name", "text_completion"), ("instrument.span.name", "POST /chat"))
    assert {name: (its[chat].count, its[chat].sum_ns) for name, its in found.items() if chat in its} == {
        "gen_ai.server.request.duration": (2, 1000 + 600),
        "gen_ai.server.time_to_first_token": (2, 200 + 210),
        "gen_ai.server.time_per_output_token": (2, 600 // 3 + 221 // 2),
        "instrument.request.queue.duration": (2, 10 + 80),
    }
    (sizes,) = found["instrument.batch.size"].values()
    assert (sizes.count, sizes.sum_ns) == (5, (1 + 2 + 1 + 2 + 2) * 10**9)


def test_a_stream_knows_better_and_a_model_and_an_error_are_told_apart() -> None:
    spans = engine()
    spans[0].site = ROUTED
    spans[0].attributes = {
        **spans[0].attributes,
        "gen_ai.request.model": "tiny",
        FIRST_ITEM: 300,
        LAST_ITEM: 900,
        ITEMS: 4,
    }
    spans[4].error = "ValueError"
    found = counted(spans)
    chat = (
        ("gen_ai.operation.name", "chat"), ("http.route", "/v1/chat/completions"), ("gen_ai.request.model", "tiny"),
    )  # fmt: skip
    assert found["gen_ai.server.time_to_first_token"][chat].sum_ns == 300
    assert found["gen_ai.server.time_per_output_token"][chat].sum_ns == 200
    failed = [labels for labels in found["gen_ai.server.request.duration"] if ("error.type", "ValueError") in labels]
    assert len(failed) == 1
    alone = (("instrument.span.name", "engine.step"), *chat)
    assert found["instrument.batch.size"][alone].count == 2


def test_what_one_batch_serves_is_no_generation_but_waits_and_each_is_counted_once() -> None:
    spans = [made(1, CHAT, 0, 100, key="a"), made(2, STEP, 20, 50, thread=ENGINE, batch=["a"])]
    later = [made(3, CHAT, 200, 300, key="b"), made(4, STEP, 290, 330, thread=ENGINE, batch=["b"])]
    later[0].clipped = True  # which the next part has
    found = counted(spans, later)
    assert {name: sum(one.count for one in its.values()) for name, its in found.items()} == {
        "instrument.request.queue.duration": 1,
        "instrument.batch.size": 2,
    }


def test_exemplars_point_to_requests_that_a_collector_has() -> None:
    trace, metrics = trace_of(engine()), RequestMetrics()
    joined = join(trace)
    metrics.count(trace, joined, lambda row: (7, 8) if row == joined.rows[0] else None)
    for one in metrics.metrics():
        if one.name != "instrument.batch.size":
            ((exemplar,),) = one.exemplars.values()
            assert (exemplar.trace_id, exemplar.span_id, exemplar.at_ns) == (7, 8, 1000)
