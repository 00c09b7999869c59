"""Requests with keys of a process that exports itself: a collector gets what it would get by an agent."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from otlp_collectors import Collector, collecting, refuse_with, take
from test_agent import INSTRUMENT, folder, until
from test_handover import agent, listener

import instrument
from instrument.otlp.recording_export import RecordingExport
from instrument.profile.keys import loads
from instrument.recorder.recorder import RECORDER
from instrument.runtime import agent_socket
from instrument.runtime.faults import FAULTS
from instrument.sessions.session import Session

__all__ = ["agent", "folder", "listener"]

RULES = """
functions:
  - {match: "shop:serve", kind: request}
  - {match: "shop:tokenise", kind: phase}
  - {match: "shop:submit", key: request_id}
  - {match: "shop:accept", key: request_id, kind: phase}
  - {match: "shop:step", batch: ids}
  - {match: "shop:tidy"}
"""

PROFILE = """
service: shop
%s
capture: {%s}
export: {otlp: {endpoint: "http://127.0.0.1:%d"}}
"""

SHOP = """
import threading, time
import instrument

BATCHES = ["abcd", "abcd", "abc", "ab", "d", "d", "ab", "a"]

def tokenise(text):
    time.sleep(0.001)

def submit(request_id):
    asked.append(request_id)
    if len(asked) == len(done):
        all_asked.set()
    done[request_id].wait()

def serve(request_id):
    instrument.annotate_request({"gen_ai.request.model": "tiny", "tenant": "x" if request_id in "acd" else "y"})
    tokenise(request_id)
    submit(request_id)
    tokenise(request_id)

def accept(request_id):
    time.sleep(0.001)

def step(ids):
    time.sleep(0.002)

def tidy():
    time.sleep(0.003)

def loop():
    all_asked.wait()
    for key in sorted(asked):
        accept(key)
    done["e"].set()
    for at, batch in enumerate(BATCHES):
        if at == 4:
            tidy()
        step(list(batch))
        for key in batch:
            left[key] -= 1
            if not left[key]:
                done[key].set()

