"""Saved recordings: what was saved comes back exactly, numpy reads it by itself, and no damaged one does harm."""

from __future__ import annotations

import json
import math
import random
import stat
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fuzz_traces import changed_bytes, sample_trace
from hypothesis import given
from hypothesis import strategies as st
from oracle.recordings import program
from raw_spans import counted, traces
from tallies import by_keys

import instrument
from instrument import chrome
from instrument.errors import TraceError
from instrument.recording.spans import HOST, Kernel, Origin, Site, Span
from instrument.recording.tally import Tally
from instrument.report.section import format_summary
from instrument.report.view import Options, Recording
from instrument.trace import file
from instrument.trace.text import GatheredAttributes, decode_json_texts
from instrument.trace.trace import Allocation, Trace, columns_of_spans


def saved_and_read(folder: Path, trace: Trace, tally: Tally | None = None) -> file.Saved:
    return file.load(file.dump(folder / "recording.npz", trace, tally))


def facts(trace: Trace) -> str:
    """All of a trace by value but for its start-up, in the order of its file."""
    ordered = sorted(trace.spans, key=lambda span: (span.start_ns, -span.end_ns, span.span_id))
    spans = [[getattr(one, name) for name in Span.__slots__ if name != "site"] + [one.site.key] for one in ordered]
    known = {name: getattr(trace, name) for name in Trace.__slots__ if name not in ("spans", "startup", "columns")}
    sequences = ("notes", "samples", "gpus", "kernels", "allocations", "flops")
    return repr((spans, known | {name: tuple(known[name]) for name in sequences}))


