"""Traces in Perfetto's own format: slices, tracks, arrows, counters, and the other facts."""

from __future__ import annotations

import gzip
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracle.recordings import ALL
from test_ledger import engine

from instrument import chrome
from instrument.chrome.perfetto_writing import write_perfetto
from instrument.cli import main
from instrument.recording.spans import DeviceInterval, Gpu, Origin, Sample, Site, Span
from instrument.trace import file
from instrument.trace.file import Saved
from instrument.trace.merge import merge_recordings
from instrument.trace.trace import Trace

CHAT, STEP = Site("POST /chat", "request"), Site("engine.step", "step", "chat.engine", "Engine.step", "engine.py", 30)
LAYER = Site("Linear", "layer", instance="model.layers.0", device=True, attributes=(("region", "mlp"),))
BEGIN, END, COUNTER = 1, 2, 4
EXPLICIT = 3


def service() -> Trace:
    """A request in a task, a step on an engine's thread that it called, with a layer on a device."""
    spans = [
        Span(CHAT, 1, 0, 1, 11, 7, 100, 900, 800, 300),
        Span(STEP, 2, 1, 1, 12, 0, 200, 700, 500, 100),
        Span(LAYER, 3, 2, 1, 12, 0, 200, 600, 400, 400, "ValueError"),
    ]
    spans[0].attributes = {"model": "7b", "tokens": 12, "stream": True, "of": (1, 0.5)}
    spans[2].device = (DeviceInterval(0, 7, 300, 900, "overlapped", 5),)
    return Trace(
        Origin(4711, "shop", 50, 1_700_000_000 * 10**9), 50, 1000, spans, {11: "MainThread", 12: "engine"},
        losses={"rows overwritten": 3}, samples=(Sample("gpu_memory", 0, 400, 12.5),), gpus=(Gpu(0, "H200", "GPU-1"),),
    )  # fmt: skip


class Read:
    """A file in Perfetto's format as its trace processor takes it: slices by the order of times and packets."""

    def __init__(self, data: bytes) -> None:
        pb = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
        self.packets = pb.Trace.FromString(data).packet
        self.tracks = {
            one.track_descriptor.uuid: one.track_descriptor for one in self.packets if one.track_descriptor.uuid
        }
        names: dict[int, str] = {}
        self.keys: dict[int, str] = {}
        self.places: dict[int, Any] = {}
        events = []
        for place, packet in enumerate(self.packets):
            names.update((one.iid, one.name) for one in packet.interned_data.event_names)
            self.keys.update((one.iid, one.name) for one in packet.interned_data.debug_annotation_names)
            self.places.update((one.iid, one) for one in packet.interned_data.source_locations)
            if packet.HasField("track_event"):
                event = packet.track_event
                # What a packet refers to is told by it or by one before it.
                assert {one.name_iid for one in event.debug_annotations} <= {*self.keys}
                assert not event.name_iid or event.name_iid in names
                assert event.track_uuid in self.tracks
                events.append((packet.timestamp, place, event))
        self.slices: list[tuple[str, int, int, str, str]] = []
        """Name, begin, length, the name of the slice around it, and that of its track."""
        self.begins: dict[str, Any] = {}
        self.counters: dict[str, list[float]] = {}
        open_slices: dict[int, list[tuple[str, int]]] = {}
        for at_ns, _, event in sorted(events, key=lambda one: one[:2]):
            track, stack = self.track(event.track_uuid), open_slices.setdefault(event.track_uuid, [])
            if event.type == BEGIN:
                stack.append((names[event.name_iid], at_ns))
                self.begins[names[event.name_iid]] = event
            elif event.type == END:
                name, begin_ns = stack.pop()
                self.slices.append((name, begin_ns, at_ns - begin_ns, stack[-1][0] if stack else "", track))
            else:
                self.counters.setdefault(track, []).append(event.double_counter_value)
        assert not any(open_slices.values())

    def track(self, uuid: int) -> str:
        """A track's name, behind those of the tracks around it."""
        its = self.tracks[uuid]
        own = its.process.process_name or its.thread.thread_name or its.name
        return f"{self.track(its.parent_uuid)}/{own}" if its.parent_uuid else own

    def told(self, name: str) -> dict[str, Any]:
        """The debug annotations of the last slice of a name."""
        found = {}
        for one in self.begins[name].debug_annotations:
            kind = one.WhichOneof("value")
            items = [item.int_value or item.double_value for item in one.array_values]
            found[self.keys[one.name_iid]] = getattr(one, kind) if kind else items
        return found


