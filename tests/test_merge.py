"""Several recordings as one: every span once, trees kept, ids unique, processes apart, on one clock or refused."""

from __future__ import annotations

import _ctypes
import ctypes
import json
import re
import struct
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.recordings import program
from raw_spans import counted, traces

from instrument import chrome, clock
from instrument.cli import main
from instrument.errors import TraceError
from instrument.recording.spans import (
    HOST,
    DeviceInterval,
    Gpu,
    Kernel,
    Origin,
    OwnNotes,
    Site,
    Span,
    describe_uncalled_targets,
)
from instrument.recording.trace_context import LINK
from instrument.report.kernels_view import UNKNOWN, kernels
from instrument.report.memory_view import memory
from instrument.report.view import Options, Recording
from instrument.trace import file
from instrument.trace.file import Saved
from instrument.trace.merge import merge_recordings
from instrument.trace.trace import Allocation, Trace


def saved(trace: Trace, *, pid: int = 1, boot: str = "b", **more: Any) -> Saved:
    """A trace as the file of a process."""
    own = replace(trace, origin=replace(trace.origin, pid=pid, boot=boot, **more))
    return Saved(own, counted(trace.spans, trace.threads))


def told(spans: list[Span]) -> Counter[Any]:
    """Spans by what they are and what they lie in, however they are numbered."""
    by_id = {span.span_id: span for span in spans}

    def facts(span: Span | None) -> Any:
        return span and (span.site.key, span.start_ns, span.end_ns, span.self_ns, span.error)

    return Counter(
        (facts(one), facts(by_id.get(one.parent_id)), facts(by_id.get(one.root_id)), one.device) for one in spans
    )


@given(one=traces(), other=traces())
def test_merged_spans_of_two_processes_keep_their_parents(one: Trace, other: Trace) -> None:
    found = merge_recordings([saved(replace(one, gpus=()), pid=1), saved(replace(other, gpus=()), pid=2)]).saved
    spans = found.trace.spans
    without_devices = [
        [replace_device(span) for span in its] for its in (spans, one.spans, other.spans)
    ]  # fmt: skip
    assert told(without_devices[0]) == told(without_devices[1]) + told(without_devices[2])
    assert len({span.span_id for span in spans}) == len(one.spans) + len(other.spans)
    assert found.read_or_count_totals().calls == len(one.spans) + len(other.spans)
    assert sum(len(span.device) for span in spans) == sum(len(span.device) for span in [*one.spans, *other.spans])
    starts = found.trace.columns.start_ns
    assert (starts[1:] >= starts[:-1]).all()


@given(one=traces(), other=traces())
def test_merged_attributes_stay_with_their_rows(one: Trace, other: Trace) -> None:
    columns = merge_recordings(
        [saved(replace(one, gpus=()), pid=1), saved(replace(other, gpus=()), pid=2)]
    ).saved.trace.columns
    rows = np.arange(len(columns.start_ns))
    for name in {name for its in (one, other) for span in its.spans for name in span.attributes}:
        wanted = [columns.attributes[row].get(name) for row in rows.tolist()]
        assert columns.attributes.values(name, rows) == wanted
        assert columns.attributes.values(name, rows[::-2]) == wanted[::-2]


def replace_device(span: Span) -> Span:
    return Span(
        span.site, span.span_id, span.parent_id, span.root_id, span.thread_id, span.task_id, span.start_ns,
        span.end_ns, span.active_ns, span.self_ns, span.error,
    )  # fmt: skip


@given(trace=traces(), cut=st.integers(0, 30))
def test_spans_in_two_files_of_a_process_are_merged_once(trace: Trace, cut: int) -> None:
    part = saved(replace(trace, spans=trace.spans[:cut]))
    for files in ([saved(trace), part], [part, saved(trace)]):
        assert told(list(map(replace_device, merge_recordings(files).saved.trace.spans))) == told(
            list(map(replace_device, trace.spans))
        )


def span(span_id: int, start_ns: int, end_ns: int, **more: Any) -> Span:
    facts = {"parent_id": 0, "root_id": span_id, "thread_id": 7, "task_id": 0, **more}
    length = end_ns - start_ns
    return Span(facts.pop("site", Site("f")), span_id, facts.pop("parent_id"), facts.pop("root_id"),
        facts.pop("thread_id"), facts.pop("task_id"), start_ns, end_ns, length, length, **facts)  # fmt: skip


