"""The instructions of a span: `python tests/bench/instructions.py`. Needs valgrind.

Unlike times these are the same in each run, so a change of some percent is seen. Each shape runs in a process of its
own under cachegrind, few times and many; the difference, less that of its bare twin, is what a span takes. Valgrind has
no clock in user space: two reads count some 30 instructions, and what the system does for them is not counted. Loops
make no numbers, or the allocator's state would count.

Python 3.11.7 built without profile (with one, what is around ours takes fewer):

    decorated call        420
    with scope            878
    coroutine             905
    step of a generator   322
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import repeat

FEW, MANY = 2_000, 22_000
CACHEGRIND = ["valgrind", "--tool=cachegrind", "--cachegrind-out-file=/dev/null"]
TWINS = {"call": "bare call", "scope": "loop", "coroutine": "bare await", "step": "bare step"}


def run(shape: str, spans: Iterator[None]) -> None:
    """Run a shape once for each item of an iterator."""
    from instrument import scope
    from instrument.recorder.recorder import RECORDER
    from instrument.recording.spans import Site

    RECORDER.on = True

    def nothing() -> None: ...

    async def coroutine() -> None: ...

    def numbers() -> Iterator[None]:
        for _ in spans:
            yield

    async def repeat_await(function: object) -> None:
        for _ in spans:
            await function()  # type: ignore[operator]

    match shape:
        case "call" | "bare call":
            called = RECORDER.wrap(nothing, Site("call")) if shape == "call" else nothing
            for _ in spans:
                called()
        case "scope":
            for _ in spans:
                with scope("scope"):
                    pass
        case "loop":
            for _ in spans:
                pass
        case "coroutine" | "bare await":
            awaited = RECORDER.wrap(coroutine, Site("coroutine")) if shape == "coroutine" else coroutine
            try:
                repeat_await(awaited).send(None)
            except StopIteration:
                pass
        case "step" | "bare step":
            generated = RECORDER.wrap(numbers, Site("generator")) if shape == "step" else numbers
            for _ in generated():
                pass


def totals(command: list[str], names: list[str], package: str = "") -> list[int]:
    """Run a command of cachegrind with a package's folder on the path, and return the printed sums of the names."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": package}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=environment)
    sums = [re.search(rf"{name}:\s+([\d,]+)", done.stderr) for name in names]
    assert all(sums), done.stderr
    return [int(number[1].replace(",", "")) for number in sums if number]


def of_one(shape: str) -> float:
    commands = ([*CACHEGRIND, "--cache-sim=no", sys.executable, __file__, shape, str(spans)] for spans in (FEW, MANY))
    few, many = (totals(command, [r"I\s+refs"])[0] for command in commands)
    return (many - few) / (MANY - FEW)


def main() -> None:
    if shutil.which("valgrind") is None:
        sys.exit("asked for instructions, found no valgrind; install it (apt-get install valgrind)")
    print(f"instructions over the bare one, Python {sys.version.split()[0]}")
    for shape, bare in TWINS.items():
        print(f"{shape:<12}{of_one(shape) - of_one(bare):>8.0f}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        run(sys.argv[1], repeat(None, int(sys.argv[2])))
    else:
        main()
