"""Chrome traces: what was dumped loads again, viewers would show every slice, and no bad file gets past `load`."""

from __future__ import annotations

import base64
import errno
import gzip
import json
import os
import signal
import stat
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import chrome_rules
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_spans import counted
from tallies import by_keys

from instrument import chrome
from instrument.errors import TraceError
from instrument.profile.model import KINDS
from instrument.recording.metric_definitions import GAUGES
from instrument.recording.spans import BATCH_KEYS, HOST, Cost, DeviceInterval, Gpu, Kernel, Origin, Sample, Site, Span
from instrument.recording.trace_context import RemoteParent
from instrument.trace import file, metadata
from instrument.trace.trace import Trace

BASE_NS = 123_456_789_012_345
ORIGIN = Origin(4711, "chat-7b", BASE_NS - 5, 1_763_683_200_000_000_001, "native", "profile.yaml", "node-3")
SITE = Site("handle", "op", "chat.server", "handle", "chat/server.py", 12)
HOSTILE = ['a"b', "back\\slash", "new\nline", "\t\x00\x1f\x7f", "</script>", "é 日本 😀", "%s {x}", "a.b/c:d", ""]

LONG_NAMED = Site("n" * 300)

SITES = [
    *(Site(f"{kind}s", kind, "chat.engine", "Engine.run", "chat/engine.py", 7) for kind in KINDS),
    Site("Linear", "layer", instance="model.layers.0.mlp", device=True, attributes=(("shape", (4, 8)), ("bias", True))),
    *(Site(name, instance=name, module=name, qualname=name, file=name) for name in HOSTILE),
]


def span(span_id: int, start: int, end: int, parent: int = 0, **facts: Any) -> Span:
    """A span from `start` to `end` ns after the base."""
    total = end - start
    values: dict[str, Any] = {"site": SITE, "root_id": 1, "thread_id": 4711, "task_id": 0}
    values |= {"active_ns": total, "self_ns": total} | facts
    return Span(span_id=span_id, parent_id=parent, start_ns=BASE_NS + start, end_ns=BASE_NS + end, **values)


def trace(*spans: Span, **facts: Any) -> Trace:
    values: dict[str, Any] = {"origin": ORIGIN, "start_ns": BASE_NS, "end_ns": BASE_NS + 1000, "spans": list(spans)}
    return Trace(**(values | facts))


def on_device(start: int, end: int, stream: int = 7, device: int = 0) -> DeviceInterval:
    return DeviceInterval(device, stream, BASE_NS + start, BASE_NS + end, "overlapped", 250)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def document(path: Path) -> dict[str, Any]:
    """The JSON of a file, which must be as every reader wants it."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in the file")

    found: dict[str, Any] = json.loads(data.decode(), parse_constant=refuse)
    return found


def shown_whole(path: Path) -> dict[str, Any]:
    """The JSON of a file, of which viewers must show all."""
    found = document(path)
    assert chrome_rules.problems(found) == []
    return found


def dumped(folder: Path, *spans: Span, **facts: Any) -> dict[str, Any]:
    return shown_whole(chrome.dump(folder / "trace.json", trace(*spans, **facts)))


def peak_bytes(work: Callable[[], object]) -> int:
    """The most memory that the work takes."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def slices_in(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in found["traceEvents"] if event["ph"] in "Xb"]


