"""One HTML file with a whole report: the data as packed JSON, and the style, the scripts and d3 from the folder `page`.

Python computes every number, and the scripts show, sort and draw the numbers. The size of a page is bounded.

The file loads no other files, and its content security policy allows only its own scripts and style. Names and values
of the service are only in the JSON. The scripts insert them as text, never as markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from html import escape
from importlib import resources
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from instrument.errors import TraceError
from instrument.profile.model import VIEWS
from instrument.recording.metric_definitions import GAUGES
from instrument.recording.spans import HOST, NO_DEVICE_TIME
from instrument.report.brief_view import Brief, brief
from instrument.report.event_rows import EventRow
from instrument.report.events_view import events
from instrument.report.kept_spans import MOST_SPANS, KeptSpans, successive_differences
from instrument.report.requests_view import RequestTimes, format_utc_date, list_parts_with_unknown
from instrument.report.section import (
    DEVICE,
    SIZE,
    TEXT,
    TEXTS,
    TIME,
    VIEW_OF,
    Section,
    View,
    field_value,
    format_of_field,
    list_cost_and_losses,
    placeholder_name,
)
from instrument.report.table import (
    MISSING,
    WHOLE_DIGITS,
    compact_number,
    format_percent,
    format_rough_percent,
    format_time,
    printable,
    row_name,
    shorten,
)
from instrument.report.view import UNITS, Options, Recording
from instrument.runtime import file_writing
from instrument.trace.columns import Int64s
from instrument.trace.indices import NONE, number_combinations
from instrument.trace.layout import KernelColumns

MOST_ROWS = 4000
"""The maximum number of rows of the call tree. In each level a last row sums up the omitted ones."""

DETAIL = "OpDetail"
"""The tracer option with which the page's call tree is made."""

NEVER = -1
"""The number that represents a missing parent or row."""

GREATEST = (1 << 63) - 1


def _encode_calls(recording: Recording, options: Options) -> tuple[dict[str, Any], list[str]]:
    """Return the rows of the call tree, parents first, and a note on omitted rows."""
    asking = replace(options, tracer_option=DETAIL, threads="merged", state="All", rows=MOST_ROWS, corrected=False)
    blocks = events(recording, asking).blocks
    rows: tuple[EventRow, ...] = blocks[0].rows if blocks else ()
    parents, above, names = list[int](), list[int](), list[str]()
    numbers: dict[tuple[str, str], int] = {}
    for place, row in enumerate(rows):
        del above[row.depth :]
        parents.append(above[-1] if above else NEVER)
        above.append(place)
        # A phase has the name of its parent in its label, which here is above it.
        names.append(row.name.removeprefix(f"{names[parents[-1]]}/" if row.kind == "phase" and row.depth else ""))

    def widths(times_ns: Iterable[int], join: Callable[[int, int], int]) -> list[int]:
        """Return the width of each row. `join` combines the row's own time with the widths of its children."""
        widths, below = [max(time_ns, 0) for time_ns in times_ns], [0] * (len(rows) + 1)
        for place in reversed(range(len(widths))):
            widths[place] = join(widths[place], below[place])
            below[parents[place]] += widths[place]
        return widths

    fields = (
        "depth", "calls", "errors", "total_ns", "self_ns", "waiting_ns", "device_ns", "min_ns", "max_ns", "p50_ns",
        "p99_ns", "remaining",
    )  # fmt: skip
    columns: dict[str, Iterable[int | None]] = {
        "name": [numbers.setdefault((name, row.kind), len(numbers)) for name, row in zip(names, rows, strict=True)],
        "width": widths((row.self_ns for row in rows), add),
        "running": widths((row.self_ns - row.waiting_ns for row in rows), add),
        "on_device": widths((row.device_ns for row in rows), max),
        **{field: [getattr(row, field) for row in rows] for field in fields},
    }
    document = {
        "names": [[printable(name) or "(no name)", kind] for name, kind in numbers],
        **{
            name: [NEVER if number is None else min(number, GREATEST) for number in column]
            for name, column in columns.items()
        },
    }
    together = sum(row.remaining for row in rows)
    sentence = (
        f"The call tree has its {len(rows):,} heaviest rows; {together:,} more stand as what remains of their "
        "level, by their own self times, and what is below these is left out."
    )
    return document, [sentence] if together else []


