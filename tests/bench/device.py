"""The cost of a span with device time on the host: `python tests/bench/device.py`.

The benchmark measures a CUDA device if torch can use one. Otherwise it measures the fake driver of the tests. The calls
of the fake driver take almost no time, so the figure is the cost of the recorder and of the bindings. The option
`--driver-ns` makes each call take as long as a real one.

The first table has a span without device time, and a span with device time by each way to record. A record releases the
interpreter lock, which is the default, or keeps it. The second and the third table have the same while other threads
compute in Python. A thread that releases the lock may then wait until the turn of another thread is over, as in any
operator of torch. A turn is 5 ms by the default of `sys.setswitchinterval`. A thread that keeps the lock may wait for
ever if a host function needs the lock.

With `--spans N`, N spans go through one timer, and the benchmark prints the memory of the process on the way.

On two shared cores a pair of events costs about 0.6 us on the service's thread, without the driver's two records. This
is with Python's lock kept. It costs 2.6 us where each call releases the lock (`device: {gil: release}`), and up to 5 ms
where another thread computes in Python. The resolver takes 4 us a pair on its own thread, with the lock. A service that
never waits also pays for the resolver. The resolver took 7.5 to 9.5 us while it looked each millisecond. Ten million
pairs do not increase the memory after the pool has grown.

On an H200 (torch 2.11, driver 580, 16 cores of a virtual machine) a pair costs 4.9 us, with the lock kept or released.
Where a thread computes in Python, a pair costs 7 us with the lock kept. With the lock released it costs 4.8 ms in the
mean, and half of the pairs cost below 74 us. An operator of torch also releases the lock, and then takes 6 to 14 ms. A
thread that kept the lock did hang where host functions were in Python. Looks that came each millisecond cost such a
service 18 us a pair. Looks 5 ms apart cost a model that decodes 4.6 of 20 ms a token, with 16 or with 113 timed layers.
The cause is the time to hand the lock over between cores that sleep.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

CALLS = 400
ROUNDS = 25


def quantile(values: list[int], share: float) -> int:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


@contextmanager
def computing(threads: int) -> Iterator[None]:
    """Threads that compute in Python and never wait."""
    stop = threading.Event()

    def work() -> None:
        number = 0
        while not stop.is_set():
            number = (number * 31 + 7) % 1_000_003

    running = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in running:
            thread.join()


def start_fake(driver_ns: int) -> Any:
    """The fake driver in real time, with a context current here."""
    from driver import FakeDriver, library, value

    fake = FakeDriver(library())
    fake.reset(virtual=False)
    from cuda.bindings import driver as cuda

    value(cuda.cuInit(0))
    value(cuda.cuCtxSetCurrent(value(cuda.cuDevicePrimaryCtxRetain(0))))
    stream = int(value(cuda.cuStreamCreate(1)))
    for symbol in ("cuEventRecord", "cuStreamIsCapturing") if driver_ns else ():
        fake.cost(symbol, driver_ns)
    return lambda: (0, stream)


def start_torch() -> Any:
    """torch's device, warm, with a kernel on its way."""
    import torch

    from instrument.device.cuda import make_torch_reader

    if not torch.cuda.is_available():
        return None
    torch.cuda.init()
    torch.zeros(1, device="cuda").add_(1)
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name(0)}")
    return make_torch_reader(torch)


def times(run: Callable[[], None]) -> list[int]:
    """Nanoseconds of each call."""
    now = time.perf_counter_ns
    found = []
    for _ in range(CALLS):
        start = now()
        run()
        found.append(now() - start)
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="what a span with device time costs")
    parser.add_argument("--driver-ns", type=int, default=0, help="what each call of the fake driver takes (default: 0)")
    parser.add_argument("--fake", action="store_true", help="the fake driver also where there is a device")
    parser.add_argument("--spans", type=int, default=0, help="so many spans through one timer, and their memory")
    options = parser.parse_args()
    current = None
    if not options.fake:
        try:
            current = start_torch()
        except ImportError:
            pass
    if current is None:
        if "FAKE_LOADED" not in os.environ:  # before anything looks for the driver
            from driver import environment

            raise SystemExit(
                subprocess.call([sys.executable, *sys.argv], env={**os.environ, **environment(), "FAKE_LOADED": "1"})
            )
        current = start_fake(options.driver_ns)
        print(f"the fake driver, {options.driver_ns} ns a call")
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if options.spans:
        soak(current, options.spans)
    else:
        compare(current)


