"""A recording in memory: what another process reads there is what the process itself knows, also after it has gone."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import textwrap
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz_recordings import copied, look_at_all, used_of
from readback import rows_in, spans_in
from tallies import path_upwards, rows_of

from instrument import clock, native
from instrument.agent.client import Member
from instrument.agent.end_reports import merge_files
from instrument.agent.live_view import LiveSampler
from instrument.errors import TraceError
from instrument.otlp.export_facts import ExportFacts, Ids, MeteredFacts
from instrument.otlp.recording_reader import RecordingReader
from instrument.profile.model import Capture
from instrument.recorder.recorder import Recorder
from instrument.recording import memory, memory_layout
from instrument.recording.export_checkpoint import Progress
from instrument.recording.mapped import INTERVALS, ROWS, Mapped
from instrument.recording.mapped_facts import parse_detail, parse_facts
from instrument.recording.memory import LABELS, IntervalRing, add_samples
from instrument.recording.spans import BATCH_KEYS, BATCH_WEIGHTS, BLOCKED_LOOP, COLLECTION, Sample, Site
from instrument.recording.tally import Tally
from instrument.recording.trace_context import REMOTE
from instrument.trace.file import dump, load
from instrument.trace.of_recording import OPEN, read_spans_and_tally

C_NAMES = {
    "HEADER": "recording_t", "PART": "part_t", "RING": "Ring", "NODE": "node_t", "TOTALS": "totals_t",
    "CHUNK": "chunk_t", "FRAME": "frame_t", "ROW": "row_t", "FACT": "fact_t", "DETAIL": "detail_t",
    "INTERVAL": "interval_t", "ATTRIBUTES": "attributes_t", "SAMPLE": "sample_t",
}  # fmt: skip


@pytest.fixture
def recorder(make_recorder: Any) -> Any:
    """A recorder whose memory others can read."""
    made = make_recorder()
    if made.memory_fd < 0:
        pytest.skip(f"no memory that others can read: {made.no_memory}")
    return made


SUMS = (
    "calls",
    "errors",
    "total_ns",
    "self_ns",
    "waiting_ns",
    "min_ns",
    "max_ns",
    "first_ns",
    "elapsed_ns",
    "moved_bytes",
)


def lines(tally: Tally) -> list[Any]:
    return [
        (
            [site.name for site in path],
            thread_id,
            [getattr(totals, name) for name in SUMS],
            sorted(totals.histogram.items()),
        )
        for path, thread_id, totals in rows_of(tally)
    ]


def details_of(mapped: Mapped) -> dict[int, tuple[int, str | None, dict[str, Any]]]:
    found, _ = mapped.read_details_since(0)
    return {span_id: parse_detail(active_ns, parse_facts(text)) for span_id, (active_ns, text) in found.items()}


def read(recorder: Any) -> Mapped:
    return Mapped(recorder.memory_fd)


def ids_of(mapped: Mapped) -> list[int]:
    return sorted(int(span_id) for ring in mapped.read_rows() for span_id in ring.rows["span_id"])


# -------------------------------------------------------------------- layout


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_the_layout_in_python_is_that_of_the_native_recorder(tmp_path: Path) -> None:
    wanted = [f"sizeof(recording_t) == {memory_layout.HEADER.size}"]
    for name, kind in C_NAMES.items():
        for field, (offset, code) in getattr(memory_layout, name).fields.items():
            is_counted = name == "HEADER" and field in ("ended_rows", "ended_too_short", "reasons")
            member = f"counted.{field}" if is_counted else field
            length = int(code[:-1] or 1) * {"Q": 8, "q": 8, "d": 8, "I": 4, "i": 4, "H": 2, "B": 1, "s": 1}[code[-1]]
            before = " - offsetof(Ring, rows)" if name == "RING" else ""
            wanted.append(f"offsetof({kind}, {member}){before} == {offset}")
            wanted.append(f"sizeof((({kind} *)0)->{member}) == {length}")
    kinds = {"rings": "Ring", "nodes": "node_t", "totals": "totals_t", "chunks": "chunk_t"}
    kinds |= {"intervals": "interval_t", "samples": "sample_t", "rows": "row_t"}
    for part, kind in kinds.items():
        wanted.append(f"sizeof({kind}) <= {memory_layout.STRIDES[part]}")
    wanted.append(f"sizeof(frame_t) == {memory_layout.STRIDES['frames']}")
    asserted = "".join(f'_Static_assert({claim}, "{claim}");\n' for claim in wanted)
    source = Path(native.__file__).with_name("_recorder.c")
    (tmp_path / "layout.c").write_text(f'#include "{source}"\n{asserted}')
    command = ["gcc", "-fsyntax-only", "-w", f"-I{sysconfig.get_path('include')}", tmp_path / "layout.c"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert memory_layout.HEADER.size <= memory_layout.HEADER_BYTES


def test_parts_lie_one_after_another_on_pages_of_every_size() -> None:
    for ring_bytes in (64 << 10, 64 << 20, 3 << 30):
        for is_sparse in (True, False):
            parts, size = memory_layout.plan_parts(ring_bytes, is_sparse=is_sparse)
            end = memory_layout.HEADER.size
            for name, part in parts.items():
                assert end <= part.offset
                assert name == "text" or part.offset % memory_layout.ALIGNED_BYTES == 0
                end = part.offset + part.slots * part.stride
            assert end <= size
            assert parts["rows"].slots * 64 >= ring_bytes


# -------------------------------------------------------------------- what is read


def test_another_reads_the_totals_rows_and_threads_that_the_process_itself_knows(recorder: Any) -> None:
    @lambda f: recorder.wrap(f, Site("outer", "request", "m", "outer", "m.py", 3, "", False, (("rank", 3),)))
    def outer(depth: int) -> None:
        with recorder.scope("inner", attributes={"size": depth, "name": 'a "quoted" ü'}):
            if depth:
                outer(depth - 1)

    def several() -> None:
        for _ in range(50):
            outer(2)

    several()
    thread = threading.Thread(target=several, name="wörker")
    thread.start()
    thread.join()
    with pytest.raises(KeyError), recorder.scope("failing"):
        raise KeyError
    mapped = read(recorder)
    assert lines(mapped.tally()) == lines(recorder.tally())
    assert mapped.tally().threads == recorder.tally().threads
    assert mapped.read_thread_names() == recorder.read_thread_names()
    rows = {row[1]: row for row in rows_in(recorder)}
    assert ids_of(mapped) == sorted(rows)
    tree = mapped.read_tree()
    for ring in mapped.read_rows():
        for row in ring.rows:
            known = rows[int(row["span_id"])]
            assert tree.site(int(row["node"])).key == recorder.find_site(known).key
            assert [int(row[name]) for name in ("parent_id", "root_id", "start_ns", "end_ns", "children_ns")] == [
                known[2], known[3], known[5], known[6], known[7]
            ]  # fmt: skip
    details = details_of(mapped)
    told = {span_id: (row[9], row[10] or {}) for span_id, row in rows.items() if row[9] or row[10]}
    assert {span_id: (error, attributes) for span_id, (_, error, attributes) in details.items()} == told
    assert {site.name: site.attributes for site in mapped.sites()}["outer"] == (("rank", 3),)


def test_call_paths_are_read_anew_only_where_there_are_more(recorder: Any) -> None:
    mapped = read(recorder)
    recorder.wrap(lambda: None, Site("one"))()
    first = mapped.read_tree()
    with recorder.scope("two"):
        assert [site.name for site in path_upwards(mapped.read_tree(), len(mapped.read_tree()) - 1)] == ["two"]
        assert mapped.read_tree() is mapped.read_tree()
        assert mapped.read_tree() is not first
        recorder.wrap(lambda: None, Site("three"))()
    assert [site.name for site in path_upwards(mapped.read_tree(), len(mapped.read_tree()) - 1)] == ["three", "two"]
    recorder.reset()
    recorder.wrap(lambda: None, Site("four"))()
    assert sorted(site.name for site in mapped.sites()) == ["(more call paths than the tally keeps)", "four"]


@pytest.mark.parametrize("part", ["facts", "rows"])
def test_a_site_that_is_first_recorded_during_a_read_is_read_with_its_name(
    recorder: Any, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    mapped, read_head, looks = read(recorder), Mapped._read_head, iter(range(100))
    before = mapped._parts[part]

    def head_of_before(mapped: Mapped) -> Any:
        head = read_head(mapped)
        if next(looks) == 0:  # as if it was read before all of that was recorded
            mapped._parts = {**mapped._parts, part: before}
            mapped._last_head = None, None
        return head

    recorder.wrap(lambda: None, Site("late"))()
    monkeypatch.setattr(Mapped, "_read_head", head_of_before)
    reads = {"facts": mapped.sites, "rows": mapped.read_rows}
    found: dict[str, Any] = {name: reads[name]() for name in sorted(reads, key=part.__ne__)}
    assert [(len(ring.rows), ring.missed) for ring in found["rows"]] == [(1, 0)]
    assert "late" in {site.name for site in found["facts"]}


def test_device_intervals_are_read_as_far_as_their_ring_holds_them(recorder: Any) -> None:
    intervals, mapped = (
        IntervalRing(64 * INTERVALS.itemsize, partial(recorder.find_part_memory, "intervals")),
        read(recorder),
    )
    assert len(mapped.read_intervals()) == 0
    for number in range(1, 300):
        intervals.add_all([(number, 1, 1 << 40, 1000 * number, 1000 * number + 5, "overlapped", 7)])
        found = mapped.read_intervals()
        # The slot that is written next is left out, for another process cannot know whether that has begun.
        assert found["span_id"].tolist() == list(range(max(number - 62, 1), number + 1))
    assert found[-1].tolist() == (299, 1, 1 << 40, 299_000, 299_005, LABELS.index("overlapped"), 7)
    recorder.reset()
    assert len(mapped.read_intervals()) == 0


def test_it_is_said_up_to_when_device_times_are_known(recorder: Any) -> None:
    intervals, mapped = (
        IntervalRing(64 * INTERVALS.itemsize, partial(recorder.find_part_memory, "intervals")),
        read(recorder),
    )
    assert mapped.settled_ns() == 0
    intervals.publish_settled_time(1 << 40)
    assert mapped.settled_ns() == 1 << 40
    recorder.reset()
    assert mapped.settled_ns() == 0


def test_a_look_at_a_run_reports_what_devices_have_worked_since_the_one_before(recorder: Any) -> None:
    recorder.begin_recording(1 << 22, {})
    function, looker = recorder.wrap(lambda: None, Site("decode", device=True)), LiveSampler("run")
    facts = {"pid": os.getpid(), "ended_ns": 0, "joined_ns": 1, "how": "", "service": "", "generation": 1, "digest": ""}
    member = Member(facts, recorder.memory_fd)
    for times in (1, 2):
        for _ in range(times):
            function()
            (ring,) = recorder.rings()
            (*_, row) = rows_in(recorder)
            assert recorder.count_device(ring, row[0], row[6] - row[5], 5_000_000, row[6] - row[5])
        screen = looker.make_screen([member])
        assert [(place.name, place.calls, place.device_ns) for place in screen.places] == [
            ("decode", times, times * 5_000_000)
        ]
        assert any(line.startswith("Where the time goes") and "Device, ms" in line for line in screen.lines())


def test_a_screen_of_a_run_counts_no_time_of_collections_and_blocked_loops_twice(recorder: Any) -> None:
    recorder.begin_recording(1 << 22, {})
    for site in (Site("decode"), COLLECTION, BLOCKED_LOOP):
        recorder.wrap(lambda: None, site)()
    facts = {"pid": os.getpid(), "ended_ns": 0, "joined_ns": 1, "how": "", "service": "", "generation": 1, "digest": ""}
    (place,) = LiveSampler("run").make_screen([Member(facts, recorder.memory_fd)]).places
    assert (place.name, place.ratio) == ("decode", 1.0)


def test_a_look_at_a_run_takes_a_request_to_cost_what_one_costs(recorder: Any) -> None:
    recorder.begin_recording(1 << 22, {})
    for site in (Site("decode"), Site("GET /", kind="request")):
        recorder.wrap(lambda: None, site)()
    facts = {"pid": os.getpid(), "ended_ns": 0, "joined_ns": 1, "how": "", "service": "", "generation": 1, "digest": ""}
    costs = {"call_ns": 100.0, "request_ns": 900.0}
    (process,) = LiveSampler("run").make_screen([Member({**facts, **costs}, recorder.memory_fd)]).processes
    assert process.cost_ratio == pytest.approx(1000 / process.up_ns)


def test_a_look_at_a_run_reports_the_age_also_of_a_request_that_began_as_others_were_looked_at(recorder: Any) -> None:
    recorder.begin_recording(1 << 22, {})
    facts = {"pid": os.getpid(), "ended_ns": 0, "joined_ns": 1, "how": "", "service": "", "generation": 1, "digest": ""}

    class Members(list[Member]):
        def __iter__(self) -> Iterator[Member]:
            with recorder.scope("GET /", kind="request"), recorder.scope("decode"):
                yield from super().__iter__()

    (request,) = LiveSampler("run").make_screen(Members([Member(facts, recorder.memory_fd)])).in_flight
    assert request.age_ns > request.now_ns > 0


def test_readings_of_gauges_are_read_as_far_as_their_ring_holds_them(recorder: Any) -> None:
    mapped = read(recorder)
    told = [Sample("power", 0, at_ns, at_ns / 8) for at_ns in range(1, memory_layout.MOST_SAMPLES + 10)]
    told.append(Sample("temperature", 3, 1 << 40, None))
    add_samples(recorder.find_part_memory("samples"), told)
    assert mapped.read_samples() == told[-memory_layout.MOST_SAMPLES + 1 :]


def test_open_spans_are_named_with_their_parents_threads_and_begins(recorder: Any) -> None:
    seen: list[Any] = []

    def body() -> Iterator[int]:
        with recorder.scope("inside"):
            yield 1

    generator = recorder.wrap(body, Site("generator"))()
    next(generator)

    def function() -> None:
        seen.extend(read(recorder).open_spans())

    with recorder.scope("outer"), recorder.scope("inner"):
        recorder.wrap(function, Site("function"))()
    by_name = {span.site.name: span for span in seen}
    assert [span.site.name for span in seen] == ["generator", "inside", "outer", "inner", "function"]
    assert by_name["function"].parent_id == by_name["inner"].span_id
    assert by_name["inner"].parent_id == by_name["outer"].span_id
    assert by_name["inside"].parent_id == by_name["generator"].span_id
    assert {span.thread_id for span in seen} == {threading.get_native_id()}
    assert all(0 < before.start_ns <= after.start_ns for before, after in pairwise(seen))
    generator.close()
    assert read(recorder).open_spans() == []


def test_open_spans_are_in_the_memory_of_a_recorder_that_begins_again_next_to_another_one(make_recorder: Any) -> None:
    first, other = make_recorder(), make_recorder()
    with other.scope("before"):
        first.begin_recording(1 << 22, {})
        with first.scope("outer"), first.scope("inner"):
            assert [span.site.name for span in read(first).open_spans()] == ["outer", "inner"]


def test_open_spans_bear_what_they_were_given_and_annotated_with(make_recorder: Any) -> None:
    recorder = make_recorder(1 << 24)
    if recorder.memory_fd < 0:
        pytest.skip(recorder.no_memory)
    long = {f"name {number}": "x" * 100 for number in range(9)}
    with (
        recorder.scope("request", kind="request", attributes={"id": 'an "id"', "tokens": [1, 2]}) as request,
        recorder.scope("plain") as plain,
        recorder.scope("long", attributes=long),
        recorder.scope("long request", kind="request", attributes=long),
    ):
        before = {span.site.name: dict(span.attributes) for span in read(recorder).open_spans()}
        request.annotate(user="ü", ratio=0.5)
        plain.annotate({"step": 3})
        after = {span.site.name: dict(span.attributes) for span in read(recorder).open_spans()}
        some = {f"text {place}": "more than the details of rows have room for" for place in range(40)}
        for _ in range(8_000):
            with recorder.scope("many", attributes=some):
                pass
        mapped = read(recorder)
        assert {span.site.name: dict(span.attributes) for span in mapped.open_spans()} == after
        lost = read_spans_and_tally(mapped).trace.losses["errors and attributes of spans overwritten by newer ones"]
        assert 0 < lost < 8_000
        told = read_spans_and_tally(mapped).trace.columns
    assert before == {
        "request": {"id": 'an "id"', "tokens": [1, 2]}, "plain": {}, "long": dict([*long.items()][:4]),
        "long request": dict([*long.items()][:4]),
    }  # fmt: skip
    assert after["request"] == {**before["request"], "user": "ü", "ratio": 0.5}
    assert after["plain"] == {"step": 3}
    assert len(told.span_id[told.clipped]) == 4


def test_batches_of_many_keys_are_reported_whole_and_what_is_too_long_is_counted(recorder: Any) -> None:
    batches = [{f"{number:036x}": number for number in range(count)} for count in (1, 127, 200, 1024) * 20]
    for batch in batches:
        with recorder.scope("step", batch=batch):
            pass
    with recorder.scope("long", batch=["x" * 128] * 1024):
        pass
    with (
        pytest.raises(KeyError),
        recorder.scope("failing", attributes={f"of a batch {at}": ["y" * 200] * 128 for at in range(3)}),
    ):
        raise KeyError
    mapped = read(recorder)
    told = sorted(details_of(mapped).items())
    assert [attributes for _, (_, _, attributes) in told[:-2]] == [
        {BATCH_KEYS: [*batch], BATCH_WEIGHTS: [*batch.values()]} for batch in batches
    ]
    assert [([*attributes], error) for _, (_, error, attributes) in told[-2:]] == [
        ([], None),
        (["of a batch 0", "of a batch 1"], "KeyError"),  # those that fit
    ]
    assert mapped.losses()["details that only the process itself could read"] == 2


def test_tasks_that_wait_are_open(recorder: Any) -> None:
    async def one(name: str, begun: asyncio.Event, go: asyncio.Event) -> None:
        with recorder.scope(name):
            begun.set()
            await go.wait()

    async def main() -> list[str]:
        go, begun = asyncio.Event(), [asyncio.Event() for _ in range(20)]
        tasks = [asyncio.ensure_future(one(f"task {number}", event, go)) for number, event in enumerate(begun)]
        for event in begun:
            await event.wait()
        names = [span.site.name for span in read(recorder).open_spans()]
        go.set()
        await asyncio.gather(*tasks)
        return names

    assert asyncio.run(main()) == [f"task {number}" for number in range(20)]
    assert read(recorder).open_spans() == []


def test_rows_and_open_spans_bear_the_tasks_that_the_process_itself_reports(recorder: Any) -> None:
    async def one(begun: asyncio.Event, go: asyncio.Event) -> None:
        with recorder.scope("ended"):
            pass
        with recorder.scope("open"):
            begun.set()
            await go.wait()

    async def main() -> tuple[dict[int, int], dict[int, int]]:
        go, begun = asyncio.Event(), [asyncio.Event() for _ in range(8)]
        tasks = [asyncio.ensure_future(one(event, go)) for event in begun]
        for event in begun:
            await event.wait()
        own = {row[1]: row[4] for row in rows_in(recorder)}
        own.update({row[1]: row[4] for _, row in recorder.open_rows()})
        columns = read_spans_and_tally(read(recorder)).trace.columns
        go.set()
        await asyncio.gather(*tasks)
        return own, dict(zip(columns.span_id.tolist(), columns.task_id.tolist(), strict=True))

    own, told = asyncio.run(main())
    assert told == own
    assert len(set(own.values())) == 8


def test_a_reader_goes_on_where_it_stood_and_counts_what_was_overwritten(make_recorder: Any) -> None:
    recorder = make_recorder(1 << 16)
    if recorder.memory_fd < 0:
        pytest.skip(recorder.no_memory)
    function = recorder.wrap(lambda: None, Site("f"))
    mapped = read(recorder)
    heads: dict[int, int] = {}
    seen, missed = set[int](), 0
    for count in (10, 100, 255, 5000, 3, 0, 1):
        for _ in range(count):
            function()
        for ring in mapped.read_rows(heads):
            heads[ring.ring] = ring.head
            seen.update(ring.rows["span_id"].tolist())
            missed += ring.missed
    assert missed > 0
    assert len(seen) + missed == sum(heads.values()) == 5369
    capacity = recorder.rings()[0].capacity
    assert mapped.losses()["spans overwritten by newer ones"] == 5369 - capacity


def test_only_the_generation_after_a_reset_is_reported(recorder: Any) -> None:
    function = recorder.wrap(lambda: None, Site("before"))
    for _ in range(10):
        function()
    mapped = read(recorder)
    first = mapped.header.generation
    with recorder.scope("open"):
        recorder.reset()
        recorder.wrap(lambda: None, Site("after"))()
        assert mapped.header.generation == first + 1
        assert [row.path[-1].name for row in mapped.tally().iterate_totals()] == ["after"]
        assert sum(len(ring.rows) for ring in mapped.read_rows()) == 1
    assert [site.name for site in mapped.sites()].count("before") == 0
    assert sorted(row.path[-1].name for row in mapped.tally().iterate_totals()) == ["after", "open"]


def test_threads_that_have_ended_and_were_given_up_stay_counted(make_recorder: Any) -> None:
    recorder = make_recorder(1 << 16)
    if recorder.memory_fd < 0:
        pytest.skip(recorder.no_memory)
    function = recorder.wrap(lambda: None, Site("f"))
    for _ in range(60):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()
    mapped = read(recorder)
    assert sum(row.totals.calls for row in mapped.tally().iterate_totals()) == 60
    assert recorder.ended_rows > 0
    assert sum(len(ring.rows) for ring in mapped.read_rows()) + recorder.ended_rows == 60


def test_totals_that_change_hands_while_they_are_read_are_read_again(
    make_recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, site = make_recorder(1 << 16), Site("work", "op")

    def in_threads(count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=recorder.record, args=(site, recorder.now_ns() - 5, None))
            thread.start()
            thread.join()

    in_threads(60)
    copied = Mapped._read_slots

    def then_threads_end(self: Mapped, name: str, kind: Any) -> Any:
        found = copied(self, name, kind)
        if name == "totals":
            monkeypatch.setattr(Mapped, "_read_slots", copied)  # once
            in_threads(60)
        return found

    monkeypatch.setattr(Mapped, "_read_slots", then_threads_end)
    totals = [totals for _, _, totals in rows_of(read(recorder).tally())]
    assert [one.calls for one in totals] == [sum(one.histogram.values()) for one in totals]
    assert sum(one.calls for one in totals) == 120


def metered(mapped: Mapped) -> list[str]:
    facts = ExportFacts(Ids((1, 2, 3)), {}, Capture(), 100, MeteredFacts(0))
    return [
        row.path[-1].name
        for row in RecordingReader(mapped, Progress(), facts).read_totals(merged=True).iterate_totals()
    ]


READS = {
    "open spans": lambda mapped: [span.site.name for span in mapped.open_spans()],
    "a trace": lambda mapped: [span.site.name for span in read_spans_and_tally(mapped).trace.spans if span.clipped],
    "totals": metered,
}
"""The readers of a recording, which return names of sites."""


@pytest.mark.parametrize("part", ["nodes", "rings", "frames"])
@pytest.mark.parametrize("what", READS)
def test_a_process_that_meets_new_call_paths_while_it_is_read_is_read_all_the_same(
    recorder: Any, monkeypatch: pytest.MonkeyPatch, what: str, part: str
) -> None:
    recorder.wrap(lambda: None, Site("known", "request"))()
    copied, opened = Mapped._read_slots, ExitStack()

    def then_more_are_met(self: Mapped, name: str, kind: Any) -> Any:
        found = copied(self, name, kind)
        if name == part:
            monkeypatch.setattr(Mapped, "_read_slots", copied)  # once
            for number in range(40):
                recorder.wrap(lambda: None, Site(f"new {number}"))()
                opened.enter_context(recorder.scope(f"new {number}"))
        return found

    with opened:
        if what != "totals":
            opened.enter_context(recorder.scope("known"))
        mapped = read(recorder)
        monkeypatch.setattr(Mapped, "_read_slots", then_more_are_met)
        assert "known" in READS[what](mapped)


def test_rings_of_threads_that_come_and_go_are_all_readable(recorder: Any) -> None:
    function = recorder.wrap(lambda: None, Site("f"))
    held = [threading.Event() for _ in range(3)]
    staying = [threading.Thread(target=lambda event=event: (function(), event.wait())) for event in held]
    for thread in staying:
        thread.start()
    for _ in range(200):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()
    mapped = read(recorder)
    for event, thread in zip(held, staying, strict=True):
        event.set()
        thread.join()
    rings = mapped.read_rows()
    assert sum(len(ring.rows) for ring in rings) == sum(ring.head for ring in rings) == 203 - recorder.ended_rows
    assert "rows that only the process itself could read" not in mapped.losses()


def test_frames_in_private_memory_for_want_of_room_are_counted(recorder: Any) -> None:
    parts, _ = memory_layout.plan_parts(1 << 26, is_sparse=True)

    def deeper(depth: int) -> int:
        return inner(depth - 1) if depth else len(read(recorder).open_spans())

    inner = recorder.wrap(deeper, Site("deep"))
    assert inner(300) == 301
    scopes = [recorder.scope("many") for _ in range(parts["frames"].slots + 100)]
    for scope in scopes:
        scope.__enter__()
    mapped = read(recorder)
    assert len(mapped.open_spans()) <= parts["frames"].slots
    assert mapped.losses()["frames that only the process itself could read"] >= 100
    for scope in reversed(scopes):
        scope.__exit__(None, None, None)
    assert sum(row.totals.calls for row in mapped.tally().iterate_totals() if row.path[-1].name == "many") == len(
        scopes
    )


def test_a_recording_says_whose_it_is_and_whether_its_session_ended_in_order(recorder: Any) -> None:
    recorder.begin_recording(1 << 22, {"origin": {"service": "chat", "digest": "abc"}})
    header = read(recorder).header
    assert (header.pid, header.started, header.state) == (
        os.getpid(),
        clock.read_process_start_ticks(clock.STAT),
        "running",
    )
    assert (header.service, header.origin["digest"]) == ("chat", "abc")
    recorder.write_goodbye()
    assert read(recorder).header.state == "goodbye"


def test_a_recording_begins_with_its_session_also_after_that_has_said_more_of_itself(recorder: Any) -> None:
    recorder.begin_recording(1 << 22, {})
    begun_ns = read(recorder).header.begun_ns
    with recorder.scope("request", kind="request"):
        pass
    recorder.write_facts({"gpus": []})
    assert read(recorder).header.begun_ns == begun_ns
    assert read_spans_and_tally(read(recorder)).trace.start_ns == begun_ns <= spans_in(recorder)[0].start_ns
    recorder.begin_recording(1 << 22, {})
    assert read(recorder).header.begun_ns > begun_ns


def test_a_recording_becomes_a_trace_that_is_saved_and_read_like_any_other(recorder: Any, tmp_path: Path) -> None:
    def items() -> Iterator[int]:
        yield 1

    items = recorder.wrap(items, Site("items"))
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with recorder.scope("request", kind="request", attributes={"route": "/a", REMOTE: caller}):
        assert list(items()) == [1]
    with pytest.raises(KeyError), recorder.scope("failing"):
        raise KeyError
    with (
        recorder.scope("outer", kind="request", attributes={"route": "/b"}),
        recorder.scope("inner", attributes={"told": "before it ends"}),
    ):
        saved = read_spans_and_tally(read(recorder))
        file = dump(tmp_path / "a.npz", saved.trace, saved.tally)
    loaded = load(file).trace
    by_name = {span.site.name: span for span in loaded.spans}
    assert sorted(by_name) == ["failing", "inner", "items", "outer", "request"]
    assert {name for name, span in by_name.items() if span.clipped} == {"outer", "inner"}
    assert {name for name, span in by_name.items() if span.attributes.get(OPEN)} == {"outer", "inner"}
    assert by_name["outer"].attributes["route"] == "/b"
    assert by_name["inner"].attributes["told"] == "before it ends"
    assert by_name["inner"].parent_id == by_name["outer"].span_id
    assert by_name["outer"].self_ns == by_name["outer"].total_ns - by_name["inner"].total_ns
    assert by_name["failing"].error == "KeyError"
    assert by_name["request"].attributes["route"] == "/a"
    remote = by_name["request"].remote
    assert remote is not None
    assert f"{remote.trace_id:x}" == "af7651916cd43dd8448eb211c80319c"
    ours = {span.site.name: span for span in spans_in(recorder)}
    for name in ("request", "items", "failing"):
        for number in ("span_id", "parent_id", "root_id", "start_ns", "end_ns", "active_ns", "self_ns", "thread_id"):
            assert getattr(by_name[name], number) == getattr(ours[name], number), (name, number)
    assert loaded.origin.pid == os.getpid()


def test_notes_do_not_grow_with_each_merged_process(recorder: Any, tmp_path: Path) -> None:
    with recorder.scope("request", kind="request"):
        pass
    saved, before = read_spans_and_tally(read(recorder)), ""
    for pid in range(1, 5):
        origin = replace(saved.trace.origin, pid=pid, service="chat")
        facts = replace(saved.trace, origin=origin, notes=[f"unseen: {pid % 2}"])
        path = str(dump(tmp_path / f"{pid}.npz", facts, saved.tally))
        before = merge_files([path, *([before] if before else [])], str(tmp_path / f"before-{pid}.npz"))["path"]
    assert sorted(load(Path(before)).trace.notes) == ["unseen: 0", "unseen: 1"]


def test_a_recorder_that_goes_closes_its_memory(make_recorder: Any) -> None:
    one = type(make_recorder())(1 << 20)
    one.begin_recording(1 << 20, {})
    fd = one.memory_fd
    os.fstat(fd)
    del one
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# -------------------------------------------------------------------- forks and ends


def in_child(action: Any) -> Any:
    """Return the result of an action in a forked child."""
    back, forth = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(forth, repr(action()).encode())
        finally:
            os._exit(0)
    os.close(forth)
    with os.fdopen(back) as told:
        text = told.read()
    assert os.waitpid(pid, 0)[1] == 0
    return eval(text)


def test_a_forked_child_records_into_a_memory_of_its_own(recorder: Any) -> None:
    function = recorder.wrap(lambda: None, Site("f"))
    for _ in range(10):
        function()
    before = os.fstat(recorder.memory_fd).st_ino

    def child() -> Any:
        with recorder.scope("before it begins anew"):
            pass
        recorder.after_fork_in_child()
        for _ in range(5):
            function()
        mapped = read(recorder)
        return (
            os.fstat(recorder.memory_fd).st_ino != before, mapped.header.pid == os.getpid(), mapped.header.state,
            [(row.path[-1].name, row.totals.calls) for row in mapped.tally().iterate_totals()], len(ids_of(mapped)),
        )  # fmt: skip

    with recorder.scope("around the fork"):
        assert in_child(child) == (True, True, "running", [("f", 5)], 5)
        function()
    mapped = read(recorder)
    assert mapped.header.pid == os.getpid()
    assert lines(mapped.tally()) == lines(recorder.tally())
    assert len(ids_of(mapped)) == 12


@pytest.mark.slow
def test_forks_while_threads_record_leave_parent_and_children_sound(recorder: Any) -> None:
    """More of them in `test_a_storm_of_forks`."""
    _fork_in_a_storm(recorder, 10)


@pytest.mark.slow
def test_a_storm_of_forks(recorder: Any) -> None:
    _fork_in_a_storm(recorder, 200)


def _fork_in_a_storm(recorder: Any, forks: int) -> None:
    function, done = recorder.wrap(lambda: None, Site("f")), threading.Event()
    calls = [0] * 4

    def storm(number: int) -> None:
        while not done.is_set():
            with recorder.scope(f"scope {random.randrange(50)}", attributes={"n": number}):
                function()
            calls[number] += 2

    threads = [threading.Thread(target=storm, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()

    def child() -> Any:
        recorder.after_fork_in_child()
        for _ in range(100):
            with recorder.scope("child"):
                function()
        mapped = read(recorder)
        return lines(mapped.tally()) == lines(recorder.tally()), len(ids_of(mapped)), len(mapped.open_spans())

    try:
        for _ in range(forks):
            assert in_child(child) == (True, 200, 0)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    mapped = read(recorder)
    assert sorted(lines(mapped.tally())) == sorted(lines(recorder.tally()))  # threads may come in another order
    assert sum(row.totals.calls for row in mapped.tally().iterate_totals()) == sum(calls)
    assert mapped.open_spans() == []


def test_descriptors_that_a_service_closes_are_not_mistaken_for_the_memory(recorder: Any) -> None:
    fd = recorder.memory_fd
    os.close(fd)
    try:
        assert recorder.memory_fd == -1
        taken = os.open(os.devnull, os.O_RDONLY)
        os.dup2(taken, fd)
        os.close(taken)
        assert recorder.memory_fd == -1
        recorder.wrap(lambda: None, Site("f"))()
        assert in_child(lambda: (recorder.after_fork_in_child(), recorder.memory_fd >= 0)[1])
    finally:
        os.close(fd)


def test_a_file_outlives_its_process_and_goes_with_an_orderly_end(make_recorder: Any, tmp_path: Path) -> None:
    recorder, folder, held = make_recorder(), tmp_path / "rings", list[Any]()

    def child() -> Any:
        recorder.begin_recording(1 << 16, {"origin": {"service": "in a file"}}, str(folder))
        for _ in range(10):
            recorder.wrap(lambda: None, Site("f"))()
        held.append(recorder.scope("open at the end"))
        held[0].__enter__()
        (path,) = folder.iterdir()
        return (
            recorder.no_memory,
            str(path),
            path.stat().st_mode & 0o777,
            memory.find_abandoned_recordings(folder),
            path == Path(recorder.memory_path),
        )

    no_memory, path, mode, left, is_its = in_child(child)
    if no_memory:
        pytest.skip(no_memory)
    assert (mode, left, is_its) == (0o600, [], True)
    assert memory.find_abandoned_recordings(folder) == [Path(path)]
    with Path(path).open("rb") as file:
        mapped = Mapped(file.fileno())
    assert (mapped.header.state, mapped.header.service) == ("running", "in a file")
    assert [(row.path[-1].name, row.totals.calls) for row in mapped.tally().iterate_totals()] == [("f", 10)]
    assert [span.site.name for span in mapped.open_spans()] == ["open at the end"]
    mapped.close()

    def orderly() -> Any:
        recorder.begin_recording(1 << 16, {}, str(folder))
        recorder.wrap(lambda: None, Site("f"))()
        recorder.write_goodbye()
        recorder.begin_recording(1 << 16, {}, "")  # as another session would
        recorder.wrap(lambda: None, Site("g"))()
        return [str(one) for one in folder.iterdir()], [
            row.path[-1].name for row in read(recorder).tally().iterate_totals()
        ]

    assert in_child(orderly) == ([path], ["g"])


def test_files_that_were_left_go_the_oldest_first_where_there_is_no_room_for_all(tmp_path: Path) -> None:
    for number in range(4):
        made = memory.make_memory(1 << 16, str(tmp_path))
        Path(made.path).rename(tmp_path / f"99999{number}-1.recording")
        os.utime(tmp_path / f"99999{number}-1.recording", (number, number))
        if number == 1:
            alive = made.fd
        else:
            os.close(made.fd)
    (tmp_path / "a file of the service's.recording").write_text("")
    assert [path.name for path in memory.find_abandoned_recordings(tmp_path)] == [
        f"99999{number}-1.recording" for number in (0, 2, 3)
    ]
    made = memory.make_memory(1 << 16, str(tmp_path), disk_bytes=2 * made.size_bytes)
    os.close(made.fd)
    os.close(alive)
    assert sorted(path.name[:6] for path in tmp_path.iterdir()) == sorted(
        ["a file", "999991", "999993", Path(made.path).name[:6]]
    )


def test_a_forked_child_has_a_file_of_its_own(make_recorder: Any, tmp_path: Path) -> None:
    recorder = make_recorder()

    def parent() -> Any:
        recorder.begin_recording(1 << 16, {}, str(tmp_path))
        if recorder.no_memory:
            return [recorder.no_memory]

        def child() -> Any:
            recorder.after_fork_in_child()
            recorder.wrap(lambda: None, Site("f"))()
            return recorder.memory_path, [row.totals.calls for row in read(recorder).tally().iterate_totals()]

        path, calls = in_child(child)
        return recorder.no_memory, path != recorder.memory_path, calls, len(list(tmp_path.iterdir()))

    no_memory, *found = in_child(parent)
    if no_memory:
        pytest.skip(no_memory)
    assert found == [True, [1], 2]


VICTIM = """
    import asyncio, os, socket, sys, threading, time
    from instrument.recorder.recorder import RECORDER
    from instrument.recording.spans import Site

    RECORDER.begin_recording(1 << 20, {"origin": {"service": "victim"}})
    RECORDER.on = True
    with socket.socket(fileno=int(sys.argv[1])) as other:
        socket.send_fds(other, [b"x"], [RECORDER.memory_fd])

    def inner(n):
        return n
    inner = RECORDER.wrap(inner, Site("inner"))

    def items(n):
        for i in range(n):
            with RECORDER.scope("item"):
                inner(i)
                yield i
    items = RECORDER.wrap(items, Site("items"))

    async def request(number):
        with RECORDER.scope("request", kind="request", attributes={"number": number}):
            for i in items(5):
                await asyncio.sleep(0)

    async def main():
        with RECORDER.scope("serving"):
            number = 0
            while True:
                await asyncio.gather(*(request(number + i) for i in range(10)))
                number += 10

    def worker():
        with RECORDER.scope("working"):
            while True:
                for i in items(3):
                    pass
                time.sleep(0)

    threading.Thread(target=worker, daemon=True).start()
    asyncio.run(main())
