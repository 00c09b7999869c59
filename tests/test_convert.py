"""Saved traces in other forms, as one file, and asked by SQL: on what a service of several processes leaves."""

from __future__ import annotations

import csv
import io
import json
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import chrome_rules
import numpy as np
import pytest
from otlp_spans import requests_in, tree
from pages import document_of
from simulated_engine import Lives

import instrument
from instrument import chrome
from instrument.cli import main
from instrument.cli.convert_merge_query_recover_verbs import FORMS, choose_format
from instrument.cli.notebook import FRAMES, LoadedTrace
from instrument.errors import InstrumentError, TraceError
from instrument.otlp.export_facts import Ids
from instrument.otlp.packed_spans import SpanIds, SpanPacker
from instrument.otlp.span_forms import JSON, make_json_lines
from instrument.recording.spans import KEY, DeviceInterval, Origin, Site, Span
from instrument.trace import file
from instrument.trace.trace import Trace

SERVICE = """
import os
from instrument import annotate, gauge, scope, stop
children = []
for count in (2, 3, 4):
    child = os.fork()
    if not child:
        for number in range(count):
            with scope("request", kind="request"), scope("work"):
                annotate(number=number, of="it's; drop table spans --")
        try:
            with scope("fails"): raise KeyError(count)
        except KeyError: pass
        gauge("jobs").set(count)
        stop()
        os._exit(0)
    children.append(child)
for child in children: os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recordings of three workers."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "service.py").write_text(SERVICE)
    (folder / "profile.yaml").write_text("service: shop\nexport: {recording: }")
    words = [sys.executable, "-m", "instrument", "run", "--profile", "profile.yaml", "--", "service.py"]
    subprocess.run(words, cwd=folder, check=True, timeout=240)
    return folder / "traces"


def outcome(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(list(map(str, words))) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(list(map(str, words))) == 2
    return capsys.readouterr().err


def names_in(spans: list[Span]) -> dict[str, int]:
    names = [span.site.name for span in spans]
    return {name: names.count(name) for name in names}


EXPECTED = {"request": 9, "work": 9, "fails": 3}


@pytest.mark.parametrize(
    "words", [["merge", "-o", "out.npz"], ["convert", "--to", "recording", "-o", "out.npz"]]
)  # fmt: skip
def test_several_recordings_become_one(
    words: list[str], traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / words[-1]
    assert outcome(capsys, *words[:-1], target, traces) == f"{target}\n"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    saved = file.load(target)
    assert names_in(saved.trace.spans) == EXPECTED
    assert saved.read_or_count_totals().calls == 21


@pytest.mark.parametrize("form", ["recording", "chrome"])
def test_there_and_back_says_the_same(
    form: str, traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = tmp_path / "one.npz"
    one.write_bytes(next(traces.iterdir()).read_bytes())
    there = Path(outcome(capsys, "convert", one, "--to", "chrome").strip())
    assert there == tmp_path / "one.json.gz"
    back = tmp_path / f"back.{'npz' if form == 'recording' else 'json'}"
    outcome(capsys, "convert", there, "--to", form, "-o", back)
    if form == "chrome":
        assert chrome_rules.problems(json.loads(back.read_text())) == []
    spans = file.load(back).trace.spans if form == "recording" else chrome.load(back)[0].spans
    assert [(s.span_id, s.parent_id, s.start_ns, s.self_ns, dict(s.attributes)) for s in spans] == [
        (s.span_id, s.parent_id, s.start_ns, s.self_ns, dict(s.attributes)) for s in file.load(one).trace.spans
    ]


def hostile() -> Trace:
    site = Site("'; drop table spans; --\n\x1b[31m\"\ud800", "request", instance='"x', attributes=(("rank", 1),))
    device = (DeviceInterval(0, 7, 12, 18),)
    spans = [
        Span(site, 1, 0, 1, 7, 0, 10, 20, 10, 6, "Kéy\x00Error", {"a'b": (1, 2), "f": float("nan")}, device),
        Span(Site("child"), 2, 1, 1, 7, 0, 12, 16, 4, 4),
    ]
    return Trace(Origin(1, "shop", 0, 10**18, host="node"), 0, 100, spans, {7: "it's"})


def test_names_are_never_part_of_a_statement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file.dump(tmp_path / "hostile.npz", hostile())
    asked = "select name, error, thread, total_ns from spans order by start_ns"
    rows = json.loads(outcome(capsys, "query", path, asked, "--json"))
    assert [row["name"] for row in rows] == ["'; drop table spans; --\n\x1b[31m\"\ufffd", "child"]
    assert (rows[0]["error"], rows[0]["thread"], rows[0]["total_ns"]) == ("Kéy\x00Error", "it's", 10)
    said = outcome(capsys, "query", path, asked)
    assert "\x1b" not in said
    assert len(said.splitlines()) == 3


def test_every_table_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file.dump(tmp_path / "hostile.npz", hostile())

    def ask(statement: str) -> Any:
        return list(csv.reader(io.StringIO(outcome(capsys, "query", path, statement, "--csv"))))[1:]

    assert ask("select span_id, device, stream, end_ns - start_ns, label from intervals") == [
        ["1", "0", "7", "6", "exclusive"]
    ]
    assert ask("select name, attributes from sites order by site desc")[0] == ["child", "{}"]
    assert ask("select * from threads") == [["7", "it's"]]
    assert ask("select span_id, name, value from attributes order by name") == [
        ["1", "a'b", "[1,2]"], ["1", "f", "NaN"],
    ]  # fmt: skip
    assert ask("select count(*) from samples") == [["0"]]
    assert ask("select unix_ns from spans where parent_id = 0") == [[str(10**18 + 10)]]


def test_sql_is_asked_over_all_files_of_a_folder(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = outcome(capsys, "query", traces, "select name, count(*) as calls from spans group by name order by name")
    assert [line.split() for line in said.splitlines()] == [
        ["name", "calls"], ["fails", "3"], ["request", "9"], ["work", "9"],
    ]  # fmt: skip


def test_a_merged_run_has_the_gauges_of_each_process(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    statement = "select process, max(value) as jobs from samples where name = 'jobs' group by process order by jobs"
    rows = json.loads(outcome(capsys, "query", traces, statement, "--json"))
    assert [row["jobs"] for row in rows] == [2, 3, 4]
    gauges = document_of(instrument.load(traces).saved.trace)["device"]["gauges"]
    jobs = {gauge["of"]: gauge["values"][-1] for gauge in gauges if gauge["name"] == "jobs"}
    assert jobs == {f"process {row['process']}": row["jobs"] for row in rows}


@pytest.mark.parametrize(
    "statement",
    [
        "select * from '/etc/passwd'", "select * from read_text('/etc/passwd')", "copy spans to 'stolen.csv'",
        "set enable_external_access = true", "install httpfs", "attach 'x.db'", "selekt", "select nothing from spans",
    ],
)  # fmt: skip
def test_a_statement_that_is_wrong_or_reaches_further_is_refused(
    statement: str, traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, "query", traces, statement).startswith("instrument: query: ")
    assert not Path("stolen.csv").exists()


def test_without_duckdb_the_extra_is_named(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert "pip install 'instrument-sdk[query]'" in refusal(capsys, "query", traces, "select 1")
    with pytest.raises(InstrumentError, match="instrument-sdk\\[query\\]"):
        instrument.load(traces).spans  # noqa: B018 - the access is the test
    assert list(tmp_path.iterdir()) == []


def test_loaded_traces_are_data_frames_of_spans_and_of_requests(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test has DuckDB's own relations; libraries of data frames are tested if they are installed."""
    monkeypatch.setattr("instrument.trace.tables.as_pandas", lambda found: found)
    loaded = instrument.load(traces, frames="pandas")
    assert len(loaded.spans.fetchall()) == 21
    requests = loaded.requests
    parts = [f"{name}_ns" for name in ("queue", "share", "waiting", "stall", "transport", "unknown")]
    assert requests.aggregate(f"count(*), bool_and({' + '.join(parts)} = total_ns)").fetchall() == [(9, True)]
    assert requests.filter("key is null and name = 'request'").aggregate("count(*)").fetchall() == [(9,)]
    trace = replace(hostile(), spans=[])
    empty = LoadedTrace(file.load(file.dump(tmp_path / "empty.npz", trace)), "pandas").requests
    assert list(map(str, empty.types)) == list(map(str, requests.types))
    with pytest.raises(InstrumentError, match="pandas, polars, pyarrow; numpy is none of them"):
        _ = instrument.load(traces, frames="numpy").spans
    with pytest.raises(TraceError, match="has no run r9"):
        instrument.load(traces, run="r9")


