"""CUDA's driver: events, streams and contexts as the timer uses them, through `cuda.bindings.driver`.

Everything that touches cuda-python's driver module lies here. Nothing initialises CUDA or makes a context: before the
host has done so every call says that there is none. Calls return the driver's error as an integer, 0 for none, and
raise nothing: what goes wrong is the timer's to count.

A call into the driver may wait: for room in a launch queue that is full, or for host functions that are pending. Those
may be written in Python and wait for the interpreter's lock, so whoever kept it in such a call would wait for ever. All
calls let go of it, as torch's own records do; `mark`, the call on the service's threads, once for all that it asks. It
keeps the lock where the profile says so (`device: {gil: hold}`), which saves the wait for the lock where another thread
computes in Python meanwhile (`tests/bench/device.py` shows both).
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from instrument.recorder.recorder import native_driver_calls

T = TypeVar("T")

Reading = Callable[[int, int, int], tuple[int, int, int]]
"""Records an event on a stream and asks for it for so many ns at most: the driver's error, and the times before it was
recorded and after it was seen."""

CAPTURING = 1_000_000
"""In place of an error: the stream is being captured into a graph, and nothing was recorded."""

NOT_READY = 600

UNKNOWN = 999
NO_CONTEXT = 201
BAD_HANDLE = 400
LEGACY, PER_THREAD = 1, 2
"""Handles of the default stream by its other name, and of the calling thread's own default stream."""

CAPTURE_ERRORS = frozenset(range(900, 909))
"""Errors that say that a capture is under way somewhere, for which no device is given up."""

FATAL = frozenset({3, 4, 46, 214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, *range(800, 811), 999})
"""Errors after which a context tells nothing else: CUDA is not or no longer initialised, the context is gone, a kernel
has failed, the device is lost."""

_NON_BLOCKING = 1
_THREAD_LOCAL, _RELAXED = 1, 2

LIBRARY = "libcuda.so.1"


KNOWN_MAJORS = (12, 13)
WANTED = "cuda-bindings>=12.9.1,<14"


