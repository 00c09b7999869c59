"""The dataset that the exporter writes while services run: the rows of a conversion, in whole files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from otlp_collectors import collecting, take
from test_agent import agents, begin, children_of, folder, run, until
from test_agent_export import recordings
from test_grafted import saved
from test_settling import ENGINE, FRONT, Run, S, Told, run_of, with_nested, with_slots, with_strays

from instrument.agent.exporter_process import EXPORTER_NAME
from instrument.cli import main
from instrument.otlp import file_exports
from instrument.otlp.file_exports import DatasetExport
from instrument.profile.model import Capture, Parquet
from instrument.recording.export_checkpoint import Progress
from instrument.recording.memory import LABELS
from instrument.recording.spans import BATCH_KEYS, DeviceInterval, Span
from instrument.trace.columns import device_intervals
from instrument.trace.dataset_sources import DatasetRows, SettledRows
from instrument.trace.dataset_tables import DatasetProcess, read_definition
from instrument.trace.decisions import RememberedTraces
from instrument.trace.merge import merge_recordings
from instrument.trace.settling import Settling

pyarrow = pytest.importorskip("pyarrow")

__all__ = ["folder"]

TABLES = tuple(read_definition()["tables"])
Rows = dict[str, list[tuple[Any, ...]]]


def rows_in(tables: Any) -> Rows:
    """Return the rows of tables in one order, without the numbers that these tests do not give to rows."""
    rows: Rows = {name: [] for name in TABLES}
    for name, table in tables:
        left_out = [column for column in ("children_ns", "waiting_ns", "thread") if name == "spans"]
        rows[name] += [tuple(sorted(row.items())) for row in table.drop_columns(left_out).to_pylist()]
    return {name: sorted(some, key=repr) for name, some in rows.items()}


def settled(run: Run, every_ns: int, sample: float = 1.0) -> Rows:
    """Return the rows that a reader settles, which looks every so often."""
    front, engine = (Told(spans, n, Capture(sample=sample)) for spans, n in ((run.front, FRONT), (run.engine, ENGINE)))
    members = []
    for spans, number in ((run.front, FRONT), (run.engine, ENGINE)):
        facts = saved(spans, number, "one").trace
        members.append(DatasetProcess(facts, facts.origin.realtime_of(0)))
    tables: list[tuple[str, Any]] = []
    remembered, intervals = RememberedTraces(), [intervals_of(spans) for spans in (run.front, run.engine)]

    def take(decisions: Any, now_ns: int) -> None:
        rows = SettledRows(decisions, members, intervals, remembered, now_ns)
        tables.extend(rows.make_tables(pyarrow.array([True, True]).to_numpy(zero_copy_only=False)))

    settling = Settling()
    settling.members, settling.taken = [front.rows, engine.rows], [take]
    for at_ns in range(0, 80 * S, every_ns):
        for process in (front, engine):
            process.read(at_ns, at_ns + every_ns)
        settling.settle(at_ns + every_ns)
    front.rows.is_over = engine.rows.is_over = True
    settling.settle(80 * S, is_last=True)
    return rows_in(tables)


CELLS = [(name, np.int64) for name in ("span_id", "device", "stream", "start_ns", "end_ns", "label", "uncertainty_ns")]


def intervals_of(spans: Sequence[Span]) -> Any:
    """Return the reader of the device intervals of a process."""
    cells = np.array(
        [
            (span.span_id, *(getattr(item, name) for name, _ in CELLS[1:5]), LABELS.index(item.label), 0)
            for span in spans
            for item in span.device
        ],
        dtype=CELLS,
    )
    return lambda span_id, asking, _: device_intervals(cells[np.isin(cells["span_id"], span_id[asking])], span_id)


def on_device(run: Run) -> Run:
    """Give the batches of an engine device intervals."""
    for span in [span for span in run.engine if BATCH_KEYS in span.attributes]:
        span.site = replace(span.site, device=True)
        span.device = (
            DeviceInterval(0, 7, span.start_ns, span.end_ns),
            DeviceInterval(1, 8, span.start_ns, span.end_ns),
        )
    return run


def converted(run: Run) -> Rows:
    """Return the rows that a conversion of the two recordings has."""
    parts = []
    for spans, number in ((run.front, FRONT), (run.engine, ENGINE)):
        part = saved(spans, number, "one")
        parts.append(replace(part, trace=replace(part.trace, end_ns=80 * S)))
    return rows_in(DatasetRows(merge_recordings(parts)).make_tables())


@pytest.mark.parametrize(
    ("make", "seed"), [(run_of, 1), (run_of, 2), (with_strays, 8), (with_nested, 4), (with_slots, 6)]
)
def test_settled_rows_are_those_of_a_conversion(make: Any, seed: int) -> None:
    expected = converted(on_device(make(seed)))
    assert expected["intervals"]
    for every_ns in (S // 2, 7 * S):
        rows = settled(on_device(make(seed)), every_ns)
        for name in ("spans", "requests", "batches", "members", "intervals"):
            assert rows[name] == expected[name], name


# Services

ENGINE_MODULE = """
def step(x):
    return x + 1

