"""Writes the dashboards of this folder and the alerts of `../prometheus`, from the list of panels and alerts below.

    python examples/grafana/make.py

Import a dashboard into Grafana, and choose its Prometheus. A panel asks for what a scrape of an agent has; the gauges
of GPUs need the profile's `device: {nvml: 1s}`.
"""

import json
from pathlib import Path

HTTP, QUEUE = "http_server_request_duration_seconds", "instrument_request_queue_duration_seconds"
CALLS, BLOCKED = "instrument_call_duration_seconds", 'instrument_span_name="loop blocked"'
TOKENS = "gen_ai_server_time_per_output_token_seconds"
FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds"

Panel = tuple[str, str, tuple[tuple[str, str], ...]]
"""A title, Grafana's name of a unit, and expressions with their legends."""


def per_second(series: str, *by: str, where: str = "") -> str:
    """Return the expression of a counter's rate, added up by labels."""
    labels = f'{{job=~"$job"{where and ", " + where}}}'
    return f"sum by ({', '.join(by)}) (rate({series}{labels}[$__rate_interval]))"


def percentiles(name: str, *by: str) -> tuple[tuple[str, str], ...]:
    """Return the expressions of a histogram's percentiles by labels."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    return tuple(
        (
            f"histogram_quantile({share}, {per_second(name + '_bucket', 'le', *by)})",
            f"{legend} p{share * 100:.0f}".strip(),
        )
        for share in (0.5, 0.9, 0.99)
    )


def mean(name: str, *by: str) -> str:
    """Return the expression of a histogram's mean by labels."""
    return f"{per_second(name + '_sum', *by)} / {per_second(name + '_count', *by)}"


def gauge(name: str, *by: str) -> str:
    """Return the expression of a gauge, added up by labels."""
    return f'sum by ({", ".join(by)}) ({name}{{job=~"$job"}})'


def of_gpus(title: str, unit: str, *names: str) -> Panel:
    """Return the panel of gauges of each GPU."""
    return title, unit, tuple((gauge(name, "instance", "hw_name"), f"{{{{hw_name}}}} {name}") for name in names)


def of_processes(title: str, unit: str, name: str) -> Panel:
    """Return the panel of a gauge of each process."""
    return title, unit, ((gauge(name, "instance", "process_pid"), "{{instance}} {{process_pid}}"),)


FAILED = per_second(f"{HTTP}_count", where='error_type!=""')

DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "serving": (
        "Serving",
        (
            (
                "Requests per second",
                "reqps",
                (
                    (
                        per_second(f"{HTTP}_count", "http_route", "http_response_status_code"),
                        "{{http_route}} {{http_response_status_code}}",
                    ),
                ),
            ),
            ("Duration of requests", "s", percentiles(HTTP, "http_route")),
            (
                "Share of requests that failed",
                "percentunit",
                (
                    (
                        f"({FAILED} or vector(0)) / {per_second(HTTP + '_count')}",
                        "failed",
                    ),
                ),
            ),
            ("Requests in flight", "short", ((gauge("http_server_active_requests", "instance"), "{{instance}}"),)),
            ("Time to the first token", "s", percentiles(FIRST_TOKEN, "http_route")),
            ("Time per further token", "s", percentiles(TOKENS, "http_route")),
        ),
    ),
    "engine": (
        "Engine",
        (
            ("Time of requests in the queue", "s", percentiles(QUEUE)),
            (
                "Requests per batch",
                "short",
                ((mean("instrument_batch_size", "instrument_span_name"), "{{instrument_span_name}}"),),
            ),
            (
                "Batches per second",
                "ops",
                ((per_second("instrument_batch_size_count", "instrument_span_name"), "{{instrument_span_name}}"),),
            ),
            ("Size of the batches of a request", "short", ((mean("instrument_request_batch_size"), "mean"),)),
            (
                "Event loops blocked",
                "percentunit",
                ((per_second(f"{CALLS}_sum", "instance", where=BLOCKED), "{{instance}}"),),
            ),
            of_processes("Waiting for a processor", "percentunit", "instrument_process_cpu_wait_ratio"),
        ),
    ),
    "device": (
        "Device",
        (
            of_gpus("Utilisation", "percentunit", "hw_gpu_utilization_ratio", "instrument_gpu_sm_active_ratio"),
            of_gpus(
                "Tensor cores and memory bus at work",
                "percentunit",
                "instrument_gpu_tensor_active_ratio",
                "instrument_gpu_dram_active_ratio",
            ),
            of_gpus("Memory", "bytes", "hw_gpu_memory_usage_bytes", "hw_gpu_memory_limit_bytes"),
            of_gpus("Power", "watt", "hw_power_watts"),
            of_gpus("Temperature", "celsius", "hw_temperature_celsius"),
            of_gpus("Clock", "hertz", "instrument_gpu_sm_clock_hertz"),
            of_gpus("PCIe", "Bps", "instrument_gpu_pcie_io_bytes_per_second"),
        ),
    ),
    "cost": (
        "Cost of the instrumentation",
        (
            (
                "Processor time",
                "percentunit",
                ((per_second("instrument_cost_seconds_total", "instrument_part"), "{{instrument_part}}"),),
            ),
            (
                "Losses per second",
                "cps",
                (
                    (
                        f"{per_second('instrument_losses_total', 'instrument_reason')} or vector(0)",
                        "{{instrument_reason}}",
                    ),
                ),
            ),
            (
                "Memory of recordings",
                "bytes",
                ((gauge("instrument_recording_memory_bytes", "instance"), "{{instance}}"),),
            ),
            ("Processes", "short", ((gauge("instrument_processes", "instance"), "{{instance}}"),)),
            of_processes("Memory of processes", "bytes", "process_memory_usage_bytes"),
            of_processes("Processors in use", "percentunit", "process_cpu_utilization_ratio"),
        ),
    ),
}