"""


def _victim() -> tuple[subprocess.Popen[bytes], Mapped]:
    import socket

    ours, others = socket.socketpair()
    with ours, others:
        others.set_inheritable(True)
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(VICTIM), str(others.fileno())], pass_fds=[others.fileno()]
        )
        others.close()
        ours.settimeout(240)
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    mapped = Mapped(fds[0])
    os.close(fds[0])
    return process, mapped


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory without a name here")
@pytest.mark.parametrize("times", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_all_rows_of_a_killed_process_are_there(times: int) -> None:
    for _ in range(times):
        process, mapped = _victim()
        try:
            deadline = random.uniform(0.05, 0.5)
            threading.Event().wait(deadline)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(120)
        # A process is ended between any two instructions: the row that it writes, and the totals of one span, may lack.
        _is_whole(mapped, unfinished=1)
        mapped.close()


def _is_whole(mapped: Mapped, unfinished: int) -> None:
    header = mapped.header
    assert (header.state, header.service) == ("running", "victim")
    tally, losses = mapped.tally(), mapped.losses()
    calls = sum(row.totals.calls for row in tally.iterate_totals())
    rings = [ring for ring in mapped.read_rows() if ring.thread_id]
    heads, held = sum(ring.head for ring in rings), sum(len(ring.rows) for ring in rings)
    assert 0 <= heads - calls <= unfinished
    assert held >= 0.999 * (heads - losses.get("spans overwritten by newer ones", 0)) - len(rings)
    rows = np.concatenate([ring.rows for ring in rings]) if rings else np.zeros(0, ROWS)
    tree, open_spans = mapped.read_tree(), mapped.open_spans()
    names = {int(row["span_id"]): tree.site(int(row["node"])).name for row in rows}
    assert len(names) == len(rows)
    assert set(names.values()) <= {"inner", "item", "items", "request"}
    for ring in rings:
        assert (np.diff(ring.rows["end_ns"]) >= 0).all()
        assert len(ring.rows) == ring.head - ring.first, "a row that is none was read"
    assert not names.keys() & {span.span_id for span in open_spans}
    # What is below something is below something that is there, open, or overwritten before it.
    oldest_ns = max((int(ring.rows["end_ns"][0]) for ring in rings if ring.first), default=0)
    known = names.keys() | {span.span_id for span in open_spans}
    late = rows[(rows["start_ns"] > oldest_ns) & (rows["parent_id"] != 0)]
    lacking = {int(parent) for parent in late["parent_id"]} - known
    assert len(lacking) <= unfinished, "a span that is open is not named"
    if "request" in names.values():
        assert "serving" in {span.site.name for span in open_spans}


# -------------------------------------------------------------------- damaged recordings


@pytest.mark.parametrize("inputs", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_recordings_are_read_as_far_as_they_go_or_refused(inputs: int) -> None:
    # A process of its own, because its memory is measured.
    command = [sys.executable, "-X", "faulthandler", str(Path(__file__).with_name("fuzz_recordings.py")), str(inputs)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"  # which input it was, and then why
    assert f"recordings: {inputs} inputs" in done.stdout


def test_rings_that_claim_more_rows_than_there_is_room_for_are_not_read_again_and_again(recorder: Any) -> None:
    fd = copied(recorder)
    table = memory_layout.HEADER.fields["parts"][0] + memory_layout.PARTS.index("rings") * memory_layout.PART.size
    offset, stride, slots, *_ = struct.unpack("<5Q", os.pread(fd, memory_layout.PART.size, table))
    found = next(one for one in Mapped(fd)._read_rings() if one.capacity)
    ring = bytearray(os.pread(fd, stride, offset + found.slot * stride))
    inner = int(Mapped(fd)._object_bytes)
    before = sum(len(one.rows) for one in Mapped(fd).read_rows())
    for number in range(4, slots):
        struct.pack_into("<Q", ring, inner + memory_layout.RING.fields["number"][0], 100 + number)
        os.pwrite(fd, ring, offset + number * stride)
    os.pwrite(fd, struct.pack("<Q", slots), table + memory_layout.PART.fields["used"][0])
    parts, _ = memory_layout.plan_parts(1 << 26, is_sparse=True)
    times = parts["rows"].slots // found.capacity
    assert before < sum(len(one.rows) for one in Mapped(fd).read_rows()) <= before * times < before * slots / 4
    os.close(fd)


def test_a_recording_that_was_cut_short_is_read_as_far_as_it_goes_or_refused(recorder: Any) -> None:
    fd, rng = copied(recorder), random.Random(7)
    ends = [offset + rng.randrange(length) for offset, length in used_of(fd)]
    for length in sorted([0, 7, 100, 799, 800, 4096, *ends], reverse=True):
        os.ftruncate(fd, length)
        if length < memory_layout.HEADER.size:
            with pytest.raises(TraceError):
                Mapped(fd)
        else:
            look_at_all(fd)
    os.close(fd)


LOCKED = """
import ctypes, os
if ctypes.CDLL(None).mlockall(2):  # MCL_FUTURE
    raise SystemExit("may not lock")
