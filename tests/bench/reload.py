"""The delay until all workers of a pre-fork server follow a changed profile, and its cost.

`python tests/bench/reload.py [workers]` forks the workers, each of which calls an instrumented function without pause
a tenth of the time, changes the profile's file thirty times, and prints the time until the last worker has gone over;
then the processor time that watching takes in an idle process, and what one reload takes by itself.

On two shared cores eight idle workers follow within 0.13 s.
"""

from __future__ import annotations

import mmap
import os
import signal
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import instrument

ROUNDS = 30
IDLE_S = 2.0

sys.modules["bench_target"] = target = type(sys)("bench_target")
exec("def f(): return 1\ndef g(): return 2\ndef loop():\n    for _ in range(100): f()", vars(target))


def profile(ways: str, number: int) -> str:
    name = "fg"[number % 2]
    return f"control: {{{ways}}}\nservice: s{number}\nfunctions: [{{match: 'bench_target:{name}'}}]\n"


def worker(slot: int, told: mmap.mmap) -> NoReturn:
    """Call the target, and write down when a new generation is seen: its number and the time."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    seen = 1
    while True:
        vars(target)["loop"]()
        generation = instrument.session().recorded.generation
        if generation != seen:
            seen = generation
            struct.pack_into("qq", told, slot * 16, generation, time.monotonic_ns())
        time.sleep(0.001)


def followed_ms(ways: str, workers: int) -> list[float]:
    """Return for each change of the profile the time in ms until the last worker has applied the change."""
    file = Path("profile.yaml")
    file.write_text(profile(ways, 0))
    instrument.start(file)
    told = mmap.mmap(-1, 16 * workers)
    children = []
    for slot in range(workers):
        children.append(os.fork())
        if children[-1] == 0:
            worker(slot, told)
    time.sleep(1)
    took = []
    for number in range(1, ROUNDS + 1):
        new = Path("new.yaml")
        new.write_text(profile(ways, number))
        new.rename(file)
        start_ns = time.monotonic_ns()
        while any(struct.unpack_from("q", told, slot * 16)[0] <= number for slot in range(workers)):
            time.sleep(0.001)
            if time.monotonic_ns() - start_ns > 20 * 10**9:
                raise SystemExit("a worker did not follow")
        last_ns = max(struct.unpack_from("qq", told, slot * 16)[1] for slot in range(workers))
        took.append((last_ns - start_ns) / 1e6)
        time.sleep(0.05 + 0.01 * (number % 10))
    for child in children:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
    instrument.stop()
    return took


def idle_us(ways: str) -> float:
    """Microseconds of processor time a second in a process that does nothing else."""
    Path("profile.yaml").write_text(profile(ways, 0))
    instrument.start("profile.yaml")
    time.sleep(0.5)
    before = time.process_time_ns()
    time.sleep(IDLE_S)
    spent = time.process_time_ns() - before
    instrument.stop()
    return spent / 1e3 / IDLE_S


def main() -> None:
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, ways in (("file", "watch: true"),):
            took = sorted(followed_ms(ways, workers))
            print(
                f"{name}: last of {workers} workers after {statistics.median(took):.0f} ms in the median, "
                f"{took[-1]:.0f} ms at most of {ROUNDS} changes"
            )
        nothing = idle_us("watch: false")
        for name, ways in (("watching", "watch: true"),):
            print(f"{name}: {idle_us(ways) - nothing:.0f} us of processor time a second")
        instrument.start(Path("profile.yaml"))
        times = []
        for number in range(ROUNDS):
            Path("profile.yaml").write_text(profile("socket: ./sockets", number + 1))
            start = time.perf_counter()
            instrument.reload()
            times.append((time.perf_counter() - start) * 1e3)
        instrument.stop()
        print(f"one reload with {len(sys.modules)} modules: {statistics.median(times):.1f} ms")
        os.chdir("/")


if __name__ == "__main__":
    main()
