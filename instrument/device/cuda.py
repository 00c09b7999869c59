"""Calls the CUDA driver for events, streams and contexts, and finds the current streams of frameworks.

No call initialises CUDA, makes a context or raises. Calls return the driver's error code, 0 for success. All calls
release the GIL, except `mark` if the profile sets `device: {gil: hold}`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

from instrument import native
from instrument.recorder.recorder import stream_handle
from instrument.runtime.faults import FAULTS

T = TypeVar("T")

Reading = Callable[[int, int, int], tuple[int, int, int]]
"""A function of (event, stream, maximum ns) that records the event and polls for it.

It returns the driver's error, the host time before the record, and the host time after the event.
"""

CAPTURING = 1_000_000
"""The value returned instead of a driver's error while a CUDA graph captures the stream."""

NOT_READY = 600

UNKNOWN = 999
NO_CONTEXT = 201
BAD_HANDLE = 400
LEGACY, PER_THREAD = 1, 2
"""CUDA's constant handles of the legacy default stream, and of the calling thread's own default stream."""

CAPTURE_ERRORS = frozenset(range(900, 909))
"""The driver's errors about a capture. The device still works afterwards."""

FATAL = frozenset({3, 4, 46, 214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, *range(800, 811), 999})
"""The driver's permanent errors, such as a missing CUDA, a destroyed context, a failed kernel or a lost device."""

_NON_BLOCKING = 1
_THREAD_LOCAL, _RELAXED = 1, 2

LIBRARY = "libcuda.so.1"


KNOWN_MAJORS = (12, 13)
WANTED = "cuda-bindings>=12.9.1,<14"