def serve(x):
    for _ in range(9):
        step(x)
    if x % 10 == 3:
        raise ValueError(x)
"""

SERVICE = """
import os, sys
import instrument
import engine

def ask(count):
    for x in range(count):
        try:
            engine.serve(x)
        except ValueError:
            pass

for line in sys.stdin:
    word = line.strip()
    if word == "ask":
        ask(50)
    elif word == "child":
        if os.fork() == 0:
            ask(20)
            sys.exit(0)
        os.wait()
    elif word == "scrape":
        open("metrics", "w").write(instrument.prometheus())
    print(word, flush=True)
"""


def profile(parquet: str, more: str = "", capture: str = "") -> None:
    Path("engine.py").write_text(ENGINE_MODULE)
    Path("profile.yaml").write_text(f"""
service: shop
functions:
  - {{match: "engine:serve", kind: request}}
  - match: "engine:step"
{capture}
export:
  parquet: {{{parquet}}}
{more}
""")


def say(service: subprocess.Popen[str], word: str) -> None:
    assert service.stdin is not None
    assert service.stdout is not None
    service.stdin.write(f"{word}\n")
    service.stdin.flush()
    assert service.stdout.readline() == f"{word}\n", service.communicate()


def read(table: str, columns: str, where: str = "data") -> list[tuple[Any, ...]]:
    """Return columns of a table, as DuckDB reads it."""
    if not any(Path(where, table).rglob("*.parquet")):
        return []
    files = f"read_parquet('{where}/{table}/*/*/*/*.parquet', hive_partitioning = true)"
    return duckdb.execute(f"select {columns} from {files} order by all").fetchall()


@pytest.mark.slow
def test_a_dataset_grows_while_services_run_and_a_killed_exporter_loses_what_it_says() -> None:
    profile("path: data/, every: 1s", "  recording: {path: 'files/{pid}.npz'}\ndevice: {host: 50ms}")
    service = begin(SERVICE)
    say(service, "ask")
    say(service, "child")
    until(lambda: (len(read("requests", "span_id")), len(read("spans", "span_id"))) == (70, 700))
    until(lambda: set(TABLES) == {path.name for path in Path("data").iterdir()})
    (agent,) = agents()
    (exporter,) = children_of(agent, EXPORTER_NAME)
    os.kill(exporter, signal.SIGSTOP)
    say(service, "ask")
    os.kill(exporter, signal.SIGKILL)
    say(service, "ask")
    until(lambda: len(read("requests", "span_id")) == 170)
    _, errors = service.communicate(timeout=240)
    until(lambda: not agents())
    assert "lost" not in errors
    assert read("losses", "reason, count") == []
    assert main(["convert", *map(str, Path("files").iterdir()), "--to", "parquet", "converted"]) == 0
    columns = "span_id, trace_id, parent_span_id, root_span_id, duration_ns, start_unix_ns - clock_offset_ns, thread"
    assert read("spans", columns) == read("spans", columns, "converted")
    columns = "span_id, trace_id, name, error, unknown_ns, is_complete, start_unix_ns - clock_offset_ns, host, process"
    assert read("requests", columns) == read("requests", columns, "converted")
    assert len({process for (process,) in read("processes", "process")}) == 2
    columns = "start_unix_ns - clock_offset_ns, process, name, device, value, unit"
    gauges, from_files = read("gauges", columns), read("gauges", columns, "converted")
    assert len(gauges) == len(set(gauges)) > 14
    ends = {process: at_ns for at_ns, process, *_ in sorted(from_files)}
    assert [row for row in gauges if row[0] <= ends.get(row[1], 0)] == from_files
    for table, columns in (("losses", "reason, count"), ("intervals", "span_id")):
        assert read(table, columns) == read(table, columns, "converted") == []
    assert not [path for path in Path("data").rglob("*") if path.suffix == ".part"]
    assert {path.stat().st_mode & 0o777 for path in Path("data").rglob("*.parquet")} == {0o600}


@pytest.mark.slow
@pytest.mark.parametrize("sends", [True, False], ids=["with a collector", "alone"])
def test_lost_rows_of_a_dataset_are_in_the_metrics_of_the_process_and_none_counts_as_lost_by_otlp(
    *, sends: bool
) -> None:
    Path("data").write_text("a file")
    with collecting(take) as collector:
        otlp = f"  otlp: {{endpoint: 'http://127.0.0.1:{collector.server_port}'}}" if sends else ""
        profile(
            "path: data/, every: 1s",
            f"  prometheus: {{listen: '127.0.0.1:0'}}\n  summary: {{to: stderr}}\n{otlp}\nrequests: auto",
        )
        Path("main.py").write_text(SERVICE)
        service = begin(SERVICE)
        say(service, "ask")

        def is_told(progress: Progress) -> bool:
            is_sent = progress.fates["exported"] >= 500 and not progress.unsettled_spans
            return progress.fates["unstored"] > 500 and (is_sent or not sends)

        until(lambda: [is_told(place.read_progress()) for place, _ in recordings()] == [True])
        say(service, "scrape")
        _, errors = service.communicate(timeout=240)
        until(lambda: not agents())
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in Path("metrics").read_text().splitlines()
        if not line.startswith("#")
    }
    losses = {name: value for name, value in values.items() if name.startswith("instrument_losses_total{") and value}
    reason = 'instrument_losses_total{instrument_reason="rows of the dataset that were not written"}'
    unwritten = 'instrument_losses_total{instrument_reason="spans that could not be written to files"}'
    assert set(losses) == {reason, *([] if sends else [unwritten])}
    assert losses[reason] > 500
    assert "rows of the dataset that were not written" in errors
    assert "OTLP" not in errors

    def of_sdk(name: str, component: str = "", error: str = "") -> float:
        labels = {"error_type": error, "otel_component_name": f"{component}/0", "otel_component_type": component}
        if not component:
            return values[f"otel_sdk_{name}"]
        return values[f"otel_sdk_{name}{{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"]

    # A long garbage collection is a span, too.
    assert of_sdk("span_live") == 0
    assert of_sdk("span_started_total") >= 500
    assert of_sdk("processor_span_processed_total", "instrument.tail_sampler") >= 500
    assert of_sdk("processor_span_processed_total", "instrument.tail_sampler", "queue_full") == 0
    exporter = "otlp_http_span_exporter" if sends else "instrument.file_span_exporter"
    inflight = f'{{otel_component_name="{exporter}/0",otel_component_type="{exporter}"}}'
    succeeded, failed = (of_sdk("exporter_span_exported_total", exporter, error) for error in ("", "failed"))
    assert (succeeded >= 500, failed >= 500) == (sends, not sends)
    assert values[f"otel_sdk_exporter_span_inflight{inflight}"] == 0


@contextmanager
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A store of objects that speaks S3, with the bucket `fleet`. Yields its file system."""
    pytest.importorskip("moto.server")
    from moto.server import ThreadedMotoServer
    from pyarrow import fs

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    files = fs.S3FileSystem(endpoint_override=f"127.0.0.1:{port}", scheme="http", region="us-east-1", access_key="x",
                            secret_key="x", allow_bucket_creation=True)  # fmt: skip
    files.create_dir("fleet")
    try:
        yield files
    finally:
        server.stop()


