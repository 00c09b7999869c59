"""The gauges of this process, and the thread that reads them where no agent does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from instrument.device.gauge_sources import GaugeSources
from instrument.profile.model import Device
from instrument.recording.gauge_ring import Readings
from instrument.recording.slot_ring import FindRoom
from instrument.recording.spans import Gpu, Sample
from instrument.runtime.threads import Thread
from instrument.runtime.unpatched import Event, Lock, local

STOP_S = 2.0
"""The longest wait for the thread at the end, for it may hang in the driver."""

FORK_WAIT_S = 1.0
"""The longest wait of a fork for the thread to leave NVML and torch's allocator, with locks that a child inherits."""

THREAD_NAME = "instrument-nvml"

Keep = Callable[[Sequence[Sample], Sequence[Gpu]], object]

_running: Gauges | None = None
_forking = local()
_hooked = False


class Gauges:
    """Has the gauges of GPUs and host read as the profile's `device` says.

    `keep` gets each reading on the thread that makes it. `find_room` returns the place of readings in the recording, if
    this process has one. `start`, `stop` and the readers may be called from any thread.
    """

    def __init__(self, settings: Device, keep: Keep | None = None, find_room: FindRoom | None = None) -> None:
        self._settings = settings
        self._is_spoilt = False
        self._keep = keep
        self._find_room = find_room
        self._begin()

    def _begin(self) -> None:
        self._halt = Event()
        self._thread: Thread | None = None
        self.is_reading = False
        """True while this process reads them itself."""
        self._readings = Readings(self._find_room)
        self._sources = GaugeSources(self._settings, self._take)
        self._outside: tuple[Sequence[Gpu], Sequence[str]] = (), ()
        self._before_ns = 0
        self.thread_ns = 0
        """Processor time of the threads so far."""

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Find the gauges that can be read, and start the thread if there are any."""
        self.prepare()
        self.begin()

    def prepare(self) -> None:
        """Find the gauges that can be read."""
        self._sources.prepare(is_spoilt=self._is_spoilt)

    @property
    def are_wanted(self) -> bool:
        """True where any gauge can be read."""
        return self._sources.are_there

    def wanted(self) -> Device:
        """Return the settings without the gauges that cannot be read."""
        return self._sources.wanted()

    def begin(self) -> None:
        """Start the thread, if any gauge can be read."""
        if not self.are_wanted:
            return
        self._watch_forks()
        self._halt, self.is_reading = Event(), True
        self._before_ns = self.thread_ns
        self._thread = Thread(self._run, THREAD_NAME, lambda: self.is_reading)
        self._thread.start()

    def stop(self, limit_s: float = STOP_S) -> None:
        """Make a last reading and end the thread. Returns after `limit_s` and `STOP_S`, even if the driver hangs."""
        global _running
        thread, self._thread = self._thread, None
        if _running is self:
            _running = None
        if thread is None or not thread.is_alive():  # of a parent, and its lock of nobody, in a forked child
            return
        self.is_reading = False
        self._halt.set()
        limit_s = min(limit_s, STOP_S)
        thread.join(limit_s)
        if thread.is_alive():
            _running = self
            self._sources.add_reason(
                f"the thread was still inside of the driver {limit_s:.2g} s after the end; it was left"
            )

    def after_fork_in_child(self, *, begins: bool = True) -> None:
        """Forget the parent's readings and begin anew, or `prepare` alone.

        What the parent opened is neither used nor closed here: the driver would close it for the parent, too.
        """
        held = getattr(_forking, "held", None) is self
        self._is_spoilt = self._is_spoilt or (self._thread is not None and not held)
        self._begin()
        self.prepare()
        if begins:
            self.begin()

    @property
    def inside(self) -> Lock:
        """The lock that the thread has while it is in NVML or torch's allocator."""
        return self._sources.inside

    def _watch_forks(self) -> None:
        global _running
        _hook_forks()
        _running = self

    def _run(self) -> None:
        sources, halt, ending = self._sources, self._halt, False
        sources.open()
        while not ending and (wait_ns := sources.wait_ns()) is not None:
            ending = halt.wait(wait_ns / 1e9)
            sources.read(is_last=ending)
            self.thread_ns = self._before_ns + time.thread_time_ns()
        self.is_reading = False
        sources.close()
        self.thread_ns = self._before_ns + time.thread_time_ns()

    # ------------------------------------------------------------ reading

    def torch_memory(self, *, rarely: bool) -> list[tuple[int, dict[str, float | None]]]:
        """Read torch's allocator, where the agent reads all else. For one thread."""
        self._watch_forks()
        return self._sources.torch_memory(rarely=rarely)

    def _take(self, samples: Sequence[Sample]) -> None:
        self._readings.add(samples)
        if self._keep is not None:
            self._keep(samples, self.gpus())

    def note_outside(self, gpus: Sequence[Gpu], notes: Sequence[str]) -> None:
        """Note the GPUs that the agent reads, and its sentences on those that it cannot."""
        self._outside = tuple(gpus), tuple(notes)

    def samples(self, first_ns: int, last_ns: int) -> list[Sample]:
        """Return the newest samples from the first time on and before the last, by time, device and name."""
        return self._readings.samples(first_ns, last_ns)

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs that are read."""
        return self._sources.gpus() or tuple(self._outside[0])

    def notes(self) -> list[str]:
        """Return sentences on the gauges that could not be read."""
        return list(dict.fromkeys([*self._sources.notes(), *self._outside[1]]))

    def losses(self) -> dict[str, int]:
        """Count the samples that were not kept, by reason."""
        overwritten = self._readings.overwritten
        return {"samples of gauges overwritten by newer ones": overwritten} if overwritten else {}


def _hook_forks() -> None:
    global _hooked
    if not _hooked:
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent)
        _hooked = True


def _before_fork() -> None:
    """Wait for the thread to leave NVML and torch, whose locks would never be released in the child."""
    running = _running
    _forking.held = running if running is not None and running.inside.acquire(timeout=FORK_WAIT_S) else None


def _after_fork_in_parent() -> None:
    held, _forking.held = _forking.held, None
    if held is not None:
        held.inside.release()