MOST_STRETCHES = 100_000
"""The maximum number of device intervals and kernels in a page. They take about 0.7 MB."""

MOST_READINGS = 200
"""The maximum number of readings that the page draws for each gauge of a device."""

LANE_NAME = 160
"""The maximum width in columns of a name in the charts of devices."""


def _encode_devices(recording: Recording, number_of: Int64s, most_stretches: int) -> tuple[dict[str, Any], list[str]]:
    """Return the device work and the gauges of a recording, and notes on omitted data. `number_of` maps a row of the
    trace to the number of its span in the page."""
    trace, kernels = recording.columns, KernelColumns.from_objects(recording.trace.kernels)
    intervals = trace.device.select(trace.device.is_measured)
    device, stream, start_ns, end_ns = (
        np.concatenate([getattr(work, name) for work in (intervals, kernels)])
        for name in ("device", "stream", "start_ns", "end_ns")
    )
    length_ns, none = end_ns - start_ns, np.full(len(kernels), NONE)
    lane, firsts = number_combinations(device, stream, np.arange(len(device)) >= len(intervals))
    lanes = zip(device[firsts].tolist(), stream[firsts].tolist(), (firsts >= len(intervals)).tolist(), strict=True)
    numbers: dict[str, int] = {}
    shown = (
        shorten(printable(name), LANE_NAME) or "(no name)"
        for name in (*(site.name for site in trace.sites), *kernels.names)
    )
    number_of_name = np.array([numbers.setdefault(name, len(numbers)) for name in shown], dtype=np.int64)
    name = np.concatenate([trace.site[intervals.row], len(trace.sites) + kernels.name]).astype(np.int64)
    longest = np.sort(np.argsort(-length_ns, kind="stable")[:most_stretches])
    longest = longest[np.argsort(start_ns[longest], kind="stable")]
    used, name = np.unique(number_of_name[name[longest]], return_inverse=True)
    all_names, readings = list(numbers), _read_gauges(recording)
    document = {
        "lanes": [f"GPU {device}, stream {stream}{', kernels' * is_kernel}" for device, stream, is_kernel in lanes],
        "names": [all_names[number] for number in used.tolist()],
        "labels": list(map(printable, trace.device.labels)),
        "start": successive_differences(start_ns[longest] - recording.trace.start_ns),
        "length": length_ns[longest].tolist(),
        "lane": lane[longest].tolist(),
        "name": name.reshape(-1).tolist(),
        "span": successive_differences(np.concatenate([number_of[intervals.row], none])[longest]),
        "label": np.concatenate([intervals.label, none])[longest].tolist(),
        "gauges": [_encode_gauge(recording, *key, values) for key, values in readings],
    }
    sentences = []
    if omitted := len(length_ns) - len(longest):
        all_ns, drawn_ns = (float(lengths_ns.sum(dtype=np.float64)) for lengths_ns in (length_ns, length_ns[longest]))
        sentences.append(
            f"{omitted:,} of {len(length_ns):,} stretches on devices are not drawn: the shortest, "
            f"{100 * (1 - drawn_ns / max(all_ns, 1)):.2g}% of the sum of all. Tables count all."
        )
    if any(len(values) > MOST_READINGS for _, values in readings):
        sentences.append(f"Of gauges with more than {MOST_READINGS} readings every few are drawn. Tables have all.")
    return document, sentences


def _read_gauges(recording: Recording) -> list[tuple[tuple[int, str, int], list[tuple[int, float]]]]:
    """Return the readings of each gauge of each device and process, in the order of the page."""
    readings = defaultdict[tuple[int, str, int], list[tuple[int, float]]](list)
    for pid, sample in recording.trace.iterate_samples():
        if sample.value is not None and np.isfinite(sample.value):
            key = (sample.device, sample.name, pid if recording.trace.processes else 0)
            readings[key].append((sample.at_ns, float(sample.value)))
    places = {name: place for place, name in enumerate(GAUGES)}
    return sorted(readings.items(), key=lambda item: (item[0][0], places.get(item[0][1], len(places)), *item[0][1:]))