@pytest.mark.slow
def test_a_dataset_in_a_store_of_objects_has_all_requests_the_kept_spans_and_the_collectors_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pyarrow import dataset

    with store(monkeypatch) as files, collecting(take) as collector:
        otlp = f"  otlp: {{endpoint: 'http://127.0.0.1:{collector.server_port}'}}"
        capture = "capture: {sample: 0, errors: true}"
        profile("path: 's3://fleet/traces?region=us-east-1'", otlp, capture)
        service = begin(SERVICE)
        say(service, "ask")
        _, errors = service.communicate(timeout=240)
        until(lambda: not agents())
        assert "lost" not in errors

        def rows(table: str) -> list[dict[str, Any]]:
            tables = dataset.dataset(f"fleet/traces/{table}", filesystem=files, partitioning="hive")
            rows: list[dict[str, Any]] = tables.to_table().to_pylist()
            return rows

        assert len(rows("requests")) == 50
        sent = {
            (span.trace_id, span.span_id, span.parent_span_id or None, span.name)
            for spans in collector.spans.values()
            for span in spans
        }
        names = ("trace_id", "span_id", "parent_span_id", "name")
        assert {tuple(row[name] for name in names) for row in rows("spans")} == sent
        assert Counter(row["name"] for row in rows("spans")) == {"serve": 5, "step": 45}
        assert not [path for path in files.get_file_info(_all("fleet")) if path.base_name.endswith(".part")]


def _all(bucket: str) -> Any:
    from pyarrow import fs

    return fs.FileSelector(bucket, recursive=True)


@pytest.mark.slow
def test_a_process_without_an_agent_writes_its_dataset_itself() -> None:
    profile("path: data/", "agent: off")
    done = run("import engine\nfor x in (1, 2):\n    engine.serve(x)\n")
    assert done.returncode == 0, done.stderr
    assert len(read("spans", "span_id")) == 20
    assert [row[0] for row in read("requests", "name")] == ["serve", "serve"]