def written(trace: Trace, folder: Path) -> Read:
    pytest.importorskip("perfetto")
    path = chrome.write_perfetto(folder / "trace.pftrace", trace)
    return Read(path.read_bytes())


def test_slices_are_on_tracks_of_tasks_threads_and_streams(tmp_path: Path) -> None:
    assert sorted(written(service(), tmp_path).slices) == [
        ("POST /chat", 100, 800, "", "requests/POST /chat"),
        ("engine.step", 200, 500, "", "shop/engine"),
        ("model.layers.0", 200, 400, "engine.step", "shop/engine"),
        ("model.layers.0", 300, 600, "", "shop/GPU 0/stream 7"),
    ]


def test_requests_stand_first_then_what_they_called_then_threads_and_devices_last(tmp_path: Path) -> None:
    trace = service()
    more = [
        Span(Site("generate"), 4, 1, 1, 11, 8, 150, 850, 700, 700),
        Span(Site("poll"), 5, 0, 5, 11, 9, 100, 900, 800, 800),
        Span(Site("warm up"), 6, 0, 6, 11, 0, 100, 500, 400, 400),
        Span(Site("crossing"), 7, 0, 7, 11, 0, 400, 600, 200, 200),
    ]
    trace = replace(trace, spans=[*trace.spans, *more])
    trace.samples += (Sample("process_cpu", -1, 400, 1.0),)
    read = written(trace, tmp_path)
    tops = [one for one in read.tracks.values() if not one.parent_uuid]
    # A viewer shows what is of no process before the processes, and threads first in these.
    assert [(one.name, one.process.process_name, one.child_ordering) for one in tops] == [
        ("", "shop", EXPLICIT), ("requests", "", EXPLICIT),
    ]  # fmt: skip
    ranked = sorted(read.tracks.values(), key=lambda one: one.sibling_order_rank)
    names = [read.track(one.uuid) for one in ranked if one.parent_uuid and not one.HasField("thread")]
    assert [name for name in names if name.startswith("requests/")] == ["requests/POST /chat", "requests/generate"]
    assert [name for name in names if name.startswith("shop/") and name.count("/") == 1] == [
        "shop/MainThread (2)", "shop/poll", "shop/process_cpu", "shop/GPU 0",
    ]  # fmt: skip


def test_slices_have_all_facts_of_their_span(tmp_path: Path) -> None:
    read = written(service(), tmp_path)
    assert read.told("POST /chat") == {
        "id": 1, "task": 7, "thread": 11, "self_ns": 300, "model": "7b", "tokens": 12, "stream": True, "of": [1, 0.5],
    }  # fmt: skip
    assert read.told("engine.step") == {"id": 2, "parent": 1, "root": 1, "self_ns": 100}
    where = read.places[read.begins["engine.step"].source_location_iid]
    assert (where.file_name, where.function_name, where.line_number) == ("engine.py", STEP.function, 30)
    on_device = read.told("model.layers.0")
    assert on_device == {"label": "overlapped", "uncertainty_ns": 5, "owner": 3}


def test_arrows_lead_to_what_ran_elsewhere(tmp_path: Path) -> None:
    read = written(service(), tmp_path)
    [call] = read.begins["POST /chat"].flow_ids
    assert list(read.begins["engine.step"].terminating_flow_ids) == [call]
    [launch] = read.begins["model.layers.0"].terminating_flow_ids
    assert launch != call


def test_gauges_are_counters_and_losses_are_reported(tmp_path: Path) -> None:
    read = written(service(), tmp_path)
    assert read.counters == {"shop/GPU 0/gpu_memory": [12.5]}
    [process] = [one.process for one in read.tracks.values() if one.process.pid]
    assert (process.pid, list(process.process_labels)) == (4711, ["not kept: 3 (rows overwritten)"])
    [gpu] = [one for one in read.tracks.values() if one.name == "GPU 0"]
    assert gpu.description == "H200 GPU-1"
    [snapshot] = [one.clock_snapshot for one in read.packets if one.HasField("clock_snapshot")]
    assert [(one.clock_id, one.timestamp) for one in snapshot.clocks] == [(3, 50), (1, 1_700_000_000 * 10**9)]


