"""The cache lines and the time of a span outside the caches: `python tests/bench/cold.py [OTHER]`. Needs valgrind.

A service computes between two spans, and its own data fills the processor's caches meanwhile. Each span then waits for
the lines of code and data that it touches. So this prints two figures over the bare shape, each after 2 MiB of other
data:

- distinct cache lines of code and of data. Cachegrind simulates one cache, which the other data fills: each miss is a
  distinct line. These counts are the same in each run.
- nanoseconds, and their ratio to those of OTHER. That is the folder of another build, with its recorder in place. A
  process of each build measures by turns.
"""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from instructions import CACHEGRIND, TWINS, run, totals

FEW, MANY = 20, 120
CACHES = ["--cache-sim=yes", "--I1=128,1,64", "--D1=128,1,64", "--LL=1048576,16,64"]
MISSES = ["LLi misses", "LLd misses"]
SWEPT_BYTES, DATA_BYTES = 2 << 20, 24 << 20
PROCESSES, TURNS, SPANS_A_TURN = 12, 4, 100


def swept(spans: int, taken_ns: list[int]) -> Iterator[None]:
    """Pass over other data before each span. Note the time of each span in a list."""
    gc.disable()  # a collection in one of two runs would count as lines of a span, as would memory on other borders
    data, copied = (memoryview(mmap.mmap(-1, size)) for size in (DATA_BYTES, SWEPT_BYTES))
    data[:], clock = b"1" * DATA_BYTES, time.perf_counter_ns
    for span in range(spans):
        first = span * SWEPT_BYTES % DATA_BYTES
        copied[:] = data[first : first + SWEPT_BYTES]
        begin_ns = clock()
        yield
        taken_ns.append(clock() - begin_ns)


def lines_of_one(shape: str, package: str) -> list[float]:
    few, many = (
        totals([*CACHEGRIND, *CACHES, sys.executable, __file__, shape, str(spans)], MISSES, package)
        for spans in (FEW, MANY)
    )
    return [(b - a) / (MANY - FEW) for a, b in zip(few, many, strict=True)]


def answer() -> None:
    """Measure each shape that a line of the input names, and print its nanoseconds."""
    for line in sys.stdin:
        taken_ns: list[int] = []
        run(line.strip(), swept(SPANS_A_TURN, taken_ns))
        print(statistics.median(taken_ns), flush=True)


def cold_times(packages: list[str]) -> dict[str, list[float]]:
    """Return the nanoseconds of each shape over its bare twin, for each build, over several processes."""
    medians: dict[tuple[str, int], list[float]] = {}
    for _ in range(PROCESSES):
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "answer"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": package},
            )
            for package in packages
        ]
        for shape in [*TWINS, *TWINS.values()] * TURNS:
            for number, process in enumerate(processes):
                assert process.stdin is not None
                assert process.stdout is not None
                print(shape, file=process.stdin, flush=True)
                medians.setdefault((shape, number), []).append(float(process.stdout.readline()))
        for process in processes:
            process.communicate()

    def over_bare(shape: str, number: int) -> float:
        return statistics.median(medians[shape, number]) - statistics.median(medians[TWINS[shape], number])

    return {shape: [over_bare(shape, number) for number in range(len(packages))] for shape in TWINS}


def main(other: list[str]) -> None:
    if shutil.which("valgrind") is None:
        sys.exit("asked for cache lines, found no valgrind; install it (apt-get install valgrind)")
    packages = [str(Path(__file__).parents[2]), *other]
    print(f"over the bare one, after {SWEPT_BYTES >> 20} MiB of other data, Python {sys.version.split()[0]}")
    times = cold_times(packages)
    for shape, bare in TWINS.items():
        for number, package in enumerate(packages):
            lines = zip(lines_of_one(shape, package), lines_of_one(bare, package), strict=True)
            code, data = (of_shape - of_bare for of_shape, of_bare in lines)
            taken_ns = times[shape][number]
            ratio = f", {times[shape][0] / taken_ns:.2f} of {package}" if number else ""
            print(f"{shape:<12}{code:>6.1f} lines of code {data:>6.1f} of data {taken_ns:>8.0f} ns{ratio}")


if __name__ == "__main__":
    if sys.argv[1:] == ["answer"]:
        answer()
    elif len(sys.argv) == 3:
        run(sys.argv[1], swept(int(sys.argv[2]), []))
    else:
        main(sys.argv[1:])
