"""A section of a view: a table of rows by a description of its columns, which its text and the HTML page share.

Columns are `field=Heading`, with `|` between them; one with a `+` before it is on the page alone, which has the room. A
field may be that of a part of the row, `part.field`, its place in a row that is a tuple, or a method of the row. Its
last name says what it holds: `_ns` are times, `_bytes` sizes, `ratio` and some others shares. The first column of a row
with `remaining` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from instrument.recording.spans import HOST
from instrument.report.table import MISSING, compact, in_unit, named_table, number, safe, section_title, table, tenths

TEXT, TIME, SIZE, RATIO, DEVICE = "text", "time", "size", "ratio", "device"

RATIOS = ("ratio", "fill", "uneven", "running", "burden")
"""Fields that are shares, beside those that end with `_ratio`."""

TIMES = tuple(f"batch.{name}" for name in ("mean", "p50", "p99", "least", "most"))
"""Fields of times whose name does not say it."""

MIB = 1 << 20

SIZE_ROOM = 8
"""Columns of a size."""

Text = Callable[[Any, str], str]
"""Makes the text of a value, or of a row's cell, given the unit of times."""


@dataclass(frozen=True, slots=True)
class Section:
    """A table of a view. `notes` are lines below it.

    `texts` make the cells of a field of rows where they are not as elsewhere in text.
    `widths` are the least of the columns, or of all but the first, which then holds names.
    """

    title: str
    rows: Sequence[Any]
    columns: str
    notes: tuple[str, ...] = ()
    texts: Mapping[str, Text] = field(default_factory=dict)
    widths: int | Sequence[int] = 0

    def lines(self, unit: str) -> list[str]:
        """The text."""
        return [*section_title(self.title), *self.table(unit), *self.notes]

    def table(self, unit: str) -> list[str]:
        """The table alone."""
        columns = [(name, heading) for name, heading, is_wide in self.described() if not is_wide]
        header, name = [heading for _, heading in columns], columns[0][0]
        name = "" if name in self.texts else name
        first, *others = [self._text_of(field) for field, _ in columns]
        cells = [[name_of(row, name) or first(row, unit), *(text(row, unit) for text in others)] for row in self.rows]
        if isinstance(self.widths, int):
            return named_table(header, cells, self.widths)
        return table(header, cells, self.widths)

    def described(self) -> Iterator[tuple[str, str, bool]]:
        """The field and the heading of each column, and whether it is on the page alone."""
        for column in self.columns.split("|"):
            name, _, heading = column.partition("=")
            yield name.removeprefix("+"), heading, name.startswith("+")

    def _text_of(self, name: str) -> Text:
        """What makes the cell of a row in a column."""
        if name in self.texts:
            return self.texts[name]
        text = TEXTS[kind_of(name)]
        return lambda row, unit: text(value_of(row, name), unit)


class View(Protocol):
    """The numbers of one view, and the text and the tables that show them."""

    def lines(self) -> list[str]:
        """The text, times in the unit of the options. Names are escaped; no line holds a newline."""

    def sections(self) -> Sequence[Section]:
        """The tables, as the HTML page has them."""


def section_lines(sections: Iterable[Section], unit: str) -> list[str]:
    """The text of those that have any row, a blank line behind each."""
    return [line for one in sections if one.rows for line in (*one.lines(unit), "")]


def name_of(row: Any, name: str) -> str:
    """What the first column says of a row in place of a field: how many it stands for, or that it has no name."""
    remaining = getattr(row, "remaining", 0)
    if remaining:
        return f"(remaining {remaining})"
    return "(no name)" if name and value_of(row, name) == "" else ""


def value_of(row: Any, name: str) -> Any:
    """What a row says under a field, None where there is no such part of it."""
    value = row
    for part in name.split("."):
        if value is None:
            return None
        value = value[int(part)] if part.isdecimal() else getattr(value, part)
        value = value() if callable(value) else value
    return value


def kind_of(name: str) -> str:
    """What a field holds, as far as its name says it."""
    last = name.rpartition(".")[2]
    if last.endswith("_ns") or name in TIMES:
        return TIME
    if last.endswith("_bytes"):
        return SIZE
    if last == DEVICE:
        return DEVICE
    return RATIO if last in RATIOS or last.endswith("_ratio") else TEXT


def device_name(device: int | None) -> str:
    """What a device is called."""
    return MISSING if device is None else "CPU" if device == HOST else f"GPU {device}"


def mebibytes(size_bytes: float | None) -> str:
    """A size in MiB."""
    return compact(None if size_bytes is None else size_bytes / MIB, SIZE_ROOM)


def _plain(value: Any, unit: str) -> str:
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    return number(value) if isinstance(value, float) else safe(str(value))


TEXTS: Mapping[str, Text] = {
    TIME: in_unit,
    SIZE: lambda size_bytes, unit: mebibytes(size_bytes),
    RATIO: lambda ratio, unit: tenths(ratio, 1),
    DEVICE: lambda device, unit: device_name(device),
    TEXT: _plain,
}