def trace_with(*spans: Span, **more: Any) -> Trace:
    origin = Origin(1, "shop", 0, 10**18, recorder="native", host="node")
    return Trace(origin, 0, 1_000, list(spans), {7: "MainThread"}, **more)


def test_a_span_that_was_open_at_a_dump_is_taken_from_the_file_that_saw_its_end() -> None:
    begun, ended = span(3, 10, 50, clipped=True), span(3, 10, 90)
    child = span(4, 20, 30, parent_id=3, root_id=3)
    found = merge_recordings([saved(trace_with(begun, child)), saved(trace_with(ended))]).saved.trace.spans
    assert [(one.start_ns, one.end_ns, one.parent_id == 0, one.clipped) for one in found] == [
        (10, 90, True, False), (20, 30, False, False),
    ]  # fmt: skip
    assert found[1].parent_id == found[0].span_id


def test_threads_of_one_number_stay_apart_by_process_and_bear_its_name() -> None:
    found = merge_recordings([saved(trace_with(span(1, 0, 5)), pid=pid) for pid in (1, 2)]).saved
    assert len(set(found.trace.columns.thread_id.tolist())) == 2
    assert set(found.trace.threads.values()) == {"shop 1 MainThread", "shop 2 MainThread"}
    assert {row.thread_id for row in found.read_or_count_totals().iterate_totals()} == set(
        found.trace.columns.thread_id.tolist()
    )


def test_sites_that_mean_one_place_are_one_with_the_attributes_that_they_share() -> None:
    sites = [Site("all_reduce", "comm", attributes=(("rank", rank), ("op", "sum"))) for rank in (0, 1)]
    found = merge_recordings(
        [saved(trace_with(span(1, 0, 5, site=site)), pid=1 + at) for at, site in enumerate(sites)]
    ).saved
    assert [(site.name, site.attributes) for site in found.trace.columns.sites] == [("all_reduce", (("op", "sum"),))]
    assert {row.path for row in found.read_or_count_totals().iterate_totals()} == {(found.trace.columns.sites[0],)}


@pytest.mark.parametrize(("uuids", "devices"), [(("GPU-a", "GPU-a"), 1), (("GPU-a", "GPU-b"), 2), ((None, None), 2)])
def test_one_gpu_is_one_where_its_uuid_says_so(uuids: tuple[str | None, ...], devices: int) -> None:
    files = []
    for pid, uuid in enumerate(uuids, 1):
        device = (DeviceInterval(0, 7, 1, 4),)
        gpus = () if uuid is None else (Gpu(0, "H200", uuid),)
        files.append(saved(trace_with(span(1, 0, 5, device=device), gpus=gpus), pid=pid))
    found = merge_recordings(files).saved
    assert len(set(found.trace.columns.device.device.tolist())) == devices
    assert len(set(found.trace.columns.device.stream.tolist())) == 2


def test_a_link_to_a_span_follows_its_number_and_a_link_to_nothing_goes_nowhere() -> None:
    spans = [span(1, 0, 5), span(2, 6, 9, attributes={LINK: (1, 1)}), span(3, 10, 12, attributes={LINK: (99, 99)})]
    found = merge_recordings(
        [saved(trace_with(span(1, 0, 5)), pid=1), saved(trace_with(*spans), pid=2)]
    ).saved.trace.spans
    linked = [one for one in found if LINK in one.attributes]
    target = next(one for one in found if one.span_id == linked[0].attributes[LINK][0])
    assert found.index(target) in (0, 1)
    assert linked[0].attributes[LINK] == (target.span_id, target.span_id)
    assert linked[1].attributes[LINK] == (0, 0)


def test_totals_of_overlapping_files_of_a_process_count_a_call_once() -> None:
    early, late = trace_with(span(1, 0, 5), span(2, 6, 9)), trace_with(span(2, 6, 9), span(3, 10, 12))
    files = [saved(replace(early, end_ns=9)), saved(replace(late, start_ns=6))]
    assert merge_recordings(files).saved.read_or_count_totals().calls == 3


