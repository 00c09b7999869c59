"""Blame: planted causes of slow requests are named, with the part that they made longer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from test_ledger import API, ENGINE, made

from instrument.recording.spans import BLOCKED_BY, BLOCKED_LOOP, COLLECTION, Site, Span
from instrument.trace.blame import find_blame, typical_times
from instrument.trace.joined import join_requests
from instrument.trace.ledger import compute_ledger
from instrument.trace.trace import columns_of_spans

CHAT = Site("POST /chat", "request")
EMBED = Site("POST /embed", "request")
TOKENISE, DETOKENISE = Site("tokenise", "phase"), Site("detokenise", "phase")
STEP, PREFILL = Site("engine.step", "step"), Site("engine.prefill", "step")
CHECKPOINT, RENDER, LOAD_LORA = Site("save_checkpoint"), Site("render_page"), Site("load_lora", "op")
REGEX, COPY_IN = Site("compile_regex"), Site("memcpy h2d", "copy", attributes=(("direction", "h2d"),))
SLOW = 1000
"""The length of a planted delay. All of a typical request takes 500."""


class Service:
    """Requests that come one after another, each with phases and three steps of its own, and what is planted."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.at = 0

    def add(self, site: Site, start: int, end: int, **more: object) -> int:
        self.spans.append(made(len(self.spans) + 1, site, start, end, **more))  # type: ignore[arg-type]
        return len(self.spans)

    def serve(self, key: str, longer: str = "", plant: Callable[[Service, int, int], object] | None = None) -> None:
        """A request, of which one piece takes longer; `plant(service, its begin, request)` says what runs then."""
        at, request = self.at, self.add(CHAT, self.at, self.at, key=key)
        its: dict[str, list[object]] = {"batch": [key]}

        def piece(name: str, lasts: int) -> tuple[int, int]:
            nonlocal at
            start = at
            if name == longer:
                if plant is not None:
                    plant(self, at, request)
                lasts += SLOW
            at += lasts
            return start, at

        piece("before", 10)
        start, end = piece("tokenise", 50)
        self.add(TOKENISE, start, end, parent=request)
        piece("queue", 20)
        for number in range(3):
            start, end = piece(f"step {number}", 100)
            more: dict[str, object] = {"batch": its["batch"]}
            if longer == f"step {number}" and plant is None:
                more = {"batch": [key, "heavy"], "weights": [1, 30]}
            self.add(STEP, start, end, thread=ENGINE, **more)
            piece(f"stall {number}", 10)
        start, end = piece("detokenise", 60)
        self.add(DETOKENISE, start, end, parent=request)
        self.spans[request - 1].end_ns = at
        self.at = at + 5

    def blamed(self, key: str) -> tuple[str, str, str]:
        trace = columns_of_spans(self.spans)
        joined = join_requests(trace)
        found = compute_ledger(trace, joined)
        place = next(place for place, keys in joined.keys.items() if keys == (key,))
        its = np.flatnonzero(trace.are_of_sites([site == CHAT for site in trace.sites])[joined.rows])
        told = find_blame(trace, joined, found, place, typical_times(found, its))
        assert told is not None
        assert told.excess_ns > SLOW // 3
        return told.part, told.cause.name if told.cause else "", told.cause.request if told.cause else ""


def alone(site: Site, thread: int) -> Callable[[Service, int, int], object]:
    """Something of nobody's that ran on a thread."""
    return lambda service, at, _: service.add(site, at, at + SLOW, thread=thread)


def below(site: Site, thread: int = API) -> Callable[[Service, int, int], object]:
    """Something of the request's own, right below its phase, which gets the next id."""
    return lambda service, at, _: service.add(site, at, at + SLOW, parent=len(service.spans) + 2, thread=thread)


def of_another(site: Site, thread: int) -> Callable[[Service, int, int], object]:
    """Work of another request."""

    def plant(service: Service, at: int, _: int) -> None:
        other = service.add(EMBED, at - 5, at + SLOW + 5, thread=thread, key="other")
        service.add(site, at, at + SLOW, parent=other, thread=thread)

    return plant


