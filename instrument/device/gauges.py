"""The thread that reads gauges, what it read, and why it could not."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from instrument.device import nvml
from instrument.device.host import Host
from instrument.device.nvml import Closed, Nvml, NvmlError
from instrument.device.torch_memory import TorchMemory
from instrument.profile.model import AUTO_NS, Device
from instrument.recording.spans import HOST, Gpu, Sample
from instrument.runtime.faults import FAULTS
from instrument.runtime.threads import Thread
from instrument.runtime.unpatched import Event, Lock, local

EVERY_NS = 10**9
"""How often is read what the profile leaves to us."""

RARELY_NS = 10 * 10**9
"""How often at most is asked what is dear or changes slowly: the list of a GPU's processes took 4.5 ms where it was
measured, and a loop that read it every 25 ms held up the threads that launched work (MangoHud 2104)."""

SHORTEST_NS = 100 * 10**6
"""How old the newest reading of a share or a rate must be for one more at the end."""

KEPT_ROWS = 8_192
"""Readings of one device, or of the host, that are kept: an hour with one GPU read every second, 7 MB."""

STOP_S = 2.0
"""The longest that the end waits for the thread, which may hang in the driver."""

FORK_WAIT_S = 1.0
"""The longest that a fork waits until the thread is outside of NVML and of torch's allocator, whose locks the child
would inherit."""

SPOILT = "a fork came while it was in use; this child does not read GPUs"

REOPENED_AT_MOST = 5

THREAD_NAME = "instrument-nvml"

Row = tuple[int, int, tuple[str, ...], tuple[float | None, ...]]
"""Device, time, names of the gauges, values."""

Keep = Callable[[Sequence[Sample], Sequence[Gpu]], object]

_running: Gauges | None = None
_forking = local()
_hooked = False


class Gauges:
    """Reads the gauges of GPUs and host as the profile's `device` asks for it.

    `keep` is given each reading on the thread that makes it. `start`, `stop` and what reads may be called from any
    thread.
    """

    def __init__(self, settings: Device, keep: Keep | None = None) -> None:
        self._settings = settings
        self._spoilt = False
        self._keep = keep
        self._begin()

    def _begin(self) -> None:
        self._lock = Lock()
        self._inside = Lock()
        self._halt = Event()
        self._thread: Thread | None = None
        self._is_reading = False
        self._rows: deque[Row] = deque()
        self._shapes: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._overwritten = self._reopened = 0
        self._reasons: list[str] = []
        self._nvml: Nvml | None = None
        self._host: Host | None = None
        self._torch = TorchMemory()
        self._nvml_ns = self._host_ns = EVERY_NS
        self.thread_ns = 0
        """Processor time of the thread so far."""

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Find what there is to read, and start the thread if there is anything."""
        self.prepare()
        self.begin()

    def prepare(self) -> None:
        """Find what there is to read."""
        nvml_ns, host_ns = self._settings.nvml_ns, self._settings.host_ns
        if nvml_ns is not None:
            problem = SPOILT if self._spoilt else nvml.missing()
            if not problem:
                self._nvml, self._nvml_ns = Nvml(), nvml_ns or EVERY_NS
            elif nvml_ns != AUTO_NS or problem != nvml.NO_DRIVER:
                self._reasons.append(problem)
        if host_ns is not None and (host_ns != AUTO_NS or self._nvml is not None):
            self._host, self._host_ns = Host(), host_ns or self._nvml_ns

    @property
    def are_wanted(self) -> bool:
        """Whether anything was found to read."""
        return self._nvml is not None or self._host is not None

    def begin(self) -> None:
        """Start the thread, if anything was found to read."""
        global _running
        if not self.are_wanted:
            return
        _hook_forks()
        _running, self._is_reading = self, True
        self._thread = Thread(self._run, THREAD_NAME, lambda: self._is_reading)
        self._thread.start()

    def stop(self) -> None:
        """Make a last reading and end the thread; returns after `STOP_S` at the latest, also when the driver hangs."""
        global _running
        thread, self._thread = self._thread, None
        if thread is None or not thread.is_alive():  # of a parent, and its lock of nobody, in a forked child
            return
        self._is_reading = False
        self._halt.set()
        thread.join(STOP_S)
        if thread.is_alive():
            self._reasons.append(f"the thread was still inside of the driver {STOP_S:g} s after the end; it was left")
        if _running is self:
            _running = None

    def after_fork_in_child(self, *, begins: bool = True) -> None:
        """Forget what the parent read and begin anew, or `prepare` alone.

        What the parent opened is never used here, and never closed: the driver would close it for the parent, too.
        """
        held = getattr(_forking, "held", None) is self
        self._spoilt = self._spoilt or (self._thread is not None and not held)
        self._begin()
        self.prepare()
        if begins:
            self.begin()

    def _run(self) -> None:
        gpus, host, opened = self._nvml, self._host, False
        sources: dict[str, tuple[Callable[[int, bool], bool], int, int]] = {}
        if gpus is not None:
            self._guarded(partial(self._close, gpus))  # of a run that died
            opened = self._guarded(partial(self._open, gpus))
            if opened:
                sources["nvml"] = partial(self._read_gpus, gpus), self._nvml_ns, SHORTEST_NS
        if host is not None and (opened or self._settings.host_ns != AUTO_NS):
            sources["host"] = partial(self._read_host, host), self._host_ns, SHORTEST_NS
            sources["torch"] = self._read_torch, self._host_ns, 0
        now_ns = time.monotonic_ns()
        due_ns = {
            name: now_ns + (interval_ns if name != "nvml" else 0) for name, (_, interval_ns, _) in sources.items()
        }
        rarely_ns = dict.fromkeys(sources, now_ns)
        newest_ns = dict.fromkeys(sources, 0)
        while due_ns:
            ending = self._halt.wait(max(min(due_ns.values()) - time.monotonic_ns(), 0) / 1e9)
            now_ns = time.monotonic_ns()
            for name in list(due_ns):
                read, interval_ns, shortest_ns = sources[name]
                if now_ns < (newest_ns[name] + shortest_ns if ending else due_ns[name]):
                    continue
                rarely = ending or rarely_ns[name] <= now_ns
                if rarely:
                    rarely_ns[name] = now_ns + RARELY_NS
                # Right after one that came late, another would have no time to tell shares and rates of.
                newest_ns[name], due_ns[name] = now_ns, max(due_ns[name] + interval_ns, now_ns + interval_ns // 2)
                if not self._guarded(partial(read, now_ns, rarely)):
                    del due_ns[name]
            if "nvml" not in due_ns and self._settings.host_ns == AUTO_NS:
                break  # the host was read with the GPUs
            self.thread_ns = time.thread_time_ns()
            if ending:
                break
        self._is_reading = False
        if gpus is not None:
            self._guarded(partial(self._close, gpus))
        self.thread_ns = time.thread_time_ns()

    def _guarded(self, action: Callable[[], bool]) -> bool:
        """Whether to go on, as an action says; a fault of ours is counted, and it goes on."""
        try:
            return action()
        except Exception as fault:
            FAULTS.note("reading of gauges", fault)
            return True

    # ------------------------------------------------------------ reading

    def _open(self, gpus: Nvml) -> bool:
        try:
            with self._inside:
                gpus.open()
        except NvmlError as error:
            self._reasons.append(str(error))
            return False
        if not gpus.count and not gpus.notes:
            self._reasons.append("NVML: there is a driver, and no GPU")
        return gpus.count > 0

    def _close(self, gpus: Nvml) -> bool:
        with self._inside:
            gpus.close()
        return True

    def _read_gpus(self, gpus: Nvml, now_ns: int, rarely: bool) -> bool:
        try:
            with self._inside:
                told = gpus.read(now_ns, rarely)
        except Closed:
            return self._reopen(gpus)
        except NvmlError as error:
            self._reasons.append(f"{error}; the GPUs are not read any more")
            return False
        self._take([(device, now_ns, *self._shaped(values)) for device, values in told if values])
        return True

    def _reopen(self, gpus: Nvml) -> bool:
        """Other code of the process has shut NVML down more often than it opened it."""
        self._reopened += 1
        if self._reopened > REOPENED_AT_MOST:
            self._reasons.append("NVML: other code of this process shuts it down again and again; it is left alone")
            return False
        return self._open(gpus)

    def _read_host(self, host: Host, now_ns: int, rarely: bool) -> bool:
        self._take([(HOST, now_ns, *self._shaped(host.read(now_ns, rarely)))])
        return True

    def _read_torch(self, now_ns: int, rarely: bool) -> bool:
        with self._inside:
            told = self._torch.read(rarely)
        self._take([(device, now_ns, *self._shaped(values)) for device, values in told])
        return not self._torch.problem

    def _shaped(self, values: dict[str, float | None]) -> tuple[tuple[str, ...], tuple[float | None, ...]]:
        """Names and values in the order of names; the same names are kept once."""
        names = tuple(sorted(values))
        return self._shapes.setdefault(names, names), tuple(values[name] for name in names)

    def _take(self, rows: Sequence[Row]) -> None:
        with self._lock:
            for row in rows:
                if len(self._rows) == KEPT_ROWS:
                    self._overwritten += len(self._rows.popleft()[2])
                self._rows.append(row)
        if self._keep is not None and rows:
            self._keep(_samples_of(rows), self.gpus())

    # ------------------------------------------------------------ what is known

    def samples(self, first_ns: int, last_ns: int) -> list[Sample]:
        """The newest samples that were read from the first time on and before the last, by time, device and name."""
        with self._lock:
            rows = [row for row in self._rows if first_ns <= row[1] < last_ns]
        return _samples_of(rows)

    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that are read."""
        return tuple(self._nvml.gpus) if self._nvml is not None else ()

    def notes(self) -> list[str]:
        """What could not be read, and why."""
        more = self._nvml.notes if self._nvml is not None else []
        notes = [f"device.nvml: {reason}" for reason in (*self._reasons, *more)]
        if self._nvml is not None and self._nvml.failures:
            notes.append(f"device.nvml: {self._nvml.failures} calls failed for a reason that may pass")
        if self._torch.problem:
            notes.append(f"device.host: {self._torch.problem}")
        return notes

    def losses(self) -> dict[str, int]:
        """What is not kept, by reason."""
        return {"samples of gauges overwritten by newer ones": self._overwritten} if self._overwritten else {}


def _samples_of(rows: Sequence[Row]) -> list[Sample]:
    rows = sorted(rows, key=lambda row: (row[1], row[0]))
    return [Sample(name, row[0], row[1], value) for row in rows for name, value in zip(row[2], row[3], strict=True)]


def _hook_forks() -> None:
    global _hooked
    if not _hooked:
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent)
        _hooked = True


def _before_fork() -> None:
    """Wait until the thread is outside of NVML and torch: a lock that it holds there is never released in the child."""
    running = _running
    _forking.held = running if running is not None and running._inside.acquire(timeout=FORK_WAIT_S) else None


def _after_fork_in_parent() -> None:
    held, _forking.held = _forking.held, None
    if held is not None:
        held._inside.release()
