"""The agent of a run exports every span of its processes once or counts it, in spite of kills in between."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from engine_service import beside_engine
from otlp_collectors import Collector, Handler, be_slow, collecting, refuse_with, swallow, take
from sent_spans import converted
from test_agent import INSTRUMENT, agents, begin, children_of, folder, kill, run, until
from test_otlp import FATES, UNTIL_THE_TIME_IS_UP

from instrument.cli import main
from instrument.recording.export_checkpoint import SENT, ExportCheckpoint
from instrument.recording.mapped import Mapped
from instrument.runtime import agent_socket

__all__ = ["folder"]

PROFILE = """
service: shop
functions:
  - {match: "engine:serve", kind: request}
  - match: ["engine:step", "engine:fail"]
export:
  otlp: {endpoint: "http://127.0.0.1:%d"%s}
%s
"""

SERVICE = """
import os, sys, threading, time

import engine
from engine import serve

def threads():
    return sorted(one.name for one in threading.enumerate())
"""

TAKES = f"""{SERVICE}
from instrument.sessions import process
"""

ENGINE = """
import time

def step(x):
    return x + 1

def fail(x):
    raise ValueError(x)

def serve(x):
    for _ in range(9):
        step(x)
    if x % 10 == 3:
        try:
            fail(x)
        except ValueError:
            pass
    return x
"""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting(take) as server:
        profile(server, timeout=PATIENTLY)
        yield server


PATIENTLY = ", timeout: 200s"
"""The time for an answer of a collector on a machine with other work. A later answer would be sent again."""


def profile(server: Collector, more: str = "", timeout: str = "") -> None:
    Path("engine.py").write_text(ENGINE)
    Path("profile.yaml").write_text(PROFILE % (server.server_port, timeout, more))


def recordings() -> Iterator[tuple[ExportCheckpoint, Mapped]]:
    (home,) = agent_socket.list_runs()
    with agent_socket.connect_to_agent(home / agent_socket.SOCKET, 60) as caller:
        agent_socket.send(caller, {"ask": "processes", "memory": True})
        while True:
            message, descriptors = agent_socket.receive(caller)
            assert message is not None
            if "end" in message:
                return
            for descriptor in descriptors:
                place, mapped = ExportCheckpoint(descriptor), Mapped(descriptor)
                os.close(descriptor)
                try:
                    yield place, mapped
                finally:
                    place.close()
                    mapped.close()


@pytest.mark.slow
def test_the_agent_exports_for_all_processes_over_one_connection_and_they_have_no_thread_for_it(
    collector: Collector,
) -> None:
    done = run(f"""{SERVICE}
import multiprocessing

def work(n):
    for x in range(n):
        serve(x)
    assert "instrument-otlp" not in threads() and "instrument" not in threads(), threads()

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(work, [100, 100, 100, 100], 1)
        pool.close()
        pool.join()
    work(100)
""")
    assert done.returncode == 0, done.stderr
    until(lambda: not agent_socket.list_runs())
    assert Counter(collector.taken) == {"serve": 500, "step": 4500, "fail": 50}
    assert collector.connections == 1
    assert 2 <= len(collector.spans) <= 3
    ids = [(span.trace_id, span.span_id) for spans in collector.spans.values() for span in spans]
    assert len(set(ids)) == len(ids)


@pytest.mark.slow
def test_the_agent_reports_the_metrics_of_requests_too_and_the_process_has_no_thread_for_them(
    collector: Collector,
) -> None:
    profile(collector, "requests: auto")
    Path("shop.py").write_text("""
def app(environ, start_response):
    start_response("200 OK", [("Content-Length", "1")])
    return [b"x"]
""")
    done = run(f"""{SERVICE}
import shop
from urllib.request import urlopen
from wsgiref.simple_server import WSGIRequestHandler, make_server

with make_server("127.0.0.1", 0, shop.app, handler_class=WSGIRequestHandler) as server:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    for _ in range(30):
        urlopen(f"http://127.0.0.1:{{server.server_port}}/").read()
    assert "instrument-otlp" not in threads() and "instrument" not in threads(), threads()
    server.shutdown()
    thread.join()
""")
    assert done.returncode == 0, done.stderr
    until(lambda: not agent_socket.list_runs())
    names = Counter(collector.taken)
    assert {name: count for name, count in names.items() if name.startswith("GET")} == {"GET": 30}, names
    found = [metric for metric in collector.metrics if metric.name == "http.server.request.duration"]
    (point,) = found[-1].exponential_histogram.data_points
    assert point.count == 30
    kept = {bytes(span.span_id) for spans in collector.spans.values() for span in spans}
    assert {
        bytes(one.span_id) for metric in found for one in metric.exponential_histogram.data_points[0].exemplars
    } <= kept
    assert {"instrument.cost", "http.server.active_requests"} <= set(names)
    assert collector.connections == 1


CALLS_TWO = """
import multiprocessing, time
from urllib.request import Request, urlopen
from wsgiref.simple_server import make_server