def why_absent() -> str:
    """Why there is no CUDA driver here, "" where there is one. Loads the driver's library; initialises nothing."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        return f"no CUDA driver: {error}"
    return ""


def misfit(bindings: str, driver: int) -> str:
    """What stands against these bindings with this driver and what to do, in one sentence; "" where they fit.

    `bindings` is a version, "" for none; `driver` the newest CUDA that it is for, 13010 for 13.1, 0 for not known.
    """
    if not bindings:
        return "cuda-bindings is not installed; install instrument-sdk[cuda]"
    major = int(bindings.partition(".")[0])
    if major not in KNOWN_MAJORS:
        return f"found cuda-bindings {bindings}, which is not known; install '{WANTED}'"
    if not driver or driver // 1000 >= major:
        return ""
    older = [known for known in KNOWN_MAJORS if known <= driver // 1000]
    cure = f"install 'cuda-bindings<{older[-1] + 1}'" if older else "install a newer driver"
    return f"the driver is for CUDA {_dotted(driver)} and older than cuda-bindings {bindings}; {cure}"


def found() -> dict[str, str]:
    """What device times are taken by here: versions of `driver`, `bindings` and `rocm`, "" for none, and the `problem`.

    That is a sentence, "" where all is well. Loads the driver's library; imports and initialises nothing.
    """
    torch = _installed("torch")
    facts = {"driver": "", "bindings": _installed("cuda-bindings"), "rocm": torch if "rocm" in torch else ""}
    problem = why_absent()
    if not problem:
        version = ctypes.c_int()
        ctypes.CDLL(LIBRARY).cuDriverGetVersion(ctypes.byref(version))
        facts["driver"] = _dotted(version.value)
        problem = misfit(facts["bindings"], version.value)
    return {**facts, "problem": "" if facts["rocm"] else problem}


def _installed(distribution: str) -> str:
    from importlib import metadata  # 10 ms that no service needs

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


class CudaDriver:
    """The driver through cuda-python. `holds_gil`: whether `mark` keeps the interpreter's lock.

    `default_stream` is what the bindings, and who calls CUDA by them, mean by stream 0.

    Raises `ImportError` where cuda-bindings is missing or of a version that is not known, `OSError` without a driver.
    """

    CAPTURING = CAPTURING
    NOT_READY = NOT_READY

    def __init__(self, *, holds_gil: bool = False) -> None:
        library = ctypes.CDLL(LIBRARY)
        # Bindings for a newer major version than the driver's warn at their first call; here it is told by `misfit`.
        before = os.environ.get("CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING")
        os.environ["CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING"] = "1"
        try:
            import cuda.bindings
            from cuda.bindings import driver
        except ModuleNotFoundError as error:
            raise ImportError(misfit("", 0)) from error
        finally:
            if before is None:
                del os.environ["CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING"]
        self._native_measure: Callable[[int, list[int]], list[tuple[int, float, float]]] | None = None
        self.version = str(cuda.bindings.__version__)
        unknown = misfit(self.version, 0)
        if unknown:
            raise ImportError(unknown)
        self._driver = driver
        self.holds_gil = holds_gil
        # As the bindings read it, once, when they are imported.
        per_thread = os.environ.get("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "0")
        self.default_stream = PER_THREAD if per_thread.strip().isdigit() and int(per_thread) else 0
        self.mark: Callable[[Any, int], int] = self._marker(library)
        # The bindings know one of the two alone, and raise where the driver is older than that.
        elapsed = _address(getattr(library, "cuEventElapsedTime_v2", library.cuEventElapsedTime))
        float_address = ctypes.POINTER(ctypes.c_float)
        self._elapsed = ctypes.CFUNCTYPE(ctypes.c_int, float_address, ctypes.c_void_p, ctypes.c_void_p)(elapsed)
        self._record, self._query = _address(library.cuEventRecord), _address(library.cuEventQuery)
        native = native_driver_calls()
        if native is not None:
            self._native_measure = functools.partial(native.measure, _address(library.cuEventQuery), elapsed)

    @functools.cached_property
    def misfit(self) -> str:
        """What does not fit, and what to do, in one sentence; "" where all is well."""
        error, version = self._ask(self._driver.cuDriverGetVersion)
        return misfit(self.version, 0 if error else version)

    def name(self, error: int) -> str:
        """The driver's word for an error."""
        try:
            return str(self._driver.CUresult(error).name)
        except ValueError:
            return f"error {error}"

    # ---------------------------------------------------------------- on a thread of the service

    def _marker(self, library: ctypes.CDLL) -> Callable[[Any, int], int]:
        """Records an event unless its stream is captured: the stream's number, or what stands against it below 0."""
        # Streams have numbers from CUDA 12.0 on.
        numbers = getattr(library, "cuStreamGetId", None)
        record, capturing = _address(library.cuEventRecord), _address(library.cuStreamIsCapturing)
        native = native_driver_calls()
        if native is not None:
            number_of = 0 if numbers is None else _address(numbers)
            return functools.partial(native.mark, record, capturing, number_of, not self.holds_gil)
        # Twice the work of the native one, and the lock, where it is let go of, is so in each call.
        function = ctypes.PYFUNCTYPE if self.holds_gil else ctypes.CFUNCTYPE
        is_capturing = function(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))(capturing)
        record_event = function(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(record)
        number_for = None
        if numbers is not None:
            long_address = ctypes.POINTER(ctypes.c_ulonglong)
            number_for = function(ctypes.c_int, ctypes.c_void_p, long_address)(_address(numbers))

        def mark(event: int, stream: int) -> int:
            status, number = ctypes.c_int(), ctypes.c_ulonglong()
            error = is_capturing(stream, status)
            if not error and status.value:
                return -CAPTURING
            if not error and number_for is not None and stream > LEGACY:
                error = number_for(stream, number)
            return -int(error or record_event(event, stream)) or number.value

        return mark

    def _ask(self, function: Callable[..., tuple[Any, ...]], *arguments: Any) -> tuple[int, Any]:
        """What a function of the bindings answers: the driver's error, and its value where there is one.

        The bindings raise where a newer driver has a code that they do not know.
        """
        try:
            error, *values = function(*arguments)
        except (KeyError, ValueError) as unknown:
            code = re.search(r"\d+", str(unknown))
            return int(code[0]) if code else UNKNOWN, None
        return int(error), values[0] if len(values) == 1 else values

    def current(self) -> int:
        """The context that is current on the calling thread, 0 where there is none or CUDA is not initialised."""
        error, context = self._ask(self._driver.cuCtxGetCurrent)
        return 0 if error else int(context)

    def current_device(self) -> int:
        """The index of the device of the current context, -1 without one."""
        error, device = self._ask(self._driver.cuCtxGetDevice)
        return -1 if error else int(device)

    def primary(self, device: int) -> int:
        """The primary context of a device where the host has one; 0 where it has none. Gives it back at once."""
        driver = self._driver
        error, handle = self._ask(driver.cuDeviceGet, device)
        if error:
            return 0
        error, state = self._ask(driver.cuDevicePrimaryCtxGetState, handle)
        if error or not state[1]:
            return 0
        error, context = self._ask(driver.cuDevicePrimaryCtxRetain, handle)
        if error:
            return 0
        self._ask(driver.cuDevicePrimaryCtxRelease, handle)
        return int(context)

    def capture(self, stream: int) -> int:
        """`CAPTURING` where a stream is being captured into a graph, else the driver's error, 0 for none."""
        error, status = self._ask(self._driver.cuStreamIsCapturing, stream)
        return error or (CAPTURING if status else 0)

    def device_of(self, stream: int) -> int:
        """The index of the device that a stream belongs to, which for the default streams is the current one; or -1."""
        if stream <= PER_THREAD:
            return self.current_device()
        error, context = self._ask(self._driver.cuStreamGetCtx, stream)
        if error or self.push(int(context)):
            return -1
        try:
            return self.current_device()
        finally:
            self.pop()

    def relaxed(self, make: Callable[[], T]) -> T:
        """Run what makes things of the driver on a thread of the host's, so that it ends no capture of any thread."""
        driver = self._driver
        exchange = driver.cuThreadExchangeStreamCaptureMode
        error, mode = self._ask(exchange, driver.CUstreamCaptureMode(_RELAXED))
        try:
            return make()
        finally:
            if not error:
                self._ask(exchange, mode)

    def push(self, context: int) -> int:
        """Make a context current on the calling thread until `pop`."""
        return self._ask(self._driver.cuCtxPushCurrent, context)[0]

    def pop(self) -> None:
        """Give the calling thread back what it had."""
        self._ask(self._driver.cuCtxPopCurrent)

    # ---------------------------------------------------------------- on the resolver's thread

    def bind(self, context: int) -> int:
        """Make a context current on the calling thread, for good, and let the thread disturb no capture.

        Without that a query from here would end what another thread captures in the mode `global`, torch's default.
        """
        driver = self._driver
        error, _ = self._ask(driver.cuCtxSetCurrent, context)
        if not error:
            mode = driver.CUstreamCaptureMode(_THREAD_LOCAL)
            error, _ = self._ask(driver.cuThreadExchangeStreamCaptureMode, mode)
        return error

    def new_event(self) -> tuple[int, Any]:
        """An event that takes the time, in the current context."""
        return self._ask(self._driver.cuEventCreate, 0)

    def handle(self, event: Any) -> int:
        """An event as `mark` takes it."""
        return int(event)

    def destroy_event(self, event: Any) -> None:
        self._ask(self._driver.cuEventDestroy, event)

    def new_stream(self) -> tuple[int, int]:
        """A stream that waits for no other, of the highest priority there is."""
        error, priorities = self._ask(self._driver.cuCtxGetStreamPriorityRange)
        if error:
            return error, 0
        error, stream = self._ask(self._driver.cuStreamCreateWithPriority, _NON_BLOCKING, priorities[1])
        return error, 0 if error else int(stream)

    def destroy_stream(self, stream: int) -> None:
        self._ask(self._driver.cuStreamDestroy, stream)

    def query(self, event: Any) -> int:
        """0 where the event has happened, `NOT_READY` where it has not."""
        return self._ask(self._driver.cuEventQuery, event)[0]

    def reading(self, recorder: Any, now: Callable[[], int]) -> Reading | None:
        """Reads the device's clock against `now`; None where that is not the clock of a recorder in C."""
        read = getattr(recorder, "read_event", None)
        return None if read is None or now != recorder.now_ns else functools.partial(read, self._record, self._query)

    def measure(self, anchor: Any, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[int, int, int]]:
        """For each pair of events, up to the first whose end has not happened: error, its length and its begin in ns.

        The begin is told from the anchor on, 0 where that is None.
        """
        if self._native_measure is not None:
            events = [int(event) for pair in pairs for event in pair]
            found = self._native_measure(0 if anchor is None else int(anchor), events)
            return [(error, round(device_ms * 1e6), round(offset_ms * 1e6)) for error, device_ms, offset_ms in found]
        return measured_singly(self, anchor, pairs)

    def elapsed_ns(self, first: Any, second: Any) -> tuple[int, int]:
        """Device time between two events that have happened."""
        ms = ctypes.c_float()
        error = self._elapsed(ms, int(first), int(second))
        return error, round(ms.value * 1e6)


def measured_singly(driver: Any, anchor: Any, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[int, int, int]]:
    """`CudaDriver.measure` by the driver's `query` and `elapsed_ns`."""
    answers = []
    for begin, end in pairs:
        error, device_ns, offset_ns = driver.query(end), 0, 0
        if error == NOT_READY:
            break
        if not error:
            error, device_ns = driver.elapsed_ns(begin, end)
        if not error and anchor is not None:
            error, offset_ns = driver.elapsed_ns(anchor, begin)
        answers.append((error, device_ns, offset_ns))
    return answers


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