def explain_missing_driver() -> str:
    """Return the reason why there is no CUDA driver, or an empty string. The driver's library is loaded, but CUDA is
    not initialised."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        return f"no CUDA driver: {error}"
    return ""


def explain_version_conflict(bindings: str, driver: int) -> str:
    """Return the reason why a version of cuda-bindings does not fit a driver, with the remedy. Return an empty string
    if the versions fit.

    - `bindings`: the version of cuda-bindings, or empty
    - `driver`: the newest CUDA version that the driver supports, such as 13010 for 13.1, or 0 if it is unknown
    """
    if not bindings:
        return "cuda-bindings is not installed; install instrument-sdk[cuda]"
    major = int(bindings.partition(".")[0])
    if major not in KNOWN_MAJORS:
        return f"found cuda-bindings {bindings}, which is not known; install '{WANTED}'"
    if not driver or driver // 1000 >= major:
        return ""
    older = [supported for supported in KNOWN_MAJORS if supported <= driver // 1000]
    cure = f"install 'cuda-bindings<{older[-1] + 1}'" if older else "install a newer driver"
    return f"the driver is for CUDA {_format_version(driver)} and older than cuda-bindings {bindings}; {cure}"


def find_versions() -> dict[str, str]:
    """Return the versions of the driver, cuda-bindings and ROCm, and the conflict between them. Missing texts are
    empty.

    The driver's library is loaded, but CUDA is not initialised.
    """
    torch = _find_version("torch")
    facts = {"driver": "", "bindings": _find_version("cuda-bindings"), "rocm": torch if "rocm" in torch else ""}
    problem = explain_missing_driver()
    if not problem:
        version = ctypes.c_int()
        ctypes.CDLL(LIBRARY).cuDriverGetVersion(ctypes.byref(version))
        facts["driver"] = _format_version(version.value)
        problem = explain_version_conflict(facts["bindings"], version.value)
    return {**facts, "problem": "" if facts["rocm"] else problem}


def _find_version(distribution: str) -> str:
    from importlib import metadata  # takes 10 ms, which no service needs

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _format_version(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


class CudaDriver:
    """The CUDA driver, called through cuda-python. `holds_gil` is True if `mark` must keep the interpreter's lock.

    Raises `ImportError` if cuda-bindings is missing or unknown, and `OSError` if there is no driver.
    """

    CAPTURING = CAPTURING
    NOT_READY = NOT_READY

    def __init__(self, *, holds_gil: bool = False) -> None:
        library = ctypes.CDLL(LIBRARY)
        # Bindings for a newer major version than the driver's warn at their first call; `misfit` reports that here.
        before = os.environ.get("CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING")
        os.environ["CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING"] = "1"
        try:
            import cuda.bindings
            from cuda.bindings import driver
        except ModuleNotFoundError as error:
            raise ImportError(explain_version_conflict("", 0)) from error
        finally:
            if before is None:
                del os.environ["CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING"]
        self.version = str(cuda.bindings.__version__)
        unknown = explain_version_conflict(self.version, 0)
        if unknown:
            raise ImportError(unknown)
        self._driver = driver
        self.holds_gil = holds_gil
        # The bindings read it once, when they are imported.
        per_thread = os.environ.get("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "0")
        self.default_stream = PER_THREAD if per_thread.strip().isdigit() and int(per_thread) else 0
        numbers = getattr(library, "cuStreamGetId", None)  # from CUDA 12.0 on
        addresses = _address_of(library.cuEventRecord), _address_of(library.cuStreamIsCapturing)
        number_of = 0 if numbers is None else _address_of(numbers)
        self.mark: Callable[[Any, int], int] = functools.partial(
            native.MODULE.mark, *addresses, number_of, not holds_gil
        )
        """A function that records an event on a stream, unless the stream is captured. It returns the stream's number,
        or an error as a negative number."""
        # The bindings know only one of the two, and raise if the driver is older.
        elapsed = _address_of(getattr(library, "cuEventElapsedTime_v2", library.cuEventElapsedTime))
        float_address = ctypes.POINTER(ctypes.c_float)
        self._elapsed = ctypes.CFUNCTYPE(ctypes.c_int, float_address, ctypes.c_void_p, ctypes.c_void_p)(elapsed)
        self._record, self._query = _address_of(library.cuEventRecord), _address_of(library.cuEventQuery)
        measure = native.MODULE.measure
        self._measure: Callable[..., list[tuple[int, float, float]]] = functools.partial(measure, self._query, elapsed)

    @functools.cached_property
    def misfit(self) -> str:
        error, version = self._call_driver(self._driver.cuDriverGetVersion)
        return explain_version_conflict(self.version, 0 if error else version)

    def error_name(self, error: int) -> str:
        try:
            return str(self._driver.CUresult(error).name)
        except ValueError:
            return f"error {error}"

    # ---------------------------------------------------------------- on a thread of the service

    def _call_driver(self, function: Callable[..., tuple[Any, ...]], *arguments: Any) -> tuple[int, Any]:
        """Call a function of cuda-bindings. Return the driver's error code and the value.

        cuda-bindings raises an exception for an error code that only newer drivers have.
        """
        try:
            error, *values = function(*arguments)
        except (KeyError, ValueError) as unknown:
            code = re.search(r"\d+", str(unknown))
            return int(code[0]) if code else UNKNOWN, None
        return int(error), values[0] if len(values) == 1 else values

    def find_context(self) -> int:
        error, context = self._call_driver(self._driver.cuCtxGetCurrent)
        return 0 if error else int(context)

    def current_device(self) -> int:
        """Return the device index of the calling thread's current context, or -1."""
        error, device = self._call_driver(self._driver.cuCtxGetDevice)
        return -1 if error else int(device)

    def primary_context(self, device: int) -> int:
        """Return the primary context of a device, or 0 if the service has not created it. The context is not
        retained."""
        driver = self._driver
        error, handle = self._call_driver(driver.cuDeviceGet, device)
        if error:
            return 0
        error, state = self._call_driver(driver.cuDevicePrimaryCtxGetState, handle)
        if error or not state[1]:
            return 0
        error, context = self._call_driver(driver.cuDevicePrimaryCtxRetain, handle)
        if error:
            return 0
        self._call_driver(driver.cuDevicePrimaryCtxRelease, handle)
        return int(context)

    def check_capture(self, stream: int) -> int:
        """Return `CAPTURING` if a CUDA graph captures the stream, otherwise the driver's error code or 0."""
        error, status = self._call_driver(self._driver.cuStreamIsCapturing, stream)
        return error or (CAPTURING if status else 0)

    def find_device(self, stream: int) -> int:
        """Return the device index of a stream, or -1 on an error. A default stream belongs to the current device."""
        if stream <= PER_THREAD:
            return self.current_device()
        error, context = self._call_driver(self._driver.cuStreamGetCtx, stream)
        if error or self.push_context(int(context)):
            return -1
        try:
            return self.current_device()
        finally:
            self.pop_context()

    def run_relaxed(self, make: Callable[[], T]) -> T:
        """Call a function that creates events or streams, in a mode that does not break the capture of a CUDA graph."""
        driver = self._driver
        exchange = driver.cuThreadExchangeStreamCaptureMode
        error, mode = self._call_driver(exchange, driver.CUstreamCaptureMode(_RELAXED))
        try:
            return make()
        finally:
            if not error:
                self._call_driver(exchange, mode)

    def push_context(self, context: int) -> int:
        """Make a context current on the calling thread until `pop_context` is called."""
        return self._call_driver(self._driver.cuCtxPushCurrent, context)[0]

    def pop_context(self) -> None:
        self._call_driver(self._driver.cuCtxPopCurrent)

    # ---------------------------------------------------------------- on the resolver's thread

    def bind_context(self, context: int) -> int:
        """Make a context current on the calling thread permanently, in a mode that does not break the capture of a CUDA
        graph.

        In the mode `global`, which torch uses, a query on this thread would break a capture on another thread.
        """
        driver = self._driver
        error, _ = self._call_driver(driver.cuCtxSetCurrent, context)
        if not error:
            mode = driver.CUstreamCaptureMode(_THREAD_LOCAL)
            error, _ = self._call_driver(driver.cuThreadExchangeStreamCaptureMode, mode)
        return error

    def new_event(self) -> tuple[int, Any]:
        return self._call_driver(self._driver.cuEventCreate, 0)

    def read_handle(self, event: Any) -> int:
        """Return the number that `mark` accepts for an event."""
        return int(event)

    def destroy_event(self, event: Any) -> None:
        self._call_driver(self._driver.cuEventDestroy, event)

    def new_stream(self) -> tuple[int, int]:
        """Make a non-blocking stream of the highest priority. Return the driver's error code and the stream."""
        error, priorities = self._call_driver(self._driver.cuCtxGetStreamPriorityRange)
        if error:
            return error, 0
        error, stream = self._call_driver(self._driver.cuStreamCreateWithPriority, _NON_BLOCKING, priorities[1])
        return error, 0 if error else int(stream)

    def destroy_stream(self, stream: int) -> None:
        self._call_driver(self._driver.cuStreamDestroy, stream)

    def query_event(self, event: Any) -> int:
        return self._call_driver(self._driver.cuEventQuery, event)[0]

    def make_event_reader(self, recorder: Any, now: Callable[[], int]) -> Reading | None:
        """Return a function that records an event and polls for it. Return None if `now` is not the clock of the
        recorder."""
        read = getattr(recorder, "read_event", None)
        return None if read is None or now != recorder.now_ns else functools.partial(read, self._record, self._query)

    def measure_pairs(self, anchor: Any, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[int, int, int]]:
        """Return an error code, a length and a start for each pair of events. The list ends before the first unfinished
        pair.

        Times are in nanoseconds. The start counts from the event `anchor`, and is 0 without an anchor.
        """
        events = [int(event) for pair in pairs for event in pair]
        lengths = self._measure(0 if anchor is None else int(anchor), events)
        return [(error, round(device_ms * 1e6), round(offset_ms * 1e6)) for error, device_ms, offset_ms in lengths]

    def elapsed_ns(self, first: Any, second: Any) -> tuple[int, int]:
        """Return the driver's error code, and the device time in nanoseconds between two events that have happened."""
        ms = ctypes.c_float()
        error = self._elapsed(ms, int(first), int(second))
        return error, round(ms.value * 1e6)


