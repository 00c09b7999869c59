"""Text tables: cells are padded to columns, and numbers have four significant digits.

Control characters in names are escaped. The middle of a long name is replaced by `...`.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from itertools import pairwise
from operator import attrgetter
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, TypeVar

from instrument.recording.spans import Site
from instrument.report.view import UNITS, Options

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Line = TypeVar("Line")
Row = TypeVar("Row", bound="DataclassInstance")


GAP = 2
"""The minimum number of blanks between two cells of a line."""

LINE = 100
"""The maximum width of a printed line, in columns."""

DASHES = 25
"""The number of dashes on each side of a section's title."""

NAME_LEAST = 12
"""The minimum width of the names in a table, in columns."""

TEXT_LEAST = 32
"""The minimum width of a shortened text that is not a name, in columns."""

WHOLE_DIGITS = 14
"""The maximum number of digits of an integer that is printed without rounding."""

MARKS = ("Mn", "Me", "Cf")
"""The Unicode categories of characters that take no column, such as combining accents."""

MISSING = "-"
"""The cell for a value that does not exist, such as the mean of no calls."""


def printable(text: str) -> str:
    """Return the text with each unprintable character as an escape, such as `\\n`, `\\x1b` or `\\u202e`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def name_of_site(site: Site) -> str:
    return f"{site.name} ({site.instance})" if site.instance else site.name


def row_name(row: Any) -> str:
    return f"(remaining {row.remaining})" if row.remaining else printable(row.name) or "(no name)"


def code_location_of(site: Site) -> str:
    return site.function or (f"{site.file}:{site.line}" if site.file else "")


def measure_width(text: str) -> int:
    """Return the width of a text in terminal columns: two for a wide East Asian character, 0 for a combining mark."""
    if text.isascii():
        return len(text)
    return sum(map(_measure_char_width, text))


def _measure_char_width(char: str) -> int:
    if unicodedata.category(char) in MARKS:
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def shorten(text: str, limit: int) -> str:
    """Return the text in at most `limit` columns. The middle of a longer text is replaced by `...`."""
    if measure_width(text) <= limit:
        return text
    room = limit - 3
    if room < 1:
        return "..."[: max(limit, 0)]
    tail = room // 2
    end = len(text) - len(_cut_to_width(text[::-1], tail))
    while end < len(text) and not _measure_char_width(text[end]):
        end += 1
    return _cut_to_width(text, room - tail) + "..." + text[end:]


def shorten_distinctly(texts: Sequence[str], limit: int) -> list[str]:
    """Shorten texts to at most `limit` columns, so that different texts remain different. Similar texts lose their
    common beginning, or get numbers."""
    alike: dict[str, list[str]] = {}
    for text in dict.fromkeys(texts):
        alike.setdefault(shorten(text, limit), []).append(text)
    shown = {}
    for short, group in alike.items():
        shown.update(_shorten_to_differences(group, limit) if len(group) > 1 else {group[0]: short})
    uses = Counter[str]()
    for text, short in shown.items() if len(set(shown.values())) < len(shown) else ():
        uses[short] += 1
        number_of_it = f" ({uses[short]})"
        if uses[short] > 1 and len(number_of_it) < limit:
            shown[text] = shorten(short, limit - len(number_of_it)) + number_of_it
    return [shown[text] for text in texts]


def _shorten_to_differences(texts: Sequence[str], limit: int) -> dict[str, str]:
    shown = _cut_common_prefixes(texts, [_count_common_characters(texts)] * len(texts), limit)
    alike: dict[str, list[str]] = {}
    for text, short in shown.items():
        alike.setdefault(short, []).append(text)
    for group in alike.values():
        if len(group) > 1:
            group.sort()
            shared = [0, *map(_count_common_characters, pairwise(group)), 0]
            shown |= _cut_common_prefixes(group, list(map(max, shared, shared[1:])), limit)
    return shown


def _count_common_characters(texts: Sequence[str]) -> int:
    return len(commonprefix(texts))  # noqa: RUF071 - of texts, which are no paths


def _cut_common_prefixes(texts: Sequence[str], partings: Sequence[int], limit: int) -> dict[str, str]:
    shown = {}
    for text, parting in zip(texts, partings, strict=True):
        while 0 < parting < len(text) and not _measure_char_width(text[parting]):
            parting -= 1
        begin = _cut_to_width(text[:parting], limit // 4) + "..."
        remainder = text[parting:]
        shown[text] = begin + shorten(remainder, limit - measure_width(begin)) if remainder else shorten(text, limit)
    return shown


def _cut_to_width(text: str, limit: int) -> str:
    width = 0
    for index, char in enumerate(text):
        width += _measure_char_width(char)
        if width > limit:
            return text[:index]
    return text


def wrap_text(text: str) -> list[str]:
    """Return a text as lines of at most `LINE` columns. Continuation lines are indented. A word that is longer than a
    line is cut."""
    words = text.lstrip()
    indent = " " * (len(text) - len(words))
    lines, line = list[str](), indent
    for word in words.split(" "):
        if measure_width(line) + 1 + measure_width(word) <= LINE or line.isspace():
            line += " " * (line != indent and not line.isspace()) + word
        else:
            lines.append(line)
            line = f"{indent}  {word}"
        while measure_width(line) > LINE:
            first = _cut_to_width(line, LINE)
            lines.append(first)
            line = f"{indent}  {line[len(first) :]}"
    return [part.rstrip() for part in (*lines, line)]


def number_text(value: float | None) -> str:
    """Return a number with four significant digits. Integers keep all of their digits."""
    return compact_number(value, WHOLE_DIGITS)


def format_six_digits(value_ns: float | None, unit: str = "s") -> str:
    """Return a time with six significant digits. The profilers of fluid and SINGA print times in this format."""
    return MISSING if value_ns is None else f"{value_ns / UNITS[unit]:g}"


def format_time(value_ns: float | None, unit: str) -> str:
    """Return a time in a unit with four significant digits. Integers keep all of their digits."""
    if value_ns is None:
        return MISSING
    return number_text(round(value_ns) if unit == "ns" else value_ns / UNITS[unit])


def compact_number(value: float | None, room: int = 7, digits: int = 4) -> str:
    """Return a number with `digits` significant digits in at most `room` columns. Integers keep all digits that fit."""
    if value is None:
        return MISSING
    whole = abs(value) >= 10 ** (digits - 1) or value == int(value)
    for fewer in range(1 if whole else digits - 2):
        text = f"{value:.0f}" if whole else f"{value:.{digits - fewer}g}"
        if len(text) <= room and "e" not in text:
            return text
    for after_point in range(digits - 2, -1, -1):
        mantissa, _, exponent = f"{value:.{after_point}e}".partition("e")
        text = f"{mantissa.rstrip('0').rstrip('.') if after_point else mantissa}e{int(exponent)}"
        if len(text) <= room:
            break
    return text


def compute_share(part: float, base: float) -> float | None:
    return part / base if base else None


class Ratio(property):
    """A property that divides one field by another. It is None if a field is None or the divisor is zero."""

    def __init__(self, part: str, *, of: str) -> None:
        read_both = attrgetter(part, of)

        def ratio(row: Any) -> float | None:
            part, base = read_both(row)
            return None if part is None or base is None else compute_share(part, base)

        super().__init__(ratio)

    if TYPE_CHECKING:

        def __get__(self, instance: Any, owner: type | None = None, /) -> float | None:  # type: ignore[override]
            ...


def format_short_percent(part: float, base: float) -> str:
    fraction = compute_share(part, base)
    return MISSING if fraction is None else f"{number_text(100 * fraction)}%"


def format_percent(part: float | None, base: float) -> str:
    return MISSING if part is None or not base else f"{100 * (part / base):.1f}%"


def format_rough_percent(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{float(f'{100 * ratio:.2g}'):g}%"


def make_title_lines(text: str) -> list[str]:
    return ["", f"{'-' * 25}>{text:^26}<{'-' * 25}", ""]


def make_section_title_lines(text: str) -> list[str]:
    blanks, dashes = max(27 - measure_width(text), 0), "-" * DASHES
    return [f"{dashes}{' ' * (blanks // 2)}{text}{' ' * (blanks - blanks // 2)}{dashes}", ""]


def make_table_lines(header: Sequence[str], rows: Sequence[Sequence[str]], least_widths: Sequence[int]) -> list[str]:
    lines = [header, *rows]
    by_column = zip(least_widths, zip(*lines, strict=True), strict=True)
    widths = [max(least, max(map(measure_width, cells)) + GAP) for least, cells in by_column]
    padded = [
        [cell + " " * (width - measure_width(cell)) for cell, width in zip(line, widths, strict=True)] for line in lines
    ]
    return ["".join(cells).rstrip() for cells in padded]


def make_named_table_lines(header: Sequence[str], rows: Sequence[Sequence[str]], least_width: int) -> list[str]:
    """Return the lines of a table whose first column contains names. Long texts are shortened, so that a line fits into
    `LINE` columns."""
    escaped = [[printable(name) or "(no name)", *cells] for name, *cells in rows]
    widths = [max(least_width, max(map(measure_width, cells)) + GAP) for cells in zip(header, *escaped, strict=True)]
    for column, width in enumerate(widths[1:], 1):
        if (excess := sum(widths) - LINE) > 0 and width > TEXT_LEAST:
            widths[column] = max(width - excess, TEXT_LEAST)
            for cells in escaped:
                cells[column] = shorten(cells[column], widths[column] - GAP)
    room = max(LINE - sum(widths[1:]), NAME_LEAST) - GAP
    names = shorten_distinctly([name for name, *_ in escaped], room)
    fitting = [[name, *cells] for name, (_, *cells) in zip(names, escaped, strict=True)]
    return make_table_lines(header, fitting, [0, *widths[1:]])


def limit_rows(
    lines: Sequence[Line], options: Options, time_ns: Callable[[Line], int], make_rest: Callable[[Sequence[Line]], Line]
) -> tuple[Line, ...]:
    """Return the rows that the options allow, and one row for the omitted rows. `make_rest` makes that last row.
    `time_ns` returns the time of a row."""
    heavy = [line for line in lines if time_ns(line) >= options.least_ns][: options.row_limit]
    if len(heavy) == len(lines):
        return tuple(lines)
    shown = set(map(id, heavy))
    return (*heavy, make_rest([line for line in lines if id(line) not in shown]))


def make_row_summer(*sums: str) -> Callable[[Sequence[Any]], Any]:
    return partial(sum_omitted_rows, sums=sums)


def sum_omitted_rows(rows: Sequence[Row], sums: Sequence[str], **facts: Any) -> Row:
    """Return one row for all `rows`. The fields in `sums` are added up. `facts` sets other fields."""
    values = {field.name: "" if isinstance(getattr(rows[0], field.name), str) else None for field in fields(rows[0])}
    added = {name: sum(getattr(row, name) for row in rows) for name in sums}
    return type(rows[0])(**{**values, **added, "remaining": len(rows), **facts})
