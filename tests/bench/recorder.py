"""The cost of a span on the thread that records it: `python tests/bench/recorder.py`.

Every figure is the cost over the bare call, as a multiple of two reads of the clock in C. All shapes take turns in one
process, round after round, outside of an event loop and inside. A change of the machine's speed therefore affects all
shapes alike. The best round counts. A round is shorter than the time slice of the system (4 ms and less). A longer
round would always include the time of another process. Within a loop the recorder is notified of tasks, as it is in a
service.

The last rows have the cost of a span of a layer with cold caches. Other work, such as a model's arithmetic, has then
used the processor's caches before the span and inside it. These figures are medians over many calls, with recording on
and off in turns.

On two shared x86-64 cores under Python 3.11, where two reads of the clock in C take 45 ns:

    multiples of two reads of the clock                  in a loop
    decorated call                              1.2      1.3
    decorated call, switched off at run time    0.2      0.2
    layer that a rule selects                   1.4      1.3
    another layer of its class                  0.3      0.3
    with scope                                  2.0      2.0
    gauge(name).set                             1.9      1.9
    counter(name).add                           1.8      1.8
    histogram(name).record                      1.9      1.9
    coroutine                                   2.0      2.0
    step of a generator                         1.1      1.1

A span waits for memory if a model computes between two spans. A layer then takes 0.7 to 0.8 us after 1 to 2 MiB of
other work. Every report states the cost of a span with both ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from instrument import annotate, counter, gauge, histogram, scope
from instrument.instrumentors import tasks_and_threads
from instrument.recorder import wrapping
from instrument.recorder.recorder import RECORDER, RING_BYTES, Recorder
from instrument.recording.spans import Site

CALLS = 1_000
ROUNDS = 200
LAYERS = 27
COLD_ROUNDS = 200
MEMORY_BYTES = 24 << 20
SWEPT_BYTES = (0, 1 << 20, 2 << 20)


def nothing() -> None: ...


async def coroutine() -> None: ...


def numbers() -> Iterator[int]:
    for number in range(CALLS):  # noqa: UP028 - `yield from` would take the steps out of the wrapped body
        yield number


def repeat(function: Callable[[], object]) -> None:
    for _ in range(CALLS):
        function()


async def repeat_await(function: Callable[[], object]) -> None:
    for _ in range(CALLS):
        await function()  # type: ignore[misc]


def run_coroutines(function: Callable[[], object]) -> None:
    # Driven by hand: an event loop's own work would drown the difference.
    try:
        repeat_await(function).send(None)
    except StopIteration:
        pass


def clock_reader() -> Callable[[], object]:
    """Reads the clock twice a call, in C."""
    source = f"""
        #include <time.h>
        void read_clock_twice(void)
        {{
            struct timespec now;
            for (int i = 0; i < 2 * {CALLS}; i++)
                clock_gettime(CLOCK_MONOTONIC, &now);
        }}
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        sys.exit("asked for two clock reads in C, found no compiler; install gcc")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "clock.so")
        command = [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=source, text=True, check=True)
        return ctypes.CDLL(str(library)).read_clock_twice  # type: ignore[no-any-return]


def loop_only() -> None:
    for _ in range(CALLS):
        pass


class Instance:
    """A class with a probe that checks the instance, as layers have it."""

    def call(self) -> None: ...

    def bare(self) -> None: ...


def repeat_on(instance: Instance) -> None:
    for _ in range(CALLS):
        instance.call()


def repeat_bare(instance: Instance) -> None:
    for _ in range(CALLS):
        instance.bare()


def with_scope() -> None:
    for _ in range(CALLS):
        with scope("scope"):
            pass


def nothing_named(**attributes: object) -> None: ...


def annotate_here() -> None:
    with scope("scope"):
        for _ in range(CALLS):
            annotate(tokens=3)


def annotate_scope() -> None:
    with scope("scope") as span:
        for _ in range(CALLS):
            span.annotate(tokens=3)


def annotate_outside() -> None:
    for _ in range(CALLS):
        annotate(tokens=3)


def call_named() -> None:
    for _ in range(CALLS):
        nothing_named(tokens=3)


def scope_with_attribute() -> None:
    for _ in range(CALLS):
        with scope("scope") as span:
            span.annotate(tokens=3)


def set_gauge() -> None:
    for _ in range(CALLS):
        gauge("bench.usage").set(0.5)


def add_to_counter() -> None:
    for _ in range(CALLS):
        counter("bench.hits").add()


def record_whole() -> None:
    for _ in range(CALLS):
        histogram("bench.tokens").record(17)


def record_fraction() -> None:
    for _ in range(CALLS):
        histogram("bench.seconds").record(0.25)


def consume(generator: Iterator[int]) -> None:
    for _ in generator:
        pass


