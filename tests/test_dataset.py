"""The dataset of a fleet: one schema for every trace, whole files, ids and parts that all readers agree on."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
from simulated_engine import Lives, Request, Service

from instrument import fleet
from instrument.cli import main
from instrument.errors import TraceError
from instrument.recording.spans import KEY, DeviceInterval, Origin, Sample, Site, Span
from instrument.recording.trace_context import LINK, RemoteParent
from instrument.report.view import Recording
from instrument.trace import dataset_files, file
from instrument.trace.dataset_tables import arrow_schema, arrow_type, read_definition
from instrument.trace.merge import merge_recordings
from instrument.trace.request_trees import join_request_trees
from instrument.trace.trace import Trace

pyarrow = pytest.importorskip("pyarrow")
arrow_dataset, parquet = pytest.importorskip("pyarrow.dataset"), pytest.importorskip("pyarrow.parquet")

TABLES = tuple(read_definition()["tables"])
HOUR_NS = 3600 * 10**9
T_NS = 1_796_000_000 * 10**9


def hostile() -> Trace:
    """A trace of names, attributes and numbers that files may not take."""
    site = Site("'; drop table \ud800", "request", "app", "f", attributes=(("rank", 1), ("route", "/a"), ("l", (1, 2))))
    device = (DeviceInterval(0, 7, 12, 18),)
    attributes = {"a'b": (1, 2), "nan": float("nan"), "big": 1 << 70, "yes": True, "n": -5, "x": 0.5, "route": "/b"}
    spans = [
        Span(
            site, 1, 0, 1, 7, 0, 10, 20, 10, 6, "Kéy\x00Error", attributes, device, remote=RemoteParent(1 << 90 | 5, 9)
        ),
        Span(Site("child"), 2, 1, 1, 7, 0, 12, 16, 4, 4),
        Span(Site("orphan"), 3, 99, 98, 8, 3, 12, 16, 4, 4),
    ]
    samples = [Sample("cores", -1, 6, 2.0), Sample("power", 0, 6, None)]
    origin = Origin(1, "10/1.10 \ud800", 0, T_NS, host="node", boot="b")
    return Trace(origin, 0, 100, spans, {7: "it's"}, {"rows overwritten": 3}, ["a note"], samples=samples)


def of_host(host: str, run: str = "r", **facts: Any) -> Mapping[str, Any]:
    return {
        "origin": Origin(7, "chat", 0, T_NS, host=host, run=run, boot=f"boot of {host}", wall_error_ns=1000, **facts)
    }


def two_hosts() -> list[Trace]:
    """A request that is handed from a host to another one by its key, and batches of the second host that serve two."""
    front = [
        Span(Site("POST /ask", "request"), number, 0, number, 1, 0, 100 * number, 100 * number + 90, 90, 90,
             attributes={KEY: f"k{number}", "tenant": "a" if number == 1 else "b"})
        for number in (1, 2)
    ]  # fmt: skip
    device = (DeviceInterval(0, 0, 235, 245),)
    keys = {"instrument.batch.keys": ("k1", "k2"), "instrument.batch.weights": (1, 3)}
    engine = [
        Span(Site("accept", "phase"), 1, 0, 1, 1, 0, 210, 215, 5, 5, attributes={KEY: "k2"}),
        Span(Site("step", "step"), 2, 0, 2, 1, 0, 230, 270, 40, 40, attributes=keys, device=device),
    ]  # fmt: skip
    return [
        Trace(spans=spans, start_ns=0, end_ns=1000, threads={1: "main"}, **of_host(host, version=version))
        for host, spans, version in (("a", front, "1.1"), ("b", engine, "1.10"))
    ]


def written(folder: Path, traces: list[Trace], *more: str) -> Path:
    """Write traces as files, and these as a dataset by the command."""
    files = [file.dump(folder / "files" / f"{number}.npz", trace) for number, trace in enumerate(traces)]
    assert main(["convert", *map(str, files), "--to", "parquet", str(folder / "data"), *more]) == 0
    return folder / "data"


def rows_of(folder: Path, table: str) -> Any:
    files = sorted(folder.glob(f"{table}/**/*.parquet"))
    return pyarrow.concat_tables(
        [parquet.ParquetFile(path).read() for path in files] or [arrow_schema(table).empty_table()]
    )


def simulated() -> Trace:
    return Lives(seed=3, requests=80).run()[0]


@pytest.mark.parametrize("name", ["empty", "hostile", "simulated", "two hosts"])
def test_every_file_has_the_schema_of_the_definition_with_any_trace(name: str, tmp_path: Path) -> None:
    traces = {
        "empty": lambda: [replace(hostile(), spans=[], losses={}, samples=())],
        "hostile": lambda: [hostile()],
        "simulated": lambda: [simulated()],
        "two hosts": two_hosts,
    }[name]()
    folder = written(tmp_path, traces)
    document = json.loads((Path(dataset_files.__file__).parent / "dataset.json").read_text("utf-8"))
    assert document["version"] == 1
    files = list(folder.rglob("*.parquet"))
    assert {path.relative_to(folder).parts[0] for path in files} == set(TABLES)
    for path in files:
        columns = document["process"] | document["tables"][path.relative_to(folder).parts[0]]["columns"]
        expected = pyarrow.schema([(column, arrow_type(kind)) for column, (kind, _) in columns.items()])
        assert parquet.read_schema(path).remove_metadata() == expected
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kinds = {kind for table in document["tables"].values() for kind, _ in table["columns"].values()}
    assert kinds <= {
        "text", "int64", "double", "bool", "binary(8)", "binary(16)", "list<text>", "map<text,text>", "map<text,int64>",
        "map<text,double>", "map<text,bool>",
    }  # fmt: skip


@pytest.mark.parametrize("trace", [simulated(), replace(hostile(), spans=[])])
def test_a_single_file_has_the_spans_of_a_dataset(trace: Trace, tmp_path: Path) -> None:
    folder = written(tmp_path, [trace])
    output = ["-o", str(tmp_path / "spans.parquet")]
    assert main(["convert", str(tmp_path / "files" / "0.npz"), "--to", "parquet", *output]) == 0
    assert parquet.ParquetFile(tmp_path / "spans.parquet").read().equals(rows_of(folder, "spans"))
    assert {path.name for path in tmp_path.iterdir()} == {"files", "data", "spans.parquet"}


def test_values_that_no_column_has_become_text_or_are_missing(tmp_path: Path) -> None:
    folder = written(tmp_path, [hostile()])
    rows = {row["name"]: row for row in rows_of(folder, "spans").to_pylist()}
    request = rows["'; drop table \ufffd"]
    assert request["error"] == "Kéy\x00Error"
    assert dict(request["attributes_text"]) == {"route": "/b", "big": str(1 << 70)}
    assert dict(request["attributes_int"]) == {"rank": 1, "n": -5}
    assert dict(request["attributes_real"]) == {"nan": None, "x": 0.5}
    assert dict(request["attributes_bool"]) == {"yes": True}
    assert {name: json.loads(text) for name, text in request["attributes_json"]} == {
        "a'b": [1, 2], "l": [1, 2],
    }  # fmt: skip
    assert (request["trace_id"], request["parent_span_id"]) == (
        (1 << 90 | 5).to_bytes(16, "big"),
        (9).to_bytes(8, "big"),
    )
    assert rows["child"]["parent_span_id"] == request["span_id"] == rows["child"]["root_span_id"]
    assert rows["orphan"]["parent_span_id"] not in (None, *(row["span_id"] for row in rows.values()))
    assert (request["start_unix_ns"], request["duration_ns"], request["thread"]) == (T_NS + 10, 10, "it's")
    (gauge,) = rows_of(folder, "gauges").to_pylist()
    assert (gauge["value"], gauge["unit"]) == (2.0, "cores")
    (loss,) = rows_of(folder, "losses").to_pylist()
    assert (loss["reason"], loss["count"]) == ("rows overwritten", 3)


def test_numbers_of_tokens_beyond_64_bits_are_missing(tmp_path: Path) -> None:
    front, engine = two_hosts()
    front.spans[0].attributes = {**front.spans[0].attributes, "gen_ai.usage.input_tokens": 1 << 70, LINK: (1 << 70, 1)}
    rows = rows_of(written(tmp_path, [front, engine]), "requests").to_pylist()
    assert [row["input_tokens"] for row in rows] == [None, None]


def test_no_folder_has_a_value_that_engines_take_for_a_number(tmp_path: Path) -> None:
    folder = written(tmp_path, [hostile()])
    assert [path.name for path in (folder / "spans").iterdir()] == ["service=s-10_1.10__"]
    assert dataset_files.make_folder_path("89e1234", T_NS // HOUR_NS) == "service=s-89e1234/date=d2026-11-30/hour=h00"
    assert (
        max(map(len, dataset_files.make_folder_path("long" * 100, 0).split("/"))) < 255
    )  # or a file system refuses it
    assert rows_of(folder, "spans").column("service_name").to_pylist() == ["10/1.10 \ufffd"] * 3


def test_rows_are_in_the_folder_of_the_hour_in_which_they_began(tmp_path: Path) -> None:
    site = Site("long", "request")
    spans = [Span(site, n, 0, n, 1, 0, n * HOUR_NS // 2, n * HOUR_NS // 2 + 10, 10, 10) for n in range(1, 5)]
    folder = written(tmp_path, [Trace(spans=spans, start_ns=0, end_ns=3 * HOUR_NS, **of_host("a"))])
    for path in (folder / "spans").rglob("*.parquet"):
        hours = {ns // HOUR_NS for ns in parquet.ParquetFile(path).read().column("start_unix_ns").to_pylist()}
        assert {dataset_files.make_folder_path("chat", hour) for hour in hours} == {
            str(path.parent.relative_to(folder / "spans"))
        }


def test_requests_have_the_parts_that_the_report_has(tmp_path: Path) -> None:
    trace = simulated()
    folder = written(tmp_path, [trace])
    recording = Recording.from_file(join_request_trees(file.load(tmp_path / "files" / "0.npz")))
    joined, ledger = recording.joined, recording.ledger
    requests = rows_of(folder, "requests").sort_by("start_unix_ns").to_pylist()
    assert len(requests) == len(joined.rows) == 80
    device = recording.device_ledger
    names = {"share of batches": "share", "waiting in batches": "waiting", "sub-requests": "sub_requests"}
    columns = ("queue", "share", "waiting", "stall", "transport", "sub_requests", "unknown")
    for place, row in enumerate(requests):
        parts = ledger.times_of_request(place)
        found = {name: row[f"{name}_ns"] for name in columns} | dict(row["phases_ns"] or ())
        assert {name: ns for name, ns in found.items() if ns} == {
            names.get(name, name): ns for name, ns in parts.items()
        }
        assert sum(found.values()) == row["duration_ns"]
        assert row["device_ns"] == device.own_ns[place] + device.shared_ns[place]
    assert any(row["device_ns"] for row in requests)
    assert any(row["prefill_ns"] and row["decode_ns"] for row in requests)
    batches = {row["span_id"]: row for row in rows_of(folder, "batches").to_pylist()}
    given = dict.fromkeys(batches, 0)
    for row in rows_of(folder, "members").to_pylist():
        given[row["span_id"]] += row["share_ns"]
    assert given == {span_id: row["own_ns"] for span_id, row in batches.items()}


def test_requests_of_several_hosts_are_joined_by_their_keys_in_files_and_in_the_dataset(tmp_path: Path) -> None:
    """The files of the hosts converted together, and the spans of each converted alone, joined by `fleet`."""
    together = rows_of(written(tmp_path / "together", two_hosts()), "requests").sort_by("start_unix_ns")
    second = together.to_pylist()[1]
    assert (second["key"], second["share_ns"], second["waiting_ns"], second["device_ns"]) == ("k2", 30, 10, 8)
    apart = [written(tmp_path / str(number), [trace]) for number, trace in enumerate(two_hosts())]
    spans, intervals, processes = (
        pyarrow.concat_tables([rows_of(folder, name) for folder in apart])
        for name in ("spans", "intervals", "processes")
    )
    assert rows_of(apart[0], "requests").sort_by("start_unix_ns").to_pylist()[1]["share_ns"] == 0
    joined = fleet.joined("requests", spans, intervals, processes).sort_by("start_unix_ns")
    assert joined.equals(together)
    members = fleet.joined("members", spans, intervals).to_pylist()
    assert [(row["key"], row["share_ns"], row["request_span_id"]) for row in members] == [
        (row["key"], share_ns, row["span_id"]) for row, share_ns in zip(together.to_pylist(), (10, 30), strict=True)
    ]
    assert {row["trace_id"] for row in spans.to_pylist() if row["name"] in ("accept", "POST /ask")} == {
        row["trace_id"] for row in together.to_pylist()
    }


def test_spans_read_back_make_the_same_tables_and_reports(tmp_path: Path) -> None:
    folder = written(tmp_path, [simulated()])
    read = {name: rows_of(folder, name) for name in TABLES}
    shuffled = read["spans"].take(sorted(range(len(read["spans"])), key=lambda row: row * 7919 % 1_000_003))
    for name in ("requests", "batches", "members"):
        order = [("start_unix_ns", "ascending"), ("span_id", "ascending")]
        order += [("position", "ascending")] * (name == "members")
        again = fleet.joined(name, shuffled, read["intervals"], read["processes"])
        assert again.sort_by(order).equals(read[name].sort_by(order))
    explained = fleet.explanations(shuffled, 3).to_pylist()
    assert len(explained) == 3
    assert explained[0]["duration_ns"] == max(row["duration_ns"] for row in read["requests"].to_pylist())
    assert fleet.joined("requests", read["spans"].slice(0, 0)).num_rows == 0


def test_a_wall_clock_that_was_set_moves_no_span_that_is_read_back(tmp_path: Path) -> None:
    folder = written(tmp_path, [simulated()])
    intervals, requests = rows_of(folder, "intervals"), rows_of(folder, "requests").to_pylist()
    spans = rows_of(folder, "spans").to_pylist()
    middle = sorted(row["start_unix_ns"] for row in spans)[len(spans) // 2]
    for row in spans:
        set_ns = HOUR_NS if row["start_unix_ns"] < middle else 0  # by a time server, an hour back
        row["start_unix_ns"], row["clock_offset_ns"] = row["start_unix_ns"] + set_ns, row["clock_offset_ns"] + set_ns
    again = fleet.requests(pyarrow.Table.from_pylist(spans, arrow_schema("spans")), intervals).to_pylist()
    parts = [{name: row[name] for name in row if "unix" not in name and "clock" not in name} for row in again]
    expected = [{name: row[name] for name in row if "unix" not in name and "clock" not in name} for row in requests]
    assert sorted(parts, key=repr) == sorted(expected, key=repr)


@pytest.mark.slow
def test_changes_between_two_versions_are_those_of_the_comparison(tmp_path: Path) -> None:
    sides = []
    for number, slower in enumerate(({}, {"part 3": 1.6})):
        arrivals = [Request(0, 10**9 + n * 4 * 10**6, 100, 5) for n in range(300)]
        trace = Service(seed=number, arrivals=arrivals, slower=slower).run()
        sides.append(rows_of(written(tmp_path / str(number), [trace]), "spans"))
    changes = fleet.changes(sides[:1], sides[1:]).to_pylist()
    assert {row["path"][-1] for row in changes if row["verdict"] == "slower"} == {"part 3"}


def test_a_second_conversion_replaces_the_first_and_ids_stay(tmp_path: Path) -> None:
    folder = written(tmp_path, two_hosts())
    before = {path: parquet.ParquetFile(path).read() for path in folder.rglob("*.parquet")}
    written(tmp_path, two_hosts())
    assert {path: parquet.ParquetFile(path).read() for path in folder.rglob("*.parquet")} == before


def test_a_large_table_becomes_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.trace.dataset_tables.ROWS_AT_ONCE", 500)
    monkeypatch.setattr(dataset_files, "FILE_BYTES", 10_000)
    folder = written(tmp_path, [simulated()])
    files = list((folder / "spans").rglob("*.parquet"))
    assert len(files) > 1
    assert len(rows_of(folder, "spans")) == len(simulated().columns)


def test_a_writer_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = file.dump(tmp_path / "one.npz", simulated())
    for method in ("write_table", "close"):
        with monkeypatch.context() as patch:
            patch.setattr(parquet.ParquetWriter, method, fail)
            assert main(["convert", str(path), "--to", "parquet", str(tmp_path / "data")]) == 2
        assert "No space left" in capsys.readouterr().err
        assert [path for path in (tmp_path / "data").rglob("*") if path.is_file()] == []
    with pytest.raises(TraceError, match="cannot write to ftp://x"):
        dataset_files.Folder("ftp://x")


def test_a_dataset_wants_a_folder_a_time_of_day_and_pyarrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(file.dump(tmp_path / "one.npz", hostile()))
    assert main(["convert", path, "--to", "parquet"]) == 2
    assert "--to parquet FOLDER" in capsys.readouterr().err
    undated = str(file.dump(tmp_path / "two.npz", replace(hostile(), origin=Origin(1, "s", 0, 0))))
    assert main(["convert", undated, "--to", "parquet", str(tmp_path / "data")]) == 2
    assert "time of day" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert main(["convert", path, "--to", "parquet", str(tmp_path / "data")]) == 2
    assert "pip install 'instrument-sdk[parquet]'" in capsys.readouterr().err


def test_engines_read_the_same_rows_and_the_folders_as_text(tmp_path: Path) -> None:
    """Clean files and files with failures together, which readers refuse where a column has two types."""
    clean = replace(hostile(), spans=[replace(hostile().spans[1], parent_id=0, root_id=2)])
    folder = written(tmp_path, [simulated()])
    written(tmp_path / "more", [clean])
    for path in (tmp_path / "more" / "data").rglob("*.parquet"):
        (folder / path.relative_to(tmp_path / "more" / "data")).parent.mkdir(parents=True, exist_ok=True)
        path.rename(folder / path.relative_to(tmp_path / "more" / "data"))
    expected = rows_of(folder, "requests").num_rows, sum(rows_of(folder, "requests").column("queue_ns").to_pylist())
    asked = "select count(*), sum(queue_ns) from read_parquet($1, hive_partitioning = true) where hour like 'h%'"
    assert duckdb.execute(asked, [f"{folder}/requests/*/*/*/*.parquet"]).fetchone() == expected
    table = arrow_dataset.dataset(folder / "requests", partitioning="hive").to_table()
    assert (table.num_rows, sum(table.column("queue_ns").to_pylist())) == expected
    assert set(table.column("date").to_pylist()) <= {f"d{date}" for date in ("2026-11-30", "2023-11-14")}
    polars = pytest.importorskip("polars")
    found = polars.scan_parquet(f"{folder}/requests/*/*/*/*.parquet", hive_partitioning=True)
    frame = found.select(polars.len(), polars.col("queue_ns").sum()).collect()
    assert frame.row(0) == expected


def answered(folder: Path) -> list[list[tuple[Any, ...]]]:
    """Return the answers of DuckDB to the questions of the examples."""
    text = (Path(__file__).parent.parent / "examples" / "fleet" / "duckdb.sql").read_text("utf-8")
    with duckdb.connect() as connection:
        statements = text.replace("'dataset/", f"'{folder}/").strip().removesuffix(";").split(";\n")
        return [connection.execute(statement).fetchall() for statement in statements][2:]


def test_the_longest_part_of_a_request_may_be_a_phase(tmp_path: Path) -> None:
    request, phase = Site("GET /x", "request"), Site("tokenize", "phase")
    spans = [Span(request, 1, 0, 1, 1, 0, 0, 100, 100, 10), Span(phase, 2, 1, 1, 1, 0, 5, 95, 90, 90)]
    folder = written(tmp_path, [Trace(spans=spans, start_ns=0, end_ns=100, **of_host("a"))])
    ((_, *answer),) = answered(folder)[3]
    assert answer == ["GET /x", 100, 90, "tokenize"]


def test_the_questions_of_the_examples_are_answered(tmp_path: Path) -> None:
    """By DuckDB. `tests/bench/fleet.py` has all engines answer, and compares each answer with the report."""
    folder = written(tmp_path, [simulated()])
    answers = answered(folder)
    requests = rows_of(folder, "requests").to_pylist()
    assert sum(row[2] for row in answers[0]) == sum(row["is_complete"] for row in requests)
    assert sum(row[2] for row in answers[1]) == sum(row["device_ns"] for row in requests)
    assert answers[3][0][2] == max(row["duration_ns"] for row in requests)
    parts = ("queue", "share", "waiting", "stall", "transport", "sub_requests", "unknown")
    longest = {
        row["trace_id"].hex(): max(
            [(row[f"{part}_ns"], part) for part in parts] + [(ns, phase) for phase, ns in row["phases_ns"] or ()]
        )
        for row in requests
    }
    assert {trace: (ns, part) for trace, _, _, ns, part in answers[3]}.items() <= longest.items()
    assert sum(row[1] for row in answers[2]) > 0
    assert len(answers[4]) > 3
    assert fleet.changes([], []).num_rows == 0
    assert fleet.spark_schema("explanations").startswith("run string, service_version string, trace_id binary")
    assert fleet.in_spark(fleet.requests)(rows_of(folder, "spans")).schema.field("span_id").type == pyarrow.binary()


def test_merged_files_make_the_rows_of_their_parts(tmp_path: Path) -> None:
    folder = written(tmp_path, two_hosts())
    merged = merge_recordings(
        [file.load(path) for path in sorted((tmp_path / "files").iterdir())], by_wall_clock=True
    ).saved
    again = written(tmp_path / "merged", [merged.trace])
    for name in TABLES:
        order = [("start_unix_ns", "ascending"), ("process", "ascending")]
        columns = [one for one in arrow_schema(name).names if one not in ("apart_ns", "clock_offset_ns")]
        assert (
            rows_of(again, name)
            .sort_by(order)
            .select(columns)
            .equals(rows_of(folder, name).sort_by(order).select(columns))
        )


def test_the_documentation_has_every_column() -> None:
    text = (Path(fleet.__file__).parent.parent / "docs" / "dataset.md").read_text("utf-8")
    _, *tables = text.partition("## Tables")[2].split("| column | type | is |\n|---|---|---|\n")
    for rows, columns in zip(
        tables,
        [read_definition()["process"], *(t["columns"] for t in read_definition()["tables"].values())],
        strict=True,
    ):
        expected = [
            f"| `{name}` | {kind.replace('<', ' of ').replace('>', '').replace(',', ' to ')} | {about} |"
            for name, (kind, about) in columns.items()
        ]
        assert rows.partition("\n\n")[0].splitlines() == expected