@pytest.mark.slow
def test_a_process_of_a_second_has_its_notes_in_the_dataset() -> None:
    profile("path: data/")
    done = run("import instrument\nwith instrument.scope('x'):\n    instrument.annotate(size=b'')\n")
    assert done.returncode == 0, done.stderr
    until(lambda: not agents())
    ((notes,),) = read("processes", "notes")
    assert any("the attribute size cannot be bytes" in note for note in notes)


# Losses


@pytest.fixture
def _spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def some_rows() -> list[tuple[str, Any]]:
    return list(DatasetRows(merge_recordings([saved(run_of(1).front, FRONT, "one")])).make_tables())


@pytest.mark.usefixtures("_spool")
def test_rows_of_open_files_are_counted_by_the_next_exporter_which_removes_their_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_exports, "GROUP_ROWS", 1)
    settings = Parquet(str(tmp_path / "data"))
    killed = DatasetExport(settings, "run", 1 << 20)
    tables = some_rows()
    killed.buffer_rows(tables)
    parts = [path for path in tmp_path.glob("data/**/*") if path.is_file()]
    assert {path.suffix for path in parts} == {".part"}
    (journal,) = [path.read_text() for path in tmp_path.glob(f"instrument-*/*/{file_exports.JOURNAL}")]
    following = DatasetExport(settings, "run", 1 << 20)
    rows = sum(len(table) for _, table in tables)
    assert rows == json.loads(journal)["rows"]
    assert following.counts["unstored"] == rows > 0
    assert f"{rows} rows are lost" in caplog.text
    assert not [path for path in tmp_path.glob("data/**/*") if path.is_file()]
    following.buffer_rows(tables)
    following.end_dataset(time.monotonic())
    assert following.counts == {"unstored": rows, "stored": rows, "storing": 0}
    killed._discard_open_files("its files are to be closed")
    assert not list(tmp_path.glob("instrument-*/*"))


@pytest.mark.usefixtures("_spool")
def test_a_folder_that_cannot_be_written_to_loses_rows_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data").write_text("a file")
    export = DatasetExport(Parquet(str(tmp_path / "data")), "run", 1 << 20)
    for _ in range(2):
        export.buffer_rows(some_rows())
        export.close_files()
    assert export.counts["unstored"] == 2 * sum(len(table) for _, table in some_rows())
    assert caplog.text.count("rows are lost") == 1


@pytest.mark.usefixtures("_spool")
@pytest.mark.slow
def test_files_that_a_store_does_not_take_wait_within_the_bound_and_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with store(monkeypatch) as files:
        export = DatasetExport(Parquet("s3://absent/traces?region=us-east-1"), "run", 30_000)
        rows = sum(len(table) for _, table in some_rows())
        for _ in range(4):
            export.buffer_rows(some_rows())
            export.close_files()
        spooled = sum(path.stat().st_size for path in tmp_path.glob("instrument-*/**/*.parquet"))
        assert 0 < spooled <= 30_000
        assert "exceed limits.disk" in caplog.text
        assert 0 < export.counts["unstored"] < 4 * rows
        files.create_dir("absent")
        export.end_dataset(time.monotonic() + 60)
        assert export.counts["unstored"] + export.counts["stored"] == 4 * rows
        assert export.counts["stored"] > 0
        kept = [info for info in files.get_file_info(_all("absent")) if info.is_file]
        assert {info.extension for info in kept} == {"parquet"}


# The profile


@pytest.mark.parametrize("path", ["traces", "ftp://host/traces", "s3://", "s3:///traces", "{service}/"])
def test_a_path_that_is_no_folder_and_no_store_is_refused(path: str, folder: Path, capsys: Any) -> None:
    profile(f"path: '{path}'")
    assert main(["check", "profile.yaml"]) == 2
    assert "a folder, with a '/' in it, or a URL such as s3://bucket/traces" in capsys.readouterr().err


def test_check_says_what_a_dataset_lacks(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile("path: data/")
    assert main(["check", "profile.yaml"]) == 0
    assert "export.parquet" not in capsys.readouterr().out
    Path("taken").write_text("a file")
    profile("path: taken/data")
    assert main(["check", "profile.yaml"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"export.parquet: cannot write to {Path.cwd()}/taken/data: {Path.cwd()}/taken is no folder" in text
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["check", "profile.yaml"]) == 0
    assert "export.parquet: pyarrow is not installed; install it with: pip install" in capsys.readouterr().out
    assert main(["check", "--json", "profile.yaml"]) == 0
    assert "pyarrow" in json.loads(capsys.readouterr().out)["dataset"]["why_not_written"]
