"""The proof of `capture`: of 5,000 requests to a real server the planted slow ones are kept, whole, and hardly another.

A machine that others use, too, makes requests slow that nobody planted: they wait for a processor. They are kept with
good reason, but the count of others is of those in which the service, and what instruments it, computed for that long.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from otlp_receiver import Received, receiver
from server_programs import serving
from test_requests import uvicorn

from instrument import chrome
from instrument.recording.spans import BLOCKED_BY, is_blocked_loop
from instrument.recording.tally import Tally, Totals

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
"""What is asked of a request that is slow, and the span below it that is to blame."""

REQUESTS, EACH = 5_000, 5

PARTS = ["tokenize", "wait_for_turn", "memcpy h2h", "Linear", "Attention", "Linear"]
"""What a request consists of, in order; one that fails gets as far as its turn."""


def cpu_clock(port: int) -> int:
    """The clock of the processor time of the process that listens on a port, all of its threads together."""
    wanted = [b"model_app:app", b"--port", str(port).encode()]
    lines = ((path, path.read_bytes().split(b"\0")) for path in Path("/proc").glob("[0-9]*/cmdline"))
    (process_id,) = [int(path.parent.name) for path, words in lines if all(word in words for word in wanted)]
    return ~process_id << 3 | 2  # as `clock_getcpuclockid` makes it


def ask_all(port: int, planted: dict[int, str]) -> tuple[dict[int, str], dict[int, int]]:
    """Send all requests, one after another.

    Returns the kinds of those that are planted and for how long the server computed in each of all, by their traces.
    """
    clock = cpu_clock(port)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    kinds, busy_ns = {}, {}
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
        before_ns = time.clock_gettime_ns(clock)
        connection.request("POST", "/predict", json.dumps(asked), headers)
        response = connection.getresponse()
        response.read()
        busy_ns[trace_id] = time.clock_gettime_ns(clock) - before_ns
        assert response.status == (500 if kind == "error" else 200)
        if kind == "error":
            connection.close()  # as the server does
    connection.close()
    return kinds, busy_ns


def trees_of(spans: Sequence[Received]) -> dict[int, list[Received]]:
    """By trace, in the order of their begins."""
    found: defaultdict[int, list[Received]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_ns):
        found[span.trace_id].append(span)
    return dict(found)


def slow_from_ns(tally: Tally) -> float:
    """Half as long again as 99 of 100 requests took."""
    totals = Totals()
    for row in tally.rows():
        if row.path[-1].name == "POST /predict":
            totals.merge(row.totals)
    assert totals.calls == REQUESTS
    p99_ns = totals.percentile(0.99)
    assert p99_ns is not None
    return p99_ns * 1.5


def took_ns(span: Received) -> int:
    return span.end_ns - span.start_ns


@pytest.mark.slow
def test_of_5000_requests_25_slow_ones_of_five_kinds_are_kept_whole_and_at_most_3_others(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text(PROFILE)
    kinds = [kind for kind in KINDS for _ in range(EACH)]
    planted = dict(zip(random.Random(7).sample(range(REQUESTS), len(kinds)), kinds, strict=True))
    with receiver() as found:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{found.http_port}"}
        with serving(uvicorn("model_app:app"), tmp_path, environ, ours=True) as (port, served):
            kind_of, busy_ns = ask_all(port, planted)
        trees = trees_of(found.spans())

    assert kind_of.keys() <= trees.keys(), Counter(kind_of[one] for one in kind_of.keys() - trees.keys())
    (path,) = (tmp_path / "traces").glob("*.json")
    trace, tally = chrome.load(path)
    slow_ns = slow_from_ns(tally)
    others = {trace_id: tree[0] for trace_id, tree in trees.items() if trace_id not in kind_of}
    by_the_service = [span for one, span in others.items() if busy_ns[one] > slow_ns]
    assert len(by_the_service) <= 3, [
        (one >> 64, took_ns(span) / 1e6, busy_ns[one] / 1e6) for one, span in others.items()
    ]

    for trace_id, (root, *parts) in trees.items():
        kind = kind_of.get(trace_id, "")
        assert (root.name, root.kind) == ("POST /predict", "SERVER")
        assert [part.name for part in parts] == (PARTS[:2] if kind == "error" else PARTS)
        assert {part.parent_id for part in parts} == {root.span_id}
        assert (root.status == "ERROR") == (kind == "error")
        if to_blame := KINDS[kind][1] if kind else "":
            longest = max(parts, key=took_ns)
            assert (longest.name, took_ns(longest) > took_ns(root) / 2) == (to_blame, True)
    assert Counter(kind_of.values()) == dict.fromkeys(KINDS, EACH)
    blocked_by = Counter(span.attributes.get(BLOCKED_BY) for span in trace.spans if is_blocked_loop(span.site))
    assert blocked_by["tokenize"] >= EACH
    assert served.code is not None
