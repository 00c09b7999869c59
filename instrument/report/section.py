"""The base class of views, their tables, and the printed summary of several views.

A table is declared once, for text and for HTML. Its columns are `field=Heading`, separated by `|`. A column with `+` is
only on the HTML page. The end of the field's name selects the format: `_ns` is a time, `_bytes` a size, `ratio` a
percentage. A row with `remaining` above 0 is the sum of that many omitted rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from html import escape
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

from instrument.profile.document import find_most_similar
from instrument.profile.model import VIEWS
from instrument.recording.spans import HOST, Cost
from instrument.report.table import (
    DASHES,
    LINE,
    MISSING,
    compact_number,
    format_percent,
    format_short_percent,
    format_time,
    make_named_table_lines,
    make_section_title_lines,
    make_table_lines,
    make_title_lines,
    number_text,
    printable,
    shorten,
    wrap_text,
)
from instrument.report.view import Options, Recording, make_json_values

NO_EVENTS = "no events"
"""The default reason why a span has no device time."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """The number of kept spans. No span is missing from `since_ns` to `until_ns`, in ns after the start of the trace.
    `complete` is True if no span was overwritten."""

    spans: int
    complete: bool
    since_ns: int
    until_ns: int

    @classmethod
    def measure_coverage(cls, recording: Recording) -> Coverage:
        facts = recording.trace
        first, last = facts.coverage
        return cls(len(recording.columns), first == facts.start_ns, first - facts.start_ns, last - facts.start_ns)

    def lines(self) -> list[str]:
        since, until = number_text(self.since_ns / 1e9), number_text(self.until_ns / 1e9)
        if self.complete:
            return [f"Spans: all {self.spans} that were kept, from {since} s to {until} s"]
        return [
            f"Spans: the newest {self.spans} are kept, none is missing from {since} s to {until} s; of all that",
            "ended before there are totals",
        ]

    def explain_no_spans(self, noun: str, otherwise: str) -> list[str]:
        overwritten = (
            f"No {noun} is among the kept spans; older ones were overwritten. Raise `limits.ring` in the profile, or "
            "look at the `events` view, which counts all."
        )
        return wrap_text(otherwise if self.complete else overwritten)


TEXT, TIME, SIZE, RATIO, DEVICE = "text", "time", "size", "ratio", "device"

BLANK = object()
"""A value that is printed as an empty cell."""

RATIOS = ("ratio", "fill", "uneven", "running", "burden")
"""The fields that are printed as percentages although their names do not end in `_ratio`."""

MIB = 1 << 20

SIZE_ROOM = 8
"""The width of a printed size, in columns."""

Text = Callable[[Any, str], str]
"""A function that formats a value, or a whole row, as the text of a cell. The second argument is the unit of time."""


@dataclass(frozen=True, slots=True)
class Section:
    """A table of a view, with the lines `lead` above it and `notes` below it.

    `columns` is a text with a field and a heading for each column, separated by `|`. Only the HTML page shows a
    column that begins with `+`. `texts` has functions that print a field. `widths` are minimum widths; a single number
    applies to all columns except the first. `paragraph` returns the lines of a row that is too long for a table.
    """

    title: str
    rows: Sequence[Any]
    columns: str
    notes: Sequence[str] = ()
    texts: Mapping[str, Text] = field(default_factory=dict)
    widths: int | Sequence[int] = 0
    lead: Sequence[str] = ()
    empty: Sequence[str] = ()
    paragraph: Callable[[int, Any, str], list[str]] | None = None

    def lines(self, unit: str) -> list[str]:
        shown = [*self.lead, *self.table(unit), *self.notes] if self.rows else self.empty
        return [*make_section_title_lines(shorten(printable(self.title), LINE - 2 * DASHES)), *shown]

    def table(self, unit: str) -> list[str]:
        if self.paragraph is not None:
            return [line for place, row in enumerate(self.rows, 1) for line in self.paragraph(place, row, unit)]
        header, cells = self.cells(unit)
        if isinstance(self.widths, int):
            return make_named_table_lines(header, cells, self.widths)
        return make_table_lines(header, cells, self.widths)

    def cells(self, unit: str) -> tuple[list[str], list[list[str]]]:
        columns = [(name, heading) for name, heading, is_wide in self.parse_columns() if not is_wide]
        header, name = [heading for _, heading in columns], columns[0][0]
        name = "" if name in self.texts else name
        first, *other_texts = [self._choose_formatter(field) for field, _ in columns]
        indents = ["  " * getattr(row, "depth", 0) for row in self.rows]
        return header, [
            [indent + (placeholder_name(row, name) or first(row, unit)), *(text(row, unit) for text in other_texts)]
            for indent, row in zip(indents, self.rows, strict=True)
        ]

    def html(self, unit: str) -> str:
        if self.paragraph is not None:
            return f"<pre>{escape(chr(10).join(self.table(unit)))}</pre>"
        header, rows = self.cells(unit)

        def html_row(cells: Sequence[str], tag: str) -> str:
            name, *values = map(escape, cells)
            name_cell = f'<{tag} style="text-align:left;white-space:pre">{name}</{tag}>'
            return f"<tr>{name_cell}{''.join(f'<{tag}>{value}</{tag}>' for value in values)}</tr>"

        caption = escape(f"{self.title}. {' '.join(self.notes)}".strip(". "))
        return (
            f'<table><caption style="text-align:left">{caption}</caption><thead>{html_row(header, "th")}</thead>'
            f"<tbody>{''.join(html_row(cells, 'td') for cells in rows)}</tbody></table>"
        )

    def parse_columns(self) -> Iterator[tuple[str, str, bool]]:
        for column in self.columns.split("|"):
            name, _, heading = column.partition("=")
            yield name.removeprefix("+"), heading, name.startswith("+")

    def _choose_formatter(self, name: str) -> Text:
        if name in self.texts:
            return self.texts[name]
        text = TEXTS[format_of_field(name)]
        return lambda row, unit: "" if (value := field_value(row, name)) is BLANK else text(value, unit)


class View:
    """The base class of views. Fields have numbers, and methods return the tables and sentences that show the
    numbers."""

    __slots__ = ()

    TITLE: ClassVar[str] = "Summary"

    _options: Options

    def heading(self) -> str:
        return self.TITLE

    def header_lines(self) -> list[str]:
        """Return the lines below the title, such as the unit of times."""
        return []

    def reasons_if_empty(self) -> list[str]:
        """Return the reasons why the view is empty. Return no reasons if the view has data."""
        return []

    def sections(self) -> Sequence[Section]:
        return ()

    def table_lines(self) -> list[str]:
        shown = (section for section in self.sections() if section.rows or section.empty)
        return [line for section in shown for line in (*section.lines(self._options.unit), "")]

    def footnotes(self) -> list[str]:
        return []

    def _repr_html_(self) -> str:
        text = "<br>".join(escape(line) for line in self.reasons_if_empty() or self.header_lines() if line)
        shown = [section for section in self.sections() if section.rows and not self.reasons_if_empty()]
        tables = [section.html(self._options.unit) for section in shown]
        return f"<h4>{escape(self.heading())}</h4><p>{text}</p>{''.join(tables)}"

    def lines(self) -> list[str]:
        head = self.header_lines()
        lines = [*make_title_lines(f"{self.heading()} Report"), *head, *([""] if head else [])]
        return lines + (self.reasons_if_empty() or [*self.table_lines(), *self.footnotes()])


def placeholder_name(row: Any, name: str) -> str:
    """Return a printed name such as `(remaining 3)` for a row without a name. Return "" for other rows."""
    remaining = getattr(row, "remaining", 0)
    if remaining:
        return f"(remaining {remaining})"
    return "(no name)" if name and field_value(row, name) == "" else ""


def field_value(row: Any, name: str) -> Any:
    """Return the value of a row's field. `name` may be a path such as `time.mean_ns`. The value is None if a part of
    the path is None."""
    value = row
    for part in name.split("."):
        if value is None:
            return None
        value = value[int(part)] if part.isdecimal() else getattr(value, part)
        value = value() if callable(value) else value
    return value


def format_of_field(name: str) -> str:
    last = name.rpartition(".")[2]
    if last.endswith("_ns"):
        return TIME
    if last.endswith("_bytes"):
        return SIZE
    if last == DEVICE:
        return DEVICE
    return RATIO if last in RATIOS or last.endswith("_ratio") else TEXT


def device_name(device: int | None) -> str:
    return MISSING if device is None else "CPU" if device == HOST else f"GPU {device}"


def format_mebibytes(size_bytes: float | None) -> str:
    return compact_number(None if size_bytes is None else size_bytes / MIB, SIZE_ROOM)


def _plain_text(value: Any, unit: str) -> str:
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    return number_text(value) if isinstance(value, float) else printable(str(value))


TEXTS: Mapping[str, Text] = {
    TIME: format_time,
    SIZE: lambda size_bytes, unit: format_mebibytes(size_bytes),
    RATIO: lambda ratio, unit: format_percent(ratio, 1),
    DEVICE: lambda device, unit: device_name(device),
    TEXT: _plain_text,
}


COST = "Cost of "
"""The first words of each note on a cost."""


def list_cost_and_losses(recording: Recording) -> list[str]:
    cost, lines = recording.cost, list[str]()
    if cost is not None:
        base_ns = cost.window_ns or recording.window_ns or 0
        by = f", {printable(recording.recorder)} recorder" if recording.recorder else ""
        thread = f" and {number_text(cost.thread_ns / 1e9)} s on threads of its own" if cost.thread_ns else ""
        lines.append(
            f"Cost of the instrumentation: {number_text(cost.total_ns / 1e9)} s "
            f"({cost.calls} calls x {number_text(cost.per_call_ns)} ns{thread}), "
            f"{format_short_percent(cost.total_ns, base_ns)} of the window of {number_text(base_ns / 1e9)} s{by}"
            f"{describe_uncached_cost(cost, base_ns)}"
        )
    lines += [f"Not kept: {count} ({printable(reason)})" for reason, count in recording.losses.items() if count]
    lines += [
        printable(note) if note.startswith(COST) else f"Not observed: {printable(note)}" for note in recording.notes
    ]
    text = [part for line in lines for part in wrap_text(line)]
    return [*make_section_title_lines("Instrumentation"), *text, ""] if lines else []


def describe_uncached_cost(cost: Cost, base_ns: int) -> str:
    """Describe the cost of calls with cold processor caches."""
    if cost.most_ns <= cost.total_ns:
        return ""
    return (
        f"; up to {number_text(cost.most_ns / 1e9)} s ({number_text(cost.cold_call_ns)} ns a call), "
        f"{format_short_percent(cost.most_ns, base_ns)}, if other work uses the processor's caches between the calls"
    )


MODULES = {
    **dict.fromkeys(("classes", "ops", "instances"), "self_times"), "user": "operators", "distribution": "overview",
    "neighbours": "batches",
}  # fmt: skip
"""The name of a view's module, if it differs from the view's name."""


def _import_view(name: str) -> ModuleType:
    """Import the module of a view. Views are imported late, because they import numpy."""
    return import_module(f"instrument.report.{MODULES.get(name, name)}_view")


def _make_view(name: str, recording: Recording, options: Options) -> View:
    view: View = getattr(_import_view(name), name)(recording, options)
    return view


VIEW_OF: Mapping[str, Callable[[Recording, Options], View]] = {name: partial(_make_view, name) for name in VIEWS}
"""The function that computes each view."""


def import_views(views: Sequence[str]) -> None:
    """Import the modules of views while the process may still allocate memory freely."""
    for name in views:
        if name in VIEW_OF:
            with suppress(ImportError):  # the views report a missing numpy
                _import_view(name)


def default_views(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return `events` if any option is set that `brief` ignores, else `brief`."""
    is_set = any(options.get(name) is not None for name in ("tracer_option", "threads"))
    return ("events",) if is_set or options.get("state") in ("CPU", "GPU") else ("brief",)