def test_a_phase_of_a_request_is_in_its_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spans = [
        Span(Site("handle", "request"), 1, 0, 1, 7, 0, 10, 30, 20, 20, attributes={KEY: "r1"}),
        Span(Site("parse", "phase"), 2, 1, 1, 7, 0, 12, 16, 4, 4),
    ]
    saved = file.load(file.dump(tmp_path / "a.npz", replace(hostile(), spans=spans)))
    monkeypatch.setattr("instrument.trace.tables.as_pandas", lambda found: found)
    ((key, unknown_ns, phases),) = (
        LoadedTrace(saved, "pandas").requests.project("key, unknown_ns, phases_ns").fetchall()
    )
    assert (key, unknown_ns, phases) == ("r1", 16, {"parse": 4})


@pytest.mark.parametrize("kind", FRAMES)
def test_spans_requests_and_batches_are_frames_of_each_library(kind: str, tmp_path: Path) -> None:
    for name in {kind, "pyarrow"} - ({"pyarrow"} if kind == "pandas" else set()):
        pytest.importorskip(name)
    loaded = LoadedTrace(file.load(file.dump(tmp_path / "lives.npz", Lives(3, requests=20).run()[0])), kind)

    def column(frame: Any, name: str) -> list[Any]:
        values = frame[name]
        return list(values.to_pylist() if kind == "pyarrow" else values)

    trace, (spans, requests, batches) = loaded.saved.trace, (loaded.spans, loaded.requests, loaded.batches)
    assert sorted(column(spans, "total_ns")) == sorted(trace.columns.total_ns.tolist())
    parts = [f"{name}_ns" for name in ("queue", "share", "waiting", "stall", "transport", "unknown")]
    phases = [sum(dict(of_request).values()) for of_request in column(requests, "phases_ns")]
    summed = [sum(times) for times in zip(phases, *(column(requests, name) for name in parts), strict=True)]
    assert summed == column(requests, "total_ns")
    assert len(set(column(requests, "key"))) == 20
    assert [sum(shares) for shares in column(batches, "shares_ns")] == column(batches, "total_ns")
    assert [len(keys) for keys in column(batches, "keys")] == column(batches, "members")
    empty = LoadedTrace(file.load(file.dump(tmp_path / "empty.npz", replace(hostile(), spans=[]))), kind)
    assert [len(frame) for frame in (empty.spans, empty.requests, empty.batches)] == [0, 0, 0]