def test_machines_are_refused_unless_their_wall_clocks_are_asked_for() -> None:
    near, far = trace_with(span(1, 0, 5)), trace_with(span(1, 1_000, 1_005))
    files = [saved(near, pid=1, boot="b"), saved(far, pid=2, boot="c", monotonic_ns=1_000)]
    with pytest.raises(TraceError, match="--clock wall"):
        merge_recordings(files)
    merged = merge_recordings(files, by_wall_clock=True)
    assert merged.saved.trace.columns.start_ns.tolist() == [0, 0]
    assert "of which nobody knows how far they are apart" in merged.header
    with pytest.raises(TraceError, match="time of day"):
        merge_recordings([files[0], saved(far, pid=2, boot="c", realtime_ns=0)], by_wall_clock=True)


def test_machines_whose_clocks_are_kept_are_one_with_the_bound_stated() -> None:
    near, far = trace_with(span(1, 0, 5)), trace_with(span(1, 0, 5))
    files = [
        saved(replace(near, end_ns=10**9), pid=1, boot="b", wall_error_ns=2_000_000),
        saved(far, pid=2, boot="c", wall_error_ns=1_500_000),
    ]
    merged = merge_recordings(files)
    assert merged.apart_ns == 2_000_000 + 500_000 + 1_500_000, "and what a clock that is being set gains in a second"
    assert merged.header == "2 files of 2 processes, by their wall clocks, which are at most 4 ms apart"