@given(trace=traces())
def test_any_spans_come_back_exactly(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    assert facts(saved_and_read(tmp_path_factory.mktemp("saved"), trace).trace) == facts(trace)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_facts_other_than_spans_are_read_back_as_from_chrome_files(seed: int, tmp_path: Path) -> None:
    trace = program(seed, 120)
    tally = counted(trace.spans, trace.threads)
    expected, expected_tally = chrome.load(chrome.dump(tmp_path / "trace.json", trace, tally))
    saved = saved_and_read(tmp_path, trace, tally)
    assert facts(saved.trace) == facts(expected)
    assert saved.trace.startup is not None
    assert expected.startup is not None
    assert replace(saved.trace.startup, firsts=(), request=None) == replace(
        expected.startup, firsts=(), request=None
    )  # fmt: skip
    assert by_keys(saved.read_or_count_totals()) == by_keys(expected_tally)


def test_numpy_reads_it_without_us(tmp_path: Path) -> None:
    trace = program(2, 100)
    path = file.dump(tmp_path / "recording.npz", trace)
    spans = sorted(trace.spans, key=lambda span: (span.start_ns, -span.end_ns, span.span_id))
    with np.load(path, allow_pickle=False) as arrays:
        start_ns = arrays["firsts"][1] + np.cumsum(arrays["start_ns_steps"], dtype=np.int64)
        assert start_ns.tolist() == [span.start_ns for span in spans]
        assert arrays["total_ns"].tolist() == [span.total_ns for span in spans]
        assert arrays["thread_ids"][arrays["thread"]].tolist() == [span.thread_id for span in spans]
        sites = json.loads(bytes(arrays["metadata"]))["trace"]["sites"]
        assert [sites[place]["name"] for place in arrays["site"]] == [span.site.name for span in spans]


def test_the_record_of_torch_profiler_is_in_columns_and_is_read_from_old_metadata(tmp_path: Path) -> None:
    kernels = [
        Kernel("gemm", "kernel", 0, 7, 2_000, 2_500, 4321, 1_900), Kernel("gemm", "kernel", 1, 7, 2_100, 2_100),
        Kernel("", "copy", 0, 9, 2_100, 2_900, 4322, 1_000), Kernel("fill\x00", "fill", 0, 9, 2_900, 2_901),
    ]  # fmt: skip
    allocations = [
        Allocation(HOST, 1_990, 4321, 64, 1 << 45, 64, 128), Allocation(0, 2_050, 4322, -512, 5, -448),
    ]  # fmt: skip
    facts = {"kernels": kernels, "allocations": allocations, "watched": (1_000, 3_000)}
    trace = Trace(Origin(1, "shop", 0, 0), 500, 3_500, [], **facts)
    path = file.dump(tmp_path / "recording.npz", trace)
    with np.load(path) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    start_ns = 500 + np.cumsum(found["kernel_start_ns_steps"], dtype=np.int64)
    assert start_ns.tolist() == [kernel.start_ns for kernel in kernels]
    assert found["allocation_size_bytes"].tolist() == [64, -512]
    again = file.load(path).trace
    assert (list(again.kernels), list(again.allocations)) == (kernels, allocations)


def test_it_is_for_its_owner_only_and_zipfile_finds_no_fault_in_it(tmp_path: Path) -> None:
    path = file.dump(tmp_path / "new" / "recording.npz", program(1, 50))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_it_is_the_same_without_isal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = program(3, 80)
    usual = facts(saved_and_read(tmp_path, trace).trace)
    monkeypatch.setitem(sys.modules, "isal", None)
    assert facts(saved_and_read(tmp_path, trace).trace) == usual


def test_a_recording_cannot_be_where_a_folder_is(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot write the recording"):
        file.dump(tmp_path, program(1, 10))


def span(span_id: int, parent_id: int, **more: int) -> Span:
    return Span(Site("f"), span_id, parent_id, 1, 1, 0, more.get("start_ns", 0), more.get("end_ns", 9), 9, 9)


@pytest.mark.parametrize(
    ("spans", "why"),
    [
        ([span(1, 2), span(2, 1)], "its own ancestor"),
        ([span(1, 2), span(2, 3), span(3, 1), span(4, 0)], "its own ancestor"),
        ([span(1, 1)], "its own ancestor"),
        ([span(1, 0), span(1, 0)], "two spans in it have one id"),
        ([span(1, 0), span(1 << 61, 0), span(1 << 61, 0)], "two spans in it have one id"),
        ([span(1, 0, start_ns=5, end_ns=4)], "ends before it begins"),
        ([span(1, 0, end_ns=(1 << 63) - 1)], "out of range"),
    ],
)
def test_spans_that_are_no_sound_trace_are_refused(spans: list[Span], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        columns_of_spans(spans)
    with pytest.raises(ValueError, match=why):
        Trace(Origin(1, "shop", 0, 0), 0, 9, spans)


@pytest.mark.slow
def test_a_chain_of_twenty_thousand_levels_is_no_circle() -> None:
    assert columns_of_spans([span(number, number - 1) for number in range(1, 20_001)]).level[-1] == 19_999


@pytest.mark.parametrize("seed", range(5))
def test_a_damaged_recording_is_read_or_refused(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    trace, tally = sample_trace(seed)
    whole, path = file.dump(tmp_path / "recording.npz", trace, tally).read_bytes(), tmp_path / "damaged.npz"
    for _ in range(40):
        path.write_bytes(changed_bytes(chance, whole))
        try:
            file.load(path)
        except TraceError:
            pass


@pytest.mark.parametrize("damaged", [b"'shape': ((", b"'shape': )(", b"'shape': 1 (", b"'shape' (((("])
def test_a_recording_whose_array_has_a_damaged_header_is_refused(damaged: bytes, tmp_path: Path) -> None:
    whole, path = file.dump(tmp_path / "recording.npz", sample_trace(1)[0]), tmp_path / "damaged.npz"
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as target:
        for member in source.namelist():
            data = source.read(member)
            target.writestr(member, data.replace(b"'shape': (", damaged) if member == "total_ns.npy" else data)
    with pytest.raises(TraceError, match="cannot read the recording"):
        file.load(path)


def test_a_recording_with_an_infinite_cost_is_refused(tmp_path: Path) -> None:
    path = file.dump(tmp_path / "recording.npz", sample_trace(0)[0])
    with np.load(path) as archive:
        members = dict(archive)
    text = members["metadata"].tobytes().replace(b'"per_call_ns":1.5', b'"per_call_ns":1e999')
    np.savez(path, **{**members, "metadata": np.frombuffer(text, dtype=np.uint8)})
    with pytest.raises(TraceError, match="infinite"):
        file.load(path)


def test_attributes_that_are_damaged_are_refused_as_they_are_read() -> None:
    for text in (b'{"a": "\xb8"}', b'{"a": "\x01"}', b"[1]", b'{"a": '):
        with pytest.raises(TraceError, match="attributes"):
            decode_json_texts([text])


def test_the_values_of_an_attribute_are_those_of_the_rows() -> None:
    texts = (b'{"a":[1,["b"]],"c":2}', b'{"a":Infinity}', b'{"c":-Infinity,"a":null}', b'{"a\\"b":1,"a":1e400}')
    gathered = GatheredAttributes()
    for row, text in enumerate(texts):
        gathered.add(row, text)
    packed = gathered.pack_attributes(np.arange(len(texts), dtype=np.int32))
    for name in ("a", "c", 'a"b', "none"):
        assert packed.values(name, np.arange(4)) == [packed[row].get(name) for row in range(4)]
    assert packed.values("a", np.array([3, 0])) == [math.inf, (1, ("b",))]


@given(data=st.data())
def test_arrays_that_say_anything_are_a_sound_trace_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("saved")
    trace = program(4, 30)
    trace.watched, trace.allocations = (trace.start_ns, trace.end_ns), [Allocation(0, trace.start_ns, 1, 5, 6, 7)]
    trace.kernels = [Kernel("gemm", "kernel", 0, 7, trace.start_ns, trace.end_ns, 1, trace.start_ns)]
    path = file.dump(folder / "recording.npz", trace)
    with np.load(path) as arrays:
        found = {name: arrays[name].copy() for name in arrays.files}
    name = data.draw(st.sampled_from(sorted(set(found) - {"metadata"})))
    number = data.draw(st.sampled_from([0, 1, -1, 7, 255, 1 << 31, (1 << 63) - 1, -(1 << 63)]))
    if len(found[name]) and data.draw(st.booleans()):
        found[name] = found[name].astype(np.int64)
        found[name][data.draw(st.integers(0, len(found[name]) - 1))] = number
    else:
        found[name] = data.draw(st.sampled_from([found[name][:-1], np.zeros(3), found[name].reshape(1, -1)]))
    np.savez(path, **found)
    try:
        saved = file.load(path)
    except TraceError:
        return
    assert len(saved.trace.spans) == len(saved.trace.columns)
    format_summary(["kernels", "memory"], Recording.from_file(saved), Options())


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"PK\x05\x06" + bytes(18), b"\x93NUMPY"])
def test_other_files_than_recordings_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "recording.npz"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="cannot read the recording"):
        file.load(path)


def test_an_archive_of_numpy_that_is_no_recording_is_refused_as_such(tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    np.savez(path, weights=np.zeros(3, dtype=np.int64))
    with pytest.raises(TraceError, match=r"weights\.npz: it is no recording of `instrument`"):
        file.load(path)


def test_a_small_file_does_not_unpack_to_all_memory(tmp_path: Path) -> None:
    path = tmp_path / "recording.npz"
    np.savez_compressed(path, span_id_steps=np.zeros(1 << 22, dtype=np.uint8))
    with pytest.raises(TraceError, match="unpacks to more"):
        file.load(path, limit_bytes=1 << 20)


def test_the_command_reports_on_a_recording_as_on_a_chrome_trace(tmp_path: Path) -> None:
    trace = program(5, 150)
    paths = chrome.dump(tmp_path / "trace.json.gz", trace), file.dump(tmp_path / "recording.npz", trace)
    command = [sys.executable, "-m", "instrument", "report", "--view", "events,requests,device,copies"]
    told = [subprocess.run([*command, path], capture_output=True, check=True, timeout=240).stdout for path in paths]
    assert told[0] == told[1]
    assert b"Profiling Report" in told[0]


def test_a_session_dumps_a_recording_where_the_name_says_so(tmp_path: Path) -> None:
    session = instrument.start()
    assert session is not None
    try:
        with instrument.scope("outer"), instrument.scope("inner"):
            pass
        saved = file.load(instrument.dump(tmp_path / "now.npz"))
    finally:
        instrument.stop()
    assert [saved.trace.columns.sites[place].name for place in saved.trace.columns.site] == ["outer", "inner"]
    assert saved.trace.columns.parent.tolist() == [-1, 0]
    assert saved.read_or_count_totals().calls == 2


def test_the_command_refuses_a_damaged_recording_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "recording.npz"
    path.write_bytes(b"PK\x03\x04damaged")
    done = subprocess.run([sys.executable, "-m", "instrument", "report", path], capture_output=True, timeout=240)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert b"cannot read the recording" in done.stderr
