"""A page of a comparison: its tables, and an icicle of the call paths, without a script and without a network.

A box is a call path, as wide as the time after of the path and of all below it. Its colour is the change of like work.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from instrument.report.comparison import FASTER, GONE, NEW, SLOWER, Change, Comparison
from instrument.report.table import safe
from instrument.runtime import atomic

COLOURS = {SLOWER: "#e5776b", FASTER: "#6fa3d8", NEW: "#e5b567", GONE: "#b5bdc8"}
OTHER_COLOUR = "#dfe3e8"

MOST_LEVELS = 200
"""The most levels of calls on the page."""

STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem; color: #1b1f24; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .15rem .6rem; text-align: right; }
caption { color: #59626e; } .row { display: flex; } .box { overflow: hidden; white-space: nowrap; min-width: 0; }
.label { border: 1px solid #fff; padding: 0 .3rem; overflow: hidden; text-overflow: ellipsis; color: #14181d; }
"""


@dataclass
class _Box:
    """A call path with its change, if it has one, and the calls below it."""

    change: Change | None = None
    calls: dict[str, _Box] = field(default_factory=dict)

    def width(self) -> float:
        share = 0.0 if self.change is None else self.change.share_ratio
        return share + sum(box.width() for box in self.calls.values())


def write_page(path: str | os.PathLike[str], comparison: Comparison) -> Path:
    """Write the page. It appears complete or not at all."""
    top = _Box()
    for change in comparison.changes:
        box = top
        for name in change.path[:MOST_LEVELS]:
            box = box.calls.setdefault(name, _Box())
        box.change = change
    target, icicle = Path(path), "".join(_boxes(top, max(top.width(), 1e-9)))
    with atomic.replacing(target) as file:
        file.write(
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Comparison</title><style>{STYLE}</style>'
            f"{comparison._repr_html_()}<h4>Call paths after, by their time</h4>{icicle}".encode("utf-8", "replace")
        )
    return target


def _boxes(parent: _Box, whole: float) -> Iterator[str]:
    """Yield a row of the boxes of calls, each with the calls below it."""
    yield '<div class="row">'
    for name, box in sorted(parent.calls.items(), key=lambda item: (-item[1].width(), item[0])):
        change = box.change
        colour = OTHER_COLOUR if change is None else COLOURS.get(change.verdict, OTHER_COLOUR)
        text = "" if change is None else f": {change.verdict}, {change.change()} ({change.limits()})"
        label = escape(safe(f"{name}{text}"))
        yield f'<div class="box" style="width:{100 * box.width() / whole:.3f}%">'
        yield f'<div class="label" style="background:{colour}" title="{label}">{label}</div>'
        yield from _boxes(box, max(box.width(), 1e-9)) if box.calls else ()
        yield "</div>"
    yield "</div>"