def work(queue):
    import shop
    with make_server("127.0.0.1", 0, shop.app) as server:
        queue.put(server.server_port)
        for _ in range(10):
            server.handle_request()

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    others = [context.Process(target=work, args=(queue,)) for _ in range(2)]
    for other in others:
        other.start()
    one, two = queue.get(), queue.get()
    for number in range(10):
        trace = f"00-{number + 1:032x}-{number + 1:016x}-00"
        for port, takes in ((one, 0), (two, 0.4 if number == 5 else 0)):
            since = time.monotonic()
            urlopen(Request(f"http://127.0.0.1:{port}/{takes}", headers={"traceparent": trace})).read()
            if (took_s := time.monotonic() - since) > 0.3:
                print(number + 1, took_s)
    for other in others:
        other.join()
"""


@pytest.mark.slow
def test_a_slow_part_of_a_request_keeps_its_part_in_the_other_process(collector: Collector) -> None:
    profile(collector, "requests: auto\ncapture: {sample: 0.0, slow: 300ms}")
    Path("shop.py").write_text("""
import time

def app(environ, start_response):
    time.sleep(float(environ["PATH_INFO"].strip("/")))
    start_response("200 OK", [("Content-Length", "1")])
    return [b"x"]
""")
    for _ in range(10):
        collector.spans.clear()
        done = run(CALLS_TWO)
        assert done.returncode == 0, done.stderr
        until(lambda: not agent_socket.list_runs())
        slow = {int(trace): float(took_s) for trace, took_s in map(str.split, done.stdout.splitlines())}
        if slow[6] < 1.5:
            break  # else the decision on the first part did not wait for the second
    spans = [(instance, span) for instance, of in collector.spans.items() for span in of]
    parts = Counter(int.from_bytes(span.trace_id, "big") for _, span in spans)
    assert {6} <= parts.keys() <= slow.keys()  # others on a machine with other work
    assert parts[6] == 2
    assert len({instance for instance, _ in spans}) == 2


def told(span: Any) -> tuple[Any, ...]:
    """A span as it was sent, less what differs from run to run."""
    changing = ("thread.id", "instrument.self_ns", "instrument.active_ns", "instrument.task_id")
    attributes = {one.key: str(one.value) for one in span.attributes if one.key not in changing}
    status = (span.status.code, span.status.message)
    return (
        span.name,
        span.kind,
        status,
        span.flags,
        span.trace_state,
        len(span.links),
        tuple(sorted(attributes.items())),
    )


@pytest.mark.slow
def test_the_agent_sends_the_same_as_a_process_would(collector: Collector) -> None:
    source = f"""{SERVICE}
import asyncio
import instrument
from instrument import scope

async def answer(x):
    await asyncio.sleep(0)
    with scope("read") as own:
        own.annotate(size=x, names=["a", "b"], ratio=0.5, is_true=True, where=object())

for x in range(20):
    serve(x)
with scope("failing", kind="request") as own:
    own.annotate(user="Ada", n=1 << 40)
    try:
        with scope("inner"):
            raise KeyError("gone")
    except KeyError:
        own.set_status("ERROR", "it is gone", error_type="gone")
asyncio.run(answer(3))

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider

trace.set_tracer_provider(TracerProvider(resource=Resource({{"service.name": "shop", "deployment": "blue"}})))
with trace.get_tracer("own").start_as_current_span("outer"):
    serve(1)
thread = threading.Thread(target=serve, args=(1,), name="Wörker")
thread.start()
thread.join()
"""
    found = []
    for more in ("", "agent: off"):
        profile(collector, more)
        collector.spans.clear()
        done = run(source)
        assert done.returncode == 0, done.stderr
        until(lambda: not agent_socket.list_runs())
        (spans,) = collector.spans.values()
        found.append(spans)
    by_agent, by_itself = (Counter(map(told, spans)) for spans in found)
    assert by_agent == by_itself
    for spans in found:
        own = {span.span_id: span for span in spans}
        below = [span for span in spans if span.parent_span_id in own]
        assert len(below) == len(spans) - 24
        assert len({span.parent_span_id for span in spans} - {b"", *own}) == 1  # the service's own span
        assert all(own[span.parent_span_id].trace_id == span.trace_id for span in below)
        assert all(abs(span.end_time_unix_nano / 1e9 - time.time()) < 600 for span in spans)


LOAD = f"""{SERVICE}
import multiprocessing

