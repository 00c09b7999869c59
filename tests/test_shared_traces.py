"""Requests with keys at a collector that gets them of processes which no agent joins: one trace by run and key."""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from otlp_collectors import Collector, collecting, take
from test_agent import INSTRUMENT, folder, until

from instrument.runtime import agent_socket, environment
from instrument.trace.request_trees import make_trace_id_of_key

__all__ = ["folder"]

PROFILE = """
service: shop
agent: %s
functions:
  - {match: "shop:serve", kind: request}
  - {match: "shop:submit", key: key}
  - {match: "shop:step", batch: keys}
  - {match: "shop:follow"}
  - {match: "shop:begin"}
  - {match: "shop:loop"}
  - {match: "shop:accept", key: key}
  - {match: "shop:compute", kind: phase}
capture: {sample: 1}
export: {otlp: {endpoint: "http://127.0.0.1:%d"}}
"""

SHOP = """
import contextvars, threading
import instrument

is_over = threading.Event()

def submit(key, to):
    to.write(key + "\\n")
    to.flush()

def step(keys):
    pass

def begin():
    pass

def follow():
    is_over.wait()

def follow_and_begin():
    follow()
    begin()

def serve(key, to, *, injects=False):
    global late
    headers = {}
    if key == "plain":
        late = threading.Thread(target=contextvars.copy_context().run, args=(follow_and_begin,))
        late.start()
    if injects:
        instrument.inject(headers)
    submit(key, to)
    if key == "open":
        thread = threading.Thread(target=step, args=([key],))
        thread.start()
        thread.join()
        assert instrument.flush(100)
    return headers.get("traceparent")

def compute():
    pass

def accept(key):
    if key == "handed on":
        headers = {}
        instrument.inject(headers)
        open("accepted", "w").write(headers["traceparent"])
    compute()

def loop(keys):
    for key in keys:
        accept(key.strip())
"""

FRONT = """
import io, subprocess, sys
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
import instrument, shop
if "engine" in sys.argv:
    engine = subprocess.Popen([sys.executable, "engine.py"])
told = NonRecordingSpan(SpanContext(0xabc, 0xdef, True, TraceFlags(1)))
with open("keys", "w") as to:
    for key in ("plain", "open", "handed on"):
        shop.serve(key, to)
    for _ in range(2):
        shop.serve("twice", io.StringIO())
    instrument.flush(100)
    shop.is_over.set()
    shop.late.join()
    sent = shop.serve("sent", to, injects=True)
    with trace.use_span(told):
        shop.serve("told", to)
if "engine" in sys.argv:
    assert engine.wait() == 0
open("sent", "w").write(sent)
open("summary", "w").write(instrument.summary(views=["requests"]))
"""

ENGINE = """
import shop
with open("keys") as keys:
    shop.loop(keys)
"""


@pytest.fixture
def collector() -> Iterator[Collector]:
    for name, text in (("shop.py", SHOP), ("front.py", FRONT), ("engine.py", ENGINE)):
        Path(name).write_text(text)
    os.mkfifo("keys")
    with collecting(take) as server:
        yield server


def begin(*command: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    words = [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", *command]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, **(environ or {})})


def end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        _, told = process.communicate(timeout=240)
        assert process.returncode == 0, told
    until(lambda: not agent_socket.list_runs())


def traces(collector: Collector) -> Mapping[str, Mapping[str, set[int]]]:
    """By keys the traces of the spans of each name that are in the same trace of the same process."""
    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for spans in collector.spans.values():
        by_id = {one.span_id: one for one in spans}
        keys = {(one.trace_id, key) for one in spans if (key := key_of(one))}
        for one in spans:
            for key in (key for trace_id, key in keys if trace_id == one.trace_id):
                found[key][one.name].add(int.from_bytes(one.trace_id))
            if one.name in ("submit", "compute", "follow"):
                assert by_id[one.parent_span_id].trace_id == one.trace_id
    return found


def key_of(span: Span) -> str:
    return next((one.value.string_value for one in span.attributes if one.key == "instrument.key"), "")


def check(collector: Collector, run: str) -> None:
    """Each key's spans of both processes share a trace, but for what others know by another one."""
    found = traces(collector)
    sent, accepted = (int(Path(name).read_text().split("-")[1], 16) for name in ("sent", "accepted"))
    for key in ("plain", "open", "sent", "told"):
        assert found[key]["accept"] == found[key]["compute"] == {make_trace_id_of_key(run, key)}
    for key in ("plain", "open", "handed on"):
        assert found[key]["serve"] == found[key]["submit"] == {make_trace_id_of_key(run, key)}
    assert found["plain"]["follow"] == found["plain"]["serve"]
    assert found["sent"]["serve"] == found["sent"]["submit"] == {sent}
    assert found["told"]["serve"] == found["told"]["submit"] == {0xABC}
    assert found["handed on"]["accept"] == found["handed on"]["compute"] == {accepted}
    assert accepted != make_trace_id_of_key(run, "handed on")
    assert len(found["twice"]["serve"]) == 2
    assert make_trace_id_of_key(run, "twice") in found["twice"]["serve"]
    assert f"trace {make_trace_id_of_key(run, 'open'):032x}" in " ".join(Path("summary").read_text().split())
    every = [one for spans in collector.spans.values() for one in spans]
    ids = {(one.trace_id, one.span_id): one.name for one in every}
    for name, key in (("step", "open"), ("begin", "plain")):
        ((link,),) = (one.links for one in every if one.name == name)
        assert int.from_bytes(link.trace_id) == make_trace_id_of_key(run, key)
        assert ids[link.trace_id, link.span_id] == "serve"


@pytest.mark.slow
def test_processes_without_an_agent_share_the_traces_of_keys_and_no_two_runs_do(collector: Collector) -> None:
    Path("profile.yaml").write_text(PROFILE % ("off", collector.server_port))
    plain = set()
    for _ in range(2):
        collector.spans.clear()
        end([begin("front.py", "engine")])
        found = traces(collector)["plain"]
        assert found["accept"] == found["serve"] != set()
        plain |= found["serve"]
    assert len(plain) == 2


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["auto", "off"])
def test_runs_of_several_hosts_that_share_a_name_share_the_traces_of_keys(collector: Collector, agent: str) -> None:
    Path("profile.yaml").write_text(PROFILE % (agent, collector.server_port))
    shared = {environment.SHARED_RUN_VARIABLE: "blue"}
    end([begin(name, environ=shared) for name in ("engine.py", "front.py")])
    check(collector, "blue")


@pytest.mark.slow
def test_an_agent_joins_by_the_request_s_own_trace_where_no_name_is_shared(collector: Collector) -> None:
    Path("profile.yaml").write_text(PROFILE % ("auto", collector.server_port))
    end([begin("front.py", "engine")])
    found = traces(collector)
    for key in ("plain", "sent", "told", "handed on"):
        assert found[key]["accept"] == found[key]["serve"] != set()
    assert found["told"]["accept"] == {0xABC}
