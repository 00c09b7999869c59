"""A loader of damaged trace files and profiles: `python tests/fuzz_traces.py [inputs] [seed]`.

The result of a load must be a trace or a `TraceError`, in bounded memory, and every view of a trace must work. If not,
the program prints the input and exits with 1. The seed determines the inputs. The program writes each input to a file
for `load`.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raw_spans import counted
from tallies import by_keys

from instrument import chrome
from instrument.errors import ProfileError, TraceError
from instrument.profile import keys
from instrument.profile.model import SORT_KEYS, VIEWS
from instrument.recording.spans import (
    HOST,
    WORK,
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
from instrument.recording.tally import Tally
from instrument.recording.trace_context import RemoteParent
from instrument.report.explanation import RequestChoice, explain
from instrument.report.section import format_summary, summary_document
from instrument.report.view import Options, Recording, make_json_values
from instrument.sessions.window import Windows
from instrument.trace.trace import Allocation, Trace

MOST_BYTES = 500 << 20
SLOWEST_S = 20.0
WINDOW = RequestChoice(since_ns=0, until_ns=10**6)
VIEWS_EACH = 5
"""Number of inputs for each of which every view is made once."""

JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 1.5, -0.0, 7, 10**11, 10**12, 10**13, 2**31, 2**53, 2**62, 2**63 - 1, -(2**63), 2**63,
    2**64, 10**400, 1e308, 1e-320, "", "X", "b", "e", "0x5", "\x00", "\ud800", "\u00e9", "\U0001f600", [], [[]], [1],
    {}, {"name": 5}, {"local": "0x1"}, {"local": 7}, [[-1, 0]], [[0, 0]],
]  # fmt: skip
SCHEDULES = [
    b"schedule: [2, 10]\n",
    b"schedule: {skip_first: 5, closed: 1, ready: 1, record: 4, repeat: 0}\nfunctions: [{match: 'a.b:*'}]\n",
    b"schedule:\n  record: 1\n  step: chat.engine:Engine.step\nfunctions:\n- match: chat.engine:**\n  phase: compute\n",
]
ATTRIBUTES = {"bytes": 64, "route": "/a", "ok": True, "x": 1.5}
BYTES = [b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\x00", b"\xff", b"\xc3", b"0", b"9", b"-", b".", b"e", b" "]


def sample_trace(seed: int) -> tuple[Trace, Tally | None]:
    """A small trace that has a little of everything."""
    chance = random.Random(seed)
    sites = [
        Site("handle", "request", "chat.server", "handle", "server.py", 10),
        Site("step\u00e9" if seed % 2 else "step", "op"),
        Site("Linear", "layer", instance="model.0", device=True, attributes=(("shape", (4, 8)),)),
        Site("h2d", "copy"),
    ]
    spans: list[Span] = []
    for span_id in range(1, 1 + chance.randrange(1, 14)):
        above = chance.choice([None, *spans])
        start = chance.randrange(50) if above is None else above.start_ns - 1000 + chance.randrange(5)
        total = chance.randrange(40)
        interval = DeviceInterval(
            chance.randrange(2), 7, 1000 + start, 1010 + start, chance.choice(["exclusive", "stale"])
        )
        spans.append(
            Span(
                chance.choice(sites),
                span_id,
                0 if above is None else above.span_id,
                span_id if above is None else above.root_id,
                chance.choice([11, 12]),
                chance.choice([0, 0, 2**47 + 16, 5]),
                1000 + start,
                1000 + start + total,
                chance.choice([total, total // 2]),
                chance.choice([total, total // 3]),
                chance.choice([None, None, "ValueError", 'a"b']),
                chance.choice(
                    [{}, {}, {"bytes": 64, "route": "/a", "ok": True, "x": 1.5}, {"shape": (1, 2), "n": None}]
                ),
                chance.choice([(), (), (interval,), (interval, interval)]),
                chance.random() < 0.2,
                chance.choice([None, None, None, RemoteParent(5, 6, 1)]),
            )
        )
    facts: dict[str, Any] = {}
    if seed % 3 == 0:
        samples = (Sample("power", 0, 1001, 5.5), Sample("power", 0, 1002, None))
        facts = {"samples": samples, "gpus": (Gpu(0, "H200", "GPU-a"),), "cost": Cost(5, 1.5, 100), "notes": ("x",)}
    if seed % 3 == 1:
        facts = {
            "kernels": [Kernel("gemm", chance.choice(WORK), 0, 7, 1010, 1020, chance.choice([0, 11]), 1005)],
            "allocations": [
                Allocation(
                    chance.choice([HOST, 0, 1]), 990 + 7 * n - chance.choice([0, 0, 9]), chance.choice([11, 12, 13]),
                    chance.randrange(-64, 64), n % 3 << chance.choice([0, 45]), chance.randrange(-9, 99), 128
                )
                for n in range(chance.randrange(20))
            ],
            "watched": (1001, 1090),
            "flops": [Flops(chance.choice([0, 11]), 1005, 2_000_000)],
        }  # fmt: skip
    if seed % 3 == 2:
        imports = (ImportTime("torch", 2, 90, 70, 5, 3), ImportTime("chat\u00e9", 1, 9, 9))
        firsts = tuple(FirstCall(site, 950 + chance.randrange(100), chance.randrange(30)) for site in sites)
        startup = Startup(950, chance.choice([None, 900]), chance.choice([None, (), imports]), firsts[seed % 4 :])
        facts = {"startup": startup}
    trace = Trace(Origin(4711, "chat", 0, 10**18), 1000, 1100, spans, {11: "Main", 12: "w\n"}, {"lost": 3}, **facts)
    return trace, counted(spans, trace.threads) if seed % 2 else None


def foreign(seed: int) -> str:
    """A trace as other profilers write one."""
    chance = random.Random(seed)
    events = [
        {
            "ph": chance.choice("XXXXBEbeMiC"),
            "name": chance.choice(["linear", "thread_name", "process_name", "ProfilerStep#3", "ProfileStep#2[1.5 ms]"]),
            "cat": chance.choice(["cpu_op", "kernel"]),
            "pid": chance.choice([0, 9, "nine"]),
            "tid": chance.choice([1, 7, "text", None]),
            "ts": chance.choice([1, 1.5, 10, 1e15]),
            "dur": chance.choice([0, 0.25, 7]),
            "id": chance.choice([1, "0x5"]),
            "args": chance.choice([{}, {"name": "x", "bytes": 5, "grid": [1]}]),
        }
        for _ in range(chance.randrange(12))
    ]
    for number in range(chance.randrange(9) if seed % 2 else 0):
        category = chance.choice(
            ["cpu_op", "cuda_runtime", "cuda_driver", "kernel", "gpu_memcpy", "gpu_user_annotation"]
        )
        args = {"External id": number, "correlation": number // 2, "device": 0, "stream": 7, "shapes": [[1], {}]}
        kept = chance.sample(sorted(args), chance.randrange(6))
        events.append({
            "ph": "X", "cat": category, "pid": 9, "tid": chance.choice([1, 7]), "name": f"caf\u00e9 {number % 3}",
            "ts": chance.choice([round(chance.uniform(-9, 1e13), 3), chance.randrange(99), chance.random() * 1e6]),
            "dur": chance.choice([chance.randrange(9), round(chance.random() * 99, 3), 1e-7]),
            "args": {key: args[key] for key in kept} | {"rate": chance.random(), "on": chance.random() < 0.5, "no": {}},
        })  # fmt: skip
    for _ in range(chance.randrange(4) if seed % 4 == 0 else 0):
        facts = {"Bytes": chance.randrange(-9, 9), "Device Type": chance.randrange(2), "Device Id": 0, "Addr": 5}
        events.append({"ph": "i", "name": "[memory]", "pid": 9, "tid": 7, "ts": chance.randrange(9), "args": facts})
    for name, shapes in (("aten::mm", [[3, 4], [4, 5]]), ("aten::convolution", [[4, 4, 32, 32], [8, 2, 3, 3]])):
        values = ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "2"]
        facts = {"Input Dims": shapes, "Concrete Inputs": values}
        when = {"ph": "X", "pid": 9, "tid": 7, "ts": chance.randrange(9), "dur": chance.randrange(4)}
        if seed % 4 == 1:
            events.append({"name": name, "cat": "cpu_op", "args": facts, **when})
    return json.dumps(events if seed % 2 else {"traceEvents": events, "baseTimeNanoseconds": 5})


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*way, key)
        yield from places(item, (*way, key))


def changed_document(chance: random.Random, text: bytes) -> bytes:
    """One to three values replaced, removed, repeated or exchanged for others of the document."""
    found: Any = json.loads(text)
    for _ in range(chance.randrange(1, 4)):
        ways = list(places(found))
        if not ways:
            break
        *way, last = chance.choice(ways)
        inner = found
        for key in way:
            inner = inner[key]
        act = chance.randrange(4)
        if act == 0:
            del inner[last]
        elif act == 1 and isinstance(inner, list):
            inner.insert(chance.randrange(len(inner) + 1), inner[last])
        elif act == 2:
            source: Any = found
            for key in chance.choice(ways):
                if isinstance(source, (dict, list)) and (
                    key in source if isinstance(source, dict) else key < len(source)
                ):
                    source = source[key]
            inner[last] = json.loads(json.dumps(source))
        else:
            inner[last] = copy.deepcopy(chance.choice(JUNK))
    style: dict[str, Any] = chance.choice([{}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}])
    return json.dumps(found, **style).encode("utf-8", "surrogatepass")


def changed_bytes(chance: random.Random, data: bytes) -> bytes:
    """One to four bytes or stretches changed, or the end cut off."""
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(data) + 1)
        act = chance.randrange(6)
        if act == 0:
            data = data[:at]
        elif act == 1:
            data = data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
        elif act == 2:
            data = data[:at] + chance.choice(BYTES) * chance.choice([1, 1, 1, 50, 2000]) + data[at:]
        elif act == 3:
            data = data[:at] + data[at + chance.randrange(30) :]
        elif act == 4:
            data = data[:at] + data[at - chance.randrange(60) : at] + data[at:]
        elif data:
            data = data[:at] + bytes([data[at - 1] ^ 1 << chance.randrange(8)]) + data[at:]
    return data


def facts(loaded: tuple[Trace, Tally]) -> Any:
    """Return what was loaded, by value."""
    trace, tally = loaded
    ordered = sorted(trace.spans, key=lambda span: (span.start_ns, -span.end_ns, span.span_id))
    spans = [[getattr(span, name) for name in Span.__slots__ if name != "site"] + [span.site.key] for span in ordered]
    rows = by_keys(tally)
    others = [getattr(trace, name) for name in Trace.__slots__ if name != "spans"]
    return repr((spans, others, rows, tally.threads))


def inputs(folder: Path, chance: random.Random) -> Iterator[bytes]:
    """Damaged files without end."""
    whole = []
    for seed in range(40):
        whole.append(chrome.dump(folder / "whole.json", *sample_trace(seed)).read_bytes())
        whole.append(foreign(seed).encode())
    while True:
        data = chance.choice(whole)
        change: Callable[[random.Random, bytes], bytes] = chance.choice([changed_document, changed_bytes])
        data = change(chance, data)
        packed = chance.randrange(5)
        if packed == 0:
            data = gzip.compress(data, 1)
        elif packed == 1:
            data = changed_bytes(chance, gzip.compress(data, 1))
        yield data


def fuzz_traces(folder: Path, count: int, seed: int) -> Counter[str]:
    """Load damaged files; how many loaded and how many were refused."""
    chance = random.Random(seed)
    found: Counter[str] = Counter()
    slowest = 0.0
    for number, data in zip(range(count), inputs(folder, chance), strict=False):
        path = folder / "damaged"
        path.write_bytes(data)
        started = time.process_time()
        try:
            try:
                saved = chrome.read(path)
                chrome.load(path)
            except TraceError:
                found["refused"] += 1
                continue
            found["loaded"] += 1
            if number % VIEWS_EACH == 0:
                recording = Recording.from_file(saved)
                format_summary(
                    VIEWS, recording, Options(sorted_by=chance.choice(SORT_KEYS), rows=chance.choice([None, 1]))
                )
                json.dumps(summary_document(VIEWS, recording, Options()), allow_nan=False)
                with contextlib.suppress(TraceError):  # without any request
                    explanations = explain(recording, RequestChoice(slowest=2), Options())
                    json.dumps(
                        make_json_values([*explanations, *explain(recording, WINDOW, Options())]), allow_nan=False
                    )
                    [each.lines() for each in explanations]
        except BaseException:
            kept = Path(tempfile.gettempdir(), f"instrument-fuzz-{seed}-{number}")
            kept.write_bytes(data)
            print(f"input {number} of seed {seed}, kept as {kept}:", file=sys.stderr)
            raise
        finally:
            slowest = max(slowest, time.process_time() - started)
    assert slowest < SLOWEST_S, f"one input took {slowest:.1f} s of processor time"
    return found


def fuzz_profiles(folder: Path, count: int, seed: int) -> Counter[str]:
    """Load damaged profiles."""
    chance = random.Random(seed)
    whole = [path.read_bytes()[:1500] for path in sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))]
    whole += SCHEDULES * 2
    found: Counter[str] = Counter()
    path = folder / "profile.yaml"
    for _ in range(count):
        path.write_bytes(changed_bytes(chance, chance.choice(whole)))
        try:
            windows = Windows(keys.load(path).schedule, 0)
            for at_ns in range(1, 50):
                windows.advance_step(at_ns)
            found["loaded"] += 1
        except ProfileError:
            found["refused"] += 1
    return found


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with tempfile.TemporaryDirectory() as folder:
        traces = fuzz_traces(Path(folder), count, seed)
        profiles = fuzz_profiles(Path(folder), count // 10, seed)
    # Not ru_maxrss: that begins with what the process had that started this one.
    status = Path("/proc/self/status").read_text().splitlines()
    peak_bytes = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) << 10
    for what, found in (("traces", traces), ("profiles", profiles)):
        print(f"{what}: {found.total()} inputs, {found['loaded']} loaded, {found['refused']} refused")
    print(f"peak {peak_bytes >> 20} MiB")
    assert peak_bytes < MOST_BYTES, "more memory than a damaged file may ask for"


if __name__ == "__main__":
    main()
