"""What of torch's CUDA side concerns device time, on the fake driver: the torch of the tests may have none of its own.

As torch does, it initialises nothing before it is used, gives each thread a current device and a current stream per
device, makes streams that do not block, and calls the driver for all of it. As the CUDA runtime does under torch, it
makes the device's primary context current in a thread only when that thread first uses the device.

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

CAPTURE_MODES = {"global": 0, "thread_local": 1, "relaxed": 2}
NON_BLOCKING = 1


class _Thread(threading.local):
    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, int] = {}
        self.bound = -1


class _Cuda:
    """`torch.cuda` and its part of `torch._C`, with one thread's state for each."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.thread = _Thread()
        self.contexts: dict[int, int] = {}
        self.initialised_in = 0

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.driver.library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"CUDA error: {name} returned {code}")

    def made(self, name: str, *arguments: Any) -> int:
        """What a call hands out by its first argument."""
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

    def set_device(self, device: int) -> None:
        self.thread.device = device
        self.bind()

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
        if not self.is_initialized():
            return False
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
    """`torch.cuda.Stream`."""

    def __init__(self, cuda: _Cuda, device: int | None = None) -> None:
        before = cuda.thread.device
        self.device_index = before if device is None else device
        cuda.set_device(self.device_index)
        self.cuda_stream = cuda.made("cuStreamCreate", NON_BLOCKING)
        cuda.set_device(before)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream


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


def fake_torch(driver: FakeDriver) -> Any:
    """A module `torch` with `cuda` and `_C`, and `work` in place of everything that computes."""
    cuda = _Cuda(driver)
    torch, public, private = (ModuleType(name) for name in ("torch", "torch.cuda", "torch._C"))
    for module in (torch, public, private):
        module.__spec__ = ModuleSpec(module.__name__, None)
    for name in ("init", "is_initialized", "set_device", "set_stream", "stream", "synchronize", "graph"):
        setattr(public, name, getattr(cuda, name))
    public.is_current_stream_capturing = private._cuda_isCurrentStreamCapturing = cuda.is_current_stream_capturing
    public.current_device = private._cuda_getDevice = lambda: cuda.thread.device
    private._cuda_getCurrentRawStream = cuda.raw_stream
    public.Stream = partial(Stream, cuda)
    methods = {"__init__": lambda self: CUDAGraph.__init__(self, cuda), "replay": CUDAGraph.replay}
    public.CUDAGraph = type("CUDAGraph", (CUDAGraph,), methods)
    torch.cuda, torch._C, torch.work = public, private, cuda.work
    return torch
