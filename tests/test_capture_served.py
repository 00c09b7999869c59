"""The proof of `capture`: of 1,500 requests to a real server the slow and the failed are kept, whole, and no other.

A busy machine makes requests slow that nobody planted, and is fast again later. Therefore the trace file, which has all
requests, says which of them were slow by every limit that there was, and which by none.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from otlp_receiver import Received, read_until, receiver
from server_programs import serving
from test_requests import uvicorn

from instrument import chrome
from instrument.recording.spans import BLOCKED_BY, is_blocked_loop
from instrument.trace.tail_sampler import LEAST_CALLS

NEEDED = ("numpy", "starlette", "torch", "uvicorn")
pytestmark = pytest.mark.skipif(not all(map(importlib.util.find_spec, NEEDED)), reason=f"needs {', '.join(NEEDED)}")

PROFILE = """
service: served
requests: {ignore: [/health]}
functions:
  - {match: "model_app:wait_for_turn", kind: phase, phase: queue}
  - {match: "model_app:tokenize"}
layers: [{type: [Linear, Attention]}]
copies: [{directions: [h2h]}]
capture: {sample: 0, slow: "p99*1.5", errors: true}
export:
  chrome: {path: "traces/{service}-{pid}-{window}.json"}
  summary: {to: stderr}
  otlp:
"""

USUAL = {"text": "a few words of text", "side": 16, "rows": 8}

KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "long queue": ({}, "wait_for_turn"),
    "blocked loop": ({"text": "word " * 800_000}, "tokenize"),
    "slow layer": ({"rows": 5_000}, "Attention"),
    "big copy": ({"side": 4_096}, "memcpy h2h"),
    "error": ({"rows": 0}, ""),
}
"""The body of a slow request of each kind, and the span below it that is to blame."""

REQUESTS, EACH = 1_500, 2

PARTS = ["tokenize", "wait_for_turn", "memcpy h2h", "Linear", "Attention", "Linear"]
"""The parts of a request, in order. A failing one ends with its turn."""


def ask_all(port: int, planted: dict[int, str]) -> dict[int, str]:
    """Send all requests, one after another, and return the kinds of the planted requests by trace id."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    kinds = {}
    for number in range(REQUESTS):
        kind = planted.get(number, "")
        trace_id = (number + 1) << 64 | 0x5EED
        if kind:
            kinds[trace_id] = kind
        if kind == "long queue":
            connection.request("POST", "/hold")
            connection.getresponse().read()
        asked = USUAL | KINDS[kind][0] if kind else USUAL
        # The caller's own tracer has not sampled any of them.
        headers = {"traceparent": f"00-{trace_id:032x}-{number + 1:016x}-00"}
        connection.request("POST", "/predict", json.dumps(asked), headers)
        response = connection.getresponse()
        response.read()
        assert response.status == (500 if kind == "error" else 200)
        if kind == "error":
            connection.close()  # as the server does
    connection.close()
    return kinds


def trees_of(spans: Sequence[Received]) -> dict[int, list[Received]]:
    """By trace, in the order of their begins."""
    found: defaultdict[int, list[Received]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_ns):
        found[span.trace_id].append(span)
    return dict(found)


def limits_ns(took_ns: Sequence[int]) -> tuple[float, float]:
    """The least and the highest limit that there may have been: half as long again as 99 of 100 requests until then."""
    limits = [1.5 * sorted(took_ns[:count])[math.ceil(count * 0.99) - 1] for count in range(LEAST_CALLS, REQUESTS + 1)]
    return min(limits) * 0.97, max(limits) * 1.03  # histograms are as exact as that


@pytest.mark.slow
def test_requests_that_are_slow_by_their_own_measure_or_fail_are_kept_whole_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text(PROFILE)
    kinds = [kind for kind in KINDS for _ in range(EACH)]
    planted = dict(zip(random.Random(7).sample(range(REQUESTS), len(kinds)), kinds, strict=True))
    with receiver() as found:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{found.http_port}"}
        with serving(uvicorn("model_app:app"), tmp_path, environ, ours=True) as (port, served):
            kind_of = ask_all(port, planted)
        (path,) = (tmp_path / "traces").glob("*.json")
        trace, _ = chrome.load(path)
        roots = [span for span in trace.spans if span.site.name == "POST /predict"]
        took = {root.remote.trace_id: root.end_ns - root.start_ns for root in sorted(roots, key=lambda one: one.end_ns)}
        assert len(took) == REQUESTS
        least_ns, most_ns = limits_ns([*took.values()])
        failed = {one for one, kind in kind_of.items() if kind == "error"}
        wanted = {one for one, ns in took.items() if ns > most_ns} | failed
        trees = read_until(lambda: trees_of(found.spans()), lambda trees: wanted <= trees.keys())

    assert wanted <= trees.keys()
    assert trees.keys() <= {one for one, ns in took.items() if ns > least_ns} | failed

    usual_ns = {
        name: median(one.end_ns - one.start_ns for one in trace.spans if one.site.name == name) for name in PARTS
    }
    for trace_id, (root, *parts) in trees.items():
        kind = kind_of.get(trace_id, "")
        assert (root.name, root.kind) == ("POST /predict", "SERVER")
        assert [part.name for part in parts] == (PARTS[:2] if kind == "error" else PARTS)
        assert {part.parent_id for part in parts} == {root.span_id}
        assert (root.status == "ERROR") == (kind == "error")
        if to_blame := KINDS[kind][1] if kind else "":
            assert max(one.end_ns - one.start_ns for one in parts if one.name == to_blame) > 10 * usual_ns[to_blame]
    assert Counter(kind_of.values()) == dict.fromkeys(KINDS, EACH)
    blocked_by = Counter(span.attributes.get(BLOCKED_BY) for span in trace.spans if is_blocked_loop(span.site))
    assert blocked_by["tokenize"] >= EACH
    assert served.code is not None