def share(numerator: str, denominator: str, by: str, over: str) -> str:
    """Return the expression of a share of rates by a label, over a time."""
    return f"sum by ({by}) (rate({numerator}[{over}])) / sum by ({by}) (rate({denominator}[{over}]))"


def p99(over: str) -> str:
    """Return the expression of the 99th percentile of requests by route, over a time."""
    return f"histogram_quantile(0.99, sum by (le, job, http_route) (rate({HTTP}_bucket[{over}])))"


def queue(over: str) -> str:
    """Return the expression of the mean time in the queue by job, over a time."""
    return share(f"{QUEUE}_sum", f"{QUEUE}_count", "job", over)


ALERTS: dict[str, tuple[str, str, str]] = {
    "QueueGrows": (
        f"{queue('10m')} > 0.1\nand {queue('10m')} > 2 * {queue('6h')}",
        "5m",
        "Requests of {{ $labels.job }} wait {{ $value | humanizeDuration }} in the queue, twice their usual time.",
    ),
    "SlowerThanItsWeek": (
        f"{p99('10m')} > 1.5 * {p99('1w')}",
        "10m",
        "p99 of {{ $labels.http_route }} is {{ $value | humanizeDuration }}, 1.5 times that of its week.",
    ),
    "LoopBlocked": (
        f"sum by (job, instance) (rate({CALLS}_sum{{{BLOCKED}}}[10m])) > 0.05",
        "5m",
        "The event loops of {{ $labels.instance }} are blocked for {{ $value | humanizePercentage }} of the time.",
    ),
    "DeviceStarved": (
        "avg by (job, instance) (hw_gpu_utilization_ratio) < 0.2\n"
        "and sum by (job, instance) (http_server_active_requests) > 0",
        "10m",
        "GPUs of {{ $labels.instance }} are busy for {{ $value | humanizePercentage }} although requests are open.",
    ),
    "RequestsFail": (
        share(f'{HTTP}_count{{error_type!=""}}', f"{HTTP}_count", "job", "10m") + " > 0.05",
        "5m",
        "{{ $value | humanizePercentage }} of the requests of {{ $labels.job }} fail.",
    ),
    "SpansLost": (
        "sum by (job, instrument_reason) (increase(instrument_losses_total[10m])) > 0",
        "5m",
        "{{ $labels.job }} loses what it records: {{ $labels.instrument_reason }}.",
    ),
    "AgentGone": (
        "up == 0 and on (job, instance) last_over_time(instrument_processes[1h])",
        "2m",
        "No agent answers scrapes of {{ $labels.instance }}.",
    ),
    "RecordingsGrow": (
        "sum by (job, instance) (instrument_recording_memory_bytes) > 2 * 1024 ^ 3",
        "10m",
        "The recordings of {{ $labels.instance }} take {{ $value | humanize1024 }}B. `limits.ring` is per process.",
    ),
}
"""The alerts: an expression, the time for which it must hold, and a sentence."""


def dashboard(name: str) -> str:
    """Return the JSON of a dashboard."""
    title, panels = DASHBOARDS[name]
    source = {"type": "prometheus", "uid": "${datasource}"}
    document = {
        "uid": f"instrument-{name}",
        "title": f"instrument: {title}",
        "tags": ["instrument"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "job",
                    "type": "query",
                    "datasource": source,
                    "query": "label_values(instrument_processes, job)",
                    "includeAll": True,
                    "multi": True,
                    "refresh": 2,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": [
            {
                "id": at + 1,
                "type": "timeseries",
                "title": title,
                "datasource": source,
                "gridPos": {"x": at % 2 * 12, "y": at // 2 * 8, "w": 12, "h": 8},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "targets": [
                    {"refId": chr(ord("A") + number), "datasource": source, "expr": expr, "legendFormat": legend}
                    for number, (expr, legend) in enumerate(targets)
                ],
            }
            for at, (title, unit, targets) in enumerate(panels)
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def alerts() -> str:
    """Return the YAML of the alerts."""
    lines = ["# Written by examples/grafana/make.py.", "groups:", "  - name: instrument", "    rules:"]
    for name, (expression, lasting, sentence) in ALERTS.items():
        lines += [
            f"      - alert: {name}",
            "        expr: |",
            *(f"          {line}" for line in expression.split("\n")),
        ]
        lines += [f"        for: {lasting}", "        annotations:", f"          summary: {json.dumps(sentence)}"]
    return "\n".join(lines) + "\n"


def files() -> dict[Path, str]:
    """Return the text of each file."""
    folder = Path(__file__).parent
    texts = {folder / f"{name}.json": dashboard(name) for name in DASHBOARDS}
    return {**texts, folder.parent / "prometheus" / "alerts.yaml": alerts()}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
