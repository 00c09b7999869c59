"""Interruptions: blocked loops and collections are shown, and are a part of what they interrupted in every sum."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from otlp_collectors import collecting, take
from otlp_receiver import read_until

from instrument.cli import main
from instrument.recording.spans import BLOCKED_LOOP, COLLECTION, Site, Span, is_interruption
from instrument.report.events_view import events
from instrument.report.overview_view import overview
from instrument.report.view import Options, Recording
from instrument.trace import file
from instrument.trace.request_trees import Interruptions, find_interruptions
from instrument.trace.trace import columns_of_spans

PROGRAM = """
import asyncio, gc, time, instrument, uvicorn
from instrument import scope

async def handle(route, work):
    with scope(route, kind="request"):
        await asyncio.sleep(0)
        work()

async def main():
    await asyncio.gather(handle("GET /slow", lambda: time.sleep(0.05)), handle("GET /waits", lambda: None))
    await asyncio.sleep(0)
    await handle("GET /collects", gc.collect)

gc.disable()
garbage = [[] for _ in range(500_000)]
instrument.start("profile.yaml")
asyncio.run(main())
instrument.stop()
"""

PROFILE = """
service: shop
agent: "{agent}"
requests: auto
limits: {{blocked: 2ms}}
export:
  recording: {{path: "shop.npz"}}
  otlp: {{endpoint: "{endpoint}"}}
"""

EVENTS = {
    "GET /waits": {"loop blocked"},
    "GET /slow": {"loop blocked"},
    "GET /collects": {"garbage collection", "loop blocked"},
}


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["auto", "off"])
def test_an_interruption_is_an_event_of_what_it_hit_and_adds_nothing(agent: str, tmp_path: Path) -> None:
    with collecting(take) as collector:
        (tmp_path / "profile.yaml").write_text(PROFILE.format(agent=agent, endpoint=collector.settings.endpoint))
        subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, check=True, timeout=240)
        sent = read_until(
            lambda: [span for its in collector.spans.values() for span in its], lambda sent: len(sent) == len(EVENTS)
        )
    assert {span.name: {event.name for event in span.events} for span in sent} == EVENTS
    (slow,) = (span for span in sent if span.name == "GET /slow")
    facts = [{one.key: one.value.string_value for one in event.attributes} for event in slow.events]
    assert "GET /slow" in [its["instrument.blocked_by"] for its in facts]

    assert main(["convert", str(tmp_path / "shop.npz"), "--to", "otlp", "-o", str(tmp_path / "shop.jsonl")]) == 0
    document = json.loads((tmp_path / "shop.jsonl").read_text())
    spans = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert {span["name"]: {event["name"] for event in span.get("events", ())} for span in spans} == EVENTS

    recording = Recording.from_file(file.load(tmp_path / "shop.npz"))
    trace = recording.columns
    interrupts = trace.are_of_sites(list(map(is_interruption, trace.sites)))
    assert int(interrupts.sum()) >= 3
    assert not trace.self_ns[interrupts].any()
    (block,) = events(recording, Options()).blocks
    assert block.total_ns == sum(row.self_ns for row in block.rows) == int(trace.total_ns[~interrupts].sum())
    assert {"loop blocked", "garbage collection"} < {row.name for row in block.rows}
    assert [(kind.kind, kind.calls) for kind in overview(recording, Options()).kinds] == [("request", 3)]


@given(st.integers(0, 2**32))
def test_interruptions_in_a_file_hit_what_they_hit_live(seed: int) -> None:
    chance = random.Random(seed)
    spans = []
    for number in range(1, 40):
        site = chance.choice((Site("POST /", "request"), Site("work", "op"), BLOCKED_LOOP, COLLECTION))
        start_ns = chance.randrange(60)
        root = chance.choice((number, 99)) if site.kind == "op" else number
        thread = chance.randrange(2)
        span = Span(site, number, 0, root, thread, 0, start_ns, start_ns + chance.randrange(20), 0, 0)
        spans.append(span)
    trace = columns_of_spans(spans)
    is_one = trace.are_of_sites(list(map(is_interruption, trace.sites)))
    found = find_interruptions(trace, np.flatnonzero(~is_one), trace.select(is_one))
    live = Interruptions()
    live.attach_to_spans(trace.select(is_one))  # as those of a moment before
    _, hits = live.attach_to_spans(trace.select(~is_one))
    _, at_once = Interruptions().attach_to_spans(trace)
    assert ids_by_row(at_once) == ids_by_row(found)
    rows = np.flatnonzero(~is_one)
    assert {int(rows[row]): its for row, its in ids_by_row(hits).items()} == ids_by_row(found)


def ids_by_row(hits: Mapping[int, Sequence[Span]]) -> dict[int, set[int]]:
    return {row: {one.span_id for one in its} for row, its in hits.items()}
