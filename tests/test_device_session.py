"""Device time in a session: threads, tasks, generators, copies and graphs on the fake driver, in real time."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driver import FakeDriver, environment
from fake_torch_cuda import fake_torch
from otlp_collectors import collecting, take
from trees import outline, tree_of

import instrument
from instrument import chrome
from instrument.cli import main
from instrument.device import resolver
from instrument.profile.keys import loads
from instrument.recorder.recorder import RECORDER
from instrument.recording.mapped import Mapped
from instrument.recording.memory import NOTHING_TO_COME
from instrument.recording.spans import Site
from instrument.sessions.session import Session
from instrument.trace import file

pytest.importorskip("cuda.bindings.driver")
pytestmark = pytest.mark.fake_driver

MS = 10**6


@pytest.fixture
def torch(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A torch with two devices in real time, as `import torch` leaves it."""
    fake_driver.reset(virtual=False)
    made = fake_torch(fake_driver)
    monkeypatch.setitem(sys.modules, "torch", made)
    yield made
    assert fake_driver.synchronised() == 0
    assert fake_driver.counts().captured_records == 0
    assert fake_driver.counts().captures_killed == 0


@pytest.fixture
def session(torch: Any) -> Iterator[Callable[..., Session]]:
    def start(text: str = "") -> Session:
        running = instrument.start(loads(text))
        assert running is not None
        return running

    yield start
    instrument.stop()


def settled(running: Session) -> Any:
    """Return the contents of the session once all device times up to now are known."""
    timing = running.recorded.timing
    assert timing is not None
    end = time.monotonic() + 240
    now_ns = time.monotonic_ns()
    while not timing.has_device_times_until(now_ns):
        assert time.monotonic() < end, "the resolver does not come to an end"
        time.sleep(0.001)
    return running.trace()


def shown(trace: Any) -> str:
    """Names as a tree; with device intervals the label and whole ms of each."""

    def line(span: Any) -> str:
        found = [f"{part.label} {round((part.end_ns - part.start_ns) / MS)} ms" for part in span.device]
        return " ".join([span.site.name, *(f"[{text}]" for text in found)])

    return tree_of(trace.spans, line)


def test_functions_scopes_tasks_and_generators_have_device_time(torch: Any, session: Any) -> None:
    running = session()

    @instrument.profiled("layer", device=True)
    def layer(ms: int) -> None:
        torch.work(ms * MS)

    @instrument.profiled("tokens", device=True)
    def tokens() -> Iterator[int]:
        for number in range(2):
            torch.work(20 * MS)
            yield number

    @instrument.profiled("answer", device=True)
    async def answer() -> None:
        torch.work(40 * MS)
        await asyncio.sleep(0)

    torch.cuda.init()
    torch.work(1000 * MS)  # the rest queues behind it: how late the host asks for a piece cannot lengthen any interval
    with instrument.scope("request", kind="request"):
        layer(30)
        with instrument.scope("decode", device=True):
            torch.work(50 * MS)
        list(tokens())
    asyncio.run(answer())
    found = {span.site.name: span for span in settled(running).spans}
    lengths = {name: [round((d.end_ns - d.start_ns) / MS) for d in span.device] for name, span in found.items()}
    assert lengths == {"request": [], "layer": [30], "decode": [50], "tokens": [20, 20, 0], "answer": [40]}
    (layer_part,) = found["layer"].device
    assert layer_part.start_ns >= found["layer"].start_ns
    rows = {row.path[-1].name: row.totals for row in running.tally().iterate_totals()}
    assert [round(rows[name].device_ns / MS) for name in ("layer", "decode", "tokens", "answer")] == [30, 50, 40, 40]
    assert rows["layer"].elapsed_ns >= rows["layer"].total_ns


