"""Device time on a card: a real card (`pytest -m gpu`) and a card of the fake driver behave alike.

The clocks of a card ramp, so the tests do not compare with a requested length. Plain events around the same work
measure its time. A gate that the host opens gives the earliest time at which the work can have begun.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import driver as fake_plugin
import pytest
from cards import MS, Card, FakeCard, RealCard, driver, value
from fake_torch_cuda import fake_torch

import instrument
from instrument import chrome
from instrument.device.cuda import CudaDriver, explain_version_conflict
from instrument.device.resolver import POLL_S, Resolver
from instrument.profile.keys import loads
from instrument.recording.spans import DeviceInterval, Span
from instrument.report.memory_view import memory
from instrument.report.view import Options, Recording
from instrument.sessions.session import Session

pytest.importorskip("cuda.bindings.driver")

HAS_TORCH = importlib.util.find_spec("torch") is not None
NOT_BLOCKING, GLOBAL, SLACK_NS = 1, 0, 5_000


def has_card(count: int = 1) -> bool:
    """Return True if torch is installed and has that number of devices."""
    if not HAS_TORCH or not Path("/dev/nvidiactl").exists():  # to import torch for it takes seconds
        return False
    if fake_plugin._loaded is not None:  # which stands for the driver of this process
        return False
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.device_count() >= count)


needs_card = pytest.mark.skipif(not has_card(), reason="no CUDA device")
REAL, FAKE = "a real card", "the fake driver"
CARDS = [
    pytest.param((REAL, "CudaDriver"), marks=[pytest.mark.gpu, needs_card], id="card-CudaDriver"),
    pytest.param((REAL, "TorchDriver"), marks=[pytest.mark.gpu, needs_card], id="card-TorchDriver"),
    pytest.param((FAKE, "CudaDriver"), marks=pytest.mark.fake_driver, id="fake-CudaDriver"),
    pytest.param((FAKE, "TorchDriver"), marks=pytest.mark.fake_driver, id="fake-TorchDriver"),
]
"""On each with cuda-bindings, and as on a machine without them."""

CARDS_TO_WAIT_ON = [
    *CARDS[:3],
    pytest.param(*CARDS[3].values, marks=[*CARDS[3].marks, pytest.mark.slow], id=CARDS[3].id),
]
"""The cards of tests that take long. Of the two fake ones, one is enough where it is short."""

BY_BINDINGS = [CARDS[0], CARDS[2]]


def _missing(driver: CudaDriver, **_: Any) -> None:
    raise ImportError(explain_version_conflict("", 0))


@pytest.fixture
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    kind, by = request.param
    if by == "TorchDriver":
        monkeypatch.setattr(CudaDriver, "__init__", _missing)
    if kind == REAL:
        import torch

        yield RealCard(torch)
        torch.cuda.synchronize()
    else:
        fake = request.getfixturevalue("fake_driver")
        fake.reset(virtual=False)
        made = fake_torch(fake)
        monkeypatch.setitem(sys.modules, "torch", made)
        yield FakeCard(fake, made)
    instrument.stop()


@pytest.fixture
def session(card: Card) -> Iterator[Callable[..., Session]]:
    """Starts a session on the card, in which a first span has been timed."""

    def start(text: str = "") -> Session:
        running = instrument.start(loads(text))
        assert running is not None
        with instrument.scope("first", device=True):
            card.spin(1000)
        settled(running)
        return running

    yield start
    instrument.stop()


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Session]]:
    """Starts a session on a real card."""
    import torch

    def start(text: str = "") -> Session:
        running = instrument.start(loads(text))
        assert running is not None
        return running

    torch.zeros(1, device="cuda").add_(1).item()
    yield start
    instrument.stop()


def settled(running: Session) -> list[Span]:
    """The spans, once their device times are known."""
    timing = running.recorded.timing
    assert timing is not None
    end, now_ns = time.monotonic() + 60, time.monotonic_ns()
    while not timing.has_device_times_until(now_ns):
        assert time.monotonic() < end
        time.sleep(0.002)
    return running.trace().spans


def parts_of(running: Session, name: str) -> list[DeviceInterval]:
    """The intervals of a scope's spans, in the order of the spans."""
    return [part for span in settled(running) if span.site.name == name for part in span.device]


