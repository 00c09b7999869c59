"""The dataset of a simulated fleet: its cost, its size, and the answers of engines, compared with `instrument report`.

`python tests/bench/fleet.py --hosts 2 20` writes the recordings of 2 hosts, then of 20. Two processes write at once,
through the S3 protocol of moto's server. The installed engines of DuckDB, Polars, pyarrow, chDB, Spark and Ray then
answer the questions of `examples/fleet`. The benchmark compares each answer with the numbers of the report. Ten hosts
are simulated. Each further host has the spans of one of the ten, with a host, run and ids of its own.

`--folder data --hosts 1 10 100 1000 --seconds 23 --engines duckdb` writes 100 million spans to a local folder.

`--rates 10000 50000` measures `export: {parquet: }` instead. It measures the exporter of a service that records spans
at each rate. The exporter sends the spans to a collector, with and without the dataset.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples" / "fleet"
sys.path[:1] = [str(HERE.parent), str(EXAMPLES)]  # without this folder, whose modules have names of packages

from simulated_engine import Request, Service  # noqa: E402

from instrument.recording.distributions import _nearest_rank  # noqa: E402
from instrument.recording.spans import DeviceInterval  # noqa: E402
from instrument.report.view import Recording  # noqa: E402
from instrument.trace.dataset_files import DatasetWriter, Folder  # noqa: E402
from instrument.trace.dataset_sources import DatasetRows  # noqa: E402
from instrument.trace.file import Saved  # noqa: E402
from instrument.trace.merge import merge_recordings  # noqa: E402
from instrument.trace.request_trees import join_request_trees  # noqa: E402
from instrument.trace.trace import Trace  # noqa: E402

PARTS = {"queue": "queue_ns", "waiting in batches": "waiting_ns", "stall": "stall_ns", "share of batches": "share_ns"}


SIMULATED = 10
"""The number of hosts with spans of their own."""


def trace_of(host: int, seconds: float) -> Trace:
    """Return the recording of a host: two versions, three tenants, and some requests that block the loop."""
    rng = random.Random(host)
    arrivals = []
    at_ns = 10**9
    while (at_ns := at_ns + round(rng.expovariate(40) * 1e9)) < (1 + seconds) * 1e9:
        blocks_ns = 20_000_000 * (rng.random() < 0.01)
        arrivals.append(Request(0, at_ns, rng.randint(20, 400), rng.randint(1, 20), rng.choice("abc"), blocks_ns))
    trace = Service(seed=host, arrivals=arrivals).run()
    spans = [
        replace(span, device=(DeviceInterval(0, 7, span.start_ns + 5, span.end_ns - 3),))
        if span.site.name == "engine.step"
        else span
        for span in trace.spans
    ]
    origin = replace(
        trace.origin, host=f"host-{host}", boot=f"boot-{host}", run=f"run-{host}", version=f"1.{9 + host % 2}",
        pid=7, wall_error_ns=1000, service="fleet", realtime_ns=1_796_000_000 * 10**9, monotonic_ns=0,
    )  # fmt: skip
    return replace(trace, origin=origin, spans=spans)


def write(hosts: range, seconds: float, url: str) -> tuple[int, float, int]:
    """Write the spans of the first host for each. Return spans, seconds of the processor, and memory beyond them."""
    trace = trace_of(hosts[0] % SIMULATED, seconds)
    saved = Saved(trace, None)
    with tempfile.TemporaryDirectory() as place:
        written(saved, Folder(place), "warm")  # loads what the first write loads
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # forgets the peak
    before_bytes, began_s = memory_bytes("VmRSS"), time.process_time()
    folder = Folder(url)
    for host in hosts:
        origin = replace(trace.origin, host=f"host-{host}", boot=f"boot-{host}", run=f"run-{host}")
        written(Saved(replace(trace, origin=origin), None), folder, f"host-{host}")
    used_s, used_bytes = time.process_time() - began_s, memory_bytes("VmHWM") - before_bytes
    return len(trace.columns) * len(hosts), used_s, used_bytes


def written(saved: Saved, folder: Folder, name: str) -> None:
    writer = DatasetWriter(folder, name)
    for table, rows in DatasetRows(merge_recordings([saved])).make_tables():
        writer.write(table, rows)
    writer.close()


def memory_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def reported(hosts: int, seconds: float) -> Mapping[str, Any]:
    """Return the answers by the functions of the report."""
    requests: list[tuple[Any, ...]] = []
    blocked = [0, 0]
    copies = max(hosts // SIMULATED, 1)
    for host in range(min(hosts, SIMULATED)):
        recording = Recording.from_file(join_request_trees(Saved(trace_of(host, seconds), None)))
        trace, joined = recording.columns, recording.joined
        ledger, device = recording.ledger, recording.device_ledger
        for place, row in enumerate(joined.rows.tolist()):
            attributes, parts = trace.attributes[row], ledger.times_of_request(place)
            requests.append((
                recording.trace.origin.version, trace.sites[trace.site[row]].name, int(trace.total_ns[row]),
                attributes.get("tenant"), int(device.own_ns[place] + device.shared_ns[place]),
                attributes.get("gen_ai.usage.input_tokens", 0),
                {column: parts.get(name, 0) for name, column in PARTS.items()},
            ))  # fmt: skip
        is_blocked = trace.are_of_sites([site.name == "loop blocked" for site in trace.sites])
        blocked[0] += int(is_blocked.sum())
        blocked[1] += int(trace.total_ns[is_blocked].sum())
    requests *= copies
    groups: dict[Any, list[int]] = {}
    tenants: dict[Any, list[int]] = {}
    for version, name, total_ns, tenant, device_ns, tokens, _ in requests:
        groups.setdefault((version, name), []).append(total_ns)
        sums = tenants.setdefault(tenant, [0, 0, 0])
        sums[0], sums[1], sums[2] = sums[0] + 1, sums[1] + device_ns, sums[2] + tokens
    return {
        "p99 by version": sorted(
            (*key, len(v), sorted(v)[_nearest_rank(0.99, len(v)) - 1]) for key, v in groups.items()
        ),
        "device time and tokens by tenant": sorted((tenant, *sums) for tenant, sums in tenants.items()),
        "loop blockers of the fleet": (blocked[0] * copies, blocked[1] * copies),
        "slowest requests": sorted((row[2] for row in requests), reverse=True)[:10],
        "parts": {column: sum(row[6][column] for row in requests) for column in PARTS.values()},
    }


def checked(answers: Mapping[str, list[tuple[Any, ...]]], right: Mapping[str, Any]) -> None:
    """Compare the answers of an engine with those of the report. Raises `AssertionError`."""
    assert [tuple(row) for row in answers["p99 by version"]] == right["p99 by version"]
    of_tenants = [(row[0], row[1], row[2], row[3] or 0) for row in answers["device time and tokens by tenant"]]
    assert of_tenants == right["device time and tokens by tenant"], (of_tenants, right)
    blockers = answers["loop blockers of the fleet"]
    assert (sum(row[1] for row in blockers), sum(row[2] for row in blockers)) == right["loop blockers of the fleet"]
    assert [row[2] for row in answers["slowest requests"]] == right["slowest requests"]
    assert answers["regressions by version"]


def questions(name: str, folder: str) -> Iterator[tuple[str, str]]:
    """Yield the statements of an example with their first words, with views of a folder."""
    text = (EXAMPLES / name).read_text("utf-8").replace("'dataset/", f"'{folder}/")
    for statement in text.split(";\n"):
        lines = statement.strip().splitlines()
        if lines:
            comments = [line for line in lines if line.startswith("--")]
            title = (comments or [""])[-1].removeprefix("-- ").partition(" with ")[0].partition(":")[0]
            yield title, "\n".join(line for line in lines if not line.startswith("--"))


def asked(name: str, folder: str, run: Callable[[str], Any]) -> dict[str, list[tuple[Any, ...]]]:
    answers = {}
    for title, statement in questions(name, folder):
        began_s, used_s = time.perf_counter(), time.process_time()
        answers[title] = run(statement)
        began_s, used_s = time.perf_counter() - began_s, time.process_time() - used_s
        if not title.startswith("Questions") and answers[title]:
            print(f"  {title}: {began_s:.2f} s, {used_s:.2f} s of processor", flush=True)
    return answers


def by_duckdb(folder: str) -> Mapping[str, Any]:
    import duckdb

    connection = duckdb.connect()
    return asked("duckdb.sql", folder, lambda statement: connection.execute(statement).fetchall())


def by_chdb(folder: str) -> Mapping[str, Any]:
    from chdb import session

    with tempfile.TemporaryDirectory() as place:
        connection = session.Session(place)

        def run(statement: str) -> Any:
            text = str(connection.query(statement, "JSONCompact"))
            kinds = {"UInt64", "Int64", "Nullable(Int64)", "Nullable(UInt64)"}
            document = json.loads(text) if text.strip() else {"data": [], "meta": []}
            is_whole = [column["type"] in kinds for column in document["meta"]]
            return [
                tuple(int(v) if whole and v is not None else v for v, whole in zip(row, is_whole, strict=True))
                for row in document["data"]
            ]

        connection.query("create database if not exists fleet")
        connection.query("use fleet")
        return asked("clickhouse.sql", folder, run)


def by_spark(folder: str) -> Mapping[str, Any]:
    import spark_job
    from pyspark.sql import SparkSession

    os.environ |= {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": f"{EXAMPLES}:{os.environ.get('PYTHONPATH', '')}"}
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    answers = asked("spark.sql", folder, lambda statement: [tuple(row) for row in spark.sql(statement).collect()])
    rows = spark_job.joined_requests(spark, folder).collect()
    answers["parts"] = {column: sum(row[column] for row in rows) for column in PARTS.values()}  # type: ignore[assignment]
    print("  requests joined by run", flush=True)
    assert spark_job.explanations(spark, folder).count() > 0
    print("  explanations by run", flush=True)
    assert spark_job.changes(spark, folder, "1.9", "1.10").count() > 0
    spark.stop()
    return answers


def parts_of(columns: Any) -> Mapping[str, int]:
    return {name: int(sum(columns(name))) for name in PARTS.values()}


def by_pyarrow(url: str) -> Mapping[str, Any]:
    from pyarrow import dataset

    folder = Folder(f"{url}")
    table = dataset.dataset(f"{folder.path}/requests", filesystem=folder.files, partitioning="hive").to_table()
    return {"parts": parts_of(lambda name: table.column(name).to_pylist())}


def by_polars(url: str) -> Mapping[str, Any]:
    import polars

    bucket = url.partition("?")[0]
    options = {"aws_endpoint_url": os.environ["AWS_ENDPOINT_URL"], "aws_region": "us-east-1", "aws_allow_http": "true",
               "aws_access_key_id": "x", "aws_secret_access_key": "x"}  # fmt: skip
    frame = polars.scan_parquet(f"{bucket}/requests/**/*.parquet", storage_options=options, hive_partitioning=True)
    collected = frame.select(*PARTS.values()).collect()
    return {"parts": parts_of(lambda name: collected[name].to_list())}


def by_ray(folder: str) -> Mapping[str, Any]:
    import ray
    import ray_job

    ray.init(
        num_cpus=2,
        runtime_env={"env_vars": {"PYTHONPATH": str(EXAMPLES)}},
        include_dashboard=False,
        log_to_driver=False,
    )
    rows = ray_job.requests(folder).take_all()
    assert ray_job.explanations(folder).count() > 0
    ray.shutdown()
    return {"parts": parts_of(lambda name: [row[name] for row in rows])}


SERVICE = """
import sys, time
import engine