def test_each_thread_has_its_stream_and_its_device(torch: Any, session: Any) -> None:
    running = session()
    ids: dict[int, int] = {}

    def serve(number: int) -> None:
        torch.cuda.set_device(number % 2)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                with instrument.scope(f"thread {number}", device=True):
                    torch.work(MS)
        ids[number] = threading.get_native_id()

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace = settled(running)
    assert len(trace.spans) == 80
    for span in trace.spans:
        (part,) = span.device
        assert part.device == int(span.site.name[-1]) % 2
        assert part.end_ns - part.start_ns >= MS
    streams = {(span.site.name, span.device[0].device, span.device[0].stream) for span in trace.spans}
    assert len(streams) == 4


def test_a_replayed_graph_is_one_span_and_its_capture_is_undisturbed(torch: Any, session: Any) -> None:
    running = session()
    torch.cuda.init()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        with instrument.scope("inside", device=True):
            torch.work(5 * MS)
        time.sleep(0.05)  # the resolver looks meanwhile
        graph.capture_end()
        torch.work(1000 * MS)  # the replays queue behind it, however late the host asks for them
        for _ in range(2):
            graph.replay()
    assert shown(settled(running)) == outline(
        """
        inside [captured 0 ms]
        CUDA graph replay [exclusive 5 ms]
        CUDA graph replay [exclusive 5 ms]
        """
    )
    assert running.losses()["device times not taken while a graph was captured"] == 1


def test_device_intervals_go_through_a_file_with_their_arrows(torch: Any, session: Any, tmp_path: Path) -> None:
    running = session()
    torch.work(0)
    with instrument.scope("work", device=True):
        torch.work(5 * MS)
    settled(running)
    written, _ = chrome.load(running.dump(tmp_path / "trace.json"))
    (span,) = written.spans
    assert len(span.device) == 1
    assert span.device == running.trace().spans[0].device
    text = (tmp_path / "trace.json").read_text()
    assert '"ph":"s"' in text or '"bind_id"' in text


def test_a_stream_may_be_named(torch: Any, session: Any) -> None:
    running = session()
    torch.cuda.init()
    torch.work(0)
    stream = torch.cuda.Stream()
    with instrument.scope("copy", stream=stream), torch.cuda.stream(stream):
        torch.work(5 * MS)
    with instrument.scope("by address", stream=stream.cuda_stream):
        pass
    spans = settled(running).spans
    assert [(span.site.name, span.device[0].stream == spans[0].device[0].stream) for span in spans] == [
        ("copy", True),
        ("by address", True),
    ]
    assert not any(span.attributes for span in spans)
    with pytest.raises(instrument.TargetError, match="needs a CUDA stream"):
        instrument.scope("x", stream="fast")


@pytest.mark.slow
def test_a_window_of_a_loop_says_which_device_times_had_not_come(torch: Any, session: Any) -> None:
    running = session()
    found: list[Any] = []
    torch.cuda.init()
    torch.work(0)

    def look(window: Any) -> None:
        found.append(window.trace)  # now: a trace that is looked at later has what has come until then

    with instrument.Profiler(schedule=instrument.schedule(record=1), on_trace_ready=look) as profiler:
        # The first is longer than a loaded machine may need to the end of its step.
        for waits, work_ns in ((False, 2000 * MS), (True, 50 * MS)):
            with instrument.scope("decode", device=True):
                torch.work(work_ns)
            if waits:
                settled(running)
            profiler.step()
    late, whole = found
    assert "window 0: 1 spans have no device time, which had not come" in "".join(late.notes)
    devices = [[span.device for span in trace.spans if span.site.name == "decode"] for trace in found]
    assert devices[0] == [()]
    assert [round((part.end_ns - part.start_ns) / MS) for part in devices[1][0]] == [50]
    assert "had not come" not in "".join(whole.notes)


def test_before_torch_uses_its_device_nothing_is_asked_of_the_driver(
    torch: Any, session: Any, fake_driver: FakeDriver
) -> None:
    session()
    with instrument.scope("work", device=True):
        pass
    assert fake_driver.called() == {}