def length_ns(part: DeviceInterval) -> int:
    return part.end_ns - part.start_ns


# ---------------------------------------------------------------- on both


@pytest.mark.parametrize("card", CARDS, indirect=True)
@pytest.mark.parametrize("spin_us", [10, 200, 20_000])
def test_a_spin_is_as_long_as_plain_events_say_or_labelled(card: Card, session: Any, spin_us: int) -> None:
    """Within 5 % and what the events themselves take; however fast the card's clock runs just then."""
    running = session()
    stream, plain = card.cuda.Stream(), []
    with card.cuda.stream(stream):
        while sum(was_ahead for _, _, was_ahead in plain) < 10:
            begin, end = card.cuda.Event(enable_timing=True), card.cuda.Event(enable_timing=True)
            let_go = card.hold(stream)  # so that the host is ahead, as in a loaded service
            begin.record()
            with instrument.scope("spin", device=True):
                card.spin(spin_us * 1000)
            end.record()
            ahead_ns = time.monotonic_ns()
            plain.append((begin, end, ahead_ns < let_go()))
    parts = parts_of(running, "spin")
    assert len(parts) == len(plain)
    for part, (begin, end, was_ahead) in zip(parts, plain, strict=True):
        plain_ns = begin.elapsed_time(end) * MS
        if part.label == "exclusive" and was_ahead:
            assert 0.95 * plain_ns - 4 * SLACK_NS <= length_ns(part) <= plain_ns + SLACK_NS
    if spin_us >= 20_000:
        assert any(part.label == "exclusive" for part in parts)


@pytest.mark.parametrize("card", CARDS_TO_WAIT_ON, indirect=True)
def test_begin_and_end_lie_where_the_host_knows_them_to(card: Card, session: Any) -> None:
    """The stream waits for a gate that the host opens, and the host sees when it has come to the end."""
    running = session()
    stream, known = card.cuda.Stream(), []
    for pause_s in [0.0] * 20 + [0.3] * 3 + [1.2]:  # near, between and far from anchors
        time.sleep(pause_s)
        with card.cuda.stream(stream):
            let_go = card.hold(stream)
            with instrument.scope("gated", device=True):
                card.spin(2 * MS)
            last = card.cuda.Event(enable_timing=True)
            last.record()
        held_ns = let_go()
        while not last.query():
            pass
        known.append((held_ns, time.monotonic_ns()))
    parts = parts_of(running, "gated")
    assert len(parts) == len(known)
    for part, (held_ns, seen_ns) in zip(parts, known, strict=True):
        assert part.start_ns + part.uncertainty_ns >= held_ns
        assert part.end_ns - part.uncertainty_ns <= seen_ns


@pytest.mark.parametrize("card", CARDS, indirect=True)
@pytest.mark.parametrize("is_beside", [True, False])
def test_work_of_two_streams_overlaps_where_it_ran_at_one_time(card: Card, session: Any, is_beside: bool) -> None:
    running = session()
    streams = card.cuda.Stream(), card.cuda.Stream()
    gates = [card.hold(stream) for stream in streams] if is_beside else []
    for stream in streams:
        with card.cuda.stream(stream), instrument.scope("side", device=True):
            card.spin(50 * MS)
        if not is_beside:
            card.cuda.synchronize()
    for let_go in gates:
        let_go()
    labels = [part.label for part in parts_of(running, "side")]
    assert labels == ["overlapped" if is_beside else "exclusive"] * 2


