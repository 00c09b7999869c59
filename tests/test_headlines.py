"""The sentences at the top of the brief report: one case for each part of the time, and none without evidence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from interval_lists import assign_self_times
from simulated_engine import Lives, Service
from test_report_views import span

from instrument.recording.spans import (
    BATCH_KEYS,
    BLOCKED_BY,
    BLOCKED_LOOP,
    COLLECTION,
    KEY,
    DeviceInterval,
    Origin,
    Site,
    Span,
)
from instrument.report.brief_view import Brief, brief
from instrument.report.headlines import ENOUGH, describe_requests_in_flight
from instrument.report.view import Options, Recording
from instrument.trace.trace import Trace

MS = 1_000_000
Piece = tuple[Site, float, float]
"""A span of a request: its site, its begin and its end, in ms of the request's ten."""


def phase(name: str) -> Site:
    return Site(name, "phase")


def step(keys: str) -> Site:
    """A batch. `keys` has a letter for each member; `r` is the request itself."""
    return Site("engine.step", "step", attributes=(("members", keys),))


def spans_of(requests: int, pieces: list[Piece], stretch: float = 1.0) -> Iterator[Span]:
    """The spans of requests that last 10 ms, one after the other. The last five last `stretch` times as long."""
    at, number = 0.0, 1
    for request in range(requests):
        factor = stretch if request >= requests - 5 else 1.0
        first, number = number, number + 1 + len(pieces)
        root = span(first, Site("POST /chat", "request"), at, at + 10 * factor)
        root.attributes = {KEY: f"r{request}"}
        yield root
        for place, (site, begin, end) in enumerate(pieces, first + 1):
            begin_ms, end_ms = at + begin * factor, at + end * factor
            members = dict(site.attributes).get("members")
            if members is None:
                inner = span(place, site, begin_ms, end_ms, first)
                if site.kind == "request" or site.module == "worker":
                    inner.attributes = {KEY: f"{'i' if site.kind == 'request' else 'r'}{request}"}
                inner.thread_id = 2 if site.module == "worker" else 1
                inner.parent_id = 0 if site.module == "worker" else first
                inner.root_id = place if site.module == "worker" else first
            else:
                inner = span(place, replace(site, attributes=()), begin_ms, end_ms)
                inner.attributes = {BATCH_KEYS: tuple(f"{letter}{request}" for letter in str(members))}
                inner.thread_id = 2
            yield inner
        at += 10 * factor


def made(spans: list[Span], **facts: Any) -> Brief:
    assign_self_times(spans)
    end_ns = max(each.end_ns for each in spans)
    return brief(Recording.from_trace(Trace(Origin(7, "shop", 0, 0, "native"), 0, end_ns, spans, **facts)), Options())


def sentences(spans: list[Span]) -> list[str]:
    return [headline.text for headline in made(spans).headlines]


