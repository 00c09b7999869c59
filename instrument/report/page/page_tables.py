"""The tables of a page: the sections of each view, every cell as a number and as its text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from instrument.profile.model import VIEWS
from instrument.report.section import (
    DEVICE,
    SIZE,
    TEXT,
    TEXTS,
    TIME,
    Section,
    View,
    device_name,
    kind_of,
    name_of,
    value_of,
)
from instrument.report.table import MISSING, WHOLE_DIGITS, compact, safe, shorten

NUMBER = "number"
UNIT_OF = {SIZE: "MiB"}

MOST_TABLE_ROWS = 200
"""Of one table."""

MOST_COLUMNS = 160
"""Of a text in a table."""

MOST_TABLES = 20
"""Of one view, such as those of functions in `ops`: the others are counted."""

ON_PAGE = (
    "requests", "batches", "events", "phases", "overview", "classes", "ops", "instances", "operators", "user",
    "kernels", "device", "copies", "memory", "distribution", "startup", "benchmark", "cost",
)  # fmt: skip
"""The views, in the order of the page. `brief` is none of them: its numbers stand at the top."""


def views_of(views: Mapping[str, View], unit: str) -> list[dict[str, Any]]:
    """Each view with its tables; one that has nothing to show says why instead."""
    return [_shown(name, view, unit) for name, view in views.items()]


def _shown(name: str, view: View, unit: str) -> dict[str, Any]:
    sections = view.sections()
    full = [section for section in sections if section.rows]
    tables = [_table(section, unit) for section in full[:MOST_TABLES]]
    shown: dict[str, Any] = {"name": name, "about": VIEWS[name][0].upper() + VIEWS[name][1:], "tables": tables}
    if len(full) > MOST_TABLES:
        more = len(full) - MOST_TABLES
        shown["more"] = f"{more} more tables: `instrument report FILE --view {name}` has them."
    if not tables:
        why = view.nothing() or [*(line for section in sections for line in section.empty), *view.foot()]
        shown["why"] = " ".join(map(str.strip, why))
    return shown


def _table(section: Section, unit: str) -> dict[str, Any]:
    columns: list[tuple[str, str, list[Any]]] = []
    for field, heading, _ in section.described():
        values = [value_of(row, field) for row in section.rows]
        # A column in which no row says anything is left out, as device times are where there is no device.
        if columns and all(value is None or (value == 0 and field == "device_ns") for value in values):
            continue
        if not columns:
            values = [name_of(row, field) or value for row, value in zip(section.rows, values, strict=True)]
        label = heading.partition(",")[0] or columns[-1][0]
        columns.append((label, _kind(field, values), values))
    rows = zip(*([_cell(value, kind, unit) for value in values] for _, kind, values in columns), strict=True)
    return {
        "title": safe(section.title),
        "note": " ".join([*section.lead, *section.notes]).strip(),
        "columns": [_heading(label, kind, unit) for label, kind, _ in columns],
        "rows": [list(row) for row in rows],
        "depths": [row.depth for row in section.rows] if hasattr(section.rows[0], "depth") else [],
    }


def _heading(label: str, kind: str, unit: str) -> dict[str, Any]:
    return {"label": label, "unit": unit if kind == TIME else UNIT_OF.get(kind, ""), "kind": kind}


def _kind(field: str, values: Sequence[Any]) -> str:
    """What a column shows: a number where its name does not say what it holds and its first value is one."""
    kind = kind_of(field)
    told = next((value for value in values if value is not None), "")
    is_number = isinstance(told, (int, float)) and not isinstance(told, bool)
    return NUMBER if kind == TEXT and is_number else kind


def _cell(value: Any, kind: str, unit: str) -> Any:
    """A text as it is; a number with the text of it, as text views have it."""
    if kind == DEVICE:
        return device_name(value)
    if kind == TEXT:
        if value is None or isinstance(value, bool):
            return {True: "yes", False: "no", None: MISSING}[value]
        return shorten(safe(str(value)), MOST_COLUMNS) or MISSING
    if value is None or not math.isfinite(value):
        return [None, MISSING]
    if kind != NUMBER:
        return [value, TEXTS[kind](value, unit)]
    return [value, f"{value:,}" if isinstance(value, int) and abs(value) < 10**WHOLE_DIGITS else compact(value)]
