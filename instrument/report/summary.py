"""The summary: the views that are asked for, one after the other, and once what holds for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from instrument.profile import VIEWS
from instrument.report.copies import copies
from instrument.report.device import device
from instrument.report.events import events
from instrument.report.instrumentation import instrumentation
from instrument.spans import Cost, Trace
from instrument.tally import Tally

OF_SPANS: Mapping[str, Callable[..., str]] = {"device": device, "copies": copies}
"""The views that are made from spans, as they are held; `events` is made from the tally, which has counted all."""


def summary(
    views: Sequence[str],
    tally: Callable[[], Tally],
    trace: Callable[[], Trace],
    *,
    rows: int | None = None,
    cost: Cost | None = None,
    losses: Mapping[str, int] | None = None,
    notes: Sequence[str] = (),
    window_ns: int | None = None,
    recorder: str = "",
    **of_events: Any,
) -> str:
    """The views as one text, in the order asked, each once. `tally` and `trace` are called where a view reads them.

    `rows` bounds the tables of every view, `of_events` are more options of `events`. The others fill the section on
    the instrumentation, which stands in `events`, or at the end where that is not asked for. Raises `ValueError` for a
    view that there is not.
    """
    for view in views:
        if view not in VIEWS:
            raise ValueError(f"view is {view!r}; allowed: {', '.join(VIEWS)}")
    about: dict[str, Any] = {
        "cost": cost, "losses": losses or {}, "notes": notes, "window_ns": window_ns, "recorder": recorder,
    }  # fmt: skip
    held = trace() if any(view in OF_SPANS for view in views) else None
    texts = [
        events(tally(), rows=rows, **about, **of_events) if view == "events" else OF_SPANS[view](held, rows=rows)
        for view in dict.fromkeys(views)
    ]
    if "events" not in views:
        texts.append("\n".join(instrumentation(**about)))
    return "\n".join(text for text in texts if text)
