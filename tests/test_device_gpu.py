"""Device time on a card: what only a card can tell. Run with `pytest -m gpu` where there is one."""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument import chrome
from instrument.device.cuda import CudaDriver, misfit
from instrument.profiler import Session
from instrument.report.memory import memory
from instrument.report.view import Options, Recording
from instrument.schema import loads
from instrument.spans import Span

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
pytest.importorskip("cuda.bindings.driver")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


@pytest.fixture(params=["CudaDriver", "TorchDriver"])
def session(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Session]]:
    """Starts a session that times with cuda-bindings, and one as on a machine without them."""
    if request.param == "TorchDriver":
        monkeypatch.setattr(CudaDriver, "__init__", _missing)

    def start(text: str = "") -> Session:
        running = instrument.start(loads(text))
        assert running is not None
        return running

    torch.zeros(1, device="cuda").add_(1).item()
    yield start
    instrument.stop()


def _missing(driver: CudaDriver) -> None:
    raise ImportError(misfit("", 0))


def settled(running: Session) -> list[Span]:
    """The spans, once their device times are known."""
    timing = running._timing
    assert timing is not None
    end, now_ns = time.monotonic() + 30, time.monotonic_ns()
    while not timing.is_settled(now_ns):
        assert time.monotonic() < end
        time.sleep(0.002)
    return running.trace().spans


def cycles_per_ns() -> float:
    """How fast the card's own clock counts, from a spin of a fifth of a second."""
    torch.cuda._sleep(10**8)
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    torch.cuda._sleep(3 * 10**8)
    torch.cuda.synchronize()
    return 3 * 10**8 / (time.perf_counter_ns() - start)


@pytest.mark.parametrize("spin_us", [2, 10, 50, 200, 1_000, 20_000])
def test_a_spin_is_timed_within_five_percent_or_labelled(session: Any, spin_us: int) -> None:
    rate = cycles_per_ns()
    running = session()
    for _ in range(50):
        torch.cuda._sleep(int(rate * 300_000))  # so that the host is ahead, as in a loaded service
        with instrument.scope("spin", device=True):
            torch.cuda._sleep(int(rate * spin_us * 1000))
    spans = [span for span in settled(running) if span.site.name == "spin"][10:]
    trusted = [part for span in spans for part in span.device if part.label == "exclusive"]
    if spin_us >= 200:
        assert len(trusted) > 30
    for part in trusted:
        assert abs((part.end_ns - part.start_ns) / (spin_us * 1000) - 1) <= 0.05
    gaps = [part.start_ns - span.start_ns for span in spans for part in span.device]
    print(f"{spin_us} us: {len(trusted)} exclusive, begin {statistics.median(gaps) / 1000:.1f} us after the host's")


def test_a_capture_on_another_thread_survives(session: Any) -> None:
    running = session()
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


def test_the_resolver_never_ends_a_global_capture(session: Any) -> None:
    """Ours is the only other thread: a query of its in the mode `global` would end the capture."""
    running = session()
    static = torch.zeros(1024, device="cuda")
    torch.cuda.synchronize()
    with instrument.scope("before", device=True):
        torch.cuda._sleep(10**8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        static.add_(1)
        time.sleep(0.2)
    graph.replay()
    assert any(span.device for span in settled(running) if span.site.name == "before")


def test_torch_profiler_runs_beside_it(session: Any) -> None:
    running = session()
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


def test_it_takes_no_memory_of_the_device(session: Any) -> None:
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    running = session()
    for _ in range(2000):
        with instrument.scope("work", device=True):
            torch.cuda._sleep(1000)
    settled(running)
    after, _ = torch.cuda.mem_get_info()
    assert before - after < 16 * 2**20, "a context of its own would take hundreds of MiB"


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_are_as_fast_as_a_plain_loop_says(session: Any, pinned: bool) -> None:
    size = 256 * 2**20
    source = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        target.copy_(source, non_blocking=True)
    begin.record()
    for _ in range(10):
        target.copy_(source, non_blocking=True)
    end.record()
    torch.cuda.synchronize()
    plain_gb_s = 10 * size / begin.elapsed_time(end) / 1e6
    running = session("copies: [{directions: [h2d]}]")
    for _ in range(10):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    parts = [part for span in settled(running) if span.site.kind == "copy" for part in span.device]
    ours_gb_s = len(parts) * size / sum(part.end_ns - part.start_ns for part in parts)
    print(f"pinned={pinned}: plain {plain_gb_s:.1f} GB/s, ours {ours_gb_s:.1f} GB/s")
    assert len(parts) == 10
    assert abs(ours_gb_s / plain_gb_s - 1) < (0.05 if pinned else 0.25)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_child_that_does_not_use_the_device_lives_on(session: Any) -> None:
    running = session()
    with instrument.scope("parent", device=True):
        torch.cuda._sleep(1000)
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
        torch.cuda._sleep(1000)
    assert all(span.device for span in settled(running) if span.site.name == "parent")


def test_the_allocator_is_read_as_torch_itself_counts_it(session: Any) -> None:
    block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    del block
    block = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    running = session("device: {nvml: off, host: 20ms}")
    end = time.monotonic() + 30
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


def test_memory_of_a_device_is_the_scopes_of_the_thread_that_took_it(session: Any, tmp_path: Path) -> None:
    running = session("device: {nvml: off, host: off}")
    opened, taken = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with instrument.scope("elsewhere"):
            opened.set()
            taken.wait(30)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    opened.wait(30)
    with torch.profiler.profile(profile_memory=True) as watching, instrument.scope("decode"):
        time.sleep(0.01)
        block = torch.empty(96 << 20, dtype=torch.uint8, device="cuda")
        time.sleep(0.01)
    taken.set()
    thread.join()
    watching.export_chrome_trace(str(tmp_path / "torch.json"))
    theirs, _ = chrome.load(tmp_path / "torch.json")
    view = memory(Recording.of_trace(chrome.join(running.trace(), theirs)), Options(state="GPU"))
    assert [(use.device, use.name, use.held_bytes) for use in view.places] == [(0, "decode", block.numel())]