@pytest.mark.parametrize("name", ["program 1", "program 2", "any parents 1", "deep"])
def test_every_slice_of_a_program_is_there_once_with_its_times(name: str, tmp_path: Path) -> None:
    assert ALL[name].make is not None
    trace = ALL[name].make()
    expected = Counter(
        (clean_name(span.site), at.start_ns, at.end_ns - at.start_ns)
        for span in trace.spans
        for at in (span, *span.device)
    )
    assert Counter(one[:3] for one in written(trace, tmp_path).slices) == expected


def clean_name(site: Site) -> str:
    return site.instance if site.kind == "layer" and site.instance else site.name


def test_convert_and_merge_write_it_and_pack_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("perfetto")
    file.dump(tmp_path / "t.npz", service())
    assert main(["convert", str(tmp_path / "t.npz"), "--to", "perfetto"]) == 0
    assert main(["merge", str(tmp_path / "t.npz"), "-o", str(tmp_path / "m.pftrace")]) == 0
    assert main(["convert", str(tmp_path / "t.npz"), "--to", "perfetto", "-o", str(tmp_path / "p.gz")]) == 0
    capsys.readouterr()
    plain = (tmp_path / "t.pftrace").read_bytes()
    assert plain == (tmp_path / "m.pftrace").read_bytes() == gzip.decompress((tmp_path / "p.gz").read_bytes())
    assert len(Read(plain).slices) == 4


def test_missing_protobuf_messages_name_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file.dump(tmp_path / "t.npz", service())
    for name in [name for name in sys.modules if name.split(".")[0] == "perfetto"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "perfetto", None)
    assert main(["convert", str(tmp_path / "t.npz"), "--to", "perfetto"]) == 2
    assert "pip install 'instrument-sdk[perfetto]'" in capsys.readouterr().err
    assert not (tmp_path / "t.pftrace").exists()


def test_arrows_lead_from_each_request_to_all_batches_that_serve_it(tmp_path: Path) -> None:
    pb = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    trace = Trace(Origin(1, "shop", 0, 10**18), 0, 1000, engine())
    path = write_perfetto(tmp_path / "t.pftrace", trace)
    ids: dict[int, int] = {}
    sources: dict[int, int] = {}
    targets: dict[int, int] = {}
    names: dict[int, str] = {}
    for packet in pb.Trace.FromString(path.read_bytes()).packet:
        names.update((one.iid, one.name) for one in packet.interned_data.debug_annotation_names)
        event = packet.track_event
        told = {names[one.name_iid]: one.int_value for one in event.debug_annotations}
        if "id" in told:
            ids[told["id"]] = event.track_uuid
            sources.update(dict.fromkeys(event.flow_ids, told["id"]))
            targets.update(dict.fromkeys(event.terminating_flow_ids, told["id"]))
    arrows = sorted((source, targets[number]) for number, source in sources.items())
    assert arrows == [(1, 11), (1, 12), (1, 14), (1, 15), (5, 12), (5, 13), (5, 14)]


def test_each_process_of_a_merged_trace_is_a_process_with_its_own_threads(tmp_path: Path) -> None:
    """Two containers may give their processes one number: one of them is shown under another."""
    trace = service()
    files = [
        Saved(replace(trace, origin=replace(trace.origin, **its)), None)
        for its in ({"boot": "b"}, {"boot": "b", "start_ticks": 9}, {"boot": "b", "pid": 12, "service": "engine"})
    ]
    merged = merge_recordings(files).saved
    read = Read(write_perfetto(tmp_path / "m.pftrace", merged.trace).read_bytes())
    processes = [one.process for one in read.tracks.values() if one.HasField("process")]
    assert [one.process_name for one in processes] == ["shop", "shop", "engine"]
    pids = [one.pid for one in processes]
    assert (pids[0], pids[2], len({*pids})) == (4711, 12, 3)
    assert next(iter(processes[1].process_labels)) == "pid 4711"
    threads = [one.thread for one in read.tracks.values() if one.HasField("thread")]
    assert Counter((one.pid, one.tid, one.thread_name) for one in threads) == {(pid, 12, "engine"): 1 for pid in pids}
