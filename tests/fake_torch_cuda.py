"""The part of torch's CUDA side that concerns device time, on the fake driver: the tests' torch may lack it.

As torch does, it initialises nothing before it is used, gives each thread a current device and a current stream per
device, makes streams that do not block, and calls the driver for all of it. As the CUDA runtime does under torch, it
makes the device's primary context current in a thread only when that thread first uses the device; where a thread
leaves a device by `_cuda_maybeExchangeDevice`, none is made on the one that it goes back to. Events are made when they
are first recorded, on the device of the stream, and destroyed with their object (c10/cuda/CUDAEvent.h and
CUDAFunctions.cpp of torch).

    torch = fake_torch(fake_driver)
    monkeypatch.setitem(sys.modules, "torch", torch)
    torch.work(100_000)  # a kernel of 0.1 ms on the current stream: all that there is to compute
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from driver import FakeDriver

DEFAULT_TYPE = 1
"""The number of CUDA among torch's types of devices."""

TEXTS = {
    1: "invalid argument",
    2: "out of memory",
    4: "driver shutting down",
    201: "invalid device context",
    400: "invalid resource handle",
    700: "an illegal memory access was encountered",
    709: "context is destroyed",
    719: "unspecified launch failure",
    900: "operation not permitted when stream is capturing",
    901: "operation failed due to a previous error during capture",
    906: "operation would make the legacy stream depend on a capturing blocking stream",
    999: "unknown error",
}
"""cudaGetErrorString of what the fake driver answers."""

NOT_READY = 600

CAPTURE_MODES = {"global": 0, "thread_local": 1, "relaxed": 2}
NON_BLOCKING = 1
DISABLE_TIMING = 2


class AcceleratorError(RuntimeError):
    """`torch.AcceleratorError`, from 2.8 on."""

    error_code: int


class _Thread(threading.local):
    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, int] = {}
        self.bound = -1