def lanes(found: dict[str, Any]) -> dict[str, list[str]]:
    """Names of the complete events by name of their lane."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in found["traceEvents"] if e.get("name") == "thread_name"}
    shown: dict[str, list[str]] = {}
    for event in found["traceEvents"]:
        if event["ph"] == "X":
            shown.setdefault(names[event["pid"], event["tid"]], []).append(event["name"])
    return shown


def facts_of(one: Span) -> tuple[Any, ...]:
    """All of a span, its site by value."""
    site = (*one.site.key, one.site.device, one.site.attributes)
    return (site, *(getattr(one, name) for name in Span.__slots__ if name != "site"))


def assert_same(loaded: Trace, original: Trace) -> None:
    by_id = sorted(map(facts_of, original.spans), key=lambda facts: facts[1])
    assert sorted(map(facts_of, loaded.spans), key=lambda facts: facts[1]) == by_id
    for name in ("origin", "start_ns", "end_ns", "losses", "window", "cost"):
        assert getattr(loaded, name) == getattr(original, name)
    assert list(loaded.threads.items()) == list(original.threads.items())
    assert list(loaded.notes) == list(original.notes)
    assert list(loaded.samples) == list(original.samples)
    assert list(loaded.gpus) == list(original.gpus)


values = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(HOSTILE),
    st.lists(st.integers(-5, 5), max_size=3).map(tuple),
)


@st.composite
def spans_of_a_tree(draw: st.DrawFn) -> list[Span]:
    """Spans that start and end together, cross, last no time, run on threads and tasks, and stick out of parents."""
    found: list[Span] = []
    near = st.integers(0, 12)
    intervals = st.builds(on_device, near, st.integers(12, 24), st.sampled_from([0, 7, 2**45]), st.integers(0, 1))
    for span_id in draw(st.permutations(range(1, 1 + draw(st.integers(0, 24))))):
        parent = draw(st.sampled_from([None, *found]))
        start, length = draw(near), draw(near)
        threads, tasks = st.sampled_from([4711, 4712, 0, 2**31 + 1, 2**40]), st.sampled_from([0, 0, 2**47 + 16])
        if parent is not None and draw(st.booleans()):
            start, length = parent.start_ns - BASE_NS, draw(st.sampled_from([parent.total_ns, 0, 1, length]))
            threads, tasks = st.just(parent.thread_id), st.just(parent.task_id)
        found.append(
            span(
                span_id,
                start,
                start + length,
                parent=parent.span_id if parent else draw(st.sampled_from([0, 999])),
                root_id=parent.root_id if parent else span_id,
                site=draw(st.sampled_from(SITES)),
                thread_id=draw(threads),
                task_id=draw(tasks),
                active_ns=draw(st.integers(0, length)),
                self_ns=draw(st.integers(0, length)),
                error=draw(st.sampled_from([None, None, "ValueError", ""])),
                attributes=draw(st.dictionaries(st.sampled_from(HOSTILE), values, max_size=2)),
                device=tuple(draw(st.lists(intervals, max_size=3))),
                clipped=draw(st.booleans()),
                remote=draw(
                    st.sampled_from([None, RemoteParent(2**127 + 5, 2**63 + 1, 0), RemoteParent(3, 4, 1, True, True)])
                ),
            )
        )
    return found


@given(spans_of_a_tree(), st.sampled_from(["trace.json", "trace.json.gz"]), st.sampled_from([1 << 18, 300]))
def test_every_trace_comes_back_and_shows_whole(tmp_path: Path, spans: list[Span], name: str, block_bytes: int) -> None:
    original = trace(
        *spans,
        threads={4712: "worker\n0", 4711: "MainThread"},
        losses={"ring overwritten": 3, 'a "reason"': 0},
        notes=("layer encoder.0 cannot be observed",),
        window=7,
        cost=Cost(12, 51.25, 10**9),
    )
    tally = counted(spans, original.threads)
    path = chrome.dump(tmp_path / name, original, tally)
    with pytest.MonkeyPatch.context() as patch:
        # The last blocks may have further arguments.
        patch.setattr("instrument.chrome.event_reading.BLOCK_BYTES", block_bytes)
        loaded, loaded_tally = chrome.load(path)
    assert_same(loaded, original)
    assert by_keys(loaded_tally) == by_keys(tally)
    assert loaded_tally.threads == tally.threads
    assert chrome_rules.slices(shown_whole(path)) == len(spans) + sum(len(one.device) for one in spans)


def in_order(samples: Iterable[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda s: (s.at_ns, s.device, s.name))


def counters(found: dict[str, Any]) -> list[tuple[int, str, dict[str, float]]]:
    """Process, name and values of the counters of a file."""
    return [(e["pid"], e["name"], e["args"]) for e in found["traceEvents"] if e["ph"] == "C"]


samples = st.builds(
    Sample,
    st.sampled_from([*GAUGES, *HOSTILE]),
    st.sampled_from([HOST, 0, 1, 2**31 - 1]),
    st.integers(-50, 2000).map(lambda at: BASE_NS + at),
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False),
)


@given(st.lists(samples, max_size=20, unique_by=lambda s: (s.name, s.device, s.at_ns)), spans_of_a_tree())
def test_every_sample_comes_back_and_shows_unless_it_is_no_number(
    tmp_path: Path, read: list[Sample], spans: list[Span]
) -> None:
    gpus = (Gpu(0, "NVIDIA H200", "GPU-aaaa"), Gpu(1))
    original = trace(*spans, samples=in_order(read), gpus=gpus)
    path = chrome.dump(tmp_path / "trace.json", original)
    assert_same(chrome.load(path)[0], original)
    assert len(counters(shown_whole(path))) == sum(sample.value is not None for sample in read)


def test_gauges_are_counters_of_their_process_with_their_unit_and_what_they_are_of(tmp_path: Path) -> None:
    read = in_order(
        [
            Sample("process_cpu", HOST, BASE_NS + 10, 140.5),
            Sample("utilization", 1, BASE_NS + 10, 35),
            Sample("utilization", 1, BASE_NS + 20, None),
            Sample("memory_used", 1, BASE_NS + 20, 2**40),
        ]
    )
    found = dumped(tmp_path, span(1, 0, 30), samples=read, gpus=[Gpu(1, "NVIDIA H200", "GPU-aaaa")])
    assert counters(found) == [
        (4711, "process_cpu", {"%": 140.5}),
        (2**31 + 1, "utilization", {"%": 35}),
        (2**31 + 1, "memory_used", {"bytes": 2**40}),
    ]
    about = {(e["pid"], e["name"]): e["args"] for e in found["traceEvents"] if e["ph"] == "M"}
    assert about[2**31 + 1, "process_name"] == {"name": "GPU 1"}
    assert about[2**31 + 1, "process_labels"] == {"labels": "NVIDIA H200 GPU-aaaa"}
    assert found["instrument"]["gauges"]["process_cpu"].startswith("% of one core")
    assert found["instrument"]["not_told"] == [["utilization", 1, 20]]


def test_a_gauge_and_a_stream_of_one_device_share_its_process(tmp_path: Path) -> None:
    found = dumped(
        tmp_path, span(1, 0, 30, device=(on_device(5, 20),)), samples=[Sample("power", 0, BASE_NS + 10, 300.0)]
    )
    names = [(e["pid"], e["args"]["name"]) for e in found["traceEvents"] if e["name"] == "process_name"]
    assert names == [(4711, "chat-7b"), (2**31, "GPU 0")]
    assert counters(found) == [(2**31, "power", {"W": 300.0})]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2**63])
def test_a_value_that_json_does_not_have_is_not_reported(tmp_path: Path, value: float) -> None:
    path = chrome.dump(tmp_path / "t.json", trace(samples=[Sample("power", 0, BASE_NS, value)]))
    assert counters(shown_whole(path)) == []
    assert list(chrome.load(path)[0].samples) == [Sample("power", 0, BASE_NS, None)]


@pytest.mark.parametrize(
    "event",
    [
        '{"ph":"C","name":"power","ts":1.000,"args":{"W":1}}',
        '{"ph":"C","name":"power","ts":1.000,"pid":1,"args":{"W":"much"}}',
        '{"ph":"C","name":"power","ts":1.000,"pid":1,"args":{}}',
        '{"ph":"C","name":7,"ts":1.000,"pid":1,"args":{"W":1}}',
        '{"ph":"C","name":"power","pid":1,"args":{"W":1}}',
    ],
)
def test_a_counter_that_is_damaged_is_refused(tmp_path: Path, event: str) -> None:
    path = chrome.dump(tmp_path / "t.json", trace(samples=[Sample("power", 0, BASE_NS, 1.0)]))
    text = path.read_text()
    whole = next(line for line in text.splitlines() if '"ph":"C"' in line)
    path.write_text(text.replace(whole.rstrip(","), event))
    with pytest.raises(TraceError, match="cannot read the trace"):
        chrome.load(path)


@given(spans_of_a_tree())
def test_every_arrow_is_drawn_or_counted(tmp_path: Path, spans: list[Span]) -> None:
    found = dumped(tmp_path, *spans)
    by_id = {one.span_id: one for one in spans}
    parents = [(by_id[one.parent_id], one) for one in spans if one.parent_id in by_id]
    elsewhere = [(p, c) for p, c in parents if (p.thread_id, p.task_id) != (c.thread_id, c.task_id)]
    wanted = len(elsewhere) + sum(len(one.device) for one in spans)
    assert chrome_rules.arrows(found) + found["instrument"]["arrows_left_out"] == wanted


def test_a_place_whose_work_is_a_function_of_the_process_comes_back_without_it(tmp_path: Path) -> None:
    site = Site("Linear", "layer", instance="head", device=True, work=lambda: None)  # type: ignore[arg-type, return-value]
    original = trace(Span(site, 1, 0, 1, 1, 0, 0, 10, 10, 10))
    path = chrome.dump(tmp_path / "trace.json", original, counted(original.spans))
    (found,) = chrome.load(path)[0].spans
    assert (found.site.key, found.site.work) == (site.key, None)


def test_intervals_that_claim_one_place_come_back_as_they_stand_in_the_file(tmp_path: Path) -> None:
    """The first of them has an escape in its label."""
    one = span(1, 0, 90)
    one.device = (on_device(10, 20), on_device(30, 40))
    path = chrome.dump(tmp_path / "trace.json", trace(one))
    text = path.read_text().replace('"overlapped"', '"overl\\u0061pped"', 1).replace(',"place":1', "")
    assert text.count("overlapped") == 1
    path.write_text(text)
    assert chrome.load(path)[0].spans[0].device == one.device


def test_a_file_without_a_tally_has_it_counted_from_its_spans(tmp_path: Path) -> None:
    original = trace(span(1, 0, 10), span(2, 2, 5, parent=1))
    _, tally = chrome.load(chrome.dump(tmp_path / "trace.json", original))
    assert by_keys(tally) == by_keys(counted(original.spans))


def nest(sites: Sequence[Site]) -> Trace:
    return trace(*(span(at, at, 900 - at, site=site, parent=at - 1) for at, site in enumerate(sites, 1)))


def test_a_file_that_nests_too_deep_is_refused_at_once_and_its_tally_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = chrome.dump(tmp_path / "trace.json", nest([Site(f"f{number}") for number in range(40)]))
    loaded, tally = chrome.load(path)
    again = chrome.read(path)
    assert [span.span_id for span in again.trace.spans] == [span.span_id for span in loaded.spans] == list(range(1, 41))
    assert by_keys(again.read_or_count_totals()) == by_keys(tally)
    monkeypatch.setattr(file, "LIMIT_LINKS", 820)
    chrome.read(path)
    monkeypatch.setattr(file, "LIMIT_LINKS", 779)
    with pytest.raises(TraceError, match="nested too deeply"):
        chrome.read(path)
    monkeypatch.setattr(file, "DEEPEST", 38)
    monkeypatch.setattr(file, "LIMIT_LINKS", 820)
    with pytest.raises(TraceError, match="nested too deeply"):
        chrome.read(path)


def test_repeated_and_deep_structures_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call paths are short, also where the spans have many others around them."""
    monkeypatch.setattr(file, "LIMIT_LINKS", 200)
    original = nest([Site("walk")] * 40)
    for known in (counted(original.spans), None):
        path = chrome.dump(tmp_path / "trace.json", original, known)
        saved = chrome.read(path)
        assert by_keys(saved.read_or_count_totals()) == by_keys(counted(original.spans))
        again = file.load(file.dump(tmp_path / "trace.npz", saved.trace, known))
        assert by_keys(again.read_or_count_totals()) == by_keys(saved.read_or_count_totals())