@pytest.mark.parametrize(("state", "status", "expected"), [(0, 0x2001, 1_234_000), (5, 0x2041, 0), (-1, 0, 0)])
def test_the_wall_clocks_error_is_what_the_system_says_of_one_that_is_kept(
    state: int, status: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def adjtimex(_: int, arguments: tuple[bytes]) -> int:
        data = bytearray(len(arguments[0]))
        struct.pack_into("=q", data, 24, 1_234)
        struct.pack_into("=i", data, 40, status)
        ctypes.memmove(arguments[0], bytes(data), len(data))
        return state

    monkeypatch.setattr(_ctypes, "call_cdeclfunction", adjtimex)
    assert clock.read_wall_clock_error_ns() == expected


def test_parents_that_two_files_put_in_a_circle_are_refused() -> None:
    one = trace_with(span(1, 0, 9, parent_id=2), span(2, 1, 5, parent_id=0))
    other = trace_with(span(1, 0, 8, parent_id=0), span(2, 1, 9, parent_id=1))
    with pytest.raises(TraceError, match="its own ancestor"):
        merge_recordings([saved(one), saved(other)])


SERVICE = """
import os
from instrument import scope, stop
children = []
for count in (2, 3, 4, 5):
    child = os.fork()
    if not child:
        for _ in range(count):
            with scope("request", kind="request"), scope("work"): pass
        stop()
        os._exit(0)
    children.append(child)
for child in children: os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the recordings of a service with four workers, with Chrome traces in the same folder."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "service.py").write_text(SERVICE)
    (folder / "profile.yaml").write_text(
        "service: shop\nexport: {recording: , chrome: {path: 'chrome/{service}-{pid}.json.gz'}}"
    )
    words = [sys.executable, "-m", "instrument", "run", "--profile", "profile.yaml", "--", "service.py"]
    subprocess.run(words, cwd=folder, check=True, timeout=240)
    return folder


def test_the_folder_of_a_run_with_four_workers_is_one_report(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(list((run / "traces").iterdir())) == 4
    assert main(["report", str(run / "traces"), "--view", "events"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("4 files of 4 processes, on the monotonic clock of one machine\n")
    assert next(line.split()[:2] for line in said.splitlines() if line.startswith("request")) == ["request", "14"]


def test_recordings_and_chrome_traces_of_the_same_processes_count_once(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run / "traces"), str(run / "chrome"), "--view", "events", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["merged"] == {"files": 8, "processes": 4, "runs": 1, "clock": "monotonic", "apart_ns": 0}
    assert document["cost"]["calls"] == 28


def test_by_process_each_has_a_report_of_its_own(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run / "traces"), str(run / "chrome"), "--by", "process", "--json"]) == 0
    documents = json.loads(capsys.readouterr().out)["processes"]
    assert sorted(one["cost"]["calls"] for one in documents) == [4, 6, 8, 10]
    assert len({one["process"]["pid"] for one in documents}) == 4
    assert main(["report", str(run / "traces"), "--by", "process"]) == 0
    assert capsys.readouterr().out.count("\nProcess: shop ") == 3


def test_files_that_cannot_be_merged_are_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = tmp_path / "foreign.json"
    foreign.write_text('[{"ph":"X","name":"f","ts":1,"dur":2,"pid":1,"tid":1}]')
    empty = tmp_path / "empty"
    empty.mkdir()
    for words, why in (
        ([str(run / "traces"), str(foreign)], "--clock wall"),
        ([str(run / "traces"), str(foreign), "--clock", "wall"], "has no time of day"),
        ([str(empty)], "has no recording"),
        ([str(run / "traces"), "--with", str(foreign)], "--with needs one file of ours"),
    ):
        assert main(["report", *words]) == 2
        told = capsys.readouterr().err
        assert why in told
        assert told.count("\n") == 1
    assert main(["report", str(run / "traces"), str(foreign), "--by", "process"]) == 0


def test_a_merged_trace_is_saved_and_read_back_in_both_forms(tmp_path: Path) -> None:
    files = [saved(program(seed, 120), pid=seed) for seed in (1, 2)]
    merged = merge_recordings(files).saved
    again = file.load(file.dump(tmp_path / "m.npz", merged.trace, merged.tally))
    assert np.array_equal(again.trace.columns.start_ns, merged.trace.columns.start_ns)
    assert told(again.trace.spans) == told(merged.trace.spans)
    trace, _ = chrome.load(chrome.dump(tmp_path / "m.json", merged.trace, merged.tally))
    assert told(trace.spans) == told(merged.trace.spans)


def numbers(files: list[Saved]) -> dict[str, Any]:
    """Return the numbers of files as one."""
    found = merge_recordings(files).saved
    rows = Counter(
        (tuple(site.key for site in row.path), row.totals.calls)
        for row in found.read_or_count_totals().iterate_totals()
    )
    return {
        "spans": told(found.trace.spans),
        "calls": rows,
        "threads": Counter(found.trace.threads.values()),
        "on streams": len({(one.device, one.stream) for its in found.trace.spans for one in its.device}),
        "losses": found.trace.losses,
        "notes": sorted(found.trace.notes),
    }


@given(one=traces(), other=traces(), cut=st.integers(0, 14), way=st.sampled_from(["as it is", "recording", "chrome"]))
def test_a_merged_file_next_to_those_that_it_was_made_of_counts_no_span_again(
    one: Trace, other: Trace, cut: int, way: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    facts = {"losses": {"ring": 2}, "notes": ["not this"]}
    one, other = (replace(its, **facts, start_ns=-10, end_ns=300) for its in (one, other))  # fmt: skip
    files = [saved(one, pid=1), saved(other, pid=2)]
    early = [saved(replace(one, spans=one.spans[:cut], end_ns=200), pid=1), files[1]]
    merged = merge_recordings(early).saved
    folder = tmp_path_factory.mktemp("m") if way != "as it is" else Path()
    if way == "recording":
        merged = file.load(file.dump(folder / "m.npz", merged.trace, merged.tally))
    elif way == "chrome":
        merged = chrome.read(chrome.dump(folder / "m.json", merged.trace, merged.tally))
    expected = numbers(files)
    assert numbers([*files, merged]) == expected
    assert numbers([merged, *files]) == expected
    assert numbers([merged, files[1]]) == numbers(early)


def test_windows_of_a_process_that_were_merged_count_no_call_again() -> None:
    """A span that was open at the edge of two windows is in both, under one id."""
    first = replace(trace_with(span(1, 0, 100, clipped=True), span(2, 10, 20)), end_ns=100)
    second = replace(trace_with(span(1, 200, 300, clipped=True), span(3, 210, 220)), start_ns=200, end_ns=300)
    windows, other = [saved(first), saved(second)], saved(trace_with(span(1, 0, 5)), pid=2)
    merged = merge_recordings([*windows, other]).saved
    assert [one.windows for one in merged.trace.processes] == [[(0, 100), (200, 300)], [(0, 1_000)]]
    assert numbers([merged, *windows]) == numbers([merged]) == numbers([*windows, other])


def test_files_that_were_put_on_one_clock_by_their_time_of_day_count_once() -> None:
    near, far = saved(trace_with(span(1, 0, 5))), saved(trace_with(span(1, 1_000, 1_005)), pid=2, boot="c")
    far = replace(far, trace=replace(far.trace, origin=replace(far.trace.origin, monotonic_ns=990, host="far")))
    merged = merge_recordings([near, far], by_wall_clock=True).saved
    again = merge_recordings([merged, near, far], by_wall_clock=True)
    assert (again.files, again.processes) == (3, 2)
    assert again.saved.trace.columns.start_ns.tolist() == merged.trace.columns.start_ns.tolist() == [0, 10]


def test_containers_whose_processes_have_one_number_are_two_processes() -> None:
    files = [saved(trace_with(span(1, 0, 5)), pid=7, start_ticks=ticks) for ticks in (100, 200)]
    assert merge_recordings(files).processes == 2
    assert len(merge_recordings(files).saved.trace.columns) == 2
    assert merge_recordings([files[0], files[0]]).processes == 1


def names_of(path: Path, what: str) -> dict[tuple[int, int | None], str]:
    events = json.loads(path.read_text())["traceEvents"]
    return {(one["pid"], one.get("tid")): one["args"]["name"] for one in events if one.get("name") == what}


def test_each_process_of_a_merged_trace_is_one_to_viewers(tmp_path: Path) -> None:
    """Two of one number, in containers, are shown under different ones."""
    site = Site("handle", "request")
    requests = [span(1, 0, 9, site=site), span(2, 2, 5, parent_id=1, root_id=1, task_id=3, thread_id=8)]
    files = [
        saved(trace_with(*requests), pid=pid, service=service, start_ticks=ticks)
        for pid, service, ticks in ((11, "api", 1), (12, "api", 2), (7, "engine", 3), (7, "engine", 4))
    ]
    merged = merge_recordings(files).saved
    path = chrome.dump(tmp_path / "m.json", merged.trace, merged.tally)
    processes = names_of(path, "process_name")
    assert [processes[pid, None] for pid in (11, 12, 7)] == ["api", "api", "engine"]
    assert sorted(processes.values()) == ["api", "api", "engine", "engine"]
    assert names_of(path, "thread_name") == {
        (pid, tid): name for pid, _ in processes for tid, name in ((7, "MainThread"), (8, "thread 8"))
    }
    events = json.loads(path.read_text())["traceEvents"]
    assert Counter((one["pid"], one["tid"]) for one in events if one["ph"] == "b") == {
        (pid, tid): 1 for pid, _ in processes for tid in (7, 8)
    }
    again = chrome.read(path)
    assert told(again.trace.spans) == told(merged.trace.spans)
    assert again.trace.threads == merged.trace.threads


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with the files of two runs, and of a process that was started without one."""
    folder = tmp_path / "traces"
    for name, run, pid, at_ns in (("a", "r1", 1, 0), ("b", "r1", 2, 10**12), ("c", "r2", 3, 10**13), ("d", "", 4, 0)):
        trace = replace(trace_with(span(1, at_ns, at_ns + 5)), start_ns=at_ns, end_ns=at_ns + 9)
        its = saved(trace, pid=pid, run=run)
        file.dump(folder / f"{name}.npz", its.trace, its.tally)
    return folder


def test_a_folder_with_several_runs_shows_the_newest_and_names_the_others(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def calls(*words: str) -> tuple[str, str]:
        assert main(["query", str(runs), "select count(*) as calls from spans", "--csv", *words]) == 0
        said = capsys.readouterr()
        return said.out.split()[1], said.err

    found, told_of = calls()
    assert found == "1"
    assert "has files of 3 runs: r2 (1 file), r1 (2 files), unnamed-" in told_of
    assert "this is the newest, r2; --run RUN takes another one, --all all of them" in told_of
    assert calls("--run", "r1") == ("2", "")
    assert calls("--all") == ("4", "")
    assert main(["report", str(runs), "--all", "--view", "events"]) == 0
    assert capsys.readouterr().out.startswith("4 files of 4 processes in 2 runs, on the monotonic clock")
    assert main(["report", str(runs), "--run", "r3"]) == 2
    assert "has no run r3; its runs are: " in capsys.readouterr().err


def test_a_rule_without_a_match_is_no_note_if_another_process_has_one(tmp_path: Path) -> None:
    """A rule is at work in the engine's process, and a target is called in one of two."""
    sites = [Site(name, "user", "shop", name) for name in ("work", "rest")]
    files = []
    for pid, site, at_work, waiting, uncalled in (
        (1, sites[0], ("a 1",), (("a 2", "engine:*: waiting (engine not imported)"),), ("shop:rest", "shop:idle")),
        (2, sites[1], ("a 2",), (("a 3", "gone:*: waiting (gone not imported)"),), ("shop:idle", "shop:work")),
    ):
        notes = [*(note for _, note in waiting), describe_uncalled_targets(uncalled), "blind"]
        trace = trace_with(span(1, 0, 5, site=site), notes=notes, own_notes=OwnNotes(at_work, waiting, uncalled))
        its = saved(trace, pid=pid)
        files.append(file.load(file.dump(tmp_path / f"{pid}.npz", its.trace, its.tally)))
    expected = ["shop 2: gone:*: waiting (gone not imported)", "blind", "1 target was never called: shop:idle"]
    merged = merge_recordings(files).saved
    assert sorted(merged.trace.notes) == sorted(expected)
    assert sorted(merge_recordings([merged, files[0]]).saved.trace.notes) == sorted(expected)


RULES_OF_TWO = """
import os, sys, time
def first(): pass
def second(): pass
if len(sys.argv) > 1: second()
else:
    first()
    import subprocess; subprocess.run([sys.executable, __file__, "child"], check=True)
"""


def test_a_run_says_never_called_of_what_none_of_its_processes_called(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(RULES_OF_TWO)
    (tmp_path / "profile.yaml").write_text("functions: [{match: '__main__:*'}]\nexport: {summary: {to: stderr}}")
    words = [sys.executable, "-m", "instrument", "run", "--profile", "profile.yaml", "--", "service.py"]
    done = subprocess.run(words, cwd=tmp_path, check=True, timeout=240, capture_output=True, text=True)
    assert "never called" not in done.stderr
    assert "Processes: 2" in done.stderr


def test_a_long_table_ends_with_how_many_rows_remain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spans = [span(number, number * 10, number * 10 + 5, site=Site(f"f{number}", "op")) for number in range(1, 21)]
    its = saved(trace_with(*spans))
    path = str(file.dump(tmp_path / "a.npz", its.trace, its.tally))
    for words, rows in (((), 15), (("--rows", "3"), 3), (("--rows", "all"), 20)):
        assert main(["report", path, "--view", "events", "--threads", "merged", *words]) == 0
        said = capsys.readouterr().out
        assert len(set(re.findall(r"(?m)\bf\d+\b", said))) == rows
        assert (f"(remaining {20 - rows})" in said) == (rows < 20)
    assert main(["report", path, "--view", "events", "--json"]) == 0
    assert "(remaining" not in capsys.readouterr().out


def test_the_record_of_torch_profiler_stays_with_its_process_in_a_merge() -> None:
    """Both have a thread 7 and a device 0, of GPUs that are not the same."""
    on_device = DeviceInterval(0, 7, 0, 50)
    theirs, ours = (Span(Site(name, "op"), 1, 0, 1, 7, 0, 0, 100, 100, 100) for name in ("theirs", "ours"))
    theirs.device = (on_device,)
    seen = {
        "kernels": [Kernel("gemm", "kernel", 0, 7, 20, 30, 7, 10), Kernel("add", "kernel", 0, 7, 30, 40)],
        "allocations": [Allocation(0, 50, 7, 64, 5, 64), Allocation(HOST, 60, 7, 32, 6, 32)],
        "watched": (0, 100),
    }
    parts = [Trace(Origin(1, "shop", 0, 0), 0, 100, [theirs]), Trace(Origin(2, "shop", 0, 0), 0, 100, [ours], **seen)]
    gpus = [[Gpu(0, "H200", f"GPU-{number}")] for number in range(2)]
    files = [saved(replace(one, gpus=its), pid=pid) for pid, (one, its) in enumerate(zip(parts, gpus, strict=True))]
    recording = Recording.from_file(merge_recordings(files).saved)
    (device,) = (gpu.device for gpu in recording.trace.gpus if gpu.uuid == "GPU-1")
    used, held = kernels(recording, Options()), memory(recording, Options())
    assert [(use.name, use.kernels) for use in used.places] == [(UNKNOWN, 1), ("ours", 1)]
    assert [(use.device, use.name) for use in held.places] == [(device, "ours"), (HOST, "ours")]
    assert [one.device for one in used.devices] == [device]