class _Cuda:
    """`torch.cuda` and its part of `torch._C`, with one thread's state for each."""

    def __init__(self, driver: FakeDriver, has_codes: bool) -> None:
        self.driver = driver
        self.has_codes = has_codes
        self.thread = _Thread()
        self.contexts: dict[int, int] = {}
        self.initialised_in = 0

    def call(self, name: str, *arguments: Any) -> None:
        self.check(name, getattr(self.driver.library, name)(*arguments))

    def check(self, name: str, code: int) -> None:
        if code == 0:
            return
        text = f"CUDA error: {TEXTS.get(code, 'no text')} ({name} returned {code})\nCUDA kernel errors might be ..."
        if not self.has_codes:
            raise RuntimeError(text)
        error = AcceleratorError(text)
        error.error_code = code
        raise error

    def made(self, name: str, *arguments: Any) -> int:
        """Return the handle that a call stores at its first argument."""
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle.value or 0

    def bind(self) -> None:
        """The context of this thread's device becomes its current one, and the first use of all initialises CUDA."""
        self.init()
        device = self.thread.device
        if device not in self.contexts:
            self.contexts[device] = self.made("cuDevicePrimaryCtxRetain", device)
        if self.thread.bound != device:
            self.call("cuCtxSetCurrent", ctypes.c_void_p(self.contexts[device]))
            self.thread.bound = device

    # torch.cuda

    def init(self) -> None:
        if self.initialised_in == 0:
            self.call("cuInit", 0)
            self.initialised_in = os.getpid()
        if self.initialised_in != os.getpid():
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    def is_initialized(self) -> bool:
        return self.initialised_in == os.getpid()

    def device_count(self) -> int:
        found = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(found))
        return found.value

    def set_device(self, device: int) -> None:
        self.thread.device = device
        self.bind()

    def has_context(self, device: int) -> bool:
        return device in self.contexts

    def exchange_device(self, device: int) -> int:
        before = self.thread.device
        if device != before:
            self.set_device(device)
        return before

    def maybe_exchange_device(self, device: int) -> int:
        before = self.thread.device
        self.thread.device = device
        if device != before and device in self.contexts:
            self.bind()
        return before

    @contextmanager
    def guard(self, device: int) -> Iterator[None]:
        before = self.exchange_device(device)
        try:
            yield
        finally:
            self.maybe_exchange_device(before)

    def current_stream(self, device: int) -> tuple[int, int, int]:
        """Id, device, and type of device. The id of a stream is its handle here, as torch has it for foreign ones."""
        return self.raw_stream(device), device, DEFAULT_TYPE

    def set_stream_by_id(self, stream_id: int, device_index: int, device_type: int) -> None:
        if device_index != self.thread.device:
            self.set_device(device_index)
        self.thread.streams[device_index] = stream_id

    def raw_stream(self, device: int) -> int:
        return self.thread.streams.get(device, 0)

    def set_stream(self, stream: Stream) -> None:
        self.set_device(stream.device_index)
        self.thread.streams[stream.device_index] = stream.cuda_stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.thread.device, self.raw_stream(stream.device_index)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.thread.streams[stream.device_index] = before[1]
            self.set_device(before[0])

    def synchronize(self) -> None:
        self.bind()
        self.call("cuCtxSynchronize")

    def is_current_stream_capturing(self) -> bool:
        if not self.has_context(self.thread.device):
            return False
        return self.captures()

    def captures(self) -> bool:
        self.bind()
        status = ctypes.c_int()
        self.call("cuStreamIsCapturing", ctypes.c_void_p(self.raw_stream(self.thread.device)), ctypes.byref(status))
        return status.value != 0

    @contextmanager
    def graph(
        self, cuda_graph: CUDAGraph, stream: Stream | None = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        self.synchronize()
        with self.stream(stream or Stream(self)):
            cuda_graph.capture_begin(capture_error_mode=capture_error_mode)
            try:
                yield
            finally:
                cuda_graph.capture_end()

    def work(self, work_ns: int) -> int:
        """A kernel on the current stream: when it will be done."""
        self.bind()
        return self.driver.launch(self.raw_stream(self.thread.device), work_ns)


class Stream:
    """`torch.cuda.Stream` and, with the handle that it is to have, `torch.cuda.ExternalStream`."""

    device_type = DEFAULT_TYPE

    def __init__(
        self, cuda: _Cuda, device: int | None = None, priority: int = 0, cuda_stream: int | None = None
    ) -> None:
        self.device_index = cuda.thread.device if device is None else device
        if cuda_stream is None:
            with cuda.guard(self.device_index):
                cuda.bind()
                cuda_stream = cuda.made("cuStreamCreateWithPriority", NON_BLOCKING, priority)
        self.cuda_stream = self.stream_id = cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, cuda: _Cuda, enable_timing: bool = False) -> None:
        self._cuda = cuda
        self._flags = 0 if enable_timing else DISABLE_TIMING
        self._device = -1
        self.cuda_event = 0

    def record(self, stream: Stream | None = None) -> None:
        cuda = self._cuda
        if stream is None:
            stream = Stream(cuda, cuda_stream=cuda.raw_stream(cuda.thread.device))
        if not self.cuda_event:
            self._device = stream.device_index
            with cuda.guard(self._device):
                cuda.bind()
                self.cuda_event = cuda.made("cuEventCreate", self._flags)
        if self._device != stream.device_index:
            raise RuntimeError(
                f"Event device {self._device} does not match recording stream's device {stream.device_index}."
            )
        with cuda.guard(self._device):
            cuda.captures()  # of the current stream, to tell how an external event is to be recorded
            cuda.call("cuEventRecord", ctypes.c_void_p(self.cuda_event), ctypes.c_void_p(stream.cuda_stream))

    def query(self) -> bool:
        """Query the event on the current device of the thread: the runtime makes a context there if there is none."""
        if not self.cuda_event:
            return True
        self._cuda.bind()
        code = self._cuda.driver.library.cuEventQuery(ctypes.c_void_p(self.cuda_event))
        if code == NOT_READY:
            return False
        self._cuda.check("cuEventQuery", code)
        return True

    def elapsed_time(self, end_event: Event) -> float:
        if self._flags or end_event._flags:
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.cuda_event and end_event.cuda_event):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        elapsed_ms = ctypes.c_float()
        with self._cuda.guard(self._device):
            first, second = ctypes.c_void_p(self.cuda_event), ctypes.c_void_p(end_event.cuda_event)
            self._cuda.call("cuEventElapsedTime", ctypes.byref(elapsed_ms), first, second)
        return elapsed_ms.value

    def synchronize(self) -> None:
        if self.cuda_event:
            self._cuda.bind()
            self._cuda.call("cuEventSynchronize", ctypes.c_void_p(self.cuda_event))

    def __del__(self) -> None:
        if self.cuda_event:
            with self._cuda.guard(self._device):
                self._cuda.driver.library.cuEventDestroy_v2(ctypes.c_void_p(self.cuda_event))