from instrument.recorder.recorder import Recorder
recorder = Recorder(1 << 26)
recorder.begin_recording(1 << 26, {})
recorder.on = True
for _ in range(100):
    with recorder.scope("x"):
        pass
print(recorder.no_memory or os.fstat(recorder.memory_fd).st_blocks * 512)
"""


def test_a_service_that_locks_its_memory_fills_no_more_of_a_recording_than_it_uses() -> None:
    done = subprocess.run([sys.executable, "-c", LOCKED], capture_output=True, text=True, timeout=240)
    if "may not lock" in done.stderr or not done.stdout.strip().isdigit():
        pytest.skip(f"{done.stderr}{done.stdout}")
    assert int(done.stdout) < 1 << 20


def test_pages_ahead_of_a_thread_are_there_before_it_comes_to_them() -> None:
    recorder = Recorder(1 << 26)
    recorder.begin_recording(1 << 26, {})
    if recorder.memory_fd < 0:
        pytest.skip(recorder.no_memory)
    recorder.on = True
    step = recorder.wrap(lambda: None, Site("f"))
    step()
    before = os.fstat(recorder.memory_fd).st_blocks * 512
    assert recorder.touch_ahead(1 << 20) in (0, 1 << 20)  # 0: a system that cannot
    assert os.fstat(recorder.memory_fd).st_blocks * 512 - before in (0, 1 << 20)
    done = threading.Event()
    threads = [threading.Thread(target=recorder.wrap(lambda: (step(), done.wait()), Site("g"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert recorder.touch_ahead(1 << 20) <= 1 << 20, "threads share what is touched"
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert recorder.touch_ahead(1 << 30) < recorder.rings()[0].capacity * 64 * len(recorder.rings())
    assert sum(row.totals.calls for row in read(recorder).tally().iterate_totals()) == 7


def test_the_recorder_records_without_shared_memory_and_names_the_reason(
    make_recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError("refused by a filter of system calls")

    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    recorder = make_recorder()
    recorder.wrap(lambda: None, Site("f"))()
    assert recorder.memory_fd == -1
    assert recorder.no_memory
    assert recorder.calls == 1


def test_a_recorder_that_has_had_a_memory_takes_a_larger_one(recorder: Any) -> None:
    function = recorder.wrap(lambda: None, Site("f"))
    function()
    before = os.fstat(recorder.memory_fd).st_size
    recorder.begin_recording(100 << 20, {})
    function()
    assert os.fstat(recorder.memory_fd).st_size > before
    assert lines(read(recorder).tally()) == lines(recorder.tally())
    recorder.begin_recording(1 << 20, {})
    function()
    assert os.fstat(recorder.memory_fd).st_size > before
    assert lines(read(recorder).tally()) == lines(recorder.tally())


def test_each_plain_field_of_a_site_is_published(recorder: Any) -> None:
    values = {"str": "told", "int": 7, "bool": True}
    plain = {one.name: values[str(one.type)] for one in fields(Site) if str(one.type) in values}
    site = Site(**plain, attributes=(("rank", 3),))
    recorder.wrap(lambda: None, site)()
    found = next(one for one in read(recorder).sites() if one.name == "told")
    assert {name: getattr(found, name) for name in Site.fields} == {name: getattr(site, name) for name in Site.fields}
    assert {*Site.fields} >= {*plain, "attributes"}