def packed(column: str, number: int) -> tuple[str, list[str]]:
    """Return a column of one number by its name, as a file has it."""
    return column, ["<i8", base64.b64encode(zlib.compress(np.int64(number).tobytes())).decode()]


@pytest.mark.parametrize(("start_ns", "length_ns"), [(2**63 - 50, 10), (5, 2**63 - 1), (5, -1)])
def test_a_kernel_beyond_all_times_is_refused(tmp_path: Path, start_ns: int, length_ns: int) -> None:
    """Each number of it is one of 64 bits, what they mean is not; views would fail over it."""
    watched = {"kernels": [Kernel("gemm", "kernel", 0, 7, BASE_NS, BASE_NS + 5)], "watched": (BASE_NS, BASE_NS + 9)}
    path = chrome.dump(tmp_path / "trace.json", trace(span(1, 0, 10), **watched))
    document = json.loads(path.read_text())
    document["instrument"]["watched"] = [0, 2**63 - 1]
    document["instrument"]["columns"] |= [
        packed("kernel_start_ns_steps", start_ns), packed("kernel_total_ns", length_ns),
    ]  # fmt: skip
    path.write_text(json.dumps(document))
    with pytest.raises(TraceError, match="a kernel in it is not valid; it is damaged"):
        chrome.load(path)


def test_a_watched_time_beyond_all_times_is_refused(tmp_path: Path) -> None:
    watched = {"kernels": [Kernel("gemm", "kernel", 0, 7, BASE_NS, BASE_NS + 5)], "watched": (BASE_NS, BASE_NS + 9)}
    path = chrome.dump(tmp_path / "trace.json", trace(span(1, 0, 10), **watched))
    document = json.loads(path.read_text())
    document["instrument"]["watched"] = [0, 2**63 - 1]
    path.write_text(json.dumps(document))
    with pytest.raises(TraceError, match="cannot read the trace"):
        chrome.load(path)


def test_a_tally_with_fewer_calls_than_none_is_refused(tmp_path: Path) -> None:
    original = trace(span(1, 0, 10))
    path = chrome.dump(tmp_path / "trace.json", original, counted(original.spans))
    document = json.loads(path.read_text())
    ((_, _, calls, *_),) = document["instrument"]["tally"]["rows"]
    assert calls == 1
    document["instrument"]["tally"]["rows"][0][2] = -1
    path.write_text(json.dumps(document))
    with pytest.raises(TraceError, match="a call path in it was called -1 times; it is damaged"):
        chrome.load(path)


def test_a_tally_is_saved_whether_or_not_its_spans_are(tmp_path: Path) -> None:
    tally = counted([span(1, -900, 10**12, error="OSError"), span(2, 3, 900, parent=1)], {4711: "Main"})
    loaded, loaded_tally = chrome.load(chrome.dump(tmp_path / "trace.json", trace(), tally))
    assert loaded.spans == []
    assert by_keys(loaded_tally) == by_keys(tally)


@pytest.mark.parametrize(
    ("spans", "count"),
    [
        ([], 0),
        ([span(1, 0, 0)], 1),
        ([span(1, 0, 10, site=Site("r", "request"))], 1),
        ([span(i, i, 2000 - i, parent=i - 1) for i in range(1, 601)], 600),
        ([span(i, i, 2000 - i, parent=i - 1, task_id=8) for i in range(1, 601)], 600),
        ([span(i, 5, 5, parent=i - 1) for i in range(600, 0, -1)], 600),
        ([span(i, i, i + 1000, root_id=i, task_id=i) for i in range(1, 9000)], 8999),
    ],
    ids=["no span", "one of no length", "one request", "600 deep", "600 deep in a task", "600 at once", "9000 tasks"],
)
def test_windows_of_every_size_show_whole(tmp_path: Path, spans: list[Span], count: int) -> None:
    assert chrome_rules.slices(dumped(tmp_path, *spans)) == count
    assert len(chrome.load(tmp_path / "trace.json")[0].spans) == count


def test_times_are_microseconds_with_three_decimals_from_the_base(tmp_path: Path) -> None:
    long_ns = 40 * 86_400 * 10**9 + 1
    path = chrome.dump(tmp_path / "trace.json", trace(span(1, 1, 1002), span(2, 7, long_ns, parent=1)))
    text = path.read_text()
    assert '"ts":0.001,"dur":1.001}' in text
    assert f'"ts":0.007,"dur":{long_ns // 1000 - 1}.994}}' in text
    assert [one.total_ns for one in chrome.load(path)[0].spans] == [long_ns - 7, 1001][::-1]
    assert document(path)["instrument"]["base_epoch_ns"] == ORIGIN.realtime_of(BASE_NS)


def test_spans_and_intervals_before_the_window_move_the_base(tmp_path: Path) -> None:
    found = dumped(tmp_path, span(1, -50, 10, device=(on_device(-70, -60),)))
    assert found["instrument"]["base_ns"] == BASE_NS - 70


def test_lanes_carry_the_names_of_threads_streams_and_devices_in_their_order(tmp_path: Path) -> None:
    found = dumped(
        tmp_path,
        span(1, 0, 10, thread_id=12, device=(on_device(2, 9, stream=0), on_device(3, 9, stream=20, device=1))),
        span(2, 0, 10, thread_id=11, site=Site("Linear", "layer", instance="model.0")),
        threads={11: "MainThread", 12: "loader", 13: "idle"},
    )
    names = [e["args"]["name"] for e in found["traceEvents"] if e["name"] in ("thread_name", "process_name")]
    assert names == ["chat-7b", "MainThread", "loader", "GPU 0", "stream 0", "GPU 1", "stream 20"]
    handle = ["handle"]
    assert lanes(found) == {"MainThread": ["model.0"], "loader": handle, "stream 0": handle, "stream 20": handle}
    assert sorted({e["pid"] for e in found["traceEvents"]}) == [4711, 2**31, 2**31 + 1]


def test_crossing_slices_go_to_a_further_named_lane(tmp_path: Path) -> None:
    crossing = on_device(0, 10), on_device(5, 15), on_device(14, 20)
    found = dumped(
        tmp_path,
        span(1, 0, 10),
        span(2, 5, 15),
        span(3, 12, 14),
        span(4, 20, 30, task_id=9),
        span(5, 29, 31, task_id=9, device=crossing),
        threads={4711: "Main"},
    )
    assert lanes(found) == {
        "Main": ["handle", "handle"],
        "Main (2)": ["handle"],
        "stream 7": ["handle", "handle"],
        "stream 7 (2)": ["handle"],
    }
    assert [event["args"].get("lane", 1) for event in slices_in(found)] == [1, 2, 1, 1, 2, 1, 2, 1]
    assert all(event["tid"] >= 2**31 for event in slices_in(found) if event["ph"] == "X" and "lane" in event["args"])