def lines_of(trace: Trace) -> list[bytes]:
    columns = trace.columns
    packer = SpanPacker(JSON, columns, SpanIds(columns, Ids()), trace.origin, trace.threads)
    return list(make_json_lines(packer.pack(np.arange(len(columns))), {"service.name": "shop"}, columns.root_id))


def test_a_line_has_whole_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has them however its spans are packed: here five at a time."""
    monkeypatch.setattr("instrument.otlp.span_forms.SPANS_IN_A_LINE", 3)
    monkeypatch.setattr("instrument.otlp.packed_spans.ROWS_AT_ONCE", 5)
    sizes = (2, 1, 12, 3, 1, 1)
    spans = [span for at, size in enumerate(sizes) for span in tree(size, 1 + 100 * at)]
    text = b"".join(lines_of(replace(hostile(), spans=spans)))
    assert text.endswith(b"}\n")
    found = requests_in(text.decode().splitlines())
    [resource] = {one.resource_spans[0].resource.SerializeToString() for one in found}
    assert b"shop" in resource
    spans_of_lines = [one.resource_spans[0].scope_spans[0].spans for one in found]
    assert [len(its) for its in spans_of_lines] == [3, 12, 3, 2]
    assert [len({span.trace_id for span in its}) for its in spans_of_lines] == [2, 1, 1, 2]
    assert {span.name for its in spans_of_lines for span in its} == {"op"}


def test_a_number_that_is_not_finite_stays_one(tmp_path: Path) -> None:
    trace = hostile()
    found = {"loss": float("nan"), "best": float("-inf"), "losses": (0.5, float("inf"))}
    spans = [*trace.spans]
    spans[0].attributes = found
    trace = replace(trace, spans=[*trace.spans])
    again = file.load(file.dump(tmp_path / "a.npz", trace)).trace
    assert repr(again.spans[0].attributes) == repr(found)
    (line,) = lines_of(again)
    (span, *_) = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    values = {one["key"]: one["value"] for one in span["attributes"]}
    assert (values["loss"], values["best"]) == ({"doubleValue": "NaN"}, {"doubleValue": "-Infinity"})
    assert values["losses"]["arrayValue"]["values"][1] == {"doubleValue": "Infinity"}
    chrome.dump(tmp_path / "a.json", trace)
    assert chrome.load(tmp_path / "a.json")[0].spans[0].attributes["loss"] == "nan", "which viewers cannot read else"


def test_each_process_is_a_resource_of_otlp(traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.otlp.jsonl"
    outcome(capsys, "convert", traces, "--to", "otlp", "-o", target)
    found = requests_in(target.read_text().splitlines())
    pids = {
        attribute.value.int_value
        for one in found
        for attribute in one.resource_spans[0].resource.attributes
        if attribute.key == "process.pid"
    }
    assert len(pids) == 3
    spans = [span for one in found for scope in one.resource_spans[0].scope_spans for span in scope.spans]
    assert len(spans) == 21
    assert {span.status.code for span in spans if span.name == "fails"} == {2}
    assert len({span.span_id for span in spans}) == 21


def test_no_input_is_written_over_and_several_want_a_name(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = next(traces.iterdir())
    before = one.read_bytes()
    assert "one of the files to read" in refusal(capsys, "merge", traces, "-o", one)
    assert "-o OUT" in refusal(capsys, "convert", traces, "--to", "chrome")
    for form in ("recording", "chrome", "otlp", "parquet"):
        assert "/proc/nowhere" in refusal(capsys, "convert", traces, "--to", form, "-o", "/proc/nowhere/x")
    assert one.read_bytes() == before


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("otlp", "parquet")])
def test_merge_writes_the_form_that_the_end_of_a_name_means(form: str) -> None:
    end, _ = FORMS[form]
    assert choose_format(Path(f"all{end}")) == form


def test_merge_writes_a_recording_where_the_end_of_a_name_says_nothing_else() -> None:
    ends = [choose_format(Path(name)) for name in ("all", "all.txt", "all.otlp.jsonl", "all.json")]
    assert ends == ["recording", "recording", "recording", "chrome"]