def shapes() -> dict[str, tuple[Callable[[], object], str]]:
    """Name -> what to time and the name of its bare twin."""
    on, off = RECORDER, Recorder()
    on.begin(RING_BYTES, {})  # the memory that numbers are in
    on.on = True
    call, call_off = on.wrap(nothing, Site("call")), off.wrap(nothing, Site("call"))
    awaited = on.wrap(coroutine, Site("coroutine"))
    generated = on.wrap(numbers, Site("generator"))
    selected, other = Instance(), Instance()
    sites: dict[int, Site | None] = {id(selected): Site("layer"), id(other): None}
    Instance.call = wrapping.wrap_method(on, Instance.call, sites, lambda _: None)  # type: ignore[method-assign]

    nested = on.wrap(lambda: repeat(call), Site("root"))
    return {
        "loop": (loop_only, ""),
        "bare call": (lambda: repeat(nothing), ""),
        "bare method": (lambda: repeat_bare(other), ""),
        "bare await": (lambda: run_coroutines(coroutine), ""),
        "bare generator": (lambda: consume(numbers()), ""),
        "two clock reads": (clock_reader(), ""),
        "decorated call, on": (lambda: repeat(call), "bare call"),
        "decorated call, on, in a parent": (nested, "bare call"),
        "decorated call, off at run time": (lambda: repeat(call_off), "bare call"),
        "method of an instance that a rule names": (lambda: repeat_on(selected), "bare method"),
        "method of another instance of the class": (lambda: repeat_on(other), "bare method"),
        "with scope": (with_scope, "loop"),
        "bare call with a keyword": (call_named, "loop"),
        "annotate, one attribute": (annotate_here, "bare call with a keyword"),
        "annotate of a scope": (annotate_scope, "bare call with a keyword"),
        "annotate outside of a span": (annotate_outside, "bare call with a keyword"),
        "with scope, and annotate in it": (scope_with_attribute, "loop"),
        "gauge(name).set": (set_gauge, "loop"),
        "counter(name).add": (add_to_counter, "loop"),
        "histogram(name).record, a whole number": (record_whole, "loop"),
        "histogram(name).record, a fraction": (record_fraction, "loop"),
        "decorated coroutine": (lambda: run_coroutines(awaited), "bare await"),
        "decorated generator, a step": (lambda: consume(generated()), "bare generator"),
    }


def measure() -> tuple[dict[str, float], dict[str, float]]:
    """Nanoseconds a call of each shape over its bare twin, outside of an event loop and inside: the best rounds."""
    outside: dict[str, float] = {}
    inside: dict[str, float] = {}
    timed = shapes()

    def take_turns(best: dict[str, float]) -> None:
        for name, (run, _) in timed.items():
            start = time.perf_counter_ns()
            run()
            best[name] = min(best.get(name, float("inf")), (time.perf_counter_ns() - start) / CALLS)

    async def take_turns_inside() -> None:
        take_turns(inside)

    undo = tasks_and_threads.report_context_copies(RECORDER)  # as a session does
    for _ in range(ROUNDS):
        take_turns(outside)
        asyncio.run(take_turns_inside())
    undo()

    def over_bare(best: dict[str, float]) -> dict[str, float]:
        return {name: best[name] - (best[bare] if bare else 0.0) for name, (_, bare) in timed.items()}

    return over_bare(outside), over_bare(inside)


def measure_cold(swept_bytes: int) -> float:
    """Return the ns that a span adds to a layer that sweeps `swept_bytes` of memory after a sweep of the same size."""
    clock = time.perf_counter_ns
    memory, into = memoryview(bytearray(MEMORY_BYTES)), bytearray(swept_bytes)
    at, inside_ns = 0, 0

    def sweep() -> None:
        nonlocal at
        if swept_bytes:
            at = (at + swept_bytes) % (MEMORY_BYTES - swept_bytes)
            into[:] = memory[at : at + swept_bytes]

    class Layer:
        def forward(self) -> None:
            nonlocal inside_ns
            start_ns = clock()
            sweep()
            inside_ns = clock() - start_ns

    recorder = Recorder()
    layers = [Layer() for _ in range(LAYERS)]
    sites: dict[int, Site | None] = {id(layer): Site(f"layer {i}", "layer") for i, layer in enumerate(layers)}
    Layer.forward = wrapping.wrap_method(recorder, Layer.forward, sites, lambda _: None)  # type: ignore[method-assign]

    def run() -> float:
        outside_ns = 0
        for layer in layers:
            sweep()
            start_ns = clock()
            layer.forward()
            outside_ns += clock() - start_ns - inside_ns
        return outside_ns / LAYERS

    step = recorder.wrap(run, Site("step"))
    added_ns = []
    for _ in range(COLD_ROUNDS):
        taken_ns = {}
        for on in random.sample([True, False], 2):
            recorder.on = on
            taken_ns[on] = step()
        added_ns.append(taken_ns[True] - taken_ns[False])
    return statistics.median(added_ns)


def main() -> None:
    outside, inside = measure()
    reads = outside["two clock reads"]
    print(f"Python {sys.version.split()[0]}; x: multiples of two clock reads in C, {reads:.0f} ns")
    print(f"{'shape':<42}{'ns over bare':>14}{'x':>8}{'ns in a loop':>14}{'x':>8}")
    for name, cost_ns in outside.items():
        in_loop_ns = inside[name]
        print(f"{name:<42}{cost_ns:>14.1f}{cost_ns / reads:>8.2f}{in_loop_ns:>14.1f}{in_loop_ns / reads:>8.2f}")
    for swept_bytes in SWEPT_BYTES:
        cost_ns = measure_cold(swept_bytes)
        print(f"{f'layer after {swept_bytes >> 20} MiB of other work':<42}{cost_ns:>14.1f}{cost_ns / reads:>8.2f}")


if __name__ == "__main__":
    main()