@pytest.mark.parametrize("task_id", [0, 9])
def test_calls_of_a_moved_span_stay_below_it(tmp_path: Path, task_id: int) -> None:
    found = dumped(
        tmp_path,
        span(1, 0, 10, task_id=task_id),
        span(2, 5, 25, task_id=task_id),
        span(3, 6, 9, parent=2, task_id=task_id),
        span(4, 12, 20, parent=3, task_id=task_id),
        span(5, 21, 22, parent=1, task_id=task_id),
        span(6, 12, 20, parent=2, thread_id=12),
    )
    further = {event["args"]["id"]: event["args"].get("lane", 1) for event in slices_in(found)}
    assert further == {1: 1, 2: 2, 3: 2, 4: 2, 5: 1, 6: 1}


def test_the_work_of_a_request_in_its_task_is_on_the_requests_row(tmp_path: Path) -> None:
    request = Site("chat", "request")
    found = dumped(
        tmp_path,
        span(5, 0, 100, site=request, task_id=3, root_id=5),
        span(6, 10, 90, parent=5, task_id=3, root_id=5),
        span(7, 20, 80, parent=6, task_id=4, root_id=5),
        span(8, 30, 70, parent=6, thread_id=99, root_id=5),
        span(9, 0, 50, site=request, root_id=9),
    )
    rows = [(e["ph"], e["cat"], e.get("id2", {}).get("local"), e["args"].get("kind")) for e in slices_in(found)]
    assert rows == [
        ("b", "request", "0x1", "request"),
        ("b", "request", "0x2", "request"),
        ("b", "request", "0x1", "op"),
        ("b", "task", "0x3", "op"),
        ("X", "op", None, None),
    ]
    assert chrome_rules.arrows(found) == 2


def test_requests_stand_first_then_threads_of_batches_and_devices_last(tmp_path: Path) -> None:
    request, step = Site("POST /chat", "request"), Site("engine.step", "step")
    found = dumped(
        tmp_path,
        span(1, 0, 100, site=request, task_id=3, root_id=1),
        span(2, 10, 90, parent=1, task_id=4, root_id=1),
        span(3, 0, 100, site=request, task_id=5, root_id=3),
        span(4, 20, 80, thread_id=11),
        span(5, 30, 70, thread_id=12, site=step, device=(on_device(40, 60),)),
        span(6, 30, 70, thread_id=13, site=Site("Engine.decode"), attributes={BATCH_KEYS: ("r1",)}),
        threads={11: "MainThread", 12: "engine", 13: "decoder"},
    )
    # Viewers show what has an id of all processes before the processes.
    ids = {event["args"]["id"]: event["id2"] for event in slices_in(found) if event["ph"] == "b"}
    assert ids == {
        1: {"local": "0x1", "global": f"0x{4711:x}00000001"},
        3: {"local": "0x2", "global": f"0x{4711:x}00000002"},
        2: {"local": "0x3"},
    }
    ends = [event["id2"] for event in found["traceEvents"] if event["ph"] == "e"]
    assert sorted(ends, key=str) == sorted(ids.values(), key=str)
    metadata = [event for event in found["traceEvents"] if event["ph"] == "M"]
    named = {(e["pid"], e.get("tid")): e["args"]["name"] for e in metadata if "name" in e["args"]}
    place = {named[e["pid"], e.get("tid")]: e["args"]["sort_index"] for e in metadata if "sort_index" in e["args"]}
    threads = sorted(("MainThread", "engine", "decoder"), key=place.__getitem__)
    assert threads == ["engine", "decoder", "MainThread"]
    assert place["chat-7b"] < place["GPU 0"]


def test_an_event_names_its_parent_and_tree_only_where_they_do_not_follow_from_others(tmp_path: Path) -> None:
    request = Site("POST /chat", "request")
    found = dumped(
        tmp_path,
        span(1, 0, 100),
        span(2, 10, 90, parent=1),
        span(3, 20, 30, parent=1),
        span(4, 40, 50, root_id=4),
        span(5, 60, 60, parent=2),
        span(6, 60, 70, parent=5),
        span(7, 100, 110, parent=2),
        span(8, 101, 109, parent=999, root_id=900),
        span(9, 102, 104, parent=8, root_id=901),
        span(11, 0, 100, site=request, task_id=3, root_id=11),
        span(12, 10, 90, parent=11, task_id=3, root_id=11),
        span(13, 20, 80, parent=11, task_id=3, root_id=11),
        span(14, 30, 70, parent=12, task_id=4, root_id=11),
    )
    named = {e["args"]["id"]: (e["args"].get("parent"), e["args"].get("root")) for e in slices_in(found)}
    assert named == {
        1: (None, None),
        2: (None, None),
        3: (1, None),  # lies in 2
        4: (0, None),  # has no parent, and lies in 2
        5: (2, None),  # lies in 6, which begins with it and lasts longer
        6: (5, None),  # its parent lasted no time
        7: (2, None),  # its parent was over, nothing is around it
        8: (999, 900),
        9: (None, 901),
        11: (None, None),
        12: (None, None),
        13: (11, None),
        14: (12, None),  # the first of its task
    }
    loaded, _ = chrome.load(tmp_path / "trace.json")
    assert {one.span_id: one.parent_id for one in loaded.spans} == {
        1: 0, 2: 1, 3: 1, 4: 0, 5: 2, 6: 5, 7: 2, 8: 999, 9: 8, 11: 0, 12: 11, 13: 11, 14: 12,
    }  # fmt: skip


def test_arrows_lead_to_other_threads_and_devices_but_never_into_the_past(tmp_path: Path) -> None:
    found = dumped(
        tmp_path,
        span(1, 100, 200, device=(on_device(120, 300), on_device(99, 110, stream=8), on_device(100, 110, stream=9))),
        span(2, 150, 160, parent=1),
        span(3, 150, 400, parent=1, thread_id=12),
        span(4, 90, 95, parent=1, thread_id=13),
        span(5, 100, 500, task_id=3, root_id=5),
        span(6, 210, 220, parent=5, thread_id=12, root_id=5, device=(on_device(212, 215),)),
    )
    arrows = [(e["ph"], e["name"], e["id"], e["ts"], e["tid"]) for e in found["traceEvents"] if e["ph"] in "sf"]
    base_us = 0.090
    assert arrows == [
        ("s", "call", 1, round(0.1 - base_us + 0.09, 3), 4711),
        ("f", "call", 1, 0.15, 12),
        ("s", "ac2g", 1, 0.1, 4711),
        ("f", "ac2g", 1, 0.1, 9),  # by a bind id, Perfetto draws no arrow between slices that begin together
        ("s", "ac2g", 6, 0.21, 12),
        ("f", "ac2g", 6, 0.212, 7),  # its source has the bind id of its caller
    ]
    binds = [
        (e["args"].get("id", "device"), e["bind_id"], e.get("flow_out", False), e.get("flow_in", False))
        for e in found["traceEvents"]
        if "bind_id" in e
    ]
    assert binds == [
        (5, "0x8000000000000005", True, False),
        (1, "0x8000000000000001", True, False),
        (6, "0x8000000000000005", False, True),
        ("device", "0x8000000000000001", False, True),
    ]
    assert found["instrument"]["arrows_left_out"] == 2


