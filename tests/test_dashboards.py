"""The dashboards and alerts of `examples`: no panel is empty over the demonstration, each alert fires and clears."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from otlp_receiver import free_port
from test_gauges import FULL, library

from instrument.otlp.exposition import make_metric_name
from instrument.recording.metric_definitions import COUNTER, DEFINITIONS, GAUGES
from instrument.recording.metric_definitions import HISTOGRAM as OF_DURATIONS

__all__ = ["library"]

ROOT = Path(__file__).parent.parent
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
HISTOGRAM = ("_bucket", "_sum", "_count")


def made() -> Any:
    """The module that writes the dashboards."""
    spec = importlib.util.spec_from_file_location("make_dashboards", ROOT / "examples/grafana/make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expressions() -> list[str]:
    return [expr for _, panels in made().DASHBOARDS.values() for _, _, targets in panels for expr, _ in targets]


def exported() -> set[str]:
    """The names of the series that a scrape may have."""
    metrics = [*DEFINITIONS.values(), *(metric for gauge in GAUGES.values() for metric in gauge.metrics)]
    parts = {OF_DURATIONS: HISTOGRAM, COUNTER: ("_total",)}
    return {"up"} | {
        make_metric_name(one.name, one.unit) + part for one in metrics for part in parts.get(one.kind, ("",))
    }


def test_the_files_are_those_of_the_list() -> None:
    module = made()
    for path, text in module.files().items():
        assert path.read_text() == text, path


def test_each_metric_of_a_panel_or_an_alert_is_one_that_we_export() -> None:
    alerts = [expr for expr, _, _ in made().ALERTS.values()]
    names = {
        name for expr in [*expressions(), *alerts] for name in re.findall(r"\b([a-z]+(?:_[a-z0-9]+)+)\b[{\[) ]", expr)
    }
    names -= {"histogram_quantile", "last_over_time", "http_route", "hw_name", "http_response_status_code"}
    names -= {"instrument_span_name", "instrument_part", "instrument_reason", "process_pid", "error_type"}
    assert len(names) > 20
    assert names <= exported()


# -------------------------------------------------------------------- the real Prometheus


def until(is_so: Callable[[], Any], limit_s: float = 120) -> Any:
    end = time.monotonic() + limit_s
    while not (found := is_so()):
        assert time.monotonic() < end, is_so
        time.sleep(0.2)
    return found


@contextmanager
def started(command: list[str], folder: Path, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{Path(command[0]).name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env={**os.environ, **environ})
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def demonstration(folder: Path, library: Path) -> Iterator[tuple[int, Callable[[], object]]]:
    """The demonstration with a GPU that is none, and a ring so small that spans are lost.

    Yields the port of its scrapes, and a function that loads it.
    """
    for name in ("torch", "httpx", "starlette", "uvicorn"):
        pytest.importorskip(name)
    (folder / "script").write_text(FULL.replace("\n    ", "\n"))
    listen, serve = free_port(), free_port()
    profile = (
        (ROOT / "configs/chat.yaml")
        .read_text()
        .replace("  host: 1s\n", "  host: 1s\n  nvml: 1s\nlimits: {blocked: 100us, ring: 128KiB}\n")
    )
    profile = profile.replace("\nexport:\n", f"\nexport:\n  prometheus: {{listen: '127.0.0.1:{listen}'}}\n")
    (folder / "profile.yaml").write_text(profile)
    environ = {
        "PYTHONPATH": str(ROOT / "examples"), "LD_LIBRARY_PATH": str(library),
        "FAKE_NVML": str(folder / "script"), "FAKE_NVML_LOG": str(folder / "calls"),
    }  # fmt: skip
    run = [sys.executable, "-m", "instrument", "run", "--profile", "profile.yaml", "--", "-m", "chat.server"]
    load = [sys.executable, "-m", "chat.load", "--url", f"http://127.0.0.1:{serve}", "--requests", "20"]

    def serves() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", serve)) == 0

    with started([*run, "--port", str(serve)], folder, **environ):
        until(serves)
        yield (
            listen,
            lambda: subprocess.run(load, check=True, timeout=240, env={**os.environ, **environ}, capture_output=True),
        )


OF_PROMETHEUS = {"job", "instance"}
"""The labels that Prometheus adds."""

OF_FAILURES = {"error_type"}
"""The labels that only failed requests have."""


def asked() -> set[tuple[str, str]]:
    """Return the metrics of all panels and alerts with each label that they use, "" for none."""
    alerts = [expr for expr, _, _ in made().ALERTS.values()]
    number = r"(?:(?:rate|increase)\()?"
    pairs: set[tuple[str, str]] = set()
    for expr in [*expressions(), *alerts]:
        for labels, name, where in re.findall(rf"(?:by \(([^)]*)\) \({number})?\b(\w+)(?:\{{([^}}]*)\}})?", expr):
            if name in exported() - {"up"}:
                matched = re.findall(r"(\w+)(?:=|!)", where)
                pairs |= {(name, label.strip()) for label in ["", *labels.split(","), *matched]}
    return {(name, label) for name, label in pairs if label not in OF_PROMETHEUS | OF_FAILURES}


@pytest.mark.slow
def test_a_scrape_of_the_demonstration_has_each_metric_and_label_that_panels_and_alerts_use(
    tmp_path: Path, library: Path
) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    pairs = asked()
    assert len({name for name, _ in pairs}) > 20
    assert {"le", "http_route", "hw_name", "instrument_reason"} <= {label for _, label in pairs}

    def scraped(port: int) -> set[tuple[str, str]]:
        try:
            with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                families = list(parser.text_string_to_metric_families(answer.read().decode()))
        except URLError:
            return set()
        return {
            (sample.name, label)
            for family in families
            for sample in family.samples
            for label in ["", *(label for label, value in sample.labels.items() if value)]
        }

    with demonstration(tmp_path, library) as (listen, load):
        until(lambda: scraped(listen))
        for _ in range(10):
            load()
            if not (missing := pairs - scraped(listen)):
                break
        assert not missing


@pytest.mark.slow
@pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed")
def test_no_panel_is_empty_over_the_demonstration(tmp_path: Path, library: Path) -> None:
    assert PROMETHEUS is not None
    port = free_port()
    url = f"http://127.0.0.1:{port}/api/v1/query"

    def values(expr: str) -> list[Any]:
        expr = expr.replace("$__rate_interval", "1m").replace("$job", ".*")
        try:
            with urlopen(f"{url}?{urlencode({'query': expr})}") as answer:
                found = json.load(answer)["data"]["result"]
        except URLError:
            return []
        return [one for one in found if one["value"][1] != "NaN"]

    config = (ROOT / "examples/prometheus/prometheus.yml").read_text()
    config = config.replace("15s", "1s").replace("alerts.yaml", str(ROOT / "examples/prometheus/alerts.yaml"))
    prometheus = [PROMETHEUS, "--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}"]
    with demonstration(tmp_path, library) as (listen, load):
        (tmp_path / "prometheus.yml").write_text(config.replace("localhost:9464", f"127.0.0.1:{listen}"))
        with started(prometheus, tmp_path):
            until(lambda: values("instrument_processes"))
            empty = set(expressions())
            for _ in range(10):  # counters count from their first value on
                load()
                empty = {expr for expr in empty if not values(expr)}
                if not empty:
                    break
                time.sleep(1.5)
            assert not empty


HOUR = 60
HTTP = 'http_server_request_duration_seconds_{}job="a", instance="i", http_route="/x"{}'


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    told = ", ".join(f'{label}="{value}"' for label, value in {"job": "a", "instance": "i", **labels}.items())
    return {"series": f"{name}{{{told}}}", "values": values}


def buckets(name: str, fast: int, slow: int) -> list[dict[str, str]]:
    """A request a minute of 0.1 s, then of 5 s, then of 0.1 s again."""
    phases = ((fast, 1), (slow, 0), (fast, 1))
    values = {"0.1": [], "10.0": [], "+Inf": []}  # type: dict[str, list[int]]
    count = quick = 0
    for minutes, is_quick in phases:
        for _ in range(minutes):
            count, quick = count + 1, quick + is_quick
            for le, value in (("0.1", quick), ("10.0", count), ("+Inf", count)):
                values[le].append(value)
    return [series(f"{name}_bucket", " ".join(map(str, told)), http_route="/x", le=le) for le, told in values.items()]


def sums(name: str, **labels: str) -> list[dict[str, str]]:
    """Ten values a minute, of 0.01 s each at first, then of 1 s, then of 0.01 s again."""
    calm, busy = "0+0.1x300", "40+10x30"
    return [
        series(f"{name}_sum", f"{calm} {busy} 340+0.1x300", **labels),
        series(f"{name}_count", "0+10x700", **labels),
    ]


QUEUE, CALLS = "instrument_request_queue_duration_seconds", "instrument_call_duration_seconds"
CASES: dict[str, tuple[list[dict[str, str]], int, int]] = {
    "QueueGrows": (sums(QUEUE), 325, 600),
    "SlowerThanItsWeek": (buckets("http_server_request_duration_seconds", 2000, 40), 2035, 2100),
    "LoopBlocked": (sums(CALLS, instrument_span_name="loop blocked"), 325, 600),
    "DeviceStarved": (
        [series("hw_gpu_utilization_ratio", "0.9x30 0.05x30 0.9x60"), series("http_server_active_requests", "4x200")],
        50, 90,
    ),
    "RequestsFail": (
        [
            series("http_server_request_duration_seconds_count", "0+1x30 30+9x30 300+0x60", error_type="ValueError"),
            series("http_server_request_duration_seconds_count", "0+90x120"),
        ],
        50, 110,
    ),
    "SpansLost": (
        [series("instrument_losses_total", "0x30 1+5x30 156x60", instrument_reason="overwritten")], 50, 110,
    ),
    "AgentGone": ([series("up", "1x30 0x30 1x60"), series("instrument_processes", "1x30 _x30 1x60")], 50, 90),
    "RecordingsGrow": (
        [series("instrument_recording_memory_bytes", "1000000x30 4000000000x30 1000000x60")], 50, 90,
    ),
}  # fmt: skip
"""The series of each alert, a minute apart, and the minutes at which it fires and has cleared."""


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.slow
def test_each_alert_fires_and_clears(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    rules = ROOT / "examples/prometheus/alerts.yaml"
    subprocess.run([PROMTOOL, "check", "rules", str(rules)], check=True, capture_output=True)
    assert CASES.keys() == made().ALERTS.keys()
    for name, (its_series, fires, clear) in CASES.items():
        at = {
            "rule_files": [str(rules)],
            "evaluation_interval": "1m",
            "tests": [
                {
                    "interval": "1m",
                    "input_series": its_series,
                    "promql_expr_test": [
                        {
                            "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)',
                            "eval_time": f"{minute}m",
                            "exp_samples": [{"labels": "{}", "value": value}],
                        }
                        for minute, value in ((fires, 1), (clear, 0))
                    ],
                }
            ],
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(at))
        done = subprocess.run(
            [PROMTOOL, "test", "rules", str(tmp_path / f"{name}.yaml")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (name, done.stdout, done.stderr)
