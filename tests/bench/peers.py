"""The cost of one span, ours against those of other tracers: `python tests/bench/peers.py`.

Every shape makes the same empty call with a span around it, in the way that the tracer's documentation shows. All take
turns in one process, round after round, so that a change of the machine's speed hits them alike. From each turn the
bare call of the same round is taken away, so that a slow round does not count twice. The table has the median of the
rounds, and how far apart the middle half of them is. The garbage collector stays on, as in a service;
what was imported before is frozen, so that no tracer pays for the size of another one. Nothing leaves the process:
OpenTelemetry batches into an exporter that takes everything and does nothing, and ddtrace's finished traces are dropped
by a filter before they are encoded, which spares it work that it does in a service.

A tracer that is not installed is named and left out.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instrument.recorder.recorder import Recorder
from instrument.recording.spans import Site

CALLS = 5_000
ROUNDS = 41

Run = Callable[[], None]


def nothing() -> None: ...


@dataclass
class Shape:
    """One thing to time.

    `bare` names its twin without a span, `rest` runs untimed after each round, `cheaper` is how many times cheaper ours
    is to be.
    """

    name: str
    run: Run
    bare: str = "bare call"
    cheaper: float | None = None
    rest: Run = nothing
    costs_ns: list[float] = field(default_factory=list)

    @property
    def median_ns(self) -> float:
        """The round in the middle."""
        return statistics.median(self.costs_ns)

    @property
    def spread(self) -> float:
        """Width of the middle half of the rounds, as a share of the median."""
        low, _, high = statistics.quantiles(self.costs_ns, n=4)
        return (high - low) / self.median_ns if self.median_ns else 0.0


def repeat(function: Callable[[], object]) -> Run:
    """A loop of calls."""

    def run() -> None:
        for _ in range(CALLS):
            function()

    return run


def repeat_twice(function: Callable[[], object]) -> Run:
    """A loop of two calls at a time."""

    def run() -> None:
        for _ in range(CALLS):
            function()
            function()

    return run


def repeat_inside(span: Callable[[str], Any]) -> Run:
    """A loop of calls, each inside a context manager made for it."""

    def run() -> None:
        for _ in range(CALLS):
            with span("call"):
                nothing()

    return run


def inside(span: Callable[[str], Any], run: Run) -> Run:
    """The loop under one open span, as the work of a request is."""

    def under() -> None:
        with span("request"):
            run()

    return under


def loop() -> None:
    for _ in range(CALLS):
        pass


def clock_shapes() -> list[Shape]:
    # Two reads as Python pays for them, and a C function that does the same but reads no clock: both take no argument
    # and return a fresh int, so that the difference is the clock itself, without the call and the int around it.
    return [
        Shape("bare call", repeat(nothing), ""),
        Shape("loop", loop, ""),
        Shape("two clock reads from Python", repeat_twice(time.monotonic_ns), "loop"),
        Shape("two calls that read no clock", repeat_twice(threading.get_ident), "loop"),
    ]


def own_shapes() -> list[Shape]:
    """Return our shapes: recording, with the time stamp counter as the clock, and switched off.

    Until a ring has wrapped once, its memory is touched for the first time, which costs page faults. That is a shape of
    its own, with a new recorder for each round; the others are timed after their rings have wrapped.
    """

    def decorated(recorder: Any) -> Run:
        recorder.on = True
        call = recorder.wrap(nothing, Site("call"))
        call()
        while recorder.calls <= max(ring.capacity for ring in recorder.rings()):
            repeat(call)()
        return repeat(call)

    on, off, counter = Recorder(), Recorder(), Recorder()
    fresh: list[Run] = []  # all are kept: memory that malloc has had back is not new

    def renew() -> None:
        recorder = Recorder()
        recorder.on = True
        fresh.append(repeat(recorder.wrap(nothing, Site("call"))))

    renew()
    shapes = [
        Shape("ours, decorated", decorated(on)),
        Shape("ours, decorated, under a span", inside(on.scope, decorated(on))),
        Shape("ours, with scope", repeat_inside(on.scope)),
        Shape("ours, off at run time", repeat(off.wrap(nothing, Site("call")))),
        Shape("ours, decorated, ring not yet full", lambda: fresh[-1](), rest=renew),
    ]
    if getattr(counter, "start_ticks", lambda: False)():
        shapes.append(Shape("ours, decorated, time stamp counter", decorated(counter)))
    else:
        print("ours with the time stamp counter: not here, left out")
    return shapes


@contextmanager
def opentelemetry_shapes() -> Iterator[list[Shape]]:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Sink(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Sink()))
    tracer = provider.get_tracer("bench")
    span = repeat_inside(tracer.start_as_current_span)
    under = inside(tracer.start_as_current_span, span)
    yield [
        Shape("OpenTelemetry SDK, a root span", span, cheaper=250),
        Shape("OpenTelemetry SDK, under a span", under, cheaper=250),
    ]
    provider.shutdown()


@contextmanager
def torch_shapes() -> Iterator[list[Shape]]:
    from torch.profiler import record_function

    yield [Shape("torch record_function, no profiler", repeat_inside(record_function), cheaper=40)]


@contextmanager
def viztracer_shapes() -> Iterator[list[Shape]]:
    # log_sparse is its mode for spans that one chooses: only what is decorated is recorded, and its tracer does not
    # hook every call of the process. log_event is its context manager, here in the same mode for the same reason.
    import viztracer

    tracer = viztracer.VizTracer(log_sparse=True, verbose=0, register_global=True)
    sparse = repeat(viztracer.log_sparse(nothing))
    event = repeat_inside(tracer.log_event)

    def started() -> None:
        tracer.start()
        try:
            event()
        finally:
            tracer.stop()

    yield [
        Shape("VizTracer log_sparse", sparse, cheaper=12, rest=tracer.clear),
        Shape("VizTracer log_event, sparse", event, cheaper=12, rest=tracer.clear),
        Shape("VizTracer log_event, tracer started", started, cheaper=12, rest=tracer.clear),
    ]


@contextmanager
def ddtrace_shapes() -> Iterator[list[Shape]]:
    os.environ.update(
        {
            "DD_TRACE_STARTUP_LOGS": "false",
            "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
            "DD_REMOTE_CONFIGURATION_ENABLED": "false",
            "DD_TRACE_AGENT_URL": "http://127.0.0.1:1",  # nobody listens, should anything get that far
            "DD_CRASHTRACKING_ENABLED": "false",
        }
    )
    from ddtrace.trace import TraceFilter, tracer

    class Sink(TraceFilter):
        def process_trace(self, trace: Any) -> None:
            return None

    tracer.configure(trace_processors=[Sink()])
    span = repeat_inside(tracer.trace)
    under = inside(tracer.trace, span)
    yield [
        Shape("ddtrace, a root span", span, cheaper=150),
        Shape("ddtrace, under a span", under, cheaper=150),
    ]


PEERS = {
    "OpenTelemetry SDK": ("opentelemetry-sdk", opentelemetry_shapes),
    "torch record_function": ("torch", torch_shapes),
    "VizTracer": ("viztracer", viztracer_shapes),
    "ddtrace": ("ddtrace", ddtrace_shapes),
}


def measure(shapes: list[Shape], rounds: int) -> None:
    """Fill in what each shape costs over its bare twin of the same round, in ns a call."""
    for shape in shapes:  # what a first use makes is no part of a span
        shape.run()
        shape.rest()
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        spent: dict[str, float] = {}
        for shape in shapes:
            start = time.perf_counter_ns()
            shape.run()
            spent[shape.name] = (time.perf_counter_ns() - start) / CALLS
            shape.rest()
        for shape in shapes:
            shape.costs_ns.append(spent[shape.name] - (spent[shape.bare] if shape.bare else 0.0))
    gc.unfreeze()


def machine() -> str:
    """Processor, cores, system and clock, to stand above the figures."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    clock = source.read_text(encoding="utf-8").strip() if source.exists() else "unknown"
    load = os.getloadavg()[0]
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, clock {clock}, load {load:.1f}"


