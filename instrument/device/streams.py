"""Streams: on which stream of which device the calling thread's work goes, as the framework that it uses tells."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

Stream = tuple[int, int]
"""Index of a device as the process numbers them, and the handle of one of its streams."""

Current = Callable[[], "Stream | None"]
"""Tells the calling thread's current stream; None where the framework has not begun to use a device."""

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

    def current() -> Stream | None:
        if not is_initialized():
            return None
        index = device()
        return index, raw(index)

    return current


def current_of_cupy(cupy: Any, has_context: Callable[[], bool]) -> Current:
    """cupy's current stream. Its first question would initialise CUDA, so the driver is asked for a context before."""
    stream, device = cupy.cuda.get_current_stream, cupy.cuda.runtime.getDevice

    def current() -> Stream | None:
        return (device(), stream().ptr) if has_context() else None

    return current


def current_of_numba(device: Callable[[], int]) -> Current:
    """numba has no current stream: what names none goes to the default one of the current context."""

    def current() -> Stream | None:
        index = device()
        return None if index < 0 else (index, 0)

    return current


def current_of(module: ModuleType, driver: Any) -> Current | None:
    """What tells the current stream of a framework that has been imported."""
    if module.__name__ == "torch":
        return current_of_torch(module)
    if module.__name__ == "cupy":
        return current_of_cupy(module, lambda: bool(driver.current()))
    return current_of_numba(driver.current_device) if module.__name__ == "numba.cuda" else None
