"""What each view costs over a trace of a million spans: `python tests/bench/views.py [--spans N] [--view V]`.

Requests of twenty spans on eight threads that overlap: queue, phases, copies, layers on two devices with four streams
each, steps and loaders; for the view `memory` as many allocations too. Each view is made and printed in a process of
its own, whose memory beyond that of the spans is told. Target: 3 s and 400 MB. Then the same of live tallies: 100 to
10,000 call paths on four threads, target 20 ms.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

from instrument.profile import VIEWS
from instrument.recorder import Recorder
from instrument.report.events import events
from instrument.report.summary import made
from instrument.report.view import Options, Recording
from instrument.spans import HOST, Allocation, DeviceInterval, Origin, Site, Span, Trace, assign_self_times

TARGET_S, TARGET_MB, TARGET_LIVE_MS = 3.0, 400, 20

REQUESTS = [Site(f"POST /{name}", "request") for name in ("chat", "embed", "rank")]
QUEUE, PREPARE, STEP = Site("queue", "phase"), Site("tokenise", "phase"), Site("decode", "step")
NEXT = Site("next", "loader")
LAYERS = [Site("Linear", "layer", instance=f"model.layers.{n}.mlp", device=True) for n in range(8)]
COPY = Site("memcpy h2d", "copy", "torch", "Tensor.to", device=True, attributes=(("direction", "h2d"), ("sync", True)))
IN_A_REQUEST = 20
LEVELS = 4


def trace_of(count: int) -> Trace:
    """A trace of so many spans, the same at each run."""
    chance = random.Random(7)
    spans: list[Span] = []
    while len(spans) < count:
        root = len(spans) + 1
        start = root * 1_000 + chance.randrange(10_000)
        thread = root // IN_A_REQUEST % 8
        parts: list[tuple[Site, int, int, int]] = [
            (REQUESTS[chance.randrange(3)], 0, 0, 100_000), (QUEUE, root, 0, 2_000), (PREPARE, root, 2_500, 4_000),
            (NEXT, root, 4_100, 4_300), (STEP, root, 5_000, 99_000), (COPY, root + 4, 6_000, 7_000),
        ]  # fmt: skip
        parts += [(LAYERS[n % 8], root + 4, 8_000 + n * 6_000, 13_500 + n * 6_000) for n in range(14)]
        for place, (site, parent, begin, end) in enumerate(parts):
            span = Span(site, root + place, parent, root, thread, 0, start + begin, start + end, end - begin, 0)
            if site.device and chance.random() < 0.7:
                at = span.start_ns + chance.randrange(20_000)
                stretch = DeviceInterval(chance.randrange(2), chance.randrange(4), at, at + chance.randrange(1, 12_000))
                span.device = (stretch,)
            if site is COPY:
                span.attributes = {"bytes": 65_536}
            spans.append(span)
    del spans[count:]
    assign_self_times(spans)
    end_ns = max(span.end_ns for span in spans)
    return Trace(Origin(1, "bench", 0, 1_700_000_000 * 10**9), 0, end_ns, spans, {n: f"worker {n}" for n in range(8)})


def allocations_of(trace: Trace, count: int) -> list[Allocation]:
    """So many, on all threads, of the host and a device: nearly half of them frees of what came shortly before."""
    chance = random.Random(7)
    found: list[Allocation] = []
    live: list[tuple[int, int, int]] = []
    total = {HOST: 0, 0: 0}
    for number in range(count):
        if live and chance.random() < 0.495:
            device, address, size = live.pop(-chance.randrange(1, min(len(live), 50) + 1))
            size = -size
        else:
            device, address, size = chance.choice((HOST, 0)), (7 << 45) + number * 512, chance.randrange(1, 1 << 20)
            live.append((device, address, size))
        total[device] += size
        at_ns = number * trace.end_ns // count
        found.append(Allocation(device, at_ns, chance.randrange(8), size, address, total[device], total[device]))
    return found


def memory_mb(field: str) -> float:
    """`VmRSS` or, since it was last forgotten, the greatest of it: `VmHWM`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def child(view: str, count: int) -> None:
    """Make the view, print it to nowhere, and say what that took."""
    trace = trace_of(count)
    if view == "memory":
        trace.allocations, trace.watched = allocations_of(trace, count), (0, trace.end_ns)
    Path("/proc/self/clear_refs").write_text("5")  # forget what making the trace took at most
    before_mb = memory_mb("VmRSS")
    start = time.perf_counter()
    made([view], Recording.of_trace(trace), Options(rows=50))[view].lines()
    print(f"{time.perf_counter() - start} {memory_mb('VmHWM') - before_mb}")


def by_view(views: list[str], count: int) -> None:
    print(f"{count} spans{'':<14}{'seconds':>8}{'MB more':>9}")
    for view in views:
        arguments = [sys.executable, __file__, "--child", "--spans", str(count), "--view", view]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True)
        seconds, more_mb = map(float, done.stdout.split())
        missed = " over the target" if seconds > TARGET_S or more_mb > TARGET_MB else ""
        print(f"{view:<28}{seconds:8.2f}{more_mb:9.0f}{missed}")


def live(paths: int, calls: int = 20) -> tuple[float, float, int]:
    """Milliseconds until the events view of a recorder with so many call paths is there, and until its tally is."""
    recorder = Recorder(ring_bytes=1 << 22)
    recorder.on = True
    width = max(round(paths ** (1 / LEVELS)), 2)
    sites = [[Site(f"level{level}.{n}", "op") for n in range(width)] for level in range(LEVELS)]

    def descend(level: int) -> None:
        for site in sites[level]:
            for _ in range(calls if level == LEVELS - 1 else 1):
                frame = recorder.open(site)
                if level < LEVELS - 1:
                    descend(level + 1)
                recorder.close(frame)

    threads = [threading.Thread(target=descend, args=(0,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.tally()
    start = time.perf_counter()
    tally = recorder.tally()
    between = time.perf_counter()
    recording = Recording(lambda: tally, lambda: Trace(Origin(1, "", 0, 0), 0, 0, []))
    events(recording, Options(threads="merged", rows=50)).lines()
    end = time.perf_counter()
    return (end - start) * 1e3, (between - start) * 1e3, len(tally)


def by_size() -> None:
    print(f"\n{'call paths':<12}{'lines of the tally':>20}{'tally, ms':>12}{'in all, ms':>12}")
    for paths in (100, 300, 1_000, 3_000, 10_000):
        whole_ms, tally_ms, lines = min(live(paths) for _ in range(3))
        missed = " over the target" if whole_ms > TARGET_LIVE_MS else ""
        print(f"{paths:<12}{lines:>20}{tally_ms:>12.1f}{whole_ms:>12.1f}{missed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=1_000_000)
    parser.add_argument("--view", choices=VIEWS, help="this one alone")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.view, options.spans)
        return
    by_view([options.view] if options.view else list(VIEWS), options.spans)
    by_size()


if __name__ == "__main__":
    main()