def work(queue):
    done, end = 0, time.monotonic() + 1200  # longer than twenty agents take on a machine with other work
    while not os.path.exists("enough") and time.monotonic() < end:
        assert serve(done) == done
        done += 1
        if done % 8 == 0:
            time.sleep(0.01)
    queue.put((os.getpid(), done))
    while not os.path.exists("over") and time.monotonic() < end:
        time.sleep(0.01)

if __name__ == "__main__":
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    others = [multiprocessing.get_context("spawn").Process(target=work, args=(queue,)) for _ in range(2)]
    for other in others:
        other.start()
    print([queue.get() for _ in others], flush=True)
    for other in others:
        other.join()
"""


def spans_of(requests: int) -> int:
    return 10 * requests + sum(1 for x in range(requests) if x % 10 == 3)


def settled() -> list[Mapping[str, int]]:
    """The fates of all processes that have recorded anything, once everything has one; [] before."""
    found = []
    for place, mapped in recordings():
        progress, heads = place.read_progress(), mapped.count_written_rows()
        if not sum(heads.values()):
            continue
        fates = progress.fates
        if fates["seen"] + fates["missed"] != sum(heads.values()) or progress.unsettled_spans:
            return []
        found.append(fates)
    return found


def conserved(service: subprocess.Popen[str], collector: Collector) -> Counter[str]:
    """End the load; the fates of all spans, after checking that each has one, and that none came twice."""
    Path("enough").touch()
    assert service.stdout is not None
    requests = sum(done for _, done in eval(service.stdout.readline()))
    total: Counter[str] = Counter()
    for fates in until(settled):
        assert fates["seen"] + fates["intervals"] == sum(
            fates[name] for name in ("passed", "beyond", "kept", "unanswered", "abandoned")
        ), fates
        assert fates["kept"] == sum(fates[name] for name in SENT), fates
        total.update(fates)
    assert total["seen"] + total["missed"] >= spans_of(requests) - 100
    ids = Counter(span.span_id for spans in collector.spans.values() for span in spans)
    assert max(ids.values()) == 1
    assert total["exported"] <= len(ids) <= total["exported"] + total["failed"] + total["unanswered"]
    return total


EXPORTED = 500
"""Spans that each agent exports before it is killed."""


def exported() -> int:
    """Return the number of exported spans, as the recordings have it."""
    return sum(place.read_progress().fates["exported"] for place, _ in recordings())


def killed(service: subprocess.Popen[str], collector: Collector, times: int) -> Counter[str]:
    """Return the fates of all spans of a service whose agent is killed `times` times."""
    (agent,) = until(agents)
    for number in range(times):
        before = exported()
        until(lambda before=before: exported() >= before + EXPORTED)
        time.sleep(number % 7 / 10)
        kill(agent)
        (agent,) = until(lambda before=agent: [one for one in agents() if one != before])
        until(
            lambda: [place.is_taken() for place, mapped in recordings() if mapped.count_written_rows()] == [True, True]
        )
    found = conserved(service, collector)
    Path("over").touch()
    out, errors = service.communicate(timeout=240)
    assert (service.returncode, out) == (0, ""), errors
    return found


@pytest.mark.slow
def test_the_next_agent_exports_or_counts_unexported_spans_of_the_last_one(collector: Collector) -> None:
    found = killed(begin(LOAD), collector, 2)
    assert found["exported"] >= 2 * EXPORTED, found  # the rest is counted, more of it on a slow machine


MISSES = f"""{SERVICE}
forks = []
os.register_at_fork(before=lambda: forks.append(1))
for line in sys.stdin:
    for x in range(10):
        serve(x)
    while os.path.exists("/proc/self/task") and any(
        open(f"/proc/self/task/{{task}}/children").read() for task in os.listdir("/proc/self/task")
    ):
        time.sleep(0.01)  # one that begins an agent ends at once
    print(forks, flush=True)