def _address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


# Streams

Stream = tuple[int, int]
"""A stream: its device's index in this process, and its handle."""

Current = Callable[..., "Stream | None"]
"""A function that returns the calling thread's current stream, by default on the current device.

The result is None until the framework uses a device.
"""

UNREPORTED = -1
"""The placeholder for the handle of a stream that the framework has not reported yet."""

COPIES = ("host_to_device", "device_to_host", "device_to_device")
"""The functions of numba's driver module that copy memory."""


def make_torch_reader(torch: Any) -> Current | None:
    """Return a function that reads torch's current stream, or None if torch has no CUDA."""
    native = getattr(torch, "_C", None)
    raw, device = getattr(native, "_cuda_getCurrentRawStream", None), getattr(native, "_cuda_getDevice", None)
    if raw is None or device is None:
        return None
    is_initialized = torch.cuda.is_initialized

    def read_torch_stream(index: int | None = None) -> Stream | None:
        if not is_initialized():
            return None
        if index is None:
            index = device()
        return index, raw(index)

    return read_torch_stream


def make_cupy_reader(cupy: Any, has_context: Callable[[], bool]) -> Current:
    """Return a function that reads cupy's current stream. The function returns None while no CUDA context exists.

    If no context exists, cupy is not called, because cupy would create a context.
    """
    stream, device = cupy.cuda.get_current_stream, cupy.cuda.runtime.getDevice

    def read_cupy_stream(index: int | None = None) -> Stream | None:
        if not has_context():
            return None
        return (device(), stream().ptr) if index is None else (index, stream(index).ptr)

    return read_cupy_stream


