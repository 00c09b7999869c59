"""Cards that device times are tested on: a real one, and the fake driver's, by the same few calls."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any, Protocol

from driver import FakeDriver

from instrument.device import cuda as ours

MS = 10**6


def driver() -> Any:
    """cuda-python's driver module."""
    from cuda.bindings import driver as found

    return found


def value(result: tuple[Any, ...]) -> Any:
    """Return the value of a call of cuda.bindings after checking its status."""
    assert int(result[0]) == 0, result
    return result[1] if len(result) == 2 else result[1:]


class Card(Protocol):
    """A card in real time, as torch uses it. `cuda` is `torch.cuda`, `call_host` runs a function when a stream comes
    to it."""

    cuda: Any

    def spin(self, ns: int) -> None: ...
    def hold(self, stream: Any) -> Callable[[], int]: ...
    def call_host(self, stream: Any, function: Any) -> None: ...


class RealCard:
    """A card that torch finds. A spin takes roughly the asked time, because clocks ramp up."""

    def __init__(self, torch: Any) -> None:
        self.cuda = torch.cuda
        torch.zeros(1, device="cuda").add_(1).item()
        self._rate = 1.0
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for cycles in (10**8, 3 * 10**8):  # the first one warms up
            begin.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
            self._rate = cycles / (begin.elapsed_time(end) * MS)
        self._driver = driver()
        self._library = ctypes.CDLL(ours.LIBRARY)
        page = value(self._driver.cuMemHostAlloc(64, 2))  # mapped
        self._word_at = int(value(self._driver.cuMemHostGetDevicePointer(page, 0)))
        self._word = ctypes.c_uint32.from_address(int(page))

    def spin(self, ns: int) -> None:
        """A kernel on the current stream."""
        self.cuda._sleep(int(self._rate * ns))

    def hold(self, stream: Any) -> Callable[[], int]:
        """Hold a stream until a call of the returned function, which returns a time before the release."""
        number = self._word.value + 1
        # GEQ: the device may come to it after the host has let go of the next one.
        value(self._driver.cuStreamWaitValue32(stream.cuda_stream, self._word_at, number, 0))

        def let_go() -> int:
            held_ns = time.monotonic_ns()
            self._word.value = number
            return held_ns

        return let_go

    def call_host(self, stream: Any, function: Any) -> None:
        """Have a ctypes function called; lets go of the interpreter's lock meanwhile, as cupy does."""
        assert self._library.cuLaunchHostFunc(ctypes.c_void_p(stream.cuda_stream), function, None) == 0


class FakeCard:
    """The fake driver's, with a torch on it."""

    def __init__(self, fake: FakeDriver, torch: Any) -> None:
        self.fake = fake
        self.cuda = torch.cuda
        self._work = torch.work
        torch.work(0)

    def spin(self, ns: int) -> None:
        """A kernel on the current stream."""
        self._work(ns)

    def hold(self, stream: Any) -> Callable[[], int]:
        """Hold a stream for 5 ms and until the returned function is called, which returns a time of the hold."""
        until_ns = self.fake.launch(stream.cuda_stream, 5 * MS)

        def let_go() -> int:
            while time.monotonic_ns() < until_ns:
                time.sleep(0.0005)
            return until_ns - 1

        return let_go

    def call_host(self, stream: Any, function: Any) -> None:
        """Have a ctypes function called; lets go of the interpreter's lock meanwhile, as cupy does."""
        assert self.fake.library.cuLaunchHostFunc(ctypes.c_void_p(stream.cuda_stream), function, None) == 0
