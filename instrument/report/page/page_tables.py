"""The tables of a page: which numbers of each view stand in which column, each as a number and as its text.

A column's field says what its numbers are: `_ns` are times, `_bytes` sizes, `ratio` shares of what the view says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from instrument.profile.model import VIEWS
from instrument.recording.spans import GAUGES, HOST
from instrument.report.device_summary import shown_unit
from instrument.report.device_view import DeviceView
from instrument.report.endpoint_times import PhaseTime
from instrument.report.overview_view import ALL_DEVICES, DeviceWork
from instrument.report.requests_view import RequestTimes
from instrument.report.self_times_view import path_text
from instrument.report.table import MISSING, WHOLE_DIGITS, compact, safe, shorten, tenths
from instrument.report.view import UNITS, View
from instrument.trace.ledger import UNKNOWN

TEXT, TIME, SIZE, RATIO, NUMBER = "text", "time", "size", "ratio", "number"
UNIT_OF = {SIZE: "MiB"}

RATIOS = ("ratio", "fill", "uneven", "running", "burden")

MOST_TABLE_ROWS = 200
"""Of one table."""

MOST_COLUMNS = 160
"""Of a text in a table."""

MOST_TABLES = 9
"""Of one view, such as those of functions in `ops`: the others are counted."""

FUNCTIONS = "names=Function|time_ns=Self|ratio=Of all|running=Sum|per_call_ns=Per call|calls=Calls|where=On"
CALLS = (
    "name=Name|calls=Calls|cpu.total_ns=Host|cpu.ave_ns=Mean|cpu.max_ns=Max|cpu.min_ns=Min|cpu_ratio=Of host|"
    "gpu.total_ns=Device|gpu.ave_ns=Mean|gpu.max_ns=Max|gpu_ratio=Of device"
)


@dataclass(frozen=True, slots=True)
class Spec:
    """A table of a view: a row for each that `rows` finds, columns as `field=Label`, and a sentence below.

    `title` may be a function of what the table is of, where `each` finds several that have a table.
    """

    title: str | Callable[[Any], str]
    rows: Callable[[Any], Iterable[Any]] | str
    columns: str
    note: str = ""
    each: str = ""


def _parts(view: RequestTimes) -> Iterator[tuple[str, int, PhaseTime]]:
    """The endpoints' parts, and what is unknown of each, with the endpoint's name."""
    for one in view.endpoints:
        unknown = PhaseTime(
            UNKNOWN, one.requests, one.unknown_ns, one.unknown_mean_ns, one.unknown_p50_ns, one.unknown_p99_ns,
            one.unknown_ratio,
        )  # fmt: skip
        for part in (*one.phases, unknown):
            yield _name(one), one.requests, part


def _device(number: int) -> str:
    return "host" if number == HOST else f"GPU {number}"


def _gauges(view: DeviceView) -> Iterator[dict[str, Any]]:
    """What the gauges read, in the units of the text."""
    for row in view.gauges.rows if view.gauges is not None else ():
        unit, scale = shown_unit(GAUGES[row.gauge]) if row.gauge in GAUGES else ("", 1)
        read = {"mean": row.mean, "least": row.least, "most": row.most, "total": row.total}
        shown = {name: None if value is None else value / scale for name, value in read.items()}
        yield {"of": row.label, "gauge": row.gauge, "samples": row.samples, "unit": unit, **shown}


def _losses(view: Any) -> list[dict[str, Any]]:
    return [{"name": reason, "count": count} for reason, count in view.losses.items() if count]


TABLES: Mapping[str, tuple[Spec, ...]] = {
    "requests": (
        Spec(
            "Endpoints", "endpoints",
            "name=Endpoint|requests=Count|errors=Errors|mean_ns=Mean|p50_ns=p50|p90_ns=p90|p99_ns=p99|max_ns=Max|"
            "wall_ns=Sum|ratio=Of all", "Of all: of the sum of the walls of all requests.",
        ),
        Spec(
            "Where the time went", _parts,
            "0=Endpoint|2.name=Part|2.requests=Requests|2.mean_ns=Mean|2.p50_ns=p50|2.p99_ns=p99|2.summed_ns=Sum|"
            "2.ratio=Of wall",
            "Each instant of a request belongs to the part that began last, so the parts add up to its wall. Mean, p50 "
            "and p99: over the requests that had the part.",
        ),
        Spec(
            "Streamed answers", lambda view: [one for one in view.endpoints if one.streams],
            "name=Endpoint|streams.count=Streams|streams.items=Items|streams.first_p50_ns=First p50|"
            "streams.first_p99_ns=First p99|streams.item_p50_ns=Item p50|streams.item_p99_ns=Item p99|"
            "streams.longest_gap_ns=Longest gap",
        ),
        Spec(
            "Loop blocked", lambda view: view.blocked.by if view.blocked else (),
            "name=By|stretches=Count|summed_ns=Sum|longest_ns=Longest",
        ),
        Spec(
            lambda one: f"Within requests: GPU {one.device}", "endpoints",
            "name=Endpoint|requests=Requests|wall_mean_ns=Wall|own_mean_ns=Own|own_ratio=Own|others_mean_ns=Others|"
            "others_ratio=Others|starved_mean_ns=Idle|starved_ratio=Idle", "Means, and shares of the wall.", "devices",
        ),
    ),
    "batches": (
        Spec(
            "Sizes", "rows",
            "name=Batch|batches=Count|items=Items|mean_size=Mean|p50_size=p50|max_size=Max|fill=Fill|weight=Weight|"
            "uneven=Uneven|unbound=Unbound",
            "Fill: the mean size over the largest one. Uneven: of the heaviest item's weight times the size, what no "
            "item had: padding where the engine pads to the heaviest item, no waste where it does not. "
            "Unbound: items with keys that no request is known by.",
        ),
        Spec("Times", "rows", "name=Batch|summed_ns=Sum|p50_ns=p50|p99_ns=p99|per_item_ns=An item"),
    ),
    "events": (
        Spec(
            lambda one: one.name or "All threads", "rows",
            "name=Event|calls=Calls|errors=Errors|total_ns=Total|ave_ns=Ave|min_ns=Min|max_ns=Max|p50_ns=p50|"
            "p99_ns=p99|self_ns=Self|host_ns=Host|device_ns=Device|ratio=Ratio",
            "Of all calls, also of those whose spans are gone. Ratio: of the sum of the topmost rows.", "blocks",
        ),
        Spec("Copies", "copies", "label=Copies|calls=Calls|total_ns=Total|ratio=Ratio"),
    ),
    "phases": (
        Spec(
            "Phases", "rows",
            "name=Phase|calls=Calls|host.total_ns=Host|host.mean_ns=Mean|host.max_ns=Max|host.min_ns=Min|"
            "host.ratio=Ratio|device.total_ns=Device|device.ratio=Ratio", "Ratio: of the first row.",
        ),
    ),
    "overview": (
        Spec(
            "By kind", "kinds", "kind=Kind|calls=Calls|time_ns=Time|ratio=Of window|in_steps_ns=In steps|"
            "step_ratio=Of steps", "Unions of time: what ran side by side counts once.",
        ),
        Spec(
            "Devices", "devices", "device=Device|work=Work|stretches=Stretches|time_ns=Time|ratio=Of window|"
            "step_ratio=Of steps",
        ),
    ),
    **{
        view: (
            Spec(lambda one: one.name or "All functions", "rows", FUNCTIONS.replace("Function", label),
                 "Self times: rows add up to 100 %.", "functions"),
        )
        for view, label in (("classes", "Class"), ("ops", "Function"), ("instances", "Place"))
    },
    "operators": (
        Spec(lambda one: one.name or "All threads", "rows", CALLS, "", "blocks"),
        Spec(
            "Floating-point operations", lambda view: view.operations.rows if view.operations else (),
            "name=Operator|calls=Calls|flops=FLOPs|per_call=Per call|time_ns=Time|on=On|rate_gflop_s=GFLOP/s|"
            "ratio=Of all",
        ),
    ),
    "user": (Spec(lambda one: one.name or "All threads", "rows", CALLS, "", "blocks"),),
    "kernels": (
        Spec("Devices", "devices", "device=Device|calls=Calls|total_ns=Sum|busy_ns=Busy|busy_ratio=Of window"),
        Spec(
            "Kernels by name", "kernels",
            "name=Kernel|calls=Calls|total_ns=Total|mean_ns=Avg|max_ns=Max|min_ns=Min|busy_ns=Busy|ratio=Of sum",
            "Busy: the union of the calls, where Total counts each of what ran side by side.",
        ),
        Spec(
            "Kernels by place", "places",
            "name=Asked for in|kind=Kind|kernels=Kernels|total_ns=Total|busy_ns=Busy|ratio=Of sum|"
            "heaviest=Heaviest kernel",
        ),
    ),
    "device": (
        Spec(
            "Devices", "devices",
            "device=Device|busy_ns=Busy|busy_ratio=Of window|compute_ns=Compute|copy_ns=Copies|starved_ns=Starved|"
            "starved_ratio=Starved|unasked_ns=Unasked|overlap_ns=Two streams|most_streams=Streams",
            "Starved: idle while a request was in flight. Unasked: idle while none was.",
        ),
        Spec(
            lambda one: f"Streams of GPU {one.device}", "streams",
            "stream=Stream|intervals=Stretches|busy_ns=Busy|window_ratio=Of window|summed_ns=Sum", "", "devices",
        ),
        Spec(
            lambda one: f"By name on GPU {one.device}", "names",
            "name=Name|kind=Kind|calls=Calls|summed_ns=Sum|mean_ns=Mean|p50_ns=p50|p99_ns=p99|busy_ns=Busy|"
            "busy_ratio=Of busy", "A stretch is the time of a stream between two events, not a kernel.", "devices",
        ),
        Spec("Without device time", "unanswered", "name=Name|kind=Kind|spans=Spans|reason=Why"),
        Spec(
            "Gauges", _gauges,
            "of=Of|gauge=Gauge|samples=Samples|mean=Mean|least=Least|most=Most|total=Grew by|unit=Unit",
        ),
    ),
    "copies": (
        Spec(
            "Directions", "directions", "direction=Direction|calls=Calls|moved_bytes=Moved|device_ns=Device|"
            "host_ns=Host|rate_gb_s=GB/s|base=Over|timed=Timed",
        ),
        Spec(
            "Calls", "calls", "call=Call|direction=Way|calls=Calls|moved_bytes=Moved|device_ns=Device|host_ns=Host|"
            "rate_gb_s=GB/s|base=Over|pinned=Pinned|sync=Sync|staged=Staged",
        ),
    ),
    "memory": (
        Spec(
            "Peaks", "peaks", "device=Of|what=Memory|peak_bytes=Peak|since_ns=At|place=Reached in|thread=Thread|"
            "begin_bytes=Begin|end_bytes=End",
        ),
        Spec(
            "Memory by place", "places", "name=Place|kind=Kind|device=Of|allocations=Allocs|frees=Frees|"
            "allocated_bytes=Allocated|freed_bytes=Freed|increase_bytes=Increase|held_bytes=Held",
        ),
        Spec(
            "Read by gauges", "gauged", "gauge=Gauge|device=Of|samples=Samples|first_bytes=First|last_bytes=Last|"
            "growth_bytes=Growth|most_bytes=Most|peak_bytes=Ever",
        ),
    ),
    "distribution": (
        Spec(
            "Communication beside computation", "places",
            "name=Where|communication_ns=Communication|communication_ratio=Of time|computation_ns=Computation|"
            "computation_ratio=Of time|overlap_ns=Overlap|exposed_ns=Exposed|exposed_ratio=Of time",
        ),
        Spec(
            "Operations", "operations", "name=Operation|calls=Calls|moved_bytes=Moved|host_ns=Host|waited_ns=Waited|"
            "device_ns=Device",
        ),
    ),
    "startup": (
        Spec("The way to the first request", "way", "name=Part|total_ns=Time|ratio=Of the way"),
        Spec("Later, outside of requests", "late", "name=Part|total_ns=Time"),
        Spec(
            "Imports", lambda view: view.imports or (),
            "package=Package|entries=Imports|total_ns=With others|self_ns=Own|ratio=Of all|late_ns=Late",
        ),
        Spec(
            "Loading and compiling", "preparations",
            "name=Name|phase=Phase|calls=Calls|total_ns=Total|self_ns=Self|max_ns=Max|in_requests_ns=In requests",
        ),
        Spec(
            "First calls", "warm_ups",
            "name=Name|kind=Kind|calls=Calls|first_ns=First|median_ns=Median|extra_ns=Extra|times=Times",
        ),
    ),
    "benchmark": (
        Spec(
            "Steps", "loops", "name=Loop|steps=Steps|skipped=Skipped|batch.mean=Mean|batch.p50=p50|batch.p99=p99|"
            "batch.least=Min|batch.most=Max|reader_ratio=Reader|rate.mean=A second|rate_of=Of",
        ),
    ),
    "cost": (
        Spec("Parts", "parts", "name=Part|time_ns=Time|ratio=Of window"),
        Spec(
            "By probe", "sites", "name=Name|kind=Kind|calls=Calls|each_ns=Each|cost_ns=Cost|ratio=Of cost|"
            "burden=Of its calls",
        ),
        Spec("Not kept", _losses, "name=Why|count=Count"),
    ),
}  # fmt: skip
"""The tables of each view, in the order of the page. `brief` has none: its numbers stand at the top."""

TIMES = frozenset({f"batch.{name}" for name in ("mean", "p50", "p99", "least", "most")})
"""Fields of times in ns whose name does not say it."""


def views_of(views: Mapping[str, View], unit: str) -> list[dict[str, Any]]:
    """Each view with its tables; one that has nothing to show says why instead."""
    return [_shown(name, view, unit) for name, view in views.items()]


def _shown(name: str, view: View, unit: str) -> dict[str, Any]:
    tables, more = [], 0
    for spec in TABLES[name]:
        of = getattr(view, spec.each) if spec.each else (view,)
        more += max(len(of) - MOST_TABLES, 0)
        for one in of[:MOST_TABLES]:
            made = _table(spec, one, unit)
            if made["rows"]:
                tables.append(made)
    shown: dict[str, Any] = {"name": name, "about": VIEWS[name][0].upper() + VIEWS[name][1:], "tables": tables}
    if more:
        shown["more"] = f"{more} more tables: `instrument report FILE --view {name}` has them."
    if not tables:
        shown["why"] = why_empty(view)
    return shown


def why_empty(view: View) -> str:
    """What the view as text says below its title."""
    lines = [line.strip() for line in view.lines()]
    said = [
        line for line in lines if line and not line.startswith(("-----", "Time unit:", "Spans: all", "Requests: 0"))
    ]
    return " ".join(said) or "It has nothing to say of this trace."


def _table(spec: Spec, of: Any, unit: str) -> dict[str, Any]:
    found = getattr(of, spec.rows) if isinstance(spec.rows, str) else spec.rows(of)
    columns = [column.partition("=")[::2] for column in spec.columns.split("|")]
    rows = list(found)
    kinds = [_kind(field, rows) for field, _ in columns]
    # A column in which no row says anything is left out, but for the first.
    told = [place for place, (field, _) in enumerate(columns) if not place or _is_told(rows, field)]
    return {
        "title": safe(spec.title if isinstance(spec.title, str) else spec.title(of)),
        "note": spec.note,
        "columns": [_heading(columns[place][1], kinds[place], unit) for place in told],
        "rows": [[_cell(_value(row, columns[place][0]), kinds[place], unit) for place in told] for row in rows],
        "depths": [row.depth for row in rows] if rows and hasattr(rows[0], "depth") else [],
    }


def _is_told(rows: list[Any], field: str) -> bool:
    """Whether a row has a value; of device time in a view that has none without a device, one that is not 0."""
    nothing = (None, 0) if field == "device_ns" else (None,)
    return any(_value(row, field) not in nothing for row in rows)


def _heading(label: str, kind: str, unit: str) -> dict[str, Any]:
    return {"label": label, "unit": unit if kind == TIME else UNIT_OF.get(kind, ""), "kind": kind}


def _value(row: Any, field: str) -> Any:
    """What a row says under a field, None where there is no such part of it."""
    for part in field.split("."):
        if row is None:
            return None
        if part.isdecimal():
            row = row[int(part)]
        elif isinstance(row, Mapping):
            row = row[part]
        elif part == "device" and isinstance(row.device, int):
            is_all = isinstance(row, DeviceWork) and row.device == ALL_DEVICES
            row = "all GPUs" if is_all else _device(row.device)
        elif part in ("name", "names", "call", "package", "direction"):
            row = _name(row) if getattr(row, "remaining", 0) or part in ("name", "names") else getattr(row, part)
        else:
            row = attrgetter(part)(row)
    return row


def _name(one: Any) -> str:
    if getattr(one, "remaining", 0):
        return f"(remaining {one.remaining})"
    return path_text(one.names) if hasattr(one, "names") and isinstance(one.names, tuple) else one.name or "(no name)"


def _kind(field: str, rows: list[Any]) -> str:
    last = field.rpartition(".")[2]
    if last.endswith("_ns") or field in TIMES:
        return TIME
    if last.endswith("_bytes"):
        return SIZE
    if last in RATIOS or last.endswith("_ratio"):
        return RATIO
    values = (_value(row, field) for row in rows)
    told = next((value for value in values if value is not None), "")
    return NUMBER if isinstance(told, (int, float)) and not isinstance(told, bool) else TEXT


def _cell(value: Any, kind: str, unit: str) -> Any:
    """A text as it is; a number with the text of it, as text views have it."""
    if kind == TEXT:
        if value is None or isinstance(value, bool):
            return {True: "yes", False: "no", None: MISSING}[value]
        return shorten(safe(str(value)), MOST_COLUMNS) or MISSING
    if value is None or not math.isfinite(value):
        return [None, MISSING]
    return [value, number_text(value, kind, unit)]


def number_text(value: float, kind: str, unit: str) -> str:
    """A number as a cell shows it: four digits of times and sizes, counts in full."""
    if kind == TIME:
        return compact(round(value), WHOLE_DIGITS) if unit == "ns" else compact(value / UNITS[unit])
    if kind == RATIO:
        return tenths(value, 1)
    if kind == SIZE:
        return compact(value / 2**20)
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**WHOLE_DIGITS else compact(value)
