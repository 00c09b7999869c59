"""Device time by torch's own events: the differences from the use of the driver alone.

`tests/test_device.py` shows that the times are right, with this driver as with the other.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driver import FakeDriver, value
from fake_torch_cuda import AcceleratorError, fake_torch
from readback import intervals_in, make_intervals

from instrument.device.resolver import Resolver
from instrument.device.timer import Timer
from instrument.device.torch_events import TorchDriver, find_error_number
from instrument.recording.memory_layout import STREAM
from instrument.recording.spans import Site, Span

cuda = pytest.importorskip("cuda.bindings.driver")
pytestmark = pytest.mark.fake_driver

MS = 10**6
SITE = Site("work", device=True)


@pytest.fixture
def torch(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(Resolver, "start", lambda self: None)
    monkeypatch.setattr("instrument.device.resolver.time.sleep", lambda _: None)
    yield fake_torch(fake_driver)
    assert fake_driver.synchronised() <= fake_driver.calls("cuCtxSynchronize")  # torch.cuda.graph begins with one
    assert fake_driver.counts().captured_records == 0
    assert fake_driver.counts().captures_killed == 0


class Service:
    """Spans on the device and stream that torch says are current, and a thread on which the resolver looks."""

    def __init__(self, torch: Any, fake: FakeDriver) -> None:
        self.fake = fake
        self.begun = 0
        self.intervals = make_intervals(1 << 16)
        self.driver = TorchDriver(torch)
        totals: Any = SimpleNamespace(count_device=lambda *_: True)
        self.timer = Timer(self.driver, self.intervals, totals, fake.now_ns, fake.now_ns)
        is_initialized, native = torch.cuda.is_initialized, torch._C
        device, stream = native._cuda_getDevice, native._cuda_getCurrentRawStream
        self.timer.sources.append(lambda: (device(), stream(device())) if is_initialized() else None)
        self.thread = ThreadPoolExecutor(1)

    def begin(self, attributes: Any = None) -> tuple[Any, Span]:
        now_ns = self.fake.now_ns()
        self.begun += 1
        span = Span(SITE, self.begun, 0, 0, 0, 0, now_ns, now_ns, 0, 0)
        return self.timer.begin(SITE, attributes, span.span_id), span

    def end(self, pair: Any, span: Span) -> None:
        pair.end(None, 1, span.span_id, span.start_ns, self.fake.now_ns())

    def told(self, span: Span) -> tuple[str, int]:
        self.thread.submit(self.timer.resolver.resolve_ended_pairs).result()
        span.device = intervals_in(self.intervals, {span.span_id}).get(span.span_id, ())
        (found,) = span.device
        return found.label, found.end_ns - found.start_ns


@pytest.fixture
def service(torch: Any, fake_driver: FakeDriver) -> Iterator[Service]:
    made = Service(torch, fake_driver)
    yield made
    made.thread.shutdown()


def on_another_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def test_nothing_is_asked_of_the_driver_before_torch_uses_it(service: Service, fake_driver: FakeDriver) -> None:
    assert service.begin()[0] is None
    assert service.timer.begin(SITE, {STREAM: 7}, 1) is None
    assert (service.driver.find_context(), service.driver.current_device(), service.driver.primary_context(0)) == (
        0,
        -1,
        0,
    )
    assert fake_driver.called() == {}


def test_a_device_that_the_host_does_not_use_gets_no_context(
    service: Service, torch: Any, fake_driver: FakeDriver
) -> None:
    """The resolver's thread and one of the service's have the first device, and nothing there."""
    torch.cuda.set_device(1)
    pair, span = service.begin()
    torch.work(5 * MS)
    on_another_thread(lambda: service.end(pair, span))
    fake_driver.advance(6 * MS)
    assert service.told(span) == ("exclusive", 5 * MS)
    assert fake_driver.counts().contexts_created == 1
    assert service.timer._contexts[1].alive


def test_a_span_ends_on_its_own_stream_and_leaves_the_current_one(service: Service, torch: Any) -> None:
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        pair, span = service.begin()
        torch.work(5 * MS)
    with torch.cuda.stream(other):
        torch.work(50 * MS)
        service.end(pair, span)
        assert torch._C._cuda_getCurrentRawStream(0) == other.cuda_stream
    service.fake.advance(6 * MS)
    assert service.told(span) == ("exclusive", 5 * MS)


def test_a_stream_of_the_users_own_is_taken_by_its_handle(service: Service, torch: Any) -> None:
    torch.work(1)
    stream = int(value(cuda.cuStreamCreate(1)))
    pair, span = service.begin({STREAM: stream})
    service.fake.launch(stream, 3 * MS)
    service.end(pair, span)
    service.fake.advance(6 * MS)
    assert service.told(span) == ("exclusive", 3 * MS)


def test_a_capture_is_left_alone_by_spans_and_by_the_resolver(service: Service, torch: Any) -> None:
    torch.work(1)
    pair, before = service.begin()
    torch.work(5 * MS)
    service.end(pair, before)
    pair, across = service.begin()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        service.end(pair, across)
        pair, inside = service.begin()
        torch.work(MS)
        service.end(pair, inside)
        service.fake.advance(6 * MS)
        assert service.told(before) == ("exclusive", 5 * MS)
        assert service.told(inside) == ("captured", 0)
    assert service.told(across)[0] in ("exclusive", "launch-bound")


def test_a_stream_is_seen_to_be_captured_while_another_is_current(service: Service, torch: Any) -> None:
    torch.work(1)
    stream = torch.cuda.Stream()
    value(cuda.cuStreamBeginCapture(stream.cuda_stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    pair, span = service.begin({STREAM: stream.cuda_stream})
    service.end(pair, span)
    value(cuda.cuStreamEndCapture(stream.cuda_stream))
    assert service.told(span) == ("captured", 0)


def test_a_forked_child_destroys_no_event_of_its_parent(service: Service, torch: Any, fake_driver: FakeDriver) -> None:
    torch.work(1)
    pair, span = service.begin()
    service.end(pair, span)
    assert fake_driver.counts().live_events == 2
    pid = os.fork()
    if pid == 0:
        vars(service).clear()
        pair = None
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert fake_driver.counts().forked_calls == 0


def test_events_that_are_given_back_are_destroyed(service: Service, torch: Any, fake_driver: FakeDriver) -> None:
    torch.work(1)
    pair, span = service.begin()
    service.end(pair, span)
    assert fake_driver.counts().live_events == 2
    fake_driver.advance(MS)
    del pair
    service.told(span)
    service.thread.submit(service.timer.resolver._release_all_events).result()
    assert fake_driver.counts().live_events == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be"), 700),
        (RuntimeError("HIP error: unspecified launch failure"), 719),
        (RuntimeError("CUDA error: out of memory"), 2),
        (RuntimeError("Event device 0 does not match recording stream's device 1."), 400),
        (ValueError("Both events must be recorded before calculating elapsed time."), 400),
        (RuntimeError("Both events must be completed before calculating elapsed time."), 600),
        (RuntimeError("something new"), 1),
    ],
)
def test_exceptions_of_torch_become_errors_of_the_driver(error: Exception, code: int) -> None:
    assert find_error_number(error) == code


def test_an_error_that_reports_its_code_needs_no_text() -> None:
    error = AcceleratorError("CUDA error: something new")
    error.error_code = 719
    assert find_error_number(error) == 719


def test_a_torch_that_is_too_old_is_named(torch: Any) -> None:
    torch.__version__ = "1.13.1"
    del torch._C._cuda_exchangeDevice
    with pytest.raises(ImportError, match=r"torch 1\.13\.1 is not supported; use 2\.1 or newer"):
        TorchDriver(torch)


HIP = """
static __thread int mode;
int hipThreadExchangeStreamCaptureMode(int *wanted) { int before = mode; mode = *wanted; *wanted = before; return 0; }
int mode_here(void) { return mode; }
"""


def test_on_rocm_the_mode_of_a_thread_is_changed_by_the_library_that_torch_has_loaded(
    torch: Any, tmp_path: Path
) -> None:
    torch.version = SimpleNamespace(cuda=None, hip="6.4")
    with pytest.raises(OSError, match=r"has not loaded libamdhip64\.so"):
        TorchDriver(torch)
    (tmp_path / "hip.c").write_text(HIP)
    target = tmp_path / "libamdhip64.so.6"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", target, tmp_path / "hip.c"], check=True)
    library = ctypes.CDLL(str(target))
    driver = TorchDriver(torch)
    torch.work(1)
    assert driver.bind_context(driver.find_context()) == 0
    assert library.mode_here() == 1