@pytest.mark.parametrize("card", CARDS, indirect=True)
def test_a_record_that_waits_for_room_stops_no_other_thread(card: Card, session: Any) -> None:
    """The host is far ahead of the device: where a call waits for room in the launch queue, others go on."""
    if isinstance(card, FakeCard):
        card.fake.limit_queue(64)
    running = session()
    ticks, stop, waits = [0], threading.Event(), []

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    with card.cuda.stream(card.cuda.Stream()):
        card.spin(500 * MS)
        for _ in range(50 if isinstance(card, FakeCard) else 1500):
            before, begin_ns = ticks[0], time.monotonic_ns()
            with instrument.scope("ahead", device=True):
                card.spin(100)
            waits.append((time.monotonic_ns() - begin_ns, ticks[0] - before))
    stop.set()
    thread.join()
    longest_ns, meanwhile = max(waits)
    if isinstance(card, FakeCard):
        assert longest_ns > 100 * MS
    assert longest_ns < 100 * MS or meanwhile > 5
    assert parts_of(running, "ahead")


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS[2:3], indirect=True)
def test_a_device_that_gives_no_anchors_is_read_by_the_ends_of_its_work(card: Card, session: Any) -> None:
    """An anchor waits behind the work where all streams share one queue, as with CUDA_DEVICE_MAX_CONNECTIONS=1."""
    assert isinstance(card, FakeCard)
    card.fake.set_device(0, one_queue=True)
    running = session()
    streams = [card.cuda.Stream() for _ in range(4)]
    close: list[DeviceInterval] = []
    deadline = time.monotonic() + 120
    while len(close) < 8:  # by anchors alone, each place is uncertain by the 20 ms of the work before it, or stale
        assert time.monotonic() < deadline
        for _ in range(16):  # there is always more to do than has been done
            for stream in streams:
                with card.cuda.stream(stream), instrument.scope("busy", device=True):
                    card.spin(20 * MS)
            time.sleep(0.07)
        close = [part for part in parts_of(running, "busy") if part.label != "stale" and part.uncertainty_ns < MS]


@pytest.mark.parametrize("card", CARDS, indirect=True)
def test_host_functions_in_python_and_records_do_not_wait_for_each_other(card: Card, session: Any) -> None:
    """A record that keeps the interpreter's lock would wait for ever for a function that wants it."""
    running = session()
    calls: list[int] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def function(_: Any) -> None:
        time.sleep(0.001)  # so that records come while it has yet to go on
        calls.append(1)

    own, shared = card.cuda.Stream(), card.cuda.Stream()

    def feed() -> None:
        card.cuda.set_stream(shared)
        for _ in range(100):
            card.call_host(shared, function)
            card.spin(1000)

    def serve(stream: Any) -> None:
        with card.cuda.stream(stream):
            for _ in range(200):
                with instrument.scope("beside", device=True):
                    card.spin(1000)

    faulthandler.dump_traceback_later(120, exit=True)  # nothing in Python would come to it
    try:
        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(feed), pool.submit(serve, own), pool.submit(serve, shared)]:
                done.result()
        card.cuda.synchronize()
    finally:
        faulthandler.cancel_dump_traceback_later()
    end = time.monotonic() + 60
    while len(calls) < 100:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert len(parts_of(running, "beside")) == 400


@pytest.mark.parametrize("card", BY_BINDINGS, indirect=True)
def test_one_look_takes_in_the_spans_of_some_milliseconds(
    card: Card, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look takes the interpreter's lock from the service, so there are few, however many spans end."""
    running = session()
    looks, look = [], Resolver.resolve_ended_pairs

    def counted(resolver: Resolver, **how: bool) -> tuple[bool, bool]:
        looks.append(time.monotonic())
        return look(resolver, **how)

    monkeypatch.setattr(Resolver, "resolve_ended_pairs", counted)
    end, count = time.monotonic() + 0.4, 0
    while time.monotonic() < end:
        with instrument.scope("often", device=True):
            card.spin(1000)
        count += 1
        time.sleep(0.0005)
    in_time = [at for at in looks if at <= end]
    assert len(in_time) <= 0.4 / POLL_S[0] + 10  # these ten while the pool grows
    assert len(parts_of(running, "often")) == count


@pytest.mark.parametrize("card", BY_BINDINGS, indirect=True)
def test_per_thread_default_streams_are_one_stream_for_each_thread(card: Card, session: Any) -> None:
    running = session()
    barrier, known = threading.Barrier(2), {}

    def work(name: str, ms: int) -> None:
        card.cuda.set_device(0)
        stream = card.cuda.ExternalStream(2)
        with card.cuda.stream(stream):
            card.spin(1000)
            last = card.cuda.Event()
            barrier.wait()
            if name == "short":
                time.sleep(0.02)
            begin_ns = time.monotonic_ns()
            with instrument.scope(name, device=True):
                card.spin(ms * MS)
            last.record()
            while not last.query():
                time.sleep(0.0005)
            known[name] = begin_ns, time.monotonic_ns()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, "long", 500), pool.submit(work, "short", 20)]:
            done.result()
    streams = set()
    for name, (begin_ns, end_ns) in known.items():
        (part,) = parts_of(running, name)
        assert begin_ns - part.uncertainty_ns <= part.start_ns
        assert part.end_ns <= end_ns + part.uncertainty_ns
        streams.add(part.stream)
    assert len(streams) == 2


