"""Streams: on which stream of which device the calling thread's work goes, as the framework that it uses tells."""

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
"""Tells the calling thread's current stream, on its current device or on the one that it is asked about.

None where the framework has not begun to use a device.
"""

UNKNOWN = -1
"""In place of a handle: the framework works on a stream that it has not told yet."""

COPIES = ("host_to_device", "device_to_host", "device_to_device")
"""What copies in numba's driver module."""

MODULES = ("torch", "cupy", "numba.cuda", "cuda.bindings.driver")
"""What a host uses CUDA by. Only the first three have a stream that is current."""


def current_of_torch(torch: Any) -> Current | None:
    """torch's current stream by the call that its own compilers use, a twentieth of `torch.cuda.current_stream`.

    None for a torch that was built without CUDA.
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
    """cupy's current stream. Its first question would initialise CUDA, so the driver is asked for a context before."""
    stream, device = cupy.cuda.get_current_stream, cupy.cuda.runtime.getDevice

    def current(index: int | None = None) -> Stream | None:
        if not has_context():
            return None
        return (device(), stream().ptr) if index is None else (index, stream(index).ptr)

    return current


def current_of_numba(device: Callable[[], int], used: Callable[[], int | None] = lambda: None) -> Current:
    """The stream that the calling thread has last used numba on, for numba has none that is current.

    It is told by `NumbaStreams`. Where that is not known nothing is timed: a record on the default stream would keep
    the thread's work waiting for every stream that blocks.
    """

    def current(_: int | None = None) -> Stream | None:
        index, stream = device(), used()
        return None if index < 0 else (index, UNKNOWN if stream is None else stream)

    return current


class NumbaStreams:
    """Notes on which stream each thread launches and copies by numba."""

    def __init__(self, default_stream: int) -> None:
        self._default = default_stream
        self._thread = threading.local()

    def used(self) -> int | None:
        """The handle of the calling thread's last one; None before it has used any."""
        return getattr(self._thread, "stream", None)

    def install(self, numba_cuda: Any) -> Callable[[], None]:
        """Begin to note; returns the way back. A numba without these functions is left alone."""
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
        """Have a function, whose argument at a place is the stream, note it before it does anything."""
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
            if getattr(owner, name, None) is noting:  # else somebody has wrapped it since, who calls it for ever
                setattr(owner, name, function)

        return undo


def likely(places: Sequence[Stream]) -> Sequence[Stream]:
    """Of the streams that several frameworks call current, each once, those on which work may go.

    The default stream of a device is what a framework tells that does nothing there, and a record on it holds up the
    streams that block: it is left out where another framework has a stream of its own on that device.
    """
    own = {device for device, stream in places if stream > 1}
    return [place for place in dict.fromkeys(places) if place[1] > 1 or place[0] not in own]


def current_of(module: ModuleType, driver: Any, numba: NumbaStreams) -> Current | None:
    """What tells the current stream of a framework that has been imported."""
    if module.__name__ == "torch":
        return current_of_torch(module)
    if module.__name__ == "cupy":
        return current_of_cupy(module, lambda: bool(driver.current()))
    if module.__name__ == "numba.cuda":
        return current_of_numba(driver.current_device, numba.used)
    return None
