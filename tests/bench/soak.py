"""The memory and the counts after many calls: `python tests/bench/soak.py`, or `--calls 1e6` for a quick run.

Calls of every kind (functions, exceptions, scopes, generators, coroutines, deep recursion) run in a few threads at a
time. Short-lived threads start and end all the time. The warm-up is a share of the work, until the rings have wrapped
and every call path is known. Memory must stay within a bound from then on. The rest of the work runs in ten parts. The
benchmark reads the resident set after each part, to distinguish a plateau from a leak. It compares the calls and errors
of every name in the tally with the actual calls.

The exit code is 1 if memory grew by more than the bound, or if a count is off by one.

10^8 calls do not change the memory after the first million.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from instrument.recorder.recorder import Recorder
from instrument.recording.spans import Site

RING_BYTES = 16 << 20
BOUND_MIB = RING_BYTES >> 20
"""By how much the resident set may grow after the warm-up, in which the rings have been touched: the rings once more. A
leak of one byte a call, or of ten kilobytes a thread, is well above it."""

PARTS = 10
THREADS = 10_000
AT_A_TIME = 4
DEPTH = 400
STEPS = 100


class Work:
    """The calls of the benchmark, and the expected number of each."""

    def __init__(self) -> None:
        self.recorder = Recorder(RING_BYTES)
        self.recorder.on = True
        self.expected: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._plain = self._wrapped(_plain, "plain")
        self._failing = self._wrapped(_failing, "failing")
        self._numbers = self._wrapped(_numbers, "generator")
        self._coroutine = self._wrapped(_coroutine, "coroutine")
        self._nested = self._wrapped(self._descend, "recursion")

    def _wrapped(self, function: Callable, name: str) -> Callable:
        return self.recorder.wrap(function, Site(name))

    def _descend(self, depth: int) -> None:
        if depth:
            self._nested(depth - 1)

    def _count(self, name: str, calls: int, errors: int = 0) -> None:
        with self._lock:
            self.expected[name] += calls
            self.errors[name] += errors

    def functions(self, calls: int) -> None:
        plain = self._plain
        for _ in range(calls):
            plain()
        self._count("plain", calls)

    def exceptions(self, calls: int) -> None:
        for _ in range(calls):
            try:
                self._failing()
            except ValueError:
                pass
        self._count("failing", calls, calls)

    def scopes(self, calls: int) -> None:
        scope = self.recorder.scope
        for _ in range(calls):
            with scope("scope"):
                pass
        self._count("scope", calls)

    def generators(self, calls: int) -> None:
        """Each second one is left before its end."""
        for number in range(calls):
            generator = self._numbers()
            if number % 2:
                next(generator)
                generator.close()
            else:
                for _ in generator:
                    pass
        self._count("generator", calls)

    def coroutines(self, calls: int) -> None:
        """Many at a time, in tasks of their own."""

        async def batch(size: int) -> None:
            await asyncio.gather(*(self._coroutine() for _ in range(size)))

        async def batches() -> None:
            for first in range(0, calls, STEPS):
                await batch(min(STEPS, calls - first))

        asyncio.run(batches())
        self._count("coroutine", calls)

    def recursion(self, calls: int) -> None:
        full, rest = divmod(calls, DEPTH + 1)
        for _ in range(full):
            self._nested(DEPTH)
        if rest:
            self._nested(rest - 1)
        self._count("recursion", calls)

    def short_threads(self, threads: int, calls: int) -> None:
        """Threads that record little and end, a few at a time."""
        for first in range(0, threads, STEPS // 10):
            started = [
                threading.Thread(target=self.functions, args=(calls,)) for _ in range(min(STEPS // 10, threads - first))
            ]
            for thread in started:
                thread.start()
            for thread in started:
                thread.join()

    def run(self, calls: int, threads: int) -> None:
        """Make `calls` calls in all: most of them plain, and some in short-lived threads."""
        each = max(calls // threads // 100, 1)
        parts: list[tuple[Callable[[int], None], int]] = [
            (self.exceptions, calls // 50),
            (self.scopes, calls // 20),
            (self.generators, calls // 100),
            (self.coroutines, calls // 200),
            (self.recursion, calls // 50),
        ]
        plain = calls - sum(share for _, share in parts) - each * threads
        parts += [(self.functions, plain // AT_A_TIME)] * (AT_A_TIME - 1)
        parts.append((self.functions, plain - plain // AT_A_TIME * (AT_A_TIME - 1)))
        started = [threading.Thread(target=run, args=(share,), name=run.__name__) for run, share in parts]
        for thread in started:
            thread.start()
        self.short_threads(threads, each)
        for thread in started:
            thread.join()


def _plain() -> None: ...


def _failing() -> None:
    raise ValueError("on purpose")


def _numbers() -> Iterator[int]:
    yield from range(3)


async def _coroutine() -> None:
    await asyncio.sleep(0)


def resident_bytes() -> int:
    """The process's resident set now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def wrong_counts(work: Work) -> list[str]:
    """Names whose calls or errors in the tally are not what was called."""
    calls: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    for row in work.recorder.tally().iterate_totals():
        calls[row.path[-1].name] += row.totals.calls
        errors[row.path[-1].name] += row.totals.errors
    names = sorted({*calls, *work.expected})
    wrong = [
        f"{name}: {calls[name]:,} counted, {work.expected[name]:,} called"
        for name in names
        if calls[name] != work.expected[name]
    ]
    wrong += [
        f"{name}: {errors[name]:,} errors counted, {work.errors[name]:,} raised"
        for name in names
        if errors[name] != work.errors[name]
    ]
    if work.recorder.calls != work.expected.total():
        wrong.append(f"all: {work.recorder.calls:,} spans finished, {work.expected.total():,} called")
    return wrong