@pytest.mark.parametrize("card", CARDS, indirect=True)
def test_the_first_span_of_a_thread_without_a_context_is_timed(card: Card, session: Any) -> None:
    running = session()

    def work() -> None:
        for _ in range(3):
            with instrument.scope("pool", device=True):
                card.spin(MS)

    for _ in range(4):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    parts = parts_of(running, "pool")
    assert len(parts) == 12
    assert {part.label for part in parts} <= {"exclusive", "launch-bound", "stale", "overlapped"}


@pytest.mark.parametrize("card", BY_BINDINGS, indirect=True)
@pytest.mark.parametrize("asker", ["nobody", "another thread"])
def test_the_resolver_never_ends_a_global_capture(card: Card, session: Any, asker: str) -> None:
    """An event of ours is pending all the while. That a query would end the capture is shown by a thread that asks."""
    running = session()
    cuda, side = driver(), card.cuda.Stream()
    captured = value(cuda.cuStreamCreate(NOT_BLOCKING))
    pending = card.cuda.Event(enable_timing=True)
    with card.cuda.stream(side):
        with instrument.scope("before", device=True):
            card.spin(300 * MS)
        pending.record()
    assert not pending.query()
    value(cuda.cuStreamBeginCapture(captured, cuda.CUstreamCaptureMode(GLOBAL)))
    handle = pending.cuda_event

    def ask() -> int:
        value(cuda.cuCtxSetCurrent(context))
        return int(cuda.cuEventQuery(handle)[0])

    context = value(cuda.cuCtxGetCurrent())
    with ThreadPoolExecutor(1) as pool:
        if asker != "nobody":
            assert pool.submit(ask).result() == 900
        time.sleep(0.5)  # the event happens meanwhile, and the resolver looks
    answer = cuda.cuStreamEndCapture(captured)
    assert int(answer[0]) == (0 if asker == "nobody" else 901)
    assert len(parts_of(running, "before")) == 1
    value(cuda.cuStreamDestroy(captured))


@pytest.mark.parametrize("card", CARDS_TO_WAIT_ON, indirect=True)
def test_to_stop_with_work_pending_waits_for_none_of_it(card: Card, session: Any) -> None:
    session()
    last = card.cuda.Event()
    with card.cuda.stream(card.cuda.Stream()):
        for _ in range(50):
            with instrument.scope("late", device=True):
                card.spin(200 * MS)
        last.record()
    instrument.stop()
    assert not last.query(), "the stop has waited for the device"


@pytest.mark.parametrize("card", CARDS, indirect=True)
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_child_that_does_not_use_the_device_lives_on(card: Card, session: Any) -> None:
    running = session()
    with instrument.scope("parent", device=True):
        card.spin(1000)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with instrument.scope("child", device=True):
                pass
            status = 0 if not any(span.device for span in running.trace().spans) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with instrument.scope("parent", device=True):
        card.spin(1000)
    assert all(span.device for span in settled(running) if span.site.name == "parent")


@pytest.mark.parametrize("card", CARDS, indirect=True)
def test_a_pair_of_events_costs_what_the_report_says(card: Card, session: Any) -> None:
    """The summary has the best of some rounds. The cost seen here is no less, and of the same order."""
    running = session()

    def spent_ns(count: int = 200) -> float:
        begin_ns = time.perf_counter_ns()
        for _ in range(count):
            with instrument.scope("op", device=True):
                pass
        return (time.perf_counter_ns() - begin_ns) / count

    best_ns = min(spent_ns() for _ in range(20))
    timing = running.recorded.timing
    assert timing is not None
    print(f"{best_ns:.0f} ns a span are seen, {timing.pair_cost_ns:.0f} ns a pair are told")
    assert 0 < timing.pair_cost_ns < 20 * best_ns
    assert best_ns < 20 * timing.pair_cost_ns