def print_table(shapes: dict[str, Shape], rounds: int) -> None:
    ours = shapes["ours, decorated"]
    reads = shapes["two clock reads from Python"]
    clock_ns = reads.median_ns - shapes["two calls that read no clock"].median_ns
    print(machine())
    print(f"Python {sys.version.split()[0]}, native recorder")
    print(f"{rounds} rounds of {CALLS} calls, shapes in turn; ns over the bare call of the same round")
    print(f"two reads of the clock itself: {clock_ns:.1f} ns (from Python less two calls that read none)")
    print()
    print(f"{'shape':<38}{'median ns':>11}{'spread':>8}{'x py reads':>12}{'x clock':>9}{'x ours':>8}{'target':>9}")
    for shape in shapes.values():
        target = f">= {shape.cheaper:g}" if shape.cheaper else ""
        print(
            f"{shape.name:<38}{shape.median_ns:>11.1f}{shape.spread:>8.0%}"
            f"{shape.median_ns / reads.median_ns:>12.2f}{shape.median_ns / clock_ns:>9.2f}"
            f"{shape.median_ns / ours.median_ns:>8.1f}{target:>9}"
        )
    print()
    print("spread: middle half of the rounds over the median. Multiples are of median rounds.")
    verdicts = [
        ("ours over two reads of the clock itself", ours.median_ns / clock_ns, 2.0, "x"),
        ("ours over two reads from Python", ours.median_ns / reads.median_ns, 2.0, "x"),
        ("ours, off at run time", shapes["ours, off at run time"].median_ns, 15.0, " ns"),
    ]
    for name, found, limit, unit in verdicts:
        print(f"{name:<42}{found:>8.2f}{unit:<3}  target <= {limit:g}{unit:<3} {'met' if found <= limit else 'MISSED'}")
    for shape in shapes.values():
        if shape.cheaper:
            times = shape.median_ns / ours.median_ns
            verdict = "met" if times >= shape.cheaper else "MISSED"
            print(f"{shape.name:<42}{times:>8.2f}x    target >= {shape.cheaper:g}x  {verdict}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="what one span costs, ours beside other tracers'")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"how many, at least 2 (default: {ROUNDS})")
    rounds = max(parser.parse_args().rounds, 2)
    with ExitStack() as opened:
        shapes = [*clock_shapes(), *own_shapes()]
        for name, (package, make) in PEERS.items():
            try:
                shapes += opened.enter_context(make())
            except ImportError as missing:
                print(f"{name}: left out, {package} is not installed ({missing})")
        measure(shapes, rounds)
    print_table({shape.name: shape for shape in shapes}, rounds)


if __name__ == "__main__":
    main()