"""


@pytest.mark.slow
def test_a_service_begins_another_agent_without_a_fork_or_a_child_and_counts_what_none_sends_where_it_may_not(
    collector: Collector,
) -> None:
    service = begin(MISSES)
    assert service.stdin is not None
    assert service.stdout is not None

    def go_on() -> None:
        assert service.stdin is not None
        assert service.stdout is not None
        service.stdin.write("\n")
        service.stdin.flush()
        assert service.stdout.readline() == "[]\n", "a hook of a fork was run"

    go_on()
    (agent,) = until(agents)
    until(lambda: len(collector.taken) == spans_of(10))
    until(
        lambda: [place.read_progress().fates["exported"] for place, _ in recordings()] == [spans_of(10)]
    )  # it has heard so
    kill(agent)
    go_on()
    (other,) = until(lambda: [one for one in agents() if one != agent])
    until(lambda: len(collector.taken) == 2 * spans_of(10))
    assert Counter(collector.taken) == {"serve": 20, "step": 180, "fail": 2}
    until(
        lambda: [place.read_progress().fates["exported"] for place, _ in recordings()] == [2 * spans_of(10)]
    )  # it has heard so
    (home,) = agent_socket.list_runs()
    with (home / agent_socket.BEGINNINGS).open("a") as beginnings:
        beginnings.writelines([f"{time.monotonic()}\n"] * agent_socket.MOST_AGENTS)
    kill(other)
    until(lambda: not agents())
    go_on()
    _, errors = service.communicate(timeout=240)
    assert f"{spans_of(10)} spans that no agent has exported" in errors
    assert (service.returncode, len(collector.taken)) == (0, 2 * spans_of(10))
    agent_socket.remove_abandoned_runs()


STARTS = """
import os, signal, sys, threading
import multiprocessing
import engine
import instrument
from instrument.sessions import leaving

leaving.EXIT_LIMIT_NS = 60 * 10**9

def work():
    instrument.start("profile.yaml")
    engine.serve(1)
    instrument.stop()

if __name__ == "__main__":
    instrument.start("profile.yaml")
    for x in range(10):
        engine.serve(x)
    assert instrument.flush(60).complete
    other = multiprocessing.get_context("spawn").Process(target=work)
    other.start()
    other.join()
    print(sorted(one.name for one in threading.enumerate()), "INSTRUMENT_RUN" in os.environ, flush=True)
    if sys.argv[1] == "stops":
        instrument.stop()
        print("INSTRUMENT_AGENT" in os.environ)
    else:
        engine.serve(2)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["stops", "is killed"])
def test_a_session_that_is_started_in_code_has_an_agent_as_one_of_instrument_run(
    ends: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(agent_socket.VARIABLE, raising=False)
    Path("main.py").write_text(STARTS)
    done = subprocess.run([sys.executable, "main.py", ends], capture_output=True, text=True, timeout=240, check=False)
    first, *more = done.stdout.splitlines()
    assert first == "['MainThread', 'instrument-control'] True", done.stderr
    assert (done.returncode, more) == ((0, ["False"]) if ends == "stops" else (-signal.SIGKILL, [])), done.stderr
    until(lambda: not agent_socket.list_runs())
    requests = 11 if ends == "stops" else 12
    assert Counter(collector.taken) == {"serve": requests, "step": 9 * requests, "fail": 1}
    assert len(list(Path().glob("**/*-died.npz"))) == (ends != "stops")


@pytest.mark.slow
def test_an_exporter_that_is_killed_has_another_one_in_its_place(collector: Collector) -> None:
    service = begin(LOAD)
    (agent,) = until(agents)
    until(lambda: len(collector.spans) == 2)
    (exporter,) = children_of(agent)
    os.kill(exporter, signal.SIGKILL)
    until(lambda: collector.connections == 2)
    before = exported()
    until(lambda: exported() >= before + EXPORTED)
    found = conserved(service, collector)
    assert found["exported"] >= EXPORTED
    Path("over").touch()
    out, errors = service.communicate(timeout=240)
    assert (service.returncode, out) == (0, ""), errors


@pytest.mark.slow
def test_every_span_is_exported_or_counted_after_kills_of_nine_agents(collector: Collector) -> None:
    found = killed(begin(LOAD), collector, 9)
    assert found["exported"] >= 9 * EXPORTED, found  # the rest is counted, more of it on a slow machine


WAITS = f"""{SERVICE}
for x in range(10):
    serve(x)
end = time.monotonic() + 240
while not os.path.exists("over") and time.monotonic() < end:
    time.sleep(0.01)
"""


def exported_by_agent_to(what: str) -> None:
    behave, fate, _ = FATES[what]
    with collecting(behave) as server:
        timeout_s = UNTIL_THE_TIME_IS_UP.get(what, 30)
        profile(server, timeout=f", timeout: {timeout_s}s")
        service = begin(WAITS)
        until(agents)
        (found,) = until(lambda: [one for one in settled() if one["seen"] == spans_of(10)])
        assert found["seen"] == found["kept"] == spans_of(10)
        assert {name: found[name] for name in SENT if found[name]} == {fate: spans_of(10)}, found
        Path("over").touch()
        service.communicate(timeout=240)
        assert service.returncode == 0
        until(lambda: not agent_socket.list_runs())
        assert len(server.taken) == (spans_of(10) if fate == "exported" else 0)


@pytest.mark.slow
def test_a_collector_that_hangs_up_once_gets_all_from_the_agent() -> None:
    exported_by_agent_to("hangs up once")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["takes it", "is busy for a moment", "is gone", "never answers"])
