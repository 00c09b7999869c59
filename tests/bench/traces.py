"""The cost of saved traces, with a million spans on threads and as many in tasks: `python tests/bench/traces.py [N]`.

Writing and reading run in processes of their own. The peak memory of each is that of the interpreter, the trace and the
work. The first write of a file also pays the system for new memory, so the best of three writes counts. Times are
wall-clock times, with the processor times next to them. Processor times are more exact on a machine with other work.

On two shared cores a million spans took 1.4 s and 21 MB to save packed as Chrome JSON. They took 2.8 s and 26 MB if
they ran in tasks, and 4.5 s and 13 s of the processor to read back. As a recording they took 0.3 s and 8 MB, 0.4 s and
9 MB in tasks, and 0.25 s to read. If `isal` is not installed, zlib packs instead, more slowly and a little smaller.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SPANS = 1_000_000
OPEN_TASKS = 16
TARGETS = {
    "write .json": 2.0,
    "write .json.gz": 2.0,
    "bytes .json.gz": 25.0,
    "write .npz": 0.3,
    "read .npz": 0.2,
    "bytes .npz": 25.0,
    "report s": 3.0,
    "report MB": 400.0,
}


def make(count: int, in_tasks: bool) -> Any:
    """A service's trace: requests of steps of layers, on four threads, or in sixteen tasks at a time on one."""
    from instrument.recording.spans import DeviceInterval, Origin, Site, Span
    from instrument.trace.trace import Trace

    chance = random.Random(1)
    request = Site("POST /chat", "request" if in_tasks else "op", "chat.server", "handle", "server.py", 10)
    step = Site("engine.step", "op", "chat.engine", "Engine.step", "engine.py", 30)
    layers = [Site("Linear", "layer", instance=f"model.layers.{i}.mlp", device=True) for i in range(2)]
    lanes = OPEN_TASKS if in_tasks else 4
    now = [10**12] * lanes
    nodes: list[tuple[int, int, int | None, Any, int]] = []  # start, lane, place of the parent, site, end
    trees: list[tuple[int, int]] = []
    while len(nodes) < count:
        lane = chance.randrange(lanes)
        at, first = now[lane], len(nodes)
        nodes.append((at, lane, None, request, 0))
        for _ in range(8):
            at += chance.randrange(500, 5000)
            own = len(nodes)
            nodes.append((at, lane, first, step, 0))
            for layer in layers:
                at += chance.randrange(100, 900)
                end = at + chance.randrange(3000, 40000)
                nodes.append((at, lane, own, layer, end))
                at = end
            at += chance.randrange(100, 900)
            nodes[own] = (*nodes[own][:4], at)
        nodes[first] = (*nodes[first][:4], at + 700)
        now[lane] = at + chance.randrange(2000, 90000)
        trees.append((first, chance.randrange(1 << 20) * 64 + 140 * 10**12))
    nodes = nodes[:count]
    ids = {place: number for number, place in enumerate(sorted(range(len(nodes)), key=lambda i: nodes[i][0]), start=1)}
    inside = [0] * len(nodes)
    for start, _, parent, _, end in nodes:
        if parent is not None:
            inside[parent] += end - start
    spans = []
    firsts = iter(trees)
    root, task, following = 0, 0, next(firsts)
    for place, (start, lane, parent, site, end) in enumerate(nodes):
        if following is not None and place == following[0]:
            root, task = following
            following = next(firsts, (-1, 0))
        facts: dict[str, Any] = {"device": ()}  # without attributes they have no dict, as in the recorder's spans
        if parent is None and in_tasks:
            facts["attributes"] = {"http.route": "/chat", "http.status_code": 200}
        if site in layers and chance.random() < 0.1:
            facts["device"] = (DeviceInterval(0, 7, start + 100, end + 500),)
        parent_id = 0 if parent is None else ids[parent]
        identity = ids[place], parent_id, ids[root], 100 if in_tasks else 100 + lane, task if in_tasks else 0
        spans.append(Span(site, *identity, start, end, end - start, end - start - inside[place], **facts))
    threads = {100 + lane: f"worker-{lane}" for lane in range(1 if in_tasks else 4)}
    origin = Origin(1234, "chat", 10**12, 1_700_000_000 * 10**9)
    return Trace(origin, 10**12, max(span.end_ns for span in spans), spans, threads)