@pytest.mark.parametrize("text", ["device: {cuda: off}", "state: CPU"])
def test_a_rule_without_device_gets_no_device_time(
    torch: Any, session: Any, text: str, fake_driver: FakeDriver
) -> None:
    running = session(text)
    torch.cuda.init()
    calls = fake_driver.called()
    with instrument.scope("work", device=True):
        pass
    assert fake_driver.called() == calls
    assert running.trace().spans[0].device == ()


def test_when_the_session_ends_every_event_is_given_back(torch: Any, session: Any, fake_driver: FakeDriver) -> None:
    session()
    torch.cuda.init()
    torch.work(0)
    for _ in range(500):
        with instrument.scope("work", device=True):
            torch.work(1000)
    assert fake_driver.counts().live_events > 0
    instrument.stop()
    assert fake_driver.counts().live_events == 0
    assert RECORDER.begin_device is None
    assert not [thread for thread in threading.enumerate() if thread.name == "instrument-device"]


def test_a_failing_device_never_reaches_the_service(torch: Any, session: Any, fake_driver: FakeDriver) -> None:
    running = session()
    torch.cuda.init()
    torch.work(0)
    with instrument.scope("work", device=True):
        pass
    settled(running)
    fake_driver.break_device(719)
    with instrument.scope("work", device=True):
        pass
    assert any("device 0 is no longer timed" in note for note in running.notes())
    assert "device 0 is no longer timed: the driver reports CUDA_ERROR_LAUNCH_FAILED" in running.summary()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_never_touches_what_it_inherits(torch: Any, session: Any, fake_driver: FakeDriver) -> None:
    running = session()
    torch.cuda.init()
    torch.work(0)
    with instrument.scope("parent", device=True):
        torch.work(MS)
    settled(running)
    before = fake_driver.counts().forked_calls
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with instrument.scope("child", device=True):
                pass
            trace = running.trace()
            status = 0 if [(s.site.name, s.device) for s in trace.spans] == [("child", ())] else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert fake_driver.counts().forked_calls == before
    with instrument.scope("parent", device=True):
        torch.work(MS)
    assert all(span.device for span in settled(running).spans)


def test_the_cost_of_device_time_is_part_of_the_cost(torch: Any, session: Any, fake_driver: FakeDriver) -> None:
    fake_driver.cost("cuEventRecord", 20_000)
    running = session()
    torch.work(0)
    for _ in range(50):
        with instrument.scope("work", device=True):
            torch.work(1000)
    settled(running)
    cost = running.cost()
    assert cost.calls == 50
    assert cost.per_call_ns > 5_000  # processor time, of which the fake's records take less than they last
    assert cost.thread_ns > 0


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("", False),
        ("device: {gil: hold}", True),
        pytest.param("device: {gil: release}", False, marks=pytest.mark.slow),
    ],
)
def test_the_profile_says_whether_the_lock_is_kept(torch: Any, session: Any, text: str, held: bool) -> None:
    running = session(text)
    torch.work(1000 * MS)  # the rest queues behind it
    with instrument.scope("work", device=True):
        torch.work(100 * MS)
    assert shown(settled(running)) == "work [exclusive 100 ms]"
    assert running.recorded.timing.timer.driver.holds_gil is held


def test_spans_go_to_the_collector_with_their_device_times(torch: Any, session: Any) -> None:
    with collecting(take) as collector:
        running = session(
            f"capture: {{sample: 1}}\nexport: {{otlp: {{endpoint: 'http://127.0.0.1:{collector.server_port}'}}}}"
        )
        torch.work(0)
        for _ in range(3):
            with instrument.scope("request", kind="request"), instrument.scope("decode", device=True):
                torch.work(300 * MS)  # the host is done long before
        assert running.flush(5.0) is not None
        end = time.monotonic() + 240
        while collector.taken.count("decode (device)") < 3 and time.monotonic() < end:
            running.flush(1.0)
            time.sleep(0.05)
        instrument.stop()
        assert Counter(collector.taken) >= Counter({"request": 3, "decode": 3, "decode (device)": 3})