def _encode_gauge(
    recording: Recording, device: int, name: str, pid: int, readings: list[tuple[int, float]]
) -> dict[str, Any]:
    some, gauge = readings[:: -(-len(readings) // MOST_READINGS)], GAUGES.get(name)
    model = next((gpu.model for gpu in recording.trace.gpus if gpu.device == device), "")
    host = f"process {pid}" if pid else "process and host"
    of_gpu = f"GPU {device}, {shorten(printable(model), LANE_NAME // 2)}".removesuffix(", ")
    return {
        "of": host if device == HOST else of_gpu,
        "name": shorten(printable(name), LANE_NAME),
        "unit": "" if gauge is None else gauge.unit,
        "about": "" if gauge is None else gauge.about,
        "at": successive_differences(np.array([at_ns - recording.trace.start_ns for at_ns, _ in some], dtype=np.int64)),
        "values": [float(f"{value:.4g}") for _, value in some],
    }


NUMBER = "number"
UNIT_OF = {SIZE: "MiB"}

MOST_TABLE_ROWS = 200

MOST_COLUMNS = 160
"""The maximum width of a text in a table, in columns."""

MOST_TABLES = 20
"""The maximum number of tables of one view. The page counts the others."""

ON_PAGE = (
    "requests", "batches", "neighbours", "events", "phases", "overview", "classes", "ops", "instances", "operators",
    "user", "kernels", "device", "copies", "memory", "distribution", "startup", "benchmark", "cost",
)  # fmt: skip
"""The views in the order of the page."""


def _encode_view(name: str, view: View, unit: str) -> dict[str, Any]:
    sections = view.sections()
    full = [section for section in sections if section.rows]
    tables = [_encode_table(section, unit) for section in full[:MOST_TABLES]]
    shown: dict[str, Any] = {"name": name, "about": VIEWS[name][0].upper() + VIEWS[name][1:], "tables": tables}
    if len(full) > MOST_TABLES:
        more = len(full) - MOST_TABLES
        shown["more"] = f"{more} more tables: `instrument report FILE --view {name}` has them."
    if not tables:
        why = view.reasons_if_empty() or [*(line for section in sections for line in section.empty), *view.footnotes()]
        shown["why"] = " ".join(map(str.strip, why))
    return shown


def _encode_table(section: Section, unit: str) -> dict[str, Any]:
    columns: list[tuple[str, str, list[Any]]] = []
    for field, heading, _ in section.parse_columns():
        values = [field_value(row, field) for row in section.rows]
        # A column without any value is left out, as are device times without a device.
        if columns and all(value is None or (value == 0 and field == "device_ns") for value in values):
            continue
        if not columns:
            values = [placeholder_name(row, field) or value for row, value in zip(section.rows, values, strict=True)]
        label, text = heading.partition(",")[0] or (columns[-1][0] if columns else ""), section.texts.get(field)
        kind, value = format_of_field(field), next((value for value in values if value is not None), "")
        if kind == TEXT and isinstance(value, (int, float)) and not isinstance(value, bool):
            kind = NUMBER
        cells = [_make_cell_value(value, kind, unit) for value in values]
        if text is not None and kind != TEXT:
            cells = [[value, text(row, unit)] for row, (value, _) in zip(section.rows, cells, strict=True)]
        columns.append((label, kind, cells))
    rows = zip(*(cells for *_, cells in columns), strict=True)
    return {
        "title": printable(section.title),
        "note": " ".join([*section.lead, *section.notes]).strip(),
        "columns": [
            {"label": label, "unit": unit if kind == TIME else UNIT_OF.get(kind, ""), "kind": kind}
            for label, kind, _ in columns
        ],
        "rows": [list(row) for row in rows],
        "depths": [row.depth for row in section.rows] if hasattr(section.rows[0], "depth") else [],
    }


def _make_cell_value(value: Any, kind: str, unit: str) -> Any:
    if kind in (TEXT, DEVICE):
        return shorten(TEXTS[kind](value, unit), MOST_COLUMNS)
    if value is None or not math.isfinite(value):
        return [None, MISSING]
    if kind != NUMBER:
        return [value, TEXTS[kind](value, unit)]
    return [value, f"{value:,}" if isinstance(value, int) and abs(value) < 10**WHOLE_DIGITS else compact_number(value)]


NAME = 300
"""The maximum width of a service's name, in columns."""


def page_document(
    recording: Recording, options: Options, request: str | None = None, header: str = "", part: int = 1
) -> dict[str, Any]:
    """Return the JSON document of a page. `request` is the key or span number of the request that the page shows first.
    `header` is a text about the files of the recording. `part` divides the maximum numbers of spans and device
    intervals, which makes the page smaller. Raises `TraceError` for an unknown request."""
    bounded = replace(options, rows=min(options.rows or MOST_TABLE_ROWS, MOST_TABLE_ROWS))
    kept_spans = KeptSpans(recording, options, request, MOST_SPANS // part)
    calls, omitted_calls = _encode_calls(recording, options)
    devices, omitted_work = _encode_devices(recording, kept_spans.number_of, MOST_STRETCHES // part)
    views = {name: VIEW_OF[name](recording, bounded) for name in ON_PAGE}
    shown_views = [_encode_view(name, view, options.unit) for name, view in views.items()]
    served = views["requests"]
    pictures = kept_spans.make_document(served.slowest if isinstance(served, RequestTimes) else ())
    shown = brief(recording, replace(options, rows=None))
    names = (str(row[0]) for view in shown_views for table in view["tables"] for row in table["rows"])
    omitted_rows = (
        f"Tables have at most {MOST_TABLE_ROWS} rows, or as many as were asked for; what remains is their last row."
    )
    facts, origin, why_no_device = recording.trace, recording.trace.origin, ""
    if not shown.device.devices:
        why = next((note for note in shown.notes if note.startswith(NO_DEVICE_TIME)), "")
        why_no_device = f"There is {printable(why)}." if why else shown.device.explain_no_device_time()
    return {
        "about": {
            "service": shorten(printable(shown.service), NAME),
            "header": printable(header),
            "pid": origin.pid,
            "host": printable(origin.host),
            "began": format_utc_date(origin, facts.start_ns, "milliseconds"),
            "window_ns": facts.end_ns - facts.start_ns,
            "window": f"{compact_number((facts.end_ns - facts.start_ns) / 1e9)} s",
            "recorder": printable(recording.recorder),
            "died": printable(recording.died),
            "unit": options.unit,
            "unit_ns": UNITS[options.unit],
            "spans": len(recording.columns),
            "cut": shown.requests.requests_cut,
        },
        "headlines": [headline.text for headline in shown.headlines],
        "figures": _make_headline_numbers(recording, shown, options.unit),
        "endpoints": _endpoint_documents(shown, options.unit),
        "text": "\n".join(shown.lines()).strip("\n"),
        "views": shown_views,
        **pictures,
        "calls": calls,
        "device": {**devices, "why": why_no_device},
        "left_out": [
            *kept_spans.describe_omitted(),
            *omitted_calls,
            *omitted_work,
            *[omitted_rows] * any(name.startswith("(remaining ") for name in names),
        ],
        "instrumentation": [line for line in list_cost_and_losses(recording) if line and not line.startswith("-----")],
    }


def _make_headline_numbers(recording: Recording, shown: Brief, unit: str) -> list[dict[str, str]]:
    served, lost = shown.requests, sum(shown.losses.values())
    if served.requests:
        errors, cancelled = (sum(getattr(row, name) for row in served.endpoints) for name in ("errors", "cancelled"))
        ended = f"{errors:,} with an error" if errors else "none with an error"
        ended += f", {cancelled:,} cancelled" if cancelled else ""
        first, slowest = served.endpoints[0], served.slowest[0]
        figures = [("Requests", f"{served.requests:,}", ended, "bad" if errors else "")]
        figures += [
            (label, f"{format_time(time_ns, unit)} {unit}", shorten(printable(name) or "(no name)", 60), "")
            for label, time_ns, name in (
                ("p50", first.p50_ns, first.name),
                ("p99", first.p99_ns, first.name),
                ("Slowest", slowest.wall_ns, slowest.name),
            )
        ]
    elif shown.steps is not None:
        loop = shown.steps.loops[0]
        figures = [("Steps", f"{loop.steps:,}", printable(loop.name), "")]
        times = () if loop.batch is None else (("p50", loop.batch.p50), ("p99", loop.batch.p99))
        figures += [
            (label, f"{format_time(ns, unit)} {unit}", "of a step", "") for label, ns in times if ns is not None
        ]
    else:
        figures = [("Spans", f"{len(recording.columns):,}", "no request or step was recorded", "")]
    for use in shown.device.devices[:2]:
        starved = f"starved {format_percent(use.starved_ratio, 1)} of the window"
        figures.append((f"GPU {use.device} busy", format_percent(use.busy_ratio, 1), starved, ""))
    if shown.cost is not None:
        figures.append(("Instrumentation", format_rough_percent(shown.cost_ratio), "of the window", ""))
    figures.append(("Not kept", f"{lost:,}", *(("see About", "bad") if lost else ("nothing was lost", ""))))
    return [dict(zip(("label", "value", "note", "mood"), figure, strict=True)) for figure in figures]


def _endpoint_documents(shown: Brief, unit: str) -> list[dict[str, Any]]:
    rows = []
    for endpoint in shown.requests.endpoints:
        parts = []
        for part in list_parts_with_unknown(endpoint):
            mean = "" if part.mean_ns is None else f"{format_time(part.mean_ns, unit)} {unit}"
            parts.append([row_name(part), part.ratio or 0, format_percent(part.ratio, 1), mean])
        times = [format_time(time_ns, unit) for time_ns in (endpoint.mean_ns, endpoint.p50_ns, endpoint.p99_ns)]
        rows.append({"name": row_name(endpoint), "requests": f"{endpoint.requests:,}", "times": times, "parts": parts})
    return rows


SCRIPTS = ("page_parts.js", "charts.js", "page_views.js")
"""The scripts of the page in the order in which they run, all after d3."""

MOST_BYTES = 5_000_000
"""The maximum number of bytes of a page. A larger page is made again with fewer spans."""

PARTS = (1, 2, 4, 16, 64)
"""The divisors of the maximum number of spans, tried in this order until the page fits `MOST_BYTES`."""

LEVEL = 6


def write_page(
    path: str | os.PathLike[str],
    recording: Recording,
    options: Options,
    *,
    request: str | None = None,
    header: str = "",
) -> Path:
    """Write the page of a recording to a file with mode 0600. If writing fails, an existing file remains unchanged.
    Raises `TraceError` if writing fails, or for an unknown `request`."""
    for part in PARTS:
        text = render_page(page_document(recording, options, request, header, part))
        if len(text) <= MOST_BYTES:
            break
    target = Path(path)
    try:
        with file_writing.open_replacement(target) as file:
            file.write(text.encode("utf-8"))
    except OSError as problem:
        raise TraceError(f"cannot write the page {target}: {problem.strerror or problem}") from problem
    return target


def render_page(document: Mapping[str, Any]) -> str:
    d3, style = _read_asset("d3.min.js"), _read_asset("page.css")
    script = "\n".join(map(_read_asset, SCRIPTS))
    service = str(document["about"]["service"])
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    parts = {
        "policy": f"default-src 'none'; script-src {_compute_csp_digest(d3)} "
        f"{_compute_csp_digest(script)}; style-src {_compute_csp_digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        "title": escape(f"{service} · instrument report" if service else "instrument report"),
        "style": style,
        "d3": d3,
        "licence": escape(_read_asset("d3.md").partition("## Licence")[2].strip()),
        # Deflated JSON in base64 is safe inside HTML.
        "data": base64.b64encode(zlib.compress(text.encode("ascii"), LEVEL)).decode("ascii"),
        "script": script,
    }
    page = _read_asset("page.html")
    pieces = page.split("{{")
    return pieces[0] + "".join(parts[name] + text for name, _, text in (piece.partition("}}") for piece in pieces[1:]))


def _read_asset(name: str) -> str:
    return (resources.files(__package__) / "page" / name).read_text("utf-8")


def _compute_csp_digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"
