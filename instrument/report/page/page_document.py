"""All that a page shows, as one JSON document: its figures, views and pictures, and what was left out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from instrument.recording.spans import NO_DEVICE_TIME
from instrument.report.brief_view import Brief, brief
from instrument.report.instrumentation import instrumentation
from instrument.report.page.calls_tree import CallsTree
from instrument.report.page.device_lanes import MOST_STRETCHES, DeviceLanes
from instrument.report.page.kept_spans import MOST_SPANS, KeptSpans
from instrument.report.page.page_tables import MOST_TABLE_ROWS, ON_PAGE, views_of
from instrument.report.requests_view import EPOCH, YEARS_NS, RequestTimes, parts_of
from instrument.report.summary import VIEW_OF
from instrument.report.table import compact, in_unit, rough_percent, row_name, safe, shorten, tenths
from instrument.report.view import UNITS, Options, Recording

NAME = 300
"""Columns of a name, at most."""


def page_document(
    recording: Recording, options: Options, wanted: str | None = None, header: str = "", part: int = 1
) -> dict[str, Any]:
    """What the page of a recording is made of; `wanted` is the request to begin with, `header` what the files are.

    Of the spans and stretches that a page has room for it has the `part`-th part, where all are too many.

    Raises `TraceError` where there is no such request.
    """
    bounded = replace(options, rows=min(options.rows or MOST_TABLE_ROWS, MOST_TABLE_ROWS))
    kept = KeptSpans(recording, options, wanted, MOST_SPANS // part)
    tree, lanes = CallsTree(recording, options), DeviceLanes(recording, kept.number_of, MOST_STRETCHES // part)
    of_devices = lanes.document()
    views = {name: VIEW_OF[name](recording, bounded) for name in ON_PAGE}
    shown_views = views_of(views, options.unit)
    served = views["requests"]
    pictures = kept.document(served.slowest if isinstance(served, RequestTimes) else ())
    shown = brief(recording, replace(options, rows=None))
    return {
        "about": _about(recording, shown, header, options.unit),
        "figures": _figures(recording, shown, options.unit),
        "endpoints": _endpoints(shown, options.unit),
        "text": "\n".join(shown.lines()).strip("\n"),
        "views": shown_views,
        **pictures,
        "calls": tree.document(),
        "device": {**of_devices, "why": _why_no_device(shown)},
        "left_out": [*kept.left_out(), *tree.left_out(), *lanes.left_out(), *_rows_left_out(shown_views)],
        "instrumentation": _instrumentation(recording),
    }


def _about(recording: Recording, shown: Brief, header: str, unit: str) -> dict[str, Any]:
    facts = recording.facts
    origin = facts.origin
    began_ns = origin.realtime_of(facts.start_ns)
    is_known = 0 < began_ns < YEARS_NS and origin.realtime_ns != 0
    began = (EPOCH + timedelta(microseconds=began_ns // 1000)).isoformat(timespec="milliseconds") if is_known else ""
    return {
        "service": shorten(safe(shown.service), NAME),
        "header": safe(header),
        "pid": origin.pid,
        "host": safe(origin.host),
        "began": began.replace("+00:00", "Z"),
        "window_ns": facts.end_ns - facts.start_ns,
        "window": f"{compact((facts.end_ns - facts.start_ns) / 1e9)} s",
        "recorder": safe(recording.recorder),
        "died": safe(recording.died),
        "unit": unit,
        "unit_ns": UNITS[unit],
        "spans": len(recording.columns),
        "cut": shown.requests.requests_cut,
    }


def _figures(recording: Recording, shown: Brief, unit: str) -> list[dict[str, str]]:
    """The few numbers at the top, each with what it is of."""
    figures: list[dict[str, str]] = []

    def add(label: str, value: str, note: str = "", mood: str = "") -> None:
        figures.append({"label": label, "value": value, "note": note, "mood": mood})

    served = shown.requests
    if served.requests:
        errors = sum(one.errors for one in served.endpoints)
        cancelled = sum(one.cancelled for one in served.endpoints)
        ended = f"{errors:,} with an error" if errors else "none with an error"
        ended += f", {cancelled:,} cancelled" if cancelled else ""
        add("Requests", f"{served.requests:,}", ended, "bad" if errors else "")
        heaviest = served.endpoints[0]
        name = shorten(safe(heaviest.name) or "(no name)", 60)
        for label, time_ns in (("p50", heaviest.p50_ns), ("p99", heaviest.p99_ns)):
            add(label, f"{in_unit(time_ns, unit)} {unit}", name)
        slowest = served.slowest[0]
        name = shorten(safe(slowest.name) or "(no name)", 60)
        add("Slowest", f"{in_unit(slowest.wall_ns, unit)} {unit}", name)
    elif shown.steps is not None:
        loop = shown.steps.loops[0]
        add("Steps", f"{loop.steps:,}", safe(loop.name))
        times = () if loop.batch is None else (("p50", loop.batch.p50), ("p99", loop.batch.p99))
        for label, value in times:
            if value is not None:
                add(label, f"{in_unit(value, unit)} {unit}", "of a step")
    else:
        add("Spans", f"{len(recording.columns):,}", "no request or step was recorded")
    for one in shown.device.devices[:2]:
        add(
            f"GPU {one.device} busy", tenths(one.busy_ratio, 1), f"starved {tenths(one.starved_ratio, 1)} of the window"
        )
    if shown.cost is not None:
        add("Instrumentation", rough_percent(shown.cost_ratio), "of the window")
    lost = sum(shown.losses.values())
    add("Not kept", f"{lost:,}" if lost else "0", "see About" if lost else "nothing was lost", "bad" if lost else "")
    return figures


def _endpoints(shown: Brief, unit: str) -> list[dict[str, Any]]:
    """Each endpoint with the parts that its wall went to."""
    found = []
    for one in shown.requests.endpoints:
        parts = []
        for part in parts_of(one):
            mean = "" if part.mean_ns is None else f"{in_unit(part.mean_ns, unit)} {unit}"
            parts.append([row_name(part), part.ratio or 0, tenths(part.ratio, 1), mean])
        times = [in_unit(time_ns, unit) for time_ns in (one.mean_ns, one.p50_ns, one.p99_ns)]
        found.append({"name": row_name(one), "requests": f"{one.requests:,}", "times": times, "parts": parts})
    return found


def _why_no_device(shown: Brief) -> str:
    why = next((note for note in shown.notes if note.startswith(NO_DEVICE_TIME)), "")
    if shown.device.devices:
        return ""
    return f"There is {safe(why)}." if why else shown.device.why_none()


def _instrumentation(recording: Recording) -> list[str]:
    """What the instrumentation cost, what was lost, and what was not observed, as every report ends."""
    return [line for line in instrumentation(recording) if line and not line.startswith("-----")]


def _rows_left_out(views: Sequence[dict[str, Any]]) -> list[str]:
    names = (str(row[0]) for view in views for table in view["tables"] for row in table["rows"])
    if not any(name.startswith("(remaining ") for name in names):
        return []
    return [
        f"Tables have at most {MOST_TABLE_ROWS} rows, or as many as were asked for; what remains is their last row."
    ]