def test_a_long_request_goes_to_the_collector_with_its_early_device_times(torch: Any, session: Any) -> None:
    with collecting(take) as collector:
        running = session(
            f"capture: {{sample: 1}}\nexport: {{otlp: {{endpoint: 'http://127.0.0.1:{collector.server_port}'}}}}"
        )
        torch.work(0)
        with instrument.scope("request", kind="request"):
            with instrument.scope("decode", device=True):
                torch.work(MS)
            time.sleep(0.8)  # looked at more than once meanwhile
        end = time.monotonic() + 240
        while collector.taken.count("request") < 1 and time.monotonic() < end:
            running.flush(1.0)
            time.sleep(0.05)
        instrument.stop()
        assert Counter(collector.taken) >= Counter({"request": 1, "decode": 1, "decode (device)": 1})


def counted(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 240
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_signal_at_the_end_of_a_span_leaves_no_pair_under_way(torch: Any, session: Any) -> None:
    """Its handler runs where the interpreter does next: in our end of the span, where the call was one of C."""

    def handler(*_: Any) -> None:
        raise KeyboardInterrupt

    running = session()
    torch.work(0)
    raises = RECORDER.wrap(ctypes.PyDLL(None)["raise"], Site("signalled", device=True))
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for _ in range(10):
            with pytest.raises(KeyboardInterrupt):
                raises(int(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    (context,) = running.recorded.timing.timer.resolver.contexts.values()
    assert counted(lambda: len(context.free) == context.made and not any(context.under_way.values()))


def test_a_child_is_timed_that_uses_the_device_first(torch: Any, session: Any, fake_driver: FakeDriver) -> None:
    """A parent imports torch, forks workers, and leaves the device to them."""
    running = session()
    with instrument.scope("parent", device=True):
        pass
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.cuda.init()
            for _ in range(2):
                with instrument.scope("child", device=True):
                    torch.work(MS)
            labels = [part.label for span in settled(running).spans for part in span.device]
            status = 0 if len(labels) == 2 and "captured" not in labels else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_that_was_forked_inside_a_span_ends_it_without_the_driver(
    torch: Any, session: Any, fake_driver: FakeDriver
) -> None:
    running = session()
    torch.cuda.init()
    torch.work(0)
    before = fake_driver.counts().forked_calls
    with instrument.scope("forking", device=True):
        child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert fake_driver.counts().forked_calls == before
    assert settled(running).spans[0].device


def test_a_context_that_nobody_can_use_is_asked_for_at_a_walk(
    torch: Any, session: Any, fake_driver: FakeDriver
) -> None:
    running = session()
    torch.work(0)
    with instrument.scope("work", device=True):
        torch.work(MS)
    settled(running)
    fake_driver.fail("cuCtxSetCurrent", 201, -1)
    fake_driver.forget_calls()
    began = time.monotonic()
    with instrument.scope("work", device=True):
        torch.work(MS)
    time.sleep(0.3)
    # It was asked 300 000 times a second.
    assert fake_driver.calls("cuCtxSetCurrent") < 1300 * (time.monotonic() - began)
    fake_driver.fail("cuCtxSetCurrent", 0, 0)


def test_an_open_span_alone_is_looked_at_twice_a_second(torch: Any, session: Any, fake_driver: FakeDriver) -> None:
    running = session()
    torch.work(0)
    with instrument.scope("open", device=True):
        with instrument.scope("work", device=True):
            torch.work(MS)
        resolver = running.recorded.timing.timer.resolver
        assert counted(lambda: resolver.asleep)
        fake_driver.forget_calls()
        began = time.monotonic()
        time.sleep(1)
        # 100 in each second otherwise.
        assert fake_driver.calls("cuCtxSetCurrent") < 30 * (time.monotonic() - began)
        with instrument.scope("work", device=True):
            torch.work(MS)
        settled(running)
    assert [span.device != () for span in settled(running).spans] == [True, True, True]


def test_the_time_up_to_which_device_times_are_known_is_published(torch: Any, session: Any) -> None:
    running = session()
    mapped = Mapped(RECORDER.memory_fd)
    torch.cuda.init()
    assert mapped.settled_ns() == 0
    with instrument.scope("work", device=True):
        torch.work(100 * MS)
    now_ns = time.monotonic_ns()
    assert 0 < mapped.settled_ns() < now_ns
    while mapped.settled_ns() < now_ns:
        time.sleep(0.001)
    assert len(mapped.read_intervals()) == 1
    with instrument.scope("more work", device=True):
        torch.work(100 * MS)
    now_ns = time.monotonic_ns()
    running.recorded.timing.await_device_times(now_ns, time.monotonic() + 60)
    assert mapped.settled_ns() >= now_ns
    assert len(mapped.read_intervals()) == 2
    instrument.stop()
    assert mapped.settled_ns() == NOTHING_TO_COME
    mapped.close()


def test_device_work_that_is_unfinished_at_the_end_is_dropped(torch: Any, session: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(resolver, "STOP_NS", 10 * MS)
    running = session()
    torch.cuda.init()
    with instrument.scope("work", device=True):
        torch.work(1000 * MS)
    instrument.stop()
    (span,) = running.trace().spans
    assert [interval.label for interval in span.device] == ["dropped"]
    assert running.losses()["device times dropped"] == 1


NUMBA = """
import time
import instrument
from instrument.profile.keys import loads
running = instrument.start(loads("copies: [{directions: [h2d, d2h]}]"))
import numpy
from numba import cuda
there = cuda.to_device(numpy.zeros(1 << 16))
stream = cuda.stream()
with instrument.scope("default", device=True):
    cuda.to_device(numpy.zeros(1 << 16))
with instrument.scope("named", stream=stream):
    there.copy_to_host(stream=stream)
now = time.monotonic_ns()
while not running.recorded.timing.has_device_times_until(now):
    time.sleep(0.01)
for span in sorted(running.trace().spans, key=lambda span: span.span_id):
    facts = dict(span.site.attributes)
    print(span.site.name, *["none" if not span.device else "default" if span.device[0].stream == 0 else "own"])
instrument.stop()
"""


@pytest.mark.slow
def test_numba_is_timed_on_its_streams() -> None:
    if importlib.util.find_spec("numba_cuda") is None or importlib.util.find_spec("numba") is None:
        pytest.skip("numba-cuda is not installed")
    done = subprocess.run(
        [sys.executable, "-c", NUMBA],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment()},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "memcpy h2d default",
        "default default",
        "memcpy h2d default",
        "named own",
        "memcpy d2h own",
    ]


KILLED = """
import os, sys, time
import instrument
from driver import FakeDriver
from fake_torch_cuda import fake_torch
from instrument.profile.keys import loads
from instrument.recorder.recorder import RECORDER
fake = FakeDriver(os.path.join(os.environ["LD_LIBRARY_PATH"], "libcuda.so.1"))
fake.reset(virtual=False)
torch = sys.modules["torch"] = fake_torch(fake)
running = instrument.start(loads("limits: {ring: 1MiB, ring_dir: ./rings}\\ndevice: {host: 100ms}"))
torch.cuda.init()
torch.work(2_000_000_000)
with instrument.scope("request", kind="request"):
    for number in range(3):
        with instrument.scope("decode", device=True):
            torch.work(20_000_000)
    now = time.monotonic_ns()
    while not running.recorded.timing.has_device_times_until(now):
        time.sleep(0.01)
    while not RECORDER.make_reader().read_samples():
        time.sleep(0.01)
    print("settled", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_device_times_and_gauges_of_a_process_outlive_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {**os.environ, **environment(), "PYTHONPATH": str(Path(__file__).parent)}
    victim = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, cwd=tmp_path, env=env, text=True)
    assert victim.stdout is not None
    with victim:
        assert victim.stdout.readline() == "settled\n"
        victim.kill()
    monkeypatch.chdir(tmp_path)
    assert main(["recover", "rings"]) == 0
    (path,) = Path("rings").glob("*.npz")
    trace = file.load(path).trace
    lengths = [round((part.end_ns - part.start_ns) / MS) for span in trace.spans for part in span.device]
    assert lengths == [20, 20, 20]
    assert {span.site.name for span in trace.spans if span.device} == {"decode"}
    memory = [sample.value for sample in trace.samples if (sample.name, sample.device) == ("process_memory", -1)]
    assert memory
    assert all(value is not None and value > 1 << 20 for value in memory)
    open_ns = next(span.total_ns for span in trace.spans if span.clipped)
    assert open_ns >= 200 * MS, "the process lived when its devices did"


# -------------------------------------------------------------------- torch's allocator


def held(running: Session, name: str, device: int = 0) -> list[float | None]:
    return [one.value for one in running.trace().samples if (one.name, one.device) == (name, device)]


def waited(reached: Callable[[], object]) -> None:
    end = time.monotonic() + 240
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_the_allocator_is_read_from_when_torch_uses_a_device_and_nothing_is_initialised_for_it(
    torch: Any, session: Any
) -> None:
    running = session("device: {cuda: off, host: 20ms}")
    waited(lambda: len(held(running, "process_memory", -1)) > 2)
    assert not torch.cuda.is_initialized()
    assert held(running, "torch_allocated") == []
    torch.cuda.set_device(1)
    torch.allocator.take(3_000_000)
    waited(lambda: held(running, "torch_allocated", 1))
    torch.allocator.take(5_000_000)
    torch.allocator.take(-5_000_000)
    instrument.stop()
    # The first reading may have come before the memory was taken; the last one is made at the end.
    assert [held(running, name, 1)[-1] for name in (
        "torch_allocated", "torch_allocated_peak", "torch_reserved", "torch_reserved_peak")
    ] == [3_000_320, 8_000_512, 8 << 20, 8 << 20]  # fmt: skip
    assert held(running, "torch_allocated", 0) == [], "torch does not use that device, and no context was made there"
    assert not torch._C._cuda_hasPrimaryContext(0)


def test_the_allocator_is_read_seldom_because_torch_waits_for_its_lock_with_the_interpreters(
    torch: Any, session: Any
) -> None:
    torch.allocator.take(1)
    running = session("device: {cuda: off, host: 10ms}")
    waited(lambda: len(held(running, "process_memory", -1)) > 20)
    assert len(held(running, "torch_allocated")) == 1
    instrument.stop()
    assert len(held(running, "torch_allocated")) == 2


def test_an_allocator_that_does_not_count_is_named_once_and_left_alone(torch: Any, session: Any) -> None:
    torch.allocator.take(1)
    torch.allocator.broken = True
    running = session("device: {cuda: off, host: 10ms}")
    waited(lambda: len(held(running, "process_memory", -1)) > 5)
    assert [note for note in running.notes() if "allocator" in note] == [
        "device.host: torch's allocator is no longer read: RuntimeError: custom allocator does not yet support "
        "getDeviceStats."
    ]


def test_a_forked_child_does_not_ask_the_allocator_of_its_parent(torch: Any, session: Any) -> None:
    torch.allocator.take(1)
    running = session("device: {cuda: off, host: 10ms}")
    waited(lambda: held(running, "torch_allocated"))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            waited(lambda: len(held(running, "process_memory", -1)) > 3)
            code = len(held(running, "torch_allocated"))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