def batch_of_another(site: Site) -> Callable[[Service, int, int], object]:
    def plant(service: Service, at: int, _: int) -> None:
        service.add(EMBED, at - 5, at + SLOW + 5, thread=3, key="other")
        service.add(site, at, at + SLOW // 2, thread=ENGINE, batch=["other"])
        service.add(site, at + SLOW // 2, at + SLOW, thread=ENGINE, batch=["other"])

    return plant


def blocked_by_another(service: Service, at: int, _: int) -> None:
    other = service.add(EMBED, at - 5, at + SLOW + 5, key="other")
    service.add(RENDER, at + 1, at + SLOW - 1, parent=other)
    service.add(BLOCKED_LOOP, at, at + SLOW)
    service.spans[-1].attributes = {BLOCKED_BY: RENDER.name}


def blocked_by_itself(service: Service, at: int, request: int) -> None:
    service.add(REGEX, at + 1, at + SLOW - 1, parent=request)
    service.add(BLOCKED_LOOP, at, at + SLOW)
    service.spans[-1].attributes = {BLOCKED_BY: REGEX.name}


def blocked_twice(service: Service, at: int, _: int) -> None:
    """By what is recorded itself, too, and before that by something that took longer than that."""
    service.add(CHECKPOINT, at, at + SLOW * 6 // 10)
    service.add(LOAD_LORA, at + SLOW * 6 // 10, at + SLOW)
    service.add(BLOCKED_LOOP, at + SLOW * 6 // 10, at + SLOW)
    service.spans[-1].attributes = {BLOCKED_BY: LOAD_LORA.name}


def blocked(service: Service, at: int, _: int) -> None:
    service.add(BLOCKED_LOOP, at, at + SLOW)
    service.spans[-1].attributes = {BLOCKED_BY: "json.dumps"}


PLANTED = [
    ("queue", batch_of_another(PREFILL), ("queue", "engine.prefill", "other")),
    ("queue", batch_of_another(STEP), ("queue", "engine.step", "other")),
    ("queue", alone(CHECKPOINT, ENGINE), ("queue", "save_checkpoint", "")),
    ("queue", alone(LOAD_LORA, ENGINE), ("queue", "load_lora", "")),
    ("queue", of_another(COPY_IN, ENGINE), ("queue", "memcpy h2d", "other")),
    ("stall 0", batch_of_another(PREFILL), ("stall", "engine.prefill", "other")),
    ("stall 1", batch_of_another(STEP), ("stall", "engine.step", "other")),
    ("stall 0", alone(CHECKPOINT, ENGINE), ("stall", "save_checkpoint", "")),
    ("stall 1", alone(COPY_IN, ENGINE), ("stall", "memcpy h2d", "")),
    ("stall 0", of_another(LOAD_LORA, ENGINE), ("stall", "load_lora", "other")),
    ("step 0", None, ("waiting in batches", "engine.step", "heavy")),
    ("step 2", None, ("waiting in batches", "engine.step", "heavy")),
    ("step 1", alone(CHECKPOINT, 7), ("share of batches", "engine.step", "")),
    ("tokenise", below(REGEX), ("tokenise", "compile_regex", "")),
    ("tokenise", below(LOAD_LORA), ("tokenise", "load_lora", "")),
    ("detokenise", below(RENDER), ("detokenise", "render_page", "")),
    ("tokenise", of_another(RENDER, API), ("tokenise", "render_page", "other")),
    ("detokenise", blocked, ("detokenise", "json.dumps", "")),
    ("before", blocked, ("unknown", "json.dumps", "")),
    ("before", of_another(RENDER, API), ("unknown", "render_page", "other")),
    ("detokenise", blocked_by_another, ("detokenise", "render_page", "other")),
    ("before", blocked_by_itself, ("unknown", "compile_regex", "")),
    ("before", blocked_twice, ("unknown", "save_checkpoint", "")),
    ("stall 2", alone(RENDER, API), ("transport", "render_page", "")),
    ("tokenise", alone(COLLECTION, API), ("tokenise", "garbage collection", "")),
    ("queue", alone(COLLECTION, 9), ("queue", "garbage collection", "")),  # on a thread beside the engine's
    ("step 1", alone(COLLECTION, ENGINE), ("share of batches", "garbage collection", "")),
]


@pytest.mark.parametrize(("longer", "plant", "expected"), PLANTED)
def test_a_planted_cause_is_named_with_the_part_that_it_made_longer(
    longer: str, plant: Callable[[Service, int, int], object] | None, expected: tuple[str, str, str]
) -> None:
    service = Service()
    for number in range(6):
        service.serve(f"r{number}")
    service.serve("slow", longer, plant)
    for number in range(6, 12):
        service.serve(f"r{number}")
    assert service.blamed("slow") == expected