rate, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
began, count = time.monotonic(), 0
while time.monotonic() < end:
    while count < (time.monotonic() - began) * rate:
        engine.serve(count)
        count += 10
    time.sleep(0.002)
"""
ENGINE = """
def step(x):
    return x

def serve(x):
    for _ in range(9):
        step(x)
"""
EXPORTS = {"without": "", "with": ", parquet: {path: data/, every: 10s}"}


class Collector(BaseHTTPRequestHandler):
    """Takes everything."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def measure_writer(rate: int, seconds: float, port: int) -> None:
    """Print the cost of the dataset to the exporter of a service that records `rate` spans a second."""
    costs = {}
    server = ThreadingHTTPServer(("127.0.0.1", port), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    otlp = f"otlp: {{endpoint: 'http://127.0.0.1:{server.server_port}', compression: none}}"
    for name, export in EXPORTS.items():
        with tempfile.TemporaryDirectory() as place:
            rules = "functions: [{match: 'engine:serve', kind: request}, {match: 'engine:step'}]"
            for file, text in (("main.py", SERVICE), ("engine.py", ENGINE),
                               ("p.yaml", f"service: s\n{rules}\nexport: {{{otlp}{export}}}\n")):  # fmt: skip
                Path(place, file).write_text(text, "utf-8")
            words = [sys.executable, "-m", "instrument", "run", "--profile", "p.yaml", "--", sys.executable, "main.py"]
            environ = {**os.environ, "TMPDIR": place, "XDG_RUNTIME_DIR": place}
            with subprocess.Popen([*words, str(rate), str(seconds)], cwd=place, env=environ) as service:
                readings = [(0, 0, 0.0)]
                while service.poll() is None:
                    readings += filter(None, [reading_of(place)])
                    time.sleep(0.2)
                while reading := reading_of(place):
                    readings.append(reading)
                    time.sleep(0.2)
            files = list(Path(place, "data", "spans").rglob("*.parquet"))
            rows = rows_of(files)
            costs[name] = *(max(column) for column in zip(*readings, strict=True)), rows
            if rows:
                print_losses(place)
                print(f"  {sum(path.stat().st_size for path in files) / rows:.1f} bytes a span in {len(files)} files")
    server.shutdown()
    server.server_close()
    spans = costs["with"][3]
    private, resident, used_s = (costs["with"][at] - costs["without"][at] for at in range(3))
    print(f"{rate} spans/s: {spans} spans, {used_s / spans * 1e6:.1f} us of processor a span beyond OTLP's")
    print(
        f"  {private / 1e6:.0f} MB of private memory beyond, {resident / 1e6:.0f} MB with shared libraries", flush=True
    )


def print_losses(place: str) -> None:
    from pyarrow import dataset

    losses = dataset.dataset(f"{place}/data/losses").to_table(columns=["reason", "count"]).to_pylist()
    print("  losses:", *({row["reason"]: row["count"] for row in losses}.items() or ["none"]))


def reading_of(place: str) -> tuple[int, int, float] | None:
    """Return the private and resident bytes and the seconds of the processor of an exporter, None without one."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "comm").read_text("ascii").strip() != "instr-exporter":
                continue
            if place.encode() not in (path / "environ").read_bytes():
                continue
            lines = (path / "status").read_text("ascii").splitlines()
            sizes = {
                line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(("Rss", "VmHWM"))
            }
            fields = (path / "stat").read_text("ascii").rpartition(")")[2].split()
            return sizes["RssAnon"], sizes["VmHWM"], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, KeyError):
            continue
    return None


def rows_of(files: list[Path]) -> int:
    from pyarrow import parquet

    return sum(parquet.read_metadata(path).num_rows for path in files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 20], help="growing; above 10 in tens")
    parser.add_argument("--folder", help="write there, not through moto's S3; it is left")
    parser.add_argument("--processes", type=int, default=2, help="that write at once")
    parser.add_argument("--seconds", type=float, default=5, help="of each host")
    parser.add_argument("--port", type=int, default=25801)
    parser.add_argument("--engines", nargs="*", default=["pyarrow", "polars", "duckdb", "chdb", "spark", "ray"])
    parser.add_argument("--rates", type=int, nargs="*", default=[], help="measure export: parquet at so many spans/s")
    options = parser.parse_args()
    for rate in options.rates:
        measure_writer(rate, options.seconds, options.port)
    if options.rates:
        return 0
    if options.folder:
        run(options, options.folder, lambda: options.folder)
        return 0
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{options.port}", "AWS_ACCESS_KEY_ID": "x",
                   "AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "true"}  # fmt: skip
    words = [sys.executable, "-m", "moto.server", "-p", str(options.port)]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, **quiet) as server, tempfile.TemporaryDirectory() as place:
        try:
            run_by_s3(options, place)
        finally:
            server.kill()
    return 0


def run_by_s3(options: argparse.Namespace, place: str) -> None:
    """Write through the S3 protocol."""
    from pyarrow import fs

    endpoint = f"127.0.0.1:{options.port}"
    store = fs.S3FileSystem(endpoint_override=endpoint, scheme="http", region="us-east-1", access_key="x",
                            secret_key="x", allow_bucket_creation=True)  # fmt: skip
    for _ in range(100):
        try:
            store.create_dir("fleet")
            break
        except OSError:
            time.sleep(0.2)

    def copy() -> str:
        fs.copy_files("fleet/dataset", place, source_filesystem=store)
        return place

    run(options, f"s3://fleet/dataset?endpoint_override={endpoint}&scheme=http&region=us-east-1", copy)


def run(options: argparse.Namespace, url: str, copy: Callable[[], str]) -> None:
    """Write the hosts in steps, and ask all engines after each. `copy` returns a local folder with the dataset."""
    before = spans = 0
    for hosts in sorted(options.hosts):
        pieces = [range(first, hosts, SIMULATED) for first in range(before, min(before + SIMULATED, hosts))]
        with ProcessPoolExecutor(options.processes, max_tasks_per_child=1) as pool:
            rows = list(pool.map(partial(write, seconds=options.seconds, url=url), pieces))
        counts, costs_s, uses_bytes = zip(*rows, strict=True)
        cost_us = sum(costs_s) / sum(counts) * 1e6
        before, spans, folder = hosts, spans + sum(counts), copy()
        size_bytes = sum(path.stat().st_size for path in Path(folder, "spans").rglob("*.parquet"))
        print(f"{hosts} hosts: {spans} spans, {cost_us:.2f} us of processor a span")
        print(
            f"  {size_bytes / spans:.1f} bytes a span, {max(uses_bytes) / 1e6:.0f} MB of a writer beyond its trace",
            flush=True,
        )
        ask(options.engines, url, folder, reported(hosts, options.seconds))


def ask(engines: list[str], url: str, folder: str, right: Mapping[str, Any]) -> None:
    """Have each engine answer, and compare the answers."""
    ways = {"pyarrow": (by_pyarrow, url), "polars": (by_polars, url), "duckdb": (by_duckdb, folder),
            "chdb": (by_chdb, folder), "spark": (by_spark, folder), "ray": (by_ray, folder)}  # fmt: skip
    for name in engines:
        way, where = ways[name]
        began_s = time.perf_counter()
        try:
            answers = dict(way(where))
        except ImportError as problem:
            print(f"{name}: skipped, {problem}")
            continue
        if "parts" in answers:
            assert answers.pop("parts") == right["parts"], name
        if answers:
            checked(answers, right)
        print(f"{name}: right, {time.perf_counter() - began_s:.1f} s with its start", flush=True)


if __name__ == "__main__":
    sys.exit(main())
