"""The traces of the oracle's answers: drawn by generators from a seed, or small files in the same folder.

The files are traces of real programs, and damaged traces that can still be read. A drawn trace does not depend on the
machine, the clock or an order of threads. The same seed is therefore always the same trace.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from interval_lists import assign_self_times
from paddle_golden import golden_trace

from instrument.recording.spans import (
    BLOCKED_LOOP,
    HOST,
    Cost,
    DeviceInterval,
    FirstCall,
    Flops,
    Gpu,
    ImportTime,
    Kernel,
    Origin,
    Sample,
    Site,
    Span,
    Startup,
)
from instrument.recording.trace_context import RemoteParent
from instrument.trace.trace import Allocation, Trace

FILES = Path(__file__).with_name("files")
GOLDEN = Path(__file__).parents[1] / "golden"


class Made(NamedTuple):
    """A trace of the oracle: what makes it, or the file that has it. One that is `large` is asked for less."""

    make: Callable[[], Trace] | None = None
    file: Path | None = None
    write: Callable[[Path], None] | None = None
    large: bool = False


# Programs: trees as services have them


SITES = {
    "request": [
        Site("POST /chat", "request", "shop", "chat", "shop.py", 10),
        Site("POST /embed", "request", attributes=(("http.route", "/embed"),)),
        Site("GET /rank", "request"),
    ],
    "phase": [
        Site("queue", "phase"),
        Site("tokenise", "phase", attributes=(("phase", "prepare"),)),
        Site("decode", "phase", attributes=(("phase", "compute"),), suspends=True),
        Site("answer", "phase", attributes=(("phase", "post"),)),
    ],
    "step": [Site("train", "step", "shop", "train"), Site("Engine.step", "step", "shop.engine", "Engine.step")],
    "loader": [Site("next", "loader", "shop", "Loader.__next__")],
    "layer": [
        Site("Linear", "layer", "torch.nn", "Linear.forward", instance=f"model.layers.{n}.mlp", device=True)
        for n in range(4)
    ]
    + [Site("Conv2d", "layer", instance="model.stem", device=True)],
    "op": [
        Site("matmul", "op", "shop.ops", "matmul", device=True),
        Site("Sampler.draw", "op", "shop.ops", "Sampler.draw"),
        Site("aten::mm", "op", "torch.profiler"),
    ],
    "comm": [
        Site("all_reduce", "comm", "torch.distributed", "all_reduce", device=True, attributes=(("op", "SUM"),)),
        Site("broadcast", "comm", "torch.distributed", "broadcast"),
    ],
    "copy": [
        Site("memcpy h2d", "copy", "torch", "Tensor.to", device=True,
             attributes=(("direction", "h2d"), ("sync", True), ("pinned", False))),
        Site("memcpy d2h", "copy", "torch", "Tensor.cpu", device=True,
             attributes=(("direction", "d2h"), ("sync", False), ("pinned", True))),
        Site("memcpy h2h", "copy", "numpy", "copyto", attributes=(("direction", "h2h"), ("sync", True))),
    ],
    "user": [
        Site("search", "user", "shop", "search", "shop.py", 90),
        Site("search", "user", "shop", "search", "shop.py", 90, instance="second"),
        Site("walk", "user"),
        Site("tokens", "user", "shop", "tokens", suspends=True),
    ],
}  # fmt: skip
"""Sites by kind. Two `search` share a name, and are read from a file as two objects each."""

BELOW = {
    "request": ("phase", "phase", "step", "user", "op", "copy"),
    "step": ("loader", "phase", "layer", "layer", "comm", "copy", "user"),
    "phase": ("op", "layer", "user", "copy", "phase"),
    "layer": ("layer", "op", "op", "comm"),
    "user": ("user", "op", "phase", "copy"),
    "op": ("op", "copy"),
}
"""The kinds that each kind calls. Those without an entry call nothing."""


class Program:
    """Draws the spans of a program: calls in calls, on threads and tasks that overlap, with gaps and without."""

    def __init__(self, seed: int, count: int) -> None:
        self.chance = random.Random(seed)
        self.count = count
        self.spans: list[Span] = []
        self.streams: dict[tuple[int, int], int] = {}

    def drawn(self) -> list[Span]:
        """All spans, self times set, in the order of their begin as far as `dump` keeps one."""
        chance, at_ns = self.chance, 1_000_000
        while len(self.spans) < self.count:
            thread, task = chance.choice([11, 11, 12, 13]), chance.choice([0, 0, 0, 1 << 40, (1 << 40) + 16])
            kind = chance.choices(["request", "step", "user", "op"], [6, 3, 1, 1])[0]
            length_ns = chance.choice([0, 7, 1_000, 30_000, 200_000, 1_500_000]) + chance.randrange(50_000)
            self.call(kind, None, thread, task, at_ns, at_ns + length_ns, 0)
            at_ns += chance.choice([0, length_ns, length_ns // 2, length_ns + 100_000])
        self.add_strays()
        assign_self_times(self.spans)
        return self.spans

    def call(
        self, kind: str, parent: Span | None, thread: int, task: int, start_ns: int, end_ns: int, depth: int
    ) -> None:
        """A call and all that it calls."""
        chance = self.chance
        site = chance.choice(SITES[kind])
        span_id = len(self.spans) + 1
        root_id = span_id if parent is None else parent.root_id
        span = Span(site, span_id, 0 if parent is None else parent.span_id, root_id, thread, task, start_ns, end_ns,
                    end_ns - start_ns, 0)  # fmt: skip
        self.spans.append(span)
        self.describe(span)
        at_ns = start_ns
        for _ in range(chance.randrange(6) if depth < 7 and kind in BELOW else 0):
            if len(self.spans) >= self.count or at_ns >= end_ns:
                break
            begin_ns = at_ns + chance.choice([0, 0, chance.randrange(1 + (end_ns - at_ns) // 4)])
            until_ns = begin_ns + chance.randrange(1 + max(end_ns - begin_ns, 0))
            below = chance.choice(BELOW[kind])
            if chance.random() < 0.08:  # elsewhere, which may end after its parent has
                other = (thread, task + 32) if task else (14, 0)
                self.call(below, span, *other, begin_ns, until_ns + chance.randrange(90_000), depth + 1)
                continue
            self.call(below, span, thread, task, begin_ns, until_ns, depth + 1)
            at_ns = until_ns if chance.random() < 0.93 else begin_ns  # two at once, as generators are

    def describe(self, span: Span) -> None:
        """Draw the facts of a span other than its times."""
        chance, site = self.chance, span.site
        if site.suspends:
            span.active_ns = chance.randrange(1 + span.total_ns)
        if chance.random() < 0.03:
            span.error = chance.choice(["ValueError", "TimeoutError"])
        attributes: dict[str, Any] = {}
        if site.kind == "copy":
            attributes["bytes"] = chance.choice([0, 4_096, 1 << 20, 3_000_001])
            if chance.random() < 0.5:
                attributes["in_flight_ns"] = chance.randrange(9_000)
        if site.kind == "comm":
            attributes["bytes"] = chance.randrange(1 << 22)
        if site.kind == "step":
            attributes["step"] = span.span_id // 7
            attributes["samples"] = chance.randrange(1, 64)
        if site.kind == "request":
            attributes["http.response.status_code"] = chance.choice([200, 200, 200, 204, 404, 500])
            if chance.random() < 0.4:
                first_ns = chance.randrange(1 + span.total_ns)
                attributes |= {"first_item_ns": first_ns, "items": chance.randrange(1, 9)}
                attributes |= {"last_item_ns": first_ns + chance.randrange(5_000), "longest_gap_ns": 700}
            if chance.random() < 0.2:
                span.remote = RemoteParent(chance.getrandbits(127) | 1, chance.getrandbits(63) | 1, chance.randrange(2))
        if site.module == "torch.profiler" and chance.random() < 0.5:
            attributes["flops"] = chance.randrange(1 << 34)
        if chance.random() < 0.2:
            attributes |= {"model": "llama-8b", "ok": True, "share": 0.25, "shape": (4, 8), "caf\u00e9": "\u6f22"}
        span.attributes = attributes
        if site.device and chance.random() < 0.8:
            span.device = tuple(self.interval(span) for _ in range(chance.choice([1, 1, 1, 2])))

    def interval(self, span: Span) -> DeviceInterval:
        """Work of a stream, most of which waits for what was launched before it."""
        chance = self.chance
        device, stream = chance.choice([0, 0, 1]), chance.choice([7, 7, 13])
        start_ns = span.start_ns + chance.randrange(5_000)
        if chance.random() < 0.7:
            start_ns = max(start_ns, min(self.streams.get((device, stream), 0), start_ns + 300_000))
        end_ns = start_ns + chance.choice([0, 900, chance.randrange(60_000)])
        self.streams[device, stream] = end_ns
        label = chance.choice(["exclusive"] * 5 + ["overlapped", "launch-bound", "captured", "stale", "dropped"])
        return DeviceInterval(device, stream, start_ns, end_ns, label, chance.choice([0, 500, 3_000]))

    def add_strays(self) -> None:
        """Spans that are not as others: of blocked loops, without their parents, clipped, linked."""
        chance = self.chance
        last = max(span.end_ns for span in self.spans)
        for number in range(max(self.count // 60, 1)):
            at_ns, span_id = chance.randrange(last), len(self.spans) + 1
            length_ns = chance.randrange(80_000)
            site = BLOCKED_LOOP if number % 2 else SITES["user"][2]
            parent, attributes = chance.choice([(0, {"instrument.link": (3, 1)}), (10**9, {}), (1, {})])
            if number % 2:
                parent, attributes = 0, {"instrument.blocked_by": chance.choice(["search", "walk"])}
            span = Span(site, span_id, parent, chance.choice([span_id, 1]) if parent else span_id, 11, 0, at_ns,
                        at_ns + length_ns, length_ns, 0, None, attributes, (), number % 3 == 0)  # fmt: skip
            self.spans.append(span)


def program(seed: int, count: int, *, facts: bool = True) -> Trace:
    """Return the trace of a program, with the facts that a session knows of it."""
    spans = Program(seed, count).drawn()
    chance = random.Random(seed + 1000)
    last_ns = max(span.end_ns for span in spans)
    first_ns = 900_000 if seed % 3 else 1_200_000  # some spans may lie across the window's begin
    end_ns = last_ns - 50_000 if seed % 4 == 1 else last_ns + 70_000
    trace = Trace(
        Origin(4711, "shop", 0, 1_700_000_000 * 10**9, "native", "profile.yaml", "node", 2, "abcdef"), first_ns, end_ns,
        spans, {11: "MainThread", 12: "worker 1", 13: "w\n"},
    )  # fmt: skip
    if not facts:
        return trace
    trace.losses = {"spans overwritten by newer ones": 12}
    trace.notes = ["rule 3 matched nothing", "no device time: the device is another's"]
    trace.cost = Cost(len(spans), 61.25, end_ns - first_ns, 1_500_000, 707.5)
    trace.held_from_ns = first_ns + (end_ns - first_ns) // 8 if seed % 5 == 2 else 0
    at = [first_ns + n * (end_ns - first_ns) // 9 for n in range(10)]
    trace.samples = [
        Sample(name, device, at_ns, None if name == "power" and device else round(chance.random() * 90, 3))
        for at_ns in at
        for name, device in (("process_cpu", HOST), ("process_memory", HOST), ("power", 0), ("utilization", 0))
    ]
    trace.samples.sort(key=lambda one: (one.at_ns, one.device, one.name))
    trace.gpus = [Gpu(0, "NVIDIA H200", "GPU-a"), Gpu(1, "NVIDIA H200", "GPU-b")]
    imports = (ImportTime("torch", 20, 31_000_000, 22_000_000, 3_000_000), ImportTime("yaml", 1, 9_000, 8_000, 0, 50))
    firsts = {span.site: FirstCall(span.site, span.start_ns, span.total_ns) for span in reversed(spans)}
    trace.startup = Startup(first_ns - 9_000_000, first_ns - 400_000_000, imports, tuple(firsts.values()))
    if seed % 2:
        trace.watched = first_ns + 1_000, end_ns - 1_000
        some = chance.sample(spans, min(len(spans), 80))
        trace.kernels = sorted(
            (
                Kernel(f"gemm_{n % 9}<float>(int)", "kernel" if n % 5 else "copy", n % 2, 7 + n % 2, one.start_ns + 900,
                       one.start_ns + 900 + chance.randrange(9_000), one.thread_id if n % 4 else 0,
                       one.start_ns + 1 if n % 4 else 0)
                for n, one in enumerate(some)
            ),
            key=lambda kernel: kernel.start_ns,
        )  # fmt: skip
        trace.allocations = [
            Allocation(HOST if n % 3 else 0, first_ns + n * (end_ns - first_ns) // 200, chance.choice([11, 12]),
                       chance.choice([1, -1]) * chance.randrange(1 << 20), chance.randrange(40), 10**8 + n, n << 21)
            for n in range(200)
        ]  # fmt: skip
        trace.flops = [Flops(one.thread_id, one.start_ns + 1, 1_000 + n) for n, one in enumerate(some)]
        trace.flops.sort(key=lambda one: (one.thread_id, one.at_ns))
    return trace


# Shapes: trees as no program has them


def any_parents(seed: int, count: int) -> Trace:
    """Spans of any times below any other span, on any thread and task."""
    chance = random.Random(seed)
    every = [site for sites in SITES.values() for site in sites]
    spans: list[Span] = []
    for span_id in range(1, count + 1):
        above = chance.choice([None, *spans[-5:]])
        start_ns, length_ns = chance.randrange(140), chance.choice([0, 1, chance.randrange(60)])
        device = tuple(
            DeviceInterval(chance.randrange(2), chance.choice([7, 8]), at_ns, at_ns + chance.randrange(30), label, 3)
            for label in chance.choices(["exclusive", "exclusive", "stale", "dropped"], k=chance.randrange(3))
            for at_ns in [chance.randrange(140)]
        )
        spans.append(
            Span(chance.choice(every), span_id, above.span_id if above else 0, above.root_id if above else span_id,
                 chance.choice([1, 1, 1, 2]), chance.choice([0, 0, 0, 5]), start_ns, start_ns + length_ns,
                 max(length_ns - chance.choice([0, 0, 0, 1]), 0), 0, device=device)
        )  # fmt: skip
    chance.shuffle(spans)
    assign_self_times(spans)
    return Trace(Origin(1, "shop", 0, 0), 20, 120, spans, {1: "main"}, held_from_ns=chance.choice([0, 40]))


def deep(levels: int) -> Trace:
    """Calls in one another, of some sites by turns and so also recursions, with device time at every tenth."""
    sites = [SITES["request"][0], *SITES["user"], *SITES["op"]]
    spans = []
    for level in range(levels):
        start_ns, end_ns = 1_000 + 10 * level, 1_000 + 30 * levels - 10 * level
        device = (DeviceInterval(0, 7, start_ns, start_ns + 40),) if level % 10 == 0 else ()
        site = sites[0] if not level else sites[1 + level % (len(sites) - 1)]
        spans.append(Span(site, level + 1, level, 1, 1, 0, start_ns, end_ns, end_ns - start_ns, 0, device=device))
    assign_self_times(spans)
    return Trace(Origin(1, "shop", 0, 0), 0, 1_000 + 30 * levels, spans, {1: "main"})


def wide(count: int) -> Trace:
    """Return one request with that number of calls right below it, some on another thread, and phases in all of it."""
    chance = random.Random(3)
    root = Span(SITES["request"][0], 1, 0, 1, 1, 0, 0, 1_000 * count, 1_000 * count, 0)
    spans = [root]
    for number in range(2, count + 1):
        site = chance.choice([*SITES["phase"], SITES["layer"][0], SITES["copy"][0]])
        start_ns = 1_000 * number - 1_000 - chance.randrange(900)
        end_ns = start_ns + chance.randrange(2_500)
        span = Span(site, number, 1, 1, chance.choice([1, 1, 2]), 0, start_ns, end_ns, end_ns - start_ns, 0)
        if site.device:
            span.device = (DeviceInterval(0, 7, start_ns + 100, end_ns + 100),)
        spans.append(span)
    assign_self_times(spans)
    return Trace(Origin(1, "shop", 0, 0), 0, 1_000 * count, spans, {1: "main", 2: "other"})


def bench(count: int) -> Trace:
    """The trace of `tests/bench/views.py`."""
    from bench.views import trace_of

    return trace_of(count)


# Files of other profilers


def write_viztracer(path: Path) -> None:
    """Write a trace as VizTracer does: nested calls on two threads, a counter and an instant event."""
    chance = random.Random(5)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 77, "tid": 77, "name": "process_name", "args": {"name": "MainProcess"}},
        {"ph": "M", "pid": 77, "tid": 77, "name": "thread_name", "args": {"name": "MainThread"}},
        {"ph": "M", "pid": 77, "tid": 78, "name": "thread_name", "args": {"name": "Thread-1 (work)"}},
    ]

    def calls(tid: int, start: float, end: float, depth: int) -> Iterator[dict[str, Any]]:
        name = chance.choice(["fib", "search", "Model.forward", "builtins.sum", "<listcomp>"])
        event = {"pid": 77, "tid": tid, "ts": start, "dur": round(end - start, 3), "ph": "X", "cat": "FEE"}
        yield event | {"name": f"{name} (/srv/app.py:{len(name)})", "args": {"func_args": {"n": "3"}}}
        at = start
        for _ in range(chance.randrange(4) if depth < 6 else 0):
            begin = round(at + chance.random() * (end - at) / 4, 3)
            until = round(begin + chance.random() * (end - begin) / 2, 3)
            yield from calls(tid, begin, until, depth + 1)
            at = until

    for number in range(12):
        start = 151_934_000.125 + 900 * number
        events += calls(77 + number % 2, start, start + 800.5, 0)
    events.append({"ph": "C", "pid": 77, "tid": 77, "name": "queue", "ts": 151_934_001.5, "args": {"length": 4}})
    events.append({"ph": "i", "pid": 77, "tid": 77, "name": "mark", "ts": 151_934_002.5, "s": "t", "args": {}})
    document = {"traceEvents": events, "viztracer_metadata": {"version": "1.0.4", "overflow": False}}
    path.write_text(json.dumps(document))


def write_kineto(path: Path) -> None:
    """Write a trace as torch.profiler does with a device: operators, launches, kernels, copies, memory, steps."""
    from kineto import Kineto

    chance, file = random.Random(9), Kineto()
    at = 1_000_000
    for number in range(30):
        file.op(f"ProfilerStep#{number}", at, at + 190_000, category="user_annotation")
        file.op(
            "aten::linear", at + 1_000, at + 90_000, **{"Input Dims": [[4, 8], [8, 8]], "Input type": ["float"] * 2}
        )
        file.op("aten::mm", at + 2_000, at + 60_000, **{"Input Dims": [[4, 8], [8, 8]]})
        file.launch(f"gemm_{number % 3}<float>", at + 5_000, at + 20_000, at + 40_000 + chance.randrange(30_000))
        file.launch("Memcpy HtoD", at + 65_000, at + 80_000, at + 99_000, category="gpu_memcpy", stream=13)
        file.op("aten::relu", at + 95_000, at + 120_000, thread=4400)
        file.launch("relu_kernel", at + 100_000, at + 130_000, at + 150_000, thread=4400 if number % 2 else None)
        file.memory(at + 3_000, 4_096, number)
        file.memory(at + 150_000, -4_096, number)
        file.memory(at + 4_000, 1 << 20, 77 + number, device=0)
        at += 200_000
    file.save(path)


def _all() -> dict[str, Made]:
    found = {f"program {seed}": Made(partial(program, seed, count)) for seed, count in ((1, 60), (2, 150), (3, 300),
        (4, 400), (5, 400))}  # fmt: skip
    found["program without facts"] = Made(partial(program, 6, 200, facts=False))
    found |= {f"any parents {seed}": Made(partial(any_parents, seed, 40)) for seed in (1, 2, 3)}
    found |= {"empty": Made(lambda: Trace(Origin(1, "shop", 0, 0), 0, 100, []))}
    found |= {"deep": Made(partial(deep, 300)), "wide": Made(partial(wide, 400)), "bench": Made(partial(bench, 400))}
    found |= {
        f"golden {name}": Made(file=GOLDEN / file)
        for name, file in (
            ("mini-caffe", "minicaffe_profile.json"),
            ("paddle 3.3.1", "paddle_export.json.gz"),
        )
    }
    found["golden paddle"] = Made(partial(golden_trace, launches=True))
    found |= {"viztracer": Made(write=write_viztracer), "kineto": Made(write=write_kineto)}
    found |= {
        path.name.partition(".")[0].replace("_", " "): Made(file=path) for path in sorted(FILES.glob("*.json.gz"))
    }
    found |= {
        "program of 20,000": Made(partial(program, 8, 20_000), large=True),
        "deep of 2,000": Made(partial(deep, 2_000), large=True),
        "wide of 20,000": Made(partial(wide, 20_000), large=True),
        "bench of 20,000": Made(partial(bench, 20_000), large=True),
    }
    return found


ALL: Mapping[str, Made] = _all()
"""Every trace of the oracle by its name."""
