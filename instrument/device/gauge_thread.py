"""Reads the gauges of a process and its devices, at the intervals that its profile sets.

`Gauges` reads on a thread of the process. The run's agent reads from outside of the process, by `GaugeSources`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from instrument.device import gpu_gauges
from instrument.device.gpu_gauges import Closed, Nvml, NvmlError
from instrument.profile.model import AUTO_NS, Device
from instrument.recording.memory import FindRoom, add_samples
from instrument.recording.spans import HOST, Gpu, Sample
from instrument.runtime.environment import count_usable_cores, memory_waits_us
from instrument.runtime.faults import FAULTS
from instrument.runtime.threads import Thread
from instrument.runtime.unpatched import Event, Lock, local

Values = dict[str, float | None]

GAUGE_OF = {
    "torch_allocated": ("allocated_bytes", "current"),
    "torch_allocated_peak": ("allocated_bytes", "peak"),
    "torch_reserved": ("reserved_bytes", "current"),
    "torch_reserved_peak": ("reserved_bytes", "peak"),
}
"""The gauges of torch's allocator, each with its path in `torch.cuda.memory_stats_as_nested_dict()`."""


class TorchMemory:
    """Reads the counters of torch's allocator.

    torch keeps the interpreter's lock while it waits for its allocator, so the counters are read rarely. No peak is
    missed, because torch stores the peaks.
    """

    def __init__(self) -> None:
        self.problem = ""
        self._began = False

    def read(self, rarely: bool) -> list[tuple[int, Values]]:
        torch = sys.modules.get("torch")
        native: Any = getattr(torch, "_C", None)
        stats_of = getattr(native, "_cuda_memoryStats", None)
        is_initialized = getattr(getattr(torch, "cuda", None), "is_initialized", None)
        # A torch built without CUDA lacks the first, a torch that is being imported the second.
        if stats_of is None or is_initialized is None or not is_initialized() or (self._began and not rarely):
            return []
        self._began = True
        gauges = []
        try:
            for device in range(native._cuda_getDeviceCount()):
                if native._cuda_hasPrimaryContext(device):
                    stats = stats_of(device)
                    gauges.append(
                        (device, {name: stats[counter]["all"][of] for name, (counter, of) in GAUGE_OF.items()})
                    )
        except Exception as error:  # another allocator may have no counters
            first = str(error).partition("\n")[0]
            self.problem = f"torch's allocator is no longer read: {type(error).__name__}: {first}"
        return gauges


EVERY_NS = 10**9
"""The default interval in ns between two readings of a gauge."""

RARELY_NS = 10 * 10**9
"""The minimum ns between two readings of a gauge that is expensive or changes slowly."""

SHORTEST_NS = 100 * 10**6
"""The minimum ns between the last two readings of a session."""

SPOILT = "a fork came while it was in use; this child does not read GPUs"

REOPENED_AT_MOST = 5

Keep = Callable[[Sequence[Sample]], object]

Readout = Sequence[tuple[int, Values]]
"""The values of each device's gauges at one time."""

_Read = Callable[[int, bool], "Readout | None"]
"""A function of the time and a flag that reads gauges. If the flag is True, it also reads the rarely read gauges.

It returns None after the last reading.
"""