class NumbaStreams:
    """Notes the stream on which each thread last launched or copied with numba. numba itself has no current stream."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._thread = threading.local()

    def find_last_stream(self, _: int | None = None) -> Stream | None:
        """Return the stream that the calling thread last used with numba.

        Before the first use, the handle is `UNREPORTED`, and nothing is timed. An event on the default stream would
        block other streams.
        """
        index = self._driver.current_device()
        return None if index < 0 else (index, getattr(self._thread, "stream", UNREPORTED))

    def install(self, numba_cuda: Any) -> Callable[[], None]:
        """Wrap the functions of numba that launch kernels or copy memory. Return the function that removes the
        wrappers."""
        name = numba_cuda.__name__
        kernel = getattr(sys.modules.get(f"{name}.dispatcher"), "_Kernel", None)
        driver = sys.modules.get(f"{name}.cudadrv.driver")
        places = [(kernel, "launch", 4), *((driver, copy, 3) for copy in COPIES)]
        undos = [
            self._wrap_to_note_stream(owner, function, place)
            for owner, function, place in places
            if hasattr(owner, function)
        ]

        def unwrap_numba() -> None:
            for back in reversed(undos):
                back()

        return unwrap_numba

    def _wrap_to_note_stream(self, owner: Any, name: str, place: int) -> Callable[[], None]:
        function, thread, default = getattr(owner, name), self._thread, self._driver.default_stream

        @functools.wraps(function)
        def call_and_note(*args: Any, **kwargs: Any) -> Any:
            try:
                stream = args[place] if len(args) > place else kwargs.get("stream", 0)
                thread.stream = stream_handle(stream) or default
            except Exception as fault:
                FAULTS.note("numba's streams", fault)
            return function(*args, **kwargs)

        setattr(owner, name, call_and_note)

        def unwrap_function() -> None:
            if getattr(owner, name, None) is call_and_note:  # else a later wrapper still calls it
                setattr(owner, name, function)

        return unwrap_function


def select_streams(places: Sequence[Stream]) -> Sequence[Stream]:
    """Return the streams on which work may run. `places` has the current streams of all frameworks.

    Duplicates are removed. The default stream is left out if the device has another stream, because an event on the
    default stream blocks other streams.
    """
    devices = {device for device, stream in places if stream > 1}
    return [place for place in dict.fromkeys(places) if place[1] > 1 or place[0] not in devices]


def make_stream_reader(module: ModuleType, driver: Any, numba: NumbaStreams) -> Current | None:
    if module.__name__ == "torch":
        return make_torch_reader(module)
    if module.__name__ == "cupy":
        return make_cupy_reader(module, lambda: bool(driver.find_context()))
    if module.__name__ == "numba.cuda":
        return numba.find_last_stream
    return None