def test_only_intervals_that_enclose_no_other_count_as_kernels(tmp_path: Path) -> None:
    found = dumped(
        tmp_path,
        span(1, 0, 50, device=(on_device(0, 50),)),
        span(2, 0, 20, parent=1, device=(on_device(0, 20),)),
        span(3, 20, 50, parent=1, device=(on_device(20, 50), on_device(0, 60, stream=8))),
    )
    device = [event["args"] for event in slices_in(found) if event["cat"] == "device"]
    assert [(args["owner"], args.get("stream"), args.get("enclosing_stream")) for args in device] == [
        (3, 8, None),
        (1, None, 7),
        (2, 7, None),
        (3, 7, None),
    ]


class Opaque:
    """A value whose text must never be asked for."""

    def __repr__(self) -> str:
        raise AssertionError("asked for its text")

    __str__ = __repr__


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (2**63, "9223372036854775808"),
        (-(2**63), -(2**63)),
        (10**6000, "<int of 19932 bits>"),
        ("lone \udc80 surrogate", "lone \ufffd surrogate"),
        (["a", (1, 2.5), float("inf")], ("a", (1, 2.5), "inf")),
        (Opaque(), "<Opaque>"),
        ([[[[1]]]], ((("<list>",),),)),
        ({"a": 1, 2: 3}, {"a": 1}),
        (b"bytes", "<bytes>"),
        (None, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_attributes_that_json_does_not_have_become_text(tmp_path: Path, value: Any, shown: Any) -> None:
    path = chrome.dump(tmp_path / "trace.json", trace(span(1, 0, 1, attributes={"key": value})))
    shown_whole(path)
    assert chrome.load(path)[0].spans[0].attributes == {"key": shown}


def test_lone_surrogates_in_names_are_replaced_everywhere(tmp_path: Path) -> None:
    bad = "\ud83d"
    site = Site(bad, "op", bad, bad, bad, 1, bad)
    interval = DeviceInterval(0, 1, BASE_NS, BASE_NS, bad)
    original = trace(
        span(1, 0, 9, site=site, error=bad, attributes={bad: bad}, device=(interval,)),
        origin=Origin(1, bad, 0, 0, bad, bad, bad),
        threads={4711: bad},
        losses={bad: 1},
        notes=(bad,),
    )
    path = chrome.dump(tmp_path / "trace.json", original, counted(original.spans, original.threads))
    assert "\\ud83d" not in path.read_text()
    shown_whole(path)
    assert chrome.load(path)[0].spans[0].site.name == "\ufffd"


def test_text_is_utf_8_without_escapes_but_for_control_characters(tmp_path: Path) -> None:
    path = chrome.dump(tmp_path / "trace.json", trace(span(1, 0, 1, site=Site("é😀\n"))))
    assert '"name":"é😀\\n"' in path.read_text()


def test_files_are_private_and_leave_nothing_next_to_them(tmp_path: Path) -> None:
    path = chrome.dump(tmp_path / "new" / "folder" / "trace.json.gz", trace(span(1, 0, 1)))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert chrome.dump(path, trace()) == path
    assert names_in(path.parent) == ["trace.json.gz"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("folder", "this path exists, and is not a regular file; give the name of a file"),
        ("file/trace.json", "File exists; give the name of a file"),
        ("file/below/trace.json", "Not a directory; give the name of a file"),
        ("n" * 300, "File name too long; give a path that can be written"),
    ],
)
def test_a_path_that_cannot_be_a_file_is_a_trace_error(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(TraceError, match=f"cannot write the trace .*{said}"):
        chrome.dump(tmp_path / name, trace(span(1, 0, 1)))
    assert names_in(tmp_path) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "kept"


def in_child(code: str, path: Path) -> subprocess.Popen[str]:
    """A process that has the helpers of this file, and a path."""
    text = f"import sys; sys.path[:0] = {sys.path!r}\nfrom test_chrome import *\npath = Path(sys.argv[1])\n{code}"
    command = [sys.executable, "-c", text, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("hindrance", "said", "advice"),
    [
        (
            "path.parent.chmod(0o500)\nif os.getuid() == 0: os.setuid(65534)",
            "Permission denied",
            "give a directory that this user may write to",
        ),
        (
            "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))",
            "File too large",
            "make room, or record less",
        ),
    ],
    ids=["a directory that may not be written", "a full disk"],
)
def test_a_write_that_the_system_refuses_leaves_the_old_file(
    tmp_path: Path, hindrance: str, said: str, advice: str
) -> None:
    path = chrome.dump(tmp_path / "trace.json", trace(span(1, 0, 1)))
    before = path.read_bytes()
    child = in_child(
        f"{hindrance}\n"
        "try: chrome.dump(path, trace(*(span(i, i, i + 1) for i in range(1, 9000))))\n"
        "except TraceError as error: print(error)",
        path,
    )
    assert child.communicate(timeout=240)[0] == f"cannot write the trace {path}: {said}; {advice}\n"
    assert path.read_bytes() == before
    assert names_in(tmp_path) == ["trace.json"]


class Trap(dict[str, Any]):
    """Attributes that act when they are read."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__(key=1)
        self.act = act

    def __iter__(self) -> Iterator[str]:
        return iter(self.act())

    keys = __iter__


def trapped(act: Callable[[], Any]) -> Trace:
    """A trace that acts when it is written for the most part."""
    spans = [span(i, i, i + 1) for i in range(1, 20_000)]
    spans[-1].attributes = Trap(act)
    return trace(*spans)


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_write_that_fails_midway_leaves_no_part(tmp_path: Path, fault: BaseException) -> None:
    def fail() -> None:
        [part] = names_in(tmp_path)
        assert (tmp_path / part).stat().st_size > 0
        raise fault

    expected = TraceError if isinstance(fault, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        chrome.dump(tmp_path / "trace.json", trapped(fail))
    assert names_in(tmp_path) == []


def test_a_process_killed_while_it_writes_leaves_the_old_file(tmp_path: Path) -> None:
    path = chrome.dump(tmp_path / "trace.json", trace(span(1, 0, 1)))
    before = path.read_bytes()
    child = in_child("chrome.dump(path, trapped(lambda: print('writing', flush=True) or signal.pause()))", path)
    assert child.stdout
    assert child.stdout.readline() == "writing\n"
    child.kill()
    child.communicate(timeout=240)
    assert child.returncode == -signal.SIGKILL
    assert path.read_bytes() == before


def test_the_text_of_a_long_trace_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    long = trace(*(span(i, 10 * i, 10 * i + 9, site=LONG_NAMED) for i in range(1, 60_001)))
    path = tmp_path / "trace.json"
    assert peak_bytes(lambda: chrome.dump(path, long)) < path.stat().st_size


def slice_text(**changes: Any) -> str:
    return json.dumps({"ph": "X", "name": "a", "ts": 1, "dur": 2, "pid": 1, "tid": 1} | changes)


def own(**changes: Any) -> str:
    """The text of a file of ours, with some of its one span's facts, or its metadata's, replaced."""
    args = {"id": 1, "parent": 0, "root": 1, "self_ns": 5, "site": 0}
    event = {"ph": "X", "name": "a", "cat": "op", "ts": 1.5, "dur": 2, "pid": 1, "tid": 1, "args": args}
    origin = {"pid": 1, "service": "s", "monotonic_ns": 0, "realtime_ns": 0}
    facts = {
        "format": metadata.FORMAT,
        "origin": origin,
        "base_ns": 7,
        "window": 0,
        "start_ns": 0,
        "end_ns": 9,
        "threads": [],
    }
    facts |= {"losses": {}, "notes": [], "cost": None, "sites": [{"name": "a"}], "tally": None}
    for key, value in changes.items():
        of_args = key in args or key in (
            "task",
            "error",
            "active_ns",
            "total_ns",
            "clipped",
            "attributes",
            "remote",
            "owner",
        )
        part = args if of_args else event if key in event else facts
        part[key] = value
    return json.dumps({"instrument": facts, "traceEvents": [event]})


def test_an_async_slice_without_a_length_among_others_is_refused(tmp_path: Path) -> None:
    begin = {"ph": "b", "name": "a", "cat": "task", "pid": 1, "tid": 1, "id2": {"local": "0x1"}, "ts": 1}
    events = [
        {**begin, "args": {"id": number, "root": number, "site": 0, **length}}
        for number, length in enumerate(({"total_ns": 5}, {}), 1)
    ]
    facts = json.loads(own())["instrument"]
    (tmp_path / "own.json").write_text(json.dumps({"instrument": facts, "traceEvents": events}))
    with pytest.raises(TraceError, match="an async slice in it has no length"):
        chrome.load(tmp_path / "own.json")


def test_an_end_before_all_begins_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.chrome.event_reading.BLOCK_BYTES", 64)  # an event each
    event = {"cat": "task", "pid": 1, "tid": 1, "id2": {"local": "0x1"}, "ts": 1}
    args = {"id": 2, "root": 2, "site": 0, "total_ns": 5}
    file = json.loads(own())
    file["traceEvents"] += [{**event, "ph": "e"}, {**event, "ph": "b", "name": "a", "args": args}]
    (tmp_path / "own.json").write_text(json.dumps(file))
    with pytest.raises(TraceError, match="never begins or never ends"):
        chrome.load(tmp_path / "own.json")


def test_the_hand_made_file_of_the_tests_below_is_good(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(own())
    loaded, _ = chrome.load(tmp_path / "own.json")
    assert [(one.start_ns, one.end_ns, one.site.name) for one in loaded.spans] == [(1507, 3507, "a")]


DEEP = "[" * 200_000
ROW = [0, 1, 1, 0, 5, 5, 0, 0, 5, 5, 5, 0, 0, 0, 0, [5, 1]]
TALLY = {"threads": [], "nodes": [[-1, 0]], "rows": [ROW]}

BAD_FILES: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "is empty"),
    "blank": (" \n ", "it ends where one of {\\[ belongs"),
    "text": ("hello", "'h' comes where"),
    "a number": ("12", "'1' comes where"),
    "cut off in a string": ('{"traceEvents": [{"ph": "X', "cut off"),
    "two values": ("[] []", "1 what follows its end, the first at byte 3"),
    "single quotes": ("{'traceEvents': []}", "no JSON"),
    "byte order mark": (b"\xef\xbb\xbf[]", "byte order mark"),
    "latin 1": ('[{"name": "é"}]'.encode("latin-1"), "characters that are no UTF-8"),
    "utf-16": ("[]".encode("utf-16"), "comes where one of"),
    "deep lists": (DEEP, "nests deeper"),
    "deep arguments": ('[{"args": ' + DEEP, "nests deeper"),
    "no events": ("{}", "no list 'traceEvents'"),
    "another document": ('{"a": 1}', "no list 'traceEvents'"),
    "events are no list": ('{"traceEvents": {}}', "'{' comes where one of \\[ belongs"),
    "a number for an event": ("[1]", "1 events that are no object, the first at event 1"),
    "null for an event": ("[null]", "1 events that are no object"),
    "NaN": ('[{"ph": "X", "ts": NaN}]', "slices without a time"),
    "endless digits": ('[{"ts": ' + "1" * 5000 + "}]", "cannot read the trace"),
    "a huge time": ("[" + slice_text(ts=10**30) + "]", "slices without a time"),
    "an infinite time": ('[{"ph": "X", "ts": 1e999, "dur": 1}]', "slices without a time"),
    "true for a time": ("[" + slice_text(ts=True) + "]", "slices without a time"),
    "no length": ("[" + slice_text(dur=None) + "]", "1 slices of no length, the first at event 1"),
    "negative length": ("[" + slice_text(dur=-1) + "]", "slices of a negative length"),
    "a list for a phase": ("[" + slice_text(ph=[]) + "]", "events without a phase"),
    "a thread without a name": (
        '[{"ph": "M", "name": "thread_name"}]',
        "names of threads and processes that are no text",
    ),
    "gzip of nothing": (gzip.compress(b""), "it ends where"),
    "gzip cut off": (gzip.compress(b"[" + slice_text().encode() + b"]")[:-9], "gzip data is cut off"),
    "gzip damaged": (gzip.compress(b"[]")[:-8] + b"12345678", "gzip data is cut off or damaged"),
    "gzip header only": (b"\x1f\x8b", "gzip data is cut off"),
    "gzip of noise": (b"\x1f\x8b" + bytes(range(256)), "gzip data is cut off or damaged"),
    "a newer format": (own(format=7), "read it with the version of instrument that wrote it"),
    "own, late": ('{"traceEvents": [' + slice_text() + '], "instrument": {"format": 6}}', "comes after its events"),
    **{
        f"own, {key} is {value!r:.30}": (own(**{key: value}), "cannot read the trace")
        for key, wrong in {
            "site": [-1, 1, "0", None, True],
            "id": ["1", None, 1.0, 2**70, []],
            "parent": [None, "x"],
            "self_ns": [0.5, None],
            "task": ["x"],
            "error": [5, []],
            "active_ns": ["x"],
            "total_ns": ["x"],
            "clipped": [1, "yes"],
            "attributes": [[], "x", 5],
            "remote": [[], {}, {"trace_id": "xyz", "span_id": "1", "flags": 1}, 5],
            "owner": [1],
            "tid": [None, "main"],
            "args": [None, [], 5],
            "dur": [-1, None],
            "ph": [None, []],
            "base_ns": [None, 1.5, 2**70],
            "origin": [None, [], {}, {"pid": "1", "service": "s", "monotonic_ns": 0, "realtime_ns": 0}],
            "threads": [None, 5, [[1]], [["1", "x"]], {"1": "x"}],
            "losses": [None, [], {"x": "y"}],
            "notes": [None, 5, [5]],
            "cost": [5, {}, {"calls": 1, "per_call_ns": "x", "window_ns": 2}],
            "sites": [None, [], 5, [5], [{}], [{"name": 5}], [{"name": "a", "attributes": 5}]],
            "window": [None, "0"],
            "tally": [
                5,
                [],
                {},
                TALLY | {"nodes": [[0, 0]]},
                TALLY | {"nodes": [[-2, 0]]},
                TALLY | {"nodes": [[-1, 9]]},
                TALLY | {"nodes": 5},
                TALLY | {"rows": [[]]},
                TALLY | {"rows": [[0, 1, [5, 1]]]},
                TALLY | {"rows": [[*ROW[:-1], [5]]]},
                TALLY | {"rows": [[*ROW[:-1], [3712, 1]]]},
                TALLY | {"rows": [[*ROW[:-1], [2**62, 1]]]},
                TALLY | {"rows": [[5, *ROW[1:]]]},
                TALLY | {"rows": [[0, "1", *ROW[2:]]]},
            ],
        }.items()
        for value in wrong
    },
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_trace_errors_that_name_the_file(tmp_path: Path, name: str) -> None:
    content, said = BAD_FILES[name]
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TraceError, match=said) as caught:
        chrome.load(path)
    assert str(caught.value).startswith(f"cannot read the trace {path}: ")
    assert len(str(caught.value)) < 400


JUNK: list[Any] = [None, True, -1, 1.5, 2**63, 10**400, 1e308, "", "0x5", "\ud800", [], [[]], {}, {"name": 5}]


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*way, key)
        yield from places(item, (*way, key))


@settings(max_examples=3 * settings.default.max_examples)
@given(st.data())
def test_a_file_with_any_value_replaced_loads_or_is_a_trace_error(tmp_path: Path, data: st.DataObject) -> None:
    found: Any = json.loads(data.draw(st.sampled_from([own(tally=TALLY, task=1, remote=None, cost=None), FOREIGN])))
    *way, last = data.draw(st.sampled_from(list(places(found))))
    inner = found
    for key in way:
        inner = inner[key]
    inner[last] = data.draw(st.sampled_from(JUNK))
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(found))
    try:
        loaded, tally = chrome.load(path)
    except TraceError:
        return
    again, _ = chrome.load(chrome.dump(path, loaded, tally))
    assert len(again.spans) == len(loaded.spans)


def test_a_missing_file_is_a_trace_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reasons = {"missing": "No such file", ".": "not a regular file", "pipe": "not a regular file", "a\0b": "null"}
    for name, said in reasons.items():
        with pytest.raises(TraceError, match=said):
            chrome.load(tmp_path / name)


@pytest.mark.parametrize("filler", [b"[", b" ", b"\0", b'[{"ph":"M"},'], ids=repr)
def test_a_gzip_bomb_is_refused_in_little_memory(tmp_path: Path, filler: bytes) -> None:
    path = tmp_path / "bomb.json.gz"
    block = filler * (1 << 20)
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(40):
            file.write(block)

    def load() -> None:
        with pytest.raises(TraceError, match="cannot read the trace"):
            chrome.load(path, limit_bytes=30 << 20)

    assert peak_bytes(load) < 20 << 20


def test_a_file_beyond_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(10 << 30)
    with pytest.raises(TraceError, match="more than 2147483648 bytes of text; record less, or raise limit_bytes"):
        chrome.load(path)


@pytest.mark.parametrize(
    "parents", [range(2, 3002), [*range(2, 3001), 1], [1] * 3000], ids=["backward", "ring", "self"]
)
def test_parents_that_lead_nowhere_are_refused_quickly(tmp_path: Path, parents: Sequence[int]) -> None:
    path = chrome.dump(tmp_path / "trace.json", trace(*(span(i, i, 9000) for i in range(1, len(parents) + 1))))
    found = document(path)
    for event, parent in zip(slices_in(found), parents, strict=True):
        event["args"]["parent"] = parent
    path.write_text(json.dumps(found))
    with pytest.raises(TraceError, match="damaged"):
        chrome.load(path)


FOREIGN = """{"baseTimeNanoseconds": 1700000000000000000, "host_name": "node", "traceEvents": [
  {"ph": "M", "name": "process_name", "pid": 9, "tid": 0, "args": {"name": "python"}},
  {"ph": "M", "name": "thread_name", "pid": 9, "tid": 10, "args": {"name": "main"}},
  {"ph": "X", "cat": "cpu_op", "name": "linear", "pid": 9, "tid": 10, "ts": 100.5, "dur": 50.25},
  {"ph": "X", "cat": "cpu_op", "name": "addmm", "pid": 9, "tid": 10, "ts": 110, "dur": 40.75},
  {"ph": "X", "cat": "python_function", "name": "crosses", "pid": 9, "tid": 10, "ts": 140, "dur": 30},
  {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 120, "dur": 5, "args": {"grid": [1]}},
  {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy", "pid": 0, "tid": 10, "ts": 90, "dur": 5, "args": {"bytes": 64}},
  {"ph": "B", "name": "inner", "pid": 9, "tid": "text", "ts": 5},
  {"ph": "E", "pid": 9, "tid": "text", "ts": 6},
  {"ph": "E", "pid": 9, "tid": "text", "ts": 9},
  {"ph": "B", "cat": "request", "name": "outer", "pid": 9, "tid": "text", "ts": 4},
  {"ph": "E", "pid": 9, "tid": "text", "ts": 10},
  {"ph": "B", "name": "never ends", "pid": 9, "tid": "text", "ts": 11},
  {"ph": "b", "cat": "r", "id": 1, "name": "first", "pid": 9, "tid": 10, "ts": 100},
  {"ph": "b", "cat": "r", "id": 2, "name": "second", "pid": 9, "tid": 10, "ts": 105},
  {"ph": "e", "cat": "r", "id": 1, "name": "first", "pid": 9, "tid": 10, "ts": 110},
  {"ph": "e", "cat": "r", "id": 2, "name": "second", "pid": 9, "tid": 10, "ts": 120},
  {"ph": "i", "name": "instant", "ts": 1}, {"ph": "C", "name": "counter", "ts": 1}, {}
]}"""


def test_the_slice_that_says_how_long_torch_profiler_watched_is_no_call(tmp_path: Path) -> None:
    watched = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler"}
    called = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 7, "tid": 7}
    path = tmp_path / "torch.json"
    path.write_text(json.dumps({"traceEvents": [{**one, "ts": 1, "dur": 2} for one in (watched, called)]}))
    trace, tally = chrome.load(path)
    assert [span.site.name for span in trace.spans] == ["aten::add"]
    assert tally.calls == 1


@pytest.mark.parametrize(
    ("name", "category", "known"),
    [
        ("ProfilerStep#3", "user_annotation", ("ProfilerStep", "step", 3)),
        ("ProfilerStep#3", "cpu_op", ("ProfilerStep", "step", 3)),
        ("ProfileStep#12[1.500 ms]", "ProfileStep", ("ProfileStep", "step", 12)),
        ("ProfilerStep#3", "gpu_user_annotation", ("ProfilerStep#3", "user", None)),
        ("MyProfilerStep#3", "user_annotation", ("MyProfilerStep#3", "user", None)),
        (f"ProfilerStep#{'9' * 5000}", "user_annotation", (f"ProfilerStep#{'9' * 5000}", "user", None)),
    ],
)
def test_a_step_of_another_profiler_is_known_by_its_name(
    tmp_path: Path, name: str, category: str, known: tuple[str, str, int | None]
) -> None:
    path = tmp_path / "foreign.json"
    event = {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": 7, "ts": 1, "dur": 2, "args": {"kept": "x"}}
    path.write_text(json.dumps({"traceEvents": [event]}))
    (found,) = chrome.load(path)[0].spans
    assert (found.site.name, found.site.kind, found.attributes.get("step")) == known
    assert found.attributes["kept"] == "x"


def test_traces_of_other_profilers_are_read_by_their_slices(tmp_path: Path) -> None:
    path = tmp_path / "foreign.json"
    path.write_text(FOREIGN)
    loaded, tally = chrome.load(path)
    by_id = {one.span_id: one for one in loaded.spans}
    shown = {
        one.site.name: (
            one.site.kind,
            loaded.threads[one.thread_id],
            by_id[one.parent_id].site.name if one.parent_id else None,
            one.start_ns,
            one.total_ns,
            one.self_ns,
        )
        for one in loaded.spans
    }
    assert shown == {
        "linear": ("op", "python: main", None, 100_500, 50_250, 9_500),
        "addmm": ("op", "python: main", "linear", 110_000, 40_750, 40_750),
        "crosses": ("user", "python: main", None, 140_000, 30_000, 30_000),
        "gemm": ("op", "process 0: thread 7", None, 120_000, 5_000, 5_000),
        "Memcpy": ("copy", "process 0: thread 10", None, 90_000, 5_000, 5_000),
        "inner": ("user", "python: text", "outer", 5_000, 1_000, 1_000),
        "outer": ("request", "python: text", None, 4_000, 5_000, 4_000),
        "never ends": ("user", "python: text", None, 11_000, 159_000, 159_000),
        "first": ("user", "python: main", None, 100_000, 10_000, 10_000),
        "second": ("user", "python: main", None, 105_000, 15_000, 15_000),
    }
    assert loaded.losses == {"slice ends without a begin": 1}
    assert [one.site.name for one in loaded.spans if one.clipped] == ["never ends"]
    assert (loaded.origin.pid, loaded.origin.service, loaded.origin.host) == (9, "python", "node")
    assert loaded.origin.realtime_of(1) == 1_700_000_000_000_000_001
    assert tally.calls == 10
    assert sum(row.totals.moved_bytes for row in tally.iterate_totals()) == 64
    assert_same(chrome.load(chrome.dump(tmp_path / "again.json", loaded))[0], loaded)


@pytest.mark.parametrize(
    "text", ["[]", "[" + slice_text() + "]", '{"traceEvents": []}', ' { "a" : [ ] , "traceEvents" : [ ] } ']
)
def test_bare_lists_and_objects_are_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    loaded, _ = chrome.load(tmp_path / "trace.json")
    assert len(loaded.spans) == text.count("dur")


def test_values_longer_than_a_block_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.chrome.event_reading.BLOCK_BYTES", 1)
    spans = [span(i, i, 50 - i, site=SITES[i % 9], parent=i - 1) for i in range(1, 20)]
    path = chrome.dump(tmp_path / "trace.json.gz", trace(*spans))
    assert_same(chrome.load(path)[0], trace(*spans))


@pytest.mark.parametrize("size_bytes", range(1, 9))
def test_numbers_that_a_block_cuts_anywhere_are_read_in_full(
    size_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instrument.chrome.event_reading.BLOCK_BYTES", size_bytes)
    path = tmp_path / "trace.json"
    path.write_text('{"a":1.5,"b":-1.25e+2,"c":2E-1,"d":12,"traceEvents":[],"baseTimeNanoseconds":120}')
    assert chrome.load(path)[0].origin.realtime_ns == 120
    path.write_text('{"traceEvents":[],"a":1.')
    with pytest.raises(TraceError, match="at character 23"):
        chrome.load(path)


def test_names_stay_data_in_viewers_and_files(tmp_path: Path) -> None:
    spans = [span(i, i, i + 1, site=Site(name)) for i, name in enumerate(HOSTILE, start=1)]
    found = dumped(tmp_path, *spans)
    assert [event["name"] for event in slices_in(found)] == HOSTILE
    assert "\x7f" not in (tmp_path / "trace.json").read_text().partition('"traceEvents"')[0]
    assert [one.site.name for one in chrome.load(tmp_path / "trace.json")[0].spans] == HOSTILE


def event(phase: str = "X", **changes: Any) -> dict[str, Any]:
    facts = {"ph": phase, "name": "a", "ts": 1, "pid": 1, "tid": 1} | ({"dur": 2} if phase == "X" else {}) | changes
    return {key: value for key, value in facts.items() if value is not None}


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([event()], None),
        ([event(), event(ts=3, dur=0), event(ts=3, dur=9)], None),
        ([event(), event(ts=2, dur=2)], "crosses one that ends at 3000: dropped"),
        ([event(ts=1, dur=1), event(ts=1.5, dur=0.501)], "crosses"),
        ([event(ts=i, dur=2000 - 2 * i) for i in range(513)], "lies in 512 others"),
        ([event(dur=None)], "dur None is no number"),
        ([event(dur=-1)], "negative"),
        ([event(ts=-1)], "negative"),
        ([event(ts=None)], "ts None is no number"),
        ([event(ts=5e12)], "nanoseconds are lost"),
        ([event(ts=0.0005)], "no whole number of nanoseconds"),
        ([event(name=None)], "no name"),
        ([event("Q")], "no phase that is shown"),
        ([event(tid=2**32)], "no integer of 32 bits"),
        ([event(pid="main")], "no integer of 32 bits"),
        ([event(args={"x": 2**63})], "beyond int64"),
        ([event(args={"x": [float("nan")]})], "is not JSON"),
        ([event(name="\ud800")], "lone surrogate"),
        ([event(args=[])], "args is no object"),
        ([7], "no object"),
        ([event("B"), event("E", ts=5, name=None)], None),
        ([event("B"), event("B", ts=2, name="b"), event("E", ts=3)], "is the innermost"),
        ([event("B")], "never ends"),
        ([event("E")], "never began"),
        ([event("b"), event("e", ts=3)], "no id"),
        ([event("b", id=1), event("b", id=1, ts=2, name="b"), event("e", id=1, ts=3)], "is the innermost"),
        ([event("b", id=1, cat="x"), event("e", id=1, ts=3)], "never ends"),
        ([event("b", id=1, pid=1), event("b", id=1, pid=2, name="b"), event("e", id=1, ts=3)], "is the innermost"),
        ([event(), event("s", id=1), event("f", id=1, ts=2, bp="e")], None),
        ([event(), event("s", id=1), event("f", id=1, ts=2)], "without bp"),
        ([event(), event("s", id=1, ts=2), event("f", id=1, bp="e")], "into the past"),
        ([event(), event("s", id=1), event("f", id=1, ts=9, bp="e")], "lies in no slice"),
        ([event(), event("s", id=1), event("f", id=2, ts=2, bp="e")], "0 starts"),
        ([event(), event("s", id=1)], "nothing ends it"),
        ([event(), event("s", id=1), event("s", id=1), event("f", id=1, bp="e")], "2 starts"),
        ([event(bind_id="0x99", flow_out=True), event(tid=2, ts=2, bind_id="0x99", flow_in=True)], None),
        ([event(bind_id="0x99", flow_in=True), event(tid=2, ts=2, bind_id="0x99", flow_out=True)], "before its source"),
        ([event(bind_id="0x99", flow_in=True)], "0 slices start it"),
        (
            [
                event("b", id=1, bind_id="0x99", flow_out=True),
                event("e", id=1, ts=9),
                event(bind_id="0x99", flow_in=True),
            ],
            "before its source",
        ),
        (
            [
                *(event(), event("s", id=1), event("f", id=1, ts=2, bp="e")),
                *(event(ts=3, bind_id="0x0", flow_out=True), event(ts=5, bind_id="0x0", flow_in=True)),
            ],
            "also the number of another arrow",
        ),
        ([event("C", args={"v": 1.5})], None),
        ([event("C", args={"v": "x"})], "needs numbers"),
        ([event("M", name="thread_name", args={"name": "x"})], None),
        ([event("M", name="thread_name", args={})], "without a name"),
        ([event("M", name="thread_name", tid=0, args={"name": "x"})], "tid 0"),
        ([event("M", name="process_sort_index", args={"sort_index": "1"})], "without a sort_index"),
    ],
)
def test_the_rules_know_what_viewers_drop(events: list[Any], said: str | None) -> None:
    found = chrome_rules.problems({"traceEvents": events})
    assert (found == []) if said is None else any(said in problem for problem in found), found
