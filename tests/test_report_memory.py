"""The `memory` view: the rise, its place, and the thread that allocated it, not found by time alone."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_views import is_golden, text_of
from hypothesis import given
from hypothesis import strategies as st
from kineto import Kineto
from paddle_golden import GOLDEN, golden_trace
from test_report_kernels import recordings, span, trace_of
from test_report_places import FAR, NEAR, any_spans, spans_of_tasks

import instrument
from instrument import chrome, cli
from instrument.profile.keys import loads
from instrument.profile.model import STATES
from instrument.recording.spans import HOST, Gpu, Origin, Sample, Site, Span
from instrument.report.kernels_view import NOWHERE, SHARED, UNKNOWN, find_places_of_events
from instrument.report.memory_view import (
    BEFORE,
    CountedAllocations,
    DeviceMemory,
    MemoryView,
    Peak,
    PlaceMemory,
    count_allocations,
    memory,
)
from instrument.report.table import LINE, measure_width
from instrument.report.view import Options, Recording, make_json_values
from instrument.trace.trace import Allocation, Allocations, Trace

MS = 1_000_000
MIB = 1 << 20


def view_of(trace: Trace, **options: Any) -> MemoryView:
    return memory(Recording.from_trace(trace), Options(**options))


def allocations_of(*changes: tuple[int, int, int], device: int = 0, thread: int = 4321) -> list[Allocation]:
    """Return the changes of one allocator: time in ms, size, address."""
    found, total = [], 0
    for at_ms, size, address in changes:
        total += size
        found.append(Allocation(device, at_ms * MS, thread, size, address, total, 0))
    return found


def watched(*spans: Any, allocations: list[Allocation], **facts: Any) -> Trace:
    return trace_of(*spans, allocations=sorted(allocations, key=lambda one: one.at_ns), watched=(0, 100 * MS), **facts)


# ---------------------------------------------------------------- against Paddle's own table


def paddle_trace() -> Trace:
    """The memory events of Paddle's tree, which have no time of their own, at the end of the event that has them."""
    found: list[Allocation] = []

    def walk(event: dict[str, Any], thread: int) -> None:
        for one in event["mem"]:
            assert one["place"] == "Place(gpu:0)"
            at_ns = round(event["end_ms"] * MS) - 1
            found.append(Allocation(0, at_ns, thread, one["bytes"], len(found), 0))
        for child in event["children"]:
            walk(child, thread)

    for events in json.loads((GOLDEN / "paddle_synthetic_input.json").read_text()).values():
        for event in events:
            walk(event, event["tid"])
    trace = golden_trace()
    trace.allocations, trace.watched = sorted(found, key=lambda one: one.at_ns), (0, trace.end_ns)
    return trace


def test_counts_and_sizes_are_those_that_paddle_prints_for_the_op_that_the_place_belongs_to() -> None:
    text = (GOLDEN / "paddle_synthetic_summary.txt").read_text().partition("Memory Summary")[2]
    printed = {line[:50].strip(): [int(word) for word in line[64:].split()] for line in text.splitlines()[6:8]}
    assert set(printed) == {"conv2d dygraph", "matmul dygraph"}
    # Paddle counts for an op what its direct children did; a place of ours is the child itself.
    op_of = {"conv2d compute": "conv2d dygraph"}
    assert {
        op_of.get(use.name, use.name): [
            use.allocations, use.frees, use.allocated_bytes, use.freed_bytes, use.increase_bytes]
        for use in view_of(paddle_trace()).places
    } == printed  # fmt: skip


# ---------------------------------------------------------------- the text


