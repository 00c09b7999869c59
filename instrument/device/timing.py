"""Starts and stops device timing for a session, and shows spans as NVTX ranges in tools such as Nsight Systems.

Timing starts when the service imports a library that uses a device. Ranges are opened only if the variable
NVTX_INJECTION64_PATH attaches a tool. A generator has a range for each step, and copies have no range.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.memory import LABELS, IntervalRing
from instrument.recording.spans import NO_DEVICE_TIME, Site
from instrument.runtime import imports
from instrument.runtime.lazy_imports import LazyModule

if TYPE_CHECKING:
    from instrument.device import cuda
    from instrument.device.timer import Timer
    from instrument.device.torch_events import Driver
else:
    cuda = LazyModule("instrument.device.cuda")

MODULES = ("torch", "cupy", "numba.cuda", "cuda.bindings.driver")
"""The modules through which services use CUDA. Their import starts the timer."""

LOOK_S = 0.002
"""The seconds between two polls while a thread waits for device times."""

raw_clock = partial(time.clock_gettime_ns, time.CLOCK_MONOTONIC_RAW)


class Timing:
    """Switches device times on and off for one session.

    `reason` is one line that explains why device times are missing, or why they cost more than usual.
    """

    _numba: cuda.NumbaStreams
    """The reader of the last stream that each thread used in numba."""

    def __init__(self, memory_bytes: int, ranges: Ranges, *, holds_gil: bool) -> None:
        self._ranges = ranges
        self._holds_gil = holds_gil
        self._undo_imports: Callable[[], None] | None = None
        self._inherited: list[Timer] = []
        self._hosts: list[ModuleType] = []
        self._undos: list[Callable[[], None]] = []
        self.intervals = IntervalRing(memory_bytes, partial(RECORDER.find_part_memory, "intervals"))
        self.timer: Timer | None = None
        self.reason = ""

    def _new_timer(self, driver: Driver) -> Timer:
        from instrument.device.timer import Timer

        return Timer(driver, self.intervals, RECORDER, RECORDER.now_ns, raw_clock)

    def install(self) -> Callable[[], None]:
        """Time spans from now on, or from the import of a library that uses a device. Return the function that undoes
        this."""
        self._undo_imports = imports.install_import_hook(MODULES.__contains__, self.time_framework_streams)
        for name in MODULES:
            module = sys.modules.get(name)
            if isinstance(module, ModuleType) and not imports.is_unloaded_lazy_module(module):
                self.time_framework_streams(module)
        return self.uninstall

    def time_framework_streams(self, module: ModuleType) -> None:
        version = getattr(module, "version", None)
        if module.__name__ == "torch" and not (getattr(version, "cuda", None) or getattr(version, "hip", None)):
            self.reason = self.reason or f"{NO_DEVICE_TIME}this torch is built without a device"
            return
        self._hosts.append(module)
        hosts = [module]
        if self.timer is None:
            driver = self._make_driver(module)
            if driver is None:
                return
            hosts = self._hosts  # earlier ones may have had no driver
            self.timer = self._new_timer(driver)
            self._numba = cuda.NumbaStreams(driver)
        for host in hosts:
            if host.__name__ == "numba.cuda":
                self._undos.append(self._numba.install(host))
            source = cuda.make_stream_reader(host, self.timer.driver, self._numba)
            if source is not None:
                name = host.__name__.partition(".")[0]
                self.timer.frameworks[name] = source
                # A span may name no framework; then the first source counts: torch, if it is imported.
                self.timer.sources.insert(0 if name == "torch" else len(self.timer.sources), source)
        self._ranges.set_device_timer(self.timer.begin)

    def _make_driver(self, module: ModuleType) -> Driver | None:
        from instrument.device.torch_events import TorchDriver

        is_torch = module.__name__ == "torch"
        is_rocm = is_torch and not getattr(module.version, "cuda", None)
        absent = "" if is_rocm else cuda.explain_missing_driver()
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
        """Stop timing. Wait up to `limit_s` seconds for the pairs in flight, and release all events."""
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
        if self.timer is not None:
            before = self.timer
            self._inherited.append(before)
            before.resolver.abandon_parent_contexts()
            self.timer = self._new_timer(before.driver)
            self.timer.sources.extend(before.sources)
            self.timer.frameworks.update(before.frameworks)
            if self._undo_imports is not None:
                self._ranges.set_device_timer(self.timer.begin)

    def has_device_times_until(self, at_ns: int) -> bool:
        return self.settled_ns() >= at_ns

    def settled_ns(self) -> int:
        """Return the time in ns up to which device times are complete. The call takes longer with more open spans."""
        return RECORDER.now_ns() if self.timer is None else self.timer.resolver.settled_ns()

    def await_device_times(self, at_ns: int, end_s: float) -> None:
        """Wait for the device times of spans that ended before `at_ns`. Stop waiting when `time.monotonic()` reaches
        `end_s`."""
        resolver = None if self.timer is None else self.timer.resolver
        while resolver is not None and resolver.is_running and time.monotonic() < end_s:
            settled_ns = resolver.settled_ns()
            if settled_ns >= at_ns:
                self.intervals.publish_settled_time(settled_ns)
                return
            resolver.wake()
            time.sleep(LOOK_S)

    @property
    def pair_cost_ns(self) -> float:
        """The time in ns that recording a pair of events takes on a thread of the service."""
        return 0.0 if self.timer is None else self.timer.resolver.pair_ns

    def cost_ns(self) -> tuple[float, int]:
        """Return the time in ns that pairs took on threads of the service, and the time on the resolver's thread."""
        if self.timer is None:
            return 0.0, 0
        resolver = self.timer.resolver
        return resolver.pairs * resolver.pair_ns, resolver.thread_ns

    def losses(self) -> Mapping[str, int]:
        counts = self.timer.resolver.counts if self.timer is not None else {}
        return {
            "device times not taken while a graph was captured": counts.get("captured", 0),
            "device times dropped": counts.get("dropped", 0),
            "device intervals overwritten by newer ones": self.intervals.overwritten_count,
        }

    def notes(self) -> list[str]:
        notes = [self.reason] if self.reason and any(site.device for site in RECORDER.paths().sites) else []
        if self.timer is not None:
            resolver, misfit = self.timer.resolver, self.timer.driver.misfit
            notes += [f"device time: {misfit}"] if misfit else []
            notes += resolver.faults.values()
            notes += [f"{name}: {count} times" for name, count in resolver.counts.items() if name not in LABELS]
        return notes


