"""Stages: queue, prefill, decode and stalls of requests as spans of their own."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_ledger import CHAT, ENGINE, STEP, engine, made, schedule
from trees import queue_times

from instrument.cli import main
from instrument.profile.keys import load
from instrument.recording.spans import FIRST_ITEM, ITEMS, AttributeValue, Origin, Site, Span
from instrument.trace import file
from instrument.trace.joined import join_requests
from instrument.trace.stages import find_stages, make_stage_spans
from instrument.trace.trace import Trace, columns_of_spans

PREFILL, DECODE = Site("engine.prefill", "step"), Site("engine.decode", "step")


def told(spans: list[Span]) -> dict[int, list[tuple[str, int, int]]]:
    """By the id of each request its stages."""
    trace = columns_of_spans(spans)
    joined = join_requests(trace)
    return {
        int(trace.span_id[joined.rows[one.place]]): list(one.list_named_intervals())
        for one in find_stages(trace, joined)
    }


def test_the_stages_of_two_requests_that_an_engine_serves_in_batches() -> None:
    assert told(engine()) == {
        1: [
            ("queue", 90, 100), ("first batch", 100, 200), ("later batches", 200, 800),
            ("stall", 310, 430),  # while a step ran for another
        ],
        5: [("queue", 130, 210), ("first batch", 210, 310), ("later batches", 310, 531)],
    }  # fmt: skip


def test_every_request_that_a_batch_serves_has_a_queue_time_also_who_did_not_wait() -> None:
    spans = [made(1, CHAT, 0, 90, key="a"), made(3, CHAT, 10, 90, key="b"), made(5, CHAT, 20, 90, key="never")]
    spans += [made(7, STEP, 10, 20, batch=["b"], thread=2), made(9, STEP, 25, 40, batch=["a", "b"], thread=2)]
    trace = columns_of_spans(spans)
    joined = join_requests(trace)
    found = {int(trace.span_id[joined.rows[place]]): ns for place, ns in queue_times(trace, joined).items()}
    assert found == {1: 25, 3: 0}


@pytest.mark.parametrize(
    ("batches", "prefill", "steps"),
    [
        ([(STEP, [512]), (STEP, [512]), (STEP, [100]), (STEP, [1]), (STEP, [1])], (10, 40), 2),  # in chunks
        ([(STEP, [7]), (STEP, [1]), (STEP, [4]), (STEP, [1])], (10, 20), 3),  # several tokens at once later on
        ([(STEP, [1]), (STEP, [2]), (STEP, [1])], (10, 20), 2),  # whose prompt was known
        ([(PREFILL, None), (DECODE, None), (DECODE, None)], (10, 20), 2),
        ([(PREFILL, None), (PREFILL, None), (DECODE, None)], (10, 30), 1),
        ([(STEP, None), (STEP, None)], (10, 20), 1),
        ([(STEP, [3])], None, 0),
        ([(STEP, [100]), (STEP, [4]), (STEP, [4]), (STEP, [4]), (STEP, [1])], (10, 20), 4),  # which guesses some tokens
        ([(STEP, [weight]) for weight in (100, 3, 2, 4, 3, 1, 2)], (10, 20), 6),
        ([(STEP, [5]), (STEP, [4]), (STEP, [4]), (STEP, [3]), (STEP, [4]), (STEP, [1])], (10, 20), 5),
        ([(STEP, [512]), (STEP, [512]), (STEP, [512]), (STEP, [1])], (10, 40), 1),
        ([(STEP, [512]), (STEP, [512]), (STEP, [10]), (STEP, [1]), (STEP, [1])], (10, 40), 2),
        ([(PREFILL, [9]), (DECODE, [1]), (DECODE, [1])], (10, 20), 2),
        ([(STEP, [512]), (STEP, [512]), (STEP, [100])], (10, 40), 0),  # in chunks, of which one token was made
        ([(STEP, [400]), (STEP, [50]), (STEP, [50])], (10, 20), 2),
    ],
)
def test_the_prefill_is_what_makes_the_first_token(
    batches: list[tuple[Site, list[float] | None]], prefill: tuple[int, int] | None, steps: int
) -> None:
    spans = [made(1, CHAT, 0, 1000, key="a")]
    for at, (site, weights) in enumerate(batches):
        spans.append(
            made(2 + at, site, 10 + 10 * at, 20 + 10 * at, thread=ENGINE, batch=["a"], weights=weights)
        )  # fmt: skip
    trace = columns_of_spans(spans)
    [found] = find_stages(trace, join_requests(trace))
    assert (found.prefill, found.steps) == (prefill, steps)
    assert found.queue == (0, 10)


@pytest.mark.parametrize(
    ("first_ns", "items", "weights", "until_ns", "steps"),
    [
        (33, 3, None, 30, 2),  # two steps had ended
        (5, 3, None, 20, 3),  # something was sent before any
        (33, 1, None, 20, 3),  # all was sent at once
        (90, 3, None, 20, 3),  # and here as it was over
        (33, 3, [1.0, 1.0, 1.0, 1.0], 30, 2),
        (33, 3, [5.0, 1.0, 1.0, 1.0], 20, 3),  # whose weights tell
    ],
)
def test_prefill_ends_before_the_first_part_of_the_answer_if_batches_look_alike(
    first_ns: int, items: int, weights: list[float] | None, until_ns: int, steps: int
) -> None:
    spans = [made(1, CHAT, 0, 100, key="a")]
    spans[0].attributes = {**spans[0].attributes, FIRST_ITEM: first_ns, ITEMS: items}
    for at in range(4):
        its = None if weights is None else weights[at : at + 1]
        spans.append(made(2 + at, STEP, 10 + 10 * at, 20 + 10 * at, thread=ENGINE, batch=["a"], weights=its))
    trace = columns_of_spans(spans)
    [found] = find_stages(trace, join_requests(trace))
    assert (found.prefill, found.steps) == ((10, until_ns), steps)


def test_the_prefill_is_all_of_a_prompt_of_which_one_token_was_made() -> None:
    spans = [made(1, CHAT, 0, 1000, key="a"), made(2, CHAT, 0, 1000, key="b"), made(3, CHAT, 0, 1000, key="c")]
    batches = [("a", 512), ("a", 512), ("b", 512), ("b", 88), ("c", 9), ("c", 1)]
    for at, (key, tokens) in enumerate(batches):
        start = 10 + 10 * at
        spans.append(made(10 + at, STEP, start, start + 10, thread=ENGINE, batch=[key], weights=[tokens]))
    trace = columns_of_spans(spans)
    found = {one.place: (one.prefill, one.steps) for one in find_stages(trace, join_requests(trace))}
    assert found == {0: ((10, 30), 0), 1: ((30, 50), 0), 2: ((50, 60), 1)}


GENERATING = Site("POST /v1/completions", "request", attributes=(("gen_ai.operation.name", "text_completion"),))
GENERATOR = Site("generate", "user", attributes=(("gen_ai.operation.name", "text_completion"),))
STREAM: dict[str, AttributeValue] = {FIRST_ITEM: 21, ITEMS: 3}
ANSWERED: dict[str, AttributeValue] = {"gen_ai.request.model": "tiny"}


@pytest.mark.parametrize(
    ("site", "said", "below", "batches", "is_generation"),
    [
        (CHAT, {}, None, [STEP, STEP, STEP], False),  # as an embedder that has several batches
        (CHAT, STREAM, None, [STEP, STEP, STEP], True),
        (CHAT, STREAM, None, [PREFILL, DECODE], False),  # that may as well embed and rank
        (CHAT, STREAM, None, [PREFILL, DECODE, DECODE], True),
        (CHAT, {FIRST_ITEM: 21, ITEMS: 1}, None, [STEP, STEP], False),
        (CHAT, ANSWERED, None, [STEP, STEP], True),
        (GENERATING, {}, None, [STEP, STEP], True),
        (CHAT, {}, GENERATOR, [STEP, STEP], True),
    ],
)
def test_the_words_of_generations_are_for_what_a_model_generates(
    site: Site, said: dict[str, AttributeValue], below: Site | None, batches: list[Site], is_generation: bool
) -> None:
    spans = [made(1, site, 0, 100, key="a")]
    spans[0].attributes = {**spans[0].attributes, **said}
    if below is not None:
        spans.append(made(2, below, 1, 99, 1))
    for at, of in enumerate(batches):
        spans.append(made(10 + at, of, 10 + 10 * at, 20 + 10 * at, thread=ENGINE, batch=["a"]))
    trace = columns_of_spans(spans)
    [found] = make_stage_spans(trace, join_requests(trace)).values()
    words = ("queue", "prefill", "decode") if is_generation else ("queue", "first batch", "later batches")
    assert tuple(span.site.name for span in found) == words
    names = {name for span in found for name in span.attributes if not name.startswith("gen_ai.request.")}
    assert {name.startswith("gen_ai.") for name in names if ".latency." in name} == {is_generation}


def served_by_vllm(asked: dict[str, list[int]], workers: int, ahead_ns: int = 0) -> tuple[list[Span], list[int]]:
    """Requests by key, with the tokens of each of their steps, as our profile records an engine that serves them:
    what schedules a step, what each worker runs and samples, and what takes the answer. Also when each step's end is.

    A step takes 100 ns; the next is scheduled so long before the one before it has been answered.
    """
    rules = load(Path(__file__).parents[1] / "instrument" / "profile" / "presets" / "vllm.yaml", environ={}).functions
    weighed = {rule.name: "num_scheduled_tokens" in rule.batch.argument for rule in rules if rule.batch is not None}
    parts = {
        "schedule": (0, 5, False),
        "execute_model": (10 + ahead_ns, 70 + ahead_ns, True),
        "sample": (72 + ahead_ns, 80 + ahead_ns, True),
        "update": (85 + ahead_ns, 95 + ahead_ns, False),
    }
    assert set(weighed) == set(parts)
    steps = max(map(len, asked.values()))
    spans = [made(at, CHAT, 0, 1000 * steps, key=key) for at, key in enumerate(asked, start=1)]
    for step in range(steps):
        its = {key: tokens[step] for key, tokens in asked.items() if step < len(tokens)}
        for name, (start, end, is_worker) in parts.items():
            for worker in range(workers if is_worker else 1):
                start_ns, end_ns = 100 + 100 * step + start + worker, 100 + 100 * step + end + 2 * worker
                weights = list(map(float, its.values())) if weighed[name] else None
                thread = ENGINE + (10 + worker) * is_worker
                site = Site(name, "op")
                spans.append(
                    made(len(spans) + 1, site, start_ns, end_ns, thread=thread, batch=list(its), weights=weights)
                )  # fmt: skip
    return spans, [100 + 100 * step + parts["update"][1] for step in range(steps)]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("ahead_ns", [0, 40])  # the next step scheduled and run before this one is answered
def test_an_engine_of_several_batches_a_step_and_several_workers_makes_one_token_a_step(
    workers: int, ahead_ns: int
) -> None:
    asked = {"a": [12, 1, 1], "b": [512, 512, 100, 1, 1, 1], "c": [30], "d": [100, 4, 4, 4, 1]}
    spans, ends = served_by_vllm(asked, workers, ahead_ns)
    trace = columns_of_spans(spans)
    found = {one.place: one for one in find_stages(trace, join_requests(trace))}
    assert [found[place].steps for place in range(4)] == [2, 3, 0, 4]
    assert [found[place].prefill for place in range(4)] == [(100, ends[0]), (100, ends[2]), None, (100, ends[0])]
    assert [found[place].decode for place in range(4)] == [
        (ends[0], ends[2]),
        (ends[2], ends[5]),
        None,
        (ends[0], ends[4]),
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_one_step_of_several_batches_is_no_generation(workers: int) -> None:
    trace = columns_of_spans(served_by_vllm({"a": [12], "b": [30]}, workers)[0])
    assert {(one.prefill, one.decode, one.steps) for one in find_stages(trace, join_requests(trace))} == {
        (None, None, 0)
    }


def test_steps_that_take_turns_on_several_threads_are_all_counted() -> None:
    spans = [made(1, CHAT, 0, 1000, key="a")]
    for at, thread in enumerate([5, 6, 5, 5, 6, 5, 5]):
        start_ns, weights = 100 * at, [9.0 if at == 0 else 1.0]
        spans.append(made(2 + at, STEP, start_ns, start_ns + 90, thread=thread, batch=["a"], weights=weights))
    trace = columns_of_spans(spans)
    [found] = find_stages(trace, join_requests(trace))
    assert (found.prefill, found.steps) == ((0, 90), 6)


def test_a_request_that_is_not_there_from_begin_to_end_has_none() -> None:
    spans = engine()
    spans[0].clipped = True
    assert set(told(spans)) == {5}


@given(st.integers(0, 2**32))
def test_stages_lie_within_their_request_and_do_not_overlap(seed: int) -> None:
    trace = columns_of_spans(schedule(seed))
    joined = join_requests(trace)
    for row, spans in make_stage_spans(trace, joined).items():
        assert all(trace.start_ns[row] <= one.start_ns < one.end_ns <= trace.end_ns[row] for one in spans)
        once = sorted((one.start_ns, one.end_ns) for one in spans if one.site.name != "stall")
        assert all(before[1] <= after[0] for before, after in pairwise(once))
        assert {(one.parent_id, one.root_id) for one in spans} == {(trace.span_id[row], trace.root_id[row])}
    ids = [one.span_id for spans in make_stage_spans(trace, joined).values() for one in spans]
    assert len({*ids, *trace.span_id.tolist()}) == len(ids) + len(trace)


def test_stages_are_sent_like_any_other_span_by_the_names_that_engines_use(tmp_path: Path) -> None:
    spans = engine()
    spans[0].attributes = {**spans[0].attributes, "gen_ai.request.model": "tiny", "private": "x"}
    path = file.dump(tmp_path / "a.npz", Trace(Origin(1, "shop", 0, 10**18), 0, 1000, spans))
    assert main(["convert", str(path), "--to", "otlp"]) == 0
    [resource] = json.loads((tmp_path / "a.otlp.jsonl").read_text())["resourceSpans"]
    found = resource["scopeSpans"][0]["spans"]
    [request] = [span for span in found if span["startTimeUnixNano"] == str(10**18)]
    its = {span["name"]: span for span in found if span.get("parentSpanId") == request["spanId"]}

    def attributes(name: str) -> dict[str, Any]:
        return {one["key"]: next(iter(one["value"].values())) for one in its[name]["attributes"]}

    assert {"queue", "prefill", "decode", "stall"} <= set(its)
    assert its["prefill"]["traceId"] == request["traceId"]
    assert its["prefill"]["startTimeUnixNano"] == str(10**18 + 100)
    decode = attributes("decode")
    assert decode["gen_ai.latency.time_in_model_decode"] == 600e-9
    assert (decode["gen_ai.request.model"], decode["instrument.derived"]) == ("tiny", True)
    assert decode["instrument.decode.steps"] == "3"
    assert "private" not in decode
    assert attributes("stall")["instrument.stalled_by"] == "engine.step"
    assert attributes("queue")["gen_ai.latency.time_in_queue"] == 10e-9
