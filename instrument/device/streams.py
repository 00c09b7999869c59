"""Streams: the stream and device of the calling thread's work, as its framework reports them."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from instrument.recorder.recorder import stream_handle
from instrument.runtime.faults import FAULTS

Stream = tuple[int, int]
"""Index of a device as the process numbers them, and the handle of one of its streams."""

Current = Callable[..., "Stream | None"]
"""A call for the calling thread's current stream, on its current device or on a given one.

Returns None where the framework has not begun to use a device.
"""

UNKNOWN = -1
"""A value in place of a handle: the framework has not reported its stream yet."""

COPIES = ("host_to_device", "device_to_host", "device_to_device")
"""The functions of numba's driver module that copy."""

MODULES = ("torch", "cupy", "numba.cuda", "cuda.bindings.driver")
"""The modules by which a host uses CUDA. Only the first three have a current stream."""


def current_of_torch(torch: Any) -> Current | None:
    """Return a call for torch's current stream, the one that its compilers use: 20 times faster than the public one.

    Returns None for a torch that was built without CUDA.
    """
    native = getattr(torch, "_C", None)
    raw, device = getattr(native, "_cuda_getCurrentRawStream", None), getattr(native, "_cuda_getDevice", None)
    if raw is None or device is None:
        return None
    is_initialized = torch.cuda.is_initialized

    def current(index: int | None = None) -> Stream | None:
        if not is_initialized():
            return None
        if index is None:
            index = device()
        return index, raw(index)

    return current


def current_of_cupy(cupy: Any, has_context: Callable[[], bool]) -> Current:
    """Return a call for cupy's current stream, which asks the driver for a context before: cupy would make one."""
    stream, device = cupy.cuda.get_current_stream, cupy.cuda.runtime.getDevice

    def current(index: int | None = None) -> Stream | None:
        if not has_context():
            return None
        return (device(), stream().ptr) if index is None else (index, stream(index).ptr)

    return current


def current_of_numba(device: Callable[[], int], used: Callable[[], int | None] = lambda: None) -> Current:
    """Return a call for the stream on which the calling thread last used numba, for numba has no current one.

    `NumbaStreams` notes it. Before the first use nothing is timed: an event on the default stream would have the
    thread's work wait for every stream that blocks.
    """

    def current(_: int | None = None) -> Stream | None:
        index, stream = device(), used()
        return None if index < 0 else (index, UNKNOWN if stream is None else stream)

    return current


class NumbaStreams:
    """The streams on which threads launch and copy by numba."""

    def __init__(self, default_stream: int) -> None:
        self._default = default_stream
        self._thread = threading.local()

    def used(self) -> int | None:
        """Return the handle of the calling thread's last stream; None before it has used any."""
        return getattr(self._thread, "stream", None)

    def install(self, numba_cuda: Any) -> Callable[[], None]:
        """Begin to note. Returns the detach. A numba without these functions is left alone."""
        name = numba_cuda.__name__
        kernel = getattr(sys.modules.get(f"{name}.dispatcher"), "_Kernel", None)
        driver = sys.modules.get(f"{name}.cudadrv.driver")
        places = [(kernel, "launch", 4), *((driver, copy, 3) for copy in COPIES)]
        undos = [self._note(owner, function, place) for owner, function, place in places if hasattr(owner, function)]

        def undo() -> None:
            for back in reversed(undos):
                back()

        return undo

    def _note(self, owner: Any, name: str, place: int) -> Callable[[], None]:
        """Have a function note its stream, the argument at a place, before it runs."""
        function, thread, default = getattr(owner, name), self._thread, self._default

        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            try:
                stream = args[place] if len(args) > place else kwargs.get("stream", 0)
                thread.stream = stream_handle(stream) or default
            except Exception as fault:
                FAULTS.note("numba's streams", fault)
            return function(*args, **kwargs)

        setattr(owner, name, noting)

        def undo() -> None:
            if getattr(owner, name, None) is noting:  # else a later wrapper calls it for ever
                setattr(owner, name, function)

        return undo


def likely(places: Sequence[Stream]) -> Sequence[Stream]:
    """Return the distinct streams on which work may run, of the current streams of several frameworks.

    A framework that does nothing on a device reports its default stream, and an event there blocks other streams. So it
    is left out where another framework has a stream of its own on that device.
    """
    own = {device for device, stream in places if stream > 1}
    return [place for place in dict.fromkeys(places) if place[1] > 1 or place[0] not in own]


def current_of(module: ModuleType, driver: Any, numba: NumbaStreams) -> Current | None:
    """Return a call for the current stream of a framework; None for a module without one."""
    if module.__name__ == "torch":
        return current_of_torch(module)
    if module.__name__ == "cupy":
        return current_of_cupy(module, lambda: bool(driver.current()))
    if module.__name__ == "numba.cuda":
        return current_of_numba(driver.current_device, numba.used)
    return None