# ---------------------------------------------------------------- on a real card alone

gpu = [pytest.mark.gpu, needs_card]


def marked(test: Any) -> Any:
    for mark in gpu:
        test = mark(test)
    return test


ORDER = """
import sys, time
import {first}
if "{first}" == "numba":
    import numba.cuda
import instrument
from instrument.profile.keys import loads
running = instrument.start(loads(""))
import torch
torch.zeros(1, device="cuda").add_(1).item()
torch.cuda._sleep(10**8)
torch.cuda.synchronize()
with instrument.scope("first", device=True):
    pass  # events are made for it, which takes milliseconds
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
with torch.cuda.stream(torch.cuda.Stream()):
    begin.record()
    with instrument.scope("side", device=True):
        torch.cuda._sleep(10**8)
    end.record()
torch.cuda.synchronize()
now_ns = time.monotonic_ns()
while not running.recorded.timing.has_device_times_until(now_ns):
    time.sleep(0.002)
ours_ms = sum(p.end_ns - p.start_ns for s in running.trace().spans if s.site.name == "side" for p in s.device) / 1e6
assert abs(ours_ms / begin.elapsed_time(end) - 1) < 0.05, (ours_ms, begin.elapsed_time(end))
"""

STICKY = """
import sys, time
import torch
import instrument
from instrument.profile.keys import loads
if sys.argv[1] == "on":
    instrument.start(loads(""))
table, index = torch.zeros(10, device="cuda"), torch.tensor([10**6], device="cuda")
with instrument.scope("good", device=True):
    torch.cuda._sleep(10**7)
with instrument.scope("bad", device=True):
    table[index]
time.sleep(0.5)  # ours sees it first
for _ in range(3):
    try:
        with instrument.scope("after", device=True):
            torch.zeros(1, device="cuda").item()
        print("no error")
    except RuntimeError as error:
        print("caught", type(error).__name__, str(error).splitlines()[0])
instrument.stop()
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=240)


@marked
@pytest.mark.parametrize("first", ["cupy", "numba", "torch"])
def test_torch_is_asked_for_its_stream_in_any_order_of_imports(first: str) -> None:
    pytest.importorskip(first)
    done = run(ORDER.format(first=first))
    assert done.returncode == 0, done.stderr


@marked
def test_an_error_that_sticks_reaches_the_service_as_without_us() -> None:
    off, on = run(STICKY, "off"), run(STICKY, "on")
    assert "caught" in off.stdout
    assert (on.returncode, on.stdout) == (off.returncode, off.stdout), on.stderr


@marked
@pytest.mark.parametrize("not_waiting", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("direction", ["h2d", "d2h", "d2d"])
def test_copies_are_as_long_as_plain_events_say(real: Any, direction: str, pinned: bool, not_waiting: bool) -> None:
    import torch

    size = 64 << 20
    host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    there, other = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    target, source = {"h2d": (there, host), "d2h": (host, there), "d2d": (other, there)}[direction]
    running = real("copies: [{directions: [h2d, d2h, d2d]}]")
    for _ in range(3):
        target.copy_(source, non_blocking=not_waiting)
    settled(running)
    plain = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source, non_blocking=not_waiting)
        end.record()
        plain.append((begin, end))
    torch.cuda.synchronize()
    found = [part for span in settled(running) if span.site.kind == "copy" for part in span.device][3:]
    assert len(found) == 10
    for part, (begin, end) in zip(found, plain, strict=True):
        plain_ns = begin.elapsed_time(end) * MS
        assert length_ns(part) <= plain_ns + SLACK_NS
        if part.label == "exclusive":  # else the device may have waited for the host before ours began
            assert length_ns(part) >= 0.75 * plain_ns - 10 * SLACK_NS


@marked
@pytest.mark.skipif(not has_card(2), reason="one CUDA device")
def test_a_model_on_another_device_is_timed_there(real: Any) -> None:
    import torch

    running = real("layers: [{type: [Linear, ReLU], device: true}]")
    model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.ReLU()).to("cuda:1")
    service = SimpleNamespace(model=model)

    @instrument.profiled("answer", device=True)
    def answer(state: Any, x: Any) -> Any:
        return state.model(x)

    answer(service, torch.zeros(4096, 4096, device="cuda:1"))
    torch.cuda.synchronize(1)
    spans = [span for span in settled(running) if span.site.name in ("answer", "Linear", "ReLU")]
    assert [{part.device for part in span.device} for span in spans] == [{1}] * 3


@marked
def test_a_capture_on_another_thread_survives(real: Any) -> None:
    import torch

    running = real()
    stop = threading.Event()

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                with instrument.scope("work", device=True):
                    torch.cuda._sleep(100_000)
                time.sleep(0.001)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        static = torch.zeros(1024, device="cuda")
        for mode in ("thread_local", "relaxed"):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode=mode):
                with instrument.scope("captured", device=True):
                    static.add_(1)
                time.sleep(0.1)  # the resolver looks meanwhile
            graph.replay()
    finally:
        stop.set()
        thread.join()
    found = settled(running)
    assert {part.label for span in found if span.site.name == "captured" for part in span.device} == {"captured"}
    assert sum(span.site.name == "CUDA graph replay" and bool(span.device) for span in found) == 2


@marked
@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
def test_torch_profiler_runs_at_the_same_time(real: Any) -> None:
    import torch

    running = real()
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as other:
        for _ in range(20):
            with instrument.scope("matmul", device=True):
                left = torch.randn(2048, 2048, device="cuda")
                left @ left
    torch.cuda.synchronize()
    kernels = [event for event in other.events() if "gemm" in event.name.lower() or "cutlass" in event.name.lower()]
    ours = [part for span in settled(running) if span.site.name == "matmul" for part in span.device]
    assert len(ours) == 20
    print(f"{len(kernels)} kernels beside {len(ours)} intervals")


@marked
def test_it_takes_no_memory_of_the_device(real: Any) -> None:
    import torch

    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    running = real()
    for _ in range(2000):
        with instrument.scope("work", device=True):
            torch.cuda._sleep(1000)
    settled(running)
    after, _ = torch.cuda.mem_get_info()
    assert before - after < 16 * 2**20, "a context of its own would take hundreds of MiB"


@marked
def test_the_allocator_is_read_as_torch_itself_counts_it(real: Any) -> None:
    import torch

    block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    del block
    block = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    running = real("device: {nvml: off, host: 20ms}")
    end = time.monotonic() + 120
    while not (read := {one.name: one.value for one in running.trace().samples if one.device == 0}):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert read == {
        "torch_allocated": torch.cuda.memory_allocated(),
        "torch_allocated_peak": torch.cuda.max_memory_allocated(),
        "torch_reserved": torch.cuda.memory_reserved(),
        "torch_reserved_peak": torch.cuda.max_memory_reserved(),
    }
    assert block.numel() <= torch.cuda.memory_allocated()


@marked
def test_memory_of_a_device_is_the_scopes_of_the_thread_that_took_it(real: Any, tmp_path: Path) -> None:
    import torch

    running = real("device: {nvml: off, host: off}")
    opened, taken = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with instrument.scope("elsewhere"):
            opened.set()
            taken.wait(60)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    opened.wait(60)
    with torch.profiler.profile(profile_memory=True) as watching, instrument.scope("decode"):
        time.sleep(0.01)
        block = torch.empty(96 << 20, dtype=torch.uint8, device="cuda")
        time.sleep(0.01)
    taken.set()
    thread.join()
    watching.export_chrome_trace(str(tmp_path / "torch.json"))
    theirs, _ = chrome.load(tmp_path / "torch.json")
    view = memory(Recording.from_trace(chrome.join_torch_trace(running.trace(), theirs)), Options(state="GPU"))
    assert [(use.device, use.name, use.held_bytes) for use in view.places] == [(0, "decode", block.numel())]
