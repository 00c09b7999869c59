"""Measures device times by torch's own events, on hosts without cuda-bindings and on ROCm.

Recording an event costs more than with `cuda.CudaDriver`, and always releases the GIL. Nothing initialises CUDA. A
context is represented by the number of its device plus one.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from instrument.device import cuda

T = TypeVar("T")

TEXTS = {
    1: "invalid argument",
    2: "out of memory",
    3: "initialization error",
    4: "driver shutting down",
    46: "all CUDA-capable devices are busy or unavailable",
    100: "no CUDA-capable device is detected",
    201: "invalid device context",
    214: "uncorrectable ECC error encountered",
    220: "uncorrectable NVLink error detected during the execution",
    400: "invalid resource handle",
    600: "device not ready",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    709: "context is destroyed",
    710: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
    720: "too many blocks in cooperative launch",
    900: "operation not permitted when stream is capturing",
    901: "operation failed due to a previous error during capture",
    906: "operation would make the legacy stream depend on a capturing blocking stream",
    907: "operation not permitted on an event last recorded in a capturing stream",
    999: "unknown error",
}
"""The error texts of CUDA and ROCm by number. torch before 2.8 raises only the text."""

OWN_TEXTS = {
    "must be completed before calculating elapsed time": cuda.NOT_READY,
    "must be recorded before calculating elapsed time": 400,
    "does not match recording stream's device": 400,
}
"""The driver's error for each message of torch's own checks."""

_THREAD_LOCAL, _RELAXED = 1, 2

_kept: dict[int, Any] = {}
"""The events in use. A forked child must not destroy them."""


class TorchDriver:
    """A driver that uses torch's own events, for CUDA or ROCm.

    Raises `ImportError` for a torch that is too old, and `OSError` if a thread of this package would disturb captures
    of graphs.
    """

    default_stream = 0
    misfit = ""  # torch includes the vendor's libraries
    CAPTURING = cuda.CAPTURING
    NOT_READY = cuda.NOT_READY

    def __init__(self, torch: Any) -> None:
        native = torch._C
        try:
            self._has_context: Callable[[int], bool] = native._cuda_hasPrimaryContext
            self._exchange: Callable[[int], int] = native._cuda_exchangeDevice
            self._go_back: Callable[[int], int] = native._cuda_maybeExchangeDevice
            self._device: Callable[[], int] = native._cuda_getDevice
            self._current: Callable[[int], int] = native._cuda_getCurrentRawStream
            self._captures: Callable[[], bool] = native._cuda_isCurrentStreamCapturing
        except AttributeError as error:
            raise ImportError(f"torch {torch.__version__} is not supported; use 2.1 or newer ({error})") from error
        self._torch = torch
        self._native = native
        self._exchange_mode = _find_mode_setter(is_rocm=bool(getattr(torch.version, "hip", None)))
        self._streams: dict[tuple[int, int], Any] = {}
        self._thread = threading.local()
        self.mark: Callable[[Any, Any], int] = self._record_event_if_uncaptured

    def error_name(self, error: int) -> str:
        return f"{TEXTS.get(error, 'error')} ({error})"

    # ---------------------------------------------------------------- on a thread of the service

    def _record_event_if_uncaptured(self, event: tuple[Any, int], stream: int) -> int:
        """Record an event on a stream unless a graph captures it. Return the stream's address, or an error below 0."""
        torch_event, device = event
        try:
            target = self._streams.get((device, stream))
            if target is None:
                target = self._find_stream(device, stream)
            if self._is_captured(device, target, stream):
                return -cuda.CAPTURING
            torch_event.record(target)
        except (RuntimeError, ValueError) as error:
            return -find_error_number(error)
        return 0 if stream == cuda.LEGACY else stream  # torch does not give the numbers that vendors' tools use

    def _find_stream(self, device: int, stream: int) -> Any:
        if len(self._streams) > 1024:
            self._streams.clear()
        torch = self._torch.cuda
        stream_object = torch.ExternalStream(stream, device=device) if stream else torch.default_stream(device)
        self._streams[device, stream] = stream_object
        return stream_object

    def _is_captured(self, device: int, target: Any, stream: int) -> bool:
        """Return True if a graph captures the stream. The stream is made current for this test, because torch only
        tests the current stream."""
        if self._device() == device and self._current(device) == stream:
            return self._captures()
        native = self._native
        before = self._exchange(device)
        try:
            current = native._cuda_getCurrentStream(device)
            _set_stream(native, target.stream_id, target.device_index, target.device_type)
            try:
                return self._captures()
            finally:
                _set_stream(native, *current)
        finally:
            self._go_back(before)

    def check_capture(self, stream: int) -> int:
        device = self._device()
        try:
            return cuda.CAPTURING if self._is_captured(device, self._find_stream(device, stream), stream) else 0
        except RuntimeError as error:
            return find_error_number(error)

    def find_device(self, stream: int) -> int:
        """Return the device index of a stream, or the current device for a stream that torch does not know."""
        index = next((device for device, handle in list(self._streams) if handle == stream), None)
        return index if stream > cuda.PER_THREAD and index is not None else self.current_device()

    def run_relaxed(self, make: Callable[[], T]) -> T:
        mode = ctypes.c_int(_RELAXED)
        error = self._exchange_mode(ctypes.byref(mode))
        try:
            return make()
        finally:
            if not error:
                self._exchange_mode(ctypes.byref(mode))

    def find_context(self) -> int:
        device = self.current_device()
        return 0 if device < 0 else self.primary_context(device)

    def current_device(self) -> int:
        return self._device() if self._torch.cuda.is_initialized() else -1

    def primary_context(self, device: int) -> int:
        return device + 1 if self._torch.cuda.is_initialized() and self._has_context(device) else 0

    def push_context(self, context: int) -> int:
        try:
            before = self._exchange(context - 1)
        except RuntimeError as error:
            return find_error_number(error)
        vars(self._thread).setdefault("before", []).append(before)
        return 0

    def pop_context(self) -> None:
        self._go_back(self._thread.before.pop())

    # ---------------------------------------------------------------- on the resolver's thread

    def bind_context(self, context: int) -> int:
        """Make a context's device current on the calling thread. Without this, a query of an event would create a
        context on the first device."""
        try:
            self._exchange(context - 1)
        except RuntimeError as error:
            return find_error_number(error)
        return self._exchange_mode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))

    def new_event(self) -> tuple[int, Any]:
        try:
            event = self._torch.cuda.Event(enable_timing=True)
        except RuntimeError as error:
            return find_error_number(error), None
        _kept[id(event)] = event
        return 0, event

    def read_handle(self, event: Any) -> tuple[Any, int]:
        return event, self._device()

    def destroy_event(self, event: Any) -> None:
        _kept.pop(id(event), None)

    def new_stream(self) -> tuple[int, int]:
        """Return one of torch's high-priority streams, which wait for no other stream."""
        try:
            stream = self._torch.cuda.Stream(priority=-1)
            self._streams[stream.device_index, stream.cuda_stream] = stream
        except RuntimeError as error:
            return find_error_number(error), 0
        return 0, stream.cuda_stream

    def destroy_stream(self, stream: int) -> None:
        """Do nothing, because torch reuses its streams."""

    def query_event(self, event: Any) -> int:
        try:
            return 0 if event.query() else cuda.NOT_READY
        except RuntimeError as error:
            return find_error_number(error)

    def measure_pairs(self, anchor: Any, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[int, int, int]]:
        answers = []
        for begin, end in pairs:
            error, device_ns, offset_ns = self.query_event(end), 0, 0
            if error == cuda.NOT_READY:
                break
            if not error:
                error, device_ns = self.elapsed_ns(begin, end)
            if not error and anchor is not None:
                error, offset_ns = self.elapsed_ns(anchor, begin)
            answers.append((error, device_ns, offset_ns))
        return answers

    def make_event_reader(self, recorder: Any, now: Callable[[], int]) -> None:
        """Return None, because torch keeps the interpreter's lock while it records an event."""

    def elapsed_ns(self, first: Any, second: Any) -> tuple[int, int]:
        try:
            return 0, round(first.elapsed_time(second) * 1e6)
        except (RuntimeError, ValueError) as error:
            return find_error_number(error), 0


Driver = cuda.CudaDriver | TorchDriver


def find_error_number(error: Exception) -> int:
    number = getattr(error, "error_code", None)
    if isinstance(number, int) and number:
        return number
    text = str(error)
    for words, number_of_text in OWN_TEXTS.items():
        if words in text:
            return number_of_text
    return next((number_of_text for number_of_text, words in TEXTS.items() if words in text), 1)


def _set_stream(native: Any, stream_id: int, device_index: int, device_type: int) -> None:
    native._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def _find_mode_setter(*, is_rocm: bool) -> Callable[[Any], int]:
    """Return CUDA's or ROCm's function that sets the calling thread's capture mode. torch has no such function."""
    if not is_rocm:
        exchange = ctypes.CDLL(cuda.LIBRARY).cuThreadExchangeStreamCaptureMode
    else:
        # The file that torch has loaded: its name has a version, and there may be others.
        library = re.search(r"/.*/libamdhip64\.so.*", Path("/proc/self/maps").read_text("utf-8", "replace"))
        if library is None:
            raise OSError("torch was built for ROCm, but has not loaded libamdhip64.so")
        exchange = ctypes.CDLL(library[0]).hipThreadExchangeStreamCaptureMode
    return exchange