def write(count: int, in_tasks: bool, path: str) -> dict[str, float]:
    from instrument import chrome
    from instrument.trace.call_tree import tally_spans

    trace = make(count, in_tasks)
    started = time.perf_counter()
    tally = tally_spans(trace.columns, trace.threads)
    found = {"tally s": time.perf_counter() - started}
    for suffix in (".json", ".json.gz"):
        best = best_processor = float("inf")
        for _ in range(3):
            started, processor = time.perf_counter(), time.process_time()
            written = chrome.dump(path + suffix, trace, tally)
            best = min(best, time.perf_counter() - started)
            best_processor = min(best_processor, time.process_time() - processor)
        found[f"write {suffix}"] = best / count * 1e6
        found[f"write {suffix}, processor"] = best_processor / count * 1e6
        found[f"bytes {suffix}"] = written.stat().st_size / count
    return found | write_recording(path, trace, tally)


def write_recording(path: str, trace: Any, tally: Any) -> dict[str, float]:
    """Return the costs of a recording: to make columns from span objects, and to write and read the columns."""
    from instrument.trace import file
    from instrument.trace.trace import columns_of_spans

    spans = [*trace.spans]
    count, found = len(spans), dict[str, float]()
    works = {
        "columns of spans": lambda: columns_of_spans(spans),
        "write .npz": lambda: file.dump(f"{path}.npz", trace, tally),
        "read .npz": lambda: file.load(f"{path}.npz"),
    }
    for what, work in works.items():
        runs = []
        for _ in range(3):
            started, processor = time.perf_counter(), time.process_time()
            work()
            runs.append((time.perf_counter() - started, time.process_time() - processor))
        best, best_processor = map(min, zip(*runs, strict=True))
        found |= {what: best / count * 1e6, f"{what}, processor": best_processor / count * 1e6}
    found["bytes .npz"] = Path(f"{path}.npz").stat().st_size / count
    return found


def measured(path: str, view: str) -> tuple[float, float, float]:
    """Seconds on the clock and of the processor, and MB at most, of a process that prints a view: the least of two."""
    command = [sys.executable, "-m", "instrument", "report", path, "--view", view]
    runs = []
    for _ in range(2):
        started = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"{' '.join(command)}: exit code {child.returncode}")
        runs.append((time.perf_counter() - started, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024))
    wall_s, processor_s, most_mb = map(min, zip(*runs, strict=True))
    return wall_s, processor_s, most_mb


def main() -> None:
    if sys.argv[1:2] == ["--write"]:
        print(json.dumps(write(int(sys.argv[2]), sys.argv[3] == "tasks", sys.argv[4])))
        return
    count = int(sys.argv[1]) if len(sys.argv) > 1 else SPANS
    rows: list[tuple[str, str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("threads", "tasks"):
            path = f"{folder}/{kind}"
            command = [sys.executable, __file__, "--write", str(count), kind, path]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows += [(kind, what, value) for what, value in json.loads(done.stdout).items()]
            for suffix in (".json", ".json.gz", ".npz"):
                for view in ("events", "device", "requests"):
                    seconds, processor_s, megabytes = measured(path + suffix, view)
                    rows += [
                        (kind, f"report s {view} {suffix}", seconds),
                        (kind, f"report processor s {view} {suffix}", processor_s),
                        (kind, f"report MB {view} {suffix}", megabytes),
                    ]
    print(f"{count} spans; write and read in us a span, bytes a span")
    print(f"{'trace':<10}{'what':<34}{'found':>10}{'target':>10}")
    for kind, what, value in rows:
        target = next(
            (f"{limit:g}" for name, limit in TARGETS.items() if what == name or what.startswith(f"{name} ")), ""
        )
        print(f"{kind:<10}{what:<34}{value:>10.2f}{target:>10}")


if __name__ == "__main__":
    main()
