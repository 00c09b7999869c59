"""Batches in a Chrome trace: a mark on the lane of each request that one serves, and an arrow that leads there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chrome_rules
from hypothesis import given
from hypothesis import strategies as st
from test_ledger import ENGINE, STEP, engine, made, schedule

from instrument import chrome
from instrument.recording.spans import Origin, Span
from instrument.trace.joined import join_requests
from instrument.trace.request_trees import build_request_trees
from instrument.trace.trace import SpanViews, Trace, columns_of_spans, make_spans


def written(folder: Path, spans: list[Span]) -> dict[str, Any]:
    trace = columns_of_spans(spans)
    one_tree = make_spans(build_request_trees(trace, join_requests(trace)))
    path = chrome.dump(folder / "t.json", Trace(Origin(1, "shop", 0, 10**18), 0, 1000, one_tree))
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_arrows_lead_from_a_batch_to_the_lanes_of_its_requests(tmp_path: Path) -> None:
    document = written(tmp_path, engine())
    assert chrome_rules.problems(document) == []
    events = document["traceEvents"]
    slices = {event["args"]["id"]: event for event in events if "id" in event.get("args", ())}
    marks = [event for event in events if event["ph"] == "n"]
    lanes = {slices[number]["id2"]["local"]: number for number in (1, 5)}
    assert [(mark["name"], mark["args"]["batch"], lanes[mark["id2"]["local"]], mark["ts"]) for mark in marks] == [
        ("engine.step", 11, 1, 0.1), ("engine.step", 12, 1, 0.21), ("engine.step", 12, 5, 0.21),
        ("engine.step", 13, 5, 0.32), ("engine.step", 14, 1, 0.43), ("engine.step", 14, 5, 0.43),
        ("engine.step", 15, 1, 0.6),
    ]  # fmt: skip
    for mark in marks:
        batch = slices[mark["args"]["batch"]]
        assert (batch["bind_id"], batch["flow_out"], mark["flow_in"]) == (mark["bind_id"], True, True)
    assert document["instrument"]["arrows_left_out"] == 0


def test_a_file_with_many_marks_is_read_back(tmp_path: Path) -> None:
    spans = engine()
    keys = [f"r{number}" for number in range(40)]
    spans += [made(1000 + at, engine()[0].site, 0, 900, thread=at + 10, key=key) for at, key in enumerate(keys)]
    spans += [made(2000 + at, STEP, at, at + 1, thread=ENGINE, batch=keys) for at in range(20)]
    assert sum(event["ph"] == "n" for event in written(tmp_path, spans)["traceEvents"]) == 807
    back, _ = chrome.load(tmp_path / "t.json")
    assert isinstance(back.spans, SpanViews)
    assert len(back.spans) == len(spans)
    served = join_requests(back.spans.columns).served
    assert len(served.batch) == 808


@given(st.integers(0, 2**32))
def test_every_arrow_of_a_random_engine_is_drawn_or_counted(tmp_path_factory: Any, seed: int) -> None:
    spans = schedule(seed)
    document = written(tmp_path_factory.mktemp("random"), spans)
    assert chrome_rules.problems(document) == []
    joined = join_requests(columns_of_spans(spans))
    pairs = {(batch, place) for batch, place in zip(joined.served.batch.tolist(), joined.served.request.tolist(),
        strict=True) if place != -1}  # fmt: skip
    trace = build_request_trees(columns_of_spans(spans), joined)
    away = (trace.parent != -1) & (trace.thread_id != trace.thread_id[trace.parent])
    wanted = len(pairs) + int(away.sum())
    assert chrome_rules.arrows(document) + document["instrument"]["arrows_left_out"] == wanted
