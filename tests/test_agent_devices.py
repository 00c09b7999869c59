"""The agent of a run exports of processes that time a device what they would send themselves."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driver import environment, why_not
from otlp_collectors import Collector, collecting, take
from test_agent import INSTRUMENT, agents, begin, folder, run, until
from test_agent_export import settled

from instrument.runtime import agent_socket

__all__ = ["folder"]

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

PROFILE = """
service: shop
device: {cuda: auto, nvml: off, host: off}
capture: {sample: 1}
export:
  otlp: {endpoint: "http://127.0.0.1:%d"}
%s
"""

TORCH = f"""
import os, sys

sys.path.append({str(Path(__file__).parent)!r})
from driver import FakeDriver
from fake_torch_cuda import fake_torch

driver = FakeDriver(os.path.join(os.environ["LD_LIBRARY_PATH"], "libcuda.so.1"))
driver.reset(virtual=False)
globals().update({{name: one for name, one in vars(fake_torch(driver)).items() if not name.endswith("__")}})
"""

SERVICE = """
import os, signal, sys, threading, time

import torch
import instrument
from instrument import scope
from instrument.sessions import process

MS = 10**6
torch.cuda.init()

def names():
    return sorted(one.name for one in threading.enumerate())

def serve(ms):
    with scope("serve", kind="request"):
        with scope("decode", device=True):
            torch.work(ms * MS)
        with scope("copy", kind="copy", device=True) as copy:
            copy.annotate(direction="d2h", bytes=100)
            torch.work(MS)
"""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    Path("torch.py").write_text(TORCH)
    with collecting(take) as server:
        profile(server)
        yield server


def profile(server: Collector, more: str = "") -> None:
    Path("profile.yaml").write_text(PROFILE % (server.server_port, more))


def begin_with_file(source: str) -> subprocess.Popen[bytes]:
    """A service that writes its errors into a file, where its agent can say something after its end."""
    Path("main.py").write_text(source)
    with Path("errors").open("w") as errors:
        return subprocess.Popen([*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py"], stderr=errors)


def told(span: Any) -> tuple[Any, ...]:
    """A span as it was sent, less what differs from run to run."""
    changing = ("thread.id", "instrument.self_ns", "instrument.active_ns", "instrument.device.uncertainty_ns")
    attributes = {one.key: str(one.value) for one in span.attributes if one.key not in changing}
    lasted_ms = (span.end_time_unix_nano - span.start_time_unix_nano) // 10**7 if "(device)" in span.name else 0
    return span.name, span.kind, span.flags, len(span.links), lasted_ms, tuple(sorted(attributes.items()))


@pytest.mark.slow
def test_the_agent_sends_the_same_device_times_as_a_process_would(collector: Collector) -> None:
    source = f"""{SERVICE}
stream = torch.cuda.Stream()
torch.work(300 * MS)
for _ in range(3):
    serve(15)
with torch.cuda.stream(stream), scope("loose", device=True):
    torch.work(25 * MS)

def tokens():
    for _ in range(2):
        with scope("token", device=True):
            torch.work(15 * MS)
            yield

with scope("stream", kind="request"):
    list(tokens())
if "by the agent" in sys.argv:
    assert "instrument-otlp" not in names(), names()
torch.work(600_000 * MS)
serve(1)
running = process.session()
instrument.stop()
print(running.losses())
"""
    found = []
    for more in ("", "agent: off"):
        profile(collector, more)
        collector.spans.clear()
        done = run(source, *(() if more else ("by the agent",)))
        assert done.returncode == 0, done.stderr
        assert "before their device times" not in done.stderr
        until(lambda: not agent_socket.list_runs())
        (spans,) = collector.spans.values()
        found.append(spans)
        lost = {reason: count for reason, count in eval(done.stdout).items() if "on their way" not in reason}
        assert lost == {"device times dropped": 2}  # a slow agent may not have sent the rest by then
    by_agent, by_itself = (Counter(map(told, spans)) for spans in found)
    assert by_agent == by_itself
    names = Counter(span.name for span in found[0])
    assert names["decode (device)"] == names["copy (device)"] == 4
    for spans in found:
        own = {span.span_id: span for span in spans}
        assert len(own) == len(spans)
        assert all(own[span.parent_span_id].name + " (device)" == span.name for span in spans if "(dev" in span.name)


def test_device_times_of_a_killed_process_are_sent_and_missing_ones_counted(collector: Collector) -> None:
    service = begin_with_file(f"""{SERVICE}
for _ in range(5):
    serve(5)
assert instrument.flush(60).complete  # their device times have come
torch.work(60_000 * MS)
serve(5)
os.kill(os.getpid(), signal.SIGKILL)
""")
    assert service.wait(240) == -signal.SIGKILL
    until(lambda: not agent_socket.list_runs())
    names = Counter(collector.taken)
    assert names == {"serve": 6, "decode": 6, "copy": 6, "decode (device)": 5, "copy (device)": 5}
    assert "destination: 2 spans exported before their device times were known" in Path("errors").read_text()


@pytest.mark.slow
def test_a_device_that_never_comes_to_an_end_holds_no_span_for_ever(collector: Collector) -> None:
    service = begin_with_file(f"""{SERVICE}
serve(1)
torch.work(600_000 * MS)
serve(1)
end = time.monotonic() + 600
while not os.path.exists("over") and time.monotonic() < end:
    time.sleep(0.01)
""")
    until(lambda: len(collector.taken) == 8)
    (found,) = until(settled)
    assert (found["seen"], found["kept"], found["exported"], found["intervals"], found["untimed"]) == (6, 8, 8, 2, 2)
    Path("over").touch()
    assert service.wait(240) == 0
    until(lambda: not agent_socket.list_runs())
    assert Path("errors").read_text().count("2 spans exported before their device times were known") == 1


LOAD = f"""{SERVICE}
done, end = 0, time.monotonic() + 600
while not os.path.exists("enough") and time.monotonic() < end:
    serve(1)
    done += 1
    time.sleep(0.005)
print(done, flush=True)
while not os.path.exists("over") and time.monotonic() < end:
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_device_times_are_sent_once_where_the_agent_is_killed(collector: Collector) -> None:
    service = begin(LOAD)
    (agent,) = until(agents)
    until(lambda: collector.taken.count("decode (device)") > 50)
    os.kill(agent, signal.SIGKILL)
    until(lambda: collector.connections == 2)  # of the next agent
    before = collector.taken.count("decode (device)")
    until(lambda: collector.taken.count("decode (device)") > before + 250)
    Path("enough").touch()
    assert service.stdout is not None
    served = int(service.stdout.readline())
    (fates,) = until(settled)
    Path("over").touch()
    _, errors = service.communicate(timeout=240)
    assert service.returncode == 0, errors
    (spans,) = collector.spans.values()
    own = {span.span_id: span for span in spans}
    assert len(own) == len(spans)
    assert fates["seen"] == 3 * served
    told = ("kept", "passed", "beyond", "unanswered", "abandoned")
    assert fates["seen"] + fates["intervals"] == sum(fates[fate] for fate in told)
    assert fates["exported"] <= len(spans) <= fates["exported"] + fates["failed"] + fates["unanswered"], fates
    timed = Counter(span.parent_span_id for span in spans if span.name.endswith("(device)"))
    asking = [span for span in spans if span.name in ("decode", "copy")]
    assert set(timed.values()) == {1}
    assert len(asking) - fates["untimed"] <= len(timed) <= len(asking)
    assert fates["exported"] > 300  # the rest is counted, more of it on a slow machine
    assert fates["missed"] == fates["passed"] == 0