def test_every_span_of_an_agent_has_exactly_one_outcome_with_any_collector(what: str) -> None:
    exported_by_agent_to(what)


@pytest.mark.slow
def test_a_collector_that_never_answers_holds_up_neither_the_service_nor_the_end_of_its_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IMPATIENT", "agents")
    with collecting(swallow) as server:
        profile(server)
        Path("main.py").write_text(f"{SERVICE}\nfor x in range(10): serve(x)\n")
        command = [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py"]
        with Path("errors").open("w") as errors:
            assert subprocess.run(command, stderr=errors, timeout=240).returncode == 0
        until(lambda: not agent_socket.list_runs())
        assert f"{spans_of(10)} spans failed by the OTLP export" in Path("errors").read_text()


@pytest.mark.slow
def test_a_collector_that_is_gone_is_said_where_the_service_writes_its_errors() -> None:
    with collecting(refuse_with(404)) as server:
        profile(server)
        Path("main.py").write_text(WAITS)
        command = [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py"]
        with Path("errors").open("w") as errors, subprocess.Popen(command, stderr=errors) as service:
            said = "spans do not reach the OpenTelemetry collector (HTTP 404 Not Found)"
            until(lambda: said in Path("errors").read_text())
            Path("over").touch()
            assert service.wait(240) == 0


@pytest.mark.slow
def test_a_process_hears_that_the_agent_cannot_export_its_recording_and_that_is_said(collector: Collector) -> None:
    service = begin(WAITS)
    until(lambda: collector.taken)
    (home,) = agent_socket.list_runs()
    recording = os.memfd_create("no recording")
    with agent_socket.connect_to_agent(home / agent_socket.SOCKET, 60) as member:
        export = {"endpoint": f"http://127.0.0.1:{collector.server_port}"}
        agent_socket.send(member, {"join": {"pid": os.getpid(), "started": 0, "export": {"otlp": export}}}, [recording])
        assert agent_socket.receive(member)[0] == {"unexported": True}
        agent_socket.send(member, {"goodbye": {}})
    os.close(recording)
    Path("over").touch()
    _, errors = service.communicate(timeout=240)
    assert errors.count("instrument: the agent could not export what a process records: ") == 1, errors
    assert Counter(collector.taken) == {"serve": 10, "step": 90, "fail": 1}


DRAINS = f"""{SERVICE}
import signal

for x in range(10):
    serve(x)
end = time.monotonic() + 240
while not os.path.exists("draining") and time.monotonic() < end:
    time.sleep(0.01)
for _ in range(3):
    time.sleep(0.5)
    serve(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_an_agent_with_sigterm_still_exports_spans_of_a_service_that_drains(
    collector: Collector,
) -> None:
    service = begin(DRAINS)
    (agent,) = until(agents)
    until(lambda: collector.taken)
    os.kill(agent, signal.SIGTERM)
    Path("draining").touch()
    service.communicate(timeout=240)
    until(lambda: not agent_socket.list_runs())
    assert Counter(collector.taken) == {"serve": 13, "step": 117, "fail": 1}
    assert collector.connections == 1


def test_rows_from_before_a_kill_are_exported(collector: Collector) -> None:
    done = run(f"{SERVICE}\nimport signal\nfor x in range(100): serve(x)\nos.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL
    until(lambda: not agent_socket.list_runs())
    assert Counter(collector.taken) == {"serve": 100, "step": 900, "fail": 10}


@pytest.mark.slow
def test_the_next_agent_exports_or_counts_rows_that_a_process_without_an_agent_left_in_a_file(
    collector: Collector,
) -> None:
    profile(collector, "  summary: {to: stderr}\nlimits: {ring: 1MiB, ring_dir: ./rings}")
    service = begin(f"""{SERVICE}
import multiprocessing, signal

def work():
    for x in range(10):
        serve(x)
    while not os.path.exists("alone"):
        time.sleep(0.01)
    for x in range(10):
        serve(x)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    other = multiprocessing.get_context("spawn").Process(target=work)
    other.start()
    for x in range(10):
        serve(x)
    other.join()
    print("gone", flush=True)
    end = time.monotonic() + 240
    while not os.path.exists("over") and time.monotonic() < end:
        time.sleep(0.01)
""")
    (agent,) = until(agents)
    until(lambda: len(collector.taken) == 2 * spans_of(10))
    kill(agent)
    Path("alone").touch()
    assert service.stdout is not None
    assert service.stdout.readline() == "gone\n"
    until(agents)
    Path("over").touch()
    _, errors = service.communicate(timeout=240)
    until(lambda: not agent_socket.list_runs())
    unread = re.search(r"(\d+) spans that nobody had read as their export ended", errors)
    assert len(collector.taken) + (0 if unread is None else int(unread[1])) >= 3 * spans_of(10), errors


LEAVES = f"""{SERVICE}
import multiprocessing

def work():
    for x in range(10):
        serve(x)

if __name__ == "__main__":
    work()
    other = multiprocessing.get_context("spawn").Process(target=work)
    other.start()
    other.join()
    print("gone", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_unsent_spans_of_an_orderly_ended_process_are_reported_after_a_kill_of_its_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IMPATIENT", "agents")

    def never(handler: Handler, _: int) -> None:
        time.sleep(60)

    with collecting(never) as server, Path("errors").open("w") as errors:
        profile(server, timeout=PATIENTLY)
        Path("main.py").write_text(LEAVES)
        command = [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py"]
        service = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        (agent,) = until(agents)
        assert service.stdout is not None
        assert service.stdout.readline() == "gone\n"
        (home,) = agent_socket.list_runs()
        count = until(lambda: agent_socket.read_unsent_count(home))
        assert 0 < count <= spans_of(10)
        kill(agent)
        until(lambda: [one for one in agents() if one != agent])
        service.communicate("\n", timeout=240)
        until(lambda: not agent_socket.list_runs())
    assert f"{count} spans that may not have been sent when an agent was killed" in Path("errors").read_text()


def test_flush_waits_until_the_agent_has_sent_everything(collector: Collector) -> None:
    done = run(f"""{SERVICE}
import instrument
for x in range(10): serve(x)
found = instrument.flush(100)
print(found.complete, found.exported, found.pending)
""")
    assert done.stdout == f"True {spans_of(10)} 0\n", done.stderr


def test_flush_does_not_leave_out_what_waits_for_its_requests(collector: Collector) -> None:
    Path("core.py").write_text(CORE)
    Path("profile.yaml").write_text(KEYED % ("", 1.0, collector.server_port))
    done = run("""
import core
import instrument

for x in range(10):
    core.step(["nobody's"])
    core.emit("nobody's")
found = instrument.flush(100)
print(found.complete, found.exported, found.pending)
""")
    assert done.stdout == "True 40 0\n", done.stderr


FLOODS = f"""{SERVICE}
child, end, x = os.fork(), time.monotonic() + 600, 0
if child == 0:
    while not os.path.exists("flooded") and time.monotonic() < end:
        time.sleep(0.01)
    for x in range(10):
        serve(x)
while not os.path.exists("over") and time.monotonic() < end:
    for _ in range(200):
        if child:
            serve(x := x + 1)
    time.sleep(0.02)
"""


def proportional_kib(pid: int) -> int:
    """The memory of a process, of pages that it shares its part."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(rollup.partition("\nPss:")[2].split()[0])


@pytest.mark.slow
def test_a_process_that_records_more_than_a_collector_takes_keeps_no_other_from_its_export_nor_fills_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IMPATIENT", "agents")
    with collecting(be_slow) as server:
        profile(server, "limits: {ring: 4MiB}")
        service = begin(FLOODS)
        try:
            until(lambda: len(server.taken) > 30_000)
            (agent,) = agents()
            (exporter,) = children_of(agent)
            assert proportional_kib(agent) + proportional_kib(exporter) < 120 << 10
            Path("flooded").touch()
            until(lambda: Counter(len(spans) for spans in server.spans.values())[spans_of(10)] == 1)
        finally:
            Path("over").touch()
            service.communicate(timeout=240)


@pytest.mark.slow
def test_a_window_is_sent_by_the_agent_where_it_is_not_sampled_and_nothing_is_sent_twice(collector: Collector) -> None:
    profile(collector, "capture: {sample: 0.0, errors: true}")
    done = run(f"""{TAKES}
import instrument

for x in range(100):
    serve(x)
end_ns = time.monotonic_ns()
serve(1)
process.session().exporting.send_window(process.session().recorded.start_ns, end_ns)
assert instrument.flush(100).settled
assert "instrument-otlp" not in threads()
""")
    assert done.returncode == 0, done.stderr
    until(lambda: not agent_socket.list_runs())
    assert Counter(collector.taken) == {"serve": 100, "step": 900, "fail": 10}
    assert collector.connections == 1


KEYED = """
service: shop
functions:
  - {match: "front:serve", kind: request}
  - {match: "front:submit", key: request_id}
  - {match: "core:add", key: request_id}
  - {match: "core:step", batch: ids}
  - {match: "core:emit", key: request_id%s}
  - match: ["core:work", "core:loop"]
capture: {sample: %s, slow: 100ms}
export:
  otlp: {endpoint: "http://127.0.0.1:%d"}
"""

CORE = """
import time

def work(x):
    time.sleep(0.0002)

def add(request_id):
    work(request_id)

def step(ids):
    for x in ids:
        work(x)

def emit(request_id):
    work(request_id)
    return request_id

def loop(asked, done):
    done.put("ready")
    while (request_id := asked.get()) is not None:
        add(request_id)
        step([request_id, "nobody's"])
        done.put(emit(request_id))
"""

FRONT = """
import time

def submit(request_id, asked, done):
    asked.put(request_id)
    assert done.get() == request_id
    if request_id in ("r7", "r23"):
        time.sleep(0.15)

def serve(request_id, asked, done):
    submit(request_id, asked, done)
"""

FIFTY = """
    for x in range(50):
        front.serve(f"r{x}", asked, done)
"""


def served_by_two(collector: Collector, sample: float, emit: str = "") -> list[Any]:
    """The spans of fifty requests, each of which two processes serve, as they came."""
    Path("core.py").write_text(CORE)
    Path("front.py").write_text(FRONT)
    Path("profile.yaml").write_text(KEYED % (emit, sample, collector.server_port))
    done = run(beside_engine(FIFTY))
    assert done.returncode == 0, done.stderr
    until(lambda: not agent_socket.list_runs())
    assert len(collector.spans) == 2
    return [span for spans in collector.spans.values() for span in spans]


@pytest.mark.slow
def test_a_request_that_two_processes_serve_is_one_tree_by_its_key(collector: Collector) -> None:
    spans = served_by_two(collector, 1.0)
    assert Counter(span.name for span in spans) == {
        "serve": 50, "submit": 50, "add": 50, "step": 50, "emit": 50, "work": 200, "loop": 1,
        "queue": 50,
    }  # fmt: skip
    own = {span.span_id: span for span in spans}
    assert len(own) == len(spans)
    of_requests: dict[bytes, list[str]] = {}
    for span in spans:
        of_requests.setdefault(span.trace_id, []).append(span.name)
        if span.parent_span_id:
            assert own[span.parent_span_id].trace_id == span.trace_id
        if span.name in ("add", "emit"):
            assert own[span.parent_span_id].name == "submit"
    parts = ["add", "emit", "queue", "serve", "submit", "work", "work"]
    assert Counter(tuple(sorted(names)) for names in of_requests.values())[tuple(parts)] == 50
    assert len(of_requests) == 51  # and the engine's loop, with its steps
    requests = {span.trace_id: span.span_id for span in spans if span.name == "serve"}
    linked = [(link.trace_id, link.span_id) for span in spans if span.name == "step" for link in span.links]
    assert sorted(linked) == sorted(requests.items())


LONG = """
import time

def add(request_id):
    time.sleep(0.001)

def step(tokens):
    time.sleep(0.1)

def loop(asked, done):
    done.put("ready")
    add(asked.get())
    end, steps = time.monotonic() + 20, 0
    step({"long": 100})
    while time.monotonic() < end or steps < 160:
        step({"long": 1, "other": 1})
        steps += 1
        time.sleep(0.3 if 10 < end - time.monotonic() < 10.5 else 0)
    done.put("long")
    asked.get()
"""


@pytest.mark.slow
def test_a_request_of_twenty_seconds_has_its_stages_and_its_batches_their_links(collector: Collector) -> None:
    Path("core.py").write_text(LONG)
    Path("front.py").write_text(FRONT)
    recording = 'export:\n  recording: {path: "traces/{service}-{pid}.npz"}'
    text = KEYED % ("", 1.0, collector.server_port)
    Path("profile.yaml").write_text(text.replace("batch: ids", "batch: tokens").replace("export:", recording))
    done = run(beside_engine('front.serve("long", asked, done)'))
    assert done.returncode == 0, done.stderr
    until(lambda: not agent_socket.list_runs())
    spans = [span for of in collector.spans.values() for span in of]
    [request] = [span for span in spans if span.name == "serve"]
    steps = [span for span in spans if span.name == "step"]
    assert len(steps) > 150
    assert {tuple((link.trace_id, link.span_id) for link in span.links) for span in steps} == {
        ((request.trace_id, request.span_id),)
    }
    names = ("queue", "first batch", "later batches", "stall")
    stages = [span for span in spans if span.name in names]
    assert {(span.trace_id, span.parent_span_id) for span in stages} == {(request.trace_id, request.span_id)}
    assert len({span.span_id for span in spans}) == len(spans)
    sent = sorted((span.name, span.end_time_unix_nano - span.start_time_unix_nano) for span in stages)
    assert [name for name, _ in sent][:3] == ["first batch", "later batches", "queue"]
    files = sorted(map(str, Path("traces").iterdir()))
    assert main(["convert", *files, "--to", "otlp", "-o", "all.jsonl"]) == 0
    found = [
        (span["name"], int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"]))
        for line in Path("all.jsonl").read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
        if span["name"] in names
    ]
    assert sorted(found) == sent


@pytest.mark.slow
@pytest.mark.parametrize("emit", ["", pytest.param(", kind: request", marks=pytest.mark.slow)])
def test_engine_work_of_a_slow_request_is_kept_with_it(collector: Collector, emit: str) -> None:
    spans = served_by_two(collector, 0.0, emit)
    own = {span.span_id: span for span in spans}
    slow = [span for span in spans if span.name == "serve"]
    assert all(span.end_time_unix_nano - span.start_time_unix_nano > 10**8 for span in slow)
    count = len(slow)  # two, on a machine with other work perhaps more
    assert count >= 2
    assert Counter(span.name for span in spans) == {
        "serve": count, "submit": count, "add": count, "emit": count, "work": 2 * count, "queue": count, "step": count,
    }  # fmt: skip
    keys = {one.value.string_value for span in spans for one in span.attributes if one.key == "instrument.key"}
    assert {"r7", "r23"} <= keys
    requests = {(span.trace_id, span.span_id) for span in slow}
    steps = [span for span in spans if span.name == "step"]
    assert {(link.trace_id, link.span_id) for step in steps for link in step.links} == requests
    assert {step.parent_span_id for step in steps} == {b""}
    assert len({span.trace_id for span in spans}) == 2 * count
    assert all(span.parent_span_id in own for span in spans if span.name not in ("serve", "step"))


LAUNCHED = """
import instrument
from engine import serve, step

other = {"traceparent": "00-" + "b" * 32 + "-" + "2" * 16 + "-01"}

if __name__ == "__main__":
    step(1)
    with instrument.scope("load"):
        step(2)
        headers = {}
        instrument.inject(headers)
        print(headers["traceparent"], headers["tracestate"])
    serve(1)
    with instrument.scope("job", kind="request", carrier=other):
        pass
    step(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "later"),
    [("", {"serve": 1, "step": 10}), ("agent: off\ncapture: {sample: 0}", {})],
    ids=["by the agent", "by the process"],
)
def test_what_began_before_the_first_request_is_below_the_span_that_the_environment_names(
    folder: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch, more: str, later: Mapping[str, int]
) -> None:
    launcher, other = bytes.fromhex("a" * 32), bytes.fromhex("b" * 32)
    monkeypatch.setenv("TRACEPARENT", f"00-{launcher.hex()}-{'1' * 16}-01")
    monkeypatch.setenv("TRACESTATE", "vendor=7")
    more += (
        "\nexport: {recording: {path: traces/a.npz}, parquet: {path: data/}, otlp: {endpoint: 'http://127.0.0.1:%d'}}"
    )
    profile(collector)
    text = Path("profile.yaml").read_text().partition("export:")[0]
    Path("profile.yaml").write_text(text + more % collector.server_port)
    done = run(LAUNCHED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0].split("-")[1] == launcher.hex()
    assert done.stdout.split()[1] == "vendor=7"
    until(lambda: not agent_socket.list_runs())
    (spans,) = collector.spans.values()
    by_trace: dict[bytes, list[Any]] = {}
    for span in spans:
        by_trace.setdefault(span.trace_id, []).append(span)
    below = by_trace.pop(launcher)
    assert sorted(span.name for span in below if span.parent_span_id.hex() == "1" * 16) == ["load", "step"]
    assert len(below) == 3
    assert {span.trace_state for span in below} == {"vendor=7"}
    (job,) = by_trace.pop(other)
    assert (job.name, job.parent_span_id.hex()) == ("job", "2" * 16)
    others = [span for spans in by_trace.values() for span in spans]
    assert Counter(span.name for span in others) == later
    assert len(by_trace) == len(later)
    of_file = [span for span in converted(Path("traces")) if span.trace == launcher.hex()]
    assert sorted(span.name for span in of_file if span.parent == "1" * 16) == ["load", "step"]
    assert len(of_file) == 3
    ids = {(span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()) for span in spans}
    from pyarrow import dataset

    rows = dataset.dataset("data/spans").to_table(["trace_id", "span_id", "parent_span_id"]).to_pylist()
    assert {tuple((value or b"").hex() for value in row.values()) for row in rows} == ids