def serve_all():
    global left, asked, all_asked, done
    left = {key: sum(key in batch for batch in BATCHES) for key in "abcd"}
    asked, all_asked, done = [], threading.Event(), {key: threading.Event() for key in "abcde"}
    threads = [threading.Thread(target=loop), *(threading.Thread(target=serve, args=(key,)) for key in "abcde")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""

IN_CODE = """

def scoped(function, kind, *words):
    def call(one):
        with instrument.scope(function.__name__, kind=kind, **dict.fromkeys(words, one)):
            return function(one)
    return call

serve, tokenise, submit = scoped(serve, "request"), scoped(tokenise, "phase"), scoped(submit, "op", "key")
accept, step = scoped(accept, "phase", "key"), scoped(step, "op", "batch")
"""

MAIN = """
import os, sys
import instrument
if "INSTRUMENT_RUN_PID" not in os.environ:
    from instrument.sessions import leaving
    leaving.EXIT_LIMIT_NS = 60 * 10**9  # a machine with other work is no collector that hangs
    instrument.start("profile.yaml")
import shop
shop.serve_all()
"""

STAGES = {("queue",), ("prefill",), ("decode",)}
QUEUE, SIZE = "instrument.request.queue.duration", "instrument.request.batch.size"


@dataclass
class Told:
    """The spans of a collector, by names and not by times or ids."""

    spans: Counter[tuple[str, ...]] = field(default_factory=Counter)
    links: list[list[tuple[str, ...]]] = field(default_factory=list)
    metrics: dict[str, tuple[int, str]] = field(default_factory=dict)
    sizes: float = 0


def of(collector: Collector) -> Told:
    found, (spans,) = Told(), collector.spans.values()
    by_id = {(one.trace_id, one.span_id): one for one in spans}
    assert len(by_id) == len(spans)

    def path(at: Any) -> tuple[str, ...]:
        above = by_id.get((at.trace_id, at.parent_span_id))
        assert above is not None or not at.parent_span_id
        key = next((one.value.string_value for one in at.attributes if one.key == "instrument.key"), "")
        return (*(path(above) if above is not None else ()), f"{at.name} {key}".strip())

    names = {one.trace_id: key for one in spans if (key := path(one)[-1]).startswith("submit ")}
    for one in spans:
        if one.name == "stall":  # of which there are more where the machine is late
            continue
        told = sorted(each.key for each in one.attributes if each.key.startswith("gen_ai."))
        found.spans[(names.get(one.trace_id, ""), *path(one), *told)] += 1
    found.links = [
        sorted((names[link.trace_id], by_id[link.trace_id, link.span_id].name) for link in its)
        for its in (one.links for one in sorted(spans, key=lambda one: one.start_time_unix_nano) if one.name == "step")
    ]
    for metric in collector.metrics:
        if metric.name in (QUEUE, SIZE):
            (point,) = metric.exponential_histogram.data_points
            labels = str(sorted((one.key, one.value.string_value) for one in point.attributes))
            found.metrics[metric.name] = point.count, labels
            if metric.name == SIZE:
                found.sizes = point.sum
            queues = {
                (span.trace_id, span.parent_span_id): span.end_time_unix_nano - span.start_time_unix_nano
                for span in spans
                if span.name == "queue"
            }
            if metric.name == QUEUE:
                for one in point.exemplars:
                    assert one.as_double == queues[one.trace_id, one.span_id] / 1e9
    return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting(take) as server:
        Path("shop.py").write_text(SHOP)
        yield server


def served(command: str | Sequence[str], profile: str, main: str = MAIN) -> str:
    """Return the output of a service that serves five requests."""
    Path("main.py").write_text(main)
    Path("profile.yaml").write_text(profile)
    begin = [command] if isinstance(command, str) else command
    done = subprocess.run([*begin, "main.py"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def serve(collector: Collector, *command: str, profile: str, main: str = MAIN) -> Told:
    """Serve requests with a command and a profile, and return the spans, links and metrics of the collector."""
    served(command, profile, main)
    until(lambda: not agent_socket.list_runs())
    return of(collector)


@pytest.mark.parametrize(
    ("rules", "capture"),
    [(RULES, "sample: 1"), (RULES, "sample: 0, where: {tenant: x}"), ("requests: auto", "sample: 1")],
    ids=["by rules", "by rules, and not all are kept", "in code"],
)
def test_a_collector_gets_the_same_with_an_agent_and_without(collector: Collector, rules: str, capture: str) -> None:
    if rules is not RULES:
        Path("shop.py").write_text(SHOP + IN_CODE)
    profile = PROFILE % (rules, capture, collector.server_port)
    alone = serve(collector, sys.executable, profile=profile)
    collector.spans.clear()
    collector.metrics.clear()
    by_agent = serve(collector, *INSTRUMENT, "run", "--profile", "profile.yaml", "--", profile=profile)
    assert alone == by_agent
    kept = "abcd" if capture == "sample: 1" else "acd"
    derived = [path[:1] + path[2:3] for path in alone.spans if path[2:3] in STAGES]
    assert sorted(derived) == sorted((f"submit {key}", name) for key in kept for (name,) in STAGES)
    assert alone.metrics[QUEUE][0] == alone.metrics[SIZE][0] == 4
    served_at_once = [4, 4, 3, 2, 1, 1, 2, 1] if capture == "sample: 1" else [3, 3, 2, 1, 1, 1, 1, 1]
    assert [len(links) for links in alone.links] == served_at_once


FLUSH = """
import os
session = instrument.session()
assert "numpy" in sys.modules
assert session.flush(100).complete
assert session.losses() == {}
os._exit(0)
"""


def test_a_flush_sends_all_that_has_finished(collector: Collector) -> None:
    profile = PROFILE % (RULES, "sample: 1", collector.server_port)
    at_end = serve(collector, sys.executable, profile=profile)
    collector.spans.clear()
    collector.metrics.clear()
    assert serve(collector, sys.executable, profile=profile, main=MAIN + FLUSH) == at_end


FORK = """
assert instrument.flush(100).complete
child = os.fork()
shop.serve_all()
if child:
    assert os.waitpid(child, 0)[1] == 0
instrument.stop()
"""


def test_a_forked_child_exports_what_it_records_and_its_parent_goes_on(collector: Collector) -> None:
    served(sys.executable, PROFILE % (RULES, "sample: 1", collector.server_port), MAIN + FORK)
    rounds = sorted(Counter(one.name for one in spans)["queue"] for spans in collector.spans.values())
    assert rounds == [4, 8]
    for spans in collector.spans.values():
        assert len({one.span_id for one in spans}) == len(spans)
        assert Counter(one.name for one in spans)["step"] in (8, 16)


def test_spans_that_a_collector_does_not_take_are_counted_and_the_end_is_bounded() -> None:
    Path("shop.py").write_text(SHOP)
    with collecting(refuse_with(400), metrics=take) as refusing:
        told = """
session = instrument.session()
instrument.stop()
print(session.losses())
"""
        out = served(sys.executable, PROFILE % (RULES, "sample: 1", refusing.server_port), MAIN + told)
    losses = ast.literal_eval(out)
    derived = losses.pop("spans of queue, prefill, decode and stalls lost by the OTLP export")
    assert derived >= 15  # on a busy machine with a stall more
    assert losses == {"spans failed by the OTLP export": 34}


@pytest.fixture
def shop(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The service, for a session that has begun."""
    monkeypatch.syspath_prepend(".")
    sys.modules.pop("shop", None)
    yield SimpleNamespace(serve_all=lambda: import_module("shop").serve_all())
    instrument.stop()


def begin(collector: Collector, capture: str = "sample: 1") -> Session:
    session = instrument.start(loads(PROFILE % (RULES, capture, collector.server_port), environ={}))
    assert session is not None
    return session


def is_flushed(session: Session) -> bool:
    found = session.flush(100)
    return found is not None and found.complete


def names_of(collector: Collector) -> Counter[str]:
    """Return the spans of a collector by name. None is there twice."""
    (spans,) = collector.spans.values()
    assert len({(one.trace_id, one.span_id) for one in spans}) == len(spans)
    return counted(spans)


def counted(spans: Sequence[Any]) -> Counter[str]:
    """The spans by name, but for stalls, of which there are more where the machine is late."""
    return Counter(one.name for one in spans if one.name != "stall")


ONCE = Counter({
    "serve": 5, "tokenise": 10, "submit": 5, "accept": 5, "step": 8, "tidy": 1,
    "queue": 4, "prefill": 4, "decode": 4,
})  # fmt: skip


def test_the_next_session_of_a_process_begins_anew(collector: Collector, shop: Any) -> None:
    for _ in range(2):
        session = begin(collector)
        shop.serve_all()
        instrument.stop()
        assert session.losses() == {}
        session.flush(0)
        assert RECORDER.memory_fd >= 0
    one, other = collector.spans.values()
    assert counted(one) == counted(other) == ONCE


def test_a_window_sends_what_the_session_does_not_and_nothing_twice(collector: Collector, shop: Any) -> None:
    session = begin(collector, "sample: 0, where: {tenant: x}")
    shop.serve_all()
    session.exporting.send_window(session.recorded.start_ns, time.monotonic_ns())
    instrument.stop()
    derived = {"queue": 3, "prefill": 3, "decode": 3}
    own = {"serve": 5, "tokenise": 10, "submit": 5, "accept": 5, "step": 8, "tidy": 1}
    assert names_of(collector) == {**own, **derived}


def test_an_unreadable_recording_is_not_exported_and_the_service_goes_on(
    collector: Collector, shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = begin(collector)
    monkeypatch.setattr(RecordingExport, "read_new_rows", lambda *_, **__: 1 // 0)
    shop.serve_all()
    with suppress(ZeroDivisionError):  # raised on the session's thread, where that has looked first
        session.flush(100)
    assert FAULTS.count_by_place()
    FAULTS.clear()
    shop.serve_all()
    instrument.stop()
    assert not collector.spans
    assert session.tally().calls == 2 * sum(count for name, count in ONCE.items() if (name,) not in STAGES)