class GaugeSources:
    """Reads the gauges that the profile's `device` selects, for this process or another process.

    Methods other than `find_gauges`, `gpus` and `notes` must be called on the same thread. They acquire the lock
    `inside` for calls of NVML and of torch's allocator.
    """

    _is_spoilt = False
    """True in a forked child whose parent was reading GPUs at the fork."""

    def __init__(
        self, settings: Device, keep: Keep, pid: int | None = None, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._settings = settings
        self._keep = keep
        self._pid = pid
        self._environ = environ
        self.reasons: list[str] = []
        self._nvml: Nvml | None = None
        self._host: Host | None = None
        self._torch = TorchMemory()
        self._nvml_ns = self._host_ns = EVERY_NS
        self._reopened = 0
        self._sources: dict[str, tuple[_Read, int, int]] = {}
        self._due_ns: dict[str, int] = {}
        self._rarely_ns: dict[str, int] = {}
        self._newest_ns: dict[str, int] = {}
        self._just_read: list[Sample] = []
        self.inside = Lock()

    def find_gauges(self) -> None:
        """Find the gauges that can be read. Raises an exception for a process that has ended."""
        nvml_ns, host_ns = self._settings.nvml_ns, self._settings.host_ns
        if nvml_ns is not None:
            problem = SPOILT if self._is_spoilt else gpu_gauges.explain_missing_nvml()
            if not problem:
                self._nvml, self._nvml_ns = Nvml(self._pid, self._environ), nvml_ns or EVERY_NS
            elif nvml_ns != AUTO_NS or problem != gpu_gauges.NO_DRIVER:
                self.reasons.append(problem)
        if host_ns is not None and (host_ns != AUTO_NS or self._nvml is not None):
            self._host, self._host_ns = Host(self._pid), host_ns or self._nvml_ns

    @property
    def has_readable_gauges(self) -> bool:
        return self._nvml is not None or self._host is not None

    def readable_settings(self) -> Device:
        nvml_ns = None if self._nvml is None else self._settings.nvml_ns
        return Device(nvml_ns=nvml_ns, host_ns=None if self._host is None else self._settings.host_ns)

    def open(self) -> bool:
        gpus, host, is_open = self._nvml, self._host, False
        if gpus is not None:
            self._run_safely(partial(self._close_nvml, gpus))  # of a run that died
            is_open = self._run_safely(partial(self._open_nvml, gpus)) is not None
            if is_open:
                self._sources["nvml"] = partial(self._read_gpus, gpus), self._nvml_ns, SHORTEST_NS
        if host is not None and (is_open or self._settings.host_ns != AUTO_NS):
            self._sources["host"] = lambda *at: [(HOST, host.read(*at))], self._host_ns, SHORTEST_NS
            if self._pid is None:
                self._sources["torch"] = (
                    lambda _, rarely: GaugeSources.read_torch_memory(self, rarely=rarely),
                    self._host_ns,
                    0,
                )
        now_ns = time.monotonic_ns()
        self._due_ns = {
            name: now_ns + (interval_ns if name != "nvml" else 0) for name, (_, interval_ns, _) in self._sources.items()
        }
        self._rarely_ns = dict.fromkeys(self._sources, now_ns)
        self._newest_ns = dict.fromkeys(self._sources, 0)
        return is_open

    def wait_ns(self) -> int | None:
        return max(min(self._due_ns.values()) - time.monotonic_ns(), 0) if self._due_ns else None

    def read_due_gauges(self, *, is_last: bool = False) -> None:
        now_ns = time.monotonic_ns()
        for name in list(self._due_ns):
            if name not in self._due_ns:
                break  # the process has ended
            read, interval_ns, shortest_ns = self._sources[name]
            if now_ns < (self._newest_ns[name] + shortest_ns if is_last else self._due_ns[name]):
                continue
            rarely = is_last or self._rarely_ns[name] <= now_ns
            if rarely:
                self._rarely_ns[name] = now_ns + RARELY_NS
            # Right after a late reading, another would have no time for shares and rates.
            self._newest_ns[name] = now_ns
            self._due_ns[name] = max(self._due_ns[name] + interval_ns, now_ns + interval_ns // 2)
            gauges = self._run_safely(partial(read, now_ns, rarely))
            for device, values in gauges or ():
                self._just_read += [Sample(gauge, device, now_ns, values[gauge]) for gauge in sorted(values)]
            if gauges is None or (name == "torch" and self._torch.problem):
                self._due_ns.pop(name, None)
        if "nvml" not in self._due_ns and self._settings.host_ns == AUTO_NS:
            self._due_ns.clear()  # the host was read with the GPUs
        samples, self._just_read = self._just_read, []
        if samples:
            self._keep(samples)  # all of one time together, as readers continue after the newest time

    def close(self) -> None:
        self._due_ns.clear()
        if self._nvml is not None:
            self._run_safely(partial(self._close_nvml, self._nvml))

    def _run_safely(self, action: Callable[[], Readout | None]) -> Readout | None:
        try:
            return action()
        except Gone:
            self._due_ns.clear()
        except Exception as fault:
            FAULTS.note("reading of gauges", fault)
        return ()

    # ------------------------------------------------------------ reading

    def _open_nvml(self, gpus: Nvml) -> Readout | None:
        try:
            with self.inside:
                gpus.open()
        except NvmlError as error:
            self.reasons.append(str(error))
            return None
        if not gpus.gpu_count and not gpus.notes:
            self.reasons.append("NVML: there is a driver, and no GPU")
        return () if gpus.gpu_count else None

    def _close_nvml(self, gpus: Nvml) -> Readout:
        with self.inside:
            gpus.close()
        return ()

    def _read_gpus(self, gpus: Nvml, now_ns: int, rarely: bool) -> Readout | None:
        try:
            with self.inside:
                return gpus.read(now_ns, rarely)
        except Closed:
            self._reopened += 1
            if self._reopened <= REOPENED_AT_MOST:
                return self._open_nvml(gpus)
            self.reasons.append("NVML: other code of this process shuts it down again and again; it is left alone")
        except NvmlError as error:
            self.reasons.append(f"{error}; the GPUs are not read any more")
        return None

    def read_torch_memory(self, *, rarely: bool) -> Readout:
        """Read torch's allocator. Only one thread may call this method."""
        with self.inside:
            return self._torch.read(rarely)

    # ------------------------------------------------------------ results

    def gpus(self) -> tuple[Gpu, ...]:
        return tuple(self._nvml.gpus) if self._nvml is not None else ()

    def notes(self) -> list[str]:
        more = self._nvml.notes if self._nvml is not None else []
        notes = [f"device.nvml: {reason}" for reason in (*self.reasons, *more)]
        if self._nvml is not None and self._nvml.failures:
            notes.append(f"device.nvml: {self._nvml.failures} calls failed for a reason that may pass")
        if self._torch.problem:
            notes.append(f"device.host: {self._torch.problem}")
        return notes


STOP_S = 2.0
"""The maximum seconds to wait for the end of the reading thread, which may hang in the driver."""

FORK_WAIT_S = 1.0
"""The maximum seconds that a fork waits for the reading thread to leave NVML and torch's allocator."""

THREAD_NAME = "instrument-nvml"

_running: Gauges | None = None
_forking = local()


class Gauges(GaugeSources):
    """A thread that reads this process's gauges and passes each reading to `keep`. The profile's `device` selects the
    gauges.

    `find_room` returns the recording's memory for samples. Any thread may call `begin` and `stop`.
    """

    def __init__(
        self,
        settings: Device,
        find_room: FindRoom,
        keep: Callable[[Sequence[Sample], Sequence[Gpu]], object] | None = None,
    ) -> None:
        self._keep_with_gpus = keep
        self._find_room = find_room
        self._reset_state(settings)

    def _reset_state(self, settings: Device) -> None:
        super().__init__(settings, self._add_samples)
        self._halt = Event()
        self._thread: Thread | None = None
        self.is_reading = False
        """True while this process reads its gauges itself."""
        self._outside: tuple[Sequence[Gpu], Sequence[str]] = (), ()
        self._before_ns = 0
        self.thread_ns = 0
        """Processor time of the reading threads so far, in ns."""

    # ------------------------------------------------------------ life

    def begin(self) -> None:
        if not self.has_readable_gauges:
            return
        self._watch_forks()
        self._halt, self.is_reading = Event(), True
        self._before_ns = self.thread_ns
        self._thread = Thread(self._run, THREAD_NAME, lambda: self.is_reading)
        self._thread.start()

    def stop(self, limit_s: float = STOP_S) -> None:
        """Read all gauges a last time, and end the thread. The call takes at most `limit_s` seconds, even if the driver
        hangs."""
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
            self.reasons.append(f"the thread was still inside of the driver {limit_s:.2g} s after the end; it was left")

    def after_fork_in_child(self, *, begins: bool = True) -> None:
        """Drop the parent's readings, but do not close the parent's handles. The driver would also close them in the
        parent."""
        is_outside = getattr(_forking, "gauges", None) is self
        self._is_spoilt = self._is_spoilt or (self._thread is not None and not is_outside)
        self._reset_state(self._settings)
        self.find_gauges()
        if begins:
            self.begin()

    def _watch_forks(self) -> None:
        global _running
        _hook_forks()
        _running = self

    def _run(self) -> None:
        halt, ending = self._halt, False
        self.open()
        while not ending and (wait_ns := self.wait_ns()) is not None:
            ending = halt.wait(wait_ns / 1e9)
            self.read_due_gauges(is_last=ending)
            self.thread_ns = self._before_ns + time.thread_time_ns()
        self.is_reading = False
        self.close()
        self.thread_ns = self._before_ns + time.thread_time_ns()

    # ------------------------------------------------------------ reading

    def read_torch_memory(self, *, rarely: bool) -> Readout:
        self._watch_forks()  # the agent may read all other gauges
        return super().read_torch_memory(rarely=rarely)

    def _add_samples(self, samples: Sequence[Sample]) -> None:
        add_samples(self._find_room(), samples)
        if self._keep_with_gpus is not None:
            self._keep_with_gpus(samples, self.gpus())

    def store_agent_gpus(self, gpus: Sequence[Gpu], notes: Sequence[str]) -> None:
        self._outside = tuple(gpus), tuple(notes)

    def gpus(self) -> tuple[Gpu, ...]:
        return super().gpus() or tuple(self._outside[0])

    def notes(self) -> list[str]:
        return list(dict.fromkeys([*super().notes(), *self._outside[1]]))

    def losses(self) -> dict[str, int]:
        room = self._find_room()
        overwritten = 0 if room is None else max(room.count_used_slots() - room.slots, 0)
        return {"samples of gauges overwritten by newer ones": overwritten} if overwritten else {}


@cache
def _hook_forks() -> None:
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent)


def _before_fork() -> None:
    """Wait until no thread is inside NVML or torch's allocator. A child process could never release the locks there."""
    running = _running
    _forking.gauges = running if running is not None and running.inside.acquire(timeout=FORK_WAIT_S) else None


def _after_fork_in_parent() -> None:
    gauges, _forking.gauges = _forking.gauges, None
    if gauges is not None:
        gauges.inside.release()


# The gauges of the host

PROC = Path("/proc")

_PROCESS_CLOCK = 2
"""The bits of a Linux clock id that select `CPUCLOCK_SCHED`, the clock that `process_time` reads."""


MOST_THREADS = 256
"""The maximum number of threads per process whose waits for a processor are read."""


class Gone(Exception):  # noqa: N818 - no error: there is nothing more to read
    """An exception for a process that ended before its gauges were read."""


class Host:
    """Reads the host's gauges for a process. Shares are averages since the last reading.

    The constructor and `read` raise an exception if the process has ended.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._folder = PROC / ("self" if pid is None else str(pid))
        self._process_ns, self._at_ns = self._read_processor_ns(), time.monotonic_ns()
        self._busy, self._idle, self._stolen = self._read_system_times()
        self._waits_ns, self._memory_waits_us = self._read_processor_waits(), memory_waits_us(self._pid)

    def read(self, now_ns: int, rarely: bool) -> Values:
        values: Values = {"cores": count_usable_cores(self._pid)} if rarely else {}
        process_ns = self._read_processor_ns()
        elapsed_ns = now_ns - self._at_ns
        values["process_cpu"] = 100 * (process_ns - self._process_ns) / elapsed_ns if elapsed_ns > 0 else None
        values["process_memory"] = resident_bytes = self._read_resident_bytes()
        if self._pid is not None and not resident_bytes:
            raise Gone  # a zombie has no memory
        values["process_memory_peak"] = self._read_peak_bytes()
        busy, idle, stolen = self._read_system_times()
        passed = busy - self._busy + idle - self._idle
        # The time of waits for disks may decrease (man 5 proc), so the sum may, too.
        share = 100 * (busy - self._busy) / passed if passed > 0 else None
        values["system_cpu"] = None if share is None else min(max(share, 0.0), 100.0)
        waits_ns, waits_us = self._read_processor_waits(), memory_waits_us(self._pid)
        new_ns = sum(max(ns - self._waits_ns.get(thread, 0), 0) for thread, ns in waits_ns.items())
        if 0 < (stolen_ticks := stolen - self._stolen) < busy - self._busy:
            # A thread that the hypervisor stopped ran for the kernel. The process had its share of that time.
            new_ns += round((process_ns - self._process_ns) * stolen_ticks / (busy - self._busy - stolen_ticks))
        values["cpu_wait"] = 100 * new_ns / elapsed_ns if waits_ns and elapsed_ns > 0 else None
        values["memory_pressure"] = None
        if waits_us is not None and self._memory_waits_us is not None and elapsed_ns > 0:
            values["memory_pressure"] = 100_000 * max(waits_us - self._memory_waits_us, 0) / elapsed_ns
        self._waits_ns, self._memory_waits_us = waits_ns, waits_us
        self._process_ns, self._at_ns = process_ns, now_ns
        self._busy, self._idle, self._stolen = busy, idle, stolen
        return values

    def _read_processor_ns(self) -> int:
        """Read the process's processor time in ns. Any process may read it (man clock_getcpuclockid)."""
        if self._pid is None:
            return time.process_time_ns()
        try:
            return time.clock_gettime_ns(~self._pid << 3 | _PROCESS_CLOCK)
        except OSError as error:
            raise Gone from error

    def _read_resident_bytes(self) -> float | None:
        try:
            return int((self._folder / "statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            return None

    def _read_peak_bytes(self) -> float | None:
        try:
            status = (self._folder / "status").read_bytes()
        except OSError:
            return None
        _, label, text = status.partition(b"\nVmHWM:")
        return int(text.split(None, 1)[0]) * 1024 if label else None

    def _read_processor_waits(self) -> dict[str, int]:
        """Read how long each thread has waited for a processor, in ns. This includes stops by a quota."""
        waits_ns = {}
        with suppress(OSError), os.scandir(self._folder / "task") as tasks:
            for task in islice(tasks, MOST_THREADS):
                with suppress(OSError, ValueError, IndexError):  # the thread has ended meanwhile
                    waits_ns[task.name] = int(Path(task.path, "schedstat").read_bytes().split()[1])
        return waits_ns

    def _read_system_times(self) -> tuple[float, float, float]:
        """Read the busy, idle and stolen time of all cores in ticks since the machine's start.

        Stolen time is the part of the busy time in which the hypervisor ran other machines.
        """
        try:
            with (PROC / "stat").open("rb") as file:
                ticks = [int(number) for number in file.readline().split()[1:9]]
        except (OSError, ValueError):
            return 0.0, 0.0, 0.0
        # user nice system idle iowait irq softirq steal; guests are in user already
        idle = sum(ticks[3:5])
        return sum(ticks) - idle, idle, sum(ticks[7:8])