def a_service_beside_torch(tmp_path: Path) -> Trace:
    """A request on one thread, two tasks on another, and a thread without a span that frees what they took."""
    ours = trace_of(
        span("handle", 1, 0, 90 * MS, site=Site("handle", "request")),
        span("", 2, 1 * MS, 30 * MS, parent=1, root=1, site=Site("Linear", "layer", instance="model.up")),
        span("", 3, 30 * MS, 60 * MS, parent=1, root=1, site=Site("Linear", "layer", instance="model.down")),
        span("serve", 4, 0, 50 * MS, thread=77, task=1),
        span("embed", 5, 10 * MS, 60 * MS, thread=77, task=2),
        samples=[
            Sample("process_memory", HOST, 5 * MS, 3000 * MIB), Sample("process_memory_peak", HOST, 5 * MS, 4096 * MIB),
            Sample("torch_allocated", 0, 5 * MS, 10 * MIB), Sample("torch_allocated_peak", 0, 5 * MS, 12.5 * MIB),
            Sample("memory_used", 0, 6 * MS, 70_000 * MIB), Sample("process_memory", HOST, 55 * MS, 3100.5 * MIB),
            Sample("torch_allocated", 0, 55 * MS, 9 * MIB), Sample("torch_allocated_peak", 0, 55 * MS, 80 * MIB),
            Sample("process_memory", HOST, 85 * MS, 3050 * MIB), Sample("process_cpu", HOST, 85 * MS, 50.0),
        ],
        gpus=[Gpu(0, "NVIDIA H200", "GPU-aaaa")], held_from_ns=MS // 2,
    )  # fmt: skip
    file = Kineto()
    for at_ms, size, address, thread, device in (
        (0.2, 3 * MIB, 0xE, 0, 0), (2, 4 * MIB, 0xA, 0, 0), (3, MIB, 0xB, 0, 0), (4, -MIB, 0xB, 0, 0),
        (5, 2 * MIB, 0xC, 77, 0), (20, MIB // 2, 0xD, 77, 0), (35, 1536, 0xF, 0, 0), (40, 16 * MIB, 0x1, 0, -1),
        (61, -4 * MIB, 0xA, 88, 0), (62, -16 * MIB, 0x1, 88, -1), (63, -3 * MIB, 0x7, 88, 0),
    ):  # fmt: skip
        file.memory(round(at_ms * MS), size, address, thread, device=device)
    theirs, _ = chrome.load(file.save(tmp_path / "torch.json"))
    return chrome.join_torch_trace(ours, theirs)


def test_the_layout_of_a_service_with_torch(tmp_path: Path) -> None:
    assert is_golden("memory", text_of(view_of(a_service_beside_torch(tmp_path))))


def test_the_layout_by_thread(tmp_path: Path) -> None:
    assert is_golden("memory_apart", text_of(view_of(a_service_beside_torch(tmp_path), threads="apart", rows=4)))


def test_the_layout_of_a_live_service(tmp_path: Path) -> None:
    live = replace(a_service_beside_torch(tmp_path), allocations=(), watched=None)
    assert is_golden("memory_live", text_of(view_of(live)))


def test_empty_views_name_the_remedy() -> None:
    empty = " ".join(text_of(view_of(trace_of())).split())
    assert "instrument report ours.json --with theirs.json" in empty
    assert "`device: {host: 1s}`" in empty
    assert "not asked for profile_memory=True" in text_of(view_of(trace_of(watched=(0, 5))))


def test_names_of_any_kind_keep_the_lines_whole() -> None:
    for name in ("x" * 300, "名前" * 80, "a\nb\x1b[31m", "", "50%"):
        trace = watched(span(name, 1, 0, 9 * MS), allocations=allocations_of((1, 10**15, 5)))
        trace.threads = {4321: name}
        for threads in ("merged", "apart"):
            lines = view_of(trace, threads=threads).lines()
            assert all(line.isprintable() and measure_width(line) <= LINE for line in lines), lines


# ---------------------------------------------------------------- whose it was


def test_memory_that_another_thread_takes_meanwhile_is_not_counted_for_a_span() -> None:
    """torch.profiler itself counts for an event what any thread took during it."""
    trace = watched(
        span("answer", 1, 0, 90 * MS),
        span("prefetch", 2, 20 * MS, 40 * MS, thread=77),
        allocations=[*allocations_of((10, 100, 1)), *allocations_of((30, 5_000, 2), (35, 70, 3), thread=77)],
    )
    assert {use.name: use.allocated_bytes for use in view_of(trace).places} == {"answer": 100, "prefetch": 5_070}


def test_the_place_of_memory_is_the_innermost_span_if_it_is_known(tmp_path: Path) -> None:
    shown = {(use.name, use.device): use.allocations for use in view_of(a_service_beside_torch(tmp_path)).places}
    assert shown == {
        (UNKNOWN, 0): 1,  # at 0.2 ms, of which the rings do not hold every span any more
        ("Linear (model.up)", 0): 2, ("Linear (model.down)", 0): 1, ("Linear (model.down)", HOST): 1,
        ("serve", 0): 1, (SHARED, 0): 1, (NOWHERE, 0): 0, (NOWHERE, HOST): 0,
    }  # fmt: skip


def test_a_free_counts_at_its_place_and_memory_in_use_at_its_allocation() -> None:
    trace = watched(
        span("load", 1, 0, 20 * MS), span("evict", 2, 30 * MS, 60 * MS, thread=77),
        allocations=[
            *allocations_of((1, 1_000, 1), (2, 500, 2), (3, 20, 3)),
            Allocation(0, 40 * MS, 77, -1_000, 1, 520), Allocation(0, 41 * MS, 77, -64, 9, 456),
        ],
    )  # fmt: skip
    load, evict = view_of(trace).places
    assert (load.name, load.increase_bytes, load.held_bytes) == ("load", 1_520, 520)
    assert (evict.name, evict.increase_bytes, evict.held_bytes) == ("evict", -1_064, 0)
    (device,) = view_of(trace).devices
    assert (device.held_bytes, device.earlier_bytes) == (520, 64)


def test_memory_that_is_taken_again_without_a_word_of_its_free_is_kept_once() -> None:
    view = view_of(watched(allocations=allocations_of((1, 1_000, 1), (2, 300, 1))))
    assert (view.places[0].allocated_bytes, view.places[0].held_bytes) == (1_300, 300)


def test_a_peak_has_its_time_place_and_thread_and_may_lie_before_all() -> None:
    trace = watched(
        span("up", 1, 0, 5 * MS), span("down", 2, 5 * MS, 9 * MS),
        allocations=[
            Allocation(0, 1 * MS, 4321, 10, 1, 110, 2_000), Allocation(0, 6 * MS, 4321, 40, 2, 150, 2_000),
            Allocation(0, 7 * MS, 4321, 0, 3, 150, 2_000), Allocation(0, 8 * MS, 4321, -40, 2, 110, 1_000),
            Allocation(1, 7 * MS, 4321, -40, 8, 60, 0),
        ],
    )  # fmt: skip
    allocated, reserved, other = view_of(trace).peaks
    assert (allocated.peak_bytes, allocated.since_ns, allocated.place) == (150, 6 * MS, "down")
    assert (allocated.begin_bytes, allocated.end_bytes, allocated.thread) == (100, 110, "MainThread")
    assert (reserved.what, reserved.peak_bytes, reserved.end_bytes) == ("reserved", 2_000, 1_000)
    assert (other.device, other.peak_bytes, other.place, other.thread) == (1, 100, BEFORE, "")


def test_options_bound_sort_and_choose(tmp_path: Path) -> None:
    trace = a_service_beside_torch(tmp_path)
    everything = view_of(trace)
    assert [use.name for use in everything.places][:2] == ["Linear (model.down)", "Linear (model.up)"]
    assert view_of(trace, sorted_by="calls").places[0].name == "Linear (model.up)"
    first, rest = view_of(trace, rows=1).places
    assert (first, rest.remaining, rest.device) == (everything.places[0], 7, None)
    assert rest.freed_bytes == sum(use.freed_bytes for use in everything.places[1:])
    assert {one.device for one in view_of(trace, state="CPU").devices} == {HOST}
    gpu = view_of(trace, state="GPU")
    assert {one.device for one in (*gpu.devices, *gpu.places, *gpu.peaks, *gpu.gauged)} == {0}


def test_the_peak_of_a_gauge_is_known_even_between_readings(tmp_path: Path) -> None:
    gauged = {(one.device, one.gauge): one for one in view_of(a_service_beside_torch(tmp_path)).gauged}
    process = gauged[HOST, "process_memory"]
    assert (process.samples, process.growth_bytes, process.most_bytes) == (3, 50 * MIB, 3100.5 * MIB)
    assert (process.most_ns, process.peak_bytes) == (55 * MS, 4096 * MIB)
    assert gauged[0, "torch_allocated"].peak_bytes == 80 * MIB
    assert gauged[0, "memory_used"].peak_bytes is None


# ---------------------------------------------------------------- every number, counted by hand

changes = st.builds(
    Allocation, st.integers(-1, 1), st.integers(-3, 65), st.integers(0, 2), st.integers(-9, 9), st.integers(0, 3),
    st.integers(0, 50), st.integers(0, 50),
)  # fmt: skip


@given(recordings(), st.lists(changes, max_size=25), st.integers(0, 60))
def test_every_number_is_that_of_a_count_by_hand(trace: Trace, found: list[Allocation], held_from_ns: int) -> None:
    trace = replace(trace, allocations=sorted(found, key=lambda one: one.at_ns), held_from_ns=held_from_ns)
    view = view_of(trace)
    inside = [one for one in trace.allocations if 0 <= one.at_ns <= 60]
    assert view.outside == len(found) - len(inside)

    def place_of(one: Allocation) -> str:
        if one.at_ns < held_from_ns:
            return UNKNOWN
        around = [each for each in trace.spans if each.thread_id == one.thread_id
                  and each.start_ns <= one.at_ns < each.end_ns]  # fmt: skip
        innermost = max(around, key=lambda each: (each.start_ns, -each.end_ns, each.span_id), default=None)
        return NOWHERE if innermost is None else innermost.site.name

    def neighbour(at: int, step: int) -> Allocation | None:
        """Return the next or the last allocation at the address."""
        rest = inside[at + 1 :] if step > 0 else inside[:at][::-1]
        same = (one for one in rest if (one.device, one.address) == (inside[at].device, inside[at].address))
        return next(same, None)

    expected: dict[tuple[int, str], list[int]] = {}
    for at, one in enumerate(inside):
        sums = expected.setdefault((one.device, place_of(one)), [0] * 5)
        taken, given = max(one.size_bytes, 0), max(-one.size_bytes, 0)
        held = taken if neighbour(at, 1) is None else 0
        sums[:] = map(int.__add__, sums, (one.size_bytes >= 0, one.size_bytes < 0, taken, given, held))

    def sums_of(use: Any) -> list[int]:
        return [use.allocations, use.frees, use.allocated_bytes, use.freed_bytes, use.held_bytes]

    assert {(use.device, use.name): sums_of(use) for use in view.places} == expected
    for total in view.devices:
        of_it = [sums for (device, _), sums in expected.items() if device == total.device]
        assert sums_of(total) == [sum(column) for column in zip(*of_it, strict=True)]
        frees = [(at, one) for at, one in enumerate(inside) if one.device == total.device and one.size_bytes < 0]
        before = ((one, neighbour(at, -1)) for at, one in frees)
        assert total.earlier_bytes == sum(-one.size_bytes for one, was in before if was is None or was.size_bytes < 0)
    for peak in view.peaks:
        of_device = [one for one in inside if one.device == peak.device]
        is_allocated = peak.what == "allocated"
        levels = [one.allocated_bytes if is_allocated else one.reserved_bytes for one in of_device]
        begin = levels[0] - of_device[0].size_bytes if is_allocated else levels[0]
        assert (peak.begin_bytes, peak.end_bytes, peak.peak_bytes) == (begin, levels[-1], max(begin, *levels))
        if peak.peak_bytes > begin:
            reached = of_device[levels.index(peak.peak_bytes)]
            assert (peak.since_ns, peak.place) == (reached.at_ns, place_of(reached))
        else:
            assert (peak.since_ns, peak.place) == (0, BEFORE)
    apart = view_of(trace, threads="apart").places
    assert all(use.thread for use in apart)
    merged: dict[tuple[int | None, str], list[int]] = {}
    for use in apart:
        sums = merged.setdefault((use.device, use.name), [0] * 5)
        sums[:] = map(int.__add__, sums, sums_of(use))
    assert merged == expected
    bounded = view_of(trace, rows=2).places
    assert [sum(column) for column in zip(*map(sums_of, bounded), strict=True)] == [
        sum(column) for column in zip(*expected.values(), strict=True)
    ]
    assert len(bounded) == min(len(expected), 3)
    assert json.dumps(make_json_values(view))


# ---------------------------------------------------------------- of any kind

any_numbers = st.one_of(NEAR, FAR)
any_changes = st.builds(
    Allocation, st.one_of(st.integers(-1, 2), FAR), st.one_of(NEAR, NEAR, NEAR, FAR), st.integers(0, 3), any_numbers,
    st.one_of(st.integers(0, 4), st.integers(0, 60).map(lambda number: number * 512), FAR), any_numbers, any_numbers,
)  # fmt: skip


def counted_one_by_one(recording: Recording, state: str, apart: bool) -> CountedAllocations:
    """The same, an allocation after the other."""
    trace = recording.trace
    its = [one for one in trace.allocations if 0 <= one.at_ns <= 62]
    points = (np.array([getattr(one, name) for one in its], dtype=np.int64) for name in ("thread_id", "at_ns"))
    where = find_places_of_events(recording, *points)
    uses: dict[tuple[int, str, str, str], list[int]] = {}
    sums: dict[int, list[int]] = {}
    levels: dict[tuple[int, str], list[Any]] = {}
    holders: dict[tuple[int, int], tuple[list[int], list[int], int]] = {}
    earlier, threads = dict[int, int](), dict[str, None]()
    for one, number in zip(its, where.number.tolist(), strict=True):
        if state != "All" and (one.device == HOST) != (state == "CPU"):
            continue
        place, kind = where.names[number]
        thread, size = f"thread {one.thread_id}", one.size_bytes
        threads[thread] = None
        use = uses.setdefault((one.device, place, kind, thread if apart else ""), [0] * 5)
        of = sums.setdefault(one.device, [0] * 5)
        before = holders.pop((one.device, one.address), None)
        for held, held_of, held_bytes in [] if before is None else [before]:
            held[4] -= held_bytes
            held_of[4] -= held_bytes
        for each in (use, of):
            taken, given = max(size, 0), max(-size, 0)
            each[:] = map(int.__add__, each, [size >= 0, size < 0, taken, given, taken])
        if size >= 0:
            holders[one.device, one.address] = use, of, size
        earlier[one.device] = earlier.get(one.device, 0) + (max(-size, 0) if before is None else 0)
        for what, first in (("allocated", one.allocated_bytes - size), ("reserved", one.reserved_bytes)):
            now = getattr(one, f"{what}_bytes")
            level = levels.setdefault((one.device, what), [first, 0, BEFORE, "", first, 0])
            if now > level[0]:
                level[:4] = now, one.at_ns, place, thread
            level[5] = now
    return CountedAllocations(
        [PlaceMemory(*key, *found) for key, found in uses.items()],
        [Peak(*key, *level) for key, level in sorted(levels.items()) if level[0] or key[1] == "allocated"],
        [DeviceMemory(device, *found, earlier[device]) for device, found in sorted(sums.items())],
        list(threads),
        len(trace.allocations) - len(its),
    )


@given(
    any_spans(), st.lists(any_changes, max_size=60), st.integers(0, 60), st.sampled_from(["native", "other"]),
    st.sampled_from(STATES), st.booleans(), st.booleans(),
)  # fmt: skip
def test_allocations_of_any_kind_are_counted_as_one_after_the_other(
    spans: list[Span], found: list[Allocation], held_from_ns: int, recorder: str, state: str, apart: bool, packed: bool
) -> None:
    """Allocations in any order too: another's file may have them so."""
    trace = Trace(Origin(1, "shop", 0, 0, recorder), 0, 60, spans, watched=(0, 62), held_from_ns=held_from_ns)
    trace.allocations = Allocations.from_objects(found) if packed else found
    recording = Recording.from_trace(trace)
    all_spans = np.ones(len(spans), dtype=np.bool_)
    assert count_allocations(recording, state, apart, all_spans) == counted_one_by_one(recording, state, apart)


def test_memory_is_reported_for_many_tasks_that_take_turns_on_threads() -> None:
    chance = random.Random(5)
    found = [Allocation(0, 4 * at, chance.randrange(5), 8, at, at) for at in range(3000)]
    names = {
        use.name for use in view_of(trace_of(*spans_of_tasks(chance), allocations=found, watched=(0, 12_000))).places
    }
    assert {SHARED, "f", "g", "Linear (up)"} <= names


def test_addresses_that_come_and_go_by_the_thousand_are_kept_as_long_as_they_are() -> None:
    chance = random.Random(5)
    found: list[Allocation] = []
    live: dict[tuple[int, int], int] = {}
    for at in range(20_000):
        device, address = chance.randrange(2), chance.choice([64, 512, 8]) * chance.randrange(700)
        taken = live.pop((device, address), None)
        size = chance.randrange(1, 99) if taken is None else -taken
        if taken is None:
            live[device, address] = size
        found.append(Allocation(device, at, 1, size, address, 0))
    (first, second) = view_of(watched(allocations=found)).devices
    for one in (first, second):
        assert one.held_bytes == one.increase_bytes == sum(size for (of, _), size in live.items() if of == one.device)
        assert one.earlier_bytes == 0


def test_times_that_no_clock_reads_are_outside_and_devices_may_be_many() -> None:
    trace = watched(span("f", 1, 0, 9), allocations=[])
    far = Allocations.from_objects(allocations_of((1, 5, 5))).shift_times((1 << 63) - 1)
    view = view_of(replace(trace, allocations=far))
    assert (view.outside, view.places) == (1, ())
    many = [Allocation(device, 5, 4321, 1, 1, 1) for device in range(5000)]
    assert len(view_of(replace(trace, allocations=many)).devices) == 5000


# ---------------------------------------------------------------- files


def test_allocations_are_saved_and_come_back(tmp_path: Path) -> None:
    trace = a_service_beside_torch(tmp_path)
    again, _ = chrome.load(chrome.dump(tmp_path / "both.json.gz", trace))
    assert text_of(view_of(again)) == text_of(view_of(trace))


def test_a_trace_of_torch_alone_is_reported_by_its_own_operators(tmp_path: Path) -> None:
    file = Kineto()
    file.op("aten::linear", 0, 40_000)
    file.op("aten::empty", 10_000, 12_000)
    file.memory(11_000, 4_096, 1, device=-1)
    theirs, _ = chrome.load(file.save(tmp_path / "torch.json"))
    (use,) = view_of(theirs).places
    assert use == PlaceMemory(HOST, "aten::empty", "op", "", 1, 0, 4_096, 0, 4_096)


BESIDE_TORCH = """
import sys, threading, time
import torch
from torch.profiler import ProfilerActivity, profile
import instrument

ours, theirs = sys.argv[1:]
kept = []

def second():
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watching:
        with instrument.scope("decode"):
            time.sleep(0.01)
            kept.append(torch.empty(7_340_032, dtype=torch.uint8))
            passing = torch.ones(1_048_576, dtype=torch.float32)
            del passing
            time.sleep(0.01)
        with instrument.scope("evict"):
            time.sleep(0.01)
            kept.clear()
            time.sleep(0.01)
    watching.export_chrome_trace(theirs)

with instrument.scope("main"):
    thread = threading.Thread(target=second, name="worker")
    thread.start()
    with instrument.scope("inner"):
        mine = torch.empty(123_456, dtype=torch.uint8)
        thread.join()
instrument.dump(ours)
(found,) = instrument.session().views(["memory"], torch_trace=theirs).values()
print([place.name for place in found.places])
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_time_on_a_thread_of_torch_belongs_to_its_scopes_and_not_to_the_main_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.yaml").write_text("device: {host: 10ms}\nexport: {chrome: null}\n")
    (tmp_path / "service.py").write_text(BESIDE_TORCH)
    ours, theirs = str(tmp_path / "ours.json.gz"), str(tmp_path / "theirs.json")
    command = [sys.executable, "-m", "instrument", "run", "--profile", "p.yaml", "--", "service.py", ours, theirs]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=300)
    assert done.stdout == "['decode', 'evict']\n"
    arguments = ["report", ours, "--with", theirs, "--view", "memory"]
    assert cli.main([*arguments, "--json"]) == 0
    view = json.loads(capsys.readouterr().out)["views"]["memory"]
    facts = ("device", "allocations", "frees", "allocated_bytes", "freed_bytes", "increase_bytes", "held_bytes")
    assert {use["name"]: [use[fact] for fact in facts] for use in view["places"]} == {
        "decode": [HOST, 2, 1, 7_340_032 + 4 * 1_048_576, 4 * 1_048_576, 7_340_032, 0],
        "evict": [HOST, 0, 1, 0, 7_340_032, -7_340_032, 0],
    }
    (peak,) = view["peaks"]
    assert (peak["peak_bytes"] - peak["begin_bytes"], peak["place"]) == (7_340_032 + 4 * 1_048_576, "decode")
    process = next(one for one in view["gauged"] if one["gauge"] == "process_memory")
    assert process["peak_bytes"] >= process["most_bytes"] > 2 * 7_340_032
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "decode" in text
    assert "worker" in text


# ---------------------------------------------------------------- live


def test_a_running_service_sees_what_its_process_holds_without_torch() -> None:
    session = instrument.start(loads("device: {nvml: off, host: 10ms}", environ={}))
    assert session is not None
    try:
        block = bytearray(b"x") * (64 * MIB)
        end = time.monotonic() + 60
        while sum(one.name == "process_memory" for one in session.trace().samples) < 3:
            assert time.monotonic() < end
            time.sleep(0.01)
        del block
        view = session.views(["memory"])["memory"]
        assert isinstance(view, MemoryView)
        assert [one.gauge for one in view.gauged] == ["process_memory"]
        assert (view.gauged[0].peak_bytes or 0) >= view.gauged[0].most_bytes > 64 * MIB
        assert "Process: process_memory" in session.summary(views=["memory"])
    finally:
        instrument.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "instrument-nvml"]
