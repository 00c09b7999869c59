"""Times the spans of one session on devices. The timer starts when the service imports a library that uses a device."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from instrument.device.nvtx import Ranges
from instrument.recorder.recorder import RECORDER
from instrument.recording.memory import LABELS, IntervalRing
from instrument.recording.spans import NO_DEVICE_TIME
from instrument.runtime import imports
from instrument.runtime.cheap_start import LazyModule

if TYPE_CHECKING:
    from instrument.device import cuda
    from instrument.device.timer import Timer
    from instrument.device.torch_events import Driver
else:
    cuda = LazyModule("instrument.device.cuda")

MODULES = ("torch", "cupy", "numba.cuda", "cuda.bindings.driver")
"""The modules through which a service uses CUDA. The import of one starts the timer. The first three have a current
stream."""

LOOK_S = 0.002
"""The seconds between two polls of a thread that waits for device times."""

raw_clock = partial(time.clock_gettime_ns, time.CLOCK_MONOTONIC_RAW)


class Timing:
    """Switches device times on and off for one session.

    `reason` is one line with the reason why device time is missing or costs more, else "".
    """

    _numba: cuda.NumbaStreams
    """The last stream of each thread with numba. Set together with the timer."""

    def __init__(self, memory_bytes: int, ranges: Ranges, *, holds_gil: bool) -> None:
        self._memory_bytes = memory_bytes
        self._ranges = ranges
        self._holds_gil = holds_gil
        self._undo_imports: Callable[[], None] | None = None
        self._inherited: list[Timer] = []
        self._hosts: list[ModuleType] = []
        self._undos: list[Callable[[], None]] = []
        self.intervals = self._new_intervals()
        self.timer: Timer | None = None
        self.reason = ""

    def _new_intervals(self) -> IntervalRing:
        return IntervalRing(self._memory_bytes, partial(RECORDER.room_for, "intervals"))

    def _new_timer(self, driver: Driver) -> Timer:
        from instrument.device.timer import Timer

        return Timer(driver, self.intervals, RECORDER, RECORDER.now_ns, raw_clock)

    def install(self) -> Callable[[], None]:
        """Time spans from now on, or once a library is imported that uses a device. Return the function that undoes
        this."""
        self._undo_imports = imports.install(MODULES.__contains__, self.begin_for_framework)
        for name in MODULES:
            module = sys.modules.get(name)
            if isinstance(module, ModuleType) and not imports.is_lazy(module):
                self.begin_for_framework(module)
        return self.uninstall

    def begin_for_framework(self, module: ModuleType) -> None:
        """Read an imported framework's current streams from now on, if it can use a device."""
        version = getattr(module, "version", None)
        if module.__name__ == "torch" and not (getattr(version, "cuda", None) or getattr(version, "hip", None)):
            self.reason = self.reason or f"{NO_DEVICE_TIME}this torch is built without a device"
            return
        self._hosts.append(module)
        hosts = [module]
        if self.timer is None:
            driver = self._find_driver(module)
            if driver is None:
                return
            hosts = self._hosts  # earlier ones may have had no driver
            self.timer = self._new_timer(driver)
            self._numba = cuda.NumbaStreams(driver.default_stream)
        for host in hosts:
            if host.__name__ == "numba.cuda":
                self._undos.append(self._numba.install(host))
            source = cuda.find_current_stream_of_module(host, self.timer.driver, self._numba)
            if source is not None:
                name = host.__name__.partition(".")[0]
                self.timer.frameworks[name] = source
                # A span may name no framework; then the first source counts: torch, if it is imported.
                self.timer.sources.insert(0 if name == "torch" else len(self.timer.sources), source)
        self._ranges.set_device_timer(self.timer.begin)

    def _find_driver(self, module: ModuleType) -> Driver | None:
        """Return a driver that uses cuda-python or else torch's own events, None without either. Sets `reason`."""
        from instrument.device.torch_events import TorchDriver

        is_torch = module.__name__ == "torch"
        is_rocm = is_torch and not getattr(module.version, "cuda", None)
        absent = "" if is_rocm else cuda.why_absent()
        self.reason = f"{NO_DEVICE_TIME}{absent}" if absent else ""
        if absent:
            return None
        try:
            if not is_rocm:
                return cuda.CudaDriver(holds_gil=self._holds_gil)
        except (ImportError, OSError) as error:
            if not is_torch:
                self.reason = f"{NO_DEVICE_TIME}{error}"
                return None
            self.reason = f"device times are taken by torch's own events, at a higher cost: {error}"
        try:
            return TorchDriver(module)
        except (ImportError, OSError) as error:
            self.reason = f"{NO_DEVICE_TIME}{error}"
            return None

    def uninstall(self, limit_s: float = math.inf) -> None:
        """Stop timing: resolve the pairs in flight within `limit_s`, and release all events. Idempotent."""
        if self._undo_imports is not None:
            self._undo_imports()
            self._undo_imports = None
        self._ranges.set_device_timer(None)
        while self._undos:
            self._undos.pop()()
        if self.timer is not None:
            self.timer.resolver.stop(limit_s)

    def after_fork_in_child(self) -> None:
        """Begin again without CUDA, which a forked child cannot use. The parent's objects are not released."""
        self.intervals = self._new_intervals()
        if self.timer is not None:
            before = self.timer
            self._inherited.append(before)
            before.resolver.leave_to_parent()
            self.timer = self._new_timer(before.driver)
            self.timer.sources.extend(before.sources)
            self.timer.frameworks.update(before.frameworks)
            if self._undo_imports is not None:
                self._ranges.set_device_timer(self.timer.begin)

    def is_settled(self, at_ns: int) -> bool:
        """Return True if all spans that ended before `at_ns` have their device times."""
        return self.settled_ns() >= at_ns

    def settled_ns(self) -> int:
        """Return the time up to which device times are settled. Each open span makes the call longer."""
        return RECORDER.now_ns() if self.timer is None else self.timer.resolver.settled_ns()

    def await_settled(self, at_ns: int, end_s: float) -> None:
        """Wait until `at_ns` is settled, or `time.monotonic()` is `end_s`. Write the settled time into the
        recording."""
        resolver = None if self.timer is None else self.timer.resolver
        while resolver is not None and resolver.is_running and time.monotonic() < end_s:
            settled_ns = resolver.settled_ns()
            if settled_ns >= at_ns:
                self.intervals.publish_settled(settled_ns)
                return
            resolver.wake()
            time.sleep(LOOK_S)

    @property
    def pair_ns(self) -> float:
        """The ns that recording a pair takes on its thread."""
        return 0.0 if self.timer is None else self.timer.resolver.pair_ns

    def cost_ns(self) -> tuple[float, int]:
        """Return the ns that pairs took on threads of the service, and on the resolver's thread."""
        if self.timer is None:
            return 0.0, 0
        resolver = self.timer.resolver
        return resolver.pairs * resolver.pair_ns, resolver.thread_ns

    def losses(self) -> Mapping[str, int]:
        """Return the number of spans without the device time that they asked for, by reason."""
        counts = self.timer.resolver.counts if self.timer is not None else {}
        return {
            "device times not taken while a graph was captured": counts.get("captured", 0),
            "device times dropped": counts.get("dropped", 0),
            "device intervals overwritten by newer ones": self.intervals.overwritten,
        }

    def notes(self) -> list[str]:
        """Return sentences on missing device times, none if no span asked for device time."""
        notes = [self.reason] if self.reason and any(site.device for site in RECORDER.paths().sites) else []
        if self.timer is not None:
            resolver, misfit = self.timer.resolver, self.timer.driver.misfit
            notes += [f"device time: {misfit}"] if misfit else []
            notes += resolver.faults.values()
            notes += [f"{name}: {count} times" for name, count in resolver.counts.items() if name not in LABELS]
        return notes
