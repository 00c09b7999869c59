"""Views as text: what tests make them of, and the files that say how each is laid out.

`GOLDEN_VIEWS=write python -m pytest tests -k layout` writes the files anew, on purpose; look at what changed in them.
"""

from __future__ import annotations

import os
from pathlib import Path

from tallies import Tally, made

from instrument.recording.spans import Origin
from instrument.report.section import View
from instrument.report.table import LINE, measure_width
from instrument.report.view import Recording
from instrument.trace.trace import Trace

FOLDER = Path(__file__).parent / "golden" / "views"


def text_of(view: View) -> str:
    """The view as a summary prints it."""
    return "\n".join(view.lines()).rstrip("\n") + "\n"


def of_tally(tally: Tally, window_ns: int | None = None) -> Recording:
    """A recording of which there is a tally and no span."""
    return Recording(lambda: made(tally), lambda: Trace(Origin(1, "shop", 0, 0), 0, 0, []), window_ns=window_ns)


def is_golden(name: str, text: str) -> bool:
    """Return True if the text is that of `golden/views/{name}.txt`, and no line of it is too wide."""
    assert [line for line in text.splitlines() if measure_width(line) > LINE] == []
    path = FOLDER / f"{name}.txt"
    if os.environ.get("GOLDEN_VIEWS") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    return True