# ---------------------------------------------------------------- NVTX

DOMAIN = "instrument"
VARIABLE = "NVTX_INJECTION64_PATH"

KNOWN_SITES = 4_096
"""The maximum number of sites with their own NVTX names. Further sites share a name per kind."""

Begin = Callable[[Any, Any, int], Any]
"""A function of (site, attributes, span id) that begins to time a span. It returns a pair or None."""


class Ranges:
    """Opens an NVTX range for each span of a recorder, and calls the device timer.

    `reason` explains why there are no ranges although an NVTX tool is set.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._domain: Any = None
        self._events: dict[Site, Any] = {}
        self._timed: Begin | None = None
        self.forks = 0
        self.reason = ""

    def install(self) -> Callable[[], None]:
        if not os.environ.get(VARIABLE):
            return _do_nothing
        try:
            import nvtx

            domain = nvtx.get_domain(DOMAIN)
        except Exception as error:
            self.reason = (
                f"no NVTX ranges, though {VARIABLE} names a tool: {type(error).__name__}: {error}; "
                "install instrument-sdk[nvtx]"
            )
            return _do_nothing
        if type(domain).__name__ == "DummyDomain":  # the tool could not be loaded
            return _do_nothing
        self._domain = domain
        self._timed = self._recorder.begin_device
        self._recorder.begin_device = self.begin
        self._recorder.watches_all = True
        return self.uninstall

    def uninstall(self) -> None:
        if self._domain is not None:
            self._domain = None
            self._recorder.watches_all = False
            self._recorder.begin_device = self._timed

    def set_device_timer(self, begin: Begin | None) -> None:
        self._timed = begin
        if self._domain is None:
            self._recorder.begin_device = begin

    def after_fork_in_child(self) -> None:
        self.forks += 1

    def begin(self, site: Site | None, attributes: Any, span_id: int) -> Any:
        pair = None
        if self._timed is not None and (site is None or site.device):
            pair = self._timed(site, attributes, span_id)
        domain = self._domain
        if site is None or domain is None:
            return pair
        event = self._events.get(site)
        return Range(self, domain, event if event is not None else self._event_attributes(domain, site), pair)

    def _event_attributes(self, domain: Any, site: Site) -> Any:
        if len(self._events) >= KNOWN_SITES:
            return domain.get_event_attributes(f"(more sites of kind {site.kind})", category=site.kind)
        name = site.instance if site.kind == "layer" and site.instance else site.name
        clean = name.encode(errors="backslashreplace").decode()
        event = self._events[site] = domain.get_event_attributes(clean, category=site.kind)
        return event


class Range:
    """The NVTX range of an open span, with the span's pair of events on a device."""

    __slots__ = ("_domain", "_event_attributes", "_forks", "_id", "_pair", "_ranges")

    def __init__(self, ranges: Ranges, domain: Any, event: Any, pair: Any) -> None:
        self._ranges = ranges
        self._forks = ranges.forks
        self._domain = domain
        self._event_attributes = event
        self._pair = pair
        self._id: int | None = domain.start_range(event)

    def _end_range(self) -> None:
        number, self._id = self._id, None
        if number is not None and self._forks == self._ranges.forks:
            self._domain.end_range(number)

    def pause(self) -> None:
        self._end_range()
        if self._pair is not None:
            self._pair.pause()

    def resume(self) -> None:
        if self._id is None and self._forks == self._ranges.forks:
            self._id = self._domain.start_range(self._event_attributes)
        if self._pair is not None:
            self._pair.resume()

    def end(self, ring: Any, index: int, span_id: int, start_ns: int, end_ns: int) -> None:
        self._end_range()
        if self._pair is not None:
            self._pair.end(ring, index, span_id, start_ns, end_ns)

    def cancel(self) -> None:
        self._end_range()
        if self._pair is not None:
            self._pair.cancel()


def _do_nothing() -> None: ...