def compare(current: Any) -> None:
    """The three tables."""
    from readback import make_intervals

    from instrument.device.cuda import CudaDriver
    from instrument.device.timer import Timer
    from instrument.device.timing import raw_clock
    from instrument.recorder.recorder import Recorder
    from instrument.recording.spans import Site

    def nothing() -> None: ...

    runs: dict[str, Callable[[], None]] = {"bare call": nothing}
    timers = []
    plain = Recorder(1 << 22)
    plain.on = True
    runs["span"] = plain.wrap(nothing, Site("plain"))
    for name, holds_gil in (("device span, lock let go", False), ("device span, lock kept", True)):
        recorder = Recorder(1 << 22)
        recorder.on = True
        timer = Timer(CudaDriver(holds_gil=holds_gil), make_intervals(1 << 22), recorder, recorder.now_ns, raw_clock)
        timer.sources.append(current)
        recorder.begin_device = timer.begin
        runs[name] = recorder.wrap(nothing, Site(name, device=True))
        timers.append(timer)
    for run in runs.values():
        for _ in range(64):
            run()
    for threads in (0, 1, 2):
        found: dict[str, list[int]] = {name: [] for name in runs}
        with computing(threads):
            for _ in range(ROUNDS if not threads else 5):
                for name, run in runs.items():
                    found[name] += times(run)
                    while any(any(c.under_way.values()) or c.begun for t in timers for c in t._contexts.values()):
                        time.sleep(0.001)
        beside = f"{threads} threads compute in Python" if threads else "nothing else runs"
        print(f"\n{beside:<32}{'p50 ns':>10}{'p99 ns':>12}{'mean ns':>12}{'over bare':>12}")
        bare = quantile(found["bare call"], 0.5)
        for name, values in found.items():
            p50, p99 = quantile(values, 0.5), quantile(values, 0.99)
            print(f"{name:<32}{p50:>10,}{p99:>12,}{statistics.mean(values):>12,.0f}{p50 - bare:>12,}")
    for timer, name in zip(timers, ("lock let go", "lock kept"), strict=True):
        resolver = timer.resolver
        resolver.stop()
        spans = sum(
            count for label, count in resolver.counts.items() if label in ("exclusive", "overlapped", "launch-bound")
        )
        print(f"\n{name}: {spans:,} intervals, labels and errors: {dict(resolver.counts)}")


def soak(current: Any, spans: int) -> None:
    """Memory over many spans, and what one costs with everything in it."""
    from readback import make_intervals

    from instrument.device.cuda import CudaDriver
    from instrument.device.timer import Timer
    from instrument.device.timing import raw_clock
    from instrument.recorder.recorder import Recorder
    from instrument.recording.spans import Site

    recorder = Recorder(1 << 22)
    recorder.on = True
    timer = Timer(CudaDriver(), make_intervals(1 << 22), recorder, recorder.now_ns, raw_clock)
    timer.sources.append(current)
    recorder.begin_device = timer.begin

    def nothing() -> None: ...

    run = recorder.wrap(nothing, Site("soak", device=True))
    page = os.sysconf("SC_PAGESIZE")
    step = max(spans // 10, 1)
    begin = time.perf_counter()
    for number in range(spans):
        run()
        if number % 100 == 99:
            time.sleep(0)
        if number % step == step - 1:
            gc.collect()
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
            taken = time.perf_counter() - begin
            print(f"{number + 1:>12,} spans, {taken:7.1f} s, resident {resident / 2**20:7.1f} MiB", flush=True)
    timer.resolver.stop()
    totals = [row.totals for row in recorder.tally().iterate_totals()]
    print(f"{dict(timer.resolver.counts)}; device time of {totals[0].calls:,} calls: {totals[0].device_ns:,} ns")


if __name__ == "__main__":
    main()