def _share(whole: int, part: int) -> int:
    return whole * (part + 1) // PARTS - whole * part // PARTS


def main() -> int:
    """Run the command line, and return 0 if memory and counts are as expected, else 1."""
    parser = argparse.ArgumentParser(description="whether memory stays bounded and counts exact")
    parser.add_argument("--calls", type=float, default=1e8, help="how many in all, at least 1e5 (default: 1e8)")
    parser.add_argument("--threads", type=int, default=THREADS, help=f"short-lived threads (default: {THREADS})")
    parser.add_argument("--bound", type=float, default=BOUND_MIB, help=f"MiB of growth (default: {BOUND_MIB})")
    options = parser.parse_args()
    calls, threads = int(options.calls), options.threads
    if calls < 100_000 or not PARTS <= threads <= calls // 20:
        parser.error(f"--calls must be at least 1e5, --threads from {PARTS} to a twentieth of the calls")
    work = Work()
    at_start = resident_bytes()
    warm_calls, warm_threads = max(calls // 20, 1_000_000), max(threads // 20, 1)
    work.run(warm_calls, warm_threads)
    wrong = wrong_counts(work)
    before = resident_bytes()
    begin = time.perf_counter()
    course = []
    for part in range(PARTS):
        work.run(_share(calls, part), _share(threads, part))
        course.append(resident_bytes())
    wall_s = time.perf_counter() - begin
    after = course[-1]
    wrong += wrong_counts(work)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"Python {sys.version.split()[0]}, rings {RING_BYTES >> 20} MiB")
    print(f"{calls:,} calls after {warm_calls:,} of warm-up, {threads:,} short-lived threads, {wall_s:.1f} s")
    for name, size in (("at the start", at_start), ("before", before), ("after", after), ("peak", peak)):
        print(f"resident set {name:<14}{size / 2**20:>8.1f} MiB")
    print("after each tenth, MiB     " + " ".join(f"{size / 2**20:.1f}" for size in course))
    grown = after - before
    print(f"growth                    {grown / 2**20:>9.1f} MiB  bound {options.bound:g} MiB")
    for name, count in sorted(work.expected.items()):
        print(f"{name:<24}{count:>14,} calls{work.errors[name]:>14,} errors")
    for name, count in {**work.recorder.losses(), **work.recorder.count_unusual_events()}.items():
        print(f"{name}: {count:,}")
    for line in wrong:
        print(f"WRONG {line}")
    if grown > options.bound * 2**20:
        print("FAILED: memory grew by more than the bound")
    print("counts exact" if not wrong else "FAILED: counts are not exact")
    return 1 if wrong or grown > options.bound * 2**20 else 0


if __name__ == "__main__":
    sys.exit(main())