def refuse_unknown_views(views: Sequence[str]) -> None:
    if isinstance(views, str):
        raise TypeError(f"views is {views!r}; allowed: a list of their names, such as [{views!r}]")
    for view in views:
        if view not in VIEW_OF:
            near = find_most_similar(view, VIEWS)
            hint = f"; nearest is {near}" if near else ""
            raise ValueError(f"view is {view!r}; allowed: {', '.join(VIEWS)}{hint}")


def make_views(views: Sequence[str], recording: Recording, options: Options) -> dict[str, View]:
    """Return the views by name, in the given order. Raises `ValueError` for an unknown view."""
    refuse_unknown_views(views)
    return {view: VIEW_OF[view](recording, options) for view in views}


def format_summary(views: Sequence[str], recording: Recording, options: Options) -> str:
    """Return the text of the views. The cost and losses of the instrumentation follow, unless a view contains them.
    Raises `ValueError` for an unknown view."""
    parts = [view.lines() for view in make_views(views, recording, options).values()]
    if not {"brief", "cost"}.intersection(views):
        parts.append(list_cost_and_losses(recording))
    if recording.died:
        parts.insert(0, ["", *wrap_text(printable(recording.died))])
    return "\n".join("\n".join(lines).rstrip("\n") + "\n" for lines in parts if lines)


def summary_document(views: Sequence[str], recording: Recording, options: Options) -> dict[str, Any]:
    return {
        "window_ns": recording.window_ns,
        "recorder": recording.recorder,
        **({"died": recording.died} if recording.died else {}),
        "options": make_json_values(options),
        "views": {name: make_json_values(view) for name, view in make_views(views, recording, options).items()},
        "cost": make_json_values(recording.cost),
        "losses": recording.losses,
        "notes": list(recording.notes),
    }