PARTS: dict[str, tuple[list[Piece], str]] = {
    "queue": ([(step("r"), 8, 10)], "80.0% of its time in the queue (8 of 10 ms): batches of"),
    "executor queue": ([(phase("queue (executor)"), 2, 9)], "in the queue of a thread pool (7 of 10 ms): give"),
    "share": ([(step("r"), 1, 9)], "80.0% of its time in its own share of batches (8 of 10 ms)"),
    "waiting": ([(step("rxyz"), 1, 9)], "60.0% of its time on others in its batches (6 of 10 ms): "
                "batches of engine.step have 4.0 requests, at most 4; smaller ones"),
    "stall": ([(step("r"), 0, 1), (step("r"), 9, 10)], "80.0% of its time between two batches"),
    "transport": ([(phase("parse"), 0, 1), (Site("take", "phase", "worker"), 8, 8.5), (step("r"), 8.5, 10)],
                  "70.0% of its time between threads and processes (7 of 10 ms)"),
    "own phase": ([(phase("render"), 1, 9)], "80.0% of its time in the phase render (8 of 10 ms)"),
    "layers": ([(Site("Linear", "layer"), 1, 9)], "in layers of the model (8 of 10 ms)"),
    "copy in": ([(Site("memcpy", "copy", attributes=(("direction", "h2d"),)), 1, 9)], "in copies to the device"),
    "copy out": ([(Site("memcpy", "copy", attributes=(("direction", "d2h"),)), 1, 9)], "in copies from the device"),
    "communication": ([(Site("all_reduce", "comm"), 1, 9)], "in communication (8 of 10 ms)"),
    "loading": ([(Site("next", "loader"), 1, 9)], "in the wait for input (8 of 10 ms)"),
    "sub-requests": ([(Site("worker.handle", "request"), 1, 9)], "in requests within it (8 of 10 ms)"),
    "unknown": ([(phase("parse"), 0, 1)], "90.0% of its time outside of phases (9 of 10 ms): find its"),
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_the_first_sentence_names_the_largest_part_of_the_heaviest_endpoint(part: str) -> None:
    pieces, words = PARTS[part]
    first, *_ = made([*spans_of(ENOUGH, pieces)]).headlines
    assert words in first.text
    assert first.text.startswith("POST /chat spends ")
    assert first.evidence == ENOUGH
    assert sentences([*spans_of(ENOUGH - 1, pieces)]) == []


def test_a_second_sentence_names_the_part_that_is_longer_in_the_slowest_requests() -> None:
    pieces: list[Piece] = [(phase("parse"), 0, 1), (step("r"), 6, 10)]
    texts = sentences([*spans_of(100, pieces, 3.0)])
    assert texts[1].startswith("p99 of POST /chat is 30")
    assert texts[1].endswith("the slowest 5 of 100 spend 15 ms in the queue; the mean of all requests is 5.5.")
    assert not any(text.startswith("p99") for text in sentences([*spans_of(99, pieces, 3.0)]))
    assert not any(text.startswith("p99") for text in sentences([*spans_of(100, pieces)]))


def test_the_sentence_on_a_queue_distinguishes_full_batches_from_batches_with_room() -> None:
    room = sentences([*spans_of(40, [(step("r"), 8, 9)]), *later(span(9_000, Site("engine.step", "step"), 500, 501))])
    assert ", at most 12: find out what they wait for" in room[0]
    assert "at most 1: shorten its steps, or add an engine" in sentences([*spans_of(40, [(step("r"), 8, 9)])])[0]


def later(batch: Span) -> Iterator[Span]:
    """A batch of many others."""
    batch.attributes = {BATCH_KEYS: tuple(f"other{number}" for number in range(12))}
    yield batch


@pytest.mark.parametrize(
    ("site", "words"),
    [
        (BLOCKED_LOOP, "An event loop is blocked for 20.0% of the window (10 times, 2 ms at most, mostly by render)"),
        (COLLECTION, "Garbage collection stops a process for 20.0% of the window (10 times, 2 ms at most)"),
    ],
)
def test_blocked_loops_and_garbage_collections_have_a_sentence(site: Site, words: str) -> None:
    def with_stops(length_ms: float) -> list[Span]:
        spans = [*spans_of(10, [(phase("parse"), 0, 9.9)])]
        for number in range(10):
            stop = span(1_000 + number, site, 10 * number + 1, 10 * number + 1 + length_ms)
            stop.attributes, stop.thread_id = {BLOCKED_BY: "render"}, 9
            spans.append(stop)
        return sentences(spans)

    assert any(text.startswith(words) for text in with_stops(2))
    assert not any("blocked" in text or "Garbage" in text for text in with_stops(0.1))


def test_an_idle_device_a_launch_bound_one_and_one_that_only_copies_have_a_sentence() -> None:
    def on_device(label: str, of_ten_ms: float, kind: str = "layer") -> str:
        spans = [*spans_of(20, [(Site("work", kind, device=True), 0, 9)])]
        for each in spans[1::2]:
            end_ns = each.start_ns + round(of_ten_ms * MS)
            each.device = (DeviceInterval(0, 7, each.start_ns, end_ns, label, 100),)
        return " ".join(sentences(spans))

    assert "GPU 0 is idle while requests are in flight for 70.0% of that time" in on_device("exclusive", 3)
    assert "GPU 0 is perhaps waiting for the host to launch work for 100.0% of its" in on_device("launch-bound", 9)
    assert "GPU 0 is copying without computing for 90.0% of the window" in on_device("exclusive", 9, "copy")
    assert "GPU" not in on_device("exclusive", 9)


def test_steps_have_a_sentence_on_their_largest_phase_where_there_is_no_request() -> None:
    spans = []
    for number in range(20):
        first, at = 2 * number + 1, 10 * number
        spans += [span(first, Site("train", "step"), at, at + 9), span(first + 1, phase("forward"), at, at + 6, first)]
    assert sentences(spans) == ["Steps spend 66.7% of their time in the phase forward; see --view phases,ops."]
    assert sentences(spans[:8]) == []


def test_a_simulated_engine_is_described_by_the_numbers_of_its_table() -> None:
    shown = brief(Recording.from_trace(Service(1, a_second=90.0).run()), Options())
    endpoint, first = shown.requests.endpoints[0], shown.headlines[0]
    ratios = {part.name: part.ratio for part in endpoint.phases}
    assert (first.part, first.ratio) == ("share of batches", pytest.approx(ratios["share of batches"]))
    lines = "\n".join(shown.lines())
    assert lines.index("POST /generate spends") < lines.index("Window: ")
    assert len(shown.headlines) <= 3
    assert re.search(r"p99 of POST /generate is [\d.]+ ms, and p50 is", lines)


def test_the_first_sentence_names_the_cause_of_the_slowest_request_where_it_is_certain() -> None:
    trace, key, _ = Lives(3, "garbage collection", requests=170).planted()
    headline = brief(Recording.from_trace(trace), Options()).headlines[0]
    assert headline.part == "garbage collection"
    assert headline.text.startswith(f"POST /generate {key} took ")
    plain = Recording.from_trace(Lives(3, requests=170).run()[0])
    assert not any("is typical" in headline.text for headline in brief(plain, Options()).headlines)


def test_live_has_a_sentence_on_most_requests_in_flight() -> None:
    waiting = [("queue", 2_000_000_000), ("queue", 1), ("", 5)]
    assert describe_requests_in_flight(waiting) == "2 of 3 requests in flight are in queue, the longest for 2 s."
    assert describe_requests_in_flight(waiting[:2]) == ""
    assert describe_requests_in_flight([("a", 1), ("b", 1), ("c", 1)]) == ""