class CUDAGraph:
    """`torch.cuda.CUDAGraph`: captures what the current stream is given, and replays it on the current stream."""

    def __init__(self, cuda: _Cuda) -> None:
        self.cuda = cuda
        self.executable = 0

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.origin = self.cuda.raw_stream(self.cuda.thread.device)
        self.cuda.call("cuStreamBeginCapture_v2", ctypes.c_void_p(self.origin), CAPTURE_MODES[capture_error_mode])

    def capture_end(self) -> None:
        graph = ctypes.c_void_p()
        self.cuda.call("cuStreamEndCapture", ctypes.c_void_p(self.origin), ctypes.byref(graph))
        self.executable = self.cuda.made("cuGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
        self.cuda.call("cuGraphDestroy", graph)

    def replay(self) -> None:
        self.cuda.bind()
        stream = self.cuda.raw_stream(self.cuda.thread.device)
        self.cuda.call("cuGraphLaunch", ctypes.c_void_p(self.executable), ctypes.c_void_p(stream))


SEGMENT_BYTES = 2 << 20
BLOCK_BYTES = 512


class _Allocator:
    """torch's caching allocator as far as it counts: blocks of 512 bytes in segments of 2 MiB, which stay reserved."""

    def __init__(self, cuda: _Cuda) -> None:
        self.cuda = cuda
        self.counts: dict[int, dict[str, int]] = {}
        self.broken = False

    def take(self, size_bytes: int) -> None:
        """Count the bytes of a tensor on the current device; below 0, those that one gives back."""
        self.cuda.bind()
        counts = self.counts.setdefault(self.cuda.thread.device, dict.fromkeys(("allocated", "reserved"), 0))
        taken = -(-abs(size_bytes) // BLOCK_BYTES) * (BLOCK_BYTES if size_bytes > 0 else -BLOCK_BYTES)
        counts["allocated"] += taken
        counts["reserved"] = max(counts["reserved"], -(-counts["allocated"] // SEGMENT_BYTES) * SEGMENT_BYTES)
        for name in ("allocated", "reserved"):
            counts[f"{name} peak"] = max(counts.get(f"{name} peak", 0), counts[name])

    def stats(self, device: int) -> dict[str, Any]:
        """`_cuda_memoryStats`: of any device, but not before CUDA is initialised."""
        if self.broken:
            raise RuntimeError("custom allocator does not yet support getDeviceStats.\nSee ...")
        if not self.cuda.is_initialized():
            raise RuntimeError("Invalid device argument 0: did you call init?")
        counts = self.counts.get(device, {})
        return {
            f"{name}_bytes": {"all": {"current": counts.get(name, 0), "peak": counts.get(f"{name} peak", 0)}}
            for name in ("allocated", "reserved")
        }


def fake_torch(driver: FakeDriver, *, has_codes: bool = True) -> Any:
    """Return a module `torch` with `cuda`, `version` and `_C`.

    It also has `work` for all computations, and `allocator` for its memory.

    has_codes: its errors have a code, as from torch 2.8 on.
    """
    cuda = _Cuda(driver, has_codes)
    names = ("torch", "torch.cuda", "torch._C", "torch.version")
    torch, public, private, version = (ModuleType(name) for name in names)
    for module in (torch, public, private, version):
        module.__spec__ = ModuleSpec(module.__name__, None)
    used = ("init", "is_initialized", "device_count", "set_device", "set_stream", "stream", "synchronize", "graph")
    for name in used:
        setattr(public, name, getattr(cuda, name))
    public.is_current_stream_capturing = private._cuda_isCurrentStreamCapturing = cuda.is_current_stream_capturing
    public.current_device = private._cuda_getDevice = lambda: cuda.thread.device
    private._cuda_exchangeDevice = cuda.exchange_device
    private._cuda_maybeExchangeDevice = cuda.maybe_exchange_device
    private._cuda_hasPrimaryContext = cuda.has_context
    private._cuda_getCurrentRawStream = cuda.raw_stream
    private._cuda_getCurrentStream = cuda.current_stream
    private._cuda_setStream = cuda.set_stream_by_id
    private._cuda_getDeviceCount = cuda.device_count
    torch.allocator = _Allocator(cuda)
    private._cuda_memoryStats = torch.allocator.stats
    public.Stream = partial(Stream, cuda)
    public.ExternalStream = lambda stream_ptr, device=None: Stream(cuda, device, cuda_stream=stream_ptr)
    public.default_stream = lambda device=None: Stream(cuda, device, cuda_stream=0)
    public.Event = partial(Event, cuda)
    methods = {"__init__": lambda self: CUDAGraph.__init__(self, cuda), "replay": CUDAGraph.replay}
    public.CUDAGraph = type("CUDAGraph", (CUDAGraph,), methods)
    version.cuda, version.hip = "13.0", None
    torch.cuda, torch._C, torch.version, torch.work = public, private, version, cuda.work
    torch.__version__ = "2.13.0"
    return torch
