"""The last section of every report: what the instrumentation cost, what was not kept and what was not observed."""

from __future__ import annotations

from instrument.recording.spans import Cost
from instrument.report.table import number, percent, safe, section_title, wrapped
from instrument.report.view import Recording

COST = "Cost of "
"""The begin of a note on a cost, and not on something that was not observed."""


def instrumentation(recording: Recording) -> list[str]:
    """The section, empty where there is nothing to say. The window stands in where the cost does not know its own."""
    cost = recording.cost
    lines = [] if cost is None else [_cost_line(cost, recording.window_ns, recording.recorder)]
    lines += [f"Not kept: {count} ({safe(reason)})" for reason, count in recording.losses.items() if count]
    lines += [safe(note) if note.startswith(COST) else f"Not observed: {safe(note)}" for note in recording.notes]
    text = [part for line in lines for part in wrapped(line)]
    return [*section_title("Instrumentation"), *text, ""] if lines else []


def _cost_line(cost: Cost, window_ns: int | None, recorder: str) -> str:
    base_ns = cost.window_ns or window_ns or 0
    by = f", {safe(recorder)} recorder" if recorder else ""
    thread = f" and {number(cost.thread_ns / 1e9)} s on threads of its own" if cost.thread_ns else ""
    return (
        f"Cost of the instrumentation: {number(cost.total_ns / 1e9)} s "
        f"({cost.calls} calls x {number(cost.per_call_ns)} ns{thread}), "
        f"{percent(cost.total_ns, base_ns)} of the window of {number(base_ns / 1e9)} s{by}"
        f"{uncached(cost, base_ns)}"
    )


def uncached(cost: Cost, base_ns: int) -> str:
    """The other end of what it may have cost."""
    if cost.most_ns <= cost.total_ns:
        return ""
    return (
        f"; up to {number(cost.most_ns / 1e9)} s ({number(cost.cold_call_ns)} ns a call), "
        f"{percent(cost.most_ns, base_ns)}, as far as other work uses the processor's caches between the calls"
    )
